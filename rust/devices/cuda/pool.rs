//! Runs ready copies of the executions of many streams on a pool of threads.
//!
//! The copies that threads make in one execution are a *job*. A job consists of lanes, and each lane is a list of steps (copies) that run
//! in order. A step is ready when three conditions are met: the stream has reached the job's execution, the previous step of the lane is
//! done, and all other steps that it waits for are done. A thread takes any ready step and never waits for a step after that. Streams may
//! therefore wait for each other in any way, however few threads there are. Among the ready steps, threads prefer those of the oldest job,
//! so every job finishes eventually. The jobs of one stream are added in the order in which the stream reaches them, so only the first job
//! of each stream is examined.
//!
//! Executions may share byte ranges of the staging rings through which threads and streams pass data. One execution at a time may use a
//! shared range, from the time when its stream reaches the execution until the stream has passed it. This exclusive permission is called
//! the *grant*. While an execution has the grant, it waits only for its own steps, so other executions eventually get the range. If a
//! stream writes to a ring before any thread does, it waits for the grant of its execution. To avoid this wait when no other execution
//! needs the range, the pool gives the grant when the job is added. The pool revokes the grant if another job needs the range before the
//! stream reaches the execution. Revoking and arriving are ordered as in Dekker's algorithm: the stream publishes its arrival and then
//! reads the grant, and the pool revokes the grant and then checks for an arrival.
//!
//! A stream that sets a word in memory wakes no thread. While there are steps but none is ready, one thread therefore polls and the other
//! threads sleep. Between two polls, the polling thread pauses for a sixteenth of the time for which no step has been ready, but for at
//! least 15 us and at most 1 ms. A step therefore starts at most 6 % late. If a stream is busy for seconds, polling takes less than 1 % of
//! one CPU, whatever the number of threads.

use crate::backend::BackendError;
use crate::sync::{Condvar, Mutex, MutexGuard, held, lock, thread};
use crate::threads::without_signals;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
#[cfg(not(shuttle))]
use std::time::Duration;
use std::time::Instant;

/// Job of the copy threads: the copies that they make for one execution.
pub(super) trait PoolJob: Debug + Send + Sync + 'static {
    /// State that each thread of the pool keeps between two steps (copies).
    type Worker: Default;
    /// Returns the unique ID of the stream in which the job's execution was submitted. Returns `None` if the stream has no ID.
    fn stream(&self) -> Option<u64>;
    /// Returns the steps (copies) of each lane of the job. A lane is a list of steps that run in order.
    fn lanes(&self) -> &[Vec<u32>];
    /// Returns the byte ranges of staging rings of which the job has exclusive use while it runs.
    fn bytes(&self) -> &[Range<u64>];
    /// True if the job's stream waits until the job has exclusive use of its byte ranges.
    fn waits_for_grant(&self) -> bool;
    fn grant(&self);
    fn take_grant_back(&self);
    /// True once the job's stream has reached the execution to which the job belongs.
    fn has_begun(&self) -> bool;
    /// True once the job's stream has passed the execution to which the job belongs.
    fn is_over(&self) -> bool;
    /// True once all steps for which this step waits are done. Streams or threads may run these steps.
    fn is_ready(&self, step: u32) -> bool;
    /// Runs a step, and notifies the streams and threads that wait for it. Must be called once for each step.
    fn run(&self, step: u32, worker: &mut Self::Worker);
    /// Prepares later steps. A thread calls it after each step, when the next step of the lane may already run on another thread.
    fn prepare(&self);
}

/// Time for which a thread polls without pauses after a step (copy) was last ready.
#[cfg(not(shuttle))]
const SPIN: Duration = Duration::from_micros(10);
/// Minimum and maximum pause of a polling thread between two polls. For comparison, a copy of the largest chunk takes about 80 us.
#[cfg(not(shuttle))]
const PAUSES: [Duration; 2] = [Duration::from_micros(15), Duration::from_millis(1)];
/// Divisor that yields the polling thread's pause: the time for which no step has been ready is divided by this number.
#[cfg(not(shuttle))]
const PAUSE_PART: u32 = 16;

/// Pool of copy threads, with the jobs that have not finished. Threads start when a job needs them.
#[derive(Debug)]
pub(super) struct CopyPool<J: PoolJob>(Arc<Shared<J>>);

