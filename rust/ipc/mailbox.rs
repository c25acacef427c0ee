//! Matches sends and receives in shared memory, according to MPI's rules.
//!
//! Each rank has a mailbox, which all ranks map. The mailbox lists the posted receives, and the messages that arrived before their receive.
//! Both lists are in posting order. A message matches the first receive that accepts it, and a receive matches the first message that it
//! accepts. Whichever of a send and its receive is posted later finds the earlier one, under the lock of the receiver's mailbox. A match
//! needs no thread and no call by the receiver.
//!
//! No rank holds resources that another rank needs. Each rank has its own slots for sends and receives, and the list of messages is long
//! enough for all messages that all ranks may send. A send is therefore refused only because its own rank has too many unreceived sends. A
//! receive is refused only because its own rank has too many unfinished receives.
//!
//! A rank can be killed at any instruction. The lists are only an index that speeds up searches. The authoritative state is in the slots
//! and changes by writes of single words: writing the partner of a receive commits the match, and writing the state of a send adds it to
//! the queue. A rank that finds the lock held by an exited rank takes over the lock and rebuilds the lists.

use super::signal::rest;
use super::slot::{Envelope, MessageSlot, Pattern, SlotId, SlotState, SlotStatus, mortal};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use std::ptr::with_exposed_provenance;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Header at the start of the shared memory of each rank's mailbox (message queues).
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Header {
    /// Number of the rank that holds the lock of the mailbox, plus 1. The value 0 means that the mailbox is unlocked.
    lock: AtomicU32,
    /// Nonzero if the mailbox is closed, which means that it accepts no more messages.
    is_closed: AtomicU32,
    /// Sequence number that the next operation queued in the mailbox gets.
    next_order: AtomicU64,
    /// Bounds of the list of posted receives: the index of its first entry, and the number of its entries.
    posted: [AtomicU64; 2],
    /// Bounds of the list of messages without a receive: the index of its first entry, and the number of its entries.
    unexpected: [AtomicU64; 2],
}

/// Entry of a mailbox list: a slot, and the tag by which the operation in the slot is matched.
#[derive(Debug, Default)]
#[repr(C)]
struct QueueEntry {
    slot: AtomicU64,
    tag: AtomicU64,
}

/// Capacity of a rank's mailbox (message queues). All ranks have the same capacity.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Number of ranks that may send to the mailbox.
    pub ranks: u32,
    /// Maximum number of concurrent sends of a rank. It is also the maximum number of concurrent receives of a rank.
    pub operations: u32,
    /// Maximum number of unreceived messages from one rank to another. Values above `operations` have no effect.
    pub messages: u32,
}

impl Capacity {
    /// Returns the number of slots of each rank. A slot is the record of one send or receive in shared memory. The slots of receives
    /// precede those of sends.
    pub fn slots(self) -> u32 {
        2 * self.operations
    }

    /// Returns the lengths of the list of receives and of the list of messages. Each list has space for all operations that may be queued
    /// at the same time.
    fn entries(self) -> [usize; 2] {
        [self.slots() as usize, self.ranks as usize * self.messages.min(self.operations) as usize]
    }

    fn lists(self) -> [u64; 2] {
        let header = size_of::<Header>();
        [header, header + self.entries()[0] * size_of::<QueueEntry>()].map(|at| at as u64)
    }

    fn first_slot(self) -> u64 {
        (self.lists()[1] + (self.entries()[1] * size_of::<QueueEntry>()) as u64).next_multiple_of(align_of::<MessageSlot>() as u64)
    }

    /// Returns the size in bytes of one rank's mailbox (message queues and slots).
    pub fn bytes(self) -> u64 {
        self.first_slot() + u64::from(self.slots()) * size_of::<MessageSlot>() as u64
    }
}

/// Result of posting a send or a receive in a mailbox.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Posted {
    /// The operation has matched the earlier operation in the given slot. The rank that posts the later operation, which is this rank,
    /// copies the data.
    Matched(SlotId),
    /// The operation is queued in the mailbox until a matching operation is posted.
    Queued,
    /// The message is longer than the buffer of the receive. The message stays queued.
    Truncated,
    /// The sender already has [`Capacity::messages`] unreceived messages at the receiver.
    Full,
    /// The receiving rank has closed its mailbox, so the message was not sent.
    Closed,
    /// The lock of the mailbox could not be acquired. The operation was not published.
    Stuck,
}

