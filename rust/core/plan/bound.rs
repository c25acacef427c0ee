//! How soon a batch could be done at best, and what limits it.
//!
//! The bound is that of capacities alone: bytes flow in any number of streams over any number of relays, nothing costs time but the bytes, and equal
//! sources ([`Shape::source`]) are passed on along any trees. It is proved by prices. Where a second of each resource `r` has a price `y_r`, what
//! moves a batch in `T` seconds has at most `T · Σ y_r` to spend, and each of its flows costs at least its bytes on the cheapest way there is:
//!
//! ```text
//! T ≥ Σ_flows bytes · cheapest way(y) / Σ y_r     for any prices y ≥ 0
//! ```
//!
//! The best prices are the dual of the linear program of the flow. They are found by the program of the ways that are known so far, and ways that are
//! cheaper under its prices, in turns (Kelley 1960); the first ways come from prices that rise with the load, as in [`trees`](super::trees). The
//! resources that have a price in the end are the cut that limits the batch: together they are busy from beginning to end.
//!
//! The cheapest tree may branch in any device. It is found exactly (Dreyfus and Wagner 1971) to as many as eight destinations; of more, a tree to
//! eight of them is the bound, which is then low.

use super::planned::Plan;
use super::trees::load;
use crate::program::Shape;
use crate::topology::{Machine, ResourceId};
use crate::units::time;
use ahash::{HashMap, HashMapExt, HashSet, HashSetExt};
use microlp::{ComparisonOp, OptimizationDirection, Problem, SolveOptions};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;

/// Rounds of prices that rise with the load.
const ROUNDS: u32 = 48;

/// Turns of the linear program, and the part of the bound below which another does not pay.
const MOST_TURNS: usize = 24;
const CLOSE: f64 = 2e-3;

/// Destinations to which the cheapest tree is sought.
const MOST_MEMBERS: usize = 8;

/// Resources with a smaller part of the bound are not named.
const LEAST_PART: f64 = 0.01;

/// The least time of a batch, as far as the capacities of the machine decide it.
#[derive(Clone, Debug, PartialEq)]
pub struct Bound {
    /// Seconds. 0 where nothing passes a link.
    pub seconds: f64,
    /// The resources that limit it, each with its part of all of them, the largest first. Together they are busy all the time.
    pub limits: Vec<(ResourceId, f64)>,
}

/// Bytes that go from one device to one or several others.
struct Flow {
    src: usize,
    to: SmallVec<[usize; 8]>,
    bytes: f64,
}

/// Seconds per byte on resources.
type Work = Vec<(u32, f64)>;

/// A copy between two devices: what a byte draws on, and what it draws on where it comes from or stays in a host memory that it only passes.
struct Hop {
    plain: Work,
    passing: Work,
}

struct Network {
    devices: usize,
    is_host: Vec<bool>,
    /// `hops[from * devices + to]`
    hops: Vec<Option<Hop>>,
    flows: Vec<Flow>,
    resources: usize,
}

/// Of one flow under some prices: between every two devices the least price, and the device after the first on that way.
struct Distances {
    devices: usize,
    /// Through devices that bytes pass.
    passing: Vec<(f64, usize)>,
    /// To where they stay: the price, and the device before it.
    ending: Vec<(f64, usize)>,
}

