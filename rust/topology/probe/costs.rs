//! Fixed costs, by regression against the fitted links.

use super::session::{Session, TINY};
use super::{Hop, Rig, Work, bounded};
use crate::model::PathModel;
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

    session.at("costs", 1, 2);
    let Ok(machine) = Machine::new(topology.clone()) else { return Ok(bounded(costs)) };
    if let Some((chunk, join, issue)) = staged(session, &machine, &costs)? {
        (costs.chunk, costs.join) = (chunk, join);
        costs.issue = costs.issue.max(issue);
    }
    Ok(bounded(costs))
}

/// The hand-over between chunks and the join, from copies through the host and through another GPU in different numbers of chunks: what they
/// take longer than the model says without either is `(n + 1) · chunk + join`. The third is the issue of one operation.
fn staged<R: Rig>(session: &mut Session<'_, R>, machine: &Machine, costs: &Costs) -> Result<Option<(f64, f64, f64)>, R::Error> {
    const CHUNKS: [u32; 9] = [1, 2, 3, 4, 6, 8, 12, 16, 32];
    let free = Costs { chunk: 0.0, join: 0.0, ..costs.clone() };
    let gpus: Vec<DeviceId> = machine.devices().filter(|device| !device.is_host()).collect();
    let ends = match gpus[..] {
        [from, to, ..] => (from, to),
        _ => return Ok(None),
    };
    let mut points = Vec::new();
    let mut issue: f64 = 0.0;
    for via in [Some(DeviceId::HOST), gpus.get(2).copied()].into_iter().flatten() {
        let (Some(first), Some(second)) = (machine.route(ends.0, via), machine.route(via, ends.1)) else { continue };
        let path = PathModel::new(machine, &[first, second]);
        let most = session.rig.room();
        // Short, so that what noise adds to the time of the bytes is small against the hand-overs.
        let bytes = ((path.rate * session.options.copy_seconds / 8.0) as u64).clamp(TINY * 64, most.max(TINY * 64));
        for chunks in CHUNKS {
            let hop = Hop { from: ends.0, to: ends.1, bytes };
            let timing = session.measure(&Work::Staged { hop, via, chunks })?;
            points.push((f64::from(chunks + 1), timing.total - path.seconds(&free, bytes, chunks)));
            if chunks == CHUNKS[CHUNKS.len() - 1] {
                issue = issue.max(timing.issue / f64::from(2 * chunks));
            }
        }
    }
    Ok(line(&points).map(|(chunk, join)| (chunk, join, issue)))
}

/// Slope and intercept by least squares, neither below zero.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let count = points.len() as f64;
    if points.len() < 2 {
        return None;
    }
    let (x, y) = (points.iter().map(|p| p.0).sum::<f64>() / count, points.iter().map(|p| p.1).sum::<f64>() / count);
    let spread: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    let slope = (points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum::<f64>() / spread).max(0.0);
    let intercept = y - slope * x;
    if intercept >= 0.0 {
        return Some((slope, intercept));
    }
    // Through the origin.
    let slope = points.iter().map(|p| p.0 * p.1).sum::<f64>() / points.iter().map(|p| p.0 * p.0).sum::<f64>();
    Some((slope.max(0.0), 0.0))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_line_is_found_again_and_never_below_zero() {
        let on = |slope: f64, intercept: f64| [2.0, 3.0, 5.0, 9.0].map(|x| (x, slope * x + intercept));
        let near = |a: (f64, f64), b: (f64, f64)| (a.0 - b.0).abs() < 1e-9 && (a.1 - b.1).abs() < 1e-9;
        assert!(near(super::line(&on(4.0, 7.0)).expect("a line"), (4.0, 7.0)));
        let (slope, intercept) = super::line(&on(4.0, -1.0)).expect("a line");
        assert!(intercept == 0.0 && (3.7..4.0).contains(&slope), "{slope}");
        assert_eq!(super::line(&on(-4.0, 30.0)).map(|line| line.0), Some(0.0));
        assert_eq!(super::line(&[(1.0, 1.0)]), None);
    }
}
