//! The stream executor: lanes are streams, joined by events.
//!
//! The caller's stream itself is the first lane of its GPU, so a program of one lane there needs no event at all: a plain copy is one
//! call of the driver, and a second one records its end for whoever asks. Other lanes are internal streams, which wait for the
//! caller's stream before their first operation and which it waits for after their last; `lanes` has what is decided about them.
//! Under stream capture the same calls make the lanes branches of the graph.

use super::Core;
use super::completion::{Captured, Finished};
use super::device::{Caller, Mark, Primary, handle};
use super::driver::{CUstream, OutsideCapture, call, code};
use super::graph::Kept;
use super::lanes::{Seat, move_seat, seats, wiring};
use super::timing::Timing;
use super::verify::Verdict;
use crate::backend::loss::Heard;
use crate::backend::{BackendError, Completion, Endpoints, Execution, StreamHandle};
use crate::ffi::bridge::Segment;
use crate::plan::{Copy, Engine, Mechanism, Op, Place};
use cudarc::driver::sys;
use smallvec::SmallVec;
use std::sync::Arc;

/// One lane of an execution.
struct Lane<'a> {
    seat: Seat,
    primary: &'a Primary,
    /// The `CUstream`.
    stream: usize,
    /// The ends of the plan as its GPU has them, where they are not those of the execution.
    ends: Option<Arc<[Endpoints]>>,
    /// Whether there is memory in the plan that its GPU must not enter.
    is_shut_out: bool,
    /// The stream of the execution.
    caller: Caller,
    kept: &'a Kept,
    /// Whether it has begun: its stream comes after what it has to wait for at its start.
    begun: bool,
}

/// Where an execution starts.
pub(super) struct Start {
    /// The GPU of its stream.
    pub home: usize,
    /// Its stream's number ([`Core::home_of`]).
    pub stream: Option<u64>,
    /// What its stream has been told.
    pub heard: Heard,
}

/// What there is of an execution once it is enqueued.
struct End {
    start: Start,
    capturing: bool,
    /// That of its copies, where an event was recorded behind them.
    copied: Option<Arc<Finished>>,
    verdict: Option<Arc<Verdict>>,
}

impl Core {
    /// Enqueues an execution and an event behind it. `timed`: with a timestamp before and after each operation.
    pub fn execute(self: &Arc<Core>, execution: &Execution<'_>, kept: &Kept, timed: bool) -> Result<Completion, BackendError> {
        let mut timing = if timed { Some(Timing::new(self.clone(), self.gpu_of(execution.stream)?)) } else { None };
        let end = self.run(execution, kept, &mut timing, |end| {
            if end.capturing {
                return Ok(None);
            }
            Ok(Some(match end.copied {
                // A graph's launch has marked its own end, behind which nothing was enqueued.
                Some(copied) if end.verdict.is_none() => copied,
                _ => {
                    let mark = self.primary(end.start.home)?.record(execution.stream.0)?;
                    Arc::new(Finished::new(self.clone(), mark, &end.start, end.verdict))
                }
            }))
        })?;
        let Some(end) = end else { return Ok(Arc::new(Captured)) };
        if let Some(timing) = timing {
            end.time(timing);
        }
        Ok(end)
    }

    /// Enqueues an execution whose end nobody asks for.
    pub fn enqueue(self: &Arc<Core>, execution: &Execution<'_>, kept: &Kept) -> Result<(), BackendError> {
        self.run(execution, kept, &mut None, |_| Ok(()))
    }

