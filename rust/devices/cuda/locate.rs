//! Allocates memory, determines the allocation and the properties of memory at an address, and determines which GPUs may access it.

use super::attributes::{Attributes, UNNUMBERED};
use super::capture::free_spare_blocks;
use super::memory::{self, Owned, own_id};
use super::parts::Core;
use crate::backend::host_memory::PageRange;
use crate::backend::{Allocation, BackendError, MemoryKind};
use crate::topology::DeviceId;
use cudarc::driver::sys::CUdevice_attribute;

impl Core {
    /// Allocates memory on `device` and returns its address. If `is_shared` is true, other processes can map the memory. Shared host memory
    /// is a memory file. Shared GPU memory does not lie in the same block of the driver as other memory ([`chunk`](super::chunk)).
    pub fn allocate(&self, device: DeviceId, bytes: u64, is_shared: bool) -> Result<u64, BackendError> {
        self.gpus.check_device(device)?;
        self.gpus.check_alive()?;
        let size = bytes.max(1);
        // Host memory is pinned for all GPUs (as portable memory), so any GPU's context can be used.
        let gpu = if device.is_host() { self.gpus.any_used() } else { device.0 as usize };
        if device.is_host() && is_shared {
            let (address, id) = self.sharing.allocate(&self.gpus, device, size)?;
            self.memory.insert(address, Owned { device, bytes: size, gpu, id, located: None, pages: None, registered: None });
            return Ok(address);
        }
        if is_shared
            && !device.is_host()
            && let Some((address, id)) = self.sharing.allocate_on(&self.gpus, gpu, size)?
        {
            self.memory.insert(address, Owned { device, bytes: size, gpu, id, located: None, pages: None, registered: None });
            return Ok(address);
        }
        let (address, pages) = memory::make(&self.gpus, device, gpu, bytes)?;
        self.memory.insert(address, Owned { device, bytes: size, gpu, id: own_id(), located: None, pages, registered: None });
        Ok(address)
    }

    pub fn free(&self, address: u64) -> Result<(), BackendError> {
        let Owned { device, gpu, pages, .. } = self.memory.take(address, false)?;
        let freed = match self.sharing.release(&self.gpus, address) {
            Ok(false) => memory::give_back(&self.gpus, device, gpu, address, pages.as_ref()),
            released => released.map(drop),
        };
        free_spare_blocks(&self.gpus);
        freed
    }

    /// Registers memory that the program has allocated. Implements [`register`](crate::backend::Backend::register).
    pub fn register(&self, address: u64, bytes: u64, huge: bool) -> Result<bool, BackendError> {
        self.gpus.check_alive()?;
        let not_there = || BackendError::NotMapped(address.saturating_add(bytes));
        let pages = usize::try_from(bytes).ok().and_then(|bytes| PageRange::around(address as usize, bytes)).ok_or_else(not_there)?;
        let gpu = self.gpus.any_used();
        let may_write = memory::register(&self.gpus, gpu, pages, huge)?;
        let device = DeviceId::HOST;
        self.memory.insert(address, Owned { device, bytes, gpu, id: own_id(), located: None, pages: None, registered: Some(pages) });
        Ok(may_write)
    }

    pub fn unregister(&self, address: u64) -> Result<(), BackendError> {
        let Owned { gpu, registered, .. } = self.memory.take(address, true)?;
        registered.map_or(Ok(()), |pages| memory::unregister(&self.gpus, gpu, pages))
    }

