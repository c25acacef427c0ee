//! Tests node plans (plans of all ranks of a node) on the host backend. In these tests ranks are threads with separate contexts; in other
//! tests they are processes. The ranks exchange their initial data through memory or through a socket.

use crate::common::{Random, config};
use mpgpu_backend::StreamHandle;
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions, Error, PlanOptions};
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::{Allgather, NodeEnd, NodeGroup, NodePlan, NodeTransfer, Window};
use proptest::prelude::*;
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::Duration;

/// Data of each rank in one allgather, and the number of ranks that have read the data.
type Round = (Vec<Option<Vec<u8>>>, usize);

/// Allgather function for ranks that are threads.
struct Meeting {
    ranks: usize,
    state: Mutex<Round>,
    changed: Condvar,
}

impl Meeting {
    fn new(ranks: usize) -> Arc<Meeting> {
        Arc::new(Meeting { ranks, state: Mutex::new((vec![None; ranks], 0)), changed: Condvar::new() })
    }
}

struct Seat(Arc<Meeting>, usize);

impl Allgather for Seat {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        let Seat(meeting, rank) = self;
        // If a rank does not call within a time limit, an error is returned, so that a failing test ends.
        let wait = |state, goes_on: &dyn Fn(&Round) -> bool| {
            let (state, waited) =
                meeting.changed.wait_timeout_while(state, Duration::from_secs(60), |state| goes_on(state)).expect("no panic");
            if waited.timed_out() { Err("a rank has not come".to_owned()) } else { Ok(state) }
        };
        let mut state = meeting.state.lock().expect("no panic");
        // First wait until all ranks have read the data of the previous allgather.
        state = wait(state, &|state| state.0[*rank].is_some())?;
        state.0[*rank] = Some(send.to_vec());
        meeting.changed.notify_all();
        state = wait(state, &|state| state.0.iter().any(Option::is_none))?;
        let all: Vec<u8> = state.0.iter().flatten().flatten().copied().collect();
        assert_eq!(all.len(), receive.len(), "all send as much");
        receive.copy_from_slice(&all);
        state.1 += 1;
        if state.1 == meeting.ranks {
            *state = (vec![None; meeting.ranks], 0);
            meeting.changed.notify_all();
        } else {
            drop(wait(state, &|state| state.1 != 0)?);
        }
        Ok(())
    }
}

pub(crate) fn context(topology: &str, visible: Option<Vec<u32>>) -> Arc<Context> {
    let options = ContextOptions { backend: Some(BackendChoice::Host), topology: Some(topology.into()), ..ContextOptions::default() };
    Arc::new(Context::open(&options, Config { visible, ..Config::default() }).expect("a context"))
}

/// Runs `work` on each of `ranks` ranks, each in a separate thread. Returns the results.
pub(crate) fn as_ranks<T: Send>(ranks: u32, work: impl Fn(u32, Box<dyn Allgather>) -> T + Sync) -> Vec<T> {
    let meeting = Meeting::new(ranks as usize);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let (seat, work) = (Box::new(Seat(meeting.clone(), rank as usize)), &work);
                scope.spawn(move || work(rank, seat))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

pub(crate) fn end(rank: u32, window: u32, offset: u64) -> NodeEnd {
    NodeEnd { rank, window, offset }
}

/// Returns the transfers that one rank passes for a batch. For each of them, also returns its index in the batch, and true if it is a
/// receive descriptor. For a transfer with a tag, the sender passes a send descriptor and the receiver a receive descriptor.
pub(crate) fn handed_in(transfers: &[NodeTransfer], tags: &[Option<u64>], rank: u32) -> (Vec<NodeTransfer>, Vec<(usize, bool)>) {
    let (mut mine, mut which) = (Vec::new(), Vec::new());
    for (index, (transfer, tag)) in transfers.iter().zip(tags).enumerate() {
        let by_tag = |at: NodeEnd| tag.map_or(at, |tag| end(at.rank, NodeEnd::BY_TAG, tag));
        if transfer.src.rank == rank {
            mine.push(NodeTransfer { dst: by_tag(transfer.dst), ..*transfer });
            which.push((index, false));
        }
        if transfer.dst.rank == rank && tag.is_some() {
            mine.push(NodeTransfer { src: by_tag(transfer.src), ..*transfer });
            which.push((index, true));
        }
    }
    (mine, which)
}

/// Returns the value of the byte at `offset` of transfer number `index` in a communication step.
fn byte(index: usize, offset: u64, step: u64) -> u8 {
    (offset.wrapping_mul(31) ^ (offset >> 9) ^ (index as u64).wrapping_mul(101) ^ step.wrapping_mul(59)) as u8
}

/// Returns a slice for memory of the host backend.
#[allow(clippy::mut_from_ref)]
pub(crate) fn memory(address: u64, bytes: u64) -> &'static mut [u8] {
    // SAFETY: memory of the test that no copy uses meanwhile, because the tests synchronise first.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address as usize), bytes as usize) }
}

/// Batch of transfers of all ranks. Each rank has two windows on one device: window 0 is its send buffer, and window 1 is its receive
/// buffer.
struct Case {
    topology: &'static str,
    ranks: u32,
    /// Device of each rank's windows, as numbered in the topology. (`sizes` holds the sizes of both windows in bytes.)
    devices: Vec<DeviceId>,
    sizes: Vec<[u64; 2]>,
    transfers: Vec<NodeTransfer>,
    /// Tag of each transfer that is passed as a send and a receive descriptor; `None` for others.
    tags: Vec<Option<u64>>,
    one_in_sight: bool,
}

