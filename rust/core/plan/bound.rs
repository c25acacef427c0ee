//! How soon a batch could be done at best, and what limits it.
//!
//! The bound is that of capacities alone: bytes flow in any number of streams over any number of relays, nothing costs time but the bytes, and equal
//! sources ([`Shape::source`]) are passed on along any trees. It is proved by prices. Where a second of each resource `r` has a price `y_r`, what
//! moves a batch in `T` seconds has at most `T · Σ y_r` to spend, and each of its flows costs at least its bytes on the cheapest way there is:
//!
//! ```text
//! T ≥ Σ_flows bytes · cheapest way(y) / Σ y_r     for any prices y ≥ 0
//! ```
//!
//! The best prices are the dual of the linear program of the flow ([`flow`](super::flow)). The resources that have a price in the end are the cut
//! that limits the batch: together they are busy from beginning to end.

use super::network::{Commodity, Network};
use super::planned::Plan;
use super::trees::load;
use crate::program::Shape;
use crate::topology::{Machine, MemoryKind, ResourceId};
use crate::units::time;
use std::collections::BTreeMap;

/// Resources with a smaller part of the bound are not named.
const LEAST_PART: f64 = 0.01;

/// The least time of a batch, as far as the capacities of the machine decide it.
#[derive(Clone, Debug, PartialEq)]
pub struct TimeBound {
    /// Seconds. 0 where nothing passes a link.
    pub seconds: f64,
    /// The resources that limit it, each with its part of all of them, the largest first. Together they are busy all the time.
    pub limits: Vec<(ResourceId, f64)>,
}

impl TimeBound {
    /// The bound of a batch on a machine.
    pub fn new(machine: &Machine, batch: &[Shape]) -> TimeBound {
        // Threads move pageable bytes through rings of host memory.
        let is_pageable = |shape: &Shape| [shape.src_kind, shape.dst_kind].contains(&MemoryKind::Pageable);
        let network = Network::of_least_draws(machine, batch.iter().any(is_pageable));
        let explored = network.explore(&flows(&network, batch), &vec![0.0; machine.resources().len()]);
        let all: f64 = explored.prices.iter().sum();
        let parts = (0..).zip(explored.prices).map(|(resource, price)| (ResourceId(resource), price / all));
        let mut limits: Vec<(ResourceId, f64)> = parts.filter(|(_, part)| *part >= LEAST_PART).collect();
        limits.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        TimeBound { seconds: explored.seconds, limits }
    }
}

/// What passes links, each source once.
fn flows(network: &Network, batch: &[Shape]) -> Vec<Commodity> {
    let mut sources: BTreeMap<(u32, usize, u64), Vec<usize>> = BTreeMap::new();
    let mut flows: BTreeMap<(usize, Vec<usize>), f64> = BTreeMap::new();
    for shape in batch.iter().filter(|shape| shape.bytes > 0 && shape.src_device != shape.dst_device) {
        let (Some(src), Some(dst)) = (network.number(shape.src_device), network.number(shape.dst_device)) else { continue };
        if shape.source == 0 {
            *flows.entry((src, vec![dst])).or_default() += shape.bytes as f64;
        } else {
            sources.entry((shape.source, src, shape.bytes)).or_default().push(dst);
        }
    }
    for ((_, src, bytes), mut to) in sources {
        to.sort_unstable();
        to.dedup();
        *flows.entry((src, to)).or_default() += bytes as f64;
    }
    let mut flows: Vec<Commodity> = flows.into_iter().map(|((src, to), bytes)| Commodity { src, to, bytes }).collect();
    for flow in &mut flows {
        let to = flow.to.iter().copied().filter(|to| network.reaches(flow, *to)).collect();
        flow.to = to;
    }
    flows.retain(|flow| !flow.to.is_empty());
    flows
}

impl Plan {
    /// How soon its batch could be done at best.
    pub fn bound(&self, machine: &Machine) -> TimeBound {
        let batch: Vec<Shape> = self.transfers.iter().map(|transfer| transfer.shape).collect();
        TimeBound::new(machine, &batch)
    }

    /// The bound, what limits it, and how near the plan comes, as a sentence; `None` where links hardly matter.
    pub(super) fn bound_in_words(&self, machine: &Machine) -> Option<String> {
        let bound = self.bound(machine);
        let name = |limit: &(ResourceId, f64)| machine.resources()[limit.0.0 as usize].name.clone();
        let names: Vec<String> = bound.limits.iter().take(4).map(name).collect();
        let more = match bound.limits.len().saturating_sub(4) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let reached = bound.seconds / self.predicted;
        // Of a few bytes it says nothing.
        (reached >= LEAST_PART).then(|| {
            let why = self.why_not_the_bound(machine, &bound).map(|why| format!(": {why}")).unwrap_or_default();
            format!("at best {}, limited by {}{more}; the plan reaches {reached:.2} of that{why}", time(bound.seconds), names.join(", "))
        })
    }

    /// What keeps a plan from nine tenths of its bound.
    pub(super) fn why_not_the_bound(&self, machine: &Machine, bound: &TimeBound) -> Option<String> {
        if bound.seconds >= 0.9 * self.predicted {
            return None;
        }
        let batch: Vec<Shape> = self.transfers.iter().map(|transfer| transfer.shape).collect();
        let loads = load(machine, &self.program, &batch);
        let (busiest, seconds) = (0..).zip(&loads).max_by(|a: &(usize, _), b| a.1.total_cmp(b.1))?;
        Some(if self.threads.is_some() {
            "threads copy between pageable memory and what the links read".into()
        } else if seconds / self.predicted < bound.seconds / seconds {
            "the rest is starting copies, handing chunks on, and links that wait for each other".into()
        } else {
            let name = &machine.resources()[busiest].name;
            format!(
                "its paths keep {name} busy for {}: further ones are ruled out by options, or cost more than they carry",
                time(*seconds)
            )
        })
    }
}
