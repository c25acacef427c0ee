//! The private bridge to the C++ kernels in `cpp/`. Never part of the C ABI.

use cxx::{ExternType, type_id};

/// One contiguous copy, as `mpgpu::Segment` in `cpp/segment_copy.hpp` has it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Address of the first byte of the destination.
    pub dst: u64,
    /// Address of the first byte of the source.
    pub src: u64,
    /// Number of bytes; 0 is allowed.
    pub bytes: u64,
}

// SAFETY: the C++ type of this name has the same three 64-bit fields in the same order, no constructor and no destructor; the
// header asserts its size.
unsafe impl ExternType for Segment {
    type Id = type_id!("mpgpu::Segment");
    type Kind = cxx::kind::Trivial;
}

#[allow(dead_code, reason = "of one kernel the library uses the GPU build alone, and its tests the other")]
#[cxx::bridge(namespace = "mpgpu")]
mod cpp {
    unsafe extern "C++" {
        include!("segment_copy.hpp");

        type Segment = super::Segment;

        /// # Safety
        ///
        /// `segments` points to `count` segments, each with a readable source and a writable destination of its size, none
        /// overlapping a destination. `tile_shift` lies in 4..=30; `blocks` and `lanes` are 1 or more.
        unsafe fn copy_segments_on_cpu(segments: *const Segment, count: usize, tile_shift: u32, blocks: u32, lanes: u32);

        include!("actions.hpp");

        /// # Safety
        ///
        /// `actions` points to `count` actions, 120 at most: copies as above, and flags that live until the call returns, which threads look
        /// at through atomics alone. So are, at three `addresses`, with several blocks the words, and the words `stop` and `turn`, or 0. Each of
        /// `blocks` blocks runs once. `tile_shift` as above.
        unsafe fn run_actions_on_cpu(
            actions: *const Segment,
            count: usize,
            addresses: *const u64,
            tile_shift: u32,
            block: u32,
            blocks: u32,
        );
    }
}

pub(crate) use cpp::copy_segments_on_cpu;
#[cfg(test)]
pub(crate) use cpp::run_actions_on_cpu;
