//! Computes how the data of a batch moves through a network of devices in the shortest time, over any number of relays and along any
//! distribution trees.
//!
//! The useful trees are those that are the cheapest under some prices (dual values) of resources. Two phases find them. In the first phase,
//! prices rise with the load (Garg and Könemann 2007). In the second phase, if [`MOST_VARIABLES`] allows it, prices are the dual values of
//! the linear program over the known trees (Kelley 1960), until no cheaper tree is found. The same prices prove a lower bound of the
//! batch's time ([`bound`](super::bound)).

use super::network::{Commodity, Draws, Network, Tree};
use super::split::{Column, split};
use super::ways::Ways;
use ahash::HashMap;
use microlp::{ComparisonOp, OptimizationDirection, Problem, SolveOptions};

/// Number of iterations of the first phase of the search, in which resource prices rise.
const ROUNDS: u32 = 48;
/// Logarithm of the ratio between the price of the busiest resource and the price of an idle one, in the first phase of the search.
const STEEP: f64 = 12.0;
/// Largest number of times that the linear program is solved in the second phase.
const MOST_TURNS: usize = 24;
/// Relative distance between the best flow and the lower bound below which no further solution is computed.
const CLOSE: f64 = 2e-3;
/// Smallest price (dual value) of a resource in the linear program, relative to the largest price.
const LEAST_PRICE: f64 = 1e-9;
/// Largest sum of the numbers of resource prices and commodities of a linear program. The solution time grows with more than the square of
/// the sum.
const MOST_VARIABLES: usize = 400;
/// Largest number of nonzero entries of a linear program, which are pairs of a tree and a resource that it uses.
const MOST_DRAWS: usize = 1 << 16;

/// Result of a search for trees with [`Network::explore`].
pub(super) struct Explored {
    /// Distribution trees of each commodity that were the cheapest under some prices of resources.
    pub trees: Vec<Vec<Tree>>,
    /// Bytes assigned to each tree in the first phase of the search, by commodity and tree.
    bytes: Vec<Vec<f64>>,
    /// Lower bound in seconds of the time to move all commodities in addition to the existing load.
    pub seconds: f64,
    /// Prices (dual values) of resources that prove the bound `seconds`, by resource index.
    pub prices: Vec<f64>,
}

/// Best known flow of a batch's data through a network. Data may be divided arbitrarily. Only the use of capacity costs time; startup and
/// synchronisation are free.
#[allow(dead_code)]
pub(super) struct NetworkFlow {
    /// Trees of each commodity with the bytes on each, most bytes first. The bytes of a commodity's trees add up to the commodity's bytes.
    /// With one destination, a tree is a path over any number of relays, given by its copies in order.
    pub shares: Vec<Vec<(Tree, f64)>>,
    /// Time for which the flow and the existing load keep the busiest resource busy, seconds.
    pub seconds: f64,
    /// Lower bound in seconds of the time to move all commodities in addition to the existing load.
    pub bound: f64,
}

/// State of a search for the best trees of some commodities.
struct Search<'a> {
    network: &'a Network,
    flows: &'a [Commodity],
    /// Time in seconds for which the existing load (other transfers of the batch) keeps each resource busy.
    busy: &'a [f64],
    /// Index of each known tree in the list of trees of its commodity ([`Explored::trees`]), for each commodity.
    seen: Vec<HashMap<Tree, usize>>,
    /// Known trees: the commodity of each, and the time for which one byte keeps each resource busy.
    known: Vec<(usize, Draws)>,
    found: Explored,
}

