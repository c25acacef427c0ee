//! Tests copies of pageable memory in streams that wait for each other, enqueued by one thread and by many. Uses a driver double (simulated
//! CUDA driver) whose streams execute their work in order. Copy threads must never wait for work that is enqueued later, in whatever order
//! the streams run. Random programs also run on the host backend, where copies share staging rings on relay GPUs.
//!
//! `TEST_PROGRAMS` sets the number of random programs, and `TEST_SEED` the first seed.

use super::double::{self, node};
use super::refusals::{assert_arrived, no_nvml, write};
use super::{Backend, CudaBackend, discover};
use crate::backend::{Endpoints, EventHandle, Execution, Signal, StreamHandle};
use crate::host::HostBackend;
use crate::plan::{self, Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId};
use crate::topology::discover::topology;
use crate::topology::{CostUnit, Costs, DeviceId, Machine, preset};
use mpgpu_contexts::{Config, Context, Plan, PlanOptions, Transfer};
use smallvec::smallvec;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::Scope;
use std::time::Duration;

const GPUS: [DeviceId; 2] = [DeviceId::gpu(0), DeviceId::gpu(1)];
const BYTES: usize = (1 << 20) + 4099;

/// Creates a context with `threads` copy threads. The planner assumes that the threads are fast, so that it uses them even if there are
/// few.
fn context(threads: u32, staging_bytes: u64) -> Context {
    double::start(2, true);
    node(|node| node.room = Some(100_000));
    let mut topology = topology(&discover::look_at(double::driver(), no_nvml).expect("the double has GPUs"));
    topology.costs.thread_copy = 1.0;
    let machine = Machine::new(topology).expect("well formed");
    let backend = CudaBackend::on(double::driver(), 1).expect("the double has GPUs");
    let config = Config { staging_bytes, host_threads: threads, adapt: false, check_peers: false, ..Config::default() };
    Context::with_backend(Arc::new(machine), Arc::new(backend), config).expect("a context")
}

/// Runs `work` in a thread of the same simulated process.
fn beside<'scope>(scope: &'scope Scope<'scope, '_>, work: impl FnOnce() + Send + 'scope) {
    let node = double::share();
    scope.spawn(move || {
        double::join(node);
        work();
    });
}

#[track_caller]
fn nothing_was_stuck() {
    node(|node| assert!(node.stuck.is_empty(), "blocked for ever: {:?}", node.stuck));
}

/// Chain of copies: from pageable memory to a GPU and back, or through two GPUs.
struct Trip {
    back: Vec<u8>,
    seed: usize,
    plans: Vec<Arc<Plan>>,
    _there: Vec<u8>,
}

impl Trip {
    fn new(context: &Context, gpu: DeviceId, seed: usize) -> Trip {
        let trip = Trip::through(context, &[gpu], BYTES, &PlanOptions::default(), seed);
        trip.plans.iter().for_each(|plan| assert!(plan.planned().threads.is_some(), "{}", plan.describe()));
        trip
    }

    /// Creates a chain of copies from pageable memory through the given GPUs to pageable memory.
    fn through(context: &Context, gpus: &[DeviceId], bytes: usize, options: &PlanOptions, seed: usize) -> Trip {
        let (there, back) = (vec![0_u8; bytes], vec![0_u8; bytes]);
        let [from, to] = [&there, &back].map(|bytes| bytes.as_ptr().expose_provenance() as u64);
        write(from, bytes, seed);
        let transfer = |src, dst| Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes: bytes as u64 };
        let on_gpus = gpus.iter().map(|gpu| context.allocate(*gpu, bytes as u64).expect("memory"));
        let ends: Vec<u64> = [from].into_iter().chain(on_gpus).chain([to]).collect();
        let plans = ends.windows(2).map(|ends| context.plan(&[transfer(ends[0], ends[1])], options).expect("a plan")).collect();
        Trip { back, seed, plans, _there: there }
    }

    /// Enqueues the copy with index `way` of this chain.
    fn go(&self, way: usize, stream: StreamHandle) {
        self.plans[way].enqueue(stream).expect("enqueued");
    }

    #[track_caller]
    fn check(&self) {
        assert_arrived(self.back.as_ptr().expose_provenance() as u64, self.back.len(), self.seed);
    }
}

