//! One source, many destinations: a destination passes on what it has received, so that each byte leaves the source once, or as often as pays.
//!
//! Transfers of a batch with the same source ([`Shape::source`]) make a group. Its bytes are divided among *trees*: in each the source sends its part
//! to one destination or several, and these to others, until all have it. A destination's own memory is the staging: a chunk is passed on as soon as
//! it is there. A star (the source sends to all) is one tree of many, and a chain another; scatter and exchange is as many trees as there are
//! destinations, each of which is the first of one.
//!
//! How many bytes each tree gets is the linear program of [`split`]: a tree draws on the resources of all its edges, and the trees of all groups, and
//! what the rest of the batch moves, share them. Which trees there are to choose from is found by prices, as in fractional packing
//! (Garg and Könemann 2007): the cheapest tree is taken, what it draws on becomes dearer, and again. Whether it is done at all is the simulator's
//! word: it plays both programs, because a chain of chunks is what the planner's model of single paths does not have.

use super::executor;
use super::lower::copying_device;
use super::options::Options;
use super::planned::{PathPlan, Plan, TransferPlan};
use super::split::{Column, split};
use crate::model::simulate::{Executor, Scenario};
use crate::model::{GRAIN, PathModel};
use crate::program::{Copy, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Shape};
use crate::topology::{DeviceId, Machine, MemoryKind};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;

/// Smaller sources are copied to each destination: what passing on costs is two hand-overs at least.
pub const LEAST_BYTES: u64 = 1 << 20;

/// Rounds of prices.
const ROUNDS: usize = 96;

/// A tree with a smaller part of its group's bytes is not worth its operations.
const LEAST_SHARE: f64 = 0.02;

/// Chunks of a tree's bytes.
const MOST_CHUNKS: u64 = 128;
const LEAST_CHUNK: u64 = 256 << 10;

/// Sources on one device, each of which goes to the same devices: what there is to be known of them as of one.
pub(super) struct SourceGroup {
    src: DeviceId,
    /// All different, and none of them `src`.
    members: Vec<DeviceId>,
    sources: Vec<Source>,
}

/// Transfers with the same source: one for each member.
struct Source {
    bytes: u64,
    transfers: Vec<u32>,
}

/// The groups of a batch of which several transfers can pass on what they have. Members that cannot are left to the rest of the batch.
pub(super) fn groups(batch: &[Shape], options: &Options) -> Vec<SourceGroup> {
    if options.max_paths < 2 {
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

/// For each member of a group whom it has the bytes from: another member, or the source.
#[derive(Clone, Debug, PartialEq)]
struct Tree {
    from: Vec<Option<usize>>,
    /// Members, each after the one that it has the bytes from.
    order: Vec<usize>,
}

/// Seconds per byte on each resource that a copy between two devices draws on.
type EdgeWork = SmallVec<[(u32, f64); 8]>;

impl SourceGroup {
    /// Of all sources.
    fn bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.bytes).sum()
    }

    fn device(&self, node: Option<usize>) -> DeviceId {
        node.map_or(self.src, |member| self.members[member])
    }

    /// The tree of least price, by the algorithm of Chu, Liu and Edmonds. `None` where a member cannot be reached.
    fn cheapest(&self, edges: &Edges, prices: &[f64]) -> Option<Tree> {
        let count = self.members.len();
        let node = |node: Option<usize>| node.map_or(count, |member| member);
        let mut priced = Vec::with_capacity(count * count);
        for from in (0..count).map(Some).chain([None]) {
            for to in (0..count).filter(|to| from != Some(*to)) {
                if let Some(work) = edges.of(self.device(from), self.device(Some(to))) {
                    priced.push((node(from), to, work.iter().map(|&(resource, seconds)| seconds * prices[resource as usize]).sum()));
                }
            }
        }
        let by = arborescence(count + 1, count, &priced)?;
        let from: Vec<Option<usize>> = by.into_iter().take(count).map(|at| Some(priced[at?].0).filter(|from| *from < count)).collect();
        let mut order = Vec::with_capacity(count);
        while order.len() < count {
            let next = (0..count).filter(|member| !order.contains(member) && from[*member].is_none_or(|from| order.contains(&from)));
            let next: Vec<usize> = next.collect();
            order.extend(next);
        }
        Some(Tree { from, order })
    }
}

