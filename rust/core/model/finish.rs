//! Computes the finishing time of a set of flows that start at the same time. All predicted times of plans are computed here.

use super::path::PathModel;
use crate::topology::{Costs, Machine, ResourceId};
use smallvec::SmallVec;

/// Data that moves along a path. A value describes one flow, or several combined flows. Combined flows use the same path, start together
/// and differ only in size.
#[derive(Clone, Debug)]
pub struct Flow<'a> {
    /// Path along which the data moves.
    pub path: &'a PathModel,
    /// Size of the flow in bytes. If several flows are combined, this is the size of the largest flow.
    pub bytes: u64,
    /// Number of combined flows, and the sum of their sizes in bytes.
    pub alike: (u32, f64),
    /// Number of chunks into which each flow is cut.
    pub chunks: u32,
    /// Time from the start of the set of flows until the flow's first byte may move, seconds: the startup time of the first operation.
    pub head: f64,
    /// Fraction of the path's rate that the flow's copy mechanism reaches.
    pub efficiency: f64,
}

impl<'a> Flow<'a> {
    /// Returns a single flow that uses the full rate of its path. `head` is the startup time of its first operation in seconds.
    pub fn new(path: &'a PathModel, bytes: u64, chunks: u32, head: f64) -> Self {
        Flow { path, bytes, alike: (1, bytes as f64), chunks, head, efficiency: 1.0 }
    }

    /// Combines this flow with another flow of `bytes` bytes that uses the same path and starts at the same time.
    pub fn add(&mut self, bytes: u64) {
        self.bytes = self.bytes.max(bytes);
        self.alike = (self.alike.0 + 1, self.alike.1 + bytes as f64);
    }

    /// Returns the finishing time in seconds of this flow, or of the largest combined flow, if no other flow uses its path.
    pub fn alone(&self, costs: &Costs) -> f64 {
        self.head + self.path.overhead(costs, self.bytes, self.chunks) + self.bytes as f64 / (self.path.rate * self.efficiency)
    }
}

/// Time that a host thread needs to issue the operations of a set of flows.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Issue {
    /// Number of operations that the host thread issues.
    pub operations: usize,
    /// Time to issue each operation after the first, seconds.
    pub each: f64,
    /// True if the caller's stream waits for copies that other GPUs issue.
    pub joins_gpus: bool,
}

impl Issue {
    /// Returns the cost of issuing this number of individual copies on one GPU.
    pub fn copies(costs: &Costs, operations: usize) -> Issue {
        Issue { operations, each: costs.issue, joins_gpus: false }
    }
}

