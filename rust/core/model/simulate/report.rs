//! Result of a simulation: times of executions, use of resources, and the timeline.

use super::Scenario;
use crate::model::timeline::{Arrow, Span, Timeline, TimelineLane};
use crate::topology::{DeviceId, ResourceId};
use crate::units::size;

/// Result of a simulated scenario.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// Time from 0 to the end of the last execution, seconds.
    pub seconds: f64,
    /// Times of each execution, in the order of submission.
    pub executions: Vec<ExecutionTimes>,
    /// Use of every resource that carried data, in the order of [`Machine::resources`](crate::topology::Machine::resources).
    pub resources: Vec<ResourceUse>,
    /// Timeline of the operations and of their issuing, for drawing.
    pub timeline: Timeline,
}

/// Times of an execution, in seconds from the start of the scenario.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct ExecutionTimes {
    /// Time at which the host thread begins to issue the execution.
    pub issue: f64,
    /// Time at which the host thread has issued the execution and continues.
    pub issued: f64,
    /// Time at which the host sees that the execution is done: all data has arrived, and the internal streams have joined the caller's
    /// stream.
    pub done: f64,
}

/// Use of one resource during a simulation.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct ResourceUse {
    /// Resource, as an index into [`Machine::resources`](crate::topology::Machine::resources).
    pub resource: ResourceId,
    /// Number of bytes that passed through the resource.
    pub bytes: u64,
    /// Time during which data passed through the resource, seconds.
    pub busy: f64,
    /// Largest capacity used at any moment, bytes/s. It exceeds the rate of the data if a kernel occupies more capacity than the data
    /// needs.
    pub peak: f64,
    /// Mean capacity used over the whole run, bytes/s.
    pub mean: f64,
}

/// Use of a resource, accumulated during a simulation.
#[derive(Clone, Debug, Default)]
pub(super) struct Use {
    pub bytes: u64,
    pub busy: f64,
    /// Capacity used so far, integrated over time, bytes.
    pub drawn: f64,
    pub peak: f64,
}

/// Start and end of one operation.
pub(super) struct OpTimes {
    pub execution: usize,
    /// Index of the operation in its program.
    pub index: u32,
    pub begin: f64,
    pub end: f64,
}

pub(super) fn report(scenario: &Scenario<'_>, ops: Vec<OpTimes>, executions: Vec<ExecutionTimes>, uses: &[Use]) -> Simulation {
    let seconds = executions.iter().map(|execution| execution.done).fold(0.0, f64::max);
    let resources = uses.iter().enumerate().filter(|(_, of)| of.bytes > 0).map(|(index, of)| ResourceUse {
        resource: ResourceId(index as u32),
        bytes: of.bytes,
        busy: of.busy,
        peak: of.peak,
        mean: if seconds > 0.0 { of.drawn / seconds } else { 0.0 },
    });
    let timeline = timeline(scenario, &ops, &executions);
    Simulation { seconds, resources: resources.collect(), executions, timeline }
}

fn timeline(scenario: &Scenario<'_>, ops: &[OpTimes], executions: &[ExecutionTimes]) -> Timeline {
    let mut timeline = Timeline { name: format!("{}, modelled", scenario.machine.topology().name), modelled: true, ..Timeline::default() };
    let threads = scenario.threads.len();
    for (thread, actions) in scenario.threads.iter().enumerate() {
        let name = if threads == 1 { "host thread".to_owned() } else { format!("host thread {thread}") };
        timeline.lanes.push(TimelineLane { name, device: DeviceId::HOST });
        for action in actions {
            if let super::Action::Execute(execution) = *action {
                let times = &executions[execution];
                let name = format!("issue {execution}");
                timeline.spans.push(Span { lane: thread, op: None, name, begin: times.issue, end: times.issued, bytes: 0 });
            }
        }
    }
    // For each execution: index of its first row (`lanes`), and index of its first bar (`spans`) in the timeline.
    let mut lanes = Vec::with_capacity(executions.len());
    let mut spans = Vec::with_capacity(executions.len());
    let mut span = timeline.spans.len();
    for (index, submitted) in scenario.executions.iter().enumerate() {
        let bound = &scenario.programs[submitted.bound];
        lanes.push(timeline.lanes.len());
        spans.push(span);
        span += bound.program.ops.len();
        for (number, lane) in bound.program.lanes.iter().enumerate() {
            let on_lane = bound.program.ops.iter().position(|op| op.lane.0 as usize == number);
            let way = match on_lane.map(|op| bound.flows[op].as_slice()) {
                Some([one]) => format!(": {}>{}", one.from, one.to),
                Some([_, _, ..]) => format!(": {} fused", lane.device),
                _ => String::new(),
            };
            let run = if executions.len() > 1 { format!("#{index} ") } else { String::new() };
            timeline.lanes.push(TimelineLane { name: format!("{run}{} lane {number}{way}", lane.device), device: lane.device });
        }
    }
    for op in ops {
        let bound = &scenario.programs[scenario.executions[op.execution].bound];
        let (operation, flows) = (&bound.program.ops[op.index as usize], &bound.flows[op.index as usize]);
        let bytes = flows.iter().map(|flow| flow.bytes).sum();
        let name = match flows.as_slice() {
            [one] => format!("{}>{} {}", one.from, one.to, size(bytes)),
            many => format!("{} routes, {}", many.len(), size(bytes)),
        };
        let lane = lanes[op.execution] + operation.lane.0 as usize;
        let to = timeline.spans.len();
        timeline.spans.push(Span { lane, op: Some(op.index), name, begin: op.begin, end: op.end, bytes });
        let others = operation.after.iter().filter(|before| bound.program.ops[before.0 as usize].lane != operation.lane);
        timeline.arrows.extend(others.map(|before| Arrow { from: spans[op.execution] + before.0 as usize, to }));
    }
    timeline
}