impl Bound {
    /// Of a batch on a machine.
    pub fn new(machine: &Machine, batch: &[Shape]) -> Bound {
        let network = Network::new(machine, batch);
        let mut best = Bound { seconds: 0.0, limits: Vec::new() };
        if network.flows.is_empty() {
            return best;
        }
        let mut ways: Vec<HashSet<Vec<(u32, u64)>>> = network.flows.iter().map(|_| HashSet::new()).collect();
        let mut known: Vec<(usize, Work)> = Vec::new();
        let mut learn = |found: Vec<Work>, known: &mut Vec<(usize, Work)>| {
            for (flow, work) in found.into_iter().enumerate() {
                let key = work.iter().map(|(resource, seconds)| (*resource, seconds.to_bits())).collect();
                if ways[flow].insert(key) {
                    known.push((flow, work));
                }
            }
        };
        let (mut loads, mut prices) = (vec![0.0; network.resources], vec![1.0; network.resources]);
        for round in 1..=ROUNDS {
            let (_, found) = network.cheapest(&prices);
            for (flow, work) in network.flows.iter().zip(&found) {
                work.iter().for_each(|(resource, seconds)| loads[*resource as usize] += seconds * flow.bytes);
            }
            learn(found, &mut known);
            let most = loads.iter().copied().fold(0.0, f64::max) * f64::from(ROUNDS) / f64::from(round);
            prices.iter_mut().zip(&loads).for_each(|(price, load)| *price = (12.0 * load / most.max(f64::MIN_POSITIVE)).exp());
        }
        let scale = loads.iter().copied().fold(0.0, f64::max) / f64::from(ROUNDS);
        for _ in 0..MOST_TURNS {
            let Some((reached, prices)) = network.program(&known, scale) else { break };
            let (cost, found) = network.cheapest(&prices);
            let seconds = cost / prices.iter().sum::<f64>();
            if seconds > best.seconds {
                best = Bound { seconds, limits: limits(&prices) };
            }
            if best.seconds >= reached * (1.0 - CLOSE) {
                break;
            }
            learn(found, &mut known);
        }
        best
    }
}

fn limits(prices: &[f64]) -> Vec<(ResourceId, f64)> {
    let all: f64 = prices.iter().sum();
    let parts = (0..).zip(prices).map(|(resource, price)| (ResourceId(resource), price / all));
    let mut limits: Vec<(ResourceId, f64)> = parts.filter(|(_, part)| *part >= LEAST_PART).collect();
    limits.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    limits
}

impl Network {
    fn new(machine: &Machine, batch: &[Shape]) -> Network {
        let all: Vec<_> = machine.devices().collect();
        let index = |device| all.iter().position(|known| *known == device);
        let work = |route: &crate::topology::Route, staged: f64| {
            let seconds = |id: &ResourceId| {
                let resource = &machine.resources()[id.0 as usize];
                (id.0, resource.draw(staged) / resource.capacity)
            };
            route.resources.iter().map(seconds).collect()
        };
        let hop = |(from, to): (usize, usize)| {
            let route = machine.route(all[from], all[to]).filter(|_| from != to)?;
            Some(Hop { plain: work(route, 0.0), passing: work(route, 1.0) })
        };
        let pairs = (0..all.len()).flat_map(|from| (0..all.len()).map(move |to| (from, to)));
        // Of each source its bytes once, and all devices that want them.
        let mut sources: BTreeMap<(u32, usize, u64), SmallVec<[usize; 8]>> = BTreeMap::new();
        let mut flows: BTreeMap<(usize, SmallVec<[usize; 8]>), f64> = BTreeMap::new();
        for shape in batch.iter().filter(|shape| shape.bytes > 0 && shape.src_device != shape.dst_device) {
            let (Some(src), Some(dst)) = (index(shape.src_device), index(shape.dst_device)) else { continue };
            if shape.source == 0 {
                *flows.entry((src, smallvec![dst])).or_default() += shape.bytes as f64;
            } else {
                sources.entry((shape.source, src, shape.bytes)).or_default().push(dst);
            }
        }
        for ((_, src, bytes), mut to) in sources {
            to.sort_unstable();
            to.dedup();
            *flows.entry((src, to)).or_default() += bytes as f64;
        }
        let mut network = Network {
            devices: all.len(),
            is_host: all.iter().map(|device| device.is_host()).collect(),
            hops: pairs.map(hop).collect(),
            flows: flows.into_iter().map(|((src, to), bytes)| Flow { src, to, bytes }).collect(),
            resources: machine.resources().len(),
        };
        let prices = vec![1.0; network.resources];
        let mut flows = std::mem::take(&mut network.flows);
        for flow in &mut flows {
            let far = network.distances(flow, &prices);
            flow.to.retain(|to| far.end(flow.src, *to).0.is_finite());
            // The farthest say most.
            flow.to.sort_by(|a, b| far.end(flow.src, *b).0.total_cmp(&far.end(flow.src, *a).0));
            flow.to.truncate(MOST_MEMBERS);
        }
        flows.retain(|flow| !flow.to.is_empty());
        network.flows = flows;
        network
    }

