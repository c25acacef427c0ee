//! Memory that other processes map, and memory of theirs.
//!
//! | memory | how it is shared |
//! | --- | --- |
//! | host memory of this backend below 4 MiB | a memory file, pinned by `cuMemHostRegister` in each process that maps it |
//! | `cuMemAlloc`, `cudaMalloc` | CUDA IPC |
//! | virtual memory API, created for POSIX file descriptors | its descriptor |
//! | pools created for POSIX file descriptors | the pool's descriptor, and the driver's name for the allocation (`pools`) |
//! | everything else | not at all, with the remedy |
//!
//! Host memory of this backend from 4 MiB on is in huge pages, spread over the sockets, because the GPUs need that to reach their rate
//! (`host_memory`). Memory files have neither on systems as they are usually set up, so that memory is not shared.
//!
//! Memory of another process is mapped through the GPU of the calling thread, or one that is in use already, so that a rank does not get a
//! context on each GPU of its neighbours.

use super::Core;
use super::device::{handle, lock};
use super::driver::{OutsideCapture, call, call_optional};
use super::ipc::Opened;
use super::memory::{PAGED_FROM, SHARED_PAGE, SPREAD_FROM, own_id};
use super::pools::Pools;
use super::signal::Waits;
use crate::backend::loss::Losses;
use crate::backend::{Allocation, BackendError, Departed, MemoryKind, uuid_of_number};
use crate::share::segment::{Mapping, Region};
use crate::share::{PAYLOAD_BYTES, Shared};
use crate::topology::DeviceId;
use cudarc::driver::sys::{self, CUpointer_attribute};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard};

const MEMORY_FILE: u32 = 1;
const IPC: u32 = 2;
const DESCRIPTOR: u32 = 3;
const POOL: u32 = 4;

pub(super) const POSIX_FILE_DESCRIPTOR: c_uint = 1;

/// What this backend shares and has mapped.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    pub pools: Pools,
    held: RwLock<BTreeMap<u64, Held>>,
    /// Whether memory of CUDA IPC was ever opened: only then GPUs may have the ends of a plan at different addresses.
    pub has_opened: AtomicBool,
    /// Whether a stream was ever to wait for a signal.
    pub has_waits: AtomicBool,
    pub waits: Mutex<Waits>,
    pub losses: Losses,
}

/// An allocation whose pages this backend knows by itself.
#[derive(Debug)]
pub(super) struct Held {
    pub allocation: Allocation,
    pub source: Source,
    /// Why counters in it may never be raised, if that is so.
    pub abandoned: Option<Departed>,
}

#[derive(Debug)]
pub(super) enum Source {
    /// Pinned memory of this process.
    Own(Region),
    /// The same of another, pinned here too.
    Pinned(#[allow(dead_code, reason = "unmapped when dropped")] Mapping),
    Ipc(Opened),
    /// Mapped by the virtual memory API: its handle.
    Mapped(u64),
    /// Opened through this GPU, of the pool with this number.
    OfPool(usize, u64),
}

/// How an allocation that the driver knows can be shared.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Way {
    Ipc,
    Descriptor,
    /// If the driver agrees: no attribute says for what a pool was created.
    Pool,
}

/// What decides on it.
#[derive(Copy, Clone, Debug, Default)]
struct Traits {
    /// `CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`.
    ipc: bool,
    /// The pool that it is of, if it is of one.
    pool: u64,
    /// `CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES`.
    handles: c_uint,
    /// Size of host memory of this backend.
    own_host: Option<u64>,
}

fn way(kind: MemoryKind, traits: Traits) -> Result<Way, &'static str> {
    if kind != MemoryKind::Device {
        return Err(match traits.own_host {
            Some(bytes) if bytes >= SPREAD_FROM as u64 => {
                "it is host memory of mp_alloc of 4 MiB or more, whose pages are spread over the sockets for the GPUs' sake and are this \
                 process's alone; share memory of a GPU, or several allocations of mp_alloc below 4 MiB"
            }
            Some(_) => {
                "it is host memory that is not in a memory file, because the system gave none, no descriptor was left for it (ulimit -n), or \
                 the driver did not pin it (the log at level debug has the reason); share memory of a GPU, raise ulimit -n, or make fewer \
                 and larger allocations"
            }
            None => {
                "it is host memory that mp_alloc did not return, which the driver does not share; allocate it with mp_alloc, below 4 MiB"
            }
        });
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
    Err("it was created by cuMemCreate without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; ask for that handle type, or allocate with \
         cudaMalloc or mp_alloc")
}

