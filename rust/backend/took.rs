//! Durations of steps that may block a program, for the log.

use std::fmt::Display;
use std::time::Instant;

/// Runs `work`, and writes its duration to the debug log.
pub fn took<T>(what: impl Display, work: impl FnOnce() -> T) -> T {
    if !log::log_enabled!(log::Level::Debug) {
        return work();
    }
    let began = Instant::now();
    let result = work();
    log::debug!("{what}: {:.2} ms", began.elapsed().as_secs_f64() * 1e3);
    result
}
