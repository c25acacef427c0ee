//! What importer and exporter tell each other without a message: which allocations were freed, and which are no longer mapped.
//!
//! A socket has room for a few hundred packets, and neither side may wait for the other to read. So each allocation that an importer
//! requests gets a slot of two numbers in a memory file of the importer. The exporter writes the first number when it frees the memory,
//! the importer writes the second when it unmaps it. Both write the number of the request, which is unique, so a slot can be reused
//! without clearing it. A side that writes anything else harms only itself.

use super::segment::{self, Mapping};
use rustix::fd::OwnedFd;
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, Result};
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicU32, Ordering};

/// Allocations of one exporter that a context may map; the system allows a process about as many mappings.
pub const SLOTS: u32 = 1 << 16;

const SLOT_BYTES: u64 = 8;
const BYTES: u64 = SLOTS as u64 * SLOT_BYTES;

/// The board of one connection.
#[derive(Debug)]
pub struct Board {
    mapping: Mapping,
}

impl Board {
    /// A new board, and the file by which the other side opens it.
    pub fn new() -> Result<(Board, OwnedFd)> {
        let file = segment::file(BYTES)?;
        Ok((Board::open(&file)?, file))
    }

    /// The board that the other side has made.
    pub fn open(file: &OwnedFd) -> Result<Board> {
        Ok(Board { mapping: Mapping::new(file, BYTES)? })
    }

    /// Allocates the page of a slot now. If it were allocated at the first write, a system out of memory would kill the writer.
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

    /// Exporter: the memory that this request was granted has been freed.
    pub fn withdraw(&self, slot: u32, request: u32) {
        self.at(slot, 0).into_iter().for_each(|place| place.store(request, Ordering::Release));
    }

    pub fn is_withdrawn(&self, slot: u32, request: u32) -> bool {
        self.at(slot, 0).is_ok_and(|place| place.load(Ordering::Acquire) == request)
    }

    /// Importer: the memory that this request was granted, or will be, is not mapped.
    pub fn close(&self, slot: u32, request: u32) {
        self.at(slot, 4).into_iter().for_each(|place| place.store(request, Ordering::Release));
    }

    pub fn is_closed(&self, slot: u32, request: u32) -> bool {
        self.at(slot, 4).is_ok_and(|place| place.load(Ordering::Acquire) == request)
    }
}