impl Network {
    /// Returns the best flow of commodities that runs in addition to the existing load. Each commodity must be able to reach its
    /// destinations. `busy` is the time in seconds for which the existing load keeps each resource of the machine busy.
    ///
    /// The resulting `seconds` is at most 0.2 % above the minimum if the linear program is affordable, and some per cent above it on larger
    /// networks. The result may contain trees with few bytes, which the caller may drop.
    #[allow(dead_code)]
    pub fn flow(&self, flows: &[Commodity], busy: &[f64]) -> NetworkFlow {
        let mut explored = self.explore(flows, busy);
        let work = |explored: &Explored| -> Vec<Vec<Draws>> {
            let of = |(flow, trees): (&Commodity, &Vec<Tree>)| trees.iter().map(|tree| self.work(flow, tree)).collect();
            flows.iter().zip(&explored.trees).map(of).collect()
        };
        let work = work(&explored);
        let busiest = |bytes: &[Vec<f64>]| {
            let mut loads = busy.to_vec();
            for (draws, bytes) in work.iter().flatten().zip(bytes.iter().flatten()) {
                draws.iter().for_each(|(resource, seconds)| loads[*resource as usize] += seconds * bytes);
            }
            loads.into_iter().fold(0.0, f64::max)
        };
        let mut bytes = std::mem::take(&mut explored.bytes);
        let mut seconds = busiest(&bytes);
        if is_affordable(flows, &work, busy) {
            let solved = divided(flows, &explored.trees, &work, busy).filter(|solved| busiest(solved) < seconds);
            if let Some(solved) = solved {
                (seconds, bytes) = (busiest(&solved), solved);
            }
        }
        let shares = explored.trees.into_iter().zip(bytes).map(|(trees, bytes)| {
            let mut shares: Vec<(Tree, f64)> = trees.into_iter().zip(bytes).filter(|(_, bytes)| *bytes > 0.0).collect();
            shares.sort_by(|a, b| b.1.total_cmp(&a.1));
            shares
        });
        NetworkFlow { shares: shares.collect(), seconds, bound: explored.seconds }
    }

    /// Searches for trees of commodities that run in addition to the existing load. Each commodity must be able to reach its destinations.
    /// `busy` is the time in seconds for which the existing load keeps each resource busy.
    pub fn explore(&self, flows: &[Commodity], busy: &[f64]) -> Explored {
        let none = || vec![Vec::new(); flows.len()];
        let found = Explored { trees: none(), bytes: vec![Vec::new(); flows.len()], seconds: 0.0, prices: vec![0.0; self.resources] };
        let mut search =
            Search { network: self, flows, busy, seen: flows.iter().map(|_| HashMap::default()).collect(), known: Vec::new(), found };
        let loads = search.by_rising_prices();
        let is_used = |(load, busy): (&f64, &f64)| *load > 0.0 || *busy > 0.0;
        if flows.len() + loads.iter().zip(busy).filter(|of| is_used(*of)).count() <= MOST_VARIABLES {
            search.by_linear_program(largest(&loads) + largest(busy));
        }
        search.found
    }

    /// Returns a lower bound of the total cost of all commodities under these prices of resources, and a cheap tree of each commodity. The
    /// bound is exact if each tree is the cheapest.
    fn cheapest(&self, flows: &[Commodity], prices: &[f64]) -> (f64, Vec<Tree>) {
        let (mut cost, mut trees) = (0.0, Vec::with_capacity(flows.len()));
        let all_pass = self.may_pass.iter().all(|may| *may);
        let shared = Ways::new(self, prices, &[]);
        let mut last = None;
        for flow in flows {
            let mut steps = Vec::new();
            // Destinations forward the data that they receive, even if other data may not pass through them.
            cost += flow.bytes
                * if all_pass || flow.to.len() == 1 {
                    let ways = last.take().filter(|(src, _)| *src == flow.src).map(|(_, ways)| ways);
                    let ways = ways.unwrap_or_else(|| shared.from(flow.src, prices));
                    let price = ways.tree(flow, flows.len(), &mut steps);
                    last = Some((flow.src, ways));
                    price
                } else {
                    Ways::new(self, prices, &flow.to).from(flow.src, prices).tree(flow, flows.len(), &mut steps)
                };
            trees.push(tidy(self.devices.len(), flow, &steps));
        }
        (cost, trees)
    }
}

