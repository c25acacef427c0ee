//! Record of a probe in a topology file: the table `[probe]`, with the machine that was probed.

use super::{Topology, TopologyError};
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// Version of the measurements and of the file format. A file with another version is stale.
pub const FORMAT: u32 = 4;

/// Size limit of a text in bytes, and largest number of notes, so that a hostile file cannot fill an error message.
const MAX_TEXT: usize = 400;
const MAX_NOTES: usize = 256;

/// GPU of the machine that was probed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// UUID in NVML's format; the virtual device's name on the host backend.
    pub uuid: String,
    /// Product name.
    pub name: String,
}

/// Identity of a machine and its software, for which a probe is valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Backend: `cuda` or `host`.
    pub backend: String,
    /// Hash of the machine's identity.
    pub host: String,
    /// Version of the driver.
    pub driver: String,
    /// GPUs, in the order of the topology's GPUs.
    pub gpus: Vec<Gpu>,
}

/// Errors of the fitted topology's predictions on sets of copies that the fit did not use.
#[derive(Copy, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residuals {
    /// Number of sets.
    pub count: u32,
    /// Median of |predicted / measured − 1|.
    pub median: f64,
    /// Largest |predicted / measured − 1|.
    pub worst: f64,
}

impl Residuals {
    /// Largest median at which a probe is usable. Probes of real nodes have 2 to 6 % (docs/results.md). Plans gain 10 % and more by a
    /// second path, so a topology that is wrong by 20 % would predict gains that do not exist.
    pub const MOST: f64 = 0.2;

    /// Checks that the median error does not exceed `most`. The error is a text for the user.
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

/// Record of a probe in a topology file.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Version of the format; see [`FORMAT`].
    pub format: u32,
    /// Version of the library.
    pub version: String,
    /// Date of the probe, for human readers.
    pub date: Option<String>,
    /// Machine that was probed.
    pub fingerprint: Fingerprint,
    /// Number of measurements.
    pub measurements: u32,
    /// Accuracy of the topology on sets of copies that the fit did not use.
    pub residuals: Residuals,
    /// Remarks for the reader.
    pub notes: Vec<String>,
}

/// Table `[probe]` as written in a file.
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
    /// Checks the table and returns its record. `gpus` is the number of GPUs in the topology.
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
            return refuse(format!("a string is longer than {MAX_TEXT} bytes; shorten it"));
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
    /// Returns a text that [`parse_probed`](crate::topology::parse_probed) turns into `topology` and this record.
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

    /// Returns the GPUs of the current machine in this record, or the reason why it is not valid, like [`Fingerprint::gpus_of`]. Also
    /// checks the format and the accuracy.
    pub fn gpus_of(&self, now: &Fingerprint) -> Result<Vec<u32>, String> {
        if self.format != FORMAT {
            return Err(format!("its format is {}, and this version of mpgpu writes {FORMAT}", self.format));
        }
        self.residuals.check(Residuals::MOST)?;
        self.fingerprint.gpus_of(now)
    }
}

impl Fingerprint {
    /// Returns the file name for a probe of this machine. It is the same for the same GPUs in any order and for any driver.
    pub fn file_name(&self) -> String {
        let mut uuids: Vec<&str> = self.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        uuids.sort_unstable();
        let parts = [self.backend.as_str(), self.host.as_str()].into_iter().chain(uuids);
        format!("probe-{:016x}.toml", hash(parts))
    }

    /// Returns the number in this record of each GPU of `now`, in the order of `now`. Returns the reason if this record is not valid for
    /// `now`.
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

/// Format version of a probe's record. All versions of the file store it in the same way.
#[derive(Deserialize)]
pub(super) struct Version {
    format: u32,
}

impl Version {
    /// Checks that this version of mpgpu reads the file.
    pub fn check(&self) -> Result<(), TopologyError> {
        if self.format == FORMAT {
            return Ok(());
        }
        let what = format!("its format is {}, and this version of mpgpu reads {FORMAT}", self.format);
        Err(TopologyError::Probe(format!("{what}; probe again with `mpgpu probe`")))
    }
}

/// Returns the FNV-1a hash with 64 bits (Fowler, Noll, Vo), which does not change between versions of Rust, unlike that of the standard
/// library. A zero byte ends each part.
pub fn hash<'a>(parts: impl IntoIterator<Item = &'a str>) -> u64 {
    let bytes = parts.into_iter().flat_map(|part| part.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
