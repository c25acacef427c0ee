//! Tests plans with staging memory in captured streams: each captured graph has separate staging memory. Uses the driver double (simulated
//! CUDA driver).

use super::double::{self, Held, calls, held, node, without_of};
use super::driver::{CUgraph, CUgraphExec, Driver, code};
use super::refusals::{assert_arrived, no_nvml, write};
use super::{Backend, CudaBackend, discover};
use crate::backend::{BackendError, Endpoints, Execution, Report, StreamHandle};
use crate::plan::{self, Copy, Engine, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId};
use crate::topology::discover::topology;
use crate::topology::{DeviceId, Machine};
use mpgpu_contexts::{Config, Context, PlanOptions, Transfer};
use smallvec::smallvec;
use std::ptr::null_mut;
use std::sync::Arc;

const GPU0: DeviceId = DeviceId::gpu(0);
const BYTES: u64 = 10_000;

/// Returns a driver double for this test only, because all contexts of a driver share the staging memory of destroyed graphs.
fn driver() -> &'static Driver {
    without_of(double::whole(), "cuMemcpyBatchAsync")
}

/// Captured graph and the executable graph that was instantiated from it.
struct Captured {
    driver: &'static Driver,
    graph: CUgraph,
    exec: CUgraphExec,
}

impl Captured {
    /// Ends the capture of all streams and returns the graph, instantiated.
    fn end(driver: &'static Driver) -> Captured {
        let (graph, mut exec) = (double::captured(), null_mut());
        let instantiate = driver.cuGraphInstantiateWithFlags.expect("it has graphs");
        // SAFETY: a graph of the double.
        assert_eq!(unsafe { instantiate(&mut exec, graph, 0) }, 0);
        Captured { driver, graph, exec }
    }

    fn launch(&self) {
        // SAFETY: an exec of the double.
        assert_eq!(unsafe { (self.driver.cuGraphLaunch)(self.exec, null_mut()) }, 0);
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: created in `end` and no longer used.
        assert_eq!(unsafe { [(self.driver.cuGraphDestroy)(self.graph), (self.driver.cuGraphExecDestroy)(self.exec)] }, [0, 0]);
    }
}

/// Returns a program that copies data through a staging slot on each of these devices, one after the other.
fn through(devices: &[DeviceId]) -> Arc<Program> {
    let slot = |ring: usize| Place::Slot { ring: RingId(ring as u32), slot: 0 };
    let mut places = vec![Place::Source { transfer: 0, offset: 0 }];
    places.extend((0..devices.len()).map(slot));
    places.push(Place::Destination { transfer: 0, offset: 0 });
    let copy = |hop: &[Place]| Op {
        lane: LaneId(0),
        mechanism: Mechanism::Copy,
        copies: smallvec![Copy { from: hop[0], to: hop[1], bytes: BYTES }],
        after: smallvec![],
    };
    let rings = devices.iter().map(|device| Ring { device: *device, slot_bytes: BYTES, slots: 1 }).collect();
    let program = Program {
        sources: Vec::new(),
        transfers: vec![BYTES],
        lanes: vec![Lane::new(GPU0)],
        rings,
        ops: places.windows(2).map(copy).collect(),
    };
    plan::validate(&program, 1 << 20).expect("a valid program");
    Arc::new(program)
}

/// Allocates memory of another library. No context frees it.
fn foreign() -> [u64; 2] {
    [0, 1].map(|gpu| node(|node| node.give(BYTES as usize, Some(gpu))).expect("memory"))
}

fn give_back(memory: [u64; 2]) {
    memory.into_iter().for_each(|address| assert_eq!(node(|node| node.take(address, true)), 0));
}

/// Enqueues a program without giving it staging memory, so that the backend must provide it.
fn submit(backend: &CudaBackend, program: &Arc<Program>, [src, dst]: [u64; 2], stream: StreamHandle) -> Result<bool, BackendError> {
    let endpoints: Arc<[Endpoints]> = Arc::new([Endpoints { dst, src }]);
    let rings: Arc<[u64]> = program.rings.iter().map(|_| 0).collect();
    let execution = Execution { engine: Engine::Stream, ..Execution::new(program, &endpoints, &rings, stream) };
    Ok(backend.submit(&execution)?.is_some_and(|end| end.is_captured()))
}

