//! Signals: 64-bit counters in shared memory, raised by one process and waited for by another.
//!
//! A raise is a store with release ordering and a wait a load with acquire ordering, on memory that both map. So whoever sees the value
//! sees every byte that was written before it was raised, on the CPU: x86-64 and AArch64 order shared memory between processes as
//! between threads.

use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Whether a counter that stands at `now` has reached `value`. The comparison is that of `cuStreamWaitValue64`: cyclic, so that a
/// counter may run over.
pub fn reached(now: u64, value: u64) -> bool {
    now.wrapping_sub(value) <= i64::MAX as u64
}

/// Reads a counter, and with it everything that was written before it was raised.
///
/// # Safety
/// `address` is that of 8 readable bytes, aligned to 8, which nothing writes but in one piece.
pub unsafe fn load(address: u64) -> u64 {
    // SAFETY: the caller vouches for address and alignment. The memory is shared, so it is looked at through an atomic alone.
    unsafe { &*with_exposed_provenance::<AtomicU64>(address as usize) }.load(Ordering::Acquire)
}

/// Raises a counter, after everything that this thread has seen or written.
///
/// # Safety
/// As for [`load`], and writable.
pub unsafe fn store(address: u64, value: u64) {
    // SAFETY: as in `load`.
    unsafe { &*with_exposed_provenance::<AtomicU64>(address as usize) }.store(value, Ordering::Release);
}

/// Pauses after the `round`-th unsuccessful look: yields at first, then sleeps, for up to 200 us. Most waits are short; in a long one the
/// core is free for others.
pub fn rest(round: u32) {
    match round {
        0..64 => std::thread::yield_now(),
        64.. => std::thread::sleep(Duration::from_micros(20 << ((round - 64) / 16).min(3)).min(Duration::from_micros(200))),
    }
}

#[cfg(test)]
mod tests {
    use super::reached;

    #[test]
    fn a_counter_has_reached_what_lies_at_most_half_a_turn_behind_it() {
        assert!(reached(5, 5) && reached(6, 5) && !reached(4, 5) && !reached(0, 1));
        assert!(reached(2, u64::MAX - 3) && !reached(u64::MAX - 3, 2));
        assert!(reached(i64::MAX as u64, 0) && !reached(1 << 63, 0));
    }
}
