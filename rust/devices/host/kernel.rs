//! The CPU build of the fused copy kernel in `cpp/segment_copy.hpp`, and of that of `cpp/actions.hpp`, which tests of its users run.

pub use crate::bridge::Segment;

use crate::bridge::{copy_segments_on_cpu, run_actions_on_cpu};

/// How a launch of the kernel is laid out. On the CPU every layout gives the same bytes; only the order differs.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Bytes of a tile as a power of two, 4 to 30; other values are brought into that range.
    pub tile_shift: u32,
    /// Thread blocks; 0 counts as 1.
    pub blocks: u32,
    /// Threads of a block; 0 counts as 1.
    pub lanes: u32,
}

impl Grid {
    /// One thread that takes tile after tile: the fastest on a CPU.
    pub const SEQUENTIAL: Grid = Grid { tile_shift: 14, blocks: 1, lanes: 1 };
}

/// Copies every segment, on the calling thread.
///
/// # Safety
///
/// Each segment's source is readable and its destination writable for its number of bytes. No destination overlaps a source or
/// another destination of the list, and nothing else touches them during the call.
pub unsafe fn copy_segments(segments: &[Segment], grid: Grid) {
    // SAFETY: pointer and length are those of a slice; the caller vouches for the addresses; the layout is brought into range.
    unsafe {
        copy_segments_on_cpu(segments.as_ptr(), segments.len(), grid.tile_shift.clamp(4, 30), grid.blocks.max(1), grid.lanes.max(1));
    }
}

/// Runs one of the `blocks` blocks of a kernel of actions ([`Action::segment`](mpgpu_backend::Action::segment)), on the calling thread.
///
/// # Safety
///
/// Copies as for [`copy_segments`]; flags live until the call returns, and threads look at them through atomics alone. So are `addresses`:
/// with several blocks the words of all, `stop`, and `turn` or 0. Each block runs once.
pub unsafe fn run_actions(actions: &[Segment], addresses: &[u64; 3], tile_shift: u32, block: u32, blocks: u32) {
    // SAFETY: pointer and length are those of a slice, and of an array of three; the caller vouches for the rest.
    unsafe { run_actions_on_cpu(actions.as_ptr(), actions.len(), addresses.as_ptr(), tile_shift.clamp(4, 30), block, blocks) }
}
