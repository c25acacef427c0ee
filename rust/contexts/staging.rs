//! Manages staging memory: allocates one arena per device, assigns regions of the arenas to plans, and orders executions that share staging
//! bytes.
//!
//! An arena is allocated with its full size when the first plan that stages data on its device is made, so that executions never allocate
//! memory. A device on which no plan stages data needs no arena. Regions are assigned one after the other. At the end of the arena,
//! assignment starts again at the beginning. Regions of different plans may therefore overlap. Executions whose regions overlap run one
//! after the other, whatever threads and streams they come from. So an overlap reduces concurrency but never corrupts data.
//!
//! The backend itself may reserve rings (ring buffers in staging memory) for one execution at a time ([`Backend::ordered_rings`]). Such
//! rings are called granted. Their executions run in the order in which streams reach them, and this module does not order them. The host
//! backend does this for all rings. The CUDA backend does this for the rings of copy threads, which fill the whole arena in almost every
//! plan of pageable memory. Granted rings have separate arenas.
//!
//! Executions that use other rings, which are those of relay GPUs on CUDA, run in the order of submission ([`Staging::in_turn`]). An
//! execution then also waits for all work before the earlier execution in the earlier execution's stream. Only executions with overlapping
//! regions are affected.
//!
//! Submission may take long, because a driver call blocks while the queue of its stream is full. The stream may be waiting for a signal
//! that another thread sends only after it has submitted an execution. So no lock is held during submission. Instead, the submitting thread
//! reserves the bytes of its regions; this reservation is called a turn. Only threads that need some of these bytes wait until the turn
//! ends. Their executions must run after this one in any case.

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

/// Alignment in bytes of the address of each ring, so that copies run at full speed. If aligned rings do not fit into the arena, rings are
/// placed without alignment.
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

