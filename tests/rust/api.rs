//! Tests the Rust API on the host backend: ownership, refused arguments, and no access to freed memory.

#[path = "../../examples/rust/jacobi.rs"]
mod jacobi;

use mpgpu::{
    BackendChoice, BlockArrays, Buffer, Context, ContextOptions, Device, End, Error, Event, Half, Node, PieceOptions, PlanOptions, Stream,
};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};

fn context() -> Context {
    let options = ContextOptions { backend: Some(BackendChoice::Host), topology: Some("beluga".into()), ..Default::default() };
    Context::with_options(&options).expect("the host backend is there")
}

fn numbers(count: u32) -> Vec<u32> {
    (0..count).map(|i| i.wrapping_mul(2_654_435_761)).collect()
}

/// Host function that blocks a stream until the gate is dropped.
struct Gate(Arc<AtomicBool>);

impl Gate {
    fn close(stream: &Stream) -> Gate {
        let is_open = Arc::new(AtomicBool::new(false));
        let seen = is_open.clone();
        let wait = move || {
            while !seen.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
        };
        stream.launch_host(wait).expect("host functions are enqueued");
        Gate(is_open)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn a_function_that_panics_when_work_has_ended_keeps_no_other_from_being_called() {
    let ctx = context();
    let (a, b) = (Buffer::<u32>::zeroed(&ctx, Device::gpu(0), 10).unwrap(), Buffer::<u32>::zeroed(&ctx, Device::gpu(1), 10).unwrap());
    let stream = Stream::new(&ctx, Device::gpu(0)).unwrap();
    let plan = ctx.plan([(&b, &a)]).unwrap();
    let (tell, told) = mpsc::channel();
    let gate = Gate::close(&stream);
    for number in 0..6 {
        let tell = tell.clone();
        let call = move |outcome: Result<(), Error>| {
            outcome.unwrap();
            tell.send(number).unwrap();
            assert!(number % 2 == 1, "a function of the caller fails");
        };
        plan.execute(&stream).unwrap().then(call).unwrap();
    }
    drop((gate, tell));
    assert_eq!(told.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    // Callbacks that are added after the end of the execution are called too.
    let (tell, told) = mpsc::channel();
    plan.execute(&stream).unwrap().then(move |outcome| tell.send(outcome.is_ok()).unwrap()).unwrap();
    assert_eq!(told.recv(), Ok(true));
}

#[test]
fn every_byte_comes_in_stream_order() {
    let ctx = context();
    let here = numbers(300_001);
    let a = Buffer::from_slice(&ctx, Device::gpu(0), &here).unwrap();
    let b = Buffer::<u32>::zeroed(&ctx, Device::gpu(1), here.len()).unwrap();
    let host = Buffer::<u32>::zeroed(&ctx, Device::HOST, here.len()).unwrap();
    let (one, two) = (Stream::new(&ctx, Device::gpu(0)).unwrap(), Stream::new(&ctx, Device::gpu(1)).unwrap());
    let event = Event::new(&ctx).unwrap();
    let (there, back) = (ctx.plan([(&b, &a)]).unwrap(), ctx.plan([(&host, &b)]).unwrap());
    there.prepare(&one).unwrap();
    there.enqueue(&one).unwrap();
    event.record(&one).unwrap();
    two.wait(&event).unwrap();
    back.execute(&two).unwrap().wait().unwrap();
    assert_eq!(host.to_vec(&two).unwrap(), here);
    assert_eq!(ctx.statistics().bytes, 4 * 4 * 300_001, "from_slice, two plans and to_vec");
}

#[test]
fn a_range_is_copied_and_the_rest_left_alone() {
    let ctx = context();
    let stream = Stream::new(&ctx, Device::gpu(2)).unwrap();
    let a = Buffer::from_slice(&ctx, Device::gpu(2), &numbers(100)).unwrap();
    let b = Buffer::<u32>::zeroed(&ctx, Device::gpu(3), 100).unwrap();
    ctx.plan([(b.slice(10..20), a.slice(..10)), (b.slice(..=1), a.slice(98..))]).unwrap().enqueue(&stream).unwrap();
    let mut wanted = vec![0; 100];
    wanted[10..20].copy_from_slice(&numbers(100)[..10]);
    wanted[..2].copy_from_slice(&numbers(100)[98..]);
    assert_eq!(b.to_vec(&stream).unwrap(), wanted);
    b.slice(50..51).write(&stream, &[9]).unwrap();
    assert_eq!(b.slice(49..52).to_vec(&stream).unwrap(), [0, 9, 0]);
}

/// Bytes of a block in the tests below.
const BLOCK: u64 = 40;

#[test]
fn blocks_that_lists_name_are_copied_in_every_layer_and_the_rest_is_left_alone() {
    let (ctx, options) = (context(), PieceOptions::default());
    let stream = Stream::new(&ctx, Device::gpu(0)).unwrap();
    let gpus: Vec<Buffer<u32>> = (0..3).map(|gpu| Buffer::from_slice(&ctx, Device::gpu(gpu), &numbers(100)).unwrap()).collect();
    let hosts: Vec<Buffer<u32>> = (0..3).map(|_| Buffer::zeroed(&ctx, Device::HOST, 60).unwrap()).collect();
    let block = |number: usize| numbers(100)[10 * number..10 * number + 10].to_vec();
    let evicted = BlockArrays::new(&gpus, BLOCK).indices(&[9_u64, 0, 4]);
    ctx.copy_blocks(&BlockArrays::new(&hosts, BLOCK).indices(&[5_u64, 2, 0]), &evicted, &options, &stream).unwrap().wait().unwrap();
    let wanted = [block(4), vec![0; 10], block(0), vec![0; 20], block(9)].concat();
    assert!(hosts.iter().all(|host| host.to_vec(&stream).unwrap() == wanted));
    // Blocks 1 and 3 of the GPU array, which has gaps between its blocks, receive blocks 0 and 1 of a range in host memory.
    let (to, from) = (Buffer::from_slice(&ctx, Device::gpu(1), &[1_u32, 3]).unwrap(), hosts[0].slice(20..40));
    let spread = BlockArrays::new([&gpus[0]], BLOCK).stride(2 * BLOCK).indices(&to);
    ctx.enqueue_blocks(&spread, &BlockArrays::new([&from], BLOCK), &options, &stream).unwrap();
    stream.synchronize().unwrap();
    let after = gpus[0].to_vec(&stream).unwrap();
    assert_eq!((&after[20..30], &after[60..70]), (&block(0)[..], &[0; 10][..]));
    assert_eq!(
        [&after[..20], &after[30..60], &after[70..]].concat(),
        [&numbers(100)[..20], &numbers(100)[30..60], &numbers(100)[70..]].concat()
    );
}

#[test]
fn indices_in_memory_of_a_gpu_are_checked_when_the_copy_runs_and_keep_their_memory() {
    let (ctx, options) = (context(), PieceOptions::default());
    let stream = Stream::new(&ctx, Device::gpu(0)).unwrap();
    let host = Buffer::from_slice(&ctx, Device::HOST, &numbers(40)).unwrap();
    let gpu = Buffer::<u32>::zeroed(&ctx, Device::gpu(0), 40).unwrap();
    let gate = Gate::close(&stream);
    std::thread::scope(|scope| {
        let dropped = scope.spawn(|| {
            let list = Buffer::from_slice(&ctx, Device::gpu(0), &[2_u32, 4, 1]).unwrap();
            ctx.enqueue_blocks(&BlockArrays::new([&gpu], BLOCK), &BlockArrays::new([&host], BLOCK).indices(&list), &options, &stream)
                .unwrap();
        });
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(!dropped.is_finished(), "freeing the list waits for the copy");
        drop(gate);
    });
    let error = stream.synchronize().unwrap_err().to_string();
    assert!(error.contains("index 1 of the source is 4"), "{error}");
    stream.synchronize().unwrap();
    let wanted = [&numbers(40)[20..30], &[0; 10], &numbers(40)[10..20], &[0; 10]].concat();
    assert_eq!(gpu.to_vec(&stream).unwrap(), wanted);
}

#[test]
fn pieces_of_any_size_are_copied_in_stream_order() {
    let (ctx, options) = (context(), PieceOptions { multiprocessors: Some(1), paced: Some(false), relays: None });
    let stream = Stream::new(&ctx, Device::gpu(0)).unwrap();
    let host = Buffer::from_slice(&ctx, Device::HOST, &numbers(1000)).unwrap();
    let (a, b) = (Buffer::<u32>::zeroed(&ctx, Device::gpu(0), 1000).unwrap(), Buffer::<u32>::zeroed(&ctx, Device::gpu(1), 1000).unwrap());
    let rows: Vec<_> =
        (0..10).map(|row| (a.slice(100 * row..100 * row + 7 * row), host.slice(900 - 100 * row..900 - 100 * row + 7 * row))).collect();
    ctx.enqueue_pieces(rows, &options, &stream).unwrap();
    let request = ctx.copy_pieces([(&b, &a)], &options, &stream).unwrap();
    let (tell, told) = mpsc::channel();
    request.then(move |outcome| tell.send(outcome.is_ok()).unwrap()).unwrap();
    assert_eq!(told.recv(), Ok(true));
    let arrived = b.to_vec(&stream).unwrap();
    for row in 0..10 {
        let (at, from) = (100 * row, 900 - 100 * row);
        assert_eq!(arrived[at..at + 7 * row], numbers(1000)[from..from + 7 * row]);
        assert!(arrived[at + 7 * row..at + 100].iter().all(|number| *number == 0));
    }
    ctx.enqueue_pieces([(&b, &a); 0], &options, &stream).unwrap();
}

#[test]
fn pieces_that_do_not_go_together_are_refused() {
    let (ctx, other, options) = (context(), context(), PieceOptions::default());
    let stream = Stream::new(&ctx, Device::gpu(0)).unwrap();
    let a = Buffer::<u32>::zeroed(&ctx, Device::gpu(0), 100).unwrap();
    let b = Buffer::<u32>::zeroed(&ctx, Device::HOST, 100).unwrap();
    let theirs = Buffer::<u32>::zeroed(&other, Device::gpu(1), 100).unwrap();
    let blocks = |of: &Buffer<u32>| BlockArrays::new([of], BLOCK);
    let copy = |dst: BlockArrays<'_>, src: BlockArrays<'_>| ctx.enqueue_blocks(&dst, &src, &options, &stream).unwrap_err().to_string();
    let cases = [
        (copy(blocks(&a), blocks(&theirs)), "another context"),
        (copy(blocks(&a).indices(&[1_u32]), blocks(&b).indices(&[1_u32, 2])), "the same length"),
        (copy(blocks(&a).indices(&[1_u32]), blocks(&b).indices(&[1_u64])), "the same type"),
        (copy(blocks(&a), BlockArrays::new([&b], 20)), "the same size"),
        (copy(blocks(&a), BlockArrays::new([b.slice(..50)], BLOCK)), "the same number"),
        (copy(blocks(&a).stride(20), blocks(&b)), "at least the size of a block"),
        (copy(blocks(&a).indices(&b.slice(..4)), blocks(&b)), "host buffer"),
        (copy(BlockArrays::new([&a, &a], BLOCK), blocks(&b)), "2 destination arrays"),
        (copy(BlockArrays::new([a.slice(..50), a.slice(..40)], BLOCK), blocks(&b)), "array 1"),
        (copy(blocks(&a).indices(&vec![0_u32, 10]), blocks(&b).indices(&[0_u32, 1])), "dst_index[1]=10"),
        (copy(blocks(&a), blocks(&b).indices(&[0_u32; 11])), "count=11"),
        (ctx.enqueue_pieces([(&theirs, &a)], &options, &stream).unwrap_err().to_string(), "another context"),
        (ctx.enqueue_pieces([(a.slice(..2), b.slice(..3))], &options, &stream).unwrap_err().to_string(), "the same size"),
        (
            ctx.enqueue_pieces([(&a, &b)], &options, &Stream::new(&other, Device::gpu(0)).unwrap()).unwrap_err().to_string(),
            "another context",
        ),
    ];
    for (error, text) in cases {
        assert!(error.contains(text), "{error}, not {text}");
    }
}

#[test]
fn memory_outlives_executions_whose_handles_are_gone() {
    let ctx = context();
    let stream = Stream::new(&ctx, Device::gpu(0)).unwrap();
    let result = Buffer::<u32>::zeroed(&ctx, Device::gpu(1), 5000).unwrap();
    let held = || ctx.device_statistics(Device::gpu(0)).unwrap().allocated_bytes;
    let gate = Gate::close(&stream);
    let gone = std::thread::scope(|scope| {
        // The handles are dropped here while the stream is blocked, and the drop waits for the stream.
        let gone = scope.spawn(|| {
            let source = Buffer::from_slice(&ctx, Device::gpu(0), &numbers(5000)).unwrap();
            let plan = ctx.plan([(&result, &source)]).unwrap();
            drop(source);
            let request = plan.execute(&stream).unwrap();
            drop(plan);
            assert_eq!(held(), 20_000, "the request keeps the plan, and the plan its buffers");
            assert!(!request.is_done().unwrap());
            drop(request);
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!gone.is_finished(), "freeing waits for the execution");
        drop(gate);
        gone.join()
    });
    gone.expect("the thread has not panicked");
    assert_eq!(held(), 0, "the last handle frees");
    assert_eq!(result.to_vec(&stream).unwrap(), numbers(5000));
}

#[test]
fn a_context_lives_as_long_as_what_it_has_made() {
    let ctx = context();
    let buffer = Buffer::from_slice(&ctx, Device::gpu(0), &numbers(10)).unwrap();
    let stream = Stream::new(&ctx, Device::gpu(0)).unwrap();
    drop(ctx);
    assert_eq!(buffer.to_vec(&stream).unwrap(), numbers(10));
}

#[test]
fn what_does_not_go_together_is_refused_with_its_place() {
    let (ctx, other) = (context(), context());
    let a = Buffer::<u32>::zeroed(&ctx, Device::gpu(0), 10).unwrap();
    let theirs = Buffer::<u32>::zeroed(&other, Device::gpu(1), 10).unwrap();
    let text = |error: Error| error.to_string();
    let unlike = ctx.plan([(a.slice(..5), a.slice(5..)), (a.slice(..2), a.slice(5..6))]).map(drop).map_err(text);
    assert_eq!(unlike.unwrap_err(), "transfer=1: the destination has 8 bytes and the source 4: they must have the same size");
    let foreign = ctx.plan([(&theirs, &a)]).map(drop).map_err(text);
    assert!(foreign.unwrap_err().contains("another context"));
    let overlap = ctx.plan([(a.slice(..6), a.slice(4..))]).map(drop);
    assert!(matches!(overlap, Err(Error::OverlapsItself { transfer: 0, .. })), "{overlap:?}");
    let plan = ctx.plan([(a.slice(..5), a.slice(5..))]).unwrap();
    let stream = Stream::new(&other, Device::gpu(0)).unwrap();
    assert!(plan.enqueue(&stream).map_err(text).unwrap_err().contains("another context"));
    assert!(a.write(&Stream::new(&ctx, Device::gpu(0)).unwrap(), &[1]).is_err(), "another number of elements");
    assert!(matches!(Buffer::<u8>::zeroed(&ctx, Device::gpu(99), 1), Err(Error::NoSuchDevice { .. })));
    assert!(Buffer::<u64>::zeroed(&ctx, Device::gpu(0), usize::MAX / 4).map_err(text).unwrap_err().contains("address space"));
}

#[test]
#[should_panic(expected = "elements 0 to 18446744073709551616 are not within the 10 elements of the buffer")]
fn a_range_to_the_last_number_is_not_an_empty_slice() {
    let _ = Buffer::<u8>::zeroed(&context(), Device::gpu(0), 10).unwrap().slice(0..=usize::MAX);
}

#[test]
#[should_panic(expected = "elements 5 to 11 are not within the 10 elements of the buffer")]
fn a_range_outside_of_its_buffer_panics() {
    let _ = Buffer::<u8>::zeroed(&context(), Device::gpu(0), 10).unwrap().slice(5..11);
}

#[test]
fn empty_buffers_are_ends_too() {
    let ctx = context();
    let stream = Stream::new(&ctx, Device::gpu(0)).unwrap();
    let nothing = Buffer::<f64>::from_slice(&ctx, Device::gpu(0), &[]).unwrap();
    assert!(nothing.is_empty() && nothing.to_vec(&stream).unwrap().is_empty());
    ctx.plan([(&nothing, &nothing)]).unwrap().enqueue(&stream).unwrap();
}

#[test]
fn a_callback_gets_the_outcome_once() {
    let ctx = context();
    let stream = Stream::new(&ctx, Device::gpu(0)).unwrap();
    let a = Buffer::from_slice(&ctx, Device::gpu(0), &numbers(1000)).unwrap();
    let b = Buffer::<u32>::zeroed(&ctx, Device::gpu(1), 1000).unwrap();
    let (tell, told) = mpsc::channel();
    ctx.plan([(&b, &a)]).unwrap().execute(&stream).unwrap().then(move |outcome| tell.send(outcome.is_ok()).unwrap()).unwrap();
    assert_eq!(told.iter().collect::<Vec<_>>(), [true]);
}

#[test]
fn a_stream_waits_for_a_request() {
    let ctx = context();
    let (one, two) = (Stream::new(&ctx, Device::gpu(0)).unwrap(), Stream::new(&ctx, Device::gpu(1)).unwrap());
    let a = Buffer::from_slice(&ctx, Device::gpu(0), &numbers(1000)).unwrap();
    let b = Buffer::<u32>::zeroed(&ctx, Device::gpu(1), 1000).unwrap();
    let gate = Gate::close(&one);
    let request = ctx.plan([(&b, &a)]).unwrap().execute(&one).unwrap();
    two.wait_for(&request).unwrap();
    let calls = Arc::new(AtomicU32::new(0));
    let seen = calls.clone();
    two.launch_host(move || seen.store(1, Ordering::Relaxed)).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(calls.load(Ordering::Relaxed), 0, "it comes after the request");
    drop(gate);
    two.synchronize().unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    request.wait().unwrap();
    assert_eq!(b.to_vec(&two).unwrap(), numbers(1000));
}

#[test]
fn raw_memory_and_raw_streams_are_taken_on_the_callers_word() {
    let ctx = context();
    let mut here = vec![0_u8; 4000];
    let a = Buffer::from_slice(&ctx, Device::gpu(0), &numbers(1000)).unwrap();
    let own = Stream::new(&ctx, Device::gpu(0)).unwrap();
    // SAFETY: `own` and `here` are not accessed until the wait, and outlive it.
    let (stream, end) = unsafe { (Stream::from_raw(&ctx, own.as_raw()), End::from_raw(here.as_mut_ptr() as u64, Device::AUTO, 4000)) };
    ctx.plan([(end, End::from(&a))]).unwrap().execute(&stream).unwrap().wait().unwrap();
    drop(stream);
    own.synchronize().expect("a stream of somebody else is not destroyed");
    let wanted: Vec<u8> = numbers(1000).iter().flat_map(|number| number.to_ne_bytes()).collect();
    assert_eq!(here, wanted);
}

/// The node has two ranks in this process, each with its own context, as in two processes.
#[test]
fn ranks_that_meet_at_a_socket_exchange_their_edges() {
    let path = std::env::temp_dir().join(format!("mpgpu-api-{}", std::process::id()));
    let rank = |rank: u32| {
        let ctx = context();
        let (gpu, other) = (Device::gpu(rank), 1 - rank);
        let node = Node::at_socket(&ctx, rank, 2, &path, &[gpu]).unwrap();
        assert_eq!((node.rank(), node.ranks(), node.devices()), (rank, 2, vec![gpu]));
        let stream = Stream::new(&ctx, gpu).unwrap();
        let edge = Buffer::from_slice(&ctx, gpu, &vec![rank + 10; 50_000]).unwrap();
        let ghost = Buffer::<u32>::zeroed(&ctx, gpu, 50_000).unwrap();
        let step = node.exchange([Half::send(other, 3, &edge), Half::receive(other, 3, &ghost)], &PlanOptions::default()).unwrap();
        for _ in 0..5 {
            step.enqueue(&stream).unwrap();
        }
        assert_eq!(ghost.to_vec(&stream).unwrap(), vec![other + 10; 50_000]);
        // An error of one rank is reported to the other.
        let theirs = context();
        let foreign = Buffer::<u32>::zeroed(&theirs, gpu, 1).unwrap();
        let end = if rank == 0 { &foreign } else { &edge };
        let refused = node.exchange([Half::send(other, 4, end)], &PlanOptions::default()).unwrap_err().to_string();
        assert!(refused.contains("another context"), "rank {rank}: {refused}");
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let both = [0, 1].map(|number| scope.spawn(move || rank(number)));
        both.into_iter().for_each(|one| one.join().expect("the rank has passed"));
    });
}

#[test]
fn the_example_has_the_result_of_one_device() {
    assert!(jacobi::run().expect("the example runs"));
}

fn is_shared<T: Send + Sync>() {}

#[test]
fn every_type_may_be_used_from_all_threads() {
    is_shared::<Context>();
    is_shared::<Buffer<u8>>();
    is_shared::<Stream>();
    is_shared::<Event>();
    is_shared::<mpgpu::Plan>();
    is_shared::<mpgpu::Request>();
    is_shared::<Node>();
    fn is_error<T: std::error::Error>() {}
    is_error::<Error>();
}
