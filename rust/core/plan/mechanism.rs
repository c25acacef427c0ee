//! Chooses the mechanism of direct copies: an individual copy for each piece (part of a transfer), or one batched call or one kernel for
//! many pieces.
//!
//! An individual copy costs the host the time `issue` for each message. A batched call and a kernel have a higher fixed cost and a lower
//! cost per message, and a kernel moves data slightly slower than a copy engine. So a kernel is useful for a message if it delays the
//! message by less than the time to issue it separately: `bytes / rate · (1 / efficiency − 1) ≤ issue`. For messages below that size, the
//! model compares the three mechanisms for all messages of a device. Above that size, several messages between the same two GPUs become one
//! batched call, which leaves no gap between them (measured on two H200: eight messages of 16 MiB take 371 us one by one and 349 us
//! batched; two of 64 MiB take 350 and 346 us).
//!
//! The module also chooses the GPU that issues an operation. Usually that is the GPU that the data leaves. If one GPU is the source or
//! destination of all copies of the batch, that GPU issues all of them, so that no GPU has to wait for another. The small messages that it
//! sends and receives are then one kernel.
//!
//! A small batch between several GPUs is one kernel too. It runs on the GPU of the caller's stream and reads and writes the memory of the
//! other GPUs, because synchronising GPUs takes longer than moving all data through one GPU's ports (`one_kernel`).
//!
//! Small pieces that begin or end in pinned host memory are also moved by kernels: GPU threads read and write them over the PCIe link.

use super::candidates::Candidate;
use super::lower::{DirectOp, Piece, copying_device};
use super::options::Options;
use super::selection::PathShare;
use crate::model::{BOTH_WAYS, Flow, Issue, PathModel, finish};
use crate::program::{Engine, Gpus, Lane, Mechanism, Shape};
use crate::topology::MemoryKind;
use crate::topology::{Costs, DeviceId, LinkId, LinkKind, Machine};
use smallvec::{SmallVec, smallvec};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Direct operation and the parts of transfers that it moves.
pub(super) struct Launch {
    pub op: DirectOp,
    /// Parts of transfers that the operation moves, as indices into the list of path shares.
    pub shares: Vec<usize>,
    /// Source and destination GPU of the operation's copies; `None` if the operation combines small messages, or if it is not between two
    /// GPUs.
    between: Option<(DeviceId, DeviceId)>,
    /// Models of the paths through the kernel's GPU, for each pair of GPUs between which the kernel moves data; empty for other operations.
    through: PairPaths,
}

/// Path models, each with the source and destination of its path.
type PairPaths = Vec<(Pair, PathModel)>;

/// Source device and destination device of a transfer.
type Pair = (DeviceId, DeviceId);

/// Key of direct operations. Operations with equal keys run in the same lane (internal stream).
#[derive(Copy, Clone, PartialEq, Eq)]
pub(super) enum LaneKey {
    /// Copies that leave a GPU over this link to other GPUs, if at least one of them takes longer than its startup time. Such copies run
    /// one after the other in any case. In one lane (internal stream) they keep the order chosen by [`take_turns`]. In separate lanes the
    /// driver chooses the order: an all-to-all of four H200 with 64 MiB took 698 us in separate lanes, and 545 us in one lane per link. If
    /// all copies over a link are shorter than their startup time, they use separate lanes, so that they overlap in that time. If every
    /// pair of GPUs is directly connected, each pair has its own link.
    From(DeviceId, LinkId),
    /// Copies from one device to another, which all use one path.
    Between(DeviceId, DeviceId),
    /// Small messages that one batched call or kernel of this device moves.
    Fused(DeviceId),
}

/// GPU, and the link over which a copy to another GPU leaves it.
type Exit = (DeviceId, LinkId);

fn exit(machine: &Machine, pair: (DeviceId, DeviceId)) -> Option<Exit> {
    let (src, dst) = between_gpus(pair)?;
    Some((src, *machine.route(src, dst)?.links.first()?))
}

