//! Tests the division of programs into parts of ranks. [`check_parts`] must accept the results of [`divide`]. These parts must copy the
//! right data in every communication step, in random orders of ranks and internal streams. If a flag or a dependency is removed,
//! [`check_parts`] must refuse the parts if any such order copies wrong data.

use crate::common::{Random, config, machine_and_batch};
use mpgpu_core::plan::{Copy, Place, Program, Shape, plan};
use mpgpu_core::program::ranks::{EndRanks, FlagId, Part, PartViolation, Parts, RankedBatch, check_parts, divide};
use mpgpu_core::topology::{DeviceId, Machine, preset};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Program, and the rank to which each part of its memory belongs.
struct Case {
    program: Program,
    shapes: Vec<Shape>,
    ends: Vec<EndRanks>,
    owners: Vec<u32>,
    ranks: u32,
}

impl Case {
    fn batch(&self) -> RankedBatch<'_> {
        RankedBatch { ranks: self.ranks, shapes: &self.shapes, ends: &self.ends, owners: &self.owners }
    }

    /// Returns a random program whose GPUs belong to ranks. A rank may have several GPUs, and several ranks may have memory on one GPU.
    fn random(random: &mut Random) -> Case {
        let (machine, shapes, program) = loop {
            let (machine, shapes, options) = machine_and_batch(random, 40);
            // Some random machines have no route for some transfer. The plan is then refused.
            if let Ok(plan) = plan(&machine, &shapes, &options) {
                break (machine, shapes, (*plan.program).clone());
            }
        };
        let ranks = 1 + random.below(8) as u32;
        let owners: Vec<u32> = (0..machine.gpu_count()).map(|_| random.below(u64::from(ranks)) as u32).collect();
        let shared = random.chance(20);
        let ends = shapes
            .iter()
            .map(|shape| {
                let mut of = |device: DeviceId| match owners.get(device.0 as usize) {
                    Some(owner) if !shared && !device.is_host() => *owner,
                    _ => random.below(u64::from(ranks)) as u32,
                };
                EndRanks { src: of(shape.src_device), dst: of(shape.dst_device) }
            })
            .collect();
        Case { program, shapes, ends, owners, ranks }
    }
}

/// Action of a rank in a communication step.
#[derive(Copy, Clone, Debug, PartialEq)]
enum Event {
    Begin,
    Step(usize),
    End,
}

/// Error that a simulated run detects.
#[derive(Debug, PartialEq)]
enum Wrong {
    Deadlock,
    RaisedTwice,
    Byte,
    OutsideStep,
}

/// Origin of the data at a location: transfer, offset in it, and communication step.
type Origin = (u32, u64, u64);

