//! Copies many pieces without a plan, by kernels with few thread blocks.
//!
//! A list in host memory is copied to pinned memory of the library before the call returns. The kernel reads a short list from the pinned
//! memory. A long list is first copied to GPU memory in the same stream, because a group of lanes of the kernel waits for each list entry
//! that it reads over the link. A list block consists of the pinned memory and the GPU memory for one list. It is kept, and reused after
//! the copy that reads the list has finished.

use super::completion::Finished;
use super::device::Mark;
use super::driver::{Driver, OutsideCapture, call, code, handle, lock};
use super::gpus::Gpus;
use super::kernel::HostEnds;
use super::owner::Owner;
use super::parts::Core;
use super::piece_parts::{KnownRanges, PieceLaunch};
use super::streams::Start;
use super::verify::Verdict;
use crate::backend::{BackendError, BlockEnd, Completion, Indices, KernelBounds, Pieces, Report, StreamHandle, index_out_of_range};
use crate::block_list::{BlockList, ListEnd, PIECE_LANES};
use crate::bridge::Segment;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::{Arc, Mutex};

/// Maximum number of list entries that each group of lanes reads over the link. For more entries, it is faster to copy the list to the GPU
/// first: such a copy starts after 7 us, and a read takes about 1 us (one H200).
const READS_PER_COPY: u64 = 8;
/// Size of the report that precedes a list in pinned memory, bytes. The report has two words, which the kernel sets if it finds an index
/// out of range.
const REPORT_BYTES: u64 = 64;
/// Maximum number of list blocks that one call polls to find one that is no longer in use.
const MOST_POLLED: usize = 16;

/// List blocks of all GPUs. The block that was polled least recently is at the front.
#[derive(Debug, Default)]
pub(super) struct Lists(Mutex<VecDeque<ListBlock>>);

/// List block: memory for one list.
#[derive(Debug)]
struct ListBlock {
    gpu: usize,
    /// Address of pinned memory for the report and the list.
    host: u64,
    /// Address of GPU memory for the list.
    device: u64,
    /// Maximum size of the list, bytes.
    bytes: u64,
    last: Option<LastUse>,
}

/// Last copy that uses a list block.
#[derive(Debug)]
struct LastUse {
    mark: Mark,
    /// Verdict of the copy if its kernel checks indices.
    verdict: Option<Arc<Verdict>>,
}

