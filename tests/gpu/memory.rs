//! Tests memory of every origin as source and destination of plans, on real GPUs. Checks every byte with every engine, the device found
//! from the address, and that unsupported memory is refused.

use super::scale::scaled;
use super::*;
use mpgpu_backend::Allocation;

const ENGINES: [Engine; 5] = [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel];

/// Memory that the library has not allocated. Dropping the value frees the memory.
pub(super) struct Foreign {
    pub address: u64,
    release: Option<Box<dyn FnOnce()>>,
}

impl Foreign {
    fn new(address: u64, release: impl FnOnce() + 'static) -> Foreign {
        Foreign { address, release: Some(Box::new(release)) }
    }

    /// Allocates GPU memory like `cudaMalloc`.
    pub fn plain(gpu: u32, bytes: usize) -> Foreign {
        set_device(gpu);
        let mut address = 0;
        // SAFETY: the output is valid for the call.
        ok(unsafe { sys::cuMemAlloc_v2(&mut address, bytes) });
        set_device(0);
        // SAFETY: allocated above, and no longer used.
        Foreign::new(address, move || ok(unsafe { sys::cuMemFree_v2(address) }))
    }

    /// Allocates memory from the default pool of a GPU, like `cudaMallocAsync`. If `shared` is true, all GPUs have access to the pool.
    fn pooled(gpu: u32, bytes: usize, shared: bool) -> Foreign {
        set_device(gpu);
        let mut address = 0;
        // SAFETY: outputs are valid for the calls. The pool is the GPU's default pool, and its access is restored below.
        unsafe {
            let mut pool = std::ptr::null_mut();
            ok(sys::cuDeviceGetDefaultMemPool(&mut pool, gpu as i32));
            if shared {
                let all = access(0..device_count().expect("GPUs are there"));
                ok(sys::cuMemPoolSetAccess(pool, all.as_ptr(), all.len()));
            }
            ok(sys::cuMemAllocAsync(&mut address, bytes, std::ptr::null_mut()));
            ok(sys::cuCtxSynchronize());
        }
        set_device(0);
        Foreign::new(address, move || {
            set_device(gpu);
            // SAFETY: allocated above, and no longer used. Access of the GPU itself cannot be revoked.
            unsafe {
                ok(sys::cuMemFreeAsync(address, std::ptr::null_mut()));
                ok(sys::cuCtxSynchronize());
                if shared {
                    let mut pool = std::ptr::null_mut();
                    ok(sys::cuDeviceGetDefaultMemPool(&mut pool, gpu as i32));
                    let mut others = access((0..device_count().expect("GPUs are there")).filter(|other| *other != gpu));
                    others.iter_mut().for_each(|other| other.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE);
                    ok(sys::cuMemPoolSetAccess(pool, others.as_ptr(), others.len()));
                }
            }
            set_device(0);
        })
    }

    /// Maps memory by the virtual memory API. The GPUs in `readers` have access.
    fn mapped(gpu: u32, bytes: usize, readers: impl IntoIterator<Item = u32>) -> Foreign {
        set_device(gpu);
        let properties = chunk_on(gpu, sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE);
        let (mut address, mut memory, mut granularity) = (0, 0, 0);
        let readers = access(readers);
        // SAFETY: inputs and outputs are valid for the calls.
        let size = unsafe {
            let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
            ok(sys::cuMemGetAllocationGranularity(&mut granularity, &properties, least));
            let size = bytes.next_multiple_of(granularity);
            ok(sys::cuMemAddressReserve(&mut address, size, 0, 0, 0));
            ok(sys::cuMemCreate(&mut memory, size, &properties, 0));
            ok(sys::cuMemMap(address, size, 0, memory, 0));
            ok(sys::cuMemSetAccess(address, size, readers.as_ptr(), readers.len()));
            size
        };
        set_device(0);
        // SAFETY: mapped above, and no longer used.
        Foreign::new(address, move || unsafe {
            ok(sys::cuCtxSynchronize());
            ok(sys::cuMemUnmap(address, size));
            ok(sys::cuMemRelease(memory));
            ok(sys::cuMemAddressFree(address, size));
        })
    }

