//! Measures the host-side cost of the library calls in a time loop, without the cost of copying data.
//!
//! A plan-cache hit is measured on the host backend, which looks up allocations as in a program. `Plan::execute` is measured on a backend
//! that does nothing, so that only the engine's own cost remains. A complete `mp_execute` is measured on the CUDA backend, with a CUDA
//! driver whose calls return immediately (`driver.c`, compiled by this benchmark). Goals on a current server core: 300 ns for a hit, 500 ns
//! for an execution, and 100 ns for the library's own code around a graph launch, or 350 ns if its data is no longer in the caches.
//!
//! `cargo bench -p mpgpu-benches --bench overhead`

use criterion::{BatchSize, Criterion, criterion_group};
use mpgpu::abi::*;
use mpgpu_backend::*;
use mpgpu_contexts::{Config, Context, PlanOptions, Transfer};
use mpgpu_core::topology::{DeviceId, Machine, load};
use mpgpu_devices::host::HostBackend;
use std::any::Any;
use std::ffi::c_void;
use std::hint::black_box;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Backend that executes nothing. It passes calls for memory and streams to a host backend.
struct Nothing {
    memory: HostBackend,
    done: Completion,
}

#[derive(Debug)]
struct Done;

impl CompletionState for Done {
    fn is_done(&self) -> Result<bool, BackendError> {
        Ok(true)
    }
    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl MomentState for Done {
    fn nanoseconds_since(&self, _: &dyn MomentState) -> Result<Option<u64>, BackendError> {
        Ok(Some(200_000))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Backend for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.memory.allocate(device, bytes)
    }
    fn allocate_shared(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.allocate(device, bytes)
    }
    fn free(&self, address: u64) -> Result<(), BackendError> {
        self.memory.free(address)
    }
    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        self.memory.locate(address)
    }
    fn allocated_bytes(&self, device: DeviceId) -> u64 {
        self.memory.allocated_bytes(device)
    }
    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError> {
        self.memory.create_stream(device)
    }
    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        self.memory.destroy_stream(stream)
    }
    fn stream_count(&self, device: DeviceId) -> u64 {
        self.memory.stream_count(device)
    }
    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        self.memory.synchronize_stream(stream)
    }
    fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), BackendError> {
        self.memory.launch_host(stream, work)
    }
    fn create_event(&self) -> Result<EventHandle, BackendError> {
        self.memory.create_event()
    }
    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.memory.destroy_event(event)
    }
    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        self.memory.record_event(event, stream)
    }
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError> {
        self.memory.stream_wait_event(stream, event)
    }
    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.memory.synchronize_event(event)
    }
    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError> {
        black_box(execution);
        Ok(Some(self.done.clone()))
    }
    fn mark_moment(&self, _: StreamHandle) -> Result<Moment, BackendError> {
        Ok(Box::new(Done))
    }
    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }
}

/// Creates a context on the backend that does nothing, for the GPUs of the preset topology `preset`.
fn idle_context(preset: &str) -> Context {
    let machine = Machine::new(load(preset).expect("a preset")).expect("a valid one");
    let memory = HostBackend::new(machine.gpu_count(), machine.host_count());
    let backend = Nothing { memory, done: Arc::new(Done) };
    // The test of peer copies is disabled, because it would detect that this backend copies no data.
    let config = Config { check_peers: false, ..Config::default() };
    Context::with_backend(Arc::new(machine), Arc::new(backend), config).expect("a context")
}

fn check(status: mp_status_t) {
    // SAFETY: the text is never NULL, and valid until the next failed call on this thread.
    assert_eq!(status, mp_status_t::MP_SUCCESS, "{}", unsafe { std::ffi::CStr::from_ptr(mp_last_error()) }.to_string_lossy());
}

/// Plan handle of the C API that is destroyed when the value is dropped.
struct Handle(mp_plan_t);

impl Drop for Handle {
    fn drop(&mut self) {
        check(mp_plan_destroy(self.0));
    }
}