/// Mailboxes (message queues and slots) of all ranks, as mapped by one rank. Each mailbox consists of [`Capacity::bytes`] bytes of memory,
/// which is initially zero.
#[derive(Clone, Debug)]
pub struct Mailboxes {
    rank: u32,
    capacity: Capacity,
    bases: Arc<[u64]>,
}

/// Mailbox (message queues of one rank) whose lock the current rank holds.
struct Locked<'a> {
    all: &'a Mailboxes,
    rank: u32,
}

/// One of the two lists of a locked mailbox: the posted receives, or the messages without a receive.
struct List<'a> {
    bounds: &'a [AtomicU64; 2],
    entries: &'a [QueueEntry],
}

/// Number of failed attempts to lock a mailbox after which a rank checks that the holder of the lock has not exited. The check is a system
/// call.
const ASK_EVERY: u32 = if cfg!(shuttle) { 1 } else { 64 };

/// Maximum time for which this rank waits for the lock of a mailbox (message queues of one rank).
const PATIENCE: Duration = if cfg!(test) { Duration::from_millis(200) } else { Duration::from_secs(30) };

/// Function that returns true if the rank with the given number has exited. It is called while this rank waits for the lock of a mailbox
/// that the other rank holds.
pub type IsGone<'a> = &'a dyn Fn(u32) -> bool;

impl Mailboxes {
    /// Creates the view that rank `rank` has of the mailboxes of all ranks. `bases` contains the address of each mailbox in this process.
    /// The memory must stay mapped while the view or a clone of it is used.
    pub fn new(rank: u32, capacity: Capacity, bases: Vec<u64>) -> Mailboxes {
        Mailboxes { rank, capacity, bases: bases.into() }
    }

    /// Returns the number of this rank, which uses this view of the mailboxes.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the number of ranks that have a mailbox.
    pub fn ranks(&self) -> u32 {
        self.bases.len() as u32
    }

    /// Returns the number of slots (records of one send or receive in shared memory) of each rank.
    pub fn slots(&self) -> u32 {
        self.capacity.slots()
    }

    /// Returns the address in this process of a rank's mailbox. An invalid rank number can only come from damaged memory; it is replaced by
    /// a valid one.
    pub fn address(&self, rank: u32) -> u64 {
        self.bases[rank as usize % self.bases.len()]
    }

    /// Returns the envelope (sender, tag, size and metadata) of the message that the operation in `slot` sends or has received. An invalid
    /// sender number can only come from damaged memory; it is replaced by a valid one.
    pub fn envelope(&self, slot: &MessageSlot) -> Envelope {
        let told = slot.envelope();
        Envelope { source: told.source % self.ranks(), ..told }
    }

    fn header(&self, rank: u32) -> &Header {
        // SAFETY: the memory is mapped while `self` is used, aligned to a page, and accessed only through atomics. All zeros is a valid
        // value.
        unsafe { &*with_exposed_provenance(self.address(rank) as usize) }
    }

    fn entries(&self, rank: u32, list: usize) -> &[QueueEntry] {
        let first = self.address(rank) + self.capacity.lists()[list];
        // SAFETY: as in `header`, and the range is inside the memory of a mailbox.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance(first as usize), self.capacity.entries()[list]) }
    }

    fn of_rank(&self, rank: u32) -> &[MessageSlot] {
        let first = self.address(rank) + self.capacity.first_slot();
        // SAFETY: as in `entries`.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance(first as usize), self.slots() as usize) }
    }

    /// Returns the slot (record of one send or receive in shared memory) with the given id. An invalid id can only come from damaged
    /// memory; it is replaced by a valid one.
    pub fn slot(&self, id: SlotId) -> &MessageSlot {
        &self.of_rank(id.rank % self.ranks())[(id.slot % self.slots()) as usize]
    }

