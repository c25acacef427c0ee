//! Tests that executions of a plan use the variant that was measured as the fastest. Copies are made by the host backend, and times come
//! from a simulated clock.

use mpgpu_backend::*;
use mpgpu_contexts::{Config, Context, Plan, PlanOptions, Transfer};
use mpgpu_core::topology::{DeviceId, Machine, load};
use mpgpu_devices::host::HostBackend;
use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

const BYTES: u64 = 16 << 20;

/// Position of a stream on the simulated clock, as a timestamp.
#[derive(Debug)]
struct At {
    time: u64,
    /// Number of executions that have completed on the simulated clock. Times of later executions are not available yet.
    seen: Arc<AtomicU64>,
    execution: u64,
    is_lost: bool,
}

impl MomentState for At {
    fn nanoseconds_since(&self, earlier: &dyn MomentState) -> Result<Option<u64>, BackendError> {
        let earlier = earlier.as_any().downcast_ref::<At>().expect("a moment of this backend");
        Ok((!self.is_lost && self.execution <= self.seen.load(Ordering::Relaxed)).then(|| self.time - earlier.time))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Host backend with a simulated clock. Each execution advances the clock by a time that depends on how many bytes it stages in host
/// memory.
struct Clocked {
    inner: HostBackend,
    /// Duration in nanoseconds of an execution by plain copies, of one that stages all bytes that the model stages in host memory, and of
    /// one that stages half of them.
    takes: Mutex<[u64; 3]>,
    /// Number of staged bytes in the first execution that stages all; 0 before.
    all: AtomicU64,
    clock: AtomicU64,
    /// Number of executions so far, and number of executions that the streams have completed.
    executions: AtomicU64,
    seen: Arc<AtomicU64>,
    /// Kind of the last execution: 0 for plain copies, 1 for all staged bytes, 2 for half of them.
    last: AtomicU64,
    moments: AtomicU64,
    prepared: AtomicU64,
    /// True if data is really copied, which takes longer than everything else in the test.
    moves: AtomicBool,
    is_capturing: AtomicBool,
    is_timed: AtomicBool,
    /// Number of the execution whose stream is blocked for ever; 0 for none.
    lost: AtomicU64,
    driver: &'static str,
}

/// Returns the number of bytes that an execution stages in host memory.
fn through_host(execution: &Execution<'_>) -> u64 {
    let in_host = |place| match place {
        mpgpu_core::plan::Place::Slot { ring, .. } => execution.program.rings[ring.0 as usize].device.is_host(),
        _ => false,
    };
    let copies = execution.program.ops.iter().flat_map(|op| &op.copies);
    copies.filter(|copy| in_host(copy.to)).map(|copy| copy.bytes).sum()
}

macro_rules! delegate {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $type),*) -> $result { self.inner.$name($($argument),*) })*
    };
}