    /// Allocates pinned host memory like `cudaHostAlloc`.
    pub fn pinned(bytes: usize) -> Foreign {
        let mut pointer = std::ptr::null_mut();
        // SAFETY: the output is valid for the call.
        ok(unsafe { sys::cuMemHostAlloc(&mut pointer, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) });
        // SAFETY: allocated above, and no longer used.
        Foreign::new(pointer.expose_provenance() as u64, move || ok(unsafe { sys::cuMemFreeHost(pointer) }))
    }

    /// Registers host memory like `cudaHostRegister`, from an odd address on.
    fn registered(bytes: usize) -> Foreign {
        let mut memory = vec![0_u8; bytes + 1];
        let address = memory.as_ptr() as u64;
        // SAFETY: the vector exists until it is unregistered.
        ok(unsafe { sys::cuMemHostRegister_v2(memory.as_mut_ptr().cast(), memory.len(), sys::CU_MEMHOSTREGISTER_PORTABLE) });
        // SAFETY: registered above, and no longer used.
        let unregister = move || ok(unsafe { sys::cuMemHostUnregister(memory.as_mut_ptr().cast()) });
        Foreign::new(address + 1, unregister)
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // After a failed assertion the driver may refuse this call too. A second panic would then end the other tests.
        if let Some(release) = self.release.take().filter(|_| !std::thread::panicking()) {
            release();
        }
    }
}

/// Returns the properties of GPU memory of the virtual memory API. `handles` selects the kinds of handles by which the memory can be
/// exported.
pub(super) fn chunk_on(gpu: u32, handles: sys::CUmemAllocationHandleType) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: handles,
        location: location(gpu),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 { compressionType: 0, gpuDirectRDMACapable: 0, usage: 0, reserved: [0; 4] },
    }
}

fn location(gpu: u32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu as i32 }
}

fn access(gpus: impl IntoIterator<Item = u32>) -> Vec<sys::CUmemAccessDesc> {
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    gpus.into_iter().map(|gpu| sys::CUmemAccessDesc { location: location(gpu), flags }).collect()
}

/// Creates a context whose planner uses several paths. With two to four GPUs the topology is a mesh that makes the planner use relays.
fn several_paths() -> Context {
    context(forced(), |config| config.host_path = Some(true))
}

/// Calls `work` while the context of the memory's own GPU is current, because other GPUs may have no access.
fn at_home<T>(context: &Context, address: u64, work: impl FnOnce() -> T) -> T {
    set_device(locate(context, address).device.0.max(0) as u32);
    let done = work();
    set_device(0);
    done
}

/// Copies into the memory and out of it, to and from GPU 0, with every engine, and checks every byte. The device of the memory is found
/// from its address.
fn there_and_back(context: &Context, memory: u64, bytes: u64, what: &str) {
    let [from, to] = [(); 2].map(|()| context.allocate(GPU0, bytes).expect("memory"));
    let stream = context.create_stream(GPU0).expect("a stream");
    let transfer = |dst, src| Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes };
    for (round, engine) in (0..).zip(ENGINES) {
        let content = Random(700 + round).bytes(bytes as usize);
        write(from, &content);
        at_home(context, memory, || write(memory, &vec![0x5a; bytes as usize]));
        write(to, &vec![0xa5; bytes as usize]);
        for (dst, src) in [(memory, from), (to, memory)] {
            let plan =
                context.plan(&[transfer(dst, src)], &PlanOptions { engine: Some(engine), ..PlanOptions::default() }).expect("a plan");
            plan.execute(stream).unwrap_or_else(|error| panic!("{what}, {engine:?}: {error}\n{}", plan.describe()));
            context.synchronize_stream(stream).unwrap_or_else(|error| panic!("{what}, {engine:?}: {error}\n{}", plan.describe()));
            let found = at_home(context, dst, || read(dst, bytes as usize));
            assert_bytes(&found, &content, &format!("{what}, {engine:?}\n{}", plan.describe()));
        }
    }
    context.destroy_stream(stream).expect("destroyed");
    context.free(from).expect("freed");
    context.free(to).expect("freed");
}

