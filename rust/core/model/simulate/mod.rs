//! A discrete-event simulator: programs run on a [`Machine`] in virtual time.
//!
//! Where [`finish`](super::finish) bounds a plan by a few sums, the simulator runs it: host threads issue operations one by one, lanes do
//! them in order, events hand over between lanes, and at every moment all copies at work share every link and resource max-min fairly. The
//! same rules as the engine's and the CUDA backend's give the order: executions of one stream follow each other, executions that share
//! staging memory do too, lanes fork from the caller's stream and join it.
//!
//! Times are the model's and nothing else's; `docs/reference/simulator.md` says where they are wrong:
//!
//! - Issuing on streams takes `issue` per operation, `batch_segment` per segment of a batched copy; a graph
//!   `graph_launch + graph_node·(copies−1)`, the first time `graph_instantiate·copies` more.
//! - The first byte comes after issue and `copy`, `batch + batch_segment·segments` or `kernel + kernel_segment·segments`, then each hop's latency.
//! - Lanes run in order. An operation that waits for another lane, or is waited for, starts `chunk_via_host` after the last of what it waits for;
//!   others `issue` after the previous one, in a graph `graph_gap`. The first lane is the caller's; others fork from
//!   it and join it, half of `fork_join_staged` each where chunks are handed over, of `fork_join_gpus` between GPUs, and of nothing in one GPU.
//! - Rings lie in a bounded arena per device; executions whose slots overlap follow each other, `fork_join_staged/2` apart. 32 MiB of all rings in
//!   use, of whichever process, stay in the cache and draw `staged`; the rest draws as plain copies do.
//! - Links are shared max-min fairly at every moment (Bertsekas and Gallager, *Data Networks*, 6.5.2); a kernel draws `1/kernel_efficiency` per byte.
//!
//! Pure: no backend, no clock. The same scenario gives the same result to the last bit.
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

/// How operations are issued.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Executor {
    /// Each by itself on a stream: `issue` seconds of the host thread for each.
    Streams,
    /// All as one graph, instantiated before: `graph` for the launch and `graph_node` for each further copy.
    Graph,
    /// A graph that is built and instantiated first: `graph_instantiate` for each copy comes before the launch.
    FirstGraph,
}

impl Executor {
    /// What the CUDA backend does with a plan of this `executor`.
    pub fn of(engine: Engine) -> Executor {
        if engine == Engine::Graph { Executor::Graph } else { Executor::Streams }
    }
}

/// A program bound to transfers and to staging memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Bound(usize);

/// An execution, by its place in the order of submission: index into [`Simulation::executions`].
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ExecutionId(pub usize);

/// Why a scenario cannot be run.
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

/// What is run: bound programs, and what each host thread does in order. Streams, threads and staging are as in the engine.
#[derive(Clone, Debug)]
pub struct Scenario<'a> {
    machine: &'a Machine,
    staging: Arenas,
    bound: u64,
    users: Users,
    programs: Vec<BoundProgram<'a>>,
    executions: Vec<Submitted>,
    threads: Vec<Vec<Action>>,
    /// The last execution of each stream.
    last: Vec<(u32, usize)>,
}

#[derive(Clone, Debug)]
struct BoundProgram<'a> {
    program: &'a Program,
    /// For each operation what it moves along each route. Copies of one operation along one route go together.
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
    /// The part of its links' rate that it has: less than 1 where the driver stages pageable memory.
    part: f64,
}

#[derive(Clone, Debug)]
struct Submitted {
    bound: usize,
    executor: Executor,
    /// Executions whose end it has to wait for, and whether in its own stream.
    after: Vec<(usize, bool)>,
    /// Seconds of a kernel before it in its stream; 0 for none.
    kernel: f64,
}

#[derive(Copy, Clone, Debug)]
enum Action {
    Execute(usize),
    Wait(usize),
}

impl<'a> Scenario<'a> {
    /// Nothing to run yet. `staging_bytes` is the bound of staging memory on each device.
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

    /// Binds a program to transfers, as making a plan does: its rings get their place in staging memory. Binding it again is another plan
    /// of the same shape, for other buffers, with a place of its own while there is room.
    pub fn bind(&mut self, program: &'a Program, shapes: &[Shape]) -> Result<Bound, SimulationError> {
        self.bind_in(0, program, shapes)
    }

    /// The same in context `context`. Each context, one in each process say, has staging memory of its own.
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
            // A kernel takes what passes between two other GPUs in by its own links and out again.
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

    /// Host thread 0 executes a bound program in `stream`: see [`Scenario::execute_on`].
    pub fn execute(&mut self, program: Bound, executor: Executor, stream: u32) -> ExecutionId {
        self.execute_on(0, program, executor, stream)
    }

    /// Host thread `thread` executes a bound program in `stream`, after all that the thread did before. The execution starts after earlier
    /// ones of the stream, and after earlier ones that use the same staging bytes. "Earlier" is the order of these calls. `program` was
    /// bound in this scenario.
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

    /// A kernel of so many seconds comes before an execution, in its stream, launched by its thread. It takes nothing of links and host memory.
    pub fn compute(&mut self, execution: ExecutionId, seconds: f64) {
        self.executions[execution.0].kernel = seconds;
    }

    /// Host thread `thread` does nothing until an execution is done.
    pub fn wait(&mut self, thread: usize, execution: ExecutionId) {
        self.thread(thread).push(Action::Wait(execution.0));
    }

    fn thread(&mut self, thread: usize) -> &mut Vec<Action> {
        if self.threads.len() <= thread {
            self.threads.resize(thread + 1, Vec::new());
        }
        &mut self.threads[thread]
    }

    /// Runs it.
    pub fn run(&self) -> Simulation {
        run::Run::new(self).until_done(None)
    }

    /// Seconds until the last execution is done; the same as [`Scenario::run`] says, for less where nothing else is asked.
    pub fn seconds(&self) -> f64 {
        run::Run::new(self).seconds()
    }

    /// Runs it, and shows every stretch of time in which all rates were constant and something moved.
    pub fn run_observed(&self, mut observe: impl FnMut(&Segment<'_>)) -> Simulation {
        run::Run::new(self).until_done(Some(&mut observe))
    }
}

/// A stretch of time in which all rates are constant.
#[derive(Debug)]
pub struct Segment<'a> {
    /// Seconds.
    pub begin: f64,
    /// Seconds.
    pub end: f64,
    /// What moves.
    pub flows: &'a [SegmentFlow],
}

/// Bytes on the way in a [`Segment`].
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct SegmentFlow {
    /// Where they come from.
    pub from: DeviceId,
    /// Where they go.
    pub to: DeviceId,
    /// Bytes/s.
    pub rate: f64,
    /// Capacity that a byte/s of it draws on each resource of its route: 1, or more where a kernel does not use all that it occupies.
    pub draw: f64,
    /// The part of them that is staged in the cache of host memory, and draws on each resource what
    /// [`Resource::draw`](crate::topology::Resource::draw) says.
    pub staged: f64,
}
