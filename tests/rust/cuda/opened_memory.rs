//! Tests memory of another process, which has a different address for each GPU. Uses the driver double (simulated CUDA driver).

use super::CudaBackend;
use super::double::{self, calls, node};
use super::driver::Driver;
use crate::backend::{Action, ActionGrid, Allocation, Backend, Endpoints, Execution, MemoryKind, Shared, StepFate};
use crate::plan::{self, Copy, Lane, LaneId, Mechanism, Op, Place, Program};
use crate::topology::DeviceId;
use smallvec::smallvec;
use std::ptr::with_exposed_provenance;
use std::sync::Arc;

const GPU1: DeviceId = DeviceId::gpu(1);
const BYTES: u64 = 10_000;

/// Imports memory of another process on GPU 1. Returns the original address and the address of the import.
fn import(backend: &CudaBackend) -> (u64, u64) {
    let theirs = node(|node| node.give_shareable(BYTES as usize, 1)).expect("memory");
    let allocation = backend.locate(theirs).expect("an answer").expect("known");
    assert_eq!((allocation.device, allocation.kind), (GPU1, MemoryKind::Device));
    let shared = backend.0.export(&allocation).expect("shared");
    (theirs, backend.0.map(&shared, &allocation).expect("opened"))
}

fn on(driver: &'static Driver) -> CudaBackend {
    double::start(2, true);
    CudaBackend::on(driver, 1).expect("the double has GPUs")
}

/// Returns a program in which one transfer consists of two copies, the first on GPU 0 and the second on GPU 1.
fn halves() -> Arc<Program> {
    let half = |lane: u32| {
        let offset = BYTES / 2 * u64::from(lane);
        let copy = Copy { from: Place::Source { transfer: 0, offset }, to: Place::Destination { transfer: 0, offset }, bytes: BYTES / 2 };
        Op { lane: LaneId(lane), mechanism: Mechanism::Copy, copies: smallvec![copy], after: smallvec![] }
    };
    let lanes = vec![Lane::new(DeviceId::gpu(0)), Lane::new(GPU1)];
    let program = Program { sources: Vec::new(), transfers: vec![BYTES], lanes, rings: vec![], ops: vec![half(0), half(1)] };
    plan::validate(&program, 0).expect("a valid program");
    Arc::new(program)
}

fn put(backend: &CudaBackend, dst: u64) {
    let src = backend.allocate(DeviceId::gpu(0), BYTES).expect("memory");
    // SAFETY: memory of the double is host memory, of this size.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<u8>(src as usize), BYTES as usize) }.fill(0x5A);
    let stream = backend.create_stream(DeviceId::gpu(0)).expect("a stream");
    let (endpoints, rings): (Arc<[Endpoints]>, Arc<[u64]>) = (Arc::new([Endpoints { dst, src }]), Arc::new([]));
    let program = halves();
    let end = backend.submit(&Execution::new(&program, &endpoints, &rings, stream)).expect("enqueued");
    end.expect("a completion").wait().expect("it runs");
}

#[track_caller]
fn assert_arrived(address: u64) {
    // SAFETY: as above.
    let arrived = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(address as usize), BYTES as usize) };
    assert!(arrived.iter().all(|byte| *byte == 0x5A));
}

#[test]
fn each_gpu_works_on_memory_of_another_process_at_its_own_address() {
    let backend = on(double::driver());
    backend.allocate(DeviceId::gpu(0), 1).expect("memory");
    let (theirs, ours) = import(&backend);
    assert_eq!(calls("cuIpcOpenMemHandle"), 1);
    put(&backend, ours);
    assert_arrived(theirs);
    assert_eq!((calls("cuIpcOpenMemHandle"), node(|node| node.strangers)), (2, 0));
    put(&backend, ours);
    assert_eq!((calls("cuIpcOpenMemHandle"), calls("cuIpcCloseMemHandle"), node(|node| node.strangers)), (2, 0, 0));
    assert!(backend.0.sharing.release(&backend.0.gpus, ours).expect("closed"));
    assert_eq!(calls("cuIpcCloseMemHandle"), 2);
}

#[test]
fn kernels_of_each_gpu_are_given_its_own_address_which_goes_with_the_import() {
    let backend = on(double::driver());
    backend.allocate(DeviceId::gpu(0), 1).expect("memory");
    let (_, ours) = import(&backend);
    let seen = [0, 1].map(|gpu| backend.address_for(DeviceId::gpu(gpu), ours + 100).expect("an address"));
    assert_eq!(calls("cuIpcOpenMemHandle"), 2);
    assert_ne!(seen[0], seen[1]);
    assert!(seen.contains(&(ours + 100)), "the GPU that has mapped it has it there");
    assert_eq!(backend.address_for(DeviceId::gpu(1), ours + 100).expect("an address"), seen[1], "it was opened again");
    let own = backend.allocate(DeviceId::gpu(0), 64).expect("memory");
    assert_eq!(backend.address_for(DeviceId::gpu(1), own).expect("an address"), own);
    assert!(backend.0.sharing.release(&backend.0.gpus, ours).expect("closed"));
    assert_eq!(calls("cuIpcCloseMemHandle"), 2);
}