    /// Returns this rank's slot number `slot`. A slot is the record of one send or receive in shared memory.
    pub fn own(&self, slot: u32) -> &MessageSlot {
        self.slot(self.own_id(slot))
    }

    /// Returns the id of this rank's slot number `slot`. The id is valid on all ranks.
    pub fn own_id(&self, slot: u32) -> SlotId {
        SlotId { rank: self.rank, slot }
    }

    /// Returns the address in this process of the message data that a slot contains.
    pub fn inline_address(&self, id: SlotId) -> u64 {
        std::ptr::from_ref(self.slot(id)).addr() as u64 + MessageSlot::INLINE_OFFSET
    }

    /// Posts a send in the mailbox of rank `to`: matches it with a posted receive, or queues it. The send was prepared in this rank's slot
    /// number `slot`.
    pub fn send(&self, to: u32, slot: u32, is_gone: IsGone<'_>) -> Posted {
        let id = self.own_id(slot);
        let send = self.slot(id);
        let tag = send.pattern().tag;
        let Some(mailbox) = self.lock(to, is_gone) else { return Posted::Stuck };
        if mailbox.header().is_closed.load(Ordering::Relaxed) != 0 {
            return Posted::Closed;
        }
        let posted = mailbox.posted();
        let mut at = 0;
        while let Some(entry) = posted.get(at) {
            let receive_id = SlotId { rank: to, slot: entry.slot.load(Ordering::Relaxed) as u32 };
            let receive = self.slot(receive_id);
            if !receive.pattern().accepts(self.rank, tag) {
                at += 1;
                continue;
            }
            receive.meet(send);
            if send.bytes() > receive.bytes() {
                receive.end_as(SlotStatus::Truncated);
                posted.remove(at);
                continue;
            }
            mailbox.commit(receive, id, send, receive_id, self.rank);
            posted.remove(at);
            return Posted::Matched(receive_id);
        }
        let unexpected = mailbox.unexpected();
        if unexpected.has_all_of(self.rank, self.capacity) {
            return Posted::Full;
        }
        send.order.store(mailbox.next_order(), Ordering::Relaxed);
        mortal();
        send.set_state(SlotState::Queued);
        mortal();
        unexpected.push(id.encode(), tag);
        Posted::Queued
    }

    /// Posts a receive in the mailbox of this rank: matches it with a queued message, or queues it. The receive was prepared in this rank's
    /// slot number `slot`.
    pub fn receive(&self, slot: u32, is_gone: IsGone<'_>) -> Posted {
        let id = self.own_id(slot);
        let receive = self.slot(id);
        let pattern = receive.pattern();
        let Some(mailbox) = self.lock(self.rank, is_gone) else { return Posted::Stuck };
        if let Some((at, send_id)) = mailbox.find(&pattern) {
            let send = self.slot(send_id);
            receive.meet(send);
            if send.bytes() > receive.bytes() {
                receive.end_as(SlotStatus::Truncated);
                return Posted::Truncated;
            }
            mailbox.commit(receive, send_id, send, id, self.rank);
            mailbox.unexpected().remove(at);
            return Posted::Matched(send_id);
        }
        receive.order.store(mailbox.next_order(), Ordering::Relaxed);
        receive.set_state(SlotState::Queued);
        // The list has as many entries as the rank has slots, so it cannot be full.
        mailbox.posted().push(u64::from(slot), 0);
        Posted::Queued
    }

    /// Returns the envelope (sender, tag, size and metadata) of the first message that a receive with this pattern would match now, or
    /// `None` if there is no such message.
    pub fn probe(&self, pattern: &Pattern, is_gone: IsGone<'_>) -> Option<Envelope> {
        self.lock(self.rank, is_gone)?.find(pattern).map(|(_, send)| self.envelope(self.slot(send)))
    }

    /// Marks a slot of this rank as unused, before a new operation is prepared in it. Other ranks ignore an unused slot until it is
    /// published again.
    pub fn release(&self, slot: u32, is_gone: IsGone<'_>) {
        let own = self.own(slot);
        // A rank that repairs the mailbox sets the flags of receives that have ended. This lock prevents it from doing so after the slot is
        // reused.
        let _mailbox = (own.state() == SlotState::Ended && !own.is_send()).then(|| self.lock(self.rank, is_gone));
        own.set_state(SlotState::Free);
    }

