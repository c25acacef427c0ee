//! Mapping memory that another process has exported.
//!
//! It is mapped through the GPU of the calling thread, or one that is in use already, so that a rank does not get a context on each GPU of
//! its neighbours.

use super::driver::{OutsideCapture, call_optional, handle};
use super::export::{DESCRIPTOR, IPC, MEMORY_FILE, POOL};
use super::parts::Core;
use super::pools::POSIX_FILE_DESCRIPTOR;
use super::sharing::{Source, pin, release_handle};
use crate::backend::Shared;
use crate::backend::{Allocation, BackendError};
use crate::ipc::segment::Mapping;
use rustix::fd::{AsRawFd, OwnedFd};
use std::ffi::c_void;

impl Core {
    /// Maps what another process has shared.
    pub fn map(&self, shared: &Shared, allocation: &Allocation) -> Result<u64, BackendError> {
        self.gpus.check_alive()?;
        let (base, source) = match (shared.form, &shared.descriptor) {
            (MEMORY_FILE, Some(file)) => {
                let mapping = Mapping::new(file, allocation.bytes).map_err(|errno| BackendError::Driver {
                    what: "mapping memory of another process".into(),
                    reason: std::io::Error::from(errno).to_string(),
                    code: i64::from(errno.raw_os_error()),
                })?;
                pin(&self.gpus, mapping.base(), allocation.bytes)?;
                (mapping.base(), Source::Pinned(mapping))
            }
            (Shared::MAPPED_BY_PROGRAM, _) => self.sharing.adopt(&self.gpus, shared, allocation)?,
            (IPC, _) => self.sharing.open(&self.gpus, &shared.payload, allocation)?,
            (DESCRIPTOR, Some(descriptor)) => self.map_descriptor(descriptor, allocation)?,
            (POOL, Some(descriptor)) => {
                let owner = allocation.device.0 as usize;
                let gpu = self.gpus.mapping_gpu(owner);
                let base = self.sharing.pools.open(&self.gpus, gpu, (descriptor, shared.offset, &shared.payload), owner)?;
                (base, Source::OfPool(gpu, shared.offset))
            }
            (form, _) => {
                return Err(BackendError::NotSupported(format!("memory is shared in form {form}, which this version does not know")));
            }
        };
        self.sharing.insert(Allocation { base, ..*allocation }, source);
        Ok(base)
    }

    /// Maps memory of the virtual memory API, for every GPU that can reach it.
    fn map_descriptor(&self, descriptor: &OwnedFd, allocation: &Allocation) -> Result<(u64, Source), BackendError> {
        let (driver, bytes, owner) = (self.gpus.driver, allocation.bytes as usize, allocation.device.0 as usize);
        let _outside = OutsideCapture::enter(driver);
        let _current = self.gpus.primary(self.gpus.mapping_gpu(owner))?.enter()?;
        let mut memory = 0;
        let number: *mut c_void = handle(descriptor.as_raw_fd() as usize);
        // SAFETY: the output is valid for the call, which takes a descriptor in place of a pointer.
        unsafe { call_optional!(driver, cuMemImportFromShareableHandle(&mut memory, number, POSIX_FILE_DESCRIPTOR)) }?;
        let mut base = 0;
        // SAFETY: as above.
        let reserved = unsafe { call_optional!(driver, cuMemAddressReserve(&mut base, bytes, 0, 0, 0)) };
        // SAFETY: an address range that was just reserved, of this size.
        let mapped = reserved.and_then(|()| unsafe { call_optional!(driver, cuMemMap(base, bytes, 0, memory, 0)) });
        let accessible = mapped.clone().and_then(|()| {
            let access = self.gpus.access_to(owner);
            // SAFETY: as above, and a list of this length.
            unsafe { call_optional!(driver, cuMemSetAccess(base, bytes, access.as_ptr(), access.len())) }
        });
        if let Err(error) = accessible {
            if mapped.is_ok() {
                // SAFETY: mapped above, and nobody has used it.
                let _ = unsafe { call_optional!(driver, cuMemUnmap(base, bytes)) };
            }
            if base != 0 {
                // SAFETY: reserved above.
                let _ = unsafe { call_optional!(driver, cuMemAddressFree(base, bytes)) };
            }
            release_handle(driver, memory);
            return Err(error);
        }
        Ok((base, Source::Mapped(memory)))
    }
}
