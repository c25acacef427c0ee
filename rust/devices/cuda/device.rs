//! Manages the primary context of each GPU, with its events, its copy kernel and its internal streams (lanes).

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

/// Size in bytes of the memory that [`Primary::drain`] allocates and frees in order to wait: freeing GPU memory waits for all work of the
/// GPU.
const DRAINED_BYTES: usize = 256;

/// Maximum number of internal streams (lanes) of one GPU. If all of these are busy, an execution reuses a busy one instead of creating
/// another.
const MOST_LANES: usize = 32;

/// Identity of the stream into which a caller enqueues an execution, as far as the stream's handle identifies the stream.
#[derive(Copy, Clone, Debug)]
pub(super) struct Caller(usize);

impl Caller {
    /// Identity of a stream that cannot be identified. It compares as different from every identity, including itself.
    const UNKNOWN: Caller = Caller(usize::MAX);

    /// Creates the identity of the stream with the handle `stream`, which belongs to `gpu`. The legacy default stream of each GPU has two
    /// handles, which are the same on all GPUs. The per-thread default streams of all threads have the same handle, so they cannot be
    /// identified.
    pub fn new(stream: usize, gpu: usize) -> Caller {
        match stream {
            // Handles that the driver creates are larger than any GPU number.
            0 | 1 => Caller(gpu),
            2 => Caller::UNKNOWN,
            handle => Caller(handle),
        }
    }

    /// True if both identities are known to denote the same stream.
    pub fn is(self, other: Caller) -> bool {
        self.0 == other.0 && self.0 != Caller::UNKNOWN.0
    }
}

/// GPU that is visible to this process. It contains the primary context after the context has been retained.
#[derive(Debug)]
pub(super) struct Device {
    pub ordinal: CUdevice,
    primary: OnceLock<Primary>,
    /// Lock that a thread holds while it retains the primary context, so that two threads do not retain the context twice.
    retaining: Mutex<()>,
}

/// Bit mask of the GPUs whose primary contexts this process keeps until it ends, like the CUDA runtime does. Otherwise, the driver would
/// destroy a primary context with its last user and create a new one for the next user. Few applications cause contexts to be destroyed and
/// created again, and the driver does not handle this reliably. When the GPU tests did so continually, `cuGraphLaunch` crashed in two of
/// about fifty runs, directly or as a side effect (driver 580.159.04, docs/guide/gpus.md).
static KEPT: AtomicU64 = AtomicU64::new(0);

/// Primary context of a GPU. The CUDA runtime, and every library that is based on it, uses the same context.
#[derive(Debug)]
pub(super) struct Primary {
    driver: &'static Driver,
    ordinal: CUdevice,
    /// Handle of the context (`CUcontext`). It is valid while this value lives, unless the device is reset.
    context: usize,
    /// Driver's unique number of the context ([`Driver::context_id`]), or 0 if the driver has no context numbers.
    pub id: u64,
    /// True once a reset of the device has been detected.
    is_lost: AtomicBool,
    /// Unused events (`CUevent`) of this context that have no timestamps.
    events: Arc<Mutex<Vec<usize>>>,
    /// Unused events (`CUevent`) of this context that have timestamps.
    timers: Arc<Mutex<Vec<usize>>>,
    lanes: Mutex<Lanes>,
    /// Handles of streams (`CUstream`) that were created for callers, including streams that the caller has destroyed.
    callers: Mutex<Vec<usize>>,
    retired: Mutex<Vec<usize>>,
    kernel: OnceLock<Option<Kernel>>,
    /// Bit mask of the GPUs for which this context has tried to enable peer access, successfully or not.
    pub peers: AtomicU64,
    /// Bit mask of the GPUs whose `cuMemAlloc` memory this context can access, including its own GPU.
    pub access: AtomicU64,
}

