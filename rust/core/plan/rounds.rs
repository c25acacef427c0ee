//! Schedule of a broadcast in equal blocks. At any time, each device sends at most one block and receives at most one block.
//!
//! The schedule consists of rounds. In each round, a device sends a block to at most one device, and receives a block from at most one
//! device. The source sends at most one block per round that no other device has, so it sends the last of them in round `blocks` or later.
//! The number of devices that have a block can at most double in each round. Therefore a schedule has at least
//! `blocks - 1 + ceil(log2(devices))` rounds. This module returns schedules with that number of rounds, or rarely with one more.
//!
//! In each round, device `d` first offers its blocks to device `(d + distance) mod devices`, with one distance for all devices. The distance
//! is a half of the number of devices in the first round, a quarter in the second and so on, and then a half again (circulant graph, Träff
//! 2022). After that, each device that receives nothing in the round gets a block from any device that does not send yet, if possible. A
//! sender chooses the block that the fewest devices have.

use super::network::Tree;

/// Largest number of blocks.
pub(super) const MOST_BLOCKS: u64 = 128;

/// Copies of one block to all devices. Devices are numbered from 0, which is the source.
#[derive(Clone, Default)]
pub(super) struct BlockTree {
    /// Copies of the block, in the order of their rounds.
    pub tree: Tree,
    /// Round of each copy, from 1.
    pub rounds: Vec<u32>,
}

/// State of the schedule in one round.
struct Round {
    /// Set of blocks that each device has at the beginning of the round, with one bit for each block.
    has: Vec<u128>,
    /// Number of devices that have each block, or receive it in this round.
    counts: Vec<usize>,
    /// True for each device that sends a block in this round.
    sends: Vec<bool>,
    /// Block that each device receives in this round.
    receives: Vec<Option<usize>>,
}

impl Round {
    /// Returns the block that `from` can send to `to` in this round. Returns `None` if either device is busy, or if `to` has all blocks of
    /// `from`.
    fn offer(&self, from: usize, to: usize) -> Option<usize> {
        let useful = self.has[from] & !self.has[to];
        if self.sends[from] || self.receives[to].is_some() || useful == 0 {
            return None;
        }
        (0..self.counts.len()).filter(|block| useful >> block & 1 == 1).min_by_key(|block| self.counts[*block])
    }

    fn copy(&mut self, from: usize, to: usize, block: usize) {
        self.sends[from] = true;
        self.receives[to] = Some(block);
        self.counts[block] += 1;
    }

    /// Begins the next round, in which devices have the blocks that they have received.
    fn next(&mut self) {
        for (has, received) in self.has.iter_mut().zip(&mut self.receives) {
            *has |= received.take().map_or(0, |block| 1 << block);
        }
        self.sends.fill(false);
    }
}

/// Returns the copies of each block from device 0 to all other devices. There must be at least two devices, and 1 to [`MOST_BLOCKS`] blocks.
pub(super) fn broadcast(devices: usize, blocks: usize) -> Vec<BlockTree> {
    let half = |distance: usize| distance.div_ceil(2);
    let distances: Vec<usize> = std::iter::successors(Some(half(devices)), |last| (*last > 1).then_some(half(*last))).collect();
    let all = u128::MAX >> (u128::BITS as usize - blocks);
    let (sends, receives) = (vec![false; devices], vec![None; devices]);
    let mut state = Round { has: vec![0; devices], counts: vec![1; blocks], sends, receives };
    state.has[0] = all;
    let mut trees = vec![BlockTree::default(); blocks];
    for (number, distance) in (1..).zip(distances.iter().cycle()) {
        let mut copies: Vec<(usize, usize, usize)> = Vec::new();
        let mut copy = |state: &mut Round, from: usize, to: usize, block: usize| {
            state.copy(from, to, block);
            copies.push((block, from, to));
        };
        for to in 0..devices {
            let from = (to + devices - distance) % devices;
            if let Some(block) = state.offer(from, to) {
                copy(&mut state, from, to, block);
            }
        }
        let mut idle: Vec<usize> = (0..devices).filter(|to| state.receives[*to].is_none() && state.has[*to] != all).collect();
        idle.sort_by_key(|to| state.has[*to].count_ones());
        for to in idle {
            let offers = (0..devices).filter_map(|from| Some((from, state.offer(from, to)?)));
            if let Some((from, block)) = offers.min_by_key(|(_, block)| state.counts[*block]) {
                copy(&mut state, from, to, block);
            }
        }
        for &(block, from, to) in &copies {
            trees[block].tree.push((from, to));
            trees[block].rounds.push(number);
        }
        if copies.is_empty() {
            break;
        }
        state.next();
    }
    trees
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_receives_each_block_once_in_few_rounds() {
        let (mut cases, mut slower) = (0, 0);
        for devices in (2..20).chain([31, 32, 33, 63, 64, 72, 127, 144]) {
            for blocks in [1, 2, 3, 4, 5, 7, 8, 13, 16, 32, 61, 128] {
                let trees = broadcast(devices, blocks);
                let rounds = blocks as u32 - 1 + devices.next_power_of_two().ilog2();
                let mut last = 0;
                let (mut sent, mut received) = (std::collections::HashSet::new(), std::collections::HashSet::new());
                for tree in &trees {
                    let mut arrival = vec![None; devices];
                    arrival[0] = Some(0);
                    for (&(from, to), &round) in tree.tree.iter().zip(&tree.rounds) {
                        assert!(arrival[from].is_some_and(|arrival| arrival < round), "{devices} {blocks}: a block that has not arrived");
                        assert!(arrival[to].replace(round).is_none(), "{devices} {blocks}: a block that is received twice");
                        assert!(sent.insert((from, round)) && received.insert((to, round)), "{devices} {blocks}: two blocks at a time");
                        last = last.max(round);
                    }
                    assert!(arrival.iter().all(Option::is_some), "{devices} {blocks}: a block that does not arrive");
                }
                assert!((rounds..=rounds + 1).contains(&last), "{devices} {blocks}: {last} rounds in place of {rounds}");
                (cases, slower) = (cases + 1, slower + last - rounds);
            }
        }
        assert!(20 * slower <= cases, "{slower} of {cases} schedules need one more round");
    }
}
