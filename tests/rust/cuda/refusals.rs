//! Tests the backend if the driver, the hardware or NVML lacks or refuses a function. Either the error states the cause, or the backend
//! uses an alternative and all copies are correct. The context must stay usable. Uses the driver double (simulated CUDA driver).

use super::double::{self, calls, node};
use super::driver::{Code, Driver, code};
use super::{CudaBackend, discover};
use crate::backend::{Backend, BackendError, Endpoints, Execution, LostPeer, MemoryKind, Report, Signal, SignalWait, StreamHandle};
use crate::plan::{self, Copy, Engine, Lane, LaneId, Mechanism, Op, Place, Program};
use crate::topology::discover::topology;
use crate::topology::{DeviceId, Machine, Topology, preset};
use mpgpu_contexts::{Config, Context, End, Error, PlanOptions, Transfer};
use nvml_wrapper::Nvml;
use smallvec::smallvec;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

const GPU0: DeviceId = DeviceId::gpu(0);
const GPU1: DeviceId = DeviceId::gpu(1);
const HOST1: DeviceId = DeviceId::host(1);

fn backend(driver: &'static Driver) -> CudaBackend {
    CudaBackend::on(driver, 2).expect("the double has GPUs")
}

/// Simulates a machine without NVML.
pub(super) fn no_nvml() -> Result<Nvml, nvml_wrapper::error::NvmlError> {
    Nvml::builder().lib_path("libmpgpu-no-such-library.so".as_ref()).init()
}

/// Creates a context whose topology is discovered from the double.
fn context() -> Context {
    context_on(double::driver())
}

fn context_on(driver: &'static Driver) -> Context {
    let seen = discover::look_at(driver, no_nvml).expect("the double has GPUs");
    context_of(driver, topology(&seen))
}

fn context_of(driver: &'static Driver, topology: Topology) -> Context {
    configured(driver, topology, Config { staging_bytes: 16 << 20, ..Config::default() })
}

/// Creates a context that does not test copies between GPUs, so that all driver calls are those of plans.
fn context_without_trials() -> Context {
    let seen = discover::look_at(double::driver(), no_nvml).expect("the double has GPUs");
    let config = Config { staging_bytes: 16 << 20, check_peers: false, ..Config::default() };
    configured(double::driver(), topology(&seen), config)
}

fn configured(driver: &'static Driver, topology: Topology, config: Config) -> Context {
    let machine = Machine::new(topology).expect("well formed");
    Context::with_backend(Arc::new(machine), Arc::new(backend(driver)), config).expect("a context")
}

/// Fills memory of the double with a pattern. Such memory is host memory.
pub(super) fn write(address: u64, bytes: usize, seed: usize) {
    for at in 0..bytes {
        // SAFETY: an allocation of the double of at least this size, used only by this thread.
        unsafe { with_exposed_provenance_mut::<u8>(address as usize + at).write((at * 31 + seed) as u8) };
    }
}

#[track_caller]
pub(super) fn assert_arrived(address: u64, bytes: usize, seed: usize) {
    for at in 0..bytes {
        // SAFETY: as above.
        let found = unsafe { with_exposed_provenance::<u8>(address as usize + at).read() };
        assert_eq!(found, (at * 31 + seed) as u8, "byte {at} of {bytes}");
    }
}

/// Returns a program that copies one transfer in `pieces` pieces: in one operation, or, if the mechanism is plain copies, in one operation
/// for each piece.
fn in_pieces(mechanism: Mechanism, bytes: u64, pieces: u64) -> Arc<Program> {
    let copies = (0..pieces).map(|piece| {
        let (offset, end) = (bytes * piece / pieces, bytes * (piece + 1) / pieces);
        Copy { from: Place::Source { transfer: 0, offset }, to: Place::Destination { transfer: 0, offset }, bytes: end - offset }
    });
    let op = |copies| Op { lane: LaneId(0), mechanism, copies, after: smallvec![] };
    let ops = if mechanism == Mechanism::Copy { copies.map(|copy| op(smallvec![copy])).collect() } else { vec![op(copies.collect())] };
    let program = Program { sources: Vec::new(), transfers: vec![bytes], lanes: vec![Lane::new(GPU0)], rings: vec![], ops };
    plan::validate(&program, 0).expect("a valid program");
    Arc::new(program)
}

/// Executes a program from GPU 0 to GPU 1 and checks all bytes.
fn run(backend: &CudaBackend, program: &Arc<Program>, engine: Engine) {
    let bytes = program.transfers[0];
    let [src, dst] = [GPU0, GPU1].map(|device| backend.allocate(device, bytes).expect("memory"));
    write(src, bytes as usize, 7);
    let stream = backend.create_stream(GPU0).expect("a stream");
    let (endpoints, rings): (Arc<[Endpoints]>, Arc<[u64]>) = (Arc::new([Endpoints { dst, src }]), Arc::new([]));
    let execution = Execution { engine, ..Execution::new(program, &endpoints, &rings, stream) };
    backend.submit(&execution).expect("enqueued").expect("a completion").wait().expect("it runs");
    assert_arrived(dst, bytes as usize, 7);
}

/// Makes the next call of a driver function fail with this code.
fn refuse(function: &'static str, code: Code) {
    node(|node| node.refusals.insert(function, code));
}

#[test]
fn without_batched_copies_a_batch_is_plain_copies() {
    double::start(2, true);
    let program = in_pieces(Mechanism::Batch, 100_003, 5);
    let new = backend(double::driver());
    assert!(new.has_batched_copy());
    run(&new, &program, Engine::Auto);
    assert_eq!((calls("cuMemcpyBatchAsync"), calls("cuMemcpyAsync")), (1, 0));
    // The driver has the function, but returns that it is not supported here.
    const NOT_SUPPORTED: Code = 801;
    refuse("cuMemcpyBatchAsync", NOT_SUPPORTED);
    run(&new, &program, Engine::Auto);
    assert_eq!((calls("cuMemcpyBatchAsync"), calls("cuMemcpyAsync")), (1, 5));
    let old = backend(double::without_batch());
    assert!(!old.has_batched_copy());
    run(&old, &program, Engine::Batch);
    assert_eq!((calls("cuMemcpyBatchAsync"), calls("cuMemcpyAsync")), (1, 10));
}

