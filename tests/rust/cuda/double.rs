//! Implements a driver double, that is, a simulated CUDA driver for tests on machines without a GPU.
//!
//! Device memory is host memory, and copies are complete when they are enqueued, so streams and events order nothing. Tests with the double
//! check which functions the backend calls, how it handles their errors, and that copies are correct. They do not check the order of work.
//! Each thread has its own simulated node, so that tests do not affect each other, unless it [`join`]s the node of another thread.
//!
//! If queues are limited ([`Node::room`]), a stream executes its work in order. Work after a wait that is not satisfied stays in the queue,
//! and a call that finds the queue full blocks until there is space, as in the real driver.

mod chunks;
mod graphs;

pub use self::chunks::{GRANULARITY, whole_with_chunks, with_chunks};
pub use self::graphs::{captured, whole, whole_with_early_launches};

use super::driver::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUmodule, CUstream, Code, Driver, code};
use crate::bridge::Segment;
use crate::ipc::segment::{Mapping, SharedRegion};
use crate::ipc::signal;
use cudarc::driver::sys::{self, CUdevice_attribute, CUmemorytype, CUpointer_attribute};
use rustix::fd::{BorrowedFd, IntoRawFd};
use rustix::fs::MemfdFlags;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Simulated driver of one node, with a record of the calls.
#[derive(Default)]
pub struct Node {
    pub gpus: i32,
    /// Number of the node; 0 if the thread has not started one.
    pub number: usize,
    /// True if the GPUs have peer access to each other's memory.
    pub peers: bool,
    /// Ordered pairs of GPUs between which copies succeed but copy nothing, as behind an IOMMU.
    pub lossy: Vec<(i32, i32)>,
    /// Error codes that the next calls of these functions return, by name.
    pub refusals: HashMap<&'static str, Code>,
    /// Number of calls of [`failing`] that succeed before one fails, and the error code of that one; `None` if no call must fail.
    pub failure: Option<(u32, Code)>,
    /// Name of the function whose call has failed as requested.
    pub failed: Option<&'static str>,
    /// Number of successful calls of each function.
    pub calls: HashMap<&'static str, u32>,
    /// Names of all functions of [`failing`] that were called, in order.
    pub asked: Vec<&'static str>,
    pub memory: BTreeMap<u64, Block>,
    pub pools: BTreeMap<usize, MemoryPool>,
    /// Events that exist. Each recording takes a microsecond, and the clocks of different GPUs differ by half a millisecond.
    pub events: HashMap<usize, Event>,
    /// True if all streams are being captured into one graph. (`captured` is the only captured stream, if just one is.)
    pub capturing: bool,
    pub captured: Option<usize>,
    /// Number of retains of each GPU's primary context.
    retained: HashMap<i32, u64>,
    /// Handles of objects of a context that was reset. The real driver crashes if they are used.
    gone: HashSet<usize>,
    /// Handles of the streams that exist.
    pub streams: HashSet<usize>,
    /// Streams that synchronise with the default stream, as streams of the program may.
    pub blocking: HashSet<usize>,
    pub graphs: graphs::Graphs,
    /// Launches of kernels that execute actions, captured or not: the argument, and the number of blocks.
    pub actions: Vec<(Vec<Segment>, u32)>,
    /// Number of calls that have invalidated a capture.
    pub captures_broken: u32,
    /// Number of copies whose memory was opened by CUDA IPC through a GPU other than that of the copy's stream.
    pub strangers: u32,
    /// Number of entries that the queue of a stream can hold. If it is `None`, all work is executed immediately, and nothing waits.
    pub room: Option<usize>,
    /// Number of calls that block now because a queue is full or because they wait for work.
    pub blocked: u32,
    /// Functions whose calls apparently block for ever.
    pub stuck: Vec<&'static str>,
    queues: HashMap<usize, VecDeque<Task>>,
    /// Number of recordings of events that were requested so far, and the recordings that have not happened yet.
    recordings: u64,
    pending: HashSet<u64>,
    /// True if other processes can map memory of `cuMemAlloc`.
    pub shares: bool,
    /// First addresses of memory that another library of the process has opened by CUDA IPC, even if the memory has been freed since.
    pub foreign: Vec<u64>,
    /// State of the virtual memory API.
    pub chunks: chunks::Chunks,
    /// If this is set, GPU memory is mapped by the virtual memory API, in chunks of this size in bytes.
    pub chunk: Option<usize>,
    now: f64,
    handles: usize,
    ids: u64,
}

/// Allocation, or registered (pinned) host memory.
pub struct Block {
    bytes: usize,
    /// GPU on which the memory is; `None` for host memory.
    gpu: Option<i32>,
    id: u64,
    registered: bool,
    /// Memory pool from which the memory was allocated; `None` for memory of no pool.
    pool: Option<usize>,
    /// Pages of the memory, if they can be mapped again as memory of another process.
    pages: Option<Pages>,
    /// True if the memory belongs to another process and was opened by CUDA IPC through `gpu`.
    opened: bool,
    /// True if the memory was mapped by the virtual memory API.
    is_chunk: bool,
}

/// Memory pool of this process, or one that was imported. The other process is simulated by the same node.
pub struct MemoryPool {
    gpu: i32,
    /// Number that identifies the pool; an imported pool has the number of the original.
    identity: u64,
    exportable: bool,
    imported: bool,
    /// GPUs that may access memory of the pool.
    pub access: Vec<i32>,
}

/// Entry in the queue of a stream.
enum Task {
    /// Wait until the counter at this address has reached this value.
    Counter(u64, u64),
    /// Recording of an event, by its number.
    Recording(u64),
    /// Host function, which may block. It runs in a separate thread when its turn comes; the flag is set when it has returned.
    Function(Option<graphs::HostCall>, Arc<AtomicBool>),
    Work(Box<dyn FnOnce(&mut Node) + Send>),
}