/// Returns the GPUs and outgoing links whose copies to other GPUs take long enough to be ordered by [`take_turns`].
fn busy_exits<'a>(machine: &Machine, batch: &[Shape], direct: impl Iterator<Item = &'a DirectOp>) -> Vec<Exit> {
    let mut longest: BTreeMap<Pair, u64> = BTreeMap::new();
    for op in direct.filter(|op| op.mechanism != Mechanism::Kernel && op.also.is_empty()) {
        for piece in &op.pieces {
            let bytes = longest.entry(pair(&batch[piece.transfer as usize])).or_default();
            *bytes = piece.bytes.max(*bytes);
        }
    }
    let is_long =
        |pair: Pair, bytes: u64| machine.route(pair.0, pair.1).is_some_and(|route| bytes as f64 / route.bandwidth > machine.costs().copy);
    let mut exits = Vec::new();
    for (pair, _) in longest.into_iter().filter(|(pair, bytes)| is_long(*pair, *bytes)) {
        exits.extend(exit(machine, pair).filter(|exit| !exits.contains(exit)));
    }
    exits
}

fn between_gpus(pair: (DeviceId, DeviceId)) -> Option<(DeviceId, DeviceId)> {
    (pair.0 != pair.1 && !pair.0.is_host() && !pair.1.is_host()).then_some(pair)
}

/// True if one batched call for this number of large copies takes less time than a separate call for each copy.
fn gains_by_batch(costs: &Costs, copies: usize) -> bool {
    copies > 1 && costs.batch + costs.batch_segment * copies as f64 <= costs.copy + costs.issue * (copies - 1) as f64
}

fn is_in_device_memory(shape: &Shape) -> bool {
    shape.src_kind == MemoryKind::Device && shape.dst_kind == MemoryKind::Device
}

/// True if GPU threads can access both the source and the destination of the transfer.
fn is_mapped(shape: &Shape) -> bool {
    ![shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable)
}

/// Direct operation in the form that the cost model uses.
pub(super) struct Issued<'a> {
    pub mechanism: Mechanism,
    /// Parts of transfers that the operation moves, as indices into the list of path shares.
    pub members: &'a [usize],
    /// True if the receiving GPU issues the operation.
    is_pulled: bool,
    /// Models of paths through the kernel's GPU; see [`Launch::through`].
    through: &'a [(Pair, PathModel)],
}

/// Returns the operations in the form that the cost model uses. If one GPU may issue all of them, it does; otherwise the source of each
/// operation issues it.
pub(super) fn issued(launches: &[Launch]) -> impl Iterator<Item = Issued<'_>> {
    let home = home(launches);
    launches.iter().map(move |launch| Issued {
        mechanism: launch.op.mechanism,
        members: &launch.shares,
        is_pulled: home.is_some_and(|home| launch.op.device != home),
        through: &launch.through,
    })
}

/// Returns a GPU that may issue all operations of `launches`; `None` if there is none.
fn home(launches: &[Launch]) -> Option<DeviceId> {
    let devices = |launch: &Launch| Lane { device: launch.op.device, also: launch.op.also }.devices();
    devices(launches.first()?).find(|device| launches.iter().all(|launch| devices(launch).any(|other| other == *device)))
}

/// True if no single GPU may issue all operations, so that the caller's stream must wait for operations of other GPUs.
pub(super) fn joins(launches: &[Launch]) -> bool {
    launches.len() > 1 && home(launches).is_none()
}

/// Returns each operation with the time in seconds at which its first byte may move, and the fraction of its path's rate that it reaches.
/// The operations are issued in this order.
///
/// Individual copies between the same two devices run one after the other: each starts `issue` after the previous one's end. Measurements
/// show this for large messages (26 messages of 25 MB in total take 134 us; the data alone takes 64 us) and for small ones.
pub(super) fn started<'a>(
    machine: &Machine,
    batch: &[Shape],
    candidates: &[Candidate],
    shares: &[PathShare],
    operations: impl Iterator<Item = Issued<'a>>,
) -> impl Iterator<Item = (Issued<'a>, f64, f64)> {
    let costs = machine.costs();
    let mut lanes: Vec<(Pair, f64)> = Vec::new();
    operations.enumerate().map(move |(order, issued)| {
        let Issued { mechanism, members, is_pulled, .. } = issued;
        let messages = members.len() as f64;
        let mut head = costs.issue * order as f64
            + match mechanism {
                Mechanism::Copy | Mechanism::Thread => costs.copy + if is_pulled { costs.pull } else { 0.0 },
                Mechanism::Batch => costs.batch + costs.batch_segment * messages,
                Mechanism::Kernel => costs.kernel + costs.kernel_segment * messages,
            };
        if let (Mechanism::Copy, &[at]) = (mechanism, members) {
            let key = pair(&batch[shares[at].transfer as usize]);
            let busy = shares[at].bytes as f64 / candidates[shares[at].candidate].model.rate;
            match lanes.iter_mut().find(|lane| lane.0 == key) {
                Some((_, end)) => {
                    head = head.max(*end + costs.issue);
                    *end = head + busy;
                }
                None => lanes.push((key, head + busy)),
            }
        }
        let source = |at: usize| batch[shares[at].transfer as usize].src_device;
        let efficiency = match mechanism {
            Mechanism::Kernel if members.iter().any(|&at| source(at) != source(members[0])) => costs.kernel_efficiency * BOTH_WAYS,
            Mechanism::Kernel => costs.kernel_efficiency,
            _ => 1.0,
        };
        (issued, head, efficiency)
    })
}

