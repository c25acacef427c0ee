//! Manages the slots (records in shared memory) for the operations of a rank.
//!
//! Sends and receives have separate slots. A rank whose send slots are all in use can still receive, which allows the other ranks to send.
//! So ranks do not block each other when their slots are all in use. If the library has buffered the message of a send, the slot stays in
//! use until the message was received, although the send itself has ended.

use super::operation::{Kept, Operation};
use super::{Messenger, Presence};
use crate::contexts::Error;
use crate::ipc::mailbox::Capacity;
use crate::ipc::{MessageSlot, SlotId, SlotStatus};
use crate::sync::{Mutex, lock};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Slots (records of operations in shared memory) of one kind: either the slots of receives and fetches, or the slots of sends and of
/// buffers that were described for a fetch.
#[derive(Default)]
pub(super) struct SlotPool {
    pub free: Vec<u32>,
    pub spent: VecDeque<Kept>,
    /// Resources of the slots that are never reused, because it cannot be detected when the last access ends. They stay allocated until the
    /// messenger is destroyed.
    pub torn: Vec<Kept>,
}

impl SlotPool {
    pub fn new(capacity: Capacity, is_send: bool) -> SlotPool {
        SlotPool { free: slots_of(capacity, is_send).rev().collect(), ..SlotPool::default() }
    }
}

/// Returns the range of slot numbers for sends and described buffers if `is_send` is true, and otherwise the range for receives and
/// fetches.
fn slots_of(capacity: Capacity, is_send: bool) -> Range<u32> {
    if is_send { capacity.operations..capacity.slots() } else { 0..capacity.operations }
}

impl Messenger {
    /// Returns the pool that contains slot number `slot`.
    pub(super) fn pool(&self, slot: u32) -> &Mutex<SlotPool> {
        self.pool_of(slots_of(self.capacity, true).contains(&slot))
    }

    /// Returns the pool of slots for sends and described buffers if `is_send` is true, and otherwise the pool for receives and fetches.
    pub(super) fn pool_of(&self, is_send: bool) -> &Mutex<SlotPool> {
        &self.slots[usize::from(is_send)]
    }

    /// Removes an unused slot from its pool and returns its number. Fails only if operations of the same kind of this rank use all slots.
    pub(super) fn take_slot(&self, is_send: bool) -> Result<u32, Error> {
        // Each call also reclaims a few slots of finished operations, so that none of them stays in use for long.
        let take = |most: usize| {
            let mut slots = lock(self.pool_of(is_send));
            self.reap(&mut slots, most);
            slots.free.pop()
        };
        let slot = take(4).or_else(|| {
            self.settle_ended(is_send);
            take(usize::MAX)
        });
        let slot = slot.ok_or_else(|| self.no_slot(is_send))?;
        self.mailboxes.release(slot, &|rank| self.is_gone(rank));
        Ok(slot)
    }

    /// Releases the slots of ended operations of one kind whose outcome was not requested.
    pub(super) fn settle_ended(&self, is_send: bool) {
        let operations: Vec<Arc<Operation>> = {
            let live = lock(&self.live);
            slots_of(self.capacity, is_send).filter_map(|slot| live.get(slot as usize)?.upgrade()).collect()
        };
        operations.iter().for_each(|operation| operation.settle_quiet());
    }

    /// Returns the error for a lack of slots. Its text names the operations that must end first.
    fn no_slot(&self, is_send: bool) -> Error {
        let torn = lock(self.pool_of(is_send)).torn.len() as u32;
        let slots = slots_of(self.capacity, is_send).map(|slot| self.mailboxes.own(slot));
        let open: Vec<&MessageSlot> = slots.filter(|own| !own.has_moved() || own.is_buffered() && !own.has_finished()).collect();
        let count = open.len();
        let full = if is_send {
            let mut by_rank = vec![0_u32; self.mailboxes.ranks() as usize];
            for rank in open.iter().filter_map(|own| own.peer()) {
                by_rank.get_mut(rank as usize).into_iter().for_each(|count| *count += 1);
            }
            let most = (0..).zip(by_rank).max_by_key(|(_, count)| *count).filter(|(_, count)| *count > 0);
            let whose = most.map_or(String::new(), |(rank, count): (u32, _)| format!(", {count} of them by rank {rank}"));
            format!(
                "{count} sends of this rank have not been received{whose}: receive the messages sent to this rank, and send again when some were received"
            )
        } else {
            format!("{count} receives of this rank have not completed: wait for some of them, or cancel them")
        };
        let ended = match self.capacity.operations.saturating_sub(torn).saturating_sub(count as u32) {
            0 => String::new(),
            rest => {
                format!("; {rest} further operations have completed, but earlier work in their streams has not: synchronize these streams")
            }
        };
        let lost = if torn > 0 {
            format!("; the room for {torn} operations is lost after failures: create the messenger again")
        } else {
            String::new()
        };
        let room = self.capacity.operations;
        Error::QueueFull(format!("{full}{ended}{lost}; or create the messenger with room for more than {room} operations"))
    }

    /// Makes the slots and resources of finished operations available again, if no rank reads or signals them any more. Examines at most
    /// `most` operations.
    pub(super) fn reap(&self, slots: &mut SlotPool, most: usize) {
        for _ in 0..slots.spent.len().min(most) {
            let Some(kept) = slots.spent.pop_front() else { break };
            let own = self.mailboxes.own(kept.slot);
            // If unused slots are left, this call is not delayed by a copy. The callback thread then copies the data later.
            if slots.free.is_empty() {
                kept.land(own);
            }
            if kept.is_quiet(own) {
                // Work that a dead rank enqueued may still set flags for a moment, so the slot is not reused.
                let has_died = |partner: SlotId| self.presence(partner.rank) == Presence::Died;
                let has_failed = matches!(own.status(), SlotStatus::PeerGone | SlotStatus::Failed);
                let may_be_raised = has_failed && own.partner().is_some_and(has_died);
                if kept.is_torn || may_be_raised {
                    slots.torn.push(kept);
                    continue;
                }
                slots.free.push(kept.slot);
                kept.bounce.into_iter().for_each(|bounce| self.give_bounce_back(bounce));
            } else {
                slots.spent.push_back(kept);
            }
        }
    }

    /// Releases the slot of an operation whose outcome is known or is not needed. The slot can be reused once no rank reads it any more.
    pub(super) fn spend(&self, kept: Kept) {
        lock(self.pool(kept.slot)).spent.push_back(kept);
    }
}
