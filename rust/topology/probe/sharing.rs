//! Rates of hops and the capacities that they share: what they predict for a set of copies, and how they are fitted.

use super::median;
use super::session::level;
use crate::topology::{DeviceId, Machine};
use std::collections::BTreeMap;

/// Capacities of a machine as far as they are known. Hops are numbered as in the session.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sharing {
    /// Bytes/s of each hop alone.
    pub rates: Vec<f64>,
    pub resources: Vec<Resource>,
}

/// A capacity that hops share.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Resource {
    /// One for each hop.
    pub members: Vec<bool>,
    /// Bytes/s.
    pub capacity: f64,
    /// Bytes/s of what is staged in host memory, where that is another.
    pub staged: Option<f64>,
}

/// A set of copies, and the seconds that they took together, fixed costs taken off.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    /// Hop and bytes.
    pub copies: Vec<(usize, f64)>,
    pub seconds: f64,
    /// How much it counts in a fit, in (0, 1].
    pub weight: f64,
}

impl Sample {
    /// Whether it is of these hops, with equal times alone.
    pub fn is_of(&self, hops: &[usize]) -> bool {
        self.weight == 1.0 && self.copies.iter().map(|copy| copy.0).eq(hops.iter().copied())
    }
}

impl Resource {
    /// Bytes that these copies draw from it.
    pub fn load(&self, copies: &[(usize, f64)]) -> f64 {
        copies.iter().filter(|copy| self.members[copy.0]).map(|copy| copy.1).sum()
    }

    /// Bytes/s of what is staged in host memory.
    pub fn of_staged(&self) -> f64 {
        self.staged.unwrap_or(self.capacity)
    }

    pub fn hops(&self) -> impl Iterator<Item = usize> + '_ {
        self.members.iter().enumerate().filter(|(_, member)| **member).map(|(hop, _)| hop)
    }
}

/// The hops from a GPU to a host memory and back.
fn both(hops: &[(DeviceId, DeviceId)], gpu: DeviceId, host: DeviceId) -> Option<[usize; 2]> {
    let find = |ends| hops.iter().position(|hop| *hop == ends);
    find((gpu, host)).zip(find((host, gpu))).map(|(there, back)| [there, back])
}

impl Sharing {
    /// Seconds of the slowest copy, had each its hop to itself.
    pub fn alone(&self, copies: &[(usize, f64)]) -> f64 {
        copies.iter().map(|&(hop, bytes)| bytes / self.rates[hop]).fold(0.0, f64::max)
    }

    /// Seconds for these copies together: as long as the busiest resource has work. The planner predicts by the same rule.
    pub fn seconds(&self, copies: &[(usize, f64)]) -> f64 {
        self.resources.iter().map(|resource| resource.load(copies) / resource.capacity).fold(self.alone(copies), f64::max)
    }

    /// Bytes/s of each of these hops at once, shared max-min fairly (progressive filling: Bertsekas and Gallager 1992).
    pub fn fair(&self, hops: &[usize]) -> Vec<f64> {
        let mut rates: Vec<f64> = hops.iter().map(|hop| self.rates[*hop]).collect();
        let mut settled = vec![false; hops.len()];
        loop {
            // The capacity that gives each of its hops the least, once those that have settled have taken theirs.
            let least = self.resources.iter().filter_map(|resource| {
                let (open, closed): (Vec<usize>, Vec<usize>) =
                    (0..hops.len()).filter(|index| resource.members[hops[*index]]).partition(|index| !settled[*index]);
                let taken: f64 = closed.iter().map(|index| rates[*index]).sum();
                (!open.is_empty()).then(|| ((resource.capacity - taken).max(0.0) / open.len() as f64, open))
            });
            let least = least.min_by(|a, b| a.0.total_cmp(&b.0));
            let alone = (0..hops.len()).filter(|index| !settled[*index]).min_by(|a, b| rates[*a].total_cmp(&rates[*b]));
            match (least, alone) {
                (_, None) => return rates,
                (Some((share, open)), Some(slowest)) if share < rates[slowest] => {
                    for index in open {
                        // Never none at all: a sum of rounded shares may exceed a capacity by a little.
                        rates[index] = share.max(rates[index] * 1e-3);
                        settled[index] = true;
                    }
                }
                (_, Some(slowest)) => settled[slowest] = true,
            }
        }
    }

