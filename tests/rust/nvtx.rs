//! A profiler is shown a range around each call that plans or executes; without one, or with one that does not start, all goes on.
//!
//! Attaching is for the process as a whole, so a test starts this test program once more, with a profiler, for one test of it.

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

/// What the test above looks like to a profiler that takes ranges.
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

/// The recorder, compiled once in this process.
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

/// What a profiler in this mode records of the step, and what the program had to say.
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
    // With texts that are registered once, and without.
    for mode in ["registered", "plain"] {
        assert_eq!(profiled(recorder, mode).0, STEP, "{mode}");
    }
    // Loaded, and then it does not start, or wants no ranges.
    for (mode, why) in [("refuse", "does not start"), ("none", "takes no ranges")] {
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
