//! Stores the executable graphs of all programs (lists of copy operations), and evicts some of the graphs when there are too many.

use super::driver::lock;
use super::exec::{Exec, Pool};
use super::gpus::Gpus;
use crate::backend::{GraphStatistics, ProgramKey, USUAL_GRAPHS};
use crate::plan::Program;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Executable graphs of all programs (lists of copy operations) of a backend.
pub(super) struct Graphs {
    /// Maximum number of programs (lists of copy operations) whose executable graphs are kept. It may be exceeded, because the graphs of
    /// programs that are being launched are not evicted.
    pub most_programs: AtomicUsize,
    pub launches: AtomicU64,
    pub misses: AtomicU64,
    pub programs: Mutex<HashMap<ProgramKey, Arc<Mutex<Pool>>, ahash::RandomState>>,
    /// Executable graphs that were evicted while in use. They are destroyed once their last launch has finished.
    pub retired: Mutex<Vec<Exec>>,
    pub instantiations: AtomicU64,
    pub repoints: AtomicU64,
    pub waits: AtomicU64,
}

impl Default for Graphs {
    fn default() -> Self {
        Graphs {
            most_programs: AtomicUsize::new(USUAL_GRAPHS),
            launches: AtomicU64::default(),
            misses: AtomicU64::default(),
            programs: Mutex::default(),
            retired: Mutex::default(),
            instantiations: AtomicU64::default(),
            repoints: AtomicU64::default(),
            waits: AtomicU64::default(),
        }
    }
}

impl Graphs {
    /// Returns the pool of executable graphs of a program, and creates it if necessary. If too many programs have pools, evicts the pools
    /// of other programs first.
    pub fn pool(&self, key: ProgramKey, program: &Arc<Program>) -> Arc<Mutex<Pool>> {
        let pool = {
            let mut programs = lock(&self.programs);
            if let Some(pool) = programs.get(&key) {
                return pool.clone();
            }
            while programs.len() >= self.most_programs.load(Ordering::Relaxed) && self.evict(&mut programs) {}
            let pool = Pool {
                is_evicted: false,
                refused: false,
                repoints: 0,
                // The pool is treated as if it had just been launched, so that it is not the next to be evicted.
                launched: self.launches.load(Ordering::Relaxed),
                execs: SmallVec::new(),
                program: program.clone(),
            };
            let pool = Arc::new(Mutex::new(pool));
            programs.insert(key, pool.clone());
            pool
        };
        self.destroy_retired();
        pool
    }

    /// Evicts the executable graphs of one program: the least recently launched program that no thread is launching. Returns false if there
    /// is no such program.
    fn evict(&self, programs: &mut HashMap<ProgramKey, Arc<Mutex<Pool>>, ahash::RandomState>) -> bool {
        let idle = |pool: &Arc<Mutex<Pool>>| Some(pool.try_lock().ok()?.idle()?.launched);
        let oldest = programs.iter().filter_map(|(key, pool)| Some((idle(pool)?, *key))).min();
        let Some((_, key)) = oldest else { return false };
        let Some(found) = programs.get(&key).cloned() else { return false };
        let Ok(mut pool) = found.try_lock() else { return false };
        if pool.idle().is_none() {
            return false;
        }
        pool.is_evicted = true;
        let execs = std::mem::take(&mut pool.execs);
        drop(pool);
        programs.remove(&key);
        lock(&self.retired).extend(execs.into_iter().map(Exec::retired));
        true
    }

    /// Destroys the evicted executable graphs whose last launch has finished.
    pub fn destroy_retired(&self) {
        let finished: Vec<Exec> = lock(&self.retired).extract_if(.., |exec| exec.is_idle()).collect();
        // The graphs are dropped after the lock has been released.
        drop(finished);
    }

    /// Drops the completion objects of all launches, because they keep the backend alive. No launch may follow.
    pub fn forget_launches(&self) {
        let pools: Vec<_> = lock(&self.programs).values().cloned().collect();
        for pool in pools {
            lock(&pool).execs.iter_mut().for_each(Exec::forget_launches);
        }
        lock(&self.retired).iter_mut().for_each(Exec::forget_launches);
    }

    /// Destroys all executable graphs. All their launches must have finished.
    pub fn release(&self, gpus: &Gpus) {
        if gpus.has_lost() {
            // After a reset of the device, the driver has no objects left to destroy.
            for (_, pool) in lock(&self.programs).drain() {
                std::mem::take(&mut lock(&pool).execs).into_iter().for_each(Exec::leave);
            }
            std::mem::take(&mut *lock(&self.retired)).into_iter().for_each(Exec::leave);
            return;
        }
        let Ok(primary) = gpus.primary(gpus.any_used()) else { return };
        let _current = primary.enter();
        for (_, pool) in lock(&self.programs).drain() {
            lock(&pool).execs.clear();
        }
        lock(&self.retired).clear();
    }

    pub fn statistics(&self) -> GraphStatistics {
        let graphs = self;
        let pools: Vec<_> = lock(&graphs.programs).values().cloned().collect();
        let execs = pools.iter().map(|pool| lock(pool).execs.len()).sum::<usize>() + lock(&graphs.retired).len();
        let (launches, misses) = (graphs.launches.load(Ordering::Relaxed), graphs.misses.load(Ordering::Relaxed));
        GraphStatistics {
            programs: pools.len() as u64,
            execs: execs as u64,
            launches,
            hits: launches.saturating_sub(misses),
            misses,
            instantiations: graphs.instantiations.load(Ordering::Relaxed),
            repoints: graphs.repoints.load(Ordering::Relaxed),
            waits: graphs.waits.load(Ordering::Relaxed),
        }
    }
}

impl fmt::Debug for Graphs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graphs")
    }
}
