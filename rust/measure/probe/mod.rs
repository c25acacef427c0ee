//! Derives a topology from measured times: which copies slow each other down, and by how much.
//!
//! A [`Harness`] makes copies and returns seconds. This module decides what to copy next and interprets the times. It knows nothing about
//! the machine except the pairs of devices between which copies are possible. `docs/reference/probe.md` describes the method and its
//! limits.
//!
//! | file | contents |
//! | --- | --- |
//! | `sets` | the sets of copies to measure |
//! | `measure` | sizes, repetitions, and which measurements are repeated |
//! | `fit` | rates and shared capacities: predictions from them, and fitting them to samples |
//! | `costs` | fixed costs: issue, batches, kernels, fork and join |
//! | `pipelines` | costs of pipelines that run together with a direct copy, and their combined capacity |
//! | `build` | conversion of the fit to a topology |
//!
//! The module is pure: no backend, no clock. Equal times give equal topologies.

mod build;
mod costs;
mod fit;
mod measure;
mod pipelines;
mod sets;

use crate::plan::Mechanism;
pub use crate::topology::Residuals;
use crate::topology::{CostUnit, Costs, DeviceId, MAX_TIME, Machine, Topology};
use measure::Session;

/// Source and destination.
type Ends = (DeviceId, DeviceId);

/// One plain copy.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Source device.
    pub from: DeviceId,
    /// Destination device.
    pub to: DeviceId,
    /// Number of bytes.
    pub bytes: u64,
}

/// Work whose time a harness measures.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Work<'a> {
    /// Plain copies that start together, each on its own internal stream.
    Together(&'a [Hop]),
    /// `count` copies like `hop` on one internal stream, made as plain copies, one batched call, or one kernel.
    Many {
        /// Copy that is repeated.
        hop: Hop,
        /// Number of copies.
        count: u32,
        /// Mechanism of the copies.
        mechanism: Mechanism,
    },
    /// Plain copies and pipelines that start together, executed in the same way as plans.
    Paths {
        /// Plain copies, each on its own internal stream.
        direct: &'a [Hop],
        /// Pipelines, each on two internal streams.
        staged: &'a [Pipeline],
    },
}

impl Work<'_> {
    /// True if bytes leave host memory, enter it or are staged in it.
    pub fn touches_host(&self) -> bool {
        let of_hop = |hop: &Hop| hop.from.is_host() || hop.to.is_host();
        match self {
            Work::Together(hops) => hops.iter().any(of_hop),
            Work::Many { hop, .. } => of_hop(hop),
            Work::Paths { direct, staged } => {
                direct.iter().any(of_hop) || staged.iter().any(|pipeline| of_hop(&pipeline.hop) || pipeline.via.is_host())
            }
        }
    }
}

/// A copy that is staged in a third memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// Both ends, and the number of bytes.
    pub hop: Hop,
    /// Device in whose memory the chunks are staged.
    pub via: DeviceId,
    /// Number of chunks into which the bytes are divided.
    pub chunks: u32,
}

/// Seconds of one run.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Timing {
    /// Seconds until the calling thread has submitted everything.
    pub issue: f64,
    /// Seconds from submission until the host sees that the last byte has arrived.
    pub total: f64,
}

/// One measurement: the work and its times.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// Plain copies that start together.
    pub direct: Vec<Hop>,
    /// Pipelines that start together with the plain copies; see [`Work::Paths`].
    pub staged: Vec<Pipeline>,
    /// Mechanism and number of copies of [`Work::Many`]; `direct` then holds the copy that is repeated.
    pub many: Option<(Mechanism, u32)>,
    /// True if the work was executed in the same way as a plan ([`Work::Paths`]).
    pub as_plan: bool,
    /// One timing for each repetition.
    pub runs: Vec<Timing>,
}

impl Reading {
    fn new(work: &Work<'_>, runs: Vec<Timing>) -> Reading {
        let (direct, staged, many) = match *work {
            Work::Together(hops) => (hops.to_vec(), Vec::new(), None),
            Work::Many { hop, count, mechanism } => (vec![hop], Vec::new(), Some((mechanism, count))),
            Work::Paths { direct, staged } => (direct.to_vec(), staged.to_vec(), None),
        };
        Reading { direct, staged, many, as_plan: matches!(work, Work::Paths { .. }), runs }
    }

