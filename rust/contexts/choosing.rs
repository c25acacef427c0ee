//! The variants of a plan, and which of them an execution takes: the rule is [`adapt`](crate::adapt)'s.
//!
//! Some executions are measured, by two moments of the caller's stream around them. Those are read at a later execution, without waiting for
//! them: a program that runs ahead of its streams gets its times later. All plans of a context for the same sizes between the same devices, whatever
//! their addresses, measure and choose together: a program whose buffers are others at each step learns all the same. Whatever else the stream or the machine does meanwhile is part of what is
//! measured, because it is part of what the caller waits for. Captured executions take the variant that is in force when they are captured.
//!
//! What other streams of the context copy at the same time is known (`active`), so it is not left to noise: a plan learns and chooses
//! apart for executions beside others and for those alone.

use crate::adapt::{Choice, Chooser, MAX_VARIANTS};
use crate::backend::{Backend, BackendError, Moment, StreamHandle};
use crate::sync::{AtomicU64, Mutex, lock};
use crate::units::time;
use serde::{Deserialize, Serialize};
use std::hash::BuildHasher;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Executions from one measured one to the next while nothing changes: marking and reading two moments takes some 2 us of the host, 0.03 us of
/// an execution then.
pub const STEADY: u32 = 64;

/// The most measured executions whose times are not known yet.
const MOST_UNDER_WAY: usize = 8;

/// The most executions from one look at a time that was not there yet to the next.
const MOST_PATIENCE: u32 = 16;

/// Medians of the last measured executions, seconds.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Of the variant in force.
    pub in_force: Option<f64>,
    /// Of the plain copies.
    pub plain: Option<f64>,
}

/// What was measured of plans of one shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KeptShape {
    /// Of the machine, the library, the transfers and their options.
    pub key: String,
    /// Of all transfers, for people.
    pub bytes: u64,
    /// Seconds since 1970.
    pub at: u64,
    /// The variant that was in force, for people.
    pub in_force: usize,
    /// Medians of each variant, nanoseconds.
    pub medians: Vec<Option<u64>>,
}

impl KeptShape {
    /// How long ago it was measured; `None` in the future.
    pub fn age(&self) -> Option<Duration> {
        now()?.checked_sub(Duration::from_secs(self.at))
    }
}

/// Since 1970.
pub(super) fn now() -> Option<Duration> {
    SystemTime::now().duration_since(UNIX_EPOCH).ok()
}

/// What all plans of one shape know and choose.
#[derive(Debug)]
pub(super) struct SharedChoice {
    /// For executions alone, and for those beside others.
    pub(super) alone: Mutex<Choosing<Moments>>,
    pub(super) beside: Mutex<Choosing<Moments>>,
    /// Nanoseconds that an execution takes.
    pub(super) takes: AtomicU64,
    /// What an earlier run has measured, where it began with that.
    pub(super) kept: Option<KeptShape>,
}

/// What is known of variants, and what is being measured, by `M`.
#[derive(Debug)]
pub struct Choosing<M> {
    pub(super) chooser: Chooser,
    executions: [u64; MAX_VARIANTS],
    measured: [u64; MAX_VARIANTS],
    under_way: Vec<M>,
    /// Executions until those are looked at again, and the last such number.
    patience: (u32, u32),
    /// Whether this backend can be measured.
    is_timed: bool,
}

/// An execution whose time is to be known.
pub trait Measurement {
    /// What it took.
    fn variant(&self) -> usize;
    /// Its time now. Does not wait.
    fn read(&mut self) -> Result<Reading, BackendError>;
}

/// See [`Measurement::read`].
pub enum Reading {
    /// Nanoseconds.
    Known(u64),
    /// It is not there yet.
    Later,
    /// It will not be known.
    Never,
}

/// The moments around an execution.
#[derive(Debug)]
pub struct Moments {
    /// What it took.
    pub variant: usize,
    /// Before it.
    pub begin: Moment,
    /// After it.
    pub end: Moment,
}

impl Moments {
    /// Has `run` enqueue a variant in `stream` between two moments: what came of it, and where these could be had.
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

/// What is known of one variant.
pub struct Known {
    /// Its name.
    pub name: &'static str,
    /// Seconds, as modelled.
    pub predicted: f64,
    /// Median of the last measured executions, seconds.
    pub median: Option<f64>,
    /// Executions that took it.
    pub executions: u64,
    /// Those of them whose time is known.
    pub measured: u64,
    /// Whether executions take it but for tries.
    pub is_in_force: bool,
}

impl SharedChoice {
    /// Among so many variants, at most [`MAX_VARIANTS`], of which the first is thought to take so many seconds, from what an earlier run has
    /// measured of as many.
    pub fn new(variants: usize, predicted: f64, kept: Option<&KeptShape>) -> SharedChoice {
        // Contexts and processes that share a machine have to choose at different moments.
        let seed = std::hash::RandomState::new().hash_one(variants);
        let kept = kept.filter(|kept| kept.medians.len() == variants).cloned();
        let known = kept.as_ref().map_or_else(|| vec![None; variants], |kept| kept.medians.clone());
        SharedChoice {
            alone: Mutex::new(Choosing::new(Chooser::new(&known, STEADY, seed))),
            beside: Mutex::new(Choosing::new(Chooser::among_others(variants, STEADY, !seed))),
            takes: AtomicU64::new((predicted * 1e9) as u64),
            kept,
        }
    }

