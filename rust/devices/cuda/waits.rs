//! Which waits for signals streams have been given, so that those of a peer that has ended can be ended.

use crate::backend::{Allocation, Signal};
use crate::ipc::signal;
use ahash::HashMap;

/// Waits that streams have been given, or are about to be, and that may not be satisfied yet.
#[derive(Debug, Default)]
pub(super) struct Waits {
    pub pending: Vec<Signal>,
    /// Those that graphs hold: for each counter the value that is furthest, which includes the others.
    pub captured: HashMap<u64, u64>,
    /// What was raised here in place of a process that has gone. A raise is a store, so another process that raises the same counter, and is not
    /// that far, sets it back; a stream that had not come to its wait by then would wait for ever.
    pub failed: Vec<Signal>,
}

impl Waits {
    /// A graph waits for it from now on.
    pub fn capture(&mut self, Signal { counter, value }: Signal) {
        let furthest = self.captured.entry(counter).or_insert(value);
        if signal::reached(value, *furthest) {
            *furthest = value;
        }
    }

    /// Takes out waits that the driver has not taken. Those that were raised by now are not there any more.
    pub fn take_back(&mut self, signals: &[Signal]) {
        for signal in signals {
            if let Some(index) = self.pending.iter().rposition(|pending| pending == signal) {
                self.pending.swap_remove(index);
            }
        }
    }

    /// Takes out what lies in an allocation that is about to go.
    pub fn forget(&mut self, allocation: &Allocation) {
        self.captured.retain(|counter, _| !allocation.has(*counter));
        self.pending.retain(|wanted| !allocation.has(wanted.counter));
        self.failed.retain(|wanted| !allocation.has(wanted.counter));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_counter_the_furthest_captured_wait_is_kept_however_often_it_is_captured() {
        let mut waits = Waits::default();
        for value in (0..10_000).chain(0..10) {
            [0x1000, 0x1008].into_iter().for_each(|counter| waits.capture(Signal { counter, value }));
        }
        assert_eq!(waits.captured, HashMap::from_iter([(0x1000, 9999), (0x1008, 9999)]));
        // Counters run over.
        waits.capture(Signal { counter: 0x1000, value: u64::MAX });
        waits.capture(Signal { counter: 0x1000, value: 3 });
        assert_eq!(waits.captured[&0x1000], 9999);
        waits.capture(Signal { counter: 0x1010, value: u64::MAX });
        waits.capture(Signal { counter: 0x1010, value: 3 });
        assert_eq!(waits.captured[&0x1010], 3);
    }
}
