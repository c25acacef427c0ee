//! Requests: executions that can be waited for.

use super::argument::Out;
use super::guard::{Failure, guard};
use super::plan::closed;
use super::table::Table;
use super::types::*;
use mpgpu_runtime::backend::Completion;
use mpgpu_runtime::context::Context;
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

/// A handle for an execution.
pub(super) fn create(context: Arc<Context>, completion: Completion) -> Result<mp_request_t, Failure> {
    let handle = REQUESTS.insert_unless(RequestEntry { context, completion }, |entry| closed(&entry.context))?;
    Ok(std::ptr::without_provenance_mut(handle))
}

/// Blocks the calling thread until the execution has finished, then destroys the request and sets `*request` to NULL.
/// Waiting for a NULL request succeeds at once. Any thread; of two threads that wait for the same request one may get
/// `MP_ERROR_INVALID_HANDLE`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE` and `MP_ERROR_INVALID_ARGUMENT` leave `*request` as it is. Any other error, such
/// as `MP_ERROR_DATA_CORRUPTION` or `MP_ERROR_DRIVER`, is that of the execution, which has finished: the request is
/// destroyed and `*request` is NULL. So is it with `MP_ERROR_PEER_GONE`, which is returned as by `mp_stream_synchronize`, for
/// an execution that was enqueued before its stream was told.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_wait(request: *mut mp_request_t) -> mp_status_t {
    guard(|| {
        let request = Out::new(request, c"request")?;
        let handle = request.read();
        if handle.is_null() {
            return Ok(());
        }
        let completion = REQUESTS.with(handle.addr(), c"request", |entry| entry.completion.clone())?;
        let result = completion.wait();
        finish(request, handle)?;
        Ok(result?)
    })
}

/// Asks whether the execution has finished, without blocking: `*done` becomes 1 or 0. When it has, the request is destroyed
/// and `*request` is set to NULL. A NULL request is done. Any thread.
///
/// Errors: as `mp_wait`; `*done` is 1 when the error is that of the execution, and is not written otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_test(request: *mut mp_request_t, done: *mut i32) -> mp_status_t {
    guard(|| {
        let (request, done) = (Out::new(request, c"request")?, Out::new(done, c"done")?);
        let handle = request.read();
        if handle.is_null() {
            done.write(1);
            return Ok(());
        }
        let completion = REQUESTS.with(handle.addr(), c"request", |entry| entry.completion.clone())?;
        if let Ok(false) = completion.is_done() {
            done.write(0);
            return Ok(());
        }
        finish(request, handle)?;
        done.write(1);
        // Returns at once, and says more than whether it is done: see `mp_wait`.
        Ok(completion.wait()?)
    })
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
