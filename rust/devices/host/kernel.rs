//! Calls the CPU builds of two kernels: the fused copy kernel (`cpp/segment_copy.hpp`), and the kernel that executes a list of actions
//! (`cpp/actions.hpp`). Only tests run the second one on the CPU.

pub use crate::bridge::Segment;

use crate::bridge::{copy_segments_on_cpu, run_actions_on_cpu};

/// Launch dimensions of the copy kernel. On the CPU, all launch dimensions copy the same data. They affect only the order of the copies.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Binary logarithm of the tile size in bytes. The range is 4 to 30, and other values are clamped to it.
    pub tile_shift: u32,
    /// Number of thread blocks; 0 is treated as 1.
    pub blocks: u32,
    /// Number of threads per block; 0 is treated as 1.
    pub lanes: u32,
}

impl Grid {
    /// Launch dimensions for a single thread that copies one tile after another. These are the fastest on a CPU.
    pub const SEQUENTIAL: Grid = Grid { tile_shift: 14, blocks: 1, lanes: 1 };
}

/// Copies every segment on the calling thread.
///
/// # Safety
///
/// Each segment's source is readable and its destination is writable for the segment's number of bytes. No destination overlaps a source or
/// another destination of the list. No other thread accesses this memory during the call.
pub unsafe fn copy_segments(segments: &[Segment], grid: Grid) {
    // SAFETY: pointer and length are those of a slice. The caller guarantees the addresses. The layout is clamped to its valid range.
    unsafe {
        copy_segments_on_cpu(segments.as_ptr(), segments.len(), grid.tile_shift.clamp(4, 30), grid.blocks.max(1), grid.lanes.max(1));
    }
}

/// Runs block number `block` of a kernel that executes a list of actions ([`Action::segment`](mpgpu_backend::Action::segment)). The kernel
/// consists of `blocks` blocks. The block runs on the calling thread.
///
/// # Safety
///
/// For copies, the requirements of [`copy_segments`] hold. Flags and the words at the three `addresses` live until the call returns, and
/// threads access them only through atomics. The three words are the counters that the blocks share (used only if there are several
/// blocks), the counter `stop`, and the word `turn`, whose address may be 0. Each block runs once.
pub unsafe fn run_actions(actions: &[Segment], addresses: &[u64; 3], tile_shift: u32, block: u32, blocks: u32) {
    // SAFETY: the pointers are those of a slice with its length and of an array of three. The caller guarantees the rest.
    unsafe { run_actions_on_cpu(actions.as_ptr(), actions.len(), addresses.as_ptr(), tile_shift.clamp(4, 30), block, blocks) }
}
