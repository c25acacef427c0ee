//! Tests the graph executor on real GPUs: copied bytes, order, and which graphs are created, kept and evicted.

use super::scale::scaled;
use super::*;

type Ends = (Arc<[Endpoints]>, Arc<[u64]>);

fn ends(dst: u64, src: u64, rings: &[u64]) -> Ends {
    (Arc::new([Endpoints { dst, src }]), rings.into())
}

/// Executes a program by the graph executor. The backend treats calls with equal `ends` as executions of one plan.
fn launch(backend: &CudaBackend, program: &Arc<Program>, ends: &Ends, stream: StreamHandle) -> Completion {
    let execution = Execution { engine: Engine::Graph, ..Execution::new(program, &ends.0, &ends.1, stream) };
    backend.submit(&execution).expect("enqueued").expect("a completion")
}

/// Returns a program that copies in `count` pieces, on two lanes (streams).
fn pieces(bytes: u64, count: u64) -> Arc<Program> {
    let ops = (0..count).map(|piece| {
        let (first, end) = (bytes * piece / count, bytes * (piece + 1) / count);
        copy_op((piece % 2) as u32, source(first), destination(first), end - first, &[])
    });
    let program =
        Program { sources: Vec::new(), transfers: vec![bytes], lanes: vec![Lane::new(GPU0); 2], rings: vec![], ops: ops.collect() };
    plan::validate(&program, 0).expect("a valid program");
    Arc::new(program)
}

#[test]
fn relays_launched_as_graphs_lose_no_byte_in_streams_of_any_kind() {
    let Some(turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let slot_bytes = 256 << 10;
    let mut random = Random(50);
    for bytes in [slot_bytes + 1, (2 << 20) + 77, (5 << 20) + 3] {
        let (src, dst) = (backend.allocate(GPU0, bytes).expect("memory"), backend.allocate(GPU1, bytes).expect("memory"));
        for via in [DeviceId::HOST, DeviceId::gpu(turn.count - 1), GPU0] {
            let ring = backend.allocate(via, 3 * slot_bytes).expect("memory");
            let second = if via.is_host() { GPU1 } else { via };
            let program = relay(bytes, via, 3, slot_bytes, [GPU0, second]);
            let ends = ends(dst, src, &[ring]);
            let streams = [GPU0, GPU1].map(|device| backend.create_stream(device).expect("a stream"));
            // The default streams are tested too: the legacy one by both of its handles, and the per-thread one.
            for stream in streams.into_iter().chain([0, 1, 2].map(StreamHandle)) {
                for round in 0..2 {
                    let content = random.bytes(bytes as usize);
                    write(src, &content);
                    write(dst, &vec![0x55; bytes as usize]);
                    let done = launch(&backend, &program, &ends, stream);
                    done.wait().expect("it runs");
                    assert!(done.is_done().expect("done"));
                    assert_bytes(&read(dst, bytes as usize), &content, &format!("{bytes} bytes via {via}, {stream:?}, round {round}"));
                }
            }
            for stream in streams {
                backend.destroy_stream(stream).expect("destroyed");
            }
            backend.free(ring).expect("freed");
        }
        backend.free(src).expect("freed");
        backend.free(dst).expect("freed");
    }
    let made = backend.graph_statistics();
    assert_eq!((made.launches, made.instantiations, made.misses), (9 * 5 * 2, 9, 9), "{made:?}");
}

#[test]
fn a_thousand_launches_in_a_row_are_one_graph_and_each_moves_what_was_there() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let (bytes, slot_bytes) = ((64 << 10) + 5, 16 << 10);
    let [a, b] = [GPU0, GPU1].map(|device| backend.allocate(device, bytes).expect("memory"));
    let ring = backend.allocate(DeviceId::HOST, 2 * slot_bytes).expect("memory");
    let program = relay(bytes, DeviceId::HOST, 2, slot_bytes, [GPU0, GPU1]);
    let there = ends(b, a, &[ring]);
    let stream = backend.create_stream(GPU0).expect("a stream");
    write(b, &vec![0; bytes as usize]);
    let mut last = None;
    let hundreds = scaled(10, 2);
    for round in 0..100 * hundreds {
        // In stream order, so a launch that did not wait for the previous one, or for this, would copy bytes of another round.
        // SAFETY: memory of this size. The stream belongs to the current context.
        ok(unsafe { sys::cuMemsetD8Async(a, round as u8, bytes as usize, raw(stream)) });
        last = Some(launch(&backend, &program, &there, stream));
        if round % 100 == 99 {
            last.take().expect("launched").wait().expect("it runs");
            assert_bytes(&read(b, bytes as usize), &vec![round as u8; bytes as usize], &format!("round {round}"));
        }
    }
    assert!(last.is_none());
    let made = backend.graph_statistics();
    assert_eq!((made.launches, made.hits, made.instantiations, made.repoints), (100 * hundreds, 100 * hundreds - 1, 1, 0), "{made:?}");
}