impl<'a> Issued<'a> {
    /// Returns the model of the path of one part of a transfer that the operation moves.
    pub fn path(&self, batch: &[Shape], candidates: &'a [Candidate], share: &PathShare) -> &'a PathModel {
        let of = |ends: Pair| self.through.iter().find(|through| through.0 == ends);
        let through = if self.through.is_empty() { None } else { of(pair(&batch[share.transfer as usize])) };
        through.map_or(&candidates[share.candidate].model, |through| &through.1)
    }
}

/// Returns the modelled flows of operations that are issued in this order. Similar parts of transfers in one operation are combined to one
/// flow.
pub(super) fn flows<'a>(
    machine: &Machine,
    batch: &[Shape],
    candidates: &'a [Candidate],
    shares: &[PathShare],
    operations: impl Iterator<Item = Issued<'a>>,
) -> Vec<Flow<'a>> {
    let mut flows: Vec<Flow<'a>> = Vec::new();
    // Index of the last flow of each demand. It is used only if that flow belongs to the current operation.
    let mut places = vec![usize::MAX; candidates.last().map_or(0, |last| last.demand as usize + 1)];
    for (issued, head, efficiency) in started(machine, batch, candidates, shares, operations) {
        let first = flows.len();
        for share in issued.members.iter().map(|&at| &shares[at]) {
            let place = &mut places[candidates[share.candidate].demand as usize];
            match flows.get_mut(*place).filter(|_| *place >= first) {
                Some(flow) => flow.add(share.bytes),
                None => {
                    *place = flows.len();
                    flows.push(Flow { efficiency, ..Flow::new(issued.path(batch, candidates, share), share.bytes, 1, head) });
                }
            }
        }
    }
    flows
}

/// Returns the operations for the parts of transfers on direct paths, in the order in which they are issued.
pub(super) fn launches(
    machine: &Machine,
    batch: &[Shape],
    options: &Options,
    candidates: &[Candidate],
    shares: &[PathShare],
) -> Vec<Launch> {
    let direct: Vec<usize> = (0..shares.len()).filter(|&at| candidates[shares[at].candidate].via.is_none()).collect();
    let pair_of = |at: usize| pair(&batch[shares[at].transfer as usize]);
    let all_direct = direct.len() == shares.len();
    let points = if all_direct { meeting_points(machine, direct.iter().map(|&at| pair_of(at))) } else { SmallVec::new() };
    let finished = |mut launches: Vec<Launch>| {
        take_turns(machine, &mut launches);
        free_ends(machine, batch, &points, &mut launches);
        launches
    };
    let fusible = |share: &PathShare| may_fuse(machine, options, &candidates[share.candidate], share, &batch[share.transfer as usize]);
    let fusible: Vec<bool> = shares.iter().map(fusible).collect();
    let by_device = |direct: &[usize]| launches_by_device(machine, batch, options, candidates, shares, &fusible, direct);
    let apart = finished(by_device(&direct));
    let seconds = |launches: &[Launch]| {
        let flows = flows(machine, batch, candidates, shares, issued(launches));
        let issue = Issue { joins_gpus: joins(launches), ..Issue::copies(machine.costs(), launches.len()) };
        finish(machine, flows, &issue)
    };
    // Tries one kernel for all messages that several GPUs would send. It runs on a GPU that is the source or destination of each message.
    let is_fused = |at: usize| fusible[at] && is_in_device_memory(&batch[shares[at].transfer as usize]);
    let mut sources = direct.iter().filter(|&&at| is_fused(at)).map(|&at| pair_of(at).0);
    let Some(first) = sources.next() else { return apart };
    if options.engine == Engine::Batch || sources.all(|source| source == first) {
        return apart;
    }
    let Some(&point) = points.first() else {
        if !all_direct || !direct.iter().all(|&at| is_fused(at)) {
            return apart;
        }
        let than = seconds(&apart) + further_joins(machine, &apart);
        return one_kernel(machine, batch, shares, direct, than).map_or(apart, |launch| vec![launch]);
    };
    let (fused, rest): (Vec<usize>, Vec<usize>) = direct.into_iter().partition(|&at| is_fused(at));
    let mut together = by_device(&rest);
    // Messages that leave the GPU come first, then those that arrive. The kernel processes the first and the second part of the list
    // concurrently.
    let (mut fused, read): (Vec<usize>, Vec<usize>) = fused.into_iter().partition(|&at| pair_of(at).0 == point);
    fused.extend(read);
    let pieces = fused.iter().map(|&at| piece(&shares[at])).collect();
    let op = DirectOp { device: point, also: Gpus::NONE, mechanism: Mechanism::Kernel, pieces };
    together.push(Launch { op, shares: fused, between: None, through: Vec::new() });
    let together = finished(together);
    if options.engine == Engine::Kernel || seconds(&together) < seconds(&apart) { together } else { apart }
}

