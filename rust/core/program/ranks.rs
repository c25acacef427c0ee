//! A program that several processes execute together: who does what, and the flags by which they hand over to each other.
//!
//! The *source's* rank pushes: into the destination, or into a staging slot; so does a destination's that passes bytes on. The *destination's* rank
//! pulls from the slot. A rank acts for
//! others only where no one else can: a copy between host memory and a GPU is its rank's, because that GPU's PCIe link moves it.
//!
//! Ranks hand over by flags. A flag has one rank that raises it (0 to 1) and one that takes it (waits for 1, sets it back to 0), each once
//! in a step. So a captured graph can be launched again and again: no value changes from step to step. There are three kinds:
//!
//! | flag | raised | taken |
//! | --- | --- | --- |
//! | ready | when a rank has reached the step in its stream | by a lane of another rank, before it touches memory of the first one, or as the first a slot that the first one uses |
//! | hand-over | after an operation | before an operation of another rank that depends on it |
//! | done | after a lane's last operation that touches memory of another rank | by that rank, before later work of its stream |
//!
//! [`check_parts`] proves, for any such division, that no order of ranks ends in a deadlock, that no flag is raised before it was taken, and
//! that every step's bytes are apart from the last one's.

use super::{Copy, LaneId, Mechanism, OpId, Place, Program, Shape};
use crate::topology::DeviceId;
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Index into [`Parts::flags`].
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlagId(pub u32);

/// Whose memory the ends of a transfer are, as numbers of ranks.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct EndRanks {
    /// The rank that reads it, or lets others read it.
    pub src: u32,
    /// The rank that has the bytes after the step.
    pub dst: u32,
}

/// Which ranks pass a flag to each other.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Flag {
    /// Sets it to 1.
    pub raiser: u32,
    /// Waits for 1 and sets it back to 0.
    pub taker: u32,
}

/// One operation of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PartStep {
    /// The operation of the program that it is, or is a piece of.
    pub op: OpId,
    /// Index into [`Part::lanes`].
    pub lane: u32,
    /// Flags that are taken before it.
    pub takes: SmallVec<[FlagId; 2]>,
    /// Flags of partitions that it waits for, and leaves as they are.
    pub awaits: SmallVec<[FlagId; 1]>,
    /// Steps of the same rank on other lanes that must have finished: indices into [`Part::steps`], each smaller than its own.
    pub after: SmallVec<[u32; 2]>,
    /// How it moves its copies.
    pub mechanism: Mechanism,
    /// What it moves.
    pub copies: SmallVec<[Copy; 1]>,
    /// Flags that are raised after it.
    pub raises: SmallVec<[FlagId; 2]>,
}

/// What one rank does in each step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Part {
    /// Raised in the caller's stream before everything else.
    pub begins: Vec<FlagId>,
    /// Taken in the caller's stream after that, before its kernels write to memory of other ranks.
    pub arms: Vec<FlagId>,
    /// The device whose copy engine serves each lane.
    pub lanes: Vec<DeviceId>,
    /// In an order that respects every dependency, those through other ranks included.
    pub steps: Vec<PartStep>,
    /// Raised in the caller's stream after all steps have finished, where its kernels have written to memory of other ranks.
    pub written: Vec<FlagId>,
    /// Taken in the caller's stream after all of that.
    pub ends: Vec<FlagId>,
}

/// A program divided among ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Parts {
    /// One for each rank.
    pub parts: Vec<Part>,
    /// All flags.
    pub flags: Vec<Flag>,
}

/// A batch whose memory belongs to ranks.
#[derive(Copy, Clone, Debug)]
pub struct RankedBatch<'a> {
    /// How many ranks there are.
    pub ranks: u32,
    /// The transfers.
    pub shapes: &'a [Shape],
    /// Whose memory each of them moves.
    pub ends: &'a [EndRanks],
    /// The rank that works for each GPU, by the GPU's number.
    pub owners: &'a [u32],
}

impl RankedBatch<'_> {
    /// The device and the rank of the memory where a place lies; none for slots.
    fn owner(&self, place: Place) -> Option<(DeviceId, u32)> {
        let of = |transfer: u32| (&self.shapes[transfer as usize], self.ends[transfer as usize]);
        match place {
            Place::Source { transfer, .. } => Some(of(transfer)).map(|(shape, ends)| (shape.src_device, ends.src)),
            Place::Destination { transfer, .. } => Some(of(transfer)).map(|(shape, ends)| (shape.dst_device, ends.dst)),
            Place::Slot { .. } => None,
        }
    }

    /// The rank that executes a copy which stands on a lane of `device`.
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

    /// The ranks whose memory a copy touches, staging slots excepted.
    fn touched(&self, copy: &Copy) -> impl Iterator<Item = u32> {
        [copy.from, copy.to].into_iter().filter_map(|place| self.owner(place)).map(|(_, rank)| rank)
    }

    /// The device whose copy engine a rank uses for a copy that stands on a lane of `device`: one of its own.
    fn engine(&self, rank: u32, copy: &Copy, device: DeviceId) -> DeviceId {
        let own = |place| self.owner(place).filter(|(device, of)| *of == rank && !device.is_host()).map(|(device, _)| device);
        own(copy.from).or_else(|| own(copy.to)).unwrap_or(device)
    }
}

