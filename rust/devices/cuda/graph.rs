//! Executes a program (list of copy operations) by launching one CUDA graph.
//!
//! The graph is not captured but built from the program. It has one memcpy node per copy and one kernel node per fused kernel. The
//! program's lanes (sequences of operations) and the field `Op::after` determine the order of the nodes. The nodes of an executable graph
//! contain memory addresses. To run the same program with other addresses, the nodes of an idle executable graph are changed (re-pointed).
//! This takes about a microsecond per node, whereas instantiating a graph takes tens of microseconds (hardware readings, graphs).
//!
//! The driver orders each launch of an executable graph after the graph's earlier launches (`cuGraphLaunch`). Using one executable graph in
//! two streams is therefore correct but serializes the streams. For this reason, a program has as many executable graphs as run
//! concurrently, up to a maximum.
//!
//! Re-pointing has a limitation. If memory is freed and the next allocation gets the same address, an executable graph with this address
//! would not be changed, and its copies would then be slow. (Two H200, driver 580.159.04: 64 MiB by two paths takes 182 us instead of 169,
//! and 1 GiB takes 2577 us instead of 2422. Plain copies of the same buffers are not affected.) In this case, the program gets a new
//! executable graph.
//!
//! An executable graph is destroyed only after its last launch has finished.
//!
//! A launch blocks while the queue of its stream is full, so no lock is held during a launch. Instead, the executable graph is marked, and
//! no other thread launches, changes or evicts it. If other threads are launching all executable graphs of a program, and the program has
//! the maximum number of them, the program runs on streams.

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

/// Executable graph that a thread is about to launch. No other thread uses the graph until [`Core::launch`] has returned.
struct ReadyGraph {
    /// Handle of the executable graph (`CUgraphExec`).
    exec: usize,
    /// Completion object of the launch. Its event is recorded in the stream after the launch.
    end: Arc<Finished>,
    /// Earlier launch of the same executable graph that must finish first. `None` if the executable graph is idle, or if its last launch
    /// was in the same stream.
    after: Option<Arc<Finished>>,
    had_addresses: bool,
}

impl Core {
    /// Launches the program (list of copy operations) as a graph in the caller's stream, and returns the completion of the launch. The
    /// context of the stream's GPU must be current. Returns `None`, with nothing enqueued, if the program is not suitable for a graph. If
    /// the function returns an error, the work that it had enqueued has finished.
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

