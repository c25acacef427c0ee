//! What was found, and what it says about a batch.

use super::class::Class;
use super::error::TuningError;
use crate::model::GRAIN;
use crate::plan::{Engine, Options, Shape, Tuned};
use crate::topology::{Machine, Topology};
use serde::{Deserialize, Serialize};

/// What a tuner may change about a plan. `None` leaves it to the model.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Setting {
    /// The most paths of one transfer. Two or more are taken without asking the model whether they pay.
    pub max_paths: Option<u32>,
    /// Whether a copy between GPUs may pass through host memory.
    pub host_path: Option<bool>,
    /// Bytes of one chunk on staged paths.
    pub chunk_bytes: Option<u64>,
    /// Weight of the shares of paths through host memory, thousandths of the model's.
    pub host_share: Option<u16>,
    /// The same for paths through another GPU.
    pub relay_share: Option<u16>,
}

impl Setting {
    /// These options with the setting in place.
    pub fn options(&self, base: &Options) -> Options {
        Options {
            max_paths: self.max_paths.unwrap_or(base.max_paths),
            host_path: self.host_path.unwrap_or(base.host_path),
            chunk_bytes: self.chunk_bytes.or(base.chunk_bytes),
            tuned: (*self != Setting::default()).then(|| self.tuned()),
            ..*base
        }
    }

    /// What it says to the split.
    pub fn tuned(&self) -> Tuned {
        Tuned {
            host_share: self.host_share.unwrap_or(1000),
            relay_share: self.relay_share.unwrap_or(1000),
            several: self.max_paths.map_or(*self != Setting::default(), |paths| paths > 1),
        }
    }
}

/// Where scores came from.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The simulator: holds on every backend, as far as the topology does.
    Simulator,
    /// Virtual devices on CPU threads.
    Host,
    /// GPUs.
    Cuda,
}

impl Origin {
    /// As in a tuning file.
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
    /// Name of the topology that it corrects.
    pub topology: String,
    /// [`digest`] of it.
    pub digest: String,
    /// Where scores came from.
    pub origin: Origin,
    /// No two alike.
    pub classes: Vec<ClassTuning>,
    /// Of transfers that move in partitions; no two of one shape.
    pub partitions: Vec<PartitionTuning>,
}

/// What was best for transfers of one shape, with the kernel that was at hand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionTuning {
    /// [`shape_of`] them.
    pub shape: String,
    /// Bytes of all together, for people.
    pub bytes: u64,
    /// In how many partitions copy engines were fastest, each transfer.
    pub count: u32,
    /// All that was tried.
    pub trials: Vec<PartitionTrial>,
}

/// A trial of how transfers move in partitions.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartitionTrial {
    /// Who moved them.
    pub mover: PartitionMover,
    /// Partitions of each transfer.
    pub count: u32,
    /// Blocks of the kernel that produced them, where the program has varied that; else 0.
    #[serde(default)]
    pub blocks: u32,
    /// Median nanoseconds of a step on the slowest rank.
    pub ns: u64,
}

/// Who moves partitions.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PartitionMover {
    /// Whoever steps had found to be fastest.
    Automatic,
    /// Copy engines.
    CopyEngine,
    /// The producers.
    Producer,
}

impl PartitionMover {
    /// As in a tuning file.
    pub const fn name(self) -> &'static str {
        match self {
            PartitionMover::Automatic => "automatic",
            PartitionMover::CopyEngine => "copy-engine",
            PartitionMover::Producer => "producer",
        }
    }
}

impl PartitionTuning {
    /// The same with newer trials, which replace those with as many blocks. Of equal ones the first is best.
    pub fn with(mut self, newer: &[PartitionTrial]) -> PartitionTuning {
        self.trials.retain(|known| newer.iter().all(|trial| trial.blocks != known.blocks));
        self.trials.extend(newer);
        let by_engines = self.trials.iter().filter(|trial| trial.mover == PartitionMover::CopyEngine);
        self.count = by_engines.min_by_key(|trial| trial.ns).map_or(self.count, |trial| trial.count);
        self
    }
}

/// Tells batches apart by devices, kinds of memory and bytes: 16 hexadecimal digits.
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

/// What holds for one class of batches.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassTuning {
    /// Which.
    pub class: Class,
    /// The engine to take where the caller leaves it open, by size; ascending.
    pub engine: Vec<Preference>,
    /// With streams.
    pub stream: EngineTuning,
    /// With graphs.
    pub graph: EngineTuning,
}

/// An engine from some size on.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Preference {
    /// Bytes of the largest transfer from which it holds.
    pub from_bytes: u64,
    /// [`Engine::Auto`] leaves everything to the model.
    pub engine: Engine,
}

/// What holds for one class with one engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineTuning {
    /// Transfers below this size take one path.
    pub min_bytes: Option<u64>,
    /// By size; ascending. Each holds up to the next, the last without end.
    pub sizes: Vec<SizeTuning>,
}

/// A setting from some size on.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct SizeTuning {
    /// Bytes of the largest transfer from which it holds.
    pub from_bytes: u64,
    /// Bytes of the largest transfer for which the chunk size was found. For other sizes it scales with the square root of the size, as in the
    /// model (`docs/reference/model.md`). `None`: the chunk size is the same for all.
    pub at_bytes: Option<u64>,
    /// What was found.
    pub setting: Setting,
}

impl SizeTuning {
    /// What was found, for a largest transfer of this size.
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

/// What a tuning says about one batch.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The engine.
    pub engine: Engine,
    /// Transfers below this size take one path.
    pub min_bytes: Option<u64>,
    /// Paths, shares and chunks.
    pub setting: Setting,
}

impl Advice {
    /// These options with the advice in place: those of a context that leaves everything open.
    pub fn options(&self, base: &Options) -> Options {
        let options = self.setting.options(&Options { engine: self.engine, ..*base });
        // Set also where only an engine or a threshold was found, so that the description of the plan says that it is tuned.
        Options { min_bytes: self.min_bytes.or(base.min_bytes), tuned: Some(self.setting.tuned()), ..options }
    }
}

impl Tuning {
    /// Refuses a tuning that was made for other figures than this machine's, or measured on another backend than this one.
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

    /// What holds for this batch with this engine, where [`Engine::Auto`] leaves the engine open too. `None` where nothing was tuned that is
    /// like it, or where the model was found to be best.
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

    /// Where it comes from and what it holds, in one line.
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

/// The last entry that begins at `bytes` or below.
fn holding<T>(ascending: &[T], bytes: u64, from: impl Fn(&T) -> u64) -> Option<&T> {
    ascending[..ascending.partition_point(|entry| from(entry) <= bytes)].last()
}

/// Tells topologies apart: FNV-1a, 64 bits, over nodes, links, shared resources and costs in the form of a topology file. Name and
/// description are left out; they change nothing about a plan.
pub fn digest(topology: &Topology) -> String {
    let bare = Topology { name: String::new(), description: String::new(), ..topology.clone() };
    format!("{:016x}", fnv(bare.to_toml().bytes()))
}