impl Backend for Clocked {
    delegate! {
        fn allocate(device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
        fn allocate_shared(device: DeviceId, bytes: u64) -> Result<u64, BackendError>;
        fn free(address: u64) -> Result<(), BackendError>;
        fn locate(address: u64) -> Result<Option<Allocation>, BackendError>;
        fn allocated_bytes(device: DeviceId) -> u64;
        fn create_stream(device: DeviceId) -> Result<StreamHandle, BackendError>;
        fn destroy_stream(stream: StreamHandle) -> Result<(), BackendError>;
        fn stream_count(device: DeviceId) -> u64;
        fn synchronize_stream(stream: StreamHandle) -> Result<(), BackendError>;
        fn launch_host(stream: StreamHandle, work: HostFunction) -> Result<(), BackendError>;
        fn create_event() -> Result<EventHandle, BackendError>;
        fn destroy_event(event: EventHandle) -> Result<(), BackendError>;
        fn record_event(event: EventHandle, stream: StreamHandle) -> Result<(), BackendError>;
        fn stream_wait_event(stream: StreamHandle, event: EventHandle) -> Result<(), BackendError>;
        fn synchronize_event(event: EventHandle) -> Result<(), BackendError>;
        fn synchronize() -> Result<(), BackendError>;
    }
    fn name(&self) -> &'static str {
        "clocked"
    }
    fn identity(&self) -> Result<Identity, BackendError> {
        Ok(Identity { driver: self.driver.into(), gpus: Vec::new() })
    }
    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError> {
        let staged = through_host(execution);
        let all = self.all.fetch_max(staged, Ordering::Relaxed).max(staged);
        let kind = if execution.program.rings.is_empty() { 0 } else { 1 + usize::from(staged < all) };
        self.last.store(kind as u64, Ordering::Relaxed);
        self.clock.fetch_add(self.takes.lock().expect("no panic")[kind], Ordering::Relaxed);
        self.executions.fetch_add(1, Ordering::Relaxed);
        if self.moves.load(Ordering::Relaxed) {
            return self.inner.submit(execution);
        }
        let (program, endpoints) = (Arc::default(), Arc::from([]));
        self.inner.submit(&Execution { program: &program, endpoints: &endpoints, ..*execution })
    }
    fn mark_moment(&self, _: StreamHandle) -> Result<Moment, BackendError> {
        if !self.is_timed.load(Ordering::Relaxed) {
            return Err(BackendError::NotSupported("this backend has lost its clock".into()));
        }
        self.moments.fetch_add(1, Ordering::Relaxed);
        let (time, execution) = (self.clock.load(Ordering::Relaxed), self.executions.load(Ordering::Relaxed));
        let is_lost = execution != 0 && execution == self.lost.load(Ordering::Relaxed);
        Ok(Box::new(At { time, seen: self.seen.clone(), execution, is_lost }))
    }
    fn prepare(&self, execution: &Execution<'_>) -> Result<(), BackendError> {
        self.prepared.fetch_add(1, Ordering::Relaxed);
        self.inner.prepare(execution)
    }
    fn is_capturing(&self, _: StreamHandle) -> Result<bool, BackendError> {
        Ok(self.is_capturing.load(Ordering::Relaxed))
    }
}

/// Plan from one GPU to another, on a machine with links between GPUs, with its memory and context.
struct Bench {
    backend: Arc<Clocked>,
    context: Context,
    dst: u64,
    src: u64,
}

/// Times `[plain, all, half]` in nanoseconds that agree with the model.
const AS_MODELLED: [u64; 3] = [200_000, 100_000, 140_000];

impl Bench {
    fn new(config: Config) -> Bench {
        Bench::with_driver(config, "1.0")
    }

    fn with_driver(config: Config, driver: &'static str) -> Bench {
        Bench::on("beluga", config, driver)
    }

    fn on(preset: &str, config: Config, driver: &'static str) -> Bench {
        let machine = Machine::new(load(preset).expect("a preset")).expect("well formed");
        let backend = Arc::new(Clocked {
            inner: HostBackend::new(machine.gpu_count(), machine.host_count()),
            takes: Mutex::new(AS_MODELLED),
            all: AtomicU64::new(0),
            clock: AtomicU64::new(0),
            executions: AtomicU64::new(0),
            seen: Arc::new(AtomicU64::new(u64::MAX)),
            last: AtomicU64::new(0),
            moments: AtomicU64::new(0),
            prepared: AtomicU64::new(0),
            moves: AtomicBool::new(false),
            is_capturing: AtomicBool::new(false),
            is_timed: AtomicBool::new(true),
            lost: AtomicU64::new(0),
            driver,
        });
        let context = Context::with_backend(Arc::new(machine), backend.clone(), config).expect("a context");
        let [dst, src] = [1, 0].map(|gpu| context.allocate(DeviceId::gpu(gpu), BYTES).expect("memory"));
        Bench { backend, context, dst, src }
    }

    fn transfer(&self, bytes: u64) -> Transfer {
        Transfer { dst: self.dst, dst_device: DeviceId::gpu(1), src: self.src, src_device: DeviceId::gpu(0), bytes }
    }

    fn plan(&self, options: &PlanOptions) -> Arc<Plan> {
        self.context.plan(&[self.transfer(BYTES)], options).expect("a plan")
    }

