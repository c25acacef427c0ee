//! Failed waits: a process that was to raise a counter has ended, and streams that waited for it have gone on without its bytes.
//!
//! Work behind such a wait used bytes that never came, and so did work of other streams that were joined by events. On CUDA the library
//! does not see the caller's events, so a failed wait is reported on every stream: the next wait for it returns
//! [`BackendError::PeerGone`], once for each peer.
//!
//! An execution or an event reports every failure that had not been reported on its stream when it was enqueued.
//!
//! While no peer is lost, all of this costs one load.

use super::{BackendError, Signal};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A process that had mapped memory of this one, and has ended without closing it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LostPeer {
    /// Its number, which another process may get after it.
    pub process: i32,
    /// Its connection, which is no other's.
    pub connection: u64,
}

impl fmt::Display for LostPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}, which had mapped this memory, has ended or destroyed its context without closing it", self.process)
    }
}

/// A wait that nobody will satisfy.
#[derive(Copy, Clone, Debug)]
pub struct FailedWait {
    /// What was waited for.
    pub wanted: Signal,
    /// What the counter stands at.
    pub now: u64,
    /// Who might have raised it.
    pub peer: LostPeer,
}

impl fmt::Display for FailedWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FailedWait { wanted: Signal { counter, value }, now, peer } = self;
        write!(f, "the signal at {counter:#x} stands at {now} and was waited for to reach {value}: {peer}")
    }
}

impl FailedWait {
    /// As the error of whoever waits.
    pub fn error(self) -> BackendError {
        BackendError::PeerGone(self.to_string())
    }
}

/// The peers that a backend has lost while its streams waited for them, and who has been told.
#[derive(Debug, Default)]
pub(crate) struct FailedWaits {
    /// How many peers: the length of `WaitsState::lost`, read without the lock.
    count: AtomicUsize,
    state: Mutex<WaitsState>,
}

#[derive(Debug, Default)]
struct WaitsState {
    /// The first failed wait for each peer, oldest first.
    lost: Vec<FailedWait>,
    /// How many of these each stream has been told.
    told: HashMap<u64, usize>,
}

/// What a stream had been told when work was enqueued in it.
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct Told {
    failed: usize,
    /// Not known where nothing was lost, because asking costs something.
    stream: Option<u64>,
}

impl FailedWaits {
    fn state(&self) -> MutexGuard<'_, WaitsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a failed wait, before its stream goes on. Only the first for a peer is an event: a loop may have enqueued thousands.
    pub fn note(&self, wait: FailedWait) {
        let mut state = self.state();
        if state.lost.iter().any(|earlier| earlier.peer == wait.peer) {
            log::debug!("{wait}");
            return;
        }
        log::error!("{wait}; streams that wait for it go on without its bytes, and whoever synchronises them is told");
        state.lost.push(wait);
        self.count.store(state.lost.len(), Ordering::Release);
    }

    /// What work that is enqueued now in a stream comes after. `stream` is a number that no other stream has.
    pub fn told(&self, stream: impl FnOnce() -> u64) -> Told {
        if self.count.load(Ordering::Acquire) == 0 {
            return Told::default();
        }
        let stream = stream();
        Told { failed: self.state().told.get(&stream).copied().unwrap_or(0), stream: Some(stream) }
    }

    /// Tells whoever has waited for a stream of the peers that were lost and that it was not told of.
    pub fn report(&self, stream: impl FnOnce() -> u64) -> Result<(), BackendError> {
        self.report_since(self.told(stream))
    }

    /// The same for whoever has waited for work that was enqueued when its stream had told this.
    pub fn report_since(&self, told: Told) -> Result<(), BackendError> {
        if self.count.load(Ordering::Acquire) <= told.failed {
            return Ok(());
        }
        let mut state = self.state();
        let lost = state.lost.len();
        if let Some(stream) = told.stream {
            state.told.insert(stream, lost);
        }
        let texts: Vec<String> = state.lost[told.failed..].iter().map(FailedWait::to_string).collect();
        Err(BackendError::PeerGone(texts.join("; ")))
    }

    /// The stream is no more, and its number may be another's.
    pub fn forget(&self, stream: impl FnOnce() -> u64) {
        if self.count.load(Ordering::Acquire) > 0 {
            self.state().told.remove(&stream());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_for(process: i32, connection: u64) -> FailedWait {
        FailedWait { wanted: Signal { counter: 0x1000, value: 7 }, now: 3, peer: LostPeer { process, connection } }
    }

    #[track_caller]
    fn said(result: Result<(), BackendError>) -> String {
        match result {
            Err(BackendError::PeerGone(text)) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_stream_is_told_once_of_each_peer() {
        let failed = FailedWaits::default();
        let nobody_asks = || -> u64 { unreachable!("nothing is lost, so which stream it is does not matter") };
        failed.report(nobody_asks).expect("nothing is lost");
        failed.forget(nobody_asks);
        let before = failed.told(nobody_asks);

        for _ in 0..3 {
            failed.note(wait_for(41, 1));
        }
        let text = said(failed.report(|| 1));
        assert_eq!(text.matches("stands at 3 and was waited for to reach 7: process 41").count(), 1, "{text}");
        failed.report(|| 1).expect("stream 1 was told");
        said(failed.report(|| 2));

        // The number of a process is given out again; a second end is a second loss.
        failed.note(wait_for(41, 2));
        failed.note(wait_for(42, 3));
        let text = said(failed.report(|| 1));
        assert_eq!((text.matches("process 41").count(), text.matches("process 42").count()), (1, 1), "{text}");
        failed.report(|| 1).expect("stream 1 was told");
        let text = said(failed.report(|| 3));
        assert_eq!(text.matches("process 41").count(), 2, "{text}");
        // What was enqueued before the first loss has its own to say, whatever its stream was told since.
        assert_eq!(said(failed.report_since(before)), text);
    }

    #[test]
    fn work_goes_by_what_its_stream_had_heard() {
        let failed = FailedWaits::default();
        failed.note(wait_for(1, 1));
        let early = failed.told(|| 5);
        said(failed.report_since(early));
        failed.report(|| 5).expect("the stream was told by way of its work");
        said(failed.report_since(early));
        let late = failed.told(|| 5);
        failed.report_since(late).expect("its stream had been told before");
        failed.note(wait_for(2, 2));
        assert!(said(failed.report_since(late)).contains("process 2"));
        failed.forget(|| 5);
        said(failed.report(|| 5));
    }
}