/// Measures `mp_plan` for a request that is in the cache, with and without the following `mp_plan_destroy`.
fn plan_cache_hit(criterion: &mut Criterion) {
    let options = mp_context_options_t {
        size: size_of::<mp_context_options_t>(),
        backend: mp_backend_t::MP_BACKEND_HOST as i32,
        topology: c"beluga".as_ptr(),
        staging_bytes: 0,
        cache_plans: 0,
        signal_wait: 0,
        host_threads: 0,
        cache_graphs: 0,
    };
    let mut context = null_mut();
    // SAFETY: all pointers are valid for the call.
    check(unsafe { mp_context_create_versioned(&options, MP_VERSION, &mut context) });
    for count in [1_usize, 4, 56] {
        let transfers: Vec<mp_transfer_t> = (0..count as i32)
            .map(|i| {
                let (mut dst, mut src) = (null_mut(), null_mut());
                // SAFETY: the outputs are valid for the calls.
                unsafe {
                    check(mp_alloc(context, i % 4, 4096, &mut src));
                    check(mp_alloc(context, (i + 1) % 4, 4096, &mut dst));
                }
                mp_transfer_t { dst, dst_device: (i + 1) % 4, src, src_device: i % 4, bytes: 4096 }
            })
            .collect();
        let mut plan = null_mut();
        // SAFETY: all pointers are valid for the call. This plan stays alive during the benchmark, so that destroying a measured handle
        // never frees the plan itself.
        check(unsafe { mp_plan(context, transfers.as_ptr(), count, null(), &mut plan) });
        let look_up = || {
            let mut plan = null_mut();
            // SAFETY: as above.
            check(unsafe { mp_plan(context, black_box(transfers.as_ptr()), count, null(), &mut plan) });
            Handle(plan)
        };
        criterion.bench_function(&format!("mp_plan, cached, {count} transfers"), |bench| bench.iter_with_large_drop(look_up));
        criterion.bench_function(&format!("the same with mp_plan_destroy, {count} transfers"), |bench| {
            bench.iter(|| drop(black_box(look_up())));
        });
        check(mp_plan_destroy(plan));
    }
    check(mp_context_destroy(context));
}

/// Number of bytes of other memory that a benchmark touches to evict the library's data. It exceeds the caches of one core.
const OTHERS_BYTES: usize = 8 << 20;

/// Times each `call` separately. Before each call, touches `others` bytes of other memory, which evicts the library's data from the caches,
/// as the program and the driver do between two time steps of a simulation. Subtracts the nanoseconds that `apart` counts, and the cost of
/// reading the clock.
fn bench_apart(criterion: &mut Criterion, name: &str, others: usize, apart: impl Fn() -> u64, mut call: impl FnMut()) {
    let mut others = vec![0_u8; others];
    criterion.bench_function(name, |bench| {
        bench.iter_custom(|times| {
            let (mut total, mut clock) = (Duration::ZERO, Duration::ZERO);
            let before = apart();
            for _ in 0..times {
                others.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(1));
                let start = Instant::now();
                let begin = Instant::now();
                call();
                total += begin.elapsed();
                clock += begin - start;
            }
            total.saturating_sub(clock + Duration::from_nanos(apart() - before)).max(Duration::from_nanos(1))
        });
    });
}

/// Measures `Plan::execute`, which does the work of `mp_execute` except the look-up of the plan's handle. The C functions cannot use a
/// backend that does nothing.
fn execute(criterion: &mut Criterion) {
    let context = idle_context("beluga");
    for (what, bytes) in [("direct", 4096), ("staged", 256 << 20)] {
        let (src, dst) =
            (context.allocate(DeviceId::gpu(0), bytes).expect("memory"), context.allocate(DeviceId::gpu(1), bytes).expect("memory"));
        let transfer = Transfer { dst, dst_device: DeviceId::gpu(1), src, src_device: DeviceId::gpu(0), bytes };
        let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
        assert_eq!(plan.staging_bytes() > 0, what == "staged");
        let name = format!("execute, {what}, backend that does nothing");
        let call = || drop(black_box(plan.execute(StreamHandle(0)).expect("enqueued")));
        criterion.bench_function(&name, |bench| bench.iter(call));
        bench_apart(criterion, &format!("{name}, caches cold"), OTHERS_BYTES, || 0, call);
    }
}

/// Measures `Context::plan` for 10^5 transfers whose sizes were planned before at other addresses. The addresses are in random order. A
/// program with a paged cache plans such a new list each time.
fn plan_another_list(criterion: &mut Criterion) {
    const BYTES: u64 = 16 << 10;
    const PIECES: u64 = 100_000;
    let context = idle_context("hgx-h200");
    let [src, dst] = [0, 1].map(|gpu| context.allocate(DeviceId::gpu(gpu), (PIECES + 1) * BYTES).expect("memory"));
    let mut turn = 0;
    let mut list = || -> Vec<Transfer> {
        turn = (turn + 16) % BYTES;
        let pages = (0..PIECES).map(|at| (at * 7919 % PIECES, at * 3001 % PIECES));
        let transfer = |(to, from)| Transfer {
            dst: dst + to * BYTES + turn,
            dst_device: DeviceId::gpu(1),
            src: src + from * BYTES + turn,
            src_device: DeviceId::gpu(0),
            bytes: BYTES,
        };
        pages.map(transfer).collect()
    };
    criterion.bench_function("another list of 100,000 pieces", |bench| {
        bench.iter_batched_ref(&mut list, |list| context.plan(list, &PlanOptions::default()).expect("a plan"), BatchSize::PerIteration);
    });
}

