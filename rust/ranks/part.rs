//! Executes the operations of a plan that one rank performs (the rank's *part* of the plan): binds them to addresses and streams, and
//! enqueues them in each step.
//!
//! A part consists of lanes: sequences of operations, each executed in order by one stream. Consecutive operations of a lane without a wait
//! in between form one program (list of copy operations), which the backend runs like any other program. The caller's stream executes the
//! first lane. An internal stream executes each further lane, and events join it to the caller's stream. The streams themselves wait for
//! and set flags, so no call in this module blocks, and a stream that is being captured records everything in its graph.
//!
//! If a part moves few bytes, a single kernel executes it instead. This requires that kernels also execute the parts that share flags with
//! it. The kernel waits for flags and sets flags. Such flags are *near*: they are in memory of the GPU that waits for them, so that polling
//! does not cross PCIe. All other flags are in host memory, because there the CPU can release streams that wait for a lost rank. To release
//! a kernel, the CPU sets a word in host memory that the kernel reads from time to time.

use super::eager::Eager;
use crate::backend::{
    Action, ActionGrid, Backend, BackendError, Endpoints, EventHandle, Execution, MOST_ACTIONS, PlanState, Report, Segment, Signal,
    StepFate, StreamHandle,
};
use crate::plan::{Copy, Lane, LaneId, Mechanism, Op, Place, Program, Shape};
use crate::program::PartitionMove;
use crate::program::ranks::{EndRanks, FlagId, Part};
use crate::sync::{AtomicU32, Ordering};
use crate::topology::DeviceId;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Functions that return the addresses, in this process, of the memory that one rank's operations of a plan access.
pub(super) trait Addresses {
    /// Returns the address in this process of a position in a source, a destination or a staging buffer.
    fn place(&self, place: Place) -> u64;
    /// Returns the address in this process of a flag.
    fn flag(&self, flag: FlagId) -> u64;
    /// Returns the number of blocks of the kernel that sets the flag, if the flag is *near*, which means that it is in memory of the GPU
    /// that waits for it. Returns `None` if the flag is not near.
    fn near_blocks(&self, flag: FlagId) -> Option<u32>;
    /// Returns the address in this process of the first inbox (receive buffer for small transfers) of rank `rank`.
    fn inbox(&self, rank: u32) -> u64;
    /// Returns the device of this process whose copy engine makes the copies for the device with this node-wide number.
    fn device(&self, device: DeviceId) -> DeviceId;
    /// Returns the device of this rank that is used if a call does not name a device.
    fn own_device(&self) -> DeviceId;
    /// True if `place` (a position in a source, a destination or a staging buffer) is in host memory.
    fn is_host(&self, place: Place) -> bool;
    /// True if the copy stays within memory of one rank on one device. See the function [`is_inside`].
    fn is_inside(&self, copy: &Copy) -> bool;
}

/// True if the source and the destination of a transfer belong to one rank and are on one device. The rank is compared because several
/// ranks may share a GPU.
pub(super) fn stays(shape: &Shape, ends: EndRanks) -> bool {
    shape.src_device == shape.dst_device && ends.src == ends.dst
}

/// True if a copy goes directly from the source to the destination of a transfer, and `stays` returns true for the index of this transfer.
pub(super) fn is_inside(copy: &Copy, stays: impl Fn(u32) -> bool) -> bool {
    matches!((copy.from, copy.to), (Place::Source { transfer, .. }, Place::Destination { transfer: to, .. }) if transfer == to && stays(to))
}

