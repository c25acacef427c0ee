//! Makes the measurements of one probe of a machine. Chooses the sizes of the copies, and decides which measurements are repeated.
//!
//! There is one rule for repetition. A result that matches the prediction is measured once. A set that takes longer than predicted (a late
//! set) is measured three times, and the median is used. A hop (pair of devices) that is slower or faster than the other hops of its kind
//! is measured three times too.

use super::fit::{Capacities, MEDIAN, Sample, Samples, level};
use super::{Ends, Harness, Hop, Pair, ProbeOptions, Progress, Reading, Residuals, Timing, Work, median, sets};
use crate::topology::DeviceId;
use std::collections::BTreeMap;

/// Granularity in bytes to which the sizes of copies are rounded, so that copies start and end at page boundaries.
const GRAIN: f64 = 4096.0;
/// Size in bytes of a copy whose time consists only of startup time.
pub(super) const TINY: u64 = 4096;
/// Size in bytes of the copy from which the first estimate of a hop's rate is made.
const SMALL: u64 = 1 << 20;
/// Number of measurements of a set of copies that takes longer than predicted.
const REPEATS: usize = 3;
/// Number of times that each host copy is measured during a probe (measurement of a machine). Host copies are measured repeatedly because
/// the speed of host memory changes within seconds.
const VISITS: usize = 4;
/// Fraction of the time of a set after which its host copies should end, if the set also contains copies between GPUs. It is below 1, so
/// that slow host memory is not mistaken for contention.
const HOST_PART: f64 = 0.5;

/// State of one probe (measurement of a machine).
pub(super) struct Session<'a, H: Harness> {
    pub harness: &'a mut H,
    pub options: &'a ProbeOptions,
    progress: &'a mut dyn FnMut(Progress),
    stage: (&'static str, u32, u32),
    /// All hops (pairs of source and destination device) that the probe measures. Other fields and functions identify a hop by its index in
    /// this list.
    pub hops: Vec<Ends>,
    /// Startup time of each hop in seconds: the time of a copy of a few bytes.
    pub starts: Vec<f64>,
    /// Time in seconds by which each further copy of a set prolongs the submission.
    step: f64,
    pub fit: Capacities,
    samples: Samples,
    pub pairs: Vec<Pair>,
    /// Measurements that were made so far.
    pub readings: Vec<Reading>,
}

impl<'a, H: Harness> Session<'a, H> {
    pub fn new(harness: &'a mut H, hops: Vec<Ends>, options: &'a ProbeOptions, progress: &'a mut dyn FnMut(Progress)) -> Self {
        Session {
            harness,
            options,
            progress,
            stage: ("", 0, 0),
            starts: vec![0.0; hops.len()],
            step: 0.0,
            fit: Capacities { rates: vec![0.0; hops.len()], shared: Vec::new() },
            hops,
            samples: Samples::new(),
            pairs: Vec::new(),
            readings: Vec::new(),
        }
    }

    /// Reports to the caller that `done` of `of` parts of a stage have been completed.
    pub fn at(&mut self, stage: &'static str, done: usize, of: usize) {
        self.stage = (stage, done as u32, of as u32);
        self.tell();
    }

    fn tell(&mut self) {
        let (stage, done, of) = self.stage;
        (self.progress)(Progress { stage, done, of, measurements: self.readings.len() as u32 });
    }

    pub fn measure(&mut self, work: &Work<'_>) -> Result<Timing, H::Error> {
        if (self.readings.len() + 1).is_multiple_of(32) {
            self.tell();
        }
        let reading = Reading::new(work, self.harness.measure(work, self.options.repetitions)?);
        let timing = reading.timing();
        self.readings.push(reading);
        Ok(timing)
    }

    /// True if the maximum number of measurements has not been reached yet.
    pub fn may_measure(&self) -> bool {
        (self.readings.len() as u32) < self.options.measurements
    }

    fn is_between_gpus(&self, hop: usize) -> bool {
        !self.hops[hop].0.is_host() && !self.hops[hop].1.is_host()
    }

