//! Implements partitioned transfers, which send each part (partition) of a buffer as soon as it has been computed. Flags signal to the
//! copies that a partition is ready, and to the receiver that it has arrived.
//!
//! Each partition of a transfer has a ready flag. The producer, that is, the kernel that computes the partition, sets the flag. Every lane
//! (internal stream) that reads the partition waits for the flag. If arrivals are signalled, the partition also has one arrival flag for
//! every lane that writes to the transfer's destination. All these flags stay set until the next step begins. A receiver may therefore read
//! them any number of times, and an unset flag means that data are missing.
//!
//! All partitions of a transfer have the same number of arrival flags. If a lane moves no byte of a partition, another lane sets its flag.
//! If producers store the data at the destination themselves, there are no ready flags, and the producers set the arrival flags, provided
//! that arrivals are signalled. There are no flags at all if all partitions move after their producers, in stream order.

use super::ranks::{FlagId, Parts, RankedBatch};
use super::{Copy, Place};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Division of a transfer into partitions of equal size. The last partition may be smaller.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Partitions {
    /// Size of the transfer, bytes.
    pub total: u64,
    /// Size in bytes of each partition except the last.
    pub bytes: u64,
    /// Number of partitions; 0 for a transfer of 0 bytes.
    pub count: u32,
}

/// Maximum number of partitions of a transfer. Each partition costs a wait and a copy on the internal streams, and the arguments of a
/// kernel can hold only a limited number of flags.
pub const MOST_PARTITIONS: u32 = 4096;

impl Partitions {
    /// Divides a transfer of `total` bytes into at most `count` partitions. The partition size is rounded up, so fewer partitions may be
    /// enough.
    pub fn new(total: u64, count: u32) -> Partitions {
        if total == 0 {
            return Partitions::default();
        }
        let bytes = total.div_ceil(u64::from(count.max(1)));
        Partitions { total, bytes, count: total.div_ceil(bytes) as u32 }
    }

    /// Returns the range of bytes of a partition, relative to the start of its transfer.
    pub fn range(&self, partition: u32) -> Range<u64> {
        let begin = u64::from(partition) * self.bytes;
        begin..(begin + self.bytes).min(self.total)
    }

    /// Returns the numbers of the partitions that overlap a range of the transfer.
    pub fn touched(&self, offset: u64, bytes: u64) -> Range<u32> {
        if bytes == 0 {
            return 0..0;
        }
        (offset / self.bytes) as u32..((offset + bytes - 1) / self.bytes) as u32 + 1
    }
}

/// Flags of the partitions of one transfer.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct PartitionFlags {
    /// Index of the ready flag of partition 0 in [`Parts::flags`]. The ready flags of the other partitions follow.
    pub ready: u32,
    /// Index of the first arrival flag of partition 0 in [`Parts::flags`]. The arrival flags of all partitions are contiguous.
    pub arrived: u32,
    /// Number of arrival flags of each partition, or 0 if arrivals are not signalled. A partition has arrived when all its arrival flags
    /// are set.
    pub writers: u32,
}

impl PartitionFlags {
    /// Returns the arrival flags of one partition.
    pub fn arrived(&self, partition: u32) -> impl Iterator<Item = FlagId> {
        let first = self.arrived + partition * self.writers;
        (first..first + self.writers).map(FlagId)
    }
}

/// Error: the program makes a rank read the source of a transfer that belongs to another rank. The kernels that compute the data could not
/// signal the internal streams of the reading rank.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ReadElsewhere {
    /// Index of the transfer in the batch.
    pub transfer: u32,
    /// Rank that would read the transfer.
    pub rank: u32,
}

/// Internal streams that write to one transfer. The key consists of a rank and the number of one of the rank's internal streams. The value
/// is the index of this stream among the streams that write to the transfer.
type Lanes = BTreeMap<(u32, u32), u32>;

/// Method by which partitions reach their destinations. Code derives the number of methods from the number of the last variant, so the last
/// variant must have the largest number.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum PartitionMove {
    /// The program moves each partition as soon as it is ready.
    Early,
    /// The program moves all partitions after the kernels that compute the data (producers), in stream order. Arrivals are not signalled.
    After,
    /// The kernels that compute the data (producers) store it at the destination, so the program copies nothing.
    Stored,
}

impl PartitionMove {
    /// True if a stream or kernel reads the flags that producers set. `tells` is true if arrivals are signalled.
    pub fn counts(self, tells: bool) -> bool {
        match self {
            PartitionMove::Early => true,
            PartitionMove::After => false,
            PartitionMove::Stored => tells,
        }
    }
}

/// Returns, for each transfer, the internal streams that write to its destination, each with a number.
fn writers(parts: &Parts, transfers: usize) -> Vec<Lanes> {
    let mut writers: Vec<Lanes> = vec![Lanes::new(); transfers];
    for (rank, part) in (0..).zip(&parts.parts) {
        for step in &part.steps {
            for (transfer, ..) in step.copies.iter().filter_map(destination) {
                let lanes = &mut writers[transfer as usize];
                let number = lanes.len() as u32;
                lanes.entry((rank, step.lane)).or_insert(number);
            }
        }
    }
    writers
}