impl Case {
    fn random(random: &mut Random) -> Case {
        let (topology, gpus) = [("beluga", 4), ("hgx-h200", 8), ("dgx1-v100", 8), ("gh200-4", 4)][random.below(4) as usize];
        let ranks = 1 + random.below(gpus.min(5)) as u32;
        let one_in_sight = random.chance(50);
        let devices: Vec<DeviceId> = (0..ranks).map(|rank| if random.chance(15) { DeviceId::HOST } else { DeviceId::gpu(rank) }).collect();
        let mut sizes = vec![[0, 0]; ranks as usize];
        let (mut transfers, mut tags) = (Vec::new(), Vec::new());
        for _ in 0..random.below(10) {
            let (src, dst) = (random.below(u64::from(ranks)) as u32, random.below(u64::from(ranks)) as u32);
            if random.chance(15) {
                // All destinations have the same source, and forward the data.
                let bytes = (1 << 20) + random.below(1 << 20);
                let from = sizes[src as usize][0];
                for dst in 0..ranks {
                    transfers.push(NodeTransfer { dst: end(dst, 1, sizes[dst as usize][1]), src: end(src, 0, from), bytes });
                    tags.push(None);
                    sizes[dst as usize][1] += bytes + random.below(3);
                }
                sizes[src as usize][0] += bytes;
                continue;
            }
            let bytes = match random.below(4) {
                0 => random.below(3),
                1 => random.below(9000),
                2 => random.below(300_000),
                _ => random.below(1 << 20),
            };
            let [from, to] = [sizes[src as usize][0], sizes[dst as usize][1]];
            transfers.push(NodeTransfer { dst: end(dst, 1, to), src: end(src, 0, from), bytes });
            // Transfers with equal tags match in the order in which they are passed.
            tags.push(random.chance(50).then(|| random.below(2)));
            sizes[src as usize][0] += bytes + random.below(3);
            sizes[dst as usize][1] += bytes + random.below(3);
        }
        Case { topology, ranks, devices, sizes, transfers, tags, one_in_sight }
    }

    /// Returns the index of the first transfer that has the same source as transfer `index`.
    fn first_of(&self, index: usize) -> usize {
        self.transfers.iter().position(|transfer| transfer.src == self.transfers[index].src).unwrap_or(index)
    }

