//! Registered host memory, which is the program's own memory, pinned in place. It is pinned in pieces, and no copy may cross the boundary
//! between two pieces.

use super::batch::{Batch, Located};
use super::error::{End, Error};
use crate::backend::{Backend, BackendError, REGISTERED_PIECE};
use crate::plan::Shape;
use crate::sync::{Mutex, lock};
use std::collections::BTreeMap;

/// Registrations by the first address of their memory.
#[derive(Debug, Default)]
pub(super) struct Registrations(pub Mutex<BTreeMap<u64, Registration>>);

/// One range of registered memory. See [`Context::register_memory`](super::lifetime::Context::register_memory).
#[derive(Copy, Clone, Debug)]
pub(super) struct Registration {
    pub bytes: u64,
    pub is_writable: bool,
}

impl Registrations {
    /// Returns the registration that contains `address`.
    fn at(&self, address: u64) -> Option<Registration> {
        let known = lock(&self.0);
        let (base, registration) = known.range(..=address).next_back()?;
        (address - base < registration.bytes).then_some(*registration)
    }

    /// Returns the number of bytes from `address` to the end of its piece, or `None` if the address is not in registered memory.
    fn reach(&self, address: u64) -> Option<u64> {
        self.at(address).map(|_| REGISTERED_PIECE - address % REGISTERED_PIECE)
    }

    /// True if the range lies in more than one piece of registered memory.
    pub fn crosses(&self, address: u64, bytes: u64) -> bool {
        self.reach(address).is_some_and(|reach| reach < bytes)
    }

    /// Splits the batch so that no transfer crosses from one piece into the next, as a backend requires. Returns `None` if no transfer
    /// crosses. Reports about operations, such as traces, number the transfers of the split batch.
    pub fn cut(&self, batch: &Batch) -> Result<Option<Batch>, Error> {
        if lock(&self.0).is_empty() {
            return Ok(None);
        }
        let mut cut = Batch::new();
        for (transfer, whole) in batch.iter().enumerate() {
            if whole.shape.bytes > 0 && self.at(whole.dst).is_some_and(|registration| !registration.is_writable) {
                return Err(Error::ReadOnly { transfer, end: End::Destination, address: whole.dst });
            }
            let (mut at, bytes) = (0, whole.shape.bytes);
            loop {
                let reach = [whole.dst + at, whole.src + at].into_iter().filter_map(|address| self.reach(address)).min();
                let next = reach.map_or(bytes, |reach| bytes.min(at + reach));
                let shape = Shape { bytes: next - at, ..whole.shape };
                cut.push(Located { dst: whole.dst + at, src: whole.src + at, shape, ..*whole });
                at = next;
                if at == bytes {
                    break;
                }
            }
        }
        Ok((cut.len() > batch.len()).then_some(cut))
    }

    /// Unregisters all memory that is still registered and returns its size in bytes. All work must have finished.
    pub fn release(&self, backend: &dyn Backend) -> (u64, Result<(), BackendError>) {
        let left = std::mem::take(&mut *lock(&self.0));
        let bytes = left.values().map(|registration| registration.bytes).sum();
        (bytes, left.into_keys().map(|address| backend.unregister(address)).fold(Ok(()), Result::and))
    }
}
