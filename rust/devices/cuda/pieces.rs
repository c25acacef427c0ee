//! Copies of many pieces by one kernel of few blocks, without a plan.
//!
//! A list in host memory is copied into pinned memory of the library before the call returns. The kernel reads a short list there;
//! a long one is copied to the GPU first, in the same stream, because a group of the kernel waits for each of its indices that it
//! reads over the link. Blocks of both kinds of memory are kept, and used again when the copy that read them has finished.

use super::completion::Finished;
use super::device::{Mark, Primary};
use super::driver::{Driver, OutsideCapture, call, code, handle, lock};
use super::gpus::Gpus;
use super::kernel::Kernel;
use super::owner::Owner;
use super::parts::Core;
use super::streams::Start;
use super::verify::Verdict;
use crate::backend::{
    BackendError, BlockCopy, BlockEnd, Completion, Endpoints, Indices, KernelBounds, Pieces, Report, StreamHandle, index_out_of_range,
};
use crate::block_list::{BlockList, LAYERS_PER_LAUNCH, ListEnd, PIECE_LANES};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::{Arc, Mutex};

/// Pieces that a group reads over the link, one after the other, in the time that a copy of the list to the GPU takes to start (7 us; a
/// read takes about 1 us). One H200.
const READS_PER_COPY: u64 = 8;
/// Bytes in front of a list: the two words that report an index.
const REPORT_BYTES: u64 = 64;
/// Maximum number of blocks that one call polls to find one that is no longer in use.
const MOST_POLLED: usize = 16;

/// Memory for lists, by GPU. Blocks at the front were not polled for the longest time.
#[derive(Debug, Default)]
pub(super) struct Lists(Mutex<VecDeque<ListBlock>>);

/// Memory for one list.
#[derive(Debug)]
struct ListBlock {
    gpu: usize,
    /// Pinned memory: a report, and the list.
    host: u64,
    /// Memory of the GPU for the list.
    device: u64,
    bytes: u64,
    last: Option<LastUse>,
}

/// The copy that reads a list.
#[derive(Debug)]
struct LastUse {
    mark: Mark,
    /// Of one that may report an index.
    verdict: Option<Arc<Verdict>>,
}

/// A call on its way to the driver.
struct PieceLaunch<'a> {
    primary: &'a Primary,
    kernel: &'a Kernel,
    stream: StreamHandle,
    gpu: usize,
    blocks: u32,
    is_paced: bool,
}

impl Core {
    /// See [`copy_pieces`](crate::backend::Backend::copy_pieces).
    pub fn copy_pieces(
        self: &Arc<Core>,
        stream: StreamHandle,
        pieces: &Pieces<'_>,
        bounds: KernelBounds,
        report: Report,
    ) -> Result<Option<Completion>, BackendError> {
        let found = self.streams.find(&self.gpus, stream)?;
        let primary = self.gpus.peered(found.gpu)?;
        let _current = primary.enter()?;
        let Some(kernel) = primary.kernel() else {
            return Err(BackendError::NotSupported(format!("the driver could not load the copy kernel of GPU {}; see the log", found.gpu)));
        };
        let writes_host = self.reach_of_pieces(found.gpu, pieces)?;
        let is_capturing = found.is_capturing.map_or_else(|| self.gpus.driver.is_capturing(handle(stream.0)), Ok)?;
        let launch = PieceLaunch {
            primary,
            kernel,
            stream,
            gpu: found.gpu,
            blocks: bounds.multiprocessors.clamp(1, kernel.processors()),
            is_paced: bounds.is_paced && writes_host,
        };
        let verdict = self.enqueue_pieces(&launch, pieces, is_capturing)?;
        if report == Report::Nothing {
            return Ok(None);
        }
        let start = Start { gpu: found.gpu, number: found.number, behind: self.behind(stream, &found) };
        let owner: Arc<dyn Owner> = self.clone();
        Ok(Some(Arc::new(Finished::new(owner, primary.record(stream.0)?, &start, verdict)) as Completion))
    }

