//! Tests the host backend: copies are correct, and work has the same order as on CUDA. The programs are built by hand.
//!
//! A test that needs unfinished work closes a [`Gate`] in a stream, so that no test depends on timing.

use mpgpu_backend::{Backend, BackendError, Completion, CompletionState, Endpoints, EventHandle, Execution, MemoryKind, StreamHandle};
use mpgpu_core::plan::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId};
use mpgpu_core::topology::DeviceId;
use mpgpu_devices::host::HostBackend;
use smallvec::smallvec;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier, Mutex};

const DEFAULT: StreamHandle = StreamHandle(0);
const GPU0: DeviceId = DeviceId::gpu(0);
const GPU1: DeviceId = DeviceId::gpu(1);

/// Memory of the backend that a test reads and writes while no work uses it.
struct Buffer<'a> {
    backend: &'a HostBackend,
    address: u64,
    bytes: usize,
}

impl<'a> Buffer<'a> {
    fn new(backend: &'a HostBackend, device: DeviceId, content: &[u8]) -> Self {
        let address = backend.allocate(device, content.len() as u64).unwrap();
        // SAFETY: newly allocated with this size.
        unsafe { (address as *mut u8).copy_from_nonoverlapping(content.as_ptr(), content.len()) };
        Buffer { backend, address, bytes: content.len() }
    }

    fn content(&self) -> Vec<u8> {
        // SAFETY: the test has waited for the work that writes here.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.bytes) }.to_vec()
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        self.backend.synchronize().unwrap();
        self.backend.free(self.address).unwrap();
    }
}

/// Host function that blocks a stream until the gate is opened or dropped.
struct Gate(#[allow(dead_code, reason = "dropping it opens the gate")] Sender<()>);

impl Gate {
    fn close(backend: &HostBackend, stream: StreamHandle) -> Gate {
        let (sender, receiver) = channel::<()>();
        let receiver = Mutex::new(receiver);
        backend.launch_host(stream, Box::new(move || assert!(receiver.lock().unwrap().recv().is_err()))).unwrap();
        Gate(sender)
    }

    fn open(self) {}
}

/// Returns bytes that differ from adjacent bytes and from the bytes for other seeds.
fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..bytes).map(|_| random.next() as u8).collect()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Returns a program of one plain copy.
fn one_copy(bytes: u64) -> Arc<Program> {
    direct(&[bytes], Mechanism::Copy)
}

/// Returns a program with one copy for each transfer. With `Mechanism::Copy` each copy is an operation; otherwise one operation has all
/// copies.
fn direct(transfers: &[u64], mechanism: Mechanism) -> Arc<Program> {
    let copies = (0..).zip(transfers).map(|(transfer, &bytes)| Copy {
        from: Place::Source { transfer, offset: 0 },
        to: Place::Destination { transfer, offset: 0 },
        bytes,
    });
    let op = |copies| Op { lane: LaneId(0), mechanism, copies, after: smallvec![] };
    let ops = match mechanism {
        Mechanism::Copy => copies.map(|copy| op(smallvec![copy])).collect(),
        Mechanism::Batch | Mechanism::Kernel | Mechanism::Thread => vec![op(copies.collect())],
    };
    Arc::new(Program { sources: Vec::new(), transfers: transfers.to_vec(), lanes: vec![Lane::new(GPU0)], rings: vec![], ops })
}

/// Returns a program that copies one transfer in chunks through rings of staging slots. Each path has one ring and two internal streams. A
/// chunk is copied into its slot after the previous contents of the slot were copied out, and is then copied out.
fn relay(bytes: u64, chunk: u64, paths: u32, slots: u32) -> Arc<Program> {
    let mut program = Program {
        sources: Vec::new(),
        transfers: vec![bytes],
        lanes: vec![Lane::new(GPU0); 2 * paths as usize],
        rings: vec![Ring { device: GPU1, slot_bytes: chunk, slots }; paths as usize],
        ops: vec![],
    };
    for (index, offset) in (0u32..).zip((0..bytes).step_by(chunk as usize)) {
        let (path, round) = (index % paths, index / paths);
        let place = Place::Slot { ring: RingId(path), slot: round % slots };
        let bytes = chunk.min(bytes - offset);
        // Each chunk has two operations, numbered 2 * index and 2 * index + 1.
        let emptied = (round >= slots).then(|| OpId(2 * (index - slots * paths) + 1));
        program.ops.push(Op {
            lane: LaneId(2 * path),
            mechanism: Mechanism::Copy,
            copies: smallvec![Copy { from: Place::Source { transfer: 0, offset }, to: place, bytes }],
            after: emptied.into_iter().collect(),
        });
        program.ops.push(Op {
            lane: LaneId(2 * path + 1),
            mechanism: Mechanism::Copy,
            copies: smallvec![Copy { from: place, to: Place::Destination { transfer: 0, offset }, bytes }],
            after: smallvec![OpId(2 * index)],
        });
    }
    Arc::new(program)
}

