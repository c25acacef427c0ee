//! Tests transfers in partitions on the host backend. Producers are threads that mark partitions ready in random orders, as the blocks of a
//! kernel do. Consumers check the data of each partition as soon as it has arrived.

use crate::common::{Random, config};
use crate::node_plans::{as_ranks, context, end, handed_in, memory};
use mpgpu_backend::StreamHandle;
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions, Error, PlanOptions};
use mpgpu_core::topology::DeviceId;
use mpgpu_measure::tune::{self, PartitionMover};
use mpgpu_ranks::{Agent, Alone, NodeGroup, NodePlan, NodeTransfer, PartitionTrials, Partitioning, Trigger, Window};
use proptest::prelude::*;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// Returns the value of the byte at `offset` of a transfer in a communication step.
fn byte(transfer: usize, offset: u64, step: u64) -> u8 {
    (offset.wrapping_mul(37) ^ (offset >> 7) ^ (transfer as u64).wrapping_mul(83) ^ step.wrapping_mul(71)) as u8
}

/// Returns the flags or counters of a trigger as 8-byte words.
fn words(address: u64, count: u32) -> &'static [AtomicU64] {
    // SAFETY: flags and counters of a plan that is not destroyed before the last use.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address as usize), count as usize) }
}

/// Returns the address to which producers must write in this communication step.
fn destination(trigger: &Trigger) -> u64 {
    words(trigger.step, 2)[0].load(Ordering::Relaxed)
}

/// Counts the bytes of a partition that a producer has written, and sets the flags of the partition with the last of them, like
/// `mpgpu::trigger::ready`.
fn written(trigger: &Trigger, partition: u32, bytes: u64) {
    if words(trigger.step, 2)[1].load(Ordering::Relaxed) == 0 {
        return;
    }
    let counter = &words(trigger.counters, trigger.partitions.count)[partition as usize];
    let range = trigger.partitions.range(partition);
    if counter.fetch_add(bytes, Ordering::AcqRel) + bytes < range.end - range.start {
        return;
    }
    counter.store(0, Ordering::Relaxed);
    words(trigger.ready, trigger.partitions.count)[partition as usize].store(1, Ordering::Release);
}

fn has_arrived(trigger: &Trigger, partition: u32) -> bool {
    let flags = words(trigger.arrived, trigger.partitions.count * trigger.arrived_flags);
    let first = (partition * trigger.arrived_flags) as usize;
    flags[first..first + trigger.arrived_flags as usize].iter().all(|flag| flag.load(Ordering::Acquire) != 0)
}

fn shuffled(random: &mut Random, count: u32) -> Vec<u32> {
    let mut all: Vec<u32> = (0..count).collect();
    for last in (1..all.len()).rev() {
        all.swap(last, random.below(last as u64 + 1) as usize);
    }
    all
}

struct Case {
    topology: &'static str,
    ranks: u32,
    transfers: Vec<NodeTransfer>,
    /// Tag of each transfer that is passed as a send and a receive descriptor; `None` for others.
    tags: Vec<Option<u64>>,
    sizes: Vec<[u64; 2]>,
    partitioning: Partitioning,
    one_in_sight: bool,
}

impl Case {
    fn random(random: &mut Random) -> Case {
        let (topology, gpus) = [("beluga", 4), ("hgx-h200", 8), ("dgx1-v100", 8), ("gh200-4", 4)][random.below(4) as usize];
        let ranks = 1 + random.below(gpus.min(4)) as u32;
        let mut sizes = vec![[0, 0]; ranks as usize];
        let mut transfers = Vec::new();
        for _ in 0..1 + random.below(5) {
            let (src, dst) = (random.below(u64::from(ranks)) as u32, random.below(u64::from(ranks)) as u32);
            let bytes = match random.below(4) {
                0 => random.below(70),
                1 => random.below(9000),
                2 => random.below(300_000),
                _ => random.below(3 << 20),
            };
            let [from, to] = [sizes[src as usize][0], sizes[dst as usize][1]];
            transfers.push(NodeTransfer { dst: end(dst, 1, to), src: end(src, 0, from), bytes });
            sizes[src as usize][0] += bytes + random.below(3);
            sizes[dst as usize][1] += bytes + random.below(3);
        }
        let tags = transfers.iter().map(|_| random.chance(40).then(|| random.below(2))).collect();
        let count = [None, Some(1), Some(2), Some(1 + random.below(40) as u32)][random.below(4) as usize];
        let tells = random.chance(70);
        let agent =
            [Agent::Producer, Agent::CopyEngine { tells }, Agent::Auto { tells, stores: random.chance(50) }][random.below(3) as usize];
        Case { topology, ranks, transfers, tags, sizes, partitioning: Partitioning { count, agent }, one_in_sight: random.chance(50) }
    }

