//! Scores plans by simulated time.

use super::score::Score;
use crate::model::simulate::{Executor, Scenario, SimulationError};
use crate::plan::{Plan, Shape};
use crate::topology::Machine;

/// Scores plans in the simulator as the CUDA backend would execute them. Graphs are instantiated before the measured execution.
#[derive(Copy, Clone, Debug)]
pub struct Simulated<'a> {
    /// Machine that is simulated.
    pub machine: &'a Machine,
}

impl Score for Simulated<'_> {
    type Error = SimulationError;

    fn seconds(&mut self, plan: &Plan) -> Result<f64, SimulationError> {
        let shapes: Vec<Shape> = plan.transfers.iter().map(|transfer| transfer.shape).collect();
        let mut scenario = Scenario::new(self.machine, plan.options.staging_bytes);
        let bound = scenario.bind(&plan.program, &shapes)?;
        scenario.execute(bound, Executor::of(plan.executor), 0);
        Ok(scenario.seconds())
    }

    /// Returns half a per cent. Simulated times have no noise, but a smaller gain could not be noticed on a real machine.
    fn least_gain(&self) -> f64 {
        0.005
    }
}