#[test]
fn a_prepared_program_has_its_graph_before_the_first_launch_and_has_moved_nothing() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let bytes = (1 << 20) + 5;
    let [a, b] = [GPU0, GPU1].map(|device| backend.allocate(device, bytes).expect("memory"));
    let (before, content) = (vec![0x33; bytes as usize], Random(60).bytes(bytes as usize));
    write(a, &content);
    write(b, &before);
    let (program, ends) = (pieces(bytes, 4), ends(b, a, &[]));
    let stream = backend.create_stream(GPU0).expect("a stream");
    let execution = Execution { engine: Engine::Graph, ..Execution::new(&program, &ends.0, &ends.1, stream) };
    backend.prepare(&execution).expect("prepared");
    backend.synchronize().expect("nothing to wait for");
    assert_bytes(&read(b, bytes as usize), &before, "prepared");
    launch(&backend, &program, &ends, stream).wait().expect("it runs");
    assert_bytes(&read(b, bytes as usize), &content, "executed");
    let made = backend.graph_statistics();
    assert_eq!((made.launches, made.hits, made.instantiations), (1, 1, 1), "{made:?}");
}

#[test]
fn one_plan_on_many_streams_at_once_gets_more_graphs_up_to_a_bound() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let bytes = (32 << 20) + 1;
    let [a, b] = [GPU0, GPU1].map(|device| backend.allocate(device, bytes).expect("memory"));
    let content = Random(51).bytes(bytes as usize);
    write(a, &content);
    write(b, &vec![0x22; bytes as usize]);
    let (program, ends) = (pieces(bytes, 6), ends(b, a, &[]));
    let streams: Vec<_> = (0..20).map(|i| backend.create_stream(DeviceId::gpu(i % 2)).expect("a stream")).collect();
    // The gate blocks the stream until everything is enqueued, so that every launch finds earlier ones in progress.
    let gate = Arc::new(AtomicBool::new(false));
    for stream in &streams {
        let gate = gate.clone();
        let wait = move || {
            while !gate.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        };
        backend.launch_host(*stream, Box::new(wait)).expect("enqueued");
    }
    let all: Vec<_> = streams.iter().map(|stream| launch(&backend, &program, &ends, *stream)).collect();
    let made = backend.graph_statistics();
    gate.store(true, Ordering::Release);
    all.iter().for_each(|done| done.wait().expect("it runs"));
    assert_bytes(&read(b, bytes as usize), &content, "after all launches");
    assert_eq!((made.launches, made.instantiations, made.execs, made.waits), (20, 8, 8, 12), "{made:?}");
}

#[test]
fn new_addresses_of_the_same_program_re_point_the_graph_in_place_of_making_another() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let bytes = (3 << 20) + 9;
    let program = pieces(bytes, 5);
    let stream = backend.create_stream(GPU0).expect("a stream");
    for round in 0..10 {
        // The allocations of all rounds are kept, so that each round has other addresses.
        let [a, b] = [GPU0, GPU1].map(|device| backend.allocate(device, bytes).expect("memory"));
        let content = Random(60 + round).bytes(bytes as usize);
        write(a, &content);
        write(b, &vec![0x44; bytes as usize]);
        launch(&backend, &program, &ends(b, a, &[]), stream).wait().expect("it runs");
        assert_bytes(&read(b, bytes as usize), &content, &format!("round {round}"));
    }
    let made = backend.graph_statistics();
    assert_eq!((made.launches, made.instantiations, made.repoints, made.hits), (10, 1, 9, 0), "{made:?}");
    // Two sets of buffers are used alternately. At first one graph is updated for them; after a while each set has its own graph.
    let turns: Vec<_> = (0..2)
        .map(|_| {
            let [a, b] = [GPU0, GPU1].map(|device| backend.allocate(device, bytes).expect("memory"));
            ends(b, a, &[])
        })
        .collect();
    for round in 0..40 {
        launch(&backend, &program, &turns[round % 2], stream).wait().expect("it runs");
    }
    let made = backend.graph_statistics();
    assert_eq!((made.launches, made.instantiations, made.repoints), (50, 2, 16), "{made:?}");
}