    /// Executes the plan `executions` times. Returns the number of executions by plain copies, with all paths, and with half of the staged
    /// bytes.
    fn run(&self, plan: &Plan, executions: u64) -> [u64; 3] {
        self.run_in(&[StreamHandle(0)], plan, executions)
    }

    /// Executes the plan `executions` times in several streams alternately. Returns the numbers as `run` does.
    fn run_in(&self, streams: &[StreamHandle], plan: &Plan, executions: u64) -> [u64; 3] {
        let mut taken = [0; 3];
        for stream in streams.iter().cycle().take(executions as usize) {
            plan.enqueue(*stream).expect("enqueued");
            taken[self.backend.last.load(Ordering::Relaxed) as usize] += 1;
        }
        taken
    }

    fn moments(&self) -> u64 {
        self.backend.moments.load(Ordering::Relaxed)
    }

    fn takes(&self, nanoseconds: [u64; 3]) {
        *self.backend.takes.lock().expect("no panic") = nanoseconds;
    }

    /// Executes the plan once more and checks every byte.
    fn moves_bytes(&self, plan: &Plan, round: u64) {
        // SAFETY: memory of this bench, which is host memory here; nothing is enqueued.
        let [src, dst] = [self.src, self.dst]
            .map(|at| unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<u8>(at as usize), BYTES as usize) });
        src.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u64 * 31 + round * 7 + (at as u64 >> 12)) as u8);
        dst.fill(0);
        self.backend.moves.store(true, Ordering::Relaxed);
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("finished");
        self.backend.moves.store(false, Ordering::Relaxed);
        assert!(src == dst, "round {round}");
    }
}

#[test]
fn what_was_measured_to_be_fastest_is_executed_and_followed_when_that_changes_and_every_byte_is_right() {
    let bench = Bench::new(Config::default());
    let plan = bench.plan(&PlanOptions::default());
    assert!(plan.staging_bytes() > 0, "the model takes several paths:\n{}", plan.describe());
    // First the variant with all paths is fastest, then plain copies, then the variant with half of the staged bytes; then the first again.
    for (round, (takes, best)) in
        [(AS_MODELLED, 1), ([200_000, 300_000, 250_000], 0), ([200_000, 260_000, 170_000], 2), (AS_MODELLED, 1)].into_iter().enumerate()
    {
        bench.takes(takes);
        bench.run(&plan, 2000);
        let taken = bench.run(&plan, 1000);
        assert!(taken[best] >= 980, "{takes:?}: {taken:?}\n{}", plan.describe());
        bench.backend.inner.synchronize().expect("finished");
        bench.moves_bytes(&plan, round as u64);
        let measured = plan.measured();
        let seconds = |ns: u64| ns as f64 * 1e-9;
        assert!((measured.in_force.expect("measured") / seconds(takes[best]) - 1.0).abs() < 1e-6, "{measured:?}");
        let text = plan.describe();
        assert_eq!(text.matches(", active").count(), 1, "{text}");
        let json = plan.to_json();
        let variants = json["variants"].as_array().expect("a list");
        assert_eq!(variants.len(), 3, "{json:#}");
        let name = ["plain copies", "all paths", "half the staged bytes"][best];
        let in_force: Vec<_> = variants.iter().filter(|variant| variant["in_force"] == true).map(|variant| &variant["name"]).collect();
        assert_eq!(in_force, [name], "{json:#}");
    }
}

