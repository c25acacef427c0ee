//! Cost model: the time of a path, and of a set of paths together, in seconds.
//!
//! The model has three terms, each backed by a measurement (`docs/reference/model.md` has the derivation and the sources):
//!
//! - A path alone. One plain copy takes `copy + latency + bytes / rate`. A staged path cuts its bytes into `n` chunks and pipelines two
//!   hops. The slower hop sets the rate; the first chunk's faster hop and `n + 1` hand-overs of `chunk` seconds are added:
//!   `head + latency + bytes / slowest + (bytes / n) / fastest + (n + 1) · chunk`.
//! - A resource. All bytes that use it pass at its capacity, so it cannot finish before `head + Σ weight · bytes / capacity`.
//! - The issuing thread. It needs `issue` seconds for each operation, and the last chunk follows after that.
//!
//! A set of flows finishes when the last of these terms does. If any flow is staged, `join` seconds are added, because the caller's stream
//! waits for internal streams. The result is a lower bound that the planner minimises. It is not a simulation: two flows on one link are
//! assumed to share it without loss. [`simulate`] simulates, and [`timeline`] is the form in which its runs are drawn.
//!
//! The model is pure: no backend, no clock.

mod finish;
mod max_min;
mod path;
pub mod simulate;
pub mod timeline;

pub use finish::{Flow, Issue, finish};
pub use max_min::{FlowRate, MaxMin};
pub use path::{BOTH_WAYS, GRAIN, HOST_RINGS, MAX_CHUNKS, PathModel, SLOTS};

use crate::topology::{DeviceId, Machine};

/// Returns the rate of a CPU thread that copies between pageable and pinned memory, in bytes/s.
pub fn thread_rate(machine: &Machine) -> f64 {
    let gpus = (0..machine.gpu_count()).map(DeviceId::gpu);
    let links = gpus.filter_map(|gpu| machine.route(DeviceId::HOST, gpu)).map(|route| route.bandwidth);
    let fastest = links.filter(|rate| rate.is_finite()).fold(0.0, f64::max);
    if fastest > 0.0 { fastest * machine.costs().thread_copy } else { f64::INFINITY }
}