    /// Whether a copy takes part in passing a host memory.
    fn is_passing(&self, flow: &Flow, from: usize, to: usize, ends: bool) -> bool {
        (self.is_host[from] && from != flow.src) || (self.is_host[to] && !ends)
    }

    fn work(&self, flow: &Flow, (from, to, ends): (usize, usize, bool)) -> &[(u32, f64)] {
        let is_passing = self.is_passing(flow, from, to, ends);
        let hop = self.hops[from * self.devices + to].as_ref();
        hop.map_or(&[], |hop| if is_passing { &hop.passing } else { &hop.plain })
    }

    fn distances(&self, flow: &Flow, prices: &[f64]) -> Distances {
        let count = self.devices;
        let hop = |from: usize, to: usize, ends: bool| match &self.hops[from * count + to] {
            Some(_) => self.work(flow, (from, to, ends)).iter().map(|(resource, seconds)| seconds * prices[*resource as usize]).sum(),
            None => f64::INFINITY,
        };
        let all = || (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        let mut passing: Vec<(f64, usize)> = all().map(|(from, to)| (if from == to { 0.0 } else { hop(from, to, false) }, to)).collect();
        for (by, from) in all() {
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
        let last: Vec<f64> = all().map(|(from, to)| hop(from, to, true)).collect();
        let end = |(from, to): (usize, usize)| {
            if from == to {
                return (0.0, from);
            }
            let by = (0..count).map(|by| (passing[from * count + by].0 + last[by * count + to], by));
            by.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::INFINITY, from))
        };
        let ending = all().map(end).collect();
        Distances { devices: count, passing, ending }
    }

    /// What all flows cost on their cheapest ways, and what a byte of each draws on there.
    fn cheapest(&self, prices: &[f64]) -> (f64, Vec<Work>) {
        let (mut cost, mut works) = (0.0, Vec::with_capacity(self.flows.len()));
        for flow in &self.flows {
            let distances = self.distances(flow, prices);
            let (each, hops) = if let [to] = flow.to[..] {
                let mut hops = Vec::new();
                distances.way(flow.src, to, &mut hops);
                (distances.end(flow.src, to).0, hops)
            } else {
                distances.tree(flow.src, &flow.to)
            };
            cost += each * flow.bytes;
            let mut work: HashMap<u32, f64> = HashMap::new();
            for &(resource, seconds) in hops.into_iter().flat_map(|hop| self.work(flow, hop)) {
                *work.entry(resource).or_default() += seconds;
            }
            let mut work: Work = work.into_iter().collect();
            work.sort_unstable_by_key(|entry| entry.0);
            works.push(work);
        }
        (cost, works)
    }

