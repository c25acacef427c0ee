//! Many pieces that one kernel copies without a plan ([`Backend::copy_pieces`](crate::Backend::copy_pieces)).

use crate::{Endpoints, Segment};

/// Positions of blocks in the arrays of one end.
#[derive(Copy, Clone, Debug)]
pub enum Indices<'a> {
    /// Block `i` of the list is block `i` of the array.
    InOrder,
    /// Indices of 32 bits in host memory, read before the call returns.
    Narrow(&'a [u32]),
    /// Indices of 64 bits in host memory, read before the call returns.
    Wide(&'a [u64]),
    /// Indices in memory that is read when the copy runs.
    Later {
        /// Address of the first index.
        address: u64,
        /// Bytes of an index, 4 or 8.
        width: u32,
    },
}

/// One end of a block copy.
#[derive(Copy, Clone, Debug)]
pub struct BlockEnd<'a> {
    /// Bytes from one block of an array to the next.
    pub stride: u64,
    /// Blocks of an array.
    pub blocks: u64,
    /// Blocks of the list.
    pub indices: Indices<'a>,
}

/// A copy of blocks of one size, the same of each pair of arrays.
#[derive(Copy, Clone, Debug)]
pub struct BlockCopy<'a> {
    /// First bytes of the destination and of the source array of each layer.
    pub layers: &'a [Endpoints],
    /// Blocks of the destination arrays.
    pub dst: BlockEnd<'a>,
    /// Blocks of the source arrays.
    pub src: BlockEnd<'a>,
    /// Blocks to copy in each layer.
    pub count: u64,
    /// Bytes of a block.
    pub bytes: u64,
}

/// Pieces of one copy. They have no order among themselves.
#[derive(Copy, Clone, Debug)]
pub enum Pieces<'a> {
    /// Blocks of arrays.
    Blocks(BlockCopy<'a>),
    /// Any pieces. The list is read before the call returns.
    Listed(&'a [Segment]),
}

impl Pieces<'_> {
    /// True if indices are read when the copy runs, so that only then one out of range is found.
    pub fn is_checked_late(&self) -> bool {
        let is_late = |end: &BlockEnd<'_>| matches!(end.indices, Indices::Later { .. });
        matches!(self, Pieces::Blocks(copy) if is_late(&copy.dst) || is_late(&copy.src))
    }
}

/// Bounds of a kernel that copies pieces.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct KernelBounds {
    /// Multiprocessors at most, 1 or more.
    pub multiprocessors: u32,
    /// True if each group of lanes waits until its stores to host memory have arrived before it stores more.
    pub is_paced: bool,
}

/// The error of a list whose index is out of range, found while the copy ran. `words` are those that the kernel reports.
pub fn index_out_of_range(words: [u64; 2], copy: (u64, u64)) -> crate::BackendError {
    let (position, is_source) = ((words[0] - 1) / 2, (words[0] - 1) % 2 == 1);
    let (name, blocks) = if is_source { ("source", copy.1) } else { ("destination", copy.0) };
    crate::BackendError::IndexOutOfRange(format!(
        "index {position} of the {name} is {}, but its arrays have {blocks} blocks; blocks with such indices were not copied",
        words[1]
    ))
}
