//! Memory: what this backend gives out, and what the driver knows of any address.

use super::Core;
use super::device::{Primary, handle, lock};
use super::driver::{CUdeviceptr, OutsideCapture, call, code};
use super::host_memory::HostPages;
use crate::backend::{Allocation, BackendError, MemoryKind};
use crate::topology::DeviceId;
use cudarc::driver::sys::{self, CUdevice_attribute, CUmemAccess_flags, CUmemorytype, CUpointer_attribute};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Host memory from this size on is in pages of our own, spread over the sockets; smaller is a range of a memory file, which other
/// processes can map. Memory files have ordinary pages on one socket. That costs smaller buffers nothing: they go over one PCIe link,
/// which one socket's memory feeds (plans take several links from 4 MiB on, docs/performance.md), and have at most one huge page.
pub(super) const SPREAD_FROM: usize = 4 << 20;

/// Memory of another process is as fast as one's own where its allocation is a multiple of this. Two H200, driver 580, copies of 1 GiB into
/// memory of CUDA IPC: every fourth took 2870 us, the others 2715, where the allocation was 1 GiB and 256 bytes; all took 2710 where it was
/// 1 GiB, or 64 KiB, 1 MiB, 2 MiB or 64 MiB more. As if it were mapped in pages of 64 KiB, or else in smaller ones.
pub(super) const SHARED_PAGE: u64 = 64 << 10;

/// Device memory from this size on is given out in whole [`SHARED_PAGE`]s. The driver takes it from the GPU in pages of 2 MiB anyway, while
/// smaller allocations lie together in one.
pub(super) const PAGED_FROM: u64 = 1 << 20;

/// Every GPU of the process reads and writes the memory directly, not only the one whose context is current. The same bit for
/// `cuMemHostAlloc` and `cuMemHostRegister`.
const PORTABLE: c_uint = 1;

/// What `allocate` has given out, by the first address.
pub(super) type Given = BTreeMap<u64, Owned>;

/// One allocation that this backend has given out.
#[derive(Debug)]
pub(super) struct Owned {
    device: DeviceId,
    /// As asked for, and at least 1.
    bytes: u64,
    /// The GPU whose context it was made in.
    gpu: usize,
    /// Of host memory, because not every driver numbers registered memory. From [`own_id`].
    id: u64,
    /// Host memory in pages of our own, registered with the driver. Memory files are held by `share`.
    pages: Option<HostPages>,
}

/// Marks the number of memory that the driver gives none.
const UNNUMBERED: u64 = 1 << 62;

/// A number that the driver, which counts up from 1, does not come to.
pub(super) fn own_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 63);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

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

    /// The GPU whose memory it is.
    pub fn gpu(&self) -> Option<usize> {
        if self.is_device() { usize::try_from(self.ordinal).ok() } else { None }
    }
}