fn locate(context: &Context, address: u64) -> Allocation {
    context.backend().locate(address).expect("an answer").expect("known")
}

/// Returns sizes of transfers in bytes. The last one uses several paths, in chunks.
fn sizes() -> [u64; 3] {
    [1000, (5 << 20) + 3, scaled(48 << 20, 12 << 20) + 17]
}

#[test]
fn memory_of_a_pool_is_an_end_of_plans() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    for shared in [true, false] {
        let context = several_paths();
        for bytes in sizes() {
            let memory = Foreign::pooled(1, bytes as usize, shared);
            let found = locate(&context, memory.address + bytes - 1);
            assert_eq!((found.device, found.kind, found.base), (GPU1, MemoryKind::Device, memory.address));
            there_and_back(&context, memory.address, bytes, &format!("pool{}", if shared { " that lets all GPUs in" } else { "" }));
        }
    }
}

#[test]
fn pools_of_two_gpus_that_let_nobody_in_are_ends_of_one_plan() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = several_paths();
    for bytes in sizes() {
        let pools = [0, 1].map(|gpu| Foreign::pooled(gpu, bytes as usize, false));
        let closed = [pools[0].address, pools[1].address];
        let open = [GPU0, GPU1].map(|gpu| context.allocate(gpu, bytes).expect("memory"));
        let streams = [GPU0, GPU1].map(|gpu| context.create_stream(gpu).expect("a stream"));
        for (engine, (src, dst)) in ENGINES.into_iter().flat_map(|engine| [(closed, open), (open, closed)].map(|ends| (engine, ends))) {
            let ends = [(dst[1], src[0]), (dst[0], src[1])];
            let transfers = ends.map(|(dst, src)| Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes });
            let plan = context.plan(&transfers, &PlanOptions { engine: Some(engine), ..PlanOptions::default() }).expect("a plan");
            for stream in streams.into_iter().chain([StreamHandle(0)]) {
                let contents = [Random(bytes).bytes(bytes as usize), Random(bytes + 1).bytes(bytes as usize)];
                for (&(dst, src), content) in ends.iter().zip(&contents) {
                    at_home(&context, src, || write(src, content));
                    at_home(&context, dst, || write(dst, &vec![0xc3; bytes as usize]));
                }
                plan.execute(stream).expect("enqueued").wait().unwrap_or_else(|error| panic!("{engine:?}: {error}\n{}", plan.describe()));
                for (&(dst, _), content) in ends.iter().zip(&contents) {
                    let found = at_home(&context, dst, || read(dst, bytes as usize));
                    assert_bytes(&found, content, &format!("{engine:?}\n{}", plan.describe()));
                }
            }
        }
        streams.into_iter().for_each(|stream| context.destroy_stream(stream).expect("destroyed"));
        open.into_iter().for_each(|address| context.free(address).expect("freed"));
    }
}

#[test]
fn mappings_that_all_gpus_may_enter_are_ends_of_plans() {
    let Some(turn) = gpus(2) else { return };
    set_device(0);
    let context = several_paths();
    for bytes in sizes() {
        let memory = Foreign::mapped(1, bytes as usize, 0..turn.count);
        let found = locate(&context, memory.address + bytes - 1);
        assert_eq!((found.device, found.kind), (GPU1, MemoryKind::Device));
        assert!(found.base <= memory.address && found.bytes >= bytes && found.id != 0, "{found:?}");
        there_and_back(&context, memory.address, bytes, "mapping");
    }
}

#[test]
fn mappings_that_only_their_gpu_may_enter_are_ends_of_plans() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = several_paths();
    for bytes in sizes() {
        let memory = Foreign::mapped(1, bytes as usize, [1]);
        there_and_back(&context, memory.address, bytes, "mapping of its own GPU");
    }
}

