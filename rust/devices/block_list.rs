//! Defines the argument of the kernel that copies pieces, with the memory layout of `cpp/block_copy.hpp`.

use crate::backend::{BlockEnd, Endpoints, Indices};
use cxx::{ExternType, type_id};

/// Maximum number of layers in one launch. Equals `mpgpu::kLayersPerLaunch`.
pub(crate) const LAYERS_PER_LAUNCH: usize = 120;
/// Number of lanes of a thread block. Equals `mpgpu::kPieceLanes`.
pub(crate) const PIECE_LANES: u32 = 1024;
/// Maximum number of lanes of a group. Equals `mpgpu::kMostGroupLanes`.
const MOST_GROUP_LANES: u64 = 32;
/// Number of bytes that each lane has in flight. Equals `mpgpu::kLaneBytes`.
const LANE_BYTES: u64 = 64;

/// Addresses of the two arrays of a layer, with the memory layout of `mpgpu::BlockLayer`.
#[derive(Copy, Clone, Debug, Default)]
#[repr(C)]
pub(crate) struct ListLayer {
    pub dst: u64,
    pub src: u64,
}

/// One end of a block copy, with the memory layout of `mpgpu::BlockEnd`.
#[derive(Copy, Clone, Debug, Default)]
#[repr(C)]
pub(crate) struct ListEnd {
    pub stride: u64,
    pub blocks: u64,
    pub index: u64,
    pub width: u64,
}

/// Argument of a launch, with the memory layout of `mpgpu::BlockList`.
#[derive(Copy, Clone, Debug)]
#[repr(C)]
pub struct BlockList {
    pub(crate) layers: [ListLayer; LAYERS_PER_LAUNCH],
    pub(crate) dst: ListEnd,
    pub(crate) src: ListEnd,
    pub(crate) pieces: u64,
    pub(crate) first: u64,
    pub(crate) count: u64,
    pub(crate) bytes: u64,
    pub(crate) report: u64,
    pub(crate) layer_count: u32,
    pub(crate) lanes: u32,
    pub(crate) is_paced: u32,
    pub(crate) unused: u32,
}

const _: () = assert!(size_of::<BlockList>() == 2040);

// SAFETY: The C++ type of this name has the same fields in the same order. All fields are integers. The type has no constructor and no
// destructor.
unsafe impl ExternType for BlockList {
    type Id = type_id!("mpgpu::BlockList");
    type Kind = cxx::kind::Trivial;
}

impl ListEnd {
    /// Creates one end. `index` is the address at which the kernel reads a list from host memory. Lists in GPU memory keep their own address.
    pub fn new(end: &BlockEnd<'_>, index: u64) -> ListEnd {
        let (index, width) = match end.indices {
            Indices::InOrder => (0, 0),
            Indices::Narrow(_) => (index, 4),
            Indices::Wide(_) => (index, 8),
            Indices::Later { address, width } => (address, u64::from(width)),
        };
        ListEnd { stride: end.stride, blocks: end.blocks, index, width }
    }
}

impl BlockList {
    /// Creates an argument without addresses, for blocks of `bytes` bytes or pieces of at most `bytes` bytes.
    pub fn of(bytes: u64) -> BlockList {
        BlockList {
            layers: [ListLayer::default(); LAYERS_PER_LAUNCH],
            dst: ListEnd::default(),
            src: ListEnd::default(),
            pieces: 0,
            first: 0,
            count: 0,
            bytes,
            report: 0,
            layer_count: 1,
            lanes: group_lanes(bytes),
            is_paced: 0,
            unused: 0,
        }
    }

    /// Returns this argument with the given layers, at most [`LAYERS_PER_LAUNCH`].
    pub fn with_layers(mut self, layers: &[Endpoints]) -> BlockList {
        for (own, layer) in self.layers.iter_mut().zip(layers) {
            *own = ListLayer { dst: layer.dst, src: layer.src };
        }
        self.layer_count = layers.len() as u32;
        self
    }
}

/// Returns the number of lanes of a group for pieces of `bytes` bytes: one lane for each 64 bytes, rounded up to a power of two, and at
/// most a warp. Each lane copies four words of 16 bytes at a time.
pub(crate) fn group_lanes(bytes: u64) -> u32 {
    bytes.div_ceil(LANE_BYTES).clamp(1, MOST_GROUP_LANES).next_power_of_two() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels_source() {
        let header = include_str!("../../cpp/block_copy.hpp");
        for constant in ["kMostGroupLanes = 32;", "kLaneBytes = 64;", "kPieceLanes = 1024;", "kLayersPerLaunch = 120;"] {
            assert!(header.contains(constant), "{constant}");
        }
    }

    #[test]
    fn a_group_has_a_lane_for_each_64_bytes_and_a_warp_at_most() {
        assert_eq!([1, 64, 65, 256, 1024, 1025, 1 << 30].map(group_lanes), [1, 1, 2, 4, 16, 32, 32]);
    }
}
