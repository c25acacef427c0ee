//! Simulates the driver's virtual memory API. The handle of a piece of memory is a file, which is mapped in a reserved address range.

use super::super::driver::{CUdeviceptr, Code, Driver, code};
use super::{Block, INVALID_VALUE, Node, call, driver, put, whole};
use cudarc::driver::sys;
use rustix::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::LazyLock;

/// Granularity in bytes of sizes and addresses in the simulated API.
pub const GRANULARITY: usize = 64 << 10;

/// Memory and reserved address ranges of the simulated API.
#[derive(Default)]
pub struct Chunks {
    /// File and GPU of each piece of memory, by handle.
    pub handles: BTreeMap<u64, (OwnedFd, i32)>,
    /// Size in bytes of each reserved address range, by its first address.
    pub reserved: BTreeMap<u64, usize>,
    next: u64,
}

impl Chunks {
    fn insert(&mut self, file: OwnedFd, gpu: i32) -> u64 {
        self.next += 1;
        self.handles.insert(self.next, (file, gpu));
        self.next
    }
}

/// Returns the double of a driver with this API.
pub fn with_chunks() -> &'static Driver {
    static DRIVER: LazyLock<Driver> = LazyLock::new(|| add_chunks(driver()));
    &DRIVER
}

/// Returns the double of a driver with this API, graphs and kernels.
pub fn whole_with_chunks() -> &'static Driver {
    static DRIVER: LazyLock<Driver> = LazyLock::new(|| add_chunks(whole()));
    &DRIVER
}

fn add_chunks(driver: &Driver) -> Driver {
    Driver {
        cuMemGetAllocationGranularity: Some(granularity),
        cuMemCreate: Some(create),
        cuMemExportToShareableHandle: Some(export),
        cuMemImportFromShareableHandle: Some(import),
        cuMemAddressReserve: Some(reserve),
        cuMemAddressFree: Some(free),
        cuMemMap: Some(map),
        cuMemUnmap: Some(unmap),
        cuMemSetAccess: Some(set_access),
        cuMemRelease: Some(release),
        ..driver.clone()
    }
}

unsafe extern "C" fn granularity(out: *mut usize, _: *const sys::CUmemAllocationProp, _: c_uint) -> Code {
    call("cuMemGetAllocationGranularity", |_| put(out, GRANULARITY))
}

unsafe extern "C" fn create(
    out: *mut sys::CUmemGenericAllocationHandle,
    bytes: usize,
    wanted: *const sys::CUmemAllocationProp,
    _: c_ulonglong,
) -> Code {
    call("cuMemCreate", |node| {
        // SAFETY: the backend passes a structure.
        let gpu = unsafe { (*wanted).location.id };
        if !bytes.is_multiple_of(GRANULARITY) {
            return INVALID_VALUE;
        }
        let made = rustix::fs::memfd_create("chunk", MemfdFlags::CLOEXEC)
            .and_then(|file| rustix::fs::ftruncate(&file, bytes as u64).map(|()| file))
            .ok()
            .filter(|_| bytes < 1 << 40);
        made.map_or(code::OUT_OF_MEMORY, |file| put(out, node.chunks.insert(file, gpu)))
    })
}

unsafe extern "C" fn export(out: *mut c_void, handle: sys::CUmemGenericAllocationHandle, _: c_uint, _: c_ulonglong) -> Code {
    call("cuMemExportToShareableHandle", |node| {
        let Some((file, _)) = node.chunks.handles.get(&handle) else { return INVALID_VALUE };
        rustix::io::fcntl_dupfd_cloexec(file, 0).map_or(code::OUT_OF_MEMORY, |file| put(out.cast::<c_int>(), file.into_raw_fd()))
    })
}