    /// True if the work consists of plain copies that start together.
    fn is_plain(&self) -> bool {
        self.many.is_none() && !self.as_plan && !self.direct.is_empty()
    }

    /// Returns the medians of the runs.
    fn timing(&self) -> Timing {
        let middle = |of: fn(&Timing) -> f64| median(&mut self.runs.iter().map(of).collect::<Vec<f64>>()).unwrap_or(0.0);
        Timing { issue: middle(|run| run.issue), total: middle(|run| run.total) }
    }
}

/// Result of checking the bytes of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// Every byte of the pattern arrived.
    Intact,
    /// The copy reports success, but some bytes are wrong.
    Lost {
        /// Number of wrong bytes.
        wrong: u64,
        /// Number of bytes of the pattern.
        of: u64,
    },
}

/// Measures copies for a probe: on a machine that nothing else uses meanwhile, or in tests from a model or stored readings.
pub trait Harness {
    /// Reason why a copy could not be made.
    type Error;

    /// Runs `work` once to warm up and then `repetitions` times, and returns the times of the repetitions. If host memory is involved,
    /// repetitions use different buffers of it, because a plan uses yet another one.
    fn measure(&mut self, work: &Work<'_>, repetitions: u32) -> Result<Vec<Timing>, Self::Error>;
    /// Measures how long two streams of these devices take to set and wait for flags in turn, for `rounds` rounds. Returns the seconds of
    /// each repetition, or nothing if the streams do not support it.
    fn pass_flags(&mut self, between: [DeviceId; 2], rounds: u32, repetitions: u32) -> Result<Vec<f64>, Self::Error>;
    /// Copies a pattern and compares every byte.
    fn check(&mut self, from: DeviceId, to: DeviceId) -> Result<Integrity, Self::Error>;
    /// Returns the largest number of bytes that the copies of one measurement may write on one device.
    fn room(&self) -> u64;
}

/// Options for the effort of a probe.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeOptions {
    /// Seconds that one isolated copy should take when capacities are measured.
    pub copy_seconds: f64,
    /// Number of runs from which the median is taken.
    pub repetitions: u32,
    /// Fraction by which a set of copies may be slower than predicted before the probe searches for a reason.
    pub tolerance: f64,
    /// Largest number of measurements of concurrent copies. The record notes if contention is still unexplained at that point.
    pub measurements: u32,
    /// Bytes of single copies from and to host memory, and of each transfer of an all-to-all, for which the probe of a context then
    /// searches for better plans by executing them. On the host backend sizes above 4 MiB are skipped, because CPU threads move every byte.
    /// An empty list disables the search.
    pub tuned_bytes: Vec<u64>,
    /// Largest accepted median error of the probe's own predictions. If the error is larger, nothing is tuned and the probe is not kept.
    pub most_error: f64,
}

impl Default for ProbeOptions {
    /// Default effort. On eight GPUs a probe makes 2500 to 4000 measurements of 4 runs of 1 to 3 ms, which takes 15 to 25 s. Tuning then
    /// takes 1.1 s for each tuned size, each direction, and each rate at which GPUs access host memory (four H200).
    fn default() -> Self {
        let tuned_bytes = [4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20].into();
        ProbeOptions { copy_seconds: 1e-3, repetitions: 3, tolerance: 0.05, measurements: 4000, tuned_bytes, most_error: Residuals::MOST }
    }
}

impl ProbeOptions {
    /// Options for a first look: single copies, and the sets that matter most. Nothing is tuned.
    pub fn quick() -> Self {
        ProbeOptions {
            copy_seconds: 0.5e-3,
            repetitions: 2,
            tolerance: 0.1,
            measurements: 400,
            tuned_bytes: Vec::new(),
            ..ProbeOptions::default()
        }
    }
}

/// Progress of a probe.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Progress {
    /// Name of the current stage.
    pub stage: &'static str,
    /// Number of completed parts of the stage.
    pub done: u32,
    /// Number of parts of the stage.
    pub of: u32,
    /// Number of measurements so far.
    pub measurements: u32,
}

