//! The stream executor: lanes are streams, joined by events.
//!
//! The caller's stream itself is the first lane of its GPU, so a program of one lane there needs no event at all: a plain copy is one
//! call of the driver, and a second one records its end. Other lanes are internal streams, which wait for the caller's stream before
//! their first operation and which it waits for after their last. Under stream capture the same calls make the lanes branches of
//! the graph.

use super::Core;
use super::completion::{Captured, Finished};
use super::device::{Primary, handle, lock};
use super::driver::{Current, OutsideCapture, call};
use super::timing::Timing;
use crate::backend::{BackendError, Completion, Execution};
use crate::ffi::bridge::Segment;
use crate::plan::{Engine, Mechanism, Op, Place};
use cudarc::driver::sys;
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Plans whose reachability is remembered before those that are gone are swept out.
const MOST_REACHED: usize = 1024;

/// One lane of an execution.
struct Lane<'a> {
    gpu: usize,
    primary: &'a Primary,
    /// The `CUstream`.
    stream: usize,
    /// Whether it is one of ours, and not the caller's stream.
    internal: bool,
    /// Whether it waits for the caller's stream already.
    forked: bool,
}

impl Core {
    /// `timed`: with a timestamp before and after each operation.
    pub fn execute(self: &Arc<Core>, execution: &Execution<'_>, timed: bool) -> Result<Completion, BackendError> {
        let home = self.gpu_of(execution.stream)?;
        let primary = self.reach(home)?;
        let _current = primary.enter()?;
        let capturing = self.is_capturing(execution)?;
        if capturing {
            check_capture(execution)?;
            if timed {
                return Err(BackendError::NotSupported("timestamps cannot be captured: time an execution outside of a capture".into()));
            }
        }
        let end = if capturing { 0 } else { primary.event()? };
        let mut timing = timed.then(|| Timing::new(self.clone(), home));
        let verdict = self.enqueue(execution, home, capturing, &mut timing).and_then(|()| {
            let verdict = if execution.verify { Some(self.enqueue_verification(execution, home)?) } else { None };
            if !capturing {
                // SAFETY: an event of the stream's context, the caller's stream.
                unsafe { call!(self.driver, cuEventRecord(handle(end), handle(execution.stream.0))) }?;
            }
            Ok(verdict)
        });
        match verdict {
            Ok(_) if capturing => Ok(Arc::new(Captured)),
            Ok(verdict) => Ok(Arc::new(Finished::new(self.clone(), home, end, verdict, timing))),
            Err(error) => {
                if !capturing {
                    primary.give_event_back(end);
                }
                Err(error)
            }
        }
    }

    fn is_capturing(&self, execution: &Execution<'_>) -> Result<bool, BackendError> {
        let mut status = 0;
        // SAFETY: the caller's stream; the output is valid for the call.
        unsafe { call!(self.driver, cuStreamIsCapturing(handle(execution.stream.0), &mut status)) }?;
        if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as u32 {
            return Err(BackendError::NotSupported("the stream's capture was invalidated by an earlier call; end it first".into()));
        }
        Ok(status != 0)
    }

    /// Enqueues the copies. When it fails, what was enqueued has finished.
    fn enqueue(&self, execution: &Execution<'_>, home: usize, capturing: bool, timing: &mut Option<Timing>) -> Result<(), BackendError> {
        for completion in execution.after {
            let earlier = completion.as_any().downcast_ref::<Finished>().ok_or_else(|| {
                BackendError::NotSupported("an execution can only come after executions of its own backend that were not captured".into())
            })?;
            // SAFETY: the completion holds the event.
            unsafe { call!(self.driver, cuStreamWaitEvent(handle(execution.stream.0), handle(earlier.event()), 0)) }?;
        }
        if let Some(timing) = timing {
            timing.start(execution.stream.0)?;
        }
        if execution.program.ops.is_empty() {
            return Ok(());
        }
        // By itself, staged programs go as graphs: 0.5 to 1.5 % faster end to end from 32 MiB to 1 GiB, and a third less issuing
        // (two H200, `docs/performance.md`). The others gain nothing by it.
        let as_graph = match execution.engine {
            Engine::Graph => true,
            Engine::Auto => !execution.program.rings.is_empty(),
            Engine::Stream | Engine::Batch | Engine::Kernel => false,
        };
        if as_graph && !capturing && timing.is_none() && self.launch_graph(execution, home)? {
            return Ok(());
        }
        let mut lanes = SmallVec::new();
        let mut enqueued = self.take_lanes(execution, home, &mut lanes);
        if enqueued.is_ok() {
            enqueued = self.enqueue_ops(execution, &mut lanes, home, capturing, timing);
        }
        if let (Ok(()), Some(timing)) = (&enqueued, &mut *timing) {
            let others = lanes.iter().filter(|lane| lane.internal && lane.gpu != home);
            enqueued = others.map(|lane| (lane.gpu, lane.stream)).try_for_each(|lane| timing.join_clock(lane, execution.stream.0));
        }
        for lane in &lanes {
            if enqueued.is_err() && !capturing {
                let _outside = OutsideCapture::enter(self.driver);
                // SAFETY: a stream of ours or the caller's. Whoever gets the error may free the buffers, so nothing may be left at work
                // on them; an error here is the one that is being reported, or comes from the same cause.
                unsafe { (self.driver.cuStreamSynchronize)(handle(lane.stream)) };
            }
            if lane.internal {
                lane.primary.give_lane_back(lane.stream, capturing);
            }
        }
        enqueued
    }