/// Of the trees that lead from `root` to every node along edges (from, to, price), one of least price: for each node but the
/// root the edge by which it is reached.
fn arborescence(nodes: usize, root: usize, edges: &[(usize, usize, f64)]) -> Option<Vec<Option<usize>>> {
    let mut best: Vec<Option<usize>> = vec![None; nodes];
    for (at, &(from, to, price)) in edges.iter().enumerate() {
        if from != to && to != root && best[to].is_none_or(|known| price < edges[known].2) {
            best[to] = Some(at);
        }
    }
    // Circles of cheapest edges become a node each.
    let (mut group, mut groups) = (vec![usize::MAX; nodes], 0);
    let mut seen = vec![usize::MAX; nodes];
    let mut in_circle = vec![false; nodes];
    for start in 0..nodes {
        let mut node = start;
        while node != root && seen[node] == usize::MAX {
            seen[node] = start;
            node = edges[best[node]?].0;
        }
        if node != root && seen[node] == start {
            while group[node] == usize::MAX {
                (group[node], in_circle[node]) = (groups, true);
                node = edges[best[node]?].0;
            }
            groups += 1;
        }
    }
    if groups == 0 {
        return (0..nodes).all(|node| node == root || best[node].is_some()).then_some(best);
    }
    for of in group.iter_mut().filter(|of| **of == usize::MAX) {
        (*of, groups) = (groups, groups + 1);
    }
    // An edge into a circle takes the place of one of it.
    let (mut contracted, mut original) = (Vec::new(), Vec::new());
    for (at, &(from, to, price)) in edges.iter().enumerate() {
        if group[from] != group[to] {
            let replaced = if in_circle[to] { best[to].map_or(0.0, |best| edges[best].2) } else { 0.0 };
            contracted.push((group[from], group[to], price - replaced));
            original.push(at);
        }
    }
    for at in arborescence(groups, group[root], &contracted)?.into_iter().flatten().map(|at| original[at]) {
        best[edges[at].1] = Some(at);
    }
    Some(best)
}
impl Tree {
    /// Copies that a byte is in before it is at each member.
    fn depths(&self) -> Vec<u32> {
        let mut depths = vec![0; self.from.len()];
        self.order.iter().for_each(|&member| depths[member] = 1 + self.from[member].map_or(0, |from| depths[from]));
        depths
    }

    /// Before it is everywhere.
    fn depth(&self) -> u32 {
        self.depths().into_iter().max().unwrap_or(0)
    }

    /// What a byte draws on resources, on all its ways together.
    fn work(&self, group: &SourceGroup, edges: &Edges) -> EdgeWork {
        let mut all = EdgeWork::new();
        for &member in &self.order {
            for &(resource, seconds) in edges.of(group.device(self.from[member]), group.device(Some(member))).into_iter().flatten() {
                match all.iter_mut().find(|known| known.0 == resource) {
                    Some(known) => known.1 += seconds,
                    None => all.push((resource, seconds)),
                }
            }
        }
        all.sort_unstable_by_key(|work| work.0);
        all
    }
}

/// What copies between the devices of all groups draw on; none where no route is.
struct Edges(Vec<((DeviceId, DeviceId), EdgeWork)>);

impl Edges {
    fn new(machine: &Machine, groups: &[SourceGroup]) -> Edges {
        let mut edges: Vec<((DeviceId, DeviceId), EdgeWork)> = Vec::new();
        for group in groups {
            let all = || (0..group.members.len()).map(Some);
            for (from, to) in std::iter::once(None).chain(all()).flat_map(|from| all().map(move |to| (from, to))) {
                let pair = (group.device(from), group.device(to));
                if pair.0 != pair.1
                    && let Err(at) = edges.binary_search_by_key(&pair, |edge| edge.0)
                    && let Some(work) = work_of(machine, pair.0, pair.1)
                {
                    edges.insert(at, (pair, work));
                }
            }
        }
        Edges(edges)
    }

    fn of(&self, from: DeviceId, to: DeviceId) -> Option<&EdgeWork> {
        self.0.binary_search_by_key(&(from, to), |edge| edge.0).ok().map(|at| &self.0[at].1)
    }
}

fn work_of(machine: &Machine, from: DeviceId, to: DeviceId) -> Option<EdgeWork> {
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
    /// In the order of the sources, in chunks.
    chunks: Vec<Chunk>,
    chunk_bytes: u64,
}

#[derive(Copy, Clone)]
struct Chunk {
    source: usize,
    offset: u64,
    bytes: u64,
}

