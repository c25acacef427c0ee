//! Tests signals between processes. Signals order the work of streams and threads, and no wait for a peer that has exited lasts for ever.

use crate::node::*;
use crate::peer::*;
use mpgpu::abi::*;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::ptr::null_mut;

#[test]
fn puts_with_signals_are_ordered_by_streams_alone() {
    const ROUNDS: usize = 60;
    const BYTES: usize = 70_001;
    let node = Node::new(c"beluga");
    let mut peer = Peer::start();
    peer.tell(&format!("alloc 0 {} 7", ROUNDS * BYTES));
    peer.tell("alloc -1 8 0");
    let free = import(&node, &from_hex(&peer.tell("export 1 0 8"))).cast::<u64>();
    raise_in(&node, null_mut(), &[signal(free, 0)]);
    ok(mp_stream_synchronize(node.context, null_mut()));

    let (data, flag, result) = (node.alloc(1, BYTES), counters(&node, 1), node.alloc(2, ROUNDS * BYTES));
    peer.tell(&format!("import {}", hex(&export(&node, data, BYTES))));
    peer.tell(&format!("import {}", hex(&export(&node, flag.cast(), 8))));
    // Everything is enqueued before any data has arrived.
    let stream = node.stream(1);
    for round in 0..ROUNDS {
        wait_in(&node, stream, &[signal(flag, round as u64 + 1)]);
        let plan = node.plan(&[transfer(result.wrapping_add(round * BYTES), 2, data, 1, BYTES)]);
        // SAFETY: the plan's memory exists until the stream has been synchronised.
        ok(unsafe { mp_execute(plan, stream, null_mut()) });
        raise_in(&node, stream, &[signal(free, round as u64 + 1)]);
        ok(mp_plan_destroy(plan));
    }
    peer.tell(&format!("pump 0 1 0 1 {ROUNDS} {BYTES}"));
    ok(mp_stream_synchronize(node.context, stream));
    assert!(holds(result, ROUNDS * BYTES, 7, 0), "a round arrived late, or in pieces");
    ok(wait_for(&node, flag, ROUNDS as u64, 0.0));
    close(&node, free.cast());
    node.still_works();
}

#[test]
fn a_thread_waits_for_a_signal_no_longer_than_it_says() {
    let node = Node::new(c"beluga");
    let flag = counters(&node, 1);
    let mut peer = Peer::start();
    peer.tell(&format!("import {}", hex(&export(&node, flag.cast(), 8))));
    for seconds in [0.0, 0.02] {
        let message = refused(wait_for(&node, flag, 3, seconds), MP_ERROR_TIMEOUT);
        assert!(message.contains(&format!("has the value 0 and has not reached 3 in {seconds} s")), "{message}");
    }
    let at = flag.expose_provenance();
    std::thread::scope(|scope| {
        scope.spawn(|| ok(wait_for(&node, std::ptr::with_exposed_provenance_mut(at), 3, f64::INFINITY)));
        peer.tell("raise 0 2");
        peer.tell("raise 0 5");
    });
    ok(wait_for(&node, flag, 5, 0.0));
    refused(wait_for(&node, flag, 6, 0.0), MP_ERROR_TIMEOUT);
    for seconds in [-1.0, f64::NAN] {
        let message = refused(wait_for(&node, flag, 0, seconds), MP_ERROR_INVALID_ARGUMENT);
        assert!(message.starts_with(&format!("seconds={seconds}: must be")), "{message}");
    }
    peer.tell("close 0");
    node.still_works();
}

/// Returns the value of a counter.
fn read(node: &Node, counter: *const u64) -> u64 {
    let mut value = 77;
    // SAFETY: the output is valid for the call. The library must check the address.
    ok(unsafe { mp_signal_read(node.context, counter, &mut value) });
    value
}

/// Returns true if a counter has reached a value, or the error status of the call.
fn test(node: &Node, counter: *const u64, value: u64) -> Result<bool, mp_status_t> {
    let mut reached = 77;
    // SAFETY: as above.
    match unsafe { mp_signal_test(node.context, counter, value, &mut reached) } {
        MP_SUCCESS => Ok(reached == 1),
        status => {
            assert_eq!(reached, 77, "an output was written");
            Err(status)
        }
    }
}

