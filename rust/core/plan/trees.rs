//! Plans data that several devices forward: one source for many destinations that forward received data, and paths over several relays.
//!
//! Transfers of a batch with the same source ([`Shape::source`]) form a group. The destinations are the group's members. The group's data
//! is divided among *trees*. In each tree the source sends a part of the data to one or several devices, and these send it to others, until
//! all members have it. Members need no staging memory: they forward a chunk from its destination buffer as soon as it has arrived. Other
//! devices forward chunks through a staging ring. Trees include the star, in which the source sends to all members, and the chain. Scatter
//! and exchange uses one tree for each destination, in which the source sends only to that destination. A transfer without other members is
//! a group of one member, and its trees are chains. They are useful if GPUs are connected so unevenly that a path over one relay is slow.
//!
//! Candidate trees are found by prices of resources ([`network`](super::network)). The linear program of [`split`] divides the data among
//! them. A tree draws on the resources of all its copies. The trees of all groups and the other transfers of the batch share the resources.
//! The simulator then compares the programs with and without trees, because the planner's model of single paths does not cover chains of
//! chunks.

use super::candidates::{Reason, Rejection};
use super::executor;
use super::lower::copying_device;
use super::network::{Commodity, Draws, Network, Tree};
use super::options::{Options, Passing};
use super::planned::{PathPlan, Plan, TransferPlan};
use super::planner::LEAST_GAIN;
use super::split::{Column, split};
use crate::model::simulate::{Executor, Scenario};
use crate::model::{GRAIN, HOST_RINGS, PathModel, SLOTS};
use crate::program::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId, Shape};
use crate::topology::{DeviceId, LinkId, LinkKind, Machine, MemoryKind};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Smallest size of a source that is forwarded, bytes. Smaller sources are copied to each destination, because forwarding costs at least
/// two synchronisations.
pub const LEAST_BYTES: u64 = 1 << 20;

/// Smallest size of a single transfer that uses several relays in sequence, bytes. For smaller transfers the synchronisations between
/// chunks cost more than the second relay gains.
pub(super) const LEAST_ALONE: u64 = 8 << 20;

/// Smallest relative gain in time for which a single transfer uses several relays in sequence.
const LEAST_GAIN_ALONE: f64 = 0.1;

/// Parameters of one program that the simulator tries. More trees come closer to the capacity of the links; fewer and larger chunks wait
/// less for each other.
struct Try {
    trees: Candidates,
    /// Smallest fraction of a group's data for which a tree is worth the operations that it needs.
    least_share: f64,
    /// Factor on the number of chunks. With 1, the number balances the cost of synchronisations against the time until the last device
    /// receives its first chunk.
    chunks: f64,
    /// Number of lanes (internal streams) between two devices, which take chunks alternately. While one waits for synchronisation, the
    /// other uses the link. With two, direct copies are cut into chunks too, because a long copy would delay the chunks behind it.
    lanes: usize,
}

/// Set of trees among which a group's data is divided.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Candidates {
    /// Trees found by prices of resources, and those of `Hubs`.
    Priced,
    /// Star, and for each destination the tree in which that destination forwards the data to all others.
    Hubs,
    /// Single chain, in which each device forwards all data to the next.
    Chain,
}

/// Parameters to try, in order. Each set is the best for some presets and random machines.
const TRIES: [Try; 5] = [
    Try { trees: Candidates::Priced, least_share: 0.02, chunks: 1.0, lanes: 2 },
    Try { trees: Candidates::Priced, least_share: 0.02, chunks: 0.5, lanes: 2 },
    Try { trees: Candidates::Priced, least_share: 0.05, chunks: 1.5, lanes: 2 },
    Try { trees: Candidates::Hubs, least_share: 0.02, chunks: 1.0, lanes: 1 },
    Try { trees: Candidates::Chain, least_share: 0.0, chunks: 1.0, lanes: 1 },
];

/// Fraction of the simulated rate that copy engines behind an NVSwitch reach if they send chunks to several GPUs and receive from several.
/// In a chain they reach the simulated rate. Measured from one of four H200 to the others: 1 GiB took 4.8 ms by scatter and exchange and
/// 3.07 ms by a chain; 16 MiB took 0.255 and 0.140 ms (2026-11-28).
const SCATTERED: f64 = 0.6;

