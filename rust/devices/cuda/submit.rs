//! An execution on its way to the driver, from the top.
//!
//! [`Core::submit`] finds out where the caller's stream is and whether it is being captured. If it is, the copies become part of its graph,
//! with staging memory of its own. If not, they go as one graph launch (`graph`) where the plan is for that, or else over streams
//! (`stream`), and an event behind them marks their end (`completion`).

use super::capture::capture_rings;
use super::completion::{Captured, Finished};
use super::driver::{OutsideCapture, call, handle};
use super::owner::Owner;
use super::parts::Core;
use super::streams::Start;
use super::timing::Timing;
use super::verify::Verdict;
use super::workers::Divided;
use crate::backend::{BackendError, Completion, Execution, PlanState, Report};
use crate::plan::{Engine, Mechanism};
use std::sync::Arc;

impl Core {
    /// Enqueues an execution: [`Backend::submit`](crate::backend::Backend::submit).
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

    /// Makes what the first execution of a plan makes otherwise: [`Backend::prepare`](crate::backend::Backend::prepare).
    pub fn prepare(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        self.gpus.check_alive()?;
        let found = self.streams.find(&self.gpus, execution.stream)?;
        let primary = self.gpus.peered(found.gpu)?;
        let _current = primary.enter()?;
        let own = PlanState::default();
        let state = execution.state.unwrap_or(&own);
        let divided = Divided::of(execution.program);
        let execution = &Execution { program: divided.as_ref().map_or(execution.program, |divided| &divided.streams), ..*execution };
        let is_capturing = found.is_capturing.map_or_else(|| self.gpus.driver.is_capturing(handle(execution.stream.0)), Ok)?;
        // For the start and the end of an execution, or for the ends of two launches in a row.
        let _ends = [primary.mark()?, primary.mark()?];
        let _outside = OutsideCapture::enter(self.gpus.driver);
        let is_graph = execution.engine == Engine::Graph && !is_capturing;
        if is_graph && self.prepare_graph(execution, found.gpu, state)? { Ok(()) } else { self.prepare_lanes(execution, found.gpu, state) }
    }

    /// Where the stream of an execution is, and whether it is being captured, if that is known.
    fn start_in(&self, execution: &Execution<'_>) -> Result<(Start, Option<bool>), BackendError> {
        let found = self.streams.find(&self.gpus, execution.stream)?;
        Ok((Start { gpu: found.gpu, number: found.number, behind: self.behind(execution.stream, &found) }, found.is_capturing))
    }

    /// Enqueues an execution, and marks its end where somebody wants to know it.
    fn enqueue(self: &Arc<Core>, execution: &Execution<'_>, start: &Start, state: &PlanState) -> Result<Option<Completion>, BackendError> {
        let mut timing = if execution.report == Report::Times { Some(Timing::new(self.clone(), start.gpu)) } else { None };
        self.come_after(execution, start)?;
        if let Some(timing) = &mut timing {
            timing.start(execution.stream.0)?;
        }
        let divided = Divided::of(execution.program);
        let is_graph = execution.engine == Engine::Graph && timing.is_none() && divided.is_none() && !execution.program.ops.is_empty();
        let launched = if is_graph { self.launch_graph(execution, start, state)? } else { None };
        let mut threads = None;
        if let Some(divided) = &divided {
            threads = Some(self.enqueue_threads(execution, start, state, divided)?);
        } else if launched.is_none() {
            self.enqueue_lanes(execution, start.gpu, state, false, &mut timing, None)?;
        }
        let end = self.end(execution, start, launched, threads).inspect_err(|_| {
            let _outside = OutsideCapture::enter(self.gpus.driver);
            // SAFETY: the caller's stream. Whoever gets the error may free the buffers, so nothing may be left at work on them.
            unsafe { (self.gpus.driver.cuStreamSynchronize)(handle(execution.stream.0)) };
        })?;
        if let (Some(end), Some(timing)) = (&end, timing) {
            end.time(timing);
        }
        Ok(end.map(|end| end as Completion))
    }

