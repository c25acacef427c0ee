//! Tests that environment variables give the right configuration, or an error with the wrong value and the remedy.

use crate::skip::skip;
use log::LevelFilter;
use mpgpu_backend::{SignalWait, StreamHandle};
use mpgpu_contexts::config::{IGNORED, PRELOAD, VARIABLES};
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions, PlanOptions, Transfer, Verify};
use mpgpu_core::plan::{Engine, Options};
use mpgpu_core::topology::DeviceId;
use proptest::prelude::*;

fn config(pairs: &[(&str, &str)]) -> Config {
    Config::from_pairs(pairs.iter().copied()).expect("the variables are accepted")
}

fn refusal(name: &str, value: &str) -> String {
    Config::from_pairs([(name, value)]).expect_err("the variable is refused").to_string()
}

#[test]
fn an_empty_environment_gives_the_defaults() {
    assert_eq!(config(&[]), Config::default());
    assert_eq!(config(&[("PATH", "/bin"), ("mpgpu_ROOT", "/opt"), ("MPGPU_ROOT", "/opt"), ("MPGPU_DIR", "/opt")]), Config::default());
}

#[test]
fn what_the_interposer_reads_is_none_of_a_contexts_business() {
    let all = PRELOAD.map(|name| (name, "whatever"));
    assert_eq!(config(&all), Config::default());
}

#[test]
fn every_variable_reaches_its_field() {
    let all = config(&[
        ("MPGPU_BACKEND", "host"),
        ("MPGPU_TOPOLOGY", "beluga"),
        ("MPGPU_ENGINE", "graph"),
        ("MPGPU_MAX_PATHS", "3"),
        ("MPGPU_HOST_PATH", "off"),
        ("MPGPU_RELAY_GPUS", "0,3"),
        ("MPGPU_CHUNK_BYTES", "4MiB"),
        ("MPGPU_RELAY_CHUNKS", "5"),
        ("MPGPU_HOST_CHUNKS", "8"),
        ("MPGPU_MIN_BYTES", "64K"),
        ("MPGPU_STAGING_BYTES", "1G"),
        ("MPGPU_CACHE_PLANS", "7"),
        ("MPGPU_CACHE_GRAPHS", "11"),
        ("MPGPU_TUNING_FILE", "/etc/mpgpu/tuning.toml"),
        ("MPGPU_ADAPT", "off"),
        ("MPGPU_VERIFY", "bytes"),
        ("MPGPU_SIGNAL_WAIT", "kernel"),
        ("MPGPU_HOST_THREADS", "6"),
        ("MPGPU_NODE_BLOCKS", "12"),
        ("MPGPU_KERNEL_BLOCKS", "5"),
        ("MPGPU_PACED_WRITES", "off"),
        ("MPGPU_CHECK_PEERS", "off"),
        ("MPGPU_HOST_VISIBLE_DEVICES", "3,0"),
        ("MPGPU_LOG", "debug"),
    ]);
    let expected = Config {
        backend: BackendChoice::Host,
        topology: Some("beluga".to_owned()),
        engine: Engine::Graph,
        max_paths: Some(3),
        host_path: Some(false),
        relays: Some([0, 3].into_iter().collect()),
        chunk_bytes: Some(4 << 20),
        relay_chunks: Some(5),
        host_chunks: Some(8),
        min_bytes: Some(64 << 10),
        staging_bytes: 1 << 30,
        cache_plans: 7,
        cache_graphs: 11,
        tuning_file: Some("/etc/mpgpu/tuning.toml".to_owned()),
        adapt: false,
        verify: Verify::Bytes,
        host_threads: 6,
        node_blocks: Some(12),
        kernel_blocks: 5,
        signal_wait: Some(SignalWait::Kernel),
        visible: Some(vec![3, 0]),
        paced_writes: false,
        check_peers: false,
        log: Some(LevelFilter::Debug),
        cache_dir: None,
        unknown: Vec::new(),
    };
    assert_eq!(all, expected);
}

