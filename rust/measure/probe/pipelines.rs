//! Measures pipelines (staged copies) in the way in which plans use them: together with a direct copy, and several at the same time.
//!
//! An isolated pipeline needs less time between chunks than a pipeline that runs with a direct copy. Two opposite pipelines may move less
//! data than two direct copies in the same time. Many concurrent pipelines may move more data than direct copies, because their staging
//! rings stay in the processor's caches.

use super::fit::{Sample, Shared};
use super::measure::{Session, TINY, grained};
use super::{Harness, Hop, Pipeline, Work, median};
use crate::model::{HOST_RINGS, PathModel, SLOTS};
use crate::topology::{Costs, DeviceId, Machine};

/// Durations of the pipelined transfers that are measured, as multiples of `ProbeOptions::copy_seconds`. They correspond to transfers of
/// some tens of MiB to 1 GiB.
const LENGTHS: [f64; 5] = [0.125, 0.25, 0.5, 1.0, 2.0];
/// Fraction of the pipeline's time after which the direct copy should end, when a pipeline and a direct copy are measured together.
const DIRECT_ENDS: f64 = 0.85;
/// Fraction of the direct copy's time after which the pipeline should end, when the cost of fork and join is measured.
const PIPELINE_ENDS: f64 = 0.5;
/// Largest size of a direct copy, as a fraction of [`Harness::room`]. The limit for a pipelined transfer is [`STAGED`]. With these limits,
/// the memory of a device has space for one direct copy, one pipelined transfer and two staging rings.
const DIRECT: f64 = 0.5;
/// Largest size of a pipelined transfer, as a fraction of [`Harness::room`]; see [`DIRECT`].
const STAGED: f64 = 0.125;

/// Minimum fraction of a pipeline's rate that the links must still provide while the direct copy uses its full rate. Plans do not use a
/// pipeline (staged path) with a smaller fraction, so it is not measured.
const ADDED: f64 = 0.75;

/// Pipelined path, with the direct path on which plans copy at the same time.
struct PipelinePath {
    from: DeviceId,
    via: DeviceId,
    to: DeviceId,
    path: PathModel,
    direct: Option<PathModel>,
}

impl PipelinePath {
    /// Returns the pipeline from `from` through `via` to `to`. Returns `None` if the machine has no routes for its two hops. Also returns
    /// `None` if the direct copy leaves too little capacity for the pipeline ([`ADDED`]), because no plan then uses the pipeline.
    fn new(machine: &Machine, from: DeviceId, via: DeviceId, to: DeviceId) -> Option<PipelinePath> {
        let path = PathModel::new(machine, &[machine.route(from, via)?, machine.route(via, to)?]);
        let direct = machine.route(from, to).map(|route| PathModel::new(machine, &[route]));
        let fits = |direct: &PathModel| {
            path.weights.iter().all(|&(resource, weight)| {
                let beside = direct.weights.iter().find(|other| other.0 == resource).map_or(0.0, |other| other.1 * direct.rate);
                beside == 0.0 || ADDED * weight * path.rate + beside <= machine.resources()[resource.0 as usize].capacity
            })
        };
        direct.as_ref().is_none_or(fits).then_some(PipelinePath { from, via, to, path, direct })
    }

    fn hop(&self, bytes: u64) -> Hop {
        Hop { from: self.from, to: self.to, bytes }
    }

    fn pipeline(&self, bytes: u64, chunks: u32) -> Pipeline {
        Pipeline { hop: self.hop(bytes), via: self.via, chunks }
    }
}

/// Returns the host memory to and from which copies of this GPU are fastest, or the first such host memory if several are equally fast.
/// Returns `None` if no host memory can be copied both to and from the GPU.
fn nearest(machine: &Machine, gpu: DeviceId) -> Option<DeviceId> {
    let rate = |host: DeviceId| Some(machine.route(gpu, host)?.bandwidth + machine.route(host, gpu)?.bandwidth);
    let hosts = machine.devices().filter(|device| device.is_host()).filter_map(|host| Some((host, rate(host)?)));
    hosts.reduce(|best, other| if other.1 > best.1 { other } else { best }).map(|(host, _)| host)
}

fn gpus(machine: &Machine) -> Vec<DeviceId> {
    machine.devices().filter(|device| !device.is_host()).collect()
}

/// Returns a pipeline between the first two GPUs through host memory, or `None` if no plan uses one.
fn through_host(machine: &Machine) -> Option<PipelinePath> {
    let [a, b, ..] = gpus(machine)[..] else { return None };
    PipelinePath::new(machine, a, nearest(machine, a)?, b)
}

