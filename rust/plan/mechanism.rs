//! How direct shares are moved: each by a plain copy, or many by one batched call or one kernel.
//!
//! A plain copy costs `issue` on the host for each message; a batched call and a kernel cost more once and less per message, and
//! the kernel moves bytes a little slower than a copy engine. So a kernel is worth a message that it delays by less than the
//! message's own issue: `bytes / rate · (1 / efficiency − 1) ≤ issue`. Below that size the model compares the three for all
//! messages of a device. Above it several messages between the same two GPUs are one batched call, which leaves no gap between them
//! (readings, two H200: eight of 16 MiB 371 us one by one and 349 batched, two of 64 MiB 350 and 346).

use super::candidates::Candidate;
use super::choose::Share;
use super::lower::{DirectOp, Piece, copying_device};
use super::program::{Mechanism, Op, Program};
use super::{Engine, Options, Shape};
use crate::backend::MemoryKind;
use crate::model::{Flow, finish};
use crate::topology::{Costs, DeviceId, LinkId, Machine};
use std::collections::BTreeMap;

/// One direct operation and the flows that it starts.
pub(super) struct Launch {
    pub op: DirectOp,
    /// Indices into the shares.
    pub shares: Vec<usize>,
    /// The two GPUs between which it copies, unless it fuses small messages.
    between: Option<(DeviceId, DeviceId)>,
}

/// The lane of direct operations.
#[derive(Copy, Clone, PartialEq, Eq)]
pub(super) enum LaneKey {
    /// Copies from a GPU to others that leave it by this link, one of which lasts longer than it takes to start. They follow each other in
    /// any case, and in one lane they do so in the order that they were given ([`take_turns`]); in lanes of their own the driver takes them
    /// as it likes: an all-to-all of four H200 with 64 MiB took 698 us, and in lanes like this 545. Short ones overlap in what they take to
    /// start. Where every pair is wired, each has a link of its own.
    From(DeviceId, LinkId),
    /// Copies between these two, which would share the way anyway.
    Between(DeviceId, DeviceId),
    /// What a device fuses.
    Fused(DeviceId),
}

/// A GPU, and the link by which a copy to another one leaves it.
type Exit = (DeviceId, LinkId);

fn exit(machine: &Machine, pair: (DeviceId, DeviceId)) -> Option<Exit> {
    let (src, dst) = between_gpus(pair)?;
    Some((src, *machine.route(src, dst)?.links.first()?))
}

/// Where copies between GPUs are so long that they take turns.
fn busy_exits<'a>(machine: &Machine, batch: &[Shape], direct: impl Iterator<Item = &'a DirectOp>) -> Vec<Exit> {
    let mut exits = Vec::new();
    for op in direct.filter(|op| op.mechanism != Mechanism::Kernel && op.also.is_none()) {
        for piece in &op.pieces {
            let pair = pair(&batch[piece.transfer as usize]);
            let is_long = machine.route(pair.0, pair.1).is_some_and(|route| piece.bytes as f64 / route.bandwidth > machine.costs().copy);
            exits.extend(exit(machine, pair).filter(|exit| is_long && !exits.contains(exit)));
        }
    }
    exits
}

fn between_gpus(pair: (DeviceId, DeviceId)) -> Option<(DeviceId, DeviceId)> {
    (pair.0 != pair.1 && !pair.0.is_host() && !pair.1.is_host()).then_some(pair)
}

/// Whether one call for so many large copies takes less than a call for each.
fn gains_by_batch(costs: &Costs, copies: usize) -> bool {
    copies > 1 && costs.batch + costs.batch_segment * copies as f64 <= costs.copy + costs.issue * (copies - 1) as f64
}

fn is_in_device_memory(shape: &Shape) -> bool {
    shape.src_kind == MemoryKind::Device && shape.dst_kind == MemoryKind::Device
}

