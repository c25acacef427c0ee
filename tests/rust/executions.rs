//! Stress test that executes random plans on many threads through the C ABI and checks every byte. The test `threads` runs it on the host
//! backend, and the GPU tests run it on GPUs.
//!
//! Each thread has source and target buffers, and plans whose destinations do not overlap. In one batch, a thread fills the targets with
//! wrong bytes, fills the sources, executes plans in random streams, waits in one of several ways, and compares every byte of every target,
//! including bytes between destinations. So each byte is written by exactly one execution or by none. Some plans read data that an earlier
//! plan of the batch has written: in the same stream, or in another stream after an event, a signal or a wait. A lost dependency therefore
//! causes wrong bytes.
//!
//! One run (campaign) consists of several eras. Each era has a new context that all threads share. At the end of an era, the test checks
//! that memory and file descriptors of the process have not increased.

use super::common::{Random, resident_bytes};
use super::node::*;
use mpgpu::abi::*;
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::io::Write;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Machine (host backend or GPUs) on which a campaign runs.
pub trait Machine: Sync {
    /// Returns the options with which contexts are created, except the sizes of staging memory and cache.
    fn options(&self) -> mp_context_options_t;
    fn gpus(&self) -> u32;
    /// Returns two sizes in bytes: of ordinary buffers, and of the few large buffers.
    fn spans(&self) -> [u64; 2];
    /// Returns limits of staging memory in bytes, among which the test chooses. None of them is 0.
    fn staging(&self) -> [u64; 3];
    /// True if plans on this machine must use staging memory. If no plan used any, sharing of staging memory would not be tested.
    fn stages(&self) -> bool;
    /// Returns the total number of bytes in use on all GPUs.
    fn on_gpus(&self) -> u64;
    /// Returns access to memory for one thread.
    fn enter(&self, thread: u64) -> Box<dyn Access>;
}

/// Access to memory without the library. Reads and writes are complete only after `wait`.
pub trait Access {
    fn fill(&mut self, device: i32, address: usize, byte: u8, count: usize);
    fn write(&mut self, device: i32, address: usize, bytes: &[u8]);
    fn read(&mut self, device: i32, address: usize, bytes: &mut [u8]);
    fn wait(&mut self);
    /// Allocates memory without `mp_alloc`. `kind` is a random number that selects the kind of memory. Returns `None` if there is no such
    /// memory on this device.
    fn allocate(&mut self, device: i32, bytes: usize, kind: u64) -> Option<usize>;
    fn free(&mut self, device: i32, address: usize);
    /// Returns streams that the library has not created. The first is the default stream.
    fn streams(&self) -> Vec<mp_stream_t>;
}

/// Size and seed of a campaign.
pub struct Campaign {
    pub executions: u64,
    pub seconds: u64,
    pub seed: u64,
    pub threads: u64,
}

/// Counters of all threads.
#[derive(Default)]
struct Done {
    executions: AtomicU64,
    /// Number of executions in batches that execute a plan twice. They are not counted as checked, because the second execution hides
    /// errors of the first.
    repeated: AtomicU64,
    plans: AtomicU64,
    bytes: AtomicU64,
    contexts: AtomicU64,
    /// Number of contexts in which staging memory was used, summed over all threads.
    staged: AtomicU64,
}

/// Resources that the process holds while no context exists.
#[derive(Copy, Clone, Debug)]
struct Held {
    executions: u64,
    resident: u64,
    on_gpus: u64,
    descriptors: usize,
}

impl Held {
    fn now(executions: u64, machine: &dyn Machine) -> Held {
        let descriptors = std::fs::read_dir("/proc/self/fd").expect("Linux").count();
        // With many cores, different threads in each era leave much memory behind in their arenas.
        #[cfg(target_env = "gnu")]
        // SAFETY: no preconditions.
        unsafe {
            libc::malloc_trim(0);
        }
        Held { executions, resident: resident_bytes(), on_gpus: machine.on_gpus(), descriptors }
    }
}

