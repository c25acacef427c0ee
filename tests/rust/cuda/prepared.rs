//! Tests that the first execution of a prepared plan creates no lasting driver objects, and that preparing copies no data. Uses the driver
//! double (simulated CUDA driver).

use super::double::{self, held, node};
use super::driver::Driver;
use super::refusals::{assert_arrived, no_nvml, write};
use super::{Backend, CudaBackend, discover};
use crate::backend::{Endpoints, Execution, PlanState};
use crate::plan::{Copy, Engine, Lane, LaneId, Mechanism, Op, Place, Program};
use crate::topology::discover::topology;
use crate::topology::{DeviceId, Machine};
use mpgpu_contexts::{Config, Context, PlanOptions, Transfer};
use smallvec::smallvec;
use std::sync::Arc;

const GPU0: DeviceId = DeviceId::gpu(0);
const GPU1: DeviceId = DeviceId::gpu(1);
const ENGINES: [Engine; 4] = [Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel];
/// Driver calls that create a lasting object. Events are not listed, because their number is checked directly.
const MAKING: [&str; 8] = [
    "cuDevicePrimaryCtxRetain",
    "cuCtxEnablePeerAccess",
    "cuStreamCreate",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuGraphCreate",
    "cuGraphInstantiateWithFlags",
    "cuIpcOpenMemHandle",
];
/// Driver calls that enqueue work in a stream.
const ENQUEUING: [&str; 7] = [
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
    "cuMemcpyDtoHAsync",
    "cuLaunchKernel",
    "cuGraphLaunch",
    "cuStreamWaitEvent",
    "cuStreamBatchMemOp",
];

fn calls(functions: &[&str]) -> Vec<u32> {
    functions.iter().map(|function| double::calls(function)).collect()
}

/// Returns the number of calls of each function in [`MAKING`], and the number of events that exist.
fn made() -> (Vec<u32>, usize) {
    (calls(&MAKING), held().events)
}

pub(super) fn context(driver: &'static Driver) -> Context {
    context_with(driver, |config| config)
}

/// Creates a context on a driver double with a configuration that `change` has modified.
pub(super) fn context_with(driver: &'static Driver, change: impl FnOnce(Config) -> Config) -> Context {
    let seen = discover::look_at(driver, no_nvml).expect("the double has GPUs");
    let machine = Machine::new(topology(&seen)).expect("well formed");
    let backend = CudaBackend::on(driver, 1).expect("the double has GPUs");
    let config = Config { staging_bytes: 1 << 20, check_peers: false, ..Config::default() };
    Context::with_backend(Arc::new(machine), Arc::new(backend), change(config)).expect("a context")
}

/// Creates plans of transfers in both directions and from host memory, and executes each plan twice. Returns the number of objects that the
/// first executions created.
fn made_by_executions(engine: Engine, peers: bool, bytes: u64, is_prepared: bool) -> u32 {
    double::start(2, peers);
    let context = context(double::whole());
    let from = [GPU0, GPU1, DeviceId::HOST].map(|device| context.allocate(device, bytes).expect("memory"));
    let to = [GPU1, GPU0, GPU1].map(|device| context.allocate(device, bytes).expect("memory"));
    let transfer = |(dst, src)| Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes };
    let transfers: Vec<Transfer> = to.into_iter().zip(from).map(transfer).collect();
    let options = PlanOptions { engine: Some(engine), adapt: Some(false), ..PlanOptions::default() };
    let plan = context.plan(&transfers, &options).expect("a plan");
    let stream = context.create_stream(GPU0).expect("a stream");
    for (seed, (src, dst)) in from.into_iter().zip(to).enumerate() {
        write(src, bytes as usize, seed);
        write(dst, bytes as usize, 100);
    }
    if is_prepared {
        let enqueued = calls(&ENQUEUING);
        plan.prepare(stream).expect("prepared");
        assert_eq!(calls(&ENQUEUING), enqueued, "something was enqueued");
        to.into_iter().for_each(|dst| assert_arrived(dst, bytes as usize, 100));
        let first = made();
        plan.prepare(stream).expect("prepared");
        assert_eq!(made(), first, "made twice");
    }
    let before = made();
    let first = plan.execute(stream).expect("enqueued");
    let after = made();
    let second = plan.execute(stream).expect("enqueued");
    first.wait().expect("it runs");
    second.wait().expect("it runs");
    to.into_iter().enumerate().for_each(|(seed, dst)| assert_arrived(dst, bytes as usize, seed));
    if is_prepared {
        assert_eq!(made(), before, "{engine:?}, {bytes} bytes, peers {peers}: {MAKING:?} and events");
    }
    let of_calls: u32 = after.0.iter().zip(&before.0).map(|(after, before)| after - before).sum();
    of_calls + (after.1 - before.1) as u32
}

