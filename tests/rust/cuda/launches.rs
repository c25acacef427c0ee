//! Tests graph launches with a driver double (simulated CUDA driver) that simulates time. Work of a stream completes when a test requests
//! it, or when a call waits for it. A copy is made when it is launched. All threads share this double, unlike the one in `double`, so its
//! tests run one at a time.
//!
//! The double checks that an executable graph is destroyed only after its last launch has completed, that an event is recorded only in
//! streams of its own context, and that no object remains after the backend is dropped.

use super::driver::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUgraph, CUgraphExec, CUgraphNode, CUstream, Code, Driver, code};
use super::{Backend, CudaBackend};
use crate::backend::{Completion, CompletionState, Endpoints, Execution, PlanState, StreamHandle};
use crate::plan::{self, Copy, Engine, Lane, LaneId, Mechanism, Op, Place, Program, Ring, RingId};
use crate::topology::DeviceId;
use cudarc::driver::sys::{self, CUpointer_attribute};
use smallvec::smallvec;
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::num::NonZeroU64;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const GPU0: DeviceId = DeviceId::gpu(0);
const GPU1: DeviceId = DeviceId::gpu(1);
const INVALID_VALUE: Code = 1;

/// First number of a context. Contexts are numbers that contain the number of their GPU.
const CONTEXT: usize = 0x1000;

#[derive(Default)]
struct Clockwork {
    handles: usize,
    streams: HashMap<usize, Stream>,
    /// Context of each event, and the work that the event represents; `None` if it was not recorded.
    events: HashMap<usize, (usize, Option<Moment>)>,
    graphs: HashMap<usize, Vec<Piece>>,
    /// Copies of each executable graph, and its last launch.
    execs: HashMap<usize, (Vec<Piece>, Option<Moment>)>,
    waits: u32,
    /// Stream whose queue is full, so that launches into it block; `None` if there is none.
    full: Option<usize>,
    /// Number of launches that block now.
    blocked: u32,
    /// Dependencies of each node: the nodes after which it was added. Nodes are in the order in which they were added.
    behind: Vec<Vec<usize>>,
    /// Calls that the real driver forbids.
    faults: Vec<&'static str>,
}

/// Destination, source and size in bytes of a copy.
type Piece = (u64, u64, usize);

/// Work of a stream up to a certain launch: number of the stream, and number of the launch. Streams have numbers, because handles may be
/// reused.
type Moment = (u64, u64);

#[derive(Copy, Clone, Default)]
struct Stream {
    number: u64,
    context: usize,
    issued: u64,
    done: u64,
}

impl Clockwork {
    fn handle(&mut self) -> usize {
        self.handles += 16;
        0x10_0000 + self.handles
    }

    /// Returns the number of events and the number of executable graphs that exist.
    fn held(&self) -> (usize, usize) {
        (self.events.len(), self.execs.len())
    }

    /// True if the work has completed. Work of a destroyed stream completes as late as possible.
    fn is_done(&self, moment: Option<Moment>) -> bool {
        let Some((number, issued)) = moment else { return true };
        self.streams.values().any(|stream| stream.number == number && stream.done >= issued)
    }
}

static CLOCKWORK: LazyLock<Mutex<Clockwork>> = LazyLock::new(Mutex::default);

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

fn clockwork() -> MutexGuard<'static, Clockwork> {
    CLOCKWORK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn put<T>(out: *mut T, value: T) -> Code {
    // SAFETY: the backend passes outputs that are valid for the call.
    unsafe { out.write(value) };
    0
}