/// The plan of a batch whose groups move by trees, and all else as in `rest`, the plan of the batch without these transfers; `star` is the plan without
/// trees. `None` where the simulator finds no gain of `least_gain`.
pub(super) fn plan(
    machine: &Machine,
    batch: &[Shape],
    options: &Options,
    groups: &[SourceGroup],
    rest: Option<&Plan>,
    star: &Plan,
    least_gain: f64,
) -> Option<Plan> {
    let edges = Edges::new(machine, groups);
    let of_rest = rest_of(batch, groups);
    let program = rest.map_or_else(Program::default, |rest| renamed(&rest.program, &of_rest));
    let busy = load(machine, &program, batch);
    let shares = shares(machine, options, groups, &edges, &busy)?;
    if shares.iter().all(|share| share.tree.depth() < 2) {
        return None;
    }
    let program = lowered(batch, groups, &shares, program);
    let play = |program: &Program, executor| {
        let mut scenario = Scenario::new(machine, options.staging_bytes);
        let bound = scenario.bind(program, batch).ok()?;
        scenario.execute(bound, Executor::of(executor), 0);
        Some(scenario.run().seconds)
    };
    let executor = executor::executor(machine, batch, options, &program);
    let (trees, before) = (play(&program, executor)?, play(&star.program, star.executor)?);
    if trees > before * (1.0 - least_gain) {
        return None;
    }
    let mut transfers = star.transfers.clone();
    for (own, &transfer) in rest.into_iter().flat_map(|rest| &rest.transfers).zip(&of_rest) {
        transfers[transfer as usize] = own.clone();
    }
    let members = groups.iter().flat_map(|group| &group.sources).flat_map(|source| &source.transfers);
    for &transfer in members {
        transfers[transfer as usize] = TransferPlan { shape: batch[transfer as usize], paths: Vec::new(), rejected: Arc::default() };
    }
    for share in &shares {
        let group = &groups[share.group];
        for chunks in share.chunks.chunk_by(|a, b| a.source == b.source) {
            for (member, &transfer) in group.sources[chunks[0].source].transfers.iter().enumerate() {
                transfers[transfer as usize].paths.push(PathPlan {
                    via: share.tree.from[member].map(|from| group.members[from]),
                    offset: chunks[0].offset,
                    bytes: chunks.iter().map(|chunk| chunk.bytes).sum(),
                    chunks: chunks.len() as u32,
                    chunk_bytes: share.chunk_bytes,
                    slots: 0,
                    mechanism: Mechanism::Copy,
                    seconds: trees,
                });
            }
        }
    }
    // The simulator and the model differ in what they leave out: a plan's time is the model's.
    let predicted = star.predicted * trees / before;
    Some(Plan { transfers, program: Arc::new(program), options: *options, executor, threads: None, predicted, one_path: star.one_path })
}

/// The transfers that are of no group.
pub(super) fn rest_of(batch: &[Shape], groups: &[SourceGroup]) -> Vec<u32> {
    let mut is_member = vec![false; batch.len()];
    let members = groups.iter().flat_map(|group| &group.sources).flat_map(|source| &source.transfers);
    members.for_each(|transfer| is_member[*transfer as usize] = true);
    (0..batch.len() as u32).filter(|transfer| !is_member[*transfer as usize]).collect()
}

/// A program of some of the batch's transfers, as one of the batch.
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

