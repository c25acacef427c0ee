//! Errors of memory sharing between processes.

use rustix::io::Errno;
use std::io;

/// Error of memory sharing between processes.
#[derive(Clone, Debug, thiserror::Error)]
pub enum IpcError {
    /// The bytes that were passed do not form a valid memory handle.
    #[error("{0}")]
    Corrupt(String),
    /// The memory handle, or the process that exported the memory, belongs to another version of the library.
    #[error("{0}")]
    Version(String),
    /// The operation is not supported in this environment. The text gives the reason and an alternative.
    #[error("{0}")]
    NotSupported(String),
    /// The process that exported the memory has exited or has freed the memory.
    #[error("{0}")]
    PeerGone(String),
    /// The process that exported the memory did not answer within the maximum time.
    #[error("{0}")]
    Timeout(String),
    /// The operating system returned an error. The fields are the name of the failed call, the error text and the error code.
    #[error("{what}: {reason} (code {code})")]
    #[allow(missing_docs)]
    System { what: &'static str, reason: String, code: i32 },
}

impl IpcError {
    /// Returns a function that converts a system error of the call `what` to an [`IpcError`].
    pub(crate) fn system(what: &'static str) -> impl Fn(Errno) -> IpcError {
        move |errno| IpcError::System {
            what,
            reason: match errno {
                Errno::MFILE => "this process is out of file descriptors (EMFILE), and shared memory needs some: raise `ulimit -n`".into(),
                _ => io::Error::from(errno).to_string(),
            },
            code: errno.raw_os_error(),
        }
    }
}
