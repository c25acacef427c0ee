//! Divides a program among several ranks: assigns operations to ranks, and adds the flags by which the ranks synchronize.
//!
//! The rank that owns the *source* of a transfer writes the data to the destination or to a staging slot. If data are forwarded from a
//! destination, the rank that owns this destination writes them onwards. The rank that owns the *destination* reads the data from the
//! staging slot. A rank performs a copy between memory of other ranks only if no other rank can: a copy between host memory and a GPU is
//! assigned to the rank of that GPU, because the GPU's PCIe link moves the data.
//!
//! Each flag belongs to a pair of ranks. In each step, one rank sets the flag (0 to 1), and the other rank waits until it is 1 and resets
//! it to 0. The values are the same in every step, so a captured graph can be launched repeatedly. There are three kinds of flags:
//!
//! | flag | set | waited for and reset |
//! | --- | --- | --- |
//! | ready | when a rank has reached the step in its stream | by a lane (internal stream) of another rank, before it accesses memory of the first rank, or before the first access to a slot that the first rank uses |
//! | hand-over | after an operation | before a dependent operation of another rank |
//! | done | after a lane's last operation that accesses memory of another rank | by that rank, before later work of its stream |
//!
//! [`check_parts`] proves for any such division that no order of ranks ends in a deadlock, that no flag is set again before it was reset,
//! and that successive steps do not overwrite each other's data.

use super::{Copy, LaneId, Mechanism, OpId, Place, Program, Shape};
use crate::topology::DeviceId;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Flag of a divided program, as an index into [`Parts::flags`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlagId(pub u32);

/// Ranks that own the source and the destination memory of a transfer.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct EndRanks {
    /// Rank that owns the source. It reads the source, or permits other ranks to read it.
    pub src: u32,
    /// Rank that owns the destination.
    pub dst: u32,
}

/// Flag by which one rank signals another rank.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Flag {
    /// Rank that sets the flag to 1.
    pub raiser: u32,
    /// Rank that waits until the flag is 1 and resets it to 0.
    pub taker: u32,
}

/// Operation that one rank executes in each communication step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PartStep {
    /// Operation of the program that the rank executes, entirely or in part.
    pub op: OpId,
    /// Lane (internal stream) on which the operation runs, as an index into [`Part::lanes`].
    pub lane: u32,
    /// Flags that the rank waits for and resets before the operation.
    pub takes: SmallVec<[FlagId; 2]>,
    /// Flags of partitions that the rank waits for, but does not reset, before the operation.
    pub awaits: SmallVec<[FlagId; 1]>,
    /// Operations of the same rank on other lanes (internal streams) that must finish first, as indices into [`Part::steps`]. Each index is
    /// smaller than that of this operation.
    pub after: SmallVec<[u32; 2]>,
    /// Mechanism by which the copies are performed.
    pub mechanism: Mechanism,
    /// Copies that this rank performs.
    pub copies: SmallVec<[Copy; 1]>,
    /// Flags that the rank sets after the operation.
    pub raises: SmallVec<[FlagId; 2]>,
}

/// Part of a program that one rank executes in each communication step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Part {
    /// Flags that the rank sets in the caller's stream at the start of the communication step.
    pub begins: Vec<FlagId>,
    /// Flags that the rank waits for and resets in the caller's stream after it has set the flags in `begins`. Kernels of the caller that
    /// run after these waits may write to memory of other ranks.
    pub arms: Vec<FlagId>,
    /// Device of each lane (internal stream) of the rank. Its copy engine performs the copies.
    pub lanes: Vec<DeviceId>,
    /// Operations, in an order that respects every dependency, including dependencies through other ranks.
    pub steps: Vec<PartStep>,
    /// Flags that the rank sets in the caller's stream after all operations, if the caller's kernels have written to memory of other ranks.
    pub written: Vec<FlagId>,
    /// Flags that the rank waits for and resets in the caller's stream at the end of the communication step.
    pub ends: Vec<FlagId>,
}

