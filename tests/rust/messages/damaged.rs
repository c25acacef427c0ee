//! Tests a rank that describes the memory of an operation wrongly in shared memory. The other rank must copy nothing, and both ranks must
//! get an error with the reason.

use super::single::Rank;
use super::{TOPOLOGY, options};
use crate::node_plans::{as_ranks, context, memory};
use mpgpu_backend::{BackendError, CompletionState};
use mpgpu_ipc::Handle;
use mpgpu_ranks::message::Operation;
use mpgpu_ranks::{Allgather, NodeGroup};
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex};

const PAGE: u64 = 4096;

/// Initial contents of a rank's memory: outside of the messages, and inside.
const FILL: [u8; 2] = [0x11, 0x22];

/// Offsets of fields in a mailbox slot, in 8-byte words relative to the handle of the slot's memory. The first is that of the buffer.
const BUFFER: isize = -16;
const TAG: isize = -14;
const BYTES: isize = -12;
const OFFSET: isize = -2;

/// Tag of the operation whose slot is damaged.
const DAMAGED: u64 = 2;

/// Allgather function that records the exchanged data.
struct Overheard(Box<dyn Allgather>, Arc<Mutex<String>>);

impl Allgather for Overheard {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        self.0.allgather(send, receive)?;
        let said = String::from_utf8_lossy(send);
        if said.contains("\"mailbox\"") {
            *self.1.lock().expect("no panic") = said.trim_end_matches('\0').to_owned();
        }
        Ok(())
    }
}

/// Mailbox slot of an operation whose memory is exported.
struct Slot<'a> {
    mailbox: &'a [AtomicU64],
    handle: usize,
}

impl Slot<'_> {
    fn find(mailbox: &[AtomicU64]) -> Slot<'_> {
        let magic = u64::from_le_bytes(*b"mpgpu-mh");
        let is_word = |at: usize, word: u64| mailbox[at].load(Ordering::Relaxed) == word;
        let found = (0..mailbox.len()).find(|at| is_word(*at, magic) && is_word(at.wrapping_add_signed(TAG), DAMAGED));
        let slot = Slot { mailbox, handle: found.expect("the operation offers memory") };
        let said = [BYTES, BUFFER, OFFSET].map(|at| slot.at(at).load(Ordering::Relaxed));
        assert_eq!(said, [PAGE, 2, PAGE], "bytes, memory that others map, offset");
        slot
    }

    fn at(&self, word: isize) -> &AtomicU64 {
        &self.mailbox[self.handle.wrapping_add_signed(word)]
    }

    fn set(&self, word: isize, value: u64) {
        self.at(word).store(value, Ordering::Relaxed);
    }

    /// Stores a changed handle in the slot, with a valid checksum.
    fn forge(&self, change: impl Fn(&mut Handle)) {
        let words: Vec<u8> = (0..16).flat_map(|at| self.at(at).load(Ordering::Relaxed).to_le_bytes()).collect();
        let mut decoded = Handle::decode(&std::array::from_fn(|at| words[at])).expect("a handle");
        change(&mut decoded);
        for (at, word) in (0..).zip(decoded.encode().chunks_exact(8)) {
            self.set(at, u64::from_le_bytes(word.try_into().expect("eight bytes")));
        }
    }
}

