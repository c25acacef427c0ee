//! The devices of a machine as a network for the bytes of a batch, and the ways through it that are cheapest under prices.
//!
//! A [`Commodity`] is bytes that one device has and one or several want. A [`Tree`] brings them: each device on it has them from the one before, and devices
//! that do not want them pass them on. Which trees are worth knowing is found by prices of resources, in two phases: prices that rise with the load
//! (Garg and Könemann 2007), and then those of the linear program over the trees that are known (Kelley 1960), until no cheaper tree comes. The same
//! prices prove how soon the batch can be done at best ([`bound`](super::bound)).
//!
//! The cheapest tree may branch in any device. To as many as eight devices it is found exactly (Dreyfus and Wagner 1971); to more, each is joined to
//! the tree by its cheapest way (Takahashi and Matsuyama 1980), and what a tree to eight of them costs is the bound.

use crate::topology::{DeviceId, Machine, ResourceId, Route};
use ahash::{HashMap, HashMapExt, HashSet};
use microlp::{ComparisonOp, OptimizationDirection, Problem, SolveOptions};

/// Rounds of prices that rise with the load.
const ROUNDS: u32 = 48;
/// Turns of the linear program, and the part of the bound below which another does not pay.
const MOST_TURNS: usize = 24;
const CLOSE: f64 = 2e-3;
/// Destinations to which the cheapest tree is sought exactly.
const MOST_MEMBERS: usize = 8;

/// Bytes that go from one device to one or several others, a flow; devices are numbers of the network.
#[derive(Clone, Debug)]
pub(super) struct Commodity {
    pub src: usize,
    pub to: Vec<usize>,
    pub bytes: f64,
}

/// Copies between two devices, each after the one that brings its bytes. No device is reached twice.
pub(super) type Tree = Vec<(usize, usize)>;

/// Seconds per byte on resources, sorted by resource.
pub(super) type Draws = Vec<(u32, f64)>;

/// What a byte draws on: copied, and copied where it comes from or stays in a host memory that it only passes.
struct Edge {
    plain: Draws,
    passing: Draws,
}

/// Where bytes may flow.
pub(super) struct Network {
    /// GPUs, then hosts.
    pub devices: Vec<DeviceId>,
    /// `edges[from * devices + to]`
    edges: Vec<Option<Edge>>,
    /// Whether bytes may pass a device that does not want them.
    may_pass: Vec<bool>,
    resources: usize,
}

/// What looking for trees has found.
pub(super) struct Explored {
    /// Of each flow those that were the cheapest under some prices.
    pub trees: Vec<Vec<Tree>>,
    /// The least time of all flows beside what is there already, seconds.
    pub seconds: f64,
    /// Prices that prove it, by resource.
    pub prices: Vec<f64>,
}

/// Of one flow under some prices: between every two devices the least price of a way.
struct Distances {
    devices: usize,
    /// To devices that bytes pass: the price, and the first device of the way.
    passing: Vec<(f64, usize)>,
    /// To where they stay: the price, and the device before it.
    ending: Vec<(f64, usize)>,
}

impl Network {
    /// The devices of a machine, of which bytes may pass those.
    pub fn new(machine: &Machine, may_pass: impl Fn(DeviceId) -> bool) -> Network {
        let devices: Vec<DeviceId> = machine.devices().collect();
        let work = |route: &Route, staged: f64| {
            let seconds = |id: &ResourceId| {
                let resource = &machine.resources()[id.0 as usize];
                (id.0, resource.draw(staged) / resource.capacity)
            };
            route.resources.iter().map(seconds).collect()
        };
        let pairs = devices.iter().flat_map(|from| devices.iter().map(move |to| (*from, *to)));
        let edge = |(from, to): (DeviceId, DeviceId)| {
            let route = machine.route(from, to).filter(|_| from != to)?;
            Some(Edge { plain: work(route, 0.0), passing: work(route, 1.0) })
        };
        Network {
            edges: pairs.map(edge).collect(),
            may_pass: devices.iter().map(|device| may_pass(*device)).collect(),
            resources: machine.resources().len(),
            devices,
        }
    }

