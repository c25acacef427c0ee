//! What a path, and a set of paths together, cost in seconds.
//!
//! The model has three terms, each of which something measured stands behind (`docs/model.md` has the derivation and the sources):
//!
//! - A path alone. One plain copy takes `copy + latency + bytes / rate`. A staged path cuts its bytes into `n` chunks and pipelines
//!   two hops; the slower hop sets the rate, the first chunk's faster hop and `n + 1` hand-overs of `chunk` seconds come on top:
//!   `head + latency + bytes / slowest + (bytes / n) / fastest + (n + 1) · chunk`.
//! - A resource. All bytes that draw on it pass at its capacity: it can't be done before `head + Σ weight · bytes / capacity`.
//! - The issuing thread, which needs `issue` seconds for each operation, and the last chunk after that.
//!
//! A set of flows finishes when the last of these does, and `join` later if any of them is staged: the caller's stream waits for lanes. That is a lower bound which the planner minimises; it is not a
//! simulation: two flows on one link are assumed to share it without loss. [`simulate`] is one, and [`timeline`] what it draws.
//!
//! Pure: no backend, no clock.

pub(crate) mod fair;
pub mod simulate;
pub mod timeline;

use crate::topology::{Costs, LinkId, Machine, NodeKind, ResourceId, Route};
use smallvec::SmallVec;

/// The most chunks that the model asks for on one path: beyond it the pipeline's fill is below 1 % of the path's time while
/// each further chunk still costs two operations.
pub const MAX_CHUNKS: u64 = 128;

/// Automatic chunk sizes and shares are multiples of this, so that copy engines see page-aligned pieces of aligned buffers.
pub const GRAIN: u64 = 4096;

/// Slots of a staging ring: with two, the second hop of a chunk overlaps the first hop of the next; two more keep both lanes
/// busy while events travel between devices.
pub const SLOTS: u32 = 4;

/// The most bytes of all staging rings of a plan in host memory. What copy engines write stays in a part of the processor's cache, from which the
/// next copy reads it; beyond that part it goes to memory and comes back. On a host with 300 MiB of cache opposite pipelines between two GPUs
/// were as fast with rings of 8 to 48 MiB and took 4 % longer with 64 MiB (docs/performance.md).
pub const HOST_RINGS: u64 = 32 << 20;

/// A path as the model sees it: one hop, or two with staging between them.
#[derive(Clone, Debug, PartialEq)]
pub struct PathModel {
    /// Bytes/s of each hop by itself.
    pub hops: SmallVec<[f64; 2]>,
    /// Sum of the links' latencies, seconds.
    pub latency: f64,
    /// What a byte of this path draws on each resource, once for each hop that passes it. Sorted by resource.
    pub weights: SmallVec<[(ResourceId, f64); 8]>,
    /// For each of them whether the first hop draws on it, or else the second; `None` where both do.
    pub first_hop: SmallVec<[Option<bool>; 8]>,
    /// Bytes/s of the path by itself: the smallest of capacity / weight.
    pub rate: f64,
    /// Whether chunks are staged in a GPU, where they are.
    pub through_gpu: bool,
    /// The part of each hand-over in which other paths use what this one leaves idle: 0 where it has what limits it to itself.
    pub hidden: f64,
}

impl PathModel {
    /// The model of a path along these routes.
    pub fn new(machine: &Machine, routes: &[&Route]) -> Self {
        let is_staged = routes.len() > 1;
        let through_gpu = is_staged && routes[0].links.last().is_some_and(|link| ends_in_gpu(machine, *link));
        let mut weights: SmallVec<[(ResourceId, f64); 8]> = SmallVec::new();
        for resource in routes.iter().flat_map(|route| route.resources.iter().copied()) {
            let draw = machine.resources()[resource.0 as usize].draw(is_staged && !through_gpu);
            match weights.binary_search_by_key(&resource, |w| w.0) {
                Ok(at) => weights[at].1 += draw,
                Err(at) => weights.insert(at, (resource, draw)),
            }
        }
        let draws =
            |route: usize, resource| routes.get(route).is_some_and(|route: &&Route| route.resources.binary_search(&resource).is_ok());
        let first_hop =
            weights.iter().map(|&(resource, _)| (draws(0, resource) != draws(1, resource)).then(|| draws(0, resource))).collect();
        let capacity = |r: ResourceId| machine.resources()[r.0 as usize].capacity;
        let rate = weights.iter().map(|&(r, weight)| capacity(r) / weight).fold(f64::INFINITY, f64::min);
        PathModel {
            hops: routes.iter().map(|route| route.bandwidth).collect(),
            latency: routes.iter().map(|route| route.latency).sum(),
            weights,
            first_hop,
            rate,
            through_gpu,
            hidden: 0.0,
        }
    }