#[test]
fn without_graph_instantiation_the_graph_engine_runs_on_streams() {
    double::start(2, true);
    let backend = backend(double::driver());
    run(&backend, &in_pieces(Mechanism::Copy, 70_001, 3), Engine::Graph);
    assert_eq!(calls("cuMemcpyAsync"), 3);
    assert_eq!(backend.graph_statistics(), Default::default());
}

#[test]
fn a_capture_is_asked_for_nothing_that_would_end_it() {
    double::start(2, true);
    let backend = backend(double::driver());
    let program = &in_pieces(Mechanism::Copy, 70_001, 3);
    let [src, dst] = [GPU0, GPU1].map(|device| backend.allocate(device, 70_001).expect("memory"));
    let (endpoints, rings): (Arc<[Endpoints]>, Arc<[u64]>) = (Arc::new([Endpoints { dst, src }]), Arc::new([]));
    let stream = backend.create_stream(GPU0).expect("a stream");
    let execution = Execution { engine: Engine::Graph, ..Execution::new(program, &endpoints, &rings, stream) };
    let unreported = Execution { report: Report::Nothing, ..execution };
    // The driver is asked for the number of the stream, with captures before and after.
    for capturing in [false, true, false, true] {
        node(|node| node.capturing = capturing);
        let end = backend.submit(&execution).expect("enqueued").expect("a completion");
        assert_eq!(end.wait().is_err(), capturing, "what was captured has not run");
        assert!(backend.submit(&unreported).expect("enqueued").is_none());
    }
    let lost = LostPeer::of(4711, None);
    let counters = backend.allocate_shared(DeviceId::HOST, 8).expect("memory");
    let allocation = backend.locate(counters).expect("an answer").expect("known");
    backend.stream_wait_signals(stream, &[Signal { counter: counters, value: 1 }], SignalWait::Operation).expect("captured");
    backend.fail_waits(&allocation, None, lost);
    backend.submit(&execution).expect("enqueued");
    assert_eq!(node(|node| node.captures_broken), 0);
}

#[test]
fn where_the_kernel_does_not_load_segments_are_plain_copies() {
    double::start(2, true);
    let backend = backend(double::driver());
    assert!(!backend.has_copy_kernel(0).expect("an answer"));
    run(&backend, &in_pieces(Mechanism::Kernel, 50_000, 4), Engine::Kernel);
    assert_eq!(calls("cuMemcpyAsync"), 4);
}

#[test]
fn gpus_without_peer_access_are_joined_by_staging_in_host_memory_alone() {
    double::start(2, false);
    let context = context();
    let bytes = (3 << 20) + 5_u64;
    let [src, dst] = [GPU0, GPU1].map(|device| context.allocate(device, bytes).expect("memory"));
    write(src, bytes as usize, 3);
    let transfer = Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes };
    let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
    let paths = &plan.planned().transfers[0].paths;
    assert!(plan.staging_bytes() > 0 && paths.len() == 1 && plan.describe().contains("via host0"), "{}", plan.describe());
    plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
    assert_arrived(dst, bytes as usize, 3);
    assert_eq!(calls("cuCtxEnablePeerAccess"), 0);
    // Without the host path there is no path at all, and the error states this.
    let refused = context.plan(&[transfer], &PlanOptions { host_path: Some(false), ..PlanOptions::default() }).map(drop);
    assert!(matches!(refused, Err(Error::Plan(_))), "{refused:?}");
    plan.execute(StreamHandle(0)).expect("the context is usable").wait().expect("it runs");
}

#[test]
fn executions_that_share_staging_wait_for_each_other_unless_their_stream_orders_them_anyway() {
    double::start(2, false);
    let waits_in_turn = |driver: &'static Driver| {
        let context = context_on(driver);
        let bytes = 3 << 20;
        let [src, dst] = [GPU0, GPU1].map(|device| context.allocate(device, bytes).expect("memory"));
        let transfer = Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes };
        let options = PlanOptions { engine: Some(Engine::Graph), adapt: Some(false), ..PlanOptions::default() };
        let plan = context.plan(&[transfer], &options).expect("a plan");
        assert!(plan.staging_bytes() > 0);
        // The first execution has no predecessor. The second has none either, because adding the first entry to the table of users removes
        // completed executions, and all work of the double completes immediately.
        let [one, other] = [(); 2].map(|()| context.create_stream(GPU0).expect("a stream"));
        let counts = [one, one, one, other, StreamHandle(0), StreamHandle(0)].map(|stream| {
            let before = calls("cuStreamWaitEvent");
            plan.execute(stream).map(drop).expect("enqueued");
            calls("cuStreamWaitEvent") - before
        });
        counts.map(|waits| waits - counts[0])
    };
    // The handle of the default stream stands for several streams.
    assert_eq!(waits_in_turn(double::driver()), [0, 0, 0, 1, 1, 1]);
    let old = double::without("cuStreamGetId");
    assert_eq!(waits_in_turn(old), [0, 0, 1, 1, 1, 1]);
}

#[test]
fn a_failing_access_between_gpus_is_named_and_tried_again() {
    double::start(2, true);
    let context = context_without_trials();
    let [src, dst] = [GPU0, GPU1].map(|device| context.allocate(device, 4096).expect("memory"));
    write(src, 4096, 1);
    let plan =
        context.plan(&[Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes: 4096 }], &PlanOptions::default()).expect("a plan");
    const TOO_MANY_PEERS: Code = 711;
    refuse("cuCtxEnablePeerAccess", TOO_MANY_PEERS);
    let refused = plan.execute(StreamHandle(0)).map(drop);
    let named =
        |error: &Error| matches!(error, Error::Backend(BackendError::Driver { what, code: 711, .. }) if what == "cuCtxEnablePeerAccess");
    assert!(refused.as_ref().is_err_and(named), "{refused:?}");
    plan.execute(StreamHandle(0)).expect("the context is usable").wait().expect("it runs");
    assert_arrived(dst, 4096, 1);
}