/// Ratio of a program's time to the lower bound at which no further parameters are tried. So lists of hundreds of tensors are simulated
/// once and not five times.
const ENOUGH: f64 = 1.02;

/// Largest time to issue all copies, relative to the lower bound. One thread issues all copies, and links idle while they wait for copies
/// that have not been issued.
const MOST_ISSUED: f64 = 1.1;

/// Largest number of chunks into which the data of one tree is cut.
const MOST_CHUNKS: u64 = 128;
const LEAST_CHUNK: u64 = 256 << 10;
/// Largest size of a chunk that passes through a staging ring, bytes.
const MOST_STAGED: u64 = 4 << 20;

/// Sources on one device that have the same destinations. They are planned as one source.
pub(super) struct SourceGroup {
    src: DeviceId,
    /// Destination devices, all different. Does not contain `src`.
    members: Vec<DeviceId>,
    sources: Vec<Source>,
}

/// Data that several destinations need: one transfer for each destination.
struct Source {
    bytes: u64,
    transfers: Vec<u32>,
}

/// Returns the groups of a batch: sources that several transfers share and whose destinations can forward the data. Transfers that cannot
/// be forwarded are left out.
pub(super) fn groups(batch: &[Shape], options: &Options) -> Vec<SourceGroup> {
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
        if shape.source == 0 || shape.bytes < LEAST_BYTES.max(options.min_bytes.unwrap_or(0)) || shape.dst_kind == MemoryKind::Pageable {
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

/// Adds groups for transfers of `least` bytes or more between GPUs that NVLink does not connect, on a machine with NVLinks: one group for
/// each pair of GPUs. For other transfers one relay is enough. More relays would occupy links that other processes need.
pub(super) fn with_unjoined(mut groups: Vec<SourceGroup>, machine: &Machine, batch: &[Shape], least: u64) -> Vec<SourceGroup> {
    let gpus = || (0..machine.gpu_count()).map(DeviceId::gpu);
    let is_joined = |from: DeviceId, to: DeviceId| nvlinks(machine, from, to).is_some();
    if !gpus().any(|from| gpus().any(|to| from != to && is_joined(from, to))) {
        return groups;
    }
    let many = groups.len();
    for transfer in rest_of(batch, &groups) {
        let shape = &batch[transfer as usize];
        let (src, dst) = (shape.src_device, shape.dst_device);
        if shape.bytes < least || src == dst || src.is_host() || dst.is_host() || is_joined(src, dst) {
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

fn work_of(machine: &Machine, from: DeviceId, to: DeviceId) -> Option<Draws> {
    let model = PathModel::new(machine, &[machine.route(from, to)?]);
    let seconds =
        |(resource, weight): &(crate::topology::ResourceId, f64)| (resource.0, weight / machine.resources()[resource.0 as usize].capacity);
    Some(model.weights.iter().map(seconds).collect())
}

/// Returns the time for which a program keeps each resource busy, in seconds.
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

/// Tree and the part of its group's data that it distributes.
struct Share {
    group: usize,
    tree: Tree,
    bytes: u64,
    /// Chunks of the data, ordered by source buffer and offset.
    chunks: Vec<Chunk>,
    chunk_bytes: u64,
}

/// Internal streams between two devices, and the number of chunks assigned to them so far.
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

/// Input of planning with trees: the groups to distribute, and the program of the batch's other transfers.
struct Problem<'a> {
    machine: &'a Machine,
    batch: &'a [Shape],
    options: &'a Options,
    groups: &'a [SourceGroup],
    network: Network,
    /// Commodity of each group, by the group's index.
    flows: Vec<Commodity>,
    /// Program of the transfers that are in no group. `busy` is the time in seconds for which it keeps each resource busy.
    rest: Program,
    busy: Vec<f64>,
}

/// Returns the plan of a batch whose groups are distributed by trees. `rest` is the plan of the other transfers, which does not change.
/// `star` is the plan of the whole batch without trees, if one exists. Returns `None` if the simulator predicts too little gain over
/// `star`.
pub(super) fn plan(
    machine: &Machine,
    batch: &[Shape],
    options: &Options,
    groups: &[SourceGroup],
    rest: Option<&Plan>,
    star: Option<&Plan>,
) -> Option<Plan> {
    let network = Network::new(machine, |device| if device.is_host() { options.host_path } else { options.relays.has(device) });
    let flows: Vec<Commodity> = groups.iter().map(|group| group.flow(&network)).collect::<Option<_>>()?;
    let of_rest = rest_of(batch, groups);
    let program = rest.map_or_else(Program::default, |rest| renamed(&rest.program, &of_rest));
    let busy = load(machine, &program, batch);
    let problem = Problem { machine, batch, options, groups, network, flows, rest: program, busy };
    let Problem { network, flows, .. } = &problem;
    let play = |program: &Program, executor| {
        let mut scenario = Scenario::new(machine, options.staging_bytes);
        let bound = scenario.bind(program, batch).ok()?;
        scenario.execute(bound, Executor::of(executor), 0);
        Some(scenario.seconds())
    };
    let explored = network.explore(flows, &problem.busy);
    let is_behind_switch = groups.len() == 1 && groups[0].members.iter().all(|member| nvlinks(machine, groups[0].src, *member) > Some(1));
    let is_slowed = |attempt: &Try| is_behind_switch && options.passing == Passing::CopyEngines && attempt.trees != Candidates::Chain;
    let with = |attempt: &Try| {
        let mut shares = problem.shares(attempt, &explored.trees)?;
        // A transfer uses at most `max_paths` paths.
        let paths = |group: usize| shares.iter().filter(|share| share.group == group).count();
        if shares.iter().all(|share| depth(&share.tree) < 2) || (0..groups.len()).any(|group| paths(group) > options.max_paths as usize) {
            return None;
        }
        problem.give_chunks(&mut shares, attempt)?;
        let copies = shares.iter().map(|share| share.chunks.len() * share.tree.len()).sum::<usize>() as f64;
        let issued = copies * executor::issue(options, machine.costs()) / (MOST_ISSUED * explored.seconds);
        if issued > 1.0 {
            shares.iter_mut().for_each(|share| share.chunks.clear());
            problem.give_chunks(&mut shares, &Try { chunks: attempt.chunks / issued, ..*attempt })?;
        }
        let program = problem.lowered(&shares, attempt.lanes);
        let executor = executor::executor(machine, batch, options, &program);
        let seconds = play(&program, executor)?;
        Some((if is_slowed(attempt) { seconds / SCATTERED } else { seconds }, program, executor, shares))
    };
    let mut best: Option<(f64, _, _, _)> = None;
    for made in TRIES.iter().filter_map(with) {
        let is_enough = made.0 <= explored.seconds * ENOUGH;
        if best.as_ref().is_none_or(|best| made.0 < best.0) {
            best = Some(made);
        }
        if is_enough {
            break;
        }
    }
    let (trees, program, executor, shares) = best?;
    let before = match star {
        Some(star) => play(&star.program, star.executor)?,
        None => trees,
    };
    let is_alone = groups.iter().any(|group| group.members.len() == 1);
    let least_gain = if is_alone { LEAST_GAIN_ALONE } else { LEAST_GAIN };
    if star.is_some() && trees > before * (1.0 - least_gain) {
        return None;
    }
    let plan_of = |shape: &Shape| TransferPlan { shape: *shape, paths: Arc::default(), rejected: Arc::default() };
    let mut transfers: Vec<TransferPlan> = batch.iter().map(plan_of).collect();
    for (own, &transfer) in rest.into_iter().flat_map(|rest| &rest.transfers).zip(&of_rest) {
        transfers[transfer as usize] = own.clone();
    }
    for share in &shares {
        let (group, flow) = (&groups[share.group], &flows[share.group]);
        for chunks in share.chunks.chunk_by(|a, b| a.source == b.source) {
            for (member, &transfer) in group.sources[chunks[0].source].transfers.iter().enumerate() {
                let before = |device: usize| share.tree.iter().find(|hop| hop.1 == device).map_or(flow.src, |hop| hop.0);
                let from = before(flow.to[member]);
                let is_relay = |device: &usize| *device != flow.src && !flow.to.contains(device);
                let relays = std::iter::successors(Some(from), |device| Some(before(*device))).take_while(is_relay);
                let mut earlier: SmallVec<[DeviceId; 1]> = relays.skip(1).map(|device| network.devices[device]).collect();
                earlier.reverse();
                Arc::make_mut(&mut transfers[transfer as usize].paths).push(PathPlan {
                    via: (from != flow.src).then(|| network.devices[from]),
                    earlier,
                    offset: chunks[0].offset,
                    bytes: chunks.iter().map(|chunk| chunk.bytes).sum(),
                    chunks: chunks.len() as u32,
                    chunk_bytes: share.chunk_bytes,
                    slots: if is_relay(&from) { SLOTS } else { 0 },
                    mechanism: Mechanism::Copy,
                    seconds: trees,
                });
            }
        }
    }
    // Rejections of paths without a route are kept, except for devices through which the data now passes.
    for group in groups.iter().filter(|group| group.members.len() == 1) {
        for &transfer in group.sources.iter().flat_map(|source| &source.transfers) {
            let plan = &mut transfers[transfer as usize];
            let is_passed = |device: DeviceId| plan.paths.iter().any(|path| path.via == Some(device) || path.earlier.contains(&device));
            let before = star.into_iter().flat_map(|star| star.transfers[transfer as usize].rejected.iter());
            let stays = |rejection: &&Rejection| rejection.reason == Reason::NoRoute && !rejection.via.is_some_and(is_passed);
            plan.rejected = Arc::new(before.filter(stays).cloned().collect());
        }
    }
    // The simulator and the model make different simplifications. The predicted time of a plan is the model's, so it is scaled by the
    // simulated gain.
    let predicted = star.map_or(trees, |star| star.predicted * trees / before);
    let one_path = star.map_or(predicted, |star| star.one_path);
    Some(Plan { transfers, program: Arc::new(program), options: *options, executor, threads: None, predicted, one_path })
}

/// Returns the indices of the transfers that belong to no group.
pub(super) fn rest_of(batch: &[Shape], groups: &[SourceGroup]) -> Vec<u32> {
    let mut is_member = vec![false; batch.len()];
    let members = groups.iter().flat_map(|group| &group.sources).flat_map(|source| &source.transfers);
    members.for_each(|transfer| is_member[*transfer as usize] = true);
    (0..batch.len() as u32).filter(|transfer| !is_member[*transfer as usize]).collect()
}

/// Returns a copy of a program that was planned for the given transfers of the batch, with transfer indices of the whole batch.
fn renamed(program: &Program, transfers: &[u32]) -> Program {
    let mut program = program.clone();
    for copy in program.ops.iter_mut().flat_map(|op| &mut op.copies) {
        for place in [&mut copy.from, &mut copy.to] {
            if let Place::Source { transfer, .. } | Place::Destination { transfer, .. } = place {
                *transfer = transfers[*transfer as usize];
            }
        }
    }
    program
}

impl Share {
    /// Returns the devices that forward the data of the source without being destinations.
    fn relays(&self, flow: &Commodity) -> impl Iterator<Item = usize> {
        self.tree.iter().map(|hop| hop.1).filter(|device| !flow.to.contains(device))
    }
}

impl Problem<'_> {
    /// Returns trees with the number of bytes that each distributes. Chunks are assigned later by [`Problem::give_chunks`]. Returns `None`
    /// if a group has no tree or the solver fails.
    fn shares(&self, Try { trees, least_share, .. }: &Try, priced: &[Vec<Tree>]) -> Option<Vec<Share>> {
        let Problem { machine, groups, network, flows, busy, .. } = self;
        let resources = machine.resources().len();
        let mut found = if *trees == Candidates::Priced { priced.to_vec() } else { vec![Vec::new(); flows.len()] };
        for (flow, found) in flows.iter().zip(&mut found) {
            // Some trees are always tried: the star, and for each member the tree in which it forwards to all others. Behind a switch these
            // are as fast as any, and have only two successive copies.
            let hub = |hub: &usize| {
                let others = flow.to.iter().filter(|member| *member != hub).map(|member| (*hub, *member));
                std::iter::once((flow.src, *hub)).chain(others).collect()
            };
            let star: Tree = flow.to.iter().map(|member| (flow.src, *member)).collect();
            // Each device forwards to the next member by number, so that chains of sources on all GPUs share links evenly.
            let (before, behind) = flow.to.split_at(flow.to.partition_point(|member| *member < flow.src));
            let order = [&[flow.src], behind, before].concat();
            let chain: Tree = order.windows(2).map(|hop| (hop[0], hop[1])).collect();
            let fixed: Vec<Tree> = match trees {
                Candidates::Chain => vec![chain],
                _ => flow.to.iter().map(hub).chain([star]).collect(),
            };
            for tree in fixed {
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
                    result.push(Share { group: number, tree, bytes, chunks: Vec::new(), chunk_bytes: 0 });
                }
            }
        }
        Some(result)
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
            let own = left / (rings[device] * u64::from(SLOTS));
            if network.devices[device].is_host() { own.min(HOST_RINGS / (hosts * u64::from(SLOTS))) } else { own }
        };
        // For each group, the next source and offset to assign to a chunk.
        let mut begin = vec![(0, 0); groups.len()];
        for share in shares {
            let (group, flow) = (&groups[share.group], &flows[share.group]);
            let most = share.relays(flow).map(|device| room(device).min(MOST_STAGED)).min().unwrap_or(u64::MAX) / GRAIN * GRAIN;
            if most < LEAST_CHUNK {
                return None;
            }
            share.chunk_bytes = self.chunk_bytes(share, by).min(most);
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

    /// Returns the chunk size of a tree, in bytes. The number of chunks is the square root of (time of the copies before the last / time of
    /// a synchronisation), unless the options set it.
    fn chunk_bytes(&self, share: &Share, by: &Try) -> u64 {
        let Problem { machine, options, network, flows, .. } = self;
        let (Share { tree, bytes, .. }, flow) = (share, &flows[share.group]);
        let hops = depth(tree).saturating_sub(1).max(by.lanes as u32 - 1);
        if hops == 0 {
            return *bytes;
        }
        let slowest = tree.iter().flat_map(|hop| network.work_of(flow, *hop)).map(|work| work.1).fold(0.0, f64::max);
        let seconds = *bytes as f64 * slowest;
        let best = ((f64::from(hops) * seconds / machine.costs().chunk_via_gpu).sqrt() * by.chunks) as u64;
        let chunk = bytes.div_ceil(best.clamp(2, MOST_CHUNKS)).max(LEAST_CHUNK);
        let passes_host = share.relays(flow).any(|device| network.devices[device].is_host());
        let chunk = match if passes_host { options.host_chunks } else { options.relay_chunks } {
            Some(count) => bytes.div_ceil(u64::from(count)),
            None => options.chunk_bytes.map_or(chunk, |asked| chunk.min(asked)),
        };
        chunk.div_ceil(GRAIN).saturating_mul(GRAIN).min(*bytes)
    }

    /// Returns the program of the batch: that of the other transfers, followed by the chunks of all trees, which run concurrently.
    fn lowered(&self, shares: &[Share], most_lanes: usize) -> Program {
        let Problem { batch, groups, network, flows, rest, .. } = self;
        let mut program = rest.clone();
        program.transfers = batch.iter().map(|shape| shape.bytes).collect();
        program.sources = batch.iter().map(|shape| shape.source).collect();
        // Operations are sorted by the time at which they would start if all chunks of a tree took equally long, and all trees finished
        // together. A lane runs in order, so a chunk that arrives late must not come before one that has arrived.
        let mut order: Vec<(f64, usize, usize, usize)> = Vec::new();
        for (at, share) in shares.iter().enumerate() {
            let (chunks, depths) = (share.chunks.len(), depths(&share.tree));
            for chunk in 0..chunks {
                order.extend(
                    depths.iter().enumerate().map(|(hop, depth)| ((chunk + *depth as usize) as f64 / chunks as f64, at, chunk, hop)),
                );
            }
        }
        // The sort is stable, so the copy that brings a chunk to a device comes before the copy that forwards it.
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut lanes: Vec<PairLanes> = Vec::new();
        let mut rings: Vec<((usize, usize), RingId)> = Vec::new();
        for (at, share) in shares.iter().enumerate() {
            for relay in share.relays(&flows[share.group]) {
                rings.push(((at, relay), RingId(program.rings.len() as u32)));
                program.rings.push(Ring { device: network.devices[relay], slots: SLOTS, slot_bytes: share.chunk_bytes });
            }
        }
        // For each tree, chunk and device: the operation that brings the chunk there, and those that read it from a staging slot.
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
