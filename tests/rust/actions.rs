//! Tests that the ranks' parts of a node plan copy the right data in every communication step, with one thread for each rank. Small parts
//! run by the CPU build of the kernel. All parts run on a test backend that executes each call immediately.

use super::{Addresses, Armed, BoundPart, Eager, SmallPart, stays};
use crate::backend::{
    Action, ActionGrid, ActionReach, Allocation, Backend, BackendError, Completion, Endpoints, EventHandle, Execution, HostFunction,
    MemoryKind, Signal, StepFate, StreamHandle,
};
use crate::plan::{self, Copy, LEAST_SHARED_BYTES, Options, Place, Program, Relays, Shape};
use crate::program::ranks::{EndRanks, FlagId, Parts, RankedBatch, check_parts, divide};
use crate::program::{PartitionMove, Partitions, add_partition_flags};
use crate::sync::{Mutex, lock};
use crate::topology::{CostUnit, Costs, DeviceId, Machine, preset};
use mpgpu_devices::host::kernel::{Segment, run_actions};
use proptest::prelude::*;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

/// Memory that several threads write, and that is accessed only by address.
struct Memory {
    base: u64,
    bytes: usize,
    _owned: Vec<u8>,
}

impl Memory {
    fn new(bytes: u64) -> Memory {
        let mut owned = vec![0xEE; bytes as usize];
        Memory { base: owned.as_mut_ptr().expose_provenance() as u64, bytes: owned.len(), _owned: owned }
    }

    /// Calls `look` with the index of each byte and the byte. Meanwhile no other thread may access this memory.
    fn each(&self, mut look: impl FnMut(usize, &mut u8)) {
        for i in 0..self.bytes {
            // SAFETY: inside the vector, which is alive. The synchronization of the threads is under test: a rank accesses the memory that
            // it sends and receives between its steps, when no other rank may.
            look(i, unsafe { &mut *std::ptr::with_exposed_provenance_mut(self.base as usize + i) });
        }
    }
}

/// Memory that all ranks share: sources and destinations of the transfers, staging rings and flags.
struct Shared {
    src: Vec<Memory>,
    dst: Vec<Memory>,
    rings: Vec<Memory>,
    slot_bytes: Vec<u64>,
    host_rings: Vec<bool>,
    /// One value for each transfer: true if source and destination are on the same GPU.
    inside: Vec<bool>,
    /// One value for each transfer: the index of the first transfer that reads the same source.
    first: Vec<usize>,
    flags: Vec<AtomicU64>,
    /// Two inboxes for each rank, which communication steps use alternately.
    inboxes: Vec<Memory>,
    /// Number of thread blocks of each kernel that sets flags.
    blocks: u32,
}

impl Addresses for Shared {
    fn place(&self, place: Place) -> u64 {
        let at = |memory: &Memory, offset: u64| memory.base + offset;
        match place {
            Place::Source { transfer, offset } => at(&self.src[transfer as usize], offset),
            Place::Destination { transfer, offset } => at(&self.dst[transfer as usize], offset),
            Place::Slot { ring, slot } => at(&self.rings[ring.0 as usize], u64::from(slot) * self.slot_bytes[ring.0 as usize]),
        }
    }

    fn flag(&self, flag: FlagId) -> u64 {
        (&raw const self.flags[flag.0 as usize]).expose_provenance() as u64
    }

    fn near_blocks(&self, _: FlagId) -> Option<u32> {
        Some(self.blocks)
    }

    fn inbox(&self, rank: u32) -> u64 {
        self.inboxes[rank as usize].base
    }

    /// Returns GPU 0 for every device, because each rank sees only one GPU in this test.
    fn device(&self, _: DeviceId) -> DeviceId {
        DeviceId::gpu(0)
    }

    fn own_device(&self) -> DeviceId {
        DeviceId::gpu(0)
    }

    fn is_host(&self, place: Place) -> bool {
        matches!(place, Place::Slot { ring, .. } if self.host_rings[ring.0 as usize])
    }

    fn is_inside(&self, copy: &Copy) -> bool {
        match (copy.from, copy.to) {
            (Place::Source { .. }, Place::Destination { transfer, .. }) => self.inside[transfer as usize],
            _ => false,
        }
    }
}

fn pattern(transfer: usize, step: u64, offset: usize) -> u8 {
    (transfer as u64 * 37 + step * 101 + offset as u64 * 7 + (offset as u64 >> 8)) as u8
}

/// Returns a machine whose GPUs are all linked with each other and that has no fixed costs, so that even small transfers use several paths.
fn machine() -> Machine {
    let mut topology = preset("beluga").expect("listed");
    for cost in Costs::TABLE {
        if cost.unit == CostUnit::Seconds {
            *(cost.of_mut)(&mut topology.costs) = 0.0;
        }
    }
    Machine::new(topology).expect("well formed")
}

