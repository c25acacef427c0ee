//! GPUs, their primary contexts, and what is kept in each: lanes, events, the copy kernel.

use super::discover::uuid_text;
use super::driver::{CUcontext, CUdevice, CUevent, CUstream, Current, Driver, OutsideCapture, call, code, handle, lock};
use super::kernel::Kernel;
use super::nvml::nvml;
use crate::backend::BackendError;
use crate::took::took;
use cudarc::driver::sys;
use std::collections::VecDeque;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// What is allocated for the sake of freeing it.
const DRAINED_BYTES: usize = 256;

/// Above this many lanes of one device, a lane that is still at work is used again rather than one more created.
const MOST_LANES: usize = 32;

/// The stream of an execution, as far as one can be told from another by its handle.
#[derive(Copy, Clone, Debug)]
pub(super) struct Caller(usize);

impl Caller {
    /// Some stream.
    const UNKNOWN: Caller = Caller(usize::MAX);

    /// The stream of this handle, which belongs to `gpu`. The legacy default stream has two handles, the same for all GPUs; the
    /// per-thread default stream has one for all threads.
    pub fn new(stream: usize, gpu: usize) -> Caller {
        match stream {
            // No handle of the driver is so small a number.
            0 | 1 => Caller(gpu),
            2 => Caller::UNKNOWN,
            handle => Caller(handle),
        }
    }

    /// Whether both are surely one stream.
    pub fn is(self, other: Caller) -> bool {
        self.0 == other.0 && self.0 != Caller::UNKNOWN.0
    }
}

/// A GPU in sight of the process.
#[derive(Debug)]
pub(super) struct Device {
    pub ordinal: CUdevice,
    primary: OnceLock<Primary>,
    /// Held while the primary context is retained, so that it is retained once.
    retaining: Mutex<()>,
}

/// GPUs whose primary contexts this process has kept: one bit for each. A context that was once used stays until the process ends, as with the CUDA
/// runtime. The driver destroys a primary context with its last user and makes it anew for the next, which few programs ever have it do:
/// in two of some fifty runs of the GPU tests, which then did it all the time, `cuGraphLaunch` died of it or of something beside it
/// (driver 580.159.04, docs/guide/gpus.md).
static KEPT: AtomicU64 = AtomicU64::new(0);

/// The primary context of a GPU: the one that the CUDA runtime and every library on top of it use.
#[derive(Debug)]
pub(super) struct Primary {
    driver: &'static Driver,
    ordinal: CUdevice,
    /// A `CUcontext`, valid while this lives, unless somebody resets the device.
    context: usize,
    /// Its number ([`Driver::context_id`]).
    pub id: u64,
    /// The device was reset since, which was seen once.
    is_lost: AtomicBool,
    /// `CUevent`s of this context that nobody needs at the moment.
    events: Arc<Mutex<Vec<usize>>>,
    /// Those that take the time.
    timers: Arc<Mutex<Vec<usize>>>,
    lanes: Mutex<Lanes>,
    /// `CUstream`s that were made for the caller, and those of them that the caller has destroyed.
    callers: Mutex<Vec<usize>>,
    retired: Mutex<Vec<usize>>,
    kernel: OnceLock<Option<Kernel>>,
    /// Devices to whose memory this context has been given access, or been found to have none: one bit for each.
    pub peers: AtomicU64,
    /// Devices to whose memory this context has access, itself included.
    pub access: AtomicU64,
}

/// An event of a context's pool, which takes it back when this is dropped. What was enqueued to wait for it goes on waiting for what it
/// stood for then.
#[derive(Debug)]
pub(super) struct Mark {
    pool: Arc<Mutex<Vec<usize>>>,
    /// A `CUevent`.
    event: usize,
}

impl Mark {
    pub fn event(&self) -> CUevent {
        handle(self.event)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        lock(&self.pool).push(self.event);
    }
}

/// A lane that nobody enqueues into at the moment.
#[derive(Copy, Clone, Debug)]
struct Idle {
    /// A `CUstream`.
    stream: usize,
    /// The caller's stream that goes on after its last work.
    after: Caller,
}

#[derive(Debug, Default)]
struct Lanes {
    /// The one longest unused first.
    idle: VecDeque<Idle>,
    /// Lanes that became part of a capture. They are of use again when it has ended.
    captured: Vec<Idle>,
    count: usize,
}

