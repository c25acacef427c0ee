//! Failed waits: a process that was to raise a counter has ended or has left, and streams that waited for it have gone on without its bytes.
//!
//! Work behind such a wait used bytes that never came, and so did work of streams that were joined to its own. So whoever waits for a stream is
//! told of each allocation in which it waited in vain, or a stream that it was joined to by events of this backend: [`BackendError::PeerGone`],
//! once for each stream and allocation. Other streams are not concerned. How the caller joins streams by the driver's own events is not known
//! here; nor is which streams wait where graphs and the caller's kernels do, and of those losses every stream is told.
//!
//! An execution or an event goes by what its stream was behind when it was enqueued, and had not been told of.
//!
//! While no stream waits for anybody, all of this costs one load.

use super::{BackendError, Signal};
use ahash::{HashMap, HashSet};
use smallvec::SmallVec;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Who will not raise counters any more that it was to raise.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LostPeer {
    /// The number of its process, which another process may get after it.
    pub process: i32,
    /// What it has left, where that is a node plan.
    pub left: Option<LeftPlan>,
}

/// A node plan that a rank takes no further part in, and in which this rank has come further.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LeftPlan {
    /// Its number among those of its node, from 1.
    pub plan: u64,
    /// The first step that waits in vain here, from 1, as far as is known.
    pub step: u64,
    /// Why the rank has left.
    pub why: Leave,
}

/// Why a rank takes no further part in a node plan.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Leave {
    /// Its process has ended, or its context was destroyed before the plan.
    Ended,
    /// It has destroyed the plan after so many steps.
    Destroyed(u64),
    /// The same, and waits of its own had failed.
    Failed(u64),
    /// It has enqueued this other plan of the node and the plan in one stream in another order.
    Order(u64),
}

impl fmt::Display for LostPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let process = self.process;
        let Some(LeftPlan { plan, step, why }) = self.left else {
            return write!(f, "process {process}, which had mapped this memory, has ended or destroyed its context without closing it");
        };
        write!(f, "step {step} of node plan {plan} waits in vain: process {process} ")?;
        match why {
            Leave::Ended => write!(f, "has ended, or has destroyed its context, without destroying the plan"),
            Leave::Destroyed(steps) => write!(f, "has destroyed the plan after {steps} steps"),
            Leave::Failed(steps) => write!(f, "has destroyed the plan after {steps} steps, of which some had failed"),
            Leave::Order(other) => write!(
                f,
                "has enqueued node plans {plan} and {other} in one stream in another order than this rank; enqueue node plans that share a stream in \
                 the same order on all ranks"
            ),
        }
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
        if peer.left.is_none() {
            write!(f, "the signal at {counter:#x} stands at {now} and was waited for to reach {value}: ")?;
        }
        peer.fmt(f)
    }
}

impl FailedWait {
    /// As the error of whoever waits.
    pub fn error(self) -> BackendError {
        BackendError::PeerGone(self.to_string())
    }
}

/// Where the streams of a backend wait, which of these waits have failed, and who has been told.
#[derive(Debug, Default)]
pub struct FailedWaits {
    /// Streams that are behind waits, and losses that all are told of: nobody takes the lock while there are none.
    count: AtomicUsize,
    state: Mutex<WaitsState>,
}

/// Numbers of allocations.
type Allocations = SmallVec<[u64; 2]>;

#[derive(Debug, Default)]
struct WaitsState {
    /// What each stream is behind: an allocation in which it waits, or a stream that it was joined to, and when that was noted last.
    behind: HashMap<u64, SmallVec<[(u64, u64); 2]>>,
    /// Counts what is noted.
    now: u64,
    /// Allocations in which graphs wait, or the caller's kernels.
    unseen: HashSet<u64>,
    /// The first failed wait in each allocation.
    lost: HashMap<u64, FailedWait>,
    /// Those of `unseen` among them.
    for_all: Allocations,
    /// Streams and allocations: of which loss each was told.
    told: HashSet<(u64, u64)>,
}

/// What work comes after: what its stream was behind when it was enqueued.
#[derive(Clone, Debug, Default)]
pub struct Behind {
    allocations: Allocations,
    /// Losses for all that the stream had been told of.
    told: Allocations,
    /// Not known where no stream waits, because asking costs something.
    stream: Option<u64>,
}

/// When a wait for a stream began, by the count of what was noted.
#[derive(Copy, Clone, Debug)]
pub struct Began(u64);

impl WaitsState {
    fn note(&mut self, stream: u64, allocations: impl Iterator<Item = u64>) {
        let behind = self.behind.entry(stream).or_default();
        for allocation in allocations.filter(|allocation| !self.told.contains(&(stream, *allocation))) {
            self.now += 1;
            match behind.iter_mut().find(|(known, _)| *known == allocation) {
                Some((_, noted)) => *noted = self.now,
                None => behind.push((allocation, self.now)),
            }
        }
        if behind.is_empty() {
            self.behind.remove(&stream);
        }
    }

