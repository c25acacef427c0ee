//! Memory that this backend gives out, with the table of it. The table is not locked while the driver allocates or frees.

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

/// Host memory from this size on is spread over the sockets, and in huge pages unless other processes are to map it: few systems give memory
/// files huge pages. Smaller buffers need neither: they go over one PCIe link, which one socket's memory feeds (plans take several links from
/// 4 MiB on, docs/results.md), and have at most one huge page.
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
/// For memory that may not be written.
const READ_ONLY: c_uint = 8;

/// What was given out, by the first address.
#[derive(Debug, Default)]
pub(super) struct Memory(Mutex<BTreeMap<u64, Owned>>);

/// One allocation that this backend has given out.
#[derive(Debug)]
pub(super) struct Owned {
    pub device: DeviceId,
    /// As asked for, and at least 1.
    pub bytes: u64,
    /// The GPU whose context it was made in.
    pub gpu: usize,
    /// Of host memory, because not every driver numbers registered memory. From [`own_id`].
    pub id: u64,
    /// Of device memory, what the driver has told of it.
    pub located: Option<Allocation>,
    /// Host memory in pages of our own, registered with the driver. Memory files are held by `share`.
    pub pages: Option<HostPages>,
    /// The program's own, which it has registered.
    pub registered: Option<PageRange>,
}

/// A number that the driver, which counts up from 1, does not come to.
pub(super) fn own_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 63);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Memory {
    pub fn insert(&self, address: u64, owned: Owned) {
        lock(&self.0).insert(address, owned);
    }

    /// Takes memory out of the table, registered or not. Whoever does it frees it.
    pub fn take(&self, address: u64, is_registered: bool) -> Result<Owned, BackendError> {
        let mut given = lock(&self.0);
        match given.get(&address) {
            Some(owned) if owned.registered.is_some() == is_registered => given.remove(&address),
            _ => None,
        }
        .ok_or(BackendError::InvalidPointer(address))
    }

    /// Somebody else has freed it.
    pub fn forget(&self, address: u64) {
        lock(&self.0).remove(&address);
    }

    /// The host memory that an address lies in.
    pub fn host_memory_at(&self, address: u64) -> Option<Allocation> {
        let given = lock(&self.0);
        let (base, owned) = given.range(..=address).next_back().filter(|(base, owned)| address - **base < owned.bytes)?;
        Some(Allocation { id: owned.id, base: *base, bytes: owned.bytes, device: owned.device, kind: MemoryKind::Pinned })
    }

    /// What was noted of the device memory that an address lies in, and the GPU in whose context it was made.
    pub fn located_at(&self, address: u64) -> Option<(Allocation, usize)> {
        let given = lock(&self.0);
        let (_, owned) = given.range(..=address).next_back().filter(|(base, owned)| address - **base < owned.bytes)?;
        owned.located.map(|allocation| (allocation, owned.gpu))
    }

    /// The number of the memory that an address lies in, which is never another's.
    pub fn number_at(&self, address: u64) -> Option<u64> {
        lock(&self.0).range(..=address).next_back().filter(|(base, owned)| address - **base < owned.bytes).map(|(_, owned)| owned.id)
    }

    /// Notes what the driver tells of memory that had this number before it was asked, if it has it still.
    pub fn note(&self, number: u64, allocation: Allocation) {
        lock(&self.0)
            .get_mut(&allocation.base)
            .filter(|owned| owned.id == number)
            .into_iter()
            .for_each(|owned| owned.located = Some(allocation));
    }

    /// Whether an address lies in memory that was given out.
    pub fn contains(&self, address: u64) -> bool {
        lock(&self.0).range(..=address).next_back().is_some_and(|(base, owned)| address - base < owned.bytes)
    }

    /// The size of the memory that starts at an address, as it was asked for.
    pub fn bytes_from(&self, base: u64) -> Option<u64> {
        lock(&self.0).get(&base).map(|owned| owned.bytes)
    }

    /// Frees all. No work uses it.
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

    /// Whether `allocate` has given out the memory that starts at an address.
    pub fn is_own(&self, base: u64) -> bool {
        lock(&self.0).contains_key(&base)
    }
}

/// Memory of a device that is the caller's alone, which other processes cannot map: it is in no table. Host memory is pinned in the
/// context of `gpu`.
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
        // SAFETY: the output is valid for the call.
        check("cuMemAlloc", unsafe { (driver.cuMemAlloc)(&mut pointer, size) })?;
        return Ok((pointer, None));
    }
    if let Some(pages) = register_pages(gpus, device, size).map_err(|_| out_of_memory())? {
        return Ok((pages.base() as u64, Some(pages)));
    }
    let mut pointer: *mut c_void = std::ptr::null_mut();
    // SAFETY: the output is valid for the call.
    check("cuMemHostAlloc", unsafe { (driver.cuMemHostAlloc)(&mut pointer, size, PORTABLE) })?;
    Ok((pointer.expose_provenance() as u64, None))
}

