//! Copies many pieces without a plan, by the CPU build of the GPU's kernel.

use crate::backend::{BackendError, BlockEnd, Endpoints, Indices, Pieces, index_out_of_range};
use crate::block_list::{BlockList, LAYERS_PER_LAUNCH, ListEnd};
use crate::bridge::{Segment, copy_blocks_on_cpu};
use std::sync::atomic::{AtomicU64, Ordering};

/// Copy of pieces in a stream. Owns its lists, because the caller may free them after the call.
#[derive(Debug)]
pub(super) enum PieceWork {
    Listed(Box<[Segment]>),
    Blocks(Box<OwnedBlocks>),
}

/// Block copy with copies of its index lists.
#[derive(Debug)]
pub(super) struct OwnedBlocks {
    layers: Box<[Endpoints]>,
    dst: OwnedEnd,
    src: OwnedEnd,
    count: u64,
    bytes: u64,
    /// Report of an index out of range, which the kernel writes.
    report: [AtomicU64; 2],
}

#[derive(Debug)]
struct OwnedEnd {
    stride: u64,
    blocks: u64,
    indices: OwnedIndices,
}

#[derive(Debug)]
enum OwnedIndices {
    InOrder,
    Narrow(Box<[u32]>),
    Wide(Box<[u64]>),
    Later { address: u64, width: u32 },
}

impl OwnedEnd {
    fn new(end: &BlockEnd<'_>) -> OwnedEnd {
        let indices = match end.indices {
            Indices::InOrder => OwnedIndices::InOrder,
            Indices::Narrow(indices) => OwnedIndices::Narrow(indices.into()),
            Indices::Wide(indices) => OwnedIndices::Wide(indices.into()),
            Indices::Later { address, width } => OwnedIndices::Later { address, width },
        };
        OwnedEnd { stride: end.stride, blocks: end.blocks, indices }
    }

    fn in_list(&self) -> ListEnd {
        let (indices, index) = match &self.indices {
            OwnedIndices::InOrder => (Indices::InOrder, 0),
            OwnedIndices::Narrow(indices) => (Indices::Narrow(indices), indices.as_ptr().expose_provenance() as u64),
            OwnedIndices::Wide(indices) => (Indices::Wide(indices), indices.as_ptr().expose_provenance() as u64),
            OwnedIndices::Later { address, width } => (Indices::Later { address: *address, width: *width }, 0),
        };
        ListEnd::new(&BlockEnd { stride: self.stride, blocks: self.blocks, indices }, index)
    }
}

impl PieceWork {
    /// Creates the work for a call. Copies the lists in host memory.
    pub fn new(pieces: &Pieces<'_>) -> PieceWork {
        match pieces {
            Pieces::Listed(segments) => PieceWork::Listed((*segments).into()),
            Pieces::Blocks(copy) => PieceWork::Blocks(Box::new(OwnedBlocks {
                layers: copy.layers.into(),
                dst: OwnedEnd::new(&copy.dst),
                src: OwnedEnd::new(&copy.src),
                count: copy.count,
                bytes: copy.bytes,
                report: [AtomicU64::new(0), AtomicU64::new(0)],
            })),
        }
    }

    /// Copies all pieces on the calling thread. Returns an error if an index is out of range.
    pub fn run(&self) -> Result<(), BackendError> {
        match self {
            PieceWork::Listed(segments) => {
                let list = BlockList {
                    pieces: segments.as_ptr().expose_provenance() as u64,
                    count: segments.len() as u64,
                    ..BlockList::of(segments.iter().map(|segment| segment.bytes).max().unwrap_or(0))
                };
                // SAFETY: The context has checked that all ends are in known memory, which the caller keeps valid until completion.
                unsafe { copy_blocks_on_cpu(&list, 1, 1) };
                Ok(())
            }
            PieceWork::Blocks(blocks) => blocks.run(),
        }
    }
}

impl OwnedBlocks {
    fn run(&self) -> Result<(), BackendError> {
        let shared = BlockList {
            dst: self.dst.in_list(),
            src: self.src.in_list(),
            count: self.count,
            report: self.report.as_ptr().expose_provenance() as u64,
            ..BlockList::of(self.bytes)
        };
        for layers in self.layers.chunks(LAYERS_PER_LAUNCH) {
            // SAFETY: The context has checked that all ends are in known memory, which the caller keeps valid until completion. Index lists
            // are either in such memory or owned by this object. No index is used before it is compared with the number of blocks.
            unsafe { copy_blocks_on_cpu(&shared.with_layers(layers), 1, 1) };
        }
        let words = [0, 1].map(|at| self.report[at].load(Ordering::Relaxed));
        if words[0] == 0 { Ok(()) } else { Err(index_out_of_range(words, (self.dst.blocks, self.src.blocks))) }
    }
}