#[test]
fn without_nvml_links_are_assumed_and_the_topology_says_so() {
    double::start(4, true);
    assert!(no_nvml().is_err());
    let seen = discover::look_at(double::driver(), no_nvml).expect("the double has GPUs");
    assert_eq!((seen.gpus.len(), seen.peers.len()), (4, 12));
    assert!(seen.gpus.iter().all(|gpu| gpu.nvlinks.is_none() && gpu.pcie.is_none()));
    let topology = topology(&seen);
    assert!(topology.description.contains("assumed: NVSwitch"), "{}", topology.description);
    assert!(topology.description.contains("PCIe links by the GPUs' generation"), "{}", topology.description);
    Machine::new(topology).expect("well formed");
}

#[test]
fn a_driver_without_gpus_is_no_driver() {
    double::start(0, true);
    const NO_DEVICE: Code = 100;
    for refusal in [None, Some(NO_DEVICE)] {
        if let Some(code) = refusal {
            refuse("cuDeviceGetCount", code);
        }
        let refused = CudaBackend::on(double::driver(), 1).map(drop);
        assert!(matches!(&refused, Err(BackendError::NoDriver(why)) if why.contains("CUDA_VISIBLE_DEVICES")), "{refused:?}");
    }
}

#[test]
fn large_host_memory_is_in_pages_of_our_own_and_small_is_the_drivers() {
    double::start(1, true);
    let backend = backend(double::driver());
    let bytes = (9 << 20) + 1_u64;
    let large = backend.allocate(HOST1, bytes).expect("memory");
    let small = backend.allocate(DeviceId::HOST, 4096).expect("memory");
    assert_eq!((calls("cuMemHostRegister"), calls("cuMemHostAlloc")), (1, 1));
    // The driver reports neither range nor number of registered memory.
    let found = backend.locate(large + bytes - 1).expect("an answer").expect("known");
    assert_eq!((found.base, found.bytes, found.device, found.kind), (large, bytes, HOST1, MemoryKind::Pinned));
    let other = backend.locate(small + 4095).expect("an answer").expect("known");
    assert_eq!((other.base, other.bytes, other.device, other.kind), (small, 4096, DeviceId::HOST, MemoryKind::Pinned));
    assert_eq!((backend.allocated_bytes(HOST1), backend.allocated_bytes(DeviceId::HOST)), (bytes, 4096));
    backend.free(large).expect("freed");
    assert_eq!((calls("cuMemHostUnregister"), backend.allocated_bytes(HOST1)), (1, 0));
    assert_eq!(backend.locate(large).expect("an answer"), None);
    assert!(matches!(backend.free(large), Err(BackendError::InvalidPointer(address)) if address == large));
    // An allocation at the same address is still another allocation.
    let again = backend.allocate(HOST1, bytes).expect("memory");
    let id = backend.locate(again).expect("an answer").expect("known").id;
    assert!(id != found.id && id != other.id && other.id != found.id);
    // The backend releases the rest, in the driver and in the system.
    drop(backend);
    assert_eq!((calls("cuMemHostUnregister"), calls("cuMemFreeHost")), (2, 1));
    assert_eq!(node(|node| node.memory.len()), 0);
}

#[test]
fn host_memory_is_shared_where_it_was_allocated_for_that_and_refused_with_the_remedy_elsewhere() {
    const SPREAD: u64 = 4 << 20;
    double::start(1, true);
    let backend = backend(double::driver());
    for bytes in [8, 4096, SPREAD - 1, SPREAD, SPREAD + 1] {
        let own = backend.allocate(DeviceId::HOST, bytes).expect("memory");
        let known = backend.locate(own).expect("an answer").expect("known");
        for refused in [backend.export(&known).map(drop), backend.read_signal(own).map(drop)] {
            assert!(
                matches!(&refused, Err(BackendError::NotSupported(why)) if why.contains("shared between processes")),
                "{bytes}: {refused:?}"
            );
        }
        let counter = backend.allocate_shared(DeviceId::HOST, bytes).expect("memory");
        let known = backend.locate(counter).expect("an answer").expect("known");
        assert_eq!((known.bytes, known.kind), (bytes, MemoryKind::Pinned));
        assert!(backend.export(&known).is_ok_and(|shared| shared.descriptor.is_some()), "{bytes}");
        assert_eq!(backend.read_signal(counter).expect("a place for signals"), 0);
        [own, counter].into_iter().for_each(|address| backend.free(address).expect("freed"));
    }
    // Memory that the driver does not pin cannot be shared, and the error states this.
    refuse("cuMemHostRegister", code::OUT_OF_MEMORY);
    let error = backend.allocate_shared(DeviceId::HOST, 64).expect_err("memory that cannot be shared");
    assert!(error.to_string().contains("cuMemHostRegister"), "{error}");
}

#[test]
fn registered_memory_that_the_driver_does_not_number_is_an_end_of_plans() {
    double::start(4, true);
    let context = context();
    let bytes = 64 << 20;
    let mut own = vec![0_u8; bytes + 1];
    let address = own.as_mut_ptr() as u64;
    node(|node| node.insert(address, own.len(), None, true));
    let dst = context.allocate(GPU0, bytes as u64).expect("memory");
    write(address + 1, bytes, 2);
    let transfer = Transfer { dst, dst_device: GPU0, src: address + 1, src_device: DeviceId::HOST, bytes: bytes as u64 };
    let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
    assert!(plan.paths() > 1, "pinned memory takes several paths: {}", plan.describe());
    // Memory of another plan is freed. This plan therefore checks its own memory again.
    let other = context.allocate(GPU0, 64).expect("memory");
    context.free(other).expect("freed");
    plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
    assert_arrived(dst, bytes, 2);
}

