//! Exports memory of a context to other processes, and imports and closes memory that other processes have exported.

use super::error::Error;
use super::peer_memory::{Import, ImportSource, check_size, freed_here, number_of};
use super::state::ContextState;
use crate::backend::{Allocation, MemoryKind};
use crate::ipc::{self, AllocationKey, Departure, Export, Handle, PATIENCE, Party, Peer, Secret, Service, Shared};
use crate::sync::lock;
use crate::topology::DeviceId;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

impl ContextState {
    /// Exports a range of this context's memory. Returns a handle with which other processes of the node can map the range until the memory
    /// is freed.
    pub fn export_memory(&self, address: u64, bytes: u64) -> Result<Handle, Error> {
        self.export_to(address, bytes, None)
    }

    /// Specifies which process signals which counters of the allocation at `address`
    /// ([`name_signallers`](crate::backend::Backend::name_signallers)).
    pub fn name_signallers(&self, address: u64, by_address: Arc<[(u64, u32)]>) -> Result<(), Error> {
        let found = self.locate(address)?;
        found.into_iter().for_each(|allocation| self.backend.name_signallers(&allocation, Arc::clone(&by_address)));
        Ok(())
    }

    /// Exports a range of memory to one particular importer, or to any if `party` is `None`. The owner tracks the
    /// [departure](ContextState::leave_memory) or exit of this importer separately from that of other importers.
    pub fn export_to(&self, address: u64, bytes: u64, party: Option<Party>) -> Result<Handle, Error> {
        let _open = self.enter()?;
        let (backend, sharing) = (&*self.backend, &self.sharing);
        if self.deferred.contains(address) {
            return Err(Error::NotShareable { address, bytes });
        }
        let allocation = backend.exportable(address, bytes)?.ok_or(Error::NotShareable { address, bytes })?;
        let (base, size) = (allocation.base, allocation.bytes);
        if bytes > size - (address - base) {
            return Err(Error::OutOfMemoryRange { address, bytes, base, size });
        }
        if sharing.import_at(address).is_some_and(|import| import.is_foreign()) {
            let why = format!("{address:#x} is memory of another process that was imported here; export it in that process");
            return Err(ipc::IpcError::NotSupported(why).into());
        }
        // The memory is exported once now, so that the caller gets the error if it cannot be shared. The importer would otherwise get it
        // later.
        drop(backend.export(&allocation)?);
        let service = {
            let mut started = lock(&sharing.service);
            match &*started {
                Some(service) => Arc::clone(service),
                None => Arc::clone(started.insert(Service::start()?)),
            }
        };
        let key = AllocationKey { backend: number_of(backend), allocation: allocation.id };
        let secret = service.export(key, Export { backend: Arc::clone(&self.backend), allocation }, party)?;
        Ok(Handle {
            secret,
            origin: *service.origin(),
            key,
            allocation_bytes: size,
            offset: address - base,
            bytes,
            device: backend.device_uuid(allocation.device)?,
            number: allocation.device.0,
            kind: allocation.kind,
        })
    }

    /// Imports the memory of a handle: maps the memory, or reuses an existing mapping. Returns the address and the device of the memory in
    /// this process. Each successful call requires one [`close_memory`](ContextState::close_memory).
    pub fn import_memory(&self, handle: &Handle) -> Result<(u64, DeviceId), Error> {
        self.import_through(handle, None)
    }

    /// Imports memory that kernels on the device `kernels` will access. Returns the address, the device, and the address that those kernels
    /// must use, or 0 if `kernels` is `None`. The memory may be on a GPU that is not visible to this process.
    pub fn import_memory_for(&self, handle: &Handle, kernels: Option<DeviceId>) -> Result<(u64, DeviceId, u64), Error> {
        kernels.map_or(Ok(()), |kernels| self.check_device(kernels))?;
        let (address, on) = self.import_through(handle, kernels)?;
        match kernels.map_or(Ok(0), |kernels| self.backend.address_for(kernels, address)) {
            Ok(seen) => Ok((address, on, seen)),
            Err(error) => {
                self.close_memory(address)?;
                Err(error.into())
            }
        }
    }

