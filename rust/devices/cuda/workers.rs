//! Copies between pageable host memory and slots of pinned memory by threads ([`Mechanism::Thread`]), beside copy engines.
//!
//! Everything is enqueued when an execution is submitted, and nobody waits there. Streams and threads notify each other by words in pinned memory, one
//! for each operation: a stream waits by an operation for the word of a thread's copy, and sets the word of its own operation where a thread waits for
//! that. An execution sets its words to a number of its own, larger than that of any before it that used them, so nobody has to set them back.
//!
//! Threads run any copy that is ready, and wait for none ([`CopyPool`]). An operation waits for earlier ones of its program alone, and is enqueued after
//! all of these. Executions that share rings come after each other in the order in which their streams reach them.
//!
//! A thread works on the NUMA node of the memory that it copies first for an execution, where the system shows several.

use super::driver::{OutsideCapture, call, handle, lock};
use super::gpus::Gpus;
use super::pool::{CopyPool, PoolJob};
use super::streams::Start;
use super::turns::own_number;
use super::verify::Verdict;
use crate::backend::host_memory::NearMemory;
use crate::backend::{BackendError, Endpoints, Execution, PlanState, address};
use crate::guarded::{PrivateRanges, copy_by_system, copy_in_process};
use crate::plan::{Mechanism, OpId, Place, Program, RingId};
use smallvec::SmallVec;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};

/// A program whose copies by threads are separated from the operations of streams.
#[derive(Debug)]
pub(super) struct Divided {
    /// The whole program, which keeps its address from being another's.
    whole: Arc<Program>,
    /// The operations of streams.
    pub streams: Arc<Program>,
    /// For each operation of `streams`, what it waits for and sets.
    pub hands: Vec<StreamHand>,
    /// The copies of threads, lane by lane, by their numbers in the whole program.
    lanes: Vec<Vec<u32>>,
    /// Bytes of these.
    bytes: u64,
    /// True if the caller's stream has to wait for the last copy: not all are waited for by its operations.
    pub has_end: bool,
    /// The rings that threads and streams pass through, and whether a stream writes to one.
    rings: Vec<RingId>,
    pub writes_rings: bool,
}

/// The words of one operation of a stream, by numbers of operations in the whole program.
#[derive(Debug, Default)]
pub(super) struct StreamHand {
    pub waits: SmallVec<[u32; 2]>,
    /// Its own, if a thread waits for it.
    pub tells: Option<u32>,
}

impl Divided {
    /// The division of an execution's program, which its plan keeps. `None` where threads copy nothing.
    pub fn of(execution: &Execution<'_>, gpu: usize, state: &PlanState) -> Option<Arc<Divided>> {
        if !by_threads(execution.program) {
            return None;
        }
        if let Some(known) = state.find::<Arc<Divided>>(execution.program, gpu) {
            return Some(Arc::clone(known));
        }
        let divided = Arc::new(Divided::new(execution.program));
        state.keep((Arc::as_ptr(execution.program).addr(), None), Arc::new(Arc::clone(&divided)));
        Some(divided)
    }

