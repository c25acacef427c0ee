//! Pipelines as plans have them: beside a direct copy, and two that cross in one link.
//!
//! A pipeline alone hands its chunks over faster than one beside a direct copy, and two opposite pipelines move less at once than two plain
//! copies do (docs/performance.md). A path that is taken to be slower than it is costs a little gain; one that is taken to be faster makes a plan
//! slower than the plain copy. So what is found here errs on the slow side.

use super::session::{Session, TINY, grained};
use super::sharing::Sample;
use super::{Hop, Pipeline, Rig, Work, median};
use crate::model::{HOST_RINGS, PathModel, SLOTS};
use crate::topology::{Costs, DeviceId, Machine};

/// Seconds of the bytes of a pipeline, in units of a single copy's: as long as in plans from some tens of MiB to 1 GiB.
const LENGTHS: [f64; 5] = [0.125, 0.25, 0.5, 1.0, 2.0];
/// The direct copy is done when this part of the pipeline is, where the pipeline is measured.
const DIRECT_ENDS: f64 = 0.85;
/// The pipeline is done when this part of the direct copy is, where the join is measured.
const PIPELINE_ENDS: f64 = 0.5;
/// The most bytes of a direct copy and of a pipeline, as parts of the room: one of each arrives on a device, and two rings may lie there.
const DIRECT: f64 = 0.5;
/// See [`DIRECT`].
const STAGED: f64 = 0.125;
/// Further chunks that tell what one costs.
const ENOUGH: f64 = 8.0;

/// What pipelines take longer than their bytes.
pub(super) struct HandOvers {
    /// Through host memory.
    pub chunk: f64,
    /// Through a GPU.
    pub relay_chunk: f64,
    pub join: f64,
    /// Seconds of the calling thread for each operation.
    pub issue: f64,
}

/// A pipeline's ends and middle, and the plain copy that it runs beside.
struct Kind {
    from: DeviceId,
    via: DeviceId,
    to: DeviceId,
    path: PathModel,
    direct: Option<PathModel>,
}

impl Kind {
    /// `None` where there is no such pipeline, or no plan that has it: one that shares what limits it with the direct copy.
    fn new(machine: &Machine, from: DeviceId, via: DeviceId, to: DeviceId) -> Option<Kind> {
        let path = PathModel::new(machine, &[machine.route(from, via)?, machine.route(via, to)?]);
        let direct = machine.route(from, to).map(|route| PathModel::new(machine, &[route]));
        let fits = |direct: &PathModel| {
            path.weights.iter().all(|&(resource, weight)| {
                let beside = direct.weights.iter().find(|other| other.0 == resource).map_or(0.0, |other| other.1 * direct.rate);
                beside == 0.0 || weight * path.rate + beside <= machine.resources()[resource.0 as usize].capacity
            })
        };
        direct.as_ref().is_none_or(fits).then_some(Kind { from, via, to, path, direct })
    }

    fn hop(&self, bytes: u64) -> Hop {
        Hop { from: self.from, to: self.to, bytes }
    }
}

/// The host memory that this GPU copies with fastest, the first of several.
fn nearest(machine: &Machine, gpu: DeviceId) -> Option<DeviceId> {
    let rate = |host: DeviceId| Some(machine.route(gpu, host)?.bandwidth + machine.route(host, gpu)?.bandwidth);
    let hosts = machine.devices().filter(|device| device.is_host()).filter_map(|host| Some((host, rate(host)?)));
    hosts.reduce(|best, other| if other.1 > best.1 { other } else { best }).map(|(host, _)| host)
}

fn gpus(machine: &Machine) -> Vec<DeviceId> {
    machine.devices().filter(|device| !device.is_host()).collect()
}

/// One of each kind of pipeline that plans have.
#[derive(Default)]
struct Kinds {
    /// Between GPUs through host memory.
    through_host: Option<Kind>,
    /// Between GPUs through a GPU.
    through_gpu: Option<Kind>,
    /// Out of host memory and into it, through a GPU.
    of_host: Vec<Kind>,
}

impl Kinds {
    fn new(machine: &Machine) -> Kinds {
        let gpus = gpus(machine);
        let [a, b, ..] = gpus[..] else { return Kinds::default() };
        let through_gpu = |from, to| gpus[1..].iter().filter(|via| **via != to).find_map(|&via| Kind::new(machine, from, via, to));
        let host = nearest(machine, a);
        Kinds {
            through_host: host.and_then(|host| Kind::new(machine, a, host, b)),
            through_gpu: through_gpu(a, b),
            of_host: host.into_iter().flat_map(|host| [through_gpu(host, a), through_gpu(a, host)]).flatten().collect(),
        }
    }
}