/// Program divided among ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Parts {
    /// Part of the program that each rank executes, indexed by rank.
    pub parts: Vec<Part>,
    /// Flags by which the operations of different ranks synchronise.
    pub flags: Vec<Flag>,
}

/// Batch of transfers whose memory belongs to several ranks.
#[derive(Copy, Clone, Debug)]
pub struct RankedBatch<'a> {
    /// Number of ranks that execute the program together.
    pub ranks: u32,
    /// Description of each transfer.
    pub shapes: &'a [Shape],
    /// Ranks that own the source and the destination of each transfer.
    pub ends: &'a [EndRanks],
    /// Rank that uses each GPU, indexed by the GPU's number.
    pub owners: &'a [u32],
}

impl RankedBatch<'_> {
    /// Returns the device whose memory contains `place` and the rank that owns this memory; `None` for staging slots.
    fn owner(&self, place: Place) -> Option<(DeviceId, u32)> {
        let of = |transfer: u32| (&self.shapes[transfer as usize], self.ends[transfer as usize]);
        match place {
            Place::Source { transfer, .. } => Some(of(transfer)).map(|(shape, ends)| (shape.src_device, ends.src)),
            Place::Destination { transfer, .. } => Some(of(transfer)).map(|(shape, ends)| (shape.dst_device, ends.dst)),
            Place::Slot { .. } => None,
        }
    }

    /// Returns the rank that performs a copy on an internal stream of `device`.
    fn worker(&self, copy: &Copy, device: DeviceId) -> u32 {
        let worker = || self.owners.get(device.0 as usize).copied();
        match (self.owner(copy.from), self.owner(copy.to)) {
            (Some((from, rank)), _) if !from.is_host() => rank,
            (Some(_), Some((to, rank))) if !to.is_host() => rank,
            (Some((_, rank)), None) => worker().unwrap_or(rank),
            (Some((_, rank)), _) => rank,
            (None, Some((to, rank))) => {
                if to.is_host() {
                    worker().unwrap_or(rank)
                } else {
                    rank
                }
            }
            (None, None) => worker().unwrap_or(0),
        }
    }

    /// Returns the ranks that own the source and the destination memory of a copy. Staging slots have no owner.
    fn touched(&self, copy: &Copy) -> impl Iterator<Item = u32> {
        [copy.from, copy.to].into_iter().filter_map(|place| self.owner(place)).map(|(_, rank)| rank)
    }

    /// Returns the device whose copy engine rank `rank` uses for a copy on an internal stream of `device`. A GPU of this rank is preferred.
    fn engine(&self, rank: u32, copy: &Copy, device: DeviceId) -> DeviceId {
        let own = |place| self.owner(place).filter(|(device, of)| *of == rank && !device.is_host()).map(|(device, _)| device);
        own(copy.from).or_else(|| own(copy.to)).unwrap_or(device)
    }
}

/// Returns the staging slots that a copy reads or writes, each as a ring and a slot number.
fn slots(copy: &Copy) -> impl Iterator<Item = (u32, u32)> {
    [copy.from, copy.to].into_iter().filter_map(|place| match place {
        Place::Slot { ring, slot } => Some((ring.0, slot)),
        _ => None,
    })
}

/// State of one internal stream of a rank while a program is divided.
#[derive(Default)]
struct LaneState {
    /// Other ranks that are known to have reached the communication step when the next operation of this internal stream starts.
    ready: BTreeSet<u32>,
    /// Last operation of each internal stream of another rank that is known to finish before the next operation of this internal stream.
    /// The key is the number of the rank and the number of its internal stream.
    seen: BTreeMap<(u32, u32), u32>,
    /// Index of this internal stream's last operation that accesses memory of another rank, for each such rank.
    touches: BTreeMap<u32, u32>,
}

