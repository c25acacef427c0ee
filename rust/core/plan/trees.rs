//! Bytes that pass several devices on their way: one source for many destinations, which pass on what they have received, and paths over several
//! relays.
//!
//! Transfers of a batch with the same source ([`Shape::source`]) make a group. Its bytes are divided among *trees*: in each the source sends its part
//! to one device or several, and these to others, until all members have it. A member's own memory is the staging: a chunk is passed on as soon as
//! it is there. A device that is no member passes chunks on through a ring. A star (the source sends to all) is one tree of many, and a chain another;
//! scatter and exchange is as many trees as there are destinations, each of which is the first of one. A transfer alone is a group of one member, and
//! its trees are chains: worth it where GPUs are joined so unevenly that one relay leaves much to gain.
//!
//! Which trees there are to choose from, prices tell ([`network`](super::network)). How many bytes each gets is the linear program of [`split`]: a tree
//! draws on the resources of all its copies, and the trees of all groups, and what the rest of the batch moves, share them. Whether it is done at all
//! is the simulator's word: it plays both programs, because a chain of chunks is what the planner's model of single paths does not have.

use super::canonical::renamed;
use super::executor;
use super::judge::Judge;
use super::lower::copying_device;
use super::network::{Commodity, Draws, Network, Tree};
use super::options::{Options, Passing};
use super::planned::{PathPlan, Plan, TransferPlan};
use super::planner::Origin;
use super::split::{Column, split};
use crate::model::{GRAIN, HOST_RINGS, PathModel, SLOTS};
use crate::program::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId, Shape};
use crate::topology::{DeviceId, LinkId, LinkKind, Machine, MemoryKind};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Smaller sources need no number ([`Shape::source`]): what passing on costs is two hand-overs at least.
pub const LEAST_BYTES: u64 = 1 << 20;

/// What the simulator judges: more trees are nearer to what links carry, fewer and larger chunks wait less for each other.
struct Try {
    trees: Candidates,
    /// A tree with a smaller part of its group's bytes is not worth its operations.
    least_share: f64,
    /// How many chunks, as a part of what balances hand-overs against the copies before the last.
    chunks: f64,
    /// Lanes between two devices, which take chunks by turns: while one waits until its chunk is handed over, the other has the link. With two, what
    /// goes directly is cut too: a long copy would keep a lane from the chunks behind it.
    lanes: usize,
}

/// Trees among which a group's bytes are divided.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Candidates {
    /// Those that prices have found, and those of `Hubs`.
    Priced,
    /// The star, and trees of one member that passes all on.
    Hubs,
    /// One tree, in which each passes all on to one other.
    Chain,
    /// Two trees as deep as the logarithm of the members: each member passes half of the bytes on to two others and takes the other half for itself
    /// (Sanders, Speck and Träff 2009), so that what comes before the last chunk hardly grows with their number.
    Pair,
}

/// Each is the best of some presets and random machines.
const TRIES: [Try; 7] = [
    Try { trees: Candidates::Priced, least_share: 0.02, chunks: 1.0, lanes: 2 },
    Try { trees: Candidates::Priced, least_share: 0.02, chunks: 0.5, lanes: 2 },
    Try { trees: Candidates::Priced, least_share: 0.05, chunks: 1.5, lanes: 2 },
    Try { trees: Candidates::Hubs, least_share: 0.02, chunks: 1.0, lanes: 1 },
    Try { trees: Candidates::Chain, least_share: 0.0, chunks: 1.0, lanes: 1 },
    Try { trees: Candidates::Pair, least_share: 0.0, chunks: 1.0, lanes: 1 },
    Try { trees: Candidates::Pair, least_share: 0.0, chunks: 2.0, lanes: 1 },
];

/// Devices of a machine up to which prices are sought for trees, times the flows: what that takes grows with the cube of the former. Beyond are racks
/// behind switches, where trees that need no search are as good.
const MOST_PRICED: usize = 20;
const MOST_FLOWS: usize = 64;

/// So near to what capacities allow, in parts of it, nothing else is tried: lists of hundreds of tensors are simulated once and not five times.
const ENOUGH: f64 = 1.02;