/// Number of bytes by which resident memory may grow, because allocators keep some freed memory.
const MORE_RESIDENT: u64 = 64 << 20;
const MORE_ON_GPUS: u64 = 256 << 20;
const MORE_DESCRIPTORS: usize = 8;
/// Number of counters of a thread. It is larger than the number that a batch uses, because only one stream at a time may set a counter.
const COUNTERS: u64 = 256;
/// Time after which the test counts as hanging. No batch takes this long.
const HANGS: Duration = Duration::from_secs(300);

impl Campaign {
    /// Runs the campaign, prints a summary line, and returns the number of executions.
    pub fn run(&self, machine: &dyn Machine) -> u64 {
        let (done, begun) = (Done::default(), Instant::now());
        let end = begun.checked_add(Duration::from_secs(self.seconds)).unwrap_or(begun + Duration::from_secs(1 << 30));
        let held = std::thread::scope(|scope| {
            // The sender is dropped at the end of the run, even after a panic.
            let (_over, watched) = std::sync::mpsc::channel::<()>();
            let done = &done;
            scope.spawn(move || {
                let mut seen = u64::MAX;
                while watched.recv_timeout(HANGS) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                    let now = done.executions.load(Ordering::Relaxed);
                    if now == seen {
                        say(format_args!("campaign: seed {}: HANGS after {now} executions", self.seed));
                        std::process::abort();
                    }
                    seen = now;
                }
            });
            self.eras(machine, end, done)
        });
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let executions = of(&done.executions);
        let at = |percent: u64| *held.iter().find(|held| held.executions * 100 >= executions * percent).expect("an era ended");
        let (tenth, half, whole) = (at(10), at(50), at(100));
        say(format_args!(
            "campaign: {executions} executions of {} plans by {} threads in {} contexts, seed {}: 0 wrong; memory {} MiB at 10 %, {} at 50 %, {} \
             at the end; on GPUs {} MiB, {} and {}; {} descriptors at 10 %, {} at the end; {} MiB moved and {} executions that wrote the same again; {:.0} s",
            of(&done.plans),
            self.threads,
            of(&done.contexts),
            self.seed,
            tenth.resident >> 20,
            half.resident >> 20,
            whole.resident >> 20,
            tenth.on_gpus >> 20,
            half.on_gpus >> 20,
            whole.on_gpus >> 20,
            tenth.descriptors,
            whole.descriptors,
            of(&done.bytes) >> 20,
            of(&done.repeated),
            begun.elapsed().as_secs_f64()
        ));
        assert!(of(&done.staged) > 0 || !machine.stages(), "no plan staged, so no execution shared staging");
        for later in [half, whole] {
            assert!(later.resident <= tenth.resident + tenth.resident / 4 + MORE_RESIDENT, "memory grows: {held:?}");
            assert!(later.on_gpus <= tenth.on_gpus + MORE_ON_GPUS, "memory of GPUs grows: {held:?}");
            assert!(later.descriptors <= tenth.descriptors + MORE_DESCRIPTORS, "descriptors leak: {held:?}");
        }
        executions
    }

    /// Runs all eras. Returns the resources that the process held after each.
    fn eras(&self, machine: &dyn Machine, end: Instant, done: &Done) -> Vec<Held> {
        let mut random = Random(self.seed);
        let noise: Vec<u8> = (0..machine.spans()[1] / 4).flat_map(|_| random.next().to_ne_bytes()).collect();
        // There are about twenty eras, so that an era ends after a tenth and after a half of the executions.
        let part = (self.executions / 20).max(1);
        let (mut held, mut said) = (vec![], Instant::now());
        for era in 0.. {
            let before = done.executions.load(Ordering::Relaxed);
            if before >= self.executions || Instant::now() >= end {
                break;
            }
            if said.elapsed() > Duration::from_secs(20) {
                said = Instant::now();
                say(format_args!("campaign: seed {}, era {era} begins, {:?}", self.seed, held.last()));
            }
            let until = (before + part).min(self.executions);
            Era::run(machine, self, era, until, end, done, &noise);
            held.push(Held::now(done.executions.load(Ordering::Relaxed), machine));
        }
        held
    }
}

