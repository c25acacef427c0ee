//! The caller's events.
//!
//! A `CUevent` belongs to one context and can be recorded in its streams alone, but an event of this backend may be recorded in any
//! stream. So it stands for a `CUevent` of whichever GPU it was last recorded on. Handles of ours are odd numbers, which no pointer of
//! the driver is; any other handle is taken for a `CUevent` of the caller.

use super::Core;
use super::device::{handle, lock};
use super::driver::{CUevent, OutsideCapture, call};
use crate::backend::loss::Heard;
use crate::backend::{BackendError, EventHandle, StreamHandle};
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The last recording; `None` until there is one.
type Recorded = Option<Recording>;

#[derive(Copy, Clone, Debug)]
struct Recording {
    gpu: usize,
    /// The `CUevent`.
    raw: usize,
    /// What the stream had been told.
    heard: Heard,
}

#[derive(Debug, Default)]
pub(super) struct Events {
    next: AtomicUsize,
    /// Held while the driver records or waits, so that a recording on one thread and a wait on another see each other whole.
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

    pub fn destroy(&self, core: &Core, event: EventHandle) -> Result<(), BackendError> {
        let recorded = lock(&self.events).remove(&event.0).ok_or(BackendError::InvalidHandle(event.0, "event"))?;
        if let Some(Recording { gpu, raw, .. }) = recorded {
            core.primary(gpu)?.give_event_back(raw);
        }
        Ok(())
    }

    pub fn record(&self, core: &Core, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        let gpu = core.gpu_of(stream)?;
        let primary = core.primary(gpu)?;
        let _current = primary.enter()?;
        if !is_ours(event) {
            // SAFETY: the caller's event and stream.
            return unsafe { call!(core.driver, cuEventRecord(raw_event(event)?, handle(stream.0))) };
        }
        let heard = core.heard(stream);
        let mut events = lock(&self.events);
        let recorded = events.get_mut(&event.0).ok_or(BackendError::InvalidHandle(event.0, "event"))?;
        let raw = match *recorded {
            Some(last) if last.gpu == gpu => last.raw,
            _ => primary.event()?,
        };
        // SAFETY: an event of this GPU's context that is this handle's alone; the caller's stream.
        if let Err(error) = unsafe { call!(core.driver, cuEventRecord(handle(raw), handle(stream.0))) } {
            if recorded.is_none_or(|last| last.raw != raw) {
                primary.give_event_back(raw);
            }
            return Err(error);
        }
        if let Some(earlier) = recorded.replace(Recording { gpu, raw, heard }).filter(|last| last.gpu != gpu) {
            core.primary(earlier.gpu)?.give_event_back(earlier.raw);
        }
        Ok(())
    }

    pub fn make_wait(&self, core: &Core, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        core.with_stream(stream, |_, stream| {
            let events = lock(&self.events);
            let raw = match events.get(&event.0) {
                Some(Some(last)) => handle(last.raw),
                Some(None) => return Ok(()),
                None => raw_event(event)?,
            };
            // SAFETY: an event of ours that the lock keeps from being given back, or the caller's.
            unsafe { call!(core.driver, cuStreamWaitEvent(stream, raw, 0)) }
        })
    }

    pub fn synchronize(&self, core: &Core, event: EventHandle) -> Result<(), BackendError> {
        let (gpu, raw, heard) = match lock(&self.events).get(&event.0) {
            Some(Some(last)) => (last.gpu, handle(last.raw), Some(last.heard)),
            Some(None) => return Ok(()),
            None => (core.any_used(), raw_event(event)?, None),
        };
        let _outside = OutsideCapture::enter(core.driver);
        let _current = core.primary(gpu)?.enter()?;
        // SAFETY: as above. The lock is not held while waiting: events of ours are pooled, never destroyed while the backend lives,
        // and an event that the caller destroys while another thread waits for it may at worst end the wait with a later recording.
        unsafe { call!(core.driver, cuEventSynchronize(raw)) }?;
        let losses = &core.sharing.losses;
        // An event of the caller may have been recorded without a word to us, so it is told as a stream is, by its address: streams have
        // small numbers, or addresses of their own.
        losses.tell_since(heard.unwrap_or_else(|| losses.heard(|| event.0 as u64)))
    }

    /// Gives all events back to their pools.
    pub fn release(&self, core: &Core) {
        for Recording { gpu, raw, .. } in lock(&self.events).drain().filter_map(|(_, recorded)| recorded) {
            if let Ok(primary) = core.primary(gpu) {
                primary.give_event_back(raw);
            }
        }
    }
}

/// A `CUevent` of the caller.
fn raw_event(event: EventHandle) -> Result<CUevent, BackendError> {
    if event.0 == 0 || is_ours(event) { Err(BackendError::InvalidHandle(event.0, "event")) } else { Ok(handle(event.0)) }
}
