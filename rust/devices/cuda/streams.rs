//! Manages the streams that callers create through this backend, and determines the GPU of any stream.
//!
//! A stream that the caller destroys is not destroyed by the driver, but is reused when it has no work left. Otherwise the driver would
//! give the handle of a destroyed stream to the next stream, and an application that uses a destroyed handle crashes in the driver. No lock
//! of these tables is held during a call of the driver.

use super::device::Primary;
use super::driver::{CUcontext, CUstream, Current, call, handle, lock};
use super::gpus::Gpus;
use crate::backend::failed_waits::{Behind, FailedWaits};
use crate::backend::{BackendError, StreamHandle};
use crate::topology::DeviceId;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

#[derive(Debug, Default)]
#[repr(C)] // Fields that every execution reads come first.
pub(super) struct Streams {
    /// Number of streams of this backend that the caller has destroyed and that have not been reused yet. While the number is 0, no thread
    /// acquires the lock of the set of destroyed streams.
    destroyed_count: AtomicUsize,
    destroyed: RwLock<HashSet<usize>>,
    /// GPUs of recently used streams, by the driver's unique ID of the stream.
    by_number: KnownGpus,
    /// GPUs of recently used streams, by stream handle. A handle may belong to another stream by now.
    by_handle: KnownGpus,
    /// Streams that [`Streams::create`] has created, each with the device that the caller requested.
    created: Mutex<HashMap<usize, DeviceId>>,
}

/// GPU and state of a stream.
#[derive(Copy, Clone, Debug)]
pub(super) struct Found {
    pub gpu: usize,
    /// Unique ID of the stream. Unlike the handle, it is never reused. `None` for default streams, whose handles denote several streams,
    /// for drivers without stream IDs, and while the stream is being captured.
    pub number: Option<u64>,
    /// True if the stream is being captured, or `None` if that is unknown. A stream with a number is not being captured.
    pub is_capturing: Option<bool>,
}

/// State of an execution's stream at the time when the execution was enqueued.
#[derive(Clone, Debug)]
pub(super) struct Start {
    pub gpu: usize,
    /// Unique ID of the stream, or `None` if the stream has no such ID (see [`Found::number`]).
    pub number: Option<u64>,
    /// Waits for signals that precede the execution in its stream. If one of them has failed, the execution's completion reports the
    /// failure.
    pub behind: Behind,
}

/// Cache of the GPUs of recently used streams. Each 64-bit word contains the ID of a stream and the number of its GPU.
#[derive(Debug, Default)]
pub(super) struct KnownGpus([AtomicU64; KnownGpus::MOST]);

impl KnownGpus {
    /// Number of words in the cache, which fill one cache line. If two streams use the same word, the later one replaces the earlier one.
    const MOST: usize = 8;
    /// Number of bits of a word that contain the GPU's number plus 1. A word that is 0 is empty.
    const GPU_BITS: u32 = 8;

    fn word(&self, number: u64) -> &AtomicU64 {
        &self.0[number as usize % KnownGpus::MOST]
    }

    pub fn find(&self, number: u64) -> Option<usize> {
        let word = self.word(number).load(Ordering::Relaxed);
        let gpu = word & ((1 << KnownGpus::GPU_BITS) - 1);
        (gpu > 0 && word >> KnownGpus::GPU_BITS == number).then(|| gpu as usize - 1)
    }

    /// Stores the GPU of a stream in the cache. The GPU's primary context must have been retained.
    pub fn note(&self, number: u64, gpu: usize) {
        if number >> (u64::BITS - KnownGpus::GPU_BITS) == 0 {
            self.word(number).store(number << KnownGpus::GPU_BITS | (gpu as u64 + 1), Ordering::Relaxed);
        }
    }
}

thread_local! {
    /// Stream that the calling thread currently uses: the table that contains the stream, the stream's handle, and its state. `None`
    /// between calls.
    static HELD: Cell<Option<HeldStream>> = const { Cell::new(None) };
}

type HeldStream = (usize, StreamHandle, Found);

