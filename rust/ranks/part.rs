//! One rank's part of a plan, bound to addresses and streams.
//!
//! Operations that follow each other on a lane with nothing to wait for between them are one program, which the backend runs as any other.
//! The first lane is the caller's stream; each other one has a stream of its own, joined to the caller's by events. Flags are taken and
//! raised by the streams themselves, so nothing here waits, and a stream that is being captured gets all of it as part of its graph.
//!
//! A part in which little is moved is one kernel instead, which takes and raises flags itself, where those who raise and take them are kernels too.
//! Such flags are near: they lie in memory of the GPU that takes them, where a look costs no way over PCIe. All others lie in host memory, because
//! the CPU ends waits of streams there when a rank is lost. The waits of a kernel end by a word in host memory, at which it looks now and then.

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

/// Where things of a plan lie in this process: what a part touches, and nothing else.
pub(super) trait Addresses {
    /// Of a byte that a copy reads or writes.
    fn place(&self, place: Place) -> u64;
    /// Of a flag.
    fn flag(&self, flag: FlagId) -> u64;
    /// Of a near flag the blocks of the kernel that raises it.
    fn near_blocks(&self, flag: FlagId) -> Option<u32>;
    /// Of the first byte of a rank's inboxes.
    fn inbox(&self, rank: u32) -> u64;
    /// Of a device of the node the one here whose copy engine serves it.
    fn device(&self, device: DeviceId) -> DeviceId;
    /// The device of this rank that works where none is named.
    fn own_device(&self) -> DeviceId;
    /// Whether a byte is in host memory.
    fn is_host(&self, place: Place) -> bool;
    /// [`is_inside`].
    fn is_inside(&self, copy: &Copy) -> bool;
}

/// Whether a transfer goes from memory of a rank to memory of the same on one device. Ranks may share a GPU.
pub(super) fn stays(shape: &Shape, ends: EndRanks) -> bool {
    shape.src_device == shape.dst_device && ends.src == ends.dst
}

/// Whether a copy goes from one end of a transfer to the other, and that one [stays].
pub(super) fn is_inside(copy: &Copy, stays: impl Fn(u32) -> bool) -> bool {
    matches!((copy.from, copy.to), (Place::Source { transfer, .. }, Place::Destination { transfer: to, .. }) if transfer == to && stays(to))
}

/// Operations of a lane that nothing comes between.
struct PartSegment {
    lane: usize,
    /// Flags that are taken before.
    takes: Vec<u64>,
    /// Flags that are awaited before.
    awaits: Vec<u64>,
    /// Ends of other lanes' segments that come before: indices of events.
    after: Vec<usize>,
    program: Arc<Program>,
    endpoints: Arc<[Endpoints]>,
    state: PlanState,
    /// Flags that are raised after.
    raises: Vec<Signal>,
    /// The event that stands for its end, where another lane comes after it.
    end: Option<usize>,
}

/// A part in which little is moved, as one kernel does it.
pub(super) struct SmallPart {
    pub actions: Box<[Action]>,
    /// The copies, on one lane.
    pub program: Arc<Program>,
    pub endpoints: Arc<[Endpoints]>,
    pub device: DeviceId,
    pub grid: ActionGrid,
    /// Several blocks would not be faster, or would have to wait for each other, which takes room for all at once.
    pub is_narrow: bool,
}

/// The same with all addresses, as its GPU has them.
struct BoundKernel {
    actions: Box<[Segment]>,
    device: DeviceId,
    grid: ActionGrid,
}

/// With more bytes on each lane the rank's part is left to copy engines, around which the stream waits by operations and never by kernels. Between two
/// H100 a kernel of a quarter of the multiprocessors takes 7.4 us and what 325 GB/s give, copy engines take 19.4 us and what 392 GB/s give: they meet at
/// 23 MB. Each further lane costs copy engines as much again (three lanes of H200: 63 us).
pub(super) const SMALL_BYTES: u64 = 20 << 20;

/// More lanes than these were not measured.
const MOST_LANES: usize = 3;

/// Bytes that stay in one GPU's memory come and go so many times as fast as those that pass an NVLink.
pub(super) const INSIDE_RATE: u64 = 4;

/// The same where one block does it.
const NARROW_BYTES: u64 = 64 << 10;

/// What comes before the producers of partitions.
pub(super) struct Armed {
    /// Flags that are taken.
    pub takes: Vec<u64>,
    /// A copy of zeros over the flags of partitions, where somebody looks at them.
    pub reset: Option<Copies>,
    /// What producers are told; `None` where this rank has none.
    pub orders: Option<ProducerOrders>,
    /// The step's copies come after all that is in the stream when it is enqueued, not when it is armed.
    pub is_after: bool,
}

/// Copies from address to address, on one lane.
pub(super) type Copies = (Arc<Program>, Arc<[Endpoints]>);

