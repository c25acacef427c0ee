//! Discrete-event simulator: runs programs on a [`Machine`] in virtual time.
//!
//! [`finish`](super::finish) bounds the time of a plan by a few sums; the simulator executes it. Host threads issue operations one by one,
//! lanes execute them in order, and events order operations of different lanes. At every moment, all copies in progress share every link
//! and resource max-min fairly. The order follows the rules of the engine and of the CUDA backend: executions of one stream run one after
//! the other, and so do executions that share staging memory; lanes fork from the caller's stream and join it.
//!
//! All times are modelled; `docs/reference/simulator.md` lists where they are inaccurate:
//!
//! - Issuing on streams takes `issue` per operation, and `batch_segment` per segment of a batched copy. A graph takes
//!   `graph_launch + graph_node·(copies−1)`, and the first time `graph_instantiate·copies` more.
//! - The first byte moves after issue and `copy`, `batch + batch_segment·segments` or `kernel + kernel_segment·segments`, then each hop's
//!   latency.
//! - Lanes run in order. An operation that waits for another lane, or that another lane waits for, starts `chunk_via_host` after the last
//!   operation that it waits for. Other operations start `issue` after the previous one, in a graph `graph_gap`. The first lane is the
//!   caller's stream. The others fork from it and join it, half of `fork_join_staged` each if chunks are handed over, half of `fork_join_gpus`
//!   between GPUs, and at no cost within one GPU.
//! - Rings are placed in a bounded arena per device. Executions whose slots overlap run one after the other, `fork_join_staged/2` apart. Of
//!   all rings in use, of any process, 32 MiB stay in the cache and draw `staged`; the rest draws like plain copies.
//! - Links are shared max-min fairly at every moment (Bertsekas and Gallager, *Data Networks*, 6.5.2). A kernel draws `1/kernel_efficiency`
//!   per byte.
//!
//! The simulator is pure: no backend, no clock. The same scenario gives the same result to the last bit.
//!
//! ```
//! use mpgpu_core::topology::MemoryKind;
//! use mpgpu_core::model::simulate::{Executor, Scenario};
//! use mpgpu_core::plan::{Options, Shape, plan};
//! use mpgpu_core::topology::{self, DeviceId, Machine};
//!
//! let machine = Machine::new(topology::load("beluga")?)?;
//! let kind = MemoryKind::Device;
//! let batch = [Shape { source: 0, dst_device: DeviceId::gpu(1), src_device: DeviceId::gpu(0), dst_kind: kind, src_kind: kind, bytes: 64 << 20 }];
//! let plan = plan(&machine, &batch, &Options::default())?;
//!
//! let mut scenario = Scenario::new(&machine, 64 << 20);
//! let halo = scenario.bind(&plan.program, &batch)?;
//! let done = scenario.execute(halo, Executor::Streams, 0);
//! let run = scenario.run();
//! assert!(run.executions[done.0].done > 0.0 && run.seconds >= run.executions[done.0].done);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod report;
mod run;
mod staging;
mod steady;

pub use report::{ExecutionTimes, ResourceUse, Simulation};
pub use steady::{Rank, Steady, steady};

use crate::program::{Engine, Mechanism, Place, Program, Shape};
use crate::topology::{DeviceId, Machine, MemoryKind, Route};
use smallvec::SmallVec;
use staging::{Arenas, Regions, Users};

/// Way in which operations are issued.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Executor {
    /// One by one on a stream: `issue` seconds of the host thread for each.
    Streams,
    /// One graph with all operations, instantiated before: `graph_launch` for the launch and `graph_node` for each further copy.
    Graph,
    /// One graph that is built and instantiated first: `graph_instantiate` for each copy comes before the launch.
    FirstGraph,
}

impl Executor {
    /// Returns the way in which the CUDA backend issues a plan of this `engine`.
    pub fn of(engine: Engine) -> Executor {
        if engine == Engine::Graph { Executor::Graph } else { Executor::Streams }
    }
}

/// Handle of a program that is bound to transfers and to staging memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Bound(usize);

/// Number of an execution in the order of submission: index into [`Simulation::executions`].
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ExecutionId(pub usize);

/// Reason for which a scenario cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SimulationError {
    #[error("the program moves {program} transfers, and {shapes} shapes were given: give one for each")]
    Transfers { program: usize, shapes: usize },
    #[error("operation {op}: no copy engine can copy from {from} to {to} on this machine: plan for the topology that is simulated")]
    NoRoute { op: usize, from: DeviceId, to: DeviceId },
    #[error("operation {op} moves nothing, or names a transfer, ring, lane or earlier operation that there is not: validate the program")]
    Invalid { op: usize },
    #[error("{device}: the program's rings exceed the staging bound of {bound} bytes: plan with the bound that is simulated")]
    Staging { device: DeviceId, bound: u64 },
}