impl Sharing {
    pub fn held(&self) -> RwLockReadGuard<'_, BTreeMap<u64, Held>> {
        self.held.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn held_mut(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<u64, Held>> {
        self.held.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `look` with what an address lies in, which cannot be released meanwhile.
    pub fn at<T>(&self, address: u64, look: impl FnOnce(&Held) -> T) -> Option<T> {
        let held = self.held();
        let (_, found) = held.range(..=address).next_back()?;
        (address - found.allocation.base < found.allocation.bytes).then(|| look(found))
    }

    /// The allocation that an address lies in, if it is one of these.
    pub fn locate(&self, address: u64) -> Option<Allocation> {
        self.at(address, |held| held.allocation)
    }

    /// Returns its id.
    fn insert(&self, allocation: Allocation, source: Source) -> u64 {
        let id = own_id();
        let held = Held { allocation: Allocation { id, ..allocation }, source, abandoned: None };
        self.held_mut().insert(allocation.base, held);
        id
    }

    /// Notes that counters in an allocation may never be raised.
    pub fn mark_abandoned(&self, allocation: &Allocation, peer: Departed) {
        let mut held = self.held_mut();
        if let Some(found) = held.get_mut(&allocation.base).filter(|found| found.allocation.id == allocation.id) {
            found.abandoned = Some(peer);
        }
    }
}

impl Core {
    pub fn device_uuid(&self, device: DeviceId) -> Result<[u8; 16], BackendError> {
        self.check_device(device)?;
        let Some(gpu) = usize::try_from(device.0).ok().and_then(|gpu| self.devices.get(gpu)) else {
            return Ok(uuid_of_number(device));
        };
        let mut uuid = [0; 16];
        // SAFETY: the output is valid for the call.
        unsafe { call!(self.driver, cuDeviceGetUuid(&mut uuid, gpu.ordinal)) }?;
        Ok(uuid)
    }

    /// Pinned memory that others can map, and its id; `None` where there is none, and the driver's own has to do.
    pub fn allocate_shareable(&self, device: DeviceId, bytes: u64) -> Result<Option<(u64, u64)>, BackendError> {
        let region = match Region::new(bytes) {
            Ok(region) => region,
            Err(error) => {
                log::debug!("no memory file for {bytes} bytes of host memory: {error}; other processes cannot map them");
                return Ok(None);
            }
        };
        if let Err(error) = self.pin(region.base(), bytes) {
            log::debug!("a memory file of {bytes} bytes cannot be pinned: {error}; other processes cannot map this memory");
            return Ok(None);
        }
        let allocation = Allocation { id: 0, base: region.base(), bytes, device, kind: MemoryKind::Pinned };
        Ok(Some((allocation.base, self.sharing.insert(allocation, Source::Own(region)))))
    }

    /// Makes every GPU of the process reach host memory directly, under the address that the CPU has.
    fn pin(&self, base: u64, bytes: u64) -> Result<(), BackendError> {
        let gpu = self.any_used();
        let primary = self.primary(gpu)?;
        let same = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
        if self.driver.attribute(same, self.devices[gpu].ordinal) == 0 {
            return Err(BackendError::NotSupported("GPUs see registered host memory at addresses of their own on this machine".into()));
        }
        const PORTABLE_AND_MAPPED: c_uint = 1 | 2;
        let _outside = OutsideCapture::enter(self.driver);
        let _current = primary.enter()?;
        // SAFETY: pages that are mapped until `unpin`.
        unsafe { call!(self.driver, cuMemHostRegister(handle(base as usize), bytes as usize, PORTABLE_AND_MAPPED)) }
    }

    fn unpin(&self, base: u64) -> Result<(), BackendError> {
        if self.is_lost(self.any_used()) {
            return Ok(());
        }
        let _outside = OutsideCapture::enter(self.driver);
        // Tried all the same where that fails: nobody else would.
        let _current = self.primary(self.any_used())?.enter();
        // SAFETY: registered by `pin`; whoever frees vouches that work which uses it has finished.
        unsafe { call!(self.driver, cuMemHostUnregister(handle(base as usize))) }
    }

    /// What can be shared of the memory of `bytes` at an address. A range of the virtual memory API may be mapped from several chunks,
    /// each perhaps of another GPU, and is one allocation to the driver; what can be shared is a chunk (driver 580: the handle that it gives
    /// for an address, and `MAPPING_SIZE`, are of the chunk, `RANGE_SIZE` is of all).
    pub fn shareable(&self, address: u64, bytes: u64) -> Result<Option<Allocation>, BackendError> {
        let Some(allocation) = self.locate(address)? else { return Ok(None) };
        if allocation.kind != MemoryKind::Device || self.sharing.locate(address).is_some() {
            return Ok(Some(allocation));
        }
        let _current = self.primary(allocation.device.0 as usize)?.enter()?;
        if way(allocation.kind, self.traits(address)) != Ok(Way::Descriptor) {
            return Ok(Some(allocation));
        }
        let base = self.ask(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR);
        let size = self.ask(address, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPING_SIZE);
        if base == 0 || base > address || size <= address - base || size >= allocation.bytes {
            return Ok(Some(allocation));
        }
        if bytes > size - (address - base) {
            return Err(BackendError::NotSupported(format!(
                "{address:#x} ({bytes} bytes) cannot be shared with another process: it is mapped from several chunks by cuMemMap; export each \
                 chunk by itself (this one is {base:#x}, {size} bytes), or allocate with cudaMalloc or mp_alloc (PyTorch: without \
                 expandable_segments)"
            )));
        }
        Ok(Some(Allocation { base, bytes: size, ..allocation }))
    }

    /// What another process needs to map an allocation.
    pub fn share(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        let plain = |form, descriptor, offset, payload| Shared { form, descriptor, offset, payload };
        let own = self.sharing.at(allocation.base, |held| match &held.source {
            Source::Own(region) => {
                region.file().map(|file| plain(MEMORY_FILE, Some(file), 0, [0; PAYLOAD_BYTES])).map_err(|errno| BackendError::Driver {
                    what: "duplicating the descriptor of a memory file".into(),
                    reason: std::io::Error::from(errno).to_string(),
                    code: i64::from(errno.raw_os_error()),
                })
            }
            _ => {
                let base = allocation.base;
                Err(BackendError::NotSupported(format!("{base:#x} is memory of another process; export it there")))
            }
        });
        if let Some(own) = own {
            return own;
        }
        self.check_alive()?;
        let _outside = OutsideCapture::enter(self.driver);
        let gpu = usize::try_from(allocation.device.0).unwrap_or_else(|_| self.any_used());
        let _current = self.primary(gpu)?.enter()?;
        let traits = self.traits(allocation.base);
        match way(allocation.kind, traits) {
            Ok(Way::Ipc) => {
                if allocation.bytes >= PAGED_FROM && !allocation.bytes.is_multiple_of(SHARED_PAGE) && !self.is_own(allocation.base) {
                    log::info!(
                        "{:#x}: {} bytes are no multiple of {SHARED_PAGE}, so other processes map them in small pages and some copies take 6 % \
                         longer: make the allocation a multiple of that, or take memory from mp_alloc",
                        allocation.base,
                        allocation.bytes
                    );
                }
                let mut ipc = sys::CUipcMemHandle { reserved: [0; PAYLOAD_BYTES] };
                // SAFETY: the output is valid for the call; the address is the first of an allocation of this GPU.
                unsafe { call_optional!(self.driver, cuIpcGetMemHandle(&mut ipc, allocation.base)) }?;
                Ok(plain(IPC, None, 0, ipc.reserved.map(|byte| byte as u8)))
            }
            Ok(Way::Descriptor) => Ok(plain(DESCRIPTOR, Some(self.descriptor_of(allocation.base)?), 0, [0; PAYLOAD_BYTES])),
            Ok(Way::Pool) => {
                let (descriptor, number, pointer) = self.share_of_pool(traits.pool, allocation)?;
                Ok(plain(POOL, Some(descriptor), number, pointer))
            }
            Err(why) => Err(BackendError::NotSupported(format!("{:#x} cannot be shared with another process: {why}", allocation.base))),
        }
    }

    /// One attribute of an address; 0 where the driver does not know it.
    fn ask(&self, address: u64, attribute: CUpointer_attribute) -> u64 {
        let (mut name, mut value) = (attribute as c_uint, 0_u64);
        let mut values = [(&raw mut value).cast::<c_void>()];
        // SAFETY: one name and one value, which has room for the widest of these attributes.
        let code = unsafe { (self.driver.cuPointerGetAttributes)(1, &mut name, values.as_mut_ptr(), address) };
        if code == 0 { value } else { 0 }
    }

    /// What the driver says of an address; what a driver does not know counts as no.
    fn traits(&self, address: u64) -> Traits {
        let ask = |attribute| self.ask(address, attribute);
        Traits {
            ipc: ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE) & 0xFF != 0,
            pool: ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE),
            handles: ask(CUpointer_attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES) as c_uint,
            own_host: self.own_host_bytes(address),
        }
    }

