//! Tests memory and signals between two processes on real GPUs. The other process is this test program too. It maps memory on request and
//! answers in each round.

use super::scale::{is_reduced, scaled};
use super::*;
use mpgpu_backend::{Signal, SignalWait};
use mpgpu_ipc::Handle;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Returns the number of rounds, which is equal in both processes.
fn rounds() -> u64 {
    scaled(200, 20)
}

const BYTES: u64 = (4 << 20) + 77;

pub(super) fn host_words(address: u64, count: usize) -> &'static mut [u64] {
    // SAFETY: pinned host memory of this size, which the tests use in one thread and after the streams that write it.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address as usize), count) }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn handle_of(text: &str) -> Handle {
    let mut bytes = [0; 128];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hexadecimal digits");
    }
    Handle::decode(&bytes).expect("a handle")
}

pub(super) fn export(context: &Context, address: u64, bytes: u64) -> String {
    hex(&context.state().export_memory(address, bytes).expect("memory that can be shared").encode())
}

/// Methods by which both processes wait for signals and copy data into each other's memory.
const WAYS: [(SignalWait, Engine); 2] = [(SignalWait::Operation, Engine::Auto), (SignalWait::Kernel, Engine::Kernel)];
const CHILD: &str = "SHARE_TEST_CHILD";

/// Returns a plan of one transfer, which is executed in stream order.
fn plan_of(context: &Context, dst: (u64, DeviceId), src: (u64, DeviceId), bytes: u64) -> Arc<mpgpu_contexts::Plan> {
    let transfer = Transfer { dst: dst.0, dst_device: dst.1, src: src.0, src_device: src.1, bytes };
    context.plan(&[transfer], &PlanOptions::default()).expect("a plan")
}

fn waiting(wait: SignalWait, engine: Engine) -> Context {
    context(None, |config| (config.signal_wait, config.engine) = (Some(wait), engine))
}

pub(super) struct Peer {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    pub fn start() -> Peer {
        Peer::waiting(SignalWait::Operation)
    }

    fn waiting(wait: SignalWait) -> Peer {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command
            .args(["--ignored", "--exact", "share::child_obeys", "--nocapture", "--test-threads=1"])
            .env(CHILD, if wait == SignalWait::Kernel { "kernel" } else { "operation" });
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("this program runs");
        let (orders, answers) = (process.stdin.take().expect("a pipe"), process.stdout.take().expect("a pipe"));
        Peer { process, orders, answers: BufReader::new(answers) }
    }

