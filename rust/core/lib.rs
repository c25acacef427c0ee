//! The pure part of mpgpu: a machine and a batch of transfers in, a plan and its program out, and a simulator that runs programs in
//! virtual time. No driver, no clock, no global.
//!
//! Each module imports only modules above it:
//!
//! | module | promise |
//! | --- | --- |
//! | [`units`] | sizes and times as people write them |
//! | [`rank`] | numbers that callers pass in place of a rank |
//! | [`headroom`] | whether there is memory for what a caller counts |
//! | [`topology`] | the machine as a graph of devices, links and shared resources; routes between devices |
//! | [`program`] | operations with dependencies, and the validator that proves a program right |
//! | [`model`] | what a path and a set of paths cost, in seconds; the simulator |
//! | [`plan`] | transfers and a machine in, [`plan::Plan`] out |
//! | [`collective`] | what moves in a broadcast, a scatter, a gather, an all-gather, an all-to-all |
//! | [`adapt`] | which variant of a plan to execute, by how long its executions took; played in virtual time |
#![forbid(unsafe_code)]

pub mod adapt;
pub mod collective;
pub mod headroom;
pub mod model;
pub mod plan;
pub mod program;
pub mod rank;
pub mod topology;
pub mod units;
