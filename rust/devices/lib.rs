//! Implements the devices that plans run on. Each module is a [`Backend`](mpgpu_backend::Backend) or part of one. This crate does not
//! depend on contexts.
//!
//! | module | content |
//! | --- | --- |
//! | [`cuda`] | GPUs, through the CUDA driver |
//! | [`host`] | virtual devices on CPU threads |
//! | [`pattern`] | test patterns that show whether a copy has arrived |
//! | `guarded` | copies of pageable memory that report missing memory as an error |
//! | `bridge` | the kernels in `cpp/` |

mod bridge;
pub mod cuda;
mod guarded;
pub mod host;
pub mod pattern;

use mpgpu_backend as backend;
use mpgpu_backend::{panics, sync, threads, took};
use mpgpu_core::{plan, topology};
use mpgpu_ipc as ipc;