    /// Measures every hop separately: a few bytes, 1 MiB, and a size that takes about [`ProbeOptions::copy_seconds`]. Then measures a few
    /// bytes on many hops concurrently.
    pub fn measure_alone(&mut self) -> Result<(), H::Error> {
        let (room, seconds) = (self.harness.room(), self.options.copy_seconds);
        let small = SMALL.min(room / 4).max(TINY * 4);
        for index in 0..self.hops.len() {
            self.at("single copies", index, self.hops.len());
            let (from, to) = self.hops[index];
            let mut total = |bytes| -> Result<f64, H::Error> { Ok(self.measure(&Work::Together(&[Hop { from, to, bytes }]))?.total) };
            let start = total(TINY)?;
            let first = total(small)?;
            let mut rate = slope(TINY, start, small, first);
            // A short copy takes mostly startup time, so the second estimate is made from a long copy.
            for _ in 0..2 {
                let bytes = grained(rate * seconds).clamp(2 * small, room.max(2 * small));
                let found = slope(small, first, bytes, total(bytes)?);
                let settled = (found / rate - 1.0).abs() < 0.3;
                rate = found;
                if settled {
                    break;
                }
            }
        }
        self.take_singles();
        // If a hop differs from other hops of the same kind, it is measured again. Its rate is still computed from its own measurements.
        // Repeated measurements use at most half of the budget.
        for index in 0..self.hops.len() {
            let kind = |hop: usize| [self.hops[hop].0.is_host(), self.hops[hop].1.is_host()];
            let mut alike: Vec<f64> = (0..self.hops.len()).filter(|hop| kind(*hop) == kind(index)).map(|hop| self.fit.rates[hop]).collect();
            if median(&mut alike).is_none_or(|middle| (self.fit.rates[index] / middle - 1.0).abs() <= self.options.tolerance)
                || self.readings.len() as u32 > self.options.measurements / 2
            {
                continue;
            }
            let (from, to) = self.hops[index];
            let of_hop = self
                .readings
                .iter()
                .filter(|reading| reading.direct.len() == 1 && (reading.direct[0].from, reading.direct[0].to) == (from, to));
            let longest = of_hop.map(|reading| reading.direct[0].bytes).max().unwrap_or(small);
            for bytes in [small, longest].repeat(REPEATS - 1) {
                self.measure(&Work::Together(&[Hop { from, to, bytes }]))?;
            }
        }
        let most = self.hops.len().min(16);
        if most > 1 {
            let together: Vec<Hop> = self.hops[..most].iter().map(|&(from, to)| Hop { from, to, bytes: TINY }).collect();
            self.measure(&Work::Together(&together))?;
        }
        self.take_singles();
        Ok(())
    }

    /// Computes the rate and the startup time of each hop and the issue time per copy from the measurements. A rate is computed from the
    /// differences in size and time between the second shortest and the longest copy, so that it excludes the startup time.
    fn take_singles(&mut self) {
        for index in 0..self.hops.len() {
            let mut of_hop: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
            for reading in self.readings.iter().filter(|reading| reading.is_plain() && reading.direct.len() == 1) {
                let hop = reading.direct[0];
                if (hop.from, hop.to) == self.hops[index] {
                    of_hop.entry(hop.bytes).or_default().push(reading.timing().total);
                }
            }
            let sizes: Vec<(u64, f64)> = of_hop.iter_mut().filter_map(|(bytes, totals)| Some((*bytes, median(totals)?))).collect();
            if let [(_, start), (small, first), .., (large, last)] = sizes[..] {
                self.starts[index] = start;
                self.fit.rates[index] = slope(small, first, large, last);
            }
        }
        // Startup times and rates of hops of one kind are levelled, because links of the same type differ less than repeated measurements
        // do.
        let class = |&(from, to): &Ends| (from.is_host(), to.is_host());
        for class_of in [(false, false), (true, false), (false, true), (true, true)] {
            let members: Vec<usize> = (0..self.hops.len()).filter(|hop| class(&self.hops[*hop]) == class_of).collect();
            level(&mut self.fit.rates, &members, 0.05);
            level(&mut self.starts, &members, 0.1);
        }
        let of_many = self.readings.iter().filter(|reading| reading.is_plain() && reading.direct.len() > 1);
        if let Some(many) = of_many.clone().find(|reading| reading.direct.iter().all(|hop| hop.bytes <= TINY)) {
            let slowest = many.direct.iter().filter_map(|hop| self.number(hop)).map(|hop| self.starts[hop]).fold(0.0, f64::max);
            self.step = ((many.timing().total - slowest) / (many.direct.len() - 1) as f64).max(0.0);
        }
    }

