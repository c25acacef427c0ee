//! Tests the CUDA backend on real GPUs: copied bytes, order, streams, capture and errors. A test that needs more GPUs than the machine has
//! is skipped with a message.
//!
//! Every check overwrites the destination, synchronises, copies, synchronises, and only then compares. Otherwise the overwriting could race
//! with the copy, and cause or hide errors.

mod attacks;
mod campaign;
mod captured;
mod child;
mod doctor;
mod driver;
mod freed;
mod graph;
mod lanes;
mod lifetime;
mod memory;
mod probe;
mod reset;
mod scale;
mod share;
#[path = "../rust/common/skip.rs"]
mod skip;
mod small;
mod staging;
mod timing;

use self::scale::scaled;
use self::skip::skip;
use cudarc::driver::sys::{self, CUresult};
use mpgpu_backend::{Backend, BackendError, Completion, Endpoints, Execution, MemoryKind, Report, StreamHandle};
use mpgpu_contexts::{Config, Context, ContextOptions, Error, PlanOptions, Transfer};
use mpgpu_core::plan::{self, Copy, Engine, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId};
use mpgpu_core::topology::{self, DeviceId, LinkKind, Machine, NodeKind, Topology};
use mpgpu_devices::cuda::{CudaBackend, device_count, discover};
use smallvec::smallvec;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const GPU0: DeviceId = DeviceId::gpu(0);
const GPU1: DeviceId = DeviceId::gpu(1);

/// Lock that gives one test exclusive use of the GPUs. It is needed because a captured stream makes calls of other threads fail, including
/// those of other tests.
struct Turn {
    count: u32,
    _turn: MutexGuard<'static, ()>,
}

/// Returns exclusive use of the GPUs. Returns `None` if the machine has fewer than `needed` GPUs; the test then counts as skipped.
fn gpus(needed: u32) -> Option<Turn> {
    static TURN: Mutex<()> = Mutex::new(());
    match device_count() {
        Ok(count) if count >= needed => {
            let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            // The test harness prints the name of a test when the test ends. If a test ends the process, only this line names the test.
            let thread = std::thread::current();
            drop(writeln!(std::io::stderr(), "gpu tests: {} begins", thread.name().unwrap_or("a thread without a name")));
            Some(Turn { count, _turn: turn })
        }
        Ok(count) => {
            skip(format!("needs {needed} GPUs, and {count} is in sight"));
            None
        }
        Err(error) => {
            skip(error);
            None
        }
    }
}

fn backend() -> CudaBackend {
    CudaBackend::new(1).expect("GPUs are there")
}

/// Creates a context on all GPUs, with the given topology, or with the discovered one if `topology` is `None`.
fn context(topology: Option<Topology>, set: impl FnOnce(&mut Config)) -> Context {
    let machine = Machine::new(topology.unwrap_or_else(|| discover::discover().expect("GPUs are there"))).expect("well formed");
    let mut config = Config { staging_bytes: 16 << 20, ..Config::default() };
    set(&mut config);
    Context::with_backend(Arc::new(machine), Arc::new(backend()), config).expect("a context")
}

#[track_caller]
fn ok(result: CUresult) {
    assert_eq!(result, CUresult::CUDA_SUCCESS);
}

/// Makes the primary context of a GPU current on this thread, as `cudaSetDevice` does.
fn set_device(gpu: u32) {
    let mut primary = std::ptr::null_mut();
    // SAFETY: the output is valid for the call. The context stays retained until the process ends, as by the CUDA runtime.
    unsafe {
        ok(sys::cuDevicePrimaryCtxRetain(&mut primary, gpu as i32));
        ok(sys::cuCtxSetCurrent(primary));
    }
}

fn current() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: the output is valid for the call.
    ok(unsafe { sys::cuCtxGetCurrent(&mut context) });
    context
}

fn raw(stream: StreamHandle) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(stream.0)
}

/// Random number generator (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(count + 8);
        while bytes.len() < count {
            bytes.extend(self.next().to_le_bytes());
        }
        bytes.truncate(count);
        bytes
    }
}

/// Writes bytes to memory of any kind, and waits until the copy has finished. The calling thread must have a current context.
fn write(address: u64, bytes: &[u8]) {
    // SAFETY: the memory has this size. A synchronous copy, followed by a wait for all remaining work.
    unsafe {
        ok(sys::cuMemcpy(address, bytes.as_ptr() as u64, bytes.len()));
        ok(sys::cuCtxSynchronize());
    }
}

fn read(address: u64, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    // SAFETY: as above.
    unsafe {
        ok(sys::cuMemcpy(bytes.as_mut_ptr() as u64, address, count));
        ok(sys::cuCtxSynchronize());
    }
    bytes
}

#[track_caller]
fn assert_bytes(found: &[u8], expected: &[u8], what: &str) {
    if found != expected {
        let at = found.iter().zip(expected).position(|(a, b)| a != b);
        panic!("{what}: {} bytes differ first at {at:?}", found.len());
    }
}

