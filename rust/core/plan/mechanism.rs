//! How direct shares are moved: each by a plain copy, or many by one batched call or one kernel.
//!
//! A plain copy costs `issue` on the host for each message; a batched call and a kernel cost more once and less per message, and
//! the kernel moves bytes a little slower than a copy engine. So a kernel is worth a message that it delays by less than the
//! message's own issue: `bytes / rate · (1 / efficiency − 1) ≤ issue`. Below that size the model compares the three for all
//! messages of a device. Above it several messages between the same two GPUs are one batched call, which leaves no gap between them
//! (readings, two H200: eight of 16 MiB 371 us one by one and 349 batched, two of 64 MiB 350 and 346).
//!
//! And by whom: by the GPU that the bytes leave from, or, where all copies of the batch meet in one GPU, by that one, so that nothing has to
//! wait for another: then small messages that it sends and receives are one kernel.
//!
//! A small batch between several GPUs is one kernel too, on the GPU of the caller's stream, which reads and writes the memory of the others:
//! joining GPUs takes longer than the bytes take through one GPU's ports (`one_kernel`).
//!
//! Small pieces with an end in pinned host memory are kernels as well: the GPU's threads read and write over its PCIe link.

use super::candidates::Candidate;
use super::lower::{DirectOp, Piece, copying_device};
use super::options::Options;
use super::selection::{Assignment, PathShare, Selection};
use crate::model::{BOTH_WAYS, Flow, Issue, PathModel, finish};
use crate::program::{Engine, Gpus, Lane, Mechanism, Shape};
use crate::topology::MemoryKind;
use crate::topology::{Costs, DeviceId, LinkId, LinkKind, Machine};
use smallvec::{SmallVec, smallvec};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// One direct operation and the flows that it starts.
pub(super) struct Launch {
    pub op: DirectOp,
    /// Indices into the shares.
    pub shares: Vec<usize>,
    /// The two GPUs between which it copies, unless it fuses small messages.
    between: Option<(DeviceId, DeviceId)>,
    /// Where one kernel moves what passes between other GPUs: for each pair of ends the way through the kernel's GPU.
    through: PairPaths,
}

/// For each pair of ends the way between them.
type PairPaths = Vec<(Pair, PathModel)>;

/// Where bytes come from and where they go.
type Pair = (DeviceId, DeviceId);

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

/// Whether one call for so many large copies takes less than a call for each.
fn gains_by_batch(costs: &Costs, copies: usize) -> bool {
    copies > 1 && costs.batch + costs.batch_segment * copies as f64 <= costs.copy + costs.issue * (copies - 1) as f64
}

fn is_in_device_memory(shape: &Shape) -> bool {
    shape.src_kind == MemoryKind::Device && shape.dst_kind == MemoryKind::Device
}

/// Whether the threads of a GPU reach both ends.
fn is_mapped(shape: &Shape) -> bool {
    ![shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable)
}

/// An operation as the model sees it.
pub(super) struct Issued<'a> {
    pub mechanism: Mechanism,
    /// Indices into the shares.
    pub members: &'a [usize],
    /// Whether the reading end issues it.
    is_pulled: bool,
    /// As [`Launch::through`].
    through: &'a [(Pair, PathModel)],
}

/// These launches as the model sees them, issued by a GPU that may issue all of them, if there is one, and else by their sources.
pub(super) fn issued(launches: &[Launch]) -> impl Iterator<Item = Issued<'_>> {
    let home = home(launches);
    launches.iter().map(move |launch| Issued {
        mechanism: launch.op.mechanism,
        members: &launch.shares,
        is_pulled: home.is_some_and(|home| launch.op.device != home),
        through: &launch.through,
    })
}

/// A GPU that may issue all of these operations.
fn home(launches: &[Launch]) -> Option<DeviceId> {
    let devices = |launch: &Launch| Lane { device: launch.op.device, also: launch.op.also }.devices();
    devices(launches.first()?).find(|device| launches.iter().all(|launch| devices(launch).any(|other| other == *device)))
}

/// Whether a caller's stream has to wait for operations of other GPUs, whichever GPU is its own.
pub(super) fn joins(launches: &[Launch]) -> bool {
    launches.len() > 1 && home(launches).is_none()
}