unsafe extern "C" fn import(out: *mut sys::CUmemGenericAllocationHandle, descriptor: *mut c_void, _: c_uint) -> Code {
    call("cuMemImportFromShareableHandle", |node| {
        // SAFETY: the backend passes a descriptor that is open during the call.
        let file = unsafe { BorrowedFd::borrow_raw(descriptor.addr() as c_int) };
        let number = |file: BorrowedFd<'_>| rustix::fs::fstat(file).map(|stat| stat.st_ino).ok();
        let known = node.chunks.handles.values().find(|(chunk, _)| number(chunk.as_fd()) == number(file));
        let Some((_, gpu)) = known else { return INVALID_VALUE };
        let gpu = *gpu;
        rustix::io::fcntl_dupfd_cloexec(file, 0).map_or(code::OUT_OF_MEMORY, |file| put(out, node.chunks.insert(file, gpu)))
    })
}

unsafe extern "C" fn reserve(out: *mut CUdeviceptr, bytes: usize, _: usize, _: CUdeviceptr, _: c_ulonglong) -> Code {
    call("cuMemAddressReserve", |node| {
        // SAFETY: a new mapping without access.
        let Ok(base) = (unsafe { rustix::mm::mmap_anonymous(null_mut(), bytes, ProtFlags::empty(), MapFlags::PRIVATE) }) else {
            return code::OUT_OF_MEMORY;
        };
        let base = base.expose_provenance() as u64;
        node.chunks.reserved.insert(base, bytes);
        put(out, base)
    })
}

unsafe extern "C" fn free(base: CUdeviceptr, bytes: usize) -> Code {
    call("cuMemAddressFree", |node| {
        if node.memory.contains_key(&base) || node.chunks.reserved.get(&base) != Some(&bytes) {
            return INVALID_VALUE;
        }
        node.chunks.reserved.remove(&base);
        // SAFETY: mapped by `reserve`, and nothing is mapped there.
        let freed = unsafe { rustix::mm::munmap(with_exposed_provenance_mut(base as usize), bytes) };
        freed.map_or(INVALID_VALUE, |()| 0)
    })
}

unsafe extern "C" fn map(base: CUdeviceptr, bytes: usize, _: usize, handle: sys::CUmemGenericAllocationHandle, _: c_ulonglong) -> Code {
    call("cuMemMap", |node| {
        let Some((file, gpu)) = node.chunks.handles.get(&handle) else { return INVALID_VALUE };
        let size = rustix::fs::fstat(file).map_or(0, |stat| stat.st_size as usize);
        if node.chunks.reserved.get(&base) != Some(&bytes) || bytes > size || !bytes.is_multiple_of(GRANULARITY) {
            return INVALID_VALUE;
        }
        let at = with_exposed_provenance_mut(base as usize);
        // SAFETY: replaces reserved addresses.
        let mapped =
            unsafe { rustix::mm::mmap(at, bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED, file, 0) };
        let gpu = *gpu;
        mapped.map_or(INVALID_VALUE, |_| insert(node, base, bytes, gpu))
    })
}

fn insert(node: &mut Node, base: u64, bytes: usize, gpu: i32) -> Code {
    node.ids += 1;
    let block = Block { bytes, gpu: Some(gpu), id: node.ids, registered: false, pool: None, pages: None, opened: false, is_chunk: true };
    node.memory.insert(base, block);
    0
}

unsafe extern "C" fn unmap(base: CUdeviceptr, bytes: usize) -> Code {
    call("cuMemUnmap", |node| {
        if node.memory.get(&base).is_none_or(|block| !block.is_chunk || block.bytes != bytes) {
            return INVALID_VALUE;
        }
        node.memory.remove(&base);
        let at = with_exposed_provenance_mut(base as usize);
        // SAFETY: replaces mapped addresses.
        let unmapped = unsafe { rustix::mm::mmap_anonymous(at, bytes, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::FIXED) };
        unmapped.map_or(INVALID_VALUE, |_| 0)
    })
}

unsafe extern "C" fn set_access(base: CUdeviceptr, _: usize, _: *const sys::CUmemAccessDesc, count: usize) -> Code {
    call("cuMemSetAccess", |node| if node.memory.contains_key(&base) && count > 0 { 0 } else { INVALID_VALUE })
}

unsafe extern "C" fn release(handle: sys::CUmemGenericAllocationHandle) -> Code {
    call("cuMemRelease", |node| if node.chunks.handles.remove(&handle).is_some() { 0 } else { INVALID_VALUE })
}