/// Hand-overs and join; `None` where no plan has a pipeline.
pub(super) fn hand_overs<R: Rig>(session: &mut Session<'_, R>, machine: &Machine, costs: &Costs) -> Result<Option<HandOvers>, R::Error> {
    let kinds = Kinds::new(machine);
    let mut joins = Vec::new();
    if let Some(kind) = &kinds.through_host {
        // Short ones: what noise adds to the time of the bytes is to be small against the join.
        for length in LENGTHS[..2].repeat(3) {
            joins.extend(join(session, kind, costs, length)?);
        }
    }
    let join = median(&mut joins).unwrap_or(costs.join);
    let [through_host, through_gpu, of_host] = [kinds.through_host.as_slice(), kinds.through_gpu.as_slice(), &kinds.of_host];
    let through_host = hand_over(session, through_host, costs, join)?;
    let through_gpu = hand_over(session, through_gpu, costs, join)?;
    let of_host = hand_over(session, of_host, costs, join)?;
    if [&through_host, &through_gpu, &of_host].iter().all(|of| of.times.is_empty()) {
        return Ok(None);
    }
    // Between GPUs what further chunks cost; else the upper quartile: too slow is safe, and not the slowest, in which the calling thread may have been
    // held up.
    let slow = |times: &[f64]| times.get(times.len() * 3 / 4).copied();
    let between_gpus = |of: &Readings| of.each.or_else(|| slow(&of.times));
    // Out of and into host memory such a path doubles the rate whatever a chunk costs, and parts that err on one side cost as much as ones that
    // err on the other: the median.
    let relay = between_gpus(&through_gpu).or_else(|| of_host.times.get(of_host.times.len() / 2).copied());
    // Those of host memory have few chunks each: what a launch costs is most of their issue, and no figure for another operation.
    let mut issues = [through_host.issues.as_slice(), &through_gpu.issues].concat();
    issues.sort_by(f64::total_cmp);
    Ok(Some(HandOvers {
        chunk: between_gpus(&through_host).or(relay).unwrap_or(costs.chunk),
        relay_chunk: relay.unwrap_or(costs.relay_chunk),
        join,
        issue: slow(&issues).unwrap_or(costs.issue),
    }))
}

/// What pipelines of one kind, of all lengths, say of hand-overs.
#[derive(Default)]
struct Readings {
    /// Seconds of one hand-over, least first: what each pipeline took beyond its bytes.
    times: Vec<f64>,
    /// Seconds for each further chunk of the same bytes, of all lengths together: what a rate that drifts adds is in few and in many chunks, and
    /// not in the difference. `None` where there are few of them, because the direct copy ended last.
    each: Option<f64>,
    /// Seconds of the calling thread for each operation.
    issues: Vec<f64>,
}

/// Pipelines of several lengths of these kinds, each with as many chunks as the model would take and with twice as many.
fn hand_over<R: Rig>(session: &mut Session<'_, R>, kinds: &[Kind], costs: &Costs, join: f64) -> Result<Readings, R::Error> {
    let mut found = Readings::default();
    let (mut later, mut further) = (0.0, 0.0);
    for (kind, length) in kinds.iter().flat_map(|kind| LENGTHS.map(|length| (kind, length))) {
        let readings = [pipeline(session, kind, costs, length, 1)?, pipeline(session, kind, costs, length, 2)?];
        for reading in readings.iter().flatten() {
            found.times.push((reading.late - join).max(0.0) / reading.hand_overs);
            found.issues.push(reading.issue);
        }
        if let [Some(few), Some(many)] = &readings {
            later += many.late - few.late;
            further += many.hand_overs - few.hand_overs;
        }
    }
    found.times.sort_by(f64::total_cmp);
    found.each = (further >= ENOUGH).then(|| (later / further).max(0.0));
    Ok(found)
}

struct Reading {
    /// Seconds beyond those of the bytes and of the first chunk's way.
    late: f64,
    /// As the model counts them.
    hand_overs: f64,
    issue: f64,
}