/// Adds the flags of partitions to a program that was divided among ranks, and returns the flags of each transfer. `partitions` has one
/// entry for each transfer; `tells` is true if arrivals are signalled. Each copy waits for all partitions that it reads, unless all
/// partitions move after their producers. Returns an error if a rank reads the source of another rank.
pub fn add_partition_flags(
    parts: &mut Parts,
    batch: &RankedBatch<'_>,
    partitions: &[Partitions],
    how: PartitionMove,
    tells: bool,
) -> Result<Vec<PartitionFlags>, ReadElsewhere> {
    for (rank, part) in (0..).zip(&parts.parts) {
        for (transfer, ..) in part.steps.iter().flat_map(|step| &step.copies).filter_map(source) {
            if batch.ends[transfer as usize].src != rank {
                return Err(ReadElsewhere { transfer, rank });
            }
        }
    }
    let mut flags = vec![PartitionFlags::default(); partitions.len()];
    if how == PartitionMove::After {
        return Ok(flags);
    }
    let is_stored = how == PartitionMove::Stored;
    let writers = if tells && !is_stored { writers(parts, partitions.len()) } else { vec![Lanes::new(); partitions.len()] };
    let all = || (0..).zip(partitions.iter().zip(batch.ends));
    let mut add = |count: u32, raiser: u32, taker: u32| {
        let first = parts.flags.len() as u32;
        for _ in 0..count {
            parts.flag(raiser, taker);
        }
        first
    };
    // All ready flags come before all arrival flags, so that the flags in the memory of one rank are contiguous.
    for (transfer, (partitions, ends)) in all().filter(|_| !is_stored) {
        flags[transfer].ready = add(partitions.count, ends.src, ends.src);
    }
    for (transfer, (partitions, ends)) in all() {
        let flags: &mut PartitionFlags = &mut flags[transfer];
        flags.writers = if is_stored { u32::from(tells) } else { writers[transfer].len() as u32 };
        flags.arrived = add(partitions.count * flags.writers, ends.src, ends.dst);
        if is_stored {
            flags.ready = flags.arrived;
        }
    }
    if is_stored {
        let others = all().filter(|(_, (partitions, ends))| partitions.count > 0 && ends.src != ends.dst);
        let pairs: BTreeSet<(u32, u32)> = others.map(|(_, (_, ends))| (ends.src, ends.dst)).collect();
        for (src, dst) in pairs {
            let (begin, end) = (parts.flag(dst, src), parts.flag(src, dst));
            parts.parts[dst as usize].begins.push(begin);
            parts.parts[src as usize].arms.push(begin);
            parts.parts[src as usize].written.push(end);
            parts.parts[dst as usize].ends.push(end);
        }
        return Ok(flags);
    }
    for part in &mut parts.parts {
        // Pairs of an internal stream and a flag for which the stream already waits.
        let mut awaited = BTreeSet::new();
        for step in &mut part.steps {
            for (transfer, offset, bytes) in step.copies.iter().filter_map(source) {
                for partition in partitions[transfer as usize].touched(offset, bytes) {
                    let flag = flags[transfer as usize].ready + partition;
                    if awaited.insert((step.lane, flag)) {
                        step.awaits.push(FlagId(flag));
                    }
                }
            }
        }
    }
    raise_arrivals(parts, partitions, &flags, &writers);
    for part in parts.parts.iter_mut().filter(|part| !part.lanes.is_empty()) {
        // The first internal stream is the caller's stream, which contains the producers. Work that waits for the producers must not be
        // enqueued in it.
        part.lanes.insert(0, part.lanes[0]);
        part.steps.iter_mut().for_each(|step| step.lane += 1);
    }
    Ok(flags)
}

/// Makes operations set the arrival flags. For each partition and each internal stream that writes to the partition, the last operation of
/// the stream that writes to the partition sets the stream's arrival flag. One of these operations also sets the flags of internal streams
/// that write nothing to the partition.
fn raise_arrivals(parts: &mut Parts, partitions: &[Partitions], flags: &[PartitionFlags], writers: &[Lanes]) {
    // Last operation that writes to the partition of each arrival flag. The key is the flag. The value holds the rank and the index of the
    // operation in [`Part::steps`].
    let mut last: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
    for (rank, part) in (0..).zip(&parts.parts) {
        for (number, step) in (0..).zip(&part.steps) {
            for (transfer, offset, bytes) in step.copies.iter().filter_map(destination) {
                let of = &flags[transfer as usize];
                let Some(lane) = writers[transfer as usize].get(&(rank, step.lane)) else { continue };
                for partition in partitions[transfer as usize].touched(offset, bytes) {
                    last.insert(of.arrived + partition * of.writers + lane, (rank, number));
                }
            }
        }
    }
    for (of, partitions) in flags.iter().zip(partitions) {
        for partition in 0..partitions.count {
            let some = of.arrived(partition).find_map(|flag| last.get(&flag.0).copied());
            for flag in of.arrived(partition) {
                if let Some((rank, step)) = last.get(&flag.0).copied().or(some) {
                    parts.parts[rank as usize].steps[step as usize].raises.push(flag);
                    parts.flags[flag.0 as usize].raiser = rank;
                }
            }
        }
    }
}

/// Returns the index of the transfer that a copy reads, the offset in the transfer's source and the size, both in bytes. Returns `None` for
/// a copy from a staging slot.
fn source(copy: &Copy) -> Option<(u32, u64, u64)> {
    if let Place::Source { transfer, offset } = copy.from { Some((transfer, offset, copy.bytes)) } else { None }
}

/// Returns the index of the transfer that a copy writes, the offset in the transfer's destination and the size, both in bytes. Returns
/// `None` for a copy to a staging slot.
fn destination(copy: &Copy) -> Option<(u32, u64, u64)> {
    if let Place::Destination { transfer, offset } = copy.to { Some((transfer, offset, copy.bytes)) } else { None }
}

#[cfg(all(test, loom))]
#[path = "../../../tests/rust/trigger_model.rs"]
mod trigger_model;