/// The slot that a copy reads or writes.
fn slots(copy: &Copy) -> impl Iterator<Item = (u32, u32)> {
    [copy.from, copy.to].into_iter().filter_map(|place| match place {
        Place::Slot { ring, slot } => Some((ring.0, slot)),
        _ => None,
    })
}

/// A lane of a rank while a program is divided.
#[derive(Default)]
struct LaneState {
    /// Ranks that are known to have reached the step.
    ready: BTreeSet<u32>,
    /// For each lane of another rank the last step that this one is known to come after.
    seen: BTreeMap<(u32, u32), u32>,
    /// For each other rank the last step that touches its memory.
    touches: BTreeMap<u32, u32>,
}

/// Divides a valid program among the ranks of its batch.
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
    // Lanes of ranks, by rank and lane of the program.
    let mut lanes: BTreeMap<(u32, LaneId), u32> = BTreeMap::new();
    let mut states: BTreeMap<(u32, u32), LaneState> = BTreeMap::new();
    // Where the pieces of each operation are: rank and step.
    let mut pieces: Vec<SmallVec<[(u32, u32); 1]>> = Vec::with_capacity(program.ops.len());
    // The last operation of each lane at each slot: lanes order what uses a slot.
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
            // Whose memory it touches must have reached the step, and with the first touch of a slot all who use that slot: they have done
            // with the last step's bytes then. Later touches come after the first.
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
    /// What it moves.
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

/// What is wrong with a division.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PartViolation {
    #[error("{parts} parts for {ranks} ranks")]
    PartCount { parts: usize, ranks: u32 },
    #[error("rank {rank}, step {step}: its lane, its operation or a step that it comes after does not exist or does not stand before it")]
    BadStep { rank: u32, step: u32 },
    #[error("rank {rank}, step {step}: operation {op} is the work of rank {worker}")]
    WrongRank { rank: u32, step: u32, op: u32, worker: u32 },
    #[error("the copies of operation {op} are not all done, or not once")]
    Copies { op: u32 },
    #[error("flag {flag} is not raised once by rank {raiser} and taken once by rank {taker}")]
    FlagUse { flag: u32, raiser: u32, taker: u32 },
    #[error("rank {rank} waits in a circle")]
    Deadlock { rank: u32 },
    #[error("flag {flag} may be raised again before rank {taker} has taken it")]
    RaisedTwice { flag: u32, taker: u32 },
    #[error("operation {op} may run before operation {after}, on which it depends")]
    Unordered { op: u32, after: u32 },
    #[error("operation {op} may use slot {slot} of ring {ring} before the last step's operation {earlier} has done with it")]
    SlotOfLastStep { op: u32, earlier: u32, ring: u32, slot: u32 },
    #[error(
        "operation {op} of rank {rank} may touch memory of rank {owner} before that rank has reached the step, or after it has left it"
    )]
    OutsideStep { op: u32, rank: u32, owner: u32 },
}

/// An event of the unrolled steps: begin and end of a rank's step, or one of its operations.
#[derive(Copy, Clone)]
struct HistoryEvent {
    chain: usize,
    /// From 1.
    position: u32,
}

/// Two steps in a row of all ranks, and what is sure to come before what.
struct History<'a> {
    parts: &'a Parts,
    chains: usize,
    /// First chain of each rank: its own, then its lanes.
    first_chain: Vec<usize>,
    events: Vec<HistoryEvent>,
    /// Events that each one comes after at once.
    before: Vec<Vec<usize>>,
    /// `clocks[event * chains + chain]`: how many events of the chain are sure to have happened when this one begins, itself included.
    clocks: Vec<u32>,
    /// Index of the begin of step 0 of each rank; its operations follow, then its end, then the same of step 1.
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

    /// The order inside of each rank.
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

    /// Who raises and who takes each flag, and the order that follows.
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

    /// Runs all events in an order that is possible.
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

    /// Whether one event has ended before another begins, in every order.
    fn precedes(&self, earlier: usize, later: usize) -> bool {
        let HistoryEvent { chain, position } = self.events[earlier];
        earlier != later && self.clocks[later * self.chains + chain] >= position
    }
}

/// Who uses a flag, and where: in a step, or outside of all.
type Uses = Vec<(u32, Option<u32>)>;

/// Who raises and who takes each flag, in a step or outside of all.
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

/// Accepts exactly the divisions of a valid program that move its batch correctly, step after step, whatever the speeds of ranks.
pub fn check_parts(program: &Program, batch: &RankedBatch<'_>, parts: &Parts) -> Result<(), PartViolation> {
    if parts.parts.len() != batch.ranks as usize {
        return Err(PartViolation::PartCount { parts: parts.parts.len(), ranks: batch.ranks });
    }
    // Where each operation's pieces are.
    let mut pieces: Vec<Vec<(usize, u32)>> = vec![Vec::new(); program.ops.len()];
    for (rank, part) in parts.parts.iter().enumerate() {
        // In the order of the program, so that whatever is issued first on all ranks together can run, also where one queue serves all lanes.
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

/// That pieces keep the program's order, that slots of two steps are apart, and that memory is touched only while its rank is in the step.
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
