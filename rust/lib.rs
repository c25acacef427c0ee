//! Multi-path data movement inside a multi-GPU node.
//!
//! mpgpu plans the copies of one communication step (a halo exchange, say) together, over every link that helps, and executes
//! the plan every time step at the cost of one launch. Data flows through the modules in one direction, and everything left of
//! the engine is pure: no driver, no clock, no global.
//!
//! ```text
//! transfers ──► topology ──► plan ──► Program ──► engine ──► backend
//!  (what)       (which       (which    (which      (cache,     (real bytes)
//!               links)       paths)    copies)     staging)
//! ```
//!
//! | module | promise |
//! | --- | --- |
//! | [`topology`] | the machine as a graph of devices, links and shared resources; routes between devices |
//! | [`model`] | what a path and a set of paths cost, in seconds; a simulator that runs programs in virtual time |
//! | [`plan`] | transfers and a machine in, [`plan::Plan`] out; [`plan::Program`] and the validator that proves it right |
//! | [`tune`] | better options than the model's, found by scoring plans, and the file that keeps them |
//! | [`engine`] | contexts, the plan cache, staging memory, execution; knows backends only by their trait |
//! | [`backend`] | where bytes move: the host backend (virtual devices on CPU threads), and the CUDA backend |
//! | [`share`] | memory of one process that others of the same node map |
//! | [`doctor`] | what of a machine is well, slow or refused |
//! | [`units`] | sizes and times as people write them |
//! | [`ffi`] | the C ABI, the only stable interface |
#![warn(missing_docs)]

pub mod backend;
pub mod doctor;
pub mod engine;
#[cfg_attr(not(feature = "fault-injection"), allow(unreachable_pub))]
pub mod fault;
pub mod ffi;
pub mod model;
mod panics;
pub mod plan;
pub mod share;
pub mod topology;
pub mod tune;
pub mod units;
