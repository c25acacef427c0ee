//! Records the time at which a stream reaches a point of its work, by an event with a timestamp.

use super::device::Mark;
use super::driver::{OutsideCapture, code};
use super::owner::Owner;
use super::parts::Core;
use crate::backend::{BackendError, Moment, MomentState, StreamHandle};
use std::any::Any;
use std::sync::Arc;

#[derive(Debug)]
struct RecordedMoment {
    // This field is declared before `owner`, so that it is dropped first. The event's pool lives in `owner`.
    mark: Mark,
    owner: Arc<dyn Owner>,
    gpu: usize,
}

impl Core {
    /// Enqueues an event that records the time at which the stream reaches this point. Implements
    /// [`Backend::mark_moment`](crate::backend::Backend::mark_moment).
    pub fn mark_moment(self: &Arc<Core>, stream: StreamHandle) -> Result<Moment, BackendError> {
        let found = self.streams.find(&self.gpus, stream)?;
        let primary = self.gpus.primary(found.gpu)?;
        let _current = primary.enter()?;
        let owner: Arc<dyn Owner> = self.clone();
        Ok(Box::new(RecordedMoment { mark: primary.record_time(stream.0)?, owner, gpu: found.gpu }))
    }
}

impl MomentState for RecordedMoment {
    fn nanoseconds_since(&self, earlier: &dyn MomentState) -> Result<Option<u64>, BackendError> {
        let (gpus, earlier) = (self.owner.gpus(), earlier.as_any().downcast_ref::<RecordedMoment>());
        let Some((elapsed, earlier)) = gpus.driver.cuEventElapsedTime.zip(earlier) else {
            return Err(BackendError::NotSupported("the driver has no cuEventElapsedTime, so streams cannot be timed".into()));
        };
        let primary = gpus.primary(self.gpu)?;
        primary.check()?;
        let _outside = OutsideCapture::enter(gpus.driver);
        let _current = primary.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: The driver writes to a variable that outlives the call. Both events come from pools and belong to these moments until the
        // moments are dropped.
        match unsafe { elapsed(&mut milliseconds, earlier.mark.event(), self.mark.event()) } {
            code::NOT_READY => Ok(None),
            code => gpus.driver.check("cuEventElapsedTime", code).map(|()| Some((f64::from(milliseconds) * 1e6) as u64)),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