/// What the model expects of operations that are issued in this order, one flow for each share. `members` are indices into `shares`.
///
/// Plain copies between the same two devices follow each other: the next starts `issue` after the last
/// one's end, which the readings show as well for large messages (26 of 25 MB together: 134 us, of which 64 are bytes) as for small ones.
pub(super) fn flows<'a>(
    machine: &Machine,
    batch: &[Shape],
    candidates: &'a [Candidate],
    shares: &[Share],
    operations: impl Iterator<Item = (Mechanism, &'a [usize])>,
) -> Vec<(usize, Flow<'a>)> {
    let costs = machine.costs();
    let mut lanes: Vec<((DeviceId, DeviceId), f64)> = Vec::new();
    let mut flows = Vec::new();
    for (order, (mechanism, members)) in operations.enumerate() {
        let messages = members.len() as f64;
        let mut head = costs.issue * order as f64
            + match mechanism {
                Mechanism::Copy => costs.copy,
                Mechanism::Batch => costs.batch + costs.batch_segment * messages,
                Mechanism::Kernel => costs.kernel + costs.kernel_segment * messages,
            };
        if let (Mechanism::Copy, &[at]) = (mechanism, members) {
            let candidate = &candidates[shares[at].candidate];
            let key = pair(&batch[candidate.transfer as usize]);
            let busy = shares[at].bytes as f64 / candidate.model.rate;
            match lanes.iter_mut().find(|lane| lane.0 == key) {
                Some((_, end)) => {
                    head = head.max(*end + costs.issue);
                    *end = head + busy;
                }
                None => lanes.push((key, head + busy)),
            }
        }
        let efficiency = if mechanism == Mechanism::Kernel { costs.kernel_efficiency } else { 1.0 };
        flows.extend(members.iter().map(|&at| {
            let flow = Flow { path: &candidates[shares[at].candidate].model, bytes: shares[at].bytes, chunks: 1, head, efficiency };
            (at, flow)
        }));
    }
    flows
}

/// Operations for the direct shares among `shares`, in the order in which they are issued.
pub(super) fn launches(machine: &Machine, batch: &[Shape], options: &Options, candidates: &[Candidate], shares: &[Share]) -> Vec<Launch> {
    let shape = |at: usize| &batch[candidates[shares[at].candidate].transfer as usize];
    let costs = machine.costs();
    let mut direct: Vec<(DeviceId, usize)> = (0..shares.len())
        .filter(|&at| candidates[shares[at].candidate].via.is_none())
        .map(|at| (copying_device(shape(at).src_device, shape(at).dst_device), at))
        .collect();
    direct.sort();
    let mut launches = Vec::new();
    let all_direct = direct.len() == shares.len();
    for group in direct.chunk_by(|a, b| a.0 == b.0) {
        let device = group[0].0;
        let mut fused: Vec<usize> = Vec::new();
        let mut plain: Vec<usize> = Vec::new();
        for &(_, at) in group {
            let can = !device.is_host() && may_fuse(machine, options, &candidates[shares[at].candidate], &shares[at], shape(at));
            if can { &mut fused } else { &mut plain }.push(at);
        }
        let mechanism = choose(machine, batch, options, candidates, shares, &fused);
        if mechanism == Mechanism::Copy {
            plain.append(&mut fused);
            plain.sort_unstable();
        }
        let mut launch = |mechanism, members: &[usize], between| {
            let pieces = members.iter().map(|&at| piece(candidates, &shares[at])).collect();
            launches.push(Launch { op: DirectOp { device, also: None, mechanism, pieces }, shares: members.to_vec(), between });
        };
        // Large copies first: they take longest.
        if all_direct {
            plain.sort_by_key(|&at| pair(shape(at)));
        }
        for alike in plain.chunk_by(|&a, &b| pair(shape(a)) == pair(shape(b))) {
            let between = between_gpus(pair(shape(alike[0])));
            let in_device_memory = alike.iter().all(|&at| is_in_device_memory(shape(at)));
            if between.is_some() && in_device_memory && all_direct && options.engine == Engine::Auto && gains_by_batch(costs, alike.len()) {
                launch(Mechanism::Batch, alike, between);
            } else {
                alike.iter().for_each(|at| launch(Mechanism::Copy, std::slice::from_ref(at), between));
            }
        }
        if !fused.is_empty() {
            launch(mechanism, &fused, None);
        }
    }
    take_turns(machine, &mut launches);
    free_ends(machine, &mut launches);
    launches
}

