//! From measured times to a topology: which copies slow each other down, and by how much.
//!
//! A [`Harness`] copies and tells seconds; everything here decides what to copy next and what to make of it. It knows nothing of how a
//! machine is wired beyond which pairs of devices can be copied between. `docs/reference/probe.md` has the method and its limits.
//!
//! | file | one idea |
//! | --- | --- |
//! | `sets` | the sets of copies that are measured |
//! | `measure` | how many bytes, how often, and what is measured again |
//! | `fit` | rates and shared capacities: what they predict, and how they follow from samples |
//! | `costs` | fixed costs: issue, batches, kernels, fork and join |
//! | `pipelines` | what pipelines cost beside a direct copy, and what they carry together |
//! | `build` | the fit as a topology |
//!
//! Pure: no backend, no clock, and the same times give the same topology.

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

/// From and to.
type Ends = (DeviceId, DeviceId);

/// One plain copy.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    /// Where the bytes are.
    pub from: DeviceId,
    /// Where they go.
    pub to: DeviceId,
    /// How many.
    pub bytes: u64,
}

/// What a harness measures.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Work<'a> {
    /// Plain copies that start together, each on its own lane.
    Together(&'a [Hop]),
    /// `count` copies like `hop` on one lane: as many plain copies, one batched call, or one kernel.
    Many {
        /// One of them.
        hop: Hop,
        /// How many.
        count: u32,
        /// How they are made.
        mechanism: Mechanism,
    },
    /// Plain copies and pipelines that start together, run as plans run them.
    Paths {
        /// Each in a lane of its own.
        direct: &'a [Hop],
        /// Each in two.
        staged: &'a [Pipeline],
    },
}

impl Work<'_> {
    /// Whether bytes leave host memory, enter it or are staged in it.
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

/// A copy through a third memory.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// Both ends, and the bytes.
    pub hop: Hop,
    /// Where chunks are staged.
    pub via: DeviceId,
    /// Pieces that the bytes are cut into.
    pub chunks: u32,
}

/// Seconds of one run.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Timing {
    /// The calling thread's part: until everything was issued.
    pub issue: f64,
    /// From issue until the host sees the last byte arrived.
    pub total: f64,
}

/// What was measured, and what came.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// Copies that start together: plain ones, and pipelines.
    pub direct: Vec<Hop>,
    /// See [`Work::Paths`].
    pub staged: Vec<Pipeline>,
    /// Of [`Work::Many`] its mechanism and how many: the only one of `direct` so often.
    pub many: Option<(Mechanism, u32)>,
    /// Whether as plans run pipelines: [`Work::Paths`].
    pub as_plan: bool,
    /// One for each repetition.
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

    /// Whether it is of plain copies that start together.
    fn is_plain(&self) -> bool {
        self.many.is_none() && !self.as_plan && !self.direct.is_empty()
    }

    /// The medians.
    fn timing(&self) -> Timing {
        let middle = |of: fn(&Timing) -> f64| median(&mut self.runs.iter().map(of).collect::<Vec<f64>>()).unwrap_or(0.0);
        Timing { issue: middle(|run| run.issue), total: middle(|run| run.total) }
    }
}

/// Whether the bytes of a copy arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// Every byte of the pattern arrived.
    Intact,
    /// Copies report success and this is not what arrived.
    Lost {
        /// Bytes of the pattern that are wrong.
        wrong: u64,
        /// Bytes of the pattern.
        of: u64,
    },
}

/// What measures copies for a probe: the runtime on a machine, which nothing else may use meanwhile; a model or stored readings in tests.
pub trait Harness {
    /// Why a copy could not be made.
    type Error;

    /// Runs `work` once to warm up, and then `repetitions` times, which it gives. Where host memory takes part, repetitions use different
    /// buffers of it: a plan will have yet another one.
    fn measure(&mut self, work: &Work<'_>, repetitions: u32) -> Result<Vec<Timing>, Self::Error>;
    /// Seconds in which two streams, of these devices, raise and take flags by turns, so many rounds, once for each repetition. Nothing where
    /// streams cannot.
    fn pass_flags(&mut self, between: [DeviceId; 2], rounds: u32, repetitions: u32) -> Result<Vec<f64>, Self::Error>;
    /// Moves a pattern and compares every byte.
    fn check(&mut self, from: DeviceId, to: DeviceId) -> Result<Integrity, Self::Error>;
    /// The most bytes that copies of one measurement may bring to one device.
    fn room(&self) -> u64;
}

/// How thoroughly to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeOptions {
    /// Seconds that one copy alone should take where capacities are measured.
    pub copy_seconds: f64,
    /// Runs of which the median is taken.
    pub repetitions: u32,
    /// The part by which a set of copies may be slower than predicted before a reason is looked for.
    pub tolerance: f64,
    /// The most measurements of concurrent copies. What is still unexplained then stays so, and the record says it.
    pub measurements: u32,
    /// Bytes of single copies from and to host memory, and of each transfer of an all-to-all, for which a context's probe then looks for better
    /// plans than the model's, by executing them. On the host backend those of more than 4 MiB are left out, since CPUs move every byte. None: no search.
    pub tuned_bytes: Vec<u64>,
    /// Median error of the check above which a probe is not tuned from and not kept.
    pub most_error: f64,
}