enum Pages {
    Own(SharedRegion),
    Imported(#[allow(dead_code, reason = "unmapped when dropped")] Mapping),
}

/// State of an event.
pub struct Event {
    /// True if the event has timestamps.
    pub timed: bool,
    /// GPU of the last recording, and the time of that recording in microseconds on the clock of that GPU.
    recorded: Option<(usize, f64)>,
    /// Number of the event's last recording, counted over all events; 0 if there was none.
    last: u64,
}

thread_local! {
    static NODE: RefCell<Arc<Mutex<Node>>> = RefCell::default();
    /// Stack of current contexts of this thread. The last entry is the current context.
    static CURRENT: RefCell<Vec<usize>> = RefCell::default();
    /// Capture mode of this thread: all unsafe calls are forbidden (0), or none (2).
    static MODE: Cell<c_uint> = const { Cell::new(0) };
}

/// Nodes by number, for threads of the library that enter a context of a node.
static STARTED_NODES: Mutex<BTreeMap<usize, Weak<Mutex<Node>>>> = Mutex::new(BTreeMap::new());

/// Starts a simulated node of `gpus` GPUs for this thread.
pub fn start(gpus: i32, peers: bool) {
    // All nodes are in one process, in which numbers of allocations are unique.
    static STARTED: AtomicU64 = AtomicU64::new(1);
    let number = STARTED.fetch_add(1, Ordering::Relaxed);
    let node = Arc::new(Mutex::new(Node { gpus, peers, number: number as usize, ids: number << 24, ..Node::default() }));
    let mut started = STARTED_NODES.lock().unwrap_or_else(PoisonError::into_inner);
    started.retain(|_, node| node.strong_count() > 0);
    started.insert(number as usize, Arc::downgrade(&node));
    NODE.set(node);
    CURRENT.take();
}

/// Returns the node of this thread, so that another thread can [`join`] it.
pub fn share() -> Arc<Mutex<Node>> {
    NODE.with_borrow(Arc::clone)
}

/// Makes this thread use the node of another thread, as if both were in one process.
pub fn join(node: Arc<Mutex<Node>>) {
    NODE.set(node);
}

/// Calls `look` with the node of this thread, and returns the result.
pub fn node<T>(look: impl FnOnce(&mut Node) -> T) -> T {
    let node = share();
    let mut node = node.lock().unwrap_or_else(PoisonError::into_inner);
    look(&mut node)
}

/// Returns the current context of this thread, or 0 if there is none.
fn current() -> usize {
    CURRENT.with_borrow(|current| current.last().copied().unwrap_or(0))
}

/// Returns the number of successful calls of a driver function.
pub fn calls(function: &str) -> u32 {
    node(|node| node.calls.get(function).copied().unwrap_or(0))
}

/// Returns the driver double, which supports batched copies.
pub fn driver() -> &'static Driver {
    static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver { cuMemcpyBatchAsync: Some(copy_batch), ..without_batch().clone() });
    &DRIVER
}

/// Returns a double of a driver that lacks `function`.
pub fn without(function: &'static str) -> &'static Driver {
    without_of(driver(), function)
}

/// Returns a copy of another double that additionally lacks `function`.
pub fn without_of(driver: &Driver, function: &'static str) -> &'static Driver {
    // The doubles stay reachable, so that leak checks do not report them.
    static DRIVERS: Mutex<Vec<&Driver>> = Mutex::new(Vec::new());
    let lacking = Box::leak(Box::new(driver.clone().without(function)));
    DRIVERS.lock().expect("nothing panics here").push(lacking);
    lacking
}

/// Returns a double of a driver whose streams never complete their work.
pub fn never_ready() -> &'static Driver {
    unsafe extern "C" fn busy(_: CUstream) -> Code {
        code::NOT_READY
    }
    static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver { cuStreamQuery: busy, ..driver().clone() });
    &DRIVER
}

/// Returns a double of a driver without batched copies.
pub fn without_batch() -> &'static Driver {
    static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver {
        cuGetErrorName: name_error,
        cuGetErrorString: name_error,
        cuDeviceGetCount: count_devices,
        cuDeviceGet: get_device,
        cuDeviceGetUuid: get_uuid,
        cuDeviceGetAttribute: get_attribute,
        cuDeviceCanAccessPeer: can_access,
        cuDevicePrimaryCtxRetain: retain,
        cuDevicePrimaryCtxGetState: get_state,
        cuCtxGetCurrent: get_current,
        cuCtxPushCurrent: push,
        cuCtxPopCurrent: pop,
        cuCtxGetDevice: get_current_device,
        cuCtxEnablePeerAccess: enable_access,
        cuMemAlloc: allocate,
        cuMemFree: free,
        cuMemHostAlloc: allocate_host,
        cuMemFreeHost: free_host,
        cuMemHostRegister: register,
        cuMemHostUnregister: unregister,
        cuPointerGetAttributes: locate,
        cuMemPoolSetAccess: Some(set_access),
        cuMemPoolGetAccess: Some(get_access),
        cuMemPoolDestroy: Some(destroy_pool),
        cuMemPoolExportToShareableHandle: Some(export_pool),
        cuMemPoolImportFromShareableHandle: Some(import_pool),
        cuMemPoolExportPointer: Some(export_pointer),
        cuMemPoolImportPointer: Some(import_pointer),
        cuIpcGetMemHandle: Some(export_ipc),
        cuIpcOpenMemHandle: Some(open_ipc),
        cuIpcCloseMemHandle: Some(close_ipc),
        cuMemcpyAsync: copy,
        cuMemcpyDtoDAsync: copy_known,
        cuMemcpyDtoHAsync: copy_to_host,
        cuStreamCreate: create_stream,
        cuStreamDestroy: destroy_stream,
        cuLaunchHostFunc: graphs::launch_host,
        cuStreamGetCtx: context_of_stream,
        cuStreamIsCapturing: is_capturing,
        cuStreamWaitEvent: wait_event,
        cuCtxSynchronize: synchronize_context,
        cuCtxGetId: Some(id_of_context),
        cuThreadExchangeStreamCaptureMode: exchange_mode,
        cuStreamSynchronize: synchronize_stream,
        cuStreamQuery: query_stream,
        cuEventSynchronize: synchronize_event,
        cuEventQuery: query_event,
        cuStreamGetId: Some(id_of_stream),
        cuStreamGetFlags: Some(flags_of_stream),
        cuStreamBatchMemOp: Some(operate),
        cuEventCreate: create_event,
        cuEventDestroy: destroy_event,
        cuEventRecord: record_event,
        cuEventElapsedTime: Some(elapsed),
        cuModuleLoadData: load_module,
        ..Driver::inert()
    });
    &DRIVER
}

/// Returns a double of a driver with all functions, in which one call fails on request.
pub fn failing() -> &'static Driver {
    static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver::counted(whole()));
    &DRIVER
}

/// Makes a call of [`failing`], which fails if requested. A call that frees a resource does so even if it fails, because the real driver
/// returns errors of earlier work from such calls.
pub fn counted(function: &'static str, work: impl FnOnce(&Driver) -> Code) -> Code {
    node(|node| node.asked.push(function));
    let fails = node(|node| match &mut node.failure {
        Some((0, code)) => {
            node.failed = Some(function);
            Some(*code)
        }
        Some((left, _)) => {
            *left -= 1;
            None
        }
        None => None,
    });
    let Some(code) = fails else { return work(whole()) };
    node(|node| node.failure = None);
    if ["Free", "Destroy", "Release", "Unload", "Unregister", "Unmap", "Close", "Pop", "Synchronize"]
        .iter()
        .any(|gives| function.contains(gives))
    {
        work(whole());
    }
    code
}

