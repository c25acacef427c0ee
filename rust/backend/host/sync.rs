//! The synchronisation primitives of this backend: the standard library's, or those of the model checker.
//!
//! `shuttle` replaces every primitive by one that it schedules itself, so that the tests in `model.rs` run the very code that
//! runs in production under thousands of schedules.

#[cfg(shuttle)]
pub(super) use shuttle::{
    sync::{
        Condvar, Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    thread,
};
#[cfg(not(shuttle))]
pub(super) use std::{
    sync::{
        Condvar, Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    thread,
};

#[cfg(not(shuttle))]
pub(super) use crate::share::signal::rest;

/// Lets the others run: a model has no time to rest.
#[cfg(shuttle)]
pub(super) fn rest(_: u32) {
    thread::yield_now();
}

use std::sync::{LockResult, PoisonError};

/// Takes what a lock guards, poisoned or not: nothing in this backend can panic while it holds a lock and leave the value
/// half changed.
pub(super) fn held<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

/// Locks `mutex`.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    held(mutex.lock())
}