    fn enqueue_pieces(
        &self,
        launch: &PieceLaunch<'_>,
        pieces: &Pieces<'_>,
        is_capturing: bool,
    ) -> Result<Option<Arc<Verdict>>, BackendError> {
        let driver = self.gpus.driver;
        let picoseconds = |lanes: u32| match launch.is_paced {
            true => self.host_kernels.picoseconds(launch.gpu, launch.blocks * (PIECE_LANES / lanes)),
            false => 0,
        };
        let bytes = list_bytes(pieces);
        if bytes == 0 && !pieces.is_checked_late() {
            if let Pieces::Blocks(copy) = pieces {
                let list = block_list(copy, 0, 0);
                launch.blocks_of(driver, &BlockList { picoseconds: picoseconds(list.lanes), ..list }, copy.layers)?;
            }
            return Ok(None);
        }
        if is_capturing {
            return Err(BackendError::NotSupported(
                "the stream is being captured, and a graph cannot keep a list of host memory, nor report an index: capture blocks in order \
                 alone, or copy outside of the capture"
                    .into(),
            ));
        }
        let mut block = self.lists.take(&self.gpus, launch.gpu, bytes)?;
        block.fill(pieces);
        let enqueued = block.reachable(driver, launch, pieces, bytes).and_then(|base| match pieces {
            Pieces::Listed(segments) => {
                let longest = segments.iter().map(|segment| segment.bytes).max().unwrap_or(0);
                let list = BlockList { pieces: base, count: segments.len() as u64, ..BlockList::of(longest) };
                launch.list(driver, &BlockList { picoseconds: picoseconds(list.lanes), ..list })
            }
            Pieces::Blocks(copy) => {
                let list = block_list(copy, base, block.host);
                launch.blocks_of(driver, &BlockList { picoseconds: picoseconds(list.lanes), ..list }, copy.layers)
            }
        });
        let verdict = match pieces {
            Pieces::Blocks(copy) if pieces.is_checked_late() => {
                Some(Arc::new(Verdict::of_report(block.host, (copy.dst.blocks, copy.src.blocks))))
            }
            _ => None,
        };
        let marked = enqueued.and_then(|()| launch.primary.record(launch.stream.0)).inspect_err(|_| {
            let _outside = OutsideCapture::enter(driver);
            // SAFETY: the caller's stream. Whoever gets the error may free its memory, and the list is used again.
            unsafe { (driver.cuStreamSynchronize)(handle(launch.stream.0)) };
        });
        let done = marked.map(|mark| block.last = Some(LastUse { mark, verdict: verdict.clone() }));
        self.lists.give_back(block);
        done.map(|()| verdict)
    }

    /// True if an end lies in host memory that the pieces write. An error if the GPU does not reach an end.
    fn reach_of_pieces(&self, gpu: usize, pieces: &Pieces<'_>) -> Result<bool, BackendError> {
        let mut known = KnownRanges::default();
        let mut writes_host = false;
        match pieces {
            Pieces::Listed(segments) => {
                for segment in segments.iter().filter(|segment| segment.bytes > 0) {
                    writes_host |= known.is_host(self, gpu, segment.dst, segment.bytes)?;
                    known.is_host(self, gpu, segment.src, segment.bytes)?;
                }
            }
            Pieces::Blocks(copy) => {
                let bytes = |end: &BlockEnd<'_>| end.blocks.saturating_sub(1) * end.stride + copy.bytes;
                for layer in copy.layers {
                    writes_host |= known.is_host(self, gpu, layer.dst, bytes(&copy.dst))?;
                    known.is_host(self, gpu, layer.src, bytes(&copy.src))?;
                }
                for end in [&copy.dst, &copy.src] {
                    if let Indices::Later { address, width } = end.indices {
                        known.is_host(self, gpu, address, copy.count * u64::from(width))?;
                    }
                }
            }
        }
        Ok(writes_host)
    }
}

/// Ranges whose reach was asked for in this call, the latest first.
#[derive(Default)]
struct KnownRanges(Vec<(Range<u64>, bool)>);

impl KnownRanges {
    /// True for host memory. An error if kernels of the GPU do not reach it.
    fn is_host(&mut self, core: &Core, gpu: usize, address: u64, bytes: u64) -> Result<bool, BackendError> {
        let end = address.saturating_add(bytes);
        if let Some(at) = self.0.iter().position(|(range, _)| range.start <= address && end <= range.end) {
            self.0.swap(0, at);
            return Ok(self.0[0].1);
        }
        let attributes = core.gpus.attributes(address)?;
        if !core.kernel_reaches(gpu, address, bytes, &attributes)? {
            return Err(BackendError::NotSupported(format!(
                "GPU {gpu} does not reach {address:#x} ({bytes} bytes): pageable host memory, or memory of a GPU without peer access; allocate \
                 or register host memory as pinned, or use a plan"
            )));
        }
        let is_host = !attributes.is_device();
        self.0.push((attributes.uniform_range().unwrap_or(address..end), is_host));
        Ok(is_host)
    }
}

