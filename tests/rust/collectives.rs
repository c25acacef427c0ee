//! Tests collective calls. An error on one rank, however it is detected, fails the call on all ranks. Two different calls never match.

use crate::node::*;
use crate::node_plans::{self, as_ranks, end, memory};
use mpgpu::abi::*;
use mpgpu_contexts::{Error, PlanOptions};
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::message::MessengerOptions;
use mpgpu_ranks::{Agent, Allgather, NodeGroup, NodeTransfer, Partitioning, Window};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Allgather function for the C ABI. Its argument `user` points to a `Box<dyn Allgather>`.
unsafe extern "C" fn gather(user: *mut c_void, send: *const c_void, receive: *mut c_void, bytes: usize) -> i32 {
    const RANKS: usize = 2;
    // SAFETY: the tests pass this type, and the library guarantees the buffers.
    unsafe {
        let seat = &mut *user.cast::<Box<dyn Allgather>>();
        let send = std::slice::from_raw_parts(send.cast::<u8>(), bytes);
        let receive = std::slice::from_raw_parts_mut(receive.cast::<u8>(), RANKS * bytes);
        i32::from(seat.allgather(send, receive).is_err())
    }
}

unsafe extern "C" fn no_producer(_: *mut c_void, _: *const mp_trigger_t, _: usize, _: mp_stream_t) -> i32 {
    0
}

/// One of two ranks, used through the C ABI.
struct Rank {
    rank: u32,
    context: Node,
    node: mp_node_t,
    _seat: Box<Box<dyn Allgather>>,
}

fn node_options() -> mp_node_options_t {
    mp_node_options_t { size: size_of::<mp_node_options_t>(), devices: null(), device_count: 0, socket: null(), failure: null() }
}

impl Rank {
    fn new(rank: u32, seat: Box<dyn Allgather>) -> Rank {
        let (context, mut seat, mut node) = (Node::new(c"beluga"), Box::new(seat), null_mut());
        let user: *mut Box<dyn Allgather> = &mut *seat;
        // SAFETY: all pointers are valid for the call, and the seat for as long as the node.
        ok(unsafe { mp_node_create(context.context, rank, 2, Some(gather), user.cast(), null(), &mut node) });
        Rank { rank, context, node, _seat: seat }
    }

    fn array(&self) -> *mut u8 {
        let array = self.context.alloc(self.rank as i32, 64);
        // SAFETY: new memory of this size.
        unsafe { array.write_bytes(0xEE, 64) };
        array
    }

    /// Plans a copy of 64 bytes from the array of rank 0 to that of rank 1.
    fn plan(&self, array: *mut u8, options: *const mp_plan_options_t) -> (mp_status_t, mp_plan_t) {
        let (window, mut plan) = (mp_window_t { memory: array.cast(), bytes: 64 }, null_mut());
        let [src, dst] = [0, 1].map(|rank| mp_node_end_t { rank, window: 0, offset: 0 });
        let count = usize::from(self.rank == 0);
        // SAFETY: all pointers are valid for the call.
        let status =
            unsafe { mp_node_plan(self.node, &window, 1, &mp_node_transfer_t { dst, src, bytes: 64 }, count, null(), options, &mut plan) };
        (status, plan)
    }

    fn is_told(&self, status: mp_status_t, argument: &str, reason: &str) {
        if self.rank == 1 {
            let message = refused(status, MP_ERROR_INVALID_ARGUMENT);
            assert_eq!((last_argument().as_deref(), message.contains(reason)), (Some(argument), true), "{message}");
        } else {
            let message = refused(status, MP_ERROR_RANK_FAILED);
            assert!(message.starts_with("rank 1: ") && message.contains(reason), "{message}");
        }
    }
}

/// Collective call whose arguments are wrong on rank 1 if `is_wrong` is set, and right on rank 0.
type OneWrong = unsafe fn(node: mp_node_t, is_wrong: bool) -> mp_status_t;