#[test]
fn beside_other_streams_a_plan_begins_with_plain_copies_and_learns_apart() {
    let bench = Bench::new(Config::default());
    let plan = bench.plan(&PlanOptions::default());
    let other = bench.context.create_stream(DeviceId::gpu(0)).expect("a stream");
    let both = [StreamHandle(0), other];
    // A stream counts as active for eight times the duration of its last execution: for longer than a loaded machine delays this thread.
    const TAKES: [u64; 3] = [200_000_000, 100_000_000, 140_000_000];
    let over = || std::thread::sleep(std::time::Duration::from_secs(2));
    bench.takes(TAKES);
    bench.run(&plan, 2000);
    assert!(plan.to_json()["variants_beside"].is_null() && !plan.describe().contains("other streams"));
    // Several paths are slow now. Measurements without other streams do not show this.
    bench.takes([200_000_000, 3_000_000_000, 3_000_000_000]);
    let taken = bench.run_in(&both, &plan, 1000);
    assert!(taken[0] >= 990, "{taken:?}\n{}", plan.describe());
    let json = plan.to_json();
    let executed = |variants: &str| -> u64 {
        json[variants].as_array().expect("a list").iter().map(|variant| variant["executions"].as_u64().expect("a number")).sum()
    };
    assert!(executed("variants") <= 2010 && executed("variants_beside") >= 990, "{json:#}");
    assert!(plan.describe().contains("while other streams of this context copy:"));
    // Without other streams, all paths are again as fast as before.
    over();
    bench.takes(TAKES);
    let taken = bench.run(&plan, 500);
    assert!(taken[1] >= 480, "{taken:?}\n{}", plan.describe());
    // A variant that becomes faster while other streams copy is found too. The slower it was before, the longer this takes.
    bench.takes([200_000_000, 170_000_000, 170_000_000]);
    bench.run_in(&both, &plan, 12_000);
    let taken = bench.run_in(&both, &plan, 500);
    assert!(taken[0] <= 20, "{taken:?}\n{}", plan.describe());
    bench.context.destroy_stream(other).expect("destroyed");
}

#[test]
fn a_relay_that_another_streams_copies_begin_or_end_at_passes_nothing_on() {
    let bench = Bench::new(Config::default());
    bench.takes([200_000_000, 100_000_000, 140_000_000]);
    let plan = bench.plan(&PlanOptions::default());
    bench.run(&plan, 500);
    // The copy is between the GPUs that are relays of the first plan.
    let [dst, src] = [3, 2].map(|gpu| (bench.context.allocate(DeviceId::gpu(gpu), BYTES).expect("memory"), DeviceId::gpu(gpu)));
    let transfer = Transfer { dst: dst.0, dst_device: dst.1, src: src.0, src_device: src.1, bytes: BYTES };
    let across = bench.context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
    let other = bench.context.create_stream(DeviceId::gpu(2)).expect("a stream");
    let mut taken = [0, 0];
    for _ in 0..500 {
        taken[0] += bench.run_in(&[other], &across, 1)[0];
        taken[1] += bench.run(&plan, 1)[0];
    }
    assert!(taken[0] >= 495 && taken[1] >= 495, "{taken:?}\n{}", plan.describe());
    // The executions are in one stream, so they run one after the other.
    std::thread::sleep(std::time::Duration::from_secs(2));
    taken = [0, 0];
    for _ in 0..500 {
        taken[0] += bench.run(&across, 1)[0];
        taken[1] += bench.run(&plan, 1)[0];
    }
    assert!(taken[1] <= 20, "{taken:?}\n{}", plan.describe());
    bench.context.destroy_stream(other).expect("destroyed");
}

#[test]
fn host_memory_there_and_back_at_one_gpu_moves_by_plain_copies_and_several_streams_one_way_by_what_is_fastest() {
    let bench = Bench::on("hgx-h200", Config::default(), "1.0");
    bench.takes([200_000_000, 100_000_000, 140_000_000]);
    let [gpu, host] = [DeviceId::gpu(0), DeviceId::HOST].map(|device| (bench.context.allocate(device, BYTES).expect("memory"), device));
    let plan = |dst: (u64, DeviceId), src: (u64, DeviceId)| {
        let transfer = Transfer { dst: dst.0, dst_device: dst.1, src: src.0, src_device: src.1, bytes: BYTES };
        bench.context.plan(&[transfer], &PlanOptions::default()).expect("a plan")
    };
    let (there, back) = (plan(gpu, host), plan(host, gpu));
    let other = bench.context.create_stream(DeviceId::gpu(0)).expect("a stream");
    assert!(bench.run(&there, 500)[1] >= 450, "{}", there.describe());
    let mut taken = [0, 0];
    for _ in 0..500 {
        taken[0] += bench.run_in(&[other], &back, 1)[0];
        taken[1] += bench.run(&there, 1)[0];
    }
    assert!(taken[0] >= 495 && taken[1] >= 495, "{taken:?}\n{}", there.describe());
    std::thread::sleep(std::time::Duration::from_secs(2));
    bench.run_in(&[StreamHandle(0), other], &there, 2000);
    let taken = bench.run_in(&[StreamHandle(0), other], &there, 500);
    assert!(taken[0] <= 20, "{taken:?}\n{}", there.describe());
    bench.context.destroy_stream(other).expect("destroyed");
}

