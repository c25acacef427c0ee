//! What a file remembers of its probe, and of which machine it speaks: the table `[probe]`.

use super::{Topology, TopologyError};
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// The version of what is measured and written. A file of another one is stale.
pub const FORMAT: u32 = 4;

/// The longest text of an entry, and the most notes: a file is small, and what a hostile one can put into an error is bounded.
const MAX_TEXT: usize = 400;
const MAX_NOTES: usize = 256;

/// A GPU of the machine that was probed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// As NVML writes it; the virtual device's name on the host backend.
    pub uuid: String,
    /// As its maker calls it.
    pub name: String,
}

/// Which machine, and which software of it, a probe is valid for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// `cuda` or `host`.
    pub backend: String,
    /// A hash of the machine's identity.
    pub host: String,
    /// The driver's version.
    pub driver: String,
    /// In the order of the topology's GPUs.
    pub gpus: Vec<Gpu>,
}

/// How far predictions of the fit are from the measurements of sets that it was not fitted to.
#[derive(Copy, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residuals {
    /// Sets.
    pub count: u32,
    /// The median of |predicted / measured − 1|.
    pub median: f64,
    /// The largest.
    pub worst: f64,
}

impl Residuals {
    /// The largest median at which a probe is of use. Probes of real nodes are at 2 to 6 % (docs/results.md), and by a second path plans gain 10 % and more:
    /// what is wrong by 20 % finds gains that are none.
    pub const MOST: f64 = 0.2;

    /// Why a topology that predicts its own machine no better than this is not used, where so large a median error is too much.
    pub fn check(&self, most: f64) -> Result<(), String> {
        if self.median <= most {
            return Ok(());
        }
        let [off, most] = [self.median, most].map(|part| part * 100.0);
        Err(format!(
            "its own check of {} sets of copies was off by {off:.0} % (median), and more than {most:.0} % is not used: probe while nothing else \
             uses the machine",
            self.count
        ))
    }
}

/// What a file remembers of its probe.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// See [`FORMAT`].
    pub format: u32,
    /// The library's version.
    pub version: String,
    /// When, for people.
    pub date: Option<String>,
    /// Of which machine.
    pub fingerprint: Fingerprint,
    /// How many measurements.
    pub measurements: u32,
    /// How well the topology predicts sets that it was not fitted to.
    pub residuals: Residuals,
    /// What a reader should know.
    pub notes: Vec<String>,
}

/// The table as it stands in a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    format: u32,
    version: String,
    date: Option<String>,
    backend: String,
    host: String,
    driver: String,
    measurements: u32,
    residuals: Residuals,
    #[serde(default)]
    notes: Vec<String>,
    gpus: Vec<Gpu>,
}

impl Entry {
    /// The record, checked; it speaks of a topology of so many GPUs.
    pub fn record(self, gpus: usize) -> Result<Record, TopologyError> {
        let refuse = |reason: String| Err(TopologyError::Probe(reason));
        if self.gpus.len() != gpus {
            return refuse(format!("`gpus` lists {}, but the topology has {gpus}; list each in the order of their nodes", self.gpus.len()));
        }
        for (index, gpu) in self.gpus.iter().enumerate() {
            if self.gpus[..index].iter().any(|other| other.uuid == gpu.uuid) {
                return refuse(format!("GPU {index} has the UUID of another one; each has its own"));
            }
        }
        let texts = [&self.version, &self.backend, &self.host, &self.driver].into_iter().chain(&self.date).chain(&self.notes);
        if texts.chain(self.gpus.iter().flat_map(|gpu| [&gpu.uuid, &gpu.name])).any(|text| text.len() > MAX_TEXT) {
            return refuse(format!("a text is longer than {MAX_TEXT} bytes; shorten it"));
        }
        if self.notes.len() > MAX_NOTES {
            return refuse(format!("{} notes; at most {MAX_NOTES} are kept", self.notes.len()));
        }
        if ![self.residuals.median, self.residuals.worst].iter().all(|part| (0.0..=1e6).contains(part)) {
            return refuse("`residuals` are parts of a time, 0 or more: 0.02 is 2 %".into());
        }
        Ok(Record {
            format: self.format,
            version: self.version,
            date: self.date,
            fingerprint: Fingerprint { backend: self.backend, host: self.host, driver: self.driver, gpus: self.gpus },
            measurements: self.measurements,
            residuals: self.residuals,
            notes: self.notes,
        })
    }
}

