//! Tests which stored probes and tunings are used by contexts, and what is stored after a probe.

use super::*;
use crate::host::HostBackend;
use crate::probe_files::{kept, named, own};
use crate::topology::{self, Gpu, Topology};
use crate::tune::{self, Pattern, Side};
use crate::{NO_TUNING, PlanOptions, Transfer, Verify};
use std::time::Duration;

#[test]
fn seconds_become_dates() {
    for (days, text) in [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (11_017, "2000-03-01"), (20_778, "2026-11-21")] {
        assert_eq!(date(UNIX_EPOCH + Duration::from_secs(days * 86_400 + 86_399)).as_deref(), Some(text));
    }
}

/// Temporary directory that is removed when the value is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("mpgpu-probe-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a directory");
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn machine(gpus: &[u32]) -> Fingerprint {
    let gpu = |number: &u32| Gpu { uuid: format!("GPU-{number}"), name: "H200".into() };
    Fingerprint { backend: "cuda".into(), host: "0123".into(), driver: "580".into(), gpus: gpus.iter().map(gpu).collect() }
}

/// Returns the file of a probe of these GPUs. The link between GPU `n` and the host has `10 + n` GB/s.
fn file(fingerprint: &Fingerprint, format: u32) -> String {
    let mut text = String::from("name = \"probed\"\nnode = [\n");
    for index in 0..fingerprint.gpus.len() {
        text += &format!("  {{ name = \"gpu{index}\", kind = \"gpu\" }},\n");
    }
    text += "  { name = \"host0\", kind = \"host\" },\n]\n";
    for (index, gpu) in fingerprint.gpus.iter().enumerate() {
        let number: u32 = gpu.uuid[4..].parse().expect("a number");
        text += &format!("[[link]]\nbetween = [[\"gpu{index}\", \"host0\"]]\nkind = \"pcie\"\nbandwidth = {}e9\n", 10 + number);
        text += &format!("[[shared]]\nname = \"gpu{index}-host0\"\ncapacity = {}e9\n", 15 + number);
        text += &format!("links = [\"gpu{index}>host0\", \"host0>gpu{index}\"]\n");
    }
    let topology = topology::parse(&text).expect("well formed");
    let record = Record {
        format,
        version: "0.1.0".into(),
        date: Some("2026-11-21".into()),
        fingerprint: fingerprint.clone(),
        measurements: 7,
        residuals: Residuals { count: 2, median: 0.01, worst: 0.125 },
        notes: vec!["a note with \"quotes\"".into()],
    };
    let text = record.to_toml(&topology);
    assert_eq!(topology::parse_probed(&text), Ok((topology, Some(record))), "{text}");
    text
}

/// Returns the rate between each GPU and the host in GB/s.
fn rates(topology: Topology) -> Vec<f64> {
    let machine = Machine::new(topology).expect("well formed");
    (0..machine.gpu_count()).map(|gpu| machine.route(DeviceId::gpu(gpu), DeviceId::HOST).expect("a link").bandwidth / 1e9).collect()
}

#[test]
fn a_kept_probe_is_found_and_follows_the_visible_gpus() {
    let directory = Directory::new("kept");
    let all = machine(&[0, 1, 2, 3]);
    assert_eq!(kept(&directory.0, &all), None);
    assert_eq!(kept(&directory.0.join("missing"), &all), None);
    write(&directory.0.join(all.file_name()), &file(&all, FORMAT)).expect("written");
    let found = |gpus: &[u32]| kept(&directory.0, &machine(gpus)).map(|(_, topology)| rates(topology));
    assert_eq!(found(&[0, 1, 2, 3]), Some(vec![10.0, 11.0, 12.0, 13.0]));
    assert_eq!(found(&[3, 1]), Some(vec![13.0, 11.0]));
    assert_eq!(found(&[3, 0, 1, 2]), Some(vec![13.0, 10.0, 11.0, 12.0]));
    assert_eq!(found(&[2, 4]), None);
    // If several probes contain all visible GPUs, the one with the fewest GPUs is used.
    let two = machine(&[1, 3]);
    let text = file(&two, FORMAT).replace("13e9", "33e9").replace("1.3e10", "3.3e10").replace("1.8e10", "3.8e10");
    write(&directory.0.join(two.file_name()), &text).expect("written");
    assert_eq!(found(&[3, 1]), Some(vec![33.0, 11.0]));
    assert_eq!(found(&[3]), Some(vec![33.0]));
    assert_eq!(found(&[3, 0]), Some(vec![13.0, 10.0]));
}