#[test]
fn few_executions_are_measured_once_nothing_changes() {
    let bench = Bench::new(Config::default());
    let plan = bench.plan(&PlanOptions::default());
    bench.run(&plan, 2000);
    let before = bench.moments();
    let taken = bench.run(&plan, 6400);
    let moments = bench.moments() - before;
    // One execution in 64 is measured, and each trial of another variant. Each of these records two timestamps.
    assert!((100..=400).contains(&moments), "{moments} moments");
    assert!(taken[1] >= 6300, "{taken:?}");
}

#[test]
fn times_that_come_late_are_waited_for_by_nobody_and_count_all_the_same() {
    let bench = Bench::new(Config::default());
    let plan = bench.plan(&PlanOptions::default());
    bench.takes([200_000, 300_000, 250_000]);
    // The host is a hundred executions ahead of its streams.
    for ahead in 0..4000_u64 {
        bench.backend.seen.store(ahead.saturating_sub(100), Ordering::Relaxed);
        bench.run(&plan, 1);
    }
    let taken = bench.run(&plan, 500);
    assert!(taken[0] >= 480, "{taken:?}\n{}", plan.describe());
    // A blocked stream delays nothing else, and timestamps do not accumulate.
    bench.backend.seen.store(0, Ordering::Relaxed);
    let before = bench.moments();
    bench.run(&plan, 5000);
    assert!(bench.moments() - before <= 16, "{} moments", bench.moments() - before);
}

#[test]
fn executions_that_are_enqueued_a_thousand_ahead_use_what_the_first_twenty_have_shown() {
    for (takes, best) in [(AS_MODELLED, 1), ([200_000, 300_000, 250_000], 0), ([200_000, 260_000, 170_000], 2)] {
        let bench = Bench::new(Config::default());
        let plan = bench.plan(&PlanOptions::default());
        bench.takes(takes);
        let [mut queued, mut learned] = [[0; 3]; 2];
        for execution in 0..2040_u64 {
            bench.backend.seen.store(execution.saturating_sub(1000), Ordering::Relaxed);
            let taken = bench.run(&plan, 1);
            // Times are read in at least one of 16 executions.
            let sums = if execution < 1000 { &mut queued } else { &mut learned };
            let counts = !(1000..1000 + 20 + 16).contains(&execution);
            sums.iter_mut().zip(taken).for_each(|(sum, taken)| *sum += if counts { taken } else { 0 });
        }
        assert!(queued[1] >= 990, "{takes:?}: the queue follows the model: {queued:?}");
        assert!(learned[best] >= 985, "{takes:?}: {learned:?}\n{}", plan.describe());
    }
}

#[test]
fn captured_executions_take_what_is_in_force_and_are_not_measured() {
    let bench = Bench::new(Config::default());
    let plan = bench.plan(&PlanOptions::default());
    bench.takes([200_000, 300_000, 250_000]);
    bench.run(&plan, 2000);
    bench.backend.is_capturing.store(true, Ordering::Relaxed);
    let before = bench.moments();
    assert_eq!(bench.run(&plan, 1000), [1000, 0, 0]);
    assert_eq!(bench.moments(), before);
}

