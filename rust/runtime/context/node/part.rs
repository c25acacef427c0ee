//! One rank's part of a plan, bound to addresses and streams.
//!
//! Operations that follow each other on a lane with nothing to wait for between them are one program, which the backend runs as any other.
//! The first lane is the caller's stream; each other one has a stream of its own, joined to the caller's by events. Flags are taken and
//! raised by the streams themselves, so nothing here waits, and a stream that is being captured gets all of it as part of its graph.

use super::partitioned::copy_of;
use super::polled::PolledLane;
use crate::backend::{
    Action, Backend, BackendError, Endpoints, EventHandle, Execution, PlanState, Report, Signal, SignalWait, StreamHandle,
};
use crate::plan::{Copy, Lane, LaneId, Mechanism, Op, Place, Program};
use crate::program::ranks::{FlagId, Part};
use crate::topology::DeviceId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Where things of a plan lie in this process: what a part touches, and nothing else.
pub(super) trait Addresses {
    /// Of a byte that a copy reads or writes.
    fn place(&self, place: Place) -> u64;
    /// Of a flag.
    fn flag(&self, flag: FlagId) -> u64;
    /// Of a device of the node the one here whose copy engine serves it.
    fn device(&self, device: DeviceId) -> DeviceId;
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
    /// Launched in place of the program.
    polled: Option<PolledLane>,
    state: PlanState,
    /// Flags that are raised after.
    raises: Vec<Signal>,
    /// The event that stands for its end, where another lane comes after it.
    end: Option<usize>,
}

/// A part in which little is moved, as one kernel does it.
struct SmallPart {
    actions: Box<[Action]>,
    /// The copies, on one lane.
    program: Arc<Program>,
    endpoints: Arc<[Endpoints]>,
}

/// With more bytes the rank's part is left to copy engines, around which the stream waits by operations. Two H100 putting to each other take 12.6 us
/// by kernels and 14.0 by operations at 64 KiB, 19.3 and 14.3 at 256 KiB (docs/results.md): one thread block moves about 45 GB/s.
const SMALL_BYTES: u64 = 64 << 10;

/// What comes before the producers of partitions.
pub(super) struct Armed {
    /// Flags that are taken.
    takes: Vec<u64>,
    /// A copy of zeros over the flags of partitions, if there are any.
    reset: Option<(Arc<Program>, Arc<[Endpoints]>)>,
    /// Lanes whose copies a kernel makes as what they read becomes ready.
    pub polled: BTreeMap<u32, PolledLane>,
}

impl Armed {
    /// For `bytes` bytes of flags at `flags`, and as many zeros at `zeros`, on `device`.
    pub fn new(part: &Part, at: &impl Addresses, device: DeviceId, flags: u64, zeros: u64, bytes: u64) -> Armed {
        let reset = || copy_of(device, bytes, Endpoints { dst: flags, src: zeros });
        let takes = part.arms.iter().map(|flag| at.flag(*flag)).collect();
        Armed { takes, reset: (bytes > 0).then(reset), polled: BTreeMap::new() }
    }
}