/// Starts several threads. Each copies memory to a GPU and back, in one stream after the other.
fn many_threads(threads: usize, streams: impl FnOnce(&Context) -> Vec<StreamHandle>) {
    let context = context(3, 256 << 20);
    let streams = streams(&context);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (context, streams) = (&context, &streams);
            beside(scope, move || {
                for round in 0..6 {
                    let (trip, stream) = (Trip::new(context, GPUS[0], 7 * thread + round), streams[(thread + round) % streams.len()]);
                    trip.go(0, stream);
                    trip.plans[1].execute(stream).expect("enqueued").wait().expect("it arrives");
                    trip.check();
                }
            });
        }
    });
    nothing_was_stuck();
}

#[test]
fn threads_that_execute_in_one_stream_wait_for_none_of_each_other() {
    for threads in [4, 16] {
        many_threads(threads, |context| vec![context.create_stream(GPUS[0]).expect("a stream")]);
        many_threads(threads, |_| vec![StreamHandle(0)]);
    }
}

#[test]
fn threads_that_execute_in_many_streams_wait_for_none_of_each_other() {
    many_threads(8, |context| (0..5).map(|stream| context.create_stream(GPUS[stream % 2]).expect("a stream")).collect());
}

/// Makes a stream wait and then copy pageable memory. The work that ends the wait is enqueued later, in another stream.
fn gate(host_threads: u32, close: impl FnOnce(&Context, StreamHandle), open: impl FnOnce(&Context, StreamHandle)) {
    let context = context(host_threads, 1 << 20);
    let streams = GPUS.map(|gpu| context.create_stream(gpu).expect("a stream"));
    let trips = [Trip::new(&context, GPUS[0], 1), Trip::new(&context, GPUS[1], 2)];
    close(&context, streams[0]);
    for (trip, stream) in trips.iter().zip(streams) {
        trip.go(0, stream);
        trip.go(1, stream);
    }
    open(&context, streams[1]);
    streams.into_iter().rev().for_each(|stream| context.synchronize_stream(stream).expect("it goes on"));
    nothing_was_stuck();
    trips.iter().for_each(Trip::check);
}

#[test]
fn a_copy_whose_stream_waits_for_a_signal_behind_another_copy_holds_up_no_thread() {
    for threads in [1, 4] {
        let counter = std::cell::Cell::new(0);
        let signal = || [Signal { counter: counter.get(), value: 1 }];
        let close = |context: &Context, stream| {
            counter.set(context.allocate_shared(DeviceId::HOST, 64).expect("memory"));
            context.stream_wait_signals(stream, &signal()).expect("enqueued");
        };
        gate(threads, close, |context, stream| context.stream_raise_signals(stream, &signal()).expect("enqueued"));
    }
}

#[test]
fn a_copy_whose_stream_waits_for_a_host_function_behind_another_copy_holds_up_no_thread() {
    for threads in [1, 4] {
        let count = Arc::new(AtomicU64::new(0));
        let close = |context: &Context, stream| context.launch_host(stream, until(&count, 1)).expect("enqueued");
        gate(threads, close, |context, stream| context.launch_host(stream, raise(&count)).expect("enqueued"));
    }
}

#[test]
fn a_plan_that_is_executed_in_two_streams_makes_neither_wait_for_the_other() {
    for way in [0, 1] {
        let context = context(2, 1 << 20);
        let [waits, goes] = [(); 2].map(|()| context.create_stream(GPUS[0]).expect("a stream"));
        let counter = context.allocate_shared(DeviceId::HOST, 64).expect("memory");
        let trip = Trip::new(&context, GPUS[0], 3);
        trip.go(0, goes);
        context.synchronize_stream(goes).expect("it is there");
        for value in 1..20 {
            let signal = [Signal { counter, value }];
            context.stream_wait_signals(waits, &signal).expect("enqueued");
            trip.go(way, waits);
            trip.go(way, goes);
            context.stream_raise_signals(goes, &signal).expect("enqueued");
            context.synchronize_stream(waits).expect("it goes on");
            nothing_was_stuck();
        }
        trip.plans[1].execute(goes).expect("enqueued").wait().expect("it arrives");
        trip.check();
    }
}