#[test]
fn nothing_is_measured_where_there_is_nothing_to_choose_or_it_is_not_wanted() {
    let any = PlanOptions::default();
    let off = PlanOptions { adapt: Some(false), ..any };
    let on = PlanOptions { adapt: Some(true), ..any };
    let one_path = PlanOptions { max_paths: Some(1), ..any };
    let silent = Config { adapt: false, ..Config::default() };
    for (config, options, is_measured) in [
        (Config::default(), any, true),
        (Config::default(), off, false),
        (Config::default(), one_path, false),
        (silent.clone(), any, false),
        (silent, on, true),
    ] {
        let bench = Bench::new(config);
        let plan = bench.plan(&options);
        bench.run(&plan, 100);
        assert_eq!(bench.moments() > 0, is_measured, "{options:?}");
        assert_eq!(plan.to_json().get("variants").is_some(), is_measured);
        assert_eq!(plan.measured().in_force.is_some(), is_measured);
        plan.prepare(StreamHandle(0)).expect("prepared");
        assert_eq!(bench.backend.prepared.load(Ordering::Relaxed), if is_measured { 3 } else { 1 });
    }
    // The same transfers with and without choice among variants are two plans, and each is found in the cache.
    let bench = Bench::new(Config::default());
    let (with, without) = (bench.plan(&any), bench.plan(&off));
    assert!(!Arc::ptr_eq(&with, &without) && Arc::ptr_eq(&with, &bench.plan(&any)) && Arc::ptr_eq(&without, &bench.plan(&off)));
    assert!(Arc::ptr_eq(&with, &bench.plan(&on)));
}

#[test]
fn plans_of_other_addresses_go_by_what_was_measured_and_those_of_other_sizes_have_no_times_yet() {
    let bench = Bench::new(Config::default());
    bench.takes([200_000, 300_000, 250_000]);
    bench.run(&bench.plan(&PlanOptions::default()), 2000);
    let [dst, src] = [1, 0].map(|gpu| bench.context.allocate(DeviceId::gpu(gpu), BYTES).expect("memory"));
    let elsewhere = Transfer { dst, src, ..bench.transfer(BYTES) };
    let plan = bench.context.plan(&[elsewhere], &PlanOptions::default()).expect("a plan");
    assert!(bench.run(&plan, 100)[0] >= 98, "{}", plan.describe());
    let other = bench.context.plan(&[bench.transfer(BYTES / 2)], &PlanOptions::default()).expect("a plan");
    assert_eq!(other.measured().in_force, None);
}

/// Tests that the errors of the model that one size has shown correct the predictions for other sizes and for the opposite direction.
#[test]
fn what_was_measured_at_one_size_decides_the_first_execution_at_other_sizes_and_in_the_opposite_direction() {
    let first = |bench: &Bench, transfer: Transfer| {
        let plan = bench.context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
        assert_eq!(plan.to_json()["variants"].as_array().map(Vec::len), Some(3));
        bench.run(&plan, 1)
    };
    let back = |bench: &Bench, bytes| {
        let Transfer { dst, dst_device, src, src_device, bytes } = bench.transfer(bytes);
        Transfer { dst: src, dst_device: src_device, src: dst, src_device: dst_device, bytes }
    };
    let bench = Bench::new(Config::default());
    assert_eq!(first(&bench, bench.transfer(BYTES / 2)), [0, 1, 0], "the model expects a large gain");
    let bench = Bench::new(Config::default());
    bench.takes([200_000, 300_000, 250_000]);
    bench.run(&bench.plan(&PlanOptions::default()), 500);
    assert_eq!(first(&bench, bench.transfer(BYTES / 2)), [1, 0, 0]);
    assert_eq!(first(&bench, bench.transfer(BYTES / 4)), [1, 0, 0]);
    assert_eq!(first(&bench, back(&bench, BYTES)), [1, 0, 0]);
    // Other devices are not concerned.
    let [dst, src] = [3, 2].map(|gpu| (bench.context.allocate(DeviceId::gpu(gpu), BYTES).expect("memory"), DeviceId::gpu(gpu)));
    let elsewhere = Transfer { dst: dst.0, dst_device: dst.1, src: src.0, src_device: src.1, bytes: BYTES };
    assert_eq!(first(&bench, elsewhere), [0, 1, 0]);
}

