//! Records failed waits: a stream waited for a counter and continued without the awaited data, because the process that should have set the
//! counter has exited or left.
//!
//! A counter group ([`Line`]) consists of the counters of one allocation that one party (process or context) sets. Work that follows a
//! failed wait in its stream has used stale data. Work of other streams that is ordered after the waiting stream has used stale data too.
//! If a wait of a stream for a counter has failed, a thread that waits for this stream therefore receives [`BackendError::PeerGone`]. A
//! thread that waits for a stream that is ordered, by events of this backend, after the stream with the failed wait receives this error
//! too. The error is returned once for each stream and counter group. Other streams are not affected. The backend does not know the order
//! that callers establish by the driver's own events. It also does not know the streams in which graphs and the caller's kernels wait.
//! Failed waits of graphs and kernels are therefore reported on every stream.
//!
//! An execution reports the failed waits that its stream was ordered after when the execution was enqueued, and an event those that its
//! stream was ordered after when the event was recorded. Failures that the stream had already reported by then are excepted.
//!
//! While no stream waits for a peer, the cost is a single atomic load.

use super::signallers::{Line, LostPeer};
use super::{BackendError, Signal};
use ahash::{HashMap, HashSet};
use smallvec::SmallVec;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Wait of a stream for a counter that will no longer be set to the awaited value.
#[derive(Copy, Clone, Debug)]
pub struct FailedWait {
    /// Counter and value for which the stream waited.
    pub wanted: Signal,
    /// Value of the counter when the wait failed.
    pub now: u64,
    /// Process or context that should have set the counter, and that has exited or left.
    pub peer: LostPeer,
}

impl fmt::Display for FailedWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FailedWait { wanted: Signal { counter, value }, now, peer } = self;
        if peer.left.is_none() {
            write!(f, "the signal at {counter:#x} has the value {now}, but the wait is for {value}: ")?;
        }
        peer.fmt(f)
    }
}

impl FailedWait {
    /// Converts the failed wait to the error that the waiting thread receives.
    pub fn error(self) -> BackendError {
        BackendError::PeerGone(self.to_string())
    }
}

/// Record of the waits of a backend's streams for counters: the counter groups ([`Line`]) for which streams wait, the waits that have
/// failed, and the failures that were already reported.
#[derive(Debug, Default)]
pub struct FailedWaits {
    /// Number of streams that are ordered after waits, plus the number of failures that are reported on all streams. While it is 0, no
    /// thread acquires the lock.
    count: AtomicUsize,
    state: Mutex<WaitsState>,
}

type Lines = SmallVec<[Line; 2]>;

#[derive(Debug, Default)]
struct WaitsState {
    /// Counter groups ([`Line`]) that each stream is ordered after, by its own waits or through other streams. The key is the number of the
    /// stream. Each group is stored with the value of the field `now` when the group was last recorded.
    behind: HashMap<u64, SmallVec<[(Line, u64); 2]>>,
    /// Number of waits recorded so far. It serves as a clock.
    now: u64,
    /// Counter groups ([`Line`]) for which graphs or the caller's kernels wait, in streams that the backend does not know.
    unseen: HashSet<Line>,
    /// First failed wait for a counter of each group ([`Line`]) that has failed waits.
    lost: HashMap<Line, FailedWait>,
    /// Counter groups ([`Line`]) in `unseen` for which a wait has failed. Every stream reports these failures.
    for_all: Lines,
    /// Failures that were already reported. Each entry holds the ID of the stream on which the failure was reported, and the counter group
    /// ([`Line`]).
    told: HashSet<(u64, Line)>,
}

/// Counter groups ([`Line`]) that an execution or an event is ordered after: the groups of its stream at the time when it was enqueued.
#[derive(Clone, Debug, Default)]
pub struct Behind {
    lines: Lines,
    /// Counter groups ([`Line`]) whose failures are reported on all streams, and that the stream had already reported when the work was
    /// enqueued.
    told: Lines,
    /// ID of the stream of the work. `None` if no stream waits for counters. The ID is then not queried, because the query costs time.
    stream: Option<u64>,
}

