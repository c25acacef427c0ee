//! The caller's events.
//!
//! A `CUevent` belongs to one context and can be recorded in its streams alone, but an event of this backend may be recorded in any
//! stream. So it stands for a `CUevent` of whichever GPU it was last recorded on. Handles of ours are odd numbers, which no pointer of
//! the driver is; any other handle is taken for a `CUevent` of the caller.

use super::Core;
use super::device::{Mark, handle, lock};
use super::driver::{CUevent, OutsideCapture, call};
use crate::backend::loss::Heard;
use crate::backend::{BackendError, EventHandle, StreamHandle};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The last recording; `None` until there is one.
type Recorded = Option<Recording>;

#[derive(Clone, Debug)]
struct Recording {
    gpu: usize,
    /// The `CUevent`. Whoever makes a stream wait for it, or waits, holds it, so that nobody records it anew meanwhile.
    mark: Arc<Mark>,
    /// What the stream had been told.
    heard: Heard,
}

#[derive(Debug, Default)]
pub(super) struct Events {
    next: AtomicUsize,
    /// Not held while the driver records or waits, which blocks while the queue of a stream is full. Each recording is of another
    /// `CUevent`, so until it is there the event stands for the one before.
    events: Mutex<HashMap<usize, Recorded>>,
}

fn is_ours(event: EventHandle) -> bool {
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
    fn recorded(&self, event: EventHandle) -> Result<Recorded, BackendError> {
        lock(&self.events).get(&event.0).cloned().ok_or(BackendError::InvalidHandle(event.0, "event"))
    }

    pub fn record(&self, core: &Core, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        let gpu = core.gpu_of(stream)?;
        let primary = core.primary(gpu)?;
        let _current = primary.enter()?;
        if !is_ours(event) {
            // SAFETY: the caller's event and stream.
            return unsafe { call!(core.driver, cuEventRecord(raw_event(event)?, handle(stream.0))) };
        }
        self.recorded(event)?;
        let heard = core.heard(stream);
        let recording = Recording { gpu, mark: Arc::new(primary.record(stream.0)?), heard };
        let mut events = lock(&self.events);
        let recorded = events.get_mut(&event.0).ok_or(BackendError::InvalidHandle(event.0, "event"))?;
        *recorded = Some(recording);
        Ok(())
    }

    pub fn make_wait(&self, core: &Core, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        core.with_stream(stream, |_, stream| {
            let recorded = if is_ours(event) { self.recorded(event)? } else { None };
            let raw = match &recorded {
                Some(last) => last.mark.event(),
                None if is_ours(event) => return Ok(()),
                None => raw_event(event)?,
            };
            // SAFETY: an event of ours that `recorded` holds, or the caller's.
            unsafe { call!(core.driver, cuStreamWaitEvent(stream, raw, 0)) }
        })
    }

    pub fn synchronize(&self, core: &Core, event: EventHandle) -> Result<(), BackendError> {
        let recorded = if is_ours(event) { self.recorded(event)? } else { None };
        let (gpu, raw, heard) = match &recorded {
            Some(last) => (last.gpu, last.mark.event(), Some(last.heard)),
            None if is_ours(event) => return Ok(()),
            None => (core.any_used(), raw_event(event)?, None),
        };
        core.check_alive()?;
        let _outside = OutsideCapture::enter(core.driver);
        let _current = core.primary(gpu)?.enter()?;
        // SAFETY: as above.
        unsafe { call!(core.driver, cuEventSynchronize(raw)) }?;
        let losses = &core.sharing.losses;
        // An event of the caller may have been recorded without a word to us, so it is told as a stream is, by its address: streams have
        // small numbers, or addresses of their own.
        losses.tell_since(heard.unwrap_or_else(|| losses.heard(|| event.0 as u64)))
    }

    /// Gives all events back to their pools.
    pub fn release(&self) {
        lock(&self.events).clear();
    }
}

/// A `CUevent` of the caller.
fn raw_event(event: EventHandle) -> Result<CUevent, BackendError> {
    if event.0 == 0 || is_ours(event) { Err(BackendError::InvalidHandle(event.0, "event")) } else { Ok(handle(event.0)) }
}
