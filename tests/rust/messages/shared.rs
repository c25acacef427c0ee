//! Large messages over several paths, where each rank sees its own GPU alone: both ranks move a part, every byte is right, and whoever is
//! killed meanwhile leaves the other whole.

use super::options;
use crate::common::{Random, is_long, setting};
use crate::node_plans::{as_ranks, memory};
use crate::peer::Peer;
use mpgpu_core::topology::DeviceId;
use mpgpu_runtime::backend::{BackendError, CompletionState, StreamHandle};
#[cfg(feature = "fault-injection")]
use mpgpu_runtime::context::node::Allgather;
use mpgpu_runtime::context::node::NodeGroup;
#[cfg(feature = "fault-injection")]
use mpgpu_runtime::context::node::message::Disturbance;
use mpgpu_runtime::context::node::message::{Descriptor, Messenger, Operation, Outgoing, Pattern};
use mpgpu_runtime::context::{BackendChoice, Config, Context, ContextOptions};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
#[cfg(feature = "fault-injection")]
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Its links are so slow that the host path pays for messages of some MiB.
const TOPOLOGY: &str = "beluga";

const MOST_BYTES: u64 = 40 << 20;

/// Messages under way in each direction.
const WINDOW: u64 = 3;

const UNTOUCHED: u8 = 0xA5;

/// A folder that is removed.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("mpgpu-shared-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Sees one GPU, and whoever has the same folder.
fn context(rank: u32, folder: &Path) -> Arc<Context> {
    let options = ContextOptions { backend: Some(BackendChoice::Host), topology: Some(TOPOLOGY.into()), ..ContextOptions::default() };
    let config = Config { visible: Some(vec![rank]), traffic_folder: folder.into(), ..Config::default() };
    Arc::new(Context::open(&options, config).expect("a context"))
}

fn byte(step: u64, from: u32, at: u64) -> u8 {
    (at.wrapping_mul(37) ^ (at >> 10) ^ step.wrapping_mul(71) ^ u64::from(from).wrapping_mul(11)) as u8
}

fn fill(address: u64, bytes: u64, step: u64, from: u32) {
    memory(address, bytes).iter_mut().zip(0..).for_each(|(place, at)| *place = byte(step, from, at));
}

fn check(address: u64, bytes: u64, step: u64, from: u32) {
    let here = memory(address, bytes + 1);
    let wrong = here.iter().zip(0..).position(|(found, at)| *found != if at < bytes { byte(step, from, at) } else { UNTOUCHED });
    assert!(wrong.is_none(), "step {step} of rank {from}: byte {wrong:?} of {bytes} is wrong");
}

/// How a message goes.
#[derive(Copy, Clone)]
struct Kind {
    bytes: u64,
    /// Who of both posts first, and leaves the movement to the other.
    receiver_first: bool,
    /// The receiver fetches.
    by_descriptor: bool,
    is_quick: bool,
}

fn kind(seed: u64, step: u64, most: u64) -> Kind {
    let mut random = Random(seed.wrapping_mul(1_000_003) ^ step);
    let bytes = most / 2 + random.below(most / 2);
    Kind { bytes, receiver_first: random.chance(50), by_descriptor: random.chance(20), is_quick: random.chance(10) }
}

/// One of two ranks.
struct Pair {
    rank: u32,
    /// Bytes of a message at most.
    most: u64,
    context: Arc<Context>,
    messenger: Arc<Messenger>,
    outgoing: Vec<u64>,
    incoming: Vec<u64>,
    stream: StreamHandle,
}

impl Pair {
    fn new(context: Arc<Context>, node: NodeGroup, most: u64) -> Pair {
        let rank = node.rank();
        let messenger = Arc::new(node).messenger(options()).expect("a messenger");
        let rooms = || (0..WINDOW).map(|_| context.allocate(DeviceId::gpu(0), most + 1).expect("memory")).collect();
        let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
        Pair { rank, most, outgoing: rooms(), incoming: rooms(), stream, messenger, context }
    }

    /// Of two that have the only GPU, and share all messages.
    #[cfg(feature = "fault-injection")]
    fn forced(folder: &Folder, rank: u32, seat: Box<dyn Allgather>, most: u64) -> Pair {
        let context = context(0, &folder.0);
        let node = NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node");
        let pair = Pair::new(context, node, most);
        pair.messenger.share_always();
        pair.messenger.wait_for_shares(Duration::from_secs(20));
        pair
    }

