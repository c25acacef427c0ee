//! Defines the kinds of work that nodes of the host backend's dependency graph do. Examples are the execution of a program (list of copy
//! operations) and the call of a host function.

use super::kernel::{Grid, Segment, copy_segments};
use super::memory::HostMemory;
use super::moment::Passed;
use super::node::{Node, Work};
use super::pieces::PieceWork;
use super::rings::{RingBytes, Rings};
use super::schedule::Schedule;
use super::times::Times;
use crate::backend::failed_waits::{Behind, FailedWaits};
use crate::backend::{Abandoned, BackendError, Endpoints, FailedWait, HostFunction, OpTimes, Signal, StepFate, address};
use crate::guarded;
use crate::ipc::signal;
use crate::plan::{Copy, Mechanism, Place, Program};
use crate::sync::{Mutex, lock};
use smallvec::SmallVec;
use std::fmt;
use std::sync::{Arc, OnceLock};

/// Work of a node in the host backend's dependency graph.
pub(super) enum HostWork {
    /// No work. The node only orders other nodes.
    Join,
    /// Call of a host function. The function is removed from the option when it is called.
    Function(Mutex<Option<HostFunction>>),
    /// Execution of a program (list of copy operations) in a stream.
    Run(Box<Run>),
    /// Arrival of a stream at an execution that uses staging rings. The execution, which is the given node, starts when it may use these
    /// byte ranges.
    Claim(Arc<Rings<HostWork>>, Arc<Node<HostWork>>, RingBytes),
    /// End of an execution that used staging rings. Afterwards, other executions may use the byte ranges.
    GiveBack(Arc<Rings<HostWork>>, Arc<Node<HostWork>>),
    /// Copy of many pieces without a program.
    Pieces(PieceWork),
    /// Recording of the time at which the stream reaches this node.
    Moment(Passed),
    /// Wait of a stream until counters reach the values of their signals. The thread of the polling queue checks the counters.
    Wait(Wait),
    /// Setting of counters. The counters are not set if they belong to a communication step that this rank has abandoned.
    Raise(Signals, Option<StepFate>),
}

/// Counters, each with the value that a stream waits for or sets.
pub(super) type Signals = SmallVec<[Signal; 4]>;

/// Wait of a stream until counters reach the values of their signals.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) signals: Signals,
    /// True if the counters are flags that the stream resets to 0 after the wait.
    pub(super) takes: bool,
    /// State of the communication step to which the flags belong. The step is abandoned if a process that should set one of its flags is
    /// lost. `None` for counters that belong to no step.
    pub(super) fate: Option<StepFate>,
    /// Failed wait that made this node abandon the communication step. Empty if there is none.
    pub(super) lost: OnceLock<FailedWait>,
    pub(super) memory: Arc<HostMemory>,
    /// Table of all failed waits of the backend.
    pub(super) failed_waits: Arc<FailedWaits>,
}

/// Execution of a program (list of copy operations) in a stream.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) program: Arc<Program>,
    pub(super) endpoints: Arc<[Endpoints]>,
    pub(super) rings: Arc<[u64]>,
    /// Identifiers of the allocations that contain each transfer's destination and source, in this order. Pageable memory has the
    /// identifier 0.
    pub(super) memory: Arc<[u64]>,
    pub(super) schedule: Schedule,
    pub(super) verify: bool,
    /// Start and end times of each operation. `None` if they were not requested.
    pub(super) times: Option<Times>,
    pub(super) failed_waits: Arc<FailedWaits>,
    /// Waits for signals that precede the execution in its stream. If one of them has failed, the execution's completion reports the
    /// failure.
    pub(super) behind: Behind,
    /// State of the communication step to which the execution belongs. `None` if the execution belongs to no step.
    pub(super) fate: Option<StepFate>,
}

impl Work for HostWork {
    fn roots(&self) -> impl Iterator<Item = u32> {
        let (own, run) = match self {
            HostWork::Join | HostWork::Claim(..) | HostWork::GiveBack(..) => (0..0, None),
            HostWork::Function(_) | HostWork::Pieces(_) | HostWork::Moment(_) | HostWork::Wait(_) | HostWork::Raise(..) => (0..1, None),
            HostWork::Run(run) => (0..0, Some(run.schedule.roots())),
        };
        own.chain(run.into_iter().flatten())
    }