#[test]
fn pinned_and_registered_host_memory_take_several_paths() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let context = several_paths();
    for bytes in sizes() {
        for (memory, what) in [(Foreign::pinned(bytes as usize), "pinned"), (Foreign::registered(bytes as usize), "registered")] {
            let found = locate(&context, memory.address + bytes - 1);
            assert_eq!((found.device, found.kind), (DeviceId::HOST, MemoryKind::Pinned), "{what}");
            assert_ne!(found.id, 0, "{what}");
            there_and_back(&context, memory.address, bytes, what);
        }
    }
}

#[test]
fn host_memory_of_the_library_moves_every_byte_both_ways_by_every_gpu() {
    let Some(turn) = gpus(1) else { return };
    set_device(0);
    let context = several_paths();
    // The sizes are smaller than, equal to and larger than the size from which pages are distributed and registered.
    for bytes in [4096, (4 << 20) - 1, 4 << 20, scaled(65 << 20, 9 << 20) + 5] {
        let host = context.allocate(DeviceId::HOST, bytes).expect("memory");
        assert_eq!(host % 256, 0);
        let found = locate(&context, host + bytes - 1);
        assert_eq!((found.base, found.bytes, found.device, found.kind), (host, bytes, DeviceId::HOST, MemoryKind::Pinned));
        there_and_back(&context, host, bytes, "host memory of the library");
        // One plan includes all GPUs. Each GPU holds an equal part of the data.
        let part = bytes / u64::from(turn.count);
        let parts: Vec<u64> = (0..turn.count).map(|gpu| context.allocate(DeviceId::gpu(gpu), part).expect("memory")).collect();
        let into = |(gpu, address): (u32, &u64)| Transfer {
            dst: *address,
            dst_device: DeviceId::gpu(gpu),
            src: host + u64::from(gpu) * part,
            src_device: DeviceId::HOST,
            bytes: part,
        };
        let into: Vec<Transfer> = (0..).zip(&parts).map(into).collect();
        let out: Vec<Transfer> =
            into.iter().map(|t| Transfer { dst: t.src, dst_device: t.src_device, src: t.dst, src_device: t.dst_device, ..*t }).collect();
        let content = Random(bytes).bytes(bytes as usize);
        write(host, &content);
        let plan = |transfers: &[Transfer]| context.plan(transfers, &PlanOptions::default()).expect("a plan");
        plan(&into).execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
        for (gpu, address) in parts.iter().enumerate() {
            let first = gpu * part as usize;
            assert_bytes(&read(*address, part as usize), &content[first..first + part as usize], &format!("into GPU {gpu}"));
        }
        write(host, &vec![0x3c; bytes as usize]);
        plan(&out).execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
        let moved = (part * u64::from(turn.count)) as usize;
        assert_bytes(&read(host, moved), &content[..moved], "out of all GPUs");
        let rest = bytes as usize - moved;
        assert!(rest == 0 || read(host + moved as u64, rest).iter().all(|byte| *byte == 0x3c), "bytes outside of the transfers");
        for address in parts.into_iter().chain([host]) {
            context.free(address).expect("freed");
        }
        // The next memory is another allocation, even if it has the same address.
        let again = context.allocate(DeviceId::HOST, bytes).expect("memory");
        assert_ne!(locate(&context, again).id, found.id);
        context.free(again).expect("freed");
    }
    assert_eq!(context.device_statistics(DeviceId::HOST).expect("known").allocated_bytes, 0);
}

#[test]
fn the_device_of_an_address_is_found_also_where_no_context_is_current() {
    let Some(turn) = gpus(2) else { return };
    set_device(0);
    let bytes = 100_003_u64;
    let last = turn.count - 1;
    let (plain, pinned) = (Foreign::plain(last, bytes as usize), Foreign::pinned(bytes as usize));
    let content = Random(60).bytes(bytes as usize);
    write(plain.address, &content);
    let (there, between) = (plain.address, pinned.address);
    // The new thread has no current context, and the library's new context does not use a GPU yet.
    std::thread::spawn(move || {
        assert!(current().is_null());
        let context = context(None, |_| ());
        let mut own = vec![0_u8; bytes as usize];
        let transfer = |dst, src| Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes };
        for (dst, src, said) in
            [(between, there, format!("gpu{last} to host0")), (own.as_mut_ptr() as u64, between, "host0 to host0".to_owned())]
        {
            let plan = context.plan(&[transfer(dst, src)], &PlanOptions::default()).expect("a plan");
            assert!(plan.describe().contains(&said), "{}", plan.describe());
            plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
        }
        assert_bytes(&own, &content, "through pinned into ordinary host memory");
        let wrong = Transfer { src_device: GPU0, ..transfer(between, there) };
        let refused = context.plan(&[wrong], &PlanOptions::default()).map(drop);
        assert!(matches!(&refused, Err(Error::WrongDevice { device: 0, actual, .. }) if *actual == last as i32), "{refused:?}");
        assert!(current().is_null(), "a context was left behind");
    })
    .join()
    .expect("no assertion failed");
}

