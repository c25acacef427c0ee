//! Staging memory: one arena per device, regions of the arenas for plans, and the order of executions that share bytes of a region.
//!
//! An arena is allocated with its full size when the first plan that stages data on its device is made, so that executing never allocates.
//! A device on which no plan stages data needs no arena. Regions are assigned one after the other, starting again at the beginning of the
//! arena when its end is reached. Regions of different plans then overlap. An overlap costs concurrency but never corrupts data, because
//! correctness does not depend on the placement: executions whose regions overlap are ordered, whatever threads and streams they come from.
//!
//! If the backend itself reserves the rings for one execution at a time ([`Backend::ordered_rings`]), the order is the one in which streams
//! reach the executions. Such rings are called granted. The host backend does this for all rings. The CUDA backend does this for the rings
//! of copy threads, which fill the whole arena in almost every plan of pageable memory. Granted rings have separate arenas, and this module
//! does not order their executions.
//!
//! For other rings, those of relays on CUDA, the order is the order of submission ([`Staging::in_turn`]). An execution then runs after all
//! work that precedes an earlier execution in the stream of that execution. Only executions with overlapping regions are affected.
//!
//! Submitting may take long, because a driver call blocks while the queue of its stream is full. The stream may be waiting for a signal
//! that another thread will set only after an execution of its own. So no lock is held during submission. Instead, the submitting thread
//! reserves the bytes of its regions; this reservation is called a turn. Only threads that share a byte with the turn wait until it ends.
//! Their executions run after this one in any case.

use super::error::Error;
use crate::backend::{Backend, BackendError, Completion};
use crate::fault;
use crate::plan::Ring;
use crate::sync::{Condvar, Mutex, MutexGuard, lock};
use crate::took::took;
use crate::topology::DeviceId;
use slotmap::{DefaultKey, Key, KeyData, SlotMap};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

/// Alignment of rings in bytes, so that copies run at full speed. If aligned rings do not fit, the rings are not aligned.
const ALIGNMENT: u64 = 256;

/// Range of staging memory that one plan uses on one device. Addresses are unique across all devices of a context, so the device is not
/// stored.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Address of the first byte.
    pub start: u64,
    /// Address one past the last byte.
    pub end: u64,
}

/// Disjoint regions that one plan uses in the staging memory of one context.
#[derive(Debug)]
#[repr(C)]
pub struct Regions {
    /// Key of the plan's last [`Use`], which may no longer be in the table of uses. It is accessed only while the table is locked.
    last_use: AtomicU64,
    all: Box<[Region]>,
}

impl Regions {
    /// Creates regions that have not been used by any execution.
    pub fn new(all: impl Into<Box<[Region]>>) -> Regions {
        Regions { last_use: AtomicU64::new(DefaultKey::null().data().as_ffi()), all: all.into() }
    }

    fn last_use(&self) -> DefaultKey {
        KeyData::from_ffi(self.last_use.load(Ordering::Relaxed)).into()
    }
}

impl Deref for Regions {
    type Target = [Region];

    fn deref(&self) -> &[Region] {
        &self.all
    }
}

