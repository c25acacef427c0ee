//! Where plans are executed: contexts, staging, the backends, and memory between processes.
//!
//! Each module imports only modules above it:
//!
//! | module | promise |
//! | --- | --- |
//! | `took` | how long steps take, for the log |
//! | [`host`] | the host backend: virtual devices on CPU threads |
//! | [`cuda`] | the CUDA backend |
//! | [`harness`] | what a probe asks to be timed, timed on a backend |
//! | [`context`] | contexts, the plan cache, staging memory, execution; knows backends by their trait |
//! | [`doctor`] | what of a machine is well, slow or refused |

mod bridge;
pub mod context;
pub mod cuda;
pub mod doctor;
pub mod harness;
pub mod host;
mod nvtx;
mod pattern;
mod took;

use mpgpu_backend as backend;
use mpgpu_backend::{fault, panics, sync, threads};
use mpgpu_core::{adapt, headroom, model, plan, program, topology, units};
use mpgpu_ipc as ipc;
use mpgpu_measure::{probe, tune};