    /// What is there before a message comes.
    #[cfg(feature = "fault-injection")]
    fn blank(&self, step: u64) {
        fill(self.outgoing[0], self.most, step, self.rank);
        memory(self.incoming[0], self.most + 1).fill(UNTOUCHED);
    }

    fn receive(&self, address: u64, bytes: u64, tag: u64) -> Arc<Operation> {
        let pattern = Pattern { source: Some(1 - self.rank), tag, mask: u64::MAX };
        self.messenger.receive(address, bytes, &pattern, self.stream).expect("posted")
    }

    fn send(&self, address: u64, bytes: u64, tag: u64) -> Arc<Operation> {
        let message = Outgoing { address, bytes, rank: 1 - self.rank, tag, metadata: &[] };
        self.messenger.send(&message, self.stream).expect("posted")
    }

    /// Sends one word and gets one: the other has done what comes before, and both streams have nothing to do.
    fn meet(&self, tag: u64) {
        let mut here = 0u64;
        let sent = self.send(std::ptr::from_ref(&tag).expose_provenance() as u64, 8, tag);
        self.receive(std::ptr::from_mut(&mut here).expose_provenance() as u64, 8, tag).wait().expect("it was sent");
        sent.wait().expect("received");
        self.context.synchronize_stream(self.stream).expect("nothing fails");
    }

    /// Both send to each other, `WINDOW` messages each.
    fn step(&self, seed: u64, step: u64) {
        let mut posted = Vec::new();
        let all: Vec<(u64, Kind)> = (0..WINDOW).map(|at| (WINDOW * step + at, kind(seed, WINDOW * step + at, self.most))).collect();
        let mut described = Vec::new();
        // What is posted first, and after the others have, what moves it.
        for is_first in [true, false] {
            for (index, &(tag, kind)) in all.iter().enumerate() {
                self.messenger.wait_for_shares(if kind.is_quick { Duration::ZERO } else { Duration::from_secs(20) });
                let (out, into) = (self.outgoing[index], self.incoming[index]);
                if is_first {
                    fill(out, kind.bytes, tag, self.rank);
                    memory(into, kind.bytes + 1).fill(UNTOUCHED);
                }
                if kind.by_descriptor {
                    if is_first {
                        let (descriptor, operation) = self.messenger.describe(out, kind.bytes, self.stream).expect("described");
                        described.push(descriptor.encode());
                        posted.push(operation);
                    } else {
                        let mut encoded = [0; 64];
                        let address = std::ptr::from_mut(&mut encoded).expose_provenance() as u64;
                        let own = described.remove(0);
                        let sent = self.send(std::ptr::from_ref(&own).expose_provenance() as u64, 64, tag);
                        self.receive(address, 64, tag).wait().expect("it was sent");
                        sent.wait().expect("received");
                        let descriptor = Descriptor::decode(&encoded).expect("whole");
                        posted.push(self.messenger.fetch(&descriptor, into, kind.bytes, self.stream).expect("fetched"));
                    }
                } else if is_first == kind.receiver_first {
                    posted.push(self.receive(into, kind.bytes, tag));
                } else {
                    posted.push(self.send(out, kind.bytes, tag));
                }
            }
            self.meet((1 << 40) + 2 * step + u64::from(is_first));
        }
        for operation in &posted {
            operation.order_stream(self.stream).expect("enqueued");
        }
        self.context.synchronize_stream(self.stream).expect("all works");
        posted.iter().for_each(|operation| operation.wait().expect("both are there"));
        all.iter().zip(&self.incoming).for_each(|((tag, kind), into)| check(*into, kind.bytes, *tag, 1 - self.rank));
    }

    fn end(self) {
        self.messenger.destroy().expect("nothing is left");
        self.context.destroy_stream(self.stream).expect("it exists");
        self.outgoing.iter().chain(&self.incoming).for_each(|address| self.context.free(*address).expect("it exists"));
        self.context.close().expect("nothing is left");
    }
}

