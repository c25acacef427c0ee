//! Models the devices of a machine and the copies between them as a flow network.
//!
//! A [`Commodity`] is data that one device has and one or several other devices need. A [`Tree`] distributes it: each device of the tree
//! receives the data from a previous one. Devices that do not need the data forward it. With one destination, a tree is a path over any
//! number of relays. [`ways`](super::ways) finds the cheapest trees under given resource prices, and [`flow`](super::flow) the best
//! division of the data among trees.

use crate::topology::{DeviceId, Machine, ResourceId, Route};
use ahash::{HashMap, HashMapExt};

/// Data that one device sends to one or several other devices. Devices are indices into [`Network::devices`].
#[derive(Clone, Debug)]
pub(super) struct Commodity {
    pub src: usize,
    pub to: Vec<usize>,
    pub bytes: f64,
}

/// List of copies (from, to) that distribute data. Each copy comes after the copy that brings the data to the device `from`. No device
/// receives the data twice.
pub(super) type Tree = Vec<(usize, usize)>;

/// Time for which one byte keeps each resource busy, as pairs of resource index and seconds, sorted by resource.
pub(super) type Draws = Vec<(u32, f64)>;

/// Direct copy between two devices, described by the use of resources by one byte.
struct Edge {
    /// Use of resources if neither device only stages the data in host memory.
    plain: Draws,
    /// Use of resources if one device is a host that only stages the data.
    passing: Draws,
}

/// Flow network: the devices of a machine, and the direct copies between them.
pub(super) struct Network {
    /// GPUs of the machine, followed by its hosts.
    pub devices: Vec<DeviceId>,
    gpus: usize,
    /// Direct copy between each pair of devices, at index `from * devices + to`; `None` if no copy engine copies directly.
    edges: Vec<Option<Edge>>,
    /// True for each device that may forward data that it does not need.
    pub(super) may_pass: Vec<bool>,
    pub(super) resources: usize,
}

impl Network {
    /// Creates the network of a machine. Data may pass through the devices for which `may_pass` is true. Copies of data that is staged in
    /// host memory use the capacity of resources as [`Resource::staged`](crate::topology::Resource::staged) states, not as direct copies
    /// do.
    pub fn new(machine: &Machine, may_pass: impl Fn(DeviceId) -> bool) -> Network {
        Network::drawing(machine, may_pass, false, |staged| staged)
    }

    /// Creates a network for lower bounds: each byte uses as little of each resource as any copy of it could, staged in host memory or not.
    /// Data may pass through all devices. If `is_staged` is true, data that begins or ends in host memory is staged there too, like data in
    /// pageable memory.
    pub fn of_least_draws(machine: &Machine, is_staged: bool) -> Network {
        Network::drawing(machine, |_| true, is_staged, |staged| staged.min(1.0))
    }

    fn drawing(machine: &Machine, may_pass: impl Fn(DeviceId) -> bool, is_staged: bool, staged: impl Fn(f64) -> f64) -> Network {
        let devices: Vec<DeviceId> = machine.devices().collect();
        let work = |route: &Route, passes: bool| {
            let seconds = |id: &ResourceId| {
                let resource = &machine.resources()[id.0 as usize];
                (id.0, if passes { staged(resource.draw(1.0)) } else { 1.0 } / resource.capacity)
            };
            route.resources.iter().map(seconds).collect()
        };
        let pairs = devices.iter().flat_map(|from| devices.iter().map(move |to| (*from, *to)));
        let edge = |(from, to): (DeviceId, DeviceId)| {
            let route = machine.route(from, to).filter(|_| from != to)?;
            Some(Edge { plain: work(route, is_staged && (from.is_host() || to.is_host())), passing: work(route, true) })
        };
        Network {
            edges: pairs.map(edge).collect(),
            may_pass: devices.iter().map(|device| may_pass(*device)).collect(),
            resources: machine.resources().len(),
            gpus: machine.gpu_count() as usize,
            devices,
        }
    }