/// Consecutive operations of one lane (operations that one stream executes in order), without waits in between.
struct PartSegment {
    lane: usize,
    /// Addresses of the flags that the stream waits for and resets before the operations of this segment.
    takes: Vec<u64>,
    /// Addresses of the flags that the stream waits for, without a reset, before the operations of this segment.
    awaits: Vec<u64>,
    /// Events that the stream waits for before the operations of this segment, as indices into [`BoundPart::marks`]. Each event marks the
    /// end of a segment that another stream executes.
    after: Vec<usize>,
    program: Arc<Program>,
    endpoints: Arc<[Endpoints]>,
    state: PlanState,
    /// Flags that the stream sets after the operations of this segment.
    raises: Vec<Signal>,
    /// Index in [`BoundPart::marks`] of the event that the stream records after the operations of this segment. `None` if no other stream
    /// waits for this segment.
    end: Option<usize>,
}

/// Operations of a rank that move so few bytes that one kernel executes all of them.
pub(super) struct SmallPart {
    pub actions: Box<[Action]>,
    /// Copies that the kernel makes, in the form of a program that executes them in one stream.
    pub program: Arc<Program>,
    pub endpoints: Arc<[Endpoints]>,
    pub device: DeviceId,
    pub grid: ActionGrid,
    /// True if the kernel has only one block. More blocks would not be faster. They might also have to wait for each other, which is
    /// possible only if all of them fit on the GPU at the same time.
    pub is_narrow: bool,
}

/// Kernel that executes all operations of a rank, with addresses that are valid on the kernel's GPU.
struct BoundKernel {
    actions: Box<[Segment]>,
    device: DeviceId,
    grid: ActionGrid,
}

/// Maximum number of bytes per lane (stream) for which one kernel executes a rank's operations. Copy engines copy larger amounts. In that
/// case, stream operations wait for flags and set flags, and kernels never do. Between two H100, a kernel on a quarter of the
/// multiprocessors takes 7.4 us plus the time of the transfer at 325 GB/s, and copy engines take 19.4 us plus the time at 392 GB/s. They
/// are equally fast at 23 MB. Each further lane costs copy engines the fixed time again (63 us for three lanes of H200).
pub(super) const SMALL_BYTES: u64 = 20 << 20;

/// Limit of the factor by which [`SMALL_BYTES`] is multiplied. The factor is the number of lanes (streams); numbers above this limit were
/// not measured.
const MOST_LANES: usize = 3;

/// Ratio of the bandwidth of copies within one GPU's memory to the bandwidth of copies over NVLink.
pub(super) const INSIDE_RATE: u64 = 4;

/// Maximum number of bytes for which the kernel that executes a rank's operations has only one block.
const NARROW_BYTES: u64 = 64 << 10;

/// Work that a communication step enqueues before the kernels that produce the data of a partitioned transfer.
pub(super) struct Armed {
    /// Addresses of the flags that the stream waits for and resets before the producing kernels.
    pub takes: Vec<u64>,
    /// Copy that resets the flags of partitions. `None` if no rank and no kernel reads these flags.
    pub reset: Option<Copies>,
    /// Instructions for the kernels that produce the data. `None` if this rank has no such kernels.
    pub orders: Option<ProducerOrders>,
    /// True if the step's copies follow all work in the stream at the time when the step is executed. False if they follow only the work in
    /// the stream at the time when the step was armed, which is before its data is produced.
    pub is_after: bool,
}

/// Program that executes copies in one stream, with the source and destination addresses of the copies.
pub(super) type Copies = (Arc<Program>, Arc<[Endpoints]>);

/// Instructions for the kernels that produce the data of partitioned transfers. They tell the kernels how the current step moves the
/// partitions.
pub(super) struct ProducerOrders {
    /// Copies that write the instructions to the words in GPU memory that the kernels read.
    pub copies: Copies,
    pub how: PartitionMove,
    /// Instruction ([`PartitionMove`] as a number) that the words in GPU memory contain after all work that was enqueued outside of
    /// captures.
    pub said: Arc<AtomicU32>,
}

