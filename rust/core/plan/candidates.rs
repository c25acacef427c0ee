//! The paths that a transfer could take, and why others are out of the question.

use super::options::Options;
use crate::model::PathModel;
use crate::program::Shape;
use crate::topology::{DeviceId, Machine, MemoryKind, ResourceId};

/// A path that the split may use.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    /// Index into the demands.
    pub demand: u32,
    /// The device whose memory bytes are staged in; `None` for the direct path.
    pub via: Option<DeviceId>,
    /// Rates, latency and resources.
    pub model: PathModel,
}

/// Why a path is not part of a plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// One of its hops has no route.
    NoRoute,
    /// It draws on all resources of the direct path, so it takes from it whatever it adds.
    SharesDirect {
        /// The one of them with the least capacity.
        resource: ResourceId,
    },
    /// An option forbids it.
    Option(&'static str),
    /// The driver stages pageable host memory by itself.
    Pageable,
    /// Its fixed cost alone exceeds the time that the other paths need.
    FixedCost {
        /// Seconds before its first byte can arrive.
        seconds: f64,
        /// Seconds in which the batch is done without it.
        without: f64,
    },
    /// The split gives it nothing, or less than one hand-over of chunks is worth.
    NoShare,
    /// The plan with several paths is not faster than without.
    NotFaster {
        /// Simulated seconds with them.
        seconds: f64,
        /// Simulated seconds without.
        one_path: f64,
    },
    /// Copies of one GPU go to several others by turns, which last as long as each other while each goes whole.
    Turns,
    /// The plan is faster without what the paths pass.
    Slower(&'static str),
    /// Its staging slots don't fit into the bound.
    Staging {
        /// Bytes that each staging ring on the device may have.
        ring_bytes: u64,
    },
}

/// A path that was considered and left out.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejection {
    /// The device that it would have passed; `None` for the direct path.
    pub via: Option<DeviceId>,
    /// Why.
    pub reason: Reason,
}

/// The paths of one demand: the direct one first, where there is one.
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
        None => rejected.push(Rejection { via: None, reason: Reason::NoRoute }),
    }
    // Inside one device, and between two host memories, no GPU's link helps.
    if src == dst || (src.is_host() && dst.is_host()) {
        return;
    }
    let between_gpus = !src.is_host() && !dst.is_host();
    let gpus = (0..machine.gpu_count()).map(DeviceId::gpu);
    let hosts = (0..machine.host_count()).map(DeviceId::host).filter(|_| between_gpus);
    for via in gpus.chain(hosts).filter(|&via| via != src && via != dst) {
        let mut reject = |reason| rejected.push(Rejection { via: Some(via), reason });
        let (Some(first), Some(second)) = (machine.route(src, via), machine.route(via, dst)) else {
            reject(Reason::NoRoute);
            continue;
        };
        if via.is_host() && !options.host_path {
            reject(Reason::Option("host_path is off"));
            continue;
        }
        if !via.is_host() && !options.relays.has(via) {
            reject(Reason::Option("relay_gpus leaves it out"));
            continue;
        }
        if direct.is_some() && [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable) {
            reject(Reason::Pageable);
            continue;
        }
        let model = PathModel::new(machine, &[first, second]);
        // Moving bytes from such a path to the direct one lowers or keeps the load of every resource: it can never help,
        // whatever else is in the batch. Behind an NVSwitch this rules out every relay, because the ports are resources.
        if let Some(direct) = &direct
            && let Some(resource) = covers(&model, direct, machine)
        {
            reject(Reason::SharesDirect { resource });
            continue;
        }
        found.push(Candidate { demand, via: Some(via), model });
    }
}

/// Where `path` draws on every resource of `direct` at least as much, the tightest of them.
fn covers(path: &PathModel, direct: &PathModel, machine: &Machine) -> Option<ResourceId> {
    let weight = |r| path.weights.binary_search_by_key(&r, |w| w.0).map_or(0.0, |at| path.weights[at].1);
    if direct.weights.iter().any(|&(resource, needs)| weight(resource) < needs) {
        return None;
    }
    let capacity = |r: ResourceId| machine.resources()[r.0 as usize].capacity;
    direct.weights.iter().map(|w| w.0).min_by(|a, b| capacity(*a).total_cmp(&capacity(*b)))
}