/// Which trees there are, and what each moves.
fn shares(machine: &Machine, options: &Options, groups: &[SourceGroup], edges: &Edges, busy: &[f64]) -> Option<Vec<Share>> {
    let resources = machine.resources().len();
    let mut found: Vec<Vec<Tree>> = vec![Vec::new(); groups.len()];
    let (mut load, mut prices) = (busy.to_vec(), vec![1.0; resources]);
    let rounds = ROUNDS;
    for round in 0..rounds {
        for (group, trees) in groups.iter().zip(&mut found) {
            let tree = group.cheapest(edges, &prices)?;
            for (resource, seconds) in tree.work(group, edges) {
                load[resource as usize] += seconds * group.bytes() as f64 / rounds as f64;
            }
            if !trees.contains(&tree) {
                trees.push(tree);
            }
            // Relative to the busiest there will be at the end, as it now seems.
            let most = load.iter().copied().fold(0.0, f64::max) * rounds as f64 / (round + 1) as f64;
            prices.iter_mut().zip(&load).for_each(|(price, load)| *price = (12.0 * load / most.max(f64::MIN_POSITIVE)).exp());
        }
    }
    // Whatever they cost: the star, and of each member the tree in which it passes all on. Behind a switch these are as good as any, and two copies deep.
    for (group, trees) in groups.iter().zip(&mut found) {
        let all: Vec<usize> = (0..group.members.len()).collect();
        let hub = |hub: usize| Tree {
            from: all.iter().map(|&member| Some(hub).filter(|hub| *hub != member)).collect(),
            order: std::iter::once(hub).chain(all.iter().copied().filter(|member| *member != hub)).collect(),
        };
        let star = Tree { from: vec![None; all.len()], order: all.clone() };
        for tree in all.iter().map(|&member| hub(member)).chain([star]) {
            let has_all = tree.order.iter().all(|&to| edges.of(group.device(tree.from[to]), group.device(Some(to))).is_some());
            if has_all && !trees.contains(&tree) {
                trees.push(tree);
            }
        }
    }
    let costs = machine.costs();
    let demands: Vec<f64> = groups.iter().map(|group| group.bytes() as f64).chain([groups[0].bytes() as f64]).collect();
    let column = |transfer: usize, depth: u32, work: EdgeWork| {
        let slowest = work.iter().map(|work| work.1).fold(0.0, f64::max);
        // Of trees that are as good, the one that is less deep.
        let link_time = work.iter().map(|work| work.1).sum::<f64>() * (1.0 + f64::from(depth));
        let fixed = f64::from(depth) * costs.chunk_via_gpu;
        Column { transfer: transfer as u32, fixed, line: (fixed, slowest), work, link_time }
    };
    let mut bytes;
    loop {
        // What the rest of the batch does takes its time whatever the trees do.
        let rest =
            (0..).zip(busy).filter(|(_, seconds)| **seconds > 0.0).map(|(resource, seconds)| (resource, seconds / demands[groups.len()]));
        let rest = column(groups.len(), 0, rest.collect());
        let own: Vec<Vec<Column>> = groups
            .iter()
            .zip(&found)
            .enumerate()
            .map(|(at, (group, trees))| trees.iter().map(|tree| column(at, tree.depth(), tree.work(group, edges))).collect())
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
            trees.retain(|_| shares.next().is_some_and(|share| *share >= (LEAST_SHARE * group.bytes() as f64).min(largest)));
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
        // Bytes of the group that are still to be given out: of this source, from here on.
        let (mut left, mut source, mut offset) = (group.bytes(), 0, 0);
        let count = trees.len();
        for (at, tree) in trees.into_iter().enumerate() {
            let share = (*next.next()? as u64 / GRAIN * GRAIN).min(left);
            let mut bytes = if at + 1 == count { left } else { share };
            left -= bytes;
            let chunk_bytes = chunk_bytes(machine, options, group, &tree, edges, bytes);
            let mut chunks = Vec::new();
            while bytes > 0 {
                let chunk = Chunk { source, offset, bytes: bytes.min(chunk_bytes).min(group.sources[source].bytes - offset) };
                (bytes, offset) = (bytes - chunk.bytes, offset + chunk.bytes);
                if offset == group.sources[source].bytes {
                    (source, offset) = (source + 1, 0);
                }
                chunks.push(chunk);
            }
            if !chunks.is_empty() {
                result.push(Share { group: number, tree, chunks, chunk_bytes });
            }
        }
    }
    Some(result)
}

/// Bytes of a chunk: the root of what the copies before the last take over what each further chunk costs them.
fn chunk_bytes(machine: &Machine, options: &Options, group: &SourceGroup, tree: &Tree, edges: &Edges, bytes: u64) -> u64 {
    let hops = tree.depth().saturating_sub(1);
    if hops == 0 {
        return bytes;
    }
    let slowest = |member: usize| {
        let work = edges.of(group.device(tree.from[member]), group.device(Some(member)));
        work.into_iter().flatten().map(|work| work.1).fold(0.0, f64::max)
    };
    let seconds = bytes as f64 * (0..group.members.len()).map(slowest).fold(0.0, f64::max);
    let best = (f64::from(hops) * seconds / machine.costs().chunk_via_gpu).sqrt() as u64;
    let chunk = bytes.div_ceil(best.clamp(2, MOST_CHUNKS)).max(LEAST_CHUNK);
    let chunk = options.chunk_bytes.map_or(chunk, |asked| chunk.min(asked));
    chunk.div_ceil(GRAIN).saturating_mul(GRAIN).min(bytes)
}

