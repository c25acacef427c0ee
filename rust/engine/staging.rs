//! Staging memory: one arena per device, regions of it for plans, and the order of executions that share bytes of it.
//!
//! An arena is allocated when the first plan that stages on its device is made, with the whole bound at once: so that executing
//! never allocates, and a device that no plan stages on costs nothing. Regions are handed out by a cursor that wraps. When space
//! runs out, regions of different plans overlap; that costs concurrency, never bytes, because correctness does not depend on the
//! placement: executions whose regions overlap are ordered ([`Staging::ordered`]), whatever threads and streams they come from.
//! The order is the order of submission, so that waiting can form no cycle.

use super::error::Error;
use super::sync::{Mutex, lock};
use crate::backend::{Backend, BackendError, Completion};
use crate::fault;
use crate::plan::Ring;
use crate::topology::DeviceId;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

/// Rings start at multiples of this while they fit, so that copies run at full speed.
const ALIGNMENT: u64 = 256;

/// Staging bytes of one plan on one device. Addresses are unique over all devices of a context, so the device itself need not be
/// remembered.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
}

/// The regions of one plan, disjoint.
pub type Regions = SmallVec<[Region; 4]>;

/// Completions that an execution has to wait for.
pub type After = SmallVec<[Completion; 4]>;

/// The staging memory of a context.
#[derive(Debug)]
pub struct Staging {
    bound: u64,
    arenas: Mutex<BTreeMap<DeviceId, Arena>>,
    users: Mutex<Users>,
}

#[derive(Debug)]
struct Arena {
    base: u64,
    cursor: u64,
}

impl Staging {
    /// Staging of at most `bound` bytes per device. Allocates nothing.
    pub fn new(bound: u64) -> Self {
        Staging { bound, arenas: Mutex::new(BTreeMap::new()), users: Mutex::new(Users::default()) }
    }

    /// Finds room for the rings of a plan: the base address of each, and the regions that they fill.
    pub fn place(&self, rings: &[Ring], backend: &dyn Backend) -> Result<(Arc<[u64]>, Regions), Error> {
        let mut bases = vec![0; rings.len()];
        let mut regions = Regions::new();
        let mut devices: SmallVec<[DeviceId; 8]> = rings.iter().map(|r| r.device).collect();
        devices.sort_unstable();
        devices.dedup();
        for device in devices {
            let total = |alignment: u64| {
                let mut sizes = rings.iter().filter(|r| r.device == device).map(|r| r.bytes().checked_next_multiple_of(alignment));
                sizes.try_fold(0_u64, |sum, size| sum.checked_add(size?)).filter(|sum| *sum <= self.bound)
            };
            // A plan may fill its bound to the last byte; then its rings stand without gaps.
            let (alignment, bytes) = match (total(ALIGNMENT), total(1)) {
                (Some(bytes), _) => (ALIGNMENT, bytes),
                (None, Some(bytes)) => (1, bytes),
                (None, None) => return Err(Error::StagingBound { device: device.0, bound: self.bound }),
            };
            let start = self.take(device, bytes, backend)?;
            regions.push(Region { start, end: start + bytes });
            let mut next = start;
            for (base, ring) in bases.iter_mut().zip(rings).filter(|(_, r)| r.device == device) {
                *base = next;
                next += ring.bytes().next_multiple_of(alignment);
            }
        }
        Ok((bases.into(), regions))
    }

    fn take(&self, device: DeviceId, bytes: u64, backend: &dyn Backend) -> Result<u64, BackendError> {
        let mut arenas = lock(&self.arenas);
        let arena = match arenas.entry(device) {
            Entry::Occupied(arena) => arena.into_mut(),
            Entry::Vacant(none) => {
                let base = backend.allocate(device, self.bound)?;
                log::debug!("device {}: allocated {} bytes of staging", device.0, self.bound);
                none.insert(Arena { base, cursor: 0 })
            }
        };
        let mut offset = arena.cursor.next_multiple_of(ALIGNMENT);
        if offset > self.bound || bytes > self.bound - offset {
            offset = 0;
        }
        arena.cursor = offset + bytes;
        Ok(arena.base + offset)
    }

