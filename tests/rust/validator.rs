//! Tests that the validator accepts valid programs and detects each kind of error. It must accept random programs of the planner. If such a
//! program is changed in one place, the validator must refuse it exactly if a simulation in random permitted orders finds wrong data.

use crate::common::{Random, machine_and_batch};
use mpgpu_core::plan::{Copy, Gpus, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId, Violation, plan, validate};
use mpgpu_core::topology::DeviceId;
use proptest::prelude::*;
use smallvec::smallvec;

const SOURCE: Place = Place::Source { transfer: 0, offset: 0 };
const DESTINATION: Place = Place::Destination { transfer: 0, offset: 0 };

fn slot(slot: u32) -> Place {
    Place::Slot { ring: RingId(0), slot }
}

fn copy(lane: u32, from: Place, to: Place, bytes: u64, after: &[u32]) -> Op {
    Op {
        lane: LaneId(lane),
        mechanism: Mechanism::Copy,
        copies: smallvec![Copy { from, to, bytes }],
        after: after.iter().map(|&op| OpId(op)).collect(),
    }
}

/// Returns a program that copies two chunks of 4 bytes through one slot, on two internal streams (lanes).
fn relay() -> Program {
    let (second_source, second_destination) = (Place::Source { transfer: 0, offset: 4 }, Place::Destination { transfer: 0, offset: 4 });
    Program {
        sources: Vec::new(),
        transfers: vec![8],
        lanes: vec![Lane::new(DeviceId(0)), Lane::new(DeviceId(1))],
        rings: vec![Ring { device: DeviceId(1), slot_bytes: 4, slots: 1 }],
        ops: vec![
            copy(0, SOURCE, slot(0), 4, &[]),
            copy(1, slot(0), DESTINATION, 4, &[0]),
            copy(0, second_source, slot(0), 4, &[1]),
            copy(1, slot(0), second_destination, 4, &[2]),
        ],
    }
}

fn violation(change: impl FnOnce(&mut Program)) -> Violation {
    let mut program = relay();
    change(&mut program);
    validate(&program, 4).expect_err("a broken program")
}

/// Returns a program in which a second transfer with the same source copies from the destination of the first.
fn passed_on() -> Program {
    let mut program = relay();
    program.transfers.push(8);
    program.sources = vec![1, 1];
    let at = |offset| [Place::Destination { transfer: 0, offset }, Place::Destination { transfer: 1, offset }];
    program.ops.extend([(0, 1), (4, 3)].map(|(offset, after)| copy(0, at(offset)[0], at(offset)[1], 4, &[after])));
    program
}

#[test]
fn what_has_arrived_may_be_passed_on_to_whoever_wants_the_same_bytes() {
    assert_eq!(validate(&passed_on(), 4), Ok(()));
    let violation = |change: &dyn Fn(&mut Program)| {
        let mut program = passed_on();
        change(&mut program);
        validate(&program, 4).expect_err("a broken program")
    };
    // The second half of the data arrives on another internal stream.
    assert_eq!(violation(&|p| p.ops[5].after.clear()), Violation::NotThere { op: 5, transfer: 0, offset: 4 });
    assert_eq!(violation(&|p| p.ops[5].after[0] = OpId(1)), Violation::NotThere { op: 5, transfer: 0, offset: 4 });
    // The copy reads more bytes than have arrived.
    assert_eq!(
        violation(&|p| {
            p.ops[4].copies[0].bytes = 8;
            p.ops.pop();
        }),
        Violation::NotThere { op: 4, transfer: 0, offset: 4 }
    );
    let wrong = Violation::WrongByte { op: 4, transfer: 1, offset: 0, found: 0, found_offset: 0 };
    for sources in [vec![], vec![1, 2], vec![0, 0]] {
        assert_eq!(violation(&|p| p.sources.clone_from(&sources)), wrong, "the sources are others");
    }
    let shifted = violation(&|p| p.ops[4].copies[0].to = Place::Destination { transfer: 1, offset: 4 });
    assert_eq!(shifted, Violation::WrongByte { op: 4, transfer: 1, offset: 4, found: 0, found_offset: 0 });
}