/// Returns a pipeline between the first two GPUs through another GPU. If no plan uses such a pipeline, returns pipelines from and to host
/// memory through a GPU.
fn through_gpu(machine: &Machine) -> Vec<PipelinePath> {
    let gpus = gpus(machine);
    let [a, b, ..] = gpus[..] else { return Vec::new() };
    let through = |from, to| gpus[1..].iter().filter(|via| **via != to).find_map(|&via| PipelinePath::new(machine, from, via, to));
    let of_host = || nearest(machine, a).into_iter().flat_map(|host| [through(host, a), through(a, host)]).flatten().collect();
    through(a, b).map_or_else(of_host, |between| vec![between])
}

/// Measures by how much a direct copy takes longer because the caller's stream also waits for a pipeline that runs at the same time and
/// ends earlier. The reference is an isolated copy made immediately before, because an error of 1 % in the rate would amount to 1 to 3 us.
/// The result is the median of six short measurements.
pub(super) fn fork_join_staged<H: Harness>(session: &mut Session<'_, H>, machine: &Machine, costs: &mut Costs) -> Result<(), H::Error> {
    let Some((staged, direct)) = through_host(machine).and_then(|staged| Some((staged.direct.clone()?, staged))).map(|(a, b)| (b, a))
    else {
        return Ok(());
    };
    let mut longer = Vec::new();
    for length in LENGTHS[..2].repeat(3) {
        let bytes = bounded(session, DIRECT, direct.rate * session.options.copy_seconds * length);
        let beside = bounded(session, STAGED, staged.path.rate * PIPELINE_ENDS * direct.seconds(costs, bytes, 1));
        let alone = session.measure(&Work::Together(&[staged.hop(bytes)]))?.total;
        let both = session.measure(&Work::Paths { direct: &[staged.hop(bytes)], staged: &[staged.pipeline(beside, 2)] })?.total;
        longer.push((both - alone).max(0.0));
    }
    costs.fork_join_staged = median(&mut longer).unwrap_or(costs.fork_join_staged);
    // Copies of several GPUs are forked and joined by events too, so their cost cannot be lower.
    costs.fork_join_gpus = costs.fork_join_gpus.max(costs.fork_join_staged);
    Ok(())
}

/// Measures the cost of each chunk that is staged in host memory, and the time to issue an operation of a pipeline.
pub(super) fn chunks_via_host<H: Harness>(session: &mut Session<'_, H>, machine: &Machine, costs: &mut Costs) -> Result<(), H::Error> {
    let (each, issue) = each_chunk(session, through_host(machine).as_slice(), costs)?;
    costs.chunk_via_host = each.unwrap_or(costs.chunk_via_host);
    costs.issue = costs.issue.max(issue.unwrap_or(0.0));
    Ok(())
}

/// Measures the cost of each chunk that is staged in the memory of a GPU.
pub(super) fn chunks_via_gpu<H: Harness>(session: &mut Session<'_, H>, machine: &Machine, costs: &mut Costs) -> Result<(), H::Error> {
    let (each, _) = each_chunk(session, &through_gpu(machine), costs)?;
    costs.chunk_via_gpu = each.unwrap_or(costs.chunk_via_gpu);
    Ok(())
}

/// Measures the cost of one chunk of a pipeline (copy that is staged chunk by chunk). For several sizes of the data, times a pipeline with
/// `n` chunks, the number that the model would choose, and with `2 n`. Direct copies run at the same time, as in a plan, but end earlier,
/// so that the time measured is that of the pipeline. The difference between the two times is the cost of `n` chunks. If the rate changes
/// slowly, this affects both times equally. Returns the mean cost of a chunk over all sizes in seconds, and the median time in seconds that
/// the calling thread needs to issue an operation.
fn each_chunk<H: Harness>(
    session: &mut Session<'_, H>,
    staged: &[PipelinePath],
    costs: &Costs,
) -> Result<(Option<f64>, Option<f64>), H::Error> {
    let free = Costs { chunk_via_host: 0.0, chunk_via_gpu: 0.0, ..costs.clone() };
    let (mut later, mut further, mut issues) = (0.0, 0, Vec::new());
    for (staged, length) in staged.iter().flat_map(|staged| LENGTHS.map(|length| (staged, length))) {
        let bytes = bounded(session, STAGED, staged.path.rate * session.options.copy_seconds * length);
        let few = staged.path.best_chunks(costs, bytes).max(2);
        let mut late = Vec::new();
        for chunks in [few, 2 * few] {
            let seconds = DIRECT_ENDS * staged.path.seconds(costs, bytes, chunks);
            let beside = |direct: &PathModel| staged.hop(bounded(session, DIRECT, direct.rate * seconds));
            let direct: Vec<Hop> = staged.direct.iter().map(beside).collect();
            let timing = session.measure(&Work::Paths { direct: &direct, staged: &[staged.pipeline(bytes, chunks)] })?;
            let alone = staged.direct.iter().zip(&direct).map(|(path, hop)| path.seconds(costs, hop.bytes, 1)).fold(0.0, f64::max);
            // If the direct copy ended last, the time at which the pipeline ended is unknown.
            if timing.total > 1.05 * alone {
                late.push(timing.total - staged.path.seconds(&free, bytes, chunks));
                issues.push(timing.issue / f64::from(2 * chunks + direct.len() as u32));
            }
        }
        if let [of_few, of_many] = late[..] {
            (later, further) = (later + of_many - of_few, further + few);
        }
    }
    // A chunk consists of two operations, and a graph issues operations one after the other.
    let each = (further > 0).then(|| f64::max(later / f64::from(further), 2.0 * costs.graph_node));
    Ok((each, median(&mut issues)))
}

