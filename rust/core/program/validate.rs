//! Validates programs: proves that a program moves its batch correctly, independently of the planner that created it.
//!
//! Three facts together exclude a wrong byte at the destination, whatever the speeds of internal streams and links:
//!
//! 1. Every dependency points backwards in [`Program::ops`]. So there is no cycle, and the list itself is a possible order.
//! 2. If two operations access the same bytes of a staging slot and at least one of them writes, they are ordered by internal streams and
//!    dependencies. So every order that the program allows gives the same result as the order of the list.
//! 3. Executed symbolically in the order of the list, the program writes every destination byte exactly once. The byte comes from the same
//!    offset of the same transfer, or of another transfer with the same source.
//!
//! Transfers of one batch never overlap (the library refuses them), so accesses to sources and destinations of different transfers need no
//! order. Data may be forwarded from a destination, if the operations that wrote them there are sure to have finished.

use super::{Copy, Mechanism, Op, OpId, Place, Program, RingId};
use crate::topology::DeviceId;
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Defect of a program that the validator reports.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Violation {
    #[error("operation {op} names lane {lane} (internal stream), but the plan has {lanes} lanes")]
    NoSuchLane { op: u32, lane: u32, lanes: usize },
    #[error(
        "operation {op} is a {mechanism:?} on lane {lane}, to which two devices may issue; only plain copies and kernels can be issued by \
         either device"
    )]
    TwoDevices { op: u32, lane: u32, mechanism: Mechanism },
    #[error("operation {op} is a {mechanism:?} on lane {lane}: operations of threads must be on lanes of host memory")]
    NoThread { op: u32, lane: u32, mechanism: Mechanism },
    #[error("operation {op} waits for operation {after}, which is not an earlier operation")]
    NotBackwards { op: u32, after: u32 },
    #[error("operation {op} is a {mechanism:?}, which cannot have {copies} copies")]
    CopyCount { op: u32, mechanism: Mechanism, copies: usize },
    #[error("operation {op} copies no bytes")]
    Empty { op: u32 },
    #[error("operation {op} copies {bytes} bytes at {place:?}, which has {size}")]
    OutOfBounds { op: u32, place: Place, bytes: u64, size: u64 },
    #[error("operation {op} writes into the source of transfer {transfer}")]
    WritesSource { op: u32, transfer: u32 },
    #[error("operation {op} reads byte {offset} of the destination of transfer {transfer}, which may not have arrived")]
    NotThere { op: u32, transfer: u32, offset: u64 },
    #[error("operations {first} and {second} use slot {slot} of staging ring {ring} in no defined order")]
    Race { first: u32, second: u32, ring: u32, slot: u32 },
    #[error("operation {op} reads bytes of slot {slot} of staging ring {ring} that no operation has written")]
    Unwritten { op: u32, ring: u32, slot: u32 },
    #[error("byte {offset} of the destination of transfer {transfer} is written twice, by operation {op} last")]
    WrittenTwice { op: u32, transfer: u32, offset: u64 },
    #[error("operation {op} writes byte {found_offset} of transfer {found} to byte {offset} of the destination of transfer {transfer}")]
    WrongByte { op: u32, transfer: u32, offset: u64, found: u32, found_offset: u64 },
    #[error("byte {offset} of the destination of transfer {transfer} is never written")]
    Missing { transfer: u32, offset: u64 },
    #[error("the plan uses {bytes} bytes of staging memory on {}, more than the limit of {bound}", device.in_words())]
    Staging { device: DeviceId, bytes: u64, bound: u64 },
}

/// Checks that a program moves its batch correctly and uses at most `staging_bytes` of staging memory on each device. Returns the first
/// defect as an error.
pub fn validate(program: &Program, staging_bytes: u64) -> Result<(), Violation> {
    staging_fits(program, staging_bytes)?;
    let mut order = Order::new(program)?;
    let mut slots = Slots::new();
    let mut written: Vec<Written> = vec![Written::new(); program.transfers.len()];
    for (op, step) in program.ops.iter().enumerate() {
        let op = op as u32;
        order.advance(op, step)?;
        well_formed(program, op, step)?;
        // Copies of one operation are unordered, so all of them are read before any of their destinations is marked as written.
        let mut contents: SmallVec<[Origin; 1]> = SmallVec::with_capacity(step.copies.len());
        for copy in &step.copies {
            contents.push(read(&mut slots, &written, &order, op, copy)?);
        }
        for (copy, content) in step.copies.iter().zip(contents) {
            write(&mut slots, &mut written, &order, op, copy, content)?;
        }
    }
    for (transfer, (ranges, &bytes)) in written.iter().zip(&program.transfers).enumerate() {
        let mut end = 0;
        for (&begin, &(stop, _)) in ranges {
            if begin > end {
                break;
            }
            end = stop;
        }
        if end < bytes {
            return Err(Violation::Missing { transfer: transfer as u32, offset: end });
        }
    }
    Ok(())
}