fn copy_op(lane: u32, from: Place, to: Place, bytes: u64, after: &[u32]) -> Op {
    Op {
        lane: LaneId(lane),
        mechanism: Mechanism::Copy,
        copies: smallvec![Copy { from, to, bytes }],
        after: after.iter().map(|op| OpId(*op)).collect(),
    }
}

fn source(offset: u64) -> Place {
    Place::Source { transfer: 0, offset }
}

fn destination(offset: u64) -> Place {
    Place::Destination { transfer: 0, offset }
}

/// Returns a program that copies the whole transfer in one piece.
fn direct(bytes: u64, device: DeviceId) -> Arc<Program> {
    Arc::new(Program {
        sources: Vec::new(),
        transfers: vec![bytes],
        lanes: vec![Lane::new(device)],
        rings: vec![],
        ops: vec![copy_op(0, source(0), destination(0), bytes, &[])],
    })
}

/// Returns a program that copies in chunks through a ring of staging slots on `via`. One lane (sequence of operations) fills the slots, and
/// the other empties them.
fn relay(bytes: u64, via: DeviceId, slots: u32, slot_bytes: u64, lanes: [DeviceId; 2]) -> Arc<Program> {
    let chunks = bytes.div_ceil(slot_bytes) as u32;
    let mut ops = Vec::new();
    for chunk in 0..chunks {
        let offset = u64::from(chunk) * slot_bytes;
        let size = slot_bytes.min(bytes - offset);
        let slot = Place::Slot { ring: RingId(0), slot: chunk % slots };
        let emptied: Vec<u32> = if chunk >= slots { vec![2 * (chunk - slots) + 1] } else { vec![] };
        ops.push(copy_op(0, source(offset), slot, size, &emptied));
        ops.push(copy_op(1, slot, destination(offset), size, &[2 * chunk]));
    }
    let program = Program {
        sources: Vec::new(),
        transfers: vec![bytes],
        lanes: lanes.map(Lane::new).to_vec(),
        rings: vec![Ring { device: via, slot_bytes, slots }],
        ops,
    };
    plan::validate(&program, 1 << 30).expect("a valid program");
    Arc::new(program)
}

fn run(
    backend: &CudaBackend,
    program: &Arc<Program>,
    ends: (u64, u64),
    rings: &[u64],
    stream: StreamHandle,
) -> Result<Completion, BackendError> {
    let (endpoints, rings): (Arc<[Endpoints]>, Arc<[u64]>) = (Arc::new([Endpoints { dst: ends.0, src: ends.1 }]), rings.into());
    let execution = Execution { engine: Engine::Stream, ..Execution::new(program, &endpoints, &rings, stream) };
    backend.submit(&execution).map(|end| end.expect("a completion"))
}

#[test]
fn direct_copies_move_every_byte_whatever_size_and_alignment() {
    let Some(turn) = gpus(1) else { return };
    let count = turn.count;
    set_device(0);
    let backend = backend();
    let other = DeviceId::gpu(count - 1);
    let most = (3 << 20) + 77;
    let mut random = Random(1);
    for (src_device, dst_device) in [(GPU0, other), (other, GPU0), (DeviceId::HOST, GPU0), (GPU0, DeviceId::HOST), (GPU0, GPU0)] {
        let src = backend.allocate(src_device, most + 64).expect("memory");
        let dst = backend.allocate(dst_device, most + 64).expect("memory");
        let lane = if src_device.is_host() { dst_device } else { src_device };
        let stream = backend.create_stream(lane).expect("a stream");
        for (bytes, dst_shift, src_shift) in [(1, 0, 0), (7, 3, 1), (255, 1, 8), (4096, 16, 16), (65_537, 5, 13), (most, 31, 2)] {
            let content = random.bytes(bytes as usize);
            write(src + src_shift, &content);
            write(dst, &vec![0xee; bytes as usize + 64]);
            let done = run(&backend, &direct(bytes, lane), (dst + dst_shift, src + src_shift), &[], stream).expect("a copy");
            done.wait().expect("the copy runs");
            assert!(done.is_done().expect("done"));
            let all = read(dst, bytes as usize + 64);
            let what = format!("{src_device}>{dst_device}, {bytes} bytes");
            let (before, after) = (dst_shift as usize, (dst_shift + bytes) as usize);
            assert_bytes(&all[before..after], &content, &what);
            assert!(all[..before].iter().chain(&all[after..]).all(|byte| *byte == 0xee), "{what}: bytes outside of the transfer");
        }
        backend.free(src).expect("freed");
        backend.free(dst).expect("freed");
        backend.destroy_stream(stream).expect("destroyed");
    }
}