/// Most of the bound that issuing all copies may take: one thread issues them, and links wait for a copy that it has not reached.
const MOST_ISSUED: f64 = 1.1;

/// Chunks of a tree's bytes.
const MOST_CHUNKS: u64 = 128;

/// Sources on one device, each of which goes to the same devices: what there is to be known of them as of one.
#[derive(Clone)]
struct SourceGroup {
    src: DeviceId,
    /// All different, and none of them `src`.
    members: Vec<DeviceId>,
    sources: Vec<Source>,
}

/// Transfers with the same source: one for each member.
#[derive(Clone)]
struct Source {
    bytes: u64,
    transfers: Vec<u32>,
}

/// The groups of a batch of which several transfers can pass on what they have. Members that cannot are left to the rest of the batch.
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

/// Adds other transfers, all of the same two devices as a group: those that no copy brings there, and those that take longer than two hand-overs. Not
/// these where measurements say how paths over one relay are divided.
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

/// How many NVLinks join two devices in a row; `None` where other links are between them. Through a switch they are two.
fn nvlinks(machine: &Machine, from: DeviceId, to: DeviceId) -> Option<usize> {
    let is_nvlink = |link: &LinkId| machine.topology().links[link.0 as usize].kind == LinkKind::Nvlink;
    machine.route(from, to).filter(|route| route.links.iter().all(is_nvlink)).map(|route| route.links.len())
}

impl SourceGroup {
    /// Of all sources.
    fn bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.bytes).sum()
    }

    fn flow(&self, network: &Network) -> Option<Commodity> {
        let to: Option<Vec<usize>> = self.members.iter().map(|member| network.number(*member)).collect();
        let flow = Commodity { src: network.number(self.src)?, to: to?, bytes: self.bytes() as f64 };
        flow.to.iter().all(|to| network.reaches(&flow, *to)).then_some(flow)
    }
}

/// Copies that a byte is in before it is where each copy of a tree brings it.
fn depths(tree: &Tree) -> Vec<u32> {
    let mut depths: Vec<u32> = Vec::with_capacity(tree.len());
    for (from, _) in tree {
        let before = tree[..depths.len()].iter().position(|hop| hop.1 == *from);
        depths.push(1 + before.map_or(0, |before| depths[before]));
    }
    depths
}

/// Before it is everywhere.
fn depth(tree: &Tree) -> u32 {
    depths(tree).into_iter().max().unwrap_or(0)
}

fn work_of(machine: &Machine, from: DeviceId, to: DeviceId) -> Option<Draws> {
    let model = PathModel::new(machine, &[machine.route(from, to)?]);
    let seconds =
        |(resource, weight): &(crate::topology::ResourceId, f64)| (resource.0, weight / machine.resources()[resource.0 as usize].capacity);
    Some(model.weights.iter().map(seconds).collect())
}

/// Seconds that a program keeps each resource busy.
pub(super) fn load(machine: &Machine, program: &Program, batch: &[Shape]) -> Vec<f64> {
    let mut load = vec![0.0; machine.resources().len()];
    let device = |place| program.device(batch, place);
    for copy in program.ops.iter().flat_map(|op| &op.copies) {
        for (resource, seconds) in work_of(machine, device(copy.from), device(copy.to)).into_iter().flatten() {
            load[resource as usize] += seconds * copy.bytes as f64;
        }
    }
    load
}

/// A tree, and what it moves of its group.
struct Share {
    group: usize,
    tree: Tree,
    bytes: u64,
    /// In the order of the sources.
    chunks: Vec<Chunk>,
    chunk_bytes: u64,
}

/// Lanes between two devices, and how many chunks they have.
struct PairLanes {
    pair: (usize, usize),
    own: SmallVec<[LaneId; 2]>,
    chunks: usize,
}

#[derive(Copy, Clone)]
struct Chunk {
    source: usize,
    offset: u64,
    bytes: u64,
}