/// The program: that of the rest of the batch, and the chunks of all trees, which go on together.
fn lowered(batch: &[Shape], groups: &[SourceGroup], shares: &[Share], rest: Program) -> Program {
    let mut program = rest;
    program.transfers = batch.iter().map(|shape| shape.bytes).collect();
    program.sources = batch.iter().map(|shape| shape.source).collect();
    // By when its turn comes if all chunks of a tree take equally long, and all trees as long as each other: a lane goes on in order, and must not have a
    // chunk that has far to go before one that is there.
    let mut order: Vec<(f64, usize, usize, usize)> = Vec::new();
    for (at, share) in shares.iter().enumerate() {
        let (chunks, depths) = (share.chunks.len(), share.tree.depths());
        for chunk in 0..chunks {
            let turn = |member: usize| (chunk + depths[member] as usize) as f64 / chunks as f64;
            order.extend(share.tree.order.iter().map(|&member| (turn(member), at, chunk, member)));
        }
    }
    // Stable: of one chunk, whoever passes it on stands before whom it goes to.
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut lanes: Vec<((DeviceId, DeviceId), LaneId)> = Vec::new();
    // Of each chunk under way and member, who brings it.
    let mut arrived: ahash::HashMap<(usize, usize, usize), OpId> = ahash::HashMap::default();
    for (_, at, chunk, member) in order {
        let Share { group, tree, chunks, .. } = &shares[at];
        let (group, Chunk { source, offset, bytes }) = (&groups[*group], chunks[chunk]);
        let transfers = &group.sources[source].transfers;
        let from = tree.from[member];
        let pair = (group.device(from), group.device(Some(member)));
        let lane = match lanes.iter().find(|lane| lane.0 == pair) {
            Some(lane) => lane.1,
            None => {
                program.lanes.push(Lane::new(copying_device(pair.0, pair.1)));
                let lane = LaneId(program.lanes.len() as u32 - 1);
                lanes.push((pair, lane));
                lane
            }
        };
        let to = Place::Destination { transfer: transfers[member], offset };
        let (from, after) = match from {
            None => (Place::Source { transfer: transfers[member], offset }, SmallVec::new()),
            Some(from) => {
                let before = arrived.get(&(at, chunk, from)).copied();
                (Place::Destination { transfer: transfers[from], offset }, before.into_iter().collect())
            }
        };
        arrived.insert((at, chunk, member), OpId(program.ops.len() as u32));
        program.ops.push(Op { lane, mechanism: Mechanism::Copy, copies: smallvec![Copy { from, to, bytes }], after });
    }
    program
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The least price of all ways to reach every node, by trying them.
    fn by_trying(nodes: usize, edges: &[(usize, usize, f64)]) -> Option<f64> {
        let into: Vec<Vec<&(usize, usize, f64)>> = (1..nodes).map(|to| edges.iter().filter(|edge| edge.1 == to).collect()).collect();
        let mut least: Option<f64> = None;
        for number in 0..into.iter().map(Vec::len).product() {
            let mut left: usize = number;
            let chosen: Vec<&(usize, usize, f64)> = into
                .iter()
                .map(|edges| {
                    let edge = edges[left % edges.len()];
                    left /= edges.len();
                    edge
                })
                .collect();
            let reached = |node: usize| {
                let (mut node, mut steps) = (node, 0);
                while node != 0 && steps < nodes {
                    (node, steps) = (chosen[node - 1].0, steps + 1);
                }
                node == 0
            };
            if (1..nodes).all(reached) {
                let price = chosen.iter().map(|edge| edge.2).sum();
                least = Some(least.map_or(price, |least: f64| least.min(price)));
            }
        }
        least
    }

    proptest! {
        // A failing case is printed; nothing is written into the source tree.
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_cheapest_tree_is_found(nodes in 2..6_usize, edges in prop::collection::vec((0..6_usize, 0..6_usize, 0..20_u32), 0..16)) {
            let edges: Vec<(usize, usize, f64)> =
                edges.into_iter().map(|(from, to, price)| (from % nodes, to % nodes, f64::from(price))).filter(|edge| edge.0 != edge.1).collect();
            let found = arborescence(nodes, 0, &edges);
            if let Some(found) = &found {
                for node in 1..nodes {
                    let (mut at, mut steps) = (node, 0);
                    while at != 0 {
                        let (from, to, _) = edges[found[at].expect("an edge")];
                        prop_assert_eq!(to, at);
                        (at, steps) = (from, steps + 1);
                        prop_assert!(steps < nodes, "a circle");
                    }
                }
            }
            let price = found.map(|found| (1..nodes).filter_map(|node| found[node]).map(|at| edges[at].2).sum::<f64>());
            prop_assert_eq!(price, by_trying(nodes, &edges));
        }
    }
}