fn driver() -> &'static Driver {
    static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver {
        cuDeviceGetCount: count_devices,
        cuDeviceGet: get_device,
        cuDeviceCanAccessPeer: can_access,
        cuDevicePrimaryCtxRetain: retain,
        cuCtxGetCurrent: get_current,
        cuCtxPushCurrent: push,
        cuCtxPopCurrent: pop,
        cuCtxGetDevice: get_current_device,
        cuDevicePrimaryCtxGetState: get_state,
        cuMemFree: free,
        cuPointerGetAttributes: locate,
        cuStreamGetCtx: context_of_stream,
        cuStreamGetId: Some(id_of_stream),
        cuStreamIsCapturing: is_capturing,
        cuStreamWaitEvent: wait_event,
        cuEventCreate: create_event,
        cuEventDestroy: destroy_event,
        cuEventRecord: record_event,
        cuEventQuery: query_event,
        cuEventSynchronize: synchronize_event,
        cuGraphCreate: create_graph,
        cuGraphDestroy: destroy_graph,
        cuGraphAddMemcpyNode: add_copy,
        cuGraphAddKernelNode: Some(add_kernel),
        cuGraphExecKernelNodeSetParams: Some(set_kernel),
        cuGraphExecMemcpyNodeSetParams: set_copy,
        cuGraphInstantiateWithFlags: Some(instantiate),
        cuGraphExecDestroy: destroy_exec,
        cuGraphLaunch: launch,
        ..Driver::inert()
    });
    &DRIVER
}

unsafe extern "C" fn count_devices(out: *mut c_int) -> Code {
    put(out, 2)
}

unsafe extern "C" fn get_device(out: *mut CUdevice, index: c_int) -> Code {
    put(out, index)
}

unsafe extern "C" fn can_access(out: *mut c_int, _: CUdevice, _: CUdevice) -> Code {
    put(out, 1)
}

unsafe extern "C" fn retain(out: *mut CUcontext, device: CUdevice) -> Code {
    put(out, with_exposed_provenance_mut(CONTEXT * (device as usize + 1)))
}

unsafe extern "C" fn get_current(out: *mut CUcontext) -> Code {
    put(out, with_exposed_provenance_mut(CURRENT.get()))
}

/// Makes a context current. One level is enough: outside of the backend's calls no context is current, and the backend first queries the
/// current one.
unsafe extern "C" fn push(context: CUcontext) -> Code {
    CURRENT.set(context.addr());
    0
}

unsafe extern "C" fn pop(out: *mut CUcontext) -> Code {
    put(out, with_exposed_provenance_mut(CURRENT.replace(0)))
}

unsafe extern "C" fn get_current_device(out: *mut CUdevice) -> Code {
    put(out, (CURRENT.get() / CONTEXT) as CUdevice - 1)
}

unsafe extern "C" fn get_state(_: CUdevice, flags: *mut c_uint, active: *mut c_int) -> Code {
    put(flags, 0);
    put(active, 1)
}

/// Frees memory, after waiting for all work.
unsafe extern "C" fn free(_: CUdeviceptr) -> Code {
    clockwork().streams.values_mut().for_each(|stream| stream.done = stream.issued);
    0
}

/// Returns attributes of memory. All memory belongs to a GPU.
unsafe extern "C" fn locate(count: c_uint, names: *mut c_uint, values: *mut *mut c_void, _: CUdeviceptr) -> Code {
    for index in 0..count as usize {
        // SAFETY: the backend passes as many names as values, each value of the attribute's type.
        unsafe {
            if *names.add(index) == CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE as c_uint {
                (*values.add(index)).cast::<c_uint>().write(sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint);
            }
        }
    }
    0
}

unsafe extern "C" fn context_of_stream(stream: CUstream, out: *mut CUcontext) -> Code {
    let context = clockwork().streams.get(&stream.addr()).map_or(0, |stream| stream.context);
    put(out, with_exposed_provenance_mut(context))
}

unsafe extern "C" fn id_of_stream(stream: CUstream, out: *mut c_ulonglong) -> Code {
    match clockwork().streams.get(&stream.addr()) {
        Some(stream) => put(out, stream.number),
        None => INVALID_VALUE,
    }
}

unsafe extern "C" fn is_capturing(_: CUstream, out: *mut c_uint) -> Code {
    put(out, 0)
}

unsafe extern "C" fn wait_event(_: CUstream, event: CUevent, _: c_uint) -> Code {
    let mut clockwork = clockwork();
    clockwork.waits += 1;
    if clockwork.events.contains_key(&event.addr()) { 0 } else { INVALID_VALUE }
}

