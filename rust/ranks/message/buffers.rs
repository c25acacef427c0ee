//! Memory that messages move from and to: what other ranks need to map this rank's, and theirs, mapped here.
//!
//! Each allocation is exported once and imported once, and stays mapped while messages come from it: mapping takes some hundred
//! microseconds on CUDA. Imports that nobody uses are closed once their owner has freed the memory, and beyond a bound.

use super::Messenger;
use crate::backend::{Allocation, BackendError, MemoryKind};
use crate::contexts::Error;
use crate::ipc::{Handle, INLINE_BYTES, IpcError, SlotBuffer};
use crate::sync::{Mutex, lock};
use crate::topology::DeviceId;
use ahash::RandomState;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Allocations of others that stay mapped although no message uses them.
const MOST_IMPORTS: usize = 256;

/// Allocations whose handles are kept.
const MOST_EXPORTS: usize = 1024;

/// The smallest piece of memory through which bytes pass.
const LEAST_BOUNCE: u64 = 4096;

/// Bytes of all pieces of a messenger at a time, unless one message has more.
const MOST_BOUNCE_BYTES: u64 = 512 << 20;

/// Pieces that are kept although no message uses them, each of which has a descriptor, and bytes of all of these.
const MOST_FREE_BOUNCES: (usize, u64) = (32, 64 << 20);

pub(super) type HandleBytes = [u8; crate::ipc::handle::BYTES];

/// Memory of this rank that a message leaves or comes to.
#[derive(Copy, Clone, Debug)]
pub(super) struct MessagePlace {
    /// The caller's memory.
    pub address: u64,
    /// Of the message, or of the buffer.
    pub bytes: u64,
    /// Whether the bytes leave it.
    pub is_send: bool,
    /// As this context numbers devices.
    pub device: DeviceId,
    pub through: Through,
}

/// How other ranks reach a place.
#[derive(Copy, Clone, Debug)]
pub(super) enum Through {
    /// They map it.
    Direct { handle: HandleBytes, offset: u64, device: i32 },
    /// Its bytes pass through the slot.
    Slot,
    /// Its bytes pass through this piece of shared memory.
    Bounce(Bounce, HandleBytes),
    /// There are no bytes.
    Nothing,
}

/// A piece of shared host memory.
#[derive(Copy, Clone, Debug)]
pub(super) struct Bounce {
    pub address: u64,
    bytes: u64,
}

/// Memory of this rank that others may map.
#[derive(Clone, Copy)]
struct ExportedRange {
    base: u64,
    bytes: u64,
    handle: HandleBytes,
}

/// Memory of another rank, mapped here; in use for as long as somebody has a copy.
#[derive(Debug)]
pub(super) struct ImportedBuffer {
    address: u64,
    /// What is mapped.
    bytes: u64,
    /// When it was used last, in uses of all.
    used: AtomicU64,
}

/// What is kept of this rank's memory and of others'.
#[derive(Default)]
pub(super) struct Buffers {
    exports: Mutex<HashMap<u64, Vec<ExportedRange>, RandomState>>,
    imports: Mutex<HashMap<HandleBytes, Arc<ImportedBuffer>, RandomState>>,
    uses: AtomicU64,
    bounces: Mutex<Bounces>,
}

/// Pieces of shared host memory.
#[derive(Default)]
struct Bounces {
    /// Those that no message uses, the one that was used last at the end.
    free: Vec<Bounce>,
    /// Of all, free or not.
    bytes: u64,
}

impl Bounces {
    /// Takes out free ones, the oldest first, until the rest are so few and small, and all together have no more than so many bytes.
    fn surplus(&mut self, (most, most_free): (usize, u64), most_bytes: u64) -> Vec<Bounce> {
        let mut surplus = Vec::new();
        while let Some(oldest) = self.free.first()
            && (self.free.len() > most || self.free.iter().map(|bounce| bounce.bytes).sum::<u64>() > most_free || self.bytes > most_bytes)
        {
            self.bytes -= oldest.bytes;
            surplus.push(self.free.remove(0));
        }
        surplus
    }
}

impl MessagePlace {
    /// As whoever moves the bytes is told of it.
    pub fn slot_buffer(&self) -> SlotBuffer {
        match self.through {
            Through::Direct { handle, offset, device } => SlotBuffer::Memory { handle, offset, device },
            Through::Slot => SlotBuffer::Inline,
            Through::Bounce(_, handle) => SlotBuffer::Memory { handle, offset: 0, device: DeviceId::HOST.0 },
            Through::Nothing => SlotBuffer::None,
        }
    }

    pub fn is_buffered(&self) -> bool {
        matches!(self.through, Through::Slot | Through::Bounce(..))
    }

    pub fn bounce(&self) -> Option<Bounce> {
        if let Through::Bounce(bounce, _) = self.through { Some(bounce) } else { None }
    }
}

