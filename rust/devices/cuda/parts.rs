//! Defines the state that the CUDA backend and its completions share. The state has several parts, each with its own lock.

use super::capture::free_spare_blocks;
use super::device::Primary;
use super::driver::{CUstream, Driver};
use super::event::Events;
use super::gpus::Gpus;
use super::graphs::Graphs;
use super::memory::Memory;
use super::owner::Owner;
use super::peers::Checks;
use super::pieces::Lists;
use super::reached::Reached;
use super::sharing::Sharing;
use super::streams::{Found, Streams};
use super::turns::Turns;
use super::verify::Verification;
use super::workers::Workers;
use crate::backend::failed_waits::{Behind, FailedWaits};
use crate::backend::{BackendError, StreamHandle};
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

#[repr(C)] // Fields that every execution reads come first, together.
pub(in crate::cuda) struct Core {
    pub gpus: Gpus,
    pub streams: Streams,
    pub graphs: Graphs,
    pub sharing: Sharing,
    pub memory: Memory,
    pub events: Events,
    pub verification: Verification,
    pub workers: Workers,
    pub turns: Turns,
    pub lists: Lists,
    /// Number of multiprocessors that kernels of plans use if they have an end in host memory.
    pub host_blocks: AtomicU32,
    /// True if kernels of plans pace their writes to host memory.
    pub paces_host: AtomicBool,
    pub reached: Mutex<Reached>,
    pub checks: Checks,
}

impl Core {
    pub fn new(driver: &'static Driver, hosts: u32) -> Result<Core, BackendError> {
        Ok(Core {
            gpus: Gpus::new(driver, hosts)?,
            streams: Streams::default(),
            graphs: Graphs::default(),
            sharing: Sharing::default(),
            memory: Memory::default(),
            events: Events::default(),
            verification: Verification::default(),
            workers: Workers::default(),
            turns: Turns::default(),
            lists: Lists::default(),
            host_blocks: AtomicU32::new(u32::MAX),
            paces_host: AtomicBool::new(true),
            reached: Mutex::default(),
            checks: Checks::default(),
        })
    }

    /// Calls `work` with a stream while the context of the stream's GPU is current, and returns the result of `work`.
    pub fn with_stream<T>(
        &self,
        stream: StreamHandle,
        work: impl FnOnce(&Primary, CUstream) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        self.streams.with(&self.gpus, stream, work)
    }

    /// Returns a number that identifies a stream. For streams that are being captured and for default streams, this is the stream's handle.
    /// Several default streams may have the same handle.
    pub fn number_of(&self, stream: StreamHandle) -> u64 {
        self.with_stream(stream, |_, raw| Ok(self.gpus.driver.number_of(raw))).unwrap_or(stream.0 as u64)
    }

    /// Returns the waits for signals that were enqueued in a stream so far. If one of these waits has failed, the completions of later work
    /// in the stream report the failure.
    pub fn behind(&self, stream: StreamHandle, found: &Found) -> Behind {
        self.sharing.failed_waits.behind(|| found.number.unwrap_or_else(|| self.number_of(stream)))
    }

    /// Records that a stream is about to wait for these counters. A captured wait is recorded for all streams, because it is not known in
    /// which stream the graph will be launched.
    pub fn note_waits(&self, stream: StreamHandle, counters: impl Iterator<Item = u64>) -> Result<(), BackendError> {
        let found = self.streams.find(&self.gpus, stream)?;
        let lines = counters.filter_map(|counter| self.sharing.line_of(counter));
        let failed_waits = &self.sharing.failed_waits;
        match found.number {
            Some(number) => failed_waits.wait(number, lines),
            None if self.is_captured(stream)? => lines.for_each(|line| failed_waits.wait_unseen(line)),
            None => failed_waits.wait(self.number_of(stream), lines),
        }
        Ok(())
    }
}

impl Owner for Core {
    fn gpus(&self) -> &Gpus {
        &self.gpus
    }

    fn failed_waits(&self) -> &FailedWaits {
        &self.sharing.failed_waits
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let gpus = &self.gpus;
        // This backend has retained no context, so there is nothing to release. A process may open all GPUs only to inspect them, and
        // should not get contexts by this.
        if gpus.used.load(Ordering::Acquire) == 0 {
            return;
        }
        // Errors were already reported to the callers that waited for the work.
        let _ = gpus.drain();
        free_spare_blocks(gpus);
        self.workers.release(gpus);
        self.lists.release(gpus);
        self.verification.release(gpus);
        self.checks.release(gpus);
        self.graphs.release(gpus);
        self.events.release();
        for base in self.sharing.release_all(gpus) {
            self.memory.forget(base);
        }
        self.memory.release(gpus);
        // Streams are destroyed together with their contexts.
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaBackend").field("devices", &self.gpus.devices.len()).field("hosts", &self.gpus.hosts).finish_non_exhaustive()
    }
}
