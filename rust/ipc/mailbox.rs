//! Matching of sends and receives in shared memory, by MPI's rules.
//!
//! Each rank has a mailbox, which all ranks map: receives that it has posted, and messages that have come before them, both in order. A
//! message goes to the first receive that takes it, a receive takes the first message that fits it, and whoever comes second finds the
//! other, under the lock of the receiver's mailbox. Nothing else is needed for a match: no thread of the receiver, no call.
//!
//! A rank can be killed at any instruction. The order of each list is an index for speed; what counts is the state of each slot, which
//! changes by one word: the partner of a receive is the match, and the state of a send is its place in the queue. Whoever finds the lock held
//! by a rank that has ended takes it over and makes the index anew.

use super::signal::rest;
use super::slot::{Envelope, MessageSlot, Pattern, SlotId, SlotState, SlotStatus, mortal};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use std::ptr::with_exposed_provenance;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What stands first in the memory of a mailbox.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Header {
    /// The rank that holds it, counted from 1; 0 for nobody.
    lock: AtomicU32,
    /// Its rank takes no more messages.
    is_closed: AtomicU32,
    /// Of the next that is queued.
    next_order: AtomicU64,
    /// First entry and number of entries.
    posted: [AtomicU64; 2],
    unexpected: [AtomicU64; 2],
}

/// An entry of a list: a slot, and what decides whether it matches.
#[derive(Debug, Default)]
#[repr(C)]
struct QueueEntry {
    slot: AtomicU64,
    tag: AtomicU64,
}

/// How much a mailbox holds; the same for all ranks.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Operations of a rank at a time.
    pub slots: u32,
    /// Messages that wait for their receives.
    pub messages: u32,
}

impl Capacity {
    const fn lists(self) -> [u64; 2] {
        let header = size_of::<Header>() as u64;
        [header, header + self.slots as u64 * size_of::<QueueEntry>() as u64]
    }

    fn first_slot(self) -> u64 {
        (self.lists()[1] + u64::from(self.messages) * size_of::<QueueEntry>() as u64).next_multiple_of(align_of::<MessageSlot>() as u64)
    }

    /// Bytes of the memory of one mailbox.
    pub fn bytes(self) -> u64 {
        self.first_slot() + u64::from(self.slots) * size_of::<MessageSlot>() as u64
    }
}

/// What came of a receive or a send.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Posted {
    /// It has met the other side, and moves the bytes.
    Matched(SlotId),
    /// It waits for the other side.
    Queued,
    /// A receive whose message is longer than its buffer. The message stays.
    Truncated,
    /// A send for which the receiver has no room.
    Full,
    /// A send whose receiver has left.
    Closed,
    /// The mailbox stays locked: nothing was published.
    Stuck,
}

/// The mailboxes of all ranks, as one of them sees them. Each lies in memory of [`Capacity::bytes`] zeros.
#[derive(Clone, Debug)]
pub struct Mailboxes {
    rank: u32,
    capacity: Capacity,
    bases: Arc<[u64]>,
}

/// A mailbox that is locked.
struct Locked<'a> {
    all: &'a Mailboxes,
    rank: u32,
}

/// A list of a mailbox that is locked.
struct List<'a> {
    bounds: &'a [AtomicU64; 2],
    entries: &'a [QueueEntry],
}

/// So many looks at a lock come before its holder is asked after, which takes a system call.
const ASK_EVERY: u32 = if cfg!(shuttle) { 1 } else { 64 };

/// How long a mailbox may stay locked.
const PATIENCE: Duration = if cfg!(test) { Duration::from_millis(200) } else { Duration::from_secs(30) };

/// Whether a rank has ended, asked by whoever waits for it to unlock a mailbox.
pub type IsGone<'a> = &'a dyn Fn(u32) -> bool;

