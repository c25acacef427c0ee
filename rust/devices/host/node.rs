//! Implements the dependency graph: nodes that count their unfinished predecessors and start when the last one finishes.
//!
//! A stream is a chain of nodes, an event is a reference to one, and an execution is a node with several steps. No thread waits for a
//! predecessor: the last predecessor to finish pushes the node's first steps to a [`Queue`]. Only callers wait, in [`Node::wait`].
//!
//! A node owns its successors, never its predecessors, and releases them when it finishes. A finished chain is therefore freed node by
//! node, and a long one causes no recursion.

use super::queue::{Queue, Step};
use crate::backend::{BackendError, CompletionState, OpTimes};
use crate::panics;
use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, Ordering, held, lock};
use smallvec::{SmallVec, smallvec};
use std::any::Any;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Work of a node: steps, numbered from 0, which depend on each other. The steps run between the end of the node's last predecessor and the
/// end of the node.
pub(super) trait Work: Debug + Send + Sync + Sized + 'static {
    /// Returns the steps without predecessors. A node without steps only orders other nodes, and finishes as soon as its predecessors have
    /// finished.
    fn roots(&self) -> impl Iterator<Item = u32>;
    /// Runs one step. Called once for each step, after all predecessors of the step. An error or a panic fails the node, and steps that
    /// have not begun are then skipped.
    fn run(&self, step: u32) -> Result<(), BackendError>;
    /// True if `step`, whose predecessors have finished, may run. Only a watching queue calls this, and repeats it until it returns true.
    fn may_run(&self, step: u32) -> bool {
        let _ = step;
        true
    }
    /// Records that `step` has finished. Yields the steps that are ready as a result.
    fn finished(&self, step: u32) -> impl Iterator<Item = u32>;
    /// Returns true if `step` was the node's last unfinished step. Called once for each finished step, after [`Work::finished`].
    fn was_last(&self) -> bool;
    /// Ends the node's work. Called once, after the last step of a node that has not failed.
    fn conclude(&self) -> Result<(), BackendError>;
    /// Returns a further error for threads that wait for the node, if there is one. Called after the last step.
    fn tell(&self) -> Result<(), BackendError> {
        Ok(())
    }
    /// Returns the times of the steps, if requested. Called after the last step.
    fn times(&self) -> Option<OpTimes> {
        None
    }
    /// Returns a description of `step` for an error text.
    fn describe(&self, step: u32) -> String;
}

/// Unit of work in the dependency graph, with its completion.
#[derive(Debug)]
pub(super) struct Node<W: Work> {
    /// Number of predecessors that have not finished, plus one until [`Node::release`] is called.
    pending: AtomicUsize,
    /// True once the node has finished and `outcome` is final. Read without the lock.
    done: AtomicBool,
    /// True if a step of the node has failed.
    failed: AtomicBool,
    outcome: Mutex<Outcome<W>>,
    changed: Condvar,
    /// Queue whose threads run the steps of the node.
    queue: Arc<Queue<W>>,
    work: W,
}

#[derive(Debug)]
struct Outcome<W: Work> {
    done: bool,
    /// True if a thread sleeps in [`Node::wait`] until the node has finished.
    awaited: bool,
    error: Option<Box<BackendError>>,
    successors: SmallVec<[Arc<Node<W>>; 1]>,
}

impl<W: Work> Node<W> {
    /// Creates a node that cannot start before [`Node::release`].
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

    /// Orders `successor` after this node. `successor` must not be released yet.
    pub(super) fn precede(&self, successor: &Arc<Node<W>>) {
        if self.is_finished() {
            return;
        }
        let mut outcome = lock(&self.outcome);
        if !outcome.done {
            // This node cannot remove the successor from the list and decrement its count before this increment, because the lock is held.
            successor.pending.fetch_add(1, Ordering::Relaxed);
            outcome.successors.push(Arc::clone(successor));
        }
    }

    /// Allows the node to start as soon as its predecessors have finished. Called once.
    pub(super) fn release(self: &Arc<Self>) {
        if self.arrive() {
            let mut ready = Ready::keeping_none();
            self.begin(&mut ready);
        }
    }

    /// True if the node has finished, with or without an error.
    pub(super) fn is_finished(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Blocks until the node has finished, with or without an error.
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

    /// Decrements the number of unfinished predecessors. Returns true if it was the last.
    fn arrive(&self) -> bool {
        self.pending.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Starts the steps without predecessors, or finishes a node without steps.
    fn begin(self: &Arc<Self>, ready: &mut Ready<'_, W>) {
        if !self.hand_out_roots(ready) {
            self.finish(ready);
        }
    }

    /// Passes the steps without predecessors to `ready`. Returns false if there are none.
    fn hand_out_roots(self: &Arc<Self>, ready: &mut Ready<'_, W>) -> bool {
        let mut roots = self.work.roots().peekable();
        let any = roots.peek().is_some();
        ready.hand_out(self, roots);
        any
    }

    /// True if `step` of this node may run; see [`Work::may_run`].
    pub(super) fn may_run(&self, step: u32) -> bool {
        self.work.may_run(step)
    }

    /// Runs a step and passes the steps that become ready to `ready`. Ends the node after its last step.
    pub(super) fn run(self: &Arc<Self>, step: u32, ready: &mut Ready<'_, W>) {
        if !self.failed.load(Ordering::Relaxed) {
            self.guard(|| self.work.run(step), || self.work.describe(step));
        }
        ready.hand_out(self, self.work.finished(step));
        if self.work.was_last() {
            self.finish(ready);
        }
    }

    /// Runs `work`. The first error or panic becomes the node's error.
    fn guard(&self, work: impl FnOnce() -> Result<(), BackendError>, what: impl FnOnce() -> String) {
        // After a panic the work is not used any further, apart from counts that stay correct.
        let error = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(payload) => BackendError::Driver { what: what(), reason: panics::text(payload), code: 0 },
        };
        log::error!("{error}");
        lock(&self.outcome).error.get_or_insert_with(|| Box::new(error));
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Ends this node and every node without steps that becomes ready as a result. The loop avoids recursion, because chains of such nodes
    /// may be long.
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

    /// Publishes the end of the node and returns its successors.
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

/// Destination for steps that become ready. The steps go to their queues, except one that the current thread may keep for itself.
pub(super) struct Ready<'a, W: Work> {
    own: Option<&'a Arc<Queue<W>>>,
    kept: Option<Step<W>>,
}

impl<'a, W: Work> Ready<'a, W> {
    /// Creates a destination for a thread that serves `queue` and continues with [`Ready::kept`].
    pub(super) fn keeping_one_of(queue: &'a Arc<Queue<W>>) -> Self {
        Ready { own: Some(queue), kept: None }
    }

    /// Creates a destination for a thread that runs no steps, or that must check its queue first.
    pub(super) fn keeping_none() -> Self {
        Ready { own: None, kept: None }
    }

    /// Returns the step that the current thread keeps for itself, if any.
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
