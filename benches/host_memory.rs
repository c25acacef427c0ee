//! Compares host memory from `mp_alloc` (huge pages, spread over the sockets) with host memory from `cuMemHostAlloc`, in one run. Measures
//! the time of an allocation, and the rates at which GPUs read and write the memory: all GPUs at the same time, and one GPU over several
//! paths through the others. Needs a GPU. Prints a table and checks no limits.

use cudarc::driver::sys::{self, CUresult};
use mpgpu_backend::StreamHandle;
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions, PlanOptions, Transfer};
use mpgpu_core::topology::DeviceId;
use mpgpu_devices::cuda::device_count;
use std::time::Instant;

const BYTES: u64 = 1 << 30;
const ROUNDS: usize = 9;

/// Returns the median time in seconds of an execution, from its submission to its completion, after two executions for warm-up.
fn seconds(context: &Context, transfers: &[Transfer], options: &PlanOptions) -> f64 {
    let plan = context.plan(transfers, options).expect("a plan");
    let run = || {
        let start = Instant::now();
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
        start.elapsed().as_secs_f64()
    };
    let mut times: Vec<f64> = (0..ROUNDS + 2).map(|_| run()).skip(2).collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

fn reversed(transfers: &[Transfer]) -> Vec<Transfer> {
    let swap = |t: &Transfer| Transfer { dst: t.src, dst_device: t.src_device, src: t.dst, src_device: t.dst_device, bytes: t.bytes };
    transfers.iter().map(swap).collect()
}

fn main() {
    let count = match device_count() {
        Ok(count) => count,
        Err(error) => return println!("skipped: {error}"),
    };
    let options = ContextOptions { backend: Some(BackendChoice::Cuda), ..ContextOptions::default() };
    let context = Context::open(&options, Config::default()).expect("GPUs are there");
    let gpus: Vec<u64> = (0..count).map(|gpu| context.allocate(DeviceId::gpu(gpu), BYTES).expect("memory of a GPU")).collect();
    let start = Instant::now();
    let spread = context.allocate(DeviceId::HOST, BYTES).expect("host memory");
    let spread_took = start.elapsed().as_secs_f64();
    let mut pinned = std::ptr::null_mut();
    let start = Instant::now();
    let mut primary = std::ptr::null_mut();
    // SAFETY: the outputs are valid for the calls. Memory and context are released when the process ends.
    unsafe {
        assert_eq!(sys::cuDevicePrimaryCtxRetain(&mut primary, 0), CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuCtxSetCurrent(primary), CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuMemHostAlloc(&mut pinned, BYTES as usize, sys::CU_MEMHOSTALLOC_PORTABLE), CUresult::CUDA_SUCCESS);
    }
    let pinned_took = start.elapsed().as_secs_f64();

    println!("1 GiB of host memory, {count} GPUs, GB/s (10^9), median of {ROUNDS}");
    println!("{:<16} {:>9} {:>12} {:>12} {:>12} {:>12}", "memory", "alloc, s", "all read", "all write", "one reads", "one writes");
    for (name, memory, took) in [("mp_alloc", spread, spread_took), ("cuMemHostAlloc", pinned.expose_provenance() as u64, pinned_took)] {
        let part = BYTES / u64::from(count);
        let into = |gpu: u32, bytes: u64, from: u64| Transfer {
            dst: gpus[gpu as usize],
            dst_device: DeviceId::gpu(gpu),
            src: from,
            src_device: DeviceId::HOST,
            bytes,
        };
        let all: Vec<Transfer> = (0..count).map(|gpu| into(gpu, part, memory + u64::from(gpu) * part)).collect();
        let one = [into(0, BYTES, memory)];
        let direct = PlanOptions { max_paths: Some(1), ..PlanOptions::default() };
        let several = PlanOptions::default();
        let rate = |transfers: &[Transfer], options: &PlanOptions| {
            transfers.iter().map(|t| t.bytes).sum::<u64>() as f64 / seconds(&context, transfers, options) / 1e9
        };
        let rates = [rate(&all, &direct), rate(&reversed(&all), &direct), rate(&one, &several), rate(&reversed(&one), &several)];
        println!("{name:<16} {took:>9.3} {:>12.1} {:>12.1} {:>12.1} {:>12.1}", rates[0], rates[1], rates[2], rates[3]);
    }
}
