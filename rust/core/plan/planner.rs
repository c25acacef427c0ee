//! Plans a batch: one path for each transfer, or several if the model predicts that to be faster.

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

/// Smallest modelled relative gain for which several paths are used. Times differ by a few per cent between hosts of the same kind, so a
/// smaller gain may be a loss in practice.
pub(super) const LEAST_GAIN: f64 = 0.02;

/// Divisor of the number of chunks if a batch has too many for the issuing thread. On a single path, a further chunk costs one
/// synchronisation. In a batch of many pipelines, whose chunks are issued one by one, it delays all other pipelines.
const COARSER: u32 = 4;

/// Smallest modelled relative gain for which a plan has fewer chunks. It is larger than `LEAST_GAIN` because the simulator often predicts
/// less gain.
const LEAST_GAIN_COARSER: f64 = 0.05;

/// Fraction of a plan's time spent on issuing above which the planner tries fewer chunks.
const MOSTLY_ISSUE: f64 = 0.5;

/// Plans all transfers of a batch together. Threads copy pageable memory if the model predicts that to be faster than copies by the driver.
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
    // Data that is staged anywhere passes through a slot of pinned memory as a whole, so chunks must fit both.
    let chunk_bytes = Some(pageable::chunk_bytes(batch, options));
    let pinned = pageable::as_pinned(batch);
    // Each lane (internal stream) needs a ring of staging memory, so plans with fewer paths, and thus fewer lanes, are tried if rings do
    // not fit.
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

/// Returns a plan in which destinations with the same source, or several relays, forward data, if that is faster than `star`. Otherwise
/// returns `star`, the plan without forwarding.
fn passed_on(machine: &Machine, batch: &[Shape], options: &Options, star: Result<Plan, PlanError>) -> Result<Plan, PlanError> {
    let with = |groups: &[trees::SourceGroup], star: Option<&Plan>| {
        let rest: Vec<Shape> = trees::rest_of(batch, groups).into_iter().map(|transfer| batch[transfer as usize]).collect();
        if rest.is_empty() {
            return trees::plan(machine, batch, options, groups, None, star);
        }
        // In addition to the chunks of trees, the other transfers may have too many chunks, so both chunk counts are tried.
        let beside = |rest: Plan| trees::plan(machine, batch, options, groups, Some(&rest), star);
        let fine = plan_in_chunks(machine, &rest, options, 1).ok()?;
        let coarse = in_fewer_chunks(machine, &rest, options, &fine);
        [Some(fine), coarse].into_iter().flatten().filter_map(beside).min_by(|a, b| a.predicted.total_cmp(&b.predicted))
    };
    let may_pass_on = options.max_paths > 1 && options.passing != Passing::Off;
    let groups = trees::groups(batch, options);
    let unjoined = |groups, least| if may_pass_on { trees::with_unjoined(groups, machine, batch, least) } else { groups };
    let star = match star {
        // If no path over one relay connects two GPUs, a path over several relays may.
        Err(PlanError::NoRoute { .. }) => return with(&unjoined(groups, 1), None).map_or(star, Ok),
        Err(_) => return star,
        Ok(star) => star,
    };
    let best = if groups.is_empty() { star } else { with(&groups, Some(&star)).unwrap_or(star) };
    let many = groups.len();
    let groups = unjoined(groups, trees::LEAST_ALONE.max(options.min_bytes.unwrap_or(0)));
    Ok(if groups.len() > many { with(&groups, Some(&best)).unwrap_or(best) } else { best })
}

/// Plans a batch without threads: the driver copies pageable memory. Uses fewer chunks if that is faster.
fn plan_as_it_is(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Plan, PlanError> {
    let fine = plan_in_chunks(machine, batch, options, 1)?;
    let issued = executor::issue(options, machine.costs()) * fine.program.ops.len() as f64;
    if issued < MOSTLY_ISSUE * fine.predicted {
        return Ok(fine);
    }
    let gains = |coarse: &Plan| coarse.predicted <= fine.predicted * (1.0 - LEAST_GAIN_COARSER);
    Ok(in_fewer_chunks(machine, batch, options, &fine).filter(gains).unwrap_or(fine))
}

/// Returns a plan like `fine` with fewer chunks. Returns `None` if no operations wait for others, or if the caller has set the chunk size.
fn in_fewer_chunks(machine: &Machine, batch: &[Shape], options: &Options, fine: &Plan) -> Option<Plan> {
    let is_staged = fine.program.ops.iter().any(|op| !op.after.is_empty());
    if is_staged && options.chunk_bytes.is_none() { plan_in_chunks(machine, batch, options, COARSER).ok() } else { None }
}

/// Plans a batch without threads: the driver copies pageable memory. The options decide the chunks; otherwise each path has the number of
/// chunks that is best for it alone, divided by `coarser`.
///
/// According to the model, the plan is never slower than one path for each transfer. Several paths are used only if they are expected to be
/// at least 2 % faster, or if [`Tuned::several`](super::Tuned::several) reports that they were measured to be faster.
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