    /// Enqueues what streams do of a program of which threads do the rest, and hands them that. What goes wrong there is told by the result.
    fn enqueue_threads(
        &self,
        execution: &Execution<'_>,
        start: &Start,
        state: &PlanState,
        divided: &Divided,
    ) -> Result<Arc<Verdict>, BackendError> {
        if execution.report == Report::Times {
            let why = "an execution whose pageable memory threads copy cannot be timed operation by operation; set MPGPU_HOST_THREADS=0";
            return Err(BackendError::NotSupported(why.into()));
        }
        let stream = handle(execution.stream.0);
        let job = self.workers.job(&self.gpus, execution, divided)?;
        let own = Execution { program: &divided.streams, ..*execution };
        // First, so that threads fill slots while the rest is enqueued.
        self.workers.start(&job)?;
        let enqueued = self
            .gpus
            .tell_threads(stream, job.begin(), job.value)
            .and_then(|()| self.enqueue_lanes(&own, start.gpu, state, false, &mut None, Some((&job, divided))))
            .and_then(|()| self.gpus.wait_for_threads(stream, divided.ends.iter().map(|copy| job.word(*copy)), job.value));
        if let Err(error) = enqueued {
            job.cancel();
            // SAFETY: the caller's stream. As where lanes are given back: nothing may be left at work on the buffers.
            unsafe { (self.gpus.driver.cuStreamSynchronize)(stream) };
            self.workers.abandon(&job);
            return Err(error);
        }
        Ok(job.verdict.clone())
    }

    /// What is enqueued behind the copies: the comparison of bytes, and the event that marks the end. A graph's launch has marked its own.
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

    /// Makes an execution part of the graph that its stream is being captured into. The context of the stream's GPU is current.
    #[cold]
    fn capture(&self, execution: &Execution<'_>, start: &Start, state: &PlanState) -> Result<Option<Completion>, BackendError> {
        check_capture(execution)?;
        let rings = capture_rings(&self.gpus, execution, handle(execution.stream.0))?;
        self.enqueue_lanes(&Execution { rings: &rings, ..*execution }, start.gpu, state, true, &mut None, None)?;
        Ok((execution.report != Report::Nothing).then(|| Arc::new(Captured) as Completion))
    }

    /// Has the caller's stream wait for the executions that this one comes after, those in the same stream excepted.
    fn come_after(&self, execution: &Execution<'_>, start: &Start) -> Result<(), BackendError> {
        for completion in execution.after {
            let earlier = completion.as_any().downcast_ref::<Finished>().ok_or_else(|| {
                BackendError::NotSupported("an execution can only come after executions of its own backend that were not captured".into())
            })?;
            if !earlier.is_in(start.number) {
                // SAFETY: the completion holds the event.
                unsafe { call!(self.gpus.driver, cuStreamWaitEvent(handle(execution.stream.0), earlier.event(), 0)) }?;
            }
        }
        Ok(())
    }
}

/// What a graph cannot do.
fn check_capture(execution: &Execution<'_>) -> Result<(), BackendError> {
    let by_thread = execution.program.ops.iter().any(|op| op.mechanism == Mechanism::Thread);
    let why = if by_thread {
        "threads copy its pageable memory, which a graph cannot ask for; use host memory that mpgpu has allocated, or set MPGPU_HOST_THREADS=0"
    } else if execution.report == Report::Times {
        "timestamps cannot be captured: time an execution outside of a capture"
    } else if !execution.after.is_empty() && execution.program.rings.is_empty() {
        "it has to come after an execution outside of the capture, which a graph cannot wait for"
    } else if execution.verify {
        "comparing bytes needs memory that executions share; unset MPGPU_VERIFY=bytes"
    } else {
        return Ok(());
    };
    Err(BackendError::NotSupported(format!("the stream is being captured, and this execution cannot be: {why}")))
}