/// Guard that ends the process if a rank panics, because the other ranks would wait for that rank for ever.
struct Fails;

impl Drop for Fails {
    fn drop(&mut self) {
        if thread::panicking() {
            // Write directly to standard error, because the test harness would show captured output only after the end of the test.
            drop(writeln!(std::io::stderr(), "a rank has failed, for which the others wait; run with --nocapture to see how"));
            std::process::abort();
        }
    }
}

/// Runs `steps` communication steps of each rank's part, one thread for each rank, as fast as possible. The part of a rank that does not
/// take part is `None`.
fn run_steps<Step: FnMut() + Send>(ends: &[EndRanks], shared: &Shared, steps: u64, ranks: impl Iterator<Item = Option<Step>>) {
    thread::scope(|scope| {
        for (rank, step_of_rank) in ranks.enumerate() {
            let Some(mut step_of_rank) = step_of_rank else { continue };
            scope.spawn(move || {
                let _fails = Fails;
                let own = |of: fn(&EndRanks) -> u32| ends.iter().enumerate().filter(move |(_, ends)| of(ends) as usize == rank);
                for step in 0..steps {
                    for (transfer, _) in own(|ends| ends.src) {
                        shared.src[transfer].each(|i, byte| *byte = pattern(shared.first[transfer], step, i));
                    }
                    step_of_rank();
                    for (transfer, _) in own(|ends| ends.dst) {
                        shared.dst[transfer].each(|i, byte| {
                            assert_eq!(
                                *byte,
                                pattern(shared.first[transfer], step, i),
                                "rank {rank}, step {step}, transfer {transfer}, byte {i}"
                            );
                            *byte = 0xEE;
                        });
                    }
                }
            });
        }
    });
}

fn address_of(words: &[AtomicU64]) -> u64 {
    words.as_ptr().expose_provenance() as u64
}

fn zeros(count: u64) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Index of the word of a launch that becomes 1 when communication steps are abandoned.
const ABANDONED: usize = 2;

/// Runs one kernel launch on CPU threads. Executes the actions with `blocks` blocks, each in a thread, and cuts copies into tiles of 4 KiB.
/// `stop` is the address of two words.
fn launch(actions: &[Segment], blocks: u32, words: &[AtomicU64], stop: u64, turn: u64) {
    let addresses = [address_of(words), stop, turn];
    let run_block = |block| {
        // SAFETY: ends, flags and words outlive the threads, and all blocks return before this does.
        unsafe { run_actions(actions, &addresses, 12, block, blocks) }
    };
    thread::scope(|scope| {
        let run_block = &run_block;
        for block in 1..blocks {
            scope.spawn(move || run_block(block));
        }
        run_block(0);
    });
    assert!(words[..ABANDONED].iter().all(|word| word.load(Ordering::Relaxed) == 0), "ready for the next launch");
}

fn segments(small: &SmallPart) -> Vec<Segment> {
    small.actions.iter().map(|action| action.segment(&small.endpoints, &small.program.transfers)).collect()
}

/// Runs each rank's part by a kernel. If `eager` is given, communication steps alternate between the two inboxes. Returns false if a part
/// cannot run as a kernel with this number of blocks.
fn run(parts: &Parts, ends: &[EndRanks], shared: &Shared, steps: u64, eager: Option<&Eager>) -> bool {
    let of_ranks: Vec<Option<SmallPart>> = parts.parts.iter().map(|part| SmallPart::new(part, shared)).collect();
    // A rank that waits for no other rank does not take part.
    let raised_for_nothing = |rank: usize| parts.flags.iter().any(|flag| flag.raiser as usize == rank);
    let blocks = shared.blocks;
    let is_none = |small: &Option<SmallPart>| small.as_ref().is_none_or(|small| small.is_narrow && blocks > 1);
    if of_ranks.iter().enumerate().any(|(rank, small)| is_none(small) && raised_for_nothing(rank)) {
        return false;
    }
    let turns = zeros(parts.parts.len() as u64);
    let by_turns = |(rank, small): (usize, Option<SmallPart>)| match eager {
        None => small,
        Some(eager) => Some(small?.by_turns(&parts.parts[rank], rank as u32, eager, shared, address_of(&turns[rank..]))),
    };
    let of_ranks: Vec<Option<SmallPart>> = of_ranks.into_iter().enumerate().map(by_turns).collect();
    let kernels = of_ranks.iter().map(|small| {
        let small = small.as_ref()?;
        let (turn, actions) = (small.grid.turn, segments(small));
        let (words, stop) = (zeros(ActionGrid::WORDS), zeros(2));
        Some(move || launch(&actions, blocks, &words, address_of(&stop), turn))
    });
    run_steps(ends, shared, steps, kernels);
    true
}