    /// The number of a device of the machine.
    pub fn number(&self, device: DeviceId) -> Option<usize> {
        self.devices.iter().position(|known| *known == device)
    }

    fn edge(&self, from: usize, to: usize, is_passing: bool) -> &[(u32, f64)] {
        let edge = self.edges[from * self.devices.len() + to].as_ref();
        edge.map_or(&[], |edge| if is_passing { &edge.passing } else { &edge.plain })
    }

    /// Whether one can copy to the other.
    pub fn joins(&self, from: usize, to: usize) -> bool {
        self.edges[from * self.devices.len() + to].is_some()
    }

    /// Seconds per byte of one copy of a flow.
    pub fn work_of(&self, flow: &Commodity, (from, to): (usize, usize)) -> &[(u32, f64)] {
        let passes = |device: usize| self.devices[device].is_host() && device != flow.src && !flow.to.contains(&device);
        self.edge(from, to, passes(from) || passes(to))
    }

    /// Of all copies of a tree.
    pub fn work(&self, flow: &Commodity, tree: &Tree) -> Draws {
        let mut work: HashMap<u32, f64> = HashMap::new();
        for &(resource, seconds) in tree.iter().flat_map(|hop| self.work_of(flow, *hop)) {
            *work.entry(resource).or_default() += seconds;
        }
        let mut work: Draws = work.into_iter().collect();
        work.sort_unstable_by_key(|entry| entry.0);
        work
    }

    /// Looks for trees of flows, each of which can reach its devices, beside what keeps resources busy already (seconds of each).
    pub fn explore(&self, flows: &[Commodity], busy: &[f64]) -> Explored {
        let mut found = Explored { trees: vec![Vec::new(); flows.len()], seconds: 0.0, prices: Vec::new() };
        let mut seen: Vec<HashSet<Tree>> = vec![HashSet::default(); flows.len()];
        let mut known: Vec<(usize, Draws)> = Vec::new();
        let mut learn = |trees: Vec<Tree>, found: &mut Explored, known: &mut Vec<(usize, Draws)>| {
            for (at, tree) in trees.into_iter().enumerate() {
                if seen[at].insert(tree.clone()) {
                    known.push((at, self.work(&flows[at], &tree)));
                    found.trees[at].push(tree);
                }
            }
        };
        let largest = |loads: &[f64]| loads.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let (mut loads, mut prices) = (vec![0.0; self.resources], vec![1.0; self.resources]);
        for round in 1..=ROUNDS {
            let (_, trees) = self.cheapest(flows, &prices);
            for (flow, tree) in flows.iter().zip(&trees) {
                let work = tree.iter().flat_map(|hop| self.work_of(flow, *hop));
                work.for_each(|(resource, seconds)| loads[*resource as usize] += seconds * flow.bytes / f64::from(ROUNDS));
            }
            learn(trees, &mut found, &mut known);
            // What is busy already is so in every round. Relative to the busiest there will be at the end, as it now seems.
            let part = f64::from(round) / f64::from(ROUNDS);
            let all: Vec<f64> = loads.iter().zip(busy).map(|(load, busy)| load + busy * part).collect();
            let most = largest(&all) / part;
            prices.iter_mut().zip(all).for_each(|(price, load)| *price = (12.0 * load / most).exp());
        }
        let scale = largest(&loads) + largest(busy);
        for _ in 0..MOST_TURNS {
            let Some((reached, prices)) = self.program(flows, &known, busy, scale) else { break };
            let (cost, trees) = self.cheapest(flows, &prices);
            let fixed: f64 = busy.iter().zip(&prices).map(|(seconds, price)| seconds * price).sum();
            let seconds = (cost + fixed) / prices.iter().sum::<f64>();
            if seconds > found.seconds {
                (found.seconds, found.prices) = (seconds, prices);
            }
            if found.seconds >= reached * (1.0 - CLOSE) {
                break;
            }
            learn(trees, &mut found, &mut known);
        }
        found
    }