/// When the first byte of each operation may move, and the part of its paths' rate that it reaches, where they are issued in this order.
///
/// Plain copies between the same two devices follow each other: the next starts `issue` after the last
/// one's end, which the readings show as well for large messages (26 of 25 MB together: 134 us, of which 64 are bytes) as for small ones.
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
    /// The path of one of its shares.
    pub fn path(&self, batch: &[Shape], candidates: &'a [Candidate], share: &PathShare) -> &'a PathModel {
        let of = |ends: Pair| self.through.iter().find(|through| through.0 == ends);
        let through = if self.through.is_empty() { None } else { of(pair(&batch[share.transfer as usize])) };
        through.map_or(&candidates[share.candidate].model, |through| &through.1)
    }
}

/// What the model expects of operations that are issued in this order: a flow for all shares of an operation that are of the same demand.
pub(super) fn flows<'a>(
    machine: &Machine,
    batch: &[Shape],
    candidates: &'a [Candidate],
    shares: &[PathShare],
    operations: impl Iterator<Item = Issued<'a>>,
) -> Vec<Flow<'a>> {
    let mut flows: Vec<Flow<'a>> = Vec::new();
    // For each demand the place of its flow, of which those of the operation count.
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

/// Operations for the direct shares among `shares`, in the order in which they are issued.
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
    // One kernel for what several GPUs would send, on a GPU that reads and writes all of it.
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
    // First what leaves the GPU, then what arrives there: the kernel works on both halves of a list at once.
    let (mut fused, read): (Vec<usize>, Vec<usize>) = fused.into_iter().partition(|&at| pair_of(at).0 == point);
    fused.extend(read);
    let pieces = fused.iter().map(|&at| piece(&shares[at])).collect();
    let op = DirectOp { device: point, also: Gpus::NONE, mechanism: Mechanism::Kernel, pieces };
    together.push(Launch { op, shares: fused, between: None, through: Vec::new() });
    let together = finished(together);
    if options.engine == Engine::Kernel || seconds(&together) < seconds(&apart) { together } else { apart }
}

/// What joining costs beyond two GPUs: each further one has an event recorded and is waited for. With it the model has the readings of four H200:
/// a ring of 4 KiB forked and joined takes 22.2 us (read 22.5), an all-to-all 39.8 (read 38.7).
fn further_joins(machine: &Machine, launches: &[Launch]) -> f64 {
    let gpus: Gpus = launches.iter().map(|launch| launch.op.device).collect();
    machine.costs().issue * gpus.iter().count().saturating_sub(2) as f64
}

/// GPUs of a batch that one kernel may move. Readings are of two and four; planning takes time with the GPUs times the pairs of them.
const MOST_GPUS_OF_A_KERNEL: usize = 16;

/// All of a batch between several GPUs as one kernel, if that takes less than `than` seconds on each of them: the one that the caller's stream is
/// of does it. What passes between two others goes into that GPU by one direction of its port and leaves by the other.
///
/// Readings, four H200: a ring of 256 KiB 12.8 us against 22.5 by copies that are forked and joined, of 1 MiB 20.3 and 23.3, of 4 MiB 48.8 and
/// 33.7; an all-to-all of 256 KiB 17.7 and 38.3, of 1 MiB 39.7 and 50.1, of 4 MiB 126.8 and 88.8.
fn one_kernel(machine: &Machine, batch: &[Shape], shares: &[PathShare], members: Vec<usize>, than: f64) -> Option<Launch> {
    let mut bytes: BTreeMap<Pair, u64> = BTreeMap::new();
    for &at in &members {
        *bytes.entry(pair(&batch[shares[at].transfer as usize])).or_default() += shares[at].bytes;
    }
    let gpus: Gpus = bytes.keys().flat_map(|ends| [ends.0, ends.1]).collect();
    if gpus.iter().count() > MOST_GPUS_OF_A_KERNEL {
        return None;
    }
    // As in `meeting_points`: only over NVLink does a kernel read as fast as it writes.
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
            // Without staging: the kernel reads and writes word by word.
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
    // Where some GPUs would be slower, their streams would wait for another one's kernel: the model counts on none of that.
    if ways.len() < gpus.iter().count() {
        return None;
    }
    ways.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut gpus = ways.iter().map(|way| way.1);
    let device = gpus.next()?;
    let also = gpus.collect();
    // As the lane's own GPU does it, because the planner does not know the stream.
    let through = ways.swap_remove(0).2;
    let pieces = members.iter().map(|&at| piece(&shares[at])).collect();
    let op = DirectOp { device, also, mechanism: Mechanism::Kernel, pieces };
    Some(Launch { op, shares: members, between: None, through })
}