impl Search<'_> {
    /// Runs the first phase of the search, in which the prices of resources rise with their load. Returns the time for which the resulting
    /// flow keeps each resource busy, in seconds.
    fn by_rising_prices(&mut self) -> Vec<f64> {
        let Search { network, flows, busy, .. } = *self;
        let (mut loads, mut prices) = (vec![0.0; network.resources], vec![1.0; network.resources]);
        for round in 1..=ROUNDS {
            let (cost, trees) = network.cheapest(flows, &prices);
            self.prove(cost, &prices);
            for (at, tree) in trees.into_iter().enumerate() {
                let bytes = flows[at].bytes / f64::from(ROUNDS);
                let work = tree.iter().flat_map(|hop| network.work_of(&flows[at], *hop));
                work.for_each(|(resource, seconds)| loads[*resource as usize] += seconds * bytes);
                let place = self.learn(at, tree);
                self.found.bytes[at][place] += bytes;
            }
            // The existing load counts in proportion to the iterations done so far. Prices are relative to the load that the busiest
            // resource is expected to have at the end.
            let part = f64::from(round) / f64::from(ROUNDS);
            let all: Vec<f64> = loads.iter().zip(busy).map(|(load, busy)| load + busy * part).collect();
            let most = largest(&all);
            prices.iter_mut().zip(all).for_each(|(price, load)| *price = (STEEP * part * load / most).exp());
        }
        let (cost, _) = network.cheapest(flows, &prices);
        self.prove(cost, &prices);
        loads
    }

    /// Runs the second phase of the search, in which the prices of resources are dual values of a linear program. `scale` is the order of
    /// magnitude of the batch's time, in seconds.
    fn by_linear_program(&mut self, scale: f64) {
        for _ in 0..MOST_TURNS {
            if self.known.iter().map(|(_, work)| work.len()).sum::<usize>() > MOST_DRAWS {
                break;
            }
            let Some((reached, mut prices)) = self.solve(scale) else { break };
            // Every price is raised to a minimum, which is allowed because any prices prove a bound. Every cycle of copies then has a cost,
            // so no cheapest path contains a cycle.
            let least = LEAST_PRICE * largest(&prices);
            prices.iter_mut().for_each(|price| *price = price.max(least));
            let (cost, trees) = self.network.cheapest(self.flows, &prices);
            self.prove(cost, &prices);
            if self.found.seconds >= reached * (1.0 - CLOSE) {
                break;
            }
            trees.into_iter().enumerate().for_each(|(at, tree)| _ = self.learn(at, tree));
        }
    }

    /// Stores the prices if they prove a higher lower bound of the time than all earlier prices. The proof: a flow that moves the
    /// commodities in `T` seconds costs at most `T` times the sum of all prices.
    fn prove(&mut self, cost: f64, prices: &[f64]) {
        let fixed: f64 = self.busy.iter().zip(prices).map(|(seconds, price)| seconds * price).sum();
        let seconds = (cost + fixed) / prices.iter().sum::<f64>();
        if seconds > self.found.seconds {
            (self.found.seconds, self.found.prices) = (seconds, prices.to_vec());
        }
    }

    /// Adds a tree of a commodity if it is new. Returns the tree's index among the trees of the commodity.
    fn learn(&mut self, at: usize, tree: Tree) -> usize {
        let Search { network, flows, seen, known, found, .. } = self;
        if let Some(place) = seen[at].get(&tree) {
            return *place;
        }
        known.push((at, network.work(&flows[at], &tree)));
        seen[at].insert(tree.clone(), found.trees[at].len());
        found.trees[at].push(tree);
        found.bytes[at].push(0.0);
        found.trees[at].len() - 1
    }

    /// Solves the linear program over the known trees. Returns the minimum time in seconds of a flow along these trees, and the prices
    /// (dual values) of resources that prove this minimum. Returns `None` if the solver fails.
    fn solve(&self, scale: f64) -> Option<(f64, Vec<f64>)> {
        let Search { flows, busy, known, .. } = self;
        let mut problem = Problem::new(OptimizationDirection::Maximize);
        let mut is_used: Vec<bool> = busy.iter().map(|seconds| *seconds > 0.0).collect();
        known.iter().flat_map(|(_, work)| work).for_each(|(resource, _)| is_used[*resource as usize] = true);
        let prices: Vec<_> =
            is_used.iter().zip(*busy).map(|(used, seconds)| used.then(|| problem.add_var(seconds / scale, (0.0, 1.0)))).collect();
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
}

