//! Bounded cache of plans, in which a repeated request is found instead of planned again.
//!
//! The cache has two levels. On each level, the number of entries and the total number of transfers in all entries are bounded. The least
//! recently used entries are evicted.
//!
//! - The first level is keyed by the whole request: addresses, devices, sizes, memory kinds, allocation numbers and options. A hit returns
//!   the same plan.
//! - The second level is keyed by the request without addresses: for each transfer in order its devices, memory kinds and size, and the
//!   other transfers that read the same source. A hit returns the planner's result with its measured times. Only the new addresses are then
//!   checked and bound.
//!
//! Complete keys are compared, never hashes alone. No lock is held while planning.

use super::batch::Batch;
use super::choosing::SharedChoice;
use super::execute::Plan;
use crate::plan::{self, Engine, Options, Shape};
use crate::sync::{Mutex, lock};
use lru::LruCache;
use smallvec::SmallVec;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// All values on which a plan depends. Key of the first level of the plan cache.
#[derive(Clone, Debug, Eq)]
pub struct Request {
    /// Transfers of the request, with their allocations.
    pub batch: Batch,
    /// Options with which the planner is called.
    pub options: Options,
    /// True if executions of the plan choose, by measured times, among variants of the plan (plans for the same transfers over other
    /// paths).
    pub adapt: bool,
}

/// All values on which the planner's result depends. Key of the cache's second level.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ShapeRequest {
    /// Devices, memory kinds and size of each transfer, without addresses.
    pub batch: SmallVec<[Shape; 4]>,
    /// Options with which the planner is called for these transfers.
    pub options: Options,
}

impl ShapeRequest {
    /// Returns the same request with size 0, and without the options that depend on the size if a tuning file is active. Equal for all
    /// transfers between the same devices in the same direction. `None` if the request has several transfers, whose sizes may differ.
    pub fn of_any_size(&self) -> Option<ShapeRequest> {
        let &[shape] = self.batch.as_slice() else { return None };
        let free = Options { engine: Engine::Auto, chunk_bytes: None, relay_chunks: None, host_chunks: None, tuned: None, ..self.options };
        Some(ShapeRequest { batch: SmallVec::from_slice(&[Shape { bytes: 0, ..shape }]), options: free })
    }

    /// Returns the request for the opposite direction: source and destination are exchanged.
    pub fn reversed(&self) -> ShapeRequest {
        let mut reversed = self.clone();
        for shape in &mut reversed.batch {
            (shape.dst_device, shape.src_device) = (shape.src_device, shape.dst_device);
            (shape.dst_kind, shape.src_kind) = (shape.src_kind, shape.dst_kind);
        }
        reversed
    }
}

/// Hashes the request without its options, because few programs plan one batch with many options. Equality also compares the options.
impl Hash for Request {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.batch.hash(state);
    }
}

/// Compares the addresses of the two requests before their contents, because eviction looks up an entry by the entry's own key, which may
/// be long.
impl PartialEq for Request {
    fn eq(&self, other: &Request) -> bool {
        std::ptr::eq(self, other) || (self.adapt, self.options) == (other.adapt, other.options) && self.batch == other.batch
    }
}

/// Counters of the plan cache.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Number of requests that were found in the cache.
    pub hits: u64,
    /// Number of requests that were not found in the cache.
    pub misses: u64,
    /// Number of requests that were not found in the cache, but for which the planner's result was cached, because transfers of the same
    /// sizes between the same devices had been planned before at other addresses.
    pub shape_hits: u64,
    /// Number of plans that were evicted to stay within the bounds of the cache.
    pub evictions: u64,
    /// Number of plans in the cache now.
    pub entries: u64,
}

/// Maximum total number of transfers in all entries of one level of the cache. A program with a paged cache requests a different long list
/// of transfers each time. With this limit, about ten such lists are cached instead of hundreds. Each transfer takes about 90 bytes.
const MOST_TRANSFERS: usize = 1 << 20;

/// Map that evicts its least recently used entries.
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

