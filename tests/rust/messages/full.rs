//! Tests ranks whose messengers cannot hold more operations. Such ranks must not block each other.

use super::single::{DEFAULT, Rank, ranks};
use crate::common::Random;
use crate::node_plans::memory;
use mpgpu_backend::CompletionState;
use mpgpu_contexts::Error;
use mpgpu_ranks::message::{MessengerOptions, Operation, Pattern};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest time for which ranks may wait for each other, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

const ANY: Pattern = Pattern { source: None, tag: 0, mask: 0 };

/// Allocates pageable memory that exists until the process ends. A static variable owns it, so the leak checker does not report it.
fn pageable(bytes: usize) -> u64 {
    static OWNED: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
    let mut memory = vec![0_u8; bytes];
    let address = memory.as_mut_ptr().expose_provenance() as u64;
    OWNED.lock().expect("no thread has panicked").push(memory);
    address
}

fn tag_of(rank: u32, number: u64) -> u64 {
    u64::from(rank) << 32 | number
}

/// Returns the byte with which a short message with this tag is filled.
fn byte_of(tag: u64) -> u8 {
    (tag ^ tag >> 32).wrapping_mul(37) as u8
}

impl Rank {
    fn ranks(&self) -> u32 {
        self.messenger.node().ranks()
    }

    /// Sends one byte, which the library buffers, so that the request is complete when this function returns.
    fn send_byte(&self, to: u32, tag: u64) -> Result<Arc<Operation>, Error> {
        self.send(pageable_byte(byte_of(tag)), 1, to, tag)
    }

    /// Receives one byte of a message that has already arrived, and checks it.
    fn receive_byte(&self, pattern: &Pattern) {
        let into = pageable(1);
        let got = self.messenger.receive(into, 1, pattern, DEFAULT).expect("receives have room of their own");
        got.wait().expect("it was sent");
        assert_eq!(memory(into, 1)[0], byte_of(got.envelope().expect("it has met a message").tag));
    }

    /// Sends messages to the other ranks alternately until a send is refused. Counts the messages to each rank, and returns the error.
    fn fill(&self, sent_to: &[AtomicU64]) -> String {
        for number in 0.. {
            let to = (self.rank + 1 + (number % u64::from(self.ranks() - 1)) as u32) % self.ranks();
            match self.send_byte(to, tag_of(self.rank, number)) {
                Ok(sent) => sent.wait().expect("it is buffered"),
                Err(Error::QueueFull(text)) => return text,
                Err(error) => panic!("{error}"),
            }
            sent_to[to as usize].fetch_add(1, Ordering::SeqCst);
        }
        unreachable!("there is an end of room")
    }
}

fn pageable_byte(value: u8) -> u64 {
    let address = pageable(1);
    memory(address, 1)[0] = value;
    address
}

#[test]
fn ranks_that_have_filled_their_operations_with_buffered_sends_can_receive_and_go_on() {
    for count in [2, 3, 5] {
        let sent_to: Vec<AtomicU64> = (0..count).map(|_| AtomicU64::new(0)).collect();
        ranks(count, MessengerOptions { operations: 8, messages: 4096 }, |rank, barrier| {
            let refused = rank.fill(&sent_to);
            assert!(
                refused.contains("8 sends of this rank have not been received") && refused.contains("receive the messages sent"),
                "{refused}"
            );
            barrier.wait();
            let waiting = sent_to[rank.rank as usize].load(Ordering::SeqCst);
            assert_eq!(waiting, 8, "each rank has sent as many to each as the others");
            (0..waiting).for_each(|_| rank.receive_byte(&ANY));
            barrier.wait();
            let next = (rank.rank + 1) % count;
            rank.send_byte(next, 1).expect("there is room again").wait().expect("it is buffered");
            rank.receive_byte(&ANY);
        });
    }
}

#[test]
fn ranks_that_have_filled_their_operations_with_receives_can_send() {
    ranks(2, MessengerOptions { operations: 8, messages: 8 }, |rank, barrier| {
        let other = 1 - rank.rank;
        let into = pageable(8);
        let waiting: Vec<_> = (0..8).map(|at| rank.receive(into + at, 1, other, at)).collect();
        let refused = rank.messenger.receive(into, 1, &ANY, DEFAULT).expect_err("no slot").to_string();
        assert!(refused.contains("8 receives of this rank have not completed: wait for some"), "{refused}");
        barrier.wait();
        for tag in 0..8 {
            rank.send_byte(other, tag).expect("sends have room of their own");
        }
        waiting.iter().for_each(|receive| receive.wait().expect("it was sent"));
        assert_eq!(memory(into, 8), (0..8).map(byte_of).collect::<Vec<_>>());
    });
}

#[test]
fn a_rank_that_fills_a_mailbox_takes_no_room_from_others() {
    ranks(3, MessengerOptions { operations: 16, messages: 4 }, |rank, barrier| {
        if rank.rank == 2 {
            for tag in 0..4 {
                rank.send_byte(0, tag).expect("there is room");
            }
            let refused = rank.send_byte(0, 4).expect_err("rank 0 receives none of them").to_string();
            assert!(refused.contains("4 messages of this rank wait for receives of rank 0"), "{refused}");
            rank.send_byte(1, 4).expect("another receiver has room");
        }
        barrier.wait();
        if rank.rank == 1 {
            rank.send_byte(0, 7).expect("rank 2 has taken none of its room").wait().expect("it is buffered");
        }
        if rank.rank == 0 {
            rank.receive_byte(&Pattern { source: Some(1), tag: 7, mask: u64::MAX });
        }
        barrier.wait();
    });
}