impl Default for ProbeOptions {
    /// On eight GPUs 2500 to 4000 measurements of 4 runs of 1 to 3 ms: 15 to 25 s. Then 1.1 s for each of the tuned sizes, each way, and each
    /// rate at which GPUs reach host memory (four H200).
    fn default() -> Self {
        let tuned_bytes = [4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20].into();
        ProbeOptions { copy_seconds: 1e-3, repetitions: 3, tolerance: 0.05, measurements: 4000, tuned_bytes, most_error: Residuals::MOST }
    }
}

impl ProbeOptions {
    /// A first look: single copies, and the sets that matter most. Nothing is tuned.
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

/// How far a probe is.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Progress {
    /// What is being measured.
    pub stage: &'static str,
    /// Of this stage.
    pub done: u32,
    /// Of this stage.
    pub of: u32,
    /// Measurements so far.
    pub measurements: u32,
}

/// What was found of one hop.
#[derive(Clone, Debug, PartialEq)]
pub struct HopFound {
    /// From.
    pub from: DeviceId,
    /// To.
    pub to: DeviceId,
    /// Whether bytes arrive. A hop that loses some is in no topology.
    pub verdict: Integrity,
    /// Bytes/s alone; 0 where it loses bytes.
    pub rate: f64,
    /// Seconds for a few bytes.
    pub start: f64,
}

/// Hops that share a capacity.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// As in the topology, where it is a resource of its own there.
    pub name: String,
    /// Bytes/s of all together.
    pub capacity: f64,
    /// Bytes/s of what is staged in host memory, where that is another.
    pub staged: Option<f64>,
    /// Who shares it.
    pub hops: Vec<(DeviceId, DeviceId)>,
}

/// Two hops at once, against each alone.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Pair {
    /// One.
    pub first: (DeviceId, DeviceId),
    /// The other.
    pub second: (DeviceId, DeviceId),
    /// Time together over time alone, for byte counts that take equally long alone: 1 is independent, 2 takes turns.
    pub slowdown: f64,
}

/// The result of a probe.
#[derive(Clone, Debug, PartialEq)]
pub struct Probed {
    /// The machine as measured.
    pub topology: Topology,
    /// Every hop that was tried.
    pub hops: Vec<HopFound>,
    /// Every shared capacity.
    pub groups: Vec<Group>,
    /// Every pair of hops that was measured by itself.
    pub pairs: Vec<Pair>,
    /// Of random sets of copies, measured last.
    pub residuals: Residuals,
    /// Measurements made.
    pub measurements: u32,
    /// All of them, in order.
    pub readings: Vec<Reading>,
    /// What a reader of the topology should know: pairs that lose bytes, what stayed unexplained.
    pub notes: Vec<String>,
}

/// Measures the machine. `base` says which devices there are, which of them copies join, and by which kind of link; nothing else of
/// it is used, and its fixed costs only where they cannot be measured.
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

/// The topology that the capacities of these readings give, without measuring any anew. Costs are measured with `harness`; `failed` hears which of
/// them could not be, and those of `base` stand in.
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

/// The pairs of devices that copies join.
fn joined(base: &Machine) -> Vec<Ends> {
    let devices: Vec<DeviceId> = base.devices().collect();
    let pairs = devices.iter().flat_map(|&from| devices.iter().map(move |&to| (from, to)));
    pairs.filter(|(from, to)| from != to && base.route(*from, *to).is_some()).collect()
}

/// Costs, and the topology of it all.
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

/// By how much readings of host memory differ between their repetitions, each of which is in another buffer: a plan's buffer is yet another.
fn spread(readings: &[Reading]) -> Option<String> {
    /// Bytes of a copy that lasts long against its start.
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
    Some(format!("from buffer to buffer copies of host memory differ by {:.1} % (median), {:.1} % at most", middle * 100.0, worst * 100.0))
}

/// The middle one, or the mean of the middle two; `None` of none.
fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    Some((values[last / 2] + values[last.div_ceil(2)]) / 2.0)
}

/// To three significant digits: what a measurement is worth, and what a person reads.
fn rounded(value: f64) -> f64 {
    if !(value.is_finite() && value > 0.0) {
        return value;
    }
    let unit = 10_f64.powi(value.log10().floor() as i32 - 2);
    // Dividing by a power of ten gives the nearest number to the decimal one; multiplying would not.
    if unit < 1.0 { (value / unit).round() / 10_f64.powi(2 - value.log10().floor() as i32) } else { (value / unit).round() * unit }
}

/// What costs may be in a topology.
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
