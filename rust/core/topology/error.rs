//! Errors of topologies.

use std::path::PathBuf;

/// Reason why a topology cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields' names describe them.
pub enum TopologyError {
    /// The given name is neither that of a preset topology nor that of a topology file.
    #[error("topology {name:?} is not a preset and there is no file with this path; the presets are {presets}")]
    NotFound { name: String, presets: String },
    /// The topology file exists but cannot be read.
    #[error("topology file {}: {reason}", path.display())]
    Unreadable { path: PathBuf, reason: String },
    /// The text of the topology file has an error.
    #[error("topology file {}: {source}", path.display())]
    InFile { path: PathBuf, source: Box<TopologyError> },
    /// The text is not a topology, or the topology violates the rules of `docs/reference/topology.md`. The message names the entry, the
    /// wrong value and the remedy.
    #[error("{0}")]
    Invalid(String),
    /// The table `[probe]` of a topology file cannot have been written by `mpgpu probe`. The message names the defect and the remedy.
    #[error("[probe]: {0}")]
    Probe(String),
    /// The topology file cannot be written.
    #[error(
        "topology file {}: the file cannot be written: {reason}; name another file, or set XDG_CACHE_HOME to a writable directory",
        path.display()
    )]
    Unwritable { path: PathBuf, reason: String },
    /// The topology file contains measurements (`mpgpu probe`) of another machine, or of this machine before its hardware or software
    /// changed.
    #[error(
        "topology file {} does not describe this machine in its present state: {reason}; probe again with `mpgpu probe`, or remove the \
         table [probe] from the file to use its figures anyway", path.display()
    )]
    Stale { path: PathBuf, reason: String },
}

/// Returns an error that states which rule the topology violates.
pub(super) fn refuse<T>(why: String) -> Result<T, TopologyError> {
    Err(TopologyError::Invalid(why))
}
