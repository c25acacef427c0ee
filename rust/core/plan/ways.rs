//! Finds the cheapest paths and trees through a [`Network`] under given prices of resources.
//!
//! The price of a resource is a cost for each second of its use. The cost of a copy is the sum over the resources of the time of use
//! multiplied by the price. The cheapest paths between all devices are computed once for each set of prices (Floyd 1962). Data that begins
//! in host memory leaves it at the cost of a direct copy. Data that is only staged in host memory leaves it at the cost of a staged copy.
//! So a host that is a source has separate tables.
//!
//! A cheapest tree may branch in any device. For at most [`MOST_MEMBERS`] destinations, it is computed exactly (Dreyfus and Wagner 1971).
//! If there are more, each destination is connected to the tree by its cheapest path (Takahashi and Matsuyama 1980). Three lower bounds of
//! the cost of any tree are then known: the cost of the path to the farthest destination, the sum of the costs of the cheapest copy into
//! each destination, and, if it is affordable, the cost of the exact tree to the farthest destinations.

use super::network::{Commodity, Network, Tree};

/// Largest number of destinations for which the cheapest tree is computed exactly.
const MOST_MEMBERS: usize = 8;
/// Largest number of computation steps for the exact trees of all commodities under one set of prices. If more steps would be needed,
/// approximate trees are used.
const MOST_STEPS: usize = 1 << 21;

/// Cheapest paths between every two devices under one set of prices of resources, with their costs per byte.
pub(super) struct Ways<'n> {
    network: &'n Network,
    /// Cost of a direct copy between each pair of devices if the second device does not forward the data.
    last: Vec<f64>,
    /// Cheapest path from each device to each device that forwards the data: its cost, and its first device after the source.
    passing: Table,
    /// Cheapest path from each device to each device where the data stays: its cost, and its last device before the destination.
    ending: Table,
    /// Cost of the cheapest direct copy into each device.
    nearest: Vec<f64>,
    /// True for each device that may forward data that it does not need.
    may_pass: Vec<bool>,
}

/// Table of path costs, each with one device of the path, indexed by a pair of devices or by one device.
struct Table {
    price: Vec<f64>,
    device: Vec<u32>,
}

impl Table {
    fn new(price: Vec<f64>, device: impl Fn(usize) -> u32) -> Table {
        Table { device: (0..price.len()).map(device).collect(), price }
    }

    fn improve(&mut self, at: usize, price: f64, device: u32) {
        if price < self.price[at] {
            (self.price[at], self.device[at]) = (price, device);
        }
    }

    fn get(&self, at: usize) -> (f64, usize) {
        (self.price[at], self.device[at] as usize)
    }
}

/// Cheapest paths for the data of one source.
pub(super) struct WaysFrom<'w> {
    ways: &'w Ways<'w>,
    src: usize,
    /// Cheapest paths from a source in host memory: first to devices that forward the data, then to devices where it stays. Each entry
    /// holds the cost of a path and its last device before the destination. `None` if the source is a GPU.
    own: Option<(Table, Table)>,
}

