//! Plans of copies, and their executions.

use crate::buffer::{End, Keep};
use crate::context::Context;
use crate::stream::Stream;
use mpgpu_backend::Completion;
use mpgpu_contexts::{self as context, Error, Measured};
use mpgpu_ranks::NodePlan;
use std::sync::Arc;

/// One copy of all bytes of one end to another end of the same size.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// Destination.
    pub dst: End,
    /// Source.
    pub src: End,
}

impl<D: Into<End>, S: Into<End>> From<(D, S)> for Transfer {
    /// Converts a pair of destination and source.
    fn from((dst, src): (D, S)) -> Transfer {
        Transfer { dst: dst.into(), src: src.into() }
    }
}

/// Plan of this process alone, or of all ranks of a node.
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
    /// Waits for executions before the memory in `keep` is released.
    fn drop(&mut self) {
        if let Planned::Node(plan) = &self.planned
            && let Err(error) = plan.destroy()
        {
            log::warn!("destroying a node plan: {error}");
        }
        if self.keep.iter().any(|keep| keep.is_foreign)
            && let Err(error) = self.context.runtime.backend().synchronize()
        {
            log::debug!("waiting for the executions of a dropped plan: {error}");
        }
    }
}

/// Plan: copies that are planned together once, and executed any number of times, from any thread, in any streams. It keeps its buffers
/// alive. A clone refers to the same plan.
///
/// Drop the last handle of a plan of a node after the last step that this rank enqueues. This waits for that step. Ranks that have enqueued
/// more steps get [`BackendError::PeerGone`](mpgpu_backend::BackendError::PeerGone).
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

    /// Enqueues one execution, after all earlier work in `stream` and before all later work. Does not wait. For a plan of a node every rank
    /// enqueues every step.
    ///
    /// # Errors
    /// Returns an error for a stream of another context, for a cudarc stream that is being captured, and if a peer has exited.
    /// Also returns errors of the driver.
    pub fn enqueue(&self, stream: &Stream) -> Result<(), Error> {
        stream.refuse_shared_capture()?;
        let handle = stream.handle_in(&self.inner.context)?;
        match &self.inner.planned {
            Planned::Own(plan) => plan.enqueue(handle),
            Planned::Node(plan) => plan.enqueue(handle),
        }
    }

    /// Enqueues one execution in a stream that is being captured.
    ///
    /// # Safety
    /// The plan must outlive the graph and all of its executables.
    ///
    /// # Errors
    /// Returns the errors of `enqueue`, and an error for operations that a captured stream cannot hold.
    pub unsafe fn enqueue_captured(&self, stream: &Stream) -> Result<(), Error> {
        let handle = stream.handle_in(&self.inner.context)?;
        match &self.inner.planned {
            Planned::Own(plan) => plan.enqueue(handle),
            Planned::Node(plan) => plan.enqueue(handle),
        }
    }

    /// Enqueues one execution as [`enqueue`](Plan::enqueue), and returns a request for its end.
    ///
    /// # Errors
    /// Returns the errors of `enqueue`.
    pub fn execute(&self, stream: &Stream) -> Result<Request, Error> {
        stream.refuse_shared_capture()?;
        let handle = stream.handle_in(&self.inner.context)?;
        let completion = match &self.inner.planned {
            Planned::Own(plan) => plan.execute(handle),
            Planned::Node(plan) => plan.execute(handle),
        }?;
        Ok(Request { completion, plan: self.clone() })
    }

    /// Prepares the first execution in `stream`, so that it takes no longer than later ones. Call it before a time loop.
    ///
    /// # Errors
    /// Returns the errors of `enqueue`.
    pub fn prepare(&self, stream: &Stream) -> Result<(), Error> {
        let handle = stream.handle_in(&self.inner.context)?;
        match &self.inner.planned {
            Planned::Own(plan) => plan.prepare(handle),
            // The streams and events of a node plan were created with the plan.
            Planned::Node(_) => Ok(()),
        }
    }

    /// Describes paths, shares and times, and the reasons why other paths were rejected, as lines of text.
    pub fn describe(&self) -> String {
        match &self.inner.planned {
            Planned::Own(plan) => plan.describe(),
            Planned::Node(plan) => plan.describe(),
        }
    }

    /// Returns the bytes of all transfers; for a plan of a node, of all ranks.
    pub fn bytes(&self) -> u64 {
        match &self.inner.planned {
            Planned::Own(plan) => plan.bytes(),
            Planned::Node(plan) => plan.bytes(),
        }
    }

    /// Returns the number of paths of all transfers.
    pub fn paths(&self) -> usize {
        match &self.inner.planned {
            Planned::Own(plan) => plan.paths(),
            Planned::Node(plan) => plan.paths(),
        }
    }

    /// Returns the modelled seconds of an execution, and of the same transfers on one path each.
    pub fn predicted(&self) -> (f64, f64) {
        let planned = match &self.inner.planned {
            Planned::Own(plan) => plan.planned(),
            Planned::Node(plan) => plan.planned(),
        };
        (planned.predicted, planned.one_path)
    }

    /// Returns the measured seconds, if executions are measured.
    pub fn measured(&self) -> Measured {
        match &self.inner.planned {
            Planned::Own(plan) => plan.measured(),
            Planned::Node(plan) => plan.measured(),
        }
    }
}

/// Request of one execution. It keeps its plan alive. If it is dropped without a wait, the execution continues.
#[derive(Debug)]
#[must_use = "to execute without waiting, call Plan::enqueue, which costs less"]
pub struct Request {
    completion: Completion,
    plan: Plan,
}

impl Request {
    /// Blocks until the execution has ended.
    ///
    /// # Errors
    /// Returns the error of the execution, which has then ended too.
    pub fn wait(self) -> Result<(), Error> {
        Ok(self.completion.wait()?)
    }

    /// Returns true if the execution has ended, without blocking.
    ///
    /// # Errors
    /// Returns the error of the execution, which has then ended.
    pub fn is_done(&self) -> Result<bool, Error> {
        Ok(self.completion.is_done()?)
    }

    /// Calls `function` with the outcome when the execution has ended, on a thread of the context that makes all such calls. A panic of
    /// `function` is caught and logged as an error; functions of other requests are still called.
    ///
    /// # Errors
    /// Returns an error if the context has been closed.
    pub fn then(self, function: impl FnOnce(Result<(), Error>) + Send + 'static) -> Result<(), Error> {
        let Request { completion, plan } = self;
        plan.inner.context.runtime.call_when_done(completion, Box::new(move |outcome| function(outcome.map_err(Error::from))))
    }

    pub(crate) fn context(&self) -> &Context {
        &self.plan.inner.context
    }

    pub(crate) fn completion(&self) -> &Completion {
        &self.completion
    }
}