/// Prints a line directly to standard error, because the test harness captures the output of passing tests.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Context that all threads share during an era.
struct Era<'a> {
    machine: &'a dyn Machine,
    until: u64,
    end: Instant,
    done: &'a Done,
    noise: &'a [u8],
    node: Node,
    staging: u64,
    /// Streams that all threads use, as numbers.
    shared: Vec<usize>,
}

impl Era<'_> {
    fn run(machine: &dyn Machine, campaign: &Campaign, number: u64, until: u64, end: Instant, done: &Done, noise: &[u8]) {
        let mut random = Random(campaign.seed << 32 ^ number << 16);
        let staging = machine.staging()[random.below(3) as usize];
        let cache = [1, 32, 400][random.below(3) as usize];
        let node = Node::with(mp_context_options_t { staging_bytes: staging, cache_plans: cache, ..machine.options() });
        done.contexts.fetch_add(1, Ordering::Relaxed);
        let shared = (0..machine.gpus()).map(|gpu| node.stream(gpu as i32).addr()).collect();
        let era = Era { machine, until, end, done, noise, node, staging, shared };
        let tidy = random.below(2) == 0;
        std::thread::scope(|scope| {
            for thread in 0..campaign.threads {
                let (era, seed) = (&era, random.next());
                let work = move || {
                    let mut worker = Worker::new(era, Random(seed), thread);
                    worker.work();
                    worker.leave(tidy);
                };
                std::thread::Builder::new()
                    .name(format!("seed {}, era {number}, thread {thread}", campaign.seed))
                    .spawn_scoped(scope, work)
                    .expect("a thread");
            }
        });
        era.check(tidy, cache);
    }

    /// Checks the statistics of the library after all threads have finished.
    fn check(&self, tidy: bool, cache: u64) {
        let held = self.node.statistics();
        assert!(held.plan_cache_entries <= cache, "{} plans in a cache of {cache}", held.plan_cache_entries);
        let mut staged = 0;
        for device in -1..self.machine.gpus() as i32 {
            let mut held = device_statistics();
            // SAFETY: a whole struct of the right size.
            ok(unsafe { mp_context_device_statistics(self.node.context, device, &mut held) });
            assert!(
                held.staging_bytes <= self.staging * if device < 0 { 2 } else { 1 },
                "device {device}: {} bytes of staging, the bound is {}",
                held.staging_bytes,
                self.staging
            );
            staged += held.staging_bytes;
            if tidy {
                let streams = u64::from(device >= 0);
                assert_eq!(
                    (held.allocated_bytes, held.streams),
                    (0, streams),
                    "device {device}: what is left when everything was given back"
                );
            }
        }
        self.done.staged.fetch_add(u64::from(staged > 0), Ordering::Relaxed);
    }
}

#[derive(Copy, Clone)]
struct Buffer {
    device: i32,
    address: usize,
    /// True if `mp_alloc` has allocated the buffers.
    ours: bool,
}

/// Pairs of a source buffer and a target buffer, each of `span` bytes.
struct Buffers {
    span: u64,
    sources: Vec<Buffer>,
    targets: Vec<Buffer>,
}

/// Source of a transfer.
#[derive(Copy, Clone, Debug)]
enum From {
    Source {
        buffer: usize,
        offset: u64,
    },
    /// Bytes that the plan with this index has written in the same batch.
    Earlier {
        plan: usize,
        buffer: usize,
        offset: u64,
    },
}

#[derive(Copy, Clone, Debug)]
struct Part {
    from: From,
    /// Destination: number of the target buffer, and offset in it.
    to: (usize, u64),
    bytes: u64,
}

