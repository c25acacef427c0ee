//! Chooses the variant of a plan that an execution uses, by measured times. The variants of a plan are plans for the same transfers over
//! other paths. One of them consists of plain copies (one direct copy for each transfer). The rule of the choice is implemented in
//! [`adapt`](crate::adapt).
//!
//! Some executions are measured by two timestamps ("moments") in the caller's stream, before and after the execution. A later execution
//! reads these timestamps without waiting. So if a program enqueues far ahead of its streams, measured times become known late.
//!
//! All plans of a context that move the same sizes between the same devices share their measurements and their choice, whatever their
//! addresses. So the choice also works for a program that uses other buffers in each time step. A measured time includes the effects of
//! other activity of the stream and the machine, because the caller waits for that too. Captured executions use the variant that is active
//! at the time of capture.
//!
//! The context estimates which of its other streams are copying at the same time (`active`). Times measured while other streams copy are
//! kept separately from times of isolated executions, and a separate choice is made from each.

use crate::adapt::{Choice, Chooser, MAX_VARIANTS};
use crate::backend::{Backend, BackendError, Moment, StreamHandle};
use crate::sync::{AtomicU64, Mutex, lock};
use crate::units::time;
use serde::{Deserialize, Serialize};
use std::hash::BuildHasher;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Number of executions from one measured execution to the next if the active variant has not changed for some time. Recording and reading
/// two timestamps takes about 2 us of host time, so measuring adds 0.03 us per execution.
pub const STEADY: u32 = 64;

/// Maximum number of executions between two polls for measured times that are not available yet.
const MOST_PATIENCE: u32 = 16;

/// Median times of the last measured executions of a plan, in seconds. A field is `None` if no such execution was measured.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Median time in seconds of executions with the active variant of the plan.
    pub in_force: Option<f64>,
    /// Median time in seconds of executions with the variant that consists only of plain copies (one direct copy for each transfer).
    pub plain: Option<f64>,
}

/// Measured times of all plans for the same devices and sizes, as stored in a file for later runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeptShape {
    /// Hash of the machine, the library version, the transfers (devices and sizes) and the planner's options.
    pub key: String,
    /// Total size of all transfers in bytes. It is stored only for human readers of the file.
    pub bytes: u64,
    /// Time at which the measurements were stored, in seconds since 1970-01-01 UTC.
    pub at: u64,
    /// Index of the variant that was active when the measurements were stored. It is stored only for human readers of the file.
    pub in_force: usize,
    /// Median time of each variant in nanoseconds; `None` for a variant that was not measured.
    pub medians: Vec<Option<u64>>,
    /// Predicted time of each variant in nanoseconds.
    #[serde(default)]
    pub predicted: Vec<u64>,
    /// Hash of the same values as `key`, but without the size. Empty if the plan has several transfers.
    #[serde(default)]
    pub pair: String,
}

/// Errors of the model: measured time divided by predicted time of each variant of a plan, or `None` for a variant without a measured
/// time. They correct the predictions for other sizes between the same devices.
pub(super) type ModelErrors = Vec<Option<f64>>;

fn errors(predicted: &[u64], medians: &[Option<u64>]) -> ModelErrors {
    let of = |(predicted, median): (&u64, &Option<u64>)| median.filter(|_| *predicted > 0).map(|median| median as f64 / *predicted as f64);
    predicted.iter().zip(medians).map(of).collect()
}

impl KeptShape {
    /// Returns the errors of the model that the stored times show.
    pub fn errors(&self) -> ModelErrors {
        errors(&self.predicted, &self.medians)
    }

    /// Returns the time since the measurements were stored, or `None` if the stored time lies in the future.
    pub fn age(&self) -> Option<Duration> {
        now()?.checked_sub(Duration::from_secs(self.at))
    }
}

/// Returns the time since 1970-01-01 UTC, or `None` if the clock is set to an earlier time.
pub(super) fn now() -> Option<Duration> {
    SystemTime::now().duration_since(UNIX_EPOCH).ok()
}

/// Measurements by which executions choose among the variants of a plan. All plans for the same devices and sizes share these measurements,
/// whatever their addresses.
#[derive(Debug)]
pub(super) struct SharedChoice {
    /// Choice of the variant for isolated executions.
    pub(super) alone: Mutex<Choosing<Moments>>,
    /// Choice of the variant for executions that run while other streams copy.
    pub(super) beside: Mutex<Choosing<Moments>>,
    /// Expected duration of an execution in nanoseconds: predicted at first, later measured.
    pub(super) takes: AtomicU64,
    /// Measurements of an earlier run with which this choice started; `None` if there were none.
    pub(super) kept: Option<KeptShape>,
    /// Time of each variant in nanoseconds that the model predicts, without corrections.
    pub(super) predicted: Vec<u64>,
}

/// Choice among the variants of a plan, with the measurements that are not complete yet. `M` is the type of a measurement.
#[derive(Debug)]
pub struct Choosing<M> {
    pub(super) chooser: Chooser,
    executions: [u64; MAX_VARIANTS],
    measured: [u64; MAX_VARIANTS],
    under_way: Vec<M>,
    /// Number of executions until the incomplete measurements are polled again, and the current interval between two polls, in executions.
    patience: (u32, u32),
    /// True if the backend can measure executions. If false, executions always use the active variant.
    is_timed: bool,
}

