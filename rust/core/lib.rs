//! Core of mpgpu without side effects: plans a batch of transfers for a machine, translates the plan to a program, and simulates programs
//! in virtual time. It uses no driver, no clock and no global state.
//!
//! Each module imports only modules above it in this table:
//!
//! | module | content |
//! | --- | --- |
//! | [`units`] | text form of sizes and times |
//! | [`rank`] | special numbers that callers may pass instead of a rank |
//! | [`headroom`] | check of available memory for lists whose length the caller determines |
//! | [`topology`] | the machine as a graph of devices, links and shared resources; routes between devices |
//! | [`program`] | operations with dependencies, and the validator that proves a program correct |
//! | [`model`] | cost in seconds of a path and of a set of paths; the simulator |
//! | [`plan`] | the planner, which creates a [`plan::Plan`] from transfers and a machine |
//! | [`collective`] | the copies of a broadcast, a scatter, a gather, an all-gather and an all-to-all |
//! | [`adapt`] | choice of a plan variant by measured execution times, and its simulation |
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
