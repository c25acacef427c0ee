//! Plans transfers from and to pageable host memory. CPU threads copy between pageable memory and staging rings in pinned memory. Copy
//! engines copy between these rings and the GPUs.
//!
//! A batch is first planned as if its pageable memory were pinned, with the same paths, sizes and links. Then each copy that begins or ends
//! in pageable memory is cut into chunks. Each chunk passes through a slot of a ring in pinned host memory: a thread fills the slot and a
//! copy in the lane (internal stream) empties it, or the reverse. Threads process chunks in the order of the program. The operations of
//! different lanes are therefore interleaved such that all lanes progress evenly.
//!
//! Each time a stream waits for a thread and notifies threads afterwards, its link idles for about 6 us. The copy of a chunk of 2 MiB over
//! the link takes 38 us. Successive chunks of a lane therefore form a group with one synchronisation: the stream waits until the threads
//! have filled (or emptied) all slots of the group, copies all chunks back to back, and then notifies the threads. On an H200, 15 threads
//! read a file of 6 GiB from tmpfs into the GPU at 47.2 GB/s in groups of one chunk, and at 49.3, 50.1 and 50.7 GB/s in groups of 2, 4 and
//! 8 chunks (2026-11-30).

use super::options::Options;
use super::planned::{Plan, ThreadUse};
use crate::model::{GRAIN, thread_rate};
use crate::program::{Copy, Engine, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId, Shape};
use crate::topology::{DeviceId, Machine, MemoryKind};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Largest size of a chunk, bytes. Larger chunks are evicted from the processor's caches before a copy engine reads them, and the link
/// idles longer until the first chunk is ready. On two H200, 12 threads moved 1 GiB over two links at 39, 49, 57 and 55 GB/s in chunks of
/// 0.5, 1, 2 and 4 MiB (2026-11-26).
const MOST_CHUNK: u64 = 2 << 20;
/// Smallest size of a chunk, bytes. For smaller chunks, synchronisations cost more time than a second thread saves.
const LEAST_CHUNK: u64 = 256 << 10;
/// Largest number of copies that one operation combines into a chunk.
const MOST_COPIES: usize = 64;
/// Number of staging slots for each thread: one that the thread fills, one in flight, and one that becomes free by the time the thread has
/// finished.
const SLOTS_OF_A_THREAD: u64 = 3;

/// True if CPU threads may copy the pageable memory of a transfer: its source or destination is pageable host memory, and the other is on a
/// GPU.
pub(super) fn is_pageable(shape: &Shape) -> bool {
    let kinds = [shape.src_kind, shape.dst_kind];
    shape.bytes > 0 && kinds.contains(&MemoryKind::Pageable) && shape.src_device.is_host() != shape.dst_device.is_host()
}

/// Returns the batch with pageable memory replaced by pinned memory in all transfers whose pageable memory CPU threads may copy.
pub(super) fn as_pinned(batch: &[Shape]) -> Vec<Shape> {
    let pinned = |shape: &Shape| {
        let kind = |kind| if kind == MemoryKind::Pageable { MemoryKind::Pinned } else { kind };
        Shape { dst_kind: kind(shape.dst_kind), src_kind: kind(shape.src_kind), ..*shape }
    };
    batch.iter().map(|shape| if is_pageable(shape) { pinned(shape) } else { *shape }).collect()
}

/// Returns the modelled time in seconds if the driver copies the pageable memory of a batch. The driver stages one transfer after the other
/// in the calling thread.
pub(super) fn seconds_by_driver(machine: &Machine, batch: &[Shape]) -> f64 {
    let costs = machine.costs();
    let of = |shape: &Shape| {
        let part = if shape.src_device.is_host() { costs.pageable_to_gpu } else { costs.pageable_from_gpu };
        costs.copy + shape.bytes as f64 / (link_rate(machine, shape) * part)
    };
    batch.iter().filter(|shape| is_pageable(shape)).map(of).sum()
}

/// Returns the bandwidth of the link between host memory and the GPU of a transfer, in bytes/s.
fn link_rate(machine: &Machine, shape: &Shape) -> f64 {
    machine.route(shape.src_device, shape.dst_device).map_or(f64::INFINITY, |route| route.bandwidth)
}

