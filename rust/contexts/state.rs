//! State that a context shares with its plans and with the ranks of a node.

use super::active::ActiveStreams;
use super::callbacks::{Awaited, CallbackQueue};
use super::claims::Claims;
use super::config::Config;
use super::deferred::Deferred;
use super::error::Error;
use super::files::Files;
use super::holdings::Holdings;
use super::late_checks::LateChecks;
use super::peer_memory::{Import, PeerMemory};
use super::piece_paths::PiecePaths;
use super::registered::Registrations;
use super::staging::Staging;
use crate::backend::{Allocation, Backend, BackendError};
use crate::ipc::fork;
use crate::plan::{self, Shape};
use crate::sync::{Mutex, lock};
use crate::topology::{DeviceId, Machine};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

/// Object that must end before its context closes, because its work waits for other ranks or for threads of the program. The work of one
/// such object may be queued behind the work of another. Therefore the context calls each of the following functions for all objects before
/// it calls the next function.
pub trait EndsFirst: Send + Sync {
    /// Cancels all operations that no other rank has matched yet. Does not wait.
    fn take_back(&self);
    /// Waits until the matched operations, which depend on other ranks, have finished; at most until the time `until`.
    fn end(&self, until: Instant);
    /// Releases the object. When this is called, all streams of the context are idle, and the context's memory is not in use any more.
    fn close(&self);
}

/// Maximum time for which the destruction of an object waits for other ranks.
pub const LAST_PATIENCE: Duration = Duration::from_secs(10);

/// State that a context shares with its plans. The plan cache is not part of it, because a cached plan would then keep the cache alive.
#[repr(C)] // Fields that every execution reads come first and together.
pub struct ContextState {
    pub(super) backend: Arc<dyn Backend>,
    /// Lock that keeps the context open. Each call that enqueues or allocates holds the lock for reading; closing the context acquires it
    /// for writing.
    pub(super) gate: RwLock<()>,
    /// True once the context has begun to close. It is set before the closing thread acquires `gate`.
    pub(super) closed: AtomicBool,
    /// Process that opened the context ([`fork::generation`]).
    pub(super) process: u32,
    pub(super) executions: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) staging: Staging,
    pub(super) active: ActiveStreams,
    pub(super) holdings: Holdings,
    pub(super) deferred: Deferred,
    pub(super) registrations: Registrations,
    /// GPUs that node groups have assigned to this process.
    pub claims: Claims,
    pub(super) files: Files,
    pub(super) sharing: PeerMemory,
    /// Objects that must end before the context closes. `None` once the context has begun to close.
    pub(super) ends_first: Mutex<Option<Vec<Weak<dyn EndsFirst>>>>,
    pub(super) callbacks: CallbackQueue,
    /// Copies whose index lists are checked while the copies run.
    pub(super) late_checks: LateChecks,
    /// Cached shares of the GPUs that help with copies of pieces.
    pub(super) piece_paths: PiecePaths,
    pub(super) machine: Arc<Machine>,
    /// Machine for new plans after some pairs of GPUs were found to lose data. It has no routes between the GPUs of such a pair, and
    /// replaces `machine`. `None` if no such pair was found.
    pub(super) without: RwLock<Option<Arc<Machine>>>,
    pub(super) config: Config,
}

impl ContextState {
    /// Returns a guard that keeps the context open, or an error if the context is closed. A caller must not hold the guard while it waits
    /// for work, and must not acquire a second guard while it holds one.
    pub fn enter(&self) -> Result<RwLockReadGuard<'_, ()>, Error> {
        if !self.is_here() {
            return Err(Error::Forked);
        }
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        if self.is_open() { Ok(gate) } else { Err(Error::ContextDestroyed) }
    }

    /// Returns the allocation that contains an address. Returns `None` if the address is unknown, or if the caller has freed the memory.
    pub fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        if self.deferred.contains(address) { Ok(None) } else { self.backend.locate(address) }
    }

    /// Frees in the backend all memory that the caller has freed in stream order and that is no longer used. Returns true if there was any.
    pub(super) fn reclaim(&self) -> bool {
        let any = self.deferred.reclaim(&*self.backend, &self.sharing);
        if any {
            self.holdings.count_free();
        }
        any
    }

    /// Returns the machine for which plans are made. It has no routes between pairs of GPUs that were found to lose data.
    pub fn machine_now(&self) -> Arc<Machine> {
        let without = self.without.read().unwrap_or_else(PoisonError::into_inner);
        without.as_ref().unwrap_or(&self.machine).clone()
    }

    /// Tests the pairs of GPUs that a plan uses. Returns true if some of them lose data and `machine` still has routes between them. The
    /// plan must then not be used.
    pub(super) fn loses_bytes(&self, machine: &Machine, planned: &plan::Plan, batch: &[Shape]) -> bool {
        if !self.config.check_peers {
            return false;
        }
        let mut losing = self.backend.losing_pairs(&planned.program.pairs(batch));
        losing.retain(|(a, b)| machine.route(*a, *b).is_some() || machine.route(*b, *a).is_some());
        if losing.is_empty() {
            return false;
        }
        let mut without = self.without.write().unwrap_or_else(PoisonError::into_inner);
        *without = Some(Arc::new(without.as_ref().unwrap_or(&self.machine).without(&losing)));
        true
    }

    /// True if the context has not begun to close.
    pub fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
    }

    /// True if this process has opened the context. False in a process that was forked later.
    pub(super) fn is_here(&self) -> bool {
        self.process == fork::generation()
    }

    /// Returns the number of frees in the backend so far. If the number has changed, plans check that their memory is still allocated.
    pub fn frees(&self) -> u64 {
        self.holdings.frees()
    }

    /// Returns the import whose mapped memory contains an address, or `None`.
    pub fn import_at(&self, address: u64) -> Option<Arc<Import>> {
        self.sharing.import_at(address)
    }

    /// Returns the imports whose mapped memory contains one of the given addresses, each import once.
    pub fn imports_of(&self, addresses: impl Iterator<Item = u64>) -> Box<[Weak<Import>]> {
        self.sharing.imports_of(addresses)
    }

    /// True if the `bytes` bytes at `address` are registered host memory and lie in more than one pinned piece. One copy cannot access such
    /// a range.
    pub fn crosses_pieces(&self, address: u64, bytes: u64) -> bool {
        self.registrations.crosses(address, bytes)
    }

    /// Adds one execution, and the size of its transfers in bytes, to the statistics of the context.
    pub fn count(&self, bytes: u64) {
        self.executions.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns an error if the machine has no such device.
    pub fn check_device(&self, device: DeviceId) -> Result<(), Error> {
        if self.machine.contains(device) {
            return Ok(());
        }
        Err(Error::NoSuchDevice { device: device.0, gpus: self.machine.gpu_count(), hosts: self.machine.host_count() })
    }

    /// Registers an object that must end before the context closes. Fails if the context has begun to close.
    pub fn end_first(&self, what: Weak<dyn EndsFirst>) -> Result<(), Error> {
        let mut all = lock(&self.ends_first);
        let all = all.as_mut().ok_or(Error::ContextDestroyed)?;
        all.retain(|one| one.strong_count() > 0);
        all.push(what);
        Ok(())
    }

    /// Calls `function` soon, on the callback thread of the context.
    pub fn call_soon(&self, function: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        drop(self.enter()?);
        self.callbacks.add(Awaited { completion: None, callback: Box::new(|_| function()) })
    }
}