/// Moment at which a thread begins to wait for a stream, expressed as the number of waits of streams that were recorded by then.
#[derive(Copy, Clone, Debug)]
pub struct Began(u64);

impl WaitsState {
    fn note(&mut self, stream: u64, lines: impl Iterator<Item = Line>) {
        let behind = self.behind.entry(stream).or_default();
        for line in lines.filter(|line| !self.told.contains(&(stream, *line))) {
            self.now += 1;
            match behind.iter_mut().find(|(known, _)| *known == line) {
                Some((_, noted)) => *noted = self.now,
                None => behind.push((line, self.now)),
            }
        }
        if behind.is_empty() {
            self.behind.remove(&stream);
        }
    }

    /// Returns an error that names each failed wait for a counter of the groups `lines` once, and marks these failures as reported on
    /// `stream`. Returns `Ok` if no such wait has failed.
    fn tell(&mut self, stream: Option<u64>, lines: impl Iterator<Item = Line>) -> Result<(), BackendError> {
        let lost: Lines = lines.filter(|line| self.lost.contains_key(line)).collect();
        if lost.is_empty() {
            return Ok(());
        }
        if let Some(stream) = stream {
            self.told.extend(lost.iter().map(|line| (stream, *line)));
            if let Some(behind) = self.behind.get_mut(&stream) {
                behind.retain(|(line, _)| !lost.contains(line));
            }
        }
        let mut texts: Vec<String> = lost.iter().filter_map(|line| self.lost.get(line)).map(FailedWait::to_string).collect();
        texts.sort_unstable();
        texts.dedup();
        Err(BackendError::PeerGone(texts.join("; ")))
    }
}

impl FailedWaits {
    /// Calls `work` with the locked state, updates the count and returns the result of `work`.
    fn with<T>(&self, work: impl FnOnce(&mut WaitsState) -> T) -> T {
        let mut state: MutexGuard<'_, WaitsState> = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let done = work(&mut state);
        self.count.store(state.behind.len() + state.for_all.len(), Ordering::Release);
        done
    }

