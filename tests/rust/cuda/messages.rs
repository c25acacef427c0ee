//! Tests the number of driver calls that a small message needs if the library knows its memory. Uses the driver double (simulated CUDA
//! driver).

use super::double::{self, node};
use super::driver::{Current, handle};
use super::prepared;
use super::refusals::{assert_arrived, write};
use crate::backend::{CompletionState, Signal, SignalWait, StreamHandle};
use crate::topology::DeviceId;
use mpgpu_contexts::{Config, Context};
use mpgpu_ranks::message::{Messenger, MessengerOptions, Outgoing, Pattern};
use mpgpu_ranks::{Alone, NodeGroup};
use std::collections::BTreeMap;
use std::sync::Arc;

const GPU0: DeviceId = DeviceId::gpu(0);
const BYTES: usize = 4096;
const PATTERN: Pattern = Pattern { source: Some(0), tag: 7, mask: u64::MAX };

/// Creates a rank that sends messages to itself.
fn rank(gpus: i32, signal_wait: Option<SignalWait>) -> (Arc<Context>, Arc<Messenger>) {
    double::start(gpus, true);
    node(|node| node.shares = true);
    let context = Arc::new(prepared::context_with(double::failing(), |config| Config { signal_wait, ..config }));
    let node = Arc::new(NodeGroup::new(&context, 0, 1, Box::new(Alone), &[]).expect("a node"));
    let messenger = node.messenger(MessengerOptions { operations: 16, messages: 16 }).expect("a messenger");
    (context, messenger)
}

/// Runs `work` and counts the driver calls that it makes. Returns the result and the number of calls by name.
fn asked<T>(work: impl FnOnce() -> T) -> (T, BTreeMap<&'static str, usize>) {
    node(|node| node.asked.clear());
    let done = work();
    let mut calls = BTreeMap::new();
    node(|node| std::mem::take(&mut node.asked)).into_iter().for_each(|call| *calls.entry(call).or_default() += 1);
    (done, calls)
}

/// Makes a receive and the matching send in a stream, several times. Returns the driver calls of the last receive and of the last send.
fn steady(messenger: &Arc<Messenger>, [src, dst]: [u64; 2], stream: StreamHandle) -> [BTreeMap<&'static str, usize>; 2] {
    let mut last = None;
    for round in 0..4 {
        write(src, BYTES, round);
        let (received, receiving) = asked(|| messenger.receive(dst, BYTES as u64, &PATTERN, stream).expect("posted"));
        let message = Outgoing { address: src, bytes: BYTES as u64, rank: 0, tag: 7, metadata: &[] };
        let (sent, sending) = asked(|| messenger.send(&message, stream).expect("posted"));
        let ((), waiting) = asked(|| [&received, &sent].into_iter().for_each(|operation| operation.wait().expect("it ends")));
        assert_eq!(waiting, BTreeMap::new(), "waiting asks the driver for nothing");
        assert_arrived(dst, BYTES, round);
        last = Some([receiving, sending]);
    }
    last.expect("some rounds")
}

/// Driver calls of an operation: names in alphabetical order, with their numbers.
type Calls<'a> = &'a [(&'a str, usize)];

#[track_caller]
fn assert_calls(calls: &BTreeMap<&'static str, usize>, expected: Calls<'_>, what: &str) {
    assert_eq!(calls.iter().map(|(name, count)| (*name, *count)).collect::<Vec<_>>(), expected, "{what}");
}

/// Driver calls of a receive in an idle stream.
const RECEIVE: Calls<'static> = &[
    ("cuCtxGetCurrent", 2),
    ("cuCtxGetId", 2),
    ("cuCtxPopCurrent", 1),
    ("cuCtxPushCurrent", 1),
    ("cuStreamGetFlags", 1),
    ("cuStreamGetId", 1),
    ("cuStreamIsCapturing", 1),
    ("cuStreamQuery", 1),
    ("cuThreadExchangeStreamCaptureMode", 2),
];

/// Driver calls of the matching send.
const SEND: Calls<'static> = &[
    ("cuCtxGetCurrent", 3),
    ("cuCtxGetId", 4),
    ("cuCtxPopCurrent", 1),
    ("cuCtxPushCurrent", 1),
    ("cuMemcpyDtoDAsync", 1),
    ("cuStreamBatchMemOp", 1),
    ("cuStreamGetId", 1),
    ("cuStreamIsCapturing", 1),
];

/// Makes the context of GPU 0 current.
fn enter() -> Current {
    Current::enter(double::whole(), handle(double::CONTEXT + node(|node| node.number))).expect("current")
}

