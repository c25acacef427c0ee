//! Plans of copies, and their executions.

use crate::buffer::{End, Keep};
use crate::context::Context;
use crate::stream::Stream;
use mpgpu_backend::Completion;
use mpgpu_contexts::{self as context, Error, Measured};
use mpgpu_ranks::NodePlan;
use std::sync::Arc;

/// Copy from a source to a destination of the same size.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// Destination of the copy.
    pub dst: End,
    /// Source of the copy.
    pub src: End,
}

impl<D: Into<End>, S: Into<End>> From<(D, S)> for Transfer {
    /// Creates a transfer from a pair of destination and source.
    fn from((dst, src): (D, S)) -> Transfer {
        Transfer { dst: dst.into(), src: src.into() }
    }
}

/// Plan of a single process, or plan of all ranks of a node.
#[derive(Debug)]
enum Planned {
    Own(Arc<context::Plan>),
    Node(Box<NodePlan>),
}

#[derive(Debug)]
struct Inner {
    context: Context,
    planned: Planned,
    keep: Vec<Keep>,
}

impl Drop for Inner {
    /// Destroys the plan. Blocks until all of its executions have ended, so that the memory in `keep` is not released too early.
    fn drop(&mut self) {
        if let Planned::Node(plan) = &self.planned
            && let Err(error) = plan.destroy()
        {
            log::warn!("could not destroy a node plan: {error}");
        }
        if self.keep.iter().any(|keep| keep.is_foreign)
            && let Err(error) = self.context.runtime.backend().synchronize()
        {
            log::debug!("a plan was dropped, and an execution of it has failed: {error}");
        }
    }
}

/// Plan: a prepared batch of copies. It is created once and executed any number of times, from any thread and in any stream. It keeps its
/// buffers alive. A clone refers to the same plan.
///
/// A plan from [`Node::exchange`](crate::Node::exchange): drop the last clone after the last execution that this rank enqueues. Dropping it
/// blocks until this rank's executions have finished. Ranks that have enqueued more executions get
/// [`BackendError::PeerGone`](mpgpu_backend::BackendError::PeerGone).
#[derive(Clone, Debug)]
pub struct Plan {
    inner: Arc<Inner>,
}

impl Plan {
    pub(crate) fn own(context: Context, plan: Arc<context::Plan>, keep: Vec<Keep>) -> Plan {
        Plan { inner: Arc::new(Inner { context, planned: Planned::Own(plan), keep }) }
    }

    pub(crate) fn of_node(context: Context, plan: NodePlan, keep: Vec<Keep>) -> Plan {
        Plan { inner: Arc::new(Inner { context, planned: Planned::Node(Box::new(plan)), keep }) }
    }

    /// Enqueues one execution of the plan, after all earlier work in `stream` and before all later work. Does not block. For a plan from
    /// [`Node::exchange`](crate::Node::exchange) every rank enqueues every execution.
    ///
    /// # Errors
    ///
    /// Returns an error if the stream belongs to another context, if a cudarc stream is being captured, or if another rank of the node has
    /// exited. Also returns errors of the driver.
    pub fn enqueue(&self, stream: &Stream) -> Result<(), Error> {
        stream.refuse_shared_capture()?;
        let handle = stream.handle_in(&self.inner.context)?;
        match &self.inner.planned {
            Planned::Own(plan) => plan.enqueue(handle),
            Planned::Node(plan) => plan.enqueue(handle),
        }
    }

    /// Enqueues one execution of the plan in a stream that is being captured into a graph.
    ///
    /// # Safety
    ///
    /// The plan must outlive the graph and all of its executables.
    ///
    /// # Errors
    ///
    /// Returns the errors of `enqueue`, and an error if the execution contains operations that cannot be captured.
    pub unsafe fn enqueue_captured(&self, stream: &Stream) -> Result<(), Error> {
        let handle = stream.handle_in(&self.inner.context)?;
        match &self.inner.planned {
            Planned::Own(plan) => plan.enqueue(handle),
            Planned::Node(plan) => plan.enqueue(handle),
        }
    }