    /// Executes `steps` communication steps on all ranks, and checks every byte after each step. Returns each rank's description of its
    /// plan.
    fn run(&self, steps: u64, options: &PlanOptions, delays: u64) -> Vec<String> {
        as_ranks(self.ranks, |rank, seat| {
            let mut random = Random(delays ^ u64::from(rank) << 32);
            let visible = self.one_in_sight.then(|| vec![rank]);
            let context = context(self.topology, visible);
            let own = if self.one_in_sight { DeviceId::gpu(0) } else { DeviceId::gpu(rank) };
            let node = Arc::new(NodeGroup::new(&context, rank, self.ranks, seat, &[own]).expect("a node"));
            let device = self.devices[rank as usize];
            let device = if device.is_host() { device } else { own };
            let sizes = self.sizes[rank as usize];
            let [sent, received] = sizes.map(|bytes| context.allocate_shared(device, bytes.max(1)).expect("memory"));
            let windows = [Window { address: sent, bytes: sizes[0] }, Window { address: received, bytes: sizes[1] }];
            let plan = node.plan(&windows, &handed_in(&self.transfers, &self.tags, rank).0, options).expect("a plan");
            let stream = context.create_stream(own).expect("a stream");
            for step in 0..steps {
                for (index, t) in self.transfers.iter().enumerate().filter(|(_, t)| t.src.rank == rank) {
                    let (bytes, first) = (memory(sent + t.src.offset, t.bytes), self.first_of(index));
                    (0..).zip(bytes).for_each(|(offset, target)| *target = byte(first, offset, step));
                }
                if random.chance(30) {
                    std::thread::sleep(std::time::Duration::from_micros(random.below(300)));
                }
                plan.enqueue(stream).expect("it is enqueued");
                context.synchronize_stream(stream).expect("it ends");
                for (index, t) in self.transfers.iter().enumerate().filter(|(_, t)| t.dst.rank == rank) {
                    let bytes = memory(received + t.dst.offset, t.bytes);
                    let first = self.first_of(index);
                    let wrong = (0..).zip(bytes.iter()).find(|(offset, found)| **found != byte(first, *offset, step));
                    assert_eq!(wrong, None, "rank {rank}, step {step}, transfer {index} {t:?}");
                    bytes.fill(0xEE);
                }
            }
            let text = plan.describe();
            // All ranks destroy their plans at the same time. A rank that does so alone would wait several seconds for ranks that stage
            // data in its memory.
            node.plan(&[], &[], options).expect("a plan").destroy().expect("it is given back");
            plan.destroy().expect("it is given back");
            assert!(steps == 0 || context.statistics().executions == steps);
            context.free(sent).expect("freed");
            context.free(received).expect("freed");
            let left: u64 =
                [own, DeviceId::HOST].map(|device| context.device_statistics(device).expect("a device").allocated_bytes).iter().sum();
            assert_eq!(left, 0, "nothing of the plan is left");
            text
        })
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn every_byte_of_random_steps_of_all_ranks_arrives(seed in any::<u64>()) {
        let mut random = Random(seed);
        let case = Case::random(&mut random);
        let options = PlanOptions { min_bytes: Some(0), ..PlanOptions::default() };
        let options = if random.chance(50) { PlanOptions { chunk_bytes: Some(4096 << random.below(5)), ..options } } else { options };
        case.run(5, &options, random.next());
    }
}

#[test]
fn ranks_pass_on_what_all_want_and_bytes_pass_several_of_them() {
    // The batches: from one rank to all, from all to all, from the host memory of one rank, and between two ranks without NVLink.
    let to_all = |sources: &[u32], ranks: u32, bytes: u64| {
        let others = |src: u32| (0..ranks).filter(move |dst| *dst != src);
        let of = |src: &u32| {
            let place = if sources.len() > 1 { u64::from(*src) * bytes } else { 0 };
            others(*src).map(|dst| NodeTransfer { dst: end(dst, 1, place), src: end(*src, 0, 0), bytes }).collect::<Vec<_>>()
        };
        sources.iter().flat_map(of).collect::<Vec<_>>()
    };
    for (topology, ranks, sources, on_host, bytes) in [
        ("beluga", 4, vec![1], false, (12 << 20) + 12),
        ("beluga", 4, vec![2], true, (12 << 20) + 12),
        ("dgx1-v100", 8, vec![0], false, (12 << 20) + 12),
        ("dgx1-v100", 8, vec![0, 5], false, (16 << 20) + 12),
    ] {
        let transfers = to_all(&sources, ranks, bytes);
        let size = [bytes, if sources.len() > 1 { u64::from(ranks) * bytes } else { bytes }];
        let devices = (0..ranks).map(|rank| if on_host && rank == sources[0] { DeviceId::HOST } else { DeviceId::gpu(rank) }).collect();
        let tags = vec![None; transfers.len()];
        let case = Case { topology, ranks, devices, sizes: vec![size; ranks as usize], transfers, tags, one_in_sight: true };
        assert!(case.run(3, &PlanOptions::default(), 1).iter().all(|text| text.contains("forwarded in")), "{topology} from {sources:?}");
    }
    let bytes = (32 << 20) + 12;
    let transfers = vec![NodeTransfer { dst: end(7, 1, 0), src: end(0, 0, 0), bytes }];
    let devices = (0..8).map(DeviceId::gpu).collect();
    let case =
        Case { topology: "dgx1-v100", ranks: 8, devices, sizes: vec![[bytes, bytes]; 8], transfers, tags: vec![None], one_in_sight: true };
    assert!(case.run(4, &PlanOptions::default(), 2).iter().all(|text| text.contains("via gpu1, gpu5")));
}

/// Returns a broadcast from rank 0 to three other ranks, which forward the data. The transfers are as small as possible for forwarding to
/// be worthwhile.
fn small_trees() -> (Case, PlanOptions) {
    let bytes = (4 << 20) + 12;
    let transfers = (1..4).map(|dst| NodeTransfer { dst: end(dst, 1, 0), src: end(0, 0, 0), bytes }).collect();
    let devices = (0..4).map(DeviceId::gpu).collect();
    let case =
        Case { topology: "beluga", ranks: 4, devices, sizes: vec![[bytes; 2]; 4], transfers, tags: vec![None; 3], one_in_sight: true };
    (case, PlanOptions { min_bytes: Some(0), ..PlanOptions::default() })
}

/// Runs 100,000 communication steps if `LONG_TESTS=1` is set, which takes half an hour on two CPUs.
#[test]
fn every_byte_of_many_steps_of_trees_arrives() {
    let (case, options) = small_trees();
    let steps = if std::env::var_os("LONG_TESTS").is_some() { 100_000 } else { 60 };
    assert!(case.run(steps, &options, 3).iter().all(|text| text.contains("forwarded in")));
}

#[test]
fn a_rank_that_leaves_trees_early_lets_nobody_wait() {
    const EARLY: u64 = 3;
    let (case, options) = small_trees();
    for leaves in 0..case.ranks {
        let told = as_ranks(case.ranks, |rank, seat| {
            let context = context(case.topology, Some(vec![rank]));
            let node = Arc::new(NodeGroup::new(&context, rank, case.ranks, seat, &[]).expect("a node"));
            let bytes = case.sizes[0][0];
            // The windows are freed when the context is closed.
            let windows = [0, 1].map(|_| Window { address: context.allocate(DeviceId::gpu(0), bytes).expect("memory"), bytes });
            let plan = node.plan(&windows, &handed_in(&case.transfers, &case.tags, rank).0, &options).expect("a plan");
            let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
            let mut told = None;
            for step in 0..if rank == leaves { EARLY } else { EARLY + 5 } {
                if rank == 0 && step == 0 {
                    (0..).zip(memory(windows[0].address, bytes)).for_each(|(offset, target)| *target = byte(0, offset, 0));
                }
                told = told.or(plan.enqueue(stream).err());
            }
            told = told.or(context.synchronize_stream(stream).err());
            if rank > 0 {
                let wrong = (0..).zip(memory(windows[1].address, bytes).iter()).find(|(offset, found)| **found != byte(0, *offset, 0));
                assert_eq!(wrong, None, "rank {rank} has done {EARLY} whole steps");
            }
            assert!(told.iter().all(is_peer_gone), "rank {rank}, {leaves} leaves: {told:?}");
            let ended = plan.destroy();
            assert!(rank != leaves || told.is_some() || ended.is_ok(), "rank {rank}: {ended:?}");
            told.is_some()
        });
        assert!(told.iter().any(|told| *told), "rank {leaves} has left, and nobody was told");
    }
}

/// Returns a ring, in which each rank sends to the next. The transfers are large enough for several paths. If `one_in_sight` is true, each
/// rank sees only one GPU.
fn ring(topology: &'static str, ranks: u32, bytes: u64, one_in_sight: bool) -> Case {
    let transfers: Vec<_> =
        (0..ranks).map(|rank| NodeTransfer { dst: end((rank + 1) % ranks, 1, 0), src: end(rank, 0, 0), bytes }).collect();
    let tags = vec![None; transfers.len()];
    let devices = (0..ranks).map(DeviceId::gpu).collect();
    Case { topology, ranks, devices, sizes: vec![[bytes, bytes]; ranks as usize], transfers, tags, one_in_sight }
}

#[test]
fn a_ring_of_ranks_that_see_one_gpu_each_gains_by_several_paths_what_one_process_gains() {
    for (topology, gpus, bytes) in
        [("beluga", 4, 16 << 20), ("beluga", 4, 128 << 20), ("gh200-4", 4, 16 << 20), ("gh200-4", 4, 128 << 20), ("dgx1-v100", 8, 16 << 20)]
    {
        let paths = as_ranks(gpus, |rank, seat| {
            let context = context(topology, Some(vec![rank]));
            let node = Arc::new(NodeGroup::new(&context, rank, gpus, seat, &[]).expect("a node"));
            assert_eq!((node.machine().gpu_count(), context.machine().gpu_count()), (gpus, 1));
            let [sent, received] = [0, 1].map(|_| context.allocate(DeviceId::gpu(0), bytes).expect("memory"));
            let windows = [sent, received].map(|address| Window { address, bytes });
            let transfer = NodeTransfer { dst: end((rank + 1) % gpus, 1, 0), src: end(rank, 0, 0), bytes };
            let plan = node.plan(&windows, &[transfer], &PlanOptions::default()).expect("a plan");
            let text = plan.describe();
            assert!(text.contains(&format!("ranks: {gpus}")) && text.contains("rank 3 (gpu3)"), "{text}");
            plan.destroy().expect("given back");
            [sent, received].into_iter().for_each(|address| context.free(address).expect("freed"));
            (plan.paths(), plan.planned().predicted)
        });
        // The same batch is planned in one process for comparison.
        let one = context(topology, None);
        let memory = |gpu| [0, 1].map(|_| one.allocate(DeviceId::gpu(gpu), bytes).expect("memory"));
        let buffers: Vec<[u64; 2]> = (0..gpus).map(memory).collect();
        let transfers: Vec<_> = (0..gpus)
            .map(|gpu| mpgpu_contexts::Transfer {
                dst: buffers[(gpu as usize + 1) % buffers.len()][1],
                dst_device: DeviceId::gpu((gpu + 1) % gpus),
                src: buffers[gpu as usize][0],
                src_device: DeviceId::gpu(gpu),
                bytes,
            })
            .collect();
        let alike = one.plan(&transfers, &PlanOptions::default()).expect("a plan");
        assert!(alike.paths() > gpus as usize, "{topology}: it takes more than one path each");
        // Ranks wait for each other before and after a communication step, and flags order the chunks, which takes slightly longer than
        // events.
        let apart = 2.0 * one.machine().costs().hand_over;
        for (of_rank, predicted) in paths {
            assert!(of_rank > gpus as usize, "{topology}, {bytes} bytes: {of_rank} paths");
            let longer = (predicted - apart) / alike.planned().predicted;
            assert!((0.98..1.10).contains(&longer), "{topology}, {bytes} bytes: {longer}");
        }
        drop(alike);
        buffers.into_iter().flatten().for_each(|address| one.free(address).expect("freed"));
    }
}

#[test]
fn steps_follow_each_other_without_a_rank_waiting_for_another_to_say_so() {
    // The size is chosen so that the plan has several variants with several paths.
    const BYTES: u64 = 16 << 20;
    // Some receivers enqueue their steps late, and some ranks enqueue steps far ahead. The library must provide flow control.
    for (one_in_sight, chunk) in [(true, 1 << 18), (false, 1 << 20)] {
        let case = ring("beluga", 3, BYTES, one_in_sight);
        let options = PlanOptions { chunk_bytes: Some(chunk), ..PlanOptions::default() };
        let of_ranks = as_ranks(3, |rank, seat| {
            let context = context("beluga", one_in_sight.then(|| vec![rank]));
            let own = if one_in_sight { DeviceId::gpu(0) } else { DeviceId::gpu(rank) };
            let node = Arc::new(NodeGroup::new(&context, rank, 3, seat, &[own]).expect("a node"));
            let [sent, received] = [0, 1].map(|_| context.allocate(own, BYTES).expect("memory"));
            let windows = [sent, received].map(|address| Window { address, bytes: BYTES });
            let plan = node.plan(&windows, &case.transfers[rank as usize..=rank as usize], &options).expect("a plan");
            let streams: Vec<StreamHandle> = (0..2).map(|_| context.create_stream(own).expect("a stream")).collect();
            let event = context.create_event().expect("an event");
            const STEPS: u64 = 24;
            for step in 0..STEPS {
                // Steps alternate between two streams. A step still follows the previous one, but the caller must order its own accesses to
                // the windows.
                let stream = streams[step as usize % 2];
                context.stream_wait_event(stream, event).expect("waits");
                let fill = move || memory(sent, BYTES).fill((step * 4 + u64::from(rank)) as u8);
                context.launch_host(stream, Box::new(fill)).expect("enqueued");
                plan.enqueue(stream).expect("enqueued");
                let look = move || {
                    let expected = (step * 4 + u64::from((rank + 2) % 3)) as u8;
                    let wrong = memory(received, BYTES).iter().position(|found| *found != expected);
                    assert_eq!(wrong, None, "rank {rank}, step {step}");
                    if rank == 1 && step % 7 == 0 {
                        std::thread::sleep(std::time::Duration::from_millis(2));
                    }
                };
                let seen = Arc::new(Mutex::new(None));
                let note = seen.clone();
                let caught = move || *note.lock().expect("no panic") = Some(std::panic::catch_unwind(look).is_ok());
                context.launch_host(stream, Box::new(caught)).expect("enqueued");
                context.record_event(event, stream).expect("recorded");
                if step == STEPS - 1 || step % 16 == 5 {
                    context.synchronize_stream(stream).expect("it ends");
                    assert_eq!(*seen.lock().expect("no panic"), Some(true), "rank {rank}, step {step}");
                }
            }
            let known = plan.to_json()["variants"].as_array().cloned().unwrap_or_default();
            plan.destroy().expect("given back");
            [sent, received].into_iter().for_each(|address| context.free(address).expect("freed"));
            known.iter().map(|variant| variant["executions"].as_u64().expect("a number")).collect::<Vec<u64>>()
        });
        let first = &of_ranks[0];
        assert!(first.len() > 1 && first.iter().all(|executions| *executions > 0), "all variants are tried: {first:?}");
        assert!(first.iter().sum::<u64>() == 24 && of_ranks.iter().all(|of_rank| of_rank == first), "{of_ranks:?}");
    }
}

#[test]
fn threads_may_execute_steps_at_once_and_each_is_whole() {
    as_ranks(2, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node"));
        let [sent, received] = [0, 1].map(|_| context.allocate(DeviceId::gpu(0), 1 << 20).expect("memory"));
        memory(sent, 1 << 20).fill(rank as u8 + 1);
        let windows = [sent, received].map(|address| Window { address, bytes: 1 << 20 });
        let transfer = NodeTransfer { dst: end(1 - rank, 1, 0), src: end(rank, 0, 0), bytes: 1 << 20 };
        let plan: NodePlan = node.plan(&windows, &[transfer], &PlanOptions::default()).expect("a plan");
        let together = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
                    together.wait();
                    for _ in 0..25 {
                        plan.execute(stream).expect("enqueued").wait().expect("it ends");
                    }
                });
            }
        });
        assert!(memory(received, 1 << 20).iter().all(|found| *found == 2 - rank as u8));
        plan.destroy().expect("given back");
        [sent, received].into_iter().for_each(|address| context.free(address).expect("freed"));
    });
}