    /// Enqueues an execution, and calls `finish` while the context of its stream's GPU is current.
    fn run<T>(
        self: &Arc<Core>,
        execution: &Execution<'_>,
        kept: &Kept,
        timing: &mut Option<Timing>,
        finish: impl FnOnce(End) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        if execution.program.lanes.len() > 1 {
            self.check_alive()?;
        }
        let (home, stream, capturing) = self.home_of(execution.stream)?;
        let start = Start { home, stream, heard: self.heard(execution.stream) };
        let _current = self.reach(home)?.enter()?;
        let capturing = capturing.map_or_else(|| self.is_capturing(handle(execution.stream.0)), Ok)?;
        if capturing {
            check_capture(execution)?;
            if timing.is_some() {
                return Err(BackendError::NotSupported("timestamps cannot be captured: time an execution outside of a capture".into()));
            }
        }
        self.come_after(execution, stream)?;
        let copied = self.enqueue_copies(execution, &start, kept, capturing, timing)?;
        let verdict = if execution.verify { self.enqueue_verification(execution, home).map(Some) } else { Ok(None) };
        let finished = verdict.and_then(|verdict| finish(End { start, capturing, copied, verdict }));
        if finished.is_err() && !capturing {
            let _outside = OutsideCapture::enter(self.driver);
            // SAFETY: the caller's stream. Whoever gets the error may free the buffers, so nothing may be left at work on them.
            unsafe { (self.driver.cuStreamSynchronize)(handle(execution.stream.0)) };
        }
        finished
    }

    pub fn is_capturing(&self, raw: CUstream) -> Result<bool, BackendError> {
        let mut status = 0;
        // SAFETY: the caller's stream; the output is valid for the call.
        unsafe { call!(self.driver, cuStreamIsCapturing(raw, &mut status)) }?;
        if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as u32 {
            return Err(BackendError::NotSupported("the stream's capture was invalidated by an earlier call; end it first".into()));
        }
        Ok(status != 0)
    }

    /// The GPU that a stream belongs to, and a number that no other stream of this process has or will have, unlike its handle, which a
    /// stream that is created after it was destroyed may get. `None` for the default streams, whose handles stand for several, and where
    /// the driver gives none. A stream with a number stays on its GPU, which is looked up once. With it, whether the stream is being
    /// captured, if that is known: one with a number is not.
    fn home_of(&self, stream: StreamHandle) -> Result<(usize, Option<u64>, Option<bool>), BackendError> {
        if stream.0 <= 2 || self.is_destroyed(stream) {
            // A default stream is never gone, but what it is given may be.
            let gpu = self.gpu_of_living(stream)?;
            self.primary(gpu)?.check()?;
            return Ok((gpu, None, None));
        }
        // The driver does not survive a stream that went with a reset. The one GPU is asked that the stream was of when it was last met.
        let place = stream.0 as u64 >> 4;
        match self.handles.find(place) {
            Some(gpu) => self.primary(gpu)?.check()?,
            None => self.check_alive()?,
        }
        let number = self.number_outside_capture(handle(stream.0));
        let gpu = match number.and_then(|number| self.homes.find(number)) {
            Some(gpu) => gpu,
            None => {
                let gpu = self.gpu_of_living(stream)?;
                if let Some(number) = number {
                    self.homes.note(number, gpu);
                }
                gpu
            }
        };
        if self.handles.find(place) != Some(gpu) {
            self.handles.note(place, gpu);
        }
        Ok((gpu, number, number.map(|_| false)))
    }

    /// The driver's number of a stream. `None` while it is captured: asking would end the capture with an error.
    pub fn number_outside_capture(&self, raw: CUstream) -> Option<u64> {
        let mut status = 0;
        // SAFETY: the caller's stream; the output is valid for the call.
        let code = unsafe { (self.driver.cuStreamIsCapturing)(raw, &mut status) };
        if code == 0 && status == 0 { self.driver.stream_id(raw) } else { None }
    }

    /// Has the caller's stream wait for the executions that this one comes after, those in the same stream excepted.
    fn come_after(&self, execution: &Execution<'_>, stream: Option<u64>) -> Result<(), BackendError> {
        for completion in execution.after {
            let earlier = completion.as_any().downcast_ref::<Finished>().ok_or_else(|| {
                BackendError::NotSupported("an execution can only come after executions of its own backend that were not captured".into())
            })?;
            if !earlier.is_in(stream) {
                // SAFETY: the completion holds the event.
                unsafe { call!(self.driver, cuStreamWaitEvent(handle(execution.stream.0), earlier.event(), 0)) }?;
            }
        }
        Ok(())
    }