impl Record {
    /// The text of a file from which [`parse_probed`](crate::topology::parse_probed) gives `topology` and this record back.
    pub fn to_toml(&self, topology: &Topology) -> String {
        let mut text = topology.to_toml();
        let quoted = |text: &str| toml::Value::from(text).to_string();
        let Fingerprint { backend, host, driver, gpus } = &self.fingerprint;
        // Writing to a String cannot fail.
        let _ = write!(text, "\n[probe]\nformat = {}\nversion = {}\n", self.format, quoted(&self.version));
        if let Some(date) = &self.date {
            let _ = writeln!(text, "date = {}", quoted(date));
        }
        for (name, value) in [("backend", backend), ("host", host), ("driver", driver)] {
            let _ = writeln!(text, "{name} = {}", quoted(value));
        }
        let Residuals { count, median, worst } = self.residuals;
        let _ = writeln!(text, "measurements = {}", self.measurements);
        let _ = writeln!(text, "residuals = {{ count = {count}, median = {median:e}, worst = {worst:e} }}");
        text += "notes = [\n";
        self.notes.iter().for_each(|note| text += &format!("    {},\n", quoted(note)));
        text += "]\ngpus = [\n";
        for Gpu { uuid, name } in gpus {
            let _ = writeln!(text, "    {{ uuid = {}, name = {} }},", quoted(uuid), quoted(name));
        }
        text + "]\n"
    }

    /// As [`Fingerprint::gpus_of`], for this version of the library.
    pub fn gpus_of(&self, now: &Fingerprint) -> Result<Vec<u32>, String> {
        if self.format != FORMAT {
            return Err(format!("its format is {}, and this version of mpgpu writes {FORMAT}", self.format));
        }
        self.residuals.check(Residuals::MOST)?;
        self.fingerprint.gpus_of(now)
    }
}

impl Fingerprint {
    /// A name for the file of this machine's probe: the same for the same GPUs in any order, whatever the driver.
    pub fn file_name(&self) -> String {
        let mut uuids: Vec<&str> = self.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        uuids.sort_unstable();
        let parts = [self.backend.as_str(), self.host.as_str()].into_iter().chain(uuids);
        format!("probe-{:016x}.toml", hash(parts))
    }

    /// The GPUs of this file that `now` shows, in the order in which it shows them; or why the file says nothing of them.
    pub fn gpus_of(&self, now: &Fingerprint) -> Result<Vec<u32>, String> {
        let differ = |what: &str, then: &str, now: &str| {
            (then != now).then(|| format!("it was probed with {what} {then:?}, and this is {now:?}")).map_or(Ok(()), Err)
        };
        differ("backend", &self.backend, &now.backend)?;
        differ("host", &self.host, &now.host)?;
        differ("driver", &self.driver, &now.driver)?;
        let find = |gpu: &Gpu| {
            let position = self.gpus.iter().position(|known| known == gpu);
            position.map(|index| index as u32).ok_or_else(|| format!("it does not know {} {}", gpu.name, gpu.uuid))
        };
        now.gpus.iter().map(find).collect()
    }
}

/// The version of a file, which those of every version have.
#[derive(Deserialize)]
pub(super) struct Version {
    format: u32,
}

impl Version {
    /// Whether this version of mpgpu reads it.
    pub fn check(&self) -> Result<(), TopologyError> {
        if self.format == FORMAT {
            return Ok(());
        }
        let what = format!("its format is {}, and this version of mpgpu reads {FORMAT}", self.format);
        Err(TopologyError::Probe(format!("{what}; probe again with `mpgpu probe`")))
    }
}

/// FNV-1a, 64 bits (Fowler, Noll, Vo): the same in every version, unlike the standard library's. A zero byte ends each part.
pub fn hash<'a>(parts: impl IntoIterator<Item = &'a str>) -> u64 {
    let bytes = parts.into_iter().flat_map(|part| part.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