    fn new(program: &Arc<Program>) -> Divided {
        let by_thread = |index: usize| program.ops[index].mechanism == Mechanism::Thread;
        let lanes = program.ops.iter().filter(|op| op.mechanism != Mechanism::Thread).map(|op| op.lane.0 as usize + 1).max().unwrap_or(0);
        let mut streams = Program { lanes: program.lanes[..lanes].to_vec(), ops: Vec::new(), ..Program::clone(program) };
        let (mut hands, mut bytes): (Vec<StreamHand>, u64) = (Vec::new(), 0);
        // Of operations of streams, in `streams`.
        let mut number: Vec<u32> = Vec::with_capacity(program.ops.len());
        let mut awaited = vec![false; program.ops.len()];
        let mut copies: Vec<Vec<u32>> = vec![Vec::new(); program.lanes.len()];
        for (index, op) in program.ops.iter().enumerate() {
            if by_thread(index) {
                for before in op.after.iter().filter(|before| !by_thread(before.0 as usize)) {
                    hands[number[before.0 as usize] as usize].tells = Some(before.0);
                }
                copies[op.lane.0 as usize].push(index as u32);
                bytes += op.copies.iter().map(|copy| copy.bytes).sum::<u64>();
                number.push(u32::MAX);
                continue;
            }
            let (threads, others): (SmallVec<[OpId; 2]>, SmallVec<[OpId; 2]>) =
                op.after.iter().copied().partition(|before| by_thread(before.0 as usize));
            threads.iter().for_each(|before| awaited[before.0 as usize] = true);
            let mut own = op.clone();
            own.after = others.iter().map(|before| OpId(number[before.0 as usize])).collect();
            number.push(streams.ops.len() as u32);
            streams.ops.push(own);
            hands.push(StreamHand { waits: threads.iter().map(|before| before.0).collect(), tells: None });
        }
        copies.retain(|lane| !lane.is_empty());
        let of_slot = |place: Place| if let Place::Slot { ring, .. } = place { Some(ring) } else { None };
        let by_threads = program.ops.iter().filter(|op| op.mechanism == Mechanism::Thread).flat_map(|op| &op.copies);
        let mut rings: Vec<RingId> = by_threads.flat_map(|copy| [copy.to, copy.from]).filter_map(of_slot).collect();
        rings.sort_unstable();
        rings.dedup();
        let mut by_streams = streams.ops.iter().flat_map(|op| &op.copies);
        let writes_rings = by_streams.any(|copy| of_slot(copy.to).is_some_and(|ring| rings.contains(&ring)));
        let has_end = copies.iter().filter_map(|lane| lane.last()).any(|last| !awaited[*last as usize]);
        Divided { whole: Arc::clone(program), streams: Arc::new(streams), hands, lanes: copies, bytes, has_end, rings, writes_rings }
    }

    /// The copies of threads.
    fn copies(&self) -> impl Iterator<Item = u32> {
        self.lanes.iter().flatten().copied()
    }
}

/// True if threads copy a part of a program. Their lanes, which are the host's, stand last.
pub(super) fn by_threads(program: &Program) -> bool {
    program.lanes.last().is_some_and(|lane| lane.device.is_host()) && program.ops.iter().any(|op| op.mechanism == Mechanism::Thread)
}

/// Words beside those of operations.
const OWN_WORDS: usize = 4;

/// Pinned memory for the words of an execution at a time.
#[derive(Debug)]
struct WordBlock {
    base: u64,
    count: usize,
}

/// Blocks that no execution uses.
#[derive(Debug, Default)]
struct WordBlocks {
    spare: Mutex<Vec<WordBlock>>,
    /// Blocks of jobs that were cancelled, whose streams may still set words.
    retired: Mutex<Vec<WordBlock>>,
}

/// The copies of threads for one execution.
#[derive(Debug)]
pub(super) struct Job {
    endpoints: Arc<[Endpoints]>,
    rings: Arc<[u64]>,
    divided: Arc<Divided>,
    /// Those of the rings that threads pass.
    ring_bytes: SmallVec<[Range<u64>; 4]>,
    stream: Option<u64>,
    words: WordBlock,
    all_words: Arc<WordBlocks>,
    /// Value that its words are set to.
    pub value: u64,
    /// Copies that are not done.
    left: AtomicUsize,
    /// True once a copy has failed: no more bytes are copied.
    has_failed: AtomicBool,
    /// True once the execution has failed to be enqueued: its streams may never set a word.
    is_cancelled: AtomicBool,
    /// Private memory of the process, found by the first thread that needs it, while the others copy as though there were none: that takes a
    /// millisecond and more. Not looked for where few bytes are copied.
    private: OnceLock<PrivateRanges>,
    is_looked_for: AtomicBool,
    pub verdict: Arc<Verdict>,
}

impl Job {
    /// The word that the stream sets when it reaches the execution.
    pub fn begin(&self) -> u64 {
        self.words.base
    }

    /// The word that is set while the rings are granted to it.
    pub fn granted(&self) -> u64 {
        self.words.base + 8
    }

    /// The word that the last copy sets.
    pub fn end(&self) -> u64 {
        self.words.base + 16
    }

    /// The word that the stream sets when it is past the execution.
    pub fn over(&self) -> u64 {
        self.words.base + 24
    }

    /// The word of an operation.
    pub fn word(&self, op: u32) -> u64 {
        self.words.base + 8 * (OWN_WORDS as u64 + u64::from(op))
    }

