//! Executes the steps of one rank of a random program, and checks the results.

use super::model::{Action, Fate, Memory, Program, Shape, Wanted};
use crate::node_plans::memory as bytes_at;
use mpgpu_backend::{BackendError, CompletionState, StreamHandle};
use mpgpu_contexts::Context;
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::message::{Messenger, Operation, Outgoing, Pattern};
use rustix::fs::{Mode, OFlags};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters that all ranks share: number of the next step (over all rounds), and number of ranks that have reached a barrier.
pub struct Turns {
    words: Words,
    ranks: u32,
}

/// Memory in which the two shared counters are.
enum Words {
    /// Memory of this process, which the ranks share as threads.
    Own([AtomicU64; 2]),
    /// Memory mapped from a file, which the ranks share as processes.
    Mapped(&'static [AtomicU64; 2]),
}

const PAGE: usize = 4096;

impl Turns {
    pub fn new(ranks: u32) -> Turns {
        Turns { words: Words::Own(Default::default()), ranks }
    }

    pub fn make(path: &Path) {
        std::fs::write(path, [0; PAGE]).expect("a file");
    }

    pub fn in_file(path: &Path, ranks: u32) -> Turns {
        let file = rustix::fs::open(path, OFlags::RDWR, Mode::empty()).expect("a file");
        let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        // SAFETY: a new mapping of atomics that are initially zero. It is never unmapped.
        let words = unsafe {
            let page = rustix::mm::mmap(std::ptr::null_mut(), PAGE, access, rustix::mm::MapFlags::SHARED, file, 0);
            &*page.expect("a mapping").cast()
        };
        Turns { words: Words::Mapped(words), ranks }
    }

    fn words(&self) -> &[AtomicU64; 2] {
        match &self.words {
            Words::Own(words) => words,
            Words::Mapped(words) => words,
        }
    }

    fn wait(&self, is_over: impl Fn(&[AtomicU64; 2]) -> bool) {
        while !is_over(self.words()) {
            std::thread::yield_now();
        }
    }

    fn take(&self, turn: u64) {
        self.wait(|words| words[0].load(Ordering::Acquire) >= turn);
    }

    fn next(&self) {
        self.words()[0].fetch_add(1, Ordering::Release);
    }

    /// Waits at the barrier with this number; the first barrier has number 1.
    fn meet(&self, number: u64) {
        let wanted = number * u64::from(self.ranks);
        self.words()[1].fetch_add(1, Ordering::AcqRel);
        self.wait(|words| words[1].load(Ordering::Acquire) >= wanted);
    }
}

/// Send or receive that is in progress.
struct Posted {
    operation: Arc<Operation>,
    address: u64,
}

/// One rank with its memory and streams.
pub struct Player {
    context: Arc<Context>,
    messenger: Arc<Messenger>,
    streams: Vec<StreamHandle>,
    /// Memory of a GPU and of the host: address, size, and number of bytes in use.
    arenas: [(u64, u64, u64); 2],
    /// Pageable memory of the current round.
    ordinary: Vec<Vec<u8>>,
    turn: u64,
    barriers: u64,
}

/// Size in bytes of each memory arena, which is sufficient for all steps of a round.
const ARENA_BYTES: u64 = 256 << 20;

/// Value of bytes that no message has written.
const UNTOUCHED: u8 = 0xA5;

fn byte(round: u64, step: usize, at: u64) -> u8 {
    (at.wrapping_mul(31) ^ (at >> 9) ^ (step as u64).wrapping_mul(101) ^ round.wrapping_mul(59)) as u8
}

fn metadata(round: u64, step: usize, bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| byte(round, step, at) ^ 0xFF).collect()
}

fn pattern(wanted: &Wanted) -> Pattern {
    Pattern { source: wanted.source, tag: wanted.tag, mask: wanted.mask }
}

