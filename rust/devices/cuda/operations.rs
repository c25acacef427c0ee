//! Implements stream operations with events: recording an event, and making a stream or the calling thread wait for an event.

use super::driver::{OutsideCapture, call, handle};
use super::event::{Recording, is_ours, raw_event};
use super::parts::Core;
use crate::backend::{BackendError, EventHandle, StreamHandle};
use std::sync::Arc;

impl Core {
    pub fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        let found = self.streams.find(&self.gpus, stream)?;
        let primary = self.gpus.primary(found.gpu)?;
        let _current = primary.enter()?;
        if !is_ours(event) {
            // The program may record this event again without this library's knowledge. The failed waits that precede the event are
            // therefore tracked like those of a stream. The event's address is used in place of the stream number, and no stream has this
            // number.
            self.sharing.failed_waits.join(|| event.0 as u64, &self.behind(stream, &found));
            // SAFETY: The event and the stream belong to the caller, who keeps them valid.
            return unsafe { call!(self.gpus.driver, cuEventRecord(raw_event(event)?, handle(stream.0))) };
        }
        let behind = self.behind(stream, &found);
        let recording = Recording { gpu: found.gpu, mark: Arc::new(primary.record(stream.0)?), behind };
        self.events.note(event, recording)
    }

    pub fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError> {
        let recorded = if is_ours(event) { self.events.recorded(event)? } else { None };
        let failed_waits = &self.sharing.failed_waits;
        let behind = match &recorded {
            Some(last) => last.behind.clone(),
            None => failed_waits.behind(|| event.0 as u64),
        };
        failed_waits.join(|| self.number_of(stream), &behind);
        let _turn = self.turn(stream)?;
        self.with_stream(stream, |_, stream| {
            let raw = match &recorded {
                Some(last) => last.mark.event(),
                None if is_ours(event) => return Ok(()),
                None => raw_event(event)?,
            };
            // SAFETY: `recorded` keeps an event of this backend valid. Any other event is the caller's, who keeps it valid.
            unsafe { call!(self.gpus.driver, cuStreamWaitEvent(stream, raw, 0)) }
        })
    }

    pub fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError> {
        let recorded = if is_ours(event) { self.events.recorded(event)? } else { None };
        let (gpu, raw) = match &recorded {
            Some(last) => (last.gpu, last.mark.event()),
            None if is_ours(event) => return Ok(()),
            None => (self.gpus.any_used(), raw_event(event)?),
        };
        let failed_waits = &self.sharing.failed_waits;
        let began = failed_waits.begin();
        self.gpus.check_alive()?;
        let _outside = OutsideCapture::enter(self.gpus.driver);
        let _current = self.gpus.primary(gpu)?.enter()?;
        // SAFETY: `recorded` keeps an event of this backend valid. Any other event is the caller's, who keeps it valid.
        unsafe { call!(self.gpus.driver, cuEventSynchronize(raw)) }?;
        match &recorded {
            Some(last) => failed_waits.report_behind(&last.behind),
            None => failed_waits.report(|| event.0 as u64, began),
        }
    }
}