#[test]
fn what_was_measured_at_one_size_is_kept_for_other_sizes_in_later_runs() {
    let folder = std::env::temp_dir().join(format!("mpgpu-kept-sizes-{}", std::process::id()));
    let config = Config { tuning_file: Some(write_tuning(&folder).to_string_lossy().into_owned()), ..Config::default() };
    for taken in [[0, 1, 0], [1, 0, 0]] {
        let bench = Bench::new(config.clone());
        let plan = bench.context.plan(&[bench.transfer(BYTES / 2)], &PlanOptions::default()).expect("a plan");
        assert_eq!(bench.run(&plan, 1), taken, "{}", plan.describe());
        bench.takes([200_000, 300_000, 250_000]);
        bench.run(&bench.plan(&PlanOptions::default()), 500);
        drop((plan, bench));
        let kept = std::fs::read_to_string(folder.join("tuning.measured.json")).expect("it is there");
        std::fs::write(folder.join("tuning.measured.json"), without(&kept, BYTES / 2)).expect("written");
    }
    std::fs::remove_dir_all(&folder).expect("removed");
}

/// Returns the text of a file of measured times without the entries of this size.
fn without(kept: &str, bytes: u64) -> String {
    let mut parsed: serde_json::Value = serde_json::from_str(kept).expect("JSON");
    parsed["shapes"].as_array_mut().expect("a list").retain(|shape| shape["bytes"] != bytes);
    parsed.to_string()
}

#[test]
fn a_stream_that_stands_still_does_not_keep_the_times_of_others() {
    let bench = Bench::new(Config::default());
    let plan = bench.plan(&PlanOptions::default());
    // The first measured execution never ends.
    bench.backend.lost.store(1, Ordering::Relaxed);
    bench.takes([200_000, 300_000, 250_000]);
    bench.run(&plan, 2000);
    assert!(bench.run(&plan, 500)[0] >= 480, "{}", plan.describe());
}

#[test]
fn a_backend_that_cannot_be_timed_executes_the_plan_as_described() {
    let bench = Bench::new(Config::default());
    bench.backend.is_timed.store(false, Ordering::Relaxed);
    let plan = bench.plan(&PlanOptions::default());
    bench.run(&plan, 1);
    assert_eq!(bench.run(&plan, 200), [0, 200, 0]);
    bench.moves_bytes(&plan, 1);
}

/// Writes a tuning file that changes no value into a new folder. Returns its path.
fn write_tuning(folder: &Path) -> PathBuf {
    std::fs::create_dir_all(folder).expect("a folder");
    let digest = mpgpu_measure::tune::digest(&load("beluga").expect("a preset"));
    let text = format!("version = 1\ntopology = \"beluga\"\ndigest = \"{digest}\"\norigin = \"simulator\"\n");
    let tuning = folder.join("tuning.toml");
    std::fs::write(&tuning, text).expect("written");
    tuning
}