/// Operations of a plan that one rank executes, bound to addresses, streams and events.
pub(super) struct BoundPart {
    /// Kernel that executes all operations of this rank. `None` if streams execute them.
    kernel: Option<BoundKernel>,
    begins: Vec<Signal>,
    /// Work that is enqueued before the kernels that produce the data. `None` if the transfers do not move in partitions.
    armed: Option<Armed>,
    segments: Vec<PartSegment>,
    written: Vec<Signal>,
    ends: Vec<u64>,
    /// Internal streams, each with the event that joins it to the caller's stream. Each executes one lane (sequence of operations); the
    /// caller's stream executes the first lane. If a kernel executes all operations, there is one internal stream, which is used when the
    /// caller's stream belongs to another GPU.
    lanes: Vec<(StreamHandle, EventHandle)>,
    /// Events at the ends of segments (consecutive operations of a stream) for which other streams of this rank wait.
    marks: Vec<EventHandle>,
    /// Event that is recorded in the caller's stream at the beginning of a communication step.
    fork: EventHandle,
    /// Event that was recorded in the caller's stream at the end of the last communication step.
    end: EventHandle,
    /// Caller's stream in which the plan's last communication step was enqueued. `None` before the first one.
    stream: Option<StreamHandle>,
    /// True once the internal streams and events have been destroyed.
    is_released: bool,
    /// State that shows whether this rank has abandoned its steps of the plan, because another rank has exited or left the plan.
    fate: StepFate,
}

/// Segment (consecutive operations of a stream) under construction. Operations are still added to it.
#[derive(Default)]
struct Draft {
    lane: usize,
    takes: Vec<u64>,
    awaits: Vec<u64>,
    after: Vec<usize>,
    ops: Vec<Op>,
    bytes: Vec<u64>,
    ends: Vec<Endpoints>,
    raises: Vec<Signal>,
    end: Option<usize>,
}

impl Draft {
    /// Adds copies to the segment. `mechanism` (copy engine or kernel) makes them. Each copy becomes a transfer with its own addresses.
    fn push(&mut self, mechanism: Mechanism, copies: &[Copy], at: &impl Addresses) {
        let copies = copies.iter().map(|copy| {
            let transfer = self.bytes.len() as u32;
            self.bytes.push(copy.bytes);
            self.ends.push(Endpoints { dst: at.place(copy.to), src: at.place(copy.from) });
            Copy { from: Place::Source { transfer, offset: 0 }, to: Place::Destination { transfer, offset: 0 }, bytes: copy.bytes }
        });
        let copies = copies.collect();
        self.ops.push(Op { lane: LaneId(0), mechanism, copies, after: Default::default() });
    }
}

/// Returns the cost of a copy, in bytes that NVLink moves in the same time. For a copy within one GPU's memory this is less than the size
/// of the copy. `is_inside` is [`Addresses::is_inside`].
fn weight(copy: &Copy, is_inside: impl Fn(&Copy) -> bool) -> u64 {
    if is_inside(copy) { copy.bytes / INSIDE_RATE } else { copy.bytes }
}

/// Returns the maximum number of bytes for which one kernel executes the rank's operations `part` faster than copy engines do with one
/// stream per lane.
fn small_bytes(part: &Part, is_inside: impl Fn(&Copy) -> bool) -> u64 {
    let lanes = part.steps.iter().filter(|step| step.copies.iter().any(|copy| !is_inside(copy))).map(|step| step.lane);
    SMALL_BYTES * lanes.collect::<BTreeSet<u32>>().len().clamp(1, MOST_LANES) as u64
}

/// True if the rank's operations `part` move so little data that one kernel is at least as fast as copy engines.
pub(super) fn is_little(part: &Part, is_inside: impl Fn(&Copy) -> bool) -> bool {
    let flags = part.begins.len() + part.ends.len() + part.steps.iter().map(|step| step.takes.len() + step.raises.len()).sum::<usize>();
    let bytes: u64 = part.copies().map(|copy| weight(copy, &is_inside)).sum();
    part.copies().count() + flags <= MOST_ACTIONS && bytes <= small_bytes(part, is_inside)
}

