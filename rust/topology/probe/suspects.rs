//! The sets of copies that are worth a look: where hardware is known to be shared, and some at random.
//!
//! Small sets come first, so that what they show is known when larger ones are explained.

use super::session::Session;
use super::{Pair, Rig, order};
use crate::topology::DeviceId;

impl<R: Rig> Session<'_, R> {
    /// Measures suspicious sets one after another and explains those that are late.
    pub fn explore(&mut self, devices: &[DeviceId]) -> Result<(), R::Error> {
        self.families = families(&self.hops, devices);
        self.families.extend(crossings_of_domains(&self.hops, &self.sharing.rates, devices));
        self.families.sort_by_key(Vec::len);
        let pairs = pairs(&self.hops, devices);
        let mut slow = Vec::new();
        for (index, &pair) in pairs.iter().enumerate() {
            self.at("pairs", index, pairs.len());
            if !self.may_measure() {
                break;
            }
            let sample = self.seen_twice(&pair)?;
            // Nothing is known to be shared yet, so this is the time of the slower one alone.
            let slowdown = sample.seconds / self.sharing.seconds(&sample.copies);
            self.pairs.push(Pair { first: self.hops[pair[0]], second: self.hops[pair[1]], slowdown });
            slow.push((slowdown, pair));
        }
        // What slows down most is explained first: the weaker an effect, the more others have to be known to tell it from them.
        slow.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (index, (_, pair)) in slow.iter().enumerate() {
            self.at("pairs that share", index, slow.len());
            self.explain(pair)?;
        }
        self.sharing.refine(&self.samples, &self.families);
        let gpus = devices.iter().filter(|device| !device.is_host()).count();
        // Ways to host memory show in no attribute, and its buffers differ.
        let of_host = |family: &&Vec<usize>| family.iter().all(|hop| self.hops[*hop].0.is_host() != self.hops[*hop].1.is_host());
        let of_host: Vec<Vec<usize>> = self.families.iter().filter(of_host).cloned().collect();
        for family in &of_host {
            self.explain_as_one(family)?;
        }
        let mut sets: Vec<Vec<usize>> = self.families.iter().flat_map(|family| order::turns(&self.hops, family, gpus)).collect();
        sets.extend(shifts(&self.hops, devices));
        sets.extend(crossings(&self.hops, devices));
        let mut random = Random(0x6d70_6770_7500_0001);
        let most = self.hops.len();
        if most > 2 {
            let mut some = |round| random.some(most, if round % 2 == 0 { most.min(6) } else { most.min(24) });
            sets.extend((0..24).map(|round| order::first_of_each(&self.hops, &some(round))));
        }
        for (index, set) in sets.iter().enumerate() {
            self.at("sets", index, sets.len());
            self.explain(set)?;
            if index * VISITS / sets.len() < (index + 1) * VISITS / sets.len() {
                self.visit(&of_host)?;
            }
        }
        self.at("fit", 0, 1);
        self.sharing.refine(&self.samples, &self.families);
        self.doubt()
    }

    /// Measures these sets again, and each without one of its copies. What host memory delivers changes within seconds where others use it too, and
    /// capacities are to be of all of the probe's time: plans run at another one.
    fn visit(&mut self, sets: &[Vec<usize>]) -> Result<(), R::Error> {
        for set in sets {
            let without = |at: usize| set.iter().enumerate().filter(move |(index, _)| *index != at).map(|(_, &hop)| hop).collect();
            let parts: Vec<Vec<usize>> = (0..set.len()).map(without).filter(|rest: &Vec<usize>| rest.len() > 1).collect();
            for hops in std::iter::once(set).chain(&parts) {
                if !self.may_measure() {
                    return Ok(());
                }
                self.equal(hops)?;
            }
        }
        Ok(())
    }
}

/// How often host memory is looked at again while sets are explained.
const VISITS: usize = 4;

