//! Implements queues of steps that are ready to run, with the threads that run the steps.

use super::node::{Node, Ready, Work};
use crate::backend::BackendError;
#[cfg(not(shuttle))]
use crate::ipc::signal::rest;
use crate::sync::{Condvar, Mutex, held, lock, thread};
use crate::threads::without_signals;
use std::collections::VecDeque;
use std::sync::Arc;

/// Yields to other threads instead of pausing, because time does not pass under the model checker.
#[cfg(shuttle)]
fn rest(_: u32) {
    thread::yield_now();
}

/// Maximum number of steps that a thread runs back to back without putting them into the queue. Each of these steps is made ready by the
/// step before it. Not using the queue saves an acquisition of its lock and a wake-up for every step of a chain. Without a maximum, a chain
/// to which a caller keeps appending would starve other streams.
///
/// Under the model checker, the maximum is lower, so that the short chains of the tests exceed it.
const STEPS_IN_A_ROW: u32 = if cfg!(shuttle) { 2 } else { 64 };

/// Step of a graph node that is ready to run: all of its predecessors have finished.
#[derive(Debug)]
pub(super) struct Step<W: Work> {
    pub(super) node: Arc<Node<W>>,
    pub(super) index: u32,
}

/// First-in, first-out queue of steps that are ready to run. A limited number of threads serve the queue. They start when work arrives.
///
/// No step waits for another step. Steps of a queue therefore cannot block each other, whatever the number of threads.
#[derive(Debug)]
pub(super) struct Queue<W: Work> {
    name: String,
    limit: usize,
    /// True if this is a polling queue. Its only thread calls [`Work::may_run`] for each step until the step may run.
    watches: bool,
    state: Mutex<State<W>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<W: Work> {
    ready: VecDeque<Step<W>>,
    /// Number of threads that wait for a step. It includes threads that were woken and are not running yet.
    idle: usize,
    threads: Vec<thread::JoinHandle<()>>,
    closed: bool,
}

impl<W: Work> Queue<W> {
    /// Creates a queue that has no threads yet. `limit` is the maximum number of threads, 1 or more.
    pub(super) fn new(name: impl Into<String>, limit: usize) -> Arc<Self> {
        Self::with(name, limit, false)
    }

    /// Creates a polling queue. Its only thread polls all steps and runs each step as soon as [`Work::may_run`] returns true. Such a queue
    /// runs steps that wait for other processes.
    pub(super) fn watching(name: impl Into<String>) -> Arc<Self> {
        Self::with(name, 1, true)
    }

    fn with(name: impl Into<String>, limit: usize, watches: bool) -> Arc<Self> {
        let state = State { ready: VecDeque::new(), idle: 0, threads: Vec::new(), closed: false };
        Arc::new(Queue { name: name.into(), limit, watches, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Starts the queue's first thread if the queue has none. Must be called before the first node of this queue is enqueued. Later, when a
    /// step becomes ready, a failure to start a thread could not be reported to any caller.
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
        // The new thread counts as a waiting thread from now on, as if it had been woken. Each ready step therefore starts at most one
        // thread.
        state.idle += 1;
        Ok(())
    }

    /// Appends `steps` to the queue and starts threads for them if necessary. The iterator must not lock this queue.
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
                // `start` has ensured that at least one thread runs. The running threads will execute the steps.
                log::warn!("{error}; continuing with {} threads", state.threads.len());
                break;
            }
        }
    }

    /// Runs ready steps on the calling thread, which belongs to this queue. Returns once the queue is closed and empty.
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

    /// Polls the steps of a polling queue on the calling thread, and runs those that may run. Returns once the queue is closed and empty.
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

    /// Blocks until a step is ready, and returns the step. Returns `None` once the queue is closed and empty.
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

    /// Closes the queue, and waits until its threads have run all steps and have ended. No step may be pushed after this call.
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