impl Lanes {
    /// A lane that was last joined by the stream `caller`, whether or not it still has work: what comes next in that stream comes after
    /// that work anyway, so this lane delays nothing. In a time loop every lane is found here, and the driver need not be asked.
    ///
    /// The driver keeps a destroyed stream until its work has finished (`cuStreamDestroy`), so another stream that gets its handle
    /// finds idle lanes.
    fn take_of(&mut self, caller: Caller) -> Option<usize> {
        let index = self.idle.iter().rposition(|lane| lane.after.is(caller))?;
        self.idle.remove(index).map(|lane| lane.stream)
    }

    /// A lane that is part of the same capture, of the stream `caller`, and was joined by it.
    fn take_captured(&mut self, caller: Caller) -> Option<usize> {
        let index = self.captured.iter().rposition(|lane| lane.after.is(caller))?;
        Some(self.captured.swap_remove(index).stream)
    }

    /// A lane that has no work left, because work of an earlier execution would delay the next one; or any, where there are enough.
    fn take_idle(&mut self, is_idle: impl Fn(usize) -> bool) -> Option<usize> {
        let index = self.idle.iter().position(|lane| is_idle(lane.stream));
        let index = index.or((self.count >= MOST_LANES).then_some(0))?;
        self.idle.remove(index).map(|lane| lane.stream)
    }
}

impl Device {
    pub fn new(ordinal: CUdevice) -> Device {
        Device { ordinal, primary: OnceLock::new(), retaining: Mutex::new(()) }
    }

    /// Bytes of the GPU's memory that are in use, by whomever, where the log wants to know and NVML tells.
    fn used_memory(&self, driver: &Driver) -> Option<u64> {
        let mut uuid = [0_u8; 16];
        // SAFETY: the output is valid for the call.
        let is_named = log::log_enabled!(log::Level::Info) && unsafe { call!(driver, cuDeviceGetUuid(&mut uuid, self.ordinal)) }.is_ok();
        let used = || nvml()?.device_by_uuid(uuid_text(&uuid).as_str())?.memory_info().map(|memory| memory.used);
        is_named.then(used)?.ok()
    }

    /// The primary context, if it has been needed before.
    pub fn used(&self) -> Option<&Primary> {
        self.primary.get()
    }

    /// The primary context, retained when it is first needed.
    pub fn primary(&self, driver: &'static Driver) -> Result<&Primary, BackendError> {
        if let Some(primary) = self.primary.get() {
            return Ok(primary);
        }
        let _once = lock(&self.retaining);
        if self.primary.get().is_none() {
            let _outside = OutsideCapture::enter(driver);
            let mut context: CUcontext = std::ptr::null_mut();
            let before = self.used_memory(driver);
            // SAFETY: the output is valid for the call. The driver keeps the current context as it is.
            took(format_args!("GPU {}: primary context retained", self.ordinal), || unsafe {
                call!(driver, cuDevicePrimaryCtxRetain(&mut context, self.ordinal))
            })?;
            let taken = before.zip(self.used_memory(driver)).map(|(before, after)| after.saturating_sub(before) >> 20);
            let taken = taken.map_or(String::new(), |mebibytes| format!(", which took {mebibytes} MiB of its memory"));
            log::info!("GPU {}: primary context retained{taken}", self.ordinal);
            let id = driver.context_id(self.ordinal, context).map_err(|code| {
                // SAFETY: retained just now.
                unsafe { (driver.cuDevicePrimaryCtxRelease)(self.ordinal) };
                driver.error("cuCtxGetId", code)
            })?;
            let primary = Primary {
                driver,
                ordinal: self.ordinal,
                context: context.expose_provenance(),
                id,
                is_lost: AtomicBool::new(false),
                events: Arc::default(),
                timers: Arc::default(),
                lanes: Mutex::default(),
                callers: Mutex::default(),
                retired: Mutex::default(),
                kernel: OnceLock::new(),
                peers: AtomicU64::new(1 << self.ordinal.clamp(0, 63)),
                access: AtomicU64::new(1 << self.ordinal.clamp(0, 63)),
            };
            return Ok(self.primary.get_or_init(|| primary));
        }
        self.primary(driver)
    }
}

impl Primary {
    pub fn context(&self) -> CUcontext {
        handle(self.context)
    }

    /// Makes this context current until the guard is dropped.
    pub fn enter(&self) -> Result<Current, BackendError> {
        Current::enter(self.driver, self.context())
    }

