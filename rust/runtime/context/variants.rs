//! The variants of a plan, and which of them an execution takes: the rule is [`adapt`](crate::adapt)'s.
//!
//! Some executions are measured, by two moments of the caller's stream around them. Those are read at a later execution, without waiting for
//! them: a program that runs ahead of its streams gets its times later. All plans of a context for the same sizes between the same devices, whatever
//! their addresses, measure and choose together: a program whose buffers are others at each step learns all the same. Whatever else the stream or the machine does meanwhile is part of what is
//! measured, because it is part of what the caller waits for. Captured executions take the variant that is in force when they are captured.

use super::error::Error;
use super::execute::{Measured, Plan};
use super::kept::KeptShape;
use crate::adapt::{Choice, Chooser, MAX_VARIANTS, variant_name};
use crate::backend::{Backend, Completion, Moment, Report, StreamHandle};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::units::time;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

/// Executions from one measured one to the next while nothing changes: marking and reading two moments takes some 2 us of the host, 0.03 us of
/// an execution then.
const STEADY: u32 = 64;

/// The most measured executions whose times are not known yet.
const MOST_UNDER_WAY: usize = 8;

/// The most executions from one look at a time that was not there yet to the next.
const MOST_PATIENCE: u32 = 16;

/// What executions of a plan may take.
pub(super) struct Variants {
    /// Beside the plan as described, which is number 0.
    others: Box<[Plan]>,
    choice: Arc<SharedChoice>,
}

/// What all plans of one shape know and choose.
#[derive(Debug)]
pub(super) struct SharedChoice {
    state: Mutex<Choosing>,
    /// What an earlier run has measured, where it began with that.
    kept: Option<KeptShape>,
}

#[derive(Debug)]
struct Choosing {
    chooser: Chooser,
    executions: [u64; MAX_VARIANTS],
    measured: [u64; MAX_VARIANTS],
    under_way: Vec<Measurement>,
    /// Executions until those are looked at again, and the last such number.
    patience: (u32, u32),
    /// Whether this backend can be measured.
    is_timed: bool,
}

#[derive(Debug)]
struct Measurement {
    variant: usize,
    begin: Moment,
    end: Moment,
}

/// What is known of one variant.
pub(super) struct Known {
    pub name: &'static str,
    /// Seconds, as modelled.
    pub predicted: f64,
    /// Median of the last measured executions, seconds.
    pub median: Option<f64>,
    pub executions: u64,
    pub measured: u64,
    pub is_in_force: bool,
}

impl Variants {
    /// The plan as described and `others`, which `choice` was made for as many of.
    pub fn new(others: Vec<Plan>, choice: Arc<SharedChoice>) -> Variants {
        Variants { others: others.into(), choice }
    }

    fn state(&self) -> MutexGuard<'_, Choosing> {
        lock(&self.choice.state)
    }

    /// All of them, `described` among them.
    pub fn all<'a>(&'a self, described: &'a Plan) -> impl Iterator<Item = &'a Plan> {
        [described].into_iter().chain(&self.others)
    }

    fn get<'a>(&'a self, described: &'a Plan, variant: usize) -> &'a Plan {
        variant.checked_sub(1).map_or(described, |other| &self.others[other])
    }

    /// Runs one of them.
    pub fn run(&self, described: &Plan, backend: &dyn Backend, stream: StreamHandle, report: Report) -> Result<Option<Completion>, Error> {
        let Choice { variant, measure } = self.state().next();
        if !measure {
            return self.get(described, variant).run(stream, report);
        }
        // Nobody knows when a graph runs.
        if backend.is_capturing(stream)? {
            let in_force = self.state().chooser.in_force();
            return self.get(described, in_force).run(stream, report);
        }
        let begin = backend.mark_moment(stream);
        let completion = self.get(described, variant).run(stream, report)?;
        let moments = begin.and_then(|begin| Ok((begin, backend.mark_moment(stream)?)));
        let mut state = self.state();
        match moments {
            Ok((begin, end)) => state.under_way.push(Measurement { variant, begin, end }),
            Err(error) => state.give_up(&error),
        }
        Ok(completion)
    }

    /// The last medians that were read.
    pub fn measured(&self) -> Measured {
        let state = self.state();
        let median = |variant| state.chooser.median(variant).map(|ns| ns as f64 * 1e-9);
        Measured { in_force: median(state.chooser.in_force()), plain: median(self.others.len()) }
    }

    /// How long ago an earlier run measured what this one began with.
    pub fn began_with(&self) -> Option<Duration> {
        self.choice.kept.as_ref()?.age()
    }

    /// What is known of each, with times that are there now.
    pub fn known(&self, described: &Plan) -> Vec<Known> {
        let state = &mut *self.state();
        state.patience.0 = 0;
        state.read();
        let plans = self.all(described).enumerate();
        let known = plans.map(|(variant, plan)| Known {
            name: variant_name(variant, self.others.len() + 1),
            predicted: plan.planned().predicted,
            median: state.chooser.median(variant).map(|ns| ns as f64 * 1e-9),
            executions: state.executions[variant],
            measured: state.measured[variant],
            is_in_force: variant == state.chooser.in_force(),
        });
        known.collect()
    }
}

impl SharedChoice {
    /// Among so many variants, at most [`MAX_VARIANTS`], from what an earlier run has measured of as many.
    pub fn new(variants: usize, kept: Option<&KeptShape>) -> SharedChoice {
        // Contexts and processes that share a machine have to choose at different moments.
        let seed = std::hash::RandomState::new().hash_one(variants);
        let kept = kept.filter(|kept| kept.medians.len() == variants).cloned();
        let known = kept.as_ref().map_or_else(|| vec![None; variants], |kept| kept.medians.clone());
        let chooser = Chooser::new(&known, STEADY, seed);
        let (executions, measured) = ([0; MAX_VARIANTS], [0; MAX_VARIANTS]);
        let state = Choosing { chooser, executions, measured, under_way: Vec::new(), patience: (0, 0), is_timed: true };
        SharedChoice { state: Mutex::new(state), kept }
    }

    /// The variant in force and the medians of all, as far as they were read; `None` where nothing was.
    pub fn to_keep(&self) -> Option<(usize, Vec<Option<u64>>)> {
        let state = lock(&self.state);
        let variants = state.chooser.variants();
        let is_measured = state.measured.iter().any(|times| *times > 0);
        is_measured.then(|| (state.chooser.in_force(), (0..variants).map(|variant| state.chooser.median(variant)).collect()))
    }
}

impl Choosing {
    fn next(&mut self) -> Choice {
        self.read();
        let choice =
            if self.is_timed { self.chooser.next_execution() } else { Choice { variant: self.chooser.in_force(), measure: false } };
        let measure = choice.measure && self.under_way.len() < MOST_UNDER_WAY;
        // One that cannot be measured is no try.
        let choice = if measure { choice } else { Choice { variant: self.chooser.in_force(), measure } };
        self.executions[choice.variant] += 1;
        choice
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
        for measurement in std::mem::take(&mut self.under_way) {
            let Measurement { variant, begin, end } = &measurement;
            match end.nanoseconds_since(&**begin) {
                Ok(Some(ns)) => {
                    self.measured[*variant] += 1;
                    self.chooser.measured(*variant, ns.max(1));
                }
                Ok(None) => self.under_way.push(measurement),
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
        let measured = self.median.map_or("not measured".into(), |median| format!("measured {}, {} times", time(median), self.measured));
        let in_force = if self.is_in_force { ", in force" } else { "" };
        format!("{}: modelled {}, {measured}; executed {} times{in_force}", self.name, time(self.predicted), self.executions)
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
