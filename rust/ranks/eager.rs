//! Implements eager steps, in which ranks write small transfers directly into each other's GPU memory without a handshake.
//!
//! The sender writes the data into an inbox (receive buffer) on the receiver's GPU. The receiver's kernel copies the data from there to the
//! destination. Each rank has two inboxes, and each ordered pair of ranks has two flags. They form two sets: the first inboxes with the
//! first flags, and the second inboxes with the second flags. Steps alternate between the two sets. The number of the set that a step uses
//! is called the *turn* of the step. A rank sets its flag for another rank after it has written its data to that rank's inbox, or at the
//! beginning of the step if it sends no data to that rank.
//!
//! Two sets are enough. Before a rank begins step *n* + 2, it has waited in step *n* + 1 for the other rank's flag. The other rank sets
//! that flag after the end of its step *n*, in which it emptied the inbox and reset the flag. So no rank finishes a step that another rank
//! has not reached.
//!
//! Streams may execute some steps in between ([`lateness`](super::lateness)). These steps use neither inboxes nor the flags of inboxes, and
//! do not count as turns. The turn is counted in GPU memory, because the CPU does not know how often a captured graph is launched.

use crate::backend::MOST_ACTIONS;
use crate::plan::{Copy, Place};
use crate::program::ranks::{EndRanks, Flag, FlagId, Parts, RankedBatch};
use crate::topology::DeviceId;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of bytes that a rank receives eagerly (without a handshake) in one step. Two inboxes of this size fit into the block of
/// device memory that is allocated for the flags in any case. Two ranks of a test program (H100) exchange 256 KiB in 7.3 us instead of 8.6
/// us, and 1 MiB in 10.1 us instead of 11.1 us.
const EAGER_BYTES: u64 = 512 << 10;

/// Alignment in bytes of each transfer's data in an inbox (receive buffer).
const ALIGN: u64 = 256;

/// Two flags for each pair of ranks (the rank that sets the flags, the rank that waits for them). Eager steps use the two flags
/// alternately.
pub(super) type TurnFlags = BTreeMap<(u32, u32), [FlagId; 2]>;

/// Positions of a plan's eager transfers in the inboxes (receive buffers) of all ranks. All ranks compute the same positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Eager {
    /// Offset in bytes of each transfer's data in the receiver's inbox, keyed by the index of the transfer. Transfers within one rank have
    /// no entry.
    places: BTreeMap<u32, u64>,
    /// Size in bytes of one inbox of each rank, indexed by rank. Each rank has two inboxes of this size.
    pub inboxes: Vec<u64>,
    /// Flags of each ordered pair of ranks that have transfers between them in either direction.
    pub flags: TurnFlags,
    pub ends: Vec<EndRanks>,
    pub bytes: Vec<u64>,
}

impl Eager {
    /// Computes the positions of the transfers of `batch` in the inboxes, and adds missing flags to `parts`. Returns `None` if the
    /// transfers are too large, or if any of them does not go directly from one rank's GPU to another's.
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
            // A rank that only receives runs its kernel on its first GPU.
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

    /// True if rank `from` sends data to rank `to`.
    pub fn has_bytes(&self, (from, to): (u32, u32)) -> bool {
        self.come_in(to).any(|transfer| self.ends[transfer as usize].src == from)
    }

    /// Returns the offset in bytes of a transfer's data from the start of the receiver's two inboxes. `turn` (0 or 1) selects the inbox.
    /// Returns `None` for a transfer within one rank.
    pub fn place(&self, transfer: u32, turn: u64) -> Option<u64> {
        let receiver = self.ends[transfer as usize].dst;
        self.places.get(&transfer).map(|place| turn * self.inboxes[receiver as usize] + place)
    }

    /// Returns the indices of the transfers that a rank receives from other ranks.
    pub fn come_in(&self, rank: u32) -> impl Iterator<Item = u32> {
        self.places.keys().copied().filter(move |transfer| self.ends[*transfer as usize].dst == rank)
    }
}
