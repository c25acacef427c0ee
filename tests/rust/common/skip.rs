//! Tests that cannot run on this machine. The test harness knows no skips while it runs and counts such a test as passed, so each says so
//! in a line of its own, which `tests/run`, `tests/gpu/measure` and `tests/gpu/sanitize` count.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::Write;
use std::sync::{Mutex, PoisonError};

/// Says, once, that the test of this thread is skipped, and why. The test returns afterwards.
pub fn skip(why: impl Display) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    if SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into()) {
        // In one piece, so that no other thread's line comes between, and past the harness, which keeps what tests print to itself.
        let _ = std::io::stderr().write_all(format!("skipped: test {name}: {why}\n").as_bytes());
    }
}