/// Returns the cost of synchronising more than two GPUs, in seconds: for each further GPU an event is recorded and waited for. With this
/// cost the model agrees with measurements on four H200: a ring of 4 KiB copies takes 22.2 us with fork and join (measured 22.5), an
/// all-to-all 39.8 (measured 38.7).
fn further_joins(machine: &Machine, launches: &[Launch]) -> f64 {
    let gpus: Gpus = launches.iter().map(|launch| launch.op.device).collect();
    machine.costs().issue * gpus.iter().count().saturating_sub(2) as f64
}

/// Largest number of GPUs whose data one kernel may move. Measurements exist for two and four. Planning time grows with the number of GPUs
/// times the number of their pairs.
const MOST_GPUS_OF_A_KERNEL: usize = 16;

/// Returns one kernel for a whole batch between several GPUs, if the kernel would take less than `than` seconds on each of these GPUs. The
/// GPU of the caller's stream executes it. Data between two other GPUs enters that GPU through one direction of its port and leaves through
/// the other direction.
///
/// Measured on four H200, in comparison with copies that are forked and joined. A ring of 256 KiB: 12.8 us (copies: 22.5); 1 MiB: 20.3
/// (23.3); 4 MiB: 48.8 (33.7). An all-to-all of 256 KiB: 17.7 us (copies: 38.3); 1 MiB: 39.7 (50.1); 4 MiB: 126.8 (88.8).
fn one_kernel(machine: &Machine, batch: &[Shape], shares: &[PathShare], members: Vec<usize>, than: f64) -> Option<Launch> {
    let mut bytes: BTreeMap<Pair, u64> = BTreeMap::new();
    for &at in &members {
        *bytes.entry(pair(&batch[shares[at].transfer as usize])).or_default() += shares[at].bytes;
    }
    let gpus: Gpus = bytes.keys().flat_map(|ends| [ends.0, ends.1]).collect();
    if gpus.iter().count() > MOST_GPUS_OF_A_KERNEL {
        return None;
    }
    // A kernel reads as fast as it writes only over NVLink; see `meeting_points`.
    let reaches = |gpu: DeviceId, other: DeviceId| {
        let by_nvlink = |from, to| {
            let links = machine.route(from, to).map(|route| &route.links[..]).unwrap_or_default();
            !links.is_empty() && links.iter().all(|link| is_nvlink(machine, *link))
        };
        gpu == other || by_nvlink(gpu, other) && by_nvlink(other, gpu)
    };
    let homes = gpus.iter().filter(|&gpu| gpus.iter().all(|other| reaches(gpu, other)));
    let through = |home: DeviceId| -> Option<PairPaths> {
        let way = |ends: &Pair| {
            let (src, dst) = *ends;
            if src == home && dst == home || [src, dst].contains(&home) && src != dst {
                return Some((*ends, PathModel::new(machine, &[machine.route(src, dst)?])));
            }
            let mut model = PathModel::new(machine, &[machine.route(src, home)?, machine.route(home, dst)?]);
            // The data is not staged: the kernel reads and writes word by word.
            (model.hops, model.through_gpu) = (smallvec![model.rate], false);
            Some((*ends, model))
        };
        bytes.keys().map(way).collect()
    };
    let costs = machine.costs();
    let (head, efficiency) = (costs.kernel + costs.kernel_segment * members.len() as f64, costs.kernel_efficiency * BOTH_WAYS);
    let mut ways: Vec<(f64, DeviceId, PairPaths)> = Vec::new();
    for home in homes {
        let through = through(home)?;
        let flows = through.iter().zip(bytes.values()).map(|((_, path), &bytes)| Flow { efficiency, ..Flow::new(path, bytes, 1, head) });
        let seconds = finish(machine, flows, &Issue::copies(costs, 1));
        if seconds < than {
            ways.push((seconds, home, through));
        }
    }
    // If the kernel is too slow on some GPUs, their streams would have to wait for a kernel of another GPU. The model does not cover that
    // case.
    if ways.len() < gpus.iter().count() {
        return None;
    }
    ways.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut gpus = ways.iter().map(|way| way.1);
    let device = gpus.next()?;
    let also = gpus.collect();
    // The paths are those of the kernel on `device`, because the planner does not know the caller's stream.
    let through = ways.swap_remove(0).2;
    let pieces = members.iter().map(|&at| piece(&shares[at])).collect();
    let op = DirectOp { device, also, mechanism: Mechanism::Kernel, pieces };
    Some(Launch { op, shares: members, between: None, through })
}