    /// Of what was lost among `allocations` and for all, an error that names each once; and whoever waits for the stream has been told.
    fn tell(&mut self, stream: Option<u64>, allocations: impl Iterator<Item = u64>) -> Result<(), BackendError> {
        let lost: Allocations = allocations.filter(|allocation| self.lost.contains_key(allocation)).collect();
        if lost.is_empty() {
            return Ok(());
        }
        if let Some(stream) = stream {
            self.told.extend(lost.iter().map(|allocation| (stream, *allocation)));
            if let Some(behind) = self.behind.get_mut(&stream) {
                behind.retain(|(allocation, _)| !lost.contains(allocation));
            }
        }
        let texts: Vec<String> = lost.iter().filter_map(|allocation| self.lost.get(allocation)).map(FailedWait::to_string).collect();
        Err(BackendError::PeerGone(texts.join("; ")))
    }
}

impl FailedWaits {
    /// Calls `work` with the state, and counts anew.
    fn with<T>(&self, work: impl FnOnce(&mut WaitsState) -> T) -> T {
        let mut state: MutexGuard<'_, WaitsState> = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let done = work(&mut state);
        self.count.store(state.behind.len() + state.for_all.len(), Ordering::Release);
        done
    }

    fn is_idle(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// A stream is about to wait in these allocations. `stream` is a number that no other stream has.
    pub fn wait(&self, stream: u64, allocations: impl Iterator<Item = u64>) {
        // Before the lock: finding them looks at memory, and whoever notes a loss there comes with its own lock held.
        let allocations: Allocations = allocations.collect();
        self.with(|state| state.note(stream, allocations.into_iter()));
    }

    /// Graphs wait in this allocation, or kernels of the caller: in which streams is not known.
    pub fn wait_unseen(&self, allocation: u64) {
        self.with(|state| state.unseen.insert(allocation));
    }

    /// A stream comes after other work from now on.
    pub fn join(&self, stream: impl FnOnce() -> u64, other: &Behind) {
        if !other.allocations.is_empty() {
            let stream = stream();
            self.with(|state| state.note(stream, other.allocations.iter().copied()));
        }
    }

    /// Notes a failed wait in an allocation, before its stream goes on. Only the first is an event: a loop may have enqueued thousands.
    pub fn note(&self, allocation: u64, wait: FailedWait) {
        self.with(|state| {
            if state.lost.contains_key(&allocation) {
                log::debug!("{wait}");
                return;
            }
            log::error!("{wait}; streams that wait for it go on without its bytes, and whoever synchronises them is told");
            state.lost.insert(allocation, wait);
            if state.unseen.contains(&allocation) {
                state.for_all.push(allocation);
            }
        });
    }

    /// What work that is enqueued now in a stream comes after.
    pub fn behind(&self, stream: impl FnOnce() -> u64) -> Behind {
        if self.is_idle() {
            return Behind::default();
        }
        let stream = stream();
        self.with(|state| Behind {
            allocations: state.behind.get(&stream).into_iter().flatten().map(|(allocation, _)| *allocation).collect(),
            told: state.for_all.iter().copied().filter(|allocation| state.told.contains(&(stream, *allocation))).collect(),
            stream: Some(stream),
        })
    }

    /// Before a wait for a stream: what was noted by now is satisfied when that ends, or has failed.
    pub fn begin(&self) -> Began {
        Began(if self.is_idle() { 0 } else { self.with(|state| state.now) })
    }

    /// Tells whoever has waited for a stream of what it waited for in vain and that it was not told of.
    pub fn report(&self, stream: impl FnOnce() -> u64, began: Began) -> Result<(), BackendError> {
        if self.is_idle() {
            return Ok(());
        }
        let stream = stream();
        self.with(|state| {
            let behind: Allocations = state.behind.get(&stream).into_iter().flatten().map(|(allocation, _)| *allocation).collect();
            let for_all = state.for_all.iter().copied().filter(|lost| !behind.contains(lost) && !state.told.contains(&(stream, *lost)));
            let all: Allocations = behind.iter().copied().chain(for_all).collect();
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

    /// The same for whoever has waited for work.
    pub fn report_behind(&self, work: &Behind) -> Result<(), BackendError> {
        if self.is_idle() && work.allocations.is_empty() {
            return Ok(());
        }
        self.with(|state| {
            let for_all = state.for_all.iter().filter(|lost| !work.told.contains(lost) && !work.allocations.contains(lost));
            let all: Allocations = work.allocations.iter().chain(for_all).copied().collect();
            state.tell(work.stream, all.into_iter())
        })
    }

    /// The stream is no more, and its number may be another's.
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

    /// The allocation is no more. What was lost in it is told all the same.
    pub fn forget_allocation(&self, allocation: u64) {
        self.with(|state| {
            state.unseen.remove(&allocation);
            if !state.lost.contains_key(&allocation) {
                state.behind.values_mut().for_each(|behind| behind.retain(|(known, _)| *known != allocation));
                state.behind.retain(|_, behind| !behind.is_empty());
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait_for(process: i32) -> FailedWait {
        FailedWait { wanted: Signal { counter: 0x1000, value: 7 }, now: 3, peer: LostPeer { process, left: None } }
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
        // Whoever looks may wait for a lock of memory, whose holder notes a loss there.
        failed.wait(1, [10].into_iter().inspect(|_| assert!(failed.state.try_lock().is_ok(), "both would wait for ever")));
        failed.note(10, wait_for(41));
        said(report(&failed, 1));
    }

    #[test]
    fn streams_that_wait_where_a_peer_is_lost_are_told_once_and_no_others() {
        let failed = FailedWaits::default();
        let nobody_asks = || -> u64 { unreachable!("nobody waits, so which stream it is does not matter") };
        failed.report(nobody_asks, failed.begin()).expect("nobody waits");
        failed.forget(nobody_asks);
        let before = failed.behind(nobody_asks);

        failed.wait(1, [10, 11].into_iter());
        failed.wait(2, [11].into_iter());
        let [first, second] = [1, 2].map(|stream| failed.behind(|| stream));
        for _ in 0..3 {
            failed.note(10, wait_for(41));
        }
        let text = said(report(&failed, 1));
        assert_eq!(text.matches("stands at 3 and was waited for to reach 7: process 41").count(), 1, "{text}");
        report(&failed, 1).expect("stream 1 was told");
        for stream in [2, 3] {
            report(&failed, stream).expect("it waits elsewhere, or not at all");
        }
        // What was enqueued before the loss has its own to say, whatever its stream was told since.
        assert_eq!(said(failed.report_behind(&first)), text);
        failed.report_behind(&second).expect("it waits elsewhere");
        failed.report_behind(&before).expect("it came before all waits");
        failed.report_behind(&failed.behind(|| 1)).expect("its stream had been told before");
        // Nor is a stream told that has ended its waits there, though it was joined to one that fails now.
        failed.wait(1, [11].into_iter());
        report(&failed, 2).expect("its waits are over");
        failed.note(11, wait_for(42));
        report(&failed, 2).expect("its waits are over");
        assert!(said(report(&failed, 1)).contains("process 42"));
    }

    #[test]
    fn a_wait_that_begins_while_another_thread_waits_for_the_stream_is_not_taken_for_satisfied() {
        let failed = FailedWaits::default();
        failed.wait(1, [10].into_iter());
        let began = failed.begin();
        failed.wait(1, [10, 11].into_iter());
        failed.report(|| 1, began).expect("nothing is lost");
        failed.note(10, wait_for(41));
        failed.note(11, wait_for(42));
        let text = said(report(&failed, 1));
        assert!(text.contains("process 41") && text.contains("process 42"), "{text}");
    }

    #[test]
    fn streams_that_are_joined_to_one_that_waits_in_vain_are_told_once_however_often_they_are_joined() {
        let failed = FailedWaits::default();
        failed.wait(1, [10].into_iter());
        let event = failed.behind(|| 1);
        failed.join(|| 2, &event);
        failed.note(10, wait_for(41));
        said(failed.report_behind(&failed.behind(|| 2)));
        for _ in 0..3 {
            failed.join(|| 2, &failed.behind(|| 1));
            report(&failed, 2).expect("it was told by way of its work");
        }
        // One that joins what has ended long since comes after it all the same, and so does one that has the number of another.
        for _ in 0..2 {
            failed.join(|| 3, &event);
            said(report(&failed, 3));
            failed.forget(|| 3);
        }
    }

    #[test]
    fn of_what_graphs_and_kernels_wait_for_every_stream_is_told_once() {
        let failed = FailedWaits::default();
        failed.wait_unseen(10);
        let early = failed.behind(|| 5);
        failed.note(10, wait_for(41));
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
        failed.wait(1, [10, 11].into_iter());
        failed.note(10, wait_for(41));
        [10, 11].into_iter().for_each(|allocation| failed.forget_allocation(allocation));
        said(report(&failed, 1));
        assert!(failed.is_idle());
    }

    #[test]
    fn what_a_rank_has_left_is_named_with_its_step_and_only_an_end_is_called_one() {
        let said = |why| LostPeer { process: 41, left: Some(LeftPlan { plan: 3, step: 5, why }) }.to_string();
        let text = said(Leave::Destroyed(4));
        assert_eq!(text, "step 5 of node plan 3 waits in vain: process 41 has destroyed the plan after 4 steps");
        assert!(said(Leave::Ended).contains("has ended") && !said(Leave::Failed(4)).contains("ended"));
        assert!(said(Leave::Order(2)).contains("node plans 3 and 2"));
    }
}
