//! Plans data that several devices forward: one source for many destinations that forward received data, and paths over several relays.
//!
//! Transfers of a batch with the same source ([`Shape::source`]) form a group. The destinations are the group's members. The group's data
//! is divided among *trees*. In each tree the source sends a part of the data to one or several devices, and these send it to others, until
//! all members have it. Members need no staging memory: they forward a chunk from its destination buffer as soon as it has arrived. Other
//! devices forward chunks through a staging ring. Trees include the star, in which the source sends to all members. Scatter
//! and exchange uses one tree for each destination, in which the source sends only to that destination. Transfers that share no source form
//! one group for each pair of source and destination device. A tree of such a group is a path over any number of relays. Such paths are
//! useful if GPUs are connected so unevenly that a path over one relay is slow.
//!
//! Candidate trees are found by prices (dual values) of resources ([`network`](super::network)). The linear program of [`split`] divides
//! the data among them. A tree uses the resources of all its copies. The trees of all groups and the other transfers of the batch share the
//! resources. The resulting programs are proposed to the [`judge`](super::judge), which simulates them, because the planner's model of
//! single paths does not cover chunks that several devices forward one after the other.

use super::bound::Proof;
use super::canonical::renamed;
use super::judge::Judge;
use super::lower::copying_device;
use super::network::{Commodity, Network, Tree};
use super::options::{Options, Passing};
use super::planned::{PathPlan, Plan, TransferPlan};
use super::planner::Basis;
use super::rounds::{BlockTree, MOST_BLOCKS, broadcast};
use super::split::{Column, split};
use crate::model::{GRAIN, HOST_RINGS, SLOTS};
use crate::program::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId, Shape};
use crate::topology::{DeviceId, LinkId, LinkKind, Machine, MemoryKind};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Smallest size in bytes of a source for which callers set [`Shape::source`]. Smaller sources are copied to each destination separately,
/// because forwarding costs at least two synchronisations.
pub const LEAST_BYTES: u64 = 1 << 20;

/// Parameters of one proposed program. More trees come closer to the capacity of the links; fewer and larger chunks wait less for each
/// other.
struct Try {
    /// Trees among which each group's data may be divided.
    trees: Candidates,
    /// Smallest fraction of the data of a group (transfers with the same source) for which a tree is worth the operations that it needs.
    least_share: f64,
    /// Factor on the number of chunks or blocks. With 1, the number balances the cost of synchronisations against the time until the last
    /// device receives its first chunk.
    chunks: f64,
    /// Number of lanes (internal streams) between two devices, which take chunks alternately. While one waits for synchronisation, the
    /// other uses the link. With two, direct copies are cut into chunks too, because a long copy would delay the chunks behind it.
    lanes: usize,
}

/// Set of trees among which a group's data is divided.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Candidates {
    /// Trees that are the cheapest under some prices (dual values) of resources, and in addition the trees of [`Candidates::Hubs`].
    Priced,
    /// Star, in which the source sends to all members, and for each member the tree in which that member forwards the data to all others.
    Hubs,
    /// One tree for each of several equal blocks of the data, so that each device sends at most one block and receives at most one block at
    /// a time ([`rounds`](super::rounds)). The time until the last member receives its first block hardly grows with the number of members.
    Rounds,
}

/// Parameters that are tried, in order. Each set is the best for some presets and random machines.
const TRIES: [Try; 7] = [
    Try { trees: Candidates::Priced, least_share: 0.02, chunks: 1.0, lanes: 2 },
    Try { trees: Candidates::Priced, least_share: 0.02, chunks: 0.5, lanes: 2 },
    Try { trees: Candidates::Priced, least_share: 0.02, chunks: 0.5, lanes: 1 },
    Try { trees: Candidates::Priced, least_share: 0.05, chunks: 1.5, lanes: 2 },
    Try { trees: Candidates::Hubs, least_share: 0.02, chunks: 1.0, lanes: 1 },
    Try { trees: Candidates::Rounds, least_share: 0.0, chunks: 1.0, lanes: 1 },
    Try { trees: Candidates::Rounds, least_share: 0.0, chunks: 0.7, lanes: 1 },
];

/// Largest number of devices of a machine for which trees are searched by prices (dual values) of resources. The time of the search grows
/// with the cube of the number of devices. Larger machines are racks behind switches, where trees that need no search are as good.
const MOST_PRICED: usize = 20;
/// Largest number of groups of transfers for which trees are searched by prices (dual values) of resources.
const MOST_FLOWS: usize = 64;

/// Ratio of the best simulated time to the lower bound at or below which no further parameters are tried. So lists of hundreds of tensors
/// are simulated once, not once for each set of parameters.
const ENOUGH: f64 = 1.02;

/// Ratio of the time to issue all copies to the lower bound above which larger chunks are tried too. One thread issues all copies, and
/// links idle while they wait for copies that have not been issued.
const MOST_ISSUED: f64 = 1.1;

/// Largest number of chunks into which the data of one tree is cut.
const MOST_CHUNKS: u64 = 128;