/// Returns the operations for the parts of transfers `direct`, as single copies and combined copies. Each operation is issued by the GPU
/// that its data leaves, or by the GPU that receives the data from a host.
fn launches_by_device(
    machine: &Machine,
    batch: &[Shape],
    options: &Options,
    candidates: &[Candidate],
    shares: &[PathShare],
    fusible: &[bool],
    direct: &[usize],
) -> Vec<Launch> {
    let shape = |at: usize| &batch[shares[at].transfer as usize];
    let costs = machine.costs();
    // For each device: the path shares (parts of transfers) that one operation may combine, and the other path shares.
    let mut by_device: BTreeMap<DeviceId, [Vec<usize>; 2]> = BTreeMap::new();
    for &at in direct {
        let device = copying_device(shape(at).src_device, shape(at).dst_device);
        by_device.entry(device).or_default()[usize::from(device.is_host() || !fusible[at])].push(at);
    }
    let mut launches = Vec::new();
    let all_direct = shares.iter().all(|share| candidates[share.candidate].via.is_none());
    let no_engine_at_work = all_direct && direct.iter().all(|&at| fusible[at]);
    for (device, [mut fused, mut plain]) in by_device {
        let mechanism = choose(machine, batch, options, candidates, shares, &fused, no_engine_at_work);
        if mechanism == Mechanism::Kernel {
            mix_directions(&mut fused, |at| pair(shape(at)));
        }
        if mechanism == Mechanism::Copy {
            plain.append(&mut fused);
            plain.sort_unstable();
        }
        let mut launch = |mechanism, members: Vec<usize>, between| {
            let pieces = members.iter().map(|&at| piece(&shares[at])).collect();
            let op = DirectOp { device, also: Gpus::NONE, mechanism, pieces };
            launches.push(Launch { op, shares: members, between, through: Vec::new() });
        };
        // Large copies come first, because they take longest.
        if all_direct {
            plain.sort_by_key(|&at| pair(shape(at)));
        }
        for alike in plain.chunk_by(|&a, &b| pair(shape(a)) == pair(shape(b))) {
            let between = between_gpus(pair(shape(alike[0])));
            let in_device_memory = alike.iter().all(|&at| is_in_device_memory(shape(at)));
            if between.is_some() && in_device_memory && all_direct && options.engine == Engine::Auto && gains_by_batch(costs, alike.len()) {
                launch(Mechanism::Batch, alike.to_vec(), between);
            } else {
                alike.iter().for_each(|&at| launch(Mechanism::Copy, vec![at], between));
            }
        }
        if !fused.is_empty() {
            launch(mechanism, fused, None);
        }
    }
    launches
}

fn is_nvlink(machine: &Machine, link: LinkId) -> bool {
    machine.topology().links[link.0 as usize].kind == LinkKind::Nvlink
}