#[test]
fn sizes_count_in_multiples_of_1024() {
    for (text, bytes) in [
        ("0", 0),
        ("1", 1),
        ("512B", 512),
        ("2K", 2048),
        ("2k", 2048),
        ("2KiB", 2048),
        ("64M", 64 << 20),
        ("3GiB", 3 << 30),
        ("1T", 1 << 40),
    ] {
        assert_eq!(config(&[("MPGPU_STAGING_BYTES", text)]).staging_bytes, bytes, "{text}");
    }
    assert_eq!(config(&[("MPGPU_STAGING_BYTES", "18446744073709551615")]).staging_bytes, u64::MAX);
    for text in ["", "M", "-1", "+1", "1.5G", "64MB", "64 M", "0x10", "1e6", "64M ", "６４"] {
        let message = refusal("MPGPU_STAGING_BYTES", text);
        assert!(message.starts_with(&format!("MPGPU_STAGING_BYTES={text}: must be")) && message.contains("MiB"), "{message}");
    }
    for text in ["18446744073709551616", "16777216T", "99999999999999999999999"] {
        assert!(refusal("MPGPU_STAGING_BYTES", text).contains("less than 16 EiB"), "{text}");
    }
}

#[test]
fn refusals_name_variable_value_and_what_is_accepted() {
    for name in ["MPGPU_MAX_PATHS", "MPGPU_RELAY_CHUNKS", "MPGPU_HOST_CHUNKS", "MPGPU_CACHE_GRAPHS"] {
        assert_eq!(refusal(name, "0"), format!("{name}=0: must be 1 or more"));
    }
    assert_eq!(refusal("MPGPU_BACKEND", "gpu"), "MPGPU_BACKEND=gpu: must be one of auto, host, cuda");
    assert_eq!(refusal("MPGPU_ENGINE", "Graph"), "MPGPU_ENGINE=Graph: must be one of auto, stream, graph, batch, kernel");
    assert_eq!(refusal("MPGPU_HOST_PATH", "yes"), "MPGPU_HOST_PATH=yes: must be one of 0, 1, on, off");
    assert_eq!(refusal("MPGPU_CHUNK_BYTES", "100"), "MPGPU_CHUNK_BYTES=100: must be 4096 bytes or more");
    assert_eq!(refusal("MPGPU_VERIFY", "1"), "MPGPU_VERIFY=1: must be one of off, program, bytes");
    assert_eq!(refusal("MPGPU_LOG", ""), "MPGPU_LOG=: must be one of off, error, warn, info, debug, trace");
    assert!(refusal("MPGPU_MAX_PATHS", "many").contains("whole number from 1 to 4294967295"));
    assert!(refusal("MPGPU_CACHE_PLANS", "-3").contains("0 turns the plan cache off"));
    assert!(refusal("MPGPU_TOPOLOGY", "").contains("preset"));
    assert!(refusal("MPGPU_TUNING_FILE", "").ends_with("the path of a file that `mpgpu tune` made, or none"));
}

#[test]
fn an_unknown_name_is_noted_with_the_nearest_known_one_and_refuses_nothing() {
    let said = |name: &str| {
        let Config { unknown, .. } = config(&[(name, "2"), ("MPGPU_MAX_PATHS", "2")]);
        assert_eq!(Config { unknown: Vec::new(), ..config(&[(name, "2")]) }, Config::default());
        let [line] = &unknown[..] else { panic!("{unknown:?}") };
        line.clone()
    };
    assert_eq!(said("MPGPU_MAXPATHS"), "MPGPU_MAXPATHS is not a variable that mpgpu reads; did you mean MPGPU_MAX_PATHS?");
    assert!(said("MPGPU_STAGE_BYTES").ends_with("did you mean MPGPU_STAGING_BYTES?"));
    assert!(said("MPGPU_log").ends_with("did you mean MPGPU_LOG?"));
    assert!(said("MPGPU_PRELOAD_REPROT").ends_with("did you mean MPGPU_PRELOAD_REPORT?"));
    // Such variables are set by environment modules of computing centres.
    for name in ["MPGPU_HOME", "MPGPU_VERSION", "MPGPU_PREFIX", "MPGPU_COFFEE_MACHINE"] {
        assert!(said(name).starts_with(&format!("{name} is not a variable that mpgpu reads")));
    }
    // A malformed value of a known variable is still an error.
    Config::from_pairs([("MPGPU_HOME", "/opt"), ("MPGPU_MAX_PATHS", "0")]).expect_err("refused");
}

#[cfg(unix)]
#[test]
fn a_value_that_is_not_utf8_is_refused() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let error = Config::from_pairs([("MPGPU_LOG", OsStr::from_bytes(b"in\xfffo"))]).expect_err("refused");
    assert!(error.to_string().starts_with("MPGPU_LOG=in\u{fffd}fo: is not valid UTF-8"), "{error}");
}

