//! Tunes plans of all cases (communication steps) and sizes, and finds the smallest size at which several paths are faster than one.

use super::cases::Case;
use super::class::Class;
use super::error::TuneError;
use super::grid::grid;
use super::score::Score;
use super::short::{paths, short};
use super::trial::{Found, Trial, Trials};
use super::tuning::{ClassTuning, EngineTuning, Origin, Preference, Setting, SizeTuning, Tuning, digest};
use crate::model::GRAIN;
use crate::plan::{Engine, Options, Shape, plan};
use crate::topology::Machine;

/// Method by which the best plan of a batch is searched.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Search {
    /// Searches only for the best set of paths. The model decides which part of the data each path gets (share) and the number of chunks.
    Paths,
    /// Starts from the model's plan and varies one parameter of the plan at a time.
    Short,
    /// Makes the short search, and also scores the whole grid of settings for comparison.
    Both,
}

/// Parameters of a tuning run.
#[derive(Clone, Debug)]
pub struct Campaign<'a> {
    /// Machine for which plans are made.
    pub machine: &'a Machine,
    /// Size of each transfer in bytes; the sizes may be in any order.
    pub sizes: &'a [u64],
    /// Options of all plans, for example the limit of staging memory. Searches change only the options that are fields of [`Setting`].
    pub base: Options,
    /// Method by which the best plan of each batch is searched.
    pub search: Search,
    /// Existing tuning to evaluate. Results are then compared with the plans that a context chooses with this tuning. If it is `None`,
    /// results are compared with the model's plans. Searches start from the model's plan in both cases.
    pub in_force: Option<&'a Tuning>,
}

/// Results of the searches for one batch with one engine (execution method).
#[derive(Clone, Debug)]
pub struct EngineResult {
    /// Result of the search that starts from the model's plan ([`Search::Short`] or [`Search::Paths`]).
    pub short: Found,
    /// Result of scoring the whole grid of settings; `None` unless [`Search::Both`] was requested.
    pub grid: Option<Found>,
    /// True if the faster of the plans in `short` and `grid` was faster than the plan that is currently chosen for the batch, when the two
    /// were timed against each other. The currently chosen plan may use another engine (execution method).
    pub beats_choice: bool,
}

impl EngineResult {
    /// Returns the faster of the best plans of both searches.
    pub fn best(&self) -> &Trial {
        match &self.grid {
            Some(grid) if grid.best.seconds < self.short.best.seconds => &grid.best,
            _ => &self.short.best,
        }
    }
}

/// Results of the searches for the best plan of one batch, with streams and with graphs.
#[derive(Clone, Debug)]
pub struct TunedPoint {
    /// Case (communication step) to which the batch belongs.
    pub case: Case,
    /// Transfers of the batch.
    pub batch: Vec<Shape>,
    /// Class of batches to which the results apply.
    pub class: Class,
    /// Size of each transfer in bytes.
    pub size: u64,
    /// Time in seconds of the currently chosen plan. This is the model's plan, or the plan that a context chooses with the evaluated tuning
    /// ([`Campaign::in_force`]).
    pub chosen: f64,
    /// Results of the searches for plans that are executed in streams.
    pub stream: EngineResult,
    /// Results of the searches for plans that are executed as CUDA graphs.
    pub graph: EngineResult,
}

impl TunedPoint {
    /// Returns the preferred engine (execution method), and the time of its best plan in seconds. Returns [`Engine::Auto`] and the time of
    /// the current choice if no engine is faster than the current choice by enough.
    pub fn choice(&self) -> (Engine, f64) {
        [(Engine::Stream, &self.stream), (Engine::Graph, &self.graph)]
            .into_iter()
            .filter(|(_, result)| result.beats_choice)
            .map(|(engine, result)| (engine, result.best().seconds))
            .min_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap_or((Engine::Auto, self.chosen))
    }

    /// Returns the time in seconds of the best plan among the results of the short searches and the current choice.
    pub fn short(&self) -> f64 {
        self.chosen.min(self.stream.short.best.seconds).min(self.graph.short.best.seconds)
    }

    /// Returns the time in seconds of the best plan of all searches, or `None` if the grid was not searched.
    pub fn exhaustive(&self) -> Option<f64> {
        let grids = [self.stream.grid.as_ref()?, self.graph.grid.as_ref()?];
        Some(grids.into_iter().map(|grid| grid.best.seconds).fold(self.short(), f64::min))
    }

