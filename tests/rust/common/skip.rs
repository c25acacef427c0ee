//! Reports tests that cannot run on this machine. The test harness cannot skip a test that has started, and counts it as passed. So each
//! skipped test prints a line, and `tests/run`, `tests/gpu/measure` and `tests/gpu/sanitize` count these lines.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

/// Prints once that the test of the calling thread is skipped, and why. The test must return afterwards.
pub fn skip(why: impl Display) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into()) {
        // The line is written by one call, so that it is not mixed with lines of other threads. It is written directly to standard error,
        // because the harness captures the output of tests.
        let _ = std::io::stderr().write_all(format!("skipped: test {name}: {why}\n").as_bytes());
    }
}