/// The same with every operation on the GPU that its bytes leave from, or arrive at from the host: its copies, and what it fuses. `direct` are
/// those of the shares that are to be moved.
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
    // Of each device what one operation may move, and the rest.
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
        // Large copies first: they take longest.
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

/// GPUs each of which is an end of all these copies and may issue them. Only over NVLink does it read as fast as the other end writes.
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

/// Orders plain copies between GPUs so that at any time no two of them write to the same GPU, as far as that is possible.
///
/// Copies that leave from one GPU follow each other even in streams of their own. In the order of their destinations' numbers, an
/// all-to-all of four GPUs begins with three that all write to GPU 0, and takes six times as long as one copy: 1057 us for 64 MiB were
/// read (`docs/results.md`), of which one takes 169. By neighbours it is three times.
///
/// Where sizes differ this is an open shop, whose machines are exits and entries of GPUs: next is what can begin first, of these the copy whose two
/// ends have most left to move, then the nearer neighbour. Because exits do not wait for their turn but share an entry, [`shop_time`] plays the order, and
/// of several the best is taken: on 300 random all-to-alls of 4 and 8 GPUs that ends after 1.05 times the longest load of an end in the median, at worst
/// after 1.19; the first order alone after 1.16 and 1.57.
fn take_turns(machine: &Machine, launches: &mut [Launch]) {
    let gpus = i64::from(machine.gpu_count());
    let shift = |(src, dst): Pair| (i64::from(dst.0) - i64::from(src.0)).rem_euclid(gpus);
    // Of each pair, whose copies follow each other, the place in the order, and until that is known the nanoseconds.
    let mut places: BTreeMap<Pair, u64> = BTreeMap::new();
    for launch in &*launches {
        if let Some((src, dst)) = launch.between {
            let bytes: u64 = launch.op.pieces.iter().map(|piece| piece.bytes).sum();
            let bandwidth = machine.route(src, dst).map_or(f64::INFINITY, |route| route.bandwidth);
            *places.entry((src, dst)).or_default() += (bytes as f64 / bandwidth * 1e9) as u64;
        }
    }
    // Of equal ones the shop's order is that of neighbours, which takes no search.
    let mut times = places.values();
    if times.next().is_some_and(|first| times.all(|time| time == first)) {
        places.iter_mut().for_each(|(pair, place)| *place = shift(*pair) as u64);
    } else {
        open_shop(machine, &mut places, shift);
    }
    launches.sort_by_key(|launch| match launch.between {
        Some(pair) => 1 + places[&pair],
        None if launch.op.mechanism == Mechanism::Copy => 0,
        // After the large copies, as on each device.
        None => u64::MAX,
    });
}

/// Orders of an [`open_shop`] that are tried, each with other weights; of more pairs than an all-to-all of eight GPUs has, one: time goes with their square.
const ORDERS: u64 = 16;
const MOST_PAIRS: usize = 56;

/// Makes places of times: see [`take_turns`].
fn open_shop(machine: &Machine, places: &mut BTreeMap<Pair, u64>, shift: impl Fn(Pair) -> i64) {
    // Exits and entries, with what each has to move.
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
            copies.push(ShopCopy { pair, exit, entry, time, shift: shift(pair), weight: 0 });
        }
    }
    let loads: Vec<u64> = ends.into_iter().map(|end| end.1).collect();
    let least = loads.iter().copied().max().unwrap_or(0) as f64;
    let orders = if copies.len() > MOST_PAIRS { 1 } else { ORDERS };
    let mut best = (f64::INFINITY, Vec::new());
    for number in 0..orders {
        let order = shop_order(copies.clone(), &loads, number);
        let time = shop_time(&order, loads.len());
        if time < best.0 {
            best = (time, order);
        }
        // Half a per cent more is as good as none.
        if best.0 <= least * 1.005 {
            break;
        }
    }
    for (place, copy) in (0..).zip(best.1) {
        places.insert(copy.pair, place);
    }
}

