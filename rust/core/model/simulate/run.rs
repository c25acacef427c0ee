//! Event loop of the simulator. It starts each operation when all of the operation's conditions are met.
//!
//! An operation starts when its last condition is met. The conditions are: the operation has been issued, the previous operation on its
//! lane (internal stream) has ended, the operations that it waits for on other lanes have ended, and its lane has started. Each condition
//! has a delay that follows it. The start time is therefore the largest sum of the time at which a condition is met and its delay.

use super::report::{self, ExecutionTimes, OpTimes, Use};
use super::{Action, Executor, Scenario, Segment, SegmentFlow, Simulation, Stretch};
use crate::model::max_min::{FlowRate, MaxMin};
use crate::model::{BOTH_WAYS, HOST_RINGS, thread_rate};
use crate::program::{Gpus, Mechanism, Op, Place, Program};
use crate::topology::{Costs, DeviceId};
use std::borrow::{Borrow, BorrowMut};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// Largest relative difference of two end times that are treated as equal, so that rounding does not separate them.
const SAME_MOMENT: f64 = 1e-12;

pub(super) type Observe<'o> = &'o mut dyn FnMut(&Segment<'_>);

/// Dependencies of a program's operations, shared by all executions of the program.
struct OpOrder {
    /// Dependencies of each operation, by its index in the program.
    ops: Vec<Links>,
    /// Operations that wait for another internal stream, grouped by the operation that they wait for; see [`Links::awaited_by`].
    waiting: Vec<u32>,
}

#[derive(Clone, Default)]
struct Links {
    lane: u32,
    first: bool,
    next_on_lane: Option<u32>,
    /// Operations that wait for this operation, as a range of [`OpOrder::waiting`].
    awaited_by: std::ops::Range<usize>,
    /// Number of operations in other internal streams that this operation waits for.
    awaits: u32,
    /// True if the operation waits for another internal stream, or if another internal stream waits for the operation.
    hands_over: bool,
    /// Device in whose memory the operation writes or reads staged data; `None` if it uses no staging slot.
    staged_in: Option<DeviceId>,
}

impl Links {
    /// Returns the delay between the end of an awaited operation and the start of this operation, seconds.
    fn chunk_gap(&self, costs: &Costs) -> f64 {
        if self.staged_in.is_some_and(|device| !device.is_host()) { costs.chunk_via_gpu } else { costs.chunk_via_host }
    }
}

impl OpOrder {
    fn new(program: &Program) -> OpOrder {
        let mut ops: Vec<Links> = Vec::with_capacity(program.ops.len());
        let mut last: Vec<Option<usize>> = vec![None; program.lanes.len()];
        let mut waits: Vec<(u32, u32)> = Vec::new();
        for (index, op) in program.ops.iter().enumerate() {
            let lane = op.lane.0;
            let before = last[lane as usize].replace(index);
            ops.push(Links { lane, first: before.is_none(), staged_in: staged_in(program, op), ..Links::default() });
            if let Some(before) = before {
                ops[before].next_on_lane = Some(index as u32);
            }
            // Operations on one internal stream are ordered anyway.
            for before in op.after.iter().filter(|before| program.ops[before.0 as usize].lane != op.lane) {
                waits.push((before.0, index as u32));
                ops[index].awaits += 1;
                ops[index].hands_over = true;
                ops[before.0 as usize].hands_over = true;
            }
        }
        waits.sort_unstable();
        let mut begin = 0;
        for group in waits.chunk_by(|a, b| a.0 == b.0) {
            ops[group[0].0 as usize].awaited_by = begin..begin + group.len();
            begin += group.len();
        }
        OpOrder { ops, waiting: waits.into_iter().map(|wait| wait.1).collect() }
    }
}

/// Costs of an execution's lanes (internal streams) beyond the first; see [`lane_costs`].
#[derive(Copy, Clone, Default)]
struct LaneCosts {
    /// Time to fork the lanes from the caller's stream and to join them to it again, seconds. One half is spent before the lanes start, and
    /// the other half after they end.
    fork_join: f64,
    /// GPU that issues all copies, if the model assigns no cost to forking and joining the lanes. `None` if each lane's own GPU issues the
    /// copies of the lane.
    home: Option<DeviceId>,
}

/// Returns the costs of the lanes (internal streams) of an execution.
///
/// If operations wait for operations of other lanes, forking and joining costs `fork_join_staged`. Other lanes are free if they are streams
/// of one GPU that may issue all of them. That GPU then reads the data that other GPUs would otherwise write. In other cases the cost is
/// `fork_join_gpus`, plus `issue` for each GPU beyond the second, because streams of different GPUs need events to wait for each other. A
/// graph always needs such synchronisation if its lanes belong to different GPUs: copies in both directions of 1, 4 and 16 MiB took 14.2,
/// 22.5 and 56 us on streams of one GPU, and 16.2, 25 to 30 and 61 to 63 us as a graph (two H200).
fn lane_costs(scenario: &Scenario<'_>, submitted: &super::Submitted, shape: &OpOrder) -> LaneCosts {
    let (costs, lanes) = (scenario.machine.costs(), &scenario.programs[submitted.bound].program.lanes);
    if shape.ops.iter().any(|links| links.hands_over) {
        return LaneCosts { fork_join: costs.fork_join_staged, home: None };
    }
    let Some(first) = lanes.first() else { return LaneCosts::default() };
    let may_work = |device: DeviceId| lanes.iter().all(|lane| lane.devices().any(|other| other == device));
    let home = first.devices().find(|device| may_work(*device));
    let is_one = lanes.iter().all(|lane| lane.device == first.device);
    if home.is_some() && (is_one || submitted.executor == Executor::Streams) {
        return LaneCosts { fork_join: 0.0, home };
    }
    let gpus: Gpus = lanes.iter().map(|lane| lane.device).collect();
    LaneCosts { fork_join: costs.fork_join_gpus + costs.issue * gpus.iter().count().saturating_sub(2) as f64, home: None }
}

/// Returns the device of the staging slot that the operation's first copy uses; `None` if it uses none. All copies of an operation belong
/// to one path.
fn staged_in(program: &Program, op: &Op) -> Option<DeviceId> {
    let of = |place: Place| match place {
        Place::Slot { ring, .. } => Some(program.rings[ring.0 as usize].device),
        _ => None,
    };
    op.copies.first().and_then(|copy| of(copy.from).or(of(copy.to)))
}

#[derive(Clone)]
struct OpState {
    execution: u32,
    /// Index of the operation in its program.
    index: u32,
    conditions: u32,
    /// Earliest start of the operation in seconds, according to the conditions met so far. Once all conditions are met, it is the actual
    /// start.
    begin: f64,
    end: f64,
    /// Number of routes on which the operation's data has not arrived yet.
    flows: u32,
}

struct ExecutionState {
    /// Index of the execution's first operation in [`Run::ops`].
    base: usize,
    ops_left: usize,
    /// Number of unmet conditions of the execution: executions that it waits for, and the launch of its kernel.
    conditions: usize,
    /// Start time of the first internal stream, which is the caller's stream, and start time of the other internal streams, seconds.
    start: (f64, f64),
    /// Costs of the internal streams beyond the first.
    lanes: LaneCosts,
    times: ExecutionTimes,
    is_issued: bool,
    /// True if the execution's staging rings are currently counted in [`Run::host_rings`].
    stages: bool,
    is_done: bool,
    /// Executions that wait for this execution. The second value of each entry is true if that execution is in the same stream.
    awaited_by: Vec<(usize, bool)>,
    /// Indices of the host threads that wait for this execution.
    threads: Vec<usize>,
}

/// Data in flight along a route.
struct Active<'a> {
    /// Index in [`Run::ops`] of the operation that moves the data.
    op: u32,
    /// Index of the route among the operation's routes.
    flow: u32,
    /// Host memory in which the data is staged; `None` if it is not staged in a host.
    host: Option<DeviceId>,
    rate: FlowRate<'a>,
    /// Number of bytes still to move.
    left: f64,
    /// Time at which the last byte arrives at the current rate.
    arrival: f64,
}

