//! Results of tuning, and the advice that they give for a batch.

use super::class::Class;
use super::error::TuningError;
use crate::model::GRAIN;
use crate::plan::{Engine, Options, Shape, Tuned};
use crate::topology::{Machine, Topology};
use serde::{Deserialize, Serialize};

/// Options that a tuner may change in a plan. `None` leaves the value to the model.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Setting {
    /// Largest number of paths of one transfer. Two or more paths are used without asking the model whether they gain.
    pub max_paths: Option<u32>,
    /// True if a copy between GPUs may pass through host memory.
    pub host_path: Option<bool>,
    /// Bytes of one chunk on staged paths.
    pub chunk_bytes: Option<u64>,
    /// Weight of the shares of paths through host memory, in thousandths of the model's.
    pub host_share: Option<u16>,
    /// Weight of the shares of paths through another GPU, in thousandths of the model's.
    pub relay_share: Option<u16>,
}

impl Setting {
    /// Returns the options with this setting applied.
    pub fn options(&self, base: &Options) -> Options {
        Options {
            max_paths: self.max_paths.unwrap_or(base.max_paths),
            host_path: self.host_path.unwrap_or(base.host_path),
            chunk_bytes: self.chunk_bytes.or(base.chunk_bytes),
            tuned: (*self != Setting::default()).then(|| self.tuned()),
            ..*base
        }
    }

    /// Returns the part of the setting that the split of shares uses.
    pub fn tuned(&self) -> Tuned {
        Tuned {
            host_share: self.host_share.unwrap_or(1000),
            relay_share: self.relay_share.unwrap_or(1000),
            several: self.max_paths.map_or(*self != Setting::default(), |paths| paths > 1),
        }
    }
}

/// Origin of the scores.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The simulator. The tuning applies to every backend, as far as the topology is right.
    Simulator,
    /// The host backend: virtual devices on CPU threads.
    Host,
    /// The CUDA backend.
    Cuda,
}

impl Origin {
    /// Returns the name that a tuning file uses.
    pub const fn name(self) -> &'static str {
        match self {
            Origin::Simulator => "simulator",
            Origin::Host => "host",
            Origin::Cuda => "cuda",
        }
    }
}

/// The content of a tuning file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// Name of the topology to which the tuning applies.
    pub topology: String,
    /// The topology's [`digest`].
    pub digest: String,
    /// Origin of the scores.
    pub origin: Origin,
    /// Tunings of classes. No two classes are equal up to the tolerance of [`Class::is_like`].
    pub classes: Vec<ClassTuning>,
    /// Tunings of transfers that move in partitions; no two have the same shape.
    pub partitions: Vec<PartitionTuning>,
}

/// Best results for transfers of one shape, with the kernel of the program that tuned them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionTuning {
    /// Hash of the transfers, from [`shape_of`].
    pub shape: String,
    /// Total bytes of all transfers, only for human readers of the file.
    pub bytes: u64,
    /// Number of partitions of each transfer with which copy engines were fastest.
    pub count: u32,
    /// All trials.
    pub trials: Vec<PartitionTrial>,
}

/// A trial of moving transfers in partitions.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionTrial {
    /// Mover of the partitions.
    pub mover: PartitionMover,
    /// Number of partitions of each transfer.
    pub count: u32,
    /// Number of blocks of the producing kernel if the program has varied it; otherwise 0.
    #[serde(default)]
    pub blocks: u32,
    /// Median nanoseconds of a step on the slowest rank.
    pub ns: u64,
}

/// Agent that moves partitions.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartitionMover {
    /// Mover that an adaptive plan has found to be the fastest.
    Automatic,
    /// Copy engines.
    CopyEngine,
    /// The producing kernel.
    Producer,
}

impl PartitionMover {
    /// Returns the name that a tuning file uses.
    pub const fn name(self) -> &'static str {
        match self {
            PartitionMover::Automatic => "automatic",
            PartitionMover::CopyEngine => "copy-engine",
            PartitionMover::Producer => "producer",
        }
    }
}

impl PartitionTuning {
    /// Adds newer trials, which replace trials with the same number of blocks. Of equally fast trials the first counts as best.
    pub fn with(mut self, newer: &[PartitionTrial]) -> PartitionTuning {
        self.trials.retain(|known| newer.iter().all(|trial| trial.blocks != known.blocks));
        self.trials.extend(newer);
        let by_engines = self.trials.iter().filter(|trial| trial.mover == PartitionMover::CopyEngine);
        self.count = by_engines.min_by_key(|trial| trial.ns).map_or(self.count, |trial| trial.count);
        self
    }
}

/// Returns a hash of a batch's devices, memory kinds and bytes, as 16 hexadecimal digits.
pub fn shape_of(batch: &[Shape]) -> String {
    let words = batch.iter().map(|shape| {
        let Shape { dst_device, src_device, dst_kind, src_kind, bytes, source } = shape;
        let source = if *source == 0 { String::new() } else { format!(" {source}") };
        format!("{} {} {dst_kind:?} {src_kind:?} {bytes}{source}\n", dst_device.0, src_device.0)
    });
    format!("{:016x}", fnv(words.collect::<String>().bytes()))
}

