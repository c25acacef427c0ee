//! Tests the pure layers, core and measure, as one program. They contain no unsafe code, so sanitizers are not needed here.

mod common;

mod adapt;
mod alone;
mod collective;
mod fluid_bound;
mod hidden;
mod planner;
mod probe;
mod probe_replay;
mod ranks;
mod simulator;
mod topology;
mod trees;
mod validator;
