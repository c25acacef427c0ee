//! Large messages over several paths, where each rank sees its own GPU alone.
//!
//! The rank that moves a message moves its direct part by itself. What passes through host memory takes the copy engines of both GPUs: the
//! source's puts pieces there, the destination's takes them out, and counters in that memory hand each piece over in stream order. So the other rank is
//! asked to enqueue its half. A thread of its messenger does that, which sleeps until then. Where it does not answer in time the bytes go
//! direct too, so a message never depends on that thread, only its speed does.
//!
//! Neither half may wait long on its GPU, because whoever frees memory there waits for it. So both streams have come to the message before anybody
//! asks, and no stream of either rank waits for a message that has not come: that wait may stand before the half in a hardware queue.

use super::buffers::{MessagePlace, Through};
use super::half::{Half, HalfWork, OwnMemory};
use super::movement::{Ends, mark, note, raise};
use super::operation::Kept;
use super::staging::{Area, MOST_PIECES, SLOT_BYTES};
use super::{Messenger, Presence, gone};
use crate::backend::{BackendError, Completion, MemoryKind, StreamHandle};
use crate::context::traffic::{HostUse, host_domains};
use crate::context::{Error, PlanOptions, Verify};
use crate::ipc::signal::rest;
use crate::ipc::{Answer, IpcError, MessageSlot, Share, SlotBuffer, SlotId, traffic};
use crate::plan::{self, Relays, Shape};
use crate::sync::{Mutex, lock};
use crate::topology::DeviceId;
use ahash::AHashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Seconds from the question until the other rank's half begins: its thread wakes, and enqueues. The host path gets so much less to do.
const DELAY: f64 = 60e-6;

/// So long a call waits for the answer.
const PATIENCE: Duration = Duration::from_micros(150);

/// So long a call waits to see that the caller's stream has nothing to do. An estimate of how long a GPU takes to pass an event.
const IDLE_PATIENCE: Duration = Duration::from_micros(20);

/// So long a call waits for a rank that has said that it enqueues.
const STUCK: Duration = Duration::from_secs(10);

/// How a message is divided.
#[derive(Copy, Clone, Debug)]
pub(super) struct Split {
    /// Bytes of the direct part.
    direct: u64,
    chunk: u64,
    /// What the model says of all of it.
    nanoseconds: u64,
    /// Host domains that it passes.
    domains: u64,
}

/// What the other rank does of a movement, when nothing more is enqueued here.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Theirs {
    Nothing,
    /// Its half.
    Half,
    /// A part of it. Its operation ends by itself, when this rank has done what it enqueued too.
    Part,
}

/// What goes wrong with halves of this rank in a test.
#[cfg(feature = "fault-injection")]
#[derive(Copy, Clone, Debug)]
pub struct Disturbance {
    /// Before which piece; after the last one for the rank that moves the message.
    pub piece: u64,
    /// It takes so long.
    pub pause: Duration,
    /// It fails then.
    pub fails: bool,
    /// How long this rank waits for another's half.
    pub patience: Duration,
}

/// Streams that wait for messages, and halves that are being enqueued.
#[derive(Default)]
pub(super) struct MessageWaits {
    /// Streams have passed the waits when these are done.
    pub(super) markers: Vec<Completion>,
    /// So many markers are kept before those are looked for that are done.
    most: usize,
    halves: u32,
}

/// A half that is being enqueued for as long as this lives.
pub(super) struct EnqueueingHalf<'a>(&'a Messenger);

impl Drop for EnqueueingHalf<'_> {
    fn drop(&mut self) {
        lock(&self.0.shares.waits).halves -= 1;
    }
}

