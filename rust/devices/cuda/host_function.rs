//! Host functions in streams, and in graphs that are captured of them.
//!
//! The driver calls an enqueued function once, which frees it. A captured one is called at every launch of the graph, of whatever was
//! instantiated or cloned of it, so it belongs to the graph (`capture`).

use super::capture::{drop_kept, keep_in_graph};
use super::driver::{CUstream, Driver, call};
use crate::backend::{BackendError, HostFunction};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Enqueues a call of `work` in a stream whose context is current.
pub(super) fn launch_host(driver: &'static Driver, raw: CUstream, work: HostFunction) -> Result<(), BackendError> {
    if driver.is_capturing(raw)? {
        let function = keep_in_graph(driver, raw, work, "make a host function part of a graph")?;
        // SAFETY: the graph keeps the function for as long as it can be launched.
        return unsafe { call!(driver, cuLaunchHostFunc(raw, call_function, function.cast())) };
    }
    let function = Box::into_raw(Box::new(work)).cast();
    // SAFETY: the function takes what it is given, once.
    unsafe { call!(driver, cuLaunchHostFunc(raw, call_and_free, function)) }.inspect_err(|_| {
        // SAFETY: it was not enqueued, so it is still ours.
        unsafe { drop_kept::<HostFunction>(function) };
    })
}

/// Calls a function that stays as it is.
unsafe extern "C" fn call_function(function: *mut c_void) {
    // SAFETY: made in `launch_host`, and freed after its last call.
    let function = unsafe { &*function.cast::<HostFunction>() };
    if catch_unwind(AssertUnwindSafe(function)).is_err() {
        log::error!("a host function panicked; the stream goes on");
    }
}

unsafe extern "C" fn call_and_free(function: *mut c_void) {
    // SAFETY: made in `launch_host`, and the driver calls this once.
    unsafe {
        call_function(function);
        drop_kept::<HostFunction>(function);
    }
}
