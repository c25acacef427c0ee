//! Plans a batch: complete plans are proposed, the simulator judges them, and the fastest is the plan.
//!
//! A proposal has no rule that says when it is any good: whatever is beside the mark in one batch is right in the next. [`PROPOSALS`] is all that there
//! are. What is proposed with fewer options is proposed with more as well, so an option more never makes a plan slower.

use super::alternative::Alternative;
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
use super::{apart, executor, mechanism};
use crate::program::{Engine, Program, Shape};
use crate::topology::Machine;
use std::sync::Arc;

/// The least gain for which threads move what the driver could: figures differ by a few per cent between hosts of the same kind, so a smaller gain is
/// as likely a loss.
const LEAST_GAIN: f64 = 0.02;

/// By how many times fewer chunks are worth a try where a batch has too many for the thread that issues them. On a path alone a chunk costs its
/// hand-over; in a batch of many pipelines, whose chunks are issued one by one, it keeps all others waiting.
const COARSER: [u32; 2] = [4, 2];

/// So near to what capacities allow transfers are not planned apart as well.
const NEAR: f64 = 1.02;

/// From which part of a plan's time on its chunks are too many: so much of it goes by until the last one is issued.
const MOSTLY_ISSUE: f64 = 0.25;

/// Plans a batch of transfers together. Pageable ends are moved by threads where the model finds that faster than the driver.
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
    // What is staged anywhere passes a slot of pinned memory as a whole.
    let chunk_bytes = Some(pageable::chunk_bytes(batch, options));
    let pinned = pageable::as_pinned(batch);
    // Each lane takes a ring of the staging memory. With fewer paths there are fewer lanes.
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

/// From which a plan is made.
pub(super) enum Origin {
    /// Direct paths, and such as pass one device, with why others are closed.
    Paths(Alternative, Vec<Option<Reason>>),
    /// Paths of all transfers, some of which pass several devices or are passed on by destinations, or that were planned apart.
    Transfers(Vec<TransferPlan>),
}

/// What has been proposed for a batch.
struct Proposed<'a> {
    selection: Selection<'a>,
    judge: Judge<'a, Origin>,
}

/// All that is proposed where copies over one device at most move a batch, in the order of what is played: a later one has to be faster.
const PROPOSALS: [fn(&mut Proposed<'_>) -> Result<(), PlanError>; 4] = [direct, several, by_turns, in_fewer_chunks];

/// The fastest of what is proposed for a batch whose pageable ends are left to the driver.
fn judged(machine: &Machine, batch: &[Shape], options: &Options) -> Result<Plan, PlanError> {
    check(machine, batch, options)?;
    // Of very many those alike are planned as one, in whatever order they stand.
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

/// Whether all goes from one device to another, directly, in no more time than two hand-overs take: the order of devices and transfers is of no weight.
fn is_plain(machine: &Machine, batch: &[Shape]) -> bool {
    let Some(first) = batch.first() else { return true };
    let Some(route) = machine.route(first.src_device, first.dst_device) else { return false };
    let bytes = batch.iter().map(|shape| shape.bytes as f64).sum::<f64>();
    let is_same = |shape: &Shape| (shape.src_device, shape.dst_device) == (first.src_device, first.dst_device);
    bytes / route.bandwidth < 2.0 * machine.costs().chunk_via_gpu && batch.iter().all(is_same)
}

/// The same of a batch in the order in which it stands.
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
        (Origin::Paths(alternative, closed), Some(selection)) => alternative.into_transfers(selection, closed),
        (Origin::Transfers(transfers), selection) => left_out(transfers, selection),
        (Origin::Paths(..), None) => Vec::new(),
    };
    let one_path = one_path.unwrap_or(seconds);
    Ok(Plan { transfers, program: Arc::new(program), options: *options, executor, threads: None, predicted: seconds, one_path })
}

/// Proposes to plan transfers that share no resource by themselves.
fn apart(machine: &Machine, batch: &[Shape], options: &Options, judge: &mut Judge<'_, Origin>) -> Option<()> {
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
        judge.offer(program, || Origin::Transfers(transfers));
    }
    Some(())
}