/// Pairs that hardware often joins: both directions between two devices, and all copies of one direction between GPUs and a host memory,
/// whose ways show in no attribute.
fn pairs(hops: &[(DeviceId, DeviceId)], devices: &[DeviceId]) -> Vec<[usize; 2]> {
    let find = |from, to| hops.iter().position(|hop| *hop == (from, to));
    let mut pairs = Vec::new();
    for (index, &a) in devices.iter().enumerate() {
        for &b in &devices[index + 1..] {
            pairs.extend(find(a, b).zip(find(b, a)).map(|(there, back)| [there, back]));
        }
    }
    for host in devices.iter().filter(|device| device.is_host()) {
        for into in [false, true] {
            let of =
                |&(from, to): &(DeviceId, DeviceId)| if into { to == *host && !from.is_host() } else { from == *host && !to.is_host() };
            let ways: Vec<usize> = (0..hops.len()).filter(|hop| of(&hops[*hop])).collect();
            for (index, &a) in ways.iter().enumerate() {
                pairs.extend(ways[index + 1..].iter().map(|&b| [a, b]));
            }
        }
    }
    pairs
}

/// Hops that one piece of hardware would serve: those out of a device and into it, to GPUs and to all devices; all between GPUs and
/// host memory, by direction and together; all between GPUs; all. Small ones first.
fn families(hops: &[(DeviceId, DeviceId)], devices: &[DeviceId]) -> Vec<Vec<usize>> {
    let select = |wanted: &dyn Fn(DeviceId, DeviceId) -> bool| -> Vec<usize> {
        hops.iter().enumerate().filter(|(_, hop)| wanted(hop.0, hop.1)).map(|(index, _)| index).collect()
    };
    let mut families = Vec::new();
    for &device in devices {
        families.push(select(&|from, to| from == device && !to.is_host()));
        families.push(select(&|from, to| to == device && !from.is_host()));
        families.push(select(&|from, _| from == device));
        families.push(select(&|_, to| to == device));
        families.push(select(&|from, to| from == device || to == device));
    }
    families.push(select(&|from, to| from.is_host() && !to.is_host()));
    families.push(select(&|from, to| to.is_host() && !from.is_host()));
    families.push(select(&|from, to| from.is_host() != to.is_host()));
    families.push(select(&|from, to| !from.is_host() && !to.is_host()));
    families.push(select(&|_, _| true));
    families.retain(|family| family.len() > 1);
    families.sort_by_key(Vec::len);
    let mut unique: Vec<Vec<usize>> = Vec::new();
    for family in families {
        if !unique.contains(&family) {
            unique.push(family);
        }
    }
    unique
}

/// Copies that pass from one host memory's side of the machine to another's, GPUs being on the side of the one that they copy with fastest: a link
/// between sockets serves them. GPUs may have links of their own, so there are two sets: without copies between GPUs, and with them.
fn crossings_of_domains(hops: &[(DeviceId, DeviceId)], rates: &[f64], devices: &[DeviceId]) -> Vec<Vec<usize>> {
    /// A host memory is near if no other comes within this part of its rate.
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
        let crosses = |hop: &usize| side(hops[*hop].0) == Some(from) && side(hops[*hop].1) == Some(to);
        let all: Vec<usize> = (0..hops.len()).filter(crosses).collect();
        let with_host: Vec<usize> = all.iter().copied().filter(|hop| hops[*hop].0.is_host() || hops[*hop].1.is_host()).collect();
        sets.push(with_host);
        sets.push(all);
    }
    sets.retain(|set| set.len() > 1);
    sets.dedup();
    sets
}

/// Every GPU to the one so many further on: no two copies leave or enter the same one, so only what lies between can slow them.
fn shifts(hops: &[(DeviceId, DeviceId)], devices: &[DeviceId]) -> Vec<Vec<usize>> {
    let gpus = devices.iter().filter(|device| !device.is_host()).count() as i32;
    let far = |&(from, to): &(DeviceId, DeviceId)| (!from.is_host() && !to.is_host()).then(|| (to.0 - from.0).rem_euclid(gpus));
    let shift = |by: i32| (0..hops.len()).filter(|hop| far(&hops[*hop]) == Some(by)).collect::<Vec<usize>>();
    (1..gpus).map(shift).filter(|set| set.len() > 1).collect()
}

