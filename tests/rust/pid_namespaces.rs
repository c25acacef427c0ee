//! Tests processes in different PID namespaces, like those of two containers that use the host's network. Such processes have no process
//! IDs for each other.

use crate::messages::play_in_processes;
use crate::node::*;
use crate::peer::*;
use mpgpu::abi::*;
use std::process::{Command, Stdio};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Longest time for which the test waits until a killed process has ended, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns a command that runs this program in a separate PID namespace. The namespace ends with the program.
fn apart() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child"]).arg(std::env::current_exe().expect("this program"));
    command
}

/// True if this process may create a PID namespace. Prints that the test is skipped otherwise.
fn can_unshare() -> bool {
    let mut trial = Command::new("unshare");
    trial.args(["--pid", "--fork", "--kill-child", "true"]).stdout(Stdio::null()).stderr(Stdio::null());
    let can = trial.status().is_ok_and(|status| status.success());
    if !can {
        crate::skip::skip("this process may make no PID namespace");
    }
    can
}

#[test]
fn memory_is_shared_between_pid_namespaces_and_the_end_of_its_owner_is_noticed() {
    if !can_unshare() {
        return;
    }
    let node = Node::new(c"beluga");
    let mut exporter = Peer::of(apart());
    exporter.tell("alloc 0 65536 7");
    let theirs = import(&node, &from_hex(&exporter.tell("export 0 0 65536")));
    assert!(holds(theirs, 65536, 7, 0));
    let ours = node.alloc(1, 65536);
    let plan = node.plan(&[transfer(ours, 1, theirs, 0, 65536)]);
    node.run(plan);
    assert!(holds(ours, 65536, 7, 0));
    // The exporter has no process ID for the importer.
    let mut importer = Peer::of(apart());
    importer.tell(&format!("import {}", hex(&export(&node, ours, 65536))));
    assert_eq!(importer.tell("look 0 65536 7 0"), "true");
    // This kills the program that has created the namespace. The exporter in the namespace ends soon afterwards.
    exporter.kill();
    let until = Instant::now() + PATIENCE;
    let ended = loop {
        // SAFETY: the mapping still exists.
        match unsafe { mp_execute(plan, null_mut(), null_mut()) } {
            MP_SUCCESS if Instant::now() < until => std::thread::yield_now(),
            status => break status,
        }
    };
    let message = refused(ended, MP_ERROR_PEER_GONE);
    assert!(message.contains("has ended"), "{message}");
    close(&node, theirs);
    ok(mp_plan_destroy(plan));
    importer.tell("close 0");
    node.free(ours);
    node.still_works();
}

#[test]
fn a_wait_for_a_process_of_another_pid_namespace_that_ends_is_released() {
    if !can_unshare() {
        return;
    }
    let node = Node::new(c"beluga");
    let counter = counters(&node, 1);
    let mut raiser = Peer::of(apart());
    raiser.tell(&format!("import {}", hex(&export(&node, counter.cast(), 8))));
    let stream = node.stream(0);
    wait_in(&node, stream, &[signal(counter, 1)]);
    raiser.kill();
    let message = refused(mp_stream_synchronize(node.context, stream), MP_ERROR_PEER_GONE);
    assert!(message.contains("which had mapped this memory, has ended"), "{message}");
    node.still_works();
}

#[test]
fn ranks_of_different_pid_namespaces_meet_at_a_socket_and_exchange_messages() {
    if can_unshare() {
        play_in_processes(&apart, &[2, 3], 500, false);
    }
}
