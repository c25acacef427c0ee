//! Tracks memory that this context exports to other processes, and memory that it has imported from other processes or contexts.

use super::error::Error;
use crate::backend::{Backend, BackendError};
use crate::ipc::{self, AllocationKey, BoardSlot, Handle, Peer, Secret, Service};
use crate::sync::{Mutex, lock};
use crate::topology::DeviceId;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, Weak};

/// Exported and imported memory of one context.
#[derive(Debug, Default)]
pub(super) struct PeerMemory {
    /// Service that answers processes that import memory of this process. `None` until this context exports memory for the first time.
    pub service: Mutex<Option<Arc<Service>>>,
    /// Imported memory. The key is the first address of the mapping in this process.
    imports: RwLock<BTreeMap<u64, Arc<Import>>>,
    /// Lock that is held while memory is imported or closed, so that no memory is mapped twice.
    pub importing: Mutex<()>,
    /// Addresses of former imports whose memory was freed by its owner, and at which this context has allocated new memory since. The value
    /// is the number of times that the caller must still close the address.
    pub replaced: Mutex<HashMap<u64, u64>>,
}

/// Allocation of another process or another context that is mapped in this context.
pub struct Import {
    pub(super) key: AllocationKey,
    /// Token that identifies the process that owns the memory.
    pub(super) token: [u8; 16],
    pub(super) secret: Secret,
    pub(super) base: u64,
    pub(super) bytes: u64,
    pub(super) device: DeviceId,
    pub(super) source: ImportSource,
    /// Number of times that each address of this import was returned to the caller and not yet closed.
    pub(super) holders: std::sync::Mutex<HashMap<u64, u64>>,
}

/// Owner of imported memory, with the data by which this context detects that the owner has freed the memory.
pub(super) enum ImportSource {
    /// The memory belongs to this context itself.
    Here,
    /// The memory belongs to another context of this process. While this reference is held, the other context knows that its memory is in
    /// use.
    Context(#[allow(dead_code, reason = "it is counted")] Option<Arc<()>>),
    /// The memory belongs to another process. The connection and the slot number are used to detect that the memory was freed or that the
    /// process exited.
    Process(Arc<Peer>, BoardSlot),
    /// The memory belongs to another process, and the program itself has mapped it. The library cannot detect that it was freed.
    Program,
}

impl Import {
    /// Returns the number of bytes from `address`, which lies in the imported memory, to the end of that memory.
    pub fn bytes_from(&self, address: u64) -> u64 {
        self.bytes - (address - self.base)
    }

    /// Returns an error if the owner has freed the memory or has exited.
    pub fn check(&self) -> Result<(), Error> {
        match &self.source {
            ImportSource::Here | ImportSource::Program => Ok(()),
            ImportSource::Process(peer, slot) => Ok(peer.check(*slot)?),
            ImportSource::Context(_) => {
                let live = Service::current().is_some_and(|service| service.lives(self.key));
                if live { Ok(()) } else { Err(freed_here()) }
            }
        }
    }

    /// True if the memory belongs to another context or process.
    pub fn is_foreign(&self) -> bool {
        !matches!(self.source, ImportSource::Here)
    }

    /// Counts one more use of the address at `offset` in the imported memory, and returns this address.
    pub(super) fn hold(&self, offset: u64) -> u64 {
        let address = self.base + offset;
        *self.holders.lock().unwrap_or_else(PoisonError::into_inner).entry(address).or_default() += 1;
        address
    }

    /// True if this address is in use exactly once and no other address of the import is in use.
    pub(super) fn is_last(&self, address: u64) -> bool {
        let holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.len() == 1 && holders.get(&address) == Some(&1)
    }