    fn run(&self, steps: u64, options: &PlanOptions, seed: u64) {
        as_ranks(self.ranks, |rank, seat| {
            let mut random = Random(seed ^ u64::from(rank) << 32);
            let context = context(self.topology, self.one_in_sight.then(|| vec![rank]));
            let own = if self.one_in_sight { DeviceId::gpu(0) } else { DeviceId::gpu(rank) };
            let node = Arc::new(NodeGroup::new(&context, rank, self.ranks, seat, &[own]).expect("a node"));
            let sizes = self.sizes[rank as usize];
            let [sent, received] = sizes.map(|bytes| context.allocate(own, bytes.max(1)).expect("memory"));
            let windows = [Window { address: sent, bytes: sizes[0] }, Window { address: received, bytes: sizes[1] }];
            let handed: Vec<_> = (0..self.ranks).map(|rank| handed_in(&self.transfers, &self.tags, rank)).collect();
            let plan = node.plan_partitioned(&windows, &handed[rank as usize].0, Some(self.partitioning), options).expect("a plan");
            let stream = context.create_stream(own).expect("a stream");
            // Each rank gets the trigger through its own descriptor, or through the whole transfer if it passed that.
            let trigger = |index: usize, is_receiver: bool| {
                let is_half = is_receiver && self.tags[index].is_some();
                let by = if is_half { rank } else { self.transfers[index].src.rank };
                let number = handed[by as usize].1.iter().position(|which| *which == (index, is_half)).expect("it is handed in");
                plan.trigger(by, number).expect("a trigger")
            };
            let of_rank = |is_receiver: bool| -> Vec<(usize, NodeTransfer, Trigger)> {
                let is_mine = |t: &NodeTransfer| (if is_receiver { t.dst } else { t.src }).rank == rank;
                let mine = self.transfers.iter().enumerate().filter(|(_, t)| is_mine(t));
                mine.map(|(index, t)| (index, *t, trigger(index, is_receiver))).collect()
            };
            let (sends, receives) = (of_rank(false), of_rank(true));
            let tells = !matches!(self.partitioning.agent, Agent::CopyEngine { tells: false } | Agent::Auto { tells: false, .. });
            for step in 0..steps {
                plan.arm(stream).expect("armed");
                // Work in this stream does not wait for producers.
                context.synchronize_stream(stream).expect("it ends");
                std::thread::scope(|scope| {
                    let orders: Vec<Vec<u32>> = sends.iter().map(|(.., t)| shuffled(&mut random, t.partitions.count)).collect();
                    let (early, pieces) = (random.chance(50) && tells, 1 + random.below(3));
                    let mut producers = Vec::new();
                    for ((index, _, trigger), order) in sends.iter().zip(orders) {
                        producers.push(scope.spawn(move || {
                            for partition in order {
                                let range = trigger.partitions.range(partition);
                                let each = (range.end - range.start).div_ceil(pieces).max(1);
                                for begin in range.clone().step_by(each as usize) {
                                    let bytes = each.min(range.end - begin);
                                    let target = memory(destination(trigger) + begin, bytes);
                                    (begin..).zip(target).for_each(|(offset, target)| *target = byte(*index, offset, step));
                                    written(trigger, partition, bytes);
                                }
                            }
                        }));
                    }
                    for (index, t, trigger) in receives.iter().filter(|_| early) {
                        scope.spawn(move || {
                            let mut missing: Vec<u32> = (0..trigger.partitions.count).collect();
                            while !missing.is_empty() {
                                missing.retain(|partition| {
                                    let arrived = has_arrived(trigger, *partition);
                                    if arrived {
                                        let range = trigger.partitions.range(*partition);
                                        let found = memory(received + t.dst.offset + range.start, range.end - range.start);
                                        let wrong =
                                            range.clone().zip(found.iter()).find(|(offset, found)| **found != byte(*index, *offset, step));
                                        assert_eq!(wrong, None, "rank {rank}, step {step}, transfer {index}, partition {partition}");
                                    }
                                    !arrived
                                });
                                std::thread::yield_now();
                            }
                        });
                    }
                    if matches!(self.partitioning.agent, Agent::Producer | Agent::Auto { tells: false, .. }) {
                        // The producers may store the data themselves, or all data may be copied after they have finished.
                        producers.into_iter().for_each(|producer| producer.join().expect("no panic"));
                    }
                    plan.enqueue(stream).expect("it is enqueued");
                    plan.wait(Duration::from_secs(60)).expect("it ends");
                });
                for (index, t, trigger) in &receives {
                    assert!(!tells || (0..trigger.partitions.count).all(|partition| has_arrived(trigger, partition)));
                    let bytes = memory(received + t.dst.offset, t.bytes);
                    let wrong = (0..).zip(bytes.iter()).find(|(offset, found)| **found != byte(*index, *offset, step));
                    assert_eq!(wrong, None, "rank {rank}, step {step}, transfer {index} {t:?}");
                    bytes.fill(0xEE);
                }
            }
            plan.destroy().expect("it is given back");
            [sent, received].into_iter().for_each(|address| context.free(address).expect("freed"));
            let left: u64 =
                [own, DeviceId::HOST].map(|device| context.device_statistics(device).expect("a device").allocated_bytes).iter().sum();
            assert_eq!(left, 0, "nothing of the plan is left");
        });
    }
}

