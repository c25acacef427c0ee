//! Memory that its owner freed under a plan, on real GPUs: an error that names it, and a context that goes on working.
//!
//! Such an execution may take the process with it, so children do them, each one case.

use super::*;
use std::fmt::Write as _;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CASE: &str = "FREED_TEST_CASE";
const BYTES: usize = 64 << 10;

/// The GPU whose memory is freed, another one than the first where there are several.
fn last() -> u32 {
    device_count().expect("GPUs are there") - 1
}

/// Memory that another library of the process owns: its address, how it is freed, and whether its bytes stay readable after that.
fn memory(kind: &str, gpu: u32) -> (u64, Box<dyn FnOnce()>) {
    let mut address = 0;
    match kind {
        "plain" => {
            set_device(gpu);
            // SAFETY: the output is valid for the call; freed once.
            ok(unsafe { sys::cuMemAlloc_v2(&mut address, BYTES) });
            set_device(0);
            (address, Box::new(move || ok(unsafe { sys::cuMemFree_v2(address) })))
        }
        // Memory of a large allocation is mapped and unmapped by itself, and not a part of a block that the driver keeps.
        "large" => {
            set_device(gpu);
            // SAFETY: as above.
            ok(unsafe { sys::cuMemAlloc_v2(&mut address, 64 << 20) });
            set_device(0);
            (address, Box::new(move || ok(unsafe { sys::cuMemFree_v2(address) })))
        }
        "pool" | "trimmed" => {
            set_device(gpu);
            let mut pool = std::ptr::null_mut();
            let all: Vec<_> = (0..device_count().expect("GPUs are there"))
                .map(|id| sys::CUmemAccessDesc {
                    location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: id as i32 },
                    flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                })
                .collect();
            // SAFETY: outputs are valid for the calls; the pool is the GPU's own.
            unsafe {
                ok(sys::cuDeviceGetDefaultMemPool(&mut pool, gpu as i32));
                ok(sys::cuMemPoolSetAccess(pool, all.as_ptr(), all.len()));
                ok(sys::cuMemAllocAsync(&mut address, BYTES, std::ptr::null_mut()));
                ok(sys::cuCtxSynchronize());
            }
            set_device(0);
            let trimmed = kind == "trimmed";
            let release = move || {
                set_device(gpu);
                // SAFETY: allocated above, freed once.
                unsafe {
                    ok(sys::cuMemFreeAsync(address, std::ptr::null_mut()));
                    ok(sys::cuCtxSynchronize());
                    if trimmed {
                        ok(sys::cuMemPoolTrimTo(pool, 0));
                    }
                }
                set_device(0);
            };
            (address, Box::new(release))
        }
        "pinned" => {
            let mut pointer = std::ptr::null_mut();
            // SAFETY: the output is valid for the call; freed once.
            ok(unsafe { sys::cuMemHostAlloc(&mut pointer, BYTES, sys::CU_MEMHOSTALLOC_PORTABLE) });
            (pointer.expose_provenance() as u64, Box::new(move || ok(unsafe { sys::cuMemFreeHost(pointer) })))
        }
        "registered" => {
            let mut memory = vec![0_u8; BYTES];
            // SAFETY: the vector stays; unregistered once.
            ok(unsafe { sys::cuMemHostRegister_v2(memory.as_mut_ptr().cast(), BYTES, sys::CU_MEMHOSTREGISTER_PORTABLE) });
            let address = memory.leak().as_mut_ptr();
            (address.expose_provenance() as u64, Box::new(move || ok(unsafe { sys::cuMemHostUnregister(address.cast()) })))
        }
        "mapped" => {
            let range = Mapped::new(&[gpu]);
            (range.base, Box::new(move || range.unmap()))
        }
        other => panic!("no memory of kind {other}"),
    }
}

/// One reservation of the virtual memory API with a chunk of 2 MiB on each of these GPUs, open to all.
struct Mapped {
    base: u64,
    chunks: Vec<u64>,
}

const CHUNK: usize = 2 << 20;