#[test]
fn relays_reuse_their_slots_and_lose_no_byte() {
    let Some(turn) = gpus(2) else { return };
    let count = turn.count;
    set_device(0);
    let backend = backend();
    let bytes = (5 << 20) + 3;
    let (src, dst) = (backend.allocate(GPU0, bytes).expect("memory"), backend.allocate(GPU1, bytes).expect("memory"));
    let slot_bytes = 256 << 10;
    let mut random = Random(2);
    // The copy goes through host memory, then through the last GPU (a third GPU, or the destination if there are two), and then through the
    // GPU of the source.
    for via in [DeviceId::HOST, DeviceId::gpu(count - 1), GPU0] {
        let ring = backend.allocate(via, 3 * slot_bytes).expect("memory");
        for stream_device in [GPU0, GPU1] {
            let stream = backend.create_stream(stream_device).expect("a stream");
            let second = if via.is_host() { GPU1 } else { via };
            let program = relay(bytes, via, 3, slot_bytes, [GPU0, second]);
            for round in 0..10 {
                let content = random.bytes(bytes as usize);
                write(src, &content);
                write(dst, &vec![0x55; bytes as usize]);
                run(&backend, &program, (dst, src), &[ring], stream).expect("a relay").wait().expect("it runs");
                assert_bytes(&read(dst, bytes as usize), &content, &format!("via {via}, stream of {stream_device}, round {round}"));
            }
            backend.destroy_stream(stream).expect("destroyed");
        }
        backend.free(ring).expect("freed");
    }
}

/// Returns a topology with links between all pairs of GPUs and no switch. With this topology the planner uses relays on any machine.
fn mesh(count: u32) -> Topology {
    let mut mesh = topology::preset("beluga").expect("a preset");
    let gone = |node: topology::NodeId, t: &Topology| match t.nodes[node.0 as usize].kind {
        NodeKind::Gpu => node.0 >= count,
        _ => false,
    };
    let whole = mesh.clone();
    mesh.links.retain(|link| !gone(link.from, &whole) && !gone(link.to, &whole));
    mesh.shared.clear();
    mesh.nodes.retain({
        let mut index = 0;
        move |node| {
            index += 1;
            node.kind != NodeKind::Gpu || index <= count
        }
    });
    let removed = 4 - count;
    for link in &mut mesh.links {
        for end in [&mut link.from, &mut link.to] {
            if end.0 >= 4 {
                end.0 -= removed;
            }
        }
    }
    // With this bandwidth relays are faster already at small sizes, so even small transfers use them.
    mesh.links.iter_mut().filter(|link| link.kind == LinkKind::Nvlink).for_each(|link| link.bandwidth = 10e9);
    mesh
}

/// Returns a topology that makes the planner use relays on all GPUs. Returns `None` with fewer than two or more than four GPUs; the
/// discovered topology is then used.
fn forced() -> Option<Topology> {
    let count = device_count().ok()?;
    (2..=4).contains(&count).then(|| mesh(count))
}

#[test]
fn planned_transfers_over_several_paths_arrive_whole() {
    let Some(turn) = gpus(2) else { return };
    let count = turn.count;
    set_device(0);
    let context = context(forced(), |config| config.host_path = Some(true));
    let mut several = 0;
    for (round, bytes) in [(1 << 20) + 1, (24 << 20) + 5, scaled(64 << 20, 16 << 20), 7].into_iter().enumerate() {
        let (a, b) = (context.allocate(GPU0, bytes).expect("memory"), context.allocate(GPU1, bytes).expect("memory"));
        let last = DeviceId::gpu(count - 1);
        let (c, d) = (context.allocate(GPU1, bytes).expect("memory"), context.allocate(last, bytes).expect("memory"));
        let host = context.allocate(DeviceId::HOST, bytes).expect("memory");
        let e = context.allocate(GPU0, bytes).expect("memory");
        let transfers = [(b, GPU1, a, GPU0), (d, last, c, GPU1), (e, GPU0, host, DeviceId::HOST)]
            .map(|(dst, dst_device, src, src_device)| Transfer { dst, dst_device, src, src_device, bytes });
        let plan = context.plan(&transfers, &PlanOptions::default()).expect("a plan");
        several += usize::from(plan.paths() > transfers.len());
        let contents: Vec<_> = (0..3).map(|i| Random(10 * round as u64 + i).bytes(bytes as usize)).collect();
        for (transfer, content) in transfers.iter().zip(&contents) {
            write(transfer.src, content);
            write(transfer.dst, &vec![0xaa; bytes as usize]);
        }
        let stream = context.create_stream(GPU1).expect("a stream");
        plan.execute(stream).expect("enqueued").wait().expect("it runs");
        for (transfer, content) in transfers.iter().zip(&contents) {
            assert_bytes(
                &read(transfer.dst, bytes as usize),
                content,
                &format!("{bytes} bytes to {}\n{}", transfer.dst_device, plan.describe()),
            );
        }
        context.destroy_stream(stream).expect("destroyed");
        for address in [a, b, c, d, e, host] {
            context.free(address).expect("freed");
        }
    }
    assert!(several > 0 || forced().is_none(), "no plan took several paths");
}

