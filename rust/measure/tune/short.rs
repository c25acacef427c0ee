//! The search that starts from the model, with a few scores for each coordinate.
//!
//! First which paths: steps of one from the number that the model takes, and the host path off. Then, for the best two of these outlines,
//! the chunk size by factors of two from the model's, and the weights of the shares by bracketing and golden section on a logarithmic
//! scale, all staged paths together and then each sort by itself; twice around where the first round changed something. Two outlines,
//! because one may look poor only for its shares: one path beats two of which the second carries too much. Chunks before shares, because
//! shares that are fitted to the wrong chunks hide what better chunks would bring.
//!
//! Each coordinate is a descent that ends at the first step that brings nothing, so it finds the optimum where there is one, and else a
//! place that is no worse than the start. The best plan has to win a duel against the model's; if it does not, the model's is kept.

use super::error::TuneError;
use super::score::Score;
use super::trial::{Found, Trial, Trials};
use super::tuning::Setting;
use crate::model::GRAIN;
use crate::plan::{Mechanism, WEIGHTS};
use crate::topology::DeviceId;

/// Rounds over the coordinates.
const ROUNDS: usize = 2;
/// The first step of a share's weight: more than measured and modelled shares differ by (docs/reference/model.md: 10 % against 11.3 %).
const FIRST_STEP: f64 = 0.15;
/// Scores of golden section inside a bracket: four narrow ± 15 % to ± 2 %.
const SECTIONS: usize = 4;
/// Steps while a bracket is looked for.
const MARCH: usize = 6;
/// 1 / φ².
const GOLDEN: f64 = 0.381_966;

/// Outlines whose shares and chunks are searched.
const OUTLINES: usize = 2;
/// How much slower than the best one an outline may be and still be searched: more than shares and chunks can gain.
const NEAR: f64 = 1.5;

/// Searches from the model's plan.
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
            // First all staged paths by one factor: costs of staging that the model misses affect all of them.
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

/// Searches for the paths alone, by a few scores: shares are the model's. Where paths are staged in host memory, the best shares depend on
/// which memory the staging has got, and too large a share of a slow path costs more than too small a one.
pub fn paths<S: Score>(mut trials: Trials<'_, S>) -> Result<Found, TuneError<S::Error>> {
    let start = trials.start()?;
    let step = trials.score.least_gain() / 4.0;
    let outlines = outlines(&mut trials, &start, step)?;
    let best = outlines.into_iter().min_by(|a, b| a.seconds.total_cmp(&b.seconds)).unwrap_or_else(|| start.clone());
    trials.found(start, best)
}

/// The model's plan, and plans with other paths: more while that helps, else fewer, and without the host. Where the model takes one path, one
/// plan has all paths there are, because two may gain nothing where more would. No two have the same program.
fn outlines<S: Score>(trials: &mut Trials<'_, S>, start: &Trial, step: f64) -> Result<Vec<Trial>, TuneError<S::Error>> {
    let (used, most) = (start.paths(), trials.most_paths());
    let mut outlines = vec![start.clone()];
    // Whether it is faster than all before.
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
    /// Part of the time that a step has to gain to be taken.
    step: f64,
}

impl<S: Score> Climb<'_, '_, S> {
    /// Seconds with the setting, which becomes the best if it is a step faster. Infinite where the planner leaves a path out: that is
    /// another outline, which is searched by itself.
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

    /// Whether chunks of this size are a step faster; then they are kept.
    fn chunk(&mut self, bytes: u64) -> Result<bool, TuneError<S::Error>> {
        let bound = self.best.seconds * (1.0 - self.step);
        Ok(self.seconds(Setting { chunk_bytes: Some(bytes), ..self.best.setting })? < bound)
    }

    /// The weights of the shares of these paths together.
    fn weights(&mut self, of: &[Staged]) -> Result<(), TuneError<S::Error>> {
        let has = |&kind: &Staged| self.best.staged().any(|(via, _)| Staged::at(via) == kind);
        // Where a transfer has no other paths, their weight changes nothing.
        let weighs = self.best.plan.transfers.iter().any(|transfer| {
            let there = transfer.paths.iter().filter(|path| path.via.is_some_and(|via| of.contains(&Staged::at(via)))).count();
            0 < there && there < transfer.paths.len()
        });
        if !of.iter().all(has) || !weighs {
            return Ok(());
        }
        let base = self.best.setting;
        // By a common factor, on a logarithmic scale.
        let mut seconds_at = |x: f64| {
            let mut setting = base;
            of.iter().for_each(|kind| kind.scale(&mut setting, x.exp()));
            self.seconds(setting)
        };
        // A bracket: a point that is better than both of its neighbours. The middle has been scored.
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
            // Into the wider half.
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

    /// Chunks twice as large while that helps, else half as large while that helps.
    fn chunks(&mut self) -> Result<(), TuneError<S::Error>> {
        let staged = self.best.staged().filter(|(_, path)| path.mechanism == Mechanism::Copy);
        // That of the path that carries most.
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

/// Where a path is staged, as far as weights tell.
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
