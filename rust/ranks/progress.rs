//! Counts the steps (executions) of a node plan (plan that several ranks execute together) on this rank, and records when another rank
//! stops executing the plan ("leaves" it). A rank that leaves reports the number of steps in which it has taken part. If this rank has
//! enqueued a later step, its wait can no longer complete.

use crate::backend::{BackendError, Cause, Leave, LeftPlan, StepFate};
use crate::contexts::Error;
use crate::ipc::Departure;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Progress of one plan on this rank: the number of steps that this rank has enqueued, and the reports of ranks that have stopped executing
/// the plan.
pub(super) struct Progress {
    /// Number, from 1, that identifies the plan among the plans of its node group.
    pub plan: u64,
    /// Number of communication steps of the plan that this rank has enqueued outside of stream captures.
    steps: AtomicU64,
    /// True once this rank has captured a communication step of the plan in a graph. The number of times that the captured step is executed
    /// is unknown.
    is_captured: AtomicBool,
    /// Smallest number of communication steps that any rank has reported when it stopped executing the plan. `u64::MAX` while no rank has
    /// stopped.
    last: AtomicU64,
    /// True if another rank has stopped executing the plan because of a failure, or while this rank waits for it.
    has_failed: AtomicBool,
    /// Cause of the first failure of another rank, as far as this rank knows.
    cause: OnceLock<Cause>,
    /// State that shows whether this rank has abandoned its steps of the plan, because another rank has exited or left the plan.
    pub fate: StepFate,
}

impl Progress {
    pub fn new(plan: u64) -> Progress {
        let [steps, last] = [0, u64::MAX].map(AtomicU64::new);
        let [is_captured, has_failed] = [false; 2].map(AtomicBool::new);
        Progress { plan, steps, is_captured, last, has_failed, cause: OnceLock::new(), fate: StepFate::default() }
    }

    /// Counts a step that is about to be enqueued, and returns its number, from 1. Returns an error if another rank will not execute that
    /// step.
    pub fn begin(&self, is_captured: bool) -> Result<u64, Error> {
        // This rank writes its own counter before it reads the other rank's report, here and in `leave`. The other rank does the same in
        // the opposite direction, so at least one of the two sees the other's value.
        self.is_captured.fetch_or(is_captured, Ordering::SeqCst);
        let step = u64::from(!is_captured) + self.steps.fetch_add(u64::from(!is_captured), Ordering::SeqCst);
        let (last, has_failed) = (self.last.load(Ordering::SeqCst), self.has_failed());
        if step <= last && (last == u64::MAX || !is_captured) && !has_failed {
            return Ok(step);
        }
        self.take_back(is_captured);
        let plan = self.plan;
        let what = match (self.cause.get(), has_failed) {
            (Some(cause), _) => format!("node plan {plan} (shared by the ranks of this node) cannot continue: {cause}"),
            (None, true) => format!("an earlier execution of node plan {plan} (shared by the ranks of this node) has failed on this rank"),
            (None, false) => format!("a rank has destroyed node plan {plan} (shared by the ranks of this node) after {last} executions"),
        };
        Err(BackendError::PeerGone(format!("{what}; destroy the plan on this rank too")).into())
    }

    /// Decrements the step counter after a step that was not enqueued, or not completely.
    pub fn take_back(&self, is_captured: bool) {
        self.steps.fetch_sub(u64::from(!is_captured), Ordering::SeqCst);
    }

    /// Returns the report that this rank sends when it stops executing the plan. `has_failed` is true if it stops because of a failure.
    pub fn departure(&self, has_failed: bool) -> Departure {
        // The number of launches of a graph is unknown. The report then allows the others any number of steps, unless something has failed.
        let is_known = has_failed || !self.is_captured.load(Ordering::SeqCst);
        let steps = if is_known { self.steps.load(Ordering::SeqCst) } else { u64::MAX };
        Departure { steps, has_failed, cause: self.cause.get().copied(), ..Departure::default() }
    }