unsafe extern "C" fn create_event(out: *mut CUevent, _: c_uint) -> Code {
    let mut clockwork = clockwork();
    let event = clockwork.handle();
    clockwork.events.insert(event, (CURRENT.get(), None));
    put(out, with_exposed_provenance_mut(event))
}

unsafe extern "C" fn destroy_event(event: CUevent) -> Code {
    if clockwork().events.remove(&event.addr()).is_some() { 0 } else { INVALID_VALUE }
}

unsafe extern "C" fn record_event(event: CUevent, stream: CUstream) -> Code {
    let mut clockwork = clockwork();
    let Some(stream) = clockwork.streams.get(&stream.addr()).copied() else { return INVALID_VALUE };
    match clockwork.events.get_mut(&event.addr()) {
        Some((context, moment)) if *context == stream.context => {
            *moment = Some((stream.number, stream.issued));
            0
        }
        _ => INVALID_VALUE,
    }
}

unsafe extern "C" fn query_event(event: CUevent) -> Code {
    let clockwork = clockwork();
    match clockwork.events.get(&event.addr()) {
        Some((_, moment)) if clockwork.is_done(*moment) => 0,
        Some(_) => code::NOT_READY,
        None => INVALID_VALUE,
    }
}

/// Waits until the work that the event represents has completed.
unsafe extern "C" fn synchronize_event(event: CUevent) -> Code {
    let mut clockwork = clockwork();
    let Some((_, moment)) = clockwork.events.get(&event.addr()).copied() else { return INVALID_VALUE };
    let Some((number, issued)) = moment else { return 0 };
    let of_number = clockwork.streams.values_mut().filter(|stream| stream.number == number);
    of_number.for_each(|stream| stream.done = stream.done.max(issued));
    0
}

unsafe extern "C" fn create_graph(out: *mut CUgraph, _: c_uint) -> Code {
    let mut clockwork = clockwork();
    let graph = clockwork.handle();
    clockwork.graphs.insert(graph, Vec::new());
    put(out, with_exposed_provenance_mut(graph))
}

unsafe extern "C" fn destroy_graph(graph: CUgraph) -> Code {
    if clockwork().graphs.remove(&graph.addr()).is_some() { 0 } else { INVALID_VALUE }
}

fn copy_of(parameters: *const sys::CUDA_MEMCPY3D) -> Piece {
    // SAFETY: the backend passes parameters that are valid for the call.
    let parameters = unsafe { &*parameters };
    (parameters.dstDevice, parameters.srcDevice, parameters.WidthInBytes)
}

/// Adds a copy node to a graph. Nodes are numbered from 1.
fn add(out: *mut CUgraphNode, graph: CUgraph, before: *const CUgraphNode, count: usize, piece: Piece) -> Code {
    let mut clockwork = clockwork();
    let Some(pieces) = clockwork.graphs.get_mut(&graph.addr()) else { return INVALID_VALUE };
    pieces.push(piece);
    let node = pieces.len();
    // SAFETY: the backend passes `count` nodes.
    clockwork.behind.push((0..count).map(|index| unsafe { *before.add(index) }.addr()).collect());
    put(out, with_exposed_provenance_mut(node))
}

unsafe extern "C" fn add_copy(
    out: *mut CUgraphNode,
    graph: CUgraph,
    before: *const CUgraphNode,
    count: usize,
    copy: *const sys::CUDA_MEMCPY3D,
    _: CUcontext,
) -> Code {
    add(out, graph, before, count, copy_of(copy))
}

/// Adds a kernel node, which copies nothing in this double.
unsafe extern "C" fn add_kernel(
    out: *mut CUgraphNode,
    graph: CUgraph,
    before: *const CUgraphNode,
    count: usize,
    _: *const sys::CUDA_KERNEL_NODE_PARAMS_v1,
) -> Code {
    static NOTHING: u8 = 0;
    let nowhere = (&raw const NOTHING).expose_provenance() as u64;
    add(out, graph, before, count, (nowhere, nowhere, 0))
}

