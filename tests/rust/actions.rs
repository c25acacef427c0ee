//! Parts of a step, a thread for each rank, move the right bytes step after step: small ones as one kernel does them, by its CPU build; all
//! of them bound to a backend that does at once what it is asked for.

use super::{Addresses, Armed, BoundPart, SmallPart};
use crate::backend::{
    Action, Allocation, Backend, BackendError, Completion, EventHandle, Execution, HostFunction, MemoryKind, Signal, SignalWait,
    StreamHandle,
};
use crate::bridge::run_actions_on_cpu;
use crate::plan::{self, Options, Place, Shape};
use crate::program::ranks::{EndRanks, FlagId, Parts, RankedBatch, check_parts, divide};
use crate::program::{PartitionUse, Partitions, add_partition_flags};
use crate::sync::{Mutex, lock};
use crate::topology::{Costs, DeviceId, Machine, preset};
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

/// Bytes that several threads write, by their address alone.
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

    /// Calls `look` with each byte. Nobody else may touch them meanwhile.
    fn each(&self, mut look: impl FnMut(usize, &mut u8)) {
        for i in 0..self.bytes {
            // SAFETY: inside of the vector, which lives. What orders the threads is what the test is about; a rank looks at what it sends and
            // receives between its steps, when no other may.
            look(i, unsafe { &mut *std::ptr::with_exposed_provenance_mut(self.base as usize + i) });
        }
    }
}

/// Memory of all ranks: ends of transfers, staging rings, flags.
struct Shared {
    src: Vec<Memory>,
    dst: Vec<Memory>,
    rings: Vec<Memory>,
    slot_bytes: Vec<u64>,
    flags: Vec<AtomicU64>,
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

    /// Each rank has one GPU in sight.
    fn device(&self, _: DeviceId) -> DeviceId {
        DeviceId::gpu(0)
    }
}

fn pattern(transfer: usize, step: u64, offset: usize) -> u8 {
    (transfer as u64 * 37 + step * 101 + offset as u64 * 7 + (offset as u64 >> 8)) as u8
}

/// GPUs that are joined pairwise, where everything is free: even few bytes take several paths.
fn machine() -> Machine {
    let mut topology = preset("beluga").expect("listed");
    for cost in Costs::TABLE {
        if cost.name != "kernel_efficiency" {
            *(cost.of_mut)(&mut topology.costs) = 0.0;
        }
    }
    Machine::new(topology).expect("well formed")
}

/// Lets every rank do its part, so many steps, as fast as it can. `none` where a rank is not among those that take part.
fn run_steps<Step: FnMut() + Send>(ends: &[EndRanks], shared: &Shared, steps: u64, ranks: impl Iterator<Item = Option<Step>>) {
    thread::scope(|scope| {
        for (rank, step_of_rank) in ranks.enumerate() {
            let Some(mut step_of_rank) = step_of_rank else { continue };
            scope.spawn(move || {
                let own = |of: fn(&EndRanks) -> u32| ends.iter().enumerate().filter(move |(_, ends)| of(ends) as usize == rank);
                for step in 0..steps {
                    for (transfer, _) in own(|ends| ends.src) {
                        shared.src[transfer].each(|i, byte| *byte = pattern(transfer, step, i));
                    }
                    step_of_rank();
                    for (transfer, _) in own(|ends| ends.dst) {
                        shared.dst[transfer].each(|i, byte| {
                            assert_eq!(*byte, pattern(transfer, step, i), "rank {rank}, step {step}, transfer {transfer}, byte {i}");
                            *byte = 0xEE;
                        });
                    }
                }
            });
        }
    });
}

