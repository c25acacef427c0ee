//! Plans, and executions of them.

use crate::buffer::{End, Keep};
use crate::context::Context;
use crate::stream::Stream;
use mpgpu_backend::Completion;
use mpgpu_contexts::{self as context, Error, Measured};
use mpgpu_ranks::NodePlan;
use std::sync::Arc;

/// One copy: of all bytes of one end to another of the same size.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// Where the bytes go.
    pub dst: End,
    /// Where they come from.
    pub src: End,
}

impl<D: Into<End>, S: Into<End>> From<(D, S)> for Transfer {
    /// Destination and source.
    fn from((dst, src): (D, S)) -> Transfer {
        Transfer { dst: dst.into(), src: src.into() }
    }
}

/// Of this process alone, or of all ranks of a node.
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
    /// Before `keep` goes.
    fn drop(&mut self) {
        if let Planned::Node(plan) = &self.planned
            && let Err(error) = plan.destroy()
        {
            log::warn!("a plan of a node has ended with: {error}");
        }
        if self.keep.iter().any(|keep| keep.is_foreign)
            && let Err(error) = self.context.runtime.backend().synchronize()
        {
            log::debug!("waiting for the executions of a plan that goes: {error}");
        }
    }
}

/// Copies that are planned together once, and executed any number of times, from any thread, in any streams. It keeps its buffers. A clone is
/// the same plan.
///
/// The last handle of a plan of a node goes after the last step that this rank enqueues, and waits for that. Ranks that have enqueued more
/// steps get [`BackendError::PeerGone`](mpgpu_backend::BackendError::PeerGone).
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

    /// Enqueues one execution: after all earlier work in `stream`, before all later. Does not wait. Of a plan of a node every rank enqueues
    /// every step.
    ///
    /// # Errors
    /// For a stream of another context, or one of cudarc's that is being captured; where a peer has gone; of the driver.
    pub fn enqueue(&self, stream: &Stream) -> Result<(), Error> {
        stream.refuse_shared_capture()?;
        let handle = stream.handle_in(&self.inner.context)?;
        match &self.inner.planned {
            Planned::Own(plan) => plan.enqueue(handle),
            Planned::Node(plan) => plan.enqueue(handle),
        }
    }

    /// The same in a stream that is being captured.
    ///
    /// # Safety
    /// The plan outlives the graph, and everything that was instantiated of it.
    ///
    /// # Errors
    /// As `enqueue`, and for what a captured stream cannot hold.
    pub unsafe fn enqueue_captured(&self, stream: &Stream) -> Result<(), Error> {
        let handle = stream.handle_in(&self.inner.context)?;
        match &self.inner.planned {
            Planned::Own(plan) => plan.enqueue(handle),
            Planned::Node(plan) => plan.enqueue(handle),
        }
    }

    /// The same as [`enqueue`](Plan::enqueue), with a request for its end.
    ///
    /// # Errors
    /// As there.
    pub fn execute(&self, stream: &Stream) -> Result<Request, Error> {
        stream.refuse_shared_capture()?;
        let handle = stream.handle_in(&self.inner.context)?;
        let completion = match &self.inner.planned {
            Planned::Own(plan) => plan.execute(handle),
            Planned::Node(plan) => plan.execute(handle),
        }?;
        Ok(Request { completion, plan: self.clone() })
    }

    /// Makes what the first execution in `stream` would make, so that it costs what later ones cost. Before a time loop.
    ///
    /// # Errors
    /// As `enqueue`.
    pub fn prepare(&self, stream: &Stream) -> Result<(), Error> {
        let handle = stream.handle_in(&self.inner.context)?;
        match &self.inner.planned {
            Planned::Own(plan) => plan.prepare(handle),
            // Its streams and events were made with it.
            Planned::Node(_) => Ok(()),
        }
    }

    /// Paths, shares, times, and why other paths were rejected, as lines.
    pub fn describe(&self) -> String {
        match &self.inner.planned {
            Planned::Own(plan) => plan.describe(),
            Planned::Node(plan) => plan.describe(),
        }
    }

    /// Bytes of all transfers; of a plan of a node, of all ranks.
    pub fn bytes(&self) -> u64 {
        match &self.inner.planned {
            Planned::Own(plan) => plan.bytes(),
            Planned::Node(plan) => plan.bytes(),
        }
    }

    /// Paths of all transfers together.
    pub fn paths(&self) -> usize {
        match &self.inner.planned {
            Planned::Own(plan) => plan.paths(),
            Planned::Node(plan) => plan.paths(),
        }
    }

    /// Modelled seconds of an execution, and of the same transfers on one path each.
    pub fn predicted(&self) -> (f64, f64) {
        let planned = match &self.inner.planned {
            Planned::Own(plan) => plan.planned(),
            Planned::Node(plan) => plan.planned(),
        };
        (planned.predicted, planned.one_path)
    }

    /// Measured seconds, where executions are measured.
    pub fn measured(&self) -> Measured {
        match &self.inner.planned {
            Planned::Own(plan) => plan.measured(),
            Planned::Node(plan) => plan.measured(),
        }
    }
}

/// One execution. It keeps its plan. Where it goes without a wait the execution goes on.
#[derive(Debug)]
#[must_use = "an execution that nobody waits for is enqueued at less cost"]
pub struct Request {
    completion: Completion,
    plan: Plan,
}

impl Request {
    /// Blocks until the execution has ended.
    ///
    /// # Errors
    /// Those of the execution, which has ended then too.
    pub fn wait(self) -> Result<(), Error> {
        Ok(self.completion.wait()?)
    }

    /// Whether it has ended, without blocking.
    ///
    /// # Errors
    /// Those of the execution, which has ended then.
    pub fn is_done(&self) -> Result<bool, Error> {
        Ok(self.completion.is_done()?)
    }

    /// Calls `function` with the outcome when it has ended, on a thread of the context that serves all such calls.
    ///
    /// # Errors
    /// Where the context has closed.
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
