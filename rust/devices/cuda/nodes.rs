//! Derives the nodes of a CUDA graph from a program (list of copy operations): the work of each node, its predecessors, and its parameters
//! for the driver.

use super::addresses::{address, segment};
use super::device::Primary;
use super::kernel::{Copier, SEGMENTS_PER_LAUNCH};
use crate::backend::{BackendError, Endpoints, Execution};
use crate::bridge::Segment;
use crate::plan::{Copy, Mechanism, Op, Program};
use cudarc::driver::sys;
use smallvec::SmallVec;
use std::sync::Arc;

/// GPU that runs the nodes of one lane (sequence of operations) of a graph, with the data that the nodes need.
pub(super) struct GraphLane<'a> {
    pub gpu: usize,
    pub primary: &'a Primary,
    /// Sources and destinations of the plan's transfers as addresses that this GPU uses. `None` if these are the addresses of the
    /// execution.
    pub ends: Option<Arc<[Endpoints]>>,
    /// Copy kernel of the GPU. `None` if the lane has no fused operations, or if the GPU cannot access all sources and destinations of the
    /// plan.
    pub kernel: Option<Copier<'a>>,
}

/// Work of one node of a CUDA graph: a single copy, or one kernel launch that copies several segments.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum NodeWork<'a> {
    Copy(&'a Copy),
    Kernel(&'a [Copy]),
}

/// Returns the GPU of each lane (sequence of operations), and a boolean that is true if kernels run the lane's fused operations.
pub(super) fn layout(lanes: &[GraphLane<'_>]) -> SmallVec<[(usize, bool); 8]> {
    lanes.iter().map(|lane| (lane.gpu, lane.kernel.is_some())).collect()
}

/// Returns the work of each graph node that an operation needs. The nodes are kernel launches, each with at most [`SEGMENTS_PER_LAUNCH`]
/// segments, or single copies.
pub(super) fn works(op: &Op, has_kernel: bool) -> impl Iterator<Item = NodeWork<'_>> {
    let fused = has_kernel && op.mechanism == Mechanism::Kernel;
    let (kernels, copies) = if fused { (&op.copies[..], &[][..]) } else { (&[][..], &op.copies[..]) };
    kernels.chunks(SEGMENTS_PER_LAUNCH).map(NodeWork::Kernel).chain(copies.iter().map(NodeWork::Copy))
}

/// Returns the maximum number of parallel chains into which the nodes of one operation are arranged. With `n` chains, each node follows the
/// node that comes `n` places before it.
///
/// If a graph has many parallel kernels, each kernel is a branch. The host launches each branch separately, and the GPU signals its end
/// separately. Measured with 77 kernels between other work of their stream (one H200, driver 580.159.04, `tests/gpu/halo_row`): without
/// chains, the kernels took 144 us when isolated and 854 us back to back, of which the launch took 64 and 162 us. In four chains, they took
/// 158 and 156 us, of which the launch took 3 us. In one chain, they took 238 and 232 us. Copies are not chained, because there would be
/// gaps between the copies of a chain.
pub(super) fn most_at_once(work: NodeWork<'_>) -> usize {
    match work {
        NodeWork::Kernel(_) => 4,
        NodeWork::Copy(_) => usize::MAX,
    }
}

impl GraphLane<'_> {
    /// Calls `copy` or `kernel`, depending on the kind of `work`, with the driver's parameters for the node. During `kernel`, the context
    /// of the lane's GPU is current, because kernels belong to a context.
    pub fn with_parameters(
        &self,
        execution: &Execution<'_>,
        work: NodeWork<'_>,
        copy: impl FnOnce(*const sys::CUDA_MEMCPY3D) -> Result<(), BackendError>,
        kernel: impl FnOnce(*const sys::CUDA_KERNEL_NODE_PARAMS_v1) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let execution = &execution.with_ends(self.ends.as_ref());
        match (work, self.kernel) {
            (NodeWork::Copy(one), _) => copy(&parameters(execution, one)),
            (NodeWork::Kernel(copies), Some(of)) => {
                let _current = self.primary.enter()?;
                let segments: SmallVec<[Segment; 32]> = copies.iter().map(|copy| segment(execution, copy)).collect();
                let made = of.with_launch(&segments, |launch| {
                    kernel(&sys::CUDA_KERNEL_NODE_PARAMS_v1 {
                        func: launch.function,
                        gridDimX: launch.blocks,
                        gridDimY: 1,
                        gridDimZ: 1,
                        blockDimX: launch.lanes,
                        blockDimY: 1,
                        blockDimZ: 1,
                        sharedMemBytes: 0,
                        kernelParams: launch.arguments,
                        extra: std::ptr::null_mut(),
                    })
                });
                made.unwrap_or_else(|| Err(nothing_to_do()))
            }
            (NodeWork::Kernel(_), None) => Err(nothing_to_do()),
        }
    }
}

