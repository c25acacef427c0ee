//! Exports memory to other processes.
//!
//! | memory | form of sharing |
//! | --- | --- |
//! | host memory that was allocated to be shared | memory file, which each process maps and pins by `cuMemHostRegister` |
//! | memory of `cuMemAlloc` or `cudaMalloc` | CUDA IPC |
//! | memory of the virtual memory API that was created for POSIX file descriptors | file descriptor |
//! | memory of pools that were created for POSIX file descriptors | file descriptor of the pool, and the driver's description of the allocation (module `pools`) |
//! | all other memory | refused with an error that names the remedy |
//!
//! The third row includes GPU memory that this backend allocates to be shared ([`chunk`](super::chunk)). Large host memory that is not
//! shared uses huge pages (`host_memory`). Memory files have no huge pages on systems with default settings.
//!
//! Memory of another process is mapped through the GPU of the calling thread, or through another GPU that is already in use. A rank
//! therefore does not create a context on each GPU of its neighbours.

use super::chunk::descriptor_of;
use super::driver::{OutsideCapture, call_optional, handle};
use super::gpus::Gpus;
use super::memory::{PAGED_FROM, SHARED_PAGE};
use super::parts::Core;
use super::pools::POSIX_FILE_DESCRIPTOR;
use super::sharing::{Source, release_handle};
use crate::backend::{Allocation, BackendError, HOST_MEMORY_IS_SHARED_BY, MemoryKind};
use crate::backend::{PAYLOAD_BYTES, Shared};
use cudarc::driver::sys::{self, CUpointer_attribute};
use rustix::fd::OwnedFd;
use std::ffi::{c_uint, c_void};

/// Code in the description of exported memory for memory that is shared as a memory file (`memfd`).
pub(super) const MEMORY_FILE: u32 = 1;
/// Code in the description of exported memory for memory that is shared by CUDA IPC.
pub(super) const IPC: u32 = 2;
/// Code in the description of exported memory for memory of the virtual memory API that is shared by a file descriptor of its own.
pub(super) const DESCRIPTOR: u32 = 3;
/// Code in the description of exported memory for memory of a pool that is shared by the pool's file descriptor.
pub(super) const POOL: u32 = 4;

/// Method by which an allocation known to the driver can be shared with other processes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Way {
    /// The allocation is shared by CUDA IPC.
    Ipc,
    /// The allocation is shared by a file descriptor of its own.
    Descriptor,
    /// The whole pool is shared by a file descriptor. This method is tried without a check, because no attribute reports the handle types
    /// for which a pool was created.
    Pool,
}

/// Properties of an allocation that determine how it can be shared.
#[derive(Copy, Clone, Debug, Default)]
struct Traits {
    /// True if the memory can be shared by CUDA IPC (`CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`).
    ipc: bool,
    /// Handle of the pool that contains the allocation, or 0 if it is in no pool.
    pool: u64,
    /// Bit mask of the driver's handle types by which the memory can be shared (`CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES`).
    handles: c_uint,
}

fn way(kind: MemoryKind, traits: Traits) -> Result<Way, &'static str> {
    if kind != MemoryKind::Device {
        return Err(HOST_MEMORY_IS_SHARED_BY);
    }
    if traits.ipc {
        return Ok(Way::Ipc);
    }
    if traits.pool != 0 {
        return Ok(Way::Pool);
    }
    if traits.handles & POSIX_FILE_DESCRIPTOR != 0 {
        return Ok(Way::Descriptor);
    }
    Err("the memory was created by cuMemCreate without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; request that handle type, or allocate \
         with \
         cudaMalloc or mpgpu")
}

impl Core {
    /// Returns the part of an allocation that can be shared and contains the `bytes` bytes at `address`. Returns `None` if the driver does
    /// not know the memory. A range of the virtual memory API may be mapped from several chunks, possibly on different GPUs, although the
    /// driver reports it as one allocation. Only a single chunk can be shared. (Driver 580: the handle for an address and `MAPPING_SIZE`
    /// belong to the chunk, and `RANGE_SIZE` covers the whole range.)
    pub fn exportable(&self, address: u64, bytes: u64) -> Result<Option<Allocation>, BackendError> {
        let Some(allocation) = self.locate(address)? else { return Ok(None) };
        if allocation.kind != MemoryKind::Device || self.sharing.locate(address).is_some() {
            return Ok(Some(allocation));
        }
        let _current = self.gpus.primary(allocation.device.0 as usize)?.enter()?;
        if way(allocation.kind, self.gpus.traits(address)) != Ok(Way::Descriptor) {
            return Ok(Some(allocation));
        }
        let base = self.gpus.ask(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR);
        let size = self.gpus.ask(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE);
        if base == 0 || base > address || size <= address - base || size >= allocation.bytes {
            return Ok(Some(allocation));
        }
        if bytes > size - (address - base) {
            return Err(BackendError::NotSupported(format!(
                "{address:#x} ({bytes} bytes) cannot be shared with another process: it is mapped from several chunks by cuMemMap; export each \
                 chunk by itself (this one is {base:#x}, {size} bytes), or allocate with cudaMalloc or mpgpu (PyTorch: without \
                 expandable_segments)"
            )));
        }
        Ok(Some(Allocation { base, bytes: size, ..allocation }))
    }