proptest! {
    #![proptest_config(config(40))]

    #[test]
    fn every_byte_arrives_with_its_partition_whatever_the_order(seed in any::<u64>()) {
        let mut random = Random(seed);
        let case = Case::random(&mut random);
        let options = PlanOptions { min_bytes: Some(0), ..PlanOptions::default() };
        let options = if random.chance(50) { PlanOptions { chunk_bytes: Some(4096 << random.below(5)), ..options } } else { options };
        // After this number of steps, plans that choose among variants have tried all variants, in any order.
        let steps = if matches!(case.partitioning.agent, Agent::Auto { tells: false, .. }) { 16 } else { 4 };
        case.run(steps, &options, random.next());
    }
}

#[test]
fn ranks_between_which_nothing_moves_do_not_need_each_other() {
    let transfer = |dst, src, bytes| NodeTransfer { dst: end(dst, 1, 0), src: end(src, 0, 0), bytes };
    let transfers = vec![transfer(0, 0, 1104), transfer(1, 1, 2194), NodeTransfer { dst: end(0, 1, 1105), src: end(1, 0, 0), bytes: 0 }];
    for agent in [Agent::Producer, Agent::CopyEngine { tells: true }] {
        let partitioning = Partitioning { count: Some(2), agent };
        let (transfers, sizes) = (transfers.clone(), vec![[1104, 1105], [2196, 2196]]);
        Case { topology: "beluga", ranks: 2, tags: vec![None; transfers.len()], transfers, sizes, partitioning, one_in_sight: true }.run(
            20,
            &PlanOptions::default(),
            3,
        );
    }
}

#[test]
fn a_plan_is_used_ten_thousand_times() {
    let transfers: Vec<_> = (0..2).map(|rank| NodeTransfer { dst: end(1 - rank, 1, 0), src: end(rank, 0, 0), bytes: 3000 }).collect();
    for agent in [Agent::CopyEngine { tells: true }, Agent::Auto { tells: true, stores: false }] {
        let (transfers, partitioning) = (transfers.clone(), Partitioning { count: Some(3), agent });
        let case = Case {
            topology: "beluga",
            ranks: 2,
            tags: vec![None; transfers.len()],
            transfers,
            sizes: vec![[3000, 3000]; 2],
            partitioning,
            one_in_sight: true,
        };
        case.run(if std::env::var_os("LONG_TESTS").is_some() { 10_000 } else { 300 }, &PlanOptions::default(), 7);
    }
}

/// Creates a node of one rank that sends to itself, from device 0 to device 1. Returns the context, the plan and the two allocations.
fn alone(bytes: u64, partitioning: Partitioning) -> (Arc<Context>, NodePlan, [u64; 2]) {
    alone_on("beluga", bytes, partitioning)
}

fn alone_on(topology: &'static str, bytes: u64, partitioning: Partitioning) -> (Arc<Context>, NodePlan, [u64; 2]) {
    let context = context(topology, None);
    let node = Arc::new(NodeGroup::new(&context, 0, 1, Box::new(Alone), &[]).expect("a node"));
    let memory = [0, 1].map(|gpu| context.allocate(DeviceId::gpu(gpu), bytes).expect("memory"));
    let windows = memory.map(|address| Window { address, bytes });
    let transfer = NodeTransfer { dst: end(0, 1, 0), src: end(0, 0, 0), bytes };
    let plan = node.plan_partitioned(&windows, &[transfer], Some(partitioning), &PlanOptions::default()).expect("a plan");
    (context, plan, memory)
}

