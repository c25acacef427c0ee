//! Tests that a call that gets too little host memory returns an error, and that nothing else fails. This is a separate program, because
//! sanitizers reserve much address space; `tests/run` also runs it without sanitizers.

mod common;
mod node;
#[path = "common/skip.rs"]
mod skip;

use mpgpu::abi::*;
use node::*;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::ptr::null_mut;

/// Size in bytes and destination device of each transfer, for the two kinds of test.
const KINDS: [(usize, i32); 2] = [(64, 1), (256, MP_DEVICE_HOST)];

/// Limits the address space of this process to `more` bytes beyond its current size. `None` removes the limit.
fn limit_memory(more: Option<u64>) {
    let status = std::fs::read_to_string("/proc/self/statm").expect("proc");
    let pages: u64 = status.split(' ').next().and_then(|pages| pages.parse().ok()).expect("a number");
    let rlim_cur = more.map_or(libc::RLIM_INFINITY, |more| 4096 * pages + more);
    let limit = libc::rlimit { rlim_cur, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: a valid struct.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

/// Makes, describes and executes a plan with limited memory. Runs in a child process whose arguments are the number of transfers, their
/// kind, and the limit in bytes.
#[test]
#[ignore = "run by other tests"]
fn child_plans_in_little_memory() {
    let Ok(text) = std::env::var("NO_MEMORY_CHILD") else { return };
    let orders: Vec<u64> = text.split(' ').map(|word| word.parse().expect("a number")).collect();
    let (count, (bytes, device), more) = (orders[0] as usize, KINDS[orders[1] as usize], orders[2]);
    let node = Node::new(c"dgx1-v100");
    let (from, to) = (node.alloc(0, count * bytes), node.alloc(device, count * bytes));
    let at = |index: usize| transfer(to.wrapping_add(index * bytes), device, from.wrapping_add(index * bytes), 0, bytes);
    let transfers: Vec<mp_transfer_t> = (0..count).map(at).collect();
    // This execution creates threads and other resources before the limit is set.
    node.run(node.plan(&transfers[..1]));
    limit_memory(Some(more));
    let (planned, plan) = node.try_plan(&transfers, null_mut());
    let mut length = 0;
    let rest = if planned == MP_SUCCESS {
        // SAFETY: the output is valid for the call, and the memory of the plan is there.
        unsafe { [mp_plan_describe(plan, 1, null_mut(), 0, &mut length), mp_execute(plan, null_mut(), null_mut())] }
    } else {
        [planned; 2]
    };
    let waited = mp_stream_synchronize(node.context, null_mut());
    limit_memory(None);
    for status in [planned, waited].into_iter().chain(rest) {
        assert!(matches!(status, MP_SUCCESS | MP_ERROR_OUT_OF_MEMORY), "{status:?}: {}", last_error());
    }
    // The context must still work.
    node.still_works();
    println!("PLANNED {}", planned == MP_SUCCESS);
}

/// True if a child process with this memory limit succeeded. It must exit normally in any case.
fn plans(count: usize, kind: usize, more: u64) -> bool {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["child_plans_in_little_memory", "--exact", "--ignored", "--nocapture"]);
    let output = command.env("NO_MEMORY_CHILD", format!("{count} {kind} {more}")).output().expect("it runs");
    let (said, erred) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let what = || format!("{count} transfers of {:?} with {more} bytes: signal {:?}\n{said}{erred}", KINDS[kind], output.status.signal());
    assert!(output.status.success(), "{}", what());
    assert!(said.contains("PLANNED"), "{}", what());
    said.contains("PLANNED true")
}

/// True if the limit on the address space is effective. It is not with sanitizers, which reserve much address space.
fn is_limited() -> bool {
    let status = std::fs::read_to_string("/proc/self/statm").expect("proc");
    let is_small = status.split(' ').next().and_then(|pages| pages.parse::<u64>().ok()).is_some_and(|pages| pages < 1 << 28);
    if !is_small {
        skip::skip("the address space of this program is reserved");
    }
    is_small
}

#[test]
fn a_batch_for_which_there_is_no_memory_is_refused_and_harms_nothing() {
    if !is_limited() {
        return;
    }
    let step = if common::is_long() { 8 } else { 1 };
    for kind in 0..KINDS.len() {
        let sizes = (2 * step..10 * step).map(|size| (1 << 20) << (size / step) | (size % step) << 18);
        let enough: Vec<bool> = sizes.map(|more| plans(100_000, kind, more)).collect();
        assert!(!enough[0] && enough[enough.len() - 1], "{enough:?}");
    }
}

#[test]
fn a_million_transfers_in_a_small_address_space_are_refused() {
    if !is_limited() {
        return;
    }
    for more in [16 << 20, 200 << 20, 500 << 20] {
        assert!(!plans(1_000_000, 0, more));
    }
}