#[test]
fn where_pages_cannot_be_registered_the_driver_allocates() {
    double::start(1, true);
    let backend = backend(double::driver());
    refuse("cuMemHostRegister", code::OUT_OF_MEMORY);
    let address = backend.allocate(DeviceId::HOST, 5 << 20).expect("memory all the same");
    assert_eq!((calls("cuMemHostRegister"), calls("cuMemHostAlloc")), (0, 1));
    let found = backend.locate(address).expect("an answer").expect("known");
    assert_eq!((found.base, found.bytes, found.kind), (address, 5 << 20, MemoryKind::Pinned));
    backend.free(address).expect("freed");
    assert_eq!((calls("cuMemFreeHost"), node(|node| node.memory.len())), (1, 0));
}

#[test]
fn a_failing_allocation_names_device_and_size_and_leaves_the_context_usable() {
    double::start(4, true);
    let context = context_without_trials();
    let refused = |result: Result<u64, Error>, on: DeviceId, size: u64| {
        assert!(
            matches!(&result, Err(Error::Backend(BackendError::OutOfMemory { device, bytes })) if (*device, *bytes) == (on.0, size)),
            "{result:?}"
        );
    };
    for device in [GPU1, DeviceId::HOST] {
        refused(context.allocate(device, 1 << 50), device, 1 << 50);
    }
    refuse("cuMemHostRegister", code::OUT_OF_MEMORY);
    refuse("cuMemHostAlloc", code::OUT_OF_MEMORY);
    refused(context.allocate(DeviceId::HOST, 64), DeviceId::HOST, 64);
    // An error that has nothing to do with memory keeps its name.
    refuse("cuMemAlloc", 999);
    let failed = context.allocate(GPU0, 64);
    assert!(matches!(&failed, Err(Error::Backend(BackendError::Driver { what, code: 999, .. })) if what == "cuMemAlloc"), "{failed:?}");
    // If staging memory is not available, the plan fails, but the context stays usable.
    let bytes = 64 << 20;
    let [src, dst] = [DeviceId::HOST, GPU0].map(|device| context.allocate(device, bytes).expect("memory"));
    let transfer = Transfer { dst, dst_device: GPU0, src, src_device: DeviceId::HOST, bytes };
    refuse("cuMemAlloc", code::OUT_OF_MEMORY);
    let failed = context.plan(&[transfer], &PlanOptions::default()).map(drop);
    assert!(matches!(&failed, Err(Error::Backend(BackendError::OutOfMemory { device: 1.., .. }))), "{failed:?}");
    let plan = context.plan(&[transfer], &PlanOptions::default()).expect("memory is back");
    assert!(plan.paths() > 1, "{}", plan.describe());
    write(src, bytes as usize, 9);
    plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
    assert_arrived(dst, bytes as usize, 9);
}

#[test]
fn a_backend_that_was_only_looked_at_makes_no_context_also_when_it_goes() {
    double::start(2, true);
    let context = context();
    assert!(context.machine().gpu_count() == 2 && !context.describe().is_empty());
    drop(context);
    assert_eq!(calls("cuDevicePrimaryCtxRetain"), 0);
}

#[test]
fn the_device_of_foreign_memory_is_found_though_no_context_is_current_or_in_use() {
    double::start(4, true);
    let context = context();
    let bytes = 10_000;
    let foreign = node(|node| node.give(bytes, Some(2))).expect("memory");
    let mut own = vec![0_u8; bytes];
    write(foreign, bytes, 4);
    let transfer = |dst, src| Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes: bytes as u64 };
    let plan = context.plan(&[transfer(own.as_mut_ptr() as u64, foreign)], &PlanOptions::default()).expect("a plan");
    assert!(plan.describe().contains("gpu2 to host0"), "{}", plan.describe());
    assert_eq!(calls("cuDevicePrimaryCtxRetain"), 1, "only the GPU that has the memory gets used");
    plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
    assert_arrived(own.as_ptr() as u64, bytes, 4);
    // A device that contradicts the address is refused, whether or not the device of the other end is inferred.
    let wrong = Transfer { src_device: GPU1, ..transfer(own.as_mut_ptr() as u64, foreign) };
    let refused = context.plan(&[wrong], &PlanOptions::default()).map(drop);
    assert!(matches!(&refused, Err(Error::WrongDevice { device: 1, actual: 2, .. })), "{refused:?}");
    // After the memory is freed, the address is unknown.
    assert_eq!(node(|node| node.take(foreign, true)), 0);
    let named = Transfer { src_device: DeviceId::gpu(2), ..transfer(own.as_mut_ptr() as u64, foreign) };
    let refused = context.plan(&[named], &PlanOptions::default()).map(drop);
    assert!(matches!(&refused, Err(Error::NotDeviceMemory { device: 2, .. })), "{refused:?}");
}

/// Returns transfers of `bytes` bytes between GPUs 0 and 1 in both directions.
fn both_ways(src: [u64; 2], dst: [u64; 2], bytes: usize) -> [Transfer; 2] {
    [(0, 1), (1, 0)].map(|(from, to)| Transfer {
        dst: dst[to],
        dst_device: Transfer::AUTO,
        src: src[from],
        src_device: Transfer::AUTO,
        bytes: bytes as u64,
    })
}