struct Planned {
    parts: Vec<Part>,
    transfers: Vec<mp_transfer_t>,
    options: mp_plan_options_t,
    /// Plan handle. `None` if the plan is created for each execution and destroyed while it runs.
    plan: Option<mp_plan_t>,
}

/// Execution in progress, with its request.
struct Flight {
    planned: usize,
    stream: mp_stream_t,
    request: mp_request_t,
    /// Event that was recorded after the execution, if its stream was destroyed since; otherwise `None`.
    end: Option<mp_event_t>,
    waited: bool,
}

struct Worker<'a> {
    era: &'a Era<'a>,
    context: mp_context_t,
    random: Random,
    access: Box<dyn Access>,
    own: Vec<mp_stream_t>,
    batch: u64,
    /// Address of the counters for which the thread's streams wait, and the number of counters used so far.
    counters: usize,
    signals: u64,
}

impl<'a> Worker<'a> {
    fn new(era: &'a Era<'a>, mut random: Random, thread: u64) -> Self {
        let access = era.machine.enter(thread);
        let own = (0..2).map(|_| era.node.stream(random.below(u64::from(era.machine.gpus())) as i32)).collect();
        let counters = era.node.alloc_shared(-1, 8 * COUNTERS as usize).expose_provenance();
        Worker { era, context: era.node.context, random, access, own, batch: 0, counters, signals: 0 }
    }

    fn is_over(&self) -> bool {
        self.era.done.executions.load(Ordering::Relaxed) >= self.era.until || Instant::now() >= self.era.end
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random.below(n)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.random.below(n) == 0
    }

    fn work(&mut self) {
        while !self.is_over() {
            let buffers = self.buffers();
            for _ in 0..1 + self.below(4) {
                let plans = self.plans(&buffers);
                for _ in 0..1 + self.below(12) {
                    self.batch(&buffers, &plans);
                    if self.is_over() {
                        break;
                    }
                }
                if self.one_in(8) {
                    self.a_context_of_its_own();
                }
                for plan in plans.iter().filter_map(|planned| planned.plan) {
                    ok(mp_plan_destroy(plan));
                }
                if self.is_over() {
                    break;
                }
            }
            self.give_back(buffers);
        }
    }

    fn leave(self, tidy: bool) {
        for stream in self.own.into_iter().filter(|_| tidy) {
            ok(mp_stream_destroy(self.context, stream));
        }
        if tidy {
            self.era.node.free(pointer(self.counters));
        }
    }

    fn buffers(&mut self) -> Buffers {
        let [usual, large] = self.era.machine.spans();
        let span = if self.one_in(16) { large } else { (usual >> self.below(4)) + self.below(300) };
        let gpus = u64::from(self.era.machine.gpus());
        let (mut sources, mut targets) = (vec![], vec![]);
        for _ in 0..2 + self.below(3) {
            for list in [&mut sources, &mut targets] {
                let device = self.random.below(gpus + 1) as i32 - 1;
                let foreign =
                    if self.random.below(3) == 0 { self.access.allocate(device, span as usize, self.random.next()) } else { None };
                let address = foreign.unwrap_or_else(|| self.era.node.alloc(device, span as usize).expose_provenance());
                list.push(Buffer { device, address, ours: foreign.is_none() });
            }
        }
        Buffers { span, sources, targets }
    }

    /// Frees the buffers. In one of four cases, first frees a source to which a plan refers; an execution of that plan must then be
    /// refused.
    fn give_back(&mut self, buffers: Buffers) {
        let (source, target) = (buffers.sources[0], buffers.targets[0]);
        let mut plan = null_mut();
        let transfer = transfer(pointer(target.address), target.device, pointer(source.address), source.device, 64);
        let under_plan = source.ours && self.one_in(4);
        // SAFETY: all pointers are valid for the calls.
        unsafe {
            if under_plan {
                ok(mp_plan(self.context, &transfer, 1, null(), &mut plan));
            }
            for buffer in buffers.sources.iter().chain(&buffers.targets).filter(|buffer| buffer.ours) {
                ok(mp_free(self.context, pointer(buffer.address).cast()));
            }
            if under_plan {
                let status = mp_execute(plan, null_mut(), null_mut());
                assert_eq!(status, MP_ERROR_INVALID_POINTER, "a plan whose source was freed: {}", last_error());
                ok(mp_plan_destroy(plan));
            }
        }
        for buffer in buffers.sources.iter().chain(&buffers.targets).filter(|buffer| !buffer.ours) {
            self.access.free(buffer.device, buffer.address);
        }
    }

