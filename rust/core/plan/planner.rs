//! Plans a batch: proposes several complete plans and returns the plan with the shortest simulated time.

use super::alternative::Alternative;
use super::apart;
use super::candidates::{Reason, Rejection};
use super::canonical::Canonical;
use super::demand::MANY;
use super::judge::{Judge, Played};
use super::lower::DirectOp;
use super::options::{Options, Passing, PlanError, check};
use super::pageable;
use super::planned::{Plan, TransferPlan};
use super::selection::{Assignment, PathShare, Selection};
use super::staging::NoRoom;
use super::trees;
use crate::program::{Engine, Program, Shape};
use crate::topology::Machine;
use std::sync::Arc;

/// Smallest relative gain in modelled time for which CPU threads copy pageable memory in place of the driver. Times differ by a few per
/// cent between hosts of the same kind, so a smaller gain may be a loss in practice.
const LEAST_GAIN: f64 = 0.02;

/// Divisors of the number of chunks that are tried if a batch has too many chunks for the issuing thread. On a single path, a further chunk
/// costs one synchronisation. In a batch of many pipelines, whose chunks are issued one by one, it delays all other pipelines.
const COARSER: [u32; 2] = [4, 2];

/// If the best simulated time exceeds the lower bound of the time by more than this factor, the planner also tries to plan independent
/// transfers separately.
const NEAR: f64 = 1.02;

/// Smallest fraction of a plan's time, spent on issuing operations, for which the planner tries fewer chunks.
const MOSTLY_ISSUE: f64 = 0.25;

/// Plans all transfers of a batch together. Threads copy pageable memory if the model predicts that to be faster than copies by the driver.
pub fn plan(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Plan, PlanError> {
    let plain = judged(machine, batch, options);
    if !batch.iter().any(pageable::is_pageable) {
        return plain;
    }
    let mut plain = plain?;
    let by_driver = pageable::seconds_by_driver(machine, batch);
    (plain.predicted, plain.one_path) = (plain.predicted.max(by_driver), plain.one_path.max(by_driver));
    if options.threads == 0 {
        return Ok(plain);
    }
    // Each chunk that passes through a staging slot of a device also passes through one slot of pinned memory, so its size must fit both
    // slots.
    let chunk_bytes = Some(pageable::chunk_bytes(batch, options));
    let pinned = pageable::as_pinned(batch);
    // Each lane (internal stream) needs a ring of staging memory, so plans with fewer paths, and thus fewer lanes, are tried if rings do
    // not fit.
    let mut threaded = None;
    for max_paths in [options.max_paths, machine.gpu_count(), 2, 1].into_iter().filter(|most| *most <= options.max_paths) {
        let chunked = Options { chunk_bytes, relay_chunks: None, host_chunks: None, max_paths, ..*options };
        let pinned = judged(machine, &pinned, &chunked)?;
        threaded = pageable::through_threads(machine, batch, options, pinned);
        if threaded.is_some() {
            break;
        }
    }
    let gains = |threaded: &Plan| threaded.predicted <= plain.predicted * (1.0 - LEAST_GAIN);
    Ok(threaded.filter(gains).map_or(plain.clone(), |threaded| Plan { one_path: plain.one_path, ..threaded }))
}

/// Description of a proposed program. If the program is the fastest, the plan is created from this description.
pub(super) enum Basis {
    /// Direct paths and paths over one relay. The second value contains the reason why each candidate path is excluded, by the candidate's
    /// index; `None` if it is not excluded.
    Paths(Alternative, Vec<Option<Reason>>),
    /// Paths of each transfer. Some paths pass through several relays, or destinations forward the data, or the transfers were planned in
    /// separate groups.
    Transfers(Vec<TransferPlan>),
}

/// State of the planning of one batch: the candidate paths, and the judge that simulates proposed plans and keeps the fastest.
struct Proposed<'a> {
    selection: Selection<'a>,
    judge: Judge<'a, Basis>,
}

