//! Stores the streams of a host backend: the streams that callers have created, and destroyed streams whose work is not finished.

use super::chain::Chain;
use super::node::{Node, Work};
use super::queue::Queue;
use crate::backend::{BackendError, StreamHandle};
use crate::sync::{RwLock, held};
use crate::topology::DeviceId;
use ahash::RandomState;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Returns a new handle for a stream or an event. No other stream or event of the process has or had this handle, so a handle that belongs
/// to another context or was destroyed is detected.
pub(super) fn next_handle() -> usize {
    const _: () = assert!(size_of::<usize>() == 8, "handles need 64 bits");
    // Small numbers denote CUDA's predefined streams. The counter comes from the standard library, because it is not part of the model that
    // `shuttle` checks.
    static NEXT: AtomicUsize = AtomicUsize::new(1 << 32);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[derive(Debug)]
pub(super) struct Stream<W: Work> {
    /// Device for which the stream was created, or `None` for the default stream.
    pub device: Option<DeviceId>,
    pub chain: Chain<W>,
    /// Queue of the stream's host functions. It is created when the first function is enqueued.
    pub functions: OnceLock<Arc<Queue<W>>>,
}

impl<W: Work> Stream<W> {
    fn new(device: Option<DeviceId>) -> Self {
        Stream { device, chain: Chain::new(), functions: OnceLock::new() }
    }

    /// Ends the threads that run the stream's host functions. All work of the stream must have finished.
    fn end(&self) {
        self.functions.get().into_iter().for_each(|queue| queue.join());
    }
}

/// Table of all streams of a host backend.
#[derive(Debug)]
pub(super) struct StreamTable<W: Work> {
    default: Stream<W>,
    /// All streams except the default stream. One lock protects existing and destroyed streams, so that a thread that visits all streams
    /// also finds a stream that is being destroyed.
    others: RwLock<Others<W>>,
}

#[derive(Debug)]
struct Others<W: Work> {
    held: HashMap<usize, Stream<W>, RandomState>,
    /// Destroyed streams whose work may not have finished.
    destroyed: Vec<Stream<W>>,
}

impl<W: Work> StreamTable<W> {
    /// Creates a table that contains only the default stream.
    pub fn new() -> Self {
        StreamTable { default: Stream::new(None), others: RwLock::new(Others { held: HashMap::default(), destroyed: Vec::new() }) }
    }

    pub fn create(&self, device: DeviceId) -> StreamHandle {
        let handle = next_handle();
        held(self.others.write()).held.insert(handle, Stream::new(Some(device)));
        StreamHandle(handle)
    }

    /// Destroys a stream. Work that was enqueued before the call still finishes.
    pub fn destroy(&self, handle: StreamHandle) -> Result<(), BackendError> {
        let mut others = held(self.others.write());
        let stream = others.held.remove(&handle.0).ok_or(BackendError::InvalidHandle(handle.0, "stream"))?;
        others.destroyed.push(stream);
        let finished: Vec<Stream<W>> = others.destroyed.extract_if(.., |stream| stream.chain.tail().is_none()).collect();
        drop(others);
        finished.iter().for_each(Stream::end);
        Ok(())
    }

    /// Calls `work` with a stream, and returns the result of `work`. The stream cannot be destroyed during the call, so that nothing is
    /// appended to a destroyed stream.
    pub fn with<T>(&self, handle: StreamHandle, work: impl FnOnce(&Stream<W>) -> Result<T, BackendError>) -> Result<T, BackendError> {
        if handle.0 == 0 {
            return work(&self.default);
        }
        let others = held(self.others.read());
        work(others.held.get(&handle.0).ok_or(BackendError::InvalidHandle(handle.0, "stream"))?)
    }

    /// Returns the number of streams that were created for `device` and have not been destroyed.
    pub fn count(&self, device: DeviceId) -> u64 {
        held(self.others.read()).held.values().filter(|stream| stream.device == Some(device)).count() as u64
    }

    /// Blocks until all work that was enqueued before the call has finished, including the work of destroyed streams.
    pub fn wait_finished(&self) {
        let tails: Vec<Arc<Node<W>>> = {
            let others = held(self.others.read());
            let streams = others.held.values().chain(&others.destroyed).chain([&self.default]);
            streams.filter_map(|stream| stream.chain.tail()).collect()
        };
        tails.iter().for_each(|tail| tail.wait_finished());
    }

    /// Waits for the work of all streams, and ends the threads that run the host functions of streams.
    pub fn end(&mut self) {
        self.wait_finished();
        let others = held(self.others.get_mut());
        others.held.values().chain(&others.destroyed).chain([&self.default]).for_each(Stream::end);
    }
}
