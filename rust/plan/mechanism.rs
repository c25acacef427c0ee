//! How direct shares are moved: each by a plain copy, or many by one batched call or one kernel.
//!
//! A plain copy costs `issue` on the host for each message; a batched call and a kernel cost more once and less per message, and
//! the kernel moves bytes a little slower than a copy engine. So a kernel is worth a message that it delays by less than the
//! message's own issue: `bytes / rate · (1 / efficiency − 1) ≤ issue`. Below that size the model compares the three for all
//! messages of a device.

use super::candidates::Candidate;
use super::choose::Share;
use super::lower::{DirectOp, Piece, copying_device};
use super::program::Mechanism;
use super::{Engine, Options, Shape};
use crate::backend::MemoryKind;
use crate::model::{Flow, finish};
use crate::topology::{DeviceId, Machine};

/// One direct operation and the flows that it starts.
pub(super) struct Launch {
    pub op: DirectOp,
    /// Indices into the shares.
    pub shares: Vec<usize>,
}

/// What the model expects of operations that are issued in this order, one flow for each share. `members` are indices into `shares`.
///
/// Plain copies of one lane follow each other: the next starts `issue` after the last one's end, which the readings show as well for
/// large messages (26 of 25 MB together: 134 us, of which 64 are bytes) as for small ones.
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
            let pair = pair(&batch[candidate.transfer as usize]);
            let busy = shares[at].bytes as f64 / candidate.model.rate;
            match lanes.iter_mut().find(|lane| lane.0 == pair) {
                Some((_, end)) => {
                    head = head.max(*end + costs.issue);
                    *end = head + busy;
                }
                None => lanes.push((pair, head + busy)),
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
    let mut direct: Vec<(DeviceId, usize)> = (0..shares.len())
        .filter(|&at| candidates[shares[at].candidate].via.is_none())
        .map(|at| (copying_device(shape(at).src_device, shape(at).dst_device), at))
        .collect();
    direct.sort();
    let mut launches = Vec::new();
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
        let mut launch = |mechanism, members: &[usize]| {
            let pieces = members.iter().map(|&at| piece(candidates, &shares[at])).collect();
            launches.push(Launch { op: DirectOp { device, mechanism, pieces }, shares: members.to_vec() });
        };
        // Large copies first: they take longest.
        plain.iter().for_each(|&at| launch(Mechanism::Copy, &[at]));
        if !fused.is_empty() {
            launch(mechanism, &fused);
        }
    }
    launches
}

fn piece(candidates: &[Candidate], share: &Share) -> Piece {
    Piece { transfer: candidates[share.candidate].transfer, offset: share.offset, bytes: share.bytes }
}

/// Whether one operation may move this share together with others.
fn may_fuse(machine: &Machine, options: &Options, candidate: &Candidate, share: &Share, shape: &Shape) -> bool {
    if [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable) {
        return false;
    }
    let costs = machine.costs();
    match options.engine {
        Engine::Auto => share.bytes as f64 / candidate.model.rate * (costs.kernel_efficiency.recip() - 1.0) <= costs.issue,
        Engine::Batch => true,
        Engine::Kernel => shape.src_kind == MemoryKind::Device && shape.dst_kind == MemoryKind::Device,
        Engine::Stream | Engine::Graph => false,
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
    let in_device_memory = members.iter().all(|&at| {
        let shape = &batch[candidates[shares[at].candidate].transfer as usize];
        shape.src_kind == MemoryKind::Device && shape.dst_kind == MemoryKind::Device
    });
    let mut best = (seconds(Mechanism::Copy), Mechanism::Copy);
    for mechanism in [Mechanism::Batch, Mechanism::Kernel] {
        if mechanism == Mechanism::Kernel && !in_device_memory {
            continue;
        }
        let time = seconds(mechanism);
        if time < best.0 {
            best = (time, mechanism);
        }
    }
    best.1
}

/// Plain copies between the same two devices share a lane; whatever is fused has its own.
pub(super) fn lane_key(batch: &[Shape]) -> impl Fn(&DirectOp) -> (DeviceId, Option<DeviceId>) + '_ {
    |op| {
        let (src, dst) = pair(&batch[op.pieces[0].transfer as usize]);
        if op.mechanism == Mechanism::Copy { (src, Some(dst)) } else { (op.device, None) }
    }
}

fn pair(shape: &Shape) -> (DeviceId, DeviceId) {
    (shape.src_device, shape.dst_device)
}