/// What the producers of a variant's partitions are told.
pub(super) struct ProducerOrders {
    /// Copies over the words at which producers look.
    pub copies: Copies,
    pub how: PartitionMove,
    /// What the words say ([`PartitionMove`] as a number), once all that is enqueued outside of captures has run.
    pub said: Arc<AtomicU32>,
}

/// What this rank does in each step.
pub(super) struct BoundPart {
    /// In place of segments, where one kernel does all.
    kernel: Option<BoundKernel>,
    begins: Vec<Signal>,
    /// Of a part that moves partitions.
    armed: Option<Armed>,
    segments: Vec<PartSegment>,
    written: Vec<Signal>,
    ends: Vec<u64>,
    /// Streams of all lanes but the first, each with the event that joins it. Of a kernel one, for callers' streams of other GPUs.
    lanes: Vec<(StreamHandle, EventHandle)>,
    /// Events of segments' ends.
    marks: Vec<EventHandle>,
    /// Stands for the beginning in the caller's stream.
    fork: EventHandle,
    /// Stands for the end of the last step.
    end: EventHandle,
    /// The stream of the last step.
    stream: Option<StreamHandle>,
    /// Streams and events were given back.
    is_released: bool,
    /// That of all steps of the plan.
    fate: StepFate,
}

/// A segment while steps are put into it.
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
    /// Adds copies from address to address: each is a transfer of its own.
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

/// Bytes of a copy, as many as would pass an NVLink in its time. `is_inside` as [`Addresses::is_inside`].
fn weight(copy: &Copy, is_inside: impl Fn(&Copy) -> bool) -> u64 {
    if is_inside(copy) { copy.bytes / INSIDE_RATE } else { copy.bytes }
}

/// Bytes up to which a kernel is faster than copy engines on the part's lanes.
fn small_bytes(part: &Part, is_inside: impl Fn(&Copy) -> bool) -> u64 {
    let lanes = part.steps.iter().filter(|step| step.copies.iter().any(|copy| !is_inside(copy))).map(|step| step.lane);
    SMALL_BYTES * lanes.collect::<BTreeSet<u32>>().len().clamp(1, MOST_LANES) as u64
}

/// Whether so little is moved that a kernel does it as fast as copy engines.
pub(super) fn is_little(part: &Part, is_inside: impl Fn(&Copy) -> bool) -> bool {
    let flags = part.begins.len() + part.ends.len() + part.steps.iter().map(|step| step.takes.len() + step.raises.len()).sum::<usize>();
    let bytes: u64 = part.copies().map(|copy| weight(copy, &is_inside)).sum();
    part.copies().count() + flags <= MOST_ACTIONS && bytes <= small_bytes(part, is_inside)
}

