//! Creates programs that transfer each partition of a transfer as soon as it is ready.
//!
//! The fraction of the data on each path is that of the plan, and every path carries that fraction of every partition. So all paths have
//! work from the first partition on, and no path alone carries the part of the transfer that becomes ready last. If a staged path's part of
//! one partition is smaller than a chunk, it is combined with the parts of following partitions until it fills a chunk.

use super::lower::{DirectOp, Piece, StagedPath, copying_device, lower};
use super::planned::{PathPlan, Plan};
use crate::model::GRAIN;
use crate::program::{Gpus, Mechanism, Op, OpId, PartitionMove, Partitions, Place, Program, Ring};
use crate::topology::{DeviceId, Machine};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Smallest size of a partition that the library chooses automatically, bytes.
const LEAST_BYTES: u64 = 64 << 10;

/// Largest number of internal streams for direct copies from one device. If there are more transfers, several use one internal stream.
const DIRECT_LANES: u32 = 16;

/// Modelled time of partitioned transfers whose data is produced at the rate at which it is transferred.
#[derive(Clone, Debug, PartialEq)]
pub struct PartitionForecast {
    /// Number and size of the partitions of each transfer.
    pub partitions: Vec<Partitions>,
    /// Time from the start of the first producer to the end of the last transfer, seconds.
    pub seconds: f64,
}

/// Variant of a partitioned plan: one method to move partitions to their destination.
#[derive(Clone, Debug)]
pub struct PartitionVariant {
    /// Human-readable name of the variant.
    pub name: &'static str,
    /// Plan that contains the program of this variant.
    pub plan: Plan,
    /// Modelled time of the variant in seconds, as defined by [`PartitionForecast::seconds`].
    pub seconds: f64,
    /// Method that moves the data.
    pub how: PartitionMove,
}

/// Returns the variants in which copy engines move the partitions of a forecast over the paths of `plan`. The first moves each partition
/// separately. The second moves all partitions after the last has been produced; it is omitted if `adapts` is false. (A third variant, with
/// four partitions at a time, saves one synchronisation each, but was active in only one of 96 plans of five programs on two H200.)
pub fn partition_variants(machine: &Machine, plan: Plan, forecast: &PartitionForecast, adapts: bool) -> Vec<PartitionVariant> {
    let most = forecast.partitions.iter().map(|partitions| partitions.count).max().unwrap_or(0);
    let variant = |name, n: u32, program, how| {
        let seconds = in_partitions(plan.predicted, f64::from(n.max(1)), machine.costs().hand_over);
        PartitionVariant { name, seconds, plan: Plan { program, ..plan.clone() }, how }
    };
    let by_itself = Arc::new(partition(&plan, &forecast.partitions));
    let mut variants = vec![variant("each partition as soon as it is ready", most, by_itself, PartitionMove::Early)];
    if adapts && most > 1 {
        variants.push(variant("all partitions after their producers have finished", 1, Arc::clone(&plan.program), PartitionMove::After));
    }
    variants
}

/// Returns the forecast for copy engines that move `totals` bytes over the paths of `plan`. If `count` is `None`, the best number of
/// partitions is chosen: the square root of (time of the transfer / cost of a partition). The cost of a partition is one synchronisation.
/// On H200 a synchronisation took 5.3 us, and 24 to 32 partitions were best for transfers of 4.8 ms, 8 for 0.6 ms and 4 for 0.09 ms
/// (docs/results.md).
pub fn forecast_engines(machine: &Machine, plan: &Plan, totals: &[u64], count: Option<u32>) -> PartitionForecast {
    let (seconds, cost) = (plan.predicted, machine.costs().hand_over);
    let best = (seconds / cost).sqrt().round() as u64;
    let divided = |total: &u64| {
        let most = (total / LEAST_BYTES).clamp(1, 64);
        Partitions::new(*total, count.unwrap_or(best.clamp(1, most) as u32))
    };
    let partitions: Vec<Partitions> = totals.iter().map(divided).collect();
    let n = f64::from(partitions.iter().map(|partitions| partitions.count).max().unwrap_or(1).max(1));
    PartitionForecast { partitions, seconds: in_partitions(seconds, n, cost) }
}

/// Returns the total time of a transfer in `n` partitions: the transfer time of the last partition follows its production, and each
/// partition adds `cost`.
fn in_partitions(seconds: f64, n: f64, cost: f64) -> f64 {
    seconds + seconds / n + n * cost
}

/// Returns the program of `plan` in which no copy reads from two partitions. `partitions` has one entry for each transfer of the plan.
pub fn partition(plan: &Plan, partitions: &[Partitions]) -> Program {
    let program = lowered(plan, partitions, |_| true);
    let fits = |ring: &Ring| program.staging_bytes(ring.device) <= plan.options.staging_bytes;
    if program.rings.iter().all(fits) {
        return program;
    }
    // Paths that shared a staging ring in the plan have separate rings here, so the rings may not fit. The staged paths are then left out,
    // except for transfers that have no other path.
    lowered(plan, partitions, |path| path.via.is_none())
}