    /// Imports memory that may be on a GPU that is not visible to this process. Such memory is mapped through the device `instead`, and
    /// from then on treated as memory of that device. If `instead` is `None`, such memory is refused.
    pub fn import_through(&self, handle: &Handle, instead: Option<DeviceId>) -> Result<(u64, DeviceId), Error> {
        let _open = self.enter()?;
        let (backend, sharing) = (&*self.backend, &self.sharing);
        if handle.key.backend != number_of(backend) {
            let why = format!(
                "the handle comes from a different backend, and this context uses the {} backend: set MPGPU_BACKEND to the same value in \
                 all processes",
                backend.name()
            );
            return Err(ipc::IpcError::NotSupported(why).into());
        }
        let _importing = lock(&sharing.importing);
        let same = |i: &Import| (i.token, i.key, i.secret) == (handle.origin.token, handle.key, handle.secret);
        let known = sharing.imports().values().find(|import| same(import)).cloned();
        if let Some(import) = known {
            import.check()?;
            check_size(handle, import.bytes)?;
            return Ok((import.hold(handle.offset), import.device));
        }
        let here = Service::current().filter(|service| service.origin().token == handle.origin.token);
        if here.is_none() {
            handle.origin.check()?;
        }
        let allocation = self.allocation_of(handle, instead)?;
        let (source, base) = match here {
            Some(service) => self.import_here(handle, &service, &allocation)?,
            None => self.import_there(handle, &allocation)?,
        };
        let import = Import {
            key: handle.key,
            token: handle.origin.token,
            secret: handle.secret,
            base,
            bytes: handle.allocation_bytes,
            device: allocation.device,
            source,
            holders: std::sync::Mutex::default(),
        };
        let address = import.hold(handle.offset);
        sharing.imports_mut().insert(base, Arc::new(import));
        Ok((address, allocation.device))
    }

    /// Records memory of another process that the program itself has mapped. `payload` identifies the driver mechanism that the program
    /// used for this. The caller must pass the device, because the mapping does not show it. Requires one
    /// [`close_memory`](ContextState::close_memory) of the address before the program unmaps the memory.
    pub fn adopt_memory(&self, address: u64, bytes: u64, device: DeviceId, payload: [u8; ipc::PAYLOAD_BYTES]) -> Result<(), Error> {
        let _open = self.enter()?;
        self.check_device(device)?;
        let sharing = &self.sharing;
        let _importing = lock(&sharing.importing);
        let shared = Shared { form: Shared::MAPPED_BY_PROGRAM, descriptor: None, offset: address, payload };
        let base = self.backend.map(shared, &Allocation { id: 0, base: address, bytes, device, kind: MemoryKind::Device })?;
        let key = AllocationKey { backend: number_of(&*self.backend), allocation: base };
        let (source, holders) = (ImportSource::Program, std::sync::Mutex::default());
        let import = Import { key, token: [0; 16], secret: Secret([0; 16]), base, bytes, device, source, holders };
        import.hold(0);
        sharing.imports_mut().insert(base, Arc::new(import));
        Ok(())
    }

    /// Imports memory that belongs to this process. The memory is not mapped again.
    fn import_here(&self, handle: &Handle, service: &Service, allocation: &Allocation) -> Result<(ImportSource, u64), Error> {
        let export = service.find(handle.key, handle.secret).ok_or_else(freed_here)?;
        let (base, id) = (export.allocation.base, export.allocation.id);
        check_size(handle, export.allocation.bytes)?;
        if self.backend.locate(base)?.is_some_and(|found| found.id == id) {
            return Ok((ImportSource::Here, base));
        }
        self.replace_freed(base, allocation.bytes);
        if self.sharing.imports().contains_key(&base) {
            let why = format!(
                "{base:#x} was recorded as memory that the program had mapped itself, but is now another allocation; close it first"
            );
            return Err(ipc::IpcError::PeerGone(why).into());
        }
        let shared = Shared { form: Shared::SAME_PROCESS, descriptor: None, offset: base, payload: [0; ipc::PAYLOAD_BYTES] };
        let source = ImportSource::Context(service.hold(handle.key));
        Ok((source, self.backend.map(shared, allocation)?))
    }

