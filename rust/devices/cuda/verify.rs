//! Compares destinations with sources after an execution (`MPGPU_VERIFY=bytes`). The comparison runs in stream order and does not block the
//! caller.
//!
//! Source and destination are copied block by block to pinned memory, where a host function compares them. The executions of a stream share
//! two blocks, and events order them. Transfers of any size therefore need the same amount of memory. The comparison is meant for finding
//! errors, and its speed is not optimized.

use super::device::Mark;
use super::driver::{Driver, OutsideCapture, call, code, handle, lock};
use super::gpus::Gpus;
use crate::backend::{BackendError, Execution, StreamHandle};
use std::ffi::c_void;
use std::fmt;
use std::ptr::with_exposed_provenance;
use std::sync::{Arc, Mutex};

const BLOCK: u64 = 4 << 20;

/// Function that reads the error of an execution from memory that a kernel has written. Returns `None` if there is no error.
type Reader = Box<dyn Fn() -> Option<BackendError> + Send>;

/// Result of checks that are made while an execution runs.
#[derive(Default)]
pub(super) struct Verdict {
    /// First error, or `None` if no error has been recorded.
    found: Mutex<Option<BackendError>>,
    /// Function that reads the error after the execution, if a kernel makes the checks. `None` if host functions make them, or if the error
    /// has been read already.
    reader: Mutex<Option<Reader>>,
}

impl Verdict {
    /// Creates a verdict that calls `read` once, after the execution has finished.
    pub fn read_by(read: impl Fn() -> Option<BackendError> + Send + 'static) -> Verdict {
        Verdict { found: Mutex::default(), reader: Mutex::new(Some(Box::new(read))) }
    }

    /// Returns the first error, if any. The execution must have finished.
    pub fn result(&self) -> Result<(), BackendError> {
        self.settle();
        lock(&self.found).clone().map_or(Ok(()), Err)
    }

    /// Calls the reader, if there is one, records the error, and removes the reader. The memory that the kernel has written may then be
    /// reused. The execution must have finished.
    pub fn settle(&self) {
        if let Some(error) = lock(&self.reader).take().and_then(|read| read()) {
            self.note(error);
        }
    }

    /// Logs an error. Records it, unless an earlier error was recorded.
    pub fn note(&self, error: BackendError) {
        log::error!("{error}");
        lock(&self.found).get_or_insert(error);
    }
}

impl fmt::Debug for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Verdict").field(&self.found).finish()
    }
}

/// Pinned memory for comparisons, in pairs of blocks. One thread owns a pair while it enqueues a comparison, because enqueueing blocks
/// while the queue of a stream is full. New work in a pair must follow the pair's last use. That use must therefore be in the same stream
/// or have finished.
#[derive(Debug, Default)]
pub(super) struct Verification(Mutex<Vec<Blocks>>);

/// Pair of blocks of pinned memory: one for data of the destination, and one for data of the source.
#[derive(Debug)]
struct Blocks {
    base: u64,
    /// Stream in which the blocks were last used, and an event that was recorded after that use. `None` before the first use.
    last: Option<(StreamHandle, Mark)>,
}

/// Arguments of the host function that compares two blocks.
struct Comparison {
    verdict: Arc<Verdict>,
    dst: u64,
    src: u64,
    bytes: usize,
    transfer: u32,
    offset: u64,
}

unsafe extern "C" fn compare(comparison: *mut c_void) {
    // SAFETY: `Box::into_raw` created the pointer below, and the driver calls this function once for it.
    let comparison = unsafe { Box::from_raw(comparison.cast::<Comparison>()) };
    let Comparison { verdict, dst, src, bytes, transfer, offset } = *comparison;
    // SAFETY: Each range is a block of this backend, or host memory that the caller of `execute` keeps valid until the execution has
    // completed. The execution completes later in the stream than this comparison.
    let dst = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(dst as usize), bytes) };
    // SAFETY: The range is valid for the reasons given for `dst`.
    let src = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(src as usize), bytes) };
    if dst == src {
        return;
    }
    if let Some(at) = dst.iter().zip(src).position(|(a, b)| a != b) {
        let found = BackendError::DataCorruption { transfer, offset: offset + at as u64 };
        verdict.note(found);
    }
}

