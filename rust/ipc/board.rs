//! Implements the board, a shared table in which two processes record, without messages, which allocations were freed and which are no
//! longer mapped. One process exports the allocations, and the other imports them.
//!
//! The socket between the two processes can hold only a few hundred packets, and neither process may block until the other one reads. Each
//! allocation that an importer requests therefore gets a slot of two numbers in a memory file of the importer. The exporter writes the
//! first number when it frees the memory. The importer writes the second number when it unmaps the memory. Both write the unique number of
//! the request, so a slot can be reused without clearing it. A process that writes anything else harms only itself.

use super::segment::{self, Mapping};
use rustix::fd::OwnedFd;
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, Result};
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicU32, Ordering};

/// Maximum number of allocations of one exporter that a context can map. It is about as high as the kernel's default limit on the number of
/// mappings of a process.
pub const SLOTS: u32 = 1 << 16;

const SLOT_BYTES: u64 = 8;
const BYTES: u64 = SLOTS as u64 * SLOT_BYTES;

/// Shared table (board) in which importer and exporter of one connection record freed and unmapped allocations.
#[derive(Debug)]
pub struct Board {
    mapping: Mapping,
}

impl Board {
    /// Creates a board (shared table of freed and unmapped allocations). Returns it together with the memory file through which the process
    /// at the other end of the connection opens it.
    pub fn new() -> Result<(Board, OwnedFd)> {
        let file = segment::file(BYTES)?;
        Ok((Board::open(&file)?, file))
    }

    /// Opens the board (shared table of freed and unmapped allocations) that the process at the other end of the connection has created.
    pub fn open(file: &OwnedFd) -> Result<Board> {
        Ok(Board { mapping: Mapping::new(file, BYTES)? })
    }

    /// Allocates in advance the page of the board (shared table) that contains the slot `slot`. Without this call, the first write to the
    /// slot would allocate the page, and a system without free memory would kill the writing process.
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

    /// Records in a slot of the board that the exporter has freed the memory of request number `request`. The exporter calls this function.
    pub fn withdraw(&self, slot: u32, request: u32) {
        self.at(slot, 0).into_iter().for_each(|place| place.store(request, Ordering::Release));
    }

    pub fn is_withdrawn(&self, slot: u32, request: u32) -> bool {
        self.at(slot, 0).is_ok_and(|place| place.load(Ordering::Acquire) == request)
    }

    /// Records in a slot of the board that the importer has unmapped the memory of request number `request`, or will not map it. The record
    /// remains valid if the exporter's answer to the request arrives later. The importer calls this function.
    pub fn close(&self, slot: u32, request: u32) {
        self.at(slot, 4).into_iter().for_each(|place| place.store(request, Ordering::Release));
    }

    pub fn is_closed(&self, slot: u32, request: u32) -> bool {
        self.at(slot, 4).is_ok_and(|place| place.load(Ordering::Acquire) == request)
    }
}