#[test]
fn operations_that_have_ended_leave_room_although_nobody_has_waited_for_them() {
    ranks(2, MessengerOptions { operations: 4, messages: 4 }, |rank, _| {
        let other = 1 - rank.rank;
        let (from, into) = (rank.memory(64, 3), rank.memory(64, 0));
        let until = Instant::now() + PATIENCE;
        let posted = |post: &dyn Fn() -> Result<Arc<Operation>, Error>| loop {
            match post() {
                Err(Error::QueueFull(_)) if Instant::now() < until => std::thread::yield_now(),
                posted => break posted.expect("operations before it have ended"),
            }
        };
        let mut held = Vec::new();
        for tag in 0..12 {
            held.push(posted(&|| rank.send(from, 64, other, tag)));
            let pattern = Pattern { source: Some(other), tag, mask: u64::MAX };
            held.push(posted(&|| rank.messenger.receive(into, 64, &pattern, DEFAULT)));
        }
        held.iter().for_each(|operation| operation.wait().expect("it has ended"));
    });
}

/// Tests ranks that send more messages than they can hold, in random order to random ranks, and that receive whenever a send is refused.
/// All messages must be delivered.
#[test]
fn ranks_that_receive_whenever_a_send_is_refused_come_to_an_end() {
    for seed in 0..20 {
        let mut random = Random(seed);
        let count = 2 + random.below(4) as u32;
        let options = MessengerOptions { operations: 1 + random.below(6) as u32, messages: 1 + random.below(8) as u32 };
        let targets: Vec<Vec<u32>> =
            (0..count).map(|_| (0..random.below(60)).map(|_| random.below(count.into()) as u32).collect()).collect();
        ranks(count, options, |rank, _| {
            let own = &targets[rank.rank as usize];
            let mut awaited = targets.iter().flatten().filter(|to| **to == rank.rank).count();
            let mut sends = (0..).zip(own).peekable();
            while sends.peek().is_some() || awaited > 0 {
                let is_refused = sends.peek().is_none_or(|(number, to)| match rank.send_byte(**to, tag_of(rank.rank, *number)) {
                    Ok(_) => false,
                    Err(Error::QueueFull(_)) => true,
                    Err(error) => panic!("{error}"),
                });
                if !is_refused {
                    sends.next();
                } else if rank.messenger.probe(&ANY).expect("all are there").is_some() {
                    rank.receive_byte(&ANY);
                    awaited -= 1;
                } else {
                    std::thread::yield_now();
                }
            }
        });
    }
}

/// Tests ranks that never have more sends or receives than they can hold. No operation may be refused, in any order and with any memory.
#[test]
fn no_operation_is_refused_while_every_rank_keeps_to_its_room() {
    for seed in 0..20 {
        let mut random = Random(100 + seed);
        let (count, operations) = (2 + random.below(3) as u32, 2 + random.below(10) as u32);
        let mut pairs = Vec::new();
        let (mut sends, mut receives) = (vec![0; count as usize], vec![0; count as usize]);
        for number in 0..200 {
            let (from, to) = (random.below(count.into()) as u32, random.below(count.into()) as u32);
            let room = [&mut sends[from as usize], &mut receives[to as usize]];
            if room.iter().all(|used| **used < operations) {
                room.into_iter().for_each(|used| *used += 1);
                pairs.push((from, to, tag_of(from, number), [1, 1024, 5000, 70_000][random.below(4) as usize]));
            }
        }
        ranks(count, MessengerOptions { operations, messages: operations }, |rank, _| {
            let mut random = Random(1000 * seed + u64::from(rank.rank));
            let mut calls: Vec<(bool, usize)> = (0..pairs.len())
                .flat_map(|at| [(true, at), (false, at)])
                .filter(|(is_send, at)| rank.rank == if *is_send { pairs[*at].0 } else { pairs[*at].1 })
                .collect();
            (1..calls.len()).for_each(|at| calls.swap(at, random.below(at as u64 + 1) as usize));
            let posted: Vec<_> = calls
                .into_iter()
                .map(|(is_send, at)| {
                    let (from, to, tag, bytes) = pairs[at];
                    let address = if random.chance(50) { pageable(bytes as usize) } else { rank.memory(bytes, 0) };
                    if is_send {
                        memory(address, bytes).fill(byte_of(tag));
                        (rank.send(address, bytes, to, tag).expect("within its room"), None)
                    } else {
                        (rank.receive(address, bytes, from, tag), Some((address, bytes, tag)))
                    }
                })
                .collect();
            for (operation, received) in posted {
                operation.wait().expect("the other side is posted");
                let Some((address, bytes, tag)) = received else { continue };
                assert!(memory(address, bytes).iter().all(|byte| *byte == byte_of(tag)), "seed {seed}");
            }
        });
    }
}
