//! Tests errors of node plans if another rank has left a plan, or has enqueued plans in another order. Only streams that wait for that rank
//! may report the error, and each only once.

use crate::common::Random;
use crate::node_plans::{as_ranks, context, end};
use mpgpu_backend::{BackendError, StreamHandle};
use mpgpu_contexts::{Context, Error, PlanOptions, Transfer};
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::{NodeGroup, NodePlan, NodeTransfer, Window};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const BYTES: u64 = 64 << 10;
const GPU: DeviceId = DeviceId::gpu(0);

/// Ends this test program if a test hangs.
struct Watchdog(Arc<AtomicBool>);

impl Watchdog {
    fn new(what: &'static str) -> Watchdog {
        let ended = Arc::new(AtomicBool::new(false));
        let (seen, begin) = (ended.clone(), Instant::now());
        std::thread::spawn(move || {
            while !seen.load(Ordering::Acquire) {
                if begin.elapsed() > Duration::from_secs(180) {
                    eprintln!("{what}: hangs");
                    std::process::abort();
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Watchdog(ended)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Creates a plan in which each rank of `taking` sends to the next one in the list. Other ranks take no part.
fn ring_of(node: &Arc<NodeGroup>, taking: &[u32]) -> NodePlan {
    let allocate = || node.context().allocate(GPU, BYTES).expect("memory");
    // The windows are freed when the context is closed.
    let windows = [0, 1].map(|_| Window { address: allocate(), bytes: BYTES });
    let place = taking.iter().position(|rank| *rank == node.rank());
    let next = |place: usize| taking[(place + 1) % taking.len()];
    let mine: Vec<NodeTransfer> =
        place.map(|place| NodeTransfer { dst: end(next(place), 1, 0), src: end(node.rank(), 0, 0), bytes: BYTES }).into_iter().collect();
    node.plan(&windows, &mine, &PlanOptions::default()).expect("a plan")
}

fn peer_gone(result: Result<(), Error>) -> String {
    match result {
        Err(Error::Backend(BackendError::PeerGone(text))) => text,
        other => panic!("{other:?}"),
    }
}

/// Copies data in a stream that does not depend on other ranks, and checks the data.
fn copies(context: &Context, stream: StreamHandle) {
    let [dst, src] = [0, 1].map(|_| context.allocate(GPU, BYTES).expect("memory"));
    let plan = context.plan(&[Transfer { dst, dst_device: GPU, src, src_device: GPU, bytes: BYTES }], &PlanOptions::default());
    plan.expect("a plan").execute(stream).expect("enqueued").wait().expect("it is told of nothing");
    context.synchronize_stream(stream).expect("it is told of nothing");
}

#[test]
fn a_rank_that_leaves_one_plan_early_is_told_of_to_streams_that_wait_in_it_and_to_no_others() {
    let _watchdog = Watchdog::new("a plan left early");
    let together = Barrier::new(2);
    as_ranks(2, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node"));
        let [left, kept] = [0, 1].map(|_| ring_of(&node, &[0, 1]));
        assert!(left.describe().contains("node plan 1;") && kept.describe().contains("node plan 2;"), "{}", left.describe());
        // These counters are set by other ranks.
        assert!(
            left.describe().contains(" on host0, ") && left.describe().contains(" on gpu0 (device numbers of this rank"),
            "{}",
            left.describe()
        );
        assert!(left.to_json()["holds_bytes"]["host0"].as_u64().is_some_and(|bytes| bytes > 0), "{}", left.to_json());
        let [in_left, in_kept, before, beside] = [0; 4].map(|_| context.create_stream(GPU).expect("a stream"));
        // A stream that has completed one step of the plan is not affected by the failure of the next step.
        left.enqueue(before).expect("enqueued");
        context.synchronize_stream(before).expect("it ends");
        kept.enqueue(in_kept).expect("enqueued");
        if rank == 1 {
            left.enqueue(in_left).expect("enqueued");
        }
        together.wait();
        if rank == 0 {
            left.destroy().expect("given back");
        } else {
            let told = peer_gone(context.synchronize_stream(in_left));
            assert_eq!(
                told,
                format!(
                    "execution 2 of node plan 1 (shared by the ranks of this node) can no longer complete: rank 0 (process {}) has \
                     destroyed the plan after 1 executions",
                    std::process::id()
                )
            );
            context.synchronize_stream(in_left).expect("it was told");
            copies(&context, in_left);
        }
        for stream in [in_kept, before, beside, context.create_stream(GPU).expect("a stream"), StreamHandle(0)] {
            context.synchronize_stream(stream).expect("it waits for nobody in the plan that was left");
            copies(&context, stream);
        }
        // The other plan continues to work.
        for _ in 0..3 {
            kept.execute(in_kept).expect("enqueued").wait().expect("both ranks take part");
        }
        if rank == 1 {
            let refused = left.enqueue(in_left).expect_err("a rank has left").to_string();
            assert!(refused.contains("node plan 1"), "{refused}");
            // The event of the last step reports the error.
            peer_gone(left.destroy());
            context.synchronize_stream(in_left).expect("it was told");
        }
        kept.destroy().expect("given back");
        context.close().expect("closed");
    });
}

/// Enqueues one step of each of two plans in one stream. Returns the errors of steps that were refused.
fn enqueue_both(first: &NodePlan, second: &NodePlan, stream: StreamHandle) -> Vec<String> {
    [first, second].into_iter().filter_map(|plan| plan.enqueue(stream).err()).map(|error| error.to_string()).collect()
}

#[test]
fn two_plans_in_another_order_in_one_stream_are_found_and_nobody_waits() {
    let _watchdog = Watchdog::new("two orders");
    // The plans are enqueued in different orders: immediately, or after steps in the same order, or with one rank far ahead of the other.
    for (steps_before, ahead) in [(0, false), (0, true), (5, false), (5, true), (300, true)] {
        let enqueued = Barrier::new(2);
        let found = as_ranks(2, |rank, seat| {
            let context = context("beluga", Some(vec![rank]));
            let node = Arc::new(NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node"));
            let [a, b] = [0, 1].map(|_| ring_of(&node, &[0, 1]));
            let stream = context.create_stream(GPU).expect("a stream");
            let in_step = |count: u64| {
                for _ in 0..count {
                    assert_eq!(enqueue_both(&a, &b, stream), [""; 0]);
                }
            };
            in_step(steps_before);
            context.synchronize_stream(stream).expect("all ranks have the same order");
            enqueued.wait();
            if ahead && rank == 1 {
                enqueued.wait();
            }
            let refused = if rank == 0 { enqueue_both(&a, &b, stream) } else { enqueue_both(&b, &a, stream) };
            if ahead && rank == 0 {
                enqueued.wait();
            }
            // A rank whose steps were all accepted gets an error when it waits. A rank with a refused step continues, or gets the error of
            // the other rank.
            let waited = context.synchronize_stream(stream).err().map(|error| error.to_string());
            let step = steps_before + 1;
            for text in &refused {
                for part in
                    [format!("execution {step} of node plan"), "node plan 1".into(), "node plan 2".into(), format!("rank {}", 1 - rank)]
                {
                    assert!(text.contains(&part), "{text}");
                }
                assert!(text.contains(&format!("in stream {:#x}", stream.0)) && text.contains("in the same order on all ranks"), "{text}");
            }
            if let Some(text) = &waited {
                let plans = ["node plan 1 (shared", "node plan 2 (shared"].iter().any(|part| text.contains(part))
                    && text.contains("can no longer complete")
                    && text.contains("this node plan and node plan");
                assert!(plans && text.contains(&format!("execution {step} of node plan")) && !text.contains("ended"), "{text}");
            }
            context.synchronize_stream(stream).expect("it was told, or need not be");
            enqueued.wait();
            // The refused plan reports the error again when it is destroyed. Both plans, and the context, can be destroyed.
            drop([&a, &b].map(|plan| plan.destroy()));
            context.close().expect("closed");
            (refused.len(), waited.is_some())
        });
        let refused: usize = found.iter().map(|(refused, _)| refused).sum();
        assert!((1..=2).contains(&refused), "{steps_before} {ahead}: {found:?}");
        for (rank, (_, was_told)) in found.iter().enumerate() {
            let (by_other, _) = found[1 - rank];
            assert_eq!(*was_told, by_other > 0, "{steps_before} {ahead}: {found:?}");
        }
    }
}

#[test]
fn orders_that_keep_nobody_waiting_are_no_alarm() {
    let _watchdog = Watchdog::new("orders that go");
    const RANKS: u32 = 3;
    for seed in 0..12 {
        let mut random = Random(seed);
        // All ranks use the same list of plans. Either all steps are in one stream, or each plan has its own stream and the ranks enqueue
        // the steps in different orders.
        let list: Vec<usize> = (0..60).map(|_| random.below(3) as usize).collect();
        let in_one = seed % 2 == 0;
        as_ranks(RANKS, |rank, seat| {
            let context = context("beluga", Some(vec![rank]));
            let node = Arc::new(NodeGroup::new(&context, rank, RANKS, seat, &[]).expect("a node"));
            // Rank 2 takes no part in the last plan, and may enqueue it at any time.
            let plans = [&[0, 1, 2][..], &[0, 1, 2], &[0, 1]].map(|taking| ring_of(&node, taking));
            let streams = [0; 3].map(|_| context.create_stream(GPU).expect("a stream"));
            let mut random = Random(seed << 8 | u64::from(rank));
            let mut own = list.clone();
            if !in_one {
                (1..own.len()).for_each(|index| own.swap(index, random.below(index as u64 + 1) as usize));
            } else if rank == 2 {
                // The steps in which this rank takes no part come last.
                own.sort_by_key(|plan| *plan == 2);
            }
            for plan in own {
                let stream = if in_one { streams[0] } else { streams[plan] };
                plans[plan].enqueue(stream).unwrap_or_else(|error| panic!("seed {seed}, rank {rank}: {error}"));
                if random.chance(20) {
                    std::thread::sleep(Duration::from_micros(random.below(300)));
                }
            }
            for stream in streams {
                context.synchronize_stream(stream).expect("all steps end");
            }
            for plan in &plans {
                plan.destroy().expect("given back");
            }
        });
    }
}

#[test]
fn what_is_made_with_a_node_goes_on_without_it_and_memory_may_go_after_its_last_step() {
    let _watchdog = Watchdog::new("endings");
    as_ranks(2, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node"));
        let windows = [0, 1].map(|_| Window { address: context.allocate(GPU, BYTES).expect("memory"), bytes: BYTES });
        let mine = [NodeTransfer { dst: end(1 - rank, 1, 0), src: end(rank, 0, 0), bytes: BYTES }];
        let plan = node.plan(&windows, &mine, &PlanOptions::default()).expect("a plan");
        drop(node);
        for _ in 0..3 {
            plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("both ranks take part");
        }
        if rank == 0 {
            plan.destroy().expect("given back");
        }
        // Both ranks have enqueued the same number of steps, and the steps of this rank have finished.
        windows.iter().for_each(|window| context.free(window.address).expect("freed"));
        if rank == 1 {
            let refused = plan.enqueue(StreamHandle(0)).expect_err("its memory has gone").to_string();
            assert!(refused.contains("destroy") && !refused.contains("export again"), "{refused}");
            plan.destroy().expect("given back");
        }
        context.close().expect("closed");
        // A plan that another rank has left can no longer be enqueued, and is destroyed with its context.
        assert!(plan.enqueue(StreamHandle(0)).is_err());
    });
}

#[test]
fn a_rank_that_fails_because_of_another_names_the_first() {
    let _watchdog = Watchdog::new("a chain");
    let together = Barrier::new(3);
    as_ranks(3, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 3, seat, &[]).expect("a node"));
        // Rank 2 communicates only with rank 1, and rank 1 also communicates with rank 0.
        let window = Window { address: context.allocate(GPU, 2 * BYTES).expect("memory"), bytes: 2 * BYTES };
        let to = |other: u32| NodeTransfer { dst: end(other, 0, BYTES), src: end(rank, 0, 0), bytes: BYTES };
        let mine: Vec<NodeTransfer> = if rank < 2 { vec![to(rank + 1)] } else { Vec::new() };
        let plan = node.plan(&[window], &mine, &PlanOptions::default()).expect("a plan");
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("all ranks take part");
        if rank > 0 {
            // In the first of these steps, the send of rank 1 does not depend on rank 0.
            (0..2).for_each(|_| plan.enqueue(StreamHandle(0)).expect("enqueued"));
        }
        together.wait();
        if rank == 0 {
            plan.destroy().expect("given back");
        } else {
            let told = peer_gone(context.synchronize_stream(StreamHandle(0)));
            let first = format!("rank 0 (process {}) has destroyed the plan after 1 executions", std::process::id());
            assert!(told.contains(&first), "rank {rank}: {told}");
            assert_eq!(told.contains("; rank 1 has left the plan because of that"), rank == 2, "{told}");
            let refused = plan.enqueue(StreamHandle(0)).expect_err("the plan has failed").to_string();
            assert!(refused.contains(&first), "rank {rank}: {refused}");
        }
        together.wait();
        drop(plan.destroy());
        context.close().expect("closed");
    });
}
