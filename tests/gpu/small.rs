//! Tests small copies to and from pinned host memory, which kernels make: every byte, with any alignment, from streams of every GPU, in
//! captures, and in memory at other addresses.

use super::*;

/// Sizes in bytes that are copied by single bytes, by words, by whole tiles and by several tiles.
const SIZES: [u64; 9] = [1, 3, 15, 16, 33, 2400, 4096, 16_385, 40_000];
/// Number of copies, which is enough for three launches of the kernel.
const PIECES: u64 = 300;
/// Number of bytes around each copy that must not change. It is larger than any alignment.
const MARGIN: u64 = 64;

/// Pinned host memory.
struct Pinned {
    base: u64,
    free: Box<dyn FnOnce()>,
}

fn pinned(kind: &str, context: &Arc<Context>, bytes: u64) -> Pinned {
    match kind {
        "the library's" => {
            let (base, context) = (context.allocate(DeviceId::HOST, bytes).expect("memory"), context.clone());
            Pinned { base, free: Box::new(move || context.free(base).expect("freed")) }
        }
        "another library's" => {
            let mut pointer = std::ptr::null_mut();
            // SAFETY: the output is valid for the call. Freed once. Without a flag the driver maps it for every GPU.
            ok(unsafe { sys::cuMemHostAlloc(&mut pointer, bytes as usize, 0) });
            // SAFETY: as above.
            Pinned { base: pointer.expose_provenance() as u64, free: Box::new(move || ok(unsafe { sys::cuMemFreeHost(pointer) })) }
        }
        _ => {
            let memory = vec![0_u8; bytes as usize].leak().as_mut_ptr();
            // SAFETY: the vector is kept, and unregistered once.
            ok(unsafe { sys::cuMemHostRegister_v2(memory.cast(), bytes as usize, 0) });
            // SAFETY: as above.
            let free = move || ok(unsafe { sys::cuMemHostUnregister(memory.cast()) });
            Pinned { base: memory.expose_provenance() as u64, free: Box::new(free) }
        }
    }
}

/// Copies between two blocks of memory, with the expected contents of the destination block.
struct Batch {
    transfers: Vec<Transfer>,
    expected: Vec<u8>,
}

/// Returns copies from host memory to the GPU if `into` is true, and otherwise in the opposite direction. Source and destination of each
/// copy have different alignments.
fn batch(host: u64, device: u64, gpu: DeviceId, into: bool, content: &[u8]) -> Batch {
    let mut expected = vec![0x5a; content.len()];
    let mut at = 0;
    let piece = |number: u64| {
        let bytes = SIZES[(number % SIZES.len() as u64) as usize];
        let (out, to) = (at + MARGIN / 2 + number % 32, at + MARGIN / 2 + number / 3 % 32);
        at += bytes + 2 * MARGIN;
        expected[to as usize..(to + bytes) as usize].copy_from_slice(&content[out as usize..(out + bytes) as usize]);
        if into {
            Transfer { dst: device + to, dst_device: gpu, src: host + out, src_device: DeviceId::HOST, bytes }
        } else {
            Transfer { dst: host + to, dst_device: DeviceId::HOST, src: device + out, src_device: gpu, bytes }
        }
    };
    Batch { transfers: (0..PIECES).map(piece).collect(), expected }
}

fn room() -> u64 {
    (0..PIECES).map(|number| SIZES[(number % SIZES.len() as u64) as usize] + 2 * MARGIN).sum::<u64>() + MARGIN
}

fn is_by_kernel(plan: &mpgpu_contexts::Plan) -> bool {
    plan.planned().program.ops.iter().all(|op| op.mechanism == Mechanism::Kernel)
}

#[test]
fn pieces_of_every_alignment_in_any_pinned_memory_arrive_whole_from_streams_of_every_gpu() {
    let Some(turn) = gpus(1) else { return };
    set_device(0);
    for verify in [false, true] {
        let context = Arc::new(context(None, |config| {
            if verify {
                config.verify = mpgpu_contexts::Verify::Bytes;
            }
        }));
        let streams: Vec<StreamHandle> =
            (0..turn.count.min(2)).map(|gpu| context.create_stream(DeviceId::gpu(gpu)).expect("a stream")).collect();
        let bytes = room();
        let mut random = Random(7);
        for kind in ["the library's", "another library's", "registered"] {
            let host = pinned(kind, &context, bytes);
            for gpu in (0..turn.count.min(2)).map(DeviceId::gpu) {
                let device = context.allocate(gpu, bytes).expect("memory");
                for into in [true, false] {
                    let (from, to) = if into { (host.base, device) } else { (device, host.base) };
                    let content = random.bytes(bytes as usize);
                    let Batch { transfers, expected } = batch(host.base, device, gpu, into, &content);
                    for engine in [Engine::Auto, Engine::Kernel, Engine::Graph, Engine::Stream] {
                        let options = PlanOptions { engine: Some(engine), ..PlanOptions::default() };
                        let plan = context.plan(&transfers, &options).expect("a plan");
                        assert!(is_by_kernel(&plan) || engine == Engine::Stream, "{}", plan.describe());
                        for stream in streams.iter().copied().chain([StreamHandle(0)]) {
                            write(from, &content);
                            write(to, &vec![0x5a; bytes as usize]);
                            plan.execute(stream).expect("enqueued").wait().expect("it runs");
                            let what = format!("{kind} memory, {gpu}, into {into}, {engine:?}, {stream:?}");
                            assert_bytes(&read(to, bytes as usize), &expected, &what);
                        }
                    }
                }
                context.free(device).expect("freed");
            }
            (host.free)();
        }
        streams.into_iter().for_each(|stream| context.destroy_stream(stream).expect("destroyed"));
    }
}