#[test]
fn halves_that_do_not_meet_are_refused_on_all_ranks() {
    let by_tag = |rank: u32, tag: u64| end(rank, NodeEnd::BY_TAG, tag);
    let halves = |rank: u32, context: &Context| {
        let memory = context.allocate(DeviceId::gpu(0), 4096).expect("memory");
        let windows = vec![Window { address: memory, bytes: 4096 }];
        let send = NodeTransfer { dst: by_tag((rank + 1) % 3, 7), src: end(rank, 0, 0), bytes: 1024 };
        let receive = NodeTransfer { dst: end(rank, 0, 2048), src: by_tag((rank + 2) % 3, 7), bytes: 1024 };
        (windows, vec![send, receive], PlanOptions::default())
    };
    type Mistake = fn(&mut Vec<NodeTransfer>);
    // Wrong arguments of rank 1, the transfer that they concern, and the messages on all ranks.
    let cases: [(Mistake, u32, &str); 7] = [
        (
            |t| t[0].dst.offset = 8,
            1,
            "transfer 0: the transfer is sent to rank 2 with tag 8, but that rank has no matching receive in its transfers",
        ),
        (
            |t| _ = t.remove(1),
            0,
            "transfer 0: the transfer is sent to rank 1 with tag 7, but that rank has no matching receive in its transfers",
        ),
        (
            |t| _ = t.remove(0),
            2,
            "transfer 1: the transfer is received from rank 1 with tag 7, but that rank has no matching send in its transfers",
        ),
        (
            |t| t[1].bytes = 1025,
            1,
            "transfer 1: the transfer receives 1025 bytes from rank 0 with tag 7, but transfer 0 of that rank sends 1024",
        ),
        (
            |t| t[1].dst.offset = 4000,
            1,
            "transfer 1: the destination extends past the end of window 0 of rank 1: offset 4000, 1024 bytes of 4096",
        ),
        (
            |t| t[0].src = end(1, NodeEnd::BY_TAG, 7),
            1,
            "transfer 0 gives a tag for both source and destination: for its own side, a rank passes a window (memory range)",
        ),
        (|t| t[0].dst.rank = 3, 1, "transfer 0 has an invalid rank: rank=3: must be 0 to 2, a rank of the node"),
    ];
    for (wrong, blamed, text) in cases {
        let errors = refused(|rank, context| {
            let (windows, mut transfers, options) = halves(rank, context);
            if rank == 1 {
                wrong(&mut transfers);
            }
            (windows, transfers, options)
        });
        for (rank, error) in (0..).zip(&errors) {
            match error {
                Error::NodeArgument { reason, .. } => assert!(rank == blamed && reason == text, "rank {rank}: {error}, not {text}"),
                Error::RankFailed { rank: told, reason } => {
                    assert!(rank != blamed && *told == blamed && reason.contains(text), "rank {rank}: {error}, not {text}");
                }
                error => panic!("rank {rank}: {error:?}"),
            }
        }
    }
}