    /// Enqueues an execution that uses these regions: `enqueue` gets the completions of earlier executions that it must run after,
    /// and returns its own. Without regions no lock is taken.
    ///
    /// The lock is held while `enqueue` runs, so that the order in which executions learn of each other is the order in which the
    /// backend gets them. `enqueue` must not wait. When it fails nothing was enqueued, and nothing is remembered.
    pub fn ordered<E>(&self, regions: &[Region], enqueue: impl FnOnce(&[Completion]) -> Result<Completion, E>) -> Result<Completion, E> {
        if regions.is_empty() {
            return enqueue(&[]);
        }
        let mut users = lock(&self.users);
        let after = users.unfinished(regions);
        fault::point("staging");
        let completion = enqueue(&after)?;
        users.record(regions, &completion);
        Ok(completion)
    }

    /// Bytes of staging that are allocated on `device`.
    pub fn bytes(&self, device: DeviceId) -> u64 {
        if lock(&self.arenas).contains_key(&device) { self.bound } else { 0 }
    }

    /// Gives all arenas back. All executions have finished, and no more will come.
    pub fn release(&self, backend: &dyn Backend) -> Result<(), BackendError> {
        lock(&self.users).last.clear();
        let arenas = std::mem::take(&mut *lock(&self.arenas));
        let mut result = Ok(());
        for arena in arenas.values() {
            result = result.and(backend.free(arena.base));
        }
        result
    }
}

/// Who used which bytes last: disjoint ranges by their first byte. A later user of a byte replaces the earlier one, because waiting
/// for the later includes waiting for the earlier. So the table holds no more ranges than plans have regions' boundaries.
#[derive(Debug, Default)]
struct Users {
    last: BTreeMap<u64, (u64, Completion)>,
    /// Table size at which finished executions are swept out.
    sweep_at: usize,
}

const SWEEP_AT_LEAST: usize = 64;

impl Users {
    /// Each unfinished execution that used a byte of these regions, once.
    fn unfinished(&self, regions: &[Region]) -> After {
        let mut after = After::new();
        for region in regions {
            // Ranges are disjoint, so their ends ascend as their starts do.
            for (_, (_, completion)) in self.last.range(..region.end).rev().take_while(|(_, (end, _))| *end > region.start) {
                if !after.iter().any(|other| Arc::ptr_eq(other, completion)) && !completion.is_known_done() {
                    after.push(completion.clone());
                }
            }
        }
        after
    }

    fn record(&mut self, regions: &[Region], completion: &Completion) {
        for region in regions {
            // In a time loop.
            if let Some((end, last)) = self.last.get_mut(&region.start)
                && *end == region.end
            {
                *last = completion.clone();
                continue;
            }
            while let Some((&start, &(end, _))) = self.last.range(..region.end).next_back().filter(|(_, (end, _))| *end > region.start) {
                let Some((_, earlier)) = self.last.remove(&start) else { break };
                if start < region.start {
                    self.last.insert(start, (region.start, earlier.clone()));
                }
                if end > region.end {
                    self.last.insert(region.end, (end, earlier));
                }
            }
            self.last.insert(region.start, (region.end, completion.clone()));
        }
        if self.last.len() > self.sweep_at {
            self.last.retain(|_, (_, completion)| !finished(completion));
            self.sweep_at = (2 * self.last.len()).max(SWEEP_AT_LEAST);
        }
    }
}

/// An execution that failed has finished too: its error is its caller's to hear.
fn finished(completion: &Completion) -> bool {
    completion.is_done().unwrap_or(true)
}

#[cfg(test)]
mod growth;
#[cfg(all(test, shuttle))]
mod interleavings;
