//! Where plans are executed: contexts, staging, and the ranks of a node.
//!
//! Each module imports only modules above it:
//!
//! | module | promise |
//! | --- | --- |
//! | [`harness`] | what a probe asks to be timed, timed on a backend |
//! | [`context`] | contexts, the plan cache, staging memory, execution; knows backends by their trait |
//! | [`doctor`] | what of a machine is well, slow or refused |

pub mod context;
pub mod doctor;
pub mod harness;
mod nvtx;

use mpgpu_backend as backend;
use mpgpu_backend::{fault, sync, threads, took};
use mpgpu_core::{adapt, headroom, model, plan, program, topology, units};
use mpgpu_devices::{cuda, host, pattern};
use mpgpu_ipc as ipc;
use mpgpu_measure::{probe, tune};
