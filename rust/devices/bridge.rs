//! The private bridge to the C++ kernels in `cpp/`. Never part of the C ABI.

pub use mpgpu_backend::Segment;

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

pub(crate) use cpp::{copy_segments_on_cpu, run_actions_on_cpu};
