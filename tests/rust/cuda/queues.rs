//! Tests streams whose queues are full. A call that enqueues work in such a stream blocks until earlier work has completed. Meanwhile other
//! streams, and calls that release the full stream, must not block. Uses the driver double (simulated CUDA driver).

use super::double::{self, calls, node};
use super::{Backend, CudaBackend};
use crate::backend::{Allocation, BackendError, Endpoints, Execution, LostPeer, Signal, SignalWait, StepFate, StreamHandle};
use crate::ipc::signal;
use crate::plan::Program;
use crate::topology::{DeviceId, Machine, preset};
use mpgpu_contexts::{Config, Context};
use std::sync::Arc;
use std::thread::Scope;
use std::time::{Duration, Instant};

const GPU0: DeviceId = DeviceId::gpu(0);
const GPU1: DeviceId = DeviceId::gpu(1);
const PEER: LostPeer = LostPeer::of(4711, None);
/// Number of entries that the queue of a stream can hold.
const ROOM: usize = 8;

/// Creates a backend whose streams have short queues, and memory for counters that are 0.
fn backend() -> (CudaBackend, Allocation) {
    double::start(2, true);
    let backend = CudaBackend::on(double::driver(), 1).expect("the double has GPUs");
    let counters = backend.allocate_shared(DeviceId::HOST, 64).expect("memory");
    let allocation = backend.locate(counters).expect("known").expect("its own");
    node(|node| node.room = Some(ROOM));
    (backend, allocation)
}

/// Runs `work` in a thread of the same simulated process.
fn beside<'scope>(scope: &'scope Scope<'scope, '_>, work: impl FnOnce() + Send + 'scope) {
    let node = double::share();
    scope.spawn(move || {
        double::join(node);
        work();
    });
}

/// Waits until exactly `calls` calls of other threads block.
fn until_blocked(calls: u32) {
    let begin = Instant::now();
    while node(|node| node.blocked) < calls {
        assert!(begin.elapsed() < Duration::from_secs(10), "{calls} calls should block, {} do", node(|node| node.blocked));
        std::thread::yield_now();
    }
}

#[track_caller]
fn nothing_was_stuck() {
    node(|node| assert!(node.stuck.is_empty(), "blocked for ever: {:?}", node.stuck));
}

fn wait(backend: &CudaBackend, stream: StreamHandle, counter: u64, value: u64) -> Result<(), BackendError> {
    backend.stream_wait_signals(stream, &[Signal { counter, value }], SignalWait::Operation)
}