    fn run(&self, step: u32) -> Result<(), BackendError> {
        match self {
            HostWork::Join | HostWork::Claim(..) | HostWork::GiveBack(..) => {}
            HostWork::Function(function) => {
                // The function is removed before the call, because the call may take long and the lock must not be held during that time.
                let function = lock(function).take();
                if let Some(function) = function {
                    function();
                }
            }
            HostWork::Run(run) if is_abandoned(&run.fate) => {}
            HostWork::Run(run) => match &run.times {
                None => run.copy(step)?,
                Some(times) => times.note(step, || run.copy(step))?,
            },
            HostWork::Pieces(pieces) => pieces.run()?,
            HostWork::Moment(moment) => moment.note(),
            HostWork::Wait(wait) => wait.conclude()?,
            HostWork::Raise(_, fate) if is_abandoned(fate) => {}
            // SAFETY: the engine has checked alignment and range, and the memory is freed or unmapped only after this node has finished.
            HostWork::Raise(signals, _) => signals.iter().for_each(|raised| unsafe { signal::store(raised.counter, raised.value) }),
        }
        Ok(())
    }

    fn may_run(&self, _: u32) -> bool {
        match self {
            HostWork::Wait(wait) => wait.may_end(),
            _ => true,
        }
    }

    fn finished(&self, step: u32) -> impl Iterator<Item = u32> {
        match self {
            HostWork::Run(run) => Some(run.schedule.finished(step)),
            _ => None,
        }
        .into_iter()
        .flatten()
    }

    fn was_last(&self) -> bool {
        match self {
            HostWork::Run(run) => run.schedule.was_last(),
            _ => true,
        }
    }

    fn conclude(&self) -> Result<(), BackendError> {
        match self {
            HostWork::Run(run) if run.verify => return run.verify(),
            HostWork::Claim(rings, node, bytes) => rings.claim(node, bytes),
            HostWork::GiveBack(rings, node) => rings.give_back(node),
            _ => {}
        }
        Ok(())
    }

    fn tell(&self) -> Result<(), BackendError> {
        match self {
            HostWork::Run(run) => run.failed_waits.report_behind(&run.behind),
            _ => Ok(()),
        }
    }

    fn times(&self) -> Option<OpTimes> {
        match self {
            HostWork::Run(run) => run.times.as_ref().map(Times::read),
            _ => None,
        }
    }

    fn describe(&self, step: u32) -> String {
        match self {
            HostWork::Join => "a wait".into(),
            HostWork::Claim(..) | HostWork::GiveBack(..) => "use of staging memory".into(),
            HostWork::Function(_) => "a host function".into(),
            HostWork::Run(_) => format!("operation {step} of a plan"),
            HostWork::Pieces(_) => "a copy of pieces".into(),
            HostWork::Moment(_) => "recording a time".into(),
            HostWork::Wait(_) => "a wait for signals".into(),
            HostWork::Raise(..) => "setting signals".into(),
        }
    }
}

impl Run {
    /// Makes the copies of operation number `step` of the program.
    fn copy(&self, step: u32) -> Result<(), BackendError> {
        let op = &self.program.ops[step as usize];
        let is_fused = matches!(op.mechanism, Mechanism::Batch | Mechanism::Kernel);
        if !is_fused || op.copies.iter().any(|copy| self.is_pageable(copy.to) || self.is_pageable(copy.from)) {
            return op.copies.iter().try_for_each(|copy| self.copy_alone(copy));
        }
        // The copies are processed in groups whose list fits on the stack, because a heap allocation could fail here.
        for copies in op.copies.chunks(32) {
            let segments: SmallVec<[Segment; 32]> =
                copies.iter().map(|copy| Segment { dst: self.address(copy.to), src: self.address(copy.from), bytes: copy.bytes }).collect();
            // SAFETY: the program is valid, so all ranges lie inside the transfers or the slots, which are memory of the library. The
            // copies of one operation are unordered, so they do not overlap each other. A valid program orders them with every other copy
            // of the same bytes.
            unsafe { copy_segments(&segments, Grid::SEQUENTIAL) }
        }
        Ok(())
    }

    fn copy_alone(&self, copy: &Copy) -> Result<(), BackendError> {
        let (to, from, bytes) = (self.address(copy.to), self.address(copy.from), copy.bytes as usize);
        let is_pageable = [copy.to, copy.from].map(|place| self.is_pageable(place));
        if is_pageable == [false; 2] {
            // SAFETY: as in `copy`.
            unsafe { guarded::copy_in_process(to, from, bytes) };
            return Ok(());
        }
        // SAFETY: as in `copy`. The caller of `execute` guarantees that the buffers are not accessed until completion.
        unsafe { guarded::copy(to, from, bytes, is_pageable) }.map_err(|fault| {
            let end = if fault.is_source { copy.from } else { copy.to };
            fault.error(transfer_of(end).map_or(0, |(transfer, _)| transfer))
        })
    }

    /// True if the memory at `place` was not allocated by the library. Such memory is not guaranteed to exist while the execution runs.
    fn is_pageable(&self, place: Place) -> bool {
        transfer_of(place).is_some_and(|(transfer, end)| !HostMemory::is_kept(self.memory.get(2 * transfer as usize + end).copied()))
    }

    fn address(&self, place: Place) -> u64 {
        address(&self.program, &self.endpoints, &self.rings, place)
    }

