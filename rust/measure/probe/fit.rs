//! Derives shared capacities from measured sets of concurrent copies, by one simple rule.
//!
//! If a set of copies takes longer than predicted by more than the tolerance, its copies are assumed to share a capacity. The value of the
//! capacity is the total size of the copies divided by their time. Sets are processed from the smallest to the largest, so that capacities
//! of a few copies are known when larger sets are examined.
//!
//! Each hop is timed at 4 KiB (*T₀*), at 1 MiB (*b₁*, *T₁*) and at a size that takes about 1 ms (*b₂*, *T₂*). Its rate is `β =
//! (b₂−b₁)/(T₂−T₁)` and its startup time is `α = T₀`. A set *S* of copies of *b_h* bytes ends when the busiest resource has finished; the
//! planner uses the same rule:
//!
//! ```text
//! T(S) = max( max_h b_h/β_h, max_r Σ_{h∈r} b_h/C_r )    over the hops h of S and the capacities r
//! ```
//!
//! The largest startup time `α` of the set and half of the issue time are subtracted from the measured time. If a set is more than 5 %
//! slower than the known capacities predict (10 % in a quick probe), some of its copies share a capacity `C = Σb/T`. These are the copies
//! without which the set is as fast as predicted. A capacity that is implied by a capacity of more copies is dropped. Capacities of one
//! kind that differ by at most 5 % are replaced by their median.
//!
//! **Example.** Two GPUs read host memory at 55 GB/s each. Two concurrent copies of 55 MB each should take 1.00 ms, but take 1.31 ms, which
//! is 31 % longer. They therefore share 110 MB / 1.31 ms = 84 GB/s. With a third GPU, 165 MB take 1.96 ms, so the three GPUs share 84 GB/s
//! too. This capacity implies the capacity of each pair.

use super::{Ends, median};
use crate::model::{FlowRate, MaxMin};
use crate::topology::{DeviceId, Resource, ResourceId};
use std::collections::{BTreeMap, BTreeSet};

/// Minimum number of measurements of a set of copies that are needed to derive a shared capacity from the set.
const LEAST_REPEATS: usize = 2;
/// Factor by which a host copy may exceed its isolated time, in a set with copies between GPUs, before the set counts as slowed down by a
/// shared resource. The factor is large because buffers of host memory differ in speed, and other programs use host memory.
const HOST_SLACK: f64 = 2.0;
/// Relative difference up to which capacities or rates count as equal and are merged. Links of the same type differ less than repeated
/// measurements do.
const ALIKE: f64 = 0.05;

/// Position of the sample from which a capacity is derived, among the samples of a set: 0 is the fastest and 1 the slowest. The value 0.5
/// selects the middle sample, or the lower of the two middle samples.
pub(super) const MEDIAN: f64 = 0.5;

/// Rates and shared capacities of a machine. Hops are identified by their index in the list of measured hops.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Capacities {
    /// Rate in bytes/s of an isolated copy on each hop (pair of source and destination device).
    pub rates: Vec<f64>,
    pub shared: Vec<Shared>,
}

/// Capacity that several hops (pairs of source and destination device) share.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Shared {
    /// List with one entry for each hop, which is true if the hop shares the capacity.
    pub members: Vec<bool>,
    /// Shared capacity in bytes/s.
    pub capacity: f64,
    /// Shared capacity in bytes/s for data that is staged in host memory; `None` if it equals `capacity`.
    pub staged: Option<f64>,
}

/// Measurement of copies that were started together, with the time in seconds that they took, without fixed costs.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    /// Copies of the measurement. Each entry holds the index of the copy's hop and the number of bytes.
    pub copies: Vec<(usize, f64)>,
    pub seconds: f64,
}

/// Samples (measured times of concurrent copies) of each set of hops. The hop indices of a set are sorted.
pub(super) type Samples = BTreeMap<Vec<usize>, Vec<Sample>>;

impl Sample {
    /// Returns the combined rate of all copies in bytes/s.
    pub fn rate(&self) -> f64 {
        self.copies.iter().map(|copy| copy.1).sum::<f64>() / self.seconds
    }
}

impl Shared {
    /// Creates a shared capacity of `capacity` bytes/s for the given hops. `all` is the number of all hops of the machine.
    pub fn of(hops: impl IntoIterator<Item = usize>, all: usize, capacity: f64) -> Shared {
        let mut members = vec![false; all];
        hops.into_iter().for_each(|hop| members[hop] = true);
        Shared { members, capacity, staged: None }
    }

