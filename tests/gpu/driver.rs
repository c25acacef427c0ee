//! Tests behaviour of the driver that its manual hardly describes: after a reset of a device, while another thread captures, and with a
//! full queue. Each question is tested in a separate process, because a call may crash or hang. The results are printed, and those on which
//! the library relies are asserted.

use super::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const VARIABLE: &str = "DRIVER_TEST_QUESTION";

/// Objects of a process that exist before it resets its device.
struct Before {
    context: sys::CUcontext,
    stream: sys::CUstream,
    event: sys::CUevent,
    /// Address of 4 KiB of memory on GPU 0.
    memory: u64,
    /// Address of 4 KiB of pinned host memory.
    host: u64,
    /// Address of 4 KiB of registered host memory.
    registered: *mut c_void,
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
}

impl Before {
    fn new() -> Before {
        let mut context = null_mut();
        let (mut stream, mut event, mut memory, mut host) = (null_mut(), null_mut(), 0, null_mut());
        let (mut graph, mut exec, mut node) = (null_mut(), null_mut(), null_mut());
        let layout = std::alloc::Layout::from_size_align(4096, 4096).expect("a layout");
        // SAFETY: the outputs are valid for the calls. The memory is kept until the process ends.
        unsafe {
            ok(sys::cuDevicePrimaryCtxRetain(&mut context, 0));
            ok(sys::cuCtxSetCurrent(context));
            ok(sys::cuStreamCreate(&mut stream, 1));
            ok(sys::cuEventCreate(&mut event, 2));
            ok(sys::cuEventRecord(event, stream));
            ok(sys::cuMemAlloc_v2(&mut memory, 4096));
            ok(sys::cuMemHostAlloc(&mut host, 4096, 1));
            let registered: *mut c_void = std::alloc::alloc_zeroed(layout).cast();
            ok(sys::cuMemHostRegister_v2(registered, 4096, 1));
            ok(sys::cuGraphCreate(&mut graph, 0));
            ok(sys::cuGraphAddEmptyNode(&mut node, graph, std::ptr::null(), 0));
            ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
            ok(sys::cuGraphLaunch(exec, stream));
            ok(sys::cuStreamSynchronize(stream));
            Before { context, stream, event, memory, host: host as u64, registered, graph, exec }
        }
    }
}

fn say(what: &str, answer: impl std::fmt::Debug) {
    println!("\nANSWER {what}: {answer:?}");
}

fn state() -> (CUresult, u32, i32) {
    let (mut flags, mut active) = (0, -1);
    // SAFETY: the outputs are valid for the call.
    let code = unsafe { sys::cuDevicePrimaryCtxGetState(0, &mut flags, &mut active) };
    (code, flags, active)
}

fn id(context: sys::CUcontext) -> (CUresult, u64) {
    let mut id = 0;
    // SAFETY: the output is valid for the call.
    let code = unsafe { sys::cuCtxGetId(context, &mut id) };
    (code, id)
}

fn is_current(context: sys::CUcontext) -> (CUresult, &'static str) {
    let mut current = null_mut();
    // SAFETY: the output is valid for the call.
    let code = unsafe { sys::cuCtxGetCurrent(&mut current) };
    (
        code,
        if current.is_null() {
            "none"
        } else if current == context {
            "the old one"
        } else {
            "another"
        },
    )
}

/// Retains the primary context again, as the next user of the device would.
fn again(before: &Before) -> sys::CUcontext {
    let mut context = null_mut();
    // SAFETY: the output is valid for the call.
    let code = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, 0) };
    say("retained again", (code, if context == before.context { "the same handle" } else { "another handle" }));
    context
}

