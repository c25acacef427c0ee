//! Where plans are executed: contexts, staging, the backends, and memory between processes.
//!
//! Each module imports only modules above it:
//!
//! | module | promise |
//! | --- | --- |
//! | [`backend`] | the trait that every backend implements, and its values |
//! | `sync` | locks, which a model checker may replace |
//! | `threads` | threads of the library, which take no signal of the program |
//! | `took` | how long steps take, for the log |
//! | [`ipc`] | memory of one process that others of the same node map |
//! | [`host`] | the host backend: virtual devices on CPU threads |
//! | [`cuda`] | the CUDA backend |
//! | [`harness`] | what a probe asks to be timed, timed on a backend |
//! | [`context`] | contexts, the plan cache, staging memory, execution; knows backends by their trait |
//! | [`doctor`] | what of a machine is well, slow or refused |

pub mod backend;
mod bridge;
pub mod context;
pub mod cuda;
pub mod doctor;
#[cfg_attr(not(feature = "fault-injection"), allow(unreachable_pub))]
pub mod fault;
pub mod harness;
pub mod host;
pub mod ipc;
mod nvtx;
pub mod panics;
mod pattern;
mod sync;
mod threads;
mod took;

use mpgpu_core::{adapt, headroom, model, plan, program, topology, units};
use mpgpu_measure::{probe, tune};
