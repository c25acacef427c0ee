//! In which order this rank enqueues steps of node plans in its streams, held against that of its neighbours.
//!
//! A step ends when the neighbours have come to it too. So two ranks each of which enqueues steps of two plans in one stream, and not in the same
//! order, wait for each other for ever, though no call fails. Each rank therefore tells where in its streams a step stands ([`StepPlaces`]),
//! before it enqueues it, and then looks whether a neighbour has it before a step that is before it here. Of two ranks that differ one sees it.
//!
//! Orders that were found to agree go on agreeing for as long as nobody changes his: so neighbours are looked at in detail where somebody has, and
//! else a step costs a few loads from lines that nobody writes.

use crate::ipc::{PLACES, StepPlace, StepPlaces};
use crate::sync::{Mutex, lock};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Where the steps of one plan stand, here and at its neighbours.
pub(super) struct PlanPlaces {
    /// Its number among those of the node.
    pub plan: u64,
    pub own: StepPlaces,
    /// Those of the ranks that this one waits for in each step, and that wait for it.
    pub neighbours: Vec<(u32, StepPlaces)>,
}

/// Two steps that a neighbour has enqueued in another order.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Misorder {
    pub rank: u32,
    /// What comes before here, and there comes after.
    pub plan: u64,
    pub step: u64,
}

/// Of all plans of a node.
#[derive(Default)]
pub(super) struct StepOrder(Mutex<OrderState>);

#[derive(Default)]
struct OrderState {
    /// Steps so far.
    number: u64,
    /// Streams that were met.
    names: u16,
    /// Those with steps, by their number.
    streams: HashMap<u64, StreamSteps>,
    /// What each plan's last step came after.
    patterns: HashMap<u64, StepPattern>,
}

struct StreamSteps {
    name: u16,
    /// The last step of each plan.
    last: Vec<LastStep>,
}

struct LastStep {
    plan: Arc<PlanPlaces>,
    step: u64,
    number: u64,
}

struct StepPattern {
    stream: u16,
    /// Of each other plan in the stream how far its last step is ahead.
    ahead: Vec<(u64, i64)>,
    /// The last step at which that changed.
    changed: u64,
}

impl StepOrder {
    /// A step is about to be enqueued in a stream of this number. On an error it must not be, and was not told. Nothing is told once the plan is
    /// [forgotten](StepOrder::forget).
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
        // What is as old is not found at neighbours either.
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

    /// The plan is about to go, or its steps have no known numbers any more.
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

/// The neighbour, if there is one, that has enqueued this step in one stream before what comes before it here. Each plan comes with the last step at
/// which this rank has changed its order.
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
