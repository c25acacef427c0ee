//! Memory of the virtual devices: host memory with an owner, which other processes can map unless it stands for a host's that is not shared.

use crate::backend::host_memory::PageRange;
use crate::backend::{Allocation, BackendError, FailedWait, HOST_MEMORY_IS_SHARED_BY, LostPeer, MemoryKind, Signal};
use crate::backend::{PAYLOAD_BYTES, REGISTERED_PIECE, Shared};
use crate::ipc::segment::{Mapping, Private, SharedRegion, why_none};
use crate::ipc::signal;
use crate::sync::held;
use crate::topology::DeviceId;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Allocation ids are unique in the process, over all backends.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// A memory file: the one way in which this backend shares memory.
const MEMORY_FILE: u32 = 1;

/// Every allocation that has not been freed, by its first address. Frees what is left when dropped.
#[derive(Debug, Default)]
pub(super) struct HostMemory {
    entries: RwLock<BTreeMap<u64, Entry>>,
}

#[derive(Debug)]
struct Entry {
    allocation: Allocation,
    pages: Pages,
    /// Why counters in it may never be raised, if that is so.
    lost_peer: Option<LostPeer>,
    /// What kernels wait for.
    kernel_waits: Vec<Signal>,
}

/// Where an allocation's pages come from.
#[derive(Debug)]
enum Pages {
    /// This context's own.
    Own(SharedRegion),
    /// The same, of this process alone, and why.
    Private(#[allow(dead_code, reason = "unmapped when dropped")] Private, String),
    /// Another process's.
    Mapped(#[allow(dead_code, reason = "unmapped when dropped")] Mapping),
    /// Another context's, of this process.
    Borrowed,
    /// The program's own, which it has registered.
    Registered,
}

impl Pages {
    fn is_own(&self) -> bool {
        matches!(self, Pages::Own(_) | Pages::Private(..))
    }
}

impl HostMemory {
    /// Zeroed memory of `device`, aligned to a page, so that devices share none. A request of 0 bytes gets 1, so that every allocation
    /// has an address of its own. An error where it `is_shared` and other processes could not map it.
    pub(super) fn allocate(&self, device: DeviceId, bytes: u64, is_shared: bool) -> Result<u64, BackendError> {
        let out_of_memory = |_| BackendError::OutOfMemory { device: device.0, bytes };
        let private = |why| Private::new(bytes).map(|pages| Pages::Private(pages, why)).map_err(out_of_memory);
        let pages = if device.is_host() && !is_shared {
            private(HOST_MEMORY_IS_SHARED_BY.to_owned())?
        } else {
            match SharedRegion::new(bytes) {
                Ok(region) => Pages::Own(region),
                Err(Errno::NOMEM | Errno::OVERFLOW) => return Err(out_of_memory(Errno::NOMEM)),
                Err(reason) if is_shared => {
                    return Err(BackendError::NotSupported(format!("{bytes} bytes of {device} cannot be shared: {}", why_none(reason))));
                }
                // No memory files (a sandbox), no descriptor left, or `ulimit -f`: whoever does not share needs none of them.
                Err(reason) => private(why_none(reason).to_string())?,
            }
        };
        let base = match &pages {
            Pages::Own(region) => region.base(),
            Pages::Private(private, _) => private.base(),
            Pages::Mapped(_) | Pages::Borrowed | Pages::Registered => 0,
        };
        let kind = if device.is_host() { MemoryKind::Pinned } else { MemoryKind::Device };
        Ok(self.insert(Allocation { id: 0, base, bytes: bytes.max(1), device, kind }, pages))
    }

    fn insert(&self, allocation: Allocation, pages: Pages) -> u64 {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let entry = Entry { allocation: Allocation { id, ..allocation }, pages, lost_peer: None, kernel_waits: Vec::new() };
        held(self.entries.write()).insert(allocation.base, entry);
        allocation.base
    }

    /// Takes note of memory of the program's own.
    pub(super) fn register(&self, address: u64, bytes: u64, huge: bool) -> Result<bool, BackendError> {
        let pages = usize::try_from(bytes).ok().and_then(|bytes| PageRange::around(address as usize, bytes));
        let is_written = AtomicBool::new(true);
        let note = |_, may_write| {
            is_written.fetch_and(may_write, Ordering::Relaxed);
            Ok::<(), BackendError>(())
        };
        pages.ok_or(BackendError::NotMapped(address.saturating_add(bytes)))?.bring_in(REGISTERED_PIECE as usize, huge, note)?;
        let last = address + (bytes - 1);
        let mut entries = held(self.entries.write());
        if let Some((base, _)) = entries.range(..=last).next_back().filter(|(base, entry)| **base + (entry.allocation.bytes - 1) >= address)
        {
            return Err(BackendError::NotSupported(format!(
                "{address:#x} cannot be registered: what begins at {base:#x} is pinned already"
            )));
        }
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let allocation = Allocation { id, base: address, bytes, device: DeviceId::HOST, kind: MemoryKind::Pinned };
        entries.insert(address, Entry { allocation, pages: Pages::Registered, lost_peer: None, kernel_waits: Vec::new() });
        Ok(is_written.into_inner())
    }

    pub(super) fn unregister(&self, address: u64) -> Result<(), BackendError> {
        self.remove(address, |pages| matches!(pages, Pages::Registered))
    }

    /// Gives back what [`HostMemory::allocate`] has returned.
    pub(super) fn free(&self, address: u64) -> Result<(), BackendError> {
        self.remove(address, Pages::is_own)
    }

    fn remove(&self, base: u64, belongs: impl FnOnce(&Pages) -> bool) -> Result<(), BackendError> {
        let mut entries = held(self.entries.write());
        if !entries.get(&base).is_some_and(|entry| belongs(&entry.pages)) {
            return Err(BackendError::InvalidPointer(base));
        }
        let removed = entries.remove(&base);
        // Unmapping takes its time, and others need not wait for it.
        drop(entries);
        drop(removed);
        Ok(())
    }

    /// The allocation that `address` lies in.
    pub(super) fn locate(&self, address: u64) -> Option<Allocation> {
        self.at(address, |entry| entry.allocation)
    }

    /// Bytes allocated on `device` at the moment.
    pub(super) fn allocated_bytes(&self, device: DeviceId) -> u64 {
        let entries = held(self.entries.read());
        entries.values().filter(|entry| entry.allocation.device == device && entry.pages.is_own()).map(|entry| entry.allocation.bytes).sum()
    }

    /// Calls `look` with an entry and the address in it, which cannot be freed meanwhile.
    fn at<T>(&self, address: u64, look: impl FnOnce(&Entry) -> T) -> Option<T> {
        let entries = held(self.entries.read());
        let (_, entry) = entries.range(..=address).next_back()?;
        (address - entry.allocation.base < entry.allocation.bytes).then(|| look(entry))
    }

    /// What the counter at an address stands at.
    pub(super) fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        // SAFETY: the engine has checked alignment and range, and the entry keeps the pages mapped.
        self.at(counter, |_| unsafe { signal::load(counter) }).ok_or(BackendError::InvalidPointer(counter))
    }

    /// Raises a counter.
    pub(super) fn raise_signal(&self, Signal { counter, value }: Signal) -> Result<(), BackendError> {
        // SAFETY: as in `read_signal`, and all pages are writable.
        self.at(counter, |_| unsafe { signal::store(counter, value) }).ok_or(BackendError::InvalidPointer(counter))
    }

    /// Whether a signal is reached.
    pub(super) fn is_reached(&self, wanted: &Signal) -> Result<bool, BackendError> {
        Ok(signal::reached(self.read_signal(wanted.counter)?, wanted.value))
    }

    /// Why a signal that is not reached may never be, if that is so.
    pub(super) fn failed_wait(&self, wanted: &Signal) -> Option<FailedWait> {
        let peer = self.lost_peer(wanted.counter)?;
        // Read afterwards: it may have raised it before it ended.
        let now = self.read_signal(wanted.counter).ok()?;
        (!signal::reached(now, wanted.value)).then_some(FailedWait { wanted: *wanted, now, peer })
    }

    /// Counters in this allocation may never be raised. Those that kernels wait for are raised here, each failed wait being noted before: kernels
    /// look at nothing else.
    pub(super) fn fail_waits(&self, allocation: &Allocation, peer: LostPeer, note: impl Fn(FailedWait)) {
        let mut entries = held(self.entries.write());
        if let Some(entry) = entries.get_mut(&allocation.base).filter(|entry| entry.allocation.id == allocation.id) {
            entry.lost_peer = Some(peer);
            for &wanted in &entry.kernel_waits {
                // SAFETY: as in `read_signal`.
                let now = unsafe { signal::load(wanted.counter) };
                if !signal::reached(now, wanted.value) {
                    note(FailedWait { wanted, now, peer });
                    // SAFETY: as in `raise_signal`.
                    unsafe { signal::store(wanted.counter, wanted.value) };
                }
            }
        }
    }

    /// Kernels wait for a counter, until its memory is freed. Of each counter one wait is kept, the first.
    pub(super) fn kernel_wait_signal(&self, wanted: Signal) -> Result<(), BackendError> {
        let now = self.read_signal(wanted.counter)?;
        let mut entries = held(self.entries.write());
        let entry = entries.range_mut(..=wanted.counter).next_back().ok_or(BackendError::InvalidPointer(wanted.counter))?.1;
        if let Some(peer) = entry.lost_peer {
            return Err(FailedWait { wanted, now, peer }.error());
        }
        if entry.kernel_waits.iter().all(|known| known.counter != wanted.counter) {
            entry.kernel_waits.push(wanted);
        }
        Ok(())
    }

    /// Why the counter at an address may never be raised.
    pub(super) fn lost_peer(&self, counter: u64) -> Option<LostPeer> {
        self.at(counter, |entry| entry.lost_peer).flatten()
    }

    /// What another process needs to map an allocation.
    pub(super) fn export(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        let entries = held(self.entries.read());
        let entry = entries.get(&allocation.base).filter(|entry| entry.allocation.id == allocation.id);
        match entry.ok_or(BackendError::InvalidPointer(allocation.base))?.pages {
            Pages::Own(ref region) => {
                let file = region.file().map_err(refused("duplicating the descriptor of a memory file"))?;
                Ok(Shared { form: MEMORY_FILE, descriptor: Some(file), offset: 0, payload: [0; PAYLOAD_BYTES] })
            }
            Pages::Private(_, ref why) => Err(BackendError::NotSupported(format!("{:#x} cannot be shared: {why}", allocation.base))),
            Pages::Registered => {
                Err(BackendError::NotSupported(format!("{:#x} cannot be shared: {HOST_MEMORY_IS_SHARED_BY}", allocation.base)))
            }
            Pages::Mapped(_) | Pages::Borrowed => {
                Err(BackendError::NotSupported(format!("{:#x} is shared already; export it where it was allocated", allocation.base)))
            }
        }
    }

    /// Maps what another process has shared.
    pub(super) fn map(&self, shared: &Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        let (base, pages) = match (shared.form, &shared.descriptor) {
            (Shared::SAME_PROCESS, _) => (shared.offset, Pages::Borrowed),
            (MEMORY_FILE, Some(file)) => {
                let mapping = Mapping::new(file, allocation.bytes).map_err(refused("mapping memory of another process"))?;
                (mapping.base(), Pages::Mapped(mapping))
            }
            (Shared::MAPPED_BY_PROGRAM, _) => {
                return Err(BackendError::NotSupported("CUDA IPC maps memory of GPUs, and virtual devices have none".into()));
            }
            (form, _) => {
                return Err(BackendError::NotSupported(format!("memory is shared in form {form}, which this version does not know")));
            }
        };
        Ok(self.insert(Allocation { base, ..*allocation }, pages))
    }

    /// Unmaps what [`HostMemory::adopt`] has returned.
    pub(super) fn unmap(&self, base: u64) -> Result<(), BackendError> {
        self.remove(base, |pages| matches!(pages, Pages::Mapped(_) | Pages::Borrowed))
    }
}

/// What the system said to `what`.
fn refused(what: &'static str) -> impl Fn(Errno) -> BackendError {
    move |errno| BackendError::Driver {
        what: what.into(),
        reason: std::io::Error::from(errno).to_string(),
        code: i64::from(errno.raw_os_error()),
    }
}
