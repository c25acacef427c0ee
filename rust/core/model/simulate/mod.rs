//! Discrete-event simulator: runs programs on a [`Machine`] in virtual time.
//!
//! [`finish`](super::finish) computes a lower bound of a plan's time from a few sums. The simulator instead executes every operation of the
//! plan's program. Host threads issue operations one by one. Lanes (internal streams) execute them in order, and events order operations of
//! different lanes. At every moment, all copies in progress share every link and resource max-min fairly. The order follows the rules of
//! the CUDA backend. Executions of one stream run one after the other, and so do executions that share staging memory. Lanes fork from the
//! caller's stream and join it.
//!
//! All times are modelled, with the following rules. Names such as `issue` are fields of [`Costs`](crate::topology::Costs).
//! `docs/reference/simulator.md` lists the known inaccuracies.
//!
//! - Issuing on streams takes `issue` per operation, and `batch_segment` per segment of a batched copy. A graph takes `graph_launch +
//!   graph_node·(copies−1)`. Its first launch also takes `graph_instantiate·copies`.
//! - The first byte of an operation moves after it has been issued, after its startup time, and after each hop's latency. The startup time
//!   is `copy`, `batch + batch_segment·segments` or `kernel + kernel_segment·segments`. A copy that is issued on a stream of the
//!   destination GPU starts `pull` later.
//! - Operations of one lane run in order. An operation that waits for another lane, or that another lane waits for, starts `chunk_via_host`
//!   or `chunk_via_gpu` after the last operation that it waits for. On streams, other operations start `issue` after the previous one; in a
//!   graph, they start `graph_gap` after it.
//! - The first lane is the caller's stream; the others fork from it and join it. This takes `fork_join_staged` if operations wait for other
//!   lanes. If not, it takes `fork_join_gpus` if several GPUs issue the lanes, and no time if one GPU issues all of them.
//! - Staging rings are placed in a bounded arena per device. Executions whose slots overlap run one after the other, `fork_join_staged/2`
//!   apart. At most 32 MiB of the rings that all processes use stay in the processor's cache. Copies of data in this part use
//!   [`staged`](crate::topology::Resource::staged) bytes of capacity per byte; other copies of staged data use as much as direct copies.
//! - Links are shared max-min fairly at every moment (Bertsekas and Gallager, *Data Networks*, 6.5.2). A copy kernel uses
//!   `1/kernel_efficiency` bytes of capacity per byte.
//!
//! The simulator is pure: it uses no backend and no clock. Simulations of the same scenario give bit-identical results.
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

/// Method by which the operations of a program are issued.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Executor {
    /// Operations are issued one by one on streams. Issuing an operation takes the host thread `Costs::issue` seconds.
    Streams,
    /// All operations are launched as one graph that has been instantiated earlier. The launch takes `Costs::graph_launch`, plus
    /// `Costs::graph_node` for each copy after the first.
    Graph,
    /// All operations are launched as one graph that is built and instantiated first. Instantiation takes `Costs::graph_instantiate` for
    /// each copy, before the launch.
    FirstGraph,
}

impl Executor {
    /// Returns the method by which the CUDA backend issues a plan with this engine (execution method).
    pub fn of(engine: Engine) -> Executor {
        if engine == Engine::Graph { Executor::Graph } else { Executor::Streams }
    }
}

/// Handle of a program that has been bound to transfers and to staging memory by [`Scenario::bind`].
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Bound(usize);

/// Index of an execution in the order of submission, into [`Simulation::executions`].
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ExecutionId(pub usize);

/// Reason why a scenario cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SimulationError {
    #[error("the compiled plan (program) moves {program} transfers, but {shapes} shapes were given: give one for each transfer")]
    Transfers { program: usize, shapes: usize },
    #[error("operation {op}: no copy engine can copy from {from} to {to} on this machine: plan for the topology that is simulated")]
    NoRoute { op: usize, from: DeviceId, to: DeviceId },
    #[error("operation {op} moves nothing, or names a transfer, ring, lane or earlier operation that does not exist: validate the program")]
    Invalid { op: usize },
    #[error("{device}: the staging buffers of the plan exceed the limit of {bound} bytes: plan with the limit that is simulated")]
    Staging { device: DeviceId, bound: u64 },
}

/// Input of a simulation: bound programs, and the actions of each host thread in order.
#[derive(Clone, Debug)]
pub struct Scenario<'a> {
    machine: &'a Machine,
    staging: Arenas,
    bound: u64,
    users: Users,
    programs: Vec<BoundProgram<'a>>,
    executions: Vec<Submitted>,
    threads: Vec<Vec<Action>>,
    /// Last execution of each stream. Each entry holds the ID of the stream and the index of the execution.
    last: Vec<(u32, usize)>,
}