/// True if a linear program that divides the commodities among the known trees can be solved in reasonable time.
fn is_affordable(flows: &[Commodity], work: &[Vec<Draws>], busy: &[f64]) -> bool {
    let mut is_used: Vec<bool> = busy.iter().map(|seconds| *seconds > 0.0).collect();
    work.iter().flatten().flatten().for_each(|(resource, _)| is_used[*resource as usize] = true);
    let draws: usize = work.iter().flatten().map(Vec::len).sum();
    flows.len() + is_used.iter().filter(|used| **used).count() <= MOST_VARIABLES && draws <= MOST_DRAWS
}

/// Returns the bytes of each tree, by commodity, with which the busiest resource finishes as early as the known trees allow. Returns `None`
/// if the solver fails.
fn divided(flows: &[Commodity], trees: &[Vec<Tree>], work: &[Vec<Draws>], busy: &[f64]) -> Option<Vec<Vec<f64>>> {
    let column = |transfer: usize, copies: usize, work: Draws| {
        let slowest = work.iter().map(|work| work.1).fold(0.0, f64::max);
        // Among equally good trees, the one with fewer copies is preferred.
        let link_time = work.iter().map(|work| work.1).sum::<f64>() * (1.0 + copies as f64);
        Column { transfer: transfer as u32, fixed: 0.0, line: (0.0, slowest), work: work.into(), link_time }
    };
    let own = trees.iter().zip(work).enumerate();
    let own = own.flat_map(|(at, (trees, work))| trees.iter().zip(work).map(move |(tree, work)| column(at, tree.len(), work.clone())));
    let scale = flows.first()?.bytes;
    let rest = (0..).zip(busy).filter(|(_, seconds)| **seconds > 0.0).map(|(resource, seconds)| (resource, seconds / scale));
    let columns: Vec<Column> = own.chain([column(flows.len(), 0, rest.collect())]).collect();
    let demands: Vec<f64> = flows.iter().map(|flow| flow.bytes).chain([scale]).collect();
    let mut bytes = split(&columns, &demands, busy.len()).ok()?.into_iter();
    trees.iter().map(|trees| trees.iter().map(|_| bytes.next()).collect()).collect()
}

fn largest(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(f64::MIN_POSITIVE, f64::max)
}