/// Errors that the C functions detect: the call, the name of the wrong argument, and the reason in the message.
const REFUSED: [(OneWrong, &str, &str); 12] = [
    (
        |node, is_wrong| {
            let options = mp_plan_options_t { engine: if is_wrong { 99 } else { 0 }, ..plan_options() };
            // SAFETY: in this array the pointers are valid, or refused.
            unsafe { mp_node_plan(node, null(), 0, null(), 0, null(), &options, &mut null_mut()) }
        },
        "engine",
        "engine=99",
    ),
    (
        |node, is_wrong| {
            let options = mp_plan_options_t { size: if is_wrong { 1 } else { size_of::<mp_plan_options_t>() }, ..plan_options() };
            // SAFETY: as above.
            unsafe { mp_node_plan(node, null(), 0, null(), 0, null(), &options, &mut null_mut()) }
        },
        "options",
        "options->size is 1",
    ),
    // SAFETY: as above.
    (|n, wrong| unsafe { mp_node_plan(n, null(), wrong.into(), null(), 0, null(), null(), &mut null_mut()) }, "windows", "windows is NULL"),
    (
        // SAFETY: as above.
        |n, wrong| unsafe { mp_node_plan(n, null(), 0, null(), wrong.into(), null(), null(), &mut null_mut()) },
        "transfers",
        "transfers is NULL",
    ),
    (
        |node, is_wrong| {
            let mut plan = null_mut();
            // SAFETY: as above.
            unsafe { mp_node_plan(node, null(), 0, null(), 0, null(), null(), if is_wrong { null_mut() } else { &mut plan }) }
        },
        "plan",
        "plan is NULL",
    ),
    (
        |node, is_wrong| {
            let options = partition_options(if is_wrong { 9 } else { 0 });
            // SAFETY: as above.
            unsafe { mp_node_plan(node, null(), 0, null(), 0, &options, null(), &mut null_mut()) }
        },
        "agent",
        "agent=9",
    ),
    (
        |node, is_wrong| {
            let options = mp_partition_options_t { count: if is_wrong { u32::MAX } else { 0 }, ..partition_options(0) };
            // SAFETY: as above.
            unsafe { mp_node_plan(node, null(), 0, null(), 0, &options, null(), &mut null_mut()) }
        },
        "options",
        "count=4294967295",
    ),
    (
        |node, is_wrong| {
            let (tuning, mut best) = (partition_tuning(if is_wrong { 1 << 9 } else { 0 }), partition_options(0));
            let produce: mp_produce_t = Some(no_producer);
            // SAFETY: as above.
            unsafe { mp_node_tune_partitions(node, null(), 0, null(), 0, produce, null_mut(), &tuning, null(), &mut best) }
        },
        "agents",
        "agents=0x200",
    ),
    (
        |node, is_wrong| {
            let mut best = partition_options(0);
            let produce: mp_produce_t = if is_wrong { None } else { Some(no_producer) };
            // SAFETY: as above.
            unsafe { mp_node_tune_partitions(node, null(), 0, null(), 0, produce, null_mut(), null(), null(), &mut best) }
        },
        "produce",
        "produce is NULL",
    ),
    (
        |node, is_wrong| {
            let size = if is_wrong { 3 } else { size_of::<mp_messenger_options_t>() };
            let options = mp_messenger_options_t { size, operations: 8, messages: 8 };
            // SAFETY: as above.
            unsafe { mp_messenger_create(node, &options, &mut null_mut()) }
        },
        "options",
        "options->size is 3",
    ),
    (
        |node, is_wrong| {
            let operations = if is_wrong { 1 << 30 } else { 8 };
            let options = mp_messenger_options_t { size: size_of::<mp_messenger_options_t>(), operations, messages: 8 };
            // SAFETY: as above.
            unsafe { mp_messenger_create(node, &options, &mut null_mut()) }
        },
        "options",
        "operations=1073741824",
    ),
    (
        |node, is_wrong| {
            let mut messenger = null_mut();
            // SAFETY: as above.
            unsafe { mp_messenger_create(node, null(), if is_wrong { null_mut() } else { &mut messenger }) }
        },
        "messenger",
        "messenger is NULL",
    ),
];

