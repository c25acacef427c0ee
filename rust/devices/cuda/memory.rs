//! Allocates the memory of this backend and keeps a table of it. The table is not locked while the driver allocates or frees.

use super::driver::{CUdeviceptr, OutsideCapture, call, code, handle, lock};
use super::gpus::Gpus;
use crate::backend::host_memory::{HostPages, PageRange};
use crate::backend::{Allocation, BackendError, MemoryKind, REGISTERED_PIECE};
use crate::topology::DeviceId;
use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Host memory of at least this many bytes is distributed over the NUMA nodes, and uses huge pages unless it is shared. Shared host memory
/// consists of memory files, for which few systems offer huge pages. Smaller buffers are not distributed. They are copied over one PCIe
/// link, which the memory of one NUMA node can saturate (plans use several links only for transfers of at least 4 MiB, docs/results.md).
/// Smaller buffers also use no huge pages, because they would contain at most one.
pub(super) const SPREAD_FROM: usize = 4 << 20;

/// Number of bytes to whose multiples the size of device memory is rounded up. Other processes can then access the memory as fast as local
/// memory. Measured with copies of 1 GiB to memory of CUDA IPC (two H200, driver 580): if the allocation has 1 GiB and 256 bytes, every
/// fourth copy takes 2870 us and the others take 2715 us. If the allocation has 1 GiB, or 1 GiB and 64 KiB, 1 MiB, 2 MiB or 64 MiB, all
/// copies take 2710 us. Presumably the driver maps the memory in pages of 64 KiB if possible, and otherwise in smaller pages.
pub(super) const SHARED_PAGE: u64 = 64 << 10;

/// Minimum size in bytes of device memory whose size is rounded up to a multiple of [`SHARED_PAGE`]. Rounding wastes no memory, because the
/// driver allocates device memory of this size in pages of 2 MiB. Smaller allocations are not rounded, because several of them share one
/// such page.
pub(super) const PAGED_FROM: u64 = 1 << 20;

/// Flag of `cuMemHostAlloc` and `cuMemHostRegister` by which all GPUs of the process can access the memory directly. Without the flag, only
/// the GPU whose context is current during the call can access the memory directly.
const PORTABLE: c_uint = 1;
/// Flag of `cuMemHostRegister` for memory that the GPUs may only read.
const READ_ONLY: c_uint = 8;

/// Table of the memory that this backend has allocated or registered, by first address.
#[derive(Debug, Default)]
pub(super) struct Memory(Mutex<BTreeMap<u64, Owned>>);

/// Memory that this backend has allocated or registered.
#[derive(Debug)]
pub(super) struct Owned {
    pub device: DeviceId,
    /// Requested size of the memory in bytes, at least 1.
    pub bytes: u64,
    /// GPU in whose context the memory was allocated.
    pub gpu: usize,
    /// Unique number of the memory, from [`own_id`]. It is needed because some drivers assign no buffer ID to registered memory.
    pub id: u64,
    /// Attributes of device memory as reported by the driver. `None` for host memory, and until the attributes are known.
    pub located: Option<Allocation>,
    /// Pages of host memory that this library has mapped and registered with the driver. `None` for other memory. (The pages of memory
    /// files are stored in the module `sharing`.)
    pub pages: Option<HostPages>,
    /// Pages that the program has allocated and registered through this backend. `None` for other memory.
    pub registered: Option<PageRange>,
}