fn fnv(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Tuned values for one class of batches.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassTuning {
    /// Class of batches.
    pub class: Class,
    /// Engine to use if the caller selects none, by size; ascending.
    pub engine: Vec<Preference>,
    /// Values for streams.
    pub stream: EngineTuning,
    /// Values for graphs.
    pub graph: EngineTuning,
}

/// An engine that applies from a certain size.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Preference {
    /// Size of the largest transfer, in bytes, from which the preference applies.
    pub from_bytes: u64,
    /// Preferred engine; [`Engine::Auto`] leaves everything to the model.
    pub engine: Engine,
}

/// Tuned values for one class and one engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineTuning {
    /// Size in bytes below which a transfer uses one path.
    pub min_bytes: Option<u64>,
    /// Settings by size; ascending. Each applies up to the next, the last without limit.
    pub sizes: Vec<SizeTuning>,
}

/// A setting that applies from a certain size.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct SizeTuning {
    /// Size of the largest transfer, in bytes, from which the setting applies.
    pub from_bytes: u64,
    /// Size of the largest transfer, in bytes, for which the chunk size was found. For other sizes the chunk size scales with the square
    /// root of the size, as in the model (`docs/reference/model.md`). `None` if the chunk size is the same for all sizes.
    pub at_bytes: Option<u64>,
    /// The setting.
    pub setting: Setting,
}

impl SizeTuning {
    /// Returns the setting for a largest transfer of this size.
    pub fn setting_for(&self, bytes: u64) -> Setting {
        let scaled = |chunk: u64, at: u64| {
            let chunk = chunk as f64 * (bytes as f64 / at.max(1) as f64).sqrt();
            ((chunk / GRAIN as f64).round() as u64).max(1).saturating_mul(GRAIN)
        };
        let chunk_bytes = match (self.setting.chunk_bytes, self.at_bytes) {
            (Some(chunk), Some(at)) if at != bytes => Some(scaled(chunk, at)),
            (chunk, _) => chunk,
        };
        Setting { chunk_bytes, ..self.setting }
    }
}

/// Advice of a tuning for one batch.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// Engine to use.
    pub engine: Engine,
    /// Size in bytes below which a transfer uses one path.
    pub min_bytes: Option<u64>,
    /// Paths, shares and chunks.
    pub setting: Setting,
}

impl Advice {
    /// Returns the options with the advice applied, for a context that leaves everything open.
    pub fn options(&self, base: &Options) -> Options {
        let options = self.setting.options(&Options { engine: self.engine, ..*base });
        // `tuned` is set even if only an engine or a threshold was found, so that the plan's description shows that it is tuned.
        Options { min_bytes: self.min_bytes.or(base.min_bytes), tuned: Some(self.setting.tuned()), ..options }
    }
}

impl Tuning {
    /// Refuses a tuning that was made for other figures than this machine's, or measured on another backend.
    pub fn check(&self, machine: &Machine, backend: &str) -> Result<(), TuningError> {
        let in_force = digest(machine.topology());
        if self.digest != in_force {
            return Err(TuningError::Foreign {
                made_for: self.topology.clone(),
                made_digest: self.digest.clone(),
                in_force: machine.topology().name.clone(),
                digest: in_force,
            });
        }
        if self.origin != Origin::Simulator && self.origin.name() != backend {
            return Err(TuningError::Backend { made_on: self.origin.name(), backend: backend.to_owned() });
        }
        Ok(())
    }

    /// Returns the advice for this batch with this engine; [`Engine::Auto`] leaves the engine open too. Returns `None` if no similar batch
    /// was tuned, or if the model was found to be best.
    pub fn advice(&self, machine: &Machine, batch: &[Shape], engine: Engine) -> Option<Advice> {
        let (class, bytes) = Class::of(machine, batch)?;
        let tuned = self.classes.iter().find(|tuned| tuned.class.is_like(&class))?;
        let engine = match engine {
            Engine::Auto => holding(&tuned.engine, bytes, |preference| preference.from_bytes)?.engine,
            named => named,
        };
        let of_engine = match engine {
            Engine::Stream => &tuned.stream,
            Engine::Graph => &tuned.graph,
            Engine::Auto | Engine::Batch | Engine::Kernel => return None,
        };
        let setting = holding(&of_engine.sizes, bytes, |size| size.from_bytes).map(|size| size.setting_for(bytes));
        if setting.is_none() && of_engine.min_bytes.is_none() {
            return None;
        }
        Some(Advice { engine, min_bytes: of_engine.min_bytes, setting: setting.unwrap_or_default() })
    }

    /// Describes the origin and the contents in one line.
    pub fn summary(&self) -> String {
        let sizes: usize = self.classes.iter().map(|tuned| tuned.stream.sizes.len() + tuned.graph.sizes.len()).sum();
        format!(
            "made for {} ({}) on the {}, {} classes of batches, {sizes} settings, {} of partitions",
            self.topology,
            self.digest,
            self.origin.name(),
            self.classes.len(),
            self.partitions.len()
        )
    }
}

/// Returns the last entry that begins at `bytes` or below.
fn holding<T>(ascending: &[T], bytes: u64, from: impl Fn(&T) -> u64) -> Option<&T> {
    ascending[..ascending.partition_point(|entry| from(entry) <= bytes)].last()
}

/// Returns a hash of the topology: 64-bit FNV-1a over nodes, links, shared resources and costs, in the form of a topology file. Name and
/// description are excluded, because they do not affect plans.
pub fn digest(topology: &Topology) -> String {
    let bare = Topology { name: String::new(), description: String::new(), ..topology.clone() };
    format!("{:016x}", fnv(bare.to_toml().bytes()))
}