#[test]
fn managed_memory_is_refused_and_the_context_stays_usable() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let context = context(None, |_| ());
    let mut managed = 0;
    // SAFETY: the output is valid for the call.
    ok(unsafe { sys::cuMemAllocManaged(&mut managed, 4096, 1) });
    let memory = context.allocate(GPU0, 4096).expect("memory");
    for device in [GPU0, DeviceId::HOST, Transfer::AUTO] {
        let transfer = Transfer { dst: memory, dst_device: GPU0, src: managed, src_device: device, bytes: 4096 };
        let refused = context.plan(&[transfer], &PlanOptions::default()).map(drop);
        assert!(matches!(&refused, Err(Error::Backend(BackendError::NotSupported(why))) if why.contains("managed")), "{refused:?}");
    }
    // SAFETY: allocated above, and no longer used.
    ok(unsafe { sys::cuMemFree_v2(managed) });
    there_and_back(&context, memory, 4096, "after a refusal");
}

#[test]
fn failing_allocations_name_device_and_size_and_the_context_stays_usable() {
    let Some(turn) = gpus(2) else { return };
    set_device(0);
    let (mut free, mut total) = (0, 0);
    // SAFETY: the outputs are valid for the call.
    ok(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) });
    let context = several_paths();
    let more = total as u64 + (1 << 30);
    for (device, size) in [(GPU0, more), (DeviceId::gpu(turn.count - 1), 1 << 50), (DeviceId::HOST, 1 << 50)] {
        let refused = context.allocate(device, size);
        assert!(
            matches!(&refused, Err(Error::Backend(BackendError::OutOfMemory { device: on, bytes })) if (*on, *bytes) == (device.0, size)),
            "{refused:?}"
        );
    }
    // If staging memory is not available, only the plan that needs staging memory fails.
    let starved = self::context(forced(), |config| (config.staging_bytes, config.host_path) = (1 << 50, Some(true)));
    let bytes = 64 << 20;
    let [src, dst] = [GPU0, GPU1].map(|device| starved.allocate(device, bytes).expect("memory"));
    let transfer = Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes };
    if forced().is_some() {
        let refused = starved.plan(&[transfer], &PlanOptions::default()).map(drop);
        assert!(matches!(&refused, Err(Error::Backend(BackendError::OutOfMemory { bytes, .. })) if *bytes == 1 << 50), "{refused:?}");
    }
    let content = Random(61).bytes(bytes as usize);
    write(src, &content);
    let plan = starved.plan(&[transfer], &PlanOptions { max_paths: Some(1), ..PlanOptions::default() }).expect("a plan");
    plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
    assert_bytes(&read(dst, bytes as usize), &content, "one path");
    let memory = context.allocate(GPU1, 1 << 20).expect("memory");
    there_and_back(&context, memory, 1 << 20, "after failing allocations");
}

#[test]
fn a_freed_address_is_refused_by_its_named_device() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = context(None, |_| ());
    let memory = context.allocate(GPU0, 4096).expect("memory");
    let mut foreign = 0;
    // SAFETY: the output is valid for the call; freed before it is used.
    unsafe {
        ok(sys::cuMemAlloc_v2(&mut foreign, 64 << 20));
        ok(sys::cuMemFree_v2(foreign));
    }
    let transfer = Transfer { dst: memory, dst_device: GPU0, src: foreign, src_device: GPU0, bytes: 4096 };
    let refused = context.plan(&[transfer], &PlanOptions::default()).map(drop);
    assert!(matches!(&refused, Err(Error::NotDeviceMemory { address, device: 0, .. }) if *address == foreign), "{refused:?}");
    let other = context.allocate(GPU1, 4096).expect("memory");
    there_and_back(&context, other, 4096, "after a refusal");
}