/// Every rank's part by one kernel.
fn run(parts: &Parts, ends: &[EndRanks], shared: &Shared, steps: u64) {
    let of_ranks: Vec<Option<SmallPart>> = parts.parts.iter().map(|part| SmallPart::new(part, shared)).collect();
    // A rank that waits for nobody takes no part.
    let raised_for_nothing = |rank: usize| parts.flags.iter().any(|flag| flag.raiser as usize == rank);
    assert!(of_ranks.iter().enumerate().all(|(rank, small)| small.is_some() || !raised_for_nothing(rank)));
    if of_ranks.iter().flatten().any(|small| small.actions.len() > 120) {
        return;
    }
    let kernels = of_ranks.iter().map(|small| {
        let small = small.as_ref()?;
        let actions: Vec<_> = small.actions.iter().map(|action| action.segment(&small.endpoints, &small.program.transfers)).collect();
        // SAFETY: ends and flags are those of `shared`, which outlives the threads.
        Some(move || unsafe { run_actions_on_cpu(actions.as_ptr(), actions.len()) })
    });
    run_steps(ends, shared, steps, kernels);
}

/// Does at once, on the calling thread, what it is asked to enqueue, so that streams and events order nothing that is not in order already.
#[derive(Default)]
struct AtOnce {
    /// Kernels that have waited for flags.
    kernels: AtomicUsize,
    /// Streams that have waited for partitions.
    awaiting: Mutex<Vec<StreamHandle>>,
}

/// A stream that the backend has not made.
const CALLERS: StreamHandle = StreamHandle(65);

fn counter(address: u64) -> &'static AtomicU64 {
    // SAFETY: a flag of `Shared`, which outlives the threads that use it.
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
            // SAFETY: memory of `Shared`; what orders the threads is what the test is about.
            unsafe { from.copy_to_nonoverlapping(to, copy.bytes as usize) };
        }
        Ok(None)
    }
    fn stream_raise_signals(&self, _: StreamHandle, signals: &[Signal]) -> Result<(), BackendError> {
        signals.iter().for_each(|signal| assert_eq!(counter(signal.counter).swap(signal.value, Ordering::Release), 0, "it was taken"));
        Ok(())
    }
    fn stream_take_flags(&self, stream: StreamHandle, raises: &[Signal], flags: &[u64]) -> Result<(), BackendError> {
        self.stream_raise_signals(stream, raises)?;
        for flag in flags {
            while counter(*flag).load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            counter(*flag).store(0, Ordering::Relaxed);
        }
        Ok(())
    }
    fn stream_await_flags(&self, stream: StreamHandle, flags: &[u64]) -> Result<(), BackendError> {
        lock(&self.awaiting).push(stream);
        while flags.iter().any(|flag| counter(*flag).load(Ordering::Acquire) == 0) {
            thread::yield_now();
        }
        Ok(())
    }
    fn stream_run_actions(&self, execution: &Execution<'_>, actions: &[Action]) -> Result<bool, BackendError> {
        self.kernels.fetch_add(1, Ordering::Relaxed);
        let actions: Vec<_> = actions.iter().map(|action| action.segment(execution.endpoints, &execution.program.transfers)).collect();
        // SAFETY: ends and flags are those of `Shared`.
        unsafe { run_actions_on_cpu(actions.as_ptr(), actions.len()) };
        Ok(true)
    }
}

/// Every rank's part as it is bound to streams. Returns how many kernels have waited for flags.
fn run_bound(parts: &Parts, ends: &[EndRanks], shared: &Shared, by: SignalWait, steps: u64) -> usize {
    let backend = AtOnce::default();
    let bound = parts.parts.iter().map(|part| {
        let (mut bound, backend) = (BoundPart::new(part, shared, by, None, &backend).expect("bound"), &backend);
        Some(move || bound.enqueue(CALLERS, false, backend).expect("done"))
    });
    run_steps(ends, shared, steps, bound.collect::<Vec<_>>().into_iter());
    backend.kernels.into_inner()
}