#[test]
fn where_no_gpu_may_enter_all_memory_of_a_plan_each_copy_is_made_by_one_that_may_enter_its_ends() {
    let engines = [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel];
    let cases = [(2, 4099), (2, 40 << 20), (4, 9 << 20), (8, 4099), (8, 5 << 20)];
    for (gpus, bytes, engine) in cases.iter().flat_map(|&(gpus, bytes)| engines.map(|engine| (gpus, bytes, engine))) {
        double::start(gpus, true);
        // The double with fewer GPUs has no NVLink. Small copies in both directions are one kernel only over NVLink.
        let has_nvlink = gpus == 8;
        let context = if has_nvlink { context_of(double::driver(), preset("hgx-h200").expect("a preset")) } else { context() };
        let closed = [0, 1].map(|gpu| {
            let pool = node(|node| node.new_pool(gpu, false));
            node(|node| node.give_from(pool, bytes)).expect("memory")
        });
        let open = [GPU0, GPU1].map(|gpu| context.allocate(gpu, bytes as u64).expect("memory"));
        for (src, dst) in [(closed, open), (open, closed)] {
            [3, 8].into_iter().zip(src).for_each(|(seed, src)| write(src, bytes, seed));
            let options = PlanOptions { engine: Some(engine), ..PlanOptions::default() };
            let plan = context.plan(&both_ways(src, dst, bytes), &options).expect("a plan");
            if has_nvlink && bytes < 1 << 20 && [Engine::Auto, Engine::Kernel].contains(&engine) {
                let described = plan.describe();
                assert!(described.contains("1 operation on 1 lane") && described.contains("fused kernel"), "{described}");
            }
            for gpu in 0..gpus as u32 {
                let stream = context.create_stream(DeviceId::gpu(gpu)).expect("a stream");
                dst.into_iter().for_each(|dst| write(dst, bytes, 100));
                let run = plan.execute(stream).and_then(|run| Ok(run.wait()?));
                run.unwrap_or_else(|error| panic!("{bytes} bytes, {engine:?}, stream of GPU {gpu}: {error}\n{}", plan.describe()));
                assert_arrived(dst[1], bytes, 3);
                assert_arrived(dst[0], bytes, 8);
            }
        }
    }
}

#[test]
fn a_copy_whose_ends_no_gpu_may_enter_is_refused_with_the_remedy_and_taken_after_it() {
    double::start(2, true);
    let context = context_without_trials();
    let bytes = 5000;
    let pools = [0, 1].map(|gpu| node(|node| node.new_pool(gpu, false)));
    let [src, dst, spare] = [(); 3].map(|()| pools.map(|pool| node(|node| node.give_from(pool, bytes)).expect("memory")));
    write(src[0], bytes, 3);
    write(src[1], bytes, 8);
    let stream = context.create_stream(GPU0).expect("a stream");
    // Two of the transfers stay inside their pool, which is possible.
    let [forth, back] = both_ways(src, dst, bytes);
    let transfers = [Transfer { dst: spare[0], ..forth }, forth, Transfer { dst: spare[1], ..back }, back];
    let run = || context.plan(&transfers, &PlanOptions::default())?.execute(stream)?.wait().map_err(Error::from);
    let refused = run().expect_err("nobody may copy two of them").to_string();
    let names = |from: usize, to: usize| refused.contains(&format!("{:#x} and {:#x}", src[from], dst[to]));
    assert!((names(0, 1) || names(1, 0)) && refused.contains("cudaMemPoolSetAccess"), "{refused}");
    assert_eq!(calls("cuMemcpyAsync") + calls("cuMemcpyBatchAsync"), 0, "half of it was done");
    node(|node| node.pools.get_mut(&pools[1]).expect("a pool").access.push(0));
    run().expect("GPU 0 may enter all");
    [(spare[0], 3), (dst[1], 3), (spare[1], 8), (dst[0], 8)].into_iter().for_each(|(address, seed)| assert_arrived(address, bytes, seed));
}

#[test]
fn of_memory_mapped_from_several_chunks_one_chunk_is_shared_and_more_refused_with_the_remedy() {
    double::start(2, true);
    let backend = backend(double::driver());
    let base = node(|node| node.give(3 << 20, Some(1))).expect("memory");
    node(|node| node.chunk = Some(1 << 20));
    let whole = backend.locate(base + 5).expect("an answer").expect("known");
    assert_eq!((whole.base, whole.bytes), (base, 3 << 20), "an end of plans is the whole range");
    let second = backend.exportable(base + (1 << 20) + 5, 100).expect("in one chunk").expect("known");
    assert_eq!((second.base, second.bytes, second.device), (base + (1 << 20), 1 << 20, GPU1));
    for (at, bytes) in [(0, 3 << 20), (0, (1 << 20) + 1), ((2 << 20) - 1, 2)] {
        let refused = backend.exportable(base + at, bytes);
        let says = |why: &str| ["several chunks", "export each chunk", "cudaMalloc or mpgpu"].iter().all(|part| why.contains(part));
        assert!(matches!(&refused, Err(BackendError::NotSupported(why)) if says(why)), "{refused:?}");
    }
    node(|node| node.chunk = Some(3 << 20));
    assert_eq!(backend.exportable(base, 3 << 20).expect("one chunk"), Some(whole));
    assert_eq!(node(|node| node.take(base, true)), 0);
}

