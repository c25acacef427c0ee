//! Contexts hold all state of the library: the plan cache, staging memory, executions and the checks of `mpgpu doctor`.
//!
//! Each module imports only modules above it:
//!
//! | module | promise |
//! | --- | --- |
//! | [`config`] | reads the environment once, into a plain value |
//! | [`batch`] | decides which transfers are accepted, and describes them to the planner |
//! | [`nvtx`] | NVTX ranges for profilers |
//! | [`staging`] | placement of staging rings, and the order of executions that share staging memory |
//! | `active` | the streams that copy now |
//! | `callbacks` | functions that are called when an execution has finished |
//! | `holdings` | memory, streams and events that the caller holds |
//! | `registered` | the program's own host memory that it has registered |
//! | `peer_memory` | memory exported to other processes, and memory imported from them |
//! | `deferred` | memory that was freed in stream order |
//! | [`state`] | all of the above: the state that plans share with their context |
//! | [`choosing`] | choice of the variant that an execution uses, by measured times |
//! | [`execute`] | a plan, and one execution of it |
//! | [`cache`] | cache of plans: a repeated request is a look-up |
//! | [`probe_files`] | the files in which probes are kept |
//! | `kept` | measured times of executions, kept in a file for later runs |
//! | [`lifetime`] | a context: its contents, planning and closing |
//! | `memory`, `streams`, `signals`, `sharing` | what the caller gets from a context: memory, streams, events, signals and memory shared with other processes |
//! | `describe` | descriptions of a context for people and programs |
//! | `open` | opens a context from options and environment; the only module that names a concrete backend |
//! | `score` | measures the time of a plan by executing it |
//! | [`harness`] | runs the measurements of a probe on a backend |
//! | `probe` | measures the machine |
//! | [`doctor`] | finds what works, is slow or is refused on this machine |
//!
//! The crate uses backends through their trait and the planner through its function. Addresses are trusted as a CUDA driver trusts them:
//! for memory that the backend did not allocate (pageable host memory), the caller is responsible.

mod active;
pub mod batch;
pub mod cache;
mod callbacks;
pub mod choosing;
pub mod config;
mod deferred;
mod describe;
pub mod doctor;
mod error;
pub mod execute;
pub mod harness;
mod holdings;
mod kept;
pub mod lifetime;
mod memory;
pub mod nvtx;
mod open;
mod peer_memory;
mod probe;
pub mod probe_files;
mod registered;
mod score;
mod sharing;
mod signals;
pub mod staging;
pub mod state;
mod streams;

pub use batch::Transfer;
pub use cache::CacheStatistics;
pub use callbacks::Callback;
pub use choosing::Measured;
pub use config::{BackendChoice, Config, MOST_THREADS, NO_TUNING, PlanOptions, Verify};
pub use error::{End, Error};
pub use execute::{Plan, Trace};
pub use lifetime::{Context, ContextOptions, DeviceStatistics, Statistics};
pub use open::{DISCOVERED, File, Origin, PROBED, files_here, machine_here};
pub use peer_memory::Import;
pub use probe::ProbeReport;
pub use score::Executed;
pub use state::ContextState;

use mpgpu_backend as backend;
use mpgpu_backend::{fault, sync, threads, took};
use mpgpu_core::{adapt, headroom, model, plan, program, topology, units};
use mpgpu_devices::{cuda, host, pattern};
use mpgpu_ipc as ipc;
use mpgpu_measure::tune;