/// Sources on one device that have the same destinations. They are planned as one source.
#[derive(Clone)]
struct SourceGroup {
    src: DeviceId,
    /// Destination devices, all different. Does not contain `src`.
    members: Vec<DeviceId>,
    sources: Vec<Source>,
}

/// Data that all members of a group need: one transfer for each member.
#[derive(Clone)]
struct Source {
    bytes: u64,
    /// Transfer to each member, as an index into the batch, in the order of [`SourceGroup::members`].
    transfers: Vec<u32>,
}

/// Returns the groups of a batch: sources that several transfers share and whose destinations can forward the data. Transfers that cannot
/// be forwarded are left out.
fn groups(batch: &[Shape], options: &Options) -> Vec<SourceGroup> {
    if options.max_paths < 2 || options.passing == Passing::Off {
        return Vec::new();
    }
    struct Found {
        src: DeviceId,
        bytes: u64,
        to: Vec<(DeviceId, u32)>,
    }
    let mut found: Vec<Found> = Vec::new();
    let mut numbers: ahash::HashMap<u32, usize> = ahash::HashMap::default();
    for (transfer, shape) in (0..).zip(batch) {
        if shape.source == 0 || shape.bytes < options.min_bytes.unwrap_or(1).max(1) || shape.dst_kind == MemoryKind::Pageable {
            continue;
        }
        let at = *numbers.entry(shape.source).or_insert(found.len());
        if at == found.len() {
            found.push(Found { src: shape.src_device, bytes: shape.bytes, to: Vec::new() });
        }
        let Found { src, bytes, to } = &mut found[at];
        let is_other = shape.dst_device != *src && to.iter().all(|member| member.0 != shape.dst_device);
        if is_other && (shape.src_device, shape.bytes) == (*src, *bytes) {
            to.push((shape.dst_device, transfer));
        }
    }
    let mut groups: Vec<SourceGroup> = Vec::new();
    for Found { src, bytes, mut to } in found.into_iter().filter(|found| found.to.len() > 1) {
        to.sort_unstable();
        let (members, transfers): (Vec<DeviceId>, Vec<u32>) = to.into_iter().unzip();
        let source = Source { bytes, transfers };
        match groups.iter_mut().find(|group| group.src == src && group.members == members) {
            Some(group) => group.sources.push(source),
            None => groups.push(SourceGroup { src, members, sources: vec![source] }),
        }
    }
    groups
}

/// Adds groups for transfers that are in no group: one group for each pair of source and destination device. A transfer is added if it has
/// no direct route, or if its direct copy takes longer than two synchronisations. Transfers with a direct route are not added if measured
/// corrections ([`Options::tuned`]) are active, because these apply to paths over one relay.
fn with_pairs(mut groups: Vec<SourceGroup>, machine: &Machine, batch: &[Shape], options: &Options) -> Vec<SourceGroup> {
    let many = groups.len();
    for transfer in rest_of(batch, &groups) {
        let shape = &batch[transfer as usize];
        let (src, dst) = (shape.src_device, shape.dst_device);
        let is_long = |bandwidth: f64| shape.bytes as f64 / bandwidth > 2.0 * machine.costs().chunk_via_gpu;
        let is_pageable = [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable);
        let may_gain = |bandwidth| options.tuned.is_none() && is_long(bandwidth) && shape.bytes >= options.min_bytes.unwrap_or(0);
        let gains = machine.route(src, dst).is_none_or(|route| may_gain(route.bandwidth));
        if shape.bytes == 0 || src == dst || src.is_host() && dst.is_host() || is_pageable || !gains {
            continue;
        }
        let source = Source { bytes: shape.bytes, transfers: vec![transfer] };
        match groups[many..].iter_mut().find(|group| (group.src, group.members[0]) == (src, dst)) {
            Some(group) => group.sources.push(source),
            None => groups.push(SourceGroup { src, members: vec![dst], sources: vec![source] }),
        }
    }
    groups
}

/// Returns the number of NVLinks on the route between two devices, which is two through a switch. Returns `None` if the route has other
/// links.
fn nvlinks(machine: &Machine, from: DeviceId, to: DeviceId) -> Option<usize> {
    let is_nvlink = |link: &LinkId| machine.topology().links[link.0 as usize].kind == LinkKind::Nvlink;
    machine.route(from, to).filter(|route| route.links.iter().all(is_nvlink)).map(|route| route.links.len())
}

impl SourceGroup {
    /// Returns the total size of all sources, in bytes.
    fn bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.bytes).sum()
    }

    fn flow(&self, network: &Network) -> Option<Commodity> {
        let to: Option<Vec<usize>> = self.members.iter().map(|member| network.number(*member)).collect();
        let flow = Commodity { src: network.number(self.src)?, to: to?, bytes: self.bytes() as f64 };
        flow.to.iter().all(|to| network.reaches(&flow, *to)).then_some(flow)
    }
}