/// Whether the order of two copies matters: one writes what the other reads or writes.
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
    /// The GPU that may do a part as one kernel, as far as is known before memory of other ranks is mapped. `None` where much is moved, or by
    /// several GPUs, or nothing is awaited.
    pub fn device_of(part: &Part, at: &impl Addresses) -> Option<DeviceId> {
        let mut devices = part.lanes.iter().map(|lane| at.device(*lane));
        let device = devices.next().unwrap_or_else(|| at.own_device());
        let awaits = !part.ends.is_empty() || part.steps.iter().any(|step| !step.takes.is_empty());
        (awaits && is_little(part, |copy| at.is_inside(copy)) && !device.is_host() && devices.all(|other| other == device))
            .then_some(device)
    }

    /// `None` as above, and where bytes would be copied too slowly.
    pub fn new(part: &Part, at: &impl Addresses) -> Option<SmallPart> {
        let device = SmallPart::device_of(part, at)?;
        // Bytes that lie differently in their words are copied in smaller ones.
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

    /// The same with bytes that go into inboxes of others and come out of this rank's, by turns. `turn` is a word of the GPU's memory.
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

    /// What the kernel does, with flags where they are now. Copies that nobody waits for come last.
    pub fn actions_of(part: &Part, at: &impl Addresses) -> Box<[Action]> {
        let take = |flag: &FlagId| SmallPart::take(*flag, at);
        let raise = |flag: &FlagId| SmallPart::raise(*flag, at);
        let mut actions: Vec<Action> = part.begins.iter().map(raise).collect();
        // Copies since what came before was last done, and those that may come at any time.
        let (mut going, mut free): (Vec<&Copy>, Vec<Action>) = Default::default();
        let mut transfer = 0;
        for step in &part.steps {
            if step.copies.iter().any(|copy| going.iter().any(|before| meet(before, copy))) {
                actions.push(Action::Order);
                going.clear();
            }
            actions.extend(step.takes.iter().map(take));
            for copy in step.copies.iter().filter(|copy| copy.bytes > 0) {
                // Of this rank's own memory: others read it by this rank alone, which would be seen here.
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
        // Until all ranks have told nobody knows.
        Action::Take { flag: at.flag(flag), blocks: at.near_blocks(flag).unwrap_or(0) }
    }

    fn raise(flag: FlagId, at: &impl Addresses) -> Action {
        Action::Raise(at.flag(flag))
    }
}

impl BoundPart {
    /// Binds a part: `small` where one kernel does it, `armed` where it moves partitions, which is never so: a kernel that waits would come after
    /// the blocks of the producers that it waits for. Streams and events are made here; the caller gives them back by [`BoundPart::release`].
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
        // The segment of each step, and the last one of each lane.
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
        // Of each lane but the first.
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

    /// Enqueues what comes before the producers of partitions, and marks the place in `stream` at which the step begins.
    pub fn arm(&mut self, stream: StreamHandle, is_captured: bool, backend: &dyn Backend) -> Result<(), BackendError> {
        self.follow(stream, is_captured, backend)?;
        let Some(Armed { takes, reset, orders, is_after }) = &self.armed else { return Ok(()) };
        let copy = |(program, endpoints): &Copies| {
            backend.submit(&Execution { report: Report::Nothing, ..Execution::new(program, endpoints, &Arc::from([]), stream) })
        };
        if let Some(reset) = reset {
            copy(reset)?;
        }
        // A graph that was captured may run any time or never, and steps after it are all of its variant.
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

    /// Enqueues the part of one step: it starts after all earlier work in `stream` and after the last step, and later work in the stream starts
    /// after it. Steps in a graph are ordered by whoever launches it. One that was armed starts where that was done, unless it comes after its
    /// producers, and its end is no flag of an earlier step.
    pub fn enqueue(&mut self, stream: StreamHandle, is_captured: bool, backend: &dyn Backend) -> Result<(), BackendError> {
        if is_captured && self.armed.is_some() {
            backend.stream_wait_event(stream, self.fork)?;
        } else {
            // The last thing is the arming, where it was armed.
            self.follow(stream, is_captured, backend)?;
        }
        self.enqueue_step(stream, backend)?;
        self.mark(stream, is_captured, backend)
    }

    /// What is in the stream now is what the next step and the end of the plan come after.
    fn mark(&mut self, stream: StreamHandle, is_captured: bool, backend: &dyn Backend) -> Result<(), BackendError> {
        if !is_captured {
            backend.record_event(self.end, stream)?;
            self.stream = Some(stream);
        }
        Ok(())
    }

    /// Has the stream come after the last step.
    pub fn follow(&self, stream: StreamHandle, is_captured: bool, backend: &dyn Backend) -> Result<(), BackendError> {
        if !is_captured && self.is_other(stream) {
            backend.stream_wait_event(stream, self.end)?;
        }
        Ok(())
    }

    /// Whether something was enqueued last in another stream, or may have been.
    fn is_other(&self, stream: StreamHandle) -> bool {
        // Default streams (0 to 2) are others for other threads and contexts.
        self.stream.is_some_and(|last| last != stream || stream.0 <= 2)
    }

    /// Blocks until all that was enqueued has finished.
    pub fn synchronize(&self, backend: &dyn Backend) -> Result<(), BackendError> {
        if self.stream.is_some() { backend.synchronize_event(self.end) } else { Ok(()) }
    }

    /// Whether what is in the stream when a step is enqueued comes before all of it.
    fn is_after(&self) -> bool {
        self.armed.as_ref().is_none_or(|armed| armed.is_after)
    }

    fn enqueue_step(&self, stream: StreamHandle, backend: &dyn Backend) -> Result<(), BackendError> {
        if let Some(BoundKernel { actions, device, grid }) = &self.kernel {
            let run = |stream| backend.stream_run_actions(stream, *device, actions, *grid);
            if run(stream)? {
                return Ok(());
            }
            // A stream of another GPU.
            let (own, joined) = self.lanes[0];
            backend.record_event(self.fork, stream)?;
            backend.stream_wait_event(own, self.fork)?;
            if !run(own)? {
                let why =
                    "the GPU that works for this rank no longer has the library's kernels; destroy the plan on all ranks, and plan again";
                return Err(BackendError::NotSupported(why.into()));
            }
            backend.record_event(joined, own)?;
            return backend.stream_wait_event(stream, joined);
        }
        // Raised with the next flags that the stream takes, or before what comes next in it.
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

    /// Whether one kernel does it, of how many blocks.
    pub fn kernel_blocks(&self) -> Option<u32> {
        self.kernel.as_ref().map(|kernel| kernel.grid.blocks)
    }

    /// Gives streams and events back, once. Enqueued work still finishes.
    pub fn release(&mut self, backend: &dyn Backend) {
        if std::mem::replace(&mut self.is_released, true) {
            return;
        }
        let events = self.marks.drain(..).chain([self.fork, self.end]);
        let (streams, joined): (Vec<_>, Vec<_>) = self.lanes.drain(..).unzip();
        let given_back = streams.into_iter().map(|stream| backend.destroy_stream(stream));
        for error in given_back.chain(events.chain(joined).map(|event| backend.destroy_event(event))).filter_map(Result::err) {
            log::debug!("giving back what a node plan had: {error}");
        }
    }
}

#[cfg(test)]
#[path = "../../tests/rust/actions.rs"]
mod tests;
