//! Memory that was given back in the order of a stream. It counts as freed for everybody from then on, and goes back to the backend
//! later: freeing waits for the whole device where the backend is a driver, and whoever frees in stream order must not wait.

use crate::backend::{Backend, Completion};
use crate::sync::{Mutex, lock};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What one context has to give back to its backend.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    /// How many there are, so that nobody takes the lock while there are none.
    count: AtomicUsize,
    freed: Mutex<Vec<Freed>>,
}

#[derive(Debug)]
struct Freed {
    base: u64,
    bytes: u64,
    /// The work that may still use it.
    after: Completion,
}

impl Deferred {
    /// Keeps an allocation until `after`.
    pub fn add(&self, base: u64, bytes: u64, after: Completion) {
        let mut freed = lock(&self.freed);
        freed.push(Freed { base, bytes, after });
        self.count.store(freed.len(), Ordering::Release);
    }

    /// Whether an address lies in memory that was given back.
    pub fn contains(&self, address: u64) -> bool {
        self.count.load(Ordering::Acquire) > 0 && lock(&self.freed).iter().any(|freed| address.wrapping_sub(freed.base) < freed.bytes)
    }

    /// Gives the backend what no work uses any more; whether there was anything. The caller counts a free afterwards.
    pub fn reclaim(&self, backend: &dyn Backend) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut freed = lock(&self.freed);
        // Work that failed has ended too.
        let (ended, rest) = std::mem::take(&mut *freed).into_iter().partition::<Vec<_>, _>(|freed| freed.after.is_done().unwrap_or(true));
        *freed = rest;
        self.count.store(freed.len(), Ordering::Release);
        drop(freed);
        for Freed { base, .. } in &ended {
            if let Err(error) = backend.free(*base) {
                log::warn!("memory at {base:#x} that was freed in stream order could not be given back: {error}");
            }
        }
        !ended.is_empty()
    }
}