/// Measurement of one execution, whose result may become available later.
pub trait Measurement {
    /// Returns the index of the variant that the execution used.
    fn variant(&self) -> usize;
    /// Returns the execution's time in nanoseconds if it is available. Does not wait.
    fn read(&mut self) -> Result<Reading, BackendError>;
}

/// Result of polling a [`Measurement`].
pub enum Reading {
    /// The execution is complete and took this time in nanoseconds.
    Known(u64),
    /// The time is not available yet.
    Later,
    /// The time will not become available at all.
    Never,
}

/// Timestamps before and after an execution.
#[derive(Debug)]
pub struct Moments {
    /// Index of the variant that the execution used.
    pub variant: usize,
    /// Timestamp before the execution.
    pub begin: Moment,
    /// Timestamp after the execution.
    pub end: Moment,
}

impl Moments {
    /// Records a timestamp in `stream`, calls `run`, which enqueues the plan's variant with index `variant`, and records a second
    /// timestamp. Returns the result of `run`, and the timestamps or the error of recording them.
    pub fn around<T, E: From<BackendError>>(
        variant: usize,
        backend: &dyn Backend,
        stream: StreamHandle,
        run: impl FnOnce() -> Result<T, E>,
    ) -> Result<(T, Result<Moments, BackendError>), E> {
        let begin = backend.mark_moment(stream);
        let done = run()?;
        Ok((done, begin.and_then(|begin| Ok(Moments { variant, begin, end: backend.mark_moment(stream)? }))))
    }
}

impl Measurement for Moments {
    fn variant(&self) -> usize {
        self.variant
    }

    fn read(&mut self) -> Result<Reading, BackendError> {
        let ns = self.end.nanoseconds_since(&*self.begin)?;
        Ok(ns.map_or(Reading::Later, Reading::Known))
    }
}

/// Description of one variant of a plan, with its measured times.
pub struct Known {
    /// Name of the variant, as shown in messages.
    pub name: &'static str,
    /// Time in seconds of one execution of the variant, as predicted by the model.
    pub predicted: f64,
    /// Median time of the last measured executions of the variant, in seconds; `None` if none was measured.
    pub median: Option<f64>,
    /// Number of executions that used the variant.
    pub executions: u64,
    /// Number of executions of the variant whose measured time is known.
    pub measured: u64,
    /// True if this is the active variant, which executions use except for trials of the other variants.
    pub is_in_force: bool,
}

impl SharedChoice {
    /// Creates the state of a choice among variants, at most [`MAX_VARIANTS`]. `predicted` contains the time in seconds that the model
    /// predicts for each variant. The first executions follow the predictions only if `is_modelled` is true. `kept` holds measurements of an
    /// earlier run, which are used only if they cover the same number of variants. `errors` corrects the predictions.
    pub fn new(predicted: &[f64], is_modelled: bool, kept: Option<&KeptShape>, errors: Option<&ModelErrors>) -> SharedChoice {
        let variants = predicted.len();
        // The seed is random, so that contexts and processes on one machine do not make trial executions of other variants at the same
        // time.
        let seed = std::hash::RandomState::new().hash_one(variants);
        let kept = kept.filter(|kept| kept.medians.len() == variants).cloned();
        let known = kept.as_ref().map_or_else(|| vec![None; variants], |kept| kept.medians.clone());
        let error = |variant: usize| errors.and_then(|errors| *errors.get(variant)?).unwrap_or(1.0);
        let corrected = predicted.iter().enumerate().map(|(variant, seconds)| seconds * error(variant));
        let expected = corrected.take(if is_modelled { variants } else { 0 });
        SharedChoice {
            alone: Mutex::new(Choosing::new(Chooser::new(&known, STEADY, seed).expecting(expected))),
            beside: Mutex::new(Choosing::new(Chooser::among_others(variants, STEADY, !seed))),
            takes: AtomicU64::new((predicted.first().copied().unwrap_or(0.0) * 1e9) as u64),
            kept,
            predicted: predicted.iter().map(|seconds| (seconds * 1e9) as u64).collect(),
        }
    }

    /// Returns the errors of the model that isolated executions in this run have shown. Returns `None` if none was measured.
    pub fn errors(&self) -> Option<ModelErrors> {
        self.to_keep().map(|(_, medians)| errors(&self.predicted, &medians))
    }

    pub(super) fn state(&self, is_beside: bool) -> &Mutex<Choosing<Moments>> {
        if is_beside { &self.beside } else { &self.alone }
    }

    /// Returns the values to store for later runs: the index of the active variant, and the median time of each variant in nanoseconds.
    /// Both are for isolated executions. Returns `None` if nothing was measured in this run.
    pub fn to_keep(&self) -> Option<(usize, Vec<Option<u64>>)> {
        let state = lock(&self.alone);
        let is_measured = state.measured.iter().any(|times| *times > 0);
        is_measured.then(|| (state.in_force(), (0..state.variants()).map(|variant| state.chooser.median(variant)).collect()))
    }
}