/// Returns the GPUs that may issue all copies in `pairs`, because each of them is the source or destination of every copy. A receiving GPU
/// counts only if it is connected by NVLink, because only then does it read as fast as the source writes.
fn meeting_points(machine: &Machine, pairs: impl Iterator<Item = (DeviceId, DeviceId)>) -> SmallVec<[DeviceId; 2]> {
    let mut points: Option<SmallVec<[DeviceId; 2]>> = None;
    let mut seen: SmallVec<[Pair; 4]> = SmallVec::new();
    for (src, dst) in pairs {
        if seen.contains(&(src, dst)) {
            continue;
        }
        seen.push((src, dst));
        let mut ends: SmallVec<[DeviceId; 2]> = smallvec![copying_device(src, dst)];
        if between_gpus((src, dst)).is_some()
            && machine.route(src, dst).is_some_and(|route| route.links.iter().all(|link| is_nvlink(machine, *link)))
        {
            ends.push(dst);
        }
        match &mut points {
            Some(points) => points.retain(|point| ends.contains(point)),
            None => points = Some(ends),
        }
        if points.as_ref().is_some_and(|points| points.is_empty()) {
            break;
        }
    }
    points.unwrap_or_default()
}

/// Orders individual copies between GPUs so that, as far as possible, no two of them write to the same GPU at the same time.
///
/// Copies that leave one GPU run one after the other even in separate streams. If each GPU sends in the order of the destinations' numbers,
/// an all-to-all of four GPUs begins with three copies to GPU 0, and takes six times as long as one copy (measured for 64 MiB: 1057 us,
/// compared with 169 us for one copy; `docs/results.md`). If each GPU starts with its next neighbour, it takes three times as long as one
/// copy.
///
/// If sizes differ, this is an open-shop scheduling problem. Its machines are the exits and entries of GPUs, that is, their outgoing and
/// incoming links. The next copy is one of those that can begin first. Among several, it is the copy whose exit and entry have the most
/// data left to move, then the copy to the nearer neighbour.
fn take_turns(machine: &Machine, launches: &mut [Launch]) {
    let gpus = i64::from(machine.gpu_count());
    let shift = |(src, dst): Pair| (i64::from(dst.0) - i64::from(src.0)).rem_euclid(gpus);
    // For each pair of GPUs, between which copies run one after the other: the total time of the copies in nanoseconds, later replaced by
    // the pair's position in the order.
    let mut places: BTreeMap<Pair, u64> = BTreeMap::new();
    for launch in &*launches {
        if let Some((src, dst)) = launch.between {
            let bytes: u64 = launch.op.pieces.iter().map(|piece| piece.bytes).sum();
            let bandwidth = machine.route(src, dst).map_or(f64::INFINITY, |route| route.bandwidth);
            *places.entry((src, dst)).or_default() += (bytes as f64 / bandwidth * 1e9) as u64;
        }
    }
    // If all pairs take equally long, the best order is by neighbours, and no search is needed.
    let mut times = places.values();
    if times.next().is_some_and(|first| times.all(|time| time == first)) {
        places.iter_mut().for_each(|(pair, place)| *place = shift(*pair) as u64);
    } else {
        open_shop(machine, &mut places, shift);
    }
    launches.sort_by_key(|launch| match launch.between {
        Some(pair) => 1 + places[&pair],
        None if launch.op.mechanism == Mechanism::Copy => 0,
        // Other operations come after the large copies, as on each device.
        None => u64::MAX,
    });
}

/// Replaces the times in `places` by positions in the order; see [`take_turns`].
fn open_shop(machine: &Machine, places: &mut BTreeMap<Pair, u64>, shift: impl Fn(Pair) -> i64) {
    // Exits and entries of GPUs, each with the total time of its copies in nanoseconds.
    let mut ends: Vec<(Exit, u64)> = Vec::new();
    let mut end = |exit: Exit, time: u64| {
        let at = ends.iter().position(|end| end.0 == exit).unwrap_or_else(|| {
            ends.push((exit, 0));
            ends.len() - 1
        });
        ends[at].1 += time;
        at
    };
    let mut copies: Vec<ShopCopy> = Vec::with_capacity(places.len());
    for (&pair, &time) in &*places {
        let (src, dst) = pair;
        let links = machine.route(src, dst).and_then(|route| Some((*route.links.first()?, *route.links.last()?)));
        if let Some((first, last)) = links {
            let (exit, entry) = (end((src, first), time), end((dst, last), time));
            copies.push(ShopCopy { pair, exit, entry, time, shift: shift(pair) });
        }
    }
    let loads: Vec<u64> = ends.into_iter().map(|end| end.1).collect();
    for (place, copy) in (0..).zip(shop_order(copies, loads)) {
        places.insert(copy.pair, place);
    }
}