/// Returns a unique number for an allocation. The numbers start at 2^63. They never equal a buffer ID of the driver, because these IDs
/// count up from 1.
pub(super) fn own_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 63);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Memory {
    pub fn insert(&self, address: u64, owned: Owned) {
        lock(&self.0).insert(address, owned);
    }

    /// Removes the entry of the memory that starts at `address` from the table, and returns the entry. The caller must free or unregister
    /// the memory. Returns an error unless the memory was registered (if `is_registered` is true) or allocated (otherwise).
    pub fn take(&self, address: u64, is_registered: bool) -> Result<Owned, BackendError> {
        let mut given = lock(&self.0);
        match given.get(&address) {
            Some(owned) if owned.registered.is_some() == is_registered => given.remove(&address),
            _ => None,
        }
        .ok_or(BackendError::InvalidPointer(address))
    }

    /// Removes the table entry of the memory at `address`, which other code has freed.
    pub fn forget(&self, address: u64) {
        lock(&self.0).remove(&address);
    }

    /// Returns the host allocation that contains an address. Returns `None` if this backend has neither allocated nor registered the
    /// memory.
    pub fn host_memory_at(&self, address: u64) -> Option<Allocation> {
        let given = lock(&self.0);
        let (base, owned) = given.range(..=address).next_back().filter(|(base, owned)| address - **base < owned.bytes)?;
        Some(Allocation { id: owned.id, base: *base, bytes: owned.bytes, device: owned.device, kind: MemoryKind::Pinned })
    }

    /// Returns the stored attributes of the device memory that contains `address`, and the GPU in whose context the memory was allocated.
    /// Returns `None` if the table contains no such memory or no attributes of it.
    pub fn located_at(&self, address: u64) -> Option<(Allocation, usize)> {
        let given = lock(&self.0);
        let (_, owned) = given.range(..=address).next_back().filter(|(base, owned)| address - **base < owned.bytes)?;
        owned.located.map(|allocation| (allocation, owned.gpu))
    }

    /// Returns the unique number of the memory that contains an address, or `None` if the memory is not in the table.
    pub fn number_at(&self, address: u64) -> Option<u64> {
        lock(&self.0).range(..=address).next_back().filter(|(base, owned)| address - **base < owned.bytes).map(|(_, owned)| owned.id)
    }

    /// Stores the attributes that the driver has reported for memory. `number` is the memory's number before the query. If another
    /// allocation has replaced the memory since, nothing is stored.
    pub fn note(&self, number: u64, allocation: Allocation) {
        lock(&self.0)
            .get_mut(&allocation.base)
            .filter(|owned| owned.id == number)
            .into_iter()
            .for_each(|owned| owned.located = Some(allocation));
    }

    /// True if `address` is in memory that this backend has allocated or registered.
    pub fn contains(&self, address: u64) -> bool {
        lock(&self.0).range(..=address).next_back().is_some_and(|(base, owned)| address - base < owned.bytes)
    }

    /// Returns the requested size in bytes of the memory that starts at an address. Returns `None` if no memory of the table starts there.
    pub fn bytes_from(&self, base: u64) -> Option<u64> {
        lock(&self.0).get(&base).map(|owned| owned.bytes)
    }

    /// Frees all memory that this backend has allocated, and unregisters all memory that it has registered. No work may use the memory any
    /// more.
    pub fn release(&self, gpus: &Gpus) {
        let left = std::mem::take(&mut *lock(&self.0));
        for (address, owned) in left {
            let _ = match owned.registered {
                Some(pages) => unregister(gpus, owned.gpu, pages),
                None => give_back(gpus, owned.device, owned.gpu, address, owned.pages.as_ref()),
            };
        }
    }

    pub fn allocated_bytes(&self, device: DeviceId) -> u64 {
        let of_device = |owned: &&Owned| owned.device == device && owned.registered.is_none();
        lock(&self.0).values().filter(of_device).map(|owned| owned.bytes).sum()
    }

    /// True if memory that this backend has allocated or registered starts at the address `base`.
    pub fn is_own(&self, base: u64) -> bool {
        lock(&self.0).contains_key(&base)
    }
}

/// Allocates memory of `device` and returns its address, and the pages if this library has mapped them. Device memory is allocated by
/// `cuMemAlloc`, and host memory is pinned in the context of `gpu`. The memory is not added to the table. Host memory allocated here cannot
/// be mapped by other processes.
pub(super) fn make(gpus: &Gpus, device: DeviceId, gpu: usize, bytes: u64) -> Result<(u64, Option<HostPages>), BackendError> {
    let driver = gpus.driver;
    let out_of_memory = || BackendError::OutOfMemory { device: device.0, bytes };
    let size = usize::try_from(bytes.max(1)).map_err(|_| out_of_memory())?;
    let primary = gpus.primary(gpu)?;
    let _outside = OutsideCapture::enter(driver);
    let _current = primary.enter()?;
    let check = |what, code| if code == code::OUT_OF_MEMORY { Err(out_of_memory()) } else { driver.check(what, code) };
    if !device.is_host() {
        let mut pointer: CUdeviceptr = 0;
        let size = if bytes >= PAGED_FROM { size.checked_next_multiple_of(SHARED_PAGE as usize).ok_or_else(out_of_memory)? } else { size };
        // SAFETY: The driver writes to a variable that outlives the call.
        check("cuMemAlloc", unsafe { (driver.cuMemAlloc)(&mut pointer, size) })?;
        return Ok((pointer, None));
    }
    if let Some(pages) = register_pages(gpus, device, size).map_err(|_| out_of_memory())? {
        return Ok((pages.base() as u64, Some(pages)));
    }
    let mut pointer: *mut c_void = std::ptr::null_mut();
    // SAFETY: The driver writes to a variable that outlives the call.
    check("cuMemHostAlloc", unsafe { (driver.cuMemHostAlloc)(&mut pointer, size, PORTABLE) })?;
    Ok((pointer.expose_provenance() as u64, None))
}

/// Returns the NUMA node of a host NUMA domain. Returns `None` for the first domain, which represents host memory in general.
pub(super) fn domain_of(device: DeviceId) -> Option<usize> {
    if device == DeviceId::HOST { None } else { Some(!device.0 as usize) }
}