    fn size(&mut self, span: u64) -> u64 {
        match self.below(16) {
            0 => 0,
            1 | 2 => self.below(9),
            // The transfer is large enough to be split and staged.
            3..=6 => self.below(span / 2),
            7 => 8 * self.below(64),
            8 | 9 => 1 << self.below(12),
            _ => self.random.next() >> (64 - 1 - self.below(u64::from((span / 8).ilog2()))),
        }
    }

    /// Creates plans with destinations that do not overlap.
    fn plans(&mut self, buffers: &Buffers) -> Vec<Planned> {
        let mut used = vec![0; buffers.targets.len()];
        let mut plans: Vec<Planned> = Vec::new();
        let most = 1 + self.below(48);
        while (plans.len() as u64) < most && used.iter().any(|used| used + 4096 < buffers.span) {
            let mut parts = Vec::new();
            for _ in 0..1 + self.below(4) {
                let to = self.below(used.len() as u64) as usize;
                let at = (used[to] + self.below(100)).min(buffers.span);
                let mut bytes = self.size(buffers.span).min(buffers.span - at);
                let earlier = if self.one_in(4) && !plans.is_empty() { Some(self.random.below(plans.len() as u64) as usize) } else { None };
                let from = match earlier.map(|plan| (plan, plans[plan].parts[0])).filter(|(_, part)| part.bytes > 0) {
                    Some((plan, part)) => {
                        let skip = self.below(part.bytes);
                        bytes = bytes.min(part.bytes - skip);
                        From::Earlier { plan, buffer: part.to.0, offset: part.to.1 + skip }
                    }
                    None => {
                        let buffer = self.below(buffers.sources.len() as u64) as usize;
                        From::Source { buffer, offset: self.below(buffers.span - bytes + 1) }
                    }
                };
                used[to] = at + bytes;
                parts.push(Part { from, to: (to, at), bytes });
            }
            let transfers = parts.iter().map(|part| self.transfer(buffers, part)).collect();
            let options = mp_plan_options_t {
                engine: self.below(5) as i32,
                max_paths: self.below(6) as u32,
                host_path: self.below(3) as i32,
                chunk_bytes: [0, 4096, 8192, 16384, 65536][self.below(5) as usize],
                min_bytes: self.below(2),
                staging_bytes: if self.one_in(4) { self.era.staging / 2 } else { 0 },
                ..plan_options()
            };
            let mut planned = Planned { parts, transfers, options, plan: None };
            if !self.one_in(8) {
                planned.plan = Some(self.plan(&planned));
            }
            plans.push(planned);
        }
        plans
    }

    fn transfer(&mut self, buffers: &Buffers, part: &Part) -> mp_transfer_t {
        let (source, offset) = match part.from {
            From::Source { buffer, offset } => (buffers.sources[buffer], offset),
            From::Earlier { buffer, offset, .. } => (buffers.targets[buffer], offset),
        };
        let target = buffers.targets[part.to.0];
        let (dst_device, src_device) = match self.below(4) {
            0 => (MP_DEVICE_AUTO, MP_DEVICE_AUTO),
            _ => (target.device, source.device),
        };
        let (dst, src) = (target.address + part.to.1 as usize, source.address + offset as usize);
        transfer(pointer(dst), dst_device, pointer(src), src_device, part.bytes as usize)
    }