#[test]
fn every_mechanism_moves_the_same_bytes() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let sizes: Vec<u64> = [240_000; 6].into_iter().chain([2400; 12]).chain([24; 8]).chain([1, 3, 5, 16_385]).collect();
    let total: u64 = sizes.iter().map(|size| size + 13).sum();
    let (src, dst) = (backend.allocate(GPU0, total).expect("memory"), backend.allocate(GPU1, total).expect("memory"));
    let content = Random(3).bytes(total as usize);
    write(src, &content);
    assert!(backend.has_copy_kernel(0).expect("an answer"), "the kernel was not loaded: plain copies would stand in for it");
    for mechanism in [Mechanism::Kernel, Mechanism::Batch] {
        for device in [GPU0, GPU1] {
            let stream = backend.create_stream(device).expect("a stream");
            let (mut endpoints, mut expected, mut at) = (Vec::new(), vec![0x11; total as usize], 0_u64);
            for &size in &sizes {
                endpoints.push(Endpoints { dst: dst + at + 5, src: src + at });
                expected[at as usize + 5..(at + 5 + size) as usize].copy_from_slice(&content[at as usize..(at + size) as usize]);
                at += size + 13;
            }
            let copies = (0_u32..)
                .zip(&sizes)
                .map(|(transfer, &bytes)| Copy {
                    from: Place::Source { transfer, offset: 0 },
                    to: Place::Destination { transfer, offset: 0 },
                    bytes,
                })
                .collect();
            let op = Op { lane: LaneId(0), mechanism, copies, after: smallvec![] };
            let program = Arc::new(Program {
                sources: Vec::new(),
                transfers: sizes.clone(),
                lanes: vec![Lane::new(GPU0)],
                rings: vec![],
                ops: vec![op],
            });
            plan::validate(&program, 0).expect("a valid program");
            write(dst, &vec![0x11; total as usize]);
            let (endpoints, rings): (Arc<[Endpoints]>, Arc<[u64]>) = (endpoints.into(), Arc::new([]));
            let plain = Execution::new(&program, &endpoints, &rings, stream);
            let execution = Execution { verify: true, engine: Engine::Stream, ..plain };
            backend
                .submit(&execution)
                .expect("enqueued")
                .expect("a completion")
                .wait()
                .expect("it runs, and the comparison finds no difference");
            assert_bytes(&read(dst, total as usize), &expected, &format!("{mechanism:?}, stream of {device}"));
            backend.destroy_stream(stream).expect("destroyed");
        }
    }
}

#[test]
fn comparing_bytes_finds_the_first_that_is_wrong() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let backend = backend();
    let bytes = (9 << 20) + 1;
    for (src_device, dst_device) in [(GPU0, GPU0), (DeviceId::HOST, GPU0), (GPU0, DeviceId::HOST)] {
        let (src, dst) = (backend.allocate(src_device, bytes).expect("memory"), backend.allocate(dst_device, bytes).expect("memory"));
        write(src, &vec![1; bytes as usize]);
        let stream = backend.create_stream(GPU0).expect("a stream");
        for (copied, expected) in [(bytes - 1, Some(bytes - 1)), (5 << 20, Some(5 << 20)), (bytes, None)] {
            write(dst, &vec![0; bytes as usize]);
            // This program declares all bytes of the transfer and copies only some of them.
            let program = Arc::new(Program { transfers: vec![bytes], ..(*direct(copied, GPU0)).clone() });
            let (endpoints, rings): (Arc<[Endpoints]>, Arc<[u64]>) = (Arc::new([Endpoints { dst, src }]), Arc::new([]));
            let plain = Execution::new(&program, &endpoints, &rings, stream);
            let execution = Execution { verify: true, engine: Engine::Stream, ..plain };
            let found = match backend.submit(&execution).expect("enqueued").expect("a completion").wait() {
                Ok(()) => None,
                Err(BackendError::DataCorruption { transfer: 0, offset }) => Some(offset),
                Err(other) => panic!("{other}"),
            };
            assert_eq!(found, expected, "{src_device}>{dst_device}");
        }
    }
}

