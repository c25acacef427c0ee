//! Tests the effect of external events: a peer that is killed while a stream's queue is full or while a graph waits for it, and memory that
//! is freed while another thread captures. Cases that may hang or crash run in a separate process, which must exit by itself.

use super::share::{Peer, export, handle_of, host_words};
use super::*;
use mpgpu_backend::Signal;
use std::time::{Duration, Instant};

const VARIABLE: &str = "ATTACK_TEST_CASE";
const BYTES: u64 = 1 << 20;

fn check(case: &str) {
    let Some(_turn) = gpus(2) else { return };
    let ended = child::run("attacks::child_is_attacked", VARIABLE, case, 90);
    for line in ended.text.lines().filter(|line| line.starts_with("ANSWER ")) {
        drop(writeln!(std::io::stderr(), "gpu tests: attacks: {case}: {line}"));
    }
    assert!(ended.is_success() && ended.text.contains("ANSWER well"), "{case}: {}\n{}", ended.how(), ended.text);
}

/// Runs one case in a child process if the environment requests it.
#[test]
#[ignore = "a process that other tests start"]
fn child_is_attacked() {
    let Ok(case) = std::env::var(VARIABLE) else { return };
    match &*case {
        "full" => a_peer_is_killed_while_a_queue_is_full(),
        "captured" => a_peer_is_killed_while_a_graph_waits(),
        "freed" => memory_goes_while_another_thread_captures(),
        "work" => memory_goes_while_streams_work(),
        other => panic!("{other}: unknown case"),
    }
    println!("\nANSWER well");
}

#[test]
fn a_peers_death_lets_a_stream_go_on_whose_queue_is_full() {
    check("full");
}

#[test]
fn a_peers_death_lets_graphs_go_on_that_wait_for_it_however_often_they_are_launched() {
    check("captured");
}

#[test]
fn freeing_and_closing_end_no_capture_of_another_thread() {
    check("freed");
}

#[test]
fn freeing_waits_for_work_in_streams_of_the_library_and_of_others() {
    check("work");
}

/// Creates a context with a counter that a process `Peer` has mapped.
fn with_peer() -> (Context, u64, Peer) {
    let context = context(None, |_| {});
    let counter = context.allocate_shared(DeviceId::HOST, 16).expect("memory");
    host_words(counter, 2).fill(0);
    let mut peer = Peer::start();
    let imported = peer.ask(&format!("import {}", export(&context, counter, 16)));
    assert!(imported.starts_with("device"), "{imported}");
    (context, counter, peer)
}

fn store(counter: u64, value: u64) {
    // SAFETY: a counter in host memory of this test.
    unsafe { &*std::ptr::with_exposed_provenance::<std::sync::atomic::AtomicU64>(counter as usize) }.store(value, Ordering::SeqCst);
}

#[track_caller]
fn told(result: Result<(), Error>) {
    let text = result.expect_err("it has waited in vain").to_string();
    assert!(text.contains("but the wait is for"), "{text}");
}

fn a_peer_is_killed_while_a_queue_is_full() {
    let (context, counter, peer) = with_peer();
    let stream = context.create_stream(GPU0).expect("a stream");
    let event = context.create_event().expect("an event");
    let enqueued = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let filling = scope.spawn(|| {
            for value in 1..=4096 {
                if let Err(error) = context.stream_wait_signals(stream, &[Signal { counter, value }]) {
                    assert!(error.to_string().contains("but the wait is for"), "{error}");
                    break;
                }
                enqueued.fetch_add(1, Ordering::SeqCst);
                context.record_event(event, stream).expect("recorded");
            }
        });
        let mut last = u32::MAX;
        while last != enqueued.load(Ordering::SeqCst) && !filling.is_finished() {
            last = enqueued.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(300));
        }
        println!("\nANSWER {last} waits went in, {}", if filling.is_finished() { "all" } else { "then the call blocks" });
        // Dropping the value kills the peer.
        drop(peer);
        filling.join().expect("it goes on");
    });
    told(context.synchronize_stream(stream));
    context.synchronize_stream(stream).expect("it was told");
}