#[test]
fn a_small_message_is_a_copy_an_operation_and_few_questions_to_the_driver() {
    let (context, messenger) = rank(2, None);
    let memory = [0; 2].map(|_| context.allocate(GPU0, BYTES as u64).expect("memory"));
    let stream = context.create_stream(GPU0).expect("a stream");
    let [receive, send] = steady(&messenger, memory, stream);
    assert_calls(&receive, RECEIVE, "a receive, in a stream that has nothing to do");
    assert_calls(&send, SEND, "its send");
    let entered = enter();
    let [receive, send] = steady(&messenger, memory, stream);
    for (calls, of_all) in [(receive, RECEIVE), (send, SEND)] {
        let without: Vec<_> = of_all.iter().copied().filter(|(name, _)| !["cuCtxPopCurrent", "cuCtxPushCurrent"].contains(name)).collect();
        assert_calls(&calls, &without, "where the context is current");
    }
    // Default streams have no number, so the library cannot know whether they are idle.
    let [receive, send] = steady(&messenger, memory, StreamHandle(0));
    let [current, id, capturing] = [("cuCtxGetCurrent", 3), ("cuCtxGetId", 2), ("cuStreamIsCapturing", 1)];
    assert_calls(&receive, &[current, id, ("cuStreamBatchMemOp", 1), capturing], "a default stream");
    let [current, id] = [("cuCtxGetCurrent", 4), ("cuCtxGetId", 4)];
    assert_calls(&send, &[current, id, ("cuMemcpyDtoDAsync", 1), ("cuStreamBatchMemOp", 1), capturing], "a default stream");
    drop(entered);
    messenger.destroy().expect("destroyed");
}

#[test]
fn memory_of_others_is_looked_up_for_each_post_and_for_the_plan_of_its_copy() {
    let (context, messenger) = rank(2, None);
    let memory = [0; 2].map(|_| node(|node| node.give_shareable(BYTES, 0)).expect("memory"));
    let stream = context.create_stream(GPU0).expect("a stream");
    let calls = steady(&messenger, memory, stream);
    assert_eq!(calls.map(|calls| calls.get("cuPointerGetAttributes").copied()), [Some(1), Some(3)]);
    messenger.destroy().expect("destroyed");
}

#[test]
fn what_is_known_of_freed_memory_is_not_taken_for_what_lies_there_now() {
    let (context, messenger) = rank(2, None);
    let [src, dst] = [0; 2].map(|_| node(|node| node.give_shareable(BYTES, 0)).expect("memory"));
    let stream = context.create_stream(GPU0).expect("a stream");
    steady(&messenger, [src, dst], stream);
    // Another library frees the memory and allocates it on another GPU.
    node(|node| node.renew(dst, 1));
    steady(&messenger, [src, dst], stream);
    messenger.destroy().expect("destroyed");

    let address = context.allocate(GPU0, 64).expect("memory");
    let number = || context.backend().locate(address).expect("an answer").map(|allocation| allocation.id);
    let before = number();
    assert!(before.is_some() && number() == before);
    context.free(address).expect("freed");
    assert_eq!(number(), None);
    node(|node| node.insert(address, 64, Some(0), false));
    assert!(number().is_some_and(|now| Some(now) != before));
}

#[test]
fn memory_of_a_gpu_that_was_reset_is_not_known_any_more() {
    let (context, messenger) = rank(1, None);
    messenger.destroy().expect("destroyed");
    node(|node| node.shares = false);
    let address = context.allocate(GPU0, 64).expect("memory");
    for _ in 0..2 {
        context.backend().locate(address).expect("an answer").expect("known");
    }
    node(|node| node.reset(0));
    assert!(context.backend().locate(address).is_err(), "the driver has freed it");
}

#[test]
fn a_stream_that_orders_with_the_default_stream_says_itself_when_it_has_come() {
    let (context, messenger) = rank(2, None);
    let memory = [0; 2].map(|_| context.allocate(GPU0, BYTES as u64).expect("memory"));
    let stream = context.create_stream(GPU0).expect("a stream");
    node(|node| node.blocking.insert(stream.0));
    let [receive, _] = steady(&messenger, memory, stream);
    assert_eq!((receive.get("cuStreamQuery"), receive.get("cuStreamBatchMemOp")), (None, Some(&1)));
    messenger.destroy().expect("destroyed");
}