#[test]
fn options_of_the_call_win_over_the_environment_and_the_environment_over_the_default() {
    let environment =
        config(&[("MPGPU_MAX_PATHS", "3"), ("MPGPU_HOST_PATH", "0"), ("MPGPU_STAGING_BYTES", "1M"), ("MPGPU_HOST_THREADS", "6")]);
    let from_environment = PlanOptions::default().resolve(&environment).expect("accepted");
    let expected = Options { max_paths: 3, host_path: false, staging_bytes: 1 << 20, threads: 6, ..Options::default() };
    assert_eq!(from_environment, expected);
    let call = PlanOptions {
        max_paths: Some(2),
        host_path: Some(true),
        engine: Some(Engine::Stream),
        staging_bytes: Some(1 << 16),
        ..PlanOptions::default()
    };
    let resolved = call.resolve(&environment).expect("accepted");
    assert_eq!((resolved.max_paths, resolved.host_path, resolved.engine, resolved.staging_bytes), (2, true, Engine::Stream, 1 << 16));
    let threads = Config::default().host_threads;
    assert_eq!(PlanOptions::default().resolve(&Config::default()).expect("accepted"), Options { threads, ..Options::default() });
}

/// Copies pageable memory to a GPU and back. Returns the number of threads that may copy.
fn threads_that_copy() -> u32 {
    let config = Config { backend: BackendChoice::Host, ..Config::default() };
    let threads = config.host_threads;
    let context = Context::open(&ContextOptions::default(), config).expect("a context");
    let on_gpu = context.allocate(DeviceId::gpu(0), 40 << 20).expect("memory");
    let there: Vec<u32> = (0..10 << 20).map(|at: u32| at.wrapping_mul(2_654_435_761)).collect();
    let back = vec![0_u32; there.len()];
    for (dst, src) in [(on_gpu, there.as_ptr() as u64), (back.as_ptr() as u64, on_gpu)] {
        let transfer = Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes: 40 << 20 };
        let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
        assert!(plan.planned().threads.is_none_or(|used| used.threads <= threads), "{}", plan.describe());
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("it arrives");
    }
    assert_eq!(there, back);
    threads
}

#[test]
fn as_many_threads_copy_as_the_process_has_cpus() {
    // SAFETY: a set of CPUs, which is an array of integers and belongs to this thread.
    let threads = std::thread::spawn(|| unsafe {
        let (mut all, mut one) = (std::mem::zeroed::<libc::cpu_set_t>(), std::mem::zeroed::<libc::cpu_set_t>());
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&all), &mut all), 0);
        let first = (0..libc::CPU_SETSIZE as usize).find(|cpu| libc::CPU_ISSET(*cpu, &all)).expect("a CPU");
        libc::CPU_SET(first, &mut one);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&one), &one), 0);
        threads_that_copy()
    });
    assert_eq!(threads.join().expect("no panic"), 1);
}

#[test]
fn a_control_group_of_one_cpu_has_one_thread_that_copies() {
    const CHILD: &str = "MPGPU_TEST_IN_GROUP";
    if std::env::var_os(CHILD).is_some() {
        assert_eq!(threads_that_copy(), 1);
        return;
    }
    // Version 1 of control groups has a folder for each resource.
    let (is_first, above) = match std::path::Path::new("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").exists() {
        true => (true, "/sys/fs/cgroup/cpu"),
        false => (false, "/sys/fs/cgroup"),
    };
    let group = std::path::PathBuf::from(format!("{above}/mpgpu-test-{}", std::process::id()));
    let bound = || {
        std::fs::create_dir(&group)?;
        if is_first {
            std::fs::write(group.join("cpu.cfs_period_us"), "100000")?;
            std::fs::write(group.join("cpu.cfs_quota_us"), "100000")
        } else {
            std::fs::write(group.join("cpu.max"), "100000 100000")
        }
    };
    if let Err(error) = bound() {
        let _ = std::fs::remove_dir(&group);
        return skip(format!("no control group of its own for it: {error}"));
    }
    let name = std::thread::current().name().expect("that of the test").to_owned();
    let script = r#"echo $$ > "$1/cgroup.procs" && exec "$2" --exact "$3""#;
    let mut child = std::process::Command::new("sh");
    child.args(["-c", script, "sh"]).arg(&group).arg(std::env::current_exe().expect("this program")).arg(name).env(CHILD, "1");
    let ended = child.output().expect("a shell");
    std::fs::remove_dir(&group).expect("nobody is in it");
    assert!(ended.status.success(), "{}{}", String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
}

#[test]
fn a_call_cannot_use_more_staging_than_its_context_has() {
    let environment = config(&[("MPGPU_STAGING_BYTES", "1M")]);
    let call = PlanOptions { staging_bytes: Some((1 << 20) + 1), ..PlanOptions::default() };
    let message = call.resolve(&environment).expect_err("refused").to_string();
    assert!(message.starts_with("staging_bytes=1048577: must not exceed the context's 1048576 bytes"), "{message}");
}

#[test]
fn the_page_lists_exactly_the_variables_that_are_read() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/environment.md")).expect("the page is there");
    let listed: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("| `")).filter_map(|rest| rest.split('`').next()).collect();
    assert_eq!(listed, [&VARIABLES[..], &PRELOAD].concat());
    for name in IGNORED {
        assert!(page.contains(name), "{name} is not mentioned");
    }
}