/// Returns, for each copy of a tree, the number of successive copies from the source up to and including that copy.
fn depths(tree: &Tree) -> Vec<u32> {
    let mut depths: Vec<u32> = Vec::with_capacity(tree.len());
    for (from, _) in tree {
        let before = tree[..depths.len()].iter().position(|hop| hop.1 == *from);
        depths.push(1 + before.map_or(0, |before| depths[before]));
    }
    depths
}

/// Returns the number of successive copies until every device of the tree has the data.
fn depth(tree: &Tree) -> u32 {
    depths(tree).into_iter().max().unwrap_or(0)
}

/// Returns the time for which a program keeps each resource busy, in seconds, by resource index.
pub(super) fn load(machine: &Machine, program: &Program, batch: &[Shape]) -> Vec<f64> {
    let mut load = vec![0.0; machine.resources().len()];
    let device = |place| program.device(batch, place);
    for copy in program.ops.iter().flat_map(|op| &op.copies) {
        let is_staged = [copy.from, copy.to].iter().any(|place| matches!(place, Place::Slot { .. }) && device(*place).is_host());
        let route = machine.route(device(copy.from), device(copy.to));
        for id in route.iter().flat_map(|route| &route.resources) {
            let resource = &machine.resources()[id.0 as usize];
            let draw = resource.draw(if is_staged { 1.0 } else { 0.0 });
            load[id.0 as usize] += copy.bytes as f64 * draw / resource.capacity;
        }
    }
    load
}

/// Tree and the part of its group's data that it distributes.
struct Share {
    group: usize,
    tree: Tree,
    /// Step of each copy of the first chunk, from 1. The next chunk is copied one step later.
    steps: Vec<u32>,
    bytes: u64,
    /// Chunks of the data, ordered by source buffer and offset.
    chunks: Vec<Chunk>,
    /// Largest size of a chunk, bytes.
    chunk_bytes: u64,
    /// Number of slots of its staging rings.
    slots: u32,
}

/// Internal streams from one device to another, and the number of chunks assigned to them so far. If both devices of the pair are the same,
/// these are the streams from this device to all others.
struct PairLanes {
    pair: (usize, usize),
    own: SmallVec<[LaneId; 2]>,
    chunks: usize,
}

/// Range of a source's data that each copy of a tree moves in one operation.
#[derive(Copy, Clone)]
struct Chunk {
    /// Source of the data, as an index into [`SourceGroup::sources`].
    source: usize,
    offset: u64,
    bytes: u64,
}

/// Input of planning with trees: the groups to distribute, and the program of the batch's other transfers.
struct Problem<'a> {
    machine: &'a Machine,
    batch: &'a [Shape],
    options: &'a Options,
    groups: &'a [SourceGroup],
    network: Network,
    /// Commodity of each group, by the group's index.
    flows: Vec<Commodity>,
    /// Program of the transfers that are in no group.
    rest: Program,
    /// Time in seconds for which `rest` keeps each resource busy.
    busy: Vec<f64>,
    /// Lower bound of the time of any distribution of the groups' data by trees, seconds; 0 if no bound is known.
    bound: f64,
}

/// Proposes plans in which devices forward data. In the first plans, only destinations of the same source forward it. In the next plans,
/// other transfers also use paths over several relays. In the last plans, these paths are used, but no destination forwards data. `plan`
/// plans the transfers that belong to no group. Returns the smallest lower bound of the times of these plans, in seconds; 0 if one of the
/// bounds is not known.
pub(super) fn propose(
    machine: &Machine,
    batch: &[Shape],
    options: &Options,
    judge: &mut Judge<'_, Basis>,
    plan: impl Fn(&[Shape], &Options) -> Option<Plan>,
) -> f64 {
    let mut bound = f64::INFINITY;
    let groups = groups(batch, options);
    let many = groups.iter().map(|group| group.sources.len()).sum::<usize>();
    let pairs = with_pairs(groups.clone(), machine, batch, options);
    let all = pairs.iter().map(|group| group.sources.len()).sum::<usize>();
    // Destinations of the same source are also planned as separate transfers, because forwarding is not always faster.
    let apart = if many > 0 { with_pairs(Vec::new(), machine, batch, options) } else { Vec::new() };
    let is_some = !apart.is_empty();
    for (groups, is_new) in [(groups, many > 0), (pairs, all > many), (apart, is_some)] {
        if !is_new {
            continue;
        }
        let rest = rest_of(batch, &groups);
        let shapes: Vec<Shape> = rest.iter().map(|transfer| batch[*transfer as usize]).collect();
        let rest_plan = if rest.is_empty() { None } else { plan(&shapes, &Options { passing: Passing::Off, ..*options }) };
        if rest.is_empty() || rest_plan.is_some() {
            let own = propose_trees(machine, batch, options, &groups, rest_plan.as_ref(), judge);
            bound = bound.min(own.unwrap_or(0.0));
        }
    }
    if bound.is_finite() { bound } else { 0.0 }
}

