//! Corrects the model's predictions for one copy size by times that were measured for other sizes between the same devices.
//!
//! If the model is wrong about a link, it is wrong by about the same factor at similar sizes. The errors measured at one size therefore
//! correct the predictions for other sizes, and the first copy of a new size already uses the right variant. If the model predicts equal
//! times in both directions, the errors of one direction also correct the predictions for the same size in the other direction.

use super::cache::{Cache, ShapeRequest};
use super::choosing::ModelErrors;
use super::kept::KeptTimes;

/// Largest ratio of two sizes at which measured times of one are used for the other. The time of a small copy is mostly latency, and that
/// of a large copy depends mostly on bandwidth, so the errors of the model differ.
const NEAR: u64 = 16;

/// Largest relative difference of predicted times at which both directions between two devices are considered equal.
const EQUAL: f64 = 0.02;

/// Returns the errors of the model that were measured at the nearest size between the same devices, in this run or in an earlier one.
/// Returns `None` if there are none, or if the request has several transfers. `predicted` contains the predicted times in seconds of the
/// variants of the plan for `shape`.
pub(super) fn model_errors(shape: &ShapeRequest, predicted: &[f64], cache: &Cache, kept: Option<&KeptTimes>) -> Option<ModelErrors> {
    let (pair, bytes) = (shape.of_any_size()?, shape.batch[0].bytes);
    let (opposite, is_equal) = (shape.reversed(), |ns: &u64, seconds: &f64| (*ns as f64 * 1e-9 / seconds - 1.0).abs() <= EQUAL);
    let here = cache.choices().into_iter().filter_map(|(of, choice)| {
        let is_same = || of.of_any_size().as_ref() == Some(&pair);
        let is_opposite = || of == opposite && choice.predicted.iter().zip(predicted).all(|(ns, seconds)| is_equal(ns, seconds));
        if is_same() || is_opposite() { Some((of.batch[0].bytes, choice.errors()?)) } else { None }
    });
    let earlier = kept.into_iter().flat_map(|kept| kept.errors(&pair));
    let ratio = |other: u64| bytes.max(other).div_ceil(bytes.min(other).max(1));
    // Among equally near sizes, `min_by_key` returns the first, so measurements of this run take precedence.
    let near = here.chain(earlier).filter(|(other, errors)| ratio(*other) <= NEAR && errors.len() == predicted.len());
    near.min_by_key(|(other, _)| ratio(*other)).map(|(_, errors)| errors)
}
