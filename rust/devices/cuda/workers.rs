//! Threads that copy between pageable host memory and slots of pinned memory ([`Mechanism::Thread`]), beside copy engines.
//!
//! Everything is enqueued when an execution is submitted, and nobody waits there. Streams and threads hand over by words in pinned memory, one for
//! each operation: a stream waits by an operation for the word of a thread's copy, and sets the word of its own where a thread waits for that.
//! An execution sets its words to a number of its own, larger than that of any before it that used them, so nobody has to set them back.
//!
//! Threads take copies in the order of the program, and executions in the order in which they were submitted. What a copy waits for stands before it
//! and so was taken before, or is a copy engine's that waits for such ones alone: however few threads there are, the first of what is under way can
//! go on.
//!
//! A thread works on the NUMA node of the memory that it copies first for an execution, where the system shows several.
//!
//! Ordinary memory may be none, and what is mapped from a file can vanish while it is copied, because the file becomes shorter. There the system
//! copies (`process_vm_readv`), which tells where a load would end the process, at half the rate. Private memory is copied as any other: it lives until
//! the program itself unmaps it, and until the execution has completed it must not.

use super::driver::{OutsideCapture, call, handle, lock};
use super::gpus::Gpus;
use super::verify::Verdict;
use crate::backend::host_memory::NearMemory;
use crate::backend::{BackendError, Endpoints, Execution, address};
use crate::plan::{Mechanism, OpId, Place, Program};
use crate::threads::without_signals;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A program without its threads' copies, and what these and the others wait for of each other.
#[derive(Debug)]
pub(super) struct Divided {
    /// What streams do.
    pub streams: Arc<Program>,
    /// Of each operation of `streams`, the words that it waits for and whether it sets its own, which has the number of the operation in the whole.
    pub hands: Vec<StreamHand>,
    /// Operations of the whole that threads do.
    copies: Vec<u32>,
    /// Bytes of these, and how many lanes they stand on.
    bytes: u64,
    lanes: usize,
    /// Those whose words the caller's stream waits for at its end.
    pub ends: SmallVec<[u32; 8]>,
}

#[derive(Debug, Default)]
pub(super) struct StreamHand {
    pub waits: SmallVec<[u32; 2]>,
    pub tells: Option<u32>,
}

impl Divided {
    /// `None` where no threads are asked for.
    pub fn of(program: &Program) -> Option<Divided> {
        let by_thread = |index: usize| program.ops[index].mechanism == Mechanism::Thread;
        if !(0..program.ops.len()).any(by_thread) {
            return None;
        }
        let lanes = program.ops.iter().filter(|op| op.mechanism != Mechanism::Thread).map(|op| op.lane.0 as usize + 1).max().unwrap_or(0);
        let mut streams = Program { lanes: program.lanes[..lanes].to_vec(), ops: Vec::new(), ..program.clone() };
        let (mut hands, mut copies): (Vec<StreamHand>, Vec<u32>) = (Vec::new(), Vec::new());
        let mut number: Vec<u32> = Vec::with_capacity(program.ops.len());
        let mut awaited = vec![false; program.ops.len()];
        let mut last: Vec<Option<u32>> = vec![None; program.lanes.len()];
        for (index, op) in program.ops.iter().enumerate() {
            if by_thread(index) {
                for before in op.after.iter().filter(|before| !by_thread(before.0 as usize)) {
                    hands[number[before.0 as usize] as usize].tells = Some(before.0);
                }
                last[op.lane.0 as usize] = Some(index as u32);
                number.push(copies.len() as u32);
                copies.push(index as u32);
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
        let of_threads = last.iter().flatten().count();
        let ends = last.into_iter().flatten().filter(|copy| !awaited[*copy as usize]).collect();
        let bytes = copies.iter().flat_map(|copy| &program.ops[*copy as usize].copies).map(|copy| copy.bytes).sum();
        Some(Divided { streams: Arc::new(streams), hands, copies, bytes, lanes: of_threads, ends })
    }
}

/// Pinned memory for the words of an execution at a time.
#[derive(Debug)]
struct WordBlock {
    base: u64,
    count: usize,
}

/// What threads do for one execution.
#[derive(Debug)]
pub(super) struct Job {
    program: Arc<Program>,
    endpoints: Arc<[Endpoints]>,
    rings: Arc<[u64]>,
    copies: Vec<u32>,
    words: WordBlock,
    /// What its words are set to.
    pub value: u64,
    /// Copies that somebody has taken, and that are not done.
    taken: AtomicUsize,
    left: AtomicUsize,
    is_cancelled: AtomicBool,
    /// What is private memory of the process, found out by the first thread that wants to know, while the others copy as though none were: that
    /// takes a millisecond and more. Not asked for few bytes.
    private: OnceLock<PrivateRanges>,
    is_looked_for: AtomicBool,
    is_little: bool,
    /// Lanes of threads.
    lanes: usize,
    pub verdict: Arc<Verdict>,
}

impl Job {
    /// The word of the execution's begin, then that of each operation.
    pub fn begin(&self) -> u64 {
        self.words.base
    }

    pub fn word(&self, op: u32) -> u64 {
        self.words.base + 8 * (1 + u64::from(op))
    }

    fn load(&self, word: u64) -> u64 {
        // SAFETY: a word of the block, which is looked at through atomics alone here; it is freed once no thread has a job.
        unsafe { &*with_exposed_provenance::<AtomicU64>(word as usize) }.load(Ordering::Acquire)
    }

    fn store(&self, word: u64) {
        // SAFETY: as above.
        unsafe { &*with_exposed_provenance::<AtomicU64>(word as usize) }.store(self.value, Ordering::Release);
    }

    /// Nothing more is copied. Each copy still sets its word in its turn, so what is under way ends before the execution does.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
    }

    /// Looks until a word is set: at once, then again and again. `longest` is how long a pause may become.
    fn wait(&self, word: u64, longest: Duration) {
        let (begun, mut pause) = (Instant::now(), PAUSE);
        while self.load(word) < self.value && !self.is_cancelled.load(Ordering::Acquire) {
            if begun.elapsed() < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(pause);
                pause = (2 * pause).min(longest);
            }
        }
    }