#[test]
fn what_is_refused_on_one_rank_meets_no_other_call_of_the_others() {
    as_ranks(2, |rank, seat| {
        let rank = Rank::new(rank, seat);
        for (call, argument, reason) in REFUSED {
            // SAFETY: the calls are described above.
            rank.is_told(unsafe { call(rank.node, rank.rank == 1) }, argument, reason);
            // After the error, the next calls of both ranks match, and the data arrives in the right memory.
            let (refused, array) = (rank.array(), rank.array());
            let engine = mp_plan_options_t { engine: if rank.rank == 1 { 99 } else { 0 }, ..plan_options() };
            rank.is_told(rank.plan(refused, &engine).0, "engine", "engine=99");
            let (status, plan) = rank.plan(array, null());
            ok(status);
            if rank.rank == 0 {
                memory(array.addr() as u64, 64).fill(7);
            }
            rank.context.run(plan);
            ok(mp_plan_destroy(plan));
            let fill = |array: *mut u8| memory(array.addr() as u64, 64)[0];
            assert_eq!((fill(array), fill(refused)), (7, 0xEE), "{reason}");
            [refused, array].into_iter().for_each(|array| rank.context.free(array));
        }
        // A rank that cannot make the call at all reports the reason to the others.
        let status = match rank.rank {
            0 => rank.plan(null_mut(), null()).0,
            // SAFETY: a valid string.
            _ => unsafe { mp_node_fail(rank.node, c"it has no memory".as_ptr()) },
        };
        match rank.rank {
            0 => assert_eq!(refused(status, MP_ERROR_RANK_FAILED), "rank 1: it has no memory"),
            _ => ok(status),
        }
        ok(mp_node_destroy(rank.node));
    });
}

#[test]
fn a_rank_that_cannot_make_a_node_tells_the_others_why() {
    type Spoil = fn(&mut mp_context_t, &mut mp_node_options_t, &mut *mut mp_node_t);
    let spoils: [(Spoil, mp_status_t, &str); 6] = [
        (|context, _, _| *context = null_mut(), MP_ERROR_INVALID_HANDLE, "context is NULL"),
        (|_, options, _| options.size = 1, MP_ERROR_INVALID_ARGUMENT, "options->size is 1"),
        (|_, options, _| options.device_count = 1, MP_ERROR_INVALID_ARGUMENT, "devices is NULL"),
        (|_, options, _| options.socket = c"\xFF".as_ptr(), MP_ERROR_INVALID_ARGUMENT, "is not valid UTF-8"),
        (|_, options, _| options.failure = c"no GPU is free".as_ptr(), MP_ERROR_INVALID_ARGUMENT, "no GPU is free"),
        (|_, _, out| *out = null_mut(), MP_ERROR_INVALID_ARGUMENT, "node is NULL"),
    ];
    let path = crate::meeting::free_path("tells");
    for by_socket in [false, true] {
        as_ranks(2, |rank, seat| {
            let (context, mut seat) = (Node::new(c"beluga"), seat);
            for (spoil, status, reason) in &spoils {
                if by_socket && (reason.contains("size") || reason.contains("UTF-8")) {
                    // Without these arguments the other ranks cannot be notified.
                    continue;
                }
                let (mut handle, mut options, mut node) = (context.context, node_options(), null_mut());
                let mut out: *mut mp_node_t = &mut node;
                let socket = std::ffi::CString::new(path.to_str().expect("text")).expect("no NUL");
                options.socket = if by_socket { socket.as_ptr() } else { null() };
                if rank == 1 {
                    spoil(&mut handle, &mut options, &mut out);
                }
                let (user, function): (*mut Box<dyn Allgather>, mp_allgather_t) = (&mut seat, if by_socket { None } else { Some(gather) });
                // SAFETY: all pointers are valid for the call, or refused.
                let said = unsafe { mp_node_create(handle, rank, 2, function, user.cast(), &options, out) };
                let (expected, text) = if rank == 1 { (*status, "") } else { (MP_ERROR_RANK_FAILED, "rank 1: ") };
                let message = refused(said, expected);
                assert!(message.starts_with(text) && message.contains(reason), "{message}");
                assert!(node.is_null(), "an output was written");
            }
        });
    }
}

fn node(rank: u32, seat: Box<dyn Allgather>) -> Arc<NodeGroup> {
    Arc::new(NodeGroup::new(&node_plans::context("beluga", Some(vec![rank])), rank, 2, seat, &[]).expect("a node"))
}