impl Messenger {
    /// Looks at a caller's memory. A send's bytes pass through its slot where they are few and on the host; through shared memory pass those of
    /// host memory that other processes cannot map.
    pub(super) fn place(&self, address: u64, bytes: u64, is_send: bool) -> Result<MessagePlace, Error> {
        let refuse = |reason: String| Err(Error::NodeArgument { argument: c"data", reason });
        if bytes == 0 {
            return Ok(MessagePlace { address, bytes, is_send, device: DeviceId::HOST, through: Through::Nothing });
        }
        if address == 0 {
            return refuse(format!("data is NULL, but {bytes} bytes are to be moved"));
        }
        if address.checked_add(bytes - 1).is_none() {
            return refuse(format!("{address:#x} plus {bytes} bytes runs past the end of the address space"));
        }
        let shared = self.node.context.state();
        let found = shared.locate(address)?;
        let (base, size) = found.map_or((address, bytes), |allocation| (allocation.base, allocation.bytes));
        if bytes > size - (address - base) {
            return Err(Error::OutOfMemoryRange { address, bytes, base, size });
        }
        let Some(allocation) = found.filter(|allocation| allocation.kind != MemoryKind::Pageable) else {
            if let Some(Allocation { base, bytes: size, .. }) = shared.locate(address + (bytes - 1))?.filter(|_| found.is_none()) {
                return Err(Error::OutOfMemoryRange { address, bytes, base, size });
            }
            return self.buffered(address, bytes, is_send);
        };
        let is_host = allocation.device.is_host();
        if is_host && is_send && bytes <= INLINE_BYTES {
            return self.buffered(address, bytes, is_send);
        }
        let Some(device) = self.node.number_of(allocation.device) else {
            let device = allocation.device.in_words();
            return refuse(format!(
                "{address:#x} is memory of {device}, which no rank of the node works for: name it in the devices of a rank"
            ));
        };
        match self.export(&allocation, address, bytes) {
            Ok((handle, offset)) => {
                let through = Through::Direct { handle, offset, device: device.0 };
                Ok(MessagePlace { address, bytes, is_send, device: allocation.device, through })
            }
            Err(Error::Backend(BackendError::NotSupported(_)) | Error::Share(IpcError::NotSupported(_))) if is_host => {
                self.buffered(address, bytes, is_send)
            }
            Err(error) => Err(error),
        }
    }

    fn buffered(&self, address: u64, bytes: u64, is_send: bool) -> Result<MessagePlace, Error> {
        let through = if bytes <= INLINE_BYTES {
            Through::Slot
        } else {
            let bounce = self.take_bounce(bytes)?;
            let handle = self.export_bounce(bounce).inspect_err(|_| self.give_bounce_back(bounce))?;
            Through::Bounce(bounce, handle)
        };
        Ok(MessagePlace { address, bytes, is_send, device: DeviceId::HOST, through })
    }

    pub(super) fn export_bounce(&self, bounce: Bounce) -> Result<HandleBytes, Error> {
        let found = self.node.context.state().locate(bounce.address)?;
        let allocation = found.ok_or_else(|| Error::from(BackendError::InvalidPointer(bounce.address)))?;
        Ok(self.export(&allocation, bounce.address, bounce.bytes)?.0)
    }

    /// Shared memory of `bytes` at least: the smallest free piece of up to twice that size, or a new one. Some free pieces are kept, because other
    /// ranks have them mapped.
    pub(super) fn take_bounce(&self, bytes: u64) -> Result<Bounce, Error> {
        let bytes = bytes.max(LEAST_BOUNCE).checked_next_power_of_two().unwrap_or(bytes);
        let free = |bounces: &mut Bounces| {
            let fitting = bounces.free.iter().enumerate().filter(|(_, bounce)| bounce.bytes >= bytes && bounce.bytes / 2 <= bytes);
            fitting.min_by_key(|(_, bounce)| bounce.bytes).map(|(at, _)| at).map(|at| bounces.free.remove(at))
        };
        if let Some(bounce) = free(&mut lock(&self.buffers.bounces)) {
            return Ok(bounce);
        }
        self.reap(&mut lock(&self.slots), usize::MAX);
        let surplus = {
            let mut bounces = lock(&self.buffers.bounces);
            if let Some(bounce) = free(&mut bounces) {
                return Ok(bounce);
            }
            // Those that are free make room.
            let surplus = bounces.surplus(MOST_FREE_BOUNCES, MOST_BOUNCE_BYTES.saturating_sub(bytes));
            let is_full = bounces.bytes > 0 && bounces.bytes.saturating_add(bytes) > MOST_BOUNCE_BYTES;
            bounces.bytes = if is_full { bounces.bytes } else { bounces.bytes.saturating_add(bytes) };
            (surplus, (is_full, bounces.bytes))
        };
        let (surplus, (is_full, all)) = surplus;
        self.free_bounces(surplus);
        if is_full {
            return Err(Error::QueueFull(format!(
                "messages in pageable memory that have not ended take {all} bytes of host memory, and {bytes} more are above {MOST_BOUNCE_BYTES}: wait \
                 for some first, or use memory shared between processes"
            )));
        }
        let made = self.node.context.allocate_shared(DeviceId::HOST, bytes);
        let address = made.inspect_err(|_| lock(&self.buffers.bounces).bytes -= bytes)?;
        lock(&self.held).allocations.push(address);
        Ok(Bounce { address, bytes })
    }