    /// Where one of its copies begins or ends in ordinary memory.
    fn ordinary_end(&self, at: usize) -> u64 {
        let copy = self.program.ops[self.copies[at] as usize].copies.first();
        copy.map_or(0, |copy| self.address(if matches!(copy.to, Place::Slot { .. }) { copy.from } else { copy.to }))
    }

    fn address(&self, place: Place) -> u64 {
        address(&self.program, &self.endpoints, &self.rings, place)
    }

    /// Does one of its copies, in its turn.
    fn copy(&self, at: usize) {
        let index = self.copies[at];
        let op = &self.program.ops[index as usize];
        // The one before on its lane.
        let before = self.copies[..at].iter().rev().find(|other| self.program.ops[**other as usize].lane == op.lane);
        before.iter().for_each(|other| self.wait(self.word(**other), PAUSE));
        if op.after.iter().all(|before| self.program.ops[before.0 as usize].mechanism == Mechanism::Thread) || at < self.lanes {
            // The stream may have other work for seconds.
            self.wait(self.begin(), LONG_PAUSE);
        }
        op.after.iter().for_each(|before| self.wait(self.word(before.0), PAUSE));
        for copy in op.copies.iter().filter(|_| !self.is_cancelled.load(Ordering::Acquire)) {
            let (to, from) = (self.address(copy.to), self.address(copy.from));
            let reads = matches!(copy.to, Place::Slot { .. });
            let bytes = copy.bytes as usize;
            if !self.is_little && !self.is_looked_for.swap(true, Ordering::Relaxed) {
                // Nobody else sets it.
                let _ = self.private.set(PrivateRanges::look());
            }
            let private = self.private.get();
            let is_private = private.is_some_and(|ranges| ranges.has(if reads { from } else { to }, copy.bytes, !reads));
            let copy_bytes = if is_private { copy_private } else { copy_ordinary };
            // SAFETY: the slot is this copy's by the order of the program, and lies in memory of the library. Private memory stays until the
            // execution has completed, for which its caller vouches.
            if let Err((at, code)) = unsafe { copy_bytes(to, from, bytes, reads) } {
                let transfer = match (copy.from, copy.to) {
                    (Place::Source { transfer, .. }, _) | (_, Place::Destination { transfer, .. }) => transfer,
                    _ => 0,
                };
                self.verdict.note(BackendError::Driver {
                    what: format!("transfer {transfer}: {} host memory at {at:#x}", if reads { "reading" } else { "writing" }),
                    reason: "it was unmapped, or its file became shorter, while an execution used it; keep it until that has completed"
                        .into(),
                    code: i64::from(code),
                });
                self.cancel();
            }
        }
        self.store(self.word(index));
    }
}