/// Calls `request` on each of three ranks, on one of which it returns wrong arguments. Returns the error of each rank.
fn refused(request: impl Fn(u32, &Context) -> (Vec<Window>, Vec<NodeTransfer>, PlanOptions) + Sync) -> Vec<Error> {
    as_ranks(3, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 3, seat, &[]).expect("a node"));
        let (windows, transfers, options) = request(rank, &context);
        let error = node.plan(&windows, &transfers, &options).expect_err("it is refused");
        // After the error, the next plan can be made.
        let plan = node.plan(&[], &[], &PlanOptions::default()).expect("an empty plan");
        plan.execute(StreamHandle(0)).expect("it does nothing").wait().expect("it ends");
        plan.destroy().expect("given back");
        for window in windows {
            let _ = context.free(window.address);
        }
        error
    })
}

#[test]
fn what_one_rank_does_wrong_is_refused_on_all_with_its_reason() {
    let window = |context: &Context, bytes: u64| Window { address: context.allocate(DeviceId::gpu(0), bytes).expect("memory"), bytes };
    let to_next = |rank: u32, bytes: u64| NodeTransfer { dst: end((rank + 1) % 3, 0, 0), src: end(rank, 1, 0), bytes };
    let both = |context: &Context| vec![window(context, 4096), window(context, 4096)];
    let right = |rank: u32, context: &Context| (both(context), vec![to_next(rank, 4096)], PlanOptions::default());
    // The rank with the wrong argument gets an error about that argument, and the other ranks get an error with the number of the rank.
    let said = |errors: &[Error], wrong: u32, text: &str| {
        for (rank, error) in (0..).zip(errors) {
            match error {
                Error::NodeArgument { reason, .. } => assert!(rank == wrong && reason.starts_with(text), "rank {rank}: {error}"),
                Error::RankFailed { rank: told, reason } => {
                    assert!(rank != wrong && *told == wrong && reason.starts_with(text), "rank {rank}: {error}");
                }
                error => panic!("rank {rank}: {error:?}"),
            }
        }
    };
    let errors = refused(|rank, context| {
        let (windows, mut transfers, options) = right(rank, context);
        if rank == 1 {
            transfers[0].bytes = 4097;
        }
        (windows, transfers, options)
    });
    said(&errors, 1, "transfer 0: the destination extends past the end of window 0 of rank 2: offset 0, 4097 bytes of 4096");
    let errors = refused(|rank, context| {
        let (windows, mut transfers, options) = right(rank, context);
        if rank == 2 {
            transfers[0].dst.rank = 1;
            transfers[0].src.rank = 0;
        }
        (windows, transfers, options)
    });
    said(&errors, 2, "transfer 0 goes from rank 0 to rank 1, but this is rank 2");
    let errors = refused(|rank, context| {
        let (windows, mut transfers, options) = right(rank, context);
        transfers[0].dst.rank = if rank == 0 { 0 } else { 1 };
        (windows, transfers, options)
    });
    said(&errors, 1, "transfer 0: the destination overlaps the destination of transfer 0 of rank 2");
    let errors = refused(|rank, context| {
        let (windows, transfers, options) = right(rank, context);
        (windows, transfers, if rank == 1 { PlanOptions { max_paths: Some(1), ..options } } else { options })
    });
    said(&errors, 1, "max_paths=1, but rank 0 has max_paths=all: pass the same options and set the same MPGPU_* variables on all ranks");
    let errors = refused(|rank, context| {
        let (mut windows, transfers, options) = right(rank, context);
        if rank == 0 {
            windows[1].address = context.allocate(DeviceId::HOST, 4096).expect("memory");
        }
        (windows, transfers, options)
    });
    let shared = "the memory is host memory that was not allocated for other processes; allocate it as memory shared between processes";
    assert!(errors.iter().all(|error| error.to_string().contains(shared)), "{errors:?}");
    let ordinary = vec![0_u8; 4096];
    let errors = refused(|rank, context| {
        let (mut windows, transfers, options) = right(rank, context);
        if rank == 0 {
            windows[1] = Window { address: ordinary.as_ptr() as u64, bytes: 4096 };
        }
        (windows, transfers, options)
    });
    said(
        &errors,
        0,
        "transfer 0: pageable host memory is not visible to another rank; allocate it as host memory shared between processes",
    );
    let errors = refused(|rank, context| {
        let (mut windows, transfers, options) = right(rank, context);
        if rank == 2 {
            windows[0].bytes = 1 << 30;
        }
        (windows, transfers, options)
    });
    said(&errors, 2, "window 0: ");
    let errors = refused(|rank, context| {
        let (mut windows, transfers, options) = right(rank, context);
        if rank == 1 {
            windows[1].address = u64::MAX - 4094;
        }
        (windows, transfers, options)
    });
    said(&errors, 1, "window 1: 0xfffffffffffff001 (4096 bytes) runs past the end of the address space");
}