/// Proposes programs in which trees distribute the data of the groups. `rest` is the plan of the other transfers, which does not change.
/// Returns a lower bound of the time of such programs in seconds, or 0 if no bound is known. Returns `None` if a member cannot be reached,
/// or if the machine or the number of groups is too large and no group has several members.
fn propose_trees(
    machine: &Machine,
    batch: &[Shape],
    options: &Options,
    groups: &[SourceGroup],
    rest: Option<&Plan>,
    judge: &mut Judge<'_, Basis>,
) -> Option<f64> {
    let network = Network::new(machine, |device| if device.is_host() { options.host_path } else { options.relays.has(device) });
    let flows: Vec<Commodity> = groups.iter().map(|group| group.flow(&network)).collect::<Option<_>>()?;
    let of_rest = rest_of(batch, groups);
    let program = rest.map_or_else(Program::default, |rest| renamed(Program::clone(&rest.program), &of_rest));
    let busy = load(machine, &program, batch);
    let is_priced = network.devices.len() <= MOST_PRICED && flows.len() <= MOST_FLOWS;
    if !is_priced && groups.iter().all(|group| group.members.len() == 1) {
        return None;
    }
    let explored = is_priced.then(|| network.explore(&flows, &busy));
    let (trees, bound) = explored
        .map_or_else(|| (Vec::new(), Proof::simple(machine, &network, &flows).seconds), |explored| (explored.trees, explored.seconds));
    let problem = Problem { machine, batch, options, groups, network, flows, rest: program, busy, bound };
    let is_behind_switch = groups.len() == 1 && groups[0].members.iter().all(|member| nvlinks(machine, groups[0].src, *member) > Some(1));
    for attempt in &TRIES {
        // A program so close to the lower bound cannot become noticeably faster.
        if judge.is_beaten(bound * ENOUGH) {
            break;
        }
        // Each member would be the hub of a tree, which are too many trees for a large machine.
        if attempt.trees != Candidates::Rounds && !is_priced {
            continue;
        }
        // Copy engines behind a switch do not reach the simulated rate if GPUs exchange chunks with several others; see `Costs::scattered`.
        let is_slowed = is_behind_switch && options.passing == Passing::CopyEngines && attempt.trees != Candidates::Rounds;
        problem.offer(attempt, &trees, if is_slowed { machine.costs().scattered } else { 1.0 }, rest, judge);
    }
    Some(bound)
}

/// Returns the source of a commodity, followed by its destinations in the cyclic order of their numbers, which begins after the source. The
/// trees of different sources then begin with different devices and load the links evenly.
fn in_order(flow: &Commodity) -> Vec<usize> {
    let (before, behind) = flow.to.split_at(flow.to.partition_point(|member| *member < flow.src));
    [&[flow.src], behind, before].concat()
}

/// Returns the indices of the transfers that belong to no group.
fn rest_of(batch: &[Shape], groups: &[SourceGroup]) -> Vec<u32> {
    let mut is_member = vec![false; batch.len()];
    let members = groups.iter().flat_map(|group| &group.sources).flat_map(|source| &source.transfers);
    members.for_each(|transfer| is_member[*transfer as usize] = true);
    (0..batch.len() as u32).filter(|transfer| !is_member[*transfer as usize]).collect()
}

impl Share {
    fn new(group: usize, tree: Tree, bytes: u64) -> Share {
        Share { group, steps: depths(&tree), tree, bytes, chunks: Vec::new(), chunk_bytes: 0, slots: 0 }
    }

    /// Returns the devices that forward the data of the source without being destinations.
    fn relays(&self, flow: &Commodity) -> impl Iterator<Item = usize> {
        self.tree.iter().map(|hop| hop.1).filter(|device| !flow.to.contains(device))
    }
}