fn raise(count: &Arc<AtomicU64>) -> Box<dyn Fn() + Send + Sync> {
    let count = Arc::clone(count);
    Box::new(move || _ = count.fetch_add(1, Ordering::AcqRel))
}

/// Returns a host function that blocks until `count` reaches `value`, but for at most ten seconds, so that a failing test ends.
fn until(count: &Arc<AtomicU64>, value: u64) -> Box<dyn Fn() + Send + Sync> {
    let count = Arc::clone(count);
    Box::new(move || {
        for _ in 0..100_000 {
            if count.load(Ordering::Acquire) >= value {
                return;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    })
}

#[derive(Copy, Clone, Debug)]
enum Link {
    Signal,
    Function,
    Event,
}

/// Operation in a stream. A `Give` increments a counter of its stream; a `Take` waits until the counter of another stream has reached a
/// value.
#[derive(Copy, Clone, Debug)]
enum Do {
    Go { trip: usize, way: usize },
    Give(Link, u64),
    Take { link: Link, of: usize, count: u64 },
}

/// Generator of random numbers that are determined by a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// Returns the operations of each stream, in order. There is an order of all operations in which every operation follows those for which it
/// waits. The operations are enqueued in a different order.
fn program(random: &mut Random, streams: usize, trips: usize, copies: usize) -> Vec<Vec<Do>> {
    let mut program: Vec<Vec<Do>> = vec![Vec::new(); streams];
    let mut given: Vec<Vec<Link>> = vec![Vec::new(); streams];
    // For each chain of copies: its stream, and the number of its copies so far.
    let mut trips: Vec<(usize, usize)> = (0..trips).map(|_| (random.below(streams), 0)).collect();
    while trips.iter().any(|(_, made)| *made < copies) {
        let stream = random.below(streams);
        let trip = random.below(trips.len());
        match random.below(4) {
            0 => {
                let link = [Link::Signal, Link::Function, Link::Event][random.below(3)];
                given[stream].push(link);
                program[stream].push(Do::Give(link, given[stream].len() as u64));
            }
            1 => {
                let of = random.below(streams);
                if of != stream && !given[of].is_empty() {
                    let count = 1 + random.below(given[of].len());
                    program[stream].push(Do::Take { link: given[of][count - 1], of, count: count as u64 });
                }
            }
            _ if trips[trip].1 < copies => {
                let (of, way) = trips[trip];
                trips[trip].1 += 1;
                program[of].push(Do::Go { trip, way });
            }
            _ => {}
        }
    }
    program
}

/// Streams of a random program, with the counters of their gives.
struct Play<'a> {
    context: &'a Context,
    streams: Vec<StreamHandle>,
    trips: Vec<Trip>,
    counters: u64,
    counts: Vec<Arc<AtomicU64>>,
    /// Events that have been recorded, by stream and number.
    events: Mutex<Vec<((usize, u64), EventHandle)>>,
}

impl Play<'_> {
    /// Enqueues the next operation of a stream. Returns false if the operation waits for an event that has not been recorded yet.
    fn enqueue(&self, of: usize, next: Do) -> bool {
        let (context, stream) = (self.context, self.streams[of]);
        let signal = |of: usize, value| [Signal { counter: self.counters + 8 * of as u64, value }];
        match next {
            Do::Go { trip, way } => self.trips[trip].go(way, stream),
            Do::Give(Link::Signal, count) => context.stream_raise_signals(stream, &signal(of, count)).expect("enqueued"),
            // Host functions of a stream run in order, so the counter has the value of the last one.
            Do::Give(Link::Function, count) => {
                let own = Arc::clone(&self.counts[of]);
                context.launch_host(stream, Box::new(move || own.store(count, Ordering::Release))).expect("enqueued");
            }
            Do::Give(Link::Event, count) => {
                let event = context.create_event().expect("an event");
                context.record_event(event, stream).expect("recorded");
                self.events.lock().expect("no panic").push(((of, count), event));
            }
            Do::Take { link: Link::Signal, of, count } => context.stream_wait_signals(stream, &signal(of, count)).expect("enqueued"),
            Do::Take { link: Link::Function, of, count } => {
                context.launch_host(stream, until(&self.counts[of], count)).expect("enqueued");
            }
            Do::Take { link: Link::Event, of, count } => {
                let events = self.events.lock().expect("no panic");
                let Some((_, event)) = events.iter().find(|(key, _)| *key == (of, count)) else { return false };
                context.stream_wait_event(stream, *event).expect("enqueued");
            }
        }
        true
    }

    /// Enqueues the work of all streams in a random order, while other threads do the same.
    fn enqueue_all(&self, lists: &[Mutex<VecDeque<Do>>], mut random: Random) {
        let mut is_empty = vec![false; lists.len()];
        while is_empty.contains(&false) {
            let of = random.below(lists.len());
            let mut list = lists[of].lock().expect("no panic");
            match list.front() {
                None => is_empty[of] = true,
                Some(next) if self.enqueue(of, *next) => _ = list.pop_front(),
                Some(_) => {
                    drop(list);
                    std::thread::yield_now();
                }
            }
        }
    }
}

