//! Copies of host memory that pass for members of a capacity between GPUs.
//!
//! Buffers of host memory differ, and others use it too, so that a copy of it may be late beside any other. Beside a port of NVLink, seven times as
//! wide, it then seems to draw on that, and the host adds nothing to a copy between GPUs any more: no path through it is planned. Two of
//! four probes of four H200 ended so. So each such member is asked once more, where its own lateness does not show.

use super::session::Session;
use super::sharing::Resource;
use super::{Rig, order};

/// A capacity so many times as wide as a copy of host memory is one of copies between GPUs.
const WIDER: f64 = 2.0;
/// How long the copy takes alone, as a part of the time of those that fill the capacity: half as slow again as it was, and more, it is still done before they are.
const BESIDE: f64 = 0.5;
/// What a member must add to their time, as a part of it, to be told from noise: copies between GPUs differ by less than 1 %.
const VISIBLE: f64 = 0.02;

impl<R: Rig> Session<'_, R> {
    /// Takes copies of host memory out of capacities that others fill as fast beside them.
    pub fn doubt(&mut self) -> Result<(), R::Error> {
        for at in (0..self.sharing.resources.len()).rev() {
            match self.asked(at)? {
                Some(resource) => self.sharing.resources[at] = resource,
                None => drop(self.sharing.resources.remove(at)),
            }
        }
        Ok(())
    }

    /// What is left of a capacity, if that is one.
    fn asked(&mut self, at: usize) -> Result<Option<Resource>, R::Error> {
        let mut resource = self.sharing.resources[at].clone();
        let (between, of_host): (Vec<usize>, Vec<usize>) = resource.hops().partition(|hop| order::is_between_gpus(self.hops[*hop]));
        let mut core: Vec<usize> = Vec::new();
        for hop in between {
            core.push(hop);
            if !order::is_free(&self.hops, &core) {
                core.pop();
            }
        }
        let load: f64 = core.iter().map(|hop| self.sharing.rates[*hop]).sum();
        if load < resource.capacity * (1.0 - self.options.tolerance) {
            return Ok(Some(resource));
        }
        let slowdown = (load / resource.capacity).max(1.0);
        let alone: Vec<(usize, f64)> = core.iter().map(|&hop| (hop, 1.0)).collect();
        let mut without = None;
        for &hop in &of_host {
            // By this part of the others' time.
            let later = BESIDE * self.sharing.rates[hop] / resource.capacity;
            if later < VISIBLE || self.sharing.rates[hop] * WIDER > resource.capacity || !self.may_measure() {
                continue;
            }
            let without = match without {
                Some(seconds) => seconds,
                None => *without.insert(self.fastest(&alone)?),
            };
            let beside: Vec<(usize, f64)> = alone.iter().copied().chain([(hop, BESIDE * slowdown)]).collect();
            if self.fastest(&beside)? < without * (1.0 + later / 2.0) {
                resource.members[hop] = false;
            }
        }
        if of_host.iter().all(|hop| resource.members[*hop]) {
            return Ok(Some(resource));
        }
        // Without them the others must fill it, and nothing that is narrower, or there is no such capacity.
        let is_narrower = |(index, other): (usize, &Resource)| {
            index != at && other.capacity <= resource.capacity && resource.hops().all(|hop| other.members[hop])
        };
        let is_filled = without.is_none_or(|seconds| seconds > slowdown * (1.0 - self.options.tolerance));
        Ok((is_filled && !self.sharing.resources.iter().enumerate().any(is_narrower)).then_some(resource))
    }

    /// Seconds of such a set, in units of its parts: whatever disturbs a measurement makes it longer.
    fn fastest(&mut self, parts: &[(usize, f64)]) -> Result<f64, R::Error> {
        let mut fastest = f64::INFINITY;
        for _ in 0..2 {
            let (sample, scale) = self.together(parts)?;
            fastest = fastest.min(sample.seconds / scale);
        }
        Ok(fastest)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sharing::Sharing;
    use super::super::{Hop, ProbeOptions, Timing, Verdict, Work};
    use super::*;
    use crate::topology::DeviceId;
    use std::convert::Infallible;

    /// Copies together take as long as the rule says, those of host memory some time longer.
    struct Ruled {
        hops: Vec<(DeviceId, DeviceId)>,
        truth: Sharing,
        slow_host: f64,
    }

    impl Rig for Ruled {
        type Error = Infallible;

        fn measure(&mut self, work: &Work<'_>, repetitions: u32) -> Result<Vec<Timing>, Infallible> {
            let Work::Together(hops) = *work else { unreachable!("sets alone") };
            let number = |hop: &Hop| self.hops.iter().position(|ends| *ends == (hop.from, hop.to)).expect("a hop");
            let copies: Vec<(usize, f64)> = hops.iter().map(|hop| (number(hop), hop.bytes as f64)).collect();
            let of_host = |hop: &&Hop| hop.from.is_host() || hop.to.is_host();
            let late = hops.iter().filter(of_host).map(|hop| hop.bytes as f64 / self.truth.rates[number(hop)] * self.slow_host);
            let total = late.fold(self.truth.seconds(&copies), f64::max) + 7e-6;
            Ok(vec![Timing { issue: 1e-6, total }; repetitions as usize])
        }

        fn check(&mut self, _: DeviceId, _: DeviceId) -> Result<Verdict, Infallible> {
            Ok(Verdict::Intact)
        }

        fn room(&self) -> u64 {
            1 << 30
        }
    }

    #[test]
    fn a_copy_of_host_memory_stays_a_member_of_a_port_only_where_it_slows_the_port_down() {
        let devices: Vec<DeviceId> = (0..4).map(DeviceId::gpu).chain([DeviceId::HOST]).collect();
        let pairs = devices.iter().flat_map(|from| devices.iter().map(move |to| (*from, *to)));
        let hops: Vec<_> = pairs.filter(|(from, to)| from != to).collect();
        let rates: Vec<f64> = hops.iter().map(|(from, to)| if from.is_host() || to.is_host() { 55e9 } else { 394e9 }).collect();
        let is_host = |from: DeviceId, to: DeviceId| from.is_host() || to.is_host();
        let into = |gpu: u32, host: bool, capacity: f64| Resource {
            members: hops.iter().map(|&(from, to)| to == DeviceId::gpu(gpu) && (host || !is_host(from, to))).collect(),
            capacity,
            staged: None,
        };
        for slow_host in [1.0, 1.5] {
            let some = |members: &[(i32, i32)], capacity: f64| Resource {
                members: hops.iter().map(|(from, to)| members.contains(&(from.0, to.0))).collect(),
                capacity,
                staged: None,
            };
            let real = [into(1, true, 394e9), into(2, true, 430e9)];
            let truth = Sharing { rates: rates.clone(), resources: [&[into(0, false, 394e9)], &real[..]].concat() };
            // A copy too many; capacities that are none without it: one that nothing fills, and one that the port is narrower than.
            let wrong = [into(0, true, 394e9), some(&[(1, 3), (3, 0), (2, -1)], 715e9), some(&[(1, 0), (2, 0), (-1, 0)], 470e9)];
            let found = Sharing { rates: rates.clone(), resources: [&wrong[..], &real].concat() };
            let mut rig = Ruled { hops: hops.clone(), truth: truth.clone(), slow_host };
            let (options, mut progress) = (ProbeOptions::default(), |_| {});
            let mut session = Session::new(&mut rig, hops.clone(), &options, &mut progress);
            (session.sharing, session.starts) = (found, vec![7e-6; hops.len()]);
            let Ok(()) = session.doubt();
            assert_eq!(session.sharing, truth, "host memory {slow_host} times as slow");
        }
    }
}
