//! Tests the script `tests/gpu/sanitize`, which runs unattended on machines with limited GPU time. The script is run with tools and tests
//! that simulate GPUs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Creates an empty folder for one test, with a simulated machine of `gpus` GPUs. The folder has a `compute-sanitizer` that runs a program
/// and prints prepared results. It also has a clock that advances only when a test hangs, by the whole time limit, so that a busy machine
/// has no effect. Reading and writing the clock exclude each other.
fn folder(name: &str, gpus: usize) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("bin")).expect("created");
    let list: String = (0..gpus).map(|gpu| format!("echo 'GPU {gpu}: NVIDIA H200 (UUID: GPU-{gpu})'\n")).collect();
    script(&folder.join("bin/nvidia-smi"), &list);
    fs::write(folder.join("clock"), "1000\n").expect("written");
    script(&folder.join("bin/date"), &format!("cat '{}'", folder.join("clock").display()));
    script(&folder.join("bin/timeout"), "shift; LIMIT=$1; export LIMIT; shift; exec \"$@\"");
    script(
        &folder.join("bin/compute-sanitizer"),
        r#"echo "$CUDA_VISIBLE_DEVICES scale $GPU_TEST_SCALE: $*"
tool=$2
while [ "$1" != --exact ]; do last=$1; shift; done
[ "$2" != hangs ] || [ $tool != synccheck ] || echo "========= Barrier error detected."
"$last" "$@"; status=$?
[ $status -ne 124 ] || exit 124
case $2.$tool in
lanes::races.racecheck) echo "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)"; exit 9 ;;
share::two_processes.*) echo "========= ERROR SUMMARY: 0 errors"; echo "========= ERROR SUMMARY: 5 errors"; exit 9 ;;
unseen.*) exit 0 ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
exit $status"#,
    );
    let tests = ["fails", "hangs", "lanes::races", "share::child_obeys", "share::two_processes", "skips", "unseen", "works"];
    let listed: String = tests.iter().map(|test| format!("echo '{test}: test'; ")).collect();
    script(
        &folder.join("gpu"),
        &format!(
            "case $*.$2 in
*--list*) {listed} exit 0 ;;
*.hangs) [ -n \"$LIMIT\" ] || exec sleep 1000; echo $(($(cat '{clock}') + LIMIT)) >'{clock}.new'; mv '{clock}.new' '{clock}'; exit 124 ;;
*.fails) echo 'test result: FAILED. 0 passed; 1 failed'; exit 101 ;;
*.skips) echo 'skipped: test skips: needs 2 GPUs, and 1 is in sight' ;;
esac
echo 'test result: ok. 1 passed; 0 failed'",
            clock = folder.join("clock").display()
        ),
    );
    folder
}

fn script(path: &Path, text: &str) {
    fs::write(path, format!("#!/bin/sh\n{text}\n")).expect("written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("permitted");
}

fn sanitize(folder: &Path, before: &[&str], seconds: &str, tools: &[&str]) -> (Output, String) {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/sanitize"));
    let path = std::env::var("PATH").expect("a PATH");
    command.env("PATH", format!("{}:{path}", folder.join("bin").display())).env_remove("CUDA_VISIBLE_DEVICES").env_remove("GPU_TEST_SCALE");
    command.args(before).arg(folder.join("gpu")).arg(folder.join("logs")).arg(seconds).args(tools);
    let output = command.output().expect("it starts");
    let text = String::from_utf8(output.stdout.clone()).expect("UTF-8");
    (output, text)
}

fn row<'a>(text: &'a str, tool: &str) -> Vec<&'a str> {
    let line = text.lines().find(|line| line.starts_with(&format!("{tool} "))).unwrap_or_else(|| panic!("no row of {tool} in\n{text}"));
    line.split_whitespace().skip(1).take(7).collect()
}

