//! Records the times of an execution's operations by the clock of this machine.

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
    /// Creates a record for a program of `ops` operations that is enqueued now.
    pub(super) fn new(ops: usize) -> Times {
        Times { enqueued: Instant::now(), ops: (0..ops).map(|_| OnceLock::new()).collect() }
    }

    /// Runs an operation and records its begin and end.
    pub(super) fn note<T>(&self, op: u32, work: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let done = work();
        // An operation runs once, so the value is not set yet.
        let _ = self.ops[op as usize].set((begin, Instant::now()));
        done
    }

    /// Returns the times after the last operation. For operations that were skipped because of an error, begin and end are 0. All devices
    /// share one clock.
    pub(super) fn read(&self) -> OpTimes {
        let since = |at: Instant| at.saturating_duration_since(self.enqueued).as_secs_f64();
        let ops = self.ops.iter().map(|op| op.get().map_or((0.0, 0.0), |&(begin, end)| (since(begin), since(end)))).collect();
        OpTimes { ops, precision: 0.0 }
    }
}