    /// Removes one use of an address. Returns `Some(true)` if no address of the import is in use any more, `Some(false)` if one still is,
    /// and `None` if this address was not in use.
    pub(super) fn let_go(&self, address: u64) -> Option<bool> {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        let count = holders.get_mut(&address)?;
        *count -= 1;
        if *count == 0 {
            holders.remove(&address);
        }
        Some(holders.is_empty())
    }
}

pub(super) fn freed_here() -> Error {
    ipc::IpcError::PeerGone("the memory was freed by its context in this process; export again".into()).into()
}

/// Returns an error if the size in a handle differs from the size of the allocation. The range of the handle might otherwise lie outside
/// the allocation.
pub(super) fn check_size(handle: &Handle, bytes: u64) -> Result<(), Error> {
    if handle.allocation_bytes == bytes {
        return Ok(());
    }
    let named = handle.allocation_bytes;
    Err(ipc::IpcError::Corrupt(format!("the handle names an allocation of {named} bytes, but the allocation has {bytes}")).into())
}

impl fmt::Debug for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Import").field("key", &self.key).field("base", &self.base).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Returns the number of the backend's type: 1 for the host backend, 2 for CUDA. Handles contain it, because each backend numbers its
/// allocations separately.
pub(super) fn number_of(backend: &dyn Backend) -> u8 {
    if backend.is_virtual() { 1 } else { 2 }
}

impl PeerMemory {
    pub fn imports(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<u64, Arc<Import>>> {
        self.imports.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn imports_mut(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<u64, Arc<Import>>> {
        self.imports.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the import whose mapped memory contains an address, or `None`.
    pub fn import_at(&self, address: u64) -> Option<Arc<Import>> {
        let imports = self.imports();
        let (base, import) = imports.range(..=address).next_back()?;
        (address - base < import.bytes).then(|| Arc::clone(import))
    }

    /// Returns the imports whose mapped memory contains one of the given addresses, each import once.
    pub fn imports_of(&self, addresses: impl Iterator<Item = u64>) -> Box<[Weak<Import>]> {
        if self.imports().is_empty() {
            return Box::default();
        }
        let found: BTreeMap<u64, Arc<Import>> = addresses.filter_map(|at| self.import_at(at)).map(|import| (import.base, import)).collect();
        found.values().map(Arc::downgrade).collect()
    }

    /// True if one of the addresses is in memory of another process that the program itself has mapped.
    pub fn is_opened_by_program(&self, mut addresses: impl Iterator<Item = u64>) -> bool {
        let is_opened = |at| self.import_at(at).is_some_and(|import| matches!(import.source, ImportSource::Program));
        !self.imports().is_empty() && addresses.any(is_opened)
    }

    /// True if another process or context has mapped the memory at this address.
    pub fn is_mapped(&self, address: u64, backend: &dyn Backend) -> bool {
        let service = lock(&self.service).clone();
        match (service, backend.locate(address)) {
            (Some(service), Ok(Some(allocation))) => {
                service.is_mapped(AllocationKey { backend: number_of(backend), allocation: allocation.id })
            }
            _ => false,
        }
    }

    /// Ends all exports of the memory at this address, before the memory is freed.
    pub fn withdraw(&self, address: u64, backend: &dyn Backend) {
        let service = lock(&self.service).clone();
        if let (Some(service), Ok(Some(allocation))) = (service, backend.locate(address)) {
            service.withdraw(AllocationKey { backend: number_of(backend), allocation: allocation.id });
            // If this context has imported its own memory, the import ends too, because the address may be reused by a new allocation.
            let mut imports = self.imports_mut();
            if imports.get(&allocation.base).is_some_and(|import| !import.is_foreign()) {
                imports.remove(&allocation.base);
            }
        }
    }

    /// Unmaps all imported memory and ends all exports. All work must have finished.
    pub fn release(&self, backend: &Arc<dyn Backend>) -> Result<(), BackendError> {
        let imports = std::mem::take(&mut *self.imports_mut());
        let mut result = Ok(());
        for import in imports.into_values().filter(|import| import.is_foreign()) {
            result = result.and(backend.unmap(import.base));
        }
        if let Some(service) = lock(&self.service).take() {
            service.withdraw_all(backend);
        }
        result
    }
}
