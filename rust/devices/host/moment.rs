//! Records the time at which a stream reaches a point of its work, by the clock of this machine.

use crate::backend::{BackendError, MomentState};
use std::any::Any;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Time at which a stream reached a point of its work. Empty until the stream reaches it.
#[derive(Clone, Debug, Default)]
pub(super) struct Passed(Arc<OnceLock<Instant>>);

impl Passed {
    /// Records the current time as the time at which the stream reached the point.
    pub(super) fn note(&self) {
        // A graph node runs once, so the time is not set yet.
        let _ = self.0.set(Instant::now());
    }
}

impl MomentState for Passed {
    fn nanoseconds_since(&self, earlier: &dyn MomentState) -> Result<Option<u64>, BackendError> {
        let earlier = earlier.as_any().downcast_ref::<Passed>();
        let earlier =
            earlier.ok_or_else(|| BackendError::NotSupported("times that different backends have recorded cannot be compared".into()))?;
        let both = self.0.get().zip(earlier.0.get());
        Ok(both.map(|(here, there)| u64::try_from(here.saturating_duration_since(*there).as_nanos()).unwrap_or(u64::MAX)))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
