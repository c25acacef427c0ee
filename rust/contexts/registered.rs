//! Tracks registered host memory: memory of the program that the context has pinned in place. It is pinned in pieces of fixed size, and no
//! single copy may cross the boundary between two pieces.

use super::batch::{Batch, Located};
use super::error::{End, Error};
use crate::backend::{Backend, BackendError, REGISTERED_PIECE};
use crate::plan::Shape;
use crate::sync::{Mutex, lock};
use std::collections::BTreeMap;

/// Registered host memory of one context, by the first address of each range.
#[derive(Debug, Default)]
pub(super) struct Registrations(pub Mutex<BTreeMap<u64, Registration>>);

/// One range of registered (pinned) host memory. See [`Context::register_memory`](super::lifetime::Context::register_memory).
#[derive(Copy, Clone, Debug)]
pub(super) struct Registration {
    pub bytes: u64,
    pub is_writable: bool,
}

impl Registrations {
    /// Returns the registered range that contains `address`, or `None`.
    fn at(&self, address: u64) -> Option<Registration> {
        let known = lock(&self.0);
        let (base, registration) = known.range(..=address).next_back()?;
        (address - base < registration.bytes).then_some(*registration)
    }

    /// Returns the number of bytes from `address` to the end of the pinned piece that contains it, or `None` if the address is not in
    /// registered memory.
    fn reach(&self, address: u64) -> Option<u64> {
        self.at(address).map(|_| REGISTERED_PIECE - address % REGISTERED_PIECE)
    }

    /// True if the `bytes` bytes at `address` are in registered memory and lie in more than one separately pinned piece.
    pub fn crosses(&self, address: u64, bytes: u64) -> bool {
        self.reach(address).is_some_and(|reach| reach < bytes)
    }

    /// Splits transfers so that none crosses the boundary between two pinned pieces, as backends require. Returns `None` if no transfer
    /// crosses a boundary. In reports about single operations, such as traces, transfer numbers refer to the returned batch.
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

    /// Unregisters all memory that is still registered, and returns its total size in bytes. All work must have finished.
    pub fn release(&self, backend: &dyn Backend) -> (u64, Result<(), BackendError>) {
        let left = std::mem::take(&mut *lock(&self.0));
        let bytes = left.values().map(|registration| registration.bytes).sum();
        (bytes, left.into_keys().map(|address| backend.unregister(address)).fold(Ok(()), Result::and))
    }
}
