//! Which stream each lane of a program gets, in what order lanes are fed, and which events they need. Nothing here calls the driver,
//! so each decision is tested without a GPU.
//!
//! Every event across GPUs takes 2.2 us one way (hardware readings) and each call that records one or waits for one about a
//! microsecond of the calling thread. So a lane runs on the caller's GPU where the program allows it, streams wait only for what they
//! do not come after anyway, and the lanes that start latest, those of other GPUs, are fed first.

use crate::plan::{Mechanism, Program};
use crate::topology::DeviceId;
use smallvec::{SmallVec, smallvec};
use std::cmp::Reverse;

/// Where a lane runs.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    /// Whether it is the caller's own stream, and not an internal one.
    pub is_callers_stream: bool,
    /// Whether it runs on the GPU of the caller's stream.
    pub is_callers_gpu: bool,
    /// The GPU that it runs on.
    pub gpu: usize,
}

/// Where each lane of a program runs that is executed in a stream of GPU `callers_gpu`. Only where that GPU reaches all memory of the plan
/// does it take over lanes of others.
///
/// The first lane of the caller's GPU has the caller's stream itself. Others have streams of their own, also those of that GPU: copies of one stream
/// follow each other, and a push and a pull of one GPU shall not.
pub(super) fn place(program: &Program, callers_gpu: usize, is_reached: bool) -> SmallVec<[Placement; 8]> {
    let here = DeviceId(callers_gpu as i32);
    // A copy engine serves a stream of any GPU, so a single lane of plain copies stays in the caller's stream whatever the GPU:
    // two events across devices would cost more than most such copies.
    let plain = is_reached && program.lanes.len() == 1 && program.ops.iter().all(|op| op.mechanism == Mechanism::Copy);
    let mut is_taken = false;
    let at = |lane: &crate::plan::Lane| {
        let device = if is_reached { lane.device_for(here) } else { lane.device };
        let is_callers_gpu = plain || device.is_host() || device == here;
        let is_callers_stream = is_callers_gpu && !std::mem::replace(&mut is_taken, true);
        Placement { is_callers_stream, is_callers_gpu, gpu: if is_callers_gpu { callers_gpu } else { device.0 as usize } }
    };
    program.lanes.iter().map(at).collect()
}

/// Moves a lane to another GPU.
pub(super) fn move_lane(placed: &mut [Placement], lane: usize, gpu: usize, callers_gpu: usize) {
    let is_callers_gpu = gpu == callers_gpu;
    let is_taken = placed.iter().enumerate().any(|(other, at)| other != lane && at.is_callers_stream);
    placed[lane] = Placement { is_callers_stream: is_callers_gpu && !is_taken, is_callers_gpu, gpu };
}

/// In what order the operations of a program are enqueued, and who waits for whom.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LaneSchedule {
    /// Indices of operations.
    pub order: SmallVec<[u32; 32]>,
    /// For each lane, whether it has to wait for the caller's stream before its first operation.
    pub forks: SmallVec<[bool; 8]>,
    /// For each lane the operation after which the caller's stream has to wait for it.
    pub joins: SmallVec<[Option<u32>; 8]>,
    /// For each operation, whether one of another lane waits for it.
    pub awaited: SmallVec<[bool; 32]>,
}

/// How to enqueue `program` in streams that are placed like this.
///
/// The order goes through all GPUs at once, and on each through its lanes: each has its first copy under way before any gets its
/// second. An operation still comes after all that it waits for, whose events are recorded by then. Among those that could be next,
/// lanes of other GPUs go first, because their start is still on its way to them, and the caller's stream last, because its copy
/// starts at once.
///
/// A lane whose first operation waits for one of another lane starts after the caller's stream without waiting for it itself; a lane
/// whose last operation is waited for by another lane is joined with that one.
pub(super) fn schedule(program: &Program, placed: &[Placement]) -> LaneSchedule {
    let ops = &program.ops;
    let mut awaited: SmallVec<[bool; 32]> = smallvec![false; ops.len()];
    let mut forks: SmallVec<[bool; 8]> = smallvec![false; placed.len()];
    let mut last: SmallVec<[Option<u32>; 8]> = smallvec![None; placed.len()];
    let mut depths: SmallVec<[u32; 32]> = SmallVec::with_capacity(ops.len());
    for (index, op) in ops.iter().enumerate() {
        let lane = op.lane.0 as usize;
        let before = last[lane].replace(index as u32);
        let others = || op.after.iter().map(|before| before.0).filter(|before| ops[*before as usize].lane != op.lane);
        others().for_each(|before| awaited[before as usize] = true);
        if before.is_none() {
            forks[lane] = !placed[lane].is_callers_stream && others().next().is_none();
        }
        // Copies that one GPU issues follow each other, whatever their streams, so the second lane of a GPU can wait for its turn.
        let lanes_before = || placed[..lane].iter().filter(|at| at.gpu == placed[lane].gpu).count() as u32;
        depths.push(others().chain(before).map(|before| depths[before as usize] + 1).max().unwrap_or_else(lanes_before));
    }
    let joins = last.iter().zip(placed).map(|(last, at)| last.filter(|last| !at.is_callers_stream && !awaited[*last as usize])).collect();
    let mut order: SmallVec<[u32; 32]> = (0..ops.len() as u32).collect();
    let rank = |index: &u32| {
        let at = placed[ops[*index as usize].lane.0 as usize];
        // Unequal indices, so that the order is one and the same however it is sorted.
        (depths[*index as usize], at.is_callers_stream, Reverse(!at.is_callers_gpu), *index)
    };
    order.sort_unstable_by_key(rank);
    LaneSchedule { order, forks, joins, awaited }
}
