//! Tracks copies whose index lists are checked while the copies run, and reports their errors.

use super::error::Error;
use crate::backend::{Completion, StreamHandle};
use crate::sync::{Mutex, lock};

/// Copies whose index lists are checked while the copies run, each with its stream. The caller may have no request for such a copy, so its
/// error is also reported when the stream is synchronised.
#[derive(Debug, Default)]
pub struct LateChecks(Mutex<Vec<(StreamHandle, Completion)>>);

impl LateChecks {
    /// Adds a copy that was enqueued in `stream`. Removes copies that have finished without an error.
    pub fn note(&self, stream: StreamHandle, copy: &Completion) {
        let mut copies = lock(&self.0);
        // A copy that has finished without an error has nothing to report.
        copies.retain(|(_, earlier)| !matches!(earlier.is_done(), Ok(true)));
        copies.push((stream, copy.clone()));
    }

    /// Removes the copies in `stream` and returns the first error among them. The work in the stream must have finished.
    pub fn report(&self, stream: StreamHandle) -> Result<(), Error> {
        let ended: Vec<Completion> = lock(&self.0).extract_if(.., |(of, _)| *of == stream).map(|(_, copy)| copy).collect();
        ended.iter().try_for_each(|copy| copy.wait()).map_err(Error::from)
    }
}
