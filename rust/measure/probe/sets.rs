//! Selects the sets of copies to measure: sets whose copies probably share one piece of hardware, and sets that plans use.
//!
//! Only sets whose time does not depend on the order of submission are used. Copies from one GPU to several other GPUs run one after the
//! other, whatever their streams. So a copy may wait behind another copy whose destination port is busy, and this delay would look like a
//! limited capacity. Host copies have their own copy engines.

use super::Ends;
use crate::topology::DeviceId;

fn is_between_gpus(ends: Ends) -> bool {
    !ends.0.is_host() && !ends.1.is_host()
}

/// True if the total time of these hops, used at the same time, does not depend on the order of submission. This is so if each GPU issues
/// at most one copy to another GPU, or if one GPU issues all copies.
pub(super) fn is_free_of_order(hops: &[Ends], set: &[usize]) -> bool {
    let sources: Vec<DeviceId> = set.iter().map(|hop| hops[*hop]).filter(|ends| is_between_gpus(*ends)).map(|ends| ends.0).collect();
    let once = |(index, source): (usize, &DeviceId)| !sources[..index].contains(source);
    sources.iter().enumerate().all(once) || sources.iter().all(|source| *source == sources[0])
}

/// Returns the hops of a set with at most one copy between GPUs for each source GPU. If a GPU has several, the first one in the set is
/// used. All host copies are included.
pub(super) fn free_part(hops: &[Ends], set: &[usize]) -> Vec<usize> {
    let repeats = |index: usize| {
        let ends = hops[set[index]];
        is_between_gpus(ends) && set[..index].iter().any(|hop| is_between_gpus(hops[*hop]) && hops[*hop].0 == ends.0)
    };
    (0..set.len()).filter(|index| !repeats(*index)).map(|index| set[index]).collect()
}

/// Returns subsets whose time does not depend on the order of submission. If this already holds for the whole set, returns only that set.
/// If not, returns one subset for each distance, which is the number of the destination GPU minus that of the source GPU, modulo the number
/// of GPUs. Each subset contains all host copies.
fn turns(hops: &[Ends], set: &[usize]) -> Vec<Vec<usize>> {
    if is_free_of_order(hops, set) {
        return vec![set.to_vec()];
    }
    let gpus = 1 + hops.iter().map(|ends| ends.0.0.max(ends.1.0)).max().unwrap_or(0);
    let distance = |hop: usize| is_between_gpus(hops[hop]).then(|| (hops[hop].1.0 - hops[hop].0.0).rem_euclid(gpus));
    let turn = |by: i32| set.iter().copied().filter(|&hop| distance(hop).is_none_or(|far| far == by)).collect::<Vec<usize>>();
    (1..gpus).map(turn).filter(|turn| turn.iter().any(|hop| distance(*hop).is_some())).collect()
}

/// Returns pairs of hops that often share hardware:
///
/// - both directions between two devices,
/// - copies of one direction between two GPUs and a host memory,
/// - for each GPU, a copy to or from a peer and a host copy.
pub(super) fn pairs(hops: &[Ends]) -> Vec<[usize; 2]> {
    let mut pairs = Vec::new();
    let mut seen: Vec<(DeviceId, bool, bool, bool)> = Vec::new();
    for (first, a) in hops.iter().enumerate() {
        for (second, b) in hops.iter().enumerate().skip(first + 1) {
            let opposite = (a.0, a.1) == (b.1, b.0);
            let read = a.0.is_host() && a.0 == b.0 && !a.1.is_host() && !b.1.is_host();
            let written = a.1.is_host() && a.1 == b.1 && !a.0.is_host() && !b.0.is_host();
            if opposite || read || written {
                pairs.push([first, second]);
                continue;
            }
            // Take only the first pair of each kind for each GPU.
            let (peer, host) = if is_between_gpus(*a) { (a, b) } else { (b, a) };
            if !is_between_gpus(*peer) || is_between_gpus(*host) {
                continue;
            }
            for gpu in [peer.0, peer.1] {
                let kind = (gpu, peer.0 == gpu, host.0 == gpu, host.1 == gpu);
                if (kind.2 || kind.3) && !seen.contains(&kind) {
                    seen.push(kind);
                    pairs.push([first, second]);
                }
            }
        }
    }
    pairs
}

