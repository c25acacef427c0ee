//! How to plan, and why a batch cannot be planned.

use crate::headroom::{NoHeadroom, headroom};
use crate::model::GRAIN;
use crate::program::{Engine, Shape};
use crate::topology::{DeviceId, Machine};
use crate::units::devices;

/// How to plan. `None` leaves the choice to the model.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// Executor.
    pub engine: Engine,
    /// The most paths that one transfer may use, 1 or more.
    pub max_paths: u32,
    /// Whether a copy between GPUs may pass through host memory.
    pub host_path: bool,
    /// GPUs through which bytes of others may pass.
    pub relays: Relays,
    /// Bytes of one chunk on staged paths, 4096 or more. Smaller where the staging bound asks for it.
    pub chunk_bytes: Option<u64>,
    /// Chunks of each path through another GPU, 1 or more; goes before `chunk_bytes`. More where the staging bound asks for it.
    pub relay_chunks: Option<u32>,
    /// The same for paths through host memory.
    pub host_chunks: Option<u32>,
    /// Transfers below this size take one path.
    pub min_bytes: Option<u64>,
    /// The most staging memory on each device, bytes.
    pub staging_bytes: u64,
    /// Threads that may copy between pageable host memory and pinned memory of the library. 0 leaves pageable memory to the driver.
    pub threads: u32,
    /// Who passes bytes over several devices: destinations of one source, or relays in a row.
    pub passing: Passing,
    /// What measurements say about the split, where a tuning file is in force.
    pub tuned: Option<Tuned>,
}

/// Who passes on bytes that a device has got.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Passing {
    /// Nobody: they go from their source, over one relay at most.
    Off,
    /// Copy engines.
    #[default]
    CopyEngines,
    /// Kernels of the ranks whose GPUs these are.
    Kernels,
}

impl Options {
    /// Bytes of a chunk on a path through this device that carries so many, where the options say it by count or by size.
    pub(super) fn chunk(&self, via: DeviceId, bytes: u64) -> Option<u64> {
        let count = if via.is_host() { self.host_chunks } else { self.relay_chunks };
        count.map(|count| bytes.div_ceil(u64::from(count)).next_multiple_of(GRAIN)).or(self.chunk_bytes)
    }
}

/// Corrections of the split that were measured. The split is the model's; what the model has wrong about the rates of
/// paths shows up in the best shares, and these factors carry it.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tuned {
    /// Weight of the shares of paths through host memory, in thousandths: 1000 leaves the model's. In [`WEIGHTS`].
    pub host_share: u16,
    /// The same for paths through another GPU.
    pub relay_share: u16,
    /// Several paths were measured to be faster than one: they are taken even where the model sees no gain in them.
    pub several: bool,
}

impl Default for Tuned {
    fn default() -> Self {
        Tuned { host_share: 1000, relay_share: 1000, several: false }
    }
}

/// Accepted weights of [`Tuned`], in thousandths: beyond them a path is better left out, or the topology is wrong.
pub const WEIGHTS: std::ops::RangeInclusive<u16> = 50..=20_000;

/// A set of GPUs: a bit for each of the first 63, or all that there are.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Relays(u64);

impl Relays {
    /// All, however many.
    pub const ALL: Relays = Relays(u64::MAX);
    /// None.
    pub const NONE: Relays = Relays(0);
    /// How many GPUs a set that is not [`Relays::ALL`] can name.
    pub const NAMED: u32 = 63;

    /// Those of a machine with so many; null for all.
    pub fn to_json(self, gpus: u32) -> serde_json::Value {
        if self == Relays::ALL { serde_json::Value::Null } else { (0..gpus).filter(|gpu| self.has(DeviceId::gpu(*gpu))).collect() }
    }

    /// Whether it is in the set.
    pub fn has(self, gpu: DeviceId) -> bool {
        self == Relays::ALL || (gpu.0 as u32) < Relays::NAMED && self.0 >> gpu.0 & 1 != 0
    }
}

impl std::str::FromStr for Relays {
    type Err = &'static str;

    /// `all`, `none`, or numbers with commas between them.
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
    /// Of the numbers of GPUs below [`Relays::NAMED`].
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

/// Why a batch can't be planned.
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
    #[error("planning takes {bytes} bytes of host memory, which the system does not give: plan fewer transfers at once, or larger chunks")]
    OutOfMemory { bytes: u64 },
}

impl From<NoHeadroom> for PlanError {
    fn from(NoHeadroom { bytes }: NoHeadroom) -> Self {
        PlanError::OutOfMemory { bytes }
    }
}

/// Host memory that planning takes for each transfer, but for its operations: 750 bytes were measured, of 20,000 transfers on five presets.
const TRANSFER_BYTES: usize = 1536;

/// Host memory for an operation of a program, and for whoever lists them all: 88 bytes, in a list that doubles as it grows.
pub(super) const OPERATION_BYTES: usize = 256;

/// Refuses options out of range, devices that the machine does not have, and more transfers than there is memory for.
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