#[test]
fn pieces_go_both_ways_at_once_and_a_plan_serves_other_memory() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let context = Arc::new(context(None, |_| ()));
    let stream = context.create_stream(GPU0).expect("a stream");
    let bytes = room();
    let mut random = Random(8);
    // There are two blocks for each direction, so that the graph of the first block is updated for the second block, and back.
    let block = |_| {
        let of = |device| context.allocate(device, bytes).expect("memory");
        [of(DeviceId::HOST), of(GPU0), of(DeviceId::HOST), of(GPU0)]
    };
    let blocks: [[u64; 4]; 2] = [0, 1].map(block);
    for round in 0..4 {
        let [host_in, device_in, host_out, device_out] = blocks[round % 2];
        let contents = [0, 1].map(|_| random.bytes(bytes as usize));
        let into = batch(host_in, device_in, GPU0, true, &contents[0]);
        let out = batch(host_out, device_out, GPU0, false, &contents[1]);
        let transfers = [into.transfers, out.transfers].concat();
        let plan = context.plan(&transfers, &PlanOptions::default()).expect("a plan");
        assert!(is_by_kernel(&plan), "{}", plan.describe());
        write(host_in, &contents[0]);
        write(device_out, &contents[1]);
        [device_in, host_out].iter().for_each(|to| write(*to, &vec![0x5a; bytes as usize]));
        plan.execute(stream).expect("enqueued").wait().expect("it runs");
        assert_bytes(&read(device_in, bytes as usize), &into.expected, &format!("round {round}, into the GPU"));
        assert_bytes(&read(host_out, bytes as usize), &out.expected, &format!("round {round}, out of the GPU"));
    }
    blocks.iter().flatten().for_each(|address| context.free(*address).expect("freed"));
    context.destroy_stream(stream).expect("destroyed");
}

#[test]
fn pieces_are_captured_and_move_what_is_there_at_each_launch() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let context = Arc::new(context(None, |_| ()));
    let stream = context.create_stream(GPU0).expect("a stream");
    let bytes = room();
    let [host, device] = [DeviceId::HOST, GPU0].map(|device| context.allocate(device, bytes).expect("memory"));
    let mut random = Random(9);
    for into in [true, false] {
        let (from, to) = if into { (host, device) } else { (device, host) };
        let plan =
            context.plan(&batch(host, device, GPU0, into, &vec![0; bytes as usize]).transfers, &PlanOptions::default()).expect("a plan");
        assert!(is_by_kernel(&plan), "{}", plan.describe());
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream belongs to the current context. Outputs are valid for the calls.
        unsafe {
            ok(sys::cuStreamBeginCapture_v2(raw(stream), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
            let captured = plan.enqueue(stream);
            ok(sys::cuStreamEndCapture(raw(stream), &mut graph));
            captured.expect("captured");
            ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        }
        for launch in 0..2 {
            let content = random.bytes(bytes as usize);
            let Batch { expected, .. } = batch(host, device, GPU0, into, &content);
            write(from, &content);
            write(to, &vec![0x5a; bytes as usize]);
            // SAFETY: an instantiated graph. The stream belongs to the current context.
            ok(unsafe { sys::cuGraphLaunch(exec, raw(stream)) });
            context.synchronize_stream(stream).expect("it runs");
            assert_bytes(&read(to, bytes as usize), &expected, &format!("launch {launch}, into {into}"));
        }
        // SAFETY: created above, and no longer used.
        unsafe {
            ok(sys::cuGraphExecDestroy(exec));
            ok(sys::cuGraphDestroy(graph));
        }
    }
    [host, device].iter().for_each(|address| context.free(*address).expect("freed"));
    context.destroy_stream(stream).expect("destroyed");
}