#[test]
fn a_stale_probe_is_passed_over_when_kept_and_refused_when_named() {
    let directory = Directory::new("stale");
    let all = machine(&[0, 1]);
    let path = directory.0.join(all.file_name());
    let name = path.to_string_lossy().into_owned();
    let changes: [(&str, Fingerprint, u32); 5] = [
        ("driver", Fingerprint { driver: "590".into(), ..all.clone() }, FORMAT),
        ("host", Fingerprint { host: "4567".into(), ..all.clone() }, FORMAT),
        ("backend", Fingerprint { backend: "host".into(), ..all.clone() }, FORMAT),
        ("GPU-1", machine(&[0, 2]), FORMAT),
        ("format", all.clone(), FORMAT + 1),
    ];
    for (word, then, format) in changes {
        write(&path, &file(&then, format)).expect("written");
        assert_eq!(kept(&directory.0, &all), None, "{word}");
        let (stale, why) = own(&directory.0, &all).expect("a file");
        assert!(stale == path && why.as_ref().is_err_and(|why| why.contains(word)), "{why:?}");
        let error = named(&name, &all).expect_err("stale").to_string();
        assert!(error.contains(&name) && error.contains(word) && error.contains("mpgpu probe"), "{error}");
    }
    write(&path, &file(&all, FORMAT)).expect("written");
    assert_eq!(own(&directory.0, &all), Some((path.clone(), Ok(()))));
    assert_eq!(own(&directory.0, &machine(&[1])), None);
    assert_eq!(rates(named(&name, &all).expect("its own")), [10.0, 11.0]);
    assert_eq!(rates(named(&name, &machine(&[1])).expect("a part of it")), [11.0]);
    // A damaged file is not accepted as a topology. A file without a probe, and a preset, are used without a check.
    fs::write(&path, "name = ").expect("written");
    assert_eq!(kept(&directory.0, &all), None);
    assert!(named(&name, &all).is_err());
    let (topology, _) = topology::parse_probed(&file(&all, FORMAT)).expect("well formed");
    fs::write(&path, topology.to_toml()).expect("written");
    assert_eq!(named(&name, &machine(&[5])).expect("nobody says of which machine"), topology);
    assert_eq!(named("beluga", &all).expect("a preset"), topology::load("beluga").expect("a preset"));
}

/// Probes and tunes virtual devices, and stores probe and tuning in the directory. Returns the path of the probe, its report, and the
/// number of progress messages of the search.
fn tuned(directory: &Directory) -> (PathBuf, ProbeReport, u32) {
    let machine = Machine::new(topology::load("pcie-4").expect("a preset")).expect("well formed");
    let backend = Arc::new(HostBackend::new(machine.gpu_count(), machine.host_count()));
    let config = Config { cache_dir: Some(directory.0.clone()), ..Config::default() };
    let context = Context::with_backend(Arc::new(machine), backend, config).expect("a context");
    let options = ProbeOptions {
        copy_seconds: 0.1e-3,
        repetitions: 1,
        measurements: 20,
        // The last size is larger than the sizes that are tuned on a CPU.
        tuned_bytes: vec![64 << 10, 256 << 10, TUNED_ON_CPU + 1],
        most_error: f64::INFINITY,
        ..ProbeOptions::quick()
    };
    let mut told = 0;
    let mut progress = |progress: Progress| {
        if progress.stage == "tuning" {
            assert_eq!(progress.done, told);
            assert!(progress.done < progress.of && progress.of.is_multiple_of(2), "{progress:?}");
            told += 1;
        }
    };
    let mut report = context.probe(&options, &mut progress).expect("a probe");
    // The report appears to be from GPUs, because probes of virtual devices are not stored.
    report.record.fingerprint.backend = "cuda".into();
    report.record.residuals.median = 0.01;
    for device in context.machine().devices() {
        assert_eq!((context.backend().allocated_bytes(device), context.backend().stream_count(device)), (0, 0), "{device}");
    }
    let path = context.store_probe(&report, None).expect("stored");
    (path, report, told)
}

/// Creates a context as on GPUs for which `probe` is found automatically. If `gpus` is given, only these GPUs are visible.
fn on(probe: &Path, gpus: Option<&[u32]>, tuning_file: Option<&str>) -> Context {
    let (topology, record) = topology::load_probed(&probe.to_string_lossy()).expect("a probe");
    let mut now = record.expect("of a machine").fingerprint;
    if let Some(gpus) = gpus {
        now.gpus = gpus.iter().map(|gpu| now.gpus[*gpu as usize].clone()).collect();
    }
    let found = kept(probe.parent().expect("a directory"), &now).expect("kept");
    assert_eq!((&found.0, &found.1), (&probe.to_path_buf(), &gpus.map_or(topology.clone(), |g| topology.with_gpus(g).expect("its own"))));
    let machine = Machine::new(found.1).expect("well formed");
    let backend = Arc::new(HostBackend::new(machine.gpu_count(), machine.host_count()));
    let config = Config { tuning_file: tuning_file.map(str::to_owned), verify: Verify::Bytes, ..Config::default() };
    Context::on_probe(Arc::new(machine), backend, config, &found.0).expect("a context")
}

