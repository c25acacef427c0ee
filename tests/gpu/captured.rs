//! Tests captured streams on real GPUs. Host functions and staging memory must belong to the captured graph.

use super::*;
use std::time::{Duration, Instant};

/// Returns a host function that counts its calls, and the counter. The reference count of the counter shows when the function is dropped.
fn counted() -> (Arc<AtomicU32>, mpgpu_backend::HostFunction) {
    let calls = Arc::new(AtomicU32::new(0));
    let seen = calls.clone();
    (calls, Box::new(move || _ = seen.fetch_add(1, Ordering::AcqRel)))
}

/// Captures a call of the host function in a stream, and returns the graph.
fn capture(backend: &CudaBackend, stream: StreamHandle, work: mpgpu_backend::HostFunction) -> sys::CUgraph {
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream belongs to the current context. The output is valid for the call.
    unsafe {
        ok(sys::cuStreamBeginCapture_v2(raw(stream), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
        let captured = backend.launch_host(stream, work);
        ok(sys::cuStreamEndCapture(raw(stream), &mut graph));
        captured.expect("captured");
    }
    graph
}

/// Waits until only the caller holds a reference to the counter. The driver destroys objects of a graph later, in a separate thread.
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
        // SAFETY: an instantiated graph. The stream belongs to the current context.
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
    // SAFETY: created above and no longer used. Nothing is enqueued.
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
    // SAFETY: captured above, and no longer used.
    ok(unsafe { sys::cuGraphDestroy(graph) });
    assert_gone(&calls, "a graph that was never launched");
    // The capture is invalidated by a call that is forbidden during a capture.
    let (also, work) = counted();
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream belongs to the current context. The output is valid for the call.
    unsafe {
        ok(sys::cuStreamBeginCapture_v2(raw(stream), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
        let captured = backend.launch_host(stream, work);
        assert_ne!(sys::cuStreamSynchronize(raw(stream)), CUresult::CUDA_SUCCESS);
        assert_ne!(sys::cuStreamEndCapture(raw(stream), &mut graph), CUresult::CUDA_SUCCESS);
        captured.expect("captured");
    }
    assert_gone(&also, "a capture that was broken off");
    assert_eq!(calls.load(Ordering::Acquire) + also.load(Ordering::Acquire), 0);
    // After the capture has ended, the stream accepts a host function again, and drops it after the call.
    let (calls, work) = counted();
    backend.launch_host(stream, work).expect("enqueued");
    backend.synchronize_stream(stream).expect("it runs");
    assert_gone(&calls, "a function that has run");
    assert_eq!(calls.load(Ordering::Acquire), 1);
}

/// Captured graph together with the executable graph made from it.
struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

impl Graph {
    /// Captures the work that `enqueue` enqueues in a stream of the current context.
    fn capture(mode: sys::CUstreamCaptureMode, stream: StreamHandle, enqueue: impl FnOnce()) -> Graph {
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the outputs are valid for the calls.
        unsafe {
            ok(sys::cuStreamBeginCapture_v2(raw(stream), mode));
            enqueue();
            ok(sys::cuStreamEndCapture(raw(stream), &mut graph));
            ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        }
        Graph { graph, exec }
    }

    fn launch(&self, stream: StreamHandle) {
        // SAFETY: instantiated above. The stream belongs to the current context.
        ok(unsafe { sys::cuGraphLaunch(self.exec, raw(stream)) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: created in `capture`, and no longer used.
        unsafe {
            ok(sys::cuGraphExecDestroy(self.exec));
            ok(sys::cuGraphDestroy(self.graph));
        }
    }
}

const GLOBAL: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;

/// Device memory on two GPUs, with the contents that it must have.
struct Pair {
    src: u64,
    dst: u64,
    content: Vec<u8>,
}

impl Pair {
    fn new(backend: &CudaBackend, bytes: u64, [from, to]: [DeviceId; 2]) -> Pair {
        let [src, dst] = [from, to].map(|device| backend.allocate(device, bytes).expect("memory"));
        Pair { src, dst, content: vec![0; bytes as usize] }
    }

    fn fill(&mut self, seed: u64) {
        self.content = Random(seed).bytes(self.content.len());
        write(self.src, &self.content);
        write(self.dst, &vec![!self.content[0]; self.content.len()]);
    }

    #[track_caller]
    fn check(&self, what: &str) {
        assert_bytes(&read(self.dst, self.content.len()), &self.content, what);
    }
}

#[test]
fn a_staged_plan_is_captured_in_every_mode_and_every_launch_moves_every_byte() {
    use sys::CUstreamCaptureMode::*;
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let bytes = (6 << 20) + 13;
    let mut pair = Pair::new(&backend, bytes, [GPU0, GPU1]);
    let [stream, other] = [(); 2].map(|()| backend.create_stream(GPU0).expect("a stream"));
    // The staging rings are in host memory, in small and in huge pages, and on a GPU.
    for (via, slot) in [(DeviceId::HOST, 256 << 10), (DeviceId::HOST, 3 << 20), (GPU1, 256 << 10)] {
        let program = relay(bytes, via, 2, slot, [GPU0, GPU1]);
        for mode in [GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED] {
            // The plan has no staging memory of its own. A graph that used the plan's memory would therefore access invalid memory.
            let graph = Graph::capture(mode, stream, || {
                let end = run(&backend, &program, (pair.dst, pair.src), &[0], stream).expect("captured");
                assert!(end.is_captured() && matches!(end.wait(), Err(BackendError::NotSupported(_))), "it has not run");
            });
            for (round, stream) in [stream, other, stream].into_iter().enumerate() {
                pair.fill(round as u64 + slot);
                graph.launch(stream);
                backend.synchronize_stream(stream).expect("it runs");
                pair.check(&format!("{via}, slots of {slot}, {mode:?}, launch {round}"));
            }
        }
    }
}

#[test]
fn captured_and_other_executions_of_a_staged_plan_run_side_by_side() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let bytes = (24 << 20) + 5;
    let context = context(forced(), |config| config.host_path = Some(true));
    let [src, dst] = [GPU0, GPU1].map(|device| context.allocate(device, bytes).expect("memory"));
    let content = Random(77).bytes(bytes as usize);
    let transfer = Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes };
    for engine in [Engine::Stream, Engine::Graph] {
        let plan = context.plan(&[transfer], &PlanOptions { engine: Some(engine), ..PlanOptions::default() }).expect("a plan");
        assert!(!plan.planned().program.rings.is_empty(), "it stages:\n{}", plan.describe());
        let streams = [(); 3].map(|()| context.create_stream(GPU0).expect("a stream"));
        write(src, &content);
        write(dst, &vec![0x11; bytes as usize]);
        // Executions are in progress when the capture begins. Executions before and after the capture use the plan's own staging memory.
        plan.enqueue(streams[1]).expect("enqueued");
        let capture = || {
            Graph::capture(GLOBAL, streams[0], || {
                plan.enqueue(streams[0]).expect("captured");
                assert!(plan.execute(streams[0]).expect("captured").is_captured());
            })
        };
        let graphs = [capture(), capture()];
        // All executions write the same bytes to the same destination. Each staging slot must therefore contain data of its own execution.
        for round in 0..20 {
            graphs[0].launch(streams[0]);
            graphs[1].launch(streams[2]);
            plan.enqueue(streams[1]).expect("enqueued");
            if round % 5 == 0 {
                streams.into_iter().for_each(|stream| context.synchronize_stream(stream).expect("it runs"));
                assert_bytes(&read(dst, bytes as usize), &content, &format!("{engine:?}, round {round}"));
                write(dst, &vec![round as u8; bytes as usize]);
            }
        }
        plan.execute(streams[1]).expect("enqueued").wait().expect("it runs");
        streams.into_iter().for_each(|stream| context.synchronize_stream(stream).expect("it runs"));
        assert_bytes(&read(dst, bytes as usize), &content, "at the end");
        // Prints the times of a graph launch and of an execution for the same amount of data, for information.
        let timed = |work: &dyn Fn()| {
            let times: Vec<f64> = (0..30)
                .map(|_| {
                    let begin = Instant::now();
                    work();
                    context.synchronize_stream(streams[0]).expect("it runs");
                    begin.elapsed().as_secs_f64() * 1e6
                })
                .collect();
            let mut times = times;
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let twice = timed(&|| {
            plan.enqueue(streams[0]).expect("enqueued");
            plan.enqueue(streams[0]).expect("enqueued");
        });
        println!(
            "ANSWER {engine:?}: two executions of {bytes} bytes {twice:.1} us, a launch of both captured {:.1} us",
            timed(&|| graphs[0].launch(streams[0]))
        );
    }
}

#[test]
fn staging_memory_of_a_graph_outlives_its_plan_and_context_and_is_freed_after_the_graph() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let bytes = (96 << 20) + 1;
    // This memory is allocated before the measurement: memory of the test, and memory that the driver allocates for the first graph of a
    // context.
    let keeper = backend();
    let mut pair = Pair::new(&keeper, bytes, [GPU0, GPU1]);
    let stream = keeper.create_stream(GPU0).expect("a stream");
    drop(Graph::capture(GLOBAL, stream, || _ = run(&keeper, &direct(bytes, GPU0), (pair.dst, pair.src), &[], stream).expect("captured")));
    let slot = 64 << 20;
    let free = |what: &str| {
        let free = staging::free_bytes(2);
        set_device(0);
        println!("ANSWER {what}: {free:?} bytes free");
        free[1]
    };
    let before = free("before");
    let ends = (pair.dst, pair.src);
    let capture = || {
        let backend = backend();
        // The staging ring is on GPU 1. The backend is dropped before the graph is launched.
        Graph::capture(GLOBAL, stream, || {
            run(&backend, &relay(bytes, GPU1, 2, slot, [GPU0, GPU1]), ends, &[0], stream).expect("captured");
        })
    };
    let graph = capture();
    assert!(before.saturating_sub(free("captured, and the backend gone")) >= 2 * slot, "the graph has its own memory");
    pair.fill(1);
    graph.launch(stream);
    // The graph is destroyed while it is in progress. The next capture must not get the graph's memory before the graph has finished.
    drop(graph);
    let also = Pair { src: pair.src, dst: keeper.allocate(GPU1, bytes).expect("memory"), content: pair.content.clone() };
    let second = Graph::capture(GLOBAL, stream, || {
        run(&keeper, &relay(bytes, GPU1, 2, slot, [GPU0, GPU1]), (also.dst, also.src), &[0], stream).expect("captured");
    });
    let other = keeper.create_stream(GPU0).expect("a stream");
    second.launch(other);
    [stream, other].into_iter().for_each(|stream| keeper.synchronize_stream(stream).expect("it runs"));
    pair.check("a graph that was destroyed while it was at work");
    also.check("the graph after it");
    drop(second);
    // The driver destroys objects of a graph in a separate thread. The next call that frees memory also frees the memory of these objects.
    let begin = Instant::now();
    loop {
        let one = keeper.allocate(GPU1, 64).expect("memory");
        keeper.free(one).expect("freed");
        if before.saturating_sub(free("the graphs destroyed")) < bytes + slot {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "the memory of graphs that are gone was not freed");
        std::thread::sleep(Duration::from_millis(20));
    }
    keeper.free(also.dst).expect("freed");
    // Further captures must not need more memory.
    for round in 0..20 {
        drop(capture());
        let taken = before.saturating_sub(free("captured again and again"));
        std::thread::sleep(Duration::from_millis(5));
        assert!(taken < 12 * slot, "{taken} bytes after {round} captures");
    }
}

#[test]
fn a_tree_is_captured_and_every_launch_passes_on_the_bytes_of_its_own() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = context(None, |_| ());
    let bytes = (64 << 20) + 13;
    let devices = [GPU0, GPU1];
    let src = context.allocate(DeviceId::HOST, bytes).expect("memory");
    let dsts = devices.map(|device| context.allocate(device, bytes).expect("memory"));
    let transfers = [0, 1].map(|i| Transfer { dst: dsts[i], dst_device: devices[i], src, src_device: DeviceId::HOST, bytes });
    let plan = context.plan(&transfers, &PlanOptions::default()).expect("a plan");
    assert!(plan.describe().contains("forwarded in"), "it is a tree:\n{}", plan.describe());
    let streams = [(); 2].map(|()| context.create_stream(GPU0).expect("a stream"));
    let graph = Graph::capture(GLOBAL, streams[0], || plan.enqueue(streams[0]).expect("captured"));
    for round in 0..8 {
        let content = Random(round).bytes(bytes as usize);
        write(src, &content);
        dsts.into_iter().for_each(|dst| write(dst, &vec![!content[0]; bytes as usize]));
        // The work is done by the graph, by the plan, and by both one after the other.
        let stream = streams[round as usize % 2];
        if round % 3 != 1 {
            graph.launch(stream);
        }
        if round % 3 != 0 {
            plan.enqueue(stream).expect("enqueued");
        }
        context.synchronize_stream(stream).expect("it runs");
        for (dst, device) in dsts.into_iter().zip(devices) {
            assert_bytes(&read(dst, bytes as usize), &content, &format!("round {round}, on {device}"));
        }
    }
}