/// Event from a context's pool of events. Dropping the value returns the event to the pool. A stream that already waits for the event is
/// not affected if the event is recorded again.
#[derive(Debug)]
pub(super) struct Mark {
    pool: Arc<Mutex<Vec<usize>>>,
    /// Handle of the event (`CUevent`) that this value refers to.
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

/// Internal stream (lane) that no execution uses at present, with the stream that waits for its last work.
#[derive(Copy, Clone, Debug)]
struct Idle {
    /// Handle of the internal stream (`CUstream`).
    stream: usize,
    /// Caller's stream that used this internal stream last. The caller's stream waits for the last work in the internal stream.
    after: Caller,
}

#[derive(Debug, Default)]
struct Lanes {
    /// Unused internal streams. The stream that has been unused for the longest time comes first.
    idle: VecDeque<Idle>,
    /// Internal streams that became part of a stream capture. They are reusable for other executions after the capture has ended.
    captured: Vec<Idle>,
    count: usize,
}

impl Lanes {
    /// Removes and returns an internal stream for whose last work the stream `caller` already waits, even if that work is still running.
    /// Reusing it adds no delay, because the next work of `caller` waits for the last work anyway. In a time loop, all internal streams are
    /// found in this way, without a query of the driver.
    ///
    /// A new stream may have the same handle as a destroyed stream. This causes no error, because the driver keeps a destroyed stream until
    /// its work has finished (`cuStreamDestroy`). Until then, no new stream has this handle.
    fn take_of(&mut self, caller: Caller) -> Option<usize> {
        let index = self.idle.iter().rposition(|lane| lane.after.is(caller))?;
        self.idle.remove(index).map(|lane| lane.stream)
    }

    /// Removes and returns an internal stream that became part of a stream capture and for whose last work the stream `caller` already
    /// waits.
    fn take_captured(&mut self, caller: Caller) -> Option<usize> {
        let index = self.captured.iter().rposition(|lane| lane.after.is(caller))?;
        Some(self.captured.swap_remove(index).stream)
    }

    /// Removes and returns an internal stream without pending work, because pending work would delay the next execution. If every stream
    /// has pending work and the GPU has the maximum number of internal streams, returns a busy stream. Otherwise returns `None`.
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

    /// Returns the number of bytes of GPU memory that all processes use together. Returns `None` if log messages of level info are disabled
    /// or NVML does not report the number.
    fn used_memory(&self, driver: &Driver) -> Option<u64> {
        let mut uuid = [0_u8; 16];
        // SAFETY: The driver writes to a variable that outlives the call.
        let is_named = log::log_enabled!(log::Level::Info) && unsafe { call!(driver, cuDeviceGetUuid(&mut uuid, self.ordinal)) }.is_ok();
        let used = || nvml()?.device_by_uuid(uuid_text(&uuid).as_str())?.memory_info().map(|memory| memory.used);
        is_named.then(used)?.ok()
    }

    /// Returns the GPU's primary context, or `None` if it has not been retained yet.
    pub fn used(&self) -> Option<&Primary> {
        self.primary.get()
    }