/// Bytes of what of a list lies in host memory.
fn list_bytes(pieces: &Pieces<'_>) -> u64 {
    let of = |end: &BlockEnd<'_>| match end.indices {
        Indices::Narrow(indices) => size_of_val(indices).next_multiple_of(16) as u64,
        Indices::Wide(indices) => size_of_val(indices).next_multiple_of(16) as u64,
        Indices::InOrder | Indices::Later { .. } => 0,
    };
    match pieces {
        Pieces::Listed(segments) => size_of_val(*segments) as u64,
        Pieces::Blocks(copy) => of(&copy.dst) + of(&copy.src),
    }
}

/// The argument of a block copy without its layers. `base` is where its indices lie, `report` where one is reported.
fn block_list(copy: &BlockCopy<'_>, base: u64, report: u64) -> BlockList {
    let dst = ListEnd::new(&copy.dst, base);
    let own = match copy.dst.indices {
        Indices::Narrow(indices) => size_of_val(indices).next_multiple_of(16) as u64,
        Indices::Wide(indices) => size_of_val(indices).next_multiple_of(16) as u64,
        Indices::InOrder | Indices::Later { .. } => 0,
    };
    BlockList { dst, src: ListEnd::new(&copy.src, base + own), count: copy.count, report, ..BlockList::of(copy.bytes) }
}

impl PieceLaunch<'_> {
    /// Launches the kernel, once for as many layers as an argument holds.
    fn blocks_of(&self, driver: &Driver, list: &BlockList, layers: &[Endpoints]) -> Result<(), BackendError> {
        layers.chunks(LAYERS_PER_LAUNCH).try_for_each(|layers| self.list(driver, &list.with_layers(layers)))
    }

    fn list(&self, driver: &Driver, list: &BlockList) -> Result<(), BackendError> {
        // SAFETY: the GPU reaches all ends, as `reach_of_pieces` has found, and indices are compared with the number of blocks.
        unsafe { self.kernel.copy_blocks(driver, list, self.blocks, handle(self.stream.0)) }
    }
}

impl Lists {
    /// A block with room for so many bytes, which no copy reads any more. The GPU's context is current.
    fn take(&self, gpus: &Gpus, gpu: usize, bytes: u64) -> Result<ListBlock, BackendError> {
        let mut blocks = lock(&self.0);
        let mut polled = 0;
        for _ in 0..blocks.len() {
            if polled == MOST_POLLED {
                break;
            }
            let Some(mut block) = blocks.pop_front() else { break };
            if block.gpu == gpu && block.bytes >= bytes {
                if block.is_idle(gpus.driver) {
                    block.settle();
                    return Ok(block);
                }
                polled += 1;
            }
            blocks.push_back(block);
        }
        drop(blocks);
        // The number of copies in flight is not limited. A call that waited for an earlier copy could wait for a signal that the same thread
        // raises later.
        ListBlock::new(gpus, gpu, bytes.next_power_of_two().max(64 << 10))
    }

    fn give_back(&self, block: ListBlock) {
        lock(&self.0).push_back(block);
    }

    /// Frees all memory. All work has finished.
    pub fn release(&self, gpus: &Gpus) {
        for block in std::mem::take(&mut *lock(&self.0)) {
            block.settle_last();
            if let Ok(primary) = gpus.primary(block.gpu)
                && !primary.is_lost()
            {
                let _current = primary.enter();
                // SAFETY: allocated in `ListBlock::new`; nothing reads them any more.
                unsafe { (gpus.driver.cuMemFreeHost)(handle(block.host as usize)) };
                // SAFETY: as above.
                unsafe { (gpus.driver.cuMemFree)(block.device) };
            }
        }
    }
}

