//! What a path costs that has its links to itself.

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
/// were as fast with rings of 8 to 48 MiB and took 4 % longer with 64 MiB. Plans of several processes may have more of them
/// together: then so much stays in the cache, and what is more passes memory as plain copies do.
pub const HOST_RINGS: u64 = 32 << 20;

/// The part of a kernel's rate that is left for each direction where one kernel pushes and pulls at once. Readings, two H200: 4, 8 and
/// 16 MiB each way pass at 287, 285 and 284 GB/s, in one direction 4 and 16 MiB at 367 and 371.
pub const BOTH_WAYS: f64 = 0.78;

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
    pub overlap: f64,
}

impl PathModel {
    /// The model of a path along these routes.
    pub fn new(machine: &Machine, routes: &[&Route]) -> Self {
        let is_staged = routes.len() > 1;
        let through_gpu = is_staged && routes[0].links.last().is_some_and(|link| ends_in_gpu(machine, *link));
        let mut weights: SmallVec<[(ResourceId, f64); 8]> = SmallVec::new();
        for resource in routes.iter().flat_map(|route| route.resources.iter().copied()) {
            let draw = machine.resources()[resource.0 as usize].draw(f64::from(is_staged && !through_gpu));
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
            overlap: 0.0,
        }
    }

    /// Seconds that a lane stands still between two chunks.
    pub fn chunk_gap(&self, costs: &Costs) -> f64 {
        if self.through_gpu { costs.chunk_via_gpu } else { costs.chunk_via_host }
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
        let gap = self.chunk_gap(costs);
        let gap = (gap * (1.0 - self.overlap)).max(gap.min(2.0 * costs.graph_node));
        let best = if gap > 0.0 { (bytes as f64 * self.fill() / gap).sqrt() } else { f64::INFINITY };
        (best.round().min(most as f64) as u32).max(1)
    }

    /// With this number of chunks: seconds that the path adds whatever it carries, and seconds for each byte that it carries.
    pub fn line(&self, costs: &Costs, chunks: u32) -> (f64, f64) {
        if !self.is_staged() {
            return (self.latency, self.rate.recip());
        }
        let fixed = self.latency + f64::from(chunks + 1) * self.chunk_gap(costs);
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
