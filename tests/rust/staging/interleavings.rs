//! Tests interleavings of threads with a model checker (shuttle). Threads execute plans whose staging regions overlap. Two executions must
//! never use the same bytes at the same time, and threads must never wait for each other in a cycle.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test --lib shuttle_`

use super::*;
use crate::backend::CompletionState;
use shuttle::sync::atomic::{AtomicBool, Ordering};
use shuttle::sync::{Condvar, Mutex as ModelMutex};
use shuttle::{rand::Rng, thread};
use std::any::Any;

/// Execution that ends when its thread reports it.
#[derive(Debug)]
struct Run {
    done: ModelMutex<bool>,
    ended: Condvar,
}

impl CompletionState for Run {
    fn is_done(&self) -> Result<bool, BackendError> {
        Ok(*lock(&self.done))
    }
    fn wait(&self) -> Result<(), BackendError> {
        let mut done = lock(&self.done);
        while !*done {
            done = self.ended.wait(done).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

const BYTES: u64 = 6;

/// Simulates a backend. Each execution is a thread that waits for the executions that it must follow, and then uses its bytes for a while.
fn enqueue(staging: &Staging, regions: &Arc<Regions>, bytes: &Arc<[AtomicBool]>) -> (Completion, thread::JoinHandle<()>) {
    let mut thread = None;
    let completion = staging.in_turn(regions, |after| {
        let run = Arc::new(Run { done: ModelMutex::new(false), ended: Condvar::new() });
        let (mine, after, bytes, regions) = (run.clone(), after.to_vec(), bytes.clone(), regions.clone());
        thread = Some(thread::spawn(move || {
            after.iter().for_each(|earlier| drop(earlier.wait()));
            let used = || regions.iter().flat_map(|r| r.start..r.end).map(|at| &bytes[at as usize]);
            for byte in used() {
                assert!(!byte.swap(true, Ordering::SeqCst), "two executions use the same staging byte at once");
            }
            thread::yield_now();
            used().for_each(|byte| byte.store(false, Ordering::SeqCst));
            *lock(&mine.done) = true;
            mine.ended.notify_all();
        }));
        Ok::<Completion, ()>(run)
    });
    (completion.expect("the double never fails"), thread.expect("enqueue has run"))
}

fn regions() -> Arc<Regions> {
    let mut random = shuttle::rand::thread_rng();
    let start = random.gen_range(0..BYTES / 2);
    let first = Region { start, end: random.gen_range(start + 1..=BYTES / 2) };
    let second = Region { start: random.gen_range(BYTES / 2..BYTES), end: BYTES };
    Arc::new(Regions::new(if random.gen_bool(0.5) { vec![first] } else { vec![first, second] }))
}

fn threads_with_overlapping_plans() {
    let staging = Arc::new(Staging::new(BYTES));
    let bytes: Arc<[AtomicBool]> = (0..BYTES).map(|_| AtomicBool::new(false)).collect();
    // There are fewer plans than executions. So some plans are executed twice, by one thread or two, with or without another execution in
    // between.
    let plans = [regions(), regions(), regions()];
    let callers: Vec<_> = (0..3)
        .map(|_| {
            let (staging, bytes, plans) = (staging.clone(), bytes.clone(), plans.clone());
            thread::spawn(move || {
                let plan = || &plans[shuttle::rand::thread_rng().gen_range(0..plans.len())];
                let runs: Vec<_> = (0..2).map(|_| enqueue(&staging, plan(), &bytes)).collect();
                for (completion, thread) in runs {
                    completion.wait().expect("the double never fails");
                    assert!(completion.is_done().expect("the double never fails"));
                    thread.join().expect("no assertion failed");
                }
            })
        })
        .collect();
    callers.into_iter().for_each(|caller| caller.join().expect("no assertion failed"));
}

#[test]
fn shuttle_random_schedules_keep_executions_apart() {
    shuttle::check_random(threads_with_overlapping_plans, 3000);
}

#[test]
fn shuttle_schedules_with_few_preemptions_keep_executions_apart() {
    shuttle::check_pct(threads_with_overlapping_plans, 3000, 3);
}
