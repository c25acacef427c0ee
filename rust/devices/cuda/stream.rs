//! Executes a program (list of copy operations) on streams. Each lane (sequence of operations) of the program runs in one stream, and
//! events order the streams.
//!
//! The caller's stream runs the first lane on its GPU. A program with one lane on this GPU therefore needs no event: a plain copy is one
//! call of the driver, and a second call records its end if requested. Other lanes run in internal streams. These wait for the caller's
//! stream before their first operation, and the caller's stream waits for them after their last operation (the module `lanes` makes these
//! decisions). During a stream capture, the same calls turn the lanes into branches of the graph.

use super::addresses::segment;
use super::device::{Caller, Mark, Primary};
use super::driver::{OutsideCapture, call, handle};
use super::lane::Lane;
use super::lanes::{Placement, move_lane, place, schedule};
use super::parts::Core;
use super::timing::Timing;
use super::workers::{Divided, Job};
use crate::backend::{BackendError, Execution, PlanState};
use crate::plan::Mechanism;
use smallvec::SmallVec;

impl Core {
    /// Enqueues the operations of an execution on streams. If the function returns an error, the operations that it had already enqueued
    /// have finished.
    #[inline(never)]
    pub fn enqueue_lanes(
        &self,
        execution: &Execution<'_>,
        callers_gpu: usize,
        state: &PlanState,
        capturing: bool,
        timing: &mut Option<Timing>,
        threads: Option<(&Job, &Divided)>,
    ) -> Result<(), BackendError> {
        if execution.program.ops.is_empty() {
            return Ok(());
        }
        if timing.is_none() && threads.is_none() && !capturing && self.is_plain(execution, callers_gpu, state) {
            let copies = &execution.program.ops[0].copies;
            let enqueued = copies.iter().try_for_each(|copy| self.enqueue_copy(execution, copy, state, execution.stream.0));
            return enqueued.inspect_err(|_| {
                let _outside = OutsideCapture::enter(self.gpus.driver);
                // SAFETY: The caller passes a valid stream. It is synchronized for the reason given below.
                unsafe { (self.gpus.driver.cuStreamSynchronize)(handle(execution.stream.0)) };
            });
        }
        let (placed, is_reached) = self.placed(execution, callers_gpu, state)?;
        let caller = Caller::new(execution.stream.0, callers_gpu);
        let mut lanes: SmallVec<[Lane<'_>; 8]> = SmallVec::new();
        let mut enqueued = placed.iter().try_for_each(|&at| {
            let primary = self.gpus.peered(at.gpu)?;
            let stream = if at.is_callers_stream { execution.stream.0 } else { primary.lane(caller, capturing)? };
            let is_shut_out = !is_reached && self.is_shut_out(execution, at.gpu);
            lanes.push(Lane {
                at,
                primary,
                stream,
                ends: self.own_ends(execution, at.gpu),
                is_shut_out,
                caller,
                state,
                threads,
                begun: false,
            });
            Ok(())
        });
        if enqueued.is_ok() {
            let in_context = capturing || !is_reached || lanes.iter().any(|lane| lane.ends.is_some());
            enqueued = self.enqueue_ops(execution, self.gpus.primary(callers_gpu)?, &mut lanes, capturing, in_context, timing);
        }
        if let (Ok(()), Some(timing)) = (&enqueued, &mut *timing) {
            let others = lanes.iter().filter(|lane| lane.at.gpu != callers_gpu).map(|lane| (lane.at.gpu, lane.stream));
            enqueued = others.into_iter().try_for_each(|lane| timing.join_clock(lane, execution.stream.0));
        }
        if enqueued.is_err() {
            threads.iter().for_each(|(job, _)| job.cancel());
        }
        for lane in &lanes {
            if enqueued.is_err() && !capturing {
                let _outside = OutsideCapture::enter(self.gpus.driver);
                // SAFETY: The stream belongs to this backend, or the caller keeps it valid. It is synchronized because the caller may free
                // the buffers after the error, so no work on them may remain. An error of this call is the one being reported, or has the
                // same cause.
                unsafe { (self.gpus.driver.cuStreamSynchronize)(handle(lane.stream)) };
            }
            if !lane.at.is_callers_stream {
                lane.primary.give_lane_back(lane.stream, caller, capturing);
            }
        }
        enqueued
    }

    /// True if the execution consists of one operation of plain copies in the caller's stream, and the stream's GPU is known to have access
    /// to all memory at the addresses of the execution. Most small plans and messages are of this kind.
    fn is_plain(&self, execution: &Execution<'_>, callers_gpu: usize, state: &PlanState) -> bool {
        matches!((&execution.program.lanes[..], &execution.program.ops[..]), ([_], [op]) if op.mechanism == Mechanism::Copy)
            && state.is_reached(callers_gpu)
            && self.own_ends(execution, callers_gpu).is_none()
    }

    /// Returns the GPU and the kind of stream of each lane (sequence of operations), and a boolean. The boolean is true if all lanes run on
    /// the GPUs that the program chose, and the caller's GPU can access all memory of the plan. Returns an error if no GPU may make a copy,
    /// and for memory that was freed.
    fn placed(
        &self,
        execution: &Execution<'_>,
        callers_gpu: usize,
        state: &PlanState,
    ) -> Result<(SmallVec<[Placement; 8]>, bool), BackendError> {
        let mut is_reached = self.is_reached(execution, callers_gpu, state)?;
        let mut placed = place(execution.program, callers_gpu, is_reached);
        for lane in 0..placed.len() {
            let gpu = self.reaching(execution, placed[lane].gpu, state)?;
            if gpu != placed[lane].gpu {
                move_lane(&mut placed, lane, gpu, callers_gpu);
                is_reached = false;
            }
        }
        for op in execution.program.ops.iter().filter(|_| !is_reached) {
            let gpu = placed[op.lane.0 as usize].gpu;
            if self.is_shut_out(execution, gpu) {
                op.copies.iter().try_for_each(|copy| self.able_to_copy(gpu, segment(execution, copy)).map(drop))?;
            }
        }
        if execution.program.ops.iter().any(|op| op.mechanism != Mechanism::Copy) {
            self.check_freed(execution, state)?;
        }
        Ok((placed, is_reached))
    }

    /// Creates the streams, events and kernels that a later call of [`enqueue_lanes`](Core::enqueue_lanes) needs for this execution.
    pub fn prepare_lanes(&self, execution: &Execution<'_>, callers_gpu: usize, state: &PlanState) -> Result<(), BackendError> {
        let program = execution.program;
        let (placed, _) = self.placed(execution, callers_gpu, state)?;
        let caller = Caller::new(execution.stream.0, callers_gpu);
        // All streams and events are taken from their pools before any is returned, so that the pools contain enough of them afterwards.
        let mut lanes: SmallVec<[(&Primary, usize); 8]> = SmallVec::new();
        let made = placed.iter().filter(|at| !at.is_callers_stream).try_for_each(|at| {
            let primary = self.gpus.peered(at.gpu)?;
            lanes.push((primary, primary.lane(caller, false)?));
            Ok(())
        });
        lanes.into_iter().for_each(|(primary, stream)| primary.give_lane_back(stream, caller, false));
        made?;
        let schedule = schedule(program, &placed);
        let mut marks: SmallVec<[Mark; 32]> = SmallVec::new();
        for (index, op) in program.ops.iter().enumerate() {
            let lane = op.lane.0 as usize;
            let primary = self.gpus.peered(placed[lane].gpu)?;
            if op.mechanism == Mechanism::Kernel {
                self.kernel_for(execution, primary, placed[lane].gpu)?;
            }
            if schedule.awaited[index] || schedule.joins[lane] == Some(index as u32) {
                marks.push(primary.mark()?);
            }
        }
        Ok(())
    }

    /// Enqueues the operations of an execution. The module `lanes` determines the order and the events.
    ///
    /// If `in_context` is true, each operation is enqueued while the context of its lane's GPU is current. Captures need this, because each
    /// node of a graph belongs to a context. The context of the lane's GPU is also needed if the caller's GPU cannot access all memory of
    /// the plan. The driver checks the addresses of a copy against the current context, not against the stream's context (NVIDIA/cccl, pull
    /// requests 9615 and 9997). Otherwise, the context of the caller's GPU stays current. Copies, event records and waits may be enqueued
    /// in a stream while any context is current (CUDA C++ Programming Guide, "Stream and Event Behavior"). Kernels and batched copies make
    /// their own context current.
    fn enqueue_ops(
        &self,
        execution: &Execution<'_>,
        callers: &Primary,
        lanes: &mut [Lane<'_>],
        capturing: bool,
        in_context: bool,
        timing: &mut Option<Timing>,
    ) -> Result<(), BackendError> {
        let driver = self.gpus.driver;
        let ops = &execution.program.ops;
        if let [lane] = lanes
            && lane.at.is_callers_stream
        {
            return (0..ops.len()).try_for_each(|index| self.enqueue_op(execution, index, lane, capturing, timing));
        }
        let placed: SmallVec<[Placement; 8]> = lanes.iter().map(|lane| lane.at).collect();
        let schedule = schedule(execution.program, &placed);
        // The event is recorded before any work of this execution is enqueued, so that no lane waits for copies of this execution in the
        // caller's stream.
        let forks = schedule.forks.contains(&true);
        let start = if forks { Some(callers.record(execution.stream.0)?) } else { None };
        // The events are held until all operations are enqueued. Otherwise, an event could return to its pool too early, and another thread
        // could record it again.
        let mut done: SmallVec<[Option<Mark>; 32]> = ops.iter().map(|_| None).collect();
        let wait = |stream: usize, mark: &Mark| {
            // SAFETY: `mark` keeps the event valid. The stream belongs to this backend, or the caller keeps it valid.
            unsafe { call!(driver, cuStreamWaitEvent(handle(stream), mark.event(), 0)) }
        };
        // If copy threads make some of the copies, operations are enqueued in the order of the program. In another order, an operation
        // could be enqueued before an operation on which it depends by way of a thread. If the queue of the stream is then full, neither of
        // the two could proceed.
        let in_order = lanes.iter().any(|lane| lane.threads.is_some());
        for index in schedule.order.iter().enumerate().map(|(at, index)| if in_order { at } else { *index as usize }) {
            let op = &ops[index];
            let number = op.lane.0 as usize;
            let lane = &mut lanes[number];
            let _current = if in_context { Some(lane.primary.enter()?) } else { None };
            if !std::mem::replace(&mut lane.begun, true)
                && schedule.forks[number]
                && let Some(start) = &start
            {
                wait(lane.stream, start)?;
            }
            for before in op.after.iter().filter(|before| ops[before.0 as usize].lane != op.lane) {
                if let Some(before) = &done[before.0 as usize] {
                    wait(lane.stream, before)?;
                }
            }
            self.enqueue_op(execution, index, lane, capturing, timing)?;
            if schedule.awaited[index] || schedule.joins[number] == Some(index as u32) {
                done[index] = Some(lane.primary.record(lane.stream)?);
            }
        }
        for end in schedule.joins.iter().flatten().filter_map(|last| done[*last as usize].as_ref()) {
            wait(execution.stream.0, end)?;
        }
        Ok(())
    }
}
