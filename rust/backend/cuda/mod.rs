//! NVIDIA GPUs through the CUDA driver, which is loaded at run time: nothing here links libcuda, so that one binary runs on a login
//! node and on a GPU node.
//!
//! Devices are numbered as the driver numbers them for this process (`CUDA_VISIBLE_DEVICES`). Each is used through its primary
//! context, the one that the CUDA runtime uses too; it is retained when the device is first needed, so that a device of which no plan
//! makes use costs neither a context nor memory, and then for the rest of the process, as the runtime does it. The calling thread's current context is left as it was on every path, and so is its
//! stream capture mode.
//!
//! Streams are `CUstream`s, of this backend or of anyone: 0 and 1 are the legacy default stream, 2 is the per-thread default stream,
//! both of the calling thread's current context, or of GPU 0 where there is none. Streams of contexts other than primary ones are
//! refused.
//!
//! Memory is located by the driver, so memory of `cudaMalloc`, of pools, of the virtual memory API, of `cudaHostAlloc` and registered
//! host memory is accepted besides this backend's own. Managed memory is refused.
//!
//! Host functions run on a thread of the driver. One that blocks may hold up others.
//!
//! # Locks
//!
//! A call that puts something into the queue of a stream blocks while that is full, which it is after about a thousand operations behind one
//! that waits (driver 580); one that waits for work blocks too. What they wait for may be a signal that another thread is about to have
//! raised, or that the service thread (`mpgpu-share`) raises in place of a process that has died. So no lock that either may need is held
//! across such a call.
//!
//! | lock | guards | held across calls of the driver |
//! | --- | --- | --- |
//! | `Sharing::waits`, `Sharing::held`, `Sharing::losses` | waits for signals, memory of and for others: what the service thread needs | none |
//! | `Events::events`, `Core::memory`, `streams`, `destroyed`, `reached` | tables | none |
//! | `Graphs::programs`, `Graphs::retired`, `graph::Pool` | graphs, and those of one program | making, changing and asking for graphs; not launching |
//! | `Primary::lanes`, `retired`, `callers`, `events` | streams and events that are free | asking for streams and creating them |
//! | `Primary::kernel` (`OnceLock`) | the kernels of a GPU | loading, which waits for the GPU: it is done before anything waits |
//! | `Device::retaining` | retaining a context once | retaining |
//! | `Pools::exported`, `Pools::imported` | pools of and for others | asking and importing; freeing and destroying not |
//! | `Core::verification` | the two blocks of `MPGPU_VERIFY=bytes` | enqueuing: executions that are verified come one after the other anyway |
//!
//! Of the engine: `Staging::users` is not held while an execution is enqueued (a turn in its bytes is, `engine::staging`), `Staging::arenas`
//! while memory is allocated for a new plan, `Sharing::importing` while memory is mapped or unmapped, which no execution and no raise
//! needs. The context's gate is held for reading by every call that enqueues, and taken for writing by closing alone.

mod choice;
mod completion;
mod device;
pub mod discover;
pub mod doctor;
#[cfg(test)]
mod double;
mod driver;
mod event;
mod execute;
#[cfg(test)]
mod failing;
mod graph;
mod host_function;
mod host_memory;
mod identity;
mod ipc;
mod kernel;
mod lanes;
#[cfg(test)]
mod launches;
#[cfg(test)]
mod lost;
mod memory;
mod nodes;
mod nvml;
mod peers;
mod pools;
#[cfg(test)]
mod queues;
mod reach;
#[cfg(test)]
mod refusals;
mod share;
mod signal;
mod timing;
mod verify;

pub use self::graph::{GraphStatistics, Kept};
pub use self::identity::identity;
pub use self::peers::{Loss, Mover, Tried};

use self::device::{Device, Primary, handle, lock};
use self::driver::{CUcontext, CUstream, Current, Driver, call};
use super::{
    Allocation, Backend, BackendError, Completion, Departed, EventHandle, Execution, HostFunction, Signal, SignalWait, StreamHandle,
};
use crate::share::Shared;
use crate::topology::DeviceId;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Devices of one node that are told apart by one bit each.
const MOST_DEVICES: usize = 64;

/// The CUDA backend. It lives until its last completion is gone; then it waits for all work of the GPUs in use, gives back what it has
/// created. The primary contexts stay for the rest of the process.
pub struct CudaBackend(Arc<Core>);

impl Drop for CudaBackend {
    fn drop(&mut self) {
        self.0.forget_launches();
    }
}

