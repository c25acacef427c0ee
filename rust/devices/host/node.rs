//! The dependency graph: nodes that count their unfinished predecessors, and what happens when the last one finishes.
//!
//! A stream is a chain of nodes, an event a reference to one, an execution a node with steps inside. No thread ever waits for a
//! predecessor: the last predecessor to finish pushes the node's first steps to a [`Queue`]. Only callers wait, in
//! [`Node::wait`].
//!
//! A node owns its successors, never its predecessors, and gives them up when it finishes. So a finished chain is freed node by
//! node, however long it is, and nothing recurses.

use super::queue::{Queue, Step};
use crate::backend::{BackendError, CompletionState, OpTimes};
use crate::panics;
use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, Ordering, held, lock};
use smallvec::{SmallVec, smallvec};
use std::any::Any;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// What a node does between the end of its last predecessor and its own end: steps, numbered from 0, with an order of their own.
pub(super) trait Work: Debug + Send + Sync + Sized + 'static {
    /// The steps that no other step precedes. With none, the node only orders and finishes where it becomes ready.
    fn roots(&self) -> impl Iterator<Item = u32>;
    /// Runs one step. Called once for each step, after all its predecessors. An error or a panic fails the node: steps that have
    /// not begun are then passed over.
    fn run(&self, step: u32) -> Result<(), BackendError>;
    /// Whether `step`, whose predecessors have finished, may run. A queue that watches asks until it may; others do not ask.
    fn may_run(&self, step: u32) -> bool {
        let _ = step;
        true
    }
    /// Notes that `step` has finished. Yields the steps that may run now.
    fn finished(&self, step: u32) -> impl Iterator<Item = u32>;
    /// Called once for each finished step, after [`Work::finished`]; true for the last of all.
    fn was_last(&self) -> bool;
    /// Called once, after the last step of a node that has not failed.
    fn conclude(&self) -> Result<(), BackendError>;
    /// What whoever waits for the node is told besides its error. Called after the last step.
    fn tell(&self) -> Result<(), BackendError> {
        Ok(())
    }
    /// When the steps ran, if that was asked for. Called after the last.
    fn times(&self) -> Option<OpTimes> {
        None
    }
    /// What `step` is, for an error's text.
    fn describe(&self, step: u32) -> String;
}

/// Work in the graph, and the moment at which it has finished.
#[derive(Debug)]
pub(super) struct Node<W: Work> {
    /// Unfinished predecessors, and one more until [`Node::release`].
    pending: AtomicUsize,
    /// Set after `outcome` is final, read without the lock.
    done: AtomicBool,
    /// A step has failed.
    failed: AtomicBool,
    outcome: Mutex<Outcome<W>>,
    changed: Condvar,
    /// Serves the steps.
    queue: Arc<Queue<W>>,
    work: W,
}

#[derive(Debug)]
struct Outcome<W: Work> {
    done: bool,
    /// Whether a thread sleeps in [`Node::wait`].
    awaited: bool,
    error: Option<Box<BackendError>>,
    successors: SmallVec<[Arc<Node<W>>; 1]>,
}

impl<W: Work> Node<W> {
    /// A node that cannot start before [`Node::release`].
    pub(super) fn new(work: W, queue: &Arc<Queue<W>>) -> Arc<Self> {
        Arc::new(Node {
            pending: AtomicUsize::new(1),
            done: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            outcome: Mutex::new(Outcome { done: false, awaited: false, error: None, successors: SmallVec::new() }),
            changed: Condvar::new(),
            queue: Arc::clone(queue),
            work,
        })
    }

    /// Lets `successor`, which is not released yet, start only after this node.
    pub(super) fn precede(&self, successor: &Arc<Node<W>>) {
        if self.is_finished() {
            return;
        }
        let mut outcome = lock(&self.outcome);
        if !outcome.done {
            // Before this node can take the successor from the list and count it down: the lock is held.
            successor.pending.fetch_add(1, Ordering::Relaxed);
            outcome.successors.push(Arc::clone(successor));
        }
    }

    /// Lets the node start as soon as its predecessors have finished. Called once.
    pub(super) fn release(self: &Arc<Self>) {
        if self.arrive() {
            let mut ready = Ready::keeping_none();
            self.begin(&mut ready);
        }
    }

