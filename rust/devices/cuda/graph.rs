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

use super::choice::{Choice, MOST_EXECS, Seen, choose};
use super::completion::Finished;
use super::device::Caller;
use super::driver::{CUstream, OutsideCapture, call, handle, lock};
use super::exec::{Exec, Launch, Pool};
use super::nodes::{GraphLane, layout};
use super::parts::Core;
use super::streams::Start;
use crate::backend::{BackendError, Execution, PlanState, ProgramKey};
use crate::plan::{Lane, Mechanism, Program};
use crate::topology::DeviceId;
use smallvec::SmallVec;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// What is about to be launched. The exec is nobody else's until [`Core::launch`] is done with it.
struct ReadyGraph {
    /// The `CUgraphExec`.
    exec: usize,
    /// The end of the launch, yet to be recorded.
    end: Arc<Finished>,
    /// The launch of the same exec that it comes after, where all are at work.
    after: Option<Arc<Finished>>,
    had_addresses: bool,
}

impl Core {
    /// Launches the program as a graph in the caller's stream, whose GPU's context is current, and returns its end. `None`, and nothing
    /// enqueued, where it is none for a graph. When it fails, what was enqueued has finished.
    pub fn launch_graph(
        self: &Arc<Core>,
        execution: &Execution<'_>,
        start: &Start,
        state: &PlanState,
    ) -> Result<Option<Arc<Finished>>, BackendError> {
        let _outside = OutsideCapture::enter(self.gpus.driver);
        match state.find::<Mutex<Pool>>(execution.program, start.gpu) {
            Some(found) => match self.launch_of(found, execution, start, state)? {
                Some(end) => Ok(end),
                None => self.launch_found(execution, start, state),
            },
            None => self.launch_found(execution, start, state),
        }
    }

    /// The same for a program whose execs are not at hand.
    #[cold]
    fn launch_found(
        self: &Arc<Core>,
        execution: &Execution<'_>,
        start: &Start,
        state: &PlanState,
    ) -> Result<Option<Arc<Finished>>, BackendError> {
        let Some(key) = self.graph_key(execution.program, start.gpu) else { return Ok(None) };
        loop {
            let found = self.graphs.pool(key, execution.program);
            // Another thread may have needed its place since.
            if let Some(end) = self.launch_of(&found, execution, start, state)? {
                state.keep(key, found);
                return Ok(end);
            }
        }
    }

    /// What the execs of a program are found by, for launches in streams of this GPU. `None` where it is none for a graph.
    fn graph_key(&self, program: &Arc<Program>, callers_gpu: usize) -> Option<ProgramKey> {
        let driver = self.gpus.driver;
        let has_kernel_nodes = driver.cuGraphAddKernelNode.is_some() && driver.cuGraphExecKernelNodeSetParams.is_some();
        let has_nodes = has_kernel_nodes || program.ops.iter().all(|op| op.mechanism != Mechanism::Kernel);
        let leaves_open = program.lanes.iter().any(|lane| !lane.also.is_empty());
        (driver.cuGraphInstantiateWithFlags.is_some() && is_for_a_graph(program) && has_nodes)
            .then(|| (Arc::as_ptr(program).addr(), leaves_open.then_some(callers_gpu)))
    }

    /// Instantiates a graph with the addresses of `execution` where there is none and no lack of room: one that is at hand for other
    /// addresses may be another prepared plan's. `false` where the program runs on streams.
    pub fn prepare_graph(&self, execution: &Execution<'_>, callers_gpu: usize, state: &PlanState) -> Result<bool, BackendError> {
        let Some(key) = self.graph_key(execution.program, callers_gpu) else { return Ok(false) };
        self.check_freed(execution, state)?;
        let found = self.graphs.pool(key, execution.program);
        let mut pool = lock(&found);
        let has_room = pool.execs.len() < MOST_EXECS && !pool.is_evicted && !pool.refused;
        if has_room && !pool.execs.iter().any(|exec| exec.is_bound_to(execution)) {
            self.instantiate(&mut pool, execution, callers_gpu, state)?;
        }
        Ok(!pool.execs.is_empty())
    }

