//! Nodes: groups of processes (ranks) on one machine that plan their transfers together.

use crate::buffer::End;
use crate::context::Context;
use crate::plan::Plan;
use mpgpu_contexts::{Error, PlanOptions};
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::{Allgather, Alone, Collective, NodeEnd, NodeGroup, NodeTransfer, Window};
use std::path::Path;
use std::sync::Arc;

/// Send or receive descriptor: one rank's side of a transfer. It contains this rank's memory, the other rank and a tag. It does not contain
/// the position in the other rank's memory.
///
/// Sends match receives as in MPI: by source, destination and tag, in the order in which each rank passes them. A send and its receive have
/// the same size.
#[derive(Clone, Debug)]
pub struct Half {
    end: End,
    rank: u32,
    tag: u64,
    is_send: bool,
}

impl Half {
    /// Creates a descriptor that sends the memory `from` to rank `rank` of the node. That rank passes a [`receive`](Half::receive)
    /// descriptor with the calling rank and the same tag.
    pub fn send(rank: u32, tag: u64, from: impl Into<End>) -> Half {
        Half { end: from.into(), rank, tag, is_send: true }
    }

    /// Creates a descriptor that receives into the memory `into` from rank `rank` of the node. That rank passes a [`send`](Half::send)
    /// descriptor with the calling rank and the same tag.
    pub fn receive(rank: u32, tag: u64, into: impl Into<End>) -> Half {
        Half { end: into.into(), rank, tag, is_send: false }
    }
}

/// Node: group of processes (ranks) on one machine that plan their transfers together. A clone refers to the same node.
#[derive(Clone, Debug)]
pub struct Node {
    context: Context,
    group: Arc<NodeGroup>,
}

impl Node {
    /// Creates a node of `ranks` ranks, in which this process is rank `rank`, from 0. All ranks call it together. Blocks until all ranks
    /// have called it.
    ///
    /// The library calls `gather` during collective calls, to gather data from every rank on every rank. `devices` are the GPUs that this
    /// rank uses. If it is empty, the rank gets its share of the visible GPUs.
    ///
    /// # Errors
    ///
    /// If one rank fails, the call fails on all ranks, with the reason.
    pub fn new(ctx: &Context, rank: u32, ranks: u32, gather: Box<dyn Allgather>, devices: &[DeviceId]) -> Result<Node, Error> {
        let group = NodeGroup::new(&ctx.runtime, rank, ranks, gather, devices)?;
        Ok(Node { context: ctx.clone(), group: Arc::new(group) })
    }

    /// Creates a node whose ranks have no allgather function. The ranks connect to each other over a Unix socket at `path`, in a directory
    /// to which all of them can write. The ranks wait at most one minute for each other.
    ///
    /// # Errors
    ///
    /// Returns the errors of `new`, and an error if a file already exists at the path.
    pub fn at_socket(ctx: &Context, rank: u32, ranks: u32, path: &Path, devices: &[DeviceId]) -> Result<Node, Error> {
        let group = NodeGroup::at_socket(&ctx.runtime, rank, ranks, path, devices)?;
        Ok(Node { context: ctx.clone(), group: Arc::new(group) })
    }

    /// Creates a node that consists only of this process, as rank 0 of 1.
    ///
    /// # Errors
    ///
    /// Returns the errors of `new`.
    pub fn alone(ctx: &Context) -> Result<Node, Error> {
        Node::new(ctx, 0, 1, Box::new(Alone), &[])
    }

    /// Returns the rank of this process in the node.
    pub fn rank(&self) -> u32 {
        self.group.rank()
    }

    /// Returns the number of ranks in the node.
    pub fn ranks(&self) -> u32 {
        self.group.ranks()
    }

    /// Returns the first GPU that this rank uses. [`devices`](Node::devices) returns all of them.
    ///
    /// # Errors
    ///
    /// Returns an error if this rank uses no GPU, because there are more ranks than GPUs or another rank uses the GPU that both have
    /// listed.
    pub fn device(&self) -> Result<DeviceId, Error> {
        self.group.device()
    }

    /// Returns the GPUs that this rank uses. The list is empty if this rank uses no GPU, for example because there are more ranks than
    /// GPUs.
    pub fn devices(&self) -> Vec<DeviceId> {
        self.group.own_devices().collect()
    }

    /// Plans all transfers that are described by the send and receive descriptors of the ranks, so that they do not compete for links. All
    /// ranks call it together, with equal options. Blocks until all ranks have called it.
    ///
    /// The memory of a descriptor is on a GPU, or in host memory from [`Buffer::shared`](crate::Buffer::shared).
    ///
    /// ```
    /// # use mpgpu::{BackendChoice, Buffer, Context, ContextOptions, Device, Half, Node, PlanOptions, Stream};
    /// # let ctx = Context::with_options(&ContextOptions { backend: Some(BackendChoice::Host), ..Default::default() })?;
    /// let node = Node::alone(&ctx)?;                              // with several ranks: Node::at_socket, Node::new
    /// let edge = Buffer::from_slice(&ctx, Device::gpu(0), &[7_u32; 100])?;
    /// let ghost = Buffer::<u32>::zeroed(&ctx, Device::gpu(1), 100)?;
    /// let step = node.exchange([Half::send(0, 1, &edge), Half::receive(0, 1, &ghost)], &PlanOptions::default())?;
    /// let stream = Stream::new(&ctx, Device::gpu(0))?;
    /// step.enqueue(&stream)?;                                     // on every rank, in every time step
    /// assert_eq!(ghost.to_vec(&stream)?, [7; 100]);
    /// # Ok::<(), mpgpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// If one rank fails, the call fails on all ranks. Examples are a descriptor without a match, matching descriptors of different sizes,
    /// and memory that other ranks cannot map.
    pub fn exchange(&self, halves: impl IntoIterator<Item = Half>, options: &PlanOptions) -> Result<Plan, Error> {
        let halves: Vec<Half> = halves.into_iter().collect();
        for (index, half) in halves.iter().enumerate() {
            if let Err(error) = self.context.check_ends(index, [&half.end]) {
                // The other ranks are already in the call.
                let told = self.group.refuse(Collective::PLAN, &error.to_string());
                log::debug!("reporting {error} to the other ranks: {told:?}");
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

    /// Makes the current or next collective call of the other ranks fail with the error text `reason`. Use this function if this rank
    /// cannot make the collective call itself. Blocks until the other ranks have made their call.
    ///
    /// # Errors
    ///
    /// Returns an error if the other ranks are in different calls.
    pub fn fail(&self, reason: &str) -> Result<(), Error> {
        self.group.refuse(Collective::FAIL, reason)
    }
}
