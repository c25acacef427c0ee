//! Probes (measures) the machine of a context.

use super::config::Config;
use super::error::Error;
use super::lifetime::Context;
use super::probe_files::{fingerprint, tuning_beside, write};
use super::score::Executed;
use crate::harness::TransferHarness;
use crate::plan::Options;
use crate::sync::lock;
use crate::topology::{DeviceId, FORMAT, Fingerprint, Machine, Record, Residuals, TopologyError};
use crate::tune::{Campaign, Case, Origin, Search, TuneError, Tuning};
use mpgpu_measure::probe::{ProbeOptions, Probed, Progress, probe};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Largest copy in bytes for which plans are tuned on the host backend, where CPU threads copy every byte.
const TUNED_ON_CPU: u64 = 4 << 20;

/// Result of a probe, with the metadata that is stored in the same file.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeReport {
    /// Topology of the machine, with all measurements.
    pub probed: Probed,
    /// Identity of the machine, date and quality of the probe, as stored in the file.
    pub record: Record,
    /// Tuning for the measured machine. `None` if no tuning was requested, or if the search for one failed.
    pub tuning: Option<Tuning>,
}

impl ProbeReport {
    /// Returns the content of the probe's file: a topology file with the additional table `[probe]`.
    pub fn to_toml(&self) -> String {
        self.record.to_toml(&self.probed.topology)
    }
}

impl Context {
    /// Measures the machine of this context: which copies are possible, how fast they are, and which copies slow each other down
    /// (`docs/reference/probe.md`).
    ///
    /// Then searches, for the sizes in `options`, for plans that are faster than the model's plans. If the search fails, a warning is
    /// logged and the probe is still valid. There is no search if predictions from the probe differ from measured times by more than
    /// `options.most_error`.
    ///
    /// The probe takes seconds, uses memory and streams of every device, and loads all links, so nothing else should run on the machine
    /// meanwhile. The context keeps its current topology. To use the result in later contexts, [store](Context::store_probe) it. On the
    /// host backend the probe measures copies by CPU threads.
    pub fn probe(&self, options: &ProbeOptions, progress: &mut dyn FnMut(Progress)) -> Result<ProbeReport, Error> {
        if !self.is_open() {
            return Err(Error::ContextDestroyed);
        }
        let backend = self.backend();
        // The topology is read from the driver again. If the active topology comes from a probe, it lacks pairs of GPUs between which data
        // was lost, but copies between these GPUs may be correct now.
        let seen = backend.discover()?.map(Machine::new).transpose()?;
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
        let on_cpu = self.backend().is_virtual();
        let sizes: Vec<u64> = options.tuned_bytes.iter().copied().filter(|bytes| !on_cpu || *bytes <= TUNED_ON_CPU).collect();
        if !sizes.is_empty() && report.record.residuals.check(options.most_error).is_ok() {
            let tuned = self.tune_probed(&report.probed, &sizes, progress);
            report.tuning = tuned.map_err(|error| log::warn!("the probe is valid, but tuning for it has failed: {error}")).ok();
        }
        Ok(report)
    }

    /// Searches for planner options that are faster on the measured machine, and returns them as a tuning. Copies from and to host memory
    /// are tuned by the short search. Their best engine, number of chunks and fraction of the data that passes through other GPUs differ
    /// between machines, and the model does not predict them. All-to-alls are tuned by a search over paths only, because the planner by
    /// itself uses only direct paths for them, one after the other (`docs/reference/probe.md`).
    fn tune_probed(&self, probed: &Probed, sizes: &[u64], progress: &mut dyn FnMut(Progress)) -> Result<Tuning, TuneError<Error>> {
        let machine = Machine::new(probed.topology.clone()).map_err(|error| TuneError::Score(error.into()))?;
        // The search uses no options from the environment or from an earlier tuning.
        let config = Config { staging_bytes: self.config().staging_bytes, ..Config::default() };
        let base = Options { staging_bytes: config.staging_bytes, ..Options::default() };
        let origin = if self.backend().is_virtual() { Origin::Host } else { Origin::Cuda };
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
                // No path connects this pair of devices, so it is skipped.
                Ok(None) | Err(TuneError::Plan(_)) => {}
                Err(error) => return Err(error),
            }
        }
        campaign.tuning(&points, origin, &mut score)
    }

    /// Returns the text of the file for the last probe of this context, or `None` if there was no probe.
    pub fn probed(&self) -> Option<Arc<str>> {
        lock(&self.probed).clone()
    }

    /// True if contexts use stored probes on machines like this one. Probes of virtual devices are not stored, because they describe no
    /// GPU.
    pub fn keeps_probes(&self) -> bool {
        !self.backend().is_virtual()
    }

    /// Returns the path at which the next context will look for a probe of this machine.
    fn place_of(&self, record: &Record) -> Result<PathBuf, Error> {
        let refuse = |why: String| Err(Error::NotSupported(why));
        if record.fingerprint.backend == "host" {
            return refuse(
                "a probe of virtual devices does not describe GPUs, and contexts do not use it by default: name a file for it".into(),
            );
        }
        if let Err(reason) = record.residuals.check(Residuals::MOST) {
            return refuse(format!("the probe is not stored, and an earlier one stays active: {reason}, or name a file to store it"));
        }
        match &self.config().cache_dir {
            Some(directory) => Ok(directory.join(record.fingerprint.file_name())),
            None => refuse(
                "there is no directory in which to store the probe: set XDG_CACHE_HOME or HOME to an absolute path, or name a file".into(),
            ),
        }
    }

    /// Writes a probe to `file` and returns the path. If `file` is `None`, the path is the one at which later contexts find the probe by
    /// themselves. In that case the tuning is written next to the probe. If the probe has no tuning, an earlier tuning is removed. A
    /// failure to write or remove a tuning is only logged. Also in that case, the call fails if no context would use the probe: a probe of
    /// virtual devices, or a probe whose predictions of measured times are too inaccurate.
    pub fn store_probe(&self, report: &ProbeReport, file: Option<&Path>) -> Result<PathBuf, Error> {
        let path = file.map_or_else(|| self.place_of(&report.record), |file| Ok(file.to_owned()))?;
        write(&path, &report.to_toml()).map_err(|error| TopologyError::Unwritable { path: path.clone(), reason: error.to_string() })?;
        if file.is_none() {
            let beside = tuning_beside(&path);
            let done = match &report.tuning {
                Some(tuning) => write(&beside, &tuning.to_toml()),
                None => fs::remove_file(&beside).or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) }),
            };
            if let Err(error) = done {
                log::warn!("the probe is stored, but its tuning is not: {}: {error}", beside.display());
            }
        }
        Ok(path)
    }
}

/// Returns a description of the probed machine in one line.
fn describe(fingerprint: &Fingerprint, date: Option<&str>, probed: &Probed) -> String {
    let count = fingerprint.gpus.len();
    let name = fingerprint.gpus.first().map_or("no GPU", |gpu| gpu.name.as_str());
    let when = date.map(|date| format!(" on {date}")).unwrap_or_default();
    let within = probed.residuals.median * 100.0;
    format!("{count} x {name}, probed{when}: {} measurements, predictions typically within {within:.0} %", probed.measurements)
}

/// Returns the date in UTC, for example `2026-11-21`.
fn date(now: SystemTime) -> Option<String> {
    let days = now.duration_since(UNIX_EPOCH).ok()?.as_secs() / 86_400;
    // Days to civil date (Hinnant 2013): years begin in March, so that the leap day is the last day of its year.
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
#[path = "../../tests/rust/probe_kept.rs"]
mod tests;
