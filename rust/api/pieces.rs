//! Copies of many pieces without a plan.

use crate::buffer::{Buffer, Element, End, Keep, Slice};
use crate::context::{Context, refused};
use crate::plan::{Request, Transfer};
use crate::stream::Stream;
use mpgpu_backend::{Completion, Report, Segment, StreamHandle};
use mpgpu_contexts::{self as context, Error, PieceOptions};
use std::marker::PhantomData;

mod sealed {
    pub trait Index {}
    impl Index for u32 {}
    impl Index for u64 {}
}

/// Type of a block index: `u32` or `u64`.
pub trait BlockIndex: Element + sealed::Index {}

impl BlockIndex for u32 {}
impl BlockIndex for u64 {}

/// List of block indices: a slice of numbers, or a buffer in memory of a GPU.
#[derive(Clone, Debug)]
pub struct BlockIndices<'a> {
    list: End,
    width: u32,
    /// True if the list is a buffer, which is read when the copy runs.
    is_buffer: bool,
    of: PhantomData<&'a [u64]>,
}

impl BlockIndices<'_> {
    fn len(&self) -> u64 {
        self.list.bytes / u64::from(self.width)
    }
}

impl<'a, I: BlockIndex> From<&'a [I]> for BlockIndices<'a> {
    /// Creates a list from numbers, which are read before the function that enqueues the copy returns.
    fn from(list: &'a [I]) -> BlockIndices<'a> {
        // SAFETY: the numbers are borrowed for the lifetime of the list, and no work reads them after the call that uses the list.
        let end = unsafe { End::of_host(list.as_ptr().cast(), size_of_val(list)) };
        BlockIndices { list: end, width: size_of::<I>() as u32, is_buffer: false, of: PhantomData }
    }
}

impl<'a, I: BlockIndex, const N: usize> From<&'a [I; N]> for BlockIndices<'a> {
    fn from(list: &'a [I; N]) -> BlockIndices<'a> {
        BlockIndices::from(list.as_slice())
    }
}

impl<'a, I: BlockIndex> From<&'a Vec<I>> for BlockIndices<'a> {
    fn from(list: &'a Vec<I>) -> BlockIndices<'a> {
        BlockIndices::from(list.as_slice())
    }
}

impl<I: BlockIndex> From<&Slice<I>> for BlockIndices<'_> {
    /// Creates a list from a range of a buffer in memory of a GPU, which is read when the copy runs.
    fn from(list: &Slice<I>) -> Self {
        BlockIndices { list: End::from(list), width: size_of::<I>() as u32, is_buffer: true, of: PhantomData }
    }
}

impl<I: BlockIndex> From<&Buffer<I>> for BlockIndices<'_> {
    /// Creates a list from a buffer in memory of a GPU, which is read when the copy runs.
    fn from(list: &Buffer<I>) -> Self {
        BlockIndices { list: End::from(list), width: size_of::<I>() as u32, is_buffer: true, of: PhantomData }
    }
}

/// Arrays of blocks at one end of a block copy: one array for each layer, all of the same size. Keeps its buffers alive.
#[derive(Clone, Debug)]
pub struct BlockArrays<'a> {
    arrays: Vec<End>,
    block_bytes: u64,
    stride: u64,
    indices: Option<BlockIndices<'a>>,
}

