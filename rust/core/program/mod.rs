//! The program: what is copied from where to where, in what order, through which staging slots.
//!
//! A program speaks of places, not of addresses: a byte of a transfer's source or destination, or a byte of a staging slot.
//! So one program serves every set of addresses of the same shape, and every backend runs the same program.
//!
//! Order. Operations on one lane run in the order in which they stand in [`Program::ops`]. Across lanes only
//! [`Op::after`] orders. Nothing else is promised, and the validator (`validate`) assumes nothing else.

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

/// A set of GPUs.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gpus([u64; Gpus::WORDS]);

impl Gpus {
    /// No GPU.
    pub const NONE: Gpus = Gpus([0; Gpus::WORDS]);

    /// Words of 64 GPUs each, enough for all that a machine may have.
    const WORDS: usize = MAX_DEVICES / 64;

    /// Whether this GPU is in the set; host memory never is.
    pub fn contains(self, gpu: DeviceId) -> bool {
        u32::try_from(gpu.0).is_ok_and(|gpu| self.0.get(gpu as usize / 64).is_some_and(|word| word >> (gpu % 64) & 1 == 1))
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self == Gpus::NONE
    }

    /// The GPUs, by number.
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
    /// Collects GPUs of a machine; host memory is left out.
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

/// A sequence of operations that one device issues in order: a stream on CUDA. Of host memory, what one CPU thread does after the other.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    /// The device whose copy engine does the work; for a copy out of or into host memory the GPU concerned.
    pub device: DeviceId,
    /// Other GPUs that may do the work in its place, where whoever does it is of less weight than starting a lane on one GPU after work on
    /// another: the other end of copies between two GPUs, or for a kernel all GPUs of a batch. Only plain copies and kernels stand on such a
    /// lane.
    pub also: Gpus,
}

impl Lane {
    /// A lane that only `device` can work on.
    pub fn new(device: DeviceId) -> Lane {
        Lane { device, also: Gpus::NONE }
    }

    /// The devices that may work on this lane.
    pub fn devices(self) -> impl Iterator<Item = DeviceId> + Clone {
        std::iter::once(self.device).chain(self.also.iter())
    }

    /// The device that works on this lane where the caller's stream belongs to `home`: that one, if it may.
    pub fn device_for(&self, home: DeviceId) -> DeviceId {
        if self.also.contains(home) { home } else { self.device }
    }
}

/// A ring of staging slots on one device, used by one path, or by several between the same two devices that follow each other.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    /// Whose memory it is.
    pub device: DeviceId,
    /// Bytes of one slot.
    pub slot_bytes: u64,
    /// Number of slots.
    pub slots: u32,
}

impl Ring {
    /// Bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.slot_bytes * u64::from(self.slots)
    }
}

/// A byte position in a buffer that the program knows.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// In the source of a transfer of the batch.
    Source {
        /// Index into the batch.
        transfer: u32,
        /// Bytes from its start.
        offset: u64,
    },
    /// In the destination of a transfer of the batch.
    Destination {
        /// Index into the batch.
        transfer: u32,
        /// Bytes from its start.
        offset: u64,
    },
    /// In a staging slot.
    Slot {
        /// Which ring.
        ring: RingId,
        /// Which slot of it.
        slot: u32,
    },
}

/// One contiguous copy.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Copy {
    /// Where the bytes come from.
    pub from: Place,
    /// Where they go.
    pub to: Place,
    /// How many. Never zero.
    pub bytes: u64,
}

/// How an operation moves its copies.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Mechanism {
    /// One plain copy by a copy engine.
    Copy,
    /// All copies in one call of the driver's batched copy.
    Batch,
    /// All copies in one kernel launch.
    Kernel,
    /// All copies by a CPU thread, between ordinary host memory and slots of pinned memory.
    Thread,
}

/// A step of a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    /// The lane that it runs on.
    pub lane: LaneId,
    /// How.
    pub mechanism: Mechanism,
    /// What it moves; exactly one for [`Mechanism::Copy`], one or more otherwise. Copies of one operation are unordered.
    pub copies: SmallVec<[Copy; 1]>,
    /// Operations on other lanes that must have finished first. Each stands earlier in [`Program::ops`].
    pub after: SmallVec<[OpId; 2]>,
}

/// A list of operations that moves a batch of transfers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    /// Bytes of each transfer of the batch.
    pub transfers: Vec<u64>,
    /// [`Shape::source`] of each; none where all have sources of their own.
    pub sources: Vec<u32>,
    /// Lanes in use.
    pub lanes: Vec<Lane>,
    /// Staging in use.
    pub rings: Vec<Ring>,
    /// In an order that respects every dependency.
    pub ops: Vec<Op>,
}

impl Program {
    /// Staging bytes that the program uses on `device`.
    pub fn staging_bytes(&self, device: DeviceId) -> u64 {
        self.rings.iter().filter(|r| r.device == device).map(Ring::bytes).sum()
    }

    /// The device that a place of the program of this batch lies on.
    pub fn device(&self, batch: &[Shape], place: Place) -> DeviceId {
        match place {
            Place::Source { transfer, .. } => batch[transfer as usize].src_device,
            Place::Destination { transfer, .. } => batch[transfer as usize].dst_device,
            Place::Slot { ring, .. } => self.rings[ring.0 as usize].device,
        }
    }

    /// The pairs of GPUs of which one reads or writes the other's memory, or may, each once: the ends of copies, and who works on them.
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