/// Copy between two GPUs in an [`open_shop`]: indices of its exit (source port) and entry (destination port), and its time in nanoseconds.
struct ShopCopy {
    pair: Pair,
    exit: usize,
    entry: usize,
    time: u64,
    shift: i64,
}

/// Returns the copies in the order of execution. `loads` is the total copy time at each exit (source port) and entry (destination port).
fn shop_order(mut left: Vec<ShopCopy>, loads: Vec<u64>) -> Vec<ShopCopy> {
    // For each exit and entry: the time left to move, and the time at which it becomes free.
    let mut ends: Vec<(u64, u64)> = loads.into_iter().map(|load| (load, 0)).collect();
    let mut order = Vec::with_capacity(left.len());
    let begin = |ends: &[(u64, u64)], copy: &ShopCopy| ends[copy.exit].1.max(ends[copy.entry].1);
    let key = |ends: &[(u64, u64)], copy: &ShopCopy| (Reverse(ends[copy.exit].0.saturating_add(ends[copy.entry].0)), copy.shift, copy.pair);
    while let Some(soonest) = left.iter().map(|copy| begin(&ends, copy)).min() {
        let soon = (0..left.len()).filter(|at| begin(&ends, &left[*at]) == soonest);
        let Some(next) = soon.min_by_key(|at| key(&ends, &left[*at])) else { break };
        let copy = left.swap_remove(next);
        let done = soonest + copy.time;
        for end in [copy.exit, copy.entry] {
            ends[end] = (ends[end].0 - copy.time, done);
        }
        order.push(copy);
    }
    order
}

/// Allows either the source or the destination GPU of a copy to issue it, if that saves time. Copies issued from a stream of the receiving
/// GPU then need no events across GPUs.
///
/// If all copies of the batch have one GPU in common, this saves `fork_join_gpus` once, and costs `pull` for each individual copy of an
/// internal stream. Copies in both directions between two GPUs end 5 to 8 us earlier in two streams of one GPU than in a stream of each
/// GPU, for all sizes (measured on two H200: 1 MiB 14.2 and 22.5 us, 4 MiB 22.5 and 27.5, 64 MiB 184 and 190). A kernel reads as fast as it
/// writes.
///
/// Otherwise it saves `fork_join_staged` for the internal stream, which holds all individual copies between the two GPUs. Copies that one
/// GPU issues may run one after the other (see [`take_turns`]), so it may cost the time of the stream's copies.
fn free_ends(machine: &Machine, batch: &[Shape], points: &[DeviceId], launches: &mut [Launch]) {
    let costs = machine.costs();
    let mut losses: BTreeMap<(DeviceId, DeviceId), (f64, f64)> = BTreeMap::new();
    for launch in &*launches {
        if let Some((src, dst)) = launch.between
            && let Some(route) = machine.route(src, dst)
        {
            let bytes: u64 = launch.op.pieces.iter().map(|piece| piece.bytes).sum();
            let loss = losses.entry((src, dst)).or_default();
            loss.0 += costs.pull;
            loss.1 += bytes as f64 / route.bandwidth;
        }
    }
    let kernels = launches.iter().filter(|launch| launch.op.mechanism == Mechanism::Kernel).count();
    for launch in launches {
        let ends = |piece: &Piece| <[DeviceId; 2]>::from(pair(&batch[piece.transfer as usize]));
        let point = || {
            points.iter().copied().find(|&point| {
                point != launch.op.device
                    && launch.op.pieces.iter().all(|piece| ends(piece).contains(&point) && ends(piece).contains(&launch.op.device))
            })
        };
        let other = match (launch.op.mechanism, launch.between) {
            // Two kernels on one GPU would share its multiprocessors.
            (Mechanism::Kernel, _) if kernels == 1 => point(),
            (Mechanism::Copy, Some(between)) => losses.get(&between).and_then(|&(pulls, busy)| {
                point().filter(|_| pulls < costs.fork_join_gpus).or((pulls + busy < costs.fork_join_staged).then_some(between.1))
            }),
            _ => None,
        };
        launch.op.also = other.into_iter().collect();
    }
}

fn piece(share: &PathShare) -> Piece {
    Piece { transfer: share.transfer, offset: share.offset, bytes: share.bytes }
}

/// True if a kernel would delay data of this size by more than the cost of issuing a separate copy. `rate` is the rate of the path in
/// bytes/s.
pub(super) fn pays_alone(costs: &Costs, bytes: f64, rate: f64) -> bool {
    bytes / rate * (costs.kernel_efficiency.recip() - 1.0) > costs.issue
}