type Question = (&'static str, fn(&Before));

/// Answers a question after a reset. A call may not return.
// SAFETY of all calls: none. They use handles of destroyed objects to test the effect on the process, which is a child.
#[allow(clippy::undocumented_unsafe_blocks)]
const AFTER_RESET: &[Question] = &[
    ("state", |before| {
        say("cuDevicePrimaryCtxGetState", state());
        say("cuCtxGetCurrent", is_current(before.context));
        say("cuCtxGetId", id(before.context));
    }),
    ("id of the context while none is current", |before| {
        say("cuCtxSetCurrent(NULL)", unsafe { sys::cuCtxSetCurrent(null_mut()) });
        say("cuCtxGetId", id(before.context));
    }),
    ("cuCtxGetApiVersion", |before| {
        let mut version = 0;
        say("code", unsafe { sys::cuCtxGetApiVersion(before.context, &mut version) });
    }),
    ("cuCtxPushCurrent", |before| {
        say("cuCtxSetCurrent(NULL)", unsafe { sys::cuCtxSetCurrent(null_mut()) });
        say("push", unsafe { sys::cuCtxPushCurrent_v2(before.context) });
        let mut context = null_mut();
        say("pop", unsafe { sys::cuCtxPopCurrent_v2(&mut context) });
    }),
    ("cuCtxGetDevice", |_| {
        let mut device = -1;
        say("code", (unsafe { sys::cuCtxGetDevice(&mut device) }, device));
    }),
    ("cuCtxSynchronize", |_| say("code", unsafe { sys::cuCtxSynchronize() })),
    ("cuDevicePrimaryCtxRelease", |_| {
        say("code", unsafe { sys::cuDevicePrimaryCtxRelease_v2(0) });
        say("cuDevicePrimaryCtxGetState", state());
    }),
    ("cuDevicePrimaryCtxReset again", |_| say("code", unsafe { sys::cuDevicePrimaryCtxReset_v2(0) })),
    ("retain again", |before| {
        let context = again(before);
        say("cuDevicePrimaryCtxGetState", state());
        say("cuCtxGetId of the old handle", id(before.context));
        say("cuCtxGetId of the new handle", id(context));
        say("cuCtxGetCurrent", is_current(before.context));
        say("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() });
        let mut memory = 0;
        say("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut memory, 4096) });
    }),
    ("retain again, cuStreamQuery of the old stream", |before| {
        again(before);
        say("code", unsafe { sys::cuStreamQuery(before.stream) });
    }),
    ("retain again, cuStreamIsCapturing of the old stream", |before| {
        again(before);
        let mut status = 9;
        say("code", (unsafe { sys::cuStreamIsCapturing(before.stream, std::ptr::addr_of_mut!(status).cast()) }, status));
    }),
    ("retain again, cuEventQuery of the old event", |before| {
        again(before);
        say("code", unsafe { sys::cuEventQuery(before.event) });
    }),
    ("retain again, cuMemFree of the old memory", |before| {
        let context = again(before);
        unsafe { ok(sys::cuCtxSetCurrent(context)) };
        say("code", unsafe { sys::cuMemFree_v2(before.memory) });
    }),
    ("retain again, cuMemHostUnregister of the old memory", |before| {
        let context = again(before);
        unsafe { ok(sys::cuCtxSetCurrent(context)) };
        say("code", unsafe { sys::cuMemHostUnregister(before.registered) });
        say("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(before.registered, 4096, 1) });
    }),
    ("cuStreamQuery", |before| say("code", unsafe { sys::cuStreamQuery(before.stream) })),
    ("cuStreamIsCapturing", |before| {
        let mut status = 9;
        say("code", (unsafe { sys::cuStreamIsCapturing(before.stream, std::ptr::addr_of_mut!(status).cast()) }, status));
    }),
    ("cuStreamIsCapturing of the default stream", |_| {
        let mut status = 9;
        say("code", (unsafe { sys::cuStreamIsCapturing(null_mut(), std::ptr::addr_of_mut!(status).cast()) }, status));
    }),
    ("cuStreamGetId", |before| {
        let mut number = 0;
        say("code", unsafe { sys::cuStreamGetId(before.stream, &mut number) });
    }),
    ("cuStreamGetCtx", |before| {
        let mut context = null_mut();
        say("code", unsafe { sys::cuStreamGetCtx(before.stream, &mut context) });
    }),
    ("cuStreamSynchronize", |before| say("code", unsafe { sys::cuStreamSynchronize(before.stream) })),
    ("cuStreamDestroy", |before| say("code", unsafe { sys::cuStreamDestroy_v2(before.stream) })),
    ("cuEventQuery", |before| say("code", unsafe { sys::cuEventQuery(before.event) })),
    ("cuEventSynchronize", |before| say("code", unsafe { sys::cuEventSynchronize(before.event) })),
    ("cuEventRecord", |before| say("code", unsafe { sys::cuEventRecord(before.event, before.stream) })),
    ("cuEventRecord in the default stream", |before| say("code", unsafe { sys::cuEventRecord(before.event, null_mut()) })),
    ("cuEventDestroy", |before| say("code", unsafe { sys::cuEventDestroy_v2(before.event) })),
    ("cuEventCreate", |_| {
        let mut event = null_mut();
        say("code", unsafe { sys::cuEventCreate(&mut event, 2) });
    }),
    ("cuMemAlloc", |_| {
        let mut memory = 0;
        say("code", unsafe { sys::cuMemAlloc_v2(&mut memory, 4096) });
    }),
    ("cuMemFree", |before| say("code", unsafe { sys::cuMemFree_v2(before.memory) })),
    ("cuMemFreeHost", |before| say("code", unsafe { sys::cuMemFreeHost(std::ptr::with_exposed_provenance_mut(before.host as usize)) })),
    ("cuMemHostUnregister", |before| say("code", unsafe { sys::cuMemHostUnregister(before.registered) })),
    ("cuPointerGetAttribute", |before| {
        let mut id = 0_u64;
        let name = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
        let out: *mut c_void = std::ptr::addr_of_mut!(id).cast();
        say("of memory", unsafe { sys::cuPointerGetAttribute(out, name, before.memory) });
        say("of host memory", unsafe { sys::cuPointerGetAttribute(out, name, before.host) });
        say("of registered memory", unsafe { sys::cuPointerGetAttribute(out, name, before.registered as u64) });
    }),
    ("cuMemcpyAsync", |before| say("code", unsafe { sys::cuMemcpyAsync(before.memory, before.memory + 2048, 8, before.stream) })),
    ("cuMemcpyAsync in the default stream", |before| {
        say("code", unsafe { sys::cuMemcpyAsync(before.memory, before.memory + 2048, 8, null_mut()) })
    }),
    ("cuGraphLaunch", |before| say("code", unsafe { sys::cuGraphLaunch(before.exec, before.stream) })),
    ("cuGraphExecDestroy", |before| say("code", unsafe { sys::cuGraphExecDestroy(before.exec) })),
    ("cuGraphDestroy", |before| say("code", unsafe { sys::cuGraphDestroy(before.graph) })),
    ("host memory read by the CPU", |before| {
        say("value", unsafe { std::ptr::with_exposed_provenance::<u8>(before.host as usize).read_volatile() })
    }),
];

/// Measures a driver call and prints its duration in nanoseconds.
fn cost(what: &str, mut call: impl FnMut() -> CUresult) {
    const ROUNDS: u32 = 20_000;
    (0..ROUNDS).for_each(|_| _ = call());
    let begin = Instant::now();
    (0..ROUNDS).for_each(|_| _ = call());
    say(&format!("ns of {what}"), (begin.elapsed().as_nanos() as f64 / f64::from(ROUNDS)).round());
}

fn costs(before: &Before) {
    let (context, stream) = (before.context, before.stream);
    let mut status = 0_u32;
    cost("cuDevicePrimaryCtxGetState", || state().0);
    cost("cuCtxGetId", || id(context).0);
    cost("cuCtxGetCurrent", || is_current(context).0);
    // SAFETY: the outputs and all arguments are valid for the calls.
    unsafe {
        cost("cuCtxGetApiVersion", || sys::cuCtxGetApiVersion(context, &mut 0));
        cost("cuStreamGetId", || sys::cuStreamGetId(stream, &mut 0));
        cost("cuStreamGetCtx", || sys::cuStreamGetCtx(stream, &mut null_mut()));
        cost("cuStreamIsCapturing", || sys::cuStreamIsCapturing(stream, std::ptr::addr_of_mut!(status).cast()));
        cost("cuStreamGetFlags", || sys::cuStreamGetFlags(stream, &mut 0));
        cost("cuStreamQuery, idle", || sys::cuStreamQuery(stream));
        cost("cuEventQuery", || sys::cuEventQuery(before.event));
        cost("cuEventRecord", || sys::cuEventRecord(before.event, stream));
        cost("cuCtxSynchronize, idle", || sys::cuCtxSynchronize());
        for bytes in [256, 4 << 20] {
            cost(&format!("cuMemAlloc and cuMemFree of {bytes} bytes"), || {
                let mut memory = 0;
                ok(sys::cuMemAlloc_v2(&mut memory, bytes));
                sys::cuMemFree_v2(memory)
            });
        }
    }
}

/// Word in host memory. Streams wait until it becomes 1, and the CPU sets it. The value is its address.
#[derive(Copy, Clone)]
struct Flag(u64);

impl Flag {
    fn new() -> Flag {
        let mut host = null_mut();
        // SAFETY: the output is valid for the call; never freed.
        unsafe { ok(sys::cuMemHostAlloc(&mut host, 4096, 1)) };
        // SAFETY: just allocated.
        unsafe { host.cast::<u32>().write_volatile(0) };
        Flag(host as u64)
    }

    fn set(self, value: u32) {
        // SAFETY: allocated by `new`.
        unsafe { std::ptr::with_exposed_provenance_mut::<u32>(self.0 as usize).write_volatile(value) };
    }

    fn hold(self, stream: sys::CUstream) {
        self.set(0);
        // SAFETY: as above; the caller's stream.
        unsafe { ok(sys::cuStreamWaitValue32_v2(stream, self.0, 1, 0)) };
    }
}

fn new_stream() -> sys::CUstream {
    let mut stream = null_mut();
    // SAFETY: the output is valid for the call.
    unsafe { ok(sys::cuStreamCreate(&mut stream, 1)) };
    stream
}

/// Value that is passed to another thread of the test although it contains pointers.
struct Sent<T>(T);
// SAFETY: handles of the driver may be used from any thread.
unsafe impl<T> Send for Sent<T> {}

/// Call that another thread makes while the current thread captures: its name, the function that creates its argument, and the call itself.
type Freeing = (&'static str, fn() -> u64, fn(u64) -> CUresult);

fn page() -> u64 {
    let layout = std::alloc::Layout::from_size_align(4096, 4096).expect("a layout");
    // SAFETY: not of size 0.
    unsafe { std::alloc::alloc_zeroed(layout) as u64 }
}

fn memory(bytes: usize) -> u64 {
    let mut memory = 0;
    // SAFETY: the output is valid for the call.
    unsafe { ok(sys::cuMemAlloc_v2(&mut memory, bytes)) };
    memory
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

// SAFETY of all calls: each gets the result of the function before it.
#[allow(clippy::undocumented_unsafe_blocks)]
const WHILE_CAPTURING: &[Freeing] = &[
    ("cuMemFree of 256 bytes", || memory(256), |it| unsafe { sys::cuMemFree_v2(it) }),
    ("cuMemFree of 4 MiB", || memory(4 << 20), |it| unsafe { sys::cuMemFree_v2(it) }),
    (
        "cuMemFreeHost",
        || {
            let mut host = null_mut();
            unsafe { ok(sys::cuMemHostAlloc(&mut host, 4096, 1)) };
            host as u64
        },
        |it| unsafe { sys::cuMemFreeHost(pointer(it)) },
    ),
    (
        "cuMemHostUnregister",
        || {
            let page = page();
            unsafe { ok(sys::cuMemHostRegister_v2(pointer(page), 4096, 3)) };
            page
        },
        |it| unsafe { sys::cuMemHostUnregister(pointer(it)) },
    ),
    ("cuMemHostRegister", page, |it| unsafe { sys::cuMemHostRegister_v2(pointer(it), 4096, 3) }),
    ("cuMemAlloc", || 0, |_| unsafe { sys::cuMemAlloc_v2(&mut 0, 4096) }),
    ("cuStreamCreate", || 0, |_| unsafe { sys::cuStreamCreate(&mut null_mut(), 1) }),
    ("cuStreamSynchronize of a stream of its own", || new_stream() as u64, |it| unsafe { sys::cuStreamSynchronize(pointer(it).cast()) }),
    ("cuStreamSynchronize of the default stream", || 0, |_| unsafe { sys::cuStreamSynchronize(null_mut()) }),
    ("cuCtxSynchronize", || 0, |_| unsafe { sys::cuCtxSynchronize() }),
    (
        "cuMemFreeAsync in a stream of its own",
        || {
            let mut memory = 0;
            unsafe { ok(sys::cuMemAllocAsync(&mut memory, 4096, null_mut())) };
            unsafe { ok(sys::cuCtxSynchronize()) };
            memory
        },
        |it| unsafe { sys::cuMemFreeAsync(it, new_stream()) },
    ),
    (
        "cuIpcCloseMemHandle",
        || {
            let text = std::env::var("DRIVER_TEST_IPC").expect("the parent exports memory");
            let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).expect("digits") as _;
            let ipc = sys::CUipcMemHandle { reserved: std::array::from_fn(byte) };
            let mut memory = 0;
            unsafe { ok(sys::cuIpcOpenMemHandle_v2(&mut memory, ipc, 1)) };
            memory
        },
        |it| unsafe { sys::cuIpcCloseMemHandle(it) },
    ),
];

/// Makes one call in another thread, whose capture mode is relaxed, while this thread captures and a third stream is busy for 200 ms.
fn free_while_capturing(make: fn() -> u64, call: fn(u64) -> CUresult) {
    use sys::CUstreamCaptureMode::*;
    let before = Before::new();
    let flag = Flag::new();
    let (captured, busy) = (new_stream(), new_stream());
    for mode in [None, Some(CU_STREAM_CAPTURE_MODE_GLOBAL), Some(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), Some(CU_STREAM_CAPTURE_MODE_RELAXED)]
    {
        let made = make();
        flag.hold(busy);
        if let Some(mode) = mode {
            // SAFETY: streams and memory of this test.
            unsafe {
                ok(sys::cuStreamBeginCapture_v2(captured, mode));
                ok(sys::cuMemcpyAsync(before.memory, before.memory + 2048, 8, captured));
            }
        }
        let context = Sent(before.context);
        let (code, took) = std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(200));
                flag.set(1);
            });
            let freeing = scope.spawn(move || {
                let context = context;
                let mut relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
                // SAFETY: a retained context. The argument is valid for the call.
                unsafe {
                    ok(sys::cuCtxSetCurrent(context.0));
                    ok(sys::cuThreadExchangeStreamCaptureMode(&mut relaxed));
                }
                let begin = Instant::now();
                (call(made), begin.elapsed())
            });
            freeing.join().expect("no panic")
        });
        let waited = if took >= Duration::from_millis(150) { "waited" } else { "did not wait" };
        let mut graph = null_mut();
        // SAFETY: the output is valid for the call.
        let end = mode.map(|_| unsafe { sys::cuStreamEndCapture(captured, &mut graph) });
        say(&format!("{mode:?}"), (code, waited, took, "the capture ended with", end));
        // SAFETY: a stream of this test.
        unsafe { ok(sys::cuStreamSynchronize(busy)) };
    }
}

