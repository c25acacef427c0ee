//! Panic boundary of all entry points, and storage of the last error of each thread.

use super::argument::Versioned;
use super::types::{mp_error_info_t, mp_status_t};
use mpgpu_backend::BackendError;
use mpgpu_backend::panics;
use mpgpu_contexts::Error;
use mpgpu_core::plan::PlanError;
use mpgpu_ipc as ipc;
use std::any::Any;
use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Error of a call, in the form in which `mp_last_error_info` reports it.
#[derive(Debug)]
pub(super) struct Failure {
    pub status: mp_status_t,
    /// Error code of the driver or the operating system. 0 if neither reported an error.
    pub driver_code: i64,
    /// Name of the parameter that caused the error. `None` if no parameter did.
    pub argument: Option<&'static CStr>,
    pub message: String,
}

impl Failure {
    /// Creates an error with this status that is caused by an argument.
    pub fn argument(status: mp_status_t, argument: &'static CStr, message: impl Into<String>) -> Self {
        Failure { status, driver_code: 0, argument: Some(argument), message: message.into() }
    }

    /// Creates an error with the status `MP_ERROR_INVALID_ARGUMENT` for an argument with an invalid value.
    pub fn invalid(argument: &'static CStr, message: impl Into<String>) -> Self {
        Failure::argument(mp_status_t::MP_ERROR_INVALID_ARGUMENT, argument, message)
    }

    /// Returns a function that converts an error of the library's core to an error of the C ABI. The function names the
    /// parameter `argument` as the cause, unless the error is about the context or the device.
    pub fn blame(argument: &'static CStr) -> impl FnOnce(Error) -> Failure {
        move |error| {
            let failure = Failure::from(error);
            let argument = failure.argument.filter(|own| [c"context", c"device"].contains(own)).or(Some(argument));
            Failure { argument, ..failure }
        }
    }

    fn panic(payload: Box<dyn Any + Send>) -> Self {
        let message = format!("internal error: {}; the context stays usable, please report this", panics::text(payload));
        Failure { status: mp_status_t::MP_ERROR_INTERNAL, driver_code: 0, argument: None, message }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        use mp_status_t::*;
        let (status, argument) = match &error {
            Error::Environment { .. } => (MP_ERROR_ENVIRONMENT, None),
            Error::Option { .. } => (MP_ERROR_INVALID_ARGUMENT, Some(c"options")),
            Error::NotSupported(_) => (MP_ERROR_NOT_SUPPORTED, None),
            Error::UnknownDevice { .. } => (MP_ERROR_INVALID_DEVICE, Some(c"transfers")),
            Error::NoSuchDevice { .. } => (MP_ERROR_INVALID_DEVICE, Some(c"device")),
            Error::TooManyTransfers(_) => (MP_ERROR_INVALID_ARGUMENT, Some(c"count")),
            Error::NullPointer { .. }
            | Error::AddressOverflow { .. }
            | Error::NotDeviceMemory { .. }
            | Error::WrongDevice { .. }
            | Error::OutOfAllocation { .. } => (MP_ERROR_INVALID_POINTER, Some(c"transfers")),
            Error::Overlap { .. } | Error::OverlapsItself { .. } => (MP_ERROR_OVERLAP, Some(c"transfers")),
            Error::MemoryFreed { .. } => (MP_ERROR_INVALID_POINTER, Some(c"plan")),
            Error::NotAllocated(_) => (MP_ERROR_INVALID_POINTER, Some(c"memory")),
            Error::ReadOnly { .. } => (MP_ERROR_INVALID_POINTER, Some(c"transfers")),
            Error::NotRegistrable { .. }
            | Error::NotRegistered(_)
            | Error::NotMapped(_)
            | Error::NotShareable { .. }
            | Error::OutOfMemoryRange { .. }
            | Error::NotImported(_) => (MP_ERROR_INVALID_POINTER, Some(c"pointer")),
            Error::BadSignal { .. } => (MP_ERROR_INVALID_POINTER, Some(c"signals")),
            Error::SignalTimeout { .. } | Error::PartitionTimeout { .. } => (MP_ERROR_TIMEOUT, None),
            Error::Share(share) => share_status(share),
            Error::ContextDestroyed | Error::Forked => (MP_ERROR_INVALID_HANDLE, Some(c"context")),
            Error::Topology(_) => (MP_ERROR_TOPOLOGY, Some(c"topology")),
            Error::Tuning(_) => (MP_ERROR_ENVIRONMENT, None),
            Error::Plan(plan) => plan_status(plan),
            Error::Backend(backend) => backend_status(backend),
            Error::RankFailed { .. } => (MP_ERROR_RANK_FAILED, None),
            Error::Allgather(_) => (MP_ERROR_ALLGATHER, None),
            Error::NodeArgument { argument, .. } => (MP_ERROR_INVALID_ARGUMENT, Some(*argument)),
            Error::Pieces { argument, .. } => (MP_ERROR_INVALID_ARGUMENT, Some(*argument)),
            Error::PieceMemory { argument, .. } => (MP_ERROR_INVALID_POINTER, Some(*argument)),
            Error::QueueFull(_) => (MP_ERROR_QUEUE_FULL, None),
            Error::InvalidParts(_) => (MP_ERROR_INTERNAL, None),
            Error::StagingBound { .. } | Error::InvalidProgram(_) => (MP_ERROR_INTERNAL, None),
        };
        let driver_code = match &error {
            Error::Backend(BackendError::Driver { code, .. }) => *code,
            Error::Share(ipc::IpcError::System { code, .. }) => i64::from(*code),
            _ => 0,
        };
        Failure { status, driver_code, argument, message: error.to_string() }
    }
}

