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
pub(super) struct Seat {
    /// Whether it is the caller's own stream, and not an internal one.
    pub is_callers: bool,
    /// Whether it runs on the GPU of the caller's stream.
    pub is_home: bool,
    /// The GPU that it runs on.
    pub gpu: usize,
}

/// A seat for each lane of a program that is executed in a stream of GPU `home`. Only where that GPU reaches all memory of the plan
/// does it take over lanes of others.
///
/// The first lane at home has the caller's stream itself. Others have streams of their own, also those at home: copies of one stream
/// follow each other, and a push and a pull of one GPU shall not.
pub(super) fn seats(program: &Program, home: usize, is_reached: bool) -> SmallVec<[Seat; 8]> {
    let here = DeviceId(home as i32);
    // A copy engine serves a stream of any GPU, so a single lane of plain copies stays in the caller's stream whatever the GPU:
    // two events across devices would cost more than most such copies.
    let plain = is_reached && program.lanes.len() == 1 && program.ops.iter().all(|op| op.mechanism == Mechanism::Copy);
    let mut is_taken = false;
    let seat = |lane: &crate::plan::Lane| {
        let device = if is_reached { lane.device_for(here) } else { lane.device };
        let is_home = plain || device.is_host() || device == here;
        let is_callers = is_home && !std::mem::replace(&mut is_taken, true);
        Seat { is_callers, is_home, gpu: if is_home { home } else { device.0 as usize } }
    };
    program.lanes.iter().map(seat).collect()
}

/// Moves a lane to another GPU.
pub(super) fn move_seat(seats: &mut [Seat], lane: usize, gpu: usize, home: usize) {
    let is_home = gpu == home;
    let is_taken = seats.iter().enumerate().any(|(other, seat)| other != lane && seat.is_callers);
    seats[lane] = Seat { is_callers: is_home && !is_taken, is_home, gpu };
}

/// In what order the operations of a program are enqueued, and who waits for whom.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wiring {
    /// Indices of operations.
    pub order: SmallVec<[u32; 32]>,
    /// For each lane, whether it has to wait for the caller's stream before its first operation.
    pub forks: SmallVec<[bool; 8]>,
    /// For each lane the operation after which the caller's stream has to wait for it.
    pub joins: SmallVec<[Option<u32>; 8]>,
    /// For each operation, whether one of another lane waits for it.
    pub awaited: SmallVec<[bool; 32]>,
}