/// Tests a plan of a context, because the context knows to which allocation an address belongs.
#[test]
fn memory_that_is_freed_and_allocated_at_the_same_address_gets_a_graph_of_its_own() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = context(None, |config| config.engine = Engine::Graph);
    let stream = context.create_stream(GPU0).expect("a stream");
    const BYTES: u64 = 32 << 20;
    let mut seen = None;
    for round in 0..8 {
        let [there, back] = [(GPU0, GPU1), (GPU1, GPU0)].map(|(from, to)| {
            let [src, dst] = [from, to].map(|device| context.allocate(device, BYTES).expect("memory"));
            write(src, &Random(90 + round).bytes(BYTES as usize));
            write(dst, &vec![0x33; BYTES as usize]);
            Transfer { dst, dst_device: to, src, src_device: from, bytes: BYTES }
        });
        let before = context.statistics().graphs;
        let options = PlanOptions { max_paths: Some(1), host_path: Some(false), ..PlanOptions::default() };
        let plan = context.plan(&[there, back], &options).expect("a plan");
        for _ in 0..3 {
            plan.execute(stream).expect("enqueued").wait().expect("it runs");
        }
        let content = Random(90 + round).bytes(BYTES as usize);
        let made = context.statistics().graphs;
        let now = [there, back].map(|transfer| [transfer.dst, transfer.src]);
        if let Some(earlier) = seen.replace(now) {
            // The driver usually reuses a freed address. If it does not, the graph is updated.
            let same = now.iter().flatten().zip(earlier.iter().flatten()).any(|(now, earlier): (&u64, &u64)| now == earlier);
            let news = (made.instantiations - before.instantiations, made.repoints - before.repoints);
            assert_eq!(news, if same { (1, 0) } else { (0, 1) }, "round {round}");
        }
        for transfer in [there, back] {
            assert_bytes(&read(transfer.dst, BYTES as usize), &content, &format!("round {round}"));
            for address in [transfer.dst, transfer.src] {
                context.free(address).expect("allocated");
            }
        }
        assert_eq!(made.execs, 1, "an exec of freed memory is kept");
    }
}

#[test]
fn the_same_program_between_other_kinds_of_memory_gets_a_graph_that_fits() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let bytes = (1 << 20) + 3;
    let program = pieces(bytes, 4);
    let stream = backend.create_stream(GPU0).expect("a stream");
    let kinds = [GPU0, GPU1, DeviceId::HOST];
    for (round, (from, to)) in kinds.into_iter().flat_map(|from| kinds.map(|to| (from, to))).enumerate() {
        let [a, b] = [from, to].map(|device| backend.allocate(device, bytes).expect("memory"));
        let content = Random(70 + round as u64).bytes(bytes as usize);
        write(a, &content);
        write(b, &vec![0x66; bytes as usize]);
        launch(&backend, &program, &ends(b, a, &[]), stream).wait().expect("it runs");
        assert_bytes(&read(b, bytes as usize), &content, &format!("{from}>{to}"));
    }
    assert_eq!(backend.graph_statistics().launches, 9);
    // Graphs do not support pageable host memory.
    let content = Random(79).bytes(bytes as usize);
    let b = backend.allocate(GPU1, bytes).expect("memory");
    launch(&backend, &program, &ends(b, content.as_ptr() as u64, &[]), stream).wait().expect("it runs");
    assert_bytes(&read(b, bytes as usize), &content, "ordinary memory");
    assert_eq!(backend.graph_statistics().launches, 9);
}

