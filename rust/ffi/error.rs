//! Status names and the last error.

use super::argument::VersionedOut;
use super::guard::{Failure, c_text, guard, last_error, set_last_error};
use super::types::{mp_error_info_t, mp_status_t, mp_status_value};
use std::ffi::{CStr, c_char};

/// Returns the name of a status, for example `MP_ERROR_OVERLAP`, or `unknown status` for any other number.
///
/// The text has static storage. May be called from any thread. Never fails, and does not change the last error.
#[unsafe(no_mangle)]
pub extern "C" fn mp_status_string(status: mp_status_value) -> *const c_char {
    name_of(status).as_ptr()
}

fn name_of(status: mp_status_value) -> &'static CStr {
    match status {
        0 => c"MP_SUCCESS",
        1 => c"MP_ERROR_INVALID_ARGUMENT",
        2 => c"MP_ERROR_INVALID_HANDLE",
        3 => c"MP_ERROR_INVALID_DEVICE",
        4 => c"MP_ERROR_INVALID_POINTER",
        5 => c"MP_ERROR_OVERLAP",
        6 => c"MP_ERROR_NO_ROUTE",
        7 => c"MP_ERROR_OUT_OF_MEMORY",
        8 => c"MP_ERROR_NOT_SUPPORTED",
        9 => c"MP_ERROR_NO_DRIVER",
        10 => c"MP_ERROR_DRIVER",
        11 => c"MP_ERROR_TOPOLOGY",
        12 => c"MP_ERROR_ENVIRONMENT",
        13 => c"MP_ERROR_VERSION_MISMATCH",
        14 => c"MP_ERROR_DATA_CORRUPTION",
        15 => c"MP_ERROR_INTERNAL",
        16 => c"MP_ERROR_PEER_GONE",
        17 => c"MP_ERROR_TIMEOUT",
        18 => c"MP_ERROR_RANK_FAILED",
        19 => c"MP_ERROR_ALLGATHER",
        20 => c"MP_ERROR_MESSAGE_TRUNCATED",
        21 => c"MP_ERROR_CANCELLED",
        22 => c"MP_ERROR_QUEUE_FULL",
        _ => c"unknown status",
    }
}

/// Returns the error text of the last call that failed on this thread. The text names the invalid value and, if
/// possible, the remedy.
///
/// The result is never NULL. It is empty if no call on this thread has failed. Successful calls do not change it. The
/// library owns the text. It is valid until the next call that fails on this thread, or until the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn mp_last_error() -> *const c_char {
    last_error().message
}

/// Fills `*info` with details of the last call that failed on this thread. `info->status` is `MP_SUCCESS` if no call on
/// this thread has failed.
///
/// The library owns the texts to which `*info` points. They are valid until the next call that fails on this thread, or
/// until the thread ends.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` if `info` is NULL or `info->size` is wrong. This error then becomes the last
/// error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_last_error_info(info: *mut mp_error_info_t) -> mp_status_t {
    guard(|| {
        VersionedOut::new(info, c"info")?.write(last_error());
        Ok(())
    })
}

/// Sets the last error of the calling thread, which `mp_last_error` and `mp_last_error_info` report. Libraries that use
/// mpgpu call this function to report their own errors. The functions of mpgpu/halo_indexed.h are an example.
///
/// - `status` is the status that the failed function returns. `MP_SUCCESS` is not allowed.
/// - `driver_code` is the error code of the driver or the operating system, or 0.
/// - `argument` is the name of the invalid argument, or NULL.
/// - `message` is the error text. NULL selects the name of the status.
///
/// The texts are copied.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` if `status` is `MP_SUCCESS` or is not a value of `mp_status_t`. This error then
/// becomes the last error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_last_error_set(
    status: mp_status_value,
    driver_code: i64,
    argument: *const c_char,
    message: *const c_char,
) -> mp_status_t {
    let copied = |text: *const c_char| {
        // SAFETY: not null, and the header requires a string that ends with NUL.
        (!text.is_null()).then(|| c_text(&unsafe { CStr::from_ptr(text) }.to_string_lossy()))
    };
    guard(|| {
        let place = usize::try_from(status).ok().and_then(|number| number.checked_sub(1));
        let Some(known) = place.and_then(|place| ERRORS.get(place)) else {
            let message = format!("status={status}: must be one of the values MP_ERROR_...");
            return Err(Failure::invalid(c"status", message));
        };
        set_last_error(*known, driver_code, copied(argument), copied(message).unwrap_or_else(|| name_of(status).to_owned()));
        Ok(())
    })
}

/// Statuses of failed calls, in the order of their numbers from 1.
const ERRORS: [mp_status_t; 22] = {
    use mp_status_t::*;
    [
        MP_ERROR_INVALID_ARGUMENT,
        MP_ERROR_INVALID_HANDLE,
        MP_ERROR_INVALID_DEVICE,
        MP_ERROR_INVALID_POINTER,
        MP_ERROR_OVERLAP,
        MP_ERROR_NO_ROUTE,
        MP_ERROR_OUT_OF_MEMORY,
        MP_ERROR_NOT_SUPPORTED,
        MP_ERROR_NO_DRIVER,
        MP_ERROR_DRIVER,
        MP_ERROR_TOPOLOGY,
        MP_ERROR_ENVIRONMENT,
        MP_ERROR_VERSION_MISMATCH,
        MP_ERROR_DATA_CORRUPTION,
        MP_ERROR_INTERNAL,
        MP_ERROR_PEER_GONE,
        MP_ERROR_TIMEOUT,
        MP_ERROR_RANK_FAILED,
        MP_ERROR_ALLGATHER,
        MP_ERROR_MESSAGE_TRUNCATED,
        MP_ERROR_CANCELLED,
        MP_ERROR_QUEUE_FULL,
    ]
};