#[test]
fn large_transfers_take_several_paths_and_every_path_has_work_from_the_first_partitions_on() {
    let (context, plan, memory) = alone(64 << 20, Partitioning { count: Some(16), agent: Agent::CopyEngine { tells: true } });
    let program = &plan.planned().program;
    assert!(plan.paths() > 1 && program.lanes.len() > 1, "{}", plan.describe());
    assert!(plan.describe().contains("16 partitions of 4194304 bytes, moved by copy engines"), "{}", plan.describe());
    // The first bytes of the staged paths are in the first half of the transfer. No copy reads two partitions.
    let reads = |op: &mpgpu_core::plan::Op| match op.copies[0].from {
        mpgpu_core::plan::Place::Source { offset, .. } => Some((offset, op.copies[0].bytes)),
        _ => None,
    };
    for lane in 0..program.lanes.len() as u32 {
        let of_lane: Vec<(u64, u64)> = program.ops.iter().filter(|op| op.lane.0 == lane).filter_map(reads).collect();
        assert!(of_lane.iter().all(|(offset, bytes)| offset >> 22 == (offset + bytes - 1) >> 22), "{of_lane:?}");
        assert!(of_lane.first().is_none_or(|(offset, _)| *offset < 32 << 20), "lane {lane}: {of_lane:?}");
        assert!(of_lane.is_sorted(), "lane {lane} moves partitions in order");
    }
    plan.destroy().expect("given back");
    memory.into_iter().for_each(|address| context.free(address).expect("freed"));
}

#[test]
fn a_producer_that_never_comes_is_named_and_destruction_does_not_hang() {
    // Each of the two internal streams of a transfer processes partitions in order. So the partitions after the first one that is missing
    // have not arrived either.
    {
        let not_arrived = "partition 3 (and 3 more) of transfer 0 of rank 0 has not arrived";
        let (context, plan, memory) = alone(1000, Partitioning { count: Some(10), agent: Agent::CopyEngine { tells: true } });
        let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
        plan.arm(stream).expect("armed");
        context.synchronize_stream(stream).expect("it ends");
        let trigger = plan.trigger(0, 0).expect("a trigger");
        (0..10).filter(|partition| ![3, 7].contains(partition)).for_each(|partition| written(&trigger, partition, 100));
        plan.enqueue(stream).expect("enqueued");
        let missing = plan.wait(Duration::from_millis(500)).expect_err("it cannot end");
        let text = format!("partition 3 (and 1 more) of transfer 0 of rank 0 was not made ready, {not_arrived}, after 0.5 s");
        assert_eq!(missing.to_string(), text);
        let begin = Instant::now();
        let ended = plan.destroy().expect_err("two partitions are missing");
        assert!(matches!(&ended, Error::PartitionTimeout { is_ended: true, missing, .. } if missing.contains("partition 3")), "{ended}");
        assert!(begin.elapsed() < Duration::from_secs(60));
        context.synchronize_stream(stream).expect("it has ended");
        memory.into_iter().for_each(|address| context.free(address).expect("freed"));
    }
}

#[test]
fn a_context_ends_after_steps_whose_producers_never_came() {
    let agents = [Agent::CopyEngine { tells: true }, Agent::Auto { tells: true, stores: false }, Agent::Producer];
    for (agent, is_dropped) in agents.into_iter().flat_map(|agent| [(agent, false), (agent, true)]) {
        let (context, plan, _) = alone(1000, Partitioning { count: Some(10), agent });
        let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
        plan.arm(stream).expect("armed");
        plan.enqueue(stream).expect("enqueued");
        let plan = Some(plan).filter(|_| !is_dropped);
        let (ended, has_ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || ended.send(context.close()));
        let closed = has_ended.recv_timeout(Duration::from_secs(60)).expect("closing a context ends");
        closed.expect("nothing else fails");
        drop(plan);
    }
}