    fn plan(&mut self, planned: &Planned) -> mp_plan_t {
        let mut plan = null_mut();
        let options = if planned.options.engine == 0 { null() } else { &raw const planned.options };
        // SAFETY: all pointers are valid for the call.
        let status = unsafe { mp_plan(self.context, planned.transfers.as_ptr(), planned.transfers.len(), options, &mut plan) };
        assert_eq!(status, MP_SUCCESS, "{} for {:?}, engine {}", last_error(), planned.parts, planned.options.engine);
        self.era.done.plans.fetch_add(1, Ordering::Relaxed);
        plan
    }

    fn stream(&mut self) -> mp_stream_t {
        let others = self.access.streams();
        let all: Vec<mp_stream_t> =
            self.own.iter().copied().chain(self.era.shared.iter().map(|stream| pointer(*stream).cast())).chain(others).collect();
        // Half of the executions use streams that no other thread uses.
        if self.one_in(2) {
            self.own[self.random.below(self.own.len() as u64) as usize]
        } else {
            all[self.below(all.len() as u64) as usize]
        }
    }

    fn event(&mut self, stream: mp_stream_t) -> mp_event_t {
        let mut event = null_mut();
        // SAFETY: the output is valid for the call.
        unsafe {
            ok(mp_event_create(self.context, &mut event));
            ok(mp_event_record(self.context, event, stream));
        }
        event
    }

    /// Makes `stream` wait for a signal that `other` sends after its earlier work.
    fn wait_for_signal(&mut self, stream: mp_stream_t, other: mp_stream_t) {
        let counter = self.counters + 8 * (self.signals % COUNTERS) as usize;
        let signal = mp_signal_t { counter: pointer(counter).cast(), value: 1 + self.signals / COUNTERS };
        self.signals += 1;
        // SAFETY: a counter that only this thread uses.
        unsafe {
            ok(mp_stream_wait_signals(self.context, stream, &signal, 1));
            ok(mp_stream_raise_signals(self.context, other, &signal, 1));
        }
    }

    /// Waits for the request of an execution, in one of two ways.
    fn wait(&mut self, flight: &mut Flight) {
        // SAFETY: the pointers are valid for the calls.
        unsafe {
            if self.one_in(2) {
                ok(mp_wait(&mut flight.request, null_mut()));
            } else {
                let mut done = 0;
                while done == 0 {
                    ok(mp_test(&mut flight.request, &mut done, null_mut()));
                    std::thread::yield_now();
                }
            }
        }
        assert!(flight.request.is_null());
        flight.waited = true;
    }

    fn batch(&mut self, buffers: &Buffers, plans: &[Planned]) {
        self.batch += 1;
        let (fill, span) = (self.random.next() as u8, buffers.span as usize);
        for target in &buffers.targets {
            self.access.fill(target.device, target.address, fill, span);
        }
        let mut contents = Vec::new();
        for source in &buffers.sources {
            let offset = self.random.below((self.era.noise.len() - span + 1) as u64) as usize;
            self.access.write(source.device, source.address, &self.era.noise[offset..offset + span]);
            contents.push(offset);
        }
        self.access.wait();
        let functions = AtomicU64::new(0);
        let flights = self.fly(plans, &functions);
        let mut expected: Vec<Vec<u8>> = buffers.targets.iter().map(|_| vec![fill; span]).collect();
        let mut moved = 0;
        for part in flights.iter().flat_map(|flight| &plans[flight.planned].parts) {
            let (bytes, at) = (part.bytes as usize, part.to.1 as usize);
            let content = match part.from {
                From::Source { buffer, offset } => self.era.noise[contents[buffer] + offset as usize..][..bytes].to_vec(),
                From::Earlier { buffer, offset, .. } => expected[buffer][offset as usize..][..bytes].to_vec(),
            };
            expected[part.to.0][at..at + bytes].copy_from_slice(&content);
            moved += part.bytes;
        }
        let mut found: Vec<Vec<u8>> = buffers.targets.iter().map(|_| vec![!fill; span]).collect();
        for (target, found) in buffers.targets.iter().zip(&mut found) {
            self.access.read(target.device, target.address, found);
        }
        self.access.wait();
        for (target, (found, expected)) in found.iter().zip(&expected).enumerate() {
            if found != expected {
                self.explain(target, found, expected, &flights, plans);
            }
        }
        self.era.done.executions.fetch_add(flights.len() as u64, Ordering::Relaxed);
        self.era.done.bytes.fetch_add(moved, Ordering::Relaxed);
    }