impl Problem<'_> {
    /// Proposes the program that results from the parameters of one attempt. Real machines reach the fraction `part` of its simulated rate.
    /// Returns `None` without a proposal if the data cannot be divided or staged, if no device would forward data, or if a transfer would
    /// use too many paths.
    fn offer(&self, attempt: &Try, trees: &[Vec<Tree>], part: f64, rest: Option<&Plan>, judge: &mut Judge<'_, Basis>) -> Option<()> {
        let mut shares = self.shares(attempt, trees)?;
        // A transfer uses at most `max_paths` paths.
        let paths = |group: usize| shares.iter().filter(|share| share.group == group).count();
        if shares.iter().all(|share| depth(&share.tree) < 2)
            || (0..self.groups.len()).any(|group| paths(group) > self.options.max_paths as usize)
        {
            return None;
        }
        let mut coarser = 1.0;
        loop {
            self.give_chunks(&mut shares, &Try { chunks: attempt.chunks / coarser, ..*attempt })?;
            let copies = shares.iter().map(|share| share.chunks.len() * share.tree.len()).sum::<usize>();
            if !judge.is_too_much(copies as u64) {
                let program = self.lowered(&shares, attempt);
                judge.offer_at(part, program, || Basis::Transfers(self.transfers(&shares, rest)));
            }
            let issued = copies as f64 * self.options.issue(self.machine.costs()) / (MOST_ISSUED * self.bound);
            if attempt.trees == Candidates::Rounds || coarser > 1.0 || issued <= 1.0 || !issued.is_finite() {
                return Some(());
            }
            coarser = issued;
        }
    }

    /// Returns the plans of all transfers of the batch. Transfers that are in no group keep their plan in `rest`.
    fn transfers(&self, shares: &[Share], rest: Option<&Plan>) -> Vec<TransferPlan> {
        let Problem { batch, groups, network, flows, .. } = self;
        let plan_of = |shape: &Shape| TransferPlan { shape: *shape, paths: Arc::default(), rejected: Arc::default() };
        let mut transfers: Vec<TransferPlan> = batch.iter().map(plan_of).collect();
        for (own, &transfer) in rest.into_iter().flat_map(|rest| &rest.transfers).zip(&rest_of(batch, groups)) {
            transfers[transfer as usize] = own.clone();
        }
        for share in shares {
            let (group, flow) = (&groups[share.group], &flows[share.group]);
            for chunks in share.chunks.chunk_by(|a, b| a.source == b.source) {
                for (member, &transfer) in group.sources[chunks[0].source].transfers.iter().enumerate() {
                    let before = |device: usize| share.tree.iter().find(|hop| hop.1 == device).map_or(flow.src, |hop| hop.0);
                    let from = before(flow.to[member]);
                    let is_relay = |device: &usize| *device != flow.src && !flow.to.contains(device);
                    let relays = std::iter::successors(Some(from), |device| Some(before(*device))).take_while(is_relay);
                    let mut earlier: SmallVec<[DeviceId; 1]> = relays.skip(1).map(|device| network.devices[device]).collect();
                    earlier.reverse();
                    let bytes = chunks.iter().map(|chunk| chunk.bytes).sum::<u64>();
                    Arc::make_mut(&mut transfers[transfer as usize].paths).push(PathPlan {
                        via: (from != flow.src).then(|| network.devices[from]),
                        earlier,
                        offset: chunks[0].offset,
                        bytes,
                        chunks: chunks.len() as u32,
                        chunk_bytes: share.chunk_bytes,
                        slots: if is_relay(&from) { share.slots } else { 0 },
                        mechanism: Mechanism::Copy,
                        seconds: self.alone(share, bytes),
                    });
                }
            }
        }
        transfers
    }

    /// Returns the modelled time in which a share's tree delivers this number of bytes, in seconds, if no other copies use its links.
    fn alone(&self, share: &Share, bytes: u64) -> f64 {
        let (costs, flow) = (self.machine.costs(), &self.flows[share.group]);
        let slowest = share.tree.iter().flat_map(|hop| self.network.work_of(flow, *hop)).map(|work| work.1).fold(0.0, f64::max);
        let before = f64::from(depth(&share.tree) - 1) * (costs.chunk_via_gpu + share.chunk_bytes.min(bytes) as f64 * slowest);
        costs.copy + before + bytes as f64 * slowest
    }

    /// Returns trees with the number of bytes that each distributes. Chunks are assigned later by [`Problem::give_chunks`]. Returns `None`
    /// if a group has no tree or the solver fails.
    fn shares(&self, attempt: &Try, priced: &[Vec<Tree>]) -> Option<Vec<Share>> {
        let Problem { machine, groups, network, flows, busy, .. } = self;
        let Try { trees, least_share, .. } = attempt;
        if *trees == Candidates::Rounds {
            return self.blocks(attempt);
        }
        let resources = machine.resources().len();
        let mut found = if *trees == Candidates::Priced { priced.to_vec() } else { vec![Vec::new(); flows.len()] };
        for (flow, found) in flows.iter().zip(&mut found) {
            // The star, and for each member the tree in which it forwards the data to all others. Behind a switch these are as fast as any
            // trees, and have at most two successive copies.
            let hub = |hub: &usize| {
                let others = flow.to.iter().filter(|member| *member != hub).map(|member| (*hub, *member));
                std::iter::once((flow.src, *hub)).chain(others).collect()
            };
            let star: Tree = flow.to.iter().map(|member| (flow.src, *member)).collect();
            for tree in flow.to.iter().map(hub).chain([star]) {
                if tree.iter().all(|(from, to)| network.joins(*from, *to)) && !found.contains(&tree) {
                    found.push(tree);
                }
            }
            // No copy engine copies between host memories.
            let is_host = |device: usize| network.devices[device].is_host();
            found.retain(|tree: &Tree| tree.iter().all(|(from, to)| !is_host(*from) || !is_host(*to)));
            if found.is_empty() {
                return None;
            }
        }
        let costs = machine.costs();
        let demands: Vec<f64> = groups.iter().map(|group| group.bytes() as f64).chain([groups[0].bytes() as f64]).collect();
        let column = |transfer: usize, depth: u32, work: SmallVec<[(u32, f64); 8]>| {
            let slowest = work.iter().map(|work| work.1).fold(0.0, f64::max);
            // Among trees that are equally good, prefers the one with fewer successive copies.
            let link_time = work.iter().map(|work| work.1).sum::<f64>() * (1.0 + f64::from(depth));
            let fixed = f64::from(depth) * costs.chunk_via_gpu;
            Column { transfer: transfer as u32, fixed, line: (fixed, slowest), work, link_time }
        };
        let mut bytes;
        loop {
            // The other transfers of the batch take a fixed time, whatever the trees do.
            let rest = (0..)
                .zip(busy)
                .filter(|(_, seconds)| **seconds > 0.0)
                .map(|(resource, seconds)| (resource, seconds / demands[groups.len()]));
            let rest = column(groups.len(), 0, rest.collect());
            let own: Vec<Vec<Column>> = flows
                .iter()
                .zip(&found)
                .enumerate()
                .map(|(at, (flow, trees))| trees.iter().map(|tree| column(at, depth(tree), network.work(flow, tree).into())).collect())
                .collect();
            // If a resource that all trees share limits the time, many divisions are equally good, and the linear program returns an uneven
            // one. The mean over several orders of the trees is as good and is even.
            let turns = if groups.len() == 1 { groups[0].members.len() } else { 2 };
            bytes = vec![0.0; own.iter().map(Vec::len).sum()];
            for turn in 0..turns {
                let by = |columns: &Vec<Column>| turn * columns.len() / turns;
                let rotated = own.iter().flat_map(|columns| columns[by(columns)..].iter().chain(&columns[..by(columns)]).cloned());
                let columns: Vec<Column> = rotated.chain([rest.clone()]).collect();
                let mut found = split(&columns, &demands, resources).ok()?.into_iter();
                let mut first = 0;
                for columns in &own {
                    for at in 0..columns.len() {
                        bytes[first + (at + by(columns)) % columns.len()] += found.next()? / turns as f64;
                    }
                    first += columns.len();
                }
            }
            // Trees with too few bytes are removed, and the data is divided again among the rest.
            let mut at = 0;
            let mut has_crumbs = false;
            for (group, trees) in groups.iter().zip(&mut found) {
                let before = trees.len();
                let own = &bytes[at..at + before];
                let largest = own.iter().copied().fold(0.0, f64::max);
                let mut shares = own.iter();
                trees.retain(|_| shares.next().is_some_and(|share| *share >= (*least_share * group.bytes() as f64).min(largest)));
                has_crumbs |= trees.len() < before;
                at += before;
            }
            if !has_crumbs {
                break;
            }
        }
        let mut result = Vec::new();
        let mut next = bytes.iter();
        for (number, (group, trees)) in groups.iter().zip(found).enumerate() {
            let (mut left, count) = (group.bytes(), trees.len());
            for (at, tree) in trees.into_iter().enumerate() {
                let share = (*next.next()? as u64 / GRAIN * GRAIN).min(left);
                let bytes = if at + 1 == count { left } else { share };
                left -= bytes;
                if bytes > 0 {
                    result.push(Share::new(number, tree, bytes));
                }
            }
        }
        Some(result)
    }

    /// Returns the number of blocks for which the model predicts the shortest broadcast of `bytes` in rounds. With `count` blocks, the rounds
    /// take `(count + later) * (link_time / count + chunk_via_gpu)`: `later` is the number of rounds after the source has sent its last
    /// block, `link_time` is the time of all bytes on the slowest link, and `chunk_via_gpu` is the fixed time of a block. To issue all
    /// copies takes `count * issue`. The broadcast takes the longer of these two times. The optimum is the count with the shortest rounds,
    /// or the count at which both times are equal.
    fn block_count(&self, flow: &Commodity, bytes: u64) -> f64 {
        let costs = self.machine.costs();
        let later = f64::from((flow.to.len() + 1).next_power_of_two().ilog2()) - 1.0;
        let slowest = self.network.work_of(flow, (flow.src, flow.to[0])).iter().map(|work| work.1).fold(0.0, f64::max);
        let (link_time, issue) = (bytes as f64 * slowest, self.options.issue(costs) * flow.to.len() as f64);
        let by_rounds = (later * link_time / costs.chunk_via_gpu).sqrt();
        // Multiplied by the count, the equation of both times is: count² * (issue - chunk_via_gpu) = count * linear + later * link_time.
        let (further, linear) = (issue - costs.chunk_via_gpu, link_time + later * costs.chunk_via_gpu);
        let by_issue = (linear + (linear * linear + 4.0 * further * later * link_time).sqrt()) / (2.0 * further);
        if further > 0.0 { by_rounds.min(by_issue) } else { by_rounds }
    }

    /// Returns the trees of [`Candidates::Rounds`]. The number of blocks is [`Problem::block_count`] multiplied by [`Try::chunks`], unless
    /// the options set it. Returns `None` if a direct copy between two members does not exist.
    fn blocks(&self, attempt: &Try) -> Option<Vec<Share>> {
        let Problem { options, groups, network, flows, .. } = self;
        let mut shares = Vec::new();
        for (number, (group, flow)) in groups.iter().zip(flows).enumerate() {
            let (order, bytes) = (in_order(flow), group.bytes());
            let count = self.block_count(flow, bytes) * attempt.chunks;
            let block = options.chunk(DeviceId::gpu(0), bytes).unwrap_or(bytes.div_ceil(count.round().max(1.0) as u64));
            let block = block.max(bytes.div_ceil(MOST_BLOCKS)).next_multiple_of(GRAIN);
            let count = bytes.div_ceil(block);
            for (at, BlockTree { mut tree, rounds }) in (0..).zip(broadcast(order.len(), count as usize)) {
                tree.iter_mut().for_each(|(from, to)| (*from, *to) = (order[*from], order[*to]));
                if tree.iter().any(|(from, to)| !network.joins(*from, *to)) {
                    return None;
                }
                shares.push(Share { steps: rounds, ..Share::new(number, tree, block.min(bytes - at * block)) });
            }
        }
        Some(shares)
    }

    /// Cuts the data of each tree into chunks that fit its staging rings and those of the other transfers. Returns `None` if the staging
    /// memory is too small.
    fn give_chunks(&self, shares: &mut [Share], by: &Try) -> Option<()> {
        let Problem { options, groups, network, flows, rest, .. } = self;
        let mut rings = vec![0; network.devices.len()];
        shares.iter().flat_map(|share| share.relays(&flows[share.group])).for_each(|device| rings[device] += 1);
        let hosts = (0..rings.len()).filter(|device| network.devices[*device].is_host()).map(|device| rings[device]).sum::<u64>();
        let room = |device: usize| {
            let left = options.staging_bytes.saturating_sub(rest.staging_bytes(network.devices[device]));
            let own = left / rings[device];
            if network.devices[device].is_host() { own.min(HOST_RINGS / hosts) } else { own }
        };
        // For each pair of devices, the number of trees with a copy from the first device to the second.
        let mut users: ahash::HashMap<(usize, usize), u32> = ahash::HashMap::default();
        shares.iter().flat_map(|share| &share.tree).for_each(|hop| *users.entry(*hop).or_default() += 1);
        // For each group, the next source and offset to assign to a chunk.
        let mut begin = vec![(0, 0); groups.len()];
        for share in shares {
            let (group, flow) = (&groups[share.group], &flows[share.group]);
            let room = share.relays(flow).map(room).min().unwrap_or(u64::MAX);
            let is_alone = share.tree.len() == 1 && users[&share.tree[0]] == 1;
            let wanted = self.chunk_bytes(share, by, is_alone);
            // A ring has as few slots as hold all chunks, or else the largest number. A chunk also ends where a source ends.
            let chunk_bytes = |slots: u32| wanted.min(room / u64::from(slots) / GRAIN * GRAIN);
            let is_enough =
                |slots: &u32| chunk_bytes(*slots) * u64::from(*slots).saturating_sub(group.sources.len() as u64 - 1) >= share.bytes;
            share.slots = (1..SLOTS).find(is_enough).unwrap_or(SLOTS);
            share.chunk_bytes = chunk_bytes(share.slots);
            if share.chunk_bytes == 0 {
                return None;
            }
            let (source, offset) = &mut begin[share.group];
            let mut left = share.bytes;
            share.chunks.clear();
            while left > 0 {
                let chunk = Chunk {
                    source: *source,
                    offset: *offset,
                    bytes: left.min(share.chunk_bytes).min(group.sources[*source].bytes - *offset),
                };
                (left, *offset) = (left - chunk.bytes, *offset + chunk.bytes);
                if *offset == group.sources[*source].bytes {
                    (*source, *offset) = (*source + 1, 0);
                }
                share.chunks.push(chunk);
            }
        }
        Some(())
    }

    /// Returns the chunk size of a tree, in bytes. The number of chunks is the square root of (time of the copies before the last / time of
    /// a synchronisation), times [`Try::chunks`], unless the options set it. The data is one chunk if no device forwards it and there is
    /// one lane (internal stream) between two devices, if the tree distributes one block, or if `is_alone`. `is_alone` is true if the tree
    /// is a single copy and no other tree copies between its two devices.
    fn chunk_bytes(&self, share: &Share, by: &Try, is_alone: bool) -> u64 {
        let Problem { machine, options, network, flows, .. } = self;
        let (Share { tree, bytes, .. }, flow) = (share, &flows[share.group]);
        let hops = depth(tree).saturating_sub(1).max(by.lanes as u32 - 1);
        if hops == 0 || is_alone || by.trees == Candidates::Rounds {
            return *bytes;
        }
        let slowest = tree.iter().flat_map(|hop| network.work_of(flow, *hop)).map(|work| work.1).fold(0.0, f64::max);
        let seconds = *bytes as f64 * slowest;
        let best = (f64::from(hops) * seconds / machine.costs().chunk_via_gpu).sqrt();
        // A single chunk is forwarded only when all of it has arrived.
        let least = if best < 2.0 { 1 } else { 2 };
        let count = ((best * by.chunks) as u64).clamp(least, MOST_CHUNKS);
        let chunk = bytes.div_ceil(count).next_multiple_of(GRAIN);
        let relays = || share.relays(flow).map(|device| network.devices[device]);
        let via = relays().find(|device| device.is_host()).or_else(|| relays().next()).unwrap_or(DeviceId::gpu(0));
        options.chunk(via, *bytes).unwrap_or(chunk).min(*bytes)
    }

    /// Returns the program of the batch: that of the other transfers, followed by the chunks of all trees, which run concurrently.
    fn lowered(&self, shares: &[Share], attempt: &Try) -> Program {
        let Problem { batch, groups, network, flows, rest, .. } = self;
        let mut program = rest.clone();
        program.transfers = batch.iter().map(|shape| shape.bytes).collect();
        program.sources = batch.iter().map(|shape| shape.source).collect();
        // Operations are sorted by the time at which they would start if all chunks of a tree took equally long, and all trees finished
        // together. A lane runs in order, so a chunk that arrives late must not come before one that has arrived.
        let mut order: Vec<(f64, usize, usize, usize)> = Vec::new();
        for (at, share) in shares.iter().enumerate() {
            let chunks = share.chunks.len();
            for chunk in 0..chunks {
                let begin = |step: u32| (chunk + step as usize - 1) as f64 / chunks as f64;
                order.extend(share.steps.iter().enumerate().map(|(hop, step)| (begin(*step), at, chunk, hop)));
            }
        }
        // The sort is stable, so the copy that brings a chunk to a device comes before the copy that forwards it.
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut lanes: Vec<PairLanes> = Vec::new();
        let mut rings: Vec<((usize, usize), RingId)> = Vec::new();
        for (at, share) in shares.iter().enumerate() {
            for relay in share.relays(&flows[share.group]) {
                rings.push(((at, relay), RingId(program.rings.len() as u32)));
                program.rings.push(Ring { device: network.devices[relay], slots: share.slots, slot_bytes: share.chunk_bytes });
            }
        }
        // For each tree, chunk and device: the operation that brings the chunk there, and those that read it from a staging slot.
        let mut arrived: ahash::HashMap<(usize, usize, usize), OpId> = ahash::HashMap::default();
        let mut read: ahash::HashMap<(usize, usize, usize), SmallVec<[OpId; 2]>> = ahash::HashMap::default();
        // For each device, the last operation that brings a block to it.
        let mut last: ahash::HashMap<usize, OpId> = ahash::HashMap::default();
        for (_, at, chunk, hop) in order {
            let Share { group, tree, chunks, slots, .. } = &shares[at];
            let (flow, (from, to)) = (&flows[*group], tree[hop]);
            let Chunk { source, offset, bytes } = chunks[chunk];
            let transfers = &groups[*group].sources[source].transfers;
            let place = |device: usize| match flow.to.iter().position(|member| *member == device) {
                Some(member) => Place::Destination { transfer: transfers[member], offset },
                None => {
                    let ring = rings.iter().find(|ring| ring.0 == (at, device)).map_or(RingId(u32::MAX), |ring| ring.1);
                    Place::Slot { ring, slot: chunk as u32 % slots }
                }
            };
            let to_member = flow.to.iter().position(|member| *member == to).unwrap_or(0);
            let (from_place, to_place) =
                (if from == flow.src { Place::Source { transfer: transfers[to_member], offset } } else { place(from) }, place(to));
            // In rounds, a device sends one block at a time, so all its copies share a lane.
            let pair = (from, if attempt.trees == Candidates::Rounds { from } else { to });
            let pair = lanes.iter().position(|lanes| lanes.pair == pair).unwrap_or_else(|| {
                lanes.push(PairLanes { pair, own: SmallVec::new(), chunks: 0 });
                lanes.len() - 1
            });
            let PairLanes { own, chunks, .. } = &mut lanes[pair];
            if own.len() < attempt.lanes {
                own.push(LaneId(program.lanes.len() as u32));
                program.lanes.push(Lane::new(copying_device(network.devices[from], network.devices[to])));
            }
            let lane = own[*chunks % attempt.lanes];
            *chunks += 1;
            let op = OpId(program.ops.len() as u32);
            let mut after: SmallVec<[OpId; 2]> = arrived.get(&(at, chunk, from)).copied().into_iter().collect();
            if let (Place::Slot { .. }, Some(before)) = (to_place, chunk.checked_sub(*slots as usize)) {
                after.extend(read.remove(&(at, before, to)).into_iter().flatten());
            }
            if let Place::Slot { .. } = from_place {
                read.entry((at, chunk, from)).or_default().push(op);
            }
            if attempt.trees == Candidates::Rounds {
                // If a device received two blocks concurrently, both would arrive late, and so would the blocks of all later rounds.
                after.extend(last.insert(to, op).filter(|_| groups.len() == 1));
            }
            arrived.insert((at, chunk, to), op);
            let copies = smallvec![Copy { from: from_place, to: to_place, bytes }];
            program.ops.push(Op { lane, mechanism: Mechanism::Copy, copies, after });
        }
        program
    }
}