/// True if one operation may move this part of a transfer together with other parts.
fn may_fuse(machine: &Machine, options: &Options, candidate: &Candidate, share: &PathShare, shape: &Shape) -> bool {
    if !is_mapped(shape) {
        return false;
    }
    let costs = machine.costs();
    match options.engine {
        Engine::Auto | Engine::Graph => !pays_alone(costs, share.bytes as f64, candidate.model.rate),
        Engine::Batch => true,
        Engine::Kernel => true,
        Engine::Stream => false,
    }
}

fn choose(
    machine: &Machine,
    batch: &[Shape],
    options: &Options,
    candidates: &[Candidate],
    shares: &[PathShare],
    members: &[usize],
    no_engine_at_work: bool,
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
        let each = each.map(|members| Issued { mechanism, members, is_pulled: false, through: &[] });
        let flows = flows(machine, batch, candidates, shares, each);
        finish(machine, flows, &Issue::copies(machine.costs(), operations))
    };
    // Kernels that write host memory slow down the GPU's copy engines. While 8 blocks write host memory, a copy to another GPU falls from
    // 394 to 102 GB/s, and a copy to the host from 55 to 13 GB/s. While 8 blocks read host memory, they fall to 372 and 43 GB/s (H200,
    // 2026-11-22).
    let may_be_kernel = no_engine_at_work || members.iter().all(|&at| is_in_device_memory(&batch[shares[at].transfer as usize]));
    let mut best = (f64::INFINITY, Mechanism::Copy);
    for mechanism in [Mechanism::Batch, Mechanism::Kernel] {
        // Graphs have no node type for a batch.
        if mechanism == Mechanism::Kernel && !may_be_kernel || mechanism == Mechanism::Batch && options.engine == Engine::Graph {
            continue;
        }
        let time = seconds(mechanism);
        if time < best.0 {
            best = (time, mechanism);
        }
    }
    // If merely issuing individual copies takes longer than the best alternative, they need not be modelled.
    let costs = machine.costs();
    let issued = costs.copy + costs.issue * (members.len() - 1) as f64;
    if best.0 < issued || best.0 < seconds(Mechanism::Copy) { best.1 } else { Mechanism::Copy }
}

/// Interleaves pieces (parts of transfers) to and from host memory in proportion to their numbers, so that every section of the list uses
/// both directions of the link.
fn mix_directions(members: &mut [usize], pair: impl Fn(usize) -> Pair) {
    let (from_host, others): (Vec<usize>, Vec<usize>) = members.iter().partition(|&&at| pair(at).0.is_host());
    let (mut from, mut other) = (0, 0);
    for member in members {
        // The next piece comes from the list of which a smaller fraction has been used, measured at the middle of each piece.
        let (part_from, part_others) = ((2 * from + 1) * others.len(), (2 * other + 1) * from_host.len());
        *member = if other == others.len() || from < from_host.len() && (part_from, from_host[from]) < (part_others, others[other]) {
            from += 1;
            from_host[from - 1]
        } else {
            other += 1;
            others[other - 1]
        };
    }
}

/// Returns the function that assigns a direct operation to a lane (internal stream). Operations of a lane run one after the other on the
/// device. A lane that either GPU may issue holds only copies between its two GPUs.
pub(super) fn lane_key<'a>(machine: &'a Machine, batch: &'a [Shape], direct: &[DirectOp]) -> impl Fn(&DirectOp) -> LaneKey + 'a {
    let busy = busy_exits(machine, batch, direct.iter());
    move |op| {
        let mut pairs = op.pieces.iter().map(|piece| pair(&batch[piece.transfer as usize]));
        let (src, dst) = pairs.next().unwrap_or((op.device, op.device));
        let is_fused = match op.mechanism {
            Mechanism::Copy | Mechanism::Thread => false,
            Mechanism::Batch => between_gpus((src, dst)).is_none() || pairs.any(|pair| pair != (src, dst)),
            Mechanism::Kernel => true,
        };
        match exit(machine, (src, dst)).filter(|exit| op.also.is_empty() && busy.contains(exit)) {
            _ if is_fused => LaneKey::Fused(op.device),
            Some((src, link)) => LaneKey::From(src, link),
            None => LaneKey::Between(src, dst),
        }
    }
}

fn pair(shape: &Shape) -> (DeviceId, DeviceId) {
    (shape.src_device, shape.dst_device)
}
