//! Converts fitted rates and capacities to a topology: nodes, links and shared resources.
//!
//! Every hop (pair of devices) becomes a link between its devices, and every shared capacity becomes a shared resource. If only an output
//! port of the source GPU and an input port of the destination GPU limit the copies between GPUs, one switch replaces the links between
//! GPUs. The planner then has fewer resources, and can immediately exclude relays through other GPUs, because they add no bandwidth.

use super::fit::{Capacities, Shared};
use super::{Ends, Group, rounded};
use crate::topology::{Costs, DeviceId, Link, LinkId, LinkKind, Machine, Node, NodeId, NodeKind, SharedResource, Topology};
use ahash::AHashSet;

/// Largest relative difference at which the rate of a hop (pair of devices) counts as equal to the capacity of its ports.
const LIKE_ITS_PORTS: f64 = 0.06;

/// Returns the topology without costs, and every shared capacity with its name in the topology. `starts` holds the startup time of each hop
/// (pair of devices) in seconds.
pub(super) fn topology(base: &Machine, hops: &[Ends], fit: &Capacities, starts: &[f64]) -> (Topology, Vec<Group>) {
    let devices: Vec<DeviceId> = base.devices().collect();
    let mut draft = Draft {
        nodes: devices
            .iter()
            .map(|&device| Node {
                name: base.device_name(device).unwrap_or("?").to_owned(),
                kind: if device.is_host() { NodeKind::Host } else { NodeKind::Gpu },
            })
            .collect(),
        devices,
        links: Vec::new(),
        of_hop: vec![None; hops.len()],
        hops,
    };
    // The smallest startup time is caused by the driver and is part of the costs. If the startup time of a hop is longer, the difference is
    // the latency of its link.
    let least = starts.iter().copied().fold(f64::INFINITY, f64::min);
    let latency = |hop: usize| if starts[hop] > 1.2 * least { rounded(starts[hop] - least) } else { 0.0 };

    let ports = Ports::find(hops, fit).filter(|ports| ports.carry(hops, fit));
    let kinds: Vec<LinkKind> = hops.iter().map(|&(from, to)| kind(base, from, to)).collect();
    if let Some(ports) = &ports {
        draft.add_switch(ports, fit, &kinds, &latency);
    }
    for (index, &(from, to)) in hops.iter().enumerate() {
        if ports.is_none() || from.is_host() || to.is_host() {
            let link = draft.link(draft.node(from), draft.node(to), kinds[index], fit.rates[index], latency(index));
            draft.of_hop[index] = Some(link);
        }
    }

    let mut shared: Vec<SharedResource> = Vec::new();
    let mut groups = Vec::new();
    for resource in &fit.shared {
        let ends: Vec<_> = resource.hops().map(|hop| hops[hop]).collect();
        let name = unique(name(&ends), &shared);
        groups.push(Group { name: name.clone(), capacity: resource.capacity, staged: resource.staged, hops: ends });
        let links = match &ports {
            Some(ports) if ports.is_remote(resource, hops, fit) => None,
            Some(ports) => ports.links(resource, hops, &draft),
            None => Some(resource.hops().filter_map(|hop| draft.of_hop[hop]).collect()),
        };
        // A capacity that only one link uses is the bandwidth of this link, so it needs no shared resource.
        let links = links.unwrap_or_default();
        if links.len() > 1 {
            shared.push(SharedResource { name, capacity: rounded(resource.capacity), staged: resource.staged.map(rounded), links });
        }
    }
    let topology = Topology {
        name: "probed".into(),
        description: String::new(),
        nodes: draft.nodes,
        links: draft.links,
        shared,
        costs: Costs::default(),
    };
    (topology, groups)
}

/// Returns the kind of link that the base machine has between these devices.
fn kind(base: &Machine, from: DeviceId, to: DeviceId) -> LinkKind {
    let first = base.route(from, to).and_then(|route| route.links.first().copied());
    first.and_then(|link| base.topology().links.get(link.0 as usize)).map_or(LinkKind::Pcie, |link| link.kind)
}

struct Draft<'a> {
    devices: Vec<DeviceId>,
    nodes: Vec<Node>,
    links: Vec<Link>,
    hops: &'a [(DeviceId, DeviceId)],
    /// Link of each hop (pair of devices), or `None` if the copies of the hop pass through the switch.
    of_hop: Vec<Option<LinkId>>,
}