    pub fn ask(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").expect("the peer reads");
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.answers.read_line(&mut line).expect("text") > 0, "the peer ended at {order:?}");
            if let Some((_, answer)) = line.split_once("ANSWER ") {
                return answer.trim_end().to_owned();
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns word `i` of round `round`.
fn word(round: u64, i: usize) -> u64 {
    (round << 40) ^ (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Executes the requests of the tests below in a child process, if the environment requests it. Otherwise does nothing.
#[test]
#[ignore = "a process that other tests start"]
fn child_obeys() {
    let Ok(wait) = std::env::var(CHILD) else { return };
    let (wait, engine) = WAYS[usize::from(wait == "kernel")];
    let context = waiting(wait, engine);
    let stream = context.create_stream(GPU1).expect("a stream");
    // This process also uses the GPU of the imported memory, but not for copies.
    context.allocate(GPU0, 1).expect("memory");
    let mut imports = Vec::new();
    let mut own = Vec::new();
    for line in std::io::stdin().lines() {
        let line = line.expect("text");
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = match words[0] {
            "import" => match context.state().import_memory(&handle_of(words[1])) {
                Ok((address, device)) => {
                    imports.push((address, device));
                    format!("device {}", device.0)
                }
                Err(error) => format!("refused: {error}"),
            },
            // Allocates zeroed counters of this process, which the other process sets.
            "counters" => {
                let address = context.allocate_shared(DeviceId::HOST, 16).expect("memory");
                host_words(address, 2).fill(0);
                own.push(address);
                export(&context, address, 16)
            }
            // Puts data from GPU 1 into import 0 in each round, and then sets the counter in import 1. Waits for its own counter before
            // each round.
            "pump" => {
                let staging = context.allocate(DeviceId::HOST, rounds() * 64 * 8).expect("memory");
                let host = host_words(staging, rounds() as usize * 64);
                for (i, cell) in host.iter_mut().enumerate() {
                    *cell = word(i as u64 / 64 + 1, i % 64);
                }
                let source = context.allocate(GPU1, BYTES).expect("memory");
                let put = plan_of(&context, imports[0], (source, GPU1), BYTES);
                for round in 1..=rounds() {
                    context.stream_wait_signals(stream, &[Signal { counter: own[0], value: round - 1 }]).expect("enqueued");
                    let mark = plan_of(&context, (source, GPU1), (staging + (round - 1) * 512, DeviceId::HOST), 512);
                    mark.execute(stream).expect("enqueued");
                    put.execute(stream).expect("enqueued");
                    context.stream_raise_signals(stream, &[Signal { counter: imports[1].0, value: round }]).expect("enqueued");
                }
                context.synchronize_stream(stream).map_or_else(|error| error.to_string(), |()| "pumped".into())
            }
            // Writes the words of a round into an import, or checks the words.
            "fill" | "look" => {
                let [import, round, count] = [1, 2, 3].map(|at| words[at].parse::<usize>().expect("a number"));
                let bytes = count as u64 * 8;
                let staging = (context.allocate(DeviceId::HOST, bytes).expect("memory"), DeviceId::HOST);
                let host = host_words(staging.0, count);
                let expected: Vec<u64> = (0..count).map(|i| word(round as u64, i)).collect();
                let fill = words[0] == "fill";
                host.iter_mut().zip(&expected).for_each(|(cell, word)| *cell = if fill { *word } else { 0 });
                let (dst, src) = if fill { (imports[import], staging) } else { (staging, imports[import]) };
                plan_of(&context, dst, src, bytes).execute(stream).expect("enqueued");
                context.synchronize_stream(stream).expect("the copy runs");
                let differs = host.iter().zip(&expected).position(|(a, b)| a != b);
                context.free(staging.0).expect("allocated");
                differs.map_or("right".into(), |at| format!("word {at} differs"))
            }
            "descriptors" => std::fs::read_dir("/proc/self/fd").expect("a list").count().to_string(),
            // Sets the counter in import 1 whenever its own counter is set, which is the second half of a round trip.
            "echo" => {
                for round in 1..=rounds() {
                    context.stream_wait_signals(stream, &[Signal { counter: own[0], value: round }]).expect("enqueued");
                    context.stream_raise_signals(stream, &[Signal { counter: imports[0].0, value: round }]).expect("enqueued");
                }
                "enqueued".into()
            }
            "close" => {
                for (address, _) in imports.drain(..) {
                    context.state().close_memory(address).expect("imported");
                }
                "closed".into()
            }
            other => panic!("{other}: unknown order"),
        };
        println!("\nANSWER {answer}");
    }
}

#[test]
fn a_peer_puts_into_device_memory_with_signals_and_nothing_else_orders_it() {
    let Some(_turn) = gpus(2) else { return };
    WAYS.into_iter().for_each(|(wait, engine)| a_peer_puts(wait, engine));
}

fn a_peer_puts(wait: SignalWait, engine: Engine) {
    let context = waiting(wait, engine);
    let mut peer = Peer::waiting(wait);
    // The memory is inside an allocation, so that offsets are tested.
    let whole = context.allocate(GPU0, BYTES + 8192).expect("memory");
    let inbox = whole + 4096;
    let counters = context.allocate_shared(DeviceId::HOST, 16).expect("memory");
    host_words(counters, 2).fill(0);
    let seen = context.allocate(DeviceId::HOST, rounds() * 512).expect("memory");
    host_words(seen, rounds() as usize * 64).fill(0);
    assert_eq!(peer.ask(&format!("import {}", export(&context, inbox, BYTES))), "device 0");
    assert_eq!(peer.ask(&format!("import {}", export(&context, counters, 16))), "device -1");
    let (theirs, on) = context.state().import_memory(&handle_of(&peer.ask("counters"))).expect("host memory of the peer");
    assert_eq!(on, DeviceId::HOST);

    let stream = context.create_stream(GPU0).expect("a stream");
    for round in 1..=rounds() {
        context.stream_wait_signals(stream, &[Signal { counter: counters, value: round }]).expect("enqueued");
        let take = plan_of(&context, (seen + (round - 1) * 512, DeviceId::HOST), (inbox, GPU0), 512);
        take.execute(stream).expect("enqueued");
        context.stream_raise_signals(stream, &[Signal { counter: theirs, value: round }]).expect("enqueued");
    }
    assert_eq!(peer.ask("pump"), "pumped");
    context.synchronize_stream(stream).expect("all rounds");
    for (i, found) in host_words(seen, rounds() as usize * 64).iter().enumerate() {
        assert_eq!(*found, word(i as u64 / 64 + 1, i % 64), "round {}, word {}", i / 64 + 1, i % 64);
    }
    assert_eq!(peer.ask("close"), "closed");
    context.state().close_memory(theirs).expect("imported");
}

#[test]
fn signals_go_round_between_two_processes() {
    let Some(_turn) = gpus(2) else { return };
    WAYS.into_iter().for_each(|(wait, engine)| signals_go_round(wait, engine));
}

fn signals_go_round(wait: SignalWait, engine: Engine) {
    let context = waiting(wait, engine);
    let mut peer = Peer::waiting(wait);
    let counters = context.allocate_shared(DeviceId::HOST, 16).expect("memory");
    host_words(counters, 2).fill(0);
    let (theirs, _) = {
        peer.ask(&format!("import {}", export(&context, counters, 16)));
        context.state().import_memory(&handle_of(&peer.ask("counters"))).expect("host memory of the peer")
    };
    let stream = context.create_stream(GPU0).expect("a stream");
    assert_eq!(peer.ask("echo"), "enqueued");
    let started = Instant::now();
    for round in 1..=rounds() {
        context.stream_raise_signals(stream, &[Signal { counter: theirs, value: round }]).expect("enqueued");
        context.stream_wait_signals(stream, &[Signal { counter: counters, value: round }]).expect("enqueued");
    }
    context.synchronize_stream(stream).expect("all rounds");
    let one_way = started.elapsed() / (2 * rounds() as u32);
    drop(writeln!(
        std::io::stderr(),
        "gpu tests: a signal from stream to stream of two processes takes {one_way:?} one way, waiting by {wait:?}"
    ));
    context.state().close_memory(theirs).expect("imported");
}

#[test]
fn a_stream_that_waits_for_a_peer_that_was_killed_goes_on() {
    let Some(_turn) = gpus(2) else { return };
    WAYS.into_iter().for_each(|(wait, engine)| a_killed_peer(wait, engine));
}

fn a_killed_peer(wait: SignalWait, engine: Engine) {
    let context = waiting(wait, engine);
    let mut peer = Peer::waiting(wait);
    let counters = context.allocate_shared(DeviceId::HOST, 16).expect("memory");
    host_words(counters, 2).fill(0);
    peer.ask(&format!("import {}", export(&context, counters, 16)));
    let stream = context.create_stream(GPU0).expect("a stream");
    context.stream_wait_signals(stream, &[Signal { counter: counters, value: 1 }]).expect("enqueued");
    assert!(matches!(context.wait_signal(Signal { counter: counters + 8, value: 1 }, 0.0), Err(Error::SignalTimeout { .. })));
    // Later work is ordered in two ways: by an event of the library, followed by an execution and another event, and by an event of CUDA
    // that the library does not see.
    let (joins, by_hand) = (context.create_stream(GPU1).expect("a stream"), context.create_stream(GPU0).expect("a stream"));
    let [waited, joined] = [(); 2].map(|()| context.create_event().expect("an event"));
    context.record_event(waited, stream).expect("recorded");
    context.stream_wait_event(joins, waited).expect("enqueued");
    let [source, target] = [GPU0, GPU1].map(|gpu| context.allocate(gpu, 4096).expect("memory"));
    let copy = plan_of(&context, (target, GPU1), (source, GPU0), 4096);
    let copied = copy.execute(joins).expect("enqueued");
    context.record_event(joined, joins).expect("recorded");
    set_device(0);
    let mut event = std::ptr::null_mut();
    // SAFETY: the output is valid for the call. Streams of the current GPU, and an event of it that is destroyed once.
    unsafe {
        ok(sys::cuEventCreate(&mut event, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32));
        ok(sys::cuEventRecord(event, raw(stream)));
        ok(sys::cuStreamWaitEvent(raw(by_hand), event, 0));
        ok(sys::cuEventDestroy_v2(event));
    }
    assert!(!copied.is_done().expect("enqueued"), "it did not wait");
    peer.process.kill().expect("the peer exists");
    let gone = |error: &BackendError| matches!(error, BackendError::PeerGone(why) if why.contains("has ended"));
    let said = |result: Result<(), Error>| matches!(&result, Err(Error::Backend(error)) if gone(error));
    assert!(copied.wait().is_err_and(|error| gone(&error)), "the execution");
    for event in [waited, joined] {
        assert!(said(context.synchronize_event(event)), "an event");
    }
    // The loss of the peer is reported in `stream` and `joins`, because the library knows their events and work. The caller has ordered
    // `by_hand` through the driver.
    for stream in [stream, joins, by_hand] {
        context.synchronize_stream(stream).expect("said once, or not known to wait");
        copy.execute(stream).expect("enqueued").wait().expect("its stream was told");
    }
    assert!(said(context.stream_wait_signals(stream, &[Signal { counter: counters + 8, value: 1 }])), "a wait that comes too late");
    let started = Instant::now();
    assert!(matches!(
        context.wait_signal(Signal { counter: counters + 8, value: 1 }, 60.0),
        Err(Error::Backend(BackendError::PeerGone(_)))
    ));
    assert!(started.elapsed() < Duration::from_secs(30), "it was waited for");
}

#[test]
fn a_stream_goes_on_after_a_killed_peer_though_another_raises_the_same_counter_to_less() {
    let Some(_turn) = gpus(2) else { return };
    WAYS.into_iter().for_each(|(wait, engine)| set_back(wait, engine));
}

fn set_back(wait: SignalWait, engine: Engine) {
    let context = waiting(wait, engine);
    let mut peer = Peer::waiting(wait);
    let [counter, gate] = [16, 16].map(|bytes| context.allocate_shared(DeviceId::HOST, bytes).expect("memory"));
    // SAFETY: pinned host memory that exists until the end of this test, accessed atomically by GPUs and other processes.
    let atomic = |address: u64| unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(address as usize)) };
    for address in [counter, gate] {
        atomic(address).store(0, Ordering::SeqCst);
    }
    peer.ask(&format!("import {}", export(&context, counter, 16)));
    let stream = context.create_stream(GPU0).expect("a stream");
    for (counter, value) in [(counter, 1), (gate, 1), (counter, 2)] {
        context.stream_wait_signals(stream, &[Signal { counter, value }]).expect("enqueued");
    }
    let [source, target] = [GPU0, GPU1].map(|gpu| context.allocate(gpu, 4096).expect("memory"));
    let copied = plan_of(&context, (target, GPU1), (source, GPU0), 4096).execute(stream).expect("enqueued");
    peer.process.kill().expect("the peer exists");
    let deadline = Instant::now() + Duration::from_secs(30);
    let until = |reached: &dyn Fn() -> bool| {
        while !reached() && Instant::now() < deadline {
            std::thread::yield_now();
        }
        reached()
    };
    assert!(until(&|| atomic(counter).load(Ordering::SeqCst) == 2), "the end of the peer is not noticed");
    // A live process sets the counter only now, so the stream has not reached its last wait yet.
    atomic(counter).store(1, Ordering::SeqCst);
    atomic(gate).store(1, Ordering::SeqCst);
    let goes_on = until(&|| !matches!(copied.is_done(), Ok(false)));
    atomic(counter).store(2, Ordering::SeqCst);
    assert!(goes_on, "the stream waits for ever");
    assert!(matches!(context.synchronize_stream(stream), Err(Error::Backend(BackendError::PeerGone(_)))), "the stream");
}

/// Returns the numbers of file descriptors, mappings and resident pages of a process.
fn holdings(process: u32) -> [usize; 3] {
    let lines = |file: &str| std::fs::read_to_string(format!("/proc/{process}/{file}")).expect("procfs");
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd")).expect("procfs").count();
    let resident = lines("statm").split_whitespace().nth(1).expect("two numbers").parse().expect("a number");
    [descriptors, lines("maps").lines().count(), resident]
}

#[test]
fn ten_thousand_rounds_of_export_and_import_leave_nothing_behind() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = context(None, |_| {});
    let mut peer = Peer::start();
    let rounds = scaled(10_000, 40);
    const COUNT: usize = 64;
    let state = |peer: &Peer| {
        let processes = [std::process::id(), peer.process.id()].map(holdings);
        (processes, super::staging::free_bytes(2))
    };
    let mut warm = None;
    for round in 0..rounds {
        // Small allocations share a mapping of the driver, and large allocations have their own mapping. The sizes include whole and
        // partial pages.
        let bytes = [777_000, 2 << 20, 64 << 10, (1 << 20) + 4096][round as usize % 4];
        let address = context.allocate(GPU0, bytes).expect("memory");
        let offset = if round % 3 == 0 { 0 } else { 4096 };
        write(address + offset, &(0..COUNT).flat_map(|i| word(round, i).to_le_bytes()).collect::<Vec<u8>>());
        assert_eq!(peer.ask(&format!("import {}", export(&context, address + offset, bytes - offset))), "device 0");
        assert_eq!(peer.ask(&format!("look 0 {round} {COUNT}")), "right", "round {round}");
        assert_eq!(peer.ask("close"), "closed");
        context.free(address).expect("allocated");
        if round == 30 {
            warm = Some(state(&peer));
        }
    }
    let (before, after) = (warm.expect("more rounds than that"), state(&peer));
    drop(writeln!(std::io::stderr(), "gpu tests: {rounds} rounds of export and import: {before:?} after 31, {after:?} at the end"));
    for (before, after) in before.0.iter().zip(&after.0) {
        // A leak in each round would add as many descriptors as there are rounds. The driver may open a few by itself.
        assert!(after[0] < before[0] + 20, "{} descriptors, and {} after {rounds} rounds", before[0], after[0]);
        assert!(after[1] < before[1] + 60, "{} mappings, and {} after {rounds} rounds", before[1], after[1]);
        // Without a leak, a process under compute-sanitizer grew by 95 MiB in 200 rounds, and a process without it grew by 0.5 MiB in
        // 10,000 rounds.
        assert!(is_reduced() || after[2] < before[2] + 4096, "{} resident pages, and {} after {rounds} rounds", before[2], after[2]);
    }
    // A leak of 64 KiB per round, the smallest mapping, would add up to 600 MiB. With few rounds on a GPU that other tests also use, the
    // number is meaningless.
    for (before, after) in before.1.iter().zip(&after.1).filter(|_| !is_reduced()) {
        assert!(after + (64 << 20) > *before, "{before} bytes free on a GPU, and {after} after {rounds} rounds");
    }
    let names = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    // The table of the interposer is excluded, because any process may use it.
    let left = |name: &str| name.contains("mpgpu") && !name.starts_with("mpgpu-owners-");
    assert_eq!(names.filter(|entry| left(&entry.file_name().to_string_lossy())).count(), 0);
}

/// Creates a memory pool of GPU 0 that other processes can import.
fn pool_for_others() -> sys::CUmemoryPool {
    let properties = sys::CUmemPoolProps {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
        win32SecurityAttributes: std::ptr::null_mut(),
        maxSize: 0,
        usage: 0,
        reserved: [0; 54],
    };
    let mut pool = std::ptr::null_mut();
    // SAFETY: input and output are valid for the call.
    ok(unsafe { sys::cuMemPoolCreate(&mut pool, &properties) });
    pool
}

#[test]
fn memory_of_a_pool_is_mapped_by_a_peer_and_once_freed_is_not_mistaken_for_what_comes_after() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = context(None, |_| {});
    let pool = pool_for_others();
    let stream = raw(context.create_stream(GPU0).expect("a stream"));
    let allocate = |bytes: usize| {
        let mut address = 0;
        // SAFETY: the output is valid for the call. A pool and a stream of this GPU.
        unsafe {
            ok(sys::cuMemAllocFromPoolAsync(&mut address, bytes, pool, stream));
            ok(sys::cuStreamSynchronize(stream));
        }
        address
    };
    let free = |address| {
        // SAFETY: allocated above. No copy uses it any more, and no process has it mapped.
        unsafe {
            ok(sys::cuMemFreeAsync(address, stream));
            ok(sys::cuStreamSynchronize(stream));
        }
    };
    const COUNT: usize = 100_000;
    const SMALL: usize = 333;
    let words_of = |round, count| (0..count).flat_map(|i| word(round, i).to_le_bytes()).collect::<Vec<u8>>();
    let [large, small] = [8 * COUNT + 8192, 8 * SMALL].map(allocate);
    write(large, &vec![0xEE; 8 * COUNT + 8192]);
    let handles = [export(&context, large + 4096, 8 * COUNT as u64), export(&context, small, 8 * SMALL as u64)];