    /// Records that rank `rank` with process id `process` has stopped executing the plan, with its report `departure`. Returns a
    /// description of the loss if this rank waits for that rank and the wait can no longer complete. Otherwise returns `None`.
    pub fn leave(&self, rank: u32, departure: Departure, process: i32) -> Option<LeftPlan> {
        let Departure { steps, has_failed, order, has_ended, cause, streams_go_on: _ } = departure;
        self.last.fetch_min(steps, Ordering::SeqCst);
        // If the waits of another rank were cancelled, that rank has not waited for this rank. It may have set a flag again before the flag
        // was reset.
        let own = self.steps.load(Ordering::SeqCst);
        let waits = has_failed || own > steps;
        self.has_failed.fetch_or(waits, Ordering::SeqCst);
        let why = match (has_ended, order) {
            (true, _) => Leave::Ended,
            (_, 1..) => Leave::Order(order),
            _ if has_failed => Leave::Failed(steps),
            _ => Leave::Destroyed(steps),
        };
        // The number of steps is unknown if the rank ended without a report.
        let step = if has_ended { own } else { own.min(steps.saturating_add(1)) };
        let left = LeftPlan { plan: self.plan, step: step.max(1), rank, why, cause };
        if waits {
            let _ = self.cause.set(left.first(process));
        }
        waits.then_some(left)
    }

    /// Records that this rank has begun a communication step that it will not finish.
    pub fn fail(&self) {
        self.has_failed.store(true, Ordering::SeqCst);
    }

    /// True if this rank knows that another rank has failed.
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(steps: u64, has_failed: bool) -> Departure {
        Departure { steps, has_failed, ..Departure::default() }
    }

    #[test]
    fn a_rank_waits_in_vain_for_one_that_left_earlier_and_for_no_other() {
        let progress = Progress::new(2);
        (1..=4).for_each(|step| assert_eq!(progress.begin(false).expect("nobody has left"), step));
        assert_eq!(
            (progress.leave(1, left(4, false), 41), progress.leave(1, left(7, false), 41), progress.has_failed()),
            (None, None, false)
        );
        let refused = progress.begin(false).expect_err("a fifth step").to_string();
        assert!(refused.contains("node plan 2 (shared by the ranks of this node) after 4 executions"), "{refused}");
        assert_eq!(progress.departure(false), left(4, false), "what was refused does not count");
        assert_eq!(
            progress.leave(1, left(3, false), 41),
            Some(LeftPlan { plan: 2, step: 4, rank: 1, why: Leave::Destroyed(3), cause: None })
        );
        assert!(progress.has_failed());
    }

    #[test]
    fn captured_steps_are_not_counted_and_refused_once_a_rank_has_left() {
        let progress = Progress::new(2);
        progress.begin(false).expect("nobody has left");
        progress.begin(true).expect("nobody has left");
        // The number of launches of the graph is unknown, unless the plan has failed, because the graph is then not launched again.
        assert_eq!((progress.departure(false), progress.departure(true)), (left(u64::MAX, false), left(1, true)));
        // A rank that has captured a step reports the maximum number of steps, which delays no other rank.
        assert_eq!(progress.leave(1, left(u64::MAX, false), 41), None);
        progress.begin(true).expect("nobody is known to have left");
        assert_eq!(progress.leave(1, left(1, false), 41), None);
        progress.begin(true).expect_err("the graph would wait");
    }

    #[test]
    fn after_a_failure_all_wait_in_vain() {
        let progress = Progress::new(2);
        assert_eq!(progress.leave(1, left(9, true), 41).map(|left| left.why), Some(Leave::Failed(9)));
        assert_eq!(progress.leave(1, Departure::ENDED, 41).map(|left| left.why), Some(Leave::Ended));
        assert!(progress.has_failed());
        let refused = progress.begin(false).expect_err("nobody knows what the other has raised").to_string();
        assert!(refused.contains("including failed ones"), "{refused}");
    }
}