impl Mapped {
    fn new(gpus: &[u32]) -> Mapped {
        let device = |id: u32| sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: id as i32 };
        let mut base = 0;
        // SAFETY: inputs and outputs are valid for the calls.
        unsafe {
            ok(sys::cuMemAddressReserve(&mut base, gpus.len() * CHUNK, 0, 0, 0));
            let chunk = |(index, gpu): (usize, &u32)| {
                let mut memory = 0;
                let properties = sys::CUmemAllocationProp {
                    type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
                    requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                    location: device(*gpu),
                    win32HandleMetaData: std::ptr::null_mut(),
                    allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                        compressionType: 0,
                        gpuDirectRDMACapable: 0,
                        usage: 0,
                        reserved: [0; 4],
                    },
                };
                ok(sys::cuMemCreate(&mut memory, CHUNK, &properties, 0));
                ok(sys::cuMemMap(base + (index * CHUNK) as u64, CHUNK, 0, memory, 0));
                memory
            };
            let chunks = gpus.iter().enumerate().map(chunk).collect();
            let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            let all: Vec<_> = (0..device_count().expect("GPUs")).map(|gpu| sys::CUmemAccessDesc { location: device(gpu), flags }).collect();
            ok(sys::cuMemSetAccess(base, gpus.len() * CHUNK, all.as_ptr(), all.len()));
            Mapped { base, chunks }
        }
    }

    fn unmap(&self) {
        // SAFETY: mapped in `new`, used no more.
        unsafe {
            ok(sys::cuMemUnmap(self.base, self.chunks.len() * CHUNK));
            self.chunks.iter().for_each(|memory| ok(sys::cuMemRelease(*memory)));
            ok(sys::cuMemAddressFree(self.base, self.chunks.len() * CHUNK));
        }
    }
}

/// What a plan of two transfers does, an end of the second of which was freed: `engine end kind warm stream`.
fn plan_case(words: &[&str]) -> String {
    let [engine, end, kind, warm, stream] = words else { panic!("{words:?}") };
    let engine = match *engine {
        "stream" => Engine::Stream,
        "graph" => Engine::Graph,
        "batch" => Engine::Batch,
        "kernel" => Engine::Kernel,
        _ => Engine::Auto,
    };
    set_device(0);
    let verify = *stream == "verified";
    let context = context(None, |config| {
        if verify {
            config.verify = mpgpu::engine::Verify::Bytes;
        }
    });
    let bytes = BYTES as u64;
    let (foreign, free) = memory(kind, last());
    let mine: Vec<u64> = [GPU0, DeviceId::gpu(last()), GPU0].map(|device| context.allocate(device, bytes).expect("memory")).to_vec();
    let content = Random(3).bytes(BYTES);
    write(mine[0], &content);
    let transfer = |dst, src| Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes };
    let good = transfer(mine[1], mine[0]);
    let bad = if *end == "source" { transfer(mine[2], foreign) } else { transfer(foreign, mine[0]) };
    let options = PlanOptions { engine: Some(engine), ..PlanOptions::default() };
    let plan = context.plan(&[good, bad], &options).expect("a plan");
    let handle = match *stream {
        "default" => StreamHandle(0),
        "foreign" => {
            let mut raw = std::ptr::null_mut();
            // SAFETY: the output is valid for the call.
            ok(unsafe { sys::cuStreamCreate(&mut raw, 1) });
            StreamHandle(raw.expose_provenance())
        }
        _ => context.create_stream(GPU0).expect("a stream"),
    };
    if *warm == "warm" {
        for _ in 0..2 {
            plan.execute(handle).expect("enqueued").wait().expect("it runs");
        }
    }
    // SAFETY: no argument.
    ok(unsafe { sys::cuCtxSynchronize() });
    free();
    let mut said = format!("{:?}: ", plan.planned().program.ops.iter().map(|op| op.mechanism).collect::<Vec<_>>());
    let enqueued = plan.execute(handle);
    let _ = match &enqueued {
        Ok(_) => write!(said, "enqueued, "),
        Err(error) => write!(said, "refused ({error}), "),
    };
    if let Ok(done) = enqueued {
        let _ = match done.wait() {
            Ok(()) => write!(said, "ran, "),
            Err(error) => write!(said, "failed later ({error}), "),
        };
    }
    // The context goes on, whatever that was.
    let after = context.plan(&[good], &options).and_then(|plan| Ok(plan.execute(handle)?.wait()?));
    match after {
        Ok(()) => {
            assert_bytes(&read(mine[1], BYTES), &content, "a good plan after it");
            said + "a good plan runs"
        }
        Err(error) => said + &format!("a good plan fails: {error}"),
    }
}

