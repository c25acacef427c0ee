//! Why tuning stopped, and what can be wrong with a tuning file.

use super::file::MAX_FILE_BYTES;
use crate::plan::{PlanError, Violation};
use std::path::PathBuf;

/// Why a search stopped.
#[derive(Debug, thiserror::Error)]
pub enum TuneError<E> {
    /// The batch cannot be planned at all.
    #[error("{0}")]
    Plan(PlanError),
    /// A plan could not be scored.
    #[error("{0}")]
    Score(E),
    /// The planner made a program that its own validator refuses.
    #[error("internal error: a plan is not valid: {0}")]
    Invalid(Violation),
}

/// Why a tuning file cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TuningError {
    /// A file that cannot be read.
    #[error("tuning file {}: {reason}; make one with `mpgpu tune --output {}`, or unset MPGPU_TUNING_FILE", path.display(), path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// An error in a file that was read.
    #[error("tuning file {}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<TuningError>,
    },
    /// Text too long to be looked at.
    #[error("more than {MAX_FILE_BYTES} bytes of text; a tuning file has a few kilobytes, check that this is one")]
    TooLong,
    /// Not TOML, an unknown key, a missing key, or a value of the wrong type. The text gives line, column and key.
    #[error("not valid: {0}")]
    Syntax(String),
    /// Written by a tuner of another format.
    #[error("version = {found}: this library reads version {expected}; tune again with the mpgpu command of this library")]
    Version {
        /// What the file says.
        found: u64,
        /// What is read.
        expected: u64,
    },
    /// A value out of its range.
    #[error("line {line}: {key} = {value}: must be {must}")]
    Value {
        /// Where, from 1.
        line: usize,
        /// Which key.
        key: &'static str,
        /// The value.
        value: String,
        /// What is accepted.
        must: String,
    },
    /// Two classes that would hold for the same batches.
    #[error("line {line}: this class is like the one in line {earlier}; remove one of them")]
    ClassTwice {
        /// Where, from 1.
        line: usize,
        /// The other one.
        earlier: usize,
    },
    /// Made for another machine, or for other figures of this one.
    #[error(
        "made for topology {made_for} (digest {made_digest}), and the one in force is {in_force} (digest {digest}): tuned values correct the \
         figures of one topology and mean nothing for others. Tune again (`mpgpu tune --output FILE`), set MPGPU_TOPOLOGY to the topology \
         that it was made for, or unset MPGPU_TUNING_FILE"
    )]
    Foreign {
        /// Name in the file.
        made_for: String,
        /// Digest in the file.
        made_digest: String,
        /// Name of the topology in force.
        in_force: String,
        /// Its digest.
        digest: String,
    },
    /// Measured on another backend.
    #[error(
        "made on the {made_on} backend, and this is the {backend} backend, whose times have nothing to do with it: tune again here \
         (`mpgpu tune --output FILE`), or unset MPGPU_TUNING_FILE"
    )]
    Backend {
        /// In the file.
        made_on: &'static str,
        /// In force.
        backend: String,
    },
}