#[test]
fn both_ranks_move_a_large_message_and_every_byte_is_right() {
    let (folder, seed) = (Folder::new("bytes"), setting("TEST_SEED", 1));
    let wanted = if is_long() { 500 } else { 8 };
    let counts = as_ranks(2, |rank, seat| {
        let context = context(rank, &folder.0);
        let node = NodeGroup::new(&context, rank, 2, seat, &[]).expect("a node");
        let pair = Pair::new(context, node, MOST_BYTES);
        let mut steps = 0;
        // Both do as many steps: one goes on until the other has what it wants too.
        let mut is_done = [false, false];
        while is_done != [true, true] {
            pair.step(seed, steps);
            steps += 1;
            assert!(steps < 200 * wanted, "the host path is never taken");
            let mut theirs = false;
            let own = pair.messenger.shared_movements() >= wanted;
            let sent = pair.send(std::ptr::from_ref(&own).expose_provenance() as u64, 1, (1 << 41) + steps);
            pair.receive(std::ptr::from_mut(&mut theirs).expose_provenance() as u64, 1, (1 << 41) + steps).wait().expect("it was sent");
            sent.wait().expect("received");
            is_done = [own, theirs];
        }
        let count = pair.messenger.shared_movements();
        pair.end();
        (count, steps)
    });
    println!("{counts:?}: messages that both have moved, by their movers, and steps");
}

/// The same where both have the only GPU, so that small messages show it too.
#[cfg(feature = "fault-injection")]
#[test]
fn ranks_of_one_gpu_that_share_all_messages_get_every_byte() {
    let (folder, seed) = (Folder::new("one"), setting("TEST_SEED", 1));
    let steps = if is_long() { 5000 } else { 40 };
    let counts = as_ranks(2, |rank, seat| {
        let pair = Pair::forced(&folder, rank, seat, 2 << 20);
        (0..steps).for_each(|step| pair.step(seed, step));
        let count = pair.messenger.shared_movements();
        pair.end();
        count
    });
    println!("{counts:?} of {} messages moved by both", 2 * WINDOW * steps);
    assert!(counts.iter().all(|count| *count > steps / 2), "{counts:?}");
}

/// A half that fails at any piece, or takes so long that the other rank gives up, ends both operations. Nothing is written after that, and the
/// next message comes.
#[cfg(feature = "fault-injection")]
#[test]
fn a_half_that_fails_or_stalls_ends_both_operations_and_writes_nothing_later() {
    const BYTES: u64 = 2 << 20;
    let folder = Folder::new("disturbed");
    let none = Disturbance { piece: 0, pause: Duration::ZERO, fails: true, patience: Duration::from_secs(10) };
    let stalls = Disturbance { pause: Duration::from_millis(150), fails: false, patience: Duration::from_millis(30), ..none };
    let pieces = BYTES / 2 / (64 << 10);
    let disturbances =
        [0, 1, 5, pieces - 1, pieces].into_iter().flat_map(|piece| [Disturbance { piece, ..none }, Disturbance { piece, ..stalls }]);
    let cases: Vec<(Disturbance, u32, u32, bool)> = disturbances
        .flat_map(|of| [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(whose, source)| (of, whose, source)))
        .flat_map(|(of, whose, source)| [true, false].map(|receiver_first| (of, whose, source, receiver_first)))
        .filter(|(of, whose, source, receiver_first)| of.piece < pieces || (whose == source) == *receiver_first)
        .collect();
    let ended = as_ranks(2, |rank, seat| {
        let pair = Pair::forced(&folder, rank, seat, BYTES);
        let (out, into) = (pair.outgoing[0], pair.incoming[0]);
        let mut ended = Vec::new();
        for (number, (of, whose, source, receiver_first)) in (0..).zip(&cases) {
            for is_disturbed in [true, false] {
                // Both wait as long as the case says.
                let own = Disturbance { piece: if *whose == rank { of.piece } else { u64::MAX }, ..*of };
                pair.messenger.disturb_shares(is_disturbed.then_some(own));
                pair.blank(number);
                let tag = 4 * number + u64::from(is_disturbed);
                let post = || if rank == *source { pair.send(out, BYTES, tag) } else { pair.receive(into, BYTES, tag) };
                let is_first = (rank != *source) == *receiver_first;
                let first = is_first.then(post);
                pair.meet((1 << 42) + tag);
                let result = first.unwrap_or_else(post).wait();
                let here = memory(into, BYTES + 1).to_vec();
                std::thread::sleep(Duration::from_millis(if is_disturbed && !of.pause.is_zero() { 250 } else { 2 }));
                assert!(memory(into, BYTES + 1) == here, "case {number}, {of:?}, rank {rank}: bytes came after the end");
                if is_disturbed {
                    ended.push(result.is_ok());
                } else {
                    result.unwrap_or_else(|error| panic!("the message after case {number}: {error}"));
                    if rank != *source {
                        check(into, BYTES, number, 1 - rank);
                    }
                }
                pair.meet((1 << 43) + tag);
            }
        }
        pair.end();
        ended
    });
    let failed = ended[0].iter().zip(&ended[1]).filter(|(one, other)| !**one && !**other).count();
    println!("{failed} of {} disturbed messages have failed", cases.len());
    for ((number, case), (one, other)) in (0..).zip(&cases).zip(ended[0].iter().zip(&ended[1])) {
        assert_eq!(one, other, "case {number}: {case:?}");
        assert!(!one || !case.0.fails, "case {number}: {case:?}");
    }
    // Nobody waits for a mover that stalls; of the others some are given up, whatever else this machine does.
    assert!(failed > cases.iter().filter(|case| case.0.fails).count(), "{failed}");
}