    /// Compares every destination of the execution with its source. Returns an error if they differ.
    fn verify(&self) -> Result<(), BackendError> {
        let transfers = || (0_u32..).zip(self.program.transfers.iter().zip(&*self.endpoints));
        for (transfer, (&bytes, endpoints)) in transfers() {
            let mut blocks = [[0_u8; BLOCK]; 2];
            let mut offset = 0;
            while offset < bytes {
                let count = (bytes - offset).min(BLOCK as u64) as usize;
                for (end, (base, block)) in [endpoints.dst, endpoints.src].into_iter().zip(&mut blocks).enumerate() {
                    let to = block.as_mut_ptr().expose_provenance() as u64;
                    let is_pageable = !HostMemory::is_kept(self.memory.get(2 * transfer as usize + end).copied());
                    // SAFETY: the block is large enough. The caller of `execute` guarantees that the buffers are not accessed until
                    // completion, which has not been published yet.
                    let read = unsafe { guarded::copy(to, base + offset, count, [false, is_pageable]) };
                    read.map_err(|fault| fault.error(transfer))?;
                }
                let [dst, src] = &blocks;
                if let Some(at) = dst[..count].iter().zip(&src[..count]).position(|(a, b)| a != b) {
                    return Err(BackendError::DataCorruption { transfer, offset: offset + at as u64 });
                }
                offset += count as u64;
            }
        }
        Ok(())
    }
}

/// Returns the index of the transfer whose memory contains `place`, and an index that is 0 for the transfer's destination and 1 for its
/// source. Returns `None` for a place in a staging ring.
fn transfer_of(place: Place) -> Option<(u32, usize)> {
    match place {
        Place::Destination { transfer, .. } => Some((transfer, 0)),
        Place::Source { transfer, .. } => Some((transfer, 1)),
        Place::Slot { .. } => None,
    }
}

/// Number of bytes that [`Run::verify`] compares at a time.
const BLOCK: usize = 16 << 10;

impl fmt::Debug for HostWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostWork::Join => f.write_str("Join"),
            HostWork::Claim(..) => f.write_str("Claim"),
            HostWork::GiveBack(..) => f.write_str("GiveBack"),
            HostWork::Function(_) => f.write_str("Function"),
            HostWork::Run(run) => run.fmt(f),
            HostWork::Pieces(pieces) => pieces.fmt(f),
            HostWork::Moment(moment) => moment.fmt(f),
            HostWork::Wait(wait) => wait.fmt(f),
            HostWork::Raise(signals, fate) => f.debug_tuple("Raise").field(signals).field(fate).finish(),
        }
    }
}

fn is_abandoned(fate: &Option<StepFate>) -> bool {
    fate.as_ref().is_some_and(StepFate::is_abandoned)
}

impl Wait {
    /// True if the wait may end, because each counter has reached the required value, or can no longer reach it since a process was lost.
    /// In a communication step, a single lost counter ends the wait, because the step is then abandoned. The loss is recorded, because the
    /// lost counter may still be set late, when other counters of the step have not reached their required values.
    fn may_end(&self) -> bool {
        let is_reached = |wanted: &Signal| self.memory.is_reached(wanted).unwrap_or(true);
        let failed = |wanted: &Signal| self.memory.failed_wait(wanted);
        if self.fate.is_some() {
            if let Some(wait) = self.signals.iter().find_map(failed) {
                let _ = self.lost.set(wait);
                return true;
            }
            return is_abandoned(&self.fate) || self.signals.iter().all(is_reached);
        }
        self.signals.iter().all(|wanted| is_reached(wanted) || failed(wanted).is_some())
    }

    /// Ends the wait. If a process that should have set a counter was lost, records the failed wait, and abandons the communication step if
    /// the wait belongs to one. If no step is abandoned and the wait includes a reset, resets the flags.
    fn conclude(&self) -> Result<(), BackendError> {
        if is_abandoned(&self.fate) {
            return Ok(());
        }
        let mut is_lost = false;
        for wanted in &self.signals {
            let lost = match self.lost.get().filter(|lost| lost.wanted == *wanted) {
                Some(lost) => Some(*lost),
                None if self.memory.is_reached(wanted)? => None,
                None => self.memory.failed_wait(wanted),
            };
            if let Some(wait) = lost
                && let Some(line) = self.memory.line_of(wanted.counter)
            {
                is_lost = true;
                // The failure is recorded before the communication step is abandoned. A thread that sees the end of the step therefore also
                // sees the failure.
                self.failed_waits.note(line, wait);
            }
        }
        if let (true, Some(fate)) = (is_lost, &self.fate) {
            fate.abandon(Abandoned::All);
            return Ok(());
        }
        if self.takes {
            // SAFETY: as for `HostWork::Raise`.
            self.signals.iter().for_each(|flag| unsafe { signal::store(flag.counter, 0) });
        }
        Ok(())
    }
}
