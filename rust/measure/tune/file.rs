//! Reads and writes tunings as TOML. `docs/reference/tuning.md` describes when they apply.
//!
//! ```toml
//! version = 1
//! topology = "hgx-h200"          # name, for human readers
//! digest = "502a2184def1cc6f"    # hash of nodes, links, shared resources and costs
//! origin = "cuda"                # of the scores: simulator, host or cuda
//!
//! [[class]]
//! from = "gpu"                   # gpu or host
//! to = "gpu"
//! pattern = "single"             # single, both-ways, shift (ring), exchange (all to all)
//! direct = 3.96e11               # bytes/s of the slowest direct route; 0 if there is none
//! engine = [{ from_bytes = 524288, engine = "auto" }, { from_bytes = 33554432, engine = "graph" }]
//! [class.graph]                  # and class.stream
//! min_bytes = 28213248
//! sizes = [{ from_bytes = 28213248, max_paths = 2, chunk_bytes = 2097152, at_bytes = 67108864, host_share = 0.951 }]
//! ```
//!
//! An entry applies to transfers of at least `from_bytes` bytes, up to the `from_bytes` of the next entry. `chunk_bytes` was found for a
//! transfer of `at_bytes` bytes and scales with the square root of the size. Without `at_bytes`, the chunk size is constant. If a key is
//! absent, the model chooses the value. The tables `partitions` contain trials of partitioned transfers:
//!
//! ```toml
//! [[partitions]]
//! shape = "8d0c5b1f6a3e9274"     # hash of devices, kinds of memory and bytes
//! bytes = 268435456              # total of the rank's transfers, for human readers
//! count = 32                     # partitions of each transfer, for copy engines
//! trials = [                     # mover: copy-engine or producer; blocks: of the kernel, 0 if the program does not vary them
//!     { mover = "copy-engine", count = 1, blocks = 0, ns = 1363000 },
//! ]
//! ```

use super::class::{Class, Pattern, Side};
use super::error::TuningError;
use super::tuning::{ClassTuning, EngineTuning, Origin, PartitionTrial, PartitionTuning, Preference, Setting, SizeTuning, Tuning};
use crate::model::GRAIN;
use crate::plan::{Engine, WEIGHTS};
use crate::program::MOST_PARTITIONS;
use crate::topology::{Machine, open_regular, shorten, toml_place};
use serde::Deserialize;
use std::fmt::{Display, Write};
use std::io::Read;
use std::path::Path;
use toml::Spanned;

/// Version of the file format that is written and read.
const VERSION: u64 = 1;
/// Largest size in bytes of a text that [`parse`] accepts.
pub const MAX_FILE_BYTES: usize = 1 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    /// Version number, which is present only so that the key is accepted. [`VersionEntry`] has already checked its value.
    #[serde(rename = "version")]
    _version: u64,
    topology: String,
    digest: Spanned<String>,
    origin: Origin,
    #[serde(default)]
    class: Vec<Spanned<ClassEntry>>,
    #[serde(default)]
    partitions: Vec<PartitionsEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PartitionsEntry {
    shape: Spanned<String>,
    bytes: u64,
    count: Spanned<u32>,
    #[serde(default)]
    trials: Vec<Spanned<PartitionTrial>>,
}