/// A half fails at once, and its rank posts anew while the one that asked is still enqueueing: that one has nothing to say of what comes after.
#[cfg(feature = "fault-injection")]
#[test]
fn an_operation_whose_half_has_failed_hands_nothing_on_to_the_next() {
    const BYTES: u64 = 2 << 20;
    const NEXT: u64 = 16;
    let folder = Folder::new("next");
    as_ranks(2, |rank, seat| {
        let pair = Pair::forced(&folder, rank, seat, BYTES);
        let patience = Duration::from_secs(10);
        let (fails, waits) = (rank == 0, Duration::from_millis(300));
        let (piece, pause) = if fails { (0, Duration::ZERO) } else { (5, waits) };
        for round in 0..3 {
            let tag = 1000 * round;
            pair.messenger.disturb_shares(Some(Disturbance { piece, pause, fails, patience }));
            let first = fails.then(|| pair.receive(pair.incoming[0], BYTES, tag));
            pair.meet(tag + 1);
            let outcome = first.unwrap_or_else(|| pair.send(pair.outgoing[0], BYTES, tag)).wait();
            assert!(outcome.is_err(), "round {round}, rank {rank}: {outcome:?}");
            pair.messenger.disturb_shares(None);
            let mut words = [0u64; NEXT as usize];
            let next: Vec<Arc<Operation>> = (words.iter_mut().zip(tag + 100..))
                .map(|(word, tag)| {
                    let address = std::ptr::from_mut(word).expose_provenance() as u64;
                    if fails { pair.receive(address, 8, tag) } else { pair.send(address, 8, tag) }
                })
                .collect();
            next.iter().for_each(|operation| operation.wait().unwrap_or_else(|error| panic!("round {round}, rank {rank}: {error}")));
        }
        pair.end();
    });
}

/// A half fails at once, while the other rank's part takes long: the operation ends after that.
#[cfg(feature = "fault-injection")]
#[test]
fn an_operation_whose_half_has_failed_ends_after_the_part_of_the_other_rank() {
    const BYTES: u64 = 200 << 20;
    let folder = Folder::new("after");
    as_ranks(2, |rank, seat| {
        let pair = Pair::forced(&folder, rank, seat, BYTES);
        let is_asked = rank == 0;
        let piece = if is_asked { 0 } else { u64::MAX };
        pair.messenger.disturb_shares(Some(Disturbance { piece, pause: Duration::ZERO, fails: true, patience: Duration::from_secs(10) }));
        pair.blank(1);
        let first = is_asked.then(|| pair.receive(pair.incoming[0], BYTES, 1));
        pair.meet(2);
        let outcome = first.unwrap_or_else(|| pair.send(pair.outgoing[0], BYTES, 1)).wait();
        if is_asked {
            let here = memory(pair.incoming[0], BYTES);
            // The other's part has come, and this rank's has not.
            let come = here.iter().zip(0..).position(|(found, at)| *found != byte(1, 1, at)).expect("its own half has failed");
            assert!(come as u64 >= BYTES - (8 << 20), "after {come} bytes of the other's part");
        }
        assert!(outcome.is_err(), "rank {rank}");
        pair.end();
    });
}