#[test]
fn few_bytes_of_the_host_and_none_are_moved_without_a_word_to_a_stream_that_has_nothing_to_do() {
    let (context, messenger) = rank(2, None);
    let stream = context.create_stream(GPU0).expect("a stream");
    let src: Vec<u8> = (0..1024).map(|at| at as u8).collect();
    let mut dst = vec![0_u8; 1024];
    let pinned = context.allocate_shared(DeviceId::HOST, 1024).expect("memory");
    for (bytes, src, dst) in [
        (0, 0, 0),
        (1024, src.as_ptr().expose_provenance() as u64, dst.as_mut_ptr().expose_provenance() as u64),
        (1024, src.as_ptr().expose_provenance() as u64, pinned),
    ] {
        for is_unexpected in [false, true] {
            let receive = || messenger.receive(dst, bytes, &PATTERN, stream).expect("posted");
            let send = || messenger.send(&Outgoing { address: src, bytes, rank: 0, tag: 7, metadata: &[] }, stream).expect("posted");
            let (operations, calls) = asked(|| if is_unexpected { [send(), receive()] } else { [receive(), send()] });
            operations.iter().for_each(|operation| operation.wait().expect("it ends"));
            let enqueuing = ["cuLaunchKernel", "cuLaunchHostFunc", "cuMemcpyAsync", "cuMemcpyDtoDAsync", "cuStreamBatchMemOp"];
            assert!(enqueuing.iter().all(|call| !calls.contains_key(call)), "{calls:?}");
        }
    }
    // SAFETY: memory of the double, of this size.
    let arrived = unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(pinned as usize), 1024) };
    assert!(arrived == src && dst == src);
    messenger.destroy().expect("destroyed");
}

/// Tests queries of a stream. A stream whose last flag was just set is queried again. A stream that is busy for long is queried only by its
/// first operation.
#[test]
fn a_stream_that_is_at_work_for_long_is_asked_again_once() {
    let (context, messenger) = rank(2, Some(SignalWait::Operation));
    let counters = context.allocate_shared(DeviceId::HOST, 64).expect("memory");
    let [src, dst] = [0; 2].map(|_| context.allocate(GPU0, BYTES as u64).expect("memory"));
    let stream = context.create_stream(GPU0).expect("a stream");
    node(|node| node.room = Some(64));
    let receive = |()| {
        let (posted, calls) = asked(|| messenger.receive(dst, BYTES as u64, &PATTERN, stream).expect("posted"));
        (posted, calls["cuStreamQuery"])
    };
    for value in 1..=2 {
        let wait = Signal { counter: counters, value };
        context.backend().stream_wait_signals(stream, &[wait], SignalWait::Operation).expect("enqueued");
        let busy = [(); 3].map(receive);
        context.backend().raise_signal(wait).expect("raised");
        context.synchronize_stream(stream).expect("it goes on");
        let idle = [(); 2].map(receive);
        assert_eq!(busy.each_ref().map(|(_, queries)| *queries), [3, 1, 1]);
        assert_eq!(idle.each_ref().map(|(_, queries)| *queries), [1, 1]);
        for (received, _) in busy.into_iter().chain(idle) {
            let message = Outgoing { address: src, bytes: BYTES as u64, rank: 0, tag: 7, metadata: &[] };
            let sent = messenger.send(&message, stream).expect("posted");
            [&received, &sent].into_iter().for_each(|operation| operation.wait().expect("it ends"));
        }
    }
    node(|node| node.room = None);
    messenger.destroy().expect("destroyed");
}

/// Tests the order of a message. A busy stream signals by itself that it has reached a receive, so the copy starts only then.
#[test]
fn the_bytes_come_after_earlier_work_of_both_streams() {
    // The double runs kernels immediately.
    let (context, messenger) = rank(2, Some(SignalWait::Operation));
    let counters = context.allocate_shared(DeviceId::HOST, 64).expect("memory");
    let [src, dst] = [0; 2].map(|_| context.allocate(GPU0, BYTES as u64).expect("memory"));
    let streams = [0; 2].map(|_| context.create_stream(GPU0).expect("a stream"));
    node(|node| node.room = Some(64));
    for busy in [0, 1] {
        let value = busy as u64 + 1;
        write(src, BYTES, busy);
        let wait = Signal { counter: counters, value };
        context.backend().stream_wait_signals(streams[busy], &[wait], SignalWait::Operation).expect("enqueued");
        let received = messenger.receive(dst, BYTES as u64, &PATTERN, streams[0]).expect("posted");
        let message = Outgoing { address: src, bytes: BYTES as u64, rank: 0, tag: 7, metadata: &[] };
        let sent = messenger.send(&message, streams[1]).expect("posted");
        for _ in 0..100 {
            let idle = context.backend().is_idle(streams[1 - busy]);
            assert!(idle && !context.backend().is_idle(streams[busy]), "only one stream has something to do");
            assert!(!received.is_done().expect("fine") && !sent.is_done().expect("fine"), "stream {busy} has not come to it");
        }
        context.backend().raise_signal(wait).expect("raised");
        context.synchronize_stream(streams[busy]).expect("it goes on");
        [&received, &sent].into_iter().for_each(|operation| operation.wait().expect("it ends"));
        assert_arrived(dst, BYTES, busy);
    }
    node(|node| node.room = None);
    messenger.destroy().expect("destroyed");
}