/// A pipeline whose direct copy ends before it does.
fn pipeline<R: Rig>(
    session: &mut Session<'_, R>,
    kind: &Kind,
    costs: &Costs,
    length: f64,
    factor: u32,
) -> Result<Option<Reading>, R::Error> {
    let bytes = bounded(session, STAGED, kind.path.rate * session.options.copy_seconds * length);
    let chunks = factor * kind.path.best_chunks(costs, bytes).max(2);
    let staged = [Pipeline { hop: kind.hop(bytes), via: kind.via, chunks }];
    let beside =
        |direct: &PathModel| kind.hop(bounded(session, DIRECT, direct.rate * DIRECT_ENDS * kind.path.seconds(costs, bytes, chunks)));
    let direct: Vec<Hop> = kind.direct.iter().map(beside).collect();
    let timing = session.measure(&Work::Paths { direct: &direct, staged: &staged })?;
    let without = kind.path.seconds(&Costs { chunk: 0.0, relay_chunk: 0.0, ..costs.clone() }, bytes, chunks);
    let direct_alone = kind.direct.iter().zip(&direct).map(|(path, hop)| path.seconds(costs, hop.bytes, 1)).fold(0.0, f64::max);
    // Where the direct copy was last, the pipeline's end is not known.
    let is_last = timing.total > 1.05 * direct_alone;
    let reading = Reading {
        late: timing.total - without,
        hand_overs: f64::from(chunks + 1),
        issue: timing.issue / f64::from(2 * chunks + direct.len() as u32),
    };
    Ok(is_last.then_some(reading))
}

/// What a direct copy takes longer because a pipeline runs beside it that ends earlier: the caller's stream waits for both. Held against
/// the copy alone a moment before, because a rate that is wrong by 1 % would be 1 to 3 us of it.
fn join<R: Rig>(session: &mut Session<'_, R>, kind: &Kind, costs: &Costs, length: f64) -> Result<Option<f64>, R::Error> {
    let Some(direct) = &kind.direct else { return Ok(None) };
    let bytes = bounded(session, DIRECT, direct.rate * session.options.copy_seconds * length);
    let staged = bounded(session, STAGED, kind.path.rate * PIPELINE_ENDS * direct.seconds(costs, bytes, 1));
    let staged = [Pipeline { hop: kind.hop(staged), via: kind.via, chunks: 2 }];
    let alone = session.measure(&Work::Together(&[kind.hop(bytes)]))?.total;
    let beside = session.measure(&Work::Paths { direct: &[kind.hop(bytes)], staged: &staged })?.total;
    Ok(Some((beside - alone).max(0.0)))
}

/// What shared capacities carry of bytes that are staged in host memory, by pipelines through it that run at once: two opposite ones between two GPUs, and
/// one from each GPU to the next.
///
/// Opposite pipelines move less in a GPU's link than two plain copies do. All pipelines together move more in host memory: their rings of a few MiB
/// stay in the processor's caches, where buffers of plain copies have no room.
pub(super) fn staging<R: Rig>(session: &mut Session<'_, R>, machine: &Machine, costs: &Costs) -> Result<(), R::Error> {
    let tolerance = session.options.tolerance;
    let gpus = gpus(machine);
    let [a, ref others @ ..] = gpus[..] else { return Ok(()) };
    let next = |from, to| Kind::new(machine, from, nearest(machine, from)?, to);
    let opposite = |&b: &DeviceId| Some(vec![next(a, b)?, Kind::new(machine, b, nearest(machine, a)?, a)?]);
    // With the GPU with which least else is shared: an uplink that both use hides what their own links carry.
    let pairs = others.iter().filter_map(opposite).map(|pair| (seconds_for_each_byte(machine, &pair), pair));
    let Some((_, pair)) = pairs.reduce(|least, next| if next.0 < least.0 { next } else { least }) else { return Ok(()) };
    let (two, hand_overs) = together(session, machine, costs, &pair)?;
    let ring: Option<Vec<Kind>> = gpus.iter().zip(gpus.iter().cycle().skip(1)).map(|(&from, &to)| next(from, to)).collect();
    let is_apart = ring.as_deref().is_some_and(apart);
    let all = match ring.filter(|ring| ring.len() > pair.len()) {
        Some(ring) => Some(together(session, machine, costs, &ring)?),
        None => None,
    };
    let sharing = &mut session.sharing;
    for pipelines in all.iter().map(|all| &all.0).chain([&two]) {
        sharing.widen(pipelines, tolerance);
    }
    // What makes the two late now is their own links, which both draw on, and those of others are like them. While one hands a chunk over the other
    // has a link to itself that it nearly fills already.
    let seconds = two.seconds - hand_overs;
    if sharing.staged_seconds(&two.copies) < seconds * (1.0 - tolerance) {
        let known = pair.iter().filter_map(|kind| sharing.both_ways(&session.hops, kind.from, kind.via)).fold(f64::INFINITY, f64::min);
        // Each link carries the first hop of one and the second of the other.
        let carried = two.copies.iter().map(|copy| copy.1).sum::<f64>() / pair.len() as f64;
        sharing.slow_crossing(&session.hops, machine, carried / seconds / known);
    }
    // Their direct copies would be a part of why they are late.
    if let Some((all, hand_overs)) = all.filter(|_| is_apart) {
        sharing.bound(&Sample { seconds: all.seconds - hand_overs, ..all }, tolerance);
    }
    Ok(())
}

