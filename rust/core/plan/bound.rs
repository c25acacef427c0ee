//! Computes a lower bound of the time of a batch, and the resources that limit it.
//!
//! The bound follows from capacities alone. It assumes that data may be divided arbitrarily and may pass through any number of relays, that
//! latencies and synchronisations cost nothing, and that equal sources ([`Shape::source`]) may be forwarded along any trees. The bound is
//! proved by prices (dual variables of a linear program). Let one second of each resource `r` have a price `y_r`. A schedule that moves the
//! batch in `T` seconds uses each resource for at most `T` seconds, so it costs at most `T · Σ y_r`. Each commodity costs at least its
//! bytes times the cost of its cheapest path. So:
//! ```text
//! T ≥ Σ_flows bytes · cheapest path(y) / Σ y_r     for any prices y ≥ 0
//! ```
//!
//! Prices of a single resource, and of the links of one device, are always tried. They give the exact bound if one port limits the batch.
//! The best prices are the dual solution of the linear program of the flow ([`flow`](super::flow)). The resources with a nonzero price in
//! the best solution are the cut that limits the batch.

use super::network::{Commodity, Draws, Network};
use super::planned::Plan;
use super::trees::load;
use crate::program::Shape;
use crate::topology::{DeviceId, LinkId, Machine, MemoryKind, ResourceId};
use crate::units::time;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Smallest fraction of the sum of all resource prices for which a resource is listed as a limit of the batch.
const LEAST_PART: f64 = 0.01;

/// Relative difference between a bound and the time of direct copies below which no better bound is computed.
const CLOSE: f64 = 1e-3;

/// Lower bound of the time of a batch, computed from the capacities of the machine's resources.
#[derive(Clone, Debug, PartialEq)]
pub struct TimeBound {
    /// Lower bound of the time in seconds; 0 if no data passes over a link.
    pub seconds: f64,
    /// Resources that limit the batch, each with its fraction of the sum of all resource prices (dual values) that prove the bound; the
    /// largest fraction comes first. In a plan that reaches the bound, these resources are busy all the time.
    pub limits: Vec<(ResourceId, f64)>,
}

impl TimeBound {
    /// Computes the lower bound of the time of a batch on a machine.
    pub fn new(machine: &Machine, batch: &[Shape]) -> TimeBound {
        // CPU threads move data of pageable memory through rings in host memory.
        let is_pageable = |shape: &Shape| [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable);
        let network = Network::of_least_draws(machine, batch.iter().any(is_pageable));
        let flows = flows(&network, batch);
        let mut best = Proof::simple(machine, &network, &flows);
        if best.seconds < direct(&network, &flows) * (1.0 - CLOSE) {
            let explored = network.explore(&flows, &vec![0.0; machine.resources().len()]);
            best.improve(Proof { seconds: explored.seconds, prices: (0..).zip(explored.prices).collect() });
        }
        best.into_bound()
    }
}

/// Prices (dual values) of resources, and the lower bound of the time that they prove.
pub(super) struct Proof {
    pub seconds: f64,
    prices: Vec<(u32, f64)>,
}

impl Proof {
    /// Returns the largest lower bound of the time that follows from the load of one resource, or of the links of one device.
    pub fn simple(machine: &Machine, network: &Network, flows: &[Commodity]) -> Proof {
        let mut best = Proof::single(network, flows);
        for device in machine.devices() {
            best.improve(Proof::port(machine, device, bytes_of(network, flows, device)));
        }
        best
    }