#[test]
fn programs_beyond_the_bound_give_up_the_oldest_graphs_and_lose_no_byte() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let bytes = 4099;
    let count = 300;
    let [a, b] = [GPU0, GPU1].map(|device| backend.allocate(device, count * bytes).expect("memory"));
    let content = Random(80).bytes((count * bytes) as usize);
    let stream = backend.create_stream(GPU0).expect("a stream");
    let all: Vec<_> = (0..count).map(|i| (pieces(bytes, 3), ends(b + i * bytes, a + i * bytes, &[]))).collect();
    write(a, &content);
    for round in 0..2 {
        write(b, &vec![0x99; (count * bytes) as usize]);
        // The programs are launched without waits in between, so that graphs are evicted while they are in progress.
        for (program, ends) in &all {
            launch(&backend, program, ends, stream);
        }
        backend.synchronize_stream(stream).expect("it runs");
        assert_bytes(&read(b, (count * bytes) as usize), &content, &format!("round {round}"));
    }
    let made = backend.graph_statistics();
    assert_eq!((made.launches, made.instantiations, made.programs), (2 * count, 2 * count, 128), "{made:?}");
    // A graph that was in progress when it was evicted is destroyed at the next eviction.
    launch(&backend, &pieces(bytes, 3), &all[0].1, stream).wait().expect("it runs");
    let made = backend.graph_statistics();
    assert_eq!((made.programs, made.execs), (128, 128), "{made:?}");
}

#[test]
fn in_a_capture_the_graph_engine_records_its_copies() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let bytes = (1 << 20) + 7;
    let [a, b] = [GPU0, GPU1].map(|device| backend.allocate(device, bytes).expect("memory"));
    let (program, ends) = (pieces(bytes, 4), ends(b, a, &[]));
    let stream = backend.create_stream(GPU0).expect("a stream");
    let other = backend.create_stream(GPU0).expect("a stream");
    let content = Random(90).bytes(bytes as usize);
    write(a, &content);
    write(b, &vec![0; bytes as usize]);
    let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: outputs are valid for the calls. The stream belongs to the current context.
    unsafe {
        ok(sys::cuStreamBeginCapture_v2(raw(stream), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL));
        launch(&backend, &program, &ends, stream);
        // Another stream is used while this thread captures. There a graph is created and launched.
        launch(&backend, &program, &ends, other);
        ok(sys::cuStreamEndCapture(raw(stream), &mut graph));
    }
    backend.synchronize_stream(other).expect("it runs");
    assert_bytes(&read(b, bytes as usize), &content, "beside the capture");
    assert_eq!(backend.graph_statistics().launches, 1);
    write(b, &vec![0; bytes as usize]);
    // SAFETY: captured above.
    unsafe {
        ok(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        ok(sys::cuGraphLaunch(exec, raw(stream)));
    }
    backend.synchronize_stream(stream).expect("it runs");
    assert_bytes(&read(b, bytes as usize), &content, "what was captured");
    // SAFETY: created above, and finished.
    unsafe {
        ok(sys::cuGraphExecDestroy(exec));
        ok(sys::cuGraphDestroy(graph));
    }
}

#[test]
fn one_plain_copy_stays_a_copy() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let backend = backend();
    let [a, b] = [GPU0, GPU0].map(|device| backend.allocate(device, 4096).expect("memory"));
    let stream = backend.create_stream(GPU0).expect("a stream");
    let content = Random(91).bytes(4096);
    write(a, &content);
    launch(&backend, &direct(4096, GPU0), &ends(b, a, &[]), stream).wait().expect("it runs");
    assert_bytes(&read(b, 4096), &content, "one copy");
    assert_eq!(backend.graph_statistics(), Default::default());
}

/// Returns a program in which one kernel on GPU 0 copies many segments, while a copy in the opposite direction runs at the same time.
/// Either GPU may make that copy.
fn kernel_beside_copy(segments: &[u64], bytes: u64) -> Arc<Program> {
    let piece =
        |transfer: u32, bytes| Copy { from: Place::Source { transfer, offset: 0 }, to: Place::Destination { transfer, offset: 0 }, bytes };
    let op = |lane, mechanism, copies| Op { lane: LaneId(lane), mechanism, copies, after: smallvec![] };
    let fused = (0_u32..).zip(segments).map(|(transfer, bytes)| piece(transfer, *bytes)).collect();
    let program = Program {
        sources: Vec::new(),
        transfers: segments.iter().copied().chain([bytes]).collect(),
        lanes: vec![Lane::new(GPU0), Lane { device: GPU1, also: plan::Gpus::from_iter([GPU0]) }],
        rings: vec![],
        ops: vec![op(0, Mechanism::Kernel, fused), op(1, Mechanism::Copy, smallvec![piece(segments.len() as u32, bytes)])],
    };
    plan::validate(&program, 0).expect("a valid program");
    Arc::new(program)
}