/// Number of driver objects of each kind that the backend holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub memory: usize,
    pub pools: usize,
    pub events: usize,
    pub streams: usize,
    pub graphs: usize,
    pub execs: usize,
    pub objects: usize,
    pub modules: u32,
}

pub fn held() -> Held {
    node(|node| Held {
        memory: node.memory.len(),
        pools: node.pools.len(),
        events: node.events.len(),
        streams: node.streams.len(),
        graphs: node.graphs.graphs.len(),
        execs: node.graphs.execs.len(),
        objects: node.graphs.objects.len(),
        modules: node.graphs.modules,
    })
}

/// Counts a call of a driver function and makes it, or returns an error code if that was requested.
fn call(function: &'static str, work: impl FnOnce(&mut Node) -> Code) -> Code {
    node(|node| {
        if let Some(code) = node.refusals.remove(function) {
            return code;
        }
        let code = work(node);
        if code == 0 {
            *node.calls.entry(function).or_default() += 1;
        }
        code
    })
}

/// Stores a result of a driver function in an output.
fn put<T>(out: *mut T, value: T) -> Code {
    // SAFETY: the backend passes outputs that are valid for the call.
    unsafe { out.write(value) };
    0
}

const INVALID_VALUE: Code = 1;
const NO_BINARY_FOR_GPU: Code = 209;
const CAPTURE_UNSUPPORTED: Code = 900;

/// First number of a context. Contexts and streams are numbers that contain the number of their GPU; contexts also contain that of their
/// node.
pub const CONTEXT: usize = 1 << 32;
const STREAM: usize = 0x10_0000;

unsafe extern "C" fn name_error(_: Code, out: *mut *const c_char) -> Code {
    const NAME: &CStr = c"an error that a test wants";
    put(out, NAME.as_ptr())
}

unsafe extern "C" fn count_devices(out: *mut c_int) -> Code {
    call("cuDeviceGetCount", |node| put(out, node.gpus))
}

unsafe extern "C" fn get_device(out: *mut CUdevice, index: c_int) -> Code {
    put(out, index)
}

unsafe extern "C" fn get_uuid(out: *mut [u8; 16], device: CUdevice) -> Code {
    put(out, [device as u8; 16])
}

unsafe extern "C" fn get_attribute(out: *mut c_int, attribute: c_uint, _: CUdevice) -> Code {
    const MAJOR: c_uint = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as c_uint;
    const PROCESSORS: c_uint = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as c_uint;
    const STREAM_MEMORY: c_uint = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS as c_uint;
    const DESCRIPTORS: c_uint = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as c_uint;
    const HOST_POINTERS: c_uint = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM as c_uint;
    put(
        out,
        match attribute {
            MAJOR => 9,
            PROCESSORS => 132,
            HOST_POINTERS | STREAM_MEMORY | DESCRIPTORS => 1,
            _ => 0,
        },
    )
}

unsafe extern "C" fn can_access(out: *mut c_int, _: CUdevice, _: CUdevice) -> Code {
    node(|node| put(out, c_int::from(node.peers)))
}

unsafe extern "C" fn retain(out: *mut CUcontext, device: CUdevice) -> Code {
    call("cuDevicePrimaryCtxRetain", |node| {
        node.ids += 1;
        let id = node.ids;
        node.retained.entry(device).or_insert(id);
        put(out, with_exposed_provenance_mut(CONTEXT * (device as usize + 1) + node.number))
    })
}

/// Reports a GPU as active if its primary context is retained or if it has memory.
unsafe extern "C" fn get_state(device: CUdevice, flags: *mut c_uint, active: *mut c_int) -> Code {
    put(flags, 0);
    node(|node| {
        let is_active = node.retained.contains_key(&device) || node.memory.values().any(|block| block.gpu == Some(device));
        put(active, c_int::from(is_active))
    })
}

unsafe extern "C" fn id_of_context(context: CUcontext, out: *mut c_ulonglong) -> Code {
    let device = (context.addr() / CONTEXT) as CUdevice - 1;
    node(|node| node.retained.get(&device).map_or(code::CONTEXT_IS_DESTROYED, |id| put(out, *id)))
}

unsafe extern "C" fn exchange_mode(mode: *mut c_uint) -> Code {
    // SAFETY: the backend passes a mode.
    put(mode, MODE.replace(unsafe { *mode }))
}

unsafe extern "C" fn get_current(out: *mut CUcontext) -> Code {
    put(out, with_exposed_provenance_mut(current()))
}

/// Makes a context current. If the calling thread belongs to the library and has no node, it joins the node of the context.
unsafe extern "C" fn push(context: CUcontext) -> Code {
    if node(|node| node.number) == 0 {
        let started = STARTED_NODES.lock().unwrap_or_else(PoisonError::into_inner);
        started.get(&(context.addr() % CONTEXT)).and_then(Weak::upgrade).into_iter().for_each(join);
    }
    CURRENT.with_borrow_mut(|current| current.push(context.addr()));
    0
}

unsafe extern "C" fn pop(out: *mut CUcontext) -> Code {
    put(out, with_exposed_provenance_mut(CURRENT.with_borrow_mut(|current| current.pop().unwrap_or(0))))
}

unsafe extern "C" fn get_current_device(out: *mut CUdevice) -> Code {
    match current() {
        0 => code::INVALID_CONTEXT,
        context => put(out, (context / CONTEXT - 1) as CUdevice),
    }
}

unsafe extern "C" fn enable_access(_: CUcontext, _: c_uint) -> Code {
    call("cuCtxEnablePeerAccess", |_| 0)
}

impl Node {
    /// Records memory that was allocated or registered at an address.
    pub fn insert(&mut self, address: u64, bytes: usize, gpu: Option<i32>, registered: bool) {
        self.ids += 1;
        self.memory
            .insert(address, Block { bytes, gpu, id: self.ids, registered, pool: None, pages: None, opened: false, is_chunk: false });
    }

    /// Allocates memory, as another library in the process may do. Returns its address.
    pub fn give(&mut self, bytes: usize, gpu: Option<i32>) -> Option<u64> {
        let layout = Layout::from_size_align(bytes, 256).ok().filter(|_| bytes < 1 << 40)?;
        // SAFETY: the backend asks for one byte or more.
        let address = unsafe { alloc_zeroed(layout) }.expose_provenance() as u64;
        self.insert(address, bytes, gpu, false);
        Some(address)
    }

    /// Returns the number of registered ranges of host memory.
    pub fn registered(&self) -> usize {
        self.memory.values().filter(|block| block.registered).count()
    }

