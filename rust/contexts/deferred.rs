//! Memory that the caller has freed and that the backend gets later.
//!
//! It counts as freed from the call on. A driver's free waits for the whole device, but a free in stream order must not wait. Nor must the
//! free of a node plan's memory, which other ranks may use for some time.

use super::peer_memory::PeerMemory;
use crate::backend::{Backend, Completion};
use crate::ipc::signal::rest;
use crate::sync::{Mutex, lock};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Memory of one context that is waiting to be freed by its backend.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    /// Number of entries, so that the lock is not acquired while there are none.
    count: AtomicUsize,
    freed: Mutex<Vec<Freed>>,
}

#[derive(Debug)]
struct Freed {
    base: u64,
    bytes: u64,
    used_by: UsedBy,
}

/// Remaining users of freed memory.
#[derive(Debug)]
pub(super) enum UsedBy {
    /// This work.
    Work(Completion),
    /// Other ranks that have the memory mapped.
    Peers,
    /// No user. Other ranks that have the memory mapped keep the mapping and do not use it.
    Nobody,
}

impl Deferred {
    /// Keeps an allocation until all its users have finished.
    pub fn add(&self, base: u64, bytes: u64, used_by: UsedBy) {
        let mut freed = lock(&self.freed);
        freed.push(Freed { base, bytes, used_by });
        self.count.store(freed.len(), Ordering::Release);
    }

    /// True if an address lies in memory that was freed and waits here.
    pub fn contains(&self, address: u64) -> bool {
        self.count.load(Ordering::Acquire) > 0 && lock(&self.freed).iter().any(|freed| address.wrapping_sub(freed.base) < freed.bytes)
    }

    /// Reclaims for the last time (see [`reclaim`](Deferred::reclaim)). Peers have `patience` to unmap the memory that they have mapped.
    pub fn reclaim_all(&self, backend: &dyn Backend, sharing: &PeerMemory, patience: Duration) {
        let until = Instant::now() + patience;
        let mut round = 0;
        loop {
            self.reclaim(backend, sharing);
            let left = self.count.load(Ordering::Acquire);
            if left == 0 {
                return;
            }
            if Instant::now() > until {
                log::warn!(
                    "{left} allocations of node plans are freed although other ranks have them mapped; destroy the plans on all ranks first"
                );
                for Freed { base, .. } in lock(&self.freed).drain(..) {
                    give_back(base, backend, sharing);
                }
                self.count.store(0, Ordering::Release);
                return;
            }
            rest(round);
            round += 1;
        }
    }

    /// Frees memory that is no longer used. Returns true if there was any; the caller then counts a free.
    pub fn reclaim(&self, backend: &dyn Backend, sharing: &PeerMemory) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut freed = lock(&self.freed);
        let is_unused = |freed: &Freed| match &freed.used_by {
            // Failed work has ended too.
            UsedBy::Work(after) => after.is_done().unwrap_or(true),
            UsedBy::Peers => !sharing.is_mapped(freed.base, backend),
            UsedBy::Nobody => true,
        };
        let (ended, rest) = std::mem::take(&mut *freed).into_iter().partition::<Vec<_>, _>(is_unused);
        *freed = rest;
        self.count.store(freed.len(), Ordering::Release);
        drop(freed);
        for Freed { base, .. } in &ended {
            give_back(*base, backend, sharing);
        }
        !ended.is_empty()
    }
}

fn give_back(base: u64, backend: &dyn Backend, sharing: &PeerMemory) {
    sharing.withdraw(base, backend);
    if let Err(error) = backend.free(base) {
        log::warn!("memory at {base:#x}, freed by the caller earlier, could not be freed by the backend: {error}");
    }
}