impl Core {
    /// Implements [`copy_pieces`](crate::backend::Backend::copy_pieces).
    pub fn copy_pieces(
        self: &Arc<Core>,
        stream: StreamHandle,
        pieces: &Pieces<'_>,
        bounds: KernelBounds<'_>,
        report: Report,
    ) -> Result<Option<Completion>, BackendError> {
        let found = self.streams.find(&self.gpus, stream)?;
        let primary = self.gpus.peered(found.gpu)?;
        let _current = primary.enter()?;
        let Some(kernel) = primary.kernel() else {
            return Err(BackendError::NotSupported(format!("the driver could not load the copy kernel of GPU {}: see the log", found.gpu)));
        };
        let mut known = KnownRanges::default();
        let writes_host = self.reach_of_pieces(found.gpu, pieces, &mut known)?;
        let is_capturing = found.is_capturing.map_or_else(|| self.gpus.driver.is_capturing(handle(stream.0)), Ok)?;
        let launch = PieceLaunch {
            primary,
            kernel,
            stream,
            gpu: found.gpu,
            blocks: bounds.multiprocessors.clamp(1, kernel.processors()),
            is_paced: bounds.is_paced && writes_host,
            helpers: if is_capturing { Vec::new() } else { self.helpers(found.gpu, &known, &bounds) },
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
        let bytes = list_bytes(pieces);
        if bytes == 0 && !pieces.is_checked_late() {
            self.launch_parts(launch, pieces, &list_of(pieces, 0, 0))?;
            return Ok(None);
        }
        if is_capturing {
            return Err(BackendError::NotSupported(
                "the stream is being captured, and a graph can contain neither a list of pieces nor an index list: capture only copies of \
                 blocks without index lists, or enqueue the copy outside of the capture"
                    .into(),
            ));
        }
        let mut block = self.lists.take(&self.gpus, launch.gpu, bytes)?;
        block.fill(pieces);
        let enqueued = block
            .reachable(driver, launch, pieces, bytes)
            .and_then(|base| self.launch_parts(launch, pieces, &list_of(pieces, base, block.host)));
        let verdict = match pieces {
            Pieces::Blocks(copy) if pieces.is_checked_late() => {
                Some(Arc::new(Verdict::of_report(block.host, (copy.dst.blocks, copy.src.blocks))))
            }
            _ => None,
        };
        let marked = enqueued.and_then(|()| launch.primary.record(launch.stream.0)).inspect_err(|_| {
            let _outside = OutsideCapture::enter(driver);
            // SAFETY: The handle is the caller's stream. The wait is necessary because after an error the caller may free the memory, and
            // the list block is reused.
            unsafe { (driver.cuStreamSynchronize)(handle(launch.stream.0)) };
        });
        let done = marked.map(|mark| block.last = Some(LastUse { mark, verdict: verdict.clone() }));
        self.lists.give_back(block);
        done.map(|()| verdict)
    }

    /// Returns true if the pieces write host memory. Returns an error if kernels of the GPU cannot access an end or an index list.
    fn reach_of_pieces(&self, gpu: usize, pieces: &Pieces<'_>, known: &mut KnownRanges) -> Result<bool, BackendError> {
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

/// Returns the size of the lists in host memory, bytes, as they are stored in a list block.
fn list_bytes(pieces: &Pieces<'_>) -> u64 {
    match pieces {
        Pieces::Listed(segments) => size_of_val(*segments) as u64,
        Pieces::Blocks(copy) => index_bytes(&copy.dst) + index_bytes(&copy.src),
    }
}

/// Returns the kernel argument for all pieces, without layers. `base` is the address of the list of pieces or of the index lists. `report` is
/// the address of the words that report an index.
fn list_of(pieces: &Pieces<'_>, base: u64, report: u64) -> BlockList {
    match pieces {
        Pieces::Listed(segments) => {
            let longest = segments.iter().map(|segment| segment.bytes).max().unwrap_or(0);
            BlockList { pieces: base, count: segments.len() as u64, ..BlockList::of(longest) }
        }
        Pieces::Blocks(copy) => {
            let (dst, src) = (ListEnd::new(&copy.dst, base), ListEnd::new(&copy.src, base + index_bytes(&copy.dst)));
            BlockList { dst, src, count: copy.count, report, ..BlockList::of(copy.bytes) }
        }
    }
}

/// Returns the size of an index list in host memory, rounded up to the alignment of the next list, bytes.
fn index_bytes(end: &BlockEnd<'_>) -> u64 {
    match end.indices {
        Indices::Narrow(indices) => size_of_val(indices).next_multiple_of(16) as u64,
        Indices::Wide(indices) => size_of_val(indices).next_multiple_of(16) as u64,
        Indices::InOrder | Indices::Later { .. } => 0,
    }
}

impl Lists {
    /// Removes and returns a list block that has at least `bytes` bytes and is not used by any copy in flight. Allocates a block if none of
    /// the polled ones is suitable. The GPU's context must be current.
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
        // The number of copies in flight is not limited. This call must not wait for an earlier copy, which may wait for a signal that the
        // calling thread sets later.
        ListBlock::new(gpus, gpu, bytes.next_power_of_two().max(64 << 10))
    }

    /// Adds a list block, so that later calls can reuse it.
    fn give_back(&self, block: ListBlock) {
        lock(&self.0).push_back(block);
    }

    /// Frees all list blocks. All work that uses them must have finished.
    pub fn release(&self, gpus: &Gpus) {
        for block in std::mem::take(&mut *lock(&self.0)) {
            block.settle_last();
            if let Ok(primary) = gpus.primary(block.gpu)
                && !primary.is_lost()
            {
                let _current = primary.enter();
                // SAFETY: `ListBlock::new` allocated the memory. No enqueued work uses it any more.
                unsafe { (gpus.driver.cuMemFreeHost)(handle(block.host as usize)) };
                // SAFETY: `ListBlock::new` allocated the memory. No enqueued work uses it any more.
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
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(gpus.driver, cuMemHostAlloc(&mut host, (REPORT_BYTES + bytes) as usize, PORTABLE)) }?;
        // SAFETY: The driver writes to a variable that outlives the call.
        let allocated = unsafe { call!(gpus.driver, cuMemAlloc(&mut device, bytes as usize)) };
        if let Err(error) = allocated {
            // SAFETY: The memory was allocated above, and no work uses it.
            unsafe { (gpus.driver.cuMemFreeHost)(host) };
            return Err(error);
        }
        let host = host.expose_provenance() as u64;
        Ok(ListBlock { gpu, host, device, bytes, last: None })
    }

    /// Returns true if the last copy that uses the block has finished.
    fn is_idle(&self, driver: &'static Driver) -> bool {
        let _outside = OutsideCapture::enter(driver);
        // SAFETY: The event belongs to this backend and has been recorded.
        self.last.as_ref().is_none_or(|last| unsafe { (driver.cuEventQuery)(last.mark.event()) } != code::NOT_READY)
    }

    /// Reads the report of the last copy, so that the list block can be reused.
    fn settle(&mut self) {
        self.settle_last();
        self.last = None;
    }

    fn settle_last(&self) {
        if let Some(verdict) = self.last.as_ref().and_then(|last| last.verdict.as_ref()) {
            verdict.settle();
        }
    }

    /// Clears the report, and copies the lists in host memory to the pinned memory after the report.
    fn fill(&self, pieces: &Pieces<'_>) {
        // SAFETY: The pinned memory belongs to this list block, which no copy uses.
        unsafe { with_exposed_provenance_mut::<[u64; 2]>(self.host as usize).write_volatile([0; 2]) };
        let mut at = self.host + REPORT_BYTES;
        let mut put = |address: *const u8, bytes: usize| {
            // SAFETY: The list block is large enough, because `list_bytes` computed the size of the same lists.
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

    /// Returns the address from which the kernel reads the list: an address in pinned memory for a short list, and in GPU memory for a long
    /// list. Enqueues the copy of a long list to GPU memory.
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
        // A kernel copies the list, because a copy engine would first finish the large copies of other streams in the same direction.
        let list = Segment { dst: self.device, src: host, bytes };
        let copier = launch.kernel.copier(HostEnds::Read, launch.blocks, false);
        // SAFETY: Both memory areas have at least `bytes` bytes, and no other copy uses them.
        unsafe { copier.launch(driver, &[list], handle(launch.stream.0)) }?;
        Ok(self.device)
    }
}

impl Verdict {
    /// Creates the verdict of a copy whose kernel writes an index out of range to the report at address `report`. `blocks` contains the
    /// numbers of blocks of the destination and source arrays.
    fn of_report(report: u64, blocks: (u64, u64)) -> Verdict {
        Verdict::read_by(move || {
            // SAFETY: The report is in pinned memory. `Verdict::settle` is called before this memory is reused or freed.
            let words = unsafe { with_exposed_provenance::<[u64; 2]>(report as usize).read_volatile() };
            (words[0] != 0).then(|| index_out_of_range(words, blocks))
        })
    }
}