    /// Frees memory that `give` has returned, or unregisters it.
    pub fn take(&mut self, address: u64, device: bool) -> Code {
        let Some(block) = self.memory.remove(&address).filter(|block| block.gpu.is_some() == device && !block.registered) else {
            return INVALID_VALUE;
        };
        if block.pages.is_some() {
            return 0;
        }
        let Ok(layout) = Layout::from_size_align(block.bytes, 256) else { return INVALID_VALUE };
        // SAFETY: allocated by `give` with this layout, and just removed from the list.
        unsafe { dealloc(with_exposed_provenance_mut(address as usize), layout) };
        0
    }

    /// Creates a memory pool and returns its handle. As in the real driver, this may be the handle of a destroyed pool.
    pub fn new_pool(&mut self, gpu: i32, exportable: bool) -> usize {
        self.ids += 1;
        let pool = MemoryPool { gpu, identity: self.ids, exportable, imported: false, access: vec![gpu] };
        self.add_pool(pool)
    }

    fn add_pool(&mut self, pool: MemoryPool) -> usize {
        let handle = (1..).map(|index| index * 0x100).find(|handle| !self.pools.contains_key(handle)).unwrap_or(0);
        self.pools.insert(handle, pool);
        handle
    }

    /// Allocates memory from a pool and returns its address.
    pub fn give_from(&mut self, pool: usize, bytes: usize) -> Option<u64> {
        let region = SharedRegion::new(bytes as u64).ok()?;
        let address = region.base();
        self.insert_of(Some(pool), address, bytes, Pages::Own(region));
        Some(address)
    }

    /// True if the GPU of the current context may access the memory at an address. Like the real driver, ignores the GPU of the stream.
    fn may_enter(&self, address: u64) -> bool {
        let here = (current() / CONTEXT) as i32 - 1;
        let block = self.memory.range(..=address).next_back().filter(|(base, block)| address - **base < block.bytes as u64);
        let pool = block.and_then(|(_, block)| self.pools.get(&block.pool?));
        pool.is_none_or(|pool| pool.access.contains(&here))
    }

    /// Returns the size in bytes of the allocation that starts at an address.
    pub fn size_at(&self, base: u64) -> Option<usize> {
        self.memory.get(&base).map(|block| block.bytes)
    }

    /// Returns the GPU whose memory contains an address.
    pub fn gpu_at(&self, address: u64) -> Option<i32> {
        let (base, block) = self.memory.range(..=address).next_back()?;
        block.gpu.filter(|_| address - base < block.bytes as u64)
    }

    /// Allocates memory as another process does that exports it by CUDA IPC. Returns its address.
    pub fn give_shareable(&mut self, bytes: usize, gpu: i32) -> Option<u64> {
        let region = SharedRegion::new(bytes as u64).ok()?;
        let address = region.base();
        self.insert_of(None, address, bytes, Pages::Own(region));
        self.memory.get_mut(&address)?.gpu = Some(gpu);
        Some(address)
    }

    /// Frees the allocation at an address, and allocates memory on a GPU at the same address.
    pub fn renew(&mut self, address: u64, gpu: i32) {
        self.ids += 1;
        let id = self.ids;
        self.memory.get_mut(&address).into_iter().for_each(|block| (block.id, block.gpu) = (id, Some(gpu)));
    }

    fn insert_of(&mut self, pool: Option<usize>, address: u64, bytes: usize, pages: Pages) {
        self.ids += 1;
        let gpu = pool.and_then(|pool| self.pools.get(&pool)).map(|pool| pool.gpu);
        let block = Block { bytes, gpu, id: self.ids, registered: false, pool, pages: Some(pages), opened: false, is_chunk: false };
        self.memory.insert(address, block);
    }

    /// Resets a device, like `cudaDeviceReset`.
    pub fn reset(&mut self, gpu: i32) {
        self.retained.remove(&gpu);
        let (streams, handles) = (std::mem::take(&mut self.streams), self.events.drain().map(|(event, _)| event).collect::<Vec<_>>());
        self.gone.extend(streams.into_iter().chain(handles));
        self.queues.clear();
        self.pending.clear();
        let memory: Vec<u64> =
            self.memory.iter().filter(|(_, block)| block.gpu == Some(gpu) && block.pages.is_none()).map(|(at, _)| *at).collect();
        memory.into_iter().for_each(|address| _ = self.take(address, true));
        self.memory.retain(|_, block| !block.registered);
        // Pinned memory of all GPUs' contexts.
        let pinned: Vec<u64> =
            self.memory.iter().filter(|(_, block)| block.gpu.is_none() && block.pages.is_none()).map(|(at, _)| *at).collect();
        pinned.into_iter().for_each(|address| _ = self.take(address, false));
    }

    /// Checks that the object of a handle still exists. Records an error for `function` if it does not.
    fn touch(&mut self, handle: usize, function: &'static str) {
        if self.gone.contains(&handle) {
            self.stuck.push(function);
        }
    }

    fn is_captured(&self, stream: usize) -> bool {
        self.capturing || self.captured == Some(stream)
    }

    /// Counts an invalidated capture if `ends` is true, and returns `ends`.
    fn end_capture(&mut self, ends: bool) -> bool {
        self.captures_broken += u32::from(ends);
        ends
    }

    fn is_over(&self, task: &Task) -> bool {
        match task {
            // SAFETY: a counter of a test, which outlives its streams.
            Task::Counter(counter, value) => signal::reached(unsafe { signal::load(*counter) }, *value),
            Task::Recording(number) => !self.pending.contains(number),
            Task::Function(_, has_returned) => has_returned.load(Ordering::Acquire),
            Task::Work(_) => true,
        }
    }

    /// Executes all queued work that can be executed now.
    fn go_on(&mut self) {
        let mut streams: Vec<usize> = self.queues.keys().copied().collect();
        // All streams are checked again after a stream has advanced, because other streams may have waited for it.
        while let Some(stream) = streams.pop() {
            self.call_next(stream);
            while self.queues.get(&stream).and_then(VecDeque::front).is_some_and(|task| self.is_over(task)) {
                if let Some(Task::Work(work)) = self.queues.get_mut(&stream).and_then(VecDeque::pop_front) {
                    work(self);
                }
                self.call_next(stream);
                streams = self.queues.keys().copied().collect();
            }
        }
    }

    /// True if the last requested recording of an event has happened.
    fn is_recorded(&self, event: CUevent) -> bool {
        self.events.get(&event.addr()).is_none_or(|event| !self.pending.contains(&event.last))
    }

