//! Tests a complete probe of the host backend. The probe copies real data, and its file identifies the machine. Times are not checked.

use mpgpu::abi::*;
use mpgpu_backend::*;
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions, ProbeReport};
use mpgpu_core::plan::{Place, Program};
use mpgpu_core::topology::FORMAT;
use mpgpu_core::topology::{self, DeviceId, Machine, TopologyError};
use mpgpu_devices::host::HostBackend;
use mpgpu_measure::probe::{Integrity, ProbeOptions};
use proptest::prelude::*;
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::{Arc, LazyLock};

/// Returns probe options that accept any error of predictions, because times of CPU threads vary.
fn quick() -> ProbeOptions {
    ProbeOptions { copy_seconds: 0.1e-3, repetitions: 1, measurements: 150, most_error: f64::INFINITY, ..ProbeOptions::quick() }
}

/// Changes a report so that it appears to be from GPUs, because probes of virtual devices are not stored automatically.
fn as_on_gpus(mut report: ProbeReport) -> ProbeReport {
    report.record.fingerprint.backend = "cuda".into();
    report.record.residuals.median = 0.01;
    report
}

/// Temporary directory that is removed when the value is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("mpgpu-{name}-{}", std::process::id()));
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

fn context(topology: &str, cache: Option<&Path>) -> Context {
    let options = ContextOptions { backend: Some(BackendChoice::Host), topology: Some(topology.into()), ..ContextOptions::default() };
    let config = Config { cache_dir: cache.map(Path::to_owned), ..Config::default() };
    Context::open(&options, config).expect("a context")
}

#[test]
fn a_probe_of_virtual_devices_is_a_topology_with_its_fingerprint() {
    let directory = Directory::new("probe");
    let context = context("beluga", Some(&directory.0.join("mpgpu")));
    assert_eq!(context.probed(), None);
    let report = context.probe(&quick(), &mut |_| {}).expect("a probe");
    assert_eq!(report.probed.hops.len(), 20);
    assert!(report.probed.hops.iter().all(|hop| hop.verdict == Integrity::Intact && hop.rate > 0.0 && hop.start > 0.0));
    let machine = Machine::new(report.probed.topology.clone()).expect("well formed");
    assert_eq!((machine.gpu_count(), machine.host_count()), (4, 1));
    for from in machine.devices() {
        assert!(machine.devices().all(|to| machine.route(from, to).is_some()), "{from}");
    }
    let fingerprint = &report.record.fingerprint;
    assert_eq!(
        (fingerprint.backend.as_str(), report.record.format, report.record.measurements),
        ("host", FORMAT, report.probed.measurements)
    );
    assert_eq!(
        fingerprint.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect::<Vec<_>>(),
        ["virtual-0", "virtual-1", "virtual-2", "virtual-3"]
    );

    let refused = context.store_probe(&report, None).expect_err("no context would look for it").to_string();
    assert!(refused.contains("virtual devices") && refused.contains("name a file") && !directory.0.join("mpgpu").exists(), "{refused}");
    let named = directory.0.join("mpgpu").join("node.toml");
    let path = context.store_probe(&report, Some(&named)).expect("stored");
    assert_eq!(path, named);
    let text = std::fs::read_to_string(&path).expect("there");
    assert_eq!(text, report.to_toml());
    assert_eq!(context.probed().as_deref(), Some(text.as_str()));
    assert_eq!(topology::parse_probed(&text), Ok((report.probed.topology.clone(), Some(report.record.clone()))));
    // The probe has released all its resources.
    for device in machine.devices() {
        assert_eq!(context.backend().allocated_bytes(device), 0);
        assert_eq!(context.backend().stream_count(device), 0);
    }
    // The next context uses the probe by the name of its file. On the host backend, a probe of any machine may be named.
    let next = self::context(&path.to_string_lossy(), None);
    assert_eq!(next.machine().topology(), &report.probed.topology);
    assert!(next.describe().contains("probed") && next.describe().contains(&*path.to_string_lossy()), "{}", next.describe());
}

#[test]
fn without_a_directory_or_with_one_that_cannot_be_written_the_probe_says_so() {
    let context = context("beluga", None);
    let report = as_on_gpus(context.probe(&quick(), &mut |_| {}).expect("a probe"));
    let error = context.store_probe(&report, None).expect_err("nowhere to go").to_string();
    assert!(error.contains("XDG_CACHE_HOME"), "{error}");
    let error = context.store_probe(&report, Some(Path::new("/dev/null/probe.toml"))).expect_err("no directory").to_string();
    assert!(error.contains("/dev/null/probe.toml") && error.contains("cannot be written"), "{error}");
    context.close().expect("closed");
    assert!(context.probe(&quick(), &mut |_| {}).is_err());
}