impl<'a> Borrow<FlowRate<'a>> for Active<'a> {
    fn borrow(&self) -> &FlowRate<'a> {
        &self.rate
    }
}

impl<'a> BorrowMut<FlowRate<'a>> for Active<'a> {
    fn borrow_mut(&mut self) -> &mut FlowRate<'a> {
        &mut self.rate
    }
}

struct Thread {
    next: usize,
    time: f64,
}

#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// Data of an operation starts to move along one of its routes.
    Start { op: u32, flow: u32 },
    /// An execution ends.
    Done(u32),
}

/// Event in the queue. The heap returns the earliest event first, and simultaneous events in the order in which they were queued.
struct QueuedEvent {
    time: f64,
    number: u64,
    event: Event,
}

impl Ord for QueuedEvent {
    fn cmp(&self, other: &Self) -> Ordering {
        other.time.total_cmp(&self.time).then(other.number.cmp(&self.number))
    }
}
impl PartialOrd for QueuedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for QueuedEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for QueuedEvent {}

pub(super) struct Run<'s, 'a> {
    scenario: &'s Scenario<'a>,
    costs: &'a Costs,
    /// Dependencies of the operations of each bound program.
    shapes: Vec<OpOrder>,
    executions: Vec<ExecutionState>,
    ops: Vec<OpState>,
    threads: Vec<Thread>,
    events: BinaryHeap<QueuedEvent>,
    entered: u64,
    now: f64,
    /// Flows that currently move data.
    active: Vec<Active<'a>>,
    /// Start of the current interval, in which the rates of all flows are constant, seconds.
    since: f64,
    /// Earliest time at which the last byte of an active flow arrives, at the current rates.
    arrival: f64,
    changed: bool,
    rates: MaxMin<'a>,
    /// Total size in bytes of the rings that executions of all processes currently use, for each host memory.
    host_rings: Vec<u64>,
    uses: Vec<Use>,
    /// Rate at which one CPU thread copies between pageable and pinned memory, bytes/s.
    thread_rate: f64,
}

