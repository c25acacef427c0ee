//! Reads and writes the files in which probes and tunings are stored.
//!
//! A probe is stored in the cache directory. Its file name is derived from the GPUs, so that nodes of a cluster can share a home directory.
//! A context on CUDA for which no topology is named uses the probe of its GPUs, if there is one. If a probe was made with another driver or
//! another version of the library, it is ignored with a warning. If the user named the file of such a probe, opening the context fails.
//!
//! The tuning that was found with the probe, if any, is in the same folder. The probe is written first, then the tuning is written or
//! removed. If the process ends in between, the digest in the old tuning does not match the new probe, and the tuning is ignored.

use super::error::Error;
use crate::backend::Identity;
use crate::topology::{self, Fingerprint, Machine, Record, Topology, TopologyError, hash};
use crate::tune::{self, Tuning, TuningError};
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Largest number of files in the cache directory that are examined.
const MOST_FILES: usize = 1024;

/// Returns the path of the tuning that belongs to a probe: `tuning-….toml` in the folder of `probe-….toml`.
pub fn tuning_beside(probe: &Path) -> PathBuf {
    let name = probe.file_name().unwrap_or_default().to_string_lossy();
    probe.with_file_name(format!("tuning-{}", name.trim_start_matches("probe-")))
}

/// Returns the tuning that is stored with a probe, and its path. Returns `None` if there is none, or if it was made for other measurements
/// or another backend.
pub fn kept_tuning(probe: &Path, machine: &Machine, backend: &str) -> Option<(PathBuf, Tuning)> {
    let path = tuning_beside(probe);
    if !path.exists() {
        log::info!("the probe {} has no tuning; `mpgpu probe` without --quick makes one", probe.display());
        return None;
    }
    match tune::load(&path, machine, backend) {
        Ok(tuning) => Some((path, tuning)),
        Err(TuningError::InFile { source, .. }) if matches!(*source, TuningError::Foreign { .. }) => {
            log::info!(
                "the tuning {} is not used: it was made for different measurements, those of all GPUs of its probe or of an earlier probe",
                path.display()
            );
            None
        }
        Err(error) => {
            log::warn!("the stored tuning of this machine is not used; probe again with `mpgpu probe`: {error}");
            None
        }
    }
}

/// Returns the fingerprint (identity of machine, driver and library) that a probe would contain if it were made now.
pub fn fingerprint(backend: &str, identity: Identity) -> Fingerprint {
    // The installation's identity from systemd is hashed, because machine-id(5) asks not to publish it. Containers may have none.
    let read = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    let machine = read("/etc/machine-id").or_else(|| read("/proc/sys/kernel/hostname")).unwrap_or_default();
    let host = format!("{:016x}", hash(["mpgpu", &machine]));
    Fingerprint { backend: backend.into(), host, driver: identity.driver, gpus: identity.gpus }
}

/// Loads the topology with this name (preset or path) for a context on the GPUs of the fingerprint `now`. If the file comes from a probe,
/// the probe must cover these GPUs. The returned topology then has only these GPUs, in the order in which they are visible.
pub fn named(name: &str, now: &Fingerprint) -> Result<Topology, Error> {
    let (topology, record) = topology::load_probed(name)?;
    let Some(record) = record else { return Ok(topology) };
    let stale = |reason| TopologyError::Stale { path: name.into(), reason };
    Ok(visible(&topology, &record, now).map_err(stale)?)
}

/// Finds the probe in `directory` that covers the GPUs of the fingerprint `now`, and returns its path and topology. A probe of exactly
/// these GPUs is preferred, then the probe with the fewest additional GPUs.
pub fn kept(directory: &Path, now: &Fingerprint) -> Option<(PathBuf, Topology)> {
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

/// Returns the path of the probe in `directory` of exactly the GPUs of the fingerprint `now`. The result is an error with the reason if
/// contexts do not use this probe. Returns `None` if there is no such probe.
pub fn own(directory: &Path, now: &Fingerprint) -> Option<(PathBuf, Result<(), String>)> {
    let path = directory.join(now.file_name());
    let state = match topology::load_probed(&path.to_string_lossy()) {
        Err(TopologyError::NotFound { .. }) => return None,
        Err(error) => Err(error.to_string()),
        Ok((_, None)) => Err("the file has no table [probe]".into()),
        Ok((topology, Some(record))) => visible(&topology, &record, now).map(drop),
    };
    Some((path, state))
}

/// Returns the part of a probed topology that consists of the visible GPUs (`now`). The error is the reason why the probe is out of date.
fn visible(topology: &Topology, record: &Record, now: &Fingerprint) -> Result<Topology, String> {
    let gpus = record.gpus_of(now)?;
    topology.with_gpus(&gpus).ok_or_else(|| "the GPUs of the topology and its table [probe] do not match".into())
}

/// Maximum number of left-over temporary files whose names are skipped when a temporary file is created. Such files were left by processes
/// that had the same PID and were killed while writing.
const MOST_LEFT_OVER: u32 = 1000;

/// Writes `text` to a file atomically: it is written to a temporary file in the same directory, which is then renamed.
pub fn write(path: &Path, text: &str) -> std::io::Result<()> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let name = path.file_name().ok_or_else(|| std::io::Error::new(ErrorKind::InvalidInput, "the path does not name a file"))?;
    let create = |_| {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let beside = directory.join(format!(".{}.{}-{number}", name.to_string_lossy(), std::process::id()));
        match fs::File::create_new(&beside) {
            // A process with the same PID left this file. It ran in another container, or it was killed earlier.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => None,
            created => Some((beside, created)),
        }
    };
    let (beside, created) = (0..MOST_LEFT_OVER).find_map(create).ok_or_else(|| std::io::Error::from(ErrorKind::AlreadyExists))?;
    let written = created.and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let placed = written.and_then(|()| fs::rename(&beside, path));
    if placed.is_err() {
        // The first error is reported. An error while removing the temporary file does not matter.
        let _ = fs::remove_file(&beside);
    }
    placed
}