/// Copies of different kinds that meet in a GPU: to a peer beside host memory in each direction, as a path through host memory beside a
/// direct copy does.
fn crossings(hops: &[(DeviceId, DeviceId)], devices: &[DeviceId]) -> Vec<Vec<usize>> {
    let mut sets = Vec::new();
    for &gpu in devices.iter().filter(|device| !device.is_host()) {
        let first = |wanted: &dyn Fn(DeviceId, DeviceId) -> bool| hops.iter().position(|hop| wanted(hop.0, hop.1));
        let out = first(&|from, to| from == gpu && !to.is_host());
        let into = first(&|from, to| to == gpu && !from.is_host());
        let read = first(&|from, to| from == gpu && to.is_host());
        let written = first(&|from, to| to == gpu && from.is_host());
        for pair in [[out, read], [into, written], [out, written], [into, read]] {
            let set: Vec<usize> = pair.into_iter().flatten().collect();
            if set.len() == 2 {
                sets.push(set);
            }
        }
    }
    sets
}

/// SplitMix64 (Steele, Lea, Flood 2014): the same sets in every probe.
pub(super) struct Random(pub u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }

    /// From two to `most` of the numbers below `n`.
    pub fn some(&mut self, n: usize, most: usize) -> Vec<usize> {
        let count = 2 + self.below(most.saturating_sub(1));
        let mut all: Vec<usize> = (0..n).collect();
        for index in 0..count.min(n) {
            let other = index + self.below(n - index);
            all.swap(index, other);
        }
        all.truncate(count);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_gpus_have_a_bounded_number_of_suspects() {
        let devices: Vec<DeviceId> = (0..8).map(DeviceId::gpu).chain([DeviceId::HOST]).collect();
        let all = devices.iter().flat_map(|&from| devices.iter().map(move |&to| (from, to)));
        let hops: Vec<_> = all.filter(|(from, to)| from != to).collect();
        assert_eq!(hops.len(), 72);
        // 36 pairs of directions, and 28 pairs of GPUs for each direction of host memory.
        assert_eq!(pairs(&hops, &devices).len(), 36 + 2 * 28);
        assert_eq!((shifts(&hops, &devices).len(), crossings(&hops, &devices).len()), (7, 32));
        let families = families(&hops, &devices);
        assert_eq!(families.len(), 8 * 5 + 5);
        assert!(families.is_sorted_by_key(Vec::len));
        assert_eq!(families.last().map(Vec::len), Some(72));
    }

    #[test]
    fn what_crosses_between_two_host_memories_is_a_set() {
        let (a, b, far, near) = (DeviceId::gpu(0), DeviceId::gpu(1), DeviceId::host(0), DeviceId::host(1));
        let hops = [(a, far), (a, near), (b, far), (b, near), (far, a), (near, a), (near, b), (far, near), (a, b), (b, a)];
        let rates = [10.0, 55.0, 55.0, 10.0, 10.0, 55.0, 10.0, 20.0, 390.0, 390.0];
        let sets = crossings_of_domains(&hops, &rates, &[a, b, far, near]);
        assert_eq!(sets, [vec![3, 4, 7], vec![3, 4, 7, 9], vec![0, 6], vec![0, 6, 8]]);
        assert!(
            crossings_of_domains(&hops, &[50.0; 10], &[a, b, far, near])
                .iter()
                .all(|set| set.iter().all(|hop| hops[*hop].0.is_host() && hops[*hop].1.is_host()))
        );
        assert!(crossings_of_domains(&hops, &rates, &[a, b, near]).is_empty());
    }

    #[test]
    fn random_sets_have_each_hop_once() {
        let mut random = Random(7);
        for _ in 0..100 {
            let mut set = random.some(9, 6);
            assert!((2..=6).contains(&set.len()));
            set.sort_unstable();
            set.dedup();
            assert!(set.len() >= 2 && set.iter().all(|hop| *hop < 9));
        }
        assert_eq!(random.some(2, 2).len(), 2);
    }
}