/// Bounded cache of plans and of planner results.
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
    /// Creates a cache of at most `bound` plans and `bound` planner results. If `bound` is 0, the cache stores nothing.
    pub fn new(bound: usize) -> Self {
        let state = CacheState { plans: Lru::new(), shapes: Lru::new(), choices: Lru::new(), statistics: CacheStatistics::default() };
        Cache { bound, state: Mutex::new(state) }
    }

    /// Returns the cached plan of this request, or `None`.
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

    /// Returns the cached planner's result for transfers with these devices and sizes (`shape`), or `None`. A hit is counted in the
    /// statistics only if `is_requested` is true, that is, if the caller requested these transfers, and not the library in order to plan a
    /// variant.
    pub fn get_shape(&self, shape: &ShapeRequest, is_requested: bool) -> Option<Arc<plan::Plan>> {
        let mut state = lock(&self.state);
        let planned = state.shapes.entries.get(shape).cloned();
        state.statistics.shape_hits += u64::from(is_requested && planned.is_some());
        planned
    }

    /// Adds a plan to the cache and returns the plan that the caller must use. If another thread has added a plan of the same request
    /// meanwhile, that plan is returned instead of `plan`.
    pub fn insert(&self, request: Request, plan: Arc<Plan>) -> Arc<Plan> {
        // The list of evicted plans is declared before the lock's guard, so that the plans are dropped after the lock is released.
        let evicted;
        let mut state = lock(&self.state);
        let kept = state.plans.keep(self.bound, request, plan);
        evicted = kept.evicted;
        state.statistics.evictions += evicted.len() as u64;
        drop(state);
        drop(evicted);
        kept.value
    }

    /// Adds a planner's result to the cache and returns the result that the caller must use. If another thread has added a result for the
    /// same key meanwhile, that result is returned instead of `planned`.
    pub fn insert_shape(&self, shape: ShapeRequest, planned: Arc<plan::Plan>) -> Arc<plan::Plan> {
        let evicted;
        let mut state = lock(&self.state);
        let kept = state.shapes.keep(self.bound, shape, planned);
        evicted = kept.evicted;
        drop(state);
        drop(evicted);
        kept.value
    }

    /// Returns the measurements by which executions choose among the variants of a plan, for transfers with these devices and sizes
    /// (`shape`). All plans of such transfers share these measurements. Returns `None` if there are none yet.
    pub(super) fn get_choice(&self, shape: &ShapeRequest) -> Option<Arc<SharedChoice>> {
        lock(&self.state).choices.entries.get(shape).cloned()
    }

    /// Adds the measurements by which executions choose among the variants of a plan, for transfers with these devices and sizes (`shape`).
    /// All plans of such transfers share them. Returns the measurements that the caller must use: those of another thread if they were
    /// added earlier, otherwise `choice`.
    pub(super) fn insert_choice(&self, shape: ShapeRequest, choice: SharedChoice) -> Arc<SharedChoice> {
        let evicted;
        let mut state = lock(&self.state);
        let kept = state.choices.keep(self.bound, shape, Arc::new(choice));
        evicted = kept.evicted;
        drop(state);
        drop(evicted);
        kept.value
    }

    /// Returns the measurements by which executions choose among the variants of a plan, for each list of transfers (devices and sizes,
    /// without addresses).
    pub(super) fn choices(&self) -> Vec<(ShapeRequest, Arc<SharedChoice>)> {
        lock(&self.state).choices.entries.iter().map(|(shape, choice)| (shape.clone(), choice.clone())).collect()
    }

    /// Returns the counters of the cache.
    pub fn statistics(&self) -> CacheStatistics {
        let state = lock(&self.state);
        CacheStatistics { entries: state.plans.entries.len() as u64, ..state.statistics }
    }

    /// Removes all entries. Does not reset the counters.
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
        // `LruCache::new(bound)` would allocate the memory for `bound` entries immediately.
        Lru { entries: LruCache::unbounded_with_hasher(ahash::RandomState::new()), transfers: 0 }
    }

    /// Inserts an entry and evicts other entries until the limits are met. Never evicts the newest entry, however many transfers it has.
    fn keep(&mut self, bound: usize, key: K, value: Arc<V>) -> Insertion<K, V> {
        let mut evicted = SmallVec::new();
        if bound == 0 {
            return Insertion { value, evicted };
        }
        // Count the transfers now, because the key is moved below.
        let transfers = key.transfers();
        // `put` inserts and finds an earlier entry by a single look-up, which matters because the key may be long.
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
