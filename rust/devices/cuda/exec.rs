//! Builds executable graphs from programs (lists of copy operations), and changes the addresses in the nodes of these graphs.

use super::choice::Seen;
use super::completion::Finished;
use super::device::Caller;
use super::driver::{CUgraph, CUgraphExec, CUgraphNode, Driver, call, code, handle};
use super::nodes::{GraphLane, layout, most_at_once, predecessors, works};
use crate::backend::{BackendError, CompletionState, Endpoints, Execution};
use crate::plan::Program;
use smallvec::SmallVec;
use std::sync::Arc;

/// Executable graphs of one program (list of copy operations). Other code locks the pool while it chooses and changes a graph, but not
/// while it launches one. The fields that a launch in a time loop reads come first, so that they occupy only two or three cache lines.
/// Before each launch, they are usually not in the first-level cache.
#[repr(C)]
pub(super) struct Pool {
    /// True if this pool was removed from the table of all programs. It then contains no executable graphs.
    pub is_evicted: bool,
    /// True if the driver failed to build a graph from the program (list of copy operations). The failure was logged, and the program runs
    /// on streams instead.
    pub refused: bool,
    /// Number of times that the addresses of any graph in this pool were changed since the last graph was instantiated.
    pub repoints: u32,
    /// Number of the last launch of the program (list of copy operations). Launches of all programs are numbered consecutively, so the
    /// least recently launched program has the smallest number.
    pub launched: u64,
    pub execs: SmallVec<[Exec; 2]>,
    pub program: Arc<Program>,
}

impl Pool {
    /// Returns this pool, or `None` if a thread is launching one of its executable graphs.
    pub fn idle(&self) -> Option<&Pool> {
        (!self.execs.iter().any(|exec| exec.is_launching)).then_some(self)
    }
}

/// Executable graph of a program (list of copy operations), with the memory addresses that the graph's nodes currently have.
#[repr(C)]
pub(super) struct Exec {
    pub endpoints: Arc<[Endpoints]>,
    pub rings: Arc<[u64]>,
    /// Identifiers of the allocations that contain the plan's destinations and sources, as in `PlanState::memory`.
    pub memory: Arc<[u64]>,
    /// Handle of the executable graph (`CUgraphExec`), or 0 before the graph is instantiated.
    pub exec: usize,
    /// True while a thread launches the executable graph. That thread does not hold the pool's lock during the launch.
    pub is_launching: bool,
    pub last: Option<Launch>,
    /// Completion object of an earlier launch. The next launch reuses the object if no other reference to it exists. A time loop then
    /// neither allocates memory nor takes an event from the pool of events.
    pub spare: Option<Arc<Finished>>,
    pub driver: &'static Driver,
    /// Handle of the graph from which the executable graph was instantiated (`CUgraph`). Its node handles identify the nodes of the
    /// executable graph.
    pub graph: usize,
    /// Node handles (`CUgraphNode`) in the order of the program's operations, one for each [`NodeWork`](super::nodes::NodeWork).
    pub nodes: Vec<usize>,
    /// GPU of each lane (sequence of operations), and a boolean. The boolean is true if the lane's fused operations are kernel nodes, and
    /// false if they are copy nodes.
    pub layout: SmallVec<[(usize, bool); 8]>,
}

/// Last launch of an executable graph.
pub(super) struct Launch {
    /// Completion object of the launch, shared with all callers that wait for the launch.
    pub end: Arc<Finished>,
    pub stream: Caller,
    /// Sequence number of the launch among the launches of all programs (lists of copy operations).
    pub number: u64,
}

impl Exec {
    /// Builds the graph of a program with the addresses of `execution`, and instantiates it. `lanes` contains the GPU on which the nodes of
    /// each lane (sequence of operations) run.
    pub fn new(
        driver: &'static Driver,
        execution: &Execution<'_>,
        lanes: &[GraphLane<'_>],
        memory: Arc<[u64]>,
    ) -> Result<Exec, BackendError> {
        let missing = || BackendError::NotSupported("the driver has no cuGraphInstantiateWithFlags".into());
        let instantiate = driver.cuGraphInstantiateWithFlags.ok_or_else(missing)?;
        let program = execution.program;
        let mut graph: CUgraph = std::ptr::null_mut();
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(driver, cuGraphCreate(&mut graph, 0)) }?;
        let mut built = Exec {
            driver,
            graph: graph.expose_provenance(),
            exec: 0,
            is_launching: false,
            nodes: Vec::with_capacity(program.ops.iter().map(|op| op.copies.len()).sum()),
            layout: layout(lanes),
            endpoints: execution.endpoints.clone(),
            rings: execution.rings.clone(),
            memory,
            last: None,
            spare: None,
        };
        let befores = predecessors(program);
        // Nodes of each operation that later operations must follow.
        let mut last_of: Vec<std::ops::Range<usize>> = Vec::with_capacity(program.ops.len());
        for (op, before) in program.ops.iter().zip(&befores) {
            let first = built.nodes.len();
            let before_op: SmallVec<[CUgraphNode; 8]> =
                before.iter().flat_map(|op| &built.nodes[last_of[*op].clone()]).map(|node| handle(*node)).collect();
            let lane = &lanes[op.lane.0 as usize];
            let mut chains = usize::MAX;
            for (index, work) in works(op, lane.kernel.is_some()).enumerate() {
                chains = most_at_once(work);
                let in_chain: Option<CUgraphNode> = index.checked_sub(chains).map(|before| handle(built.nodes[first + before]));
                let before = in_chain.as_ref().map_or(&before_op[..], std::slice::from_ref);
                let mut node: CUgraphNode = std::ptr::null_mut();
                let (out, before, count) = (&raw mut node, before.as_ptr(), before.len());
                lane.with_parameters(
                    execution,
                    work,
                    // SAFETY: The preceding nodes belong to this graph. The output and the parameters are variables that outlive the call.
                    |copy| unsafe { call!(driver, cuGraphAddMemcpyNode(out, graph, before, count, copy, lane.primary.context())) },
                    |kernel| {
                        let add = driver.cuGraphAddKernelNode.ok_or_else(no_kernels)?;
                        // SAFETY: The preceding nodes belong to this graph. The parameters point to arguments of the types that the
                        // function expects, and the driver copies them before it returns.
                        driver.check("cuGraphAddKernelNode", unsafe { add(out, graph, before, count, kernel) })
                    },
                )?;
                built.nodes.push(node.expose_provenance());
            }
            let nodes = built.nodes.len();
            last_of.push(first.max(nodes.saturating_sub(chains))..nodes);
        }
        let mut exec: CUgraphExec = std::ptr::null_mut();
        // SAFETY: The driver writes to a variable that outlives the call.
        driver.check("cuGraphInstantiateWithFlags", unsafe { instantiate(&mut exec, graph, 0) })?;
        built.exec = exec.expose_provenance();
        Ok(built)
    }