    /// Returns the description that another process needs to map an allocation.
    pub fn export(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        let plain = |form, descriptor, offset, payload| Shared { form, descriptor, offset, payload };
        let own = self.sharing.at(allocation.base, |held| match &held.source {
            Source::Own(region) => {
                region.file().map(|file| plain(MEMORY_FILE, Some(file), 0, [0; PAYLOAD_BYTES])).map_err(|errno| BackendError::Driver {
                    what: "duplicating the descriptor of a shared-memory file (memfd)".into(),
                    reason: std::io::Error::from(errno).to_string(),
                    code: i64::from(errno.raw_os_error()),
                })
            }
            Source::OwnOnGpu(chunk) => {
                chunk.descriptor(self.gpus.driver).map(|descriptor| plain(DESCRIPTOR, Some(descriptor), chunk.bytes, [0; PAYLOAD_BYTES]))
            }
            _ => {
                let base = allocation.base;
                Err(BackendError::NotSupported(format!("{base:#x} is memory of another process; export it in that process")))
            }
        });
        if let Some(own) = own {
            return own;
        }
        self.gpus.check_alive()?;
        let _outside = OutsideCapture::enter(self.gpus.driver);
        let gpu = usize::try_from(allocation.device.0).unwrap_or_else(|_| self.gpus.any_used());
        let _current = self.gpus.primary(gpu)?.enter()?;
        let traits = self.gpus.traits(allocation.base);
        match way(allocation.kind, traits) {
            Ok(Way::Ipc) => {
                if allocation.bytes >= PAGED_FROM && !allocation.bytes.is_multiple_of(SHARED_PAGE) && !self.memory.is_own(allocation.base) {
                    log::info!(
                        "{:#x}: {} bytes are not a multiple of {SHARED_PAGE}, so other processes map them in small pages and some copies take 6 % \
                         longer: make the allocation a multiple of that, or allocate it with mpgpu",
                        allocation.base,
                        allocation.bytes
                    );
                }
                let mut ipc = sys::CUipcMemHandle { reserved: [0; PAYLOAD_BYTES] };
                // SAFETY: The output is a variable that outlives the call. The address is the first address of an allocation of this GPU.
                unsafe { call_optional!(self.gpus.driver, cuIpcGetMemHandle(&mut ipc, allocation.base)) }?;
                Ok(plain(IPC, None, 0, ipc.reserved.map(|byte| byte as u8)))
            }
            Ok(Way::Descriptor) => Ok(plain(DESCRIPTOR, Some(self.gpus.descriptor_of(allocation.base)?), 0, [0; PAYLOAD_BYTES])),
            Ok(Way::Pool) => {
                let (descriptor, number, pointer) = {
                    let lives = |id: u64, base: u64| matches!(self.locate(base), Ok(Some(found)) if found.id == id);
                    self.sharing.pools.export(&self.gpus, traits.pool, allocation, lives)?
                };
                Ok(plain(POOL, Some(descriptor), number, pointer))
            }
            Err(why) => Err(BackendError::NotSupported(format!("{:#x} cannot be shared with another process: {why}", allocation.base))),
        }
    }
}

impl Gpus {
    /// Returns one attribute of the memory at an address, or 0 if the driver does not know the attribute.
    fn ask(&self, address: u64, attribute: CUpointer_attribute) -> u64 {
        let (mut name, mut value) = (attribute as c_uint, 0_u64);
        let mut values = [(&raw mut value).cast::<c_void>()];
        // SAFETY: There is one name and one value, and the value has room for the widest of these attributes.
        let code = unsafe { (self.driver.cuPointerGetAttributes)(1, &mut name, values.as_mut_ptr(), address) };
        if code == 0 { value } else { 0 }
    }

    /// Returns the properties that determine how the allocation at an address can be shared. Attributes that the driver does not know are
    /// 0.
    fn traits(&self, address: u64) -> Traits {
        let ask = |attribute| self.ask(address, attribute);
        Traits {
            ipc: ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) & 0xFF != 0,
            pool: ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE),
            handles: ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES) as c_uint,
        }
    }

    /// Exports the memory of the virtual memory API at `address` as a file descriptor.
    fn descriptor_of(&self, address: u64) -> Result<OwnedFd, BackendError> {
        let driver = self.driver;
        let mut memory = 0;
        // SAFETY: The output is a variable that outlives the call. A successful call retains the memory, so the handle stays valid until it
        // is released below.
        unsafe { call_optional!(driver, cuMemRetainAllocationHandle(&mut memory, handle(address as usize))) }?;
        let descriptor = descriptor_of(driver, memory);
        release_handle(driver, memory);
        descriptor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_memory_is_shared_in_its_way_or_refused_with_the_remedy() {
        let traits = |ipc, pool: bool, handles| Traits { ipc, pool: u64::from(pool), handles };
        assert_eq!(way(MemoryKind::Device, traits(true, false, 0)), Ok(Way::Ipc));
        assert_eq!(way(MemoryKind::Device, traits(true, false, 1)), Ok(Way::Ipc));
        assert_eq!(way(MemoryKind::Device, traits(false, false, 1)), Ok(Way::Descriptor));
        assert_eq!(way(MemoryKind::Device, traits(false, false, 9)), Ok(Way::Descriptor));
        assert_eq!(way(MemoryKind::Device, traits(false, true, 0)), Ok(Way::Pool));
        assert_eq!(way(MemoryKind::Device, traits(false, true, 1)), Ok(Way::Pool));
        let remedies = [
            (MemoryKind::Pinned, traits(false, false, 0), "allocate it as memory shared between processes"),
            (MemoryKind::Device, traits(false, false, 8), "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"),
        ];
        for (kind, traits, remedy) in remedies {
            assert!(way(kind, traits).is_err_and(|why| why.contains(remedy)), "{kind:?} {traits:?}");
        }
    }
}