#[test]
fn a_captured_plan_stages_in_memory_of_its_graph_which_outlives_the_context() {
    double::start(2, true);
    let driver = driver();
    let ends = foreign();
    let backend = CudaBackend::on(driver, 2).expect("the double has GPUs");
    let stream = backend.create_stream(GPU0).expect("a stream");
    let program = through(&[DeviceId::gpu(1), DeviceId::HOST, GPU0, DeviceId::gpu(1)]);
    node(|node| node.capturing = true);
    assert!(submit(&backend, &program, ends, stream).expect("captured"));
    let graph = Captured::end(driver);
    let with_graph = held().memory;
    drop(backend);
    // The five allocations are the source, the destination, and a staging block on each of three devices. Two rings of GPU 1 are in one
    // block.
    assert_eq!((with_graph, held().memory), (5, 5));
    for seed in [1, 2, 3] {
        write(ends[0], BYTES as usize, seed);
        graph.launch();
        assert_arrived(ends[1], BYTES as usize, seed);
    }
    let freed = || calls("cuMemFree") + calls("cuMemFreeHost") + calls("cuMemHostUnregister");
    let before = freed();
    drop(graph);
    assert_eq!((freed(), held().memory), (before, 5), "a destructor of a user object must not call the driver");
    // The next capture that needs as much staging memory reuses that of the destroyed graph.
    let backend = CudaBackend::on(driver, 2).expect("the double has GPUs");
    let stream = backend.create_stream(GPU0).expect("a stream");
    let one = backend.allocate(GPU0, 1).expect("memory");
    let allocated = || calls("cuMemAlloc") + calls("cuMemHostAlloc");
    let before = allocated();
    node(|node| node.capturing = true);
    // Blocks of contexts that this backend has not retained are not considered.
    let on_gpu0 = through(&[GPU0]);
    submit(&backend, &on_gpu0, ends, stream).expect("captured");
    assert_eq!(allocated(), before, "a spare block");
    submit(&backend, &on_gpu0, ends, stream).expect("captured");
    assert_eq!(allocated(), before + 1, "one of its own");
    let graph = Captured::end(driver);
    // Freeing memory also frees the spare blocks.
    backend.free(one).expect("freed");
    assert_eq!(held().memory, 4, "both ends, and the blocks of both executions");
    write(ends[0], BYTES as usize, 4);
    graph.launch();
    assert_arrived(ends[1], BYTES as usize, 4);
    drop(graph);
    drop(backend);
    give_back(ends);
    assert_eq!(held(), Held::default());
}

#[test]
fn a_staged_plan_runs_as_ever_before_and_after_its_capture() {
    double::start(2, false);
    let driver = driver();
    let seen = discover::look_at(driver, no_nvml).expect("the double has GPUs");
    let machine = Machine::new(topology(&seen)).expect("well formed");
    let backend = CudaBackend::on(driver, 1).expect("the double has GPUs");
    let config = Config { staging_bytes: 1 << 20, ..Config::default() };
    let context = Context::with_backend(Arc::new(machine), Arc::new(backend), config).expect("a context");
    let bytes = (3 << 20) + 5_u64;
    let [src, dst] = [0, 1].map(|gpu| context.allocate(DeviceId::gpu(gpu), bytes).expect("memory"));
    let transfer = Transfer { dst, dst_device: DeviceId::gpu(1), src, src_device: GPU0, bytes };
    let [one, other] = [(); 2].map(|()| context.create_stream(GPU0).expect("a stream"));
    for engine in [Engine::Stream, Engine::Graph, Engine::Kernel] {
        let plan = context.plan(&[transfer], &PlanOptions { engine: Some(engine), ..PlanOptions::default() }).expect("a plan");
        assert!(plan.staging_bytes() > 0);
        plan.enqueue(other).expect("enqueued");
        node(|node| node.capturing = true);
        assert!(plan.execute(one).expect("captured").is_captured());
        plan.enqueue(one).expect("captured");
        let graph = Captured::end(driver);
        for seed in [5, 6] {
            write(src, bytes as usize, seed);
            plan.execute(other).expect("it comes after nothing that was captured").wait().expect("it runs");
            assert_arrived(dst, bytes as usize, seed);
            write(src, bytes as usize, seed + 2);
            graph.launch();
            assert_arrived(dst, bytes as usize, seed + 2);
        }
    }
    assert_eq!(node(|node| node.captures_broken), 0);
}

