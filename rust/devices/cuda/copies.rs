//! Enqueues one operation of a program (list of copy operations): as a kernel, as a batched copy, or as single copies.

use super::addresses::{address, segment};
use super::device::Mark;
use super::driver::{Driver, OutsideCapture, call, code, handle};
use super::lane::Lane;
use super::parts::Core;
use super::timing::Timing;
use super::workers::StreamHand;
use crate::backend::{BackendError, Execution, PlanState, files};
use crate::bridge::Segment;
use crate::guarded;
use crate::plan::{Copy, Mechanism, Op, Place};
use cudarc::driver::sys;
use smallvec::SmallVec;

impl Core {
    /// Enqueues one operation in the stream of its lane (sequence of operations). If requested, the operation is enclosed in timestamps. If
    /// copy threads take part in the execution, the stream also waits for and notifies these threads.
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
            // A kernel can be launched only in streams of the current context.
            let _current = lane.primary.enter()?;
            let execution = &execution.with_ends(lane.ends.as_ref());
            let segments: SmallVec<[Segment; 32]> = op.copies.iter().map(|copy| segment(execution, copy)).collect();
            // SAFETY: The GPU can access every source and destination of the plan. The caller of `execute` keeps the buffers valid until
            // the execution has completed.
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

    /// Enqueues a copy in a stream. If the driver knows the memory of both the source and the destination, the copy uses the call for
    /// device memory, because this call returns an error for freed memory. `cuMemcpyAsync` would treat freed memory as host memory and
    /// access it immediately, which kills the process (H200, driver 580). Both calls take the same time, and both accept pinned host memory
    /// as device memory.
    pub fn enqueue_copy(&self, execution: &Execution<'_>, copy: &Copy, state: &PlanState, stream: usize) -> Result<(), BackendError> {
        let driver = self.gpus.driver;
        let Segment { dst, src, bytes } = segment(execution, copy);
        if state.knows(copy.from) && state.knows(copy.to) {
            // SAFETY: The program is valid, so both ranges lie inside the transfer or the slot. The caller of `execute` keeps the buffers
            // valid until the execution has completed, and the engine keeps the slots valid.
            let code = unsafe { (driver.cuMemcpyDtoDAsync)(dst, src, bytes as usize, handle(stream)) };
            if code != code::INVALID_VALUE || !self.are_known(dst, src) {
                return driver.check("cuMemcpyDtoDAsync", code);
            }
            // The source or the destination is registered host memory, which GPUs access at an address other than the CPU's.
        } else {
            // The check takes little time compared with a copy of pageable memory, which occupies the calling thread for the duration of
            // the copy.
            self.check_freed(execution, state)?;
            if files::mapped_at(src, bytes).is_some() {
                return enqueue_from_file(driver, copy, Segment { dst, src, bytes }, stream);
            }
        }
        // SAFETY: The ranges are valid for the reasons given for the call above.
        unsafe { call!(driver, cuMemcpyAsync(dst, src, bytes as usize, handle(stream))) }
    }

    /// True if the driver currently knows the memory of both the source and the destination of a copy.
    #[cold]
    fn are_known(&self, dst: u64, src: u64) -> bool {
        [dst, src].iter().all(|address| self.gpus.attributes(*address).is_ok_and(|known| known.is_device() || known.is_host()))
    }

    /// Returns an error if another library has freed memory of the execution. The driver returns no error in this case: a graph or a kernel
    /// faults, after which the GPU's context is unusable, and a batched copy kills the process (H200, driver 580). The check takes about 70
    /// ns for each allocation that does not belong to this backend. The backend tracks the freeing of its own memory in other ways.
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

