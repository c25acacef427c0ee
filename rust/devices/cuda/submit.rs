//! Submits executions to the driver.
//!
//! [`Core::submit`] determines the GPU of the caller's stream and whether the stream is being captured. If it is, the copies become part of
//! the captured graph, which gets its own staging memory. Otherwise, the copies are one graph launch (module `graph`) if the plan requests
//! it, or operations on streams (module `stream`). An event after the copies marks the end of the execution (module `completion`).

use super::capture::capture_rings;
use super::completion::{Captured, Finished};
use super::driver::{OutsideCapture, call, handle};
use super::owner::Owner;
use super::parts::Core;
use super::streams::Start;
use super::timing::Timing;
use super::verify::Verdict;
use super::workers::{Divided, by_threads};
use crate::backend::{BackendError, Completion, Execution, PlanState, Report};
use crate::plan::Engine;
use std::sync::Arc;

impl Core {
    /// Enqueues an execution. Implements [`Backend::submit`](crate::backend::Backend::submit).
    pub fn submit(self: &Arc<Core>, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError> {
        if execution.program.lanes.len() > 1 {
            self.gpus.check_alive()?;
        }
        let (start, is_capturing) = self.start_in(execution)?;
        let _current = self.gpus.peered(start.gpu)?.enter()?;
        let own;
        let state = match execution.state {
            Some(state) => state,
            None => {
                own = PlanState::default();
                &own
            }
        };
        if is_capturing.map_or_else(|| self.gpus.driver.is_capturing(handle(execution.stream.0)), Ok)? {
            self.capture(execution, &start, state)
        } else {
            self.enqueue(execution, &start, state)
        }
    }

    /// Creates resources that the first execution of a plan would otherwise create. Implements
    /// [`Backend::prepare`](crate::backend::Backend::prepare).
    pub fn prepare(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        self.gpus.check_alive()?;
        let found = self.streams.find(&self.gpus, execution.stream)?;
        let primary = self.gpus.peered(found.gpu)?;
        let _current = primary.enter()?;
        let own = PlanState::default();
        let state = execution.state.unwrap_or(&own);
        let divided = Divided::of(execution, found.gpu, state);
        let execution = &Execution { program: divided.as_ref().map_or(execution.program, |divided| &divided.streams), ..*execution };
        let is_capturing = found.is_capturing.map_or_else(|| self.gpus.driver.is_capturing(handle(execution.stream.0)), Ok)?;
        // The pool contains at least two events afterwards. A later execution uses them for its start and its end, or two successive graph
        // launches use them for their ends.
        let _ends = [primary.mark()?, primary.mark()?];
        let _outside = OutsideCapture::enter(self.gpus.driver);
        let is_graph = execution.engine == Engine::Graph && !is_capturing;
        if is_graph && self.prepare_graph(execution, found.gpu, state)? { Ok(()) } else { self.prepare_lanes(execution, found.gpu, state) }
    }

    /// Returns the state of an execution's stream, and a boolean that is true if the stream is being captured. The boolean is `None` if it
    /// is unknown whether the stream is being captured.
    fn start_in(&self, execution: &Execution<'_>) -> Result<(Start, Option<bool>), BackendError> {
        let found = self.streams.find(&self.gpus, execution.stream)?;
        Ok((Start { gpu: found.gpu, number: found.number, behind: self.behind(execution.stream, &found) }, found.is_capturing))
    }

    /// Enqueues an execution in a stream that is not being captured, and records its end if requested.
    fn enqueue(self: &Arc<Core>, execution: &Execution<'_>, start: &Start, state: &PlanState) -> Result<Option<Completion>, BackendError> {
        let mut timing = if execution.report == Report::Times { Some(Timing::new(self.clone(), start.gpu)) } else { None };
        self.come_after(execution, start)?;
        if let Some(timing) = &mut timing {
            timing.start(execution.stream.0)?;
        }
        let divided = Divided::of(execution, start.gpu, state);
        let is_graph = execution.engine == Engine::Graph && timing.is_none() && divided.is_none() && !execution.program.ops.is_empty();
        let launched = if is_graph { self.launch_graph(execution, start, state)? } else { None };
        let is_long = launched.is_none() && execution.program.ops.len() > 1;
        let _turn = is_long.then(|| self.turns.take(execution.stream, start.gpu, start.number));
        let mut threads = None;
        if let Some(divided) = &divided {
            threads = Some(self.enqueue_threads(execution, start, state, divided)?);
        } else if launched.is_none() {
            self.enqueue_lanes(execution, start.gpu, state, false, &mut timing, None)?;
        }
        let end = self.end(execution, start, launched, threads).inspect_err(|_| {
            let _outside = OutsideCapture::enter(self.gpus.driver);
            // SAFETY: The caller passes a valid stream. It is synchronized because the caller may free the buffers after the error, so no
            // work on them may remain.
            unsafe { (self.gpus.driver.cuStreamSynchronize)(handle(execution.stream.0)) };
        })?;
        if let (Some(end), Some(timing)) = (&end, timing) {
            end.time(timing);
        }
        Ok(end.map(|end| end as Completion))
    }

    /// Enqueues the operations of a program that streams execute, and passes the other copies to the copy threads. If a copy of a thread
    /// fails, the returned object will contain the error. During the call, no other thread may enqueue into the stream, so that threads and
    /// streams process the executions of a stream in the same order.
    fn enqueue_threads(
        &self,
        execution: &Execution<'_>,
        start: &Start,
        state: &PlanState,
        divided: &Arc<Divided>,
    ) -> Result<Arc<Verdict>, BackendError> {
        if execution.report == Report::Times {
            let why =
                "an execution in which CPU threads copy pageable memory cannot be timed operation by operation; set MPGPU_HOST_THREADS=0";
            return Err(BackendError::NotSupported(why.into()));
        }
        let stream = handle(execution.stream.0);
        let job = self.workers.job(&self.gpus, execution, start, divided)?;
        let own = Execution { program: &divided.streams, ..*execution };
        // The job starts first, so that threads already fill staging slots while the operations are enqueued.
        self.workers.start(&job)?;
        let gpus = &self.gpus;
        let wait = |word: Option<u64>| gpus.wait_for_threads(stream, word.into_iter(), job.value);
        let enqueued = gpus
            .tell_threads(stream, job.begin(), job.value)
            .and_then(|()| wait(divided.writes_rings.then(|| job.granted())))
            .and_then(|()| self.enqueue_lanes(&own, start.gpu, state, false, &mut None, Some((&job, divided))))
            .and_then(|()| wait(divided.has_end.then(|| job.end())))
            .and_then(|()| gpus.tell_threads(stream, job.over(), job.value));
        if let Err(error) = enqueued {
            job.cancel();
            // SAFETY: The caller passes a valid stream. It is synchronized because no work on the buffers may remain after an error.
            unsafe { (self.gpus.driver.cuStreamSynchronize)(stream) };
            self.workers.abandon(&job);
            return Err(error);
        }
        Ok(job.verdict.clone())
    }

    /// Enqueues the work that follows the copies: the comparison of destinations with sources, if requested, and the event that marks the
    /// end of the execution. A graph launch needs no further event, because it has recorded one itself.
    fn end(
        self: &Arc<Core>,
        execution: &Execution<'_>,
        start: &Start,
        launched: Option<Arc<Finished>>,
        threads: Option<Arc<Verdict>>,
    ) -> Result<Option<Arc<Finished>>, BackendError> {
        let verdict = if execution.verify { Some(self.verification.enqueue(&self.gpus, execution, start.gpu)?) } else { threads };
        if execution.report == Report::Nothing || launched.is_some() && verdict.is_none() {
            return Ok(launched.filter(|_| execution.report != Report::Nothing));
        }
        let mark = self.gpus.primary(start.gpu)?.record(execution.stream.0)?;
        let owner: Arc<dyn Owner> = self.clone();
        Ok(Some(Arc::new(Finished::new(owner, mark, start, verdict))))
    }

    /// Adds an execution to the graph that is being captured from its stream. Requires the context of the stream's GPU to be current.
    #[cold]
    fn capture(&self, execution: &Execution<'_>, start: &Start, state: &PlanState) -> Result<Option<Completion>, BackendError> {
        check_capture(execution)?;
        let rings = capture_rings(&self.gpus, execution, handle(execution.stream.0))?;
        self.enqueue_lanes(&Execution { rings: &rings, ..*execution }, start.gpu, state, true, &mut None, None)?;
        Ok((execution.report != Report::Nothing).then(|| Arc::new(Captured) as Completion))
    }

    /// Makes the caller's stream wait for the executions that must precede this execution. Executions in the same stream need no wait.
    fn come_after(&self, execution: &Execution<'_>, start: &Start) -> Result<(), BackendError> {
        for completion in execution.after {
            let earlier = completion.as_any().downcast_ref::<Finished>().ok_or_else(|| {
                BackendError::NotSupported("an execution can only wait for executions of the same backend that were not captured".into())
            })?;
            if !earlier.is_in(start.number) {
                // SAFETY: `earlier` keeps its event valid, and the caller passes a valid stream.
                unsafe { call!(self.gpus.driver, cuStreamWaitEvent(handle(execution.stream.0), earlier.event(), 0)) }?;
            }
        }
        Ok(())
    }
}

/// Returns an error if a graph cannot contain this execution.
fn check_capture(execution: &Execution<'_>) -> Result<(), BackendError> {
    let why = if by_threads(execution.program) {
        "CPU threads copy the pageable memory of the execution, and a graph cannot do that; use host memory that mpgpu has allocated, or \
         set \
         MPGPU_HOST_THREADS=0"
    } else if execution.report == Report::Times {
        "timestamps cannot be captured: time an execution outside of a capture"
    } else if !execution.after.is_empty() && execution.program.rings.is_empty() {
        "the execution must follow another execution outside of the capture, for which a graph cannot wait"
    } else if execution.verify {
        "the bytes of captured executions cannot be compared; unset MPGPU_VERIFY=bytes"
    } else {
        return Ok(());
    };
    Err(BackendError::NotSupported(format!("the stream is being captured, and this execution cannot be: {why}")))
}
