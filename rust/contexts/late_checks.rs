//! Tracks copies whose index lists are checked while the copies run, and reports their errors.

use super::error::Error;
use crate::backend::{Completion, StreamHandle};
use crate::sync::{Mutex, lock};

/// Copies whose index lists are checked while the copies run, each with its stream. The caller may have no request for such a copy, so its
/// error is also reported when the stream is synchronised.
#[derive(Debug, Default)]
pub struct LateChecks(Mutex<Noted>);

#[derive(Debug, Default)]
struct Noted {
    copies: Vec<(StreamHandle, Completion)>,
    /// Number of copies from which on the next call of `note` removes copies that have nothing to report.
    full: usize,
}

impl LateChecks {
    /// Adds a copy that was enqueued in `stream`. If there are many copies, first removes those that have finished without an error.
    pub fn note(&self, stream: StreamHandle, copy: &Completion) {
        let mut noted = lock(&self.0);
        if noted.copies.len() >= noted.full {
            let mut failed = Vec::new();
            noted.copies.retain(|(of, earlier)| match earlier.is_done() {
                Ok(is_done) => !is_done,
                // Only the first error of a stream is reported.
                Err(_) if failed.contains(of) => false,
                Err(_) => {
                    failed.push(*of);
                    true
                }
            });
            // The limit grows with the number of copies, so that each call polls only a few copies on average.
            noted.full = 2 * noted.copies.len() + 16;
        }
        noted.copies.push((stream, copy.clone()));
    }

    /// Returns the first error of the copies in a stream whose work has finished. Each error is returned once.
    pub fn report(&self, stream: StreamHandle) -> Result<(), Error> {
        // Unfinished copies are not removed: other threads may have enqueued them meanwhile, and they may wait for later work of this thread.
        let has_ended = |(of, copy): &mut (StreamHandle, Completion)| *of == stream && !matches!(copy.is_done(), Ok(false));
        let ended: Vec<Completion> = lock(&self.0).copies.extract_if(.., has_ended).map(|(_, copy)| copy).collect();
        ended.iter().try_for_each(|copy| copy.wait()).map_err(Error::from)
    }

    /// Removes the copies of a stream that was destroyed. A new stream may have the same handle.
    pub fn forget(&self, stream: StreamHandle) {
        lock(&self.0).copies.retain(|(of, _)| *of != stream);
    }
}