    /// Makes one value of capacities of a kind that noise alone tells apart, and of a capacity and the rate of the hops that pass it as fast
    /// alone.
    pub fn settle(&mut self, hops: &[(DeviceId, DeviceId)]) {
        const WITHIN: f64 = 0.05;
        // How many of its hops go between GPUs, into host memory and out of it.
        let kind = |resource: &Resource| {
            let count =
                |from: bool, to: bool| resource.hops().filter(|hop| (hops[*hop].0.is_host(), hops[*hop].1.is_host()) == (from, to)).count();
            [count(false, false), count(false, true), count(true, false), count(true, true)]
        };
        let kinds: Vec<[usize; 4]> = self.resources.iter().map(kind).collect();
        let mut capacities: Vec<f64> = self.resources.iter().map(|resource| resource.capacity).collect();
        for (index, kind) in kinds.iter().enumerate().filter(|(index, kind)| !kinds[..*index].contains(kind)) {
            let alike: Vec<usize> = (index..kinds.len()).filter(|other| kinds[*other] == *kind).collect();
            level(&mut capacities, &alike, WITHIN);
        }
        // After the levelling, so that noise does not decide which of several alike ports are as fast as their hops. The median, because the
        // fastest of many hops is the one that noise favoured most.
        for (resource, capacity) in self.resources.iter().zip(&mut capacities) {
            let mut as_fast: Vec<f64> =
                resource.hops().map(|hop| self.rates[hop]).filter(|rate| *capacity < rate * (1.0 + WITHIN)).collect();
            if let Some(rate) = median(&mut as_fast) {
                *capacity = rate;
            }
        }
        self.resources.iter_mut().zip(capacities).for_each(|(resource, capacity)| resource.capacity = capacity);
        // Nor is a hop faster than what it passes.
        for resource in &self.resources {
            resource.hops().for_each(|hop| self.rates[hop] = self.rates[hop].min(resource.capacity));
        }
    }

    /// As [`Sharing::seconds`] where every copy is a hop of a pipeline through host memory.
    pub fn staged_seconds(&self, copies: &[(usize, f64)]) -> f64 {
        self.resources.iter().map(|resource| resource.load(copies) / resource.of_staged()).fold(self.alone(copies), f64::max)
    }

    /// Takes each capacity to carry at least what these pipelines drew on it.
    pub fn widen(&mut self, pipelines: &Sample, tolerance: f64) {
        for resource in &mut self.resources {
            let drawn = resource.load(&pipelines.copies) / pipelines.seconds;
            if drawn > resource.of_staged() * (1.0 + tolerance) {
                resource.staged = Some(drawn);
            }
        }
    }

    /// Takes all hops of these pipelines to share what they carried together, if nothing else explains that they are so late.
    pub fn bound(&mut self, pipelines: &Sample, tolerance: f64) {
        if self.staged_seconds(&pipelines.copies) >= pipelines.seconds * (1.0 - tolerance) {
            return;
        }
        let mut members = vec![false; self.rates.len()];
        pipelines.copies.iter().for_each(|copy| members[copy.0] = true);
        let rates = self.rates.iter().zip(&members).filter(|(_, member)| **member).map(|(rate, _)| rate);
        let mut all = Resource { capacity: rates.sum(), members, staged: None };
        all.staged = Some(all.load(&pipelines.copies) / pipelines.seconds);
        self.resources.push(all);
    }