impl ListBlock {
    fn new(gpus: &Gpus, gpu: usize, bytes: u64) -> Result<ListBlock, BackendError> {
        const PORTABLE: u32 = 1;
        let _outside = OutsideCapture::enter(gpus.driver);
        let (mut host, mut device): (*mut c_void, u64) = (std::ptr::null_mut(), 0);
        // SAFETY: the output is valid for the call.
        unsafe { call!(gpus.driver, cuMemHostAlloc(&mut host, (REPORT_BYTES + bytes) as usize, PORTABLE)) }?;
        // SAFETY: as above.
        let allocated = unsafe { call!(gpus.driver, cuMemAlloc(&mut device, bytes as usize)) };
        if let Err(error) = allocated {
            // SAFETY: allocated above.
            unsafe { (gpus.driver.cuMemFreeHost)(host) };
            return Err(error);
        }
        let host = host.expose_provenance() as u64;
        Ok(ListBlock { gpu, host, device, bytes, last: None })
    }

    /// True if the copy that read the list last has finished.
    fn is_idle(&self, driver: &'static Driver) -> bool {
        let _outside = OutsideCapture::enter(driver);
        // SAFETY: an event of ours, which was recorded.
        self.last.as_ref().is_none_or(|last| unsafe { (driver.cuEventQuery)(last.mark.event()) } != code::NOT_READY)
    }

    /// Reads the report of the last copy before the words are used again.
    fn settle(&mut self) {
        self.settle_last();
        self.last = None;
    }

    fn settle_last(&self) {
        if let Some(verdict) = self.last.as_ref().and_then(|last| last.verdict.as_ref()) {
            verdict.settle();
        }
    }

    /// Clears the report and copies what lies in host memory behind it.
    fn fill(&self, pieces: &Pieces<'_>) {
        // SAFETY: pinned memory of this block, which no copy uses.
        unsafe { with_exposed_provenance_mut::<[u64; 2]>(self.host as usize).write_volatile([0; 2]) };
        let mut at = self.host + REPORT_BYTES;
        let mut put = |address: *const u8, bytes: usize| {
            // SAFETY: `list_bytes` has counted the same bytes, for which the block has room.
            unsafe { with_exposed_provenance_mut::<u8>(at as usize).copy_from_nonoverlapping(address, bytes) };
            at += bytes.next_multiple_of(16) as u64;
        };
        match pieces {
            Pieces::Listed(segments) => put(segments.as_ptr().cast(), size_of_val(*segments)),
            Pieces::Blocks(copy) => {
                for end in [&copy.dst, &copy.src] {
                    match end.indices {
                        Indices::Narrow(indices) => put(indices.as_ptr().cast(), size_of_val(indices)),
                        Indices::Wide(indices) => put(indices.as_ptr().cast(), size_of_val(indices)),
                        Indices::InOrder | Indices::Later { .. } => {}
                    }
                }
            }
        }
    }

    /// The address at which the kernel reads the list: here, or in the GPU's memory after a copy in the same stream.
    fn reachable(&self, driver: &Driver, launch: &PieceLaunch<'_>, pieces: &Pieces<'_>, bytes: u64) -> Result<u64, BackendError> {
        let (count, longest) = match pieces {
            Pieces::Listed(segments) => (segments.len() as u64, segments.iter().map(|segment| segment.bytes).max().unwrap_or(0)),
            Pieces::Blocks(copy) => (copy.count * copy.layers.len() as u64, copy.bytes),
        };
        let groups = u64::from(launch.blocks * (PIECE_LANES / BlockList::of(longest).lanes));
        let host = self.host + REPORT_BYTES;
        if bytes == 0 || count <= READS_PER_COPY * groups {
            return Ok(host);
        }
        // SAFETY: both have room for so many bytes, and are this copy's alone.
        unsafe { call!(driver, cuMemcpyAsync(self.device, host, bytes as usize, handle(launch.stream.0))) }?;
        Ok(self.device)
    }
}

impl Verdict {
    /// The verdict on a copy whose kernel reports an index out of range at `report`.
    fn of_report(report: u64, blocks: (u64, u64)) -> Verdict {
        Verdict::read_by(move || {
            // SAFETY: pinned memory, which is not used again before the verdict has been settled.
            let words = unsafe { with_exposed_provenance::<[u64; 2]>(report as usize).read_volatile() };
            (words[0] != 0).then(|| index_out_of_range(words, blocks))
        })
    }
}
