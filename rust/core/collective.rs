//! Collectives: the copies between participants that form a broadcast, a scatter, a gather, an all-gather or an all-to-all.
//!
//! Participants are devices of a process, or ranks of a node. Each sends from one buffer and receives into another. Blocks of several
//! participants are contiguous, in the order of the participants, as in MPI.
//!
//! | collective | send buffer of a participant | receive buffer of a participant |
//! | --- | --- | --- |
//! | broadcast | one block (root only) | one block |
//! | scatter | one block for each participant (root only) | one block |
//! | gather | one block | one block from each participant (root only) |
//! | all-gather | one block | one block from each participant |
//! | all-to-all | one block for each participant | one block from each participant |
//!
//! These collectives copy only: they contain no reductions.

use crate::rank::refuse_elsewhere;

/// Kind of collective.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Collective {
    /// The root sends one block to all participants.
    Broadcast,
    /// The root sends a different block to each participant.
    Scatter,
    /// Each participant sends a block to the root.
    Gather,
    /// Each participant sends the same block to all participants.
    AllGather,
    /// Each participant sends a different block to each participant.
    AllToAll,
}

/// Copy of a block from one participant to another, or within one participant.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Participant that sends the block.
    pub from: u32,
    /// Participant that receives the block.
    pub to: u32,
    /// Offset of the block in the sender's send buffer, bytes.
    pub send_offset: u64,
    /// Offset of the block in the receiver's receive buffer, bytes.
    pub receive_offset: u64,
    /// Size of the block in bytes.
    pub bytes: u64,
}

/// Sizes of the blocks of a collective, bytes.
#[derive(Copy, Clone, Debug)]
pub enum Sizes<'a> {
    /// Size in bytes of every block.
    Equal(u64),
    /// Individual size of each block in bytes. An all-to-all has one size for each pair of participants, ordered by sender and then by
    /// receiver. A broadcast has one size, for the root's block. The other collectives have one size for each participant.
    Each(&'a [u64]),
}

/// Reason why a collective is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum CollectiveError {
    #[error("{}", root_refused(*root, *participants))]
    Root { root: u32, participants: u32 },
    #[error("{given} sizes for {participants} participants: this collective needs {wanted}")]
    SizeCount { given: usize, participants: u32, wanted: usize },
    #[error("the blocks of participant {participant} are larger in total than the address space")]
    TooLarge { participant: u32 },
}

fn root_refused(root: u32, participants: u32) -> String {
    let none = || format!("root {} is not one of the {participants} participants: they are numbered from 0", root.cast_signed());
    refuse_elsewhere(root).unwrap_or_else(none)
}

impl Collective {
    /// Returns the number of sizes that [`Sizes::Each`] must contain.
    pub fn size_count(self, participants: u32) -> usize {
        let all = participants as usize;
        match self {
            Collective::Broadcast => 1,
            Collective::Scatter | Collective::Gather | Collective::AllGather => all,
            Collective::AllToAll => all * all,
        }
    }

    /// Returns the copies of the collective, without copies of 0 bytes. `root` is ignored if the collective has no root.
    pub fn pieces(self, participants: u32, root: u32, sizes: Sizes<'_>) -> Result<Vec<BlockCopy>, CollectiveError> {
        let has_root = matches!(self, Collective::Broadcast | Collective::Scatter | Collective::Gather);
        if has_root && root >= participants {
            return Err(CollectiveError::Root { root, participants });
        }
        if let Sizes::Each(each) = sizes
            && each.len() != self.size_count(participants)
        {
            return Err(CollectiveError::SizeCount { given: each.len(), participants, wanted: self.size_count(participants) });
        }
        let size = |at: usize| match sizes {
            Sizes::Equal(bytes) => bytes,
            Sizes::Each(each) => each[at],
        };
        // Offset of the next block in the send buffer and in the receive buffer of each participant.
        let (mut sent, mut received) = (vec![0_u64; participants as usize], vec![0_u64; participants as usize]);
        let mut pieces = Vec::new();
        let mut add = |from: u32, to: u32, bytes: u64, send_offset: u64, receive_offset: u64| {
            if bytes > 0 {
                pieces.push(BlockCopy { from, to, send_offset, receive_offset, bytes });
            }
        };
        let advance = |offset: &mut u64, participant: u32, bytes: u64| {
            let begin = *offset;
            *offset = begin.checked_add(bytes).ok_or(CollectiveError::TooLarge { participant })?;
            Ok(begin)
        };
        for one in 0..participants {
            match self {
                Collective::Broadcast => add(root, one, size(0), 0, 0),
                Collective::Scatter => {
                    let begin = advance(&mut sent[root as usize], root, size(one as usize))?;
                    add(root, one, size(one as usize), begin, 0);
                }
                Collective::Gather => {
                    let begin = advance(&mut received[root as usize], root, size(one as usize))?;
                    add(one, root, size(one as usize), 0, begin);
                }
                Collective::AllGather => {
                    for other in 0..participants {
                        let begin = advance(&mut received[other as usize], other, size(one as usize))?;
                        add(one, other, size(one as usize), 0, begin);
                    }
                }
                Collective::AllToAll => {
                    for other in 0..participants {
                        let bytes = size(one as usize * participants as usize + other as usize);
                        let from = advance(&mut sent[one as usize], one, bytes)?;
                        let to = advance(&mut received[other as usize], other, bytes)?;
                        add(one, other, bytes, from, to);
                    }
                }
            }
        }
        Ok(pieces)
    }
}