    /// Launches one of these execs, as [`Core::launch_graph`] does. `None`, and nothing enqueued, where they have been evicted.
    #[inline(always)]
    fn launch_of(
        self: &Arc<Core>,
        found: &Mutex<Pool>,
        execution: &Execution<'_>,
        start: &Start,
        state: &PlanState,
    ) -> Result<Option<Option<Arc<Finished>>>, BackendError> {
        self.check_freed(execution, state)?;
        let mut pool = lock(found);
        if pool.is_evicted {
            return Ok(None);
        }
        let caller = Caller::new(execution.stream.0, start.gpu);
        // As `choose` would, with less to look at.
        let at_hand = |exec: &&mut Exec| exec.is_bound_to(execution) && exec.was_last_in(caller) && !exec.is_launching;
        let ready = match pool.execs.iter_mut().find(at_hand) {
            Some(exec) => Some(self.ready(exec, start)?),
            None => self.choose_exec(&mut pool, execution, caller, start, state)?,
        };
        drop(pool);
        let Some(ready) = ready else { return Ok(Some(None)) };
        self.launch(found, &ready, execution.stream.0, caller)?;
        Ok(Some(Some(ready.end)))
    }

    /// Marks an exec as being launched.
    #[inline(always)]
    fn ready(self: &Arc<Core>, exec: &mut Exec, start: &Start) -> Result<ReadyGraph, BackendError> {
        let end = match exec.spare.take().and_then(|spare| spare.renewed(start)) {
            Some(end) => end,
            None => Arc::new(Finished::new(self.clone(), self.gpus.primary(start.gpu)?.mark()?, start, None)),
        };
        exec.is_launching = true;
        Ok(ReadyGraph { exec: exec.exec, end, after: None, had_addresses: true })
    }

