//! Stores measured times of plans in a file, for later runs on the same machine. The file is in the folder of the active tuning file.
//!
//! Plans of a later context start from these times: the fastest variant is active immediately and is still measured as usual. The file is
//! read when a context is created. It is written when a context is destroyed or the process ends. A failure to read or write it is logged
//! and has no other effect. Processes that end at the same time write one after the other, and each preserves the entries of the others.

use super::cache::{Cache, ShapeRequest};
use super::choosing::{KeptShape, ModelErrors, now};
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

/// Maximum age of stored times. Older times are ignored, because the load of a machine by other programs changes from day to day.
const OLDEST: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Maximum number of entries in a file. One entry holds the times of all plans with the same devices and sizes. If there are more, the
/// entries that were measured last are kept.
const MOST_SHAPES: usize = 256;

/// Maximum size in bytes of a file that is read. A file of [`MOST_SHAPES`] entries has about a tenth of this size.
const MOST_BYTES: u64 = 1 << 20;

#[derive(Default, Serialize, Deserialize)]
struct KeptFile {
    shapes: Vec<KeptShape>,
}

/// Measured times that were in the file when the context was created.
#[derive(Debug)]
pub(super) struct KeptTimes {
    path: PathBuf,
    machine: String,
    shapes: HashMap<String, KeptShape>,
}

impl KeptTimes {
    /// Reads the measured times that are stored in the folder of a tuning file. Returns `None` for virtual devices, whose probes are not
    /// stored either, and if the backend cannot identify its hardware.
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

    /// Returns the stored times of plans for these devices and sizes (`shape`). Returns `None` if there are none, or if they are too old.
    pub fn of(&self, shape: &ShapeRequest) -> Option<&KeptShape> {
        self.shapes.get(&self.key(shape)).filter(|kept| is_recent(kept))
    }

    /// Returns the size and the errors of the model that are stored for other sizes of the transfer `pair`, which has no size
    /// ([`ShapeRequest::of_any_size`]).
    pub fn errors(&self, pair: &ShapeRequest) -> impl Iterator<Item = (u64, ModelErrors)> {
        let key = self.key(pair);
        self.shapes.values().filter(move |kept| kept.pair == key && is_recent(kept)).map(|kept| (kept.bytes, kept.errors()))
    }

    /// Returns the key in the file of plans for these devices and sizes (`shape`). The key also covers the version of the library, because
    /// it is a hash of debug output, whose format may change between versions.
    fn key(&self, shape: &ShapeRequest) -> String {
        format!("{:016x}", hash([&*self.machine, &format!("{shape:?}")]))
    }

    /// Registers the measured times in `cache` to be written when the process exits, in case the context is not destroyed by then. The
    /// interposer's context is never destroyed.
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

    /// Writes one entry for each list of devices and sizes that was planned: the active variant, and the median time of each variant. First
    /// reads the entries that other processes have written meanwhile, and keeps them. Makes no driver call.
    pub fn write(&self, cache: &Cache) {
        let Some(now) = now() else { return };
        let new = cache.choices().into_iter().filter_map(|(shape, choice)| {
            let (in_force, medians) = choice.to_keep()?;
            let bytes = shape.batch.iter().map(|transfer| transfer.bytes).sum();
            let pair = shape.of_any_size().map_or(String::new(), |pair| self.key(&pair));
            let predicted = choice.predicted.clone();
            Some(KeptShape { key: self.key(&shape), bytes, at: now.as_secs(), in_force, medians, predicted, pair })
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

/// Stored times and plan cache of each context that has not been destroyed.
static OPEN: Mutex<Vec<(Weak<KeptTimes>, Weak<Cache>)>> = Mutex::new(Vec::new());

/// Process ([`fork::generation`]) to which the entries of [`OPEN`] belong.
static PROCESS: AtomicU32 = AtomicU32::new(0);

extern "C" fn at_exit() {
    // A child of `fork` must not touch the list: its lock may be held for ever by a thread that exists only in the parent.
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
