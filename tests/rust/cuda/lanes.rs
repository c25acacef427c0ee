//! Tests the placement of a program's internal streams ("lanes") on CUDA streams, the order in which their operations are enqueued, and the
//! events that are required.

use super::super::lanes::*;
use crate::plan::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program};
use crate::topology::DeviceId;
use smallvec::smallvec;

fn program(lanes: &[(i32, Option<i32>)], ops: &[(u32, &[u32])]) -> Program {
    let place = Place::Source { transfer: 0, offset: 0 };
    let op = |&(lane, after): &(u32, &[u32])| Op {
        lane: LaneId(lane),
        mechanism: Mechanism::Copy,
        copies: smallvec![Copy { from: place, to: place, bytes: 1 }],
        after: after.iter().map(|op| OpId(*op)).collect(),
    };
    Program {
        lanes: lanes
            .iter()
            .map(|(device, also)| Lane { device: DeviceId(*device), also: also.iter().copied().map(DeviceId).collect() })
            .collect(),
        ops: ops.iter().map(op).collect(),
        ..Program::default()
    }
}

const CALLERS: fn(usize) -> Placement = |gpu| Placement { is_callers_stream: true, is_callers_gpu: true, gpu };
const HOME: fn(usize) -> Placement = |gpu| Placement { is_callers_stream: false, is_callers_gpu: true, gpu };
const AWAY: fn(usize) -> Placement = |gpu| Placement { is_callers_stream: false, is_callers_gpu: false, gpu };

/// Returns a program with a copy from each of four GPUs to the next. If `also` is true, a second GPU may issue each copy.
fn ring(also: bool) -> Program {
    let lanes: Vec<_> = (0..4).map(|gpu| (gpu, also.then_some((gpu + 1) % 4))).collect();
    program(&lanes, &[(0, &[]), (1, &[]), (2, &[]), (3, &[])])
}

#[test]
fn both_directions_between_two_gpus_run_at_home_whichever_of_the_two_that_is() {
    let both = program(&[(0, Some(1)), (1, Some(0))], &[(0, &[]), (1, &[])]);
    for home in [0, 1] {
        assert_eq!(place(&both, home, true)[..], [CALLERS(home), HOME(home)]);
    }
    assert_eq!(place(&both, 2, true)[..], [AWAY(0), AWAY(1)]);
    assert_eq!(place(&both, 1, false)[..], [AWAY(0), CALLERS(1)], "GPU 1 cannot read all memory");
}

#[test]
fn of_a_ring_two_lanes_run_at_home_and_one_where_only_the_source_may_issue() {
    assert_eq!(place(&ring(true), 2, true)[..], [AWAY(0), CALLERS(2), HOME(2), AWAY(3)]);
    assert_eq!(place(&ring(false), 2, true)[..], [AWAY(0), AWAY(1), CALLERS(2), AWAY(3)]);
}

#[test]
fn host_lanes_and_a_single_lane_of_plain_copies_run_at_home() {
    assert_eq!(place(&program(&[(-1, None), (0, None)], &[(0, &[]), (1, &[])]), 3, true)[..], [CALLERS(3), AWAY(0)]);
    let mut one = program(&[(0, None)], &[(0, &[])]);
    assert_eq!(place(&one, 3, true)[..], [CALLERS(3)]);
    assert_eq!(place(&one, 3, false)[..], [AWAY(0)], "GPU 3 cannot read all memory");
    one.ops[0].mechanism = Mechanism::Kernel;
    assert_eq!(place(&one, 3, true)[..], [AWAY(0)]);
}

#[test]
fn a_lane_that_moves_leaves_the_callers_stream_or_takes_it_where_nobody_has_it() {
    let mut seated = place(&ring(false), 2, true);
    move_lane(&mut seated, 0, 2, 2);
    assert_eq!(seated[..], [HOME(2), AWAY(1), CALLERS(2), AWAY(3)]);
    move_lane(&mut seated, 2, 3, 2);
    assert_eq!(seated[..], [HOME(2), AWAY(1), AWAY(3), AWAY(3)]);
    move_lane(&mut seated, 1, 2, 2);
    assert_eq!(seated[..], [HOME(2), CALLERS(2), AWAY(3), AWAY(3)]);
}

#[test]
fn lanes_of_other_gpus_are_fed_first_and_one_gpus_lanes_take_turns() {
    let schedule = schedule(&ring(true), &place(&ring(true), 1, true));
    assert_eq!(schedule.order[..], [2, 3, 0, 1]);
    assert_eq!(schedule.forks[..], [false, true, true, true]);
    assert_eq!(schedule.joins[..], [None, Some(1), Some(2), Some(3)]);
    assert_eq!(schedule.awaited[..], [false; 4]);
}

