//! State that a backend keeps for a plan.

use crate::plan::{Place, Program};
use std::any::Any;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Key of a prepared program: the address of the program, and the GPU of the caller's stream if the program does not fix the GPU of an internal stream.
/// The prepared object keeps the program alive, so that the address is not reused.
pub type ProgramKey = (usize, Option<usize>);

/// State of a plan that an execution finds without accessing shared tables.
#[derive(Default)]
pub struct PlanState {
    /// Object that the backend has prepared for the plan's program, with its key.
    made: OnceLock<(ProgramKey, Arc<dyn Any + Send + Sync>)>,
    /// Bit mask of the GPUs that are known to access all memory of the plan directly.
    reaching: AtomicU64,
    /// Allocation of each end of a transfer, destination and source alternating; 0 for an unknown one. Empty if no allocations were
    /// recorded.
    pub memory: Arc<[u64]>,
    /// One end in each allocation that other code may free, and the allocation. Computed by the first execution that must check them.
    watched: OnceLock<Box<[(u64, u64)]>>,
}

impl PlanState {
    /// Creates the state of a plan whose ends, destination and source alternating, are in these allocations.
    pub fn of(memory: impl Iterator<Item = Option<NonZeroU64>>) -> PlanState {
        PlanState { memory: memory.map(|id| id.map_or(0, NonZeroU64::get)).collect(), ..PlanState::default() }
    }

    /// Returns true if the driver knows the memory of a place, as far as it was recorded.
    pub fn knows(&self, place: Place) -> bool {
        let end = match place {
            Place::Slot { .. } => return true,
            Place::Destination { transfer, .. } => 2 * transfer as usize,
            Place::Source { transfer, .. } => 2 * transfer as usize + 1,
        };
        self.memory.get(end).is_some_and(|id| *id != 0)
    }

    /// Returns the ends to check before an execution that the driver does not check, each with its allocation.
    pub fn watched(&self, find: impl FnOnce(&[u64]) -> Box<[(u64, u64)]>) -> &[(u64, u64)] {
        self.watched.get_or_init(|| find(&self.memory))
    }

    /// Returns true if a GPU is known to access all memory of the plan. GPUs from the 64th on are checked each time.
    pub fn is_reached(&self, gpu: usize) -> bool {
        1_u64.checked_shl(gpu as u32).is_some_and(|bit| self.reaching.load(Ordering::Relaxed) & bit != 0)
    }

    /// Records that a GPU can access all memory of the plan.
    pub fn note_reached(&self, gpu: usize) {
        1_u64.checked_shl(gpu as u32).map(|bit| self.reaching.fetch_or(bit, Ordering::Relaxed));
    }

    /// Returns the object prepared for a program and for streams of this GPU, if it is kept here.
    pub fn find<T: 'static>(&self, program: &Arc<Program>, gpu: usize) -> Option<&T> {
        let ((address, for_gpu), made) = self.made.get()?;
        let fits = *address == Arc::as_ptr(program).addr() && for_gpu.is_none_or(|wanted| wanted == gpu);
        if fits { made.downcast_ref() } else { None }
    }

    /// Keeps an object prepared for a program. The first one stays: a plan for several GPUs keeps that of one.
    pub fn keep(&self, key: ProgramKey, made: Arc<dyn Any + Send + Sync>) {
        let _ = self.made.set((key, made));
    }
}

impl fmt::Debug for PlanState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PlanState")
    }
}
