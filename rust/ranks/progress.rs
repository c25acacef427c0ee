//! How far a rank has come in a plan, and how far the first of its neighbours has that left. A rank that has asked for a step which another
//! will not take part in waits in vain: so each says with its departure how many steps it has taken part in.

use crate::backend::{BackendError, Cause, Leave, LeftPlan, StepFate};
use crate::contexts::Error;
use crate::ipc::Departure;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Of one rank in one plan.
pub(super) struct Progress {
    /// The plan's number among those of its node, from 1.
    pub plan: u64,
    /// Steps that were asked for outside of captures.
    steps: AtomicU64,
    /// A step was captured: how often it runs is not known.
    is_captured: AtomicBool,
    /// Steps that the first who left has taken part in; `u64::MAX` while nobody has.
    last: AtomicU64,
    /// A rank has left because of a failure, or has left this one waiting.
    has_failed: AtomicBool,
    /// The first failure that has reached this rank.
    cause: OnceLock<Cause>,
    /// Whether this rank's steps are abandoned.
    pub fate: StepFate,
}

impl Progress {
    pub fn new(plan: u64) -> Progress {
        let [steps, last] = [0, u64::MAX].map(AtomicU64::new);
        let [is_captured, has_failed] = [false; 2].map(AtomicBool::new);
        Progress { plan, steps, is_captured, last, has_failed, cause: OnceLock::new(), fate: StepFate::default() }
    }

    /// Counts a step that is about to be enqueued: its number, from 1. Refuses one that another rank will not take part in.
    pub fn begin(&self, is_captured: bool) -> Result<u64, Error> {
        // Each side writes its own before it reads the other's, here and in `leave`, so one of the two sees what the other does.
        self.is_captured.fetch_or(is_captured, Ordering::SeqCst);
        let step = u64::from(!is_captured) + self.steps.fetch_add(u64::from(!is_captured), Ordering::SeqCst);
        let (last, has_failed) = (self.last.load(Ordering::SeqCst), self.has_failed());
        if step <= last && (last == u64::MAX || !is_captured) && !has_failed {
            return Ok(step);
        }
        self.take_back(is_captured);
        let plan = self.plan;
        let what = match (self.cause.get(), has_failed) {
            (Some(cause), _) => format!("node plan {plan} goes on no more: {cause}"),
            (None, true) => format!("an earlier step of node plan {plan} has failed on this rank"),
            (None, false) => format!("a rank has destroyed node plan {plan} after {last} steps"),
        };
        Err(BackendError::PeerGone(format!("{what}; destroy it here too")).into())
    }

    /// A step that was counted was not enqueued, or not as a whole.
    pub fn take_back(&self, is_captured: bool) {
        self.steps.fetch_sub(u64::from(!is_captured), Ordering::SeqCst);
    }

    /// What this rank says when it leaves.
    pub fn departure(&self, has_failed: bool) -> Departure {
        // How often a graph was launched is not known: as often as the others need, unless something has failed.
        let is_known = has_failed || !self.is_captured.load(Ordering::SeqCst);
        let steps = if is_known { self.steps.load(Ordering::SeqCst) } else { u64::MAX };
        Departure { steps, has_failed, cause: self.cause.get().copied(), ..Departure::default() }
    }

    /// Another rank leaves, of a process of this number; what this one says of it if it then waits in vain.
    pub fn leave(&self, rank: u32, departure: Departure, process: i32) -> Option<LeftPlan> {
        let Departure { steps, has_failed, order, has_ended, cause } = departure;
        self.last.fetch_min(steps, Ordering::SeqCst);
        // Whose waits have failed did not keep in step, and may have raised a flag again before it was taken.
        let own = self.steps.load(Ordering::SeqCst);
        let waits = has_failed || own > steps;
        self.has_failed.fetch_or(waits, Ordering::SeqCst);
        let why = match (has_ended, order) {
            (true, _) => Leave::Ended,
            (_, 1..) => Leave::Order(order),
            _ if has_failed => Leave::Failed(steps),
            _ => Leave::Destroyed(steps),
        };
        // Of one that has said nothing the steps are not known.
        let step = if has_ended { own } else { own.min(steps.saturating_add(1)) };
        let left = LeftPlan { plan: self.plan, step: step.max(1), rank, why, cause };
        if waits {
            let _ = self.cause.set(left.first(process));
        }
        waits.then_some(left)
    }

    /// This rank has begun a step that it does not end.
    pub fn fail(&self) {
        self.has_failed.store(true, Ordering::SeqCst);
    }

    /// Whether a failure of another rank has reached this one.
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
        assert!(refused.contains("node plan 2 after 4 steps"), "{refused}");
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
        // How often the graph ran is not known, unless it runs no more.
        assert_eq!((progress.departure(false), progress.departure(true)), (left(u64::MAX, false), left(1, true)));
        // Another that captures says as much, which holds nobody up.
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
        assert!(refused.contains("of which some had failed"), "{refused}");
    }
}