fn staging_fits(program: &Program, bound: u64) -> Result<(), Violation> {
    let mut used: BTreeMap<DeviceId, u128> = BTreeMap::new();
    for ring in &program.rings {
        *used.entry(ring.device).or_default() += u128::from(ring.slot_bytes) * u128::from(ring.slots);
    }
    match used.into_iter().find(|&(_, bytes)| bytes > u128::from(bound)) {
        Some((device, bytes)) => Err(Violation::Staging { device, bytes: u64::try_from(bytes).unwrap_or(u64::MAX), bound }),
        None => Ok(()),
    }
}

/// Happens-before relation of a program's operations.
struct Order<'a> {
    program: &'a Program,
    /// Number of operations of a lane (internal stream) that are sure to have finished when operation `op` starts, at index `op * lanes +
    /// lane`.
    clocks: Vec<u32>,
    /// Position of each operation on its lane (internal stream), from 1.
    position: Vec<u32>,
    last: Vec<Option<u32>>,
}

impl<'a> Order<'a> {
    fn new(program: &'a Program) -> Result<Self, Violation> {
        let lanes = program.lanes.len();
        if let Some((op, step)) = program.ops.iter().enumerate().find(|(_, step)| step.lane.0 as usize >= lanes) {
            return Err(Violation::NoSuchLane { op: op as u32, lane: step.lane.0, lanes });
        }
        Ok(Order {
            program,
            clocks: Vec::with_capacity(program.ops.len() * lanes),
            position: Vec::with_capacity(program.ops.len()),
            last: vec![None; lanes],
        })
    }

    /// Adds the next operation of the program to the happens-before relation.
    fn advance(&mut self, op: u32, step: &Op) -> Result<(), Violation> {
        let lanes = self.last.len();
        let begin = self.clocks.len();
        self.clocks.resize(begin + lanes, 0);
        let lane = step.lane.0 as usize;
        for &OpId(after) in &step.after {
            if after >= op {
                return Err(Violation::NotBackwards { op, after });
            }
        }
        for earlier in step.after.iter().map(|after| after.0).chain(self.last[lane]) {
            let (past, now) = self.clocks.split_at_mut(begin);
            let past = &past[earlier as usize * lanes..][..lanes];
            now.iter_mut().zip(past).for_each(|(now, past)| *now = (*now).max(*past));
            let of = self.program.ops[earlier as usize].lane.0 as usize;
            now[of] = now[of].max(self.position[earlier as usize]);
        }
        self.position.push(self.last[lane].map_or(1, |previous| self.position[previous as usize] + 1));
        self.last[lane] = Some(op);
        Ok(())
    }

    /// True if operation `earlier` is sure to have finished before operation `op` starts.
    fn before(&self, earlier: u32, op: u32) -> bool {
        let lanes = self.last.len();
        let of = self.program.ops[earlier as usize].lane.0 as usize;
        self.clocks[op as usize * lanes + of] >= self.position[earlier as usize]
    }
}

fn well_formed(program: &Program, op: u32, step: &Op) -> Result<(), Violation> {
    if step.copies.is_empty() || (step.mechanism == Mechanism::Copy && step.copies.len() != 1) {
        return Err(Violation::CopyCount { op, mechanism: step.mechanism, copies: step.copies.len() });
    }
    if step.mechanism == Mechanism::Batch && !program.lanes[step.lane.0 as usize].also.is_empty() {
        return Err(Violation::TwoDevices { op, lane: step.lane.0, mechanism: step.mechanism });
    }
    if step.mechanism == Mechanism::Thread && !program.lanes[step.lane.0 as usize].device.is_host() {
        return Err(Violation::NoThread { op, lane: step.lane.0, mechanism: step.mechanism });
    }
    for copy in &step.copies {
        if copy.bytes == 0 {
            return Err(Violation::Empty { op });
        }
        for place in [copy.from, copy.to] {
            let (offset, size) = match place {
                Place::Source { transfer, offset } | Place::Destination { transfer, offset } => {
                    (offset, program.transfers.get(transfer as usize).copied().unwrap_or(0))
                }
                Place::Slot { ring: RingId(ring), slot } => {
                    (0, program.rings.get(ring as usize).filter(|r| slot < r.slots).map_or(0, |r| r.slot_bytes))
                }
            };
            if offset.checked_add(copy.bytes).is_none_or(|end| end > size) {
                return Err(Violation::OutOfBounds { op, place, bytes: copy.bytes, size });
            }
        }
        if let Place::Source { transfer, .. } = copy.to {
            return Err(Violation::WritesSource { op, transfer });
        }
    }
    Ok(())
}