fn plan(node: &Arc<NodeGroup>) -> Result<(), Error> {
    node.plan(&[], &[], &PlanOptions::default())?.destroy()
}

#[test]
fn ranks_in_different_calls_are_told_both_and_go_on_with_the_next() {
    let options = MessengerOptions { operations: 8, messages: 8 };
    as_ranks(2, |rank, seat| {
        let node = node(rank, seat);
        let error = if rank == 0 { plan(&node).expect_err("another call") } else { node.messenger(options).expect_err("another call") };
        let own = ["node plan creation", "messenger creation"];
        let expected = format!(
            "rank {}: the rank is in {}, its collective call number 1, but this rank is in {}, its collective call number 1",
            1 - rank,
            own[1 - rank as usize],
            own[rank as usize]
        );
        assert!(matches!(error, Error::RankFailed { .. }) && error.to_string().starts_with(&expected), "{error}");
        plan(&node).expect("the same call");
        // A plan with partitions is a different call from a plan without.
        let partitioning = Partitioning { count: None, agent: Agent::Auto { tells: true, stores: false } };
        let error = node.plan_partitioned(&[], &[], (rank == 1).then_some(partitioning), &PlanOptions::default()).map(drop);
        let error = error.expect_err("another call").to_string();
        let kinds =
            ["node plan creation, its collective call number 3", "node plan creation with partitions, its collective call number 3"];
        assert!(kinds.iter().all(|kind| error.contains(kind)), "{error}");
        // The error names the options that differ. On the rank with different options, they are named as that rank's own.
        let unlike = MessengerOptions { operations: 8 + rank, messages: 8 };
        let error = node.messenger(unlike).expect_err("other options");
        let expected = "operations=9, but rank 0 has operations=8: pass the same options and set the same MPGPU_* variables on all ranks";
        assert_eq!(error.to_string(), if rank == 1 { expected.into() } else { format!("rank 1: {expected}") });
        assert_eq!(matches!(error, Error::NodeArgument { .. }), rank == 1);
        node.messenger(options).expect("the same call").destroy().expect("it ends");
    });
}

/// Allgathers of other language bindings, and those of programs, are numbered in the same sequence as other collective calls.
#[test]
fn an_allgather_that_meets_another_call_is_an_error_on_all_ranks() {
    as_ranks(2, |rank, seat| {
        let rank = Rank::new(rank, seat);
        let own = [rank.rank as u8 + 1; 3];
        let gathered = |name: &std::ffi::CStr, bytes: usize| {
            let mut all = [0_u8; 6];
            // SAFETY: all pointers are valid for the call.
            (unsafe { mp_node_allgather(rank.node, name.as_ptr(), own.as_ptr().cast(), all.as_mut_ptr().cast(), bytes) }, all)
        };
        let exchange = |bytes| gathered(c"node::exchange", bytes);
        let expect = |status, text: &str| {
            let message = refused(status, MP_ERROR_RANK_FAILED);
            assert!(message.contains(text), "{message}");
        };
        let array = rank.array();
        let names = ["node::exchange", "node plan creation"];
        let mine = if rank.rank == 0 { exchange(3).0 } else { rank.plan(array, null()).0 };
        let other = 1 - rank.rank as usize;
        expect(
            mine,
            &format!(
                "rank {other}: the rank is in {}, its collective call number 1, but this rank is in {}",
                names[other],
                names[1 - other]
            ),
        );
        let of_each = [c"node::exchange", c"node::device_of_each"][rank.rank as usize];
        expect(gathered(of_each, 3).0, "the rank is in node::");
        // An error of one rank, and refused arguments, fail the call on all ranks. Equal calls match afterwards.
        let failed = if rank.rank == 0 {
            exchange(3).0
        } else {
            // SAFETY: as above.
            unsafe { mp_node_allgather(rank.node, c"".as_ptr(), null(), null_mut(), 3) }
        };
        assert_ne!(failed, MP_SUCCESS);
        rank.is_told(exchange(3 - rank.rank as usize).0, "bytes", "the rank passes 2 bytes, but rank 0 passes 3");
        let (status, all) = exchange(3);
        ok(status);
        assert_eq!(all, [1, 1, 1, 2, 2, 2]);
        ok(exchange(0).0);
        let (status, plan) = rank.plan(array, null());
        ok(status);
        ok(mp_plan_destroy(plan));
    });
}