/// Copies from rank to rank with their bytes, planned for all, divided, and given memory. `None` where no rank moves anything for another.
fn divided(ranks: u32, copies: &[(u32, u32, u64)]) -> Option<(Parts, Vec<EndRanks>, Shared)> {
    let machine = machine();
    let ends: Vec<EndRanks> = copies.iter().map(|&(src, dst, _)| EndRanks { src: src % ranks, dst: dst % ranks }).collect();
    let device = MemoryKind::Device;
    let shapes: Vec<Shape> = copies
        .iter()
        .zip(&ends)
        .map(|(&(_, _, bytes), ends)| {
            let (src_device, dst_device) = (DeviceId::gpu(ends.src), DeviceId::gpu(ends.dst));
            Shape { dst_device, src_device, dst_kind: device, src_kind: device, bytes }
        })
        .collect();
    let options = Options { min_bytes: Some(1), chunk_bytes: Some(4096), ..Options::default() };
    let planned = plan::plan(&machine, &shapes, &options).expect("a plan");
    let owners: Vec<u32> = (0..machine.gpu_count()).map(|gpu| gpu.min(ranks - 1)).collect();
    let batch = RankedBatch { ranks, shapes: &shapes, ends: &ends, owners: &owners };
    let parts = divide(&planned.program, &batch);
    check_parts(&planned.program, &batch, &parts).expect("a right division");
    let memory = || shapes.iter().map(|shape| Memory::new(shape.bytes)).collect();
    let shared = Shared {
        src: memory(),
        dst: memory(),
        rings: planned.program.rings.iter().map(|ring| Memory::new(ring.bytes())).collect(),
        slot_bytes: planned.program.rings.iter().map(|ring| ring.slot_bytes).collect(),
        flags: parts.flags.iter().map(|_| AtomicU64::new(0)).collect(),
    };
    // A rank alone with itself needs no flags, and its copies are the backend's.
    let between = ends.iter().zip(&shapes).any(|(ends, shape)| ends.src != ends.dst && shape.bytes > 0);
    let alone = ends.iter().zip(&shapes).any(|(ends, shape)| ends.src == ends.dst && shape.bytes > 0);
    (between && !alone).then_some((parts, ends, shared))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn small_parts_move_the_right_bytes_step_after_step_however_far_ahead_a_rank_is(
        ranks in 2_u32..=4,
        copies in prop::collection::vec((0_u32..4, 0_u32..4, 0_u64..20_000), 1..6),
    ) {
        let divided = divided(ranks, &copies);
        prop_assume!(divided.is_some());
        let (parts, ends, shared) = divided.expect("as assumed");
        run(&parts, &ends, &shared, 50);
    }

    #[test]
    fn parts_bound_to_streams_move_the_right_bytes_whoever_waits_for_flags(
        ranks in 2_u32..=4,
        copies in prop::collection::vec((0_u32..4, 0_u32..4, 0_u64..300_000), 1..6),
        is_kernel in any::<bool>(),
    ) {
        let divided = divided(ranks, &copies);
        prop_assume!(divided.is_some());
        let (parts, ends, shared) = divided.expect("as assumed");
        let by = if is_kernel { SignalWait::Kernel } else { SignalWait::Operation };
        let has_small = parts.parts.iter().any(|part| SmallPart::new(part, &shared).is_some());
        prop_assert_eq!(run_bound(&parts, &ends, &shared, by, 10) > 0, is_kernel && has_small, "kernels stand around no copy engine");
    }
}