/// What is copied between two GPUs in an [`open_shop`]: the numbers of its ends, and nanoseconds.
#[derive(Clone)]
struct ShopCopy {
    pair: Pair,
    exit: usize,
    entry: usize,
    time: u64,
    shift: i64,
    /// Of what its ends have left, in the order that is being made.
    weight: u64,
}

/// Puts copies in an order. `loads` is what each end has to move. In order 0 all weights are equal, in others from 1 to 2.
fn shop_order(mut left: Vec<ShopCopy>, loads: &[u64], number: u64) -> Vec<ShopCopy> {
    // What each end has left, and when it is free.
    let mut ends: Vec<(u64, u64)> = loads.iter().map(|load| (*load, 0)).collect();
    let mut order = Vec::with_capacity(left.len());
    for copy in &mut left {
        let (src, dst) = copy.pair;
        let mixed = (64 * src.0 as u64 + dst.0 as u64 + 1).wrapping_mul(number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        copy.weight = 16 + (mixed >> 60);
    }
    let begin = |ends: &[(u64, u64)], copy: &ShopCopy| ends[copy.exit].1.max(ends[copy.entry].1);
    let key = |ends: &[(u64, u64)], copy: &ShopCopy| {
        (Reverse(ends[copy.exit].0.saturating_add(ends[copy.entry].0).saturating_mul(copy.weight)), copy.shift, copy.pair)
    };
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

/// When the last of copies in this order is done: an exit does not wait for an entry, but shares it with others.
fn shop_time(order: &[ShopCopy], ends: usize) -> f64 {
    let mut exits: Vec<Vec<&ShopCopy>> = vec![Vec::new(); ends];
    order.iter().rev().for_each(|copy| exits[copy.exit].push(copy));
    // What each exit is at, and how much of it is left.
    let mut active: Vec<(&ShopCopy, f64)> = Vec::new();
    active.extend(exits.iter_mut().filter_map(|exit| exit.pop()).map(|copy| (copy, copy.time as f64)));
    let (mut now, mut sharing) = (0.0, vec![0_u32; ends]);
    while !active.is_empty() {
        sharing.fill(0);
        active.iter().for_each(|(copy, _)| sharing[copy.entry] += 1);
        let wait = active.iter().map(|(copy, left)| left * f64::from(sharing[copy.entry])).fold(f64::INFINITY, f64::min);
        now += wait;
        active.retain_mut(|(copy, left)| {
            *left -= wait / f64::from(sharing[copy.entry]);
            if *left > 1.0 {
                return true;
            }
            let next = exits[copy.exit].pop();
            next.inspect(|next| (*copy, *left) = (next, next.time as f64)).is_some()
        });
    }
    now
}

/// For each demand of a selection whether its copy is long and leaves its GPU by a link by which others go to other GPUs.
pub(super) fn turns(selection: &Selection<'_>) -> Vec<bool> {
    let Selection { machine, demands, .. } = selection;
    let long = |shape: &Shape| {
        let route = machine.route(shape.src_device, shape.dst_device)?;
        (shape.bytes as f64 / route.bandwidth > machine.costs().copy).then(|| exit(machine, pair(shape)))?
    };
    let exits: Vec<Option<(Exit, DeviceId)>> = demands.iter().map(|demand| Some((long(&demand.shape)?, demand.shape.dst_device))).collect();
    let mut to: BTreeMap<Exit, Option<DeviceId>> = BTreeMap::new();
    for (exit, dst) in exits.iter().flatten() {
        to.entry(*exit).and_modify(|known| *known = known.filter(|known| known == dst)).or_insert(Some(*dst));
    }
    exits.iter().map(|own| own.is_some_and(|(exit, _)| to[&exit].is_none())).collect()
}

/// Seconds that shares take at least if this engine moves the direct ones: issuing, and the last of them after that. Infinite where that is no plan of
/// its own.
pub(super) fn least(selection: &Selection<'_>, assignment: &Assignment, engine: Engine) -> f64 {
    let costs = selection.machine.costs();
    let mut devices: SmallVec<[DeviceId; 16]> = SmallVec::new();
    let mut direct = 0_usize;
    for share in assignment.shares.iter().filter(|share| selection.candidates[share.candidate].via.is_none()) {
        let shape = &selection.batch[share.transfer as usize];
        let src = shape.src_device;
        // As in `choose`: beside pipelines no kernel writes or reads host memory.
        if engine == Engine::Kernel && !assignment.rings.is_empty() && !is_in_device_memory(shape) {
            return f64::INFINITY;
        }
        if !devices.contains(&src) {
            devices.push(src);
        }
        direct += 1;
    }
    // Where each GPU has one copy there is nothing to batch or to fuse.
    if direct <= devices.len() && engine == Engine::Batch && direct < assignment.shares.len() {
        return f64::INFINITY;
    }
    let Some(others) = direct.checked_sub(1) else { return f64::INFINITY };
    // Of what all GPUs fuse, one has as many as the mean at least.
    let each = direct.div_ceil(2 * devices.len()) as f64;
    match engine {
        Engine::Batch => costs.batch + costs.batch_segment * each,
        Engine::Kernel => costs.kernel + costs.kernel_segment * each,
        _ => costs.copy + costs.issue.min(costs.graph_node) * others as f64,
    }
}

/// Lets either end issue copies between two GPUs. From a stream of the reading GPU they then need no events across GPUs.
///
/// Where all copies of the batch meet in a GPU, that saves `fork_join_gpus` for all of them, and costs `pull` for each plain copy of a lane: both
/// directions between two GPUs end 5 to 8 us earlier in two streams of one GPU than in a stream of each, whatever they carry (readings, two
/// H200: 1 MiB 14.2 and 22.5 us, 4 MiB 22.5 and 27.5, 64 MiB 184 and 190). A kernel reads as fast as it writes.
///
/// Else it saves `join` for the lane, which holds all plain copies between the two; and because copies that one
/// GPU issues may follow each other (see [`take_turns`]), it may cost the time that the lane itself takes.
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
            // Two kernels of one GPU would share its multiprocessors.
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

/// Whether a kernel would delay bytes by more than issuing them by themselves costs.
pub(super) fn pays_alone(costs: &Costs, bytes: f64, rate: f64) -> bool {
    bytes / rate * (costs.kernel_efficiency.recip() - 1.0) > costs.issue
}

/// Whether one operation may move this share together with others.
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
    // Kernels that write host memory take the GPU's copy engines their way: beside 8 blocks that do, a copy to another GPU falls from 394 to
    // 102 GB/s and one to the host from 55 to 13; beside 8 that read it, to 372 and 43 (H200, 2026-11-22).
    let may_be_kernel = no_engine_at_work || members.iter().all(|&at| is_in_device_memory(&batch[shares[at].transfer as usize]));
    let mut best = (f64::INFINITY, Mechanism::Copy);
    for mechanism in [Mechanism::Batch, Mechanism::Kernel] {
        // A graph has no node for a batch.
        if mechanism == Mechanism::Kernel && !may_be_kernel || mechanism == Mechanism::Batch && options.engine == Engine::Graph {
            continue;
        }
        let time = seconds(mechanism);
        if time < best.0 {
            best = (time, mechanism);
        }
    }
    // Copies of which issuing alone takes longer need no look at each.
    let costs = machine.costs();
    let issued = costs.copy + costs.issue * (members.len() - 1) as f64;
    if best.0 < issued || best.0 < seconds(Mechanism::Copy) { best.1 } else { Mechanism::Copy }
}

/// Lets pieces into host memory and out of it alternate, as far as both last, so that each of several launches uses both directions of the link.
fn mix_directions(members: &mut [usize], pair: impl Fn(usize) -> Pair) {
    let (from_host, others): (Vec<usize>, Vec<usize>) = members.iter().partition(|&&at| pair(at).0.is_host());
    let (mut from, mut other) = (0, 0);
    for member in members {
        // The next of which a smaller part has passed, as of the middle of each.
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

/// Which of these operations follow each other on the device. A lane that either end may issue holds the copies of its two alone.
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
