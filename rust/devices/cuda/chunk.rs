//! Allocates GPU memory by CUDA's virtual memory API. Such memory can be shared with other processes by a file descriptor.
//!
//! CUDA IPC can only open the driver's whole block that contains an allocation of `cuMemAlloc`. The driver refuses to open the block (208,
//! `ALREADY_MAPPED`) if another library of the process has already opened it. It also refuses if another library still has a mapping of a
//! freed block at the same address. Both may happen with UCX. A file descriptor can be mapped any number of times, and its memory shares no
//! block with other memory. The library therefore uses this module for its own shared memory. Memory of `mp_alloc` is allocated by
//! `cuMemAlloc`, because programs pass it to MPI, and UCX supports only CUDA IPC.

use super::driver::{Code, Driver, OutsideCapture, call_optional, code, handle};
use super::gpus::Gpus;
use super::pools::POSIX_FILE_DESCRIPTOR;
use super::sharing::release_handle;
use crate::backend::BackendError;
use cudarc::driver::sys::{self, CUdevice_attribute};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ffi::{c_int, c_uint, c_void};

/// GPU memory that is mapped by the virtual memory API for every visible GPU that can access it.
#[derive(Debug)]
pub(super) struct Chunk {
    pub base: u64,
    /// Size of the memory in bytes, a multiple of the driver's granularity.
    pub bytes: u64,
    memory: u64,
}