/// Simulates `steps` communication steps in a random order that the parts permit, and checks every chunk.
fn run(case: &Case, parts: &Parts, steps: u64, random: &mut Random) -> Result<(), Wrong> {
    let ranks = parts.parts.len();
    let mut flags = vec![false; parts.flags.len()];
    let mut slots: BTreeMap<(u32, u32), Origin> = BTreeMap::new();
    let mut step_of = vec![0_u64; ranks];
    let mut inside = vec![false; ranks];
    let mut done: Vec<Vec<bool>> = parts.parts.iter().map(|part| vec![false; part.steps.len()]).collect();
    // Bytes of each transfer that have arrived in the current step of its rank.
    let mut arrived: BTreeMap<u32, u64> = BTreeMap::new();
    loop {
        let mut free: Vec<(usize, Event)> = Vec::new();
        for (rank, part) in parts.parts.iter().enumerate() {
            if !inside[rank] {
                if step_of[rank] < steps {
                    free.push((rank, Event::Begin));
                }
                continue;
            }
            let taken = |takes: &[FlagId]| takes.iter().all(|flag| flags[flag.0 as usize]);
            for (number, step) in part.steps.iter().enumerate() {
                let earlier =
                    part.steps[..number].iter().enumerate().all(|(other, earlier)| done[rank][other] || earlier.lane != step.lane);
                if !done[rank][number] && earlier && step.after.iter().all(|after| done[rank][*after as usize]) && taken(&step.takes) {
                    free.push((rank, Event::Step(number)));
                }
            }
            if done[rank].iter().all(|done| *done) && taken(&part.ends) {
                free.push((rank, Event::End));
            }
        }
        if free.is_empty() {
            return if step_of.iter().all(|step| *step == steps) { Ok(()) } else { Err(Wrong::Deadlock) };
        }
        let (rank, event) = free[random.below(free.len() as u64) as usize];
        let part = &parts.parts[rank];
        let raise = |raises: &[FlagId], flags: &mut Vec<bool>| {
            let twice = raises.iter().any(|flag| std::mem::replace(&mut flags[flag.0 as usize], true));
            if twice { Err(Wrong::RaisedTwice) } else { Ok(()) }
        };
        let take = |takes: &[FlagId], flags: &mut Vec<bool>| takes.iter().for_each(|flag| flags[flag.0 as usize] = false);
        match event {
            Event::Begin => {
                inside[rank] = true;
                raise(&part.begins, &mut flags)?;
            }
            Event::Step(number) => {
                let step = &part.steps[number];
                take(&step.takes, &mut flags);
                for Copy { from, to, bytes } in &step.copies {
                    let origin = match *from {
                        Place::Source { transfer, offset } => {
                            let owner = case.ends[transfer as usize].src as usize;
                            if !inside[owner] || step_of[owner] != step_of[rank] {
                                return Err(Wrong::OutsideStep);
                            }
                            (transfer, offset, step_of[owner])
                        }
                        Place::Slot { ring, slot } => *slots.get(&(ring.0, slot)).ok_or(Wrong::Byte)?,
                        Place::Destination { .. } => return Err(Wrong::Byte),
                    };
                    match *to {
                        Place::Slot { ring, slot } => drop(slots.insert((ring.0, slot), origin)),
                        Place::Destination { transfer, offset } => {
                            let owner = case.ends[transfer as usize].dst as usize;
                            if !inside[owner] {
                                return Err(Wrong::OutsideStep);
                            }
                            if origin != (transfer, offset, step_of[owner]) {
                                return Err(Wrong::Byte);
                            }
                            *arrived.entry(transfer).or_default() += bytes;
                        }
                        Place::Source { .. } => return Err(Wrong::Byte),
                    }
                }
                done[rank][number] = true;
                raise(&step.raises, &mut flags)?;
            }
            Event::End => {
                take(&part.ends, &mut flags);
                let mut received = (0..).zip(&case.ends).filter(|(_, ends)| ends.dst as usize == rank).map(|(transfer, _)| transfer);
                if received.any(|transfer| arrived.remove(&transfer).unwrap_or(0) != case.program.transfers[transfer as usize]) {
                    return Err(Wrong::Byte);
                }
                inside[rank] = false;
                step_of[rank] += 1;
                done[rank].fill(false);
            }
        }
    }
}

/// Removes a flag. The flag with the highest number gets the number of the removed one.
fn remove(parts: &mut Parts, gone: FlagId) {
    let last = FlagId(parts.flags.len() as u32 - 1);
    parts.flags.swap_remove(gone.0 as usize);
    let rename = |flag: &mut FlagId| {
        if *flag == last {
            *flag = gone;
        }
    };
    for Part { begins, steps, ends, .. } in &mut parts.parts {
        for list in [begins, ends] {
            list.retain(|flag| *flag != gone);
            list.iter_mut().for_each(rename);
        }
        for step in steps {
            for list in [&mut step.takes, &mut step.raises] {
                list.retain(|flag| *flag != gone);
                list.iter_mut().for_each(rename);
            }
        }
    }
}