/// Regions (disjoint ranges) of staging memory that one plan uses, one for each device on which it stages data.
#[derive(Debug)]
#[repr(C)]
pub struct Regions {
    /// Key of the [`Use`] that records the plan's last execution. That record may have been removed from the table. The key is accessed
    /// only while the table is locked.
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

/// Returns the devices of the rings, sorted and each once. Region number i of a plan is on device number i of this list.
fn devices(rings: &[Ring]) -> SmallVec<[DeviceId; 8]> {
    let mut devices: SmallVec<[DeviceId; 8]> = rings.iter().map(|ring| ring.device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices
}

/// Completions of the earlier executions for which an execution must wait.
pub type After = SmallVec<[Completion; 4]>;

/// Staging memory of a context, with the executions that use it.
#[derive(Debug)]
#[repr(C)] // Fields that every execution reads come first.
pub struct Staging {
    users: Mutex<Users>,
    /// Condition variable that is notified when a turn (reservation of staging bytes by a submitting thread) ends.
    over: Condvar,
    bound: u64,
    /// Arenas by device and by the order in which executions use their rings.
    arenas: Mutex<BTreeMap<(DeviceId, RingUse), Arena>>,
}

/// Rule for the order of executions that use the same staging ring.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RingUse {
    /// Executions run in the order in which the caller submits them.
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
    /// Creates staging memory, with an arena of `bound` bytes for each device that needs one. Allocates nothing yet.
    pub fn new(bound: u64) -> Self {
        Staging { bound, arenas: Mutex::new(BTreeMap::new()), users: Mutex::new(Users::default()), over: Condvar::new() }
    }

    /// Assigns memory to the rings of a plan. Returns the base address of each ring, and the regions that the rings occupy. If `within`
    /// holds the rings and regions of another plan, the new regions lie inside those regions on each device where they fit.
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
            // A plan may need the whole arena. There is then no room for alignment gaps between its rings.
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
                let base = took(format_args!("{}: allocated {} bytes of staging memory", device.in_words(), self.bound), allocate)?;
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

    /// Enqueues an execution that uses `regions`, after earlier executions that use some of the same bytes. Calls `enqueue` with the
    /// completions of those executions; `enqueue` must return the completion of the new execution.
    ///
    /// While `enqueue` runs, no other execution that shares staging bytes with this one is enqueued. So the recorded order of executions is
    /// the order in which the backend receives them. If `enqueue` fails, nothing is recorded. A captured execution is not recorded either,
    /// because it has separate staging memory.
    pub fn in_turn<E>(&self, regions: &Regions, enqueue: impl FnOnce(&[Completion]) -> Result<Completion, E>) -> Result<Completion, E> {
        let (mut turn, after) = self.begin(regions);
        fault::point("staging");
        let completion = enqueue(&after)?;
        turn.end = (!completion.is_captured()).then(|| completion.clone());
        Ok(completion)
    }

    /// Waits until no other thread has reserved a byte of these regions, then reserves them for this thread. Returns the reservation and
    /// the completions for which the execution must wait.
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

    /// Removes finished executions from the table if the table has become large. Queries the backend without holding the lock.
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

    /// Returns the size in bytes of the arenas that are allocated on `device`.
    pub fn bytes(&self, device: DeviceId) -> u64 {
        self.bound * lock(&self.arenas).keys().filter(|(of, _)| *of == device).count() as u64
    }

    /// Frees all arenas. All executions must have finished, and none may be submitted any more.
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

/// Reservation of the staging bytes in `regions`, which lasts while a thread enqueues an execution that uses them.
struct Turn<'a> {
    staging: &'a Staging,
    regions: &'a Regions,
    number: u64,
    /// Completion of the enqueued execution. `None` while the execution is not enqueued, and if it was captured.
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

/// Table of the last execution that used each staging byte, stored as disjoint ranges. A later execution replaces an earlier one in the
/// table, because it runs after the earlier one. So the table has at most as many ranges as the regions of all plans have boundaries.
#[derive(Debug, Default)]
#[repr(C)]
struct Users {
    uses: SlotMap<DefaultKey, Use>,
    /// Disjoint ranges of staging memory by first address. Each value is the end of the range, and the key of the execution that used the
    /// range last.
    last: BTreeMap<u64, (u64, DefaultKey)>,
    /// Reservations (turns) that are in progress. Each entry is the number of a reservation and one region that it covers.
    turns: SmallVec<[(u64, Region); 4]>,
    next_turn: u64,
    /// Number of threads that wait until another thread's reservation (turn) ends.
    waiting: usize,
    /// Number of ranges in the table above which finished executions are removed from the table.
    sweep_at: usize,
}

/// Record of the last execution of a plan. It exists as long as this execution is the last user of at least one staging byte.
#[derive(Debug)]
struct Use {
    completion: Completion,
    /// Number of ranges in the table that refer to this execution.
    ranges: usize,
    /// True if no other plan has used a byte of the plan's regions since this execution. The plan's next execution then only has to wait
    /// for this one and takes its place, without a search in the table. This is the usual case in a time loop.
    is_whole: bool,
}

const SWEEP_AT_LEAST: usize = 64;

impl Users {
    /// Returns the record of the plan's last execution if no other plan has used a byte of the plan's regions since that execution. If
    /// another plan has, returns `None`.
    fn whole(&mut self, regions: &Regions) -> Option<&mut Use> {
        self.uses.get_mut(regions.last_use()).filter(|last| last.is_whole)
    }

    /// Returns the completions of all unfinished executions that used a byte of these regions, each once.
    fn unfinished(&self, regions: &Regions) -> After {
        let mut uses: SmallVec<[DefaultKey; 8]> = SmallVec::new();
        for region in regions.iter() {
            // Ranges are disjoint, so their ends are in the same order as their starts.
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

    /// Removes the given finished executions from the table. If a plan has been executed again meanwhile, the record of the new execution
    /// is kept.
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

    /// Updates the record of an execution after a later execution has taken over some bytes of one of its ranges. `left` is the number of
    /// ranges that remain of this range. Removes the record if it has no more ranges.
    fn cut(&mut self, key: DefaultKey, left: usize) {
        let Some(cut) = self.uses.get_mut(key) else { return };
        cut.is_whole = false;
        cut.ranges = cut.ranges - 1 + left;
        if cut.ranges == 0 {
            self.uses.remove(key);
        }
    }
}

/// True if the execution has finished or failed. A failure is reported where the caller waits for the execution.
fn finished(completion: &Completion) -> bool {
    completion.is_done().unwrap_or(true)
}

#[cfg(test)]
#[path = "../../tests/rust/staging/growth.rs"]
mod growth;
#[cfg(all(test, shuttle))]
#[path = "../../tests/rust/staging/interleavings.rs"]
mod interleavings;
