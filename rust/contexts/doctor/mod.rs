//! Implements `mpgpu doctor`, which reports what works, is slow or is refused on this machine. The report has one line for each finding,
//! with a remedy for each problem.
//!
//! The [`Facts`] are gathered first. Only this step accesses the machine. [`findings`] is a pure function of the facts, so tests cover
//! problems that no available machine has.
//!
//! | file | content |
//! | --- | --- |
//! | [`facts`] | facts about the system, the environment and the launcher; those about GPUs are in [`mpgpu_devices::cuda::doctor`] |
//! | [`trials`] | trials of the system calls that are needed to share memory between processes |
//! | `findings` | findings that are derived from the facts |

pub mod facts;
mod findings;
pub mod trials;

pub use facts::Facts;
pub use findings::findings;

/// Severity of a finding in the report.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The check found no problem.
    Well,
    /// This machine or process uses no GPU. That is not an error, but nothing about GPUs could be checked.
    Absent,
    /// A feature works, but is slower than possible.
    Slow,
    /// The check could not determine a result.
    Unknown,
    /// A feature does not work, or would lose data.
    Refused,
}

impl Level {
    /// Returns the severity as one word for the report.
    pub fn name(self) -> &'static str {
        match self {
            Level::Well => "well",
            Level::Absent => "absent",
            Level::Slow => "slow",
            Level::Unknown => "unknown",
            Level::Refused => "refused",
        }
    }
}

/// One line of the report, with the remedy if it describes a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Severity of the finding.
    pub level: Level,
    /// Subject of the finding, one word.
    pub topic: &'static str,
    /// Line of text that describes the finding.
    pub line: String,
    /// Action that solves the problem; empty if there is none or none is needed.
    pub remedy: String,
}
