//! Probing a context's machine, and the files in which probes are kept.
//!
//! A probe is kept in the cache directory under a name that its GPUs give it, so that a cluster's nodes can share a home directory. A
//! context on CUDA for which nobody names a topology takes the file of its GPUs, if there is one. A file that the driver or the
//! library has outlived is passed over with a warning; named explicitly, it is refused.
//!
//! Beside it lies the tuning that was found with it, if any. The probe is written first, then the tuning is written or removed. If the
//! process ends in between, the digest of the old tuning does not match the new probe, and the tuning is ignored.

use super::config::Config;
use super::error::Error;
use super::lifetime::Context;
use super::score::Executed;
use crate::backend::{Backend, Identity};
use crate::harness::TransferHarness;
use crate::plan::Options;
use crate::probe::{ProbeOptions, Probed, Progress, probe};
use crate::sync::lock;
use crate::topology::{self, DeviceId, Machine, Topology, TopologyError};
use crate::topology::{FORMAT, Fingerprint, Record, hash};
use crate::tune::{self, Campaign, Case, Origin, Search, TuneError, Tuning, TuningError};
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// The most files of the cache directory that are looked at.
const MOST_FILES: usize = 1024;

/// The largest copy that is tuned where a CPU moves every byte.
const TUNED_ON_CPU: u64 = 4 << 20;

/// A measured machine, and what its file says.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeReport {
    /// What was found.
    pub probed: Probed,
    /// Of which machine, when, how well.
    pub record: Record,
    /// What was tuned for it. `None` if nothing was to be tuned, or the search failed.
    pub tuning: Option<Tuning>,
}

impl ProbeReport {
    /// The file: a topology with the table `[probe]`.
    pub fn to_toml(&self) -> String {
        self.record.to_toml(&self.probed.topology)
    }
}

impl Context {
    /// Measures the machine of this context: which copies there are, how fast, and which slow each other down (`docs/reference/probe.md`).
    ///
    /// Then looks for better plans than the model's on what was found, for the copies that `options` names; where that fails, a warning in
    /// the log says why, and the probe stands.
    ///
    /// Takes seconds, memory and streams of every device, and all their links: nothing else should run on the machine meanwhile. The
    /// context goes on with the topology that it has; [`store`](Context::store_probe) the result for the next one. On the host backend it
    /// measures copies by CPU threads.
    pub fn probe(&self, options: &ProbeOptions, progress: &mut dyn FnMut(Progress)) -> Result<ProbeReport, Error> {
        if !self.is_open() {
            return Err(Error::ContextDestroyed);
        }
        let backend = self.backend();
        // Not the topology in force: a probed one lacks the pairs that lost bytes, and these may work by now.
        let seen = super::open::discovered(backend.name())?.map(Machine::new).transpose()?;
        let machine = seen.as_ref().filter(|seen| seen.gpu_count() == self.machine().gpu_count()).unwrap_or(self.machine());
        let fingerprint = fingerprint(backend.name(), backend.identity()?);
        let devices: Vec<DeviceId> = machine.devices().collect();
        let mut harness = TransferHarness::new(backend, &devices)?;
        let mut probed = probe(machine, &mut harness, options, progress)?;
        drop(harness);
        let date = date(SystemTime::now());
        probed.topology.description = describe(&fingerprint, date.as_deref(), &probed);
        let record = Record {
            format: FORMAT,
            version: env!("CARGO_PKG_VERSION").into(),
            date,
            fingerprint,
            measurements: probed.measurements,
            residuals: probed.residuals,
            notes: probed.notes.clone(),
        };
        let mut report = ProbeReport { probed, record, tuning: None };
        *lock(&self.probed) = Some(report.to_toml().into());
        let on_cpu = self.backend().name() == "host";
        let sizes: Vec<u64> = options.tuned_bytes.iter().copied().filter(|bytes| !on_cpu || *bytes <= TUNED_ON_CPU).collect();
        if !sizes.is_empty() {
            let tuned = self.tune_probed(&report.probed, &sizes, progress);
            report.tuning = tuned.map_err(|error| log::warn!("nothing is tuned for the probe, which stands by itself: {error}")).ok();
        }
        Ok(report)
    }

