//! Kills a peer process while it exports, imports, copies, signals, closes and frees memory. Each round kills it at another of its system
//! calls. A process that works with the peer must get a status from every call, must keep none of the peer's resources, and must be able to
//! continue with the next peer.
//!
//! The killed process (victim) is traced by a separate process (`trace`), which is its parent and a child of the test.

use crate::node::*;
use crate::peer::*;
use mpgpu::abi::*;
use std::collections::HashSet;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

const BYTES: usize = 20_000;

/// System call with a special argument that marks the point from which the victim's system calls are counted.
const MARK: (libc::c_long, u64) = (libc::SYS_getpgid, 0x6b69_6c6c);

/// Order of the peer protocol: starts the counting of system calls.
pub fn mark() {
    // SAFETY: no argument is a pointer.
    unsafe { libc::syscall(MARK.0, MARK.1) };
}

/// Memory and counter that one peer exports to the other.
pub struct Offer {
    data: *mut u8,
    flag: *mut u64,
}

/// Order of the peer protocol: exports memory and a counter. Returns them, and their handles as text.
pub fn offer(node: &Node) -> (Offer, String) {
    let offer = Offer { data: node.alloc(1, BYTES), flag: counters(node, 1) };
    let handles = [export(node, offer.data, BYTES), export(node, offer.flag.cast(), 8)];
    (offer, handles.each_ref().map(hex).join(" "))
}

pub fn take_back(node: &Node, offer: Offer) {
    node.free(offer.data);
    node.free(offer.flag.cast());
}

/// Order of the peer protocol: puts data into the memory that the other peer has exported, signals, and waits for the put of the other
/// peer. Returns the status of each call that may fail because a peer has exited. All other calls must succeed.
pub fn exchange(node: &Node, offer: Offer, theirs: [&str; 2], seed: usize) -> Vec<mp_status_t> {
    let mut statuses = Vec::new();
    let mut said = |status: mp_status_t| {
        statuses.push(status);
        status == MP_SUCCESS
    };
    let source = node.alloc(0, BYTES);
    fill(source, BYTES, seed);
    let stream = node.stream(0);
    let imports = theirs.map(|handle| try_import(node, &from_hex(handle)));
    let arrived = imports.each_ref().map(|(status, _)| said(*status));
    // SAFETY: the lists are valid for the calls, and mapped memory stays mapped.
    let raise = |value| unsafe { mp_stream_raise_signals(node.context, stream, &signal(imports[1].1.cast(), value), 1) };
    let mut plan = null_mut();
    if arrived == [true; 2] && said(raise(1)) {
        let put = transfer(imports[0].1, 1, source, 0, BYTES);
        // SAFETY: as above.
        if said(unsafe { mp_plan(node.context, &put, 1, std::ptr::null(), &mut plan) }) {
            // SAFETY: as above.
            said(unsafe { mp_execute(plan, stream, null_mut()) });
        }
        said(raise(2));
    }
    // The other peer has mapped this counter when it sets it. From then on its exit is detected.
    if said(wait_for(node, offer.flag, 1, 1.0)) {
        let second = signal(offer.flag, 2);
        // SAFETY: as above.
        if said(unsafe { mp_stream_wait_signals(node.context, stream, &second, 1) }) {
            said(mp_stream_synchronize(node.context, stream));
        }
    }
    said(mp_stream_synchronize(node.context, stream));
    if statuses.iter().all(|status| *status == MP_SUCCESS) {
        assert!(holds(offer.data, BYTES, 1 - seed, 0), "bytes arrived wrong");
    }
    // Memory must not be freed before the put of the other peer has finished.
    if !plan.is_null() {
        ok(mp_plan_destroy(plan));
    }
    for (_, pointer) in imports.iter().filter(|(status, _)| *status == MP_SUCCESS) {
        close(node, *pointer);
    }
    ok(mp_stream_destroy(node.context, stream));
    node.free(source);
    take_back(node, offer);
    statuses
}

/// Order of the peer protocol: checks that the context still works. Errors about lost peers that are pending are reported first.
pub fn works(node: &Node) {
    let _ = mp_stream_synchronize(node.context, null_mut());
    node.still_works();
}

