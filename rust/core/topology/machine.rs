//! Compiles a topology for the planner: numbers its resources and finds the routes between devices.

use super::{Costs, DeviceId, LinkId, NodeId, NodeKind, Topology, TopologyError, routes};
use smallvec::SmallVec;

/// Resource of a machine, as an index into [`Machine::resources`]. A link's resource has the number of the link; shared resources follow.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResourceId(pub u32);

/// Resource with a capacity that transfers share: a directed link, or a shared resource of the topology.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    /// Name of the resource: `gpu0>gpu1` for a link, `gpu0>gpu1:pcie` if links of several kinds connect the two nodes, or the name of the
    /// shared resource.
    pub name: String,
    /// Capacity of the resource in bytes/s.
    pub capacity: f64,
    /// Capacity in bytes/s that the resource needs for each byte/s of data that are staged in host memory. It is 1 if staged data need as
    /// much as other data.
    pub staged: f64,
}

impl Resource {
    /// Returns the capacity in bytes/s that this resource needs for each byte/s of data. `staged` is the fraction of the data that stay in
    /// the processor's cache between the two hops of a staged path. It is 0 for a direct copy.
    pub fn draw(&self, staged: f64) -> f64 {
        (1.0 - staged) + staged * self.staged
    }
}

/// Route of one copy between two devices: the links through which the data pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// Links in the order in which data pass through them. The list is empty for a copy inside one device.
    pub links: SmallVec<[LinkId; 4]>,
    /// Resources whose capacity a copy on this route consumes, sorted, without duplicates.
    pub resources: SmallVec<[ResourceId; 8]>,
    /// Smallest capacity among the route's resources, bytes/s. It is infinite for a copy inside one device, whose rate the model does not
    /// limit.
    pub bandwidth: f64,
    /// Sum of the latencies of the route's links, seconds.
    pub latency: f64,
}

/// Checked and compiled [`Topology`], the only form that the planner reads. A machine is immutable, so it can be shared in an `Arc`.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    topology: Topology,
    resources: Vec<Resource>,
    gpus: u32,
    hosts: u32,
    /// Node of each device: GPUs first, then hosts, each in the order of their numbers.
    devices: Vec<NodeId>,
    /// Route from each device to each other device, at index `from * devices + to`. Devices are numbered as in `devices`. `None` if there
    /// is no route.
    routes: Vec<Option<Route>>,
}

impl Machine {
    /// Checks the topology, numbers its resources and finds the route between every two devices.
    ///
    /// A route passes through switches only, never through a device: a copy through a device is two copies, which the planner creates.
    /// Between two GPUs, a route passes only through switches with `peer`. Among the possible routes, the route with the highest bandwidth
    /// is used, taking shared resources into account. Among routes of equal bandwidth, it is the one with the fewest links. Among these, it
    /// is the one through the nodes that come first in the topology.
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

    /// Returns this machine without routes between the two devices of each pair, in either direction. It is used for pairs on which copies
    /// lose data.
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

    /// Returns this machine with the given fixed costs.
    pub fn with_costs(&self, costs: Costs) -> Machine {
        let mut machine = self.clone();
        machine.topology.costs = costs;
        machine
    }

    /// Returns this machine with new GPU numbers: GPU `n` of the result is GPU `gpus[n]` of this machine. `gpus` contains each GPU once.
    /// The topology stays unchanged.
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

    /// Returns this machine with each resource's capacity multiplied by the result of `factor`, which must be greater than 0. The routes
    /// stay unchanged, because copy engines use their route however slow it is. The topology stays unchanged too.
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

    /// Returns the resources with the name `name`. The names `nvlink`, `pcie` and `host` select all links of that kind and their shared
    /// resources.
    pub fn resources_named(&self, name: &str) -> Vec<ResourceId> {
        let Topology { links, shared, .. } = &self.topology;
        let kinds = links.iter().map(|link| Some(link.kind));
        let kinds = kinds.chain(shared.iter().map(|shared| shared.links.first().map(|link| links[link.0 as usize].kind)));
        let named = (0..).zip(&self.resources).zip(kinds);
        let named = named.filter(|((_, of), kind)| of.name == name || kind.is_some_and(|kind| kind.name() == name));
        named.map(|((number, _), _)| ResourceId(number)).collect()
    }

    /// Returns the topology that this machine was compiled from.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the fixed costs of copies on this machine.
    pub fn costs(&self) -> &Costs {
        &self.topology.costs
    }

    /// Returns all resources, indexed by [`ResourceId`].
    pub fn resources(&self) -> &[Resource] {
        &self.resources
    }

    /// Returns the number of GPUs.
    pub fn gpu_count(&self) -> u32 {
        self.gpus
    }

    /// Returns the number of host NUMA domains.
    pub fn host_count(&self) -> u32 {
        self.hosts
    }

    /// Returns all devices: GPUs in the order of their numbers, then hosts.
    pub fn devices(&self) -> impl Iterator<Item = DeviceId> + use<> {
        (0..self.gpus).map(DeviceId::gpu).chain((0..self.hosts).map(DeviceId::host))
    }

    /// True if the machine has this device.
    pub fn contains(&self, device: DeviceId) -> bool {
        self.index(device).is_some()
    }

    /// Returns the name of this device's node in the topology. Returns `None` if the machine does not have this device.
    pub fn device_name(&self, device: DeviceId) -> Option<&str> {
        self.index(device).map(|index| self.topology.node_name(self.devices[index]))
    }

    /// Returns the route of one copy. Returns `None` if no copy engine can copy directly between the two devices, or if one of them does
    /// not exist.
    pub fn route(&self, from: DeviceId, to: DeviceId) -> Option<&Route> {
        let (from, to) = (self.index(from)?, self.index(to)?);
        self.routes[from * self.devices.len() + to].as_ref()
    }

    fn index(&self, device: DeviceId) -> Option<usize> {
        // `!n` is `-1 - n`, the number of the NUMA domain, and cannot overflow.
        let (number, first, count) = if device.is_host() { (!device.0, self.gpus, self.hosts) } else { (device.0, 0, self.gpus) };
        ((number as u32) < count).then(|| (first + number as u32) as usize)
    }
}
