//! Shared table in which importer and exporter record, without messages, which allocations were freed and which are no longer mapped.
//!
//! The socket between the two sides can hold only a few hundred packets, and neither side may block until the other one reads. Each
//! allocation that an importer requests therefore gets a slot of two numbers in a memory file of the importer. The exporter writes the
//! first number when it frees the memory. The importer writes the second number when it unmaps the memory. Both write the unique number of
//! the request, so a slot can be reused without clearing it. A process that writes anything else harms only itself.

use super::segment::{self, Mapping};
use rustix::fd::OwnedFd;
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, Result};
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicU32, Ordering};

/// Maximum number of allocations of one exporter that a context can map. The kernel's default limit on the number of mappings of a process
/// is about as high.
pub const SLOTS: u32 = 1 << 16;

const SLOT_BYTES: u64 = 8;
const BYTES: u64 = SLOTS as u64 * SLOT_BYTES;

/// Board: shared table of freed and unmapped allocations of one connection.
#[derive(Debug)]
pub struct Board {
    mapping: Mapping,
}

impl Board {
    /// Creates a board. Returns it together with the memory file by which the other side can open it.
    pub fn new() -> Result<(Board, OwnedFd)> {
        let file = segment::file(BYTES)?;
        Ok((Board::open(&file)?, file))
    }

    /// Opens the board that the other side of the connection has created.
    pub fn open(file: &OwnedFd) -> Result<Board> {
        Ok(Board { mapping: Mapping::new(file, BYTES)? })
    }

    /// Allocates the page of a slot in advance. Otherwise the first write would allocate it, and a system without free memory would kill
    /// the writing process.
    pub fn reserve(file: &OwnedFd, slot: u32) -> Result<()> {
        rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, u64::from(slot) * SLOT_BYTES, SLOT_BYTES)
    }

    fn at(&self, slot: u32, offset: u64) -> Result<&AtomicU32> {
        if slot >= SLOTS {
            return Err(Errno::INVAL);
        }
        let address = self.mapping.base() + u64::from(slot) * SLOT_BYTES + offset;
        // SAFETY: the address is aligned and inside the mapping, which lives as long as the result. Both sides access it only through
        // atomics.
        Ok(unsafe { &*with_exposed_provenance(address as usize) })
    }

    /// Records on the exporter's side that the memory of this request has been freed.
    pub fn withdraw(&self, slot: u32, request: u32) {
        self.at(slot, 0).into_iter().for_each(|place| place.store(request, Ordering::Release));
    }

    pub fn is_withdrawn(&self, slot: u32, request: u32) -> bool {
        self.at(slot, 0).is_ok_and(|place| place.load(Ordering::Acquire) == request)
    }

    /// Records on the importer's side that the memory of this request is not mapped. This also applies if the exporter's answer arrives
    /// later.
    pub fn close(&self, slot: u32, request: u32) {
        self.at(slot, 4).into_iter().for_each(|place| place.store(request, Ordering::Release));
    }

    pub fn is_closed(&self, slot: u32, request: u32) -> bool {
        self.at(slot, 4).is_ok_and(|place| place.load(Ordering::Acquire) == request)
    }
}