/// Returns the devices of the rings, in the order of the regions.
fn devices(rings: &[Ring]) -> SmallVec<[DeviceId; 8]> {
    let mut devices: SmallVec<[DeviceId; 8]> = rings.iter().map(|ring| ring.device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

/// Completions for which an execution has to wait.
pub type After = SmallVec<[Completion; 4]>;

/// Staging memory of a context.
#[derive(Debug)]
#[repr(C)] // Fields that every execution reads come first.
pub struct Staging {
    users: Mutex<Users>,
    /// Condition that is notified when a turn (reservation of staging bytes by a submitting thread) ends.
    over: Condvar,
    bound: u64,
    /// Arenas by device and by the order that applies to their rings.
    arenas: Mutex<BTreeMap<(DeviceId, RingUse), Arena>>,
}

/// Order of the executions that share a ring.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RingUse {
    /// Executions run in the order in which they are submitted.
    Ordered,
    /// Executions run in the order in which the backend reserves the ring for them, one execution at a time.
    Granted,
}

#[derive(Debug)]
struct Arena {
    base: u64,
    cursor: u64,
}

impl Staging {
    /// Creates staging memory with at most `bound` bytes per device. Allocates nothing.
    pub fn new(bound: u64) -> Self {
        Staging { bound, arenas: Mutex::new(BTreeMap::new()), users: Mutex::new(Users::default()), over: Condvar::new() }
    }

    /// Assigns memory to the rings of a plan. Returns the base address of each ring and the regions that the rings occupy. `within` is
    /// another plan's regions, with its rings. On each device the new regions lie inside those regions if they fit.
    pub fn place(
        &self,
        rings: &[Ring],
        ring_use: RingUse,
        within: Option<(&[Ring], &Regions)>,
        backend: &dyn Backend,
    ) -> Result<(Vec<u64>, Regions), Error> {
        let mut bases = vec![0; rings.len()];
        let mut regions = Vec::new();
        for device in devices(rings) {
            let total = |alignment: u64| {
                let mut sizes = rings.iter().filter(|r| r.device == device).map(|r| r.bytes().checked_next_multiple_of(alignment));
                sizes.try_fold(0_u64, |sum, size| sum.checked_add(size?)).filter(|sum| *sum <= self.bound)
            };
            // A plan may use its whole bound. The rings then have no gaps between them.
            let (alignment, bytes) = match (total(ALIGNMENT), total(1)) {
                (Some(bytes), _) => (ALIGNMENT, bytes),
                (None, Some(bytes)) => (1, bytes),
                (None, None) => return Err(Error::StagingBound { device: device.0, bound: self.bound }),
            };
            let room = within.and_then(|(rings, regions)| {
                let at = devices(rings).iter().position(|other| *other == device)?;
                Some(regions[at].start).filter(|start| bytes <= regions[at].end - start)
            });
            let start = room.map_or_else(|| self.take((device, ring_use), bytes, backend), Ok)?;
            regions.push(Region { start, end: start + bytes });
            let mut next = start;
            for (base, ring) in bases.iter_mut().zip(rings).filter(|(_, r)| r.device == device) {
                *base = next;
                next += ring.bytes().next_multiple_of(alignment);
            }
        }
        Ok((bases, Regions::new(regions)))
    }

    fn take(&self, (device, ring_use): (DeviceId, RingUse), bytes: u64, backend: &dyn Backend) -> Result<u64, BackendError> {
        let mut arenas = lock(&self.arenas);
        let arena = match arenas.entry((device, ring_use)) {
            Entry::Occupied(arena) => arena.into_mut(),
            Entry::Vacant(none) => {
                let allocate = || backend.allocate(device, self.bound);
                let base = took(format_args!("{}: allocated {} bytes of staging", device.in_words(), self.bound), allocate)?;
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

    /// Enqueues an execution that uses these regions. `enqueue` gets the completions of earlier executions after which it must run, and
    /// returns its own completion.
    ///
    /// While `enqueue` runs, no other execution that shares a byte with this one is enqueued. So the order recorded here is the order in
    /// which the backend receives the executions. If `enqueue` fails, nothing was enqueued and nothing is recorded. A captured execution is
    /// not recorded either, because it has staging memory of its own.
    pub fn in_turn<E>(&self, regions: &Regions, enqueue: impl FnOnce(&[Completion]) -> Result<Completion, E>) -> Result<Completion, E> {
        let (mut turn, after) = self.begin(regions);
        fault::point("staging");
        let completion = enqueue(&after)?;
        turn.end = (!completion.is_captured()).then(|| completion.clone());
        Ok(completion)
    }

    /// Waits until no other thread's turn (reservation) includes a byte of these regions, then begins a turn for this thread. Returns the
    /// turn and the completions for which its execution must wait.
    fn begin<'a>(&'a self, regions: &'a Regions) -> (Turn<'a>, After) {
        let mut users = lock(&self.users);
        while users.turns.iter().any(|(_, taken)| regions.iter().any(|region| region.start < taken.end && taken.start < region.end)) {
            users.waiting += 1;
            users = self.over.wait(users).unwrap_or_else(PoisonError::into_inner);
            users.waiting -= 1;
        }
        let number = users.next_turn;
        users.next_turn += 1;
        users.turns.extend(regions.iter().map(|region| (number, *region)));
        let after = match users.whole(regions) {
            Some(last) if last.completion.is_known_done() => After::new(),
            Some(last) => smallvec![last.completion.clone()],
            None => users.unfinished(regions),
        };
        (Turn { staging: self, regions, number, end: None }, after)
    }

    /// Removes finished executions from the table if the table has become large. The backend is queried without holding the lock.
    fn sweep(&self, mut users: MutexGuard<'_, Users>) {
        if users.last.len() <= users.sweep_at {
            return;
        }
        users.sweep_at = usize::MAX;
        let seen: Vec<_> = users.uses.iter().map(|(key, last)| (key, last.completion.clone())).collect();
        drop(users);
        let finished: Vec<_> = seen.into_iter().filter(|(_, completion)| finished(completion)).collect();
        lock(&self.users).forget(&finished);
    }

    /// Returns the size in bytes of the staging memory that is allocated on `device`.
    pub fn bytes(&self, device: DeviceId) -> u64 {
        self.bound * lock(&self.arenas).keys().filter(|(of, _)| *of == device).count() as u64
    }

    /// Frees all arenas. All executions must have finished, and no further one may be submitted.
    pub fn release(&self, backend: &dyn Backend) -> Result<(), BackendError> {
        let mut users = lock(&self.users);
        users.uses.clear();
        users.last.clear();
        drop(users);
        let arenas = std::mem::take(&mut *lock(&self.arenas));
        let mut result = Ok(());
        for arena in arenas.values() {
            result = result.and(backend.free(arena.base));
        }
        result
    }
}

/// Reservation of certain staging bytes, during which a thread enqueues an execution that uses them.
struct Turn<'a> {
    staging: &'a Staging,
    regions: &'a Regions,
    number: u64,
    /// Completion of the execution. `None` until the execution is enqueued.
    end: Option<Completion>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut users = lock(&self.staging.users);
        if let Some(end) = self.end.take() {
            match users.whole(self.regions) {
                Some(last) => last.completion = end,
                None => users.record(self.regions, end),
            }
        }
        users.turns.retain(|(number, _)| *number != self.number);
        if users.waiting > 0 {
            self.staging.over.notify_all();
        }
        self.staging.sweep(users);
    }
}

/// Last execution that used each staging byte, as disjoint ranges by their first byte. A later execution replaces an earlier one in the
/// table, because waiting for the later includes waiting for the earlier. So the table has at most as many ranges as the regions of all
/// plans have boundaries.
#[derive(Debug, Default)]
#[repr(C)]
struct Users {
    uses: SlotMap<DefaultKey, Use>,
    /// End of each range and key of the execution that used it last, by the first byte of the range.
    last: BTreeMap<u64, (u64, DefaultKey)>,
    /// Turns (reservations by submitting threads) in progress. Each entry is the number of a turn and a region that it reserves.
    turns: SmallVec<[(u64, Region); 4]>,
    next_turn: u64,
    /// Number of threads that wait until the turn (reservation) of another thread ends.
    waiting: usize,
    /// Size of the table from which finished executions are removed.
    sweep_at: usize,
}

/// Last execution of a plan. The entry exists as long as this execution is the last user of at least one staging byte.
#[derive(Debug)]
struct Use {
    completion: Completion,
    /// Number of ranges that refer to this execution.
    ranges: usize,
    /// True if no other plan has used a byte of the regions since. The plan's next execution then only has to run after this execution and
    /// replaces it, and no range need be examined. This is the usual case in a time loop.
    is_whole: bool,
}

const SWEEP_AT_LEAST: usize = 64;

impl Users {
    /// Returns the last use of exactly these regions by the same plan, if no byte of them was used by another plan since.
    fn whole(&mut self, regions: &Regions) -> Option<&mut Use> {
        self.uses.get_mut(regions.last_use()).filter(|last| last.is_whole)
    }

    /// Returns the completions of the unfinished executions that used a byte of these regions, each once.
    fn unfinished(&self, regions: &Regions) -> After {
        let mut uses: SmallVec<[DefaultKey; 8]> = SmallVec::new();
        for region in regions.iter() {
            // Ranges are disjoint, so their ends ascend in the same order as their starts.
            let ranges = self.last.range(..region.end).rev().take_while(|(_, (end, _))| *end > region.start);
            uses.extend(ranges.map(|(_, (_, earlier))| *earlier));
        }
        uses.sort_unstable();
        uses.dedup();
        let completions = uses.into_iter().filter_map(|earlier| self.uses.get(earlier)).map(|earlier| &earlier.completion);
        completions.filter(|completion| !completion.is_known_done()).cloned().collect()
    }

    fn record(&mut self, regions: &Regions, completion: Completion) {
        let new = self.uses.insert(Use { completion, ranges: regions.len(), is_whole: true });
        for region in regions.iter() {
            while let Some((&start, &(end, earlier))) =
                self.last.range(..region.end).next_back().filter(|(_, (end, _))| *end > region.start)
            {
                self.last.remove(&start);
                let mut left = 0;
                if start < region.start {
                    self.last.insert(start, (region.start, earlier));
                    left += 1;
                }
                if end > region.end {
                    self.last.insert(region.end, (end, earlier));
                    left += 1;
                }
                self.cut(earlier, left);
            }
            self.last.insert(region.start, (region.end, new));
        }
        regions.last_use.store(new.data().as_ffi(), Ordering::Relaxed);
    }

    /// Removes finished executions. A plan that has been executed again since then keeps its entry.
    fn forget(&mut self, finished: &[(DefaultKey, Completion)]) {
        let is_same = |last: &Use, completion: &Completion| std::ptr::addr_eq(Arc::as_ptr(&last.completion), Arc::as_ptr(completion));
        for (key, completion) in finished {
            if self.uses.get(*key).is_some_and(|last| is_same(last, completion)) {
                self.uses.remove(*key);
            }
        }
        self.last.retain(|_, (_, last)| self.uses.contains_key(*last));
        self.sweep_at = (2 * self.last.len()).max(SWEEP_AT_LEAST);
    }

    /// Records that a later execution has used some bytes of one range of this use. `left` is the number of pieces that remain of the
    /// range.
    fn cut(&mut self, key: DefaultKey, left: usize) {
        let Some(cut) = self.uses.get_mut(key) else { return };
        cut.is_whole = false;
        cut.ranges = cut.ranges - 1 + left;
        if cut.ranges == 0 {
            self.uses.remove(key);
        }
    }
}

/// True if the execution has finished or failed. The caller that waits for a failed execution gets the error.
fn finished(completion: &Completion) -> bool {
    completion.is_done().unwrap_or(true)
}

#[cfg(test)]
#[path = "../../tests/rust/staging/growth.rs"]
mod growth;
#[cfg(all(test, shuttle))]
#[path = "../../tests/rust/staging/interleavings.rs"]
mod interleavings;
