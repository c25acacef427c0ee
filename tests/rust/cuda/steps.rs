//! Tests where the flags of node plans are located. Two ranks share one context, and each has a GPU and a thread. Uses the driver double
//! (simulated CUDA driver).

use super::double::{self, node};
use super::driver::Driver;
use super::prepared;
use super::refusals::{assert_arrived, write};
use crate::backend::{SignalWait, StreamHandle};
use crate::bridge::Segment;
use crate::topology::DeviceId;
use mpgpu_contexts::{Config, Context, PlanOptions};
use mpgpu_ranks::{Agent, Alone, NodeEnd, NodeGroup, NodePlan, NodeTransfer, Partitioning, Window, meet_at};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Memory in which a flag is located.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum At {
    Gpu(i32),
    Host,
}

/// Action of a kernel of a communication step.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
enum Does {
    Raise(At),
    /// Wait for a flag that is set by this number of blocks.
    Take(At, u32),
    Copy(u64),
    /// Barrier between the actions before and after it.
    Order,
}

fn does(Segment { dst, src, bytes }: Segment) -> Does {
    let at = |address| node(|node| node.gpu_at(address)).map_or(At::Host, At::Gpu);
    match (dst, bytes) {
        (_, 1..) => Does::Copy(bytes),
        (0, 0) if src == 0 => Does::Order,
        (0, 0) => Does::Raise(at(src)),
        _ => Does::Take(at(dst), src as u32),
    }
}

/// Two ranks that put data into each other's memory, with the send and receive memory and the plan of each rank.
struct Pair {
    context: Arc<Context>,
    memory: [[u64; 2]; 2],
    plans: [NodePlan; 2],
}

