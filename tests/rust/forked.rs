//! Tests that calls of the library in a child of `fork` are harmless to the child and to its parent. The child has only a copy of the
//! library's memory.

use crate::node::*;
use crate::peer::*;
use mpgpu::abi::*;
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions};
use std::io::{Read, Write};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

/// Objects of the library that a process creates before it forks.
struct Made {
    context: mp_context_t,
    plan: mp_plan_t,
    request: mp_request_t,
    stream: mp_stream_t,
    event: mp_event_t,
    memory: *mut u8,
    rust: Option<Context>,
}

/// Uses the parent's objects in a child process. Returns 0, or the number of the check that failed. It prints nothing, because it must not
/// acquire a lock that another thread of the parent may have held.
fn inherited(mut made: Made) -> i32 {
    let refused =
        |status: mp_status_t| status == MP_ERROR_INVALID_HANDLE && last_error().contains("child of fork") && last_error().contains("exec");
    let (mut pointer, mut request, mut done, mut statistics) = (null_mut(), made.request, 0, statistics());
    let mut handle = mp_memory_handle_t { bytes: [0; 128] };
    let (mut file, mut bytes) = (null(), 0);
    let wanted = mp_signal_t { counter: made.memory.cast(), value: 1 };
    // SAFETY: all outputs are valid for the calls. The other arguments are under test.
    let steps: Vec<bool> = unsafe {
        vec![
            refused(mp_execute(made.plan, made.stream, null_mut())),
            refused(mp_execute(made.plan, made.stream, &mut request)),
            refused(mp_wait(&mut request, null_mut())),
            refused(mp_test(&mut request, &mut done, null_mut())),
            refused(mp_context_statistics(made.context, &mut statistics)),
            refused(mp_alloc(made.context, 0, 8, &mut pointer)),
            refused(mp_free(made.context, made.memory.cast())),
            refused(mp_memory_export(made.context, made.memory.cast(), 8, &mut handle)),
            refused(mp_memory_import(made.context, &handle, MP_DEVICE_AUTO, &mut pointer, null_mut(), null_mut(), null_mut())),
            refused(mp_memory_close(made.context, made.memory.cast())),
            refused(mp_memory_register(made.context, made.memory.cast(), 8, 0)),
            refused(mp_memory_unregister(made.context, made.memory.cast())),
            refused(mp_file_map(made.context, 0, 0, &mut file, &mut bytes)),
            refused(mp_file_unmap(made.context, made.memory.cast())),
            refused(mp_stream_raise_signals(made.context, made.stream, &wanted, 1)),
            refused(mp_signal_synchronize(made.context, wanted.counter, 1, 0.0)),
            refused(mp_stream_synchronize(made.context, made.stream)),
            refused(mp_event_synchronize(made.context, made.event)),
            refused(mp_plan(made.context, null(), 0, null(), &mut made.plan.clone())),
            refused(mp_event_destroy(made.context, made.event)),
            refused(mp_stream_destroy(made.context, made.stream)),
            // Functions that C++ destructors call return no error.
            mp_request_destroy(&mut made.request) == MP_SUCCESS && made.request.is_null(),
            mp_plan_destroy(made.plan) == MP_SUCCESS,
            mp_context_destroy(made.context) == MP_SUCCESS,
            mp_context_destroy(made.context) == MP_SUCCESS,
        ]
    };
    if let Some(wrong) = steps.iter().position(|right| !right) {
        return wrong as i32 + 1;
    }
    drop(made.rust.take());
    // A new context in the child works, and is different from the parent's context.
    let own = Node::new(c"beluga");
    own.still_works();
    let memory = own.alloc(0, 4096);
    fill(memory, 4096, 1);
    let exported = export(&own, memory, 4096);
    let ours = import(&own, &exported) == memory && refused(mp_plan_destroy_twice(made.plan));
    drop(own);
    if ours { 0 } else { 99 }
}

/// Destroys a plan of the parent, and describes it afterwards. The first call returns no error, and the second call is refused.
fn mp_plan_destroy_twice(plan: mp_plan_t) -> mp_status_t {
    assert_eq!(mp_plan_destroy(plan), MP_SUCCESS);
    let mut length = 0;
    // SAFETY: the output is valid for the call.
    unsafe { mp_plan_describe(plan, 0, null_mut(), 0, &mut length) }
}

fn make(node: &Node) -> Made {
    let (memory, target) = (node.alloc(0, 4096), node.alloc(1, 4096));
    export(node, memory, 4096);
    let plan = node.plan(&[transfer(target, 1, memory, 0, 4096)]);
    let (mut request, mut event) = (null_mut(), null_mut());
    // SAFETY: the outputs are valid for the calls.
    unsafe {
        ok(mp_execute(plan, null_mut(), &mut request));
        ok(mp_event_create(node.context, &mut event));
    }
    let options = ContextOptions { backend: Some(BackendChoice::Host), ..ContextOptions::default() };
    let rust = Context::open(&options, Config::default()).expect("a context");
    Made { context: node.context, plan, request, stream: node.stream(0), event, memory, rust: Some(rust) }
}