#[test]
fn the_cache_directory_follows_the_environment() {
    let directory = |pairs: &[(&str, &str)]| Config::from_pairs(pairs.iter().copied()).expect("accepted").cache_dir;
    assert_eq!(directory(&[]), None);
    assert_eq!(directory(&[("HOME", "/home/me")]), Some("/home/me/.cache/mpgpu".into()));
    assert_eq!(directory(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "/scratch")]), Some("/scratch/mpgpu".into()));
    // A relative path is ignored (XDG base directory specification).
    assert_eq!(directory(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "")]), Some("/home/me/.cache/mpgpu".into()));
    assert_eq!(directory(&[("HOME", "me"), ("XDG_CACHE_HOME", "cache")]), None);
}

/// Host backend with faults. Copies between two devices omit a byte but report success, and GPUs have no memory for buffers of one size.
struct Losing {
    inner: HostBackend,
    from: DeviceId,
    to: DeviceId,
    refused: u64,
}

impl Losing {
    /// Returns the program without the last byte of each plain copy between the two faulty devices, or `None` if it has no such copy.
    fn damaged(&self, execution: &Execution<'_>) -> Option<Program> {
        let [ends] = &execution.endpoints[..] else { return None };
        let device = |address| self.inner.locate(address).ok().flatten().map(|allocation| allocation.device);
        if (device(ends.src), device(ends.dst)) != (Some(self.from), Some(self.to)) {
            return None;
        }
        let mut program = Program::clone(execution.program);
        for copy in program.ops.iter_mut().flat_map(|op| &mut op.copies) {
            // A copy through a staging slot, as in a plan through other devices, loses no data.
            if !matches!((copy.from, copy.to), (Place::Source { .. }, Place::Destination { .. })) {
                return None;
            }
            copy.bytes -= 1;
        }
        Some(program)
    }
}

impl Backend for Losing {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn is_virtual(&self) -> bool {
        self.inner.is_virtual()
    }
    fn identity(&self) -> Result<Identity, BackendError> {
        self.inner.identity()
    }
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        if bytes == self.refused && !device.is_host() {
            return Err(BackendError::OutOfMemory { device: device.0, bytes });
        }
        self.inner.allocate(device, bytes)
    }
    fn allocate_shared(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.allocate(device, bytes)
    }
    fn free(&self, address: u64) -> Result<(), BackendError> {
        self.inner.free(address)
    }
    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        self.inner.locate(address)
    }
    fn allocated_bytes(&self, device: DeviceId) -> u64 {
        self.inner.allocated_bytes(device)
    }
    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError> {
        self.inner.create_stream(device)
    }
    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        self.inner.destroy_stream(stream)
    }
    fn stream_count(&self, device: DeviceId) -> u64 {
        self.inner.stream_count(device)
    }
    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        self.inner.synchronize_stream(stream)
    }
    fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), BackendError> {
        self.inner.launch_host(stream, work)
    }
    fn create_event(&self) -> Result<EventHandle, BackendError> {
        self.inner.create_event()
    }
    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.inner.destroy_event(event)
    }
    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        self.inner.record_event(event, stream)
    }
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError> {
        self.inner.stream_wait_event(stream, event)
    }
    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.inner.synchronize_event(event)
    }
    fn submit(&self, execution: &Execution<'_>) -> Result<Option<Completion>, BackendError> {
        match self.damaged(execution) {
            Some(program) => self.inner.submit(&Execution { program: &Arc::new(program), ..*execution }),
            None => self.inner.submit(execution),
        }
    }
    fn synchronize(&self) -> Result<(), BackendError> {
        self.inner.synchronize()
    }
}

#[test]
fn a_single_byte_that_does_not_arrive_condemns_the_pair_and_no_other() {
    let machine = Arc::new(Machine::new(topology::load("beluga").expect("a preset")).expect("well formed"));
    for (from, to) in [(DeviceId::gpu(2), DeviceId::gpu(1)), (DeviceId::gpu(3), DeviceId::HOST)] {
        let backend = Losing { inner: HostBackend::new(4, 1), from, to, refused: 0 };
        let context = Context::with_backend(machine.clone(), Arc::new(backend), Config::default()).expect("a context");
        let options = ProbeOptions { tuned_bytes: vec![64 << 10], ..quick() };
        let report = context.probe(&options, &mut |_| {}).expect("a probe");
        // A path to or from host memory that does not exist is not tuned.
        assert!(report.tuning.is_some());
        let lost: Vec<_> = report.probed.hops.iter().filter(|hop| hop.verdict != Integrity::Intact).collect();
        let probed = Machine::new(report.probed.topology.clone()).expect("well formed");
        assert_eq!(probed.route(from, to), None);
        if to.is_host() {
            // The check of a copy to this GPU reads the data back over the faulty path to host memory, so copies to this GPU are reported
            // too.
            assert!(lost.iter().all(|hop| hop.to == from || hop.from == from), "{lost:?}");
        } else {
            assert_eq!(lost.iter().map(|hop| (hop.from, hop.to)).collect::<Vec<_>>(), [(from, to)]);
            assert_eq!(lost[0].verdict, Integrity::Lost { wrong: 1, of: 4 << 20 });
        }
        assert!(
            report.record.notes.iter().any(|note| note.contains(&format!("from {from} to {to} lose bytes"))),
            "{:?}",
            report.record.notes
        );
    }
}

