//! Implements the dependency graph of the host backend. Its nodes count their unfinished predecessors and start when the last predecessor
//! finishes.
//!
//! A stream is a chain of nodes. An event is a reference to a node. The execution of a program (list of copy operations) is a node with
//! several steps. No thread waits for a predecessor: the thread that finishes a node's last predecessor pushes the node's first steps to a
//! [`Queue`]. Only callers wait, in [`Node::wait`].
//!
//! A node owns its successors, never its predecessors, and drops them when it finishes. A finished chain is therefore freed node by node,
//! and a long chain causes no recursion.

use super::queue::{Queue, Step};
use crate::backend::{BackendError, CompletionState, OpTimes};
use crate::panics;
use crate::sync::{AtomicBool, AtomicUsize, Condvar, Mutex, Ordering, held, lock};
use smallvec::{SmallVec, smallvec};
use std::any::Any;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Work of a graph node. It consists of steps that are numbered from 0 and may depend on each other. The steps begin after the node's last
/// predecessor has finished, and the node finishes after its last step.
pub(super) trait Work: Debug + Send + Sync + Sized + 'static {
    /// Returns the numbers of the steps that depend on no other step of the node. A node without steps only orders other nodes, and
    /// finishes as soon as its predecessors have finished.
    fn roots(&self) -> impl Iterator<Item = u32>;
    /// Runs one step. Called once for each step, after the steps on which it depends have finished. If a step returns an error or panics,
    /// the node fails, and steps that have not begun are skipped.
    fn run(&self, step: u32) -> Result<(), BackendError>;
    /// True if `step`, whose predecessors have finished, may run. Only a polling queue calls this function. It repeats the call until the
    /// function returns true.
    fn may_run(&self, step: u32) -> bool {
        let _ = step;
        true
    }
    /// Records that `step` has finished. Returns the numbers of the steps that may run now.
    fn finished(&self, step: u32) -> impl Iterator<Item = u32>;
    /// Returns true if all steps of the node have finished. Called exactly once after each call of [`Work::finished`].
    fn was_last(&self) -> bool;
    /// Performs the final part of the node's work. Called once, after the last step of a node that has not failed.
    fn conclude(&self) -> Result<(), BackendError>;
    /// Returns an error for threads that wait for the node, in addition to the errors of its steps. Called after the last step.
    fn tell(&self) -> Result<(), BackendError> {
        Ok(())
    }
    /// Returns the start and end times of the steps, or `None` if they were not requested. Called after the last step.
    fn times(&self) -> Option<OpTimes> {
        None
    }
    /// Returns a description of `step` for an error message.
    fn describe(&self, step: u32) -> String;
}

/// Node of the dependency graph, with its work and its completion state.
#[derive(Debug)]
pub(super) struct Node<W: Work> {
    /// Number of predecessors that have not finished, plus 1 until [`Node::release`] is called.
    pending: AtomicUsize,
    /// True once the node has finished and `outcome` is final. Threads read this field without the lock of `outcome`.
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
    /// True if a thread sleeps in [`Node::wait_finished`] until the node has finished.
    awaited: bool,
    error: Option<Box<BackendError>>,
    successors: SmallVec<[Arc<Node<W>>; 1]>,
}

impl<W: Work> Node<W> {
    /// Creates a node that does not start before [`Node::release`] is called.
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

    /// Allows the node to start as soon as its predecessors have finished. Must be called once.
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

    /// Blocks the calling thread until the node has finished, with or without an error.
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

    /// Decrements the number of unfinished predecessors. Returns true if the number has become 0.
    fn arrive(&self) -> bool {
        self.pending.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Starts the steps that depend on no other step. Finishes the node if it has no steps.
    fn begin(self: &Arc<Self>, ready: &mut Ready<'_, W>) {
        if !self.hand_out_roots(ready) {
            self.finish(ready);
        }
    }

    /// Passes the steps that depend on no other step to `ready`. Returns false if the node has no steps.
    fn hand_out_roots(self: &Arc<Self>, ready: &mut Ready<'_, W>) -> bool {
        let mut roots = self.work.roots().peekable();
        let any = roots.peek().is_some();
        ready.hand_out(self, roots);
        any
    }

    /// True if `step` of this node may run. See [`Work::may_run`].
    pub(super) fn may_run(&self, step: u32) -> bool {
        self.work.may_run(step)
    }

    /// Runs a step, and passes the steps that become ready to `ready`. After its last step, the node finishes.
    pub(super) fn run(self: &Arc<Self>, step: u32, ready: &mut Ready<'_, W>) {
        if !self.failed.load(Ordering::Relaxed) {
            self.guard(|| self.work.run(step), || self.work.describe(step));
        }
        ready.hand_out(self, self.work.finished(step));
        if self.work.was_last() {
            self.finish(ready);
        }
    }

    /// Runs `work`. The first error or panic becomes the error of the node. `what` returns the description of the work for the error
    /// message.
    fn guard(&self, work: impl FnOnce() -> Result<(), BackendError>, what: impl FnOnce() -> String) {
        // After a panic, only the counts of the work are still used, and they stay correct.
        let error = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(payload) => BackendError::Driver { what: what(), reason: panics::text(payload), code: 0 },
        };
        log::error!("{error}");
        lock(&self.outcome).error.get_or_insert_with(|| Box::new(error));
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Finishes this node, and every node without steps that becomes ready as a result. The function uses a loop instead of recursion,
    /// because chains of such nodes may be long.
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

    /// Marks the node as finished, wakes the waiting threads, and returns the node's successors.
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

/// Receiver of steps that become ready. It pushes them to the queues of their nodes, except one step that the current thread may keep for
/// itself.
pub(super) struct Ready<'a, W: Work> {
    own: Option<&'a Arc<Queue<W>>>,
    kept: Option<Step<W>>,
}

impl<'a, W: Work> Ready<'a, W> {
    /// Creates a receiver for a thread of `queue`, which keeps one step of this queue for itself. The thread then runs the step that
    /// [`Ready::kept`] returns.
    pub(super) fn keeping_one_of(queue: &'a Arc<Queue<W>>) -> Self {
        Ready { own: Some(queue), kept: None }
    }

    /// Creates a receiver that pushes all steps to their queues. It is for threads that run no steps, or that must first take steps from
    /// their queue.
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
