//! Requests: executions, sends and receives that can be waited for.

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

/// Makes every request of a closed context an invalid handle.
pub(super) fn forget_all(context: &Arc<Context>) {
    REQUESTS.purge(|entry| Arc::ptr_eq(&entry.context, context));
}

/// A handle for an execution, a send or a receive.
pub(super) fn create(context: Arc<Context>, completion: Completion) -> Result<mp_request_t, Failure> {
    let handle = REQUESTS.insert_unless(RequestEntry { context, completion }, |entry| closed(&entry.context))?;
    Ok(std::ptr::without_provenance_mut(handle))
}

/// Blocks the calling thread until the execution, send, receive or fetch has ended, then destroys the request and sets `*request`
/// to NULL. Waiting for a NULL request succeeds at once. Any thread; of two threads that wait for the same request one may get
/// `MP_ERROR_INVALID_HANDLE`.
///
/// `info` NULL asks for no more. Otherwise fills `*info` with the message of a send, a receive or a fetch, also where it returns
/// `MP_ERROR_MESSAGE_TRUNCATED`; with any other error of a receive it is left as it is.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, where `info` is not NULL also for a NULL request; `MP_ERROR_INVALID_ARGUMENT`, then also for
/// the request of an execution, which has no message. Both leave `*request` as it is. Any other error, such
/// as `MP_ERROR_DATA_CORRUPTION` or `MP_ERROR_DRIVER`, is that of the operation, which has ended: the request is
/// destroyed and `*request` is NULL. So is it with `MP_ERROR_PEER_GONE`, which is returned as by `mp_stream_synchronize`, for
/// an execution that was enqueued before its stream was told.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_wait(request: *mut mp_request_t, info: *mut mp_message_info_t) -> mp_status_t {
    guard(|| end(Out::new(request, c"request")?, None, info))
}

/// Asks whether the operation has ended, without blocking: `*done` becomes 1 or 0. When it has, the request is destroyed
/// and `*request` is set to NULL, and `*info` is filled as by `mp_wait`; otherwise it is left as it is. A NULL request is done.
/// Any thread.
///
/// Errors: as `mp_wait`; `*done` is 1 when the error is that of the operation, and is not written otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_test(request: *mut mp_request_t, done: *mut i32, info: *mut mp_message_info_t) -> mp_status_t {
    guard(|| end(Out::new(request, c"request")?, Some(Out::new(done, c"done")?), info))
}

/// Waits for a request, or where there is a `done` asks whether it has ended. Once it has, destroys it.
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
    // Where it has ended it returns at once, and says more than whether it is done.
    let result = completion.wait();
    finish(request, handle)?;
    say(1, done);
    if let Some((told, operation)) = told {
        told.write(operation.envelope().as_ref());
    }
    Ok(result?)
}

/// Destroys the request and sets `*request` to NULL, without waiting: the execution goes on. A NULL request is allowed.
/// Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_ARGUMENT` when `request` is NULL.
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

/// What a completion is of, if it is a send or a receive.
fn operation_of(completion: &Completion, argument: Name) -> Result<&Operation, Failure> {
    completion.as_any().downcast_ref().ok_or_else(|| {
        let remedy = if argument == c"info" { ": let info be NULL" } else { "" };
        Failure::invalid(argument, format!("request is of an execution, not of a message{remedy}"))
    })
}

fn completion_of(request: mp_request_t) -> Result<(Arc<Context>, Completion), Failure> {
    REQUESTS.with(request.addr(), c"request", |entry| (entry.context.clone(), entry.completion.clone()))
}

/// What `ask` says of a send or a receive.
pub(super) fn with_operation<T>(request: mp_request_t, ask: impl FnOnce(&Operation) -> T) -> Result<T, Failure> {
    Ok(ask(operation_of(&completion_of(request)?.1, c"request")?))
}

/// Cancels a send or receive that has not matched, or a described buffer that was not fetched: `*cancelled` becomes 1, and its
/// request ends with `MP_ERROR_CANCELLED`; `*cancelled` is 0 where it was too late, and it goes on. The request is still to be
/// waited for or destroyed. Any thread.
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

/// Has later work in `stream` come after the request: after the bytes of a receive, which it sees, and of a send, which it may
/// overwrite; after all of an execution. The host does not wait, also where a message has not matched yet. The stream goes on
/// where the request ends with an error, so the request says whether the bytes have come. A NULL request is done. Leaves the
/// request as it is. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_NOT_SUPPORTED` in a stream that is being captured, for messages.
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

/// What a caller wants to be called.
struct RequestFunction {
    function: unsafe extern "C" fn(user: *mut c_void, status: mp_status_value),
    user: *mut c_void,
}

// SAFETY: the header says on which thread it is called.
unsafe impl Send for RequestFunction {}

impl RequestFunction {
    fn call(&self, status: mp_status_t) {
        // SAFETY: the header says what the function is, and that it is called with `user` once.
        unsafe { (self.function)(self.user, status as mp_status_value) }
    }
}

/// Calls `function` once with `user` and the outcome when the request has ended, on the thread `mpgpu-callback` of its context,
/// which starts with the first such call; on that thread `mp_last_error` has the text of an error. The function may call the
/// library, but holds up other callbacks of the context, and must not wait for a stream that waits for a receive into ordinary
/// host memory, which this thread may have to copy. A thread that destroys the context, or the messenger of the request, must
/// hold no lock that the function takes (Python's interpreter lock is one). The request stays as it is, and may be waited for or destroyed before.
/// Destroying the context calls what is left. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when `function` is NULL; `MP_ERROR_NOT_SUPPORTED` for an
/// execution that was captured.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_request_set_callback(request: mp_request_t, function: mp_request_function_t, user: *mut c_void) -> mp_status_t {
    guard(|| {
        let function = function.ok_or_else(|| Failure::invalid(c"function", "function is NULL"))?;
        let (context, completion) = completion_of(request)?;
        let function = RequestFunction { function, user };
        Ok(context.call_when_done(completion, Box::new(move |result| function.call(guard(|| Ok(result?)))))?)
    })
}