/// Returns the addresses of a program whose segments of the given `sizes` are stored one after the other in `src` and `dst`. The last
/// address pair belongs to a copy from `dst` to `src`, whose data follows all segments.
fn packed(sizes: &[u64], dst: u64, src: u64) -> Ends {
    let mut at = 0;
    let mut ends: Vec<_> = sizes
        .iter()
        .map(|size| {
            let ends = Endpoints { dst: dst + at, src: src + at };
            at += size;
            ends
        })
        .collect();
    if let Some(last) = ends.last_mut() {
        std::mem::swap(&mut last.dst, &mut last.src);
    }
    (ends.into(), Arc::new([]))
}

#[test]
fn fused_kernels_are_nodes_beside_copies_and_are_re_pointed_in_place() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    assert!(backend.has_copy_kernel(0).expect("an answer"), "the kernel was not loaded: copies would stand in for it");
    // The number of segments is at most what one launch with the short argument takes, then more, and then enough for two launches.
    for (index, count) in [1_u64, 26, 32, 33, 150].into_iter().enumerate() {
        let sizes: Vec<u64> = (0..count).map(|i| 1 + (i * 7919) % 40_000).chain([300_007]).collect();
        let total: u64 = sizes.iter().sum();
        let (there, back) = (total - 300_007, 300_007);
        let program = kernel_beside_copy(&sizes[..count as usize], back);
        let stream = backend.create_stream(GPU0).expect("a stream");
        for round in 0..3 {
            let [src, dst] = [GPU0, GPU1].map(|device| backend.allocate(device, total).expect("memory"));
            let content = Random(100 * count + round).bytes(total as usize);
            let (forth, reply) = content.split_at(there as usize);
            write(src, forth);
            write(dst + there, reply);
            write(dst, &vec![0x3c; there as usize]);
            write(src + there, &vec![0xc3; back as usize]);
            launch(&backend, &program, &packed(&sizes, dst, src), stream).wait().expect("it runs");
            assert_bytes(&read(dst, there as usize), forth, &format!("{count} segments, round {round}"));
            assert_bytes(&read(src + there, back as usize), reply, &format!("beside {count} segments, round {round}"));
        }
        let made = backend.graph_statistics();
        let index = index as u64 + 1;
        assert_eq!((made.launches, made.instantiations, made.repoints), (3 * index, index, 2 * index), "{made:?}");
        backend.destroy_stream(stream).expect("destroyed");
    }
}

/// Executes 77 kernels between other work of the stream, and checks every byte. With 77 parallel branches they took 144 us if the host
/// waited for each launch, and 854 us if launches followed each other.
#[test]
fn many_kernels_between_other_work_of_a_stream_copy_every_byte() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    assert!(backend.has_copy_kernel(0).expect("an answer"), "the kernel was not loaded: copies would stand in for it");
    let (count, bytes, row) = (9216_u32, 512_u64, 40_u32);
    let whole = |transfer| Copy { from: Place::Source { transfer, offset: 0 }, to: Place::Destination { transfer, offset: 0 }, bytes };
    let ops = vec![Op { lane: LaneId(0), mechanism: Mechanism::Kernel, copies: (0..count).map(whole).collect(), after: smallvec![] }];
    let program = Program { sources: Vec::new(), transfers: vec![bytes; count as usize], lanes: vec![Lane::new(GPU0)], rings: vec![], ops };
    plan::validate(&program, 0).expect("a valid program");
    let program = Arc::new(program);
    let total = u64::from(count) * bytes;
    let [src, dst] = [GPU0, GPU1].map(|device| backend.allocate(device, total).expect("memory"));
    let beside = backend.allocate(GPU0, 128 << 20).expect("memory");
    let content = Random(16).bytes(total as usize);
    write(src, &content);
    write(dst, &vec![0; total as usize]);
    let there: Ends = ((0..u64::from(count)).map(|at| Endpoints { dst: dst + at * bytes, src: src + at * bytes }).collect(), Arc::new([]));
    let stream = backend.create_stream(GPU0).expect("a stream");
    // SAFETY: memory of this size. The stream belongs to the current context.
    let work = || ok(unsafe { sys::cuMemsetD8Async(beside, 0, 128 << 20, raw(stream)) });
    let seconds = |launches: u32| {
        let started = std::time::Instant::now();
        let mut last = None;
        for _ in 0..launches {
            work();
            last = Some(launch(&backend, &program, &there, stream));
            work();
        }
        last.expect("launched").wait().expect("it runs");
        started.elapsed().as_secs_f64() / f64::from(launches)
    };
    seconds(2); // creates the graph
    let least = |launches: u32, times: u32| (0..times).map(|_| seconds(launches)).fold(f64::INFINITY, f64::min);
    let (alone, in_a_row) = (least(1, row), least(row, 4));
    println!("77 kernels: one launch takes {:.1} us alone and {:.1} us in a row", alone * 1e6, in_a_row * 1e6);
    assert_bytes(&read(dst, total as usize), &content, "9216 segments");
    backend.destroy_stream(stream).expect("destroyed");
}

