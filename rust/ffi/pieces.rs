//! Copies of many pieces without a plan.

use super::argument::{Out, Versioned, array, switch, versioned};
use super::context::find;
use super::guard::{Failure, guard};
use super::request;
use super::stream::stream_of;
use super::types::*;
use mpgpu_backend::{Completion, Report, Segment};
use mpgpu_contexts::{BlockArrays, BlockRequest, Context, Error, PieceOptions};
use std::ffi::c_void;
use std::sync::Arc;

/// Blocks of one size in arrays, which index lists name: pages of a key-value cache, rows of a table. Initialise with
/// `MP_BLOCKS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_blocks_t {
    /// `sizeof(mp_blocks_t)`.
    pub size: usize,
    /// First bytes of the destination arrays, `layers` of them.
    pub dst: *const *mut c_void,
    /// First bytes of the source arrays, `layers` of them.
    pub src: *const *const c_void,
    /// Pairs of arrays. The same blocks of each pair are copied.
    pub layers: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Blocks to copy in each layer.
    pub count: u64,
    /// Bytes from one block of a destination array to the next; 0 for `block_bytes`.
    pub dst_stride: u64,
    /// Bytes from one block of a source array to the next; 0 for `block_bytes`.
    pub src_stride: u64,
    /// Blocks of each destination array. Indices are compared with it.
    pub dst_blocks: u64,
    /// Blocks of each source array. Indices are compared with it.
    pub src_blocks: u64,
    /// `count` indices of destination blocks, unsigned, in host memory or in memory of a GPU; NULL for blocks 0 to `count` - 1.
    pub dst_index: *const c_void,
    /// `count` indices of source blocks, likewise.
    pub src_index: *const c_void,
    /// Bytes of an index, 4 or 8.
    pub index_bytes: u32,
    /// Must be 0.
    pub reserved: u32,
}

/// One piece of `mp_copy_pieces`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_segment_t {
    /// First byte of the destination.
    pub dst: *mut c_void,
    /// First byte of the source.
    pub src: *const c_void,
    /// Number of bytes; 0 is allowed.
    pub bytes: u64,
}

/// Bounds of a copy of pieces. Initialise with `MP_PIECE_OPTIONS_INIT`; a field that is 0 takes what the environment says.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_piece_options_t {
    /// `sizeof(mp_piece_options_t)`.
    pub size: usize,
    /// Multiprocessors that the kernel may occupy at most (`MPGPU_KERNEL_BLOCKS`). Four fill a PCIe 5 link.
    pub multiprocessors: u32,
    /// Whether writes to host memory stay below the share of the link that `MPGPU_HOST_WRITE_PERCENT` names. A link that is
    /// saturated with writes slows down other work of the GPU to half. On by default.
    pub paced: mp_switch_value,
}

// SAFETY: `size: usize` stands first; the rest are integers and pointers.
unsafe impl Versioned for mp_blocks_t {
    const NAME: &'static str = stringify!(mp_blocks_t);
    const INIT: &'static str = "MP_BLOCKS_INIT";
    const FIRST_SIZE: usize = 104;
}

// SAFETY: as above.
unsafe impl Versioned for mp_piece_options_t {
    const NAME: &'static str = stringify!(mp_piece_options_t);
    const INIT: &'static str = "MP_PIECE_OPTIONS_INIT";
    const FIRST_SIZE: usize = 16;
}

const _: () = assert!(size_of::<mp_segment_t>() == size_of::<Segment>() && size_of::<mp_blocks_t>() == 104);

fn piece_options(options: *const mp_piece_options_t) -> Result<PieceOptions, Failure> {
    if options.is_null() {
        return Ok(PieceOptions::default());
    }
    let options = versioned(options, c"options")?;
    Ok(PieceOptions {
        multiprocessors: (options.multiprocessors > 0).then_some(options.multiprocessors),
        paced: switch(c"paced", options.paced)?,
    })
}

