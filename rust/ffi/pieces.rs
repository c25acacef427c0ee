//! Functions of the C ABI for copies of many pieces without a plan.

use super::argument::{Out, Versioned, array, switch, versioned};
use super::context::find;
use super::guard::{Failure, guard};
use super::request;
use super::stream::stream_of;
use super::types::*;
use mpgpu_backend::{Completion, Report, Segment};
use mpgpu_contexts::{BlockArrays, BlockRequest, Context, Error, PieceOptions};
use mpgpu_core::plan::Relays;
use std::ffi::c_void;
use std::sync::Arc;

/// Description of a block copy: arrays of blocks of equal size, and index lists that select the blocks to copy.
/// Blocks are, for example, pages of a key-value cache or rows of a table. A layer is a pair of a destination array
/// and a source array. Initialise with `MP_BLOCKS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_blocks_t {
    /// Size of this struct, bytes. `MP_BLOCKS_INIT` sets it.
    pub size: usize,
    /// Addresses of the destination arrays. The array has `layers` elements.
    pub dst: *const *mut c_void,
    /// Addresses of the source arrays. The array has `layers` elements.
    pub src: *const *const c_void,
    /// Number of layers. The same blocks are copied in each layer.
    pub layers: u64,
    /// Size of a block, bytes.
    pub block_bytes: u64,
    /// Number of blocks to copy in each layer.
    pub count: u64,
    /// Distance between the starts of two consecutive blocks of a destination array, bytes. 0 selects `block_bytes`.
    pub dst_stride: u64,
    /// Distance between the starts of two consecutive blocks of a source array, bytes. 0 selects `block_bytes`.
    pub src_stride: u64,
    /// Number of blocks of each destination array. Indices of destination blocks must be smaller.
    pub dst_blocks: u64,
    /// Number of blocks of each source array. Indices of source blocks must be smaller.
    pub src_blocks: u64,
    /// Address of the index list of the destination: `count` unsigned integers in host memory or in memory of a GPU.
    /// NULL selects blocks 0 to `count` - 1.
    pub dst_index: *const c_void,
    /// Address of the index list of the source: `count` unsigned integers in host memory or in memory of a GPU. NULL
    /// selects blocks 0 to `count` - 1.
    pub src_index: *const c_void,
    /// Size of an index in both lists, bytes: 4 or 8. Each list must be aligned to this size.
    pub index_bytes: u32,
    /// Must be 0.
    pub reserved: u32,
}

/// Piece of `mp_copy_pieces`: a contiguous range of bytes to copy.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_segment_t {
    /// First byte of the destination.
    pub dst: *mut c_void,
    /// First byte of the source.
    pub src: *const c_void,
    /// Size, bytes. 0 is allowed.
    pub bytes: u64,
}

/// Options of a copy of pieces. Initialise with `MP_PIECE_OPTIONS_INIT`. A field with the value 0 selects the
/// default.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_piece_options_t {
    /// Size of this struct, bytes. `MP_PIECE_OPTIONS_INIT` sets it.
    pub size: usize,
    /// Maximum number of multiprocessors that the kernel occupies. 0 selects the value of `MPGPU_KERNEL_BLOCKS`,
    /// which is 4 by default. Four multiprocessors fill a PCIe 5 link.
    pub multiprocessors: u32,
    /// Switch for the pacing of writes to host memory. The default is the value of `MPGPU_PACED_WRITES`, or on if this
    /// variable is not set. If writes are paced, each group of threads of the kernel waits until its stores have
    /// arrived in host memory before it stores more. This bounds the bytes in flight. Without pacing, writes saturate
    /// the link, and a saturated link slows down other work of the GPU to about half of its speed. If the copy does not
    /// write to host memory, the switch has no effect.
    pub paced: mp_switch_value,
    /// Bit mask of the GPUs whose PCIe links may carry a part of a copy between host memory and another GPU. Bit `g`
    /// represents GPU `g`. A kernel on each such GPU copies a part directly, and later work in the stream waits for
    /// these kernels. If the mask is not 0, the first call creates the contexts of these GPUs, which takes up to a
    /// second. `MP_RELAY_NONE` allows no other GPU. 0 allows those of `MPGPU_RELAY_GPUS`, or, if it is not set, all
    /// GPUs whose context the process has created.
    pub relay_gpus: u64,
}