impl Player {
    pub fn new(context: Arc<Context>, messenger: Arc<Messenger>) -> Player {
        let arena = |device| (context.allocate_shared(device, ARENA_BYTES).expect("memory"), ARENA_BYTES, 0);
        let arenas = [arena(DeviceId::gpu(0)), arena(DeviceId::HOST)];
        let streams = (0..3).map(|_| context.create_stream(DeviceId::gpu(0)).expect("a stream")).collect();
        Player { context, messenger, streams, arenas, ordinary: Vec::new(), turn: 0, barriers: 0 }
    }

    pub fn ranks(&self) -> u32 {
        self.messenger.node().ranks()
    }

    fn rank(&self) -> u32 {
        self.messenger.node().rank()
    }

    fn allocate(&mut self, memory: Memory, bytes: u64) -> u64 {
        let (base, size, used) = match memory {
            Memory::Device => &mut self.arenas[0],
            Memory::Pinned => &mut self.arenas[1],
            Memory::Ordinary => {
                let mut bytes = vec![0; bytes as usize + 1];
                let address = bytes.as_mut_ptr().expose_provenance() as u64;
                self.ordinary.push(bytes);
                return address;
            }
        };
        let address = *base + *used;
        *used += bytes + 1;
        assert!(*used <= *size, "a round needs more memory than there is");
        address
    }

    /// Enqueues work before the next work of a stream: in the stream itself, or in another stream for which the stream then waits.
    fn before(&self, stream: StreamHandle, number: usize, work: Box<dyn Fn() + Send + Sync>) {
        let context = &self.context;
        let worker = self.streams[if number.is_multiple_of(4) { (number + 1) % 3 } else { number % 3 }];
        context.launch_host(worker, work).expect("enqueued");
        if worker != stream {
            let event = context.create_event().expect("an event");
            context.record_event(event, worker).expect("recorded");
            context.stream_wait_event(stream, event).expect("enqueued");
            context.destroy_event(event).expect("it exists");
        }
    }

    fn meet(&mut self, turns: &Turns) {
        self.barriers += 1;
        turns.meet(self.barriers);
    }

    /// Executes this rank's steps of a program and checks all results.
    pub fn play(&mut self, program: &Program, shape: &Shape, turns: &Turns, round: u64) {
        let mut posted: Vec<Option<Posted>> = program.steps.iter().map(|_| None).collect();
        let ending = program.ending();
        for (number, step) in program.steps.iter().enumerate() {
            if number == ending.start && !shape.in_turns {
                self.meet(turns);
            }
            let turn = self.turn + number as u64;
            if step.rank != self.rank() {
                continue;
            }
            if shape.in_turns {
                turns.take(turn);
            }
            // The work in the stream may still be in progress when a message is posted, and when the rank waits for the message.
            let stream = self.streams[number % 3];
            match step.action {
                Action::Send { to, tag, bytes, metadata: length, memory } => {
                    let address = self.allocate(memory, bytes);
                    // The data is written in the stream, so that a message that is not ordered after the stream has wrong data.
                    let write =
                        move || bytes_at(address, bytes).iter_mut().zip(0..).for_each(|(place, at)| *place = byte(round, number, at));
                    self.before(stream, number, Box::new(write));
                    let metadata = metadata(round, number, length);
                    let message = Outgoing { address, bytes, rank: to, tag, metadata: &metadata };
                    let operation = self.messenger.send(&message, stream).expect("there is room");
                    posted[number] = Some(Posted { operation, address });
                }
                Action::Receive { wanted, capacity, memory } => {
                    let address = self.allocate(memory, capacity);
                    let write = move || bytes_at(address, capacity + 1).fill(UNTOUCHED);
                    self.before(stream, number, Box::new(write));
                    let operation = self.messenger.receive(address, capacity, &pattern(&wanted), stream).expect("there is room");
                    posted[number] = Some(Posted { operation, address });
                }
                Action::Probe(wanted) => {
                    let found = self.messenger.probe(&pattern(&wanted)).expect("all are there");
                    let expected = program.found[number].map(|send| envelope(program, round, send));
                    let found = found.map(|found| (found.source, found.tag, found.bytes, found.metadata));
                    assert!(found == expected, "step {number} of round {round} finds {found:?}, not {expected:?}");
                }
                Action::Cancel(of) => {
                    let of = posted[of].as_ref().expect("this rank has posted it");
                    assert_eq!(of.operation.cancel().expect("it lives"), program.cancels[number], "step {number} of round {round}");
                }
                Action::Wait(of) => {
                    let ended = posted[of].take().expect("it is waited for once");
                    self.check(program, round, of, &ended, stream, number);
                }
            }
            if shape.in_turns {
                turns.next();
            }
        }
        self.turn += if shape.in_turns { program.steps.len() as u64 } else { 0 };
        self.streams.iter().for_each(|stream| self.context.synchronize_stream(*stream).expect("all works"));
        self.ordinary.clear();
        self.arenas.iter_mut().for_each(|arena| arena.2 = 0);
        self.meet(turns);
    }

