//! What can be wrong with a topology.

use std::path::PathBuf;

/// Why a topology cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // Of the fields, which say what they are.
pub enum TopologyError {
    /// Neither a preset nor a file.
    #[error(
        "topology {name:?} is no preset and no such file exists; presets are {presets}, anything else is taken as the path of a TOML file"
    )]
    NotFound { name: String, presets: String },
    /// A file that is there but cannot be read.
    #[error("topology file {}: {reason}", path.display())]
    Unreadable { path: PathBuf, reason: String },
    /// An error in a file that was read.
    #[error("topology file {}: {source}", path.display())]
    InFile { path: PathBuf, source: Box<TopologyError> },
    /// A text that is no topology, or a topology against the rules of `docs/reference/topology.md`: the entry, the value at fault and the
    /// remedy.
    #[error("{0}")]
    Invalid(String),
    /// A table `[probe]` that cannot be what a probe wrote: what is wrong, and the remedy.
    #[error("[probe]: {0}")]
    Probe(String),
    /// A file that cannot be written.
    #[error("topology file {}: it cannot be written: {reason}; name another file, or set XDG_CACHE_HOME to a directory that can be", path.display())]
    Unwritable { path: PathBuf, reason: String },
    /// A file that was probed on another machine, or on this one as it was.
    #[error(
        "topology file {} is not of this machine as it is now: {reason}; probe again with `mpgpu probe`, or take the table [probe] out of the \
         file to use its figures all the same", path.display()
    )]
    Stale { path: PathBuf, reason: String },
}

/// The error of a rule that is broken.
pub(super) fn refuse<T>(why: String) -> Result<T, TopologyError> {
    Err(TopologyError::Invalid(why))
}