#[test]
fn a_search_that_fails_leaves_the_probe_and_no_earlier_tuning() {
    const TUNED: u64 = 96 << 10;
    let directory = Directory::new("probe-untuned");
    let machine = Arc::new(Machine::new(topology::load("beluga").expect("a preset")).expect("well formed"));
    // There is no path from a device to itself, so no data is lost there.
    let gpu0 = DeviceId::gpu(0);
    let backend = Losing { inner: HostBackend::new(4, 1), from: gpu0, to: gpu0, refused: TUNED };
    let config = Config { cache_dir: Some(directory.0.clone()), ..Config::default() };
    let context = Context::with_backend(machine.clone(), Arc::new(backend), config).expect("a context");
    // The search starts with the larger size, for which the source can be allocated but the destination cannot.
    let options = ProbeOptions { tuned_bytes: vec![64 << 10, TUNED], ..quick() };
    let mut stages = Vec::new();
    let report = as_on_gpus(context.probe(&options, &mut |progress| stages.push(progress.stage)).expect("a probe"));
    assert_eq!((stages.last(), &report.tuning), (Some(&"tuning"), &None));
    assert!(machine.devices().all(|device| context.backend().allocated_bytes(device) == 0 && context.backend().stream_count(device) == 0));
    let earlier = directory.0.join(report.record.fingerprint.file_name().replace("probe-", "tuning-"));
    std::fs::write(&earlier, "of an earlier probe").expect("written");
    let path = context.store_probe(&report, None).expect("stored");
    assert_eq!(topology::load_probed(&path.to_string_lossy()).expect("whole").0, report.probed.topology);
    assert!(!earlier.exists());
}

#[test]
fn the_c_interface_probes_keeps_and_gives_back_the_file() {
    let directory = Directory::new("probe-abi");
    let path = directory.0.join("node.toml");
    let (topology, file) = (CString::new("narval").expect("text"), CString::new(path.to_string_lossy().as_bytes()).expect("text"));
    let options = mp_context_options_t {
        size: size_of::<mp_context_options_t>(),
        backend: 1,
        topology: topology.as_ptr(),
        staging_bytes: 0,
        cache_plans: 0,
        signal_wait: 0,
        host_threads: 0,
        cache_graphs: 0,
    };
    let mut context = null_mut();
    // SAFETY: valid options and a place for the handle.
    assert_eq!(unsafe { mp_context_create_versioned(&options, MP_VERSION, &mut context) }, mp_status_t::MP_SUCCESS);
    let mut length = 0;
    // SAFETY: a place for the length.
    assert_eq!(unsafe { mp_context_probed(context, null_mut(), 0, &mut length) }, mp_status_t::MP_ERROR_TOPOLOGY);
    let mut probe = mp_probe_options_t { size: size_of::<mp_probe_options_t>(), file: file.as_ptr(), keep: 0, quick: 3 };
    // SAFETY: valid options.
    assert_eq!(unsafe { mp_context_probe(context, &probe) }, mp_status_t::MP_ERROR_INVALID_ARGUMENT);
    probe.quick = 1;
    // SAFETY: as above.
    assert_eq!(unsafe { mp_context_probe(context, &probe) }, mp_status_t::MP_SUCCESS);
    // SAFETY: a place for the length.
    assert_eq!(unsafe { mp_context_probed(context, null_mut(), 0, &mut length) }, mp_status_t::MP_SUCCESS);
    let mut text = vec![0_u8; length];
    // SAFETY: the buffer has the length that was returned.
    assert_eq!(unsafe { mp_context_probed(context, text.as_mut_ptr().cast(), length, &mut length) }, mp_status_t::MP_SUCCESS);
    let text = CStr::from_bytes_with_nul(&text).expect("one NUL, at the end").to_str().expect("text");
    assert_eq!(std::fs::read_to_string(&path).expect("written"), text);
    std::fs::remove_file(&path).expect("there");
    (probe.keep, probe.file) = (2, null());
    // SAFETY: valid options.
    assert_eq!(unsafe { mp_context_probe(context, &probe) }, mp_status_t::MP_SUCCESS);
    assert!(!path.exists());
    assert_eq!(mp_context_destroy(context), mp_status_t::MP_SUCCESS);
}