/// What this rank does in each step.
pub(super) struct BoundPart {
    /// The same as everything below, where one kernel may do it.
    small: Option<SmallPart>,
    begins: Vec<Signal>,
    /// Of a part that moves partitions.
    armed: Option<Armed>,
    segments: Vec<PartSegment>,
    written: Vec<Signal>,
    ends: Vec<u64>,
    /// Streams of all lanes but the first, each with the event that joins it.
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

impl SmallPart {
    /// `None` where more is moved, or by several GPUs, or nothing is awaited.
    fn new(part: &Part, at: &impl Addresses) -> Option<SmallPart> {
        let mut devices = part.lanes.iter().map(|lane| at.device(*lane));
        let device = devices.next();
        let copies = || part.steps.iter().flat_map(|step| &step.copies).filter(|copy| copy.bytes > 0);
        let awaits = !part.ends.is_empty() || part.steps.iter().any(|step| !step.takes.is_empty());
        let is_one = device.is_none_or(|device| !device.is_host() && devices.all(|other| other == device));
        if !is_one || !awaits || copies().map(|copy| copy.bytes).sum::<u64>() > SMALL_BYTES {
            return None;
        }
        let mut actions: Vec<Action> = part.begins.iter().map(|flag| Action::Raise(at.flag(*flag))).collect();
        let mut transfer = 0;
        for step in &part.steps {
            if let Some(Action::Copy(_)) = actions.last() {
                actions.push(Action::Order);
            }
            actions.extend(step.takes.iter().map(|flag| Action::Take(at.flag(*flag))));
            for _ in step.copies.iter().filter(|copy| copy.bytes > 0) {
                actions.push(Action::Copy(transfer));
                transfer += 1;
            }
            actions.extend(step.raises.iter().map(|flag| Action::Raise(at.flag(*flag))));
        }
        actions.extend(part.ends.iter().map(|flag| Action::Take(at.flag(*flag))));
        Some(SmallPart {
            actions: actions.into(),
            program: Arc::new(Program {
                transfers: copies().map(|copy| copy.bytes).collect(),
                lanes: device.map(Lane::new).into_iter().collect(),
                rings: Vec::new(),
                ops: Vec::new(),
            }),
            endpoints: copies().map(|copy| Endpoints { dst: at.place(copy.to), src: at.place(copy.from) }).collect(),
        })
    }
}

impl BoundPart {
    /// Binds a part, `armed` where it moves partitions. `by` says whether kernels may wait for flags. Streams and events are made here; the
    /// caller gives them back by [`BoundPart::release`].
    pub fn new(
        part: &Part,
        at: &impl Addresses,
        by: SignalWait,
        armed: Option<Armed>,
        backend: &dyn Backend,
    ) -> Result<BoundPart, BackendError> {
        let raise = |flag: &FlagId| Signal { counter: at.flag(*flag), value: 1 };
        let mut drafts: Vec<Draft> = Vec::new();
        // The segment of each step, and the last one of each lane.
        let mut segment_of: Vec<usize> = Vec::new();
        let mut open: Vec<Option<usize>> = vec![None; part.lanes.len()];
        let mut marks = 0;
        let polled = |lane: usize| armed.as_ref().and_then(|armed| armed.polled.get(&(lane as u32)).copied());
        for step in &part.steps {
            let lane = step.lane as usize;
            // One kernel for all steps of a lane, whose flags are taken before and raised after it: none waits for what another raises.
            let is_polled = polled(lane).is_some();
            let follows = is_polled || step.takes.is_empty() && step.awaits.is_empty() && step.after.is_empty();
            let index = match open[lane].filter(|index| follows && (is_polled || drafts[*index].raises.is_empty())) {
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
            if !is_polled {
                draft.push(step.mechanism, &step.copies, at);
            }
            draft.raises.extend(step.raises.iter().map(raise));
            segment_of.push(index);
        }
        let device = |lane: usize| at.device(part.lanes[lane]);
        let segments = drafts.into_iter().map(|draft| PartSegment {
            lane: draft.lane,
            polled: polled(draft.lane),
            takes: draft.takes,
            awaits: draft.awaits,
            after: draft.after,
            program: Arc::new(Program {
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
        let urgent: Vec<bool> = (0..part.lanes.len()).map(|lane| polled(lane).is_some()).collect();
        // A kernel that waits would come after the blocks of the producers that it waits for.
        let by = if armed.is_some() { SignalWait::Operation } else { by };
        let fork = backend.create_event()?;
        let end = backend.create_event().inspect_err(|_| drop(backend.destroy_event(fork)))?;
        let mut bound = BoundPart {
            small: if by == SignalWait::Kernel { SmallPart::new(part, at) } else { None },
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
        };
        let lanes = (1..part.lanes.len())
            .try_for_each(|lane| {
                // The kernel is to get the first multiprocessor that producers leave.
                let stream = if urgent[lane] { backend.create_urgent_stream(device(lane)) } else { backend.create_stream(device(lane)) }?;
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
        let Some(Armed { takes, reset, .. }) = &self.armed else { return Ok(()) };
        if let Some((program, endpoints)) = reset {
            backend.submit(&Execution { report: Report::Nothing, ..Execution::new(program, endpoints, &Arc::from([]), stream) })?;
        }
        if !takes.is_empty() {
            backend.stream_take_flags(stream, &self.begins, takes)?;
        } else if !self.begins.is_empty() {
            backend.stream_raise_signals(stream, &self.begins)?;
        }
        backend.record_event(self.fork, stream)?;
        self.mark(stream, is_captured, backend)
    }

    /// Enqueues the part of one step: it starts after all earlier work in `stream` and after the last step, and later work in the stream starts
    /// after it. Steps in a graph are ordered by whoever launches it. One that was armed starts where that was done, and its end is no flag of an
    /// earlier step.
    pub fn enqueue(&mut self, stream: StreamHandle, is_captured: bool, backend: &dyn Backend) -> Result<(), BackendError> {
        if self.armed.is_none() {
            self.follow(stream, is_captured, backend)?;
        } else if is_captured || self.is_other(stream) {
            backend.stream_wait_event(stream, self.fork)?;
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
    fn follow(&self, stream: StreamHandle, is_captured: bool, backend: &dyn Backend) -> Result<(), BackendError> {
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

    fn enqueue_step(&self, stream: StreamHandle, backend: &dyn Backend) -> Result<(), BackendError> {
        let nothing = Arc::from([]);
        if let Some(SmallPart { actions, program, endpoints }) = &self.small
            && backend.stream_run_actions(&Execution::new(program, endpoints, &nothing, stream), actions)?
        {
            return Ok(());
        }
        // Raised with the next flags that the stream takes, or before what comes next in it.
        let mut raises = if self.armed.is_some() { &[] } else { &self.begins[..] };
        let raise = |lane: StreamHandle, raises: &mut &[Signal]| match std::mem::take(raises) {
            [] => Ok(()),
            some => backend.stream_raise_signals(lane, some),
        };
        let stream_of = |lane: usize| lane.checked_sub(1).map_or(stream, |other| self.lanes[other].0);
        if !self.lanes.is_empty() {
            raise(stream, &mut raises)?;
            if self.armed.is_none() {
                backend.record_event(self.fork, stream)?;
            }
            self.lanes.iter().try_for_each(|(lane, _)| backend.stream_wait_event(*lane, self.fork))?;
        }
        for segment in &self.segments {
            let lane = stream_of(segment.lane);
            segment.after.iter().try_for_each(|end| backend.stream_wait_event(lane, self.marks[*end]))?;
            if segment.takes.is_empty() {
                raise(lane, &mut raises)?;
            } else {
                backend.stream_take_flags(lane, std::mem::take(&mut raises), &segment.takes)?;
            }
            if !segment.awaits.is_empty() {
                backend.stream_await_flags(lane, &segment.awaits)?;
            }
            if let Some(PolledLane { list, blocks }) = &segment.polled {
                backend.stream_copy_polled(lane, list, *blocks)?;
            } else {
                let execution = Execution::new(&segment.program, &segment.endpoints, &nothing, lane);
                backend.submit(&Execution { report: Report::Nothing, state: Some(&segment.state), ..execution })?;
            }
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
        if self.ends.is_empty() { raise(stream, &mut raises) } else { backend.stream_take_flags(stream, raises, &self.ends) }
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
#[path = "../../../../tests/rust/actions.rs"]
mod tests;
