//! Implements signals: 64-bit counters in shared memory that one process sets and another waits for.
//!
//! Setting a counter is a store with release ordering, and waiting is a load with acquire ordering, on memory that both processes map. A
//! CPU thread that sees the value therefore sees every byte written before the counter was set: x86-64 and AArch64 order accesses to shared
//! memory between processes in the same way as between threads.

use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// True if a counter with value `now` has reached `value`. The comparison is cyclic like that of `cuStreamWaitValue64`, so the counter may
/// overflow.
pub fn reached(now: u64, value: u64) -> bool {
    now.wrapping_sub(value) <= i64::MAX as u64
}

/// Returns the value of a counter, read with acquire ordering: writes that preceded the store of this value are visible afterwards.
///
/// # Safety
///
/// `address` refers to 8 readable bytes, aligned to 8, that are only written by single 8-byte stores.
pub unsafe fn load(address: u64) -> u64 {
    // SAFETY: the caller guarantees address and alignment. The memory is shared, so it is accessed only through an atomic.
    unsafe { &*with_exposed_provenance::<AtomicU64>(address as usize) }.load(Ordering::Acquire)
}

/// Sets a counter to `value` with release ordering, so that everything this thread has written or seen before is visible to a reader.
///
/// # Safety
///
/// The requirements of [`load`] hold, and the bytes are writable.
pub unsafe fn store(address: u64, value: u64) {
    // SAFETY: the caller guarantees a valid and writable address, as in `load`.
    unsafe { &*with_exposed_provenance::<AtomicU64>(address as usize) }.store(value, Ordering::Release);
}

/// Pauses between two polls of a counter. Yields the CPU after the first unsuccessful polls, and later sleeps for up to 200 us, so that
/// long waits leave the core to other threads. `round` is the number of unsuccessful polls.
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
