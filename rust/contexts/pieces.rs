//! Copies of many pieces without a plan, and the checks of their arguments.

use super::error::Error;
use super::lifetime::Context;
use super::state::ContextState;
use crate::backend::{
    Allocation, BlockCopy, BlockEnd, Completion, Endpoints, Indices, KernelBounds, MemoryKind, Pieces, Report, Segment, StreamHandle,
};
use std::ffi::CStr;

/// Bounds of a copy of pieces. `None` takes the context's.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct PieceOptions {
    /// Multiprocessors at most, 1 or more.
    pub multiprocessors: Option<u32>,
    /// True if writes to host memory keep the context's pace.
    pub paced: Option<bool>,
}

/// One end of a block copy, as the caller names it.
#[derive(Copy, Clone, Debug)]
pub struct BlockArrays<'a> {
    /// First bytes of the arrays, one for each layer.
    pub arrays: &'a [u64],
    /// Bytes from one block to the next; 0 for the bytes of a block.
    pub stride: u64,
    /// Blocks of each array.
    pub blocks: u64,
    /// Address of the list of indices; 0 if block `i` of the list is block `i` of the arrays.
    pub index: u64,
}

/// A block copy, as the caller names it.
#[derive(Copy, Clone, Debug)]
pub struct BlockRequest<'a> {
    /// Destination arrays.
    pub dst: BlockArrays<'a>,
    /// Source arrays, as many.
    pub src: BlockArrays<'a>,
    /// Bytes of an index, 4 or 8.
    pub index_bytes: u32,
    /// Blocks to copy in each layer.
    pub count: u64,
    /// Bytes of a block.
    pub bytes: u64,
}

impl Context {
    /// Copies blocks of arrays in `stream` by one kernel, without a plan. Reads index lists in host memory before it returns; lists in
    /// memory of a GPU are read when the copy runs.
    pub fn copy_blocks(
        &self,
        request: &BlockRequest<'_>,
        options: PieceOptions,
        stream: StreamHandle,
        report: Report,
    ) -> Result<Option<Completion>, Error> {
        let shared = self.state();
        let _open = shared.enter()?;
        let BlockRequest { count, bytes, .. } = *request;
        if request.dst.arrays.len() != request.src.arrays.len() {
            let reason = format!("{} destination arrays, but {} source arrays", request.dst.arrays.len(), request.src.arrays.len());
            return Err(Error::Pieces { argument: c"blocks", reason });
        }
        if count == 0 || bytes == 0 || request.dst.arrays.is_empty() {
            return Ok(shared.backend.mark_end(stream, &[], report)?);
        }
        let mut found = FoundMemory::new(shared);
        let dst = found.end(&request.dst, request, c"dst")?;
        let src = found.end(&request.src, request, c"src")?;
        let layers: Vec<Endpoints> = request.dst.arrays.iter().zip(request.src.arrays).map(|(&dst, &src)| Endpoints { dst, src }).collect();
        let pieces = Pieces::Blocks(BlockCopy { layers: &layers, dst, src, count, bytes });
        self.submit_pieces(&pieces, count.saturating_mul(bytes).saturating_mul(layers.len() as u64), options, stream, report)
    }

    /// Copies pieces in `stream` by one kernel, without a plan. Reads the list before it returns.
    pub fn copy_pieces(
        &self,
        pieces: &[Segment],
        options: PieceOptions,
        stream: StreamHandle,
        report: Report,
    ) -> Result<Option<Completion>, Error> {
        let shared = self.state();
        let _open = shared.enter()?;
        let mut found = FoundMemory::new(shared);
        let mut bytes = 0_u64;
        for (at, piece) in pieces.iter().enumerate().filter(|(_, piece)| piece.bytes > 0) {
            for (address, end) in [(piece.dst, "destination"), (piece.src, "source")] {
                found.range(address, piece.bytes, c"pieces", || format!("piece {at}: {end}"))?;
            }
            bytes = bytes.saturating_add(piece.bytes);
        }
        if bytes == 0 {
            return Ok(shared.backend.mark_end(stream, &[], report)?);
        }
        self.submit_pieces(&Pieces::Listed(pieces), bytes, options, stream, report)
    }

    fn submit_pieces(
        &self,
        pieces: &Pieces<'_>,
        bytes: u64,
        options: PieceOptions,
        stream: StreamHandle,
        report: Report,
    ) -> Result<Option<Completion>, Error> {
        let shared = self.state();
        let bounds = KernelBounds {
            multiprocessors: options.multiprocessors.unwrap_or(shared.config.kernel_blocks),
            is_paced: options.paced.unwrap_or(true),
        };
        let is_late = pieces.is_checked_late();
        let report = if is_late { Report::End } else { report };
        let copy = shared.backend.copy_pieces(stream, pieces, bounds, report)?;
        copy.iter().filter(|_| is_late).for_each(|copy| shared.late_checks.note(stream, copy));
        shared.count(bytes);
        Ok(copy)
    }
}

/// Allocations that were found in this call, the latest first.
struct FoundMemory<'a> {
    shared: &'a ContextState,
    known: Vec<Allocation>,
}