    pub(super) fn give_bounce_back(&self, bounce: Bounce) {
        let surplus = {
            let mut bounces = lock(&self.buffers.bounces);
            bounces.free.push(bounce);
            bounces.surplus(MOST_FREE_BOUNCES, u64::MAX)
        };
        self.free_bounces(surplus);
    }

    /// Gives pieces back that no message uses.
    fn free_bounces(&self, pieces: Vec<Bounce>) {
        for Bounce { address, .. } in pieces {
            lock(&self.held).allocations.retain(|held| *held != address);
            if let Err(error) = self.node.context.state().free_unused(address) {
                log::debug!("giving back memory of a messenger: {error}");
            }
        }
    }

    /// What names an allocation for other ranks, and the place of `address` in it.
    fn export(&self, allocation: &Allocation, address: u64, bytes: u64) -> Result<(HandleBytes, u64), Error> {
        let mut exports = lock(&self.buffers.exports);
        let known = exports.get(&allocation.id).and_then(|ranges| {
            ranges.iter().find(|range| address >= range.base && bytes <= range.bytes && address - range.base <= range.bytes - bytes)
        });
        if let Some(ExportedRange { base, handle, .. }) = known {
            return Ok((*handle, address - base));
        }
        let handle = self.node.context.state().export_memory(address, bytes)?;
        let offset = handle.offset;
        let whole = Handle { offset: 0, bytes: handle.allocation_bytes, ..handle }.encode();
        if exports.len() >= MOST_EXPORTS {
            exports.clear();
        }
        let range = ExportedRange { base: address - offset, bytes: handle.allocation_bytes, handle: whole };
        exports.entry(allocation.id).or_default().push(range);
        Ok((whole, offset))
    }

    /// Maps what a handle names, or finds it mapped.
    pub(super) fn import(&self, handle: &HandleBytes, device: i32) -> Result<Arc<ImportedBuffer>, Error> {
        let now = self.buffers.uses.fetch_add(1, Ordering::Relaxed);
        let mut imports = lock(&self.buffers.imports);
        if let Some(known) = imports.get(handle) {
            known.used.store(now, Ordering::Relaxed);
            return Ok(Arc::clone(known));
        }
        self.evict(&mut imports);
        let device = DeviceId(device);
        let instead = (!device.is_host()).then(|| self.node.device_here(device));
        let (address, _) = self.node.context.state().import_through(&Handle::decode(handle)?, instead)?;
        let bytes = self.node.context.state().import_at(address).map_or(0, |import| import.bytes_from(address));
        let imported = Arc::new(ImportedBuffer { address, bytes, used: AtomicU64::new(now) });
        imports.insert(*handle, Arc::clone(&imported));
        Ok(imported)
    }

    /// Closes what no message uses: whatever its owner has freed, and where there are too many what was not used for the longest time.
    fn evict(&self, imports: &mut HashMap<HandleBytes, Arc<ImportedBuffer>, RandomState>) {
        let sharing = self.node.context.state();
        let is_stale = |imported: &ImportedBuffer| sharing.import_at(imported.address).is_none_or(|import| import.check().is_err());
        let mut used: Vec<u64> = imports.values().map(|imported| imported.used.load(Ordering::Relaxed)).collect();
        used.sort_unstable();
        let oldest = used.len().checked_sub(MOST_IMPORTS).map_or(0, |surplus| used[surplus]);
        let unused = imports.extract_if(|_, imported| {
            Arc::strong_count(imported) == 1 && (imported.used.load(Ordering::Relaxed) < oldest || is_stale(imported))
        });
        for (_, imported) in unused {
            if let Err(error) = self.node.context.state().close_idle(imported.address) {
                log::debug!("closing memory of another rank: {error}");
            }
        }
    }

    /// All that is mapped, to be closed.
    pub(super) fn take_imports(&self) -> Vec<u64> {
        lock(&self.buffers.imports).drain().map(|(_, imported)| imported.address).collect()
    }
}

impl ImportedBuffer {
    /// Where a part of it is, if it has that part.
    pub fn range(&self, offset: u64, bytes: u64) -> Option<u64> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then_some(self.address + offset)
    }
}
