//! Large messages of which both ranks move a part, between two processes that see one GPU each, or share the only one. The processes are this
//! program run again.

use super::scale::scaled;
use super::*;
use mpgpu_runtime::backend::CompletionState;
use mpgpu_runtime::context::node::NodeGroup;
use mpgpu_runtime::context::node::message::{MessengerOptions, Outgoing, Pattern};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CHILD: &str = "SHARES_TEST_CHILD";

const MOST_BYTES: u64 = (256 << 20) + 4097;

fn word(step: u64, from: u64, at: usize) -> u64 {
    (step << 48) ^ (from << 40) ^ (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Sends and receives by turns. Orders are rank, socket, and whether every message is shared.
#[test]
#[ignore = "a process that other tests start"]
fn child_shares() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let (rank, is_forced) = (words[0].parse::<u32>().expect("a number"), words[2] == "forced");
    let context = Arc::new(context(None, |_| {}));
    let node = Arc::new(NodeGroup::at_socket(&context, rank, 2, words[1].as_ref(), &[]).expect("a node"));
    let messenger = node.messenger(MessengerOptions::default()).expect("a messenger");
    if is_forced {
        messenger.share_always();
        messenger.wait_for_shares(Duration::from_secs(5));
    }
    let host = context.allocate(DeviceId::HOST, MOST_BYTES + 8).expect("memory");
    let [out, into] = [0, 1].map(|_| context.allocate(GPU0, MOST_BYTES + 8).expect("memory"));
    let stream = context.create_stream(GPU0).expect("a stream");
    let words_of = |bytes: u64| super::share::host_words(host, bytes as usize / 8);
    let copy = |dst: (u64, DeviceId), src: (u64, DeviceId), bytes| {
        let transfer = Transfer { dst: dst.0, dst_device: dst.1, src: src.0, src_device: src.1, bytes };
        let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
        plan.execute(stream).expect("executed").wait().expect("it ends");
    };
    let mut seconds = Vec::new();
    let steps = scaled(24, 6);
    for step in 0..steps {
        // The last ones are of one size, to be timed.
        let bytes = if step * 2 < steps { ((1 << 20) + (step * 7_654_321) % (MOST_BYTES - (1 << 20))) & !7 } else { 256 << 20 };
        let tag = step;
        words_of(bytes).iter_mut().enumerate().for_each(|(at, place)| *place = word(step, u64::from(rank), at));
        copy((out, GPU0), (host, DeviceId::HOST), bytes);
        words_of(bytes).fill(u64::MAX);
        copy((into, GPU0), (host, DeviceId::HOST), bytes);
        let receive = || {
            let pattern = Pattern { source: Some(1 - rank), tag, mask: u64::MAX };
            messenger.receive(into, bytes, &pattern, stream).expect("posted")
        };
        let send = || messenger.send(&Outgoing { address: out, bytes, rank: 1 - rank, tag, metadata: &[] }, stream).expect("posted");
        let meet = |tag: u64| {
            let (own, mut theirs) = (1u64, 0u64);
            let sent = messenger.send(
                &Outgoing { address: std::ptr::from_ref(&own).expose_provenance() as u64, bytes: 8, rank: 1 - rank, tag, metadata: &[] },
                stream,
            );
            let pattern = Pattern { source: Some(1 - rank), tag, mask: u64::MAX };
            let address = std::ptr::from_mut(&mut theirs).expose_provenance() as u64;
            messenger.receive(address, 8, &pattern, stream).expect("posted").wait().expect("it was sent");
            sent.expect("posted").wait().expect("received");
        };
        // One direction at a time: the receiver moves in even steps, the sender in odd ones.
        for source in 0..2 {
            let is_first = (rank == source) == (step % 2 == 0);
            let from;
            let operation = if is_first {
                let operation = if rank == source { send() } else { receive() };
                meet((1 << 32) + 2 * step + u64::from(source));
                from = Instant::now();
                operation
            } else {
                meet((1 << 32) + 2 * step + u64::from(source));
                from = Instant::now();
                if rank == source { send() } else { receive() }
            };
            operation.wait().expect("both are there");
            if bytes == 256 << 20 && !is_first {
                seconds.push(from.elapsed().as_secs_f64());
            }
        }
        copy((host, DeviceId::HOST), (into, GPU0), bytes);
        let wrong = words_of(bytes).iter().enumerate().position(|(at, found)| *found != word(step, u64::from(1 - rank), at));
        assert!(wrong.is_none(), "rank {rank}, step {step}: word {wrong:?} of {} is wrong", bytes / 8);
    }
    seconds.sort_by(f64::total_cmp);
    let (shared, median) = (messenger.shared_movements(), seconds[seconds.len() / 2]);
    assert!(!is_forced || shared >= steps / 2, "rank {rank}: {shared} of {steps}");
    println!("rank {rank}: {shared} of {steps} messages moved together; 256 MiB in {:.0} us", median * 1e6);
    messenger.destroy().expect("nothing is left");
    [host, out, into].iter().for_each(|address| context.free(*address).expect("it exists"));
}

fn pair(devices: [u32; 2], forced: &str) {
    let socket = std::env::temp_dir().join(format!("mpgpu-shares-{}-{forced}", std::process::id()));
    let children: Vec<_> = (0..2)
        .map(|rank| {
            let mut command = Command::new(std::env::current_exe().expect("this program"));
            command.args(["--ignored", "--exact", "shares::child_shares", "--nocapture", "--test-threads=1"]);
            command.env(CHILD, format!("{rank} {} {forced}", socket.display())).env("CUDA_VISIBLE_DEVICES", devices[rank].to_string());
            command.stdin(Stdio::null()).spawn().expect("this program runs")
        })
        .collect();
    for mut child in children {
        assert!(child.wait().expect("a child of this process").success(), "its text is above");
    }
}

#[test]
fn every_byte_is_right_where_both_ranks_move_a_message() {
    let Some(gpus) = gpus(1) else { return };
    pair([0, gpus.count - 1], "forced");
}

#[test]
fn two_gpus_share_what_the_model_says() {
    let Some(gpus) = gpus(2) else { return };
    pair([0, gpus.count - 1], "modelled");
}

/// Prints whether a call that frees memory, while a stream has not ended, keeps other threads from enqueueing: what a rank's own thread could wait for.
#[test]
fn whether_freeing_memory_holds_up_other_threads_is_told() {
    let Some(_gpus) = gpus(1) else { return };
    set_device(0);
    let (mut flag, mut device, mut freed, mut own, mut other) = Default::default();
    let mut host = std::ptr::null_mut();
    // SAFETY: outputs are valid for the calls, and so are the sizes.
    unsafe {
        ok(sys::cuMemHostAlloc(&mut host, 4096, 0));
        host.cast::<u64>().write(0);
        ok(sys::cuMemHostGetDevicePointer_v2(&mut flag, host, 0));
        ok(sys::cuMemAlloc_v2(&mut device, 4096));
        ok(sys::cuMemAlloc_v2(&mut freed, 4096));
        ok(sys::cuStreamCreate(&mut own, 1));
        ok(sys::cuStreamCreate(&mut other, 1));
        ok(sys::cuStreamWaitValue64_v2(own, flag, 1, 0));
    }
    let addresses = (host.expose_provenance(), other.expose_provenance());
    let freeing = std::thread::spawn(move || {
        set_device(0);
        // SAFETY: memory of this test.
        ok(unsafe { sys::cuMemFree_v2(freed) });
    });
    let enqueueing = std::thread::spawn(move || {
        set_device(0);
        std::thread::sleep(Duration::from_millis(200));
        let from = Instant::now();
        let (host, stream) =
            (std::ptr::with_exposed_provenance::<std::ffi::c_void>(addresses.0 + 64), std::ptr::with_exposed_provenance_mut(addresses.1));
        // SAFETY: memory and a stream of this test.
        ok(unsafe { sys::cuMemcpyHtoDAsync_v2(device, host, 64, stream) });
        from.elapsed()
    });
    std::thread::sleep(Duration::from_millis(1200));
    let is_freeing = !freeing.is_finished();
    // SAFETY: memory of this test, which the stream reads.
    unsafe { std::sync::atomic::AtomicU64::from_ptr(host.cast()) }.store(1, Ordering::Release);
    freeing.join().expect("no panic");
    let took = enqueueing.join().expect("no panic");
    println!("freeing waits for streams: {is_freeing}; a copy that another thread enqueues meanwhile takes {took:.1?}");
    // SAFETY: of this test.
    unsafe {
        ok(sys::cuStreamSynchronize(own));
        ok(sys::cuStreamSynchronize(other));
        ok(sys::cuMemFree_v2(device));
        ok(sys::cuMemFreeHost(host));
        ok(sys::cuStreamDestroy_v2(own));
        ok(sys::cuStreamDestroy_v2(other));
    }
}

/// Prints how many streams pass beside others that wait, as those of ranks do that wait for messages: the hardware has fewer queues than there are
/// streams.
#[test]
fn whether_streams_that_wait_hold_up_others_is_told() {
    const STREAMS: usize = 64;
    let Some(_gpus) = gpus(1) else { return };
    set_device(0);
    let (mut host, mut flags, mut least, mut greatest) = (std::ptr::null_mut(), 0, 0, 0);
    // SAFETY: outputs are valid for the calls.
    unsafe {
        ok(sys::cuMemHostAlloc(&mut host, 4096, 0));
        ok(sys::cuMemHostGetDevicePointer_v2(&mut flags, host, 0));
        ok(sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest));
    }
    // SAFETY: words of this test, which streams write.
    let word = |at: usize| unsafe { std::sync::atomic::AtomicU64::from_ptr(host.cast::<u64>().add(at)) };
    let create = |priority| {
        let mut stream = Default::default();
        // SAFETY: the output is valid for the call.
        ok(unsafe { sys::cuStreamCreateWithPriority(&mut stream, 1, priority) });
        stream
    };
    for (name, priority) in [("the same", least), ("the highest", greatest)] {
        (0..=STREAMS).for_each(|at| word(at).store(0, Ordering::Relaxed));
        let (waiting, others): (Vec<_>, Vec<_>) = (0..STREAMS).map(|_| (create(least), create(priority))).unzip();
        // SAFETY: streams and words of this test.
        unsafe {
            waiting.iter().for_each(|stream| ok(sys::cuStreamWaitValue64_v2(*stream, flags, 1, 0)));
            others.iter().zip(1..).for_each(|(stream, at)| ok(sys::cuStreamWriteValue64_v2(*stream, flags + 8 * at, 1, 0)));
        }
        std::thread::sleep(Duration::from_millis(300));
        let passed = (1..=STREAMS).filter(|at| word(*at).load(Ordering::Acquire) != 0).count();
        println!("{passed} of {STREAMS} streams of {name} priority pass beside {STREAMS} that wait");
        word(0).store(1, Ordering::Release);
        // SAFETY: as above.
        waiting.into_iter().chain(others).for_each(|stream| unsafe {
            ok(sys::cuStreamSynchronize(stream));
            ok(sys::cuStreamDestroy_v2(stream));
        });
    }
    // SAFETY: of this test.
    ok(unsafe { sys::cuMemFreeHost(host) });
}
