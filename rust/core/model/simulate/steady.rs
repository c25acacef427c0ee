//! Simulates the steady state of a communication step that is executed repeatedly, with several executions in flight.

use super::{Executor, Scenario, Simulation, SimulationError};
use crate::program::{Engine, Program, Shape};
use crate::topology::Machine;
use std::sync::Arc;

/// Work of one process in each communication step.
pub struct Rank {
    /// Program that the process executes in the communication step. Its staging memory is not shared with other processes.
    pub program: Arc<Program>,
    /// Method by which the program is issued.
    pub engine: Engine,
    /// Limit of this process's staging memory on each device, bytes.
    pub staging_bytes: u64,
    /// Transfers that the program was planned for.
    pub shapes: Vec<Shape>,
    /// Duration of a kernel that runs before the transfers in the stream, seconds; 0 for no kernel.
    pub kernel: f64,
}

/// Result of simulating a communication step in the steady state.
pub struct Steady {
    /// Time of one communication step in seconds. It is the time between the ends of two successive groups of concurrent steps, divided by
    /// the number of steps in a group.
    pub seconds: f64,
    /// Number of bytes that all ranks together transfer in a communication step.
    pub bytes: u64,
    /// Simulation of all executed communication steps.
    pub run: Simulation,
}

impl Steady {
    /// Returns the total bandwidth of all ranks in GB/s (10^9 bytes/s).
    pub fn rate(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }
}

/// Number of times that each rank issues its concurrent steps and waits for them. The first time begins on an idle machine; the last time
/// gives the result.
const ROUNDS: usize = 2;

/// Simulates a machine on which every rank repeatedly issues `window` concurrent steps and then waits for all of them, as the bandwidth
/// tests of the OSU Micro-Benchmarks do. Each step has its own stream and buffers. Every rank has its own host thread and staging memory.
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
