//! Host functions in captured streams, on real GPUs: they are the graph's.

use super::*;
use std::time::{Duration, Instant};

/// A host function that counts its calls, and with it what tells when it is gone.
fn counted() -> (Arc<AtomicU32>, mpgpu::backend::HostFunction) {
    let calls = Arc::new(AtomicU32::new(0));
    let seen = calls.clone();
    (calls, Box::new(move || _ = seen.fetch_add(1, Ordering::AcqRel)))
}

/// Captures it in a stream.
fn capture(backend: &CudaBackend, stream: StreamHandle, work: mpgpu::backend::HostFunction) -> sys::CUgraph {
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream is of the current context; the output is valid for the call.
    unsafe {
        ok(sys::cuStreamBeginCapture_v2(raw(stream), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
        let captured = backend.launch_host(stream, work);
        ok(sys::cuStreamEndCapture(raw(stream), &mut graph));
        captured.expect("captured");
    }
    graph
}

/// Waits until nobody but the caller has it. The driver destroys what belongs to a graph on a thread of its own, at a time of its own.
#[track_caller]
fn assert_gone(calls: &Arc<AtomicU32>, what: &str) {
    let begin = Instant::now();
    while Arc::strong_count(calls) > 1 {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}: the function is still there after 20 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_captured_host_function_runs_at_every_launch_and_goes_with_the_last_of_its_graph() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let backend = backend();
    let stream = backend.create_stream(GPU0).expect("a stream");
    let run = |exec: sys::CUgraphExec| {
        // SAFETY: an instantiated graph; the stream is of the current context.
        ok(unsafe { sys::cuGraphLaunch(exec, raw(stream)) });
        backend.synchronize_stream(stream).expect("it runs");
    };
    let (calls, work) = counted();
    let graph = capture(&backend, stream, work);
    assert_eq!((calls.load(Ordering::Acquire), Arc::strong_count(&calls)), (0, 2), "captured, not run");
    let mut execs = [std::ptr::null_mut(); 2];
    for exec in &mut execs {
        // SAFETY: the output is valid for the call.
        ok(unsafe { sys::cuGraphInstantiateWithFlags(exec, graph, 0) });
    }
    (0..3).for_each(|_| run(execs[0]));
    assert_eq!(calls.load(Ordering::Acquire), 3);
    // SAFETY: made above, used no more, and nothing is enqueued.
    unsafe {
        ok(sys::cuGraphDestroy(graph));
        run(execs[0]);
        ok(sys::cuGraphExecDestroy(execs[0]));
        run(execs[1]);
        assert_eq!((calls.load(Ordering::Acquire), Arc::strong_count(&calls)), (5, 2), "the other exec keeps it");
        ok(sys::cuGraphExecDestroy(execs[1]));
    }
    assert_gone(&calls, "graph and execs are destroyed");
    assert_eq!(calls.load(Ordering::Acquire), 5);
}

#[test]
fn a_captured_host_function_that_is_never_launched_is_given_back() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let backend = backend();
    let stream = backend.create_stream(GPU0).expect("a stream");
    let (calls, work) = counted();
    let graph = capture(&backend, stream, work);
    // SAFETY: captured above, used no more.
    ok(unsafe { sys::cuGraphDestroy(graph) });
    assert_gone(&calls, "a graph that was never launched");
    // A capture that is broken off, by what no capture allows.
    let (also, work) = counted();
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream is of the current context; the output is valid for the call.
    unsafe {
        ok(sys::cuStreamBeginCapture_v2(raw(stream), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
        let captured = backend.launch_host(stream, work);
        assert_ne!(sys::cuStreamSynchronize(raw(stream)), CUresult::CUDA_SUCCESS);
        assert_ne!(sys::cuStreamEndCapture(raw(stream), &mut graph), CUresult::CUDA_SUCCESS);
        captured.expect("captured");
    }
    assert_gone(&also, "a capture that was broken off");
    assert_eq!(calls.load(Ordering::Acquire) + also.load(Ordering::Acquire), 0);
    // Outside of a capture, the stream takes one again, and drops it when it has run.
    let (calls, work) = counted();
    backend.launch_host(stream, work).expect("enqueued");
    backend.synchronize_stream(stream).expect("it runs");
    assert_gone(&calls, "a function that has run");
    assert_eq!(calls.load(Ordering::Acquire), 1);
}