    /// The descriptor of memory of the virtual memory API.
    fn descriptor_of(&self, address: u64) -> Result<OwnedFd, BackendError> {
        let driver = self.driver;
        let mut memory = 0;
        // SAFETY: the output is valid for the call. Success retains the memory.
        unsafe { call_optional!(driver, cuMemRetainAllocationHandle(&mut memory, handle(address as usize))) }?;
        let mut descriptor: c_int = -1;
        // SAFETY: the output is a descriptor, as the handle type says.
        let exported =
            unsafe { call_optional!(driver, cuMemExportToShareableHandle((&raw mut descriptor).cast(), memory, POSIX_FILE_DESCRIPTOR, 0)) };
        self.release_memory(memory);
        exported?;
        // SAFETY: a new descriptor, and the caller's to close.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    fn release_memory(&self, memory: u64) {
        // SAFETY: retained or imported by us; what is mapped stays until it is unmapped.
        if let Err(error) = unsafe { call_optional!(self.driver, cuMemRelease(memory)) } {
            log::warn!("{error}");
        }
    }

    /// Maps what another process has shared.
    pub fn adopt(&self, shared: &Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        self.check_alive()?;
        let (base, source) = match (shared.form, &shared.descriptor) {
            (MEMORY_FILE, Some(file)) => {
                let mapping = Mapping::new(file, allocation.bytes).map_err(|errno| BackendError::Driver {
                    what: "mapping memory of another process".into(),
                    reason: std::io::Error::from(errno).to_string(),
                    code: i64::from(errno.raw_os_error()),
                })?;
                self.pin(mapping.base(), allocation.bytes)?;
                (mapping.base(), Source::Pinned(mapping))
            }
            (IPC, _) => self.open(&shared.payload, allocation)?,
            (DESCRIPTOR, Some(descriptor)) => self.map(descriptor, allocation)?,
            (POOL, Some(descriptor)) => {
                let owner = allocation.device.0 as usize;
                let gpu = self.through(owner);
                let base = self.open_of_pool(gpu, (descriptor, shared.offset, &shared.payload), owner)?;
                (base, Source::OfPool(gpu, shared.offset))
            }
            (form, _) => {
                return Err(BackendError::NotSupported(format!("memory is shared in form {form}, which this version does not know")));
            }
        };
        self.sharing.insert(Allocation { base, ..*allocation }, source);
        Ok(base)
    }