fn execute_with(
    backend: &HostBackend,
    program: &Arc<Program>,
    endpoints: &[(u64, u64)],
    rings: &[u64],
    stream: StreamHandle,
    after: &[Completion],
    verify: bool,
) -> Result<Completion, BackendError> {
    let endpoints = endpoints.iter().map(|&(dst, src)| Endpoints { dst, src }).collect();
    let rings = rings.into();
    let execution = Execution { after, verify, ..Execution::new(program, &endpoints, &rings, stream) };
    backend.submit(&execution).map(|end| end.expect("a completion"))
}

/// Enqueues a copy of a whole buffer.
fn copy(backend: &HostBackend, dst: &Buffer, src: &Buffer, stream: StreamHandle) -> Completion {
    execute_with(backend, &one_copy(src.bytes as u64), &[(dst.address, src.address)], &[], stream, &[], true).unwrap()
}

fn stream(backend: &HostBackend) -> StreamHandle {
    backend.create_stream(GPU0).unwrap()
}

/// Shared log to which host functions append.
#[derive(Clone, Default)]
struct Record(Arc<Mutex<Vec<u32>>>);

impl Record {
    fn note(&self, backend: &HostBackend, stream: StreamHandle, entry: u32) {
        let record = Arc::clone(&self.0);
        backend.launch_host(stream, Box::new(move || record.lock().unwrap().push(entry))).unwrap();
    }

    fn entries(&self) -> Vec<u32> {
        self.0.lock().unwrap().clone()
    }
}

// Tests of streams.

#[test]
fn work_of_one_stream_runs_in_order() {
    let backend = HostBackend::new(2, 1);
    let stream = stream(&backend);
    let first = Buffer::new(&backend, GPU0, &pattern(1, 10_000));
    let chain: Vec<_> = (0..200).map(|i| Buffer::new(&backend, DeviceId::gpu(i % 2), &pattern(2, 10_000))).collect();
    let mut from = &first;
    for to in &chain {
        copy(&backend, to, from, stream);
        from = to;
    }
    backend.synchronize_stream(stream).unwrap();
    assert_eq!(chain.last().unwrap().content(), pattern(1, 10_000));
}

#[test]
fn host_functions_and_copies_of_one_stream_alternate_in_order() {
    let backend = HostBackend::new(2, 1);
    let stream = stream(&backend);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sources: Vec<_> = (0..100).map(|i| Buffer::new(&backend, GPU0, &[i])).collect();
    let target = Buffer::new(&backend, GPU1, &[255]);
    for source in &sources {
        copy(&backend, &target, source, stream);
        let (seen, address) = (Arc::clone(&seen), target.address);
        // SAFETY: stream order puts this read between two copies into the byte.
        backend.launch_host(stream, Box::new(move || seen.lock().unwrap().push(unsafe { *(address as *const u8) }))).unwrap();
    }
    backend.synchronize_stream(stream).unwrap();
    assert_eq!(*seen.lock().unwrap(), (0..100).collect::<Vec<u8>>());
}

#[test]
fn a_blocked_stream_stops_no_other() {
    let backend = HostBackend::new(2, 1);
    let (blocked, other) = (stream(&backend), stream(&backend));
    let src = Buffer::new(&backend, GPU0, &pattern(3, 5000));
    let (held, free) = (Buffer::new(&backend, GPU1, &[0; 5000]), Buffer::new(&backend, GPU1, &[0; 5000]));
    let gate = Gate::close(&backend, blocked);
    let late = copy(&backend, &held, &src, blocked);
    copy(&backend, &free, &src, other).wait().unwrap();
    assert_eq!(free.content(), src.content());
    assert!(!late.is_done().unwrap());
    gate.open();
    late.wait().unwrap();
    assert_eq!(held.content(), src.content());
}

#[test]
fn blocked_host_functions_on_many_streams_leave_the_copies_running() {
    let backend = HostBackend::new(2, 1);
    // There are more gates than copy threads on any machine.
    let gates: Vec<_> = (0..100).map(|_| Gate::close(&backend, stream(&backend))).collect();
    let src = Buffer::new(&backend, GPU0, &pattern(4, 100));
    let dst = Buffer::new(&backend, GPU1, &[0; 100]);
    copy(&backend, &dst, &src, stream(&backend)).wait().unwrap();
    assert_eq!(dst.content(), src.content());
    drop(gates);
}