/// Lets several threads enqueue a random program in streams that wait for each other, and checks every byte.
fn play(seed: u64, context: &Context, trips: Vec<Trip>, mut random: Random) {
    let (streams, callers) = (2 + random.below(4), 1 + random.below(4));
    let program = program(&mut random, streams, trips.len(), trips[0].plans.len());
    let play = Play {
        context,
        streams: (0..streams).map(|stream| context.create_stream(GPUS[stream % 2]).expect("a stream")).collect(),
        trips,
        counters: context.allocate_shared(DeviceId::HOST, 64).expect("memory"),
        counts: (0..streams).map(|_| Arc::default()).collect(),
        events: Mutex::default(),
    };
    let lists: Vec<Mutex<VecDeque<Do>>> = program.iter().map(|list| Mutex::new(list.iter().copied().collect())).collect();
    std::thread::scope(|scope| {
        for caller in 0..callers {
            let (play, lists, random) = (&play, &lists, Random(seed ^ (caller as u64) << 32));
            beside(scope, move || play.enqueue_all(lists, random));
        }
    });
    play.streams.iter().for_each(|stream| context.synchronize_stream(*stream).expect("it goes on"));
    node(|node| assert!(node.stuck.is_empty(), "seed {seed}: {:?}: {program:?}", node.stuck));
    play.trips.iter().for_each(Trip::check);
}

/// Calls `play` for `TEST_PROGRAMS` random programs, or for the usual number.
fn play_many(usual: u64, on: &str, play: impl Fn(u64)) {
    let setting = |name: &str, usual| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual);
    let (seed, programs) = (setting("TEST_SEED", 1), setting("TEST_PROGRAMS", usual));
    (seed..seed + programs).for_each(play);
    println!("{programs} programs from seed {seed} on {on}: every byte arrived");
}

#[test]
fn random_programs_whose_streams_wait_for_each_others_copies_end_and_every_byte_arrives() {
    play_many(30, "the double", |seed| {
        let mut random = Random(seed);
        // Staging memory is large enough either for the rings of all plans, or for those of one plan at a time.
        let context = context(1 + random.below(4) as u32, [256 << 20, 1 << 20][random.below(2)]);
        let trips = (0..8).map(|trip| Trip::new(&context, GPUS[trip % 2], trip)).collect();
        play(seed, &context, trips, random);
    });
}

/// Creates a context of the host backend with four GPUs that are connected in pairs, on which even small transfers use several paths.
fn relaying_context(staging_bytes: u64) -> Context {
    let mut topology = preset("beluga").expect("a preset");
    for cost in Costs::TABLE.iter().filter(|cost| cost.unit == CostUnit::Seconds) {
        *(cost.of_mut)(&mut topology.costs) = 0.0;
    }
    let machine = Machine::new(topology).expect("well formed");
    let config = Config { staging_bytes, adapt: false, ..Config::default() };
    Context::with_backend(Arc::new(machine), Arc::new(HostBackend::new(4, 2)), config).expect("a context")
}

/// Runs `work` in a thread, and fails if it has not ended after two minutes.
fn ends(seed: u64, work: impl FnOnce() + Send + 'static) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        work();
        let _ = sender.send(());
    });
    let waited = receiver.recv_timeout(Duration::from_secs(120));
    assert!(!matches!(waited, Err(std::sync::mpsc::RecvTimeoutError::Timeout)), "seed {seed}: streams wait for each other for ever");
    thread.join().expect("no panic; its text is above");
}

