//! Describes transfers by the properties that matter for planning and simulation.

use crate::topology::{DeviceId, MemoryKind};
use std::hash::{Hash, Hasher};

/// Transfer description without addresses, as the planner and the simulator use it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Device of the destination.
    pub dst_device: DeviceId,
    /// Device of the source.
    pub src_device: DeviceId,
    /// Kind of memory of the destination.
    pub dst_kind: MemoryKind,
    /// Kind of memory of the source.
    pub src_kind: MemoryKind,
    /// Size of the transfer in bytes.
    pub bytes: u64,
    /// Number that identifies the source among the sources of the batch. Transfers of a batch with the same nonzero number read the same
    /// data. The value 0 means that no other transfer of the batch reads the source.
    pub source: u32,
}

/// Hashes all fields in one call, because lists of 100,000 descriptions serve as keys.
impl Hash for Shape {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [to, from, to_kind, from_kind] = [self.dst_device.0, self.src_device.0, self.dst_kind as i32, self.src_kind as i32];
        let ends = u32::from_le_bytes([to as u8, from as u8, to_kind as u8, from_kind as u8]);
        state.write_u128(u128::from(self.bytes) | u128::from(ends) << 64 | u128::from(self.source) << 96);
    }
}
