//! Describes copies of many pieces without a plan ([`Backend::copy_pieces`](crate::Backend::copy_pieces)).

use crate::{Endpoints, Segment};

/// Index list of one end of a block copy. The index at position `i` selects the `i`-th block of the copy.
#[derive(Copy, Clone, Debug)]
pub enum Indices<'a> {
    /// No list. Position `i` selects block `i`.
    InOrder,
    /// 32-bit indices in host memory, which are read before the call returns.
    Narrow(&'a [u32]),
    /// 64-bit indices in host memory, which are read before the call returns.
    Wide(&'a [u64]),
    /// Indices in memory of a GPU, which are read when the copy runs.
    Later {
        /// Address of the first index.
        address: u64,
        /// Size of an index, bytes: 4 or 8.
        width: u32,
    },
}

/// One end of a block copy.
#[derive(Copy, Clone, Debug)]
pub struct BlockEnd<'a> {
    /// Distance between the starts of two consecutive blocks of an array, bytes.
    pub stride: u64,
    /// Number of blocks of each array.
    pub blocks: u64,
    /// Index list that selects the blocks to copy.
    pub indices: Indices<'a>,
}

/// Copy of blocks of equal size between pairs of arrays. Each pair is a layer. The same blocks are copied in each layer.
#[derive(Copy, Clone, Debug)]
pub struct BlockCopy<'a> {
    /// Addresses of the destination array and the source array of each layer.
    pub layers: &'a [Endpoints],
    /// Blocks in the destination arrays.
    pub dst: BlockEnd<'a>,
    /// Blocks in the source arrays.
    pub src: BlockEnd<'a>,
    /// Number of blocks to copy in each layer.
    pub count: u64,
    /// Size of a block, bytes.
    pub bytes: u64,
}

/// Pieces of one copy. They are copied in no particular order.
#[derive(Copy, Clone, Debug)]
pub enum Pieces<'a> {
    /// Blocks of arrays.
    Blocks(BlockCopy<'a>),
    /// List of pieces of any sizes. The list is read before the call returns.
    Listed(&'a [Segment]),
}

impl Pieces<'_> {
    /// Returns true if an index list is read when the copy runs. An index that is out of range is then found while the copy runs.
    pub fn is_checked_late(&self) -> bool {
        let is_late = |end: &BlockEnd<'_>| matches!(end.indices, Indices::Later { .. });
        matches!(self, Pieces::Blocks(copy) if is_late(&copy.dst) || is_late(&copy.src))
    }
}

/// Limits of a kernel that copies pieces.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct KernelBounds<'a> {
    /// Maximum number of multiprocessors that the kernel occupies, at least 1.
    pub multiprocessors: u32,
    /// True if writes to host memory are paced: each group of lanes of the kernel waits until its stores have arrived in host memory before
    /// it stores more. This bounds the bytes in flight, so that the link is not saturated.
    pub is_paced: bool,
    /// Helpers of a copy between host memory and one GPU. `None` if only the stream's GPU copies.
    pub helpers: Option<Helpers<'a>>,
}

/// GPUs that copy parts of the pieces over their own links to host memory, while the stream's GPU copies the rest.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Helpers<'a> {
    /// GPU whose memory is one end of every piece. Only copies in streams of this GPU have helpers.
    pub of: u32,
    /// GPUs, each with its share of the bytes.
    pub gpus: &'a [(u32, f64)],
    /// True if the call may create the context of a helper, which takes up to a second. Otherwise only GPUs whose context exists help.
    pub may_create: bool,
}

/// Creates the error for an index that a kernel has found out of range. `words` is the kernel's report: 1 + 2 * position + (1 for the
/// source), and the index. `copy` contains the numbers of blocks of the destination and source arrays.
pub fn index_out_of_range(words: [u64; 2], copy: (u64, u64)) -> crate::BackendError {
    let (position, is_source) = ((words[0] - 1) / 2, (words[0] - 1) % 2 == 1);
    let (name, blocks) = if is_source { ("source", copy.1) } else { ("destination", copy.0) };
    crate::BackendError::IndexOutOfRange(format!(
        "index {position} of the {name} is {}, but its arrays have {blocks} blocks; blocks with an index out of range were \
         not copied: correct the index list",
        words[1]
    ))
}
