//! Comparing bytes after an execution (`MPGPU_VERIFY=bytes`), in stream order and without blocking the caller.
//!
//! Block by block, both ends come to pinned memory and a host function compares them. All executions share the two blocks, so that
//! checking a transfer of any size takes the same memory; events order them. It is slow, and meant to be: it finds errors.

use super::Core;
use super::device::{handle, lock};
use super::driver::{OutsideCapture, call};
use crate::backend::{BackendError, Execution};
use std::ffi::c_void;
use std::ptr::with_exposed_provenance;
use std::sync::{Arc, Mutex};

const BLOCK: u64 = 4 << 20;

/// The first difference found, if any.
#[derive(Debug, Default)]
pub(super) struct Verdict(Mutex<Option<BackendError>>);

impl Verdict {
    pub fn result(&self) -> Result<(), BackendError> {
        lock(&self.0).clone().map_or(Ok(()), Err)
    }
}

/// The pinned memory of both blocks, and the event behind its last use.
#[derive(Debug)]
pub(super) struct Blocks {
    base: u64,
    last: Option<(usize, usize)>,
}

/// One comparison, handed through the driver to a host function.
struct Comparison {
    verdict: Arc<Verdict>,
    dst: u64,
    src: u64,
    bytes: usize,
    transfer: u32,
    offset: u64,
}

unsafe extern "C" fn compare(comparison: *mut c_void) {
    // SAFETY: made by `Box::into_raw` below, and the driver calls this once.
    let comparison = unsafe { Box::from_raw(comparison.cast::<Comparison>()) };
    let Comparison { verdict, dst, src, bytes, transfer, offset } = *comparison;
    // SAFETY: blocks of ours, or host memory for which the caller of `execute` vouches until completion, which comes later in the stream.
    let dst = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(dst as usize), bytes) };
    // SAFETY: as above.
    let src = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(src as usize), bytes) };
    if dst == src {
        return;
    }
    if let Some(at) = dst.iter().zip(src).position(|(a, b)| a != b) {
        let found = BackendError::DataCorruption { transfer, offset: offset + at as u64 };
        log::error!("{found}");
        lock(&verdict.0).get_or_insert(found);
    }
}

impl Core {
    /// Enqueues the comparison of every transfer in the caller's stream, which belongs to `gpu`, whose context is current.
    pub fn enqueue_verification(&self, execution: &Execution<'_>, gpu: usize) -> Result<Arc<Verdict>, BackendError> {
        let verdict = Arc::new(Verdict::default());
        let driver = self.driver;
        let stream = handle(execution.stream.0);
        // Held until all is enqueued: of two executions, the one that comes second waits for the first one's event.
        let mut blocks = lock(&self.verification);
        let blocks = match &mut *blocks {
            Some(blocks) => blocks,
            none => {
                let _outside = OutsideCapture::enter(driver);
                let mut base: *mut c_void = std::ptr::null_mut();
                // SAFETY: the output is valid for the call.
                unsafe { call!(driver, cuMemHostAlloc(&mut base, 2 * BLOCK as usize, 1)) }?;
                none.insert(Blocks { base: base.expose_provenance() as u64, last: None })
            }
        };
        if let Some((_, event)) = blocks.last {
            // SAFETY: the event is kept until a later one takes its place.
            unsafe { call!(driver, cuStreamWaitEvent(stream, handle(event), 0)) }?;
        }
        for (transfer, (&bytes, ends)) in (0_u32..).zip(execution.program.transfers.iter().zip(&**execution.endpoints)) {
            if bytes == 0 {
                continue;
            }
            let on_gpu = [self.attributes(ends.dst)?.is_device(), self.attributes(ends.src)?.is_device()];
            let mut offset = 0;
            while offset < bytes {
                let size = (bytes - offset).min(BLOCK) as usize;
                let mut sides = [ends.dst + offset, ends.src + offset];
                for (side, block) in
                    sides.iter_mut().zip([blocks.base, blocks.base + BLOCK]).zip(on_gpu).filter(|(_, gpu)| *gpu).map(|(s, _)| s)
                {
                    // SAFETY: the block has room; the caller vouches for the buffer.
                    unsafe { call!(driver, cuMemcpyDtoHAsync(handle(block as usize), *side, size, stream)) }?;
                    *side = block;
                }
                let [dst, src] = sides;
                let comparison = Box::into_raw(Box::new(Comparison { verdict: verdict.clone(), dst, src, bytes: size, transfer, offset }));
                // SAFETY: the function takes what it is given.
                let enqueued = unsafe { call!(driver, cuLaunchHostFunc(stream, compare, comparison.cast())) };
                if let Err(error) = enqueued {
                    // SAFETY: not enqueued, so it is still ours.
                    drop(unsafe { Box::from_raw(comparison) });
                    return Err(error);
                }
                offset += size as u64;
            }
        }
        let primary = self.primary(gpu)?;
        let event = primary.event()?;
        // SAFETY: an event of the stream's context.
        unsafe { call!(driver, cuEventRecord(handle(event), stream)) }.inspect_err(|_| primary.give_event_back(event))?;
        if let Some((gpu, earlier)) = blocks.last.replace((gpu, event)) {
            self.primary(gpu)?.give_event_back(earlier);
        }
        Ok(verdict)
    }

    /// Frees the blocks. All work has finished.
    pub fn release_verification(&self) {
        if let Some(blocks) = lock(&self.verification).take() {
            // Allocated in the context of one of these; of a GPU that was reset it is gone.
            if !self.has_lost()
                && let Some(primary) = self.devices.iter().find_map(|device| device.used())
            {
                // Tried all the same where that fails: nobody else would.
                let _current = primary.enter();
                // SAFETY: allocated above; nothing is enqueued any more.
                unsafe { (self.driver.cuMemFreeHost)(handle(blocks.base as usize)) };
            }
            if let Some((gpu, event)) = blocks.last
                && let Ok(primary) = self.primary(gpu)
            {
                primary.give_event_back(event);
            }
        }
    }
}
