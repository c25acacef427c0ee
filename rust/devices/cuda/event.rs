//! Stores the events that callers have created through this backend.
//!
//! A `CUevent` belongs to one context and can be recorded only in streams of that context, but an event of this backend can be recorded in
//! any stream. An event of this backend therefore refers to a `CUevent` of the GPU on which it was last recorded. Handles of this backend
//! are odd numbers, which no driver pointer can be. Any other handle is assumed to be a `CUevent` of the caller.

use super::device::Mark;
use super::driver::{CUevent, handle, lock};
use crate::backend::failed_waits::Behind;
use crate::backend::{BackendError, EventHandle};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Most recent recording of an event of this backend, or `None` if the event has not been recorded yet.
pub(super) type EventRecord = Option<Recording>;

#[derive(Clone, Debug)]
pub(super) struct Recording {
    pub gpu: usize,
    /// `CUevent` of the recording. A thread that waits for the event, or makes a stream wait for it, holds a reference, so that no other
    /// code records this `CUevent` in the meantime.
    pub mark: Arc<Mark>,
    /// Waits for signals that precede the event in its stream. If one of them has failed, a thread that waits for the event gets the error.
    pub behind: Behind,
}

#[derive(Debug, Default)]
pub(super) struct Events {
    next: AtomicUsize,
    /// Most recent recording of each event, by event handle. The lock is not held while the driver records an event or waits for one,
    /// because such a call blocks while the queue of a stream is full. Each recording uses a different `CUevent`. Until a recording is
    /// complete, the entry refers to the previous `CUevent`.
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

    /// Returns the most recent recording of an event of this backend.
    pub fn recorded(&self, event: EventHandle) -> Result<EventRecord, BackendError> {
        lock(&self.events).get(&event.0).cloned().ok_or(BackendError::InvalidHandle(event.0, "event"))
    }

    /// Stores the most recent recording of an event of this backend.
    pub fn note(&self, event: EventHandle, recording: Recording) -> Result<(), BackendError> {
        let mut events = lock(&self.events);
        *events.get_mut(&event.0).ok_or(BackendError::InvalidHandle(event.0, "event"))? = Some(recording);
        Ok(())
    }

    /// Drops all events of this backend. Their `CUevent`s return to the pools of their contexts.
    pub fn release(&self) {
        lock(&self.events).clear();
    }
}

/// Returns the `CUevent` of a handle that other code has created. Returns an error for 0 and for handles of this backend.
pub(super) fn raw_event(event: EventHandle) -> Result<CUevent, BackendError> {
    if event.0 == 0 || is_ours(event) { Err(BackendError::InvalidHandle(event.0, "event")) } else { Ok(handle(event.0)) }
}