/// Of a messenger.
pub(super) struct Shares {
    pub(super) waits: Mutex<MessageWaits>,
    pub(super) areas: Mutex<Vec<Area>>,
    pub(super) work: Mutex<Vec<HalfWork>>,
    /// By both devices and the size.
    splits: Mutex<AHashMap<(DeviceId, DeviceId, u64), Option<Split>>>,
    /// Of each slot.
    pub(super) memory: Box<[OwnMemory]>,
    patience: AtomicU64,
    count: AtomicU64,
    #[cfg(feature = "fault-injection")]
    is_forced: AtomicBool,
    #[cfg(feature = "fault-injection")]
    disturbance: Mutex<Option<Disturbance>>,
    pub(super) is_ending: Arc<AtomicBool>,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shares {
    pub fn new(slots: u32) -> Shares {
        Shares {
            waits: Mutex::default(),
            areas: Mutex::default(),
            work: Mutex::default(),
            splits: Mutex::default(),
            memory: (0..slots).map(|_| OwnMemory::default()).collect(),
            patience: AtomicU64::new(PATIENCE.as_nanos() as u64),
            count: AtomicU64::new(0),
            #[cfg(feature = "fault-injection")]
            is_forced: AtomicBool::new(false),
            #[cfg(feature = "fault-injection")]
            disturbance: Mutex::default(),
            is_ending: Arc::default(),
            thread: Mutex::default(),
        }
    }

    /// Whether a test wants all messages to be shared.
    pub(super) fn is_forced(&self) -> bool {
        #[cfg(feature = "fault-injection")]
        return self.is_forced.load(Ordering::Relaxed);
        #[cfg(not(feature = "fault-injection"))]
        false
    }

    /// Notes where the memory of a slot's operation is, before anybody sees the slot.
    pub fn note_memory(&self, slot: u32, place: &MessagePlace) {
        let Some(memory) = self.memory.get(slot as usize) else { return };
        let is_reached = matches!(place.through, Through::Direct { .. }) && !place.device.is_host();
        memory.address.store(place.address, Ordering::Relaxed);
        memory.bytes.store(if is_reached { place.bytes } else { 0 }, Ordering::Relaxed);
        memory.device.store(place.device.0, Ordering::Relaxed);
    }
}

impl Messenger {
    /// How many large messages both ranks have moved together, of those that this rank was to move.
    pub fn shared_movements(&self) -> u64 {
        self.shares.count.load(Ordering::Relaxed)
    }

