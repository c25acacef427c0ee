//! Publishes the positions that the steps of a node plan have in the streams of a rank. A node plan is a plan that several ranks of a node
//! execute together, and a step is one execution of the plan.
//!
//! The positions are stored next to the flags for which this rank waits. Only this rank writes the positions. The ranks that set the flags
//! read them.

use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Number of most recent steps whose positions in stream order are stored. Positions of older steps are overwritten.
pub const PLACES: u64 = 256;

/// Page of shared memory that contains the positions, in stream order, of the steps (executions) of one plan. The word that is read in
/// every step is in a different cache line than the words that are written in every step.
#[repr(C, align(64))]
struct PlacesPage {
    changed: AtomicU64,
    _apart: [u64; 7],
    steps: AtomicU64,
    _beside: [u64; 7],
    places: [AtomicU64; PLACES as usize],
}

/// Position of a step (execution of a plan) in a stream of a rank.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct StepPlace {
    /// Number that identifies the stream among the streams of the rank.
    pub stream: u16,
    /// Number of steps, over all plans, that the rank has enqueued before this step.
    pub number: u64,
}

/// View of the positions, in stream order, of the most recent steps (executions) of one plan. The positions are stored in shared memory;
/// the value is their address.
#[derive(Debug)]
pub struct StepPlaces(u64);

impl StepPlaces {
    /// Size in bytes of the memory that contains the positions, in stream order, of the steps of one plan.
    pub const BYTES: u64 = size_of::<PlacesPage>() as u64;
    /// Required alignment in bytes of the memory that contains the positions, in stream order, of the steps of one plan.
    pub const ALIGN: u64 = align_of::<PlacesPage>() as u64;

    /// Creates a view of the positions of steps that are stored at the address `base`. The memory must have been zeroed when it was
    /// allocated, and must stay mapped while the view is used.
    pub fn at(base: u64) -> StepPlaces {
        StepPlaces(base)
    }

    fn page(&self) -> &PlacesPage {
        // SAFETY: the page is aligned and inside the memory passed to `at`. Every process accesses it only through atomics.
        unsafe { &*with_exposed_provenance(self.0 as usize) }
    }

    fn word(&self, step: u64) -> &AtomicU64 {
        &self.page().places[(step % PLACES) as usize]
    }

    /// Publishes the position, in stream order, at which step number `step` is about to be enqueued. `is_changed` is true if the order of
    /// the rank's plans differs from that in the preceding steps. A full memory barrier follows the write. If two ranks publish at the same
    /// time and then read each other's positions, at least one of them therefore sees the position of the other.
    pub fn tell(&self, step: u64, place: StepPlace, is_changed: bool) {
        if is_changed {
            self.page().changed.store(step, Ordering::Release);
        }
        self.word(step).store((u64::from(place.stream) + 1) << 48 | place.number & ((1 << 48) - 1), Ordering::Release);
        self.page().steps.store(step, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Withdraws the published position, in stream order, of step number `step`, because the step is not enqueued.
    pub fn take_back(&self, step: u64) {
        self.word(step).store(0, Ordering::Release);
    }

    /// Stops publishing the positions, in stream order, of the plan's steps, because the numbers of further steps are unknown.
    pub fn end(&self) {
        self.page().changed.store(u64::MAX, Ordering::Release);
    }

    /// Returns the number of the last step that was enqueued in a different order than the preceding steps. Returns `None` if the positions
    /// of steps are no longer published.
    pub fn changed(&self) -> Option<u64> {
        Some(self.page().changed.load(Ordering::Acquire)).filter(|step| *step != u64::MAX)
    }

    /// Returns the position, in stream order, of step number `step`. Returns `None` if it is not published, or was overwritten by a later
    /// step.
    pub fn find(&self, step: u64) -> Option<StepPlace> {
        let is_there = || self.page().steps.load(Ordering::Acquire).checked_sub(step).is_some_and(|since| since < PLACES);
        if !is_there() {
            return None;
        }
        let word = self.word(step).load(Ordering::Acquire);
        // The position of a later step may have overwritten the word in the meantime.
        fence(Ordering::Acquire);
        let stream = (word >> 48).checked_sub(1)?;
        is_there().then_some(StepPlace { stream: stream as u16, number: word & ((1 << 48) - 1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_steps_are_found_where_they_were_told_and_no_others() {
        let memory = Box::new(PlacesPage {
            changed: AtomicU64::new(0),
            _apart: [0; 7],
            steps: AtomicU64::new(0),
            _beside: [0; 7],
            places: [const { AtomicU64::new(0) }; PLACES as usize],
        });
        let places = StepPlaces::at(std::ptr::from_ref(&*memory).expose_provenance() as u64);
        let place = |step| StepPlace { stream: (step % 3) as u16, number: 7 * step };
        (1..=1000).for_each(|step| places.tell(step, place(step), step == 5));
        for step in 1001 - PLACES..=1000 {
            assert_eq!(places.find(step), Some(place(step)));
        }
        assert_eq!((places.find(1000 - PLACES), places.find(1001), places.changed()), (None, None, Some(5)));
        places.take_back(1000);
        assert_eq!((places.find(1000), places.find(999)), (None, Some(place(999))));
        places.end();
        assert_eq!(places.changed(), None);
    }
}