/// True if the order of two copies matters, because one of them writes bytes that the other one reads or writes.
fn meet(one: &Copy, other: &Copy) -> bool {
    let overlap = |a: Place, b: Place| match (a, b) {
        (Place::Destination { transfer: a, offset: from }, Place::Destination { transfer: b, offset }) => {
            a == b && from < offset + other.bytes && offset < from + one.bytes
        }
        (Place::Slot { ring: a, slot: c }, Place::Slot { ring: b, slot: d }) => (a, c) == (b, d),
        _ => false,
    };
    overlap(one.to, other.from) || overlap(one.to, other.to) || overlap(one.from, other.to)
}

impl SmallPart {
    /// Returns the GPU whose kernel may execute the rank's operations `part`, as far as this is known before memory of other ranks is
    /// mapped. Returns `None` if they move too many bytes, use several GPUs or wait for no flag.
    pub fn device_of(part: &Part, at: &impl Addresses) -> Option<DeviceId> {
        let mut devices = part.lanes.iter().map(|lane| at.device(*lane));
        let device = devices.next().unwrap_or_else(|| at.own_device());
        let awaits = !part.ends.is_empty() || part.steps.iter().any(|step| !step.takes.is_empty());
        (awaits && is_little(part, |copy| at.is_inside(copy)) && !device.is_host() && devices.all(|other| other == device))
            .then_some(device)
    }

    /// Converts the rank's operations `part` to a form that a single kernel executes. Returns `None` if [`device_of`](SmallPart::device_of)
    /// returns `None`, or if a kernel would copy too slowly.
    pub fn new(part: &Part, at: &impl Addresses) -> Option<SmallPart> {
        let device = SmallPart::device_of(part, at)?;
        // If source and destination are aligned differently, the kernel copies in smaller words.
        let effort = |copy: &Copy| {
            let times = match (at.place(copy.from) ^ at.place(copy.to)) % 16 {
                0 => 1,
                8 => 2,
                4 | 12 => 4,
                _ => 16,
            };
            times * weight(copy, |copy| at.is_inside(copy))
        };
        let actions = SmallPart::actions_of(part, at);
        let effort: u64 = part.copies().map(effort).sum();
        let is_narrow = actions.contains(&Action::Order) || part.copies().any(|copy| at.is_host(copy.from) || at.is_host(copy.to));
        if actions.len() > MOST_ACTIONS || effort > if is_narrow { NARROW_BYTES } else { small_bytes(part, |copy| at.is_inside(copy)) } {
            return None;
        }
        let program = Program {
            sources: Vec::new(),
            transfers: part.copies().map(|copy| copy.bytes).collect(),
            lanes: vec![Lane::new(device)],
            rings: Vec::new(),
            ops: Vec::new(),
        };
        let endpoints = part.copies().map(|copy| Endpoints { dst: at.place(copy.to), src: at.place(copy.from) }).collect();
        Some(SmallPart { actions, program: Arc::new(program), endpoints, device, grid: ActionGrid::default(), is_narrow })
    }