    /// Cancels an operation of this rank if it is queued in the mailbox of rank `of` and not matched. `status` becomes the reason. Returns
    /// true if the operation was cancelled.
    pub fn withdraw(&self, of: u32, slot: u32, status: SlotStatus, is_gone: IsGone<'_>) -> bool {
        let Some(mailbox) = self.lock(of, is_gone) else { return false };
        let (id, own) = (self.own_id(slot), self.own(slot));
        if own.state() != SlotState::Queued || own.is_send() && own.peer() != Some(of) {
            return false;
        }
        let (list, word) = if own.is_send() { (mailbox.unexpected(), id.encode()) } else { (mailbox.posted(), u64::from(slot)) };
        own.end_as(status);
        list.remove_word(word);
        true
    }

    /// Removes the messages of rank `rank`, which has exited, from this rank's mailbox. Also ends those receives of this rank for which
    /// `concerns` returns true.
    pub fn forget(&self, rank: u32, concerns: impl Fn(&MessageSlot) -> bool, is_gone: IsGone<'_>) {
        let Some(mailbox) = self.lock(self.rank, is_gone) else { return };
        mailbox.unexpected().retain(|word| {
            let lost = SlotId::decode(word).filter(|id| id.rank == rank);
            // The operation is marked as ended, so that its message does not reappear when the list is rebuilt.
            lost.iter().for_each(|id| self.slot(*id).end_as(SlotStatus::PeerGone));
            lost.is_none()
        });
        mailbox.posted().retain(|word| {
            let receive = self.own(word as u32);
            let is_concerned = concerns(receive);
            if is_concerned {
                receive.end_as(SlotStatus::PeerGone);
            }
            !is_concerned
        });
    }

    /// Closes the mailbox of this rank: ends the queued messages and receives, and makes the mailbox refuse further messages.
    pub fn close(&self, is_gone: IsGone<'_>) {
        let Some(mailbox) = self.lock(self.rank, is_gone) else { return };
        mailbox.header().is_closed.store(1, Ordering::Relaxed);
        mailbox.unexpected().retain(|word| {
            SlotId::decode(word).into_iter().for_each(|id| self.slot(id).end_as(SlotStatus::PeerGone));
            false
        });
        mailbox.posted().retain(|word| {
            self.own(word as u32).end_as(SlotStatus::Cancelled);
            false
        });
    }

    /// True if the mailbox of rank `rank` accepts no more messages.
    pub fn is_closed(&self, rank: u32) -> bool {
        self.header(rank).is_closed.load(Ordering::Acquire) != 0
    }

    /// Locks the mailbox of rank `rank`. Ranks hold such a lock only briefly. If the holder was killed, this rank takes over the lock.
    /// Returns `None` if the mailbox stays locked for [`PATIENCE`], because the holder is stopped or the memory is damaged.
    fn lock(&self, rank: u32, is_gone: IsGone<'_>) -> Option<Locked<'_>> {
        let (word, mine) = (&self.header(rank).lock, self.rank + 1);
        let (mut round, mut until) = (0u32, None);
        loop {
            let held = word.compare_exchange_weak(0, mine, Ordering::Acquire, Ordering::Relaxed);
            let Err(holder) = held else { return Some(Locked { all: self, rank }) };
            if round % ASK_EVERY == ASK_EVERY - 1 && holder > 0 {
                if holder != mine
                    && is_gone(holder - 1)
                    && word.compare_exchange(holder, mine, Ordering::Acquire, Ordering::Relaxed).is_ok()
                {
                    let mailbox = Locked { all: self, rank };
                    mailbox.repair();
                    return Some(mailbox);
                }
                if Instant::now() >= *until.get_or_insert_with(|| Instant::now() + PATIENCE) && cfg!(not(shuttle)) {
                    log::error!("rank {} has locked the mailbox (shared list of messages) of rank {rank} for {PATIENCE:?}", holder - 1);
                    return None;
                }
            }
            pause(round);
            round = round.wrapping_add(1);
        }
    }
}

/// Waits before the next attempt to lock a mailbox: spins after the first failed attempts, and later yields the CPU or sleeps. `round` is
/// the number of failed attempts.
fn pause(round: u32) {
    #[cfg(shuttle)]
    crate::sync::thread::yield_now();
    #[cfg(not(shuttle))]
    if round < 32 {
        std::hint::spin_loop()
    } else {
        rest((round - 32) / 4)
    }
    let _ = (round, rest as fn(u32));
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        #[cfg(test)]
        if tests::is_dead() {
            return;
        }
        self.header().lock.store(0, Ordering::Release);
    }
}

