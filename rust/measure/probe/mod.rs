//! Probe of a machine: derives a topology from measured times of copies. It determines which copies slow each other down, and by how much.
//!
//! A [`Harness`] makes copies and returns times in seconds. This module decides what to copy next and interprets the times. It knows
//! nothing about the machine except the pairs of devices between which copies are possible. `docs/reference/probe.md` describes the method
//! and its limits.
//!
//! | file | contents |
//! | --- | --- |
//! | `sets` | the sets of copies to measure |
//! | `measure` | sizes, repetitions, and which measurements are repeated |
//! | `fit` | rates and shared capacities: fit to measured times, and prediction of times |
//! | `costs` | fixed costs: issue, batches, kernels, fork and join |
//! | `pipelines` | costs of pipelined copies that run together with a direct copy, and capacities for staged data |
//! | `build` | conversion of the fit to a topology |
//!
//! The module is pure: it uses no backend and no clock. Equal times give equal topologies.

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

/// Source and destination device of a copy.
type Ends = (DeviceId, DeviceId);

/// Direct copy from one device to another.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Device whose memory the copy reads.
    pub from: DeviceId,
    /// Device whose memory the copy writes.
    pub to: DeviceId,
    /// Size of the copy in bytes.
    pub bytes: u64,
}

/// Work whose time a harness measures.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Work<'a> {
    /// Direct copies that start together, each on its own internal stream.
    Together(&'a [Hop]),
    /// `count` copies like `hop` on one internal stream. Depending on `mechanism`, they are individual copies, one batched call, or one
    /// kernel.
    Many {
        /// Copy that is made `count` times.
        hop: Hop,
        /// Number of copies.
        count: u32,
        /// Mechanism by which the copies are made.
        mechanism: Mechanism,
    },
    /// Direct copies and pipelined copies that start together, executed in the same way as plans.
    Paths {
        /// Direct copies, each on its own internal stream.
        direct: &'a [Hop],
        /// Pipelined copies, each on two internal streams.
        staged: &'a [Pipeline],
    },
}

impl Work<'_> {
    /// True if data leaves host memory, enters it or is staged in it.
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

/// Pipelined copy, whose data is staged in the memory of a third device.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// Source, destination and size of the whole copy.
    pub hop: Hop,
    /// Device in whose memory the chunks are staged.
    pub via: DeviceId,
    /// Number of chunks into which the data is divided.
    pub chunks: u32,
}

/// Times of one run of a measurement.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Timing {
    /// Time in seconds that the calling thread needs to submit all work.
    pub issue: f64,
    /// Time in seconds from submission until the host sees that the last byte has arrived.
    pub total: f64,
}

/// One measurement: the work and the times of its runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// Direct copies of the work, which start together.
    pub direct: Vec<Hop>,
    /// Pipelined copies of the work, which start together with the direct copies; see [`Work::Paths`].
    pub staged: Vec<Pipeline>,
    /// Mechanism and number of copies if the work is [`Work::Many`]. The field `direct` then holds the repeated copy. `None` for other
    /// work.
    pub many: Option<(Mechanism, u32)>,
    /// True if the work was executed in the same way as a plan ([`Work::Paths`]).
    pub as_plan: bool,
    /// Times of each repetition of the work.
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

    /// True if the work consists only of direct copies that start together.
    fn is_plain(&self) -> bool {
        self.many.is_none() && !self.as_plan && !self.direct.is_empty()
    }

    /// Returns the medians of the times of all runs.
    fn timing(&self) -> Timing {
        let middle = |of: fn(&Timing) -> f64| median(&mut self.runs.iter().map(of).collect::<Vec<f64>>()).unwrap_or(0.0);
        Timing { issue: middle(|run| run.issue), total: middle(|run| run.total) }
    }
}

/// Result of comparing the bytes of a copy with the original.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// Every byte of the pattern arrived unchanged.
    Intact,
    /// The copy reports success, but some bytes are wrong.
    Lost {
        /// Number of bytes at the destination that differ from the source.
        wrong: u64,
        /// Number of bytes that were compared.
        of: u64,
    },
}

/// Interface by which a probe (measurement of a machine) measures copies. Implementations execute the copies on an otherwise idle machine.
/// In tests, they take the times from a model or from stored measurements.
pub trait Harness {
    /// Error type: the reason why a copy could not be made.
    type Error;

