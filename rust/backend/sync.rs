//! Provides the synchronisation primitives of code that is tested by a model checker: those of the standard library, or those of the model
//! checker.
//!
//! `--cfg shuttle` replaces every primitive by one that shuttle schedules, so that the models run the production code under thousands of
//! schedules.

#[cfg(shuttle)]
pub use shuttle::{
    sync::{
        Condvar, Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};
#[cfg(not(shuttle))]
pub use std::{
    sync::{
        Condvar, Mutex, MutexGuard, RwLock,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

use std::sync::{LockResult, PoisonError};

/// Returns the guard of a lock, even if a thread has panicked while it held the lock. Every critical section keeps its data consistent at
/// each point where a panic can occur. One failed call therefore does not make the context unusable.
pub fn held<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

/// Locks `mutex` and returns its guard, even if a thread has panicked while it held the lock; see [`held`].
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    held(mutex.lock())
}
