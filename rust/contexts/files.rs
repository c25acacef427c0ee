//! Files that the context has mapped for its caller. Copies from such a mapping read the file.

use super::error::Error;
use crate::backend::files::FileMapping;
use crate::sync::{Mutex, lock};
use std::collections::BTreeMap;

/// Mappings of files that belong to one context, by their addresses.
#[derive(Debug, Default)]
pub(super) struct Files(Mutex<BTreeMap<u64, FileMapping>>);

impl Files {
    /// Adds a mapping. Returns its address and its size in bytes.
    pub fn add(&self, mapping: FileMapping) -> (u64, u64) {
        let found = (mapping.address(), mapping.bytes());
        lock(&self.0).insert(found.0, mapping);
        found
    }

    /// Removes the mapping that begins at `address` from the list and returns it. Dropping it unmaps the file.
    pub fn take(&self, address: u64) -> Result<FileMapping, Error> {
        lock(&self.0).remove(&address).ok_or(Error::NotMapped(address))
    }

    /// Removes all mappings and returns their number. The caller guarantees that no work uses them any more.
    pub fn release(&self) -> usize {
        std::mem::take(&mut *lock(&self.0)).len()
    }
}
