//! The sets of copies that are worth a look: where hardware is known to be shared, and some at random.
//!
//! Small sets come first, so that what they show is known when larger ones are explained.

use super::session::Session;
use super::{Pair, Rig};
use crate::topology::DeviceId;

impl<R: Rig> Session<'_, R> {
    /// Measures suspicious sets one after another and explains those that are late.
    pub fn explore(&mut self, devices: &[DeviceId]) -> Result<(), R::Error> {
        self.families = families(&self.hops, devices);
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
        let mut sets = self.families.clone();
        sets.extend(shifts(&self.hops, devices));
        sets.extend(crossings(&self.hops, devices));
        let mut random = Random(0x6d70_6770_7500_0001);
        let most = self.hops.len();
        if most > 2 {
            sets.extend((0..24).map(|round| random.some(most, if round % 2 == 0 { most.min(6) } else { most.min(24) })));
        }
        for (index, set) in sets.iter().enumerate() {
            self.at("sets", index, sets.len());
            self.explain(set)?;
        }
        self.at("fit", 0, 1);
        self.sharing.refine(&self.samples, &self.families);
        Ok(())
    }
}

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
