//! Streams and events, with the same functions for the CUDA and the host backend.

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

/// Creates a stream of `device`. It is not ordered with any other stream, not even with the default stream. On CUDA it
/// is a `cudaStream_t`. The caller owns it and destroys it with `mp_stream_destroy`. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` if `stream` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_stream_create(context: mp_context_t, device: i32, stream: *mut mp_stream_t) -> mp_status_t {
    guard(|| {
        let out = Out::new(stream, c"stream")?;
        let stream = find(context)?.create_stream(DeviceId(device))?;
        out.write(std::ptr::with_exposed_provenance_mut(stream.0));
        Ok(())
    })
}

/// Destroys a stream from `mp_stream_create`. Does not block: work that is already enqueued in it still finishes. May
/// be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE` for the context, or if `mp_stream_create` of this context did not return the
/// stream.
#[unsafe(no_mangle)]
pub extern "C" fn mp_stream_destroy(context: mp_context_t, stream: mp_stream_t) -> mp_status_t {
    guard(|| Ok(find(context)?.destroy_stream(stream_of(stream))?))
}

/// Blocks until all work that is enqueued in `stream` so far has finished. NULL is the default stream. May be called
/// from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_PEER_GONE` if a wait was abandoned because a process exited. The wait was made by
///   `mp_stream_wait_signals` or by a plan of `mp_node_plan`, in this stream or in a stream for which this stream has
///   waited. Each abandoned wait is reported once. See `mp_stream_wait_signals`.
/// - Any other error is a failure of work in the stream.
#[unsafe(no_mangle)]
pub extern "C" fn mp_stream_synchronize(context: mp_context_t, stream: mp_stream_t) -> mp_status_t {
    guard(|| Ok(find(context)?.synchronize_stream(stream_of(stream))?))
}

/// Returns the device of a stream, and whether the stream is being captured.
///
/// `*device` receives the device whose kernels can be launched in `stream`. For CUDA's default streams it receives
/// `MP_DEVICE_HOST`, because they belong to the GPU that is current when they are used.
///
/// `*capturing` receives 1 if the stream is being captured into a graph. Enqueued work then runs at every launch of the
/// graph. Otherwise, and always on the host backend, it receives 0. Each output pointer may be NULL. May be called from
/// any thread.
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
        // Each query is made only if its output is wanted, because it may be a call of the driver.
        let on = if device.is_null() { 0 } else { context.stream_device(stream)?.0 };
        let captures = if capturing.is_null() { false } else { context.is_capturing(stream)? };
        of.write(on);
        is_captured.write(i32::from(captures));
        Ok(())
    })
}

/// Enqueues a call of `function(user)` on a CPU thread, in stream order: after all earlier work in `stream` and before
/// all later work. Does not block. May be called from any thread.
///
/// The function may block, but must not call this library. On CUDA the driver calls the functions of several streams
/// one after the other, so a function must not wait for a function in another stream. On the host backend each stream
/// has its own thread for these calls. If the stream is being captured, the function is called at every launch of the
/// graph. Executables of one graph that run concurrently call it concurrently.
///
/// Ownership of `user`:
/// - If `release` is NULL, the caller keeps ownership. `user` must stay valid until the function has run. In a capture
///   it must stay valid as long as the graph or one of its executables exists.
/// - Otherwise the library takes ownership. It calls `release(user)` once, on any thread, when it will not call the
///   function again: after the function has run or, in a capture, when the graph and all of its executables are
///   destroyed. `release` must not call this library or CUDA.
/// - If this call fails, neither function is called, and the caller keeps ownership.
/// - If the GPU fails before the function has run, the driver drops the call, and `release` is not called.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `function` is NULL; `MP_ERROR_NOT_SUPPORTED` in a
/// capture if the driver is older than CUDA 11.3.
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

/// Host call of a caller, with its `user` value. The backend may drop the call before or after it is known whether the
/// call was enqueued. The later of these two events releases `user`.
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

// SAFETY: this code never dereferences `user`, and the caller of `mp_stream_launch_host` allows the call on other
// threads.
unsafe impl Send for HostCall {}
// SAFETY: as for `Send`. The call runs on several threads at a time only if the caller launches the graph that way.
unsafe impl Sync for HostCall {}

impl HostCall {
    fn run(&self) {
        // SAFETY: the caller passed a function of this type and the value that it takes.
        unsafe { (self.function)(self.user) }
    }
}

/// Creates an event. An event that was never recorded counts as completed. The caller owns it and destroys it with
/// `mp_event_destroy`. May be called from any thread.
///
/// The event works with streams of every device. On CUDA it is therefore not a `cudaEvent_t` and must not be passed to
/// CUDA functions. The event functions of this library also accept a `cudaEvent_t`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `event` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_event_create(context: mp_context_t, event: *mut mp_event_t) -> mp_status_t {
    guard(|| {
        let out = Out::new(event, c"event")?;
        let event = find(context)?.create_event()?;
        out.write(std::ptr::with_exposed_provenance_mut(event.0));
        Ok(())
    })
}

/// Destroys an event from `mp_event_create`. Streams that already wait for the event continue to wait. May be called
/// from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_event_destroy(context: mp_context_t, event: mp_event_t) -> mp_status_t {
    guard(|| Ok(find(context)?.destroy_event(event_of(event))?))
}

/// Records in `event` all work that is enqueued in `stream` so far. This replaces an earlier record. Does not block.
/// May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_event_record(context: mp_context_t, event: mp_event_t, stream: mp_stream_t) -> mp_status_t {
    guard(|| Ok(find(context)?.record_event(event_of(event), stream_of(stream))?))
}

/// Blocks until the work that is recorded in `event` has finished. May be called from any thread, but not from a host
/// function.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_PEER_GONE` if the recorded work contained a wait that was abandoned because a process exited (see
///   `mp_stream_wait_signals`). Each call returns this error, until the event is recorded again in a stream that has
///   already reported the error. For a `cudaEvent_t` that `mp_event_record` recorded, the error is returned once.
#[unsafe(no_mangle)]
pub extern "C" fn mp_event_synchronize(context: mp_context_t, event: mp_event_t) -> mp_status_t {
    guard(|| Ok(find(context)?.synchronize_event(event_of(event))?))
}

/// Makes all work that is enqueued in `stream` from now on wait for the work that is recorded in `event` now. Does not
/// block. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_stream_wait_event(context: mp_context_t, stream: mp_stream_t, event: mp_event_t) -> mp_status_t {
    guard(|| Ok(find(context)?.stream_wait_event(stream_of(stream), event_of(event))?))
}
