//! Holds the state that a backend keeps for a plan.

use crate::plan::{Place, Program};
use std::any::Any;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Key of an object prepared for a program: the address of the program, and the GPU of the caller's stream. The GPU is `None` if the
/// program determines the GPU of every internal stream. The prepared object keeps the program alive, so that the address is not reused.
pub type ProgramKey = (usize, Option<usize>);

/// State that a backend keeps for a plan, so that executions find it without accessing shared tables.
#[derive(Default)]
pub struct PlanState {
    /// Object that the backend has prepared for the plan's program, with the key under which it was prepared.
    made: OnceLock<(ProgramKey, Arc<dyn Any + Send + Sync>)>,
    /// Bit mask of the GPUs that are known to access all memory of the plan directly. Bit `n` stands for GPU `n`.
    reaching: AtomicU64,
    /// Ids of the allocations that contain the destination and the source of each transfer, in this order for each transfer. An id is 0 if
    /// the allocation is unknown. The list is empty if no allocations were recorded.
    pub memory: Arc<[u64]>,
    /// Allocations that other code may free. Each entry holds the address of a transfer's source or destination, and the id of the
    /// allocation that contains it. The first execution that must check these allocations computes the list.
    watched: OnceLock<Box<[(u64, u64)]>>,
}

impl PlanState {
    /// Creates the state of a plan. `memory` holds the ids of the allocations that contain the destination and the source of each transfer,
    /// in this order for each transfer.
    pub fn of(memory: impl Iterator<Item = Option<NonZeroU64>>) -> PlanState {
        PlanState { memory: memory.map(|id| id.map_or(0, NonZeroU64::get)).collect(), ..PlanState::default() }
    }

    /// Returns true if the place is in memory that was recorded as an allocation known to the driver, or is a staging slot.
    pub fn knows(&self, place: Place) -> bool {
        let end = match place {
            Place::Slot { .. } => return true,
            Place::Destination { transfer, .. } => 2 * transfer as usize,
            Place::Source { transfer, .. } => 2 * transfer as usize + 1,
        };
        self.memory.get(end).is_some_and(|id| *id != 0)
    }

    /// Returns the allocations to check before an execution that the driver does not check. Each entry holds the address of a transfer's
    /// source or destination, and the id of the allocation that contains it. The first call computes the list by `find`.
    pub fn watched(&self, find: impl FnOnce(&[u64]) -> Box<[(u64, u64)]>) -> &[(u64, u64)] {
        self.watched.get_or_init(|| find(&self.memory))
    }

    /// Returns true if a GPU is known to access all memory of the plan. Always false for GPU 64 and above, which are checked in each
    /// execution.
    pub fn is_reached(&self, gpu: usize) -> bool {
        1_u64.checked_shl(gpu as u32).is_some_and(|bit| self.reaching.load(Ordering::Relaxed) & bit != 0)
    }

    /// Records that a GPU can access all memory of the plan directly.
    pub fn note_reached(&self, gpu: usize) {
        1_u64.checked_shl(gpu as u32).map(|bit| self.reaching.fetch_or(bit, Ordering::Relaxed));
    }

    /// Returns the object that was prepared for a program and for streams of this GPU, or `None` if it is not stored here.
    pub fn find<T: 'static>(&self, program: &Arc<Program>, gpu: usize) -> Option<&T> {
        let ((address, for_gpu), made) = self.made.get()?;
        let fits = *address == Arc::as_ptr(program).addr() && for_gpu.is_none_or(|wanted| wanted == gpu);
        if fits { made.downcast_ref() } else { None }
    }

    /// Stores an object prepared for a program, unless an object is already stored. For a plan that is used on several GPUs, only the
    /// object of one GPU is therefore stored.
    pub fn keep(&self, key: ProgramKey, made: Arc<dyn Any + Send + Sync>) {
        let _ = self.made.set((key, made));
    }
}

impl fmt::Debug for PlanState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PlanState")
    }
}
