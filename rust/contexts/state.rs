//! State that a context shares with its plans and with the ranks of a node.

use super::active::ActiveStreams;
use super::callbacks::{Awaited, CallbackQueue};
use super::config::Config;
use super::deferred::Deferred;
use super::error::Error;
use super::holdings::Holdings;
use super::peer_memory::{Import, PeerMemory};
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

/// Object that must end before its context closes, because it waits for other ranks or for producers. One such object may wait for work
/// that is queued behind another such object. So each step is done for all objects before the next step starts.
pub trait EndsFirst: Send + Sync {
    /// Withdraws all operations that have no counterpart on another rank yet. Does not wait.
    fn take_back(&self);
    /// Waits until the time `until` for the remaining operations, which depend on other ranks.
    fn end(&self, until: Instant);
    /// Releases the object. All streams of the context are idle, and the context's memory is not used any more.
    fn close(&self);
}

/// Longest time for which the destruction of an object waits for other ranks.
pub const LAST_PATIENCE: Duration = Duration::from_secs(10);

/// State that a context shares with its plans. It excludes the plan cache, so that a cached plan does not keep the cache alive.
#[repr(C)] // Fields that every execution reads come first and together.
pub struct ContextState {
    pub(super) backend: Arc<dyn Backend>,
    /// Lock that each call that enqueues or allocates holds for reading, so that no work starts after the context has begun to close.
    pub(super) gate: RwLock<()>,
    /// True once the context has begun to close; set before the closing thread acquires `gate`.
    pub(super) closed: AtomicBool,
    /// Process to which the context belongs ([`fork::generation`]).
    pub(super) process: u32,
    pub(super) executions: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) staging: Staging,
    pub(super) active: ActiveStreams,
    pub(super) holdings: Holdings,
    pub(super) deferred: Deferred,
    pub(super) registrations: Registrations,
    pub(super) sharing: PeerMemory,
    /// Objects that must end before the context closes. `None` once the context has begun to close.
    pub(super) ends_first: Mutex<Option<Vec<Weak<dyn EndsFirst>>>>,
    pub(super) callbacks: CallbackQueue,
    pub(super) machine: Arc<Machine>,
    /// Machine that replaces `machine` for new plans after pairs of GPUs were found to lose data. It has no routes between these pairs.
    pub(super) without: RwLock<Option<Arc<Machine>>>,
    pub(super) config: Config,
}

impl ContextState {
    /// Returns a guard that keeps the context open. The guard is never held while waiting for work, and no thread acquires it twice.
    pub fn enter(&self) -> Result<RwLockReadGuard<'_, ()>, Error> {
        if !self.is_here() {
            return Err(Error::Forked);
        }
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        if self.is_open() { Ok(gate) } else { Err(Error::ContextDestroyed) }
    }

    /// Returns the allocation that contains an address, or `None` if it is unknown or was freed.
    pub fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        if self.deferred.contains(address) { Ok(None) } else { self.backend.locate(address) }
    }

    /// Passes memory that was freed in stream order and is no longer used back to the backend. Returns true if there was any.
    pub(super) fn reclaim(&self) -> bool {
        let any = self.deferred.reclaim(&*self.backend, &self.sharing);
        if any {
            self.holdings.count_free();
        }
        any
    }

    /// Returns the machine for which plans are made. This is the context's machine without the routes that lose data.
    pub fn machine_now(&self) -> Arc<Machine> {
        let without = self.without.read().unwrap_or_else(PoisonError::into_inner);
        without.as_ref().unwrap_or(&self.machine).clone()
    }

    /// Tests the pairs of GPUs that a plan of this batch uses. Returns true if some of them lose data and `machine` still has routes
    /// between them; the plan must then not be used.
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

    /// True if the context belongs to this process, not to a process from which this one was forked.
    pub(super) fn is_here(&self) -> bool {
        self.process == fork::generation()
    }

    /// Returns the number of frees so far. Plans check their memory again when the number has changed.
    pub fn frees(&self) -> u64 {
        self.holdings.frees()
    }

    /// Returns the import that contains an address.
    pub fn import_at(&self, address: u64) -> Option<Arc<Import>> {
        self.sharing.import_at(address)
    }

    /// Returns the imports that contain the given addresses, each import once.
    pub fn imports_of(&self, addresses: impl Iterator<Item = u64>) -> Box<[Weak<Import>]> {
        self.sharing.imports_of(addresses)
    }

    /// True if the range is registered memory and lies in more than one pinned piece.
    pub fn crosses_pieces(&self, address: u64, bytes: u64) -> bool {
        self.registrations.crosses(address, bytes)
    }

    /// Adds one execution and the bytes that it moves to the statistics.
    pub fn count(&self, bytes: u64) {
        self.executions.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Refuses a device that the machine does not have.
    pub fn check_device(&self, device: DeviceId) -> Result<(), Error> {
        if self.machine.contains(device) {
            return Ok(());
        }
        Err(Error::NoSuchDevice { device: device.0, gpus: self.machine.gpu_count(), hosts: self.machine.host_count() })
    }

    /// Registers an object that must end before the context closes.
    pub fn end_first(&self, what: Weak<dyn EndsFirst>) -> Result<(), Error> {
        let mut all = lock(&self.ends_first);
        let all = all.as_mut().ok_or(Error::ContextDestroyed)?;
        all.retain(|one| one.strong_count() > 0);
        all.push(what);
        Ok(())
    }

    /// Queues `function`, which the callback thread then calls.
    pub fn call_soon(&self, function: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        drop(self.enter()?);
        self.callbacks.add(Awaited { completion: None, callback: Box::new(|_| function()) })
    }
}