    /// Enqueues one execution of the plan like [`enqueue`](Plan::enqueue), and returns a request with which the program can wait for the
    /// execution.
    ///
    /// # Errors
    ///
    /// Returns the errors of `enqueue`.
    pub fn execute(&self, stream: &Stream) -> Result<Request, Error> {
        stream.refuse_shared_capture()?;
        let handle = stream.handle_in(&self.inner.context)?;
        let completion = match &self.inner.planned {
            Planned::Own(plan) => plan.execute(handle),
            Planned::Node(plan) => plan.execute(handle),
        }?;
        Ok(Request { completion, context: self.inner.context.clone(), plan: Some(self.clone()) })
    }

    /// Performs the one-time setup for executions in `stream`, so that the first execution takes no longer than later ones. Call it before
    /// a time loop, because it may take milliseconds.
    ///
    /// # Errors
    ///
    /// Returns the errors of `enqueue`.
    pub fn prepare(&self, stream: &Stream) -> Result<(), Error> {
        let handle = stream.handle_in(&self.inner.context)?;
        match &self.inner.planned {
            Planned::Own(plan) => plan.prepare(handle),
            // The streams and events of a node plan were created with the plan.
            Planned::Node(_) => Ok(()),
        }
    }

    /// Returns a description of the plan as text: its paths, the share of the data on each path, predicted times, and why other paths were
    /// rejected.
    pub fn describe(&self) -> String {
        match &self.inner.planned {
            Planned::Own(plan) => plan.describe(),
            Planned::Node(plan) => plan.describe(),
        }
    }

    /// Returns the total size of the plan's transfers in bytes. For a plan from [`Node::exchange`](crate::Node::exchange) it includes the
    /// transfers of all ranks.
    pub fn bytes(&self) -> u64 {
        match &self.inner.planned {
            Planned::Own(plan) => plan.bytes(),
            Planned::Node(plan) => plan.bytes(),
        }
    }

    /// Returns the total number of paths that the plan's transfers use.
    pub fn paths(&self) -> usize {
        match &self.inner.planned {
            Planned::Own(plan) => plan.paths(),
            Planned::Node(plan) => plan.paths(),
        }
    }

    /// Returns two predicted times of one execution in seconds: first the time of this plan, then the time if each transfer used only one
    /// path.
    pub fn predicted(&self) -> (f64, f64) {
        let planned = match &self.inner.planned {
            Planned::Own(plan) => plan.planned(),
            Planned::Node(plan) => plan.planned(),
        };
        (planned.predicted, planned.one_path)
    }

    /// Returns the median times of the last measured executions in seconds. The times are `None` if the plan does not measure its
    /// executions.
    pub fn measured(&self) -> Measured {
        match &self.inner.planned {
            Planned::Own(plan) => plan.measured(),
            Planned::Node(plan) => plan.measured(),
        }
    }
}

/// Request: an execution of a plan, or a copy of pieces, that the program can wait for. It keeps its plan alive. If the request is dropped,
/// the execution continues.
#[derive(Debug)]
#[must_use = "to execute without waiting, call Plan::enqueue, Context::enqueue_blocks or Context::enqueue_pieces, which cost less"]
pub struct Request {
    completion: Completion,
    context: Context,
    /// Plan of the execution. `None` for a copy of pieces.
    plan: Option<Plan>,
}

impl Request {
    pub(crate) fn of_pieces(completion: Completion, context: Context) -> Request {
        Request { completion, context, plan: None }
    }

    /// Blocks until the execution has ended.
    ///
    /// # Errors
    ///
    /// Returns the error of the execution. The execution has ended even if this function returns an error.
    pub fn wait(self) -> Result<(), Error> {
        Ok(self.completion.wait()?)
    }

    /// Returns true if the execution has ended. Does not block.
    ///
    /// # Errors
    ///
    /// Returns the error of the execution. The execution has ended even if this function returns an error.
    pub fn is_done(&self) -> Result<bool, Error> {
        Ok(self.completion.is_done()?)
    }

    /// Calls `function` with the result when the execution has ended. One thread of the context makes the calls for all of its requests,
    /// one after the other. If `function` panics, the panic is caught and logged as an error, and functions of other requests are still
    /// called.
    ///
    /// # Errors
    ///
    /// Returns an error if the context has been closed.
    pub fn then(self, function: impl FnOnce(Result<(), Error>) + Send + 'static) -> Result<(), Error> {
        let Request { completion, context, plan: _plan } = self;
        context.runtime.call_when_done(completion, Box::new(move |outcome| function(outcome.map_err(Error::from))))
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn completion(&self) -> &Completion {
        &self.completion
    }
}
