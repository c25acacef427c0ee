//! Results of tuning, and the options that they recommend for a batch.

use super::class::Class;
use super::error::TuningError;
use crate::model::GRAIN;
use crate::plan::{Engine, Options, Shape, Tuned};
use crate::topology::{Machine, Topology};
use serde::{Deserialize, Serialize};

/// Options of a plan that a tuner may change. A field that is `None` leaves the value to the model.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Setting {
    /// Largest number of paths of one transfer; `None` leaves the option unchanged. If it is 2 or more, several paths are used even if the
    /// model predicts that one path is faster.
    pub max_paths: Option<u32>,
    /// True if a copy between GPUs may pass through host memory; `None` leaves the option unchanged.
    pub host_path: Option<bool>,
    /// Size in bytes of one chunk on staged paths; `None` leaves the option unchanged.
    pub chunk_bytes: Option<u64>,
    /// Factor, in thousandths, by which the model's share of the data is multiplied on each path through host memory. `None` means 1000,
    /// which leaves the share unchanged.
    pub host_share: Option<u16>,
    /// Factor, in thousandths, by which the model's share of the data is multiplied on each path through another GPU. `None` means 1000,
    /// which leaves the share unchanged.
    pub relay_share: Option<u16>,
}

impl Setting {
    /// Returns the options `base` with this setting applied.
    pub fn options(&self, base: &Options) -> Options {
        Options {
            max_paths: self.max_paths.unwrap_or(base.max_paths),
            host_path: self.host_path.unwrap_or(base.host_path),
            chunk_bytes: self.chunk_bytes.or(base.chunk_bytes),
            tuned: (*self != Setting::default()).then(|| self.tuned()),
            ..*base
        }
    }

    /// Returns the part of the setting that affects how data is split among paths.
    pub fn tuned(&self) -> Tuned {
        Tuned {
            host_share: self.host_share.unwrap_or(1000),
            relay_share: self.relay_share.unwrap_or(1000),
            several: self.max_paths.map_or(*self != Setting::default(), |paths| paths > 1),
        }
    }
}

/// Method by which the plans of a tuning were scored.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Plans were scored in the simulator. The tuning applies to every backend, and is as accurate as the topology.
    Simulator,
    /// Plans were executed on the host backend, which has virtual devices on CPU threads.
    Host,
    /// Plans were executed on the CUDA backend.
    Cuda,
}

impl Origin {
    /// Returns the name of this method in a tuning file.
    pub const fn name(self) -> &'static str {
        match self {
            Origin::Simulator => "simulator",
            Origin::Host => "host",
            Origin::Cuda => "cuda",
        }
    }
}

/// Content of a tuning file.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// Name of the topology to which the tuning applies.
    pub topology: String,
    /// Hash of the topology to which the tuning applies, from [`digest`].
    pub digest: String,
    /// Method by which the plans were scored.
    pub origin: Origin,
    /// Tuned values of each class of batches. No two classes are equal up to the tolerance of [`Class::is_like`].
    pub classes: Vec<ClassTuning>,
    /// Results for transfers that move in partitions. No two entries are for the same transfers.
    pub partitions: Vec<PartitionTuning>,
}

/// Best number of partitions for one batch of transfers, with all trials. The measured times depend on the kernels of the program that made
/// the trials.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionTuning {
    /// Hash of the transfers, from [`shape_of`].
    pub shape: String,
    /// Total size of all transfers in bytes. It is stored only for human readers of the file.
    pub bytes: u64,
    /// Number of partitions of each transfer with which copy engines were fastest.
    pub count: u32,
    /// Trials that were made with this batch of transfers.
    pub trials: Vec<PartitionTrial>,
}

/// Trial of moving transfers in partitions, with its measured time.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionTrial {
    /// Mover of the partitions: copy engines, or the kernel that computes the data (producer).
    pub mover: PartitionMover,
    /// Number of partitions of each transfer in the trial.
    pub count: u32,
    /// Number of blocks of the producing kernel. 0 if the program has not varied it.
    #[serde(default)]
    pub blocks: u32,
    /// Median time of a communication step on the slowest rank, in nanoseconds.
    pub ns: u64,
}

/// Hardware or kernel that moves partitions.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartitionMover {
    /// Mover that an adaptive plan has found to be faster: copy engines, or the kernel that computes the data (producer).
    Automatic,
    /// Copy engines move each partition.
    CopyEngine,
    /// The kernel that computes the data (producer) moves each partition itself.
    Producer,
}

impl PartitionMover {
    /// Returns the name of the mover in a tuning file.
    pub const fn name(self) -> &'static str {
        match self {
            PartitionMover::Automatic => "automatic",
            PartitionMover::CopyEngine => "copy-engine",
            PartitionMover::Producer => "producer",
        }
    }
}

