//! Waits in vain: a process that was to raise a counter has ended, and streams that waited for it have gone on without its bytes.
//!
//! What a stream does after such a wait, and what other streams do after that, is done with bytes that never came. Which streams these
//! are is not known: on CUDA a caller joins streams by events of its own, which this library does not see. So every stream counts as one
//! of them until it has been told: whoever waits for it next gets [`BackendError::PeerGone`], once for each peer.
//!
//! An execution, or an event, goes by what its stream had been told when it was enqueued, so that one that came before reports it too,
//! however late it is asked.
//!
//! Nothing of this costs more than a load while no peer is lost.

use super::{BackendError, Signal};
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A process that had mapped memory of this one, and has ended without closing it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Departed {
    /// Its number, which another process may get after it.
    pub process: i32,
    /// Its connection, which is no other's.
    pub connection: u64,
}

impl fmt::Display for Departed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}, which had mapped this memory, has ended or destroyed its context without closing it", self.process)
    }
}

/// A wait that nobody will satisfy.
#[derive(Copy, Clone, Debug)]
pub struct InVain {
    /// What was waited for.
    pub wanted: Signal,
    /// What the counter stands at.
    pub now: u64,
    /// Who might have raised it.
    pub peer: Departed,
}

impl fmt::Display for InVain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let InVain { wanted: Signal { counter, value }, now, peer } = self;
        write!(f, "the signal at {counter:#x} stands at {now} and was waited for to reach {value}: {peer}")
    }
}

impl InVain {
    /// As the error of whoever waits.
    pub fn error(self) -> BackendError {
        BackendError::PeerGone(self.to_string())
    }
}

/// The peers that a backend has lost while its streams waited for them, and who has been told.
#[derive(Debug, Default)]
pub(in crate::backend) struct Losses {
    /// How many peers: the length of `State::lost`, read without the lock.
    count: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The first wait in vain for each peer, oldest first.
    lost: Vec<InVain>,
    /// How many of these each stream has been told.
    told: HashMap<u64, usize>,
}

/// What a stream had been told when work was enqueued in it.
#[derive(Copy, Clone, Debug, Default)]
pub(in crate::backend) struct Heard {
    losses: usize,
    /// Not known where nothing was lost, because asking costs something.
    stream: Option<u64>,
}

impl Losses {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a wait in vain, before its stream goes on. Only the first for a peer is an event: a loop may have enqueued thousands.
    pub fn note(&self, wait: InVain) {
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
    pub fn heard(&self, stream: impl FnOnce() -> u64) -> Heard {
        if self.count.load(Ordering::Acquire) == 0 {
            return Heard::default();
        }
        let stream = stream();
        Heard { losses: self.state().told.get(&stream).copied().unwrap_or(0), stream: Some(stream) }
    }

    /// Tells whoever has waited for a stream of the peers that were lost and that it was not told of.
    pub fn tell(&self, stream: impl FnOnce() -> u64) -> Result<(), BackendError> {
        self.tell_since(self.heard(stream))
    }

    /// The same for whoever has waited for work that was enqueued when its stream had heard this.
    pub fn tell_since(&self, heard: Heard) -> Result<(), BackendError> {
        if self.count.load(Ordering::Acquire) <= heard.losses {
            return Ok(());
        }
        let mut state = self.state();
        let lost = state.lost.len();
        if let Some(stream) = heard.stream {
            state.told.insert(stream, lost);
        }
        let texts: Vec<String> = state.lost[heard.losses..].iter().map(InVain::to_string).collect();
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

    fn wait_for(process: i32, connection: u64) -> InVain {
        InVain { wanted: Signal { counter: 0x1000, value: 7 }, now: 3, peer: Departed { process, connection } }
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
        let losses = Losses::default();
        let nobody_asks = || -> u64 { unreachable!("nothing is lost, so which stream it is does not matter") };
        losses.tell(nobody_asks).expect("nothing is lost");
        losses.forget(nobody_asks);
        let before = losses.heard(nobody_asks);

        for _ in 0..3 {
            losses.note(wait_for(41, 1));
        }
        let text = said(losses.tell(|| 1));
        assert_eq!(text.matches("stands at 3 and was waited for to reach 7: process 41").count(), 1, "{text}");
        losses.tell(|| 1).expect("stream 1 was told");
        said(losses.tell(|| 2));

        // The number of a process is given out again; a second end is a second loss.
        losses.note(wait_for(41, 2));
        losses.note(wait_for(42, 3));
        let text = said(losses.tell(|| 1));
        assert_eq!((text.matches("process 41").count(), text.matches("process 42").count()), (1, 1), "{text}");
        losses.tell(|| 1).expect("stream 1 was told");
        let text = said(losses.tell(|| 3));
        assert_eq!(text.matches("process 41").count(), 2, "{text}");
        // What was enqueued before the first loss has its own to say, whatever its stream was told since.
        assert_eq!(said(losses.tell_since(before)), text);
    }

    #[test]
    fn work_goes_by_what_its_stream_had_heard() {
        let losses = Losses::default();
        losses.note(wait_for(1, 1));
        let early = losses.heard(|| 5);
        said(losses.tell_since(early));
        losses.tell(|| 5).expect("the stream was told by way of its work");
        said(losses.tell_since(early));
        let late = losses.heard(|| 5);
        losses.tell_since(late).expect("its stream had been told before");
        losses.note(wait_for(2, 2));
        assert!(said(losses.tell_since(late)).contains("process 2"));
        losses.forget(|| 5);
        said(losses.tell(|| 5));
    }
}
