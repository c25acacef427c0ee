//! The devices that plans run on: each module here is a [`Backend`](mpgpu_backend::Backend), or part of one. Nothing here knows contexts.
//!
//! | module | promise |
//! | --- | --- |
//! | [`cuda`] | GPUs, through the CUDA driver |
//! | [`host`] | virtual devices on CPU threads |
//! | [`pattern`] | bytes that show whether a copy has arrived |
//! | `bridge` | the kernels in `cpp/` |

mod bridge;
pub mod cuda;
pub mod host;
pub mod pattern;

use mpgpu_backend as backend;
use mpgpu_backend::{panics, sync, threads, took};
use mpgpu_core::{plan, topology};
use mpgpu_ipc as ipc;