impl<M: Measurement> Choosing<M> {
    /// Creates a choice that starts with the times that `chooser` knows and has no incomplete measurements.
    pub fn new(chooser: Chooser) -> Choosing<M> {
        let (executions, measured) = ([0; MAX_VARIANTS], [0; MAX_VARIANTS]);
        Choosing { chooser, executions, measured, under_way: Vec::new(), patience: (0, 0), is_timed: true }
    }

    /// Returns the variant that the next execution must use, and whether to measure that execution.
    pub fn choose(&mut self) -> Choice {
        self.read();
        if !self.is_timed {
            return Choice { variant: self.in_force(), measure: false };
        }
        self.chooser.next_execution(self.under_way.len())
    }

    /// Returns the number of variants.
    pub fn variants(&self) -> usize {
        self.chooser.variants()
    }

    /// Returns the index of the active variant, which executions use except for trials.
    pub fn in_force(&self) -> usize {
        self.chooser.in_force()
    }

    /// Returns the index of the variant for executions that are captured.
    pub fn captured(&self) -> usize {
        self.chooser.unmeasurable()
    }

    /// Returns the median times of the active variant and of the plain copies, from the times read so far.
    pub fn medians(&self) -> Measured {
        Measured { in_force: self.median(self.in_force()), plain: self.median(self.variants() - 1) }
    }

    fn median(&self, variant: usize) -> Option<f64> {
        self.chooser.median(variant).map(|ns| ns as f64 * 1e-9)
    }

    /// Returns the total number of executions of all variants.
    pub(super) fn all_executions(&self) -> u64 {
        self.executions.iter().sum()
    }

    /// Counts an execution that uses the variant with index `variant`.
    pub fn takes(&mut self, variant: usize) {
        self.executions[variant] += 1;
    }

    /// Reads the measured times that are available, then returns a description of each variant. `named` yields the name of each variant and
    /// its predicted time in seconds.
    pub fn known(&mut self, named: impl Iterator<Item = (&'static str, f64)>) -> Vec<Known> {
        self.patience.0 = 0;
        self.read();
        let known = named.enumerate().map(|(variant, (name, predicted))| Known {
            name,
            predicted,
            median: self.median(variant),
            executions: self.executions[variant],
            measured: self.measured[variant],
            is_in_force: variant == self.in_force(),
        });
        known.collect()
    }

    /// Adds a measurement that is not complete yet. If `measurement` is an error, stops measuring executions of these plans.
    pub fn measure(&mut self, measurement: Result<M, BackendError>) {
        match measurement {
            Ok(measurement) => self.under_way.push(measurement),
            Err(error) => self.give_up(&error),
        }
    }

    /// Polls the incomplete measurements, and passes the times that are available to the chooser. Skips most polls while no time becomes
    /// available.
    fn read(&mut self) {
        if self.under_way.is_empty() {
            return;
        }
        if self.patience.0 > 0 {
            self.patience.0 -= 1;
            return;
        }
        let before = self.under_way.len();
        for mut measurement in std::mem::take(&mut self.under_way) {
            match measurement.read() {
                Ok(Reading::Known(ns)) => {
                    self.measured[measurement.variant()] += 1;
                    let active = self.in_force();
                    self.chooser.measured(measurement.variant(), ns.max(1));
                    if active != self.in_force() {
                        let medians: Vec<Option<u64>> = (0..self.variants()).map(|variant| self.chooser.median(variant)).collect();
                        let (now, executions) = (self.in_force(), self.all_executions());
                        log::debug!(
                            "after {executions} executions variant {now} replaces variant {active} as the active one; medians {medians:?} ns"
                        );
                    }
                }
                Ok(Reading::Later) => self.under_way.push(measurement),
                Ok(Reading::Never) => {}
                Err(error) => return self.give_up(&error),
            }
        }
        let next = match self.under_way.len() {
            0 => 0,
            // More times may become available soon.
            left if left < before => 1,
            _ => (2 * self.patience.1).clamp(1, MOST_PATIENCE),
        };
        self.patience = (next, next);
    }

    fn give_up(&mut self, error: &dyn std::fmt::Display) {
        log::debug!("a plan no longer changes its active variant, because execution times cannot be measured: {error}");
        self.is_timed = false;
        self.chooser.fix();
        self.under_way.clear();
    }
}

impl Known {
    /// Returns a human-readable description of the variant and its times in one line, without a newline.
    pub fn sentence(&self) -> String {
        let times = |count: u64| if count == 1 { "once".to_owned() } else { format!("{count} times") };
        let measured = self.median.map_or("not measured".into(), |median| format!("measured {}, {}", time(median), times(self.measured)));
        let in_force = if self.is_in_force { ", active" } else { "" };
        format!("{}: modelled {}, {measured}; executed {}{in_force}", self.name, time(self.predicted), times(self.executions))
    }

    /// Returns a description of the variant and its times as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "name": self.name,
            "modelled_seconds": self.predicted,
            "measured_seconds": self.median,
            "measured": self.measured,
            "executions": self.executions,
            "in_force": self.is_in_force,
        })
    }
}