impl Locked<'_> {
    fn header(&self) -> &Header {
        self.all.header(self.rank)
    }

    fn posted(&self) -> List<'_> {
        List { bounds: &self.header().posted, entries: self.all.entries(self.rank, 0) }
    }

    fn unexpected(&self) -> List<'_> {
        List { bounds: &self.header().unexpected, entries: self.all.entries(self.rank, 1) }
    }

    fn next_order(&self) -> u64 {
        self.header().next_order.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the first queued message that matches the pattern, as its index in the list and its slot.
    fn find(&self, pattern: &Pattern) -> Option<(u64, SlotId)> {
        let list = self.unexpected();
        let mut at = 0;
        while let Some(entry) = list.get(at) {
            let id = SlotId::decode(entry.slot.load(Ordering::Relaxed));
            if let Some(id) = id.filter(|id| pattern.accepts(id.rank, entry.tag.load(Ordering::Relaxed))) {
                return Some((at, id));
            }
            at += 1;
        }
        None
    }

    /// Commits a match of a send and a receive. The first store commits it; if this rank is killed afterwards, [`repair`](Locked::repair)
    /// completes the match. `mover` is the rank that copies the data.
    fn commit(&self, receive: &MessageSlot, send_id: SlotId, send: &MessageSlot, receive_id: SlotId, mover: u32) {
        mortal();
        receive.join(send_id, mover);
        mortal();
        self.conclude(receive, send, receive_id, mover);
    }

    fn conclude(&self, receive: &MessageSlot, send: &MessageSlot, receive_id: SlotId, mover: u32) {
        send.join(receive_id, mover);
        mortal();
        send.set_state(SlotState::Matched);
        mortal();
        receive.set_state(SlotState::Matched);
    }

    /// Rebuilds the lists from the states of the slots, after the rank that held the lock was killed at an arbitrary instruction.
    fn repair(&self) {
        let mut receives = Vec::new();
        for (number, receive) in (0..).zip(self.all.of_rank(self.rank)).filter(|(_, slot)| !slot.is_send()) {
            match (receive.state(), receive.partner()) {
                (SlotState::Queued, None) if receive.status() != SlotStatus::Fine => receive.end_as(receive.status()),
                (SlotState::Queued, None) => receives.push((receive.order.load(Ordering::Relaxed), u64::from(number), 0)),
                (SlotState::Queued, Some(partner)) => {
                    let id = SlotId { rank: self.rank, slot: number };
                    self.conclude(receive, self.all.slot(partner), id, receive.mover().unwrap_or(partner.rank));
                }
                (SlotState::Ended, _) => receive.end(),
                _ => {}
            }
        }
        let mut sends = Vec::new();
        for rank in 0..self.all.ranks() {
            let queued = (0..).zip(self.all.of_rank(rank)).filter(|(_, slot)| slot.is_send() && slot.peer() == Some(self.rank));
            for (slot, send) in queued.filter(|(_, slot)| slot.state() == SlotState::Queued) {
                sends.push((send.order.load(Ordering::Relaxed), SlotId { rank, slot }.encode(), send.pattern().tag));
            }
        }
        self.posted().fill(receives);
        self.unexpected().fill(sends);
    }
}

