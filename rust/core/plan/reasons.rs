//! Describes in words why paths were left out of a plan.

use super::candidates::{Reason, Rejection};
use super::planned::{PathPlan, Plan, TransferPlan};
use crate::model::PathModel;
use crate::program::Shape;
use crate::topology::{DeviceId, Machine};
use crate::units::{size, time};
use ahash::{HashMap, HashSet};
use smallvec::SmallVec;

/// Fraction of a plan's time for which the plan's paths keep each resource of the machine busy, by resource index.
pub(super) struct Loads(Vec<f64>);

/// Fraction of a plan's time for which a resource must be busy to be named as the reason why a path gets no data.
const IN_USE: f64 = 0.1;

impl Loads {
    pub fn new(machine: &Machine, plan: &Plan) -> Loads {
        let mut busy = vec![0.0; machine.resources().len()];
        for transfer in &plan.transfers {
            for path in transfer.paths.iter() {
                for (resource, weight) in path.model(machine, &transfer.shape).map(|model| model.weights).unwrap_or_default() {
                    let resource = resource.0 as usize;
                    busy[resource] += weight * path.bytes as f64 / machine.resources()[resource].capacity;
                }
            }
        }
        busy.iter_mut().for_each(|seconds| *seconds /= plan.predicted.max(f64::MIN_POSITIVE));
        Loads(busy)
    }

    /// Returns the busiest resource of a path over relay `via`: its index, and the fraction of the plan's time for which it is busy.
    /// Returns `None` if a hop of the path has no route.
    fn busiest(&self, machine: &Machine, shape: &Shape, via: Option<DeviceId>) -> Option<(usize, f64)> {
        let first = machine.route(shape.src_device, via.unwrap_or(shape.dst_device))?;
        let second = via.map_or(Some(first), |via| machine.route(via, shape.dst_device))?;
        let mut drawn: SmallVec<[usize; 16]> =
            first.resources.iter().chain(&second.resources).map(|resource| resource.0 as usize).collect();
        drawn.sort_unstable();
        drawn.into_iter().map(|resource| (resource, self.0[resource])).max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

impl PathPlan {
    /// Returns the cost model of the path. For data that a destination forwards, the path begins at the forwarding device. Returns `None`
    /// if a hop has no route.
    pub(super) fn model(&self, machine: &Machine, shape: &Shape) -> Option<PathModel> {
        let (src, dst) = (shape.src_device, shape.dst_device);
        let relays = || self.earlier.iter().copied().chain(self.via);
        let from = if self.is_passed_on() { relays().next().unwrap_or(src) } else { src };
        let way: Vec<DeviceId> = std::iter::once(from).chain(relays().filter(|_| !self.is_passed_on())).chain([dst]).collect();
        let routes: Option<Vec<_>> = way.windows(2).map(|hop| machine.route(hop[0], hop[1])).collect();
        Some(PathModel::new(machine, &routes?))
    }

    /// True if another destination of the same source forwards the data.
    pub(super) fn is_passed_on(&self) -> bool {
        self.via.is_some() && self.slots == 0
    }
}

/// Returns the name of the resource that limits a path if no other path uses its links.
pub(super) fn tightest<'a>(machine: &'a Machine, model: &PathModel) -> Option<&'a str> {
    let resource = |at: u32| &machine.resources()[at as usize];
    let rate = |entry: &&(crate::topology::ResourceId, f64)| resource(entry.0.0).capacity / entry.1;
    model.weights.iter().min_by(|a, b| rate(a).total_cmp(&rate(b))).map(|entry| resource(entry.0.0).name.as_str())
}

impl Reason {
    /// Returns a machine-readable keyword for the reason.
    pub(super) fn code(&self) -> &'static str {
        match self {
            Reason::NoRoute => "no_route",
            Reason::SharesDirect { .. } => "shares_direct",
            Reason::Option(_) => "option",
            Reason::Pageable => "pageable",
            Reason::FixedCost { .. } => "fixed_cost",
            Reason::NoShare => "no_share",
            Reason::NotFaster { .. } => "not_faster",
            Reason::Slower(_) => "slower",
            Reason::Staging { .. } => "staging",
        }
    }
}

