//! Transfers that move in partitions: the flags by which a step waits until what it reads is ready, and says what has arrived.
//!
//! Each partition of a transfer has a flag that whoever produces it raises and that every lane awaits which reads from it, and, where
//! arrivals are told, a flag for every lane that writes to its destination. All of them stay up until the next step begins: so whoever
//! receives asks as often as it likes, and what is not up has not come. Lanes that have nothing of a partition have their flag of arrival
//! too, so that all partitions of a transfer have as many: it is raised with another lane's. Of a transfer whose bytes the producers
//! themselves store at the destination both kinds are one, and where nobody is told there are none. Nor are there where all partitions move after
//! their producers, in stream order.

use super::ranks::{FlagId, Parts, RankedBatch};
use super::{Copy, Place};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// How a transfer is divided: into partitions of equal size, of which the last may be shorter.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Partitions {
    /// Bytes of the transfer.
    pub total: u64,
    /// Bytes of each partition but the last.
    pub bytes: u64,
    /// How many there are; none of a transfer without bytes.
    pub count: u32,
}

/// The most partitions of a transfer: each costs its lanes a wait and a copy, and a kernel's argument may name few flags.
pub const MOST_PARTITIONS: u32 = 4096;

impl Partitions {
    /// `count` partitions of `total` bytes; fewer where whole ones of that size are enough.
    pub fn new(total: u64, count: u32) -> Partitions {
        if total == 0 {
            return Partitions::default();
        }
        let bytes = total.div_ceil(u64::from(count.max(1)));
        Partitions { total, bytes, count: total.div_ceil(bytes) as u32 }
    }

    /// Where a partition lies in its transfer.
    pub fn range(&self, partition: u32) -> Range<u64> {
        let begin = u64::from(partition) * self.bytes;
        begin..(begin + self.bytes).min(self.total)
    }

    /// The partitions that a range of the transfer touches.
    pub fn touched(&self, offset: u64, bytes: u64) -> Range<u32> {
        if bytes == 0 {
            return 0..0;
        }
        (offset / self.bytes) as u32..((offset + bytes - 1) / self.bytes) as u32 + 1
    }
}

/// The flags of a transfer's partitions.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct PartitionFlags {
    /// That of partition 0 which its producer raises; the others' follow.
    pub ready: u32,
    /// The first one that tells of arrival.
    pub arrived: u32,
    /// Flags that tell of one partition's arrival: all are raised. None where nobody asks.
    pub writers: u32,
}

impl PartitionFlags {
    /// Those that tell of a partition's arrival.
    pub fn arrived(&self, partition: u32) -> impl Iterator<Item = FlagId> {
        let first = self.arrived + partition * self.writers;
        (first..first + self.writers).map(FlagId)
    }
}

/// A transfer that is not read by the rank whose memory it is: then nobody there could tell that rank's lanes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct ReadElsewhere {
    /// The transfer.
    pub transfer: u32,
    /// The rank that reads it.
    pub rank: u32,
}

/// A lane of a rank, and the number that it has among those of a transfer.
type Lanes = BTreeMap<(u32, u32), u32>;

/// How partitions get to their destinations. The last is the largest as a number.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum PartitionMove {
    /// The program moves each as soon as it is ready.
    Early,
    /// The program moves all of them after their producers, in stream order, and nobody is told of arrivals.
    After,
    /// Producers store their bytes, and the program does not move them.
    Stored,
}

impl PartitionMove {
    /// Whether anybody looks at what producers say, where receivers are told of arrivals or not.
    pub fn counts(self, tells: bool) -> bool {
        match self {
            PartitionMove::Early => true,
            PartitionMove::After => false,
            PartitionMove::Stored => tells,
        }
    }
}

/// The lanes that write to the destination of each transfer, numbered.
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

/// Adds the flags of `partitions`, one entry for each transfer, to a division of a program, in which receivers are told of arrivals or not. A copy
/// awaits all partitions that it reads from; none does where all move after their producers.
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
    // First all of one kind, then all of the other: so those that lie with a rank lie together.
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
        // By lane and flag.
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
        // The first lane is the caller's stream, in which the producers are: nothing that waits for them may stand there.
        part.lanes.insert(0, part.lanes[0]);
        part.steps.iter_mut().for_each(|step| step.lane += 1);
    }
    Ok(flags)
}

/// Has the last step of each lane that writes to a partition raise its flag, and one of them those of lanes that do not.
fn raise_arrivals(parts: &mut Parts, partitions: &[Partitions], flags: &[PartitionFlags], writers: &[Lanes]) {
    // By flag: the rank and the step.
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

/// The range of a transfer that a copy reads.
fn source(copy: &Copy) -> Option<(u32, u64, u64)> {
    if let Place::Source { transfer, offset } = copy.from { Some((transfer, offset, copy.bytes)) } else { None }
}

/// The range of a transfer that a copy writes.
fn destination(copy: &Copy) -> Option<(u32, u64, u64)> {
    if let Place::Destination { transfer, offset } = copy.to { Some((transfer, offset, copy.bytes)) } else { None }
}

#[cfg(all(test, loom))]
#[path = "../../../tests/rust/trigger_model.rs"]
mod trigger_model;