    /// Removes the imports whose addresses now belong to a new allocation. This happens if another context of this process frees memory
    /// that this context has imported, because the import remains recorded until its addresses are closed. Later closes of these addresses
    /// then have no effect.
    pub(super) fn replace_freed(&self, base: u64, bytes: u64) {
        let sharing = &self.sharing;
        let is_freed = |import: &&Arc<Import>| {
            import.base.saturating_add(import.bytes) > base && matches!(import.source, ImportSource::Context(_)) && import.check().is_err()
        };
        let freed: Vec<_> =
            sharing.imports().range(..base.saturating_add(bytes)).map(|(_, import)| import).filter(is_freed).cloned().collect();
        for import in freed {
            {
                let mut imports = sharing.imports_mut();
                if !imports.get(&import.base).is_some_and(|found| Arc::ptr_eq(found, &import)) {
                    continue;
                }
                imports.remove(&import.base);
            }
            let holders = std::mem::take(&mut *import.holders.lock().unwrap_or_else(PoisonError::into_inner));
            let mut replaced = lock(&sharing.replaced);
            holders.into_iter().for_each(|(address, count)| *replaced.entry(address).or_default() += count);
            drop(replaced);
            // The backend must also remove its record of the import at this address, because the new allocation has replaced it.
            if let Err(error) = self.backend.unmap(import.base) {
                log::debug!("could not unmap memory that another process has freed: {error}");
            }
            self.holdings.count_free();
        }
    }

    /// Closes one use of an address of an import that was replaced by a new allocation. Returns false if there is no such use.
    fn close_replaced(&self, address: u64) -> bool {
        let mut replaced = lock(&self.sharing.replaced);
        let Some(count) = replaced.get_mut(&address) else { return false };
        *count -= 1;
        if *count == 0 {
            replaced.remove(&address);
        }
        true
    }

    /// Maps memory of another process. Returns the connection to that process and the address of the mapping.
    fn import_there(&self, handle: &Handle, allocation: &Allocation) -> Result<(ImportSource, u64), Error> {
        let until = Instant::now() + PATIENCE;
        let connected = self.sharing.imports().values().find_map(|import| match &import.source {
            ImportSource::Process(peer, _) if import.token == handle.origin.token => Some(Arc::clone(peer)),
            _ => None,
        });
        let peer = match connected {
            Some(peer) => peer,
            None => Arc::new(Peer::connect(&handle.origin, until)?),
        };
        let (shared, slot) = peer.import(handle.key, handle.secret, until)?;
        match self.backend.map(shared, allocation) {
            Ok(base) => Ok((ImportSource::Process(peer, slot), base)),
            Err(error) => {
                peer.close(slot);
                Err(error.into())
            }
        }
    }

    /// Returns a description of the allocation to which a handle refers, with the device number that applies in this process. If the device
    /// is not visible here, the device `instead` takes its place.
    fn allocation_of(&self, handle: &Handle, instead: Option<DeviceId>) -> Result<Allocation, Error> {
        let machine = &self.machine;
        let gpus = (0..machine.gpu_count()).map(DeviceId::gpu);
        for device in gpus.chain((0..machine.host_count()).map(DeviceId::host)) {
            if self.backend.device_uuid(device)? == handle.device {
                return Ok(Allocation { id: 0, base: 0, bytes: handle.allocation_bytes, device, kind: handle.kind });
            }
        }
        if let Some(device) = instead {
            return Ok(Allocation { id: 0, base: 0, bytes: handle.allocation_bytes, device, kind: handle.kind });
        }
        let why = format!(
            "the memory is on {}, {} of {}, which is not visible to this process: make all GPUs of the node visible to every process \
             (CUDA_VISIBLE_DEVICES), and set the same MPGPU_TOPOLOGY",
            name_of(&handle.device),
            DeviceId(handle.number).in_words(),
            handle.origin
        );
        Err(ipc::IpcError::NotSupported(why).into())
    }