/// Allgather that two nodes share.
struct Shared(Arc<Mutex<Box<dyn Allgather>>>);

impl Allgather for Shared {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        self.0.lock().expect("no panic").allgather(send, receive)
    }
}

#[test]
fn calls_on_two_nodes_of_one_allgather_do_not_meet() {
    as_ranks(2, |rank, seat| {
        let seat = Arc::new(Mutex::new(seat));
        let nodes = [0, 1].map(|_| node(rank, Box::new(Shared(seat.clone()))));
        for turn in 0..2 {
            let error = plan(&nodes[(rank as usize + turn) % 2]).expect_err("another node").to_string();
            assert!(error.contains("node plan creation of another node object"), "{error}");
        }
        nodes.iter().for_each(|node| plan(node).expect("in one order"));
    });
}

/// Allgather function that fails once, and only on this rank, after the other ranks have received its data.
struct FailsOnce(Box<dyn Allgather>, Arc<AtomicUsize>);

impl Allgather for FailsOnce {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        self.0.allgather(send, receive)?;
        let was = self.1.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if was == Ok(1) { Err("the network is down".into()) } else { Ok(()) }
    }
}

#[test]
fn a_rank_whose_allgather_has_failed_meets_no_earlier_call_of_the_others() {
    as_ranks(2, |rank, seat| {
        let fails_at = Arc::new(AtomicUsize::new(0));
        let node = node(rank, Box::new(FailsOnce(seat, fails_at.clone())));
        // In each call, a rank first exchanges its status and then its data.
        fails_at.store(if rank == 0 { 2 } else { 0 }, Ordering::SeqCst);
        let window = |address| [Window { address, bytes: 64 }];
        let [first, second] = [0, 1].map(|_| node.context().allocate(DeviceId::gpu(0), 64).expect("memory"));
        let transfer = [NodeTransfer { dst: end(1, 0, 0), src: end(0, 0, 0), bytes: 64 }];
        let mine: &[NodeTransfer] = if rank == 0 { &transfer } else { &[] };
        let plan = |address| node.plan(&window(address), mine, &PlanOptions::default()).map(drop);
        let error = plan(first).expect_err("it has failed");
        assert_eq!(matches!(error, Error::Allgather(_)), rank == 0, "{error}");
        if rank == 1 {
            assert!(
                error.to_string().contains(
                    "node plan creation, its collective call number 2, but this rank is in node plan creation, its collective \
                               call number 1"
                ),
                "{error}"
            );
            // The second call of this rank meets the third call of rank 0, because rank 0 has made one more call.
            let error = plan(second).expect_err("out of step").to_string();
            assert!(
                error.contains("its collective call number 3, but this rank is in node plan creation, its collective call number 2"),
                "{error}"
            );
        } else {
            for _ in 0..2 {
                assert!(matches!(plan(second).expect_err("out of step"), Error::RankFailed { rank: 1, .. }));
            }
        }
    });
}

/// Waits until a thread is asleep.
fn await_sleep(thread: &AtomicI32) {
    loop {
        let number = thread.load(Ordering::SeqCst);
        let stat = std::fs::read_to_string(format!("/proc/self/task/{number}/stat")).unwrap_or_default();
        if number != 0 && stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S')) {
            return;
        }
        std::thread::yield_now();
    }
}

/// Allgather function that can be made to wait, in its next call, until a second thread sleeps.
struct Held(Box<dyn Allgather>, Arc<AtomicI32>, Arc<AtomicUsize>);

impl Allgather for Held {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        // The value 1 means that a thread is in the call and that the other thread may enter.
        if self.2.compare_exchange(1, 2, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            await_sleep(&self.1);
        }
        self.0.allgather(send, receive)
    }
}

