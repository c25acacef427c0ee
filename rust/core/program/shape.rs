//! What a program moves, as far as planning and the simulator care.

use crate::topology::{DeviceId, MemoryKind};

/// What the planner needs to know of one transfer. Addresses do not matter to it.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Where the bytes go.
    pub dst_device: DeviceId,
    /// Where they come from.
    pub src_device: DeviceId,
    /// The kind of memory that they go to.
    pub dst_kind: MemoryKind,
    /// The kind of memory that they come from.
    pub src_kind: MemoryKind,
    /// How many.
    pub bytes: u64,
    /// Transfers of a batch with the same number have the same source bytes; 0 is that of a source of its own.
    pub source: u32,
}