impl Chunk {
    /// Allocates at least `bytes` bytes on `gpu` and maps them. Returns `None` if the driver does not support this kind of memory.
    pub fn new(gpus: &Gpus, gpu: usize, bytes: u64) -> Result<Option<Chunk>, BackendError> {
        let (driver, ordinal) = (gpus.driver, gpus.devices[gpu].ordinal);
        let supported = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        if driver.attribute(supported, ordinal) == 0 {
            return Ok(None);
        }
        let _outside = OutsideCapture::enter(driver);
        let _current = gpus.primary(gpu)?.enter()?;
        // SAFETY: `CUmemAllocationProp` is a plain structure, and zero is a valid value for each of its fields.
        let mut wanted: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        wanted.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.requestedHandleTypes = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        wanted.location = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal };
        let mut granularity = 0;
        const MINIMUM: c_uint = 0;
        // SAFETY: The output and the structure are variables that outlive the call.
        let asked = unsafe { call_optional!(driver, cuMemGetAllocationGranularity(&mut granularity, &wanted, MINIMUM)) };
        let granularity = match asked {
            Ok(()) => granularity.max(1) as u64,
            Err(error) => return none_of(error),
        };
        let out_of_memory = || BackendError::OutOfMemory { device: gpu as i32, bytes };
        let size =
            bytes.max(1).checked_next_multiple_of(granularity).and_then(|size| usize::try_from(size).ok()).ok_or_else(out_of_memory)?;
        let mut memory = 0;
        // SAFETY: The output and the structure are variables that outlive the call.
        match unsafe { call_optional!(driver, cuMemCreate(&mut memory, size, &wanted, 0)) } {
            Ok(()) => Chunk::map(gpus, memory, size as u64, gpu).map(Some),
            Err(error) if is(&error, code::OUT_OF_MEMORY) => Err(out_of_memory()),
            Err(error) => none_of(error),
        }
    }

    /// Maps `bytes` bytes of memory that another process has exported as a file descriptor. The memory is on GPU `owner`.
    pub fn import(gpus: &Gpus, descriptor: &OwnedFd, bytes: u64, owner: usize) -> Result<Chunk, BackendError> {
        let driver = gpus.driver;
        let _outside = OutsideCapture::enter(driver);
        let _current = gpus.primary(gpus.mapping_gpu(owner))?.enter()?;
        let mut memory = 0;
        let number: *mut c_void = handle(descriptor.as_raw_fd() as usize);
        // SAFETY: The output is a variable that outlives the call. For this handle type, the driver reads the pointer argument as a file
        // descriptor.
        unsafe { call_optional!(driver, cuMemImportFromShareableHandle(&mut memory, number, POSIX_FILE_DESCRIPTOR)) }?;
        Chunk::map(gpus, memory, bytes, owner)
    }

    /// Maps the memory of the handle `memory` for every GPU that can access it, and takes ownership of the handle. Requires a current
    /// context.
    fn map(gpus: &Gpus, memory: u64, bytes: u64, owner: usize) -> Result<Chunk, BackendError> {
        let (driver, size) = (gpus.driver, bytes as usize);
        let mut base = 0;
        // SAFETY: The driver writes to a variable that outlives the call.
        let reserved = unsafe { call_optional!(driver, cuMemAddressReserve(&mut base, size, 0, 0, 0)) };
        // SAFETY: An address range of this size was just reserved at `base`.
        let mapped = reserved.and_then(|()| unsafe { call_optional!(driver, cuMemMap(base, size, 0, memory, 0)) });
        let accessible = mapped.clone().and_then(|()| {
            let access = gpus.access_to(owner);
            // SAFETY: The range was just reserved and mapped, and `access` has the given length.
            unsafe { call_optional!(driver, cuMemSetAccess(base, size, access.as_ptr(), access.len())) }
        });
        if let Err(error) = accessible {
            if mapped.is_ok() {
                // SAFETY: The range was mapped above, and nothing uses it yet.
                let _ = unsafe { call_optional!(driver, cuMemUnmap(base, size)) };
            }
            if base != 0 {
                // SAFETY: The range was reserved above, and nothing is mapped there.
                let _ = unsafe { call_optional!(driver, cuMemAddressFree(base, size)) };
            }
            release_handle(driver, memory);
            return Err(error);
        }
        Ok(Chunk { base, bytes, memory })
    }

    /// Exports the memory as a file descriptor, by which another process can map it.
    pub fn descriptor(&self, driver: &Driver) -> Result<OwnedFd, BackendError> {
        descriptor_of(driver, self.memory)
    }

    /// Unmaps and frees the memory. The caller guarantees that all work that uses the memory has finished.
    pub fn unmap(self, gpus: &Gpus) -> Result<(), BackendError> {
        if gpus.has_lost() {
            return Ok(());
        }
        let (driver, bytes) = (gpus.driver, self.bytes as usize);
        let _outside = OutsideCapture::enter(driver);
        // SAFETY: `map` mapped a range of this size here. The caller guarantees that nothing uses it any more.
        let unmapped = unsafe { call_optional!(driver, cuMemUnmap(self.base, bytes)) };
        // SAFETY: `map` reserved a range of this size here.
        let freed = unsafe { call_optional!(driver, cuMemAddressFree(self.base, bytes)) };
        release_handle(driver, self.memory);
        unmapped.and(freed)
    }
}

/// Exports memory of the virtual memory API as a file descriptor. `memory` is the driver's handle of the memory.
pub(super) fn descriptor_of(driver: &Driver, memory: u64) -> Result<OwnedFd, BackendError> {
    let mut descriptor: c_int = -1;
    // SAFETY: For this handle type the driver writes a file descriptor, and the output is a variable of that type.
    unsafe { call_optional!(driver, cuMemExportToShareableHandle((&raw mut descriptor).cast(), memory, POSIX_FILE_DESCRIPTOR, 0)) }?;
    // SAFETY: The driver has just created the descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

pub(super) fn is(error: &BackendError, wanted: Code) -> bool {
    matches!(error, BackendError::Driver { code, .. } if *code == i64::from(wanted))
}

/// Logs an error that means that the driver or the platform does not support this kind of memory, and returns `Ok(None)`.
fn none_of(error: BackendError) -> Result<Option<Chunk>, BackendError> {
    log::debug!("memory that is shared with other processes is allocated by cuMemAlloc instead of cuMemCreate: {error}");
    Ok(None)
}
