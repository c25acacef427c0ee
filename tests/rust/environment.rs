//! Tests messages about the environment that appear when a context is created: invalid files, unknown variables, and missing GPUs.

use crate::node::*;
use mpgpu::abi::*;
use std::path::Path;
use std::process::{Command, Stdio};
use std::ptr::null;
use std::time::{Duration, Instant};

/// Creates two contexts one after the other, with the configuration of the environment. Runs only in a child process.
#[test]
#[ignore = "a part of the tests below, in a process of its own"]
fn child_creates_two_contexts() {
    let options = mp_context_options_t { backend: 0, topology: null(), ..context_options() };
    for _ in 0..2 {
        let mut context = std::ptr::null_mut();
        // SAFETY: all pointers are valid for the call.
        let status = unsafe { mp_context_create_versioned(&options, MP_VERSION, &mut context) };
        println!("RESULT {} {}", status as i32, if status == MP_SUCCESS { String::new() } else { last_error() });
        if status == MP_SUCCESS {
            ok(mp_context_destroy(context));
        }
    }
}

/// Runs `child_creates_two_contexts` in a child process without GPUs and with these variables. Kills the child if it hangs. Returns its
/// standard output and standard error.
fn contexts_in(environment: &[(&str, &str)]) -> (String, String) {
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child.args(["--ignored", "--exact", "environment::child_creates_two_contexts", "--nocapture"]);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("MPGPU_")) {
        child.env_remove(name);
    }
    child.env("CUDA_VISIBLE_DEVICES", "-1").envs(environment.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().expect("it starts");
    let begin = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if begin.elapsed() > Duration::from_secs(120) {
            child.kill().expect("it runs");
            panic!("it hangs with {environment:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("it has ended");
    [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("UTF-8")).into()
}

#[test]
fn a_fifo_in_the_place_of_a_file_is_refused_at_once() {
    let folder = std::env::temp_dir().join(format!("mpgpu-fifo-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let fifo = folder.join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).expect("a FIFO");
    for (name, path) in [("MPGPU_TOPOLOGY", &*fifo), ("MPGPU_TUNING_FILE", &*fifo), ("MPGPU_TOPOLOGY", Path::new("/dev/zero"))] {
        let path = path.to_str().expect("UTF-8");
        let (said, _) = contexts_in(&[("MPGPU_BACKEND", "host"), (name, path)]);
        assert_eq!(said.matches("is not a regular file").count(), 2, "{name}: {said}");
        assert!(said.contains(path), "{said}");
    }
    std::fs::remove_dir_all(&folder).expect("a folder");
}

#[test]
fn a_program_that_gets_no_gpu_is_told_once_and_one_that_asks_for_none_is_not() {
    let told = "no GPU is used";
    let (said, log) = contexts_in(&[]);
    assert_eq!((said.matches("RESULT 0").count(), log.matches(told).count()), (2, 1), "{said}{log}");
    assert!(log.contains("modelled for hgx-h200") && log.contains("MPGPU_BACKEND=host"), "{log}");
    let (said, log) = contexts_in(&[("MPGPU_BACKEND", "host")]);
    assert_eq!((said.matches("RESULT 0").count(), log.matches(told).count()), (2, 0), "{said}{log}");
}

#[test]
fn names_that_nobody_reads_are_told_once_each_and_refuse_nothing() {
    let (said, log) = contexts_in(&[("MPGPU_BACKEND", "host"), ("MPGPU_HOME", "/opt/mpgpu"), ("MPGPU_MAX_PATH", "2")]);
    assert_eq!(said.matches("RESULT 0").count(), 2, "{said}");
    assert_eq!(log.matches("MPGPU_HOME is not a variable that mpgpu reads").count(), 1, "{log}");
    assert_eq!(log.matches("MPGPU_MAX_PATH is not a variable that mpgpu reads; did you mean MPGPU_MAX_PATHS?").count(), 1, "{log}");
    let (said, _) = contexts_in(&[("MPGPU_HOME", "/opt/mpgpu"), ("MPGPU_MAX_PATHS", "0")]);
    assert_eq!(said.matches("MPGPU_MAX_PATHS=0: must be 1 or more").count(), 2, "{said}");
}

#[test]
fn a_plan_of_virtual_devices_says_who_executes_it() {
    let node = Node::new(c"hgx-h200");
    let (source, target) = (node.alloc(0, 4096), node.alloc(1, 4096));
    let plan = node.plan(&[transfer(target, 1, source, 0, 4096)]);
    // SAFETY: a handle, and outputs that are valid for the call.
    let said = |format| describe(|text, capacity, length| unsafe { mp_plan_describe(plan, format, text, capacity, length) });
    assert!(said(0).contains("executed by CPU threads between virtual devices"), "{}", said(0));
    let json: serde_json::Value = serde_json::from_str(&said(1)).expect("JSON");
    assert_eq!(json["backend"], "host");
}