impl<'s, 'a> Run<'s, 'a> {
    pub fn new(scenario: &'s Scenario<'a>) -> Self {
        let shapes: Vec<OpOrder> = scenario.programs.iter().map(|bound| OpOrder::new(bound.program)).collect();
        let mut ops = Vec::new();
        let mut executions: Vec<ExecutionState> = Vec::with_capacity(scenario.executions.len());
        for (index, submitted) in scenario.executions.iter().enumerate() {
            let shape = &shapes[submitted.bound];
            let state = |(op, links): (usize, &Links)| OpState {
                execution: index as u32,
                index: op as u32,
                // The conditions are: the operation is issued; the previous operation on its internal stream has ended, or the stream has
                // started; and the awaited operations have ended.
                conditions: 2 + links.awaits,
                begin: 0.0,
                end: 0.0,
                flows: scenario.programs[submitted.bound].flows[op].len() as u32,
            };
            executions.push(ExecutionState {
                base: ops.len(),
                ops_left: shape.ops.len(),
                // The execution also waits for the launch of its kernel.
                conditions: submitted.after.len() + usize::from(submitted.kernel > 0.0),
                start: (0.0, 0.0),
                lanes: lane_costs(scenario, submitted, shape),
                times: ExecutionTimes::default(),
                is_issued: false,
                stages: false,
                is_done: false,
                awaited_by: Vec::new(),
                threads: Vec::new(),
            });
            ops.extend(shape.ops.iter().enumerate().map(state));
            for &(before, same_stream) in &submitted.after {
                executions[before].awaited_by.push((index, same_stream));
            }
        }
        Run {
            scenario,
            costs: scenario.machine.costs(),
            shapes,
            executions,
            ops,
            threads: scenario.threads.iter().map(|_| Thread { next: 0, time: 0.0 }).collect(),
            events: BinaryHeap::new(),
            entered: 0,
            now: 0.0,
            active: Vec::new(),
            since: 0.0,
            arrival: f64::INFINITY,
            changed: false,
            rates: MaxMin::new(scenario.machine.resources()),
            host_rings: vec![0; scenario.machine.host_count() as usize],
            uses: vec![Use::default(); scenario.machine.resources().len()],
            thread_rate: thread_rate(scenario.machine),
        }
    }