#[test]
fn steps_are_armed_once_and_executed_once() {
    let (context, plan, memory) = alone(1000, Partitioning { count: None, agent: Agent::Producer });
    let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
    let said = |result: Result<(), Error>, text: &str| {
        let error = result.expect_err("it is refused").to_string();
        assert!(error.contains(text), "{error}");
    };
    said(plan.enqueue(stream), "not armed");
    plan.arm(stream).expect("armed");
    said(plan.arm(stream), "armed already");
    context.synchronize_stream(stream).expect("it ends");
    written(&plan.trigger(0, 0).expect("a trigger"), 0, 1000);
    plan.enqueue(stream).expect("executed");
    said(plan.enqueue(stream), "not armed");
    said(plan.trigger(0, 1).map(drop), "transfer 1 of rank 0");
    plan.destroy().expect("given back");
    let (node, windows) = (Arc::new(NodeGroup::new(&context, 0, 1, Box::new(Alone), &[]).expect("a node")), []);
    for (count, text) in [(0, "count=0"), (4097, "count=4097")] {
        let partitioning = Partitioning { count: Some(count), agent: Agent::CopyEngine { tells: true } };
        said(node.plan_partitioned(&windows, &[], Some(partitioning), &PlanOptions::default()).map(drop), text);
    }
    let whole = node.plan(&windows, &[], &PlanOptions::default()).expect("a plan");
    said(whole.arm(stream), "do not move in partitions");
    whole.destroy().expect("given back");
    memory.into_iter().for_each(|address| context.free(address).expect("freed"));
}

#[test]
fn a_rank_that_leaves_an_armed_step_leaves_nobody_waiting() {
    let (armed, kernels_end) = (Barrier::new(2), AtomicU64::new(0));
    as_ranks(2, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node"));
        let [sent, received] = [0, 1].map(|_| context.allocate(DeviceId::gpu(0), 1000).expect("memory"));
        let windows = [sent, received].map(|address| Window { address, bytes: 1000 });
        let transfer = NodeTransfer { dst: end(1 - rank, 1, 0), src: end(rank, 0, 0), bytes: 1000 };
        let partitioning = Partitioning { count: Some(2), agent: Agent::CopyEngine { tells: true } };
        let plan = node.plan_partitioned(&windows, &[transfer], Some(partitioning), &PlanOptions::default()).expect("a plan");
        let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
        plan.arm(stream).expect("armed");
        context.synchronize_stream(stream).expect("it ends");
        armed.wait();
        if rank == 0 {
            let trigger = plan.trigger(0, 0).expect("a trigger");
            (0..2).for_each(|partition| written(&trigger, partition, 500));
            plan.enqueue(stream).expect("executed");
            // The partitions of the other rank never arrive.
            let error = plan.wait(Duration::from_secs(30)).expect_err("the other has left");
            assert!(error.to_string().contains("destroyed") || error.to_string().contains("ended"), "{error}");
            // Kernels that poll the trigger do not wait for these partitions either.
            let (theirs, begin) = (plan.trigger(1, 0).expect("a trigger"), Instant::now());
            let all_are_up = || (0..2).all(|partition| has_arrived(&theirs, partition));
            while !all_are_up() && begin.elapsed() < Duration::from_secs(30) {
                std::thread::yield_now();
            }
            kernels_end.store(u64::from(all_are_up()), Ordering::Relaxed);
            plan.destroy().expect_err("its last step has failed");
        } else {
            plan.destroy().expect("it has executed nothing");
        }
        // Memory that the other rank writes in the step must exist until that rank has left too.
        armed.wait();
        [sent, received].into_iter().for_each(|address| context.free(address).expect("freed"));
    });
    assert_eq!(kernels_end.into_inner(), 1, "a kernel would wait for ever");
}

#[test]
fn a_fault_of_one_rank_fails_on_all_also_where_the_library_chooses_the_agent() {
    let errors = as_ranks(2, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node"));
        let address = context.allocate(DeviceId::gpu(0), 1000).expect("memory");
        let transfer = NodeTransfer { dst: end(1 - rank, 0, 500), src: end(rank, 0, 0), bytes: 500 };
        let plan = |bytes, agent| {
            let partitioning = Some(Partitioning { count: Some(2), agent });
            node.plan_partitioned(&[Window { address, bytes }], &[transfer], partitioning, &PlanOptions::default())
        };
        let auto = Agent::Auto { tells: true, stores: false };
        let past_the_end = plan(if rank == 1 { 1 << 40 } else { 1000 }, auto).expect_err("one window has no memory").to_string();
        let differing =
            plan(1000, if rank == 1 { Agent::CopyEngine { tells: true } } else { auto }).expect_err("agents differ").to_string();
        plan(1000, auto).expect("the ranks are together still").destroy().expect("given back");
        context.free(address).expect("freed");
        [past_the_end, differing]
    });
    assert!(errors[1][0].contains("extends past the end of its allocation"), "{errors:?}");
    assert!(errors[0][0].contains("rank 1") && errors[0][0].contains("extends past the end of its allocation"), "{errors:?}");
    assert!(errors.iter().all(|errors| errors[1].contains("pass the same options")), "{errors:?}");
}

