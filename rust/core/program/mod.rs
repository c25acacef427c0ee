//! Programs: lists of copy operations with their order, mechanisms and staging slots.
//!
//! A program names places, not addresses: a byte of a transfer's source or destination, or a byte of a staging slot. So one program serves
//! every set of addresses of the same shape, and every backend runs the same program.
//!
//! Operations on one lane run in the order of [`Program::ops`]. Across lanes, only [`Op::after`] orders operations. Nothing else is
//! guaranteed, and the validator (`validate`) assumes nothing else.

mod engine;
mod partitioned;
pub mod ranks;
mod shape;
mod validate;

pub use engine::Engine;
pub use partitioned::{MOST_PARTITIONS, PartitionFlags, PartitionMove, Partitions, ReadElsewhere, add_partition_flags};
pub use shape::Shape;
pub use validate::{Violation, validate};

use crate::topology::{DeviceId, MAX_DEVICES};
use smallvec::SmallVec;
use std::collections::BTreeSet;

/// Index into [`Program::ops`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u32);
/// Index into [`Program::lanes`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(pub u32);
/// Index into [`Program::rings`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RingId(pub u32);

/// Set of GPUs.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gpus([u64; Gpus::WORDS]);

impl Gpus {
    /// Empty set.
    pub const NONE: Gpus = Gpus([0; Gpus::WORDS]);

    /// Number of 64-bit words, enough for the largest number of GPUs of a machine.
    const WORDS: usize = MAX_DEVICES / 64;

    /// True if this GPU is in the set. Host memory never is.
    pub fn contains(self, gpu: DeviceId) -> bool {
        u32::try_from(gpu.0).is_ok_and(|gpu| self.0.get(gpu as usize / 64).is_some_and(|word| word >> (gpu % 64) & 1 == 1))
    }

    /// True if the set is empty.
    pub fn is_empty(self) -> bool {
        self == Gpus::NONE
    }

    /// Returns the GPUs in the order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = DeviceId> + Clone {
        (0..).zip(self.0).flat_map(|(at, word): (u32, u64)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let gpu = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(DeviceId::gpu(64 * at + gpu))
            })
        })
    }
}

impl FromIterator<DeviceId> for Gpus {
    /// Collects GPUs of a machine and ignores host memory.
    fn from_iter<T: IntoIterator<Item = DeviceId>>(gpus: T) -> Self {
        let mut set = Gpus::NONE;
        for gpu in gpus.into_iter().filter_map(|gpu| u32::try_from(gpu.0).ok()) {
            if let Some(word) = set.0.get_mut(gpu as usize / 64) {
                *word |= 1 << (gpu % 64);
            }
        }
        set
    }
}

/// Sequence of operations that one device issues in order: a stream on CUDA. On host memory, the work of one CPU thread.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    /// Device whose copy engine does the work. For a copy from or to host memory it is the GPU at the other end.
    pub device: DeviceId,
    /// Other GPUs that may do the work instead, because the choice of the GPU costs less than starting a lane on one GPU after work on
    /// another. For copies between two GPUs this is the other end; for a kernel, all GPUs of a batch. Only plain copies and kernels run on
    /// such a lane.
    pub also: Gpus,
}

impl Lane {
    /// Returns a lane that only `device` can work on.
    pub fn new(device: DeviceId) -> Lane {
        Lane { device, also: Gpus::NONE }
    }

    /// Returns the devices that may work on this lane.
    pub fn devices(self) -> impl Iterator<Item = DeviceId> + Clone {
        std::iter::once(self.device).chain(self.also.iter())
    }

    /// Returns the device that works on this lane if the caller's stream belongs to `home`: `home` itself, if it may.
    pub fn device_for(&self, home: DeviceId) -> DeviceId {
        if self.also.contains(home) { home } else { self.device }
    }
}

/// Ring of staging slots on one device. One path uses it, or several paths between the same two devices one after the other.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    /// Device that holds the memory.
    pub device: DeviceId,
    /// Size of one slot, bytes.
    pub slot_bytes: u64,
    /// Number of slots.
    pub slots: u32,
}

impl Ring {
    /// Returns the size of all slots, bytes.
    pub fn bytes(&self) -> u64 {
        self.slot_bytes * u64::from(self.slots)
    }
}