// SAFETY: The first field is `size: usize`. The other fields are integers and pointers.
unsafe impl Versioned for mp_blocks_t {
    const NAME: &'static str = stringify!(mp_blocks_t);
    const INIT: &'static str = "MP_BLOCKS_INIT";
    const FIRST_SIZE: usize = 104;
}

// SAFETY: The first field is `size: usize`. The other fields are integers.
unsafe impl Versioned for mp_piece_options_t {
    const NAME: &'static str = stringify!(mp_piece_options_t);
    const INIT: &'static str = "MP_PIECE_OPTIONS_INIT";
    const FIRST_SIZE: usize = 24;
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
        relays: (options.relay_gpus > 0).then(|| (0..Relays::NAMED).filter(|gpu| options.relay_gpus >> gpu & 1 != 0).collect()),
    })
}

/// Calls `enqueue`, which enqueues the copy. If `request` is not NULL, writes a new request for the copy to
/// `*request`.
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

/// Enqueues a copy of blocks in `stream`, after all earlier work in `stream` and before all later work. Does not wait
/// for the copy. A kernel copies the blocks, with one launch for up to 120 layers. No plan is made, so a call with a
/// new index list costs no planning. NULL `options` selects all defaults. If `request` is not NULL, `*request`
/// receives a request for the end of the copy. May be called from any thread, but not from a host function.
///
/// Block `dst_index[i]` of each destination array receives block `src_index[i]` of the source array of the same
/// layer. If the list of destinations contains a block twice, each byte of the block comes from one of the two
/// sources; which one is undefined. If a block is both a source and a destination of the same call, it is undefined
/// whether the block is read before or after it is written.
///
/// Index lists in host memory are read and checked before the call returns. Index lists in memory of a GPU are read
/// when the copy runs. If such a list contains an index that is out of range, the block is not copied. `mp_wait` for
/// the request and the next `mp_stream_synchronize` for `stream` then return `MP_ERROR_INVALID_ARGUMENT`, and the
/// text contains the position and the value of one such index.
///
/// The arrays are in memory of GPUs or in pinned host memory that `mp_alloc`, `mp_memory_register` or CUDA provides.
/// Arrays, and index lists in memory of a GPU, must stay allocated until the copy has finished. `blocks`, `options`,
/// the lists of addresses, and index lists in host memory are read during the call only.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` for an invalid field of `blocks` or `options`. The text contains its name and value.
/// - `MP_ERROR_INVALID_POINTER` for an array that is NULL, in pageable memory, or outside its allocation, and for an
///   index list in memory of a GPU that extends beyond its allocation.
/// - `MP_ERROR_NOT_SUPPORTED` if the GPU cannot access an array, or if the stream is being captured and an index list
///   is not NULL.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
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

/// Enqueues a copy of many small pieces in `stream`, after all earlier work in `stream` and before all later work.
/// Does not wait for the copy. A kernel copies the pieces, without a plan. For few large pieces, use `mp_plan`. NULL
/// `options` selects all defaults. If `request` is not NULL, `*request` receives a request for the end of the copy.
/// May be called from any thread, but not from a host function.
///
/// `pieces` has `count` elements, which are read during the call only. The pieces are copied in no particular order.
/// No destination may overlap another destination or a source. Overlaps are not checked. The memory must fulfil the
/// conditions for the arrays of `mp_copy_blocks`.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` for an invalid field of `options`, or if `pieces` is NULL and `count` is not 0.
/// - `MP_ERROR_INVALID_POINTER` for an address that is NULL, in pageable memory, or outside its allocation. The text
///   contains the index of the piece.
/// - `MP_ERROR_NOT_SUPPORTED` if the GPU cannot access a piece, or if the stream is being captured.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
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
        // SAFETY: Both types consist of two addresses and a size, with 64 bits each. The addresses are not
        // dereferenced here.
        let pieces = unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast::<Segment>(), pieces.len()) };
        with_request(context, request, |context, report| context.copy_pieces(pieces, options, stream_of(stream), report))
    })
}