/// Enqueues with `enqueue`, and writes a request if the caller wants one.
fn with_request(
    context: mp_context_t,
    request: *mut mp_request_t,
    enqueue: impl FnOnce(&Arc<Context>, Report) -> Result<Option<Completion>, Error>,
) -> Result<(), Failure> {
    let out = if request.is_null() { None } else { Some(Out::new(request, c"request")?) };
    let context = find(context)?;
    let copy = enqueue(&context, if out.is_some() { Report::End } else { Report::Nothing })?;
    if let (Some(out), Some(copy)) = (out, copy) {
        out.write(request::create(context, copy)?);
    }
    Ok(())
}

/// Copies blocks of arrays in `stream` by one kernel of the stream's GPU, without a plan: another list of blocks costs
/// no planning. It starts after all earlier work in `stream`, and later work there starts after it. Returns without waiting for
/// the copy. `request` may be NULL.
///
/// Block `dst_index[i]` of each destination array receives block `src_index[i]` of the source array of the same layer. Index
/// lists in host memory are read and checked before the call returns. Lists in memory of a GPU are read when the copy runs:
/// blocks whose index is out of range are not copied then, and `mp_wait` for the request or `mp_stream_synchronize` returns
/// `MP_ERROR_INVALID_ARGUMENT` with the position and the index. If a destination block is listed twice, each of its bytes is that
/// of one of the two sources. A block that is both source and destination of one call may be read before or after it is written.
///
/// Arrays lie in memory of GPUs or in pinned host memory (`mp_alloc`, `mp_memory_register`, or of CUDA); both must stay
/// allocated until the copy has run. Any thread, host functions excepted.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for a field of `blocks` or `options`, with its name and value;
/// `MP_ERROR_INVALID_POINTER` for an array that is NULL, pageable, or runs past its allocation; `MP_ERROR_NOT_SUPPORTED` where the
/// stream's GPU does not reach an array, and for a captured stream if an index list is not NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_copy_blocks(
    context: mp_context_t,
    blocks: *const mp_blocks_t,
    options: *const mp_piece_options_t,
    stream: mp_stream_t,
    request: *mut mp_request_t,
) -> mp_status_t {
    guard(|| {
        let blocks = versioned(blocks, c"blocks")?;
        let options = piece_options(options)?;
        if blocks.reserved != 0 {
            return Err(Failure::invalid(c"blocks", format!("reserved={}: must be 0", blocks.reserved)));
        }
        let layers = usize::try_from(blocks.layers).unwrap_or(usize::MAX);
        let dst: Vec<u64> = array(blocks.dst, layers, c"dst", c"layers")?.iter().map(|array| array.addr() as u64).collect();
        let src: Vec<u64> = array(blocks.src, layers, c"src", c"layers")?.iter().map(|array| array.addr() as u64).collect();
        let end =
            |arrays, stride, blocks, index: *const c_void| BlockArrays { arrays, stride, blocks, index: index.expose_provenance() as u64 };
        let asked = BlockRequest {
            dst: end(&dst, blocks.dst_stride, blocks.dst_blocks, blocks.dst_index),
            src: end(&src, blocks.src_stride, blocks.src_blocks, blocks.src_index),
            index_bytes: blocks.index_bytes,
            count: blocks.count,
            bytes: blocks.block_bytes,
        };
        with_request(context, request, |context, report| context.copy_blocks(&asked, options, stream_of(stream), report))
    })
}

/// Copies pieces in `stream` by one kernel of the stream's GPU, without a plan, in no particular order: no destination may
/// overlap another piece. Otherwise as `mp_copy_blocks`. The list is read before the call returns; overlaps are not checked. For
/// pieces that are many and small; few and large ones are for `mp_plan`. Any thread, host functions excepted.
///
/// Errors: as `mp_copy_blocks`, each naming the piece by its position.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_copy_pieces(
    context: mp_context_t,
    pieces: *const mp_segment_t,
    count: usize,
    options: *const mp_piece_options_t,
    stream: mp_stream_t,
    request: *mut mp_request_t,
) -> mp_status_t {
    guard(|| {
        let options = piece_options(options)?;
        let pieces = array(pieces, count, c"pieces", c"count")?;
        // SAFETY: both are two addresses and a size of 64 bits each; an address is not read as a pointer.
        let pieces = unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast::<Segment>(), pieces.len()) };
        with_request(context, request, |context, report| context.copy_pieces(pieces, options, stream_of(stream), report))
    })
}