#[test]
fn a_node_is_refused_on_all_ranks_alike() {
    let errors = as_ranks(2, |rank, seat| {
        let context = context(if rank == 0 { "beluga" } else { "dgx1-v100" }, Some(vec![rank]));
        NodeGroup::new(&context, rank, 2, seat, &[]).expect_err("other host domains").to_string()
    });
    assert!(errors.iter().all(|error| error.contains("host domains")), "{errors:?}");
    let errors = as_ranks(2, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let gpus: &[DeviceId] = if rank == 1 { &[DeviceId::HOST] } else { &[] };
        NodeGroup::new(&context, rank, 2, seat, gpus).expect_err("no GPU").to_string()
    });
    assert_eq!(errors, ["rank 1: the host is not a GPU", "the host is not a GPU"]);
    let context = context("beluga", None);
    let meeting = Meeting::new(1);
    let error = NodeGroup::new(&context, 3, 3, Box::new(Seat(meeting, 0)), &[]).expect_err("no such rank");
    assert!(error.to_string().contains("rank 3 of 3"), "{error}");
}

#[test]
fn ranks_that_all_see_all_gpus_work_for_one_each() {
    let shares = as_ranks(3, |rank, seat| {
        let context = context("beluga", None);
        let node = NodeGroup::new(&context, rank, 3, seat, &[]).expect("a node");
        let own: Vec<DeviceId> = node.own_devices().collect();
        assert_eq!(own, if rank == 0 { vec![DeviceId::gpu(0), DeviceId::gpu(3)] } else { vec![DeviceId::gpu(rank)] });
        format!("{node:?}")
    });
    for text in shares {
        let owners: Vec<&str> = text.match_indices("owner: ").map(|(at, found)| &text[at + found.len()..][..1]).collect();
        assert_eq!(owners, ["0", "1", "2", "0"], "{text}");
    }
}

