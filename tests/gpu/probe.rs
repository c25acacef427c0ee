//! Tests the probe (measurement of the machine) on real GPUs: its result for every pair of devices, and its file. The next context uses the
//! file, the file adapts to the visible GPUs, and it is refused if it is outdated. Times are only compared with physical limits.

use super::*;
use mpgpu_contexts::{BackendChoice, Verify};
use mpgpu_devices::cuda::identity;
use mpgpu_measure::probe::{Integrity, ProbeOptions, Progress};
use mpgpu_measure::tune::{Origin, digest};
use std::path::PathBuf;
use std::time::Instant;

/// Directory of a test. Dropping the value removes the directory.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("mpgpu-gpu-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a directory");
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn open(topology: Option<&str>, cache: Option<&Directory>) -> Result<Context, Error> {
    let options = ContextOptions { backend: Some(BackendChoice::Cuda), topology: topology.map(str::to_owned), ..ContextOptions::default() };
    Context::open(&options, Config { cache_dir: cache.map(|directory| directory.0.clone()), ..Config::default() })
}

#[test]
fn every_gpu_has_an_identity_of_its_own() {
    let Some(turn) = gpus(1) else { return };
    let identity = identity().expect("GPUs are there");
    assert_eq!(identity.gpus.len(), turn.count as usize);
    for (index, gpu) in identity.gpus.iter().enumerate() {
        assert!(gpu.uuid.starts_with("GPU-") && gpu.uuid.len() == 40 && !gpu.name.is_empty(), "{gpu:?}");
        assert!(identity.gpus[..index].iter().all(|other| other.uuid != gpu.uuid));
    }
    assert!(identity.driver.contains("CUDA"), "{}", identity.driver);
}

#[test]
fn nvml_is_loaded_once_and_stays_while_contexts_come_and_go() {
    let Some(_turn) = gpus(1) else { return };
    // Returns the address at which the NVML library is mapped, if it is mapped.
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("text");
        maps.lines().find(|line| line.contains("libnvidia-ml")).and_then(|line| line.split('-').next()).map(str::to_owned)
    };
    drop(context(None, |_| {}));
    let first = mapped();
    identity().expect("GPUs are there");
    for _ in 0..3 {
        drop(context(None, |_| {}));
        assert_eq!(mapped(), first);
    }
    let topology = discover::discover().expect("GPUs are there");
    assert!(first.is_some() || !topology.description.contains("NVLinks"), "NVML told of links, and is not there: {}", topology.description);
}

#[test]
fn a_probe_is_taken_by_the_next_context_and_refused_when_stale() {
    let Some(turn) = gpus(1) else { return };
    let directory = Directory::new("probe");
    let context = open(Some("discovered"), Some(&directory)).expect("a context");
    let report = context.probe(&ProbeOptions::quick(), &mut |_| {}).expect("a probe");
    println!("{}", report.to_toml());
    for hop in report.probed.hops.iter().filter(|hop| hop.verdict == Integrity::Intact) {
        // The permitted range is from a fifth of PCIe 1 x1 to more than any link in a node has.
        assert!((50e6..5e12).contains(&hop.rate) && (0.5e-6..5e-3).contains(&hop.start), "{hop:?}");
    }
    let probed = &report.probed.topology;
    let machine = Machine::new(probed.clone()).expect("well formed");
    assert_eq!(machine.gpu_count(), turn.count);
    for gpu in (0..turn.count).map(DeviceId::gpu) {
        for (from, to) in [(gpu, DeviceId::HOST), (DeviceId::HOST, gpu)] {
            let intact = report.probed.hops.iter().any(|hop| (hop.from, hop.to) == (from, to) && hop.verdict == Integrity::Intact);
            assert_eq!(machine.route(from, to).is_some(), intact, "{from} to {to}");
        }
    }
    // The probe must leave no memory allocated on the GPUs.
    assert!(machine.devices().all(|device| context.backend().allocated_bytes(device) == 0 && context.backend().stream_count(device) == 0));
    let path = context.store_probe(&report, None).expect("stored");
    assert_eq!(path.parent(), Some(directory.0.as_path()));
    drop(context);

    assert_eq!(open(Some("probed"), Some(&directory)).expect("a context").machine().topology(), probed);
    assert_eq!(open(None, Some(&directory)).expect("a context").machine().topology(), probed);
    assert_eq!(open(Some("discovered"), Some(&directory)).expect("a context").machine().topology().name, "discovered");
    let name = path.to_string_lossy().into_owned();
    assert_eq!(open(Some(&name), None).expect("a context").machine().topology(), probed);

    // Measurements with another driver are ignored, unless the file is named explicitly. Then the file is refused.
    let text = std::fs::read_to_string(&path).expect("there");
    std::fs::write(&path, text.replace("driver = \"", "driver = \"before ")).expect("written");
    let no_probe = || open(Some("probed"), Some(&directory)).expect_err("no probe of this machine").to_string();
    assert!(no_probe().contains("mpgpu probe"), "{}", no_probe());
    assert_eq!(open(None, Some(&directory)).expect("a context").machine().topology().name, "discovered");
    let error = open(Some(&name), None).expect_err("stale").to_string();
    assert!(error.contains("driver") && error.contains("mpgpu probe") && error.contains(&name), "{error}");

    // The file describes a machine with one more GPU, in another order. The visible GPUs are found by their UUIDs.
    let mut more = report.clone();
    let mut order: Vec<u32> = (0..turn.count).rev().collect();
    more.probed.topology = probed.with_gpus(&order).expect("all of them");
    more.record.fingerprint.gpus.reverse();
    std::fs::write(&path, more.to_toml()).expect("written");
    let found = open(Some("probed"), Some(&directory)).expect("a context");
    let found = Machine::new(found.machine().topology().clone()).expect("well formed");
    for from in machine.devices() {
        for to in machine.devices() {
            let rate = |machine: &Machine| machine.route(from, to).map(|route| route.bandwidth);
            assert_eq!(rate(&found), rate(&machine), "{from} to {to}");
        }
    }
    if turn.count > 1 {
        // A file that lacks one of the visible GPUs does not apply to this machine.
        order.pop();
        more.probed.topology = more.probed.topology.with_gpus(&(0..turn.count - 1).collect::<Vec<_>>()).expect("all but one");
        more.record.fingerprint.gpus.pop();
        std::fs::write(&path, more.to_toml()).expect("written");
        assert!(no_probe().contains("mpgpu probe"), "{}", no_probe());
    }
}