#[test]
fn a_thread_raises_reads_and_asks_for_signals_of_its_own_and_of_other_processes() {
    let node = Node::new(c"beluga");
    let flags = counters(&node, 2);
    let mut peer = Peer::start();
    peer.tell(&format!("import {}", hex(&export(&node, flags.cast(), 16))));
    // A value that is not reached is no error and does not change the text of the last error.
    let before = last_error();
    assert_eq!((test(&node, flags, 0), test(&node, flags, 1), read(&node, flags)), (Ok(true), Ok(false), 0));
    assert_eq!(last_error(), before);
    peer.tell("raise 0 4");
    ok(wait_for(&node, flags, 4, 60.0));
    assert_eq!((test(&node, flags, 4), test(&node, flags, 5), read(&node, flags)), (Ok(true), Ok(false), 4));
    // A signal that this process sends releases a stream.
    let (stream, second) = (node.stream(1), flags.wrapping_add(1));
    wait_in(&node, stream, &[signal(second, 2)]);
    // SAFETY: the library must check the address, here and below.
    ok(unsafe { mp_signal_raise(node.context, second, 2) });
    ok(mp_stream_synchronize(node.context, stream));
    assert_eq!(read(&node, second), 2);
    peer.tell("close 0");

    // Counters in memory of the other process can be set and read, but not waited for.
    peer.tell("alloc -1 8 0");
    let theirs = import(&node, &from_hex(&peer.tell("export 0 0 8"))).cast::<u64>();
    // SAFETY: as above.
    ok(unsafe { mp_signal_raise(node.context, theirs, 9) });
    assert_eq!((read(&node, theirs), test(&node, theirs, 9)), (9, Err(MP_ERROR_NOT_SUPPORTED)));
    peer.tell("wait 0 9");
    peer.tell("synchronize");
    peer.kill();
    let mut value = 77;
    // SAFETY: as above.
    unsafe {
        refused(mp_signal_raise(node.context, theirs, 10), MP_ERROR_PEER_GONE);
        refused(mp_signal_read(node.context, theirs, &mut value), MP_ERROR_PEER_GONE);
    }
    assert_eq!((value, last_argument().as_deref()), (77, Some("counter")));
    node.still_works();
}

#[test]
fn what_a_process_that_has_ended_did_not_raise_is_an_error_to_who_asks_and_what_it_raised_is_not() {
    let node = Node::new(c"beluga");
    let flag = counters(&node, 1);
    let mut peer = Peer::start();
    peer.tell(&format!("import {}", hex(&export(&node, flag.cast(), 8))));
    peer.tell("raise 0 3");
    ok(wait_for(&node, flag, 3, 60.0));
    peer.kill();
    // The wait itself detects that the peer has exited.
    refused(wait_for(&node, flag, 4, f64::INFINITY), MP_ERROR_PEER_GONE);
    assert_eq!((test(&node, flag, 3), test(&node, flag, 4), read(&node, flag)), (Ok(true), Err(MP_ERROR_PEER_GONE), 3));
    node.still_works();
}

fn kernels_wait(node: &Node, signals: &[mp_signal_t]) -> mp_status_t {
    // SAFETY: a list of this length. The library must check the addresses.
    unsafe { mp_kernel_wait_signals(node.context, signals.as_ptr(), signals.len()) }
}

