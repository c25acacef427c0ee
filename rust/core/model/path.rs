//! Cost model of a single path whose links carry no other traffic.

use crate::topology::{Costs, LinkId, Machine, NodeKind, ResourceId, Route};
use smallvec::SmallVec;

/// Largest number of chunks that the model chooses on one path. With more chunks, filling the pipeline takes less than 1 % of the path's
/// time, while each further chunk still costs two operations.
pub const MAX_CHUNKS: u64 = 128;

/// Granularity in bytes. Automatically chosen chunk sizes, and the number of bytes that each path of a transfer moves, are multiples of it.
/// Chunks of page-aligned buffers are therefore page-aligned.
pub const GRAIN: u64 = 4096;

/// Number of slots of a staging ring. With two slots, the second hop of a chunk overlaps the first hop of the next chunk. Two more slots
/// keep the internal streams of both hops busy while events propagate between devices.
pub const SLOTS: u32 = 4;

/// Largest total size of a plan's staging rings in host memory, bytes. Data that copy engines write stays in a part of the processor's
/// cache, from which the next copy reads it. If the rings exceed that part, data goes to memory and back. On a host with 300 MiB of cache,
/// opposite pipelines between two GPUs were equally fast with rings of 8 to 48 MiB, and took 4 % longer with 64 MiB. Together, the plans of
/// several processes may exceed the limit. Only an amount of data equal to the limit then stays in the cache, and all other data passes
/// through memory.
pub const HOST_RINGS: u64 = 32 << 20;

/// Fraction of its one-way rate that a copy kernel reaches in each direction if it writes to another GPU and reads from it at the same
/// time. Measured on two H200: 4, 8 and 16 MiB in both directions pass at 287, 285 and 284 GB/s each way. In one direction, 4 and 16 MiB
/// pass at 367 and 371 GB/s.
pub const BOTH_WAYS: f64 = 0.78;

/// Model of a path: one hop, or two hops with staging between them.
#[derive(Clone, Debug, PartialEq)]
pub struct PathModel {
    /// Rate of each hop while the other hop is idle, bytes/s.
    pub hops: SmallVec<[f64; 2]>,
    /// Sum of the latencies of all links of the path, seconds.
    pub latency: f64,
    /// Resources that the path uses, sorted by number. Each entry also holds the weight of the resource: the number of bytes of its
    /// capacity that one byte of the transfer uses, summed over the hops.
    pub weights: SmallVec<[(ResourceId, f64); 8]>,
    /// Hop that uses the resource of each entry of `weights`: `Some(true)` for the first hop only, `Some(false)` for the second only,
    /// `None` for both.
    pub first_hop: SmallVec<[Option<bool>; 8]>,
    /// Rate of the path while no other path is active, bytes/s: the minimum of capacity / weight over its resources.
    pub rate: f64,
    /// True if chunks are staged in the memory of a GPU. False if they are staged in host memory, or if the path has no staging.
    pub through_gpu: bool,
    /// Fraction of the idle time between two chunks in which other paths use the idle capacity. It is 0 if no other path uses the resource
    /// that limits this path.
    pub overlap: f64,
}

impl PathModel {
    /// Returns the model of a path whose hops follow these routes.
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

    /// Returns the time for which an internal stream is idle between two chunks, seconds.
    pub fn chunk_gap(&self, costs: &Costs) -> f64 {
        if self.through_gpu { costs.chunk_via_gpu } else { costs.chunk_via_host }
    }

    /// True if the path stages its data in a relay device or in host memory.
    pub fn is_staged(&self) -> bool {
        self.hops.len() > 1
    }

    /// Returns the time to fill the pipeline, in seconds per byte of the first chunk: the time on all hops except the slowest one.
    fn fill(&self) -> f64 {
        let slowest = self.hops.iter().map(|rate| rate.recip()).fold(0.0, f64::max);
        self.hops.iter().map(|rate| rate.recip()).sum::<f64>() - slowest
    }

    /// Returns the number of chunks with which a transfer of `bytes` on this path is fastest. It balances the time to fill the pipeline,
    /// `bytes / n · fill`, against the synchronisations, `n · chunk`. The result is at least 1, and exactly 1 on a path of one hop.
    pub fn best_chunks(&self, costs: &Costs, bytes: u64) -> u32 {
        if !self.is_staged() || bytes == 0 {
            return 1;
        }
        let most = bytes.div_ceil(GRAIN).min(MAX_CHUNKS);
        // Idle time in which other paths use the resource is not lost. The two operations of each chunk still have to be issued.
        let gap = self.chunk_gap(costs);
        let gap = (gap * (1.0 - self.overlap)).max(gap.min(2.0 * costs.graph_node));
        let best = if gap > 0.0 { (bytes as f64 * self.fill() / gap).sqrt() } else { f64::INFINITY };
        (best.round().min(most as f64) as u32).max(1)
    }

    /// Returns the cost of the path as a linear function of the size, for data cut into `chunks` chunks: the fixed time in seconds, and the
    /// time per byte in seconds.
    pub fn line(&self, costs: &Costs, chunks: u32) -> (f64, f64) {
        if !self.is_staged() {
            return (self.latency, self.rate.recip());
        }
        let fixed = self.latency + f64::from(chunks + 1) * self.chunk_gap(costs);
        (fixed, self.rate.recip() + self.fill() / f64::from(chunks))
    }

    /// Returns the time that the path needs in addition to `bytes / rate` and to the startup time of its first operation, in seconds:
    /// latency, filling the pipeline, and synchronisations.
    pub fn overhead(&self, costs: &Costs, bytes: u64, chunks: u32) -> f64 {
        let (fixed, each) = self.line(costs, chunks);
        fixed + bytes as f64 * (each - self.rate.recip())
    }

    /// Returns the time in seconds from issue to completion of a transfer of `bytes` bytes on this path without other traffic.
    pub fn seconds(&self, costs: &Costs, bytes: u64, chunks: u32) -> f64 {
        costs.copy + self.overhead(costs, bytes, chunks) + bytes as f64 / self.rate
    }
}

fn ends_in_gpu(machine: &Machine, link: LinkId) -> bool {
    let topology = machine.topology();
    topology.nodes[topology.links[link.0 as usize].to.0 as usize].kind == NodeKind::Gpu
}
