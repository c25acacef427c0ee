//! Implements the search that starts from the model's plan, with a few scores for each parameter (coordinate).
//!
//! First the search varies the paths: it adds or removes one path at a time, and disables the host path. Each such plan is called an
//! outline. Then, for the best two outlines, it varies the chunk size by factors of two from the model's size, and the share of the data
//! that each path gets. The model's shares are multiplied by factors. The factors are searched by bracketing and golden section on a
//! logarithmic scale, first for all staged paths together and then for each kind of path separately. All this is repeated once if the first
//! pass changed something.
//!
//! Two outlines are searched because an outline may look poor only because of its shares: one path is faster than two if the second gets
//! too much data. Chunks come before shares, because shares that are fitted to the wrong chunks hide the gain of better chunks.
//!
//! Each parameter is varied in one direction as long as that brings a gain. This finds the optimum if there is only one local optimum. If
//! there are several, it finds a point that is no worse than the start. The best plan is compared directly with the model's plan. If it is
//! not faster, the model's plan is kept.

use super::error::TuneError;
use super::score::Score;
use super::trial::{Found, Trial, Trials};
use super::tuning::Setting;
use crate::model::GRAIN;
use crate::plan::{Mechanism, WEIGHTS};
use crate::topology::DeviceId;

/// Maximum number of passes over all parameters that the search varies.
const ROUNDS: usize = 2;
/// First change, as a fraction, of the factor by which the share of the data of a path is multiplied. It is larger than the difference
/// between measured and modelled shares (docs/reference/model.md: 10 % compared with 11.3 %).
const FIRST_STEP: f64 = 0.15;
/// Number of golden-section steps within a bracket (interval that contains the optimum). Four steps narrow a bracket of ± 15 % to ± 2 %.
const SECTIONS: usize = 4;
/// Maximum number of steps in one direction that are made to find a bracket (interval that contains the optimum).
const MARCH: usize = 6;
/// Ratio of the golden section, 1 / φ².
const GOLDEN: f64 = 0.381_966;

/// Number of outlines (plans with different selections of paths) for which the search varies the chunk size and the shares of the data.
const OUTLINES: usize = 2;
/// Largest ratio of an outline's time to the time of the best outline at which the outline is still searched. An outline is a plan with its
/// own selection of paths. The ratio is larger than the gain that other shares of the data and other chunk sizes can bring.
const NEAR: f64 = 1.5;

/// Searches for a better plan, starting from the model's plan, and returns the result.
pub fn short<S: Score>(mut trials: Trials<'_, S>) -> Result<Found, TuneError<S::Error>> {
    let start = trials.start()?;
    let step = trials.score.least_gain() / 4.0;
    let mut outlines = outlines(&mut trials, &start, step)?;
    outlines.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let near = outlines[0].seconds * NEAR;
    let mut best = start.clone();
    for outline in outlines.into_iter().filter(|outline| outline.seconds <= near).take(OUTLINES) {
        let mut climb = Climb { trials: &mut trials, best: outline, step };
        for _ in 0..ROUNDS {
            let before = climb.best.seconds;
            climb.chunks()?;
            // First all staged paths are scaled by one factor, because staging costs that the model lacks affect all staged paths.
            for kinds in [&[Staged::Host, Staged::Relay][..], &[Staged::Host], &[Staged::Relay]] {
                climb.weights(kinds)?;
            }
            if climb.best.seconds >= before * (1.0 - step) {
                break;
            }
        }
        if climb.best.seconds < best.seconds * (1.0 - step) {
            best = climb.best;
        }
    }
    trials.found(start, best)
}

/// Searches only for the best paths, with a few scores. The model decides which share of the data each path gets. This search is intended
/// for paths that are staged in host memory, because their best shares depend on which host memory was allocated for staging. Too large a
/// share for a slow path costs more than too small a share.
pub fn paths<S: Score>(mut trials: Trials<'_, S>) -> Result<Found, TuneError<S::Error>> {
    let start = trials.start()?;
    let step = trials.score.least_gain() / 4.0;
    let outlines = outlines(&mut trials, &start, step)?;
    let best = outlines.into_iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds)).unwrap_or_else(|| start.clone());
    trials.found(start, best)
}

/// Returns outlines: the model's plan and plans with other paths. Tries more paths as long as that brings a gain. If the model's plan uses
/// one path, also tries all possible paths, because many paths may bring a gain even if two do not. If it uses several paths, also tries
/// fewer paths as long as that brings a gain, and a single path. If it uses the host path, also tries a plan without the host path. No two
/// outlines have the same program.
fn outlines<S: Score>(trials: &mut Trials<'_, S>, start: &Trial, step: f64) -> Result<Vec<Trial>, TuneError<S::Error>> {
    let (used, most) = (start.paths(), trials.most_paths());
    let mut outlines = vec![start.clone()];
    // Adds the plan of a setting to the outlines. Returns true if it is faster than all earlier outlines.
    let mut add = |setting: Setting| -> Result<bool, TuneError<S::Error>> {
        let Some(trial) = trials.at(setting)? else { return Ok(false) };
        let faster = outlines.iter().all(|known| trial.seconds < known.seconds * (1.0 - step));
        if outlines.iter().all(|known| known.plan.program != trial.plan.program) {
            outlines.push(trial);
        }
        Ok(faster)
    };
    let with = |paths: u32| Setting { max_paths: Some(paths), ..Setting::default() };
    let mut paths = used + 1;
    while paths <= most && add(with(paths))? {
        paths += 1;
    }
    if used <= 1 {
        add(with(most))?;
    } else {
        let mut paths = used - 1;
        while paths > 1 && add(with(paths))? {
            paths -= 1;
        }
        add(with(1))?;
    }
    if start.staged().any(|(via, _)| via.is_host()) {
        add(Setting { host_path: Some(false), ..Setting::default() })?;
    }
    Ok(outlines)
}

