//! Declares the private interface between Rust and the C++ kernels in `cpp/`. It is never part of the C ABI.

pub use super::block_list::BlockList;
pub use mpgpu_backend::Segment;

#[cxx::bridge(namespace = "mpgpu")]
mod cpp {
    unsafe extern "C++" {
        include!("segment_copy.hpp");

        type Segment = super::Segment;

        /// # Safety
        ///
        /// `segments` points to `count` segments. The source of each segment is readable and its destination is writable for the segment's
        /// number of bytes. No destination overlaps another segment's source or destination. `tile_shift` is in 4..=30. `blocks` and
        /// `lanes` are 1 or more.
        unsafe fn copy_segments_on_cpu(segments: *const Segment, count: usize, tile_shift: u32, blocks: u32, lanes: u32);

        include!("block_copy.hpp");

        type BlockList = super::BlockList;

        /// # Safety
        ///
        /// The sources of `list` are readable, and its destinations are writable. Index lists, the list of pieces and the report are valid
        /// as well. No destination overlaps a source or another destination. `groups` and `lanes` are 1 or more.
        unsafe fn copy_blocks_on_cpu(list: &BlockList, groups: u32, lanes: u32);

        include!("actions.hpp");

        /// # Safety
        ///
        /// `actions` points to `count` actions, at most 120. For copies, the requirements of `copy_segments_on_cpu` hold. Flags and the
        /// words at the three `addresses` live until the call returns, and threads access them only through atomics. The three words are
        /// the counters that the blocks share (used only if there are several blocks), the counter `stop`, and the word `turn`, whose
        /// address may be 0. Each of the `blocks` blocks runs once. `tile_shift` is in 4..=30.
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

pub(crate) use cpp::{copy_blocks_on_cpu, copy_segments_on_cpu, run_actions_on_cpu};
