//! Options of the planner, and the reasons for which a batch cannot be planned.

use crate::headroom::{NoHeadroom, headroom};
use crate::model::GRAIN;
use crate::program::{Engine, Shape};
use crate::topology::{DeviceId, Machine};
use crate::units::devices;

/// Options of the planner. `None` leaves the choice to the model.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// Executor of the plan.
    pub engine: Engine,
    /// Largest number of paths of one transfer, 1 or more.
    pub max_paths: u32,
    /// True if copies between GPUs may pass through host memory.
    pub host_path: bool,
    /// GPUs through which bytes of other GPUs may pass.
    pub relays: Relays,
    /// Size of a chunk on staged paths in bytes, 4096 or more. Chunks are smaller if the limit of staging memory requires it.
    pub chunk_bytes: Option<u64>,
    /// Number of chunks of each path through another GPU, 1 or more. Takes precedence over `chunk_bytes`. There are more chunks if the
    /// limit of staging memory requires it.
    pub relay_chunks: Option<u32>,
    /// Number of chunks of each path through host memory; otherwise like `relay_chunks`.
    pub host_chunks: Option<u32>,
    /// Size in bytes below which a transfer uses one path.
    pub min_bytes: Option<u64>,
    /// Largest amount of staging memory on each device, bytes.
    pub staging_bytes: u64,
    /// Number of threads that may copy between pageable host memory and pinned memory of the library. 0 leaves pageable memory to the
    /// driver.
    pub threads: u32,
    /// Mechanism that forwards bytes over several devices: destinations with the same source, or several relays.
    pub passing: Passing,
    /// Measured corrections of the split, if a tuning file is active.
    pub tuned: Option<Tuned>,
}

/// Mechanism that forwards bytes that a device has received.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Passing {
    /// No forwarding. Bytes go from their source to their destination over at most one relay.
    Off,
    /// Copy engines copy the received bytes on.
    #[default]
    CopyEngines,
    /// Kernels copy the received bytes on. They run in the ranks that own the forwarding GPUs.
    Kernels,
}

impl Options {
    /// Returns the chunk size for a path through this device with this number of bytes, if the options specify it by number or by size.
    pub(super) fn chunk(&self, via: DeviceId, bytes: u64) -> Option<u64> {
        let count = if via.is_host() { self.host_chunks } else { self.relay_chunks };
        count.map(|count| bytes.div_ceil(u64::from(count)).next_multiple_of(GRAIN)).or(self.chunk_bytes)
    }
}

/// Measured corrections of the split. The split comes from the model. If the model's rates of paths are wrong, the best shares differ from
/// it, and these factors describe the difference.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tuned {
    /// Weight of the shares of paths through host memory, in thousandths: 1000 leaves the model's. In [`WEIGHTS`].
    pub host_share: u16,
    /// Weight of the shares of paths through another GPU, in thousandths. In [`WEIGHTS`].
    pub relay_share: u16,
    /// True if several paths were measured to be faster than one. They are then used even if the model expects no gain.
    pub several: bool,
}

impl Default for Tuned {
    fn default() -> Self {
        Tuned { host_share: 1000, relay_share: 1000, several: false }
    }
}

/// Accepted weights of [`Tuned`], in thousandths. Beyond them, a path is better left out, or the topology is wrong.
pub const WEIGHTS: std::ops::RangeInclusive<u16> = 50..=20_000;

/// Set of GPUs: some of the first 63, or all GPUs of the machine.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Relays(u64);

impl Relays {
    /// All GPUs of any machine.
    pub const ALL: Relays = Relays(u64::MAX);
    /// No GPU.
    pub const NONE: Relays = Relays(0);
    /// Number of GPUs that a set other than [`Relays::ALL`] can name.
    pub const NAMED: u32 = 63;

    /// Returns the GPUs of the set on a machine with this number of GPUs; null for all.
    pub fn to_json(self, gpus: u32) -> serde_json::Value {
        if self == Relays::ALL { serde_json::Value::Null } else { (0..gpus).filter(|gpu| self.has(DeviceId::gpu(*gpu))).collect() }
    }

    /// True if the GPU is in the set.
    pub fn has(self, gpu: DeviceId) -> bool {
        self == Relays::ALL || (gpu.0 as u32) < Relays::NAMED && self.0 >> gpu.0 & 1 != 0
    }
}

impl std::str::FromStr for Relays {
    type Err = &'static str;

    /// Parses `all`, `none`, or GPU numbers separated by commas.
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
    /// Collects the numbers of GPUs below [`Relays::NAMED`].
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
        }
    }
}

/// Reason for which a batch cannot be planned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PlanError {
    #[error("transfer {transfer}: {} does not exist: this machine has {}", device.in_words(), devices(*gpus, *hosts))]
    InvalidDevice { transfer: usize, device: DeviceId, gpus: u32, hosts: u32 },
    #[error(
        "transfer {transfer}: no copy engine can move bytes from {} to {}, neither directly nor through one other device: \
         give the topology a link between them{}",
        src.in_words(), dst.in_words(), if *is_free { "" } else { ", or allow the host path and all relays" }
    )]
    NoRoute { transfer: usize, src: DeviceId, dst: DeviceId, is_free: bool },
    #[error("{name}={value}: must be {least} or more")]
    Option { name: &'static str, value: u64, least: u64 },
    #[error(
        "{name}={value}: must be from {} to {} thousandths of the model's share",
        WEIGHTS.start(), WEIGHTS.end()
    )]
    Weight { name: &'static str, value: u16 },
    #[error(
        "transfer {transfer}: must be staged on another device, but staging_bytes={staging_bytes} leaves its ring {ring_bytes} bytes: \
         {} or more are needed for each ring",
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

/// Host memory that planning needs for each transfer, without its operations, in bytes. Measured: 750 bytes, with 20,000 transfers on five
/// presets.
const TRANSFER_BYTES: usize = 1536;

/// Host memory for an operation of a program, and for callers that list all operations, in bytes. An operation has 88 bytes, in a list that
/// doubles as it grows.
pub(super) const OPERATION_BYTES: usize = 256;

/// Refuses options out of range, devices that the machine does not have, and more transfers than fit into memory.
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