#[test]
fn host_functions_on_different_streams_can_wait_for_each_other() {
    let backend = HostBackend::new(1, 1);
    let barrier = Arc::new(Barrier::new(8));
    for _ in 0..8 {
        let barrier = Arc::clone(&barrier);
        backend.launch_host(stream(&backend), Box::new(move || _ = barrier.wait())).unwrap();
    }
    backend.synchronize().unwrap();
}

#[test]
fn the_default_stream_is_ordered_but_not_with_others() {
    let backend = HostBackend::new(1, 1);
    let other = stream(&backend);
    let record = Record::default();
    let gate = Gate::close(&backend, DEFAULT);
    record.note(&backend, DEFAULT, 2);
    record.note(&backend, DEFAULT, 3);
    record.note(&backend, other, 1);
    backend.synchronize_stream(other).unwrap();
    assert_eq!(record.entries(), [1]);
    gate.open();
    backend.synchronize_stream(DEFAULT).unwrap();
    assert_eq!(record.entries(), [1, 2, 3]);
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    let backend = HostBackend::new(1, 1);
    let stream = stream(&backend);
    let record = Record::default();
    let gate = Gate::close(&backend, stream);
    record.note(&backend, stream, 1);
    backend.destroy_stream(stream).unwrap();
    record.note(&backend, DEFAULT, 0);
    backend.synchronize_stream(DEFAULT).unwrap();
    assert_eq!(record.entries(), [0]);
    gate.open();
    backend.synchronize().unwrap();
    assert_eq!(record.entries(), [0, 1]);
}

#[test]
fn a_host_function_may_destroy_its_own_stream() {
    let backend = Arc::new(HostBackend::new(1, 1));
    let stream = stream(&backend);
    let (sender, receiver) = channel();
    let weak = Arc::downgrade(&backend);
    let work = move || sender.send(weak.upgrade().unwrap().destroy_stream(stream).is_ok()).unwrap();
    backend.launch_host(stream, Box::new(work)).unwrap();
    assert!(receiver.recv().unwrap());
    assert!(backend.synchronize_stream(stream).is_err());
    backend.synchronize().unwrap();
}

#[test]
fn destroyed_handles_and_inventions_are_refused() {
    let backend = HostBackend::new(1, 1);
    let dead = stream(&backend);
    backend.destroy_stream(dead).unwrap();
    let event = backend.create_event().unwrap();
    let dead_event = backend.create_event().unwrap();
    backend.destroy_event(dead_event).unwrap();
    // The next stream reuses the number of the destroyed stream. The old handle must not refer to the new stream.
    let alive = stream(&backend);
    assert_ne!(alive, dead);
    let other = HostBackend::new(1, 1);
    let foreign = stream(&other);
    for handle in [dead, foreign, StreamHandle(1), StreamHandle(2), StreamHandle(usize::MAX), StreamHandle(alive.0 & 0xffff_ffff)] {
        let error = |result: Result<(), BackendError>| match result {
            Err(BackendError::InvalidHandle(value, "stream")) => assert_eq!(value, handle.0),
            other => panic!("{handle:?}: {other:?}"),
        };
        error(backend.destroy_stream(handle));
        error(backend.synchronize_stream(handle));
        error(backend.launch_host(handle, Box::new(|| panic!("must not run"))));
        error(backend.record_event(event, handle));
        error(backend.stream_wait_event(handle, event));
        error(execute_with(&backend, &one_copy(1), &[(0, 0)], &[], handle, &[], false).map(|_| ()));
    }
    assert!(matches!(backend.destroy_stream(DEFAULT), Err(BackendError::InvalidHandle(0, "stream"))));
    let foreign_event = other.create_event().unwrap();
    for handle in [dead_event, foreign_event, EventHandle(0), EventHandle(1), EventHandle(usize::MAX)] {
        let error = |result: Result<(), BackendError>| assert!(matches!(result, Err(BackendError::InvalidHandle(_, "event"))));
        error(backend.destroy_event(handle));
        error(backend.record_event(handle, alive));
        error(backend.stream_wait_event(alive, handle));
        error(backend.synchronize_event(handle));
    }
    backend.synchronize().unwrap();
}

// Tests of events.

#[test]
fn an_event_that_was_never_recorded_counts_as_done() {
    let backend = HostBackend::new(1, 1);
    let event = backend.create_event().unwrap();
    backend.synchronize_event(event).unwrap();
    backend.stream_wait_event(DEFAULT, event).unwrap();
    backend.synchronize_stream(DEFAULT).unwrap();
}

