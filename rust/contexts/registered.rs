//! Host memory of the program's own that it has registered: pinned where it lies, in pieces that a copy must not pass from one into the next.

use super::batch::{Batch, Located};
use super::error::{End, Error};
use crate::backend::{Backend, BackendError, REGISTERED_PIECE};
use crate::plan::Shape;
use crate::sync::{Mutex, lock};
use std::collections::BTreeMap;

/// By the first address.
#[derive(Debug, Default)]
pub(super) struct Registrations(pub Mutex<BTreeMap<u64, Registration>>);

/// See [`Context::register_memory`](super::lifetime::Context::register_memory).
#[derive(Copy, Clone, Debug)]
pub(super) struct Registration {
    pub bytes: u64,
    pub is_writable: bool,
}

impl Registrations {
    /// The one that an address lies in.
    fn at(&self, address: u64) -> Option<Registration> {
        let known = lock(&self.0);
        let (base, registration) = known.range(..=address).next_back()?;
        (address - base < registration.bytes).then_some(*registration)
    }

    /// Bytes from an address to where a copy must end, if it lies in such memory.
    fn reach(&self, address: u64) -> Option<u64> {
        self.at(address).map(|_| REGISTERED_PIECE - address % REGISTERED_PIECE)
    }

    /// Whether so many bytes there are of several pieces.
    pub fn crosses(&self, address: u64, bytes: u64) -> bool {
        self.reach(address).is_some_and(|reach| reach < bytes)
    }

    /// The batch as a backend can copy it: a transfer that passes from one piece into the next is several. `None` where none does. What tells of
    /// operations counts these.
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

    /// Takes all back that is left, and says how much. All work has finished.
    pub fn release(&self, backend: &dyn Backend) -> (u64, Result<(), BackendError>) {
        let left = std::mem::take(&mut *lock(&self.0));
        let bytes = left.values().map(|registration| registration.bytes).sum();
        (bytes, left.into_keys().map(|address| backend.unregister(address)).fold(Ok(()), Result::and))
    }
}