fn named(code: CUresult) -> String {
    format!("{code:?}").trim_start_matches("CUDA_").to_lowercase()
}

/// What the driver itself says of a freed end: `call end kind`.
fn driver_case(words: &[&str]) -> String {
    let [call, end, kind] = words else { panic!("{words:?}") };
    let contexts = [last(), 0].map(|gpu| {
        set_device(gpu);
        current()
    });
    // SAFETY: both are retained.
    unsafe { sys::cuCtxEnablePeerAccess(contexts[0], 0) };
    let (foreign, free) = memory(kind, last());
    let (mut mine, mut stream) = (0, std::ptr::null_mut());
    // SAFETY: outputs are valid for the calls.
    unsafe {
        ok(sys::cuMemAlloc_v2(&mut mine, BYTES));
        ok(sys::cuStreamCreate(&mut stream, 1));
    }
    let (dst, src) = if *end == "source" { (mine, foreign) } else { (foreign, mine) };
    let (from, to) = if *end == "source" { (contexts[0], contexts[1]) } else { (contexts[1], contexts[0]) };
    let host = |address: u64| std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(address as usize);
    let host_kind = ["pinned", "registered"].contains(kind);
    let mut graph = Graph::default();
    if call.starts_with("graph") {
        graph = Graph::new(dst, src, contexts[1], call.contains("typed"), host_kind, *end == "source");
        assert_eq!(graph.made, CUresult::CUDA_SUCCESS);
        graph.launch(stream);
        // SAFETY: the stream is ours.
        ok(unsafe { sys::cuStreamSynchronize(stream) });
    }
    free();
    let mut said = String::new();
    // SAFETY: that is the question.
    unsafe {
        let code = match *call {
            "Async" => sys::cuMemcpyAsync(dst, src, BYTES, stream),
            "DtoD" => sys::cuMemcpyDtoDAsync_v2(dst, src, BYTES, stream),
            "HtoD" => sys::cuMemcpyHtoDAsync_v2(dst, host(src), BYTES, stream),
            "DtoH" => sys::cuMemcpyDtoHAsync_v2(host(dst), src, BYTES, stream),
            "Peer" => sys::cuMemcpyPeerAsync(dst, to, src, from, BYTES, stream),
            "graph" | "graph-typed" => graph.launch(stream),
            "graph-set" | "graph-set-typed" => {
                let set = graph.set(dst, src, contexts[1]);
                let _ = write!(said, "set {}, launched ", named(set));
                graph.launch(stream)
            }
            "graph-new" | "graph-new-typed" => {
                let new = Graph::new(dst, src, contexts[1], call.contains("typed"), host_kind, *end == "source");
                let _ = write!(said, "made {}, ", named(new.made));
                if new.made == CUresult::CUDA_SUCCESS { new.launch(stream) } else { new.made }
            }
            "attributes" => {
                let (mut id, mut memory_type) = (0_u64, 0_u32);
                let buffer =
                    sys::cuPointerGetAttribute((&raw mut id).cast(), sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, foreign);
                let kind = sys::cuPointerGetAttribute(
                    (&raw mut memory_type).cast(),
                    sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                    foreign,
                );
                let (mut base, mut size, mut device) = (0, 0, 0);
                let range = sys::cuMemGetAddressRange_v2(&mut base, &mut size, foreign);
                let mapped = sys::cuMemHostGetDevicePointer_v2(&mut device, host(foreign), 0);
                let (kind, range, mapped) = (named(kind), named(range), named(mapped));
                let _ = write!(
                    said,
                    "BUFFER_ID {id:#x}, MEMORY_TYPE {memory_type} {kind}, AddressRange {range}, HostGetDevicePointer {mapped}, BUFFER_ID "
                );
                buffer
            }
            other => panic!("no call {other}"),
        };
        let after = sys::cuStreamSynchronize(stream);
        let mut other = 0;
        let alive = sys::cuMemAlloc_v2(&mut other, BYTES);
        let _ = write!(said, "{}, then {}, then {}", named(code), named(after), named(alive));
    }
    said
}

