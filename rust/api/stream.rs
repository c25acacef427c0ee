//! Streams and events of the Rust API.

use crate::context::Context;
use crate::plan::Request;
use mpgpu_backend::{EventHandle, StreamHandle};
use mpgpu_contexts::Error;
use mpgpu_core::topology::DeviceId;
use std::any::Any;
use std::sync::Arc;

/// Ownership of a stream.
#[derive(Debug)]
enum Owner {
    /// Stream that this handle created and destroys.
    Own,
    /// Stream that the caller owns, from a handle that was not checked.
    Raw,
    /// Stream of another library, which this handle keeps alive. Other owners of the stream may capture it.
    #[cfg_attr(not(feature = "cudarc"), allow(dead_code))]
    Kept(#[allow(dead_code)] Arc<dyn Any + Send + Sync>),
}

/// Stream: a queue whose work runs in order. If the handle is dropped, work that is already enqueued still finishes.
#[derive(Debug)]
pub struct Stream {
    pub(crate) context: Context,
    handle: StreamHandle,
    owner: Owner,
}

impl Stream {
    /// Creates a stream of `device`. The stream is not ordered with any other stream, not even with the default stream.
    ///
    /// # Errors
    ///
    /// Returns an error if the device does not exist.
    pub fn new(ctx: &Context, device: DeviceId) -> Result<Stream, Error> {
        Ok(Stream { context: ctx.clone(), handle: ctx.runtime.create_stream(device)?, owner: Owner::Own })
    }

    /// Creates a handle that refers to a stream of the caller. `handle` is a `cudaStream_t` as a number, or 0 for the default stream.
    ///
    /// # Safety
    ///
    /// On CUDA the driver does not check the handle. The stream must not be destroyed while this object is used. If the stream is being
    /// captured, the memory of all plans and pieces that are enqueued in it must outlive the graph.
    pub unsafe fn from_raw(ctx: &Context, handle: usize) -> Stream {
        Stream { context: ctx.clone(), handle: StreamHandle(handle), owner: Owner::Raw }
    }

    #[cfg(feature = "cudarc")]
    pub(crate) fn kept(ctx: &Context, handle: usize, keep: Arc<dyn Any + Send + Sync>) -> Stream {
        Stream { context: ctx.clone(), handle: StreamHandle(handle), owner: Owner::Kept(keep) }
    }

    /// Returns the stream handle as a number. On CUDA it is a `cudaStream_t`.
    pub fn as_raw(&self) -> usize {
        self.handle.0
    }

    /// Returns the internal handle, or an error if the stream belongs to another context.
    pub(crate) fn handle_in(&self, context: &Context) -> Result<StreamHandle, Error> {
        if !self.context.is(context) {
            return Err(Error::Option {
                name: "stream",
                value: format!("{:#x}", self.handle.0),
                reason: "belongs to another context: use a stream of this context".into(),
            });
        }
        Ok(self.handle)
    }

    /// Returns the device of the stream. For a default stream of CUDA it returns host memory, because that stream belongs to the GPU that
    /// is current when it is used.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream handle is invalid.
    pub fn device(&self) -> Result<DeviceId, Error> {
        self.context.runtime.stream_device(self.handle)
    }

    /// Returns true if the stream is being captured into a graph.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream handle is invalid.
    pub fn is_capturing(&self) -> Result<bool, Error> {
        self.context.runtime.is_capturing(self.handle)
    }

    /// Rejects operations that a graph must not hold, if another owner may capture the stream without `unsafe`.
    pub(crate) fn refuse_shared_capture(&self) -> Result<(), Error> {
        if matches!(self.owner, Owner::Kept(_)) { self.refuse_capture() } else { Ok(()) }
    }

    pub(crate) fn refuse_capture(&self) -> Result<(), Error> {
        if self.is_capturing()? {
            let why = "the stream is being captured, and its graph could run after the memory was freed: use Plan::enqueue_captured";
            return Err(Error::NotSupported(why.into()));
        }
        Ok(())
    }

    /// Blocks until all work that is enqueued in the stream so far has finished.
    ///
    /// # Errors
    ///
    /// Returns the errors of that work. Each error is returned once.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.context.runtime.synchronize_stream(self.handle)
    }

    /// Makes all work that is enqueued in this stream from now on wait for the work that is recorded in `event` now. Does not block.
    ///
    /// # Errors
    ///
    /// Returns an error if the event belongs to another context.
    pub fn wait(&self, event: &Event) -> Result<(), Error> {
        self.context.runtime.stream_wait_event(self.handle_in(&event.context)?, event.handle)
    }

    /// Makes all work that is enqueued in this stream from now on wait until the execution of `request` has ended. Does not block.
    ///
    /// # Errors
    ///
    /// Returns an error if the request belongs to another context.
    pub fn wait_for(&self, request: &Request) -> Result<(), Error> {
        let handle = self.handle_in(request.context())?;
        self.context.runtime.order_stream(handle, request.completion())
    }

    /// Enqueues a call of the function `work` on a CPU thread, after all earlier work in this stream and before all later work. Does not
    /// block. If the stream is being captured, `work` is called at every launch of the graph.
    ///
    /// `work` may block. It must not use this library, and must not drop the last handle of a buffer or plan.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream handle is invalid.
    pub fn launch_host(&self, work: impl Fn() + Send + Sync + 'static) -> Result<(), Error> {
        self.context.runtime.launch_host(self.handle, Box::new(work))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !matches!(self.owner, Owner::Own) {
            return;
        }
        if let Err(error) = self.context.runtime.destroy_stream(self.handle) {
            log::warn!("could not destroy a stream: {error}");
        }
    }
}

/// Event: a point in a stream that other streams and the host can wait for. It counts as completed until it is recorded.
#[derive(Debug)]
pub struct Event {
    context: Context,
    handle: EventHandle,
}

impl Event {
    /// Creates an event. The event works with streams of all devices.
    ///
    /// # Errors
    ///
    /// Returns errors of the driver.
    pub fn new(ctx: &Context) -> Result<Event, Error> {
        Ok(Event { context: ctx.clone(), handle: ctx.runtime.create_event()? })
    }

    /// Records all work that is enqueued in `stream` so far. This replaces an earlier record.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream belongs to another context.
    pub fn record(&self, stream: &Stream) -> Result<(), Error> {
        self.context.runtime.record_event(self.handle, stream.handle_in(&self.context)?)
    }

    /// Blocks until the recorded work has finished.
    ///
    /// # Errors
    ///
    /// Returns the errors of that work.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.context.runtime.synchronize_event(self.handle)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Err(error) = self.context.runtime.destroy_event(self.handle) {
            log::warn!("could not destroy an event: {error}");
        }
    }
}