    /// Starts the host function that is first in the queue of a stream.
    fn call_next(&mut self, stream: usize) {
        if let Some(Task::Function(call, has_returned)) = self.queues.get_mut(&stream).and_then(VecDeque::front_mut)
            && let Some(call) = call.take()
        {
            let has_returned = Arc::clone(has_returned);
            std::thread::spawn(move || {
                call.run();
                has_returned.store(true, Ordering::Release);
            });
        }
    }

    /// Returns the number of contexts on the stack of this thread.
    pub fn depth(&self) -> usize {
        CURRENT.with_borrow(Vec::len)
    }

    fn new_handle(&mut self) -> usize {
        self.handles += 16;
        self.handles
    }
}

/// Blocks until `is_there` returns true, or for at most as long as a test may take.
fn block(function: &'static str, mut is_there: impl FnMut(&mut Node) -> bool) -> Code {
    const TIMED_OUT: Code = 999;
    let begin = Instant::now();
    let mut blocked = 0;
    loop {
        let is_over = node(|node| {
            node.go_on();
            let is_there = is_there(node);
            let is_late = begin.elapsed() > Duration::from_secs(20);
            if !is_there && is_late {
                node.stuck.push(function);
            }
            node.blocked -= blocked;
            blocked = u32::from(!is_there && !is_late);
            node.blocked += blocked;
            if is_there { Some(0) } else { is_late.then_some(TIMED_OUT) }
        });
        match is_over {
            Some(code) => return code,
            None => std::thread::sleep(Duration::from_micros(200)),
        }
    }
}

/// Appends a task to the queue of a stream.
fn enqueue(function: &'static str, stream: CUstream, task: Task) -> Code {
    node(|node| node.touch(stream.addr(), function));
    let mut task = Some(task);
    let unbounded = |node: &mut Node| {
        if let Some(Task::Work(work)) = task.take_if(|_| node.room.is_none()) {
            work(node);
        }
    };
    node(unbounded);
    if task.is_none() {
        return 0;
    }
    block(function, |node| {
        let is_free = node.queues.get(&stream.addr()).is_none_or(|queue| node.room.is_none_or(|room| queue.len() < room));
        if let Some(task) = task.take_if(|_| is_free) {
            node.queues.entry(stream.addr()).or_default().push_back(task);
            node.go_on();
        }
        is_free
    })
}

unsafe extern "C" fn synchronize_stream(stream: CUstream) -> Code {
    node(|node| node.touch(stream.addr(), "cuStreamSynchronize"));
    if node(|node| node.end_capture(node.is_captured(stream.addr()))) {
        return CAPTURE_UNSUPPORTED;
    }
    block("cuStreamSynchronize", |node| node.queues.get(&stream.addr()).is_none_or(VecDeque::is_empty))
}

unsafe extern "C" fn synchronize_event(event: CUevent) -> Code {
    node(|node| node.touch(event.addr(), "cuEventSynchronize"));
    block("cuEventSynchronize", |node| node.is_recorded(event))
}

unsafe extern "C" fn query_event(event: CUevent) -> Code {
    node(|node| {
        node.go_on();
        if node.is_recorded(event) { 0 } else { code::NOT_READY }
    })
}

unsafe extern "C" fn query_stream(stream: CUstream) -> Code {
    node(|node| {
        node.go_on();
        if node.queues.get(&stream.addr()).is_none_or(VecDeque::is_empty) { 0 } else { code::NOT_READY }
    })
}

unsafe extern "C" fn allocate(out: *mut CUdeviceptr, bytes: usize) -> Code {
    if unsafe_call() {
        return CAPTURE_UNSUPPORTED;
    }
    call("cuMemAlloc", |node| {
        let context = current();
        if context == 0 {
            return code::INVALID_CONTEXT;
        }
        let gpu = (context / CONTEXT - 1) as i32;
        let given = if node.shares { node.give_shareable(bytes, gpu) } else { node.give(bytes, Some(gpu)) };
        given.map_or(code::OUT_OF_MEMORY, |address| put(out, address))
    })
}

/// Frees memory after waiting for all work, like the real driver.
unsafe extern "C" fn free(address: CUdeviceptr) -> Code {
    if unsafe_call() {
        return CAPTURE_UNSUPPORTED;
    }
    match block("cuMemFree", |node| node.queues.values().all(VecDeque::is_empty)) {
        0 => {}
        stuck => return stuck,
    }
    call("cuMemFree", |node| node.take(address, true))
}

unsafe extern "C" fn allocate_host(out: *mut *mut c_void, bytes: usize, _: c_uint) -> Code {
    call("cuMemHostAlloc", |node| {
        node.give(bytes, None).map_or(code::OUT_OF_MEMORY, |address| put(out, with_exposed_provenance_mut(address as usize)))
    })
}

unsafe extern "C" fn free_host(address: *mut c_void) -> Code {
    call("cuMemFreeHost", |node| node.take(address.addr() as u64, false))
}

unsafe extern "C" fn register(address: *mut c_void, bytes: usize, _: c_uint) -> Code {
    call("cuMemHostRegister", |node| {
        node.insert(address.addr() as u64, bytes, None, true);
        0
    })
}

unsafe extern "C" fn unregister(address: *mut c_void) -> Code {
    call("cuMemHostUnregister", |node| {
        let known = node.memory.remove(&(address.addr() as u64)).is_some_and(|block| block.registered);
        if known { 0 } else { INVALID_VALUE }
    })
}

/// Returns attributes of memory. Like some drivers, returns no range and no number for registered memory.
unsafe extern "C" fn locate(count: c_uint, names: *mut c_uint, values: *mut *mut c_void, address: CUdeviceptr) -> Code {
    use CUpointer_attribute::*;
    node(|node| {
        if current() == 0 {
            return code::INVALID_CONTEXT;
        }
        let found = node.memory.range(..=address).next_back().filter(|(base, block)| address - **base < block.bytes as u64);
        for index in 0..count as usize {
            // SAFETY: the backend passes as many names as values, each value of the attribute's type.
            unsafe {
                let (name, value) = (*names.add(index), *values.add(index));
                let Some((base, block)) = found else { continue };
                if name == CU_POINTER_ATTRIBUTE_MEMORY_TYPE as c_uint {
                    let kind = if block.gpu.is_some() { CUmemorytype::CU_MEMORYTYPE_DEVICE } else { CUmemorytype::CU_MEMORYTYPE_HOST };
                    value.cast::<c_uint>().write(kind as c_uint);
                } else if name == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL as c_uint {
                    value.cast::<c_int>().write(block.gpu.unwrap_or(0));
                } else if name == CU_POINTER_ATTRIBUTE_BUFFER_ID as c_uint && !block.registered {
                    value.cast::<u64>().write(block.id);
                } else if name == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as c_uint && !block.registered {
                    value.cast::<u64>().write(*base);
                } else if name == CU_POINTER_ATTRIBUTE_RANGE_SIZE as c_uint && !block.registered {
                    value.cast::<usize>().write(block.bytes);
                } else if name == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as c_uint {
                    value.cast::<c_uint>().write(c_uint::from(block.pool.is_none() && node.chunk.is_none() && !block.is_chunk));
                } else if name == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES as c_uint {
                    value.cast::<c_uint>().write(c_uint::from(node.chunk.is_some() || block.is_chunk));
                } else if name == CU_POINTER_ATTRIBUTE_ACCESS_FLAGS as c_uint && block.is_chunk {
                    value.cast::<c_uint>().write(sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_uint);
                } else if name == CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR as c_uint {
                    value.cast::<u64>().write(
                        base + (address - base) / node.chunk.map_or(u64::MAX, |chunk| chunk as u64) * node.chunk.unwrap_or(0) as u64,
                    );
                } else if name == CU_POINTER_ATTRIBUTE_MAPPING_SIZE as c_uint {
                    value.cast::<usize>().write(node.chunk.unwrap_or(block.bytes));
                } else if name == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as c_uint {
                    value.cast::<usize>().write(block.pool.unwrap_or(0));
                }
            }
        }
        0
    })
}