/// Tests whether freeing memory of one GPU waits for work of another GPU.
fn free_beside_a_peer() {
    let before = Before::new();
    let flag = Flag::new();
    set_device(1);
    let busy = new_stream();
    flag.hold(busy);
    // SAFETY: a retained context.
    unsafe { ok(sys::cuCtxSetCurrent(before.context)) };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            flag.set(1);
        });
        for what in ["cuMemFree", "cuMemFreeHost"] {
            let begin = Instant::now();
            // SAFETY: memory of this test.
            let code =
                unsafe { if what == "cuMemFree" { sys::cuMemFree_v2(before.memory) } else { sys::cuMemFreeHost(pointer(before.host)) } };
            say(what, (code, begin.elapsed()));
        }
    });
}

/// Fills the queue of a stream whose first operation waits. Another thread then tests which calls still return.
fn full_queue(kind: &str) {
    let before = Before::new();
    let flag = Flag::new();
    let (full, other, held) = (new_stream(), new_stream(), new_stream());
    let word = Flag::new();
    flag.hold(full);
    // The event has not been reached. The driver may omit waits for events that were reached.
    flag.hold(held);
    // SAFETY: an event and a stream of this test.
    unsafe { ok(sys::cuEventRecord(before.event, held)) };
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let sent = Sent((before.context, full, before.memory, before.event));
    let kind = kind.to_owned();
    let filling = std::thread::spawn(move || {
        let sent = sent;
        let (context, full, memory, event) = sent.0;
        // SAFETY: streams, memory and events of this test.
        unsafe {
            ok(sys::cuCtxSetCurrent(context));
            for _ in 0..8192 {
                match &*kind {
                    "copies" => ok(sys::cuMemcpyAsync(memory, memory + 2048, 8, full)),
                    "waits for a value" => ok(sys::cuStreamWaitValue32_v2(full, flag.0, 1, 0)),
                    "values written" => ok(sys::cuStreamWriteValue32_v2(full, word.0, 1, 0)),
                    "events recorded" => ok(sys::cuEventRecord(event, full)),
                    _ => ok(sys::cuStreamWaitEvent(full, event, 0)),
                }
                COUNT.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    let mut last = 0;
    loop {
        std::thread::sleep(Duration::from_millis(300));
        let now = COUNT.load(Ordering::SeqCst);
        if now == last {
            break;
        }
        last = now;
    }
    say("operations that went in", (last, if filling.is_finished() { "all" } else { "then the call blocks" }));
    // Another thread makes the calls, and may also block.
    let (answers, heard) = mpsc::channel::<String>();
    let sent = Sent((before.context, other, full, before.memory));
    let mut second = null_mut();
    // SAFETY: the output is valid for the call.
    unsafe { ok(sys::cuEventCreate(&mut second, 2)) };
    let second = Sent(second);
    std::thread::spawn(move || {
        let (sent, second) = (sent, second);
        let (context, other, full, memory) = sent.0;
        let mut status = 0_u32;
        let answer = |what: &str, code: CUresult| drop(answers.send(format!("{what}: {code:?}")));
        // SAFETY: streams, memory and events of this test.
        unsafe {
            answer("cuCtxSetCurrent", sys::cuCtxSetCurrent(context));
            answer("cuStreamIsCapturing of the full stream", sys::cuStreamIsCapturing(full, std::ptr::addr_of_mut!(status).cast()));
            answer("cuStreamGetId of the full stream", sys::cuStreamGetId(full, &mut 0));
            answer("cuStreamQuery of the full stream", sys::cuStreamQuery(full));
            answer("cuMemcpyAsync in another stream", sys::cuMemcpyAsync(memory, memory + 2048, 8, other));
            answer("cuStreamWriteValue32 in another stream", sys::cuStreamWriteValue32_v2(other, word.0, 1, 0));
            answer("cuEventRecord in another stream", sys::cuEventRecord(second.0, other));
            answer("cuStreamWaitEvent in another stream", sys::cuStreamWaitEvent(other, second.0, 0));
            answer("cuStreamSynchronize of another stream", sys::cuStreamSynchronize(other));
            answer("cuPointerGetAttribute", {
                let mut id = 0_u64;
                let name = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
                sys::cuPointerGetAttribute(std::ptr::addr_of_mut!(id).cast(), name, memory)
            });
            answer("cuStreamCreate", sys::cuStreamCreate(&mut null_mut(), 1));
            answer("cuEventCreate", sys::cuEventCreate(&mut null_mut(), 2));
            answer("cuMemAlloc", sys::cuMemAlloc_v2(&mut 0, 4096));
            answer("cuEventRecord in the full stream", sys::cuEventRecord(second.0, full));
        }
    });
    while let Ok(answer) = heard.recv_timeout(Duration::from_secs(1)) {
        say("meanwhile", answer);
    }
    say("meanwhile", "the next one blocked, or there was none");
    flag.set(1);
    filling.join().expect("no panic");
    // SAFETY: a stream of this test.
    unsafe { ok(sys::cuStreamSynchronize(full)) };
}

const KINDS: [&str; 5] = ["copies", "waits for a value", "values written", "events recorded", "events waited for"];

/// Answers one question about the driver in a child process, if the environment requests it.
#[test]
#[ignore = "a process that other tests start"]
fn child_asks_the_driver() {
    let Ok(question) = std::env::var(VARIABLE) else { return };
    // Initialises the driver.
    device_count().expect("GPUs are there");
    if question == "costs" {
        return costs(&Before::new());
    }
    if question == "peer" {
        return free_beside_a_peer();
    }
    if let Some(kind) = question.strip_prefix("full ") {
        return full_queue(kind);
    }
    if let Some((_, make, call)) = WHILE_CAPTURING.iter().find(|(name, ..)| question.strip_prefix("capture ") == Some(*name)) {
        return free_while_capturing(*make, *call);
    }
    let (_, ask) = AFTER_RESET.iter().find(|(name, _)| question.strip_prefix("reset ") == Some(*name)).expect("a question of ours");
    let before = Before::new();
    let (code, number) = id(before.context);
    say("before", (state(), is_current(before.context), code, number));
    // SAFETY: the destroyed objects are used only to test the effects.
    say("cuDevicePrimaryCtxReset", unsafe { sys::cuDevicePrimaryCtxReset_v2(0) });
    ask(&before);
    // The normal end of the process is skipped, because it may hang.
    std::process::exit(0);
}

/// Runs a child process that answers one question, and prints the answer.
fn ask(question: &str) {
    let ended = child::run("driver::child_asks_the_driver", VARIABLE, question, 20);
    let mut text = format!("gpu tests: driver: {question}: {}\n", ended.how());
    let failed = ended.text.lines().filter(|line| line.contains("panicked") || line.contains("left:") || line.contains("right:"));
    for line in ended.text.lines().filter_map(|line| line.strip_prefix("ANSWER ")).chain(failed) {
        text.push_str(&format!("gpu tests: driver:     {line}\n"));
    }
    drop(write!(std::io::stderr(), "{text}"));
}

#[test]
fn what_the_driver_answers_after_a_reset() {
    let Some(_turn) = gpus(1) else { return };
    AFTER_RESET.iter().for_each(|(name, _)| ask(&format!("reset {name}")));
    ask("costs");
}

#[test]
fn what_the_driver_answers_while_another_thread_captures() {
    let Some(turn) = gpus(1) else { return };
    set_device(0);
    let shared = memory(4 << 20);
    let mut ipc = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the output is valid for the call.
    unsafe { ok(sys::cuIpcGetMemHandle(&mut ipc, shared)) };
    let text: String = ipc.reserved.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    // SAFETY: tests with GPUs run one at a time, and no other test reads it.
    unsafe { std::env::set_var("DRIVER_TEST_IPC", text) };
    WHILE_CAPTURING.iter().for_each(|(name, ..)| ask(&format!("capture {name}")));
    if turn.count > 1 {
        ask("peer");
    }
    // SAFETY: allocated above, and closed by the children.
    unsafe { ok(sys::cuMemFree_v2(shared)) };
}

#[test]
fn what_the_driver_answers_with_a_full_queue() {
    let Some(_turn) = gpus(1) else { return };
    KINDS.iter().for_each(|kind| ask(&format!("full {kind}")));
}