#[test]
fn a_peers_end_lets_a_stream_go_on_whose_queue_is_full_of_waits() {
    let (backend, counters) = backend();
    let stream = backend.create_stream(GPU0).expect("a stream");
    std::thread::scope(|scope| {
        beside(scope, || {
            for value in 1..=4 * ROOM as u64 {
                match wait(&backend, stream, counters.base, value) {
                    Ok(()) => {}
                    Err(BackendError::PeerGone(_)) => {
                        assert!(backend.lost_peer(Signal { counter: counters.base, value: u64::MAX / 2 }).is_some())
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        });
        until_blocked(1);
        // This thread simulates the one that detects the exit of the peer.
        beside(scope, || backend.fail_waits(&counters, None, PEER));
    });
    assert!(matches!(backend.synchronize_stream(stream), Err(BackendError::PeerGone(_))), "it has waited in vain");
    backend.synchronize_stream(stream).expect("it was told");
    nothing_was_stuck();
}

#[test]
fn a_counter_that_the_host_raises_lets_streams_go_on() {
    let (backend, counters) = backend();
    let [stream, other] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    let event = backend.create_event().expect("an event");
    for (index, stream) in [stream, other].into_iter().enumerate() {
        wait(&backend, stream, counters.base + 8 * index as u64, 5).expect("enqueued");
    }
    backend.record_event(event, stream).expect("recorded");
    for (index, value) in [(1, 5), (0, 4), (0, 5)] {
        let counter = counters.base + 8 * index;
        backend.raise_signal(Signal { counter, value }).expect("raised");
        assert_eq!(backend.read_signal(counter).expect("read"), value);
    }
    backend.synchronize_stream(stream).expect("it runs");
    backend.synchronize_stream(other).expect("it runs");
    let memory = backend.allocate(GPU0, 8).expect("memory");
    for refused in [backend.raise_signal(Signal { counter: memory, value: 1 }), backend.read_signal(memory).map(drop)] {
        assert!(
            matches!(&refused, Err(BackendError::NotSupported(why)) if why.contains("host memory shared between processes")),
            "{refused:?}"
        );
    }
    nothing_was_stuck();
}

#[test]
fn an_event_that_is_recorded_in_a_full_queue_holds_up_no_event_and_no_other_stream() {
    let (backend, counters) = backend();
    let [full, other] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    let [event, another, third] = [(); 3].map(|()| backend.create_event().expect("an event"));
    wait(&backend, full, counters.base, 1).expect("enqueued");
    std::thread::scope(|scope| {
        beside(scope, || (0..2 * ROOM).for_each(|_| backend.record_event(event, full).expect("recorded")));
        beside(scope, || (0..2 * ROOM).for_each(|_| backend.stream_wait_event(full, another).expect("never recorded, or enqueued")));
        until_blocked(1);
        // All this work precedes the signal that releases the full stream.
        backend.record_event(another, other).expect("recorded");
        backend.stream_wait_event(other, another).expect("enqueued");
        backend.synchronize_event(another).expect("it runs");
        backend.destroy_event(third).expect("an event");
        let raised = Signal { counter: counters.base, value: 1 };
        backend.stream_raise_signals(other, &[raised]).expect("enqueued");
    });
    backend.synchronize_stream(full).expect("it runs");
    nothing_was_stuck();
}

#[test]
fn an_execution_whose_bytes_are_compared_in_a_full_queue_holds_up_no_other_one() {
    let (backend, counters) = backend();
    let [full, other] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    let [src, dst] = [GPU0, GPU1].map(|gpu| backend.allocate(gpu, 64).expect("memory"));
    let program = Arc::new(Program { transfers: vec![64], ..Program::default() });
    let (endpoints, rings): (Arc<[Endpoints]>, Arc<[u64]>) = (Arc::new([Endpoints { dst, src }]), Arc::new([]));
    let compare = |stream| {
        let execution = Execution { verify: true, ..Execution::new(&program, &endpoints, &rings, stream) };
        backend.submit(&execution).expect("enqueued").expect("a completion")
    };
    wait(&backend, full, counters.base, 1).expect("enqueued");
    std::thread::scope(|scope| {
        beside(scope, || (0..2 * ROOM).for_each(|_| drop(compare(full))));
        until_blocked(1);
        compare(other).wait().expect("the same bytes");
        backend.stream_raise_signals(other, &[Signal { counter: counters.base, value: 1 }]).expect("enqueued");
    });
    backend.synchronize_stream(full).expect("it runs");
    nothing_was_stuck();
}

#[test]
fn freeing_and_closing_wait_for_what_streams_have_to_do_and_end_no_capture_of_another_thread() {
    double::start(4, true);
    let machine = Machine::new(preset("pcie-4").expect("a preset")).expect("well formed");
    let backend = Arc::new(CudaBackend::on(double::driver(), 1).expect("the double has GPUs"));
    let context = Context::with_backend(Arc::new(machine), backend.clone(), Config::default()).expect("a context");
    let counter = context.allocate_shared(DeviceId::HOST, 64).expect("memory");
    let [freed, kept] = [GPU0, GPU1].map(|gpu| context.allocate(gpu, 4096).expect("memory"));
    let theirs = node(|node| node.give_shareable(4096, 1)).expect("memory of another process");
    let allocation = backend.locate(theirs).expect("an answer").expect("known");
    let import = backend.map(backend.export(&allocation).expect("shared"), &allocation).expect("mapped");
    let [captured, own] = [GPU0, GPU1].map(|gpu| context.create_stream(gpu).expect("a stream"));
    node(|node| (node.room, node.captured) = (Some(ROOM), Some(captured.0)));
    // One stream belongs to the caller, and the library cannot query it. The other belongs to the library.
    for (round, stream) in [StreamHandle(own.0 + 8), own].into_iter().enumerate() {
        let value = round as u64 + 1;
        wait(&backend, stream, counter, value).expect("enqueued");
        std::thread::scope(|scope| {
            let (context, backend) = (&context, &backend);
            beside(scope, move || {
                if round == 0 {
                    context.free(freed).expect("allocated");
                } else {
                    backend.synchronize().expect("nothing has failed");
                    backend.unmap(import).expect("imported");
                }
            });
            until_blocked(1);
            let there = node(|node| [freed, import].map(|address| node.memory.contains_key(&address)));
            assert!(there[round], "memory goes while a stream works");
            // SAFETY: a counter in memory of this context.
            unsafe { signal::store(counter, value) };
        });
    }
    assert!(node(|node| !node.memory.contains_key(&freed) && !node.memory.contains_key(&import)));
    context.free(kept).expect("allocated");
    context.close().expect("nothing has failed");
    assert_eq!(node(|node| node.captures_broken), 0, "the capture was ended");
    nothing_was_stuck();
}

#[test]
fn a_flag_is_taken_once_for_each_raise_also_where_it_is_up_when_the_next_take_is_enqueued() {
    let (backend, counters) = backend();
    let [taker, raiser] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    let raise = || {
        backend.stream_raise_signals(raiser, &[Signal { counter: counters.base, value: 1 }]).expect("enqueued");
        backend.synchronize_stream(raiser).expect("it runs");
    };
    let before = calls("cuStreamBatchMemOp");
    raise();
    for _ in 0..2 {
        backend.stream_take_flags(taker, &[], &[counters.base], &StepFate::default()).expect("enqueued");
    }
    // A wait and the resets of its counters are one driver call each.
    assert_eq!(calls("cuStreamBatchMemOp") - before, 3);
    while backend.read_signal(counters.base).expect("a counter") != 0 {
        std::thread::yield_now();
    }
    raise();
    backend.synchronize_stream(taker).expect("both were taken");
    assert_eq!(backend.read_signal(counters.base).expect("a counter"), 0);
    // A single call sends the signal and waits for it.
    let before = calls("cuStreamBatchMemOp");
    backend
        .stream_take_flags(taker, &[Signal { counter: counters.base, value: 1 }], &[counters.base], &StepFate::default())
        .expect("enqueued");
    assert_eq!(calls("cuStreamBatchMemOp") - before, 1);
    backend.synchronize_stream(taker).expect("it was taken");
    assert_eq!(backend.read_signal(counters.base).expect("a counter"), 0);
}
