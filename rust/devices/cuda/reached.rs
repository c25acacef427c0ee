//! Caches which GPUs can access all memory of each plan.

use super::kernel::HostEnds;
use crate::backend::Endpoints;
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// Cache of the results for many plans: which GPUs can access all memory of the plan.
#[derive(Debug, Default)]
pub(super) struct Reached {
    /// Results for each plan, by the address of the plan's list of sources and destinations.
    plans: HashMap<usize, Reach, ahash::RandomState>,
    /// Number of cached results at which the results of dropped plans are next removed.
    sweep_at: usize,
}

#[derive(Debug)]
pub(super) struct Reach {
    /// Weak reference to the plan's list of sources and destinations. While it exists, no other list can have the same address.
    plan: Weak<[Endpoints]>,
    /// Bit mask of the GPUs for which it is known whether they can access the plan's memory.
    pub known: u64,
    /// Bit mask of the GPUs whose kernels can access all sources and destinations of the plan.
    pub all: u64,
    /// Bit mask of the GPUs that cannot access some memory of the plan, not even by copies.
    pub shut_out: u64,
    /// Use of host memory in the plan: none, only as source, or as destination.
    pub host: HostEnds,
    /// Sources and destinations of the plan as addresses that a GPU uses. There is one entry for each GPU whose addresses differ from the
    /// plan's.
    pub ends: Vec<(usize, Arc<[Endpoints]>)>,
}

impl Reached {
    /// Returns the cached results for the plan with this list of sources and destinations. Returns `None` if there are none.
    pub fn of(&self, ends: &Arc<[Endpoints]>) -> Option<&Reach> {
        self.plans.get(&Arc::as_ptr(ends).cast::<u8>().addr())
    }

    /// Stores results for the GPUs in the bit mask `known`. `own` contains a GPU and the sources and destinations as addresses of this GPU,
    /// if these differ from the plan's.
    pub fn note(
        &mut self,
        ends: &Arc<[Endpoints]>,
        known: u64,
        all: u64,
        shut_out: u64,
        own: Option<(usize, Arc<[Endpoints]>)>,
    ) -> &mut Reach {
        const SWEEP_FROM: usize = 1024;
        if self.plans.len() >= self.sweep_at.max(SWEEP_FROM) {
            self.plans.retain(|_, reach| reach.plan.strong_count() > 0);
            // The next removal happens at twice the number of remaining entries, because a removal visits every entry.
            self.sweep_at = 2 * self.plans.len();
        }
        let new = || Reach { plan: Arc::downgrade(ends), known: 0, all: 0, shut_out: 0, host: HostEnds::None, ends: Vec::new() };
        let reach = self.plans.entry(Arc::as_ptr(ends).cast::<u8>().addr()).or_insert_with(new);
        reach.all = reach.all & !known | all;
        reach.shut_out = reach.shut_out & !known | shut_out & known;
        reach.known |= known;
        reach.ends.retain(|(gpu, _)| own.as_ref().is_none_or(|own| own.0 != *gpu));
        reach.ends.extend(own);
        reach
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(address: u64) -> Arc<[Endpoints]> {
        Arc::new([Endpoints { dst: address, src: address }])
    }

    #[test]
    fn what_is_noted_of_gpus_one_after_the_other_is_known_together() {
        let (plan, own, other) = (ends(1), ends(2), ends(3));
        let mut reached = Reached::default();
        assert!(reached.of(&plan).is_none());
        reached.note(&plan, 0b011, 0b001, 0b010, None);
        let before = reached.of(&plan).map(|reach| (reach.all, reach.shut_out));
        assert_eq!(before, Some((0b001, 0b010)));
        reached.note(&plan, 0b110, 0b110, 0, Some((2, own.clone())));
        reached.note(&plan, 0b100, 0b100, 0, Some((2, other.clone())));
        let reach = reached.of(&plan).expect("noted");
        assert_eq!((reach.known, reach.all, reach.shut_out), (0b111, 0b111, 0));
        assert!(matches!(&reach.ends[..], [(2, ends)] if Arc::ptr_eq(ends, &other)));
        assert!(reached.of(&own).is_none());
    }

    #[test]
    fn plans_that_are_gone_are_dropped_and_those_that_live_are_not_looked_at_again_and_again() {
        let mut reached = Reached::default();
        let alive: Vec<_> = (0..3000).map(ends).collect();
        for (count, plan) in alive.iter().enumerate() {
            reached.note(plan, 1, 1, 0, None);
            assert_eq!(reached.plans.len(), count + 1);
        }
        // Entries were removed at 1024 and 2048, and the next removal comes after the number has doubled again.
        assert_eq!(reached.sweep_at, 4096);
        for address in 0..10_000 {
            reached.note(&ends(address), 1, 1, 0, None);
            assert!(reached.plans.len() <= 6000, "{}", reached.plans.len());
        }
        assert!(alive.iter().all(|plan| reached.of(plan).is_some()));
    }
}