impl PartitionTuning {
    /// Returns this tuning with newer trials added. All earlier trials with the same number of blocks as a newer trial are removed. If
    /// several trials of copy engines are equally fast, the first determines the best number of partitions.
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

/// Tuned values for one class of batches (batches with similar transfers).
#[derive(Clone, Debug, PartialEq)]
pub struct ClassTuning {
    /// Class of batches to which the values apply.
    pub class: Class,
    /// Engine (execution method) to use if the caller selects none, by the size of the largest transfer of the batch. Entries are in
    /// ascending order of this size.
    pub engine: Vec<Preference>,
    /// Tuned values if streams execute the plan.
    pub stream: EngineTuning,
    /// Tuned values if graphs execute the plan.
    pub graph: EngineTuning,
}

/// Preferred engine (execution method) for batches whose largest transfer has at least a certain size.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Preference {
    /// Minimum size in bytes. The preference applies to batches whose largest transfer has at least this size.
    pub from_bytes: u64,
    /// Engine to use; [`Engine::Auto`] leaves the choice to the model.
    pub engine: Engine,
}

/// Tuned values for one class of batches and one engine (execution method).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineTuning {
    /// Minimum size in bytes of a transfer that may use several paths. If it is `None`, the model decides for every size.
    pub min_bytes: Option<u64>,
    /// Settings in ascending order of their minimum sizes. Each setting applies to sizes below the minimum size of the next setting. The
    /// last setting has no upper limit.
    pub sizes: Vec<SizeTuning>,
}

/// Setting for batches whose largest transfer has at least a certain size.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct SizeTuning {
    /// Minimum size in bytes. The setting applies to batches whose largest transfer has at least this size.
    pub from_bytes: u64,
    /// Size in bytes of the largest transfer of the batch for which the chunk size was found. For other sizes, the chunk size scales with
    /// the square root of the size, as in the model (`docs/reference/model.md`). `None` if the chunk size is the same for all sizes.
    pub at_bytes: Option<u64>,
    /// Options of plans to which the setting applies.
    pub setting: Setting,
}

impl SizeTuning {
    /// Returns the setting for a batch whose largest transfer has `bytes` bytes.
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

/// Settings that a tuning run recommends for one batch.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// Engine (execution method) that the tuning recommends for the plan.
    pub engine: Engine,
    /// Minimum size in bytes of a transfer that may use several paths. If it is `None`, the model decides for every size.
    pub min_bytes: Option<u64>,
    /// Setting for the paths, for the share of the data of each path, and for the chunks.
    pub setting: Setting,
}

impl Advice {
    /// Returns the options `base` with the advice applied, for a context whose caller and environment set no options.
    pub fn options(&self, base: &Options) -> Options {
        let options = self.setting.options(&Options { engine: self.engine, ..*base });
        // `tuned` is set even if the tuning contains only an engine or a threshold, so that the plan's description shows that the plan is
        // tuned.
        Options { min_bytes: self.min_bytes.or(base.min_bytes), tuned: Some(self.setting.tuned()), ..options }
    }
}

impl Tuning {
    /// Returns an error if the tuning was made for another topology than that of `machine`, or was measured on another backend.
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

    /// Returns the advice for this batch with this engine (execution method). [`Engine::Auto`] leaves the choice of the engine to the
    /// tuning. Returns `None` if no similar batch was tuned, or if the model was found to be best.
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

    /// Returns a description of the origin and the contents of this tuning in one line.
    pub fn summary(&self) -> String {
        let sizes: usize = self.classes.iter().map(|tuned| tuned.stream.sizes.len() + tuned.graph.sizes.len()).sum();
        format!(
            "made for {} ({}) on the {}, {} classes of batches, {sizes} settings, {} entries for partitions",
            self.topology,
            self.digest,
            self.origin.name(),
            self.classes.len(),
            self.partitions.len()
        )
    }
}

/// Returns the last entry whose size is at most `bytes`, or `None` if there is none. The entries are in ascending order of their sizes.
fn holding<T>(ascending: &[T], bytes: u64, from: impl Fn(&T) -> u64) -> Option<&T> {
    ascending[..ascending.partition_point(|entry| from(entry) <= bytes)].last()
}

/// Returns a hash of the topology. It is a 64-bit FNV-1a hash of nodes, links, shared resources and costs, in the form of a topology file.
/// Name and description are excluded, because they do not affect plans.
pub fn digest(topology: &Topology) -> String {
    let bare = Topology { name: String::new(), description: String::new(), ..topology.clone() };
    format!("{:016x}", fnv(bare.to_toml().bytes()))
}
