//! Defines the descriptor of the contiguous copies that the C++ kernels in `cpp/` perform.

use cxx::{ExternType, type_id};

/// Descriptor of a contiguous copy that a kernel performs, with the memory layout of `mpgpu::Segment` in `cpp/segment_copy.hpp`.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Address of the first byte of the destination.
    pub dst: u64,
    /// Address of the first byte of the source.
    pub src: u64,
    /// Number of bytes to copy; 0 is allowed.
    pub bytes: u64,
}

// SAFETY: the C++ type of this name has the same three 64-bit fields in the same order, no constructor and no destructor. The header
// asserts its size.
unsafe impl ExternType for Segment {
    type Id = type_id!("mpgpu::Segment");
    type Kind = cxx::kind::Trivial;
}
