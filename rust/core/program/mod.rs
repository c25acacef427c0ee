//! Programs: lists of copy operations with their order, mechanisms and staging slots.
//!
//! A program contains no addresses. It identifies each byte by its position in the source or destination of a transfer, or in a staging
//! slot. One program therefore serves every batch whose transfers have the same sizes, devices and kinds of memory. Every backend runs the
//! same programs.
//!
//! Each operation belongs to a lane (an internal stream). Operations of one lane run in the order of [`Program::ops`]. Between lanes, only
//! [`Op::after`] orders operations. No other order is guaranteed, and the validator (`validate`) assumes none.

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

/// Operation of a program, as an index into [`Program::ops`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u32);
/// Lane (internal stream) of a program, as an index into [`Program::lanes`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaneId(pub u32);
/// Staging ring of a program, as an index into [`Program::rings`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RingId(pub u32);

/// Set of GPUs.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gpus([u64; Gpus::WORDS]);

impl Gpus {
    /// Set that contains no GPU.
    pub const NONE: Gpus = Gpus([0; Gpus::WORDS]);

    /// Number of 64-bit words in a set. The set has one bit for each GPU that a machine can have.
    const WORDS: usize = MAX_DEVICES / 64;

    /// True if this GPU is in the set; always false for host memory.
    pub fn contains(self, gpu: DeviceId) -> bool {
        u32::try_from(gpu.0).is_ok_and(|gpu| self.0.get(gpu as usize / 64).is_some_and(|word| word >> (gpu % 64) & 1 == 1))
    }

    /// True if the set is empty.
    pub fn is_empty(self) -> bool {
        self == Gpus::NONE
    }

    /// Returns the GPUs of the set in the order of their numbers.
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
    /// Collects the GPUs among the given devices and ignores host memory.
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

/// Lane (internal stream): sequence of operations that one device performs in order. It is a stream on CUDA, and the work of one CPU thread
/// if it only moves host memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    /// Device whose copy engine performs the operations. For a copy from or to host memory, it is the GPU at the other end.
    pub device: DeviceId,
    /// Other GPUs that may perform the operations instead of `device`. Switching from one GPU to another within an execution costs more
    /// than using the less suitable copy engine, so the executor may prefer the GPU of the caller's stream. For a copy between two GPUs,
    /// this set holds the second GPU. For a kernel, it holds all GPUs of the batch. Internal streams that may run on several GPUs execute
    /// only individual copies and kernels, no batched copies.
    pub also: Gpus,
}

impl Lane {
    /// Creates an internal stream whose operations only `device` may perform.
    pub fn new(device: DeviceId) -> Lane {
        Lane { device, also: Gpus::NONE }
    }

    /// Returns the devices that may perform the operations of this internal stream.
    pub fn devices(self) -> impl Iterator<Item = DeviceId> + Clone {
        std::iter::once(self.device).chain(self.also.iter())
    }

    /// Returns the device that performs the operations of this internal stream if the caller's stream belongs to `home`: `home` if it is
    /// allowed to, otherwise [`Lane::device`].
    pub fn device_for(&self, home: DeviceId) -> DeviceId {
        if self.also.contains(home) { home } else { self.device }
    }
}

/// Ring of staging slots on one device. It is used by one path, or by several paths between the same two devices, one after the other.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ring {
    /// Device whose memory contains the slots.
    pub device: DeviceId,
    /// Size of one staging slot, bytes.
    pub slot_bytes: u64,
    /// Number of staging slots in the ring.
    pub slots: u32,
}

impl Ring {
    /// Returns the total size of all slots, bytes.
    pub fn bytes(&self) -> u64 {
        self.slot_bytes * u64::from(self.slots)
    }
}

/// Position of a byte in the source or destination of a transfer or in a staging slot.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Position in the source of a transfer.
    Source {
        /// Index of the transfer in the batch.
        transfer: u32,
        /// Offset from the start of the source, bytes.
        offset: u64,
    },
    /// Position in the destination of a transfer.
    Destination {
        /// Index of the transfer in the batch.
        transfer: u32,
        /// Offset from the start of the destination, bytes.
        offset: u64,
    },
    /// First byte of a staging slot.
    Slot {
        /// Ring that contains the slot.
        ring: RingId,
        /// Index of the slot in the ring, from 0.
        slot: u32,
    },
}

/// Copy of one contiguous range of bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Copy {
    /// First byte that the copy reads.
    pub from: Place,
    /// First byte that the copy writes.
    pub to: Place,
    /// Number of bytes to copy, never 0.
    pub bytes: u64,
}

/// Mechanism by which an operation performs its copies.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum Mechanism {
    /// One individual copy, performed by a copy engine.
    Copy,
    /// One call of the driver's batched copy that performs all copies.
    Batch,
    /// One kernel launch that performs all copies.
    Kernel,
    /// A CPU thread that performs all copies, between pageable host memory and slots of pinned memory.
    Thread,
}

/// Operation of a program: one or more copies with one mechanism.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    /// Lane (internal stream) on which the operation runs.
    pub lane: LaneId,
    /// Mechanism by which the copies are performed.
    pub mechanism: Mechanism,
    /// Copies of the operation, in any order. [`Mechanism::Copy`] has exactly one, the other mechanisms have at least one.
    pub copies: SmallVec<[Copy; 1]>,
    /// Operations on other lanes (internal streams) that must finish first. Each has a lower index in [`Program::ops`].
    pub after: SmallVec<[OpId; 2]>,
}

/// Program: list of copy operations that performs a batch of transfers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    /// Size of each transfer of the batch, bytes.
    pub transfers: Vec<u64>,
    /// Source number of each transfer ([`Shape::source`]). The list is empty if no two transfers share a source.
    pub sources: Vec<u32>,
    /// Lanes (internal streams) on which the operations run.
    pub lanes: Vec<Lane>,
    /// Staging rings that the operations use.
    pub rings: Vec<Ring>,
    /// Operations, in an order that satisfies every dependency.
    pub ops: Vec<Op>,
}

impl Program {
    /// Returns the amount of staging memory that the program uses on `device`, bytes.
    pub fn staging_bytes(&self, device: DeviceId) -> u64 {
        self.rings.iter().filter(|r| r.device == device).map(Ring::bytes).sum()
    }

    /// Returns the number of staging rings that CPU threads do not use. Rings used by CPU threads come last in [`Program::rings`].
    pub fn own_rings(&self) -> usize {
        let of_slot = |place: Place| if let Place::Slot { ring, .. } = place { Some(ring.0 as usize) } else { None };
        let by_threads = self.ops.iter().filter(|op| op.mechanism == Mechanism::Thread).flat_map(|op| &op.copies);
        by_threads.flat_map(|copy| [copy.to, copy.from]).filter_map(of_slot).min().unwrap_or(self.rings.len())
    }

    /// Returns the device whose memory contains `place`. `batch` describes the transfers of the program.
    pub fn device(&self, batch: &[Shape], place: Place) -> DeviceId {
        match place {
            Place::Source { transfer, .. } => batch[transfer as usize].src_device,
            Place::Destination { transfer, .. } => batch[transfer as usize].dst_device,
            Place::Slot { ring, .. } => self.rings[ring.0 as usize].device,
        }
    }

    /// Returns the pairs of GPUs between which peer access is needed, without duplicates. For each copy, these are the source GPU with the
    /// destination GPU, and each of these two GPUs with every GPU that may perform the copy.
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