/// Tests a rank that only receives. It arms two steps in one stream and executes the second in another stream. That execution must wait for
/// the data of its own step.
#[test]
fn a_step_that_is_executed_in_another_stream_than_it_was_armed_in_takes_no_earlier_bytes() {
    let (in_line, looked) = (Barrier::new(2), Barrier::new(2));
    as_ranks(2, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node"));
        let address = context.allocate(DeviceId::gpu(0), 1000).expect("memory");
        let transfer = NodeTransfer { dst: end(1, 0, 0), src: end(0, 0, 0), bytes: 1000 };
        let transfers = if rank == 0 { vec![transfer] } else { Vec::new() };
        let partitioning = Some(Partitioning { count: Some(2), agent: Agent::CopyEngine { tells: true } });
        let windows = [Window { address, bytes: 1000 }];
        let plan = node.plan_partitioned(&windows, &transfers, partitioning, &PlanOptions::default()).expect("a plan");
        let [first, second] = [0, 1].map(|_| context.create_stream(DeviceId::gpu(0)).expect("a stream"));
        if rank == 0 {
            let trigger = plan.trigger(0, 0).expect("a trigger");
            in_line.wait();
            for step in 0..2 {
                plan.arm(first).expect("armed");
                context.synchronize_stream(first).expect("it ends");
                if step == 1 {
                    looked.wait();
                }
                (0..2).for_each(|partition| written(&trigger, partition, 500));
                plan.enqueue(first).expect("executed");
            }
            context.synchronize_stream(first).expect("it ends");
        } else {
            let gate = Arc::new(Barrier::new(2));
            let ends = [0, 1].map(|_| Arc::new(AtomicU64::new(0)));
            let closed = Arc::clone(&gate);
            context.launch_host(first, Box::new(move || _ = closed.wait())).expect("enqueued");
            let tell = |stream, at: usize| {
                let end = Arc::clone(&ends[at]);
                context.launch_host(stream, Box::new(move || end.store(1, Ordering::Release))).expect("enqueued");
            };
            plan.arm(first).expect("armed");
            plan.enqueue(first).expect("executed");
            plan.arm(first).expect("armed");
            tell(first, 0);
            plan.enqueue(second).expect("executed");
            tell(second, 1);
            in_line.wait();
            gate.wait();
            let begin = Instant::now();
            let has_ended = |at: usize| ends[at].load(Ordering::Acquire) != 0;
            while begin.elapsed() < Duration::from_secs(20) && !has_ended(0) && !has_ended(1) {
                std::thread::yield_now();
            }
            let (first_ends, second_ends) = (has_ended(0), has_ended(1));
            looked.wait();
            [first, second].into_iter().for_each(|stream| context.synchronize_stream(stream).expect("it ends"));
            assert!(first_ends && !second_ends, "the first stream has ended: {first_ends}, the second: {second_ends}");
        }
        plan.destroy().expect("given back");
        context.free(address).expect("freed");
    });
}

/// Enqueues a producer in a stream, for the transfers of one rank in a communication step. The producer writes the data and marks the
/// partitions ready.
fn produce(context: &Context, triggers: &[Trigger], stream: StreamHandle, step: u64) {
    let triggers = triggers.to_vec();
    let work = move || {
        for (index, trigger) in triggers.iter().enumerate() {
            for partition in 0..trigger.partitions.count {
                let range = trigger.partitions.range(partition);
                let target = memory(destination(trigger) + range.start, range.end - range.start);
                range.clone().zip(target).for_each(|(offset, target)| *target = byte(index, offset, step));
                written(trigger, partition, range.end - range.start);
            }
        }
    };
    context.launch_host(stream, Box::new(work)).expect("enqueued");
}

