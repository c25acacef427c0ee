//! Records the start and end times of the operations of an execution, by the clock of this machine.

use crate::backend::OpTimes;
use std::sync::OnceLock;
use std::time::Instant;

/// Start and end times of the operations of one execution. The thread that runs an operation writes its times once.
#[derive(Debug)]
pub(super) struct Times {
    enqueued: Instant,
    ops: Box<[OnceLock<(Instant, Instant)>]>,
}

impl Times {
    /// Creates a record for an execution of `ops` operations. All times are relative to the time of this call.
    pub(super) fn new(ops: usize) -> Times {
        Times { enqueued: Instant::now(), ops: (0..ops).map(|_| OnceLock::new()).collect() }
    }

    /// Runs operation `op` and records its start and end times.
    pub(super) fn note<T>(&self, op: u32, work: impl FnOnce() -> T) -> T {
        let begin = Instant::now();
        let done = work();
        // An operation runs once, so its times are not set yet.
        let _ = self.ops[op as usize].set((begin, Instant::now()));
        done
    }

    /// Returns the start and end times of all operations, relative to the time at which the execution was enqueued. Must be called after
    /// the last operation. Operations that were skipped because of an error have times of 0. All devices share one clock.
    pub(super) fn read(&self) -> OpTimes {
        let since = |at: Instant| at.saturating_duration_since(self.enqueued).as_secs_f64();
        let ops = self.ops.iter().map(|op| op.get().map_or((0.0, 0.0), |&(begin, end)| (since(begin), since(end)))).collect();
        OpTimes { ops, precision: 0.0 }
    }
}