/// A rank whose stream is held up moves its message later. Until then nothing of it is in a stream of the other, which may free memory.
#[cfg(feature = "fault-injection")]
#[test]
fn a_rank_frees_memory_while_the_stream_that_will_move_its_message_is_held_up() {
    const BYTES: u64 = 2 << 20;
    let folder = Folder::new("free");
    as_ranks(2, |rank, seat| {
        let pair = Pair::forced(&folder, rank, seat, BYTES);
        pair.blank(1);
        let frees = rank == 0;
        let (busy, gate) = (pair.context.create_stream(DeviceId::gpu(0)).expect("a stream"), Arc::new(Barrier::new(2)));
        let first = frees.then(|| pair.receive(pair.incoming[0], BYTES, 1));
        pair.meet(2);
        let operation = first.unwrap_or_else(|| {
            let reached = Arc::clone(&gate);
            pair.context.launch_host(busy, Box::new(move || _ = reached.wait())).expect("enqueued");
            let message = Outgoing { address: pair.outgoing[0], bytes: BYTES, rank: 0, tag: 1, metadata: &[] };
            pair.messenger.send(&message, busy).expect("posted")
        });
        pair.meet(3);
        let is_free = std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            if frees {
                let other = pair.context.allocate(DeviceId::gpu(0), 4096).expect("memory");
                let context = &pair.context;
                scope.spawn(move || tell.send(context.free(other)));
            }
            let is_free = !frees || matches!(told.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
            pair.meet(4);
            if !frees {
                gate.wait();
            }
            is_free
        });
        assert!(is_free, "it waits for the other rank's stream");
        operation.wait().expect("moved");
        if frees {
            check(pair.incoming[0], BYTES, 1, 1);
        }
        pair.context.destroy_stream(busy).expect("it exists");
        pair.end();
    });
}

/// What a stream of a rank waits for.
#[cfg(feature = "fault-injection")]
#[derive(Copy, Clone, PartialEq, Eq)]
enum Awaits {
    Nothing,
    /// The message itself, on the rank that would be asked.
    It,
    /// Another message, which comes later; on this rank.
    Another(u32),
}

/// What is enqueued after a stream waits may stand behind that wait on a GPU: no rank moves a part then.
#[cfg(feature = "fault-injection")]
#[test]
fn where_a_stream_waits_for_a_message_both_ranks_move_none_together() {
    const BYTES: u64 = 2 << 20;
    let folder = Folder::new("waits");
    let all = [Awaits::It, Awaits::Nothing, Awaits::Another(0), Awaits::Another(1), Awaits::Nothing];
    let counts = as_ranks(2, |rank, seat| {
        let pair = Pair::forced(&folder, rank, seat, BYTES);
        let mut counts = Vec::new();
        for awaits in all {
            let (tag, mut word) = (10 * counts.len() as u64, 0u64);
            pair.blank(tag);
            let waiting = pair.context.create_stream(DeviceId::gpu(0)).expect("a stream");
            let place = std::ptr::from_mut(&mut word).expose_provenance() as u64;
            let another = (awaits == Awaits::Another(rank)).then(|| pair.receive(place, 8, tag + 2));
            let first = (rank == 0).then(|| pair.receive(pair.incoming[0], BYTES, tag));
            for awaited in another.iter().chain(first.iter().filter(|_| awaits == Awaits::It)) {
                awaited.order_stream(waiting).expect("enqueued");
            }
            pair.meet(tag + 1);
            first.unwrap_or_else(|| pair.send(pair.outgoing[0], BYTES, tag)).wait().expect("moved");
            pair.meet(tag + 3);
            if awaits == Awaits::Another(1 - rank) {
                pair.send(std::ptr::from_ref(&tag).expose_provenance() as u64, 8, tag + 2).wait().expect("sent");
            }
            another.map_or(Ok(()), |another| another.wait()).expect("it comes");
            pair.context.synchronize_stream(waiting).expect("it goes on");
            if rank == 0 {
                check(pair.incoming[0], BYTES, tag, 1);
            }
            pair.context.destroy_stream(waiting).expect("it exists");
            counts.push(pair.messenger.shared_movements());
        }
        pair.end();
        counts
    });
    assert_eq!(counts, [[0, 0, 0, 0, 0], [0, 1, 1, 1, 2]]);
}