    /// Returns the number of bytes that `copies` move on the hops that share the capacity.
    pub fn load(&self, copies: &[(usize, f64)]) -> f64 {
        copies.iter().filter(|copy| self.members[copy.0]).map(|copy| copy.1).sum()
    }

    pub fn hops(&self) -> impl Iterator<Item = usize> + '_ {
        self.members.iter().enumerate().filter(|(_, member)| **member).map(|(hop, _)| hop)
    }

    fn has_all_of(&self, other: &Shared) -> bool {
        other.hops().all(|hop| self.members[hop])
    }
}

impl Capacities {
    /// Returns the time in seconds that the slowest of these copies would take if the copies shared no capacity.
    pub fn alone(&self, copies: &[(usize, f64)]) -> f64 {
        copies.iter().map(|&(hop, bytes)| bytes / self.rates[hop]).fold(0.0, f64::max)
    }

    /// Returns the predicted time in seconds of copies that are started together: the time for which the busiest resource is in use. The
    /// planner predicts times by the same rule.
    pub fn seconds(&self, copies: &[(usize, f64)]) -> f64 {
        self.shared.iter().map(|shared| shared.load(copies) / shared.capacity).fold(self.alone(copies), f64::max)
    }

    /// Returns the predicted time in seconds of copies that are started together, if every copy is a hop of a pipeline through host memory.
    pub fn staged_seconds(&self, copies: &[(usize, f64)]) -> f64 {
        let of = |shared: &Shared| shared.load(copies) / shared.staged.unwrap_or(shared.capacity);
        self.shared.iter().map(of).fold(self.alone(copies), f64::max)
    }

    /// True if a set of copies takes longer than predicted, by more than a tolerance. `of_set` holds the samples of the set. The sample at
    /// one third of their order from fastest to slowest is compared, because disturbances only make measurements longer.
    pub fn is_late(&self, ends: &[Ends], of_set: &[Sample], tolerance: f64) -> bool {
        let sample = self.ranked(of_set, 1.0 / 3.0);
        let is_of_host = |hop: usize| ends[hop].0.is_host() || ends[hop].1.is_host();
        let (of_host, between): (Vec<_>, Vec<_>) = sample.copies.iter().partition(|copy| is_of_host(copy.0));
        let slack = if between.is_empty() { 0.0 } else { HOST_SLACK * self.alone(&of_host) };
        sample.seconds > self.seconds(&sample.copies).max(slack) * (1.0 + tolerance)
    }

    /// Returns the rate of each of these hops in bytes/s when all of them are used at the same time, shared max-min fairly.
    pub fn fair_rates(&self, hops: &[usize]) -> Vec<f64> {
        let resource = |capacity: f64| Resource { name: String::new(), capacity, staged: 1.0 };
        let resources: Vec<Resource> =
            self.rates.iter().copied().chain(self.shared.iter().map(|shared| shared.capacity)).map(resource).collect();
        let draws_on = |hop: usize| -> Vec<ResourceId> {
            let shared = (self.rates.len()..).zip(&self.shared).filter(|(_, shared)| shared.members[hop]).map(|(index, _)| index);
            std::iter::once(hop).chain(shared).map(|index| ResourceId(index as u32)).collect()
        };
        let resources_of: Vec<Vec<ResourceId>> = hops.iter().map(|hop| draws_on(*hop)).collect();
        let mut flows: Vec<FlowRate<'_>> = resources_of.iter().map(|of| FlowRate::new(of)).collect();
        MaxMin::new(&resources).share(&mut flows);
        flows.iter().map(|flow| flow.rate).collect()
    }

    /// Returns the shared capacities that explain the measured times of sets of copies, together with `rates`, the rates of isolated copies
    /// on each hop.
    pub fn fit(rates: Vec<f64>, ends: &[Ends], samples: &Samples, tolerance: f64) -> Capacities {
        let mut fit = Capacities { rates, shared: Vec::new() };
        let sets: Vec<(Sample, &[Sample])> = samples.values().map(|of_set| (fit.ranked(of_set, MEDIAN), &of_set[..])).collect();
        let founds = |set: &&(Sample, &[Sample])| set.1.len() >= LEAST_REPEATS && !mixes_directions(ends, &set.0);
        let mut by_size: Vec<&(Sample, &[Sample])> = sets.iter().filter(founds).collect();
        by_size.sort_by_key(|set| set.0.copies.len());
        for (sample, of_set) in by_size {
            if !fit.is_late(ends, of_set, tolerance) {
                continue;
            }
            let mut shared = Shared::of(sample.copies.iter().map(|copy| copy.0), ends.len(), sample.rate());
            // A capacity is at least the largest rate that any set reached. Host memory moves less in total if reads and writes are mixed
            // than if only reads or only writes are made.
            let drawn = sets.iter().map(|(sample, _)| shared.load(&sample.copies) / sample.seconds).fold(0.0, f64::max);
            shared.capacity = shared.capacity.max(drawn * (1.0 - tolerance));
            fit.shared.push(shared);
        }
        fit.drop_implied(tolerance);
        fit
    }