/// Measures executions of a plan without variants, and of the same plan with variants, in which some executions are timed.
fn execute_measured(criterion: &mut Criterion) {
    let context = idle_context("hgx-h200");
    let bytes = 64 << 20;
    let [src, dst] = [0, 1].map(|gpu| context.allocate(DeviceId::gpu(gpu), bytes).expect("memory"));
    let transfer = Transfer { dst, dst_device: DeviceId::gpu(1), src, src_device: DeviceId::gpu(0), bytes };
    for adapt in [false, true] {
        let plan = context.plan(&[transfer], &PlanOptions { adapt: Some(adapt), ..PlanOptions::default() }).expect("a plan");
        let name = format!("execute, all paths{}, backend that does nothing", if adapt { ", measured now and then" } else { "" });
        criterion.bench_function(&name, |bench| bench.iter(|| drop(black_box(plan.execute(StreamHandle(0)).expect("enqueued")))));
        assert!(adapt || plan.measured().in_force.is_none());
    }
}

/// Returns the folder that is put into the loader's search path, and that contains the driver that does nothing.
fn driver_folder() -> PathBuf {
    std::env::temp_dir().join(format!("mpgpu-bench-driver-{}", std::process::id()))
}

/// Compiles the driver that does nothing, and starts this program again so that the loader finds it instead of the machine's driver.
/// Returns only in the program that was started again.
fn with_idle_driver() {
    // The restarted program has the same process number, and therefore finds the same folder.
    let folder = driver_folder();
    if std::env::var_os("LD_LIBRARY_PATH").is_some_and(|path| path == folder) {
        return;
    }
    std::fs::create_dir_all(&folder).expect("a folder for the driver");
    let compiler = std::env::var("CC").unwrap_or("cc".to_owned());
    let flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"];
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("driver.c");
    let compiled = Command::new(&compiler).args(flags).arg(source).arg("-o").arg(folder.join("libcuda.so")).status();
    assert!(compiled.is_ok_and(|status| status.success()), "{compiler} does not compile benches/driver.c");
    let program = std::env::current_exe().expect("this program");
    let failed =
        Command::new(program).args(std::env::args_os().skip(1)).env("LD_LIBRARY_PATH", &folder).env("MPGPU_CHECK_PEERS", "off").exec();
    panic!("this program does not run again: {failed}");
}

/// Functions of the driver that does nothing (`driver.c`). Each function in `calls` has at most two arguments of one word.
struct IdleDriver {
    set_walk: unsafe extern "C" fn(usize),
    walked: unsafe extern "C" fn() -> u64,
    push_context: unsafe extern "C" fn(usize) -> i32,
    calls: Vec<unsafe extern "C" fn(*mut u64, *mut u64) -> i32>,
}

/// Driver calls that one execution of a graph makes, in order.
const CALLS: [&str; 7] = [
    "cuStreamGetId",
    "cuCtxGetCurrent",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
    "cuGraphLaunch",
    "cuEventRecord",
    "cuThreadExchangeStreamCaptureMode",
];

impl IdleDriver {
    fn load() -> IdleDriver {
        // SAFETY: the library is compiled from `driver.c` and has functions of these types. It is never unloaded.
        unsafe {
            let library = Box::leak(Box::new(libloading::Library::new("libcuda.so").expect("the driver that does nothing")));
            IdleDriver {
                set_walk: *library.get(b"driver_set_walk").expect("its function"),
                walked: *library.get(b"driver_walked").expect("its function"),
                push_context: *library.get(b"cuCtxPushCurrent_v2").expect("its function"),
                calls: CALLS.iter().map(|name| *library.get(name.as_bytes()).expect("its function")).collect(),
            }
        }
    }
}

/// Number of bytes that a launch in the driver that does nothing touches: several times the size of a first-level cache, but less than a
/// second-level cache.
const LAUNCH_BYTES: usize = 256 << 10;

impl IdleDriver {
    /// Times `call` in three cases: with all data in the caches, after launches that evict most data from the first-level cache, and with
    /// cold caches.
    fn bench(&self, criterion: &mut Criterion, name: &str, mut call: impl FnMut()) {
        criterion.bench_function(name, |bench| bench.iter(&mut call));
        // SAFETY: functions of `driver.c` that have no requirements.
        let walked = || unsafe { (self.walked)() };
        // SAFETY: as above.
        unsafe { (self.set_walk)(LAUNCH_BYTES) };
        bench_apart(criterion, &format!("{name}, behind launches"), 0, walked, &mut call);
        bench_apart(criterion, &format!("{name}, caches cold"), OTHERS_BYTES, walked, &mut call);
        // SAFETY: as above.
        unsafe { (self.set_walk)(0) };
    }
}

