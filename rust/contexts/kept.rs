//! Keeps measured times of plans for later runs on the same machine, in a file in the folder of the active tuning file.
//!
//! Plans of a later context start from these times: the fastest variant is active immediately and is still measured as usual. The file is
//! read when a context is created. It is written when a context is destroyed or the process ends. Failures are logged and have no other
//! effect. Processes that end at the same time write one after the other, and each preserves the entries of other plans.

use super::cache::{Cache, ShapeRequest};
use super::choosing::{KeptShape, now};
use super::probe_files::{fingerprint, write};
use crate::backend::Backend;
use crate::ipc::fork;
use crate::topology::{Machine, hash, open_regular};
use crate::tune;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::Read;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};
use std::time::Duration;

/// Age beyond which measurements are ignored, because other load on the machine changes from day to day.
const OLDEST: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Largest number of entries in a file. Each entry is for plans with the same devices and sizes. If there are more, the entries that were
/// measured last are kept.
const MOST_SHAPES: usize = 256;

/// Largest size in bytes of a file that is read. A file of [`MOST_SHAPES`] entries has a tenth of this size.
const MOST_BYTES: u64 = 1 << 20;

#[derive(Default, Serialize, Deserialize)]
struct KeptFile {
    shapes: Vec<KeptShape>,
}

/// Measured times from the file as it was when the context was created.
#[derive(Debug)]
pub(super) struct KeptTimes {
    path: PathBuf,
    machine: String,
    shapes: HashMap<String, KeptShape>,
}

impl KeptTimes {
    /// Reads the measured times that are kept with a tuning file. Returns `None` for virtual devices, because their probes are not kept
    /// either, and if the backend cannot identify its hardware.
    pub fn beside(tuning: &Path, machine: &Machine, backend: &dyn Backend) -> Option<KeptTimes> {
        if backend.is_virtual() {
            return None;
        }
        let identity = backend.identity().inspect_err(|error| log::debug!("measured times are not stored: {error}")).ok()?;
        let now = fingerprint(backend.name(), identity);
        let machine = format!("{} {} {now:?}", env!("CARGO_PKG_VERSION"), tune::digest(machine.topology()));
        let path = tuning.with_extension("measured.json");
        let shapes = read(&path).into_iter().map(|shape| (shape.key.clone(), shape)).collect();
        Some(KeptTimes { path, machine, shapes })
    }

    /// Returns the measured times of earlier plans for these devices and sizes (`shape`), if they are recent.
    pub fn of(&self, shape: &ShapeRequest) -> Option<&KeptShape> {
        self.shapes.get(&self.key(shape)).filter(|kept| is_recent(kept))
    }

    /// Returns the key of an entry in the file, from the devices and sizes of its transfers. The key includes the version of the library,
    /// because it also includes debug output, which may change between versions.
    fn key(&self, shape: &ShapeRequest) -> String {
        format!("{:016x}", hash([&*self.machine, &format!("{shape:?}")]))
    }

    /// Registers the times, so that they are written at the end of the process if the context of this cache has not been destroyed by then.
    /// The interposer's context never is destroyed.
    pub fn write_at_exit(self: &Arc<KeptTimes>, cache: &Arc<Cache>) {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            PROCESS.store(fork::generation(), Ordering::Relaxed);
            fork::at_exit(at_exit);
        });
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(kept, _)| kept.strong_count() > 0);
        open.push((Arc::downgrade(self), Arc::downgrade(cache)));
    }

    /// Writes one entry for each list of devices and sizes that was planned: the active variant and the median times of all variants.
    /// Merges these with entries that other processes have written meanwhile. Calls no driver.
    pub fn write(&self, cache: &Cache) {
        let Some(now) = now() else { return };
        let new = cache.choices().into_iter().filter_map(|(shape, choice)| {
            let (in_force, medians) = choice.to_keep()?;
            let bytes = shape.batch.iter().map(|transfer| transfer.bytes).sum();
            Some(KeptShape { key: self.key(&shape), bytes, at: now.as_secs(), in_force, medians })
        });
        let mut shapes: Vec<KeptShape> = new.collect();
        if shapes.is_empty() {
            return;
        }
        let others = read(&self.path).into_iter().filter(|kept| shapes.iter().all(|new| new.key != kept.key));
        shapes.extend(others.collect::<Vec<_>>());
        shapes.sort_by_key(|kept| std::cmp::Reverse(kept.at));
        shapes.truncate(MOST_SHAPES);
        let written = serde_json::to_string(&KeptFile { shapes }).map_err(std::io::Error::from).and_then(|text| write(&self.path, &text));
        if let Err(error) = written {
            log::info!("measured times are not stored: {}: {error}", self.path.display());
        }
    }
}

/// Measured times and caches of the contexts that have not been destroyed.
static OPEN: Mutex<Vec<(Weak<KeptTimes>, Weak<Cache>)>> = Mutex::new(Vec::new());

/// Generation ([`fork::generation`]) of the process to which the entries of [`OPEN`] belong.
static PROCESS: AtomicU32 = AtomicU32::new(0);

extern "C" fn at_exit() {
    // A child of `fork` inherits the locks in the state in which the parent's threads hold them.
    if PROCESS.load(Ordering::Relaxed) != fork::generation() {
        return;
    }
    let write = || {
        let open = std::mem::take(&mut *OPEN.lock().unwrap_or_else(PoisonError::into_inner));
        for (kept, cache) in open {
            if let (Some(kept), Some(cache)) = (kept.upgrade(), cache.upgrade()) {
                kept.write(&cache);
            }
        }
    };
    if catch_unwind(write).is_err() {
        log::debug!("measured times are not stored");
    }
}

fn is_recent(shape: &KeptShape) -> bool {
    shape.age().is_some_and(|age| age <= OLDEST)
}

/// Returns the recent entries of a file, or no entries if the file cannot be read.
fn read(path: &Path) -> Vec<KeptShape> {
    let mut text = String::new();
    let read = open_regular(path).and_then(|file| file.take(MOST_BYTES).read_to_string(&mut text));
    let found: std::io::Result<KeptFile> = read.and_then(|_| serde_json::from_str(&text).map_err(std::io::Error::from));
    let found = found.inspect_err(|error| {
        if error.kind() != std::io::ErrorKind::NotFound {
            log::info!("earlier measured times are not used: {}: {error}", path.display());
        }
    });
    let mut shapes = found.unwrap_or_default().shapes;
    shapes.retain(is_recent);
    shapes
}