    let mut peer = Peer::start();
    for handle in &handles {
        assert_eq!(peer.ask(&format!("import {handle}")), "device 0");
    }
    assert_eq!(peer.ask(&format!("fill 0 1 {COUNT}")), "right");
    assert_eq!(peer.ask(&format!("fill 1 2 {SMALL}")), "right");
    assert_bytes(&read(large + 4096, 8 * COUNT), &words_of(1, COUNT), "the middle of an allocation");
    assert_bytes(&read(small, 8 * SMALL), &words_of(2, SMALL), "a small allocation of the same pool");
    for edge in [large, large + 4096 + 8 * COUNT as u64] {
        assert_bytes(&read(edge, 4096), &[0xEE; 4096], "around it");
    }
    write(large + 4096, &words_of(3, COUNT));
    assert_eq!(peer.ask(&format!("look 0 3 {COUNT}")), "right");
    assert_eq!(peer.ask("close"), "closed");

    let descriptors = |peer: &mut Peer| peer.ask("descriptors").parse::<usize>().expect("a number");
    let before = descriptors(&mut peer);
    let rounds = scaled(100, 40);
    for _ in 0..rounds {
        for handle in &handles {
            assert_eq!(peer.ask(&format!("import {handle}")), "device 0");
        }
        assert_eq!(peer.ask("close"), "closed");
    }
    // The driver may open a few descriptors by itself. A leak in each round would add as many as there are rounds.
    let after = descriptors(&mut peer);
    assert!(after < before + 20, "{before} descriptors, and {after} after {rounds} rounds");