    /// The GPU through which memory of `owner` is mapped: the calling thread's, or another in use that reaches it, or itself. Not itself
    /// first, because a rank works on its neighbours' memory from its own GPU.
    pub fn through(&self, owner: usize) -> usize {
        let others = (0..self.devices.len()).filter(|gpu| *gpu != owner && self.devices[*gpu].used().is_some());
        self.current_gpu().into_iter().chain(others).find(|gpu| self.can_reach(*gpu, owner)).unwrap_or(owner)
    }

    pub fn can_reach(&self, gpu: usize, owner: usize) -> bool {
        let mut can = 0;
        // SAFETY: the output is valid for the call.
        let code = unsafe { (self.driver.cuDeviceCanAccessPeer)(&mut can, self.devices[gpu].ordinal, self.devices[owner].ordinal) };
        gpu == owner || (code == 0 && can != 0)
    }

    /// Lets every GPU that can reach memory of `owner` read and write it.
    pub fn access_to(&self, owner: usize) -> Vec<sys::CUmemAccessDesc> {
        let reaching = (0..self.devices.len()).filter(|gpu| self.can_reach(*gpu, owner));
        let access = reaching.map(|gpu| sys::CUmemAccessDesc {
            location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.devices[gpu].ordinal },
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        });
        access.collect()
    }

    /// Maps memory of the virtual memory API, for every GPU that can reach it.
    fn map(&self, descriptor: &OwnedFd, allocation: &Allocation) -> Result<(u64, Source), BackendError> {
        let (driver, bytes, owner) = (self.driver, allocation.bytes as usize, allocation.device.0 as usize);
        let _outside = OutsideCapture::enter(driver);
        let _current = self.primary(self.through(owner))?.enter()?;
        let mut memory = 0;
        let number: *mut c_void = handle(descriptor.as_raw_fd() as usize);
        // SAFETY: the output is valid for the call, which takes a descriptor in place of a pointer.
        unsafe { call_optional!(driver, cuMemImportFromShareableHandle(&mut memory, number, POSIX_FILE_DESCRIPTOR)) }?;
        let mut base = 0;
        // SAFETY: as above.
        let reserved = unsafe { call_optional!(driver, cuMemAddressReserve(&mut base, bytes, 0, 0, 0)) };
        // SAFETY: an address range that was just reserved, of this size.
        let mapped = reserved.and_then(|()| unsafe { call_optional!(driver, cuMemMap(base, bytes, 0, memory, 0)) });
        let accessible = mapped.clone().and_then(|()| {
            let access = self.access_to(owner);
            // SAFETY: as above, and a list of this length.
            unsafe { call_optional!(driver, cuMemSetAccess(base, bytes, access.as_ptr(), access.len())) }
        });
        if let Err(error) = accessible {
            if mapped.is_ok() {
                // SAFETY: mapped above, and nobody has used it.
                let _ = unsafe { call_optional!(driver, cuMemUnmap(base, bytes)) };
            }
            if base != 0 {
                // SAFETY: reserved above.
                let _ = unsafe { call_optional!(driver, cuMemAddressFree(base, bytes)) };
            }
            self.release_memory(memory);
            return Err(error);
        }
        Ok((base, Source::Mapped(memory)))
    }

    /// Gives back what [`Core::allocate_shareable`] or [`Core::adopt`] has returned; false for any other address.
    pub fn release_held(&self, base: u64) -> Result<bool, BackendError> {
        let Some(held) = self.sharing.held_mut().remove(&base) else { return Ok(false) };
        lock(&self.sharing.waits).forget(&held.allocation);
        let bytes = held.allocation.bytes as usize;
        match held.source {
            Source::Own(_) | Source::Pinned(_) => self.unpin(base)?,
            Source::Ipc(opened) => self.close(&opened)?,
            Source::Mapped(_) if self.has_lost() => {}
            Source::Mapped(memory) => {
                // SAFETY: mapped by `map` with this size; as above.
                let unmapped = unsafe { call_optional!(self.driver, cuMemUnmap(base, bytes)) };
                // SAFETY: reserved by `map` with this size.
                let freed = unsafe { call_optional!(self.driver, cuMemAddressFree(base, bytes)) };
                self.release_memory(memory);
                unmapped.and(freed)?;
            }
            Source::OfPool(gpu, number) => self.close_of_pool(gpu, number, base)?,
        }
        Ok(true)
    }

    /// Gives everything back. All work has finished.
    pub fn release_all_held(&self) {
        let left: Vec<u64> = self.sharing.held().keys().copied().collect();
        for base in left {
            lock(&self.memory).remove(&base);
            if let Err(error) = self.release_held(base) {
                log::warn!("{error}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_memory_is_shared_in_its_way_or_refused_with_the_remedy() {
        let traits = |ipc, pool: bool, handles| Traits { ipc, pool: u64::from(pool), handles, own_host: None };
        let own = |bytes| Traits { own_host: Some(bytes), ..Traits::default() };
        assert_eq!(way(MemoryKind::Device, traits(true, false, 0)), Ok(Way::Ipc));
        assert_eq!(way(MemoryKind::Device, traits(true, false, 1)), Ok(Way::Ipc));
        assert_eq!(way(MemoryKind::Device, traits(false, false, 1)), Ok(Way::Descriptor));
        assert_eq!(way(MemoryKind::Device, traits(false, false, 9)), Ok(Way::Descriptor));
        assert_eq!(way(MemoryKind::Device, traits(false, true, 0)), Ok(Way::Pool));
        assert_eq!(way(MemoryKind::Device, traits(false, true, 1)), Ok(Way::Pool));
        let remedies = [
            (MemoryKind::Pinned, traits(false, false, 0), "allocate it with mp_alloc, below 4 MiB"),
            (MemoryKind::Pinned, own(SPREAD_FROM as u64), "several allocations of mp_alloc below 4 MiB"),
            (MemoryKind::Pinned, own(SPREAD_FROM as u64 - 1), "share memory of a GPU"),
            (MemoryKind::Device, traits(false, false, 8), "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"),
        ];
        for (kind, traits, remedy) in remedies {
            assert!(way(kind, traits).is_err_and(|why| why.contains(remedy)), "{kind:?} {traits:?}");
        }
    }
}