/// Divides a valid program among the ranks of its batch and returns the part of each rank.
pub fn divide(program: &Program, batch: &RankedBatch<'_>) -> Parts {
    let mut parts = Parts { parts: vec![Part::default(); batch.ranks as usize], flags: Vec::new() };
    let mut users: BTreeMap<(u32, u32), BTreeSet<u32>> = BTreeMap::new();
    for op in &program.ops {
        let device = program.lanes[op.lane.0 as usize].device;
        for copy in &op.copies {
            for slot in slots(copy) {
                users.entry(slot).or_default().insert(batch.worker(copy, device));
            }
        }
    }
    // Index of each rank's internal stream, by the rank and the program's internal stream.
    let mut lanes: BTreeMap<(u32, LaneId), u32> = BTreeMap::new();
    let mut states: BTreeMap<(u32, u32), LaneState> = BTreeMap::new();
    // Per-rank operations ([`PartStep`]) into which each operation of the program is divided. Each entry holds the rank and the index in
    // [`Part::steps`].
    let mut pieces: Vec<SmallVec<[(u32, u32); 1]>> = Vec::with_capacity(program.ops.len());
    // Index of the last operation of each internal stream that uses each staging slot. The operations on a slot are ordered by an internal
    // stream.
    let mut last_at_slot: BTreeMap<(LaneId, (u32, u32)), u32> = BTreeMap::new();
    for (index, op) in program.ops.iter().enumerate() {
        let device = program.lanes[op.lane.0 as usize].device;
        let mut by_rank: BTreeMap<u32, SmallVec<[Copy; 1]>> = BTreeMap::new();
        for copy in &op.copies {
            by_rank.entry(batch.worker(copy, device)).or_default().push(*copy);
        }
        let at_slots = op.copies.iter().flat_map(slots).filter_map(|slot| last_at_slot.insert((op.lane, slot), index as u32));
        let earlier: SmallVec<[u32; 4]> = op.after.iter().map(|after| after.0).chain(at_slots.filter(|op| *op != index as u32)).collect();
        let mut made: SmallVec<[(u32, u32); 1]> = SmallVec::new();
        for (rank, copies) in by_rank {
            let engine = batch.engine(rank, &copies[0], device);
            let lane = *lanes.entry((rank, op.lane)).or_insert_with(|| {
                parts.parts[rank as usize].lanes.push(engine);
                parts.parts[rank as usize].lanes.len() as u32 - 1
            });
            let state = states.entry((rank, lane)).or_default();
            let number = parts.parts[rank as usize].steps.len() as u32;
            let mut step = PartStep {
                op: OpId(index as u32),
                lane,
                takes: SmallVec::new(),
                awaits: SmallVec::new(),
                after: SmallVec::new(),
                mechanism: op.mechanism,
                copies,
                raises: SmallVec::new(),
            };
            // Ranks whose memory the operation accesses must have reached the communication step. The first access to a staging slot also
            // waits for all ranks that use the slot, because they have then finished with the data of the previous communication step.
            // Later accesses to the slot come after the first one.
            let touched: BTreeSet<u32> = step.copies.iter().flat_map(|copy| batch.touched(copy)).filter(|other| *other != rank).collect();
            let of_slots: BTreeSet<u32> = step.copies.iter().flat_map(slots).filter_map(|slot| users.remove(&slot)).flatten().collect();
            for other in touched.iter().copied().chain(of_slots) {
                if other != rank && state.ready.insert(other) {
                    let flag = parts.flag(other, rank);
                    parts.parts[other as usize].begins.push(flag);
                    step.takes.push(flag);
                }
            }
            for other in touched {
                state.touches.insert(other, number);
            }
            for &(other, earlier) in earlier.iter().flat_map(|op| &pieces[*op as usize]) {
                let other_lane = parts.parts[other as usize].steps[earlier as usize].lane;
                if other == rank {
                    if other_lane != lane && !step.after.contains(&earlier) {
                        step.after.push(earlier);
                    }
                } else if state.seen.get(&(other, other_lane)).is_none_or(|seen| *seen < earlier) {
                    state.seen.insert((other, other_lane), earlier);
                    let flag = parts.flag(other, rank);
                    parts.parts[other as usize].steps[earlier as usize].raises.push(flag);
                    step.takes.push(flag);
                }
            }
            parts.parts[rank as usize].steps.push(step);
            made.push((rank, number));
        }
        pieces.push(made);
    }
    for ((rank, _), state) in states {
        for (other, step) in state.touches {
            let flag = parts.flag(rank, other);
            parts.parts[rank as usize].steps[step as usize].raises.push(flag);
            parts.parts[other as usize].ends.push(flag);
        }
    }
    parts
}