    pub fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        if let Some(allocation) = self.sharing.locate(address) {
            return Ok(Some(allocation));
        }
        // Device memory of this backend exists until it is freed through this backend or the device is reset.
        if let Some((allocation, gpu)) = self.memory.located_at(address) {
            self.gpus.primary(gpu)?.check()?;
            return Ok(Some(allocation));
        }
        let number = self.memory.number_at(address);
        let attributes = self.gpus.attributes(address)?;
        if attributes.managed != 0 {
            return Err(BackendError::NotSupported(format!(
                "{address:#x} is managed memory, which the driver may move between GPUs while a copy runs; use cudaMalloc, cudaMallocAsync or \
                 cudaHostAlloc, or copy with the CUDA runtime"
            )));
        }
        let (device, kind) = if attributes.is_device() {
            let ordinal = attributes.ordinal.max(0);
            if ordinal as usize >= self.gpus.devices.len() {
                return Ok(None);
            }
            // The GPU has memory of the caller, so its context exists. This call also makes the GPU one of the GPUs in use, which get
            // access to each other's memory.
            self.gpus.primary(ordinal as usize)?;
            (DeviceId(ordinal), MemoryKind::Device)
        } else if attributes.is_host() {
            // The table of this backend's own memory contains more information than some drivers report.
            if let Some(allocation) = self.memory.host_memory_at(address) {
                return Ok(Some(allocation));
            }
            (DeviceId::HOST, MemoryKind::Pinned)
        } else {
            return Ok(None);
        };
        // Some drivers do not report the range of registered host memory. In this case, the memory is treated as if it started at this
        // address.
        let (base, bytes) = match (attributes.start, attributes.bytes as u64) {
            (start, bytes) if start <= address && address - start < bytes => (start, bytes),
            _ => (address, u64::MAX - address),
        };
        // For device memory of this backend, the allocation ends at the size that the caller requested.
        let bytes = self.memory.bytes_from(base).unwrap_or(bytes);
        if address - base >= bytes {
            return Ok(None);
        }
        // Memory to which the driver assigns no buffer ID gets an identifier that is made from its address. This identifier does not
        // distinguish the memory from later memory at the same address.
        let id = if attributes.buffer != 0 { attributes.buffer } else { base | UNNUMBERED };
        let allocation = Allocation { id, base, bytes, device, kind };
        if let Some(number) = number.filter(|_| kind == MemoryKind::Device && attributes.buffer != 0) {
            self.memory.note(number, allocation);
        }
        Ok(Some(allocation))
    }

    /// True if this backend has allocated or mapped the memory at `address`. No other code frees such memory.
    pub fn is_ours(&self, address: u64) -> bool {
        self.sharing.locate(address).is_some() || self.memory.contains(address)
    }

    /// True if kernels of `gpu` can read and write the `bytes` bytes at `address`. `known` contains the attributes of this memory.
    pub fn kernel_reaches(&self, gpu: usize, address: u64, bytes: u64, known: &Attributes) -> Result<bool, BackendError> {
        if let Some(opened) = self.sharing.opened_for(&self.gpus, gpu, address) {
            return Ok(opened.is_some());
        }
        if let Some(owner) = self.sharing.chunk_at(address) {
            return Ok(self.gpus.can_access(gpu, owner));
        }
        if known.is_host() {
            // If this attribute is 0, the GPU uses another address for registered memory than the CPU does.
            let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
            return Ok(self.gpus.driver.attribute(attribute, self.gpus.devices[gpu].ordinal) != 0);
        }
        if !known.is_device() || known.managed != 0 {
            return Ok(false);
        }
        let owner = known.ordinal.max(0) as usize;
        // Access is enabled between GPUs in use. This call makes the owner of the memory a GPU in use.
        self.gpus.primary(owner)?;
        match known.plain {
            0 => self.gpus.is_let_in(gpu, address, bytes, owner),
            _ => Ok(owner == gpu || self.gpus.has_access(gpu, owner)?),
        }
    }

    /// True if a copy that `gpu` makes may read and write the `bytes` bytes at `address`. The result is also true for memory that kernels
    /// of `gpu` cannot access, because the driver copies such memory through a staging buffer. False for memory of pools and of the virtual
    /// memory API to which `gpu` has no access. Also false for memory of another process that is shared by CUDA IPC and cannot be opened
    /// through `gpu`.
    pub fn copies_reach(&self, gpu: usize, address: u64, bytes: u64, known: &Attributes) -> Result<bool, BackendError> {
        let is_staged = || self.sharing.opened_for(&self.gpus, gpu, address).is_none() && (!known.is_device() || known.plain != 0);
        Ok(self.kernel_reaches(gpu, address, bytes, known)? || is_staged())
    }
}
