//! Where the steps of a node plan stand in the streams of a rank: words beside the flags that it takes. It alone writes them, and the ranks that
//! raise these flags read them.

use std::ptr::with_exposed_provenance;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The last so many steps are there. One that a rank has come further than by this many is not found.
pub const PLACES: u64 = 256;

/// What is read every step is apart from what is written every step.
#[repr(C, align(64))]
struct PlacesPage {
    changed: AtomicU64,
    _apart: [u64; 7],
    steps: AtomicU64,
    _beside: [u64; 7],
    places: [AtomicU64; PLACES as usize],
}

/// A place in a stream.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct StepPlace {
    /// A number of the stream, which no other of the rank has.
    pub stream: u16,
    /// Steps of all plans of the rank before it.
    pub number: u64,
}

/// The places of the steps of one plan.
#[derive(Debug)]
pub struct StepPlaces(u64);

impl StepPlaces {
    /// Bytes that they take.
    pub const BYTES: u64 = size_of::<PlacesPage>() as u64;
    /// What their address is a multiple of.
    pub const ALIGN: u64 = align_of::<PlacesPage>() as u64;

    /// At this address, in memory that was zeros when it was allocated, and that stays mapped for as long as the result is used.
    pub fn at(base: u64) -> StepPlaces {
        StepPlaces(base)
    }

    fn page(&self) -> &PlacesPage {
        // SAFETY: aligned and in the memory of `at`, all of which is looked at through atomics alone by every process.
        unsafe { &*with_exposed_provenance(self.0 as usize) }
    }

    fn word(&self, step: u64) -> &AtomicU64 {
        &self.page().places[(step % PLACES) as usize]
    }

    /// Tells where this step is about to be enqueued, and whether in another order than the steps before. What this thread reads afterwards of others is not
    /// older than that: of two ranks that do the same one sees the other.
    pub fn tell(&self, step: u64, place: StepPlace, is_changed: bool) {
        if is_changed {
            self.page().changed.store(step, Ordering::Release);
        }
        self.word(step).store((u64::from(place.stream) + 1) << 48 | place.number & ((1 << 48) - 1), Ordering::Release);
        self.page().steps.store(step, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// This step is not enqueued after all.
    pub fn take_back(&self, step: u64) {
        self.word(step).store(0, Ordering::Release);
    }

    /// Steps are no longer told, for their numbers are not known.
    pub fn end(&self) {
        self.page().changed.store(u64::MAX, Ordering::Release);
    }

    /// The last step that was enqueued in another order than those before; `None` where steps are not told.
    pub fn changed(&self) -> Option<u64> {
        Some(self.page().changed.load(Ordering::Acquire)).filter(|step| *step != u64::MAX)
    }

    /// Where a step was enqueued, if that is known.
    pub fn find(&self, step: u64) -> Option<StepPlace> {
        let is_there = || self.page().steps.load(Ordering::Acquire).checked_sub(step).is_some_and(|since| since < PLACES);
        if !is_there() {
            return None;
        }
        let word = self.word(step).load(Ordering::Acquire);
        // It may have been overwritten meanwhile.
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