    /// Chooses an exec that nobody is launching and makes it ready. `None` where the program is to run on streams.
    #[cold]
    fn choose_exec(
        self: &Arc<Core>,
        pool: &mut Pool,
        execution: &Execution<'_>,
        caller: Caller,
        start: &Start,
        state: &PlanState,
    ) -> Result<Option<ReadyGraph>, BackendError> {
        if pool.refused {
            return Ok(None);
        }
        let callers_gpu = start.gpu;
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
            Choice::Repoint(index) => self.repoint(pool, index, execution, callers_gpu, state)?,
            Choice::Instantiate => self.instantiate(pool, execution, callers_gpu, state)?,
            Choice::Wait(index) => {
                self.graphs.waits.fetch_add(1, Ordering::Relaxed);
                after = pool.execs[index].last.as_ref().map(|last| last.end.clone());
                if seen[index].same_addresses { Some(index) } else { self.repoint(pool, index, execution, callers_gpu, state)? }
            }
        };
        let Some(index) = index else { return Ok(None) };
        let had_addresses = seen.get(index).is_some_and(|seen| seen.same_addresses);
        Ok(Some(ReadyGraph { after, had_addresses, ..self.ready(&mut pool.execs[index], start)? }))
    }

    /// Gives an exec the addresses of `execution`. One that the driver will not re-point, because the memory is of another kind than
    /// before, makes room for a new one; so does one whose kernels and copies are on other GPUs than these addresses need them, and one that has
    /// an address already for other memory.
    fn repoint(
        &self,
        pool: &mut Pool,
        index: usize,
        execution: &Execution<'_>,
        callers_gpu: usize,
        state: &PlanState,
    ) -> Result<Option<usize>, BackendError> {
        let Some(lanes) = self.lanes(execution, callers_gpu, state)? else { return Ok(None) };
        let exec = &mut pool.execs[index];
        let fits = exec.layout == layout(&lanes) && !exec.has_address_of_other(execution, &state.memory);
        let repointed = if fits { exec.repoint(execution, &lanes) } else { Ok(()) };
        if !fits || repointed.is_err() {
            if let Err(error) = repointed {
                log::debug!("a graph is instantiated anew, because the driver does not re-point it: {error}");
            }
            let stale = pool.execs.remove(index);
            lock(&self.graphs.retired).push(stale.retired());
            // Now: a time loop that allocates anew each time would otherwise keep one for each.
            self.graphs.destroy_retired();
            return self.instantiate(pool, execution, callers_gpu, state);
        }
        exec.endpoints = execution.endpoints.clone();
        exec.rings = execution.rings.clone();
        exec.memory = state.memory.clone();
        pool.repoints = pool.repoints.saturating_add(1);
        self.graphs.repoints.fetch_add(1, Ordering::Relaxed);
        Ok(Some(index))
    }

    /// Adds an exec to the pool. `None` where the program is to run on streams.
    fn instantiate(
        &self,
        pool: &mut Pool,
        execution: &Execution<'_>,
        callers_gpu: usize,
        state: &PlanState,
    ) -> Result<Option<usize>, BackendError> {
        let Some(lanes) = self.lanes(execution, callers_gpu, state)? else { return Ok(None) };
        match Exec::new(self.gpus.driver, execution, &lanes, state.memory.clone()) {
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
    fn are_mapped(&self, execution: &Execution<'_>, callers_gpu: usize, state: &PlanState) -> Result<bool, BackendError> {
        if self.is_reached(execution, callers_gpu, state)? {
            return Ok(true);
        }
        for ends in execution.endpoints.iter().zip(&execution.program.transfers).filter(|(_, bytes)| **bytes > 0).map(|(ends, _)| ends) {
            for address in [ends.dst, ends.src] {
                let known = self.gpus.attributes(address)?;
                if !known.is_device() && !known.is_host() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// The GPU of each lane, which by then has access to the memory of the others in use. A lane that the GPU of the caller's stream may work on runs there:
    /// its nodes then start after the caller's stream without a signal to another GPU. As on streams, only if it reaches all memory. `None`
    /// where a lane is of a GPU that must not enter some of it, because on streams another one makes those copies; and where a graph is not to
    /// have the memory of all ends.
    fn lanes(
        &self,
        execution: &Execution<'_>,
        callers_gpu: usize,
        state: &PlanState,
    ) -> Result<Option<SmallVec<[GraphLane<'_>; 8]>>, BackendError> {
        if !self.are_mapped(execution, callers_gpu, state)? {
            return Ok(None);
        }
        let program = execution.program;
        let is_reached = program.lanes.iter().any(|lane| !lane.also.is_empty()) && self.is_reached(execution, callers_gpu, state)?;
        let mut is_fused: SmallVec<[bool; 8]> = SmallVec::from_elem(false, program.lanes.len());
        program.ops.iter().filter(|op| op.mechanism == Mechanism::Kernel).for_each(|op| is_fused[op.lane.0 as usize] = true);
        let lane = |(lane, is_fused): (&Lane, bool)| {
            let device = if is_reached { lane.device_for(DeviceId(callers_gpu as i32)) } else { lane.device };
            let gpu = self.reaching(execution, if device.is_host() { self.gpus.any_used() } else { device.0 as usize }, state)?;
            if !self.is_reached(execution, gpu, state)? && self.is_shut_out(execution, gpu) {
                return Ok(None);
            }
            let primary = self.gpus.peered(gpu)?;
            let kernel = if is_fused { self.kernel_for(execution, primary, gpu)? } else { None };
            Ok(Some(GraphLane { gpu, primary, ends: self.own_ends(execution, gpu), kernel }))
        };
        program.lanes.iter().zip(is_fused).map(lane).collect()
    }

    /// Launches what is ready, and marks its end. The lock is not held.
    #[inline(always)]
    fn launch(&self, found: &Mutex<Pool>, ready: &ReadyGraph, stream: usize, caller: Caller) -> Result<(), BackendError> {
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

    fn launch_ready(&self, ready: &ReadyGraph, raw: CUstream) -> Result<(), BackendError> {
        if let Some(after) = &ready.after {
            // SAFETY: `after` holds the event; the caller's stream.
            unsafe { call!(self.gpus.driver, cuStreamWaitEvent(raw, after.event(), 0)) }?;
        }
        // SAFETY: an instantiated graph whose nodes lie inside of the transfers and slots, for which the caller of `execute` and the engine
        // vouch until completion, and that nobody else launches or changes meanwhile; the caller's stream.
        unsafe { call!(self.gpus.driver, cuGraphLaunch(handle(ready.exec), raw)) }?;
        // SAFETY: an event of the context of this stream that nobody else has; the caller's stream.
        let recorded = unsafe { call!(self.gpus.driver, cuEventRecord(ready.end.event(), raw)) };
        recorded.inspect_err(|_| {
            // SAFETY: the caller's stream. Whoever gets the error may free the buffers, so nothing may be left at work on them.
            unsafe { (self.gpus.driver.cuStreamSynchronize)(raw) };
        })
    }
}

/// Whether a program gains by a graph at all: one plain copy is one call on a stream too. A kernel is too, but as a graph its
/// argument has been handed to the driver before (readings: launching takes 2.0 us, against 3.3 us with the argument).
fn is_for_a_graph(program: &Program) -> bool {
    program.ops.iter().map(|op| op.copies.len()).sum::<usize>() > 1 || program.ops.iter().any(|op| op.mechanism == Mechanism::Kernel)
}