/// Orders plain copies between GPUs so that at any time no two of them write to the same GPU, if that is possible: the first of each
/// GPU goes to its next neighbour, the second to the one after, and so on.
///
/// Copies that leave from one GPU follow each other even in streams of their own. In the order of their destinations' numbers, an
/// all-to-all of four GPUs begins with three that all write to GPU 0, and takes six times as long as one copy: 1057 us for 64 MiB were
/// read (`docs/performance.md`), of which one takes 169. By neighbours it is three times.
fn take_turns(machine: &Machine, launches: &mut [Launch]) {
    let gpus = i64::from(machine.gpu_count());
    launches.sort_by_key(|launch| match launch.between {
        Some((src, dst)) => (i64::from(dst.0) - i64::from(src.0)).rem_euclid(gpus),
        None if launch.op.mechanism == Mechanism::Copy => 0,
        // After the large copies, as on each device.
        None => gpus,
    });
}

/// Whether long copies of one GPU go to different GPUs, by turns.
pub(super) fn are_turns(machine: &Machine, batch: &[Shape], launches: &[Launch]) -> bool {
    let busy = busy_exits(machine, batch, launches.iter().map(|launch| &launch.op));
    let mut to: Vec<(Exit, DeviceId)> = Vec::new();
    launches.iter().filter(|launch| launch.op.also.is_none()).filter_map(|launch| launch.between).any(|pair| {
        let Some(exit) = exit(machine, pair).filter(|exit| busy.contains(exit)) else { return false };
        match to.iter().find(|first| first.0 == exit) {
            Some(first) => first.1 != pair.1,
            None => {
                to.push((exit, pair.1));
                false
            }
        }
    })
}

/// Lets either end issue plain copies between two GPUs. From a stream of the reading GPU they then need no events across GPUs. That
/// saves `join` for the lane, which holds all plain copies between the two, and costs `pull` for each; and because copies that one GPU
/// issues may follow each other (see [`take_turns`]), it may cost the time that the lane itself takes.
fn free_ends(machine: &Machine, launches: &mut [Launch]) {
    let costs = machine.costs();
    let mut losses: BTreeMap<(DeviceId, DeviceId), f64> = BTreeMap::new();
    for launch in &*launches {
        if let Some((src, dst)) = launch.between
            && let Some(route) = machine.route(src, dst)
        {
            let bytes: u64 = launch.op.pieces.iter().map(|piece| piece.bytes).sum();
            *losses.entry((src, dst)).or_default() += costs.pull + bytes as f64 / route.bandwidth;
        }
    }
    for launch in launches {
        let worth = |ends: &(DeviceId, DeviceId)| losses.get(ends).is_some_and(|loss| *loss < costs.join);
        launch.op.also = launch.between.filter(worth).map(|(_, dst)| dst);
    }
}

/// Seconds of the issuing thread for one more operation of a plan with staged paths: see [`executor`].
pub(super) fn issue(options: &Options, costs: &Costs) -> f64 {
    if matches!(options.engine, Engine::Auto | Engine::Graph) { costs.graph_node } else { costs.issue }
}

/// Who runs a program: where the caller leaves that open, a graph or streams, whichever takes the issuing thread less time.
///
/// Streams take `issue` for each copy and `lane` for each lane beyond the first, which is the caller's own stream. A graph takes
/// `graph` for its first copy and `graph_node` for each further one. One lane stays on the stream, where it ends as soon (readings,
/// graphs) and nothing need be instantiated. So do plain copies that follow each other in a lane: a graph leaves some 12 us between two
/// of them, a stream 4 (all-to-all and two copies of 16 MiB on H200). Staged programs go as graphs whatever they take to issue: end to end that is 0.5 to
/// 1.5 % faster from 32 MiB to 1 GiB (`docs/performance.md`). Memory that the driver stages by itself is none for a graph.
pub(super) fn executor(machine: &Machine, batch: &[Shape], options: &Options, program: &Program) -> Engine {
    let costs = machine.costs();
    let pageable = |shape: &Shape| shape.bytes > 0 && [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable);
    if options.engine != Engine::Auto {
        return options.engine;
    }
    if program.lanes.len() < 2 || batch.iter().any(pageable) {
        return Engine::Stream;
    }
    if !program.rings.is_empty() {
        return Engine::Graph;
    }
    let mut copies = vec![0_u32; program.lanes.len()];
    program.ops.iter().filter(|op| op.mechanism == Mechanism::Copy).for_each(|op| copies[op.lane.0 as usize] += 1);
    if copies.iter().any(|copies| *copies > 1) {
        return Engine::Stream;
    }
    let on_stream = |op: &Op| match op.mechanism {
        Mechanism::Copy => costs.issue,
        Mechanism::Batch => costs.issue + costs.batch_segment * op.copies.len() as f64,
        Mechanism::Kernel => costs.issue + costs.kernel_segment * op.copies.len() as f64,
    };
    // A graph has no node for a batch of copies: it holds them one by one.
    let nodes = |op: &Op| if op.mechanism == Mechanism::Kernel { 1 } else { op.copies.len() };
    let streams = program.ops.iter().map(on_stream).sum::<f64>() + costs.lane * (program.lanes.len() - 1) as f64;
    let nodes = program.ops.iter().map(nodes).sum::<usize>();
    let graph = costs.graph + costs.graph_node * nodes.saturating_sub(1) as f64;
    if graph < streams { Engine::Graph } else { Engine::Stream }
}

