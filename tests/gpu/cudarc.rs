//! Tests slices and streams of the crate cudarc in plans, on a GPU. Without a GPU the tests are skipped with a message.

#[path = "../rust/common/skip.rs"]
mod skip;

use self::skip::skip;
use cudarc::driver::{CudaContext, sys};
use mpgpu::{BackendChoice, Buffer, Context, ContextOptions, Device, End, Error, Stream};
use std::sync::Arc;

fn context(backend: BackendChoice) -> Result<Context, Error> {
    Context::with_options(&ContextOptions { backend: Some(backend), ..Default::default() })
}

fn gpu() -> Option<(Context, Arc<CudaContext>)> {
    match context(BackendChoice::Cuda) {
        Ok(ctx) => Some((ctx, CudaContext::new(0).expect("cudarc sees the GPU too"))),
        Err(why) => {
            skip(why);
            None
        }
    }
}

fn numbers(count: u32) -> Vec<u32> {
    (0..count).map(|i| i.wrapping_mul(2_654_435_761)).collect()
}

#[test]
fn a_slice_of_cudarc_is_an_end() {
    let Some((ctx, cuda)) = gpu() else { return };
    let theirs = cuda.new_stream().unwrap();
    let stream = Stream::of_cudarc(&ctx, &theirs).unwrap();
    assert_eq!(stream.device().unwrap(), Device::gpu(0));
    let here = numbers(3_000_001);
    let source = Arc::new(theirs.clone_htod(&here).unwrap());
    let target = Arc::new(theirs.alloc_zeros::<u32>(here.len()).unwrap());
    let pinned = Buffer::<u32>::zeroed(&ctx, Device::HOST, here.len()).unwrap();
    let own = Buffer::<u32>::zeroed(&ctx, Device::gpu(0), here.len()).unwrap();
    let end = |slice| End::of_cudarc(&ctx, slice).unwrap();
    ctx.plan([(End::from(&own), end(&source))]).unwrap().enqueue(&stream).unwrap();
    ctx.plan([(end(&target), End::from(&own))]).unwrap().enqueue(&stream).unwrap();
    ctx.plan([(End::from(&pinned), end(&target))]).unwrap().execute(&stream).unwrap().wait().unwrap();
    assert_eq!(theirs.clone_dtoh(&*target).unwrap(), here, "cudarc's copy comes after, in the same stream");
    assert_eq!(pinned.to_vec(&stream).unwrap(), here);
    // SAFETY: all work of the stream has ended.
    assert_eq!(unsafe { pinned.as_slice() }.unwrap(), here, "the CPU reaches host memory");
    // SAFETY: as above.
    assert!(unsafe { own.as_slice() }.is_none(), "and not that of a GPU");
}

#[test]
fn memory_of_cudarc_lives_until_its_executions_have_ended() {
    let Some((ctx, cuda)) = gpu() else { return };
    let theirs = cuda.new_stream().unwrap();
    let stream = Stream::new(&ctx, Device::gpu(0)).unwrap();
    let target = Buffer::<u32>::zeroed(&ctx, Device::gpu(0), 1 << 20).unwrap();
    for round in 0..20 {
        let source = Arc::new(theirs.clone_htod(&vec![round; 1 << 20]).unwrap());
        let plan = ctx.plan([(End::from(&target), End::of_cudarc(&ctx, &source).unwrap())]).unwrap();
        // The copy is delayed, and every handle is dropped before it begins.
        stream.launch_host(|| std::thread::sleep(std::time::Duration::from_millis(5))).unwrap();
        plan.enqueue(&stream).unwrap();
        drop((source, plan));
        // If the memory had been freed too early, this allocation would reuse it.
        let other = theirs.clone_htod(&vec![u32::MAX; 1 << 20]).unwrap();
        theirs.synchronize().unwrap();
        assert!(target.to_vec(&stream).unwrap().iter().all(|element| *element == round));
        drop(other);
    }
}

#[test]
fn a_stream_of_cudarc_that_is_captured_is_refused() {
    let Some((ctx, cuda)) = gpu() else { return };
    let theirs = cuda.new_stream().unwrap();
    let stream = Stream::of_cudarc(&ctx, &theirs).unwrap();
    let (a, b) =
        (Buffer::from_slice(&ctx, Device::gpu(0), &numbers(1000)).unwrap(), Buffer::<u32>::zeroed(&ctx, Device::gpu(0), 1000).unwrap());
    let plan = ctx.plan([(&b, &a)]).unwrap();
    plan.prepare(&stream).unwrap();
    theirs.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    assert!(matches!(plan.enqueue(&stream), Err(Error::NotSupported(_))));
    assert!(matches!(a.write(&stream, &numbers(1000)), Err(Error::NotSupported(_))));
    // SAFETY: the plan outlives the graph, which is dropped below.
    unsafe { plan.enqueue_captured(&stream) }.unwrap();
    let graph = theirs.end_capture(sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).unwrap().unwrap();
    assert!(b.to_vec(&stream).unwrap().iter().all(|element| *element == 0), "nothing has run yet");
    graph.launch().unwrap();
    assert_eq!(b.to_vec(&stream).unwrap(), numbers(1000));
    drop(graph);
}

#[test]
fn a_context_of_virtual_devices_refuses_it() {
    let Some((_, cuda)) = gpu() else { return };
    let host = context(BackendChoice::Host).unwrap();
    let theirs = cuda.new_stream().unwrap();
    let slice = Arc::new(theirs.alloc_zeros::<u32>(10).unwrap());
    assert!(matches!(End::of_cudarc(&host, &slice), Err(Error::NotSupported(_))));
    assert!(matches!(Stream::of_cudarc(&host, &theirs), Err(Error::NotSupported(_))));
}
