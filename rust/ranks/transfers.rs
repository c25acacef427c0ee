//! Input of a node plan from each rank: memory windows, and transfers between them.
//!
//! A rank that does not know the address of the other end passes a send or receive descriptor: its own end, and a tag instead of the other.
//! Sends match receives by source, destination and tag. Several with the same three match in the order in which each rank passes them.

use super::exchange::Named;
use crate::contexts::{End, Error};
use crate::rank;
use crate::tune::PartitionTuning;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Memory of a rank that transfers of a plan may use.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Address of the first byte.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
}

/// Position in a window of a rank.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeEnd {
    /// Rank that owns the window.
    pub rank: u32,
    /// Number of the window among those that the rank has passed, from 0, or [`NodeEnd::BY_TAG`].
    pub window: u32,
    /// Offset from the start of the window in bytes, or the tag.
    pub offset: u64,
}

impl NodeEnd {
    /// Value of [`NodeEnd::window`] for an end that the other rank names, in a descriptor with the same tag.
    pub const BY_TAG: u32 = u32::MAX;

    fn is_by_tag(self) -> bool {
        self.window == NodeEnd::BY_TAG
    }
}

/// Copy between windows of two ranks, or of one.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTransfer {
    /// Destination.
    pub dst: NodeEnd,
    /// Source.
    pub src: NodeEnd,
    /// Size in bytes.
    pub bytes: u64,
}

impl NodeTransfer {
    /// True for a receive descriptor, whose source the sender names.
    pub(super) fn is_receive_half(&self) -> bool {
        self.src.is_by_tag()
    }
}

/// Rank, and the number of a transfer among those that the rank passes.
pub(super) type TransferName = (u32, usize);

/// Transfer in the list of all ranks.
pub(super) struct HandedIn {
    pub transfer: NodeTransfer,
    pub name: TransferName,
    /// Name of the receive descriptor, if two descriptors were matched; `name` is then that of the send descriptor.
    pub receive: Option<TransferName>,
}

impl HandedIn {
    /// Returns the name under which a rank has passed this end.
    pub fn name_of(&self, end: End) -> TransferName {
        self.receive.filter(|_| end == End::Destination).unwrap_or(self.name)
    }
}

/// Window as described to all ranks.
#[derive(Serialize, Deserialize)]
pub(super) struct ToldWindow {
    /// Device of the memory, in the node's numbering.
    pub device: i32,
    /// True for pageable memory, which copy engines do not access directly and other processes cannot map.
    pub is_pageable: bool,
    pub address: u64,
    pub bytes: u64,
}

/// Request of a rank for a plan, as sent to all ranks.
#[derive(Serialize, Deserialize)]
pub(super) struct RankRequest {
    pub windows: Vec<ToldWindow>,
    pub transfers: Vec<NodeTransfer>,
    /// Options of the plan.
    pub options: Named,
    /// Measured partition numbers of rank 0, if the agent of partitions is left open. All ranks use them.
    pub tuned: Vec<PartitionTuning>,
}

/// Refuses transfers that rank `own` may not pass.
pub(super) fn check_own(transfers: &[NodeTransfer], own: u32, ranks: u32) -> Result<(), Error> {
    let refuse =
        |index: usize, reason: String| Err(Error::NodeArgument { argument: c"transfers", reason: format!("transfer {index} {reason}") });
    for (index, NodeTransfer { dst, src, .. }) in transfers.iter().enumerate() {
        if let Some(wrong) = [src, dst].into_iter().find_map(|end| rank::refuse("rank", end.rank, ranks)) {
            return refuse(index, format!("names no rank of this node: {wrong}"));
        }
        let is_own = match (src.is_by_tag(), dst.is_by_tag()) {
            (true, true) => return refuse(index, "has a tag in place of both windows: name the window of this rank".into()),
            (true, false) => dst.rank == own,
            (false, true) => src.rank == own,
            (false, false) => [dst.rank, src.rank].contains(&own),
        };
        if !is_own {
            let (from, to) = (src.rank, dst.rank);
            let reason = format!(
                "goes from rank {from} to rank {to}, and this is rank {own}: a rank passes only transfers that it sends or receives"
            );
            return refuse(index, reason);
        }
    }
    Ok(())
}

/// Returns the transfers of all ranks, in rank order, with matched descriptors merged. `failed` creates the error of a transfer.
pub(super) fn batch_of<'a>(
    handed: impl Iterator<Item = &'a [NodeTransfer]>,
    failed: impl Fn(TransferName, String) -> Error,
) -> Result<Vec<HandedIn>, Error> {
    let (mut batch, mut receives) = (Vec::new(), BTreeMap::<_, VecDeque<_>>::new());
    for (rank, transfers) in (0..).zip(handed) {
        for (index, transfer) in transfers.iter().enumerate() {
            if transfer.is_receive_half() {
                let kind = (transfer.src.rank, rank, transfer.src.offset);
                receives.entry(kind).or_default().push_back(((rank, index), *transfer));
            } else {
                batch.push(HandedIn { transfer: *transfer, name: (rank, index), receive: None });
            }
        }
    }
    for HandedIn { transfer, name, receive } in &mut batch {
        let (NodeTransfer { dst, src, bytes }, tag) = (*transfer, transfer.dst.offset);
        if !dst.is_by_tag() {
            continue;
        }
        let Some((by, found)) = receives.get_mut(&(src.rank, dst.rank, tag)).and_then(VecDeque::pop_front) else {
            let reason = format!("it is sent to rank {} with tag {tag}, and that rank passes no receive for it", dst.rank);
            return Err(failed(*name, reason));
        };
        if found.bytes != bytes {
            let (from, sent) = (src.rank, name.1);
            let reason =
                format!("it receives {} bytes from rank {from} with tag {tag}, and transfer {sent} there sends {bytes}", found.bytes);
            return Err(failed(by, reason));
        }
        (transfer.dst, *receive) = (found.dst, Some(by));
    }
    match receives.into_values().flatten().min_by_key(|(name, _)| *name) {
        Some((name, NodeTransfer { src, .. })) => {
            let reason = format!("it is received from rank {} with tag {}, and that rank passes no send for it", src.rank, src.offset);
            Err(failed(name, reason))
        }
        None => Ok(batch),
    }
}
