//! Tests plans whose copies start on several GPUs, with every executor and every kind of stream, and with streams of every GPU. Checks
//! every byte, and the order relative to earlier and later work.

use super::scale::{is_reduced, scaled};
use super::*;

/// Returns the (sender, receiver) pairs of GPUs for the named batch of transfers.
fn pairs(batch: &str, count: u32) -> Vec<(u32, u32)> {
    let all = 0..count;
    match batch {
        "both directions" => vec![(0, 1), (1, 0)],
        // If the other GPU runs the kernel, data that stays within one GPU passes through the other GPU.
        "both directions and inside" => vec![(0, 1), (1, 1), (1, 0), (0, 0)],
        "many both ways" => [(0, 1), (1, 0)].into_iter().cycle().take(70).collect(),
        "star" => (1..count).flat_map(|gpu| [(0, gpu), (gpu, 0), (gpu, 0)]).collect(),
        "ring" => all.map(|gpu| (gpu, (gpu + 1) % count)).collect(),
        "all to all" => all.clone().flat_map(|src| all.clone().filter(move |dst| *dst != src).map(move |dst| (src, dst))).collect(),
        other => panic!("no batch {other}"),
    }
}

fn transfers(context: &Context, pairs: &[(u32, u32)], bytes: u64) -> Vec<Transfer> {
    let memory = |gpu| context.allocate(DeviceId::gpu(gpu), bytes).expect("memory");
    let transfer = |&(src, dst): &(u32, u32)| Transfer {
        dst: memory(dst),
        dst_device: DeviceId::gpu(dst),
        src: memory(src),
        src_device: DeviceId::gpu(src),
        bytes,
    };
    pairs.iter().map(transfer).collect()
}

fn free(context: &Context, transfers: &[Transfer]) {
    for address in transfers.iter().flat_map(|transfer| [transfer.src, transfer.dst]) {
        context.free(address).expect("freed");
    }
}

fn one_path(config: &mut Config) {
    (config.max_paths, config.host_path) = (Some(1), Some(false));
}

#[test]
fn copies_that_leave_from_several_gpus_arrive_whole_on_every_engine_from_every_stream() {
    let Some(turn) = gpus(2) else { return };
    // All-to-all transfers of more GPUs use the same code and only take more time.
    let count = turn.count.min(if is_reduced() { 2 } else { 4 });
    set_device(0);
    let context = context(None, one_path);
    let streams: Vec<StreamHandle> = (0..count).map(|gpu| context.create_stream(DeviceId::gpu(gpu)).expect("a stream")).collect();
    let mut free_lanes = 0;
    let batches = ["both directions", "both directions and inside", "star", "ring", "all to all"];
    let sized = batches.into_iter().flat_map(|batch| [1, 4099, (1 << 20) + 13].map(|bytes| (batch, bytes)));
    for (batch, bytes) in sized.chain([("both directions", (17 << 20) + 5), ("many both ways", 4099), ("many both ways", 300_007)]) {
        let transfers = transfers(&context, &pairs(batch, count), bytes);
        let contents: Vec<_> = (0..transfers.len()).map(|i| Random(bytes + i as u64).bytes(bytes as usize)).collect();
        let poison = vec![0x77; bytes as usize];
        transfers.iter().zip(&contents).for_each(|(transfer, content)| write(transfer.src, content));
        for engine in [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel] {
            let plan = context.plan(&transfers, &PlanOptions { engine: Some(engine), ..PlanOptions::default() }).expect("a plan");
            let is_one_kernel = batch == "both directions and inside" && bytes < 5000 && [Engine::Auto, Engine::Graph].contains(&engine);
            assert!(!is_one_kernel || plan.planned().program.ops.len() == 1, "{}", plan.describe());
            free_lanes += plan.planned().program.lanes.iter().filter(|lane| !lane.also.is_empty()).count();
            // Streams of each GPU are tested, and on each GPU the legacy default stream by both of its handles and the per-thread default
            // stream.
            let defaults = (0..count).flat_map(|gpu| [0, 1, 2].map(|stream| (gpu, StreamHandle(stream))));
            for (current_gpu, stream) in streams.iter().map(|stream| (0, *stream)).chain(defaults) {
                set_device(current_gpu);
                let before = current();
                transfers.iter().for_each(|transfer| write(transfer.dst, &poison));
                plan.execute(stream).expect("enqueued").wait().expect("it runs");
                assert_eq!(current(), before, "the current context");
                for (transfer, content) in transfers.iter().zip(&contents) {
                    let (src, dst) = (transfer.src_device, transfer.dst_device);
                    let what = format!("{batch}, {engine:?}, {stream:?} of GPU {current_gpu}, {src}>{dst}\n{}", plan.describe());
                    assert_bytes(&read(transfer.dst, bytes as usize), content, &what);
                }
            }
        }
        set_device(0);
        free(&context, &transfers);
    }
    assert!(free_lanes > 0, "no plan left open who issues a copy");
}

