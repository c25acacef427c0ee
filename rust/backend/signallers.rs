//! Records the parties that set the counters of an allocation, and the parties that were lost. The table determines which waits are
//! affected if a party is lost.
//!
//! A party is another process, or another context of this process, that has mapped the allocation. The exporter of the allocation
//! identifies it by a number. A party is lost when it exits, or when it leaves a plan and no longer sets its counters. Exactly the counters
//! that this party sets are then affected: waits for them end without success, that is, the waiting stream continues and the failure is
//! reported. Waits for other counters are not affected. If it is not recorded which party sets a counter, any process that has mapped the
//! allocation may set it. The loss of any of these processes then affects the counter.

use super::Signal;
use smallvec::SmallVec;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Counter group: all counters of an allocation that one party (an importing process or context) sets. The loss of a party affects such a
/// group.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Line {
    /// Id of the allocation that contains the counters.
    pub allocation: u64,
    /// Number that identifies the party (importing process or context) that sets the counters; `None` for counters for which no party is
    /// recorded.
    pub signaller: Option<u32>,
}

/// Table for one allocation: the parties (importing processes or contexts) that set its counters, and the parties that were lost.
#[derive(Debug, Default)]
pub struct Signallers {
    /// Address of each counter and number of the party (importing process or context) that sets it, sorted by address.
    named: Arc<[(u64, u32)]>,
    lost: SmallVec<[(Option<u32>, LostPeer); 1]>,
}

impl Signallers {
    /// Records the party (importing process or context) that sets each counter. The entries of `by_address` must be sorted by address.
    pub fn name(&mut self, by_address: Arc<[(u64, u32)]>) {
        self.named = by_address;
    }

    /// Returns the number of the party (importing process or context) that sets the counter at address `counter`, or `None` if it is not
    /// recorded.
    pub fn of(&self, counter: u64) -> Option<u32> {
        let place = self.named.binary_search_by_key(&counter, |(address, _)| *address).ok()?;
        Some(self.named[place].1)
    }

    /// Returns true if the loss of `party` (importing process or context) affects the counter at address `counter`. A `party` of `None`
    /// affects only counters for which no party is recorded.
    pub fn concerns(&self, party: Option<u32>, counter: u64) -> bool {
        let of = self.of(counter);
        of.is_none() || of == party
    }

    /// Records that a party (importing process or context; `None` if it has no number) has exited or left. After a loss that affects all
    /// values, further losses of the same party are ignored.
    pub fn lose(&mut self, party: Option<u32>, peer: LostPeer) {
        let is_known = |(known, by): &(Option<u32>, LostPeer)| *known == party && (by.raises.is_none() || by.raises == peer.raises);
        if !self.lost.iter().any(is_known) {
            self.lost.push((party, peer));
        }
    }

    /// Returns the lost party (process that has exited or left) that could have set a counter to a value, or `None` if there is no such
    /// party.
    pub fn lost_peer(&self, wanted: Signal) -> Option<LostPeer> {
        let concerns = |(party, peer): &&(Option<u32>, LostPeer)| self.concerns(*party, wanted.counter) && peer.fails(wanted);
        self.lost.iter().find(concerns).map(|(_, peer)| *peer)
    }
}

/// State that shows whether one rank has abandoned (skips) its communication steps of a plan that several ranks execute together. If a wait
/// ends because the awaited process has exited or left, the rank abandons its steps. Abandoned steps write no data, set no flags and wait
/// for no flags, because other ranks have not permitted access to their memory. The ranks that wait for this rank then treat it as lost.
///
/// CUDA kernels that wait for flags abandon their steps in the same way. A CUDA stream cannot skip work that follows a wait, so steps that
/// are enqueued in streams are still executed.
#[derive(Clone, Default)]
pub struct StepFate(Arc<Fate>);

#[derive(Default)]
struct Fate {
    is_abandoned: AtomicBool,
    tell: OnceLock<Box<dyn Fn(Abandoned) + Send + Sync>>,
}