    /// Replaces the copies between ranks by eager copies: into the inboxes (receive buffers) of other ranks, and out of this rank's own
    /// inboxes. Steps alternate between two sets of inboxes. `turn` is the address of the counter in GPU memory that selects the set.
    pub fn by_turns(self, part: &Part, rank: u32, eager: &Eager, at: &impl Addresses, turn: u64) -> SmallPart {
        let (mut actions, mut bytes, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        let mut copy = |of: u64, dst: u64, src: u64| {
            bytes.push(of);
            ends.push(Endpoints { dst, src });
            Action::Copy(bytes.len() as u32 - 1)
        };
        let own = |of: fn(&(u32, u32)) -> u32, turn: u64| {
            eager.flags.iter().filter(move |(pair, _)| of(pair) == rank).map(move |(pair, flags)| (*pair, flags[turn as usize]))
        };
        for turn in 0..2 {
            let (with_bytes, without): (Vec<_>, Vec<_>) = own(|pair| pair.0, turn).partition(|(pair, _)| eager.has_bytes(*pair));
            actions.extend(without.iter().map(|(_, flag)| SmallPart::raise(*flag, at)));
            for Copy { from, to, bytes } in part.copies() {
                let dst = match *to {
                    Place::Destination { transfer, offset } => {
                        let inbox = at.inbox(eager.ends[transfer as usize].dst);
                        eager.place(transfer, turn).map(|place| inbox + place + offset)
                    }
                    _ => None,
                };
                actions.push(copy(*bytes, dst.unwrap_or_else(|| at.place(*to)), at.place(*from)));
            }
            actions.extend(with_bytes.iter().map(|(_, flag)| SmallPart::raise(*flag, at)));
            actions.extend(own(|pair| pair.1, turn).map(|(_, flag)| SmallPart::take(flag, at)));
            for transfer in eager.come_in(rank) {
                let src = at.inbox(rank) + eager.place(transfer, turn).unwrap_or(0);
                actions.push(copy(eager.bytes[transfer as usize], at.place(Place::Destination { transfer, offset: 0 }), src));
            }
        }
        let program = Program { transfers: bytes, ..Program::clone(&self.program) };
        let grid = ActionGrid { turn, ..self.grid };
        SmallPart { actions: actions.into(), program: Arc::new(program), endpoints: ends.into(), grid, ..self }
    }

    fn bind(self, backend: &dyn Backend) -> Result<BoundKernel, BackendError> {
        let SmallPart { actions, program, endpoints, device, grid, .. } = self;
        let ends = backend.action_reach(device, &program, &endpoints)?.ends;
        let actions = actions.iter().map(|action| action.segment(&ends, &program.transfers)).collect();
        Ok(BoundKernel { actions, device, grid })
    }

    /// Returns the actions of the kernel that executes the rank's operations `part`, with the current flag addresses. Copies that no rank
    /// waits for come last.
    pub fn actions_of(part: &Part, at: &impl Addresses) -> Box<[Action]> {
        let take = |flag: &FlagId| SmallPart::take(*flag, at);
        let raise = |flag: &FlagId| SmallPart::raise(*flag, at);
        let mut actions: Vec<Action> = part.begins.iter().map(raise).collect();
        // `going` contains the copies since the last `Order` action. `free` contains copies that may run at any time during the kernel.
        let (mut going, mut free): (Vec<&Copy>, Vec<Action>) = Default::default();
        let mut transfer = 0;
        for step in &part.steps {
            if step.copies.iter().any(|copy| going.iter().any(|before| meet(before, copy))) {
                actions.push(Action::Order);
                going.clear();
            }
            actions.extend(step.takes.iter().map(take));
            for copy in step.copies.iter().filter(|copy| copy.bytes > 0) {
                // The copy is within this rank's own memory. Other ranks access that memory only through this rank's operations, so any
                // conflict is found here.
                if at.is_inside(copy) && part.copies().all(|other| std::ptr::eq(other, copy) || !meet(other, copy)) {
                    free.push(Action::Copy(transfer));
                } else {
                    actions.push(Action::Copy(transfer));
                    going.push(copy);
                }
                transfer += 1;
            }
            actions.extend(step.raises.iter().map(raise));
        }
        actions.extend(free);
        actions.extend(part.ends.iter().map(take));
        actions.into()
    }

    fn take(flag: FlagId, at: &impl Addresses) -> Action {
        // The number of blocks is 0 until all ranks have reported their kernels.
        Action::Take { flag: at.flag(flag), blocks: at.near_blocks(flag).unwrap_or(0) }
    }

    fn raise(flag: FlagId, at: &impl Addresses) -> Action {
        Action::Raise(at.flag(flag))
    }
}

impl BoundPart {
    /// Binds a rank's operations `part` to addresses, and creates the streams and events, which the caller destroys by
    /// [`BoundPart::release`]. If `small` is given, a kernel executes the operations. If `armed` is given, the transfers move in
    /// partitions. Only one of `small` and `armed` may be given: a kernel that waits for producing kernels may occupy the multiprocessors
    /// that the producing kernels need.
    pub fn new(
        part: &Part,
        at: &impl Addresses,
        small: Option<SmallPart>,
        armed: Option<Armed>,
        fate: &StepFate,
        backend: &dyn Backend,
    ) -> Result<BoundPart, BackendError> {
        let kernel = small.map(|small| small.bind(backend)).transpose()?;
        let raise = |flag: &FlagId| Signal { counter: at.flag(*flag), value: 1 };
        let mut drafts: Vec<Draft> = Vec::new();
        // Segment that contains each operation, and last segment of each lane.
        let mut segment_of: Vec<usize> = Vec::new();
        let mut open: Vec<Option<usize>> = vec![None; part.lanes.len()];
        let mut marks = 0;
        for step in part.steps.iter().filter(|_| kernel.is_none()) {
            let lane = step.lane as usize;
            let follows = step.takes.is_empty() && step.awaits.is_empty() && step.after.is_empty();
            let index = match open[lane].filter(|index| follows && drafts[*index].raises.is_empty()) {
                Some(index) => index,
                None => {
                    drafts.push(Draft { lane, ..Draft::default() });
                    drafts.len() - 1
                }
            };
            open[lane] = Some(index);
            for earlier in &step.after {
                let end = &mut drafts[segment_of[*earlier as usize]].end;
                let mark = *end.get_or_insert_with(|| {
                    marks += 1;
                    marks - 1
                });
                drafts[index].after.push(mark);
            }
            let draft = &mut drafts[index];
            draft.takes.extend(step.takes.iter().map(|flag| at.flag(*flag)));
            draft.awaits.extend(step.awaits.iter().map(|flag| at.flag(*flag)));
            draft.push(step.mechanism, &step.copies, at);
            draft.raises.extend(step.raises.iter().map(raise));
            segment_of.push(index);
        }
        let device = |lane: usize| at.device(part.lanes[lane]);
        let segments = drafts.into_iter().map(|draft| PartSegment {
            lane: draft.lane,
            takes: draft.takes,
            awaits: draft.awaits,
            after: draft.after,
            program: Arc::new(Program {
                sources: Vec::new(),
                transfers: draft.bytes,
                lanes: vec![Lane::new(device(draft.lane))],
                rings: Vec::new(),
                ops: draft.ops,
            }),
            endpoints: draft.ends.into(),
            state: PlanState::default(),
            raises: draft.raises,
            end: draft.end,
        });
        let segments: Vec<PartSegment> = segments.collect();
        // Devices of all lanes (sequences of operations) except the first.
        let others: Vec<DeviceId> = match &kernel {
            Some(kernel) => vec![kernel.device],
            None => (1..part.lanes.len()).map(device).collect(),
        };
        let fork = backend.create_event()?;
        let end = backend.create_event().inspect_err(|_| drop(backend.destroy_event(fork)))?;
        let mut bound = BoundPart {
            kernel,
            begins: part.begins.iter().map(raise).collect(),
            armed,
            written: part.written.iter().map(raise).collect(),
            segments,
            ends: part.ends.iter().map(|flag| at.flag(*flag)).collect(),
            lanes: Vec::new(),
            marks: Vec::new(),
            fork,
            end,
            stream: None,
            is_released: false,
            fate: fate.clone(),
        };
        let lanes = others
            .into_iter()
            .try_for_each(|device| {
                let stream = backend.create_stream(device)?;
                let joined = backend.create_event().inspect_err(|_| drop(backend.destroy_stream(stream)))?;
                bound.lanes.push((stream, joined));
                Ok(())
            })
            .and_then(|()| (0..marks).try_for_each(|_| backend.create_event().map(|event| bound.marks.push(event))));
        lanes.inspect_err(|_| bound.release(backend)).map(|()| bound)
    }