    fn at(&self, word: u64) -> &AtomicU64 {
        // SAFETY: a word of the block, which is looked at through atomics alone here; it is freed once no thread has a job.
        unsafe { &*with_exposed_provenance::<AtomicU64>(word as usize) }
    }

    /// True if a word is set.
    fn is_set(&self, word: u64) -> bool {
        self.at(word).load(Ordering::Acquire) >= self.value
    }

    fn set(&self, word: u64) {
        self.at(word).store(self.value, Ordering::Release);
    }

    /// Nothing more is copied, and threads wait for no stream any longer. So streams that wait for threads go on.
    pub fn cancel(&self) {
        self.has_failed.store(true, Ordering::Release);
        self.is_cancelled.store(true, Ordering::Release);
    }

    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Acquire)
    }

    fn address(&self, place: Place) -> u64 {
        address(&self.divided.whole, &self.endpoints, &self.rings, place)
    }

    /// Moves the bytes of one copy.
    fn copy(&self, op: u32) -> Result<(), BackendError> {
        let is_little = self.divided.bytes < LITTLE_BYTES;
        for copy in &self.divided.whole.ops[op as usize].copies {
            let (to, from, bytes) = (self.address(copy.to), self.address(copy.from), copy.bytes as usize);
            let reads = matches!(copy.to, Place::Slot { .. });
            if !is_little && !self.is_looked_for.swap(true, Ordering::Relaxed) {
                // Nobody else sets it.
                let _ = self.private.set(PrivateRanges::look());
            }
            let ordinary = if reads { from } else { to };
            if self.private.get().is_some_and(|ranges| ranges.has(ordinary, copy.bytes, !reads)) {
                // SAFETY: the slot is this copy's by the order of the program, and lies in memory of the library. Private memory stays until the
                // execution has completed, for which its caller vouches.
                unsafe { copy_in_process(to, from, bytes) };
                continue;
            }
            // SAFETY: as above, for the slot.
            unsafe { copy_by_system(to, from, bytes, reads) }.map_err(|fault| {
                let transfer = match (copy.from, copy.to) {
                    (Place::Source { transfer, .. }, _) | (_, Place::Destination { transfer, .. }) => transfer,
                    _ => 0,
                };
                fault.error(transfer)
            })?;
        }
        Ok(())
    }

    /// The address in ordinary memory at which the first copy of an operation begins or ends.
    fn ordinary_end(&self, op: u32) -> u64 {
        let copy = self.divided.whole.ops[op as usize].copies.first();
        copy.map_or(0, |copy| self.address(if matches!(copy.to, Place::Slot { .. }) { copy.from } else { copy.to }))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let WordBlock { base, count } = self.words;
        let blocks = if *self.is_cancelled.get_mut() { &self.all_words.retired } else { &self.all_words.spare };
        lock(blocks).push(WordBlock { base, count });
    }
}

/// Where a thread is.
pub(super) struct Worker {
    near: NearMemory,
    /// The job that it has gone to the memory of.
    last: u64,
}

impl Default for Worker {
    fn default() -> Self {
        Worker { near: NearMemory::of_this_thread(), last: 0 }
    }
}

impl PoolJob for Job {
    type Worker = Worker;

    fn stream(&self) -> Option<u64> {
        self.stream
    }

    fn lanes(&self) -> &[Vec<u32>] {
        &self.divided.lanes
    }

    fn bytes(&self) -> &[Range<u64>] {
        &self.ring_bytes
    }

    fn waits_for_grant(&self) -> bool {
        self.divided.writes_rings
    }

    fn grant(&self) {
        self.set(self.granted());
    }

    fn take_grant_back(&self) {
        self.at(self.granted()).store(self.value - 1, Ordering::SeqCst);
        // Before the look at whether the stream has come.
        fence(Ordering::SeqCst);
    }

    fn has_begun(&self) -> bool {
        self.is_set(self.begin()) || self.is_cancelled()
    }

    fn is_over(&self) -> bool {
        self.is_set(self.over())
    }

    fn is_ready(&self, op: u32) -> bool {
        self.is_cancelled() || self.divided.whole.ops[op as usize].after.iter().all(|before| self.is_set(self.word(before.0)))
    }