    /// Runs the scenario and returns its result. Calls `observe`, if given, for each interval in which all rates are constant.
    pub fn until_done(mut self, observe: Option<Observe<'_>>) -> Simulation {
        self.run_to_end(observe);
        let ops = self.ops.iter().map(|op| OpTimes { execution: op.execution as usize, index: op.index, begin: op.begin, end: op.end });
        let executions = self.executions.iter().map(|execution| execution.times).collect();
        report::report(self.scenario, ops.collect(), executions, &self.uses)
    }

    /// Runs the scenario and returns the time at which the last execution is done, in seconds.
    pub fn seconds(mut self) -> f64 {
        self.run_to_end(None);
        self.executions.iter().map(|execution| execution.times.done).fold(0.0, f64::max)
    }

    fn run_to_end(&mut self, mut observe: Option<Observe<'_>>) {
        for execution in 0..self.executions.len() {
            if self.executions[execution].conditions == 0 {
                self.start_lanes(execution);
            }
        }
        for thread in 0..self.threads.len() {
            self.issue(thread);
        }
        loop {
            let event = self.events.peek().map_or(f64::INFINITY, |entry| entry.time);
            let next = event.min(self.arrival);
            if next == f64::INFINITY {
                break;
            }
            self.now = self.now.max(next);
            if self.arrival <= self.now * (1.0 + SAME_MOMENT) {
                self.advance(&mut observe);
                self.arrive();
            }
            while let Some(entry) = self.events.peek().filter(|entry| entry.time <= self.now) {
                let event = entry.event;
                self.events.pop();
                match event {
                    Event::Start { op, flow } => self.start_flow(op, flow, &mut observe),
                    Event::Done(execution) => self.done(execution as usize),
                }
            }
            if self.changed {
                self.share();
            }
        }
    }

    fn enter(&mut self, time: f64, event: Event) {
        self.entered += 1;
        self.events.push(QueuedEvent { time, number: self.entered, event });
    }

    /// Records that a condition of `op` is met. `time` is the earliest start that this condition allows.
    fn met(&mut self, op: usize, time: f64) {
        let state = &mut self.ops[op];
        state.begin = state.begin.max(time);
        state.conditions -= 1;
        if state.conditions > 0 {
            return;
        }
        let begin = state.begin;
        let (index, execution) = (state.index as usize, state.execution as usize);
        let scenario = self.scenario;
        for (flow, stretch) in scenario.programs[scenario.executions[execution].bound].flows[index].iter().enumerate() {
            let by_thread = scenario.programs[scenario.executions[execution].bound].program.ops[index].mechanism == Mechanism::Thread;
            let copies = if by_thread { stretch.bytes as f64 / self.thread_rate } else { 0.0 };
            self.enter(begin + stretch.route.latency + copies, Event::Start { op: op as u32, flow: flow as u32 });
        }
    }