impl Core {
    pub fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.check_device(device)?;
        self.check_alive()?;
        let driver = self.driver;
        let out_of_memory = || BackendError::OutOfMemory { device: device.0, bytes };
        let size = usize::try_from(bytes.max(1)).map_err(|_| out_of_memory())?;
        // Host memory is pinned in the context of some GPU, and portable.
        let gpu = if device.is_host() { self.any_used() } else { device.0 as usize };
        if device.is_host()
            && size < SPREAD_FROM
            && let Some((address, id)) = self.allocate_shareable(device, size as u64)?
        {
            lock(&self.memory).insert(address, Owned { device, bytes: size as u64, gpu, id, pages: None });
            return Ok(address);
        }
        let primary = self.primary(gpu)?;
        let _outside = OutsideCapture::enter(driver);
        let _current = primary.enter()?;
        let check = |what, code| if code == code::OUT_OF_MEMORY { Err(out_of_memory()) } else { driver.check(what, code) };
        let mut pages = None;
        let address = if device.is_host() {
            pages = self.register_pages(device, size).map_err(|_| out_of_memory())?;
            if let Some(pages) = &pages {
                pages.base() as u64
            } else {
                let mut pointer: *mut c_void = std::ptr::null_mut();
                // SAFETY: the output is valid for the call.
                check("cuMemHostAlloc", unsafe { (driver.cuMemHostAlloc)(&mut pointer, size, PORTABLE) })?;
                pointer.expose_provenance() as u64
            }
        } else {
            let mut pointer: CUdeviceptr = 0;
            let size =
                if bytes >= PAGED_FROM { size.checked_next_multiple_of(SHARED_PAGE as usize).ok_or_else(out_of_memory)? } else { size };
            // SAFETY: the output is valid for the call.
            check("cuMemAlloc", unsafe { (driver.cuMemAlloc)(&mut pointer, size) })?;
            pointer
        };
        lock(&self.memory).insert(address, Owned { device, bytes: bytes.max(1), gpu, id: own_id(), pages });
        Ok(address)
    }

    /// Host memory in pages of our own. `None` where it is not worth it, or where the driver or the system would not have it, which is
    /// logged: `cuMemHostAlloc` is the other way. An error where there is not so much memory. A context is current.
    fn register_pages(&self, device: DeviceId, size: usize) -> io::Result<Option<HostPages>> {
        if size < SPREAD_FROM {
            return Ok(None);
        }
        // The first domain stands for host memory in general.
        let domain = if device == DeviceId::HOST { None } else { Some(!device.0 as usize) };
        let refused: String = match HostPages::new(size, domain) {
            Ok(pages) => {
                // SAFETY: whole pages, which stay mapped until they are unregistered.
                let code = unsafe { (self.driver.cuMemHostRegister)(handle(pages.base()), pages.bytes(), PORTABLE) };
                if code == 0 {
                    return Ok(Some(pages));
                }
                self.driver.error("cuMemHostRegister", code).to_string()
            }
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory => return Err(error),
            Err(error) => error.to_string(),
        };
        log::warn!("{size} bytes of host memory come from one socket, because spread pages could not be had: {refused}");
        Ok(None)
    }

    pub fn free(&self, address: u64) -> Result<(), BackendError> {
        let Owned { device, gpu, pages, .. } = lock(&self.memory).remove(&address).ok_or(BackendError::InvalidPointer(address))?;
        if self.release_held(address)? {
            return Ok(());
        }
        let primary = self.primary(gpu)?;
        if primary.is_lost() {
            return Ok(());
        }
        let _outside = OutsideCapture::enter(self.driver);
        // Tried all the same where that fails: nobody else would free it.
        let _current = primary.enter();
        // SAFETY: given out by `allocate`, and taken out of the registry just now, so nobody frees it again. The caller vouches that
        // work which uses it has finished. Pages of our own are unmapped afterwards, whatever the driver said: it holds them by itself.
        unsafe {
            if pages.is_some() {
                call!(self.driver, cuMemHostUnregister(handle(address as usize)))
            } else if device.is_host() {
                call!(self.driver, cuMemFreeHost(handle(address as usize)))
            } else {
                call!(self.driver, cuMemFree(address))
            }
        }
    }

    pub fn allocated_bytes(&self, device: DeviceId) -> u64 {
        lock(&self.memory).values().filter(|owned| owned.device == device).map(|owned| owned.bytes).sum()
    }

    /// The size of the host memory of `allocate` that starts at an address.
    pub fn own_host_bytes(&self, base: u64) -> Option<u64> {
        lock(&self.memory).get(&base).filter(|owned| owned.device.is_host()).map(|owned| owned.bytes)
    }

    /// Whether `allocate` has given out the memory that starts at an address.
    pub fn is_own(&self, base: u64) -> bool {
        lock(&self.memory).contains_key(&base)
    }

    pub fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        if let Some(allocation) = self.sharing.locate(address) {
            return Ok(Some(allocation));
        }
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
            // Of our own memory we know more than every driver tells.
            if let Some((base, owned)) = lock(&self.memory).range(..=address).next_back()
                && address - base < owned.bytes
            {
                return Ok(Some(Allocation {
                    id: owned.id,
                    base: *base,
                    bytes: owned.bytes,
                    device: owned.device,
                    kind: MemoryKind::Pinned,
                }));
            }
            (DeviceId::HOST, MemoryKind::Pinned)
        } else {
            return Ok(None);
        };
        // Not every driver tells the range of registered host memory. Then the address itself is all that is known to be inside.
        let (base, bytes) = match (attributes.start, attributes.bytes as u64) {
            (start, bytes) if start <= address && address - start < bytes => (start, bytes),
            _ => (address, u64::MAX - address),
        };
        // The end of our own device memory is where the caller asked for it.
        let bytes = lock(&self.memory).get(&base).map_or(bytes, |owned| owned.bytes);
        if address - base >= bytes {
            return Ok(None);
        }
        // Memory that the driver does not number has the number of its address, and is not told from what comes to lie there later.
        let id = if attributes.buffer != 0 { attributes.buffer } else { base | UNNUMBERED };
        Ok(Some(Allocation { id, base, bytes, device, kind }))
    }

    /// Whether memory at an address is this backend's own or mapped by it, so that nobody else frees it.
    pub fn is_ours(&self, address: u64) -> bool {
        let inside = |base: u64, bytes: u64| address - base < bytes;
        self.sharing.locate(address).is_some()
            || lock(&self.memory).range(..=address).next_back().is_some_and(|(base, owned)| inside(*base, owned.bytes))
    }

    /// Whether an address lies in the allocation that it once did. Where the driver numbers none, in any. A context is current.
    pub fn is_still(&self, address: u64, id: u64) -> bool {
        let (mut memory_type, mut buffer): (c_uint, u64) = (0, 0);
        let mut names = [CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID]
            .map(|attribute| attribute as c_uint);
        let mut values: [*mut c_void; 2] = [(&raw mut memory_type).cast(), (&raw mut buffer).cast()];
        // SAFETY: two names and two values of the attributes' types.
        let code = unsafe { (self.driver.cuPointerGetAttributes)(2, names.as_mut_ptr(), values.as_mut_ptr(), address) };
        code == 0 && memory_type != 0 && (buffer == id || buffer == 0 && id & UNNUMBERED != 0)
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
            // This thread has no current context; any will do.
            let Some(primary) = self.any_active()? else {
                // No context, no memory that the driver could know.
                return Ok(Attributes::default());
            };
            let _current = primary.enter()?;
            code = ask();
        }
        if code != 0 || known.memory_type == 0 {
            // After a reset the driver knows nothing of what was there.
            self.check_alive()?;
        }
        driver.check("cuPointerGetAttributes", code)?;
        Ok(known)
    }

    /// A primary context that exists: one in use, or else one that somebody else in the process has made. None is made for this.
    fn any_active(&self) -> Result<Option<&Primary>, BackendError> {
        if let Some(primary) = self.devices.iter().find_map(|device| device.used()) {
            return Ok(Some(primary));
        }
        self.active_gpu().map(|gpu| self.primary(gpu)).transpose()
    }

    /// Whether a kernel of `gpu` can read and write at `address`, of which the driver knows this.
    pub fn kernel_reaches(&self, gpu: usize, address: u64, known: &Attributes) -> Result<bool, BackendError> {
        if let Some(opened) = self.opened_for(gpu, address) {
            return Ok(opened.is_some());
        }
        if known.is_host() {
            // Elsewhere registered memory has another address on the GPU.
            let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
            return Ok(self.driver.attribute(attribute, self.devices[gpu].ordinal) != 0);
        }
        if !known.is_device() || known.managed != 0 {
            return Ok(false);
        }
        let owner = known.ordinal.max(0) as usize;
        if owner == gpu {
            return Ok(true);
        }
        // Access is given between GPUs in use, and one whose memory is in a plan is.
        self.primary(owner)?;
        if known.plain != 0 { self.has_access(gpu, owner) } else { self.is_let_in(gpu, address) }
    }

    /// Whether a copy that `gpu` makes may have an end there. What its kernels do not reach the driver stages, but not memory of pools and
    /// mappings that it has not been let into, and memory of another process has another address there.
    pub fn copies_reach(&self, gpu: usize, address: u64, known: &Attributes) -> Result<bool, BackendError> {
        let is_staged = || self.opened_for(gpu, address).is_none() && (!known.is_device() || known.plain != 0);
        Ok(self.kernel_reaches(gpu, address, known)? || is_staged())
    }

    /// Whether `gpu` may read and write memory of another one's pool or mapping: it is the caller who lets it in.
    fn is_let_in(&self, gpu: usize, address: u64) -> Result<bool, BackendError> {
        let _current = self.reach(gpu)?.enter()?;
        let mut flags: c_uint = 0;
        let mut pool: *mut c_void = std::ptr::null_mut();
        let mut names = [CUpointer_attribute::CU_POINTER_ATTRIBUTE_ACCESS_FLAGS, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE]
            .map(|attribute| attribute as c_uint);
        let mut values: [*mut c_void; 2] = [(&raw mut flags).cast(), (&raw mut pool).cast()];
        // SAFETY: two names and two values of the attributes' types. Drivers that do not know the attributes leave them as they are.
        let mut code = unsafe { (self.driver.cuPointerGetAttributes)(2, names.as_mut_ptr(), values.as_mut_ptr(), address) };
        if !pool.is_null() {
            // By the attribute alone, copies of memory of a pool that lets nobody in were tried and failed (driver 580, H200).
            let Some(get_access) = self.driver.cuMemPoolGetAccess else { return Ok(false) };
            flags = 0;
            let mut location =
                sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.devices[gpu].ordinal };
            // SAFETY: a pool that the driver named just now, of memory that the caller keeps; the others are valid for the call.
            code = unsafe { get_access(&mut flags, pool, &mut location) };
        }
        Ok(code == 0 && flags == CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as c_uint)
    }
}