#[derive(Clone, Debug)]
struct BoundProgram<'a> {
    program: &'a Program,
    /// Data that each operation moves along each route. Copies of one operation along the same route are merged.
    flows: Vec<SmallVec<[Stretch<'a>; 1]>>,
    regions: Regions,
}

/// Data that an operation moves along one route.
#[derive(Copy, Clone, Debug)]
struct Stretch<'a> {
    from: DeviceId,
    to: DeviceId,
    bytes: u64,
    route: &'a Route,
    /// Fraction of the links' rate that the copy reaches; less than 1 if the driver stages pageable memory for it.
    part: f64,
}

#[derive(Clone, Debug)]
struct Submitted {
    bound: usize,
    executor: Executor,
    /// Executions that must end before this execution starts. The second value of each entry is true if that execution is in the same
    /// stream.
    after: Vec<(usize, bool)>,
    /// Duration of a kernel that runs before the execution in its stream, seconds; 0 for no kernel.
    kernel: f64,
}

#[derive(Copy, Clone, Debug)]
enum Action {
    Execute(usize),
    Wait(usize),
}

impl<'a> Scenario<'a> {
    /// Creates an empty scenario. `staging_bytes` is the limit of staging memory on each device, in bytes.
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

    /// Binds a program to transfers and places its rings in staging memory, as the creation of a plan does. Binding the same program again
    /// corresponds to creating another plan of the same transfers for other buffers. The new plan gets separate rings if enough staging
    /// memory is available.
    pub fn bind(&mut self, program: &'a Program, shapes: &[Shape]) -> Result<Bound, SimulationError> {
        self.bind_in(0, program, shapes)
    }

    /// Binds a program to transfers in context `context`. Each context, for example one per process, has its own staging memory.
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
            // A kernel that copies between two other GPUs reads the data over its own GPU's links and writes it over them again.
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
    /// earlier executions in the stream, and after earlier executions that use the same range of staging memory. "Earlier" refers to the
    /// order of these calls. `program` must have been bound in this scenario.
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

    /// Inserts a kernel of this duration before an execution, in the execution's stream. The execution's host thread launches it. The
    /// kernel uses no capacity of links or host memory.
    pub fn compute(&mut self, execution: ExecutionId, seconds: f64) {
        self.executions[execution.0].kernel = seconds;
    }

    /// Makes host thread `thread` wait until `execution` is done.
    pub fn wait(&mut self, thread: usize, execution: ExecutionId) {
        self.thread(thread).push(Action::Wait(execution.0));
    }

    fn thread(&mut self, thread: usize) -> &mut Vec<Action> {
        if self.threads.len() <= thread {
            self.threads.resize(thread + 1, Vec::new());
        }
        &mut self.threads[thread]
    }

    /// Runs the scenario and returns its result.
    pub fn run(&self) -> Simulation {
        run::Run::new(self).until_done(None)
    }

    /// Returns the time until the last execution is done, in seconds. It equals [`Simulation::seconds`] of the result of [`Scenario::run`],
    /// and is cheaper to compute.
    pub fn seconds(&self) -> f64 {
        run::Run::new(self).seconds()
    }

    /// Runs the scenario, returns its result, and calls `observe` for every interval in which all rates are constant and data moves.
    pub fn run_observed(&self, mut observe: impl FnMut(&Segment<'_>)) -> Simulation {
        run::Run::new(self).until_done(Some(&mut observe))
    }
}

/// Interval of simulated time in which all rates are constant.
#[derive(Debug)]
pub struct Segment<'a> {
    /// Start of the interval, seconds.
    pub begin: f64,
    /// End of the interval, seconds.
    pub end: f64,
    /// Flows that move data during the interval.
    pub flows: &'a [SegmentFlow],
}

/// Flow of data during a [`Segment`].
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct SegmentFlow {
    /// Device that the data comes from.
    pub from: DeviceId,
    /// Device that the data goes to.
    pub to: DeviceId,
    /// Rate of the flow, bytes/s.
    pub rate: f64,
    /// Capacity that each byte/s of the flow uses on each resource of its route. It is 1, or more if a kernel or the driver's copy of
    /// pageable memory occupies more capacity than the data needs.
    pub draw: f64,
    /// Fraction of the data that stays in the processor's cache between the two hops of a staged path.
    /// [`Resource::draw`](crate::topology::Resource::draw) computes the capacity that the data then uses.
    pub staged: f64,
}
