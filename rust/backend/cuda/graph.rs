//! The graph executor: a program as one graph launch.
//!
//! The graph is built node by node from the program, not captured: one memcpy node for each copy and one kernel node for each fused
//! kernel, ordered as the program's lanes and `Op::after` are. An executable graph ("exec") is bound to addresses. The same program at
//! other addresses re-points the nodes of an exec that is idle, which costs about a microsecond a node where instantiating costs tens
//! (docs/hardware readings, graphs).
//!
//! The driver orders each launch of an exec behind its earlier ones (`cuGraphLaunch`), so using one exec from two streams is right but
//! runs them one after the other. So a program has several execs, as many as are at work at once, up to a bound.
//!
//! Re-pointing does not help where memory was freed and what was allocated next has its address: an exec that is given the address that it
//! has already stays as it is, and makes its copies slowly from then on (two H200, driver 580.159.04: 64 MiB by two paths 182 us in place of 169,
//! 1 GiB 2577 in place of 2422, while plain copies of the same buffers take what they took). Such a program gets a new exec.
//!
//! An exec is destroyed only when its last launch has finished.
//!
//! A launch blocks while the queue of its stream is full, so no lock is held meanwhile. The exec is marked: nobody else launches, changes or
//! evicts it. A program that is launched from so many threads at once that none is left for one more runs on streams there.

use super::Core;
use super::choice::{Choice, MOST_EXECS, Seen, choose};
use super::completion::Finished;
use super::device::{Caller, handle, lock};
use super::driver::{CUgraph, CUgraphExec, CUgraphNode, CUstream, Driver, OutsideCapture, call, code};
use super::execute::Start;
use super::nodes::{Site, made_for, most_at_once, predecessors, works};
use crate::backend::{BackendError, CompletionState, Endpoints, Execution};
use crate::plan::{Lane, Mechanism, Place, Program};
use crate::topology::DeviceId;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Programs whose execs are kept. Those in the very act of launching are not counted out.
const MOST_PROGRAMS: usize = 128;

/// What the graph executor has done so far.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct GraphStatistics {
    /// Programs with execs at present.
    pub programs: u64,
    /// Execs at present, those included that are no longer of use and wait for their last launch to finish.
    pub execs: u64,
    /// Graph launches.
    pub launches: u64,
    /// Launches of an exec that had the addresses already.
    pub hits: u64,
    /// Launches that had to instantiate or re-point.
    pub misses: u64,
    /// Execs instantiated.
    pub instantiations: u64,
    /// Execs re-pointed to other addresses.
    pub repoints: u64,
    /// Launches that had to come after another one, because all execs of the program were at work.
    pub waits: u64,
}

/// A program, by its address, which the pool keeps from being used for another; and the GPU of the caller's stream where the program
/// leaves open which GPU works on a lane: a node cannot be moved to another GPU once it is instantiated.
type Key = (usize, Option<usize>);

/// What a plan keeps at hand, so that an execution finds it without a look at what belongs to others.
#[derive(Default)]
pub struct Kept {
    /// The execs of its program. They may be evicted all the same: then the next launch looks for new ones.
    pool: OnceLock<(Key, Arc<Mutex<Pool>>)>,
    /// The GPUs of streams that reach all memory of the plan by themselves: one bit for each that is known to.
    reaching: AtomicU64,
    /// Which allocation each end of a transfer lies in, destination and source by turns, 0 for one that is not known. Empty where nobody has said.
    memory: Arc<[u64]>,
    /// One end in each allocation that somebody else may free, and the allocation. Found out by the first execution that has to look at them.
    watched: OnceLock<Box<[(u64, u64)]>>,
}

impl Kept {
    /// For a plan whose transfers' destinations and sources, by turns, lie in these allocations.
    pub fn of(memory: impl Iterator<Item = Option<NonZeroU64>>) -> Kept {
        Kept { memory: memory.map(|id| id.map_or(0, NonZeroU64::get)).collect(), ..Kept::default() }
    }