/// What the backend and its completions share.
#[repr(C)] // What every execution reads stands first, together.
pub(in crate::backend::cuda) struct Core {
    driver: &'static Driver,
    devices: Vec<Device>,
    /// Devices whose primary context is retained: one bit for each.
    used: AtomicU64,
    /// Streams of `create_stream` that were destroyed, and how many they are: nobody takes the lock while there are none.
    destroyed_count: AtomicUsize,
    destroyed: RwLock<HashSet<usize>>,
    homes: device::Homes,
    /// The same by handle, which may be another stream's by now.
    handles: device::Homes,
    graphs: graph::Graphs,
    sharing: share::Sharing,
    hosts: u32,
    memory: Mutex<memory::Given>,
    /// Streams of `create_stream`.
    streams: Mutex<HashMap<usize, DeviceId>>,
    events: event::Events,
    verification: Mutex<Option<verify::Blocks>>,
    reached: Mutex<reach::Reached>,
    checks: Mutex<peers::Checks>,
}

impl CudaBackend {
    /// The driver's devices in sight, and `hosts` host NUMA domains. [`BackendError::NoDriver`] with the reason where there are none.
    /// Retains no context.
    pub fn new(hosts: u32) -> Result<CudaBackend, BackendError> {
        CudaBackend::on(Driver::get()?, hosts)
    }

    /// As [`new`](CudaBackend::new), on a driver without `function`, which is one that drivers may lack (`cuMemcpyBatchAsync`, say).
    #[cfg(feature = "fault-injection")]
    pub fn without(function: &str, hosts: u32) -> Result<CudaBackend, BackendError> {
        // Kept for the rest of the process, as the driver itself is.
        static LACKING: Mutex<Vec<&'static Driver>> = Mutex::new(Vec::new());
        let driver: &'static Driver = Box::leak(Box::new(Driver::get()?.clone().without(function)));
        lock(&LACKING).push(driver);
        CudaBackend::on(driver, hosts)
    }

    fn on(driver: &'static Driver, hosts: u32) -> Result<CudaBackend, BackendError> {
        let count = count_devices(driver)? as usize;
        if count > MOST_DEVICES {
            return Err(BackendError::NotSupported(format!(
                "{count} GPUs in sight, more than {MOST_DEVICES}; choose some with CUDA_VISIBLE_DEVICES"
            )));
        }
        let mut devices = Vec::with_capacity(count);
        for index in 0..count as i32 {
            let mut ordinal = 0;
            // SAFETY: the output is valid for the call.
            unsafe { call!(driver, cuDeviceGet(&mut ordinal, index)) }?;
            devices.push(Device::new(ordinal));
        }
        Ok(CudaBackend(Arc::new(Core {
            driver,
            devices,
            hosts,
            used: AtomicU64::new(0),
            memory: Mutex::default(),
            streams: Mutex::default(),
            destroyed: RwLock::default(),
            destroyed_count: AtomicUsize::new(0),
            homes: device::Homes::default(),
            handles: device::Homes::default(),
            events: event::Events::default(),
            verification: Mutex::default(),
            reached: Mutex::default(),
            checks: Mutex::default(),
            graphs: graph::Graphs::default(),
            sharing: share::Sharing::default(),
        })))
    }

    /// Whether the driver copies a batch of segments in one call. Without it, [`Mechanism::Batch`](crate::plan::Mechanism::Batch)
    /// means single copies.
    pub fn has_batched_copy(&self) -> bool {
        self.0.driver.cuMemcpyBatchAsync.is_some()
    }

    /// Whether `gpu` runs the fused copy kernel, which is loaded if it was not. Without it,
    /// [`Mechanism::Kernel`](crate::plan::Mechanism::Kernel) means single copies.
    pub fn has_copy_kernel(&self, gpu: u32) -> Result<bool, BackendError> {
        Ok(self.0.primary(gpu as usize)?.kernel().is_some())
    }

    /// Holds every later launch of the fused copy kernel on `gpu` to so many thread blocks, 0 counting as 1. A kernel of few blocks
    /// moves bytes slowly: benchmarks stand for narrow links with it. `false` where the GPU does not run the kernel.
    pub fn limit_copy_kernel(&self, gpu: u32, blocks: u32) -> Result<bool, BackendError> {
        Ok(self.0.primary(gpu as usize)?.kernel().map(|kernel| kernel.limit(blocks)).is_some())
    }

    /// GPUs of which this backend has retained the primary context.
    pub fn devices_in_use(&self) -> u32 {
        self.0.used.load(Ordering::Acquire).count_ones()
    }
}

/// How many GPUs the process can use; [`BackendError::NoDriver`] with the reason where it is none.
pub fn device_count() -> Result<u32, BackendError> {
    count_devices(Driver::get()?)
}