/// Memory of [`Shared`] with separate flags, for parts that run in streams.
struct ForStreams<'a>(&'a Shared, Vec<AtomicU64>);

impl Addresses for ForStreams<'_> {
    fn place(&self, place: Place) -> u64 {
        self.0.place(place)
    }

    fn flag(&self, flag: FlagId) -> u64 {
        address_of(&self.1[flag.0 as usize..])
    }

    fn near_blocks(&self, _: FlagId) -> Option<u32> {
        None
    }

    fn inbox(&self, rank: u32) -> u64 {
        self.0.inbox(rank)
    }

    fn device(&self, device: DeviceId) -> DeviceId {
        self.0.device(device)
    }

    fn own_device(&self) -> DeviceId {
        self.0.own_device()
    }

    fn is_host(&self, place: Place) -> bool {
        self.0.is_host(place)
    }

    fn is_inside(&self, copy: &Copy) -> bool {
        self.0.is_inside(copy)
    }
}

/// Runs each communication step either by kernels with inboxes or by streams. The bits of `forms` select the form of successive steps.
fn run_in_both_forms(parts: &Parts, ends: &[EndRanks], shared: &Shared, (steps, forms): (u64, u64), eager: &Eager) {
    let backend = AtOnce::default();
    let turns = zeros(parts.parts.len() as u64);
    let for_streams = ForStreams(shared, zeros(parts.flags.len() as u64));
    let of_ranks = parts.parts.iter().enumerate().map(|(rank, part)| {
        let small = SmallPart::new(part, shared)?.by_turns(part, rank as u32, eager, shared, address_of(&turns[rank..]));
        let actions = segments(&small);
        let mut by_streams = BoundPart::new(part, &for_streams, None, None, &StepFate::default(), &backend).expect("bound");
        let (words, stop, turn, backend, mut step) = (zeros(ActionGrid::WORDS), zeros(2), small.grid.turn, &backend, 0);
        Some(move || {
            if forms >> (step % 64) & 1 == 0 {
                launch(&actions, shared.blocks, &words, address_of(&stop), turn);
            } else {
                by_streams.enqueue(CALLERS, false, backend).expect("done");
            }
            step += 1;
        })
    });
    run_steps(ends, shared, steps, of_ranks.collect::<Vec<_>>().into_iter());
}

/// Test backend that executes each call immediately on the calling thread, so that streams and events need not order anything.
#[derive(Default)]
struct AtOnce {
    /// Number of kernels that have waited for flags so far.
    kernels: AtomicUsize,
    /// Streams that have waited for partitions so far.
    awaiting: Mutex<Vec<StreamHandle>>,
}

/// Stream of the caller, which the backend has not created.
const CALLERS: StreamHandle = StreamHandle(65);

/// Stream of another GPU that the backend has not created.
const ELSEWHERE: StreamHandle = StreamHandle(66);

fn counter(address: u64) -> &'static AtomicU64 {
    // SAFETY: a flag of `Shared`, which outlives the threads that access it.
    unsafe { &*std::ptr::with_exposed_provenance(address as usize) }
}

