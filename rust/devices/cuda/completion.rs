//! When an execution has finished.

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

/// The end of an execution: an event behind its last copy in the caller's stream.
#[derive(Debug)]
pub(super) struct Finished {
    // Before `owner`, in which its pool lives.
    mark: Mark,
    owner: Arc<dyn Owner>,
    gpu: usize,
    /// The caller's stream, where it is known apart from all others ([`Start`]).
    stream: Option<u64>,
    /// What comparing bytes has found, where that was asked for.
    verdict: Option<Arc<Verdict>>,
    timed: Mutex<Timed>,
    /// What the stream was behind when it was enqueued.
    behind: Behind,
    /// Whether somebody has seen it done.
    is_seen_done: AtomicBool,
}

/// Timestamps of the operations, where those were asked for. Boxed, because nearly all executions have none.
#[derive(Debug)]
enum Timed {
    No,
    Enqueued(Box<Timing>),
    Read(Box<OpTimes>),
}

impl Finished {
    /// The end of an execution from `start`, for which `mark` stands: one of the GPU of its stream.
    pub fn new(owner: Arc<dyn Owner>, mark: Mark, start: &Start, verdict: Option<Arc<Verdict>>) -> Finished {
        let &Start { gpu, number, ref behind } = start;
        let (timed, behind) = (Mutex::new(Timed::No), behind.clone());
        Finished { mark, owner, gpu, stream: number, verdict, timed, behind, is_seen_done: AtomicBool::new(false) }
    }

    /// Makes it that of another execution, which is still to be recorded, if nobody else has it and its event is of the right GPU.
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

    /// It was timed.
    pub fn time(&self, timing: Timing) {
        *lock(&self.timed) = Timed::Enqueued(Box::new(timing));
    }

    /// Stands for the end until the completion is dropped.
    pub fn event(&self) -> CUevent {
        self.mark.event()
    }

    /// Whether what is enqueued into this stream comes after it anyway.
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
        // SAFETY: an event of the pool, which is this completion's until it is dropped.
        self.ask(|driver| match unsafe { (driver.cuEventQuery)(self.event()) } {
            code::NOT_READY => Ok(false),
            code => driver.check("cuEventQuery", code).map(|()| true),
        })
    }

    fn is_known_done(&self) -> bool {
        // Making a stream wait for an event that has passed takes the driver a fraction of what asking for it takes.
        self.is_seen_done.load(Ordering::Acquire)
    }

    fn wait(&self) -> Result<(), BackendError> {
        // SAFETY: as above.
        self.ask(|driver| unsafe { call!(driver, cuEventSynchronize(self.event())) }.map(|()| true))?;
        self.owner.failed_waits().report_behind(&self.behind)
    }

    fn times(&self) -> Result<OpTimes, BackendError> {
        self.wait()?;
        let mut timed = lock(&self.timed);
        if let Timed::Enqueued(timing) = &*timed {
            // The timestamps go with the timing: a completion may be kept for long, as the last user of staging memory.
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

/// The end of an execution that was captured: it has not run, and runs whenever the graph is launched.
#[derive(Debug)]
pub(super) struct Captured;

impl CompletionState for Captured {
    fn is_done(&self) -> Result<bool, BackendError> {
        Err(BackendError::NotSupported(
            "the execution was captured into a graph and runs when that is launched; wait for the stream of the launch".into(),
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
