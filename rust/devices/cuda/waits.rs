//! Stores the waits of streams and kernels for signals, so that waits for an exited peer can be ended.

use crate::backend::{Allocation, Signal, StepFate};
use crate::ipc::signal;
use ahash::HashMap;

/// Table of waits for signals that may not have arrived yet. It includes waits that are about to be enqueued.
#[derive(Debug, Default)]
pub(super) struct Waits {
    pub pending: Vec<Signal>,
    /// Highest value of each counter for which captured graphs wait, by the counter's address. If the counter reaches this value, the waits
    /// for lower values end as well.
    pub captured: HashMap<u64, u64>,
    /// States of the communication steps that kernels execute, by the address of a counter. Setting this counter makes the kernel abandon
    /// the step.
    pub stops: HashMap<u64, StepFate>,
    /// Waits whose counters this process has set in place of an exited process. Another process may set such a counter to a smaller value
    /// afterwards, and a stream that reaches its wait then would wait for ever. The counters are therefore set again at intervals.
    pub failed: Vec<Signal>,
}

impl Waits {
    /// Registers a wait that was captured into a graph.
    pub fn capture(&mut self, Signal { counter, value }: Signal) {
        let furthest = self.captured.entry(counter).or_insert(value);
        if signal::reached(value, *furthest) {
            *furthest = value;
        }
    }

    /// Removes from the table the waits that the driver has refused to enqueue. Waits whose counters were set in the meantime are no longer
    /// in the table and are ignored.
    pub fn take_back(&mut self, signals: &[Signal]) {
        for signal in signals {
            if let Some(index) = self.pending.iter().rposition(|pending| pending == signal) {
                self.pending.swap_remove(index);
            }
        }
    }

    /// Removes the waits for counters in an allocation that is about to be released.
    pub fn forget(&mut self, allocation: &Allocation) {
        self.captured.retain(|counter, _| !allocation.has(*counter));
        self.stops.retain(|counter, _| !allocation.has(*counter));
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
        // The value of a counter may overflow.
        waits.capture(Signal { counter: 0x1000, value: u64::MAX });
        waits.capture(Signal { counter: 0x1000, value: 3 });
        assert_eq!(waits.captured[&0x1000], 9999);
        waits.capture(Signal { counter: 0x1010, value: u64::MAX });
        waits.capture(Signal { counter: 0x1010, value: 3 });
        assert_eq!(waits.captured[&0x1010], 3);
    }
}
