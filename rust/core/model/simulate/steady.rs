//! The steady state of a step that is done again and again, some in flight at once.

use super::{Executor, Scenario, Simulation, SimulationError};
use crate::program::{Engine, Program, Shape};
use crate::topology::Machine;
use std::sync::Arc;

/// What one process does in a step.
pub struct Rank {
    /// Runs with staging memory of the rank's own.
    pub program: Arc<Program>,
    /// Who runs it.
    pub engine: Engine,
    /// The bound of that memory on each device.
    pub staging_bytes: u64,
    /// The transfers.
    pub shapes: Vec<Shape>,
    /// Seconds of a kernel that comes before them in the stream.
    pub kernel: f64,
}

/// What a step takes once the first is over.
pub struct Steady {
    /// Seconds from the end of one round of steps to the end of the next, over the steps of a round.
    pub seconds: f64,
    /// Bytes of a step.
    pub bytes: u64,
    /// All rounds.
    pub run: Simulation,
}

impl Steady {
    /// 10^9 bytes/s.
    pub fn rate(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }
}

/// Rounds that are run. The first begins on an idle machine; the last is what counts.
const ROUNDS: usize = 2;

/// Runs `window` steps of every rank at once, again and again. Every rank has a host thread and staging memory of its own; in each round it
/// issues its steps, each in a stream of its own and with buffers of its own, and waits for all of them, as OMB's bandwidth tests do.
pub fn steady(machine: &Machine, ranks: &[Rank], window: u32) -> Result<Steady, SimulationError> {
    let mut scenario = Scenario::new(machine, ranks.iter().map(|rank| rank.staging_bytes).max().unwrap_or(0));
    let mut bound = Vec::new();
    for (number, rank) in ranks.iter().enumerate() {
        for _ in 0..window {
            bound.push((number, scenario.bind_in(number, &rank.program, &rank.shapes)?));
        }
    }
    for _ in 0..ROUNDS {
        let mut issued = Vec::with_capacity(bound.len());
        for (stream, &(rank, program)) in bound.iter().enumerate() {
            let executor = Executor::of(ranks[rank].engine);
            let execution = scenario.execute_on(rank, program, executor, stream as u32);
            scenario.compute(execution, ranks[rank].kernel);
            issued.push((rank, execution));
        }
        for (rank, execution) in issued {
            scenario.wait(rank, execution);
        }
    }
    let run = scenario.run();
    let ends: Vec<f64> = run.executions.chunks(bound.len()).map(|round| round.iter().map(|times| times.done).fold(0.0, f64::max)).collect();
    let bytes = ranks.iter().flat_map(|rank| &rank.shapes).map(|shape| shape.bytes).sum();
    Ok(Steady { seconds: (ends[ROUNDS - 1] - ends[ROUNDS - 2]) / f64::from(window), bytes, run })
}