    /// Whether the driver knows the memory that a place lies in, as far as that was said.
    pub(super) fn knows(&self, place: Place) -> bool {
        let end = match place {
            Place::Slot { .. } => return true,
            Place::Destination { transfer, .. } => 2 * transfer as usize,
            Place::Source { transfer, .. } => 2 * transfer as usize + 1,
        };
        self.memory.get(end).is_some_and(|id| *id != 0)
    }

    /// The ends to be looked at before an execution that the driver does not check, each with its allocation.
    pub(super) fn watched(&self, find: impl FnOnce(&[u64]) -> Box<[(u64, u64)]>) -> &[(u64, u64)] {
        self.watched.get_or_init(|| find(&self.memory))
    }

    /// Whether a GPU is known to reach all memory of the plan.
    pub(super) fn is_reached(&self, gpu: usize) -> bool {
        self.reaching.load(Ordering::Relaxed) & (1 << gpu) != 0
    }

    /// A GPU was found to.
    pub(super) fn note_reached(&self, gpu: usize) {
        self.reaching.fetch_or(1 << gpu, Ordering::Relaxed);
    }

    /// The execs for a launch in a stream of GPU `home`, if these are they.
    fn find(&self, program: &Arc<Program>, home: usize) -> Option<&Mutex<Pool>> {
        let ((address, for_home), pool) = self.pool.get()?;
        (*address == Arc::as_ptr(program).addr() && for_home.is_none_or(|gpu| gpu == home)).then_some(pool)
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kept")
    }
}

/// The execs of all programs.
#[derive(Default)]
pub(super) struct Graphs {
    launches: AtomicU64,
    misses: AtomicU64,
    programs: Mutex<HashMap<Key, Arc<Mutex<Pool>>, ahash::RandomState>>,
    /// Evicted while they were at work.
    retired: Mutex<Vec<Exec>>,
    instantiations: AtomicU64,
    repoints: AtomicU64,
    waits: AtomicU64,
}

/// The execs of one program. Locked while one of them is chosen and changed, not while it is launched. What a launch in a time loop reads
/// comes first, in two or three cache lines, because the launch before has left nothing of it in the nearest cache.
#[repr(C)]
struct Pool {
    /// It is no longer found by others, and has no execs.
    is_evicted: bool,
    /// The driver would not build it, which was logged: the program runs on streams.
    refused: bool,
    /// Re-pointings since the last instantiation.
    repoints: u32,
    /// The number of its last launch, of those of all programs.
    launched: u64,
    execs: SmallVec<[Exec; 2]>,
    program: Arc<Program>,
}

impl Pool {
    /// Itself, unless somebody is launching one of its execs.
    fn idle(&self) -> Option<&Pool> {
        (!self.execs.iter().any(|exec| exec.is_launching)).then_some(self)
    }
}

/// An executable graph, and what it is bound to.
#[repr(C)]
struct Exec {
    endpoints: Arc<[Endpoints]>,
    rings: Arc<[u64]>,
    /// The allocations of the ends: [`Kept::memory`].
    memory: Arc<[u64]>,
    /// A `CUgraphExec`; 0 until it is instantiated.
    exec: usize,
    /// Somebody is launching it, without the lock.
    is_launching: bool,
    last: Option<Launch>,
    /// The end of an earlier launch, which serves for the next one when nobody else has it any more: with the two of them a time loop
    /// allocates nothing, and asks nobody for an event.
    spare: Option<Arc<Finished>>,
    driver: &'static Driver,
    /// A `CUgraph`, whose nodes name those of the exec.
    graph: usize,
    /// A `CUgraphNode` for each [`Work`], in the order of the program.
    nodes: Vec<usize>,
    /// The GPU of each lane, and whether kernels do its fused operations, and not copies.
    made_for: SmallVec<[(usize, bool); 8]>,
}