/// A graph of one copy.
struct Graph {
    made: CUresult,
    exec: sys::CUgraphExec,
    node: sys::CUgraphNode,
    types: [sys::CUmemorytype; 2],
}

impl Default for Graph {
    fn default() -> Graph {
        let types = [sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED; 2];
        Graph { made: CUresult::CUDA_SUCCESS, exec: std::ptr::null_mut(), node: std::ptr::null_mut(), types }
    }
}

impl Graph {
    fn new(dst: u64, src: u64, context: sys::CUcontext, typed: bool, host_kind: bool, at_source: bool) -> Graph {
        let mut new = Graph::default();
        if typed {
            let of = |is_host| {
                if is_host { sys::CUmemorytype::CU_MEMORYTYPE_HOST } else { sys::CUmemorytype::CU_MEMORYTYPE_DEVICE }
            };
            new.types = [of(host_kind && !at_source), of(host_kind && at_source)];
        }
        let mut graph = std::ptr::null_mut();
        // SAFETY: outputs are valid for the calls.
        unsafe {
            ok(sys::cuGraphCreate(&mut graph, 0));
            new.made = sys::cuGraphAddMemcpyNode(&mut new.node, graph, std::ptr::null(), 0, &new.copy(dst, src), context);
            if new.made == CUresult::CUDA_SUCCESS {
                new.made = sys::cuGraphInstantiateWithFlags(&mut new.exec, graph, 0);
            }
        }
        new
    }

    fn copy(&self, dst: u64, src: u64) -> sys::CUDA_MEMCPY3D {
        let host = |address: u64| std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(address as usize);
        sys::CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: self.types[1],
            srcHost: host(src),
            srcDevice: src,
            srcArray: std::ptr::null_mut(),
            reserved0: std::ptr::null_mut(),
            srcPitch: 0,
            srcHeight: 0,
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: self.types[0],
            dstHost: host(dst),
            dstDevice: dst,
            dstArray: std::ptr::null_mut(),
            reserved1: std::ptr::null_mut(),
            dstPitch: 0,
            dstHeight: 0,
            WidthInBytes: BYTES,
            Height: 1,
            Depth: 1,
        }
    }

    fn set(&self, dst: u64, src: u64, context: sys::CUcontext) -> CUresult {
        // SAFETY: a node of the graph that the exec was made of.
        unsafe { sys::cuGraphExecMemcpyNodeSetParams(self.exec, self.node, &self.copy(dst, src), context) }
    }

    fn launch(&self, stream: sys::CUstream) -> CUresult {
        // SAFETY: instantiated in `new`.
        unsafe { sys::cuGraphLaunch(self.exec, stream) }
    }
}

/// Copies between GPUs that have not been given access to each other: `call kind`.
fn access_case(words: &[&str]) -> String {
    let [call, kind] = words else { panic!("{words:?}") };
    let contexts = [last(), 0].map(|gpu| {
        set_device(gpu);
        current()
    });
    let (foreign, _) = memory(kind, last());
    let (mut mine, mut stream) = (0, std::ptr::null_mut());
    let content = Random(4).bytes(BYTES);
    // SAFETY: outputs are valid for the calls; memory of this size.
    unsafe {
        ok(sys::cuMemAlloc_v2(&mut mine, BYTES));
        ok(sys::cuStreamCreate(&mut stream, 1));
        let copy = |dst, src, to, from| match *call {
            "Async" => sys::cuMemcpyAsync(dst, src, BYTES, stream),
            "DtoD" => sys::cuMemcpyDtoDAsync_v2(dst, src, BYTES, stream),
            _ => sys::cuMemcpyPeerAsync(dst, to, src, from, BYTES, stream),
        };
        write(mine, &content);
        let into = (copy(foreign, mine, contexts[0], contexts[1]), sys::cuStreamSynchronize(stream));
        write(mine, &vec![0; BYTES]);
        let out = (copy(mine, foreign, contexts[1], contexts[0]), sys::cuStreamSynchronize(stream));
        let right = read(mine, BYTES) == content;
        format!("in {} {}, out {} {}, right {right}", named(into.0), named(into.1), named(out.0), named(out.1))
    }
}