    /// How long a call that moves a large message waits for the other rank's thread; for tests, on machines with more threads than cores.
    pub fn wait_for_shares(&self, patience: Duration) {
        self.shares.patience.store(patience.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Has the other rank move half of each message between memory of GPUs, in pieces of 64 KiB, also where nothing is gained by it: for tests on
    /// machines with one GPU.
    #[cfg(feature = "fault-injection")]
    pub fn share_always(self: &Arc<Self>) {
        self.shares.is_forced.store(true, Ordering::Relaxed);
        super::half::serve(self);
    }

    /// Disturbs this rank's halves from now on.
    #[cfg(feature = "fault-injection")]
    pub fn disturb_shares(&self, disturbance: Option<Disturbance>) {
        *lock(&self.shares.disturbance) = disturbance;
    }

    #[cfg(feature = "fault-injection")]
    pub(super) fn disturbed(&self, piece: u64) -> Result<(), BackendError> {
        let Some(of) = lock(&self.shares.disturbance).filter(|of| of.piece == piece) else { return Ok(()) };
        std::thread::sleep(of.pause);
        if of.fails { Err(BackendError::Driver { what: "a piece".into(), reason: "disturbed by a test".into(), code: 1 }) } else { Ok(()) }
    }

    fn stuck_after(&self) -> Duration {
        #[cfg(feature = "fault-injection")]
        if let Some(of) = *lock(&self.shares.disturbance) {
            return of.patience;
        }
        STUCK
    }

    /// How the bytes of a match are divided: `None` where one path is best, or this process reaches all paths by itself.
    pub(super) fn split(&self, place: &MessagePlace, other: &MessageSlot, bytes: u64) -> Option<Split> {
        let (Through::Direct { device: own, .. }, SlotBuffer::Memory { device: theirs, .. }) = (&place.through, other.buffer()) else {
            return None;
        };
        let (own, theirs) = (DeviceId(*own), DeviceId(theirs));
        if self.shares.is_forced() && !own.is_host() && !theirs.is_host() {
            let chunk = 64 << 10;
            return (bytes >= 4 * chunk).then(|| Split {
                direct: bytes - (bytes / 2).min(MOST_PIECES * chunk),
                chunk,
                nanoseconds: 0,
                domains: 0,
            });
        }
        let is_out_of_sight = self.node.gpus.get(usize::try_from(theirs.0).ok()?)?.here.is_none();
        if own.is_host() || own == theirs || !is_out_of_sight {
            return None;
        }
        let (src, dst) = if place.is_send { (own, theirs) } else { (theirs, own) };
        let mut splits = lock(&self.shares.splits);
        if splits.len() > 256 {
            splits.clear();
        }
        *splits.entry((src, dst, bytes)).or_insert_with(|| self.plan_split(src, dst, bytes))
    }

    fn plan_split(&self, src: DeviceId, dst: DeviceId, bytes: u64) -> Option<Split> {
        let context = &self.node.context;
        // Relays of other ranks would have to be asked too; behind a switch none pays.
        let options = PlanOptions { relays: Some(Relays::NONE), ..PlanOptions::default() }.resolve(context.config()).ok()?;
        let (src_kind, dst_kind) = (MemoryKind::Device, MemoryKind::Device);
        let shape = Shape { dst_device: dst, src_device: src, dst_kind, src_kind, bytes };
        let planned = plan::plan(&self.node.machine, &[shape], &options).ok()?;
        let paths = &planned.transfers.first()?.paths;
        paths.iter().find(|path| path.via.is_none())?;
        let host = paths.iter().filter(|path| path.via.is_some_and(DeviceId::is_host)).max_by_key(|path| path.bytes)?;
        // It begins later, and has so much less to do. Of a short message nothing is left that would pay.
        if planned.predicted < 3.0 * DELAY {
            return None;
        }
        let chunk = host.chunk_bytes.min(SLOT_BYTES);
        let share = ((host.bytes as f64 * (1.0 - DELAY / planned.predicted)) as u64).min(MOST_PIECES * chunk);
        let domains = host_domains(&planned.program);
        let is_known = share >= chunk && context.shared.traffic.join(&context.config().traffic_folder);
        is_known.then_some(Split { direct: bytes - share, chunk, nanoseconds: (planned.predicted * 1e9) as u64, domains })
    }

    /// Enqueues in `lane` a movement of which the other rank does a part; `false`, and nothing is enqueued, where that cannot be. The other rank's
    /// stream has come to it. `lane` comes after the caller's stream, which is `busy` where it is not known to have nothing to do.
    pub(super) fn move_together(
        &self,
        kept: &mut Kept,
        place: &MessagePlace,
        ends: &Ends,
        theirs: SlotId,
        lane: StreamHandle,
        busy: Option<StreamHandle>,
    ) -> Result<bool, Error> {
        let (context, backend) = (&self.node.context, self.node.context.backend());
        let (own, other) = (self.mailboxes.own(kept.slot), self.mailboxes.slot(theirs));
        let may_ask = other.answer() == Answer::None && self.presence(theirs.rank) == Presence::Here;
        if context.config().verify == Verify::Bytes || !may_ask {
            return Ok(false);
        }
        let Some(split) = self.split(place, other, ends.bytes) else { return Ok(false) };
        if !busy.map_or(Ok(true), |stream| self.is_idle_soon(stream))? {
            return Ok(false);
        }
        let Some(_enqueueing) = self.begin_half() else { return Ok(false) };
        // Of ranks that all take the host path each gets less than one path gives.
        let allowed = match split.domains {
            0 => HostUse::All,
            domains => context.shared.traffic.execute(traffic::now(), split.nanoseconds, domains),
        };
        let bytes = match allowed {
            HostUse::None => return Ok(false),
            HostUse::Half => (ends.bytes - split.direct) / 2,
            HostUse::All => ends.bytes - split.direct,
        };
        let direct = self.plan_of(&ends.part(0, ends.bytes - bytes))?;
        let (half_lane, joined) = self.lane(ends.device, kept.slot, false)?;
        let Some((staging, handle)) = self.take_area(theirs.rank, kept.slot, bytes.div_ceil(split.chunk)) else { return Ok(false) };
        let share = Share { handle, offset: ends.bytes - bytes, bytes, chunk: split.chunk, base: staging.base };
        own.set_share(&share);
        if !other.ask() {
            self.leave_area(&staging);
            return Ok(false);
        }
        self.mailboxes.wake(theirs.rank);
        let by = context.config().signal_wait.unwrap_or_default();
        let enqueue = || -> Result<bool, Error> {
            backend.record_event(joined, lane)?;
            backend.stream_wait_event(half_lane, joined)?;
            direct.iter().try_for_each(|plan| plan.enqueue(lane))?;
            if !self.is_taken(other) {
                let rest = self.plan_of(&ends.part(share.offset, bytes))?;
                return rest.iter().try_for_each(|plan| plan.enqueue(lane)).map(|()| false);
            }
            let address = if place.is_send { ends.src } else { ends.dst };
            let (lane, device, puts) = (half_lane, ends.device, place.is_send);
            self.enqueue_half(&Half { lane, device, staging, share, address, puts, was_asked: false }, || true)?;
            // All that was put there is taken out, and the other has done its half.
            let last = if puts { staging.taken(staging.pieces) } else { staging.put(staging.pieces) };
            backend.stream_wait_signals(lane, &[last], by)?;
            self.await_half(other, theirs.rank)?;
            Ok(true)
        };
        let enqueued = enqueue();
        let part = self.conclude_ask(other);
        // One that ends by itself has a reason of its own.
        let note =
            |error: &Error| [own, other].into_iter().take(if part == Theirs::Part { 1 } else { 2 }).for_each(|slot| note(slot, error));
        enqueued.as_ref().err().into_iter().for_each(note);
        match (part, &enqueued) {
            (Theirs::Nothing, _) => self.leave_area(&staging),
            (Theirs::Half, Ok(_)) => {
                kept.shared = Some(staging);
                self.shares.count.fetch_add(1, Ordering::Relaxed);
            }
            (Theirs::Half, Err(_)) => self.drop_area(&staging),
            (Theirs::Part, _) => {
                self.drop_area(&staging);
                staging.give_up();
            }
        }
        let conclude = || -> Result<(), Error> {
            #[cfg(feature = "fault-injection")]
            self.disturbed(staging.pieces)?;
            if enqueued.is_err() && part != Theirs::Nothing {
                // Each waits for pieces of the other, of which some do not come.
                let end = if place.is_send { staging.put(staging.pieces) } else { staging.taken(staging.pieces) };
                backend.stream_raise_signals(half_lane, &[end])?;
            }
            if enqueued.is_err() && part == Theirs::Half {
                backend.stream_wait_signals(half_lane, &[staging.done()], by)?;
            }
            backend.record_event(joined, half_lane)?;
            backend.stream_wait_event(lane, joined)?;
            let theirs = if part == Theirs::Part { staging.left() } else { raise(&other.moved) };
            Ok(backend.stream_raise_signals(lane, &[theirs, raise(&own.moved)])?)
        };
        let Err(error) = conclude() else { return Ok(true) };
        // Neither lane tells when it has come to its end, so this waits for both, if the driver still does that.
        staging.give_up();
        [half_lane, lane].into_iter().for_each(|stream| drop(backend.synchronize_stream(stream)));
        self.retire_lane(half_lane);
        self.retire(kept, lane);
        self.drop_area(&staging);
        if part == Theirs::Nothing {
            return Err(error);
        }
        // The other rank ends its operation when its half is over.
        note(&error);
        kept.shared = None;
        other.change_answer(other.uses(), Answer::Enqueued, Answer::GivenUp);
        staging.set(staging.left());
        self.mailboxes.wake(theirs.rank);
        own.end();
        Ok(true)
    }

    /// Begins to enqueue a half, unless a stream of this rank waits for a message that has not come.
    pub(super) fn begin_half(&self) -> Option<EnqueueingHalf<'_>> {
        let mut waits = lock(&self.shares.waits);
        waits.markers.retain(|marker| !marker.is_done().unwrap_or(true));
        if !waits.markers.is_empty() || self.has_waiting_lane() {
            return None;
        }
        waits.halves += 1;
        Some(EnqueueingHalf(self))
    }

    /// Has a stream wait for a message while no half is being enqueued; `enqueue` gives what tells that it has passed.
    pub(super) fn wait_apart_from_halves(&self, enqueue: impl FnOnce() -> Result<Completion, Error>) -> Result<Completion, Error> {
        let (mut round, mut waits) = (0, lock(&self.shares.waits));
        while waits.halves > 0 {
            drop(waits);
            rest(round / 8);
            round += 1;
            waits = lock(&self.shares.waits);
        }
        let marker = enqueue()?;
        if waits.markers.len() >= waits.most {
            waits.markers.retain(|marker| !marker.is_done().unwrap_or(true));
            waits.most = (2 * waits.markers.len()).max(64);
        }
        waits.markers.push(marker.clone());
        Ok(marker)
    }

    /// Whether a stream has nothing to do, or will have in a moment.
    fn is_idle_soon(&self, stream: StreamHandle) -> Result<bool, Error> {
        let marker = mark(self.node.context.backend(), stream)?;
        let until = Instant::now() + IDLE_PATIENCE;
        while !marker.is_done()? {
            if Instant::now() >= until {
                return Ok(false);
            }
            rest(0);
        }
        Ok(true)
    }

    /// Nothing more is enqueued here: what the other rank does. One that is enqueueing is told to stop.
    fn conclude_ask(&self, other: &MessageSlot) -> Theirs {
        loop {
            let answer = other.answer();
            match answer {
                Answer::None | Answer::Refused => return Theirs::Nothing,
                Answer::Enqueued => return Theirs::Half,
                Answer::Failed | Answer::GivenUp => return Theirs::Part,
                Answer::Asked => drop(other.change_answer(other.uses(), answer, Answer::None)),
                Answer::Taken => drop(other.change_answer(other.uses(), answer, Answer::GivenUp)),
            }
        }
    }

    /// Whether the other rank does its part. Where it says nothing in time it is not asked any more.
    fn is_taken(&self, other: &MessageSlot) -> bool {
        let until = Instant::now() + Duration::from_nanos(self.shares.patience.load(Ordering::Relaxed));
        while other.answer() == Answer::Asked {
            if Instant::now() >= until && other.change_answer(other.uses(), Answer::Asked, Answer::None) {
                break;
            }
            rest(0);
        }
        !matches!(other.answer(), Answer::None | Answer::Refused)
    }

    /// Waits until the other rank has enqueued its part: where its program frees memory just then, the driver may keep it from doing so.
    fn await_half(&self, other: &MessageSlot, rank: u32) -> Result<(), Error> {
        let stuck_after = self.stuck_after();
        let until = Instant::now() + stuck_after;
        let mut round = 0;
        while other.answer() == Answer::Taken {
            if self.presence(rank) != Presence::Here {
                return Err(gone(rank));
            }
            if Instant::now() >= until {
                let why = format!("rank {rank} has not enqueued its part of a message within {stuck_after:.1?}");
                return Err(IpcError::Timeout(why).into());
            }
            rest(round / 8);
            round += 1;
        }
        if other.answer() == Answer::Enqueued {
            return Ok(());
        }
        Err(BackendError::Driver { what: format!("rank {rank}: a part of a message"), reason: other.text(), code: 0 }.into())
    }

    pub(super) fn has_ended(&self, (slot, uses): (u32, u64)) -> bool {
        let own = self.mailboxes.own(slot);
        own.uses() != uses || own.has_moved()
    }
}