fn count_devices(driver: &Driver) -> Result<u32, BackendError> {
    // The driver says "no device" (code 100) where another would return 0.
    match driver.device_count() {
        Ok(0) | Err(BackendError::Driver { code: 100, .. }) => {
            Err(BackendError::NoDriver("the driver shows no GPU to this process; look at nvidia-smi and at CUDA_VISIBLE_DEVICES".into()))
        }
        other => other,
    }
}

impl Core {
    fn check_device(&self, device: DeviceId) -> Result<(), BackendError> {
        let exists = if device.is_host() { (!device.0 as u32) < self.hosts } else { (device.0 as usize) < self.devices.len() };
        if exists { Ok(()) } else { Err(BackendError::InvalidDevice(device.0)) }
    }

    /// The primary context of a GPU, retained if it was not.
    fn primary(&self, gpu: usize) -> Result<&Primary, BackendError> {
        let device = self.devices.get(gpu).ok_or(BackendError::InvalidDevice(gpu as i32))?;
        if let Some(primary) = device.used() {
            return Ok(primary);
        }
        let primary = device.primary(self.driver)?;
        self.used.fetch_or(1 << gpu, Ordering::SeqCst);
        if self.sharing.has_waits.load(Ordering::SeqCst) {
            primary.kernel();
        }
        Ok(primary)
    }

    /// A GPU that is used already, or else one that the program uses, or else the first one: a rank's host memory is no reason for a
    /// context on the first GPU of the node.
    fn any_used(&self) -> usize {
        match self.used.load(Ordering::Acquire) {
            0 => self.current_gpu().or_else(|| self.active_gpu()).unwrap_or(0),
            used => used.trailing_zeros() as usize,
        }
    }

    /// The GPU of the calling thread's current context, if it has one.
    fn current_gpu(&self) -> Option<usize> {
        let mut ordinal = 0;
        // SAFETY: the output is valid for the call, which fails without a current context.
        let code = unsafe { (self.driver.cuCtxGetDevice)(&mut ordinal) };
        self.devices.iter().position(|device| code == 0 && device.ordinal == ordinal)
    }

    /// A GPU whose primary context exists.
    fn active_gpu(&self) -> Option<usize> {
        self.devices.iter().position(|device| {
            let (mut flags, mut active) = (0, 0);
            // SAFETY: the outputs are valid for the call.
            let code = unsafe { (self.driver.cuDevicePrimaryCtxGetState)(device.ordinal, &mut flags, &mut active) };
            code == 0 && active != 0
        })
    }

    /// GPUs in use whose contexts are as they were: nothing is left to wait for, or to give back, on one that was reset.
    fn alive(&self) -> impl Iterator<Item = &Primary> {
        self.devices.iter().filter_map(|device| device.used()).filter(|primary| !primary.is_lost())
    }

    /// Whether this GPU, in use, was reset.
    fn is_lost(&self, gpu: usize) -> bool {
        self.devices[gpu].used().is_some_and(Primary::is_lost)
    }

    /// Whether any GPU in use was reset.
    fn has_lost(&self) -> bool {
        self.devices.iter().filter_map(|device| device.used()).any(Primary::is_lost)
    }

    /// Refuses to go on where a GPU in use was reset.
    fn check_alive(&self) -> Result<(), BackendError> {
        self.devices.iter().filter_map(|device| device.used()).try_for_each(Primary::check)
    }

    /// Waits for all work enqueued so far, on every GPU in use.
    fn drain(&self) -> Result<(), BackendError> {
        let mut result = Ok(());
        for primary in self.alive() {
            // Whatever became of the others.
            result = result.and(primary.drain());
        }
        result
    }

    /// Gives `gpu` access to the memory of every GPU in use, as far as the hardware has it. Costs two loads once that is done.
    fn reach(&self, gpu: usize) -> Result<&Primary, BackendError> {
        let primary = self.primary(gpu)?;
        let mut missing = self.used.load(Ordering::Acquire) & !primary.peers.load(Ordering::Acquire);
        while missing != 0 {
            let peer = missing.trailing_zeros() as usize;
            primary.enable_access(self.primary(peer)?)?;
            missing &= missing - 1;
        }
        Ok(primary)
    }

    /// Whether `gpu` has access to plain memory of `peer`.
    fn has_access(&self, gpu: usize, peer: usize) -> Result<bool, BackendError> {
        Ok(self.reach(gpu)?.access.load(Ordering::Acquire) & (1 << peer) != 0)
    }