#[test]
fn ordinary_host_memory_is_copied_by_threads_over_several_paths_or_by_the_driver_in_one_piece() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let bytes = (33 << 20) + 9;
    let content = Random(4).bytes(bytes as usize);
    for threads in [0, 8] {
        let context = context(forced(), |config| (config.host_path, config.host_threads) = (Some(true), threads));
        let mut back = vec![0_u8; bytes as usize];
        let gpu = context.allocate(GPU1, bytes).expect("memory");
        write(gpu, &vec![0x33; bytes as usize]);
        let stream = context.create_stream(GPU1).expect("a stream");
        let there = Transfer { dst: gpu, dst_device: GPU1, src: content.as_ptr() as u64, src_device: DeviceId::HOST, bytes };
        let here = Transfer { dst: back.as_mut_ptr() as u64, dst_device: DeviceId::HOST, src: gpu, src_device: GPU1, bytes };
        for transfer in [there, here] {
            let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
            assert_eq!(plan.paths() > 1, threads > 0, "{}", plan.describe());
            assert!(plan.describe().contains("pageable"), "{}", plan.describe());
            plan.execute(stream).expect("enqueued").wait().expect("it runs");
        }
        assert_bytes(&back, &content, &format!("there and back, {threads} threads"));
    }
}

/// Fills the source, copies it, and copies the result, in each round. All rounds are in one stream without host waits in between.
fn producer_and_consumer(context: &Context, stream: StreamHandle, rounds: u32, bytes: u64) {
    let [src, dst, out] = [GPU0, GPU1, GPU1].map(|device| context.allocate(device, bytes).expect("memory"));
    let host = context.allocate(DeviceId::HOST, u64::from(rounds) * 2).expect("memory");
    let transfer = Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes };
    let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
    for round in 0..rounds {
        let probe = host + u64::from(round) * 2;
        // SAFETY: memory of the context that outlives the work. The stream belongs to the current context.
        unsafe {
            ok(sys::cuMemsetD8Async(src, round as u8, bytes as usize, raw(stream)));
            plan.execute(stream).expect("enqueued");
            ok(sys::cuMemcpyAsync(out, dst, bytes as usize, raw(stream)));
            ok(sys::cuMemcpyAsync(probe, out, 1, raw(stream)));
            ok(sys::cuMemcpyAsync(probe + 1, out + bytes - 1, 1, raw(stream)));
        }
    }
    context.synchronize_stream(stream).expect("all runs");
    let seen = read(host, rounds as usize * 2);
    for round in 0..rounds as usize {
        assert_eq!(seen[2 * round..2 * round + 2], [round as u8; 2], "round {round} of stream {stream:?}\n{}", plan.describe());
    }
    for address in [src, dst, out, host] {
        context.free(address).expect("freed");
    }
}

#[test]
fn work_before_and_after_in_the_stream_is_ordered_without_the_host() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = context(forced(), |config| config.host_path = Some(true));
    let stream = context.create_stream(GPU0).expect("a stream");
    producer_and_consumer(&context, stream, scaled(10_000, 300) as u32, 64 << 10);
    // The size requires several chunks on each path.
    producer_and_consumer(&context, stream, scaled(2000, 60) as u32, (3 << 20) + 1);
}

#[test]
fn default_streams_order_as_any_other() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = context(forced(), |config| config.host_path = Some(true));
    for stream in [0, 1, 2] {
        producer_and_consumer(&context, StreamHandle(stream), scaled(200, 20) as u32, (3 << 20) + 1);
    }
}

#[test]
fn the_current_context_is_left_as_it_was_also_after_errors() {
    let Some(_turn) = gpus(2) else { return };
    std::thread::spawn(|| {
        assert!(current().is_null());
        let context = context(None, |_| ());
        let [src, dst] = [GPU0, GPU1].map(|device| context.allocate(device, 4096).expect("memory"));
        let plan = context
            .plan(&[Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes: 4096 }], &PlanOptions::default())
            .expect("a plan");
        let stream = context.create_stream(GPU1).expect("a stream");
        plan.execute(stream).expect("enqueued").wait().expect("it runs");
        plan.execute(StreamHandle(0)).expect("the default stream of a thread without a context").wait().expect("it runs");
        assert!(matches!(context.allocate(GPU0, 1 << 50), Err(Error::Backend(BackendError::OutOfMemory { .. }))));
        assert!(current().is_null(), "a context was left behind");
        for gpu in [1, 0] {
            set_device(gpu);
            let mine = current();
            plan.execute(stream).expect("enqueued").wait().expect("it runs");
            assert!(matches!(context.allocate(DeviceId::gpu(1 - gpu), 1 << 50), Err(Error::Backend(BackendError::OutOfMemory { .. }))));
            assert_eq!(current(), mine);
        }
        plan.execute(stream).expect("the context is usable after errors").wait().expect("it runs");
    })
    .join()
    .expect("no assertion failed");
}