#[test]
fn executions_of_one_capture_have_the_same_lanes() {
    double::start(2, true);
    let driver = driver();
    let backend = CudaBackend::on(driver, 1).expect("the double has GPUs");
    let stream = backend.create_stream(GPU0).expect("a stream");
    let ends = foreign();
    let mut program = Program::clone(&through(&[GPU0]));
    program.lanes.push(Lane::new(DeviceId::gpu(1)));
    program.ops[1].lane = LaneId(1);
    program.ops[1].after = smallvec![OpId(0)];
    let program = Arc::new(program);
    let mut streams = Vec::new();
    for _ in 0..3 {
        node(|node| node.capturing = true);
        for _ in 0..4 {
            submit(&backend, &program, ends, stream).expect("captured");
            streams.push(calls("cuStreamCreate"));
        }
        drop(Captured::end(driver));
        submit(&backend, &through(&[]), ends, stream).expect("enqueued");
    }
    assert_eq!(streams, [streams[0]; 12]);
    drop(backend);
    give_back(ends);
    assert_eq!(held(), Held::default());
}

#[test]
fn what_a_graph_cannot_do_is_refused_and_the_capture_goes_on() {
    double::start(2, true);
    let old = without_of(double::whole(), "cuUserObjectCreate");
    let backend = CudaBackend::on(old, 1).expect("the double has GPUs");
    let stream = backend.create_stream(GPU0).expect("a stream");
    let ends = foreign();
    node(|node| node.capturing = true);
    let refused = submit(&backend, &through(&[GPU0]), ends, stream);
    assert!(matches!(&refused, Err(BackendError::NotSupported(why)) if why.contains("install a newer driver")), "{refused:?}");
    let (program, endpoints, rings) = (through(&[]), Arc::from([Endpoints { dst: ends[1], src: ends[0] }]), Arc::from([]));
    let plain = Execution::new(&program, &endpoints, &rings, stream);
    for execution in [Execution { verify: true, ..plain }, Execution { report: Report::Times, ..plain }] {
        assert!(matches!(backend.submit(&execution), Err(BackendError::NotSupported(_))), "{execution:?}");
    }
    backend.submit(&plain).expect("captured");
    let graph = Captured::end(old);
    write(ends[0], BYTES as usize, 1);
    graph.launch();
    assert_arrived(ends[1], BYTES as usize, 1);
    drop((graph, backend));
    give_back(ends);
    assert_eq!(held(), Held::default());
}

#[test]
fn a_staged_capture_that_fails_half_way_leaves_nothing_behind() {
    let functions =
        ["cuMemAlloc", "cuMemHostAlloc", "cuStreamGetCaptureInfo", "cuUserObjectCreate", "cuGraphRetainUserObject", "cuMemcpyAsync"];
    for function in functions {
        double::start(2, true);
        let driver = driver();
        let backend = CudaBackend::on(driver, 1).expect("the double has GPUs");
        let stream = backend.create_stream(GPU0).expect("a stream");
        let ends = foreign();
        node(|node| {
            node.capturing = true;
            node.refusals.insert(function, code::OUT_OF_MEMORY);
        });
        submit(&backend, &through(&[GPU0, DeviceId::HOST]), ends, stream).expect_err(function);
        submit(&backend, &through(&[GPU0, DeviceId::HOST]), ends, stream).expect("the capture goes on");
        drop(Captured::end(driver));
        drop(backend);
        give_back(ends);
        assert_eq!(held(), Held::default(), "{function}");
    }
}