    /// Tunes plans for the machine as probed. Copies of host memory: by the short search, because the best engine, number of chunks and share
    /// of relays differ between machines and the model has no term for them. All-to-alls: paths only, because the planner by itself gives them
    /// none but the direct ones, in turns (`docs/reference/probe.md`).
    fn tune_probed(&self, probed: &Probed, sizes: &[u64], progress: &mut dyn FnMut(Progress)) -> Result<Tuning, TuneError<Error>> {
        let machine = Machine::new(probed.topology.clone()).map_err(|error| TuneError::Score(error.into()))?;
        // Without options of the environment or of an earlier tuning.
        let config = Config { staging_bytes: self.config().staging_bytes, ..Config::default() };
        let base = Options { staging_bytes: config.staging_bytes, ..Options::default() };
        let origin = if self.backend().name() == "host" { Origin::Host } else { Origin::Cuda };
        let context = Context::with_backend(Arc::new(machine), self.shared.backend.clone(), config).map_err(TuneError::Score)?;
        let mut score = Executed::new(&context);
        let campaign = Campaign { machine: context.machine(), sizes, base, search: Search::Short, in_force: None };
        let of_paths = Campaign { search: Search::Paths, ..campaign.clone() };
        let batches = |case| campaign.batches(case).into_iter().map(move |(size, batch)| (case, size, batch));
        let all: Vec<_> = [Case::H2d, Case::D2h, Case::AllToAll].into_iter().flat_map(batches).collect();
        let of = all.len() as u32;
        let (mut points, mut measurements) = (Vec::new(), probed.measurements);
        for (done, (case, size, batch)) in (0..).zip(all) {
            progress(Progress { stage: "tuning", done, of, measurements });
            let search = if case == Case::AllToAll { &of_paths } else { &campaign };
            match search.point(case, size, batch, &mut score, |_, _, _| {}) {
                Ok(Some(point)) => {
                    measurements += point.short_evaluations() as u32;
                    points.push(point);
                }
                // A pair that no path joins.
                Ok(None) | Err(TuneError::Plan(_)) => {}
                Err(error) => return Err(error),
            }
        }
        campaign.tuning(&points, origin, &mut score)
    }

    /// The file that the last probe of this context made.
    pub fn probed(&self) -> Option<Arc<str>> {
        lock(&self.probed).clone()
    }

    /// A context on the topology of a kept probe, with its tuning. `MPGPU_TUNING_FILE` has precedence, also where it is `none`.
    pub(super) fn on_probe(machine: Arc<Machine>, backend: Arc<dyn Backend>, mut config: Config, probe: &Path) -> Result<Context, Error> {
        if config.tuning_file.is_some() {
            return Context::with_backend(machine, backend, config);
        }
        let (path, tuning) = kept_tuning(probe, &machine, backend.name()).unzip();
        config.tuning_file = path.map(|path| path.to_string_lossy().into_owned());
        Context::with_tuning(machine, backend, config, tuning)
    }

    /// Writes a probe to `file`, or where the next context finds it by itself; returns where that is. There, and not beside `file`, its
    /// tuning is written too; where it has none, that of an earlier probe is removed. If that fails the log has a warning.
    pub fn store_probe(&self, report: &ProbeReport, file: Option<&Path>) -> Result<PathBuf, Error> {
        let path = match (file, &self.config().cache_dir) {
            (Some(file), _) => file.to_owned(),
            (None, Some(directory)) => directory.join(report.record.fingerprint.file_name()),
            (None, None) => {
                return Err(Error::NotSupported(
                    "there is no directory to keep the probe in: set XDG_CACHE_HOME or HOME to an absolute path, or name a file".into(),
                ));
            }
        };
        write(&path, &report.to_toml()).map_err(|error| TopologyError::Unwritable { path: path.clone(), reason: error.to_string() })?;
        if file.is_none() {
            let beside = tuning_beside(&path);
            let done = match &report.tuning {
                Some(tuning) => write(&beside, &tuning.to_toml()),
                None => fs::remove_file(&beside).or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) }),
            };
            if let Err(error) = done {
                log::warn!("the probe is kept, but not what was tuned for it: {}: {error}", beside.display());
            }
        }
        Ok(path)
    }
}