/// Forks and runs `work` in the child. Returns the exit code of the child, or minus the number of the signal that ended it. Kills a child
/// that has not ended within a minute.
fn forked(work: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls the library, the allocator, which may be used after `fork`, and `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or(100);
        // SAFETY: ends the process.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork");
    let (started, mut status) = (Instant::now(), 0);
    loop {
        // SAFETY: the output is valid for the call.
        if unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == child {
            break if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) };
        }
        if started.elapsed() > Duration::from_secs(60) {
            // SAFETY: a child of this process that has not been waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Order of the peer protocol: forks a child that uses all objects of its parent.
pub fn fork_once(node: &Node) -> i32 {
    let made = make(node);
    let code = forked(|| inherited(made));
    node.still_works();
    code
}

/// Order of the peer protocol: forks several times while other threads use the library.
pub fn fork_under_load(node: &Node, rounds: usize) -> Vec<i32> {
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let (memory, target) = (node.alloc(0, 64), node.alloc(1, 64));
                    export(node, memory, 64);
                    let plan = node.plan(&[transfer(target, 1, memory, 0, 64)]);
                    node.run(plan);
                    ok(mp_plan_destroy(plan));
                    node.free(memory);
                    node.free(target);
                }
            });
        }
        let codes = (0..rounds).map(|_| {
            let mut made = make(node);
            // Only this process uses these objects. Without them the rounds are short.
            drop(made.rust.take());
            forked(|| inherited(made))
        });
        let codes = codes.collect();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        codes
    })
}

/// Order of the peer protocol: forks a child that does nothing, and returns its process ID once it runs. In the parent, `fork` returns
/// before the child runs, and therefore before the child has closed inherited descriptors.
pub fn linger() -> i32 {
    let (mut ready, mut there) = std::io::pipe().expect("a pipe");
    // SAFETY: the child writes a byte and waits for signals.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let _ = there.write(&[0]);
        loop {
            // SAFETY: no argument.
            unsafe { libc::pause() };
        }
    }
    drop(there);
    ready.read_exact(&mut [0]).expect("the child runs");
    child
}

/// Returns the processor time in ns that was used by the thread that answers importers.
pub fn service_time() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs").flatten();
    let ours = tasks
        .map(|task| task.path())
        .filter(|task| std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == "mpgpu-share"));
    let times = ours.map(|task| std::fs::read_to_string(task.join("schedstat")).expect("procfs"));
    times.map(|text| text.split(' ').next().expect("three numbers").parse::<u64>().expect("a number")).sum()
}

#[test]
fn a_child_destroys_what_it_inherits_in_silence_and_is_refused_the_rest() {
    let mut parent = Peer::start();
    assert_eq!(parent.tell("fork"), "0");
    // The child must not cause work in the parent.
    let before: u64 = parent.tell("service").parse().expect("a number");
    let started = Instant::now();
    std::thread::sleep(Duration::from_millis(300));
    let after: u64 = parent.tell("service").parse().expect("a number");
    assert!(u128::from(after - before) < started.elapsed().as_nanos() / 5, "the parent's service spins");
    // Other processes can still use the parent's memory.
    parent.tell("alloc 0 4096 5");
    let mut other = Peer::start();
    other.tell(&format!("import {}", parent.tell("export 0 0 4096")));
    assert_eq!(other.tell("look 0 4096 5 0"), "true");
}

#[test]
fn a_child_gets_by_where_its_parent_was_busy() {
    let mut parent = Peer::start();
    let codes = parent.tell("fork_under_load 40");
    assert!(codes.split(' ').all(|code| code == "0"), "{codes}");
}

#[test]
fn the_end_of_a_process_is_noticed_though_its_child_lives() {
    let node = Node::new(c"beluga");
    let mut peer = Peer::start();
    peer.tell("alloc 0 4096 1");
    let theirs = import(&node, &from_hex(&peer.tell("export 0 0 4096")));
    let flag = counters(&node, 1);
    peer.tell(&format!("import {}", hex(&export(&node, flag.cast(), 8))));
    let child = rustix::process::Pid::from_raw(peer.tell("linger").parse().expect("a number")).expect("a process");
    let ours = node.alloc(1, 4096);
    let plan = node.plan(&[transfer(ours, 1, theirs, 0, 4096)]);
    node.run(plan);
    peer.kill();
    // SAFETY: the mapping still exists.
    let executed = unsafe { mp_execute(plan, null_mut(), null_mut()) };
    let waited = wait_for(&node, flag, 1, 60.0);
    rustix::process::kill_process(child, rustix::process::Signal::KILL).expect("it lingers");
    assert_eq!((executed, waited), (MP_ERROR_PEER_GONE, MP_ERROR_PEER_GONE));
    close(&node, theirs);
}
