//! Tests that a profiler receives an NVTX range for each call that plans or executes. Without a profiler, or with a profiler that does not
//! start, the library must work as usual.
//!
//! A profiler is attached to the whole process. So each test starts this test program again, with a profiler and for a single test.

use crate::node::{Node, ok, transfer};
use mpgpu::abi::mp_plan_destroy;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

#[test]
fn a_step_is_planned_and_executed() {
    let node = Node::new(c"beluga");
    node.still_works();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (src, dst) = (node.alloc(2, 6000), node.alloc(3, 6000));
            // SAFETY: memory of the host backend is host memory of this size.
            unsafe { src.write_bytes(7, 6000) };
            let plan = node.plan(&[transfer(dst, 3, src, 2, 1000), transfer(dst.wrapping_add(1000), 3, src, 2, 5000)]);
            node.run(plan);
            node.run(plan);
            // SAFETY: as above.
            assert!(unsafe { std::slice::from_raw_parts(dst, 6000) }.iter().all(|byte| *byte == 7));
            ok(mp_plan_destroy(plan));
        });
    });
}

/// NVTX ranges that a profiler must receive in the test above.
const STEP: [&str; 11] = [
    "domain mpgpu",
    "push mpgpu plan 100003",
    "pop mpgpu",
    "push mpgpu execute 100003",
    "pop mpgpu",
    "push mpgpu plan 6000",
    "pop mpgpu",
    "push mpgpu execute 6000",
    "pop mpgpu",
    "push mpgpu execute 6000",
    "pop mpgpu",
];

fn folder() -> PathBuf {
    std::env::temp_dir().join(format!("mpgpu-nvtx-{}", std::process::id()))
}

/// Returns the path of the recorder, a test profiler that is compiled once in this process.
fn recorder() -> &'static Path {
    static RECORDER: OnceLock<PathBuf> = OnceLock::new();
    RECORDER.get_or_init(|| {
        std::fs::create_dir_all(folder()).expect("a folder for the test");
        let library = folder().join("librecorder.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rust/nvtx/recorder.c");
        let compiler = std::env::var("CC").unwrap_or("cc".to_owned());
        let flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"];
        let output = Command::new(&compiler).args(flags).arg(source).arg("-o").arg(&library).output().expect("a C compiler");
        assert!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
        library
    })
}

/// Starts this program with the test profiler in a certain mode. Returns the ranges that were recorded, and the output.
fn profiled(injection: &Path, mode: &str) -> (Vec<String>, String) {
    let file = folder().join(format!("ranges-{mode}"));
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "nvtx::a_step_is_planned_and_executed", "--nocapture"])
        .env("NVTX_INJECTION64_PATH", injection)
        .env("RANGES_FILE", &file)
        .env("RANGES_MODE", mode)
        .env("MPGPU_LOG", "info")
        .output()
        .expect("this program runs again");
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{mode}: {said}");
    (std::fs::read_to_string(&file).unwrap_or_default().lines().map(str::to_owned).collect(), said)
}

#[test]
fn a_profiler_sees_each_call_with_its_bytes() {
    let recorder = recorder();
    // The profiler supports registered strings, or does not.
    for mode in ["registered", "plain"] {
        assert_eq!(profiled(recorder, mode).0, STEP, "{mode}");
    }
    // The profiler is loaded, but does not start or provides no functions for ranges.
    for (mode, why) in [("refuse", "failed to initialise"), ("none", "does not support ranges")] {
        let (ranges, said) = profiled(recorder, mode);
        assert!(ranges.is_empty(), "{mode}: {ranges:?}");
        assert!(said.contains(why), "{mode}: {said}");
    }
    for (library, why) in [("libmpgpu-no-such-library.so", "cannot be loaded"), ("libc.so.6", "has no InitializeInjectionNvtx2")] {
        let (ranges, said) = profiled(Path::new(library), library);
        assert!(ranges.is_empty(), "{library}: {ranges:?}");
        assert!(said.contains(why), "{library}: {said}");
    }
    std::fs::remove_dir_all(folder()).expect("the folder was the test's own");
}
