//! Searches for the number of partitions into which a transfer is divided.
//!
//! The search starts from the best of several numbers. It continues by factors of two, then by factors of 1.5, while the score improves.
//! (PROACT, Muthukrishnan et al. 2021, section 5, searched a grid for each application.) The caller measures the scores, because the
//! kernels of its program decide which number is best.

use crate::program::MOST_PARTITIONS;

/// Minimum improvement of the time, as a fraction, that is not regarded as noise.
const LEAST_GAIN: f64 = 0.01;

/// Smallest size of a partition in bytes in the first trials.
const LEAST_BYTES: u64 = 64 << 10;
/// Largest number of partitions in the first trials.
const MOST_SPREAD: u32 = 256;

/// Returns the numbers of partitions from which the search starts. The numbers cover the whole range for a batch whose largest transfer has
/// `largest` bytes, and include the model's choice `model`. They are also sufficient for a diagram of the scores.
pub fn spread_partitions(model: u32, largest: u64) -> Vec<u32> {
    let powers = (0..).map(|power| 4_u32.pow(power)).take_while(|count| *count == 1 || largest / u64::from(*count) >= LEAST_BYTES);
    let mut all: Vec<u32> = powers.take_while(|count| *count <= MOST_SPREAD).chain([model]).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Searches the numbers of partitions near the best of `starts`. Returns the best number with its score in seconds, or `None` if all
/// numbers are refused. The function `score` returns `None` for a number that is refused.
pub fn search_partitions<E>(starts: &[u32], mut score: impl FnMut(u32) -> Result<Option<f64>, E>) -> Result<Option<(u32, f64)>, E> {
    let (mut scored, mut found) = (starts.to_vec(), None);
    for &start in starts {
        if let Some(seconds) = score(start)? {
            found = found.filter(|(_, least)| *least <= seconds).or(Some((start, seconds)));
        }
    }
    let Some(mut best) = found else { return Ok(None) };
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