unsafe extern "C" fn set_access(pool: sys::CUmemoryPool, access: *const sys::CUmemAccessDesc, count: usize) -> Code {
    call("cuMemPoolSetAccess", |node| {
        let Some(pool) = node.pools.get_mut(&pool.addr()) else { return INVALID_VALUE };
        // SAFETY: a list of `count` elements.
        pool.access = (0..count).map(|index| unsafe { (*access.add(index)).location.id }).collect();
        0
    })
}

unsafe extern "C" fn get_access(out: *mut c_uint, pool: *mut c_void, location: *mut sys::CUmemLocation) -> Code {
    node(|node| {
        let Some(pool) = node.pools.get(&pool.addr()) else { return INVALID_VALUE };
        // SAFETY: the backend passes a location.
        let is_open = pool.access.contains(&unsafe { (*location).id });
        put(out, if is_open { sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_uint } else { 0 })
    })
}

/// Destroys a pool. Refuses if memory of the pool is in use; the real driver would wait for it.
unsafe extern "C" fn destroy_pool(pool: sys::CUmemoryPool) -> Code {
    call("cuMemPoolDestroy", |node| {
        let in_use = node.memory.values().any(|block| block.pool == Some(pool.addr()));
        if !in_use && node.pools.remove(&pool.addr()).is_some() { 0 } else { INVALID_VALUE }
    })
}

/// Exports a pool as the descriptor of a file that contains the pool's number.
unsafe extern "C" fn export_pool(out: *mut c_void, pool: sys::CUmemoryPool, _: c_uint, _: c_ulonglong) -> Code {
    call("cuMemPoolExportToShareableHandle", |node| {
        let Some(pool) = node.pools.get(&pool.addr()).filter(|pool| pool.exportable) else { return INVALID_VALUE };
        let Ok(file) = rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC) else { return code::OUT_OF_MEMORY };
        match rustix::io::pwrite(&file, &[pool.identity, pool.gpu as u64].map(u64::to_ne_bytes).concat(), 0) {
            Ok(16) => put(out.cast(), file.into_raw_fd()),
            _ => code::OUT_OF_MEMORY,
        }
    })
}

unsafe extern "C" fn import_pool(out: *mut sys::CUmemoryPool, descriptor: *mut c_void, _: c_uint, _: c_ulonglong) -> Code {
    call("cuMemPoolImportFromShareableHandle", |node| {
        let mut words = [0; 16];
        // SAFETY: the backend passes a descriptor that is open during the call.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor.addr() as c_int) };
        if rustix::io::pread(file, &mut words, 0) != Ok(16) {
            return INVALID_VALUE;
        }
        let [identity, gpu] = [0, 8].map(|at| u64::from_ne_bytes(std::array::from_fn(|byte| words[at + byte])));
        let gpu = gpu as i32;
        let pool = node.add_pool(MemoryPool { gpu, identity, exportable: false, imported: true, access: vec![gpu] });
        put(out, with_exposed_provenance_mut(pool))
    })
}

/// Exports memory as the number of its pool and the number of the allocation, so that no other allocation can be mistaken for it.
unsafe extern "C" fn export_pointer(out: *mut sys::CUmemPoolPtrExportData, address: CUdeviceptr) -> Code {
    call("cuMemPoolExportPointer", |node| {
        let Some(block) = node.memory.get(&address) else { return INVALID_VALUE };
        let pool = block.pool.and_then(|pool| node.pools.get(&pool)).filter(|pool| pool.exportable);
        let Some(pool) = pool else { return INVALID_VALUE };
        let mut reserved = [0; 64];
        reserved[..16].copy_from_slice(&[pool.identity, block.id].map(u64::to_ne_bytes).concat());
        put(out, sys::CUmemPoolPtrExportData { reserved })
    })
}

/// Imports memory by mapping the same pages again. Refuses if the memory belongs to another pool.
unsafe extern "C" fn import_pointer(out: *mut CUdeviceptr, pool: sys::CUmemoryPool, data: *mut sys::CUmemPoolPtrExportData) -> Code {
    call("cuMemPoolImportPointer", |node| {
        // SAFETY: the backend passes 64 bytes that it may read.
        let words = unsafe { (*data).reserved };
        let [identity, id] = [0, 8].map(|at| u64::from_ne_bytes(std::array::from_fn(|byte| words[at + byte])));
        let imported = node.pools.get(&pool.addr()).is_some_and(|pool| pool.imported && pool.identity == identity);
        let block = node.memory.values().find(|block| block.id == id).filter(|_| imported);
        let Some(Block { bytes, pages: Some(Pages::Own(region)), .. }) = block else { return INVALID_VALUE };
        let Some((mapping, bytes)) = region.file().and_then(|file| Ok((Mapping::new(&file, *bytes as u64)?, *bytes))).ok() else {
            return code::OUT_OF_MEMORY;
        };
        let base = mapping.base();
        node.insert_of(Some(pool.addr()), base, bytes, Pages::Imported(mapping));
        put(out, base)
    })
}

/// Exports memory by CUDA IPC. The handle contains the number of the allocation.
unsafe extern "C" fn export_ipc(out: *mut sys::CUipcMemHandle, address: CUdeviceptr) -> Code {
    call("cuIpcGetMemHandle", |node| {
        let Some(block) = node.memory.get(&address).filter(|block| block.pool.is_none() && block.pages.is_some()) else {
            return INVALID_VALUE;
        };
        let mut reserved = [0; 64];
        reserved[..8].copy_from_slice(&block.id.to_ne_bytes().map(|byte| byte as c_char));
        put(out, sys::CUipcMemHandle { reserved })
    })
}