/// Returns a sentence that explains why a path of this transfer was rejected. `among_many` omits the parts that differ between transfers of
/// one kind.
pub(super) fn sentence(machine: &Machine, shape: &Shape, rejection: &Rejection, loads: &Loads, among_many: bool) -> String {
    let resource = |at: usize| &machine.resources()[at].name;
    let (src, dst) = (shape.src_device, shape.dst_device);
    match (&rejection.reason, rejection.via) {
        (Reason::NoRoute, _) if among_many => "no copy engine can copy along it".into(),
        (Reason::NoRoute, None) => format!("no copy engine can copy from {src} to {dst} directly"),
        (Reason::NoRoute, Some(via)) if machine.route(src, via).is_none() => format!("no copy engine can copy from {src} to the relay"),
        (Reason::NoRoute, Some(_)) => format!("no copy engine can copy from the relay to {dst}"),
        (Reason::SharesDirect { .. }, _) if among_many => "passes a link of the direct path, and adds no capacity".into(),
        (Reason::SharesDirect { resource: at }, _) => {
            format!("passes {}, as the direct path does, and adds no capacity", resource(at.0 as usize))
        }
        (Reason::Option(why), _) => (*why).into(),
        (Reason::Pageable, _) => "the driver copies pageable host memory over one path; copies of pinned memory can use several".into(),
        (Reason::FixedCost { seconds, without }, _) => {
            format!(
                "the first byte of this path would arrive after {}, but the batch takes only {} without this path",
                time(*seconds),
                time(*without)
            )
        }
        (Reason::NoShare, via) => match loads.busiest(machine, shape, via) {
            Some((_, busy)) if busy >= IN_USE && among_many => {
                "a link of the path is busy with paths that make better use of the link".into()
            }
            Some((at, busy)) if busy >= IN_USE => {
                format!("{} is busy for {:.0} % of the time with paths that make better use of it", resource(at), 100.0 * busy.min(1.0))
            }
            _ => "the bytes of this path would not outweigh its fixed cost".into(),
        },
        (Reason::NotFaster { seconds, one_path }, _) => {
            format!("several paths would take {}, which is not less than {} without them", time(*seconds), time(*one_path))
        }
        (Reason::Slower(via), _) => {
            format!("the plan is faster without paths through {}", if via.is_host() { "host memory" } else { "other GPUs" })
        }
        (Reason::Staging { ring_bytes }, _) => {
            format!(
                "the limit of staging memory leaves {} for the buffer of this path; a larger staging_bytes would allow it",
                size(*ring_bytes)
            )
        }
    }
}

/// Returns the rejected paths of many transfers, each with a sentence that explains the reason. Equal sentences are created only once.
pub(super) fn reasons_among_many<'p>(
    machine: &Machine,
    transfers: impl Iterator<Item = &'p TransferPlan>,
    loads: &Loads,
) -> Vec<(Option<DeviceId>, String)> {
    let mut found: Vec<(String, HashSet<Option<DeviceId>>)> = Vec::new();
    let mut numbers: HashMap<(std::mem::Discriminant<Reason>, u64, u64), usize> = HashMap::default();
    for TransferPlan { shape, rejected, .. } in transfers {
        for rejection in rejected.iter() {
            // The values that the sentence of this reason contains.
            let (first, second) = match &rejection.reason {
                Reason::FixedCost { seconds, without } => (seconds.to_bits(), without.to_bits()),
                Reason::NotFaster { seconds, one_path } => (seconds.to_bits(), one_path.to_bits()),
                Reason::Staging { ring_bytes } => (*ring_bytes, 0),
                Reason::Option(why) => (why.as_ptr().addr() as u64, why.len() as u64),
                Reason::Slower(via) => (via.is_host().into(), 0),
                Reason::NoShare => (loads.busiest(machine, shape, rejection.via).is_some_and(|(_, busy)| busy >= IN_USE).into(), 0),
                _ => (0, 0),
            };
            let number = *numbers.entry((std::mem::discriminant(&rejection.reason), first, second)).or_insert(found.len());
            if number == found.len() {
                found.push((sentence(machine, shape, rejection, loads, true), HashSet::default()));
            }
            found[number].1.insert(rejection.via);
        }
    }
    found.into_iter().flat_map(|(why, vias)| vias.into_iter().map(move |via| (via, why.clone()))).collect()
}

/// Returns one line of text for each reason, with all paths that were left out for that reason.
pub(super) fn lines(reasons: impl Iterator<Item = (Option<DeviceId>, String)>) -> Vec<String> {
    let mut lines: Vec<(String, Vec<Option<DeviceId>>)> = Vec::new();
    for (via, why) in reasons {
        match lines.iter_mut().find(|line| line.0 == why) {
            Some(line) => line.1.push(via),
            None => lines.push((why, vec![via])),
        }
    }
    lines.into_iter().map(|(why, vias)| format!("not {}: {why}", names(vias))).collect()
}

/// Returns a list of paths as text, for example `direct, via gpu2, gpu4 to gpu7, host1`.
fn names(mut vias: Vec<Option<DeviceId>>) -> String {
    // Order: the direct path, then relay GPUs, then hosts, each by number.
    vias.sort_by_key(|via| via.map(|device| (device.is_host(), device.0.unsigned_abs())));
    vias.dedup();
    let mut parts: Vec<String> = Vec::new();
    let devices: Vec<DeviceId> = vias.iter().copied().flatten().collect();
    let follows = |a: &DeviceId, b: &DeviceId| a.is_host() == b.is_host() && a.0.abs_diff(b.0) == 1;
    for run in devices.chunk_by(follows) {
        match run {
            [first, .., last] if run.len() > 2 => parts.push(format!("{first} to {last}")),
            some => parts.extend(some.iter().map(DeviceId::to_string)),
        }
    }
    let direct = if vias.first() == Some(&None) { Some("direct".to_owned()) } else { None };
    let via = if parts.is_empty() { None } else { Some(format!("via {}", parts.join(", "))) };
    direct.into_iter().chain(via).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_left_out_for_one_reason_are_named_once_and_in_order() {
        let gpus = |numbers: &[u32]| numbers.iter().map(|&gpu| Some(DeviceId::gpu(gpu))).collect::<Vec<_>>();
        assert_eq!(names(gpus(&[7, 5, 6, 2, 5])), "via gpu2, gpu5 to gpu7");
        let mut mixed = gpus(&[1, 2]);
        mixed.extend([Some(DeviceId::host(1)), None, Some(DeviceId::host(0))]);
        assert_eq!(names(mixed), "direct, via gpu1, gpu2, host0, host1");
        assert_eq!(names(vec![None]), "direct");
    }
}