/// Input of a simulation: bound programs, and the actions of each host thread in order. Streams, threads and staging follow the rules of
/// the engine.
#[derive(Clone, Debug)]
pub struct Scenario<'a> {
    machine: &'a Machine,
    staging: Arenas,
    bound: u64,
    users: Users,
    programs: Vec<BoundProgram<'a>>,
    executions: Vec<Submitted>,
    threads: Vec<Vec<Action>>,
    /// Last execution of each stream.
    last: Vec<(u32, usize)>,
}

#[derive(Clone, Debug)]
struct BoundProgram<'a> {
    program: &'a Program,
    /// Bytes that each operation moves along each route. Copies of one operation along the same route are merged.
    flows: Vec<SmallVec<[Stretch<'a>; 1]>>,
    regions: Regions,
}

/// Bytes along one route.
#[derive(Copy, Clone, Debug)]
struct Stretch<'a> {
    from: DeviceId,
    to: DeviceId,
    bytes: u64,
    route: &'a Route,
    /// Fraction of the links' rate that the copy reaches: less than 1 if the driver stages pageable memory.
    part: f64,
}

#[derive(Clone, Debug)]
struct Submitted {
    bound: usize,
    executor: Executor,
    /// Executions that must end first, with true if they are in the same stream.
    after: Vec<(usize, bool)>,
    /// Time of a kernel in front of it in its stream, seconds; 0 for none.
    kernel: f64,
}

#[derive(Copy, Clone, Debug)]
enum Action {
    Execute(usize),
    Wait(usize),
}

impl<'a> Scenario<'a> {
    /// Creates an empty scenario. `staging_bytes` is the limit of staging memory on each device.
    pub fn new(machine: &'a Machine, staging_bytes: u64) -> Self {
        Scenario {
            machine,
            staging: Arenas::new(staging_bytes),
            bound: staging_bytes,
            users: Users::default(),
            programs: Vec::new(),
            executions: Vec::new(),
            threads: Vec::new(),
            last: Vec::new(),
        }
    }

    /// Binds a program to transfers, as creating a plan does: its rings are placed in staging memory. Binding it again corresponds to
    /// another plan of the same shape for other buffers, with its own rings while there is room.
    pub fn bind(&mut self, program: &'a Program, shapes: &[Shape]) -> Result<Bound, SimulationError> {
        self.bind_in(0, program, shapes)
    }

    /// Binds a program in context `context`. Each context, for example one per process, has its own staging memory.
    pub fn bind_in(&mut self, context: usize, program: &'a Program, shapes: &[Shape]) -> Result<Bound, SimulationError> {
        if program.transfers.len() != shapes.len() {
            return Err(SimulationError::Transfers { program: program.transfers.len(), shapes: shapes.len() });
        }
        let flows = (0..program.ops.len()).map(|op| self.flows(program, shapes, op)).collect::<Result<_, _>>()?;
        let regions =
            self.staging.place(context, &program.rings).map_err(|device| SimulationError::Staging { device, bound: self.bound })?;
        self.programs.push(BoundProgram { program, flows, regions });
        Ok(Bound(self.programs.len() - 1))
    }

