//! Functions of the C ABI for requests: executions, sends and receives that a caller can wait for.

use super::argument::{Name, Out, bad_handle};
use super::guard::{Failure, guard};
use super::message::EnvelopeOut;
use super::plan::closed;
use super::stream::stream_of;
use super::table::Table;
use super::types::*;
use mpgpu_backend::Completion;
use mpgpu_contexts::Context;
use mpgpu_ranks::message::Operation;
use std::ffi::c_void;
use std::sync::Arc;

struct RequestEntry {
    context: Arc<Context>,
    completion: Completion,
}

static REQUESTS: Table<RequestEntry> = Table::new(3);

/// Makes the handles of all requests of a closed context invalid.
pub(super) fn forget_all(context: &Arc<Context>) {
    REQUESTS.purge(|entry| Arc::ptr_eq(&entry.context, context));
}

/// Creates a handle for an execution, a send or a receive and returns it.
pub(super) fn create(context: Arc<Context>, completion: Completion) -> Result<mp_request_t, Failure> {
    let handle = REQUESTS.insert_unless(RequestEntry { context, completion }, |entry| closed(&entry.context))?;
    Ok(std::ptr::without_provenance_mut(handle))
}

/// Blocks until the operation of a request (an execution, send, receive or fetch) has ended. Then destroys the request
/// and sets `*request` to NULL. If `*request` is NULL, returns immediately with success.
///
/// If `info` is not NULL, `*info` receives the properties of the message of a send, receive or fetch. `*info` is also
/// filled if the call returns `MP_ERROR_MESSAGE_TRUNCATED`. After any other error of a receive, `*info` is unchanged.
///
/// May be called from any thread. If two threads wait for the same request, one of them may get
/// `MP_ERROR_INVALID_HANDLE`.
///
/// Errors after which `*request` is unchanged:
/// - `MP_ERROR_INVALID_HANDLE`, also if `*request` is NULL and `info` is not NULL.
/// - `MP_ERROR_INVALID_ARGUMENT`, also if `info` is not NULL and the request belongs to an execution, which has no
///   message.
///
/// Errors after which the request is destroyed and `*request` is NULL:
/// - `MP_ERROR_PEER_GONE` if the execution waited for a process that exited (see `mp_stream_wait_signals`) and was
///   enqueued before its stream reported this error.
/// - Any other error, for example `MP_ERROR_DATA_CORRUPTION` or `MP_ERROR_DRIVER`, is the result of the operation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_wait(request: *mut mp_request_t, info: *mut mp_message_info_t) -> mp_status_t {
    guard(|| end(Out::new(request, c"request")?, None, info))
}

/// Checks whether the operation of a request has ended. Does not block. `*done` receives 1 if it has ended, otherwise
/// 0.
///
/// If the operation has ended, the request is destroyed, `*request` is set to NULL, and `*info` is filled as by
/// `mp_wait`. Otherwise `*request` and `*info` are unchanged. If `*request` is NULL, `*done` receives 1. May be called
/// from any thread.
///
/// Errors: the errors of `mp_wait`. If the error is the result of the operation, `*done` is 1. After any other error
/// `*done` is unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_test(request: *mut mp_request_t, done: *mut i32, info: *mut mp_message_info_t) -> mp_status_t {
    guard(|| end(Out::new(request, c"request")?, Some(Out::new(done, c"done")?), info))
}

/// Implements `mp_wait` and `mp_test`: blocks until a request has ended or, with `done`, only checks whether it has ended.
/// Destroys a request that has ended.
#[inline]
fn end(request: Out<mp_request_t>, done: Option<Out<i32>>, info: *mut mp_message_info_t) -> Result<(), Failure> {
    let say = |is_done: i32, done: Option<Out<i32>>| done.into_iter().for_each(|done| done.write(is_done));
    let told = EnvelopeOut::new(info)?;
    let handle = request.read();
    if handle.is_null() {
        if told.is_some() {
            return Err(bad_handle(0, c"request"));
        }
        say(1, done);
        return Ok(());
    }
    let completion = REQUESTS.with(handle.addr(), c"request", |entry| entry.completion.clone())?;
    let told = told.map(|told| Ok::<_, Failure>((told, operation_of(&completion, c"info")?))).transpose()?;
    if done.is_some()
        && let Ok(false) = completion.is_done()
    {
        say(0, done);
        return Ok(());
    }
    // If the operation has already ended, this returns immediately with the result.
    let result = completion.wait();
    finish(request, handle)?;
    say(1, done);
    if let Some((told, operation)) = told {
        told.write(operation.envelope().as_ref());
    }
    Ok(result?)
}

/// Destroys the request and sets `*request` to NULL. Does not block: the operation continues. If `*request` is NULL,
/// does nothing. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `request` is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_request_destroy(request: *mut mp_request_t) -> mp_status_t {
    guard(|| {
        let request = Out::new(request, c"request")?;
        let handle = request.read();
        if handle.is_null() {
            return Ok(());
        }
        if REQUESTS.is_inherited(handle.addr()) {
            request.write(std::ptr::null_mut());
            return Ok(());
        }
        finish(request, handle)
    })
}

