//! Contexts hold all state of the library: the plan cache, staging memory, executions and the checks of `mpgpu doctor`.
//!
//! Each module imports only modules above it:
//!
//! | module | content |
//! | --- | --- |
//! | [`config`] | configuration of a context, read from environment variables |
//! | [`batch`] | checks requested transfers, and describes them to the planner |
//! | [`nvtx`] | NVTX ranges for profilers |
//! | [`staging`] | placement of staging rings, and the order of executions that share staging memory |
//! | `active` | estimate of which streams are copying now |
//! | `callbacks` | calls of the caller's functions when work has finished |
//! | `holdings` | memory, streams and events that the caller holds |
//! | `claims` | GPUs that node groups have assigned to this process |
//! | `files` | files that the program has mapped with the context, as sources of copies |
//! | `registered` | host memory of the program that is registered (pinned) |
//! | `peer_memory` | memory exported to other processes, and memory imported from them |
//! | `deferred` | memory that the caller has freed, but that work or other ranks may still use |
//! | [`state`] | state that plans share with their context; it contains all of the above |
//! | [`choosing`] | choice among the variants of a plan by measured times |
//! | [`execute`] | plans and their execution |
//! | [`cache`] | cache of plans |
//! | [`probe_files`] | files in which probes (measurements of the machine) are stored |
//! | `kept` | file in which measured times of executions are stored for later runs |
//! | [`lifetime`] | the context: creating, planning and closing |
//! | `memory`, `streams`, `signals`, `sharing` | calls for memory, streams, events, signals, and memory that processes share |
//! | `late_checks` | copies whose arguments are checked while they run |
//! | `piece_paths` | GPUs that help with copies of pieces |
//! | `pieces` | copies of many pieces without a plan |
//! | `describe` | descriptions of a context as text and as JSON |
//! | `open` | opening a context from options and environment; the only module that names a concrete backend |
//! | `score` | measured times of plans, for tuning |
//! | [`harness`] | measurements of a probe on a backend |
//! | `probe` | probe: measurement of the machine |
//! | [`doctor`] | report of what works, is slow or is refused on this machine |
//!
//! The crate uses backends only through the trait `Backend`, and the planner only through the function `plan`. Like the CUDA driver, the
//! crate cannot check addresses of memory that the backend did not allocate (pageable host memory). The caller is responsible for these
//! addresses.

mod active;
pub mod batch;
pub mod cache;
mod callbacks;
pub mod choosing;
mod claims;
pub mod config;
mod deferred;
mod describe;
pub mod doctor;
mod error;
pub mod execute;
mod files;
mod foreign;
pub mod harness;
mod holdings;
mod kept;
mod late_checks;
pub mod lifetime;
mod memory;
mod neighbours;
pub mod nvtx;
mod open;
mod peer_memory;
mod piece_paths;
mod pieces;
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
pub use claims::{Claims, GpuClaim};
pub use config::{BackendChoice, Config, MOST_THREADS, NO_TUNING, PlanOptions, Verify};
pub use error::{End, Error};
pub use execute::{Plan, Trace};
pub use lifetime::{Context, ContextOptions, DeviceStatistics, Statistics};
pub use mpgpu_backend::files::Caching;
pub use open::{DISCOVERED, File, Origin, PROBED, files_here, machine_here};
pub use peer_memory::Import;
pub use pieces::{BlockArrays, BlockRequest, PieceOptions};
pub use probe::ProbeReport;
pub use score::Executed;
pub use state::ContextState;

use mpgpu_backend as backend;
use mpgpu_backend::{fault, sync, threads, took};
use mpgpu_core::{adapt, headroom, model, plan, program, topology, units};
use mpgpu_devices::{cuda, host, pattern};
use mpgpu_ipc as ipc;
use mpgpu_measure::tune;