/// Plans a copy with default options, executes it, and compares every byte.
fn assert_moved(context: &Context, from: DeviceId, to: DeviceId, bytes: u64, random: &mut Random) {
    let (src, dst) = (context.allocate(from, bytes).expect("memory"), context.allocate(to, bytes).expect("memory"));
    let transfer = Transfer { dst, dst_device: to, src, src_device: from, bytes };
    let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
    let stream = context.create_stream(GPU0).expect("a stream");
    let content = random.bytes(bytes as usize);
    write(src, &content);
    write(dst, &vec![0x55; bytes as usize]);
    plan.execute(stream).expect("enqueued").wait().expect("it runs");
    assert_bytes(&read(dst, bytes as usize), &content, &plan.describe());
    context.destroy_stream(stream).expect("destroyed");
    context.free(src).expect("freed");
    context.free(dst).expect("freed");
}

#[test]
fn what_is_tuned_for_a_probe_is_taken_with_it_and_loses_no_byte() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let directory = Directory::new("tuned");
    let context = open(Some("discovered"), Some(&directory)).expect("a context");
    let options = ProbeOptions { tuned_bytes: vec![scaled(64 << 20, 1 << 20), scaled(16 << 20, 1 << 18)], ..ProbeOptions::quick() };
    let mut begin = None;
    let mut progress = |progress: Progress| {
        if progress.stage == "tuning" {
            begin.get_or_insert_with(Instant::now);
        }
    };
    let report = context.probe(&options, &mut progress).expect("a probe");
    let tuning = report.tuning.as_ref().expect("a tuning");
    println!("{:.1} s\n{}", begin.expect("it says so").elapsed().as_secs_f64(), tuning.to_toml());
    assert_eq!((tuning.digest.as_str(), tuning.origin), (digest(&report.probed.topology).as_str(), Origin::Cuda));
    let devices: Vec<DeviceId> = context.machine().devices().collect();
    assert!(devices.iter().all(|device| context.backend().allocated_bytes(*device) == 0 && context.backend().stream_count(*device) == 0));
    let path = context.store_probe(&report, None).expect("stored");
    drop(context);

    // The file is used automatically, and if it is named. It is not used if another file is named or if its use is disabled.
    let named = path.to_string_lossy().into_owned();
    for (topology, tuned) in [(None, true), (Some("probed"), true), (Some(&*named), false), (Some("discovered"), false)] {
        let context = open(topology, Some(&directory)).expect("a context");
        assert_eq!(context.tuning(), report.tuning.as_ref().filter(|_| tuned), "{topology:?}");
    }
    let with = |tuning_file: Option<&str>| {
        let options = ContextOptions { backend: Some(BackendChoice::Cuda), ..ContextOptions::default() };
        let tuning_file = tuning_file.map(str::to_owned);
        let config = Config { cache_dir: Some(directory.0.clone()), tuning_file, verify: Verify::Bytes, ..Config::default() };
        Context::open(&options, config).expect("a context")
    };
    assert!(with(Some("none")).tuning().is_none());
    let context = with(None);
    assert!(context.describe().contains("tuned values are active: made for probed"), "{}", context.describe());
    let mut random = Random(61);
    for full in [1 << 20, 48 << 20, 200 << 20] {
        let bytes = scaled(full, 1 << 16) + 4_321;
        for (from, to) in [(DeviceId::HOST, GPU0), (GPU0, DeviceId::HOST)] {
            assert_moved(&context, from, to, bytes, &mut random);
        }
    }
    drop(context);

    // The new measurements contain no tuning.
    let mut newer = report.clone();
    newer.probed.topology.costs.copy += 1e-6;
    std::fs::write(&path, newer.to_toml()).expect("written");
    assert!(with(None).tuning().is_none());
}

#[test]
fn plans_of_a_probed_topology_lose_no_byte() {
    let Some(turn) = gpus(2) else { return };
    set_device(0);
    let context = open(Some("discovered"), None).expect("a context");
    let report = context.probe(&ProbeOptions::quick(), &mut |_| {}).expect("a probe");
    drop(context);
    let context = self::context(Some(report.probed.topology), |_| {});
    let bytes = (64 << 20) + 12_345;
    let mut random = Random(60);
    let last = DeviceId::gpu(turn.count - 1);
    for (from, to) in [(GPU0, last), (last, GPU0), (DeviceId::HOST, GPU0), (GPU0, DeviceId::HOST)] {
        assert_moved(&context, from, to, bytes, &mut random);
    }
}