#[test]
fn kernels_that_wait_for_a_process_that_ends_are_told_and_whoever_synchronises_too() {
    const GONE: u64 = 1 << 40;
    let node = Node::new(c"beluga");
    let (flags, others) = (counters(&node, 3), counters(&node, 1));
    let mut peer = Peer::start();
    peer.tell(&format!("import {}", hex(&export(&node, flags.cast(), 24))));
    let stream = node.stream(1);
    let at = |index: usize| flags.wrapping_add(index);
    // If a wait is announced twice, only the larger value counts. Nobody waits for the third counter, the second counter has already
    // reached its value, and the other memory was never mapped.
    for value in [GONE - 1, GONE] {
        ok(kernels_wait(&node, &[signal(at(0), value), signal(at(1), 5), signal(others, GONE)]));
    }
    peer.tell("raise 0 3");
    ok(wait_for(&node, at(0), 3, 60.0));
    // SAFETY: one of these counters.
    ok(unsafe { mp_signal_raise(node.context, at(1), 6) });
    ok(mp_stream_synchronize(node.context, stream));
    peer.kill();
    // This thread polls the counter as a kernel does.
    let begin = std::time::Instant::now();
    while read(&node, at(0)) != GONE {
        assert!(begin.elapsed().as_secs() < 60, "the counter stands at {}", read(&node, at(0)));
    }
    assert_eq!((read(&node, at(1)), read(&node, at(2)), read(&node, others)), (6, 0, 0));
    let message = refused(mp_stream_synchronize(node.context, stream), MP_ERROR_PEER_GONE);
    assert!(message.contains("has the value 3, but the wait is for 1099511627776"), "{message}");
    ok(mp_stream_synchronize(node.context, stream));
    // From now on waits for this counter are refused, whatever its value is.
    refused(kernels_wait(&node, &[signal(at(1), 5)]), MP_ERROR_PEER_GONE);
    ok(kernels_wait(&node, &[signal(others, GONE)]));
    refused(kernels_wait(&node, &[signal(at(0).wrapping_byte_add(4), 1)]), MP_ERROR_INVALID_POINTER);
}

#[test]
fn what_kernels_waited_for_in_memory_that_was_freed_is_forgotten() {
    let node = Node::new(c"beluga");
    for _ in 0..20 {
        let flags = counters(&node, 1);
        let mut peer = Peer::start();
        peer.tell(&format!("import {}", hex(&export(&node, flags.cast(), 8))));
        ok(kernels_wait(&node, &[signal(flags, 9)]));
        node.free(flags.cast());
        let again = counters(&node, 1);
        peer.kill();
        node.still_works();
        assert_eq!(read(&node, again), 0);
        node.free(again.cast());
    }
}

#[test]
fn allocated_counters_stand_at_zero_however_often_memory_is_given_back() {
    let node = Node::new(c"beluga");
    for round in 1..20 {
        let flags = counters(&node, 1000);
        for index in 0..1000 {
            let flag = flags.wrapping_add(index);
            assert_eq!(read(&node, flag), 0);
            // SAFETY: one of these counters.
            ok(unsafe { mp_signal_raise(node.context, flag, round) });
        }
        export(&node, flags.cast(), 8000);
        node.free(flags.cast());
    }
    let many = counters(&node, 524_288);
    export(&node, many.cast(), 8 * 524_288);
}

#[test]
fn streams_that_wait_hold_up_no_other() {
    let node = Node::new(c"beluga");
    const STREAMS: usize = 40;
    let flags = counters(&node, STREAMS);
    let streams: Vec<mp_stream_t> = (0..STREAMS).map(|i| node.stream((i % 4) as i32)).collect();
    let cells: Vec<*mut u8> = (0..STREAMS).map(|_| node.alloc(0, 4096)).collect();
    let source = node.alloc(1, 4096);
    fill(source, 4096, 3);
    for (i, stream) in streams.iter().enumerate() {
        fill(cells[i], 4096, 4);
        // Each stream waits for its own counter and for the first counter.
        wait_in(&node, *stream, &[signal(flags.wrapping_add(i), 1), signal(flags, 1)]);
        let plan = node.plan(&[transfer(cells[i], 0, source, 1, 4096)]);
        // SAFETY: the plan's memory exists until the streams have been synchronised.
        ok(unsafe { mp_execute(plan, *stream, null_mut()) });
    }
    // Freeing memory would wait for all streams. Copies in other streams do not.
    let copied = node.alloc(2, 4096);
    let plan = node.plan(&[transfer(copied, 2, source, 1, 4096)]);
    node.run(plan);
    assert!(holds(copied, 4096, 3, 0));
    raise_in(&node, null_mut(), &(1..STREAMS).rev().map(|i| signal(flags.wrapping_add(i), 1)).collect::<Vec<_>>());
    node.run(plan);
    assert!(cells.iter().all(|cell| holds(*cell, 4096, 4, 0)), "a stream did not wait for both");
    raise_in(&node, null_mut(), &[signal(flags, 1)]);
    for (stream, cell) in streams.iter().zip(&cells) {
        ok(mp_stream_synchronize(node.context, *stream));
        assert!(holds(*cell, 4096, 3, 0));
    }
}