/// Removes one flag, or one dependency of an operation. Returns `None` if there is none.
fn damage(parts: &mut Parts, random: &mut Random) -> Option<()> {
    let flags = parts.flags.len() as u64;
    let steps = parts.parts.iter_mut().flat_map(|part| &mut part.steps);
    let mut orders: Vec<_> = steps.map(|step| &mut step.after).filter(|after| !after.is_empty()).collect();
    let count = flags + orders.len() as u64;
    let chosen = (count > 0).then(|| random.below(count))?;
    match chosen.checked_sub(flags) {
        Some(order) => orders[order as usize].clear(),
        None => remove(parts, FlagId(chosen as u32)),
    }
    Some(())
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn what_is_divided_is_accepted_and_moves_the_right_bytes_in_every_order(seed in any::<u64>()) {
        let mut random = Random(seed);
        let case = Case::random(&mut random);
        let parts = divide(&case.program, &case.batch());
        prop_assert_eq!(check_parts(&case.program, &case.batch(), &parts), Ok(()));
        if case.program.ops.len() < 400 {
            for _ in 0..4 {
                prop_assert_eq!(run(&case, &parts, 3, &mut random), Ok(()));
            }
        }
    }

    #[test]
    fn what_goes_wrong_in_some_order_is_refused(seed in any::<u64>()) {
        let mut random = Random(seed);
        let case = Case::random(&mut random);
        let mut parts = divide(&case.program, &case.batch());
        if case.program.ops.len() < 200 && damage(&mut parts, &mut random).is_some() {
            let wrong = (0..20).find_map(|_| run(&case, &parts, 3, &mut random).err());
            if let Some(wrong) = wrong {
                prop_assert!(check_parts(&case.program, &case.batch(), &parts).is_err(), "{:?} was accepted", wrong);
            }
        }
    }
}

fn gpu(number: u32) -> DeviceId {
    DeviceId::gpu(number)
}

/// Returns a program for transfers of 64 MiB between GPUs of a preset, on which GPU n belongs to rank n.
fn case_of(name: &str, pairs: &[(DeviceId, DeviceId)]) -> Case {
    let machine = Machine::new(preset(name).expect("a preset")).expect("a machine");
    let kind = |device: DeviceId| {
        if device.is_host() { mpgpu_core::topology::MemoryKind::Pinned } else { mpgpu_core::topology::MemoryKind::Device }
    };
    let shapes: Vec<Shape> = pairs
        .iter()
        .map(|&(src, dst)| Shape { source: 0, dst_device: dst, src_device: src, dst_kind: kind(dst), src_kind: kind(src), bytes: 64 << 20 })
        .collect();
    let program = (*plan(&machine, &shapes, &Default::default()).expect("a plan").program).clone();
    let other = |device: DeviceId, end: DeviceId| if device.is_host() { end.0 as u32 } else { device.0 as u32 };
    let ends = pairs.iter().map(|&(src, dst)| EndRanks { src: other(src, dst), dst: other(dst, src) }).collect();
    Case { program, shapes, ends, owners: (0..machine.gpu_count()).collect(), ranks: machine.gpu_count() }
}

#[test]
fn a_copy_is_two_flags_the_receiver_is_ready_and_the_bytes_are_there() {
    let mut case = case_of("hgx-h200", &[(gpu(0), gpu(1))]);
    case.shapes[0].bytes = 4096;
    let machine = Machine::new(preset("hgx-h200").expect("a preset")).expect("a machine");
    case.program = (*plan(&machine, &case.shapes, &Default::default()).expect("a plan").program).clone();
    let parts = divide(&case.program, &case.batch());
    assert_eq!(parts.flags.len(), 2);
    let [sender, receiver] = [&parts.parts[0], &parts.parts[1]];
    assert_eq!((sender.steps.len(), receiver.steps.len()), (1, 0));
    assert_eq!((&receiver.begins[..], &sender.steps[0].takes[..]), (&[FlagId(0)][..], &[FlagId(0)][..]));
    assert_eq!((&sender.steps[0].raises[..], &receiver.ends[..]), (&[FlagId(1)][..], &[FlagId(1)][..]));
    assert!(parts.parts[2..].iter().all(|part| *part == Part::default()), "nobody else has anything to do");
}

#[test]
fn the_source_pushes_the_destination_pulls_and_a_relay_does_nothing() {
    // The transfer uses paths through two other GPUs and host memory. The ranks of these GPUs have no work, because the destination rank
    // itself reads their staging memory.
    let case = case_of("beluga", &[(gpu(0), gpu(1))]);
    let parts = divide(&case.program, &case.batch());
    assert_eq!(check_parts(&case.program, &case.batch(), &parts), Ok(()));
    assert!(case.program.rings.iter().any(|ring| !ring.device.is_host()), "it is relayed");
    assert!(parts.parts[0].steps.iter().all(|step| step.copies.iter().all(|copy| matches!(copy.from, Place::Source { .. }))));
    assert!(parts.parts[1].steps.iter().all(|step| step.copies.iter().all(|copy| matches!(copy.from, Place::Slot { .. }))));
    assert!(!parts.parts[1].steps.is_empty());
    assert!(parts.parts[2..].iter().all(|part| part.steps.is_empty()));
    assert!(parts.parts[1].lanes.iter().all(|device| *device == gpu(1)), "it pulls by its own copy engines");
}