    /// Changes the set of destroyed streams.
    fn count_destroyed(&self, change: impl FnOnce(&mut HashSet<usize>)) {
        let mut destroyed = self.destroyed.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut destroyed);
        self.destroyed_count.store(destroyed.len(), Ordering::Release);
    }

    fn is_destroyed(&self, stream: StreamHandle) -> bool {
        self.destroyed_count.load(Ordering::Acquire) > 0
            && self.destroyed.read().unwrap_or_else(PoisonError::into_inner).contains(&stream.0)
    }

    /// The GPU that a stream belongs to.
    fn gpu_of(&self, stream: StreamHandle) -> Result<usize, BackendError> {
        self.check_alive()?;
        self.gpu_of_living(stream)
    }

    /// The same for a stream that did not go with a reset.
    fn gpu_of_living(&self, stream: StreamHandle) -> Result<usize, BackendError> {
        let driver = self.driver;
        if self.is_destroyed(stream) {
            return Err(BackendError::InvalidHandle(stream.0, "stream"));
        }
        let mut context: CUcontext = std::ptr::null_mut();
        // Default streams are those of the current context.
        if stream.0 <= 2 {
            // SAFETY: the output is valid for the call.
            unsafe { call!(driver, cuCtxGetCurrent(&mut context)) }?;
            if context.is_null() {
                return self.primary(0).map(|_| 0);
            }
        } else {
            // SAFETY: the caller's stream; the output is valid for the call.
            unsafe { call!(driver, cuStreamGetCtx(handle(stream.0), &mut context)) }?;
        }
        let mut used = self.used.load(Ordering::Acquire);
        while used != 0 {
            let gpu = used.trailing_zeros() as usize;
            if self.devices[gpu].used().is_some_and(|primary| primary.context() == context) {
                return Ok(gpu);
            }
            used &= used - 1;
        }
        let mut ordinal = 0;
        {
            let _current = Current::enter(driver, context)?;
            // SAFETY: the output is valid for the call.
            unsafe { call!(driver, cuCtxGetDevice(&mut ordinal)) }?;
        }
        let gpu = self.devices.iter().position(|device| device.ordinal == ordinal).ok_or(BackendError::InvalidDevice(ordinal))?;
        if self.primary(gpu)?.context() == context {
            return Ok(gpu);
        }
        Err(BackendError::NotSupported(format!(
            "stream {:#x} belongs to a context of GPU {gpu} that is not its primary context; use a stream that was created after \
             cudaSetDevice({gpu}), or under cuDevicePrimaryCtxRetain",
            stream.0
        )))
    }

    /// Calls `work` with a stream while the context of its GPU is current.
    fn with_stream<T>(
        &self,
        stream: StreamHandle,
        work: impl FnOnce(&Primary, CUstream) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let primary = self.primary(self.gpu_of(stream)?)?;
        let _current = primary.enter()?;
        work(primary, handle(stream.0))
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // Nothing to give back, and no context to make for it: a process may open all GPUs to look at them alone.
        if self.used.load(Ordering::Acquire) == 0 {
            return;
        }
        // Errors were for whoever waited for the work.
        let _ = self.drain();
        self.release_verification();
        self.release_checks();
        self.release_graphs();
        self.events.release();
        self.release_all_held();
        let left: Vec<u64> = lock(&self.memory).keys().copied().collect();
        for address in left {
            let _ = self.free(address);
        }
        // Streams go with their contexts.
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn identity(&self) -> Result<super::Identity, BackendError> {
        identity()
    }

    /// On a GPU `cuMemAlloc`, on a host domain pinned memory that every GPU reads and writes directly: below 4 MiB in a memory file, which
    /// can be shared; from 4 MiB on in huge pages, on the NUMA node of that number, or for domain 0 spread over all nodes. 0 bytes count
    /// as 1.
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.0.allocate(device, bytes)
    }

    fn free(&self, address: u64) -> Result<(), BackendError> {
        self.0.free(address)
    }

    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        self.0.locate(address)
    }

    fn allocated_bytes(&self, device: DeviceId) -> u64 {
        self.0.allocated_bytes(device)
    }

    /// A non-blocking stream. One of a host domain is a stream of a GPU that is in use, or of the first.
    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError> {
        let core = &self.0;
        core.check_device(device)?;
        core.check_alive()?;
        let primary = core.primary(if device.is_host() { core.any_used() } else { device.0 as usize })?;
        let stream = primary.caller_stream()?;
        core.count_destroyed(|destroyed| {
            destroyed.remove(&stream);
        });
        lock(&core.streams).insert(stream, device);
        Ok(StreamHandle(stream))
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        let core = &self.0;
        let device = lock(&core.streams).remove(&stream.0).ok_or(BackendError::InvalidHandle(stream.0, "stream"))?;
        if core.has_lost() {
            return Ok(());
        }
        let gpu = if device.is_host() { core.gpu_of(stream)? } else { device.0 as usize };
        core.count_destroyed(|destroyed| {
            destroyed.insert(stream.0);
        });
        let primary = core.primary(gpu)?;
        // It may be given out again, as one that has not been told of anything.
        core.sharing.losses.forget(|| core.number_of(handle(stream.0)));
        primary.retire_stream(stream.0);
        Ok(())
    }

    fn stream_count(&self, device: DeviceId) -> u64 {
        lock(&self.0.streams).values().filter(|owner| **owner == device).count() as u64
    }

    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        // SAFETY: the caller's stream.
        self.0.with_stream(stream, |_, raw| unsafe { call!(self.0.driver, cuStreamSynchronize(raw)) })?;
        self.0.sharing.losses.tell_since(self.0.heard(stream))
    }

    /// `work` runs on a thread of the driver and must not call CUDA, nor this backend. A panic in it is logged.
    /// [`BackendError::NotSupported`] in a capture where the driver is older than CUDA 11.3.
    fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), BackendError> {
        self.0.with_stream(stream, |_, raw| self.0.launch_host(raw, work))
    }

    fn create_event(&self) -> Result<EventHandle, BackendError> {
        Ok(self.0.events.create())
    }

    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.0.events.destroy(event)
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        self.0.events.record(&self.0, event, stream)
    }

    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError> {
        self.0.events.make_wait(&self.0, event, stream)
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.0.events.synchronize(&self.0, event)
    }

    /// Inside a stream capture the copies become part of the graph; [`BackendError::NotSupported`] where that could not be right.
    fn execute(&self, execution: &Execution<'_>) -> Result<Completion, BackendError> {
        self.0.execute(execution, &Kept::default(), false)
    }

    /// By events with timestamps around each operation, over streams; see `timing`. [`BackendError::NotSupported`] inside a stream capture.
    fn execute_timed(&self, execution: &Execution<'_>) -> Result<Completion, BackendError> {
        self.0.execute(execution, &Kept::default(), true)
    }

    fn enqueue(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        self.0.enqueue(execution, &Kept::default())
    }

    fn execute_kept(&self, execution: &Execution<'_>, kept: &Kept) -> Result<Completion, BackendError> {
        self.0.execute(execution, kept, false)
    }

    fn enqueue_kept(&self, execution: &Execution<'_>, kept: &Kept) -> Result<(), BackendError> {
        self.0.enqueue(execution, kept)
    }

    /// Waits for all work of every GPU in use, the caller's included, as `cudaDeviceSynchronize` does, but what is being captured.
    fn synchronize(&self) -> Result<(), BackendError> {
        self.0.drain()
    }

    fn graph_statistics(&self) -> GraphStatistics {
        self.0.graph_statistics()
    }

    /// Of a GPU its UUID.
    fn device_uuid(&self, device: DeviceId) -> Result<[u8; 16], BackendError> {
        self.0.device_uuid(device)
    }

    fn losing_pairs(&self, pairs: &[(DeviceId, DeviceId)]) -> Vec<(DeviceId, DeviceId)> {
        self.0.losing_pairs(pairs)
    }

    fn shareable(&self, address: u64, bytes: u64) -> Result<Option<Allocation>, BackendError> {
        self.0.shareable(address, bytes)
    }

    fn share(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        self.0.share(allocation)
    }

    fn adopt(&self, shared: Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        self.0.adopt(&shared, allocation)
    }

    fn disown(&self, base: u64) -> Result<(), BackendError> {
        if self.0.release_held(base)? { Ok(()) } else { Err(BackendError::InvalidPointer(base)) }
    }

    /// Counters lie in host memory of `mp_alloc` that can be shared, of this process or an importing one.
    fn stream_wait_signals(&self, stream: StreamHandle, signals: &[Signal], by: SignalWait) -> Result<(), BackendError> {
        self.0.wait_signals(stream, signals, by)
    }

    fn stream_raise_signals(&self, stream: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        self.0.raise_signals(stream, signals)
    }

    fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        self.0.sharing.read_signal(counter)
    }

    fn abandon(&self, allocation: &Allocation, peer: Departed) {
        self.0.sharing.abandon(allocation, peer);
    }

    fn tend(&self) -> bool {
        self.0.sharing.tend()
    }

    fn abandoned(&self, counter: u64) -> Option<Departed> {
        self.0.sharing.abandoned(counter)
    }
}

impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaBackend").field("devices", &self.devices.len()).field("hosts", &self.hosts).finish_non_exhaustive()
    }
}
