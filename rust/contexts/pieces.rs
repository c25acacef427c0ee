//! Copies many pieces without a plan, and checks the arguments of such copies.

use super::error::Error;
use super::lifetime::Context;
use super::piece_paths::EndDevice;
use super::state::ContextState;
use crate::backend::{
    Allocation, BlockCopy, BlockEnd, Completion, Endpoints, Helpers, Indices, KernelBounds, MemoryKind, Pieces, Report, Segment,
    StreamHandle,
};
use crate::plan::Relays;
use crate::topology::DeviceId;
use std::ffi::CStr;

/// Options of a copy of pieces.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct PieceOptions {
    /// Maximum number of multiprocessors that the kernel occupies, at least 1. `None` selects the value of `MPGPU_KERNEL_BLOCKS`.
    pub multiprocessors: Option<u32>,
    /// True if writes to host memory are paced ([`KernelBounds::is_paced`]). `None` selects the value of `MPGPU_PACED_WRITES`.
    pub paced: Option<bool>,
    /// GPUs whose links to host memory may carry a part of the bytes. `None` selects those of `MPGPU_RELAY_GPUS`, or all GPUs whose context
    /// exists.
    pub relays: Option<Relays>,
}

/// One end of a block copy, as the caller describes it.
#[derive(Copy, Clone, Debug)]
pub struct BlockArrays<'a> {
    /// Addresses of the arrays, one for each layer.
    pub arrays: &'a [u64],
    /// Distance between the starts of two consecutive blocks, bytes. 0 selects the size of a block.
    pub stride: u64,
    /// Number of blocks of each array.
    pub blocks: u64,
    /// Address of the index list. 0 if there is no list: position `i` then selects block `i`.
    pub index: u64,
}

/// Block copy, as the caller describes it.
#[derive(Copy, Clone, Debug)]
pub struct BlockRequest<'a> {
    /// Destination arrays.
    pub dst: BlockArrays<'a>,
    /// Source arrays, one for each destination array.
    pub src: BlockArrays<'a>,
    /// Size of an index, bytes: 4 or 8.
    pub index_bytes: u32,
    /// Number of blocks to copy in each layer.
    pub count: u64,
    /// Size of a block, bytes.
    pub bytes: u64,
}

impl Context {
    /// Enqueues a copy of blocks in `stream`, without a plan. Index lists in host memory are read and checked before the function returns.
    /// Index lists in memory of a GPU are read and checked when the copy runs.
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
            let (dst, src) = (request.dst.arrays.len(), request.src.arrays.len());
            let reason = format!("{dst} destination arrays, but {src} source arrays: pass one of each for every layer");
            return Err(Error::Pieces { argument: c"blocks", reason });
        }
        if count == 0 || bytes == 0 || request.dst.arrays.is_empty() {
            return Ok(shared.backend.mark_end(stream, &[], report)?);
        }
        let mut found = FoundMemory::new(shared);
        let dst = found.end(&request.dst, request, c"dst")?;
        let dst_device = found.take_device();
        let src = found.end(&request.src, request, c"src")?;
        let devices = (dst_device, found.take_device());
        let layers: Vec<Endpoints> = request.dst.arrays.iter().zip(request.src.arrays).map(|(&dst, &src)| Endpoints { dst, src }).collect();
        let pieces = Pieces::Blocks(BlockCopy { layers: &layers, dst, src, count, bytes });
        self.submit_pieces(&pieces, count.saturating_mul(bytes).saturating_mul(layers.len() as u64), devices, options, stream, report)
    }

    /// Enqueues a copy of pieces in `stream`, without a plan. The list is read before the function returns.
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
        let mut devices = (EndDevice::None, EndDevice::None);
        for (at, piece) in pieces.iter().enumerate().filter(|(_, piece)| piece.bytes > 0) {
            devices.0.add(found.range(piece.dst, piece.bytes, c"pieces", || format!("piece {at}: destination"))?);
            devices.1.add(found.range(piece.src, piece.bytes, c"pieces", || format!("piece {at}: source"))?);
            bytes = bytes.saturating_add(piece.bytes);
        }
        if bytes == 0 {
            return Ok(shared.backend.mark_end(stream, &[], report)?);
        }
        self.submit_pieces(&Pieces::Listed(pieces), bytes, devices, options, stream, report)
    }

    fn submit_pieces(
        &self,
        pieces: &Pieces<'_>,
        bytes: u64,
        devices: (EndDevice, EndDevice),
        options: PieceOptions,
        stream: StreamHandle,
        report: Report,
    ) -> Result<Option<Completion>, Error> {
        let shared = self.state();
        let relays = options.relays.or(shared.config.relays);
        let gpus = shared.piece_paths.shares(&shared.machine, &shared.config, devices, bytes, options.relays, (stream, &shared.active));
        let helpers =
            gpus.as_ref().map(|(of, gpus)| Helpers { of: *of, gpus, may_create: relays.is_some_and(|relays| relays != Relays::ALL) });
        let bounds = KernelBounds {
            multiprocessors: options.multiprocessors.unwrap_or(shared.config.kernel_blocks),
            is_paced: options.paced.unwrap_or(shared.config.paced_writes),
            helpers,
        };
        let is_late = pieces.is_checked_late();
        let report = if is_late { Report::End } else { report };
        let copy = shared.backend.copy_pieces(stream, pieces, bounds, report)?;
        copy.iter().filter(|_| is_late).for_each(|copy| shared.late_checks.note(stream, copy));
        shared.count(bytes);
        Ok(copy)
    }
}

