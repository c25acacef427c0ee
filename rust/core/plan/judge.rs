//! The judge of complete plans: the simulator plays each that is proposed, and the fastest is kept.

use super::options::Options;
use crate::model::simulate::{Executor, Scenario};
use crate::program::{Engine, Mechanism, Op, Program, Shape};
use crate::topology::{Machine, MemoryKind};

/// What all proposals of a batch may take together: copies times those that move at once. The first is played whatever it takes. A count, so that the
/// plan does not depend on the machine that makes it; a second of it is some 10^8.
const BUDGET: u64 = 30_000_000;

/// By how much a later proposal has to be faster: rounding is no gain.
const LEAST_GAIN: f64 = 1e-3;

/// A proposal that was played.
pub(super) struct Played<T> {
    pub program: Program,
    pub executor: Engine,
    /// Simulated seconds.
    pub seconds: f64,
    /// Of the simulated rate, which machines reach.
    part: f64,
    /// From which its plan is made.
    pub of: T,
}

/// Plays what is proposed for one batch.
pub(super) struct Judge<'a, T> {
    machine: &'a Machine,
    batch: &'a [Shape],
    options: &'a Options,
    left: u64,
    best: Option<Played<T>>,
    /// Seconds of the last that was played.
    last: f64,
}

impl<'a, T> Judge<'a, T> {
    pub fn new(machine: &'a Machine, batch: &'a [Shape], options: &'a Options) -> Self {
        Judge { machine, batch, options, left: BUDGET, best: None, last: f64::INFINITY }
    }

    /// Seconds of the best so far.
    pub fn seconds(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |best| best.seconds)
    }

    pub fn best(&self) -> Option<&Played<T>> {
        self.best.as_ref()
    }

    pub fn best_mut(&mut self) -> Option<&mut Played<T>> {
        self.best.as_mut()
    }

    /// Seconds of the last that was played.
    pub fn last(&self) -> f64 {
        self.last
    }

    /// Whatever comes next wins.
    pub fn forget(&mut self) {
        self.best = None;
    }

    pub fn into_best(self) -> Option<Played<T>> {
        self.best
    }

    /// Whether what takes so long at least cannot win.
    pub fn is_beaten(&self, least: f64) -> bool {
        self.best.as_ref().is_some_and(|best| least >= best.seconds / best.part * (1.0 - LEAST_GAIN))
    }

    /// Whether something has been played, and a program of so many copies, at least two of which move at once, is more than may be.
    pub fn is_too_much(&self, copies: u64) -> bool {
        self.best.is_some() && 2 * copies > self.left
    }

    /// Plays a program by each of those who may run it. True if it is the best so far.
    pub fn offer(&mut self, program: Program, of: impl FnOnce() -> T) -> bool {
        self.offer_at(1.0, program, of)
    }

    /// The same of a program that machines run at this part of the simulated rate.
    pub fn offer_at(&mut self, part: f64, program: Program, of: impl FnOnce() -> T) -> bool {
        if self.best.is_some() && self.options.engine == Engine::Auto && slows_engines(&program, self.batch) {
            return false;
        }
        let mut best: Option<(f64, Engine)> = None;
        let effort = effort(&program);
        for &executor in executors(self.batch, self.options, &program) {
            let is_first = self.best.is_none() && best.is_none();
            if !is_first && effort > self.left {
                break;
            }
            self.left = self.left.saturating_sub(effort);
            let Some(seconds) = play(self.machine, self.batch, self.options.staging_bytes, &program, executor) else { break };
            if best.is_none_or(|best| seconds < best.0) {
                best = Some((seconds, executor));
            }
        }
        self.last = best.map_or(f64::INFINITY, |best| best.0);
        let Some((seconds, executor)) = best.filter(|best| self.best.is_none() || !self.is_beaten(best.0 / part)) else { return false };
        self.best = Some(Played { program, executor, seconds, part, of: of() });
        true
    }
}

/// Simulated seconds of a program; `None` where it cannot be played.
pub(super) fn play(machine: &Machine, batch: &[Shape], staging_bytes: u64, program: &Program, executor: Engine) -> Option<f64> {
    let mut scenario = Scenario::new(machine, staging_bytes);
    let bound = scenario.bind(program, batch).ok()?;
    scenario.execute(bound, Executor::of(executor), 0);
    Some(scenario.seconds())
}

/// Whether kernels write or read host memory beside copy engines, which the simulator does not know to be slow: see `choose` of the mechanisms.
fn slows_engines(program: &Program, batch: &[Shape]) -> bool {
    let is_in_host = |place| program.device(batch, place).is_host();
    let is_kernel = |op: &Op| op.mechanism == Mechanism::Kernel;
    program.ops.iter().any(|op| is_kernel(op) && op.copies.iter().any(|copy| is_in_host(copy.from) || is_in_host(copy.to)))
        && program.ops.iter().any(|op| !is_kernel(op))
}

/// Copies times those that may move at once.
fn effort(program: &Program) -> u64 {
    let mut lanes = vec![0_u64; program.lanes.len()];
    let mut copies = 0;
    for op in &program.ops {
        let own = op.copies.len() as u64;
        lanes[op.lane.0 as usize] = lanes[op.lane.0 as usize].max(own);
        copies += own;
    }
    copies.saturating_mul(lanes.iter().sum::<u64>())
}

/// Who may run a program: where the caller leaves that open, streams, a graph, or either.
///
/// Memory that the driver stages by itself is none for a graph, and a graph has no node for a batch. A single copy stays on the stream, where it ends as
/// soon; a single kernel is a graph, which has its arguments already (two H200, 52 messages of 24 KB and less: 10.0 us, of which 2.0 to issue, and 13.7
/// and 5.2 in a stream). Copies that follow each other in one lane, or in several without waiting for another, may be faster on streams; else a graph is
/// issued faster.
fn executors(batch: &[Shape], options: &Options, program: &Program) -> &'static [Engine] {
    let is_pageable = |shape: &Shape| shape.bytes > 0 && [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable);
    let of = |op: &Op| op.mechanism;
    match options.engine {
        Engine::Stream => &[Engine::Stream],
        Engine::Graph => &[Engine::Graph],
        Engine::Batch => &[Engine::Batch],
        Engine::Kernel => &[Engine::Kernel],
        Engine::Auto if batch.iter().any(is_pageable) => &[Engine::Stream],
        Engine::Auto if program.ops.iter().any(|op| of(op) == Mechanism::Batch) => &[Engine::Stream],
        Engine::Auto if program.lanes.len() < 2 => {
            if program.ops.iter().any(|op| of(op) == Mechanism::Kernel) {
                &[Engine::Graph]
            } else {
                &[Engine::Stream]
            }
        }
        Engine::Auto if program.ops.iter().any(|op| !op.after.is_empty()) && !follow_each_other(program) => &[Engine::Graph],
        Engine::Auto => &[Engine::Stream, Engine::Graph],
    }
}

/// Whether plain copies follow each other in a lane without waiting for another lane.
fn follow_each_other(program: &Program) -> bool {
    let mut last = vec![false; program.lanes.len()];
    program.ops.iter().any(|op| {
        let is_free = op.mechanism == Mechanism::Copy && op.after.is_empty();
        std::mem::replace(&mut last[op.lane.0 as usize], is_free) && is_free
    })
}