#[test]
fn host_memory_reaches_a_gpu_over_the_links_of_the_ranks_that_have_them() {
    let case = case_of("hgx-h200", &[(DeviceId::HOST, gpu(0))]);
    let parts = divide(&case.program, &case.batch());
    assert_eq!(check_parts(&case.program, &case.batch(), &parts), Ok(()));
    let helpers = parts.parts[1..].iter().filter(|part| !part.steps.is_empty());
    assert!(helpers.clone().count() > 0);
    for part in helpers {
        assert!(
            part.steps.iter().all(|step| matches!((step.copies[0].from, step.copies[0].to), (Place::Source { .. }, Place::Slot { .. })))
        );
    }
}

#[test]
fn each_way_of_being_wrong_is_named() {
    let case = case_of("beluga", &[(gpu(0), gpu(1)), (gpu(1), gpu(0))]);
    let right = divide(&case.program, &case.batch());
    let refused = |change: &dyn Fn(&mut Parts)| {
        let mut parts = right.clone();
        change(&mut parts);
        check_parts(&case.program, &case.batch(), &parts).expect_err("it is wrong")
    };
    assert_eq!(refused(&|parts| drop(parts.parts.pop())), PartViolation::PartCount { parts: 3, ranks: 4 });
    assert!(matches!(refused(&|parts| parts.parts[0].steps[0].lane = 99), PartViolation::BadStep { rank: 0, step: 0 }));
    assert!(matches!(refused(&|parts| parts.parts[0].steps[0].after.push(0)), PartViolation::BadStep { rank: 0, step: 0 }));
    assert!(matches!(refused(&|parts| drop(parts.parts[0].steps.pop())), PartViolation::Copies { .. }));
    assert!(matches!(
        refused(&|parts| {
            let step = parts.parts[0].steps[0].clone();
            parts.parts[0].steps[0] = parts.parts[1].steps[0].clone();
            parts.parts[1].steps[0] = step;
        }),
        PartViolation::WrongRank { .. }
    ));
    assert!(matches!(refused(&|parts| parts.parts[1].begins.clear()), PartViolation::FlagUse { .. }));
    assert!(matches!(refused(&|parts| parts.flags[0].raiser = 3), PartViolation::FlagUse { flag: 0, raiser: 3, .. }));
    // Each kind of flag is removed once, which must be detected.
    let parts = &right.parts;
    let first =
        |rank: usize, of: &dyn Fn(&Place) -> bool| parts[rank].steps.iter().position(|step| of(&step.copies[0].to)).expect("such a step");
    let direct = first(0, &|to| matches!(to, Place::Destination { .. }));
    let staged = first(0, &|to| matches!(to, Place::Slot { .. }));
    let ready = |step: usize| *parts[0].steps[step].takes.iter().find(|flag| parts[1].begins.contains(flag)).expect("the other is ready");
    let without = |flag: FlagId| refused(&|parts| remove(parts, flag));
    assert!(matches!(without(ready(direct)), PartViolation::OutsideStep { rank: 0, owner: 1, .. }));
    assert!(matches!(without(ready(staged)), PartViolation::SlotOfLastStep { .. }));
    assert!(matches!(without(parts[1].ends[0]), PartViolation::OutsideStep { owner: 1, .. }));
    assert!(matches!(without(parts[0].steps[staged].raises[0]), PartViolation::Unordered { .. }));
    // A wait for a flag at the end instead of the beginning must be detected too.
    let late = refused(&|parts| {
        let flag = parts.parts[0].steps[direct].takes.pop().expect("it waits");
        parts.parts[0].ends.push(flag);
    });
    assert!(matches!(late, PartViolation::OutsideStep { rank: 0, owner: 1, .. }), "{late:?}");
    // Two ranks each wait for a later action of the other.
    let stuck = refused(&|parts| {
        for rank in [0, 1] {
            let ends = std::mem::take(&mut parts.parts[rank].ends);
            parts.parts[rank].steps[0].takes.extend(ends);
        }
    });
    assert!(matches!(stuck, PartViolation::Deadlock { .. }), "{stuck:?}");
}