#[test]
fn an_event_orders_work_of_two_streams() {
    let backend = HostBackend::new(1, 1);
    let (a, b) = (stream(&backend), stream(&backend));
    let event = backend.create_event().unwrap();
    let record = Record::default();
    let gate = Gate::close(&backend, a);
    record.note(&backend, a, 1);
    backend.record_event(event, a).unwrap();
    backend.stream_wait_event(b, event).unwrap();
    record.note(&backend, b, 2);
    gate.open();
    backend.synchronize_stream(b).unwrap();
    assert_eq!(record.entries(), [1, 2]);
}

#[test]
fn a_wait_keeps_the_record_that_stood_when_it_was_enqueued() {
    let backend = HostBackend::new(1, 1);
    let (blocked, idle, early, late) = (stream(&backend), stream(&backend), stream(&backend), stream(&backend));
    let event = backend.create_event().unwrap();
    let record = Record::default();
    let gate = Gate::close(&backend, blocked);

    backend.record_event(event, blocked).unwrap();
    backend.stream_wait_event(late, event).unwrap();
    record.note(&backend, late, 2);
    // If the event is recorded again in another stream, earlier waits are not affected, and later waits do not depend on the old record.
    backend.record_event(event, idle).unwrap();
    backend.stream_wait_event(early, event).unwrap();
    record.note(&backend, early, 1);
    backend.synchronize_stream(early).unwrap();
    assert_eq!(record.entries(), [1]);
    // The order is reversed: a wait for a record that is complete is not delayed by a later record.
    backend.stream_wait_event(early, event).unwrap();
    backend.record_event(event, blocked).unwrap();
    record.note(&backend, early, 1);
    backend.synchronize_stream(early).unwrap();
    assert_eq!(record.entries(), [1, 1]);

    gate.open();
    backend.synchronize_event(event).unwrap();
    backend.synchronize_stream(late).unwrap();
    assert_eq!(record.entries(), [1, 1, 2]);
}

#[test]
fn an_event_does_not_cover_work_enqueued_after_its_record() {
    let backend = HostBackend::new(1, 1);
    let stream = stream(&backend);
    let event = backend.create_event().unwrap();
    let record = Record::default();
    record.note(&backend, stream, 1);
    backend.record_event(event, stream).unwrap();
    let gate = Gate::close(&backend, stream);
    backend.synchronize_event(event).unwrap();
    assert_eq!(record.entries(), [1]);
    gate.open();
}

#[test]
fn a_wait_outlives_its_event() {
    let backend = HostBackend::new(1, 1);
    let (a, b) = (stream(&backend), stream(&backend));
    let event = backend.create_event().unwrap();
    let record = Record::default();
    let gate = Gate::close(&backend, a);
    record.note(&backend, a, 1);
    backend.record_event(event, a).unwrap();
    backend.stream_wait_event(b, event).unwrap();
    backend.destroy_event(event).unwrap();
    record.note(&backend, b, 2);
    gate.open();
    backend.synchronize().unwrap();
    assert_eq!(record.entries(), [1, 2]);
}

// Tests of executions.

#[test]
fn every_mechanism_moves_the_right_bytes() {
    let backend = HostBackend::new(2, 1);
    let sizes = [1u64, 7, 24, 2400, 240_000, 1 << 20, 4096, 65_537];
    for mechanism in [Mechanism::Copy, Mechanism::Batch, Mechanism::Kernel] {
        let pairs: Vec<_> = (10..)
            .zip(sizes)
            .map(|(seed, bytes)| {
                let bytes = bytes as usize;
                (Buffer::new(&backend, GPU1, &vec![0; bytes]), Buffer::new(&backend, GPU0, &pattern(seed, bytes)))
            })
            .collect();
        let endpoints: Vec<_> = pairs.iter().map(|(dst, src)| (dst.address, src.address)).collect();
        execute_with(&backend, &direct(&sizes, mechanism), &endpoints, &[], DEFAULT, &[], true).unwrap().wait().unwrap();
        for (dst, src) in &pairs {
            assert!(dst.content() == src.content(), "{mechanism:?}, {} bytes", src.bytes);
        }
    }
}

#[test]
fn relays_respect_slots_lanes_and_dependencies() {
    let backend = HostBackend::new(2, 1);
    let mut random = Random(5);
    for round in 0..200 {
        let chunk = 1 + random.below(3000);
        let bytes = 1 + random.below(100 * chunk);
        let (paths, slots) = (1 + random.below(4) as u32, 1 + random.below(4) as u32);
        let program = relay(bytes, chunk, paths, slots);
        let src = Buffer::new(&backend, GPU0, &pattern(round, bytes as usize));
        let dst = Buffer::new(&backend, GPU1, &vec![0; bytes as usize]);
        let rings: Vec<_> = program.rings.iter().map(|ring| Buffer::new(&backend, GPU1, &vec![0; ring.bytes() as usize])).collect();
        let bases: Vec<_> = rings.iter().map(|ring| ring.address).collect();
        execute_with(&backend, &program, &[(dst.address, src.address)], &bases, DEFAULT, &[], true).unwrap().wait().unwrap();
        assert!(dst.content() == src.content(), "{bytes} bytes, {chunk} per chunk, {paths} paths, {slots} slots");
    }
}

