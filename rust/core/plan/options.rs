//! Options of the planner, and the reasons why a batch cannot be planned.

use crate::headroom::{NoHeadroom, headroom};
use crate::model::GRAIN;
use crate::program::{Engine, Shape};
use crate::topology::{Costs, DeviceId, Machine};
use crate::units::devices;

/// Options of the planner. For optional fields, `None` lets the model choose.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// Method by which the plan's operations are issued.
    pub engine: Engine,
    /// Largest number of paths of one transfer, at least 1.
    pub max_paths: u32,
    /// True if copies between GPUs may pass through host memory.
    pub host_path: bool,
    /// GPUs that may stage or forward data of other GPUs.
    pub relays: Relays,
    /// Size of a chunk on staged paths in bytes, at least 4096. Chunks are smaller if the limit of staging memory requires it.
    pub chunk_bytes: Option<u64>,
    /// Number of chunks on each path through another GPU, at least 1. Takes precedence over `chunk_bytes`. The number is larger if the
    /// limit of staging memory requires it.
    pub relay_chunks: Option<u32>,
    /// Number of chunks on each path through host memory, at least 1. Takes precedence over `chunk_bytes`. The number is larger if the
    /// limit of staging memory requires it.
    pub host_chunks: Option<u32>,
    /// Size in bytes below which a transfer uses one path only.
    pub min_bytes: Option<u64>,
    /// Largest amount of staging memory on each device, bytes.
    pub staging_bytes: u64,
    /// Largest number of threads that copy between pageable host memory and pinned memory of the library. With 0, the driver copies
    /// pageable memory.
    pub threads: u32,
    /// Mechanism by which devices forward data that they have received. It applies to destinations with the same source, and to paths over
    /// several relays.
    pub passing: Passing,
    /// Measured corrections of the division of data; `None` if no tuning file is active.
    pub tuned: Option<Tuned>,
    /// True if the plan lists the rejected paths of each transfer. They are most of the memory of a plan for many GPUs.
    pub rejected: bool,
}

/// Mechanism by which devices forward data that they have received.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Passing {
    /// No forwarding. Data goes from its source to its destination over at most one relay.
    Off,
    /// Copy engines forward the received data.
    #[default]
    CopyEngines,
    /// Kernels forward the received data. They run in the ranks that own the forwarding GPUs.
    Kernels,
}

impl Options {
    /// Returns the chunk size in bytes for a path through device `via` that carries this number of bytes; `None` if the options specify
    /// neither a size nor a number of chunks.
    pub(super) fn chunk(&self, via: DeviceId, bytes: u64) -> Option<u64> {
        let count = if via.is_host() { self.host_chunks } else { self.relay_chunks };
        count.map(|count| bytes.div_ceil(u64::from(count)).next_multiple_of(GRAIN)).or(self.chunk_bytes)
    }

    /// Returns the time that the issuing thread needs for each further operation of a plan with staged paths, in seconds. If the options
    /// allow a graph, it is the time of a graph node.
    pub(super) fn issue(&self, costs: &Costs) -> f64 {
        if matches!(self.engine, Engine::Auto | Engine::Graph) { costs.graph_node } else { costs.issue }
    }
}

/// Measured corrections of the division of data among paths. The division is computed by the model. If the model's rates of paths are
/// wrong, another division is faster. These factors describe the difference.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tuned {
    /// Factor on the bytes of paths through host memory, in thousandths; 1000 means no correction. Must be in [`WEIGHTS`].
    pub host_share: u16,
    /// Factor on the bytes of paths through another GPU, in thousandths; 1000 means no correction. Must be in [`WEIGHTS`].
    pub relay_share: u16,
    /// True if several paths were measured to be faster than one. The planner then uses them even if the model predicts no gain.
    pub several: bool,
}

impl Default for Tuned {
    fn default() -> Self {
        Tuned { host_share: 1000, relay_share: 1000, several: false }
    }
}

/// Accepted factors of [`Tuned`], in thousandths. A value outside this range means that the path should be left out, or that the topology
/// is wrong.
pub const WEIGHTS: std::ops::RangeInclusive<u16> = 50..=20_000;

/// Set of GPUs through which data of other devices may be forwarded. It contains some of the first 63 GPUs, or all GPUs of the machine.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Relays(u64);

impl Relays {
    /// Set of all GPUs, for any machine.
    pub const ALL: Relays = Relays(u64::MAX);
    /// Empty set.
    pub const NONE: Relays = Relays(0);
    /// Number of GPUs that can be listed individually. Only [`Relays::ALL`] contains GPUs with higher numbers.
    pub const NAMED: u32 = 63;

    /// Returns a JSON list of the set's GPUs on a machine with this number of GPUs; null for [`Relays::ALL`].
    pub fn to_json(self, gpus: u32) -> serde_json::Value {
        if self == Relays::ALL { serde_json::Value::Null } else { (0..gpus).filter(|gpu| self.has(DeviceId::gpu(*gpu))).collect() }
    }

    /// Returns true if the set contains the GPU `gpu`.
    pub fn has(self, gpu: DeviceId) -> bool {
        self == Relays::ALL || (gpu.0 as u32) < Relays::NAMED && self.0 >> gpu.0 & 1 != 0
    }
}