type Damage = fn(&Slot<'_>);

/// Wrong descriptions of a rank's memory, with the error that the other rank must get.
const DAMAGES: [(Damage, &str); 7] = [
    (|slot| slot.set(OFFSET, 2 * PAGE + 1), "announces 4096 bytes at offset 8193, which are outside of its memory"),
    (|slot| slot.set(OFFSET, u64::MAX), "which are outside of its memory"),
    (|slot| slot.set(BUFFER, 1), "announces 4096 bytes inside a message, which holds at most 1024 bytes"),
    (|slot| slot.set(BUFFER, 0), "0x0"),
    (|slot| slot.set(5, 1), "checksum"),
    (|slot| slot.forge(|handle| handle.allocation_bytes = 1 << 40), "the allocation has 12288"),
    (|slot| slot.forge(|handle| (handle.allocation_bytes, handle.offset) = (1 << 50, 1 << 40)), "the allocation has 12288"),
];

fn assert_failed(operation: &Operation, expected: &str) {
    let result = operation.wait();
    let Err(BackendError::Driver { what, reason, .. }) = &result else { panic!("{expected}: {result:?}") };
    assert!(what == "moving a message" && reason.contains(expected), "{expected}: {reason}");
}

/// Tests two ranks with three pages of memory each. Rank 0 starts an operation on the middle page and damages its description, and rank 1
/// matches it.
fn the_damaged_is_refused(is_send: bool, is_mapped: bool, damage: Damage, expected: &str) {
    let barrier = Barrier::new(2);
    as_ranks(2, |rank, seat| {
        let heard = Arc::default();
        let seat = Box::new(Overheard(seat, Arc::clone(&heard)));
        let context = context(TOPOLOGY, Some(vec![rank]));
        let node = Arc::new(NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node"));
        let messenger = node.messenger(options()).expect("a messenger");
        let rank = Rank { rank, context, messenger };
        let (other, base) = (1 - rank.rank, rank.memory(3 * PAGE, FILL[rank.rank as usize]));
        let middle = base + PAGE;
        let is_untouched = || memory(base, 3 * PAGE).iter().all(|byte| *byte == FILL[rank.rank as usize]);
        let exchange = |tag: u64| {
            let sent = rank.send(middle, PAGE, other, tag).expect("sent");
            let into = rank.memory(PAGE, 0);
            rank.receive(into, PAGE, other, tag).wait().expect("it was sent");
            sent.wait().expect("received");
            assert!(memory(into, PAGE).iter().all(|byte| *byte == FILL[other as usize]));
        };
        if is_mapped {
            exchange(1);
        }
        if rank.rank == 0 {
            let posted = if is_send { rank.send(middle, PAGE, 1, DAMAGED).expect("sent") } else { rank.receive(middle, PAGE, 1, DAMAGED) };
            let said: serde_json::Value = serde_json::from_str(&heard.lock().expect("no panic")).expect("an offer");
            let mailbox: Vec<u8> = serde_json::from_value(said["Ok"]["mailbox"][1].clone()).expect("a handle");
            let mailbox = Handle::decode(&mailbox.try_into().expect("a handle")).expect("a handle");
            let (address, _) = rank.context.state().import_memory(&mailbox).expect("its own");
            // SAFETY: the memory of this rank's mailbox, which exists until the messenger ends, accessed as atomics.
            let words = unsafe { std::slice::from_raw_parts(with_exposed_provenance(address as usize), mailbox.bytes as usize / 8) };
            damage(&Slot::find(words));
            rank.context.state().close_memory(address).expect("it is imported");
            barrier.wait();
            assert_failed(&posted, expected);
        } else {
            barrier.wait();
            // The memory is so large that only the description by the other rank limits the message.
            let large = rank.memory(8 * PAGE, FILL[1]);
            let met = if is_send { rank.receive(large, 8 * PAGE, 0, DAMAGED) } else { rank.send(middle, PAGE, 0, DAMAGED).expect("sent") };
            assert_failed(&met, expected);
            assert!(memory(large, 8 * PAGE).iter().all(|byte| *byte == FILL[1]));
        }
        barrier.wait();
        assert!(is_untouched(), "{expected}");
        // Both ranks can continue after the error.
        exchange(3);
        barrier.wait();
    });
}

#[test]
fn a_send_whose_slot_names_what_is_not_there_is_not_read() {
    for is_mapped in [false, true] {
        for (damage, expected) in DAMAGES {
            the_damaged_is_refused(true, is_mapped, damage, expected);
        }
        // The described range is longer than the memory. The receive is large enough, so the message is not refused as truncated.
        the_damaged_is_refused(
            true,
            is_mapped,
            |slot| slot.set(BYTES, 3 * PAGE),
            "announces 12288 bytes at offset 4096, which are outside of its memory",
        );
    }
}

#[test]
fn a_receive_whose_slot_names_what_is_not_there_is_not_written() {
    for is_mapped in [false, true] {
        for (damage, expected) in DAMAGES {
            the_damaged_is_refused(false, is_mapped, damage, expected);
        }
    }
}
