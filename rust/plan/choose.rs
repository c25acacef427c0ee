//! Which paths a batch takes: one for each transfer, or the split over several where the model finds that faster.

use super::candidates::{Candidate, Reason};
use super::split::{Column, split};
use super::{Options, Shape};
use crate::model::{GRAIN, HOST_RINGS, PathModel, SLOTS};
use crate::topology::{DeviceId, Machine};
use smallvec::SmallVec;

/// What a ring in host memory may have in any case: below it hand-overs of its chunks cost more than the cache gains.
const HOST_RING: u64 = 2 << 20;

/// Up to so many staged paths through a device have a ring each: then rings in host memory have [`HOST_RING`]. Of more, those between the
/// same two devices follow each other through few rings: chunks would become small, and operations grow as bytes times rings.
const RINGS: u64 = HOST_RINGS / HOST_RING;

/// Solving again with better chunk counts and without dropped paths settles after two or three rounds; the bound keeps planning
/// time predictable.
const ROUNDS: usize = 4;

/// Part of a transfer, or of the time of one path, below which solving again changes nothing that could be measured.
const SETTLED: f64 = 5e-3;

/// Bytes on a candidate.
#[derive(Copy, Clone, Debug, PartialEq)]
pub(super) struct Share {
    /// Index into the candidates.
    pub candidate: usize,
    pub offset: u64,
    pub bytes: u64,
    pub chunk_bytes: u64,
    /// 0 on the direct path.
    pub slots: u32,
    pub slot_bytes: u64,
    /// Which staging ring, counted from 0 in the order in which shares first use them; no meaning on the direct path.
    pub ring: u32,
}

impl Share {
    pub fn chunks(&self) -> u32 {
        self.bytes.div_ceil(self.chunk_bytes.max(1)).max(1) as u32
    }
}

/// The candidates of a batch, and what became of each.
pub(super) struct Field<'a> {
    pub machine: &'a Machine,
    pub batch: &'a [Shape],
    pub options: &'a Options,
    pub candidates: Vec<Candidate>,
    /// For each transfer the range of its candidates.
    pub of: Vec<std::ops::Range<usize>>,
    /// Why a candidate is out, once it is.
    pub out: Vec<Option<Reason>>,
    /// How often each transfer is in the batch, where it stands for others like it; empty where each is for itself.
    pub repeats: Vec<f64>,
    /// The largest chunk that rings in host memory have room for, two at a time.
    host_chunk: u64,
}

/// Staged paths between the same two devices through the same third one.
struct Pipelines {
    via: DeviceId,
    paths: u64,
    bytes: f64,
    /// How many rings they have together.
    rings: u64,
}

/// All of a batch, by source, third device and destination.
type AllPipelines = ahash::HashMap<[DeviceId; 3], Pipelines>;

/// Rings on a device.
fn rings_on(all: &AllPipelines, via: DeviceId) -> u64 {
    all.values().filter(|pipelines| pipelines.via == via).map(|pipelines| pipelines.rings).sum()
}

/// A staged path does not fit into the staging bound and nothing else can carry the transfer.
#[derive(Debug)]
pub(super) struct NoRoom {
    pub transfer: u32,
    pub ring_bytes: u64,
}

impl<'a> Field<'a> {
    /// Without candidates.
    pub fn new(machine: &'a Machine, batch: &'a [Shape], options: &'a Options, repeats: Vec<f64>) -> Self {
        let (candidates, of) = (Vec::with_capacity(batch.len()), Vec::with_capacity(batch.len()));
        Field { machine, batch, options, candidates, of, out: Vec::new(), repeats, host_chunk: u64::MAX }
    }

    fn repeats(&self, transfer: u32) -> f64 {
        self.repeats.get(transfer as usize).copied().unwrap_or(1.0)
    }

    fn model(&self, candidate: usize) -> &PathModel {
        &self.candidates[candidate].model
    }

