//! Makes and scores plans for different settings. No program is scored twice.

use super::error::TuneError;
use super::score::Score;
use super::simulated::Simulated;
use super::tuning::Setting;
use crate::plan::{Engine, Options, PathPlan, Plan, Program, Shape, plan, validate};
use crate::topology::{DeviceId, Machine};
use std::sync::Arc;

/// Setting that was tried, with its plan and the time of the plan.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Setting with which the plan was made.
    pub setting: Setting,
    /// Plan that was made with the setting.
    pub plan: Arc<Plan>,
    /// Time of one execution of the plan in seconds.
    pub seconds: f64,
}

impl Trial {
    /// Returns the largest number of paths that a transfer of the plan has.
    pub fn paths(&self) -> u32 {
        self.plan.transfers.iter().map(|transfer| transfer.paths.len()).max().unwrap_or(0) as u32
    }

    /// Returns the staged paths of all transfers, each with the device that stages it.
    pub(super) fn staged(&self) -> impl Iterator<Item = (DeviceId, &PathPlan)> {
        self.plan.transfers.iter().flat_map(|transfer| transfer.paths.iter()).filter_map(|path| Some((path.via?, path)))
    }
}

/// Result of a search for a better plan.
#[derive(Clone, Debug)]
pub struct Found {
    /// Plan of the model, from which the search started.
    pub start: Trial,
    /// Plan that was found to be best, or the model's plan if no other plan is faster by more than the least gain.
    pub best: Trial,
    /// Number of plans that were scored. A setting whose program had been scored before costs nothing and does not count.
    pub evaluations: usize,
}

/// Scores settings for one batch and one engine (execution method), and remembers the scores.
pub struct Trials<'a, S> {
    machine: &'a Machine,
    batch: &'a [Shape],
    base: Options,
    /// Scorer that measures the time of plans.
    pub score: &'a mut S,
    seen: Vec<(Arc<Program>, f64)>,
}

impl<'a, S: Score> Trials<'a, S> {
    /// Creates an empty set of scores for a batch. `base` holds the value of each option that a setting does not change.
    pub fn new(machine: &'a Machine, batch: &'a [Shape], base: &Options, engine: Engine, score: &'a mut S) -> Self {
        Trials { machine, batch, base: Options { engine, ..*base }, score, seen: Vec::new() }
    }

    /// Makes the plan for a setting and scores it. Returns `None` if the batch cannot be planned with this setting.
    pub fn at(&mut self, setting: Setting) -> Result<Option<Trial>, TuneError<S::Error>> {
        match plan(self.machine, self.batch, &setting.options(&self.base)) {
            Ok(plan) => self.scored(setting, Arc::new(plan)).map(Some),
            Err(_) => Ok(None),
        }
    }

    /// Makes the plan with the model's choices and scores it. Fails if the batch cannot be planned.
    pub fn start(&mut self) -> Result<Trial, TuneError<S::Error>> {
        let plan = plan(self.machine, self.batch, &self.base).map_err(TuneError::Plan)?;
        self.scored(Setting::default(), Arc::new(plan))
    }

    fn scored(&mut self, setting: Setting, plan: Arc<Plan>) -> Result<Trial, TuneError<S::Error>> {
        // Programs usually differ in the number of operations, so this is compared first.
        let same = |program: &Program| program.ops.len() == plan.program.ops.len() && *program == *plan.program;
        if let Some((_, seconds)) = self.seen.iter().find(|(program, _)| same(program)) {
            return Ok(Trial { setting, plan, seconds: *seconds });
        }
        validate(&plan.program, plan.options.staging_bytes).map_err(TuneError::Invalid)?;
        let seconds = self.score.seconds(&plan).map_err(TuneError::Score)?;
        if log::log_enabled!(target: "mpgpu::tune", log::Level::Trace) {
            let simulated = Simulated { machine: self.machine }.seconds(&plan).map_or(f64::NAN, |simulated| simulated * 1e6);
            log::trace!(
                target: "mpgpu::tune",
                "{:.1} us, modelled {:.1}, simulated {simulated:.1}, {}, {} operations: {}",
                seconds * 1e6,
                plan.predicted * 1e6,
                plan.executor.name(),
                plan.program.ops.len(),
                parts(&plan)
            );
        }
        self.seen.push((plan.program.clone(), seconds));
        Ok(Trial { setting, plan, seconds })
    }

    /// Returns the result of a search. The best plan in the result is `best` if that plan is faster than the model's plan in a direct
    /// comparison, and the model's plan if it is not.
    pub(super) fn found(self, start: Trial, best: Trial) -> Result<Found, TuneError<S::Error>> {
        let evaluations = self.seen.len();
        let wins = best.setting != Setting::default() && self.score.duel(&start.plan, &best.plan).map_err(TuneError::Score)?.faster;
        Ok(Found { best: if wins { best } else { start.clone() }, start, evaluations })
    }

    /// Returns the largest number of paths that a transfer can have: one for each device that could relay its data, and the direct path.
    pub fn most_paths(&self) -> u32 {
        (self.machine.gpu_count() + self.machine.host_count()).saturating_sub(1).max(1)
    }
}

/// Returns the number of bytes of each path of each transfer as text for the log, for example `host0>gpu0 9056K, via gpu1 7328K in 2`,
/// where `in 2` is the number of chunks.
fn parts(plan: &Plan) -> String {
    let part = |shape: &Shape, path: &PathPlan| {
        let kib = path.bytes >> 10;
        match path.via {
            None => format!("{}>{} {kib}K", shape.src_device, shape.dst_device),
            Some(via) => format!("via {via} {kib}K in {}", path.chunks),
        }
    };
    let parts = plan.transfers.iter().flat_map(|transfer| transfer.paths.iter().map(move |path| part(&transfer.shape, path)));
    parts.collect::<Vec<_>>().join(", ")
}