impl Part {
    /// Returns all copies that the rank performs, without copies of 0 bytes.
    pub fn copies(&self) -> impl Iterator<Item = &Copy> {
        self.steps.iter().flat_map(|step| &step.copies).filter(|copy| copy.bytes > 0)
    }
}

impl Parts {
    pub(super) fn flag(&mut self, raiser: u32, taker: u32) -> FlagId {
        self.flags.push(Flag { raiser, taker });
        FlagId(self.flags.len() as u32 - 1)
    }
}

/// Defect of a program's division among ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PartViolation {
    #[error("the plan has operation lists for {parts} ranks instead of {ranks}")]
    PartCount { parts: usize, ranks: u32 },
    #[error(
        "rank {rank}, list entry {step}: its lane (internal stream) or operation does not exist, or an entry that it follows is \
         not an earlier one"
    )]
    BadStep { rank: u32, step: u32 },
    #[error("rank {rank}, list entry {step}: operation {op} must be executed by rank {worker}")]
    WrongRank { rank: u32, step: u32, op: u32, worker: u32 },
    #[error("operation {op}: each of its copies must be made once, by exactly one rank")]
    Copies { op: u32 },
    #[error("flag {flag} must be set once by rank {raiser} and waited for once by rank {taker}")]
    FlagUse { flag: u32, raiser: u32, taker: u32 },
    #[error("the waits of rank {rank} form a cycle")]
    Deadlock { rank: u32 },
    #[error("flag {flag} may be set again before rank {taker} has waited for it")]
    RaisedTwice { flag: u32, taker: u32 },
    #[error("operation {op} may run before operation {after}, on which it depends")]
    Unordered { op: u32, after: u32 },
    #[error(
        "operation {op} may use slot {slot} of staging ring {ring} before operation {earlier} of the previous execution has finished with \
         the slot"
    )]
    SlotOfLastStep { op: u32, earlier: u32, ring: u32, slot: u32 },
    #[error(
        "operation {op} of rank {rank} may access memory of rank {owner} before rank {owner} has reached this execution, or after \
         it has left this execution"
    )]
    OutsideStep { op: u32, rank: u32, owner: u32 },
}

/// Event in the history of two successive communication steps. An event is the start or the end of a communication step on one rank, or an
/// operation of one rank.
#[derive(Copy, Clone)]
struct HistoryEvent {
    /// Index of the chain to which the event belongs. A chain is the sequence of the events of one internal stream, or of the starts and
    /// ends of the communication steps on one rank.
    chain: usize,
    /// Position of the event in its chain, from 1.
    position: u32,
}

/// History of two successive communication steps on all ranks, with the happens-before relation of their events.
struct History<'a> {
    parts: &'a Parts,
    chains: usize,
    /// Index of the first event chain of each rank. A rank has one chain for the starts and ends of its communication steps, followed by
    /// one chain for each of its internal streams.
    first_chain: Vec<usize>,
    events: Vec<HistoryEvent>,
    /// Events that directly precede each event.
    before: Vec<Vec<usize>>,
    /// Vector clocks: `clocks[event * chains + chain]` is the number of events of the chain that are sure to have happened when the event
    /// begins, including the event itself.
    clocks: Vec<u32>,
    /// Index of the event that starts communication step 0 on each rank. The events of the rank's operations follow, then the end of this
    /// communication step, and then the same events for communication step 1.
    first_event: Vec<usize>,
}

