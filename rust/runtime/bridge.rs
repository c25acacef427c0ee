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

/// Partitions that few blocks of a kernel move as they become ready, as `mpgpu::PolledList` in `cpp/polled_copy.hpp` has it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PolledList {
    /// Address of the partitions ([`POLLED_WORDS`] each), in memory of the GPU whose kernel moves them.
    pub partitions: u64,
    /// How many.
    pub count: u64,
    /// A word there that stands at 0 between launches.
    pub ended: u64,
    /// A word in host memory: raised, it ends the wait for producers.
    pub stop: u64,
}

/// Words of 64 bits of a `mpgpu::PolledPartition`.
pub const POLLED_WORDS: u64 = 8;

// SAFETY: the C++ type of this name has the same four 64-bit fields in the same order, no constructor and no destructor; the
// header asserts its size.
unsafe impl ExternType for PolledList {
    type Id = type_id!("mpgpu::PolledList");
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

        include!("polled_copy.hpp");

        type PolledList = super::PolledList;

        /// # Safety
        ///
        /// The list names `count` partitions, whose flags and words live until all blocks have returned, and which threads look at through
        /// atomics alone. Of each, once it is ready, source and destination are as for copies above. Each of `blocks` blocks runs once.
        unsafe fn copy_polled_on_cpu(list: &PolledList, block: u64, blocks: u64);
    }
}

pub(crate) use cpp::copy_polled_on_cpu;
pub(crate) use cpp::copy_segments_on_cpu;
#[cfg(test)]
pub(crate) use cpp::run_actions_on_cpu;
