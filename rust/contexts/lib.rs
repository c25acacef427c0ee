//! Contexts: the one place with state. The plan cache, staging memory, execution, and what a doctor finds.
//!
//! Each module imports only modules above it:
//!
//! | module | promise |
//! | --- | --- |
//! | [`config`] | the environment, read once, into a plain value |
//! | [`batch`] | which transfers are accepted, and what the planner is told of them |
//! | [`nvtx`] | ranges that a profiler shows |
//! | [`staging`] | where staging rings lie, and the order of executions that share bytes of it |
//! | `active` | which streams copy now |
//! | `callbacks` | functions that are called when work has finished |
//! | `holdings` | what the caller holds |
//! | `registered` | host memory of the program's own that it has registered |
//! | `peer_memory` | which memory other processes may map, and which memory of theirs is mapped here |
//! | `deferred` | memory that was freed in stream order |
//! | [`state`] | all of these: what plans keep of their context |
//! | [`choosing`] | which variant an execution takes, by how long they take |
//! | [`execute`] | a plan, and one run of it |
//! | [`cache`] | the same request again is a look-up |
//! | [`probe_files`] | the files in which probes are kept |
//! | `kept` | what executions took, kept for later runs |
//! | [`lifetime`] | a context: what it owns, how it plans and closes |
//! | `memory`, `streams`, `signals`, `sharing` | what a caller has of it, and shares with other processes |
//! | `describe` | a context in words |
//! | `open` | opens one by options and environment: the only place that names a concrete backend |
//! | `score` | what a plan takes, by executing it |
//! | [`harness`] | what a probe asks to be timed, timed on a backend |
//! | `probe` | measuring the machine |
//! | [`doctor`] | what of a machine is well, slow or refused |
//!
//! Backends are known by their trait, the planner by its function. Addresses are trusted as a driver trusts them: memory that the backend has
//! not given out (ordinary host memory) is the caller's word.

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