impl<'n> Ways<'n> {
    /// Computes the cheapest paths under these resource prices. Data may also pass through the devices in `also`.
    pub fn new(network: &'n Network, prices: &[f64], also: &[usize]) -> Ways<'n> {
        let count = network.devices.len();
        let is_host: Vec<bool> = network.devices.iter().map(|device| device.is_host()).collect();
        let mut may_pass = network.may_pass.clone();
        also.iter().for_each(|device| may_pass[*device] = true);
        let price = |from: usize, to: usize, is_passing: bool| network.price(from, to, is_passing, prices);
        // No copy engine copies between host memories.
        let joined = |from: usize, to: usize| from != to && !(is_host[from] && is_host[to]) && network.joins(from, to);
        let all = || (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        let edge = |ends: bool| {
            let price = |(from, to): (usize, usize)| {
                if joined(from, to) { price(from, to, is_host[from] || (is_host[to] && !ends)) } else { f64::INFINITY }
            };
            all().map(price).collect::<Vec<f64>>()
        };
        let (first, last) = (edge(false), edge(true));
        let mut nearest = vec![f64::INFINITY; count];
        for (from, to) in all().filter(|(from, to)| from != to && network.joins(*from, *to)) {
            nearest[to] = nearest[to].min(price(from, to, false)).min(price(from, to, true));
        }
        let mut passing = Table::new(first, |at| (at % count) as u32);
        (0..count).for_each(|device| passing.price[device * count + device] = 0.0);
        passing.close(count, &may_pass);
        let mut ending = Table::new(passing.price.clone(), |at| (at / count) as u32);
        for (from, to) in all().filter(|(from, to)| from != to) {
            let at = from * count + to;
            if is_host[to] {
                ending.price[at] = f64::INFINITY;
                for by in (0..count).filter(|by| may_pass[*by] || *by == from) {
                    ending.improve(at, passing.price[from * count + by] + last[by * count + to], by as u32);
                }
            } else if ending.price[at].is_finite() {
                // The last copy into a GPU costs the same whether the data stays there or is forwarded.
                let mut before = from;
                while passing.device[before * count + to] as usize != to {
                    before = passing.device[before * count + to] as usize;
                }
                ending.device[at] = before as u32;
            }
        }
        // A tree branches only in devices that data may pass through.
        for (from, to) in all().filter(|(from, to)| from != to && !may_pass[*to]) {
            passing.price[from * count + to] = f64::INFINITY;
        }
        Ways { network, last, passing, ending, nearest, may_pass }
    }

    /// Returns the cheapest paths for data that begins in device `src`.
    pub fn from(&self, src: usize, prices: &[f64]) -> WaysFrom<'_> {
        let Ways { network, last, .. } = self;
        if !network.devices[src].is_host() {
            return WaysFrom { ways: self, src, own: None };
        }
        let count = network.devices.len();
        let is_host = |device: usize| network.devices[device].is_host();
        let direct = |to: usize| if network.joins(src, to) && to != src { network.price(src, to, false, prices) } else { f64::INFINITY };
        let first = (0..count).map(|to| if is_host(to) { f64::INFINITY } else { direct(to) }).collect();
        let mut to_pass = Table::new(first, |_| src as u32);
        // The nearest device comes first (Dijkstra 1959). No path passes through the source again, even if staged data leaves it at a lower
        // cost.
        let mut left: Vec<usize> = (0..count).filter(|device| *device != src && self.may_pass[*device]).collect();
        while let Some(at) = (0..left.len()).min_by(|a, b| to_pass.price[left[*a]].total_cmp(&to_pass.price[left[*b]])) {
            let by = left.swap_remove(at);
            let reached = to_pass.price[by];
            for &to in left.iter().filter(|to| reached.is_finite() && network.joins(by, **to) && !(is_host(by) && is_host(**to))) {
                to_pass.improve(to, reached + network.price(by, to, is_host(by) || is_host(to), prices), by as u32);
            }
        }
        to_pass.price[src] = 0.0;
        (0..count).filter(|to| *to != src && !self.may_pass[*to]).for_each(|to| to_pass.price[to] = f64::INFINITY);
        let mut to_end = Table::new((0..count).map(direct).collect(), |_| src as u32);
        to_end.price[src] = 0.0;
        for by in (0..count).filter(|by| *by != src && self.may_pass[*by]) {
            (0..count).for_each(|to| to_end.improve(to, to_pass.price[by] + last[by * count + to], by as u32));
        }
        WaysFrom { ways: self, src, own: Some((to_pass, to_end)) }
    }
}

impl Table {
    /// Extends the direct copies between every two devices to paths over any number of devices that data may pass through.
    fn close(&mut self, count: usize, may_pass: &[bool]) {
        for by in (0..count).filter(|by| may_pass[*by]) {
            let row: Vec<f64> = self.price[by * count..][..count].to_vec();
            for from in 0..count {
                let (first, after) = self.get(from * count + by);
                if from != by && first.is_finite() {
                    for (to, rest) in row.iter().enumerate() {
                        self.improve(from * count + to, first + rest, after as u32);
                    }
                }
            }
        }
    }
}

impl WaysFrom<'_> {
    fn end(&self, from: usize, to: usize) -> (f64, usize) {
        match &self.own {
            Some((_, ending)) if from == self.src => ending.get(to),
            _ => self.ways.ending.get(from * self.devices() + to),
        }
    }

    /// Returns the cost of the cheapest path from device `from` to device `to` if `to` forwards the data.
    fn pass(&self, from: usize, to: usize) -> f64 {
        match &self.own {
            Some((passing, _)) if from == self.src => passing.price[to],
            _ => self.ways.passing.price[from * self.devices() + to],
        }
    }

    fn devices(&self) -> usize {
        self.ways.network.devices.len()
    }

    fn way_passing(&self, mut from: usize, to: usize, steps: &mut Tree) {
        if let Some((passing, _)) = self.own.as_ref().filter(|_| from == self.src) {
            let before = |device: &usize| passing.device[*device] as usize;
            let first = steps.len();
            let way = std::iter::successors(Some(to), |device| Some(before(device))).take_while(|device| *device != from);
            steps.extend(way.map(|device| (before(&device), device)));
            steps[first..].reverse();
            return;
        }
        while from != to {
            let next = self.ways.passing.device[from * self.devices() + to] as usize;
            steps.push((from, next));
            from = next;
        }
    }