    /// Notifies the owner of imported memory that this context has left the communication that uses the memory. `departure` states how.
    pub fn leave_memory(&self, address: u64, departure: Departure) {
        let Some(import) = self.sharing.import_at(address) else { return };
        match (&import.source, Service::current()) {
            (ImportSource::Process(peer, _), _) => peer.leave(import.key, import.secret, departure),
            (ImportSource::Context(_), Some(service)) => service.leave(import.key, import.secret, departure),
            _ => {}
        }
    }

    /// Notifies the owner of imported memory that this process will set no counter in the memory to a value above `value`.
    pub fn leave_signals(&self, address: u64, value: u64) -> Result<(), Error> {
        let _open = self.enter()?;
        self.sharing.import_at(address).ok_or(Error::NotImported(address))?;
        self.leave_memory(address, Departure { steps: value, ..Departure::default() });
        Ok(())
    }

    /// Closes one use of an address that [`import_memory`](ContextState::import_memory) has returned. When the last use of the imported
    /// memory is closed, waits for all work and unmaps the memory.
    pub fn close_memory(&self, address: u64) -> Result<(), Error> {
        self.close_import(address, false)
    }

    /// Closes one use of imported memory like [`close_memory`](ContextState::close_memory), but does not wait. The caller must know that
    /// all work on the memory has finished.
    pub fn close_idle(&self, address: u64) -> Result<(), Error> {
        self.close_import(address, true)
    }

    fn close_import(&self, address: u64, is_idle: bool) -> Result<(), Error> {
        drop(self.enter()?);
        if self.close_replaced(address) {
            return Ok(());
        }
        let closed = self.close_present(address, is_idle);
        // Another thread may have replaced this import by a new allocation meanwhile.
        if matches!(closed, Err(Error::NotImported(_))) && self.close_replaced(address) { Ok(()) } else { closed }
    }

    fn close_present(&self, address: u64, is_idle: bool) -> Result<(), Error> {
        let sharing = &self.sharing;
        let find = || sharing.import_at(address).ok_or(Error::NotImported(address));
        let mut waited = is_idle;
        let (import, _importing) = loop {
            // The lock is not held while waiting, because the work may depend on a peer, and other imports must not be blocked meanwhile.
            let import = find()?;
            // The program must wait for the work itself before it unmaps its own mapping.
            if matches!(import.source, ImportSource::Program) {
                waited = true;
            } else if !waited && import.is_foreign() && import.is_last(address) {
                // An error of an execution is reported to the caller that waits for this execution. The memory is released in any case.
                let _ = self.backend.synchronize();
                waited = true;
            }
            let importing = lock(&sharing.importing);
            // If two threads close the last two uses of an import at the same time, one of the threads learns only here that its use is the
            // last.
            if waited || !import.is_foreign() || !import.is_last(address) {
                break (find()?, importing);
            }
        };
        if !import.let_go(address).ok_or(Error::NotImported(address))? {
            return Ok(());
        }
        sharing.imports_mut().remove(&import.base);
        if !import.is_foreign() {
            return Ok(());
        }
        let unmapped = self.backend.unmap(import.base);
        self.holdings.count_free();
        if let ImportSource::Process(peer, slot) = &import.source {
            peer.close(*slot);
        }
        Ok(unmapped?)
    }

    /// Returns an identifier of a device that is equal in all processes of the node, even if they number the device differently.
    pub fn device_uuid(&self, device: DeviceId) -> Result<[u8; 16], Error> {
        self.check_device(device)?;
        Ok(self.backend.device_uuid(device)?)
    }
}

/// Formats the identity (UUID) of a device for messages.
fn name_of(identity: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let parts = [&identity[..4], &identity[4..6], &identity[6..8], &identity[8..10], &identity[10..]];
    parts.map(hex).join("-")
}