    /// Every transfer on the one path that is fastest for it alone. That is the direct one wherever a route exists: a plain
    /// copy is what the caller would have done.
    pub fn one_path(&self) -> Result<Vec<Share>, NoRoom> {
        let costs = self.machine.costs();
        let mut shares = Vec::with_capacity(self.batch.len());
        for (of, shape) in self.of.iter().zip(self.batch) {
            let seconds = |i: usize| self.model(i).seconds(costs, shape.bytes, self.model(i).best_chunks(costs, shape.bytes));
            let direct = of.clone().find(|&i| self.candidates[i].via.is_none());
            if let Some(candidate) = direct.or_else(|| of.clone().min_by(|&a, &b| seconds(a).total_cmp(&seconds(b)))) {
                shares.push(Share { candidate, offset: 0, bytes: shape.bytes, chunk_bytes: shape.bytes, slots: 0, slot_bytes: 0, ring: 0 });
            }
        }
        self.stage(shares).map_err(|(candidate, ring_bytes)| NoRoom { transfer: self.candidates[candidate].transfer, ring_bytes })
    }

    /// The split over several paths; `None` where no second path is worth having. `without` is the time of [`Field::one_path`].
    pub fn several_paths(&mut self, without: f64) -> Option<Vec<Share>> {
        let costs = self.machine.costs();
        for i in 0..self.candidates.len() {
            let candidate = &self.candidates[i];
            if candidate.via.is_none() {
                continue;
            }
            let bytes = self.batch[candidate.transfer as usize].bytes;
            let soonest = costs.copy + candidate.model.overhead(costs, GRAIN.min(bytes), 1);
            self.out[i] = if self.options.max_paths == 1 {
                Some(Reason::Option("max_paths is 1"))
            } else if self.options.min_bytes.is_some_and(|least| bytes < least) {
                Some(Reason::Option("the transfer is below min_bytes"))
            } else if soonest >= without {
                Some(Reason::FixedCost { seconds: soonest, without })
            } else {
                None
            };
        }
        // A transfer without a direct route keeps what one_path gave it if nothing else is left.
        let open = |out: &[Option<Reason>], of: &std::ops::Range<usize>| of.clone().filter(|&i| out[i].is_none()).count();
        for of in &self.of {
            if open(&self.out, of) == 0 {
                of.clone().for_each(|i| self.out[i] = None);
            }
        }
        if self.of.iter().all(|of| open(&self.out, of) < 2) {
            return None;
        }
        let mut guess = self.guess();
        for round in 1..=ROUNDS {
            let mut shares = self.solve(&guess)?;
            let mut lost = self.drop_small(&mut shares);
            self.host_chunk = self.host_chunk(&shares);
            let settled = match self.balance(&shares) {
                Some(balanced) => {
                    shares = balanced;
                    lost = self.drop_small(&mut shares);
                    lost <= SETTLED
                }
                None => lost <= SETTLED && self.drift(&guess, &shares) <= SETTLED * without,
            };
            if settled || round == ROUNDS {
                match self.stage(self.round(&self.weighted(&shares))) {
                    Ok(shares) => return Some(shares),
                    Err((candidate, ring_bytes)) => self.out[candidate] = Some(Reason::Staging { ring_bytes }),
                }
                // It may have been the last way of its transfer.
                if self.of.iter().any(|of| !of.is_empty() && open(&self.out, of) == 0) {
                    return None;
                }
            }
            log::trace!(target: "mpgpu::plan", "round {round}: {lost:.4} of a transfer moved to other paths");
            guess = shares;
        }
        None
    }

    /// Bytes for which each open candidate's chunks are counted at first: the part of its transfer's rates that is its own if
    /// every resource is divided evenly among the candidates of the batch.
    fn guess(&self) -> Vec<f64> {
        let resources = self.machine.resources();
        let mut users = vec![0.0_f64; resources.len()];
        let open = |i: &usize| self.out[*i].is_none();
        for i in (0..self.candidates.len()).filter(open) {
            let repeats = self.repeats(self.candidates[i].transfer);
            self.model(i).weights.iter().for_each(|&(r, weight)| users[r.0 as usize] += weight * repeats);
        }
        let rates: Vec<f64> = self
            .candidates
            .iter()
            .map(|c| c.model.weights.iter().map(|&(r, _)| resources[r.0 as usize].capacity / users[r.0 as usize]).fold(1e18, f64::min))
            .collect();
        let mut guess = vec![0.0; self.candidates.len()];
        for (of, shape) in self.of.iter().zip(self.batch) {
            let all: f64 = of.clone().filter(open).map(|i| rates[i]).sum();
            of.clone().filter(open).for_each(|i| guess[i] = shape.bytes as f64 * rates[i] / all);
        }
        guess
    }

