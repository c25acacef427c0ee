//! Allocates memory that other processes can map, maps memory of other processes, and keeps a table of both.
//!
//! No lock is held during a call of the driver, because the service thread needs the table when a process has exited.

use super::chunk::Chunk;
use super::driver::{Driver, OutsideCapture, call, call_optional, handle, lock};
use super::gpus::Gpus;
use super::ipc::{Opened, close, close_through, open_through};
use super::memory::{SPREAD_FROM, domain_of, own_id};
use super::pools::Pools;
use super::waits::Waits;
use crate::backend::PAYLOAD_BYTES;
use crate::backend::failed_waits::FailedWaits;
use crate::backend::host_memory::PageRange;
use crate::backend::{
    Abandoned, Allocation, BackendError, Endpoints, FailedWait, Line, LostPeer, MemoryKind, Shared, Signal, Signallers, StepFate,
};
use crate::ipc::segment::{Mapping, SharedRegion, why_none};
use crate::ipc::signal;
use crate::topology::DeviceId;
use cudarc::driver::sys;
use rustix::io::Errno;
use smallvec::smallvec;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

/// Table of the memory that this backend shares with other processes or has mapped from them.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    pub pools: Pools,
    held: RwLock<BTreeMap<u64, MappedImport>>,
    /// True once memory has been opened by CUDA IPC. Before that, all GPUs use the same addresses for the sources and destinations of a
    /// plan.
    pub has_opened: AtomicBool,
    pub waits: Mutex<Waits>,
    pub failed_waits: FailedWaits,
}

/// Entry of the table of shared memory: an allocation whose pages this backend manages.
#[derive(Debug)]
pub(super) struct MappedImport {
    pub allocation: Allocation,
    pub source: Source,
    /// Processes or contexts that set counters in this allocation.
    pub signallers: Signallers,
}