    /// Changes the addresses in all nodes of the executable graph to those of `execution`. Launches in progress are not affected.
    pub fn repoint(&self, execution: &Execution<'_>, lanes: &[GraphLane<'_>]) -> Result<(), BackendError> {
        let (driver, exec): (_, CUgraphExec) = (self.driver, handle(self.exec));
        let works = execution.program.ops.iter().flat_map(|op| {
            let lane = &lanes[op.lane.0 as usize];
            works(op, lane.kernel.is_some()).map(move |work| (lane, work))
        });
        self.nodes.iter().zip(works).try_for_each(|(node, (lane, work))| {
            lane.with_parameters(
                execution,
                work,
                // SAFETY: The node belongs to the graph from which the exec was instantiated. The driver reads the parameters before it
                // returns.
                |copy| unsafe { call!(driver, cuGraphExecMemcpyNodeSetParams(exec, handle(*node), copy, lane.primary.context())) },
                |kernel| {
                    let set = driver.cuGraphExecKernelNodeSetParams.ok_or_else(no_kernels)?;
                    // SAFETY: The node belongs to the graph from which the exec was instantiated. The node was created with the same
                    // function, because the choice of function depends only on the number of segments.
                    driver.check("cuGraphExecKernelNodeSetParams", unsafe { set(exec, handle(*node), kernel) })
                },
            )
        })
    }

    /// True if the nodes of the executable graph have the addresses of `execution`. The function compares the identities of the address
    /// lists instead of the addresses, because another allocation may have got the same address later.
    pub fn is_bound_to(&self, execution: &Execution<'_>) -> bool {
        Arc::ptr_eq(&self.endpoints, execution.endpoints) && Arc::ptr_eq(&self.rings, execution.rings)
    }

    /// True if an address in the executable graph equals the address of `execution` at the same position, but was stored for another
    /// allocation, which has been freed since. `memory` contains the identifiers of the execution's allocations.
    pub fn has_address_of_other(&self, execution: &Execution<'_>, memory: &[u64]) -> bool {
        let before = self.endpoints.iter().flat_map(|ends| [ends.dst, ends.src]).zip(&*self.memory);
        let now = execution.endpoints.iter().flat_map(|ends| [ends.dst, ends.src]).zip(memory);
        before.zip(now).any(|(before, now)| before.0 == now.0 && before.1 != now.1)
    }

    /// True if the last launch of the executable graph is known to have been in the stream `caller`.
    pub fn was_last_in(&self, caller: Caller) -> bool {
        self.last.as_ref().is_some_and(|last| last.stream.is(caller))
    }

    pub fn seen(&self, execution: &Execution<'_>, caller: Caller) -> Seen {
        Seen {
            same_addresses: self.is_bound_to(execution),
            same_stream: self.was_last_in(caller),
            number: self.last.as_ref().map_or(0, |last| last.number),
        }
    }

    /// Returns the executable graph without its spare completion object, because the graph will not be launched again.
    pub fn retired(mut self) -> Exec {
        self.spare = None;
        self
    }

    /// Drops the executable graph without destroying it in the driver.
    pub fn leave(mut self) {
        (self.exec, self.graph) = (0, 0);
    }

    pub fn forget_launches(&mut self) {
        self.last = None;
        self.spare = None;
    }

    /// True if the last launch of the executable graph has finished, with or without an error, or if there was none.
    pub fn is_idle(&self) -> bool {
        let Some(Launch { end, .. }) = &self.last else { return true };
        // SAFETY: `end` belongs to this exec and keeps the event valid.
        end.is_known_done() || unsafe { (self.driver.cuEventQuery)(end.event()) } != code::NOT_READY
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        // SAFETY: `new` created the graph and the exec. They are idle and have no other users.
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

/// Returns the error for a driver that does not support kernel nodes in graphs.
fn no_kernels() -> BackendError {
    BackendError::NotSupported("the driver does not support kernel nodes in graphs".into())
}
