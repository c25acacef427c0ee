//! Tests that the library's threads block all signals that the program itself must handle.

use crate::node::*;
use mpgpu::abi::*;
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Returns the numbers of the signals that the calling thread blocks.
fn blocked() -> Vec<i32> {
    // SAFETY: an integer array, for which zero is a valid value.
    let mut mask: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the output is valid for the calls.
    unsafe {
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut mask), 0);
        (1..65).filter(|signal| libc::sigismember(&mask, *signal) == 1).collect()
    }
}

/// Returns the names of the library's threads in this process, each with a bit mask of the signals that it blocks. Includes threads of
/// other tests.
fn threads() -> Vec<(String, u64)> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("proc");
    let of = |task: std::fs::DirEntry| {
        // Threads that have ended are omitted.
        let status = std::fs::read_to_string(task.path().join("status")).ok()?;
        let value = |key: &str| Some(status.lines().find_map(|line| line.strip_prefix(key))?.trim().to_owned());
        Some((value("Name:")?, u64::from_str_radix(&value("SigBlk:")?, 16).ok()?))
    };
    tasks.flatten().filter_map(of).filter(|(name, _)| name.starts_with("mpgpu-")).collect()
}

#[test]
fn every_thread_of_the_library_blocks_all_signals_but_those_of_its_own_faults() {
    unsafe extern "C" fn called(_: *mut c_void, _: i32) {}
    let before = blocked();
    let node = Node::new(c"beluga");
    let stream = node.stream(0);
    let memory = node.alloc_shared(MP_DEVICE_HOST, 4096);
    let [from, to] = [0, 1].map(|gpu| node.alloc(gpu, 4096));
    let plan = node.plan(&[transfer(to, 1, from, 0, 4096)]);
    let (mut request, mut handle) = (null_mut(), mp_memory_handle_t { bytes: [0; 128] });
    let signal = mp_signal_t { counter: memory.cast(), value: 1 };
    // SAFETY: all pointers are valid for the calls, and the memory until the context is destroyed.
    unsafe {
        ok(mp_stream_wait_signals(node.context, stream, &signal, 1));
        ok(mp_stream_launch_host(node.context, stream, Some(nothing), null_mut(), None));
        ok(mp_execute(plan, stream, &mut request));
        ok(mp_request_set_callback(request, Some(called), null_mut()));
        ok(mp_memory_export(node.context, memory.cast(), 4096, &mut handle));
    }
    let faults = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
    // The C library reserves 32 and 33, and the other two cannot be blocked.
    let never = [libc::SIGKILL, libc::SIGSTOP, 32, 33];
    let checked = || (1..65).filter(|signal| !never.contains(signal));
    let is_right = |mask: u64| checked().all(|signal| (mask >> (signal - 1) & 1 == 1) != faults.contains(&signal));
    // A thread has its name only once it runs. The C library blocks all signals while a thread starts or ends, which may be a thread of
    // another test.
    let wanted = ["mpgpu-copy", "mpgpu-signal", "mpgpu-function", "mpgpu-callback", "mpgpu-share"];
    let begun = Instant::now();
    loop {
        let found = threads();
        let names: BTreeSet<&str> = found.iter().map(|(name, _)| &**name).collect();
        let wrong: Vec<_> = found.iter().filter(|(_, mask)| !is_right(*mask)).collect();
        if wrong.is_empty() && wanted.iter().all(|name| names.contains(name)) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{names:?}, and with other signals blocked {wrong:x?}");
        std::thread::yield_now();
    }
    assert_eq!(blocked(), before, "the caller's mask is as it was");
    // SAFETY: an existing counter, and a request of the test.
    unsafe {
        ok(mp_signal_raise(node.context, signal.counter, 1));
        ok(mp_wait(&mut request, null_mut()));
    }
    ok(mp_plan_destroy(plan));
}
