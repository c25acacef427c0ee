//! Measures the time of plans, and decides when one plan counts as faster than another.

use crate::plan::Plan;

/// Scores plans by measured or simulated time. All plans must be made for one machine. A plan contains its transfers and options.
pub trait Score {
    /// Error type: the reason why a plan could not be scored.
    type Error;

    /// Returns the time in seconds of one execution of the plan, from submission until the host sees the completion. If times vary, returns
    /// the median of several executions.
    fn seconds(&mut self, plan: &Plan) -> Result<f64, Self::Error>;

    /// Returns the smallest gain, as a fraction of the time, at which another plan replaces the model's plan.
    fn least_gain(&self) -> f64;

    /// Compares the times of two plans. If times vary, the plans are executed alternately.
    fn duel(&mut self, incumbent: &Plan, challenger: &Plan) -> Result<Verdict, Self::Error> {
        let pair = (self.seconds(incumbent)?, self.seconds(challenger)?);
        Ok(Verdict { ratio: pair.1 / pair.0, faster: pair.1 < pair.0 * (1.0 - self.least_gain()) })
    }
}

/// Result of a comparison of two plans.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Time of the challenger divided by the time of the incumbent: the median over all repetitions of the comparison. In each repetition,
    /// one plan runs directly after the other, while the machine is in the same state.
    pub ratio: f64,
    /// True if the challenger is faster by more than the required minimum gain, and more often than chance would explain.
    pub faster: bool,
}

impl Verdict {
    /// Returns the verdict from rounds in each of which both plans were executed once. Each entry of `rounds` holds the time of the
    /// incumbent and the time of the challenger in seconds.
    ///
    /// The challenger counts as faster under two conditions. First, the median of the rounds' ratios must show at least the gain
    /// `least_gain`. Second, the challenger must win so many rounds that a plan of equal speed would win as many in at most one of a
    /// hundred comparisons. This is the sign test, which assumes nothing about the noise except that it affects both plans equally.
    pub fn of(rounds: &[(f64, f64)], least_gain: f64) -> Verdict {
        let ratio = median(rounds.iter().map(|(incumbent, challenger)| challenger / incumbent).collect());
        let wins = rounds.iter().filter(|(incumbent, challenger)| challenger < incumbent).count();
        Verdict { ratio, faster: ratio < 1.0 - least_gain && chance_of(wins, rounds.len()) <= 0.01 }
    }
}

/// Returns the probability that at least `wins` of `rounds` fair coins show heads.
fn chance_of(wins: usize, rounds: usize) -> f64 {
    let mut ways = 0.5_f64.powi(rounds as i32);
    let mut chance = 0.0;
    for heads in 0..=rounds {
        if heads >= wins {
            chance += ways;
        }
        ways *= (rounds - heads) as f64 / (heads + 1) as f64;
    }
    chance
}

/// Returns the middle value, or the mean of the two middle values; NaN for an empty list.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    if values.is_empty() {
        return f64::NAN;
    }
    values.sort_by(f64::total_cmp);
    (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chance_of_coins_is_that_of_the_binomial_distribution() {
        assert_eq!(chance_of(0, 11), 1.0);
        assert!((chance_of(11, 11) - 0.5_f64.powi(11)).abs() < 1e-12);
        // The probability of nine or more of eleven is (55 + 11 + 1) / 2048.
        assert!((chance_of(9, 11) - 67.0 / 2048.0).abs() < 1e-12);
    }

    #[test]
    fn a_gain_counts_only_if_it_is_large_enough_and_comes_often_enough() {
        let verdict = |rounds: &[(f64, f64)]| Verdict::of(rounds, 0.01).faster;
        assert!(verdict(&[(1.0, 0.95); 11]));
        assert!(!verdict(&[(1.0, 0.995); 11]), "half a per cent");
        assert!(!verdict(&[(1.0, 0.9); 4]), "four of four wins happen in one of sixteen duels of equals");
        let mut rounds = vec![(1.0, 0.9); 7];
        rounds.extend([(1.0, 1.1); 4]);
        assert!(!verdict(&rounds), "seven of eleven");
        assert!(!verdict(&[]));
        // A single round in which the machine was disturbed does not decide the comparison.
        let mut rounds = vec![(1.0, 0.95); 10];
        rounds.push((1.0, 50.0));
        assert!(verdict(&rounds));
        // A machine that gets slower from round to round slows both plans down, so no plan wins.
        let drifts: Vec<_> = (1..=21).map(|round| (f64::from(round), 0.95 * f64::from(round))).collect();
        assert!((Verdict::of(&drifts, 0.01).ratio - 0.95).abs() < 1e-12);
    }
}