    fn flows(&self, program: &Program, shapes: &[Shape], index: usize) -> Result<SmallVec<[Stretch<'a>; 1]>, SimulationError> {
        let invalid = SimulationError::Invalid { op: index };
        let op = &program.ops[index];
        let known = (op.lane.0 as usize) < program.lanes.len() && op.after.iter().all(|before| (before.0 as usize) < index);
        if !known || op.copies.is_empty() {
            return Err(invalid);
        }
        let device = |place: Place| match place {
            Place::Source { transfer, .. } => shapes.get(transfer as usize).map(|shape| shape.src_device),
            Place::Destination { transfer, .. } => shapes.get(transfer as usize).map(|shape| shape.dst_device),
            Place::Slot { ring, .. } => program.rings.get(ring.0 as usize).map(|ring| ring.device),
        };
        let is_pageable = |kind| kind == MemoryKind::Pageable;
        let costs = self.machine.costs();
        let mut flows: SmallVec<[Stretch<'a>; 1]> = SmallVec::new();
        for copy in &op.copies {
            let (Some(from), Some(to)) = (device(copy.from), device(copy.to)) else { return Err(invalid) };
            // A kernel that copies between two other GPUs reads over its own links and writes over them again.
            let kernel_gpu = program.lanes[op.lane.0 as usize].device;
            let part = match (copy.from, copy.to) {
                _ if op.mechanism == Mechanism::Thread => 1.0,
                (Place::Source { transfer, .. }, _) if is_pageable(shapes[transfer as usize].src_kind) && !to.is_host() => {
                    costs.pageable_to_gpu
                }
                (_, Place::Destination { transfer, .. }) if is_pageable(shapes[transfer as usize].dst_kind) && !from.is_host() => {
                    costs.pageable_from_gpu
                }
                _ => 1.0,
            };
            let passes = op.mechanism == Mechanism::Kernel && ![from, to].contains(&kernel_gpu);
            let ways = if passes { [Some((from, kernel_gpu)), Some((kernel_gpu, to))] } else { [Some((from, to)), None] };
            for (from, to) in ways.into_iter().flatten() {
                let Some(route) = self.machine.route(from, to) else { return Err(SimulationError::NoRoute { op: index, from, to }) };
                match flows.iter_mut().find(|flow| (flow.from, flow.to, flow.part) == (from, to, part)) {
                    Some(flow) => flow.bytes += copy.bytes,
                    None => flows.push(Stretch { from, to, bytes: copy.bytes, route, part }),
                }
            }
        }
        Ok(flows)
    }

    /// Executes a bound program in `stream` from host thread 0: see [`Scenario::execute_on`].
    pub fn execute(&mut self, program: Bound, executor: Executor, stream: u32) -> ExecutionId {
        self.execute_on(0, program, executor, stream)
    }

    /// Executes a bound program in `stream` from host thread `thread`, after the thread's earlier actions. The execution starts after
    /// earlier executions in the stream, and after earlier ones that use the same staging bytes. "Earlier" refers to the order of these
    /// calls. `program` must have been bound in this scenario.
    pub fn execute_on(&mut self, thread: usize, program: Bound, executor: Executor, stream: u32) -> ExecutionId {
        let id = self.executions.len();
        let mut after = Vec::new();
        match self.last.iter_mut().find(|last| last.0 == stream) {
            Some(last) => after.push((std::mem::replace(&mut last.1, id), true)),
            None => self.last.push((stream, id)),
        }
        let own = after.first().map(|own: &(usize, bool)| own.0);
        let sharing = self.users.next(&self.programs[program.0].regions, id);
        after.extend(sharing.into_iter().filter(|other| Some(*other) != own).map(|other| (other, false)));
        self.executions.push(Submitted { bound: program.0, executor, after, kernel: 0.0 });
        self.thread(thread).push(Action::Execute(id));
        ExecutionId(id)
    }

    /// Puts a kernel of this duration in front of an execution, in its stream, launched by its thread. The kernel uses no capacity of links
    /// or host memory.
    pub fn compute(&mut self, execution: ExecutionId, seconds: f64) {
        self.executions[execution.0].kernel = seconds;
    }

    /// Makes host thread `thread` wait until an execution is done.
    pub fn wait(&mut self, thread: usize, execution: ExecutionId) {
        self.thread(thread).push(Action::Wait(execution.0));
    }

    fn thread(&mut self, thread: usize) -> &mut Vec<Action> {
        if self.threads.len() <= thread {
            self.threads.resize(thread + 1, Vec::new());
        }
        &mut self.threads[thread]
    }

    /// Runs the scenario.
    pub fn run(&self) -> Simulation {
        run::Run::new(self).until_done(None)
    }

    /// Returns the time until the last execution is done, in seconds. It equals [`Simulation::seconds`] of [`Scenario::run`], and is
    /// cheaper to compute.
    pub fn seconds(&self) -> f64 {
        run::Run::new(self).seconds()
    }

    /// Runs the scenario and calls `observe` for every interval in which all rates are constant and bytes move.
    pub fn run_observed(&self, mut observe: impl FnMut(&Segment<'_>)) -> Simulation {
        run::Run::new(self).until_done(Some(&mut observe))
    }
}

/// Interval of time in which all rates are constant.
#[derive(Debug)]
pub struct Segment<'a> {
    /// Start, seconds.
    pub begin: f64,
    /// End, seconds.
    pub end: f64,
    /// Flows that move in the interval.
    pub flows: &'a [SegmentFlow],
}

/// Flow of bytes in a [`Segment`].
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct SegmentFlow {
    /// Source.
    pub from: DeviceId,
    /// Destination.
    pub to: DeviceId,
    /// Rate in bytes/s.
    pub rate: f64,
    /// Capacity that each byte/s draws on each resource of the route: 1, or more if a kernel does not use all the capacity that it
    /// occupies.
    pub draw: f64,
    /// Fraction of the bytes that is staged in the cache of host memory. Such bytes draw on each resource according to
    /// [`Resource::draw`](crate::topology::Resource::draw).
    pub staged: f64,
}