/// What is about to be launched. The exec is nobody else's until [`Core::launch`] is done with it.
struct Ready {
    /// The `CUgraphExec`.
    exec: usize,
    /// The end of the launch, yet to be recorded.
    end: Arc<Finished>,
    /// The launch of the same exec that it comes after, where all are at work.
    after: Option<Arc<Finished>>,
    had_addresses: bool,
}

/// The last launch of an exec.
struct Launch {
    /// Shared with whoever asks for the end of the launch.
    end: Arc<Finished>,
    stream: Caller,
    /// Its number, of those of all programs.
    number: u64,
}

impl Core {
    /// Launches the program as a graph in the caller's stream, whose GPU's context is current, and returns its end. `None`, and nothing
    /// enqueued, where it is none for a graph. When it fails, what was enqueued has finished.
    pub fn launch_graph(
        self: &Arc<Core>,
        execution: &Execution<'_>,
        start: &Start,
        kept: &Kept,
    ) -> Result<Option<Arc<Finished>>, BackendError> {
        let _outside = OutsideCapture::enter(self.driver);
        match kept.find(execution.program, start.home) {
            Some(found) => match self.launch_of(found, execution, start, kept)? {
                Some(end) => Ok(end),
                None => self.launch_found(execution, start, kept),
            },
            None => self.launch_found(execution, start, kept),
        }
    }

    /// The same for a program whose execs are not at hand.
    #[cold]
    fn launch_found(
        self: &Arc<Core>,
        execution: &Execution<'_>,
        start: &Start,
        kept: &Kept,
    ) -> Result<Option<Arc<Finished>>, BackendError> {
        let program = execution.program;
        let has_kernel_nodes = self.driver.cuGraphAddKernelNode.is_some() && self.driver.cuGraphExecKernelNodeSetParams.is_some();
        if self.driver.cuGraphInstantiateWithFlags.is_none()
            || !is_for_a_graph(program)
            || !has_kernel_nodes && program.ops.iter().any(|op| op.mechanism == Mechanism::Kernel)
        {
            return Ok(None);
        }
        let key = (Arc::as_ptr(program).addr(), program.lanes.iter().any(|lane| lane.also.is_some()).then_some(start.home));
        loop {
            let found = self.pool(key, program);
            // Another thread may have needed its place since.
            if let Some(end) = self.launch_of(&found, execution, start, kept)? {
                // Those that were kept first stay: a plan for several homes keeps those of one.
                let _ = kept.pool.set((key, found));
                return Ok(end);
            }
        }
    }

    /// Launches one of these execs, as [`Core::launch_graph`] does. `None`, and nothing enqueued, where they have been evicted.
    #[inline(always)]
    fn launch_of(
        self: &Arc<Core>,
        found: &Mutex<Pool>,
        execution: &Execution<'_>,
        start: &Start,
        kept: &Kept,
    ) -> Result<Option<Option<Arc<Finished>>>, BackendError> {
        self.check_freed(execution, kept)?;
        let mut pool = lock(found);
        if pool.is_evicted {
            return Ok(None);
        }
        let caller = Caller::new(execution.stream.0, start.home);
        // As `choose` would, with less to look at.
        let at_hand = |exec: &&mut Exec| exec.is_bound_to(execution) && exec.was_last_in(caller) && !exec.is_launching;
        let ready = match pool.execs.iter_mut().find(at_hand) {
            Some(exec) => Some(self.ready(exec, start)?),
            None => self.choose_exec(&mut pool, execution, caller, start, kept)?,
        };
        drop(pool);
        let Some(ready) = ready else { return Ok(Some(None)) };
        self.launch(found, &ready, execution.stream.0, caller)?;
        Ok(Some(Some(ready.end)))
    }