#[test]
fn memory_that_another_library_frees_under_a_plan_is_refused_by_every_engine_and_named() {
    for (engine, at_source) in
        [Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel].into_iter().flat_map(|e| [(e, true), (e, false)])
    {
        for (gpu, warm) in [(Some(1), false), (Some(1), true), (None, false), (None, true)] {
            double::start(2, true);
            let context = context_on(double::whole());
            let bytes = 5000;
            let foreign = node(|node| node.give(bytes, gpu)).expect("memory");
            let [src, dst, other] = [GPU0, GPU1, GPU0].map(|device| context.allocate(device, bytes as u64).expect("memory"));
            let transfer = |dst, src| Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes: bytes as u64 };
            let good = transfer(dst, src);
            let bad = if at_source { transfer(other, foreign) } else { transfer(foreign, src) };
            let options = PlanOptions { engine: Some(engine), ..PlanOptions::default() };
            let plan = context.plan(&[good, bad], &options).expect("a plan");
            let stream = context.create_stream(GPU0).expect("a stream");
            if warm {
                plan.execute(stream).expect("enqueued").wait().expect("it runs");
            }
            let done = || ["cuGraphLaunch", "cuLaunchKernel", "cuMemcpyBatchAsync", "cuMemcpyAsync"].map(calls);
            let before = done();
            assert_eq!(node(|node| node.take(foreign, gpu.is_some())), 0);
            let end = if at_source { End::Source } else { End::Destination };
            let is_named =
                |error: &Error| matches!(error, Error::MemoryFreed { transfer: 1, end: e, address } if *e == end && *address == foreign);
            for refused in [plan.execute(stream).map(drop), plan.enqueue(stream), plan.trace(stream).map(drop)] {
                assert!(refused.as_ref().is_err_and(is_named), "{engine:?} {end} {gpu:?} {warm}: {refused:?}");
            }
            assert!(done()[..3] == before[..3], "{engine:?} {end} {gpu:?} {warm}: the driver was given what it does not check");
            write(src, bytes, 3);
            context.plan(&[good], &options).expect("a plan").execute(stream).expect("enqueued").wait().expect("it runs");
            assert_arrived(dst, bytes, 3);
        }
    }
}

#[test]
fn memory_that_is_freed_under_a_copy_of_ordinary_host_memory_is_named_too() {
    for at_source in [true, false] {
        double::start(1, true);
        let context = context_on(double::whole());
        let mut ordinary = [7_u8; 5000];
        let foreign = node(|node| node.give(ordinary.len(), Some(0))).expect("memory");
        let own = ordinary.as_mut_ptr().expose_provenance() as u64;
        let (dst, src) = if at_source { (own, foreign) } else { (foreign, own) };
        let transfer = Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes: ordinary.len() as u64 };
        let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
        assert_eq!(node(|node| node.take(foreign, true)), 0);
        let copies = calls("cuMemcpyAsync");
        let refused = plan.execute(StreamHandle(0)).map(drop);
        assert!(matches!(refused, Err(Error::MemoryFreed { address, .. }) if address == foreign), "{refused:?}");
        assert_eq!(calls("cuMemcpyAsync"), copies, "the driver does not survive this copy");
    }
}

/// Exports an allocation and maps it in another backend, as another process would.
pub(super) fn cross(from: &CudaBackend, to: &CudaBackend, address: u64) -> Result<u64, BackendError> {
    let allocation = from.locate(address)?.expect("known memory");
    to.map(from.export(&allocation)?, &allocation)
}

#[test]
fn memory_of_a_pool_is_mapped_through_one_imported_pool_which_goes_with_the_last() {
    double::start(2, true);
    let [exporter, importer] = [(); 2].map(|()| backend(double::driver()));
    let pool = node(|node| node.new_pool(1, true));
    let [one, other] = [70_000, 300].map(|bytes| node(|node| node.give_from(pool, bytes)).expect("memory"));
    let mapped = cross(&exporter, &importer, one).expect("mapped");
    write(one, 70_000, 5);
    assert_arrived(mapped, 70_000, 5);
    let found = importer.locate(mapped + 69_999).expect("an answer").expect("known");
    assert_eq!((found.base, found.bytes, found.device, found.kind), (mapped, 70_000, GPU1, MemoryKind::Device));
    let also = cross(&exporter, &importer, other).expect("mapped");
    assert_ne!(also, mapped);
    let counts = || ["cuMemPoolImportFromShareableHandle", "cuMemPoolSetAccess", "cuMemPoolImportPointer", "cuMemPoolDestroy"].map(calls);
    assert_eq!(counts(), [1, 1, 2, 0]);
    // The GPU that takes no part in the transfer may access the pool too.
    assert!(node(|node| node.pools.values().any(|pool| pool.access == [0, 1])));
    importer.unmap(mapped).expect("unmapped");
    assert_eq!((counts(), importer.locate(mapped).expect("an answer")), ([1, 1, 2, 0], None));
    importer.unmap(also).expect("unmapped");
    assert_eq!((counts(), node(|node| node.pools.len())), ([1, 1, 2, 1], 1));
    // This is repeated many times. No object may remain, and dropping a backend must close all memory that it has opened.
    for _ in 0..200 {
        let mapped = cross(&exporter, &importer, one).expect("mapped");
        importer.unmap(mapped).expect("unmapped");
    }
    cross(&exporter, &importer, one).expect("mapped");
    drop(importer);
    assert_eq!((node(|node| (node.pools.len(), node.memory.len())), calls("cuMemFree")), ((1, 2), 203 + 1), "and one to wait for the GPU");
}

#[test]
fn a_pool_that_has_the_handle_of_one_that_was_destroyed_is_imported_as_another() {
    double::start(1, true);
    let [exporter, importer] = [(); 2].map(|()| backend(double::driver()));
    let first = node(|node| node.new_pool(0, true));
    let address = node(|node| node.give_from(first, 4096)).expect("memory");
    // Against the rules, the importer still has the memory open when it is freed.
    let stale = cross(&exporter, &importer, address).expect("mapped");
    node(|node| assert_eq!(node.take(address, true), 0));
    node(|node| node.pools.remove(&first));
    let second = node(|node| node.new_pool(0, true));
    assert_eq!(first, second, "the handle is used again");
    let address = node(|node| node.give_from(second, 4096)).expect("memory");
    let mapped = cross(&exporter, &importer, address).expect("mapped");
    write(address, 4096, 8);
    assert_arrived(mapped, 4096, 8);
    assert_eq!(calls("cuMemPoolImportFromShareableHandle"), 2);
    importer.unmap(stale).expect("unmapped");
    importer.unmap(mapped).expect("unmapped");
    assert_eq!(node(|node| node.pools.len()), 1);
}

