//! What ranks hand in to a plan: windows, and copies between them.
//!
//! A rank that does not know where another keeps its bytes hands in a half: its own end, and a tag in place of the other. Halves are matched as
//! MPI matches messages: by the two ranks and the tag, and several of one kind in the order in which each rank hands them in.

use super::exchange::Named;
use crate::contexts::{End, Error};
use crate::rank;
use crate::tune::PartitionTuning;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// Memory of a rank that transfers of a plan may name.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// First byte.
    pub address: u64,
    /// How many.
    pub bytes: u64,
}

/// A byte in a window of a rank.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeEnd {
    /// Whose window.
    pub rank: u32,
    /// Which of those that the rank has handed in, from 0; or [`NodeEnd::BY_TAG`].
    pub window: u32,
    /// Bytes from its start; or the tag.
    pub offset: u64,
}

impl NodeEnd {
    /// In place of a window: the other rank names it, in a half with the same tag.
    pub const BY_TAG: u32 = u32::MAX;

    fn is_by_tag(self) -> bool {
        self.window == NodeEnd::BY_TAG
    }
}

/// A copy between windows of two ranks, or of one.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTransfer {
    /// Where the bytes go.
    pub dst: NodeEnd,
    /// Where they come from.
    pub src: NodeEnd,
    /// How many.
    pub bytes: u64,
}

impl NodeTransfer {
    /// Whether it is what a rank receives of a sender that hands in the other half.
    pub(super) fn is_receive_half(&self) -> bool {
        self.src.is_by_tag()
    }
}

/// A rank, and the number of a transfer among those that it hands in.
pub(super) type TransferName = (u32, usize);

/// A transfer of the batch of all ranks.
pub(super) struct HandedIn {
    pub transfer: NodeTransfer,
    pub name: TransferName,
    /// Of two halves that of the receiver; `name` is the sender's.
    pub receive: Option<TransferName>,
}

impl HandedIn {
    /// Who has named an end.
    pub fn name_of(&self, end: End) -> TransferName {
        self.receive.filter(|_| end == End::Destination).unwrap_or(self.name)
    }
}

/// A window as all ranks are told of it.
#[derive(Serialize, Deserialize)]
pub(super) struct ToldWindow {
    /// As the node numbers devices.
    pub device: i32,
    /// Whether copy engines reach it, and other processes can map it.
    pub is_pageable: bool,
    pub address: u64,
    pub bytes: u64,
}

/// What a rank hands in, as all are told of it.
#[derive(Serialize, Deserialize)]
pub(super) struct RankRequest {
    pub windows: Vec<ToldWindow>,
    pub transfers: Vec<NodeTransfer>,
    /// How it wants them planned.
    pub options: Named,
    /// Of rank 0 what was measured, where the agent of partitions is left open: all go by that.
    pub tuned: Vec<PartitionTuning>,
}

/// Refuses what `rank` of `ranks` may not hand in.
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
            let reason = format!("goes from rank {from} to rank {to}, and this is rank {own}: a rank hands in what it sends or receives");
            return refuse(index, reason);
        }
    }
    Ok(())
}

/// The batch of all ranks, in the order of ranks, with each two halves made one. `failed` makes the error of a transfer.
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
            let reason = format!("it is sent to rank {} with tag {tag}, and that rank hands in no receive for it", dst.rank);
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
            let reason = format!("it is received from rank {} with tag {}, and that rank hands in no send for it", src.rank, src.offset);
            Err(failed(name, reason))
        }
        None => Ok(batch),
    }
}