impl<'a> History<'a> {
    fn new(parts: &'a Parts) -> Result<Self, PartViolation> {
        let (mut chains, mut events) = (0, 0);
        let (mut first_chain, mut first_event) = (Vec::new(), Vec::new());
        for part in &parts.parts {
            first_chain.push(chains);
            first_event.push(events);
            chains += 1 + part.lanes.len();
            events += 2 * (part.steps.len() + 2);
        }
        let mut history = History {
            parts,
            chains,
            first_chain,
            events: Vec::with_capacity(events),
            before: vec![Vec::new(); events],
            clocks: Vec::new(),
            first_event,
        };
        history.lay_out();
        history.join_flags()?;
        history.run()?;
        Ok(history)
    }

    fn begin(&self, rank: usize, step: usize) -> usize {
        self.first_event[rank] + step * (self.parts.parts[rank].steps.len() + 2)
    }
    fn operation(&self, rank: usize, step: usize, number: u32) -> usize {
        self.begin(rank, step) + 1 + number as usize
    }
    fn end(&self, rank: usize, step: usize) -> usize {
        self.begin(rank, step) + 1 + self.parts.parts[rank].steps.len()
    }

    /// Adds the events of each rank in the order in which the rank executes them.
    fn lay_out(&mut self) {
        let mut length = vec![0; self.chains];
        let mut last: Vec<Option<usize>> = vec![None; self.chains];
        for (rank, part) in self.parts.parts.iter().enumerate() {
            let own = self.first_chain[rank];
            for step in 0..2 {
                let (begin, end) = (self.begin(rank, step), self.end(rank, step));
                let mut add = |events: &mut Vec<HistoryEvent>, before: &mut Vec<Vec<usize>>, chain: usize, event: usize| {
                    length[chain] += 1;
                    events.push(HistoryEvent { chain, position: length[chain] });
                    before[event].extend(last[chain].replace(event));
                };
                add(&mut self.events, &mut self.before, own, begin);
                for (number, done) in part.steps.iter().enumerate() {
                    let event = begin + 1 + number;
                    add(&mut self.events, &mut self.before, own + 1 + done.lane as usize, event);
                    self.before[event].push(begin);
                    self.before[event].extend(done.after.iter().map(|after| begin + 1 + *after as usize));
                    self.before[end].push(event);
                }
                add(&mut self.events, &mut self.before, own, end);
            }
        }
    }

    /// Adds the order that follows from each flag: the event that waits for the flag comes after the event that sets it.
    fn join_flags(&mut self) -> Result<(), PartViolation> {
        for (flag, (raisers, takers)) in flag_uses(self.parts).into_iter().enumerate() {
            let Flag { raiser, taker } = self.parts.flags[flag];
            let (&[(by, from)], &[(of, to)]) = (&raisers[..], &takers[..]) else {
                return Err(PartViolation::FlagUse { flag: flag as u32, raiser, taker });
            };
            if (by, of) != (raiser, taker) {
                return Err(PartViolation::FlagUse { flag: flag as u32, raiser, taker });
            }
            for step in 0..2 {
                let raise = from.map_or(self.begin(by as usize, step), |number| self.operation(by as usize, step, number));
                let take = to.map_or(self.end(of as usize, step), |number| self.operation(of as usize, step, number));
                self.before[take].push(raise);
            }
        }
        Ok(())
    }