fn names(at: &Path) -> Vec<String> {
    let entries = fs::read_dir(at).expect("a directory").flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn what_is_tuned_for_a_probe_is_kept_beside_it_and_taken_with_it() {
    let directory = Directory::new("tuned");
    let (path, report, told) = tuned(&directory);
    let tuning = report.tuning.as_ref().expect("tuned");
    assert_eq!((tuning.digest.as_str(), tuning.origin), (tune::digest(&report.probed.topology).as_str(), Origin::Host));
    // Each class has two sizes, and each case has at least one class. No class has a setting for the third size.
    assert!(told as usize == 2 * tuning.classes.len() && tuning.classes.iter().all(|t| t.stream.sizes.len() <= 2), "{told}: {tuning:?}");
    for sides in [(Side::Host, Side::Gpu), (Side::Gpu, Side::Host), (Side::Gpu, Side::Gpu)] {
        let patterns: Vec<_> = tuning.classes.iter().map(|t| t.class).filter(|class| (class.from, class.to) == sides).collect();
        let expected = if sides.0 == sides.1 { Pattern::Exchange } else { Pattern::Single };
        assert!(!patterns.is_empty() && patterns.iter().all(|class| class.pattern == expected), "{sides:?}: {tuning:?}");
    }
    let beside = tuning_beside(&path);
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    assert_eq!(names(&directory.0), [name(&path), name(&beside)]);
    assert_eq!(name(&beside).replace("tuning-", "probe-"), name(&path));
    assert_eq!(tune::read(&beside).as_ref(), Ok(tuning));

    let context = on(&path, None, None);
    assert_eq!(context.tuning(), Some(tuning));
    let text = context.describe();
    assert!(text.contains("tuned values are active: made for probed") && text.contains(&*beside.to_string_lossy()), "{text}");
    // A setting changes how data is copied, but not the result.
    let bytes = 200_001;
    let gpu = DeviceId::gpu;
    let all = (0..16).map(|i| (gpu(i / 4), gpu(i % 4))).filter(|(from, to)| from != to).collect();
    for pairs in [vec![(DeviceId::HOST, gpu(1))], vec![(gpu(1), DeviceId::HOST)], all] {
        let transfer = |(src_device, dst_device): (DeviceId, DeviceId)| {
            let [dst, src] = [dst_device, src_device].map(|device| context.allocate(device, bytes).expect("memory"));
            Transfer { dst, dst_device, src, src_device, bytes }
        };
        let batch: Vec<Transfer> = pairs.into_iter().map(transfer).collect();
        let plan = context.plan(&batch, &PlanOptions::default()).expect("planned");
        let stream = context.create_stream(DeviceId::gpu(1)).expect("a stream");
        plan.execute(stream).expect("enqueued").wait().expect("every byte is compared");
    }

    // A caller can disable the tuning, or name another tuning file.
    let without = on(&path, None, Some(NO_TUNING));
    assert!(without.tuning().is_none() && !without.describe().contains("tuned values"), "{}", without.describe());
    let other = Tuning { classes: Vec::new(), ..tuning.clone() };
    let file = directory.0.join("other.toml");
    fs::write(&file, other.to_toml()).expect("written");
    assert_eq!(on(&path, None, Some(&*file.to_string_lossy())).tuning(), Some(&other));
}

#[test]
fn a_kept_tuning_of_other_gpus_of_an_earlier_probe_or_damaged_is_passed_over() {
    let directory = Directory::new("passed-over");
    let (path, report, _) = tuned(&directory);
    let beside = tuning_beside(&path);
    let text = fs::read_to_string(&beside).expect("there");
    // Three of the four GPUs count as a different machine, so the tuning is not used.
    assert!(on(&path, Some(&[0, 1, 2]), None).tuning().is_none());
    assert!(on(&path, None, None).tuning().is_some());
    let mut damaged = vec![String::new(), "version = 1".into(), text.replace("version = 1", "version = 2")];
    damaged.push(text.replace("origin = \"host\"", "origin = \"cuda\""));
    damaged.push(text[..text.len() - 2].to_owned());
    for damaged in damaged {
        fs::write(&beside, &damaged).expect("written");
        let context = on(&path, None, None);
        assert!(context.tuning().is_none() && context.config().tuning_file.is_none(), "{damaged}");
    }

    // A new probe of the same machine is stored, and the process ends before its tuning is written.
    fs::write(&beside, &text).expect("written");
    let mut newer = report.clone();
    newer.probed.topology.costs.copy += 1e-6;
    write(&path, &newer.to_toml()).expect("written");
    assert!(on(&path, None, None).tuning().is_none());
    // If the process ends before the probe is written, nothing has changed.
    write(&path, &report.to_toml()).expect("written");
    assert_eq!(on(&path, None, None).tuning(), report.tuning.as_ref());

    // A probe without tuning removes the earlier tuning. A probe that is stored in another file changes nothing.
    let config = Config { cache_dir: Some(directory.0.clone()), ..Config::default() };
    let context = Context::with_backend(
        Arc::new(Machine::new(report.probed.topology.clone()).expect("well formed")),
        Arc::new(HostBackend::new(4, 1)),
        config,
    );
    let context = context.expect("a context");
    newer.tuning = None;
    context.store_probe(&newer, Some(&directory.0.join("node.toml"))).expect("stored");
    assert!(beside.exists() && names(&directory.0).len() == 3);
    assert_eq!(context.store_probe(&newer, None).expect("stored"), path);
    assert!(!beside.exists() && on(&path, None, None).tuning().is_none());
    context.store_probe(&newer, None).expect("there was none to take away");
    // If the tuning file cannot be written, the probe is stored nevertheless.
    fs::create_dir(&beside).expect("in its place");
    assert_eq!(context.store_probe(&report, None).expect("the probe is kept"), path);
    assert_eq!(topology::load_probed(&path.to_string_lossy()).expect("whole").0, report.probed.topology);
    assert!(on(&path, None, None).tuning().is_none());
}

#[test]
fn a_probe_that_does_not_predict_its_own_copies_is_neither_kept_nor_taken_nor_tuned_from() {
    let directory = Directory::new("wrong");
    let (path, good, _) = tuned(&directory);
    let kept_then = names(&directory.0);
    let (_, record) = topology::load_probed(&path.to_string_lossy()).expect("a probe");
    let now = record.expect("of a machine").fingerprint;
    let config = Config { cache_dir: Some(directory.0.clone()), ..Config::default() };
    let machine = Arc::new(Machine::new(good.probed.topology.clone()).expect("well formed"));
    let context = Context::with_backend(machine, Arc::new(HostBackend::new(4, 1)), config).expect("a context");
    let mut wrong = good.clone();
    wrong.record.residuals.median = 0.7;
    let refused = context.store_probe(&wrong, None).expect_err("it would replace a good one").to_string();
    assert!(refused.contains("70 %") && refused.contains("20 %") && refused.contains("name a file"), "{refused}");
    assert!(names(&directory.0) == kept_then && kept(&directory.0, &now).is_some(), "the earlier one stays in force");
    // A probe that is stored in a named file is for inspection. Contexts refuse to use it, even at the path at which they look for probes.
    let named_file = directory.0.join("node.toml");
    context.store_probe(&wrong, Some(&named_file)).expect("written");
    let error = named(&named_file.to_string_lossy(), &now).expect_err("off by 70 %").to_string();
    assert!(error.contains("70 %"), "{error}");
    write(&path, &wrong.to_toml()).expect("written");
    assert_eq!(kept(&directory.0, &now), None);
    assert!(own(&directory.0, &now).is_some_and(|(_, why)| why.is_err_and(|why| why.contains("70 %"))));
    // No prediction is as accurate as this option requires, so nothing is tuned. The notes of the report give the reason.
    let options = ProbeOptions { measurements: 20, repetitions: 1, tuned_bytes: vec![64 << 10], most_error: -1.0, ..ProbeOptions::quick() };
    let report = context.probe(&options, &mut |progress| assert_ne!(progress.stage, "tuning")).expect("a probe");
    assert!(report.tuning.is_none() && report.record.notes.iter().any(|note| note.contains("were off by")), "{:?}", report.record.notes);
}

#[test]
fn files_are_written_whole_or_not_at_all() {
    let directory = Directory::new("write");
    let path = directory.0.join("deep").join("er").join("probe.toml");
    write(&path, "one").expect("directories are made");
    write(&path, "two").expect("replaced");
    assert_eq!(fs::read_to_string(&path).expect("there"), "two");
    assert_eq!(names(path.parent().expect("a parent")), ["probe.toml"]);
    // A directory has the name of the file. The rename then fails, and no temporary file remains.
    assert!(write(&directory.0.join("deep"), "x").is_err());
    assert_eq!(names(&directory.0), ["deep"]);
    assert!(write(&path.join("below"), "x").is_err());
}