#[test]
fn what_was_measured_is_kept_beside_the_tuning_file_for_the_next_run_of_the_same_machine() {
    let folder = std::env::temp_dir().join(format!("mpgpu-kept-{}", std::process::id()));
    let (tuning, kept) = (write_tuning(&folder), folder.join("tuning.measured.json"));
    let in_use = || Config { tuning_file: Some(tuning.to_string_lossy().into_owned()), ..Config::default() };
    let begins_with = |bench: &Bench| bench.plan(&PlanOptions::default()).to_json()["measured_before_seconds"].as_u64();
    let read = || std::fs::read_to_string(&kept).expect("it is there");

    for config in [Config::default(), Config { adapt: false, ..in_use() }] {
        let bench = Bench::new(config);
        bench.run(&bench.plan(&PlanOptions { adapt: Some(true), ..PlanOptions::default() }), 100);
    }
    assert!(!kept.exists(), "no tuning is in use, or nothing adapts");
    let first = Bench::new(in_use());
    assert_eq!(begins_with(&first), None);
    drop(first);
    assert!(!kept.exists(), "nothing was measured");

    let first = Bench::new(in_use());
    first.takes([200_000, 300_000, 250_000]);
    first.run(&first.plan(&PlanOptions::default()), 2000);
    drop(first);
    let second = Bench::new(in_use());
    second.takes([200_000, 300_000, 250_000]);
    assert!(begins_with(&second).is_some_and(|age| age < 3600));
    let plan = second.plan(&PlanOptions::default());
    assert!(plan.describe().contains("starting from measurements of an earlier run 0."), "{}", plan.describe());
    assert_eq!(second.run(&plan, 1), [1, 0, 0], "{}", plan.describe());
    assert!(second.run(&plan, 100)[0] >= 85, "{}", plan.describe());
    // Executions are still measured, and the choice follows changes.
    second.takes(AS_MODELLED);
    second.run(&plan, 2000);
    assert!(second.run(&plan, 500)[1] >= 480, "{}", plan.describe());
    let other = second.context.plan(&[second.transfer(BYTES / 2)], &PlanOptions::default()).expect("a plan");
    assert!(other.to_json()["measured_before_seconds"].is_null(), "another shape");
    second.run(&other, 100);
    drop((plan, other, second));
    assert_eq!(read().matches("\"key\"").count(), 2, "{}", read());

    assert_eq!(begins_with(&Bench::with_driver(in_use(), "2.0")), None, "another machine");
    let good = read();
    let week = 7 * 24 * 3600;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
    let parsed: serde_json::Value = serde_json::from_str(&good).expect("JSON");
    for (seconds, is_used) in [(now - week + 600, true), (now - week - 1, false), (now + 600, false)] {
        let mut changed = parsed.clone();
        changed["shapes"].as_array_mut().expect("a list").iter_mut().for_each(|shape| shape["at"] = seconds.into());
        std::fs::write(&kept, changed.to_string()).expect("written");
        assert_eq!(begins_with(&Bench::new(in_use())).is_some(), is_used, "measured at {seconds}, now {now}");
    }
    for damaged in ["", "{", "{\"shapes\": 1}", &good.replace("medians", "median")] {
        std::fs::write(&kept, damaged).expect("written");
        assert_eq!(begins_with(&Bench::new(in_use())), None, "{damaged}");
    }
    std::fs::remove_dir_all(&folder).expect("removed");
}

#[test]
fn what_was_measured_is_kept_by_a_process_that_does_not_destroy_its_context() {
    const TUNING: &str = "MPGPU_TEST_TUNING";
    if let Some(tuning) = std::env::var_os(TUNING) {
        let bench = Bench::new(Config { tuning_file: Some(tuning.to_string_lossy().into_owned()), ..Config::default() });
        bench.run(&bench.plan(&PlanOptions::default()), 200);
        // The value is never dropped, but stays reachable, so it is not reported as a leak.
        static KEPT: OnceLock<Bench> = OnceLock::new();
        return assert!(KEPT.set(bench).is_ok());
    }
    let folder = std::env::temp_dir().join(format!("mpgpu-kept-at-exit-{}", std::process::id()));
    let tuning = write_tuning(&folder);
    let this = "variants::what_was_measured_is_kept_by_a_process_that_does_not_destroy_its_context";
    let mut child = std::process::Command::new(std::env::current_exe().expect("this program"));
    let status = child.args([this, "--exact"]).env(TUNING, &tuning).status().expect("it runs");
    assert!(status.success());
    let text = std::fs::read_to_string(folder.join("tuning.measured.json")).expect("it is there");
    assert!(text.contains("\"medians\""), "{text}");
    std::fs::remove_dir_all(&folder).expect("removed");
}

#[test]
fn moments_of_the_host_backend_come_in_the_order_of_the_stream() {
    let backend = HostBackend::new(1, 1);
    let stream = backend.create_stream(DeviceId::gpu(0)).expect("a stream");
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let begin = backend.mark_moment(stream).expect("marked");
    backend.launch_host(stream, Box::new(move || _ = gate.lock().expect("no panic").recv())).expect("enqueued");
    let end = backend.mark_moment(stream).expect("marked");
    assert_eq!(end.nanoseconds_since(&*begin).expect("of one backend"), None, "the stream stands before it");
    open.send(()).expect("the stream waits");
    backend.synchronize_stream(stream).expect("finished");
    assert!(end.nanoseconds_since(&*begin).expect("of one backend").is_some());
    assert_eq!(begin.nanoseconds_since(&*end).expect("of one backend"), Some(0), "none lies before an earlier one");
}
