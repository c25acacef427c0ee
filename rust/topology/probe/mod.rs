//! From measured times to a topology: which copies slow each other down, and by how much.
//!
//! A [`Rig`] copies and tells seconds; everything here decides what to copy next and what to make of it. It knows nothing of how a
//! machine is wired beyond which pairs of devices can be copied between. `docs/probe.md` has the method, its formulas and its limits.
//!
//! | file | one idea |
//! | --- | --- |
//! | `session` | measurements: sizes, repetitions, what to subtract, the budget |
//! | `sharing` | rates and shared capacities, what they predict, and their fit to samples |
//! | `explain` | from a set of copies that is slower than predicted to the resource behind it |
//! | `suspects` | the sets of copies that are worth a look |
//! | `order` | which sets take the same time in every order of issue |
//! | `costs` | fixed costs: issue, batches, kernels |
//! | `pipelines` | what pipelines cost beside a direct copy, and where two cross |
//! | `build` | the fit as a topology |
//! | `record` | what a file remembers of its probe, and of which machine |
//!
//! Pure: no backend, no clock, and the same times give the same topology.

mod build;
mod costs;
mod doubt;
mod explain;
mod order;
mod pipelines;
mod record;
mod session;
mod sharing;
mod suspects;

pub(super) use record::Entry;
pub use record::{FORMAT, Fingerprint, Gpu, Record, hash};

use super::{Costs, DeviceId, Machine, Topology};
use crate::plan::Mechanism;
use serde::{Deserialize, Serialize};
use session::Session;

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

/// What a rig measures.
#[derive(Copy, Clone, Debug, PartialEq)]
pub enum Work<'a> {
    /// Plain copies that start together, each in a lane of its own.
    Together(&'a [Hop]),
    /// So many copies like `hop`, by one lane: one plain copy each, one batched call, or one kernel.
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

    /// The medians.
    fn timing(&self) -> Timing {
        let middle = |of: fn(&Timing) -> f64| median(&mut self.runs.iter().map(of).collect::<Vec<f64>>()).unwrap_or(0.0);
        Timing { issue: middle(|run| run.issue), total: middle(|run| run.total) }
    }
}

/// Whether the bytes of a copy arrive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
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

/// A machine that copies. Nothing else may use it meanwhile.
pub trait Rig {
    /// Why a copy could not be made.
    type Error;

    /// Runs `work` once to warm up, and then `repetitions` times, which it gives. Where host memory takes part, repetitions use different
    /// buffers of it: a plan will have yet another one.
    fn measure(&mut self, work: &Work<'_>, repetitions: u32) -> Result<Vec<Timing>, Self::Error>;
    /// Moves a pattern and compares every byte.
    fn check(&mut self, from: DeviceId, to: DeviceId) -> Result<Verdict, Self::Error>;
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
}

impl Default for ProbeOptions {
    /// On eight GPUs 2500 to 4000 measurements of 4 runs of 1 to 3 ms: 15 to 25 s. Then 1.1 s for each of the tuned sizes, each way, and each
    /// rate at which GPUs reach host memory (four H200).
    fn default() -> Self {
        let tuned_bytes = [4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 256 << 20].into();
        ProbeOptions { copy_seconds: 1e-3, repetitions: 3, tolerance: 0.05, measurements: 4000, tuned_bytes }
    }
}

impl ProbeOptions {
    /// A first look: single copies, and the sets that matter most. Nothing is tuned.
    pub fn quick() -> Self {
        ProbeOptions { copy_seconds: 0.5e-3, repetitions: 2, tolerance: 0.1, measurements: 400, tuned_bytes: Vec::new() }
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
    pub verdict: Verdict,
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

/// How far predictions of the fit are from the measurements of sets that it was not fitted to.
#[derive(Copy, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residuals {
    /// Sets.
    pub count: u32,
    /// The median of |predicted / measured − 1|.
    pub median: f64,
    /// The largest.
    pub worst: f64,
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
pub fn probe<R: Rig>(base: &Machine, rig: &mut R, options: &ProbeOptions, progress: &mut dyn FnMut(Progress)) -> Result<Probed, R::Error> {
    let devices: Vec<DeviceId> = base.devices().collect();
    let pairs = devices.iter().flat_map(|&from| devices.iter().map(move |&to| (from, to)));
    let joined: Vec<_> = pairs.filter(|(from, to)| from != to && base.route(*from, *to).is_some()).collect();

    let mut found = Vec::with_capacity(joined.len());
    let mut notes = Vec::new();
    for (index, &(from, to)) in joined.iter().enumerate() {
        progress(Progress { stage: "integrity", done: index as u32, of: joined.len() as u32, measurements: 0 });
        let verdict = rig.check(from, to)?;
        if let Verdict::Lost { wrong, of } = verdict {
            notes.push(format!("copies from {from} to {to} lose bytes ({wrong} of {of} wrong) and report success: the pair is not used"));
        }
        found.push(HopFound { from, to, verdict, rate: 0.0, start: 0.0 });
    }

    let hops: Vec<_> = found.iter().filter(|hop| hop.verdict == Verdict::Intact).map(|hop| (hop.from, hop.to)).collect();
    let mut session = Session::new(rig, hops, options, progress);
    session.measure_alone()?;
    session.explore(&devices)?;
    let residuals = session.validate()?;
    session.notes(&mut notes);
    session.sharing.settle(&session.hops);

    let (hops, pairs) = (session.hops.clone(), session.pairs.clone());
    let alone = session.starts.clone();
    for hop in &mut found {
        if let Some(index) = hops.iter().position(|ends| *ends == (hop.from, hop.to)) {
            (hop.rate, hop.start) = (session.sharing.rates[index], alone[index]);
        }
    }
    let (topology, _) = build::topology(base, &hops, &session.sharing, &alone);
    let costs = costs::measure(&mut session, &topology, base.costs())?;
    if let Ok(machine) = Machine::new(topology) {
        pipelines::staging(&mut session, &machine, &costs)?;
    }
    let (mut topology, groups) = build::topology(base, &hops, &session.sharing, &alone);
    topology.costs = costs;
    let readings = std::mem::take(&mut session.readings);
    notes.extend(spread(&readings));
    Ok(Probed { topology, hops: found, groups, pairs, residuals, measurements: readings.len() as u32, readings, notes })
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

/// What a cost may be in a topology.
fn bounded(costs: Costs) -> Costs {
    let time = |seconds: f64| if seconds.is_finite() { rounded(seconds.clamp(0.0, super::MAX_TIME)) } else { 0.0 };
    Costs {
        copy: time(costs.copy),
        issue: time(costs.issue),
        chunk: time(costs.chunk),
        relay_chunk: time(costs.relay_chunk),
        join: time(costs.join),
        gpu_join: time(costs.gpu_join),
        lane: time(costs.lane),
        pull: time(costs.pull),
        graph: time(costs.graph),
        batch: time(costs.batch),
        batch_segment: time(costs.batch_segment),
        kernel: time(costs.kernel),
        kernel_segment: time(costs.kernel_segment),
        kernel_efficiency: rounded(costs.kernel_efficiency.clamp(0.01, 1.0)),
        graph_node: time(costs.graph_node),
        graph_first_node: time(costs.graph_first_node),
    }
}
