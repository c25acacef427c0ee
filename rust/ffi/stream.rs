//! Streams and events: one source for the CUDA and the host backend.

use super::argument::Out;
use super::context::find;
use super::guard::{Failure, guard};
use super::types::*;
use mpgpu_backend::{EventHandle, StreamHandle};
use mpgpu_core::topology::DeviceId;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

pub(super) fn stream_of(stream: mp_stream_t) -> StreamHandle {
    StreamHandle(stream.addr())
}

fn event_of(event: mp_event_t) -> EventHandle {
    EventHandle(event.addr())
}

/// Creates a stream of `device` that is ordered with no other stream, the default stream included. It belongs to the
/// caller until `mp_stream_destroy`. On CUDA it is a `cudaStream_t`. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_INVALID_ARGUMENT` when `stream` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_stream_create(context: mp_context_t, device: i32, stream: *mut mp_stream_t) -> mp_status_t {
    guard(|| {
        let out = Out::new(stream, c"stream")?;
        let stream = find(context)?.create_stream(DeviceId(device))?;
        out.write(std::ptr::with_exposed_provenance_mut(stream.0));
        Ok(())
    })
}

/// Destroys a stream of `mp_stream_create`. Work that is enqueued in it still finishes. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE` for the context, and for a stream that `mp_stream_create` of this context did not
/// return.
#[unsafe(no_mangle)]
pub extern "C" fn mp_stream_destroy(context: mp_context_t, stream: mp_stream_t) -> mp_status_t {
    guard(|| Ok(find(context)?.destroy_stream(stream_of(stream))?))
}

/// Blocks until all work enqueued in `stream` so far has finished. NULL is the default stream. Any thread, host
/// functions excepted.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_PEER_GONE` when the stream, or one that it has come after, has waited in
/// vain for signals or in a node plan, once (see `mp_stream_wait_signals`); any other error is that of work in the stream.
#[unsafe(no_mangle)]
pub extern "C" fn mp_stream_synchronize(context: mp_context_t, stream: mp_stream_t) -> mp_status_t {
    guard(|| Ok(find(context)?.synchronize_stream(stream_of(stream))?))
}

/// Writes the device of `stream` to `*device`: only kernels of that device can be launched in it. `MP_DEVICE_HOST` for the
/// default streams of CUDA, which are of whatever GPU is current when they are used. `*capturing` becomes 1 where the stream is
/// being captured into a graph, so that work that is enqueued in it runs at every launch of the graph; else, and always on the
/// host backend, 0. Either may be NULL. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_stream_get_info(
    context: mp_context_t,
    stream: mp_stream_t,
    device: *mut i32,
    capturing: *mut i32,
) -> mp_status_t {
    guard(|| {
        let (of, is_captured) = (Out::if_wanted(device, c"device")?, Out::if_wanted(capturing, c"capturing")?);
        let (context, stream) = (find(context)?, stream_of(stream));
        // Each may be a call of the driver.
        let on = if device.is_null() { 0 } else { context.stream_device(stream)?.0 };
        let captures = if capturing.is_null() { false } else { context.is_capturing(stream)? };
        of.write(on);
        is_captured.write(i32::from(captures));
        Ok(())
    })
}

