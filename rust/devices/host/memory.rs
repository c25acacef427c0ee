//! Manages the memory of virtual devices, which is host memory that is assigned to a device. Other processes can map this memory, except
//! host allocations that are not marked as shared.

use crate::backend::host_memory::PageRange;
use crate::backend::{
    Allocation, BackendError, Endpoints, FailedWait, HOST_MEMORY_IS_SHARED_BY, Line, LostPeer, MemoryKind, Signal, Signallers,
};
use crate::backend::{PAYLOAD_BYTES, REGISTERED_PIECE, Shared};
use crate::ipc::segment::{Mapping, Private, SharedRegion, why_none};
use crate::ipc::signal;
use crate::sync::{RwLock, held};
use crate::topology::DeviceId;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Identifier of the next allocation. Identifiers are unique in the process, across all backends.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Bit that is set in the identifiers of memory that the program has registered. The program may unmap such memory or truncate its file at
/// any time.
const REGISTERED: u64 = 1 << 62;

/// Code in the description of exported memory for memory that is shared as a memory file (`memfd`). This backend has no other form of
/// sharing.
const MEMORY_FILE: u32 = 1;

/// Table of the memory that this backend has allocated, mapped or registered, by first address. Dropping the table frees the allocated
/// memory and unmaps the mapped memory.
#[derive(Debug, Default)]
pub(super) struct HostMemory {
    entries: RwLock<BTreeMap<u64, Entry>>,
}

#[derive(Debug)]
struct Entry {
    allocation: Allocation,
    pages: Pages,
    /// Processes or contexts that set counters in this allocation.
    signallers: Signallers,
    /// Counters in this allocation for which kernels wait, each with the highest value for which a kernel waits.
    kernel_waits: Vec<Signal>,
}