impl std::str::FromStr for Relays {
    type Err = &'static str;

    /// Parses `all`, `none`, or GPU numbers separated by commas. Returns a message if the text is invalid.
    fn from_str(text: &str) -> Result<Relays, Self::Err> {
        let named = |gpu: &str| gpu.parse().ok().filter(|gpu| *gpu < Relays::NAMED);
        match text {
            "all" => Ok(Relays::ALL),
            "none" => Ok(Relays::NONE),
            _ => text.split(',').map(named).collect::<Option<_>>().ok_or("must be all, none, or numbers of GPUs, as in 0,3"),
        }
    }
}

impl FromIterator<u32> for Relays {
    /// Creates a set from GPU numbers. Numbers of [`Relays::NAMED`] and above are ignored.
    fn from_iter<T: IntoIterator<Item = u32>>(gpus: T) -> Relays {
        Relays(gpus.into_iter().filter(|gpu| *gpu < Relays::NAMED).fold(0, |set, gpu| set | 1 << gpu))
    }
}

impl Default for Options {
    fn default() -> Self {
        Options {
            engine: Engine::Auto,
            max_paths: u32::MAX,
            host_path: true,
            relays: Relays::ALL,
            chunk_bytes: None,
            relay_chunks: None,
            host_chunks: None,
            min_bytes: None,
            staging_bytes: 64 << 20,
            threads: 0,
            passing: Passing::default(),
            tuned: None,
            rejected: true,
        }
    }
}

/// Reason why a batch cannot be planned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PlanError {
    #[error("transfer {transfer}: {} does not exist: this machine has {}", device.in_words(), devices(*gpus, *hosts))]
    InvalidDevice { transfer: usize, device: DeviceId, gpus: u32, hosts: u32 },
    #[error(
        "transfer {transfer}: no copy engine can move bytes from {} to {}, neither directly nor through one other device: add a link \
         between them to the topology{}",
        src.in_words(), dst.in_words(), if *is_free { "" } else { ", or allow the host path and all relays" }
    )]
    NoRoute { transfer: usize, src: DeviceId, dst: DeviceId, is_free: bool },
    #[error("{name}={value}: must be {least} or more")]
    Option { name: &'static str, value: u64, least: u64 },
    #[error(
        "{name}={value}: must be from {} to {}, in thousandths of the share that the model chooses",
        WEIGHTS.start(), WEIGHTS.end()
    )]
    Weight { name: &'static str, value: u16 },
    #[error(
        "transfer {transfer}: must be staged on another device, but staging_bytes={staging_bytes} leaves {ring_bytes} bytes for its \
         staging buffer: each staging buffer needs {} or more",
        2 * GRAIN
    )]
    Staging { transfer: usize, staging_bytes: u64, ring_bytes: u64 },
    #[error("{0} transfers: a batch has at most {max}", max = u32::MAX)]
    TooManyTransfers(usize),
    #[error(
        "planning needs {bytes} bytes of host memory, which the system does not provide: plan fewer transfers at once, or larger chunks"
    )]
    OutOfMemory { bytes: u64 },
}

impl From<NoHeadroom> for PlanError {
    fn from(NoHeadroom { bytes }: NoHeadroom) -> Self {
        PlanError::OutOfMemory { bytes }
    }
}

/// Host memory that planning needs for each transfer in addition to its operations, in bytes. Measured: 750 bytes, with 20,000 transfers on
/// five presets.
const TRANSFER_BYTES: usize = 1536;

/// Host memory that one operation of a program needs in the planner and in callers that list all operations, in bytes. An operation has 88
/// bytes, and lists double their capacity as they grow.
pub(super) const OPERATION_BYTES: usize = 256;

/// Returns an error if options are out of range, devices do not exist on the machine, or the transfers do not fit into memory.
pub(super) fn check(machine: &Machine, batch: &[Shape], options: &Options) -> Result<(), PlanError> {
    if u32::try_from(batch.len()).is_err() {
        return Err(PlanError::TooManyTransfers(batch.len()));
    }
    headroom(batch.len(), TRANSFER_BYTES)?;
    let counts = [("max_paths", Some(options.max_paths)), ("relay_chunks", options.relay_chunks), ("host_chunks", options.host_chunks)];
    if let Some((name, _)) = counts.into_iter().find(|(_, count)| *count == Some(0)) {
        return Err(PlanError::Option { name, value: 0, least: 1 });
    }
    if let Some(value) = options.chunk_bytes.filter(|&bytes| bytes < GRAIN) {
        return Err(PlanError::Option { name: "chunk_bytes", value, least: GRAIN });
    }
    if let Some(tuned) = options.tuned {
        for (name, value) in [("host_share", tuned.host_share), ("relay_share", tuned.relay_share)] {
            if !WEIGHTS.contains(&value) {
                return Err(PlanError::Weight { name, value });
            }
        }
    }
    for (transfer, shape) in batch.iter().enumerate() {
        if let Some(device) = [shape.src_device, shape.dst_device].into_iter().find(|&device| !machine.contains(device)) {
            return Err(PlanError::InvalidDevice { transfer, device, gpus: machine.gpu_count(), hosts: machine.host_count() });
        }
    }
    Ok(())
}