    /// Enqueues a copy of a lane (sequence of operations) whose GPU may not access all memory of the plan. A GPU that may access both the
    /// source and the destination makes this copy in an internal stream. The internal stream waits for the lane's earlier work, and the
    /// lane's later work waits for the internal stream.
    #[cold]
    fn enqueue_by_whoever_may(&self, execution: &Execution<'_>, copy: &Copy, lane: &Lane<'_>, capturing: bool) -> Result<(), BackendError> {
        let gpu = self.able_to_copy(lane.at.gpu, segment(execution, copy))?;
        // This call also determines the addresses that this GPU uses for the source and the destination.
        self.plan_is_reached(execution, gpu)?;
        let own = self.own_ends(execution, gpu);
        let own = &execution.with_ends(own.as_ref());
        let primary = self.gpus.peered(gpu)?;
        if gpu == lane.at.gpu {
            let _current = primary.enter()?;
            return self.enqueue_copy(own, copy, lane.state, lane.stream);
        }
        let wait = |stream: usize, mark: Mark| {
            // SAFETY: `mark` keeps the event valid. Each stream belongs to this library, or the caller keeps it valid.
            unsafe { call!(self.gpus.driver, cuStreamWaitEvent(handle(stream), mark.event(), 0)) }
        };
        let stream = primary.lane(lane.caller, capturing)?;
        let enqueued = lane.primary.record(lane.stream).and_then(|before| {
            wait(stream, before)?;
            // The context is current only during the enqueueing of the copy. The lane's stream may be a default stream, and its handle
            // would denote another stream in that context.
            primary.enter().and_then(|_current| self.enqueue_copy(own, copy, lane.state, stream))?;
            wait(lane.stream, primary.record(stream)?)
        });
        if enqueued.is_err() && !capturing {
            let _outside = OutsideCapture::enter(self.gpus.driver);
            // SAFETY: The stream belongs to this library. It is synchronized because no work on the buffers may remain when a lane is
            // returned.
            unsafe { (self.gpus.driver.cuStreamSynchronize)(handle(stream)) };
        }
        primary.give_lane_back(stream, lane.caller, capturing);
        enqueued
    }

    /// Enqueues all copies of an operation as one batched copy. Returns false if the driver does not support batched copies, or not in this
    /// stream.
    fn enqueue_batch(&self, execution: &Execution<'_>, op: &Op, lane: &Lane<'_>, capturing: bool) -> Result<bool, BackendError> {
        // The driver refuses batched copies in a default stream, and cannot capture them.
        let Some(batch) = self.gpus.driver.cuMemcpyBatchAsync.filter(|_| !capturing && lane.stream > 2) else { return Ok(false) };
        if op.copies.iter().any(|copy| files::mapped_at(address(execution, copy.from), copy.bytes).is_some()) {
            return Ok(false);
        }
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
        // SAFETY: The three lists have equal lengths, and one set of attributes applies to all copies. The driver reads them before it
        // returns. The buffers are valid for the same reasons as for single copies.
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

/// Copies from a mapped file. Reads parts of the file one by one into a local buffer, and enqueues a copy of each part. The driver reads
/// pageable memory before its call returns, so the buffer can then be reused. If the driver accessed the mapping itself, a truncated file
/// would raise `SIGBUS`.
#[cold]
fn enqueue_from_file(driver: &Driver, copy: &Copy, Segment { dst, src, bytes }: Segment, stream: usize) -> Result<(), BackendError> {
    const PART: u64 = 2 << 20;
    if driver.is_capturing(handle(stream))? {
        let why = "a graph cannot read a mapped file; read the file into memory first, or execute the plan outside the capture";
        return Err(BackendError::NotSupported(why.into()));
    }
    let transfer = if let Place::Source { transfer, .. } = copy.from { transfer } else { 0 };
    let mut part = vec![0_u8; bytes.min(PART) as usize];
    let own = part.as_mut_ptr().expose_provenance() as u64;
    for at in (0..bytes).step_by(PART as usize) {
        let count = PART.min(bytes - at) as usize;
        // SAFETY: the buffer is large enough, and only this call uses it.
        unsafe { guarded::copy(own, src + at, count, [false, true]) }.map_err(|fault| fault.error(transfer))?;
        // SAFETY: The destination is valid for the reasons given in `Core::enqueue_copy`.
        unsafe { call!(driver, cuMemcpyAsync(dst + at, own, count, handle(stream))) }?;
    }
    Ok(())
}