#[test]
fn nodes_of_some_ranks_use_the_gpus_that_the_node_of_all_ranks_has_assigned_to_them() {
    // The ranks of each half in this order.
    let halves = [[1_u32, 0], [2, 3]];
    let meetings = halves.map(|half| Meeting::new(half.len()));
    let after = Meeting::new(4);
    as_ranks(4, |rank, seat| {
        let context = context("beluga", None);
        let own = |node: &NodeGroup| node.own_devices().collect::<Vec<_>>();
        let all = NodeGroup::new(&context, rank, 4, seat, &[]).expect("a node");
        assert_eq!(own(&all), [DeviceId::gpu(rank)]);
        let (half, place) = (rank as usize / 2, halves[rank as usize / 2].iter().position(|member| *member == rank).expect("a member"));
        let join = |gpus: &[DeviceId]| {
            let seat = Box::new(Seat(meetings[half].clone(), place));
            NodeGroup::new(&context, place as u32, 2, seat, gpus).expect("a node")
        };
        let part = join(&[]);
        assert_eq!(own(&part), [DeviceId::gpu(rank)], "not the GPUs of the other half");
        assert_eq!(format!("{part:?}").matches("owner: ").count(), 2);
        // Named GPUs are used in any case.
        assert_eq!(own(&join(&[DeviceId::gpu(rank ^ 2)])), [DeviceId::gpu(rank ^ 2)]);
        drop(all);
        assert_eq!(own(&join(&[])), [DeviceId::gpu(rank)], "the oldest group that exists is the half");
        drop(part);
        // No group exists any more, so all visible GPUs are distributed again.
        let again = NodeGroup::new(&context, 3 - rank, 4, Box::new(Seat(after.clone(), 3 - rank as usize)), &[]).expect("a node");
        assert_eq!(own(&again), [DeviceId::gpu(3 - rank)]);
    });
}

#[test]
fn a_rank_without_a_gpu_is_told_so_when_it_asks_for_one() {
    let asked = as_ranks(6, |rank, seat| {
        let node = NodeGroup::new(&context("beluga", None), rank, 6, seat, &[]).expect("a node");
        node.device().map_err(|error| error.to_string())
    });
    let expected = |rank: u32| {
        let why = "the ranks see 4 GPUs, each of which belongs to one rank; start fewer ranks, or name a GPU in `devices` that no other rank names";
        if rank < 4 { Ok(DeviceId::gpu(rank)) } else { Err(format!("rank {rank} of 6 has no GPU: {why}")) }
    };
    assert_eq!(asked, (0..6).map(expected).collect::<Vec<_>>());
}

#[test]
fn ranks_meet_at_a_socket_whoever_comes_first() {
    let path = std::env::temp_dir().join(format!("mpgpu-node-{}", std::process::id()));
    // A socket that a killed job has left does not prevent the creation of a node.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
    let paths: Vec<usize> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..4)
            .map(|rank| {
                let path = &path;
                scope.spawn(move || {
                    let context = context("beluga", Some(vec![rank]));
                    let node = Arc::new(NodeGroup::at_socket(&context, rank, 4, path, &[]).expect("a node"));
                    let plan = node.plan(&[], &[], &PlanOptions::default()).expect("a plan");
                    plan.destroy().expect("given back");
                    plan.paths()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    assert_eq!(paths, [0; 4]);
    assert!(!path.exists(), "nothing is left");
}

#[test]
fn a_rank_that_is_gone_fails_the_next_plan_of_ranks_that_met_at_a_socket() {
    let path = std::env::temp_dir().join(format!("mpgpu-node-gone-{}", std::process::id()));
    let path = &path;
    std::thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                let context = context("beluga", Some(vec![rank]));
                let node = Arc::new(NodeGroup::at_socket(&context, rank, 3, path, &[]).expect("a node"));
                if rank == 2 {
                    return;
                }
                let asked = std::time::Instant::now();
                let error = node.plan(&[], &[], &PlanOptions::default()).expect_err("rank 2 has gone");
                assert!(matches!(&error, Error::Allgather(reason) if reason.contains("rank 2 has exited")), "{error}");
                assert!(asked.elapsed().as_secs() < 30, "it was noticed and not waited for");
            });
        }
    });
}

