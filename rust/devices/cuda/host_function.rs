//! Enqueues host functions in streams, including streams that are being captured.
//!
//! If the stream is not being captured, the driver calls the function once, and this call frees the function. If the stream is being
//! captured, the driver calls the function at every launch of the graph and of the graph's clones and instances. A captured function
//! therefore belongs to the graph (module `capture`).

use super::capture::{drop_kept, keep_in_graph};
use super::driver::{CUstream, Driver, call};
use crate::backend::{BackendError, HostFunction};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Enqueues a call of `work` in a stream. The stream's context must be current.
pub(super) fn launch_host(driver: &'static Driver, raw: CUstream, work: HostFunction) -> Result<(), BackendError> {
    if driver.is_capturing(raw)? {
        let function = keep_in_graph(driver, raw, work, "make a host function part of a graph")?;
        // SAFETY: The graph keeps the function for as long as the graph can be launched.
        return unsafe { call!(driver, cuLaunchHostFunc(raw, call_function, function.cast())) };
    }
    let function = Box::into_raw(Box::new(work)).cast();
    // SAFETY: `call_and_free` takes ownership of its argument, and the driver calls it once.
    unsafe { call!(driver, cuLaunchHostFunc(raw, call_and_free, function)) }.inspect_err(|_| {
        // SAFETY: The driver did not enqueue the function, so this thread still owns it.
        unsafe { drop_kept::<HostFunction>(function) };
    })
}

/// Calls a captured host function. Does not free the function, because the graph may be launched again.
unsafe extern "C" fn call_function(function: *mut c_void) {
    // SAFETY: `launch_host` created the function, and it is freed only after its last call.
    let function = unsafe { &*function.cast::<HostFunction>() };
    if catch_unwind(AssertUnwindSafe(function)).is_err() {
        log::error!("a host function panicked; the stream continues");
    }
}

unsafe extern "C" fn call_and_free(function: *mut c_void) {
    // SAFETY: `launch_host` created the function, and the driver calls `call_and_free` once for it.
    unsafe {
        call_function(function);
        drop_kept::<HostFunction>(function);
    }
}