#[test]
fn every_test_runs_by_itself_under_each_tool_and_what_did_not_pass_is_named() {
    let folder = folder("sanitize-tools", 4);
    let (output, text) = sanitize(&folder, &["--most", "2"], "100", &[]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    // Numbers of tests: passed, with errors, failed, timed out, left out, skipped; and the number of reports.
    assert_eq!(row(&text, "memcheck"), ["2", "1", "2", "1", "0", "1", "5"], "{text}");
    assert_eq!(row(&text, "racecheck"), ["1", "2", "2", "1", "0", "1", "8"], "{text}");
    // Tests of memory that is shared between processes are excluded.
    assert_eq!(row(&text, "initcheck"), ["2", "0", "2", "1", "0", "1", "0"], "{text}");
    assert_eq!(row(&text, "synccheck"), ["2", "2", "2", "0", "0", "1", "6"], "a report before the time was over\n{text}");
    for line in [
        "memcheck: share::two_processes, errors (5)",
        "racecheck: lanes::races, errors (3)",
        "synccheck: fails, failed",
        "memcheck: unseen, failed",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    assert!(text.contains("memcheck: hangs, timed out after 2 s"), "{text}");
    assert!(!text.contains("child_obeys"), "{text}");
    // Each test has two GPUs, and two groups of tests have none. Only some of the rounds run. Error codes of calls are not reported.
    let log = |path: &str| fs::read_to_string(folder.join("logs").join(path)).expect("a log");
    let works = log("memcheck/works.txt");
    assert!(works.starts_with("0,1 scale 0.02: --tool memcheck") || works.starts_with("2,3 scale 0.02: --tool memcheck"), "{works}");
    assert!(works.contains("--report-api-errors no") && works.contains("--target-processes all"), "{works}");
    assert!(!log("racecheck/lanes-races.txt").contains("--report-api-errors"));
}

#[test]
fn what_finds_no_time_is_left_out_and_a_named_tool_runs_alone() {
    let folder = folder("sanitize-time", 2);
    let (output, text) = sanitize(&folder, &["--most", "30"], "2", &["synccheck"]);
    assert_eq!(output.status.code(), Some(1), "{text}");
    // The first test fails, and the second hangs until the time limit.
    assert_eq!(row(&text, "synccheck"), ["0", "1", "1", "0", "5", "0", "1"], "{text}");
    assert!(text.contains("synccheck: works, left out") && !text.contains("memcheck"), "{text}");
}

#[test]
fn a_test_that_hangs_is_ended() {
    let folder = folder("sanitize-hangs", 2);
    // These are the system's own clock and `timeout`.
    for tool in ["date", "timeout"] {
        fs::remove_file(folder.join("bin").join(tool)).expect("removed");
    }
    let (_, text) = sanitize(&folder, &["--most", "1", "--only", "^hangs$"], "1000", &["memcheck"]);
    assert_eq!(row(&text, "memcheck"), ["0", "0", "0", "1", "0", "0", "0"], "{text}");
}

#[test]
fn only_the_tests_that_are_asked_for_run() {
    let folder = folder("sanitize-only", 2);
    let (output, text) = sanitize(&folder, &["--only", "^works$|::races"], "30", &["memcheck"]);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert_eq!(row(&text, "memcheck"), ["2", "0", "0", "0", "0", "0", "0"], "{text}");
    let (output, _) = sanitize(&folder, &["--only", "^nothing$"], "30", &["memcheck"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("lists no test that ^nothing$ matches"), "{said}");
}

#[test]
fn without_gpus_it_is_skipped_and_wrong_arguments_are_answered() {
    let folder = folder("sanitize-arguments", 0);
    let (output, text) = sanitize(&folder, &[], "10", &[]);
    assert_eq!((output.status.code(), text.trim()), (Some(77), "gpu sanitize: skipped: no NVIDIA GPU on this machine"));
    for (before, seconds, tools, said) in [
        (&["--gpus"][..], "10", &[][..], "--gpus: a number above 0 must follow"),
        (&[], "0", &[], "tests/gpu/sanitize [--gpus N]"),
        (&[], "10", &["leakcheck"], "leakcheck: no such tool"),
        (&["--fast"], "10", &[], "--fast: unknown option"),
    ] {
        let (output, _) = sanitize(&folder, before, seconds, tools);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(said), "{said}");
    }
}
