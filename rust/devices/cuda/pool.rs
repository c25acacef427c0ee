//! Threads that run whatever is ready, for executions in many streams.
//!
//! The part that threads have in an execution is a job: lanes of steps, each lane in its order. A thread takes any step that is ready: the stream
//! has reached the job, the step before on the lane is done, and so is all else that the step waits for. A thread never waits for a step that it
//! has taken, so streams may wait for each other in any way, however few threads there are. Of several ready steps the oldest job's goes first, so
//! no job is overtaken for ever.
//!
//! Jobs of one stream are given in the order in which the stream reaches them, so only the first of each stream is looked at.
//!
//! Executions may share the bytes of the rings that threads and streams pass through. One at a time holds them, from the moment at which its stream
//! has reached it until the stream is past it: then nothing that it does waits for anything but itself, and whoever wants the bytes gets them. A
//! stream that would write to a ring before any thread waits for the bytes to be granted. So that it need not wait where nobody else wants them, they
//! are granted when the job is given, and taken back if another job needs them before the stream has come. Taking back and coming are ordered as in
//! Dekker's algorithm: the stream says that it has come and then looks at the grant, the pool takes the grant back and then looks whether the stream
//! has come.
//!
//! A stream wakes nobody when it sets a word. While steps are left and none is ready, one thread looks again and again, and the others sleep. It
//! pauses for a sixteenth of the time for which nothing has been ready, 15 us to 1 ms: a step starts at most 6 % later than it might, and behind a
//! stream that is busy for seconds looking takes less than 1 % of one CPU, whatever the number of threads.

use crate::backend::BackendError;
use crate::sync::{Condvar, Mutex, MutexGuard, held, lock, thread};
use crate::threads::without_signals;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The part of threads in one execution.
pub(super) trait PoolJob: Debug + Send + Sync + 'static {
    /// State of each thread.
    type Worker: Default;
    /// The stream that reaches it, by a number that no other stream has. `None` if there is no such number.
    fn stream(&self) -> Option<u64>;
    /// Steps of each lane, in order.
    fn lanes(&self) -> &[Vec<u32>];
    /// Ranges of bytes that it holds while it runs.
    fn bytes(&self) -> &[Range<u64>];
    /// True if its stream waits until these are granted.
    fn waits_for_grant(&self) -> bool;
    fn grant(&self);
    fn take_grant_back(&self);
    /// True once the stream has reached the job.
    fn has_begun(&self) -> bool;
    /// True once the stream is past it.
    fn is_over(&self) -> bool;
    /// True once all is done that a step waits for on other lanes and in streams.
    fn is_ready(&self, step: u32) -> bool;
    /// Runs a step, and notifies those that wait for it. Called once for each.
    fn run(&self, step: u32, worker: &mut Self::Worker);
}

/// Time for which a thread looks without a pause.
const SPIN: Duration = Duration::from_micros(10);
/// Bounds of a pause between two looks. A copy of the largest chunk takes some 80 us.
const PAUSES: [Duration; 2] = [Duration::from_micros(15), Duration::from_millis(1)];
/// The part of the time without a ready step that a pause takes.
const PAUSE_PART: u32 = 16;

/// Threads, which are started as jobs ask for them, and the jobs that are not done.
#[derive(Debug)]
pub(super) struct CopyPool<J: PoolJob>(Arc<Shared<J>>);

#[derive(Debug)]
struct Shared<J: PoolJob> {
    state: Mutex<PoolState<J>>,
    /// Notified for threads that sleep, for the one that looks, and, after each look, for those that wait until a job is gone.
    woken: Condvar,
    looked: Condvar,
    gone: Condvar,
}

#[derive(Debug)]
struct PoolState<J: PoolJob> {
    /// By age.
    entries: VecDeque<JobEntry<J>>,
    threads: Vec<thread::JoinHandle<()>>,
    /// Steps that nobody has taken.
    untaken: usize,
    asleep: usize,
    /// Jobs whose steps are done and whose stream is not past them.
    ending: usize,
    /// Threads that wait until a job is gone.
    waiting: usize,
    /// True while a thread looks again and again.
    is_watched: bool,
    /// When a step was last ready, or a job given.
    since: Instant,
    is_closed: bool,
}

#[derive(Debug)]
struct JobEntry<J: PoolJob> {
    job: Arc<J>,
    lanes: Box<[LaneState]>,
    /// The lane that is looked at first.
    cursor: usize,
    /// Steps that nobody has taken, and that are not done.
    untaken: usize,
    left: usize,
    has_begun: bool,
    /// True if the bytes are its own: it has begun, or they were granted before that.
    holds: bool,
    /// True if no older job of its stream is left.
    is_first: bool,
}

#[derive(Clone, Debug, Default)]
struct LaneState {
    next: usize,
    is_busy: bool,
}

/// A step that a thread has taken.
struct Taken<J: PoolJob> {
    job: Arc<J>,
    lane: usize,
    step: u32,
    /// True for the first of a job: others may be ready with it.
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
    /// Adds a job, and starts threads until there are as many as it has lanes. Jobs of one stream are given in the stream's order. An error if there
    /// is no thread.
    pub fn give(&self, job: &Arc<J>) -> Result<(), BackendError> {
        let mut state = lock(&self.0.state);
        while state.threads.len() < job.lanes().len() {
            let shared = Arc::clone(&self.0);
            let named = thread::Builder::new().name(format!("mpgpu-copy-{}", state.threads.len()));
            match without_signals(|| named.spawn(move || shared.work())) {
                Ok(thread) => state.threads.push(thread),
                // Fewer are slower.
                Err(error) if !state.threads.is_empty() => {
                    log::warn!("{} threads copy pageable memory, because the system gives no more: {error}", state.threads.len());
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

    /// Waits until all is done of a job whose stream is past it.
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

    /// Ends the threads. What none has taken is left undone.
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
        // Jobs before it in its own stream have done with the bytes when the stream comes. Others may want them before.
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

    /// A step that is ready, the oldest job's of several.
    fn take(&mut self) -> Option<Taken<J>> {
        self.remove_ended();
        // Bytes of older jobs that wait for them.
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

    /// Gives a job that its stream has reached its bytes, unless another that has begun has them, or an older one wants them.
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
                // Its stream may have come to wait for the grant, or passed it.
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

    /// Notes that a step is done.
    fn finish(&mut self, taken: &Taken<J>) {
        let Some(at) = self.find(&taken.job) else { return };
        let entry = &mut self.entries[at];
        entry.lanes[taken.lane].is_busy = false;
        entry.left -= 1;
        self.ending += usize::from(entry.left == 0);
    }

    /// Forgets jobs that are done and that their streams are past.
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

    /// The stream's next job is its first from now on.
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
    /// Runs steps until the pool is closed.
    fn work(&self) {
        // A pause is as long as it is meant to be, and not 50 us longer.
        // SAFETY: an option of this thread that takes a number of nanoseconds.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000_u64) };
        let mut worker = J::Worker::default();
        while let Some(taken) = self.next() {
            taken.job.run(taken.step, &mut worker);
            lock(&self.state).finish(&taken);
        }
    }

    /// Waits for a step that is ready. `None` once the pool is closed.
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
                // Somebody looks for the rest. Each that finds a step wakes the next.
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

    /// Lets some time pass, at most until a job is given.
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

    /// Lets the others run: a model has no time.
    #[cfg(shuttle)]
    fn pause<'a>(&'a self, state: MutexGuard<'a, PoolState<J>>) -> MutexGuard<'a, PoolState<J>> {
        drop(state);
        thread::yield_now();
        lock(&self.state)
    }
}