#[derive(Debug)]
struct Shared<J: PoolJob> {
    state: Mutex<PoolState<J>>,
    /// Condition variable on which idle copy threads sleep while another thread polls for ready copies.
    woken: Condvar,
    /// Condition variable on which the polling thread sleeps during a pause.
    looked: Condvar,
    /// Condition variable on which callers wait for the end of a job. It is notified after each poll.
    gone: Condvar,
}

#[derive(Debug)]
struct PoolState<J: PoolJob> {
    /// Unfinished jobs, oldest first.
    entries: VecDeque<JobEntry<J>>,
    threads: Vec<thread::JoinHandle<()>>,
    /// Number of steps (copies) of all jobs that no thread has started.
    untaken: usize,
    asleep: usize,
    /// Number of jobs whose steps are all done, but whose stream has not passed the job's execution yet.
    ending: usize,
    /// Number of threads that wait in [`CopyPool::wait`] for the end of a job.
    waiting: usize,
    /// True while one of the pool's threads polls for steps (copies) that have become ready.
    is_watched: bool,
    /// Time at which a step (copy) was last ready or a job was last added. The pause between two polls grows with the time since then.
    since: Instant,
    is_closed: bool,
}

#[derive(Debug)]
struct JobEntry<J: PoolJob> {
    job: Arc<J>,
    lanes: Box<[LaneState]>,
    /// Index of the lane (list of steps that run in order) that is examined first when the next step is chosen.
    cursor: usize,
    /// Number of steps (copies) of this job that no thread has started.
    untaken: usize,
    /// Number of steps (copies) of this job that are not done.
    left: usize,
    has_begun: bool,
    /// True if this job has exclusive use of its byte ranges, because it has begun or because the pool gave it the grant in advance.
    holds: bool,
    /// True if the pool contains no older job of the same stream.
    is_first: bool,
}

#[derive(Clone, Debug, Default)]
struct LaneState {
    next: usize,
    is_busy: bool,
}

/// Step (copy) that a thread has removed from a job in order to run it.
struct Taken<J: PoolJob> {
    job: Arc<J>,
    lane: usize,
    step: u32,
    /// True if no thread has run a step of the job before this one. Other steps may have become ready together with it.
    is_first: bool,
}

impl<J: PoolJob> Default for CopyPool<J> {
    fn default() -> Self {
        let state = PoolState {
            entries: VecDeque::new(),
            threads: Vec::new(),
            untaken: 0,
            asleep: 0,
            ending: 0,
            waiting: 0,
            is_watched: false,
            since: Instant::now(),
            is_closed: false,
        };
        CopyPool(Arc::new(Shared { state: Mutex::new(state), woken: Condvar::new(), looked: Condvar::new(), gone: Condvar::new() }))
    }
}

impl<J: PoolJob> CopyPool<J> {
    /// Adds a job. Starts threads until there are at least as many as the job has lanes (lists of steps). The jobs of one stream must be
    /// added in the stream's order. Returns an error if no thread could be started.
    pub fn give(&self, job: &Arc<J>) -> Result<(), BackendError> {
        let mut state = lock(&self.0.state);
        while state.threads.len() < job.lanes().len() {
            let shared = Arc::clone(&self.0);
            let named = thread::Builder::new().name(format!("mpgpu-copy-{}", state.threads.len()));
            match without_signals(|| named.spawn(move || shared.work())) {
                Ok(thread) => state.threads.push(thread),
                // With fewer threads, the pool works more slowly.
                Err(error) if !state.threads.is_empty() => {
                    log::warn!(
                        "{} threads copy pageable memory, because the system provides no more threads: {error}",
                        state.threads.len()
                    );
                    break;
                }
                Err(error) => {
                    let (reason, code) = (error.to_string(), i64::from(error.raw_os_error().unwrap_or(0)));
                    return Err(BackendError::Driver { what: "starting a thread that copies pageable memory".into(), reason, code });
                }
            }
        }
        state.add(job);
        let sleeper = if state.is_watched { &self.0.looked } else { &self.0.woken };
        sleeper.notify_one();
        Ok(())
    }