/// Returns the time from the start of a set of flows until the last of them finishes, in seconds.
pub fn finish<'a>(machine: &Machine, flows: impl IntoIterator<Item = Flow<'a>>, issue: &Issue) -> f64 {
    let costs = machine.costs();
    let issued = if issue.operations == 0 { 0.0 } else { costs.copy + issue.each * (issue.operations - 1) as f64 };
    let resources = machine.resources();
    let flows: SmallVec<[Flow<'a>; 16]> = flows.into_iter().collect();
    // For each resource: its busy time in seconds, its earliest start, its number of flows, and whether any of them is pipelined (staged).
    let mut work = vec![Work::default(); resources.len()];
    let mut done = 0.0_f64;
    // The operations of pipelined (staged) flows are issued last, chunk by chunk. The last chunk can move only after its operations are
    // issued.
    let mut last_chunk = f64::INFINITY;
    for flow in &flows {
        done = done.max(flow.alone(costs));
        if flow.path.is_staged() {
            let chunk = flow.bytes as f64 / f64::from(flow.chunks);
            last_chunk = last_chunk.min(flow.path.hops.iter().map(|rate| chunk / rate + flow.path.chunk_gap(costs)).sum());
        }
        for &(resource, weight) in &flow.path.weights {
            let slot = &mut work[resource.0 as usize];
            slot.seconds += weight * flow.alike.1 / (resources[resource.0 as usize].capacity * flow.efficiency);
            slot.begin = slot.begin.min(flow.head + flow.path.latency);
            slot.flows += flow.alike.0;
            slot.is_staged |= flow.path.is_staged();
        }
    }
    let end = |(resource, of): (usize, &Work)| {
        let idle =
            if of.is_staged && of.flows > 1 { idle(&flows, ResourceId(resource as u32), resources[resource].capacity, costs) } else { 0.0 };
        of.begin + of.seconds + idle
    };
    let busiest = work.iter().enumerate().filter(|(_, of)| of.seconds > 0.0).map(end).fold(0.0, f64::max);
    let end = done.max(busiest).max(issued);
    match (last_chunk.is_finite(), issue.joins_gpus) {
        (true, _) => end.max(issued + last_chunk) + costs.fork_join_staged,
        (false, true) => end + costs.fork_join_gpus,
        (false, false) => end,
    }
}

/// Use of one resource by a set of flows.
#[derive(Clone)]
struct Work {
    seconds: f64,
    begin: f64,
    flows: u32,
    is_staged: bool,
}

impl Default for Work {
    fn default() -> Self {
        Work { seconds: 0.0, begin: f64::INFINITY, flows: 0, is_staged: false }
    }
}

/// Returns the time for which a shared resource is partly idle because only some of its flows use it. The result is in seconds at full
/// capacity. A pipelined flow starts to use its second hop when its first chunk has arrived, and no longer uses its first hop while its
/// last chunk is on the second hop.
fn idle(flows: &[Flow<'_>], resource: ResourceId, capacity: f64, costs: &Costs) -> f64 {
    // For each flow: the time at which it starts to use the resource, the time before its end at which it stops, and the maximum capacity
    // that it uses.
    let mut draws: SmallVec<[(f64, f64, f64); 16]> = SmallVec::new();
    for flow in flows {
        let Ok(at) = flow.path.weights.binary_search_by_key(&resource, |weight| weight.0) else { continue };
        let start = flow.head + flow.path.latency;
        let chunk = flow.bytes as f64 / f64::from(flow.chunks);
        let pass = |hop: usize| chunk / flow.path.hops[hop] + flow.path.chunk_gap(costs);
        let (begin, tail) = match (flow.path.is_staged(), flow.path.first_hop[at]) {
            (false, _) => (flow.head + flow.path.latency, 0.0),
            (true, Some(true)) => (start, pass(1)),
            (true, Some(false)) => (start + pass(0), 0.0),
            (true, None) => (start, 0.0),
        };
        draws.push((begin, tail, f64::from(flow.alike.0) * flow.path.weights[at].1 * flow.path.rate * flow.efficiency));
    }
    let mut lost = 0.0;
    draws.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut drawn = 0.0;
    for two in draws.windows(2) {
        drawn += two[0].2;
        lost += (two[1].0 - two[0].0) * (capacity - drawn).max(0.0);
    }
    // The idle time at the end of the flows is computed like that at their start, but from the end backwards.
    draws.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut drawn = 0.0;
    for two in draws.windows(2) {
        drawn += two[0].2;
        lost += (two[1].1 - two[0].1) * (capacity - drawn).max(0.0);
    }
    lost / capacity
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{DeviceId, preset};

    #[test]
    fn flows_that_start_together_take_as_long_as_one_of_all_of_them() {
        let machine = Machine::new(preset("beluga").expect("a preset")).expect("a machine");
        let route = machine.route(DeviceId::gpu(0), DeviceId::gpu(1)).expect("a route");
        let path = PathModel::new(&machine, &[route]);
        let issue = Issue::copies(machine.costs(), 1);
        for sizes in [[1 << 20; 3], [24, 2_400, 240_000], [1, 64 << 20, 1]] {
            let each = sizes.map(|bytes| Flow { efficiency: 0.9, ..Flow::new(&path, bytes, 1, 1e-5) });
            let mut all = each[0].clone();
            sizes[1..].iter().for_each(|bytes| all.add(*bytes));
            let [each, all] = [finish(&machine, each, &issue), finish(&machine, [all], &issue)];
            assert!((each / all - 1.0).abs() < 1e-12, "{sizes:?}: {each} and {all}");
        }
    }
}
