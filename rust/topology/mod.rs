//! The machine model: devices, switches, directed links, and the resources that transfers share.
//!
//! A [`Topology`] is a plain value: what a file, a preset, or a discovery says about a node. [`Machine`] is the same value checked
//! and compiled for the planner: every resource numbered, every route between two devices found once. Nothing here touches a
//! driver, and nothing outside this module knows a preset by name.
//!
//! Units: bytes, seconds, bytes per second. A capacity is per direction, because links are directed. The model, the file format
//! and the presets are described in `docs/topology.md`.
//!
//! ```
//! use mpgpu::topology::{self, DeviceId, Machine};
//!
//! let machine = Machine::new(topology::load("hgx-h200")?)?;
//! let route = machine.route(DeviceId::gpu(0), DeviceId::gpu(1)).expect("an NVSwitch joins all GPUs");
//! assert_eq!(route.links.len(), 2); // into the switch and out of it
//! # Ok::<(), topology::TopologyError>(())
//! ```

mod check;
pub mod discover;
mod error;
mod file;
mod machine;
mod presets;
pub mod probe;
mod routes;
mod subset;

pub use check::{CAPACITY_RANGE, MAX_DEVICES, MAX_LINKS, MAX_SHARED, MAX_SWITCHES, MAX_TIME};
pub use error::TopologyError;
pub use file::{MAX_FILE_BYTES, parse, parse_probed};
pub(crate) use file::{shorten, toml_place};
pub use machine::{Machine, Resource, ResourceId, Route};
pub use presets::{preset, preset_names, preset_text};

use std::fmt;
use std::path::Path;

/// A memory that transfers start or end in, numbered as in the C ABI: GPUs count up from 0, host NUMA domains down from -1.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub i32);

impl DeviceId {
    /// The host memory of NUMA domain 0, `MP_DEVICE_HOST` in the C ABI.
    pub const HOST: DeviceId = DeviceId(-1);
    /// The GPU with this index.
    pub const fn gpu(index: u32) -> Self {
        DeviceId(index as i32)
    }
    /// The host memory of this NUMA domain.
    pub const fn host(domain: u32) -> Self {
        DeviceId(-1 - domain as i32)
    }
    /// Whether this is host memory.
    pub const fn is_host(self) -> bool {
        self.0 < 0
    }
}

impl fmt::Display for DeviceId {
    /// `gpu0` or `host0`: the number of the device, whatever its node is called.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_host() { write!(f, "host{}", -1 - i64::from(self.0)) } else { write!(f, "gpu{}", self.0) }
    }
}

/// Index into [`Topology::nodes`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);
/// Index into [`Topology::links`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u32);

/// What a node of the machine graph is.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// A GPU; the n-th GPU node is [`DeviceId::gpu`]`(n)`.
    Gpu,
    /// The memory of one host NUMA domain; the n-th is [`DeviceId::host`]`(n)`.
    Host,
    /// An NVSwitch, a PCIe switch, a root complex. `peer` says whether a copy between two GPUs may pass through it; copies
    /// between a GPU and host memory always may.
    Switch {
        /// Whether GPU-to-GPU copies may pass.
        peer: bool,
    },
}

/// A device or a switch.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Unique in its topology, `gpu0` say.
    pub name: String,
    /// What it is.
    pub kind: NodeKind,
}

impl NodeKind {
    /// Whether transfers can start and end here.
    pub const fn is_device(self) -> bool {
        matches!(self, NodeKind::Gpu | NodeKind::Host)
    }
}

/// The technology of a link, for people and for tie-breaking; capacities say the rest.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// NVLink or NVLink-C2C.
    Nvlink,
    /// PCI Express.
    Pcie,
    /// A link inside or between host sockets (memory bus, UPI, xGMI).
    Host,
}

impl LinkKind {
    /// As in a topology file.
    pub const fn name(self) -> &'static str {
        match self {
            LinkKind::Nvlink => "nvlink",
            LinkKind::Pcie => "pcie",
            LinkKind::Host => "host",
        }
    }
}

/// One direction of a link.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Where bytes enter.
    pub from: NodeId,
    /// Where bytes leave.
    pub to: NodeId,
    /// Technology.
    pub kind: LinkKind,
    /// Achievable bandwidth in bytes/s in this direction.
    pub bandwidth: f64,
    /// Time in seconds that the link adds to a copy of any size.
    pub latency: f64,
}

/// A capacity that several directed links draw on together: both directions of a PCIe slot, one NUMA domain's memory.
///
/// A copy draws on it once, even when its route has several of the links: so counts the total throughput of a switch.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedResource {
    /// Unique among the shared resources, `host0.read` say.
    pub name: String,
    /// Bytes/s for all of `links` together.
    pub capacity: f64,
    /// The same of bytes that are staged in host memory, where that is another: rings of a few MiB stay in the processor's caches, and pipelines that
    /// cross in one link move less than two plain copies do.
    pub staged: Option<f64>,
    /// The directed links that draw on it.
    pub links: Vec<LinkId>,
}