/// Guard that [`Streams::hold`] returns. Dropping it restores the previous value of `HELD`.
pub(super) struct StreamHold(Option<HeldStream>);

impl Drop for StreamHold {
    fn drop(&mut self) {
        HELD.set(self.0);
    }
}

impl Streams {
    /// Makes [`Streams::find`] return `found` for a stream on this thread, until the returned guard is dropped. The guard must be dropped
    /// on the same thread.
    pub fn hold(&self, stream: StreamHandle, found: Found) -> StreamHold {
        StreamHold(HELD.replace(Some((std::ptr::from_ref(self).addr(), stream, found))))
    }

    /// Creates a non-blocking stream on `device`. If `device` is a host NUMA domain, the stream belongs to a GPU in use, or else to the
    /// first GPU.
    pub fn create(&self, gpus: &Gpus, device: DeviceId) -> Result<StreamHandle, BackendError> {
        gpus.check_device(device)?;
        gpus.check_alive()?;
        let primary = gpus.primary(if device.is_host() { gpus.any_used() } else { device.0 as usize })?;
        let stream = primary.caller_stream()?;
        self.count_destroyed(|destroyed| {
            destroyed.remove(&stream);
        });
        lock(&self.created).insert(stream, device);
        Ok(StreamHandle(stream))
    }

    pub fn destroy(&self, gpus: &Gpus, failed_waits: &FailedWaits, stream: StreamHandle) -> Result<(), BackendError> {
        let device = lock(&self.created).remove(&stream.0).ok_or(BackendError::InvalidHandle(stream.0, "stream"))?;
        if gpus.has_lost() {
            return Ok(());
        }
        let gpu = if device.is_host() { self.gpu_of(gpus, stream)? } else { device.0 as usize };
        self.count_destroyed(|destroyed| {
            destroyed.insert(stream.0);
        });
        let primary = gpus.primary(gpu)?;
        // The stream may be reused for other work, to which its earlier waits do not apply.
        failed_waits.forget(|| gpus.driver.number_of(handle(stream.0)));
        primary.retire_stream(stream.0);
        Ok(())
    }

    /// Returns the number of streams that [`Streams::create`] has created for `device` and that have not been destroyed.
    pub fn count(&self, device: DeviceId) -> u64 {
        lock(&self.created).values().filter(|owner| **owner == device).count() as u64
    }