/// Origin of data: number of a transfer, and offset in bytes from the start of its source.
#[derive(Copy, Clone, Debug)]
struct Origin {
    transfer: u32,
    offset: u64,
}

/// Content of a staging slot at the current operation. Every access to a slot starts at its first byte, so any two accesses overlap.
struct Slot {
    origin: Origin,
    bytes: u64,
    writer: u32,
    /// Operations that have read the slot since operation `writer` wrote it.
    readers: Vec<u32>,
}

type Slots = BTreeMap<(u32, u32), Slot>;

/// Ranges of a destination that were written. The key is the start of a range. The value is the end of the range and the operation that
/// wrote it.
type Written = BTreeMap<u64, (u64, u32)>;

fn read(slots: &mut Slots, written: &[Written], order: &Order, op: u32, copy: &Copy) -> Result<Origin, Violation> {
    match copy.from {
        Place::Source { transfer, offset } => Ok(Origin { transfer, offset }),
        Place::Destination { transfer, offset } => {
            let (mut at, end) = (offset, offset + copy.bytes);
            while at < end {
                let range = written[transfer as usize].range(..=at).next_back().map(|(_, range)| *range);
                match range.filter(|(stop, writer)| *stop > at && *writer != op && order.before(*writer, op)) {
                    Some((stop, _)) => at = stop,
                    None => return Err(Violation::NotThere { op, transfer, offset: at }),
                }
            }
            Ok(Origin { transfer, offset })
        }
        Place::Slot { ring: RingId(ring), slot } => {
            let Some(state) = slots.get_mut(&(ring, slot)).filter(|state| state.bytes >= copy.bytes) else {
                return Err(Violation::Unwritten { op, ring, slot });
            };
            if !order.before(state.writer, op) {
                return Err(Violation::Race { first: state.writer, second: op, ring, slot });
            }
            state.readers.push(op);
            Ok(state.origin)
        }
    }
}

fn write(slots: &mut Slots, written: &mut [Written], order: &Order, op: u32, copy: &Copy, origin: Origin) -> Result<(), Violation> {
    match copy.to {
        Place::Source { transfer, .. } => Err(Violation::WritesSource { op, transfer }),
        Place::Slot { ring: RingId(ring), slot } => {
            if let Some(state) = slots.get(&(ring, slot)) {
                let mut earlier = state.readers.iter().copied().chain([state.writer]);
                if let Some(first) = earlier.find(|&by| !order.before(by, op)) {
                    return Err(Violation::Race { first, second: op, ring, slot });
                }
            }
            slots.insert((ring, slot), Slot { origin, bytes: copy.bytes, writer: op, readers: Vec::new() });
            Ok(())
        }
        Place::Destination { transfer, offset } => {
            let source = |of: u32| order.program.sources.get(of as usize).copied().unwrap_or(0);
            let is_same = origin.transfer == transfer || source(transfer) != 0 && source(origin.transfer) == source(transfer);
            if !is_same || origin.offset != offset {
                let Origin { transfer: found, offset: found_offset } = origin;
                return Err(Violation::WrongByte { op, transfer, offset, found, found_offset });
            }
            let (ranges, end) = (&mut written[transfer as usize], offset + copy.bytes);
            let next = ranges.range(offset..end).next().map(|(&begin, _)| begin);
            let previous = ranges.range(..offset).next_back().filter(|&(_, &(stop, _))| stop > offset).map(|_| offset);
            if let Some(offset) = previous.or(next) {
                return Err(Violation::WrittenTwice { op, transfer, offset });
            }
            ranges.insert(offset, (end, op));
            Ok(())
        }
    }
}
