//! The caller's events.
//!
//! A `CUevent` belongs to one context and can be recorded in its streams alone, but an event of this backend may be recorded in any
//! stream. So it stands for a `CUevent` of whichever GPU it was last recorded on. Handles of ours are odd numbers, which no pointer of
//! the driver is; any other handle is taken for a `CUevent` of the caller.

use super::device::Mark;
use super::driver::{CUevent, handle, lock};
use crate::backend::failed_waits::Behind;
use crate::backend::{BackendError, EventHandle};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The last recording; `None` until there is one.
pub(super) type EventRecord = Option<Recording>;

#[derive(Clone, Debug)]
pub(super) struct Recording {
    pub gpu: usize,
    /// The `CUevent`. Whoever makes a stream wait for it, or waits, holds it, so that nobody records it anew meanwhile.
    pub mark: Arc<Mark>,
    /// What the stream was behind.
    pub behind: Behind,
}

#[derive(Debug, Default)]
pub(super) struct Events {
    next: AtomicUsize,
    /// Not held while the driver records or waits, which blocks while the queue of a stream is full. Each recording is of another
    /// `CUevent`, so until it is there the event stands for the one before.
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

    /// The last recording of an event of ours.
    pub fn recorded(&self, event: EventHandle) -> Result<EventRecord, BackendError> {
        lock(&self.events).get(&event.0).cloned().ok_or(BackendError::InvalidHandle(event.0, "event"))
    }

    /// An event of ours stands for this recording from now on.
    pub fn note(&self, event: EventHandle, recording: Recording) -> Result<(), BackendError> {
        let mut events = lock(&self.events);
        *events.get_mut(&event.0).ok_or(BackendError::InvalidHandle(event.0, "event"))? = Some(recording);
        Ok(())
    }

    /// Gives all events back to their pools.
    pub fn release(&self) {
        lock(&self.events).clear();
    }
}

/// A `CUevent` of the caller.
pub(super) fn raw_event(event: EventHandle) -> Result<CUevent, BackendError> {
    if event.0 == 0 || is_ours(event) { Err(BackendError::InvalidHandle(event.0, "event")) } else { Ok(handle(event.0)) }
}
