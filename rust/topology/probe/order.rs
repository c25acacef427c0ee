//! Which sets of copies take the same time whatever the order in which they are issued.
//!
//! The plain copies that one GPU issues to other GPUs run one after another, whatever their streams (docs/performance.md, `all_to_all`). So in a
//! mixed set a copy may wait behind another one whose entry into its destination is shared: that is no capacity. A set is free of order if each
//! GPU issues one copy to another GPU at most, or if one GPU issues all of them. Copies to and from host memory have engines of their own.
//! Every part of such a set is free of order too.

use crate::topology::DeviceId;

type Ends = (DeviceId, DeviceId);

pub(super) fn is_between_gpus(ends: Ends) -> bool {
    !ends.0.is_host() && !ends.1.is_host()
}

/// Whether the time of these hops at once cannot depend on the order of issue.
pub(super) fn is_free(hops: &[Ends], set: &[usize]) -> bool {
    let sources: Vec<DeviceId> = set.iter().map(|hop| hops[*hop]).filter(|ends| is_between_gpus(*ends)).map(|ends| ends.0).collect();
    let once = |(index, source): (usize, &DeviceId)| !sources[..index].contains(source);
    sources.iter().enumerate().all(once) || sources.iter().all(|source| *source == sources[0])
}

/// The set itself if it is free of order; else the sets of its hops from each GPU to the one so many further on, each with all hops
/// to and from host memory.
pub(super) fn turns(hops: &[Ends], set: &[usize], gpus: usize) -> Vec<Vec<usize>> {
    if is_free(hops, set) {
        return vec![set.to_vec()];
    }
    let gpus = gpus as i32;
    let far = |hop: usize| is_between_gpus(hops[hop]).then(|| (hops[hop].1.0 - hops[hop].0.0).rem_euclid(gpus));
    let turn = |by: i32| set.iter().copied().filter(|&hop| far(hop).is_none_or(|far| far == by)).collect::<Vec<usize>>();
    (1..gpus).map(turn).filter(|turn| turn.iter().any(|hop| far(*hop).is_some())).collect()
}

/// Those of the set that are left when each GPU issues only its first copy to another one.
pub(super) fn first_of_each(hops: &[Ends], set: &[usize]) -> Vec<usize> {
    let repeats = |index: usize| {
        let ends = hops[set[index]];
        is_between_gpus(ends) && set[..index].iter().any(|hop| is_between_gpus(hops[*hop]) && hops[*hop].0 == ends.0)
    };
    (0..set.len()).filter(|index| !repeats(*index)).map(|index| set[index]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(gpus: u32) -> Vec<Ends> {
        let devices = || (0..gpus).map(DeviceId::gpu).chain([DeviceId::HOST]);
        devices().flat_map(|from| devices().map(move |to| (from, to))).filter(|(from, to)| from != to).collect()
    }

    #[test]
    fn a_gpu_that_issues_two_copies_beside_those_of_another_makes_the_order_count() {
        let hops = all(4);
        let set = |ends: &[(i32, i32)]| -> Vec<usize> {
            let place = |&(from, to): &(i32, i32)| hops.iter().position(|hop| (hop.0.0, hop.1.0) == (from, to)).expect("a hop");
            ends.iter().map(place).collect()
        };
        assert!(!is_free(&hops, &set(&[(2, 0), (2, 3), (3, 0)])));
        assert!(is_free(&hops, &set(&[(0, 1), (1, 2), (2, 3), (3, 0), (-1, 0), (0, -1)])));
        assert!(is_free(&hops, &set(&[(0, 1), (0, 2), (0, 3), (0, -1), (1, -1)])));
        assert!(is_free(&hops, &set(&[(0, 1), (2, 1), (3, 1)])) && is_free(&hops, &[]));
    }

    #[test]
    fn turns_hold_every_hop_and_are_free_of_order() {
        let hops = all(4);
        let every: Vec<usize> = (0..hops.len()).collect();
        let turns = turns(&hops, &every, 4);
        assert_eq!(turns.len(), 3);
        assert!(turns.iter().all(|turn| turn.len() == 4 + 8 && is_free(&hops, turn)));
        assert!(every.iter().all(|hop| turns.iter().any(|turn| turn.contains(hop))));
        let first = first_of_each(&hops, &every);
        assert!(is_free(&hops, &first) && first.len() == 4 + 8);
    }
}
