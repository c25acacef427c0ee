//! The same request again is a look-up.
//!
//! Two levels, both bounded by plans and by the transfers of all together; the least recently used go. By request: addresses, devices, sizes, kinds
//! of memory, the identity of the allocations, options; a hit is the very plan. By shape, which leaves addresses out and has for each transfer, in
//! their order, devices, kinds of memory, size, and which others have its source: a hit is the planner's result and what was measured of it, and only
//! its addresses are checked and bound anew. Whole keys are compared, never hashes alone. Nothing is planned while the lock is held.

use super::batch::Batch;
use super::choosing::SharedChoice;
use super::execute::Plan;
use crate::plan::{self, Options, Shape};
use crate::sync::{Mutex, lock};
use lru::LruCache;
use smallvec::SmallVec;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Everything that decides what a plan does.
#[derive(Clone, Debug, Eq)]
pub struct Request {
    /// What to move.
    pub batch: Batch,
    /// How.
    pub options: Options,
    /// Whether executions choose among variants.
    pub adapt: bool,
}

/// Everything that decides what the planner returns.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShapeRequest {
    /// What to move.
    pub batch: SmallVec<[Shape; 4]>,
    /// How.
    pub options: Options,
}

/// Few programs ask for one batch with many options, so those are only compared.
impl Hash for Request {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.batch.hash(state);
    }
}

/// What goes is looked for by its own key, which may be long.
impl PartialEq for Request {
    fn eq(&self, other: &Request) -> bool {
        std::ptr::eq(self, other) || (self.adapt, self.options) == (other.adapt, other.options) && self.batch == other.batch
    }
}

/// What the cache has done so far.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Requests answered by a look-up.
    pub hits: u64,
    /// Requests that were not.
    pub misses: u64,
    /// Of the misses, those whose shape had been planned before.
    pub shape_hits: u64,
    /// Plans dropped to stay within the bound.
    pub evictions: u64,
    /// Plans held now.
    pub entries: u64,
}

/// Transfers of all entries together: of long lists, which a program with a paged cache sends another of each time, ten are kept and not hundreds. A
/// transfer takes some 90 bytes.
const MOST_TRANSFERS: usize = 1 << 20;

/// Entries of which the least recently used go.
#[derive(Debug)]
struct Lru<K: Key, V> {
    entries: LruCache<K, Arc<V>, ahash::RandomState>,
    transfers: usize,
}

trait Key: Hash + Eq {
    fn transfers(&self) -> usize;
}

impl Key for Request {
    fn transfers(&self) -> usize {
        self.batch.len()
    }
}

impl Key for ShapeRequest {
    fn transfers(&self) -> usize {
        self.batch.len()
    }
}

/// A bounded store of plans.
#[derive(Debug)]
pub struct Cache {
    bound: usize,
    state: Mutex<CacheState>,
}

#[derive(Debug)]
struct CacheState {
    plans: Lru<Request, Plan>,
    shapes: Lru<ShapeRequest, plan::Plan>,
    choices: Lru<ShapeRequest, SharedChoice>,
    statistics: CacheStatistics,
}

impl Cache {
    /// A cache of at most `bound` plans, and as many shapes. 0 keeps nothing.
    pub fn new(bound: usize) -> Self {
        let state = CacheState { plans: Lru::new(), shapes: Lru::new(), choices: Lru::new(), statistics: CacheStatistics::default() };
        Cache { bound, state: Mutex::new(state) }
    }

    /// The plan of this request, if it is here.
    pub fn get(&self, request: &Request) -> Option<Arc<Plan>> {
        let mut state = lock(&self.state);
        let plan = state.plans.entries.get(request).cloned();
        if plan.is_some() {
            state.statistics.hits += 1;
        } else {
            state.statistics.misses += 1;
        }
        plan
    }

    /// The planner's result for this shape, if it is here. Counted where it was requested, and is not a variant of what was.
    pub fn get_shape(&self, shape: &ShapeRequest, is_requested: bool) -> Option<Arc<plan::Plan>> {
        let mut state = lock(&self.state);
        let planned = state.shapes.entries.get(shape).cloned();
        state.statistics.shape_hits += u64::from(is_requested && planned.is_some());
        planned
    }

