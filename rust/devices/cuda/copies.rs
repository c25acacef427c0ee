//! One operation in its lane's stream: as a kernel, a batch, or one copy after the other.

use super::addresses::{address, segment};
use super::device::Mark;
use super::driver::{OutsideCapture, call, code, handle};
use super::lane::Lane;
use super::parts::Core;
use super::timing::Timing;
use super::workers::StreamHand;
use crate::backend::{BackendError, Execution, PlanState};
use crate::bridge::Segment;
use crate::plan::{Copy, Mechanism, Op};
use cudarc::driver::sys;
use smallvec::SmallVec;

impl Core {
    /// Enqueues one operation in its lane's stream, between two timestamps where those are asked for, and what it hands over to and from threads.
    pub fn enqueue_op(
        &self,
        execution: &Execution<'_>,
        index: usize,
        lane: &Lane<'_>,
        capturing: bool,
        timing: &mut Option<Timing>,
    ) -> Result<(), BackendError> {
        let op = &execution.program.ops[index];
        if let Some((job, divided)) = lane.threads {
            let (StreamHand { waits, tells }, stream) = (&divided.hands[index], handle(lane.stream));
            if !waits.is_empty() {
                self.gpus.wait_for_threads(stream, waits.iter().map(|copy| job.word(*copy)), job.value)?;
            }
            self.enqueue_untimed(execution, op, lane, capturing)?;
            return tells.map_or(Ok(()), |own| self.gpus.tell_threads(stream, job.word(own), job.value));
        }
        let enqueue = || self.enqueue_untimed(execution, op, lane, capturing);
        match timing {
            None => enqueue(),
            Some(timing) => timing.around(index, lane.at.gpu, lane.stream, enqueue),
        }
    }

    fn enqueue_untimed(&self, execution: &Execution<'_>, op: &Op, lane: &Lane<'_>, capturing: bool) -> Result<(), BackendError> {
        if op.mechanism == Mechanism::Kernel
            && let Some(kernel) = self.kernel_for(execution, lane.primary, lane.at.gpu)?
        {
            // A kernel goes to streams of the current context alone.
            let _current = lane.primary.enter()?;
            let execution = &execution.with_ends(lane.ends.as_ref());
            let segments: SmallVec<[Segment; 32]> = op.copies.iter().map(|copy| segment(execution, copy)).collect();
            // SAFETY: the GPU reaches every end of the plan; the caller of `execute` vouches for the buffers until completion.
            return unsafe { kernel.launch(self.gpus.driver, &segments, handle(lane.stream)) };
        }
        if lane.is_shut_out {
            return op.copies.iter().try_for_each(|copy| self.enqueue_by_whoever_may(execution, copy, lane, capturing));
        }
        let execution = &execution.with_ends(lane.ends.as_ref());
        if op.mechanism == Mechanism::Batch && op.copies.len() > 1 && self.enqueue_batch(execution, op, lane, capturing)? {
            return Ok(());
        }
        op.copies.iter().try_for_each(|copy| self.enqueue_copy(execution, copy, lane.state, lane.stream))
    }

    /// Enqueues a copy. Between memory that the driver knows by the call that takes nothing else: an end that its owner has freed is an
    /// error there. To `cuMemcpyAsync` such an end is host memory, which it reads or writes at once, and the process dies (H200, driver
    /// 580). Both take the same time, and pinned memory is memory of a device to both.
    pub fn enqueue_copy(&self, execution: &Execution<'_>, copy: &Copy, state: &PlanState, stream: usize) -> Result<(), BackendError> {
        let driver = self.gpus.driver;
        let Segment { dst, src, bytes } = segment(execution, copy);
        if state.knows(copy.from) && state.knows(copy.to) {
            // SAFETY: the program is valid, so both ranges lie inside the transfer or the slot; the caller of `execute` vouches for
            // the buffers until completion, and the engine for the slots.
            let code = unsafe { (driver.cuMemcpyDtoDAsync)(dst, src, bytes as usize, handle(stream)) };
            if code != code::INVALID_VALUE || !self.are_known(dst, src) {
                return driver.check("cuMemcpyDtoDAsync", code);
            }
            // Registered host memory, where GPUs have it at another address.
        } else {
            // Looked at beside a copy that takes the calling thread as long as its bytes do.
            self.check_freed(execution, state)?;
        }
        // SAFETY: as above.
        unsafe { call!(driver, cuMemcpyAsync(dst, src, bytes as usize, handle(stream))) }
    }