#[test]
fn what_is_much_or_of_several_gpus_or_awaits_nothing_is_left_to_copy_engines() {
    let machine = machine();
    let shape = |from, to, bytes| Shape {
        dst_device: DeviceId::gpu(to),
        src_device: DeviceId::gpu(from),
        dst_kind: MemoryKind::Device,
        src_kind: MemoryKind::Device,
        bytes,
    };
    let small = |bytes, ends: EndRanks| {
        let shapes = [shape(ends.src, ends.dst, bytes)];
        let options = Options { max_paths: 1, ..Options::default() };
        let planned = plan::plan(&machine, &shapes, &options).expect("a plan");
        let batch = RankedBatch { ranks: 2, shapes: &shapes, ends: &[ends], owners: &[0, 1, 1, 1] };
        let parts = divide(&planned.program, &batch);
        let flags = parts.flags.iter().map(|_| AtomicU64::new(0)).collect();
        let shared =
            Shared { src: vec![Memory::new(bytes)], dst: vec![Memory::new(bytes)], rings: Vec::new(), slot_bytes: Vec::new(), flags };
        parts.parts.iter().map(|part| SmallPart::new(part, &shared).map(|small| small.actions)).collect::<Vec<_>>()
    };
    let away = EndRanks { src: 0, dst: 1 };
    let parts = small(super::SMALL_BYTES, away);
    let [Some(sender), Some(receiver)] = &parts[..] else { panic!("{parts:?}") };
    assert!(matches!(sender[..], [Action::Take(_), Action::Copy(0), Action::Raise(_)]), "{sender:?}");
    assert!(matches!(receiver[..], [Action::Raise(_), Action::Take(_)]), "{receiver:?}");
    // The receiver moves nothing, so one kernel may wait for it whatever the sender does.
    assert!(matches!(&small(super::SMALL_BYTES + 1, away)[..], [None, Some(_)]));
    assert_eq!(small(100, EndRanks { src: 1, dst: 1 }), [None, None]);
}

#[test]
fn what_waits_for_producers_comes_after_them_and_never_in_their_stream() {
    let machine = machine();
    let (bytes, ends) = (1 << 20, [EndRanks { src: 0, dst: 1 }, EndRanks { src: 1, dst: 0 }]);
    let shape = |from, to| Shape {
        dst_device: DeviceId::gpu(to),
        src_device: DeviceId::gpu(from),
        dst_kind: MemoryKind::Device,
        src_kind: MemoryKind::Device,
        bytes,
    };
    let shapes = [shape(0, 1), shape(1, 0)];
    let options = Options { min_bytes: Some(1), chunk_bytes: Some(4096), ..Options::default() };
    let planned = plan::plan(&machine, &shapes, &options).expect("a plan");
    let partitions = [Partitions::new(bytes, 7), Partitions::new(bytes, 3)];
    let program = plan::partition(&planned, &partitions);
    plan::validate(&program, options.staging_bytes).expect("a valid program");
    let batch = RankedBatch { ranks: 2, shapes: &shapes, ends: &ends, owners: &[0, 1, 1, 1] };
    let mut parts = divide(&program, &batch);
    check_parts(&program, &batch, &parts).expect("a right division");
    let before = parts.flags.len();
    let flags = add_partition_flags(&mut parts, &batch, &partitions, PartitionUse::Moved { tells: true }).expect("each reads its own");
    assert!(flags.iter().all(|of| of.writers > 1), "several paths: {flags:?}");
    let memory = || shapes.iter().map(|shape| Memory::new(shape.bytes)).collect();
    let shared = Shared {
        src: memory(),
        dst: memory(),
        rings: program.rings.iter().map(|ring| Memory::new(ring.bytes())).collect(),
        slot_bytes: program.rings.iter().map(|ring| ring.slot_bytes).collect(),
        flags: parts.flags.iter().map(|_| AtomicU64::new(0)).collect(),
    };
    // Flags of partitions stay up until the step after: whose they are sets them back before it begins.
    let of_rank = |rank: u32| -> Vec<usize> { (before..parts.flags.len()).filter(|flag| parts.flags[*flag].taker == rank).collect() };
    let backends = [AtOnce::default(), AtOnce::default()];
    let step_of_rank = |rank: usize| {
        let (backend, shared) = (&backends[rank], &shared);
        let armed = Armed::new(&parts.parts[rank], shared, DeviceId::gpu(0), 0, 0, 0);
        let mut bound = BoundPart::new(&parts.parts[rank], shared, SignalWait::Kernel, Some(armed), backend).expect("bound");
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