    /// Returns the lower bound that the busiest resource alone proves.
    fn single(network: &Network, flows: &[Commodity]) -> Proof {
        let busiest = (0..).zip(single(network, flows)).max_by(|a: &(u32, f64), b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
        let (resource, seconds) = busiest.unwrap_or((0, 0.0));
        Proof { seconds, prices: vec![(resource, 1.0)] }
    }

    /// Returns the lower bound that all links of a device in one direction prove. If all routes over a link use a resource with less
    /// capacity, this resource replaces the link. `bytes` holds the number of bytes that leave the device, and the number of bytes that it
    /// needs.
    fn port(machine: &Machine, device: DeviceId, bytes: [f64; 2]) -> Proof {
        let of = |leaves: bool, bytes: f64| {
            let others = machine.devices().filter(|other| *other != device);
            let routes = others.filter_map(|other| if leaves { machine.route(device, other) } else { machine.route(other, device) });
            // For each link, the resources that all routes over it use.
            let mut links: BTreeMap<LinkId, SmallVec<[ResourceId; 8]>> = BTreeMap::new();
            for route in routes {
                let Some(link) = (if leaves { route.links.first() } else { route.links.last() }) else { continue };
                let common = links.entry(*link).or_insert_with(|| route.resources.clone());
                common.retain(|resource| route.resources.contains(resource));
            }
            let mut prices: BTreeMap<u32, f64> = BTreeMap::new();
            for common in links.into_values() {
                let capacity = |id: &ResourceId| {
                    let resource = &machine.resources()[id.0 as usize];
                    resource.capacity / resource.draw(1.0).min(1.0)
                };
                let least = common.into_iter().map(|id| (id, capacity(&id))).min_by(|a, b| a.1.total_cmp(&b.1));
                if let Some((id, capacity)) = least {
                    let price = prices.entry(id.0).or_default();
                    *price = price.max(capacity);
                }
            }
            let all: f64 = prices.values().sum();
            Proof { seconds: if all > 0.0 { bytes / all } else { 0.0 }, prices: prices.into_iter().collect() }
        };
        let [leaving, wanted] = bytes;
        let mut best = of(true, leaving);
        best.improve(of(false, wanted));
        best
    }

    fn improve(&mut self, other: Proof) {
        if other.seconds > self.seconds {
            *self = other;
        }
    }

    fn into_bound(self) -> TimeBound {
        let Proof { seconds, prices } = self;
        if seconds <= 0.0 {
            return TimeBound { seconds: 0.0, limits: Vec::new() };
        }
        let all: f64 = prices.iter().map(|price| price.1).sum();
        let parts = || prices.iter().map(|(resource, price)| (ResourceId(*resource), price / all));
        // If hundreds of resources are equally busy, each has a small fraction of the prices, so the threshold is relative to the largest
        // fraction.
        let least = LEAST_PART.min(0.5 * parts().map(|part| part.1).fold(0.0, f64::max));
        let mut limits: Vec<(ResourceId, f64)> = parts().filter(|(_, part)| *part >= least).collect();
        limits.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        TimeBound { seconds, limits }
    }
}

/// Returns the number of bytes that a device sends to other devices, and the number of bytes that it needs from them.
fn bytes_of(network: &Network, flows: &[Commodity], device: DeviceId) -> [f64; 2] {
    let number = network.number(device);
    let of = |is: &dyn Fn(&Commodity, usize) -> bool| {
        flows.iter().filter(|flow| number.is_some_and(|number| is(flow, number))).map(|flow| flow.bytes).sum()
    };
    [of(&|flow, number| flow.src == number), of(&|flow, number| flow.to.contains(&number))]
}

/// Returns the minimum time for which each resource is busy, whichever paths the data takes, in seconds. Data that leaves a device uses the
/// resources that all copies out of the device use. Data that a device needs uses the resources that all copies into it use.
fn single(network: &Network, flows: &[Commodity]) -> Vec<f64> {
    let devices = network.devices.len();
    let always = |copies: &dyn Fn(usize) -> (usize, usize)| {
        let mut always: Option<Draws> = None;
        for (from, to) in (0..devices).map(copies).filter(|(from, to)| network.joins(*from, *to)) {
            let [plain, passing] = [false, true].map(|is_passing| network.draws(from, to, is_passing));
            let least = plain.iter().zip(passing).map(|(plain, passing)| (plain.0, plain.1.min(passing.1)));
            let of = |resource: u32| plain.binary_search_by_key(&resource, |draw| draw.0).ok().map(|at| plain[at].1.min(passing[at].1));
            always = Some(match always {
                None => least.collect(),
                Some(known) => known.into_iter().filter_map(|(resource, draw)| Some((resource, draw.min(of(resource)?)))).collect(),
            });
        }
        always.unwrap_or_default()
    };
    let out: Vec<Draws> = (0..devices).map(|device| always(&|to| (device, to))).collect();
    let into: Vec<Draws> = (0..devices).map(|device| always(&|from| (from, device))).collect();
    let mut loads = vec![0.0; network.resources];
    for flow in flows {
        // The first copy out of the source may also be the only copy into a destination, so their uses of a resource are not added.
        let mut own: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
        for (resource, draw) in flow.to.iter().flat_map(|to| &into[*to]) {
            let (sum, most) = own.entry(*resource).or_default();
            (*sum, *most) = (*sum + draw, most.max(*draw));
        }
        for (resource, draw) in &out[flow.src] {
            let (sum, most) = own.entry(*resource).or_default();
            *sum += (draw - *most).max(0.0);
        }
        own.into_iter().for_each(|(resource, (draw, _))| loads[resource as usize] += flow.bytes * draw);
    }
    loads
}

/// Returns the busy time of the busiest resource if all data is copied directly, in seconds. Returns infinity if a direct copy does not
/// exist or is not optimal.
fn direct(network: &Network, flows: &[Commodity]) -> f64 {
    let mut loads = vec![0.0; network.resources];
    for flow in flows {
        if flow.to.len() > 1 || !network.joins(flow.src, flow.to[0]) {
            return f64::INFINITY;
        }
        network.draws(flow.src, flow.to[0], false).iter().for_each(|(resource, draw)| loads[*resource as usize] += flow.bytes * draw);
    }
    loads.into_iter().fold(0.0, f64::max)
}

/// Returns the commodities of a batch: the data that passes over links. Transfers with the same source become one commodity with several
/// destinations.
fn flows(network: &Network, batch: &[Shape]) -> Vec<Commodity> {
    let mut sources: BTreeMap<(u32, usize, u64), Vec<usize>> = BTreeMap::new();
    let mut flows: BTreeMap<(usize, Vec<usize>), f64> = BTreeMap::new();
    for shape in batch.iter().filter(|shape| shape.bytes > 0 && shape.src_device != shape.dst_device) {
        let (Some(src), Some(dst)) = (network.number(shape.src_device), network.number(shape.dst_device)) else { continue };
        if shape.source == 0 {
            *flows.entry((src, vec![dst])).or_default() += shape.bytes as f64;
        } else {
            sources.entry((shape.source, src, shape.bytes)).or_default().push(dst);
        }
    }
    for ((_, src, bytes), mut to) in sources {
        to.sort_unstable();
        to.dedup();
        *flows.entry((src, to)).or_default() += bytes as f64;
    }
    let mut flows: Vec<Commodity> = flows.into_iter().map(|((src, to), bytes)| Commodity { src, to, bytes }).collect();
    for flow in &mut flows {
        let to = flow.to.iter().copied().filter(|to| network.reaches(flow, *to)).collect();
        flow.to = to;
    }
    flows.retain(|flow| !flow.to.is_empty());
    flows
}

impl Plan {
    /// Returns the lower bound of the time of the plan's batch.
    pub fn bound(&self, machine: &Machine) -> TimeBound {
        let batch: Vec<Shape> = self.transfers.iter().map(|transfer| transfer.shape).collect();
        TimeBound::new(machine, &batch)
    }