impl List<'_> {
    fn bound(&self, which: usize) -> u64 {
        self.bounds[which].load(Ordering::Relaxed)
    }

    fn length(&self) -> u64 {
        self.bound(1).min(self.entries.len() as u64)
    }

    /// True if rank `rank` has reached its limit of unreceived messages in this list. The list is searched only if the limit is below the
    /// number of concurrent sends of a rank.
    fn has_all_of(&self, rank: u32, Capacity { operations, messages, .. }: Capacity) -> bool {
        let is_of_rank = |at: &u64| SlotId::decode(self.entry(*at).slot.load(Ordering::Relaxed)).is_some_and(|id| id.rank == rank);
        messages < operations && self.length() >= u64::from(messages) && (0..self.length()).filter(is_of_rank).count() >= messages as usize
    }

    fn entry(&self, at: u64) -> &QueueEntry {
        &self.entries[(self.bound(0).wrapping_add(at) % self.entries.len() as u64) as usize]
    }

    fn get(&self, at: u64) -> Option<&QueueEntry> {
        (at < self.length()).then(|| self.entry(at))
    }

    fn push(&self, slot: u64, tag: u64) {
        let at = self.length();
        if at < self.entries.len() as u64 {
            self.set(at, slot, tag);
            self.bounds[1].store(at + 1, Ordering::Relaxed);
        }
    }

    fn set(&self, at: u64, slot: u64, tag: u64) {
        let entry = self.entry(at);
        mortal();
        entry.slot.store(slot, Ordering::Relaxed);
        mortal();
        entry.tag.store(tag, Ordering::Relaxed);
    }

    /// Removes the entry at index `at` and moves all earlier entries by one position. Usually the first entry is removed. Otherwise the
    /// preceding search has already visited the earlier entries, so the cost is similar.
    fn remove(&self, at: u64) {
        for place in (1..=at).rev() {
            let earlier = self.entry(place - 1);
            self.set(place, earlier.slot.load(Ordering::Relaxed), earlier.tag.load(Ordering::Relaxed));
        }
        mortal();
        self.bounds[0].store(self.bound(0).wrapping_add(1) % self.entries.len() as u64, Ordering::Relaxed);
        mortal();
        self.bounds[1].store(self.length().saturating_sub(1), Ordering::Relaxed);
    }

    fn remove_word(&self, word: u64) {
        let found = (0..self.length()).find(|at| self.entry(*at).slot.load(Ordering::Relaxed) == word);
        found.into_iter().for_each(|at| self.remove(at));
    }

    fn retain(&self, keep: impl Fn(u64) -> bool) {
        let mut kept = 0;
        for at in 0..self.length() {
            let entry = self.entry(at);
            let (word, tag) = (entry.slot.load(Ordering::Relaxed), entry.tag.load(Ordering::Relaxed));
            if keep(word) {
                self.set(kept, word, tag);
                kept += 1;
            }
        }
        self.bounds[1].store(kept, Ordering::Relaxed);
    }

    /// Replaces the contents of the list by `entries`. Each is a tuple of sequence number, slot and tag; the list is sorted by sequence
    /// number.
    fn fill(&self, mut entries: Vec<(u64, u64, u64)>) {
        entries.sort_unstable();
        self.bounds.iter().for_each(|bound| bound.store(0, Ordering::Relaxed));
        entries.into_iter().for_each(|(_, slot, tag)| self.push(slot, tag));
    }
}

/// Copies `bytes` bytes of host memory from address `from` to address `to` on the calling thread. The caller guarantees that both ranges
/// are valid and do not overlap.
pub fn copy_host(from: u64, to: u64, bytes: u64) {
    let (from, to) = (with_exposed_provenance::<u8>(from as usize), std::ptr::with_exposed_provenance_mut::<u8>(to as usize));
    // SAFETY: the caller guarantees valid ranges. A message's buffer and the library's own memory do not overlap.
    unsafe { to.copy_from_nonoverlapping(from, bytes as usize) }
}

/// Sets the flag at address `flag`, which belongs to a slot (record of one send or receive), to 1. The caller guarantees that the address
/// is valid.
pub fn raise_host(flag: u64) {
    // SAFETY: the address is a flag of a mailbox, which stays mapped until the flag is set.
    unsafe { super::signal::store(flag, 1) }
}

#[cfg(test)]
#[path = "../../tests/rust/mailbox.rs"]
pub(super) mod tests;