    /// Visits all events in a possible order and computes their clocks. Fails if the ranks wait for each other in a cycle.
    fn run(&mut self) -> Result<(), PartViolation> {
        let count = self.events.len();
        let mut pending: Vec<usize> = self.before.iter().map(Vec::len).collect();
        let mut then: Vec<Vec<usize>> = vec![Vec::new(); count];
        for (event, before) in self.before.iter().enumerate() {
            before.iter().for_each(|earlier| then[*earlier].push(event));
        }
        self.clocks = vec![0; count * self.chains];
        let mut free: Vec<usize> = (0..count).filter(|event| pending[*event] == 0).collect();
        let mut done = 0;
        while let Some(event) = free.pop() {
            done += 1;
            for &earlier in &self.before[event] {
                for chain in 0..self.chains {
                    let seen = self.clocks[earlier * self.chains + chain];
                    let now = &mut self.clocks[event * self.chains + chain];
                    *now = (*now).max(seen);
                }
            }
            let HistoryEvent { chain, position } = self.events[event];
            self.clocks[event * self.chains + chain] = position;
            for &next in &then[event] {
                pending[next] -= 1;
                if pending[next] == 0 {
                    free.push(next);
                }
            }
        }
        if done == count {
            return Ok(());
        }
        let stuck = pending.iter().position(|pending| *pending > 0).unwrap_or(0);
        let rank = self.first_event.iter().rposition(|first| *first <= stuck).unwrap_or(0);
        Err(PartViolation::Deadlock { rank: rank as u32 })
    }

    /// True if event `earlier` has ended before event `later` begins in every possible order.
    fn precedes(&self, earlier: usize, later: usize) -> bool {
        let HistoryEvent { chain, position } = self.events[earlier];
        earlier != later && self.clocks[later * self.chains + chain] >= position
    }
}

/// List of the places where a flag is set, or of those where it is waited for. Each entry holds a rank and the index of one of its
/// operations. The index is `None` for the start or the end of the communication step.
type Uses = Vec<(u32, Option<u32>)>;

/// Returns, for each flag, the places where it is set and the places where it is waited for.
fn flag_uses(parts: &Parts) -> Vec<(Uses, Uses)> {
    let mut uses = vec![(Uses::new(), Uses::new()); parts.flags.len()];
    for (rank, part) in (0..).zip(&parts.parts) {
        let steps = || (0..).zip(&part.steps);
        let raised = steps().flat_map(|(number, step)| step.raises.iter().map(move |flag| (*flag, Some(number))));
        for (flag, place) in part.begins.iter().map(|flag| (*flag, None)).chain(raised) {
            if let Some(uses) = uses.get_mut(flag.0 as usize) {
                uses.0.push((rank, place));
            }
        }
        let taken = steps().flat_map(|(number, step)| step.takes.iter().map(move |flag| (*flag, Some(number))));
        for (flag, place) in part.ends.iter().map(|flag| (*flag, None)).chain(taken) {
            if let Some(uses) = uses.get_mut(flag.0 as usize) {
                uses.1.push((rank, place));
            }
        }
    }
    uses
}

/// Checks that the parts of all ranks together execute a valid program correctly, in every communication step, whatever the speeds of the
/// ranks. Returns the first defect as an error.
pub fn check_parts(program: &Program, batch: &RankedBatch<'_>, parts: &Parts) -> Result<(), PartViolation> {
    if parts.parts.len() != batch.ranks as usize {
        return Err(PartViolation::PartCount { parts: parts.parts.len(), ranks: batch.ranks });
    }
    // Per-rank operations ([`PartStep`]) into which each operation of the program is divided. Each entry holds the rank and the index in
    // [`Part::steps`].
    let mut pieces: Vec<Vec<(usize, u32)>> = vec![Vec::new(); program.ops.len()];
    for (rank, part) in parts.parts.iter().enumerate() {
        // Each part must keep the order of the program. The operation that comes first among all ranks can then always run, even if one
        // hardware queue serves all internal streams.
        let mut previous = OpId(0);
        for (number, step) in (0..).zip(&part.steps) {
            let bad = step.lane as usize >= part.lanes.len() || step.after.iter().any(|after| *after >= number) || step.op < previous;
            previous = step.op;
            let Some(op) = program.ops.get(step.op.0 as usize).filter(|_| !bad) else {
                return Err(PartViolation::BadStep { rank: rank as u32, step: number });
            };
            let device = program.lanes[op.lane.0 as usize].device;
            if let Some(worker) = step.copies.iter().map(|copy| batch.worker(copy, device)).find(|worker| *worker != rank as u32) {
                return Err(PartViolation::WrongRank { rank: rank as u32, step: number, op: step.op.0, worker });
            }
            pieces[step.op.0 as usize].push((rank, number));
        }
    }
    for (index, op) in program.ops.iter().enumerate() {
        let mut left: Vec<&Copy> = op.copies.iter().collect();
        for &(rank, number) in &pieces[index] {
            let step = &parts.parts[rank].steps[number as usize];
            for copy in &step.copies {
                let place = left.iter().position(|other| *other == copy).filter(|_| step.mechanism == op.mechanism);
                left.swap_remove(place.ok_or(PartViolation::Copies { op: index as u32 })?);
            }
        }
        if !left.is_empty() {
            return Err(PartViolation::Copies { op: index as u32 });
        }
    }
    let history = History::new(parts)?;
    check_order(program, batch, parts, &pieces, &history)?;
    for (flag, (raisers, takers)) in flag_uses(parts).into_iter().enumerate() {
        let ((by, from), (of, to)) = (raisers[0], takers[0]);
        let take = to.map_or(history.end(of as usize, 0), |number| history.operation(of as usize, 0, number));
        let again = from.map_or(history.begin(by as usize, 1), |number| history.operation(by as usize, 1, number));
        if !history.precedes(take, again) {
            return Err(PartViolation::RaisedTwice { flag: flag as u32, taker: of });
        }
    }
    Ok(())
}