fn finish(request: Out<mp_request_t>, handle: mp_request_t) -> Result<(), Failure> {
    REQUESTS.remove(handle.addr(), c"request")?;
    request.write(std::ptr::null_mut());
    Ok(())
}

/// Returns the send or receive of a completion. Fails if the completion belongs to an execution.
fn operation_of(completion: &Completion, argument: Name) -> Result<&Operation, Failure> {
    completion.as_any().downcast_ref().ok_or_else(|| {
        let remedy = if argument == c"info" { ": pass NULL as info" } else { "" };
        Failure::invalid(argument, format!("request belongs to an execution, not to a message{remedy}"))
    })
}

fn completion_of(request: mp_request_t) -> Result<(Arc<Context>, Completion), Failure> {
    REQUESTS.with(request.addr(), c"request", |entry| (entry.context.clone(), entry.completion.clone()))
}

/// Calls `ask` with the send or receive of a request and returns the result.
pub(super) fn with_operation<T>(request: mp_request_t, ask: impl FnOnce(&Operation) -> T) -> Result<T, Failure> {
    Ok(ask(operation_of(&completion_of(request)?.1, c"request")?))
}

/// Tries to cancel a send or receive that has not matched, or the offer of a buffer (`mp_message_describe`) that was
/// not fetched. Does not block. May be called from any thread.
///
/// `*cancelled` receives 1 if the operation was cancelled. The request then ends with `MP_ERROR_CANCELLED`.
/// `*cancelled` receives 0 if the operation can no longer be cancelled. The operation then continues. In both cases the
/// caller must still wait for the request or destroy it.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for the request of an execution.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_request_cancel(request: mp_request_t, cancelled: *mut i32) -> mp_status_t {
    guard(|| {
        let out = Out::new(cancelled, c"cancelled")?;
        out.write(i32::from(with_operation(request, Operation::cancel)??));
        Ok(())
    })
}

/// Makes all work that is enqueued in `stream` from now on wait until the operation of a request has ended. The later
/// work sees the data of a receive, and may overwrite the data of a send.
///
/// Does not block, even if a message has not matched yet. The request stays valid. A NULL request counts as ended. If
/// the operation fails, the stream continues nevertheless. Only the result of the request shows whether the data have
/// arrived. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_NOT_SUPPORTED` for a send, receive or fetch while `stream` is being
/// captured.
#[unsafe(no_mangle)]
pub extern "C" fn mp_stream_wait_request(stream: mp_stream_t, request: mp_request_t) -> mp_status_t {
    guard(|| {
        if request.is_null() {
            return Ok(());
        }
        let (context, completion) = completion_of(request)?;
        match completion.as_any().downcast_ref::<Operation>() {
            Some(operation) => Ok(operation.order_stream(stream_of(stream))?),
            None => Ok(context.order_stream(stream_of(stream), &completion)?),
        }
    })
}

/// Callback of the caller that is called when a request has ended.
struct RequestFunction {
    function: unsafe extern "C" fn(user: *mut c_void, status: mp_status_value),
    user: *mut c_void,
}

// SAFETY: the header states on which thread it is called.
unsafe impl Send for RequestFunction {}

impl RequestFunction {
    fn call(&self, status: mp_status_t) {
        // SAFETY: the header defines the function, and that it is called with `user` once.
        unsafe { (self.function)(self.user, status as mp_status_value) }
    }
}

/// Calls `function` once, with `user` and the final status, when the operation of a request has ended. Does not block.
/// May be called from any thread.
///
/// `function` runs on the context's thread `mpgpu-callback`, which the first callback starts. On that thread
/// `mp_last_error` returns the error text of the operation. `function` may call the library, but delays other callbacks
/// of the context.
///
/// Avoid deadlocks: `function` must not wait for a stream that waits for a receive into pageable host memory, because
/// the callback thread may have to copy the received data. A thread that destroys the context or the request's
/// messenger must not hold a lock that the function acquires, for example Python's interpreter lock.
///
/// The request stays valid, and may be waited for or destroyed before `function` is called. Destroying the context
/// calls all functions that were not called yet.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_INVALID_ARGUMENT` if `function` is NULL.
/// - `MP_ERROR_NOT_SUPPORTED` for an execution that was captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_request_set_callback(request: mp_request_t, function: mp_request_function_t, user: *mut c_void) -> mp_status_t {
    guard(|| {
        let function = function.ok_or_else(|| Failure::invalid(c"function", "function is NULL"))?;
        let (context, completion) = completion_of(request)?;
        let function = RequestFunction { function, user };
        Ok(context.call_when_done(completion, Box::new(move |result| function.call(guard(|| Ok(result?)))))?)
    })
}
