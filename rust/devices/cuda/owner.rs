//! What outlives a call of the backend, and keeps it alive.

use super::gpus::Gpus;
use crate::backend::failed_waits::FailedWaits;
use std::fmt::Debug;

/// The backend, as completions need it.
pub(super) trait Owner: Debug + Send + Sync {
    fn gpus(&self) -> &Gpus;
    fn failed_waits(&self) -> &FailedWaits;
}
