//! Memory: what this backend gives out, and what the driver knows of any address.

use super::Core;
use super::device::{handle, lock};
use super::driver::{CUdeviceptr, OutsideCapture, call, code};
use crate::backend::{Allocation, BackendError, MemoryKind};
use crate::topology::DeviceId;
use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute};
use std::ffi::{c_int, c_uint, c_void};

/// What the driver knows of an address.
#[derive(Copy, Clone, Debug, Default)]
pub(super) struct Attributes {
    /// 0 for memory that the driver does not know.
    memory_type: c_uint,
    managed: c_uint,
    ordinal: c_int,
    buffer: u64,
    start: u64,
    bytes: usize,
    /// Memory of `cuMemAlloc`, to which `cuCtxEnablePeerAccess` gives access. Pools and mappings of the virtual memory API give it
    /// for each device by themselves.
    plain: c_uint,
}

impl Attributes {
    pub fn is_device(&self) -> bool {
        self.memory_type == CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint
    }

    pub fn is_host(&self) -> bool {
        self.memory_type == CUmemorytype::CU_MEMORYTYPE_HOST as c_uint
    }
}

impl Core {
    pub fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.check_device(device)?;
        let driver = self.driver;
        let out_of_memory = || BackendError::OutOfMemory { device: device.0, bytes };
        let size = usize::try_from(bytes.max(1)).map_err(|_| out_of_memory())?;
        // Host memory is pinned in the context of a GPU, and portable: every GPU of the process then reads and writes it directly.
        let gpu = if device.is_host() { self.any_used() } else { device.0 as usize };
        let primary = self.primary(gpu)?;
        let _outside = OutsideCapture::enter(driver);
        let _current = primary.enter()?;
        let (code, address) = if device.is_host() {
            const PORTABLE: c_uint = 1;
            let mut pointer: *mut c_void = std::ptr::null_mut();
            // SAFETY: the output is valid for the call.
            let code = unsafe { (driver.cuMemHostAlloc)(&mut pointer, size, PORTABLE) };
            (code, pointer.expose_provenance() as u64)
        } else {
            let mut pointer: CUdeviceptr = 0;
            // SAFETY: the output is valid for the call.
            (unsafe { (driver.cuMemAlloc)(&mut pointer, size) }, pointer)
        };
        if code == code::OUT_OF_MEMORY {
            return Err(out_of_memory());
        }
        driver.check(if device.is_host() { "cuMemHostAlloc" } else { "cuMemAlloc" }, code)?;
        lock(&self.memory).insert(address, (device, bytes.max(1)));
        Ok(address)
    }

    pub fn free(&self, address: u64) -> Result<(), BackendError> {
        let (device, _) = lock(&self.memory).remove(&address).ok_or(BackendError::InvalidPointer(address))?;
        let gpu = if device.is_host() { self.any_used() } else { device.0 as usize };
        let primary = self.primary(gpu)?;
        let _outside = OutsideCapture::enter(self.driver);
        let _current = primary.enter()?;
        // SAFETY: given out by `allocate`, and taken out of the registry just now, so nobody frees it again. The caller vouches that
        // work which uses it has finished.
        unsafe {
            if device.is_host() {
                call!(self.driver, cuMemFreeHost(handle(address as usize)))
            } else {
                call!(self.driver, cuMemFree(address))
            }
        }
    }

    pub fn allocated_bytes(&self, device: DeviceId) -> u64 {
        lock(&self.memory).values().filter(|(owner, _)| *owner == device).map(|(_, bytes)| bytes).sum()
    }

    pub fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        let attributes = self.attributes(address)?;
        if attributes.managed != 0 {
            return Err(BackendError::NotSupported(format!(
                "{address:#x} is managed memory, which the driver may move between GPUs while a copy runs; use cudaMalloc, cudaMallocAsync or \
                 cudaHostAlloc, or copy with the CUDA runtime"
            )));
        }
        let (device, kind) = if attributes.is_device() {
            let ordinal = attributes.ordinal.max(0);
            if ordinal as usize >= self.devices.len() {
                return Ok(None);
            }
            // The GPU has memory of the caller's, hence a context already. From now on others may copy to and from it.
            self.primary(ordinal as usize)?;
            (DeviceId(ordinal), MemoryKind::Device)
        } else if attributes.is_host() {
            let owner = lock(&self.memory).get(&attributes.start).map(|(owner, _)| *owner);
            (owner.filter(|owner| owner.is_host()).unwrap_or(DeviceId::HOST), MemoryKind::Pinned)
        } else {
            return Ok(None);
        };
        // Not every driver tells the range of registered host memory. Then the address itself is all that is known to be inside.
        let (base, bytes) = match (attributes.start, attributes.bytes as u64) {
            (start, bytes) if start <= address && address - start < bytes => (start, bytes),
            _ => (address, u64::MAX - address),
        };
        Ok(Some(Allocation { id: attributes.buffer, base, bytes, device, kind }))
    }

    /// What the driver knows of `address`; all zeros for memory that it does not know.
    pub fn attributes(&self, address: u64) -> Result<Attributes, BackendError> {
        use CUpointer_attribute::*;
        let mut known = Attributes::default();
        let mut names = [
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CU_POINTER_ATTRIBUTE_BUFFER_ID,
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        ]
        .map(|attribute| attribute as c_uint);
        let mut values: [*mut c_void; 7] = [
            (&raw mut known.memory_type).cast(),
            (&raw mut known.managed).cast(),
            (&raw mut known.ordinal).cast(),
            (&raw mut known.buffer).cast(),
            (&raw mut known.start).cast(),
            (&raw mut known.bytes).cast(),
            (&raw mut known.plain).cast(),
        ];
        let count = names.len() as c_uint;
        let driver = self.driver;
        // SAFETY: as many names as values; each value is a field of the attribute's type. Booleans are written as one byte or four,
        // into four that were zero.
        let mut ask = || unsafe { (driver.cuPointerGetAttributes)(count, names.as_mut_ptr(), values.as_mut_ptr(), address) };
        let mut code = ask();
        if code == code::INVALID_CONTEXT {
            // This thread has no current context yet; any will do.
            let _current = match self.devices.iter().find_map(|device| device.used()) {
                Some(primary) => primary.enter()?,
                // No memory of this process that the driver could know through us, and none that we could copy.
                None => return Ok(Attributes::default()),
            };
            code = ask();
        }
        driver.check("cuPointerGetAttributes", code)?;
        Ok(known)
    }

    /// Whether a kernel of `gpu` can read and write at `address`.
    pub fn kernel_reaches(&self, gpu: usize, address: u64) -> Result<bool, BackendError> {
        let known = self.attributes(address)?;
        if known.is_host() {
            return Ok(true);
        }
        if !known.is_device() || known.managed != 0 {
            return Ok(false);
        }
        let owner = known.ordinal.max(0) as usize;
        Ok(owner == gpu || (known.plain != 0 && self.has_access(gpu, owner)?))
    }
}