/// Version of a file. It is parsed before anything else, so that a file of another version is refused because of its version and not
/// because of a key that is unknown here.
#[derive(Deserialize)]
struct VersionEntry {
    version: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ClassEntry {
    from: Side,
    to: Side,
    pattern: Pattern,
    direct: Spanned<f64>,
    #[serde(default)]
    engine: Vec<Spanned<PreferenceEntry>>,
    #[serde(default)]
    stream: EngineEntry,
    #[serde(default)]
    graph: EngineEntry,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PreferenceEntry {
    from_bytes: u64,
    engine: EngineName,
}

/// Name of an engine (execution method) for which plans are tuned.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum EngineName {
    Auto,
    Stream,
    Graph,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct EngineEntry {
    min_bytes: Option<u64>,
    #[serde(default)]
    sizes: Vec<Spanned<SizeEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SizeEntry {
    from_bytes: u64,
    max_paths: Option<Spanned<u32>>,
    host_path: Option<bool>,
    chunk_bytes: Option<Spanned<u64>>,
    at_bytes: Option<Spanned<u64>>,
    host_share: Option<Spanned<f64>>,
    relay_share: Option<Spanned<f64>>,
}

/// Parses a tuning (results of a search for good planner options) from TOML text.
///
/// Parsing is strict. An unknown key, a wrong type, a value out of range, and sizes that do not ascend are errors. The message names the
/// line.
pub fn parse(text: &str) -> Result<Tuning, TuningError> {
    if text.len() > MAX_FILE_BYTES {
        return Err(too_long());
    }
    let syntax = |error: toml::de::Error| not_valid(&toml_place(text, &error));
    let VersionEntry { version } = toml::from_str(text).map_err(syntax)?;
    if version != VERSION {
        let expected = format!("this library reads version {VERSION}; tune again with the mpgpu command of this library");
        return Err(TuningError::Invalid(format!("version = {version}: {expected}")));
    }
    let file: FileEntry = toml::from_str(text).map_err(syntax)?;
    let lines = Lines(text);
    lines.digits(&file.digest, "digest")?;
    let mut classes: Vec<(usize, ClassTuning)> = Vec::with_capacity(file.class.len());
    for entry in file.class {
        let line = lines.of(entry.span().start);
        let tuned = class(&lines, entry.into_inner())?;
        if let Some((earlier, _)) = classes.iter().find(|(_, known)| known.class.is_like(&tuned.class)) {
            return Err(TuningError::Invalid(format!(
                "line {line}: this class of transfers equals the class in line {earlier}; remove one of them"
            )));
        }
        classes.push((line, tuned));
    }
    let mut partitions: Vec<PartitionTuning> = Vec::with_capacity(file.partitions.len());
    for entry in file.partitions {
        let line = lines.of(entry.shape.span().start);
        let tuned = of_partitions(&lines, entry)?;
        if partitions.iter().any(|known| known.shape == tuned.shape) {
            return Err(TuningError::Invalid(format!("line {line}: shape = {} occurs twice; remove one of them", tuned.shape)));
        }
        partitions.push(tuned);
    }
    Ok(Tuning {
        topology: file.topology,
        digest: file.digest.into_inner(),
        origin: file.origin,
        classes: classes.into_iter().map(|(_, tuned)| tuned).collect(),
        partitions,
    })
}

fn too_long() -> TuningError {
    let usual = "a tuning file has a few kilobytes, check that this is one";
    TuningError::Invalid(format!("the text has more than {MAX_FILE_BYTES} bytes; {usual}"))
}

fn not_valid(why: &str) -> TuningError {
    TuningError::Invalid(format!("the tuning is not valid: {why}"))
}

/// Reads and parses a tuning file. Reads at most [`MAX_FILE_BYTES`] bytes, so that a wrong path cannot exhaust the memory.
pub fn read(path: &Path) -> Result<Tuning, TuningError> {
    let mut bytes = Vec::new();
    open_regular(path)
        .and_then(|file| file.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes))
        .map_err(|error| TuningError::Unreadable { path: path.into(), reason: error.to_string() })?;
    let in_file = |source| TuningError::InFile { path: path.into(), source: Box::new(source) };
    if bytes.len() > MAX_FILE_BYTES {
        return Err(in_file(too_long()));
    }
    let text = String::from_utf8(bytes).map_err(|error| in_file(not_valid(&format!("the file is not UTF-8 text: {error}"))))?;
    parse(&text).map_err(in_file)
}

/// Reads a tuning file. Returns an error if the tuning was not made for this machine and this backend.
pub fn load(path: &Path, machine: &Machine, backend: &str) -> Result<Tuning, TuningError> {
    let tuning = read(path)?;
    tuning.check(machine, backend).map_err(|source| TuningError::InFile { path: path.into(), source: Box::new(source) })?;
    log::info!("tuned values of {} are active", path.display());
    Ok(tuning)
}

/// Text of a file, used to find the line of an entry for error messages.
struct Lines<'a>(&'a str);

impl Lines<'_> {
    fn of(&self, start: usize) -> usize {
        self.0.bytes().take(start).filter(|byte| *byte == b'\n').count() + 1
    }

    fn refuse<T>(&self, place: &Spanned<T>, key: &str, value: impl Display, must: impl Display) -> TuningError {
        TuningError::Invalid(format!("line {}: {key} = {value}: must be {must}", self.of(place.span().start)))
    }

