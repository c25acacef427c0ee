//! Machine model: devices, switches, directed links, and the resources that transfers share.
//!
//! A [`Topology`] is a plain value that describes a compute node. It comes from a file, a preset or discovery. A [`Machine`] is the checked
//! and compiled form for the planner: all resources are numbered, and the route between every two devices is known. This module does not
//! call a driver. No code outside this module depends on the name of a preset.
//!
//! Units are bytes, seconds, and bytes per second. A capacity is per direction, because links are directed. `docs/reference/topology.md`
//! describes the model, the file format and the presets.
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

/// Device with memory: a GPU or a host NUMA domain. The numbers are those of the C ABI: GPUs are 0, 1, 2 and so on, and host NUMA domains
/// are -1, -2, -3 and so on.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub i32);

impl DeviceId {
    /// Host memory of NUMA domain 0. Corresponds to `MP_DEVICE_HOST` in the C ABI.
    pub const HOST: DeviceId = DeviceId(-1);
    /// Placeholder for a device: the library determines the device that owns the address. Accepted only by functions whose description
    /// mentions it. No GPU has this number.
    pub const AUTO: DeviceId = DeviceId(0x7fff_fffe);
    /// Returns the GPU with the number `index`.
    pub const fn gpu(index: u32) -> Self {
        DeviceId(index as i32)
    }
    /// Returns the host memory of the NUMA domain with the number `domain`.
    pub const fn host(domain: u32) -> Self {
        DeviceId(-1 - domain as i32)
    }
    /// Returns true if the device is host memory.
    pub const fn is_host(self) -> bool {
        self.0 < 0
    }
    /// Returns the device's name for messages. The words fit every language binding: `device 3`, `the host`, `host NUMA domain 1`.
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
    /// Writes `gpu0` or `host0`, where 0 is the number of the device. The name of the device's node in the topology is not used.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_host() { write!(f, "host{}", -1 - i64::from(self.0)) } else { write!(f, "gpu{}", self.0) }
    }
}

/// Node of a topology, as an index into [`Topology::nodes`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);
/// Directed link of a topology, as an index into [`Topology::links`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u32);

/// Kind of a node of the machine graph.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// GPU. The n-th GPU node is [`DeviceId::gpu`]`(n)`, counted from 0.
    Gpu,
    /// Memory of one host NUMA domain. The n-th such node is [`DeviceId::host`]`(n)`, counted from 0.
    Host,
    /// NVSwitch, PCIe switch or root complex. Copies between a GPU and host memory may always pass through it.
    Switch {
        /// True if copies between two GPUs may pass through the switch.
        peer: bool,
    },
}

/// Node of the machine graph: a device or a switch.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Name that is unique in its topology, for example `gpu0`.
    pub name: String,
    /// Kind of the node: GPU, host memory or switch.
    pub kind: NodeKind,
}

impl NodeKind {
    /// True if transfers can start and end at a node of this kind.
    pub const fn is_device(self) -> bool {
        matches!(self, NodeKind::Gpu | NodeKind::Host)
    }
}

/// Technology of a link. It is used in descriptions and to choose among equal links. Capacities do not depend on it.
#[derive(Copy, Clone, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// NVLink or NVLink-C2C.
    Nvlink,
    /// PCI Express.
    Pcie,
    /// Link inside or between host sockets (memory bus, UPI, xGMI).
    Host,
}

impl LinkKind {
    /// Returns the name of this technology in a topology file.
    pub const fn name(self) -> &'static str {
        match self {
            LinkKind::Nvlink => "nvlink",
            LinkKind::Pcie => "pcie",
            LinkKind::Host => "host",
        }
    }
}

/// Directed link: one direction of a physical link.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Node where data enter the link.
    pub from: NodeId,
    /// Node where data leave the link.
    pub to: NodeId,
    /// Technology of the link.
    pub kind: LinkKind,
    /// Bandwidth in bytes/s that copies reach over this directed link.
    pub bandwidth: f64,
    /// Time in seconds that the link adds to a copy of any size.
    pub latency: f64,
}

/// Capacity that several directed links share, for example the two directions of a PCIe slot or the links to the memory of one NUMA domain.
///
/// A copy consumes the capacity once, even if its route contains several of the links. A shared resource can therefore describe the total
/// throughput of a switch.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedResource {
    /// Name that is unique among the shared resources, for example `host0.read`.
    pub name: String,
    /// Capacity of all links of the resource together, bytes/s.
    pub capacity: f64,
    /// Capacity for data that are staged in host memory, bytes/s; `None` if it equals `capacity`. It is higher if staging rings of a few
    /// MiB stay in the processor's caches. It is lower if two opposite pipelines on one link move less data than two direct copies.
    pub staged: Option<f64>,
    /// Directed links that share the capacity.
    pub links: Vec<LinkId>,
}

/// Description of the devices and links of one compute node: a plain value that can be compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    /// Name of the topology: that of a preset, such as `beluga`, or the name given in the file.
    pub name: String,
    /// Description of the topology for users, in one line.
    pub description: String,
    /// Devices and switches of the topology.
    pub nodes: Vec<Node>,
    /// Directed links between the nodes of the topology (devices and switches).
    pub links: Vec<Link>,
    /// Capacities that several links share, in addition to the capacity of each link.
    pub shared: Vec<SharedResource>,
    /// Fixed costs of copies on this machine.
    pub costs: Costs,
}

/// Kind of memory that contains an address, as far as planning depends on it.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Memory of a GPU.
    Device,
    /// Host memory that the copy engines of GPUs access directly.
    Pinned,
    /// Host memory that copy engines cannot access directly. The driver stages copies of it, so they are never split over several paths.
    Pageable,
}

/// Name of the preset that is used if the user names no topology and none is discovered.
pub const DEFAULT_PRESET: &str = "hgx-h200";

/// Loads the topology with this name: a preset, or else the file at this path.
///
/// The name of a preset takes precedence over a file with the same name; `./beluga` means the file.
pub fn load(name_or_path: &str) -> Result<Topology, TopologyError> {
    Ok(load_probed(name_or_path)?.0)
}

/// Loads a topology like [`load`], and also returns the record of the measurement (`mpgpu probe`) that produced it, if the file contains
/// one.
pub fn load_probed(name_or_path: &str) -> Result<(Topology, Option<Record>), TopologyError> {
    match preset_text(name_or_path) {
        Some(text) => parse_probed(text),
        None => file::read(Path::new(name_or_path)),
    }
}
