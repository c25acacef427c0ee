//! Copies whose arguments are checked while they run.

use super::error::Error;
use crate::backend::{Completion, StreamHandle};
use crate::sync::{Mutex, lock};

/// Copies whose indices are checked while they run, and that nobody may wait for by themselves.
#[derive(Debug, Default)]
pub struct LateChecks(Mutex<Vec<(StreamHandle, Completion)>>);

impl LateChecks {
    pub fn note(&self, stream: StreamHandle, copy: &Completion) {
        let mut copies = lock(&self.0);
        // One that has finished without an error has nothing to report.
        copies.retain(|(_, earlier)| !matches!(earlier.is_done(), Ok(true)));
        copies.push((stream, copy.clone()));
    }

    /// The error of a copy in a stream whose work has finished, once.
    pub fn report(&self, stream: StreamHandle) -> Result<(), Error> {
        let ended: Vec<Completion> = lock(&self.0).extract_if(.., |(of, _)| *of == stream).map(|(_, copy)| copy).collect();
        ended.iter().try_for_each(|copy| copy.wait()).map_err(Error::from)
    }
}