    /// Changes the set of destroyed streams by calling `change`, and updates the number of destroyed streams.
    fn count_destroyed(&self, change: impl FnOnce(&mut HashSet<usize>)) {
        let mut destroyed = self.destroyed.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut destroyed);
        self.destroyed_count.store(destroyed.len(), Ordering::Release);
    }

    fn is_destroyed(&self, stream: StreamHandle) -> bool {
        self.destroyed_count.load(Ordering::Acquire) > 0
            && self.destroyed.read().unwrap_or_else(PoisonError::into_inner).contains(&stream.0)
    }

    /// Returns the GPU and the state of a stream. A stream stays on its GPU, so the GPU of a stream with a number is cached by this number.
    pub fn find(&self, gpus: &Gpus, stream: StreamHandle) -> Result<Found, BackendError> {
        if let Some((_, _, found)) = HELD.get().filter(|(of, held, _)| *held == stream && *of == std::ptr::from_ref(self).addr()) {
            return Ok(found);
        }
        if stream.0 <= 2 || self.is_destroyed(stream) {
            // A default stream always exists, but a reset of the GPU may have freed memory that is used in it.
            let gpu = self.gpu_of_living(gpus, stream)?;
            gpus.primary(gpu)?.check()?;
            return Ok(Found { gpu, number: None, is_capturing: None });
        }
        // The driver crashes if it is called with a stream that was destroyed by a reset. Only the GPU on which the stream was last seen is
        // checked for a reset. If that GPU is unknown, all GPUs in use are checked.
        let place = stream.0 as u64 >> 4;
        match self.by_handle.find(place) {
            Some(gpu) => gpus.primary(gpu)?.check()?,
            None => gpus.check_alive()?,
        }
        let number = gpus.driver.number_outside_capture(handle(stream.0));
        let gpu = match number.and_then(|number| self.by_number.find(number)) {
            Some(gpu) => gpu,
            None => {
                let gpu = self.gpu_of_living(gpus, stream)?;
                if let Some(number) = number {
                    self.by_number.note(number, gpu);
                }
                gpu
            }
        };
        if self.by_handle.find(place) != Some(gpu) {
            self.by_handle.note(place, gpu);
        }
        Ok(Found { gpu, number, is_capturing: number.map(|_| false) })
    }

    /// Returns the number of the GPU to which a stream belongs.
    pub fn gpu_of(&self, gpus: &Gpus, stream: StreamHandle) -> Result<usize, BackendError> {
        gpus.check_alive()?;
        self.gpu_of_living(gpus, stream)
    }

    /// Returns the number of the GPU to which a stream belongs. The stream must not have been destroyed by a reset of the device.
    fn gpu_of_living(&self, gpus: &Gpus, stream: StreamHandle) -> Result<usize, BackendError> {
        let driver = gpus.driver;
        if self.is_destroyed(stream) {
            return Err(BackendError::InvalidHandle(stream.0, "stream"));
        }
        let mut context: CUcontext = std::ptr::null_mut();
        // Default streams belong to the current context.
        if stream.0 <= 2 {
            // SAFETY: The driver writes to a variable that outlives the call.
            unsafe { call!(driver, cuCtxGetCurrent(&mut context)) }?;
            if context.is_null() {
                return gpus.primary(0).map(|_| 0);
            }
        } else {
            // SAFETY: The caller passes a valid stream. The output is a variable that outlives the call.
            unsafe { call!(driver, cuStreamGetCtx(handle(stream.0), &mut context)) }?;
        }
        let mut used = gpus.used.load(Ordering::Acquire);
        while used != 0 {
            let gpu = used.trailing_zeros() as usize;
            if gpus.devices[gpu].used().is_some_and(|primary| primary.context() == context) {
                return Ok(gpu);
            }
            used &= used - 1;
        }
        let mut ordinal = 0;
        {
            let _current = Current::enter(driver, context)?;
            // SAFETY: The driver writes to a variable that outlives the call.
            unsafe { call!(driver, cuCtxGetDevice(&mut ordinal)) }?;
        }
        let gpu = gpus.devices.iter().position(|device| device.ordinal == ordinal).ok_or(BackendError::InvalidDevice(ordinal))?;
        if gpus.primary(gpu)?.context() == context {
            return Ok(gpu);
        }
        Err(BackendError::NotSupported(format!(
            "stream {:#x} belongs to a context of GPU {gpu} that is not its primary context; use a stream that was created after \
             cudaSetDevice({gpu}), or under cuDevicePrimaryCtxRetain",
            stream.0
        )))
    }

    /// Calls `work` with a stream while the context of the stream's GPU is current, and returns the result of `work`.
    pub fn with<T>(
        &self,
        gpus: &Gpus,
        stream: StreamHandle,
        work: impl FnOnce(&Primary, CUstream) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let primary = gpus.primary(self.find(gpus, stream)?.gpu)?;
        let _current = primary.enter()?;
        work(primary, handle(stream.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gpu_of_a_stream_is_found_by_its_whole_number_alone() {
        let known = KnownGpus::default();
        assert_eq!(known.find(0), None);
        known.note(0, 0);
        known.note(9, 63);
        assert_eq!((known.find(0), known.find(9), known.find(1), known.find(17)), (Some(0), Some(63), None, None));
        known.note(17, 5);
        assert_eq!((known.find(9), known.find(17)), (None, Some(5)));
        // A stream number that leaves no bits for the GPU's number is not stored. It could otherwise be confused with a number that equals
        // its lower bits.
        known.note((1 << 56) + 9, 2);
        assert_eq!((known.find((1 << 56) + 9), known.find(9), known.find(17)), (None, None, Some(5)));
    }
}