impl<'a> BlockArrays<'a> {
    /// Creates arrays of blocks of `block_bytes` bytes from buffers, or from ranges of buffers. Blocks follow each other without gaps.
    /// Without a call of [`indices`](BlockArrays::indices), blocks 0, 1, 2 and so on are copied.
    pub fn new<E: Into<End>>(arrays: impl IntoIterator<Item = E>, block_bytes: u64) -> BlockArrays<'a> {
        BlockArrays { arrays: arrays.into_iter().map(Into::into).collect(), block_bytes, stride: block_bytes, indices: None }
    }

    /// Sets the distance between the starts of two consecutive blocks, in bytes. It must be at least the size of a block.
    #[must_use]
    pub fn stride(self, bytes: u64) -> BlockArrays<'a> {
        BlockArrays { stride: bytes, ..self }
    }

    /// Sets the indices of the blocks to copy.
    #[must_use]
    pub fn indices(self, list: impl Into<BlockIndices<'a>>) -> BlockArrays<'a> {
        BlockArrays { indices: Some(list.into()), ..self }
    }

    /// Returns the number of blocks that fit into each array.
    fn blocks(&self, name: &'static str) -> Result<u64, Error> {
        let Some(first) = self.arrays.first() else { return Ok(0) };
        if let Some((index, other)) = self.arrays.iter().enumerate().find(|(_, array)| array.bytes != first.bytes) {
            let reason = format!("this array has {} bytes and array 0 has {}: they must have the same size", other.bytes, first.bytes);
            return Err(Error::Option { name, value: format!("array {index}"), reason });
        }
        if self.stride < self.block_bytes {
            let reason = format!("the stride must be at least the size of a block, {} bytes", self.block_bytes);
            return Err(Error::Option { name, value: format!("stride {}", self.stride), reason });
        }
        // If block size and stride are 0, the array has one block.
        Ok(first.bytes.checked_sub(self.block_bytes).map_or(0, |rest| rest.checked_div(self.stride).unwrap_or(0) + 1))
    }

    fn index_address(&self) -> u64 {
        self.indices.as_ref().map_or(0, |indices| indices.list.address)
    }
}

impl Context {
    /// Copies blocks of arrays in `stream` by one kernel, without a plan, after all earlier work in `stream` and before all later work.
    /// Does not block. In each array, the block at position `i` of the index list of `dst` receives the block at position `i` of the
    /// index list of `src`.
    ///
    /// A slice of indices is read and checked before this function returns. A buffer of indices is read when the copy runs: blocks whose
    /// index is out of range are then not copied, and [`Request::wait`] and [`Stream::synchronize`] return an error. If a destination block
    /// is listed twice, each of its bytes comes from one of the two sources. An end without an index list uses blocks 0, 1, 2 and so on.
    ///
    /// ```
    /// # use mpgpu::{BackendChoice, Context, ContextOptions};
    /// use mpgpu::{BlockArrays, Buffer, Device, PieceOptions, Stream};
    ///
    /// # let options = ContextOptions { backend: Some(BackendChoice::Host), topology: Some("beluga".into()), ..Default::default() };
    /// # let ctx = Context::with_options(&options)?;
    /// const PAGE: u64 = 4096;
    /// let pages: Vec<u8> = (0..8).flat_map(|page| vec![page; PAGE as usize]).collect();
    /// let stream = Stream::new(&ctx, Device::gpu(0))?;
    /// let gpu = Buffer::from_slice(&ctx, Device::gpu(0), &pages)?;
    /// let host = Buffer::<u8>::zeroed(&ctx, Device::HOST, 3 * PAGE as usize)?;
    ///
    /// // Pages 6, 1 and 3 of the GPU are copied to pages 0, 1 and 2 in host memory.
    /// let evicted = BlockArrays::new([&gpu], PAGE).indices(&[6_u32, 1, 3]);
    /// ctx.copy_blocks(&BlockArrays::new([&host], PAGE), &evicted, &PieceOptions::default(), &stream)?.wait()?;
    /// let firsts: Vec<u8> = host.to_vec(&stream)?.into_iter().step_by(PAGE as usize).collect();
    /// assert_eq!(firsts, [6, 1, 3]);
    ///
    /// let beyond = BlockArrays::new([&gpu], PAGE).indices(&[6_u32, 1, 8]);
    /// let error = ctx.copy_blocks(&BlockArrays::new([&host], PAGE), &beyond, &PieceOptions::default(), &stream).unwrap_err();
    /// assert!(error.to_string().contains("src_index[2]=8"));
    /// # Ok::<(), mpgpu::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error if an index of a slice is out of range, if the two ends differ in the number of arrays, in the size of a block, in
    /// the length of their lists or in the size of their indices, if an array is pageable host memory or memory of another context, or if
    /// the GPU of the stream cannot access an array. Returns an error for a captured stream if there is a list.
    pub fn copy_blocks(
        &self,
        dst: &BlockArrays<'_>,
        src: &BlockArrays<'_>,
        options: &PieceOptions,
        stream: &Stream,
    ) -> Result<Request, Error> {
        let completion = self.submit_blocks(dst, src, options, stream, Report::End)?;
        Ok(Request::of_pieces(completion.ok_or_else(no_request)?, self.clone()))
    }