/// Opens memory by CUDA IPC: maps the same pages again, as memory of the GPU whose context is current.
unsafe extern "C" fn open_ipc(out: *mut CUdeviceptr, handle: sys::CUipcMemHandle, _: c_uint) -> Code {
    call("cuIpcOpenMemHandle", |node| {
        let context = current();
        if context == 0 {
            return code::INVALID_CONTEXT;
        }
        let id = u64::from_ne_bytes(std::array::from_fn(|byte| handle.reserved[byte] as u8));
        let found = node.memory.iter().find(|(_, block)| block.id == id);
        if found.is_some_and(|(base, _)| node.foreign.contains(base)) {
            return code::ALREADY_MAPPED;
        }
        let found = found.and_then(|(_, block)| match &block.pages {
            Some(Pages::Own(region)) => Some((region.file().ok()?, block.bytes)),
            _ => None,
        });
        let Some((file, bytes)) = found else { return INVALID_VALUE };
        let Ok(mapping) = Mapping::new(&file, bytes as u64) else { return code::OUT_OF_MEMORY };
        let base = mapping.base();
        node.insert_of(None, base, bytes, Pages::Imported(mapping));
        if let Some(block) = node.memory.get_mut(&base) {
            (block.gpu, block.opened) = (Some((context / CONTEXT - 1) as i32), true);
        }
        put(out, base)
    })
}

/// Closes memory that was opened by CUDA IPC. Refuses if another context has opened it.
unsafe extern "C" fn close_ipc(base: CUdeviceptr) -> Code {
    call("cuIpcCloseMemHandle", |node| {
        let gpu = Some((current() / CONTEXT) as i32 - 1);
        if node.memory.get(&base).is_none_or(|block| !block.opened || block.gpu != gpu) {
            return INVALID_VALUE;
        }
        node.memory.remove(&base);
        0
    })
}

/// Copies bytes. Refuses ranges outside of known memory, and memory of a pool that the GPU of the current context may not access.
fn copy_bytes(node: &Node, dst: u64, src: u64, bytes: usize) -> Code {
    if !may_copy(node, dst, src, bytes) {
        return INVALID_VALUE;
    }
    if let (Some(from), Some(to)) = (node.gpu_at(src), node.gpu_at(dst))
        && node.lossy.contains(&(from, to))
    {
        return 0;
    }
    // SAFETY: inside memory of this node or of the test.
    unsafe { std::ptr::copy(with_exposed_provenance::<u8>(src as usize), with_exposed_provenance_mut::<u8>(dst as usize), bytes) };
    0
}

/// True if the GPU of the current context may access both ranges, and each range is inside one allocation.
fn may_copy(node: &Node, dst: u64, src: u64, bytes: usize) -> bool {
    let inside = |address: u64| match node.memory.range(..=address).next_back() {
        Some((base, block)) if address - base < block.bytes as u64 => address - base + bytes as u64 <= block.bytes as u64,
        // Unknown addresses are pageable host memory.
        _ => true,
    };
    node.may_enter(dst) && node.may_enter(src) && inside(dst) && inside(src)
}

unsafe extern "C" fn copy(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) -> Code {
    let refused = call("cuMemcpyAsync", |node| {
        let gpu = (stream.addr() / STREAM) as i32 - 1;
        let strange = |address: u64| {
            node.memory
                .range(..=address)
                .next_back()
                .is_some_and(|(base, block)| block.opened && block.gpu != Some(gpu) && address - base < block.bytes as u64)
        };
        node.strangers += u32::from(strange(dst) || strange(src));
        if node.is_captured(stream.addr()) {
            node.capture_copy(dst, src, bytes);
            return 0;
        }
        if node.room.is_none() { copy_bytes(node, dst, src, bytes) } else { 0 }
    });
    if refused != 0 || node(|node| node.room.is_none() || node.is_captured(stream.addr())) {
        return refused;
    }
    let is_done = Arc::new(AtomicBool::new(false));
    let done = Arc::clone(&is_done);
    let work = move |node: &mut Node| {
        if copy_bytes(node, dst, src, bytes) != 0 {
            node.stuck.push("a copy failed");
        }
        done.store(true, Ordering::Release);
    };
    let code = enqueue("cuMemcpyAsync", stream, Task::Work(Box::new(work)));
    // The driver has read pageable memory when the call returns.
    let is_pageable = node(|node| node.memory.range(..=src).next_back().is_none_or(|(base, block)| src - base >= block.bytes as u64));
    if code == 0 && is_pageable { block("cuMemcpyAsync", |_| is_done.load(Ordering::Acquire)) } else { code }
}

unsafe extern "C" fn copy_to_host(dst: *mut c_void, src: CUdeviceptr, bytes: usize, _: CUstream) -> Code {
    call("cuMemcpyDtoHAsync", |node| copy_bytes(node, dst.expose_provenance() as u64, src, bytes))
}

/// Copies bytes, but refuses pageable host memory.
unsafe extern "C" fn copy_known(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) -> Code {
    let known = |address: u64| {
        node(|node| node.memory.range(..=address).next_back().is_some_and(|(base, block)| address - base < block.bytes as u64))
    };
    if known(dst) && known(src) {
        // SAFETY: the caller's guarantees apply.
        unsafe { copy(dst, src, bytes, stream) }
    } else {
        INVALID_VALUE
    }
}

unsafe extern "C" fn copy_batch(
    dsts: *mut CUdeviceptr,
    srcs: *mut CUdeviceptr,
    sizes: *mut usize,
    count: usize,
    _: *mut sys::CUmemcpyAttributes,
    _: *mut usize,
    _: usize,
    stream: CUstream,
) -> Code {
    // SAFETY: three lists of `count` elements.
    let copies: Vec<_> = (0..count).map(|index| unsafe { (*dsts.add(index), *srcs.add(index), *sizes.add(index)) }).collect();
    let all = |node: &mut Node, copies: &[(u64, u64, usize)]| {
        copies.iter().map(|&(dst, src, bytes)| copy_bytes(node, dst, src, bytes)).find(|code| *code != 0).unwrap_or(0)
    };
    let refused = call("cuMemcpyBatchAsync", |node| if node.room.is_none() { all(node, &copies) } else { 0 });
    if refused != 0 || node(|node| node.room.is_none()) {
        return refused;
    }
    let work = move |node: &mut Node| {
        if all(node, &copies) != 0 {
            node.stuck.push("a batch failed");
        }
    };
    enqueue("cuMemcpyBatchAsync", stream, Task::Work(Box::new(work)))
}