    pub(super) fn state(&self, is_beside: bool) -> &Mutex<Choosing<Moments>> {
        if is_beside { &self.beside } else { &self.alone }
    }

    /// The variant in force and the medians of all, as far as they were read of executions alone; `None` where nothing was.
    pub fn to_keep(&self) -> Option<(usize, Vec<Option<u64>>)> {
        let state = lock(&self.alone);
        let is_measured = state.measured.iter().any(|times| *times > 0);
        is_measured.then(|| (state.in_force(), (0..state.variants()).map(|variant| state.chooser.median(variant)).collect()))
    }
}

impl<M: Measurement> Choosing<M> {
    /// Nothing is known of its variants but what the chooser knows.
    pub fn new(chooser: Chooser) -> Choosing<M> {
        let (executions, measured) = ([0; MAX_VARIANTS], [0; MAX_VARIANTS]);
        Choosing { chooser, executions, measured, under_way: Vec::new(), patience: (0, 0), is_timed: true }
    }

    /// What the next execution is to take.
    pub fn choose(&mut self) -> Choice {
        self.read();
        if !self.is_timed {
            return Choice { variant: self.in_force(), measure: false };
        }
        let choice = self.chooser.next_execution();
        // One that cannot be measured is no try.
        if choice.measure && self.under_way.len() < MOST_UNDER_WAY {
            choice
        } else {
            Choice { variant: self.chooser.unmeasured(), measure: false }
        }
    }

    /// How many there are.
    pub fn variants(&self) -> usize {
        self.chooser.variants()
    }

    /// The variant that is executed but for tries.
    pub fn in_force(&self) -> usize {
        self.chooser.in_force()
    }

    /// The last medians that were read.
    pub fn medians(&self) -> Measured {
        Measured { in_force: self.median(self.in_force()), plain: self.median(self.variants() - 1) }
    }

    fn median(&self, variant: usize) -> Option<f64> {
        self.chooser.median(variant).map(|ns| ns as f64 * 1e-9)
    }

    /// Of all variants together.
    pub(super) fn all_executions(&self) -> u64 {
        self.executions.iter().sum()
    }

    /// An execution takes this one.
    pub fn takes(&mut self, variant: usize) {
        self.executions[variant] += 1;
    }

    /// What is known of each, with times that are there now, its name, and what the model says of it, in seconds.
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

    /// An execution is measured, or cannot be.
    pub fn measure(&mut self, measurement: Result<M, BackendError>) {
        match measurement {
            Ok(measurement) => self.under_way.push(measurement),
            Err(error) => self.give_up(&error),
        }
    }

    /// Reads the times that are there.
    fn read(&mut self) {
        if self.under_way.is_empty() {
            return;
        }
        if self.patience.0 > 0 {
            self.patience.0 -= 1;
            return;
        }
        for mut measurement in std::mem::take(&mut self.under_way) {
            match measurement.read() {
                Ok(Reading::Known(ns)) => {
                    self.measured[measurement.variant()] += 1;
                    let before = self.in_force();
                    self.chooser.measured(measurement.variant(), ns.max(1));
                    if before != self.in_force() {
                        let medians: Vec<Option<u64>> = (0..self.variants()).map(|variant| self.chooser.median(variant)).collect();
                        let (now, executions) = (self.in_force(), self.all_executions());
                        log::debug!(
                            "after {executions} executions variant {now} is in force and no longer {before}; medians {medians:?} ns"
                        );
                    }
                }
                Ok(Reading::Later) => self.under_way.push(measurement),
                Ok(Reading::Never) => {}
                Err(error) => return self.give_up(&error),
            }
        }
        let next = if self.under_way.is_empty() { 0 } else { (2 * self.patience.1).clamp(1, MOST_PATIENCE) };
        self.patience = (next, next);
    }

    fn give_up(&mut self, error: &dyn std::fmt::Display) {
        log::debug!("a plan goes on with the variant in force, unmeasured: {error}");
        self.is_timed = false;
        self.under_way.clear();
    }
}

impl Known {
    /// For people, without an end of line.
    pub fn sentence(&self) -> String {
        let times = |count: u64| if count == 1 { "once".to_owned() } else { format!("{count} times") };
        let measured = self.median.map_or("not measured".into(), |median| format!("measured {}, {}", time(median), times(self.measured)));
        let in_force = if self.is_in_force { ", in force" } else { "" };
        format!("{}: modelled {}, {measured}; executed {}{in_force}", self.name, time(self.predicted), times(self.executions))
    }

    /// For programs.
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
