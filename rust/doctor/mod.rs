//! What of this machine is well, what is slow, and what is refused, each in a line, with a remedy where it is not well.
//!
//! [`Facts`] are gathered first, and that is all that touches the machine; [`findings`] is a function of them alone, so that what no machine at hand
//! shows can be shown on facts made by hand.
//!
//! | file | promise |
//! | --- | --- |
//! | [`facts`] | what is asked of the system, the environment and the launcher; of GPUs it is [`crate::backend::cuda::doctor`] |
//! | [`trials`] | what sharing between processes needs, each tried for real |
//! | `findings` | facts in, findings out |

pub mod facts;
mod findings;
pub mod trials;

pub use facts::Facts;
pub use findings::findings;

/// How bad it is.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Well,
    /// Nothing is wrong but time.
    Slow,
    /// It could not be found out.
    Unknown,
    /// Something does not work, or would lose bytes.
    Refused,
}

impl Level {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Level::Well => "well",
            Level::Slow => "slow",
            Level::Unknown => "unknown",
            Level::Refused => "refused",
        }
    }
}

/// One line of the doctor's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What it is about, in a word.
    pub topic: &'static str,
    /// What was found.
    pub line: String,
    /// What to do; empty where it is well.
    pub remedy: String,
}