#[test]
fn where_a_kernel_does_not_reach_all_memory_the_graph_copies() {
    let Some(_turn) = gpus(2) else { return };
    set_device(1);
    let backend = backend();
    let sizes = [5000, 70_001, 300_007];
    let total: u64 = sizes.iter().sum();
    let (there, back) = (75_001, 300_007);
    let program = kernel_beside_copy(&sizes[..2], back);
    let stream = backend.create_stream(GPU0).expect("a stream");
    let mut pooled = 0;
    // GPU 0 gets access to the pool, so that the driver can make the copies. The library does not assume that a kernel has access to the
    // pool.
    let grant = |flags| {
        let location = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
        let mut pool = std::ptr::null_mut();
        // SAFETY: the output is valid for the call, and the pool is that of GPU 1.
        unsafe {
            ok(sys::cuDeviceGetDefaultMemPool(&mut pool, 1));
            ok(sys::cuMemPoolSetAccess(pool, &sys::CUmemAccessDesc { location, flags }, 1));
        }
    };
    grant(sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    // SAFETY: the output is valid for the call; the pool is that of the current device.
    unsafe {
        ok(sys::cuMemAllocAsync(&mut pooled, total as usize, std::ptr::null_mut()));
        ok(sys::cuCtxSynchronize());
    }
    let [src, dst] = [GPU0, GPU1].map(|device| backend.allocate(device, total).expect("memory"));
    // Memory that is not from a pool comes first and last. So kernels are replaced by copies and are then used again.
    for (round, dst) in [dst, pooled, dst].into_iter().enumerate() {
        let content = Random(110 + round as u64).bytes(total as usize);
        let (forth, reply) = content.split_at(there as usize);
        write(src, forth);
        write(dst + there, reply);
        write(dst, &vec![0x3c; there as usize]);
        write(src + there, &vec![0xc3; back as usize]);
        launch(&backend, &program, &packed(&sizes, dst, src), stream).wait().expect("it runs");
        assert_bytes(&read(dst, there as usize), forth, &format!("round {round}"));
        assert_bytes(&read(src + there, back as usize), reply, &format!("back, round {round}"));
    }
    // SAFETY: allocated above, and no longer used.
    ok(unsafe { sys::cuMemFree_v2(pooled) });
    grant(sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE);
}

#[test]
fn lanes_that_either_end_may_issue_have_a_graph_for_each_gpu_of_the_callers_streams() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let backend = backend();
    let sizes = [90_001, 300_007];
    let total: u64 = sizes.iter().sum();
    let program = kernel_beside_copy(&sizes[..1], sizes[1]);
    let [src, dst] = [GPU0, GPU1].map(|device| backend.allocate(device, total).expect("memory"));
    let ends = packed(&sizes, dst, src);
    let streams = [GPU0, GPU1].map(|device| backend.create_stream(device).expect("a stream"));
    for round in 0..3_u64 {
        for stream in streams {
            let content = Random(120 + round).bytes(total as usize);
            let (forth, reply) = content.split_at(sizes[0] as usize);
            write(src, forth);
            write(dst + sizes[0], reply);
            write(dst, &vec![0; sizes[0] as usize]);
            write(src + sizes[0], &vec![0; sizes[1] as usize]);
            launch(&backend, &program, &ends, stream).wait().expect("it runs");
            assert_bytes(&read(dst, sizes[0] as usize), forth, &format!("{stream:?}, round {round}"));
            assert_bytes(&read(src + sizes[0], sizes[1] as usize), reply, &format!("back, {stream:?}, round {round}"));
        }
    }
    let made = backend.graph_statistics();
    assert_eq!((made.programs, made.launches, made.hits, made.instantiations), (2, 6, 4, 2), "{made:?}");
}
