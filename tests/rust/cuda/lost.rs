//! Tests waits for a peer that has exited. Work that depends on such a wait reports the loss once, and other work does not report it. Uses
//! the driver double (simulated CUDA driver).

use super::double::{self, calls};
use super::{Backend, CudaBackend};
use crate::backend::{
    Abandoned, Action, ActionGrid, Allocation, BackendError, Completion, Endpoints, Execution, LostPeer, Segment, Signal, SignalWait,
    StepFate, StreamHandle,
};
use crate::plan::{self, Copy, Engine, Lane, LaneId, Mechanism, Op, Place, Program};
use crate::topology::DeviceId;
use smallvec::smallvec;
use std::sync::{Arc, Mutex};

const GPU0: DeviceId = DeviceId::gpu(0);
const GPU1: DeviceId = DeviceId::gpu(1);
const PEER: LostPeer = LostPeer::of(4711, None);

#[track_caller]
fn told(result: Result<(), BackendError>) {
    assert!(matches!(&result, Err(BackendError::PeerGone(text)) if text.matches("process 4711").count() == 1), "{result:?}");
}

/// Plan that copies one page from GPU 0 to GPU 1.
struct Page {
    program: Arc<Program>,
    endpoints: Arc<[Endpoints]>,
}

impl Page {
    fn new(backend: &CudaBackend) -> Page {
        let (from, to) = (Place::Source { transfer: 0, offset: 0 }, Place::Destination { transfer: 0, offset: 0 });
        let op = Op { lane: LaneId(0), mechanism: Mechanism::Copy, copies: smallvec![Copy { from, to, bytes: 4096 }], after: smallvec![] };
        let program = Program { sources: Vec::new(), transfers: vec![4096], lanes: vec![Lane::new(GPU0)], rings: vec![], ops: vec![op] };
        plan::validate(&program, 0).expect("a valid program");
        let [src, dst] = [GPU0, GPU1].map(|device| backend.allocate(device, 4096).expect("memory"));
        Page { program: Arc::new(program), endpoints: Arc::new([Endpoints { dst, src }]) }
    }

    fn copy(&self, backend: &CudaBackend, stream: StreamHandle) -> Completion {
        let rings: Arc<[u64]> = Arc::new([]);
        let (program, endpoints) = (&self.program, &self.endpoints);
        let execution = Execution { engine: Engine::Stream, ..Execution::new(program, endpoints, &rings, stream) };
        backend.submit(&execution).expect("enqueued").expect("a completion")
    }
}

/// Creates a backend, and memory for counters that are 0.
fn backend() -> (CudaBackend, Allocation) {
    double::start(2, true);
    let backend = CudaBackend::on(double::driver(), 1).expect("the double has GPUs");
    let counters = backend.allocate_shared(DeviceId::HOST, 64).expect("memory");
    let allocation = backend.locate(counters).expect("known").expect("its own");
    (backend, allocation)
}

