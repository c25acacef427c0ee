//! Plans the staging rings of a batch: their number, devices and slot sizes. A chunk fills a slot, so this module also decides chunk sizes.

use super::selection::{Assignment, PathShare, Selection};
use crate::model::{GRAIN, HOST_RINGS, SLOTS};
use crate::program::Ring;
use crate::topology::DeviceId;
use smallvec::SmallVec;

/// Size that each ring in host memory may have even if the rings exceed [`HOST_RINGS`] together, bytes. In smaller rings, the
/// synchronisations between chunks cost more time than the cache saves.
const HOST_RING: u64 = 2 << 20;

/// Number of staged paths through a device up to which each path has its own ring. Rings in host memory then have at least [`HOST_RING`]
/// bytes. If there are more paths, those between the same two devices use a few common rings one after the other. Otherwise chunks would
/// become small, and the number of operations would grow with bytes times rings.
const RINGS: u64 = HOST_RINGS / HOST_RING;

/// Error: the staging memory cannot hold the ring of a staged path. It contains the index of the candidate path, one of the path's
/// transfers, and the number of bytes available for the ring.
#[derive(Debug)]
pub(super) struct NoRoom {
    pub candidate: usize,
    pub transfer: u32,
    pub ring_bytes: u64,
}

/// Staged paths from the same source to the same destination through the same relay.
struct Pipelines {
    via: DeviceId,
    paths: u64,
    bytes: f64,
    /// Total number of rings that the paths use.
    rings: u64,
}

/// Staged paths of a batch, grouped by source, relay and destination.
type AllPipelines = ahash::HashMap<[DeviceId; 3], Pipelines>;

/// Returns the number of rings on device `via`; 1 if there are none.
fn rings_on(all: &AllPipelines, via: DeviceId) -> u64 {
    all.values().filter(|pipelines| pipelines.via == via).map(|pipelines| pipelines.rings).sum::<u64>().max(1)
}

/// Staging ring whose slot size has not been decided.
struct Draft {
    via: DeviceId,
    /// First path share (part of a transfer on one path) that uses the ring.
    first: PathShare,
    bytes: u64,
    paths: u64,
    /// Size of the largest path share (part of a transfer on one path) that uses the ring, bytes.
    largest: u64,
    /// Largest total size that the ring may have, bytes.
    room: u64,
}