    /// Waits for the operation of a step, in one of several ways, and checks its results.
    fn check(&self, program: &Program, round: u64, number: usize, ended: &Posted, stream: StreamHandle, salt: usize) {
        let name = || format!("step {number} of round {round}, {:?}, {:?}", program.steps[number], program.fates[number]);
        let result = match salt % 3 {
            0 => ended.operation.wait(),
            1 => loop {
                match ended.operation.is_done() {
                    Ok(false) => std::thread::yield_now(),
                    other => break other.map(drop),
                }
            },
            _ => {
                ended.operation.order_stream(stream).expect("enqueued");
                self.context.synchronize_stream(stream).expect("it ends");
                ended.operation.wait()
            }
        };
        let (is_send, capacity) = match program.steps[number].action {
            Action::Receive { capacity, .. } => (false, capacity),
            _ => (true, 0),
        };
        let (send, arrived) = match (program.fates[number], result) {
            (Some(Fate::Meets(send)), Ok(())) => (Some(send), true),
            (Some(Fate::Truncated(send)), Err(BackendError::Truncated(_))) => (Some(send), false),
            (Some(Fate::Cancelled), Err(BackendError::Cancelled(_))) => (None, false),
            (_, result) => panic!("{}: {result:?}", name()),
        };
        if is_send {
            return;
        }
        let met = ended.operation.envelope().map(|met| (met.source, met.tag, met.bytes, met.metadata));
        assert!(met == send.map(|send| envelope(program, round, send)), "{}: it has met {met:?}", name());
        // Earlier work in the stream may still write the memory of a cancelled operation.
        self.context.synchronize_stream(self.streams[number % 3]).expect("it ends");
        let here = bytes_at(ended.address, capacity + 1);
        let length = send.filter(|_| arrived).map_or(0, |send| envelope(program, round, send).2);
        let sent = send.unwrap_or(0);
        let wrong = here.iter().zip(0..).position(|(found, at)| *found != if at < length { byte(round, sent, at) } else { UNTOUCHED });
        assert!(wrong.is_none(), "{}: byte {wrong:?} of {length} is wrong", name());
    }

    /// Frees all memory and streams of the rank.
    pub fn end(self) {
        self.messenger.destroy().expect("nothing is left");
        self.streams.iter().for_each(|stream| self.context.destroy_stream(*stream).expect("it exists"));
        self.arenas.iter().for_each(|arena| self.context.free(arena.0).expect("it exists"));
        self.context.close().expect("nothing is left");
    }
}

/// Returns the source, tag, size and metadata of the message of a send.
fn envelope(program: &Program, round: u64, send: usize) -> (u32, u64, u64, Vec<u8>) {
    match program.steps[send].action {
        Action::Send { tag, bytes, metadata: length, .. } => (program.steps[send].rank, tag, bytes, metadata(round, send, length)),
        _ => unreachable!("a send"),
    }
}