    fn way(&self, from: usize, to: usize, steps: &mut Tree) {
        if from != to {
            let last = self.end(from, to).1;
            self.way_passing(from, last, steps);
            steps.push((last, to));
        }
    }

    /// Appends the copies of a cheap tree for the commodity `flow` to `steps`. `flows` is the number of all commodities. Returns a lower
    /// bound of the cost of any tree for this commodity. It equals the cost of the appended tree if that is the cheapest.
    pub fn tree(&self, flow: &Commodity, flows: usize, steps: &mut Tree) -> f64 {
        let mut members = flow.to.clone();
        if members.len() == 1 {
            self.way(self.src, members[0], steps);
            return self.end(self.src, members[0]).0;
        }
        let count = self.devices();
        let steps_of_all = flows.saturating_mul(count * count) << members.len().min(MOST_MEMBERS);
        if steps_of_all <= MOST_STEPS && members.len() <= MOST_MEMBERS {
            return self.cheapest_tree(&members, steps);
        }
        // The farthest destinations come first, because the exact tree to the first of them gives the best bound.
        members.sort_by(|a, b| self.end(self.src, *b).0.total_cmp(&self.end(self.src, *a).0));
        let farthest = self.end(self.src, members[0]).0;
        let into_each: f64 = members.iter().map(|member| self.ways.nearest[*member]).sum();
        let members_exact = members.len().min(MOST_MEMBERS);
        let exact = if steps_of_all <= MOST_STEPS / 8 { self.cheapest_tree(&members[..members_exact], &mut Vec::new()) } else { 0.0 };
        self.join(members, steps);
        farthest.max(into_each).max(exact)
    }

    /// Appends the cheapest path from the tree to each destination, the nearest destination first.
    fn join(&self, mut members: Vec<usize>, steps: &mut Tree) {
        let mut nearest: Vec<(f64, usize)> = members.iter().map(|to| (self.end(self.src, *to).0, self.src)).collect();
        while let Some(at) = (0..members.len()).min_by(|a, b| nearest[*a].0.total_cmp(&nearest[*b].0)) {
            let (to, (_, from)) = (members.swap_remove(at), nearest.swap_remove(at));
            let first = steps.len();
            self.way(from, to, steps);
            for step in &steps[first..] {
                let reached = step.1;
                if let Some(passed) = members.iter().position(|member| *member == reached) {
                    members.swap_remove(passed);
                    nearest.swap_remove(passed);
                }
                for (to, nearest) in members.iter().zip(&mut nearest) {
                    let price = self.end(reached, *to).0;
                    if price < nearest.0 {
                        *nearest = (price, reached);
                    }
                }
            }
        }
    }

    /// Appends the copies of the cheapest tree to the devices `to`, and returns the cost of the tree. For each set of destinations and each
    /// device, it computes the cost of sending the data from that device to the whole set: the device sends the data to another device,
    /// where the set is divided in two.
    fn cheapest_tree(&self, to: &[usize], steps: &mut Tree) -> f64 {
        let (count, sets) = (self.devices(), 1 << to.len());
        // Cost, the device where the set is divided, and one of the two parts.
        let mut best: Vec<(f64, usize, usize)> = vec![(f64::INFINITY, 0, 0); sets * count];
        let mut split: Vec<(f64, usize)> = vec![(f64::INFINITY, 0); count];
        for set in 1..sets {
            if set & (set - 1) == 0 {
                let member = to[set.trailing_zeros() as usize];
                (0..count).for_each(|from| best[set * count + from] = (self.end(from, member).0, member, 0));
                continue;
            }
            split.fill((f64::INFINITY, 0));
            // The first part contains the lowest member of the set, so each division is tried once.
            let lowest = set & set.wrapping_neg();
            let rest = set ^ lowest;
            let mut other = rest;
            while other != 0 {
                let (a, b) = ((set ^ other) * count, other * count);
                for (at, split) in split.iter_mut().enumerate() {
                    let price = best[a + at].0 + best[b + at].0;
                    if price < split.0 {
                        *split = (price, set ^ other);
                    }
                }
                other = (other - 1) & rest;
            }
            for from in 0..count {
                for (at, (price, one)) in split.iter().enumerate() {
                    let price = self.pass(from, at) + price;
                    if price < best[set * count + from].0 {
                        best[set * count + from] = (price, at, *one);
                    }
                }
            }
        }
        let mut left = vec![(sets - 1, self.src)];
        while let Some((set, from)) = left.pop() {
            let (_, at, one) = best[set * count + from];
            if one == 0 {
                self.way(from, at, steps);
            } else {
                self.way_passing(from, at, steps);
                left.extend([(one, at), (set ^ one, at)]);
            }
        }
        best[(sets - 1) * count + self.src].0
    }
}