/// Order of the peer protocol: starts this program again and kills it at system call number `kill_at` after the mark. Returns when it has
/// ended. If it was not killed, prints the number of its system calls.
pub fn trace(kill_at: u64) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(std::env::args().skip(1)).env_remove("SHARE_TEST_KILL_AT");
    // SAFETY: only one system call is made between `fork` and `exec`.
    unsafe { command.pre_exec(|| if libc::ptrace(libc::PTRACE_TRACEME) == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }) };
    let Ok(child) = command.spawn() else {
        println!("\nANSWER no ptrace");
        return;
    };
    let victim = child.id() as libc::pid_t;
    let options = libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL;
    let (mut known, mut counted, mut killed) = (HashSet::new(), None, false);
    loop {
        let mut status = 0;
        // SAFETY: the output is valid for the call; this process has no other children.
        let thread = unsafe { libc::waitpid(-1, &mut status, libc::__WALL) };
        if thread < 0 {
            break;
        }
        if !libc::WIFSTOPPED(status) {
            continue;
        }
        let mut pass_on = libc::WSTOPSIG(status);
        if known.insert(thread) {
            // The process or a thread was stopped by the first `exec` or by the start of a thread.
            pass_on = 0;
            if thread == victim {
                // SAFETY: a stopped thread that this one traces.
                unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, thread, 0, options) };
            }
        } else if pass_on == libc::SIGTRAP | 0x80 {
            pass_on = 0;
            // The layout is that of `struct ptrace_syscall_info`: the kind of stop, the number of the call and its first argument.
            let mut info = [0_u64; 11];
            // SAFETY: as above, and an output of this size.
            unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, thread, size_of_val(&info), &mut info) };
            let (enters, call) = (info[0] & 0xFF == 1, (info[3] as libc::c_long, info[4]));
            match &mut counted {
                Some(count) if enters => {
                    *count += 1;
                    if *count == kill_at {
                        killed = true;
                        // SAFETY: a child of this process that has not been waited for.
                        unsafe { libc::kill(victim, libc::SIGKILL) };
                    }
                }
                None if enters && call == MARK => counted = Some(0),
                _ => {}
            }
        } else if status >> 16 != 0 {
            pass_on = 0;
        }
        // SAFETY: as above. Fails where the thread was killed meanwhile.
        unsafe { libc::ptrace(libc::PTRACE_SYSCALL, thread, 0, pass_on) };
    }
    if !killed {
        println!("\nANSWER 0 {}", counted.unwrap_or(0));
    }
}

/// Returns the answer of a peer, or `None` if the peer has exited. A peer that neither answers nor exits is killed, and the test fails.
pub fn hear(peer: &mut Peer, order: &str) -> Option<String> {
    let process = rustix::process::Pid::from_child(&peer.process);
    let (answered, answer) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| answered.send(peer.hear()));
        answer.recv_timeout(Duration::from_secs(120)).unwrap_or_else(|_| {
            rustix::process::kill_process(process, rustix::process::Signal::KILL).expect("the peer exists");
            panic!("{order}: no answer in two minutes");
        })
    })
}

fn try_ask(peer: &mut Peer, order: &str) -> Option<String> {
    writeln!(peer.orders, "{order}").ok()?;
    hear(peer, order)
}

/// Runs one round with a victim and a survivor. Returns the number of the victim's system calls if it was not killed, or `Err` if the
/// system does not permit tracing.
fn round(survivor: &mut Peer, kill_at: u64) -> Result<Option<u64>, ()> {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.env("SHARE_TEST_KILL_AT", kill_at.to_string());
    let mut victim = Peer::of(command);
    if try_ask(&mut victim, "mark").is_some_and(|answer| answer == "no ptrace") {
        return Err(());
    }
    let ours = survivor.tell("offer");
    let Some(theirs) = try_ask(&mut victim, "offer") else {
        survivor.tell("take_back");
        return Ok(None);
    };
    let theirs = theirs.strip_prefix("0 ").expect("two handles");
    let asked = writeln!(victim.orders, "exchange {ours} 0").is_ok();
    let statuses = try_ask(survivor, &format!("exchange {theirs} 1")).expect("the survivor ended");
    let allowed = [MP_SUCCESS, MP_ERROR_PEER_GONE, MP_ERROR_TIMEOUT].map(|status| (status as i32).to_string());
    assert!(statuses.split(' ').all(|status| allowed.iter().any(|allowed| allowed == status)), "killed at {kill_at}: {statuses}");
    survivor.tell("works");
    let lived = asked && hear(&mut victim, "exchange").is_some();
    let calls = if lived { try_ask(&mut victim, "exit") } else { None };
    Ok(calls.map(|answer| answer.strip_prefix("0 ").expect("a count").parse().expect("a number")))
}

#[test]
fn a_peer_killed_at_any_of_its_system_calls_leaves_the_other_whole() {
    let mut survivor = Peer::start();
    let Ok(calls) = round(&mut survivor, 0) else {
        return crate::skip::skip("this process may not trace its children (ptrace)");
    };
    let calls = calls.expect("nobody has killed it");
    let settled = |survivor: &mut Peer, wanted: Option<&str>| {
        let started = Instant::now();
        loop {
            let now = survivor.tell("holdings");
            if wanted.is_none_or(|wanted| now == wanted) {
                break now;
            }
            // A thread of the survivor detects exits of peers and releases their resources.
            assert!(started.elapsed() < Duration::from_secs(60), "descriptors and mappings: {now}, {wanted:?} before");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::sleep(Duration::from_millis(100));
    let before = settled(&mut survivor, None);
    let long = std::env::var("LONG_TESTS").is_ok_and(|v| v == "1");
    let step = if long { 1 } else { (calls / 30).max(1) };
    // The number of calls varies slightly between runs.
    for kill_at in (1..=calls + calls / 10).step_by(step as usize) {
        round(&mut survivor, kill_at).expect("it could be traced before");
        settled(&mut survivor, Some(&before));
    }
    assert!(round(&mut survivor, 0).is_ok_and(|calls| calls.is_some()));
    println!("{calls} system calls, killed at each {step} apart");
}