#[test]
fn a_peer_that_dies_lets_nobody_wait_for_ever() {
    let node = Node::new(c"beluga");
    let flags = counters(&node, 2);
    let others = counters(&node, 1);
    let handle = hex(&export(&node, flags.cast(), 16));
    let (mut dying, mut closing) = (Peer::start(), Peer::start());
    for peer in [&mut dying, &mut closing] {
        peer.tell(&format!("import {handle}"));
    }
    let stream = node.stream(1);
    // The peer has closed the memory, so its exit has no effect on waits.
    closing.tell("close 0");
    closing.kill();
    dying.tell("raise 0 4");
    wait_in(&node, stream, &[signal(flags, 4)]);
    ok(mp_stream_synchronize(node.context, stream));

    wait_in(&node, stream, &[signal(flags.wrapping_add(1), 1)]);
    let at = flags.expose_provenance();
    let reached = std::thread::scope(|scope| {
        let host = scope.spawn(|| (wait_for(&node, std::ptr::with_exposed_provenance_mut(at), 5, f64::INFINITY), last_error()));
        dying.kill();
        host.join().expect("no assertion failed")
    });
    assert_eq!(reached.0, MP_ERROR_PEER_GONE, "{}", reached.1);
    assert!(reached.1.contains("has the value 4, but the wait is for 5: process") && reached.1.contains("has ended"), "{}", reached.1);
    let message = refused(mp_stream_synchronize(node.context, stream), MP_ERROR_PEER_GONE);
    assert!(message.contains(&format!("process {}", dying.process.id())), "{message}");
    // The error is reported once. The stream then continues, and later waits for counters in this memory are refused.
    ok(mp_stream_synchronize(node.context, stream));
    let message = wait_refused(&node, stream, signal(flags.wrapping_add(1), 1));
    assert!(message.contains(&format!("process {}", dying.process.id())), "{message}");
    ok(mp_stream_synchronize(node.context, stream));
    // Values that were already reached remain valid, and other memory is not affected.
    ok(wait_for(&node, flags, 4, 0.0));
    wait_in(&node, stream, &[signal(flags, 3)]);
    ok(mp_stream_synchronize(node.context, stream));
    refused(wait_for(&node, others, 1, 0.0), MP_ERROR_TIMEOUT);
    // Streams that wait for counters in other memory, or for nothing, are not affected.
    for stream in [null_mut(), node.stream(1)] {
        ok(mp_stream_synchronize(node.context, stream));
    }
    node.still_works();
}

#[test]
fn a_peer_that_exits_or_destroys_its_context_ends_waits_as_one_that_was_killed() {
    for order in ["exit", "destroy"] {
        let node = Node::new(c"beluga");
        let flag = counters(&node, 1);
        let mut peer = Peer::start();
        peer.tell(&format!("import {}", hex(&export(&node, flag.cast(), 8))));
        let stream = node.stream(0);
        wait_in(&node, stream, &[signal(flag, 1)]);
        writeln!(peer.orders, "{order}").expect("the peer reads");
        let message = refused(mp_stream_synchronize(node.context, stream), MP_ERROR_PEER_GONE);
        assert!(message.contains(&format!("process {}", peer.process.id())), "{order}: {message}");
        wait_refused(&node, stream, signal(flag, 1));
    }
}

#[track_caller]
fn wait_refused(node: &Node, stream: mp_stream_t, wanted: mp_signal_t) -> String {
    // SAFETY: a list of one signal.
    refused(unsafe { mp_stream_wait_signals(node.context, stream, &wanted, 1) }, MP_ERROR_PEER_GONE)
}

