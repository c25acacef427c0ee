//! Queries the attributes of memory that the driver reports for an address. The attributes are available for memory of any library.

use super::driver::code;
use super::gpus::Gpus;
use crate::backend::BackendError;
use cudarc::driver::sys::{self, CUmemAccess_flags, CUmemorytype, CUpointer_attribute};
use std::ffi::{c_int, c_uint, c_void};
use std::ops::Range;

/// Bit that is set in the identifiers of allocations to which the driver assigns no buffer ID.
pub(super) const UNNUMBERED: u64 = 1 << 62;

/// Attributes of the memory at an address, as reported by the driver.
#[derive(Copy, Clone, Debug, Default)]
pub(super) struct Attributes {
    /// Type of the memory (`CU_POINTER_ATTRIBUTE_MEMORY_TYPE`), or 0 if the driver does not know the memory.
    memory_type: c_uint,
    pub managed: c_uint,
    pub ordinal: c_int,
    pub buffer: u64,
    pub start: u64,
    pub bytes: usize,
    /// Nonzero for memory of `cuMemAlloc`. `cuCtxEnablePeerAccess` grants other GPUs access to this memory. For memory of pools and of the
    /// virtual memory API, access is granted separately for each GPU.
    pub plain: c_uint,
}

impl Attributes {
    pub fn is_device(&self) -> bool {
        self.memory_type == CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint
    }

    pub fn is_host(&self) -> bool {
        self.memory_type == CUmemorytype::CU_MEMORYTYPE_HOST as c_uint
    }

    /// Returns the address range in which these attributes are uniform, which is the whole allocation. Returns `None` for memory of pools
    /// and of the virtual memory API, because different GPUs may have access to different parts of such memory.
    pub fn uniform_range(&self) -> Option<Range<u64>> {
        let uniform = self.plain != 0 || self.is_host();
        uniform.then(|| self.start..self.start.saturating_add(self.bytes as u64))
    }

    /// Returns the GPU that owns the memory, or `None` if the memory is not on a GPU.
    pub fn gpu(&self) -> Option<usize> {
        if self.is_device() { usize::try_from(self.ordinal).ok() } else { None }
    }
}

impl Gpus {
    /// True if the memory at `address` still belongs to the allocation with the identifier `id`. If the driver has assigned no buffer ID,
    /// the result is true for any allocation at this address. Requires a current context.
    pub fn is_still(&self, address: u64, id: u64) -> bool {
        let (mut memory_type, mut buffer): (c_uint, u64) = (0, 0);
        let mut names = [CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID]
            .map(|attribute| attribute as c_uint);
        let mut values: [*mut c_void; 2] = [(&raw mut memory_type).cast(), (&raw mut buffer).cast()];
        // SAFETY: There are two attribute names and two values, and each value has its attribute's type.
        let code = unsafe { (self.driver.cuPointerGetAttributes)(2, names.as_mut_ptr(), values.as_mut_ptr(), address) };
        code == 0 && memory_type != 0 && (buffer == id || buffer == 0 && id & UNNUMBERED != 0)
    }

    /// Returns the attributes of the memory at `address`. All attributes are 0 if the driver does not know the memory.
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
        // SAFETY: There are as many names as values, and each value is a field of the attribute's type. The driver writes a boolean as one
        // byte or as four. Its field has four bytes, which were zero.
        let mut ask = || unsafe { (driver.cuPointerGetAttributes)(count, names.as_mut_ptr(), values.as_mut_ptr(), address) };
        let mut code = ask();
        if code == code::INVALID_CONTEXT {
            // The calling thread has no current context. The query works in any context.
            let Some(primary) = self.any_active()? else {
                // Without a context, there is no memory that the driver could know.
                return Ok(Attributes::default());
            };
            let _current = primary.enter()?;
            code = ask();
        }
        if code != 0 || known.memory_type == 0 {
            // After a reset, the driver no longer knows the memory that existed before.
            self.check_alive()?;
        }
        driver.check("cuPointerGetAttributes", code)?;
        Ok(known)
    }

    /// True if `gpu` may read and write a range of memory that is in a pool or comes from the virtual memory API. `owner` is the GPU that
    /// owns the memory. The owner always has access, and the program may grant access to other GPUs. A range may be mapped from several
    /// chunks (PyTorch's expandable segments), each with its own access permissions.
    pub fn is_let_in(&self, gpu: usize, address: u64, bytes: u64, owner: usize) -> Result<bool, BackendError> {
        let _current = self.peered(gpu)?.enter()?;
        let end = address.saturating_add(bytes.max(1));
        let mut at = address;
        while at < end {
            let (mut flags, mut pool, mut base, mut size): (c_uint, *mut c_void, u64, usize) = (0, std::ptr::null_mut(), 0, 0);
            let mut names = [
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS,
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
            ]
            .map(|attribute| attribute as c_uint);
            let mut values: [*mut c_void; 4] =
                [(&raw mut flags).cast(), (&raw mut pool).cast(), (&raw mut base).cast(), (&raw mut size).cast()];
            // SAFETY: There are as many names as values, and each value has its attribute's type. A driver that does not know the
            // attributes leaves the values unchanged.
            let mut code = unsafe { (self.driver.cuPointerGetAttributes)(4, names.as_mut_ptr(), values.as_mut_ptr(), at) };
            // If the driver reports no chunk, the whole range is treated as one chunk.
            let chunk_end = base.saturating_add(size as u64);
            let chunk_end = if base != 0 && pool.is_null() && (base..chunk_end).contains(&at) { chunk_end } else { end };
            if gpu == owner && at == address && chunk_end >= end {
                return Ok(true);
            }
            if !pool.is_null() {
                // The attribute alone is not reliable. It reported access to memory of a pool for a GPU without access, and copies by this
                // GPU failed (driver 580, H200).
                let Some(get_access) = self.driver.cuMemPoolGetAccess else { return Ok(false) };
                flags = 0;
                let mut location =
                    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.devices[gpu].ordinal };
                // SAFETY: The driver has just returned this pool for memory that the caller keeps allocated, so the pool exists. The other
                // arguments are variables that outlive the call.
                code = unsafe { get_access(&mut flags, pool, &mut location) };
            }
            if code != 0 || flags != CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_uint {
                return Ok(false);
            }
            at = chunk_end;
        }
        Ok(true)
    }
}
