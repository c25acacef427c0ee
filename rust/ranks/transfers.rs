//! Defines the arguments that each rank passes when a node plan (plan that several ranks execute together) is created: memory windows
//! (memory ranges that the plan may use), and transfers between them.
//!
//! A rank that sends data may not know the address of the destination, and a rank that receives data may not know the address of the
//! source. Such a rank passes a send or receive descriptor. The descriptor contains the rank's own memory, and a tag in place of the
//! unknown address. Sends match receives by source, destination and tag. If several descriptors agree in all three, they match in the order
//! in which each rank has passed them.

use super::exchange::Named;
use crate::contexts::{End, Error};
use crate::rank;
use crate::tune::PartitionTuning;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Memory range of a rank that the transfers of a plan may use as source or destination.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Address of the first byte of the memory window (memory range).
    pub address: u64,
    /// Size in bytes of the memory window (memory range).
    pub bytes: u64,
}

/// Source or destination of a transfer: a rank, one of the rank's windows (memory ranges), and an offset in the window.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeEnd {
    /// Rank that owns the memory window.
    pub rank: u32,
    /// Index of the window (memory range) among those that the rank has passed to the plan, from 0. [`NodeEnd::BY_TAG`] in a send or
    /// receive descriptor.
    pub window: u32,
    /// Offset in bytes from the start of the window (memory range). If `window` is [`NodeEnd::BY_TAG`], this field is the tag of the
    /// descriptor instead.
    pub offset: u64,
}

impl NodeEnd {
    /// Value of [`NodeEnd::window`] for the source or destination that is unknown to this rank, because the other rank specifies it in its
    /// own descriptor.
    pub const BY_TAG: u32 = u32::MAX;

    fn is_by_tag(self) -> bool {
        self.window == NodeEnd::BY_TAG
    }
}

/// Copy between memory windows (memory ranges) of two ranks, or within the windows of one rank.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTransfer {
    /// Destination of the copy.
    pub dst: NodeEnd,
    /// Source of the copy.
    pub src: NodeEnd,
    /// Number of bytes to copy.
    pub bytes: u64,
}

impl NodeTransfer {
    /// True if this is a receive descriptor. The sender's descriptor then specifies the source.
    pub(super) fn is_receive_half(&self) -> bool {
        self.src.is_by_tag()
    }
}

/// Identification of a transfer: the rank that has passed it to the plan, and its number among the transfers of that rank.
pub(super) type TransferName = (u32, usize);

/// Transfer in the list of all ranks' transfers, with its identification in error messages.
pub(super) struct HandedIn {
    pub transfer: NodeTransfer,
    pub name: TransferName,
    /// Identification of the receive descriptor if this transfer consists of two matched descriptors. `name` then identifies the send
    /// descriptor. Otherwise `None`.
    pub receive: Option<TransferName>,
}

impl HandedIn {
    /// Returns the identification of the transfer or descriptor in which a rank has passed this end (source or destination).
    pub fn name_of(&self, end: End) -> TransferName {
        self.receive.filter(|_| end == End::Destination).unwrap_or(self.name)
    }
}

/// Description of a memory window (memory range that a plan may use), which is sent to all ranks.
#[derive(Serialize, Deserialize)]
pub(super) struct ToldWindow {
    /// Node-wide number of the device on which the memory window is.
    pub device: i32,
    /// True for pageable host memory, which copy engines do not access directly and other processes cannot map.
    pub is_pageable: bool,
    pub address: u64,
    pub bytes: u64,
}

/// Request of a rank for a plan, which is sent to all ranks.
#[derive(Serialize, Deserialize)]
pub(super) struct RankRequest {
    pub windows: Vec<ToldWindow>,
    pub transfers: Vec<NodeTransfer>,
    /// Options of the plan as names and values. They must be equal on all ranks.
    pub options: Named,
    /// Numbers of partitions that rank 0 has measured earlier to be fastest. All ranks use them if the caller does not select the agent
    /// (mechanism that moves partitions).
    pub tuned: Vec<PartitionTuning>,
}

/// Returns an error if `transfers` contains a transfer that rank `own` is not allowed to pass to a plan.
pub(super) fn check_own(transfers: &[NodeTransfer], own: u32, ranks: u32) -> Result<(), Error> {
    let refuse =
        |index: usize, reason: String| Err(Error::NodeArgument { argument: c"transfers", reason: format!("transfer {index} {reason}") });
    for (index, NodeTransfer { dst, src, .. }) in transfers.iter().enumerate() {
        if let Some(wrong) = [src, dst].into_iter().find_map(|end| rank::refuse("rank", end.rank, ranks)) {
            return refuse(index, format!("has an invalid rank: {wrong}"));
        }
        let is_own = match (src.is_by_tag(), dst.is_by_tag()) {
            (true, true) => {
                return refuse(
                    index,
                    "gives a tag for both source and destination: for its own side, a rank passes a window (memory range)".into(),
                );
            }
            (true, false) => dst.rank == own,
            (false, true) => src.rank == own,
            (false, false) => [dst.rank, src.rank].contains(&own),
        };
        if !is_own {
            let (from, to) = (src.rank, dst.rank);
            let reason =
                format!("goes from rank {from} to rank {to}, but this is rank {own}: pass only transfers that this rank sends or receives");
            return refuse(index, reason);
        }
    }
    Ok(())
}

/// Returns the transfers of all ranks, in rank order. Each matching pair of descriptors becomes one transfer. The function `failed` creates
/// the error for a transfer.
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
            let reason =
                format!("the transfer is sent to rank {} with tag {tag}, but that rank has no matching receive in its transfers", dst.rank);
            return Err(failed(*name, reason));
        };
        if found.bytes != bytes {
            let (from, sent) = (src.rank, name.1);
            let reason = format!(
                "the transfer receives {} bytes from rank {from} with tag {tag}, but transfer {sent} of that rank sends {bytes}",
                found.bytes
            );
            return Err(failed(by, reason));
        }
        (transfer.dst, *receive) = (found.dst, Some(by));
    }
    match receives.into_values().flatten().min_by_key(|(name, _)| *name) {
        Some((name, NodeTransfer { src, .. })) => {
            let reason = format!(
                "the transfer is received from rank {} with tag {}, but that rank has no matching send in its transfers",
                src.rank, src.offset
            );
            Err(failed(name, reason))
        }
        None => Ok(batch),
    }
}