fn event(node: &Node) -> mp_event_t {
    let mut event = poison();
    // SAFETY: the output is valid for the call.
    ok(unsafe { mp_event_create(node.context, &mut event) });
    event
}

/// Enqueues a plan and returns its request.
fn request(plan: mp_plan_t, stream: mp_stream_t) -> mp_request_t {
    let mut request = null_mut();
    // SAFETY: the output is valid for the call, and the plan's memory stays.
    ok(unsafe { mp_execute(plan, stream, &mut request) });
    request
}

/// Waits for a request and frees it.
fn outcome(mut request: mp_request_t) -> mp_status_t {
    // SAFETY: a request returned by `request`, used once.
    let status = unsafe { mp_wait(&mut request, null_mut()) };
    assert!(request.is_null());
    status
}

#[test]
fn what_comes_after_a_wait_in_vain_says_so_once_and_nothing_else() {
    const STEPS: u64 = 20;
    let node = Node::new(c"beluga");
    let bystander = Node::new(c"beluga");
    let flag = counters(&node, 1);
    let (source, target) = (node.alloc(0, 4096), node.alloc(1, 4096));
    let plan = node.plan(&[transfer(target, 1, source, 0, 4096)]);
    let mut peer = Peer::start();
    peer.tell(&format!("import {}", hex(&export(&node, flag.cast(), 8))));
    // The wait is in a stream for which the caller never waits, as with a halo plan. An event orders the caller's stream after it.
    let (waits, joins, asks) = (node.stream(0), node.stream(1), node.stream(2));
    let (waited, joined) = (event(&node), event(&node));
    for step in 1..=STEPS {
        wait_in(&node, waits, &[signal(flag, step)]);
    }
    ok(mp_event_record(node.context, waited, waits));
    for stream in [joins, asks] {
        ok(mp_stream_wait_event(node.context, stream, waited));
    }
    let (first, second, mut asked) = (request(plan, joins), request(plan, joins), request(plan, asks));
    ok(mp_event_record(node.context, joined, joins));
    let mut done = -1;
    // SAFETY: the outputs are valid for the call.
    ok(unsafe { mp_test(&mut asked, &mut done, null_mut()) });
    assert_eq!(done, 0, "it did not wait");

    peer.kill();
    // Requests of work that was enqueued before the loss was detected report the loss too.
    for early in [first, second] {
        let message = refused(outcome(early), MP_ERROR_PEER_GONE);
        assert!(message.contains(&format!("process {}", peer.process.id())), "{message}");
    }
    refused(mp_event_synchronize(node.context, joined), MP_ERROR_PEER_GONE);
    refused(mp_event_synchronize(node.context, waited), MP_ERROR_PEER_GONE);
    let status = loop {
        // SAFETY: as above.
        let status = unsafe { mp_test(&mut asked, &mut done, null_mut()) };
        if done == 1 {
            break status;
        }
        ok(status);
        std::thread::yield_now();
    };
    refused(status, MP_ERROR_PEER_GONE);
    assert!(asked.is_null());
    // The loss has already been reported through requests and events of the streams.
    for stream in [waits, joins, asks] {
        ok(mp_stream_synchronize(node.context, stream));
    }
    // New work is not affected after the report.
    ok(mp_stream_synchronize(node.context, joins));
    ok(outcome(request(plan, joins)));
    ok(mp_event_record(node.context, joined, joins));
    ok(mp_event_synchronize(node.context, joined));
    // A stream that waits for an event long after the event has completed still reports the loss.
    let late = node.stream(3);
    ok(mp_stream_wait_event(node.context, late, waited));
    refused(outcome(request(plan, late)), MP_ERROR_PEER_GONE);
    ok(outcome(request(plan, late)));
    ok(mp_stream_synchronize(node.context, late));
    // A loop that uses only events gets a single report, however often it waits for the event.
    let loops = node.stream(3);
    for step in 0..3 {
        let each = event(&node);
        ok(mp_stream_wait_event(node.context, loops, waited));
        ok(mp_event_record(node.context, each, loops));
        let status = mp_event_synchronize(node.context, each);
        assert_eq!(status, if step == 0 { MP_ERROR_PEER_GONE } else { MP_SUCCESS }, "step {step}");
        ok(mp_event_destroy(node.context, each));
    }
    // A wait for the lost peer is refused and not enqueued. In another context no peer was lost.
    wait_refused(&node, late, signal(flag, STEPS));
    ok(mp_event_synchronize(node.context, event(&node)));
    for stream in [null_mut(), node.stream(1)] {
        ok(mp_stream_synchronize(node.context, stream));
        ok(outcome(request(plan, stream)));
    }
    node.still_works();
    bystander.still_works();
}