    /// Whether the driver knows both ends of a copy at present.
    #[cold]
    fn are_known(&self, dst: u64, src: u64) -> bool {
        [dst, src].iter().all(|address| self.gpus.attributes(*address).is_ok_and(|known| known.is_device() || known.is_host()))
    }

    /// Refuses an execution whose memory another library has freed. The driver does not: a graph or a kernel faults, after which the
    /// GPU's context is lost, and a batched copy dies with the process (H200, driver 580). Takes some 70 ns for each allocation that is
    /// not this backend's own; whose own memory it is knows when it was freed.
    pub fn check_freed(&self, execution: &Execution<'_>, state: &PlanState) -> Result<(), BackendError> {
        let watched = state.watched(|memory| {
            let mut found: Vec<(u64, u64)> =
                execution.endpoints.iter().flat_map(|ends| [ends.dst, ends.src]).zip(memory.iter().copied()).collect();
            found.retain(|(address, id)| *id != 0 && id >> 63 == 0 && !self.is_ours(*address));
            found.sort_unstable_by_key(|(_, id)| *id);
            found.dedup_by_key(|(_, id)| *id);
            found.into()
        });
        watched.iter().try_for_each(
            |&(address, id)| if self.gpus.is_still(address, id) { Ok(()) } else { Err(BackendError::InvalidPointer(address)) },
        )
    }

    /// Enqueues a copy of a lane whose GPU must not enter all memory of the plan, where no other one may either. It is made by a GPU that may enter both
    /// of its ends, in a stream that comes after the lane's work so far and before the rest of it.
    #[cold]
    fn enqueue_by_whoever_may(&self, execution: &Execution<'_>, copy: &Copy, lane: &Lane<'_>, capturing: bool) -> Result<(), BackendError> {
        let gpu = self.able_to_copy(lane.at.gpu, segment(execution, copy))?;
        // Notes the ends as that GPU has them.
        self.plan_is_reached(execution, gpu)?;
        let own = self.own_ends(execution, gpu);
        let own = &execution.with_ends(own.as_ref());
        let primary = self.gpus.peered(gpu)?;
        if gpu == lane.at.gpu {
            let _current = primary.enter()?;
            return self.enqueue_copy(own, copy, lane.state, lane.stream);
        }
        let wait = |stream: usize, mark: Mark| {
            // SAFETY: `mark` holds the event; both streams are ours or the caller's.
            unsafe { call!(self.gpus.driver, cuStreamWaitEvent(handle(stream), mark.event(), 0)) }
        };
        let stream = primary.lane(lane.caller, capturing)?;
        let enqueued = lane.primary.record(lane.stream).and_then(|before| {
            wait(stream, before)?;
            // For the copy alone: the lane may be a default stream, which is another one there.
            primary.enter().and_then(|_current| self.enqueue_copy(own, copy, lane.state, stream))?;
            wait(lane.stream, primary.record(stream)?)
        });
        if enqueued.is_err() && !capturing {
            let _outside = OutsideCapture::enter(self.gpus.driver);
            // SAFETY: a stream of ours. As where lanes are given back: nothing may be left at work on the buffers.
            unsafe { (self.gpus.driver.cuStreamSynchronize)(handle(stream)) };
        }
        primary.give_lane_back(stream, lane.caller, capturing);
        enqueued
    }

    /// One batched copy. `false` where the driver has none, or none for this stream.
    fn enqueue_batch(&self, execution: &Execution<'_>, op: &Op, lane: &Lane<'_>, capturing: bool) -> Result<bool, BackendError> {
        // The driver refuses batches in a default stream, and does not capture them.
        let Some(batch) = self.gpus.driver.cuMemcpyBatchAsync.filter(|_| !capturing && lane.stream > 2) else { return Ok(false) };
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
        self.gpus.driver.check("cuMemcpyBatchAsync", code)?;
        Ok(true)
    }
}