#[test]
fn an_execution_is_captured_into_a_graph() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let bytes = (1 << 20) + 1;
    let context = context(None, |config| (config.max_paths, config.host_path) = (Some(1), Some(false)));
    let [a, b, c, d] = [GPU0, GPU1, GPU1, GPU0].map(|device| context.allocate(device, bytes).expect("memory"));
    // The transfers have two directions, so the program has two lanes (streams) on two GPUs.
    let transfers = [
        Transfer { dst: b, dst_device: GPU1, src: a, src_device: GPU0, bytes },
        Transfer { dst: d, dst_device: GPU0, src: c, src_device: GPU1, bytes },
    ];
    let plan = context.plan(&transfers, &PlanOptions { engine: Some(Engine::Stream), ..PlanOptions::default() }).expect("a plan");
    let stream = context.create_stream(GPU0).expect("a stream");
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: outputs are valid for the calls. The stream belongs to the current context.
    unsafe {
        ok(sys::cuStreamBeginCapture_v2(raw(stream), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
        let captured = plan.execute(stream).expect("captured");
        assert!(matches!(captured.wait(), Err(BackendError::NotSupported(_))), "a captured execution has not run");
        ok(sys::cuStreamEndCapture(raw(stream), &mut graph));
        ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
    }
    for round in 0..3 {
        let contents = [Random(round).bytes(bytes as usize), Random(100 + round).bytes(bytes as usize)];
        for (transfer, content) in transfers.iter().zip(&contents) {
            write(transfer.src, content);
            write(transfer.dst, &vec![0; bytes as usize]);
        }
        // SAFETY: instantiated above.
        ok(unsafe { sys::cuGraphLaunch(exec, raw(stream)) });
        context.synchronize_stream(stream).expect("it runs");
        for (transfer, content) in transfers.iter().zip(&contents) {
            assert_bytes(&read(transfer.dst, bytes as usize), content, "launched graph");
        }
    }
    // Outside the capture, the same plan runs as usual, in the internal streams that were captured.
    plan.execute(stream).expect("enqueued").wait().expect("it runs");
    // SAFETY: created above.
    unsafe {
        ok(sys::cuGraphExecDestroy(exec));
        ok(sys::cuGraphDestroy(graph));
    }
}

#[test]
fn sixteen_threads_with_random_plans_on_all_executors_in_one_context_corrupt_nothing() {
    let Some(turn) = gpus(2) else { return };
    let count = turn.count;
    set_device(0);
    const THREADS: u64 = 16;
    let rounds = scaled(15, 3);
    // The staging memory is small, so that the plans share it.
    let context = Arc::new(context(forced(), |config| (config.staging_bytes, config.host_path) = (4 << 20, Some(true))));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let context = context.clone();
            std::thread::spawn(move || {
                set_device((thread % u64::from(count)) as u32);
                let mut random = Random(1000 + thread);
                for round in 0..rounds {
                    let stream = context.create_stream(DeviceId::gpu(random.below(u64::from(count)) as u32)).expect("a stream");
                    let transfers: Vec<Transfer> = (0..1 + random.below(4))
                        .map(|_| {
                            let mut device = || DeviceId(random.below(u64::from(count) + 1) as i32 - 1);
                            let (src_device, dst_device) = (device(), device());
                            let most = [64, 4096, 1 << 20, scaled(12 << 20, 5 << 20)][random.below(4) as usize];
                            let bytes = 1 + random.below(most);
                            let memory = |device| context.allocate(device, bytes).expect("memory");
                            Transfer { dst: memory(dst_device), dst_device, src: memory(src_device), src_device, bytes }
                        })
                        .collect();
                    let engine = [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel][random.below(5) as usize];
                    let plan = context.plan(&transfers, &PlanOptions { engine: Some(engine), ..PlanOptions::default() }).expect("a plan");
                    let contents: Vec<_> = transfers.iter().map(|t| random.bytes(t.bytes as usize)).collect();
                    for (transfer, content) in transfers.iter().zip(&contents) {
                        write(transfer.src, content);
                        write(transfer.dst, &vec![0x77; content.len()]);
                    }
                    plan.execute(stream).expect("enqueued");
                    plan.execute(stream).expect("enqueued").wait().expect("it runs");
                    for (transfer, content) in transfers.iter().zip(&contents) {
                        let what = format!("thread {thread}, round {round}, {engine:?}\n{}", plan.describe());
                        assert_bytes(&read(transfer.dst, content.len()), content, &what);
                    }
                    for transfer in &transfers {
                        context.free(transfer.src).expect("freed");
                        context.free(transfer.dst).expect("freed");
                    }
                    context.destroy_stream(stream).expect("destroyed");
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no assertion failed");
    }
    assert_eq!(context.statistics().executions, THREADS * rounds * 2);
}

#[test]
fn memory_of_others_is_located_and_managed_memory_is_refused() {
    let Some(_turn) = gpus(2) else { return };
    set_device(1);
    let backend = backend();
    let (mut plain, mut managed, mut pooled) = (0, 0, 0);
    let mut host = std::ptr::null_mut();
    let mut registered = vec![0_u8; 1 << 20];
    // SAFETY: outputs are valid for the calls. The vector exists until it is unregistered.
    unsafe {
        ok(sys::cuMemAlloc_v2(&mut plain, 1000));
        ok(sys::cuMemAllocManaged(&mut managed, 1000, 1));
        ok(sys::cuMemAllocAsync(&mut pooled, 1000, std::ptr::null_mut()));
        ok(sys::cuMemHostAlloc(&mut host, 1000, 0));
        ok(sys::cuMemHostRegister_v2(registered.as_mut_ptr().cast(), registered.len(), 0));
        ok(sys::cuCtxSynchronize());
    }
    for (address, bytes) in [(plain, 1000), (pooled, 1000)] {
        let found = backend.locate(address + 999).expect("an answer").expect("known");
        assert_eq!((found.device, found.kind, found.base), (GPU1, MemoryKind::Device, address));
        assert!(found.bytes >= bytes, "{found:?}");
    }
    for address in [host as u64, registered.as_ptr() as u64 + 5] {
        let found = backend.locate(address).expect("an answer").expect("known");
        assert_eq!((found.device, found.kind), (DeviceId::HOST, MemoryKind::Pinned));
    }
    assert!(matches!(backend.locate(managed), Err(BackendError::NotSupported(why)) if why.contains("managed")));
    let ordinary = 7_u64;
    assert_eq!(backend.locate(&raw const ordinary as u64).expect("an answer"), None);
    // If an address is freed and used again, the memory is another allocation.
    let first = backend.locate(plain).expect("an answer").expect("known").id;
    // SAFETY: allocated above, and no longer used.
    unsafe {
        ok(sys::cuMemFree_v2(plain));
        ok(sys::cuMemAlloc_v2(&mut plain, 1000));
    }
    assert_ne!(backend.locate(plain).expect("an answer").expect("known").id, first);
    // Memory of a pool is the source of a copy to another GPU. Everything that the driver permits must work here.
    let target = backend.allocate(GPU0, 1000).expect("memory");
    write(pooled, &[9; 1000]);
    write(target, &[0; 1000]);
    let stream = backend.create_stream(GPU1).expect("a stream");
    run(&backend, &direct(1000, GPU1), (target, pooled), &[], stream).expect("enqueued").wait().expect("it runs");
    assert_eq!(read(target, 1000), [9; 1000]);
    // SAFETY: allocated above, and no longer used.
    unsafe {
        ok(sys::cuMemHostUnregister(registered.as_mut_ptr().cast()));
        ok(sys::cuMemFreeHost(host));
        ok(sys::cuMemFree_v2(managed));
        ok(sys::cuMemFree_v2(plain));
        ok(sys::cuMemFree_v2(pooled));
    }
}

#[test]
fn a_plan_whose_memory_was_freed_is_refused_and_the_context_stays_usable() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = context(None, |_| ());
    let [src, dst, spare] = [GPU0, GPU1, GPU1].map(|device| context.allocate(device, 4096).expect("memory"));
    let transfer = |dst| Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes: 4096 };
    let plan = context.plan(&[transfer(dst)], &PlanOptions::default()).expect("a plan");
    let stream = context.create_stream(GPU0).expect("a stream");
    plan.execute(stream).expect("enqueued").wait().expect("it runs");
    context.free(dst).expect("freed");
    assert!(matches!(plan.execute(stream), Err(Error::MemoryFreed { transfer: 0, address, .. }) if address == dst));
    assert!(matches!(context.free(dst), Err(Error::NotAllocated(address)) if address == dst));
    let plan = context.plan(&[transfer(spare)], &PlanOptions::default()).expect("a plan");
    plan.execute(stream).expect("enqueued").wait().expect("it runs");
    assert_eq!((context.statistics().executions, context.statistics().bytes), (2, 2 * 4096));
    assert_eq!(context.device_statistics(GPU1).expect("known").allocated_bytes, 4096);
    assert_eq!(context.device_statistics(GPU0).expect("known").streams, 1);
}

#[test]
fn memory_freed_in_stream_order_serves_earlier_work_and_nobody_waits_for_it() {
    const BYTES: u64 = 8 << 20;
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let context = context(None, |_| ());
    let [src, dst] = [GPU0, GPU0].map(|device| context.allocate(device, BYTES).expect("memory"));
    let pattern: Vec<u8> = (0..BYTES).map(|i| (i % 251) as u8).collect();
    write(src, &pattern);
    let transfer = Transfer { dst, dst_device: GPU0, src, src_device: GPU0, bytes: BYTES };
    let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
    let stream = context.create_stream(GPU0).expect("a stream");
    let opened = Arc::new(AtomicBool::new(false));
    let gate = opened.clone();
    let hold = move || {
        while !gate.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    };
    context.launch_host(stream, Box::new(hold)).expect("enqueued");
    plan.enqueue(stream).expect("enqueued");
    context.free_async(src, stream).expect("freed"); // would never return if the call waited
    assert!(matches!(plan.execute(stream), Err(Error::MemoryFreed { address, .. }) if address == src));
    let other = context.allocate(GPU0, BYTES).expect("memory");
    assert_ne!(other, src, "memory that is still to be read was given out again");
    opened.store(true, Ordering::Release);
    context.synchronize_stream(stream).expect("it runs");
    assert_bytes(&read(dst, BYTES as usize), &pattern, "what was freed behind it");
    // A later free returns unused memory to the driver.
    context.free(other).expect("freed");
    assert!(context.backend().locate(src).expect("an answer").is_none());
    assert_eq!(context.device_statistics(GPU0).expect("known").allocated_bytes, BYTES);
}

#[test]
fn a_destroyed_stream_is_refused_and_its_work_still_finishes() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let bytes = 64 << 20;
    let [src, dst] = [GPU0, GPU1].map(|device| backend.allocate(device, bytes).expect("memory"));
    let content = Random(5).bytes(bytes as usize);
    write(src, &content);
    write(dst, &vec![0; bytes as usize]);
    let (stream, event) = (backend.create_stream(GPU0).expect("a stream"), backend.create_event().expect("an event"));
    let done = run(&backend, &direct(bytes, GPU0), (dst, src), &[], stream).expect("enqueued");
    backend.destroy_stream(stream).expect("destroyed");
    let refused = |result: Result<(), BackendError>| {
        assert!(matches!(&result, Err(BackendError::InvalidHandle(handle, "stream")) if *handle == stream.0), "{result:?}");
    };
    refused(run(&backend, &direct(8, GPU0), (dst, src), &[], stream).map(drop));
    refused(backend.destroy_stream(stream));
    refused(backend.synchronize_stream(stream));
    refused(backend.record_event(event, stream));
    refused(backend.stream_wait_event(stream, event));
    refused(backend.launch_host(stream, Box::new(|| panic!("must not run"))));
    done.wait().expect("the copy runs");
    assert_bytes(&read(dst, bytes as usize), &content, "after its stream was destroyed");
    let again = backend.create_stream(GPU0).expect("a stream");
    run(&backend, &direct(8, GPU0), (dst, src), &[], again).expect("usable").wait().expect("it runs");
    assert_eq!((backend.stream_count(GPU0), backend.stream_count(GPU1)), (1, 0));
}