#[test]
fn a_program_of_ten_thousand_operations_runs() {
    let backend = HostBackend::new(2, 1);
    let program = relay(5000 * 64, 64, 3, 2);
    assert_eq!(program.ops.len(), 10_000);
    let src = Buffer::new(&backend, GPU0, &pattern(6, 5000 * 64));
    let dst = Buffer::new(&backend, GPU1, &[0; 5000 * 64]);
    let rings: Vec<_> = program.rings.iter().map(|ring| Buffer::new(&backend, GPU1, &vec![0; ring.bytes() as usize])).collect();
    let bases: Vec<_> = rings.iter().map(|ring| ring.address).collect();
    // Executions in one stream share the slots, and only the order of the stream separates them.
    for _ in 0..10 {
        execute_with(&backend, &program, &[(dst.address, src.address)], &bases, DEFAULT, &[], true).unwrap();
    }
    execute_with(&backend, &program, &[(dst.address, src.address)], &bases, DEFAULT, &[], true).unwrap().wait().unwrap();
    assert_eq!(dst.content(), src.content());
}

#[test]
fn an_empty_program_completes_in_stream_order() {
    let backend = HostBackend::new(1, 1);
    let stream = stream(&backend);
    let empty = Arc::new(Program { transfers: vec![0], ..Program::default() });
    execute_with(&backend, &empty, &[(0, 0)], &[], stream, &[], true).unwrap().wait().unwrap();
    let gate = Gate::close(&backend, stream);
    let completion = execute_with(&backend, &empty, &[(0, 0)], &[], stream, &[], true).unwrap();
    assert!(!completion.is_done().unwrap());
    gate.open();
    completion.wait().unwrap();
    assert!(completion.is_done().unwrap());
}

#[test]
fn an_execution_starts_after_the_completions_it_is_given() {
    let backend = HostBackend::new(2, 1);
    let (a, b, c) = (stream(&backend), stream(&backend), stream(&backend));
    let [x, y, z, other] = [1, 2, 3, 4].map(|seed| Buffer::new(&backend, GPU0, &pattern(seed, 9000)));
    let done = copy(&backend, &z, &other, c);
    done.wait().unwrap();
    let gate = Gate::close(&backend, a);
    let first = copy(&backend, &y, &x, a);
    let second = execute_with(&backend, &one_copy(9000), &[(z.address, y.address)], &[], b, &[done, Arc::clone(&first)], true).unwrap();
    assert!(!second.is_done().unwrap());
    gate.open();
    second.wait().unwrap();
    assert!(first.is_done().unwrap());
    assert_eq!(z.content(), pattern(1, 9000));
}

#[test]
fn a_completion_of_another_backend_is_refused() {
    #[derive(Debug)]
    struct Foreign;
    impl CompletionState for Foreign {
        fn is_done(&self) -> Result<bool, BackendError> {
            Ok(true)
        }
        fn wait(&self) -> Result<(), BackendError> {
            Ok(())
        }
        fn as_any(&self) -> &dyn std::any::Any {
            self
        }
    }
    let backend = HostBackend::new(1, 1);
    let refused = execute_with(&backend, &one_copy(1), &[(0, 0)], &[], DEFAULT, &[Arc::new(Foreign)], false);
    assert!(matches!(refused, Err(BackendError::Driver { .. })), "{refused:?}");
    backend.synchronize().unwrap();
}

#[test]
fn many_threads_can_wait_for_one_completion() {
    let backend = HostBackend::new(2, 1);
    let (src, dst) = (Buffer::new(&backend, GPU0, &pattern(7, 100)), Buffer::new(&backend, GPU1, &[0; 100]));
    let gate = Gate::close(&backend, DEFAULT);
    let completion = copy(&backend, &dst, &src, DEFAULT);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                completion.wait().unwrap();
                assert_eq!(dst.content(), src.content());
            });
        }
        gate.open();
    });
}