/// Measures a complete `mp_execute` on the CUDA backend, and the driver calls that it makes. The difference is the library's own cost.
fn execute_on_cuda(criterion: &mut Criterion) {
    let driver = IdleDriver::load();
    let options = mp_context_options_t {
        size: size_of::<mp_context_options_t>(),
        backend: mp_backend_t::MP_BACKEND_CUDA as i32,
        topology: c"beluga".as_ptr(),
        staging_bytes: 0,
        cache_plans: 0,
        signal_wait: 0,
        host_threads: 0,
        cache_graphs: 0,
    };
    let mut context = null_mut();
    // SAFETY: all pointers are valid for the call.
    check(unsafe { mp_context_create_versioned(&options, MP_VERSION, &mut context) });
    let mut stream = null_mut();
    // SAFETY: the output is valid for the call.
    check(unsafe { mp_stream_create(context, 0, &mut stream) });
    // Makes the context of GPU 0 current, as in a program that has called cudaSetDevice. SAFETY: the number represents the context in
    // `driver.c`.
    unsafe { (driver.push_context)(1 << 12) };
    let mut word = 0;
    driver.bench(criterion, "the driver's calls of one graph alone, driver that does nothing", || {
        let out = &raw mut word;
        for call in &driver.calls {
            // SAFETY: functions of `driver.c` that write at most one word, to one of the two arguments. A stream is only a number.
            black_box(unsafe { call(out, out) });
        }
    });
    for (what, bytes) in [("one copy", 4096), ("one graph", 64 << 20)] {
        let (mut dst, mut src, mut plan) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the outputs are valid for the calls.
        unsafe {
            check(mp_alloc(context, 0, bytes, &mut src));
            check(mp_alloc(context, 1, bytes, &mut dst));
        }
        let transfer = mp_transfer_t { dst, dst_device: 1, src, src_device: 0, bytes };
        // SAFETY: all pointers are valid for the call.
        check(unsafe { mp_plan(context, &transfer, 1, null(), &mut plan) });
        driver.bench(criterion, &format!("mp_execute, {what}, driver that does nothing"), || {
            // SAFETY: no request is returned.
            check(unsafe { mp_execute(black_box(plan), stream, null_mut()) });
        });
        driver.bench(criterion, &format!("mp_execute and mp_wait, {what}, driver that does nothing"), || {
            let mut request = null_mut();
            // SAFETY: the request is valid for the calls.
            unsafe {
                check(mp_execute(black_box(plan), stream, &mut request));
                check(mp_wait(&mut request, null_mut()));
            }
        });
        check(mp_plan_destroy(plan));
    }
    new_addresses(criterion, context, stream);
    check(mp_context_destroy(context));
}

/// Measures the first execution of a plan at new addresses, when a graph of the same program exists already. The library then updates the
/// addresses in that graph.
fn new_addresses(criterion: &mut Criterion, context: mp_context_t, stream: mp_stream_t) {
    const BYTES: u64 = 64 << 20;
    const PLACES: usize = 1 << 10;
    let (mut dst, mut src) = (null_mut(), null_mut());
    // SAFETY: the outputs are valid for the calls.
    unsafe {
        check(mp_alloc(context, 0, BYTES + 256 * PLACES as u64, &mut src));
        check(mp_alloc(context, 1, BYTES + 256 * PLACES as u64, &mut dst));
    }
    let mut place = 0;
    criterion.bench_function("mp_execute, one graph at new addresses, driver that does nothing", |bench| {
        bench.iter_custom(|times| {
            let mut total = Duration::ZERO;
            for _ in 0..times {
                place = (place + 1) % PLACES;
                let at = |base: *mut c_void| base.wrapping_byte_add(256 * place);
                let transfer = mp_transfer_t { dst: at(dst), dst_device: 1, src: at(src), src_device: 0, bytes: BYTES };
                let mut plan = null_mut();
                // SAFETY: all pointers are valid for the call.
                check(unsafe { mp_plan(context, &transfer, 1, null(), &mut plan) });
                let start = Instant::now();
                // SAFETY: no request is returned.
                check(unsafe { mp_execute(black_box(plan), stream, null_mut()) });
                total += start.elapsed();
                check(mp_plan_destroy(plan));
            }
            total
        });
    });
}

criterion_group! {
    name = overhead;
    config = Criterion::default().sample_size(50);
    targets = plan_cache_hit, plan_another_list, execute, execute_measured, execute_on_cuda
}

fn main() {
    with_idle_driver();
    overhead();
    Criterion::default().configure_from_args().final_summary();
    // If the program fails before this line, the folder remains in the folder for temporary files.
    let _ = std::fs::remove_dir_all(driver_folder());
}
