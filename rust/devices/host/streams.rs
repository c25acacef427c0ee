//! StreamTable: those that callers hold, and destroyed ones whose work still runs.

use super::chain::Chain;
use super::node::{Node, Work};
use super::queue::Queue;
use crate::backend::{BackendError, StreamHandle};
use crate::sync::{RwLock, held};
use crate::topology::DeviceId;
use slotmap::{DefaultKey, Key, KeyData, SlotMap};
use std::sync::{Arc, OnceLock};

/// A handle holds a slot map's key: the slot's index and its version.
const _: () = assert!(size_of::<usize>() == 8, "handles need 64 bits");

#[derive(Debug)]
pub(super) struct Stream<W: Work> {
    /// `None` for the default stream.
    pub device: Option<DeviceId>,
    pub chain: Chain<W>,
    /// Serves the host functions, if there have been any.
    pub functions: OnceLock<Arc<Queue<W>>>,
}

impl<W: Work> Stream<W> {
    fn new(device: Option<DeviceId>) -> Self {
        Stream { device, chain: Chain::new(), functions: OnceLock::new() }
    }

    /// Ends the threads of a stream whose work has finished.
    fn end(&self) {
        self.functions.get().into_iter().for_each(|queue| queue.join());
    }
}

/// All streams of a backend.
#[derive(Debug)]
pub(super) struct StreamTable<W: Work> {
    default: Stream<W>,
    /// One lock for both, so that whoever looks at all streams finds each of them, also while it is being destroyed.
    others: RwLock<Others<W>>,
}

#[derive(Debug)]
struct Others<W: Work> {
    held: SlotMap<DefaultKey, Stream<W>>,
    /// Destroyed streams that may still have work.
    destroyed: Vec<Stream<W>>,
}

impl<W: Work> StreamTable<W> {
    /// The default stream.
    pub fn new() -> Self {
        StreamTable { default: Stream::new(None), others: RwLock::new(Others { held: SlotMap::new(), destroyed: Vec::new() }) }
    }

    pub fn create(&self, device: DeviceId) -> StreamHandle {
        let key = held(self.others.write()).held.insert(Stream::new(Some(device)));
        StreamHandle(key.data().as_ffi() as usize)
    }

    /// Enqueued work still finishes.
    pub fn destroy(&self, handle: StreamHandle) -> Result<(), BackendError> {
        let mut others = held(self.others.write());
        let stream = key(handle.0).and_then(|key| others.held.remove(key)).ok_or(BackendError::InvalidHandle(handle.0, "stream"))?;
        others.destroyed.push(stream);
        let finished: Vec<Stream<W>> = others.destroyed.extract_if(.., |stream| stream.chain.tail().is_none()).collect();
        drop(others);
        finished.iter().for_each(Stream::end);
        Ok(())
    }

    /// Calls `work` with a stream. The stream cannot be destroyed meanwhile, so that nothing is appended to it afterwards.
    pub fn with<T>(&self, handle: StreamHandle, work: impl FnOnce(&Stream<W>) -> Result<T, BackendError>) -> Result<T, BackendError> {
        if handle.0 == 0 {
            return work(&self.default);
        }
        let others = held(self.others.read());
        work(key(handle.0).and_then(|key| others.held.get(key)).ok_or(BackendError::InvalidHandle(handle.0, "stream"))?)
    }

    /// StreamTable of `device` that were not destroyed.
    pub fn count(&self, device: DeviceId) -> u64 {
        held(self.others.read()).held.values().filter(|stream| stream.device == Some(device)).count() as u64
    }

    /// Blocks until all work enqueued so far has finished, that of destroyed streams included.
    pub fn wait_finished(&self) {
        let tails: Vec<Arc<Node<W>>> = {
            let others = held(self.others.read());
            let streams = others.held.values().chain(&others.destroyed).chain([&self.default]);
            streams.filter_map(|stream| stream.chain.tail()).collect()
        };
        tails.iter().for_each(|tail| tail.wait_finished());
    }

    /// Waits for all work, and ends the threads of all streams.
    pub fn end(&mut self) {
        self.wait_finished();
        let others = held(self.others.get_mut());
        others.held.values().chain(&others.destroyed).chain([&self.default]).for_each(Stream::end);
    }
}

/// A handle's key; `None` for values that no key has.
pub(super) fn key(handle: usize) -> Option<DefaultKey> {
    let data = KeyData::from_ffi(handle as u64);
    // `from_ffi` accepts, and changes, values that `as_ffi` never returns.
    (data.as_ffi() == handle as u64).then(|| data.into())
}