    /// Runs a host thread until it has to wait for an execution or has no more actions.
    fn issue(&mut self, thread: usize) {
        let scenario = self.scenario;
        while let Some(&action) = scenario.threads[thread].get(self.threads[thread].next) {
            let time = self.threads[thread].time;
            match action {
                Action::Wait(execution) if !self.executions[execution].is_done => {
                    self.executions[execution].threads.push(thread);
                    return;
                }
                Action::Wait(execution) => self.threads[thread].time = time.max(self.executions[execution].times.done),
                Action::Execute(execution) => self.threads[thread].time = self.issue_execution(execution, time),
            }
            self.threads[thread].next += 1;
        }
    }

    /// Issues all operations of an execution, starting at `time`. Returns the time at which the thread is free again.
    fn issue_execution(&mut self, execution: usize, time: f64) -> f64 {
        let scenario = self.scenario;
        let submitted = &scenario.executions[execution];
        let program = scenario.programs[submitted.bound].program;
        let base = self.executions[execution].base;
        let Costs {
            copy,
            issue,
            pull,
            batch,
            batch_segment,
            kernel,
            kernel_segment,
            graph_launch: graph,
            graph_node,
            graph_instantiate: graph_first_node,
            ..
        } = *self.costs;
        let as_graph = submitted.executor != Executor::Streams;
        let LaneCosts { fork_join: join, home } = self.executions[execution].lanes;
        let mut at = time;
        if submitted.kernel > 0.0 {
            self.come_after(execution, (time + kernel, time + kernel));
            at += issue;
        }
        if submitted.executor == Executor::FirstGraph {
            at += graph_first_node * program.ops.iter().map(|op| op.copies.len()).sum::<usize>() as f64;
        }
        for (index, op) in program.ops.iter().enumerate() {
            let copies = op.copies.len() as f64;
            let (head, calls) = match op.mechanism {
                Mechanism::Copy | Mechanism::Batch if as_graph => (copy, graph_node * copies),
                Mechanism::Copy if home.is_some_and(|home| home != program.lanes[op.lane.0 as usize].device) => (copy + pull, issue),
                Mechanism::Copy => (copy, issue),
                Mechanism::Batch => (batch + batch_segment * copies, issue + batch_segment * copies),
                // The host thread issues nothing here, because copy threads that already run make the copies.
                Mechanism::Thread => (0.0, 0.0),
                Mechanism::Kernel => (kernel + kernel_segment * copies, if as_graph { graph_node } else { issue }),
            };
            let links = &self.shapes[submitted.bound].ops[index];
            let fork = if links.first && links.lane > 0 { join / 2.0 } else { 0.0 };
            let hand_over = if links.hands_over { links.chunk_gap(self.costs) } else { 0.0 };
            self.met(base + index, at + head + fork + hand_over);
            at += calls;
        }
        // The cost of the graph launch includes the first node.
        if as_graph && !program.ops.is_empty() {
            at += graph - graph_node;
        }
        let state = &mut self.executions[execution];
        (state.times.issue, state.times.issued, state.is_issued) = (time, at, true);
        self.finish_if_empty(execution);
        at
    }

    /// Finishes an execution that has no operations, once it is issued and its conditions are met.
    fn finish_if_empty(&mut self, execution: usize) {
        let ExecutionState { ops_left, conditions, is_issued, start, times, .. } = self.executions[execution];
        if ops_left == 0 && conditions == 0 && is_issued {
            self.enter(times.issued.max(start.0).max(self.now), Event::Done(execution as u32));
        }
    }

    /// Records that a condition of an execution is met. `times` are the earliest start times of its first internal stream and of the
    /// others. After the last condition, the execution's kernel runs and then its internal streams start.
    fn come_after(&mut self, execution: usize, times: (f64, f64)) {
        let (issue, join) = (self.costs.issue, self.executions[execution].lanes.fork_join);
        let kernel = self.scenario.executions[execution].kernel;
        let state = &mut self.executions[execution];
        state.start = (state.start.0.max(times.0), state.start.1.max(times.1));
        state.conditions -= 1;
        if state.conditions == 0 {
            if kernel > 0.0 {
                let end = state.start.0 + kernel;
                state.start = (end + issue, end + join / 2.0);
            }
            self.start_lanes(execution);
        }
    }