#[test]
fn each_peer_that_dies_is_reported_and_logged_once() {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.env("MPGPU_LOG", "error").stderr(Stdio::piped());
    let mut waiting = Peer::of(command);
    let mut dying = [Peer::start(), Peer::start()];
    for (memory, peer) in dying.iter_mut().enumerate() {
        waiting.tell("alloc -1 8 0");
        peer.tell(&format!("import {}", waiting.tell(&format!("export {memory} 0 8"))));
        peer.tell("raise 0 0");
    }
    for value in 1..=100 {
        waiting.tell(&format!("wait 0 {value}"));
        waiting.tell(&format!("wait 1 {value}"));
    }
    for peer in &mut dying {
        peer.kill();
    }
    let status = MP_ERROR_PEER_GONE as i32;
    let answer = waiting.ask("synchronize");
    assert!(answer.starts_with(&format!("{status} ")), "{answer}");
    assert!(dying.iter().all(|peer| answer.matches(&format!("process {}", peer.process.id())).count() == 1), "{answer}");
    assert_eq!(waiting.tell("synchronize"), "");
    let mut log = String::new();
    let mut stderr = waiting.process.stderr.take().expect("a pipe");
    waiting.kill();
    stderr.read_to_string(&mut log).expect("text");
    for peer in &dying {
        let lines = log.lines().filter(|line| line.contains(&format!("process {}", peer.process.id())));
        assert_eq!(lines.count(), 1, "{log}");
    }
}

#[test]
fn who_leaves_is_waited_for_as_far_as_it_has_come_and_no_further() {
    let (node, mut peer) = (Node::new(c"beluga"), Peer::start());
    let [waited, polled, beside] = [0; 3].map(|_| counters(&node, 1));
    for counter in [waited, polled, beside] {
        peer.tell(&format!("import {}", hex(&export(&node, counter.cast(), 8))));
    }
    let [in_time, in_vain] = [0; 2].map(|_| node.stream(0));
    wait_in(&node, in_time, &[signal(beside, 3)]);
    wait_in(&node, in_vain, &[signal(waited, 4)]);
    // SAFETY: the list is valid for the call.
    let kernels_wait = |value| unsafe { mp_kernel_wait_signals(node.context, &signal(polled, value), 1) };
    [2, 5, 4].into_iter().for_each(|value| ok(kernels_wait(value)));
    for order in ["leave 0 3", "leave 1 5", "leave 2 3"] {
        peer.tell(order);
    }
    let message = refused(mp_stream_synchronize(node.context, in_vain), MP_ERROR_PEER_GONE);
    assert!(message.contains(&format!("process {}", peer.process.id())) && message.contains("no signal in it beyond 3"), "{message}");
    // The peer is still alive and must observe its own declaration.
    peer.tell("raise 2 3");
    ok(mp_stream_synchronize(node.context, in_time));
    // No kernel polls for a larger value than was declared, so there is no error. A larger value is refused.
    ok(kernels_wait(5));
    let mut stands = 0;
    // SAFETY: the output is valid for the call.
    ok(unsafe { mp_signal_read(node.context, polled, &mut stands) });
    assert_eq!(stands, 0, "a kernel in time was ended");
    refused(kernels_wait(6), MP_ERROR_PEER_GONE);
    ok(mp_stream_synchronize(node.context, null_mut()));
    drop(peer);
}