    fn run(&self, op: u32, worker: &mut Worker) {
        // Once for each execution: memory of several nodes has threads on each, in proportion.
        if worker.last != self.value {
            worker.near.go_to(self.ordinary_end(op));
            worker.last = self.value;
        }
        if !self.has_failed.load(Ordering::Acquire)
            && let Err(error) = self.copy(op)
        {
            self.verdict.note(error);
            self.has_failed.store(true, Ordering::Release);
        }
        self.set(self.word(op));
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.set(self.end());
        }
    }
}

/// Where fewer bytes are copied, looking for private memory takes longer than it saves: a process with a GPU has thousands of ranges.
const LITTLE_BYTES: u64 = 32 << 20;

/// The threads of a backend, and the words of their jobs.
#[derive(Debug, Default)]
pub(super) struct Workers {
    pool: CopyPool<Job>,
    words: Arc<WordBlocks>,
    /// The value of the last job.
    value: AtomicU64,
}

impl Workers {
    /// The copies of threads for an execution of a program that was divided. Nothing begins before [`start`](Workers::start).
    pub fn job(&self, gpus: &Gpus, execution: &Execution<'_>, start: &Start, divided: &Arc<Divided>) -> Result<Arc<Job>, BackendError> {
        let count = OWN_WORDS + execution.program.ops.len();
        let ring_bytes = divided.rings.iter().map(|ring| {
            let base = execution.rings[ring.0 as usize];
            base..base + execution.program.rings[ring.0 as usize].bytes()
        });
        let spare = {
            let mut spare = lock(&self.words.spare);
            let fitting = spare.iter().position(|words| words.count >= count);
            fitting.map(|at| spare.swap_remove(at))
        };
        let words = spare.map_or_else(|| WordBlock::new(gpus, count), Ok)?;
        Ok(Arc::new(Job {
            endpoints: Arc::clone(execution.endpoints),
            rings: Arc::clone(execution.rings),
            divided: Arc::clone(divided),
            ring_bytes: ring_bytes.collect(),
            stream: own_number(execution.stream, start.gpu, start.number),
            words,
            all_words: Arc::clone(&self.words),
            value: 1 + self.value.fetch_add(1, Ordering::Relaxed),
            left: AtomicUsize::new(divided.copies().count()),
            has_failed: AtomicBool::new(false),
            is_cancelled: AtomicBool::new(false),
            private: OnceLock::new(),
            is_looked_for: AtomicBool::new(false),
            verdict: Arc::default(),
        }))
    }

    /// Gives a job to the threads, of which there are then as many as its program has lanes for them.
    pub fn start(&self, job: &Arc<Job>) -> Result<(), BackendError> {
        self.pool.give(job)
    }

    /// Waits until no thread is at work for a job that was cancelled, and whose streams have nothing left to do.
    pub fn abandon(&self, job: &Arc<Job>) {
        job.set(job.over());
        self.pool.wait(job);
    }

    /// Ends the threads. All work of streams has finished.
    pub fn release(&self, gpus: &Gpus) {
        self.pool.close();
        let blocks = [&self.words.spare, &self.words.retired].map(|blocks| std::mem::take(&mut *lock(blocks)));
        for words in blocks.into_iter().flatten() {
            if !gpus.has_lost()
                && let Some(primary) = gpus.in_use().next()
            {
                let _current = primary.enter();
                // SAFETY: allocated in `WordBlock::new`; no stream and no thread has it any more.
                unsafe { (gpus.driver.cuMemFreeHost)(handle(words.base as usize)) };
            }
        }
    }
}

impl WordBlock {
    /// A context is current.
    fn new(gpus: &Gpus, count: usize) -> Result<WordBlock, BackendError> {
        let count = count.next_power_of_two().max(512);
        let _outside = OutsideCapture::enter(gpus.driver);
        let mut base: *mut c_void = std::ptr::null_mut();
        const PORTABLE: u32 = 1;
        // SAFETY: the output is valid for the call.
        unsafe { call!(gpus.driver, cuMemHostAlloc(&mut base, 8 * count, PORTABLE)) }?;
        // SAFETY: just allocated, with so many bytes.
        unsafe { base.cast::<u8>().write_bytes(0, 8 * count) };
        Ok(WordBlock { base: base.expose_provenance() as u64, count })
    }
}