/// Where the tuning of a kept probe lies: `tuning-….toml` beside `probe-….toml`.
pub(super) fn tuning_beside(probe: &Path) -> PathBuf {
    let name = probe.file_name().unwrap_or_default().to_string_lossy();
    probe.with_file_name(format!("tuning-{}", name.trim_start_matches("probe-")))
}

/// The tuning that is kept beside a probe and where it lies, if it was made for this machine: for the same figures, on the same backend.
fn kept_tuning(probe: &Path, machine: &Machine, backend: &str) -> Option<(PathBuf, Tuning)> {
    let path = tuning_beside(probe);
    if !path.exists() {
        log::info!("nothing is tuned for the probe {}: a probe that is not quick does", probe.display());
        return None;
    }
    match tune::load(&path, machine, backend) {
        Ok(tuning) => Some((path, tuning)),
        Err(TuningError::InFile { source, .. }) if matches!(*source, TuningError::Foreign { .. }) => {
            log::info!(
                "the tuning {} is not used: it is for other figures, of all GPUs of its probe or of an earlier probe",
                path.display()
            );
            None
        }
        Err(error) => {
            log::warn!("what is kept of this machine's tuning is not used; probe again with `mpgpu probe`: {error}");
            None
        }
    }
}

/// One line on what was probed.
fn describe(fingerprint: &Fingerprint, date: Option<&str>, probed: &Probed) -> String {
    let count = fingerprint.gpus.len();
    let name = fingerprint.gpus.first().map_or("no GPU", |gpu| gpu.name.as_str());
    let when = date.map(|date| format!(" on {date}")).unwrap_or_default();
    let within = probed.residuals.median * 100.0;
    format!("{count} x {name}, probed{when}: {} measurements, typically within {within:.0} %", probed.measurements)
}

/// What a probe made now would be valid for.
pub(super) fn fingerprint(backend: &str, identity: Identity) -> Fingerprint {
    // systemd's id of the installation, hashed because machine-id(5) asks not to publish it. Containers may lack it.
    let read = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    let machine = read("/etc/machine-id").or_else(|| read("/proc/sys/kernel/hostname")).unwrap_or_default();
    let host = format!("{:016x}", hash(["mpgpu", &machine]));
    Fingerprint { backend: backend.into(), host, driver: identity.driver, gpus: identity.gpus }
}

/// The topology of a file that was named for a context on these GPUs. If it comes from a probe, that must be of these GPUs; the result has
/// the visible ones in their order.
pub(super) fn named(name: &str, now: &Fingerprint) -> Result<Topology, Error> {
    let (topology, record) = topology::load_probed(name)?;
    let Some(record) = record else { return Ok(topology) };
    let stale = |reason| TopologyError::Stale { path: name.into(), reason };
    Ok(visible(&topology, &record, now).map_err(stale)?)
}

/// The probe of these GPUs that is kept in `directory`: the file of exactly them, or else of more, the fewest more.
pub(super) fn kept(directory: &Path, now: &Fingerprint) -> Option<(PathBuf, Topology)> {
    let own = directory.join(now.file_name());
    let others = fs::read_dir(directory).into_iter().flatten().take(MOST_FILES).flatten().map(|entry| entry.path());
    let is_probe = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        *path != own && name.starts_with("probe-") && name.ends_with(".toml")
    };
    let mut others: Vec<PathBuf> = others.filter(is_probe).collect();
    others.sort();
    let mut best: Option<(usize, PathBuf, Topology)> = None;
    for (is_own, path) in std::iter::once((true, own.clone())).chain(others.into_iter().map(|path| (false, path))) {
        let (topology, record) = match topology::load_probed(&path.to_string_lossy()) {
            Ok((topology, Some(record))) => (topology, record),
            Err(TopologyError::NotFound { .. }) | Ok((_, None)) => continue,
            Err(error) => {
                if is_own {
                    log::warn!("the probe of this machine is not used: {error}");
                }
                continue;
            }
        };
        match visible(&topology, &record, now) {
            Ok(topology) => {
                let gpus = record.fingerprint.gpus.len();
                if is_own {
                    return Some((path, topology));
                }
                if best.as_ref().is_none_or(|(fewest, ..)| gpus < *fewest) {
                    best = Some((gpus, path, topology));
                }
            }
            Err(reason) if is_own => {
                log::warn!("the probe {} of this machine is stale and not used: {reason}; probe again with `mpgpu probe`", path.display());
            }
            Err(_) => {}
        }
    }
    best.map(|(_, path, topology)| (path, topology))
}