    /// Enqueues the work that precedes the producing kernels, and records the position in `stream` at which the step begins.
    pub fn arm(&mut self, stream: StreamHandle, is_captured: bool, backend: &dyn Backend) -> Result<(), BackendError> {
        self.follow(stream, is_captured, backend)?;
        let Some(Armed { takes, reset, orders, is_after }) = &self.armed else { return Ok(()) };
        let copy = |(program, endpoints): &Copies| {
            backend.submit(&Execution { report: Report::Nothing, ..Execution::new(program, endpoints, &Arc::from([]), stream) })
        };
        if let Some(reset) = reset {
            copy(reset)?;
        }
        // A captured graph may run at any time or never. All steps after the capture use the plan variant of the graph.
        if let Some(ProducerOrders { copies, how, said }) = orders
            && said.load(Ordering::Relaxed) != *how as u32
        {
            copy(copies)?;
            if !is_captured {
                said.store(*how as u32, Ordering::Relaxed);
            }
        }
        if !takes.is_empty() || !self.begins.is_empty() {
            backend.stream_take_flags(stream, &self.begins, takes, &self.fate)?;
        }
        if is_captured || (!is_after && !self.lanes.is_empty()) {
            backend.record_event(self.fork, stream)?;
        }
        self.mark(stream, is_captured, backend)
    }

