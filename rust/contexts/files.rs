//! Files that the context has mapped for its caller. Copies from such a mapping read the file.

use super::error::Error;
use super::lifetime::Context;
use crate::backend::files::{self, Caching, FileMapping};
use crate::sync::{Mutex, lock};
use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

/// Mappings of files that belong to one context, by their addresses.
#[derive(Debug, Default)]
pub(super) struct Files(Mutex<BTreeMap<u64, FileMapping>>);

impl Files {
    /// Removes all mappings and returns their number. No work may use them any more.
    pub fn release(&self) -> usize {
        std::mem::take(&mut *lock(&self.0)).len()
    }
}

impl Context {
    /// Maps a whole file read-only, and returns the address and the size in bytes of the mapping. The descriptor is duplicated, so the
    /// caller may close its own.
    pub fn map_file(&self, descriptor: BorrowedFd<'_>, caching: Caching) -> Result<(u64, u64), Error> {
        let _open = self.shared.enter()?;
        let mapping = files::map(descriptor, caching)?;
        let found = (mapping.address(), mapping.bytes());
        lock(&self.shared.files.0).insert(found.0, mapping);
        Ok(found)
    }

    /// Removes a mapping of [`map_file`](Context::map_file). First waits until all work of the context that was enqueued so far has
    /// finished, because a copy may still read the file.
    pub fn unmap_file(&self, address: u64) -> Result<(), Error> {
        drop(self.shared.enter()?);
        let mapping = lock(&self.shared.files.0).remove(&address).ok_or(Error::NotMapped(address))?;
        // An error of an execution is reported to the caller that waits for this execution.
        let _ = self.shared.backend.synchronize();
        drop(mapping);
        Ok(())
    }
}