/// Runs tuning on two ranks, each of which sees one GPU, and which send to each other.
fn tuned<T: Send>(
    file: Option<&Path>,
    bytes: u64,
    work: impl Fn(u32, &Arc<Context>, &Arc<NodeGroup>, [Window; 2], NodeTransfer) -> T + Sync,
) -> Vec<T> {
    as_ranks(2, |rank, seat| {
        let options = ContextOptions { backend: Some(BackendChoice::Host), topology: Some("beluga".into()), ..ContextOptions::default() };
        let tuning_file = file.filter(|file| file.exists()).map(|file| file.to_string_lossy().into_owned());
        let config = Config { visible: Some(vec![rank]), tuning_file, ..Config::default() };
        let context = Arc::new(Context::open(&options, config).expect("a context"));
        let node = Arc::new(NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node"));
        let windows = [0, 1].map(|_| Window { address: context.allocate(DeviceId::gpu(0), bytes).expect("memory"), bytes });
        let transfer = NodeTransfer { dst: end(1 - rank, 1, 0), src: end(rank, 0, 0), bytes };
        let done = work(rank, &context, &node, windows, transfer);
        windows.into_iter().for_each(|window| context.free(window.address).expect("freed"));
        done
    })
}

#[test]
fn ranks_tune_together_and_the_next_run_finds_what_was_best() {
    const BYTES: u64 = 300_000;
    let file = std::env::temp_dir().join(format!("mpgpu-partitions-{}.toml", std::process::id()));
    let all = [Agent::CopyEngine { tells: true }, Agent::Producer];
    let untold = [Agent::Auto { tells: false, stores: true }, Agent::CopyEngine { tells: false }, Agent::Producer];
    for agents in [&all[..1], &all[..], &untold[..]] {
        let best = tuned(None, BYTES, |_, context, node, windows, transfer| {
            let trials = PartitionTrials { agents, rounds: 2, blocks: 0, file: Some(&file) };
            let mut step = 0;
            let mut launch = |triggers: &[Trigger], stream| {
                step += 1;
                produce(context, triggers, stream, step);
                Ok(())
            };
            let best = node.tune_partitions(&windows, &[transfer], &PlanOptions::default(), &trials, &mut launch).expect("it ends");
            assert!(step > 6, "several candidates, three steps each: {step}");
            let plan = node.plan_partitioned(&windows, &[transfer], Some(best), &PlanOptions::default()).expect("a plan");
            let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
            plan.arm(stream).expect("armed");
            produce(context, &[plan.trigger(node.rank(), 0).expect("a trigger")], stream, 77);
            plan.enqueue(stream).expect("executed");
            plan.wait(Duration::from_secs(60)).expect("it ends");
            assert!((0..).zip(memory(windows[1].address, BYTES).iter()).all(|(offset, found)| *found == byte(0, offset, 77)));
            plan.destroy().expect("given back");
            best
        });
        assert_eq!(best[0], best[1]);
        let kept = tune::read(&file).expect("a file").partitions;
        assert_eq!((kept.len(), kept[0].bytes), (1, BYTES), "the second run replaces what the first has found");
        let trials = |mover| kept[0].trials.iter().filter(|trial| trial.mover == mover).count();
        assert!(trials(PartitionMover::CopyEngine) >= 2 && (trials(PartitionMover::Producer) > 0) == (agents.len() > 1), "{kept:?}");
        assert_eq!(trials(PartitionMover::Automatic), agents.len() / 3, "{kept:?}");
        let describe = |file: Option<&Path>| {
            let texts = tuned(file, BYTES, |_, _, node, windows, transfer| {
                let partitioning = Partitioning { count: None, agent: Agent::Auto { tells: true, stores: false } };
                let plan = node.plan_partitioned(&windows, &[transfer], Some(partitioning), &PlanOptions::default()).expect("a plan");
                let text = plan.describe();
                plan.destroy().expect("given back");
                text
            });
            texts.into_iter().next().expect("two")
        };
        // Stores a choice in the file that the model would not make.
        let mut tuning = tune::read(&file).expect("a file");
        tuning.partitions[0].count = 17;
        std::fs::write(&file, tuning.to_toml()).expect("written");
        let text = describe(Some(&file));
        assert!(text.contains("17 partitions of 17648 bytes, moved by copy engines"), "{text}");
        assert!(!describe(None).contains("17 partitions"));
    }
    std::fs::remove_file(&file).expect("it is there");
}

#[test]
fn steps_of_an_automatic_plan_try_all_ways_on_both_ranks_alike_and_every_byte_arrives() {
    const BYTES: u64 = 1 << 20;
    for stores in [false, true] {
        try_all_ways(BYTES, stores);
    }
}

/// Executes a plan until all variants were tried. If `stores` is true, the variants include storing by producers.
fn try_all_ways(bytes: u64, stores: bool) {
    let known = tuned(None, bytes, |rank, context, node, windows, transfer| {
        let plan = |tells| {
            let partitioning = Partitioning { count: Some(16), agent: Agent::Auto { tells, stores } };
            node.plan_partitioned(&windows, &[transfer], Some(partitioning), &PlanOptions::default()).expect("a plan")
        };
        let told = plan(true);
        assert!(told.to_json().get("variants").is_none(), "a producer may wait for an arrival");
        told.destroy().expect("given back");
        let plan = plan(false);
        let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
        let sends = plan.trigger(rank, 0).expect("a trigger");
        assert_eq!(sends.partitions.count, 16);
        let mut stored_steps = 0;
        for step in 1..=60 {
            plan.arm(stream).expect("armed");
            memory(windows[0].address, bytes).fill(0xEE);
            produce(context, &[sends], stream, step);
            plan.enqueue(stream).expect("executed");
            plan.wait(Duration::from_secs(60)).expect("it ends");
            let found = memory(windows[1].address, bytes);
            assert!((0..).zip(found.iter()).all(|(offset, found)| *found == byte(0, offset, step)), "step {step}");
            stored_steps += u64::from(memory(windows[0].address, bytes).iter().all(|byte| *byte == 0xEE));
        }
        let known = plan.to_json()["variants"].clone();
        plan.destroy().expect("given back");
        let executed = |variant: &serde_json::Value| variant["executions"].as_u64().expect("a number");
        let executed: Vec<u64> = known.as_array().expect("variants").iter().map(executed).collect();
        assert_eq!(stored_steps, executed.get(2).copied().unwrap_or(0), "{known}");
        executed
    });
    assert_eq!(known[0], known[1], "the ranks take the same ways");
    // A variant that is much slower is not tried early if another one is fast.
    let tried = |ways: &[u64]| ways.iter().filter(|executed| **executed > 0).count();
    match known[0][..] {
        [ref moved @ .., stored] if stores => assert!(moved.len() == 2 && tried(moved) > 0 && stored > 0, "{known:?}"),
        ref moved => assert!(moved.len() == 2 && tried(moved) == 2, "{known:?}"),
    }
    assert_eq!(known[0].iter().sum::<u64>(), 60);
}

#[test]
fn producers_in_host_memory_are_not_asked_to_store() {
    let context = context("beluga", None);
    let node = Arc::new(NodeGroup::new(&context, 0, 1, Box::new(Alone), &[]).expect("a node"));
    let windows = [DeviceId::HOST, DeviceId::gpu(0)].map(|device| {
        let address = context.allocate(device, 1 << 20).expect("memory");
        Window { address, bytes: 1 << 20 }
    });
    let variants = |dst, src| {
        let transfer = NodeTransfer { dst: end(0, dst, 0), src: end(0, src, 0), bytes: 1 << 20 };
        let partitioning = Partitioning { count: Some(16), agent: Agent::Auto { tells: false, stores: true } };
        let plan = node.plan_partitioned(&windows, &[transfer], Some(partitioning), &PlanOptions::default()).expect("a plan");
        let names = plan.describe();
        plan.destroy().expect("given back");
        names.contains("stored by the producers")
    };
    assert_eq!((variants(1, 0), variants(0, 1)), (false, true));
    windows.into_iter().for_each(|window| context.free(window.address).expect("freed"));
}

#[test]
fn tuning_that_fails_on_one_rank_fails_on_all() {
    let errors = tuned(None, 5000, |rank, context, node, windows, transfer| {
        let trials = PartitionTrials { agents: &[Agent::CopyEngine { tells: true }], rounds: 3, blocks: 0, file: None };
        let mut step = 0;
        let mut launch = |triggers: &[Trigger], stream| {
            step += 1;
            if (rank, step) == (1, 6) {
                return Err("has returned 3".into());
            }
            produce(context, triggers, stream, step);
            Ok(())
        };
        node.tune_partitions(&windows, &[transfer], &PlanOptions::default(), &trials, &mut launch).expect_err("one rank fails")
    });
    assert!(errors[1].to_string().contains("has returned 3"), "{}", errors[1]);
    assert!(!matches!(errors[0], Error::NodeArgument { .. }), "{}", errors[0]);

    let errors = tuned(None, 5000, |rank, _, node, windows, transfer| {
        // The receiver passes this transfer. The other rank has other arguments.
        let transfer = if rank == 0 { NodeTransfer { dst: end(0, 1, 0), src: end(1, 0, 0), bytes: 10 } } else { transfer };
        let trials = PartitionTrials { agents: &[Agent::Producer], rounds: 1 + rank, blocks: 0, file: None };
        let mut never = |_: &[Trigger], _| panic!("nothing is launched");
        node.tune_partitions(&windows, &[transfer], &PlanOptions::default(), &trials, &mut never).expect_err("refused").to_string()
    });
    assert!(errors[0].contains("transfer 0 is sent by rank 1"), "{errors:?}");
    assert!(errors[1].contains("rank 0: transfer 0 is sent by rank 1"), "{errors:?}");
}