fn a_peer_is_killed_while_a_graph_waits() {
    let (context, counter, peer) = with_peer();
    let stream = context.create_stream(GPU0).expect("a stream");
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: a stream of the context; the outputs are valid for the calls.
    unsafe {
        set_device(0);
        ok(sys::cuStreamBeginCapture_v2(raw(stream), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        context.stream_wait_signals(stream, &[Signal { counter, value: 1 }]).expect("captured");
        ok(sys::cuStreamEndCapture(raw(stream), &mut graph));
        ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    }
    // SAFETY: instantiated above.
    let launch = || unsafe { ok(sys::cuGraphLaunch(exec, raw(stream))) };
    store(counter, 1);
    launch();
    context.synchronize_stream(stream).expect("nobody has gone");
    // A wait that is enqueued later makes the library check the pending waits.
    context.stream_wait_signals(stream, &[Signal { counter: counter + 8, value: 0 }]).expect("reached");
    store(counter, 0);
    launch();
    // Dropping the value kills the peer.
    drop(peer);
    told(context.synchronize_stream(stream));
    for _ in 0..3 {
        store(counter, 0);
        launch();
        context.synchronize_stream(stream).expect("it goes on, and was told");
    }
    // SAFETY: created above, and idle.
    unsafe {
        ok(sys::cuGraphExecDestroy(exec));
        ok(sys::cuGraphDestroy(graph));
    }
}

/// Creates a stream by the driver, as the CUDA runtime does. The library does not know this stream.
fn foreign_stream() -> sys::CUstream {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the output is valid for the call; the context of GPU 0 is current.
    unsafe { ok(sys::cuStreamCreate(&mut stream, 1)) };
    stream
}

fn memory_goes_while_another_thread_captures() {
    use sys::CUstreamCaptureMode::*;
    let (context, _, mut peer) = with_peer();
    set_device(0);
    let stream = foreign_stream();
    let [from, to] = [(); 2].map(|()| context.allocate(GPU0, BYTES).expect("memory"));
    let transfer = Transfer { dst: to, dst_device: GPU0, src: from, src_device: GPU0, bytes: BYTES };
    let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
    for (round, mode) in
        [CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED].into_iter().enumerate()
    {
        let content = Random(round as u64).bytes(BYTES as usize);
        write(from, &content);
        let [small, large] = [4096, 8 << 20].map(|bytes| context.allocate(GPU0, bytes).expect("memory"));
        let [pinned, paged] = [4096, 8 << 20].map(|bytes| context.allocate(DeviceId::HOST, bytes).expect("memory"));
        let away = context.allocate(GPU1, 4096).expect("memory");
        let (imported, _) = context.state().import_memory(&handle_of(&peer.ask("counters"))).expect("imported");
        let other = super::context(None, |_| {});
        other.allocate(GPU0, 4096).expect("memory");
        let raw_stream = StreamHandle(stream.addr());
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a stream of this test.
        unsafe { ok(sys::cuStreamBeginCapture_v2(stream, mode)) };
        plan.enqueue(raw_stream).expect("captured");
        std::thread::scope(|scope| {
            let context = &context;
            let freeing = scope.spawn(move || {
                for address in [small, large, pinned, paged, away] {
                    context.free(address).expect("allocated");
                }
                context.state().close_memory(imported).expect("imported");
                other.close().expect("nothing has failed");
                drop(other);
            });
            freeing.join().expect("no assertion failed");
        });
        plan.enqueue(raw_stream).expect("still captured");
        // SAFETY: the outputs are valid for the calls. The captured graph is launched once.
        unsafe {
            let ended = sys::cuStreamEndCapture(stream, &mut graph);
            println!("\nANSWER {mode:?}: the capture ended with {ended:?}");
            ok(ended);
            ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            ok(sys::cuGraphLaunch(exec, stream));
            ok(sys::cuStreamSynchronize(stream));
            ok(sys::cuGraphExecDestroy(exec));
            ok(sys::cuGraphDestroy(graph));
        }
        assert_bytes(&read(to, BYTES as usize), &content, "what was captured");
    }
}

fn memory_goes_while_streams_work() {
    let context = context(None, |_| {});
    set_device(0);
    let foreign = StreamHandle(foreign_stream().addr());
    let [own, away] = [GPU0, GPU1].map(|gpu| context.create_stream(gpu).expect("a stream"));
    let counter = context.allocate_shared(DeviceId::HOST, 16).expect("memory");
    host_words(counter, 2).fill(0);
    let mut value = 0;
    for (name, stream) in [("own", own), ("another GPU's", away), ("foreign", foreign), ("the default", StreamHandle(0))] {
        for (kind, device, bytes) in [
            ("device memory", GPU0, 4096),
            ("large device memory", GPU0, 8 << 20),
            ("pinned", DeviceId::HOST, 4096),
            ("pages", DeviceId::HOST, 8 << 20),
        ] {
            for by_host_function in [false, true] {
                let memory = context.allocate(device, bytes).expect("memory");
                value += 1;
                let raised = Arc::new(AtomicBool::new(false));
                if by_host_function {
                    let raised = raised.clone();
                    let work = move || {
                        std::thread::sleep(Duration::from_millis(100));
                        raised.store(true, Ordering::SeqCst);
                    };
                    context.launch_host(stream, Box::new(work)).expect("enqueued");
                } else {
                    context.stream_wait_signals(stream, &[Signal { counter, value }]).expect("enqueued");
                }
                let began = Instant::now();
                let waited = std::thread::scope(|scope| {
                    let (context, seen) = (&context, &raised);
                    let freeing = scope.spawn(move || {
                        context.free(memory).expect("allocated");
                        seen.load(Ordering::SeqCst)
                    });
                    if !by_host_function {
                        std::thread::sleep(Duration::from_millis(100));
                        raised.store(true, Ordering::SeqCst);
                        store(counter, value);
                    }
                    freeing.join().expect("no assertion failed")
                });
                let what = if by_host_function { "a host function" } else { "a wait" };
                println!(
                    "\nANSWER {kind}, {what} in {name} stream: {} after {:?}",
                    if waited { "waited" } else { "DID NOT WAIT" },
                    began.elapsed()
                );
                context.synchronize_stream(stream).expect("it runs");
                assert!(waited, "{kind} was freed while {what} was in {name} stream");
            }
        }
    }
}
