//! Measures the fixed costs of copies, after the rates and capacities of the machine were fitted. Each step measures one or more costs.

use super::measure::{Session, TINY};
use super::{Harness, Hop, Work, median, pipelines};
use crate::plan::Mechanism;
use crate::topology::{Costs, DeviceId, Machine};

/// Step of a probe (measurement of a machine) that measures fixed costs, or that adjusts the measured capacities.
pub(super) type Step<H> = fn(&mut Session<'_, H>, &Machine, &mut Costs) -> Result<(), <H as Harness>::Error>;

/// Returns the names and functions of the measuring steps of a probe, in the order in which they are made. Later steps use the costs that
/// earlier steps have measured.
pub(super) fn steps<H: Harness>() -> [(&'static str, Step<H>); 9] {
    [
        ("calls", calls),
        ("kernel efficiency", kernel_efficiency),
        ("flags", hand_over),
        ("fork and join of GPUs", fork_join_gpus),
        ("fork and join of staged paths", pipelines::fork_join_staged),
        ("chunks through host memory", pipelines::chunks_via_host),
        ("chunks through a GPU", pipelines::chunks_via_gpu),
        ("staging of all GPUs", pipelines::staging_ring),
        ("staging in both directions", pipelines::staging_both_ways),
    ]
}

/// Returns the index of the first hop between two GPUs. If there is none, returns the index of the first hop of any kind. `None` if there
/// are no hops.
fn first<H: Harness>(session: &Session<'_, H>) -> Option<usize> {
    let between_gpus = |hop: &(DeviceId, DeviceId)| !hop.0.is_host() && !hop.1.is_host();
    session.hops.iter().position(between_gpus).or((!session.hops.is_empty()).then_some(0))
}

/// Measures the fixed cost of a copy, and the cost of each further copy in one submission, for individual copies, batched copies and copy
/// kernels. The costs are derived from the times of one copy and of 64 copies of a few bytes.
fn calls<H: Harness>(session: &mut Session<'_, H>, _: &Machine, costs: &mut Costs) -> Result<(), H::Error> {
    const MANY: u32 = 64;
    let Some(index) = first(session) else { return Ok(()) };
    costs.copy = session.starts.iter().copied().fold(f64::INFINITY, f64::min);
    let hop = Hop { from: session.hops[index].0, to: session.hops[index].1, bytes: 256 };
    let mut line = |mechanism| -> Result<(f64, f64), H::Error> {
        let one = session.measure(&Work::Many { hop, count: 1, mechanism })?.total;
        let many = session.measure(&Work::Many { hop, count: MANY, mechanism })?.total;
        let each = ((many - one) / f64::from(MANY - 1)).max(0.0);
        Ok(((one - each).max(0.0), each))
    };
    (_, costs.issue) = line(Mechanism::Copy)?;
    (costs.batch, costs.batch_segment) = line(Mechanism::Batch)?;
    (costs.kernel, costs.kernel_segment) = line(Mechanism::Kernel)?;
    Ok(())
}

/// Measures the rate of a copy kernel relative to the rate of a copy engine, excluding startup times.
fn kernel_efficiency<H: Harness>(session: &mut Session<'_, H>, _: &Machine, costs: &mut Costs) -> Result<(), H::Error> {
    let Some(index) = first(session) else { return Ok(()) };
    let (from, to) = session.hops[index];
    // The size is large enough that the startup time is negligible, and small enough to be typical of messages for which kernels are used.
    let bytes = (session.fit.rates[index] * session.options.copy_seconds / 4.0) as u64;
    let bytes = bytes.clamp(16 * TINY, session.harness.room().max(16 * TINY));
    let mut moving = |mechanism, start: f64| -> Result<f64, H::Error> {
        let total = session.measure(&Work::Many { hop: Hop { from, to, bytes }, count: 1, mechanism })?.total;
        Ok((total - start).max(total / 10.0))
    };
    costs.kernel_efficiency = moving(Mechanism::Copy, costs.copy)? / moving(Mechanism::Kernel, costs.kernel)?;
    Ok(())
}

/// Measures the time from the moment at which a stream sets a flag until a stream that waits for the flag continues. It is derived from the
/// difference in time between 36 and 4 round trips.
fn hand_over<H: Harness>(session: &mut Session<'_, H>, _: &Machine, costs: &mut Costs) -> Result<(), H::Error> {
    const ROUNDS: [u32; 2] = [4, 36];
    let Some(index) = first(session) else { return Ok(()) };
    let (from, to) = session.hops[index];
    let mut seconds = |rounds| Ok(median(&mut session.harness.pass_flags([from, to], rounds, session.options.repetitions)?));
    if let [Some(few), Some(many)] = [seconds(ROUNDS[0])?, seconds(ROUNDS[1])?] {
        costs.hand_over = ((many - few) / f64::from(2 * (ROUNDS[1] - ROUNDS[0]))).max(0.0);
    }
    Ok(())
}

/// Measures by how much two independent copies of two GPUs, started together, take longer than the longer copy alone. The time to issue the
/// second copy is subtracted. The result is the median over sizes at which no copy ends before both are issued.
fn fork_join_gpus<H: Harness>(session: &mut Session<'_, H>, _: &Machine, costs: &mut Costs) -> Result<(), H::Error> {
    const LENGTHS: [f64; 5] = [8e-6, 12e-6, 16e-6, 24e-6, 32e-6];
    let hops = &session.hops;
    let of_gpus = || (0..hops.len()).filter(|&hop| !hops[hop].0.is_host() && !hops[hop].1.is_host());
    let contend = |one: usize, other: usize| session.fit.shared.iter().any(|of| of.members[one] && of.members[other]);
    let pairs = of_gpus().flat_map(|one| of_gpus().map(move |other| (one, other)));
    let mut apart = pairs.filter(|&(one, other)| hops[one].0 != hops[other].0 && !contend(one, other));
    let Some((one, other)) = apart.next() else { return Ok(()) };
    let ends = [one, other].map(|hop| (hops[hop], session.fit.rates[hop]));
    let mut longer = Vec::new();
    for seconds in LENGTHS {
        let both = ends.map(|((from, to), rate)| Hop { from, to, bytes: ((rate * seconds) as u64).clamp(TINY, session.harness.room()) });
        let mut total = |hops: &[Hop]| -> Result<f64, H::Error> { Ok(session.measure(&Work::Together(hops))?.total) };
        let alone = f64::max(total(&both[..1])?, total(&both[1..])?);
        longer.push(total(&both)? - alone - costs.issue);
    }
    costs.fork_join_gpus = median(&mut longer).unwrap_or(costs.fork_join_gpus).max(0.0);
    Ok(())
}