fn bytes_of(batch: &[Shape]) -> u64 {
    batch.iter().filter(|shape| is_pageable(shape)).fold(0, |sum: u64, shape| sum.saturating_add(shape.bytes))
}

/// Returns the number of CPU threads that copy pageable memory for the batch, at least 1.
fn threads(batch: &[Shape], options: &Options) -> u32 {
    options.threads.min(u32::try_from(bytes_of(batch).div_ceil(LEAST_CHUNK)).unwrap_or(u32::MAX)).max(1)
}

/// Smallest number of chunks for each CPU thread, unless chunks would become smaller than [`LEAST_CHUNK`]. With more chunks, the first
/// chunk reaches the link earlier.
const CHUNKS_OF_A_THREAD: u64 = 8;

/// Returns the size of the chunks that threads copy, in bytes.
pub(super) fn chunk_bytes(batch: &[Shape], options: &Options) -> u64 {
    let most = options.chunk_bytes.unwrap_or(MOST_CHUNK).min(MOST_CHUNK);
    let chunk = (bytes_of(batch) / (CHUNKS_OF_A_THREAD * u64::from(threads(batch, options)))).clamp(LEAST_CHUNK.min(most), most);
    (chunk / GRAIN * GRAIN).max(GRAIN)
}

/// Returns the plan of a batch whose pageable memory is copied by threads. `pinned` is the plan that treats this memory as pinned. Returns
/// `None` if the rings do not fit into staging memory.
pub(super) fn through_threads(machine: &Machine, batch: &[Shape], options: &Options, pinned: Plan) -> Option<Plan> {
    let (bytes, threads, chunk_bytes) = (bytes_of(batch), threads(batch, options), chunk_bytes(batch, options));
    let through = Through { program: &pinned.program, batch, threads, chunk_bytes, staging_bytes: options.staging_bytes };
    let (program, ring_bytes) = through.insert()?;
    let rate = thread_rate(machine);
    // If several transfers share a source, threads may copy it only once, so the bytes are counted in the program.
    let copies = through.program.ops.iter().flat_map(|op| &op.copies).filter(|copy| through.passes(copy));
    let by_threads = copies.map(|copy| copy.bytes as f64).sum::<f64>() / (rate * f64::from(threads));
    let first = chunk_bytes.min(bytes) as f64 / rate + 2.0 * machine.costs().hand_over;
    let transfers =
        pinned.transfers.into_iter().zip(batch).map(|(transfer, shape)| super::TransferPlan { shape: *shape, ..transfer }).collect();
    let used = ThreadUse { threads, chunk_bytes, ring_bytes };
    Some(Plan {
        transfers,
        program: Arc::new(program),
        options: *options,
        executor: Engine::Stream,
        predicted: pinned.predicted.max(by_threads) + first,
        threads: Some(used),
        ..pinned
    })
}

/// Input of the step that adds copies by threads: a program for pinned memory, and the limits of threads, chunks and staging memory.
struct Through<'a> {
    program: &'a Program,
    batch: &'a [Shape],
    threads: u32,
    chunk_bytes: u64,
    staging_bytes: u64,
}

/// Element of the program with copies by CPU threads: an operation of the old program (for pinned memory), or a chunk that passes through
/// staging slots.
struct Unit {
    lane: LaneId,
    mechanism: Mechanism,
    copies: SmallVec<[Copy; 1]>,
    /// Operations of the old program (for pinned memory) that must end before this element starts.
    after: SmallVec<[OpId; 2]>,
    /// Operations of the old program (for pinned memory) that are complete when this element ends.
    ends: SmallVec<[OpId; 1]>,
    passes: bool,
    /// Fraction of the data in the same internal stream that comes before this element.
    progress: f64,
}

/// Staging ring of one lane (internal stream) while the program is transformed.
struct LaneRing {
    ring: RingId,
    slots: u32,
    slot_bytes: u64,
    next: u32,
    /// Operation after which each slot may be filled again; `None` if the slot is unused.
    freed: Vec<Option<OpId>>,
}

