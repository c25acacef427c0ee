//! What importer and exporter tell each other without a message: which allocations were freed, and which are no longer mapped.
//!
//! A socket has room for some hundred packets, and neither side may wait for the other to read. So each allocation that an importer asks
//! for gets a slot of two numbers in a memory file of the importer's. The exporter writes into the one when the memory is freed, the
//! importer into the other when it does not map it any more. What they write is the number of the request, which no other has: so a slot
//! is used again as it is. Either side may write what it likes and harms only itself.

use super::segment::{self, Mapping};
use rustix::fd::OwnedFd;
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, Result};
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicU32, Ordering};

/// As many allocations of one exporter a context may have mapped: the system lets a process have about as many mappings.
pub const SLOTS: u32 = 1 << 16;

const SLOT_BYTES: u64 = 8;
const BYTES: u64 = SLOTS as u64 * SLOT_BYTES;

/// The board of one connection.
#[derive(Debug)]
pub struct Board {
    mapping: Mapping,
}

impl Board {
    /// A new one, and the file with which the other side opens it.
    pub fn new() -> Result<(Board, OwnedFd)> {
        let file = segment::file(BYTES)?;
        Ok((Board::open(&file)?, file))
    }

    /// That of the other side.
    pub fn open(file: &OwnedFd) -> Result<Board> {
        Ok(Board { mapping: Mapping::new(file, BYTES)? })
    }

    /// Has the pages of a slot now: where they come only when they are written to, a system without memory ends the writer.
    pub fn reserve(file: &OwnedFd, slot: u32) -> Result<()> {
        rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, u64::from(slot) * SLOT_BYTES, SLOT_BYTES)
    }

    fn at(&self, slot: u32, offset: u64) -> Result<&AtomicU32> {
        if slot >= SLOTS {
            return Err(Errno::INVAL);
        }
        let address = self.mapping.base() + u64::from(slot) * SLOT_BYTES + offset;
        // SAFETY: aligned, inside of the mapping, which lives as long as the result, and looked at through atomics alone by both sides.
        Ok(unsafe { &*with_exposed_provenance(address as usize) })
    }

    /// Exporter: what this request was granted is freed.
    pub fn withdraw(&self, slot: u32, request: u32) {
        self.at(slot, 0).into_iter().for_each(|place| place.store(request, Ordering::Release));
    }

    pub fn is_withdrawn(&self, slot: u32, request: u32) -> bool {
        self.at(slot, 0).is_ok_and(|place| place.load(Ordering::Acquire) == request)
    }

    /// Importer: what this request was or will be granted is not mapped.
    pub fn close(&self, slot: u32, request: u32) {
        self.at(slot, 4).into_iter().for_each(|place| place.store(request, Ordering::Release));
    }

    pub fn is_closed(&self, slot: u32, request: u32) -> bool {
        self.at(slot, 4).is_ok_and(|place| place.load(Ordering::Acquire) == request)
    }
}
