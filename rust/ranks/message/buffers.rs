//! Manages the memory from and to which messages are copied: memory of this rank that is exported to other ranks, and memory of other ranks
//! that is imported here.
//!
//! Each allocation is exported once and imported once. It stays mapped between messages, because mapping takes some hundred microseconds on
//! CUDA. Imports that no message uses are closed if their owner has freed the memory, or if there are too many.

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

/// Number of imported allocations that stay mapped. If there are more, the least recently used ones are unmapped, unless a message uses
/// them.
const MOST_IMPORTS: usize = 256;

/// Maximum number of this rank's allocations whose export handles are kept for later messages.
const MOST_EXPORTS: usize = 1024;

/// Minimum size in bytes of a bounce buffer (shared host memory through which a message passes).
const LEAST_BOUNCE: u64 = 4096;

/// Maximum total size in bytes of the bounce buffers of all sends, and separately of all receives. A single larger message is allowed.
const MOST_BOUNCE_BYTES: u64 = 512 << 20;

/// Maximum number and maximum total size in bytes of the unused bounce buffers that are kept for later sends, and separately for later
/// receives. The number is limited because each buffer uses a file descriptor.
const MOST_FREE_BOUNCES: (usize, u64) = (16, 32 << 20);

pub(super) type HandleBytes = [u8; crate::ipc::handle::BYTES];

/// Memory of this rank that contains the data of a send, or that receives the data of a receive.
#[derive(Copy, Clone, Debug)]
pub(super) struct MessagePlace {
    /// Address of the caller's memory from which the message is sent or into which it is received.
    pub address: u64,
    /// Size in bytes of the message to send or of the receive buffer.
    pub bytes: u64,
    /// True if a message is sent from this memory, false if one is received into it.
    pub is_send: bool,
    /// Device of the memory, as numbered in this context.
    pub device: DeviceId,
    pub through: Through,
}

/// Method by which other ranks access the data of a send or receive.
#[derive(Copy, Clone, Debug)]
pub(super) enum Through {
    /// Other ranks map the caller's memory itself.
    Direct { handle: HandleBytes, offset: u64, device: i32 },
    /// The data passes through the slot of the operation (its record in shared memory).
    Slot,
    /// The data passes through a bounce buffer in shared host memory.
    Bounce(Bounce, HandleBytes),
    /// The message has no data, so no memory is accessed.
    Nothing,
}

/// Bounce buffer: shared host memory through which data passes between the caller's memory and the other rank.
#[derive(Copy, Clone, Debug)]
pub(super) struct Bounce {
    pub address: u64,
    bytes: u64,
    is_send: bool,
}

/// Allocation of this rank that is exported to other ranks.
#[derive(Clone, Copy)]
struct ExportedRange {
    base: u64,
    bytes: u64,
    handle: HandleBytes,
}

/// Allocation of another rank, mapped in this process. Each message that uses it holds a reference in addition to that of the table of
/// imports.
#[derive(Debug)]
pub(super) struct ImportedBuffer {
    address: u64,
    /// Size in bytes of the mapped memory.
    bytes: u64,
    /// Logical time of the last use: the number of uses of all imported allocations before this use.
    used: AtomicU64,
}

/// Exported memory, imported memory and bounce buffers of a messenger (endpoint for messages between ranks).
#[derive(Default)]
pub(super) struct Buffers {
    exports: Mutex<HashMap<u64, Vec<ExportedRange>, RandomState>>,
    imports: Mutex<HashMap<HandleBytes, Arc<ImportedBuffer>, RandomState>>,
    uses: AtomicU64,
    /// Bounce buffers of receives, and bounce buffers of sends. They are separate, so that neither can use up the memory of the other.
    bounces: [Mutex<Bounces>; 2],
}

/// Bounce buffers of all sends or of all receives.
#[derive(Default)]
struct Bounces {
    /// Bounce buffers that no message uses at present, sorted by the time of their last use. The most recently used buffer comes last.
    free: Vec<Bounce>,
    /// Total size in bytes of all bounce buffers of this kind, used or unused.
    bytes: u64,
}

impl Bounces {
    /// Removes unused bounce buffers from the list and returns them, the least recently used first. Stops when at most `most` buffers with
    /// at most `most_free` bytes are unused, and all buffers together have at most `most_bytes` bytes.
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
    /// Returns the description of this memory for the slot (record in shared memory) of the operation. The rank that makes the copy reads
    /// the description in the slot.
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
    /// Returns the description of a message's memory, including the method by which other ranks access it. Small sends from host memory
    /// pass through their slot in shared memory. Host memory that other processes cannot map passes through a bounce buffer.
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
                "{address:#x} is memory of {device}, which no rank of the node uses: name it in `devices` when a rank creates the node \
                 object"
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
            let bounce = self.take_bounce(bytes, is_send, MOST_BOUNCE_BYTES)?;
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