/// Origin of the pages of an allocation.
#[derive(Debug)]
enum Pages {
    /// Memory that this context has allocated and that other processes can map.
    Own(SharedRegion),
    /// Memory that this context has allocated and that other processes cannot map. The string contains the reason.
    Private(#[allow(dead_code, reason = "unmapped when dropped")] Private, String),
    /// Memory that another process has shared and that this process has mapped.
    Mapped(#[allow(dead_code, reason = "unmapped when dropped")] Mapping),
    /// Memory that another context of this process has allocated and that this context uses.
    Borrowed,
    /// Memory that the program has allocated itself and registered with the backend.
    Registered,
}

impl Entry {
    fn line_of(&self, counter: u64) -> Line {
        Line { allocation: self.allocation.id, signaller: self.signallers.of(counter) }
    }
}

impl Pages {
    fn is_own(&self) -> bool {
        matches!(self, Pages::Own(_) | Pages::Private(..))
    }
}

impl HostMemory {
    /// Allocates zeroed memory of `device` and returns its address. The memory is aligned to a page, so that two devices never share a
    /// page. A size of 0 is treated as 1 byte, so that every allocation has its own address. Returns an error if `is_shared` is true but
    /// other processes could not map the memory.
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
                // Memory files are unavailable, for example in a sandbox, without free file descriptors, or because of `ulimit -f`. Private
                // memory does not need them.
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
        let entry =
            Entry { allocation: Allocation { id, ..allocation }, pages, signallers: Signallers::default(), kernel_waits: Vec::new() };
        held(self.entries.write()).insert(allocation.base, entry);
        allocation.base
    }

    /// Registers memory that the program has allocated. Returns true if all of the memory is writable.
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
                "{address:#x} cannot be registered: the memory at {base:#x} is pinned already"
            )));
        }
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed) | REGISTERED;
        let allocation = Allocation { id, base: address, bytes, device: DeviceId::HOST, kind: MemoryKind::Pinned };
        entries
            .insert(address, Entry { allocation, pages: Pages::Registered, signallers: Signallers::default(), kernel_waits: Vec::new() });
        Ok(is_written.into_inner())
    }

    pub(super) fn unregister(&self, address: u64) -> Result<(), BackendError> {
        self.remove(address, |pages| matches!(pages, Pages::Registered))
    }

    /// Frees memory that [`HostMemory::allocate`] returned.
    pub(super) fn free(&self, address: u64) -> Result<(), BackendError> {
        self.remove(address, Pages::is_own)
    }

    fn remove(&self, base: u64, belongs: impl FnOnce(&Pages) -> bool) -> Result<(), BackendError> {
        let mut entries = held(self.entries.write());
        if !entries.get(&base).is_some_and(|entry| belongs(&entry.pages)) {
            return Err(BackendError::InvalidPointer(base));
        }
        let removed = entries.remove(&base);
        // Unmapping is slow, so it happens outside the lock.
        drop(entries);
        drop(removed);
        Ok(())
    }

    /// Returns the allocation that contains `address`.
    pub(super) fn locate(&self, address: u64) -> Option<Allocation> {
        self.at(address, |entry| entry.allocation)
    }

    /// True if `id` is the identifier of memory that this library has allocated, in this process or another. Such memory stays mapped at
    /// its full size until it is freed. False for 0, which denotes pageable memory, and for `None`.
    pub(super) fn is_kept(id: Option<u64>) -> bool {
        id.is_some_and(|id| id != 0 && id & REGISTERED == 0)
    }

    /// Returns the identifiers of the allocations that contain each transfer's destination and source, in this order. Pageable memory has
    /// the identifier 0.
    pub(super) fn of_ends(&self, ends: &[Endpoints]) -> Arc<[u64]> {
        ends.iter().flat_map(|ends| [ends.dst, ends.src]).map(|end| self.locate(end).map_or(0, |allocation| allocation.id)).collect()
    }

    /// Returns the number of bytes that this backend has allocated on `device` and not freed.
    pub(super) fn allocated_bytes(&self, device: DeviceId) -> u64 {
        let entries = held(self.entries.read());
        entries.values().filter(|entry| entry.allocation.device == device && entry.pages.is_own()).map(|entry| entry.allocation.bytes).sum()
    }

    /// Calls `look` with the table entry whose memory contains `address`, and returns the result. Returns `None` if there is no such entry.
    /// The entry cannot be freed during the call.
    fn at<T>(&self, address: u64, look: impl FnOnce(&Entry) -> T) -> Option<T> {
        let entries = held(self.entries.read());
        let (_, entry) = entries.range(..=address).next_back()?;
        (address - entry.allocation.base < entry.allocation.bytes).then(|| look(entry))
    }

    /// Returns the value of the counter at the address `counter`.
    pub(super) fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        // SAFETY: the engine has checked alignment and range, and the entry keeps the pages mapped.
        self.at(counter, |_| unsafe { signal::load(counter) }).ok_or(BackendError::InvalidPointer(counter))
    }

    /// Sets the counter of a signal to the signal's value.
    pub(super) fn raise_signal(&self, Signal { counter, value }: Signal) -> Result<(), BackendError> {
        // SAFETY: as in `read_signal`. All pages are writable.
        self.at(counter, |_| unsafe { signal::store(counter, value) }).ok_or(BackendError::InvalidPointer(counter))
    }

    /// True if the counter of the signal has reached the signal's value.
    pub(super) fn is_reached(&self, wanted: &Signal) -> Result<bool, BackendError> {
        Ok(signal::reached(self.read_signal(wanted.counter)?, wanted.value))
    }

    /// Returns the failed wait for a signal if the peer that should have set the signal was lost before it did so. Returns `None` if the
    /// signal has been set or may still be set.
    pub(super) fn failed_wait(&self, wanted: &Signal) -> Option<FailedWait> {
        let peer = self.lost_peer(*wanted)?;
        // The counter is read after the loss is known, because the peer may have set it before it exited.
        let now = self.read_signal(wanted.counter).ok()?;
        (!signal::reached(now, wanted.value)).then_some(FailedWait { wanted: *wanted, now, peer })
    }

    /// Calls `change` with the table entry of an allocation, unless the allocation has been freed.
    fn change(&self, allocation: &Allocation, change: impl FnOnce(&mut Entry)) {
        let mut entries = held(self.entries.write());
        if let Some(entry) = entries.get_mut(&allocation.base).filter(|entry| entry.allocation.id == allocation.id) {
            change(entry);
        }
    }

    pub(super) fn name_signallers(&self, allocation: &Allocation, by_address: Arc<[(u64, u32)]>) {
        self.change(allocation, |entry| entry.signallers.name(by_address));
    }

    /// Fails the waits for counters of this allocation that a lost party (process or context) should have set. `party` is the number of the
    /// party, and `peer` describes its loss. If kernels wait for such a counter, this function sets the counter, because a kernel cannot be
    /// notified in any other way. Before that, it passes each failed wait to `note`.
    pub(super) fn fail_waits(&self, allocation: &Allocation, party: Option<u32>, peer: LostPeer, note: impl Fn(Line, FailedWait)) {
        self.change(allocation, |entry| {
            entry.signallers.lose(party, peer);
            let is_lost = |wanted: &&Signal| entry.signallers.concerns(party, wanted.counter) && peer.fails(**wanted);
            for &wanted in entry.kernel_waits.iter().filter(is_lost) {
                // SAFETY: as in `read_signal`.
                let now = unsafe { signal::load(wanted.counter) };
                if !signal::reached(now, wanted.value) {
                    note(entry.line_of(wanted.counter), FailedWait { wanted, now, peer });
                    // SAFETY: as in `raise_signal`.
                    unsafe { signal::store(wanted.counter, wanted.value) };
                }
            }
        });
    }

    /// Returns the group of counters to which a counter belongs: its allocation, and the party (process or context) that sets it. Returns
    /// `None` if the counter is in no allocation.
    pub(super) fn line_of(&self, counter: u64) -> Option<Line> {
        self.at(counter, |entry| entry.line_of(counter))
    }

    /// Records that kernels wait for a counter to reach a value. The record lasts until the counter's memory is freed. For each counter,
    /// only the wait for the highest value is kept.
    pub(super) fn kernel_wait_signal(&self, wanted: Signal) -> Result<(), BackendError> {
        let now = self.read_signal(wanted.counter)?;
        let mut entries = held(self.entries.write());
        let entry = entries.range_mut(..=wanted.counter).next_back().ok_or(BackendError::InvalidPointer(wanted.counter))?.1;
        if let Some(peer) = entry.signallers.lost_peer(wanted) {
            return Err(FailedWait { wanted, now, peer }.error());
        }
        match entry.kernel_waits.iter_mut().find(|known| known.counter == wanted.counter) {
            Some(known) if signal::reached(wanted.value, known.value) => known.value = wanted.value,
            Some(_) => {}
            None => entry.kernel_waits.push(wanted),
        }
        Ok(())
    }

    /// Returns the lost peer that should have set a counter to a value. Returns `None` if no peer of this counter was lost.
    pub(super) fn lost_peer(&self, wanted: Signal) -> Option<LostPeer> {
        self.at(wanted.counter, |entry| entry.signallers.lost_peer(wanted)).flatten()
    }

    /// Returns the description that another process needs to map an allocation.
    pub(super) fn export(&self, allocation: &Allocation) -> Result<Shared, BackendError> {
        let entries = held(self.entries.read());
        let entry = entries.get(&allocation.base).filter(|entry| entry.allocation.id == allocation.id);
        match entry.ok_or(BackendError::InvalidPointer(allocation.base))?.pages {
            Pages::Own(ref region) => {
                let file = region.file().map_err(refused("duplicating the descriptor of a shared-memory file (memfd)"))?;
                Ok(Shared { form: MEMORY_FILE, descriptor: Some(file), offset: 0, payload: [0; PAYLOAD_BYTES] })
            }
            Pages::Private(_, ref why) => Err(BackendError::NotSupported(format!("{:#x} cannot be shared: {why}", allocation.base))),
            Pages::Registered => {
                Err(BackendError::NotSupported(format!("{:#x} cannot be shared: {HOST_MEMORY_IS_SHARED_BY}", allocation.base)))
            }
            Pages::Mapped(_) | Pages::Borrowed => Err(BackendError::NotSupported(format!(
                "{:#x} was imported from another process or context; export it where it was allocated",
                allocation.base
            ))),
        }
    }

    /// Maps memory that another process or context has exported, and returns its address.
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
                return Err(BackendError::NotSupported(format!(
                    "the memory is shared by method {form}, which this version of mpgpu does not know"
                )));
            }
        };
        Ok(self.insert(Allocation { base, ..*allocation }, pages))
    }

    /// Unmaps memory that [`HostMemory::map`] returned.
    pub(super) fn unmap(&self, base: u64) -> Result<(), BackendError> {
        self.remove(base, |pages| matches!(pages, Pages::Mapped(_) | Pages::Borrowed))
    }
}

/// Returns a function that converts an error number of the system call `what` to a [`BackendError`].
fn refused(what: &'static str) -> impl Fn(Errno) -> BackendError {
    move |errno| BackendError::Driver {
        what: what.into(),
        reason: std::io::Error::from(errno).to_string(),
        code: i64::from(errno.raw_os_error()),
    }
}