#[derive(Debug)]
pub(super) enum Source {
    /// Pinned host memory that this process has allocated and that other processes can map.
    Own(SharedRegion),
    /// Host memory of another process that this process has mapped and pinned.
    Pinned(#[allow(dead_code, reason = "unmapped when dropped")] Mapping),
    Ipc(Opened),
    /// GPU memory that this process has allocated in such a way that other processes can map it.
    OwnOnGpu(Chunk),
    /// GPU memory of another process, mapped by the virtual memory API.
    Mapped(Chunk),
    /// Memory from a pool of another process. The fields are the GPU through which the memory was opened, and the number of the pool.
    OfPool(usize, u64),
}

impl Sharing {
    pub fn held(&self) -> RwLockReadGuard<'_, BTreeMap<u64, MappedImport>> {
        self.held.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn held_mut(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<u64, MappedImport>> {
        self.held.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `look` with the table entry whose memory contains `address`, and returns the result. Returns `None` if there is no such entry.
    /// The entry cannot be removed during the call.
    pub fn at<T>(&self, address: u64, look: impl FnOnce(&MappedImport) -> T) -> Option<T> {
        let held = self.held();
        let (_, found) = held.range(..=address).next_back()?;
        (address - found.allocation.base < found.allocation.bytes).then(|| look(found))
    }

    /// Returns the allocation that contains `address`, or `None` if the table contains no such memory.
    pub fn locate(&self, address: u64) -> Option<Allocation> {
        self.at(address, |held| held.allocation)
    }

    /// Returns the GPU that owns the memory at `address`, if the virtual memory API has mapped that memory for every GPU that can access
    /// it. Otherwise returns `None`. GPUs need no enabled peer access for such memory.
    pub fn chunk_at(&self, address: u64) -> Option<usize> {
        let chunk = |held: &MappedImport| matches!(held.source, Source::OwnOnGpu(_) | Source::Mapped(_)).then_some(held.allocation.device);
        self.at(address, chunk).flatten().map(|device| device.0 as usize)
    }

    /// Adds an allocation to the table, and returns the new identifier of the allocation.
    pub fn insert(&self, allocation: Allocation, source: Source) -> u64 {
        let id = own_id();
        let held = MappedImport { allocation: Allocation { id, ..allocation }, source, signallers: Signallers::default() };
        self.held_mut().insert(allocation.base, held);
        id
    }

    /// Calls `change` with the table entry of an allocation, unless the entry was removed.
    pub fn change(&self, allocation: &Allocation, change: impl FnOnce(&mut MappedImport)) {
        let mut held = self.held_mut();
        if let Some(found) = held.get_mut(&allocation.base).filter(|found| found.allocation.id == allocation.id) {
            change(found);
        }
    }

    /// Returns the group of counters to which a counter belongs: its allocation, and the party (process or context) that sets it. Returns
    /// `None` if the counter is not in this table.
    pub fn line_of(&self, counter: u64) -> Option<Line> {
        self.at(counter, |held| Line { allocation: held.allocation.id, signaller: held.signallers.of(counter) })
    }

    /// Allocates pinned host memory that other processes can map. Returns its address and identifier. Memory of at least [`SPREAD_FROM`]
    /// bytes is distributed over the NUMA nodes, like other host memory.
    pub fn allocate(&self, gpus: &Gpus, device: DeviceId, bytes: u64) -> Result<(u64, u64), BackendError> {
        let out_of_memory = || BackendError::OutOfMemory { device: device.0, bytes };
        let region = SharedRegion::new(bytes).map_err(|reason| match reason {
            Errno::NOMEM | Errno::OVERFLOW => out_of_memory(),
            _ => BackendError::NotSupported(format!("{bytes} bytes of host memory cannot be shared: {}", why_none(reason))),
        })?;
        if bytes >= SPREAD_FROM as u64 {
            let pages = PageRange { base: region.base() as usize, bytes: region.bytes() as usize };
            pages.settle(domain_of(device)).map_err(|_| out_of_memory())?;
        }
        pin(gpus, region.base(), bytes)?;
        let allocation = Allocation { id: 0, base: region.base(), bytes, device, kind: MemoryKind::Pinned };
        Ok((allocation.base, self.insert(allocation, Source::Own(region))))
    }

    /// Allocates GPU memory that other processes can map, even if they have already opened other memory of this process. Returns its
    /// address and identifier, or `None` if the driver does not support such memory.
    pub fn allocate_on(&self, gpus: &Gpus, gpu: usize, bytes: u64) -> Result<Option<(u64, u64)>, BackendError> {
        let Some(chunk) = Chunk::new(gpus, gpu, bytes)? else { return Ok(None) };
        let base = chunk.base;
        let allocation = Allocation { id: 0, base, bytes, device: DeviceId(gpu as i32), kind: MemoryKind::Device };
        Ok(Some((base, self.insert(allocation, Source::OwnOnGpu(chunk)))))
    }

    /// Releases memory that [`Sharing::allocate`], [`Sharing::allocate_on`] or `Core::map` has returned. Returns false for any other
    /// address.
    pub fn release(&self, gpus: &Gpus, base: u64) -> Result<bool, BackendError> {
        let Some(held) = self.held_mut().remove(&base) else { return Ok(false) };
        lock(&self.waits).forget(&held.allocation);
        self.failed_waits.forget_allocation(held.allocation.id);
        match held.source {
            Source::Own(_) | Source::Pinned(_) => unpin(gpus, base)?,
            Source::Ipc(opened) => close(gpus, &opened)?,
            Source::OwnOnGpu(chunk) => {
                // `cuMemFree` waits for all work that uses the memory, but unmapping does not. The wait is therefore made here.
                let drained = if gpus.has_lost() { Ok(()) } else { gpus.primary(held.allocation.device.0 as usize)?.drain() };
                chunk.unmap(gpus).and(drained)?;
            }
            Source::Mapped(chunk) => chunk.unmap(gpus)?,
            Source::OfPool(gpu, number) => self.pools.close(gpus, gpu, number, base)?,
        }
        Ok(true)
    }

    /// Releases all memory of the table, and returns the first address of each allocation. All work that uses the memory must have
    /// finished.
    pub fn release_all(&self, gpus: &Gpus) -> Vec<u64> {
        let left: Vec<u64> = self.held().keys().copied().collect();
        for base in &left {
            if let Err(error) = self.release(gpus, *base) {
                log::warn!("{error}");
            }
        }
        left
    }

    /// Opens memory of another process by CUDA IPC, and returns its address.
    pub fn open(&self, gpus: &Gpus, payload: &[u8; PAYLOAD_BYTES], allocation: &Allocation) -> Result<(u64, Source), BackendError> {
        let owner = allocation.device.0 as usize;
        let gpu = gpus.mapping_gpu(owner);
        let base = open_through(gpus, gpu, payload)?;
        self.has_opened.store(true, Ordering::Release);
        Ok((base, Source::Ipc(Opened { payload: *payload, owner, through: smallvec![(gpu, Some(base))], is_adopted: false })))
    }

    /// Adds to the table memory of another process that the application itself has opened by CUDA IPC. Returns the address of the memory.
    pub fn adopt(&self, gpus: &Gpus, opened: &Shared, allocation: &Allocation) -> Result<(u64, Source), BackendError> {
        let (base, owner) = (opened.offset, allocation.device.0 as usize);
        let known = gpus.attributes(base)?;
        let Some(gpu) = known.gpu().filter(|gpu| *gpu < gpus.devices.len()) else {
            return Err(BackendError::NotSupported(format!("{base:#x} is not memory that CUDA IPC has mapped")));
        };
        if let Some(held) = self.locate(base) {
            return Err(BackendError::NotSupported(format!("{base:#x} was imported already, as memory of {}", held.device.in_words())));
        }
        self.has_opened.store(true, Ordering::Release);
        Ok((base, Source::Ipc(Opened { payload: opened.payload, owner, through: smallvec![(gpu, Some(base))], is_adopted: true })))
    }

    /// Returns the address that `gpu` uses for a byte of memory that was opened by CUDA IPC. `address` is the address of this byte in the
    /// mapping that the import returned. The function opens the memory through `gpu` if necessary. Returns `Some(None)` if `gpu` cannot
    /// open the memory, and `None` if the memory was not opened by CUDA IPC.
    pub fn opened_for(&self, gpus: &Gpus, gpu: usize, address: u64) -> Option<Option<u64>> {
        if !self.has_opened.load(Ordering::Acquire) {
            return None;
        }
        let known = self.at(address, |held| match &held.source {
            Source::Ipc(opened) => Some((held.allocation, opened.at(gpu), opened.payload, opened.owner)),
            _ => None,
        });
        let (allocation, known, payload, owner) = known.flatten()?;
        let offset = address - allocation.base;
        if let Some(base) = known {
            return Some(base.map(|base| base + offset));
        }
        let base =
            if gpus.can_access(gpu, owner) { open_through(gpus, gpu, &payload) } else { Err(BackendError::InvalidDevice(gpu as i32)) };
        let base = base.inspect_err(|error| log::debug!("memory of another process is not opened through GPU {gpu}: {error}")).ok();
        let kept = {
            let mut held = self.held_mut();
            let held = held.get_mut(&allocation.base).filter(|held| held.allocation.id == allocation.id);
            match held.map(|held| &mut held.source) {
                Some(Source::Ipc(opened)) => match opened.at(gpu) {
                    Some(kept) => kept,
                    None => {
                        opened.through.push((gpu, base));
                        return Some(base.map(|base| base + offset));
                    }
                },
                _ => None,
            }
        };
        // Another thread has opened the memory in the meantime. (Or a thread has closed it, which callers must not do at this time.) The
        // driver counts how often a GPU has opened the same memory, and returns the same address each time.
        if let Some(Err(error)) = base.map(|base| close_through(gpus, gpu, base)) {
            log::warn!("{error}");
        }
        Some(kept.map(|base| base + offset))
    }

    /// Returns the sources and destinations of a plan as addresses that `gpu` uses. Returns `None` if these are the addresses with which
    /// the plan was created.
    pub fn ends_for(&self, gpus: &Gpus, gpu: usize, ends: &[Endpoints]) -> Option<Arc<[Endpoints]>> {
        if !self.has_opened.load(Ordering::Acquire) {
            return None;
        }
        let seen = |address| self.opened_for(gpus, gpu, address).flatten().unwrap_or(address);
        let own: Arc<[Endpoints]> = ends.iter().map(|ends| Endpoints { dst: seen(ends.dst), src: seen(ends.src) }).collect();
        (*own != *ends).then_some(own)
    }
}

impl Sharing {
    /// Returns the value of the counter at the address `counter`.
    pub fn read_signal(&self, counter: u64) -> Result<u64, BackendError> {
        // SAFETY: The calling context has checked alignment and range, and the memory stays mapped during the call.
        self.with_counter(counter, || unsafe { signal::load(counter) })
    }

    /// Sets the counter of a signal to the signal's value, by a store of the CPU.
    pub fn raise_signal(&self, Signal { counter, value }: Signal) -> Result<(), BackendError> {
        // SAFETY: The calling context has checked alignment and range, and the memory stays mapped during the call.
        self.with_counter(counter, || unsafe { signal::store(counter, value) })
    }

    /// Calls `touch` and returns its result. Returns an error instead if the counter is not in memory that the CPU and the GPUs of all
    /// processes can access. The memory cannot be released during the call.
    fn with_counter<T>(&self, counter: u64, touch: impl FnOnce() -> T) -> Result<T, BackendError> {
        let touched = |held: &MappedImport| (held.allocation.kind == MemoryKind::Pinned).then(touch);
        self.at(counter, touched).flatten().ok_or_else(|| {
            BackendError::NotSupported(format!(
                "the signal at {counter:#x} is not in host memory shared between processes, which the CPU and the GPUs of all processes can \
                 access; allocate it there"
            ))
        })
    }

    pub fn lost_peer(&self, wanted: Signal) -> Option<LostPeer> {
        self.at(wanted.counter, |held| held.signallers.lost_peer(wanted)).flatten()
    }

    /// Records waits of captured graphs and of the caller's kernels, so that they can be ended if a process is lost. The records stay until
    /// the memory is unmapped, because the backend does not learn when such a wait ends.
    pub fn capture_waits(&self, signals: impl Iterator<Item = Signal>) -> Result<(), BackendError> {
        let mut waits = lock(&self.waits);
        for wanted in signals {
            // Reading the counter also checks that the CPU can access it. The CPU must set the counter if the peer exits.
            let now = self.read_signal(wanted.counter)?;
            if let Some(peer) = self.lost_peer(wanted) {
                return Err(FailedWait { wanted, now, peer }.error());
            }
            waits.capture(wanted);
        }
        Ok(())
    }

    /// Ends the waits of streams and kernels for counters of `allocation` that a lost party (process or context) should have set. `party`
    /// is the number of the party, and `peer` describes its loss.
    pub fn fail_waits(&self, allocation: &Allocation, party: Option<u32>, peer: LostPeer) {
        let mut waits = lock(&self.waits);
        self.change(allocation, |held| held.signallers.lose(party, peer));
        let is_lost = |wanted: Signal| {
            let concerns = |held: &MappedImport| held.signallers.concerns(party, wanted.counter);
            allocation.has(wanted.counter) && peer.fails(wanted) && self.at(wanted.counter, concerns).unwrap_or(false)
        };
        let Waits { pending, captured, failed, stops } = &mut *waits;
        for wanted in pending.extract_if(.., |wanted| is_lost(*wanted)) {
            // The failure is recorded before the stream continues. A thread that sees that the stream has finished therefore also sees the
            // failure.
            if self.raise_here(wanted, |now| self.note_failed(wanted, now, peer)) {
                failed.push(wanted);
            }
        }
        for (counter, value) in captured.extract_if(|&counter, &mut value| is_lost(Signal { counter, value })) {
            let wanted = Signal { counter, value };
            self.raise_here(wanted, |now| self.note_failed(wanted, now, peer));
            // The wait stays registered even if the counter has reached its value, because the program may reset the counter and launch the
            // graph again.
            failed.push(wanted);
        }
        let abandoned: Vec<StepFate> =
            stops.extract_if(|&counter, _| is_lost(Signal { counter, value: 1 })).map(|(_, fate)| fate).collect();
        drop(waits);
        // The lock is not held during these calls. They notify other ranks, and ranks in this process fail their waits immediately.
        abandoned.iter().for_each(|fate| fate.abandon(Abandoned::OfKernels));
    }

    fn note_failed(&self, wanted: Signal, now: u64, peer: LostPeer) {
        if let Some(line) = self.line_of(wanted.counter) {
            self.failed_waits.note(line, FailedWait { wanted, now, peer });
        }
    }

    /// Sets the counters of failed waits again, including captured waits, if another process has lowered these counters since. Returns true
    /// if there is any failed wait.
    pub fn fail_waits_again(&self) -> bool {
        let waits = lock(&self.waits);
        for &wanted in &waits.failed {
            self.raise_here(wanted, |now| {
                if let Some(peer) = self.lost_peer(wanted) {
                    self.note_failed(wanted, now, peer);
                }
            });
        }
        !waits.failed.is_empty()
    }

    /// Sets the counter of a signal by a store of the CPU if the counter has not reached the signal's value, and returns true in this case.
    /// Before that, calls `before` with the counter's old value.
    fn raise_here(&self, wanted: Signal, before: impl FnOnce(u64)) -> bool {
        match self.read_signal(wanted.counter) {
            Ok(now) if !signal::reached(now, wanted.value) => {
                before(now);
                // SAFETY: The counter was read just now, so it is mapped. It stays mapped until it is removed from the table, which
                // requires the lock that the caller holds.
                unsafe { signal::store(wanted.counter, wanted.value) };
                true
            }
            _ => false,
        }
    }
}

/// Pins host memory so that every GPU of the process can access it at the address that the CPU uses.
pub(super) fn pin(gpus: &Gpus, base: u64, bytes: u64) -> Result<(), BackendError> {
    let gpu = gpus.any_used();
    let primary = gpus.primary(gpu)?;
    let same = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
    if gpus.driver.attribute(same, gpus.devices[gpu].ordinal) == 0 {
        return Err(BackendError::NotSupported("GPUs access registered host memory at different addresses on this machine".into()));
    }
    const PORTABLE_AND_MAPPED: c_uint = 1 | 2;
    let _outside = OutsideCapture::enter(gpus.driver);
    let _current = primary.enter()?;
    // SAFETY: The pages stay mapped until `unpin` has unregistered them.
    unsafe { call!(gpus.driver, cuMemHostRegister(handle(base as usize), bytes as usize, PORTABLE_AND_MAPPED)) }
}

fn unpin(gpus: &Gpus, base: u64) -> Result<(), BackendError> {
    if gpus.is_lost(gpus.any_used()) {
        return Ok(());
    }
    let _outside = OutsideCapture::enter(gpus.driver);
    // The memory is unpinned even if the context cannot be made current, because no other code would unpin it.
    let _current = gpus.primary(gpus.any_used())?.enter();
    // SAFETY: `pin` registered the pages. The caller guarantees that work which uses them has finished.
    unsafe { call!(gpus.driver, cuMemHostUnregister(handle(base as usize))) }
}

pub(super) fn release_handle(driver: &Driver, memory: u64) {
    // SAFETY: This backend retained or imported the memory, so it owns the handle. Mapped memory stays valid until it is unmapped.
    if let Err(error) = unsafe { call_optional!(driver, cuMemRelease(memory)) } {
        log::warn!("{error}");
    }
}