#[test]
fn of_very_many_allocations_of_a_pool_it_stays_one_import_while_any_lives() {
    double::start(1, true);
    let [exporter, importer] = [(); 2].map(|()| backend(double::driver()));
    let pool = node(|node| node.new_pool(0, true));
    let kept = node(|node| node.give_from(pool, 64)).expect("memory");
    cross(&exporter, &importer, kept).expect("mapped");
    for _ in 0..500 {
        let address = node(|node| node.give_from(pool, 64)).expect("memory");
        let mapped = cross(&exporter, &importer, address).expect("mapped");
        importer.unmap(mapped).expect("unmapped");
        node(|node| assert_eq!(node.take(address, true), 0));
    }
    assert_eq!((calls("cuMemPoolImportFromShareableHandle"), calls("cuMemPoolImportPointer")), (1, 501));
}

#[test]
fn a_pool_that_was_not_created_for_other_processes_is_refused_with_the_remedy() {
    double::start(1, true);
    let context = context();
    let pool = node(|node| node.new_pool(0, false));
    let address = node(|node| node.give_from(pool, 4096)).expect("memory");
    let refused = context.state().export_memory(address, 4096).map(drop).expect_err("the default pool is such a one");
    let text = refused.to_string();
    assert!(matches!(refused, Error::Backend(BackendError::NotSupported(_))), "{text}");
    for part in ["cudaMallocAsync", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", "cudaMallocFromPoolAsync", "or mpgpu"] {
        assert!(text.contains(part), "{text}");
    }
    // An error that is not about the kind of pool keeps its name, and an old driver is stated as the cause.
    let shared = node(|node| node.new_pool(0, true));
    let address = node(|node| node.give_from(shared, 4096)).expect("memory");
    refuse("cuMemPoolExportToShareableHandle", code::OUT_OF_MEMORY);
    let failed = context.state().export_memory(address, 4096).map(drop);
    assert!(matches!(&failed, Err(Error::Backend(BackendError::Driver { code: 2, .. }))), "{failed:?}");
    context.state().export_memory(address, 4096).expect("memory of a pool that was");
    let old = backend(double::without("cuMemPoolExportToShareableHandle"));
    let refused = old.export(&old.locate(address).expect("an answer").expect("known"));
    assert!(
        matches!(&refused, Err(BackendError::NotSupported(why)) if why.contains("cuMemPoolExportToShareableHandle") && why.contains("newer")),
        "{refused:?}"
    );
}

#[test]
fn a_pool_that_cannot_be_opened_leaves_nothing_behind() {
    double::start(2, true);
    let [exporter, importer] = [(); 2].map(|()| backend(double::driver()));
    let pool = node(|node| node.new_pool(0, true));
    let [one, other] = [(); 2].map(|()| node(|node| node.give_from(pool, 4096)).expect("memory"));
    for function in ["cuMemPoolImportFromShareableHandle", "cuMemPoolSetAccess", "cuMemPoolImportPointer"] {
        refuse(function, 999);
        let failed = cross(&exporter, &importer, one);
        assert!(matches!(&failed, Err(BackendError::Driver { what, code: 999, .. }) if what == function), "{failed:?}");
        assert_eq!(node(|node| (node.pools.len(), node.memory.len())), (1, 2), "{function}");
    }
    // A pool that is in use is kept.
    let mapped = cross(&exporter, &importer, one).expect("mapped");
    refuse("cuMemPoolImportPointer", 999);
    cross(&exporter, &importer, other).expect_err("refused");
    assert_eq!(node(|node| node.pools.len()), 2);
    importer.unmap(mapped).expect("unmapped");
    assert_eq!(node(|node| node.pools.len()), 1);
}

#[test]
fn a_wait_that_is_reached_already_is_not_enqueued_but_in_a_capture() {
    double::start(1, true);
    let backend = backend(double::driver());
    let counter = backend.allocate_shared(DeviceId::HOST, 8).expect("memory");
    let stream = backend.create_stream(GPU0).expect("a stream");
    // SAFETY: aligned memory of the test.
    let stand_at = |value: u64| unsafe { with_exposed_provenance_mut::<u64>(counter as usize).write_volatile(value) };
    let enqueued = |value| {
        let before = calls("cuStreamBatchMemOp");
        backend.stream_wait_signals(stream, &[Signal { counter, value }], SignalWait::Operation).expect("enqueued");
        calls("cuStreamBatchMemOp") - before
    };
    stand_at(3);
    assert_eq!([2, 3, 4].map(enqueued), [0, 0, 1]);
    stand_at(4);
    assert_eq!([4, 5].map(enqueued), [0, 1]);
    node(|node| node.capturing = true);
    assert_eq!([4, 5].map(enqueued), [1, 1]);
    node(|node| node.capturing = false);
    // Of several waits, only those that are not satisfied yet are enqueued.
    backend
        .stream_wait_signals(stream, &[Signal { counter, value: 1 }, Signal { counter, value: 9 }], SignalWait::Operation)
        .expect("enqueued");
    assert_eq!((enqueued(0), calls("cuStreamBatchMemOp")), (0, 5));
    // A signal is always enqueued.
    backend.stream_raise_signals(stream, &[Signal { counter, value: 1 }]).expect("enqueued");
    assert_eq!(calls("cuStreamBatchMemOp"), 6);
}

