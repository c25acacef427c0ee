//! Adjusts the bytes of paths so that the paths of a transfer finish together if links are shared fairly.
//!
//! The linear program of [`split`](super::split) assumes an arbitrary division of capacity: it may give one path most of a link and another
//! the rest. Real links are shared fairly. Each flow on a full link gets as much as any other flow that could use it. So a path with many
//! bytes ends late, while the others end early. This module uses the paths that the linear program selects, and computes their bytes from
//! the rates of max-min fair sharing, as in the simulator, and from their start times.

use super::mechanism;
use super::selection::Selection;
use super::split::{Column, fill};
use crate::model::{FlowRate, MaxMin};
use crate::topology::{DeviceId, ResourceId};
use smallvec::{SmallVec, smallvec};

/// Largest relative difference between the progress rates (rate divided by size) of transfers at which they are treated as ending together.
/// If the difference is larger, the linear program is used, because it also divides the capacity that becomes free when the first transfers
/// end.
const ALIKE: f64 = 0.1;

/// Number of iterations. Chunk counts depend on the bytes of the paths, and the bytes depend on the chunk counts.
const COUNTS: usize = 2;

/// Smallest relative gain in time for which a path is removed. Such a path takes more capacity from other paths than it uses.
const IN_THE_WAY: f64 = 5e-3;

/// Fraction of its capacity above which a resource counts as full. It is below 1 because rates are rounded.
const FULL: f64 = 0.999;

/// Path that carries data concurrently with the other active paths.
struct ActivePath<'a> {
    candidate: usize,
    /// Index of the path's transfer among the transfers that have active paths.
    transfer: u32,
    /// Resources that each hop uses.
    hops: SmallVec<[&'a [ResourceId]; 2]>,
    /// Resources that the path uses, over all hops.
    all: SmallVec<[ResourceId; 16]>,
    /// True if the path stages its data in host memory.
    through_host: bool,
    /// Time at which the path starts, without its latency and synchronisations, seconds.
    head: f64,
    /// Rate of the path while all other paths are active too, bytes/s.
    rate: f64,
    bytes: f64,
}

impl<'f> Selection<'f> {
    /// Returns the adjusted number of bytes of each candidate path. Only paths with bytes in `shares` get bytes. Returns `None` if the
    /// transfers of the batch would not end together, or if transfers are aggregated.
    pub(super) fn balance(&mut self, shares: &[f64]) -> Option<Vec<f64>> {
        if self.aggregated {
            return None;
        }
        let mut ways = self.ways(shares);
        let mut demands: Vec<f64> = Vec::new();
        for way in &ways {
            demands.resize(way.transfer as usize + 1, 0.0);
            demands[way.transfer as usize] += way.bytes;
        }
        let mut balanced = shares.to_vec();
        if apart(&ways, self.machine.resources().len()) {
            ways.iter_mut().for_each(|way| way.rate = self.candidates[way.candidate].model.rate);
            self.divide(&mut ways, &demands);
        } else {
            let mut fair = MaxMin::new(self.machine.resources());
            self.share(&mut fair, &mut ways, &demands)?;
            let mut end = self.divide(&mut ways, &demands);
            while let Some(at) = self.in_the_way(&mut fair, &ways, &demands, end) {
                balanced[ways.remove(at).candidate] = 0.0;
                self.share(&mut fair, &mut ways, &demands)?;
                end = self.divide(&mut ways, &demands);
            }
        }
        ways.iter().for_each(|way| balanced[way.candidate] = way.bytes);
        Some(balanced)
    }

