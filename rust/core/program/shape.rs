//! Properties of transfers that matter for planning and simulation.

use crate::topology::{DeviceId, MemoryKind};
use std::hash::{Hash, Hasher};

/// Transfer without addresses, as the planner sees it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Device of the destination.
    pub dst_device: DeviceId,
    /// Device of the source.
    pub src_device: DeviceId,
    /// Memory kind of the destination.
    pub dst_kind: MemoryKind,
    /// Memory kind of the source.
    pub src_kind: MemoryKind,
    /// Size in bytes.
    pub bytes: u64,
    /// Number of the source. Transfers of a batch with the same number read the same bytes; 0 stands for a source that no other transfer
    /// reads.
    pub source: u32,
}

/// Hashes all fields in one call, because lists of 100,000 shapes serve as keys.
impl Hash for Shape {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [to, from, to_kind, from_kind] = [self.dst_device.0, self.src_device.0, self.dst_kind as i32, self.src_kind as i32];
        let ends = u32::from_le_bytes([to as u8, from as u8, to_kind as u8, from_kind as u8]);
        state.write_u128(u128::from(self.bytes) | u128::from(ends) << 64 | u128::from(self.source) << 96);
    }
}
