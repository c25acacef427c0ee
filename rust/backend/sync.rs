//! The synchronisation primitives of what is checked by models: the standard library's, or those of the model checker.
//!
//! `--cfg shuttle` replaces every primitive by one that shuttle schedules itself, so that the models run the very code that runs in
//! production under thousands of schedules.

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

/// Takes what a lock guards, also after a thread has panicked with the lock held: every critical section leaves what it guards
/// consistent at each point where a panic can strike, so that one failed call does not take the context with it.
pub fn held<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

/// Locks `mutex`; see [`held`].
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    held(mutex.lock())
}