fn piece(candidates: &[Candidate], share: &Share) -> Piece {
    Piece { transfer: candidates[share.candidate].transfer, offset: share.offset, bytes: share.bytes }
}

/// Whether a kernel would delay bytes by more than issuing them by themselves costs.
pub(super) fn pays_alone(costs: &Costs, bytes: f64, rate: f64) -> bool {
    bytes / rate * (costs.kernel_efficiency.recip() - 1.0) > costs.issue
}

/// Whether one operation may move this share together with others.
fn may_fuse(machine: &Machine, options: &Options, candidate: &Candidate, share: &Share, shape: &Shape) -> bool {
    if [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable) {
        return false;
    }
    let costs = machine.costs();
    match options.engine {
        Engine::Auto | Engine::Graph => !pays_alone(costs, share.bytes as f64, candidate.model.rate),
        Engine::Batch => true,
        Engine::Kernel => is_in_device_memory(shape),
        Engine::Stream => false,
    }
}

fn choose(
    machine: &Machine,
    batch: &[Shape],
    options: &Options,
    candidates: &[Candidate],
    shares: &[Share],
    members: &[usize],
) -> Mechanism {
    match options.engine {
        Engine::Batch => return Mechanism::Batch,
        Engine::Kernel => return Mechanism::Kernel,
        _ if members.len() < 2 => return Mechanism::Copy,
        _ => {}
    }
    let seconds = |mechanism: Mechanism| {
        let each = members.chunks(if mechanism == Mechanism::Copy { 1 } else { members.len() });
        let operations = each.len();
        let flows = flows(machine, batch, candidates, shares, each.map(|members| (mechanism, members)));
        finish(machine, flows.into_iter().map(|flow| flow.1), operations)
    };
    // A kernel runs on a GPU and would read or write host memory through the bus, word by word.
    let in_device_memory = members.iter().all(|&at| is_in_device_memory(&batch[candidates[shares[at].candidate].transfer as usize]));
    let mut best = (seconds(Mechanism::Copy), Mechanism::Copy);
    for mechanism in [Mechanism::Batch, Mechanism::Kernel] {
        // A graph has no node for a batch.
        if mechanism == Mechanism::Kernel && !in_device_memory || mechanism == Mechanism::Batch && options.engine == Engine::Graph {
            continue;
        }
        let time = seconds(mechanism);
        if time < best.0 {
            best = (time, mechanism);
        }
    }
    best.1
}

/// Which of these operations follow each other on the device. A lane that either end may issue holds the copies of its two alone.
pub(super) fn lane_key<'a>(machine: &'a Machine, batch: &'a [Shape], direct: &[DirectOp]) -> impl Fn(&DirectOp) -> LaneKey + 'a {
    let busy = busy_exits(machine, batch, direct.iter());
    move |op| {
        let mut pairs = op.pieces.iter().map(|piece| pair(&batch[piece.transfer as usize]));
        let (src, dst) = pairs.next().unwrap_or((op.device, op.device));
        let is_fused = match op.mechanism {
            Mechanism::Copy => false,
            Mechanism::Batch => between_gpus((src, dst)).is_none() || pairs.any(|pair| pair != (src, dst)),
            Mechanism::Kernel => true,
        };
        match exit(machine, (src, dst)).filter(|exit| op.also.is_none() && busy.contains(exit)) {
            _ if is_fused => LaneKey::Fused(op.device),
            Some((src, link)) => LaneKey::From(src, link),
            None => LaneKey::Between(src, dst),
        }
    }
}

fn pair(shape: &Shape) -> (DeviceId, DeviceId) {
    (shape.src_device, shape.dst_device)
}