/// Byte position in a buffer of the program.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Position in the source of a transfer.
    Source {
        /// Index into the batch.
        transfer: u32,
        /// Offset from the start, bytes.
        offset: u64,
    },
    /// Position in the destination of a transfer.
    Destination {
        /// Index into the batch.
        transfer: u32,
        /// Offset from the start, bytes.
        offset: u64,
    },
    /// Start of a staging slot.
    Slot {
        /// Ring of the slot.
        ring: RingId,
        /// Number of the slot in the ring.
        slot: u32,
    },
}

/// Contiguous copy.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Copy {
    /// Source.
    pub from: Place,
    /// Destination.
    pub to: Place,
    /// Size in bytes. Never zero.
    pub bytes: u64,
}

/// Mechanism by which an operation moves its copies.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Mechanism {
    /// One plain copy by a copy engine.
    Copy,
    /// All copies in one call of the driver's batched copy.
    Batch,
    /// All copies in one kernel launch.
    Kernel,
    /// All copies by a CPU thread, between pageable host memory and slots of pinned memory.
    Thread,
}

/// Operation of a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    /// Lane of the operation.
    pub lane: LaneId,
    /// Mechanism of the copies.
    pub mechanism: Mechanism,
    /// Copies of the operation, in no particular order: exactly one for [`Mechanism::Copy`], one or more otherwise.
    pub copies: SmallVec<[Copy; 1]>,
    /// Operations on other lanes that must finish first. Each comes earlier in [`Program::ops`].
    pub after: SmallVec<[OpId; 2]>,
}

/// List of operations that moves a batch of transfers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    /// Size of each transfer of the batch, bytes.
    pub transfers: Vec<u64>,
    /// [`Shape::source`] of each transfer; empty if no two transfers share a source.
    pub sources: Vec<u32>,
    /// Lanes in use.
    pub lanes: Vec<Lane>,
    /// Staging rings in use.
    pub rings: Vec<Ring>,
    /// Operations, in an order that respects every dependency.
    pub ops: Vec<Op>,
}

impl Program {
    /// Returns the staging bytes that the program uses on `device`.
    pub fn staging_bytes(&self, device: DeviceId) -> u64 {
        self.rings.iter().filter(|r| r.device == device).map(Ring::bytes).sum()
    }

    /// Returns the number of rings in front of those that threads use, which come last.
    pub fn own_rings(&self) -> usize {
        let of_slot = |place: Place| if let Place::Slot { ring, .. } = place { Some(ring.0 as usize) } else { None };
        let by_threads = self.ops.iter().filter(|op| op.mechanism == Mechanism::Thread).flat_map(|op| &op.copies);
        by_threads.flat_map(|copy| [copy.to, copy.from]).filter_map(of_slot).min().unwrap_or(self.rings.len())
    }

    /// Returns the device that holds a place of the program of this batch.
    pub fn device(&self, batch: &[Shape], place: Place) -> DeviceId {
        match place {
            Place::Source { transfer, .. } => batch[transfer as usize].src_device,
            Place::Destination { transfer, .. } => batch[transfer as usize].dst_device,
            Place::Slot { ring, .. } => self.rings[ring.0 as usize].device,
        }
    }

    /// Returns the pairs of GPUs in which one may access the other's memory, without duplicates. They follow from the ends of copies and
    /// the devices that work on them.
    pub fn pairs(&self, batch: &[Shape]) -> Vec<(DeviceId, DeviceId)> {
        let device = |place| self.device(batch, place);
        let mut copies = BTreeSet::new();
        for op in &self.ops {
            copies.extend(op.copies.iter().map(|copy| (op.lane, device(copy.from), device(copy.to))));
        }
        let mut pairs = BTreeSet::new();
        for (LaneId(lane), from, to) in copies {
            let workers = self.lanes[lane as usize].devices();
            for (a, b) in workers.flat_map(|worker| [(worker, from), (worker, to)]).chain([(from, to)]) {
                if a != b && !a.is_host() && !b.is_host() {
                    pairs.insert((a.min(b), a.max(b)));
                }
            }
        }
        pairs.into_iter().collect()
    }
}
