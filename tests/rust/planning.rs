//! The tests of the pure layers, core and measure, as one program. No line in them is unsafe, so sanitizers have nothing to find here.

mod common;

mod adapt;
mod alone;
mod collective;
mod fluid_bound;
mod hidden;
mod laws;
mod planner;
mod probe;
mod probe_replay;
mod ranks;
mod simulator;
mod topology;
mod trees;
mod validator;