#[test]
fn a_stream_is_of_its_gpu_and_a_default_stream_of_none() {
    let backend = on(double::driver());
    for gpu in [0, 1] {
        let stream = backend.create_stream(DeviceId::gpu(gpu)).expect("a stream");
        assert_eq!(backend.stream_device(stream).expect("a device"), DeviceId::gpu(gpu));
    }
    for stream in [0, 1, 2] {
        assert_eq!(backend.stream_device(crate::backend::StreamHandle(stream)).expect("a device"), DeviceId::HOST);
    }
}

#[test]
fn memory_that_the_program_has_opened_is_adopted_and_left_to_it() {
    let driver = double::driver();
    let backend = on(driver);
    backend.allocate(DeviceId::gpu(0), 1).expect("memory");
    let theirs = node(|node| node.give_shareable(BYTES as usize, 1)).expect("memory");
    let allocation = backend.locate(theirs).expect("an answer").expect("known");
    let Shared { payload, .. } = backend.0.export(&allocation).expect("shared");
    let opened = {
        let _current = backend.0.gpus.primary(0).expect("in use").enter().expect("current");
        super::ipc::open_through(&backend.0.gpus, 0, &payload).expect("the program opens it")
    };
    let adopt = |address| {
        let shared = Shared { form: Shared::MAPPED_BY_PROGRAM, descriptor: None, offset: address, payload };
        backend.0.map(&shared, &Allocation { base: address, ..allocation })
    };
    assert_eq!(backend.locate(opened).expect("an answer").expect("known").device, DeviceId::gpu(0), "as the driver says");
    assert_eq!(adopt(opened).expect("adopted"), opened);
    assert_eq!(backend.locate(opened + 9).expect("an answer").expect("known").device, GPU1);
    assert!(adopt(opened).expect_err("twice").to_string().contains("imported already, as memory of device 1"));
    assert!(adopt(1 << 40).expect_err("no memory").to_string().contains("is not memory that CUDA IPC has mapped"));
    put(&backend, opened);
    assert_arrived(theirs);
    // The backend opens the memory again on the second GPU, and closes only that mapping.
    assert_eq!((calls("cuIpcOpenMemHandle"), calls("cuIpcCloseMemHandle"), node(|node| node.strangers)), (2, 0, 0));
    assert!(backend.0.sharing.release(&backend.0.gpus, opened).expect("let go"));
    assert_eq!(calls("cuIpcCloseMemHandle"), 1);
    super::ipc::close_through(&backend.0.gpus, 0, opened).expect("the program's own to close");
}

#[test]
fn memory_is_opened_through_the_threads_own_gpu_or_one_in_use_before_the_one_that_has_it() {
    let backend = on(double::driver());
    for gpu in [GPU1, DeviceId::gpu(0)] {
        backend.allocate(gpu, 1).expect("memory");
    }
    assert_eq!(backend.0.gpus.mapping_gpu(1), 0, "in use, and not the owner");
    let _current = backend.0.gpus.primary(1).expect("in use").enter().expect("current");
    assert_eq!(backend.0.gpus.mapping_gpu(1), 1, "the thread's own");
}

#[test]
fn a_gpu_that_cannot_open_the_memory_leaves_the_work_to_one_that_has() {
    let backend = on(double::driver());
    backend.allocate(DeviceId::gpu(0), 1).expect("memory");
    let (theirs, ours) = import(&backend);
    const MAP_FAILED: i32 = 205;
    // GPU 0 has already opened the memory, so the refusal affects GPU 1.
    node(|node| node.refusals.insert("cuIpcOpenMemHandle", MAP_FAILED));
    put(&backend, ours);
    put(&backend, ours);
    assert_arrived(theirs);
    assert_eq!((calls("cuIpcOpenMemHandle"), node(|node| node.strangers)), (1, 0));
}

#[test]
fn a_kernel_of_each_gpu_has_opened_memory_at_its_own_address() {
    let backend = on(double::failing());
    let flags = backend.allocate_shared(DeviceId::HOST, BYTES).expect("memory");
    let src = backend.allocate(DeviceId::gpu(0), BYTES).expect("memory");
    let (theirs, ours) = import(&backend);
    // SAFETY: memory of the double is host memory, of this size.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<u8>(src as usize), BYTES as usize) }.fill(0x5A);
    let grid = ActionGrid { stop: flags + 8, ..ActionGrid::default() };
    for gpu in [0, 1].map(DeviceId::gpu) {
        let stream = backend.create_stream(gpu).expect("a stream");
        let program =
            Arc::new(Program { sources: Vec::new(), transfers: vec![1], lanes: vec![Lane::new(gpu)], rings: vec![], ops: vec![] });
        let run = |at: u64| {
            let endpoints: Arc<[Endpoints]> = Arc::new([Endpoints { dst: ours + at, src: src + at }]);
            let ends = backend.action_reach(gpu, &program, &endpoints).expect("it reaches them").ends;
            let actions = [Action::Copy(0), Action::Raise(flags)].map(|action| action.segment(&ends, &program.transfers));
            backend.stream_run_actions(stream, gpu, &actions, grid, &StepFate::default())
        };
        (0..BYTES).for_each(|at| assert!(matches!(run(at), Ok(true))));
        assert_arrived(theirs);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<u8>(theirs as usize), BYTES as usize) }.fill(0);
    }
    assert_eq!(calls("cuIpcOpenMemHandle"), 2, "once for each GPU");
}