/// Returns sets of three or more hops that probably share hardware, sorted from small to large:
///
/// - all copies that leave a device, enter it, or both,
/// - all host copies by direction, and each such set without one of its copies,
/// - all copies between GPUs, also by distance,
/// - all copies.
pub(super) fn families(hops: &[Ends], devices: &[DeviceId]) -> Vec<Vec<usize>> {
    let select = |wanted: &dyn Fn(DeviceId, DeviceId) -> bool| -> Vec<usize> {
        hops.iter().enumerate().filter(|(_, hop)| wanted(hop.0, hop.1)).map(|(index, _)| index).collect()
    };
    let mut families = of_host(hops);
    for &device in devices {
        families.push(select(&|from, to| from == device && !to.is_host()));
        families.push(select(&|from, to| to == device && !from.is_host()));
        families.push(select(&|from, _| from == device));
        families.push(select(&|_, to| to == device));
        families.push(select(&|from, to| from == device || to == device));
    }
    families.push(select(&|from, to| !from.is_host() && !to.is_host()));
    families.push(select(&|_, _| true));
    let mut sets: Vec<Vec<usize>> = families.iter().flat_map(|family| turns(hops, family)).filter(|set| set.len() > 2).collect();
    sets.sort_by_key(Vec::len);
    let mut seen = Vec::new();
    sets.retain(|set| {
        !seen.contains(set) && {
            seen.push(set.clone());
            true
        }
    });
    sets
}

/// Returns three sets: all copies from host memory, all copies to host memory, and all copies of both kinds. Also returns each subset of
/// the first two sets that lacks one copy, because memory slows down before it is saturated.
pub(super) fn of_host(hops: &[Ends]) -> Vec<Vec<usize>> {
    let select = |wanted: &dyn Fn(bool, bool) -> bool| -> Vec<usize> {
        hops.iter().enumerate().filter(|(_, hop)| wanted(hop.0.is_host(), hop.1.is_host())).map(|(index, _)| index).collect()
    };
    let directions = [select(&|from, to| from && !to), select(&|from, to| to && !from)];
    let without =
        |set: &Vec<usize>| set.iter().map(|skip| set.iter().copied().filter(|hop| hop != skip).collect()).collect::<Vec<Vec<usize>>>();
    let mut sets: Vec<Vec<usize>> = directions.iter().flat_map(without).collect();
    sets.extend(directions);
    sets.push(select(&|from, to| from != to));
    sets.retain(|set| set.len() > 1);
    sets
}

/// Returns sets of copies that cross from one NUMA domain of the host to another. A GPU belongs to the domain with which its copies are
/// fastest. The link between the sockets carries these copies. Because GPUs may also have links of their own, there is a set without copies
/// between GPUs, in addition to the sets with such copies.
pub(super) fn crossings_of_domains(hops: &[Ends], rates: &[f64], devices: &[DeviceId]) -> Vec<Vec<usize>> {
    /// Ratio of rates below which a host memory counts as farther from a GPU than the fastest one. A GPU belongs to its fastest host memory
    /// if the rates of all other host memories, divided by the rate of the fastest one, are below this value.
    const NEAR: f64 = 0.9;
    let hosts: Vec<DeviceId> = devices.iter().copied().filter(|device| device.is_host()).collect();
    let rate = |a, b| hops.iter().zip(rates).filter(|(hop, _)| **hop == (a, b) || **hop == (b, a)).map(|(_, rate)| rate).sum::<f64>();
    let side = |device: DeviceId| {
        if device.is_host() {
            return Some(device);
        }
        let nearest = hosts.iter().copied().max_by(|&a, &b| rate(a, device).total_cmp(&rate(b, device)))?;
        hosts.iter().all(|&host| host == nearest || rate(host, device) < NEAR * rate(nearest, device)).then_some(nearest)
    };
    let mut sets = Vec::new();
    for (from, to) in hosts.iter().flat_map(|&from| hosts.iter().map(move |&to| (from, to))).filter(|(from, to)| from != to) {
        let all: Vec<usize> = (0..hops.len()).filter(|hop| side(hops[*hop].0) == Some(from) && side(hops[*hop].1) == Some(to)).collect();
        sets.push(all.iter().copied().filter(|hop| !is_between_gpus(hops[*hop])).collect());
        sets.extend(turns(hops, &all));
    }
    sets.retain(|set: &Vec<usize>| set.len() > 1);
    sets.dedup();
    sets
}

