//! Chooses between a kernel and streams for each step of a part that a kernel can execute.
//!
//! A step by a kernel starts about 4 us sooner, but the kernel's blocks occupy multiprocessors while they wait. If a peer is late, matrix
//! products that fill the GPU take 1.08 times as long next to a waiting kernel of one block, and 1.47 times as long next to one on a
//! quarter of the multiprocessors (two H200). A kernel that has waited for 0.1 ms therefore reports this. Copy engines and stream
//! operations then execute a series of steps, which is twice as long after each report. They take 6 us more per step if the peer is in time
//! again, which is less than the loss by waiting.
//!
//! All ranks use the same form (kernel or streams) in a step ([`agreed`](super::agreed)).

use crate::sync::{AtomicU64, Ordering};
use std::ptr::with_exposed_provenance;

/// Variant number of the form of a step in which a kernel executes the part.
pub(super) const BY_KERNEL: usize = 0;
/// Variant number of the form of a step in which streams execute the part.
pub(super) const BY_STREAMS: usize = 1;

/// Number of steps that streams execute after a kernel's first long wait.
const FIRST: u32 = 8;
/// Maximum number of steps that streams execute after a kernel's long wait.
const MOST: u32 = 1024;

/// Number of steps by kernels without a report after which a late step again causes the shortest series of steps by streams.
const FORGOTTEN: u32 = 64;

/// Rule by which a rank proposes whether a kernel or streams execute the next step.
#[derive(Debug)]
pub(super) struct Lateness {
    /// Address of the word that this rank's kernel sets after a long wait. `None` if the rank has no kernel.
    word: Option<u64>,
    /// Number of steps that streams will still execute in the current series.
    left: u32,
    /// Total number of steps in the current or last series of steps by streams.
    length: u32,
    in_time: u32,
}

impl Lateness {
    /// Returns the rule for a rank. The word must be zero, and stay mapped for as long as the result is used.
    pub fn of(word: Option<u64>) -> Lateness {
        Lateness { word, left: 0, length: FIRST / 2, in_time: 0 }
    }

    /// Returns the proposed form of the next step: [`BY_KERNEL`] or [`BY_STREAMS`].
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
            // Swap only if the word is set, because until then the cache line belongs to the GPU.
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