/// Function that proposes plans.
type Propose = fn(&mut Proposed<'_>) -> Result<(), PlanError>;

/// Functions that propose plans in which each path has at most one relay, in the order of their calls. A later plan replaces the best plan
/// only if it is faster.
const PROPOSALS: [Propose; 3] = [direct, several, in_fewer_chunks];

/// Returns the fastest proposed plan of a batch if the driver copies pageable memory. The plan does not depend on the numbers of the GPUs
/// or on the order of the transfers, except in very large batches.
fn judged(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Plan, PlanError> {
    check(machine, batch, options)?;
    // In very large batches, similar transfers are combined in any case, so the transfers are not sorted.
    if batch.len() > MANY || is_plain(machine, batch) {
        return best(machine, batch, options);
    }
    let canonical = Canonical::new(machine, batch, options);
    match best(&canonical.machine, &canonical.batch, &canonical.options) {
        Ok(plan) => Ok(canonical.restored(plan, batch, options)),
        Err(PlanError::Staging { transfer, staging_bytes, ring_bytes }) => {
            Err(PlanError::Staging { transfer: canonical.transfer(transfer), staging_bytes, ring_bytes })
        }
        Err(PlanError::NoRoute { transfer, is_free, .. }) => {
            let transfer = canonical.transfer(transfer);
            Err(PlanError::NoRoute { transfer, src: batch[transfer].src_device, dst: batch[transfer].dst_device, is_free })
        }
        Err(error) => Err(error),
    }
}

/// True if all transfers go directly from the same source device to the same destination device, and their data takes less time than two
/// synchronisations. The numbers of the devices and the order of the transfers then do not affect the plan.
fn is_plain(machine: &Machine, batch: &[Shape]) -> bool {
    let Some(first) = batch.first() else { return true };
    let Some(route) = machine.route(first.src_device, first.dst_device) else { return false };
    let bytes = batch.iter().map(|shape| shape.bytes as f64).sum::<f64>();
    let is_same = |shape: &Shape| (shape.src_device, shape.dst_device) == (first.src_device, first.dst_device);
    bytes / route.bandwidth < 2.0 * machine.costs().chunk_via_gpu && batch.iter().all(is_same)
}

/// Returns the fastest proposed plan of a batch. GPUs keep their numbers, and transfers keep their order.
fn best(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Plan, PlanError> {
    let mut judge = Judge::new(machine, batch, options);
    let selection = Selection::new(machine, batch, options);
    let mut error = None;
    let (mut selection, mut one_path) = (selection.map_err(|found| error = Some(found)).ok(), None);
    if let Some(open) = selection.take() {
        let mut proposed = Proposed { selection: open, judge };
        for (number, propose) in PROPOSALS.iter().enumerate() {
            propose(&mut proposed)?;
            if number == 0 {
                one_path = Some(proposed.judge.seconds());
            }
        }
        (selection, judge) = (Some(proposed.selection), proposed.judge);
    }
    let is_free = error.iter().all(|error| matches!(error, PlanError::NoRoute { .. }));
    let mut bound = 0.0;
    if options.max_paths > 1 && options.passing != Passing::Off && is_free {
        bound = trees::propose(machine, batch, options, &mut judge, |batch, options| best(machine, batch, options).ok());
    }
    if !judge.is_beaten(bound * NEAR) && is_free {
        apart(machine, batch, options, &mut judge);
    }
    let Some(Played { program, executor, seconds, of, .. }) = judge.into_best() else {
        return Err(error.unwrap_or(PlanError::OutOfMemory { bytes: 0 }));
    };
    let transfers = match (of, selection) {
        (Basis::Paths(alternative, closed), Some(selection)) => alternative.into_transfers(selection, closed),
        (Basis::Transfers(transfers), selection) => left_out(transfers, selection),
        (Basis::Paths(..), None) => Vec::new(),
    };
    let one_path = one_path.unwrap_or(seconds);
    Ok(Plan { transfers, program: Arc::new(program), options: *options, executor, threads: None, predicted: seconds, one_path })
}

/// Proposes a plan in which transfers that share no resource are planned separately. Returns `None` if the batch cannot be separated, if
/// measured corrections ([`Options::tuned`]) are active, or if a part has no plan.
fn apart(machine: &Machine, batch: &[Shape], options: &Options, judge: &mut Judge<'_, Basis>) -> Option<()> {
    let parts = apart::parts(machine, batch);
    if parts.len() < 2 || options.tuned.is_some() {
        return None;
    }
    let plan = |part: &Vec<u32>| {
        let shapes: Vec<Shape> = part.iter().map(|transfer| batch[*transfer as usize]).collect();
        best(machine, &shapes, options).ok()
    };
    let plans: Vec<Plan> = parts.iter().map(plan).collect::<Option<_>>()?;
    let (program, transfers) = apart::joined(batch, &parts, &plans);
    let has_room = machine.devices().all(|device| program.staging_bytes(device) <= options.staging_bytes);
    let busiest = trees::load(machine, &program, batch).into_iter().fold(0.0, f64::max);
    if has_room && !judge.is_beaten(busiest) {
        judge.offer(program, || Basis::Transfers(transfers));
    }
    Some(())
}

/// Adds the paths that have no route to the rejected paths of each transfer that has no rejected paths yet, and returns the plans of the
/// transfers. A path through a device is not added if data of the transfer passes through that device, for example as the first of several
/// relays.
fn left_out(mut transfers: Vec<TransferPlan>, selection: Option<Selection<'_>>) -> Vec<TransferPlan> {
    let Some(selection) = selection else { return transfers };
    for (plan, demand) in transfers.iter_mut().zip(&selection.demand_of) {
        let Some(demand) = demand.filter(|_| plan.rejected.is_empty()) else { continue };
        let is_passed = |rejection: &Rejection| {
            let passes = |device| plan.paths.iter().any(|path| path.via == Some(device) || path.earlier.contains(&device));
            rejection.via.is_some_and(passes)
        };
        let stays = |rejection: &&Rejection| rejection.reason == Reason::NoRoute && !is_passed(rejection);
        plan.rejected = Arc::new(selection.rejected[demand as usize].iter().filter(stays).cloned().collect());
    }
    transfers
}

impl Proposed<'_> {
    /// Proposes a division of the data once for each engine that may copy the parts on direct paths. Returns true if one of these plans is
    /// the fastest so far.
    fn offer_by_engines(&mut self, assignment: &Assignment) -> Result<bool, PlanError> {
        let engines: &[Engine] = match self.selection.options.engine {
            Engine::Auto => &[Engine::Auto, Engine::Stream, Engine::Batch, Engine::Kernel],
            Engine::Graph => &[Engine::Graph, Engine::Stream, Engine::Kernel],
            ref own => std::slice::from_ref(own),
        };
        let (mut seen, mut is_best): (Vec<Vec<DirectOp>>, bool) = (Vec::new(), false);
        let chunks = assignment.shares.iter().map(|share| u64::from(assignment.chunks(share))).sum::<u64>();
        if self.judge.is_too_much(2 * chunks) {
            return Ok(false);
        }
        for &engine in engines {
            let alternative = Alternative::new(&self.selection, assignment.clone(), engine);
            let ops: Vec<DirectOp> = alternative.launches.iter().map(|launch| launch.op.clone()).collect();
            if !seen.contains(&ops) {
                seen.push(ops);
                let program: Program = alternative.program(&self.selection)?;
                let closed = &self.selection.closed;
                is_best |= self.judge.offer(program, || Basis::Paths(alternative, closed.clone()));
            }
        }
        Ok(is_best)
    }
}

impl Proposed<'_> {
    /// Completes the reasons why the best plan so far excludes candidate paths. A candidate without a reason gets the reason for which it
    /// is excluded now. If it is not excluded now, it gets the result of `other` for its index.
    fn give_reasons(&mut self, other: impl Fn(usize) -> Option<Reason>) {
        let Some(Basis::Paths(_, known)) = self.judge.best_mut().map(|best| &mut best.of) else { return };
        for (at, (known, own)) in known.iter_mut().zip(&self.selection.closed).enumerate() {
            if known.is_none() {
                *known = own.clone().or_else(|| other(at));
            }
        }
    }
}

/// Proposes one path for each transfer. Direct paths are proposed with individual copies, with batched calls, with kernels, and with the
/// mechanism that the cost model selects for each GPU.
fn direct(proposed: &mut Proposed<'_>) -> Result<(), PlanError> {
    let Proposed { selection, .. } = proposed;
    let options = *selection.options;
    let no_room = |NoRoom { transfer, ring_bytes, .. }: NoRoom| {
        let staging_bytes = options.staging_bytes;
        PlanError::Staging { transfer: transfer as usize, staging_bytes, ring_bytes }
    };
    let assignment = selection.one_path().map_err(no_room)?;
    proposed.offer_by_engines(&assignment)?;
    Ok(())
}

/// Proposes several paths for each transfer, each over one relay at most. The linear program divides the data among them. If the best plan
/// then uses relays both in host memory and on GPUs, also proposes plans without host memory and plans without other GPUs.
fn several(proposed: &mut Proposed<'_>) -> Result<(), PlanError> {
    if !propose_paths(proposed, None)? || proposed.selection.options.tuned.is_some() {
        return Ok(());
    }
    let Some(Basis::Paths(alternative, _)) = proposed.judge.best().map(|best| &best.of) else { return Ok(()) };
    let vias = || alternative.assignment.shares.iter().filter_map(|share| proposed.selection.candidates[share.candidate].via);
    if vias().any(|via| via.is_host()) && vias().any(|via| !via.is_host()) {
        propose_paths(proposed, Some(true))?;
        propose_paths(proposed, Some(false))?;
    }
    Ok(())
}

/// Proposes several paths for each transfer. Returns true if the plan is the fastest so far. `closed` excludes paths: `Some(true)` those
/// through host memory, `Some(false)` those through other GPUs, `None` no path.
fn propose_paths(proposed: &mut Proposed<'_>, closed: Option<bool>) -> Result<bool, PlanError> {
    let without = proposed.judge.seconds();
    let Some(assignment) = proposed.selection.several_paths(without, closed) else {
        proposed.give_reasons(|_| None);
        return Ok(false);
    };
    let is_staged = |program: &Program| program.ops.iter().any(|op| !op.after.is_empty());
    let has_several = proposed.judge.best().is_some_and(|best| is_staged(&best.program));
    // Earlier plans with one path are discarded if several paths were measured to be faster.
    if proposed.selection.options.tuned.is_some_and(|tuned| tuned.several) && !has_several {
        proposed.judge.forget();
    }
    if proposed.offer_by_engines(&assignment)? {
        return Ok(true);
    }
    let seconds = proposed.judge.last();
    proposed.give_reasons(|_| Some(Reason::NotFaster { seconds, one_path: without }));
    Ok(false)
}

/// Proposes the best plan so far with fewer chunks, and several paths with fewer chunks, if issuing the operations is a large part of the
/// best plan's time. Proposes nothing if no operation waits for another, or if the options set the chunk size.
fn in_fewer_chunks(proposed: &mut Proposed<'_>) -> Result<(), PlanError> {
    let options = proposed.selection.options;
    let Some(best) = proposed.judge.best() else { return Ok(()) };
    let issued = options.issue(proposed.selection.machine.costs()) * best.program.ops.len() as f64;
    let is_staged = best.program.ops.iter().any(|op| !op.after.is_empty());
    let Basis::Paths(alternative, closed) = &best.of else { return Ok(()) };
    if !is_staged || options.chunk_bytes.is_some() || issued < MOSTLY_ISSUE * best.seconds {
        return Ok(());
    }
    let (shares, closed) = (alternative.assignment.shares.clone(), closed.clone());
    let unstaged = || shares.iter().map(|share| PathShare { ring: None, ..*share }).collect();
    for coarser in COARSER {
        proposed.selection.coarser = coarser;
        proposed.selection.closed = closed.clone();
        if let Ok(assignment) = proposed.selection.stage(unstaged()) {
            proposed.offer_by_engines(&assignment)?;
        }
        propose_paths(proposed, None)?;
    }
    proposed.selection.coarser = 1;
    Ok(())
}