/// The probe of exactly these GPUs that `directory` has, and why it is not used if it is not. `None` where there is none.
pub(super) fn own(directory: &Path, now: &Fingerprint) -> Option<(PathBuf, Result<(), String>)> {
    let path = directory.join(now.file_name());
    let state = match topology::load_probed(&path.to_string_lossy()) {
        Err(TopologyError::NotFound { .. }) => return None,
        Err(error) => Err(error.to_string()),
        Ok((_, None)) => Err("it has no table [probe]".into()),
        Ok((topology, Some(record))) => visible(&topology, &record, now).map(drop),
    };
    Some((path, state))
}

/// The part of a probed topology that is visible now, or why it is stale.
fn visible(topology: &Topology, record: &Record, now: &Fingerprint) -> Result<Topology, String> {
    let gpus = record.gpus_of(now)?;
    topology.with_gpus(&gpus).ok_or_else(|| "its GPUs and its table [probe] do not go together".into())
}

/// Writes all of `text` or nothing: into a file beside it first, which then takes its place.
pub(super) fn write(path: &Path, text: &str) -> std::io::Result<()> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let name = path.file_name().ok_or_else(|| std::io::Error::new(ErrorKind::InvalidInput, "the path names no file"))?;
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let beside = directory.join(format!(".{}.{}-{number}", name.to_string_lossy(), std::process::id()));
    let written = fs::File::create_new(&beside).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let placed = written.and_then(|()| fs::rename(&beside, path));
    if placed.is_err() {
        // The first error is reported; one of removing the remains does not matter.
        let _ = fs::remove_file(&beside);
    }
    placed
}