/// What the child of the tests below does; nothing otherwise.
#[test]
fn child_executes_what_was_freed() {
    let Ok(case) = std::env::var(CASE) else { return };
    // Initialises the driver.
    device_count().expect("GPUs are there");
    let words: Vec<&str> = case.split(' ').collect();
    let said = match words[0] {
        "plan" => plan_case(&words[1..]),
        "access" => access_case(&words[1..]),
        _ => driver_case(&words[1..]),
    };
    println!("\nANSWER {said}");
}

/// What a child says of a case, or how it ended.
fn ask(case: &str) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", "freed::child_executes_what_was_freed", "--nocapture", "--test-threads=1"]).env(CASE, case);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("this program runs");
    let started = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if started.elapsed() > Duration::from_secs(60) {
            drop(child.kill());
            drop(child.wait());
            return "HANGS".into();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().expect("it has ended");
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    match out.lines().find_map(|line| line.strip_prefix("ANSWER ")) {
        Some(answer) if output.status.success() => answer.to_owned(),
        answer => format!(
            "ENDED by code {:?}, signal {:?}, {answer:?}: {}",
            output.status.code(),
            output.status.signal(),
            err.lines().filter(|line| line.contains("panicked") || line.contains("Error") || line.contains("left")).collect::<String>()
        ),
    }
}

/// The answers to all cases, eight children at a time.
fn ask_all(cases: Vec<String>) -> Vec<(String, String)> {
    let next = AtomicU32::new(0);
    let answers = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    let answer = ask(case);
                    answers.lock().unwrap_or_else(PoisonError::into_inner).push((case.clone(), answer));
                }
            });
        }
    });
    let mut answers = answers.into_inner().unwrap_or_else(PoisonError::into_inner);
    answers.sort_by_key(|(case, _)| cases.iter().position(|other| other == case));
    answers
}

/// Past the test harness, which keeps the output of tests that pass to itself.
fn say(line: &str) {
    drop(writeln!(std::io::stderr(), "{line}"));
}

#[test]
fn memory_that_was_freed_under_a_plan_is_refused_and_the_context_goes_on() {
    let Some(_turn) = gpus(1) else { return };
    let mut cases = Vec::new();
    for kind in ["plain", "large", "pool", "trimmed", "mapped", "pinned", "registered"] {
        for end in ["source", "destination"] {
            for engine in ["stream", "graph", "batch", "kernel"] {
                for warm in ["cold", "warm"] {
                    cases.push(format!("plan {engine} {end} {kind} {warm} own"));
                }
            }
            if kind == "plain" {
                cases.extend(["default", "foreign", "verified"].map(|stream| format!("plan stream {end} {kind} warm {stream}")));
            }
        }
    }
    let answers = ask_all(cases);
    let mut wrong = 0;
    for (case, answer) in &answers {
        // Host memory that was unregistered, and memory that its pool keeps, may be there still.
        let may_run = case.contains("registered") || case.contains("pool");
        let refused = answer.contains("was freed") && answer.contains("refused");
        let right = (refused || may_run && answer.contains("ran")) && answer.ends_with("a good plan runs");
        wrong += usize::from(!right);
        say(&format!("{} {case}: {answer}", if right { "ok   " } else { "WRONG" }));
    }
    assert_eq!(wrong, 0, "of {} cases", answers.len());
}

/// Not a test of the library: prints what the driver does, for the comments in `cuda/execute.rs` and `cuda/graph.rs`.
#[test]
fn question_what_the_driver_says_of_freed_ends() {
    let Some(_turn) = gpus(1) else { return };
    let mut cases = Vec::new();
    for kind in ["plain", "large", "pool", "trimmed", "mapped", "pinned", "registered"] {
        let is_host = ["pinned", "registered"].contains(&kind);
        for end in ["source", "destination"] {
            let by_type = if !is_host {
                "DtoD"
            } else if end == "source" {
                "HtoD"
            } else {
                "DtoH"
            };
            let also = if is_host { "DtoD" } else { "Peer" };
            for call in ["Async", by_type, also, "graph", "graph-typed", "graph-set", "graph-set-typed", "graph-new", "graph-new-typed"] {
                cases.push(format!("driver {call} {end} {kind}"));
            }
        }
        cases.push(format!("driver attributes source {kind}"));
    }
    for kind in ["plain", "large", "pool", "mapped", "pinned", "registered"] {
        cases.extend(["Async", "DtoD", "Peer"].map(|call| format!("access {call} {kind}")));
    }
    for (case, answer) in ask_all(cases) {
        say(&format!("{case}: {answer}"));
    }
}

