//! Implements the calls that allocate and free memory of a context, and that register host memory of the program.

use super::deferred::UsedBy;
use super::error::Error;
use super::lifetime::Context;
use super::registered::Registration;
use super::state::ContextState;
use crate::backend::files::{self, Caching};
use crate::backend::{BackendError, Report, StreamHandle, no_completion};
use crate::sync::lock;
use crate::topology::DeviceId;
use std::os::fd::BorrowedFd;

impl Context {
    /// Allocates `bytes` bytes on `device` and returns their address. The context owns the memory until [`free`](Context::free).
    pub fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, Error> {
        self.allocate_as(device, bytes, false)
    }

    /// Allocates `bytes` bytes on `device` that other processes can map, and returns their address.
    pub fn allocate_shared(&self, device: DeviceId, bytes: u64) -> Result<u64, Error> {
        self.allocate_as(device, bytes, true)
    }

    fn allocate_as(&self, device: DeviceId, bytes: u64, is_shared: bool) -> Result<u64, Error> {
        let _open = self.shared.enter()?;
        self.shared.check_device(device)?;
        if self.backend().frees_at_once() {
            self.shared.reclaim();
        }
        let allocate = || self.shared.holdings.allocate(device, bytes, is_shared, self.backend());
        let allocated = match allocate() {
            Err(BackendError::OutOfMemory { .. }) if self.shared.reclaim() => allocate(),
            allocated => allocated,
        }?;
        self.shared.replace_freed(allocated, bytes);
        Ok(allocated)
    }

    /// Frees memory of [`allocate`](Context::allocate). First waits until all work of the context that was enqueued so far has finished, as
    /// `cudaFree` does, because a copy may still use the memory.
    pub fn free(&self, address: u64) -> Result<(), Error> {
        drop(self.shared.enter()?);
        self.shared.holdings.take(address)?;
        // The error is ignored here: the caller that waits for the failed execution receives it. The memory is freed in any case.
        let _ = self.shared.backend.synchronize();
        self.shared.sharing.withdraw(address, self.backend());
        let freed = self.shared.backend.free(address);
        self.shared.holdings.count_free();
        self.shared.reclaim();
        Ok(freed?)
    }

    /// Frees memory as soon as the work that is enqueued in `stream` now has finished. Does not wait for this work. Plans and other
    /// processes can no longer use the memory once this function has returned. The backend frees the memory later: in the next
    /// [`free`](Context::free), when memory runs short, or when the context closes. If this function returns an error, nothing is freed.
    pub fn free_async(&self, address: u64, stream: StreamHandle) -> Result<(), Error> {
        let shared = &*self.shared;
        let _open = shared.enter()?;
        if !shared.holdings.has(address) {
            return Err(Error::NotAllocated(address));
        }
        let after = shared.backend.mark_end(stream, &[], Report::End)?.ok_or_else(no_completion)?;
        if after.is_captured() {
            let why = "memory cannot be freed in the order of a captured stream, because its graph may run later or again: free it without a stream";
            return Err(Error::NotSupported(why.into()));
        }
        let bytes = shared.holdings.take(address)?;
        shared.sharing.withdraw(address, self.backend());
        shared.deferred.add(address, bytes, UsedBy::Work(after));
        shared.holdings.count_free();
        if self.backend().frees_at_once() {
            shared.reclaim();
        }
        Ok(())
    }

    /// Registers (pins) host memory of the program, so that copies access it directly. CPU threads first touch all pages; if `huge` is
    /// true, the operating system is asked for huge pages. Blocks until the memory is pinned. The memory must stay mapped until
    /// [`unregister_memory`](Context::unregister_memory). On an error nothing is pinned.
    pub fn register_memory(&self, address: u64, bytes: u64, huge: bool) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        let refuse = |reason: String| Err(Error::NotRegistrable { address, bytes, reason });
        if address == 0 || bytes == 0 {
            return refuse("the address is null or the size is 0".into());
        }
        let Some(last) = address.checked_add(bytes - 1) else {
            return refuse("the range extends past the end of the address space".into());
        };
        let inside = lock(&self.shared.registrations.0).range(address..=last).next().map(|(base, _)| *base);
        for at in [Some(address), Some(last), inside].into_iter().flatten() {
            if let Some(known) = self.shared.locate(at)? {
                let (base, size, device) = (known.base, known.bytes, known.device.in_words());
                return refuse(format!(
                    "{at:#x} is memory of {device} that is pinned already ({base:#x}, {size} bytes): copies use it without registration"
                ));
            }
        }
        let is_writable = self.backend().register(address, bytes, huge)?;
        lock(&self.shared.registrations.0).insert(address, Registration { bytes, is_writable });
        Ok(())
    }

    /// Unregisters memory that was registered. First waits until all work of the context that was enqueued so far has finished, because a
    /// copy may still use the memory. Plans that use the memory can no longer be executed.
    pub fn unregister_memory(&self, address: u64) -> Result<(), Error> {
        let shared = &*self.shared;
        drop(shared.enter()?);
        lock(&shared.registrations.0).remove(&address).ok_or(Error::NotRegistered(address))?;
        // The error is ignored here: the caller that waits for the failed execution receives it.
        let _ = shared.backend.synchronize();
        let taken_back = shared.backend.unregister(address);
        shared.holdings.count_free();
        Ok(taken_back?)
    }

    /// Maps a whole file read-only, and returns the address and the size in bytes of the mapping. The descriptor is duplicated, so the
    /// caller may close its own.
    pub fn map_file(&self, descriptor: BorrowedFd<'_>, caching: Caching) -> Result<(u64, u64), Error> {
        let _open = self.shared.enter()?;
        Ok(self.shared.files.add(files::map(descriptor, caching)?))
    }

    /// Removes a mapping made by [`map_file`](Context::map_file). First blocks until all work that the context has enqueued so far has
    /// finished, because copies may still read the file.
    pub fn unmap_file(&self, address: u64) -> Result<(), Error> {
        drop(self.shared.enter()?);
        let mapping = self.shared.files.take(address)?;
        // The error is ignored here: the caller that waits for the failed execution receives it.
        let _ = self.shared.backend.synchronize();
        drop(mapping);
        Ok(())
    }
}

impl ContextState {
    /// Frees memory of [`allocate_shared`](crate::Context::allocate_shared) as soon as no other rank has mapped it. Does not wait until
    /// then.
    pub fn free_unmapped(&self, address: u64) -> Result<(), Error> {
        self.free_later(address, UsedBy::Peers)?;
        self.reclaim();
        Ok(())
    }

    /// Frees memory that no work uses, neither of this rank nor of other ranks. Other ranks may still have mapped it. The memory is
    /// returned to the backend immediately if the backend can free it without waiting, and later if not.
    pub fn free_unused(&self, address: u64) -> Result<(), Error> {
        self.sharing.withdraw(address, &*self.backend);
        self.free_later(address, UsedBy::Nobody)?;
        if self.backend.frees_at_once() {
            self.reclaim();
        }
        Ok(())
    }

    fn free_later(&self, address: u64, used_by: UsedBy) -> Result<(), Error> {
        let _open = self.enter()?;
        let bytes = self.holdings.take(address)?;
        self.deferred.add(address, bytes, used_by);
        self.holdings.count_free();
        Ok(())
    }
}