#[test]
fn threads_that_plan_at_once_are_told_so_on_all_ranks() {
    as_ranks(2, |rank, seat| {
        let (thread, stage) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicUsize::new(0)));
        let node = node(rank, Box::new(Held(seat, thread.clone(), stage.clone())));
        let mut errors = Vec::new();
        if rank == 0 {
            stage.store(1, Ordering::SeqCst);
            std::thread::scope(|scope| {
                let first = scope.spawn(|| plan(&node));
                let second = scope.spawn(|| {
                    while stage.load(Ordering::SeqCst) < 2 {
                        std::thread::yield_now();
                    }
                    thread.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::SeqCst);
                    plan(&node)
                });
                errors.extend([first, second].map(|thread| thread.join().expect("no panic").expect_err("two at once")));
            });
        } else {
            errors.extend([0, 1].map(|_| plan(&node).expect_err("two at once")));
        }
        for error in errors {
            assert_eq!(matches!(error, Error::NodeArgument { .. }), rank == 0, "{error}");
            assert!(error.to_string().contains("two threads of this rank are in collective calls on one node at the same time"), "{error}");
        }
        plan(&node).expect("one after another");
    });
}

/// Data for a callback that itself calls the library.
struct Within {
    node: mp_node_t,
    message: Option<String>,
}

unsafe extern "C" fn plans_within(user: *mut c_void, send: *const c_void, receive: *mut c_void, bytes: usize) -> i32 {
    // SAFETY: the test passes this type, and the library guarantees the buffers of one rank.
    let within = unsafe {
        std::ptr::copy_nonoverlapping(send.cast::<u8>(), receive.cast(), bytes);
        &mut *user.cast::<Within>()
    };
    if within.node.is_null() {
        return 0;
    }
    // SAFETY: the output is valid for the call.
    let status = unsafe { mp_node_plan(within.node, null(), 0, null(), 0, null(), null(), &mut null_mut()) };
    within.message = Some(refused(status, MP_ERROR_INVALID_ARGUMENT));
    1
}

#[test]
fn a_call_within_the_allgather_of_its_own_node_is_refused() {
    let context = Node::new(c"beluga");
    let mut within = Within { node: null_mut(), message: None };
    let (user, mut node): (*mut Within, _) = (&mut within, null_mut());
    // SAFETY: all pointers are valid for the calls.
    unsafe {
        ok(mp_node_create(context.context, 0, 1, Some(plans_within), user.cast(), null(), &mut node));
        (*user).node = node;
        let status = mp_node_plan(node, null(), 0, null(), 0, null(), null(), &mut null_mut());
        refused(status, MP_ERROR_ALLGATHER);
        let message = (*user).message.take().expect("it was called");
        assert!(
            message.starts_with("node plan creation was started by a callback during node plan creation on the same node object"),
            "{message}"
        );
        (*user).node = null_mut();
        ok(mp_node_plan(node, null(), 0, null(), 0, null(), null(), &mut null_mut()));
    }
    ok(mp_node_destroy(node));
}

/// Allgather function in which the other rank announces a number of bytes, sends some of them, and exits.
struct Boasts {
    bytes: u64,
    most: Arc<AtomicUsize>,
    calls: usize,
}

impl Allgather for Boasts {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        self.most.fetch_max(receive.len(), Ordering::SeqCst);
        self.calls += 1;
        if self.calls == 4 {
            return Err("it has gone".into());
        }
        let (own, other) = receive.split_at_mut(send.len());
        own.copy_from_slice(send);
        other.copy_from_slice(send);
        if self.calls == 1 {
            // The last word of each rank's first message is its number of bytes.
            let last = other.len() - 8;
            other[last..].copy_from_slice(&self.bytes.to_le_bytes());
        }
        Ok(())
    }
}

#[test]
fn what_another_rank_says_of_its_size_is_not_believed() {
    for (bytes, expected) in
        [(1 << 29, "it has gone"), (1 << 31, "the descriptions of the transfers"), (u64::MAX, "the descriptions of the transfers")]
    {
        let most = Arc::new(AtomicUsize::new(0));
        let seat = Box::new(Boasts { bytes, most: most.clone(), calls: 0 });
        let error = NodeGroup::new(&node_plans::context("beluga", None), 0, 2, seat, &[]).expect_err("it is none").to_string();
        assert!(error.contains(expected), "{error}");
        assert!(most.load(Ordering::SeqCst) <= 4 << 20, "{bytes} bytes were believed");
    }
}