/// Sends and receives large messages until it is told to stop, or the other is gone. Orders are rank, seed, socket, folder, and after how many
/// microseconds it kills itself (0: never).
#[test]
#[ignore = "run by other tests"]
fn child_moves_much() {
    let Ok(text) = std::env::var("MESSAGES_CHILD") else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let number = |at: usize| words[at].parse::<u64>().expect("a number");
    let (rank, seed, after) = (number(0) as u32, number(1), number(4));
    let context = context(rank, words[3].as_ref());
    let node = NodeGroup::at_socket(&context, rank, 2, words[2].as_ref(), &[]).expect("a node");
    let pair = Pair::new(context, node, MOST_BYTES);
    pair.messenger.wait_for_shares(Duration::from_millis(100));
    let mut shared = 0;
    let mut until = None;
    let ends = |result: Result<(), BackendError>| match result {
        Ok(()) => false,
        Err(BackendError::PeerGone(_)) if after == 0 => true,
        Err(error) => panic!("rank {rank}: {error}"),
    };
    for step in 0.. {
        // Only where messages are shared is it the right moment.
        if after > 0 && until.is_none() && pair.messenger.shared_movements() > 2 {
            until = Some(());
            std::thread::spawn(move || {
                let from = Instant::now();
                while from.elapsed() < Duration::from_micros(after) {
                    std::hint::spin_loop();
                }
                // SAFETY: no argument is a pointer.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            });
        }
        let Kind { bytes, receiver_first, .. } = kind(seed, step, MOST_BYTES);
        fill(pair.outgoing[0], bytes, step, rank);
        memory(pair.incoming[0], bytes + 1).fill(UNTOUCHED);
        let receive = || {
            let pattern = Pattern { source: Some(1 - rank), tag: step, mask: u64::MAX };
            pair.messenger.receive(pair.incoming[0], bytes, &pattern, pair.stream)
        };
        let send = || {
            let message = Outgoing { address: pair.outgoing[0], bytes, rank: 1 - rank, tag: step, metadata: &[] };
            pair.messenger.send(&message, pair.stream)
        };
        let (received, sent) = if receiver_first {
            let received = receive();
            (received, send())
        } else {
            let sent = send();
            (receive(), sent)
        };
        shared = pair.messenger.shared_movements();
        let mut is_over = false;
        for (made, receives) in [(received, true), (sent, false)] {
            match made {
                Ok(operation) => {
                    let is_gone = ends(operation.wait());
                    is_over |= is_gone;
                    if receives && !is_gone {
                        check(pair.incoming[0], bytes, step, 1 - rank);
                    }
                }
                Err(error) if after == 0 && super::killed::is_gone(&error) => is_over = true,
                Err(error) => panic!("rank {rank}: {error}"),
            }
        }
        if is_over {
            break;
        }
    }
    pair.end();
    println!("\nANSWER 0 {shared}");
}

#[test]
fn a_rank_killed_while_both_move_a_message_leaves_the_other_whole() {
    let rounds = setting("TEST_KILLS", if is_long() { 300 } else { 6 });
    let mut random = Random(setting("TEST_SEED", 1));
    let mut shared = 0;
    for round in 0..rounds {
        let folder = Folder::new(&format!("killed-{round}"));
        let (seed, after) = (random.next() >> 32, 1 + random.below(150_000));
        let victim = random.below(2) as u32;
        let mut peers: Vec<Peer> = (0..2)
            .map(|rank| {
                let mut command = Command::new(std::env::current_exe().expect("this program"));
                let after = if rank == victim { after } else { 0 };
                let socket = folder.0.join("socket");
                command.env("MESSAGES_CHILD", format!("{rank} {seed} {} {} {after}", socket.display(), folder.0.display()));
                Peer::running(command, "messages::shared::child_moves_much")
            })
            .collect();
        let answer = peers[1 - victim as usize].hear().expect("the survivor has failed: its text is above");
        let count: u64 = answer.strip_prefix("0 ").and_then(|count| count.parse().ok()).expect("a number");
        shared += count;
    }
    println!("{rounds} ranks killed; the others had moved {shared} messages together with them");
}
