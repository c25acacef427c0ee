//! The compiled form of a topology.

use super::{Costs, DeviceId, LinkId, NodeId, NodeKind, Topology, TopologyError, routes};
use smallvec::SmallVec;

/// Index into [`Machine::resources`]. The resource of a link has the link's number; shared resources follow.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResourceId(pub u32);

/// Anything with a capacity that transfers share. Every directed link is one; shared resources follow.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    /// `gpu0>gpu1` for a link (`gpu0>gpu1:pcie` where links of several kinds join the two), its own name for a shared resource.
    pub name: String,
    /// Bytes/s.
    pub capacity: f64,
    /// The part of it that a byte/s takes which is staged in host memory, or comes from there: 1 where staged bytes are as others.
    pub staged: f64,
}

impl Resource {
    /// The capacity that a byte/s takes of which the part `staged` stays in the cache between its two hops: 0 for a plain copy.
    pub fn draw(&self, staged: f64) -> f64 {
        (1.0 - staged) + staged * self.staged
    }
}

/// The way of one copy between two devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// In the order in which bytes pass them. Empty for a copy inside one device.
    pub links: SmallVec<[LinkId; 4]>,
    /// Every resource that a byte on this route draws on, each once, sorted.
    pub resources: SmallVec<[ResourceId; 8]>,
    /// The smallest capacity among `resources`, bytes/s. Infinite for a copy inside one device: nothing in the model limits it.
    pub bandwidth: f64,
    /// The sum of the links' latencies, seconds.
    pub latency: f64,
}

/// A [`Topology`] checked and compiled: the only form the planner reads. It never changes; share it in an `Arc`.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    topology: Topology,
    resources: Vec<Resource>,
    gpus: u32,
    hosts: u32,
    /// GPUs first, then hosts, each in the order of their numbers.
    devices: Vec<NodeId>,
    /// `routes[from * devices + to]`, devices numbered as in `devices`.
    routes: Vec<Option<Route>>,
}

impl Machine {
    /// Checks the topology, numbers its resources and finds the route between every two devices.
    ///
    /// A route passes through switches alone, never through a device: a copy that does is two copies, and for the planner to make.
    /// Between two GPUs it passes only through switches with `peer`. Among the routes that remain, the one with the highest
    /// bandwidth is taken (shared resources counted), then the one with the fewest links, then the one through the nodes that
    /// come first in the topology.
    pub fn new(topology: Topology) -> Result<Machine, TopologyError> {
        topology.check()?;
        let links = topology.link_names().into_iter().zip(&topology.links);
        let links = links.map(|(name, link)| Resource { name, capacity: link.bandwidth, staged: 1.0 });
        let shared = topology.shared.iter().map(|shared| Resource {
            name: shared.name.clone(),
            capacity: shared.capacity,
            staged: shared.staged.map_or(1.0, |staged| shared.capacity / staged),
        });
        let resources: Vec<Resource> = links.chain(shared).collect();

        let mut devices: Vec<NodeId> = topology.nodes_of(NodeKind::Gpu).collect();
        let gpus = devices.len() as u32;
        devices.extend(topology.nodes_of(NodeKind::Host));
        let hosts = devices.len() as u32 - gpus;
        let routes = routes::between_all(&topology, &resources, &devices);
        Ok(Machine { topology, resources, gpus, hosts, devices, routes })
    }

    /// The same machine where no copy engine copies between the devices of these pairs, in either direction: bytes would be lost.
    pub fn without(&self, pairs: &[(DeviceId, DeviceId)]) -> Machine {
        let mut machine = self.clone();
        for (a, b) in pairs {
            if let (Some(a), Some(b)) = (self.index(*a), self.index(*b)) {
                for (from, to) in [(a, b), (b, a)] {
                    machine.routes[from * self.devices.len() + to] = None;
                }
            }
        }
        machine
    }

