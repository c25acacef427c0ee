//! Measures the host backend: the bandwidth of one large copy, compared in the same run with `memcpy` on one thread, and the fixed cost of
//! an execution.
//!
//! `cargo bench -p mpgpu-benches --bench host_backend`

use criterion::{Criterion, Throughput};
use mpgpu_backend::{Backend, Completion, Endpoints, Execution, StreamHandle};
use mpgpu_core::plan::{Copy, Lane, LaneId, Mechanism, Op, Place, Program};
use mpgpu_core::topology::DeviceId;
use mpgpu_devices::host::HostBackend;
use smallvec::smallvec;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Program, addresses and size of one copy that the benchmark executes repeatedly.
struct OneCopy {
    program: Arc<Program>,
    endpoints: Arc<[Endpoints]>,
    rings: Arc<[u64]>,
    bytes: u64,
}

impl OneCopy {
    fn new(backend: &HostBackend, bytes: u64) -> Self {
        let allocate = |gpu, value| {
            let address = backend.allocate(DeviceId::gpu(gpu), bytes).expect("memory for the benchmark");
            // SAFETY: the memory was just allocated with this size. Writing touches every page, so that later copies do not include the
            // cost of page faults.
            unsafe { (address as *mut u8).write_bytes(value, bytes as usize) };
            address
        };
        let copies =
            smallvec![Copy { from: Place::Source { transfer: 0, offset: 0 }, to: Place::Destination { transfer: 0, offset: 0 }, bytes }];
        let op = Op { lane: LaneId(0), mechanism: Mechanism::Copy, copies, after: smallvec![] };
        let lanes = vec![Lane::new(DeviceId::gpu(0))];
        let program = Arc::new(Program { sources: Vec::new(), transfers: vec![bytes], lanes, rings: vec![], ops: vec![op] });
        OneCopy { program, endpoints: Arc::new([Endpoints { dst: allocate(1, 0), src: allocate(0, 1) }]), rings: Arc::new([]), bytes }
    }

    fn execute(&self, backend: &HostBackend) -> Completion {
        let stream = StreamHandle(0);
        let (program, endpoints, rings) = (&self.program, &self.endpoints, &self.rings);
        backend.submit(&Execution::new(program, endpoints, rings, stream)).expect("enqueued").expect("a completion")
    }

    /// Copies the data by one `memcpy` on the calling thread.
    fn memcpy(&self) {
        let Endpoints { dst, src } = black_box(self.endpoints[0]);
        // SAFETY: both allocations have this size, and no execution is in progress.
        unsafe { (dst as *mut u8).copy_from_nonoverlapping(src as *const u8, self.bytes as usize) };
    }
}

/// Prints the rates of a copy by the backend and by `memcpy`. They are measured alternately, so that other load of the machine affects both
/// equally.
fn ratio(backend: &HostBackend, copy: &OneCopy) {
    const ROUNDS: usize = 21;
    let timed = |work: &dyn Fn()| {
        let start = Instant::now();
        work();
        start.elapsed()
    };
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        times[0].push(timed(&|| copy.memcpy()));
        times[1].push(timed(&|| copy.execute(backend).wait().expect("copied")));
    }
    let [plain, executed] = times.map(|mut times| {
        times.sort_unstable();
        copy.bytes as f64 / times[ROUNDS / 2].as_secs_f64() / 1e9
    });
    println!(
        "256 MiB, medians of {ROUNDS}: one memcpy thread {plain:.2} GB/s, one execution {executed:.2} GB/s, ratio {:.2}",
        executed / plain
    );
}

fn main() {
    let backend = HostBackend::new(2, 1);
    let large = OneCopy::new(&backend, 256 << 20);
    let tiny = OneCopy::new(&backend, 8);
    ratio(&backend, &large);

    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group("256 MiB");
    group.sample_size(20).throughput(Throughput::Bytes(large.bytes));
    group.bench_function("one memcpy thread", |b| b.iter(|| large.memcpy()));
    group.bench_function("one execution", |b| b.iter(|| large.execute(&backend).wait().expect("copied")));
    group.finish();

    let mut group = criterion.benchmark_group("8 bytes");
    group.bench_function("execute and wait", |b| b.iter(|| tiny.execute(&backend).wait().expect("copied")));
    // Measures only the call, that is, the cost for the calling thread while the copies run in the background. Waits between batches of
    // calls are not counted.
    group.bench_function("execute", |b| {
        b.iter_custom(|iterations| {
            let mut spent = Duration::ZERO;
            let mut left = iterations;
            while left > 0 {
                let batch = left.min(1000);
                let start = Instant::now();
                for _ in 0..batch {
                    black_box(tiny.execute(&backend));
                }
                spent += start.elapsed();
                backend.synchronize_stream(StreamHandle(0)).expect("finished");
                left -= batch;
            }
            spent
        });
    });
    group.finish();
    criterion.final_summary();
}
