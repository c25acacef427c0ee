//! Finds the paths that a transfer could use, and the reasons why other paths are excluded.

use super::options::Options;
use crate::model::PathModel;
use crate::program::Shape;
use crate::topology::{DeviceId, Machine, MemoryKind, ResourceId};

/// Path that may carry a part of a transfer.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    /// Demand (group of similar transfers) that the path belongs to, as an index into the demands.
    pub demand: u32,
    /// Relay device in whose memory the data is staged; `None` for the direct path.
    pub via: Option<DeviceId>,
    /// Cost model of the path: rates, latency and resources.
    pub model: PathModel,
}

/// Reason why a path is not part of a plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// A hop of the path has no route.
    NoRoute,
    /// The path uses all resources of the direct path, so it adds no capacity.
    SharesDirect {
        /// Resource of the direct path with the least capacity.
        resource: ResourceId,
    },
    /// An option forbids the path. The text names the option.
    Option(&'static str),
    /// The driver stages the transfer's pageable host memory by itself, so the data cannot be divided.
    Pageable,
    /// The path's fixed cost alone exceeds the time that the other paths need.
    FixedCost {
        /// Time until the first byte on the path can arrive, seconds.
        seconds: f64,
        /// Simulated time of the fastest plan without the path, seconds.
        without: f64,
    },
    /// The model assigns no bytes to the path, or fewer than the path could transfer during one synchronisation between chunks.
    NoShare,
    /// A plan with more paths, of which this path is one, is not faster than the plan without them.
    NotFaster {
        /// Simulated time of the plan with more paths, seconds.
        seconds: f64,
        /// Simulated time of the plan without the additional paths, seconds.
        one_path: f64,
    },
    /// The plan is faster without paths through relays of the same kind (host memory, or GPUs). The value is this path's relay.
    Slower(DeviceId),
    /// The path's staging slots exceed the limit of staging memory.
    Staging {
        /// Largest size of a staging ring that was available on the device, bytes.
        ring_bytes: u64,
    },
}

/// Path that was considered and left out, with the reason.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejection {
    /// Relay device of the path; `None` for the direct path.
    pub via: Option<DeviceId>,
    /// Reason why the path was left out.
    pub reason: Reason,
}

/// Appends the possible paths of one demand (group of similar transfers) to `found`, the direct path first if it exists, and the excluded
/// paths to `rejected`.
pub(super) fn candidates(
    machine: &Machine,
    demand: u32,
    shape: &Shape,
    options: &Options,
    found: &mut Vec<Candidate>,
    rejected: &mut Vec<Rejection>,
) {
    let (src, dst) = (shape.src_device, shape.dst_device);
    let direct = machine.route(src, dst).map(|route| PathModel::new(machine, &[route]));
    match &direct {
        Some(model) => found.push(Candidate { demand, via: None, model: model.clone() }),
        None if options.rejected => rejected.push(Rejection { via: None, reason: Reason::NoRoute }),
        None => (),
    }
    // For copies inside one device or between two host memories, the links of other GPUs do not help.
    if src == dst || (src.is_host() && dst.is_host()) {
        return;
    }
    let between_gpus = !src.is_host() && !dst.is_host();
    let gpus = (0..machine.gpu_count()).map(DeviceId::gpu);
    let hosts = (0..machine.host_count()).map(DeviceId::host).filter(|_| between_gpus);
    for via in gpus.chain(hosts).filter(|&via| via != src && via != dst) {
        let mut reject = |reason| {
            if options.rejected {
                rejected.push(Rejection { via: Some(via), reason });
            }
        };
        let (Some(first), Some(second)) = (machine.route(src, via), machine.route(via, dst)) else {
            reject(Reason::NoRoute);
            continue;
        };
        if via.is_host() && !options.host_path {
            reject(Reason::Option("host_path is off"));
            continue;
        }
        if !via.is_host() && !options.relays.has(via) {
            reject(Reason::Option("relay_gpus excludes it"));
            continue;
        }
        if direct.is_some() && [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable) {
            reject(Reason::Pageable);
            continue;
        }
        let model = PathModel::new(machine, &[first, second]);
        // Moving data from such a path to the direct one never increases the load of any resource, so the path never helps in any batch.
        // Behind an NVSwitch this excludes every relay, because the ports are resources.
        if let Some(direct) = &direct
            && let Some(resource) = covers(&model, direct, machine)
        {
            reject(Reason::SharesDirect { resource });
            continue;
        }
        found.push(Candidate { demand, via: Some(via), model });
    }
}

/// Returns the resource of `direct` with the least capacity, if `path` uses each resource of `direct` at least as much; otherwise `None`.
fn covers(path: &PathModel, direct: &PathModel, machine: &Machine) -> Option<ResourceId> {
    let weight = |r| path.weights.binary_search_by_key(&r, |w| w.0).map_or(0.0, |at| path.weights[at].1);
    if direct.weights.iter().any(|&(resource, needs)| weight(resource) < needs) {
        return None;
    }
    let capacity = |r: ResourceId| machine.resources()[r.0 as usize].capacity;
    direct.weights.iter().map(|w| w.0).min_by(|a, b| capacity(*a).total_cmp(&capacity(*b)))
}
