//! Tracks the memory, streams and events that the caller has created. A context can therefore reject resources that it does not own, and
//! release all of its own resources when it is closed.

use super::error::Error;
use crate::backend::{Backend, BackendError, EventHandle, StreamHandle};
use crate::sync::{Mutex, lock};
use crate::topology::DeviceId;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory, streams and events of one context that the caller has created and not yet released.
#[derive(Debug, Default)]
#[repr(C)] // Fields that every execution reads come first.
pub(super) struct Holdings {
    frees: AtomicU64,
    memory: Mutex<HashMap<u64, (DeviceId, u64)>>,
    streams: Mutex<HashMap<StreamHandle, DeviceId>>,
    events: Mutex<HashSet<EventHandle>>,
}

/// Numbers of allocations, streams and events that the caller had not released when the context closed.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Left {
    pub allocations: usize,
    pub bytes: u64,
    pub streams: usize,
    pub events: usize,
}

impl Holdings {
    /// Allocates memory on `device` and returns its address. If `is_shared` is true, other processes can map the memory.
    pub fn allocate(&self, device: DeviceId, bytes: u64, is_shared: bool, backend: &dyn Backend) -> Result<u64, BackendError> {
        let address = if is_shared { backend.allocate_shared(device, bytes) } else { backend.allocate(device, bytes) }?;
        lock(&self.memory).insert(address, (device, bytes));
        Ok(address)
    }

    /// Removes the allocation at `address` from the list and returns its size in bytes. If two threads free the same address at the same
    /// time, only one of them succeeds.
    pub fn take(&self, address: u64) -> Result<u64, Error> {
        lock(&self.memory).remove(&address).map(|(_, bytes)| bytes).ok_or(Error::NotAllocated(address))
    }

    /// True if the caller owns an allocation that starts at exactly this address.
    pub fn has(&self, address: u64) -> bool {
        lock(&self.memory).contains_key(&address)
    }

    /// Increments the number of frees after the backend has freed memory. A plan that has stored a different number must check that its
    /// memory is still allocated.
    pub fn count_free(&self) {
        self.frees.fetch_add(1, Ordering::Release);
    }

    /// Returns the number of frees in the backend so far.
    pub fn frees(&self) -> u64 {
        self.frees.load(Ordering::Acquire)
    }

    pub fn create_stream(&self, device: DeviceId, backend: &dyn Backend) -> Result<StreamHandle, BackendError> {
        let stream = backend.create_stream(device)?;
        lock(&self.streams).insert(stream, device);
        Ok(stream)
    }

    pub fn destroy_stream(&self, stream: StreamHandle, backend: &dyn Backend) -> Result<(), BackendError> {
        lock(&self.streams).remove(&stream).ok_or(BackendError::InvalidHandle(stream.0, "stream"))?;
        backend.destroy_stream(stream)
    }

    pub fn create_event(&self, backend: &dyn Backend) -> Result<EventHandle, BackendError> {
        let event = backend.create_event()?;
        lock(&self.events).insert(event);
        Ok(event)
    }

    pub fn destroy_event(&self, event: EventHandle, backend: &dyn Backend) -> Result<(), BackendError> {
        if !lock(&self.events).remove(&event) {
            return Err(BackendError::InvalidHandle(event.0, "event"));
        }
        backend.destroy_event(event)
    }

    /// Returns the size in bytes of all memory on `device` that the caller has allocated and not freed.
    pub fn bytes(&self, device: DeviceId) -> u64 {
        lock(&self.memory).values().filter(|(d, _)| *d == device).map(|(_, bytes)| bytes).sum()
    }

    /// Returns the number of streams on `device` that the caller has created and not destroyed.
    pub fn streams(&self, device: DeviceId) -> u64 {
        lock(&self.streams).values().filter(|d| **d == device).count() as u64
    }

    /// Releases all resources that the caller has not released. All work must have finished. Returns the numbers of the released resources,
    /// and the first error.
    pub fn release(&self, backend: &dyn Backend) -> (Left, Result<(), BackendError>) {
        let streams = std::mem::take(&mut *lock(&self.streams));
        let events = std::mem::take(&mut *lock(&self.events));
        let memory = std::mem::take(&mut *lock(&self.memory));
        let left = Left {
            allocations: memory.len(),
            bytes: memory.values().map(|(_, bytes)| bytes).sum(),
            streams: streams.len(),
            events: events.len(),
        };
        let mut result = Ok(());
        for event in events {
            result = result.and(backend.destroy_event(event));
        }
        for stream in streams.into_keys() {
            result = result.and(backend.destroy_stream(stream));
        }
        for address in memory.into_keys() {
            result = result.and(backend.free(address));
        }
        (left, result)
    }
}
