//! Fixed costs, on the fitted links.

use super::pipelines::{self, HandOvers};
use super::session::{Session, TINY};
use super::{Hop, Rig, Work, bounded, median};
use crate::plan::Mechanism;
use crate::topology::{Costs, DeviceId, Machine, Topology};

/// Measures what it can; the rest is as in `otherwise`.
pub(super) fn measure<R: Rig>(session: &mut Session<'_, R>, topology: &Topology, otherwise: &Costs) -> Result<Costs, R::Error> {
    let mut costs = otherwise.clone();
    let least = session.starts.iter().copied().fold(f64::INFINITY, f64::min);
    if least.is_finite() {
        costs.copy = least;
    }
    let between_gpus = |hop: &&(DeviceId, DeviceId)| !hop.0.is_host() && !hop.1.is_host();
    let Some(&(from, to)) = session.hops.iter().find(between_gpus).or(session.hops.first()) else {
        return Ok(bounded(costs));
    };
    let rate = session.hops.iter().position(|hop| *hop == (from, to)).map_or(1e9, |hop| session.sharing.rates[hop]);

    session.at("costs", 0, 2);
    let few = Hop { from, to, bytes: 256 };
    let mut line = |mechanism| -> Result<(f64, f64), R::Error> {
        const MANY: u32 = 64;
        let one = session.measure(&Work::Many { hop: few, count: 1, mechanism })?.total;
        let many = session.measure(&Work::Many { hop: few, count: MANY, mechanism })?.total;
        let each = ((many - one) / f64::from(MANY - 1)).max(0.0);
        Ok(((one - each).max(0.0), each))
    };
    (_, costs.issue) = line(Mechanism::Copy)?;
    (costs.batch, costs.batch_segment) = line(Mechanism::Batch)?;
    (costs.kernel, costs.kernel_segment) = line(Mechanism::Kernel)?;
    // Long enough for its start to count little, short enough for the messages that kernels are made for.
    let bytes = ((rate * session.options.copy_seconds / 4.0) as u64).clamp(16 * TINY, session.rig.room().max(16 * TINY));
    let mut moving = |mechanism, start: f64| -> Result<f64, R::Error> {
        let total = session.measure(&Work::Many { hop: Hop { from, to, bytes }, count: 1, mechanism })?.total;
        Ok((total - start).max(total / 10.0))
    };
    let plain = moving(Mechanism::Copy, costs.copy)?;
    let kernel = moving(Mechanism::Kernel, costs.kernel)?;
    costs.kernel_efficiency = plain / kernel;

    let gpu_join = gpu_join(session, &costs)?;

    session.at("costs", 1, 2);
    let Ok(machine) = Machine::new(topology.clone()) else { return Ok(bounded(costs)) };
    if let Some(HandOvers { chunk, relay_chunk, join, issue }) = pipelines::hand_overs(session, &machine, &costs)? {
        (costs.chunk, costs.relay_chunk, costs.join) = (chunk, relay_chunk, join);
        costs.issue = costs.issue.max(issue);
    }
    // Both wait for an event of another stream and have one waited for.
    costs.gpu_join = gpu_join.unwrap_or(costs.gpu_join).max(costs.join);
    Ok(bounded(costs))
}

/// What two copies of two GPUs that share nothing take longer than the longer of them, less what it takes to issue the second: the median
/// over lengths of which none ends before all is issued. `None` where there are no such copies.
fn gpu_join<R: Rig>(session: &mut Session<'_, R>, costs: &Costs) -> Result<Option<f64>, R::Error> {
    const LENGTHS: [f64; 5] = [8e-6, 12e-6, 16e-6, 24e-6, 32e-6];
    let hops = &session.hops;
    let of_gpus = || (0..hops.len()).filter(|&hop| !hops[hop].0.is_host() && !hops[hop].1.is_host());
    let share = |one: usize, other: usize| session.sharing.resources.iter().any(|of| of.members[one] && of.members[other]);
    let pairs = of_gpus().flat_map(|one| of_gpus().map(move |other| (one, other)));
    let Some((one, other)) = pairs.into_iter().find(|&(one, other)| hops[one].0 != hops[other].0 && !share(one, other)) else {
        return Ok(None);
    };
    let (ends, rates) = ([hops[one], hops[other]], [session.sharing.rates[one], session.sharing.rates[other]]);
    let mut longer = Vec::new();
    for seconds in LENGTHS {
        let hop = |at: usize| {
            let bytes = ((rates[at] * seconds) as u64).clamp(TINY, session.rig.room());
            Hop { from: ends[at].0, to: ends[at].1, bytes }
        };
        let both = [hop(0), hop(1)];
        let mut total = |hops: &[Hop]| Ok(session.measure(&Work::Together(hops))?.total);
        let alone = f64::max(total(&both[..1])?, total(&both[1..])?);
        longer.push(total(&both)? - alone - costs.issue);
    }
    Ok(median(&mut longer))
}
