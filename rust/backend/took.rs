//! Logs the duration of operations that may block the calling program.

use std::fmt::Display;
use std::time::Instant;

/// Runs `work`, writes its duration to the debug log and returns its result.
pub fn took<T>(what: impl Display, work: impl FnOnce() -> T) -> T {
    if !log::log_enabled!(log::Level::Debug) {
        return work();
    }
    let began = Instant::now();
    let result = work();
    log::debug!("{what}: {:.2} ms", began.elapsed().as_secs_f64() * 1e3);
    result
}
