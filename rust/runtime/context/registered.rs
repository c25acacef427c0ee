//! Host memory of the program's own that it has registered: pinned where it lies, in pieces that a copy must not pass from one into the next.

use super::batch::{Batch, End, Located};
use super::error::Error;
use super::lifetime::Context;
use crate::backend::{Backend, BackendError, REGISTERED_PIECE};
use crate::plan::Shape;
use crate::sync::{Mutex, lock};
use std::collections::BTreeMap;

/// By the first address.
#[derive(Debug, Default)]
pub(super) struct Registrations(Mutex<BTreeMap<u64, Registration>>);

#[derive(Copy, Clone, Debug)]
struct Registration {
    bytes: u64,
    is_writable: bool,
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

impl Context {
    /// Pins host memory of the program's own, so that copies read and write it where it lies. Its pages are brought in by threads, in huge pages
    /// where that is asked for. Blocks. The memory stays mapped until [`unregister_memory`](Context::unregister_memory). On an error nothing is
    /// pinned.
    pub fn register_memory(&self, address: u64, bytes: u64, huge: bool) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        let refuse = |reason: String| Err(Error::NotRegistrable { address, bytes, reason });
        if address == 0 || bytes == 0 {
            return refuse("that is no memory".into());
        }
        let Some(last) = address.checked_add(bytes - 1) else {
            return refuse("it runs past the end of the address space".into());
        };
        let inside = lock(&self.shared.registrations.0).range(address..=last).next().map(|(base, _)| *base);
        for at in [Some(address), Some(last), inside].into_iter().flatten() {
            if let Some(known) = self.shared.locate(at)? {
                let (base, size, device) = (known.base, known.bytes, known.device.in_words());
                return refuse(format!(
                    "{at:#x} is memory of {device} that is pinned already ({base:#x}, {size} bytes): copies use it as it is"
                ));
            }
        }
        let is_writable = self.backend().register(address, bytes, huge)?;
        lock(&self.shared.registrations.0).insert(address, Registration { bytes, is_writable });
        Ok(())
    }

    /// Takes that back. Waits until everything enqueued so far has finished, because a copy may still use it. Plans that use it can no longer be
    /// executed.
    pub fn unregister_memory(&self, address: u64) -> Result<(), Error> {
        let shared = &*self.shared;
        drop(shared.enter()?);
        lock(&shared.registrations.0).remove(&address).ok_or(Error::NotRegistered(address))?;
        // The error of an execution is for whoever waits for it.
        let _ = shared.backend.synchronize();
        let taken_back = shared.backend.unregister(address);
        shared.holdings.count_free();
        Ok(taken_back?)
    }
}
