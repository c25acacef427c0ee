//! Record of a probe (measurement of a machine by `mpgpu probe`) in a topology file: the table `[probe]`, which identifies the measured
//! machine.

use super::{Topology, TopologyError};
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// Version of the measurements that `mpgpu probe` makes, and of the format of its file. A file with another version is outdated.
pub const FORMAT: u32 = 4;

/// Maximum length in bytes of a text in the table `[probe]` of a topology file. It limits the length of error messages about malicious
/// files.
const MAX_TEXT: usize = 400;
/// Maximum number of notes in the table `[probe]` of a topology file.
const MAX_NOTES: usize = 256;

/// GPU of the machine that `mpgpu probe` has measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// UUID of the GPU in NVML's format; the name of the virtual device on the host backend.
    pub uuid: String,
    /// Product name of the GPU.
    pub name: String,
}

/// Identity of a machine and its software. A probe (measurement of the machine) is valid only for this identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Name of the backend: `cuda` or `host`.
    pub backend: String,
    /// Hash of the machine's identity, as hexadecimal digits.
    pub host: String,
    /// Version of the GPU driver.
    pub driver: String,
    /// GPUs of the machine, in the order of the topology's GPUs.
    pub gpus: Vec<Gpu>,
}

/// Accuracy of a probe (measurement of a machine): errors of the topology's predictions on sets of copies that were not used to fit the
/// topology.
#[derive(Copy, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residuals {
    /// Number of sets of copies that were compared.
    pub count: u32,
    /// Median of the relative error, |predicted / measured − 1|.
    pub median: f64,
    /// Largest relative error, |predicted / measured − 1|.
    pub worst: f64,
}

impl Residuals {
    /// Maximum median error at which a probe (measurement of a machine) is usable. Probes of real nodes have 2 to 6 % (docs/results.md). A
    /// second path makes plans 10 % or more faster, so a topology with an error of 20 % could predict gains that do not exist.
    pub const MOST: f64 = 0.2;

    /// Checks that the median error does not exceed `most`. The error is a message for the user.
    pub fn check(&self, most: f64) -> Result<(), String> {
        if self.median <= most {
            return Ok(());
        }
        let [off, most] = [self.median, most].map(|part| part * 100.0);
        Err(format!(
            "the predictions of the probe for {} sets of copies were off by {off:.0} % (median), but only {most:.0} % are accepted: probe \
             again while \
             nothing else uses the machine",
            self.count
        ))
    }
}

/// Record of a probe (measurement of a machine), as stored in a topology file.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Version of the file format; see [`FORMAT`].
    pub format: u32,
    /// Version of the library that measured the machine.
    pub version: String,
    /// Date of the probe (measurement of the machine), for human readers; `None` if it is unknown.
    pub date: Option<String>,
    /// Identity of the machine that was measured.
    pub fingerprint: Fingerprint,
    /// Number of measurements that the probe of the machine made.
    pub measurements: u32,
    /// Accuracy of the topology on sets of copies that were not used to fit it.
    pub residuals: Residuals,
    /// Remarks that the probe (measurement of the machine) has stored for human readers.
    pub notes: Vec<String>,
}

/// Table `[probe]` as written in a topology file.
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
    /// Checks the table `[probe]` and returns it as a record. `gpus` is the number of GPUs in the topology.
    pub fn record(self, gpus: usize) -> Result<Record, TopologyError> {
        let refuse = |reason: String| Err(TopologyError::Probe(reason));
        if self.gpus.len() != gpus {
            return refuse(format!(
                "`gpus` lists {}, but the topology has {gpus}; list each GPU, in the order of the nodes of the topology",
                self.gpus.len()
            ));
        }
        for (index, gpu) in self.gpus.iter().enumerate() {
            if self.gpus[..index].iter().any(|other| other.uuid == gpu.uuid) {
                return refuse(format!("GPU {index} has the same UUID as another GPU; each GPU must have its own"));
            }
        }
        let texts = [&self.version, &self.backend, &self.host, &self.driver].into_iter().chain(&self.date).chain(&self.notes);
        if texts.chain(self.gpus.iter().flat_map(|gpu| [&gpu.uuid, &gpu.name])).any(|text| text.len() > MAX_TEXT) {
            return refuse(format!("a string is longer than {MAX_TEXT} bytes; shorten it"));
        }
        if self.notes.len() > MAX_NOTES {
            return refuse(format!("{} notes; at most {MAX_NOTES} are allowed", self.notes.len()));
        }
        if ![self.residuals.median, self.residuals.worst].iter().all(|part| (0.0..=1e6).contains(part)) {
            return refuse("`residuals` are fractions of a time, 0 or more: 0.02 is 2 %".into());
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
    /// Returns `topology` and this record in TOML. [`parse_probed`](crate::topology::parse_probed) turns the text into equal values.
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

    /// Returns, for each GPU of the current machine `now`, its number in this record. Returns the reason as an error if the record is not
    /// valid for this machine, has another format, or is too inaccurate.
    pub fn gpus_of(&self, now: &Fingerprint) -> Result<Vec<u32>, String> {
        if self.format != FORMAT {
            return Err(format!("the format of the probe is {}, but this version of mpgpu writes {FORMAT}", self.format));
        }
        self.residuals.check(Residuals::MOST)?;
        self.fingerprint.gpus_of(now)
    }
}

impl Fingerprint {
    /// Returns the name of the file in which a probe (measurement) of this machine is stored. It does not depend on the order of the GPUs
    /// or on the driver.
    pub fn file_name(&self) -> String {
        let mut uuids: Vec<&str> = self.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        uuids.sort_unstable();
        let parts = [self.backend.as_str(), self.host.as_str()].into_iter().chain(uuids);
        format!("probe-{:016x}.toml", hash(parts))
    }

    /// Returns, for each GPU of the current machine `now`, its number in this record. Returns the reason as an error if this record is not
    /// valid for `now`.
    pub fn gpus_of(&self, now: &Fingerprint) -> Result<Vec<u32>, String> {
        let differ = |what: &str, then: &str, now: &str| {
            (then != now).then(|| format!("the probe was made with {what} {then:?}, but the current {what} is {now:?}")).map_or(Ok(()), Err)
        };
        differ("backend", &self.backend, &now.backend)?;
        differ("host", &self.host, &now.host)?;
        differ("driver", &self.driver, &now.driver)?;
        let find = |gpu: &Gpu| {
            let position = self.gpus.iter().position(|known| known == gpu);
            position.map(|index| index as u32).ok_or_else(|| format!("the probe does not contain {} {}", gpu.name, gpu.uuid))
        };
        now.gpus.iter().map(find).collect()
    }
}

/// Version of the format of a measured topology file. All versions of the format store this number in the same way.
#[derive(Deserialize)]
pub(super) struct Version {
    format: u32,
}

impl Version {
    /// Returns an error if this version of mpgpu cannot read a topology file of this format version.
    pub fn check(&self) -> Result<(), TopologyError> {
        if self.format == FORMAT {
            return Ok(());
        }
        let what = format!("the format of the probe is {}, but this version of mpgpu reads {FORMAT}", self.format);
        Err(TopologyError::Probe(format!("{what}; probe again with `mpgpu probe`")))
    }
}

/// Returns the 64-bit FNV-1a hash (Fowler, Noll, Vo) of several texts. Unlike the hash of the standard library, it does not change between
/// versions of Rust. A zero byte is added after each text.
pub fn hash<'a>(parts: impl IntoIterator<Item = &'a str>) -> u64 {
    let bytes = parts.into_iter().flat_map(|part| part.bytes().chain([0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
