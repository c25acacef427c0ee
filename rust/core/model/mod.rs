//! Cost model: predicts the time in seconds of a transfer along one path, and of transfers along several paths at the same time.
//!
//! The model has three terms, each backed by a measurement (`docs/reference/model.md` has the derivation and the sources):
//!
//! - Single path without other traffic. A direct copy takes `copy + latency + bytes / rate`. A staged path cuts its data into `n` chunks
//!   and pipelines two hops. The slower hop sets the rate. The time of the first chunk on the faster hop and `n + 1` synchronisations are
//!   added: `head + latency + bytes / slowest + (bytes / n) / fastest + (n + 1) · chunk`. Here `head` is the startup time of the path's
//!   first operation, and `chunk` the time of a synchronisation.
//! - Resource. All data that passes through a resource shares its capacity, so the resource is busy until at least `head + Σ weight · bytes
//!   / capacity`.
//! - Host thread. It needs `issue` seconds to issue each operation. The last chunk is transferred after its operations were issued.
//!
//! The predicted time of a set of flows is the largest of these terms. If any flow is staged, `fork_join_staged` seconds are added, because
//! the caller's stream waits for internal streams. The result is a lower bound that the planner minimises. It is not a simulation: two
//! flows on one link are assumed to share it without loss. [`simulate`] contains the simulator, and [`timeline`] the form in which
//! simulated runs are drawn.
//!
//! The model is pure: it uses no backend and no clock.

mod finish;
mod max_min;
mod path;
pub mod simulate;
pub mod timeline;

pub use finish::{Flow, Issue, finish};
pub use max_min::{FlowRate, MaxMin};
pub use path::{BOTH_WAYS, GRAIN, HOST_RINGS, MAX_CHUNKS, PathModel, SLOTS};

use crate::topology::{DeviceId, Machine};

/// Returns the rate at which one CPU thread copies between pageable and pinned memory, in bytes/s.
pub fn thread_rate(machine: &Machine) -> f64 {
    let gpus = (0..machine.gpu_count()).map(DeviceId::gpu);
    let links = gpus.filter_map(|gpu| machine.route(DeviceId::HOST, gpu)).map(|route| route.bandwidth);
    let fastest = links.filter(|rate| rate.is_finite()).fold(0.0, f64::max);
    if fastest > 0.0 { fastest * machine.costs().thread_copy } else { f64::INFINITY }
}