/// Results for one hop.
#[derive(Clone, Debug, PartialEq)]
pub struct HopFound {
    /// Source device.
    pub from: DeviceId,
    /// Destination device.
    pub to: DeviceId,
    /// Result of checking the bytes. A hop that loses bytes is not in the topology.
    pub verdict: Integrity,
    /// Rate of an isolated copy in bytes/s; 0 if the hop loses bytes.
    pub rate: f64,
    /// Seconds of a copy of a few bytes.
    pub start: f64,
}

/// Hops that share a capacity.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Name of the shared resource, as in the topology if the topology has it.
    pub name: String,
    /// Combined capacity in bytes/s.
    pub capacity: f64,
    /// Combined capacity for bytes that are staged in host memory, in bytes/s, if it differs.
    pub staged: Option<f64>,
    /// Hops that share the capacity.
    pub hops: Vec<(DeviceId, DeviceId)>,
}

/// Slowdown of two concurrent hops.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Pair {
    /// First hop.
    pub first: (DeviceId, DeviceId),
    /// Second hop.
    pub second: (DeviceId, DeviceId),
    /// Time together over time of an isolated copy, for byte counts that take equally long when isolated: 1 means independent, 2 means that
    /// the hops alternate.
    pub slowdown: f64,
}

/// Result of a probe.
#[derive(Clone, Debug, PartialEq)]
pub struct Probed {
    /// The measured machine.
    pub topology: Topology,
    /// Every hop that was tried.
    pub hops: Vec<HopFound>,
    /// Every shared capacity.
    pub groups: Vec<Group>,
    /// Every pair of hops that was measured separately.
    pub pairs: Vec<Pair>,
    /// Errors of the predictions for random sets of copies, which are measured last.
    pub residuals: Residuals,
    /// Number of measurements.
    pub measurements: u32,
    /// All measurements, in order.
    pub readings: Vec<Reading>,
    /// Notes for readers of the topology: pairs that lose bytes, and slowdowns that remain unexplained.
    pub notes: Vec<String>,
}