#[test]
fn memory_that_a_rank_frees_too_early_is_refused_there_and_at_its_peers() {
    let together = Barrier::new(2);
    as_ranks(2, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node"));
        let address = context.allocate(DeviceId::gpu(0), 8192).expect("memory");
        let transfer = NodeTransfer { dst: end(1, 0, 0), src: end(0, 0, 0), bytes: 8192 };
        let mine = if rank == 0 { vec![transfer] } else { Vec::new() };
        let plan = node.plan(&[Window { address, bytes: 8192 }], &mine, &PlanOptions::default()).expect("a plan");
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it ends");
        together.wait();
        if rank == 1 {
            context.free(address).expect("freed");
        }
        together.wait();
        let error = plan.enqueue(StreamHandle(0)).expect_err("it is gone").to_string();
        assert!(error.contains("freed"), "{error}");
        plan.destroy().expect("given back");
        if rank == 0 {
            context.free(address).expect("freed");
        }
    });
}

/// Creates one rank of a ring on `beluga`, with its plan and a stream. The rank sees one GPU.
fn of_ring(rank: u32, ranks: u32, seat: Box<dyn Allgather>) -> (Arc<Context>, NodePlan, StreamHandle) {
    let context = context("beluga", Some(vec![rank]));
    let node = Arc::new(NodeGroup::new(&context, rank, ranks, seat, &[]).expect("a node"));
    // The windows are freed when the context is closed.
    let windows = [0, 1].map(|_| Window { address: context.allocate(DeviceId::gpu(0), 1 << 20).expect("memory"), bytes: 1 << 20 });
    let transfer = NodeTransfer { dst: end((rank + 1) % ranks, 1, 0), src: end(rank, 0, 0), bytes: 1 << 20 };
    let plan = node.plan(&windows, &[transfer], &PlanOptions::default()).expect("a plan");
    let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
    (context, plan, stream)
}

fn is_peer_gone(error: &Error) -> bool {
    matches!(error, Error::Backend(mpgpu_backend::BackendError::PeerGone(_)))
}

#[test]
fn a_rank_that_leaves_early_lets_nobody_wait() {
    const EARLY: u64 = 3;
    as_ranks(4, |rank, seat| {
        let (context, plan, stream) = of_ring(rank, 4, seat);
        // Rank 2 has no neighbour that leaves early. It gets an error when its neighbours have given up, unless all of its data has arrived
        // before.
        let steps = if rank == 0 { EARLY } else { EARLY + 5 };
        let mut told = None;
        for _ in 0..steps {
            told = told.or(plan.enqueue(stream).err());
        }
        told = told.or(context.synchronize_stream(stream).err());
        match told {
            None => assert!([0, 2].contains(&rank), "rank {rank} has waited in vain and was not told"),
            Some(error) => assert!(rank > 0 && is_peer_gone(&error), "rank {rank}: {error:?}"),
        }
        let ended = plan.destroy();
        assert!(rank == 2 || ended.is_ok() == (rank == 0), "rank {rank}: {ended:?}");
    });
}

#[test]
fn ranks_that_have_come_as_far_as_one_that_leaves_are_told_with_the_next_step() {
    let together = Barrier::new(3);
    as_ranks(3, |rank, seat| {
        let (context, plan, stream) = of_ring(rank, 3, seat);
        for _ in 0..4 {
            plan.enqueue(stream).expect("enqueued");
        }
        // Work of other ranks may still be in progress.
        if rank == 0 {
            plan.destroy().expect("given back");
        }
        context.synchronize_stream(stream).expect("nobody waits in vain");
        together.wait();
        if rank != 0 {
            let error = plan.enqueue(stream).expect_err("rank 0 takes no part");
            assert!(is_peer_gone(&error) && error.to_string().contains("after 4 executions"), "{error}");
            context.synchronize_stream(stream).expect("nothing was enqueued");
            plan.destroy().expect("given back");
        }
    });
}

#[test]
fn memory_that_others_relay_through_stays_while_they_do() {
    as_ranks(3, |rank, seat| {
        let context = context("beluga", Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 3, seat, &[]).expect("a node"));
        const BYTES: u64 = 8 << 20;
        let address = context.allocate(DeviceId::gpu(0), BYTES).expect("memory");
        let mine = if rank == 1 { vec![NodeTransfer { dst: end(2, 0, 0), src: end(1, 0, 0), bytes: BYTES }] } else { Vec::new() };
        let plan = node.plan(&[Window { address, bytes: BYTES }], &mine, &PlanOptions::default()).expect("a plan");
        assert!(plan.planned().program.rings.iter().any(|ring| ring.device == DeviceId::gpu(0)), "{}", plan.describe());
        // Rank 0 takes no part in the transfers and only provides staging memory.
        for step in 0..if rank == 0 { 0 } else { 10_u64 } {
            if rank == 1 {
                (0..).zip(memory(address, BYTES)).for_each(|(offset, target)| *target = byte(1, offset, step));
            }
            plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it ends");
            let wrong = (0..).zip(memory(address, BYTES).iter()).find(|(offset, found)| **found != byte(1, *offset, step));
            assert_eq!(wrong, None, "rank {rank}, step {step}");
        }
        plan.destroy().expect("given back");
        context.free(address).expect("freed");
        context.close().expect("closed, after the others have unmapped its memory");
    });
}