/// The median over rounds of what one of a hundred calls takes.
fn cost(stream: sys::CUstream, mut call: impl FnMut() -> CUresult) -> f64 {
    let mut rounds: Vec<f64> = (0..200)
        .map(|_| {
            let begin = Instant::now();
            for _ in 0..100 {
                assert_eq!(call(), CUresult::CUDA_SUCCESS);
            }
            let took = begin.elapsed().as_nanos() as f64 / 100.0;
            // SAFETY: the stream is the test's.
            ok(unsafe { sys::cuStreamSynchronize(stream) });
            took
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[100]
}

#[test]
fn question_what_checks_and_copies_cost() {
    let Some(_turn) = gpus(1) else { return };
    let contexts = [last(), 0].map(|gpu| {
        set_device(gpu);
        current()
    });
    // SAFETY: both are retained.
    unsafe { sys::cuCtxEnablePeerAccess(contexts[0], 0) };
    let (mut pinned, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
    let most = 256 << 20;
    let device = |gpu| {
        set_device(gpu);
        let mut address = 0;
        // SAFETY: the output is valid for the call.
        ok(unsafe { sys::cuMemAlloc_v2(&mut address, most) });
        set_device(0);
        address
    };
    let (a, b, c) = (device(0), device(last()), device(0));
    // SAFETY: outputs are valid for the calls.
    unsafe {
        ok(sys::cuMemHostAlloc(&mut pinned, most, sys::CU_MEMHOSTALLOC_PORTABLE));
        ok(sys::cuStreamCreate(&mut stream, 1));
    }
    let host = pinned.expose_provenance() as u64;
    let mut spread = vec![0_u8; most];
    // SAFETY: the vector lives until the end of the test.
    ok(unsafe { sys::cuMemHostRegister_v2(spread.as_mut_ptr().cast(), most, sys::CU_MEMHOSTREGISTER_PORTABLE) });
    let registered = spread.as_mut_ptr().expose_provenance() as u64;
    for (what, address) in [("GPU 0", a), ("GPU 1", b), ("pinned", host), ("registered", registered)] {
        let (mut id, mut kind, mut base, mut size, mut mapped) = (0_u64, 0_u32, 0, 0, 0);
        let mut names =
            [sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE];
        let mut values = [(&raw mut id).cast(), (&raw mut kind).cast()];
        // SAFETY: outputs are valid for the calls.
        let costs = unsafe {
            [
                cost(stream, || sys::cuPointerGetAttribute((&raw mut id).cast(), names[0], address)),
                cost(stream, || sys::cuPointerGetAttributes(2, names.as_mut_ptr(), values.as_mut_ptr(), address)),
                cost(stream, || {
                    let code = sys::cuMemGetAddressRange_v2(&mut base, &mut size, address);
                    if address == registered || address == host { CUresult::CUDA_SUCCESS } else { code }
                }),
                cost(stream, || {
                    let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
                    sys::cuMemHostGetDevicePointer_v2(&mut mapped, pointer, 0);
                    CUresult::CUDA_SUCCESS
                }),
            ]
        };
        say(&format!(
            "{what}: BUFFER_ID {:.0} ns, two attributes {:.0} ns, cuMemGetAddressRange {:.0} ns, cuMemHostGetDevicePointer {:.0} ns",
            costs[0], costs[1], costs[2], costs[3]
        ));
    }
    let ends = [("0>1", b, a), ("1>0", a, b), ("0>0", c, a), ("pinned>0", a, host), ("0>pinned", host, a)];
    for (what, dst, src) in ends.into_iter().chain([("registered>0", a, registered), ("0>registered", registered, a)]) {
        let of = |address| if address == b { contexts[0] } else { contexts[1] };
        let host_at = |address: u64| std::ptr::with_exposed_provenance_mut::<std::ffi::c_void>(address as usize);
        let is_host = |address| address == host || address == registered;
        let mut calls: Vec<(&str, Box<dyn Fn(usize) -> CUresult>)> = vec![
            // SAFETY: memory of this size or more.
            ("cuMemcpyAsync", Box::new(move |bytes| unsafe { sys::cuMemcpyAsync(dst, src, bytes, stream) })),
            // SAFETY: as above.
            ("cuMemcpyDtoDAsync", Box::new(move |bytes| unsafe { sys::cuMemcpyDtoDAsync_v2(dst, src, bytes, stream) })),
            // SAFETY: as above.
            ("cuMemcpyPeerAsync", Box::new(move |bytes| unsafe { sys::cuMemcpyPeerAsync(dst, of(dst), src, of(src), bytes, stream) })),
        ];
        if is_host(src) {
            // SAFETY: as above.
            calls
                .push(("cuMemcpyHtoDAsync", Box::new(move |bytes| unsafe { sys::cuMemcpyHtoDAsync_v2(dst, host_at(src), bytes, stream) })));
        }
        if is_host(dst) {
            // SAFETY: as above.
            calls
                .push(("cuMemcpyDtoHAsync", Box::new(move |bytes| unsafe { sys::cuMemcpyDtoHAsync_v2(host_at(dst), src, bytes, stream) })));
        }
        for (name, call) in &calls {
            let first = call(4096);
            if first != CUresult::CUDA_SUCCESS {
                say(&format!("{what} {name}: {}", named(first)));
                continue;
            }
            let issue = cost(stream, || call(4096));
            let begin = Instant::now();
            for _ in 0..8 {
                ok(call(most));
            }
            // SAFETY: the stream is the test's.
            ok(unsafe { sys::cuStreamSynchronize(stream) });
            let rate = 8.0 * most as f64 / begin.elapsed().as_secs_f64() / 1e9;
            say(&format!("{what} {name}: {issue:.0} ns to issue 4 KiB, 256 MiB at {rate:.1} GB/s"));
        }
    }
}

#[test]
fn question_what_the_driver_says_of_memory_of_several_chunks() {
    let Some(_turn) = gpus(1) else { return };
    let contexts = [last(), 0].map(|gpu| {
        set_device(gpu);
        current()
    });
    // SAFETY: both are retained.
    unsafe { sys::cuCtxEnablePeerAccess(contexts[0], 0) };
    for gpus in [&[0][..], &[0, 0], &[0, last()], &[last(), 0, last()]] {
        let range = Mapped::new(gpus);
        for (at, what) in [(0, "first byte"), (CHUNK as u64 + 4096, "in the second chunk")] {
            let address = range.base + at;
            if at as usize >= gpus.len() * CHUNK {
                continue;
            }
            use sys::CUpointer_attribute::*;
            let mut line = format!("chunks on {gpus:?} at {:#x}, {what}:", range.base);
            for attribute in [
                CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                CU_POINTER_ATTRIBUTE_BUFFER_ID,
                CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                CU_POINTER_ATTRIBUTE_MAPPED,
                CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
                CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
                CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
                CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID,
            ] {
                let mut value = 0_u64;
                // SAFETY: room for the widest of these.
                let code = unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) };
                let name = format!("{attribute:?}");
                let name = name.trim_start_matches("CU_POINTER_ATTRIBUTE_");
                let _ = if code == CUresult::CUDA_SUCCESS {
                    write!(line, " {name}={value:#x}")
                } else {
                    write!(line, " {name}: {}", named(code))
                };
            }
            let (mut base, mut size, mut memory) = (0, 0, 0);
            let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
            // SAFETY: outputs are valid for the calls.
            unsafe {
                let code = sys::cuMemGetAddressRange_v2(&mut base, &mut size, address);
                let _ = write!(line, " cuMemGetAddressRange {} {base:#x} {size:#x}", named(code));
                let code = sys::cuMemRetainAllocationHandle(&mut memory, pointer);
                let index = range.chunks.iter().position(|chunk| *chunk == memory);
                let _ = write!(line, " cuMemRetainAllocationHandle {} is chunk {index:?}", named(code));
                if code == CUresult::CUDA_SUCCESS {
                    ok(sys::cuMemRelease(memory));
                }
            }
            say(&line);
        }
        // Copies over the whole range, by what the library calls.
        let bytes = gpus.len() * CHUNK;
        let content = Random(9).bytes(bytes);
        for via in [0, last()] {
            set_device(via);
            let (mut own, mut stream) = (0, std::ptr::null_mut());
            // SAFETY: outputs are valid for the calls; memory of this size.
            unsafe {
                ok(sys::cuMemAlloc_v2(&mut own, bytes));
                ok(sys::cuStreamCreate(&mut stream, 1));
                write(own, &content);
                let calls = [("cuMemcpyAsync", 0), ("cuMemcpyDtoDAsync", 1), ("graph", 2)];
                for (name, which) in calls {
                    let copy = |dst, src| match which {
                        0 => sys::cuMemcpyAsync(dst, src, bytes, stream),
                        1 => sys::cuMemcpyDtoDAsync_v2(dst, src, bytes, stream),
                        _ => {
                            let mut graph = Graph::default();
                            let mut raw = std::ptr::null_mut();
                            ok(sys::cuGraphCreate(&mut raw, 0));
                            let mut one = graph.copy(dst, src);
                            one.WidthInBytes = bytes;
                            graph.made = sys::cuGraphAddMemcpyNode(&mut graph.node, raw, std::ptr::null(), 0, &one, current());
                            if graph.made == CUresult::CUDA_SUCCESS {
                                graph.made = sys::cuGraphInstantiateWithFlags(&mut graph.exec, raw, 0);
                            }
                            if graph.made == CUresult::CUDA_SUCCESS { graph.launch(stream) } else { graph.made }
                        }
                    };
                    write(range.base, &vec![0; bytes]);
                    let into = (copy(range.base, own), sys::cuStreamSynchronize(stream));
                    let there = read(range.base, bytes) == content;
                    write(own, &vec![0; bytes]);
                    write(range.base, &content);
                    let out = (copy(own, range.base), sys::cuStreamSynchronize(stream));
                    let back = read(own, bytes) == content;
                    write(own, &content);
                    let begin = Instant::now();
                    for _ in 0..20 {
                        copy(own, range.base);
                    }
                    ok(sys::cuStreamSynchronize(stream));
                    let rate = 20.0 * bytes as f64 / begin.elapsed().as_secs_f64() / 1e9;
                    say(&format!(
                        "chunks on {gpus:?}, {name} by GPU {via}: in {} {} right {there}, out {} {} right {back}, {rate:.1} GB/s",
                        named(into.0),
                        named(into.1),
                        named(out.0),
                        named(out.1)
                    ));
                }
                ok(sys::cuMemFree_v2(own));
            }
        }
        set_device(0);
        // The library's plans with such an end.
        let context = context(None, |_| ());
        let memory = context.allocate(GPU0, bytes as u64).expect("memory");
        let located = context.backend().locate(range.base + bytes as u64 - 1);
        let transfer = |dst, src| Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes: bytes as u64 };
        let run = |dst, src| -> Result<String, Error> {
            let plan = context.plan(&[transfer(dst, src)], &PlanOptions::default())?;
            write(src, &content);
            plan.execute(StreamHandle(0))?.wait()?;
            Ok(format!("right {}", read(dst, bytes) == content))
        };
        let [into, out] = [run(range.base, memory), run(memory, range.base)].map(|said| said.unwrap_or_else(|error| error.to_string()));
        say(&format!("chunks on {gpus:?}: located {located:?}; planned into it: {into}; out of it: {out}"));
        let exported = [(0, bytes as u64), (0, CHUNK as u64), (4096, 4096)]
            .map(|(at, bytes)| context.export_memory(range.base + at, bytes).map_or_else(|error| error.to_string(), |_| "exported".into()));
        say(&format!("chunks on {gpus:?}: export of the whole: {}; of a chunk: {}; of a part: {}", exported[0], exported[1], exported[2]));
        drop(context);
        range.unmap();
    }
}

#[test]
fn question_which_functions_of_captures_the_driver_has() {
    let Some(_turn) = gpus(1) else { return };
    type Function = unsafe extern "C" fn();
    for name in [
        &b"cuUserObjectCreate"[..],
        b"cuUserObjectRelease",
        b"cuGraphRetainUserObject",
        b"cuStreamGetCaptureInfo_v2",
        b"cuStreamGetCaptureInfo_v3",
    ] {
        // SAFETY: not called.
        let found = unsafe { sys::culib().get::<Function>(name).is_ok() };
        say(&format!("{}: {found}", String::from_utf8_lossy(name)));
    }
}
