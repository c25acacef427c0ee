//! Ready steps and the threads that run them.

use super::node::{Node, Ready, Work};
use crate::backend::BackendError;
#[cfg(not(shuttle))]
use crate::ipc::signal::rest;
use crate::sync::{Condvar, Mutex, held, lock, thread};
use crate::threads::without_signals;
use std::collections::VecDeque;
use std::sync::Arc;

/// Lets the others run: a model has no time to rest.
#[cfg(shuttle)]
fn rest(_: u32) {
    thread::yield_now();
}

/// Steps that a thread runs one after the other without going through the queue, where each makes the next one ready. It saves
/// the queue's lock and a wake-up for every link of a chain. The bound keeps a chain that a caller extends for ever from
/// starving other streams.
///
/// The model checker gets a bound that its short chains exceed.
const STEPS_IN_A_ROW: u32 = if cfg!(shuttle) { 2 } else { 64 };

/// One step of a node whose predecessors have all finished.
#[derive(Debug)]
pub(super) struct Step<W: Work> {
    pub(super) node: Arc<Node<W>>,
    pub(super) index: u32,
}

/// A first-in, first-out queue of ready steps, served by up to `limit` threads that are started as work comes in.
///
/// Nothing that a thread of a queue does waits for another step. So steps of a queue cannot block each other, whatever the number
/// of threads.
#[derive(Debug)]
pub(super) struct Queue<W: Work> {
    name: String,
    limit: usize,
    /// Whether its thread asks of each step whether it may run.
    watches: bool,
    state: Mutex<State<W>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<W: Work> {
    ready: VecDeque<Step<W>>,
    /// Threads that wait for a step, those included that have been woken and do not run yet.
    idle: usize,
    threads: Vec<thread::JoinHandle<()>>,
    closed: bool,
}

impl<W: Work> Queue<W> {
    /// A queue without threads. `limit` is 1 or more.
    pub(super) fn new(name: impl Into<String>, limit: usize) -> Arc<Self> {
        Self::with(name, limit, false)
    }

    /// A queue whose one thread watches all steps at once and runs each as soon as [`Work::may_run`] says so: for steps that wait for
    /// what no thread of this process does.
    pub(super) fn watching(name: impl Into<String>) -> Arc<Self> {
        Self::with(name, 1, true)
    }

    fn with(name: impl Into<String>, limit: usize, watches: bool) -> Arc<Self> {
        let state = State { ready: VecDeque::new(), idle: 0, threads: Vec::new(), closed: false };
        Arc::new(Queue { name: name.into(), limit, watches, state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Starts the first thread. Call it before the first node of this queue is enqueued: later, when a step becomes ready, there
    /// is nobody left to report a failure to.
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
        // Counts as waiting from here on, as if it had been woken: so each ready step starts at most one thread.
        state.idle += 1;
        Ok(())
    }

    /// Appends `steps`, which must not lock this queue while it is iterated.
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
                // The threads that run already will get there; `start` has seen to it that there is one.
                log::warn!("{error}; going on with {} threads", state.threads.len());
                break;
            }
        }
    }

    /// What a thread of this queue does from start to end.
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

    /// What the thread of a queue that watches does.
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

    /// Waits for a step; `None` once the queue is closed and empty.
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

    /// Ends the threads once the queue is empty, and waits for that. Nothing may be pushed afterwards.
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