#[test]
fn verification_finds_the_first_byte_that_a_program_gets_wrong() {
    let backend = HostBackend::new(2, 1);
    // No validator would accept this program: it omits a byte of its second transfer, or copies it from the wrong place.
    let bytes = 20_000u64;
    let src = [Buffer::new(&backend, GPU0, &[1; 20_000]), Buffer::new(&backend, GPU0, &pattern(8, 20_000))];
    let dst = [Buffer::new(&backend, GPU1, &[0; 20_000]), Buffer::new(&backend, GPU1, &[0; 20_000])];
    let endpoints = [(dst[0].address, src[0].address), (dst[1].address, src[1].address)];
    let missing = (12_345..20_000).find(|&i| src[1].content()[i] != 0).unwrap() as u64;
    let mut program = Program::clone(&direct(&[bytes, bytes], Mechanism::Copy));
    let whole = program.ops.pop().unwrap();
    for (offset, end) in [(0, missing), (missing + 1, bytes)] {
        let copy =
            Copy { from: Place::Source { transfer: 1, offset }, to: Place::Destination { transfer: 1, offset }, bytes: end - offset };
        program.ops.push(Op { copies: smallvec![copy], ..whole.clone() });
    }
    let program = Arc::new(program);
    let completion = execute_with(&backend, &program, &endpoints, &[], DEFAULT, &[], true).unwrap();
    match completion.wait() {
        Err(BackendError::DataCorruption { transfer, offset }) => assert_eq!((transfer, offset), (1, missing)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(completion.is_done(), Err(BackendError::DataCorruption { .. })));
    // If verification is disabled, the error is not detected. The stream continues after the failure.
    execute_with(&backend, &program, &endpoints, &[], DEFAULT, &[], false).unwrap().wait().unwrap();
    copy(&backend, &dst[1], &src[1], DEFAULT).wait().unwrap();
    assert_eq!(dst[1].content(), src[1].content());
}

#[test]
fn a_panic_in_an_operation_fails_its_execution_alone() {
    let backend = HostBackend::new(2, 1);
    let (src, dst) = (Buffer::new(&backend, GPU0, &pattern(9, 100)), Buffer::new(&backend, GPU1, &[0; 100]));
    // The program has one transfer but the execution has none, so the first operation uses an index out of bounds.
    for _ in 0..50 {
        let completion = execute_with(&backend, &one_copy(100), &[], &[], DEFAULT, &[], false).unwrap();
        match completion.wait() {
            Err(BackendError::Driver { what, reason, .. }) => {
                assert_eq!(what, "operation 0 of a plan");
                assert!(reason.contains("out of bounds"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
    copy(&backend, &dst, &src, DEFAULT).wait().unwrap();
    assert_eq!(dst.content(), src.content());
}

#[test]
fn a_panic_in_a_host_function_stops_nothing() {
    let backend = HostBackend::new(1, 1);
    let record = Record::default();
    for entry in 0..10 {
        backend.launch_host(DEFAULT, Box::new(|| panic!("on purpose"))).unwrap();
        record.note(&backend, DEFAULT, entry);
    }
    backend.synchronize_stream(DEFAULT).unwrap();
    assert_eq!(record.entries(), (0..10).collect::<Vec<_>>());
}

// Tests of size and number.

#[test]
fn a_million_executions_in_a_row_need_no_stack() {
    let backend = HostBackend::new(1, 1);
    let stream = stream(&backend);
    let empty = Arc::new(Program::default());
    let one = one_copy(1);
    let (src, dst) = (Buffer::new(&backend, GPU0, &[1]), Buffer::new(&backend, GPU0, &[0]));
    let (none, both): (Arc<[_]>, Arc<[_]>) = (Arc::new([]), Arc::new([Endpoints { dst: dst.address, src: src.address }]));
    let rings: Arc<[u64]> = Arc::new([]);
    let gate = Gate::close(&backend, stream);
    for i in 0..1_000_000 {
        let (program, endpoints) = if i % 2 == 0 { (&empty, &none) } else { (&one, &both) };
        backend.submit(&Execution::new(program, endpoints, &rings, stream)).unwrap();
    }
    gate.open();
    backend.synchronize_stream(stream).unwrap();
    assert_eq!(dst.content(), [1]);
}

#[test]
fn a_million_waits_in_a_row_need_no_stack() {
    let backend = HostBackend::new(1, 1);
    let (a, b) = (stream(&backend), stream(&backend));
    let event = backend.create_event().unwrap();
    let gate = Gate::close(&backend, a);
    for i in 0..1_000_000 {
        // The direction alternates, so that the chain of waits passes through both streams.
        let (from, to) = if i % 2 == 0 { (a, b) } else { (b, a) };
        backend.record_event(event, from).unwrap();
        backend.stream_wait_event(to, event).unwrap();
    }
    gate.open();
    backend.synchronize().unwrap();
}

#[test]
fn dropping_the_backend_waits_for_its_work() {
    let ran = Arc::new(AtomicUsize::new(0));
    let backend = HostBackend::new(1, 1);
    let gates: Vec<_> = (0..4)
        .map(|_| {
            let stream = stream(&backend);
            let gate = Gate::close(&backend, stream);
            for _ in 0..100 {
                let ran = Arc::clone(&ran);
                backend.launch_host(stream, Box::new(move || _ = ran.fetch_add(1, Ordering::Relaxed))).unwrap();
            }
            backend.destroy_stream(stream).unwrap();
            gate
        })
        .collect();
    let opener = std::thread::spawn(move || drop(gates));
    drop(backend);
    assert_eq!(ran.load(Ordering::Relaxed), 400);
    opener.join().unwrap();
}

#[test]
fn many_threads_share_streams_and_staging() {
    const THREADS: u64 = 16;
    let backend = HostBackend::new(4, 1);
    let streams: Vec<_> = (0..4).map(|_| stream(&backend)).chain([DEFAULT]).collect();
    let staging = Buffer::new(&backend, GPU1, &[0; 4 * 4 * 512]);
    // Completion of the last execution that used the staging memory. The next execution waits for it, as executions of plans do.
    let last: Mutex<Option<Completion>> = Mutex::new(None);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (backend, streams, staging, last) = (&backend, &streams, &staging, &last);
            scope.spawn(move || {
                let mut random = Random(thread);
                for round in 0..250 {
                    let (chunk, paths, slots) = (1 + random.below(512), 1 + random.below(4) as u32, 1 + random.below(4) as u32);
                    let bytes = 1 + random.below(40 * chunk);
                    let stream = streams[random.below(streams.len() as u64) as usize];
                    let src = Buffer::new(backend, GPU0, &pattern(thread << 32 | round, bytes as usize));
                    let dst = Buffer::new(backend, GPU1, &vec![0; bytes as usize]);
                    let bases: Vec<_> = (0..u64::from(paths)).map(|path| staging.address + path * 4 * 512).collect();
                    let completion = {
                        let mut last = last.lock().unwrap();
                        let after: Vec<_> = last.iter().cloned().collect();
                        let endpoints = [(dst.address, src.address)];
                        let program = relay(bytes, chunk, paths, slots);
                        let completion = execute_with(backend, &program, &endpoints, &bases, stream, &after, round % 2 == 0).unwrap();
                        last.insert(completion).clone()
                    };
                    completion.wait().unwrap();
                    assert!(dst.content() == src.content(), "thread {thread}, round {round}");
                }
            });
        }
    });
}

#[test]
fn streams_and_events_may_come_and_go_while_others_work() {
    let backend = HostBackend::new(2, 1);
    let ran = Arc::new(AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let (a, b) = (stream(&backend), stream(&backend));
                    let event = backend.create_event().unwrap();
                    let count = || {
                        let ran = Arc::clone(&ran);
                        Box::new(move || _ = ran.fetch_add(1, Ordering::Relaxed))
                    };
                    backend.launch_host(a, count()).unwrap();
                    backend.record_event(event, a).unwrap();
                    backend.stream_wait_event(b, event).unwrap();
                    backend.launch_host(b, count()).unwrap();
                    backend.destroy_event(event).unwrap();
                    backend.destroy_stream(a).unwrap();
                    backend.destroy_stream(b).unwrap();
                }
            });
        }
    });
    backend.synchronize().unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), 800);
    assert_eq!(backend.stream_count(GPU0), 0);
}