/// Measures the capacity of host memory for staged data, with pipelines through host memory from each GPU to the next.
pub(super) fn staging_ring<H: Harness>(session: &mut Session<'_, H>, machine: &Machine, costs: &mut Costs) -> Result<(), H::Error> {
    let gpus = gpus(machine);
    let next = |(&from, &to): (&DeviceId, &DeviceId)| PipelinePath::new(machine, from, nearest(machine, from)?, to);
    let ring: Option<Vec<PipelinePath>> = gpus.iter().zip(gpus.iter().cycle().skip(1)).map(next).collect();
    if let Some(ring) = ring.filter(|ring| ring.len() > 2) {
        let (all, _) = together(session, machine, costs, &ring)?;
        carries_staged(session, &all);
    }
    Ok(())
}

/// Raises the capacities for staged data to at least the rates that these pipelines have reached.
fn carries_staged<H: Harness>(session: &mut Session<'_, H>, pipelines: &Sample) {
    for shared in &mut session.fit.shared {
        let drawn = shared.load(&pipelines.copies) / pipelines.seconds;
        if drawn > shared.staged.unwrap_or(shared.capacity) * (1.0 + session.options.tolerance) {
            shared.staged = Some(drawn);
        }
    }
}

/// Measures capacities for staged data with two opposite pipelines between two GPUs. If they take longer than all capacities predict, the
/// links of these GPUs, and similar links of other GPUs, carry less when both directions are used at the same time.
pub(super) fn staging_both_ways<H: Harness>(session: &mut Session<'_, H>, machine: &Machine, costs: &mut Costs) -> Result<(), H::Error> {
    let tolerance = session.options.tolerance;
    let gpus = gpus(machine);
    let [a, ref others @ ..] = gpus[..] else { return Ok(()) };
    let opposite = |&b: &DeviceId| {
        let host = nearest(machine, a)?;
        Some(vec![PipelinePath::new(machine, a, host, b)?, PipelinePath::new(machine, b, host, a)?])
    };
    // The second GPU is chosen such that the two pipelines share as few resources as possible. If both GPUs used one uplink, the uplink
    // would hide the capacity of their own links.
    let pairs = others.iter().filter_map(opposite).map(|pair| (seconds_for_each_byte(machine, &pair), pair));
    let Some((_, pair)) = pairs.reduce(|least, next| if next.0 < least.0 { next } else { least }) else { return Ok(()) };
    let (two, gaps) = together(session, machine, costs, &pair)?;
    carries_staged(session, &two);
    // While one pipeline waits between two chunks, the other uses the link alone and almost saturates it already.
    let seconds = two.seconds - gaps;
    if session.fit.staged_seconds(&two.copies) < seconds * (1.0 - tolerance) {
        // Each link carries the first hop of one pipeline and, in the opposite direction, the second hop of the other pipeline.
        let carried = two.copies.iter().map(|copy| copy.1).sum::<f64>() / pair.len() as f64 / seconds;
        let links: Vec<[DeviceId; 2]> = pair.iter().map(|one| [one.from, one.via]).collect();
        slow_both_ways(session, &links, carried);
    }
    Ok(())
}

