//! Makes copies between pageable host memory and slots of pinned staging memory by threads ([`Mechanism::Thread`]), while copy engines make
//! other copies.
//!
//! All work is enqueued when an execution is submitted, without waiting. Streams and threads notify each other by words in pinned memory,
//! one word for each operation. If a stream needs the result of a thread's copy, a stream operation waits for the word of that copy. If a
//! thread needs the result of a stream operation, the stream sets the word of that operation. Each execution sets its words to a value that
//! is larger than that of any earlier execution which used them. The words are therefore never reset.
//!
//! Threads run any ready copy and never wait for a copy ([`CopyPool`]). An operation waits only for earlier operations of its program, and
//! is enqueued after all of them. Executions that share staging rings run in the order in which their streams reach them.
//!
//! If the system has several NUMA nodes, a thread runs on the node of the memory that it copies first for an execution.

use super::driver::{OutsideCapture, call, handle, lock};
use super::gpus::Gpus;
use super::pool::{CopyPool, PoolJob};
use super::streams::Start;
use super::turns::own_number;
use super::verify::Verdict;
use crate::backend::host_memory::NearMemory;
use crate::backend::{BackendError, Endpoints, Execution, PlanState, address};
use crate::guarded::{AddressRanges, Fault, copy_by_system, copy_in_process, read_file};
use crate::plan::{Mechanism, OpId, Place, Program, RingId};
use smallvec::SmallVec;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// Program (list of copy operations) that is divided into operations for streams and copies for threads.
#[derive(Debug)]
pub(super) struct Divided {
    /// The undivided program. It is kept alive, so that no other program gets the same address.
    whole: Arc<Program>,
    /// The program without the copies that threads make. Streams execute this program.
    pub streams: Arc<Program>,
    /// Synchronisation words that each operation of `streams` waits for and sets, in the order of these operations.
    pub hands: Vec<StreamHand>,
    /// Lists of copies that threads make. The copies of one list (lane) run in order. Each entry is the index of an operation of the
    /// undivided program.
    lanes: Vec<Vec<u32>>,
    /// Total number of bytes that threads copy in one execution of the program.
    bytes: u64,
    /// True if the caller's stream must wait for the last copy of the threads. False if operations in streams already wait for the last
    /// copies of all lists.
    pub has_end: bool,
    /// Staging rings through which threads and streams pass data.
    rings: Vec<RingId>,
    /// True if a stream writes to one of the staging rings through which threads and streams pass data.
    pub writes_rings: bool,
}

/// Synchronisation words of one stream operation. They are given as indices of operations in the undivided program.
#[derive(Debug, Default)]
pub(super) struct StreamHand {
    pub waits: SmallVec<[u32; 2]>,
    /// Index of the synchronisation word of this operation, which the stream sets after the operation. `None` if no thread waits for the
    /// operation.
    pub tells: Option<u32>,
}

impl Divided {
    /// Returns the division of an execution's program between streams and threads. The plan's state caches it. Returns `None` if threads
    /// copy nothing.
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
        // Index in `streams` of each operation of the undivided program, or `u32::MAX` for a copy that a thread makes.
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

    /// Returns the copies that threads make, as indices of operations in the undivided program.
    fn copies(&self) -> impl Iterator<Item = u32> {
        self.lanes.iter().flatten().copied()
    }
}

/// True if threads make some copies of the program. These copies are in the last lanes (sequences of operations) of the program. The device
/// of these lanes is the host.
pub(super) fn by_threads(program: &Program) -> bool {
    program.lanes.last().is_some_and(|lane| lane.device.is_host()) && program.ops.iter().any(|op| op.mechanism == Mechanism::Thread)
}

/// Number of synchronisation words of a job in addition to one word for each operation. The additional words are set when the stream has
/// reached the execution, when the job may use its staging rings, when the last copy has finished, and when the stream has passed the
/// execution.
const OWN_WORDS: usize = 4;

/// Block of pinned memory for the synchronisation words of an execution. One execution at a time uses a block.
#[derive(Debug)]
struct WordBlock {
    base: u64,
    count: usize,
}

/// Blocks of synchronisation words that no execution uses.
#[derive(Debug, Default)]
struct WordBlocks {
    spare: Mutex<Vec<WordBlock>>,
    /// Blocks of cancelled jobs. Streams may still set words in these blocks, so they are not reused.
    retired: Mutex<Vec<WordBlock>>,
}

