//! The search for who moves partitions, in how many a transfer is divided, and how many blocks a kernel has.
//!
//! From the model's choice for each agent, first by factors of two, then by half of that, one number after the other while it helps (PROACT,
//! Mutlu et al. 2021, section 5, searched a grid for each application). Scores are the caller's: its kernels decide what is best.

use super::tuning::PartitionSetting;
use crate::program::{MOST_BLOCKS, MOST_PARTITIONS};

/// An improvement of less is taken for noise.
const LEAST_GAIN: f64 = 0.01;

/// The best of what was scored, with its score in seconds; `None` where all was refused. `score` gives `None` for a setting that is refused.
pub fn search_partitions<E>(
    starts: &[PartitionSetting],
    mut score: impl FnMut(PartitionSetting) -> Result<Option<f64>, E>,
) -> Result<Option<(PartitionSetting, f64)>, E> {
    let mut best: Option<(PartitionSetting, f64)> = None;
    for start in starts {
        let Some(found) = climb(*start, &mut score)? else { continue };
        if best.is_none_or(|(_, seconds)| found.1 < seconds) {
            best = Some(found);
        }
    }
    Ok(best)
}

/// The best near `start`, with one agent.
fn climb<E>(
    start: PartitionSetting,
    score: &mut impl FnMut(PartitionSetting) -> Result<Option<f64>, E>,
) -> Result<Option<(PartitionSetting, f64)>, E> {
    let mut scored: Vec<PartitionSetting> = vec![start];
    let Some(seconds) = score(start)? else { return Ok(None) };
    let mut best = (start, seconds);
    for factor in [2.0_f64, 1.5] {
        for number in [Number::Count, Number::Blocks, Number::Count] {
            for factor in [factor, factor.recip()] {
                while let Some(next) = number.times(best.0, factor).filter(|next| !scored.contains(next)) {
                    scored.push(next);
                    match score(next)? {
                        Some(seconds) if seconds < best.1 * (1.0 - LEAST_GAIN) => best = (next, seconds),
                        _ => break,
                    }
                }
            }
        }
    }
    Ok(Some(best))
}

/// What is searched.
#[derive(Copy, Clone)]
enum Number {
    Count,
    /// Of an agent that has any.
    Blocks,
}

impl Number {
    fn times(self, setting: PartitionSetting, factor: f64) -> Option<PartitionSetting> {
        let scaled = |value: u32, most: u32| ((f64::from(value) * factor).round() as u32).clamp(1, most);
        match self {
            Number::Count => Some(PartitionSetting { count: scaled(setting.count, MOST_PARTITIONS), ..setting }),
            Number::Blocks => (setting.blocks > 0).then(|| PartitionSetting { blocks: scaled(setting.blocks, MOST_BLOCKS), ..setting }),
        }
    }
}