    /// Returns the number of plans that the short searches of both engines (execution methods) scored, plus one for the current choice.
    pub fn short_evaluations(&self) -> usize {
        1 + self.stream.short.evaluations + self.graph.short.evaluations
    }

    /// Returns the number of plans that the grid searches scored, or `None` if the grid was not searched.
    pub fn grid_evaluations(&self) -> Option<usize> {
        Some(self.stream.grid.as_ref()?.evaluations + self.graph.grid.as_ref()?.evaluations)
    }
}

/// Number of comparisons in a bisection that searches for the size from which several paths are faster. If two tuned sizes differ by a
/// factor of four, three comparisons determine this size up to a factor of 4^(1/8), that is, to about a fifth.
const BISECTIONS: usize = 3;

impl Campaign<'_> {
    /// Returns the batches of a case, each with the size of its transfers. They are sorted by class and then from large to small, so that
    /// buffers are allocated once.
    pub fn batches(&self, case: Case) -> Vec<(u64, Vec<Shape>)> {
        let mut sizes = self.sizes.to_vec();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        sizes.dedup();
        let largest = sizes.first().map(|size| case.batches(self.machine, *size)).unwrap_or_default();
        let at = |batch: &[Shape], bytes: u64| batch.iter().map(|shape| Shape { bytes, ..*shape }).collect();
        largest.iter().flat_map(|batch| sizes.iter().map(|size| (*size, at(batch, *size)))).collect()
    }

    /// Searches for the best plan of one batch. Returns `None` if the batch belongs to no class. `progress` receives the engine (execution
    /// method), the number of scored settings of the grid, and the number of all settings of the grid.
    pub fn point<S: Score>(
        &self,
        case: Case,
        size: u64,
        batch: Vec<Shape>,
        score: &mut S,
        mut progress: impl FnMut(Engine, usize, usize),
    ) -> Result<Option<TunedPoint>, TuneError<S::Error>> {
        let Some((class, _)) = Class::of(self.machine, &batch) else { return Ok(None) };
        let advice = self.in_force.and_then(|tuning| tuning.advice(self.machine, &batch, Engine::Auto));
        let now = advice.map_or(self.base, |advice| advice.options(&self.base));
        let chosen = Trials::new(self.machine, &batch, &now, now.engine, score).start()?;
        let mut search = |engine| -> Result<EngineResult, TuneError<S::Error>> {
            let trials = Trials::new(self.machine, &batch, &self.base, engine, score);
            let found = if self.search == Search::Paths { paths(trials)? } else { short(trials)? };
            let whole = match self.search {
                Search::Paths | Search::Short => None,
                Search::Both => {
                    let trials = Trials::new(self.machine, &batch, &self.base, engine, score);
                    Some(grid(trials, |done, of| progress(engine, done, of))?)
                }
            };
            let mut result = EngineResult { short: found, grid: whole, beats_choice: false };
            // The best of many noisy scores is partly luck, and the currently chosen plan was scored at another time. A result therefore
            // counts only if a direct comparison confirms it.
            let mut fight = |trial: &mut Trial| -> Result<bool, TuneError<S::Error>> {
                let verdict = score.duel(&chosen.plan, &trial.plan).map_err(TuneError::Score)?;
                trial.seconds = chosen.seconds * verdict.ratio;
                Ok(verdict.faster)
            };
            let by_short = fight(&mut result.short.best)?;
            let by_grid = result.grid.as_mut().map(|grid| fight(&mut grid.best)).transpose()?;
            let grid_is_better = result.grid.as_ref().is_some_and(|grid| grid.best.seconds < result.short.best.seconds);
            result.beats_choice = if grid_is_better { by_grid.unwrap_or(false) } else { by_short };
            Ok(result)
        };
        let (stream, graph) = (search(Engine::Stream)?, search(Engine::Graph)?);
        Ok(Some(TunedPoint { case, batch, class, size, chosen: chosen.seconds, stream, graph }))
    }

    /// Combines the results of the searches for all batches (`points`) into a tuning. If one path is best at one size and several paths are
    /// best at the next, the size from which several paths are faster is found by further comparisons.
    pub fn tuning<S: Score>(&self, points: &[TunedPoint], origin: Origin, score: &mut S) -> Result<Tuning, TuneError<S::Error>> {
        let mut classes: Vec<ClassTuning> = Vec::new();
        for first in points {
            if classes.iter().any(|known| known.class.is_like(&first.class)) {
                continue;
            }
            let mut own: Vec<&TunedPoint> = points.iter().filter(|point| point.class.is_like(&first.class)).collect();
            own.sort_by_key(|point| point.size);
            let mut engine = Vec::new();
            for (from_bytes, point) in boundaries(&own).into_iter().zip(&own) {
                engine.push(Preference { from_bytes, engine: point.choice().0 });
            }
            engine.dedup_by(|later, earlier| later.engine == earlier.engine);
            classes.push(ClassTuning {
                class: first.class,
                engine,
                stream: self.of_engine(&own, Engine::Stream, |point| &point.stream, score)?,
                graph: self.of_engine(&own, Engine::Graph, |point| &point.graph, score)?,
            });
        }
        Ok(Tuning {
            topology: self.machine.topology().name.clone(),
            digest: digest(self.machine.topology()),
            origin,
            classes,
            partitions: Vec::new(),
        })
    }

    fn of_engine<S: Score>(
        &self,
        points: &[&TunedPoint],
        engine: Engine,
        of: impl Fn(&TunedPoint) -> &EngineResult,
        score: &mut S,
    ) -> Result<EngineTuning, TuneError<S::Error>> {
        let mut sizes: Vec<SizeTuning> = boundaries(points)
            .into_iter()
            .zip(points)
            .map(|(from_bytes, point)| {
                let setting = of(point).best().setting;
                SizeTuning { from_bytes, at_bytes: setting.chunk_bytes.map(|_| point.size), setting }
            })
            .collect();
        let several = |point: &TunedPoint| of(point).best().paths() > 1;
        let mut min_bytes = None;
        if let Some(at) = points.iter().position(|point| several(point)).filter(|at| *at > 0) {
            let threshold = self.threshold(points[at - 1].size, points[at], &sizes[at], engine, score)?;
            // The setting that was found for the larger size applies to all sizes from the threshold on.
            sizes[at].from_bytes = threshold;
            min_bytes = Some(threshold);
        }
        sizes.dedup_by(|later, earlier| (later.setting, later.at_bytes) == (earlier.setting, earlier.at_bytes));
        Ok(EngineTuning { min_bytes, sizes })
    }

    /// Returns the smallest transfer size for which the setting `found` of several paths is faster than one path. This size lies between
    /// `one`, a size at which one path is best, and the size for which `found` was tuned.
    fn threshold<S: Score>(
        &self,
        mut one: u64,
        point: &TunedPoint,
        found: &SizeTuning,
        engine: Engine,
        score: &mut S,
    ) -> Result<u64, TuneError<S::Error>> {
        let mut several = point.size;
        for _ in 0..BISECTIONS {
            let middle = between(one, several);
            if middle <= one || middle >= several {
                break;
            }
            let batch: Vec<Shape> = point.batch.iter().map(|shape| Shape { bytes: middle, ..*shape }).collect();
            let base = Options { engine, ..self.base };
            let plans = [Setting { max_paths: Some(1), ..Setting::default() }, found.setting_for(middle)]
                .map(|s| plan(self.machine, &batch, &s.options(&base)));
            // A batch that can be planned at both sizes can also be planned at every size in between. If planning fails nevertheless, the
            // search ends and keeps the threshold that it has reached.
            let [Ok(alone), Ok(together)] = plans else { break };
            if score.duel(&alone, &together).map_err(TuneError::Score)?.faster {
                several = middle;
            } else {
                one = middle;
            }
        }
        Ok(several)
    }
}

/// Returns, for each tuned size, the smallest transfer size for which its setting applies. It is half way to the next smaller tuned size on
/// a logarithmic scale. The setting of the smallest tuned size applies down by half of the gap to the next tuned size, or to half of its
/// own size if only one size was tuned.
fn boundaries(points: &[&TunedPoint]) -> Vec<u64> {
    let first = points.first().map_or(0, |point| point.size);
    let next = points.get(1).map_or(first.saturating_mul(4), |point| point.size);
    let below = (first as f64 * (first as f64 / next as f64).sqrt()) as u64;
    std::iter::once(whole(below.max(1))).chain(points.windows(2).map(|two| between(two[0].size, two[1].size))).collect()
}

/// Returns the geometric mean of two sizes.
fn between(a: u64, b: u64) -> u64 {
    whole((a as f64 * b as f64).sqrt() as u64)
}

/// Rounds a size of 64 KiB or more down to a multiple of [`GRAIN`] (4 KiB), which is easier to read.
fn whole(bytes: u64) -> u64 {
    if bytes >= 16 * GRAIN { bytes / GRAIN * GRAIN } else { bytes }
}