#[test]
fn every_lane_has_its_first_copy_before_any_has_its_second() {
    let long = program(&[(0, None), (1, None)], &[(0, &[]), (0, &[]), (0, &[]), (1, &[]), (1, &[])]);
    let schedule = schedule(&long, &place(&long, 0, true));
    assert_eq!(schedule.order[..], [3, 0, 4, 1, 2]);
    assert_eq!(schedule.joins[..], [None, Some(4)]);
}

#[test]
fn a_single_lane_in_the_callers_stream_needs_no_event() {
    let one = program(&[(0, None)], &[(0, &[]), (0, &[])]);
    let schedule = schedule(&one, &place(&one, 0, true));
    assert_eq!((&schedule.forks[..], &schedule.joins[..], &schedule.awaited[..]), (&[false][..], &[None][..], &[false, false][..]));
}

#[test]
fn a_pipeline_forks_its_first_hop_alone_and_joins_its_second_alone() {
    // A direct copy is on lane 0. Two chunks use lanes 1 and 2; the second chunk uses the slot of the first.
    let staged = program(&[(0, None), (0, None), (1, None)], &[(0, &[]), (1, &[]), (2, &[1]), (1, &[2]), (2, &[3])]);
    let schedule = schedule(&staged, &place(&staged, 0, true));
    assert_eq!(schedule.forks[..], [false, true, false]);
    assert_eq!(schedule.joins[..], [None, None, Some(4)]);
    assert_eq!(schedule.awaited[..], [false, true, true, true, false]);
    assert_eq!(schedule.order[..], [0, 1, 2, 3, 4]);
}

#[test]
fn whatever_the_program_its_order_and_events_keep_every_dependency() {
    let mut random = 7_u64;
    let mut below = |n: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % n
    };
    for _ in 0..2000 {
        let lanes: Vec<_> = (0..1 + below(6)).map(|_| (below(4) as i32, (below(2) == 0).then(|| below(4) as i32))).collect();
        let ops: Vec<(u32, Vec<u32>)> = (0..below(20) as u32)
            .map(|op| {
                let after = (0..below(3)).filter(|_| op > 0).map(|_| below(u64::from(op.max(1))) as u32).collect();
                (below(lanes.len() as u64) as u32, after)
            })
            .collect();
        let listed: Vec<_> = ops.iter().map(|(lane, after)| (*lane, after.as_slice())).collect();
        let program = program(&lanes, &listed);
        let placed = place(&program, below(4) as usize, true);
        assert!(placed.iter().filter(|at| at.is_callers_stream).count() <= 1);
        check(&program, &placed, &schedule(&program, &placed));
    }
}

/// Simulates the stream executor with a schedule. Every operation must start after the caller's stream and after the operations on which it
/// depends, and the caller's stream must continue after all operations.
fn check(program: &Program, placed: &[Placement], schedule: &LaneSchedule) {
    let count = program.ops.len();
    // Work that precedes the latest work of each lane: the operations, and, at index `count`, the start of the execution.
    let mut lanes = vec![vec![false; count + 1]; placed.len()];
    let mut done: Vec<Option<Vec<bool>>> = vec![None; count];
    let join = |into: &mut Vec<bool>, from: &[bool]| into.iter_mut().zip(from).for_each(|(into, from)| *into |= from);
    let mut caller = vec![false; count + 1];
    caller[count] = true;
    for &index in &schedule.order {
        let op = &program.ops[index as usize];
        let lane = op.lane.0 as usize;
        if placed[lane].is_callers_stream || schedule.forks[lane] {
            lanes[lane][count] = true;
        }
        for before in op.after.iter().filter(|before| program.ops[before.0 as usize].lane != op.lane) {
            assert!(schedule.awaited[before.0 as usize]);
            let before = done[before.0 as usize].clone().expect("its event was recorded before");
            join(&mut lanes[lane], &before);
        }
        assert!(lanes[lane][count], "operation {index} does not wait for the caller's stream");
        assert!(op.after.iter().all(|before| lanes[lane][before.0 as usize]), "operation {index} starts too early");
        lanes[lane][index as usize] = true;
        done[index as usize] = Some(lanes[lane].clone());
    }
    for (lane, at) in placed.iter().enumerate() {
        if at.is_callers_stream {
            join(&mut caller, &lanes[lane]);
        } else if let Some(last) = schedule.joins[lane] {
            join(&mut caller, done[last as usize].as_ref().expect("enqueued"));
        }
    }
    assert!(caller.iter().all(|done| *done), "the caller's stream goes on too early: {program:?} {schedule:?}");
    let mut order = schedule.order.to_vec();
    order.sort_unstable();
    assert!(order.iter().copied().eq(0..count as u32), "each operation once");
}
