//! Measurements of one probe: how many bytes, how often, what is subtracted, and what has been seen so far.

use super::sharing::{Sample, Sharing};
use super::{Hop, Pair, ProbeOptions, Progress, Reading, Residuals, Rig, Timing, Work, median, order};
use crate::topology::DeviceId;

/// Copies are multiples of this, so that engines see page-aligned pieces.
const GRAIN: f64 = 4096.0;
/// A copy whose time is all start.
pub(super) const TINY: u64 = 4096;
/// What a set of unequal copies counts in a fit, against one of equal ones.
const UNEQUAL: f64 = 0.1;
/// Enough for a first idea of a rate.
const SMALL: u64 = 1 << 20;

/// What one probe knows so far.
pub(super) struct Session<'a, R: Rig> {
    pub rig: &'a mut R,
    pub options: &'a ProbeOptions,
    progress: &'a mut dyn FnMut(Progress),
    stage: (&'static str, u32, u32),
    /// From and to; everything else speaks of hops by their index here.
    pub hops: Vec<(DeviceId, DeviceId)>,
    /// Seconds of a few bytes on each hop.
    pub starts: Vec<f64>,
    /// Seconds that each further copy of a set adds to its issue.
    step: f64,
    pub sharing: Sharing,
    pub samples: Vec<Sample>,
    /// Sets of hops that a piece of hardware would serve.
    pub families: Vec<Vec<usize>>,
    pub pairs: Vec<Pair>,
    /// Measurements so far.
    pub readings: Vec<Reading>,
    pub unexplained: u32,
}

