//! Expected times of variants, from measured times and predictions.

use super::chooser::{Chooser, EXPECTED_GAIN};

/// Factor by which the model is assumed to overestimate the time of the plain copies if the active variant is faster than predicted by more
/// than a fifth.
const MISTAKE: f64 = 3.0;

impl Chooser {
    /// Returns the variant with the shortest expected time. The expected time of a variant without a measured time is its prediction, plus
    /// a fifth unless it is the variant of plain copies (one direct copy for each transfer). Without predictions, returns the plain copies
    /// until they are measured, and then the fastest of the measured variants.
    pub(super) fn seems_fastest(&self) -> usize {
        let plain = self.variants - 1;
        let is_open = |&v: &usize| v == plain || self.times[v].count() > 0 || self.predicted[v] > 0;
        let time = |v: usize| match self.times[v].count() {
            0 if v == plain => self.prediction(v),
            0 => (self.prediction(v) as f64 * (1.0 + EXPECTED_GAIN)) as u64,
            _ => self.times[v].expected(),
        };
        (0..self.variants).filter(is_open).min_by_key(|&v| time(v)).unwrap_or(self.in_force)
    }

    /// Returns the expected time in nanoseconds of a variant without a measured time, or 0 if there is no prediction. Measured times of
    /// other variants correct the prediction during the first executions:
    ///
    /// - If a measured variant that stages fewer bytes took longer than predicted, the prediction is multiplied by the ratio of
    ///   that variant's measured and predicted times.
    /// - If the active variant is faster than predicted by more than a fifth, the prediction of the plain copies is divided by [`MISTAKE`].
    pub(super) fn prediction(&self, variant: usize) -> u64 {
        let plain = self.variants - 1;
        let error = |v: usize| {
            let is_known = self.times[v].count() > 0 && self.predicted[v] > 0 && self.tick <= self.free;
            is_known.then(|| self.times[v].expected() as f64 / self.predicted[v] as f64)
        };
        let factor = match variant == plain {
            true if error(self.in_force).is_some_and(|error| error < 1.0 - EXPECTED_GAIN) => 1.0 / MISTAKE,
            true => 1.0,
            false => (variant + 1..plain).filter_map(error).fold(1.0, f64::max),
        };
        (self.predicted[variant] as f64 * factor) as u64
    }

    /// Returns the median time of an execution of the active variant in nanoseconds, or its predicted time if no time is known.
    pub(super) fn unit(&self) -> f64 {
        let times = &self.times[self.in_force];
        if times.count() > 0 { times.median() as f64 } else { self.predicted[self.in_force] as f64 }
    }

    /// Returns the number of nanoseconds by which an execution that takes `ns` nanoseconds is slower than one of the active variant.
    pub(super) fn cost_of(&self, ns: u64) -> f64 {
        let times = &self.times[self.in_force];
        let own = if times.count() > 0 { times.expected() } else { self.predicted[self.in_force] };
        ns.saturating_sub(own) as f64
    }
}