#[test]
fn the_first_execution_of_a_prepared_plan_makes_nothing() {
    for engine in ENGINES {
        let mut unprepared = 0;
        for (peers, bytes) in [(true, 257), (false, 257), (true, (3 << 20) + 5), (false, (3 << 20) + 5)] {
            unprepared += made_by_executions(engine, peers, bytes, false);
            assert_eq!(made_by_executions(engine, peers, bytes, true), 0);
        }
        assert!(unprepared > 0, "{engine:?}: executions make nothing, so there is nothing to prepare");
    }
}

#[test]
fn preparing_opens_memory_of_another_process_through_the_gpus_that_work_on_it() {
    const BYTES: u64 = 10_000;
    double::start(2, true);
    let backend = CudaBackend::on(double::driver(), 1).expect("the double has GPUs");
    let src = backend.allocate(GPU0, BYTES).expect("memory");
    let theirs = node(|node| node.give_shareable(BYTES as usize, 1)).expect("memory");
    let allocation = backend.locate(theirs).expect("an answer").expect("known");
    let shared = backend.export(&allocation).expect("shared");
    let ours = backend.map(shared, &allocation).expect("opened");
    let half = |lane: u32| {
        let offset = BYTES / 2 * u64::from(lane);
        let copy = Copy { from: Place::Source { transfer: 0, offset }, to: Place::Destination { transfer: 0, offset }, bytes: BYTES / 2 };
        Op { lane: LaneId(lane), mechanism: Mechanism::Copy, copies: smallvec![copy], after: smallvec![] }
    };
    let lanes = vec![Lane::new(GPU0), Lane::new(GPU1)];
    let program = Arc::new(Program { sources: Vec::new(), transfers: vec![BYTES], lanes, rings: vec![], ops: vec![half(0), half(1)] });
    let (endpoints, rings): (Arc<[Endpoints]>, Arc<[u64]>) = (Arc::new([Endpoints { dst: ours, src }]), Arc::new([]));
    let (stream, state) = (backend.create_stream(GPU0).expect("a stream"), PlanState::default());
    let execution = Execution { state: Some(&state), ..Execution::new(&program, &endpoints, &rings, stream) };
    assert_eq!(double::calls("cuIpcOpenMemHandle"), 1);
    backend.prepare(&execution).expect("prepared");
    assert_eq!(double::calls("cuIpcOpenMemHandle"), 2, "through each of both GPUs");
    let before = made();
    write(src, BYTES as usize, 3);
    backend.submit(&execution).expect("enqueued").expect("a completion").wait().expect("it runs");
    assert_arrived(theirs, BYTES as usize, 3);
    assert_eq!((made(), node(|node| node.strangers)), (before, 0));
}

#[test]
fn preparing_for_a_captured_stream_makes_no_graph_and_leaves_the_capture_as_it_is() {
    double::start(2, false);
    let driver = double::whole();
    let context = context(driver);
    let bytes = (3 << 20) + 5;
    let [src, dst] = [GPU0, GPU1].map(|gpu| context.allocate(gpu, bytes).expect("memory"));
    let transfer = Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes };
    let options = PlanOptions { engine: Some(Engine::Graph), ..PlanOptions::default() };
    let plan = context.plan(&[transfer], &options).expect("a plan");
    let stream = context.create_stream(GPU0).expect("a stream");
    node(|node| node.capturing = true);
    plan.prepare(stream).expect("prepared");
    assert!(double::captured().is_null(), "something was captured");
    assert_eq!((double::calls("cuGraphInstantiateWithFlags"), node(|node| node.captures_broken)), (0, 0));
    node(|node| node.capturing = true);
    let before = double::calls("cuStreamCreate");
    assert!(plan.execute(stream).expect("captured").is_captured());
    assert_eq!((double::calls("cuStreamCreate"), node(|node| node.captures_broken)), (before, 0));
    // SAFETY: a graph of the double.
    assert_eq!(unsafe { (driver.cuGraphDestroy)(double::captured()) }, 0);
}

#[test]
fn a_plan_that_cannot_be_executed_cannot_be_prepared_either() {
    double::start(2, true);
    let context = context(double::whole());
    let [src, dst] = [GPU0, GPU1].map(|gpu| context.allocate(gpu, 4096).expect("memory"));
    let transfer = Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes: 4096 };
    let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
    let stream = context.create_stream(GPU0).expect("a stream");
    context.destroy_stream(stream).expect("destroyed");
    plan.prepare(stream).expect_err("the stream is gone");
    let stream = context.create_stream(GPU1).expect("a stream");
    plan.prepare(stream).expect("prepared");
    context.free(src).expect("freed");
    let refused = plan.prepare(stream).expect_err("the memory is gone").to_string();
    assert!(refused.contains("transfer 0") && refused.contains("freed"), "{refused}");
}