    /// Starts the internal streams of an execution whose conditions are all met.
    fn start_lanes(&mut self, execution: usize) {
        let bound = self.scenario.executions[execution].bound;
        let ExecutionState { base, start, .. } = self.executions[execution];
        for index in 0..self.shapes[bound].ops.len() {
            let links = &self.shapes[bound].ops[index];
            if links.first {
                let hand_over = if links.hands_over { links.chunk_gap(self.costs) } else { 0.0 };
                self.met(base + index, hand_over + if links.lane > 0 { start.1 } else { start.0 });
            }
        }
        if self.shapes[bound].ops.is_empty() {
            self.finish_if_empty(execution);
        }
    }

    fn start_flow(&mut self, op: u32, flow: u32, observe: &mut Option<Observe<'_>>) {
        let OpState { execution, index, .. } = self.ops[op as usize];
        let bound = &self.scenario.programs[self.scenario.executions[execution as usize].bound];
        let Stretch { bytes, route, part, .. } = bound.flows[index as usize][flow as usize];
        for resource in &route.resources {
            self.uses[resource.0 as usize].bytes += bytes;
        }
        // The use of host memory by copy threads, and their contention with copy engines, are not modelled.
        if route.resources.is_empty() || bytes == 0 || bound.program.ops[index as usize].mechanism == Mechanism::Thread {
            return self.flow_ended(op as usize);
        }
        self.advance(observe);
        let kernel = bound.program.ops[index as usize].mechanism == Mechanism::Kernel;
        let flows = &bound.flows[index as usize];
        let both_ways = if flows.iter().any(|other| other.from != flows[0].from) { BOTH_WAYS } else { 1.0 };
        let draw = if kernel { (self.costs.kernel_efficiency * both_ways).recip() } else { part.recip() };
        let links = &self.shapes[self.scenario.executions[execution as usize].bound].ops[index as usize];
        let host = links.staged_in.filter(|device| device.is_host());
        if host.is_some() && !std::mem::replace(&mut self.executions[execution as usize].stages, true) {
            self.each_host_ring(execution as usize, |all, ring| *all += ring);
        }
        let rate = FlowRate { draw, ..FlowRate::new(&route.resources) };
        self.active.push(Active { op, flow, host, rate, left: bytes as f64, arrival: 0.0 });
        self.changed = true;
    }

    /// Updates [`Run::host_rings`] for each of the execution's staging rings in host memory. `change` adds the size of a ring to the total
    /// or subtracts it.
    fn each_host_ring(&mut self, execution: usize, change: impl Fn(&mut u64, u64)) {
        let program = self.scenario.programs[self.scenario.executions[execution].bound].program;
        for ring in program.rings.iter().filter(|ring| ring.device.is_host()) {
            if let Some(all) = self.host_rings.get_mut(!ring.device.0 as usize) {
                change(all, ring.bytes());
            }
        }
    }

    /// Advances all flows to the current time at the rates that have been constant since the last change.
    fn advance(&mut self, observe: &mut Option<Observe<'_>>) {
        let seconds = self.now - self.since;
        if seconds > 0.0 && !self.active.is_empty() {
            for &r in &self.rates.touched {
                let load = self.rates.load(r);
                let of = &mut self.uses[r as usize];
                of.busy += seconds;
                of.drawn += seconds * load;
                of.peak = of.peak.max(load);
            }
            for flow in &mut self.active {
                flow.left -= flow.rate.rate * seconds;
            }
            if let Some(observe) = observe {
                let flows: Vec<SegmentFlow> = self.active.iter().map(|flow| self.shown(flow)).collect();
                observe(&Segment { begin: self.since, end: self.now, flows: &flows });
            }
        }
        self.since = self.now;
    }