    /// Whether somebody has reset the device (`cudaDeviceReset`) since it was first used here. Then all that was made in this context is
    /// gone. The driver answers calls that are given any of it with an error, until somebody uses the device again: from then on it does
    /// not survive those that are given a stream (driver 580).
    pub fn is_lost(&self) -> bool {
        if self.is_lost.load(Ordering::Relaxed) {
            return true;
        }
        let is_lost = match self.driver.context_id(self.ordinal, self.context()) {
            Ok(id) => id != self.id,
            // Any other error says nothing of a reset, and the driver answers what is asked next with it.
            Err(code) => matches!(code, code::CONTEXT_IS_DESTROYED | code::INVALID_CONTEXT | code::DEINITIALIZED),
        };
        if is_lost && !self.is_lost.swap(true, Ordering::Relaxed) {
            // While a process ends the driver may have ended before us, which looks the same.
            log::debug!("{}", self.lost());
        }
        is_lost
    }

    /// Refuses a context that is lost.
    pub fn check(&self) -> Result<(), BackendError> {
        if self.is_lost() { Err(self.lost()) } else { Ok(()) }
    }

    #[cold]
    fn lost(&self) -> BackendError {
        BackendError::Driver {
            what: "cudaDeviceReset".into(),
            reason: format!(
                "GPU {} was reset while this context used it, and memory, streams, events and plans there are gone; destroy the context, \
                 and create a new one",
                self.ordinal
            ),
            code: i64::from(code::CONTEXT_IS_DESTROYED),
        }
    }

    /// Waits for all work of this GPU that was enqueued up to now, as `cudaFree` does, and leaves out what is captured, which has not run.
    ///
    /// The context is not synchronised: while a stream is being captured, by whatever thread, the driver answers that with an error and ends
    /// the capture. Streams of ours are waited for by events. Those of others may have been destroyed; freeing memory waits for them.
    pub fn drain(&self) -> Result<(), BackendError> {
        let _outside = OutsideCapture::enter(self.driver);
        let _current = self.enter()?;
        let callers = lock(&self.callers).clone();
        for stream in callers.into_iter().filter(|stream| !self.is_capturing(*stream)) {
            let mark = self.record(stream)?;
            // SAFETY: an event of ours, which was recorded just now.
            unsafe { call!(self.driver, cuEventSynchronize(mark.event())) }?;
        }
        let mut memory = 0;
        // SAFETY: the output is valid for the call.
        if unsafe { (self.driver.cuMemAlloc)(&mut memory, DRAINED_BYTES) } == 0 {
            // SAFETY: allocated just now.
            return unsafe { call!(self.driver, cuMemFree(memory)) };
        }
        // Without any memory left. Better a capture that is ended than memory that goes while it is used.
        // SAFETY: no argument.
        unsafe { call!(self.driver, cuCtxSynchronize()) }
    }

    /// An event of this context from those of `pool` that are free.
    fn event(&self, pool: &Mutex<Vec<usize>>, flags: sys::CUevent_flags) -> Result<usize, BackendError> {
        if let Some(event) = lock(pool).pop() {
            return Ok(event);
        }
        let _outside = OutsideCapture::enter(self.driver);
        let _current = self.enter()?;
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: the output is valid for the call.
        unsafe { call!(self.driver, cuEventCreate(&mut event, flags as c_uint)) }?;
        Ok(event.expose_provenance())
    }