/// Returns the copies `steps` as a tree of a network with this number of devices. If two paths meet in a device, only one of them is kept.
fn tidy(devices: usize, flow: &Commodity, steps: &[(usize, usize)]) -> Tree {
    let mut is_reached = vec![false; devices];
    is_reached[flow.src] = true;
    // Each copy comes after a copy that reaches the device where it begins.
    let is_new = |(from, to): &&(usize, usize)| is_reached[*from] && !std::mem::replace(&mut is_reached[*to], true);
    let mut tree: Tree = steps.iter().filter(is_new).copied().collect();
    let mut copies = vec![0; devices];
    tree.iter().for_each(|(from, _)| copies[*from] += 1);
    for at in (0..tree.len()).rev() {
        let (from, to) = tree[at];
        if copies[to] == 0 && !flow.to.contains(&to) {
            copies[from] -= 1;
            tree.remove(at);
        }
    }
    tree
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a network in which any pair of devices may be connected by an edge with its own resource, and the prices of these resources.
    fn network(devices: usize, edges: &[(usize, usize, u32)]) -> (Network, Vec<f64>) {
        let pairs: Vec<(usize, usize)> = edges.iter().map(|(from, to, _)| (*from, *to)).collect();
        (Network::of_edges(devices, &pairs), edges.iter().map(|edge| f64::from(edge.2)).collect())
    }

    /// Returns the smallest total price of edges that connect device 0 to the devices `to`, found by trying all sets of edges.
    fn by_trying(network: &Network, prices: &[f64], to: &[usize]) -> f64 {
        let count = network.devices.len();
        let pairs = (0..count * count).map(|at| (at / count, at % count)).filter(|(from, to)| network.joins(*from, *to));
        let edges: Vec<(usize, usize, usize)> = pairs.map(|(from, to)| (from, to, network.draws(from, to, false)[0].0 as usize)).collect();
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

    #[test]
    fn bytes_flow_over_two_relays_where_that_helps() {
        // The network has a direct copy, and a path over two relays.
        let (network, _) = network(4, &[(0, 3, 0), (0, 1, 0), (1, 2, 0), (2, 3, 0)]);
        let flow = network.flow(&[Commodity { src: 0, to: vec![3], bytes: 2.0 }], &[0.0; 4]);
        assert!((flow.seconds - 1.0).abs() < 1e-6 && (flow.bound - 1.0).abs() < 2e-3, "{} {}", flow.seconds, flow.bound);
        let mut paths: Vec<&Tree> = flow.shares[0].iter().map(|share| &share.0).collect();
        paths.sort();
        assert_eq!(paths, [&vec![(0, 1), (1, 2), (2, 3)], &vec![(0, 3)]]);
        // The existing load already keeps a relay's link busy for the whole time.
        let busy = network.flow(&[Commodity { src: 0, to: vec![3], bytes: 2.0 }], &[0.0, 0.0, 2.0, 0.0]);
        assert!((busy.seconds - 2.0).abs() < 1e-6 && busy.shares[0][0].0 == [(0, 3)] && busy.shares[0][0].1 > 1.999, "{:?}", busy.shares);
    }

    proptest! {
        // Failing cases are printed; nothing is written into the source tree.
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
                // The cost of the tree equals that price, and the tree reaches each device once.
                let work = network.work(&flow(&to), &trees[0]);
                prop_assert_eq!(work.iter().map(|(edge, _)| prices[*edge as usize]).sum::<f64>(), least);
                for (at, (from, to)) in trees[0].iter().enumerate() {
                    prop_assert!(*from == 0 || trees[0][..at].iter().any(|hop| hop.1 == *from));
                    prop_assert!(*to != 0 && trees[0][..at].iter().all(|hop| hop.1 != *to));
                }
                prop_assert!(to.iter().all(|to| trees[0].iter().any(|hop| hop.1 == *to)));
            }
        }

        #[test]
        fn all_bytes_flow_and_no_flow_is_faster(
            devices in 2..6_usize,
            edges in prop::collection::vec((0..6_usize, 0..6_usize, 0..20_u32), 1..16),
            flows in prop::collection::vec((0..6_usize, 0..6_usize, 1..20_u32), 1..5),
        ) {
            let edges: Vec<_> = edges.into_iter().map(|(from, to, price)| (from % devices, to % devices, price)).collect();
            let (network, prices) = network(devices, &edges);
            let flow = |(src, to, bytes)| Commodity { src: src % devices, to: vec![to % devices], bytes: f64::from(bytes) };
            let flows: Vec<Commodity> = flows.into_iter().map(flow).filter(|flow| flow.src != flow.to[0] && network.reaches(flow, flow.to[0])).collect();
            let found = network.flow(&flows, &vec![0.0; prices.len()]);
            let mut loads = vec![0.0; prices.len()];
            for (flow, shares) in flows.iter().zip(&found.shares) {
                prop_assert!((shares.iter().map(|share| share.1).sum::<f64>() / flow.bytes - 1.0).abs() < 1e-6);
                for (path, bytes) in shares {
                    prop_assert!(path[0].0 == flow.src && path[path.len() - 1].1 == flow.to[0] && path.windows(2).all(|hops| hops[0].1 == hops[1].0));
                    network.work(flow, path).iter().for_each(|(edge, work)| loads[*edge as usize] += work * bytes);
                }
            }
            prop_assert!((loads.into_iter().fold(0.0, f64::max) - found.seconds).abs() <= 1e-9 * found.seconds);
            prop_assert!(found.bound <= found.seconds * (1.0 + 1e-9) && found.seconds <= found.bound * 1.005, "{} {}", found.bound, found.seconds);
        }
    }
}