/// Allocates host memory in pages that this library maps and registers with the driver. Returns `None` for small sizes, and if the driver
/// or the system refuses, which is logged. The caller then uses `cuMemHostAlloc`. Returns an error if there is not enough memory. Requires
/// a current context.
fn register_pages(gpus: &Gpus, device: DeviceId, size: usize) -> io::Result<Option<HostPages>> {
    if size < SPREAD_FROM {
        return Ok(None);
    }
    let refused: String = match HostPages::new(size, domain_of(device)) {
        Ok(pages) => {
            // SAFETY: The range consists of whole pages, which stay mapped until they are unregistered.
            let code = unsafe { (gpus.driver.cuMemHostRegister)(handle(pages.base()), pages.bytes(), PORTABLE) };
            if code == 0 {
                return Ok(Some(pages));
            }
            gpus.driver.error("cuMemHostRegister", code).to_string()
        }
        Err(error) if error.kind() == io::ErrorKind::OutOfMemory => return Err(error),
        Err(error) => error.to_string(),
    };
    log::warn!("{size} bytes of host memory are on one socket, because pages cannot be spread over all sockets: {refused}");
    Ok(None)
}

/// Pins pages that the program has allocated, for all GPUs. Returns true if all of the pages are writable. If the function returns an
/// error, no page stays pinned.
pub(super) fn register(gpus: &Gpus, gpu: usize, pages: PageRange, huge: bool) -> Result<bool, BackendError> {
    let primary = gpus.primary(gpu)?;
    let (pinned, is_written) = (Mutex::new(Vec::new()), AtomicBool::new(true));
    let pin = |piece: PageRange, may_write: bool| {
        let _outside = OutsideCapture::enter(gpus.driver);
        let _current = primary.enter()?;
        let flags = if may_write { PORTABLE } else { PORTABLE | READ_ONLY };
        // SAFETY: The pages existed a moment ago, and the program guarantees that they stay mapped until they are unregistered. If the
        // program breaks this rule, the driver itself keeps the pages.
        match unsafe { (gpus.driver.cuMemHostRegister)(handle(piece.base), piece.bytes, flags) } {
            0 => lock(&pinned).push(piece),
            code::HOST_MEMORY_ALREADY_REGISTERED => {
                let reason = "the program or another library has already pinned this memory, or a part of its first or last page; copies \
                              use it without registration";
                return Err(BackendError::NotSupported(format!("{:#x} cannot be registered: {reason}", piece.base)));
            }
            refused if !may_write => {
                let refused = gpus.driver.error("cuMemHostRegister", refused);
                return Err(BackendError::NotSupported(format!(
                    "{:#x} is read-only, and the driver does not pin read-only memory: map it writable, or do not register it ({refused})",
                    piece.base
                )));
            }
            code::OUT_OF_MEMORY => return Err(BackendError::OutOfMemory { device: DeviceId::HOST.0, bytes: piece.bytes as u64 }),
            refused => return Err(gpus.driver.error("cuMemHostRegister", refused)),
        }
        is_written.fetch_and(may_write, Ordering::Relaxed);
        Ok(())
    };
    pages.bring_in(REGISTERED_PIECE as usize, huge, pin).inspect_err(|_| {
        for piece in &*lock(&pinned) {
            let _ = unregister(gpus, gpu, *piece);
        }
    })?;
    Ok(is_written.into_inner())
}

/// Unpins pages that [`register`] has pinned. `pages` is the whole range or one of the pieces in which it was pinned. All work that uses
/// the pages must have finished.
pub(super) fn unregister(gpus: &Gpus, gpu: usize, pages: PageRange) -> Result<(), BackendError> {
    let primary = gpus.primary(gpu)?;
    if primary.is_lost() {
        return Ok(());
    }
    let _outside = OutsideCapture::enter(gpus.driver);
    // Unpinning is tried even if the context cannot be made current, because no other code would unpin the pages.
    let _current = primary.enter();
    // SAFETY: `register` pinned the piece, and each piece is unpinned once.
    let unpin = |piece: PageRange| unsafe { call!(gpus.driver, cuMemHostUnregister(handle(piece.base))) };
    pages.pieces(REGISTERED_PIECE as usize).map(unpin).fold(Ok(()), Result::and)
}

/// Frees memory that [`make`] has allocated. The caller drops `pages` afterwards, which unmaps them.
pub(super) fn give_back(gpus: &Gpus, device: DeviceId, gpu: usize, address: u64, pages: Option<&HostPages>) -> Result<(), BackendError> {
    let primary = gpus.primary(gpu)?;
    if primary.is_lost() {
        return Ok(());
    }
    let _outside = OutsideCapture::enter(gpus.driver);
    // Freeing is tried even if the context cannot be made current, because no other code would free the memory.
    let _current = primary.enter();
    // SAFETY: `make` allocated the memory, and it has been removed from its table, so it is freed once. The caller guarantees that work
    // which uses the memory has finished. Pages of this library are unmapped afterwards even if the call fails, because the driver itself
    // keeps the pages.
    unsafe {
        if pages.is_some() {
            call!(gpus.driver, cuMemHostUnregister(handle(address as usize)))
        } else if device.is_host() {
            call!(gpus.driver, cuMemFreeHost(handle(address as usize)))
        } else {
            call!(gpus.driver, cuMemFree(address))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::CudaBackend;
    use super::super::tests::double;
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
            assert_eq!(backend.0.gpus.attributes(base).expect("known").bytes as u64, made);
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
