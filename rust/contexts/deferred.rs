//! Keeps memory that the caller has freed until it can be freed in the backend.
//!
//! For the caller, the memory is freed as soon as the call to free it returns. The driver's own free waits for the whole device, but a free
//! in stream order must not wait. Freeing the memory of a node plan (plan of several ranks) must not wait either, because other ranks may
//! use that memory for some time.

use super::peer_memory::PeerMemory;
use crate::backend::{Backend, Completion};
use crate::ipc::signal::rest;
use crate::sync::{Mutex, lock};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Memory of one context that the caller has freed and that the backend cannot free yet.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    /// Number of allocations in `freed`. While it is 0, readers need not acquire the lock.
    count: AtomicUsize,
    freed: Mutex<Vec<Freed>>,
}

#[derive(Debug)]
struct Freed {
    base: u64,
    bytes: u64,
    used_by: UsedBy,
}

/// Possible users of memory that the caller has freed. The memory is freed in the backend when they no longer use it.
#[derive(Debug)]
pub(super) enum UsedBy {
    /// Work of this process uses the memory until this completion is done.
    Work(Completion),
    /// Other ranks have mapped the memory and may use it.
    Peers,
    /// Nobody uses the memory, although other ranks may still have it mapped.
    Nobody,
}

impl Deferred {
    /// Adds an allocation that the caller has freed. It is kept until the users given by `used_by` have finished.
    pub fn add(&self, base: u64, bytes: u64, used_by: UsedBy) {
        let mut freed = lock(&self.freed);
        freed.push(Freed { base, bytes, used_by });
        self.count.store(freed.len(), Ordering::Release);
    }

    /// True if an address lies in memory that the caller has freed and the backend has not.
    pub fn contains(&self, address: u64) -> bool {
        self.count.load(Ordering::Acquire) > 0 && lock(&self.freed).iter().any(|freed| address.wrapping_sub(freed.base) < freed.bytes)
    }

    /// Frees all remaining memory when the context closes. Waits at most `patience` until other ranks have unmapped the memory, and then
    /// frees it even if they have not.
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
                    "{left} allocations of node plans (shared by the ranks of this node) are freed although other ranks still have them \
                     mapped; destroy the plans on all ranks first"
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

    /// Frees in the backend all memory that the caller has freed and that is no longer used. Returns true if there was any such memory. The
    /// caller must then increment the count of frees.
    pub fn reclaim(&self, backend: &dyn Backend, sharing: &PeerMemory) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut freed = lock(&self.freed);
        let is_unused = |freed: &Freed| match &freed.used_by {
            // Work that failed has ended too, so an error counts as done.
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
