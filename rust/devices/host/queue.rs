//! Queues ready steps for the threads that run them.

use super::node::{Node, Ready, Work};
use crate::backend::BackendError;
#[cfg(not(shuttle))]
use crate::ipc::signal::rest;
use crate::sync::{Condvar, Mutex, held, lock, thread};
use crate::threads::without_signals;
use std::collections::VecDeque;
use std::sync::Arc;

/// Yields to other threads, because time does not pass under the model checker.
#[cfg(shuttle)]
fn rest(_: u32) {
    thread::yield_now();
}

/// Maximum number of steps that a thread runs back to back without going through the queue. Each of them is made ready by the step before.
/// This saves the queue's lock and a wake-up for every step of a chain. The bound prevents a chain that a caller extends without end from
/// starving other streams.
///
/// Under the model checker, the bound is lower, so that its short chains exceed the bound.
const STEPS_IN_A_ROW: u32 = if cfg!(shuttle) { 2 } else { 64 };

/// Step of a node whose predecessors have all finished.
#[derive(Debug)]
pub(super) struct Step<W: Work> {
    pub(super) node: Arc<Node<W>>,
    pub(super) index: u32,
}

/// First-in, first-out queue of ready steps, served by a limited number of threads. Threads start as work arrives.
///
/// No step waits for another step. Steps of a queue therefore cannot block each other, whatever the number of threads.
#[derive(Debug)]
pub(super) struct Queue<W: Work> {
    name: String,
    limit: usize,
    /// True if the queue's thread polls each step until the step may run ([`Work::may_run`]).
    watches: bool,
    state: Mutex<State<W>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<W: Work> {
    ready: VecDeque<Step<W>>,
    /// Number of threads that wait for a step, including threads that were woken and do not run yet.
    idle: usize,
    threads: Vec<thread::JoinHandle<()>>,
    closed: bool,
}

impl<W: Work> Queue<W> {
    /// Creates a queue without threads. `limit` is 1 or more.
    pub(super) fn new(name: impl Into<String>, limit: usize) -> Arc<Self> {
        Self::with(name, limit, false)
    }

    /// Creates a queue whose only thread polls all steps and runs each one as soon as [`Work::may_run`] returns true. Such a queue runs
    /// steps that wait for other processes.
    pub(super) fn watching(name: impl Into<String>) -> Arc<Self> {
        Self::with(name, 1, true)
    }

    fn with(name: impl Into<String>, limit: usize, watches: bool) -> Arc<Self> {
        let state = State { ready: VecDeque::new(), idle: 0, threads: Vec::new(), closed: false };
        Arc::new(Queue { name: name.into(), limit, watches, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Starts the first thread. Must be called before the first node of this queue is enqueued: a failure to start a thread when a step
    /// becomes ready could not be reported to a caller.
    pub(super) fn start(self: &Arc<Self>) -> Result<(), BackendError> {
        let mut state = lock(&self.state);
        if state.threads.is_empty() { self.spawn(&mut state) } else { Ok(()) }
    }

    fn spawn(self: &Arc<Self>, state: &mut State<W>) -> Result<(), BackendError> {
        let queue = Arc::clone(self);
        let named = thread::Builder::new().name(self.name.clone());
        let thread = without_signals(|| named.spawn(move || queue.serve())).map_err(|e| BackendError::Driver {
            what: format!("starting thread `{}` of the host backend", self.name),
            reason: e.to_string(),
            code: i64::from(e.raw_os_error().unwrap_or(0)),
        })?;
        state.threads.push(thread);
        // The thread counts as waiting from here on, as if it had been woken, so each ready step starts at most one thread.
        state.idle += 1;
        Ok(())
    }

    /// Appends `steps`. Iterating over them must not lock this queue.
    pub(super) fn push(self: &Arc<Self>, steps: impl IntoIterator<Item = Step<W>>) {
        let mut steps = steps.into_iter().peekable();
        if steps.peek().is_none() {
            return;
        }
        let mut state = lock(&self.state);
        for step in steps {
            state.ready.push_back(step);
            self.changed.notify_one();
        }
        while state.ready.len() > state.idle && state.threads.len() < self.limit {
            if let Err(error) = self.spawn(&mut state) {
                // `start` has ensured that at least one thread runs, and the running threads will execute the steps.
                log::warn!("{error}; continuing with {} threads", state.threads.len());
                break;
            }
        }
    }

    /// Runs ready steps on a thread of this queue until the queue is closed and empty.
    fn serve(self: Arc<Self>) {
        lock(&self.state).idle -= 1;
        if self.watches {
            return self.watch();
        }
        while let Some(first) = self.next() {
            let mut current = Some(first);
            let mut left = STEPS_IN_A_ROW;
            while let Some(step) = current.take() {
                left -= 1;
                let mut ready = if left > 0 { Ready::keeping_one_of(&self) } else { Ready::keeping_none() };
                step.node.run(step.index, &mut ready);
                current = ready.kept();
            }
        }
    }

    /// Polls the steps of a watching queue on its thread, and runs them, until the queue is closed and empty.
    fn watch(&self) {
        let mut watched: Vec<Step<W>> = Vec::new();
        let mut looks = 0;
        loop {
            if watched.is_empty() {
                let Some(step) = self.next() else { return };
                watched.push(step);
                looks = 0;
            }
            watched.extend(lock(&self.state).ready.drain(..));
            let free: Vec<Step<W>> = watched.extract_if(.., |step| step.node.may_run(step.index)).collect();
            if free.is_empty() {
                rest(looks);
                looks = looks.saturating_add(1);
            } else {
                looks = 0;
            }
            for step in free {
                step.node.run(step.index, &mut Ready::keeping_none());
            }
        }
    }

    /// Blocks until a step is ready, and returns it. Returns `None` once the queue is closed and empty.
    fn next(&self) -> Option<Step<W>> {
        let mut state = lock(&self.state);
        loop {
            if let Some(step) = state.ready.pop_front() {
                return Some(step);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            state = held(self.changed.wait(state));
            state.idle -= 1;
        }
    }

    /// Closes the queue, and waits until its threads have run all steps and ended. No step may be pushed afterwards.
    pub(super) fn join(&self) {
        let threads = {
            let mut state = lock(&self.state);
            state.closed = true;
            self.changed.notify_all();
            std::mem::take(&mut state.threads)
        };
        for thread in threads {
            if thread.join().is_err() {
                log::error!("a thread of the host backend panicked outside of any work; please report this");
            }
        }
    }
}