impl Through<'_> {
    fn is_pageable(&self, place: Place) -> bool {
        match place {
            Place::Source { transfer, .. } => {
                let shape = &self.batch[transfer as usize];
                is_pageable(shape) && shape.src_kind == MemoryKind::Pageable
            }
            Place::Destination { transfer, .. } => {
                let shape = &self.batch[transfer as usize];
                is_pageable(shape) && shape.dst_kind == MemoryKind::Pageable
            }
            Place::Slot { .. } => false,
        }
    }

    fn passes(&self, copy: &Copy) -> bool {
        self.is_pageable(copy.from) || self.is_pageable(copy.to)
    }

    /// Returns the program with copies by CPU threads, and the total size of its rings of pinned memory in bytes. Returns `None` if the
    /// rings do not fit.
    fn insert(&self) -> Option<(Program, u64)> {
        let mut program = Program {
            sources: self.program.sources.clone(),
            transfers: self.program.transfers.clone(),
            lanes: self.program.lanes.clone(),
            rings: self.program.rings.clone(),
            ops: Vec::new(),
        };
        let mut rings = self.rings(&mut program)?;
        let ring_bytes = program.rings[self.program.rings.len()..].iter().map(Ring::bytes).sum();
        let first_thread = program.lanes.len() as u32;
        program.lanes.extend((0..self.threads).map(|_| Lane::new(DeviceId::HOST)));
        let mut threads = (0..self.threads).map(|number| LaneId(first_thread + number)).cycle();
        let mut done: Vec<Option<OpId>> = vec![None; self.program.ops.len()];
        for group in self.groups(&rings) {
            let mut after: SmallVec<[OpId; 2]> = SmallVec::new();
            for before in &group[0].after {
                after.push(done[before.0 as usize]?);
            }
            let last = if group[0].passes {
                let ring = rings.get_mut(&group[0].lane)?;
                self.push_chunks(&mut program, ring, &mut threads, &group, after)?
            } else {
                let unit = &group[0];
                push(&mut program, unit.lane, unit.mechanism, unit.copies.clone(), after)
            };
            group.iter().flat_map(|unit| &unit.ends).for_each(|op| done[op.0 as usize] = Some(last));
        }
        Some((program, ring_bytes))
    }

    /// Adds the chunks of a group to the program: their copies by threads, and their copies in the internal stream. `after` contains the
    /// operations that must end before the first copy in the stream starts. Returns the last operation of the group in the stream.
    fn push_chunks(
        &self,
        program: &mut Program,
        ring: &mut LaneRing,
        threads: &mut impl Iterator<Item = LaneId>,
        group: &[Unit],
        after: SmallVec<[OpId; 2]>,
    ) -> Option<OpId> {
        let slots: Vec<SmallVec<[u32; 8]>> = group.iter().map(|unit| unit.copies.iter().map(|_| ring.take()).collect()).collect();
        let freed = |ring: &LaneRing, slots: &[u32]| slots.iter().filter_map(|slot| ring.freed[*slot as usize]).collect::<SmallVec<_>>();
        let place = |slot: u32| Place::Slot { ring: ring.ring, slot };
        let into = |(copy, slot): (&Copy, &u32)| Copy { to: place(*slot), ..*copy };
        let out = |(copy, slot): (&Copy, &u32)| Copy { from: place(*slot), ..*copy };
        let mut last = None;
        if self.is_pageable(group[0].copies[0].from) {
            let mut filled = after;
            for (unit, slots) in group.iter().zip(&slots) {
                let copies = unit.copies.iter().zip(slots).map(into).collect();
                filled.push(push(program, threads.next()?, Mechanism::Thread, copies, freed(ring, slots)));
            }
            for (unit, slots) in group.iter().zip(&slots) {
                let copies = unit.copies.iter().zip(slots).map(out).collect();
                last = Some(push(program, unit.lane, unit.mechanism, copies, std::mem::take(&mut filled)));
            }
            slots.iter().flatten().for_each(|slot| ring.freed[*slot as usize] = last);
        } else {
            let mut free: SmallVec<[OpId; 2]> = after;
            slots.iter().for_each(|slots| free.extend(freed(ring, slots)));
            for (unit, slots) in group.iter().zip(&slots) {
                let copies = unit.copies.iter().zip(slots).map(into).collect();
                last = Some(push(program, unit.lane, unit.mechanism, copies, std::mem::take(&mut free)));
            }
            for (unit, slots) in group.iter().zip(&slots) {
                let copies = unit.copies.iter().zip(slots).map(out).collect();
                let emptied = push(program, threads.next()?, Mechanism::Thread, copies, last.into_iter().collect());
                slots.iter().for_each(|slot| ring.freed[*slot as usize] = Some(emptied));
            }
        }
        last
    }

    /// Returns the elements (operations or chunks) of the new program in groups. The groups are in the order of the progress of their first
    /// elements. Successive chunks of an internal stream form a group. Each operation is a group of its own.
    fn groups(&self, rings: &BTreeMap<LaneId, LaneRing>) -> Vec<SmallVec<[Unit; 4]>> {
        let mut units = self.units(rings);
        units.sort_by(|a, b| a.progress.total_cmp(&b.progress).then(a.ends.first().cmp(&b.ends.first())));
        let mut groups: Vec<SmallVec<[Unit; 4]>> = Vec::new();
        let mut open: BTreeMap<LaneId, usize> = BTreeMap::new();
        for unit in units {
            let joins = |group: &SmallVec<[Unit; 4]>| {
                let slots: usize = group.iter().map(|unit| unit.copies.len()).sum();
                let is_same = self.is_pageable(unit.copies[0].from) == self.is_pageable(group[0].copies[0].from);
                unit.passes && unit.after.is_empty() && group[0].passes && is_same && slots + unit.copies.len() <= rings[&unit.lane].group()
            };
            match open.get(&unit.lane) {
                Some(at) if joins(&groups[*at]) => groups[*at].push(unit),
                _ => {
                    open.insert(unit.lane, groups.len());
                    groups.push(smallvec![unit]);
                }
            }
        }
        groups
    }

    /// Adds a ring to the program for each internal stream that moves pageable data. The rings share the staging memory that the program
    /// does not use. Returns `None` if it is too small.
    fn rings(&self, program: &mut Program) -> Option<BTreeMap<LaneId, LaneRing>> {
        // Four properties of each internal stream: the device of its host memory, the size of its largest copy, the number of its chunks,
        // and the size of its largest copy that must not be cut into chunks.
        let mut lanes: BTreeMap<LaneId, (DeviceId, u64, u64, u64)> = BTreeMap::new();
        for op in &self.program.ops {
            for copy in op.copies.iter().filter(|copy| self.passes(copy)) {
                let device = match (copy.from, copy.to) {
                    (Place::Source { transfer, .. }, _) if self.is_pageable(copy.from) => self.batch[transfer as usize].src_device,
                    (_, Place::Destination { transfer, .. }) => self.batch[transfer as usize].dst_device,
                    _ => DeviceId::HOST,
                };
                let is_whole = [copy.from, copy.to].iter().any(|place| matches!(place, Place::Slot { .. }));
                let (_, largest, count, whole) = lanes.entry(op.lane).or_insert((device, 0, 0, 0));
                *whole = (*whole).max(if is_whole { copy.bytes } else { 0 });
                *largest = (*largest).max(copy.bytes);
                *count += copy.bytes.div_ceil(self.chunk_bytes);
            }
        }
        let hosts = || lanes.values().map(|(device, ..)| *device);
        let taken = hosts().map(|device| program.staging_bytes(device)).max().unwrap_or(0);
        let room = self.staging_bytes.checked_sub(taken)? / lanes.len().max(1) as u64 / GRAIN * GRAIN;
        let mut rings = BTreeMap::new();
        for (lane, (device, largest, count, whole)) in lanes {
            let slot_bytes = self.chunk_bytes.min(largest.next_multiple_of(GRAIN)).min(room / 2 / GRAIN * GRAIN);
            let wanted = SLOTS_OF_A_THREAD * u64::from(self.threads) * self.chunk_bytes.div_ceil(slot_bytes.max(1));
            let slots = (room / slot_bytes.max(1)).min(wanted).min(count.max(2)) as u32;
            if slot_bytes == 0 || slots < 2 || slot_bytes < whole {
                return None;
            }
            program.rings.push(Ring { device, slot_bytes, slots });
            let ring = RingId(program.rings.len() as u32 - 1);
            rings.insert(lane, LaneRing { ring, slots, slot_bytes, next: 0, freed: vec![None; slots as usize] });
        }
        Some(rings)
    }

    /// Returns the elements (operations or chunks) of the program with copies by CPU threads. Elements of the same internal stream are in
    /// order.
    fn units(&self, rings: &BTreeMap<LaneId, LaneRing>) -> Vec<Unit> {
        let mut units: Vec<Unit> = Vec::new();
        for lane in (0..self.program.lanes.len() as u32).map(LaneId) {
            let ops = || (0_u32..).map(OpId).zip(&self.program.ops).filter(|(_, op)| op.lane == lane);
            let all: u64 = ops().flat_map(|(_, op)| &op.copies).map(|copy| copy.bytes).sum();
            let slot_bytes = rings.get(&lane).map_or(u64::MAX, |ring| ring.slot_bytes);
            let most_copies = rings.get(&lane).map_or(1, |ring| (ring.slots as usize / 2).clamp(1, MOST_COPIES));
            let (mut before, mut open): (u64, Option<(Unit, u64)>) = (0, None);
            let progress = |before: u64| before as f64 / all.max(1) as f64;
            for (number, op) in ops() {
                let passes = op.copies.iter().all(|copy| self.passes(copy));
                if !passes || !op.after.is_empty() {
                    units.extend(open.take().map(|(unit, _)| unit));
                }
                if !passes {
                    let bytes: u64 = op.copies.iter().map(|copy| copy.bytes).sum();
                    let (mechanism, copies, after) = (op.mechanism, op.copies.clone(), op.after.clone());
                    units.push(Unit { lane, mechanism, copies, after, ends: smallvec![number], passes, progress: progress(before) });
                    before += bytes;
                    continue;
                }
                let mut after = op.after.clone();
                for piece in op.copies.iter().flat_map(|copy| pieces(copy, slot_bytes)) {
                    let is_other = |unit: &Unit| self.is_pageable(unit.copies[0].from) != self.is_pageable(piece.from);
                    let is_full = |(unit, bytes): &(Unit, u64)| {
                        bytes + piece.bytes > self.chunk_bytes || unit.copies.len() >= most_copies || is_other(unit)
                    };
                    if open.as_ref().is_some_and(is_full) {
                        units.extend(open.take().map(|(unit, _)| unit));
                    }
                    let (unit, bytes) = open.get_or_insert_with(|| {
                        let (copies, ends) = (SmallVec::new(), SmallVec::new());
                        let after = std::mem::take(&mut after);
                        (Unit { lane, mechanism: Mechanism::Copy, copies, after, ends, passes, progress: progress(before) }, 0)
                    });
                    unit.copies.push(piece);
                    unit.mechanism = if unit.copies.len() > 1 { Mechanism::Batch } else { Mechanism::Copy };
                    if unit.ends.last() != Some(&number) {
                        unit.ends.push(number);
                    }
                    *bytes += piece.bytes;
                    before += piece.bytes;
                }
            }
            units.extend(open.map(|(unit, _)| unit));
        }
        units
    }
}