/// `2026-11-21` in UTC.
fn date(now: SystemTime) -> Option<String> {
    let days = now.duration_since(UNIX_EPOCH).ok()?.as_secs() / 86_400;
    // Civil from days (Hinnant 2013): years begin in March, so that the leap day is the last of its year.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    Some(format!("{year:04}-{month:02}-{day:02}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::{NO_TUNING, PlanOptions, Transfer, Verify};
    use crate::host::HostBackend;
    use crate::topology::{Gpu, Residuals};
    use crate::tune::{Pattern, Side};
    use std::time::Duration;

    #[test]
    fn seconds_become_dates() {
        for (days, text) in [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (11_017, "2000-03-01"), (20_778, "2026-11-21")]
        {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(days * 86_400 + 86_399)).as_deref(), Some(text));
        }
    }

    /// A directory of a test, gone afterwards.
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

    /// A probe of these GPUs, in which the link of GPU `n` to the host has `10 + n` GB/s.
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

    /// GB/s between each GPU and the host.
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
        // A smaller file that has all that is visible is nearer to what is visible.
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
        // A damaged file is no topology, a file without a probe is taken as it is, and so is a preset.
        fs::write(&path, "name = ").expect("written");
        assert_eq!(kept(&directory.0, &all), None);
        assert!(named(&name, &all).is_err());
        let (topology, _) = topology::parse_probed(&file(&all, FORMAT)).expect("well formed");
        fs::write(&path, topology.to_toml()).expect("written");
        assert_eq!(named(&name, &machine(&[5])).expect("nobody says of which machine"), topology);
        assert_eq!(named("beluga", &all).expect("a preset"), topology::load("beluga").expect("a preset"));
    }

    /// A probe of virtual devices with its tuning, both kept in the directory; where the probe is, what it is of, and how often the search
    /// told of itself.
    fn tuned(directory: &Directory) -> (PathBuf, ProbeReport, u32) {
        let machine = Machine::new(topology::load("pcie-4").expect("a preset")).expect("well formed");
        let backend = Arc::new(HostBackend::new(machine.gpu_count(), machine.host_count()));
        let config = Config { cache_dir: Some(directory.0.clone()), ..Config::default() };
        let context = Context::with_backend(Arc::new(machine), backend, config).expect("a context");
        let options = ProbeOptions {
            copy_seconds: 0.1e-3,
            repetitions: 1,
            measurements: 20,
            // The last is more than a CPU is asked to search for.
            tuned_bytes: vec![64 << 10, 256 << 10, TUNED_ON_CPU + 1],
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
        let report = context.probe(&options, &mut progress).expect("a probe");
        for device in context.machine().devices() {
            assert_eq!((context.backend().allocated_bytes(device), context.backend().stream_count(device)), (0, 0), "{device}");
        }
        let path = context.store_probe(&report, None).expect("stored");
        (path, report, told)
    }

    /// A context as on GPUs that find `probe` by themselves: all of them, or those of these numbers.
    fn on(probe: &Path, gpus: Option<&[u32]>, tuning_file: Option<&str>) -> Context {
        let (topology, record) = topology::load_probed(&probe.to_string_lossy()).expect("a probe");
        let mut now = record.expect("of a machine").fingerprint;
        if let Some(gpus) = gpus {
            now.gpus = gpus.iter().map(|gpu| now.gpus[*gpu as usize].clone()).collect();
        }
        let found = kept(probe.parent().expect("a directory"), &now).expect("kept");
        assert_eq!(
            (&found.0, &found.1),
            (&probe.to_path_buf(), &gpus.map_or(topology.clone(), |g| topology.with_gpus(g).expect("its own")))
        );
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
        // Two sizes for each class, of which there is at least one for each case; no class has a setting for the third size.
        assert!(
            told as usize == 2 * tuning.classes.len() && tuning.classes.iter().all(|t| t.stream.sizes.len() <= 2),
            "{told}: {tuning:?}"
        );
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
        assert!(text.contains("tuned values are in force: made for probed") && text.contains(&*beside.to_string_lossy()), "{text}");
        // Whatever is found says how bytes go, and not which.
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

        // A caller can leave it out, or name another one.
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
        // Three of the four GPUs are another machine.
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

        // A new probe of the same machine, and the process ends before what was tuned for it is written.
        fs::write(&beside, &text).expect("written");
        let mut newer = report.clone();
        newer.probed.topology.costs.copy += 1e-6;
        write(&path, &newer.to_toml()).expect("written");
        assert!(on(&path, None, None).tuning().is_none());
        // It ends before that: nothing has changed.
        write(&path, &report.to_toml()).expect("written");
        assert_eq!(on(&path, None, None).tuning(), report.tuning.as_ref());

        // A probe that tunes nothing takes the earlier tuning away; one that goes to a file of its own touches nothing.
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
        // What cannot be written does not lose the probe.
        fs::create_dir(&beside).expect("in its place");
        assert_eq!(context.store_probe(&report, None).expect("the probe is kept"), path);
        assert_eq!(topology::load_probed(&path.to_string_lossy()).expect("whole").0, report.probed.topology);
        assert!(on(&path, None, None).tuning().is_none());
    }

    #[test]
    fn files_are_written_whole_or_not_at_all() {
        let directory = Directory::new("write");
        let path = directory.0.join("deep").join("er").join("probe.toml");
        write(&path, "one").expect("directories are made");
        write(&path, "two").expect("replaced");
        assert_eq!(fs::read_to_string(&path).expect("there"), "two");
        assert_eq!(names(path.parent().expect("a parent")), ["probe.toml"]);
        // A directory in the file's place: the rename fails, and nothing is left.
        assert!(write(&directory.0.join("deep"), "x").is_err());
        assert_eq!(names(&directory.0), ["deep"]);
        assert!(write(&path.join("below"), "x").is_err());
    }
}