    /// Seconds that a lane stands still between two chunks.
    pub fn hand_over(&self, costs: &Costs) -> f64 {
        if self.through_gpu { costs.relay_chunk } else { costs.chunk }
    }

    /// Whether bytes rest in staging memory on the way.
    pub fn is_staged(&self) -> bool {
        self.hops.len() > 1
    }

    /// Seconds per byte that the pipeline's first chunk spends on all hops but the slowest.
    fn fill(&self) -> f64 {
        let slowest = self.hops.iter().map(|rate| rate.recip()).fold(0.0, f64::max);
        self.hops.iter().map(|rate| rate.recip()).sum::<f64>() - slowest
    }

    /// The number of chunks that makes `bytes` on this path fastest: it balances the fill, `bytes / n · fill`, against the
    /// hand-overs, `n · chunk`. Always at least 1, and 1 on a path of one hop.
    pub fn best_chunks(&self, costs: &Costs, bytes: u64) -> u32 {
        if !self.is_staged() || bytes == 0 {
            return 1;
        }
        let most = bytes.div_ceil(GRAIN).min(MAX_CHUNKS);
        // What others use of it is not lost; the two operations of a chunk still have to be issued.
        let hand_over = self.hand_over(costs);
        let hand_over = (hand_over * (1.0 - self.hidden)).max(hand_over.min(2.0 * costs.graph_node));
        let best = if hand_over > 0.0 { (bytes as f64 * self.fill() / hand_over).sqrt() } else { f64::INFINITY };
        (best.round().min(most as f64) as u32).max(1)
    }

    /// With this number of chunks: seconds that the path adds whatever it carries, and seconds for each byte that it carries.
    pub fn line(&self, costs: &Costs, chunks: u32) -> (f64, f64) {
        if !self.is_staged() {
            return (self.latency, self.rate.recip());
        }
        let fixed = self.latency + f64::from(chunks + 1) * self.hand_over(costs);
        (fixed, self.rate.recip() + self.fill() / f64::from(chunks))
    }

    /// Seconds that the path adds to `bytes / rate`, apart from what starts it: latency, the pipeline's fill, hand-overs.
    pub fn overhead(&self, costs: &Costs, bytes: u64, chunks: u32) -> f64 {
        let (fixed, each) = self.line(costs, chunks);
        fixed + bytes as f64 * (each - self.rate.recip())
    }

    /// Seconds for `bytes` alone on this path, from issue to done.
    pub fn seconds(&self, costs: &Costs, bytes: u64, chunks: u32) -> f64 {
        costs.copy + self.overhead(costs, bytes, chunks) + bytes as f64 / self.rate
    }
}

fn ends_in_gpu(machine: &Machine, link: LinkId) -> bool {
    let topology = machine.topology();
    topology.nodes[topology.links[link.0 as usize].to.0 as usize].kind == NodeKind::Gpu
}

/// Bytes on a path, as part of a set.
#[derive(Clone, Debug)]
pub struct Flow<'a> {
    /// The path.
    pub path: &'a PathModel,
    /// Bytes on it.
    pub bytes: u64,
    /// Pieces that they are cut into.
    pub chunks: u32,
    /// Seconds from the start of the set until this flow's first byte may move: what its first operation costs to start.
    pub head: f64,
    /// The part of the path's rate that its mechanism reaches.
    pub efficiency: f64,
}

impl Flow<'_> {
    /// When this flow would be done if it had its path to itself.
    pub fn alone(&self, costs: &Costs) -> f64 {
        self.head + self.path.overhead(costs, self.bytes, self.chunks) + self.bytes as f64 / (self.path.rate * self.efficiency)
    }
}