    /// Enqueues the copies. When it fails, what was enqueued has finished. Returns their end, where it was recorded.
    fn enqueue_copies(
        self: &Arc<Core>,
        execution: &Execution<'_>,
        start: &Start,
        kept: &Kept,
        capturing: bool,
        timing: &mut Option<Timing>,
    ) -> Result<Option<Arc<Finished>>, BackendError> {
        if let Some(timing) = timing {
            timing.start(execution.stream.0)?;
        }
        if execution.program.ops.is_empty() {
            return Ok(None);
        }
        if execution.engine == Engine::Graph
            && !capturing
            && timing.is_none()
            && let Some(end) = self.launch_graph(execution, start, kept)?
        {
            return Ok(Some(end));
        }
        self.enqueue_lanes(execution, start.home, kept, capturing, timing).map(|()| None)
    }

    /// Enqueues the copies over streams. When it fails, what was enqueued has finished.
    #[inline(never)]
    fn enqueue_lanes(
        &self,
        execution: &Execution<'_>,
        home: usize,
        kept: &Kept,
        capturing: bool,
        timing: &mut Option<Timing>,
    ) -> Result<(), BackendError> {
        let mut is_reached = self.is_reached(execution, home, kept)?;
        let mut seats = seats(execution.program, home, is_reached);
        for lane in 0..seats.len() {
            let gpu = self.reaching(execution, seats[lane].gpu, kept)?;
            if gpu != seats[lane].gpu {
                move_seat(&mut seats, lane, gpu, home);
                is_reached = false;
            }
        }
        // Before anything is enqueued.
        for op in execution.program.ops.iter().filter(|_| !is_reached) {
            let gpu = seats[op.lane.0 as usize].gpu;
            if self.is_shut_out(execution, gpu) {
                op.copies.iter().try_for_each(|copy| self.able_to_copy(gpu, segment(execution, copy)).map(drop))?;
            }
        }
        if execution.program.ops.iter().any(|op| op.mechanism != Mechanism::Copy) {
            self.check_freed(execution, kept)?;
        }
        let caller = Caller::new(execution.stream.0, home);
        let mut lanes = SmallVec::new();
        let mut enqueued = self.take_lanes(execution, kept, &seats, caller, is_reached, &mut lanes);
        if enqueued.is_ok() {
            let in_context = capturing || !is_reached || lanes.iter().any(|lane| lane.ends.is_some());
            enqueued = self.enqueue_ops(execution, self.primary(home)?, &mut lanes, capturing, in_context, timing);
        }
        if let (Ok(()), Some(timing)) = (&enqueued, &mut *timing) {
            let others = lanes.iter().filter(|lane| lane.seat.gpu != home).map(|lane| (lane.seat.gpu, lane.stream));
            enqueued = others.into_iter().try_for_each(|lane| timing.join_clock(lane, execution.stream.0));
        }
        for lane in &lanes {
            if enqueued.is_err() && !capturing {
                let _outside = OutsideCapture::enter(self.driver);
                // SAFETY: a stream of ours or the caller's. Whoever gets the error may free the buffers, so nothing may be left at work
                // on them; an error here is the one that is being reported, or comes from the same cause.
                unsafe { (self.driver.cuStreamSynchronize)(handle(lane.stream)) };
            }
            if !lane.seat.is_callers {
                lane.primary.give_lane_back(lane.stream, caller, capturing);
            }
        }
        enqueued
    }

    /// Finds a stream for each lane.
    fn take_lanes<'a>(
        &'a self,
        execution: &Execution<'_>,
        kept: &'a Kept,
        seats: &[Seat],
        caller: Caller,
        is_reached: bool,
        lanes: &mut SmallVec<[Lane<'a>; 8]>,
    ) -> Result<(), BackendError> {
        for &seat in seats {
            let primary = self.reach(seat.gpu)?;
            let stream = if seat.is_callers { execution.stream.0 } else { primary.lane(caller)? };
            let is_shut_out = !is_reached && self.is_shut_out(execution, seat.gpu);
            lanes.push(Lane { seat, primary, stream, ends: self.own_ends(execution, seat.gpu), is_shut_out, caller, kept, begun: false });
        }
        Ok(())
    }