#[test]
fn counters_that_are_none_are_refused() {
    let node = Node::new(c"beluga");
    let memory = node.alloc(0, 20);
    let own = [0_u64; 4];
    let mut peer = Peer::start();
    peer.tell("alloc 0 4096 1");
    let theirs = import(&node, &from_hex(&peer.tell("export 0 0 4096")));
    let good = signal(memory.cast(), 1);
    for (counter, expected) in [
        (null_mut(), "signal 1: 0x0 is not a counter: it is NULL"),
        (memory.wrapping_add(4), "is not aligned to 8 bytes"),
        (memory.wrapping_add(16), "extends past the end of its allocation"),
        (own.as_ptr().cast_mut().cast(), "allocate it as memory shared between processes"),
    ] {
        let signals = [good, signal(counter.cast(), 1)];
        // SAFETY: the list is valid for the calls.
        unsafe {
            let message = refused(mp_stream_wait_signals(node.context, null_mut(), signals.as_ptr(), 2), MP_ERROR_INVALID_POINTER);
            assert!(message.contains(expected) && message.contains("signal 1"), "{message}");
            refused(mp_stream_raise_signals(node.context, null_mut(), signals.as_ptr(), 2), MP_ERROR_INVALID_POINTER);
            refused(mp_signal_synchronize(node.context, counter.cast(), 1, 0.0), MP_ERROR_INVALID_POINTER);
        }
    }
    assert_eq!(last_argument().as_deref(), Some("counter"));
    // Nothing would end a wait for a counter in memory whose owner has exited.
    let remote = [signal(theirs.cast(), 1)];
    // SAFETY: as above.
    let message = refused(unsafe { mp_stream_wait_signals(node.context, null_mut(), remote.as_ptr(), 1) }, MP_ERROR_NOT_SUPPORTED);
    assert!(message.contains("a counter in memory of this process"), "{message}");
    peer.kill();
    // SAFETY: as above.
    refused(unsafe { mp_stream_raise_signals(node.context, null_mut(), remote.as_ptr(), 1) }, MP_ERROR_PEER_GONE);
    close(&node, theirs);
    // Refused calls have enqueued nothing.
    ok(mp_stream_synchronize(node.context, null_mut()));
    assert_eq!(own, [0; 4]);
    node.still_works();
}

#[test]
fn a_peer_killed_in_the_middle_of_an_exchange_ends_it() {
    const BYTES: usize = 100_000;
    let node = Node::new(c"beluga");
    for rounds_before in [0, 1, 7] {
        let mut peer = Peer::start();
        peer.tell(&format!("alloc 0 {} 7", 2000 * BYTES));
        peer.tell("alloc -1 8 0");
        let free = import(&node, &from_hex(&peer.tell("export 1 0 8"))).cast::<u64>();
        let (data, flag) = (node.alloc(1, BYTES), counters(&node, 1));
        // SAFETY: the peer has not been started yet.
        unsafe { free.write(0) };
        peer.tell(&format!("import {}", hex(&export(&node, data, BYTES))));
        peer.tell(&format!("import {}", hex(&export(&node, flag.cast(), 8))));
        let stream = node.stream(1);
        for round in 0..2000 {
            wait_in(&node, stream, &[signal(flag, round + 1)]);
            raise_in(&node, stream, &[signal(free, round + 1)]);
        }
        writeln!(peer.orders, "pump 0 1 0 1 2000 {BYTES}").expect("the peer reads");
        ok(wait_for(&node, flag, rounds_before, f64::INFINITY));
        peer.kill();
        let message = refused(mp_stream_synchronize(node.context, stream), MP_ERROR_PEER_GONE);
        assert!(message.contains(&format!("process {}", peer.process.id())), "{message}");
        close(&node, free.cast());
        ok(mp_stream_destroy(node.context, stream));
        node.free(data);
        node.free(flag.cast());
        ok(mp_stream_synchronize(node.context, null_mut()));
        node.still_works();
    }
    assert_eq!(names(), 0);
}