#[test]
fn a_gpu_that_no_plan_uses_gets_no_context() {
    let Some(turn) = gpus(2) else { return };
    let count = turn.count;
    let backend = backend();
    assert_eq!(backend.devices_in_use(), 0);
    let a = backend.allocate(DeviceId::gpu(count - 1), 64).expect("memory");
    assert!(backend.locate(a).expect("an answer").is_some());
    assert_eq!(backend.devices_in_use(), 1);
}

#[test]
fn host_functions_and_events_order_and_a_panic_in_one_goes_nowhere() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let (one, two) = (backend.create_stream(GPU0).expect("a stream"), backend.create_stream(GPU1).expect("a stream"));
    let event = backend.create_event().expect("an event");
    backend.synchronize_event(event).expect("an event that was never recorded is done");
    backend.stream_wait_event(two, event).expect("likewise");
    let (open, order) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let (gate, first, second) = (open.clone(), order.clone(), order.clone());
    backend.launch_host(one, Box::new(|| panic!("a panic that a test wants"))).expect("enqueued");
    backend
        .launch_host(
            one,
            Box::new(move || {
                while !gate.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                first.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).expect("the first");
            }),
        )
        .expect("enqueued");
    backend.record_event(event, one).expect("recorded");
    backend.stream_wait_event(two, event).expect("enqueued");
    backend.launch_host(two, Box::new(move || second.store(second.load(Ordering::Acquire) + 1, Ordering::Release))).expect("enqueued");
    assert_eq!(order.load(Ordering::Acquire), 0);
    open.store(true, Ordering::Release);
    backend.synchronize_stream(two).expect("all runs");
    assert_eq!(order.load(Ordering::Acquire), 2);
    backend.record_event(event, two).expect("an event moves from one GPU to another");
    backend.synchronize_event(event).expect("done");
    backend.destroy_event(event).expect("destroyed");
    assert!(matches!(backend.record_event(event, one), Err(BackendError::InvalidHandle(..))));
}

#[test]
fn a_topology_of_another_number_of_gpus_is_refused() {
    let Some(turn) = gpus(1) else { return };
    let count = turn.count;
    let other = if count == 8 { "beluga" } else { "hgx-h200" };
    let error = Context::open(&ContextOptions { topology: Some(other.into()), ..ContextOptions::default() }, Config::default())
        .expect_err("the counts differ")
        .to_string();
    assert!(error.contains("GPUs") && error.contains(&format!("but {count} are visible")), "{error}");
    let opened = Context::open(&ContextOptions::default(), Config::default()).expect("GPUs are there");
    assert_eq!((opened.backend().name(), opened.machine().gpu_count()), ("cuda", count));
    let _ = writeln!(std::io::stderr(), "{}", opened.describe());
}
