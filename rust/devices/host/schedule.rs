//! Tracks the order of the operations of one execution. For each operation it stores the successors and the number of unfinished
//! predecessors.

use crate::plan::Program;
use crate::sync::{AtomicU32, Ordering};
use smallvec::SmallVec;

/// Dependencies between the operations of a program (list of copy operations), with the number of unfinished predecessors of each
/// operation. Small programs need no heap allocation.
#[derive(Debug)]
pub(super) struct Schedule {
    steps: SmallVec<[StepState; 2]>,
    /// Indices of the successors of all operations. The successors of operation 0 come first, then those of operation 1, and so on.
    successors: SmallVec<[u32; 4]>,
    roots: SmallVec<[u32; 2]>,
    unfinished: AtomicU32,
}

#[derive(Debug)]
struct StepState {
    /// Number of predecessors of this operation that have not finished.
    pending: AtomicU32,
    /// End of this operation's range in [`Schedule::successors`], exclusive. The range starts at the end of the previous operation's range.
    successors_end: u32,
}

impl Schedule {
    /// Returns the dependencies between the operations of `program`. The operations of one lane (sequence of operations) run in order. Each
    /// operation also runs after the operations in its field [`Op::after`](crate::plan::Op::after).
    pub(super) fn new(program: &Program) -> Self {
        // Most recent operation of each lane so far. It precedes the next operation of that lane.
        let mut tails: SmallVec<[Option<u32>; 8]> = SmallVec::new();
        let mut predecessors_on_lane: SmallVec<[Option<u32>; 8]> = SmallVec::with_capacity(program.ops.len());
        tails.resize(program.lanes.len(), None);
        for (index, op) in (0u32..).zip(&program.ops) {
            predecessors_on_lane.push(tails[op.lane.0 as usize].replace(index));
        }
        let predecessors = |index: usize| predecessors_on_lane[index].into_iter().chain(program.ops[index].after.iter().map(|op| op.0));

        // Count the successors of each operation, turn the counts into the ends of ranges, and fill each range from its end downwards.
        let mut ends: SmallVec<[u32; 8]> = SmallVec::new();
        ends.resize(program.ops.len(), 0);
        let mut total = 0;
        for predecessor in (0..program.ops.len()).flat_map(predecessors) {
            ends[predecessor as usize] += 1;
            total += 1;
        }
        let mut sum = 0;
        for end in &mut ends {
            sum += *end;
            *end = sum;
        }
        let mut successors: SmallVec<[u32; 4]> = SmallVec::new();
        successors.resize(total, 0);
        let mut free = ends.clone();
        let mut steps = SmallVec::with_capacity(program.ops.len());
        let mut roots = SmallVec::new();
        for (index, end) in (0u32..).zip(&ends) {
            let mut pending = 0;
            for predecessor in predecessors(index as usize) {
                let slot = &mut free[predecessor as usize];
                *slot -= 1;
                successors[*slot as usize] = index;
                pending += 1;
            }
            if pending == 0 {
                roots.push(index);
            }
            steps.push(StepState { pending: AtomicU32::new(pending), successors_end: *end });
        }
        Schedule { unfinished: AtomicU32::new(ends.len() as u32), steps, successors, roots }
    }

    /// Returns the indices of the operations without predecessors.
    pub(super) fn roots(&self) -> impl Iterator<Item = u32> {
        self.roots.iter().copied()
    }

    /// Records that operation `step` has finished. Returns the indices of the operations that have no unfinished predecessor any more as a
    /// result. Must be called once for each operation.
    pub(super) fn finished(&self, step: u32) -> impl Iterator<Item = u32> {
        let step = step as usize;
        let begin = if step == 0 { 0 } else { self.steps[step - 1].successors_end as usize };
        let end = self.steps[step].successors_end as usize;
        self.successors[begin..end].iter().copied().filter(|&s| self.steps[s as usize].pending.fetch_sub(1, Ordering::AcqRel) == 1)
    }

    /// Returns true if all operations have finished. Must be called once for each operation that finishes.
    pub(super) fn was_last(&self) -> bool {
        self.unfinished.fetch_sub(1, Ordering::AcqRel) == 1
    }
}