    /// Marks an exec as being launched.
    #[inline(always)]
    fn ready(self: &Arc<Core>, exec: &mut Exec, start: &Start) -> Result<Ready, BackendError> {
        let end = match exec.spare.take().and_then(|spare| spare.renewed(start)) {
            Some(end) => end,
            None => Arc::new(Finished::new(self.clone(), self.primary(start.home)?.mark()?, start, None)),
        };
        exec.is_launching = true;
        Ok(Ready { exec: exec.exec, end, after: None, had_addresses: true })
    }

    /// Chooses an exec that nobody is launching and makes it ready. `None` where the program is to run on streams.
    #[cold]
    fn choose_exec(
        self: &Arc<Core>,
        pool: &mut Pool,
        execution: &Execution<'_>,
        caller: Caller,
        start: &Start,
        kept: &Kept,
    ) -> Result<Option<Ready>, BackendError> {
        if pool.refused {
            return Ok(None);
        }
        let home = start.home;
        // Those that are being launched come last.
        pool.execs.sort_by_key(|exec| exec.is_launching);
        let free = pool.execs.iter().filter(|exec| !exec.is_launching).count();
        let seen: SmallVec<[Seen; MOST_EXECS]> = pool.execs[..free].iter().map(|exec| exec.seen(execution, caller)).collect();
        let is_full = pool.execs.len() >= MOST_EXECS;
        if is_full && free == 0 {
            return Ok(None);
        }
        let choice = choose(&seen, is_full, pool.repoints, |index| pool.execs[index].is_idle());
        let mut after = None;
        let index = match choice {
            Choice::Launch(index) => Some(index),
            Choice::Repoint(index) => self.repoint(pool, index, execution, home, kept)?,
            Choice::Instantiate => self.instantiate(pool, execution, home, kept)?,
            Choice::Wait(index) => {
                self.graphs.waits.fetch_add(1, Ordering::Relaxed);
                after = pool.execs[index].last.as_ref().map(|last| last.end.clone());
                if seen[index].same_addresses { Some(index) } else { self.repoint(pool, index, execution, home, kept)? }
            }
        };
        let Some(index) = index else { return Ok(None) };
        let had_addresses = seen.get(index).is_some_and(|seen| seen.same_addresses);
        Ok(Some(Ready { after, had_addresses, ..self.ready(&mut pool.execs[index], start)? }))
    }

