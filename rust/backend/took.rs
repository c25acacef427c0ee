//! How long steps take that a program may have to wait for, for the log.

use std::fmt::Display;
use std::time::Instant;

/// Runs `work`, and says in the debug log how long it took.
pub fn took<T>(what: impl Display, work: impl FnOnce() -> T) -> T {
    if !log::log_enabled!(log::Level::Debug) {
        return work();
    }
    let began = Instant::now();
    let result = work();
    log::debug!("{what}: {:.2} ms", began.elapsed().as_secs_f64() * 1e3);
    result
}