/// The NUMA node whose memory a host domain stands for; `None` for the first, which stands for host memory in general.
pub(super) fn domain_of(device: DeviceId) -> Option<usize> {
    if device == DeviceId::HOST { None } else { Some(!device.0 as usize) }
}

/// Host memory in pages of our own. `None` where it is not worth it, or where the driver or the system would not have it, which is
/// logged: `cuMemHostAlloc` is the other way. An error where there is not so much memory. A context is current.
fn register_pages(gpus: &Gpus, device: DeviceId, size: usize) -> io::Result<Option<HostPages>> {
    if size < SPREAD_FROM {
        return Ok(None);
    }
    let refused: String = match HostPages::new(size, domain_of(device)) {
        Ok(pages) => {
            // SAFETY: whole pages, which stay mapped until they are unregistered.
            let code = unsafe { (gpus.driver.cuMemHostRegister)(handle(pages.base()), pages.bytes(), PORTABLE) };
            if code == 0 {
                return Ok(Some(pages));
            }
            gpus.driver.error("cuMemHostRegister", code).to_string()
        }
        Err(error) if error.kind() == io::ErrorKind::OutOfMemory => return Err(error),
        Err(error) => error.to_string(),
    };
    log::warn!("{size} bytes of host memory come from one socket, because spread pages could not be had: {refused}");
    Ok(None)
}

/// Pins pages of the program's own, for all GPUs; whether they may be written. On an error none is pinned.
pub(super) fn register(gpus: &Gpus, gpu: usize, pages: PageRange, huge: bool) -> Result<bool, BackendError> {
    let primary = gpus.primary(gpu)?;
    let (pinned, is_written) = (Mutex::new(Vec::new()), AtomicBool::new(true));
    let pin = |piece: PageRange, may_write: bool| {
        let _outside = OutsideCapture::enter(gpus.driver);
        let _current = primary.enter()?;
        let flags = if may_write { PORTABLE } else { PORTABLE | READ_ONLY };
        // SAFETY: pages that were there a moment ago. The program vouches that they stay until they are unregistered; the driver holds them itself.
        match unsafe { (gpus.driver.cuMemHostRegister)(handle(piece.base), piece.bytes, flags) } {
            0 => lock(&pinned).push(piece),
            code::HOST_MEMORY_ALREADY_REGISTERED => {
                let reason = "the program or another library has pinned it, or a part of its first or last page: copies use that";
                return Err(BackendError::NotSupported(format!("{:#x} cannot be registered: {reason}", piece.base)));
            }
            refused if !may_write => {
                let refused = gpus.driver.error("cuMemHostRegister", refused);
                return Err(BackendError::NotSupported(format!(
                    "{:#x} may not be written, and the driver does not pin such memory: map it writable, or leave it to threads ({refused})",
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

/// Takes back what [`register`] has pinned, all of it or a piece. Work that uses it has finished.
pub(super) fn unregister(gpus: &Gpus, gpu: usize, pages: PageRange) -> Result<(), BackendError> {
    let primary = gpus.primary(gpu)?;
    if primary.is_lost() {
        return Ok(());
    }
    let _outside = OutsideCapture::enter(gpus.driver);
    // Tried all the same where that fails: nobody else would.
    let _current = primary.enter();
    // SAFETY: pinned by `register`, which nobody takes back twice.
    let unpin = |piece: PageRange| unsafe { call!(gpus.driver, cuMemHostUnregister(handle(piece.base))) };
    pages.pieces(REGISTERED_PIECE as usize).map(unpin).fold(Ok(()), Result::and)
}

/// Frees what [`make`] has made. The pages of host memory are the caller's to drop afterwards.
pub(super) fn give_back(gpus: &Gpus, device: DeviceId, gpu: usize, address: u64, pages: Option<&HostPages>) -> Result<(), BackendError> {
    let primary = gpus.primary(gpu)?;
    if primary.is_lost() {
        return Ok(());
    }
    let _outside = OutsideCapture::enter(gpus.driver);
    // Tried all the same where that fails: nobody else would free it.
    let _current = primary.enter();
    // SAFETY: made by `make`, and taken out of whatever table it was in, so nobody frees it again. The caller vouches that work
    // which uses it has finished. Pages of our own are unmapped afterwards, whatever the driver said: it holds them by itself.
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