/// Reduces the capacity for staged data, both directions together, of each link between a GPU and host memory. All these capacities are
/// multiplied by one factor: `carried`, the number of bytes/s that the measured links carried, divided by the smallest known capacity of
/// the links in `links`. No capacity becomes smaller than the rate of one direction of its link.
fn slow_both_ways<H: Harness>(session: &mut Session<'_, H>, links: &[[DeviceId; 2]], carried: f64) {
    let hops = session.hops.clone();
    let fit = &mut session.fit;
    let mut of_link = Vec::new();
    for (there, &(gpu, host)) in hops.iter().enumerate().filter(|(_, ends)| !ends.0.is_host() && ends.1.is_host()) {
        let Some(back) = hops.iter().position(|ends| *ends == (host, gpu)) else { continue };
        let own = |shared: &Shared| {
            shared.members[there] && shared.members[back] && shared.hops().all(|hop| hops[hop].0 == gpu || hops[hop].1 == gpu)
        };
        let index = fit.shared.iter().position(own).unwrap_or_else(|| {
            fit.shared.push(Shared::of([there, back], hops.len(), fit.rates[there] + fit.rates[back]));
            fit.shared.len() - 1
        });
        // The capacity of each direction alone is not changed.
        of_link.push(([gpu, host], index, fit.rates[there].max(fit.rates[back])));
    }
    let known = of_link.iter().filter(|of| links.contains(&of.0)).map(|of| fit.shared[of.1].capacity).fold(f64::INFINITY, f64::min);
    let part = carried / known;
    for (_, index, alone) in of_link {
        let shared = &mut fit.shared[index];
        shared.staged = Some((shared.capacity * part).max(alone));
    }
}

/// Measures pipelines that run at the same time, each with its direct copy. Returns a sample with the sizes of the pipelines and the time
/// in seconds that they took, including gaps between chunks, and the total time of these gaps. The time is the longest of a few
/// measurements. A path that is faster than the model expects costs only a little of the gain, but a path that is slower makes a plan
/// slower than the direct copy.
fn together<H: Harness>(
    session: &mut Session<'_, H>,
    machine: &Machine,
    costs: &Costs,
    staged: &[PipelinePath],
) -> Result<(Sample, f64), H::Error> {
    const TIMES: u32 = 3;
    /// Relative difference in time above which the buffers of host memory count as unequally fast.
    const UNEVEN: f64 = 0.2;
    let bytes = session.options.copy_seconds * LENGTHS[LENGTHS.len() - 1] / seconds_for_each_byte(machine, staged);
    let bytes = bounded(session, STAGED, bytes);
    let largest = HOST_RINGS / (u64::from(SLOTS) * staged.len() as u64);
    let chunks = staged[0].path.best_chunks(costs, bytes).max(bytes.div_ceil(largest) as u32).max(2);
    let pipelines: Vec<Pipeline> = staged.iter().map(|one| one.pipeline(bytes, chunks)).collect();
    // The first estimate is the longest time that an isolated pipeline takes.
    let mut slowest = staged.iter().map(|one| one.path.seconds(costs, bytes, chunks)).fold(0.0, f64::max);
    for _ in 0..TIMES {
        let beside = |one: &PipelinePath| Some(one.hop(bounded(session, DIRECT, DIRECT_ENDS * slowest * one.direct.as_ref()?.rate)));
        let direct: Vec<Hop> = staged.iter().filter_map(beside).collect();
        let median = session.measure(&Work::Paths { direct: &direct, staged: &pipelines })?.total;
        // Each run uses another buffer of host memory. If the speed of the buffers differs, a plan may get the slow buffer.
        let worst = session.readings.last().map_or(median, |reading| reading.runs.iter().map(|run| run.total).fold(median, f64::max));
        let total = if worst > median * (1.0 + UNEVEN) { worst } else { median };
        slowest = slowest.max(total - costs.fork_join_staged);
    }
    let overhead = |costs: &Costs| staged.iter().map(|one| one.path.overhead(costs, bytes, chunks)).fold(0.0, f64::max);
    let fill = overhead(&Costs { chunk_via_host: 0.0, ..costs.clone() });
    let number = |ends| session.hops.iter().position(|hop| *hop == ends);
    let hops = staged.iter().flat_map(|one| [(one.from, one.via), (one.via, one.to)]);
    let copies = hops.filter_map(|ends| Some((number(ends)?, bytes as f64))).collect();
    let seconds = (slowest - costs.copy - fill).max(slowest / 2.0);
    Ok((Sample { copies, seconds }, (overhead(costs) - fill).min(seconds / 2.0)))
}

/// Returns the time in seconds that each byte takes if these pipelines run at the same time. It is computed from the capacities for direct
/// copies.
fn seconds_for_each_byte(machine: &Machine, staged: &[PipelinePath]) -> f64 {
    let mut work = vec![0.0; machine.resources().len()];
    for &(resource, weight) in staged.iter().flat_map(|one| &one.path.weights) {
        work[resource.0 as usize] += weight / machine.resources()[resource.0 as usize].capacity;
    }
    work.into_iter().fold(0.0, f64::max)
}

/// Limits `bytes` to the fraction `part` of [`Harness::room`] and to at least a few chunks, and rounds the result to a multiple of the
/// granularity of copies.
fn bounded<H: Harness>(session: &Session<'_, H>, part: f64, bytes: f64) -> u64 {
    let least = 64 * TINY;
    grained(bytes.min(session.harness.room() as f64 * part)).max(least)
}