struct Climb<'t, 'a, S> {
    trials: &'t mut Trials<'a, S>,
    best: Trial,
    /// Smallest gain, as a fraction of the time, that counts as an improvement.
    step: f64,
}

impl<S: Score> Climb<'_, '_, S> {
    /// Returns the time in seconds of the plan with this setting. The setting becomes the best setting if the plan is faster by at least
    /// `step`. Returns infinity if the planner leaves out a path, because the plan then has another selection of paths (outline), which is
    /// searched separately.
    fn seconds(&mut self, setting: Setting) -> Result<f64, TuneError<S::Error>> {
        let Some(trial) = self.trials.at(setting)?.filter(|trial| trial.paths() >= self.best.paths()) else {
            return Ok(f64::INFINITY);
        };
        let seconds = trial.seconds;
        if seconds < self.best.seconds * (1.0 - self.step) {
            self.best = trial;
        }
        Ok(seconds)
    }

    /// Tries chunks of `bytes` bytes. Keeps this chunk size and returns true if the plan is faster by at least `step`.
    fn chunk(&mut self, bytes: u64) -> Result<bool, TuneError<S::Error>> {
        let bound = self.best.seconds * (1.0 - self.step);
        Ok(self.seconds(Setting { chunk_bytes: Some(bytes), ..self.best.setting })? < bound)
    }

    /// Searches for the best common factor by which the shares of the data of these kinds of paths are multiplied.
    fn weights(&mut self, of: &[Staged]) -> Result<(), TuneError<S::Error>> {
        let has = |&kind: &Staged| self.best.staged().any(|(via, _)| Staged::at(via) == kind);
        // If a transfer has no paths of other kinds, the factor has no effect on its shares.
        let weighs = self.best.plan.transfers.iter().any(|transfer| {
            let there = transfer.paths.iter().filter(|path| path.via.is_some_and(|via| of.contains(&Staged::at(via)))).count();
            0 < there && there < transfer.paths.len()
        });
        if !of.iter().all(has) || !weighs {
            return Ok(());
        }
        let base = self.best.setting;
        // The factors of these kinds of paths are multiplied by one common factor, which is varied on a logarithmic scale.
        let mut seconds_at = |x: f64| {
            let mut setting = base;
            of.iter().for_each(|kind| kind.scale(&mut setting, x.exp()));
            self.seconds(setting)
        };
        // A bracket is a point that is better than both of its neighbours. The middle point has already been scored.
        let mut low = (-FIRST_STEP, seconds_at(-FIRST_STEP)?);
        let mut middle = (0.0, seconds_at(0.0)?);
        let mut high = (FIRST_STEP, seconds_at(FIRST_STEP)?);
        for _ in 0..MARCH {
            if low.1 < middle.1 && low.1 <= high.1 {
                (middle, high) = (low, middle);
                low.0 -= FIRST_STEP;
                low.1 = seconds_at(low.0)?;
            } else if high.1 < middle.1 {
                (low, middle) = (middle, high);
                high.0 += FIRST_STEP;
                high.1 = seconds_at(high.0)?;
            } else {
                break;
            }
        }
        for _ in 0..SECTIONS {
            // The search continues in the wider half.
            let below = middle.0 - low.0 > high.0 - middle.0;
            let edge = if below { low.0 } else { high.0 };
            let x = middle.0 + GOLDEN * (edge - middle.0);
            let new = (x, seconds_at(x)?);
            match (new.1 < middle.1, below) {
                (true, true) => (high, middle) = (middle, new),
                (true, false) => (low, middle) = (middle, new),
                (false, true) => low = new,
                (false, false) => high = new,
            }
        }
        Ok(())
    }

    /// Doubles the chunk size as long as this makes the plan faster. If doubling never helps, halves the chunk size as long as this makes
    /// the plan faster.
    fn chunks(&mut self) -> Result<(), TuneError<S::Error>> {
        let staged = self.best.staged().filter(|(_, path)| path.mechanism == Mechanism::Copy);
        // The search starts from the chunk size of the path that moves the most bytes.
        let Some(first) = staged.max_by_key(|(_, path)| path.bytes).map(|(_, path)| path.chunk_bytes) else { return Ok(()) };
        let mut bytes = first.saturating_mul(2);
        while self.chunk(bytes)? {
            bytes = bytes.saturating_mul(2);
        }
        if bytes > first.saturating_mul(2) {
            return Ok(());
        }
        bytes = (first / 2).next_multiple_of(GRAIN);
        while self.chunk(bytes)? && bytes > GRAIN {
            bytes = (bytes / 2).next_multiple_of(GRAIN);
        }
        Ok(())
    }
}

/// Kind of memory in which a path is staged. For each kind, the search finds a separate factor for the shares of the data.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Staged {
    Host,
    Relay,
}

impl Staged {
    fn at(via: DeviceId) -> Staged {
        if via.is_host() { Staged::Host } else { Staged::Relay }
    }

    fn scale(self, setting: &mut Setting, factor: f64) {
        let share = match self {
            Staged::Host => &mut setting.host_share,
            Staged::Relay => &mut setting.relay_share,
        };
        let thousandths = f64::from(share.unwrap_or(1000)) * factor;
        let scaled = (thousandths.round() as u16).clamp(*WEIGHTS.start(), *WEIGHTS.end());
        *share = (scaled != 1000).then_some(scaled);
    }
}
