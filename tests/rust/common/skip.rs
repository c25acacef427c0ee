//! Reports tests that cannot run on this machine. The test harness cannot skip a running test and counts it as passed, so each prints a
//! line, which `tests/run`, `tests/gpu/measure` and `tests/gpu/sanitize` count.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

/// Reports once that the test of this thread is skipped, and the reason. The test returns afterwards.
pub fn skip(why: impl Display) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into()) {
        // Written in one call, so that no other thread's line is mixed in, and directly to the system, because the harness captures the
        // output of tests.
        let _ = std::io::stderr().write_all(format!("skipped: test {name}: {why}\n").as_bytes());
    }
}