    /// Enqueues this rank's operations of one step. They start after all earlier work in `stream` and after the last step. Later work in
    /// the stream starts after them. A captured step does not wait for the last step, because it runs when its graph is launched. An armed
    /// step (begun before its data is produced) starts at the position in the stream at which it was armed. Exception: if its copies are
    /// enqueued behind the producing kernels, the step starts there.
    pub fn enqueue(&mut self, stream: StreamHandle, is_captured: bool, backend: &dyn Backend) -> Result<(), BackendError> {
        if is_captured && self.armed.is_some() {
            backend.stream_wait_event(stream, self.fork)?;
        } else {
            // If the step was armed, arming it was the last recorded work.
            self.follow(stream, is_captured, backend)?;
        }
        self.enqueue_step(stream, backend)?;
        self.mark(stream, is_captured, backend)
    }

    /// Records the current end of the stream. The next step and the destruction of the plan wait until the stream reaches that point.
    fn mark(&mut self, stream: StreamHandle, is_captured: bool, backend: &dyn Backend) -> Result<(), BackendError> {
        if !is_captured {
            backend.record_event(self.end, stream)?;
            self.stream = Some(stream);
        }
        Ok(())
    }

    /// Makes `stream` wait until the last step of the plan has finished, if this is necessary: not in a capture, and not if the last step
    /// is in the same stream.
    pub fn follow(&self, stream: StreamHandle, is_captured: bool, backend: &dyn Backend) -> Result<(), BackendError> {
        if !is_captured && self.is_other(stream) {
            backend.stream_wait_event(stream, self.end)?;
        }
        Ok(())
    }

    /// True if the last communication step was, or may have been, enqueued in a stream other than `stream`.
    fn is_other(&self, stream: StreamHandle) -> bool {
        // The handles of default streams (0 to 2) denote a different stream in each thread or context.
        self.stream.is_some_and(|last| last != stream || stream.0 <= 2)
    }

    /// Blocks until all work of this rank that the plan has enqueued has finished.
    pub fn synchronize(&self, backend: &dyn Backend) -> Result<(), BackendError> {
        if self.stream.is_some() { backend.synchronize_event(self.end) } else { Ok(()) }
    }

    /// True if the step's copies follow all work in the stream at the time when the step is executed. False if they follow only the work
    /// that was in the stream when the step was armed (begun before its data is produced).
    fn is_after(&self) -> bool {
        self.armed.as_ref().is_none_or(|armed| armed.is_after)
    }

