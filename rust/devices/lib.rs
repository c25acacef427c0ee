//! Implements the backends, which execute copies on NVIDIA GPUs or on virtual devices. Each module is a
//! [`Backend`](mpgpu_backend::Backend) or part of one. This crate does not depend on the crate `contexts`, which uses the backends.
//!
//! | module | content |
//! | --- | --- |
//! | [`cuda`] | GPUs, through the CUDA driver |
//! | [`host`] | virtual devices on CPU threads |
//! | [`pattern`] | test patterns that show whether the data of a copy has arrived |
//! | `guarded` | copies of pageable memory that report missing memory as an error |
//! | `block_list` | argument of the kernel that copies pieces |
//! | `bridge` | private interface to the C++ kernels in `cpp/` |

mod block_list;
mod bridge;
pub mod cuda;
mod guarded;
pub mod host;
pub mod pattern;

use mpgpu_backend as backend;
use mpgpu_backend::{panics, sync, threads, took};
use mpgpu_core::{plan, topology};
use mpgpu_ipc as ipc;