    /// Finds a stream for each lane.
    fn take_lanes<'a>(&'a self, execution: &Execution<'_>, home: usize, lanes: &mut SmallVec<[Lane<'a>; 8]>) -> Result<(), BackendError> {
        let program = execution.program;
        // A copy engine serves a stream of any GPU, so a single lane of plain copies stays in the caller's stream whatever the GPU:
        // two events across devices would cost more than most such copies.
        let plain = program.lanes.len() == 1 && program.ops.iter().all(|op| op.mechanism == Mechanism::Copy);
        let mut caller_taken = false;
        for lane in &program.lanes {
            let gpu = if lane.device.is_host() || plain { home } else { lane.device.0 as usize };
            let primary = self.reach(gpu)?;
            let internal = caller_taken || gpu != home;
            let stream = if internal { primary.lane()? } else { execution.stream.0 };
            caller_taken |= !internal;
            lanes.push(Lane { gpu, primary, stream, internal, forked: !internal });
        }
        Ok(())
    }

    fn enqueue_ops(
        &self,
        execution: &Execution<'_>,
        lanes: &mut [Lane<'_>],
        home: usize,
        capturing: bool,
        timing: &mut Option<Timing>,
    ) -> Result<(), BackendError> {
        let driver = self.driver;
        let caller = handle(execution.stream.0);
        let ops = &execution.program.ops;
        if let [lane] = lanes
            && !lane.internal
        {
            return ops.iter().try_for_each(|op| self.enqueue_op(execution, op, lane, capturing, timing));
        }
        let home = self.primary(home)?;
        let start = Borrowed::record(self, home, execution.stream.0)?;
        // Which operations others wait for across lanes; their events, once recorded.
        let mut awaited: SmallVec<[bool; 64]> = smallvec![false; ops.len()];
        for op in ops {
            for before in op.after.iter().filter(|before| ops[before.0 as usize].lane != op.lane) {
                awaited[before.0 as usize] = true;
            }
        }
        let mut done: SmallVec<[Option<Borrowed<'_>>; 64]> = ops.iter().map(|_| None).collect();
        for (index, op) in ops.iter().enumerate() {
            let lane = &mut lanes[op.lane.0 as usize];
            let _current = Current::enter(driver, lane.primary.context())?;
            let stream = handle(lane.stream);
            if !lane.forked {
                // SAFETY: the event is held by `start`, the stream is ours.
                unsafe { call!(driver, cuStreamWaitEvent(stream, handle(start.event), 0)) }?;
                lane.forked = true;
            }
            for before in &op.after {
                if let Some(before) = &done[before.0 as usize] {
                    // SAFETY: the event is held by `done`, the stream is this lane's.
                    unsafe { call!(driver, cuStreamWaitEvent(stream, handle(before.event), 0)) }?;
                }
            }
            self.enqueue_op(execution, op, lane, capturing, timing)?;
            if awaited[index] {
                done[index] = Some(Borrowed::record(self, lane.primary, lane.stream)?);
            }
        }
        for lane in lanes.iter().filter(|lane| lane.internal && lane.forked) {
            let end = Borrowed::record(self, lane.primary, lane.stream)?;
            // SAFETY: the event is held by `end`; the caller's stream.
            unsafe { call!(driver, cuStreamWaitEvent(caller, handle(end.event), 0)) }?;
        }
        Ok(())
    }

    /// Enqueues one operation in its lane's stream, whose GPU's context is current, between two timestamps where those are asked for.
    fn enqueue_op(
        &self,
        execution: &Execution<'_>,
        op: &Op,
        lane: &Lane<'_>,
        capturing: bool,
        timing: &mut Option<Timing>,
    ) -> Result<(), BackendError> {
        match timing {
            None => self.enqueue_copies(execution, op, lane, capturing),
            Some(timing) => timing.around(lane.gpu, lane.stream, || self.enqueue_copies(execution, op, lane, capturing)),
        }
    }

    fn enqueue_copies(&self, execution: &Execution<'_>, op: &Op, lane: &Lane<'_>, capturing: bool) -> Result<(), BackendError> {
        let driver = self.driver;
        let segment =
            |copy: &crate::plan::Copy| Segment { dst: address(execution, copy.to), src: address(execution, copy.from), bytes: copy.bytes };
        let stream = handle(lane.stream);
        if op.mechanism == Mechanism::Kernel
            && self.plan_is_reached(execution, lane.gpu)?
            && let Some(kernel) = lane.primary.kernel()
        {
            let segments: SmallVec<[Segment; 32]> = op.copies.iter().map(segment).collect();
            // SAFETY: the GPU reaches every end of the plan; the caller of `execute` vouches for the buffers until completion.
            return unsafe { kernel.launch(driver, &segments, stream) };
        }
        if op.mechanism == Mechanism::Batch && op.copies.len() > 1 && self.enqueue_batch(execution, op, lane, capturing)? {
            return Ok(());
        }
        for copy in &op.copies {
            let Segment { dst, src, bytes } = segment(copy);
            // SAFETY: the program is valid, so both ranges lie inside the transfer or the slot; the caller of `execute` vouches for
            // the buffers until completion, and the engine for the slots.
            unsafe { call!(driver, cuMemcpyAsync(dst, src, bytes as usize, stream)) }?;
        }
        Ok(())
    }

    /// One batched copy. `false` where the driver has none, or none for this stream.
    fn enqueue_batch(&self, execution: &Execution<'_>, op: &Op, lane: &Lane<'_>, capturing: bool) -> Result<bool, BackendError> {
        // The driver refuses batches in a default stream, and does not capture them.
        let Some(batch) = self.driver.cuMemcpyBatchAsync.filter(|_| !capturing && lane.stream > 2) else { return Ok(false) };
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

    /// Whether kernels of `gpu` reach every end of the execution. Found out once for a plan.
    fn plan_is_reached(&self, execution: &Execution<'_>, gpu: usize) -> Result<bool, BackendError> {
        let key = (Arc::as_ptr(execution.endpoints).cast::<u8>().addr(), gpu);
        if let Some((_, reached)) = lock(&self.reached).get(&key).filter(|(plan, _)| plan.strong_count() > 0) {
            return Ok(*reached);
        }
        let mut reached = true;
        for (ends, _) in execution.endpoints.iter().zip(&execution.program.transfers).filter(|(_, bytes)| **bytes > 0) {
            reached = reached && self.kernel_reaches(gpu, ends.dst)? && self.kernel_reaches(gpu, ends.src)?;
        }
        for ring in &execution.program.rings {
            reached = reached && (ring.device.is_host() || self.has_access(gpu, ring.device.0 as usize)?);
        }
        if !reached {
            log::debug!("GPU {gpu} cannot reach all memory of a plan by a kernel: plain copies instead");
        }
        let mut known = lock(&self.reached);
        if known.len() >= MOST_REACHED {
            known.retain(|_, (plan, _)| plan.strong_count() > 0);
        }
        known.insert(key, (Arc::downgrade(execution.endpoints), reached));
        Ok(reached)
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

pub(super) fn address(execution: &Execution<'_>, place: Place) -> u64 {
    crate::backend::address(execution.program, execution.endpoints, execution.rings, place)
}

/// An event of the pool for the time of one call: whatever waits for it keeps what it stood for.
struct Borrowed<'a> {
    primary: &'a Primary,
    event: usize,
}

impl<'a> Borrowed<'a> {
    /// An event that stands for all work of `stream`, a stream of this GPU.
    fn record(core: &Core, primary: &'a Primary, stream: usize) -> Result<Borrowed<'a>, BackendError> {
        let borrowed = Borrowed { primary, event: primary.event()? };
        let _current = primary.enter()?;
        // SAFETY: an event and a stream of the same context.
        unsafe { call!(core.driver, cuEventRecord(handle(borrowed.event), handle(stream))) }?;
        Ok(borrowed)
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.primary.give_event_back(self.event);
    }
}