    /// Waits until a job has finished. The job's stream must have passed the job's execution.
    pub fn wait(&self, job: &Arc<J>) {
        let mut state = lock(&self.0.state);
        state.waiting += 1;
        while state.find(job).is_some() {
            self.0.woken.notify_one();
            self.0.looked.notify_one();
            state = held(self.0.gone.wait(state));
        }
        state.waiting -= 1;
    }

    /// Ends the threads of the pool. Copies that no thread has started are not made.
    pub fn close(&self) {
        let threads = {
            let mut state = lock(&self.0.state);
            state.is_closed = true;
            std::mem::take(&mut state.threads)
        };
        self.0.woken.notify_all();
        self.0.looked.notify_all();
        threads.into_iter().for_each(|thread| drop(thread.join()));
        lock(&self.0.state).entries.clear();
    }
}

fn overlap(a: &[Range<u64>], b: &[Range<u64>]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.start < b.end && b.start < a.end))
}

impl<J: PoolJob> PoolState<J> {
    fn add(&mut self, job: &Arc<J>) {
        let untaken = job.lanes().iter().map(Vec::len).sum();
        let is_same = |entry: &JobEntry<J>| job.stream().is_some() && entry.job.stream() == job.stream();
        let is_first = !self.entries.iter().any(is_same);
        // Earlier jobs of the same stream have released the ranges when the stream reaches this job. Jobs of other streams may need the
        // ranges before that.
        let holds = job.waits_for_grant() && !self.entries.iter().any(|entry| !is_same(entry) && overlap(entry.job.bytes(), job.bytes()));
        if holds {
            job.grant();
        }
        let lanes = vec![LaneState::default(); job.lanes().len()].into();
        let job = Arc::clone(job);
        self.entries.push_back(JobEntry { job, lanes, cursor: 0, untaken, left: untaken, has_begun: false, holds, is_first });
        self.untaken += untaken;
        self.since = Instant::now();
    }

    fn find(&self, job: &Arc<J>) -> Option<usize> {
        self.entries.iter().position(|entry| Arc::ptr_eq(&entry.job, job))
    }

    /// Removes and returns a ready step. If several jobs have ready steps, the step belongs to the oldest of these jobs. Returns `None` if
    /// no step is ready.
    fn take(&mut self) -> Option<Taken<J>> {
        self.remove_ended();
        // Byte ranges for which older jobs wait.
        let mut wanted: SmallVec<[Range<u64>; 4]> = SmallVec::new();
        for at in 0..self.entries.len() {
            let entry = &self.entries[at];
            if !entry.is_first || entry.untaken == 0 {
                continue;
            }
            let begins = !entry.has_begun;
            if begins {
                if !entry.job.has_begun() {
                    continue;
                }
                if !self.hold(at, &wanted) {
                    wanted.extend(self.entries[at].job.bytes().iter().cloned());
                    continue;
                }
                self.entries[at].has_begun = true;
            }
            if let Some(taken) = self.entries[at].take(begins) {
                self.untaken -= 1;
                self.since = Instant::now();
                return Some(taken);
            }
        }
        None
    }

    /// Tries to give exclusive use of its byte ranges to the job with the index `at`, whose stream has reached it. Returns true if the job
    /// has the ranges. Returns false if another job that has begun uses one of these ranges, or if an older job waits for one. `wanted`
    /// contains the ranges for which older jobs wait.
    fn hold(&mut self, at: usize, wanted: &[Range<u64>]) -> bool {
        if self.entries[at].holds {
            return true;
        }
        let job = Arc::clone(&self.entries[at].job);
        if overlap(wanted, job.bytes()) {
            return false;
        }
        for other in self.entries.iter_mut().filter(|other| other.holds && overlap(other.job.bytes(), job.bytes())) {
            if other.has_begun {
                return false;
            }
            other.job.take_grant_back();
            if other.job.has_begun() {
                // The other stream may already be waiting for the grant, or may have seen it.
                other.job.grant();
                return false;
            }
            other.holds = false;
        }
        self.entries[at].holds = true;
        if job.waits_for_grant() {
            job.grant();
        }
        true
    }