    /// An event of the pool, to be recorded.
    pub fn mark(&self) -> Result<Mark, BackendError> {
        Ok(Mark { event: self.event(&self.events, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?, pool: self.events.clone() })
    }

    /// As [`Primary::record`], by an event that takes the time.
    pub fn record_time(&self, stream: usize) -> Result<Mark, BackendError> {
        let mark = Mark { event: self.event(&self.timers, sys::CUevent_flags::CU_EVENT_DEFAULT)?, pool: self.timers.clone() };
        // SAFETY: as there.
        unsafe { call!(self.driver, cuEventRecord(mark.event(), handle(stream))) }?;
        Ok(mark)
    }

    /// An event of the pool that stands for all work of `stream`, a stream of this context, up to now. Needs no current context: the
    /// event and the stream are of the same one (`cuEventRecord`).
    pub fn record(&self, stream: usize) -> Result<Mark, BackendError> {
        let mark = self.mark()?;
        // SAFETY: an event of this context that is ours alone; a stream of the same context.
        unsafe { call!(self.driver, cuEventRecord(mark.event(), handle(stream))) }?;
        Ok(mark)
    }

    /// A stream that orders with no other and that nobody else enqueues into, for an execution in the stream `caller`.
    pub fn lane(&self, caller: Caller, is_captured: bool) -> Result<usize, BackendError> {
        let mut lanes = lock(&self.lanes);
        let captured = if is_captured { lanes.take_captured(caller) } else { None };
        if let Some(lane) = captured.or_else(|| lanes.take_of(caller)) {
            return Ok(lane);
        }
        let _outside = OutsideCapture::enter(self.driver);
        let _current = self.enter()?;
        let mut ended = std::mem::take(&mut lanes.captured);
        lanes.captured = ended.extract_if(.., |lane| self.is_capturing(lane.stream)).collect();
        lanes.idle.extend(ended.into_iter().map(|lane| Idle { after: Caller::UNKNOWN, ..lane }));
        if let Some(lane) = lanes.take_idle(|lane| self.is_idle(lane)) {
            return Ok(lane);
        }
        let lane = self.create_stream()?;
        lanes.count += 1;
        Ok(lane)
    }

    /// A stream for the caller: one of those that were taken back and have nothing to do, or a new one.
    pub fn caller_stream(&self) -> Result<usize, BackendError> {
        let _outside = OutsideCapture::enter(self.driver);
        let _current = self.enter()?;
        let mut retired = lock(&self.retired);
        let is_free = |stream: &usize| !self.is_capturing(*stream) && self.is_idle(*stream);
        if let Some(index) = retired.iter().position(is_free) {
            return Ok(retired.swap_remove(index));
        }
        drop(retired);
        let stream = self.create_stream()?;
        lock(&self.callers).push(stream);
        Ok(stream)
    }

    /// Takes a stream of the caller back. It is not destroyed, because the driver would give its address to the next stream, and use
    /// of the old handle, which the driver does not survive, could no longer be told.
    pub fn retire_stream(&self, stream: usize) {
        lock(&self.retired).push(stream);
    }

    fn create_stream(&self) -> Result<usize, BackendError> {
        let mut stream: CUstream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the output is valid for the call.
        unsafe { call!(self.driver, cuStreamCreate(&mut stream, flags)) }?;
        Ok(stream.expose_provenance())
    }

    /// Whether a stream of this backend, which is not being captured, has no work left. One whose work has failed has none.
    fn is_idle(&self, stream: usize) -> bool {
        // SAFETY: the stream is one of this context's that lives as long as it does.
        unsafe { (self.driver.cuStreamQuery)(handle(stream)) != code::NOT_READY }
    }

    /// Takes back a lane that the stream `caller` goes on after. Its work need not have finished.
    pub fn give_lane_back(&self, stream: usize, caller: Caller, captured: bool) {
        let mut lanes = lock(&self.lanes);
        let lane = Idle { stream, after: caller };
        if captured { lanes.captured.push(lane) } else { lanes.idle.push_back(lane) }
    }

    fn is_capturing(&self, stream: usize) -> bool {
        let mut status = 0;
        // SAFETY: the stream is one of this context's lanes; the output is valid for the call.
        let code = unsafe { (self.driver.cuStreamIsCapturing)(handle(stream), &mut status) };
        code != 0 || status != 0
    }

    /// Its number.
    pub fn gpu(&self) -> usize {
        self.ordinal as usize
    }

    /// The fused copy kernel, loaded when it is first needed. `None` where the driver cannot load it, which is logged once.
    pub fn kernel(&self) -> Option<&Kernel> {
        let load = || {
            let _outside = OutsideCapture::enter(self.driver);
            let load = || self.enter().and_then(|_current| Kernel::load(self.driver, self.ordinal));
            let loaded = took(format_args!("GPU {}: kernels loaded", self.ordinal), load);
            loaded.inspect_err(|error| log::warn!("GPU {}: no fused copy kernel, plain copies instead: {error}", self.ordinal)).ok()
        };
        self.kernel.get_or_init(load).as_ref()
    }

    /// Gives this context access to the memory of `peer`, where the hardware has it. Without access the driver takes copies between
    /// the two through host memory.
    pub fn enable_access(&self, peer: &Primary) -> Result<(), BackendError> {
        let bit = 1 << peer.ordinal.clamp(0, 63);
        if self.peers.load(Ordering::Acquire) & bit != 0 {
            return Ok(());
        }
        let _outside = OutsideCapture::enter(self.driver);
        let mut can = 0;
        // SAFETY: the output is valid for the call.
        unsafe { call!(self.driver, cuDeviceCanAccessPeer(&mut can, self.ordinal, peer.ordinal)) }?;
        if can != 0 {
            let _current = self.enter()?;
            // SAFETY: both contexts are retained. Two threads may do this at once: the later one is told so.
            let enable = || unsafe { (self.driver.cuCtxEnablePeerAccess)(peer.context(), 0) };
            let code = took(format_args!("GPU {}: access to GPU {}", self.ordinal, peer.ordinal), enable);
            if code != code::PEER_ACCESS_ALREADY_ENABLED {
                self.driver.check("cuCtxEnablePeerAccess", code)?;
            }
            self.access.fetch_or(bit, Ordering::AcqRel);
        } else {
            log::info!(
                "GPU {} has no peer access to GPU {}: the driver takes their copies through host memory",
                self.ordinal,
                peer.ordinal
            );
        }
        self.peers.fetch_or(bit, Ordering::AcqRel);
        Ok(())
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        let driver = self.driver;
        if !self.is_lost() {
            self.give_back();
        }
        let bit = 1 << self.ordinal.clamp(0, 63);
        if KEPT.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            return;
        }
        // SAFETY: retained once, in `Device::primary`, which a reset does not change.
        let code = unsafe { (driver.cuDevicePrimaryCtxRelease)(self.ordinal) };
        // While a process ends the driver may have ended before us.
        if code != 0 && code != code::DEINITIALIZED {
            log::warn!("GPU {}: {}", self.ordinal, driver.error("cuDevicePrimaryCtxRelease", code));
        }
    }
}