    free(large);
    let again = allocate(8 * COUNT + 8192);
    let answer = peer.ask(&format!("import {}", handles[0]));
    assert!(answer.contains("has freed the memory"), "{answer}; freed at {large:#x}, and allocated again at {again:#x}");
    write(again, &words_of(4, COUNT));
    assert_eq!(peer.ask(&format!("import {}", export(&context, again, 8 * COUNT as u64))), "device 0");
    assert_eq!(peer.ask(&format!("look 0 4 {COUNT}")), "right");
    assert_eq!(peer.ask("close"), "closed");
    free(again);
    free(small);
    // SAFETY: created above, without remaining allocations.
    ok(unsafe { sys::cuMemPoolDestroy(pool) });
}

#[test]
fn memory_of_a_pool_is_refused_with_the_remedy() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let context = context(None, |_| {});
    let stream = context.create_stream(GPU0).expect("a stream");
    let (mut address, raw) = (0, std::ptr::with_exposed_provenance_mut(stream.0));
    // SAFETY: the output is valid for the call. A stream of this GPU. Freed below and not used.
    unsafe { ok(sys::cuMemAllocAsync(&mut address, 1 << 20, raw)) };
    let error = context.state().export_memory(address, 4096).expect_err("the default pool cannot be shared");
    assert!(matches!(&error, Error::Backend(BackendError::NotSupported(_))), "{error:?}");
    for part in ["CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR", "cudaMallocFromPoolAsync", "allocate with cudaMalloc or mpgpu"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    // SAFETY: as above.
    unsafe { ok(sys::cuMemFreeAsync(address, raw)) };
    context.synchronize_stream(stream).expect("no work that fails");
}