    /// Launches a program like [`Core::launch_graph`], for a plan whose `state` contains no executable graphs of the program yet.
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
            // Another thread may have evicted these executable graphs after they were found.
            if let Some(end) = self.launch_of(&found, execution, start, state)? {
                state.keep(key, found);
                return Ok(end);
            }
        }
    }

    /// Returns the key under which the executable graphs of a program are stored. The key depends on `callers_gpu`, the GPU of the caller's
    /// stream, if the program allows several GPUs for a lane (sequence of operations). Returns `None` if the program is not suitable for a
    /// graph.
    fn graph_key(&self, program: &Arc<Program>, callers_gpu: usize) -> Option<ProgramKey> {
        let driver = self.gpus.driver;
        let has_kernel_nodes = driver.cuGraphAddKernelNode.is_some() && driver.cuGraphExecKernelNodeSetParams.is_some();
        let has_nodes = has_kernel_nodes || program.ops.iter().all(|op| op.mechanism != Mechanism::Kernel);
        let leaves_open = program.lanes.iter().any(|lane| !lane.also.is_empty());
        (driver.cuGraphInstantiateWithFlags.is_some() && is_for_a_graph(program) && has_nodes)
            .then(|| (Arc::as_ptr(program).addr(), leaves_open.then_some(callers_gpu)))
    }

    /// Instantiates a graph with the addresses of `execution`, unless there is one already or the program has the maximum number of graphs.
    /// The function does not change the addresses of an existing graph, because another plan may have prepared it. Returns false if the
    /// program must run on streams.
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

    /// Launches one of the executable graphs in the pool `found`, like [`Core::launch_graph`]. Returns the outer `None`, with nothing
    /// enqueued, if the pool was evicted. Returns the inner `None` if the program is not suitable for a graph.
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
        // Makes the same decision as `choose`, with fewer checks, for the most frequent case.
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

    /// Marks an executable graph as being launched, so that no other thread uses it, and returns it with a completion object for the
    /// launch.
    #[inline(always)]
    fn ready(self: &Arc<Core>, exec: &mut Exec, start: &Start) -> Result<ReadyGraph, BackendError> {
        let end = match exec.spare.take().and_then(|spare| spare.renewed(start)) {
            Some(end) => end,
            None => Arc::new(Finished::new(self.clone(), self.gpus.primary(start.gpu)?.mark()?, start, None)),
        };
        exec.is_launching = true;
        Ok(ReadyGraph { exec: exec.exec, end, after: None, had_addresses: true })
    }

    /// Chooses an executable graph that no thread is launching, and changes its addresses to those of the execution if necessary. Returns
    /// `None` if the program must run on streams.
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
        // Moves the executable graphs that threads are launching to the end of the list.
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

    /// Changes the addresses of an executable graph to those of `execution`, and returns its index in the pool. Returns `None` if the
    /// program must run on streams.
    ///
    /// A new executable graph replaces the old one in three cases. The driver refuses the change because the memory is of another kind. The
    /// new addresses require other GPUs for the lanes (sequences of operations). The old graph contains one of these addresses for an
    /// allocation that was freed.
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
                log::debug!("a CUDA graph is instantiated again, because the driver cannot update it: {error}");
            }
            let stale = pool.execs.remove(index);
            lock(&self.graphs.retired).push(stale.retired());
            // Evicted executable graphs are destroyed now if they are idle. Otherwise, a time loop that reallocates its buffers in each
            // step would accumulate executable graphs.
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

    /// Adds a new executable graph to the program's pool of executable graphs, and returns the graph's index. Returns `None` if the program
    /// must run on streams.
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
                    "a plan of {} operations runs on streams, because the driver cannot create its graph: {error}",
                    pool.program.ops.len()
                );
                pool.refused = true;
                Ok(None)
            }
        }
    }

    /// True if the driver knows the memory of all sources and destinations. The driver copies pageable host memory through a staging buffer
    /// at a time of its own choice. In streams, such copies keep the order that the caller expects, but in a graph they do not.
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

    /// Returns the GPU that runs each lane (sequence of operations) of a graph. Each of these GPUs gets access to the memory of the other
    /// GPUs in use. As on streams, a lane runs on the GPU of the caller's stream if the program allows this and that GPU can access all
    /// memory of the plan. The lane's nodes can then start without a signal to another GPU.
    ///
    /// Returns `None` if the memory of a source or destination is not suitable for a graph, or if a lane's GPU cannot access all memory of
    /// the plan, not even by copies. In the second case, the program runs on streams, where other GPUs make the copies of this lane.
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

    /// Launches an executable graph and records the event that marks the end of the launch. The pool's lock is not held during the launch.
    #[inline(always)]
    fn launch(&self, found: &Mutex<Pool>, ready: &ReadyGraph, stream: usize, caller: Caller) -> Result<(), BackendError> {
        let launched = self.launch_ready(ready, handle(stream));
        let mut pool = lock(found);
        // The executable graph has not been removed from the pool, but its index may have changed.
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
            // SAFETY: `after` keeps the event valid, and the caller keeps the stream valid.
            unsafe { call!(self.gpus.driver, cuStreamWaitEvent(raw, after.event(), 0)) }?;
        }
        // SAFETY: The graph is instantiated, and no other thread launches or changes it. Its nodes access only the transfers and slots,
        // which the caller of `execute` and the engine keep valid until the execution has completed. The caller keeps the stream valid.
        unsafe { call!(self.gpus.driver, cuGraphLaunch(handle(ready.exec), raw)) }?;
        // SAFETY: The event has no other users and belongs to the context of the stream, which the caller keeps valid.
        let recorded = unsafe { call!(self.gpus.driver, cuEventRecord(ready.end.event(), raw)) };
        recorded.inspect_err(|_| {
            // SAFETY: The caller keeps the stream valid. It is synchronized because the caller may free the buffers after an error, so no
            // work on them may remain.
            unsafe { (self.gpus.driver.cuStreamSynchronize)(raw) };
        })
    }
}

/// True if a graph can make a program faster. A single plain copy is not faster in a graph, because a stream also needs only one call for
/// the copy. A single kernel is faster in a graph, because the driver already has the kernel's argument. (Hardware readings: a launch takes
/// 2.0 us, compared with 3.3 us if the argument is passed.)
fn is_for_a_graph(program: &Program) -> bool {
    program.ops.iter().map(|op| op.copies.len()).sum::<usize>() > 1 || program.ops.iter().any(|op| op.mechanism == Mechanism::Kernel)
}