/// Returns the error for a node without work. No node of a validated program is without work.
fn nothing_to_do() -> BackendError {
    BackendError::NotSupported("a graph node for copies needs a GPU that can run the copy kernel".into())
}

/// Returns the indices of the direct predecessors of each operation, without duplicates. These are the previous operation of the same lane
/// (sequence of operations), and the operations in [`Op::after`].
pub(super) fn predecessors(program: &Program) -> Vec<SmallVec<[usize; 4]>> {
    let mut last: SmallVec<[Option<usize>; 8]> = SmallVec::from_elem(None, program.lanes.len());
    let before = |(index, op): (usize, &Op)| {
        let in_lane = last[op.lane.0 as usize].replace(index);
        let mut before: SmallVec<[usize; 4]> = in_lane.into_iter().chain(op.after.iter().map(|op| op.0 as usize)).collect();
        before.sort_unstable();
        before.dedup();
        before
    };
    program.ops.iter().enumerate().map(before).collect()
}

/// Returns the driver's parameters of a graph node for one contiguous copy. The driver derives the owners of the memory from the addresses.
fn parameters(execution: &Execution<'_>, copy: &Copy) -> sys::CUDA_MEMCPY3D {
    let unified = sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED;
    sys::CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: unified,
        srcHost: std::ptr::null(),
        srcDevice: address(execution, copy.from),
        srcArray: std::ptr::null_mut(),
        reserved0: std::ptr::null_mut(),
        srcPitch: 0,
        srcHeight: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: unified,
        dstHost: std::ptr::null_mut(),
        dstDevice: address(execution, copy.to),
        dstArray: std::ptr::null_mut(),
        reserved1: std::ptr::null_mut(),
        dstPitch: 0,
        dstHeight: 0,
        WidthInBytes: copy.bytes as usize,
        Height: 1,
        Depth: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Lane, LaneId, OpId, Place};
    use crate::topology::DeviceId;
    use smallvec::smallvec;

    #[test]
    fn nodes_come_after_those_before_them_in_the_lane_and_those_named_each_once() {
        let op = |lane, after: &[u32]| Op {
            lane: LaneId(lane),
            mechanism: Mechanism::Copy,
            copies: smallvec![],
            after: after.iter().map(|op| OpId(*op)).collect(),
        };
        let program = Program {
            sources: Vec::new(),
            transfers: vec![],
            lanes: vec![Lane::new(DeviceId::gpu(0)); 2],
            rings: vec![],
            ops: vec![op(0, &[]), op(1, &[0]), op(0, &[0]), op(1, &[2, 1])],
        };
        let found: Vec<Vec<usize>> = predecessors(&program).into_iter().map(|before| before.to_vec()).collect();
        assert_eq!(found, [vec![], vec![0], vec![0], vec![1, 2]]);
    }

    #[test]
    fn a_fused_operation_is_a_node_for_each_launch_and_without_a_kernel_one_for_each_copy() {
        let place = Place::Source { transfer: 0, offset: 0 };
        let mut op = Op {
            lane: LaneId(0),
            mechanism: Mechanism::Kernel,
            copies: (1..=SEGMENTS_PER_LAUNCH as u64 + 1).map(|bytes| Copy { from: place, to: place, bytes }).collect(),
            after: smallvec![],
        };
        assert!(works(&op, true).eq(op.copies.chunks(SEGMENTS_PER_LAUNCH).map(NodeWork::Kernel)));
        assert!(works(&op, false).eq(op.copies.iter().map(NodeWork::Copy)));
        // A graph has no node type for a batched copy.
        op.mechanism = Mechanism::Batch;
        assert!(works(&op, true).eq(op.copies.iter().map(NodeWork::Copy)));
    }
}
