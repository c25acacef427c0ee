//! Tests imports of memory that another library of the process has already opened by CUDA IPC, and of other memory. Uses the driver double
//! (simulated CUDA driver).

use super::CudaBackend;
use super::double::{self, GRANULARITY, calls, node};
use super::driver::Driver;
use super::export::{DESCRIPTOR, IPC};
use super::refusals::{assert_arrived, write};
use crate::backend::{Allocation, Backend, BackendError, Shared};
use crate::topology::DeviceId;

const GPU1: DeviceId = DeviceId::gpu(1);
const BYTES: usize = 10_000;

fn on(driver: &'static Driver) -> CudaBackend {
    double::start(2, true);
    node(|node| node.shares = true);
    CudaBackend::on(driver, 1).expect("the double has GPUs")
}

/// Exports an allocation and returns the data for other processes.
fn exported(backend: &CudaBackend, base: u64) -> (Shared, Allocation) {
    let allocation = backend.exportable(base, BYTES as u64).expect("an answer").expect("known");
    (backend.export(&allocation).expect("shared"), allocation)
}

/// Simulates another library that opens all memory that supports CUDA IPC, and keeps it open.
fn let_another_library_open_all() {
    node(|node| node.foreign = node.memory.keys().copied().collect());
}

#[test]
fn memory_that_another_library_has_open_is_refused_with_its_likely_owner_and_the_remedy() {
    let backend = on(double::driver());
    let base = backend.allocate(GPU1, BYTES as u64).expect("memory");
    let (shared, allocation) = exported(&backend, base);
    assert_eq!(shared.form, IPC, "UCX opens memory of mp_alloc by CUDA IPC");
    let_another_library_open_all();
    let refused = backend.0.map(&shared, &allocation).expect_err("it is mapped already");
    let BackendError::NotSupported(why) = refused else { panic!("{refused:?}") };
    for part in
        ["another library of this process, for instance UCX", "208", "do not free memory that MPI has sent", "shared between processes"]
    {
        assert!(why.contains(part), "{part} is not in: {why}");
    }
    // The other library has closed the memory now.
    node(|node| node.foreign.clear());
    let opened = backend.0.map(&shared, &allocation).expect("opened");
    write(base, BYTES, 3);
    assert_arrived(opened, BYTES, 3);
}

#[test]
fn shared_memory_of_a_gpu_is_mapped_any_number_of_times_whatever_another_library_has_open() {
    let backend = on(double::with_chunks());
    let base = backend.allocate_shared(GPU1, BYTES as u64).expect("memory");
    let (shared, allocation) = exported(&backend, base);
    assert_eq!((shared.form, allocation.bytes, allocation.device), (DESCRIPTOR, BYTES as u64, GPU1));
    assert!(backend.locate(base + BYTES as u64).expect("an answer").is_none(), "what was not asked for is nobody's");
    let_another_library_open_all();
    let mapped: Vec<u64> = (0..3).map(|_| backend.0.map(&shared, &allocation).expect("mapped")).collect();
    write(base, BYTES, 5);
    for address in &mapped {
        assert_arrived(*address, BYTES, 5);
        assert_eq!(node(|node| node.size_at(*address)), Some(GRANULARITY), "whole pages of the driver's are mapped");
        backend.unmap(*address).expect("unmapped");
    }
    assert_eq!((calls("cuIpcGetMemHandle"), calls("cuIpcOpenMemHandle")), (0, 0));
    let waits = calls("cuMemFree");
    backend.free(base).expect("freed");
    assert_eq!(calls("cuMemFree"), waits + 1, "freeing waits for work as cuMemFree does, by one");
    assert!(node(|node| node.chunks.handles.is_empty() && node.chunks.reserved.is_empty() && node.memory.is_empty()), "all goes back");
}

#[test]
fn shared_memory_of_a_gpu_is_of_cuda_ipc_where_the_driver_has_no_descriptors() {
    for function in ["cuMemCreate", "cuMemGetAllocationGranularity"] {
        let backend = on(double::without_of(double::with_chunks(), function));
        let base = backend.allocate_shared(GPU1, BYTES as u64).expect("memory");
        assert_eq!(exported(&backend, base).0.form, IPC);
        backend.free(base).expect("freed");
    }
}

#[test]
fn shared_memory_that_cannot_be_had_leaves_nothing_behind() {
    for function in ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"] {
        let backend = on(double::with_chunks());
        backend.allocate(GPU1, 1).expect("memory");
        let before = node(|node| node.memory.len());
        node(|node| node.refusals.insert(function, 2));
        let refused = backend.allocate_shared(GPU1, BYTES as u64);
        assert!(refused.is_err(), "{function}");
        assert!(node(|node| node.chunks.handles.is_empty() && node.chunks.reserved.is_empty()), "{function}");
        assert_eq!(node(|node| node.memory.len()), before, "{function}");
    }
}
