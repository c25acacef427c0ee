//! Serializes the executions that several threads enqueue into one stream.
//!
//! An execution on streams needs many calls of the driver. A thread has a *turn* in a stream while only this thread may enqueue an
//! execution into the stream. The calls for the caller's stream and the job of the copy threads are enqueued in the same turn, so that
//! streams, threads and later executions process all executions of a stream in the same order. Any operation that may make a stream wait is
//! also enqueued in a turn, so that an execution that has begun waits only for its own operations.

use super::driver::lock;
use super::parts::Core;
use crate::backend::{BackendError, StreamHandle};
use smallvec::SmallVec;
use std::sync::{Condvar, Mutex, PoisonError};

/// Streams into which a thread currently has the exclusive right to enqueue executions.
#[derive(Debug, Default)]
pub(super) struct Turns {
    taken: Mutex<SmallVec<[u64; 4]>>,
    over: Condvar,
}

/// Exclusive right of a thread to enqueue executions into a stream. Dropping the value ends the right.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    stream: u64,
}

impl Turns {
    /// Waits until no other thread has the exclusive right to enqueue into the stream, and acquires that right for the calling thread.
    /// Returns `None` for the per-thread default stream, because no other thread uses that stream.
    pub fn take(&self, stream: StreamHandle, gpu: usize, number: Option<u64>) -> Option<Turn<'_>> {
        // While a call uses a stream, no other stream has the same handle. The handle therefore identifies a stream without a number.
        let stream = own_number(stream, gpu, number).or_else(|| (stream.0 != PER_THREAD).then_some(stream.0 as u64))?;
        let mut taken = lock(&self.taken);
        while taken.contains(&stream) {
            taken = self.over.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        taken.push(stream);
        Some(Turn { turns: self, stream })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        lock(&self.turns.taken).retain(|stream| *stream != self.stream);
        self.turns.over.notify_all();
    }
}

/// Handle of the per-thread default stream (`CU_STREAM_PER_THREAD`).
const PER_THREAD: usize = 2;

/// Returns an ID that identifies a stream: one ID for the legacy default stream of each GPU, and otherwise the ID `number` from the driver.
/// Returns `None` if the stream has no unique ID.
pub(super) fn own_number(stream: StreamHandle, gpu: usize, number: Option<u64>) -> Option<u64> {
    if stream.0 < PER_THREAD { Some(u64::MAX - gpu as u64) } else { number }
}

impl Core {
    /// Waits for the exclusive right to enqueue into a stream, and acquires it. Returns `None` for the per-thread default stream, because
    /// no other thread uses that stream.
    pub fn turn(&self, stream: StreamHandle) -> Result<Option<Turn<'_>>, BackendError> {
        let found = self.streams.find(&self.gpus, stream)?;
        Ok(self.turns.take(stream, found.gpu, found.number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn one_thread_at_a_time_has_a_turn_in_a_stream_and_other_streams_are_free() {
        let (turns, inside) = (Turns::default(), AtomicUsize::new(0));
        let elsewhere = turns.take(StreamHandle(64), 0, Some(8));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let _turn = turns.take(StreamHandle(32), 0, Some(7)).expect("a turn");
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        inside.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
        drop(elsewhere);
        assert!(lock(&turns.taken).is_empty());
        let legacy = [0, 1].map(|handle| own_number(StreamHandle(handle), 3, None));
        assert!(legacy[0].is_some() && legacy[0] == legacy[1] && legacy[0] != own_number(StreamHandle(0), 2, None));
        assert!(turns.take(StreamHandle(2), 0, None).is_none());
    }
}