    /// Prices under which the known trees together cost most, and how much: who keeps to these trees is no sooner done. `scale` is the order of it.
    fn program(&self, flows: &[Commodity], known: &[(usize, Draws)], busy: &[f64], scale: f64) -> Option<(f64, Vec<f64>)> {
        let mut problem = Problem::new(OptimizationDirection::Maximize);
        let mut is_used: Vec<bool> = busy.iter().map(|seconds| *seconds > 0.0).collect();
        known.iter().flat_map(|(_, work)| work).for_each(|(resource, _)| is_used[*resource as usize] = true);
        let prices: Vec<_> =
            is_used.iter().zip(busy).map(|(used, seconds)| used.then(|| problem.add_var(seconds / scale, (0.0, 1.0)))).collect();
        let costs: Vec<_> = flows.iter().map(|_| problem.add_var(1.0, (0.0, f64::INFINITY))).collect();
        for (at, work) in known {
            let price = |(resource, seconds): &(u32, f64)| Some((prices[*resource as usize]?, -seconds * flows[*at].bytes / scale));
            let row: Vec<_> = work.iter().filter_map(price).chain([(costs[*at], 1.0)]).collect();
            problem.add_constraint(row, ComparisonOp::Le, 0.0);
        }
        let all: Vec<_> = prices.iter().flatten().map(|price| (*price, 1.0)).collect();
        problem.add_constraint(all, ComparisonOp::Le, 1.0);
        let mut options = SolveOptions::default();
        options.presolve = false;
        let solution = problem.solve_with(options).ok()?.into_solution().ok()?;
        let found = prices.into_iter().map(|price| price.map_or(0.0, |price| solution.var_value(price).max(0.0))).collect();
        (solution.objective() > 0.0).then(|| (solution.objective() * scale, found))
    }

    /// The cheapest tree of each flow, and no more than what all cost together.
    fn cheapest(&self, flows: &[Commodity], prices: &[f64]) -> (f64, Vec<Tree>) {
        let (mut cost, mut trees) = (0.0, Vec::with_capacity(flows.len()));
        // Where all devices may be passed, what is not in host memory has the same distances.
        let mut shared: Option<Distances> = None;
        let all_pass = self.may_pass.iter().all(|may| *may);
        for flow in flows {
            let is_own = !all_pass || self.devices[flow.src].is_host();
            let own = is_own.then(|| self.distances(flow, prices));
            let distances = match &own {
                Some(own) => own,
                None => shared.get_or_insert_with(|| self.distances(flow, prices)),
            };
            let mut steps = Vec::new();
            cost += flow.bytes * distances.steps(flow, &mut steps);
            trees.push(tidy(flow, &steps));
        }
        (cost, trees)
    }

    fn distances(&self, flow: &Commodity, prices: &[f64]) -> Distances {
        let count = self.devices.len();
        let is_host = |device: usize| self.devices[device].is_host();
        let edge = |from: usize, to: usize, ends: bool| {
            // No copy engine copies between host memories: what begins in one and is wanted in another is moved by itself.
            let is_between_hosts = is_host(from) && is_host(to) && !(from == flow.src && ends);
            if !self.joins(from, to) || is_between_hosts {
                return f64::INFINITY;
            }
            let is_passing = (is_host(from) && from != flow.src) || (is_host(to) && !ends);
            self.edge(from, to, is_passing).iter().map(|(resource, seconds)| seconds * prices[*resource as usize]).sum()
        };
        let all = || (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        let mut passing: Vec<(f64, usize)> = all().map(|(from, to)| (if from == to { 0.0 } else { edge(from, to, false) }, to)).collect();
        let may_pass = |device: usize| self.may_pass[device] || device == flow.src || flow.to.contains(&device);
        for (by, from) in all().filter(|(by, _)| may_pass(*by)) {
            let (first, after) = passing[from * count + by];
            if first.is_finite() {
                for to in 0..count {
                    let through = first + passing[by * count + to].0;
                    if through < passing[from * count + to].0 {
                        passing[from * count + to] = (through, after);
                    }
                }
            }
        }
        let last: Vec<f64> = all().map(|(from, to)| edge(from, to, true)).collect();
        let end = |(from, to): (usize, usize)| {
            if from == to {
                return (0.0, from);
            }
            let by = (0..count).filter(|by| may_pass(*by) || *by == from);
            let by = by.map(|by| (passing[from * count + by].0 + last[by * count + to], by));
            by.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::INFINITY, from))
        };
        let ending = all().map(end).collect();
        // Bytes branch only where they may pass.
        for (from, to) in all().filter(|(from, to)| from != to && !may_pass(*to)) {
            passing[from * count + to].0 = f64::INFINITY;
        }
        Distances { devices: count, passing, ending }
    }

    /// Whether a flow's bytes can be brought to a device.
    pub fn reaches(&self, flow: &Commodity, to: usize) -> bool {
        self.distances(flow, &vec![1.0; self.resources]).end(flow.src, to).0.is_finite()
    }
}