unsafe extern "C" fn create_stream(out: *mut CUstream, _: c_uint) -> Code {
    call("cuStreamCreate", |node| {
        let context = current();
        if context == 0 {
            return code::INVALID_CONTEXT;
        }
        let stream = context / CONTEXT * STREAM + node.new_handle();
        node.streams.insert(stream);
        put(out, with_exposed_provenance_mut(stream))
    })
}

unsafe extern "C" fn destroy_stream(stream: CUstream) -> Code {
    node(|node| node.touch(stream.addr(), "cuStreamDestroy"));
    call("cuStreamDestroy", |node| if node.streams.remove(&stream.addr()) { 0 } else { INVALID_VALUE })
}

unsafe extern "C" fn context_of_stream(stream: CUstream, out: *mut CUcontext) -> Code {
    node(|node| node.touch(stream.addr(), "cuStreamGetCtx"));
    put(out, with_exposed_provenance_mut(stream.addr() / STREAM * CONTEXT + node(|node| node.number)))
}

unsafe extern "C" fn is_capturing(stream: CUstream, out: *mut c_uint) -> Code {
    node(|node| {
        node.touch(stream.addr(), "cuStreamIsCapturing");
        put(out, c_uint::from(node.is_captured(stream.addr())))
    })
}

/// Waits for all work of a context. Like driver 580, refuses while any stream is being captured, whatever the capture mode of the thread.
unsafe extern "C" fn synchronize_context() -> Code {
    if node(|node| node.end_capture(node.capturing || node.captured.is_some())) {
        return CAPTURE_UNSUPPORTED;
    }
    block("cuCtxSynchronize", |node| node.queues.values().all(VecDeque::is_empty))
}

/// Checks a call that may wait. During a capture it is refused unless the capture mode of the thread permits it.
fn unsafe_call() -> bool {
    node(|node| node.end_capture((node.capturing || node.captured.is_some()) && MODE.get() != 2))
}

/// Returns the number of a stream. Handles are never reused in the double, so the handle is the number. A default stream belongs to the
/// current context.
unsafe extern "C" fn id_of_stream(stream: CUstream, out: *mut c_ulonglong) -> Code {
    node(|node| {
        node.touch(stream.addr(), "cuStreamGetId");
        // This was observed with driver 580 on H200.
        if node.end_capture(node.is_captured(stream.addr())) {
            return CAPTURE_UNSUPPORTED;
        }
        let context = if stream.addr() <= 2 { current() } else { 0 };
        put(out, (context + stream.addr()) as c_ulonglong)
    })
}

unsafe extern "C" fn flags_of_stream(stream: CUstream, out: *mut c_uint) -> Code {
    node(|node| put(out, c_uint::from(!node.blocking.contains(&stream.addr()))))
}

unsafe extern "C" fn operate(stream: CUstream, count: c_uint, operations: *mut sys::CUstreamBatchMemOpParams, _: c_uint) -> Code {
    let code = call("cuStreamBatchMemOp", |_| 0);
    for index in 0..count as usize {
        // SAFETY: the backend passes a list of `count` operations on counters of the test, each with the member that its type selects.
        let (counter, value, is_write) = unsafe {
            let params = &*operations.add(index);
            let (wait, write) = (params.waitValue, params.writeValue);
            let is_write = params.operation == sys::CUstreamBatchMemOpType::CU_STREAM_MEM_OP_WRITE_VALUE_64;
            // The two members of the union have the same layout.
            if is_write {
                (write.address, write.__bindgen_anon_1.value64, true)
            } else {
                (wait.address, wait.__bindgen_anon_1.value64, false)
            }
        };
        let write = move |_: &mut Node| {
            // SAFETY: as above.
            unsafe { signal::store(counter, value) };
            // Ordered before the next read of the stream.
            fence(Ordering::SeqCst);
        };
        let task = if is_write { Task::Work(Box::new(write)) } else { Task::Counter(counter, value) };
        if code != 0 {
            return code;
        }
        match enqueue("cuStreamBatchMemOp", stream, task) {
            0 => {}
            stuck => return stuck,
        }
    }
    code
}

unsafe extern "C" fn wait_event(stream: CUstream, event: CUevent, _: c_uint) -> Code {
    let mut last = 0;
    let code = call("cuStreamWaitEvent", |node| match node.events.get(&event.addr()) {
        Some(event) => {
            last = event.last;
            0
        }
        None => INVALID_VALUE,
    });
    if code == 0 { enqueue("cuStreamWaitEvent", stream, Task::Recording(last)) } else { code }
}

unsafe extern "C" fn create_event(out: *mut CUevent, flags: c_uint) -> Code {
    node(|node| {
        let event = node.new_handle();
        let timed = flags & sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint == 0;
        node.events.insert(event, Event { timed, recorded: None, last: 0 });
        put(out, with_exposed_provenance_mut(event))
    })
}

unsafe extern "C" fn destroy_event(event: CUevent) -> Code {
    node(|node| node.touch(event.addr(), "cuEventDestroy"));
    node(|node| if node.events.remove(&event.addr()).is_some() { 0 } else { INVALID_VALUE })
}

unsafe extern "C" fn record_event(event: CUevent, stream: CUstream) -> Code {
    let mut number = 0;
    let code = node(|node| {
        // A default stream belongs to the current context.
        let gpu = match stream.addr() / STREAM {
            0 => current() / CONTEXT,
            of_gpu => of_gpu,
        };
        node.now += 1.0;
        node.recordings += 1;
        number = node.recordings;
        let time = node.now + 500.0 * gpu as f64;
        node.events.get_mut(&event.addr()).map_or(INVALID_VALUE, |event| {
            event.recorded = Some((gpu, time));
            event.last = number;
            node.pending.insert(number);
            0
        })
    });
    let done = move |node: &mut Node| _ = node.pending.remove(&number);
    if code == 0 { enqueue("cuEventRecord", stream, Task::Work(Box::new(done))) } else { code }
}

/// Returns the time between two recordings. Refuses events of different GPUs and events without timestamps, like the real driver.
unsafe extern "C" fn elapsed(out: *mut f32, from: CUevent, to: CUevent) -> Code {
    const INVALID_HANDLE: Code = 400;
    let recorded =
        |event: CUevent| node(|node| node.events.get(&event.addr()).filter(|event| event.timed).and_then(|event| event.recorded));
    match (recorded(from), recorded(to)) {
        (Some((a, begin)), Some((b, end))) if a == b => put(out, ((end - begin) * 1e-3) as f32),
        _ => INVALID_HANDLE,
    }
}

unsafe extern "C" fn load_module(_: *mut CUmodule, _: *const c_void) -> Code {
    NO_BINARY_FOR_GPU
}
