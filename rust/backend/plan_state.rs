//! What a backend keeps for a plan.

use crate::plan::{Place, Program};
use std::any::Any;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A program, by its address, which what was made of it keeps from being used for another; and the GPU of the caller's stream where the
/// program leaves open which GPU works on a lane.
pub type ProgramKey = (usize, Option<usize>);

/// What a plan keeps at hand, so that an execution finds it without a look at what belongs to others.
#[derive(Default)]
pub struct PlanState {
    /// What the backend has made of the plan's program, and for which one.
    made: OnceLock<(ProgramKey, Arc<dyn Any + Send + Sync>)>,
    /// The GPUs of streams that reach all memory of the plan by themselves: one bit for each that is known to.
    reaching: AtomicU64,
    /// Which allocation each end of a transfer lies in, destination and source by turns, 0 for one that is not known. Empty where nobody has said.
    pub memory: Arc<[u64]>,
    /// One end in each allocation that somebody else may free, and the allocation. Found out by the first execution that has to look at them.
    watched: OnceLock<Box<[(u64, u64)]>>,
}

impl PlanState {
    /// For a plan whose transfers' destinations and sources, by turns, lie in these allocations.
    pub fn of(memory: impl Iterator<Item = Option<NonZeroU64>>) -> PlanState {
        PlanState { memory: memory.map(|id| id.map_or(0, NonZeroU64::get)).collect(), ..PlanState::default() }
    }

    /// Whether the driver knows the memory that a place lies in, as far as that was said.
    pub fn knows(&self, place: Place) -> bool {
        let end = match place {
            Place::Slot { .. } => return true,
            Place::Destination { transfer, .. } => 2 * transfer as usize,
            Place::Source { transfer, .. } => 2 * transfer as usize + 1,
        };
        self.memory.get(end).is_some_and(|id| *id != 0)
    }

    /// The ends to be looked at before an execution that the driver does not check, each with its allocation.
    pub fn watched(&self, find: impl FnOnce(&[u64]) -> Box<[(u64, u64)]>) -> &[(u64, u64)] {
        self.watched.get_or_init(|| find(&self.memory))
    }

    /// True if a GPU is known to reach all memory of the plan. GPUs from the 64th on are looked at each time.
    pub fn is_reached(&self, gpu: usize) -> bool {
        1_u64.checked_shl(gpu as u32).is_some_and(|bit| self.reaching.load(Ordering::Relaxed) & bit != 0)
    }

    /// A GPU was found to.
    pub fn note_reached(&self, gpu: usize) {
        1_u64.checked_shl(gpu as u32).map(|bit| self.reaching.fetch_or(bit, Ordering::Relaxed));
    }

    /// What was made of a program for launches in streams of this GPU, if it is kept here.
    pub fn find<T: 'static>(&self, program: &Arc<Program>, gpu: usize) -> Option<&T> {
        let ((address, for_gpu), made) = self.made.get()?;
        let fits = *address == Arc::as_ptr(program).addr() && for_gpu.is_none_or(|wanted| wanted == gpu);
        if fits { made.downcast_ref() } else { None }
    }

    /// Keeps what was made of a program. What was kept first stays: a plan for several GPUs keeps that of one.
    pub fn keep(&self, key: ProgramKey, made: Arc<dyn Any + Send + Sync>) {
        let _ = self.made.set((key, made));
    }
}

impl fmt::Debug for PlanState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PlanState")
    }
}