    /// Runs `work` once to warm up and then `repetitions` times, and returns the times of the repetitions. If host memory is involved, each
    /// repetition uses a different host buffer, because the speed depends on the buffer, and plans do not use the buffers of the probe.
    fn measure(&mut self, work: &Work<'_>, repetitions: u32) -> Result<Vec<Timing>, Self::Error>;
    /// Measures how long two streams, one of each device in `between`, take to set and wait for flags alternately, `rounds` times. Returns
    /// the time in seconds of each repetition, or an empty list if the streams do not support flags.
    fn pass_flags(&mut self, between: [DeviceId; 2], rounds: u32, repetitions: u32) -> Result<Vec<f64>, Self::Error>;
    /// Copies a pattern from one device to the other and compares every byte.
    fn check(&mut self, from: DeviceId, to: DeviceId) -> Result<Integrity, Self::Error>;
    /// Returns the largest number of bytes that the copies of one measurement may write to the memory of one device.
    fn room(&self) -> u64;
}

/// Options for the effort of a probe (measurement of a machine).
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeOptions {
    /// Time in seconds that one isolated copy should take when capacities are measured.
    pub copy_seconds: f64,
    /// Number of runs of each measurement; their median is used.
    pub repetitions: u32,
    /// Fraction by which a set of copies may be slower than predicted. If the set is slower than that, the probe searches for the cause.
    pub tolerance: f64,
    /// Maximum number of measurements of concurrent copies. If the probe (measurement of the machine) reaches this number before all
    /// slowdowns are explained, it adds a note to the record.
    pub measurements: u32,
    /// Sizes in bytes of copies from and to host memory, and of each transfer of an all-to-all, for which a context searches for better
    /// plans after the probe. The search executes the plans. On the host backend, sizes above 4 MiB are skipped, because CPU threads move
    /// every byte. An empty list disables the search.
    pub tuned_bytes: Vec<u64>,
    /// Maximum accepted median of the relative errors of the probe's own predictions. If the median is larger, the context tunes nothing
    /// after the probe. Independently of this option, a probe whose median exceeds [`Residuals::MOST`] is stored only if the caller names a
    /// file for it.
    pub most_error: f64,
}

impl Default for ProbeOptions {
    /// Returns the options for a probe of default effort. On eight GPUs, a probe makes 2500 to 4000 measurements of 4 runs of 1 to 3 ms,
    /// which takes 15 to 25 s. Tuning then takes 1.1 s for each combination of size, direction, and speed at which a GPU accesses host
    /// memory (four H200).
    fn default() -> Self {
        let tuned_bytes = [4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20].into();
        ProbeOptions { copy_seconds: 1e-3, repetitions: 3, tolerance: 0.05, measurements: 4000, tuned_bytes, most_error: Residuals::MOST }
    }
}

impl ProbeOptions {
    /// Returns the options for a quick probe, which measures only single copies and the most important sets of copies, and tunes nothing.
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

/// Progress of a probe (measurement of a machine), for display.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Progress {
    /// Name of the current stage of the probe.
    pub stage: &'static str,
    /// Number of completed parts of the current stage of the probe.
    pub done: u32,
    /// Total number of parts into which the current stage of the probe is divided.
    pub of: u32,
    /// Number of measurements that the probe has made so far.
    pub measurements: u32,
}

/// Measured properties of one hop, that is, of direct copies from one device to another.
#[derive(Clone, Debug, PartialEq)]
pub struct HopFound {
    /// Device whose memory the hop reads.
    pub from: DeviceId,
    /// Device whose memory the hop writes.
    pub to: DeviceId,
    /// Result of checking the copied bytes. If the hop loses data, the topology does not contain it.
    pub verdict: Integrity,
    /// Rate of an isolated copy in bytes/s; 0 if the hop loses data.
    pub rate: f64,
    /// Time in seconds of a copy of a few bytes on the hop.
    pub start: f64,
}

/// Hops (pairs of source and destination device) that share one capacity.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Name of the shared resource. It is the name in the topology if the topology has this resource.
    pub name: String,
    /// Capacity that the hops share, in bytes/s.
    pub capacity: f64,
    /// Capacity that the hops share for data that is staged in host memory, in bytes/s; `None` if it equals `capacity`.
    pub staged: Option<f64>,
    /// Hops that share the capacity, as pairs of source and destination device.
    pub hops: Vec<(DeviceId, DeviceId)>,
}

/// Slowdown of two hops (pairs of source and destination device) when both are used at the same time.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Pair {
    /// Source and destination device of the first hop of the pair.
    pub first: (DeviceId, DeviceId),
    /// Source and destination device of the second hop of the pair.
    pub second: (DeviceId, DeviceId),
    /// Time of two copies that run at the same time, one on each hop, divided by the time of one of them alone. The sizes are chosen such
    /// that both copies alone take equally long. The value 1 means that the hops are independent, and 2 means that they transfer data only
    /// alternately.
    pub slowdown: f64,
}

/// Result of a probe (measurement of a machine).
#[derive(Clone, Debug, PartialEq)]
pub struct Probed {
    /// Topology of the measured machine.
    pub topology: Topology,
    /// Results for every hop (pair of source and destination device) that was tested.
    pub hops: Vec<HopFound>,
    /// Every shared capacity that was found, with its hops.
    pub groups: Vec<Group>,
    /// Every pair of hops that was measured, with the slowdown of its copies when both hops are used at the same time.
    pub pairs: Vec<Pair>,
    /// Errors of the predictions for random sets of copies, which are measured at the end of the probe.
    pub residuals: Residuals,
    /// Number of measurements that the probe made.
    pub measurements: u32,
    /// All measurements, in the order in which they were made.
    pub readings: Vec<Reading>,
    /// Notes for readers of the topology, for example on pairs that lose data and on slowdowns that remain unexplained.
    pub notes: Vec<String>,
}

/// Measures the machine. `base` supplies the devices, the pairs between which copies are possible, and the kinds of links. Other properties
/// of `base` are ignored, except fixed costs that cannot be measured.
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

/// Derives the topology from earlier measurements, without measuring capacities again. Fixed costs are measured with `harness`. If a cost
/// cannot be measured, `failed` is called and the value of this cost in `base` is used.
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

/// Measures the fixed costs, and builds the topology from the measurements of the session. Returns the topology and its shared capacities.
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

/// Returns a note that states how much the times of repeated host copies differ, or `None` if no host copy was repeated. The times differ
/// because each repetition uses a different host buffer. For the same reason, times of plans differ from the probe's times.
fn spread(readings: &[Reading]) -> Option<String> {
    /// Minimum size in bytes of a copy whose startup time is negligible.
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
    Some(format!("times of host copies differ between buffers by {:.1} % (median), {:.1} % at most", middle * 100.0, worst * 100.0))
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

/// Returns the costs after limiting each of them to the range that a topology accepts.
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