/// Job of the copy threads: all copies that threads make for one execution.
#[derive(Debug)]
pub(super) struct Job {
    endpoints: Arc<[Endpoints]>,
    rings: Arc<[u64]>,
    divided: Arc<Divided>,
    /// Byte ranges of the staging rings through which the threads and streams of this job pass data.
    ring_bytes: SmallVec<[Range<u64>; 4]>,
    stream: Option<u64>,
    words: WordBlock,
    all_words: Arc<WordBlocks>,
    /// Value to which the job's synchronisation words are set. It is larger than that of any earlier job that used these words.
    pub value: u64,
    /// Number of copies of the job that have not finished.
    left: AtomicUsize,
    /// True once a copy of the job has failed. The later copies of the job are then skipped.
    has_failed: AtomicBool,
    /// True if submitting the execution failed halfway. Its streams may then never set a word for which a thread waits.
    is_cancelled: AtomicBool,
    /// Table of the address ranges of the process that threads copy without `process_vm_readv` and `process_vm_writev`. The thread that
    /// finishes the first copy reads it from the operating system, which takes a millisecond or more. Meanwhile, other threads copy by
    /// these system calls. If the job copies few bytes, or all of them from files, the table is not read.
    ranges: OnceLock<AddressRanges>,
    needs_ranges: AtomicBool,
    is_looked_for: AtomicBool,
    /// Time at which the first copy began.
    begin: OnceLock<Instant>,
    /// Sum of the durations of the copies of all threads, in nanoseconds. It is logged when the job ends.
    copying: AtomicU64,
    /// Longest duration of a copy of a thread, in nanoseconds. It is logged when the job ends.
    longest: AtomicU64,
    pub verdict: Arc<Verdict>,
}

impl Job {
    /// Returns the address of the synchronisation word that the stream sets when it reaches the execution.
    pub fn begin(&self) -> u64 {
        self.words.base
    }

    /// Returns the address of the synchronisation word that is set while the execution has exclusive use of its staging rings.
    pub fn granted(&self) -> u64 {
        self.words.base + 8
    }

    /// Returns the address of the synchronisation word that a thread sets after the job's last copy.
    pub fn end(&self) -> u64 {
        self.words.base + 16
    }

    /// Returns the address of the synchronisation word that the stream sets when it has passed the execution.
    pub fn over(&self) -> u64 {
        self.words.base + 24
    }

    /// Returns the address of the synchronisation word that is set after operation number `op`, counted in the whole program before it was
    /// divided between streams and threads.
    pub fn word(&self, op: u32) -> u64 {
        self.words.base + 8 * (OWN_WORDS as u64 + u64::from(op))
    }

    fn at(&self, word: u64) -> &AtomicU64 {
        // SAFETY: `word` is the address of a word in the block, which this process accesses only through atomics. The block is freed only
        // when no thread has a job.
        unsafe { &*with_exposed_provenance::<AtomicU64>(word as usize) }
    }

    /// True if the synchronisation word at the address `word` contains this job's value or a larger one.
    fn is_set(&self, word: u64) -> bool {
        self.at(word).load(Ordering::Acquire) >= self.value
    }

    fn set(&self, word: u64) {
        self.at(word).store(self.value, Ordering::Release);
    }

    /// Cancels the job. Threads then make no more copies for the job and do not wait for its streams. Threads still set the job's
    /// synchronisation words, so that streams that wait for them continue.
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

    /// Makes the copies of operation number `op` of the undivided program.
    fn copy(&self, op: u32) -> Result<(), BackendError> {
        for copy in &self.divided.whole.ops[op as usize].copies {
            let (to, from, bytes) = (self.address(copy.to), self.address(copy.from), copy.bytes as usize);
            let reads = matches!(copy.to, Place::Slot { .. });
            let failed = |fault: Fault| {
                let transfer = match (copy.from, copy.to) {
                    (Place::Source { transfer, .. }, _) | (_, Place::Destination { transfer, .. }) => transfer,
                    _ => 0,
                };
                fault.error(transfer)
            };
            // SAFETY: The order of the program gives the slot to this copy alone, and the slot is memory of the library.
            if reads && let Some(read) = unsafe { read_file(to, from, bytes) } {
                read.map_err(failed)?;
                continue;
            }
            self.needs_ranges.store(true, Ordering::Relaxed);
            let unknown = AddressRanges::default();
            let ranges = self.ranges.get().unwrap_or(&unknown);
            let ordinary = if reads { from } else { to };
            if ranges.has(ordinary, copy.bytes, !reads) {
                // SAFETY: The order of the program gives the slot to this copy alone, and the slot is memory of the library. The caller
                // keeps anonymous memory allocated until the execution has completed.
                unsafe { copy_in_process(to, from, bytes) };
                continue;
            }
            // SAFETY: as above.
            if reads && let Some(read) = unsafe { ranges.read_mapped(to, from, bytes) } {
                read.map_err(failed)?;
                continue;
            }
            // SAFETY: as above.
            unsafe { copy_by_system(to, from, bytes, reads) }.map_err(failed)?;
        }
        Ok(())
    }

