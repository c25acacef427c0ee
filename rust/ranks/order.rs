//! Detects steps of node plans that ranks enqueue in different orders.
//!
//! A step ends only after the neighbours have reached it too. If two ranks enqueue steps of two plans in one stream each, in different
//! orders, they wait for each other forever, although no call fails. So each rank publishes the stream position of a step ([`StepPlaces`])
//! before it enqueues the step. It then checks that no neighbour has enqueued this step before another one that comes earlier on this rank.
//! If the orders of two ranks differ, at least one of them detects it.
//!
//! Orders that once agreed continue to agree until a rank changes its order. So the neighbours' positions are compared in detail only after
//! a change. Otherwise a step costs a few loads from cache lines that no rank writes.

use crate::ipc::{PLACES, StepPlace, StepPlaces};
use crate::sync::{Mutex, lock};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Stream positions of the steps of one plan, on this rank and on its neighbours.
pub(super) struct PlanPlaces {
    /// Number of the plan among the plans of the node.
    pub plan: u64,
    pub own: StepPlaces,
    /// Positions on the neighbours: the ranks that this one waits for in each step and that wait for it.
    pub neighbours: Vec<(u32, StepPlaces)>,
}

/// A pair of steps that a neighbour has enqueued in the opposite order.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Misorder {
    pub rank: u32,
    /// The step that comes first on this rank and second on the neighbour: its plan and step number.
    pub plan: u64,
    pub step: u64,
}

/// Enqueue order of the steps of all plans of a node, on this rank.
#[derive(Default)]
pub(super) struct StepOrder(Mutex<OrderState>);

#[derive(Default)]
struct OrderState {
    /// Number of steps enqueued so far.
    number: u64,
    /// Number of streams seen so far.
    names: u16,
    /// Streams that contain steps, by stream number.
    streams: HashMap<u64, StreamSteps>,
    /// State of the order in which each plan's last step was enqueued.
    patterns: HashMap<u64, StepPattern>,
}

struct StreamSteps {
    name: u16,
    /// Last step of each plan in this stream.
    last: Vec<LastStep>,
}

struct LastStep {
    plan: Arc<PlanPlaces>,
    step: u64,
    number: u64,
}

struct StepPattern {
    stream: u16,
    /// Distance from this plan's step number to the last step of each other plan in the stream.
    ahead: Vec<(u64, i64)>,
    /// Last step at which the stream or the distances changed.
    changed: u64,
}

impl StepOrder {
    /// Records and publishes that `step` is about to be enqueued in the stream with this number. On an error the caller must not enqueue
    /// the step, and its position is withdrawn. Does nothing if the plan is [forgotten](StepOrder::forget).
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
        // Neighbours do not keep positions of older steps either.
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

    /// Withdraws the positions of a plan that is about to be destroyed, or whose steps no longer have known numbers.
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

/// Returns the neighbour, if any, that has enqueued this step in one stream in front of `before`, which comes earlier on this rank.
/// `changed` and `before_changed` are the last steps of the two plans at which this rank changed its order.
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