/// Checks that the parts keep the program's order, that successive communication steps do not use a staging slot at the same time, and that
/// memory of a rank is accessed only between the start and the end of the rank's communication step.
fn check_order(
    program: &Program,
    batch: &RankedBatch<'_>,
    parts: &Parts,
    pieces: &[Vec<(usize, u32)>],
    history: &History<'_>,
) -> Result<(), PartViolation> {
    let events = |op: u32, step: usize| pieces[op as usize].iter().map(move |(rank, number)| history.operation(*rank, step, *number));
    let all_precede = |earlier: (u32, usize), later: (u32, usize)| {
        events(later.0, later.1).all(|later| events(earlier.0, earlier.1).all(|earlier| history.precedes(earlier, later)))
    };
    let mut users: BTreeMap<(u32, u32), Vec<(u32, bool)>> = BTreeMap::new();
    for (index, op) in (0..).zip(&program.ops) {
        if let Some(OpId(after)) = op.after.iter().copied().find(|after| !all_precede((after.0, 0), (index, 0))) {
            return Err(PartViolation::Unordered { op: index, after });
        }
        for copy in &op.copies {
            for (place, writes) in [(copy.from, false), (copy.to, true)] {
                if let Place::Slot { ring, slot } = place {
                    users.entry((ring.0, slot)).or_default().push((index, writes));
                }
            }
        }
    }
    for ((ring, slot), users) in users {
        for (place, &(op, writes)) in users.iter().enumerate() {
            for &(earlier, _) in users[..place].iter().filter(|(_, wrote)| writes || *wrote) {
                if earlier != op && !all_precede((earlier, 0), (op, 0)) {
                    return Err(PartViolation::Unordered { op, after: earlier });
                }
            }
            for &(earlier, _) in users.iter().filter(|(_, wrote)| writes || *wrote) {
                if !all_precede((earlier, 0), (op, 1)) {
                    return Err(PartViolation::SlotOfLastStep { op, earlier, ring, slot });
                }
            }
        }
    }
    for (rank, part) in parts.parts.iter().enumerate() {
        for (number, step) in (0..).zip(&part.steps) {
            for owner in step.copies.iter().flat_map(|copy| batch.touched(copy)) {
                let event = history.operation(rank, 0, number);
                let (begin, end) = (history.begin(owner as usize, 0), history.end(owner as usize, 0));
                if !history.precedes(begin, event) || !history.precedes(event, end) {
                    return Err(PartViolation::OutsideStep { op: step.op.0, rank: rank as u32, owner });
                }
            }
        }
    }
    Ok(())
}
