//! Implements the exhaustive search, which scores every combination of a grid. The papers that the module `tune` cites vary the number of
//! paths, the use of a path through host memory, and 1 to 16 chunks for each path. This grid also varies the shares, that is, which part of
//! the data each path gets, by weights that multiply the model's shares.

use super::error::TuneError;
use super::score::Score;
use super::trial::{Found, Trial, Trials};
use super::tuning::Setting;
use crate::model::GRAIN;

/// Factors, in thousandths, by which the model's share of the data of each path through host memory is multiplied. The range is wide,
/// because the best shares of these paths differ most from the model's.
const HOST_SHARES: [u16; 13] = [500, 650, 750, 820, 880, 940, 1000, 1060, 1120, 1200, 1300, 1500, 2000];
/// Factors, in thousandths, by which the model's share of the data of each path through another GPU is multiplied.
const RELAY_SHARES: [u16; 9] = [700, 820, 900, 950, 1000, 1050, 1100, 1200, 1400];
/// Numbers of chunks into which the staged path with the most data divides this data. The value 0 leaves the number of chunks to the model.
/// The list contains the numbers 1 to 16 of the papers that the module `tune` cites, and larger numbers.
const CHUNKS: [u64; 9] = [0, 1, 2, 4, 8, 16, 24, 32, 64];

/// Scores the whole grid of settings and returns the best plan. `progress` receives the number of settings that were scored and the total
/// number of settings.
pub fn grid<S: Score>(mut trials: Trials<'_, S>, mut progress: impl FnMut(usize, usize)) -> Result<Found, TuneError<S::Error>> {
    let start = trials.start()?;
    let mut best = start.clone();
    // First find the outlines, which are plans with different paths. Two settings that give the same plan count as one outline, because
    // they have the same refinements.
    let mut outlines: Vec<Trial> = vec![start.clone()];
    for paths in 1..=trials.most_paths() {
        for host_path in [None, Some(false)] {
            let setting = Setting { max_paths: Some(paths), host_path, ..Setting::default() };
            if let Some(trial) = trials.at(setting)?
                && !outlines.iter().any(|known| known.plan.program == trial.plan.program)
            {
                outlines.push(trial);
            }
        }
    }
    let refinements: Vec<Vec<Setting>> = outlines.iter().map(refined).collect();
    let all = refinements.iter().map(Vec::len).sum();
    let mut done = 0;
    for (outline, settings) in outlines.into_iter().zip(refinements) {
        keep(&mut best, outline);
        for setting in settings {
            if let Some(trial) = trials.at(setting)? {
                keep(&mut best, trial);
            }
            done += 1;
            progress(done, all);
        }
    }
    trials.found(start, best)
}

fn keep(best: &mut Trial, trial: Trial) {
    if trial.seconds < best.seconds {
        *best = trial;
    }
}

/// Returns all settings that use the same paths as the plan `outline`, with other numbers of chunks and other shares of the data.
fn refined(outline: &Trial) -> Vec<Setting> {
    let one = [1000_u16];
    let hosts: &[u16] = if outline.staged().any(|(via, _)| via.is_host()) { &HOST_SHARES } else { &one };
    let relays: &[u16] = if outline.staged().any(|(via, _)| !via.is_host()) { &RELAY_SHARES } else { &one };
    let largest = outline.staged().map(|(_, path)| path.bytes).max();
    let mut settings = Vec::new();
    for &chunks in if largest.is_some() { &CHUNKS[..] } else { &CHUNKS[..1] } {
        let chunk_bytes = largest.filter(|_| chunks > 0).map(|largest| largest.div_ceil(chunks).next_multiple_of(GRAIN));
        for &host in hosts {
            for &relay in relays {
                let weight = |share: u16| (share != 1000).then_some(share);
                settings.push(Setting { chunk_bytes, host_share: weight(host), relay_share: weight(relay), ..outline.setting });
            }
        }
    }
    settings
}
