//! When the operations of one execution ran, by the clock of this machine.

use crate::backend::OpTimes;
use std::sync::OnceLock;
use std::time::Instant;

/// Begin and end of each operation. Each is written once, by the thread that runs the operation.
#[derive(Debug)]
pub(super) struct Times {
    enqueued: Instant,
    ops: Box<[OnceLock<(Instant, Instant)>]>,
}

impl Times {
    /// For a program of so many operations that is enqueued now.
    pub(super) fn new(ops: usize) -> Times {
        Times { enqueued: Instant::now(), ops: (0..ops).map(|_| OnceLock::new()).collect() }
    }

    /// Does the work of an operation.
    pub(super) fn note(&self, op: u32, work: impl FnOnce()) {
        let begin = Instant::now();
        work();
        // An operation runs once, so this is the first value.
        let _ = self.ops[op as usize].set((begin, Instant::now()));
    }

    /// Called when all have run; those that an error has kept from running count as 0 to 0. All devices share one clock.
    pub(super) fn read(&self) -> OpTimes {
        let since = |at: Instant| at.saturating_duration_since(self.enqueued).as_secs_f64();
        let ops = self.ops.iter().map(|op| op.get().map_or((0.0, 0.0), |&(begin, end)| (since(begin), since(end)))).collect();
        OpTimes { ops, precision: 0.0 }
    }
}