    /// Returns an error if a text is not a hash of 16 hexadecimal digits.
    fn digits(&self, text: &Spanned<String>, key: &str) -> Result<(), TuningError> {
        if text.as_ref().len() == 16 && text.as_ref().bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Ok(());
        }
        Err(self.refuse(text, key, shorten(text.as_ref(), 32), "the 16 hexadecimal digits that tuning wrote"))
    }

    /// Returns an error if the sizes of a list of entries do not ascend.
    fn ascending<T>(&self, entries: &[Spanned<T>], from: impl Fn(&T) -> u64) -> Result<(), TuningError> {
        for two in entries.windows(2) {
            let (before, here) = (from(two[0].as_ref()), from(two[1].as_ref()));
            if here <= before {
                let must = format!("more than {before}, the value of the previous entry");
                return Err(self.refuse(&two[1], "from_bytes", here, must));
            }
        }
        Ok(())
    }
}

fn of_partitions(lines: &Lines<'_>, entry: PartitionsEntry) -> Result<PartitionTuning, TuningError> {
    lines.digits(&entry.shape, "shape")?;
    if !(1..=MOST_PARTITIONS).contains(entry.count.as_ref()) {
        return Err(lines.refuse(&entry.count, "count", entry.count.as_ref(), format!("1 to {MOST_PARTITIONS}")));
    }
    if let Some(trial) = entry.trials.iter().find(|trial| !(1..=MOST_PARTITIONS).contains(&trial.as_ref().count)) {
        return Err(lines.refuse(trial, "count", trial.as_ref().count, format!("1 to {MOST_PARTITIONS}")));
    }
    let trials = entry.trials.into_iter().map(Spanned::into_inner).collect();
    Ok(PartitionTuning { shape: entry.shape.into_inner(), bytes: entry.bytes, count: entry.count.into_inner(), trials })
}

fn class(lines: &Lines<'_>, entry: ClassEntry) -> Result<ClassTuning, TuningError> {
    let direct = *entry.direct.as_ref();
    if !(0.0..=1e15).contains(&direct) {
        let must = "between 0 and 1e15, in bytes per second; 0 if there is no direct route";
        return Err(lines.refuse(&entry.direct, "direct", direct, must));
    }
    lines.ascending(&entry.engine, |preference| preference.from_bytes)?;
    let preferences = entry.engine.into_iter().map(|preference| {
        let PreferenceEntry { from_bytes, engine } = preference.into_inner();
        let engine = match engine {
            EngineName::Auto => Engine::Auto,
            EngineName::Stream => Engine::Stream,
            EngineName::Graph => Engine::Graph,
        };
        Preference { from_bytes, engine }
    });
    Ok(ClassTuning {
        class: Class { from: entry.from, to: entry.to, pattern: entry.pattern, direct },
        engine: preferences.collect(),
        stream: engine(lines, entry.stream)?,
        graph: engine(lines, entry.graph)?,
    })
}

fn engine(lines: &Lines<'_>, entry: EngineEntry) -> Result<EngineTuning, TuningError> {
    lines.ascending(&entry.sizes, |size| size.from_bytes)?;
    let sizes = entry.sizes.into_iter().map(|size| {
        let SizeEntry { from_bytes, max_paths, host_path, chunk_bytes, at_bytes, host_share, relay_share } = size.into_inner();
        if let Some(paths) = max_paths.as_ref().filter(|paths| *paths.as_ref() == 0) {
            return Err(lines.refuse(paths, "max_paths", 0, "1 or more"));
        }
        if let Some(chunk) = chunk_bytes.as_ref().filter(|chunk| *chunk.as_ref() < GRAIN) {
            return Err(lines.refuse(chunk, "chunk_bytes", chunk.as_ref(), format!("{GRAIN} or more")));
        }
        if let Some(at) = at_bytes.as_ref().filter(|at| *at.as_ref() == 0) {
            return Err(lines.refuse(at, "at_bytes", 0, "1 or more: the size for which chunk_bytes was found"));
        }
        let setting = Setting {
            max_paths: max_paths.map(Spanned::into_inner),
            host_path,
            chunk_bytes: chunk_bytes.map(Spanned::into_inner),
            host_share: weight(lines, "host_share", host_share)?,
            relay_share: weight(lines, "relay_share", relay_share)?,
        };
        Ok(SizeTuning { from_bytes, at_bytes: at_bytes.map(Spanned::into_inner), setting })
    });
    Ok(EngineTuning { min_bytes: entry.min_bytes, sizes: sizes.collect::<Result<_, _>>()? })
}

