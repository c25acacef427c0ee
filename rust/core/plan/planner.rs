//! Plans a batch: one path for each transfer, or several where the model finds that faster.

use super::alternative::Alternative;
use super::candidates::Reason;
use super::options::{Options, Passing, PlanError, check};
use super::pageable;
use super::planned::Plan;
use super::selection::Selection;
use super::staging::NoRoom;
use super::trees;
use super::{executor, mechanism};
use crate::program::Shape;
use crate::topology::Machine;

/// The least gain for which several paths are taken. Figures differ by a few per cent between hosts of the same kind, so a smaller
/// modelled gain is as likely a loss.
pub(super) const LEAST_GAIN: f64 = 0.02;

/// Factors by which the number of chunks is reduced if a batch has too many for the issuing thread. On a single path a chunk costs one
/// synchronisation. In a batch of many pipelines, whose chunks are issued one by one, it delays all others.
const COARSER: u32 = 4;

/// The least modelled gain for which a plan has fewer: the simulator often sees less.
const LEAST_GAIN_COARSER: f64 = 0.05;

/// Fraction of a plan's time until the last chunk is issued, above which there are too many chunks.
const MOSTLY_ISSUE: f64 = 0.5;

/// Plans a batch of transfers together. Pageable ends are moved by threads where the model finds that faster than the driver.
pub fn plan(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Plan, PlanError> {
    let plain = plan_as_it_is(machine, batch, options);
    if !batch.iter().any(pageable::is_pageable) {
        return passed_on(machine, batch, options, plain);
    }
    let mut plain = plain?;
    let by_driver = pageable::seconds_by_driver(machine, batch);
    (plain.predicted, plain.one_path) = (plain.predicted.max(by_driver), plain.one_path.max(by_driver));
    if options.threads == 0 {
        return Ok(plain);
    }
    // What is staged anywhere passes a slot of pinned memory as a whole.
    let chunk_bytes = Some(pageable::chunk_bytes(batch, options));
    let pinned = pageable::as_pinned(batch);
    // Each lane takes a ring of the staging memory. With fewer paths there are fewer lanes.
    let mut threaded = None;
    for max_paths in [options.max_paths, machine.gpu_count(), 2, 1].into_iter().filter(|most| *most <= options.max_paths) {
        let chunked = Options { chunk_bytes, relay_chunks: None, host_chunks: None, max_paths, ..*options };
        let pinned = passed_on(machine, &pinned, &chunked, plan_as_it_is(machine, &pinned, &chunked))?;
        threaded = pageable::through_threads(machine, batch, options, pinned);
        if threaded.is_some() {
            break;
        }
    }
    let gains = |threaded: &Plan| threaded.predicted <= plain.predicted * (1.0 - LEAST_GAIN);
    Ok(threaded.filter(gains).map_or(plain.clone(), |threaded| Plan { one_path: plain.one_path, ..threaded }))
}

/// The plan in which bytes are passed on by destinations of the same source, or over several relays, where that is faster; else `star`, in which
/// none are.
fn passed_on(machine: &Machine, batch: &[Shape], options: &Options, star: Result<Plan, PlanError>) -> Result<Plan, PlanError> {
    let with = |groups: &[trees::SourceGroup], star: Option<&Plan>| {
        let rest: Vec<Shape> = trees::rest_of(batch, groups).into_iter().map(|transfer| batch[transfer as usize]).collect();
        if rest.is_empty() {
            return trees::plan(machine, batch, options, groups, None, star);
        }
        // Beside the chunks of trees those of the rest are soon too many.
        let beside = |rest: Plan| trees::plan(machine, batch, options, groups, Some(&rest), star);
        let fine = plan_in_chunks(machine, &rest, options, 1).ok()?;
        let coarse = in_fewer_chunks(machine, &rest, options, &fine);
        [Some(fine), coarse].into_iter().flatten().filter_map(beside).min_by(|a, b| a.predicted.total_cmp(&b.predicted))
    };
    let may_pass_on = options.max_paths > 1 && options.passing != Passing::Off;
    let groups = trees::groups(batch, options);
    let unjoined = |groups, least| if may_pass_on { trees::with_unjoined(groups, machine, batch, least) } else { groups };
    let star = match star {
        // Where no path over one relay joins two GPUs, several in a row may.
        Err(PlanError::NoRoute { .. }) => return with(&unjoined(groups, 1), None).map_or(star, Ok),
        Err(_) => return star,
        Ok(star) => star,
    };
    let best = if groups.is_empty() { star } else { with(&groups, Some(&star)).unwrap_or(star) };
    let many = groups.len();
    let groups = unjoined(groups, trees::LEAST_ALONE.max(options.min_bytes.unwrap_or(0)));
    Ok(if groups.len() > many { with(&groups, Some(&best)).unwrap_or(best) } else { best })
}

/// Plans a batch, its pageable ends left to the driver, by fewer chunks where that ends earlier.
fn plan_as_it_is(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Plan, PlanError> {
    let fine = plan_in_chunks(machine, batch, options, 1)?;
    let issued = executor::issue(options, machine.costs()) * fine.program.ops.len() as f64;
    if issued < MOSTLY_ISSUE * fine.predicted {
        return Ok(fine);
    }
    let gains = |coarse: &Plan| coarse.predicted <= fine.predicted * (1.0 - LEAST_GAIN_COARSER);
    Ok(in_fewer_chunks(machine, batch, options, &fine).filter(gains).unwrap_or(fine))
}

/// Returns `fine` with fewer chunks. `None` if no chunks wait for each other, or if the caller has set their size.
fn in_fewer_chunks(machine: &Machine, batch: &[Shape], options: &Options, fine: &Plan) -> Option<Plan> {
    let is_staged = fine.program.ops.iter().any(|op| !op.after.is_empty());
    if is_staged && options.chunk_bytes.is_none() { plan_in_chunks(machine, batch, options, COARSER).ok() } else { None }
}

/// Plans a batch, its pageable ends left to the driver, in chunks as the options have them, or `coarser` times fewer than is best
/// for each path alone.
///
/// Never slower than one path for each transfer, as far as the model knows: several paths are used only where they are expected
/// to gain 2 % or more over it, or where [`Tuned::several`](super::Tuned::several) says that they were measured to.
fn plan_in_chunks(machine: &Machine, batch: &[Shape], options: &Options, coarser: u32) -> Result<Plan, PlanError> {
    check(machine, batch, options)?;
    let mut selection = Selection::new(machine, batch, options, coarser)?;
    let no_room = |NoRoom { transfer, ring_bytes, .. }| {
        let staging_bytes = options.staging_bytes;
        PlanError::Staging { transfer: transfer as usize, staging_bytes, ring_bytes }
    };
    let one_path = Alternative::new(&selection, selection.one_path().map_err(no_room)?);
    let seconds = one_path.seconds;
    let measured = options.tuned.is_some_and(|tuned| tuned.several);
    let chosen = if !measured && mechanism::are_turns(machine, batch, &one_path.launches) {
        for (candidate, closed) in selection.candidates.iter().zip(&mut selection.closed) {
            *closed = candidate.via.map(|_| Reason::Turns);
        }
        one_path
    } else {
        match selection.several_paths(seconds).map(|several| Alternative::new(&selection, several)) {
            None => one_path,
            Some(several) if measured || several.seconds <= seconds * (1.0 - LEAST_GAIN) => several,
            Some(several) => {
                for share in &several.assignment.shares {
                    let reason = Reason::NotFaster { seconds: several.seconds, one_path: seconds };
                    selection.closed[share.candidate].get_or_insert(reason);
                }
                one_path
            }
        }
    };
    chosen.into_plan(selection, seconds)
}
