//! Tests a device reset (`cudaDeviceReset`) while a context of the library exists. Many programs reset the device in their last line. Each
//! case runs in a separate process, which must exit by itself.

use super::*;

const VARIABLE: &str = "RESET_TEST_CASE";
const BYTES: u64 = 3 << 20;

/// Makes the driver call of `cudaDeviceReset` for every GPU.
fn reset() {
    for gpu in 0..device_count().expect("GPUs are there") {
        // SAFETY: the loss of all objects is under test.
        ok(unsafe { sys::cuDevicePrimaryCtxReset_v2(gpu as i32) });
    }
}

/// Objects that a program has when it resets its devices.
struct Program {
    context: Context,
    plan: Arc<mpgpu_contexts::Plan>,
    stream: StreamHandle,
    event: mpgpu_backend::EventHandle,
    buffers: [u64; 2],
    host: u64,
}

impl Program {
    fn new(engine: Engine) -> Program {
        let context = context(None, |config| config.engine = engine);
        let buffers = [(); 2].map(|()| context.allocate(GPU0, BYTES).expect("memory"));
        let host = context.allocate(DeviceId::HOST, 4096).expect("memory");
        context.allocate(DeviceId::HOST, 8 << 20).expect("memory");
        let transfer = Transfer { dst: buffers[1], dst_device: GPU0, src: buffers[0], src_device: GPU0, bytes: BYTES };
        let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
        let stream = context.create_stream(GPU0).expect("a stream");
        let event = context.create_event().expect("an event");
        for stream in [stream, StreamHandle(0)] {
            plan.execute(stream).expect("enqueued").wait().expect("it runs");
            context.record_event(event, stream).expect("recorded");
        }
        context.synchronize_stream(stream).expect("it runs");
        Program { context, plan, stream, event, buffers, host }
    }
}

/// Copies in a new context, and checks every byte.
fn a_new_context_works() {
    let context = context(None, |_| {});
    let [from, to] = [(); 2].map(|()| context.allocate(DeviceId::HOST, BYTES).expect("memory"));
    let gpu = context.allocate(GPU0, BYTES).expect("memory");
    let content = Random(9).bytes(BYTES as usize);
    let host = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    // SAFETY: pinned memory of this size, which no copy uses yet.
    unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), host(from), content.len()) };
    let stream = context.create_stream(GPU0).expect("a stream");
    for (dst, dst_device, src, src_device) in [(gpu, GPU0, from, DeviceId::HOST), (to, DeviceId::HOST, gpu, GPU0)] {
        let transfer = Transfer { dst, dst_device, src, src_device, bytes: BYTES };
        context.plan(&[transfer], &PlanOptions::default()).expect("a plan").execute(stream).expect("enqueued");
    }
    context.synchronize_stream(stream).expect("it runs");
    // SAFETY: as above, and all copies have run.
    assert_bytes(unsafe { std::slice::from_raw_parts(host(to), BYTES as usize) }, &content, "in a new context");
}

#[track_caller]
fn refused<T: std::fmt::Debug>(what: &str, result: Result<T, Error>) {
    match result {
        Err(error) => println!("\nANSWER {what}: {error}"),
        Ok(value) => panic!("{what} after a reset: {value:?}"),
    }
}

/// Checks that every call of a context returns an error after a reset.
fn everything_is_refused(program: &Program) {
    let Program { context, plan, stream, event, buffers, host } = program;
    for stream in [*stream, StreamHandle(0), StreamHandle(2)] {
        refused("execute", plan.execute(stream));
        refused("enqueue", plan.enqueue(stream));
        refused("synchronize_stream", context.synchronize_stream(stream));
        refused("record_event", context.record_event(*event, stream));
        refused("stream_wait_event", context.stream_wait_event(stream, *event));
        let signal = mpgpu_backend::Signal { counter: *host, value: 1 };
        refused("stream_wait_signals", context.stream_wait_signals(stream, &[signal]));
        refused("stream_raise_signals", context.stream_raise_signals(stream, &[signal]));
        refused("launch_host", context.launch_host(stream, Box::new(|| panic!("it was refused"))));
    }
    refused("synchronize_event", context.synchronize_event(*event));
    refused("allocate", context.allocate(GPU0, BYTES));
    refused("allocate on the host", context.allocate(DeviceId::HOST, 8 << 20));
    refused("create_stream", context.create_stream(GPU0));
    let transfer = Transfer { dst: buffers[0], dst_device: GPU0, src: buffers[1], src_device: GPU0, bytes: 64 };
    refused("plan", context.plan(&[transfer], &PlanOptions::default()));
    refused("export_memory", context.state().export_memory(buffers[0], BYTES));
    // Freeing memory is not an error, because the memory no longer exists.
    for address in [buffers[0], *host] {
        let freed = context.free(address);
        println!("\nANSWER free: {freed:?}");
    }
    println!("\nANSWER destroy_event: {:?}", context.destroy_event(*event));
    println!("\nANSWER destroy_stream: {:?}", context.destroy_stream(*stream));
}

/// Runs one case in a child process, if the environment requests it.
#[test]
#[ignore = "a process that other tests start"]
fn child_resets() {
    let Ok(case) = std::env::var(VARIABLE) else { return };
    let engine = if case.contains("graph") { Engine::Graph } else { Engine::Auto };
    let program = Program::new(engine);
    let completion = program.plan.execute(program.stream).expect("enqueued");
    completion.wait().expect("it runs");
    reset();
    println!("\nANSWER reset");
    if case.contains("renewed") {
        a_new_context_works();
        println!("\nANSWER a new context worked beside the old one");
    }
    if case.contains("refused") {
        everything_is_refused(&program);
        refused("wait", completion.wait().map_err(Error::from));
        println!("\nANSWER refused");
    }
    drop(completion);
    drop(program);
    println!("\nANSWER destroyed");
    a_new_context_works();
    println!("\nANSWER a new context worked");
    reset();
    println!("\nANSWER well");
}

fn check(case: &str) {
    let Some(_turn) = gpus(1) else { return };
    let ended = child::run("reset::child_resets", VARIABLE, case, 60);
    for line in ended.text.lines().filter(|line| line.starts_with("ANSWER ")) {
        drop(writeln!(std::io::stderr(), "gpu tests: reset: {case}: {line}"));
    }
    assert!(ended.is_success() && ended.text.contains("ANSWER well"), "{case}: {}\n{}", ended.how(), ended.text);
}

#[test]
fn a_context_is_destroyed_after_a_reset() {
    check("destroyed");
    check("destroyed graph");
}

#[test]
fn a_context_refuses_everything_after_a_reset() {
    check("refused");
    check("refused graph");
}

#[test]
fn a_context_is_gone_though_another_has_made_the_devices_contexts_anew() {
    check("renewed");
    check("renewed refused");
    check("renewed refused graph");
}