/// Enqueues a call of `function(user)` on a CPU thread, after all earlier work in `stream` and before all later. The
/// function may block. On CUDA the driver runs the functions of several streams one after the other, so a function must not
/// wait for a function of another stream; on the host backend each stream has a thread for them. A function must not call
/// this library. In a stream that is being captured, it runs at every launch of the graph, in several threads at once if several of its executables run at once. Any thread.
///
/// With `release` NULL, `user` stays the caller's, and valid until the function has run; in a capture, for as long as the graph
/// and all that was instantiated of it. Otherwise the library gives `user` back: it calls `release(user)` once, on any thread,
/// when the function will not be called again. That is after it has run; or, in a stream that is being captured, when the graph
/// and all that was instantiated of it are gone. `release` must not call functions of this library or of CUDA. When this call
/// fails, neither function is ever called, and `user` stays the caller's. Where the GPU fails before the function has
/// run, the driver drops it and `release` is not called.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when `function` is NULL; `MP_ERROR_NOT_SUPPORTED` in a
/// capture where the driver is older than CUDA 11.3.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_stream_launch_host(
    context: mp_context_t,
    stream: mp_stream_t,
    function: mp_host_function_t,
    user: *mut c_void,
    release: mp_host_function_t,
) -> mp_status_t {
    guard(|| {
        let function = function.ok_or_else(|| Failure::invalid(c"function", "function is NULL"))?;
        let call = HostCall { function, user };
        let Some(release) = release else {
            return Ok(find(context)?.launch_host(stream_of(stream), Box::new(move || call.run()))?);
        };
        let fate = Arc::new(AtomicU8::new(OPEN));
        let owned = Owned { call, release: HostCall { function: release, user }, fate: fate.clone() };
        find(context)?.launch_host(stream_of(stream), Box::new(move || owned.run()))?;
        if fate.swap(ENQUEUED, Ordering::AcqRel) == DROPPED {
            HostCall { function: release, user }.run();
        }
        Ok(())
    })
}

/// A call that is enqueued or refused, and dropped before or after that is known: whoever comes second releases.
struct Owned {
    call: HostCall,
    release: HostCall,
    fate: Arc<AtomicU8>,
}

const OPEN: u8 = 0;
const ENQUEUED: u8 = 1;
const DROPPED: u8 = 2;

impl Owned {
    fn run(&self) {
        self.call.run();
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if self.fate.swap(DROPPED, Ordering::AcqRel) == ENQUEUED {
            self.release.run();
        }
    }
}

struct HostCall {
    function: unsafe extern "C" fn(*mut c_void),
    user: *mut c_void,
}

// SAFETY: `user` is never looked into here, and the caller of `mp_stream_launch_host` allows the call on other threads.
unsafe impl Send for HostCall {}
// SAFETY: as above, on several at once where the caller launches a graph so.
unsafe impl Sync for HostCall {}

impl HostCall {
    fn run(&self) {
        // SAFETY: the caller gave a function of this type and the value that it takes.
        unsafe { (self.function)(self.user) }
    }
}

/// Creates an event. It counts as done until it is first recorded. It belongs to the caller until `mp_event_destroy`.
/// It serves streams of every device, so on CUDA it is no `cudaEvent_t` and must not be handed to CUDA's own functions;
/// the functions here accept a `cudaEvent_t` as well. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_ARGUMENT` when `event` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_event_create(context: mp_context_t, event: *mut mp_event_t) -> mp_status_t {
    guard(|| {
        let out = Out::new(event, c"event")?;
        let event = find(context)?.create_event()?;
        out.write(std::ptr::with_exposed_provenance_mut(event.0));
        Ok(())
    })
}

/// Destroys an event of `mp_event_create`. Waits that are enqueued still hold. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_event_destroy(context: mp_context_t, event: mp_event_t) -> mp_status_t {
    guard(|| Ok(find(context)?.destroy_event(event_of(event))?))
}

/// Makes `event` stand for all work enqueued in `stream` so far, in place of what it stood for before. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_event_record(context: mp_context_t, event: mp_event_t, stream: mp_stream_t) -> mp_status_t {
    guard(|| Ok(find(context)?.record_event(event_of(event), stream_of(stream))?))
}

/// Blocks until the work that `event` stands for has finished. Any thread, host functions excepted.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_PEER_GONE` as `mp_stream_synchronize`, but every time until the event is
/// recorded in a stream that was told; for an event of CUDA's own once, if `mp_event_record` has recorded it.
#[unsafe(no_mangle)]
pub extern "C" fn mp_event_synchronize(context: mp_context_t, event: mp_event_t) -> mp_status_t {
    guard(|| Ok(find(context)?.synchronize_event(event_of(event))?))
}

/// Makes all work that is enqueued in `stream` from now on wait for what `event` stands for now. Does not block. Any
/// thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_stream_wait_event(context: mp_context_t, stream: mp_stream_t, event: mp_event_t) -> mp_status_t {
    guard(|| Ok(find(context)?.stream_wait_event(stream_of(stream), event_of(event))?))
}