    /// Records that a step (copy) is done. The next step of its lane (list of steps) may then become ready.
    fn finish(&mut self, taken: &Taken<J>) {
        let Some(at) = self.find(&taken.job) else { return };
        let entry = &mut self.entries[at];
        entry.lanes[taken.lane].is_busy = false;
        entry.left -= 1;
        self.ending += usize::from(entry.left == 0);
    }

    /// Removes each job whose steps are all done and whose stream has passed the job's execution.
    fn remove_ended(&mut self) {
        let mut at = 0;
        while self.ending > 0 && at < self.entries.len() {
            let entry = &self.entries[at];
            if entry.left == 0 && entry.job.is_over() {
                self.remove(at);
                self.ending -= 1;
            } else {
                at += 1;
            }
        }
    }

    /// Removes the job at index `at`. If its stream has another job, that job becomes the stream's first.
    fn remove(&mut self, at: usize) {
        let Some(JobEntry { job, .. }) = self.entries.remove(at) else { return };
        if job.stream().is_some()
            && let Some(next) = self.entries.iter_mut().find(|entry| entry.job.stream() == job.stream())
        {
            next.is_first = true;
        }
    }
}

impl<J: PoolJob> JobEntry<J> {
    fn take(&mut self, is_first: bool) -> Option<Taken<J>> {
        let count = self.lanes.len();
        let next = |lane: usize| {
            let state = &self.lanes[lane];
            let step = *self.job.lanes()[lane].get(state.next).filter(|_| !state.is_busy)?;
            self.job.is_ready(step).then_some((lane, step))
        };
        let (lane, step) = (0..count).map(|at| (self.cursor + at) % count).find_map(next)?;
        self.lanes[lane] = LaneState { next: self.lanes[lane].next + 1, is_busy: true };
        self.cursor = (lane + 1) % count;
        self.untaken -= 1;
        Some(Taken { job: Arc::clone(&self.job), lane, step, is_first })
    }
}

impl<J: PoolJob> Shared<J> {
    /// Runs steps (copies) on the calling thread until the pool is closed.
    fn work(&self) {
        // The default timer slack of a thread would make pauses 50 us longer.
        // SAFETY: The call sets an option of this thread, and its argument is a number of nanoseconds.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64) };
        let mut worker = J::Worker::default();
        while let Some(taken) = self.next() {
            taken.job.run(taken.step, &mut worker);
            lock(&self.state).finish(&taken);
            taken.job.prepare();
        }
    }

    /// Waits until a step is ready and returns the step. Returns `None` once the pool is closed.
    fn next(&self) -> Option<Taken<J>> {
        let mut state = lock(&self.state);
        loop {
            if state.is_closed {
                return None;
            }
            let taken = state.take();
            if state.waiting > 0 {
                self.gone.notify_all();
            }
            if let Some(taken) = taken {
                // Another thread must look for the other steps. Each thread that finds a step therefore wakes the next thread.
                if state.asleep > 0 && state.untaken > 0 {
                    if taken.is_first {
                        self.woken.notify_all();
                    } else if !state.is_watched {
                        self.woken.notify_one();
                    }
                }
                return Some(taken);
            }
            if state.is_watched || state.untaken == 0 {
                state.asleep += 1;
                state = held(self.woken.wait(state));
                state.asleep -= 1;
            } else {
                state.is_watched = true;
                state = self.pause(state);
                state.is_watched = false;
            }
        }
    }

    /// Releases the lock and pauses. Adding a job ends the pause. Returns with the lock acquired again.
    #[cfg(not(shuttle))]
    fn pause<'a>(&'a self, state: MutexGuard<'a, PoolState<J>>) -> MutexGuard<'a, PoolState<J>> {
        let idle = state.since.elapsed();
        if idle < SPIN {
            drop(state);
            (0..32).for_each(|_| std::hint::spin_loop());
            return lock(&self.state);
        }
        let pause = (idle / PAUSE_PART).clamp(PAUSES[0], PAUSES[1]);
        held(self.looked.wait_timeout(state, pause)).0
    }

    /// Yields to other threads instead of pausing, because time does not pass under the model checker. Returns with the lock acquired
    /// again.
    #[cfg(shuttle)]
    fn pause<'a>(&'a self, state: MutexGuard<'a, PoolState<J>>) -> MutexGuard<'a, PoolState<J>> {
        drop(state);
        thread::yield_now();
        lock(&self.state)
    }
}
