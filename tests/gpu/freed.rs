//! Tests executions of a plan whose memory its owner has freed before, on real GPUs. The error must name the memory, and the context must
//! continue to work.
//!
//! Such an execution may end the process, so each case runs in a child process.

use super::*;
use std::fmt::Write as _;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CASE: &str = "FREED_TEST_CASE";
const BYTES: usize = 64 << 10;

/// Returns the number of the GPU whose memory is freed: the last one, so that it is not the first if there are several.
fn last() -> u32 {
    device_count().expect("GPUs are there") - 1
}

/// Allocates memory as another library of the process would. Returns the address and the function that frees the memory.
fn memory(kind: &str, gpu: u32) -> (u64, Box<dyn FnOnce()>) {
    let mut address = 0;
    match kind {
        "plain" => {
            set_device(gpu);
            // SAFETY: the output is valid for the call; freed once.
            ok(unsafe { sys::cuMemAlloc_v2(&mut address, BYTES) });
            set_device(0);
            // SAFETY: as above.
            (address, Box::new(move || ok(unsafe { sys::cuMemFree_v2(address) })))
        }
        // The memory of a large allocation is mapped and unmapped separately. It is not part of a block that the driver keeps.
        "large" => {
            set_device(gpu);
            // SAFETY: as above.
            ok(unsafe { sys::cuMemAlloc_v2(&mut address, 64 << 20) });
            set_device(0);
            // SAFETY: as above.
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
            // SAFETY: outputs are valid for the calls. The pool is the GPU's default pool.
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
            // SAFETY: as above.
            (pointer.expose_provenance() as u64, Box::new(move || ok(unsafe { sys::cuMemFreeHost(pointer) })))
        }
        "registered" => {
            let mut memory = vec![0_u8; BYTES];
            // SAFETY: the vector is kept, and unregistered once.
            ok(unsafe { sys::cuMemHostRegister_v2(memory.as_mut_ptr().cast(), BYTES, sys::CU_MEMHOSTREGISTER_PORTABLE) });
            let address = memory.leak().as_mut_ptr();
            // SAFETY: as above.
            (address.expose_provenance() as u64, Box::new(move || ok(unsafe { sys::cuMemHostUnregister(address.cast()) })))
        }
        "mapped" => {
            let range = Mapped::new(&[gpu]);
            (range.base, Box::new(move || range.unmap()))
        }
        other => panic!("no memory of kind {other}"),
    }
}

/// Address range of the virtual memory API, with a chunk of 2 MiB on each of the given GPUs. All of them have access.
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
                let properties = super::memory::chunk_on(*gpu, sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
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
        // SAFETY: mapped in `new`, and no longer used.
        unsafe {
            ok(sys::cuMemUnmap(self.base, self.chunks.len() * CHUNK));
            self.chunks.iter().for_each(|memory| ok(sys::cuMemRelease(*memory)));
            ok(sys::cuMemAddressFree(self.base, self.chunks.len() * CHUNK));
        }
    }
}

/// Executes a plan of two transfers, after one end (source or destination) of the second was freed. Returns the result as text. The words
/// of the case are `engine end kind warm stream`.
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
            config.verify = mpgpu_contexts::Verify::Bytes;
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
    // The context must continue to work in any case.
    let after = context.plan(&[good], &options).and_then(|plan| Ok(plan.execute(handle)?.wait()?));
    match after {
        Ok(()) => {
            assert_bytes(&read(mine[1], BYTES), &content, "a good plan after it");
            said + "a good plan runs"
        }
        Err(error) => said + &format!("a good plan fails: {error}"),
    }
}

/// Executes one case in a child process, if the environment requests it. Otherwise does nothing.
#[test]
#[ignore = "a process that other tests start"]
fn child_executes_what_was_freed() {
    let Ok(case) = std::env::var(CASE) else { return };
    // Initialises the driver.
    device_count().expect("GPUs are there");
    let words: Vec<&str> = case.split(' ').collect();
    let said = plan_case(&words);
    println!("\nANSWER {said}");
}

/// Runs a case in a child process. Returns its answer, or a text that describes how the child ended.
fn ask(case: &str) -> String {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--ignored", "--exact", "freed::child_executes_what_was_freed", "--nocapture", "--test-threads=1"]).env(CASE, case);
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

/// Runs all cases, eight child processes at a time, and returns each case with its answer.
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

/// Prints a line. Bypasses the test harness, which captures the output of tests that pass.
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
                    cases.push(format!("{engine} {end} {kind} {warm} own"));
                }
            }
            if kind == "plain" {
                cases.extend(["default", "foreign", "verified"].map(|stream| format!("stream {end} {kind} warm {stream}")));
            }
        }
    }
    let answers = ask_all(cases);
    let mut wrong = 0;
    for (case, answer) in &answers {
        let right = answer.contains("refused") && answer.contains("was freed") && answer.ends_with("a good plan runs");
        wrong += usize::from(!right);
        say(&format!("{} {case}: {answer}", if right { "ok   " } else { "WRONG" }));
    }
    assert_eq!(wrong, 0, "of {} cases", answers.len());
}

#[test]
fn memory_of_several_chunks_is_an_end_of_plans_and_is_shared_by_the_chunk() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    for gpus in [&[0][..], &[0, 0], &[0, 1], &[1, 0, 1]] {
        let range = Mapped::new(gpus);
        let bytes = (gpus.len() * CHUNK) as u64;
        let context = context(None, |_| ());
        let memory = context.allocate(GPU0, bytes).expect("memory");
        for engine in [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel] {
            for (dst, src) in [(range.base, memory), (memory, range.base)] {
                let content = Random(bytes).bytes(bytes as usize);
                write(dst, &vec![0x5a; bytes as usize]);
                write(src, &content);
                let transfer = Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes };
                let options = PlanOptions { engine: Some(engine), ..PlanOptions::default() };
                let plan = context.plan(&[transfer], &options).expect("a plan");
                plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
                assert_bytes(&read(dst, bytes as usize), &content, &format!("chunks on GPUs {gpus:?}, {engine:?}\n{}", plan.describe()));
            }
        }
        for chunk in 0..gpus.len() as u64 {
            let first = range.base + chunk * CHUNK as u64;
            for (at, bytes) in [(0, CHUNK as u64), (4096, 4096)] {
                let exported = context.state().export_memory(first + at, bytes).map(drop);
                assert!(exported.is_ok(), "{bytes} bytes of chunk {chunk} of GPUs {gpus:?}: {exported:?}");
            }
        }
        if gpus.len() > 1 {
            for (at, bytes) in [(0, bytes), (CHUNK as u64 - 1, 2)] {
                let refused = context.state().export_memory(range.base + at, bytes).map(drop);
                let says = |why: &str| why.contains("several chunks") && why.contains("export each chunk");
                assert!(matches!(&refused, Err(error) if says(&error.to_string())), "{bytes} bytes of GPUs {gpus:?}: {refused:?}");
            }
        }
        drop(context);
        range.unmap();
    }
}