    fn number(&self, hop: &Hop) -> Option<usize> {
        self.hops.iter().position(|ends| *ends == (hop.from, hop.to))
    }

    /// Adds earlier measurements to the session, and fits capacities to them.
    pub fn take(&mut self, readings: &[Reading]) {
        self.readings = readings.to_vec();
        self.take_singles();
        for reading in readings.iter().filter(|reading| reading.is_plain()) {
            self.take_set(reading);
        }
        // Shorter copies were made to measure costs, so they are ignored here.
        let (fit, least) = (&self.fit, 0.25 * self.options.copy_seconds);
        self.samples.values_mut().for_each(|of_set| of_set.retain(|sample| fit.alone(&sample.copies) > least));
        self.samples.retain(|_, of_set| !of_set.is_empty());
        self.refit(&[]);
    }

    /// Adds a measurement to the samples if it consists of several long copies that started together.
    fn take_set(&mut self, reading: &Reading) {
        let copies: Option<Vec<(usize, f64)>> = reading.direct.iter().map(|hop| Some((self.number(hop)?, hop.bytes as f64))).collect();
        let Some(mut copies) = copies.filter(|copies| copies.len() > 1 && reading.direct.iter().any(|hop| hop.bytes > TINY)) else {
            return;
        };
        copies.sort_by_key(|copy| copy.0);
        // Copies are started one after the other, so on average they start late by half of the issue time.
        let start = copies.iter().map(|copy| self.starts[copy.0]).fold(0.0, f64::max);
        let total = reading.timing().total;
        let seconds = (total - start - self.step * (copies.len() - 1) as f64 / 2.0).max(total / 2.0);
        let set = copies.iter().map(|copy| copy.0).collect();
        self.samples.entry(set).or_default().push(Sample { copies, seconds });
    }

    /// Measures the copies of a set of hops that are started together. The sizes are chosen such that all copies should end at the same
    /// time. If they did not, the last copies would leave a shared capacity partly idle.
    fn together(&mut self, set: &[usize]) -> Result<(), H::Error> {
        let mixed = set.iter().any(|hop| self.is_between_gpus(*hop));
        let part = |hop: usize| if mixed && !self.is_between_gpus(hop) { HOST_PART } else { 1.0 };
        let wanted: Vec<(usize, f64)> = set.iter().zip(self.fit.fair_rates(set)).map(|(&hop, rate)| (hop, rate * part(hop))).collect();
        // Submission also takes time. Larger sets use longer copies, so that submission takes at most a few per cent of the time.
        let target = self.options.copy_seconds.max(20.0 * self.step * set.len() as f64);
        let mut scale = target / self.fit.seconds(&wanted).max(f64::MIN_POSITIVE);
        for device in self.hops.iter().map(|hop| hop.1) {
            let arriving: f64 = wanted.iter().filter(|copy| self.hops[copy.0].1 == device).map(|copy| copy.1).sum();
            // Rounding may add up to [`GRAIN`] bytes to each copy.
            let room = self.harness.room() as f64 - GRAIN * set.len() as f64;
            scale = if arriving * scale > room { room / arriving } else { scale };
        }
        let hop = |&(hop, bytes): &(usize, f64)| Hop { from: self.hops[hop].0, to: self.hops[hop].1, bytes: grained(bytes * scale) };
        let copies: Vec<Hop> = wanted.iter().map(hop).collect();
        self.measure(&Work::Together(&copies))?;
        let reading = self.readings[self.readings.len() - 1].clone();
        self.take_set(&reading);
        Ok(())
    }

    fn sample(&self, set: &[usize]) -> Option<Sample> {
        self.samples.get(set).map(|of_set| self.fit.ranked(of_set, MEDIAN))
    }