    /// Returns the GPU's primary context. The first call retains it.
    pub fn primary(&self, driver: &'static Driver) -> Result<&Primary, BackendError> {
        if let Some(primary) = self.primary.get() {
            return Ok(primary);
        }
        let _once = lock(&self.retaining);
        if self.primary.get().is_none() {
            let _outside = OutsideCapture::enter(driver);
            let mut context: CUcontext = std::ptr::null_mut();
            let before = self.used_memory(driver);
            // SAFETY: The driver writes to a variable that outlives the call. The driver does not change the current context.
            took(format_args!("GPU {}: primary context retained", self.ordinal), || unsafe {
                call!(driver, cuDevicePrimaryCtxRetain(&mut context, self.ordinal))
            })?;
            let taken = before.zip(self.used_memory(driver)).map(|(before, after)| after.saturating_sub(before) >> 20);
            let taken = taken.map_or(String::new(), |mebibytes| format!(", {mebibytes} MiB of its memory used"));
            log::info!("GPU {}: primary context retained{taken}", self.ordinal);
            let id = driver.context_id(self.ordinal, context).map_err(|code| {
                // SAFETY: The context was retained just now, and nothing has released it since.
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

    /// Makes this context current on the calling thread until the returned guard is dropped.
    pub fn enter(&self) -> Result<Current, BackendError> {
        Current::enter(self.driver, self.context())
    }

    /// True if the device was reset (`cudaDeviceReset`) since this backend first used it. A reset destroys all objects of the context.
    /// Until the device is used again, the driver returns an error for calls that use these objects. After that, a call that uses a stream
    /// of the old context crashes (driver 580).
    pub fn is_lost(&self) -> bool {
        if self.is_lost.load(Ordering::Relaxed) {
            return true;
        }
        let is_lost = match self.driver.context_id(self.ordinal, self.context()) {
            Ok(id) => id != self.id,
            // Any other error has a cause other than a reset, and the next call would return it as well.
            Err(code) => matches!(code, code::CONTEXT_IS_DESTROYED | code::INVALID_CONTEXT | code::DEINITIALIZED),
        };
        if is_lost && !self.is_lost.swap(true, Ordering::Relaxed) {
            // At the end of a process, the driver may have shut down before this call. It then returns the same code as after a reset.
            log::debug!("{}", self.lost());
        }
        is_lost
    }

    /// Returns an error if the context was lost by a reset of the device.
    pub fn check(&self) -> Result<(), BackendError> {
        if self.is_lost() { Err(self.lost()) } else { Ok(()) }
    }

    #[cold]
    fn lost(&self) -> BackendError {
        BackendError::Driver {
            what: "cudaDeviceReset".into(),
            reason: format!(
                "GPU {} was reset while this context used it, so its memory, streams, events and plans no longer exist; destroy the \
                 context, and create a new one",
                self.ordinal
            ),
            code: i64::from(code::CONTEXT_IS_DESTROYED),
        }
    }

    /// Waits for all work that was enqueued on this GPU before the call, like `cudaFree`. Captured work does not run and is excluded.
    ///
    /// The function does not synchronize the context. While any thread captures a stream, the driver would return an error and invalidate
    /// the capture. Instead, the function records an event in each stream that this backend has created for callers, and waits for the
    /// event. Streams of other code may already have been destroyed. The function therefore also allocates and frees memory, because
    /// freeing waits for their work.
    pub fn drain(&self) -> Result<(), BackendError> {
        let _outside = OutsideCapture::enter(self.driver);
        let _current = self.enter()?;
        let callers = lock(&self.callers).clone();
        for stream in callers.into_iter().filter(|stream| !self.is_capturing(*stream)) {
            let mark = self.record(stream)?;
            // SAFETY: The event belongs to this library and was recorded just now.
            unsafe { call!(self.driver, cuEventSynchronize(mark.event())) }?;
        }
        let mut memory = 0;
        // SAFETY: The driver writes to a variable that outlives the call.
        if unsafe { (self.driver.cuMemAlloc)(&mut memory, DRAINED_BYTES) } == 0 {
            // SAFETY: The memory was allocated just now, and nothing uses it.
            return unsafe { call!(self.driver, cuMemFree(memory)) };
        }
        // The device has no free memory. Invalidating a capture is better than freeing memory that is in use.
        // SAFETY: The call has no argument that could be invalid.
        unsafe { call!(self.driver, cuCtxSynchronize()) }
    }

    /// Removes and returns an unused event of `pool`, or creates an event with the given flags.
    fn event(&self, pool: &Mutex<Vec<usize>>, flags: sys::CUevent_flags) -> Result<usize, BackendError> {
        if let Some(event) = lock(pool).pop() {
            return Ok(event);
        }
        let _outside = OutsideCapture::enter(self.driver);
        let _current = self.enter()?;
        let mut event: CUevent = std::ptr::null_mut();
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(self.driver, cuEventCreate(&mut event, flags as c_uint)) }?;
        Ok(event.expose_provenance())
    }

    /// Returns an event from the pool that has not been recorded for this use. The caller must record it.
    pub fn mark(&self) -> Result<Mark, BackendError> {
        Ok(Mark { event: self.event(&self.events, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?, pool: self.events.clone() })
    }

    /// Records an event with a timestamp after all work that was enqueued in `stream` before, and returns the event. See
    /// [`Primary::record`].
    pub fn record_time(&self, stream: usize) -> Result<Mark, BackendError> {
        let mark = Mark { event: self.event(&self.timers, sys::CUevent_flags::CU_EVENT_DEFAULT)?, pool: self.timers.clone() };
        // SAFETY: The event has no other user. The event and the stream belong to this context.
        unsafe { call!(self.driver, cuEventRecord(mark.event(), handle(stream))) }?;
        Ok(mark)
    }

    /// Records an event from the pool after all work that was enqueued in `stream` before, and returns the event. The stream must belong to
    /// this context. The context need not be current (`cuEventRecord`).
    pub fn record(&self, stream: usize) -> Result<Mark, BackendError> {
        let mark = self.mark()?;
        // SAFETY: The event has no other user. The event and the stream belong to this context.
        unsafe { call!(self.driver, cuEventRecord(mark.event(), handle(stream))) }?;
        Ok(mark)
    }

    /// Returns the handle of an internal stream (lane) for an execution in the stream `caller`. `is_captured` is true if `caller` is being
    /// captured. The internal stream is non-blocking, and no other execution enqueues into it until [`Primary::give_lane_back`] is called.
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

    /// Returns the handle of a stream to be given to a caller. It is either a stream that another caller has destroyed and that has no work
    /// left, or a new stream.
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

    /// Stores a stream that the caller has destroyed. The stream is not destroyed in the driver yet, because the driver would give the next
    /// stream the same handle. The backend could then not detect that the application uses the old handle, which crashes the driver.
    pub fn retire_stream(&self, stream: usize) {
        lock(&self.retired).push(stream);
    }

    fn create_stream(&self) -> Result<usize, BackendError> {
        let mut stream: CUstream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(self.driver, cuStreamCreate(&mut stream, flags)) }?;
        Ok(stream.expose_provenance())
    }

    /// True if a stream of this backend has no pending work, or if its work has failed. No capture of the stream may be in progress.
    fn is_idle(&self, stream: usize) -> bool {
        // SAFETY: The stream belongs to this context and is destroyed only together with it.
        unsafe { (self.driver.cuStreamQuery)(handle(stream)) != code::NOT_READY }
    }

    /// Returns an internal stream (lane) to the pool. The stream `caller` already waits for the work in the internal stream, so this work
    /// need not have finished. `captured` is true if the internal stream has become part of a stream capture.
    pub fn give_lane_back(&self, stream: usize, caller: Caller, captured: bool) {
        let mut lanes = lock(&self.lanes);
        let lane = Idle { stream, after: caller };
        if captured { lanes.captured.push(lane) } else { lanes.idle.push_back(lane) }
    }

    fn is_capturing(&self, stream: usize) -> bool {
        let mut status = 0;
        // SAFETY: The stream belongs to this context. The output is a variable that outlives the call.
        let code = unsafe { (self.driver.cuStreamIsCapturing)(handle(stream), &mut status) };
        code != 0 || status != 0
    }

    /// Returns the number of the GPU that this context belongs to.
    pub fn gpu(&self) -> usize {
        self.ordinal as usize
    }

    /// Returns the kernels of the GPU, and loads them on first use. Returns `None` if the driver cannot load them. The failure is logged
    /// once.
    pub fn kernel(&self) -> Option<&Kernel> {
        let load = || {
            let _outside = OutsideCapture::enter(self.driver);
            let load = || self.enter().and_then(|_current| Kernel::load(self.driver, self.ordinal));
            let loaded = took(format_args!("GPU {}: kernels loaded", self.ordinal), load);
            loaded
                .inspect_err(|error| {
                    log::warn!("GPU {}: the fused copy kernel is not available, so separate copies are used: {error}", self.ordinal)
                })
                .ok()
        };
        self.kernel.get_or_init(load).as_ref()
    }

    /// Gives this context access to the memory of `peer`, if the hardware supports it. Without access, the driver copies between the two
    /// GPUs through host memory.
    pub fn enable_access(&self, peer: &Primary) -> Result<(), BackendError> {
        let bit = 1 << peer.ordinal.clamp(0, 63);
        if self.peers.load(Ordering::Acquire) & bit != 0 {
            return Ok(());
        }
        let _outside = OutsideCapture::enter(self.driver);
        let mut can = 0;
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(self.driver, cuDeviceCanAccessPeer(&mut can, self.ordinal, peer.ordinal)) }?;
        if can != 0 {
            let _current = self.enter()?;
            // SAFETY: Both contexts are retained, so they exist. If two threads make this call at the same time, the later one gets an
            // error code, which is ignored below.
            let enable = || unsafe { (self.driver.cuCtxEnablePeerAccess)(peer.context(), 0) };
            let code = took(format_args!("GPU {}: access to GPU {}", self.ordinal, peer.ordinal), enable);
            if code != code::PEER_ACCESS_ALREADY_ENABLED {
                self.driver.check("cuCtxEnablePeerAccess", code)?;
            }
            self.access.fetch_or(bit, Ordering::AcqRel);
        } else {
            log::info!("GPU {} has no peer access to GPU {}: the driver copies through host memory", self.ordinal, peer.ordinal);
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
        // SAFETY: `Device::primary` retained the context once, and a reset of the device does not change the number of references.
        let code = unsafe { (driver.cuDevicePrimaryCtxRelease)(self.ordinal) };
        // At the end of a process, the driver may have shut down before this call.
        if code != 0 && code != code::DEINITIALIZED {
            log::warn!("GPU {}: {}", self.ordinal, driver.error("cuDevicePrimaryCtxRelease", code));
        }
    }
}

impl Primary {
    /// Destroys the streams, events and other objects that were created in this context.
    fn give_back(&mut self) {
        let driver = self.driver;
        // The objects are destroyed even if the context cannot be made current, because no other code would destroy them.
        let _current = self.enter();
        let events = [&self.events, &self.timers].map(|pool| std::mem::take(&mut *lock(pool)));
        let lanes = std::mem::take(&mut *lock(&self.lanes));
        let callers = std::mem::take(&mut *lock(&self.callers));
        // SAFETY: The events, the lanes and the kernel belong to this context and have no users any more. The driver frees each object when
        // its enqueued work has finished. The calls may report an error of an earlier kernel once more, which is ignored.
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