#[test]
fn a_stream_of_another_context_than_the_primary_is_refused() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let context = context(None, |_| ());
    let [src, dst] = [(); 2].map(|()| context.allocate(GPU0, 4096).expect("memory"));
    let plan =
        context.plan(&[Transfer { dst, dst_device: GPU0, src, src_device: GPU0, bytes: 4096 }], &PlanOptions::default()).expect("a plan");
    let (mut own, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
    type Create = unsafe extern "C" fn(*mut sys::CUcontext, u32, sys::CUdevice) -> CUresult;
    // SAFETY: the function's type in the driver's manual, which the bindings omit. Outputs are valid for the calls.
    unsafe {
        ok(sys::culib().get::<Create>(b"cuCtxCreate_v2").expect("every driver has it")(&mut own, 0, 0));
        ok(sys::cuStreamCreate(&mut stream, 1));
    }
    let refused = plan.execute(StreamHandle(stream.expose_provenance())).map(drop);
    assert!(matches!(&refused, Err(Error::Backend(BackendError::NotSupported(why))) if why.contains("primary")), "{refused:?}");
    assert_eq!(current(), own);
    // SAFETY: created above, and no longer used.
    unsafe {
        ok(sys::cuStreamDestroy_v2(stream));
        ok(sys::cuCtxDestroy_v2(own));
    }
    set_device(0);
    plan.execute(StreamHandle(0)).expect("the context is usable").wait().expect("it runs");
}

#[test]
fn graphs_are_counted_in_the_statistics_of_the_context() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    let context = several_paths();
    let bytes = 64 << 20;
    let [src, dst] = [GPU0, GPU1].map(|device| context.allocate(device, bytes).expect("memory"));
    let transfer = Transfer { dst, dst_device: GPU1, src, src_device: GPU0, bytes };
    let options = PlanOptions { engine: Some(Engine::Graph), adapt: Some(false), ..PlanOptions::default() };
    let plan = context.plan(&[transfer], &options).expect("a plan");
    assert_eq!(context.statistics().graphs, Default::default());
    for _ in 0..3 {
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it runs");
    }
    let counted = context.statistics().graphs;
    if plan.planned().program.ops.len() > 1 {
        assert_eq!((counted.launches, counted.hits, counted.instantiations, counted.programs, counted.execs), (3, 2, 1, 1, 1));
    } else {
        assert_eq!(counted.launches, 0, "one plain copy stays a copy");
    }
}

/// Tests the code that replaces functions of the driver which older drivers do not have.
#[cfg(feature = "fault-injection")]
#[test]
fn without_functions_that_older_drivers_lack_every_engine_moves_every_byte() {
    let Some(_turn) = gpus(2) else { return };
    set_device(0);
    for absent in ["cuMemcpyBatchAsync", "cuGraphInstantiateWithFlags"] {
        let machine = Machine::new(forced().unwrap_or_else(|| discover::discover().expect("GPUs are there"))).expect("well formed");
        let backend = CudaBackend::without(absent, machine.host_count()).expect("GPUs are there");
        assert!(absent != "cuMemcpyBatchAsync" || !backend.has_batched_copy());
        let config = Config { staging_bytes: 16 << 20, host_path: Some(true), ..Config::default() };
        let context = Context::with_backend(Arc::new(machine), Arc::new(backend), config).expect("a context");
        for bytes in sizes() {
            let memory = context.allocate(GPU1, bytes).expect("memory");
            there_and_back(&context, memory, bytes, &format!("without {absent}"));
            context.free(memory).expect("freed");
        }
        assert!(absent != "cuGraphInstantiateWithFlags" || context.statistics().graphs == Default::default());
    }
}
