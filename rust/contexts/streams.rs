//! Implements the calls for streams and events of a context, and callbacks for finished work.

use super::callbacks::{Awaited, Callback};
use super::error::Error;
use super::lifetime::Context;
use crate::backend::{Completion, EventHandle, HostFunction, Report, StreamHandle};
use crate::topology::DeviceId;

impl Context {
    /// Creates a stream on `device` and returns its handle.
    pub fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, Error> {
        let _open = self.shared.enter()?;
        self.shared.check_device(device)?;
        Ok(self.shared.holdings.create_stream(device, self.backend())?)
    }

    /// Destroys a stream of this context. Work that is enqueued in the stream still finishes.
    pub fn destroy_stream(&self, stream: StreamHandle) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        self.shared.holdings.destroy_stream(stream, self.backend())?;
        self.shared.late_checks.forget(stream);
        Ok(())
    }

    /// Returns the device of a stream. For a default stream, which belongs to no particular GPU, returns the host.
    pub fn stream_device(&self, stream: StreamHandle) -> Result<DeviceId, Error> {
        let _open = self.shared.enter()?;
        Ok(self.backend().stream_device(stream)?)
    }

    /// True if `stream` is being captured into a graph.
    pub fn is_capturing(&self, stream: StreamHandle) -> Result<bool, Error> {
        let _open = self.shared.enter()?;
        Ok(self.backend().is_capturing(stream)?)
    }

    /// Blocks until all work enqueued in `stream` so far has finished. Returns the first error of the copies in `stream` whose index lists
    /// were checked while the copies ran. Later calls do not return these errors again.
    pub fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), Error> {
        drop(self.shared.enter()?);
        self.backend().synchronize_stream(stream)?;
        self.shared.late_checks.report(stream)
    }

    /// Runs `work` on a CPU thread in stream order. In a captured stream, `work` runs at every launch of the graph.
    pub fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        Ok(self.backend().launch_host(stream, work)?)
    }

    /// Creates an event and returns its handle. An event counts as complete until it is recorded.
    pub fn create_event(&self) -> Result<EventHandle, Error> {
        let _open = self.shared.enter()?;
        Ok(self.shared.holdings.create_event(self.backend())?)
    }

    /// Destroys an event of this context.
    pub fn destroy_event(&self, event: EventHandle) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        Ok(self.shared.holdings.destroy_event(event, self.backend())?)
    }

    /// Makes `event` represent all work that was enqueued in `stream` so far.
    pub fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        Ok(self.backend().record_event(event, stream)?)
    }

    /// Makes later work in `stream` wait for the work that `event` represented at its last record.
    pub fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        Ok(self.backend().stream_wait_event(stream, event)?)
    }

    /// Blocks until the work that `event` represented at its last record has finished.
    pub fn synchronize_event(&self, event: EventHandle) -> Result<(), Error> {
        drop(self.shared.enter()?);
        Ok(self.backend().synchronize_event(event)?)
    }

    /// Calls `callback` on the callback thread of the context once the work of `completion` has finished.
    pub fn call_when_done(&self, completion: Completion, callback: Callback) -> Result<(), Error> {
        drop(self.shared.enter()?);
        if completion.is_captured() {
            let why = "a captured execution cannot be waited for, because its graph may run later, or again: wait for the stream in which \
                       the graph is launched";
            return Err(Error::NotSupported(why.into()));
        }
        self.shared.callbacks.add(Awaited { completion: Some(completion), callback })
    }

    /// Makes later work in `stream` start only after an execution of this context (`after`) has finished.
    pub fn order_stream(&self, stream: StreamHandle, after: &Completion) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        self.backend().mark_end(stream, std::slice::from_ref(after), Report::Nothing)?;
        Ok(())
    }
}