impl Primary {
    /// Gives back what was made in this context.
    fn give_back(&mut self) {
        let driver = self.driver;
        // Tried all the same where that fails: nobody else would.
        let _current = self.enter();
        let events = [&self.events, &self.timers].map(|pool| std::mem::take(&mut *lock(pool)));
        let lanes = std::mem::take(&mut *lock(&self.lanes));
        let callers = std::mem::take(&mut *lock(&self.callers));
        // SAFETY: events, lanes and the kernel are this context's own, and nobody has them any more. The driver frees each when
        // what is enqueued has finished. An error of an earlier kernel may be reported here once more; it is not ours to handle.
        unsafe {
            for event in events.into_iter().flatten() {
                (driver.cuEventDestroy)(handle(event));
            }
            let ours = lanes.idle.into_iter().chain(lanes.captured).map(|lane| lane.stream);
            for lane in ours.chain(callers) {
                (driver.cuStreamDestroy)(handle(lane));
            }
            if let Some(Some(kernel)) = self.kernel.get() {
                kernel.unload(driver);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(after: &[Caller], count: usize) -> Lanes {
        let idle = (10..).zip(after).map(|(stream, after)| Idle { stream, after: *after }).collect();
        Lanes { idle, captured: Vec::new(), count }
    }

    #[test]
    fn the_default_stream_of_a_gpu_is_known_by_both_handles_and_that_of_a_thread_by_none() {
        let caller = Caller::new;
        assert!(caller(0, 3).is(caller(1, 3)) && !caller(0, 3).is(caller(0, 2)));
        assert!(!caller(2, 0).is(caller(2, 0)), "each thread has its own");
        assert!(caller(0x7f00, 0).is(caller(0x7f00, 0)) && !caller(0x7f00, 0).is(caller(0x7f08, 0)));
    }

    #[test]
    fn a_stream_gets_its_lanes_again_and_another_one_only_those_that_are_idle() {
        let [mine, other] = [0x100, 0x200].map(|stream| Caller::new(stream, 0));
        let mut lanes = lanes(&[other, mine, other, mine], 4);
        assert_eq!((lanes.take_of(mine), lanes.take_of(mine), lanes.take_of(mine)), (Some(13), Some(11), None));
        assert_eq!(lanes.take_idle(|lane| lane == 12), Some(12));
        assert_eq!(lanes.take_idle(|_| false), None, "one more is to be created");
        lanes.count = MOST_LANES;
        assert_eq!((lanes.take_idle(|_| false), lanes.take_idle(|_| true)), (Some(10), None));
    }
}