impl Selection<'_> {
    /// Assigns rings to the parts of transfers on staged paths, so that all rings on a device fit into the limit of staging memory.
    pub(super) fn stage(&self, mut shares: Vec<PathShare>) -> Result<Assignment, NoRoom> {
        let all = self.pipelines(shares.iter().map(|share| (share.candidate, share.bytes as f64, 1)));
        if all.is_empty() {
            return Ok(Assignment { shares, rings: Vec::new() });
        }
        let mut drafts: Vec<Draft> = Vec::new();
        let mut of: ahash::HashMap<[DeviceId; 3], SmallVec<[u32; 4]>> = ahash::HashMap::default();
        for share in &mut shares {
            let Some((via, key)) = self.pipeline_of(share.candidate) else { continue };
            let own = of.entry(key).or_default();
            let least = own.iter().copied().min_by_key(|&ring| drafts[ring as usize].bytes);
            let ring = match least.filter(|_| all.get(&key).is_none_or(|pipelines| own.len() as u64 >= pipelines.rings)) {
                Some(ring) => ring,
                None => {
                    let room = self.ring_bytes(via, rings_on(&all, via));
                    drafts.push(Draft { via, first: *share, bytes: 0, paths: 0, largest: 0, room });
                    own.push(drafts.len() as u32 - 1);
                    drafts.len() as u32 - 1
                }
            };
            share.ring = Some(ring);
            let draft = &mut drafts[ring as usize];
            (draft.bytes, draft.paths, draft.largest) = (draft.bytes + share.bytes, draft.paths + 1, draft.largest.max(share.bytes));
        }
        let ring = |draft: &Draft| {
            let slot_bytes = self.slot_bytes(draft);
            let no_room = NoRoom { candidate: draft.first.candidate, transfer: draft.first.transfer, ring_bytes: draft.room };
            if slot_bytes > 0 { Ok(Ring { device: draft.via, slot_bytes, slots: 0 }) } else { Err(no_room) }
        };
        let rings = drafts.iter().map(ring).collect::<Result<_, _>>()?;
        let mut assignment = Assignment { shares, rings };
        let mut chunks = vec![0_u32; drafts.len()];
        for share in &assignment.shares {
            if let Some(ring) = share.ring {
                chunks[ring as usize] = chunks[ring as usize].saturating_add(assignment.chunks(share));
            }
        }
        for ((ring, draft), chunks) in assignment.rings.iter_mut().zip(&drafts).zip(chunks) {
            ring.slots = (draft.room / ring.slot_bytes).min(u64::from(SLOTS)).min(u64::from(chunks)) as u32;
        }
        Ok(assignment)
    }

    /// Returns the size of a slot, which is also the chunk size, in bytes: the size that the model or an option selects, reduced to fit the
    /// ring. Returns 0 if no slot fits.
    fn slot_bytes(&self, draft: &Draft) -> u64 {
        let wanted = match self.options.chunk(draft.via, draft.largest) {
            Some(chunk) => chunk.min(draft.bytes),
            None => {
                let (path, bytes) = (draft.first.candidate, draft.bytes);
                // All chunks get the same length, except if many pieces follow each other, because their last chunks are short in any case.
                let chunks = if self.aggregated { self.best_chunks(path, bytes) } else { self.chunks(path, bytes) };
                bytes.div_ceil(u64::from(chunks)).next_multiple_of(GRAIN).min(bytes)
            }
        };
        // A path with several chunks needs two slots, so that its two hops overlap.
        let half = draft.room / 2 / GRAIN * GRAIN;
        let most = if wanted < draft.bytes || draft.paths > 1 { half } else { draft.room };
        if wanted <= most { wanted } else { half }.min(draft.largest.next_multiple_of(GRAIN))
    }

    /// Groups staged paths by source, relay and destination, and returns the groups with their numbers of rings. Each item of the input is
    /// a candidate path, the bytes of one transfer on it, and the number of transfers.
    fn pipelines(&self, staged: impl Iterator<Item = (usize, f64, u32)>) -> AllPipelines {
        let mut all = AllPipelines::default();
        for (candidate, bytes, count) in staged {
            let Some((via, key)) = self.pipeline_of(candidate) else { continue };
            let pipelines = all.entry(key).or_insert(Pipelines { via, paths: 0, bytes: 0.0, rings: 0 });
            pipelines.paths += u64::from(count);
            pipelines.bytes += bytes * f64::from(count);
        }
        // For each relay device: the number of paths through it, and the number of different pairs of source and destination.
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
                // A ring can hold two of its pieces. So small pieces overlap each other's synchronisations, and large pieces have large
                // chunks.
                let most = (fitting / ways).max(1);
                let alike = self.ring_bytes(*via, ways) as f64 * *paths as f64 / (2.0 * *bytes);
                (alike as u64).clamp(most.min(2), most).min(*paths)
            };
        }
        all
    }

    /// Returns the device that stages a candidate path's data, and the path's source, relay and destination. `None` for the direct path.
    fn pipeline_of(&self, candidate: usize) -> Option<(DeviceId, [DeviceId; 3])> {
        let via = self.candidates[candidate].via?;
        let shape = &self.demand(candidate).shape;
        Some((via, [shape.src_device, via, shape.dst_device]))
    }

    /// Returns the largest size of each of `rings` staging rings on device `via`, bytes.
    fn ring_bytes(&self, via: DeviceId, rings: u64) -> u64 {
        let cached = if via.is_host() { HOST_RINGS.max(rings * HOST_RING) } else { u64::MAX };
        self.options.staging_bytes.min(cached) / rings / GRAIN * GRAIN
    }

    /// Returns the value of [`Selection::host_chunk`] if each candidate path carries `shares` bytes of each of its transfers.
    pub(super) fn host_chunk_for(&self, shares: &[f64]) -> u64 {
        let in_host = |i: &usize| shares[*i] > 0.0 && self.candidates[*i].via.is_some_and(DeviceId::is_host);
        let pipelines = self.pipelines((0..shares.len()).filter(in_host).map(|i| (i, shares[i], self.demand(i).count)));
        let hosts = (0..self.machine.host_count()).map(DeviceId::host);
        let ring = |host: DeviceId| self.ring_bytes(host, rings_on(&pipelines, host));
        hosts.map(|host| ring(host) / 2 / GRAIN * GRAIN).fold(u64::MAX, u64::min).max(GRAIN)
    }
}
