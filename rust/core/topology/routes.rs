//! Finds the best route between every two devices.

use super::machine::{Resource, ResourceId, Route};
use super::{Link, LinkId, Node, NodeId, NodeKind, Topology};
use smallvec::SmallVec;

/// Step of a route: from one node to a neighbouring node, over the best link that connects them.
#[derive(Copy, Clone)]
struct Step {
    to: usize,
    link: LinkId,
    /// Smallest capacity among the link and its shared resources, bytes/s. A copy consumes the capacity of a shared resource once, however
    /// many of its links the route contains. The bandwidth of a route is therefore the smallest capacity of its steps: a widest-path
    /// problem.
    capacity: f64,
}

struct Graph<'a> {
    nodes: &'a [Node],
    /// Steps that leave each node, sorted by `to`.
    out: Vec<Vec<Step>>,
    /// Steps that enter each node: the node where the step starts, and the capacity of the step in bytes/s.
    into: Vec<Vec<(usize, f64)>>,
}

/// Returns the routes between all ordered pairs of `devices`, ordered by the first device. An entry is `None` if there is no route.
/// `resources` holds the resources of the links, followed by the shared resources.
pub(super) fn between_all(topology: &Topology, resources: &[Resource], devices: &[NodeId]) -> Vec<Option<Route>> {
    let drawn = drawn_resources(topology);
    let graph = Graph::new(topology, resources, &drawn);
    let mut routes = Vec::with_capacity(devices.len() * devices.len());
    for &from in devices {
        // Copies between GPUs may pass through fewer switches than other copies, so there are two sets of widths for each device.
        let peer = graph.widths(from.0 as usize, true);
        let any = graph.widths(from.0 as usize, false);
        let from_gpu = topology.nodes[from.0 as usize].kind == NodeKind::Gpu;
        for &to in devices {
            if from == to {
                routes.push(Some(make_route(topology, resources, &drawn, SmallVec::new())));
                continue;
            }
            let peer_only = from_gpu && topology.nodes[to.0 as usize].kind == NodeKind::Gpu;
            let width = if peer_only { peer[to.0 as usize] } else { any[to.0 as usize] };
            let links = if width > 0.0 { graph.shortest(from.0 as usize, to.0 as usize, width, peer_only) } else { None };
            routes.push(links.map(|links| make_route(topology, resources, &drawn, links)));
        }
    }
    routes
}

/// Returns the resources whose capacity a copy over each link consumes, sorted: the link itself, then its shared resources.
fn drawn_resources(topology: &Topology) -> Vec<SmallVec<[ResourceId; 4]>> {
    let mut drawn: Vec<SmallVec<[ResourceId; 4]>> =
        (0..topology.links.len()).map(|link| SmallVec::from_slice(&[ResourceId(link as u32)])).collect();
    for (index, shared) in topology.shared.iter().enumerate() {
        for link in &shared.links {
            drawn[link.0 as usize].push(ResourceId((topology.links.len() + index) as u32));
        }
    }
    drawn
}

fn make_route(topology: &Topology, resources: &[Resource], drawn: &[SmallVec<[ResourceId; 4]>], links: SmallVec<[LinkId; 4]>) -> Route {
    let mut drawn: SmallVec<[ResourceId; 8]> = links.iter().flat_map(|link| drawn[link.0 as usize].iter().copied()).collect();
    drawn.sort_unstable();
    drawn.dedup();
    let bandwidth = drawn.iter().map(|id| resources[id.0 as usize].capacity).fold(f64::INFINITY, f64::min);
    let latency = links.iter().map(|link| topology.links[link.0 as usize].latency).sum();
    Route { links, resources: drawn, bandwidth, latency }
}

impl<'a> Graph<'a> {
    fn new(topology: &'a Topology, resources: &[Resource], drawn: &[SmallVec<[ResourceId; 4]>]) -> Self {
        let capacity =
            |link: LinkId| drawn[link.0 as usize].iter().map(|id| resources[id.0 as usize].capacity).fold(f64::INFINITY, f64::min);
        let latency = |link: LinkId| topology.links[link.0 as usize].latency;
        let mut out: Vec<Vec<Step>> = vec![Vec::new(); topology.nodes.len()];
        for (index, &Link { from, to, .. }) in topology.links.iter().enumerate() {
            let link = LinkId(index as u32);
            out[from.0 as usize].push(Step { to: to.0 as usize, link, capacity: capacity(link) });
        }
        let mut into = vec![Vec::new(); topology.nodes.len()];
        for (from, steps) in out.iter_mut().enumerate() {
            // If several links lead to the same node, the best link is sorted first, and the others are then removed.
            steps.sort_by(|a, b| {
                let best_first = || b.capacity.total_cmp(&a.capacity).then(latency(a.link).total_cmp(&latency(b.link)));
                a.to.cmp(&b.to).then_with(best_first).then(a.link.cmp(&b.link))
            });
            steps.dedup_by_key(|step| step.to);
            for step in steps.iter() {
                into[step.to].push((from, step.capacity));
            }
        }
        Graph { nodes: &topology.nodes, out, into }
    }

    fn passable(&self, node: usize, peer_only: bool) -> bool {
        matches!(self.nodes[node].kind, NodeKind::Switch { peer } if peer || !peer_only)
    }

    /// Returns the bandwidth of the widest route from `from` to every node, or 0 if there is no route. It uses Dijkstra's algorithm with
    /// the smallest capacity instead of the sum of lengths.
    fn widths(&self, from: usize, peer_only: bool) -> Vec<f64> {
        let mut width = vec![0.0; self.nodes.len()];
        let mut done = vec![false; self.nodes.len()];
        width[from] = f64::INFINITY;
        let mut next = Some(from);
        while let Some(node) = next {
            done[node] = true;
            if node == from || self.passable(node, peer_only) {
                for step in &self.out[node] {
                    width[step.to] = f64::max(width[step.to], step.capacity.min(width[node]));
                }
            }
            next = (0..width.len()).filter(|&node| !done[node] && width[node] > 0.0).max_by(|&a, &b| width[a].total_cmp(&width[b]));
        }
        width
    }

    /// Returns the links of the shortest route that has at least the bandwidth `width`. Among equally short routes, the first in node order
    /// is used. Returns `None` if no route has this bandwidth.
    fn shortest(&self, from: usize, to: usize, width: f64, peer_only: bool) -> Option<SmallVec<[LinkId; 4]>> {
        const FAR: usize = usize::MAX;
        let mut distance = vec![FAR; self.nodes.len()];
        distance[to] = 0;
        let mut queue = vec![to];
        let mut head = 0;
        while head < queue.len() && distance[from] == FAR {
            let node = queue[head];
            head += 1;
            for &(before, capacity) in &self.into[node] {
                let reachable = capacity >= width && (before == from || self.passable(before, peer_only));
                if reachable && distance[before] == FAR {
                    distance[before] = distance[node] + 1;
                    queue.push(before);
                }
            }
        }
        let mut links = SmallVec::new();
        let mut node = from;
        while node != to {
            let closer = |step: &&Step| step.capacity >= width && distance[step.to] != FAR && distance[step.to] + 1 == distance[node];
            let step = self.out[node].iter().find(closer)?;
            links.push(step.link);
            node = step.to;
        }
        Some(links)
    }
}