    /// Enqueues the operations in the order and with the events that `lanes` explains.
    ///
    /// With `in_context` each operation is enqueued while the context of its lane's GPU is current. That is needed in captures, because
    /// nodes of a graph have a context each; and where the caller's GPU does not reach all memory of the plan, because the driver holds
    /// the addresses of a copy against the current context and not the stream's (NVIDIA/cccl, pull requests 9615 and 9997).
    /// Elsewhere the caller's GPU stays current: copies, recordings and waits go to a stream whichever context is current (CUDA C++
    /// Programming Guide, "Stream and Event Behavior"). Kernels and batches see to theirs.
    fn enqueue_ops(
        &self,
        execution: &Execution<'_>,
        home: &Primary,
        lanes: &mut [Lane<'_>],
        capturing: bool,
        in_context: bool,
        timing: &mut Option<Timing>,
    ) -> Result<(), BackendError> {
        let driver = self.driver;
        let ops = &execution.program.ops;
        if let [lane] = lanes
            && lane.seat.is_callers
        {
            return (0..ops.len()).try_for_each(|index| self.enqueue_op(execution, index, lane, capturing, timing));
        }
        let seats: SmallVec<[Seat; 8]> = lanes.iter().map(|lane| lane.seat).collect();
        let wiring = wiring(execution.program, &seats);
        // Recorded before anything of this execution, so that no lane waits for the copies in the caller's own stream.
        let forks = wiring.forks.contains(&true);
        let start = if forks { Some(home.record(execution.stream.0)?) } else { None };
        // Held until all is enqueued: an event that goes back to its pool may be recorded anew by another thread.
        let mut done: SmallVec<[Option<Mark>; 32]> = ops.iter().map(|_| None).collect();
        let wait = |stream: usize, mark: &Mark| {
            // SAFETY: `mark` holds the event; the stream is ours or the caller's.
            unsafe { call!(driver, cuStreamWaitEvent(handle(stream), mark.event(), 0)) }
        };
        for index in wiring.order.iter().map(|index| *index as usize) {
            let op = &ops[index];
            let number = op.lane.0 as usize;
            let lane = &mut lanes[number];
            let _current = if in_context { Some(lane.primary.enter()?) } else { None };
            if !std::mem::replace(&mut lane.begun, true)
                && wiring.forks[number]
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
            if wiring.awaited[index] || wiring.joins[number] == Some(index as u32) {
                done[index] = Some(lane.primary.record(lane.stream)?);
            }
        }
        for end in wiring.joins.iter().flatten().filter_map(|last| done[*last as usize].as_ref()) {
            wait(execution.stream.0, end)?;
        }
        Ok(())
    }

    /// Enqueues one operation in its lane's stream, between two timestamps where those are asked for.
    fn enqueue_op(
        &self,
        execution: &Execution<'_>,
        index: usize,
        lane: &Lane<'_>,
        capturing: bool,
        timing: &mut Option<Timing>,
    ) -> Result<(), BackendError> {
        let op = &execution.program.ops[index];
        let enqueue = || self.enqueue_untimed(execution, op, lane, capturing);
        match timing {
            None => enqueue(),
            Some(timing) => timing.around(index, lane.seat.gpu, lane.stream, enqueue),
        }
    }

    fn enqueue_untimed(&self, execution: &Execution<'_>, op: &Op, lane: &Lane<'_>, capturing: bool) -> Result<(), BackendError> {
        if op.mechanism == Mechanism::Kernel
            && let Some(kernel) = self.kernel_for(execution, lane.primary, lane.seat.gpu)?
        {
            // A kernel goes to streams of the current context alone.
            let _current = lane.primary.enter()?;
            let execution = &execution.with_ends(lane.ends.as_ref());
            let segments: SmallVec<[Segment; 32]> = op.copies.iter().map(|copy| segment(execution, copy)).collect();
            // SAFETY: the GPU reaches every end of the plan; the caller of `execute` vouches for the buffers until completion.
            return unsafe { kernel.launch(self.driver, &segments, handle(lane.stream)) };
        }
        if lane.is_shut_out {
            return op.copies.iter().try_for_each(|copy| self.enqueue_by_whoever_may(execution, copy, lane, capturing));
        }
        let execution = &execution.with_ends(lane.ends.as_ref());
        if op.mechanism == Mechanism::Batch && op.copies.len() > 1 && self.enqueue_batch(execution, op, lane, capturing)? {
            return Ok(());
        }
        op.copies.iter().try_for_each(|copy| self.enqueue_copy(execution, copy, lane.kept, lane.stream))
    }

    /// Enqueues a copy. Between memory that the driver knows by the call that takes nothing else: an end that its owner has freed is an
    /// error there. To `cuMemcpyAsync` such an end is host memory, which it reads or writes at once, and the process dies (H200, driver
    /// 580). Both take the same time, and pinned memory is memory of a device to both.
    fn enqueue_copy(&self, execution: &Execution<'_>, copy: &Copy, kept: &Kept, stream: usize) -> Result<(), BackendError> {
        let driver = self.driver;
        let Segment { dst, src, bytes } = segment(execution, copy);
        if kept.knows(copy.from) && kept.knows(copy.to) {
            // SAFETY: the program is valid, so both ranges lie inside the transfer or the slot; the caller of `execute` vouches for
            // the buffers until completion, and the engine for the slots.
            let code = unsafe { (driver.cuMemcpyDtoDAsync)(dst, src, bytes as usize, handle(stream)) };
            if code != code::INVALID_VALUE || !self.are_known(dst, src) {
                return driver.check("cuMemcpyDtoDAsync", code);
            }
            // Registered host memory, where GPUs have it at another address.
        } else {
            // Looked at beside a copy that takes the calling thread as long as its bytes do.
            self.check_freed(execution, kept)?;
        }
        // SAFETY: as above.
        unsafe { call!(driver, cuMemcpyAsync(dst, src, bytes as usize, handle(stream))) }
    }

    /// Whether the driver knows both ends of a copy at present.
    #[cold]
    fn are_known(&self, dst: u64, src: u64) -> bool {
        [dst, src].iter().all(|address| self.attributes(*address).is_ok_and(|known| known.is_device() || known.is_host()))
    }

    /// Refuses an execution whose memory another library has freed. The driver does not: a graph or a kernel faults, after which the
    /// GPU's context is lost, and a batched copy dies with the process (H200, driver 580). Takes some 70 ns for each allocation that is
    /// not this backend's own; whose own memory it is knows when it was freed.
    pub fn check_freed(&self, execution: &Execution<'_>, kept: &Kept) -> Result<(), BackendError> {
        let watched = kept.watched(|memory| {
            let mut found: Vec<(u64, u64)> =
                execution.endpoints.iter().flat_map(|ends| [ends.dst, ends.src]).zip(memory.iter().copied()).collect();
            found.retain(|(address, id)| *id != 0 && id >> 63 == 0 && !self.is_ours(*address));
            found.sort_unstable_by_key(|(_, id)| *id);
            found.dedup_by_key(|(_, id)| *id);
            found.into()
        });
        watched
            .iter()
            .try_for_each(|&(address, id)| if self.is_still(address, id) { Ok(()) } else { Err(BackendError::InvalidPointer(address)) })
    }

    /// Enqueues a copy of a lane whose GPU must not enter all memory of the plan, where no other one may either. It is made by a GPU that may enter both
    /// of its ends, in a stream that comes after the lane's work so far and before the rest of it.
    #[cold]
    fn enqueue_by_whoever_may(&self, execution: &Execution<'_>, copy: &Copy, lane: &Lane<'_>, capturing: bool) -> Result<(), BackendError> {
        let gpu = self.able_to_copy(lane.seat.gpu, segment(execution, copy))?;
        // Notes the ends as that GPU has them.
        self.plan_is_reached(execution, gpu)?;
        let own = self.own_ends(execution, gpu);
        let own = &execution.with_ends(own.as_ref());
        let primary = self.reach(gpu)?;
        if gpu == lane.seat.gpu {
            let _current = primary.enter()?;
            return self.enqueue_copy(own, copy, lane.kept, lane.stream);
        }
        let wait = |stream: usize, mark: Mark| {
            // SAFETY: `mark` holds the event; both streams are ours or the caller's.
            unsafe { call!(self.driver, cuStreamWaitEvent(handle(stream), mark.event(), 0)) }
        };
        let stream = primary.lane(lane.caller)?;
        let enqueued = lane.primary.record(lane.stream).and_then(|before| {
            wait(stream, before)?;
            // For the copy alone: the lane may be a default stream, which is another one there.
            primary.enter().and_then(|_current| self.enqueue_copy(own, copy, lane.kept, stream))?;
            wait(lane.stream, primary.record(stream)?)
        });
        if enqueued.is_err() && !capturing {
            let _outside = OutsideCapture::enter(self.driver);
            // SAFETY: a stream of ours. As where lanes are given back: nothing may be left at work on the buffers.
            unsafe { (self.driver.cuStreamSynchronize)(handle(stream)) };
        }
        primary.give_lane_back(stream, lane.caller, capturing);
        enqueued
    }

    /// One batched copy. `false` where the driver has none, or none for this stream.
    fn enqueue_batch(&self, execution: &Execution<'_>, op: &Op, lane: &Lane<'_>, capturing: bool) -> Result<bool, BackendError> {
        // The driver refuses batches in a default stream, and does not capture them.
        let Some(batch) = self.driver.cuMemcpyBatchAsync.filter(|_| !capturing && lane.stream > 2) else { return Ok(false) };
        let _current = lane.primary.enter()?;
        let mut dsts: SmallVec<[u64; 32]> = op.copies.iter().map(|copy| address(execution, copy.to)).collect();
        let mut srcs: SmallVec<[u64; 32]> = op.copies.iter().map(|copy| address(execution, copy.from)).collect();
        let mut sizes: SmallVec<[usize; 32]> = op.copies.iter().map(|copy| copy.bytes as usize).collect();
        let nowhere = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let mut first = 0;
        let stream = handle(lane.stream);
        // SAFETY: three lists of one length, one set of attributes for all, which the driver reads before it returns. The buffers as
        // for single copies.
        let code =
            unsafe { batch(dsts.as_mut_ptr(), srcs.as_mut_ptr(), sizes.as_mut_ptr(), sizes.len(), &mut attributes, &mut first, 1, stream) };
        const NOT_SUPPORTED: i32 = 801;
        if code == NOT_SUPPORTED {
            return Ok(false);
        }
        self.driver.check("cuMemcpyBatchAsync", code)?;
        Ok(true)
    }
}

/// What a capture cannot record rightly.
fn check_capture(execution: &Execution<'_>) -> Result<(), BackendError> {
    let why = if !execution.after.is_empty() {
        "it has to come after an execution outside of the capture, which a graph cannot wait for"
    } else if !execution.program.rings.is_empty() {
        "its plan goes through staging memory that it shares with other plans, and a graph may be launched while they run; plan with \
         max_paths = 1"
    } else if execution.verify {
        "comparing bytes needs memory that executions share; unset MPGPU_VERIFY=bytes"
    } else {
        return Ok(());
    };
    Err(BackendError::NotSupported(format!("the stream is being captured, and this execution cannot be: {why}")))
}

/// A copy with its addresses.
pub(super) fn segment(execution: &Execution<'_>, copy: &Copy) -> Segment {
    Segment { dst: address(execution, copy.to), src: address(execution, copy.from), bytes: copy.bytes }
}

pub(super) fn address(execution: &Execution<'_>, place: Place) -> u64 {
    crate::backend::address(execution.program, execution.endpoints, execution.rings, place)
}