    /// Whether the node has finished, well or not.
    pub(super) fn is_finished(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Sleeps until the node has finished, well or not.
    pub(super) fn wait_finished(&self) {
        if self.is_finished() {
            return;
        }
        let mut outcome = lock(&self.outcome);
        while !outcome.done {
            outcome.awaited = true;
            outcome = held(self.changed.wait(outcome));
        }
    }

    fn result(&self) -> Result<(), BackendError> {
        match &lock(&self.outcome).error {
            Some(error) => Err(BackendError::clone(error)),
            None => Ok(()),
        }
    }

    /// Counts one predecessor down; true for the last.
    fn arrive(&self) -> bool {
        self.pending.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Hands out the first steps.
    fn begin(self: &Arc<Self>, ready: &mut Ready<'_, W>) {
        if !self.hand_out_roots(ready) {
            self.finish(ready);
        }
    }

    /// False if there are none.
    fn hand_out_roots(self: &Arc<Self>, ready: &mut Ready<'_, W>) -> bool {
        let mut roots = self.work.roots().peekable();
        let any = roots.peek().is_some();
        ready.hand_out(self, roots);
        any
    }

    /// See [`Work::may_run`].
    pub(super) fn may_run(&self, step: u32) -> bool {
        self.work.may_run(step)
    }

    /// Runs a step and everything that follows from its end.
    pub(super) fn run(self: &Arc<Self>, step: u32, ready: &mut Ready<'_, W>) {
        if !self.failed.load(Ordering::Relaxed) {
            self.guard(|| self.work.run(step), || self.work.describe(step));
        }
        ready.hand_out(self, self.work.finished(step));
        if self.work.was_last() {
            self.finish(ready);
        }
    }

    /// Runs `work`; an error or a panic becomes the node's error unless it has one already.
    fn guard(&self, work: impl FnOnce() -> Result<(), BackendError>, what: impl FnOnce() -> String) {
        // The node is not used any further by work that has panicked, apart from counts that stay right.
        let error = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(payload) => BackendError::Driver { what: what(), reason: panics::text(payload), code: 0 },
        };
        log::error!("{error}");
        lock(&self.outcome).error.get_or_insert_with(|| Box::new(error));
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Ends this node, and every node without steps that becomes ready by that, in a loop: chains of such nodes may be long.
    fn finish(self: &Arc<Self>, ready: &mut Ready<'_, W>) {
        let mut ended: SmallVec<[Arc<Self>; 4]> = smallvec![Arc::clone(self)];
        while let Some(node) = ended.pop() {
            if !node.failed.load(Ordering::Relaxed) {
                node.guard(|| node.work.conclude(), || "checking the bytes of an execution".into());
            }
            for successor in node.close() {
                if successor.arrive() && !successor.hand_out_roots(ready) {
                    ended.push(successor);
                }
            }
        }
    }

    /// Makes the end known, and gives up the successors.
    fn close(&self) -> SmallVec<[Arc<Node<W>>; 1]> {
        let mut outcome = lock(&self.outcome);
        outcome.done = true;
        self.done.store(true, Ordering::Release);
        if outcome.awaited {
            self.changed.notify_all();
        }
        std::mem::take(&mut outcome.successors)
    }
}

impl<W: Work> CompletionState for Node<W> {
    fn is_done(&self) -> Result<bool, BackendError> {
        if self.is_finished() { self.result().map(|()| true) } else { Ok(false) }
    }

    fn wait(&self) -> Result<(), BackendError> {
        self.wait_finished();
        self.result()?;
        self.work.tell()
    }

    fn times(&self) -> Result<OpTimes, BackendError> {
        self.wait()?;
        self.work.times().ok_or_else(crate::backend::not_timed)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Where steps go that become ready: to their queues, but for one that the thread at hand keeps for itself.
pub(super) struct Ready<'a, W: Work> {
    own: Option<&'a Arc<Queue<W>>>,
    kept: Option<Step<W>>,
}

impl<'a, W: Work> Ready<'a, W> {
    /// For a thread that serves `queue` and goes on with [`Ready::kept`].
    pub(super) fn keeping_one_of(queue: &'a Arc<Queue<W>>) -> Self {
        Ready { own: Some(queue), kept: None }
    }

    /// For a thread that runs no steps, or should look at its queue again first.
    pub(super) fn keeping_none() -> Self {
        Ready { own: None, kept: None }
    }

    /// The step kept, if any.
    pub(super) fn kept(self) -> Option<Step<W>> {
        self.kept
    }

    fn hand_out(&mut self, node: &Arc<Node<W>>, steps: impl Iterator<Item = u32>) {
        let mut steps = steps.map(|index| Step { node: Arc::clone(node), index });
        if self.kept.is_none() && self.own.is_some_and(|own| Arc::ptr_eq(own, &node.queue)) {
            self.kept = steps.next();
        }
        node.queue.push(steps);
    }
}