/// Converts the factor by which a share of the data is multiplied to thousandths. Returns `None` if no factor is given, and an error if it
/// is out of range.
fn weight(lines: &Lines<'_>, key: &str, factor: Option<Spanned<f64>>) -> Result<Option<u16>, TuningError> {
    let Some(factor) = factor else { return Ok(None) };
    let thousandths = (factor.as_ref() * 1000.0).round();
    let (least, most) = (f64::from(*WEIGHTS.start()), f64::from(*WEIGHTS.end()));
    if !(least..=most).contains(&thousandths) {
        let must = format!("between {} and {}, a factor of the share that the model chooses", least / 1000.0, most / 1000.0);
        return Err(lines.refuse(&factor, key, factor.as_ref(), must));
    }
    Ok(Some(thousandths as u16))
}

impl Tuning {
    /// Returns the text of a tuning file from which [`parse`] restores this tuning.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_toml(&mut text);
        text
    }

    fn write_toml(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "# Made by `mpgpu tune` or `mpgpu probe`. Set MPGPU_TUNING_FILE to its path for contexts of the same topology.")?;
        writeln!(out, "version = {VERSION}\ntopology = {}\ndigest = \"{}\"", toml::Value::from(self.topology.as_str()), self.digest)?;
        writeln!(out, "origin = \"{}\"", self.origin.name())?;
        for tuned in &self.classes {
            let Class { from, to, pattern, direct } = tuned.class;
            writeln!(out, "\n[[class]]\nfrom = \"{}\"\nto = \"{}\"\npattern = \"{}\"", from.name(), to.name(), pattern.name())?;
            writeln!(out, "direct = {direct:e}")?;
            writeln!(out, "engine = [")?;
            for Preference { from_bytes, engine } in &tuned.engine {
                writeln!(out, "    {{ from_bytes = {from_bytes}, engine = \"{}\" }},", engine.name())?;
            }
            writeln!(out, "]")?;
            for (name, of_engine) in [("stream", &tuned.stream), ("graph", &tuned.graph)] {
                writeln!(out, "[class.{name}]")?;
                if let Some(bytes) = of_engine.min_bytes {
                    writeln!(out, "min_bytes = {bytes}")?;
                }
                writeln!(out, "sizes = [")?;
                for size in &of_engine.sizes {
                    write_size(size, out)?;
                }
                writeln!(out, "]")?;
            }
        }
        for PartitionTuning { shape, bytes, count, trials } in &self.partitions {
            writeln!(out, "\n[[partitions]]\nshape = \"{shape}\"\nbytes = {bytes}\ncount = {count}\ntrials = [")?;
            for PartitionTrial { mover, count, blocks, ns } in trials {
                writeln!(out, "    {{ mover = \"{}\", count = {count}, blocks = {blocks}, ns = {ns} }},", mover.name())?;
            }
            writeln!(out, "]")?;
        }
        Ok(())
    }
}

fn write_size(size: &SizeTuning, out: &mut String) -> std::fmt::Result {
    let Setting { max_paths, host_path, chunk_bytes, host_share, relay_share } = size.setting;
    let factor = |share: Option<u16>| share.map(|share| format!("{:?}", f64::from(share) / 1000.0));
    write!(out, "    {{ from_bytes = {}", size.from_bytes)?;
    for (name, value) in [
        ("max_paths", max_paths.map(|paths| paths.to_string())),
        ("host_path", host_path.map(|on| on.to_string())),
        ("chunk_bytes", chunk_bytes.map(|bytes| bytes.to_string())),
        ("at_bytes", size.at_bytes.map(|bytes| bytes.to_string())),
        ("host_share", factor(host_share)),
        ("relay_share", factor(relay_share)),
    ] {
        value.map_or(Ok(()), |value| write!(out, ", {name} = {value}"))?;
    }
    writeln!(out, " }},")
}