    /// The execs of a program. Makes room for them where there are too many.
    fn pool(&self, key: Key, program: &Arc<Program>) -> Arc<Mutex<Pool>> {
        let pool = {
            let mut programs = lock(&self.graphs.programs);
            if let Some(pool) = programs.get(&key) {
                return pool.clone();
            }
            if programs.len() >= MOST_PROGRAMS {
                self.evict(&mut programs);
            }
            let pool = Pool {
                is_evicted: false,
                refused: false,
                repoints: 0,
                // As if launched just now, so that it is not the next to go.
                launched: self.graphs.launches.load(Ordering::Relaxed),
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

    /// Takes the execs of the program that was longest not launched, those in the very act of launching excepted.
    fn evict(&self, programs: &mut HashMap<Key, Arc<Mutex<Pool>>, ahash::RandomState>) {
        let idle = |pool: &Arc<Mutex<Pool>>| Some(pool.try_lock().ok()?.idle()?.launched);
        let oldest = programs.iter().filter_map(|(key, pool)| Some((idle(pool)?, *key))).min();
        let Some((_, key)) = oldest else { return };
        let Some(found) = programs.get(&key).cloned() else { return };
        let Ok(mut pool) = found.try_lock() else { return };
        if pool.idle().is_none() {
            return;
        }
        pool.is_evicted = true;
        let execs = std::mem::take(&mut pool.execs);
        drop(pool);
        programs.remove(&key);
        lock(&self.graphs.retired).extend(execs.into_iter().map(Exec::retired));
    }

    /// Destroys the retired execs that have finished.
    fn destroy_retired(&self) {
        let finished: Vec<Exec> = lock(&self.graphs.retired).extract_if(.., |exec| exec.is_idle()).collect();
        // Not under the lock.
        drop(finished);
    }

    /// Forgets the ends of all launches, which keep the backend alive: no more are to come.
    pub fn forget_launches(&self) {
        let pools: Vec<_> = lock(&self.graphs.programs).values().cloned().collect();
        for pool in pools {
            lock(&pool).execs.iter_mut().for_each(Exec::forget_launches);
        }
        lock(&self.graphs.retired).iter_mut().for_each(Exec::forget_launches);
    }

    /// Destroys all. All work has finished.
    pub fn release_graphs(&self) {
        if self.has_lost() {
            // The driver has nothing of them any more that could be destroyed.
            for (_, pool) in lock(&self.graphs.programs).drain() {
                std::mem::take(&mut lock(&pool).execs).into_iter().for_each(Exec::leave);
            }
            std::mem::take(&mut *lock(&self.graphs.retired)).into_iter().for_each(Exec::leave);
            return;
        }
        let Ok(primary) = self.primary(self.any_used()) else { return };
        let _current = primary.enter();
        for (_, pool) in lock(&self.graphs.programs).drain() {
            lock(&pool).execs.clear();
        }
        lock(&self.graphs.retired).clear();
    }

    /// Gives an exec the addresses of `execution`. One that the driver will not re-point, because the memory is of another kind than
    /// before, makes room for a new one; so does one whose kernels and copies are on other GPUs than these addresses need them, and one that has
    /// an address already for other memory.
    fn repoint(
        &self,
        pool: &mut Pool,
        index: usize,
        execution: &Execution<'_>,
        home: usize,
        kept: &Kept,
    ) -> Result<Option<usize>, BackendError> {
        if !self.are_mapped(execution, home, kept)? {
            return Ok(None);
        }
        let Some(sites) = self.sites(execution, home, kept)? else { return Ok(None) };
        let exec = &mut pool.execs[index];
        let fits = exec.made_for == made_for(&sites) && !exec.has_address_of_other(execution, &kept.memory);
        let repointed = if fits { exec.repoint(execution, &sites) } else { Ok(()) };
        if !fits || repointed.is_err() {
            if let Err(error) = repointed {
                log::debug!("a graph is instantiated anew, because the driver does not re-point it: {error}");
            }
            let stale = pool.execs.remove(index);
            lock(&self.graphs.retired).push(stale.retired());
            // Now: a time loop that allocates anew each time would otherwise keep one for each.
            self.destroy_retired();
            return self.instantiate(pool, execution, home, kept);
        }
        exec.endpoints = execution.endpoints.clone();
        exec.rings = execution.rings.clone();
        exec.memory = kept.memory.clone();
        pool.repoints = pool.repoints.saturating_add(1);
        self.graphs.repoints.fetch_add(1, Ordering::Relaxed);
        Ok(Some(index))
    }

    /// Adds an exec to the pool. `None` where the program is to run on streams.
    fn instantiate(&self, pool: &mut Pool, execution: &Execution<'_>, home: usize, kept: &Kept) -> Result<Option<usize>, BackendError> {
        if !self.are_mapped(execution, home, kept)? {
            return Ok(None);
        }
        let Some(sites) = self.sites(execution, home, kept)? else { return Ok(None) };
        match Exec::new(self.driver, execution, &sites, kept.memory.clone()) {
            Ok(exec) => {
                pool.execs.push(exec);
                pool.repoints = 0;
                self.graphs.instantiations.fetch_add(1, Ordering::Relaxed);
                Ok(Some(pool.execs.len() - 1))
            }
            Err(error) => {
                log::warn!(
                    "a plan of {} operations runs on streams, because the driver makes no graph of it: {error}",
                    pool.program.ops.len()
                );
                pool.refused = true;
                Ok(None)
            }
        }
    }

    /// Whether the driver knows the memory of all ends. It stages ordinary host memory by itself and at a time of its choosing, which
    /// only a stream orders as the caller expects.
    fn are_mapped(&self, execution: &Execution<'_>, home: usize, kept: &Kept) -> Result<bool, BackendError> {
        if self.is_reached(execution, home, kept)? {
            return Ok(true);
        }
        for ends in execution.endpoints.iter().zip(&execution.program.transfers).filter(|(_, bytes)| **bytes > 0).map(|(ends, _)| ends) {
            for address in [ends.dst, ends.src] {
                let known = self.attributes(address)?;
                if !known.is_device() && !known.is_host() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The GPU of each lane, which by then has access to the memory of the others in use. A lane that `home` may work on runs there:
    /// its nodes then start after the caller's stream without a signal to another GPU. As on streams, only if it reaches all memory. `None`
    /// where a lane is of a GPU that must not enter some of it: on streams another one makes those copies.
    fn sites(&self, execution: &Execution<'_>, home: usize, kept: &Kept) -> Result<Option<SmallVec<[Site<'_>; 8]>>, BackendError> {
        let program = execution.program;
        let is_reached = program.lanes.iter().any(|lane| lane.also.is_some()) && self.is_reached(execution, home, kept)?;
        let mut is_fused: SmallVec<[bool; 8]> = SmallVec::from_elem(false, program.lanes.len());
        program.ops.iter().filter(|op| op.mechanism == Mechanism::Kernel).for_each(|op| is_fused[op.lane.0 as usize] = true);
        let site = |(lane, is_fused): (&Lane, bool)| {
            let device = if is_reached { lane.device_for(DeviceId(home as i32)) } else { lane.device };
            let gpu = self.reaching(execution, if device.is_host() { self.any_used() } else { device.0 as usize }, kept)?;
            if !self.is_reached(execution, gpu, kept)? && self.is_shut_out(execution, gpu) {
                return Ok(None);
            }
            let primary = self.reach(gpu)?;
            let kernel = if is_fused { self.kernel_for(execution, primary, gpu)? } else { None };
            Ok(Some(Site { gpu, primary, ends: self.own_ends(execution, gpu), kernel }))
        };
        program.lanes.iter().zip(is_fused).map(site).collect()
    }

    /// Launches what is ready, and marks its end. The lock is not held.
    #[inline(always)]
    fn launch(&self, found: &Mutex<Pool>, ready: &Ready, stream: usize, caller: Caller) -> Result<(), BackendError> {
        let launched = self.launch_ready(ready, handle(stream));
        let mut pool = lock(found);
        // Nobody has taken it out meanwhile, but it may stand in another place.
        let Some(exec) = pool.execs.iter_mut().find(|exec| exec.exec == ready.exec) else { return launched };
        exec.is_launching = false;
        if launched.is_ok() {
            let number = self.graphs.launches.fetch_add(1, Ordering::Relaxed) + 1;
            exec.spare = exec.last.replace(Launch { end: ready.end.clone(), stream: caller, number }).map(|before| before.end);
            pool.launched = number;
            if !ready.had_addresses {
                self.graphs.misses.fetch_add(1, Ordering::Relaxed);
            }
        }
        launched
    }

    fn launch_ready(&self, ready: &Ready, raw: CUstream) -> Result<(), BackendError> {
        if let Some(after) = &ready.after {
            // SAFETY: `after` holds the event; the caller's stream.
            unsafe { call!(self.driver, cuStreamWaitEvent(raw, after.event(), 0)) }?;
        }
        // SAFETY: an instantiated graph whose nodes lie inside of the transfers and slots, for which the caller of `execute` and the engine
        // vouch until completion, and that nobody else launches or changes meanwhile; the caller's stream.
        unsafe { call!(self.driver, cuGraphLaunch(handle(ready.exec), raw)) }?;
        // SAFETY: an event of the context of this stream that nobody else has; the caller's stream.
        let recorded = unsafe { call!(self.driver, cuEventRecord(ready.end.event(), raw)) };
        recorded.inspect_err(|_| {
            // SAFETY: the caller's stream. Whoever gets the error may free the buffers, so nothing may be left at work on them.
            unsafe { (self.driver.cuStreamSynchronize)(raw) };
        })
    }

    pub fn graph_statistics(&self) -> GraphStatistics {
        let graphs = &self.graphs;
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

impl Exec {
    /// Builds and instantiates the graph of a program, each lane's nodes on its site.
    fn new(driver: &'static Driver, execution: &Execution<'_>, sites: &[Site<'_>], memory: Arc<[u64]>) -> Result<Exec, BackendError> {
        let missing = || BackendError::NotSupported("the driver has no cuGraphInstantiateWithFlags".into());
        let instantiate = driver.cuGraphInstantiateWithFlags.ok_or_else(missing)?;
        let program = execution.program;
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: the output is valid for the call.
        unsafe { call!(driver, cuGraphCreate(&mut graph, 0)) }?;
        let mut built = Exec {
            driver,
            graph: graph.expose_provenance(),
            exec: 0,
            is_launching: false,
            nodes: Vec::with_capacity(program.ops.iter().map(|op| op.copies.len()).sum()),
            made_for: made_for(sites),
            endpoints: execution.endpoints.clone(),
            rings: execution.rings.clone(),
            memory,
            last: None,
            spare: None,
        };
        let befores = predecessors(program);
        // Those that others come after.
        let mut last_of: Vec<std::ops::Range<usize>> = Vec::with_capacity(program.ops.len());
        for (op, before) in program.ops.iter().zip(&befores) {
            let first = built.nodes.len();
            let before_op: SmallVec<[CUgraphNode; 8]> =
                before.iter().flat_map(|op| &built.nodes[last_of[*op].clone()]).map(|node| handle(*node)).collect();
            let site = &sites[op.lane.0 as usize];
            let mut chains = usize::MAX;
            for (index, work) in works(op, site.kernel.is_some()).enumerate() {
                chains = most_at_once(work);
                let in_chain: Option<CUgraphNode> = index.checked_sub(chains).map(|before| handle(built.nodes[first + before]));
                let before = in_chain.as_ref().map_or(&before_op[..], std::slice::from_ref);
                let mut node: CUgraphNode = std::ptr::null_mut();
                let (out, before, count) = (&raw mut node, before.as_ptr(), before.len());
                site.with_parameters(
                    execution,
                    work,
                    // SAFETY: nodes of this graph; the output and the parameters are valid for the call.
                    |copy| unsafe { call!(driver, cuGraphAddMemcpyNode(out, graph, before, count, copy, site.primary.context())) },
                    |kernel| {
                        let add = driver.cuGraphAddKernelNode.ok_or_else(no_kernels)?;
                        // SAFETY: as above; the function takes what the parameters point to, which the driver copies before it returns.
                        driver.check("cuGraphAddKernelNode", unsafe { add(out, graph, before, count, kernel) })
                    },
                )?;
                built.nodes.push(node.expose_provenance());
            }
            let nodes = built.nodes.len();
            last_of.push(first.max(nodes.saturating_sub(chains))..nodes);
        }
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: the output is valid for the call.
        driver.check("cuGraphInstantiateWithFlags", unsafe { instantiate(&mut exec, graph, 0) })?;
        built.exec = exec.expose_provenance();
        Ok(built)
    }

    /// Gives all nodes the addresses of `execution`. Launches that are under way keep the parameters that they had.
    fn repoint(&self, execution: &Execution<'_>, sites: &[Site<'_>]) -> Result<(), BackendError> {
        let (driver, exec): (_, CUgraphExec) = (self.driver, handle(self.exec));
        let works = execution.program.ops.iter().flat_map(|op| {
            let site = &sites[op.lane.0 as usize];
            works(op, site.kernel.is_some()).map(move |work| (site, work))
        });
        self.nodes.iter().zip(works).try_for_each(|(node, (site, work))| {
            site.with_parameters(
                execution,
                work,
                // SAFETY: a node of the graph that the exec was made of; the driver reads the parameters before it returns.
                |copy| unsafe { call!(driver, cuGraphExecMemcpyNodeSetParams(exec, handle(*node), copy, site.primary.context())) },
                |kernel| {
                    let set = driver.cuGraphExecKernelNodeSetParams.ok_or_else(no_kernels)?;
                    // SAFETY: as above. The function is the one that the node was made with: it is chosen by the number of segments.
                    driver.check("cuGraphExecKernelNodeSetParams", unsafe { set(exec, handle(*node), kernel) })
                },
            )
        })
    }

    /// Whether it has the addresses of `execution`. By identity: the same address may since belong to another allocation, of which the exec
    /// knows nothing.
    fn is_bound_to(&self, execution: &Execution<'_>) -> bool {
        Arc::ptr_eq(&self.endpoints, execution.endpoints) && Arc::ptr_eq(&self.rings, execution.rings)
    }

    /// Whether it has one of these addresses for the same end already, in other memory: what was there then has been freed.
    fn has_address_of_other(&self, execution: &Execution<'_>, memory: &[u64]) -> bool {
        let before = self.endpoints.iter().flat_map(|ends| [ends.dst, ends.src]).zip(&*self.memory);
        let now = execution.endpoints.iter().flat_map(|ends| [ends.dst, ends.src]).zip(memory);
        before.zip(now).any(|(before, now)| before.0 == now.0 && before.1 != now.1)
    }

    /// Whether its last launch was surely in this stream.
    fn was_last_in(&self, caller: Caller) -> bool {
        self.last.as_ref().is_some_and(|last| last.stream.is(caller))
    }

    fn seen(&self, execution: &Execution<'_>, caller: Caller) -> Seen {
        Seen {
            same_addresses: self.is_bound_to(execution),
            same_stream: self.was_last_in(caller),
            number: self.last.as_ref().map_or(0, |last| last.number),
        }
    }

    /// One that is not to be launched any more.
    fn retired(mut self) -> Exec {
        self.spare = None;
        self
    }

    /// Drops it without the driver.
    fn leave(mut self) {
        (self.exec, self.graph) = (0, 0);
    }

    fn forget_launches(&mut self) {
        self.last = None;
        self.spare = None;
    }

    /// Whether its last launch has finished, with or without an error.
    fn is_idle(&self) -> bool {
        let Some(Launch { end, .. }) = &self.last else { return true };
        // SAFETY: the event is this exec's own.
        end.is_known_done() || unsafe { (self.driver.cuEventQuery)(end.event()) } != code::NOT_READY
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and idle: nobody has them any more.
        unsafe {
            if self.exec != 0 {
                (self.driver.cuGraphExecDestroy)(handle(self.exec));
            }
            if self.graph != 0 {
                (self.driver.cuGraphDestroy)(handle(self.graph));
            }
        }
    }
}

/// A driver without kernel nodes gets no graph that has some.
fn no_kernels() -> BackendError {
    BackendError::NotSupported("the driver has no kernel nodes of graphs".into())
}

/// Whether a program gains by a graph at all: one plain copy is one call on a stream too. A kernel is too, but as a graph its
/// argument has been handed to the driver before (readings: launching takes 2.0 us, against 3.3 us with the argument).
fn is_for_a_graph(program: &Program) -> bool {
    program.ops.iter().map(|op| op.copies.len()).sum::<usize>() > 1 || program.ops.iter().any(|op| op.mechanism == Mechanism::Kernel)
}

impl fmt::Debug for Graphs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graphs")
    }
}