#[cfg(test)]
mod tests {
    use super::super::CudaBackend;
    use super::super::double;
    use super::{PAGED_FROM, SHARED_PAGE};
    use crate::backend::Backend;
    use crate::topology::DeviceId;

    #[test]
    fn large_device_memory_is_made_of_whole_pages_and_ends_where_the_caller_asked() {
        double::start(2, true);
        let backend = CudaBackend::on(double::driver(), 1).expect("the double has GPUs");
        let gpu = DeviceId::gpu(1);
        for (asked, made) in
            [(1, 1), (PAGED_FROM - 1, PAGED_FROM - 1), (PAGED_FROM, PAGED_FROM), (PAGED_FROM + 1, PAGED_FROM + SHARED_PAGE)]
        {
            let base = backend.allocate(gpu, asked).expect("memory");
            assert_eq!(backend.0.attributes(base).expect("known").bytes as u64, made);
            let known = backend.locate(base + asked - 1).expect("an answer").expect("inside");
            assert_eq!((known.base, known.bytes, known.device), (base, asked, gpu));
            if made > asked {
                assert!(backend.locate(base + asked).expect("an answer").is_none(), "what the caller did not ask for is nobody's");
            }
            backend.free(base).expect("freed");
        }
        let too_much = backend.allocate(gpu, u64::MAX - 1).expect_err("more than there is").to_string();
        assert!(too_much.contains(&(u64::MAX - 1).to_string()), "{too_much}");
    }
}