/// Address ranges of the process that no file stands behind, in order, each with whether it may be written.
#[derive(Debug, Default)]
struct PrivateRanges(Vec<(u64, u64, bool)>);

impl PrivateRanges {
    /// As they are now.
    fn look() -> PrivateRanges {
        PrivateRanges::parse(&std::fs::read("/proc/self/maps").unwrap_or_default())
    }

    /// Of lines as proc(5) has them: `begin-end access offset device inode name`. What lies side by side is one.
    fn parse(text: &[u8]) -> PrivateRanges {
        let mut found: Vec<(u64, u64, bool)> = Vec::new();
        for line in text.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok()) {
            let mut words = line.split_ascii_whitespace();
            let (Some(range), Some(access), Some(inode)) = (words.next(), words.next(), words.nth(2)) else { continue };
            let number = |text: &str| u64::from_str_radix(text, 16).ok();
            let Some((begin, end)) = range.split_once('-').and_then(|(begin, end)| Some((number(begin)?, number(end)?))) else { continue };
            // Names in brackets are the heap, stacks, and pages of the system's.
            let is_own = words.next().is_none_or(|name| name == "[heap]" || name.starts_with("[stack") || name.starts_with("[anon"));
            if inode != "0" || !access.starts_with('r') || !is_own {
                continue;
            }
            let writes = access.as_bytes().get(1) == Some(&b'w');
            match found.last_mut().filter(|last| last.1 == begin && last.2 == writes) {
                Some(last) => last.1 = end,
                None => found.push((begin, end, writes)),
            }
        }
        PrivateRanges(found)
    }

    /// Whether all of a range is such memory.
    fn has(&self, address: u64, bytes: u64, written: bool) -> bool {
        let after = self.0.partition_point(|range| range.0 <= address);
        let before = after.checked_sub(1).map(|at| self.0[at]);
        before.is_some_and(|(_, end, writes)| address.checked_add(bytes).is_some_and(|last| last <= end) && (writes || !written))
    }
}

/// # Safety
///
/// Both ends are valid for so many bytes, and do not overlap.
unsafe fn copy_private(to: u64, from: u64, bytes: usize, _: bool) -> Result<(), (u64, i32)> {
    let (to, from) = (with_exposed_provenance_mut::<u8>(to as usize), with_exposed_provenance::<u8>(from as usize));
    // SAFETY: as the caller says.
    unsafe { to.copy_from_nonoverlapping(from, bytes) };
    Ok(())
}

/// Where fewer bytes are copied, looking for private memory takes longer than it saves: a process with a GPU has thousands of ranges.
const LITTLE_BYTES: u64 = 32 << 20;

/// How long a thread looks without a pause.
const SPIN: Duration = Duration::from_micros(10);
/// From one look to the next while copies are under way, each of which takes some 80 us for the largest chunk.
const PAUSE: Duration = Duration::from_micros(15);
const LONG_PAUSE: Duration = Duration::from_micros(200);

/// Copies between ordinary memory and memory of the library: `reads` says that the source is ordinary. An error has the address that is none, and the
/// system's code.
///
/// # Safety
///
/// The library's end is valid for so many bytes, and nobody else touches them.
unsafe fn copy_ordinary(to: u64, from: u64, bytes: usize, reads: bool) -> Result<(), (u64, i32)> {
    static HAS_CALL: AtomicBool = AtomicBool::new(true);
    let mut done = 0;
    while done < bytes && HAS_CALL.load(Ordering::Relaxed) {
        let part = |base: u64| libc::iovec { iov_base: with_exposed_provenance_mut(base as usize + done), iov_len: bytes - done };
        let (own, ordinary) = if reads { (part(to), part(from)) } else { (part(from), part(to)) };
        let process = std::process::id() as libc::pid_t;
        // SAFETY: the library's end is valid, as the caller says; of the other the system finds out.
        let moved = unsafe {
            if reads {
                libc::process_vm_readv(process, &own, 1, &ordinary, 1, 0)
            } else {
                libc::process_vm_writev(process, &own, 1, &ordinary, 1, 0)
            }
        };
        match usize::try_from(moved) {
            Ok(0) => return Err((ordinary.iov_base.addr() as u64, libc::EFAULT)),
            Ok(moved) => done += moved,
            Err(_) => match std::io::Error::last_os_error().raw_os_error().unwrap_or(0) {
                libc::EINTR => {}
                // Not for this process, by a filter of system calls say.
                libc::ENOSYS | libc::EPERM => HAS_CALL.store(false, Ordering::Relaxed),
                code => return Err((ordinary.iov_base.addr() as u64, code)),
            },
        }
    }
    let (to, from) = (with_exposed_provenance_mut::<u8>(to as usize + done), with_exposed_provenance::<u8>(from as usize + done));
    // SAFETY: the caller of `execute` vouches for its buffers until completion; the system's own call, which need not trust it, is not to be had.
    unsafe { to.copy_from_nonoverlapping(from, bytes - done) };
    Ok(())
}

