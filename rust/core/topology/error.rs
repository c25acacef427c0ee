//! Errors of topologies.

use std::path::PathBuf;

/// Reason for which a topology cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields' names describe them.
pub enum TopologyError {
    /// Name of neither a preset nor a file.
    #[error("topology {name:?} is not a preset and there is no file with this path; the presets are {presets}")]
    NotFound { name: String, presets: String },
    /// File that exists but cannot be read.
    #[error("topology file {}: {reason}", path.display())]
    Unreadable { path: PathBuf, reason: String },
    /// Error in the text of a file.
    #[error("topology file {}: {source}", path.display())]
    InFile { path: PathBuf, source: Box<TopologyError> },
    /// Text that is not a topology, or a topology that violates the rules of `docs/reference/topology.md`. The message names the entry, the
    /// wrong value and the remedy.
    #[error("{0}")]
    Invalid(String),
    /// Table `[probe]` that a probe cannot have written. The message names the defect and the remedy.
    #[error("[probe]: {0}")]
    Probe(String),
    /// File that cannot be written.
    #[error("topology file {}: it cannot be written: {reason}; name another file, or set XDG_CACHE_HOME to a directory that can be", path.display())]
    Unwritable { path: PathBuf, reason: String },
    /// File that was probed on another machine, or on this machine before a change.
    #[error(
        "topology file {} does not describe this machine in its present state: {reason}; probe again with `mpgpu probe`, or remove the \
         table [probe] from the file to use its figures anyway", path.display()
    )]
    Stale { path: PathBuf, reason: String },
}

/// Returns the error of a violated rule.
pub(super) fn refuse<T>(why: String) -> Result<T, TopologyError> {
    Err(TopologyError::Invalid(why))
}