/// Communication steps of a plan that a rank skips after a wait for another rank has failed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Abandoned {
    /// The rank skips all its communication steps.
    All,
    /// The rank skips only the communication steps that GPU kernels execute. Steps that are already enqueued in streams are still executed.
    OfKernels,
}

impl StepFate {
    /// Registers a function that is called once when communication steps are abandoned. It runs on the thread that detects the loss of the
    /// awaited process.
    pub fn on_abandon(&self, tell: impl Fn(Abandoned) + Send + Sync + 'static) {
        let _ = self.0.tell.set(Box::new(tell));
    }

    /// Abandons the communication steps `steps`. Called when a wait has ended because the awaited process has exited or left.
    pub fn abandon(&self, steps: Abandoned) {
        if !self.0.is_abandoned.swap(true, Ordering::AcqRel) {
            self.0.tell.get().into_iter().for_each(|tell| tell(steps));
        }
    }

    /// Returns true if communication steps were abandoned, because a wait in this step or an earlier step ended after the awaited process
    /// exited or left.
    pub fn is_abandoned(&self) -> bool {
        self.0.is_abandoned.load(Ordering::Acquire)
    }
}

impl fmt::Debug for StepFate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StepFate").field(&self.is_abandoned()).finish()
    }
}

/// Party (importing process or context) that no longer sets its counters, or sets them only up to a certain value.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LostPeer {
    /// Process id of the lost process, or of the process of the lost context. The system may later assign it to another process.
    pub process: i32,
    /// Node plan (plan that several ranks execute together) that the process or context has left; `None` if it left no plan.
    pub left: Option<LeftPlan>,
    /// Last value to which the process or context still sets its counters. `None` if it does not set them any more.
    pub raises: Option<u64>,
}

impl LostPeer {
    /// Creates the record of a process that has left the node plan `left` (plan that several ranks execute together), or that has exited if
    /// `left` is `None`.
    pub const fn of(process: i32, left: Option<LeftPlan>) -> LostPeer {
        LostPeer { process, left, raises: None }
    }

    /// Returns true if the process or context that this record describes will never set its counter to the value of `wanted`, because it
    /// has exited or has left the plan.
    pub fn fails(&self, wanted: Signal) -> bool {
        // The comparison allows for overflow of the counter.
        self.raises.is_none_or(|last| (last.wrapping_sub(wanted.value) as i64) < 0)
    }
}

/// Node plan (plan that several ranks execute together) that another rank has left although this rank has enqueued more communication steps
/// of the plan.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct LeftPlan {
    /// Number that identifies the plan among the plans of its node, from 1.
    pub plan: u64,
    /// Number of the plan's first communication step whose waits fail on this rank, from 1, as far as it is known.
    pub step: u64,
    /// Rank that has left the plan.
    pub rank: u32,
    /// Reason why the rank has left the plan.
    pub why: Leave,
    /// First failure in the chain of failures that made the rank leave. `None` if the rank left without a failure of another rank.
    pub cause: Option<Cause>,
}

/// First failure in a chain of failures of several ranks.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Rank that was the first to fail.
    pub rank: u32,
    /// Process id of the rank that was the first to fail.
    pub process: i32,
    /// Reason why the rank no longer participates.
    pub why: Leave,
}

/// Reason why a rank no longer participates in a node plan (plan that several ranks execute together).
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Leave {
    /// The process of the rank has exited, or its context was destroyed before the plan.
    Ended,
    /// The rank has destroyed the plan after it executed the given number of communication steps.
    Destroyed(u64),
    /// The rank has destroyed the plan after a failure. The value is the number of communication steps that it executed, including failed
    /// steps.
    Failed(u64),
    /// The rank has enqueued this plan and another plan in one stream in a different order than this rank has. The value is the number of
    /// the other plan.
    Order(u64),
}

