//! What the ranks of a node tell each other while they make a node or a plan. A rank that fails fails on all: nobody goes on alone.

use super::super::error::Error;
use crate::sync::{Mutex, lock};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Collects the same number of bytes from every rank at every rank, in the order of ranks: `MPI_Allgather`. Called by all ranks alike.
pub trait Allgather: Send {
    /// `receive` has room for what all ranks send. An error is text for people; it ends what the ranks were about to do.
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String>;
}

/// The allgather of one rank.
#[derive(Copy, Clone, Debug)]
pub struct Alone;

impl Allgather for Alone {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        receive.copy_from_slice(send);
        Ok(())
    }
}

/// More than any rank sends, a plan of a million transfers included: a length above it is no length.
const MOST_BYTES: u64 = 1 << 30;

/// The ranks of a node, as far as they can be told something.
pub(super) struct Exchange {
    pub rank: u32,
    pub ranks: u32,
    gather: Mutex<Box<dyn Allgather>>,
}

impl Exchange {
    pub fn new(rank: u32, ranks: u32, gather: Box<dyn Allgather>) -> Exchange {
        Exchange { rank, ranks, gather: Mutex::new(gather) }
    }

    /// Tells every rank what this one has, or why it has nothing. What all have, in the order of ranks; where one has failed its own error
    /// there, and [`Error::RankFailed`] on the others. Where all that have failed say that it is not supported all ranks get that, and none does
    /// otherwise: what they try in place of it they try together.
    pub fn all<T: Serialize + DeserializeOwned>(&self, mine: Result<T, Error>) -> Result<Vec<T>, Error> {
        let said = mine.as_ref().map_err(|error| (error.is_not_supported(), error.to_string()));
        let text = serde_json::to_vec(&said).map_err(|error| broken(error.to_string()))?;
        let all = self.gather(&text)?;
        let (mut values, mut failed) = (Vec::with_capacity(all.len()), Vec::new());
        for (rank, text) in (0..).zip(all) {
            let said: Result<T, (bool, String)> = serde_json::from_slice(&text).map_err(|error| {
                broken(format!("rank {rank} has said what cannot be read ({error}): link all ranks with the same version"))
            })?;
            match said {
                Ok(value) => values.push(value),
                Err((is_not_supported, reason)) => failed.push((is_not_supported, rank, reason)),
            }
        }
        // The same on all ranks.
        let Some((is_not_supported, rank, reason)) = failed.into_iter().min() else { return Ok(values) };
        match mine {
            // Its own reason is better known here than told.
            Err(own) if own.is_not_supported() == is_not_supported => Err(own),
            _ if is_not_supported => Err(Error::NotSupported(format!("rank {rank}: {reason}"))),
            _ => Err(Error::RankFailed { rank, reason }),
        }
    }

    /// The bytes of all ranks, whose numbers may differ.
    fn gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let mut gather = lock(&self.gather);
        let ranks = self.ranks as usize;
        let mut lengths = vec![0; 8 * ranks];
        gather.allgather(&(mine.len() as u64).to_le_bytes(), &mut lengths).map_err(broken)?;
        let lengths: Vec<u64> = lengths.chunks_exact(8).map(|bytes| u64::from_le_bytes(std::array::from_fn(|i| bytes[i]))).collect();
        let most = lengths.iter().copied().max().unwrap_or(0);
        if most > MOST_BYTES || lengths[self.rank as usize] != mine.len() as u64 {
            return Err(broken("it has returned other bytes than were sent; it must do what MPI_Allgather does".into()));
        }
        let mut send = mine.to_vec();
        send.resize(most as usize, 0);
        let mut receive = vec![0; send.len() * ranks];
        gather.allgather(&send, &mut receive).map_err(broken)?;
        let chunks = receive.chunks_exact(most.max(1) as usize);
        Ok(chunks.zip(lengths).map(|(bytes, length)| bytes[..length as usize].to_vec()).collect())
    }
}

fn broken(reason: String) -> Error {
    Error::Allgather(reason)
}
