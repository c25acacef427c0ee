//! Tests the crates core and measure as one program. These crates have no unsafe code, so the program need not run with sanitizers.

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