impl<'a> FoundMemory<'a> {
    fn new(shared: &'a ContextState) -> Self {
        FoundMemory { shared, known: Vec::new() }
    }

    /// Refuses a range that does not lie in memory that kernels may reach. `what` names it.
    fn range(&mut self, address: u64, bytes: u64, argument: &'static CStr, what: impl Fn() -> String) -> Result<(), Error> {
        let refused = |reason: String| Err(Error::PieceMemory { argument, reason });
        if address == 0 {
            return refused(format!("{} is NULL", what()));
        }
        let holds = |known: &Allocation| address >= known.base && bytes <= known.bytes && address - known.base <= known.bytes - bytes;
        if let Some(at) = self.known.iter().position(holds) {
            self.known.swap(0, at);
            return Ok(());
        }
        match self.shared.locate(address)? {
            None => refused(format!(
                "{} {address:#x} is pageable host memory, or no memory of this context: allocate it with mpgpu, or register it as pinned memory",
                what()
            )),
            Some(found) if !holds(&found) => refused(format!(
                "{} {address:#x} and {bytes} bytes run past the end of its allocation ({} bytes at {:#x})",
                what(),
                found.bytes,
                found.base
            )),
            Some(found) if found.kind == MemoryKind::Pageable => {
                refused(format!("{} {address:#x} is pageable host memory: register it as pinned memory", what()))
            }
            Some(found) => {
                self.known.push(found);
                Ok(())
            }
        }
    }

    /// Checks one end of a block copy, with the indices that lie in host memory.
    fn end<'i>(&mut self, arrays: &BlockArrays<'_>, request: &BlockRequest<'_>, argument: &'static CStr) -> Result<BlockEnd<'i>, Error> {
        let name = argument.to_string_lossy();
        let refused = |reason: String| Err(Error::Pieces { argument: c"blocks", reason });
        let stride = if arrays.stride == 0 { request.bytes } else { arrays.stride };
        if stride < request.bytes {
            return refused(format!("{name}_stride={stride}: must be at least block_bytes ({}), or 0", request.bytes));
        }
        let Some(bytes) = arrays.blocks.checked_sub(1).and_then(|last| last.checked_mul(stride)?.checked_add(request.bytes)) else {
            return refused(format!("{name}_blocks={}: must be 1 or more, and the array must fit into memory", arrays.blocks));
        };
        for (layer, &array) in arrays.arrays.iter().enumerate() {
            self.range(array, bytes, c"blocks", || format!("{name}[{layer}]"))?;
        }
        let indices = self.indices(arrays, request, &name)?;
        Ok(BlockEnd { stride, blocks: arrays.blocks, indices })
    }

    fn indices<'i>(&mut self, arrays: &BlockArrays<'_>, request: &BlockRequest<'_>, name: &str) -> Result<Indices<'i>, Error> {
        let refused = |reason: String| Err(Error::Pieces { argument: c"blocks", reason });
        let (BlockRequest { count, index_bytes: width, .. }, blocks) = (*request, arrays.blocks);
        if arrays.index == 0 {
            return if count <= blocks {
                Ok(Indices::InOrder)
            } else {
                refused(format!("count={count}: the arrays of {name} have {blocks} blocks; give {name}_index, or copy fewer"))
            };
        }
        if ![4, 8].contains(&width) || !arrays.index.is_multiple_of(u64::from(width)) {
            return refused(format!("index_bytes={width}: must be 4 or 8, and the lists of indices aligned to it"));
        }
        let Some(bytes) = count.checked_mul(u64::from(width)).filter(|bytes| isize::try_from(*bytes).is_ok()) else {
            return refused(format!("count={count}: a list of so many indices does not fit into memory"));
        };
        let place = self.shared.locate(arrays.index)?;
        if place.is_some_and(|place| !place.device.is_host()) {
            self.range(arrays.index, bytes, c"blocks", || format!("{name}_index"))?;
            return Ok(Indices::Later { address: arrays.index, width });
        }
        let pointer = std::ptr::with_exposed_provenance::<u8>(arrays.index as usize);
        // SAFETY: the caller of the C ABI vouches for `count` readable indices, which are aligned and not in memory of a GPU.
        let (at, indices) = unsafe {
            if width == 4 {
                let list = std::slice::from_raw_parts(pointer.cast::<u32>(), count as usize);
                (first_beyond(list, blocks), Indices::Narrow(list))
            } else {
                let list = std::slice::from_raw_parts(pointer.cast::<u64>(), count as usize);
                (first_beyond(list, blocks), Indices::Wide(list))
            }
        };
        match at {
            None => Ok(indices),
            Some((at, index)) => refused(format!("{name}_index[{at}]={index}: the arrays have {blocks} blocks")),
        }
    }
}

/// The first index that is not below `blocks`, with its position.
fn first_beyond<I: Copy + Into<u64>>(list: &[I], blocks: u64) -> Option<(usize, u64)> {
    // Without an early end the compiler compares several at a time.
    if list.iter().fold(false, |any, &index| any | (index.into() >= blocks)) {
        list.iter().enumerate().map(|(at, &index)| (at, index.into())).find(|(_, index)| *index >= blocks)
    } else {
        None
    }
}