/// Measures the machine. `base` supplies the devices, the pairs between which copies are possible, and the kinds of links. Nothing else of
/// it is used, except fixed costs that cannot be measured.
pub fn probe<H: Harness>(
    base: &Machine,
    harness: &mut H,
    options: &ProbeOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Probed, H::Error> {
    let joined = joined(base);
    let mut found = Vec::with_capacity(joined.len());
    let mut notes = Vec::new();
    for (index, &(from, to)) in joined.iter().enumerate() {
        progress(Progress { stage: "integrity", done: index as u32, of: joined.len() as u32, measurements: 0 });
        let verdict = harness.check(from, to)?;
        if let Integrity::Lost { wrong, of } = verdict {
            notes.push(format!("copies from {from} to {to} lose bytes ({wrong} of {of} wrong) and report success: the pair is not used"));
        }
        found.push(HopFound { from, to, verdict, rate: 0.0, start: 0.0 });
    }
    let hops: Vec<Ends> = found.iter().filter(|hop| hop.verdict == Integrity::Intact).map(|hop| (hop.from, hop.to)).collect();
    let mut session = Session::new(harness, hops, options, progress);
    session.measure_alone()?;
    session.explore(&base.devices().collect::<Vec<DeviceId>>())?;
    let residuals = session.validate()?;
    session.notes(&mut notes);
    notes.extend(residuals.check(options.most_error).err());
    let (topology, groups) = finish(&mut session, base, |_, error| Err(error))?;
    for hop in &mut found {
        if let Some(index) = session.hops.iter().position(|ends| *ends == (hop.from, hop.to)) {
            (hop.rate, hop.start) = (session.fit.rates[index], session.starts[index]);
        }
    }
    let Session { pairs, readings, .. } = session;
    notes.extend(spread(&readings));
    Ok(Probed { topology, hops: found, groups, pairs, residuals, measurements: readings.len() as u32, readings, notes })
}

/// Derives the topology from earlier readings, without measuring capacities again. Costs are measured with `harness`. `failed` is called
/// for each cost that could not be measured; the value of `base` is then used.
pub fn probe_from<H: Harness>(
    base: &Machine,
    readings: &[Reading],
    harness: &mut H,
    options: &ProbeOptions,
    mut failed: impl FnMut(&'static str, H::Error),
) -> (Topology, Vec<Group>) {
    let mut progress = |_| {};
    let mut session = Session::new(harness, joined(base), options, &mut progress);
    session.take(readings);
    let finished = finish::<H, std::convert::Infallible>(&mut session, base, |step, error| {
        failed(step, error);
        Ok(())
    });
    match finished {
        Ok(finished) => finished,
    }
}

/// Returns the pairs of devices between which copies are possible.
fn joined(base: &Machine) -> Vec<Ends> {
    let devices: Vec<DeviceId> = base.devices().collect();
    let pairs = devices.iter().flat_map(|&from| devices.iter().map(move |&to| (from, to)));
    pairs.filter(|(from, to)| from != to && base.route(*from, *to).is_some()).collect()
}

/// Measures the costs and builds the topology.
fn finish<H: Harness, E>(
    session: &mut Session<'_, H>,
    base: &Machine,
    mut failed: impl FnMut(&'static str, H::Error) -> Result<(), E>,
) -> Result<(Topology, Vec<Group>), E> {
    session.fit.level(&session.hops);
    session.fit.drop_implied(0.0);
    let mut costs = base.costs().clone();
    let (topology, _) = build::topology(base, &session.hops, &session.fit, &session.starts);
    if let Ok(machine) = Machine::new(topology) {
        let steps = costs::steps();
        for (index, (name, step)) in steps.iter().enumerate() {
            session.at("costs", index, steps.len());
            step(session, &machine, &mut costs).or_else(|error| failed(name, error))?;
            costs = bounded(costs);
        }
    }
    let (mut topology, groups) = build::topology(base, &session.hops, &session.fit, &session.starts);
    topology.costs = costs;
    Ok((topology, groups))
}

/// Returns a note on the differences between repetitions of host copies. Each repetition uses another buffer, and a plan uses yet another
/// one.
fn spread(readings: &[Reading]) -> Option<String> {
    /// Bytes of a copy whose start-up time is negligible.
    const LONG: u64 = 8 << 20;
    let of_host = |hop: &Hop| hop.bytes >= LONG && (hop.from.is_host() || hop.to.is_host());
    let mut spreads: Vec<f64> = readings
        .iter()
        .filter(|reading| reading.many.is_none() && reading.direct.iter().any(of_host) && reading.runs.len() > 1)
        .map(|reading| {
            let (least, most) = reading.runs.iter().fold((f64::INFINITY, 0.0_f64), |(a, b), run| (a.min(run.total), b.max(run.total)));
            (most - least) / reading.timing().total
        })
        .collect();
    let middle = median(&mut spreads)?;
    let worst = spreads.last().copied().unwrap_or(middle);
    Some(format!("host copies differ between buffers by {:.1} % (median), {:.1} % at most", middle * 100.0, worst * 100.0))
}

/// Returns the middle value, or the mean of the two middle values; `None` for an empty list.
fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    Some((values[last / 2] + values[last.div_ceil(2)]) / 2.0)
}

/// Rounds to three significant digits, which matches the precision of measurements and is easy to read.
fn rounded(value: f64) -> f64 {
    if !(value.is_finite() && value > 0.0) {
        return value;
    }
    let unit = 10_f64.powi(value.log10().floor() as i32 - 2);
    // Dividing by a power of ten gives the nearest decimal number; multiplying would not.
    if unit < 1.0 { (value / unit).round() / 10_f64.powi(2 - value.log10().floor() as i32) } else { (value / unit).round() * unit }
}

/// Limits costs to the values that a topology accepts.
fn bounded(mut costs: Costs) -> Costs {
    for cost in Costs::TABLE {
        let value = (cost.of_mut)(&mut costs);
        *value = match cost.unit {
            CostUnit::Seconds if value.is_finite() => rounded(value.clamp(0.0, MAX_TIME)),
            CostUnit::Part if value.is_finite() => rounded(value.clamp(0.01, 1.0)),
            _ => cost.default,
        };
    }
    costs
}