// Tests of memory.

#[test]
fn synchronize_waits_for_the_work_of_streams_that_are_being_destroyed() {
    const THREADS: usize = 8;
    const ROUNDS: usize = 4000;
    let backend = HostBackend::new(1, 1);
    // For each round of each thread: true if its work is enqueued, and true if its work has finished.
    let flags = || Arc::<[AtomicBool]>::from_iter((0..THREADS * ROUNDS).map(|_| AtomicBool::new(false)));
    let (enqueued, finished) = (flags(), flags());
    let seen = |flags: &[AtomicBool]| flags.iter().map(|flag| flag.load(Ordering::Acquire)).collect::<Vec<bool>>();
    let lost = std::thread::scope(|scope| {
        let threads = std::array::from_fn::<_, THREADS, _>(|thread| {
            let (backend, enqueued, finished) = (&backend, &enqueued, &finished);
            scope.spawn(move || {
                for round in thread * ROUNDS..(thread + 1) * ROUNDS {
                    let (stream, finished) = (stream(backend), Arc::clone(finished));
                    // The work takes long enough for the stream to be destroyed meanwhile.
                    let work = move || {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                        finished[round].store(true, Ordering::Release);
                    };
                    backend.launch_host(stream, Box::new(work)).unwrap();
                    enqueued[round].store(true, Ordering::Release);
                    backend.destroy_stream(stream).unwrap();
                }
            })
        });
        let mut lost = 0;
        while lost == 0 && threads.iter().any(|thread| !thread.is_finished()) {
            let before = seen(&enqueued);
            backend.synchronize().unwrap();
            lost = before.into_iter().zip(seen(&finished)).filter(|(enqueued, finished)| *enqueued && !finished).count();
        }
        lost
    });
    assert_eq!(lost, 0, "streams had work that was running when `synchronize` returned");
}