    /// True if a set of hops takes longer than predicted. Makes the measurements that the rule in the module's description requires.
    /// Returns false if the maximum number of measurements has been reached.
    fn is_late(&mut self, set: &[usize]) -> Result<bool, H::Error> {
        let mut set = set.to_vec();
        set.sort_unstable();
        for repeats in [1, REPEATS] {
            while self.samples.get(&set).map_or(0, Vec::len) < repeats {
                if !self.may_measure() {
                    return Ok(false);
                }
                self.together(&set)?;
            }
            if !self.samples.get(&set).is_some_and(|of_set| self.fit.is_late(&self.hops, of_set, self.options.tolerance)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Fits the shared capacities again, without the measurements of exactly this set of hops.
    fn refit(&mut self, without: &[usize]) {
        let left_out = self.samples.remove_entry(without);
        self.fit = Capacities::fit(std::mem::take(&mut self.fit.rates), &self.hops, &self.samples, self.options.tolerance);
        self.samples.extend(left_out);
    }

    /// Measures copies that run at the same time: on pairs of hops, on larger sets in which all pairs of hops slow each other down, on sets
    /// of hops that probably share hardware, and on random sets.
    pub fn explore(&mut self, devices: &[DeviceId]) -> Result<(), H::Error> {
        let pairs = sets::pairs(&self.hops);
        let mut late = Vec::new();
        for (index, pair) in pairs.iter().enumerate() {
            self.at("pairs", index, pairs.len());
            let is_late = self.is_late(pair)?;
            let Some(sample) = self.sample(pair) else { break };
            // No shared capacity is known yet, so the slowdown is relative to the isolated time of the slower copy.
            let slowdown = sample.seconds / self.fit.seconds(&sample.copies);
            self.pairs.push(Pair { first: self.hops[pair[0]], second: self.hops[pair[1]], slowdown });
            if is_late {
                late.push((slowdown, *pair));
            }
        }
        for clique in cliques(late) {
            self.is_late(&clique)?;
        }
        self.refit(&[]);
        let mut sets = sets::families(&self.hops, devices);
        sets.extend(sets::crossings_of_domains(&self.hops, &self.fit.rates, devices));
        sets.sort_by_key(Vec::len);
        let mut random = sets::Random(0x6d70_6770_7500_0001);
        if self.hops.len() > 2 {
            sets.extend((0..24).map(|round| random.set(&self.hops, self.hops.len().min(if round % 2 == 0 { 6 } else { 24 }))));
        }
        let of_host = sets::of_host(&self.hops);
        for (index, set) in sets.iter().enumerate() {
            self.at("sets", index, sets.len());
            self.explain(set)?;
            if index * (VISITS - 1) / sets.len() < (index + 1) * (VISITS - 1) / sets.len() {
                for set in of_host.iter().filter(|set| set.len() > 2) {
                    if self.may_measure() {
                        self.together(set)?;
                    }
                }
            }
        }
        self.refit(&[]);
        Ok(())
    }

    /// Measures a set of hops together. If the set is late (takes longer than predicted), searches for its smallest late subset and for
    /// other hops that share the same resource. Ends when the capacities of smaller sets explain the measured time, or when no progress is
    /// made.
    fn explain(&mut self, set: &[usize]) -> Result<(), H::Error> {
        const ROUNDS: usize = 4;
        if set.len() < 2 || !self.is_late(set)? {
            return Ok(());
        }
        let mut set = set.to_vec();
        set.sort_unstable();
        for _ in 0..ROUNDS {
            self.refit(&set);
            if !self.is_late(&set)? {
                break;
            }
            let core = self.narrow(&set)?;
            if core.len() == set.len() {
                break;
            }
            let rate = |set: &[usize]| self.sample(set).map_or(0.0, |sample| sample.rate());
            if (rate(&set) / rate(&core) - 1.0).abs() < self.options.tolerance {
                // All hops of the set share the resource, so nothing remains to be searched.
                break;
            }
            self.refit(&set);
            let mut members = core.clone();
            for &hop in set.iter().filter(|hop| !core.contains(hop)) {
                let beside: Vec<usize> = core.iter().copied().chain([hop]).collect();
                if sets::is_free_of_order(&self.hops, &beside) && self.is_late(&beside)? {
                    members.push(hop);
                }
            }
            if members.len() > core.len() + 1 {
                self.is_late(&members)?;
            }
        }
        self.refit(&[]);
        Ok(())
    }

    /// Returns the smallest subset of these hops that takes longer than predicted, sorted. The search first leaves out halves of the set,
    /// then quarters, down to single hops (delta debugging: Zeller and Hildebrandt 2002).
    fn narrow(&mut self, set: &[usize]) -> Result<Vec<usize>, H::Error> {
        let mut core = set.to_vec();
        let mut piece = core.len().div_ceil(2);
        loop {
            let mut at = 0;
            while at < core.len() && core.len() > 2 {
                let end = (at + piece).min(core.len());
                let rest: Vec<usize> = core[..at].iter().chain(&core[end..]).copied().collect();
                if rest.len() >= 2 && self.is_late(&rest)? {
                    core = rest;
                } else {
                    at = end;
                }
            }
            if piece == 1 {
                return Ok(core);
            }
            piece = piece.div_ceil(2);
        }
    }

    /// Measures random sets of copies that take equally long when isolated, and returns the errors of the predictions. Nothing is fitted to
    /// these sets.
    pub fn validate(&mut self) -> Result<Residuals, H::Error> {
        const SETS: usize = 24;
        let mut random = sets::Random(0x6d70_6770_7500_0002);
        let mut errors = Vec::new();
        let kept = std::mem::take(&mut self.samples);
        for index in 0..if self.hops.len() > 1 { SETS } else { 0 } {
            self.at("check", index, SETS);
            let mut set = random.set(&self.hops, self.hops.len().min(12));
            set.sort_unstable();
            self.together(&set)?;
            let sample = self.sample(&set);
            errors.extend(sample.map(|sample| (self.fit.seconds(&sample.copies) / sample.seconds - 1.0).abs()));
        }
        self.samples = kept;
        let worst = errors.iter().copied().fold(0.0, f64::max);
        Ok(Residuals { count: errors.len() as u32, median: median(&mut errors).unwrap_or(0.0), worst })
    }

    /// Adds a note to `notes` if the maximum number of measurements was reached, because some slowdowns may then remain unexplained.
    pub fn notes(&self, notes: &mut Vec<String>) {
        if !self.may_measure() {
            notes.push(format!("stopped looking for shared capacities after {} measurements", self.readings.len()));
        }
    }
}

/// Returns sets of three or more hops in which all pairs of hops slow each other down. The slowdown of each pair is at least half of the
/// slowdown of the slowest pair in its set. `late` holds the pairs that slow each other down, each with its slowdown.
fn cliques(mut late: Vec<(f64, [usize; 2])>) -> Vec<Vec<usize>> {
    late.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut cliques: Vec<Vec<usize>> = Vec::new();
    for (slowdown, pair) in &late {
        if cliques.iter().any(|clique| pair.iter().all(|hop| clique.contains(hop))) {
            continue;
        }
        let least = 1.0 + (slowdown - 1.0) / 2.0;
        let shares = |a: usize, b: usize| late.iter().any(|(by, two)| *by >= least && two.contains(&a) && two.contains(&b));
        let mut clique = pair.to_vec();
        for hop in late.iter().flat_map(|(_, two)| *two) {
            if !clique.contains(&hop) && clique.iter().all(|member| shares(*member, hop)) {
                clique.push(hop);
            }
        }
        cliques.push(clique);
    }
    cliques.retain(|clique| clique.len() > 2);
    cliques
}

/// Returns the rate of a hop in bytes/s from sizes and times of two copies.
fn slope(few: u64, first: f64, many: u64, last: f64) -> f64 {
    (many.saturating_sub(few) as f64 / (last - first).max(0.1 * last).max(1e-9)).clamp(1e6, 1e14)
}

pub(super) fn grained(bytes: f64) -> u64 {
    ((bytes / GRAIN).round().max(1.0) * GRAIN) as u64
}