/// Random number generator SplitMix64 (Steele, Lea, Flood 2014). Its fixed seed gives the same sets in every probe.
pub(super) struct Random(pub u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }

    /// Returns two to `most` random hops, after removing hops that would make the time of the set depend on the order of submission.
    pub fn set(&mut self, hops: &[Ends], most: usize) -> Vec<usize> {
        let count = 2 + self.below(most.saturating_sub(1));
        let mut all: Vec<usize> = (0..hops.len()).collect();
        for index in 0..count.min(all.len()) {
            let other = index + self.below(all.len() - index);
            all.swap(index, other);
        }
        all.truncate(count);
        free_part(hops, &all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(gpus: u32) -> (Vec<Ends>, Vec<DeviceId>) {
        let devices: Vec<DeviceId> = (0..gpus).map(DeviceId::gpu).chain([DeviceId::HOST]).collect();
        let pairs = devices.iter().flat_map(|from| devices.iter().map(move |to| (*from, *to)));
        (pairs.filter(|(from, to)| from != to).collect(), devices)
    }

    #[test]
    fn a_gpu_that_issues_two_copies_beside_those_of_another_makes_the_order_count() {
        let (hops, _) = all(4);
        let set = |ends: &[(i32, i32)]| -> Vec<usize> {
            let place = |&(from, to): &(i32, i32)| hops.iter().position(|hop| (hop.0.0, hop.1.0) == (from, to)).expect("a hop");
            ends.iter().map(place).collect()
        };
        let is_free = |ends: &[(i32, i32)]| is_free_of_order(&hops, &set(ends));
        assert!(!is_free(&[(2, 0), (2, 3), (3, 0)]) && is_free(&[]));
        assert!(is_free(&[(0, 1), (1, 2), (2, 3), (3, 0), (-1, 0), (0, -1)]) && is_free(&[(0, 1), (2, 1), (3, 1)]));
        assert!(is_free(&[(0, 1), (0, 2), (0, 3), (0, -1), (1, -1)]));
    }

    #[test]
    fn sets_of_eight_gpus_are_bounded_and_free_of_order_and_have_every_hop() {
        let (hops, devices) = all(8);
        // There are 36 pairs of directions, 28 pairs of GPUs for each direction of host memory, and four kinds of pairs with a host copy
        // for each GPU.
        assert_eq!(pairs(&hops).len(), 36 + 2 * 28 + 32);
        let families = families(&hops, &devices);
        assert!(families.len() <= 128 && families.is_sorted_by_key(Vec::len), "{}", families.len());
        assert!(families.iter().all(|set| is_free_of_order(&hops, set)));
        assert!((0..hops.len()).all(|hop| families.iter().any(|set| set.contains(&hop))));
        let mut random = Random(7);
        for _ in 0..100 {
            let mut set = random.set(&hops, 12);
            assert!((1..=12).contains(&set.len()) && is_free_of_order(&hops, &set));
            set.sort_unstable();
            assert!(set.windows(2).all(|two| two[0] < two[1] && two[1] < hops.len()));
        }
    }

    #[test]
    fn what_crosses_between_two_host_memories_is_a_set() {
        let (a, b, far, near) = (DeviceId::gpu(0), DeviceId::gpu(1), DeviceId::host(0), DeviceId::host(1));
        let hops = [(a, far), (a, near), (b, far), (b, near), (far, a), (near, a), (near, b), (far, near), (a, b), (b, a)];
        let rates = [10.0, 55.0, 55.0, 10.0, 10.0, 55.0, 10.0, 20.0, 390.0, 390.0];
        let sets = crossings_of_domains(&hops, &rates, &[a, b, far, near]);
        assert_eq!(sets, [vec![3, 4, 7], vec![3, 4, 7, 9], vec![0, 6], vec![0, 6, 8]]);
        assert!(crossings_of_domains(&hops, &rates, &[a, b, near]).is_empty());
    }
}