    fn explain(&self, target: usize, found: &[u8], expected: &[u8], flights: &[Flight], plans: &[Planned]) -> ! {
        let wrong = found.iter().zip(expected).filter(|(a, b)| a != b).count();
        let at = found.iter().zip(expected).position(|(a, b)| a != b).expect("they differ") as u64;
        let of = flights.iter().enumerate().find_map(|(number, flight)| {
            let hit = |part: &&Part| part.to.0 == target && (part.to.1..part.to.1 + part.bytes).contains(&at);
            plans[flight.planned].parts.iter().find(hit).map(|part| (number, flight.stream, plans[flight.planned].options.engine, part))
        });
        panic!(
            "batch {}: byte {at} of target {target} is {:#x}, not {:#x}, and {wrong} bytes are wrong there; it is of execution {of:?} of {}",
            self.batch,
            found[at as usize],
            expected[at as usize],
            flights.len()
        );
    }

    /// Executes most of the plans, in order, and waits until all have finished.
    fn fly(&mut self, plans: &[Planned], functions: &AtomicU64) -> Vec<Flight> {
        let mut flights: Vec<Flight> = Vec::new();
        let (mut enqueued, mut events, mut must_wait) = (0, Vec::new(), BTreeSet::new());
        for (index, planned) in plans.iter().enumerate() {
            if self.one_in(8) {
                continue;
            }
            let stream = self.stream();
            let earlier = planned.parts.iter().filter_map(|part| match part.from {
                From::Earlier { plan, .. } => Some(plan),
                From::Source { .. } => None,
            });
            for before in earlier.collect::<Vec<_>>() {
                let Some(flight) = flights.iter_mut().find(|flight| flight.planned == before) else { continue };
                if flight.waited || (flight.stream == stream && flight.end.is_none()) {
                    continue;
                }
                if !flight.request.is_null() && self.one_in(2) {
                    self.wait(flight);
                    continue;
                }
                let is_own = flight.end.is_none() && self.own.contains(&flight.stream);
                if is_own && self.one_in(2) {
                    self.wait_for_signal(stream, flight.stream);
                    continue;
                }
                let event = flight.end.unwrap_or_else(|| self.event(flight.stream));
                if flight.end.is_none() {
                    events.push(event);
                }
                ok(mp_stream_wait_event(self.context, stream, event));
            }
            let fresh = planned.plan.is_none();
            let plan = planned.plan.unwrap_or_else(|| self.plan(planned));
            let mut request = null_mut();
            let out = if self.one_in(2) { &raw mut request } else { null_mut() };
            // SAFETY: the output is valid for the call.
            unsafe {
                ok(mp_execute(plan, stream, out));
                if self.one_in(16) {
                    ok(mp_execute(plan, stream, null_mut()));
                    must_wait.insert(stream.addr());
                    self.era.done.repeated.fetch_add(1, Ordering::Relaxed);
                }
                if self.one_in(32) {
                    ok(mp_stream_launch_host(self.context, stream, Some(count), (&raw const *functions).cast_mut().cast(), None));
                    must_wait.insert(stream.addr());
                    enqueued += 1;
                }
                if !request.is_null() && self.one_in(4) {
                    ok(mp_request_destroy(&mut request));
                }
            }
            if fresh {
                ok(mp_plan_destroy(plan));
            }
            flights.push(Flight { planned: index, stream, request, end: None, waited: false });
            if self.one_in(64) {
                self.another_stream(&mut flights, &mut events, &mut must_wait);
            }
            if self.one_in(256) {
                let device = self.below(u64::from(self.era.machine.gpus()) + 1) as i32 - 1;
                let memory = self.era.node.alloc(device, 1 + self.random.below(1 << 16) as usize);
                self.era.node.free(memory);
            }
            if self.one_in(256) {
                self.era.node.statistics();
            }
        }
        for flight in &mut flights {
            if !flight.request.is_null() {
                self.wait(flight);
            }
        }
        // Waits for the remaining executions, once for each stream, in one of two ways.
        let unwaited = flights.iter().filter(|flight| !flight.waited && flight.end.is_none()).map(|flight| flight.stream.addr());
        for stream in unwaited.chain(must_wait.clone()).collect::<BTreeSet<usize>>() {
            let stream = pointer(stream).cast();
            if self.one_in(2) {
                ok(mp_stream_synchronize(self.context, stream));
            } else {
                let event = self.event(stream);
                events.push(event);
                ok(mp_event_synchronize(self.context, event));
            }
        }
        for event in flights.iter().filter_map(|flight| flight.end) {
            ok(mp_event_synchronize(self.context, event));
        }
        events.into_iter().collect::<BTreeSet<_>>().into_iter().for_each(|event| ok(mp_event_destroy(self.context, event)));
        assert_eq!(functions.load(Ordering::Acquire), enqueued, "host functions that ran");
        flights
    }

