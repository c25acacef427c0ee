//! Applies what was measured at one size to other sizes between the same devices.
//!
//! If the model is wrong about a link, it is wrong by about the same factor at similar sizes. The errors that the executions of one size
//! have shown therefore correct the predictions for other sizes, so that the first copy of a new size uses the right variant. If the model
//! predicts equal times in both directions, errors of one direction also correct predictions for the other.

use super::cache::{Cache, ShapeRequest};
use super::choosing::ModelErrors;
use super::kept::KeptTimes;

/// Largest ratio of two sizes at which measured times of one are used for the other. Small copies mostly cost latency, large copies
/// mostly bandwidth, so the model errs differently for them.
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