unsafe extern "C" fn set_kernel(_: CUgraphExec, _: CUgraphNode, _: *const sys::CUDA_KERNEL_NODE_PARAMS_v1) -> Code {
    0
}

unsafe extern "C" fn set_copy(exec: CUgraphExec, node: CUgraphNode, copy: *const sys::CUDA_MEMCPY3D, _: CUcontext) -> Code {
    let mut clockwork = clockwork();
    let Some((copies, _)) = clockwork.execs.get_mut(&exec.addr()) else { return INVALID_VALUE };
    copies[node.addr() - 1] = copy_of(copy);
    0
}

unsafe extern "C" fn instantiate(out: *mut CUgraphExec, graph: CUgraph, _: c_ulonglong) -> Code {
    let mut clockwork = clockwork();
    let Some(copies) = clockwork.graphs.get(&graph.addr()).cloned() else { return INVALID_VALUE };
    let exec = clockwork.handle();
    clockwork.execs.insert(exec, (copies, None));
    put(out, with_exposed_provenance_mut(exec))
}

unsafe extern "C" fn destroy_exec(exec: CUgraphExec) -> Code {
    let mut clockwork = clockwork();
    let Some((_, last)) = clockwork.execs.remove(&exec.addr()) else { return INVALID_VALUE };
    if !clockwork.is_done(last) {
        clockwork.faults.push("an exec was destroyed while it was at work");
    }
    0
}