    /// Keeps a plan, and returns the one to use: where another thread has planned the same request meanwhile, that thread's.
    pub fn insert(&self, request: Request, plan: Arc<Plan>) -> Arc<Plan> {
        // Declared before the guard, so that what is dropped is dropped after the lock is released.
        let evicted;
        let mut state = lock(&self.state);
        let kept = state.plans.keep(self.bound, request, plan);
        evicted = kept.evicted;
        state.statistics.evictions += evicted.len() as u64;
        drop(state);
        drop(evicted);
        kept.value
    }

    /// Keeps what the planner returned; as [`insert`](Cache::insert).
    pub fn insert_shape(&self, shape: ShapeRequest, planned: Arc<plan::Plan>) -> Arc<plan::Plan> {
        let evicted;
        let mut state = lock(&self.state);
        let kept = state.shapes.keep(self.bound, shape, planned);
        evicted = kept.evicted;
        drop(state);
        drop(evicted);
        kept.value
    }

    /// What plans of this shape choose by, if any has been made.
    pub(super) fn get_choice(&self, shape: &ShapeRequest) -> Option<Arc<SharedChoice>> {
        lock(&self.state).choices.entries.get(shape).cloned()
    }

    /// Keeps what plans of this shape choose by; as [`insert`](Cache::insert).
    pub(super) fn insert_choice(&self, shape: ShapeRequest, choice: SharedChoice) -> Arc<SharedChoice> {
        let evicted;
        let mut state = lock(&self.state);
        let kept = state.choices.keep(self.bound, shape, Arc::new(choice));
        evicted = kept.evicted;
        drop(state);
        drop(evicted);
        kept.value
    }

    /// What plans choose by, of each shape that has been planned.
    pub(super) fn choices(&self) -> Vec<(ShapeRequest, Arc<SharedChoice>)> {
        lock(&self.state).choices.entries.iter().map(|(shape, choice)| (shape.clone(), choice.clone())).collect()
    }

    /// What the cache has done so far.
    pub fn statistics(&self) -> CacheStatistics {
        let state = lock(&self.state);
        CacheStatistics { entries: state.plans.entries.len() as u64, ..state.statistics }
    }

    /// Drops everything. The counters stay.
    pub fn clear(&self) {
        let mut state = lock(&self.state);
        let plans = std::mem::replace(&mut state.plans, Lru::new());
        let shapes = std::mem::replace(&mut state.shapes, Lru::new());
        let choices = std::mem::replace(&mut state.choices, Lru::new());
        drop(state);
        drop((plans, shapes, choices));
    }
}

struct Insertion<K, V> {
    value: Arc<V>,
    evicted: SmallVec<[(K, Arc<V>); 1]>,
}

impl<K: Key, V> Lru<K, V> {
    fn new() -> Self {
        // Not LruCache::new(bound): that takes the memory for `bound` entries at once.
        Lru { entries: LruCache::unbounded_with_hasher(ahash::RandomState::new()), transfers: 0 }
    }

    /// Keeps the newest entry whatever its transfers.
    fn keep(&mut self, bound: usize, key: K, value: Arc<V>) -> Insertion<K, V> {
        let mut evicted = SmallVec::new();
        if bound == 0 {
            return Insertion { value, evicted };
        }
        // Counted before the key is given away.
        let transfers = key.transfers();
        // One look-up: the key may be long.
        if let Some(earlier) = self.entries.put(key, value.clone()) {
            self.entries.iter_mut().take(1).for_each(|(_, newest)| *newest = earlier.clone());
            return Insertion { value: earlier, evicted };
        }
        self.transfers += transfers;
        while self.entries.len() > bound || (self.transfers > MOST_TRANSFERS && self.entries.len() > 1) {
            let Some((key, value)) = self.entries.pop_lru() else { break };
            self.transfers -= key.transfers();
            evicted.push((key, value));
        }
        Insertion { value, evicted }
    }
}