    /// Returns all paths that carry data over links, with their start times.
    fn ways(&self, shares: &[f64]) -> Vec<ActivePath<'f>> {
        let (machine, costs) = (self.machine, self.machine.costs());
        let mut ways: Vec<ActivePath<'f>> = Vec::new();
        let mut last = None;
        let mut transfers = 0;
        for (candidate, &bytes) in shares.iter().enumerate().filter(|(_, bytes)| **bytes > 0.0) {
            let demand = self.candidates[candidate].demand;
            let shape = &self.demand(candidate).shape;
            let routes = match self.candidates[candidate].via {
                None => [machine.route(shape.src_device, shape.dst_device), None],
                Some(via) => [machine.route(shape.src_device, via), machine.route(via, shape.dst_device)],
            };
            let hops: SmallVec<[&[ResourceId]; 2]> = routes.into_iter().flatten().map(|route| route.resources.as_slice()).collect();
            if hops.iter().any(|hop| hop.is_empty()) {
                continue;
            }
            transfers += u32::from(last.replace(demand) != Some(demand));
            let all = hops.iter().flat_map(|hop| hop.iter().copied()).collect();
            let through_host = self.candidates[candidate].via.is_some_and(DeviceId::is_host);
            ways.push(ActivePath { candidate, transfer: transfers - 1, hops, all, through_host, head: costs.copy, rate: 0.0, bytes });
        }
        self.heads(&mut ways, transfers as usize);
        ways
    }

    /// Sets the start time of each path. Large copies are issued first, one by one, and then the chunks of all pipelines round-robin.
    /// Transfers of equal size should be divided equally. So for each transfer, half of the others are assumed to be issued before it.
    fn heads(&self, ways: &mut [ActivePath<'_>], transfers: usize) {
        let costs = self.machine.costs();
        let issue = self.options.issue(costs);
        let mut of: Vec<[f64; 2]> = vec![[0.0; 2]; transfers];
        for way in &mut *ways {
            let staged = way.hops.len() > 1;
            let alone = staged || mechanism::pays_alone(costs, way.bytes, self.candidates[way.candidate].model.rate);
            let own = &mut of[way.transfer as usize][usize::from(staged)];
            way.head += issue * *own;
            *own += if staged { 2.0 } else { f64::from(u8::from(alone)) };
        }
        let [direct, pipelines] = of.iter().fold([0.0, 0.0], |all, own| [all[0] + own[0], all[1] + own[1]]);
        for way in ways {
            let own = of[way.transfer as usize];
            way.head += match way.hops.len() {
                1 => issue * (direct - own[0]) / 2.0,
                _ => costs.fork_join_staged + issue * (direct + (pipelines - own[1]) / 2.0),
            };
        }
    }

    /// Computes the rates of all paths, and of the hops of staged paths. The first chunks of all pipelines pass the first hops
    /// concurrently, and the last chunks pass the second hops concurrently. Returns `None` if the transfers would not end together.
    fn share(&mut self, fair: &mut MaxMin<'_>, ways: &mut [ActivePath<'_>], demands: &[f64]) -> Option<()> {
        let rates = rates(fair, ways.iter().map(|way| way.drawing(&way.all)));
        let mut paces = vec![0.0; demands.len()];
        for (way, rate) in ways.iter_mut().zip(rates) {
            way.rate = rate;
            paces[way.transfer as usize] += rate / demands[way.transfer as usize];
        }
        let (slowest, fastest) = paces.into_iter().fold((f64::INFINITY, 0.0_f64), |(a, b), pace| (a.min(pace), b.max(pace)));
        if slowest < fastest * (1.0 - ALIKE) {
            return None;
        }
        let first = rates_of_hop(fair, ways, 0);
        let second = rates_of_hop(fair, ways, 1);
        let overlaps = self.overlaps(ways);
        for ((way, hops), overlap) in
            ways.iter().zip(first.into_iter().zip(second)).zip(overlaps).filter(|((way, _), _)| way.hops.len() > 1)
        {
            let model = &mut self.candidates[way.candidate].model;
            (model.hops, model.overlap) = (smallvec![hops.0, hops.1], overlap);
        }
        Some(())
    }

    /// Returns, for each path, the fraction of the idle time between chunks that costs nothing. If a full resource limits the path, the
    /// other paths on that resource become faster during that time, up to their own limits. The fraction is 0 in a batch of several
    /// transfers, because their many pipelines wait for the issuing thread.
    fn overlaps(&self, ways: &[ActivePath<'_>]) -> Vec<f64> {
        if ways.iter().any(|way| way.transfer > 0) {
            return vec![0.0; ways.len()];
        }
        let resources = self.machine.resources();
        // For each resource: its load, and the additional load that its paths would cause if it had more capacity.
        let mut use_of = vec![(0.0_f64, 0.0_f64); resources.len()];
        let more = |way: &ActivePath<'_>| (self.candidates[way.candidate].model.rate - way.rate).max(0.0);
        for way in ways {
            for r in &way.all {
                let draw = resources[r.0 as usize].draw(f64::from(way.through_host));
                let (load, room) = &mut use_of[r.0 as usize];
                *load += way.rate * draw;
                *room += more(way) * draw;
            }
        }
        let part = |way: &ActivePath<'_>| {
            let full = way.all.iter().filter(|r| use_of[r.0 as usize].0 >= FULL * resources[r.0 as usize].capacity);
            let rooms = full.map(|r| {
                use_of[r.0 as usize].1 / (way.rate * resources[r.0 as usize].draw(f64::from(way.through_host))) - more(way) / way.rate
            });
            rooms.fold(0.0, f64::max).min(1.0)
        };
        ways.iter().map(part).collect()
    }

    /// Computes the bytes of each path with which the paths of a transfer end together. Returns the end of the last transfer, in seconds.
    fn divide(&self, ways: &mut [ActivePath<'_>], demands: &[f64]) -> f64 {
        let mut columns = Vec::new();
        for _ in 0..COUNTS {
            columns = self.columns(ways);
            let bytes = fill(&columns, demands);
            ways.iter_mut().zip(bytes).for_each(|(way, bytes)| way.bytes = bytes);
        }
        ends(&columns, ways.iter().map(|way| way.bytes))
    }

    fn columns(&self, ways: &[ActivePath<'_>]) -> Vec<Column> {
        let costs = self.machine.costs();
        let column = |way: &ActivePath<'_>| {
            let model = &self.candidates[way.candidate].model;
            let (fixed, each) = model.line(costs, self.chunks(way.candidate, way.bytes as u64));
            let line = (way.head + fixed, each - model.rate.recip() + way.rate.recip());
            Column { transfer: way.transfer, fixed: 0.0, line, work: SmallVec::new(), link_time: 0.0 }
        };
        ways.iter().map(column).collect()
    }

    /// Returns the index of the staged path whose removal makes a single transfer end earliest; `None` if no removal makes it earlier than
    /// `end`.
    fn in_the_way(&self, fair: &mut MaxMin<'_>, ways: &[ActivePath<'_>], demands: &[f64], end: f64) -> Option<usize> {
        if demands.len() != 1 {
            return None;
        }
        let mut best = (end * (1.0 - IN_THE_WAY), None);
        let mut columns = self.columns(ways);
        for at in (0..ways.len()).filter(|&at| ways.len() > 1 && ways[at].hops.len() > 1) {
            let others = || ways.iter().enumerate().filter(|(other, _)| *other != at);
            let rates = rates(fair, others().map(|(_, way)| way.drawing(&way.all)));
            let without = columns.remove(at);
            let mut lines = columns.clone();
            for ((line, (_, way)), rate) in lines.iter_mut().zip(others()).zip(rates) {
                line.line.1 += rate.recip() - way.rate.recip();
            }
            columns.insert(at, without);
            let ends = ends(&lines, fill(&lines, demands).into_iter());
            if ends < best.0 {
                best = (ends, Some(at));
            }
        }
        best.1
    }
}