/// Tests a device reset, which destroys the objects of all contexts on the device. The next use creates a new context with the same handle.
#[test]
fn after_a_reset_a_context_refuses_everything_and_goes_without_touching_what_is_gone() {
    for (engine, is_made_anew, older) in [(Engine::Auto, false, false), (Engine::Graph, true, false), (Engine::Auto, true, true)] {
        double::start(2, true);
        let driver = if older { double::without("cuStreamGetId") } else { double::driver() };
        let context = context_on(driver);
        let [src, dst] = [GPU0, GPU1].map(|gpu| context.allocate(gpu, 4096).expect("memory"));
        let host = [64, 8 << 20].map(|bytes| context.allocate(DeviceId::HOST, bytes).expect("memory"));
        let transfer = Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes: 4096 };
        let options = PlanOptions { engine: Some(engine), ..PlanOptions::default() };
        let plan = context.plan(&[transfer], &options).expect("a plan");
        let streams = [GPU0, GPU1].map(|gpu| context.create_stream(gpu).expect("a stream"));
        let event = context.create_event().expect("an event");
        let done = plan.execute(streams[0]).expect("enqueued");
        context.record_event(event, streams[0]).expect("recorded");

        node(|node| [0, 1].into_iter().for_each(|gpu| node.reset(gpu)));
        let other = is_made_anew.then(|| {
            let other = context_on(driver);
            (other.allocate(GPU0, 64).expect("memory"), other.allocate(GPU1, 64).expect("memory"), other)
        });
        // Memory that is allocated now may have the address of memory that was lost.
        let counters = other.iter().map(|(theirs, ..)| *theirs).chain([host[0]]);
        #[track_caller]
        fn refused<T: std::fmt::Debug>(result: Result<T, Error>) {
            let error = result.expect_err("it is gone").to_string();
            assert!(error.contains("reset") && error.contains("create a new one"), "{error}");
        }
        for stream in [streams[0], streams[1]] {
            refused(plan.execute(stream));
            refused(plan.enqueue(stream));
            refused(context.synchronize_stream(stream));
            refused(context.record_event(event, stream));
            refused(context.stream_wait_event(stream, event));
            refused(context.launch_host(stream, Box::new(|| ())));
            for counter in counters.clone() {
                refused(context.stream_raise_signals(stream, &[Signal { counter, value: 1 }]));
            }
        }
        refused(context.synchronize_event(event));
        refused(context.allocate(GPU0, 1));
        refused(context.create_stream(GPU1));
        refused(context.plan(&[transfer], &options));
        refused(done.wait().map_err(Error::from));
        context.free(src).expect("nothing is left of it");
        context.destroy_stream(streams[1]).expect("nothing is left of it");
        drop((plan, done));
        context.close().expect("nothing is left to wait for");
        drop(context);
        assert_eq!(node(|node| std::mem::take(&mut node.stuck)), [""; 0], "the driver does not survive this");
        drop(other);
        // A new context works.
        run(&backend(driver), &in_pieces(Mechanism::Copy, 70_001, 3), engine);
        assert_eq!(node(|node| std::mem::take(&mut node.stuck)), [""; 0], "the driver does not survive this");
    }
}

/// Plans and runs a transfer of 8 MB from GPU 0 to GPU 1, and checks its bytes.
fn transfer_of(context: &Context) -> Arc<mpgpu_contexts::Plan> {
    const BYTES: u64 = 8_000_003;
    let [src, dst] = [GPU0, GPU1].map(|device| context.allocate(device, BYTES).expect("memory"));
    write(src, BYTES as usize, 5);
    let transfer = Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes: BYTES };
    let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
    plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
    assert_arrived(dst, BYTES as usize, 5);
    plan
}

#[test]
fn gpus_that_report_access_and_lose_bytes_are_found_out_before_a_plan_relies_on_them() {
    for lossy in [(0, 1), (1, 0)] {
        double::start(2, true);
        node(|node| node.lossy.push(lossy));
        let context = context();
        let plan = transfer_of(&context);
        assert!(plan.describe().contains("not direct"), "{}", plan.describe());
        let (copies, allocated) = (calls("cuMemcpyAsync"), calls("cuMemAlloc"));
        transfer_of(&context);
        // The second pair of buffers is allocated, and the copy test is not made again.
        assert_eq!(calls("cuMemAlloc"), allocated + 2, "{copies}");
    }
}

#[test]
fn a_relay_that_loses_bytes_is_left_out_and_the_others_stay() {
    double::start(4, true);
    node(|node| node.lossy.push((2, 1)));
    let mesh = Machine::new(preset("beluga").expect("a preset")).expect("well formed");
    let context = context_of(double::driver(), mesh.topology().clone());
    let plan = transfer_of(&context);
    let text = plan.describe();
    assert!(text.contains("direct") && text.contains("via gpu3") && !text.contains("% via gpu2"), "{text}");
    assert!(text.contains("not via gpu2"), "{text}");
}

#[test]
fn peers_are_not_tried_where_nobody_wants_it_or_there_is_nothing_to_try() {
    double::start(2, true);
    let context = context_without_trials();
    transfer_of(&context);
    let without = calls("cuMemHostAlloc");
    drop(context);
    double::start(2, false);
    transfer_of(&self::context());
    assert_eq!((without, calls("cuMemHostAlloc")), (0, 0));
}

#[test]
fn a_trial_that_fails_or_comes_to_no_end_leaves_plans_as_they_are() {
    for function in ["cuMemAlloc", "cuMemHostAlloc", "cuMemcpyAsync", "cuStreamCreate"] {
        double::start(2, true);
        let backend = backend(double::driver());
        refuse(function, code::OUT_OF_MEMORY);
        assert_eq!(backend.losing_pairs(&[(GPU0, GPU1)]), [], "{function}");
        assert_eq!(node(|node| node.refusals.len()), 0, "{function} was called");
        run(&backend, &in_pieces(Mechanism::Copy, 70_001, 3), Engine::Stream);
    }
    double::start(2, true);
    let backend = backend(double::never_ready());
    assert_eq!(backend.losing_pairs(&[(GPU0, GPU1)]), []);
}

#[test]
fn what_peers_are_tried_with_goes_with_the_backend() {
    double::start(3, true);
    node(|node| node.lossy.push((2, 0)));
    let devices = [0, 1, 2].map(DeviceId::gpu);
    let backend = backend(double::driver());
    let pairs = [(devices[0], devices[1]), (devices[0], devices[2]), (devices[1], devices[2]), (devices[0], DeviceId::HOST)];
    assert_eq!(backend.losing_pairs(&pairs), [(devices[0], devices[2])]);
    assert!(node(|node| !node.memory.is_empty()));
    drop(backend);
    assert!(node(|node| node.memory.is_empty()));
}