    /// Returns a bounce buffer of at least `bytes` bytes: the smallest unused one that is at most twice as large, or a new one. Unused
    /// buffers are kept because other ranks have them mapped. Fails if the bounce buffers of all sends, or of all receives, would exceed
    /// `most` bytes.
    pub(super) fn take_bounce(&self, bytes: u64, is_send: bool, most: u64) -> Result<Bounce, Error> {
        let pieces = &self.buffers.bounces[usize::from(is_send)];
        let bytes = bytes.max(LEAST_BOUNCE).checked_next_power_of_two().unwrap_or(bytes);
        let free = |bounces: &mut Bounces| {
            let fitting = bounces.free.iter().enumerate().filter(|(_, bounce)| bounce.bytes >= bytes && bounce.bytes / 2 <= bytes);
            fitting.min_by_key(|(_, bounce)| bounce.bytes).map(|(at, _)| at).map(|at| bounces.free.remove(at))
        };
        if let Some(bounce) = free(&mut lock(pieces)) {
            return Ok(bounce);
        }
        self.settle_ended(is_send);
        self.reap(&mut lock(self.pool_of(is_send)), usize::MAX);
        let surplus = {
            let mut bounces = lock(pieces);
            if let Some(bounce) = free(&mut bounces) {
                return Ok(bounce);
            }
            // Unused buffers are freed, so that the total size stays within the limit.
            let surplus = bounces.surplus(MOST_FREE_BOUNCES, most.saturating_sub(bytes));
            let is_full = bounces.bytes > 0 && bounces.bytes.saturating_add(bytes) > most;
            bounces.bytes = if is_full { bounces.bytes } else { bounces.bytes.saturating_add(bytes) };
            (surplus, (is_full, bounces.bytes))
        };
        let (surplus, (is_full, all)) = surplus;
        self.free_bounces(surplus);
        if is_full {
            let (held, remedy) = if is_send {
                (
                    "sends of this rank that have not been received",
                    "receive the messages sent to this rank, and send again when some were received",
                )
            } else {
                ("receives of this rank that have not completed", "wait for some of them, or cancel them")
            };
            return Err(Error::QueueFull(format!(
                "{held} use {all} bytes of shared memory for pageable data, and {bytes} more would exceed the limit of {most}: {remedy}; \
                 or use memory shared between processes"
            )));
        }
        let made = self.node.context.allocate_shared(DeviceId::HOST, bytes);
        let address = made.inspect_err(|_| lock(pieces).bytes -= bytes)?;
        lock(&self.held).allocations.push(address);
        Ok(Bounce { address, bytes, is_send })
    }

    pub(super) fn give_bounce_back(&self, bounce: Bounce) {
        let surplus = {
            let mut bounces = lock(&self.buffers.bounces[usize::from(bounce.is_send)]);
            bounces.free.push(bounce);
            bounces.surplus(MOST_FREE_BOUNCES, u64::MAX)
        };
        self.free_bounces(surplus);
    }

    /// Frees bounce buffers that no message uses.
    fn free_bounces(&self, pieces: Vec<Bounce>) {
        for Bounce { address, .. } in pieces {
            lock(&self.held).allocations.retain(|held| *held != address);
            if let Err(error) = self.node.context.state().free_unused(address) {
                log::debug!("could not free memory of a messenger: {error}");
            }
        }
    }

    /// Returns a handle by which other ranks can map the allocation, and the offset in bytes of `address` in the allocation.
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

    /// Returns the mapping of the memory that a handle denotes. Maps the memory if it is not mapped yet.
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

    /// Unmaps imported allocations that no message uses, if their owner has freed the memory. If more than [`MOST_IMPORTS`] allocations are
    /// imported, also unmaps the least recently used ones that no message uses.
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
                log::debug!("could not unmap memory of another rank: {error}");
            }
        }
    }

    /// Removes all imported allocations from the table and returns their addresses in this process. The caller unmaps them.
    pub(super) fn take_imports(&self) -> Vec<u64> {
        lock(&self.buffers.imports).drain().map(|(_, imported)| imported.address).collect()
    }
}

impl ImportedBuffer {
    /// Returns the address in this process of a range of the imported allocation. Returns `None` if the allocation does not contain the
    /// range.
    pub fn range(&self, offset: u64, bytes: u64) -> Option<u64> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes).then_some(self.address + offset)
    }
}