impl Draft<'_> {
    fn node(&self, device: DeviceId) -> NodeId {
        NodeId(self.devices.iter().position(|other| *other == device).unwrap_or(0) as u32)
    }

    fn link(&mut self, from: NodeId, to: NodeId, kind: LinkKind, bandwidth: f64, latency: f64) -> LinkId {
        self.links.push(Link { from, to, kind, bandwidth: rounded(bandwidth), latency });
        LinkId(self.links.len() as u32 - 1)
    }

    /// Adds the switch node after the devices. GPU n has link 2n into the switch and link 2n + 1 out of the switch.
    fn add_switch(&mut self, ports: &Ports, fit: &Capacities, kinds: &[LinkKind], latency: &dyn Fn(usize) -> f64) {
        let switch = NodeId(self.nodes.len() as u32);
        self.nodes.push(Node { name: "switch".into(), kind: NodeKind::Switch { peer: true } });
        for (index, &gpu) in ports.gpus.iter().enumerate() {
            let mine = |hop: &usize| self.hops[*hop].0 == gpu && !self.hops[*hop].1.is_host();
            let first = (0..self.hops.len()).find(mine);
            let kind = first.map_or(LinkKind::Nvlink, |hop| kinds[hop]);
            // A copy passes through two links; each gets half of the extra latency.
            let half = first.map_or(0.0, |hop| rounded(latency(hop) / 2.0));
            let node = self.node(gpu);
            self.link(node, switch, kind, fit.shared[ports.out[index]].capacity, half);
            self.link(switch, node, kind, fit.shared[ports.into[index]].capacity, half);
        }
    }
}

/// Ports of the GPUs. The output port of a GPU is the resource that all copies from this GPU to other GPUs use. The input port is the
/// resource that all copies from other GPUs to this GPU use.
struct Ports {
    gpus: Vec<DeviceId>,
    out: Vec<usize>,
    into: Vec<usize>,
}

impl Ports {
    /// Returns the ports of the GPUs. Returns `None` if there are fewer than three GPUs, or if some GPU cannot copy to every other GPU.
    fn find(hops: &[Ends], fit: &Capacities) -> Option<Ports> {
        let peers = || hops.iter().enumerate().filter(|(_, (from, to))| !from.is_host() && !to.is_host());
        let mut gpus: Vec<DeviceId> = peers().flat_map(|(_, hop)| [hop.0, hop.1]).collect();
        gpus.sort_unstable();
        gpus.dedup();
        if gpus.len() < 3 || peers().count() != gpus.len() * (gpus.len() - 1) {
            return None;
        }
        let port = |wanted: &dyn Fn(DeviceId, DeviceId) -> bool| {
            let exactly = |resource: &&(usize, &Shared)| peers().all(|(hop, ends)| resource.1.members[hop] == wanted(ends.0, ends.1));
            let found: Vec<_> = fit.shared.iter().enumerate().collect();
            let tightest = found.iter().filter(exactly).min_by(|a, b| a.1.capacity.total_cmp(&b.1.capacity));
            tightest.map(|resource| resource.0)
        };
        let out = gpus.iter().map(|&gpu| port(&|from, _| from == gpu)).collect::<Option<Vec<usize>>>()?;
        let into = gpus.iter().map(|&gpu| port(&|_, to| to == gpu)).collect::<Option<Vec<usize>>>()?;
        Some(Ports { gpus, out, into })
    }

    fn index(&self, gpu: DeviceId) -> usize {
        self.gpus.iter().position(|other| *other == gpu).unwrap_or(0)
    }

    /// True if the ports explain all rates. Every hop between GPUs is then as fast as its ports, and each other resource of these hops is
    /// used by either all or none of the copies of a port.
    fn carry(&self, hops: &[Ends], fit: &Capacities) -> bool {
        let as_fast = hops.iter().zip(&fit.rates).filter(|((from, to), _)| !from.is_host() && !to.is_host()).all(|(&(from, to), rate)| {
            let capacity = |port: usize| fit.shared[port].capacity;
            let ports = capacity(self.out[self.index(from)]).min(capacity(self.into[self.index(to)]));
            (rate / ports - 1.0).abs() < LIKE_ITS_PORTS
        });
        as_fast && fit.shared.iter().all(|shared| self.whole(shared, hops).is_some() || self.is_remote(shared, hops, fit))
    }

