//! What plans were measured to take, kept for the next runs on the same machine beside the tuning file that is in use.
//!
//! Plans of a later context begin with it: what was fastest is in force at once, and is measured again as ever. It is read when a context is
//! created and written when one is destroyed or the process ends, and whatever fails about that is logged and changes nothing. Processes that end
//! together write one after the other, and each keeps what it finds of other shapes.

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

/// What is older says little of the machine: who else uses it changes by the day.
const OLDEST: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The most shapes of a file; those measured last stay.
const MOST_SHAPES: usize = 256;

/// A file of so many shapes has a tenth of it.
const MOST_BYTES: u64 = 1 << 20;

#[derive(Default, Serialize, Deserialize)]
struct KeptFile {
    shapes: Vec<KeptShape>,
}

/// A file of what was measured, as it was when the context was created.
#[derive(Debug)]
pub(super) struct KeptTimes {
    path: PathBuf,
    machine: String,
    shapes: HashMap<String, KeptShape>,
}

impl KeptTimes {
    /// What is kept beside a tuning file. `None` of virtual devices, as with probes, and where the backend does not say what it runs on.
    pub fn beside(tuning: &Path, machine: &Machine, backend: &dyn Backend) -> Option<KeptTimes> {
        if backend.is_virtual() {
            return None;
        }
        let identity = backend.identity().inspect_err(|error| log::debug!("nothing that is measured is kept: {error}")).ok()?;
        let now = fingerprint(backend.name(), identity);
        let machine = format!("{} {} {now:?}", env!("CARGO_PKG_VERSION"), tune::digest(machine.topology()));
        let path = tuning.with_extension("measured.json");
        let shapes = read(&path).into_iter().map(|shape| (shape.key.clone(), shape)).collect();
        Some(KeptTimes { path, machine, shapes })
    }

    /// What was measured of plans like this one.
    pub fn of(&self, shape: &ShapeRequest) -> Option<&KeptShape> {
        self.shapes.get(&self.key(shape)).filter(|kept| is_recent(kept))
    }

    /// Debug output is another one in other versions of the library, which is why those have other keys.
    fn key(&self, shape: &ShapeRequest) -> String {
        format!("{:016x}", hash([&*self.machine, &format!("{shape:?}")]))
    }

    /// Keeps what has been measured by the end of the process, if the context of this cache is not destroyed before, as the interposer's is not.
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

    /// Keeps the variant in force and the medians of each shape, beside what others have written meanwhile. Asks no driver.
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
            log::info!("what was measured is not kept: {}: {error}", self.path.display());
        }
    }
}

/// Those of contexts that are not destroyed.
static OPEN: Mutex<Vec<(Weak<KeptTimes>, Weak<Cache>)>> = Mutex::new(Vec::new());

/// The generation of the process that they are of.
static PROCESS: AtomicU32 = AtomicU32::new(0);

extern "C" fn at_exit() {
    // A child of `fork` has the locks of its parent's threads.
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
        log::debug!("what was measured is not kept");
    }
}

fn is_recent(shape: &KeptShape) -> bool {
    shape.age().is_some_and(|age| age <= OLDEST)
}

/// The recent shapes of a file; none where it cannot be read.
fn read(path: &Path) -> Vec<KeptShape> {
    let mut text = String::new();
    let read = open_regular(path).and_then(|file| file.take(MOST_BYTES).read_to_string(&mut text));
    let found: std::io::Result<KeptFile> = read.and_then(|_| serde_json::from_str(&text).map_err(std::io::Error::from));
    let found = found.inspect_err(|error| {
        if error.kind() != std::io::ErrorKind::NotFound {
            log::info!("what is kept of earlier measurements is not used: {}: {error}", path.display());
        }
    });
    let mut shapes = found.unwrap_or_default().shapes;
    shapes.retain(is_recent);
    shapes
}
