//! What a program moves, as far as planning and the simulator care.

use crate::topology::{DeviceId, MemoryKind};
use std::hash::{Hash, Hasher};

/// What the planner needs to know of one transfer. Addresses do not matter to it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
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

/// All at once: lists of 100,000 are looked up by it.
impl Hash for Shape {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [to, from, to_kind, from_kind] = [self.dst_device.0, self.src_device.0, self.dst_kind as i32, self.src_kind as i32];
        let ends = u32::from_le_bytes([to as u8, from as u8, to_kind as u8, from_kind as u8]);
        state.write_u128(u128::from(self.bytes) | u128::from(ends) << 64 | u128::from(self.source) << 96);
    }
}