/// Executes rounds without host waits. Each round writes both sources, executes the plan, and records the first and the last byte of both
/// destinations. `stream` belongs to the GPU `gpu`, which is current. A recorded byte of another round shows an error: a copy that started
/// before its source was written, a record before the copy, or a source that was overwritten while it was read.
fn order(context: &Context, engine: Engine, (gpu, stream): (u32, StreamHandle), rounds: u32, bytes: u64) {
    let transfers = transfers(context, &pairs("both directions", 2), bytes);
    let plan = context.plan(&transfers, &PlanOptions { engine: Some(engine), ..PlanOptions::default() }).expect("a plan");
    let notes = context.allocate(DeviceId::HOST, u64::from(rounds) * 4).expect("memory");
    // The GPU of the stream sets this memory, from which both sources are filled.
    let fill = context.allocate(DeviceId::gpu(gpu), bytes).expect("memory");
    let at = |transfer: &Transfer| [transfer.dst, transfer.dst + bytes - 1];
    // After this execution, each GPU has access to the memory of the other.
    plan.execute(stream).expect("enqueued").wait().expect("it runs");
    for round in 0..rounds {
        // SAFETY: memory of the context that outlives the work. The stream belongs to the current context.
        unsafe {
            ok(sys::cuMemsetD8Async(fill, round as u8, bytes as usize, raw(stream)));
            for transfer in &transfers {
                ok(sys::cuMemcpyAsync(transfer.src, fill, bytes as usize, raw(stream)));
            }
        }
        // Rounds with and without a completion alternate.
        if round % 2 == 0 {
            plan.enqueue(stream).expect("enqueued");
        } else {
            plan.execute(stream).expect("enqueued");
        }
        for (byte, address) in (u64::from(round) * 4..).zip(transfers.iter().flat_map(at)) {
            // SAFETY: as above.
            ok(unsafe { sys::cuMemcpyAsync(notes + byte, address, 1, raw(stream)) });
        }
    }
    context.synchronize_stream(stream).expect("all runs");
    let seen = read(notes, rounds as usize * 4);
    for (round, noted) in seen.chunks_exact(4).enumerate() {
        assert_eq!(noted, [round as u8; 4], "round {round}, {engine:?}, {stream:?} of GPU {gpu}\n{}", plan.describe());
    }
    free(context, &transfers);
    context.free(notes).expect("freed");
    context.free(fill).expect("freed");
}

#[test]
fn ten_thousand_rounds_of_both_directions_keep_the_streams_order() {
    let Some(_turn) = gpus(2) else { return };
    let context = context(None, one_path);
    for (gpu, engine) in [(0, Engine::Stream), (1, Engine::Graph), (1, Engine::Auto)] {
        set_device(gpu);
        let stream = context.create_stream(DeviceId::gpu(gpu)).expect("a stream");
        order(&context, engine, (gpu, stream), scaled(10_000, 300) as u32, 20_011);
    }
}

#[test]
fn default_streams_of_either_gpu_keep_their_order_on_every_engine() {
    let Some(_turn) = gpus(2) else { return };
    let context = context(None, one_path);
    for gpu in [0, 1] {
        set_device(gpu);
        for engine in [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel] {
            for stream in [0, 1, 2] {
                order(&context, engine, (gpu, StreamHandle(stream)), scaled(200, 20) as u32, 70_001);
            }
        }
    }
}

#[test]
fn memory_that_the_streams_gpu_does_not_reach_is_copied_by_the_gpu_that_owns_it() {
    let Some(_turn) = gpus(2) else { return };
    set_device(1);
    let context = context(None, one_path);
    let bytes = (1 << 20) + 9;
    let mut pooled = 0;
    // SAFETY: the output is valid for the call. The pool is that of the current device, GPU 1, and GPU 0 has no access to it.
    unsafe {
        ok(sys::cuMemAllocAsync(&mut pooled, bytes as usize, std::ptr::null_mut()));
        ok(sys::cuCtxSynchronize());
    }
    let [forth, there, back] = [GPU0, GPU1, GPU0].map(|device| context.allocate(device, bytes).expect("memory"));
    let alone = Transfer { dst: back, dst_device: GPU0, src: pooled, src_device: GPU1, bytes };
    let both = [alone, Transfer { dst: there, dst_device: GPU1, src: forth, src_device: GPU0, bytes }];
    let contents = [1, 2].map(|seed| Random(seed).bytes(bytes as usize));
    both.iter().zip(&contents).for_each(|(transfer, content)| write(transfer.src, content));
    // The first stream is on the GPU without access to the pool, and the second on the GPU that owns the pool.
    let streams = [GPU0, GPU1].map(|device| context.create_stream(device).expect("a stream"));
    for (transfers, engine) in
        [&both[..1], &both].into_iter().flat_map(|t| [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Kernel].map(|e| (t, e)))
    {
        let plan = context.plan(transfers, &PlanOptions { engine: Some(engine), ..PlanOptions::default() }).expect("a plan");
        for stream in streams {
            transfers.iter().for_each(|transfer| write(transfer.dst, &vec![0x99; bytes as usize]));
            plan.execute(stream).expect("enqueued").wait().expect("it runs");
            for (transfer, content) in transfers.iter().zip(&contents) {
                let what = format!("{engine:?}, {stream:?}, to {}\n{}", transfer.dst_device, plan.describe());
                assert_bytes(&read(transfer.dst, bytes as usize), content, &what);
            }
        }
    }
    // SAFETY: allocated above, and no longer used.
    ok(unsafe { sys::cuMemFree_v2(pooled) });
}