    /// Logs the fraction of the time in which the threads of the job have copied. In the remaining time, the threads have waited for other
    /// work of the stream, or for free staging slots. They wait for staging slots if the links limit the rate.
    fn log_times(&self) {
        if self.divided.bytes < LITTLE_BYTES || !log::log_enabled!(log::Level::Debug) {
            return;
        }
        let taken = self.begin.get().map_or(0.0, |begin| begin.elapsed().as_secs_f64());
        let copying = self.copying.load(Ordering::Relaxed) as f64 * 1e-9 / self.divided.lanes.len() as f64;
        log::debug!(
            "copy threads: {:.0} MB in {:.2} ms, {:.1} GB/s; {} sequences of copies in parallel, each in progress for {:.0} % of this time; \
             a copy took {:.0} us in the mean, and at most {:.0} us",
            self.divided.bytes as f64 * 1e-6,
            taken * 1e3,
            self.divided.bytes as f64 * 1e-9 / taken,
            self.divided.lanes.len(),
            100.0 * copying / taken,
            self.copying.load(Ordering::Relaxed) as f64 * 1e-3 / self.divided.copies().count() as f64,
            self.longest.load(Ordering::Relaxed) as f64 * 1e-3
        );
    }

    /// Returns the address in pageable memory that the first copy of an operation reads or writes.
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

/// State of a copy thread: the NUMA node on which it runs, and the last job for which it moved to a node.
pub(super) struct Worker {
    near: NearMemory,
    /// Value of the last job for which the thread moved to the NUMA node of the job's memory.
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
        // The fence orders this store before the check whether the stream has arrived.
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
        // The thread moves once for each execution. If the execution's memory is on several NUMA nodes, the threads are distributed over
        // these nodes in proportion.
        if worker.last != self.value {
            worker.near.go_to(self.ordinary_end(op));
            worker.last = self.value;
        }
        let begin = Instant::now();
        self.begin.get_or_init(|| begin);
        if !self.has_failed.load(Ordering::Acquire)
            && let Err(error) = self.copy(op)
        {
            self.verdict.note(error);
            self.has_failed.store(true, Ordering::Release);
        }
        let taken = begin.elapsed().as_nanos() as u64;
        self.copying.fetch_add(taken, Ordering::Relaxed);
        self.longest.fetch_max(taken, Ordering::Relaxed);
        self.set(self.word(op));
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.set(self.end());
            self.log_times();
        }
    }

    fn prepare(&self) {
        let is_little = self.divided.bytes < LITTLE_BYTES;
        if !is_little && self.needs_ranges.load(Ordering::Relaxed) && !self.is_looked_for.swap(true, Ordering::Relaxed) {
            // No other thread sets this value, so the call cannot fail.
            let _ = self.ranges.set(AddressRanges::look());
        }
    }
}

/// Minimum number of bytes of a job for which the process's ranges of private memory are read. For smaller jobs, reading these ranges takes
/// longer than it saves, because a process with a GPU has thousands of address ranges.
const LITTLE_BYTES: u64 = 32 << 20;

/// Copy threads of a backend, and the synchronisation words of their jobs.
#[derive(Debug, Default)]
pub(super) struct Workers {
    pool: CopyPool<Job>,
    words: Arc<WordBlocks>,
    /// Value to which the words of the most recent job are set. The next job gets a larger value.
    value: AtomicU64,
}

impl Workers {
    /// Creates the job of the copy threads for an execution of a divided program. No copy begins before [`start`](Workers::start) is
    /// called.
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
            ranges: OnceLock::new(),
            needs_ranges: AtomicBool::new(false),
            is_looked_for: AtomicBool::new(false),
            begin: OnceLock::new(),
            copying: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            verdict: Arc::default(),
        }))
    }

    /// Passes a job to the copy threads, and starts threads until there are at least as many as the job has lists of copies (lanes).
    pub fn start(&self, job: &Arc<Job>) -> Result<(), BackendError> {
        self.pool.give(job)
    }

    /// Waits until no thread works on a cancelled job. All work of the job's streams must have finished.
    pub fn abandon(&self, job: &Arc<Job>) {
        job.set(job.over());
        self.pool.wait(job);
    }

    /// Ends the copy threads and frees their synchronisation words. All work of streams must have finished.
    pub fn release(&self, gpus: &Gpus) {
        self.pool.close();
        let blocks = [&self.words.spare, &self.words.retired].map(|blocks| std::mem::take(&mut *lock(blocks)));
        for words in blocks.into_iter().flatten() {
            if !gpus.has_lost()
                && let Some(primary) = gpus.in_use().next()
            {
                let _current = primary.enter();
                // SAFETY: `WordBlock::new` allocated the memory. No stream and no thread uses it any more.
                unsafe { (gpus.driver.cuMemFreeHost)(handle(words.base as usize)) };
            }
        }
    }
}

impl WordBlock {
    /// Allocates a block of synchronisation words. Requires a current context.
    fn new(gpus: &Gpus, count: usize) -> Result<WordBlock, BackendError> {
        let count = count.next_power_of_two().max(512);
        let _outside = OutsideCapture::enter(gpus.driver);
        let mut base: *mut c_void = std::ptr::null_mut();
        const PORTABLE: u32 = 1;
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(gpus.driver, cuMemHostAlloc(&mut base, 8 * count, PORTABLE)) }?;
        // SAFETY: The memory was just allocated with this size.
        unsafe { base.cast::<u8>().write_bytes(0, 8 * count) };
        Ok(WordBlock { base: base.expose_provenance() as u64, count })
    }
}
