//! Which memory of this context other processes may map, and which memory of theirs this context has mapped.

use super::error::Error;
use crate::backend::{Backend, BackendError};
use crate::ipc::{self, AllocationKey, BoardSlot, Handle, Peer, Secret, Service};
use crate::sync::{Mutex, lock};
use crate::topology::DeviceId;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, Weak};

/// What one context exports and imports.
#[derive(Debug, Default)]
pub(super) struct PeerMemory {
    /// Present from the first export on.
    pub service: Mutex<Option<Arc<Service>>>,
    /// By their first byte.
    imports: RwLock<BTreeMap<u64, Arc<Import>>>,
    /// Held while memory is imported or closed, so that nothing is imported twice.
    pub importing: Mutex<()>,
    /// Addresses of imports that memory allocated anew has taken the place of, and how often each is still to be closed.
    pub replaced: Mutex<HashMap<u64, u64>>,
}

/// An allocation of another process, or of another context, in use here.
pub struct Import {
    pub(super) key: AllocationKey,
    /// Whose it is.
    pub(super) token: [u8; 16],
    pub(super) secret: Secret,
    pub(super) base: u64,
    pub(super) bytes: u64,
    pub(super) device: DeviceId,
    pub(super) source: ImportSource,
    /// How often each address was returned and not closed.
    pub(super) holders: std::sync::Mutex<HashMap<u64, u64>>,
}

/// Where an import comes from.
pub(super) enum ImportSource {
    /// This context: freeing is noticed as for any other of its memory.
    Here,
    /// Another context of this process, which is told that it is in use by what is kept here.
    Context(#[allow(dead_code, reason = "it is counted")] Option<Arc<()>>),
    /// Another process, which tells here what it has freed.
    Process(Arc<Peer>, BoardSlot),
    /// Another process, from which the program itself has mapped it.
    Program,
}

impl Import {
    /// Bytes from an address in it to its end.
    pub fn bytes_from(&self, address: u64) -> u64 {
        self.bytes - (address - self.base)
    }

    /// Refuses memory that its owner has freed, or that has lost its owner.
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

    /// Whether it is memory of another context or process.
    pub fn is_foreign(&self) -> bool {
        !matches!(self.source, ImportSource::Here)
    }

    /// Adds a holder of an address.
    pub(super) fn hold(&self, offset: u64) -> u64 {
        let address = self.base + offset;
        *self.holders.lock().unwrap_or_else(PoisonError::into_inner).entry(address).or_default() += 1;
        address
    }

    /// Whether this address is held, and nothing else of the import.
    pub(super) fn is_last(&self, address: u64) -> bool {
        let holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        holders.len() == 1 && holders.get(&address) == Some(&1)
    }

    /// Removes a holder; `Some(true)` if it was the last. `None` for an address without holders.
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

/// Refuses a handle that names another size than its allocation has: its range may lie outside.
pub(super) fn check_size(handle: &Handle, bytes: u64) -> Result<(), Error> {
    if handle.allocation_bytes == bytes {
        return Ok(());
    }
    let named = handle.allocation_bytes;
    Err(ipc::IpcError::Corrupt(format!("the handle names an allocation of {named} bytes, and the allocation has {bytes}")).into())
}

impl fmt::Debug for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Import").field("key", &self.key).field("base", &self.base).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Each backend numbers its allocations itself.
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

    /// The import that an address lies in.
    pub fn import_at(&self, address: u64) -> Option<Arc<Import>> {
        let imports = self.imports();
        let (base, import) = imports.range(..=address).next_back()?;
        (address - base < import.bytes).then(|| Arc::clone(import))
    }

    /// The imports that addresses lie in, each once.
    pub fn imports_of(&self, addresses: impl Iterator<Item = u64>) -> Box<[Weak<Import>]> {
        if self.imports().is_empty() {
            return Box::default();
        }
        let found: BTreeMap<u64, Arc<Import>> = addresses.filter_map(|at| self.import_at(at)).map(|import| (import.base, import)).collect();
        found.values().map(Arc::downgrade).collect()
    }

    /// Whether another process or context has memory of this one mapped.
    pub fn is_mapped(&self, address: u64, backend: &dyn Backend) -> bool {
        let service = lock(&self.service).clone();
        match (service, backend.locate(address)) {
            (Some(service), Ok(Some(allocation))) => {
                service.is_mapped(AllocationKey { backend: number_of(backend), allocation: allocation.id })
            }
            _ => false,
        }
    }

    /// The memory at this address is about to be freed.
    pub fn withdraw(&self, address: u64, backend: &dyn Backend) {
        let service = lock(&self.service).clone();
        if let (Some(service), Ok(Some(allocation))) = (service, backend.locate(address)) {
            service.withdraw(AllocationKey { backend: number_of(backend), allocation: allocation.id });
            // An import from this very context ends with the memory, whose address may be allocated again.
            let mut imports = self.imports_mut();
            if imports.get(&allocation.base).is_some_and(|import| !import.is_foreign()) {
                imports.remove(&allocation.base);
            }
        }
    }

    /// Unmaps everything and takes back every export. All work has finished.
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