/// The threads of a backend, started as jobs ask for them.
#[derive(Debug, Default)]
pub(super) struct Workers(Arc<Shop>);

#[derive(Debug, Default)]
struct Shop {
    state: Mutex<ShopState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ShopState {
    jobs: VecDeque<Arc<Job>>,
    threads: Vec<JoinHandle<()>>,
    spare: Vec<WordBlock>,
    /// Of jobs that were cancelled, whose streams may still set words.
    retired: Vec<WordBlock>,
    /// The value of the last job.
    value: u64,
    is_closed: bool,
}

impl Workers {
    /// What threads are to do for an execution of a program that was divided. Nothing begins before [`start`](Workers::start).
    pub fn job(&self, gpus: &Gpus, execution: &Execution<'_>, divided: &Divided) -> Result<Arc<Job>, BackendError> {
        let count = 1 + execution.program.ops.len();
        let (spare, value) = {
            let mut state = lock(&self.0.state);
            state.value += 1;
            let fitting = state.spare.iter().position(|words| words.count >= count);
            (fitting.map(|at| state.spare.swap_remove(at)), state.value)
        };
        let words = spare.map_or_else(|| WordBlock::new(gpus, count), Ok)?;
        Ok(Arc::new(Job {
            program: Arc::clone(execution.program),
            endpoints: Arc::clone(execution.endpoints),
            rings: Arc::clone(execution.rings),
            copies: divided.copies.clone(),
            words,
            value,
            taken: AtomicUsize::new(0),
            left: AtomicUsize::new(divided.copies.len()),
            is_cancelled: AtomicBool::new(false),
            private: OnceLock::new(),
            is_looked_for: AtomicBool::new(false),
            is_little: divided.bytes < LITTLE_BYTES,
            lanes: divided.lanes,
            verdict: Arc::default(),
        }))
    }

    /// Hands a job to the threads, of which there are then as many as its program has lanes for them.
    pub fn start(&self, job: &Arc<Job>) -> Result<(), BackendError> {
        let mut state = lock(&self.0.state);
        while state.threads.len() < job.lanes {
            let shop = Arc::clone(&self.0);
            let name = format!("mpgpu-copy-{}", state.threads.len());
            match without_signals(|| std::thread::Builder::new().name(name).spawn(move || shop.work())) {
                Ok(thread) => state.threads.push(thread),
                // Fewer are slower.
                Err(error) if !state.threads.is_empty() => {
                    log::warn!("{} threads copy pageable memory, because the system gives no more: {error}", state.threads.len());
                    break;
                }
                Err(error) => {
                    state.spare.push(job.words.again());
                    let (reason, code) = (error.to_string(), i64::from(error.raw_os_error().unwrap_or(0)));
                    return Err(BackendError::Driver { what: "starting a thread that copies pageable memory".into(), reason, code });
                }
            }
        }
        state.jobs.push_back(Arc::clone(job));
        drop(state);
        self.0.changed.notify_all();
        Ok(())
    }

    /// Waits until no thread is at work for a job that was cancelled.
    pub fn abandon(&self, job: &Job) {
        while job.left.load(Ordering::Acquire) > 0 {
            std::thread::sleep(PAUSE);
        }
    }