#[test]
fn every_variable_of_the_table_is_read() {
    for name in VARIABLES {
        // All variables except names of files refuse this value. If it were accepted, the variable would not be read.
        let result = Config::from_pairs([(name, "\u{1}")]);
        match name {
            "MPGPU_TOPOLOGY" => assert_eq!(result.expect("any name is taken").topology.as_deref(), Some("\u{1}")),
            "MPGPU_TUNING_FILE" => assert_eq!(result.expect("any name is taken").tuning_file.as_deref(), Some("\u{1}")),
            _ => assert!(result.expect_err("refused").to_string().starts_with(name)),
        }
    }
}

proptest! {
    #[test]
    fn any_text_is_a_value_or_an_error_that_quotes_it(index in 0..VARIABLES.len(), value in "\\PC{0,12}") {
        if let Err(error) = Config::from_pairs([(VARIABLES[index], value.as_str())]) {
            let quoted = format!("{}={value}: ", VARIABLES[index]);
            prop_assert!(error.to_string().starts_with(&quoted), "{}", error);
        }
    }

    #[test]
    fn any_other_name_is_noted_and_refuses_nothing(suffix in "[A-Z_]{1,12}") {
        let name = format!("MPGPU_{suffix}");
        prop_assume!([&VARIABLES[..], &PRELOAD, &IGNORED].iter().all(|known| !known.contains(&name.as_str())));
        let config = Config::from_pairs([(name.as_str(), "1")]).expect("nothing is refused");
        prop_assert!(config.unknown.iter().all(|line| line.starts_with(&name)) && config.unknown.len() == 1, "{:?}", config.unknown);
    }
}

#[test]
fn how_streams_wait_is_said_by_the_options_then_the_environment_then_nobody() {
    use SignalWait::{Kernel, Operation};
    for (option, variable, expected) in [
        (None, None, None),
        (None, Some("kernel"), Some(Kernel)),
        (Some(Operation), Some("kernel"), Some(Operation)),
        (Some(Kernel), Some("operation"), Some(Kernel)),
        (Some(Kernel), None, Some(Kernel)),
    ] {
        let options = ContextOptions { backend: Some(BackendChoice::Host), signal_wait: option, ..ContextOptions::default() };
        let pairs: Vec<(&str, &str)> = variable.map(|value| ("MPGPU_SIGNAL_WAIT", value)).into_iter().collect();
        let context = Context::open(&options, config(&pairs)).expect("a context");
        assert_eq!(context.config().signal_wait, expected, "{option:?}, {variable:?}");
        let name = expected.map_or("auto", |wait| if wait == Kernel { "kernel" } else { "operation" });
        assert_eq!(context.to_json()["settings"]["signal_wait"], name);
    }
}

#[test]
fn how_many_threads_copy_is_said_by_the_options_then_the_environment() {
    for (option, variable, expected) in [(None, Some("6"), 6), (Some(9), Some("6"), 9), (Some(0), Some("6"), 0), (Some(3), None, 3)] {
        let options = ContextOptions { backend: Some(BackendChoice::Host), host_threads: option, ..ContextOptions::default() };
        let pairs: Vec<(&str, &str)> = variable.map(|value| ("MPGPU_HOST_THREADS", value)).into_iter().collect();
        let context = Context::open(&options, config(&pairs)).expect("a context");
        assert_eq!(context.to_json()["settings"]["host_threads"], expected, "{option:?}, {variable:?}");
    }
}
