//! Recent measured times of one variant: their median, their noise, and detection of changes.

/// Number of measured times that are kept for each variant. The standard error of the median of 15 times is about a third of the noise.
const KEPT: usize = 15;

/// Minimum relative difference from the median at which a time is outside of the noise.
const LEAST_BAND: f64 = 0.04;

/// Half width of the noise band around the median, in mean absolute deviations. Five of them correspond to four standard deviations of a
/// normal distribution.
const BAND: f64 = 5.0;

/// Initial and minimum noise. Noise is the mean absolute deviation of times, relative to their median.
const NOISE: (f64, f64) = (0.015, 0.003);

/// Classification of a newly measured time.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// The time is within the noise band, or is one of the first few times.
    Expected,
    /// The time is outside of the noise band. The next measured time confirms or rejects a change.
    Outlier,
    /// The time is the second in succession outside of the noise band, on the same side of it. All earlier times are discarded.
    Changed,
}

#[derive(Copy, Clone, Debug)]
pub(super) struct Times {
    ring: [u64; KEPT],
    count: usize,
    next: usize,
    median: u64,
    /// Mean absolute deviation of the times from their median, relative to the median.
    noise: f64,
    /// True if a time was added after the last detected change.
    pub fresh: bool,
    /// Latest measured time in nanoseconds if it is an unconfirmed outlier; `None` if it is not.
    outlier: Option<u64>,
}

impl Times {
    pub fn new() -> Times {
        Times { ring: [0; KEPT], count: 0, next: 0, median: 0, noise: NOISE.0, fresh: false, outlier: None }
    }

    /// Creates a record for a variant whose median time is known, but not the individual times.
    pub fn known(median: u64) -> Times {
        let mut times = Times::new();
        (0..3).for_each(|_| times.push(median));
        times
    }

    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the median of the kept times in nanoseconds, or 0 if there are none.
    pub fn median(&self) -> u64 {
        self.median
    }

    /// Returns the expected time of the next execution in nanoseconds. This is the latest time if it is an unconfirmed outlier, and the
    /// median if it is not.
    pub fn expected(&self) -> u64 {
        self.outlier.unwrap_or(self.median)
    }

    /// Returns the standard error of the median, relative to the median. It is 1.25 times the standard error of the mean.
    pub fn error(&self) -> f64 {
        1.25 * 1.25 * self.noise / (self.count.max(1) as f64).sqrt()
    }

    pub fn add(&mut self, ns: u64) -> News {
        let deviation = ns.abs_diff(self.median) as f64 / self.median.max(1) as f64;
        let band = BAND * self.noise;
        if self.count >= 2 {
            // An outlier is limited to the edge of the band before it is added to the noise. The band still grows if there are many
            // outliers.
            self.noise += (deviation.min(band) - self.noise) / 16.0;
            self.noise = self.noise.max(NOISE.1);
        }
        if self.count >= 2 && deviation > band.max(LEAST_BAND) {
            let fresh = std::mem::replace(&mut self.fresh, true);
            match self.outlier.take() {
                // A change was detected after the old times were measured, so they are obsolete.
                None if !fresh => self.forget(),
                Some(before) if (before > self.median) == (ns > self.median) => {
                    self.forget();
                    self.push(before);
                    self.push(ns);
                    return News::Changed;
                }
                _ => {
                    (self.outlier, self.fresh) = (Some(ns), fresh);
                    return News::Outlier;
                }
            }
        }
        self.outlier = None;
        self.fresh = true;
        self.push(ns);
        News::Expected
    }

    fn forget(&mut self) {
        (self.count, self.next) = (0, 0);
    }

    fn push(&mut self, ns: u64) {
        self.ring[self.next] = ns;
        self.next = (self.next + 1) % KEPT;
        self.count = (self.count + 1).min(KEPT);
        let mut sorted = self.ring;
        let sorted = &mut sorted[..self.count];
        sorted.sort_unstable();
        let (low, high) = (sorted[(self.count - 1) / 2], sorted[self.count / 2]);
        self.median = low + (high - low) / 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_outlier_changes_nothing_and_two_in_a_row_replace_all() {
        let mut times = Times::new();
        (0..20).for_each(|i| assert_eq!(times.add(1000 + i % 3), News::Expected));
        assert_eq!((times.median(), times.add(3000), times.median()), (1001, News::Outlier, 1001));
        assert_eq!((times.add(500), times.add(1002)), (News::Outlier, News::Expected), "on both sides");
        assert_eq!((times.add(1500), times.add(1510)), (News::Outlier, News::Changed));
        assert_eq!((times.median(), times.count()), (1505, 2));
    }

    #[test]
    fn after_a_change_elsewhere_one_time_confirms_the_old_ones_or_replaces_them() {
        let mut times = Times::known(1000);
        assert_eq!((times.add(1010), times.count(), times.fresh), (News::Expected, 4, true));
        times.fresh = false;
        assert_eq!((times.add(2000), times.count(), times.median(), times.fresh), (News::Expected, 1, 2000, true));
    }

    #[test]
    fn noise_is_learned() {
        let mut times = Times::new();
        for i in 0..400_u64 {
            times.add(1000 + (i * 7919 % 400) - 200);
        }
        assert!((0.05..0.15).contains(&times.noise) && times.count() == KEPT, "{times:?}");
    }
}