    /// Returns a sentence with the bound, the limiting resources, and the fraction of the bound that the plan reaches. Returns `None` if
    /// links hardly affect the time.
    pub(super) fn bound_in_words(&self, machine: &Machine) -> Option<String> {
        let bound = self.bound(machine);
        let name = |limit: &(ResourceId, f64)| machine.resources()[limit.0.0 as usize].name.clone();
        let names: Vec<String> = bound.limits.iter().take(4).map(name).collect();
        let more = match bound.limits.len().saturating_sub(4) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let reached = bound.seconds / self.predicted;
        // The bound is not meaningful for small transfers.
        (reached >= LEAST_PART).then(|| {
            let why = self.why_not_the_bound(machine, &bound).map(|why| format!(": {why}")).unwrap_or_default();
            format!(
                "lower bound of the time: {}, limited by {}{more}; the plan reaches {reached:.2} of that speed{why}",
                time(bound.seconds),
                names.join(", ")
            )
        })
    }

    /// Returns the reason why the plan takes longer than the bound divided by 0.9; `None` if it does not take longer.
    pub(super) fn why_not_the_bound(&self, machine: &Machine, bound: &TimeBound) -> Option<String> {
        if bound.seconds >= 0.9 * self.predicted {
            return None;
        }
        let batch: Vec<Shape> = self.transfers.iter().map(|transfer| transfer.shape).collect();
        let loads = load(machine, &self.program, &batch);
        let (busiest, seconds) = (0..).zip(&loads).max_by(|a: &(usize, _), b| a.1.total_cmp(b.1))?;
        Some(if self.threads.is_some() {
            "the copies of CPU threads between pageable and pinned memory take longer".into()
        } else if seconds / self.predicted < bound.seconds / seconds {
            "the rest is the start-up time of copies, the forwarding of chunks, and links that wait for each other".into()
        } else {
            let name = &machine.resources()[busiest].name;
            format!(
                "the paths of the plan keep {name} busy for {}, and more paths are excluded by options, or would cost more time than they \
                 save",
                time(*seconds)
            )
        })
    }
}
