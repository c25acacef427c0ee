//! Named batches: what moves in a broadcast, a scatter, a gather, an all-gather and an all-to-all, as pieces between participants.
//!
//! Participants are devices of a process, or ranks of a node. Each has a block of memory that it sends from and one that it receives into. Blocks of
//! several participants lie one behind the other, in the participants' order, as with MPI.
//!
//! | collective | a participant sends from | and receives into |
//! | --- | --- | --- |
//! | broadcast | the root: a block | a block |
//! | scatter | the root: a block for each participant | its block |
//! | gather | its block | the root: a block of each participant |
//! | all-gather | its block | a block of each participant |
//! | all-to-all | a block for each participant | a block of each participant |
//!
//! These are copies alone: nothing is reduced.

use crate::rank::refuse_elsewhere;

/// Which.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Collective {
    /// The root's bytes to all.
    Broadcast,
    /// Of the root's blocks one to each.
    Scatter,
    /// A block of each to the root.
    Gather,
    /// A block of each to all.
    AllGather,
    /// A block of each to each.
    AllToAll,
}

/// What one participant sends another, or itself.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Who sends.
    pub from: u32,
    /// Who receives.
    pub to: u32,
    /// Bytes from the start of what the sender sends from.
    pub send_offset: u64,
    /// Bytes from the start of what the receiver receives into.
    pub receive_offset: u64,
    /// How many.
    pub bytes: u64,
}

/// Bytes of blocks.
#[derive(Copy, Clone, Debug)]
pub enum Sizes<'a> {
    /// All have so many.
    Equal(u64),
    /// Of an all-to-all those of each sender for each receiver, sender by sender; of the others those of each participant, and of a broadcast the
    /// first.
    Each(&'a [u64]),
}

/// Why there is no such collective.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum CollectiveError {
    #[error("{}", root_refused(*root, *participants))]
    Root { root: u32, participants: u32 },
    #[error("{given} sizes for {participants} participants: this collective has {wanted}")]
    SizeCount { given: usize, participants: u32, wanted: usize },
    #[error("the blocks of participant {participant} have more bytes together than an address can count")]
    TooLarge { participant: u32 },
}

fn root_refused(root: u32, participants: u32) -> String {
    let none = || format!("root {} is none of the {participants} participants: they are numbered from 0", root.cast_signed());
    refuse_elsewhere(root).unwrap_or_else(none)
}

impl Collective {
    /// How many sizes it has where blocks differ.
    pub fn size_count(self, participants: u32) -> usize {
        let all = participants as usize;
        match self {
            Collective::Broadcast => 1,
            Collective::Scatter | Collective::Gather | Collective::AllGather => all,
            Collective::AllToAll => all * all,
        }
    }

    /// What moves, without pieces of no bytes. `root` is read where there is one.
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
        // Of each participant where its next block begins, in what it sends from and in what it receives into.
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