#[test]
fn a_relay_through_one_slot_is_right() {
    assert_eq!(validate(&relay(), 4), Ok(()));
    assert_eq!(validate(&Program::default(), 0), Ok(()));
    // The order of operations in an internal stream does not depend on the GPU that issues its plain copies.
    let mut free = relay();
    free.lanes.iter_mut().zip([1, 0]).for_each(|(lane, other)| lane.also = Gpus::from_iter([DeviceId(other)]));
    assert_eq!(validate(&free, 4), Ok(()));
    free.ops[3].mechanism = Mechanism::Kernel;
    assert_eq!(validate(&free, 4), Ok(()));
}

#[test]
fn each_way_of_being_wrong_is_named() {
    assert_eq!(violation(|p| p.ops[1].after.clear()), Violation::Race { first: 0, second: 1, ring: 0, slot: 0 });
    assert_eq!(violation(|p| p.ops[2].after.clear()), Violation::Race { first: 1, second: 2, ring: 0, slot: 0 });
    assert_eq!(violation(|p| p.ops[0].after.push(OpId(3))), Violation::NotBackwards { op: 0, after: 3 });
    assert_eq!(violation(|p| p.ops[0].after.push(OpId(0))), Violation::NotBackwards { op: 0, after: 0 });
    let batched = |p: &mut Program| (p.lanes[1].also, p.ops[3].mechanism) = (Gpus::from_iter([DeviceId(0)]), Mechanism::Batch);
    assert_eq!(violation(batched), Violation::TwoDevices { op: 3, lane: 1, mechanism: Mechanism::Batch });
    assert_eq!(violation(|p| p.ops[0].lane = LaneId(7)), Violation::NoSuchLane { op: 0, lane: 7, lanes: 2 });
    assert_eq!(violation(|p| p.ops[3].copies[0].bytes = 0), Violation::Empty { op: 3 });
    assert_eq!(violation(|p| p.ops[3].copies.clear()), Violation::CopyCount { op: 3, mechanism: Mechanism::Copy, copies: 0 });
    assert_eq!(violation(|p| p.rings[0].slots = 2), Violation::Staging { device: DeviceId(1), bytes: 8, bound: 4 });
    assert_eq!(violation(|p| p.ops[3].copies[0].bytes = 3), Violation::Missing { transfer: 0, offset: 7 });
    assert_eq!(
        violation(|p| p.ops[3].copies[0].to = DESTINATION),
        Violation::WrongByte { op: 3, transfer: 0, offset: 0, found: 0, found_offset: 4 }
    );
    assert_eq!(violation(|p| p.ops.push(copy(0, SOURCE, DESTINATION, 1, &[]))), Violation::WrittenTwice { op: 4, transfer: 0, offset: 0 });
    assert_eq!(violation(|p| p.ops.push(copy(0, SOURCE, SOURCE, 1, &[]))), Violation::WritesSource { op: 4, transfer: 0 });
    let second = Place::Destination { transfer: 0, offset: 4 };
    assert_eq!(violation(|p| p.ops.push(copy(0, second, slot(0), 1, &[]))), Violation::NotThere { op: 4, transfer: 0, offset: 4 });
    assert!(matches!(violation(|p| p.ops[0].copies[0].bytes = 5), Violation::OutOfBounds { op: 0, bytes: 5, size: 4, .. }));
    assert!(matches!(violation(|p| p.ops[3].copies[0].bytes = 5), Violation::OutOfBounds { op: 3, .. }));
    assert!(matches!(violation(|p| p.ops[0].copies[0].to = slot(1)), Violation::OutOfBounds { op: 0, .. }));
    assert_eq!(violation(|p| p.ops[0].copies[0].bytes = 2), Violation::Unwritten { op: 1, ring: 0, slot: 0 });
    assert!(matches!(violation(|p| p.transfers.push(1)), Violation::Missing { transfer: 1, offset: 0 }));
}