    /// True if a resource serves host copies and some copies between GPUs, and is faster than any port. Host copies and copies between GPUs
    /// can share only a path to host memory, which is slower than a port. A larger capacity is an artefact of measuring a large set, whose
    /// copies end at different times.
    fn is_remote(&self, resource: &Shared, hops: &[Ends], fit: &Capacities) -> bool {
        let widest = self.out.iter().chain(&self.into).map(|port| fit.shared[*port].capacity).fold(0.0, f64::max);
        let is_of_host = |hop: usize| hops[hop].0.is_host() || hops[hop].1.is_host();
        resource.capacity > widest && resource.hops().any(is_of_host) && !resource.hops().all(is_of_host)
    }

    /// Returns two lists of GPUs: GPUs whose copies to other GPUs all use a resource, and GPUs whose copies from other GPUs all use it.
    /// Returns `None` if other copies between GPUs use the resource too.
    fn whole(&self, resource: &Shared, hops: &[Ends]) -> Option<[Vec<DeviceId>; 2]> {
        let peers: Vec<(DeviceId, DeviceId, bool)> = hops
            .iter()
            .zip(&resource.members)
            .filter(|((from, to), _)| !from.is_host() && !to.is_host())
            .map(|(&(from, to), &member)| (from, to, member))
            .collect();
        let all = |of: &dyn Fn(&(DeviceId, DeviceId, bool)) -> DeviceId| -> Vec<DeviceId> {
            self.gpus.iter().copied().filter(|gpu| peers.iter().filter(|hop| of(hop) == *gpu).all(|hop| hop.2)).collect()
        };
        let (out, into) = (all(&|hop| hop.0), all(&|hop| hop.1));
        // If all outgoing copies of every GPU use the resource, all incoming ones do too, so one list is enough.
        let into = if out.len() == self.gpus.len() { Vec::new() } else { into };
        let said = |hop: &(DeviceId, DeviceId, bool)| out.contains(&hop.0) || into.contains(&hop.1);
        peers.iter().all(|hop| hop.2 == said(hop)).then_some([out, into])
    }

    /// Returns the links of the topology that share a resource. Returns `None` if the resource is used by some copies of a port but not by
    /// all of them.
    fn links(&self, resource: &Shared, hops: &[Ends], draft: &Draft<'_>) -> Option<Vec<LinkId>> {
        let [out, into] = self.whole(resource, hops)?;
        let ports = out.iter().map(|gpu| 2 * self.index(*gpu)).chain(into.iter().map(|gpu| 2 * self.index(*gpu) + 1));
        Some(ports.map(|link| LinkId(link as u32)).chain(resource.hops().filter_map(|hop| draft.of_hop[hop])).collect())
    }
}

/// Returns the name of the capacity that these hops (pairs of source and destination device) share.
fn name(hops: &[Ends]) -> String {
    let sources: AHashSet<DeviceId> = hops.iter().map(|hop| hop.0).collect();
    let targets: AHashSet<DeviceId> = hops.iter().map(|hop| hop.1).collect();
    let one = |devices: &AHashSet<DeviceId>| (devices.len() == 1).then(|| devices.iter().next().copied()).flatten();
    match (one(&sources), one(&targets)) {
        (Some(device), _) if device.is_host() => format!("{device}.read"),
        (_, Some(device)) if device.is_host() => format!("{device}.write"),
        (Some(device), _) => format!("{device}.out"),
        (_, Some(device)) => format!("{device}.in"),
        (None, None) => match hops {
            [(a, b), (c, d)] if a == d && b == c => format!("{}-{}", a.max(b), a.min(b)),
            _ if hops.iter().all(|hop| hop.0.is_host() || hop.1.is_host()) => "host".into(),
            _ if hops.iter().all(|hop| !hop.0.is_host() && !hop.1.is_host()) => "gpus".into(),
            _ => "shared".into(),
        },
    }
}

fn unique(name: String, taken: &[SharedResource]) -> String {
    let is_free = |name: &String| taken.iter().all(|other| other.name != *name);
    let numbered = (2..).map(|number| format!("{name}.{number}"));
    std::iter::once(name.clone()).chain(numbered).find(is_free).unwrap_or(name)
}
