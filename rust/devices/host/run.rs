//! What the nodes of this backend do: run a program, call a host function, or only order.

use super::kernel::{Grid, Segment, copy_segments};
use super::memory::HostMemory;
use super::moment::Passed;
use super::node::Work;
use super::schedule::Schedule;
use super::times::Times;
use crate::backend::failed_waits::{Behind, FailedWaits};
use crate::backend::{BackendError, Endpoints, HostFunction, OpTimes, Signal, address};
use crate::ipc::signal;
use crate::plan::{Mechanism, Place, Program};
use crate::sync::{Mutex, lock};
use smallvec::SmallVec;
use std::fmt;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

/// The work of a node.
pub(super) enum HostWork {
    /// Nothing: the node joins its predecessors.
    Join,
    /// A host function, gone once it has been called.
    Function(Mutex<Option<HostFunction>>),
    /// An execution of a program.
    Run(Run),
    /// The time to be taken.
    Moment(Passed),
    /// Counters to be reached. Its step is handed to the queue that watches.
    Wait(Wait),
    /// Counters to be raised.
    Raise(Signals),
}

/// Counters and their values.
pub(super) type Signals = SmallVec<[Signal; 4]>;

/// A wait of a stream for counters.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) signals: Signals,
    /// Whether they are flags, which are set back.
    pub(super) takes: bool,
    pub(super) memory: Arc<HostMemory>,
    /// Where its failure is noted.
    pub(super) failed_waits: Arc<FailedWaits>,
}

/// One execution of a program.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) program: Arc<Program>,
    pub(super) endpoints: Arc<[Endpoints]>,
    pub(super) rings: Arc<[u64]>,
    pub(super) schedule: Schedule,
    pub(super) verify: bool,
    /// Where the operations note when they ran, if that was asked for.
    pub(super) times: Option<Times>,
    pub(super) failed_waits: Arc<FailedWaits>,
    /// What its stream was behind when it was enqueued.
    pub(super) behind: Behind,
}

impl Work for HostWork {
    fn roots(&self) -> impl Iterator<Item = u32> {
        let (own, run) = match self {
            HostWork::Join => (0..0, None),
            HostWork::Function(_) | HostWork::Moment(_) | HostWork::Wait(_) | HostWork::Raise(_) => (0..1, None),
            HostWork::Run(run) => (0..0, Some(run.schedule.roots())),
        };
        own.chain(run.into_iter().flatten())
    }

    fn run(&self, step: u32) -> Result<(), BackendError> {
        match self {
            HostWork::Join => {}
            HostWork::Function(function) => {
                // Taken out first: the function may take long, and the lock is not meant to be held meanwhile.
                let function = lock(function).take();
                if let Some(function) = function {
                    function();
                }
            }
            HostWork::Run(run) => match &run.times {
                None => run.copy(step),
                Some(times) => times.note(step, || run.copy(step)),
            },
            HostWork::Moment(moment) => moment.note(),
            HostWork::Wait(wait) => wait.conclude()?,
            // SAFETY: the engine has checked alignment and range, and whoever frees or unmaps the memory waits for this first.
            HostWork::Raise(signals) => signals.iter().for_each(|raised| unsafe { signal::store(raised.counter, raised.value) }),
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
            HostWork::Run(run) if run.verify => run.verify(),
            _ => Ok(()),
        }
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
            HostWork::Function(_) => "a host function".into(),
            HostWork::Run(_) => format!("operation {step} of a program"),
            HostWork::Moment(_) => "taking the time".into(),
            HostWork::Wait(_) => "a wait for signals".into(),
            HostWork::Raise(_) => "raising signals".into(),
        }
    }
}

impl Run {
    /// Does the copies of one operation.
    fn copy(&self, step: u32) {
        let op = &self.program.ops[step as usize];
        match op.mechanism {
            Mechanism::Copy | Mechanism::Thread => {
                for copy in &op.copies {
                    let from = with_exposed_provenance::<u8>(self.address(copy.from) as usize);
                    let to = with_exposed_provenance_mut::<u8>(self.address(copy.to) as usize);
                    // SAFETY: the program is valid, so both ranges lie inside the transfer or the slot; the caller of `execute`
                    // vouches for the buffers until completion, and the engine for the slots. A valid program orders this copy
                    // with every other that touches the same bytes.
                    unsafe { to.copy_from_nonoverlapping(from, copy.bytes as usize) }
                }
            }
            Mechanism::Batch | Mechanism::Kernel => {
                // Some at a time: their list needs no allocation, which could fail here.
                for copies in op.copies.chunks(32) {
                    let segments: SmallVec<[Segment; 32]> = copies
                        .iter()
                        .map(|copy| Segment { dst: self.address(copy.to), src: self.address(copy.from), bytes: copy.bytes })
                        .collect();
                    // SAFETY: as above; the copies of one operation are unordered, so a valid program has no overlap among them.
                    unsafe { copy_segments(&segments, Grid::SEQUENTIAL) }
                }
            }
        }
    }

    fn address(&self, place: Place) -> u64 {
        address(&self.program, &self.endpoints, &self.rings, place)
    }

    /// Compares every destination with its source.
    fn verify(&self) -> Result<(), BackendError> {
        for (transfer, (&bytes, endpoints)) in (0u32..).zip(self.program.transfers.iter().zip(&*self.endpoints)) {
            if bytes == 0 {
                continue;
            }
            let bytes = bytes as usize;
            // SAFETY: the caller of `execute` vouches for both ranges until completion, which has not been announced yet.
            let dst = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(endpoints.dst as usize), bytes) };
            // SAFETY: as above.
            let src = unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(endpoints.src as usize), bytes) };
            if let Some(offset) = first_difference(dst, src) {
                return Err(BackendError::DataCorruption { transfer, offset });
            }
        }
        Ok(())
    }
}

/// Compares block by block, which `memcmp` does at memory speed, and looks for the byte only where a block differs.
fn first_difference(a: &[u8], b: &[u8]) -> Option<u64> {
    const BLOCK: usize = 4096;
    let (index, (a, b)) = a.chunks(BLOCK).zip(b.chunks(BLOCK)).enumerate().find(|(_, (a, b))| a != b)?;
    let offset = a.iter().zip(b).position(|(a, b)| a != b)?;
    Some((index * BLOCK + offset) as u64)
}

impl fmt::Debug for HostWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostWork::Join => f.write_str("Join"),
            HostWork::Function(_) => f.write_str("Function"),
            HostWork::Run(run) => run.fmt(f),
            HostWork::Moment(moment) => moment.fmt(f),
            HostWork::Wait(wait) => wait.fmt(f),
            HostWork::Raise(signals) => f.debug_tuple("Raise").field(signals).finish(),
        }
    }
}

impl Wait {
    /// Whether no counter is still to be raised: each is reached, or may never be.
    fn may_end(&self) -> bool {
        self.signals.iter().all(|wanted| self.memory.is_reached(wanted).unwrap_or(true) || self.memory.failed_wait(wanted).is_some())
    }

    /// Called when the wait may end.
    fn conclude(&self) -> Result<(), BackendError> {
        for wanted in &self.signals {
            if !self.memory.is_reached(wanted)?
                && let Some(wait) = self.memory.failed_wait(wanted)
                && let Some(allocation) = self.memory.locate(wanted.counter)
            {
                self.failed_waits.note(allocation.id, wait);
            }
        }
        if self.takes {
            // SAFETY: as for `HostWork::Raise`.
            self.signals.iter().for_each(|flag| unsafe { signal::store(flag.counter, 0) });
        }
        Ok(())
    }
}
