//! Tests the pool of copy threads under the model checker `shuttle`. For every schedule, four properties are checked: streams that wait for
//! each other's copies continue, every step runs once and in order, a slot belongs to one job at a time, and no wake-up is lost.
//!
//! ```text
//! RUSTFLAGS="--cfg shuttle" cargo test --lib --target-dir target/shuttle shuttle_
//! ```

use super::pool::{CopyPool, PoolJob};
use crate::sync::{AtomicBool, AtomicU32, Ordering};
use shuttle::thread;
use std::ops::Range;
use std::sync::Arc;

const SCHEDULES: usize = 1500;
const SLOTS: u32 = 2;
const COPIES: u32 = 4;

/// Runs a test under random schedules only, because schedules of the PCT algorithm let a polling thread starve the others.
fn check(test: fn()) {
    shuttle::check_random(test, SCHEDULES);
}

fn until(is_set: impl Fn() -> bool) {
    while !is_set() {
        thread::yield_now();
    }
}

/// Job of a test, which copies data through two slots. Either threads copy into the slots and a stream copies out of them, or the reverse.
#[derive(Debug)]
struct Copies {
    stream: u64,
    lanes: Vec<Vec<u32>>,
    /// True if the stream writes the slots and threads read them. False if threads write the slots and the stream reads them.
    is_written: bool,
    has_begun: AtomicBool,
    is_granted: AtomicBool,
    is_over: AtomicBool,
    by_threads: Vec<AtomicBool>,
    by_stream: Vec<AtomicBool>,
    runs: AtomicU32,
    /// Number that identifies the job that currently uses the slots. All jobs of a test share the slots.
    owner: Arc<AtomicU32>,
    number: u32,
}

impl Copies {
    /// Creates a job with the number `number` in the stream `stream`. The job's copies are distributed among `lanes` lists.
    fn new(number: u32, stream: u64, lanes: u32, is_written: bool, owner: &Arc<AtomicU32>) -> Arc<Copies> {
        let flags = || (0..COPIES).map(|_| AtomicBool::new(false)).collect();
        let flag = || AtomicBool::new(false);
        Arc::new(Copies {
            stream,
            lanes: (0..lanes).map(|lane| (lane..COPIES).step_by(lanes as usize).collect()).collect(),
            is_written,
            has_begun: flag(),
            is_granted: flag(),
            is_over: flag(),
            by_threads: flags(),
            by_stream: flags(),
            runs: AtomicU32::new(0),
            owner: Arc::clone(owner),
            number,
        })
    }

    /// Asserts that no other job uses the slots, and marks them as used by this job.
    fn touch(&self) {
        let before = self.owner.swap(self.number, Ordering::SeqCst);
        assert!(before == 0 || before == self.number, "{} while the slots are used by {before}", self.number);
    }

    /// Executes the operations of this job that its stream makes.
    fn pass(&self) {
        self.has_begun.store(true, Ordering::SeqCst);
        if self.is_written {
            until(|| self.is_granted.load(Ordering::SeqCst));
        }
        for copy in 0..COPIES as usize {
            match (self.is_written, copy.checked_sub(SLOTS as usize)) {
                (true, Some(before)) => until(|| self.by_threads[before].load(Ordering::SeqCst)),
                (true, None) => {}
                (false, _) => until(|| self.by_threads[copy].load(Ordering::SeqCst)),
            }
            self.touch();
            self.by_stream[copy].store(true, Ordering::SeqCst);
        }
        self.by_threads.iter().for_each(|done| until(|| done.load(Ordering::SeqCst)));
        self.owner.store(0, Ordering::SeqCst);
        self.is_over.store(true, Ordering::SeqCst);
    }
}

impl PoolJob for Copies {
    type Worker = ();
    fn stream(&self) -> Option<u64> {
        Some(self.stream)
    }
    fn lanes(&self) -> &[Vec<u32>] {
        &self.lanes
    }
    fn bytes(&self) -> &[Range<u64>] {
        const ALL: &[Range<u64>] = &[0..100];
        ALL
    }
    fn waits_for_grant(&self) -> bool {
        self.is_written
    }
    fn grant(&self) {
        self.is_granted.store(true, Ordering::SeqCst);
    }
    fn take_grant_back(&self) {
        self.is_granted.store(false, Ordering::SeqCst);
    }
    fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::SeqCst)
    }
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }
    fn is_ready(&self, step: u32) -> bool {
        let step = if self.is_written { Some(step) } else { step.checked_sub(SLOTS) };
        step.is_none_or(|before| self.by_stream[before as usize].load(Ordering::SeqCst))
    }
    fn run(&self, step: u32, (): &mut ()) {
        assert!(self.has_begun() && self.is_ready(step));
        self.touch();
        thread::yield_now();
        // The count is incremented before the stream can see that the copy is done.
        self.runs.fetch_add(1, Ordering::SeqCst);
        assert!(!self.by_threads[step as usize].swap(true, Ordering::SeqCst), "a step ran twice");
    }
    fn prepare(&self) {}
}

fn below(n: u32) -> u32 {
    shuttle::rand::Rng::gen_range(&mut shuttle::rand::thread_rng(), 0..n)
}

/// Tests streams that wait for each other. The first stream waits for work behind the copies of the second stream, although its own copies
/// were submitted first. All jobs share their slots.
fn streams_that_wait_for_each_other() {
    let (pool, owner) = (Arc::new(CopyPool::default()), Arc::default());
    let lanes = 1 + below(2);
    let [first, second, other, last] =
        [(1, 0), (2, 0), (3, 1), (4, 1)].map(|(number, stream)| Copies::new(number, stream, lanes, below(2) == 0, &owner));
    let jobs = [&first, &other, &second, &last].map(Arc::clone);
    jobs[..3].iter().for_each(|job| pool.give(job).expect("threads"));
    let open = Arc::new(AtomicBool::new(false));
    let opened = Arc::clone(&open);
    let streams = [
        thread::spawn(move || {
            until(|| opened.load(Ordering::SeqCst));
            first.pass();
            second.pass();
        }),
        thread::spawn({
            let pool = Arc::clone(&pool);
            move || {
                other.pass();
                open.store(true, Ordering::SeqCst);
                pool.give(&last).expect("threads");
                last.pass();
            }
        }),
    ];
    streams.into_iter().for_each(|stream| stream.join().expect("no assertion failed"));
    jobs.iter().for_each(|job| pool.wait(job));
    pool.close();
    jobs.iter().for_each(|job| assert_eq!(job.runs.load(Ordering::SeqCst), COPIES));
}

#[test]
fn shuttle_streams_that_wait_for_each_others_copies_go_on() {
    check(streams_that_wait_for_each_other);
}
