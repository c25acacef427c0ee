//! Tracks whether executions of plans on GPUs have finished.

use super::device::Mark;
use super::driver::{CUevent, Driver, OutsideCapture, call, code, lock};
use super::owner::Owner;
use super::streams::Start;
use super::timing::Timing;
use super::verify::Verdict;
use crate::backend::failed_waits::Behind;
use crate::backend::{BackendError, CompletionState, OpTimes, not_timed};
use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Completion of an execution. It refers to an event that is recorded in the caller's stream after the last copy of the execution.
#[derive(Debug)]
pub(super) struct Finished {
    // This field is declared before `owner`, so that it is dropped first. The event's pool lives in `owner`.
    mark: Mark,
    owner: Arc<dyn Owner>,
    gpu: usize,
    /// Unique number of the caller's stream, or `None` if the stream has none (see [`Start`]).
    stream: Option<u64>,
    /// Result of comparing the destinations with the sources. `None` if the comparison was not requested.
    verdict: Option<Arc<Verdict>>,
    timed: Mutex<Timed>,
    /// Waits for signals that precede the execution in its stream. If one of them has failed, the completion reports the failure.
    behind: Behind,
    /// True once a caller has found that the execution has finished.
    is_seen_done: AtomicBool,
}

/// State of the timestamps of an execution's operations. The timestamps are boxed, because nearly all executions have none.
#[derive(Debug)]
enum Timed {
    No,
    Enqueued(Box<Timing>),
    Read(Box<OpTimes>),
}

impl Finished {
    /// Creates the completion of an execution. `start` is the state of the caller's stream, and `mark` is an event of that stream's GPU.
    /// The caller must record the event.
    pub fn new(owner: Arc<dyn Owner>, mark: Mark, start: &Start, verdict: Option<Arc<Verdict>>) -> Finished {
        let &Start { gpu, number, ref behind } = start;
        let (timed, behind) = (Mutex::new(Timed::No), behind.clone());
        Finished { mark, owner, gpu, stream: number, verdict, timed, behind, is_seen_done: AtomicBool::new(false) }
    }

    /// Returns this completion for use by another execution, and resets it. `start` is the state of that execution's stream. Returns `None`
    /// in three cases: another reference to the completion exists, its event belongs to another GPU than the stream, or it has the result
    /// of a comparison. The caller must record the event.
    pub fn renewed(mut self: Arc<Finished>, start: &Start) -> Option<Arc<Finished>> {
        let end = Arc::get_mut(&mut self)?;
        if end.gpu != start.gpu || end.verdict.is_some() {
            return None;
        }
        end.stream = start.number;
        end.behind.clone_from(&start.behind);
        *end.is_seen_done.get_mut() = false;
        Some(self)
    }

    /// Attaches the timestamps of the execution's operations to the completion.
    pub fn time(&self, timing: Timing) {
        *lock(&self.timed) = Timed::Enqueued(Box::new(timing));
    }

    /// Returns the event that marks the end of the execution. The event is not reused before the completion is dropped.
    pub fn event(&self) -> CUevent {
        self.mark.event()
    }

    /// True if the execution was enqueued into the stream with the number `stream`. Later work of that stream is ordered after the
    /// execution. False if `stream` is `None`.
    pub fn is_in(&self, stream: Option<u64>) -> bool {
        stream.is_some() && stream == self.stream
    }

    fn verdict(&self) -> Result<(), BackendError> {
        self.verdict.as_ref().map_or(Ok(()), |verdict| verdict.result())
    }

    fn ask(&self, ask: impl FnOnce(&'static Driver) -> Result<bool, BackendError>) -> Result<bool, BackendError> {
        let gpus = self.owner.gpus();
        let driver = gpus.driver;
        let primary = gpus.primary(self.gpu)?;
        primary.check()?;
        let _outside = OutsideCapture::enter(driver);
        let _current = primary.enter()?;
        if !ask(driver)? {
            return Ok(false);
        }
        self.is_seen_done.store(true, Ordering::Release);
        self.verdict()?;
        Ok(true)
    }
}

impl CompletionState for Finished {
    fn is_done(&self) -> Result<bool, BackendError> {
        // SAFETY: The event comes from a pool. It belongs to this completion until the completion is dropped.
        self.ask(|driver| match unsafe { (driver.cuEventQuery)(self.event()) } {
            code::NOT_READY => Ok(false),
            code => driver.check("cuEventQuery", code).map(|()| true),
        })
    }

    fn is_known_done(&self) -> bool {
        // Making a stream wait for a completed event takes less time than querying the event, so no query is made here.
        self.is_seen_done.load(Ordering::Acquire)
    }

    fn wait(&self) -> Result<(), BackendError> {
        // SAFETY: The event comes from a pool. It belongs to this completion until the completion is dropped.
        self.ask(|driver| unsafe { call!(driver, cuEventSynchronize(self.event())) }.map(|()| true))?;
        self.owner.failed_waits().report_behind(&self.behind)
    }

    fn times(&self) -> Result<OpTimes, BackendError> {
        self.wait()?;
        let mut timed = lock(&self.timed);
        if let Timed::Enqueued(timing) = &*timed {
            // The timestamps are read now, and their events are destroyed. The completion itself may be kept for a long time, as the
            // completion of the last execution that used some staging memory.
            *timed = Timed::Read(Box::new(timing.read()?));
        }
        match &*timed {
            Timed::Read(times) => Ok((**times).clone()),
            _ => Err(not_timed()),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Completion of a captured execution. The execution does not run when it is captured, but at every launch of the graph.
#[derive(Debug)]
pub(super) struct Captured;

impl CompletionState for Captured {
    fn is_done(&self) -> Result<bool, BackendError> {
        Err(BackendError::NotSupported(
            "the execution was captured into a graph and runs when the graph is launched; wait for the stream of the launch".into(),
        ))
    }

    fn wait(&self) -> Result<(), BackendError> {
        self.is_done().map(drop)
    }

    fn is_captured(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