    /// Bytes for each candidate; closed ones get none.
    fn solve(&self, guess: &[f64]) -> Option<Vec<f64>> {
        let costs = self.machine.costs();
        let resources = self.machine.resources();
        let open: Vec<usize> = (0..self.candidates.len()).filter(|&i| self.out[i].is_none()).collect();
        // Only transfers that have bytes have candidates; number them densely.
        let mut dense = vec![u32::MAX; self.batch.len()];
        let mut demands = Vec::new();
        let columns: Vec<Column> = open
            .iter()
            .map(|&i| {
                let Candidate { transfer, model, .. } = &self.candidates[i];
                let number = &mut dense[*transfer as usize];
                if *number == u32::MAX {
                    *number = demands.len() as u32;
                    demands.push(self.batch[*transfer as usize].bytes as f64 * self.repeats(*transfer));
                }
                // Of many alike, each takes one path.
                let bytes = if self.repeats(*transfer) > 1.0 { self.batch[*transfer as usize].bytes } else { guess[i] as u64 };
                let chunks = self.chunks(i, bytes);
                let (fixed, each) = model.line(costs, chunks);
                Column {
                    transfer: *number,
                    fixed: costs.copy + model.overhead(costs, bytes, chunks),
                    line: (costs.copy + fixed, each),
                    work: model.weights.iter().map(|&(r, weight)| (r.0, weight / resources[r.0 as usize].capacity)).collect(),
                    toll: model.hops.iter().map(|rate| rate.recip()).sum(),
                }
            })
            .collect();
        match split(&columns, &demands, resources.len()) {
            Ok(bytes) => {
                let mut shares = vec![0.0; self.candidates.len()];
                open.iter().zip(bytes).for_each(|(&i, bytes)| shares[i] = bytes / self.repeats(self.candidates[i].transfer));
                Some(shares)
            }
            Err(unsolved) => {
                log::warn!(target: "mpgpu::plan", "one path for each transfer, because the split was not solved: {}", unsolved.0);
                None
            }
        }
    }

    pub(super) fn chunks(&self, candidate: usize, bytes: u64) -> u32 {
        let model = self.model(candidate);
        match self.options.chunk_bytes {
            Some(chunk) if model.is_staged() => u32::try_from(bytes.div_ceil(chunk)).unwrap_or(u32::MAX).max(1),
            _ => {
                let best = model.best_chunks(self.machine.costs(), bytes);
                let is_in_host = self.candidates[candidate].via.is_some_and(DeviceId::is_host);
                if is_in_host { best.max(u32::try_from(bytes.div_ceil(self.host_chunk)).unwrap_or(u32::MAX)) } else { best }
            }
        }
    }

    /// Bytes that each of `rings` staging rings on a device may have.
    fn ring_bytes(&self, via: DeviceId, rings: u64) -> u64 {
        let cached = if via.is_host() { HOST_RINGS.max(rings * HOST_RING) } else { u64::MAX };
        self.options.staging_bytes.min(cached) / rings / GRAIN * GRAIN
    }

    /// [`Field::host_chunk`] where these candidates have bytes.
    fn host_chunk(&self, shares: &[f64]) -> u64 {
        let in_host = |i: &usize| shares[*i] > 0.0 && self.candidates[*i].via.is_some_and(DeviceId::is_host);
        let pipelines = self.pipelines((0..shares.len()).filter(in_host).map(|i| (i, shares[i])));
        let hosts = (0..self.machine.host_count()).map(DeviceId::host);
        let ring = |host: DeviceId| self.ring_bytes(host, rings_on(&pipelines, host).max(1));
        hosts.map(|host| ring(host) / 2 / GRAIN * GRAIN).fold(u64::MAX, u64::min).max(GRAIN)
    }

