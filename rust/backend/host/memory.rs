//! Memory of the virtual devices: host memory with an owner.

use super::sync::held;
use crate::backend::{Allocation, BackendError, MemoryKind};
use crate::topology::DeviceId;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A page: what `cudaMalloc` guarantees (256 bytes) and more, so that devices share no page.
const ALIGNMENT: usize = 4096;

/// Allocation ids are unique in the process, over all backends.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// Every allocation that has not been freed, by its first address. Frees what is left when dropped.
#[derive(Debug, Default)]
pub(super) struct Memory {
    allocations: RwLock<BTreeMap<u64, Allocation>>,
}

impl Memory {
    /// Uninitialised memory of `device`. A request of 0 bytes gets 1, so that every allocation has an address of its own.
    pub(super) fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        let out_of_memory = || BackendError::OutOfMemory { device: device.0, bytes };
        let layout = layout(bytes.max(1)).ok_or_else(out_of_memory)?;
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc(layout) };
        if base.is_null() {
            return Err(out_of_memory());
        }
        let base = base.expose_provenance() as u64;
        let kind = if device.is_host() { MemoryKind::Pinned } else { MemoryKind::Device };
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        held(self.allocations.write()).insert(base, Allocation { id, base, bytes: bytes.max(1), device, kind });
        Ok(base)
    }

    /// Gives back what [`Memory::allocate`] has returned.
    pub(super) fn free(&self, address: u64) -> Result<(), BackendError> {
        let allocation = held(self.allocations.write()).remove(&address).ok_or(BackendError::InvalidPointer(address))?;
        release(&allocation);
        Ok(())
    }

    /// The allocation that `address` lies in.
    pub(super) fn locate(&self, address: u64) -> Option<Allocation> {
        let allocations = held(self.allocations.read());
        let (_, allocation) = allocations.range(..=address).next_back()?;
        (address - allocation.base < allocation.bytes).then_some(*allocation)
    }

    /// Bytes allocated on `device` at the moment.
    pub(super) fn allocated_bytes(&self, device: DeviceId) -> u64 {
        held(self.allocations.read()).values().filter(|a| a.device == device).map(|a| a.bytes).sum()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for allocation in held(self.allocations.get_mut()).values() {
            release(allocation);
        }
    }
}

/// `None` for more than the address space holds.
fn layout(bytes: u64) -> Option<Layout> {
    Layout::from_size_align(usize::try_from(bytes).ok()?, ALIGNMENT).ok()
}

/// Frees an allocation that has just left the registry.
fn release(allocation: &Allocation) {
    if let Some(layout) = layout(allocation.bytes) {
        // SAFETY: the address came from `alloc` with this layout, and its only registry entry is gone.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(allocation.base as usize), layout) }
    }
}