    fn enqueue_step(&self, stream: StreamHandle, backend: &dyn Backend) -> Result<(), BackendError> {
        if let Some(BoundKernel { actions, device, grid }) = &self.kernel {
            let run = |stream| backend.stream_run_actions(stream, *device, actions, *grid, &self.fate);
            if run(stream)? {
                return Ok(());
            }
            // The caller's stream belongs to another GPU than the kernel, so an internal stream executes the kernel.
            let (own, joined) = self.lanes[0];
            backend.record_event(self.fork, stream)?;
            backend.stream_wait_event(own, self.fork)?;
            if !run(own)? {
                let why = "the GPU of this rank no longer has the library's kernels; destroy the plan on all ranks, and create it again";
                return Err(BackendError::NotSupported(why.into()));
            }
            backend.record_event(joined, own)?;
            return backend.stream_wait_event(stream, joined);
        }
        // Flags that are set together with the stream's next wait, or before its next work.
        let mut raises = if self.armed.is_some() { &[] } else { &self.begins[..] };
        let raise = |lane: StreamHandle, raises: &mut &[Signal]| match std::mem::take(raises) {
            [] => Ok(()),
            some => backend.stream_take_flags(lane, some, &[], &self.fate),
        };
        let stream_of = |lane: usize| lane.checked_sub(1).map_or(stream, |other| self.lanes[other].0);
        if !self.lanes.is_empty() {
            raise(stream, &mut raises)?;
            if self.is_after() {
                backend.record_event(self.fork, stream)?;
            }
            self.lanes.iter().try_for_each(|(lane, _)| backend.stream_wait_event(*lane, self.fork))?;
        }
        let nothing = Arc::from([]);
        for segment in &self.segments {
            let lane = stream_of(segment.lane);
            segment.after.iter().try_for_each(|end| backend.stream_wait_event(lane, self.marks[*end]))?;
            if segment.takes.is_empty() {
                raise(lane, &mut raises)?;
            } else {
                backend.stream_take_flags(lane, std::mem::take(&mut raises), &segment.takes, &self.fate)?;
            }
            if !segment.awaits.is_empty() {
                backend.stream_await_flags(lane, &segment.awaits, &self.fate)?;
            }
            let execution = Execution::new(&segment.program, &segment.endpoints, &nothing, lane);
            backend.submit(&Execution { report: Report::Nothing, state: Some(&segment.state), fate: Some(&self.fate), ..execution })?;
            raises = &segment.raises;
            if !self.lanes.is_empty() {
                raise(lane, &mut raises)?;
            }
            if let Some(end) = segment.end {
                backend.record_event(self.marks[end], lane)?;
            }
        }
        for (lane, joined) in &self.lanes {
            backend.record_event(*joined, *lane)?;
            backend.stream_wait_event(stream, *joined)?;
        }
        if !self.written.is_empty() {
            raises = &self.written;
        }
        if self.ends.is_empty() { raise(stream, &mut raises) } else { backend.stream_take_flags(stream, raises, &self.ends, &self.fate) }
    }

    /// Returns the number of blocks of the kernel that executes this rank's operations. `None` if streams execute them.
    pub fn kernel_blocks(&self) -> Option<u32> {
        self.kernel.as_ref().map(|kernel| kernel.grid.blocks)
    }

    /// Destroys the internal streams and events that were created for this rank's operations. Repeated calls do nothing. Work that is
    /// already enqueued still finishes.
    pub fn release(&mut self, backend: &dyn Backend) {
        if std::mem::replace(&mut self.is_released, true) {
            return;
        }
        let events = self.marks.drain(..).chain([self.fork, self.end]);
        let (streams, joined): (Vec<_>, Vec<_>) = self.lanes.drain(..).unzip();
        let given_back = streams.into_iter().map(|stream| backend.destroy_stream(stream));
        for error in given_back.chain(events.chain(joined).map(|event| backend.destroy_event(event))).filter_map(Result::err) {
            log::debug!("could not destroy streams of a node plan: {error}");
        }
    }
}

#[cfg(test)]
#[path = "../../tests/rust/actions.rs"]
mod tests;