    fn shown(&self, flow: &Active<'_>) -> SegmentFlow {
        let OpState { execution, index, .. } = self.ops[flow.op as usize];
        let bound = &self.scenario.programs[self.scenario.executions[execution as usize].bound];
        let Stretch { from, to, .. } = bound.flows[index as usize][flow.flow as usize];
        SegmentFlow { from, to, rate: flow.rate.rate, draw: flow.rate.draw, staged: flow.rate.staged }
    }

    /// Removes flows whose data has arrived by the current time.
    fn arrive(&mut self) {
        let latest = self.now * (1.0 + SAME_MOMENT);
        let mut kept = 0;
        for at in 0..self.active.len() {
            if self.active[at].arrival <= latest {
                self.flow_ended(self.active[at].op as usize);
            } else {
                self.active.swap(kept, at);
                kept += 1;
            }
        }
        self.active.truncate(kept);
        self.changed = true;
    }

    fn share(&mut self) {
        self.changed = false;
        for flow in &mut self.active {
            let rings = flow.host.map(|host| self.host_rings[!host.0 as usize]);
            flow.rate.staged = rings.map_or(0.0, |rings| (HOST_RINGS as f64 / rings as f64).min(1.0));
        }
        self.rates.share(&mut self.active);
        self.arrival = f64::INFINITY;
        for flow in &mut self.active {
            flow.arrival = self.now + flow.left.max(0.0) / flow.rate.rate;
            self.arrival = self.arrival.min(flow.arrival);
        }
    }

    fn flow_ended(&mut self, op: usize) {
        let now = self.now;
        let state = &mut self.ops[op];
        state.flows -= 1;
        if state.flows > 0 {
            return;
        }
        state.end = now;
        let (execution, index) = (state.execution as usize, state.index as usize);
        let Costs { issue, graph_gap, .. } = *self.costs;
        let super::Submitted { bound, executor, .. } = self.scenario.executions[execution];
        let follow = if executor == Executor::Streams { issue } else { graph_gap };
        let base = self.executions[execution].base;
        let links = self.shapes[bound].ops[index].clone();
        if let Some(next) = links.next_on_lane {
            let next_links = &self.shapes[bound].ops[next as usize];
            let gap = if next_links.hands_over { next_links.chunk_gap(self.costs) } else { follow };
            self.met(base + next as usize, now + gap);
        }
        for at in links.awaited_by {
            let waiting = self.shapes[bound].waiting[at] as usize;
            self.met(base + waiting, now + self.shapes[bound].ops[waiting].chunk_gap(self.costs));
        }
        let join = self.executions[execution].lanes.fork_join;
        let state = &mut self.executions[execution];
        state.times.done = state.times.done.max(now + if links.lane > 0 { join / 2.0 } else { 0.0 });
        state.ops_left -= 1;
        if state.ops_left == 0 {
            let (done, stages) = (state.times.done, state.stages);
            self.enter(done, Event::Done(execution as u32));
            if stages {
                self.each_host_ring(execution, |all, ring| *all -= ring);
            }
        }
    }

    fn done(&mut self, execution: usize) {
        let Costs { issue, fork_join_staged: join, .. } = *self.costs;
        let state = &mut self.executions[execution];
        state.is_done = true;
        let done = self.now;
        state.times.done = done;
        let threads = std::mem::take(&mut state.threads);
        for (next, same_stream) in std::mem::take(&mut state.awaited_by) {
            // In the same stream, the next execution starts like the next operation of an internal stream. An execution in another stream
            // first waits for an event and then forks its internal streams.
            let (own, forked) = if same_stream { (issue, join / 2.0) } else { (join / 2.0, join) };
            self.come_after(next, (done + own, done + forked));
        }
        for thread in threads {
            self.issue(thread);
        }
    }
}
