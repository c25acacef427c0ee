//! Stores the events that callers have created through this backend.
//!
//! A `CUevent` belongs to one context and can be recorded only in streams of that context, but an event of this backend may be recorded in
//! any stream. An event of this backend therefore refers to a `CUevent` of the GPU on which it was last recorded. Handles of this backend
//! are odd numbers, which cannot be pointers of the driver. Any other handle is taken for a `CUevent` of the caller.

use super::device::Mark;
use super::driver::{CUevent, handle, lock};
use crate::backend::failed_waits::Behind;
use crate::backend::{BackendError, EventHandle};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Last recording of an event of this backend, or `None` before the first.
pub(super) type EventRecord = Option<Recording>;

#[derive(Clone, Debug)]
pub(super) struct Recording {
    pub gpu: usize,
    /// `CUevent` of the recording. A thread that waits for the event, or makes a stream wait for it, holds a reference, so that the
    /// `CUevent` is not recorded again in the meantime.
    pub mark: Arc<Mark>,
    /// Waits that precede the event in its stream and may have failed.
    pub behind: Behind,
}

#[derive(Debug, Default)]
pub(super) struct Events {
    next: AtomicUsize,
    /// Last recording of each event, by handle. The lock is not held while the driver records an event or waits for one, because such a
    /// call blocks while the queue of a stream is full. Each recording uses another `CUevent`, so the event refers to the previous
    /// `CUevent` until the recording is complete.
    events: Mutex<HashMap<usize, EventRecord, ahash::RandomState>>,
}

pub(super) fn is_ours(event: EventHandle) -> bool {
    event.0 & 1 == 1
}

impl Events {
    pub fn create(&self) -> EventHandle {
        let event = self.next.fetch_add(2, Ordering::Relaxed) | 1;
        lock(&self.events).insert(event, None);
        EventHandle(event)
    }

    pub fn destroy(&self, event: EventHandle) -> Result<(), BackendError> {
        lock(&self.events).remove(&event.0).map(drop).ok_or(BackendError::InvalidHandle(event.0, "event"))
    }

    /// Returns the last recording of an event of this backend.
    pub fn recorded(&self, event: EventHandle) -> Result<EventRecord, BackendError> {
        lock(&self.events).get(&event.0).cloned().ok_or(BackendError::InvalidHandle(event.0, "event"))
    }

    /// Stores a new recording of an event of this backend.
    pub fn note(&self, event: EventHandle, recording: Recording) -> Result<(), BackendError> {
        let mut events = lock(&self.events);
        *events.get_mut(&event.0).ok_or(BackendError::InvalidHandle(event.0, "event"))? = Some(recording);
        Ok(())
    }

    /// Drops all events, which return to the pools.
    pub fn release(&self) {
        lock(&self.events).clear();
    }
}

/// Returns the `CUevent` for a handle that other code has created. Fails for 0 and for handles of this backend.
pub(super) fn raw_event(event: EventHandle) -> Result<CUevent, BackendError> {
    if event.0 == 0 || is_ours(event) { Err(BackendError::InvalidHandle(event.0, "event")) } else { Ok(handle(event.0)) }
}