impl<'a, R: Rig> Session<'a, R> {
    pub fn new(
        rig: &'a mut R,
        hops: Vec<(DeviceId, DeviceId)>,
        options: &'a ProbeOptions,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Session<'a, R> {
        Session {
            rig,
            options,
            progress,
            stage: ("", 0, 0),
            starts: vec![0.0; hops.len()],
            step: 0.0,
            sharing: Sharing { rates: vec![0.0; hops.len()], resources: Vec::new() },
            hops,
            samples: Vec::new(),
            families: Vec::new(),
            pairs: Vec::new(),
            readings: Vec::new(),
            unexplained: 0,
        }
    }

    /// Tells the caller that `done` of `of` parts of a stage are done.
    pub fn at(&mut self, stage: &'static str, done: usize, of: usize) {
        self.stage = (stage, done as u32, of as u32);
        self.tell();
    }

    fn tell(&mut self) {
        let (stage, done, of) = self.stage;
        let measurements = self.count();
        (self.progress)(Progress { stage, done, of, measurements });
    }

    pub fn measure(&mut self, work: &Work<'_>) -> Result<Timing, R::Error> {
        if (self.readings.len() + 1).is_multiple_of(32) {
            self.tell();
        }
        let reading = Reading::new(work, self.rig.measure(work, self.options.repetitions)?);
        let timing = reading.timing();
        self.readings.push(reading);
        Ok(timing)
    }

    fn count(&self) -> u32 {
        self.readings.len() as u32
    }

    /// Whether there is budget for more.
    pub fn may_measure(&self) -> bool {
        self.count() < self.options.measurements
    }

    /// Every hop by itself: time of a few bytes, and bytes/s from the slope between two sizes, which leaves the start out.
    pub fn measure_alone(&mut self) -> Result<(), R::Error> {
        let room = self.rig.room();
        for index in 0..self.hops.len() {
            self.at("single copies", index, self.hops.len());
            let (from, to) = self.hops[index];
            let start = self.once(&[Hop { from, to, bytes: TINY }])?;
            let small = SMALL.min(room / 4).max(TINY * 4);
            let first = self.once(&[Hop { from, to, bytes: small }])?;
            let mut rate = small as f64 / (first - start).max(0.1 * first).max(1e-9);
            // Of a short copy the start is most: the second guess is made from a long one.
            for _ in 0..2 {
                let bytes = grained(rate * self.options.copy_seconds).clamp(2 * small, room.max(2 * small));
                let seconds = self.once(&[Hop { from, to, bytes }])?;
                let slope = (bytes - small) as f64 / (seconds - first).max(0.1 * seconds).max(1e-9);
                let settled = (slope / rate - 1.0).abs() < 0.3;
                rate = slope;
                if settled {
                    break;
                }
            }
            self.starts[index] = start;
            self.sharing.rates[index] = rate.clamp(1e6, 1e14);
        }
        // Links of one make differ by less than measurements do.
        let class = |&(from, to): &(DeviceId, DeviceId)| (from.is_host(), to.is_host());
        for class_of in [(false, false), (true, false), (false, true), (true, true)] {
            let members: Vec<usize> = (0..self.hops.len()).filter(|hop| class(&self.hops[*hop]) == class_of).collect();
            level(&mut self.sharing.rates, &members, 0.05);
            level(&mut self.starts, &members, 0.1);
        }
        let most = self.hops.len().min(16);
        if most > 1 {
            let together: Vec<Hop> = self.hops[..most].iter().map(|&(from, to)| Hop { from, to, bytes: TINY }).collect();
            let seconds = self.once(&together)?;
            let slowest = self.starts[..most].iter().copied().fold(0.0, f64::max);
            self.step = ((seconds - slowest) / (most - 1) as f64).max(0.0);
        }
        Ok(())
    }

    /// Seconds of these copies together, as they are.
    pub fn once(&mut self, hops: &[Hop]) -> Result<f64, R::Error> {
        Ok(self.measure(&Work::Together(hops))?.total)
    }

    /// Measures copies together that would take so many units of time each alone. Bytes are scaled so that all are predicted to be
    /// done after a good while; the scale comes back with the sample.
    pub fn together(&mut self, parts: &[(usize, f64)]) -> Result<(Sample, f64), R::Error> {
        debug_assert!(order::is_free(&self.hops, &parts.iter().map(|part| part.0).collect::<Vec<usize>>()));
        let wanted: Vec<(usize, f64)> = parts.iter().map(|&(hop, units)| (hop, units * self.sharing.rates[hop])).collect();
        // Issuing takes a while too: longer sets are made of longer copies, so that it stays below a few per cent.
        let target = self.options.copy_seconds.max(20.0 * self.step * parts.len() as f64);
        let mut scale = target / self.sharing.seconds(&wanted).max(f64::MIN_POSITIVE);
        for device in self.hops.iter().map(|hop| hop.1) {
            let arriving: f64 = wanted.iter().filter(|copy| self.hops[copy.0].1 == device).map(|copy| copy.1).sum();
            // One grain for each copy may come on top by rounding.
            let room = self.rig.room() as f64 - GRAIN * parts.len() as f64;
            if arriving * scale > room {
                scale = room / arriving;
            }
        }
        let copies: Vec<Hop> = wanted
            .iter()
            .map(|&(hop, bytes)| Hop { from: self.hops[hop].0, to: self.hops[hop].1, bytes: grained(bytes * scale) })
            .collect();
        let total = self.once(&copies)?;
        // Copies start one by one: on average they start half of the issue late.
        let start = parts.iter().map(|part| self.starts[part.0]).fold(0.0, f64::max);
        let fixed = start + self.step * (parts.len() - 1) as f64 / 2.0;
        let copies = wanted.iter().zip(&copies).map(|(&(hop, _), copy)| (hop, copy.bytes as f64)).collect();
        // Where copies end at different times the last ones may leave a capacity idle that they shared with the others: such a set takes
        // longer than its busiest resource. Plans let all paths end together, as sets of equal times do.
        let equal = parts.iter().all(|part| part.1 == parts[0].1);
        let sample = Sample { copies, seconds: (total - fixed).max(total / 2.0), weight: if equal { 1.0 } else { UNEQUAL } };
        self.samples.push(sample.clone());
        Ok((sample, scale))
    }

    /// The same with equal times alone.
    pub fn equal(&mut self, hops: &[usize]) -> Result<Sample, R::Error> {
        let parts: Vec<(usize, f64)> = hops.iter().map(|&hop| (hop, 1.0)).collect();
        Ok(self.together(&parts)?.0)
    }

    /// By which part a sample is slower than predicted.
    pub fn excess(&self, sample: &Sample) -> f64 {
        sample.seconds / self.sharing.seconds(&sample.copies) - 1.0
    }

    /// Random sets of copies, and how far predictions are off. Nothing is fitted to them.
    pub fn validate(&mut self) -> Result<Residuals, R::Error> {
        const SETS: usize = 24;
        let mut random = super::suspects::Random(0x6d70_6770_7500_0002);
        let mut errors = Vec::new();
        let kept = self.samples.len();
        for index in 0..if self.hops.len() > 1 { SETS } else { 0 } {
            self.at("check", index, SETS);
            let hops = order::first_of_each(&self.hops, &random.some(self.hops.len(), self.hops.len().min(12)));
            let sample = self.equal(&hops)?;
            errors.push((self.sharing.seconds(&sample.copies) / sample.seconds - 1.0).abs());
        }
        self.samples.truncate(kept);
        let worst = errors.iter().copied().fold(0.0, f64::max);
        Ok(Residuals { count: errors.len() as u32, median: median(&mut errors).unwrap_or(0.0), worst })
    }

    /// What stayed open.
    pub fn notes(&self, notes: &mut Vec<String>) {
        if !self.may_measure() {
            notes.push(format!("stopped looking for shared capacities after {} measurements", self.count()));
        }
        if self.unexplained > 0 {
            notes.push(format!("{} sets of copies were slower than any shared capacity explains", self.unexplained));
        }
    }
}

/// Gives values of `members` that noise alone tells apart their median: where most lie within such a part of each other, all that are as near
/// to the median of those.
pub(super) fn level(values: &mut [f64], members: &[usize], within: f64) {
    let mut sorted = members.to_vec();
    sorted.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    while !sorted.is_empty() {
        let of = |index: usize| values[sorted[index]];
        let near = |first: usize| (first..sorted.len()).take_while(|index| of(*index) <= of(first) * (1.0 + within)).count();
        // The first of several that have as many.
        let first = (0..sorted.len()).rev().max_by_key(|first| near(*first)).unwrap_or(0);
        let mut most: Vec<f64> = (first..first + near(first).max(1)).map(of).collect();
        let Some(middle) = median(&mut most) else { return };
        let is_near = |index: &usize| (values[*index] / middle).ln().abs() <= within.ln_1p();
        let (alike, others): (Vec<usize>, Vec<usize>) = sorted.iter().partition(|index| is_near(index) || most.contains(&values[**index]));
        alike.iter().for_each(|index| values[*index] = middle);
        sorted = others;
    }
}

pub(super) fn grained(bytes: f64) -> u64 {
    ((bytes / GRAIN).round().max(1.0) * GRAIN) as u64
}

#[cfg(test)]
mod tests {
    use super::level;

    #[test]
    fn values_that_noise_tells_apart_become_one_and_others_stay() {
        let mut values = [100.0, 50.0, 102.0, 51.0, 101.0, 7.0];
        level(&mut values, &[0, 1, 2, 3, 4], 0.03);
        assert_eq!(values, [101.0, 50.5, 101.0, 50.5, 101.0, 7.0]);
        // Three of seven lie as far below the most as others above.
        let mut noisy = [98.0, 99.0, 100.0, 100.5, 101.0, 101.5, 102.5];
        level(&mut noisy, &[0, 1, 2, 3, 4, 5, 6], 0.03);
        assert!(noisy.iter().all(|value| *value == noisy[0]), "{noisy:?}");
        level(&mut values, &[], 0.03);
        level(&mut values, &[5], 0.0);
        assert_eq!(values[5], 7.0);
    }
}