/// Where no copy goes stays so, but for devices that bytes now pass in a row.
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
    /// Proposes shares, the direct ones by each engine that may move them. Whether one of them is the best so far.
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
            if !seen.is_empty() && self.judge.is_beaten(mechanism::least(&self.selection, assignment, engine)) {
                continue;
            }
            let alternative = Alternative::new(&self.selection, assignment.clone(), engine);
            let ops: Vec<DirectOp> = alternative.launches.iter().map(|launch| launch.op.clone()).collect();
            if !seen.contains(&ops) {
                seen.push(ops);
                let program: Program = alternative.program(&self.selection)?;
                let closed = &self.selection.closed;
                is_best |= self.judge.offer(program, || Origin::Paths(alternative, closed.clone()));
            }
        }
        Ok(is_best)
    }
}

impl Proposed<'_> {
    /// Gives the candidates that the best so far leaves out the reasons for which they are closed now, or else `other`.
    fn give_reasons(&mut self, other: impl Fn(usize) -> Option<Reason>) {
        let Some(Origin::Paths(_, known)) = self.judge.best_mut().map(|best| &mut best.of) else { return };
        for (at, (known, own)) in known.iter_mut().zip(&self.selection.closed).enumerate() {
            if known.is_none() {
                *known = own.clone().or_else(|| other(at));
            }
        }
    }
}

/// One path for each transfer, by whatever may move it: plain copies, batched calls, kernels, or what costs say for each GPU.
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

/// Several paths over one device each, as the linear program divides bytes; the same without host memory, and through it alone.
fn several(proposed: &mut Proposed<'_>) -> Result<(), PlanError> {
    let options = proposed.selection.options;
    if !propose_paths(proposed, |_, _| None)? {
        return Ok(());
    }
    let Some(Origin::Paths(alternative, _)) = proposed.judge.best().map(|best| &best.of) else { return Ok(()) };
    let vias = || alternative.assignment.shares.iter().filter_map(|share| proposed.selection.candidates[share.candidate].via);
    let (by_host, by_gpu) = (vias().any(|via| via.is_host()), vias().any(|via| !via.is_host()));
    if by_host && by_gpu && options.tuned.is_none() {
        let closes = |name, host: bool| {
            move |selection: &Selection<'_>, at: usize| {
                selection.candidates[at].via.is_some_and(|via| via.is_host() == host).then_some(Reason::Slower(name))
            }
        };
        propose_paths(proposed, closes("host memory", true))?;
        propose_paths(proposed, closes("other GPUs", false))?;
    }
    Ok(())
}

/// Copies of a GPU that go to several others by one link take turns, which last as long as each other while each goes whole; other transfers have
/// several paths.
fn by_turns(proposed: &mut Proposed<'_>) -> Result<(), PlanError> {
    let Proposed { selection, .. } = &*proposed;
    let exits = mechanism::turns(selection);
    if exits.iter().all(|is_turn| !is_turn) || exits.iter().all(|is_turn| *is_turn) {
        return Ok(());
    }
    propose_paths(proposed, |selection, at| {
        let is_relay = selection.candidates[at].via.is_some();
        (is_relay && exits[selection.candidates[at].demand as usize]).then_some(Reason::Turns)
    })?;
    Ok(())
}

/// The same in fewer chunks, where issuing them is most of what the best plan takes.
fn in_fewer_chunks(proposed: &mut Proposed<'_>) -> Result<(), PlanError> {
    let options = proposed.selection.options;
    let Some(best) = proposed.judge.best() else { return Ok(()) };
    let issued = executor::issue(options, proposed.selection.machine.costs()) * best.program.ops.len() as f64;
    let is_staged = best.program.ops.iter().any(|op| !op.after.is_empty());
    let Origin::Paths(alternative, closed) = &best.of else { return Ok(()) };
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
        propose_paths(proposed, |_, _| None)?;
    }
    proposed.selection.coarser = 1;
    Ok(())
}

/// Proposes several paths, but for those that `closes` gives a reason to close. Whether it is the best so far.
fn propose_paths(proposed: &mut Proposed<'_>, closes: impl Fn(&Selection<'_>, usize) -> Option<Reason>) -> Result<bool, PlanError> {
    let without = proposed.judge.seconds();
    let Some(assignment) = proposed.selection.several_paths(without, closes) else {
        proposed.give_reasons(|_| None);
        return Ok(false);
    };
    if proposed.selection.options.tuned.is_some_and(|tuned| tuned.several) {
        proposed.judge.forget();
    }
    if proposed.offer_by_engines(&assignment)? {
        return Ok(true);
    }
    let seconds = proposed.judge.last();
    proposed.give_reasons(|_| Some(Reason::NotFaster { seconds, one_path: without }));
    Ok(false)
}