#[test]
fn what_has_come_after_a_wait_in_vain_says_so_once_and_other_streams_nothing() {
    let (backend, counters) = backend();
    let page = Page::new(&backend);
    let [waits, joins, other] = [GPU0, GPU1, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    let [waited, joined] = [(); 2].map(|()| backend.create_event().expect("an event"));
    let wanted = [3, 5].map(|value| Signal { counter: counters.base, value });
    for one in wanted {
        backend.stream_wait_signals(waits, &[one], SignalWait::Operation).expect("enqueued");
    }
    backend.record_event(waited, waits).expect("recorded");
    backend.stream_wait_event(joins, waited).expect("enqueued");
    let early = page.copy(&backend, joins);
    backend.record_event(joined, joins).expect("recorded");
    let beside = page.copy(&backend, other);
    // This event belongs to the caller, and the library does not know it.
    let foreign = crate::backend::EventHandle(0x7000_0000);
    for completion in [&early, &beside] {
        completion.wait().expect("nobody has gone");
    }

    backend.fail_waits(&counters, None, PEER);
    assert_eq!(backend.read_signal(counters.base).expect("a counter"), 5, "a GPU that waits would wait for ever");
    assert!(early.is_done().expect("it runs"));
    told(early.wait());
    told(backend.synchronize_event(joined));
    told(backend.synchronize_event(waited));
    backend.synchronize_event(foreign).expect("it is of no stream that waits");
    beside.wait().expect("it waits for nobody");
    for stream in [waits, joins] {
        backend.synchronize_stream(stream).expect("it was told by way of its work, or of its event");
        page.copy(&backend, stream).wait().expect("its stream was told");
        backend.record_event(joined, stream).expect("recorded");
        backend.synchronize_event(joined).expect("its stream was told");
    }
    for stream in [other, StreamHandle(0), backend.create_stream(GPU0).expect("a stream")] {
        backend.synchronize_stream(stream).expect("it waits for nobody");
        page.copy(&backend, stream).wait().expect("it waits for nobody");
    }
    // A stream that waits for the event long after it has completed still reports the loss. A new stream with the handle of a destroyed
    // stream does not.
    for _ in 0..2 {
        let late = backend.create_stream(GPU1).expect("a stream");
        backend.stream_wait_event(late, waited).expect("enqueued");
        told(page.copy(&backend, late).wait());
        page.copy(&backend, late).wait().expect("the stream was told by way of its work");
        backend.synchronize_stream(late).expect("the same");
        backend.destroy_stream(late).expect("a stream");
    }
}

#[test]
fn a_stream_whose_waits_are_over_is_not_told_of_what_others_wait_for_in_the_same_memory() {
    let (backend, counters) = backend();
    let [over, waits] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    let step = |stream, value| {
        backend.stream_wait_signals(stream, &[Signal { counter: counters.base, value }], SignalWait::Operation).expect("enqueued");
    };
    step(over, 1);
    backend.raise_signal(Signal { counter: counters.base, value: 1 }).expect("a counter");
    backend.synchronize_stream(over).expect("it was raised");
    step(waits, 2);
    backend.fail_waits(&counters, None, PEER);
    backend.synchronize_stream(over).expect("its waits are over");
    told(backend.synchronize_stream(waits));
}

#[test]
fn flags_that_a_stream_takes_are_told_there_and_those_of_graphs_everywhere() {
    for is_captured in [false, true] {
        let (backend, counters) = backend();
        let [takes, other] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
        double::node(|node| node.capturing = is_captured);
        backend.stream_take_flags(takes, &[], &[counters.base], &StepFate::default()).expect("enqueued");
        double::node(|node| node.capturing = false);
        backend.fail_waits(&counters, None, PEER);
        told(backend.synchronize_stream(takes));
        backend.synchronize_stream(takes).expect("it was told");
        let beside = backend.synchronize_stream(other);
        if is_captured {
            told(beside)
        } else {
            beside.expect("it takes none")
        }
        backend.synchronize_stream(other).expect("it was told, or need not be");
    }
}

#[test]
fn a_loss_ends_the_waits_for_what_the_lost_party_raises_and_no_others() {
    let (backend, counters) = backend();
    let [lost, lives] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    let flags = [counters.base, counters.base + 8];
    backend.name_signallers(&counters, [(flags[0], 1), (flags[1], 2)].into());
    for (stream, flag) in [(lost, flags[0]), (lives, flags[1])] {
        backend.stream_take_flags(stream, &[], &[flag], &StepFate::default()).expect("enqueued");
    }
    backend.stream_wait_signals(lives, &[Signal { counter: flags[1], value: 1 }], SignalWait::Operation).expect("enqueued");
    backend.fail_waits(&counters, Some(1), PEER);
    told(backend.synchronize_stream(lost));
    assert_eq!(backend.read_signal(flags[1]).expect("a counter"), 0, "a wait for a rank that lives was ended");
    backend.stream_take_flags(lives, &[], &[flags[1]], &StepFate::default()).expect("the rank lives");
    backend.stream_take_flags(lives, &[], &[flags[0]], &StepFate::default()).expect_err("the rank is gone");
    backend.raise_signal(Signal { counter: flags[1], value: 1 }).expect("a counter");
    assert!(backend.fail_waits_again(), "the lost flag is looked after");
}

#[test]
fn a_counter_that_the_living_set_back_is_raised_again_until_it_is_freed() {
    let (backend, counters) = backend();
    let [waits, raises] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    assert!(!backend.fail_waits_again(), "nobody has gone");
    for value in [3, 5] {
        backend.stream_wait_signals(waits, &[Signal { counter: counters.base, value }], SignalWait::Operation).expect("enqueued");
    }
    backend.fail_waits(&counters, None, PEER);
    // Another process that increments the counter reaches 4 only now: the GPU may not have seen the earlier value 5.
    backend.stream_raise_signals(raises, &[Signal { counter: counters.base, value: 4 }]).expect("enqueued");
    assert_eq!(backend.read_signal(counters.base).expect("a counter"), 4);
    assert!(backend.fail_waits_again());
    assert_eq!(backend.read_signal(counters.base).expect("a counter"), 5, "a GPU that waits would wait for ever");
    backend.stream_raise_signals(raises, &[Signal { counter: counters.base, value: 6 }]).expect("enqueued");
    assert!(backend.fail_waits_again());
    assert_eq!(backend.read_signal(counters.base).expect("a counter"), 6, "what is beyond what was waited for stays");
    told(backend.synchronize_stream(waits));
    backend.free(counters.base).expect("allocated");
    assert!(!backend.fail_waits_again(), "freed memory is looked after");
}

#[test]
fn default_streams_of_two_gpus_are_two() {
    let (backend, counters) = backend();
    let core = &backend.0;
    let current = |gpu: usize| core.gpus.primary(gpu).expect("a GPU").enter().expect("current");
    {
        let _current = current(0);
        let wanted = Signal { counter: counters.base, value: 1 };
        backend.stream_wait_signals(StreamHandle(0), &[wanted], SignalWait::Operation).expect("enqueued");
    }
    backend.fail_waits(&counters, None, PEER);
    {
        let _current = current(1);
        backend.synchronize_stream(StreamHandle(0)).expect("it waits for nobody");
    }
    let _current = current(0);
    told(backend.synchronize_stream(StreamHandle(0)));
    backend.synchronize_stream(StreamHandle(0)).expect("it was told");
}

#[test]
fn a_wait_that_nobody_will_satisfy_is_refused_and_what_is_reached_is_not() {
    let (backend, counters) = backend();
    let stream = backend.create_stream(GPU0).expect("a stream");
    backend.stream_raise_signals(stream, &[Signal { counter: counters.base, value: 2 }]).expect("enqueued");
    backend.fail_waits(&counters, None, PEER);
    backend.synchronize_stream(stream).expect("nothing was waited for in vain");
    let enqueued = calls("cuStreamBatchMemOp");
    let reached = Signal { counter: counters.base, value: 2 };
    told(backend.stream_wait_signals(stream, &[reached, Signal { counter: counters.base + 8, value: 1 }], SignalWait::Operation));
    assert_eq!(calls("cuStreamBatchMemOp"), enqueued, "something was enqueued");
    backend.synchronize_stream(stream).expect("the caller has been told by the refusal");
    backend.stream_wait_signals(stream, &[reached], SignalWait::Operation).expect("enqueued");
    backend.synchronize_stream(stream).expect("nothing was waited for in vain");
}

#[test]
fn a_captured_wait_whose_counter_is_set_back_between_launches_is_not_forgotten() {
    let (backend, counters) = backend();
    let [waits, raises] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    let raise = |value| backend.stream_raise_signals(raises, &[Signal { counter: counters.base, value }]).expect("enqueued");
    let now = || backend.read_signal(counters.base).expect("a counter");
    double::node(|node| node.capturing = true);
    for value in [1, 3, 2] {
        backend.stream_wait_signals(waits, &[Signal { counter: counters.base, value }], SignalWait::Operation).expect("captured");
    }
    double::node(|node| node.capturing = false);
    // The graph has run. A later wait then checks the pending waits, and the program prepares the next launch.
    raise(3);
    backend.stream_wait_signals(waits, &[Signal { counter: counters.base + 8, value: 0 }], SignalWait::Operation).expect("reached");
    raise(0);
    backend.fail_waits(&counters, None, PEER);
    assert_eq!(now(), 3, "a launch of the graph would wait for ever");
    told(backend.synchronize_stream(waits));
    // The same must hold for each later launch.
    raise(0);
    assert!(backend.fail_waits_again());
    assert_eq!(now(), 3, "the next launch of the graph would wait for ever");
    double::node(|node| node.capturing = true);
    let again = Signal { counter: counters.base, value: 1 };
    assert!(matches!(backend.stream_wait_signals(waits, &[again], SignalWait::Operation), Err(BackendError::PeerGone(_))));
    double::node(|node| node.capturing = false);
    backend.free(counters.base).expect("allocated");
    assert!(!backend.fail_waits_again(), "freed memory is looked after");
}

#[test]
fn a_captured_wait_that_is_reached_when_the_peer_ends_is_looked_after_and_told_of_when_it_is_in_vain() {
    let (backend, counters) = backend();
    let [waits, raises] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    let raise = |value| backend.stream_raise_signals(raises, &[Signal { counter: counters.base, value }]).expect("enqueued");
    double::node(|node| node.capturing = true);
    backend.stream_wait_signals(waits, &[Signal { counter: counters.base, value: 1 }], SignalWait::Operation).expect("captured");
    double::node(|node| node.capturing = false);
    raise(1);
    backend.fail_waits(&counters, None, PEER);
    backend.synchronize_stream(waits).expect("nothing was waited for in vain");
    assert!(backend.fail_waits_again());
    backend.synchronize_stream(waits).expect("nothing was waited for in vain");
    raise(0);
    assert!(backend.fail_waits_again());
    assert_eq!(backend.read_signal(counters.base).expect("a counter"), 1);
    told(backend.synchronize_stream(waits));
}

#[test]
fn a_small_part_of_a_step_is_one_launch_of_the_streams_own_gpu() {
    for (driver, launch) in [(double::whole(), "cuLaunchKernel"), (double::whole_with_early_launches(), "cuLaunchKernelEx")] {
        double::start(2, true);
        let backend = CudaBackend::on(driver, 1).expect("the double has GPUs");
        let address = backend.allocate_shared(DeviceId::HOST, 64).expect("memory");
        let page = Page::new(&backend);
        let [own, other] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
        let actions = [Action::Raise(address), Action::Take { flag: address + 8, blocks: 1 }, Action::Copy(0), Action::Order]
            .map(|action| action.segment(&page.endpoints, &page.program.transfers));
        let launches = || ["cuLaunchKernel", "cuLaunchKernelEx"].map(calls);
        let run = |stream, actions: &[Segment]| {
            let before = launches();
            let ran = backend.stream_run_actions(
                stream,
                GPU0,
                actions,
                ActionGrid { stop: address, ..ActionGrid::default() },
                &StepFate::default(),
            );
            let [plain, early] = launches();
            let all = plain + early - before.iter().sum::<u32>();
            assert_eq!(calls(launch), plain + early, "a driver that can brings it in early");
            (ran, all)
        };
        assert!(matches!(run(other, &actions), (Ok(false), 0)), "its lane is of another GPU");
        assert!(matches!(run(own, &[actions[3]; 121]), (Ok(false), 0)), "one launch takes 120");
        for actions in [&actions[..], &[actions[3]; 120]] {
            let ran = run(own, actions);
            assert!(matches!(ran, (Ok(true), 1)), "{ran:?}");
        }
        assert_eq!(calls("cuStreamBatchMemOp"), 0, "the kernel waits in place of the stream");
    }
}

#[test]
fn waits_of_a_kernel_for_flags_on_its_gpu_end_by_a_word_in_host_memory_and_are_told_as_others_are() {
    double::start(2, true);
    let backend = CudaBackend::on(double::whole_with_chunks(), 1).expect("the double has GPUs");
    let host = backend.allocate_shared(DeviceId::HOST, 64).expect("memory");
    let [own, theirs] = [GPU0, GPU1].map(|gpu| backend.allocate_shared(gpu, 64).expect("memory"));
    let page = Page::new(&backend);
    let [stream, other] = [GPU0, GPU1].map(|gpu| backend.create_stream(gpu).expect("a stream"));
    let actions = [
        Action::Raise(theirs),
        Action::Take { flag: own, blocks: 1 },
        Action::Copy(0),
        Action::Raise(theirs + 8),
        Action::Take { flag: own + 8, blocks: 1 },
    ]
    .map(|action| action.segment(&page.endpoints, &page.program.transfers));
    let (fate, told_of) = (StepFate::default(), Arc::new(Mutex::new(Vec::new())));
    let tells = Arc::clone(&told_of);
    fate.on_abandon(move |steps| tells.lock().expect("no panic").push(steps));
    let run = || backend.stream_run_actions(stream, GPU0, &actions, ActionGrid { stop: host, ..ActionGrid::default() }, &fate);
    assert!(matches!(run(), Ok(true)));
    backend.synchronize_stream(stream).expect("nobody has gone");
    assert!(matches!(run(), Ok(true)));
    assert!(!fate.is_abandoned());
    for _ in 0..2 {
        backend.fail_waits(&backend.locate(host).expect("known").expect("its own"), None, PEER);
    }
    assert_eq!(*told_of.lock().expect("no panic"), [Abandoned::OfKernels], "other ranks are told, once, before the caller looks");
    let now = [host, host + 8].map(|word| backend.read_signal(word).expect("a word"));
    assert_eq!(now, [1, 0], "the word ends all waits, and flags are left to ranks");
    told(backend.synchronize_stream(stream));
    backend.synchronize_stream(other).expect("it waits for nobody");
    assert!(matches!(run(), Err(BackendError::PeerGone(_))), "it would wait in vain");
}

#[test]
fn kernels_that_wait_are_told_by_their_counter_until_its_memory_is_freed() {
    let (backend, counters) = backend();
    let stream = backend.create_stream(GPU0).expect("a stream");
    let gone = Signal { counter: counters.base, value: 1 << 40 };
    backend.kernel_wait_signals(&[gone], false).expect("entered");
    backend.kernel_wait_signals(&[gone], false).expect("once more");
    backend.raise_signal(Signal { value: 7, ..gone }).expect("a counter");
    backend.synchronize_stream(stream).expect("nobody has gone");
    backend.fail_waits(&counters, None, PEER);
    assert_eq!(backend.read_signal(gone.counter).expect("a counter"), gone.value, "a kernel that waits would wait for ever");
    told(backend.synchronize_stream(stream));
    told(backend.kernel_wait_signals(&[gone], false));
    // Another process has not detected the loss, and the kernel has already waited for the message of that process.
    backend.raise_signal(Signal { value: 8, ..gone }).expect("a counter");
    assert!(backend.fail_waits_again());
    assert_eq!(backend.read_signal(gone.counter).expect("a counter"), gone.value);
    backend.free(counters.base).expect("allocated");
    assert!(!backend.fail_waits_again(), "freed memory is looked after");
    assert!(backend.kernel_wait_signals(&[gone], false).is_err(), "no memory that the CPU reaches");
}
