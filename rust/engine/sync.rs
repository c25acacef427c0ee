//! The locks of the engine. `--cfg shuttle` swaps in those of the model checker, which explores the interleavings.

#[cfg(not(shuttle))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

#[cfg(shuttle)]
pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard};

/// Locks, also after another thread has panicked with the lock held: every critical section of the engine leaves what it guards
/// consistent at each point where a panic can strike, so that one failed call does not take the context with it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