    /// Destroys a stream, whose enqueued work still finishes, and creates another one instead.
    fn another_stream(&mut self, flights: &mut [Flight], events: &mut Vec<mp_event_t>, must_wait: &mut BTreeSet<usize>) {
        let at = self.random.below(self.own.len() as u64) as usize;
        let stream = self.own[at];
        let end = self.event(stream);
        events.push(end);
        for flight in flights.iter_mut().filter(|flight| flight.stream == stream && flight.end.is_none()) {
            flight.end = Some(end);
        }
        if must_wait.remove(&stream.addr()) {
            ok(mp_event_synchronize(self.context, end));
        }
        ok(mp_stream_destroy(self.context, stream));
        self.own[at] = self.era.node.stream(self.random.below(u64::from(self.era.machine.gpus())) as i32);
    }

    /// Creates a context for this thread only, and destroys it while its work is in progress. Then checks the copied bytes in a buffer that
    /// outlives the context.
    fn a_context_of_its_own(&mut self) {
        const BYTES: usize = 5003;
        let node = Node::with(mp_context_options_t { staging_bytes: 1 << 20, ..self.era.machine.options() });
        self.era.done.contexts.fetch_add(1, Ordering::Relaxed);
        let last = self.era.machine.gpus() as i32 - 1;
        let hops = [node.alloc(-1, BYTES), node.alloc(0, BYTES), node.alloc(last, BYTES)];
        let content = &self.era.noise[..BYTES];
        let mut back = vec![0_u8; BYTES];
        self.access.write(-1, hops[0].addr(), content);
        self.access.wait();
        let stream = node.stream(0);
        let ends = [(hops[0], -1), (hops[1], 0), (hops[2], last), (back.as_mut_ptr(), -1)];
        for pair in ends.windows(2) {
            let plan = node.plan(&[transfer(pair[1].0, pair[1].1, pair[0].0, pair[0].1, BYTES)]);
            // SAFETY: no output.
            ok(unsafe { mp_execute(plan, stream, null_mut()) });
        }
        ok(mp_context_destroy(node.context));
        assert!(back == content, "bytes of a context that was destroyed with its work under way");
        self.era.done.executions.fetch_add(3, Ordering::Relaxed);
        self.era.done.plans.fetch_add(3, Ordering::Relaxed);
    }
}

fn pointer(address: usize) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(address)
}

unsafe extern "C" fn count(user: *mut c_void) {
    // SAFETY: a counter that outlives the stream's work.
    unsafe { &*user.cast::<AtomicU64>() }.fetch_add(1, Ordering::Release);
}