    /// Closes candidates whose share is not worth an operation, and those beyond `max_paths`, and scales up what is left. The
    /// largest part of a transfer that lay on closed ones.
    fn drop_small(&mut self, shares: &mut [f64]) -> f64 {
        let costs = self.machine.costs();
        let mut lost = 0.0_f64;
        for of in &self.of {
            let mut open: SmallVec<[usize; 16]> = of.clone().filter(|&i| self.out[i].is_none()).collect();
            let all: f64 = open.iter().map(|&i| shares[i]).sum();
            open.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]).then(a.cmp(&b)));
            for (rank, &i) in open.iter().enumerate().skip(1) {
                // What a path carries during one hand-over is the least that can pay for having it.
                let model = self.model(i);
                let least = if model.is_staged() { model.hand_over(costs) * model.rate } else { 0.0 };
                if shares[i] < least.max(GRAIN as f64) {
                    self.out[i] = Some(Reason::NoShare);
                } else if rank >= self.options.max_paths as usize {
                    self.out[i] = Some(Reason::Option("max_paths is reached by larger shares"));
                } else {
                    continue;
                }
                shares[i] = 0.0;
            }
            let left: f64 = open.iter().map(|&i| shares[i]).sum();
            if left > 0.0 {
                open.iter().for_each(|&i| shares[i] *= all / left);
                lost = lost.max(1.0 - left / all);
            }
        }
        lost
    }

    /// By how many seconds a transfer ends later because its chunks were counted for other shares: a path's error moves the end in
    /// proportion to what it carries.
    fn drift(&self, guess: &[f64], shares: &[f64]) -> f64 {
        let overhead =
            |i: usize, chunks_for: f64| self.model(i).overhead(self.machine.costs(), shares[i] as u64, self.chunks(i, chunks_for as u64));
        let error = |i: usize| (overhead(i, guess[i]) - overhead(i, shares[i])).abs() * shares[i];
        let late = |(of, shape): (&std::ops::Range<usize>, &Shape)| {
            of.clone().filter(|&i| shares[i] > 0.0).map(error).sum::<f64>() / shape.bytes.max(1) as f64
        };
        self.of.iter().zip(self.batch).map(late).fold(0.0, f64::max)
    }

    /// The shares as a tuning file corrects them: each times its path's weight, and together still the transfer.
    fn weighted(&self, shares: &[f64]) -> Vec<f64> {
        let mut weighted = shares.to_vec();
        let Some(tuned) = self.options.tuned else { return weighted };
        for of in &self.of {
            let before: f64 = shares[of.clone()].iter().sum();
            for i in of.clone() {
                weighted[i] *= match self.candidates[i].via {
                    None => 1.0,
                    Some(via) => f64::from(if via.is_host() { tuned.host_share } else { tuned.relay_share }) / 1000.0,
                };
            }
            let after: f64 = weighted[of.clone()].iter().sum();
            if after > 0.0 {
                weighted[of.clone()].iter_mut().for_each(|share| *share *= before / after);
            }
        }
        weighted
    }

    /// Whole bytes: shares are multiples of [`GRAIN`], the largest takes the rest, and together they are the transfer.
    pub(super) fn round(&self, shares: &[f64]) -> Vec<Share> {
        let mut rounded = Vec::new();
        for (of, shape) in self.of.iter().zip(self.batch) {
            let open = || of.clone().filter(|&i| self.out[i].is_none());
            let Some(largest) = open().max_by(|&a, &b| shares[a].total_cmp(&shares[b]).then(b.cmp(&a))) else { continue };
            let whole = |i: usize| (shares[i] as u64).min(shape.bytes) / GRAIN * GRAIN;
            let mut left = shape.bytes;
            let mut offset = 0;
            let others: u64 = open().filter(|&i| i != largest).map(whole).sum();
            for i in open() {
                let bytes = if i == largest { shape.bytes.saturating_sub(others) } else { whole(i) }.min(left);
                if bytes > 0 {
                    rounded.push(Share { candidate: i, offset, bytes, chunk_bytes: bytes, slots: 0, slot_bytes: 0, ring: 0 });
                }
                offset += bytes;
                left -= bytes;
            }
        }
        rounded
    }

    /// Finds out how many rings staged paths with these bytes share.
    fn pipelines(&self, staged: impl Iterator<Item = (usize, f64)>) -> AllPipelines {
        let mut all = AllPipelines::default();
        for (candidate, bytes) in staged {
            let Some((via, key)) = self.pipeline_of(candidate) else { continue };
            let repeats = self.repeats(self.candidates[candidate].transfer);
            let pipelines = all.entry(key).or_insert(Pipelines { via, paths: 0, bytes: 0.0, rings: 0 });
            pipelines.paths += repeats as u64;
            pipelines.bytes += bytes * repeats;
        }
        // For each device the paths through it, and the ways from where to where.
        let mut on: SmallVec<[(DeviceId, u64, u64); 8]> = SmallVec::new();
        for &Pipelines { via, paths, .. } in all.values() {
            match on.iter_mut().find(|on| on.0 == via) {
                Some(on) => (on.1, on.2) = (on.1 + paths, on.2 + 1),
                None => on.push((via, paths, 1)),
            }
        }
        for Pipelines { via, paths, bytes, rings } in all.values_mut() {
            let (all_paths, ways) = on.iter().find(|on| on.0 == *via).map_or((0, 1), |on| (on.1, on.2));
            let fitting = (self.options.staging_bytes / (2 * GRAIN)).min(RINGS);
            *rings = if all_paths <= fitting {
                *paths
            } else {
                // Two of its pieces fit into a ring, so that small ones hide each other's hand-overs and large ones have large chunks.
                let most = (fitting / ways).max(1);
                let alike = self.ring_bytes(*via, ways) as f64 * *paths as f64 / (2.0 * *bytes);
                (alike as u64).clamp(most.min(2), most).min(*paths)
            };
        }
        all
    }

    /// The device that a candidate's bytes are staged on, and the three that they pass; `None` for the direct path.
    fn pipeline_of(&self, candidate: usize) -> Option<(DeviceId, [DeviceId; 3])> {
        let Candidate { via, transfer, .. } = self.candidates[candidate];
        let shape = &self.batch[transfer as usize];
        via.map(|via| (via, [shape.src_device, via, shape.dst_device]))
    }

    /// Gives staged shares their rings, chunks and slots, so that all rings on a device fit into the bound. The error names a
    /// candidate that finds no room, and the bytes that there were for it.
    pub(super) fn stage(&self, mut shares: Vec<Share>) -> Result<Vec<Share>, (usize, u64)> {
        struct Ring {
            candidate: usize,
            bytes: u64,
            paths: u64,
            /// The most bytes of a chunk.
            chunk_bytes: u64,
            largest: u64,
            chunks: u32,
            room: u64,
        }
        let all = self.pipelines(shares.iter().map(|share| (share.candidate, share.bytes as f64)));
        let mut rings: Vec<Ring> = Vec::new();
        let mut of: ahash::HashMap<[DeviceId; 3], SmallVec<[u32; 4]>> = ahash::HashMap::default();
        for share in &mut shares {
            let Some((via, key)) = self.pipeline_of(share.candidate) else { continue };
            let own = of.entry(key).or_default();
            let least = own.iter().copied().min_by_key(|&ring| rings[ring as usize].bytes);
            share.ring = match least.filter(|_| all.get(&key).is_none_or(|pipelines| own.len() as u64 >= pipelines.rings)) {
                Some(ring) => ring,
                None => {
                    let room = self.ring_bytes(via, rings_on(&all, via).max(1));
                    rings.push(Ring { candidate: share.candidate, bytes: 0, paths: 0, chunk_bytes: 0, largest: 0, chunks: 0, room });
                    own.push(rings.len() as u32 - 1);
                    rings.len() as u32 - 1
                }
            };
            let ring = &mut rings[share.ring as usize];
            (ring.bytes, ring.paths, ring.largest) = (ring.bytes + share.bytes, ring.paths + 1, ring.largest.max(share.bytes));
        }
        for ring in &mut rings {
            let chunks = u64::from(self.chunks(ring.candidate, ring.bytes));
            let wanted = match self.options.chunk_bytes {
                Some(chunk) => chunk.min(ring.bytes),
                None => ring.bytes.div_ceil(chunks).next_multiple_of(GRAIN).min(ring.bytes),
            };
            // Several chunks need two slots to overlap their hops.
            let half = ring.room / 2 / GRAIN * GRAIN;
            let slot_most = if wanted < ring.bytes || ring.paths > 1 { half } else { ring.room };
            ring.chunk_bytes = if wanted <= slot_most { wanted } else { half };
            if ring.chunk_bytes == 0 {
                return Err((ring.candidate, ring.room));
            }
        }
        let staged = |share: &&mut Share| self.candidates[share.candidate].via.is_some();
        for share in shares.iter_mut().filter(staged) {
            let ring = &mut rings[share.ring as usize];
            share.chunk_bytes = ring.chunk_bytes.min(share.bytes);
            ring.chunks = ring.chunks.saturating_add(share.chunks());
        }
        for share in shares.iter_mut().filter(staged) {
            let ring = &rings[share.ring as usize];
            share.slot_bytes = ring.chunk_bytes.min(ring.largest.next_multiple_of(GRAIN));
            share.slots = (ring.room / share.slot_bytes).min(u64::from(SLOTS)).min(u64::from(ring.chunks)) as u32;
        }
        Ok(shares)
    }
}