/// Groups of a batch that are to move by trees, beside the rest of it.
struct Problem<'a> {
    machine: &'a Machine,
    batch: &'a [Shape],
    options: &'a Options,
    groups: &'a [SourceGroup],
    network: Network,
    /// One for each group.
    flows: Vec<Commodity>,
    /// The program of the rest, and the seconds that it keeps each resource busy.
    rest: Program,
    busy: Vec<f64>,
    /// Seconds below which no trees move the batch; 0 if no bound is known.
    bound: f64,
}

/// Proposes plans in which bytes are passed on: by destinations of the same source, and then over several relays as well. `plan` plans what is of no
/// group. Seconds below which the batch cannot be done by any, as far as that is known.
pub(super) fn propose(
    machine: &Machine,
    batch: &[Shape],
    options: &Options,
    judge: &mut Judge<'_, Origin>,
    plan: impl Fn(&[Shape], &Options) -> Option<Plan>,
) -> f64 {
    let mut bound = 0.0;
    let groups = groups(batch, options);
    let many = groups.iter().map(|group| group.sources.len()).sum::<usize>();
    let pairs = with_pairs(groups.clone(), machine, batch, options);
    let all = pairs.iter().map(|group| group.sources.len()).sum::<usize>();
    // Each taker by itself as well: what is passed on is not always faster.
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
            bound = propose_trees(machine, batch, options, &groups, rest_plan.as_ref(), judge).unwrap_or(0.0);
        }
    }
    bound
}

/// Proposes that groups move by trees, and all else as in `rest`, the plan of the batch without these transfers.
fn propose_trees(
    machine: &Machine,
    batch: &[Shape],
    options: &Options,
    groups: &[SourceGroup],
    rest: Option<&Plan>,
    judge: &mut Judge<'_, Origin>,
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
    let (trees, bound) = explored.map_or((Vec::new(), 0.0), |explored| (explored.trees, explored.seconds));
    let problem = Problem { machine, batch, options, groups, network, flows, rest: program, busy, bound };
    let is_behind_switch = groups.len() == 1 && groups[0].members.iter().all(|member| nvlinks(machine, groups[0].src, *member) > Some(1));
    for attempt in &TRIES {
        // So near to the bound nothing is gained.
        if judge.is_beaten(bound * ENOUGH) {
            break;
        }
        // Each of many members would be the hub of a tree.
        if matches!(attempt.trees, Candidates::Priced | Candidates::Hubs) && !is_priced {
            continue;
        }
        let scatters = matches!(attempt.trees, Candidates::Priced | Candidates::Hubs);
        let is_slowed = is_behind_switch && options.passing == Passing::CopyEngines && scatters;
        problem.offer(attempt, &trees, if is_slowed { machine.costs().scattered } else { 1.0 }, rest, judge);
    }
    Some(bound)
}

/// Two trees from the first of some devices to all others, each of which is a leaf of one.
fn pair_of_trees(order: &[usize]) -> Vec<Tree> {
    let members = order.len() - 1;
    // Between two places of a row the one whose number has most factors of two is above the others: even numbers pass on.
    fn join(tree: &mut Tree, from: usize, (first, last): (usize, usize), name: &impl Fn(usize) -> usize) {
        if let Some(top) = (first..=last).max_by_key(|place| (place.trailing_zeros(), std::cmp::Reverse(*place))) {
            tree.push((from, name(top)));
            join(tree, name(top), (first, top - 1), name);
            join(tree, name(top), (top + 1, last), name);
        }
    }
    let (mut even, mut odd) = (Tree::new(), Tree::new());
    join(&mut even, order[0], (1, members), &|place| order[place]);
    // The other way round even numbers are odd, or one further where they are not.
    join(&mut odd, order[0], (1, members), &|place| order[if members % 2 == 0 { members + 1 - place } else { place % members + 1 }]);
    vec![even, odd]
}

/// The transfers that are of no group.
fn rest_of(batch: &[Shape], groups: &[SourceGroup]) -> Vec<u32> {
    let mut is_member = vec![false; batch.len()];
    let members = groups.iter().flat_map(|group| &group.sources).flat_map(|source| &source.transfers);
    members.for_each(|transfer| is_member[*transfer as usize] = true);
    (0..batch.len() as u32).filter(|transfer| !is_member[*transfer as usize]).collect()
}