/// These pipelines at once, each beside its direct copy, with the seconds of their bytes and hand-overs, and those of the hand-overs, which many pipelines
/// hide from each other. The slowest of a few measurements, in which the direct copies end as much earlier as where hand-overs are measured.
fn together<R: Rig>(session: &mut Session<'_, R>, machine: &Machine, costs: &Costs, kinds: &[Kind]) -> Result<(Sample, f64), R::Error> {
    const TIMES: u32 = 3;
    let each = seconds_for_each_byte(machine, kinds);
    let bytes = bounded(session, STAGED, session.options.copy_seconds * LENGTHS[LENGTHS.len() - 1] / each);
    let largest = HOST_RINGS / (u64::from(SLOTS) * kinds.len() as u64);
    let chunks = kinds[0].path.best_chunks(costs, bytes).max(bytes.div_ceil(largest) as u32).max(2);
    let staged: Vec<Pipeline> = kinds.iter().map(|kind| Pipeline { hop: kind.hop(bytes), via: kind.via, chunks }).collect();
    // As long as each takes alone at least.
    let mut slowest = kinds.iter().map(|kind| kind.path.seconds(costs, bytes, chunks)).fold(0.0, f64::max);
    for _ in 0..TIMES {
        let beside = |kind: &Kind| {
            let direct = kind.direct.as_ref()?;
            Some(kind.hop(bounded(session, DIRECT, DIRECT_ENDS * slowest * direct.rate)))
        };
        let direct: Vec<Hop> = kinds.iter().filter_map(beside).collect();
        slowest = slowest.max(session.measure(&Work::Paths { direct: &direct, staged: &staged })?.total - costs.join);
    }
    let overhead = |costs: &Costs| kinds.iter().map(|kind| kind.path.overhead(costs, bytes, chunks)).fold(0.0, f64::max);
    let fill = overhead(&Costs { chunk: 0.0, ..costs.clone() });
    let hop = |ends| session.hops.iter().position(|hop| *hop == ends);
    let hops = kinds.iter().flat_map(|kind| [(kind.from, kind.via), (kind.via, kind.to)]);
    let copies = hops.filter_map(|ends| Some((hop(ends)?, bytes as f64))).collect();
    let seconds = (slowest - costs.copy - fill).max(slowest / 2.0);
    Ok((Sample { copies, seconds, weight: 1.0 }, (overhead(costs) - fill).min(seconds / 2.0)))
}

/// Whether no direct copy draws on what a pipeline does, its own or another one: what the pipelines carry would depend on it.
fn apart(kinds: &[Kind]) -> bool {
    let draws = |resource| kinds.iter().any(|kind| kind.path.weights.iter().any(|weight| weight.0 == resource));
    kinds.iter().filter_map(|kind| kind.direct.as_ref()).all(|direct| direct.weights.iter().all(|weight| !draws(weight.0)))
}

/// Seconds for each byte of each of these pipelines at once, of what plain copies share.
fn seconds_for_each_byte(machine: &Machine, pipelines: &[Kind]) -> f64 {
    let mut work = vec![0.0; machine.resources().len()];
    for &(resource, weight) in pipelines.iter().flat_map(|kind| &kind.path.weights) {
        work[resource.0 as usize] += weight / machine.resources()[resource.0 as usize].capacity;
    }
    work.into_iter().fold(0.0, f64::max)
}

/// Whole grains, enough for a few chunks and no more than this part of the room.
fn bounded<R: Rig>(session: &Session<'_, R>, part: f64, bytes: f64) -> u64 {
    let least = 64 * TINY;
    grained(bytes.min(session.rig.room() as f64 * part)).max(least)
}
