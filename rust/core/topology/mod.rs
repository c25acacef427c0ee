//! The machine model: devices, switches, directed links, and the resources that transfers share.
//!
//! A [`Topology`] is a plain value: what a file, a preset, or a discovery says about a node. [`Machine`] is the same value checked
//! and compiled for the planner: every resource numbered, every route between two devices found once. Nothing here touches a
//! driver, and nothing outside this module knows a preset by name.
//!
//! Units: bytes, seconds, bytes per second. A capacity is per direction, because links are directed. The model, the file format
//! and the presets are described in `docs/reference/topology.md`.
//!
//! ```
//! use mpgpu_core::topology::{self, DeviceId, Machine};
//!
//! let machine = Machine::new(topology::load("hgx-h200")?)?;
//! let route = machine.route(DeviceId::gpu(0), DeviceId::gpu(1)).expect("an NVSwitch joins all GPUs");
//! assert_eq!(route.links.len(), 2); // into the switch and out of it
//! # Ok::<(), topology::TopologyError>(())
//! ```

mod check;
mod costs;
pub mod discover;
mod error;
mod file;
mod machine;
mod presets;
mod record;
mod routes;
mod subset;

pub use check::{CAPACITY_RANGE, MAX_DEVICES, MAX_LINKS, MAX_SHARED, MAX_SWITCHES, MAX_TIME};
pub use costs::{Cost, CostUnit, Costs};
pub use error::TopologyError;
pub use file::{MAX_FILE_BYTES, parse, parse_probed};
pub use file::{open_regular, shorten, toml_place};
pub use machine::{Machine, Resource, ResourceId, Route};
pub use presets::{MODELLED_PRESETS, preset, preset_names, preset_text};
pub use record::{FORMAT, Fingerprint, Gpu, Record, Residuals, hash};

use std::fmt;
use std::path::Path;

/// A memory that transfers start or end in, numbered as in the C ABI: GPUs count up from 0, host NUMA domains down from -1.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub i32);

impl DeviceId {
    /// The host memory of NUMA domain 0, `MP_DEVICE_HOST` in the C ABI.
    pub const HOST: DeviceId = DeviceId(-1);
    /// In place of a device, where a call allows it: the one whose memory an address lies in. No machine has a GPU of this number.
    pub const AUTO: DeviceId = DeviceId(0x7fff_fffe);
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
    /// Returns its name in messages, whatever the language of the caller: `device 3`, `the host`, `host NUMA domain 1`.
    pub fn in_words(self) -> String {
        match self {
            DeviceId::HOST => "the host".to_owned(),
            DeviceId::AUTO => "an automatic device".to_owned(),
            DeviceId(number) if self.is_host() => format!("host NUMA domain {}", !number),
            DeviceId(number) => format!("device {number}"),
        }
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
#[derive(Copy, Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
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

/// What kind of memory an address lies in, as far as planning cares.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory of a GPU.
    Device,
    /// Host memory that a GPU's copy engine reads and writes directly.
    Pinned,
    /// Host memory that the driver stages by itself: never split over several paths.
    Pageable,
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
pub fn load_probed(name_or_path: &str) -> Result<(Topology, Option<Record>), TopologyError> {
    match preset_text(name_or_path) {
        Some(text) => parse_probed(text),
        None => file::read(Path::new(name_or_path)),
    }
}