    /// Ends the threads. All work of streams has finished.
    pub fn release(&self, gpus: &Gpus) {
        let threads = {
            let mut state = lock(&self.0.state);
            state.is_closed = true;
            state.jobs.iter().for_each(|job| job.cancel());
            std::mem::take(&mut state.threads)
        };
        self.0.changed.notify_all();
        threads.into_iter().for_each(|thread| drop(thread.join()));
        let words = {
            let mut state = lock(&self.0.state);
            let (spare, retired) = (std::mem::take(&mut state.spare), std::mem::take(&mut state.retired));
            spare.into_iter().chain(retired)
        };
        for words in words {
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

impl Shop {
    /// What a thread does until the end.
    fn work(&self) {
        // A pause is as long as it is meant to be, and not 50 us longer.
        // SAFETY: an option of this thread that takes a number of nanoseconds.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64) };
        let (mut near, mut last) = (NearMemory::of_this_thread(), 0);
        while let Some((job, at)) = self.next() {
            // Once for each execution: memory of several nodes has threads on each, in proportion.
            if last != job.value {
                near.go_to(job.ordinary_end(at));
                last = job.value;
            }
            job.copy(at);
            if job.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                let mut state = lock(&self.state);
                let is_cancelled = job.is_cancelled.load(Ordering::Acquire);
                if is_cancelled { &mut state.retired } else { &mut state.spare }.push(job.words.again());
            }
        }
    }

    fn next(&self) -> Option<(Arc<Job>, usize)> {
        let mut state = lock(&self.state);
        loop {
            while let Some(job) = state.jobs.front() {
                let at = job.taken.fetch_add(1, Ordering::Relaxed);
                if at < job.copies.len() {
                    return Some((Arc::clone(job), at));
                }
                state.jobs.pop_front();
            }
            if state.is_closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
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

    /// For the next job.
    fn again(&self) -> WordBlock {
        WordBlock { base: self.base, count: self.count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_memory_is_what_no_file_stands_behind_and_the_process_may_touch() {
        let text =
            b"1000-2000 r--p 00000000 08:01 77 /usr/lib/x.so\n2000-3000 rw-p 00000000 00:00 0\n3000-5000 rw-p 00000000 00:00 0 [heap]\n\
            5000-6000 ---p 00000000 00:00 0\n6000-7000 r--p 00000000 00:00 0\n7000-8000 rw-s 00000000 00:01 9 /dev/shm/y (deleted)\n\
            8000-9000 r--p 00000000 00:00 0 [vvar]\n";
        let private = PrivateRanges::parse(text);
        let has = |address, bytes, written| private.has(address, bytes, written);
        assert!(has(0x2000, 0x3000, true) && has(0x4fff, 1, true) && has(0x6000, 0x1000, false));
        for (address, bytes, written) in [(0x1800, 8, false), (0x4fff, 2, false), (0x5000, 8, false), (0x6000, 8, true), (0x7000, 8, false)]
        {
            assert!(!has(address, bytes, written), "{address:#x}");
        }
        assert!(!has(0x8000, 8, false) && !has(0x2fff, 0x3000, true) && !has(u64::MAX, 2, false) && !has(0, 8, false));
        let own = vec![1_u8; 100_000];
        assert!(PrivateRanges::look().has(own.as_ptr().expose_provenance() as u64, 100_000, true));
    }

    #[test]
    fn memory_that_is_not_there_is_an_error_and_the_rest_is_copied() {
        let page = 4096;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new mappings.
        let ordinary = unsafe { libc::mmap(std::ptr::null_mut(), 4 * page, access, kind, -1, 0) };
        assert_ne!(ordinary, libc::MAP_FAILED);
        // SAFETY: whole pages of the mapping just made.
        unsafe {
            ordinary.cast::<u8>().write_bytes(7, 4 * page);
            // Not unmapped: what another thread maps into the gap would be written instead.
            libc::mprotect(ordinary.byte_add(3 * page), page, libc::PROT_NONE);
        }
        let mut own = vec![0_u8; 4 * page];
        let (to, from) = (own.as_mut_ptr().expose_provenance() as u64, ordinary.expose_provenance() as u64);
        // SAFETY: the vector has the room.
        unsafe {
            assert_eq!(copy_ordinary(to, from, 3 * page, true), Ok(()));
            assert_eq!(
                copy_ordinary(to, from, 4 * page, true).map_err(|(at, code)| (at - from, code)),
                Err((3 * page as u64, libc::EFAULT))
            );
            assert_eq!(
                copy_ordinary(from, to, 4 * page, false).map_err(|(at, code)| (at - from, code)),
                Err((3 * page as u64, libc::EFAULT))
            );
        }
        assert!(own[..3 * page].iter().all(|byte| *byte == 7));
        // SAFETY: the whole mapping.
        unsafe { libc::munmap(ordinary, 4 * page) };
    }
}
