//! Defines the interface by which completions use the CUDA backend and keep it alive.

use super::gpus::Gpus;
use crate::backend::failed_waits::FailedWaits;
use std::fmt::Debug;

/// Functions of the CUDA backend that completions need.
pub(super) trait Owner: Debug + Send + Sync {
    fn gpus(&self) -> &Gpus;
    fn failed_waits(&self) -> &FailedWaits;
}