/// Blocks while the queue of a stream is full, but for at most as long as a test may take.
fn until_there_is_room(stream: usize) {
    let begin = Instant::now();
    if clockwork().full != Some(stream) {
        return;
    }
    clockwork().blocked += 1;
    while clockwork().full == Some(stream) {
        if begin.elapsed() > Duration::from_secs(20) {
            clockwork().faults.push("a launch has blocked for ever");
            break;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    clockwork().blocked -= 1;
}

unsafe extern "C" fn launch(exec: CUgraphExec, stream: CUstream) -> Code {
    until_there_is_room(stream.addr());
    let mut clockwork = clockwork();
    let Some(Stream { number, issued, .. }) = clockwork.streams.get_mut(&stream.addr()).map(|stream| {
        stream.issued += 1;
        *stream
    }) else {
        return INVALID_VALUE;
    };
    let Some((copies, last)) = clockwork.execs.get_mut(&exec.addr()) else { return INVALID_VALUE };
    *last = Some((number, issued));
    for (dst, src, bytes) in copies {
        // SAFETY: memory of the test of at least this size, which no other program of the test writes.
        unsafe { std::ptr::copy(with_exposed_provenance::<u8>(*src as usize), with_exposed_provenance_mut::<u8>(*dst as usize), *bytes) };
    }
    0
}

/// Exclusive use of the double by one test, with a backend on it. No object may remain when the test ends.
struct Alone {
    _others: MutexGuard<'static, ()>,
}

fn alone() -> (Alone, CudaBackend) {
    static ALONE: Mutex<()> = Mutex::new(());
    let others = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    *clockwork() = Clockwork::default();
    (Alone { _others: others }, CudaBackend::on(driver(), 1).expect("the double has GPUs"))
}

impl Alone {
    /// Checks that no object remains. Must be called after the backend and all completions are dropped.
    #[track_caller]
    fn nothing_is_left(self) {
        let clockwork = clockwork();
        assert_eq!((clockwork.execs.len(), clockwork.graphs.len(), clockwork.events.len()), (0, 0, 0));
        assert!(clockwork.faults.is_empty(), "{:?}", clockwork.faults);
    }
}

/// Creates a stream on a GPU, as another library does. If a stream with this handle exists, destroys it.
fn stream(handle: usize, number: u64, gpu: usize) -> StreamHandle {
    clockwork().streams.insert(handle, Stream { number, context: CONTEXT * (gpu + 1), ..Stream::default() });
    StreamHandle(handle)
}

/// Completes the first `launches` launches of a stream.
fn finish(stream: StreamHandle, launches: u64) {
    if let Some(stream) = clockwork().streams.get_mut(&stream.0) {
        stream.done = launches;
    }
}

const BYTES: usize = 64;

/// Plan of two copies, direct or through a staging slot, with its memory.
struct Step {
    program: Arc<Program>,
    endpoints: Arc<[Endpoints]>,
    rings: Arc<[u64]>,
    kept: PlanState,
    from: Box<[u8]>,
    to: Box<[u8]>,
    _slot: Box<[u8]>,
}

impl Step {
    fn new(seed: u8) -> Step {
        let bytes = BYTES as u64;
        let slot = Place::Slot { ring: RingId(0), slot: 0 };
        let copy =
            |from, to| Op { lane: LaneId(0), mechanism: Mechanism::Copy, copies: smallvec![Copy { from, to, bytes }], after: smallvec![] };
        let ops = vec![copy(Place::Source { transfer: 0, offset: 0 }, slot), copy(slot, Place::Destination { transfer: 0, offset: 0 })];
        let rings = vec![Ring { device: GPU1, slot_bytes: bytes, slots: 1 }];
        let program = Program { sources: Vec::new(), transfers: vec![bytes], lanes: vec![Lane::new(GPU0)], rings, ops };
        plan::validate(&program, bytes).expect("a valid program");
        let from: Box<[u8]> = (0..BYTES as u8).map(|at| at ^ seed).collect();
        let [mut to, mut slot]: [Box<[u8]>; 2] = [(); 2].map(|()| vec![0; BYTES].into());
        let address = |bytes: &mut [u8]| bytes.as_mut_ptr().expose_provenance() as u64;
        let endpoints = [Endpoints { dst: address(&mut to), src: from.as_ptr().expose_provenance() as u64 }];
        let rings = [address(&mut slot)];
        Step {
            program: Arc::new(program),
            endpoints: endpoints.into(),
            rings: rings.into(),
            kept: PlanState::default(),
            from,
            to,
            _slot: slot,
        }
    }

    fn prepare(&self, backend: &CudaBackend, stream: StreamHandle) {
        let plain = Execution::new(&self.program, &self.endpoints, &self.rings, stream);
        backend.prepare(&Execution { engine: Engine::Graph, state: Some(&self.kept), ..plain }).expect("prepared");
    }

    fn execute_after(&self, backend: &CudaBackend, stream: StreamHandle, after: &[Completion]) -> Completion {
        let Step { program, endpoints, rings, .. } = self;
        let plain = Execution::new(program, endpoints, rings, stream);
        let execution = Execution { after, engine: Engine::Graph, state: Some(&self.kept), ..plain };
        backend.submit(&execution).expect("enqueued").expect("a completion")
    }

    fn execute(&self, backend: &CudaBackend, stream: StreamHandle) -> Completion {
        self.execute_after(backend, stream, &[])
    }

    #[track_caller]
    fn assert_arrived(&self) {
        // SAFETY: memory of this step, which the double has written without the compiler's knowledge.
        let arrived: Vec<u8> = (0..BYTES).map(|at| unsafe { self.to.as_ptr().add(at).read_volatile() }).collect();
        assert_eq!(*arrived, *self.from);
    }
}

fn is_done(completion: &dyn CompletionState) -> bool {
    completion.is_done().expect("the double never fails")
}

#[test]
fn a_time_loop_asks_for_two_events_and_one_exec() {
    let (alone, backend) = alone();
    let (step, here) = (Step::new(1), stream(0x100, 1, 0));
    let mut last = None;
    for _ in 0..100 {
        // The completion of the previous execution is kept, as staging memory does.
        last = Some(step.execute(&backend, here));
        step.assert_arrived();
    }
    let (events, execs) = clockwork().held();
    assert_eq!((events, execs), (2, 1));
    let statistics = backend.graph_statistics();
    assert_eq!((statistics.launches, statistics.hits, statistics.misses, statistics.instantiations), (100, 99, 1, 1));
    assert!(!last.as_ref().is_none_or(|last| is_done(&**last)));
    drop((last, step, backend));
    alone.nothing_is_left();
}

#[test]
fn prepared_steps_of_one_program_have_an_exec_each_as_long_as_there_is_room() {
    let (alone, backend) = alone();
    let here = stream(0x100, 1, 0);
    let program = Step::new(0).program;
    let steps: Vec<Step> = (0..9).map(|seed| Step { program: program.clone(), ..Step::new(seed) }).collect();
    for step in &steps[..3] {
        step.prepare(&backend, here);
        step.prepare(&backend, here);
    }
    assert_eq!(clockwork().held(), (2, 3));
    for step in &steps[..3] {
        drop(step.execute(&backend, here));
        step.assert_arrived();
    }
    let made = backend.graph_statistics();
    assert_eq!((made.instantiations, made.repoints, made.hits, made.misses), (3, 0, 3, 0));
    // The ninth execution finds no free executable graph, so it updates the addresses of another one.
    for step in &steps {
        step.prepare(&backend, here);
    }
    assert_eq!((backend.graph_statistics().execs, backend.graph_statistics().repoints), (8, 0));
    finish(here, 3);
    drop(steps[8].execute(&backend, here));
    steps[8].assert_arrived();
    assert_eq!((backend.graph_statistics().execs, backend.graph_statistics().repoints), (8, 1));
    drop((steps, backend));
    alone.nothing_is_left();
}

#[test]
fn a_completion_that_somebody_has_stands_for_its_own_launch_however_many_follow() {
    let (alone, backend) = alone();
    let (step, here) = (Step::new(2), stream(0x100, 1, 0));
    let kept: Vec<Completion> = (0..5).map(|_| step.execute(&backend, here)).collect();
    (0..20).for_each(|_| drop(step.execute(&backend, here)));
    for launches in 0..=5 {
        finish(here, launches);
        let done: Vec<bool> = kept.iter().map(|completion| is_done(&**completion)).collect();
        assert_eq!(done, (0..5).map(|launch| launch < launches).collect::<Vec<_>>());
    }
    // A completion that was known to be done is reused for an execution that is not done yet.
    let again = kept[0].clone();
    drop(kept);
    assert!(again.is_known_done());
    drop(again);
    let next: Vec<Completion> = (0..4).map(|_| step.execute(&backend, here)).collect();
    assert!(next.iter().all(|completion| !completion.is_known_done() && !is_done(&**completion)));
    // Completions can outlive the backend, whose driver objects then exist as long as they do.
    drop((step, backend));
    assert!(!is_done(&*next[3]));
    next[3].wait().expect("it runs");
    assert!(is_done(&*next[0]));
    drop(next);
    alone.nothing_is_left();
}

#[test]
fn a_launch_that_blocks_on_a_full_queue_holds_up_no_other_of_the_same_plan() {
    let (alone, backend) = alone();
    let (step, full, other) = (Step::new(7), stream(0x100, 1, 0), stream(0x200, 2, 0));
    step.execute(&backend, full);
    std::thread::scope(|scope| {
        clockwork().full = Some(full.0);
        // There are more executions than executable graphs. An execution that finds no free one uses streams.
        for _ in 0..8 {
            scope.spawn(|| drop(step.execute(&backend, full)));
        }
        let begin = Instant::now();
        while clockwork().blocked < 8 {
            assert!(begin.elapsed() < Duration::from_secs(10), "{} launches block", clockwork().blocked);
            std::thread::yield_now();
        }
        assert_eq!(backend.graph_statistics().execs, 8);
        step.execute(&backend, other);
        step.assert_arrived();
        // Launches of other programs replace all executable graphs whose launches have completed.
        for number in 0..140 {
            Step::new(number).execute(&backend, other);
        }
        assert_eq!((backend.graph_statistics().programs, clockwork().blocked), (128, 8));
        // After the limit is lowered, fewer graphs are kept from the next new program on.
        backend.keep_graphs(60);
        for number in 140..160 {
            Step::new(number).execute(&backend, other);
        }
        assert_eq!((backend.graph_statistics().programs, clockwork().blocked), (60, 8));
        clockwork().full = None;
    });
    assert_eq!(backend.graph_statistics().launches, 169);
    drop((step, backend));
    alone.nothing_is_left();
}

#[test]
fn an_evicted_exec_lives_until_its_launch_is_done_and_its_plan_gets_another() {
    let (alone, backend) = alone();
    let (here, there) = (stream(0x100, 1, 0), stream(0x200, 2, 0));
    let evicted = Step::new(3);
    let at_work = evicted.execute(&backend, here);
    let others: Vec<Step> = (0..200).map(|number| Step::new(number as u8)).collect();
    for (launches, other) in (1..).zip(&others) {
        other.execute(&backend, there);
        other.assert_arrived();
        finish(there, launches);
    }
    let statistics = backend.graph_statistics();
    assert_eq!(
        (statistics.programs, statistics.execs, statistics.instantiations),
        (128, 129, 201),
        "its own exec and those of 128 programs"
    );
    assert!(!is_done(&*at_work));
    // The program that was launched last is still in the cache. The program that was launched least recently was removed.
    others[199].execute(&backend, there);
    assert_eq!(backend.graph_statistics().instantiations, 201);
    let again = evicted.execute(&backend, here);
    evicted.assert_arrived();
    assert_eq!((backend.graph_statistics().instantiations, backend.graph_statistics().programs), (202, 128));
    finish(here, 1);
    assert!(is_done(&*at_work) && !is_done(&*again));
    drop((at_work, again, evicted, others, backend));
    alone.nothing_is_left();
}

#[test]
fn a_stream_that_gets_the_handle_of_a_destroyed_one_is_another_stream() {
    let (alone, backend) = alone();
    let step = Step::new(4);
    let first = step.execute(&backend, stream(0x100, 1, 0));
    let second = step.execute_after(&backend, StreamHandle(0x100), std::slice::from_ref(&first));
    assert_eq!(clockwork().waits, 0, "work of one stream is in order");
    // The execution is on another GPU. An event can be recorded there only if it belongs to the context of that GPU.
    let third = step.execute_after(&backend, stream(0x100, 2, 1), std::slice::from_ref(&second));
    assert_eq!(clockwork().waits, 1);
    let fourth = step.execute_after(&backend, stream(0x100, 3, 0), std::slice::from_ref(&third));
    assert_eq!(clockwork().waits, 2);
    // The number of this stream has the same index in the table as that of another stream.
    let fifth = step.execute_after(&backend, stream(0x300, 9, 1), std::slice::from_ref(&fourth));
    step.execute_after(&backend, stream(0x400, 17, 0), std::slice::from_ref(&fifth));
    step.execute(&backend, StreamHandle(0x300));
    step.assert_arrived();
    drop((first, second, third, fourth, fifth, step, backend));
    alone.nothing_is_left();
}

#[test]
fn other_memory_at_the_same_address_gets_another_exec_and_other_addresses_the_same_one() {
    let (alone, backend) = alone();
    let here = stream(0x100, 1, 0);
    let mut step = Step::new(5);
    let ends = |step: &Step| step.endpoints[0];
    let bind = |step: &mut Step, memory: [u64; 2], moved: bool| {
        // The plan is executed at new addresses, like the plan of another request. The double does not check to whom memory belongs.
        let Endpoints { dst, src } = ends(step);
        step.endpoints = [if moved { Endpoints { dst: src, src: dst } } else { Endpoints { dst, src } }].into();
        // These are numbers of allocations of the backend itself, so the driver need not be asked.
        step.kept = PlanState::of(memory.map(|id| NonZeroU64::new(id | 1 << 63)).into_iter());
        drop(step.execute(&backend, here));
        let made = backend.graph_statistics();
        (made.instantiations, made.repoints, clockwork().held().1)
    };
    assert_eq!(bind(&mut step, [1, 2], false), (1, 0, 1));
    finish(here, 1);
    assert_eq!(bind(&mut step, [1, 2], false), (1, 1, 1), "the very memory");
    finish(here, 2);
    assert_eq!(bind(&mut step, [2, 1], true), (1, 2, 1), "the other way round: no end has the address that it had");
    finish(here, 3);
    assert_eq!(bind(&mut step, [2, 3], false), (2, 2, 1), "what was at the source has been freed");
    finish(here, 4);
    assert_eq!(bind(&mut step, [0, 0], false), (3, 2, 1), "memory that is not known");
    finish(here, 5);
    assert_eq!(bind(&mut step, [0, 0], false), (3, 3, 1), "and nothing says that it is another");
    drop((step, backend));
    alone.nothing_is_left();
}

#[test]
fn kernels_of_one_operation_are_four_chains_and_what_follows_comes_after_the_end_of_each() {
    let (alone, backend) = alone();
    let here = stream(0x100, 1, 0);
    let mut step = Step::new(6);
    let copy = Copy { from: Place::Source { transfer: 0, offset: 0 }, to: Place::Destination { transfer: 0, offset: 0 }, bytes: 1 };
    let op = |mechanism, count: usize| Op { lane: LaneId(0), mechanism, copies: smallvec![copy; count], after: smallvec![] };
    let program = |segments| {
        let ops = vec![op(Mechanism::Copy, 1), op(Mechanism::Kernel, segments), op(Mechanism::Copy, 1)];
        Arc::new(Program { sources: Vec::new(), transfers: vec![BYTES as u64], lanes: vec![Lane::new(GPU0)], rings: vec![], ops })
    };
    let mut behind = |segments| {
        step.program = program(segments);
        step.kept = PlanState::default();
        clockwork().behind.clear();
        drop(step.execute(&backend, here));
        std::mem::take(&mut clockwork().behind)
    };
    // The first node is a copy. 120 segments form one kernel.
    assert_eq!(behind(120), [vec![], vec![1], vec![2]]);
    assert_eq!(behind(4 * 120), [vec![], vec![1], vec![1], vec![1], vec![1], vec![2, 3, 4, 5]]);
    let many = behind(9 * 120 + 1);
    assert_eq!(many[1..5], [[1], [1], [1], [1]]);
    assert_eq!(many[5..11], [[2], [3], [4], [5], [6], [7]]);
    assert_eq!(many[11..], [vec![8, 9, 10, 11]]);
    drop((step, backend));
    alone.nothing_is_left();
}

#[test]
fn threads_launch_plans_that_others_evict_and_drop() {
    const THREADS: usize = 6;
    const ROUNDS: usize = 200;
    let (alone, backend) = alone();
    // There are more programs than graphs that are kept, so a launch of one thread may evict a program that another thread is about to
    // launch.
    let shared: Vec<Arc<Step>> = (0..40).map(|number| Arc::new(Step::new(number))).collect();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (backend, mut shared) = (&backend, shared.clone());
            scope.spawn(move || {
                let here = stream(0x1000 + 0x100 * thread, 100 + thread as u64, thread % 2);
                for round in 0..ROUNDS {
                    let own = Step::new(round as u8);
                    let done = own.execute(backend, here);
                    own.assert_arrived();
                    let step = &shared[(7 * round + 11 * thread) % shared.len()];
                    drop(step.execute(backend, here));
                    step.assert_arrived();
                    // The plan is dropped while its execution is in progress.
                    drop(own);
                    done.wait().expect("it runs");
                    if round % 32 == 31 {
                        shared.truncate(shared.len() - 4);
                    }
                }
            });
        }
    });
    let statistics = backend.graph_statistics();
    assert_eq!(statistics.launches, (2 * THREADS * ROUNDS) as u64);
    assert!(statistics.programs <= 128 + THREADS as u64 && statistics.instantiations >= (THREADS * ROUNDS) as u64, "{statistics:?}");
    drop((shared, backend));
    alone.nothing_is_left();
}
