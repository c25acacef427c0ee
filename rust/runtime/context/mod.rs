//! The one place with state: contexts, the plan cache, staging memory, execution.
//!
//! | file | promise |
//! | --- | --- |
//! | [`config`] | the environment, read once, into a plain value |
//! | [`lifetime`] | a context: what it owns, how it opens and closes |
//! | [`batch`] | which transfers are accepted, and what the planner is told of them |
//! | [`cache`] | the same request again is a look-up |
//! | [`staging`] | where staging rings lie, and the order of executions that share bytes of it |
//! | [`execute`] | one run of a plan |
//! | `probe` | measuring the machine, and the files in which that is kept |
//! | `score` | what a plan takes, by executing it |
//! | `callbacks` | functions that are called when work has finished |
//! | `signals` | counters that streams and threads wait for |
//! | [`node`] | ranks of a node that plan together |
//! | `deferred` | memory that was freed in stream order |
//! | `variants` | what executions take, by how long they take |
//! | `active` | which streams copy now |
//! | `kept` | that, kept for later runs |
//! | `sharing` | memory exported to other processes, and memory of theirs |
//!
//! Backends are known by their trait; the one exception is `open`, which picks one by name. The planner is known by its
//! function. There is no `unsafe` here, but addresses are trusted as a driver trusts them: memory that the backend has not given
//! out (ordinary host memory) is the caller's word.

mod active;
pub mod batch;
pub mod cache;
mod callbacks;
pub mod config;
mod deferred;
mod describe;
mod error;
pub mod execute;
mod holdings;
mod kept;
pub mod lifetime;
pub mod node;
mod open;
mod probe;
mod registered;
mod score;
mod sharing;
mod signals;
pub mod staging;
mod variants;

pub use batch::{End, Transfer};
pub use cache::CacheStatistics;
pub use callbacks::Callback;
pub use config::{BackendChoice, Config, MOST_THREADS, NO_TUNING, PlanOptions, Verify};
pub use error::Error;
pub use execute::{Measured, Plan, Trace};
pub use lifetime::{Context, ContextOptions, DeviceStatistics, Statistics};
pub use open::{DISCOVERED, File, Origin, PROBED, files_here, machine_here};
pub use probe::ProbeReport;
pub use score::Executed;