#[test]
fn copies_of_one_operation_are_unordered() {
    let mut program = relay();
    program.ops.truncate(1);
    program.ops[0].mechanism = Mechanism::Batch;
    program.ops[0].copies.push(Copy { from: slot(0), to: DESTINATION, bytes: 4 });
    assert_eq!(validate(&program, 4), Err(Violation::Unwritten { op: 0, ring: 0, slot: 0 }));
}

/// Simulates a program in a random order that internal streams and dependencies permit. Each byte of the data identifies its origin.
/// Returns `None` if a destination has a wrong byte.
fn run(program: &Program, random: &mut Random) -> Option<()> {
    let source = |transfer: usize, offset: u64| (transfer as u64) << 40 | (offset + 1);
    let mut slots = vec![Vec::new(); program.rings.len()];
    for (ring, slots) in program.rings.iter().zip(&mut slots) {
        *slots = vec![vec![0_u64; ring.slot_bytes as usize]; ring.slots as usize];
    }
    let mut destinations: Vec<Vec<u64>> = program.transfers.iter().map(|&bytes| vec![0; bytes as usize]).collect();
    let mut done = vec![false; program.ops.len()];
    for _ in 0..program.ops.len() {
        let ready: Vec<usize> = (0..program.ops.len())
            .filter(|&op| {
                let step = &program.ops[op];
                !done[op]
                    && step.after.iter().all(|after| done[after.0 as usize])
                    && (0..op).all(|earlier| done[earlier] || program.ops[earlier].lane != step.lane)
            })
            .collect();
        let op = ready[random.below(ready.len() as u64) as usize];
        done[op] = true;
        for copy in &program.ops[op].copies {
            let bytes: Vec<u64> = match copy.from {
                Place::Source { transfer, offset } => (0..copy.bytes).map(|i| source(transfer as usize, offset + i)).collect(),
                Place::Slot { ring, slot } => slots[ring.0 as usize][slot as usize][..copy.bytes as usize].to_vec(),
                Place::Destination { .. } => return None,
            };
            match copy.to {
                Place::Slot { ring, slot } => slots[ring.0 as usize][slot as usize][..bytes.len()].copy_from_slice(&bytes),
                Place::Destination { transfer, offset } => {
                    destinations[transfer as usize][offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                }
                Place::Source { .. } => return None,
            }
        }
    }
    let right = destinations.iter().enumerate().all(|(t, bytes)| bytes.iter().enumerate().all(|(i, &b)| b == source(t, i as u64)));
    right.then_some(())
}

proptest! {
    #![proptest_config(crate::common::config(64))]

    /// Tests that every program that the validator accepts gives the right data in every permitted order. The programs are those of the
    /// planner, and the same with a changed dependency, slot, offset or internal stream.
    #[test]
    fn accepted_programs_are_right_in_every_order(seed in any::<u64>()) {
        let mut random = Random(seed);
        let (machine, batch, options) = machine_and_batch(&mut random, 40_000);
        let Ok(plan) = plan(&machine, &batch, &options) else { return Ok(()) };
        prop_assert_eq!(validate(&plan.program, options.staging_bytes), Ok(()));
        let mut refused = 0;
        for change in 0..8 {
            let mut program = (*plan.program).clone();
            if change > 0 && !program.ops.is_empty() {
                let at = random.below(program.ops.len() as u64) as usize;
                let op = &mut program.ops[at];
                match random.below(4) {
                    0 => { op.after.pop(); }
                    1 => op.lane = LaneId(random.below(program.lanes.len() as u64) as u32),
                    2 => if let Place::Slot { slot, .. } = &mut op.copies[0].to { *slot = 0 },
                    _ => if let Place::Source { offset, .. } = &mut op.copies[0].from { *offset = offset.saturating_sub(1) },
                }
            }
            if validate(&program, options.staging_bytes).is_err() {
                refused += 1;
                continue;
            }
            for _ in 0..3 {
                prop_assert!(run(&program, &mut random).is_some(), "accepted, but wrong bytes: {:?}", program);
            }
        }
        prop_assert!(refused < 8, "the unchanged program is accepted");
    }
}