/// Text of a file with a probe, which tests damage.
static FILE: LazyLock<String> = LazyLock::new(|| {
    let report = context("beluga", None).probe(&quick(), &mut |_| {}).expect("a probe");
    report.to_toml()
});

#[test]
fn the_table_of_a_probe_is_strict() {
    let refused = |from: &str, to: &str| {
        assert!(FILE.contains(from), "{from}");
        topology::parse_probed(&FILE.replacen(from, to, 1)).expect_err("refused").to_string()
    };
    for (from, to, word) in [
        ("[probe]\n", "[probe]\nsurprise = 1\n", "surprise"),
        ("format = 4", "format = -1", "line"),
        ("driver = \"none\"\n", "", "driver"),
        ("uuid = \"virtual-1\"", "uuid = \"virtual-0\"", "GPU 1"),
        ("median = ", "median = -", "residuals"),
        ("name = \"virtual device on CPU threads\" },\n]", "name = \"x\", cores = 7 },\n]", "cores"),
    ] {
        let error = refused(from, to);
        assert!(error.contains(word), "{error}");
    }
    let fewer = FILE.replace("    { uuid = \"virtual-3\", name = \"virtual device on CPU threads\" },\n", "");
    assert!(matches!(topology::parse(&fewer), Err(TopologyError::Probe { .. })));
    let long = FILE.replacen("driver = \"none\"", &format!("driver = \"{}\"", "x".repeat(5000)), 1);
    let error = topology::parse(&long).expect_err("too long").to_string();
    assert!(error.len() < 500, "{error}");
}

#[test]
fn a_file_of_an_earlier_form_is_refused_with_what_to_do() {
    // Costs have other names in a file of the old format. The error must be about the format, not about these names.
    let old = FILE.replacen("format = 4", "format = 3", 1).replacen("chunk_via_host = ", "chunk = ", 1);
    assert!(FILE.contains("format = 4") && old.contains("\nchunk = "));
    let error = topology::parse_probed(&old).expect_err("of another version").to_string();
    assert!(error.contains("format of the probe is 3") && error.contains("mpgpu probe"), "{error}");
    // Without the table [probe], the file is read as a topology file, which has an unknown key.
    let error = topology::parse(&old[..old.find("[probe]").expect("a table")]).expect_err("a wrong key").to_string();
    assert!(error.contains("`chunk`"), "{error}");
}

proptest! {
    #![proptest_config(crate::common::config(256))]

    #[test]
    fn damaged_probes_are_refused_or_sound(edits in prop::collection::vec((0..6000_usize, 0..40_usize, "[\\[\\]{}\"'=.,#\n a-z0-9_+-]{0,12}"), 1..5)) {
        let mut text = FILE.clone();
        for (at, gone, new) in edits {
            let boundary = |mut at: usize| {
                at = at.min(text.len());
                while !text.is_char_boundary(at) {
                    at -= 1;
                }
                at
            };
            let (start, end) = (boundary(at), boundary(at + gone));
            text.replace_range(start..end, &new);
        }
        match topology::parse_probed(&text) {
            Err(error) => prop_assert!(error.to_string().len() < 2_000, "{}", error),
            Ok((topology, Some(record))) => {
                let again = topology::parse_probed(&record.to_toml(&topology));
                prop_assert_eq!(again, Ok((topology, Some(record))));
            }
            Ok((topology, None)) => prop_assert_eq!(topology::parse(&topology.to_toml()), Ok(topology)),
        }
    }

    #[test]
    fn any_choice_of_gpus_of_any_machine_is_a_machine(seed in any::<u64>()) {
        let mut random = crate::common::Random(seed);
        let topology = crate::common::topology(&mut random, 10);
        let machine = Machine::new(topology.clone()).expect("well formed");
        let mut order: Vec<u32> = (0..machine.gpu_count()).collect();
        for index in 0..order.len() {
            order.swap(index, index + random.below((machine.gpu_count() as usize - index) as u64) as usize);
        }
        prop_assert_eq!(topology.with_gpus(&(0..machine.gpu_count()).collect::<Vec<_>>()), Some(topology.clone()));
        order.truncate(random.below(order.len() as u64 + 1) as usize);
        let chosen = Machine::new(topology.with_gpus(&order).expect("GPUs that exist")).expect("well formed");
        prop_assert_eq!(chosen.gpu_count() as usize, order.len());
        for (a, &from) in (0..).zip(&order) {
            // The links that remain do not change. A route can only lose alternatives, and no route leads through a device.
            prop_assert_eq!(
                chosen.route(DeviceId::gpu(a), DeviceId::HOST).map(|route| route.bandwidth),
                machine.route(DeviceId::gpu(from), DeviceId::HOST).map(|route| route.bandwidth)
            );
        }
        prop_assert_eq!(topology.with_gpus(&[machine.gpu_count()]), None);
        prop_assert_eq!(topology.with_gpus(&[0, 0]), None);
    }
}