#[test]
fn random_programs_whose_copies_share_the_rings_of_relays_end_on_the_host_backend_and_every_byte_arrives() {
    play_many(30, "the host backend", |seed| {
        ends(seed, move || {
            let mut random = Random(seed);
            let context = relaying_context([96 << 10, 1 << 20][random.below(2)]);
            let options = PlanOptions { min_bytes: Some(1), chunk_bytes: Some(8 << 10), ..PlanOptions::default() };
            let trip =
                |number: usize| Trip::through(&context, &[GPUS[number % 2], GPUS[1 - number % 2]], 150_000 + number, &options, number);
            let trips: Vec<Trip> = (0..8).map(trip).collect();
            assert!(
                trips.iter().any(|trip| trip.plans.iter().any(|plan| plan.staging_bytes() > 0)),
                "no plan uses a ring: {}",
                trips[0].plans[1].describe()
            );
            play(seed, &context, trips, random);
        });
    });
}

/// Returns a program with two internal streams (lanes) whose copies use two slots each. A single copy thread would fill all of lane 1
/// before it reaches lane 0.
fn one_lane_after_the_other(each: u64, counts: [u32; 2]) -> Arc<Program> {
    let ring = |slots| Ring { device: DeviceId::HOST, slot_bytes: each, slots };
    let mut program = Program {
        sources: Vec::new(),
        transfers: counts.map(|count| u64::from(count) * each).to_vec(),
        lanes: vec![Lane::new(GPUS[0]), Lane::new(GPUS[0]), Lane::new(DeviceId::HOST)],
        rings: vec![ring(2), ring(2)],
        ops: Vec::new(),
    };
    for lane in [1, 0] {
        let mut moved: Vec<OpId> = Vec::new();
        for chunk in 0..counts[lane] {
            let (transfer, offset) = (lane as u32, u64::from(chunk) * each);
            let slot = Place::Slot { ring: RingId(lane as u32), slot: chunk % 2 };
            let fill = Copy { from: Place::Source { transfer, offset }, to: slot, bytes: each };
            let freed = chunk.checked_sub(2).map(|before| moved[before as usize]);
            let fill = Op { lane: LaneId(2), mechanism: Mechanism::Thread, copies: smallvec![fill], after: freed.into_iter().collect() };
            program.ops.push(fill);
            let filled = OpId(program.ops.len() as u32 - 1);
            let copy = Copy { from: slot, to: Place::Destination { transfer, offset }, bytes: each };
            let copy = Op { lane: LaneId(lane as u32), mechanism: Mechanism::Copy, copies: smallvec![copy], after: smallvec![filled] };
            program.ops.push(copy);
            moved.push(OpId(program.ops.len() as u32 - 1));
        }
    }
    plan::validate(&program, 1 << 20).expect("a valid program");
    Arc::new(program)
}

#[test]
fn a_queue_that_is_full_holds_nothing_that_comes_after_what_is_still_to_be_enqueued() {
    const EACH: u64 = 5003;
    let counts = [12, 40];
    double::start(2, true);
    let backend = CudaBackend::on(double::driver(), 1).expect("the double has GPUs");
    let program = one_lane_after_the_other(EACH, counts);
    let ordinary = counts.map(|count| vec![0_u8; count as usize * EACH as usize]);
    let ends: Arc<[Endpoints]> = ordinary
        .iter()
        .map(|from| {
            let src = from.as_ptr().expose_provenance() as u64;
            write(src, from.len(), from.len());
            Endpoints { dst: backend.allocate(GPUS[0], from.len() as u64).expect("memory"), src }
        })
        .collect();
    let rings: Arc<[u64]> = (0..2).map(|_| backend.allocate(DeviceId::HOST, 2 * EACH).expect("memory")).collect();
    let stream = backend.create_stream(GPUS[0]).expect("a stream");
    node(|node| node.room = Some(8));
    let end = backend.submit(&Execution::new(&program, &ends, &rings, stream)).expect("enqueued").expect("a completion");
    end.wait().expect("it runs");
    nothing_was_stuck();
    ends.iter().zip(&ordinary).for_each(|(ends, from)| assert_arrived(ends.dst, from.len(), from.len()));
}