    /// The same machine with other fixed costs.
    pub fn with_costs(&self, costs: Costs) -> Machine {
        let mut machine = self.clone();
        machine.topology.costs = costs;
        machine
    }

    /// The same machine with other numbers of GPUs: GPU `n` is the one that was `gpus[n]`, each of which is named once.
    pub fn renumbered(&self, gpus: &[u32]) -> Machine {
        let mut machine = self.clone();
        let count = self.devices.len();
        let old = |at: usize| gpus.get(at).map_or(at, |gpu| *gpu as usize);
        for from in 0..count {
            machine.devices[from] = self.devices[old(from)];
            for to in 0..count {
                machine.routes[from * count + to].clone_from(&self.routes[old(from) * count + old(to)]);
            }
        }
        machine
    }

    /// The same machine where each resource has so many times its capacity, more than 0. Routes stay what they are: copy engines take the way
    /// that they are wired for, however slow it is. The topology that it was compiled from stays too.
    pub fn scaled(&self, factor: impl Fn(ResourceId) -> f64) -> Machine {
        let mut machine = self.clone();
        for (number, resource) in (0..).zip(&mut machine.resources) {
            resource.capacity *= factor(ResourceId(number));
        }
        for route in machine.routes.iter_mut().flatten() {
            let capacities = route.resources.iter().map(|resource| machine.resources[resource.0 as usize].capacity);
            route.bandwidth = capacities.fold(f64::INFINITY, f64::min);
        }
        machine
    }

    /// The resources that a word names: `nvlink`, `pcie` or `host` for all links of the kind and what they share, else the one of this name.
    pub fn resources_named(&self, name: &str) -> Vec<ResourceId> {
        let Topology { links, shared, .. } = &self.topology;
        let kinds = links.iter().map(|link| Some(link.kind));
        let kinds = kinds.chain(shared.iter().map(|shared| shared.links.first().map(|link| links[link.0 as usize].kind)));
        let named = (0..).zip(&self.resources).zip(kinds);
        let named = named.filter(|((_, of), kind)| of.name == name || kind.is_some_and(|kind| kind.name() == name));
        named.map(|((number, _), _)| ResourceId(number)).collect()
    }

    /// What this machine was compiled from.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Fixed costs.
    pub fn costs(&self) -> &Costs {
        &self.topology.costs
    }

    /// Everything with a capacity, indexed by [`ResourceId`].
    pub fn resources(&self) -> &[Resource] {
        &self.resources
    }

    /// How many GPUs there are.
    pub fn gpu_count(&self) -> u32 {
        self.gpus
    }

    /// How many host NUMA domains there are.
    pub fn host_count(&self) -> u32 {
        self.hosts
    }

    /// All devices: GPUs by their numbers, then hosts by theirs.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + use<> {
        (0..self.gpus).map(DeviceId::gpu).chain((0..self.hosts).map(DeviceId::host))
    }

    /// Whether the machine has this device.
    pub fn contains(&self, device: DeviceId) -> bool {
        self.index(device).is_some()
    }

    /// The name of this device's node in the topology.
    pub fn device_name(&self, device: DeviceId) -> Option<&str> {
        self.index(device).map(|index| self.topology.node_name(self.devices[index]))
    }

    /// The route of one copy. `None` where no copy engine can copy between the two directly, or the machine has not got both.
    pub fn route(&self, from: DeviceId, to: DeviceId) -> Option<&Route> {
        let (from, to) = (self.index(from)?, self.index(to)?);
        self.routes[from * self.devices.len() + to].as_ref()
    }

    fn index(&self, device: DeviceId) -> Option<usize> {
        // `!n` is `-1 - n`, the NUMA domain, and cannot overflow.
        let (number, first, count) = if device.is_host() { (!device.0, self.gpus, self.hosts) } else { (device.0, 0, self.gpus) };
        ((number as u32) < count).then(|| (first + number as u32) as usize)
    }
}