impl Share {
    /// Devices that pass its bytes on without wanting them.
    fn relays(&self, flow: &Commodity) -> impl Iterator<Item = usize> {
        self.tree.iter().map(|hop| hop.1).filter(|device| !flow.to.contains(device))
    }
}

impl Problem<'_> {
    /// Proposes what an attempt makes, which machines do at this part of the simulated rate.
    fn offer(&self, attempt: &Try, trees: &[Vec<Tree>], part: f64, rest: Option<&Plan>, judge: &mut Judge<'_, Origin>) -> Option<()> {
        let mut shares = self.shares(attempt, trees)?;
        // No transfer takes more paths than it may.
        let paths = |group: usize| shares.iter().filter(|share| share.group == group).count();
        if shares.iter().all(|share| depth(&share.tree) < 2)
            || (0..self.groups.len()).any(|group| paths(group) > self.options.max_paths as usize)
        {
            return None;
        }
        self.give_chunks(&mut shares, attempt)?;
        let copies = |shares: &[Share]| shares.iter().map(|share| share.chunks.len() * share.tree.len()).sum::<usize>();
        let issued = copies(&shares) as f64 * executor::issue(self.options, self.machine.costs()) / (MOST_ISSUED * self.bound);
        if issued > 1.0 && issued.is_finite() {
            shares.iter_mut().for_each(|share| share.chunks.clear());
            self.give_chunks(&mut shares, &Try { chunks: attempt.chunks / issued, ..*attempt })?;
        }
        if judge.is_too_much(copies(&shares) as u64) {
            return None;
        }
        let program = self.lowered(&shares, attempt.lanes);
        judge.offer_at(part, program, || Origin::Transfers(self.transfers(&shares, rest)));
        Some(())
    }

    /// The paths of all transfers.
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
                        slots: if is_relay(&from) { SLOTS } else { 0 },
                        mechanism: Mechanism::Copy,
                        seconds: self.alone(share, bytes),
                    });
                }
            }
        }
        transfers
    }

    /// Seconds for so many bytes of a share if its tree had its links to itself.
    fn alone(&self, share: &Share, bytes: u64) -> f64 {
        let (costs, flow) = (self.machine.costs(), &self.flows[share.group]);
        let slowest = share.tree.iter().flat_map(|hop| self.network.work_of(flow, *hop)).map(|work| work.1).fold(0.0, f64::max);
        let before = f64::from(depth(&share.tree) - 1) * (costs.chunk_via_gpu + share.chunk_bytes.min(bytes) as f64 * slowest);
        costs.copy + before + bytes as f64 * slowest
    }

    /// Which trees there are, and how many bytes of its group each moves. Chunks are given to them afterwards.
    fn shares(&self, Try { trees, least_share, .. }: &Try, priced: &[Vec<Tree>]) -> Option<Vec<Share>> {
        let Problem { machine, groups, network, flows, busy, .. } = self;
        let resources = machine.resources().len();
        let mut found = if *trees == Candidates::Priced { priced.to_vec() } else { vec![Vec::new(); flows.len()] };
        for (flow, found) in flows.iter().zip(&mut found) {
            // Whatever they cost: the star, and of each member the tree in which it passes all on. Behind a switch these are as good as any, and two copies deep.
            let hub = |hub: &usize| {
                let others = flow.to.iter().filter(|member| *member != hub).map(|member| (*hub, *member));
                std::iter::once((flow.src, *hub)).chain(others).collect()
            };
            let star: Tree = flow.to.iter().map(|member| (flow.src, *member)).collect();
            // Each to the member behind it, so that chains of sources on all GPUs share links evenly.
            let (before, behind) = flow.to.split_at(flow.to.partition_point(|member| *member < flow.src));
            let order = [&[flow.src], behind, before].concat();
            let chain: Tree = order.windows(2).map(|hop| (hop[0], hop[1])).collect();
            let fixed: Vec<Tree> = match trees {
                Candidates::Chain => vec![chain],
                Candidates::Pair => pair_of_trees(&order),
                _ => flow.to.iter().map(hub).chain([star]).collect(),
            };
            for tree in fixed {
                if tree.iter().all(|(from, to)| network.joins(*from, *to)) && !found.contains(&tree) {
                    found.push(tree);
                }
            }
            if *trees == Candidates::Pair && found.len() < 2 {
                return None;
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
            // Of trees that are as good, the one that is less deep.
            let link_time = work.iter().map(|work| work.1).sum::<f64>() * (1.0 + f64::from(depth));
            let fixed = f64::from(depth) * costs.chunk_via_gpu;
            Column { transfer: transfer as u32, fixed, line: (fixed, slowest), work, link_time }
        };
        let mut bytes;
        loop {
            // What the rest of the batch does takes its time whatever the trees do.
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
            // Where something that all share is the limit, many divisions are as good, and the program's own is one-sided: with each tree as the one that
            // has what the others leave, the mean of all is as good and even.
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
            // Crumbs go, and what they had is divided once more.
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
                    result.push(Share { group: number, tree, bytes, chunks: Vec::new(), chunk_bytes: 0 });
                }
            }
        }
        Some(result)
    }

    /// Cuts what each tree moves into chunks that its rings have room for beside those of the rest of the batch. `None` where there is no room.
    fn give_chunks(&self, shares: &mut [Share], by: &Try) -> Option<()> {
        let Problem { options, groups, network, flows, rest, .. } = self;
        let mut rings = vec![0; network.devices.len()];
        shares.iter().flat_map(|share| share.relays(&flows[share.group])).for_each(|device| rings[device] += 1);
        let hosts = (0..rings.len()).filter(|device| network.devices[*device].is_host()).map(|device| rings[device]).sum::<u64>();
        let room = |device: usize| {
            let left = options.staging_bytes.saturating_sub(rest.staging_bytes(network.devices[device]));
            let own = left / (rings[device] * u64::from(SLOTS));
            if network.devices[device].is_host() { own.min(HOST_RINGS / (hosts * u64::from(SLOTS))) } else { own }
        };
        let mut users: ahash::HashMap<(usize, usize), u32> = ahash::HashMap::default();
        shares.iter().flat_map(|share| &share.tree).for_each(|hop| *users.entry(*hop).or_default() += 1);
        // Bytes of each group that are still to be given out: of which source, from where on.
        let mut begin = vec![(0, 0); groups.len()];
        for share in shares {
            let (group, flow) = (&groups[share.group], &flows[share.group]);
            let most = share.relays(flow).map(room).min().unwrap_or(u64::MAX) / GRAIN * GRAIN;
            if most == 0 {
                return None;
            }
            let is_alone = share.tree.len() == 1 && users[&share.tree[0]] == 1;
            share.chunk_bytes = self.chunk_bytes(share, by, is_alone).min(most);
            let (source, offset) = &mut begin[share.group];
            let mut left = share.bytes;
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

    /// Bytes of a chunk, all where what it moves passes nothing and `is_alone` between its devices: the root of what the copies before the last take over what each further chunk costs them.
    fn chunk_bytes(&self, share: &Share, by: &Try, is_alone: bool) -> u64 {
        let Problem { machine, options, network, flows, .. } = self;
        let (Share { tree, bytes, .. }, flow) = (share, &flows[share.group]);
        let hops = depth(tree).saturating_sub(1).max(by.lanes as u32 - 1);
        if hops == 0 || is_alone {
            return *bytes;
        }
        let slowest = tree.iter().flat_map(|hop| network.work_of(flow, *hop)).map(|work| work.1).fold(0.0, f64::max);
        let seconds = *bytes as f64 * slowest;
        let best = ((f64::from(hops) * seconds / machine.costs().chunk_via_gpu).sqrt() * by.chunks) as u64;
        let chunk = bytes.div_ceil(best.clamp(1, MOST_CHUNKS)).next_multiple_of(GRAIN);
        let relays = || share.relays(flow).map(|device| network.devices[device]);
        let via = relays().find(|device| device.is_host()).or_else(|| relays().next()).unwrap_or(DeviceId::gpu(0));
        options.chunk(via, *bytes).unwrap_or(chunk).min(*bytes)
    }

    /// The program: that of the rest of the batch, and the chunks of all trees, which go on together.
    fn lowered(&self, shares: &[Share], most_lanes: usize) -> Program {
        let Problem { batch, groups, network, flows, rest, .. } = self;
        let mut program = rest.clone();
        program.transfers = batch.iter().map(|shape| shape.bytes).collect();
        program.sources = batch.iter().map(|shape| shape.source).collect();
        // By when its turn comes if all chunks of a tree take equally long, and all trees as long as each other: a lane goes on in order, and must not have a
        // chunk that has far to go before one that is there.
        let mut order: Vec<(f64, usize, usize, usize)> = Vec::new();
        for (at, share) in shares.iter().enumerate() {
            let (chunks, depths) = (share.chunks.len(), depths(&share.tree));
            for chunk in 0..chunks {
                order.extend(
                    depths.iter().enumerate().map(|(hop, depth)| ((chunk + *depth as usize) as f64 / chunks as f64, at, chunk, hop)),
                );
            }
        }
        // Stable: of one chunk, whoever passes it on stands before whom it goes to.
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut lanes: Vec<PairLanes> = Vec::new();
        let mut rings: Vec<((usize, usize), RingId)> = Vec::new();
        for (at, share) in shares.iter().enumerate() {
            for relay in share.relays(&flows[share.group]) {
                rings.push(((at, relay), RingId(program.rings.len() as u32)));
                program.rings.push(Ring { device: network.devices[relay], slots: SLOTS, slot_bytes: share.chunk_bytes });
            }
        }
        // Of each chunk and device, who brings it there, and who has read it in a ring.
        let mut arrived: ahash::HashMap<(usize, usize, usize), OpId> = ahash::HashMap::default();
        let mut read: ahash::HashMap<(usize, usize, usize), SmallVec<[OpId; 2]>> = ahash::HashMap::default();
        for (_, at, chunk, hop) in order {
            let Share { group, tree, chunks, .. } = &shares[at];
            let (flow, (from, to)) = (&flows[*group], tree[hop]);
            let Chunk { source, offset, bytes } = chunks[chunk];
            let transfers = &groups[*group].sources[source].transfers;
            let place = |device: usize| match flow.to.iter().position(|member| *member == device) {
                Some(member) => Place::Destination { transfer: transfers[member], offset },
                None => {
                    let ring = rings.iter().find(|ring| ring.0 == (at, device)).map_or(RingId(u32::MAX), |ring| ring.1);
                    Place::Slot { ring, slot: chunk as u32 % SLOTS }
                }
            };
            let to_member = flow.to.iter().position(|member| *member == to).unwrap_or(0);
            let (from_place, to_place) =
                (if from == flow.src { Place::Source { transfer: transfers[to_member], offset } } else { place(from) }, place(to));
            let pair = lanes.iter().position(|lanes| lanes.pair == (from, to)).unwrap_or_else(|| {
                lanes.push(PairLanes { pair: (from, to), own: SmallVec::new(), chunks: 0 });
                lanes.len() - 1
            });
            let PairLanes { own, chunks, .. } = &mut lanes[pair];
            if own.len() < most_lanes {
                own.push(LaneId(program.lanes.len() as u32));
                program.lanes.push(Lane::new(copying_device(network.devices[from], network.devices[to])));
            }
            let lane = own[*chunks % most_lanes];
            *chunks += 1;
            let op = OpId(program.ops.len() as u32);
            let mut after: SmallVec<[OpId; 2]> = arrived.get(&(at, chunk, from)).copied().into_iter().collect();
            if let (Place::Slot { .. }, Some(before)) = (to_place, chunk.checked_sub(SLOTS as usize)) {
                after.extend(read.remove(&(at, before, to)).into_iter().flatten());
            }
            if let Place::Slot { .. } = from_place {
                read.entry((at, chunk, from)).or_default().push(op);
            }
            arrived.insert((at, chunk, to), op);
            let copies = smallvec![Copy { from: from_place, to: to_place, bytes }];
            program.ops.push(Op { lane, mechanism: Mechanism::Copy, copies, after });
        }
        program
    }
}
