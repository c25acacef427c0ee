//! Decides how a program (list of copy operations) runs on streams: which stream runs each lane (sequence of operations), in which order
//! the operations are enqueued, and which events order the streams. No function here calls the driver, so each decision is tested without a
//! GPU.
//!
//! An event that one GPU records and another GPU waits for takes 2.2 us one way (hardware readings). Each call that records an event or
//! makes a stream wait for one takes the calling thread about a microsecond. A lane therefore runs on the caller's GPU if the program
//! allows it, and a stream waits for another stream only if the two are not already ordered. Lanes on other GPUs than the caller's start
//! last, so they are enqueued first.

use crate::plan::{Mechanism, Program};
use crate::topology::DeviceId;
use smallvec::{SmallVec, smallvec};
use std::cmp::Reverse;

/// GPU and kind of stream of one lane (sequence of operations).
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    /// True if the caller's own stream runs the lane (sequence of operations), and false if an internal stream runs it.
    pub is_callers_stream: bool,
    /// True if the lane (sequence of operations) runs on the GPU of the caller's stream.
    pub is_callers_gpu: bool,
    /// GPU on which the lane (sequence of operations) runs.
    pub gpu: usize,
}

/// Returns the GPU and the kind of stream of each lane (sequence of operations) of a program. The caller's stream belongs to the GPU
/// `callers_gpu`. If `is_reached` is true, this GPU can access all memory of the plan and may run lanes that are planned for other GPUs.
///
/// The first lane of the caller's GPU uses the caller's stream. Each other lane uses an internal stream, even on the same GPU. Copies in
/// one stream are serialized, but copies from and to the same GPU should overlap.
pub(super) fn place(program: &Program, callers_gpu: usize, is_reached: bool) -> SmallVec<[Placement; 8]> {
    let here = DeviceId(callers_gpu as i32);
    // A copy engine can serve a stream of any GPU. A single lane with only plain copies therefore stays in the caller's stream. The two
    // events between GPUs that another stream needs would cost more than most such copies.
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

/// Changes the GPU of one lane (sequence of operations), and adapts the kind of stream that runs the lane.
pub(super) fn move_lane(placed: &mut [Placement], lane: usize, gpu: usize, callers_gpu: usize) {
    let is_callers_gpu = gpu == callers_gpu;
    let is_taken = placed.iter().enumerate().any(|(other, at)| other != lane && at.is_callers_stream);
    placed[lane] = Placement { is_callers_stream: is_callers_gpu && !is_taken, is_callers_gpu, gpu };
}

/// Order in which the operations of a program are enqueued, with the waits between the streams of its lanes (sequences of operations).
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LaneSchedule {
    /// Indices of the program's operations, in the order in which they are enqueued.
    pub order: SmallVec<[u32; 32]>,
    /// One boolean for each lane (sequence of operations). It is true if the lane's stream must wait for the caller's stream before the
    /// lane's first operation.
    pub forks: SmallVec<[bool; 8]>,
    /// One entry for each lane (sequence of operations): the index of the lane's last operation, if the caller's stream must wait for this
    /// operation. `None` if no wait is needed.
    pub joins: SmallVec<[Option<u32>; 8]>,
    /// One boolean for each operation of the program. It is true if an operation in another stream waits for this operation.
    pub awaited: SmallVec<[bool; 32]>,
}

/// Returns the order and the waits for enqueueing `program`. `placed` contains the GPU and the kind of stream of each lane (sequence of
/// operations).
///
/// The order alternates between the GPUs, and on each GPU between the lanes: the first copy of each lane is enqueued before the second copy
/// of any lane. An operation is enqueued after all operations that it waits for, because their events must have been recorded before. Among
/// operations that could be next, those on other GPUs than the caller's come first, because the signal to start takes time to reach these
/// GPUs. Operations in the caller's stream come last, because they start immediately.
///
/// Some waits are unnecessary. If a lane's first operation waits for an operation of another lane, the lane need not wait for the caller's
/// stream. If another lane waits for a lane's last operation, the caller's stream waits only for that other lane.
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
        // Copies that one GPU makes are serialized even in different streams, so the first copy in the GPU's second lane can be enqueued
        // later.
        let lanes_before = || placed[..lane].iter().filter(|at| at.gpu == placed[lane].gpu).count() as u32;
        depths.push(others().chain(before).map(|before| depths[before as usize] + 1).max().unwrap_or_else(lanes_before));
    }
    let joins = last.iter().zip(placed).map(|(last, at)| last.filter(|last| !at.is_callers_stream && !awaited[*last as usize])).collect();
    let mut order: SmallVec<[u32; 32]> = (0..ops.len() as u32).collect();
    let rank = |index: &u32| {
        let at = placed[ops[*index as usize].lane.0 as usize];
        // The indices are unique, so the result does not depend on whether the sort is stable.
        (depths[*index as usize], at.is_callers_stream, Reverse(!at.is_callers_gpu), *index)
    };
    order.sort_unstable_by_key(rank);
    LaneSchedule { order, forks, joins, awaited }
}
