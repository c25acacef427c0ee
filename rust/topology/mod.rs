//! The machine model: devices, switches, directed links, and the resources that transfers share.
//!
//! A [`Topology`] is a plain value: what a file, a preset, or a discovery says about a node. [`Machine`] is the same value checked
//! and compiled for the planner: every resource numbered, every route between two devices found once. Nothing here touches a
//! driver, and nothing outside this module knows a preset by name.
//!
//! Units: bytes, seconds, bytes per second. A capacity is per direction, because links are directed.

use smallvec::SmallVec;

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

/// Index into [`Topology::nodes`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);
/// Index into [`Topology::links`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u32);
/// Index into [`Machine::resources`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResourceId(pub u32);

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
#[derive(Clone, Debug, PartialEq)]
pub struct SharedResource {
    /// Unique among the shared resources.
    pub name: String,
    /// Bytes/s for all of `links` together.
    pub capacity: f64,
    /// The directed links that draw on it.
    pub links: Vec<LinkId>,
}

/// Fixed costs that no link explains, in seconds. What each stands for, and where its value comes from, is in `docs/model.md`.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// One copy of a few bytes, from issue until the host sees it done.
    pub copy: f64,
    /// Host time to issue each further copy.
    pub issue: f64,
    /// Idle time of a lane between two dependent chunks: an event recorded on one device and waited for on another.
    pub chunk: f64,
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

/// Anything with a capacity that transfers share. Every directed link is one; shared resources follow.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    /// `gpu0>gpu1` for a link, its own name for a shared resource.
    pub name: String,
    /// Bytes/s.
    pub capacity: f64,
}

/// The way of one copy between two devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// In the order in which bytes pass them. Empty for a copy inside one device.
    pub links: SmallVec<[LinkId; 4]>,
    /// Every resource that a byte on this route draws on, each once, sorted.
    pub resources: SmallVec<[ResourceId; 8]>,
    /// The smallest capacity among `resources`, bytes/s.
    pub bandwidth: f64,
    /// The sum of the links' latencies, seconds.
    pub latency: f64,
}

/// A [`Topology`] checked and compiled: the only form the planner reads.
#[derive(Clone, Debug)]
pub struct Machine {
    topology: Topology,
    resources: Vec<Resource>,
    gpus: u32,
    hosts: u32,
    /// `routes[from * devices + to]`, devices numbered GPUs first, then hosts.
    routes: Vec<Option<Route>>,
}

// Interface that the planner relies on (to be implemented beside the types):
//
// impl Machine {
//     pub fn new(topology: Topology) -> Result<Machine, TopologyError>;
//     pub fn topology(&self) -> &Topology;
//     pub fn costs(&self) -> &Costs;
//     pub fn resources(&self) -> &[Resource];
//     pub fn gpu_count(&self) -> u32;
//     pub fn host_count(&self) -> u32;
//     pub fn contains(&self, device: DeviceId) -> bool;
//     pub fn route(&self, from: DeviceId, to: DeviceId) -> Option<&Route>;   // None: no copy engine can copy between them directly
// }
// pub fn parse(text: &str) -> Result<Topology, TopologyError>;      // file.rs
// pub fn load(name_or_path: &str) -> Result<Topology, TopologyError>; // preset name, else a path
// pub fn preset(name: &str) -> Option<Topology>; pub fn preset_names() -> impl Iterator<Item = &'static str>;
// impl Topology { pub fn to_toml(&self) -> String }