#[test]
fn memory_has_an_owner_a_kind_and_bounds() {
    let backend = HostBackend::new(2, 2);
    for (device, kind) in [(GPU1, MemoryKind::Device), (DeviceId::HOST, MemoryKind::Pinned), (DeviceId::host(1), MemoryKind::Pinned)] {
        let address = backend.allocate(device, 1000).unwrap();
        assert_eq!(address % 4096, 0);
        let allocation = backend.locate(address).unwrap().unwrap();
        assert_eq!((allocation.base, allocation.bytes, allocation.device, allocation.kind), (address, 1000, device, kind));
        assert_eq!(backend.locate(address + 999).unwrap(), Some(allocation));
        assert_ne!(backend.locate(address + 1000).unwrap(), Some(allocation));
        assert_eq!(backend.allocated_bytes(device), 1000);
        backend.free(address).unwrap();
        assert_eq!(backend.locate(address).unwrap(), None);
        assert_eq!(backend.allocated_bytes(device), 0);
    }
    let local = 0u8;
    assert_eq!(backend.locate(&raw const local as u64).unwrap(), None);
    assert_eq!(backend.locate(0).unwrap(), None);
    assert_eq!(backend.locate(u64::MAX).unwrap(), None);
}

#[test]
fn a_reused_address_is_a_different_allocation() {
    let (backend, other) = (HostBackend::new(1, 1), HostBackend::new(1, 1));
    let mut ids: Vec<u64> = (0..100)
        .map(|i| {
            let backend = if i % 2 == 0 { &backend } else { &other };
            let address = backend.allocate(GPU0, 64).unwrap();
            let id = backend.locate(address).unwrap().unwrap().id;
            backend.free(address).unwrap();
            id
        })
        .collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 100);
}

#[test]
fn impossible_sizes_are_out_of_memory() {
    let backend = HostBackend::new(1, 1);
    for bytes in [u64::MAX, 1 << 63, isize::MAX as u64, isize::MAX as u64 - 4095] {
        match backend.allocate(GPU0, bytes) {
            Err(BackendError::OutOfMemory { device: 0, bytes: asked }) => assert_eq!(asked, bytes),
            other => panic!("{bytes}: {other:?}"),
        }
    }
    assert_eq!(backend.allocated_bytes(GPU0), 0);
}

#[test]
fn allocations_of_no_bytes_are_apart() {
    let backend = HostBackend::new(1, 1);
    let (a, b) = (backend.allocate(GPU0, 0).unwrap(), backend.allocate(GPU0, 0).unwrap());
    assert_ne!(a, b);
    assert_ne!(backend.locate(a).unwrap().unwrap().id, backend.locate(b).unwrap().unwrap().id);
}

#[test]
fn memory_is_freed_once_and_by_its_start() {
    let backend = HostBackend::new(1, 1);
    let address = backend.allocate(GPU0, 100).unwrap();
    for wrong in [0, 1, address + 1, address - 4096, u64::MAX] {
        assert!(matches!(backend.free(wrong), Err(BackendError::InvalidPointer(value)) if value == wrong));
    }
    backend.free(address).unwrap();
    assert!(matches!(backend.free(address), Err(BackendError::InvalidPointer(_))));
}

#[test]
fn devices_that_do_not_exist_are_refused() {
    let backend = HostBackend::new(2, 1);
    for device in [DeviceId(2), DeviceId(-2), DeviceId(i32::MAX), DeviceId(i32::MIN)] {
        assert!(matches!(backend.allocate(device, 1), Err(BackendError::InvalidDevice(d)) if d == device.0));
        assert!(matches!(backend.create_stream(device), Err(BackendError::InvalidDevice(d)) if d == device.0));
        assert_eq!((backend.allocated_bytes(device), backend.stream_count(device)), (0, 0));
    }
}

#[test]
fn streams_are_counted_by_device() {
    let backend = HostBackend::new(2, 1);
    let streams = [GPU0, GPU1, GPU1, DeviceId::HOST].map(|device| backend.create_stream(device).unwrap());
    assert_eq!([GPU0, GPU1, DeviceId::HOST].map(|device| backend.stream_count(device)), [1, 2, 1]);
    backend.destroy_stream(streams[1]).unwrap();
    assert_eq!(backend.stream_count(GPU1), 1);
}