/// Adds an operation to a program and returns its number.
fn push(program: &mut Program, lane: LaneId, mechanism: Mechanism, copies: SmallVec<[Copy; 1]>, mut after: SmallVec<[OpId; 2]>) -> OpId {
    after.sort_unstable();
    after.dedup();
    program.ops.push(Op { lane, mechanism, copies, after });
    OpId(program.ops.len() as u32 - 1)
}

impl LaneRing {
    /// Returns the maximum number of slots that the chunks of a group use. The ring has room for four groups, so threads fill or empty
    /// slots of some groups while the stream copies another group.
    fn group(&self) -> usize {
        self.slots as usize / 4
    }

    fn take(&mut self) -> u32 {
        let slot = self.next;
        self.next = (slot + 1) % self.slots;
        slot
    }
}

/// Returns consecutive pieces of a copy, of at most `most` bytes each.
fn pieces(copy: &Copy, most: u64) -> impl Iterator<Item = Copy> + use<> {
    let copy = *copy;
    let at = |place: Place, by: u64| match place {
        Place::Source { transfer, offset } => Place::Source { transfer, offset: offset + by },
        Place::Destination { transfer, offset } => Place::Destination { transfer, offset: offset + by },
        slot => slot,
    };
    (0..copy.bytes.div_ceil(most)).map(move |number| {
        let begin = number * most;
        Copy { from: at(copy.from, begin), to: at(copy.to, begin), bytes: most.min(copy.bytes - begin) }
    })
}
