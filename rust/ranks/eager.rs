//! Steps in which ranks put few bytes straight to others.
//!
//! Bytes go into an inbox of the receiver's GPU, from which its kernel moves them on, and nobody asks before he writes. Two inboxes, and two flags
//! from each of two ranks to the other, are used by turns. A rank raises its flag behind its bytes, or as it begins the step where it has none for the
//! other. That is enough: a rank that begins step *n* + 2 has taken in step *n* + 1 what the other has raised there, after the end of its step *n*, in
//! which it has emptied the inbox and set back the flag. So no rank ends a step that another has not come to.
//! Steps that streams do in between ([`lateness`](super::lateness)) use neither, and do not count.
//! Which turn it is stands on the GPU, because nobody knows how often a graph is launched.

use crate::backend::MOST_ACTIONS;
use crate::plan::{Copy, Place};
use crate::program::ranks::{EndRanks, Flag, FlagId, Parts, RankedBatch};
use crate::topology::DeviceId;
use std::collections::{BTreeMap, BTreeSet};

/// The most bytes that a rank gets in a step: two inboxes lie in the chunk of device memory in which flags lie anyway. Two ranks of a lab program
/// (H100) put 256 KiB to each other in 7.3 us in place of 8.6, 1 MiB in 10.1 in place of 11.1.
const EAGER_BYTES: u64 = 512 << 10;

/// Bytes in an inbox begin at multiples of this.
const ALIGN: u64 = 256;

/// Flags by who raises them and who takes them, one for each turn.
pub(super) type TurnFlags = BTreeMap<(u32, u32), [FlagId; 2]>;

/// How a plan's bytes go into inboxes. All ranks find the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Eager {
    /// Of each transfer whose ranks differ where its bytes come in, from the begin of an inbox.
    places: BTreeMap<u32, u64>,
    /// Bytes of each of a rank's two inboxes, by rank.
    pub inboxes: Vec<u64>,
    /// Of every two ranks between which bytes go, from each to the other.
    pub flags: TurnFlags,
    pub ends: Vec<EndRanks>,
    pub bytes: Vec<u64>,
}

impl Eager {
    /// `None` where the bytes are many, or go not straight from one rank's GPU to another's. Adds flags where those of the parts are too few.
    pub fn new(parts: &mut Parts, batch: &RankedBatch<'_>) -> Option<Eager> {
        let between = || {
            let all = (0_u32..).zip(batch.shapes.iter().zip(batch.ends));
            all.filter(|(_, (shape, ends))| shape.bytes > 0 && ends.src != ends.dst)
        };
        let pairs: BTreeSet<(u32, u32)> = between().map(|(_, (_, ends))| (ends.src, ends.dst)).collect();
        let back = |&(src, dst): &(u32, u32)| (dst, src);
        let owed: BTreeSet<(u32, u32)> = pairs.iter().map(back).filter(|pair| !pairs.contains(pair)).collect();
        let mut devices: BTreeMap<u32, DeviceId> = BTreeMap::new();
        let mut is_own = |rank: u32, device: DeviceId| {
            let owner = batch.owners.get(device.0 as usize).filter(|_| !device.is_host());
            owner == Some(&rank) && *devices.entry(rank).or_insert(device) == device
        };
        let have_one = between().all(|(_, (shape, ends))| is_own(ends.src, shape.src_device) && is_own(ends.dst, shape.dst_device));
        if pairs.is_empty() || !have_one {
            return None;
        }
        let (mut places, mut inboxes) = (BTreeMap::new(), vec![0_u64; batch.ranks as usize]);
        for (transfer, (shape, ends)) in between() {
            let inbox = &mut inboxes[ends.dst as usize];
            places.insert(transfer, *inbox);
            *inbox = shape.bytes.checked_next_multiple_of(ALIGN).and_then(|bytes| inbox.checked_add(bytes))?;
        }
        let goes_straight = (0..).zip(&parts.parts).all(|(rank, part)| {
            let is_straight = |copy: &Copy| match (copy.from, copy.to) {
                (Place::Source { transfer, .. }, Place::Destination { .. }) => batch.ends[transfer as usize].src == rank,
                _ => false,
            };
            let flags = pairs.iter().chain(&owed).filter(|(raiser, taker)| [*raiser, *taker].contains(&rank)).count();
            let come_in = between().filter(|(_, (_, ends))| ends.dst == rank).count();
            // The kernel of a rank that only gets works on its first GPU.
            let first = || batch.owners.iter().position(|owner| *owner == rank).map(|gpu| DeviceId::gpu(gpu as u32));
            let works_on = part.lanes.first().copied().or_else(first);
            part.copies().all(is_straight)
                && (flags == 0 || part.lanes.iter().copied().chain(works_on).all(|lane| devices.get(&rank) == Some(&lane)))
                && 2 * (part.copies().count() + flags + come_in) <= MOST_ACTIONS
        });
        let mut found: BTreeMap<(u32, u32), Vec<FlagId>> = BTreeMap::new();
        for (flag, Flag { raiser, taker }) in (0..).zip(&parts.flags) {
            found.entry((*raiser, *taker)).or_default().push(FlagId(flag));
        }
        let is_one_way = |pair: &(u32, u32)| owed.contains(pair) || owed.contains(&back(pair));
        let is_known = pairs.len() + owed.len() == found.len()
            && pairs.iter().chain(&owed).all(|pair| found.get(pair).map(Vec::len) == Some(if is_one_way(pair) { 1 } else { 2 }));
        if !goes_straight || !is_known || inboxes.iter().any(|bytes| *bytes > EAGER_BYTES) {
            return None;
        }
        let two = |pair: &(u32, u32)| match found[pair][..] {
            [one, other] => (*pair, [one, other]),
            [ref first, ..] => {
                parts.flags.push(Flag { raiser: pair.0, taker: pair.1 });
                (*pair, [*first, FlagId(parts.flags.len() as u32 - 1)])
            }
            [] => unreachable!("each has one"),
        };
        let flags = pairs.iter().chain(&owed).map(two).collect();
        let (ends, bytes) = (batch.ends.to_vec(), batch.shapes.iter().map(|shape| shape.bytes).collect());
        Some(Eager { places, inboxes, flags, ends, bytes })
    }

    /// Whether bytes go from the first rank to the second.
    pub fn has_bytes(&self, (from, to): (u32, u32)) -> bool {
        self.come_in(to).any(|transfer| self.ends[transfer as usize].src == from)
    }

    /// Where a transfer's bytes come in, from the first byte of the receiver's inboxes; `None` for one within a rank.
    pub fn place(&self, transfer: u32, turn: u64) -> Option<u64> {
        let receiver = self.ends[transfer as usize].dst;
        self.places.get(&transfer).map(|place| turn * self.inboxes[receiver as usize] + place)
    }

    /// Transfers that a rank gets from others.
    pub fn come_in(&self, rank: u32) -> impl Iterator<Item = u32> {
        self.places.keys().copied().filter(move |transfer| self.ends[*transfer as usize].dst == rank)
    }
}
