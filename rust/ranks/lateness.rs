//! Chooses for each step between execution by a kernel and execution by streams, if one kernel can execute the operations of the rank.
//!
//! A step that a kernel executes starts about 4 us sooner, but the kernel's blocks occupy multiprocessors while they wait. If a peer is
//! late, matrix products that fill the GPU take 1.08 times as long next to a waiting kernel of one block, and 1.47 times as long next to
//! one on a quarter of the multiprocessors (two H200). A kernel that has waited for 0.1 ms therefore reports a long wait. Streams, with
//! copy engines and stream operations, then execute a series of steps. The series is twice as long after each further report. If the peer
//! is in time again, these steps take 6 us longer each, which is less than the loss by waiting.
//!
//! All ranks use the same form (kernel or streams) in a step ([`agreed`](super::agreed)).

use crate::sync::{AtomicU64, Ordering};
use std::ptr::with_exposed_provenance;

/// Index of the plan variant in which a kernel executes a rank's operations.
pub(super) const BY_KERNEL: usize = 0;
/// Index of the plan variant in which streams execute a rank's operations.
pub(super) const BY_STREAMS: usize = 1;

/// Number of communication steps that streams execute after the first long wait of a kernel.
const FIRST: u32 = 8;
/// Maximum number of successive communication steps that streams execute after a long wait of a kernel.
const MOST: u32 = 1024;

/// Number of communication steps that kernels must execute without a long wait before earlier long waits are forgotten. After the next long
/// wait, streams then execute only [`FIRST`] steps.
const FORGOTTEN: u32 = 64;

/// Rule by which a rank proposes that a kernel or that streams execute the next communication step.
#[derive(Debug)]
pub(super) struct Lateness {
    /// Address of the word that this rank's kernel sets after a long wait. `None` if the rank has no kernel.
    word: Option<u64>,
    /// Number of further steps that streams will execute before a kernel is tried again.
    left: u32,
    /// Total number of communication steps in the current or last series of steps that streams execute.
    length: u32,
    in_time: u32,
}

impl Lateness {
    /// Creates the rule for a rank. `word` is the address of the word that its kernel sets after a long wait. The word must be zero, and
    /// must stay mapped while the rule is used.
    pub fn of(word: Option<u64>) -> Lateness {
        Lateness { word, left: 0, length: FIRST / 2, in_time: 0 }
    }

    /// Returns the proposal for the next communication step: [`BY_KERNEL`] or [`BY_STREAMS`].
    pub fn next(&mut self) -> usize {
        if self.has_waited() {
            self.length = (2 * self.length).min(MOST);
            (self.left, self.in_time) = (self.length, 0);
        }
        if self.left > 0 {
            self.left -= 1;
            return BY_STREAMS;
        }
        self.in_time += 1;
        if self.in_time >= FORGOTTEN {
            self.length = FIRST / 2;
        }
        BY_KERNEL
    }

    /// True if a kernel has reported a long wait since the last call.
    fn has_waited(&self) -> bool {
        self.word.is_some_and(|word| {
            // SAFETY: the address is aligned and in memory that stays mapped for as long as the plan lives. CPU threads access it only
            // through atomics.
            let word: &AtomicU64 = unsafe { &*with_exposed_provenance(word as usize) };
            // The word is written only if it is set. Until then the GPU keeps its cache line.
            word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Relaxed) != 0
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_has_waited_is_spared_for_twice_as_many_steps_each_time() {
        let word = AtomicU64::new(0);
        let mut lateness = Lateness::of(Some((&raw const word).expose_provenance() as u64));
        let mut by_streams_after_waiting = |in_time: u32| {
            (0..in_time).for_each(|_| assert_eq!(lateness.next(), BY_KERNEL));
            word.store(1, Ordering::Relaxed);
            let steps = (0..).take_while(|_| lateness.next() == BY_STREAMS).count() as u32;
            assert_eq!(word.load(Ordering::Relaxed), 0, "the next time is another");
            steps
        };
        assert_eq!([3, 0, 5, 1].map(&mut by_streams_after_waiting), [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]);
        assert_eq!([FORGOTTEN, 0].map(&mut by_streams_after_waiting), [FIRST, 2 * FIRST], "peers that were in time for long");
        (0..10).for_each(|_| _ = by_streams_after_waiting(0));
        assert_eq!(by_streams_after_waiting(0), MOST);
    }

    #[test]
    fn a_rank_without_a_kernel_asks_for_nothing() {
        let mut lateness = Lateness::of(None);
        assert!((0..1000).all(|_| lateness.next() == BY_KERNEL));
    }
}
