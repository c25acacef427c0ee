//! Detects that ranks enqueue steps of several node plans in different orders, which would be a deadlock.
//!
//! A step ends only after the neighbours have reached it too. If two ranks enqueue steps of two plans in one stream each, in different
//! orders, they wait for each other forever, although no call fails. So each rank publishes the stream position of a step ([`StepPlaces`])
//! before it enqueues the step. It then checks whether a neighbour has enqueued this step in front of a step that comes earlier on this
//! rank. If the orders of two ranks differ, at least one of the two ranks detects the difference.
//!
//! Orders that once agreed continue to agree until a rank changes its order. So the neighbours' positions are compared in detail only after
//! a change. For all other steps, the check costs a few loads from cache lines that no rank writes.

use crate::ipc::{PLACES, StepPlace, StepPlaces};
use crate::sync::{Mutex, lock};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Shared-memory tables of this rank and its neighbours for one node plan (plan that several ranks execute together). In these tables, each
/// rank publishes where in stream order it has enqueued each step (execution of the plan).
pub(super) struct PlanPlaces {
    /// Number, from 1, that identifies the plan among all plans of the node group.
    pub plan: u64,
    pub own: StepPlaces,
    /// Rank number of each neighbour, with the table in which that neighbour publishes where in stream order it has enqueued its steps. A
    /// neighbour is a rank that this rank waits for in each step and that also waits for this rank.
    pub neighbours: Vec<(u32, StepPlaces)>,
}

/// Pair of steps that a neighbour has enqueued in the opposite order. A step is one execution of a plan by several ranks.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Misorder {
    pub rank: u32,
    /// Number that identifies the plan whose step comes first on this rank and second on the neighbour. The field `step` is the number of
    /// that step.
    pub plan: u64,
    pub step: u64,
}

/// Record of the order in which this rank has enqueued steps. A step is one execution of a plan that several ranks execute together.
#[derive(Default)]
pub(super) struct StepOrder(Mutex<OrderState>);

#[derive(Default)]
struct OrderState {
    /// Number of communication steps of all plans that this rank has enqueued so far.
    number: u64,
    /// Number of streams that have been assigned an ID so far.
    names: u16,
    /// Streams in which communication steps were enqueued, keyed by stream ID.
    streams: HashMap<u64, StreamSteps>,
    /// Position, in stream order, of each plan's last communication step relative to the steps of other plans, keyed by plan number.
    patterns: HashMap<u64, StepPattern>,
}

struct StreamSteps {
    name: u16,
    /// Most recent step of each plan in this stream. A plan without recent steps in the stream has no entry.
    last: Vec<LastStep>,
}

struct LastStep {
    plan: Arc<PlanPlaces>,
    step: u64,
    number: u64,
}

struct StepPattern {
    stream: u16,
    /// Other plans in the stream: the number of each plan, and the difference between that plan's last step number and this plan's last
    /// step number.
    ahead: Vec<(u64, i64)>,
    /// Step number at which this plan last changed its stream or its order relative to other plans.
    changed: u64,
}

impl StepOrder {
    /// Records and publishes that step number `step` of `plan` is about to be enqueued in the stream with the ID `stream`. If a neighbour
    /// has a different order, withdraws the published position and returns an error. The caller must then not enqueue the step. Does
    /// nothing if the plan is [forgotten](StepOrder::forget).
    pub fn enqueue(&self, plan: &Arc<PlanPlaces>, step: u64, stream: u64) -> Result<(), Misorder> {
        let mut state = lock(&self.0);
        if plan.own.changed().is_none() {
            return Ok(());
        }
        let OrderState { number, names, streams, patterns } = &mut *state;
        *number += 1;
        let StreamSteps { name, last } = streams.entry(stream).or_insert_with(|| {
            *names = names.wrapping_add(1);
            StreamSteps { name: *names, last: Vec::new() }
        });
        // Neighbours do not keep the positions of older steps.
        last.retain(|one| *number - one.number < PLACES);
        let others = || last.iter().filter(|one| one.plan.plan != plan.plan);
        let ahead: Vec<(u64, i64)> = others().map(|one| (one.plan.plan, one.step.wrapping_sub(step) as i64)).collect();
        let is_changed = patterns.get(&plan.plan).is_none_or(|known| known.stream != *name || known.ahead != ahead);
        let changed = if is_changed { step } else { patterns.get(&plan.plan).map_or(step, |known| known.changed) };
        plan.own.tell(step, StepPlace { stream: *name, number: *number }, is_changed);
        for one in others() {
            let other_changed = patterns.get(&one.plan.plan).map_or(one.step, |known| known.changed);
            if let Some(rank) = misordered(plan, step, changed, one, other_changed) {
                plan.own.take_back(step);
                return Err(Misorder { rank, plan: one.plan.plan, step: one.step });
            }
        }
        patterns.insert(plan.plan, StepPattern { stream: *name, ahead, changed });
        match last.iter_mut().find(|one| one.plan.plan == plan.plan) {
            Some(one) => (one.step, one.number) = (step, *number),
            None => last.push(LastStep { plan: Arc::clone(plan), step, number: *number }),
        }
        Ok(())
    }

    /// Withdraws the published positions of the steps of a plan that is about to be destroyed, or whose further steps have unknown numbers.
    pub fn forget(&self, plan: &PlanPlaces) {
        let mut state = lock(&self.0);
        plan.own.end();
        state.patterns.remove(&plan.plan);
        for stream in state.streams.values_mut() {
            stream.last.retain(|one| one.plan.plan != plan.plan);
        }
        state.streams.retain(|_, stream| !stream.last.is_empty());
    }
}

/// Returns a neighbour that has enqueued two steps in one stream in the opposite order. This rank has first enqueued `before`, a step of
/// another plan, and then step number `step` of `plan`. Returns `None` if there is no such neighbour. `changed` and `before_changed` are
/// the numbers of the steps at which this rank last changed the order of `plan` and of the other plan.
fn misordered(plan: &PlanPlaces, step: u64, changed: u64, before: &LastStep, before_changed: u64) -> Option<u32> {
    let is_recent = |changed: u64, step: u64| changed + 1 >= step;
    let own_changed = is_recent(changed, step) || is_recent(before_changed, before.step);
    plan.neighbours.iter().find_map(|(rank, there)| {
        let (_, before_there) = before.plan.neighbours.iter().find(|(other, _)| other == rank)?;
        let changes = (there.changed()?, before_there.changed()?);
        if !own_changed && !is_recent(changes.0, step) && !is_recent(changes.1, before.step) {
            return None;
        }
        let (place, place_before) = (there.find(step)?, before_there.find(before.step)?);
        (place.stream == place_before.stream && place.number < place_before.number).then_some(*rank)
    })
}

impl fmt::Debug for StepOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepOrder").finish_non_exhaustive()
    }
}