fn lowered(plan: &Plan, partitions: &[Partitions], helps: impl Fn(&PathPlan) -> bool) -> Program {
    let (mut direct, mut staged) = (Vec::new(), Vec::new());
    for (number, (transfer, partitions)) in (0..).zip(plan.transfers.iter().zip(partitions)) {
        // Finds the path that carries the bytes that the other paths leave.
        let Some(main) = transfer.paths.iter().max_by_key(|path| (path.via.is_none(), path.bytes)) else { continue };
        let others: SmallVec<[&PathPlan; 4]> = transfer.paths.iter().filter(|path| *path != main && helps(path)).collect();
        let mut owed: SmallVec<[u64; 4]> = smallvec![0; others.len()];
        let mut pieces: SmallVec<[SmallVec<[Piece; 1]>; 4]> = smallvec![SmallVec::new(); others.len()];
        let mut rest: SmallVec<[Piece; 1]> = SmallVec::new();
        for range in (0..partitions.count).map(|partition| partitions.range(partition)) {
            let mut begin = range.start;
            for ((path, owed), pieces) in others.iter().zip(&mut owed).zip(&mut pieces) {
                *owed += (u128::from(range.end - range.start) * u128::from(path.bytes) / u128::from(partitions.total)) as u64;
                let bytes = *owed / GRAIN * GRAIN;
                if bytes >= path.chunk_bytes.min(path.bytes) && bytes > 0 && begin + bytes < range.end {
                    pieces.push(Piece { transfer: number, offset: begin, bytes });
                    (*owed, begin) = (*owed - bytes, begin + bytes);
                }
            }
            rest.push(Piece { transfer: number, offset: begin, bytes: range.end - begin });
        }
        let shape = &transfer.shape;
        let mut stage = |via: DeviceId, path: &PathPlan, pieces: SmallVec<[Piece; 1]>| {
            let lanes = [copying_device(shape.src_device, via), copying_device(via, shape.dst_device)];
            // With two slots, chunks of two partitions overlap, even if the plan has a single chunk.
            let slots = if path.slots == 1 && partitions.count > 1 { 2 } else { path.slots };
            let slot_bytes = path.chunk_bytes.min(pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0).next_multiple_of(GRAIN));
            if !pieces.is_empty() {
                staged.push(StagedPath { pieces, lanes, ring: Ring { device: via, slot_bytes, slots } });
            }
        };
        for (path, pieces) in others.iter().zip(pieces) {
            if let Some(via) = path.via {
                stage(via, path, pieces);
            }
        }
        match main.via {
            Some(via) => stage(via, main, rest),
            None => {
                let device = copying_device(shape.src_device, shape.dst_device);
                let op = |piece| DirectOp { device, also: Gpus::NONE, mechanism: Mechanism::Copy, pieces: smallvec![piece] };
                direct.extend(rest.into_iter().map(op));
            }
        }
    }
    let bytes = plan.transfers.iter().map(|transfer| transfer.shape.bytes).collect();
    // The partitions of a transfer alternate between two lanes (internal streams) if there are enough lanes. One lane then signals while
    // the other still moves data. Between two H200, 32 partitions of 256 MiB take 805 us instead of 871 us if arrivals are not signalled.
    // If they are signalled, it makes no difference.
    let turns = if partitions.len() <= DIRECT_LANES as usize / 2 { 2 } else { 1 };
    let key = |op: &DirectOp| {
        let lane = |piece: &Piece| (piece.transfer % DIRECT_LANES, piece.offset / partitions[piece.transfer as usize].bytes.max(1) % turns);
        (op.device, op.pieces.first().map(lane))
    };
    let mut program = lower(bytes, &direct, key, &staged);
    by_partition(&mut program, partitions);
    program
}

/// Sorts operations by the time at which their partitions are expected, so that no internal stream waits for operations of another to be
/// issued.
fn by_partition(program: &mut Program, partitions: &[Partitions]) {
    let due = |op: &Op| {
        let earliest = op.copies.iter().filter_map(|copy| match (copy.from, copy.to) {
            (Place::Source { transfer, offset }, _) | (_, Place::Destination { transfer, offset }) => {
                let Partitions { bytes, count, .. } = partitions[transfer as usize];
                Some(((offset / bytes.max(1)) << 32) / u64::from(count.max(1)))
            }
            _ => None,
        });
        earliest.max().unwrap_or(0)
    };
    let mut order: Vec<u32> = (0..program.ops.len() as u32).collect();
    // The sort is stable. Operations of one partition keep their order, and so do both hops of a chunk, the lanes and the slots.
    order.sort_by_key(|op| due(&program.ops[*op as usize]));
    let mut place = vec![OpId(0); order.len()];
    for (new, old) in (0..).zip(&order) {
        place[*old as usize] = OpId(new);
    }
    let mut ops: Vec<Option<Op>> = std::mem::take(&mut program.ops).into_iter().map(Some).collect();
    program.ops = order.iter().filter_map(|op| ops[*op as usize].take()).collect();
    for after in program.ops.iter_mut().flat_map(|op| &mut op.after) {
        *after = place[after.0 as usize];
    }
}