    /// Bytes/s of both directions between a GPU and a host memory at once; `None` where there are no two.
    pub fn both_ways(&self, hops: &[(DeviceId, DeviceId)], gpu: DeviceId, host: DeviceId) -> Option<f64> {
        let both = both(hops, gpu, host)?;
        let of = |resource: &&Resource| both.iter().all(|hop| resource.members[*hop]);
        let capacities = self.resources.iter().filter(of).map(|resource| resource.capacity);
        Some(capacities.fold(both.iter().map(|hop| self.rates[*hop]).sum(), f64::min))
    }

    /// Takes what links between GPUs and host memory carry of staged bytes in both directions at once to be this part of what they carry of
    /// others.
    pub fn slow_crossing(&mut self, hops: &[(DeviceId, DeviceId)], machine: &Machine, part: f64) {
        let devices = || machine.devices();
        for gpu in devices().filter(|device| !device.is_host()) {
            for host in devices().filter(|device| device.is_host()) {
                let Some(both) = both(hops, gpu, host) else { continue };
                let of_this_gpu = |resource: &Resource| {
                    let own = |hop: usize| hops[hop].0 == gpu || hops[hop].1 == gpu;
                    both.iter().all(|hop| resource.members[*hop]) && resource.hops().all(own)
                };
                let found = self.resources.iter().position(of_this_gpu);
                let link = found.unwrap_or_else(|| {
                    let mut members = vec![false; hops.len()];
                    both.iter().for_each(|hop| members[*hop] = true);
                    let capacity = both.iter().map(|hop| self.rates[*hop]).sum();
                    self.resources.push(Resource { members, capacity, staged: None });
                    self.resources.len() - 1
                });
                // Either direction alone is as fast as before.
                let alone = self.resources[link].hops().map(|hop| self.rates[hop]).fold(0.0, f64::max);
                let slower = self.resources[link].capacity * part;
                self.resources[link].staged = Some(slower.max(alone));
            }
        }
    }

    /// Fits capacities and memberships to the samples, one resource after another while the others stay as they are. `families` are
    /// sets of hops that a piece of hardware would serve: the hops out of one device, say.
    pub fn refine(&mut self, samples: &[Sample], families: &[Vec<usize>]) {
        const SWEEPS: usize = 3;
        let alone: Vec<f64> = samples.iter().map(|sample| self.alone(&sample.copies)).collect();
        let repeats = repeats(samples);
        for _ in 0..SWEEPS {
            let before = self.resources.clone();
            let mut at = 0;
            while at < self.resources.len() {
                let mut others = alone.clone();
                for resource in self.resources.iter().enumerate().filter(|(index, _)| *index != at).map(|(_, resource)| resource) {
                    for (other, sample) in others.iter_mut().zip(samples) {
                        *other = other.max(resource.load(&sample.copies) / resource.capacity);
                    }
                }
                match (Fit { samples, others: &others, repeats: &repeats }).resource(&self.resources[at], families) {
                    Some(resource) => {
                        self.resources[at] = resource;
                        at += 1;
                    }
                    None => {
                        self.resources.remove(at);
                    }
                }
            }
            if self.resources == before {
                break;
            }
        }
    }
}

/// What a resource must add to what the others predict.
struct Fit<'a> {
    samples: &'a [Sample],
    others: &'a [f64],
    /// The samples of each set of hops.
    repeats: &'a [Vec<usize>],
}

/// The samples of each set of hops with equal times.
fn repeats(samples: &[Sample]) -> Vec<Vec<usize>> {
    let mut sets: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
    for (index, sample) in samples.iter().enumerate().filter(|(_, sample)| sample.weight == 1.0) {
        let mut hops: Vec<usize> = sample.copies.iter().map(|copy| copy.0).collect();
        hops.sort_unstable();
        sets.entry(hops).or_default().push(index);
    }
    sets.into_values().collect()
}

