//! How far a rank has come in a plan, and how far the first of its neighbours has that left. A rank that has asked for a step which another
//! will not take part in waits in vain: so each says with its departure how many steps it has taken part in.

use super::super::error::Error;
use crate::backend::BackendError;
use crate::ipc::Departure;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Of one rank in one plan.
pub(super) struct Progress {
    /// Steps that were asked for outside of captures.
    steps: AtomicU64,
    /// A step was captured: how often it runs is not known.
    is_captured: AtomicBool,
    /// Steps that the first who left has taken part in; `u64::MAX` while nobody has.
    last: AtomicU64,
    /// A rank has left because of a failure, or has left this one waiting.
    has_failed: AtomicBool,
}

impl Progress {
    pub fn new() -> Progress {
        let [steps, last] = [0, u64::MAX].map(AtomicU64::new);
        Progress { steps, is_captured: AtomicBool::new(false), last, has_failed: AtomicBool::new(false) }
    }

    /// Counts a step that is about to be enqueued; refuses one that another rank will not take part in.
    pub fn begin(&self, is_captured: bool) -> Result<(), Error> {
        // Each side writes its own before it reads the other's, here and in `leave`, so one of the two sees what the other does.
        self.is_captured.fetch_or(is_captured, Ordering::SeqCst);
        let step = u64::from(!is_captured) + self.steps.fetch_add(u64::from(!is_captured), Ordering::SeqCst);
        let (last, has_failed) = (self.last.load(Ordering::SeqCst), self.has_failed());
        if step <= last && (last == u64::MAX || !is_captured) && !has_failed {
            return Ok(());
        }
        self.take_back(is_captured);
        let what = match has_failed {
            true => "a rank of this node plan has ended, or has destroyed it after a failure".into(),
            false => format!("a rank has destroyed this node plan after {last} steps"),
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
        Departure { steps: if is_known { self.steps.load(Ordering::SeqCst) } else { u64::MAX }, has_failed }
    }

    /// Another rank leaves; whether this one then waits in vain.
    pub fn leave(&self, departure: Departure) -> bool {
        let Departure { steps, has_failed } = departure;
        self.last.fetch_min(steps, Ordering::SeqCst);
        // Whose waits have failed did not keep in step, and may have raised a flag again before it was taken.
        let waits = has_failed || self.steps.load(Ordering::SeqCst) > steps;
        self.has_failed.fetch_or(waits, Ordering::SeqCst);
        waits
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
        Departure { steps, has_failed }
    }

    #[test]
    fn a_rank_waits_in_vain_for_one_that_left_earlier_and_for_no_other() {
        let progress = Progress::new();
        (0..4).for_each(|_| progress.begin(false).expect("nobody has left"));
        assert!(!progress.leave(left(4, false)) && !progress.leave(left(7, false)) && !progress.has_failed());
        let refused = progress.begin(false).expect_err("a fifth step").to_string();
        assert!(refused.contains("after 4 steps"), "{refused}");
        assert_eq!(progress.departure(false), left(4, false), "what was refused does not count");
        assert!(progress.leave(left(3, false)) && progress.has_failed());
    }

    #[test]
    fn captured_steps_are_not_counted_and_refused_once_a_rank_has_left() {
        let progress = Progress::new();
        progress.begin(false).expect("nobody has left");
        progress.begin(true).expect("nobody has left");
        // How often the graph ran is not known, unless it runs no more.
        assert_eq!((progress.departure(false), progress.departure(true)), (left(u64::MAX, false), left(1, true)));
        // Another that captures says as much, which holds nobody up.
        assert!(!progress.leave(left(u64::MAX, false)));
        progress.begin(true).expect("nobody is known to have left");
        assert!(!progress.leave(left(1, false)));
        progress.begin(true).expect_err("the graph would wait");
    }

    #[test]
    fn after_a_failure_all_wait_in_vain() {
        let progress = Progress::new();
        assert!(progress.leave(left(9, true)) && progress.has_failed());
        let refused = progress.begin(false).expect_err("nobody knows what the other has raised").to_string();
        assert!(refused.contains("has ended"), "{refused}");
    }
}