impl Backend for AtOnce {
    fn name(&self) -> &'static str {
        "at once"
    }
    fn allocate(&self, _: DeviceId, _: u64) -> Result<u64, BackendError> {
        unreachable!()
    }
    fn allocate_shared(&self, _: DeviceId, _: u64) -> Result<u64, BackendError> {
        unreachable!()
    }
    fn free(&self, _: u64) -> Result<(), BackendError> {
        unreachable!()
    }
    fn locate(&self, _: u64) -> Result<Option<Allocation>, BackendError> {
        unreachable!()
    }
    fn allocated_bytes(&self, _: DeviceId) -> u64 {
        0
    }
    fn create_stream(&self, _: DeviceId) -> Result<StreamHandle, BackendError> {
        Ok(StreamHandle(64))
    }
    fn destroy_stream(&self, _: StreamHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn stream_count(&self, _: DeviceId) -> u64 {
        0
    }
    fn synchronize_stream(&self, _: StreamHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn launch_host(&self, _: StreamHandle, _: HostFunction) -> Result<(), BackendError> {
        unreachable!()
    }
    fn create_event(&self) -> Result<EventHandle, BackendError> {
        Ok(EventHandle(1))
    }
    fn destroy_event(&self, _: EventHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn record_event(&self, _: EventHandle, _: StreamHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn stream_wait_event(&self, _: StreamHandle, _: EventHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn synchronize_event(&self, _: EventHandle) -> Result<(), BackendError> {
        Ok(())
    }
    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }
    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError> {
        let at = |place| match place {
            Place::Source { transfer, offset } => execution.endpoints[transfer as usize].src + offset,
            Place::Destination { transfer, offset } => execution.endpoints[transfer as usize].dst + offset,
            Place::Slot { .. } => unreachable!("a part has addresses alone"),
        };
        for copy in execution.program.ops.iter().flat_map(|op| &op.copies) {
            let (from, to): (*const u8, *mut u8) =
                (std::ptr::with_exposed_provenance(at(copy.from) as usize), std::ptr::with_exposed_provenance_mut(at(copy.to) as usize));
            // SAFETY: memory of `Shared`. The synchronization of the threads is under test.
            unsafe { from.copy_to_nonoverlapping(to, copy.bytes as usize) };
        }
        Ok(None)
    }
    fn stream_raise_signals(&self, _: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        signals.iter().for_each(|signal| assert_eq!(counter(signal.counter).swap(signal.value, Ordering::Release), 0, "it was taken"));
        Ok(())
    }
    fn stream_take_flags(&self, stream: StreamHandle, raises: &[Signal], flags: &[u64], _: &StepFate) -> Result<(), BackendError> {
        self.stream_raise_signals(stream, raises)?;
        for flag in flags {
            while counter(*flag).load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            counter(*flag).store(0, Ordering::Relaxed);
        }
        Ok(())
    }
    fn stream_await_flags(&self, stream: StreamHandle, flags: &[u64], _: &StepFate) -> Result<(), BackendError> {
        lock(&self.awaiting).push(stream);
        while flags.iter().any(|flag| counter(*flag).load(Ordering::Acquire) == 0) {
            thread::yield_now();
        }
        Ok(())
    }
    fn stream_run_actions(
        &self,
        stream: StreamHandle,
        _: DeviceId,
        actions: &[Segment],
        _: ActionGrid,
        _: &StepFate,
    ) -> Result<bool, BackendError> {
        if stream == ELSEWHERE {
            return Ok(false);
        }
        self.kernels.fetch_add(1, Ordering::Relaxed);
        launch(actions, 1, &zeros(ActionGrid::WORDS), address_of(&zeros(2)), 0);
        Ok(true)
    }
    fn action_reach(&self, _: DeviceId, _: &Arc<Program>, ends: &Arc<[Endpoints]>) -> Result<ActionReach, BackendError> {
        Ok(ActionReach { ends: Arc::clone(ends), processors: 1 })
    }
}

/// Runs each rank's part, bound either to streams or to a kernel of one block, in the caller's stream. Returns the number of kernels that
/// have waited for flags.
fn run_bound(parts: &Parts, ends: &[EndRanks], shared: &Shared, is_kernel: bool, stream: StreamHandle, steps: u64) -> usize {
    let backend = AtOnce::default();
    let bound = parts.parts.iter().map(|part| {
        let small = if is_kernel { SmallPart::new(part, shared) } else { None };
        let (mut bound, backend) = (BoundPart::new(part, shared, small, None, &StepFate::default(), &backend).expect("bound"), &backend);
        Some(move || bound.enqueue(stream, false, backend).expect("done"))
    });
    run_steps(ends, shared, steps, bound.collect::<Vec<_>>().into_iter());
    backend.kernels.into_inner()
}

/// Plans copies between ranks with these sizes, divides the plan into parts of the ranks, and allocates its memory. Each rank has a GPU, or
/// ranks share GPUs if there are fewer. Large copies from the same rank have the same source. Returns `None` if no rank copies data for
/// another.
fn divided(
    (ranks, gpus): (u32, u32),
    copies: &[(u32, u32, u64)],
    options: &Options,
) -> Option<(Parts, Vec<EndRanks>, Shared, Option<Eager>)> {
    let machine = machine();
    let ends: Vec<EndRanks> = copies.iter().map(|&(src, dst, _)| EndRanks { src: src % ranks, dst: dst % ranks }).collect();
    let device = MemoryKind::Device;
    let shapes: Vec<Shape> = copies
        .iter()
        .zip(&ends)
        .map(|(&(_, _, bytes), ends)| {
            let (src_device, dst_device) = (DeviceId::gpu(ends.src % gpus), DeviceId::gpu(ends.dst % gpus));
            let source = if bytes < LEAST_SHARED_BYTES { 0 } else { 1 + ends.src };
            Shape { source, dst_device, src_device, dst_kind: device, src_kind: device, bytes }
        })
        .collect();
    let first = |at: usize| shapes.iter().position(|shape| shape.source != 0 && shape.source == shapes[at].source).unwrap_or(at);
    let planned = plan::plan(&machine, &shapes, options).expect("a plan");
    let owners: Vec<u32> = (0..machine.gpu_count()).map(|gpu| gpu.min(ranks - 1)).collect();
    let batch = RankedBatch { ranks, shapes: &shapes, ends: &ends, owners: &owners };
    let mut parts = divide(&planned.program, &batch);
    check_parts(&planned.program, &batch, &parts).expect("a right division");
    let memory = || shapes.iter().map(|shape| Memory::new(shape.bytes)).collect();
    let eager = Eager::new(&mut parts, &batch);
    let shared = Shared {
        src: memory(),
        dst: memory(),
        inboxes: eager.iter().flat_map(|eager| &eager.inboxes).map(|bytes| Memory::new(2 * bytes)).collect(),
        rings: planned.program.rings.iter().map(|ring| Memory::new(ring.bytes())).collect(),
        slot_bytes: planned.program.rings.iter().map(|ring| ring.slot_bytes).collect(),
        host_rings: planned.program.rings.iter().map(|ring| ring.device.is_host()).collect(),
        inside: shapes.iter().zip(&ends).map(|(shape, ends)| stays(shape, *ends)).collect(),
        first: (0..shapes.len()).map(first).collect(),
        flags: zeros(parts.flags.len() as u64),
        blocks: 1,
    };
    // A rank that communicates only with itself needs no flags. The backend makes its copies.
    let moving = ends.iter().zip(&shapes).filter(|(_, shape)| shape.bytes > 0).map(|(ends, _)| *ends);
    let (inside, across): (Vec<EndRanks>, Vec<EndRanks>) = moving.partition(|ends| ends.src == ends.dst);
    let alone = inside.iter().any(|own| !across.iter().any(|ends| [ends.src, ends.dst].contains(&own.src)));
    let between = !across.is_empty();
    (between && !alone).then_some((parts, ends, shared, eager))
}

/// Like `divided`, for direct copies between ranks whose kernels have this number of blocks. Each copy with at least one byte has a copy in
/// the other direction.
fn divided_straight(ranks: u32, copies: Vec<(u32, u32, u64, u64)>, blocks: u32) -> (Parts, Vec<EndRanks>, Shared, Eager) {
    let both_ways = |(one, by, there, back): (u32, u32, u64, u64)| {
        let other = one % ranks + 1 + by % (ranks - 1);
        [(one, other, there), (other, one, back)]
    };
    let copies: Vec<_> = copies.into_iter().flat_map(both_ways).collect();
    let one_path = Options { max_paths: 1, ..Options::default() };
    let (parts, ends, shared, eager) = divided((ranks, ranks), &copies, &one_path).expect("between ranks");
    let eager = eager.expect("straight, and few");
    (parts, ends, Shared { blocks, ..shared }, eager)
}

/// Generates copies from each rank to the rank at a certain distance, each with a copy in the other direction. Half of the latter are
/// empty.
fn there_and_back() -> impl Strategy<Value = Vec<(u32, u32, u64, u64)>> {
    prop::collection::vec((0_u32..4, 1_u32..4, 1_u64..20_000, prop_oneof![Just(0), 1_u64..20_000]), 1..5)
}

/// Returns planner options with which even small transfers use several paths.
fn several_paths() -> Options {
    Options { min_bytes: Some(1), chunk_bytes: Some(4096), ..Options::default() }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn small_parts_move_the_right_bytes_step_after_step_however_far_ahead_a_rank_is(
        ranks in 2_u32..=4,
        gpus in 1_u32..=4,
        copies in prop::collection::vec((0_u32..4, 0_u32..4, 0_u64..20_000), 1..6),
        blocks in 1_u32..=4,
    ) {
        let divided = divided((ranks, gpus), &copies, &several_paths());
        prop_assume!(divided.is_some());
        let (parts, ends, mut shared, _) = divided.expect("as assumed");
        shared.blocks = blocks;
        prop_assume!(run(&parts, &ends, &shared, 50, None));
    }

    #[test]
    fn bytes_that_go_through_inboxes_by_turns_are_right_step_after_step_however_far_ahead_a_rank_is(
        ranks in 2_u32..=4,
        copies in there_and_back(),
        blocks in 1_u32..=4,
    ) {
        let (parts, ends, shared, eager) = divided_straight(ranks, copies, blocks);
        prop_assert!(run(&parts, &ends, &shared, 50, Some(&eager)));
    }

    #[test]
    fn steps_by_kernels_that_have_inboxes_and_by_streams_follow_each_other_in_any_order(
        ranks in 2_u32..=4,
        copies in there_and_back(),
        forms in any::<u64>(),
        blocks in 1_u32..=3,
    ) {
        let (parts, ends, shared, eager) = divided_straight(ranks, copies, blocks);
        run_in_both_forms(&parts, &ends, &shared, (64, forms), &eager);
    }

    #[test]
    fn parts_bound_to_streams_move_the_right_bytes_whoever_waits_for_flags(
        ranks in 2_u32..=4,
        gpus in 1_u32..=4,
        copies in prop::collection::vec((0_u32..4, 0_u32..4, 0_u64..300_000), 1..6),
        is_kernel in any::<bool>(),
    ) {
        let divided = divided((ranks, gpus), &copies, &several_paths());
        prop_assume!(divided.is_some());
        let (parts, ends, shared, _) = divided.expect("as assumed");
        let has_small = parts.parts.iter().any(|part| SmallPart::new(part, &shared).is_some());
        for stream in [CALLERS, ELSEWHERE] {
            let kernels = run_bound(&parts, &ends, &shared, is_kernel, stream, 10);
            prop_assert_eq!(kernels > 0, is_kernel && has_small, "kernels stand around no copy engine");
        }
    }
}

#[test]
fn what_is_much_or_of_several_gpus_or_awaits_nothing_is_left_to_copy_engines() {
    let machine = machine();
    let shape = |from, to, bytes| Shape {
        source: 0,
        dst_device: DeviceId::gpu(to),
        src_device: DeviceId::gpu(from),
        dst_kind: MemoryKind::Device,
        src_kind: MemoryKind::Device,
        bytes,
    };
    let small = |bytes, dst_offset: u64, ends: EndRanks| {
        let shapes = [shape(ends.src, ends.dst, bytes)];
        let options = Options { max_paths: 1, ..Options::default() };
        let planned = plan::plan(&machine, &shapes, &options).expect("a plan");
        let batch = RankedBatch { ranks: 2, shapes: &shapes, ends: &[ends], owners: &[0, 1, 1, 1] };
        let parts = divide(&planned.program, &batch);
        let mut shared = Shared {
            inboxes: Vec::new(),
            src: vec![Memory::new(bytes)],
            dst: vec![Memory::new(bytes + dst_offset)],
            rings: Vec::new(),
            slot_bytes: Vec::new(),
            host_rings: Vec::new(),
            inside: vec![ends.src == ends.dst],
            first: vec![0],
            flags: zeros(parts.flags.len() as u64),
            blocks: 1,
        };
        shared.dst[0].base = shared.src[0].base % 16 + shared.dst[0].base.next_multiple_of(16) + dst_offset;
        parts.parts.iter().map(|part| SmallPart::new(part, &shared).map(|small| small.actions)).collect::<Vec<_>>()
    };
    let away = EndRanks { src: 0, dst: 1 };
    let parts = small(super::SMALL_BYTES, 0, away);
    let [Some(sender), Some(receiver)] = &parts[..] else { panic!("{parts:?}") };
    assert!(matches!(sender[..], [Action::Take { blocks: 1, .. }, Action::Copy(0), Action::Raise(_)]), "{sender:?}");
    assert!(matches!(receiver[..], [Action::Raise(_), Action::Take { blocks: 1, .. }]), "{receiver:?}");
    assert!(matches!(&small(super::SMALL_BYTES + 1, 0, away)[..], [None, Some(_)]));
    assert!(matches!(&small(super::SMALL_BYTES / 2, 8, away)[..], [Some(_), Some(_)]));
    assert!(matches!(&small(super::SMALL_BYTES / 8, 1, away)[..], [None, Some(_)]), "copied byte by byte");
    assert_eq!(small(100, 0, EndRanks { src: 1, dst: 1 }), [None, None]);
}

#[test]
fn what_stays_in_a_gpu_counts_less_and_comes_after_what_others_wait_for() {
    let one_path = Options { max_paths: 1, ..Options::default() };
    let most = super::SMALL_BYTES;
    // The collective is an all-gather: the data of each rank is copied to the other rank and to the rank itself.
    let actions = |bytes: u64| -> Vec<Option<Box<[Action]>>> {
        let (parts, _, shared, _) =
            divided((2, 2), &[(0, 0, bytes), (0, 1, bytes), (1, 0, bytes), (1, 1, bytes)], &one_path).expect("divided");
        parts.parts.iter().map(|part| SmallPart::new(part, &shared).map(|small| small.actions)).collect()
    };
    for actions in actions(most / 2) {
        let actions = actions.expect("a kernel's");
        let is_raise = |action: &Action| matches!(action, Action::Raise(_));
        let is_take = |action: &Action| matches!(action, Action::Take { .. });
        let [ready, go, Action::Copy(_), there, Action::Copy(_), done] = &actions[..] else { panic!("{actions:?}") };
        assert!([ready, there].into_iter().all(is_raise) && [go, done].into_iter().all(is_take), "{actions:?}");
    }
    assert!(actions(most).iter().all(Option::is_none), "too much");
}

#[test]
fn what_kernels_pass_on_is_right_step_after_step() {
    let options = Options { host_path: false, relays: Relays::NONE, chunk_bytes: Some(256 << 10), ..Options::default() };
    for (ranks, blocks) in [(3, 1), (4, 3)] {
        let copies: Vec<_> = (1..ranks).map(|to| (0, to, LEAST_SHARED_BYTES + 40)).collect();
        let (parts, ends, mut shared, _) = divided((ranks, ranks), &copies, &options).expect("between ranks");
        assert!(parts.parts[1].copies().any(|copy| matches!(copy.from, Place::Destination { .. })), "passed on");
        shared.blocks = blocks;
        assert!(run(&parts, &ends, &shared, 10, None));
    }
}

#[test]
fn inboxes_are_for_few_bytes_that_go_straight_between_ranks() {
    let one_path = Options { max_paths: 1, ..Options::default() };
    let most = 512 << 10;
    let eager = |copies: &[(u32, u32, u64)], options: &Options| divided((3, 3), copies, options).expect("between ranks").3;
    let is_eager = |copies: &[(u32, u32, u64)], options: &Options| eager(copies, options).is_some();
    let flags = |copies: &[(u32, u32, u64)]| eager(copies, &one_path).expect("few").flags.into_keys().collect::<Vec<_>>();
    assert!(is_eager(&[(0, 1, most), (1, 0, 8)], &one_path));
    assert!(is_eager(&[(0, 1, 8), (1, 2, 8), (1, 0, 8), (2, 1, 8), (0, 2, 0)], &one_path));
    assert!(!is_eager(&[(0, 1, most), (0, 1, 1), (1, 0, 8)], &one_path), "too many bytes");
    assert_eq!(flags(&[(0, 1, 8), (1, 0, 8), (0, 2, 8)]), [(0, 1), (0, 2), (1, 0), (2, 0)], "back too where no bytes go");
    assert!(!is_eager(&[(0, 1, most), (1, 0, most)], &several_paths()), "through other GPUs");
    assert!(!is_eager(&[(0, 1, 8), (1, 0, 8)].repeat(30), &one_path), "more than one launch takes");
}

#[test]
fn a_kernel_whose_wait_is_lost_and_later_launches_write_and_raise_nothing() {
    const BYTES: u64 = 20_000;
    let (from, to, flags) = (Memory::new(BYTES), Memory::new(BYTES), zeros(4));
    let flag = |index: u64| address_of(&flags) + 8 * index;
    let copy = Segment { dst: to.base, src: from.base, bytes: BYTES };
    let [lost, up, raised] = [Action::Take { flag: flag(0), blocks: 2 }, Action::Take { flag: flag(1), blocks: 1 }, Action::Raise(flag(2))]
        .map(|action| action.segment(&[], &[]));
    for blocks in [1, 3] {
        for actions in [&[up, lost, copy, raised][..], &[lost, copy, raised, up, copy], &[lost, copy, up, copy, raised], &[lost]] {
            let (words, stop) = (zeros(ActionGrid::WORDS), zeros(2));
            flags[1].store(1, Ordering::Relaxed);
            to.each(|_, byte| *byte = 1);
            thread::scope(|scope| {
                scope.spawn(|| launch(actions, blocks, &words, address_of(&stop), 0));
                stop[0].store(1, Ordering::Release);
            });
            // The lost flag is set later, by the peer or by another process that now uses it. The next communication step must be abandoned
            // in any case.
            flags[0].store(2, Ordering::Release);
            launch(&[copy, raised, lost, copy, raised], blocks, &words, address_of(&stop), 0);
            to.each(|_, byte| assert_eq!(*byte, 1, "{blocks} blocks: memory that was not granted was written to"));
            assert_eq!([0, 1, 2].map(|flag| flags[flag].load(Ordering::Acquire)), [2, 1, 0], "{blocks} blocks: nothing is taken or raised");
            assert_eq!(words[ABANDONED].load(Ordering::Relaxed), 1);
            flags[0].store(0, Ordering::Relaxed);
        }
    }
}

#[test]
fn what_comes_before_a_lost_wait_is_done() {
    let (from, to, flags) = (Memory::new(20_000), Memory::new(20_000), zeros(2));
    let [raised, lost] = [Action::Raise(address_of(&flags)), Action::Take { flag: address_of(&flags) + 8, blocks: 1 }]
        .map(|action| action.segment(&[], &[]));
    let copy = Segment { dst: to.base, src: from.base, bytes: 20_000 };
    for blocks in [1, 3] {
        to.each(|_, byte| *byte = 1);
        flags[0].store(0, Ordering::Relaxed);
        let stop = zeros(2);
        stop[0].store(1, Ordering::Relaxed);
        launch(&[copy, raised, lost], blocks, &zeros(ActionGrid::WORDS), address_of(&stop), 0);
        to.each(|_, byte| assert_eq!(*byte, 0xEE));
        assert_eq!(flags[0].load(Ordering::Acquire), u64::from(blocks));
    }
}

#[test]
fn a_kernel_that_waits_for_long_says_so_and_one_whose_flag_is_up_does_not() {
    let (flags, words, stop) = (zeros(1), zeros(ActionGrid::WORDS), zeros(2));
    let take = [Action::Take { flag: address_of(&flags), blocks: 1 }.segment(&[], &[])];
    let wait = || launch(&take, 1, &words, address_of(&stop), 0);
    flags[0].store(1, Ordering::Release);
    wait();
    assert_eq!(stop[1].load(Ordering::Relaxed), 0);
    thread::scope(|scope| {
        scope.spawn(wait);
        while stop[1].load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        flags[0].store(1, Ordering::Release);
    });
    assert_eq!(
        (stop[0].load(Ordering::Relaxed), flags[0].load(Ordering::Relaxed)),
        (0, 0),
        "it has not ended the wait, and the flag was taken"
    );
}

#[test]
fn what_waits_for_producers_comes_after_them_and_never_in_their_stream() {
    let machine = machine();
    let (bytes, ends) = (1 << 20, [EndRanks { src: 0, dst: 1 }, EndRanks { src: 1, dst: 0 }]);
    let shape = |from, to| Shape {
        source: 0,
        dst_device: DeviceId::gpu(to),
        src_device: DeviceId::gpu(from),
        dst_kind: MemoryKind::Device,
        src_kind: MemoryKind::Device,
        bytes,
    };
    let shapes = [shape(0, 1), shape(1, 0)];
    let options = several_paths();
    let planned = plan::plan(&machine, &shapes, &options).expect("a plan");
    let partitions = [Partitions::new(bytes, 7), Partitions::new(bytes, 3)];
    let program = plan::partition(&planned, &partitions);
    plan::validate(&program, options.staging_bytes).expect("a valid program");
    let batch = RankedBatch { ranks: 2, shapes: &shapes, ends: &ends, owners: &[0, 1, 1, 1] };
    let mut parts = divide(&program, &batch);
    check_parts(&program, &batch, &parts).expect("a right division");
    let before = parts.flags.len();
    let flags = add_partition_flags(&mut parts, &batch, &partitions, PartitionMove::Early, true).expect("each reads its own");
    assert!(flags.iter().all(|of| of.writers > 1), "several paths: {flags:?}");
    let memory = || shapes.iter().map(|shape| Memory::new(shape.bytes)).collect();
    let shared = Shared {
        inboxes: Vec::new(),
        src: memory(),
        dst: memory(),
        rings: program.rings.iter().map(|ring| Memory::new(ring.bytes())).collect(),
        slot_bytes: program.rings.iter().map(|ring| ring.slot_bytes).collect(),
        host_rings: program.rings.iter().map(|ring| ring.device.is_host()).collect(),
        inside: shapes.iter().map(|shape| shape.src_device == shape.dst_device).collect(),
        first: (0..shapes.len()).collect(),
        flags: zeros(parts.flags.len() as u64),
        blocks: 1,
    };
    // Flags of partitions stay set until the next communication step. Their owner resets them before that step begins.
    let of_rank = |rank: u32| -> Vec<usize> { (before..parts.flags.len()).filter(|flag| parts.flags[*flag].taker == rank).collect() };
    let backends = [AtOnce::default(), AtOnce::default()];
    let step_of_rank = |rank: usize| {
        let (backend, shared) = (&backends[rank], &shared);
        let takes = parts.parts[rank].arms.iter().map(|flag| shared.flag(*flag)).collect();
        let armed = Armed { takes, reset: None, orders: None, is_after: false };
        let mut bound = BoundPart::new(&parts.parts[rank], shared, None, Some(armed), &StepFate::default(), backend).expect("bound");
        let own = of_rank(rank as u32);
        let ready: Vec<u32> = (0..partitions[rank].count).map(|partition| flags[rank].ready + partition).collect();
        let arrived: Vec<FlagId> = (0..partitions[1 - rank].count).flat_map(|partition| flags[1 - rank].arrived(partition)).collect();
        Some(move || {
            own.iter().for_each(|flag| shared.flags[*flag].store(0, Ordering::Relaxed));
            lock(&backend.awaiting).clear();
            bound.arm(CALLERS, false, backend).expect("armed");
            assert!(lock(&backend.awaiting).is_empty(), "nothing waits before the producers");
            ready.iter().for_each(|flag| shared.flags[*flag as usize].store(1, Ordering::Release));
            bound.enqueue(CALLERS, false, backend).expect("done");
            let awaiting = lock(&backend.awaiting);
            assert!(!awaiting.is_empty() && !awaiting.contains(&CALLERS), "{awaiting:?}");
            assert!(arrived.iter().all(|flag| shared.flags[flag.0 as usize].load(Ordering::Acquire) == 1), "all have arrived");
        })
    };
    let steps: Vec<_> = (0..2).map(step_of_rank).collect();
    run_steps(&ends, &shared, 50, steps.into_iter());
    assert_eq!(backends.map(|backend| backend.kernels.into_inner()), [0, 0], "a kernel would wait behind its producers");
}