impl Mailboxes {
    /// Those at these addresses, one for each rank, of which this is `rank`. They stay mapped for as long as the result, and its clones, are
    /// used.
    pub fn new(rank: u32, capacity: Capacity, bases: Vec<u64>) -> Mailboxes {
        Mailboxes { rank, capacity, bases: bases.into() }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many there are.
    pub fn ranks(&self) -> u32 {
        self.bases.len() as u32
    }

    /// Operations of each rank at a time.
    pub fn slots(&self) -> u32 {
        self.capacity.slots
    }

    /// Where a mailbox is; of a rank that does not exist, that of another which does.
    pub fn address(&self, rank: u32) -> u64 {
        self.bases[rank as usize % self.bases.len()]
    }

    /// The message that an operation is, or has met, as damaged memory may tell it: its sender is a rank in any case.
    pub fn envelope(&self, slot: &MessageSlot) -> Envelope {
        let told = slot.envelope();
        Envelope { source: told.source % self.ranks(), ..told }
    }

    fn header(&self, rank: u32) -> &Header {
        // SAFETY: mapped for as long as this is used, aligned to a page, and looked at through atomics alone; zeros are a value.
        unsafe { &*with_exposed_provenance(self.address(rank) as usize) }
    }

    fn entries(&self, rank: u32, list: usize, count: u32) -> &[QueueEntry] {
        let first = self.address(rank) + self.capacity.lists()[list];
        // SAFETY: as above, and inside of the memory of a mailbox.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance(first as usize), count as usize) }
    }

    fn of_rank(&self, rank: u32) -> &[MessageSlot] {
        let first = self.address(rank) + self.capacity.first_slot();
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance(first as usize), self.capacity.slots as usize) }
    }

    /// A slot. One that does not exist, which only damaged memory names, is taken for another that does.
    pub fn slot(&self, id: SlotId) -> &MessageSlot {
        &self.of_rank(id.rank % self.ranks())[(id.slot % self.capacity.slots) as usize]
    }

    /// A slot of this rank.
    pub fn own(&self, slot: u32) -> &MessageSlot {
        self.slot(self.own_id(slot))
    }

    /// A slot of this rank, as all know it.
    pub fn own_id(&self, slot: u32) -> SlotId {
        SlotId { rank: self.rank, slot }
    }

    /// The address of bytes that are kept in a slot.
    pub fn inline_address(&self, id: SlotId) -> u64 {
        std::ptr::from_ref(self.slot(id)).addr() as u64 + MessageSlot::INLINE_OFFSET
    }

    /// Publishes a send that was prepared, or matches it.
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
        if unexpected.is_full() {
            return Posted::Full;
        }
        send.order.store(mailbox.next_order(), Ordering::Relaxed);
        mortal();
        send.set_state(SlotState::Queued);
        mortal();
        unexpected.push(id.encode(), tag);
        Posted::Queued
    }

    /// Publishes a receive that was prepared, or matches it.
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
        // There are as many entries as slots.
        mailbox.posted().push(u64::from(slot), 0);
        Posted::Queued
    }

    /// The first message that a receive would take now.
    pub fn probe(&self, pattern: &Pattern, is_gone: IsGone<'_>) -> Option<Envelope> {
        self.lock(self.rank, is_gone)?.find(pattern).map(|(_, send)| self.envelope(self.slot(send)))
    }

    /// A slot of this rank that nothing uses is about to be prepared: until it is published nobody concludes anything about it.
    pub fn release(&self, slot: u32, is_gone: IsGone<'_>) {
        let own = self.own(slot);
        // Whoever repairs the mailbox raises flags of receives that have ended.
        let _mailbox = (own.state() == SlotState::Ended && !own.is_send()).then(|| self.lock(self.rank, is_gone));
        own.set_state(SlotState::Free);
    }

    /// Ends an operation of this rank that is unmatched in the mailbox of `of`; whether it was.
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

    /// A rank has ended: its messages are gone, and receives that `concerns` are ended.
    pub fn forget(&self, rank: u32, concerns: impl Fn(&MessageSlot) -> bool, is_gone: IsGone<'_>) {
        let Some(mailbox) = self.lock(self.rank, is_gone) else { return };
        mailbox.unexpected().retain(|word| {
            let lost = SlotId::decode(word).filter(|id| id.rank == rank);
            // So that it does not come back when the list is made anew.
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

    /// This rank takes no more messages: those that have come, and its receives, are ended.
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

    /// Whether a rank takes no more messages.
    pub fn is_closed(&self, rank: u32) -> bool {
        self.header(rank).is_closed.load(Ordering::Acquire) != 0
    }

    /// Locks a mailbox. Sections are short; a rank that is killed in one does not keep it. `None` where nobody has unlocked it for [`PATIENCE`]:
    /// its holder is stopped, or the memory is damaged.
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
                    log::error!("rank {} has held the mailbox of rank {rank} for {PATIENCE:?}", holder - 1);
                    return None;
                }
            }
            pause(round);
            round = round.wrapping_add(1);
        }
    }
}

/// See [`Mailboxes::lock`].
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
        List { bounds: &self.header().posted, entries: self.all.entries(self.rank, 0, self.all.capacity.slots) }
    }

    fn unexpected(&self) -> List<'_> {
        List { bounds: &self.header().unexpected, entries: self.all.entries(self.rank, 1, self.all.capacity.messages) }
    }

    fn next_order(&self) -> u64 {
        self.header().next_order.fetch_add(1, Ordering::Relaxed)
    }

    /// The first message that fits, and its place in the list.
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

    /// The match. What comes after its first line, [`repair`](Locked::repair) does too.
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

    /// Makes the lists anew from the states of slots. The rank that held the lock has ended at any point.
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

    fn is_full(&self) -> bool {
        self.length() == self.entries.len() as u64
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

    /// Those before it move up by one: it was found by looking at all of them, and mostly it is the first.
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

    /// `entries` are order, slot and tag.
    fn fill(&self, mut entries: Vec<(u64, u64, u64)>) {
        entries.sort_unstable();
        self.bounds.iter().for_each(|bound| bound.store(0, Ordering::Relaxed));
        entries.into_iter().for_each(|(_, slot, tag)| self.push(slot, tag));
    }
}

/// Copies bytes of host memory on the calling thread. The caller vouches for both ranges, as it does for those of a transfer.
pub fn copy_host(from: u64, to: u64, bytes: u64) {
    let (from, to) = (with_exposed_provenance::<u8>(from as usize), std::ptr::with_exposed_provenance_mut::<u8>(to as usize));
    // SAFETY: the caller vouches for the ranges; of a message's buffer and the library's own memory they are apart.
    unsafe { to.copy_from_nonoverlapping(from, bytes as usize) }
}

/// Raises a flag of a slot on the calling thread. The caller vouches for its address.
pub fn raise_host(flag: u64) {
    // SAFETY: a flag of a mailbox, which stays mapped until it was raised.
    unsafe { super::signal::store(flag, 1) }
}

#[cfg(test)]
#[path = "../../tests/rust/mailbox.rs"]
pub(super) mod tests;
