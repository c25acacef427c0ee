//! Nodes: ranks that plan together, each in a process of its own.

use crate::buffer::End;
use crate::context::Context;
use crate::plan::Plan;
use mpgpu_contexts::{Error, PlanOptions};
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::{Allgather, Alone, Collective, NodeEnd, NodeGroup, NodeTransfer, Window};
use std::path::Path;
use std::sync::Arc;

/// What a rank sends to another or receives from it, without knowing where the other keeps it. Halves of two ranks meet by both ranks and the
/// tag, several of one kind in their order, as MPI's messages do; both have the same bytes.
#[derive(Clone, Debug)]
pub struct Half {
    end: End,
    rank: u32,
    tag: u64,
    is_send: bool,
}

impl Half {
    /// To a rank of the node, which hands in [`receive`](Half::receive) with this rank and the same tag.
    pub fn send(rank: u32, tag: u64, from: impl Into<End>) -> Half {
        Half { end: from.into(), rank, tag, is_send: true }
    }

    /// From a rank of the node, which hands in [`send`](Half::send).
    pub fn receive(rank: u32, tag: u64, into: impl Into<End>) -> Half {
        Half { end: into.into(), rank, tag, is_send: false }
    }
}

/// The ranks of a node, as one of them sees them. A clone is the same node.
#[derive(Clone, Debug)]
pub struct Node {
    context: Context,
    group: Arc<NodeGroup>,
}

impl Node {
    /// A node of `ranks` ranks, of which this is `rank`, from 0. `gather` collects bytes of every rank at every rank, while ranks plan. `devices`
    /// are the GPUs that this rank works for; empty for its share of those that it sees. All ranks call it together.
    ///
    /// # Errors
    /// What fails on one rank fails on all, with its reason.
    pub fn new(ctx: &Context, rank: u32, ranks: u32, gather: Box<dyn Allgather>, devices: &[DeviceId]) -> Result<Node, Error> {
        let group = NodeGroup::new(&ctx.runtime, rank, ranks, gather, devices)?;
        Ok(Node { context: ctx.clone(), group: Arc::new(group) })
    }

    /// The same where the ranks have no allgather: they meet at a socket of this path, in a folder that they all may write to, and wait a
    /// minute for each other.
    ///
    /// # Errors
    /// As `new`, and for a path that is taken.
    pub fn at_socket(ctx: &Context, rank: u32, ranks: u32, path: &Path, devices: &[DeviceId]) -> Result<Node, Error> {
        let group = NodeGroup::at_socket(&ctx.runtime, rank, ranks, path, devices)?;
        Ok(Node { context: ctx.clone(), group: Arc::new(group) })
    }

    /// A node of this process alone.
    ///
    /// # Errors
    /// As `new`.
    pub fn alone(ctx: &Context) -> Result<Node, Error> {
        Node::new(ctx, 0, 1, Box::new(Alone), &[])
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.group.rank()
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        self.group.ranks()
    }

    /// The GPUs that this rank works for.
    pub fn devices(&self) -> Vec<DeviceId> {
        self.group.own_devices().collect()
    }

    /// Plans what all ranks move in a step, from what each sends and receives. All ranks call it together, with the same options.
    ///
    /// Ends lie on a GPU, or in host memory of [`Buffer::shared`](crate::Buffer::shared).
    ///
    /// ```
    /// # use mpgpu::{BackendChoice, Buffer, Context, ContextOptions, Device, Half, Node, PlanOptions, Stream};
    /// # let ctx = Context::with_options(&ContextOptions { backend: Some(BackendChoice::Host), ..Default::default() })?;
    /// let node = Node::alone(&ctx)?;                              // with several ranks: Node::at_socket, Node::new
    /// let edge = Buffer::from_slice(&ctx, Device::gpu(0), &[7_u32; 100])?;
    /// let ghost = Buffer::<u32>::zeroed(&ctx, Device::gpu(1), 100)?;
    /// let step = node.exchange([Half::send(0, 1, &edge), Half::receive(0, 1, &ghost)], &PlanOptions::default())?;
    /// let stream = Stream::new(&ctx, Device::gpu(0))?;
    /// step.enqueue(&stream)?;                                     // every rank, every step
    /// assert_eq!(ghost.to_vec(&stream)?, [7; 100]);
    /// # Ok::<(), mpgpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// What fails on one rank fails on all: a half that meets none, halves of unlike size, memory that cannot be mapped.
    pub fn exchange(&self, halves: impl IntoIterator<Item = Half>, options: &PlanOptions) -> Result<Plan, Error> {
        let halves: Vec<Half> = halves.into_iter().collect();
        for (index, half) in halves.iter().enumerate() {
            if let Err(error) = self.context.check_ends(index, [&half.end]) {
                // The others are in the call already.
                let told = self.group.refuse(Collective::PLAN, &error.to_string());
                log::debug!("the other ranks are told {error}: {told:?}");
                return Err(error);
            }
        }
        let windows: Vec<Window> = halves.iter().map(|half| Window { address: half.end.address, bytes: half.end.bytes }).collect();
        let transfers: Vec<NodeTransfer> = (0..)
            .zip(&halves)
            .map(|(window, half)| {
                let own = NodeEnd { rank: self.rank(), window, offset: 0 };
                let other = NodeEnd { rank: half.rank, window: NodeEnd::BY_TAG, offset: half.tag };
                let (dst, src) = if half.is_send { (other, own) } else { (own, other) };
                NodeTransfer { dst, src, bytes: half.end.bytes }
            })
            .collect();
        let plan = self.group.plan(&windows, &transfers, options)?;
        let keep = halves.into_iter().filter_map(|half| half.end.keep).collect();
        Ok(Plan::of_node(self.context.clone(), plan, keep))
    }

    /// Takes part in the call in which the other ranks are, or to which they come next, as a rank that has failed: they are told the reason.
    ///
    /// # Errors
    /// Where the others are in different calls.
    pub fn fail(&self, reason: &str) -> Result<(), Error> {
        self.group.refuse(Collective::FAIL, reason)
    }
}