    /// Copies blocks like [`copy_blocks`](Context::copy_blocks), without a request. This costs less.
    ///
    /// # Errors
    ///
    /// Returns the errors of `copy_blocks`.
    pub fn enqueue_blocks(
        &self,
        dst: &BlockArrays<'_>,
        src: &BlockArrays<'_>,
        options: &PieceOptions,
        stream: &Stream,
    ) -> Result<(), Error> {
        self.submit_blocks(dst, src, options, stream, Report::Nothing).map(drop)
    }

    /// Copies pieces in `stream` by one kernel, without a plan, after all earlier work in `stream` and before all later work. Does not
    /// block. A piece is a pair of a destination and a source of equal size.
    ///
    /// Use this function for many small pieces, and a [`plan`](Context::plan) for few large transfers. The pieces are copied in no
    /// particular order. If a destination overlaps another piece, the values of its elements are unspecified.
    ///
    /// # Errors
    ///
    /// Returns an error if the source and destination of a piece differ in size, are pageable host memory or belong to another context, or
    /// if the GPU of the stream cannot access them. The text contains the index of the piece. Returns an error for a captured stream.
    pub fn copy_pieces<T: Into<Transfer>>(
        &self,
        pieces: impl IntoIterator<Item = T>,
        options: &PieceOptions,
        stream: &Stream,
    ) -> Result<Request, Error> {
        let completion = self.submit_pieces(pieces, options, stream, Report::End)?;
        Ok(Request::of_pieces(completion.ok_or_else(no_request)?, self.clone()))
    }

    /// Copies pieces like [`copy_pieces`](Context::copy_pieces), without a request. This costs less.
    ///
    /// # Errors
    ///
    /// Returns the errors of `copy_pieces`.
    pub fn enqueue_pieces<T: Into<Transfer>>(
        &self,
        pieces: impl IntoIterator<Item = T>,
        options: &PieceOptions,
        stream: &Stream,
    ) -> Result<(), Error> {
        self.submit_pieces(pieces, options, stream, Report::Nothing).map(drop)
    }