impl ActivePath<'_> {
    /// Returns the flow of the path's data on these resources, for the computation of fair rates.
    fn drawing<'a>(&self, resources: &'a [ResourceId]) -> FlowRate<'a> {
        FlowRate { staged: f64::from(self.through_host), ..FlowRate::new(resources) }
    }
}

fn rates<'a>(fair: &mut MaxMin<'_>, flows: impl Iterator<Item = FlowRate<'a>>) -> Vec<f64> {
    let mut flows: Vec<FlowRate<'a>> = flows.collect();
    fair.share(&mut flows);
    flows.into_iter().map(|flow| flow.rate).collect()
}

/// Returns the rates of all paths while every staged path uses only its hop number `hop`.
fn rates_of_hop(fair: &mut MaxMin<'_>, ways: &[ActivePath<'_>], hop: usize) -> Vec<f64> {
    rates(fair, ways.iter().map(|way| way.drawing(way.hops[hop.min(way.hops.len() - 1)])))
}

fn ends(columns: &[Column], bytes: impl Iterator<Item = f64>) -> f64 {
    let carrying = columns.iter().zip(bytes).filter(|(_, bytes)| *bytes > 0.0);
    carrying.map(|(column, bytes)| column.line.0 + bytes * column.line.1).fold(0.0, f64::max)
}

/// True if no two paths use the same resource, and no path uses a resource in both hops.
fn apart(ways: &[ActivePath<'_>], resources: usize) -> bool {
    let mut used = vec![false; resources];
    ways.iter().flat_map(|way| &way.all).all(|r| !std::mem::replace(&mut used[r.0 as usize], true))
}