impl Pair {
    fn new(driver: &'static Driver, bytes: [u64; 2], change: impl FnOnce(Config) -> Config) -> Pair {
        static PAIRS: AtomicU32 = AtomicU32::new(0);
        let context = Arc::new(prepared::context_with(driver, change));
        let name = format!("mpgpu-pair-{}-{}", std::process::id(), PAIRS.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        let memory = [0, 1].map(|rank: usize| {
            [bytes[rank], bytes[1 - rank]].map(|bytes| context.allocate_shared(DeviceId::gpu(rank as u32), bytes).expect("memory"))
        });
        let shared = double::share();
        let rank_of = |rank: u32| {
            double::join(Arc::clone(&shared));
            let gather = meet_at(&path, rank, 2).expect("the other comes");
            let group = Arc::new(NodeGroup::new(&context, rank, 2, gather, &[DeviceId::gpu(rank)]).expect("a node"));
            let [own, of_other] = [bytes[rank as usize], bytes[1 - rank as usize]];
            let [src, dst] = memory[rank as usize];
            let windows = [Window { address: src, bytes: own }, Window { address: dst, bytes: of_other }];
            let end = |rank, window| NodeEnd { rank, window, offset: 0 };
            let transfer = NodeTransfer { dst: end(1 - rank, 1), src: end(rank, 0), bytes: own };
            group.plan(&windows, &[transfer], &PlanOptions::default()).expect("a plan")
        };
        let rank_of = &rank_of;
        let plans = std::thread::scope(|scope| {
            let [one, other] = [0, 1].map(|rank| scope.spawn(move || rank_of(rank)));
            [one, other].map(|thread| thread.join().expect("no panic"))
        });
        Pair { context, memory, plans }
    }

    /// Executes one communication step of both ranks, in streams on the GPUs `gpus`. Returns for each rank the actions of its kernel and
    /// the number of blocks.
    fn step(&self, gpus: [u32; 2]) -> Vec<(Vec<Does>, u32)> {
        node(|node| node.actions.clear());
        for (plan, gpu) in self.plans.iter().zip(gpus) {
            let stream = self.context.create_stream(DeviceId::gpu(gpu)).expect("a stream");
            plan.enqueue(stream).expect("enqueued");
        }
        let launches = node(|node| node.actions.clone());
        launches.into_iter().map(|(actions, blocks)| (actions.into_iter().map(does).collect(), blocks)).collect()
    }
}

/// Returns the expected actions of a rank that exchanges puts with another rank, by kernels of `blocks` blocks. Each rank waits until both
/// are ready.
fn asks(own: i32, bytes: u64, blocks: u32) -> Vec<Does> {
    let (own, other) = (At::Gpu(own), At::Gpu(1 - own));
    vec![Does::Raise(other), Does::Take(own, blocks), Does::Copy(bytes), Does::Raise(other), Does::Take(own, blocks)]
}

/// Returns the expected actions of a rank that exchanges puts through inboxes, in either of two alternating communication steps.
fn puts(own: i32, sent: u64, received: u64, blocks: u32) -> Vec<Does> {
    [Does::Copy(sent), Does::Raise(At::Gpu(1 - own)), Does::Take(At::Gpu(own), blocks), Does::Copy(received)].repeat(2)
}

#[test]
fn flags_between_kernels_lie_on_the_gpu_that_takes_them_whichever_gpu_the_callers_stream_is_of() {
    const MOST: u64 = 1 << 20;
    for (driver, most) in [(double::whole_with_chunks(), MOST), (double::whole(), MOST), (double::whole_with_chunks(), MOST / 4)] {
        double::start(2, true);
        node(|node| node.shares = true);
        let pair = Pair::new(driver, [most, 64 << 10], |config| config);
        for gpus in [[0, 1], [1, 0]] {
            for [src, dst] in pair.memory {
                write(src, 64 << 10, src as usize % 1000);
                write(dst, 64 << 10, 3);
            }
            // The double does not wait for flags, so inboxes are emptied before they are filled.
            pair.step(gpus);
            let steps = pair.step(gpus);
            let blocks = [steps[1].1, steps[0].1];
            let expected = if most == MOST {
                [asks(0, most, blocks[0]), asks(1, 64 << 10, blocks[1])]
            } else {
                [puts(0, most, 64 << 10, blocks[0]), puts(1, 64 << 10, most, blocks[1])]
            };
            assert_eq!(steps.iter().map(|(does, _)| does.clone()).collect::<Vec<_>>(), expected);
            assert!(steps.iter().all(|(_, blocks)| *blocks > 1), "{steps:?}");
            for rank in [0, 1] {
                let [[src, _], [_, dst]] = [pair.memory[rank], pair.memory[1 - rank]];
                assert_arrived(dst, 64 << 10, src as usize % 1000);
            }
        }
        assert_eq!(double::calls("cuStreamBatchMemOp"), 0, "streams wait for nothing");
    }
}

#[test]
fn a_captured_step_is_the_launch_of_any_step() {
    double::start(2, true);
    let pair = Pair::new(double::whole_with_chunks(), [4096; 2], |config| config);
    let first = (pair.step([0, 1]), node(|node| node.actions.clone()));
    node(|node| node.capturing = true);
    let captured = (pair.step([0, 1]), node(|node| node.actions.clone()));
    node(|node| node.capturing = false);
    assert_eq!(first, captured, "a graph is launched again and again");
    assert_eq!(first.0, [(puts(0, 4096, 4096, 1), 1), (puts(1, 4096, 4096, 1), 1)]);
}

#[test]
fn streams_do_all_parts_where_a_rank_moves_much_or_is_not_reached_or_kernels_do_not_wait() {
    double::start(2, true);
    assert_eq!(Pair::new(double::whole_with_chunks(), [32 << 20, 4096], |config| config).step([0, 1]), []);
    double::start(2, true);
    let operation = |config| Config { signal_wait: Some(SignalWait::Operation), ..config };
    assert_eq!(Pair::new(double::whole_with_chunks(), [4096; 2], operation).step([0, 1]), []);
    double::start(2, false);
    node(|node| node.shares = true);
    for driver in [double::whole(), double::whole_with_chunks()] {
        assert_eq!(Pair::new(driver, [4096; 2], |config| config).step([0, 1]), []);
    }
}

#[test]
fn the_environment_bounds_the_blocks_of_a_step() {
    double::start(2, true);
    let pair = Pair::new(double::whole_with_chunks(), [4 << 20; 2], |config| Config { node_blocks: Some(2), ..config });
    assert_eq!(pair.step([0, 1]).into_iter().map(|(_, blocks)| blocks).collect::<Vec<_>>(), [2, 2]);
}

/// Creates a rank with a plan that sends from one GPU to another in partitions, and whose executions choose among variants. Returns the
/// context, the plan and two allocations.
fn in_partitions(peers: bool) -> (Arc<Context>, NodePlan, [u64; 2]) {
    double::start(2, peers);
    let context = Arc::new(prepared::context_with(double::whole(), |config| config));
    let group = Arc::new(NodeGroup::new(&context, 0, 1, Box::new(Alone), &[]).expect("a node"));
    let memory = [0, 1].map(|gpu| context.allocate_shared(DeviceId::gpu(gpu), 1 << 20).expect("memory"));
    let windows = memory.map(|address| Window { address, bytes: 1 << 20 });
    let end = |window| NodeEnd { rank: 0, window, offset: 0 };
    let transfer = NodeTransfer { dst: end(1), src: end(0), bytes: 1 << 20 };
    let partitioning = Partitioning { count: Some(16), agent: Agent::Auto { tells: false, stores: true } };
    let plan = group.plan_partitioned(&windows, &[transfer], Some(partitioning), &PlanOptions::default()).expect("a plan");
    (context, plan, memory)
}

fn word(address: u64) -> u64 {
    // SAFETY: the word belongs to a plan that is not destroyed meanwhile. Memory of the double's GPUs belongs to the process, and nothing
    // writes it at this time.
    unsafe { std::ptr::with_exposed_provenance::<u64>(address as usize).read() }
}

#[test]
fn producers_store_in_steps_only_where_their_gpu_reaches_the_destination() {
    let names = |peers| {
        let (_context, plan, _) = in_partitions(peers);
        let text = plan.describe();
        plan.destroy().expect("given back");
        (text.contains("all partitions after their producers"), text.contains("stored by the producers"))
    };
    assert_eq!([names(true), names(false)], [(true, true), (true, false)]);
}

/// Executes one communication step. Returns the address to which producers write, whether they count bytes, and the number of copies made
/// before. The double does not wait.
fn step_in(plan: &NodePlan, stream: StreamHandle) -> ([u64; 2], u32) {
    let before = double::calls("cuMemcpyAsync");
    plan.arm(stream).expect("armed");
    let copies = double::calls("cuMemcpyAsync") - before;
    let step = plan.trigger(0, 0).expect("a trigger").step;
    let told = [step, step + 8].map(word);
    plan.enqueue(stream).expect("executed");
    (told, copies)
}

#[test]
fn triggers_are_told_where_producers_write_and_whether_they_count_when_that_changes() {
    let (context, plan, [source, destination]) = in_partitions(true);
    let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
    // The three variants are: copy partitions as soon as they are ready, copy all after the producers, and let the producers store the
    // data.
    let known = [[source, 1], [source, 0], [destination, 0]];
    let (mut seen, mut last) = ([0; 3], known[0]);
    for _ in 0..100 {
        let (told, copies) = step_in(&plan, stream);
        let way = known.iter().position(|known| *known == told);
        seen[way.unwrap_or_else(|| panic!("{told:x?}"))] += 1;
        // Flags are reset by a copy if copy engines poll them.
        assert_eq!(copies, told[1] as u32 + u32::from(told != last));
        last = told;
    }
    assert!(seen.iter().all(|count| *count > 0), "{seen:?}");
    plan.destroy().expect("given back");
}

#[test]
fn a_graph_tells_triggers_where_producers_write_at_each_launch_unless_they_know() {
    let mut captures = [0, 0];
    for tries in 0..4 {
        let (context, plan, [source, destination]) = in_partitions(true);
        let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
        let step = || step_in(&plan, stream).0;
        let mut before = step();
        for _ in 0..tries {
            before = (0..1000).map(|_| step()).find(|told| *told == [destination, 0]).expect("a try");
        }
        node(|node| node.capturing = true);
        let captured = [step_in(&plan, stream), step_in(&plan, stream)];
        node(|node| node.capturing = false);
        // The graph has not been launched yet.
        let (after, told) = step_in(&plan, stream);
        let [reset, is_told] = [after == [source, 1], after != before].map(u32::from);
        assert_eq!((captured, told), ([(before, reset + is_told); 2], reset + is_told));
        assert!((0..10).all(|_| step_in(&plan, stream) == (after, reset)), "all further steps are of the captured variant");
        captures[is_told as usize] += 1;
        plan.destroy().expect("given back");
    }
    assert!(captures.iter().all(|count| *count > 0), "{captures:?}");
}