    /// Returns the sample at position `rank` (0 is the fastest, 1 the slowest) among the samples of a set. Samples are ordered by their
    /// time divided by the time of their isolated copies.
    pub fn ranked(&self, of_set: &[Sample], rank: f64) -> Sample {
        let slowdown = |sample: &Sample| sample.seconds / self.alone(&sample.copies);
        let mut sorted: Vec<&Sample> = of_set.iter().collect();
        sorted.sort_by(|a, b| slowdown(a).total_cmp(&slowdown(b)));
        sorted[((sorted.len() - 1) as f64 * rank) as usize].clone()
    }

    /// Removes each capacity that is implied by a capacity of more hops.
    pub fn drop_implied(&mut self, tolerance: f64) {
        let all = self.shared.clone();
        let is_implied = |shared: &Shared| {
            let implies =
                |of: &Shared| of.capacity <= shared.capacity * (1.0 + tolerance) && of.has_all_of(shared) && !shared.has_all_of(of);
            all.iter().any(implies)
        };
        self.shared.retain(|shared| !is_implied(shared));
    }

    /// Replaces capacities of one kind that differ only by noise by their median. If isolated copies on some hops of a capacity are as fast
    /// as the capacity, sets the capacity to the median of their rates. Then limits the rate of each hop to the capacities that the hop
    /// uses.
    pub fn level(&mut self, ends: &[Ends]) {
        // Kind of a capacity: the number of its hops between GPUs, into host memory, out of host memory, and between host memories.
        let kind = |shared: &Shared| {
            let count =
                |from: bool, to: bool| shared.hops().filter(|hop| (ends[*hop].0.is_host(), ends[*hop].1.is_host()) == (from, to)).count();
            [count(false, false), count(false, true), count(true, false), count(true, true)]
        };
        let mut kinds: BTreeMap<[usize; 4], Vec<usize>> = BTreeMap::new();
        self.shared.iter().enumerate().for_each(|(index, shared)| kinds.entry(kind(shared)).or_default().push(index));
        let mut capacities: Vec<f64> = self.shared.iter().map(|shared| shared.capacity).collect();
        kinds.values().for_each(|alike| level(&mut capacities, alike, ALIKE));
        for (shared, capacity) in self.shared.iter_mut().zip(capacities) {
            let mut as_fast: Vec<f64> = shared.hops().map(|hop| self.rates[hop]).filter(|rate| capacity < rate * (1.0 + ALIKE)).collect();
            shared.capacity = median(&mut as_fast).unwrap_or(capacity);
        }
        for shared in &self.shared {
            shared.hops().for_each(|hop| self.rates[hop] = self.rates[hop].min(shared.capacity));
        }
    }
}

/// True if the sample consists of reads and writes of one host memory by different GPUs. Host memory has a lower total bandwidth if reads
/// and writes are mixed, whichever GPUs make them. No link behaves in this way, so no capacity is derived from such a sample.
fn mixes_directions(ends: &[Ends], sample: &Sample) -> bool {
    let of = |hop: usize| match ends[hop] {
        (from, to) if from.is_host() && !to.is_host() => Some((from, to, true)),
        (from, to) if to.is_host() && !from.is_host() => Some((to, from, false)),
        _ => None,
    };
    let Some(copies) = sample.copies.iter().map(|copy| of(copy.0)).collect::<Option<Vec<_>>>() else { return false };
    let gpus = |reads: bool| copies.iter().filter(|copy| copy.2 == reads).map(|copy| copy.1).collect::<BTreeSet<DeviceId>>();
    let (readers, writers) = (gpus(true), gpus(false));
    copies.iter().all(|copy| copy.0 == copies[0].0) && !readers.is_empty() && !writers.is_empty() && readers != writers
}