    fn is_idle(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Records that a stream is about to wait for counters of the groups `lines`. `stream` is the unique ID of the stream.
    pub fn wait(&self, stream: u64, lines: impl Iterator<Item = Line>) {
        // The groups are collected before the lock is acquired, because finding them locks tables of memory. A thread that holds the lock
        // of such a table may record a failure, for which it needs the lock of this object.
        let lines: Lines = lines.collect();
        self.with(|state| state.note(stream, lines.into_iter()));
    }

    /// Records that graphs or kernels of the caller wait for counters of the group `line`, in unknown streams.
    pub fn wait_unseen(&self, line: Line) {
        self.with(|state| state.unseen.insert(line));
    }

    /// Records that later work of a stream is ordered after the work that `other` describes.
    pub fn join(&self, stream: impl FnOnce() -> u64, other: &Behind) {
        if !other.lines.is_empty() {
            let stream = stream();
            self.with(|state| state.note(stream, other.lines.iter().copied()));
        }
    }

    /// Records a failed wait for a counter of the group `line`, before the waiting stream continues. Only the first failed wait of each
    /// group is logged as an error, because a loop may have enqueued thousands of waits.
    pub fn note(&self, line: Line, wait: FailedWait) {
        self.with(|state| {
            if state.lost.contains_key(&line) {
                log::debug!("{wait}");
                return;
            }
            log::error!("{wait}; waiting streams continue with stale data and report an error when they are synchronised");
            state.lost.insert(line, wait);
            if state.unseen.contains(&line) {
                state.for_all.push(line);
            }
        });
    }

    /// Returns the counter groups that work enqueued in a stream at this moment is ordered after.
    pub fn behind(&self, stream: impl FnOnce() -> u64) -> Behind {
        if self.is_idle() {
            return Behind::default();
        }
        let stream = stream();
        self.with(|state| Behind {
            lines: state.behind.get(&stream).into_iter().flatten().map(|(line, _)| *line).collect(),
            told: state.for_all.iter().copied().filter(|line| state.told.contains(&(stream, *line))).collect(),
            stream: Some(stream),
        })
    }

    /// Marks the moment at which a thread begins to wait for a stream. When the thread's wait ends, each wait of the stream for a counter
    /// that was recorded before this moment has been satisfied or has failed.
    pub fn begin(&self) -> Began {
        Began(if self.is_idle() { 0 } else { self.with(|state| state.now) })
    }

    /// Returns an error that names the failed waits that a stream is ordered after and has not yet reported. Returns `Ok` if there are
    /// none. Called after a thread has waited for the stream; `began` is the moment at which the thread began to wait.
    pub fn report(&self, stream: impl FnOnce() -> u64, began: Began) -> Result<(), BackendError> {
        if self.is_idle() {
            return Ok(());
        }
        let stream = stream();
        self.with(|state| {
            let behind: Lines = state.behind.get(&stream).into_iter().flatten().map(|(line, _)| *line).collect();
            let for_all = state.for_all.iter().copied().filter(|lost| !behind.contains(lost) && !state.told.contains(&(stream, *lost)));
            let all: Lines = behind.iter().copied().chain(for_all).collect();
            let told = state.tell(Some(stream), all.into_iter());
            if let Some(behind) = state.behind.get_mut(&stream) {
                behind.retain(|(_, noted)| *noted > began.0);
                if behind.is_empty() {
                    state.behind.remove(&stream);
                }
            }
            told
        })
    }

    /// Returns an error that names the failed waits that `work` is ordered after. Returns `Ok` if there are none. Called after a thread has
    /// waited for this work.
    pub fn report_behind(&self, work: &Behind) -> Result<(), BackendError> {
        if self.is_idle() && work.lines.is_empty() {
            return Ok(());
        }
        self.with(|state| {
            let for_all = state.for_all.iter().filter(|lost| !work.told.contains(lost) && !work.lines.contains(lost));
            let all: Lines = work.lines.iter().chain(for_all).copied().collect();
            state.tell(work.stream, all.into_iter())
        })
    }

    /// Removes a stream that was destroyed. Its number may be reused for another stream.
    pub fn forget(&self, stream: impl FnOnce() -> u64) {
        if self.is_idle() && self.with(|state| state.told.is_empty()) {
            return;
        }
        let stream = stream();
        self.with(|state| {
            state.behind.remove(&stream);
            state.told.retain(|(told, _)| *told != stream);
        });
    }

    /// Removes an allocation that was freed. Earlier failures in it are still reported.
    pub fn forget_allocation(&self, allocation: u64) {
        self.with(|state| {
            state.unseen.retain(|line| line.allocation != allocation);
            let WaitsState { behind, lost, .. } = state;
            for known in behind.values_mut() {
                known.retain(|(line, _)| line.allocation != allocation || lost.contains_key(line));
            }
            behind.retain(|_, known| !known.is_empty());
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_for(process: i32) -> FailedWait {
        FailedWait { wanted: Signal { counter: 0x1000, value: 7 }, now: 3, peer: LostPeer::of(process, None) }
    }

    fn line(allocation: u64) -> Line {
        Line { allocation, signaller: None }
    }

    fn lines<const N: usize>(allocations: [u64; N]) -> impl Iterator<Item = Line> {
        allocations.into_iter().map(line)
    }

    #[track_caller]
    fn said(result: Result<(), BackendError>) -> String {
        match result {
            Err(BackendError::PeerGone(text)) => text,
            other => panic!("{other:?}"),
        }
    }

    fn report(failed: &FailedWaits, stream: u64) -> Result<(), BackendError> {
        failed.report(|| stream, failed.begin())
    }

    #[test]
    fn a_loss_can_be_noted_while_the_allocations_of_a_wait_are_looked_for() {
        let failed = FailedWaits::default();
        // A thread that looks up allocations may wait for a lock, and the thread that holds this lock may record a failure.
        failed.wait(1, lines([10]).inspect(|_| assert!(failed.state.try_lock().is_ok(), "both would wait for ever")));
        failed.note(line(10), wait_for(41));
        said(report(&failed, 1));
    }

    #[test]
    fn streams_that_wait_where_a_peer_is_lost_are_told_once_and_no_others() {
        let failed = FailedWaits::default();
        let nobody_asks = || -> u64 { unreachable!("nobody waits, so which stream it is does not matter") };
        failed.report(nobody_asks, failed.begin()).expect("nobody waits");
        failed.forget(nobody_asks);
        let before = failed.behind(nobody_asks);

        failed.wait(1, lines([10, 11]));
        failed.wait(2, lines([11]));
        let [first, second] = [1, 2].map(|stream| failed.behind(|| stream));
        for _ in 0..3 {
            failed.note(line(10), wait_for(41));
        }
        let text = said(report(&failed, 1));
        assert_eq!(text.matches("has the value 3, but the wait is for 7: process 41").count(), 1, "{text}");
        report(&failed, 1).expect("stream 1 was told");
        for stream in [2, 3] {
            report(&failed, stream).expect("it waits elsewhere, or not at all");
        }
        // Work that was enqueued before the failure also reports this failure, even if its stream has reported it since.
        assert_eq!(said(failed.report_behind(&first)), text);
        failed.report_behind(&second).expect("it waits elsewhere");
        failed.report_behind(&before).expect("it came before all waits");
        failed.report_behind(&failed.behind(|| 1)).expect("its stream had been told before");
        // A stream whose waits have ended does not report the failure, although it was earlier ordered after a wait that fails now.
        failed.wait(1, lines([11]));
        report(&failed, 2).expect("its waits are over");
        failed.note(line(11), wait_for(42));
        report(&failed, 2).expect("its waits are over");
        assert!(said(report(&failed, 1)).contains("process 42"));
    }

    #[test]
    fn a_wait_that_begins_while_another_thread_waits_for_the_stream_is_not_taken_for_satisfied() {
        let failed = FailedWaits::default();
        failed.wait(1, lines([10]));
        let began = failed.begin();
        failed.wait(1, lines([10, 11]));
        failed.report(|| 1, began).expect("nothing is lost");
        failed.note(line(10), wait_for(41));
        failed.note(line(11), wait_for(42));
        let text = said(report(&failed, 1));
        assert!(text.contains("process 41") && text.contains("process 42"), "{text}");
    }

    #[test]
    fn streams_that_are_joined_to_one_that_waits_in_vain_are_told_once_however_often_they_are_joined() {
        let failed = FailedWaits::default();
        failed.wait(1, lines([10]));
        let event = failed.behind(|| 1);
        failed.join(|| 2, &event);
        failed.note(line(10), wait_for(41));
        said(failed.report_behind(&failed.behind(|| 2)));
        for _ in 0..3 {
            failed.join(|| 2, &failed.behind(|| 1));
            report(&failed, 2).expect("it was told by way of its work");
        }
        // A stream also reports the failure if it is ordered after work that ended long ago, or if it reuses the number of a destroyed
        // stream.
        for _ in 0..2 {
            failed.join(|| 3, &event);
            said(report(&failed, 3));
            failed.forget(|| 3);
        }
    }

    #[test]
    fn of_what_graphs_and_kernels_wait_for_every_stream_is_told_once() {
        let failed = FailedWaits::default();
        failed.wait_unseen(line(10));
        let early = failed.behind(|| 5);
        failed.note(line(10), wait_for(41));
        for stream in [5, 6] {
            said(report(&failed, stream));
            report(&failed, stream).expect("it was told");
            failed.report_behind(&failed.behind(|| stream)).expect("its stream had been told before");
        }
        said(failed.report_behind(&early));
    }

    #[test]
    fn memory_that_goes_is_forgotten_where_nobody_was_lost() {
        let failed = FailedWaits::default();
        failed.wait(1, lines([10, 11]));
        failed.note(line(10), wait_for(41));
        [10, 11].into_iter().for_each(|allocation| failed.forget_allocation(allocation));
        said(report(&failed, 1));
        assert!(failed.is_idle());
    }
}
