//! Why memory could not be shared.

use std::io;

/// The error type of this module.
#[derive(Clone, Debug, thiserror::Error)]
pub enum IpcError {
    /// The bytes are no handle.
    #[error("{0}")]
    Corrupt(String),
    /// A handle, or a peer, of another version of the library.
    #[error("{0}")]
    Version(String),
    /// It cannot be done here; the text says why, and what can be done instead.
    #[error("{0}")]
    NotSupported(String),
    /// The peer has exited, or has freed the memory.
    #[error("{0}")]
    PeerGone(String),
    /// The peer did not answer.
    #[error("{0}")]
    Timeout(String),
    /// The operating system refused.
    #[error("{what}: {reason} (code {code})")]
    #[allow(missing_docs)]
    System { what: &'static str, reason: String, code: i32 },
}

impl IpcError {
    /// What the system said to `what`.
    pub(crate) fn system(what: &'static str) -> impl Fn(rustix::io::Errno) -> IpcError {
        move |errno| IpcError::System { what, reason: io::Error::from(errno).to_string(), code: errno.raw_os_error() }
    }
}