impl LeftPlan {
    /// Returns the first failure in the chain of failures that made the rank leave. If the rank's own failure is the first, returns that
    /// failure with `process`, the process id of the rank.
    pub fn first(&self, process: i32) -> Cause {
        self.cause.unwrap_or(Cause { rank: self.rank, process, why: self.why })
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cause { rank, process, why } = self;
        match process {
            0 => write!(f, "rank {rank} (of another PID namespace) ")?,
            _ => write!(f, "rank {rank} (process {process}) ")?,
        }
        match why {
            Leave::Ended => write!(f, "has ended, or has destroyed its context, without destroying the plan"),
            Leave::Destroyed(steps) => write!(f, "has destroyed the plan after {steps} executions"),
            Leave::Failed(steps) => write!(f, "has destroyed the plan after {steps} executions, including failed ones"),
            Leave::Order(other) => write!(
                f,
                "has enqueued this node plan and node plan {other} in one stream, but in a different order from this rank; enqueue node \
                 plans that share a \
                 stream in the same order on all ranks"
            ),
        }
    }
}

impl fmt::Display for LostPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let process = match self.process {
            0 => "a process of another PID namespace".to_owned(),
            process => format!("process {process}"),
        };
        if let Some(last) = self.raises {
            return write!(f, "{process}, which has mapped this memory, has left, and sets no signal in it beyond {last}");
        }
        let Some(left) = self.left else {
            return write!(f, "{process}, which had mapped this memory, has ended or destroyed its context without closing it");
        };
        let LeftPlan { plan, step, rank, .. } = left;
        let first = left.first(self.process);
        write!(f, "execution {step} of node plan {plan} (shared by the ranks of this node) can no longer complete: {first}")?;
        if first.rank != rank { write!(f, "; rank {rank} has left the plan because of that") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GONE: LostPeer = LostPeer::of(41, None);

    #[test]
    fn a_loss_concerns_the_counters_that_the_lost_party_raises_and_those_that_anybody_may() {
        let mut signallers = Signallers::default();
        signallers.name([(0x1000, 1), (0x1008, 2), (0x1010, 1)].into());
        signallers.lose(Some(1), GONE);
        assert_eq!(
            [0x1000, 0x1008, 0x1010, 0x1018].map(|counter| signallers.lost_peer(Signal { counter, value: 1 }).is_some()),
            [true, false, true, true]
        );
        signallers.lose(Some(1), LostPeer::of(42, None));
        assert_eq!(signallers.lost_peer(Signal { counter: 0x1000, value: 1 }), Some(GONE), "the first loss counts");
        // Memory for whose counters no party is recorded.
        let mut anybodys = Signallers::default();
        let leaves = |last| LostPeer { raises: Some(last), ..GONE };
        [7, 9, 9].iter().for_each(|last| anybodys.lose(None, leaves(*last)));
        let lost_at = |signallers: &Signallers, value| signallers.lost_peer(Signal { counter: 0x1000, value });
        assert_eq!([7, 8, 10].map(|value| lost_at(&anybodys, value)), [None, Some(leaves(7)), Some(leaves(7))]);
        anybodys.lose(None, GONE);
        assert_eq!((lost_at(&anybodys, 7), anybodys.lost.len()), (Some(GONE), 3));
    }

    #[test]
    fn the_first_failure_is_named_with_rank_and_step_and_only_an_end_is_called_one() {
        let said = |why, cause| LostPeer::of(41, Some(LeftPlan { plan: 3, step: 5, rank: 1, why, cause })).to_string();
        let unseen = LostPeer::of(0, None).to_string();
        assert!(unseen.starts_with("a process of another PID namespace, which had mapped"), "{unseen}");
        let text = said(Leave::Destroyed(4), None);
        assert_eq!(
            text,
            "execution 5 of node plan 3 (shared by the ranks of this node) can no longer complete: rank 1 (process 41) has destroyed the \
             plan after 4 executions"
        );
        assert!(said(Leave::Ended, None).contains("has ended") && !said(Leave::Failed(4), None).contains("ended"));
        assert!(said(Leave::Order(2), None).contains("this node plan and node plan 2"));
        let text = said(Leave::Failed(4), Some(Cause { rank: 7, process: 47, why: Leave::Ended }));
        assert!(
            text.contains("can no longer complete: rank 7 (process 47) has ended")
                && text.ends_with("; rank 1 has left the plan because of that"),
            "{text}"
        );
    }
}
