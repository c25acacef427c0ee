//! What works on this machine, what is slow and what is refused: a line each, with a remedy for each that is not well.
//!
//! [`Facts`] are gathered first; only that touches the machine. [`findings`] is a pure function of them, so tests cover problems that no machine
//! at hand has.
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
    /// As it should be.
    Well,
    /// No GPU is used: nothing here is slow, and nothing says how fast GPUs are.
    Absent,
    /// Correct, but slower than it could be.
    Slow,
    /// Could not be determined.
    Unknown,
    /// Something does not work, or would lose bytes.
    Refused,
}

impl Level {
    /// The level as one word.
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
    /// The topic, one word.
    pub topic: &'static str,
    /// What was found.
    pub line: String,
    /// What to do; empty where it is well.
    pub remedy: String,
}