/// How many times as much a member must save to be left out of a family that draws on a resource as a whole.
const FAMILY_WORTH: f64 = 4.0;
/// What a member, or a resource, must save to be worth having: one sample that is off by 8 %.
const WORTH: f64 = 0.05 * (0.08 - 0.025);

impl Fit<'_> {
    /// The sum over the samples of Huber's loss (1964) of ln(predicted / measured): squares of small errors, large ones as they are, so that a
    /// measurement that something disturbed pulls no more than its part.
    fn cost(&self, loads: &[f64], capacity: f64) -> f64 {
        const SMALL: f64 = 0.05;
        let loss = |((sample, other), load): ((&Sample, &f64), &f64)| {
            let error = (other.max(load / capacity) / sample.seconds).ln().abs();
            sample.weight * if error < SMALL { error * error / 2.0 } else { SMALL * (error - SMALL / 2.0) }
        };
        self.samples.iter().zip(self.others).zip(loads).map(loss).sum()
    }

    fn loads(&self, resource: &Resource) -> Vec<f64> {
        self.samples.iter().map(|sample| resource.load(&sample.copies)).collect()
    }

    /// Bytes/s that some set was seen to draw, the median of its samples, but for what noise may make of it. No capacity is less: what reads and
    /// writes of a memory share at once is less than what either has alone, and must not hold that back.
    fn drawn(&self, loads: &[f64]) -> f64 {
        const NOISE: f64 = 0.05;
        let of = |set: &Vec<usize>| {
            let mut drawn: Vec<f64> = set.iter().map(|&index| loads[index] / self.samples[index].seconds).collect();
            median(&mut drawn).unwrap_or(0.0)
        };
        self.repeats.iter().map(of).fold(0.0, f64::max) * (1.0 - NOISE)
    }

    /// The capacity that fits best among at most `tried` that single samples would ask for, with its cost.
    fn capacity(&self, loads: &[f64], now: f64, tried: usize) -> (f64, f64) {
        let drawn = self.drawn(loads);
        let near = 0.8 * now.min(drawn);
        let asked = self.samples.iter().zip(self.others).zip(loads).filter(|((sample, _), load)| **load > near * sample.seconds);
        let mut asked: Vec<f64> = asked.map(|((sample, _), load)| load / sample.seconds).collect();
        asked.sort_by(f64::total_cmp);
        let step = asked.len().div_ceil(tried).max(1);
        let tried = asked.into_iter().step_by(step).chain([now]).map(|capacity| capacity.max(drawn));
        let tried = tried.map(|capacity| (capacity, self.cost(loads, capacity)));
        tried.min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((now, f64::INFINITY))
    }

    /// The resource fitted anew; `None` where the samples do as well without it.
    fn resource(&self, resource: &Resource, families: &[Vec<usize>]) -> Option<Resource> {
        const TRIED: usize = 48;
        const TRIED_FOR_EACH: usize = 6;
        let mut best = resource.clone();
        let mut loads = self.loads(&best);
        let mut cost;
        (best.capacity, cost) = self.capacity(&loads, best.capacity, TRIED);
        // A member that makes predictions too slow is none. The worst goes first: others may seem wrong because of it.
        loop {
            let without = |hop: usize| {
                let share = |sample: &Sample| sample.copies.iter().filter(|copy| copy.0 == hop).map(|copy| copy.1).sum::<f64>();
                let loads: Vec<f64> = loads.iter().zip(self.samples).map(|(load, sample)| load - share(sample)).collect();
                let (capacity, cost) = self.capacity(&loads, best.capacity, TRIED_FOR_EACH);
                (hop, capacity, cost, loads)
            };
            let is_family =
                families.iter().any(|family| family.len() == best.hops().count() && family.iter().all(|hop| best.members[*hop]));
            let worth = if is_family { FAMILY_WORTH * WORTH } else { WORTH };
            match best.hops().map(without).min_by(|a, b| a.2.total_cmp(&b.2)).filter(|found| found.2 < cost - worth) {
                Some((hop, capacity, less, lighter)) => {
                    best.members[hop] = false;
                    (best.capacity, cost, loads) = (capacity, less, lighter);
                }
                None => break,
            }
        }
        // One that has most hops of a family has all of them, unless a sample says otherwise.
        for family in families {
            let (inside, outside): (Vec<usize>, Vec<usize>) = family.iter().partition(|hop| best.members[**hop]);
            if outside.is_empty() || inside.len() < 2 || inside.len() < 2 * outside.len() {
                continue;
            }
            let mut whole = best.clone();
            outside.iter().for_each(|&hop| whole.members[hop] = true);
            let whole_loads = self.loads(&whole);
            whole.capacity = whole.capacity.max(self.drawn(&whole_loads));
            let whole_cost = self.cost(&whole_loads, whole.capacity);
            if whole_cost < cost + WORTH / 4.0 {
                (best, loads, cost) = (whole, whole_loads, whole_cost);
            }
        }
        let idle = self.cost(&loads, f64::INFINITY);
        (best.hops().nth(1).is_some() && cost < idle - WORTH / 4.0).then_some(best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(copies: &[(usize, f64)], seconds: f64) -> Sample {
        Sample { copies: copies.to_vec(), seconds, weight: 1.0 }
    }

    #[test]
    fn the_busiest_resource_sets_the_time() {
        let mut sharing = Sharing { rates: vec![10.0, 10.0, 20.0], resources: Vec::new() };
        assert_eq!(sharing.seconds(&[(0, 100.0), (2, 100.0)]), 10.0);
        sharing.resources.push(Resource { members: vec![true, false, true], capacity: 16.0, staged: None });
        assert_eq!(sharing.seconds(&[(0, 100.0), (2, 100.0)]), 12.5);
        assert_eq!(sharing.seconds(&[(1, 100.0), (2, 100.0)]), 10.0);
    }

    #[test]
    fn refining_moves_the_capacity_drops_a_false_member_and_a_resource_that_explains_nothing() {
        let mut sharing = Sharing {
            rates: vec![10.0; 4],
            resources: vec![
                Resource { members: vec![true, true, false, true], capacity: 13.0, staged: None },
                Resource { members: vec![false, false, true, true], capacity: 19.0, staged: None },
            ],
        };
        let samples = [
            sample(&[(0, 100.0), (1, 100.0)], 12.5),
            sample(&[(0, 50.0), (1, 50.0)], 6.3),
            sample(&[(0, 100.0), (3, 100.0)], 10.1),
            sample(&[(1, 100.0), (3, 100.0)], 10.0),
            sample(&[(2, 100.0), (3, 100.0)], 10.0),
        ];
        sharing.refine(&samples, &[]);
        assert_eq!(sharing.resources.len(), 1);
        assert_eq!(sharing.resources[0].members, [true, true, false, false]);
        assert!((15.8..=16.1).contains(&sharing.resources[0].capacity), "{}", sharing.resources[0].capacity);
    }

    #[test]
    fn a_family_is_completed_where_no_sample_speaks_against_it() {
        let resource = Resource { members: vec![true, true, true, false], capacity: 10.0, staged: None };
        let mut sharing = Sharing { rates: vec![10.0; 4], resources: vec![resource] };
        let mut samples = vec![sample(&[(0, 10.0), (1, 10.0), (2, 10.0)], 3.0)];
        sharing.refine(&samples, &[vec![0, 1, 2, 3]]);
        assert_eq!(sharing.resources[0].members, [true; 4]);
        samples.push(sample(&[(0, 10.0), (3, 10.0)], 1.0));
        sharing.refine(&samples, &[vec![0, 1, 2, 3]]);
        assert_eq!(sharing.resources[0].members, [true, true, true, false]);
    }
}
