//! Errors of tuning and of tuning files.

use crate::plan::{PlanError, Violation};
use std::path::PathBuf;

/// Reason why a search for better plans stopped.
#[derive(Debug, thiserror::Error)]
pub enum TuneError<E> {
    /// The batch cannot be planned at all.
    #[error("{0}")]
    Plan(PlanError),
    /// A plan could not be scored.
    #[error("{0}")]
    Score(E),
    /// The planner made a program that the plan validator refuses.
    #[error("internal error: a plan is not valid: {0}")]
    Invalid(Violation),
}

/// Reason why a tuning file cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The names of the fields are sufficient.
pub enum TuningError {
    /// The tuning file cannot be read.
    #[error("tuning file {}: {reason}; make one with `mpgpu tune --output {}`, or unset MPGPU_TUNING_FILE", path.display(), path.display())]
    Unreadable { path: PathBuf, reason: String },
    /// The tuning file was read, but its content is not valid.
    #[error("tuning file {}: {source}", path.display())]
    InFile { path: PathBuf, source: Box<TuningError> },
    /// The text is not a valid tuning. The message names the line, the key, the value and the accepted values.
    #[error("{0}")]
    Invalid(String),
    /// The tuning was made for another machine, or for other bandwidths or costs of this machine.
    #[error(
        "the tuning was made for topology {made_for} (digest {made_digest}), but the active topology is {in_force} (digest {digest}): \
         tuned values \
         correct the figures of one topology and do not apply to others. Tune again (`mpgpu tune --output FILE`), set MPGPU_TOPOLOGY to \
         the topology \
         that it was made for, or unset MPGPU_TUNING_FILE"
    )]
    Foreign { made_for: String, made_digest: String, in_force: String, digest: String },
    /// The tuning was measured on another backend than the active one.
    #[error(
        "the tuning was made on the {made_on} backend, but this is the {backend} backend, on which copies take other times: tune again \
         here \
         (`mpgpu tune --output FILE`), or unset MPGPU_TUNING_FILE"
    )]
    Backend { made_on: &'static str, backend: String },
}
