//! Memory that was given back and that the backend gets later. It counts as freed for everybody from then on. Freeing waits for the whole
//! device where the backend is a driver, and whoever frees in stream order must not wait; nor must whoever gives back memory of a node
//! plan, which other ranks may use for a while.

use super::peer_memory::PeerMemory;
use crate::backend::{Backend, Completion};
use crate::ipc::signal::rest;
use crate::sync::{Mutex, lock};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

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
    used_by: UsedBy,
}

/// Who may still use memory that was given back.
#[derive(Debug)]
pub(super) enum UsedBy {
    /// This work.
    Work(Completion),
    /// Whoever has it mapped.
    Peers,
    /// Nobody: what others have mapped they keep, and do not use.
    Nobody,
}

impl Deferred {
    /// Keeps an allocation for as long as it has users.
    pub fn add(&self, base: u64, bytes: u64, used_by: UsedBy) {
        let mut freed = lock(&self.freed);
        freed.push(Freed { base, bytes, used_by });
        self.count.store(freed.len(), Ordering::Release);
    }

    /// Whether an address lies in memory that was given back.
    pub fn contains(&self, address: u64) -> bool {
        self.count.load(Ordering::Acquire) > 0 && lock(&self.freed).iter().any(|freed| address.wrapping_sub(freed.base) < freed.bytes)
    }

    /// [`reclaim`](Deferred::reclaim) for the last time: peers have so much time to unmap what they have mapped.
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
                    "{left} allocations of node plans are freed though other ranks have them mapped: destroy plans on all ranks first"
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

    /// Gives the backend what nobody uses any more; whether there was anything. The caller counts a free afterwards.
    pub fn reclaim(&self, backend: &dyn Backend, sharing: &PeerMemory) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return false;
        }
        let mut freed = lock(&self.freed);
        let is_unused = |freed: &Freed| match &freed.used_by {
            // Work that failed has ended too.
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
        log::warn!("memory at {base:#x} that was freed earlier could not be given back: {error}");
    }
}