/// Fixed costs that no link explains, in seconds. What each stands for, and where its default comes from, is in
/// `docs/topology.md`.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// One copy of a few bytes, from issue until the host sees it done.
    pub copy: f64,
    /// Host time to issue each further copy.
    pub issue: f64,
    /// Idle time of a lane between two dependent chunks: an event recorded on one device and waited for on another.
    pub chunk: f64,
    /// The same where chunks are staged in a GPU's memory.
    pub relay_chunk: f64,
    /// What staged paths add to a plan, once: lanes start after an event of the caller's stream, which goes on after theirs.
    pub join: f64,
    /// What a batch adds, once, whose plain copies are issued by several GPUs: their lanes start after an event of the caller's stream, on another GPU, which
    /// goes on after theirs.
    pub gpu_join: f64,
    /// Host time that a lane of its own stream costs beside its copies: forking it from the caller's stream and joining it again.
    pub lane: f64,
    /// What a copy between two GPUs takes longer when the reading end issues it.
    pub pull: f64,
    /// Host time to launch a graph of one node, and each further node's share.
    pub graph: f64,
    /// See [`Costs::graph`].
    pub graph_node: f64,
    /// One batched copy call of no segments, until done, and each segment's share.
    pub batch: f64,
    /// See [`Costs::batch`].
    pub batch_segment: f64,
    /// One fused copy kernel of no segments, until done, and each segment's share.
    pub kernel: f64,
    /// See [`Costs::kernel`].
    pub kernel_segment: f64,
    /// The part of a link's bandwidth that a copy kernel reaches, in (0, 1].
    pub kernel_efficiency: f64,
    /// Host time to build and instantiate a graph before its first launch, for each of its copies.
    pub graph_first_node: f64,
}

/// What is known about a node: a plain, comparable value.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    /// `beluga`, or what the file says.
    pub name: String,
    /// One line for people.
    pub description: String,
    /// Devices and switches.
    pub nodes: Vec<Node>,
    /// Directed links.
    pub links: Vec<Link>,
    /// Capacities beyond the links' own.
    pub shared: Vec<SharedResource>,
    /// Fixed costs.
    pub costs: Costs,
}

impl Default for Costs {
    /// What an HGX H200 gave (hardware readings, H200, 2026-11-20); the readings behind each value are in `docs/topology.md`.
    fn default() -> Self {
        Costs {
            // One peer copy of 8 B to 4 KiB by a copy engine: 6.7 to 6.9 us.
            copy: 6.7e-6,
            // Copies issued on streams: 2.2 us each.
            issue: 2.2e-6,
            // An event recorded on one device and waited for on another, round trip: 4.48 us.
            chunk: 4.5e-6,
            // Pipelines through a third GPU in 1 to 32 chunks: 197 to 347 GB/s, with 4.5 us 195 to 342 (docs/simulator.md).
            relay_chunk: 4.5e-6,
            join: 4.5e-6,
            gpu_join: 4.5e-6,
            // Calls of 2 to 12 lanes against as many plain copies: 4.4 to 4.8 us for each lane but the first.
            lane: 4.5e-6,
            // 64 MiB at 372.3 in place of 378.7 GB/s are 3.0 us, 1 GiB at 395.7 in place of 396.1 are 2.7 us.
            pull: 3e-6,
            // Launching explicit graphs of 1 to 64 copies that alternate between two lanes: 1.91 to 92 us, 1.43 us for each further one.
            graph: 2e-6,
            graph_node: 1.4e-6,
            // A batched call of one segment was not read: taken as one copy. 26 halo messages, 1.47 MB, then come out at
            // 6.7 + 16 + 3.7 = 26.4 us (read: 25.6), 26 messages with faces of 4 MiB at 86 us (read: 88.0).
            batch: 6.7e-6,
            // 26 segments are issued in 16.0 us.
            batch_segment: 0.62e-6,
            // One kernel copy of 8 B to 4 KiB: 9.4 to 9.5 us.
            kernel: 9.4e-6,
            // 26 halo messages, 1.47 MB, in one kernel: 13.7 us, of which 4.1 us move the bytes: 0.2 us over 26 segments.
            kernel_segment: 0.01e-6,
            // Kernel copies of 8 to 132 blocks reach 350 to 366 of 396 GB/s.
            kernel_efficiency: 0.9,
            // Building and instantiating the same: 44 to 58 us for 34 copies, 69 to 207 us for 64.
            graph_first_node: 1.5e-6,
        }
    }
}

/// The preset that stands in where nobody names a topology and none is discovered.
pub const DEFAULT_PRESET: &str = "hgx-h200";

/// The topology of this name: a preset, or else the file at this path.
///
/// A preset's name wins over a file of the same name; `./beluga` means the file.
pub fn load(name_or_path: &str) -> Result<Topology, TopologyError> {
    Ok(load_probed(name_or_path)?.0)
}

/// As [`load`], with what a file remembers of the probe that it comes from, if it comes from one.
pub fn load_probed(name_or_path: &str) -> Result<(Topology, Option<probe::Record>), TopologyError> {
    match preset_text(name_or_path) {
        Some(text) => parse_probed(text),
        None => file::read(Path::new(name_or_path)),
    }
}