/// The same copies as a tree: where the ways to two devices meet, one of them goes on.
fn tidy(flow: &Commodity, steps: &[(usize, usize)]) -> Tree {
    let mut tree: Tree = Vec::with_capacity(steps.len());
    loop {
        let is_reached = |tree: &Tree, device| device == flow.src || tree.iter().any(|hop| hop.1 == device);
        let Some(next) = steps.iter().find(|(from, to)| is_reached(&tree, *from) && !is_reached(&tree, *to)) else { break };
        tree.push(*next);
    }
    for at in (0..tree.len()).rev() {
        let (_, to) = tree[at];
        if !flow.to.contains(&to) && tree[at..].iter().all(|hop| hop.0 != to) {
            tree.remove(at);
        }
    }
    tree
}

impl Distances {
    fn end(&self, from: usize, to: usize) -> (f64, usize) {
        self.ending[from * self.devices + to]
    }

    fn passing(&self, from: usize, to: usize) -> f64 {
        self.passing[from * self.devices + to].0
    }

    fn way_passing(&self, mut from: usize, to: usize, steps: &mut Tree) {
        while from != to {
            let next = self.passing[from * self.devices + to].1;
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

    /// The copies of a cheapest tree of a flow, and no more than its price.
    fn steps(&self, flow: &Commodity, steps: &mut Tree) -> f64 {
        let mut members = flow.to.clone();
        if members.len() == 1 {
            self.way(flow.src, members[0], steps);
            return self.end(flow.src, members[0]).0;
        }
        if members.len() <= MOST_MEMBERS {
            return self.tree(flow.src, &members, steps);
        }
        // The farthest say most.
        members.sort_by(|a, b| self.end(flow.src, *b).0.total_cmp(&self.end(flow.src, *a).0));
        let least = self.tree(flow.src, &members[..MOST_MEMBERS], &mut Vec::new());
        let mut reached = vec![flow.src];
        while !members.is_empty() {
            let ways = reached.iter().flat_map(|from| members.iter().map(move |to| (*from, *to)));
            let Some((from, to)) = ways.min_by(|a, b| self.end(a.0, a.1).0.total_cmp(&self.end(b.0, b.1).0)) else { break };
            let first = steps.len();
            self.way(from, to, steps);
            reached.extend(steps[first..].iter().map(|step| step.1));
            members.retain(|member| !reached.contains(member));
        }
        least
    }

    /// The cheapest tree from a device to several others: its price, and its copies. Of each set of them and each device, the price of bringing the
    /// bytes from there to all of the set: the device hands the set on to another, where it falls into two.
    fn tree(&self, src: usize, to: &[usize], steps: &mut Tree) -> f64 {
        let (count, sets) = (self.devices, 1 << to.len());
        // Price, where the set falls into two, and one of these.
        let mut best: Vec<(f64, usize, usize)> = vec![(f64::INFINITY, 0, 0); sets * count];
        let mut split: Vec<(f64, usize)> = vec![(f64::INFINITY, 0); count];
        for set in 1..sets {
            if set & (set - 1) == 0 {
                let member = to[set.trailing_zeros() as usize];
                (0..count).for_each(|from| best[set * count + from] = (self.end(from, member).0, member, 0));
                continue;
            }
            split.fill((f64::INFINITY, 0));
            // Each division once: the lowest of the set is in the first.
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
                    let price = self.passing(from, at) + price;
                    if price < best[set * count + from].0 {
                        best[set * count + from] = (price, at, *one);
                    }
                }
            }
        }
        let mut left = vec![(sets - 1, src)];
        while let Some((set, from)) = left.pop() {
            let (_, at, one) = best[set * count + from];
            if one == 0 {
                self.way(from, at, steps);
            } else {
                self.way_passing(from, at, steps);
                left.extend([(one, at), (set ^ one, at)]);
            }
        }
        best[(sets - 1) * count + src].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Devices of which each pair may be joined by an edge with a resource of its own.
    fn network(devices: usize, edges: &[(usize, usize, u32)]) -> (Network, Vec<f64>) {
        let mut network = Network {
            devices: (0..devices).map(|gpu| DeviceId::gpu(gpu as u32)).collect(),
            edges: (0..devices * devices).map(|_| None).collect(),
            may_pass: vec![true; devices],
            resources: edges.len(),
        };
        for (at, (from, to, _)) in (0..).zip(edges) {
            if from != to {
                network.edges[from * devices + to] = Some(Edge { plain: vec![(at, 1.0)], passing: vec![(at, 1.0)] });
            }
        }
        (network, edges.iter().map(|edge| f64::from(edge.2)).collect())
    }

    /// The least price of all sets of edges that lead from device 0 to some others, by trying them.
    fn by_trying(network: &Network, prices: &[f64], to: &[usize]) -> f64 {
        let count = network.devices.len();
        let edges: Vec<(usize, usize, usize)> =
            (0..count * count).filter_map(|at| Some((at / count, at % count, network.edges[at].as_ref()?.plain[0].0 as usize))).collect();
        let mut least = f64::INFINITY;
        for set in 0_u32..1 << edges.len() {
            let chosen = || (0..).zip(&edges).filter(|(at, _)| set >> at & 1 == 1).map(|(_, edge)| edge);
            let mut reached = vec![0];
            while let Some((_, to, _)) = chosen().find(|(from, to, _)| reached.contains(from) && !reached.contains(to)) {
                reached.push(*to);
            }
            if to.iter().all(|to| reached.contains(to)) {
                least = least.min(chosen().map(|edge| prices[edge.2]).sum());
            }
        }
        least
    }

    proptest! {
        // A failing case is printed; nothing is written into the source tree.
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_cheapest_tree_is_found(
            devices in 2..6_usize,
            edges in prop::collection::vec((0..6_usize, 0..6_usize, 0..20_u32), 0..12),
            wanted in 1..32_usize,
        ) {
            let edges: Vec<_> = edges.into_iter().map(|(from, to, price)| (from % devices, to % devices, price)).collect();
            let (network, prices) = network(devices, &edges);
            let flow = |to: &[usize]| Commodity { src: 0, to: to.to_vec(), bytes: 1.0 };
            let to: Vec<usize> = (1..devices).filter(|device| wanted >> device & 1 == 1).collect();
            let can_reach = to.iter().all(|to| network.reaches(&flow(&[*to]), *to));
            if !to.is_empty() && can_reach {
                let (cost, trees) = network.cheapest(&[flow(&to)], &prices);
                let least = by_trying(&network, &prices, &to);
                prop_assert_eq!(cost, least);
                // The tree costs that, and reaches each device once.
                let work = network.work(&flow(&to), &trees[0]);
                prop_assert_eq!(work.iter().map(|(edge, _)| prices[*edge as usize]).sum::<f64>(), least);
                for (at, (from, to)) in trees[0].iter().enumerate() {
                    prop_assert!(*from == 0 || trees[0][..at].iter().any(|hop| hop.1 == *from));
                    prop_assert!(*to != 0 && trees[0][..at].iter().all(|hop| hop.1 != *to));
                }
                prop_assert!(to.iter().all(|to| trees[0].iter().any(|hop| hop.1 == *to)));
            }
        }
    }
}