/// How to enqueue `program` in streams that are seated like this.
///
/// The order goes through all GPUs at once, and on each through its lanes: each has its first copy under way before any gets its
/// second. An operation still comes after all that it waits for, whose events are recorded by then. Among those that could be next,
/// lanes of other GPUs go first, because their start is still on its way to them, and the caller's stream last, because its copy
/// starts at once.
///
/// A lane whose first operation waits for one of another lane starts after the caller's stream without waiting for it itself; a lane
/// whose last operation is waited for by another lane is joined with that one.
pub(super) fn wiring(program: &Program, seats: &[Seat]) -> Wiring {
    let ops = &program.ops;
    let mut awaited: SmallVec<[bool; 32]> = smallvec![false; ops.len()];
    let mut forks: SmallVec<[bool; 8]> = smallvec![false; seats.len()];
    let mut last: SmallVec<[Option<u32>; 8]> = smallvec![None; seats.len()];
    let mut depths: SmallVec<[u32; 32]> = SmallVec::with_capacity(ops.len());
    for (index, op) in ops.iter().enumerate() {
        let lane = op.lane.0 as usize;
        let before = last[lane].replace(index as u32);
        let others = || op.after.iter().map(|before| before.0).filter(|before| ops[*before as usize].lane != op.lane);
        others().for_each(|before| awaited[before as usize] = true);
        if before.is_none() {
            forks[lane] = !seats[lane].is_callers && others().next().is_none();
        }
        // Copies that one GPU issues follow each other, whatever their streams, so the second lane of a GPU can wait for its turn.
        let lanes_before = || seats[..lane].iter().filter(|seat| seat.gpu == seats[lane].gpu).count() as u32;
        depths.push(others().chain(before).map(|before| depths[before as usize] + 1).max().unwrap_or_else(lanes_before));
    }
    let joins = last.iter().zip(seats).map(|(last, seat)| last.filter(|last| !seat.is_callers && !awaited[*last as usize])).collect();
    let mut order: SmallVec<[u32; 32]> = (0..ops.len() as u32).collect();
    let rank = |index: &u32| {
        let seat = seats[ops[*index as usize].lane.0 as usize];
        // Unequal indices, so that the order is one and the same however it is sorted.
        (depths[*index as usize], seat.is_callers, Reverse(!seat.is_home), *index)
    };
    order.sort_unstable_by_key(rank);
    Wiring { order, forks, joins, awaited }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Copy, Lane, LaneId, Op, OpId, Place};

    fn program(lanes: &[(i32, Option<i32>)], ops: &[(u32, &[u32])]) -> Program {
        let place = Place::Source { transfer: 0, offset: 0 };
        let op = |&(lane, after): &(u32, &[u32])| Op {
            lane: LaneId(lane),
            mechanism: Mechanism::Copy,
            copies: smallvec![Copy { from: place, to: place, bytes: 1 }],
            after: after.iter().map(|op| OpId(*op)).collect(),
        };
        Program {
            lanes: lanes.iter().map(|(device, also)| Lane { device: DeviceId(*device), also: also.map(DeviceId) }).collect(),
            ops: ops.iter().map(op).collect(),
            ..Program::default()
        }
    }

    const CALLERS: fn(usize) -> Seat = |gpu| Seat { is_callers: true, is_home: true, gpu };
    const HOME: fn(usize) -> Seat = |gpu| Seat { is_callers: false, is_home: true, gpu };
    const AWAY: fn(usize) -> Seat = |gpu| Seat { is_callers: false, is_home: false, gpu };

    /// A copy from each of four GPUs to the next.
    fn ring(also: bool) -> Program {
        let lanes: Vec<_> = (0..4).map(|gpu| (gpu, also.then_some((gpu + 1) % 4))).collect();
        program(&lanes, &[(0, &[]), (1, &[]), (2, &[]), (3, &[])])
    }

    #[test]
    fn both_directions_between_two_gpus_run_at_home_whichever_of_the_two_that_is() {
        let both = program(&[(0, Some(1)), (1, Some(0))], &[(0, &[]), (1, &[])]);
        for home in [0, 1] {
            assert_eq!(seats(&both, home, true)[..], [CALLERS(home), HOME(home)]);
        }
        assert_eq!(seats(&both, 2, true)[..], [AWAY(0), AWAY(1)]);
        assert_eq!(seats(&both, 1, false)[..], [AWAY(0), CALLERS(1)], "GPU 1 cannot read all memory");
    }

    #[test]
    fn of_a_ring_two_lanes_run_at_home_and_one_where_only_the_source_may_issue() {
        assert_eq!(seats(&ring(true), 2, true)[..], [AWAY(0), CALLERS(2), HOME(2), AWAY(3)]);
        assert_eq!(seats(&ring(false), 2, true)[..], [AWAY(0), AWAY(1), CALLERS(2), AWAY(3)]);
    }

    #[test]
    fn host_lanes_and_a_single_lane_of_plain_copies_run_at_home() {
        assert_eq!(seats(&program(&[(-1, None), (0, None)], &[(0, &[]), (1, &[])]), 3, true)[..], [CALLERS(3), AWAY(0)]);
        let mut one = program(&[(0, None)], &[(0, &[])]);
        assert_eq!(seats(&one, 3, true)[..], [CALLERS(3)]);
        assert_eq!(seats(&one, 3, false)[..], [AWAY(0)], "GPU 3 cannot read all memory");
        one.ops[0].mechanism = Mechanism::Kernel;
        assert_eq!(seats(&one, 3, true)[..], [AWAY(0)]);
    }

    #[test]
    fn a_lane_that_moves_leaves_the_callers_stream_or_takes_it_where_nobody_has_it() {
        let mut seated = seats(&ring(false), 2, true);
        move_seat(&mut seated, 0, 2, 2);
        assert_eq!(seated[..], [HOME(2), AWAY(1), CALLERS(2), AWAY(3)]);
        move_seat(&mut seated, 2, 3, 2);
        assert_eq!(seated[..], [HOME(2), AWAY(1), AWAY(3), AWAY(3)]);
        move_seat(&mut seated, 1, 2, 2);
        assert_eq!(seated[..], [HOME(2), CALLERS(2), AWAY(3), AWAY(3)]);
    }

    #[test]
    fn lanes_of_other_gpus_are_fed_first_and_one_gpus_lanes_take_turns() {
        let wiring = wiring(&ring(true), &seats(&ring(true), 1, true));
        assert_eq!(wiring.order[..], [2, 3, 0, 1]);
        assert_eq!(wiring.forks[..], [false, true, true, true]);
        assert_eq!(wiring.joins[..], [None, Some(1), Some(2), Some(3)]);
        assert_eq!(wiring.awaited[..], [false; 4]);
    }

    #[test]
    fn every_lane_has_its_first_copy_before_any_has_its_second() {
        let long = program(&[(0, None), (1, None)], &[(0, &[]), (0, &[]), (0, &[]), (1, &[]), (1, &[])]);
        let wiring = wiring(&long, &seats(&long, 0, true));
        assert_eq!(wiring.order[..], [3, 0, 4, 1, 2]);
        assert_eq!(wiring.joins[..], [None, Some(4)]);
    }

    #[test]
    fn a_single_lane_in_the_callers_stream_needs_no_event() {
        let one = program(&[(0, None)], &[(0, &[]), (0, &[])]);
        let wiring = wiring(&one, &seats(&one, 0, true));
        assert_eq!((&wiring.forks[..], &wiring.joins[..], &wiring.awaited[..]), (&[false][..], &[None][..], &[false, false][..]));
    }

    #[test]
    fn a_pipeline_forks_its_first_hop_alone_and_joins_its_second_alone() {
        // Direct on lane 0; two chunks over lanes 1 and 2, the second in the slot of the first.
        let staged = program(&[(0, None), (0, None), (1, None)], &[(0, &[]), (1, &[]), (2, &[1]), (1, &[2]), (2, &[3])]);
        let wiring = wiring(&staged, &seats(&staged, 0, true));
        assert_eq!(wiring.forks[..], [false, true, false]);
        assert_eq!(wiring.joins[..], [None, None, Some(4)]);
        assert_eq!(wiring.awaited[..], [false, true, true, true, false]);
        assert_eq!(wiring.order[..], [0, 1, 2, 3, 4]);
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
            let seats = seats(&program, below(4) as usize, true);
            assert!(seats.iter().filter(|seat| seat.is_callers).count() <= 1);
            check(&program, &seats, &wiring(&program, &seats));
        }
    }

    /// Replays what the stream executor does with a wiring: every operation starts after the caller's stream and after all that the
    /// program says, and the caller's stream goes on after all of them.
    fn check(program: &Program, seats: &[Seat], wiring: &Wiring) {
        let count = program.ops.len();
        // What the latest work of each lane comes after: operations, and at `count` the start.
        let mut lanes = vec![vec![false; count + 1]; seats.len()];
        let mut done: Vec<Option<Vec<bool>>> = vec![None; count];
        let join = |into: &mut Vec<bool>, from: &[bool]| into.iter_mut().zip(from).for_each(|(into, from)| *into |= from);
        let mut caller = vec![false; count + 1];
        caller[count] = true;
        for &index in &wiring.order {
            let op = &program.ops[index as usize];
            let lane = op.lane.0 as usize;
            if seats[lane].is_callers || wiring.forks[lane] {
                lanes[lane][count] = true;
            }
            for before in op.after.iter().filter(|before| program.ops[before.0 as usize].lane != op.lane) {
                assert!(wiring.awaited[before.0 as usize]);
                let before = done[before.0 as usize].clone().expect("its event was recorded before");
                join(&mut lanes[lane], &before);
            }
            assert!(lanes[lane][count], "operation {index} does not wait for the caller's stream");
            assert!(op.after.iter().all(|before| lanes[lane][before.0 as usize]), "operation {index} starts too early");
            lanes[lane][index as usize] = true;
            done[index as usize] = Some(lanes[lane].clone());
        }
        for (lane, seat) in seats.iter().enumerate() {
            if seat.is_callers {
                join(&mut caller, &lanes[lane]);
            } else if let Some(last) = wiring.joins[lane] {
                join(&mut caller, done[last as usize].as_ref().expect("enqueued"));
            }
        }
        assert!(caller.iter().all(|done| *done), "the caller's stream goes on too early: {program:?} {wiring:?}");
        let mut order = wiring.order.to_vec();
        order.sort_unstable();
        assert!(order.iter().copied().eq(0..count as u32), "each operation once");
    }
}