impl Verification {
    /// Enqueues the comparison of every transfer's destination with its source in the caller's stream. Returns the object that will contain
    /// the result. The stream belongs to `gpu`, whose context must be current.
    pub fn enqueue(&self, gpus: &Gpus, execution: &Execution<'_>, gpu: usize) -> Result<Arc<Verdict>, BackendError> {
        let free = {
            let mut free = lock(&self.0);
            let same = free.iter().position(|blocks| blocks.last.as_ref().is_some_and(|(stream, _)| *stream == execution.stream));
            let index = same.or_else(|| free.iter().position(|blocks| blocks.is_idle(gpus.driver)));
            index.map(|index| free.swap_remove(index))
        };
        let mut blocks = free.map_or_else(|| Blocks::new(gpus), Ok)?;
        let enqueued = blocks.enqueue(gpus, execution, gpu);
        lock(&self.0).push(blocks);
        enqueued
    }

    /// Frees the pinned memory that was allocated for comparisons. All work that uses this memory must have finished.
    pub fn release(&self, gpus: &Gpus) {
        for blocks in std::mem::take(&mut *lock(&self.0)) {
            // The blocks were allocated in the context of one of these GPUs. After a reset of this GPU they no longer exist.
            if !gpus.has_lost()
                && let Some(primary) = gpus.in_use().next()
            {
                // The blocks are freed even if the context cannot be made current, because no other code would free them.
                let _current = primary.enter();
                // SAFETY: `Blocks::new` allocated the memory. No enqueued work uses it any more.
                unsafe { (gpus.driver.cuMemFreeHost)(handle(blocks.base as usize)) };
            }
        }
    }
}

impl Blocks {
    /// Allocates a pair of blocks of pinned memory for comparisons. Requires a current context.
    fn new(gpus: &Gpus) -> Result<Blocks, BackendError> {
        let _outside = OutsideCapture::enter(gpus.driver);
        let mut base: *mut c_void = std::ptr::null_mut();
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(gpus.driver, cuMemHostAlloc(&mut base, 2 * BLOCK as usize, 1)) }?;
        Ok(Blocks { base: base.expose_provenance() as u64, last: None })
    }

    fn is_idle(&self, driver: &'static Driver) -> bool {
        let _outside = OutsideCapture::enter(driver);
        // SAFETY: The event belongs to this backend and has been recorded.
        self.last.as_ref().is_none_or(|(_, last)| unsafe { (driver.cuEventQuery)(last.event()) } != code::NOT_READY)
    }

    /// Enqueues the comparison of each transfer's destination with its source, block by block.
    fn enqueue(&mut self, gpus: &Gpus, execution: &Execution<'_>, gpu: usize) -> Result<Arc<Verdict>, BackendError> {
        let verdict = Arc::new(Verdict::default());
        let driver = gpus.driver;
        let stream = handle(execution.stream.0);
        if let Some((_, last)) = &self.last {
            // SAFETY: `last` keeps the event valid until a later event replaces it.
            unsafe { call!(driver, cuStreamWaitEvent(stream, last.event(), 0)) }?;
        }
        for (transfer, (&bytes, ends)) in (0_u32..).zip(execution.program.transfers.iter().zip(&**execution.endpoints)) {
            if bytes == 0 {
                continue;
            }
            let on_gpu = [gpus.attributes(ends.dst)?.is_device(), gpus.attributes(ends.src)?.is_device()];
            let mut offset = 0;
            while offset < bytes {
                let size = (bytes - offset).min(BLOCK) as usize;
                let mut sides = [ends.dst + offset, ends.src + offset];
                for (side, block) in
                    sides.iter_mut().zip([self.base, self.base + BLOCK]).zip(on_gpu).filter(|(_, gpu)| *gpu).map(|(s, _)| s)
                {
                    // SAFETY: The block is large enough for the bytes, and the caller keeps the buffer valid.
                    unsafe { call!(driver, cuMemcpyDtoHAsync(handle(block as usize), *side, size, stream)) }?;
                    *side = block;
                }
                let [dst, src] = sides;
                let comparison = Box::into_raw(Box::new(Comparison { verdict: verdict.clone(), dst, src, bytes: size, transfer, offset }));
                // SAFETY: `compare` takes ownership of its argument, and the driver calls it once.
                let enqueued = unsafe { call!(driver, cuLaunchHostFunc(stream, compare, comparison.cast())) };
                if let Err(error) = enqueued {
                    // SAFETY: The driver did not enqueue the function, so this thread still owns the comparison.
                    drop(unsafe { Box::from_raw(comparison) });
                    return Err(error);
                }
                offset += size as u64;
            }
        }
        self.last = Some((execution.stream, gpus.primary(gpu)?.record(execution.stream.0)?));
        Ok(verdict)
    }
}
