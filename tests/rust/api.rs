//! Tests the Rust API on the host backend: ownership, refused arguments, and no access to freed memory.

#[path = "../../examples/rust/jacobi.rs"]
mod jacobi;

use mpgpu::{BackendChoice, Buffer, Context, ContextOptions, Device, End, Error, Event, Half, Node, PlanOptions, Stream};
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
