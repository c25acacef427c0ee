//! The search for the number of partitions into which a transfer is divided.
//!
//! From the model's choice, first by factors of two, then by half of that, while it helps (PROACT, Mutlu et al. 2021, section 5, searched a grid for
//! each application). Scores are the caller's: its kernels decide what is best.

use crate::program::MOST_PARTITIONS;

/// An improvement of less is taken for noise.
const LEAST_GAIN: f64 = 0.01;

/// The best number near `start`, with its score in seconds; `None` where that is refused. `score` gives `None` for a number that is refused.
pub fn search_partitions<E>(start: u32, mut score: impl FnMut(u32) -> Result<Option<f64>, E>) -> Result<Option<(u32, f64)>, E> {
    let mut scored = vec![start];
    let Some(seconds) = score(start)? else { return Ok(None) };
    let mut best = (start, seconds);
    for factor in [2.0_f64, 1.5] {
        for factor in [factor, factor.recip()] {
            loop {
                let next = ((f64::from(best.0) * factor).round() as u32).clamp(1, MOST_PARTITIONS);
                if scored.contains(&next) {
                    break;
                }
                scored.push(next);
                match score(next)? {
                    Some(seconds) if seconds < best.1 * (1.0 - LEAST_GAIN) => best = (next, seconds),
                    _ => break,
                }
            }
        }
    }
    Ok(Some(best))
}