/// When the last of a set of flows that start together is done, in seconds. `operations` is the number of operations issued.
pub fn finish<'a>(machine: &Machine, flows: impl IntoIterator<Item = Flow<'a>>, operations: usize) -> f64 {
    let costs = machine.costs();
    let issued = if operations == 0 { 0.0 } else { costs.copy + costs.issue * (operations - 1) as f64 };
    finish_issued(machine, flows, issued)
}

/// The same where the last operation is issued at `issued` seconds and has started at once.
pub(crate) fn finish_issued<'a>(machine: &Machine, flows: impl IntoIterator<Item = Flow<'a>>, issued: f64) -> f64 {
    let costs = machine.costs();
    let resources = machine.resources();
    let flows: SmallVec<[Flow<'a>; 16]> = flows.into_iter().collect();
    // Per resource: seconds of work, the earliest moment at which any of it can begin, and whether pipelines are among several flows.
    let mut work = vec![Work::default(); resources.len()];
    let mut done = 0.0_f64;
    // The operations of pipelines are issued last, chunk by chunk: after the last one is issued its chunk still has its way to go.
    let mut last_chunk = f64::INFINITY;
    for flow in &flows {
        done = done.max(flow.alone(costs));
        if flow.path.is_staged() {
            let chunk = flow.bytes as f64 / f64::from(flow.chunks);
            last_chunk = last_chunk.min(flow.path.hops.iter().map(|rate| chunk / rate + flow.path.hand_over(costs)).sum());
        }
        for &(resource, weight) in &flow.path.weights {
            let slot = &mut work[resource.0 as usize];
            slot.seconds += weight * flow.bytes as f64 / (resources[resource.0 as usize].capacity * flow.efficiency);
            slot.begin = slot.begin.min(flow.head + flow.path.latency);
            slot.flows += 1;
            slot.is_staged |= flow.path.is_staged();
        }
    }
    let end = |(resource, of): (usize, &Work)| {
        let idle =
            if of.is_staged && of.flows > 1 { idle(&flows, ResourceId(resource as u32), resources[resource].capacity, costs) } else { 0.0 };
        of.begin + of.seconds + idle
    };
    let busiest = work.iter().enumerate().filter(|(_, of)| of.seconds > 0.0).map(end).fold(0.0, f64::max);
    if last_chunk.is_finite() { done.max(busiest).max(issued + last_chunk) + costs.join } else { done.max(busiest).max(issued) }
}

/// What a set of flows makes of a resource.
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

/// Seconds of its capacity that a resource which several flows share loses while not all of them use it: pipelines draw on their second hop from
/// when their first chunk is there, and no longer on their first hop while their last one passes the second.
fn idle(flows: &[Flow<'_>], resource: ResourceId, capacity: f64, costs: &Costs) -> f64 {
    // When each begins to draw on it, how long before its end it ceases to, and how much it draws at most.
    let mut draws: SmallVec<[(f64, f64, f64); 16]> = SmallVec::new();
    for flow in flows {
        let Ok(at) = flow.path.weights.binary_search_by_key(&resource, |weight| weight.0) else { continue };
        let start = flow.head + flow.path.latency;
        let chunk = flow.bytes as f64 / f64::from(flow.chunks);
        let pass = |hop: usize| chunk / flow.path.hops[hop] + flow.path.hand_over(costs);
        let (begin, tail) = match (flow.path.is_staged(), flow.path.first_hop[at]) {
            (false, _) => (flow.head + flow.path.latency, 0.0),
            (true, Some(true)) => (start, pass(1)),
            (true, Some(false)) => (start + pass(0), 0.0),
            (true, None) => (start, 0.0),
        };
        draws.push((begin, tail, flow.path.weights[at].1 * flow.path.rate * flow.efficiency));
    }
    let mut lost = 0.0;
    draws.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut drawn = 0.0;
    for two in draws.windows(2) {
        drawn += two[0].2;
        lost += (two[1].0 - two[0].0) * (capacity - drawn).max(0.0);
    }
    // Backwards from the end.
    draws.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut drawn = 0.0;
    for two in draws.windows(2) {
        drawn += two[0].2;
        lost += (two[1].1 - two[0].1) * (capacity - drawn).max(0.0);
    }
    lost / capacity
}
