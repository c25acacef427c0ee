//! What plans keep of their context, and what ranks of a node need of it.

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

/// What has to end before its context closes, because it waits for other ranks or for producers. What one of them waits for may stand behind what
/// another one waits for; so of all of them each step is done before the next.
pub trait EndsFirst: Send + Sync {
    /// Takes back whatever nobody has met. Does not wait.
    fn take_back(&self);
    /// Waits for the rest, for what others are to do until so long.
    fn end(&self, until: Instant);
    /// No stream of the context works any more, and none of its memory is used from here on.
    fn close(&self);
}

/// Whoever destroys something that waits for others gives them so long.
pub const LAST_PATIENCE: Duration = Duration::from_secs(10);

/// What plans keep of their context. The plan cache is not part of it, so that a plan in the cache does not keep the cache alive.
#[repr(C)] // What every execution reads stands first, together.
pub struct ContextState {
    pub(super) backend: Arc<dyn Backend>,
    /// Held for reading by whoever enqueues or allocates, so that nothing starts after a context has begun to close.
    pub(super) gate: RwLock<()>,
    /// Set once, before closing takes the gate.
    pub(super) closed: AtomicBool,
    /// The process that it is of ([`fork::generation`]).
    pub(super) process: u32,
    pub(super) executions: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) staging: Staging,
    pub(super) active: ActiveStreams,
    pub(super) holdings: Holdings,
    pub(super) deferred: Deferred,
    pub(super) registrations: Registrations,
    pub(super) sharing: PeerMemory,
    /// `None` once the context closes.
    pub(super) ends_first: Mutex<Option<Vec<Weak<dyn EndsFirst>>>>,
    pub(super) callbacks: CallbackQueue,
    pub(super) machine: Arc<Machine>,
    /// Replaces `machine` for new plans once pairs of GPUs were found to lose bytes: it has no routes between them.
    pub(super) without: RwLock<Option<Arc<Machine>>>,
    pub(super) config: Config,
}

impl ContextState {
    /// Keeps the context open for as long as the guard lives. Never held while waiting for work, and never taken twice by one thread.
    pub fn enter(&self) -> Result<RwLockReadGuard<'_, ()>, Error> {
        if !self.is_here() {
            return Err(Error::Forked);
        }
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        if self.is_open() { Ok(gate) } else { Err(Error::ContextDestroyed) }
    }

    /// The allocation that an address lies in, unless it was given back.
    pub fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        if self.deferred.contains(address) { Ok(None) } else { self.backend.locate(address) }
    }

    /// Gives the backend what was freed in stream order and is not in use any more; whether there was anything.
    pub(super) fn reclaim(&self) -> bool {
        let any = self.deferred.reclaim(&*self.backend, &self.sharing);
        if any {
            self.holdings.count_free();
        }
        any
    }

    /// The machine that plans are made for: that of the context, without routes that lose bytes.
    pub fn machine_now(&self) -> Arc<Machine> {
        let without = self.without.read().unwrap_or_else(PoisonError::into_inner);
        without.as_ref().unwrap_or(&self.machine).clone()
    }

    /// Tests the pairs of GPUs that a plan of this batch relies on. `true` if some lose bytes and `machine` did not know it: then the plan must
    /// not be used.
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

    /// Whether it has not begun to close.
    pub fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
    }

    /// Whether it is of this process, and not of one from which this one was forked.
    pub(super) fn is_here(&self) -> bool {
        self.process == fork::generation()
    }

    /// How often memory has been freed. What plans use is looked at again where the count is another one.
    pub fn frees(&self) -> u64 {
        self.holdings.frees()
    }

    /// The import that an address lies in.
    pub fn import_at(&self, address: u64) -> Option<Arc<Import>> {
        self.sharing.import_at(address)
    }

    /// The imports that addresses lie in, each once.
    pub fn imports_of(&self, addresses: impl Iterator<Item = u64>) -> Box<[Weak<Import>]> {
        self.sharing.imports_of(addresses)
    }

    /// Whether memory that the program has registered there is of several pieces.
    pub fn crosses_pieces(&self, address: u64, bytes: u64) -> bool {
        self.registrations.crosses(address, bytes)
    }

    /// Counts an execution.
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

    /// Has something end before the context closes.
    pub fn end_first(&self, what: Weak<dyn EndsFirst>) -> Result<(), Error> {
        let mut all = lock(&self.ends_first);
        let all = all.as_mut().ok_or(Error::ContextDestroyed)?;
        all.retain(|one| one.strong_count() > 0);
        all.push(what);
        Ok(())
    }

    /// Calls `function` on the thread of callbacks, soon.
    pub fn call_soon(&self, function: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        drop(self.enter()?);
        self.callbacks.add(Awaited { completion: None, callback: Box::new(|_| function()) })
    }
}