/// Allocations that were found during one call, so that the backend is queried once for each allocation. A look-up that finds an
/// allocation moves it to the front.
struct FoundMemory<'a> {
    shared: &'a ContextState,
    known: Vec<Allocation>,
    /// Device of all arrays that were found since the last call of `take_device`.
    device: EndDevice,
}

impl<'a> FoundMemory<'a> {
    fn new(shared: &'a ContextState) -> Self {
        FoundMemory { shared, known: Vec::new(), device: EndDevice::None }
    }

    /// Returns the device of all arrays that were found since the last call of this function.
    fn take_device(&mut self) -> EndDevice {
        std::mem::take(&mut self.device)
    }

    /// Checks that the `bytes` bytes at `address` are in one allocation of GPU memory or pinned host memory. Otherwise returns an error, in
    /// which `what` describes the range.
    fn range(&mut self, address: u64, bytes: u64, argument: &'static CStr, what: impl Fn() -> String) -> Result<DeviceId, Error> {
        let refused = |reason: String| Err(Error::PieceMemory { argument, reason });
        if address == 0 {
            return refused(format!("{} is NULL: pass an address in GPU memory or pinned host memory", what()));
        }
        let holds = |known: &Allocation| address >= known.base && bytes <= known.bytes && address - known.base <= known.bytes - bytes;
        if let Some(at) = self.known.iter().position(holds) {
            self.known.swap(0, at);
            return Ok(self.known[0].device);
        }
        match self.shared.locate(address)? {
            None => refused(format!(
                "{} {address:#x} is pageable or unknown memory: allocate it with mpgpu, or register it as pinned memory",
                what()
            )),
            Some(found) if !holds(&found) => refused(format!(
                "{} {address:#x} with {bytes} bytes extends beyond its allocation ({} bytes at {:#x}): correct the address or the size",
                what(),
                found.bytes,
                found.base
            )),
            Some(found) if found.kind == MemoryKind::Pageable => {
                refused(format!("{} {address:#x} is pageable host memory: register it as pinned memory", what()))
            }
            Some(found) => {
                let device = found.device;
                self.known.push(found);
                Ok(device)
            }
        }
    }

    /// Checks one end of a block copy, including indices in host memory. Returns the description for the backend.
    fn end<'i>(&mut self, arrays: &BlockArrays<'_>, request: &BlockRequest<'_>, argument: &'static CStr) -> Result<BlockEnd<'i>, Error> {
        let name = argument.to_string_lossy();
        let refused = |reason: String| Err(Error::Pieces { argument: c"blocks", reason });
        let stride = if arrays.stride == 0 { request.bytes } else { arrays.stride };
        if stride < request.bytes {
            return refused(format!("{name}_stride={stride}: must be at least block_bytes ({}), or 0", request.bytes));
        }
        let Some(bytes) = arrays.blocks.checked_sub(1).and_then(|last| last.checked_mul(stride)?.checked_add(request.bytes)) else {
            return refused(format!("{name}_blocks={}: must be 1 or more, and the array must be smaller than 2^64 bytes", arrays.blocks));
        };
        for (layer, &array) in arrays.arrays.iter().enumerate() {
            let device = self.range(array, bytes, c"blocks", || format!("{name}[{layer}]"))?;
            self.device.add(device);
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
                refused(format!("count={count}: the arrays of {name} have {blocks} blocks; pass {name}_index or a smaller count"))
            };
        }
        if ![4, 8].contains(&width) || !arrays.index.is_multiple_of(u64::from(width)) {
            return refused(format!("index_bytes={width}: must be 4 or 8, and {name}_index must be aligned to it"));
        }
        let Some(bytes) = count.checked_mul(u64::from(width)).filter(|bytes| isize::try_from(*bytes).is_ok()) else {
            return refused(format!("count={count}: an index list of this length does not fit into memory; pass a smaller count"));
        };
        let place = self.shared.locate(arrays.index)?;
        if place.is_some_and(|place| !place.device.is_host()) {
            self.range(arrays.index, bytes, c"blocks", || format!("{name}_index"))?;
            return Ok(Indices::Later { address: arrays.index, width });
        }
        let pointer = std::ptr::with_exposed_provenance::<u8>(arrays.index as usize);
        // SAFETY: The caller of the C ABI guarantees that `count` indices are readable. They are aligned and not in memory of a GPU.
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
            Some((at, index)) => refused(format!("{name}_index[{at}]={index}: must be less than the number of blocks ({blocks})")),
        }
    }
}

/// Returns position and value of the first index that is not less than `blocks`. Returns `None` if all indices are less.
fn first_beyond<I: Copy + Into<u64>>(list: &[I], blocks: u64) -> Option<(usize, u64)> {
    // The loop has no early exit and no comparison, so that the compiler can vectorise it for any processor. If `blocks` and an index are
    // less than 2^63, the highest bit of `index - blocks` is 1 exactly if the index is less than `blocks`.
    let below = |all: u64, &index: &I| all & index.into().wrapping_sub(blocks) & !index.into();
    if blocks >> 63 != 0 || list.iter().fold(u64::MAX, below) >> 63 == 0 {
        list.iter().enumerate().map(|(at, &index)| (at, index.into())).find(|(_, index)| *index >= blocks)
    } else {
        None
    }
}
