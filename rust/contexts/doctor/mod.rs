//! Reports what works, is slow or is refused on this machine: one line each, with a remedy for each problem.
//!
//! [`Facts`] are gathered first; only this step touches the machine. [`findings`] is a pure function of the facts, so tests cover problems
//! that no available machine has.
//!
//! | file | promise |
//! | --- | --- |
//! | [`facts`] | facts about the system, the environment and the launcher; those about GPUs are in [`mpgpu_devices::cuda::doctor`] |
//! | [`trials`] | the system calls that sharing between processes needs, each tried |
//! | `findings` | findings from facts |

pub mod facts;
mod findings;
pub mod trials;

pub use facts::Facts;
pub use findings::findings;

/// Severity of a finding.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The check found no problem.
    Well,
    /// No GPU is used. Nothing is slow because of that, but the speed of GPUs is unknown.
    Absent,
    /// Correct, but slower than possible.
    Slow,
    /// The check could not decide.
    Unknown,
    /// Something does not work, or would lose bytes.
    Refused,
}

impl Level {
    /// Returns the level as one word.
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

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Severity of a finding.
    pub level: Level,
    /// Topic of the finding, one word.
    pub topic: &'static str,
    /// Line of text that describes the finding.
    pub line: String,
    /// Remedy; empty if there is no problem.
    pub remedy: String,
}