    fn submit_blocks(
        &self,
        dst: &BlockArrays<'_>,
        src: &BlockArrays<'_>,
        options: &PieceOptions,
        stream: &Stream,
        report: Report,
    ) -> Result<Option<Completion>, Error> {
        stream.refuse_shared_capture()?;
        let handle = stream.handle_in(self)?;
        for (layer, ends) in dst.arrays.iter().zip(&src.arrays).enumerate() {
            self.check_ends(layer, [ends.0, ends.1])?;
        }
        let invalid = |value: String, reason: &str| Err(Error::Option { name: "blocks", value, reason: reason.into() });
        if dst.block_bytes != src.block_bytes {
            let sizes = format!("{} and {} bytes", dst.block_bytes, src.block_bytes);
            return invalid(sizes, "blocks of the destination and of the source must have the same size");
        }
        let blocks = [dst.blocks("dst")?, src.blocks("src")?];
        let lists = [&dst.indices, &src.indices];
        for list in lists.into_iter().flatten() {
            self.check_ends(0, [&list.list])?;
            if list.is_buffer && list.list.device.is_host() {
                return invalid("an index list in a host buffer".into(), "pass a slice of numbers, or a buffer in memory of a GPU");
            }
        }
        let (count, index_bytes) = match lists {
            [Some(to), Some(from)] if to.len() != from.len() => {
                return invalid(format!("{} and {} indices", to.len(), from.len()), "both lists must have the same length");
            }
            [Some(to), Some(from)] if to.width != from.width => {
                return invalid(format!("indices of {} and {} bytes", to.width, from.width), "both lists must have the same type");
            }
            [Some(list), _] | [None, Some(list)] => (list.len(), list.width),
            [None, None] if blocks[0] != blocks[1] => {
                return invalid(
                    format!("{} and {} blocks", blocks[0], blocks[1]),
                    "without an index list, both ends must have the same number of blocks",
                );
            }
            [None, None] => (blocks[0], 8),
        };
        let addresses = [dst, src].map(|end| end.arrays.iter().map(|array| array.address).collect::<Vec<u64>>());
        let end = |of: &BlockArrays<'_>, number: usize| context::BlockArrays {
            arrays: &addresses[number],
            stride: of.stride,
            blocks: blocks[number],
            index: of.index_address(),
        };
        let request = context::BlockRequest { dst: end(dst, 0), src: end(src, 1), index_bytes, count, bytes: dst.block_bytes };
        let keep = foreign(dst.arrays.iter().chain(&src.arrays));
        self.submit_held(keep, report, |report| self.runtime.copy_blocks(&request, *options, handle, report))
    }

    fn submit_pieces<T: Into<Transfer>>(
        &self,
        pieces: impl IntoIterator<Item = T>,
        options: &PieceOptions,
        stream: &Stream,
        report: Report,
    ) -> Result<Option<Completion>, Error> {
        stream.refuse_shared_capture()?;
        let handle: StreamHandle = stream.handle_in(self)?;
        let pieces: Vec<Transfer> = pieces.into_iter().map(Into::into).collect();
        let mut segments = Vec::with_capacity(pieces.len());
        for (index, Transfer { dst, src }) in pieces.iter().enumerate() {
            self.check_ends(index, [dst, src])?;
            if dst.bytes != src.bytes {
                let sizes = format!("the destination has {} bytes and the source {}", dst.bytes, src.bytes);
                return Err(refused(index, format!("{sizes}: they must have the same size")));
            }
            segments.push(Segment { dst: dst.address, src: src.address, bytes: dst.bytes });
        }
        let keep = foreign(pieces.iter().flat_map(|piece| [&piece.dst, &piece.src]));
        self.submit_held(keep, report, |report| self.runtime.copy_pieces(&segments, *options, handle, report))
    }

    /// Enqueues a copy with `submit`, and keeps memory of other libraries alive until the copy has ended. Memory of the context needs no
    /// such reference, because freeing it waits for all work.
    fn submit_held(
        &self,
        keep: Vec<Keep>,
        report: Report,
        submit: impl FnOnce(Report) -> Result<Option<Completion>, Error>,
    ) -> Result<Option<Completion>, Error> {
        let completion = submit(if keep.is_empty() { report } else { Report::End })?;
        if let Some(completion) = completion.as_ref().filter(|_| !keep.is_empty()) {
            let held = keep.clone();
            if self.runtime.call_when_done(completion.clone(), Box::new(move |_| drop(held))).is_err() {
                // The callback that releases the memory could not be registered, so this call waits for the copy.
                let _ = completion.wait();
            }
        }
        Ok(completion)
    }
}

/// Returns the references to memory that the context has not allocated.
fn foreign<'a>(ends: impl Iterator<Item = &'a End>) -> Vec<Keep> {
    ends.filter_map(|end| end.keep.clone()).filter(|keep| keep.is_foreign).collect()
}

fn no_request() -> Error {
    mpgpu_backend::no_completion().into()
}