impl From<BackendError> for Failure {
    fn from(error: BackendError) -> Self {
        Error::from(error).into()
    }
}

fn plan_status(error: &PlanError) -> (mp_status_t, Option<&'static CStr>) {
    use mp_status_t::*;
    match error {
        PlanError::NoRoute { .. } => (MP_ERROR_NO_ROUTE, Some(c"transfers")),
        PlanError::InvalidDevice { .. } => (MP_ERROR_INVALID_DEVICE, Some(c"transfers")),
        PlanError::Option { .. } | PlanError::Weight { .. } | PlanError::Staging { .. } => (MP_ERROR_INVALID_ARGUMENT, Some(c"options")),
        PlanError::TooManyTransfers(_) => (MP_ERROR_INVALID_ARGUMENT, Some(c"count")),
        PlanError::OutOfMemory { .. } => (MP_ERROR_OUT_OF_MEMORY, None),
    }
}

fn share_status(error: &ipc::IpcError) -> (mp_status_t, Option<&'static CStr>) {
    use mp_status_t::*;
    match error {
        ipc::IpcError::Corrupt(_) => (MP_ERROR_INVALID_ARGUMENT, Some(c"handle")),
        ipc::IpcError::Version(_) => (MP_ERROR_VERSION_MISMATCH, Some(c"handle")),
        ipc::IpcError::NotSupported(_) => (MP_ERROR_NOT_SUPPORTED, None),
        ipc::IpcError::PeerGone(_) => (MP_ERROR_PEER_GONE, None),
        ipc::IpcError::Timeout(_) => (MP_ERROR_TIMEOUT, None),
        ipc::IpcError::System { .. } => (MP_ERROR_DRIVER, None),
    }
}

fn backend_status(error: &BackendError) -> (mp_status_t, Option<&'static CStr>) {
    use mp_status_t::*;
    match error {
        BackendError::OutOfMemory { .. } => (MP_ERROR_OUT_OF_MEMORY, None),
        BackendError::InvalidDevice(_) => (MP_ERROR_INVALID_DEVICE, Some(c"device")),
        BackendError::InvalidPointer(_) => (MP_ERROR_INVALID_POINTER, Some(c"memory")),
        BackendError::NotMapped(_) => (MP_ERROR_INVALID_POINTER, Some(c"pointer")),
        BackendError::InvalidHandle(_, "event") => (MP_ERROR_INVALID_HANDLE, Some(c"event")),
        BackendError::InvalidHandle(..) => (MP_ERROR_INVALID_HANDLE, Some(c"stream")),
        BackendError::DataCorruption { .. } => (MP_ERROR_DATA_CORRUPTION, None),
        BackendError::NoDriver(_) => (MP_ERROR_NO_DRIVER, None),
        BackendError::NotSupported(_) => (MP_ERROR_NOT_SUPPORTED, None),
        BackendError::PeerGone(_) => (MP_ERROR_PEER_GONE, None),
        BackendError::Truncated(_) => (MP_ERROR_MESSAGE_TRUNCATED, None),
        BackendError::IndexOutOfRange(_) => (MP_ERROR_INVALID_ARGUMENT, Some(c"blocks")),
        BackendError::Cancelled(_) => (MP_ERROR_CANCELLED, None),
        BackendError::Driver { .. } => (MP_ERROR_DRIVER, None),
    }
}

/// Last error of a thread, with its texts as C strings.
struct LastError {
    status: mp_status_t,
    driver_code: i64,
    argument: Option<Cow<'static, CStr>>,
    message: CString,
}

thread_local! {
    /// Last error of this thread. `None` if no call has failed.
    static LAST: RefCell<Option<LastError>> = const { RefCell::new(None) };
}

/// Returns the last error of this thread. Its texts are valid until the next error. The status is `MP_SUCCESS` and the
/// texts are empty if no call has failed, or if the thread is ending and its storage has been released.
pub(super) fn last_error() -> mp_error_info_t {
    let view = |last: Option<&LastError>| mp_error_info_t {
        size: mp_error_info_t::FIRST_SIZE,
        status: last.map_or(mp_status_t::MP_SUCCESS, |last| last.status),
        driver_code: last.map_or(0, |last| last.driver_code),
        argument: last.and_then(|last| last.argument.as_deref()).map_or(std::ptr::null(), CStr::as_ptr),
        message: last.map_or(c"", |last| &last.message).as_ptr(),
    };
    LAST.try_with(|last| view(last.borrow().as_ref())).unwrap_or_else(|_| view(None))
}

/// Stores the last error of this thread. `argument` is the name of the invalid parameter.
pub(super) fn set_last_error(status: mp_status_t, driver_code: i64, argument: Option<CString>, message: CString) {
    store(LastError { status, driver_code, argument: argument.map(Cow::Owned), message });
}

/// Stores the last error of this thread. Does nothing if the thread is ending and its storage has been released.
fn store(error: LastError) {
    let _ = LAST.try_with(|last| *last.borrow_mut() = Some(error));
}

/// Converts text to a C string. A NUL inside the text is replaced by a visible character, so that the text is not cut.
pub(super) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

/// Runs the body of an entry point and returns its status. An error or a panic becomes the last error of this thread.
pub(super) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> mp_status_t {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return mp_status_t::MP_SUCCESS,
        Ok(Err(failure)) => failure,
        Err(payload) => Failure::panic(payload),
    };
    let Failure { status, driver_code, argument, message } = failure;
    store(LastError { status, driver_code, argument: argument.map(Cow::Borrowed), message: c_text(&message) });
    status
}
