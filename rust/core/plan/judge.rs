//! Judges complete plans: simulates each proposed program and keeps the fastest.

use super::options::Options;
use crate::model::simulate::{Executor, Scenario};
use crate::program::{Engine, Mechanism, Op, Program, Shape};
use crate::topology::{Machine, MemoryKind};

/// Largest total effort of all simulations of one batch. The effort of a program is the number of its copies multiplied by the number of
/// copies that may run concurrently. A simulation with an effort of 10^8 takes about a second. The first program is simulated whatever its
/// effort. The limit is not a time, so that the plan does not depend on the machine that computes it.
const BUDGET: u64 = 60_000_000;

/// Smallest relative gain for which a later program replaces the fastest one. A smaller gain may be a rounding error.
const LEAST_GAIN: f64 = 1e-3;

/// Proposed program that was simulated.
pub(super) struct Played<T> {
    pub program: Program,
    /// Method of issuing the operations with which the program is fastest.
    pub executor: Engine,
    /// Simulated time, seconds.
    pub seconds: f64,
    /// Time that is compared with the times of other programs, seconds; see [`Judge::offer_at`].
    compared: f64,
    /// Description from which the plan is created if this program is the fastest.
    pub of: T,
}

/// Simulates the programs proposed for one batch and keeps the fastest.
pub(super) struct Judge<'a, T> {
    machine: &'a Machine,
    batch: &'a [Shape],
    options: &'a Options,
    /// Effort that is left for further simulations; see [`BUDGET`].
    left: u64,
    /// Fastest program so far; `None` if no program has been simulated.
    best: Option<Played<T>>,
    /// Simulated time of the last proposed program, seconds; infinite if it was not simulated.
    last: f64,
}

impl<'a, T> Judge<'a, T> {
    pub fn new(machine: &'a Machine, batch: &'a [Shape], options: &'a Options) -> Self {
        Judge { machine, batch, options, left: BUDGET, best: None, last: f64::INFINITY }
    }

    /// Returns the simulated time of the fastest program so far, in seconds; infinite if there is none.
    pub fn seconds(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |best| best.seconds)
    }

    pub fn best(&self) -> Option<&Played<T>> {
        self.best.as_ref()
    }

    pub fn best_mut(&mut self) -> Option<&mut Played<T>> {
        self.best.as_mut()
    }

    /// Returns the simulated time of the last proposed program, in seconds; infinite if it was not simulated.
    pub fn last(&self) -> f64 {
        self.last
    }

    /// Discards the fastest program, so that the next proposed program replaces it even if it is slower.
    pub fn forget(&mut self) {
        self.best = None;
    }

    pub fn into_best(self) -> Option<Played<T>> {
        self.best
    }

    /// True if a program that takes at least `least` seconds cannot become the fastest.
    pub fn is_beaten(&self, least: f64) -> bool {
        self.best.as_ref().is_some_and(|best| least >= best.compared * (1.0 - LEAST_GAIN))
    }

    /// True if the remaining effort is too small for a program with this number of copies, at least two of which may run concurrently.
    /// Always false before the first program is simulated.
    pub fn is_too_much(&self, copies: u64) -> bool {
        self.best.is_some() && 2 * copies > self.left
    }

    /// Simulates a program with each executor that may issue it. Returns true if the program is the fastest so far. Only in that case,
    /// calls `of`, which describes the program.
    pub fn offer(&mut self, program: Program, of: impl FnOnce() -> T) -> bool {
        self.offer_at(1.0, program, of)
    }

    /// Simulates a program that reaches the fraction `part` of the simulated rate on real machines. Its simulated time is divided by `part`
    /// before it is compared. If the program forwards data, [`Costs::fork_join_staged`](crate::topology::Costs::fork_join_staged) is added,
    /// because the events that order its internal streams also delay the caller's stream. The simulator does not delay that stream: 64 MiB
    /// between two H200 took 168.6 us over two paths, and 162.0 us in the simulator. Otherwise works like [`Judge::offer`].
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
        let forwards = program.ops.iter().any(|op| !op.after.is_empty());
        let events = if forwards { self.machine.costs().fork_join_staged } else { 0.0 };
        let compared = |seconds: f64| seconds / part + events;
        let is_best = |(seconds, _): &(f64, Engine)| self.best.is_none() || !self.is_beaten(compared(*seconds));
        let Some((seconds, executor)) = best.filter(is_best) else { return false };
        self.best = Some(Played { program, executor, seconds, compared: compared(seconds), of: of() });
        true
    }
}

/// Returns the simulated time of a program, in seconds. Returns `None` if the program cannot be simulated.
pub(super) fn play(machine: &Machine, batch: &[Shape], staging_bytes: u64, program: &Program, executor: Engine) -> Option<f64> {
    let mut scenario = Scenario::new(machine, staging_bytes);
    let bound = scenario.bind(program, batch).ok()?;
    scenario.execute(bound, Executor::of(executor), 0);
    Some(scenario.seconds())
}

/// True if a program has kernels that access host memory, and also other operations. Such kernels slow down copy engines, which the
/// simulator does not model; see `choose` in `mechanism.rs` for measurements.
fn slows_engines(program: &Program, batch: &[Shape]) -> bool {
    let is_in_host = |place| program.device(batch, place).is_host();
    let is_kernel = |op: &Op| op.mechanism == Mechanism::Kernel;
    program.ops.iter().any(|op| is_kernel(op) && op.copies.iter().any(|copy| is_in_host(copy.from) || is_in_host(copy.to)))
        && program.ops.iter().any(|op| !is_kernel(op))
}

/// Returns the effort of simulating a program: the number of its copies multiplied by the number of copies that may run concurrently.
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

/// Returns the executors that are simulated for a program: the executor that the options select, or for [`Engine::Auto`] streams, a graph
/// or both.
///
/// - Programs with pageable memory that the driver stages are issued on streams, because graphs do not support them.
/// - Programs with a batched call are issued on streams, because a graph has no node for it.
/// - Programs with a single lane (internal stream) and without kernels are issued on the stream: the copies end as early as in a graph, and
///   nothing has to be instantiated.
/// - Programs with a single lane and a kernel are issued as a graph, because the kernel's arguments of up to 4 KB are then already on the
///   GPU (two H200, 52 messages of up to 24 KB: 10.0 us in total and 2.0 us to issue, compared with 13.7 and 5.2 us on a stream).
/// - Programs whose operations wait for each other are issued as graphs, unless individual copies run back to back in a lane (see
///   [`follow_each_other`]). Issuing a graph takes less time than issuing on streams, and the total time is 0.5 to 1.5 % shorter from 32
///   MiB to 1 GiB (two H200).
/// - For all other programs, both executors are simulated. Copies that run back to back in a lane may be faster on streams, because a graph
///   leaves a longer gap between them.
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

/// True if, in a lane (internal stream), an individual copy directly follows another, and neither waits for other operations.
fn follow_each_other(program: &Program) -> bool {
    let mut last = vec![false; program.lanes.len()];
    program.ops.iter().any(|op| {
        let is_free = op.mechanism == Mechanism::Copy && op.after.is_empty();
        std::mem::replace(&mut last[op.lane.0 as usize], is_free) && is_free
    })
}