    /// Prices under which the known ways together cost most, and how much: no batch that keeps to these ways is sooner done. `scale` is the order of it.
    fn program(&self, known: &[(usize, Work)], scale: f64) -> Option<(f64, Vec<f64>)> {
        let mut problem = Problem::new(OptimizationDirection::Maximize);
        let mut is_used = vec![false; self.resources];
        known.iter().flat_map(|(_, work)| work).for_each(|(resource, _)| is_used[*resource as usize] = true);
        let prices: Vec<_> = is_used.iter().map(|used| used.then(|| problem.add_var(0.0, (0.0, 1.0)))).collect();
        let costs: Vec<_> = self.flows.iter().map(|_| problem.add_var(1.0, (0.0, f64::INFINITY))).collect();
        for (flow, work) in known {
            let priced = work
                .iter()
                .filter_map(|(resource, seconds)| Some((prices[*resource as usize]?, -seconds * self.flows[*flow].bytes / scale)));
            let row: Vec<_> = priced.chain([(costs[*flow], 1.0)]).collect();
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

/// A copy: from where, to where, and whether the bytes stay there.
type Step = (usize, usize, bool);

impl Distances {
    fn end(&self, from: usize, to: usize) -> (f64, usize) {
        self.ending[from * self.devices + to]
    }

    fn passing(&self, from: usize, to: usize) -> f64 {
        self.passing[from * self.devices + to].0
    }

    fn way_passing(&self, mut from: usize, to: usize, steps: &mut Vec<Step>) {
        while from != to {
            let next = self.passing[from * self.devices + to].1;
            steps.push((from, next, false));
            from = next;
        }
    }

    fn way(&self, from: usize, to: usize, steps: &mut Vec<Step>) {
        if from != to {
            let last = self.end(from, to).1;
            self.way_passing(from, last, steps);
            steps.push((last, to, true));
        }
    }

    /// The cheapest tree from a device to several others: its price, and its copies. Of each set of them and each device, the price of bringing the
    /// bytes from there to all of the set: the device hands the set on to another, where it falls into two.
    fn tree(&self, src: usize, to: &[usize]) -> (f64, Vec<Step>) {
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
        let mut steps = Vec::new();
        let mut left = vec![(sets - 1, src)];
        while let Some((set, from)) = left.pop() {
            let (_, at, one) = best[set * count + from];
            if one == 0 {
                self.way(from, at, &mut steps);
            } else {
                self.way_passing(from, at, &mut steps);
                left.extend([(one, at), (set ^ one, at)]);
            }
        }
        (best[(sets - 1) * count + src].0, steps)
    }
}

impl Plan {
    /// How soon its batch could be done at best.
    pub fn bound(&self, machine: &Machine) -> Bound {
        let batch: Vec<Shape> = self.transfers.iter().map(|transfer| transfer.shape).collect();
        Bound::new(machine, &batch)
    }

    /// The bound, what limits it, and how near the plan comes, as a sentence; `None` where links hardly matter.
    pub(super) fn bound_in_words(&self, machine: &Machine) -> Option<String> {
        let bound = self.bound(machine);
        let name = |limit: &(ResourceId, f64)| machine.resources()[limit.0.0 as usize].name.clone();
        let names: Vec<String> = bound.limits.iter().take(4).map(name).collect();
        let more = match bound.limits.len().saturating_sub(4) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let reached = bound.seconds / self.predicted;
        // Of a few bytes it says nothing.
        (reached >= LEAST_PART).then(|| {
            let why = self.why_not_the_bound(machine, &bound).map(|why| format!(": {why}")).unwrap_or_default();
            format!("at best {}, limited by {}{more}; the plan reaches {reached:.2} of that{why}", time(bound.seconds), names.join(", "))
        })
    }

    /// What keeps a plan from nine tenths of its bound.
    pub(super) fn why_not_the_bound(&self, machine: &Machine, bound: &Bound) -> Option<String> {
        if bound.seconds >= 0.9 * self.predicted {
            return None;
        }
        let batch: Vec<Shape> = self.transfers.iter().map(|transfer| transfer.shape).collect();
        let loads = load(machine, &self.program, &batch);
        let (busiest, seconds) = (0..).zip(&loads).max_by(|a: &(usize, _), b| a.1.total_cmp(b.1))?;
        Some(if self.threads.is_some() {
            "threads copy between pageable memory and what the links read".into()
        } else if seconds / self.predicted < bound.seconds / seconds {
            "the rest is starting copies, handing chunks on, and links that wait for each other".into()
        } else {
            let name = &machine.resources()[busiest].name;
            format!(
                "its paths keep {name} busy for {}; more relays in a row, or what options leave out, would take some of that",
                time(*seconds)
            )
        })
    }
}
