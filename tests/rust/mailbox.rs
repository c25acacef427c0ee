//! Tests the mailbox (list of unmatched messages of a rank in shared memory) alone. Ranks die at any point while they match a message. The
//! lock is tested with all schedules of the model checker shuttle.

use super::*;
use crate::{Preparation, SlotBuffer};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ops::Deref;

thread_local! {
    /// Number of memory accesses after which this thread dies; `None` if it must not die.
    static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Panic payload of a rank that dies.
struct Death;

pub(crate) fn mortal() {
    match LEFT.get() {
        None => {}
        Some(0) => std::panic::resume_unwind(Box::new(Death)),
        Some(left) => LEFT.set(Some(left - 1)),
    }
}

pub(super) fn is_dead() -> bool {
    LEFT.get() == Some(0) && std::thread::panicking()
}

/// Runs `work`, and lets the rank die after `steps` accesses of the mailbox. Returns true if it died.
fn dies_after(steps: u32, work: impl FnOnce()) -> bool {
    LEFT.set(Some(steps));
    let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err();
    LEFT.set(None);
    died
}

const CAPACITY: Capacity = Capacity { ranks: 3, operations: 4, messages: 8 };

/// Memory of one rank's mailbox.
struct Memory(*mut u8);

impl Memory {
    fn layout() -> Layout {
        Layout::from_size_align(CAPACITY.bytes() as usize, 4096).expect("a layout")
    }

    fn new() -> Memory {
        // SAFETY: not empty. The parts are located and aligned as `Mailboxes` expects.
        unsafe {
            let base = alloc_zeroed(Memory::layout());
            base.cast::<Header>().write(Header::default());
            let [posted, unexpected] = CAPACITY.lists().map(|at| base.add(at as usize).cast::<QueueEntry>());
            for (list, entries) in [posted, unexpected].into_iter().zip(CAPACITY.entries()) {
                (0..entries).for_each(|at| list.add(at).write(QueueEntry::default()));
            }
            let slots = base.add(CAPACITY.first_slot() as usize).cast::<MessageSlot>();
            (0..CAPACITY.slots() as usize).for_each(|at| slots.add(at).write(MessageSlot::default()));
            Memory(base)
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout. Nothing in it needs to be dropped.
        unsafe { dealloc(self.0, Memory::layout()) }
    }
}

/// The mailboxes of all ranks, as each rank maps them, with their memory.
struct Ranks {
    seen: Vec<Mailboxes>,
    _memory: Vec<Memory>,
}

impl Deref for Ranks {
    type Target = [Mailboxes];
    fn deref(&self) -> &[Mailboxes] {
        &self.seen
    }
}

fn ranks(count: u32) -> Ranks {
    let memory: Vec<Memory> = (0..count).map(|_| Memory::new()).collect();
    let bases: Vec<u64> = memory.iter().map(|memory| memory.0.expose_provenance() as u64).collect();
    Ranks { seen: (0..count).map(|rank| Mailboxes::new(rank, CAPACITY, bases.clone())).collect(), _memory: memory }
}

fn prepare(mailboxes: &Mailboxes, slot: u32, is_send: bool, peer: Option<u32>, tag: u64, mask: u64, bytes: u64) {
    let of = Preparation { peer, tag, mask, bytes, buffer: SlotBuffer::None, metadata: &[tag as u8], is_send, is_buffered: false };
    mailboxes.own(slot).prepare(mailboxes.rank(), &of);
}

fn send(mailboxes: &Mailboxes, slot: u32, to: u32, tag: u64, bytes: u64, is_gone: IsGone<'_>) -> Posted {
    prepare(mailboxes, slot, true, Some(to), tag, u64::MAX, bytes);
    mailboxes.send(to, slot, is_gone)
}

fn receive(mailboxes: &Mailboxes, slot: u32, source: Option<u32>, tag: u64, mask: u64, bytes: u64, is_gone: IsGone<'_>) -> Posted {
    prepare(mailboxes, slot, false, source, tag, mask, bytes);
    mailboxes.receive(slot, is_gone)
}

fn nobody(_: u32) -> bool {
    false
}

/// Returns the entries of a list.
fn words(list: &List<'_>) -> Vec<u64> {
    (0..list.length()).map(|at| list.entry(at).slot.load(Ordering::Relaxed)).collect()
}

/// Checks the whole mailbox of rank 0: each slot is in exactly the list that its state requires, lists are in order, and matches are
/// mutual.
fn check(all: &[Mailboxes], is_gone: IsGone<'_>) {
    let mailbox = all[0].lock(0, is_gone).expect("unlocked");
    let (posted, unexpected) = (words(&mailbox.posted()), words(&mailbox.unexpected()));
    let mut expected: Vec<(u64, u64)> = Vec::new();
    for slot in 0..CAPACITY.slots() {
        let receive = all[0].own(slot);
        match receive.state() {
            SlotState::Queued if !receive.is_send() => expected.push((receive.order.load(Ordering::Relaxed), u64::from(slot))),
            SlotState::Matched if !receive.is_send() => {
                let send = all[0].slot(receive.partner().expect("a match has a partner"));
                assert_eq!((send.state(), send.partner()), (SlotState::Matched, Some(SlotId { rank: 0, slot })));
                assert_eq!(receive.envelope(), send.envelope());
            }
            SlotState::Ended => assert!(receive.has_moved(), "whoever waits for it is told"),
            _ => {}
        }
    }
    expected.sort_unstable();
    assert_eq!(posted, expected.iter().map(|(_, slot)| *slot).collect::<Vec<_>>());
    let mut expected: Vec<(u64, u64)> = Vec::new();
    for (rank, of) in (0..).zip(all) {
        for slot in (0..CAPACITY.slots()).filter(|slot| of.own(*slot).is_send() && of.own(*slot).state() == SlotState::Queued) {
            expected.push((of.own(slot).order.load(Ordering::Relaxed), SlotId { rank, slot }.encode()));
        }
    }
    expected.sort_unstable();
    assert_eq!(unexpected, expected.iter().map(|(_, word)| *word).collect::<Vec<_>>());
}

/// Kills rank 1 at every point of a send with this tag and size. Rank 0's mailbox holds various waiting operations.
fn a_sender_dies(tag: u64, bytes: u64) -> u32 {
    for steps in 0.. {
        let all = ranks(3);
        let is_gone = |rank: u32| rank == 1;
        for (slot, (source, tag, mask, bytes)) in (0..).zip([
            (None, 1, u64::MAX, 100),
            (Some(2), 0, 0, 100),
            (None, 2, 2, 4),
            (None, 2, u64::MAX, 100),
            (Some(1), 6, u64::MAX, 8),
        ]) {
            assert_eq!(receive(&all[0], slot, source, tag, mask, bytes, &nobody), Posted::Queued);
        }
        assert_eq!(send(&all[1], 0, 0, 8, 5, &nobody), Posted::Queued);
        assert_eq!(send(&all[2], 0, 0, 9, 5, &nobody), Posted::Matched(SlotId { rank: 0, slot: 1 }));
        assert_eq!(send(&all[2], 1, 0, 9, 5, &nobody), Posted::Queued);
        let died = dies_after(steps, || assert_ne!(send(&all[1], 1, 0, tag, bytes, &nobody), Posted::Full));
        check(&all, &is_gone);
        // The other ranks continue to work.
        all[0].forget(1, |receive| receive.peer() == Some(1), &is_gone);
        check(&all, &is_gone);
        let first = all[0].own(0).state() == SlotState::Queued;
        let met = send(&all[2], 2, 0, 1, 5, &is_gone);
        assert_eq!(met, if first { Posted::Matched(SlotId { rank: 0, slot: 0 }) } else { Posted::Queued });
        assert_eq!(receive(&all[0], 5, None, 9, u64::MAX, 5, &is_gone), Posted::Matched(SlotId { rank: 2, slot: 1 }));
        check(&all, &is_gone);
        if !died {
            return steps;
        }
    }
    unreachable!("each send ends")
}

#[test]
fn a_sender_that_dies_at_any_step_leaves_the_mailbox_whole() {
    // The four sends: one matches the first receive; one is too long for a receive and matches a later one; one is too long for the only
    // matching receive; one matches no receive.
    for (tag, bytes) in [(1, 5), (2, 50), (2, 500), (16, 5)] {
        let steps = a_sender_dies(tag, bytes);
        assert!(steps > 3, "{steps} steps");
    }
}

/// Tests damaged mailboxes. Another process may write anything into a mailbox. This must not make a call of this process panic, access
/// other memory, or never return.
#[test]
fn damaged_memory_does_no_harm_to_others() {
    let mut state = 1u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..3000 {
        let all = ranks(2);
        let damage = |random: &mut dyn FnMut() -> u64| {
            for mailbox in 0..2 {
                let words = CAPACITY.bytes() as usize / 8;
                // SAFETY: the memory of a mailbox, as atomics.
                let words: &[AtomicU64] =
                    unsafe { std::slice::from_raw_parts(with_exposed_provenance(all[0].address(mailbox) as usize), words) };
                for word in &words[1..] {
                    let value = match random() % 8 {
                        0 => random(),
                        1 => u64::MAX - random() % 3,
                        2 => random() % 12,
                        3 => ((random() % 4) << 32) + random() % 12,
                        _ => continue,
                    };
                    word.store(value, Ordering::Relaxed);
                }
            }
        };
        damage(&mut random);
        let is_gone = |rank: u32| rank != 1;
        for step in 0..6 {
            let slot = (random() % 8) as u32;
            match (round + step) % 6 {
                0 => drop(send(&all[1], slot, 0, random(), random(), &is_gone)),
                1 => drop(receive(&all[1], slot, None, random(), random() & random(), random(), &is_gone)),
                2 => drop(all[1].withdraw(random() as u32, slot, SlotStatus::Cancelled, &is_gone)),
                3 => all[1].forget(0, |receive| receive.peer() == Some(0), &is_gone),
                4 => {
                    let found = all[1].probe(&Pattern { source: None, tag: 0, mask: 0 }, &is_gone);
                    assert!(found.is_none_or(|found| found.source < 2 && found.metadata.len() <= crate::METADATA_BYTES));
                }
                _ => all[1].close(&is_gone),
            }
            // The holder of the lock appears to have exited, so the lists are rebuilt from the slots.
            all[1].header(1).lock.store([0, 1, 1000][(random() % 3) as usize], Ordering::Relaxed);
            assert!(all[1].envelope(all[1].own(slot)).source < 2);
            drop(all[1].own(slot).text());
            if step == 3 {
                damage(&mut random);
            }
        }
    }
}

#[test]
fn whoever_waits_for_a_stream_is_let_go_and_knows_that_it_has_not_come() {
    let all = ranks(1);
    let [slot, come] = [0, 1].map(|slot| all[0].own(slot));
    come.ready.store(1, Ordering::Release);
    [slot, come].into_iter().for_each(MessageSlot::let_go);
    let seen = [slot, come].map(|slot| (slot.is_ready(), slot.has_come()));
    assert_eq!(seen, [(true, false), (true, true)]);
    slot.ready.store(1, Ordering::Release);
    assert!(slot.has_come(), "the stream came after all, and the slot may be used again");
}

#[cfg(not(shuttle))]
#[test]
fn a_mailbox_that_stays_locked_is_given_up() {
    let all = ranks(2);
    // The lock appears to be held by the rank itself, and then by another rank that is alive.
    for holder in [2, 1] {
        all[1].header(0).lock.store(holder, Ordering::Relaxed);
        assert_eq!(send(&all[1], 0, 0, 1, 5, &nobody), Posted::Stuck);
        all[1].header(0).lock.store(0, Ordering::Relaxed);
        assert_eq!(send(&all[1], 0, 0, 1, 5, &nobody), Posted::Queued);
        assert!(all[1].withdraw(0, 0, SlotStatus::Cancelled, &nobody));
    }
}

/// Kills rank 0 at every point of a receive that finds a message, or of closing its mailbox. The sender must then cancel its message, or
/// find that it has matched, exactly once.
#[test]
fn a_send_to_a_rank_that_dies_at_any_step_is_ended_once() {
    for closes in [false, true] {
        let mut outcomes = [0, 0];
        for steps in 0.. {
            let all = ranks(2);
            let is_gone = |rank: u32| rank == 0;
            assert_eq!(send(&all[1], 0, 0, 1, 5, &nobody), Posted::Queued);
            assert_eq!(send(&all[1], 1, 0, 2, 5, &nobody), Posted::Queued);
            let died = dies_after(steps, || {
                if closes {
                    all[0].close(&nobody)
                } else {
                    let _ = receive(&all[0], 0, Some(1), 1, u64::MAX, 8, &nobody);
                }
            });
            let withdrawn = all[1].withdraw(0, 0, SlotStatus::PeerGone, &is_gone);
            let sent = all[1].own(0);
            outcomes[usize::from(withdrawn)] += 1;
            match sent.state() {
                SlotState::Ended => assert_eq!(sent.status(), SlotStatus::PeerGone),
                SlotState::Matched => {
                    assert_eq!((withdrawn, sent.partner(), sent.mover()), (false, Some(SlotId { rank: 0, slot: 0 }), Some(0)))
                }
                state => panic!("{state:?}"),
            }
            assert!(!all[1].withdraw(0, 0, SlotStatus::PeerGone, &is_gone), "it has ended");
            // This slot is now used for another rank, so closing the mailbox must not cancel it.
            prepare(&all[1], 0, true, Some(1), 7, u64::MAX, 5);
            assert_eq!(all[1].send(1, 0, &is_gone), Posted::Queued);
            assert!(!all[1].withdraw(0, 0, SlotStatus::PeerGone, &is_gone));
            if !died {
                break;
            }
        }
        assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}");
    }
}

#[cfg(shuttle)]
mod models {
    use super::*;
    use crate::sync::thread;

    fn model(test: fn()) {
        shuttle::check_random(test, 1000);
        shuttle::check_pct(test, 1000, 3);
    }

    #[test]
    fn shuttle_each_message_meets_one_receive_and_one_side_moves_it() {
        model(|| {
            let all = ranks(3);
            let senders: Vec<_> = [1, 2]
                .map(|rank: usize| {
                    let own = all[rank].clone();
                    thread::spawn(move || (0..2).map(|slot| send(&own, slot, 0, u64::from(slot), 1, &nobody)).collect::<Vec<_>>())
                })
                .into_iter()
                .collect();
            let own = all[0].clone();
            let receiver =
                thread::spawn(move || (0..4).map(|slot| receive(&own, slot, None, u64::from(slot % 2), 1, 8, &nobody)).collect::<Vec<_>>());
            let mut posted: Vec<Posted> = senders.into_iter().flat_map(|sender| sender.join().unwrap()).collect();
            posted.extend(receiver.join().unwrap());
            let moved = posted.iter().filter(|posted| matches!(posted, Posted::Matched(_))).count();
            assert_eq!(moved, 4, "{posted:?}");
            check(&all, &nobody);
            for rank in [1, 2] {
                // Messages are received in the order in which they were sent.
                let partner = |slot| all[rank].own(slot).partner().unwrap().slot;
                assert_eq!((partner(0) % 2, partner(1) % 2), (0, 1));
            }
        });
    }

    #[test]
    fn shuttle_the_lock_of_a_rank_that_has_died_goes_to_one_other_at_a_time() {
        model(|| {
            let all = ranks(3);
            let is_gone = |rank: u32| rank == 1;
            let dying = all[1].clone();
            let victim = thread::spawn(move || std::mem::forget(dying.lock(0, &nobody)));
            victim.join().unwrap();
            let (one, other) = (all[0].clone(), all[2].clone());
            let receiver = thread::spawn(move || receive(&one, 0, Some(2), 0, 0, 8, &is_gone));
            let sender = thread::spawn(move || send(&other, 0, 0, 3, 8, &is_gone));
            let (received, sent) = (receiver.join().unwrap(), sender.join().unwrap());
            let pair = (received, sent);
            let (send_id, receive_id) = (SlotId { rank: 2, slot: 0 }, SlotId { rank: 0, slot: 0 });
            let fine = pair == (Posted::Matched(send_id), Posted::Queued) || pair == (Posted::Queued, Posted::Matched(receive_id));
            assert!(fine, "{pair:?}");
            check(&all, &is_gone);
        });
    }

    #[test]
    fn shuttle_a_receive_in_a_slot_that_was_ended_is_not_ended_by_a_repair() {
        model(|| {
            let all = ranks(3);
            let is_gone = |rank: u32| rank == 1;
            assert_eq!(receive(&all[0], 0, Some(2), 5, u64::MAX, 8, &nobody), Posted::Queued);
            assert!(all[0].withdraw(0, 0, SlotStatus::Cancelled, &nobody));
            let dying = all[1].clone();
            thread::spawn(move || std::mem::forget(dying.lock(0, &nobody))).join().unwrap();
            let (one, other) = (all[0].clone(), all[2].clone());
            let receiver = thread::spawn(move || {
                one.release(0, &is_gone);
                receive(&one, 0, Some(2), 6, u64::MAX, 8, &is_gone)
            });
            let sender = thread::spawn(move || send(&other, 0, 0, 9, 5, &is_gone));
            assert_eq!(receiver.join().unwrap(), Posted::Queued);
            sender.join().unwrap();
            assert!(!all[0].own(0).has_moved(), "nothing has moved");
            check(&all, &is_gone);
        });
    }

    #[test]
    fn shuttle_a_described_buffer_is_fetched_once_or_cancelled() {
        model(|| {
            let all = ranks(3);
            prepare(&all[0], 0, true, None, 0, 0, 8);
            all[0].own(0).describe();
            let uses = all[0].own(0).uses();
            let takers = [0, 1, 2].map(|rank: usize| {
                let own = all[rank].clone();
                thread::spawn(move || own.slot(SlotId { rank: 0, slot: 0 }).take_described(uses, own.own_id(5)))
            });
            let taken = takers.into_iter().map(|taker| taker.join().unwrap()).filter(|taken| *taken).count();
            assert_eq!(taken, 1);
        });
    }
}
