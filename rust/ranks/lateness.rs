//! Whether a kernel or streams wait for the other ranks, where a kernel can do a rank's part.
//!
//! A kernel goes on some 4 us sooner, and its blocks hold multiprocessors while they wait: beside a step whose peer is late, matrix products that fill
//! the GPU take 1.08 times as long with one block and 1.47 times with a quarter of the multiprocessors (two H200). So a kernel that has waited for
//! 0.1 ms says so, and steps are then done by copy engines and operations of streams, for twice as many each time. What that costs where the peer
//! is in time again, 6 us a step, is less than what was lost by waiting.
//!
//! All ranks take the same form in a step ([`agreed`](super::agreed)).

use crate::sync::{AtomicU64, Ordering};
use std::ptr::with_exposed_provenance;

/// The forms of a step, as variants.
pub(super) const BY_KERNEL: usize = 0;
pub(super) const BY_STREAMS: usize = 1;

/// Steps by streams after a kernel has waited for long, the first time and at most.
const FIRST: u32 = 8;
const MOST: u32 = 1024;

/// After so many steps by kernels in time the next late one is the first again.
const FORGOTTEN: u32 = 64;

/// What a rank wants.
#[derive(Debug)]
pub(super) struct Lateness {
    /// The address of the word by which its kernel says that it has waited for long, if it has one.
    word: Option<u64>,
    /// Steps by streams that are left, of so many.
    left: u32,
    length: u32,
    in_time: u32,
}

impl Lateness {
    /// The word is zero, and mapped for as long as the result is used.
    pub fn of(word: Option<u64>) -> Lateness {
        Lateness { word, left: 0, length: FIRST / 2, in_time: 0 }
    }

    /// The form of the next step.
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

    /// Whether a kernel has said so since this was asked.
    fn has_waited(&self) -> bool {
        self.word.is_some_and(|word| {
            // SAFETY: aligned, in memory that stays mapped for as long as the plan lives, and looked at through atomics alone on the CPU.
            let word: &AtomicU64 = unsafe { &*with_exposed_provenance(word as usize) };
            // Swapped only where there is something: the line is the GPU's until then.
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