    /// Creates a network of GPUs in which each of `pairs` is connected by a resource that one byte occupies for one second. If a pair is
    /// listed twice, the last entry is used.
    #[cfg(test)]
    pub fn of_edges(devices: usize, pairs: &[(usize, usize)]) -> Network {
        let mut edges: Vec<Option<Edge>> = (0..devices * devices).map(|_| None).collect();
        for (at, (from, to)) in (0..).zip(pairs).filter(|(_, (from, to))| from != to) {
            edges[from * devices + to] = Some(Edge { plain: vec![(at, 1.0)], passing: vec![(at, 1.0)] });
        }
        let gpus = (0..devices).map(|gpu| DeviceId::gpu(gpu as u32)).collect();
        Network { devices: gpus, gpus: devices, edges, may_pass: vec![true; devices], resources: pairs.len() }
    }

    /// Returns the index of a machine's device in [`Network::devices`]; `None` if the network does not contain it.
    pub fn number(&self, device: DeviceId) -> Option<usize> {
        let number = if device.is_host() { self.gpus + !device.0 as usize } else { device.0 as usize };
        (self.devices.get(number) == Some(&device)).then_some(number)
    }

    /// Returns the time for which one byte copied between two devices keeps each resource busy; empty if no copy engine copies between
    /// them. `is_passing` is true if the host memory at either end only stages the byte.
    pub fn draws(&self, from: usize, to: usize, is_passing: bool) -> &[(u32, f64)] {
        let edge = self.edges[from * self.devices.len() + to].as_ref();
        edge.map_or(&[], |edge| if is_passing { &edge.passing } else { &edge.plain })
    }

    /// Returns the cost of copying one byte between two devices: the sum of the times of [`Network::draws`] multiplied by the resources'
    /// prices.
    pub fn price(&self, from: usize, to: usize, is_passing: bool, prices: &[f64]) -> f64 {
        self.draws(from, to, is_passing).iter().map(|(resource, seconds)| seconds * prices[*resource as usize]).sum()
    }

    /// True if a copy engine copies directly from device `from` to device `to`.
    pub fn joins(&self, from: usize, to: usize) -> bool {
        self.edges[from * self.devices.len() + to].is_some()
    }

    /// Returns the time for which one byte of a commodity keeps each resource busy in the copy `(from, to)`.
    pub fn work_of(&self, flow: &Commodity, (from, to): (usize, usize)) -> &[(u32, f64)] {
        let passes = |device: usize| self.devices[device].is_host() && device != flow.src && !flow.to.contains(&device);
        self.draws(from, to, passes(from) || passes(to))
    }

    /// Returns the time for which one byte of a commodity keeps each resource busy, summed over all copies of a tree.
    pub fn work(&self, flow: &Commodity, tree: &Tree) -> Draws {
        let mut work: HashMap<u32, f64> = HashMap::new();
        for &(resource, seconds) in tree.iter().flat_map(|hop| self.work_of(flow, *hop)) {
            *work.entry(resource).or_default() += seconds;
        }
        let mut work: Draws = work.into_iter().collect();
        work.sort_unstable_by_key(|entry| entry.0);
        work
    }

    /// True if a commodity's data can reach device `to`.
    pub fn reaches(&self, flow: &Commodity, to: usize) -> bool {
        if self.joins(flow.src, to) {
            return true;
        }
        let mut is_reached = vec![false; self.devices.len()];
        is_reached[flow.src] = true;
        let mut left = vec![flow.src];
        while let Some(from) = left.pop() {
            for (next, is_known) in is_reached.iter_mut().enumerate() {
                // No copy engine copies between host memories.
                let is_between_hosts = self.devices[from].is_host() && self.devices[next].is_host();
                if !*is_known && !is_between_hosts && self.joins(from, next) {
                    *is_known = true;
                    if self.may_pass[next] || flow.to.contains(&next) {
                        left.push(next);
                    }
                }
            }
        }
        is_reached[to]
    }
}