/// Replaces the values in the largest cluster among `members` by their median, then treats the remaining values in the same way. A cluster
/// consists of the values within the relative distance `within` of one of them.
pub(super) fn level(values: &mut [f64], members: &[usize], within: f64) {
    let mut left = members.to_vec();
    while !left.is_empty() {
        // Find the largest cluster: the value with the most neighbours, and the indices of these neighbours. If several values have equally
        // many neighbours, use the first.
        let near =
            |middle: f64| left.iter().copied().filter(|index| (values[*index] / middle).ln().abs() <= within).collect::<Vec<usize>>();
        let around = left.iter().map(|index| near(values[*index])).rev().max_by_key(Vec::len).unwrap_or_default();
        let Some(middle) = median(&mut around.iter().map(|index| values[*index]).collect::<Vec<f64>>()) else { return };
        let alike: Vec<usize> = left.iter().copied().filter(|index| around.contains(index)).collect();
        alike.iter().for_each(|index| values[*index] = middle);
        left.retain(|index| !alike.contains(index));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(sets: &[(&[(usize, f64)], f64)]) -> Samples {
        let mut samples = Samples::new();
        for (copies, seconds) in sets {
            let sample = Sample { copies: copies.to_vec(), seconds: *seconds };
            samples.insert(copies.iter().map(|copy| copy.0).collect(), vec![sample; LEAST_REPEATS]);
        }
        samples
    }

    fn ends(count: u32) -> Vec<Ends> {
        (0..count).map(|gpu| (DeviceId::HOST, DeviceId::gpu(gpu))).collect()
    }

    fn found(fit: &Capacities) -> Vec<(Vec<usize>, f64)> {
        fit.shared.iter().map(|shared| (shared.hops().collect(), shared.capacity)).collect()
    }

    #[test]
    fn the_busiest_resource_sets_the_time() {
        let mut fit = Capacities { rates: vec![10.0, 10.0, 20.0], shared: Vec::new() };
        assert_eq!(fit.seconds(&[(0, 100.0), (2, 100.0)]), 10.0);
        fit.shared.push(Shared::of([0, 2], 3, 16.0));
        assert_eq!(fit.seconds(&[(0, 100.0), (2, 100.0)]), 12.5);
        assert_eq!(fit.seconds(&[(1, 100.0), (2, 100.0)]), 10.0);
        assert_eq!(fit.fair_rates(&[0, 2]), [8.0, 8.0]);
    }

    #[test]
    fn a_late_set_shares_its_bytes_over_its_time_and_implies_its_parts() {
        let a: &[(usize, f64)] = &[(0, 100.0), (1, 100.0)];
        let all: &[(usize, f64)] = &[(0, 100.0), (1, 100.0), (2, 100.0)];
        let free: &[(usize, f64)] = &[(0, 100.0), (3, 100.0)];
        let fit = |sets: &[(&[(usize, f64)], f64)]| found(&Capacities::fit(vec![10.0; 4], &ends(4), &samples(sets), 0.05));
        assert_eq!(fit(&[(a, 12.5), (free, 10.3)]), [(vec![0, 1], 16.0)]);
        assert_eq!(fit(&[(a, 12.5), (all, 18.75)]), [(vec![0, 1, 2], 16.0)]);
        // The memory slows down before it is saturated, so the fit finds two capacities.
        assert_eq!(fit(&[(a, 12.5), (all, 15.0)]), [(vec![0, 1], 16.0), (vec![0, 1, 2], 20.0)]);
        // A capacity is at least the rate that some set reached.
        let both: &[(usize, f64)] = &[(0, 100.0), (1, 100.0), (3, 10.0)];
        assert_eq!(fit(&[(a, 10.0), (both, 21.0)]), [(vec![0, 1, 3], 19.0)]);
    }

    #[test]
    fn a_slow_copy_of_host_memory_does_not_pass_for_contention_of_copies_between_gpus() {
        let ends = [(DeviceId::gpu(0), DeviceId::gpu(1)), (DeviceId::HOST, DeviceId::gpu(1))];
        let fit = |seconds| found(&Capacities::fit(vec![390.0, 55.0], &ends, &samples(&[(&[(0, 390.0), (1, 27.5)], seconds)]), 0.05));
        assert_eq!(fit(1.04), []);
        assert_eq!(fit(1.07), [(vec![0, 1], 417.5 / 1.07)]);
    }

    #[test]
    fn values_that_noise_tells_apart_become_one_and_others_stay() {
        let mut values = [100.0, 50.0, 102.0, 51.0, 101.0, 7.0];
        level(&mut values, &[0, 1, 2, 3, 4], 0.03);
        assert_eq!(values, [101.0, 50.5, 101.0, 50.5, 101.0, 7.0]);
        level(&mut values, &[], 0.03);
        level(&mut values, &[5], 0.0);
        assert_eq!(values[5], 7.0);
    }
}
