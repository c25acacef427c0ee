//! Large messages over several paths, where each rank sees its own GPU alone.
//!
//! The rank that moves a message moves its direct part by itself. What passes through host memory takes the copy engines of both GPUs: the
//! source's puts pieces there, the destination's takes them out, and counters in that memory hand each piece over in stream order. So the other rank is
//! asked to enqueue its half. A thread of its messenger does that, which sleeps until then. Where it does not answer in time the bytes go
//! direct too, so a message never depends on that thread, only its speed does.
//!
//! The asked rank's half must not wait long on its GPU, because whoever frees memory there waits for it. So both streams have come to the message
//! before anybody asks, and nobody is asked whose stream waits for the message already: that wait may stand before the half in a hardware queue.

use super::buffers::{HandleBytes, ImportedBuffer, MessagePlace, Through};
use super::movement::{Ends, mark, note, raise};
use super::operation::Kept;
use super::{Messenger, Presence, gone};
use crate::backend::{BackendError, Endpoints, Execution, MemoryKind, Report, Signal, SignalWait, StreamHandle};
use crate::context::node::partitioned::copy_of;
use crate::context::traffic::{HostUse, host_domains};
use crate::context::{Error, PlanOptions, Verify};
use crate::ipc::mailbox::Mailboxes;
use crate::ipc::signal::{load, reached, rest, store};
use crate::ipc::{Answer, IpcError, MessageSlot, Share, SlotBuffer, SlotId, traffic};
use crate::plan::{self, Relays, Shape};
use crate::sync::{Mutex, lock};
use crate::topology::DeviceId;
use ahash::AHashMap;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Slots of a staging area, and bytes of each.
const SLOTS: u64 = 4;
const SLOT_BYTES: u64 = 4 << 20;

/// The counters lie in front: pieces put in, pieces taken out, pieces that the asked rank has done by itself, and those that the other has
/// where its operation ends without that rank's.
const COUNTERS_BYTES: u64 = 4096;
const COUNTER_STRIDE: u64 = 64;

const AREA_BYTES: u64 = COUNTERS_BYTES + SLOTS * SLOT_BYTES;

/// More are not left to the host path: a stream holds some thousand operations that wait, and blocks whoever adds to them.
const MOST_PIECES: u64 = 128;

/// Staging areas of this rank, for one other rank and for all. One in which a movement has failed counts, and is not used again: a rank whose
/// halves fail is asked no more.
const MOST_AREAS: [usize; 2] = [2, 16];

/// Seconds from the question until the other rank's half begins: its thread wakes, and enqueues. The host path gets so much less to do.
const DELAY: f64 = 60e-6;

/// So long a call waits for the answer.
const PATIENCE: Duration = Duration::from_micros(150);

/// So long a call waits to see that the caller's stream has nothing to do. The GPU passes an event in a stream that has not within 10 us or so.
const IDLE_PATIENCE: Duration = Duration::from_micros(20);

/// So long a call waits for a rank that has said that it enqueues.
const STUCK: Duration = Duration::from_secs(10);

/// How often halves are looked at whose operation ends with them.
const TEND_EVERY: Duration = Duration::from_millis(1);

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

/// Staging memory of this rank, which one other rank maps: its end fails the waits in it.
struct Area {
    peer: u32,
    staging: SharedStaging,
    handle: HandleBytes,
    /// The slot whose operation used it last, and in which use.
    last: (u32, u64),
    has_failed: bool,
}

/// Staging memory, here or of another rank.
#[derive(Copy, Clone, Debug)]
pub(super) struct SharedStaging {
    address: u64,
    /// Where the counters stood before.
    base: u64,
    /// How many pieces are moved.
    pieces: u64,
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

/// What one of both ranks does.
struct Half {
    lane: StreamHandle,
    device: DeviceId,
    staging: SharedStaging,
    share: Share,
    /// Of the message here.
    address: u64,
    /// Whether it puts pieces there, or takes them out.
    puts: bool,
    was_asked: bool,
}

/// A half that this rank was asked for.
struct HalfWork {
    slot: u32,
    uses: u64,
    /// Who asked.
    peer: u32,
    staging: SharedStaging,
    /// The operation has failed, and ends when nothing of it is under way any more, here or there.
    ends_here: bool,
    /// Keeps the staging memory mapped.
    _imported: Arc<ImportedBuffer>,
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

/// The memory of an operation of this rank, where a GPU reaches it.
#[derive(Default)]
struct OwnMemory {
    address: AtomicU64,
    bytes: AtomicU64,
    device: AtomicI32,
}

/// Of a messenger.
pub(super) struct Shares {
    areas: Mutex<Vec<Area>>,
    work: Mutex<Vec<HalfWork>>,
    /// By both devices and the size.
    splits: Mutex<AHashMap<(DeviceId, DeviceId, u64), Option<Split>>>,
    /// Of each slot.
    memory: Box<[OwnMemory]>,
    patience: AtomicU64,
    count: AtomicU64,
    #[cfg(feature = "fault-injection")]
    is_forced: AtomicBool,
    #[cfg(feature = "fault-injection")]
    disturbance: Mutex<Option<Disturbance>>,
    is_ending: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shares {
    pub fn new(slots: u32) -> Shares {
        Shares {
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

    /// Notes where the memory of a slot's operation is, before anybody sees the slot.
    pub fn note_memory(&self, slot: u32, place: &MessagePlace) {
        let Some(memory) = self.memory.get(slot as usize) else { return };
        let is_reached = matches!(place.through, Through::Direct { .. }) && !place.device.is_host();
        memory.address.store(place.address, Ordering::Relaxed);
        memory.bytes.store(if is_reached { place.bytes } else { 0 }, Ordering::Relaxed);
        memory.device.store(place.device.0, Ordering::Relaxed);
    }
}

impl SharedStaging {
    fn counter(&self, which: u64) -> u64 {
        self.address + which * COUNTER_STRIDE
    }

    /// Reached when so many pieces were put there.
    fn put(&self, pieces: u64) -> Signal {
        Signal { counter: self.counter(0), value: self.base.wrapping_add(pieces) }
    }

    fn taken(&self, pieces: u64) -> Signal {
        Signal { counter: self.counter(1), value: self.base.wrapping_add(pieces) }
    }

    fn done(&self) -> Signal {
        Signal { counter: self.counter(2), value: self.base.wrapping_add(self.pieces) }
    }

    /// The rank that moves the message has done what it enqueued.
    fn left(&self) -> Signal {
        Signal { counter: self.counter(3), ..self.done() }
    }

    /// Whether the asked rank has done its half. No wait that fails raises this counter, and later movements only raise it further.
    pub fn is_whole(&self) -> bool {
        self.has_reached(self.done())
    }

    fn has_reached(&self, Signal { counter, value }: Signal) -> bool {
        // SAFETY: a counter of this staging memory, which is mapped while it is in use.
        reached(unsafe { load(counter) }, value)
    }

    fn store(&self, which: u64, value: u64) {
        // SAFETY: as above.
        unsafe { store(self.counter(which), value) }
    }

    /// Lets streams of both ranks go on that wait for a piece.
    fn give_up(&self) {
        (0..2).for_each(|which| self.store(which, self.base.wrapping_add(1 << 62)));
    }
}

fn given_up() -> BackendError {
    BackendError::Cancelled("the rank that moves this message waits no longer for this rank's part".into())
}

/// Starts the thread that does halves for other ranks.
pub(super) fn serve(messenger: &Arc<Messenger>) {
    let mut thread = lock(&messenger.shares.thread);
    if thread.is_some() {
        return;
    }
    let (weak, mailboxes) = (Arc::downgrade(messenger), messenger.mailboxes.clone());
    let is_ending = Arc::clone(&messenger.shares.is_ending);
    match std::thread::Builder::new().name("mpgpu-message".into()).spawn(move || serve_asks(&weak, &mailboxes, &is_ending)) {
        Ok(started) => *thread = Some(started),
        Err(error) => log::debug!("large messages take one path: a thread for other ranks: {error}"),
    }
}

thread_local! {
    /// On a thread that does halves the address of what ends it. `std::thread::current` would leave memory behind on the caller's threads.
    static SERVED: Cell<usize> = const { Cell::new(0) };
}

fn serve_asks(messenger: &Weak<Messenger>, mailboxes: &Mailboxes, is_ending: &Arc<AtomicBool>) {
    SERVED.set(Arc::as_ptr(is_ending).addr());
    let mut asks = 0;
    loop {
        let mut most = None;
        if let Some(messenger) = messenger.upgrade()
            && let Ok(_open) = messenger.enter()
        {
            asks = mailboxes.asks();
            (0..messenger.capacity.slots).for_each(|slot| messenger.answer(slot));
            most = messenger.tend_halves().then_some(TEND_EVERY);
        }
        // Beyond this the mailbox may be gone.
        if is_ending.load(Ordering::Acquire) {
            return;
        }
        mailboxes.wait_for_asks(asks, most);
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

    /// Ends the thread. Nobody asks any more: whatever has matched has moved.
    pub(super) fn end_shares(&self) {
        self.shares.is_ending.store(true, Ordering::Release);
        self.mailboxes.wake(self.mailboxes.rank());
        let thread = lock(&self.shares.thread).take();
        // It may have had the last reference to the messenger.
        if let Some(thread) = thread.filter(|_| SERVED.get() != Arc::as_ptr(&self.shares.is_ending).addr())
            && thread.join().is_err()
        {
            log::error!("the thread of messages panicked; please report this");
        }
    }

    /// Has the other rank move half of each message between memory of GPUs, in pieces of 64 KiB, also where nothing is gained by it: for tests on
    /// machines with one GPU.
    #[cfg(feature = "fault-injection")]
    pub fn share_always(self: &Arc<Self>) {
        self.shares.is_forced.store(true, Ordering::Relaxed);
        serve(self);
    }

    /// Disturbs this rank's halves from now on.
    #[cfg(feature = "fault-injection")]
    pub fn disturb_shares(&self, disturbance: Option<Disturbance>) {
        *lock(&self.shares.disturbance) = disturbance;
    }

    #[cfg(feature = "fault-injection")]
    fn disturbed(&self, piece: u64) -> Result<(), BackendError> {
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
        #[cfg(feature = "fault-injection")]
        if self.shares.is_forced.load(Ordering::Relaxed) && !own.is_host() && !theirs.is_host() {
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
        if context.config().verify == Verify::Bytes || self.presence(theirs.rank) != Presence::Here {
            return Ok(false);
        }
        let Some(split) = self.split(place, other, ends.bytes) else { return Ok(false) };
        if !busy.map_or(Ok(true), |stream| self.is_idle_soon(stream))? {
            return Ok(false);
        }
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
        let (half_lane, joined) = self.lane(ends.device, kept.slot)?;
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
            _ => self.drop_area(&staging),
        }
        if part == Theirs::Part {
            staging.give_up();
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
        staging.store(3, staging.left().value);
        self.mailboxes.wake(theirs.rank);
        own.end();
        Ok(true)
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

    /// Staging memory for a movement of so many pieces, and its handle; `None` where all is in use.
    fn take_area(&self, peer: u32, slot: u32, pieces: u64) -> Option<(SharedStaging, HandleBytes)> {
        let last = (slot, self.mailboxes.own(slot).uses());
        let mut areas = lock(&self.shares.areas);
        // Where a half was not done something may still be written there.
        let is_free = |area: &Area| area.peer == peer && !area.has_failed && self.has_ended(area.last) && area.staging.is_whole();
        if let Some(area) = areas.iter_mut().find(|area| is_free(area)) {
            let SharedStaging { address, base, pieces: before } = area.staging;
            (area.staging, area.last) = (SharedStaging { address, base: base.wrapping_add(before), pieces }, last);
            return Some((area.staging, area.handle));
        }
        let [for_one, for_all] = MOST_AREAS;
        let is_full = areas.len() >= for_all || areas.iter().filter(|area| area.peer == peer).count() >= for_one;
        #[cfg(feature = "fault-injection")]
        let is_full = is_full && !self.shares.is_forced.load(Ordering::Relaxed);
        if is_full {
            return None;
        }
        let context = &self.node.context;
        let made = context.allocate_shared(DeviceId::HOST, AREA_BYTES).and_then(|address| {
            let exported = context.export_memory(address, AREA_BYTES).inspect_err(|_| drop(context.free(address)));
            exported.map(|handle| (address, handle.encode()))
        });
        let (address, handle) = match made {
            Ok(made) => made,
            Err(error) => {
                log::debug!("a large message takes one path: {error}");
                return None;
            }
        };
        lock(&self.held).allocations.push(address);
        let staging = SharedStaging { address, base: 0, pieces };
        (0..4).for_each(|which| staging.store(which, 0));
        areas.push(Area { peer, staging, handle, last, has_failed: false });
        Some((staging, handle))
    }

    /// The other rank has not touched it.
    fn leave_area(&self, staging: &SharedStaging) {
        self.with_area(staging, |area| area.staging.pieces = 0);
    }

    /// It is not used again.
    fn drop_area(&self, staging: &SharedStaging) {
        self.with_area(staging, |area| area.has_failed = true);
    }

    fn with_area(&self, staging: &SharedStaging, change: impl FnMut(&mut Area)) {
        lock(&self.shares.areas).iter_mut().filter(|area| area.staging.address == staging.address).for_each(change);
    }

    pub(super) fn has_ended(&self, (slot, uses): (u32, u64)) -> bool {
        let own = self.mailboxes.own(slot);
        own.uses() != uses || own.has_moved()
    }

    /// Enqueues a half, for as long as it is wanted.
    fn enqueue_half(&self, half: &Half, is_wanted: impl Fn() -> bool) -> Result<(), BackendError> {
        let (backend, config) = (self.node.context.backend(), self.node.context.config());
        let by = config.signal_wait.unwrap_or(SignalWait::Operation);
        let Half { lane, device, staging, share, .. } = *half;
        for piece in 0..staging.pieces {
            #[cfg(feature = "fault-injection")]
            self.disturbed(piece)?;
            if !is_wanted() {
                return Err(given_up());
            }
            let offset = piece * share.chunk;
            let bytes = share.chunk.min(share.bytes - offset);
            let staged = staging.address + COUNTERS_BYTES + piece % SLOTS * SLOT_BYTES;
            let own = half.address + share.offset + offset;
            let awaits = if half.puts { (piece >= SLOTS).then(|| staging.taken(piece + 1 - SLOTS)) } else { Some(staging.put(piece + 1)) };
            if let Some(signal) = awaits {
                backend.stream_wait_signals(lane, &[signal], by)?;
            }
            let ends = if half.puts { Endpoints { dst: staged, src: own } } else { Endpoints { dst: own, src: staged } };
            let (program, endpoints) = copy_of(device, bytes, ends);
            backend.submit(&Execution { report: Report::Nothing, ..Execution::new(&program, &endpoints, &Arc::from([]), lane) })?;
            // Whoever has seen the last piece sees this too.
            if half.was_asked && piece + 1 == staging.pieces {
                backend.stream_raise_signals(lane, &[staging.done()])?;
            }
            let raised = if half.puts { staging.put(piece + 1) } else { staging.taken(piece + 1) };
            backend.stream_raise_signals(lane, &[raised])?;
        }
        Ok(())
    }

    /// Does what another rank asks for in a slot of this one, if it asks.
    fn answer(&self, slot: u32) {
        let own = self.mailboxes.own(slot);
        let Some(uses) = own.asked() else { return };
        // What may take long comes before there is no way back.
        let (half, imported, peer) = match self.prepare_half(own, slot) {
            Ok(prepared) => prepared,
            Err(error) => {
                log::debug!("a large message takes one path: {error}");
                own.change_answer(uses, Answer::Asked, Answer::Refused);
                return;
            }
        };
        {
            let mut work = lock(&self.shares.work);
            // Of a rank that has died the operation has ended, or is ended by whoever takes this lock next.
            if !own.change_answer(uses, Answer::Asked, Answer::Taken) || self.presence(peer) != Presence::Here {
                return;
            }
            work.push(HalfWork { slot, uses, peer, staging: half.staging, ends_here: false, _imported: imported });
        }
        let backend = self.node.context.backend();
        let enqueued = self.enqueue_half(&half, || own.answer() == Answer::Taken);
        if enqueued.is_ok() && own.change_answer(uses, Answer::Taken, Answer::Enqueued) {
            return;
        }
        note(own, &enqueued.err().unwrap_or_else(given_up).into());
        own.change_answer(uses, Answer::Taken, Answer::Failed);
        // The other rank waits for pieces of this one. When this lane has come to its end, the operation ends.
        let pieces = half.staging.pieces;
        let end = if half.puts { half.staging.put(pieces) } else { half.staging.taken(pieces) };
        if backend.stream_raise_signals(half.lane, &[end, half.staging.done()]).is_err() {
            self.retire_lane(half.lane);
            half.staging.give_up();
            half.staging.store(2, half.staging.done().value);
        }
        let mut work = lock(&self.shares.work);
        work.iter_mut().filter(|work| (work.slot, work.uses) == (slot, uses)).for_each(|work| work.ends_here = true);
    }

    /// Ends operations whose halves have failed and are over. Whether some are not.
    fn tend_halves(&self) -> bool {
        let mut work = lock(&self.shares.work);
        work.retain_mut(|half| {
            if self.has_ended((half.slot, half.uses)) {
                return false;
            }
            // The rank that moves the message can do nothing more.
            half.ends_here |= self.mailboxes.own(half.slot).has_ended_alone();
            if !half.ends_here {
                return true;
            }
            let is_gone = self.presence(half.peer) != Presence::Here;
            let has_left = is_gone || half.staging.has_reached(half.staging.left());
            if half.staging.is_whole() && has_left {
                self.mailboxes.own(half.slot).end();
                return false;
            }
            // Again and again: what either GPU still had to do may set the counters back.
            half.staging.give_up();
            true
        });
        work.iter().any(|half| half.ends_here)
    }

    /// What this rank is asked for, as far as it can be: every rank can write what it reads here.
    fn prepare_half(&self, own: &MessageSlot, slot: u32) -> Result<(Half, Arc<ImportedBuffer>, u32), Error> {
        let corrupt = |why: &str| Error::from(IpcError::Corrupt(format!("a rank asks for a part of a message {why}")));
        if !own.has_come() {
            return Err(corrupt("to which this rank's stream has not come"));
        }
        let theirs = own.partner().filter(|theirs| theirs.rank < self.mailboxes.ranks()).ok_or_else(|| corrupt("of nobody"))?;
        let share = self.mailboxes.slot(theirs).share();
        let memory = self.shares.memory.get(slot as usize).ok_or_else(|| corrupt("of no slot"))?;
        let (address, bytes) = (memory.address.load(Ordering::Relaxed), memory.bytes.load(Ordering::Relaxed));
        if share.bytes == 0 || share.offset.checked_add(share.bytes).is_none_or(|end| end > bytes) {
            return Err(corrupt("outside of its memory"));
        }
        if share.chunk == 0 || share.chunk > SLOT_BYTES || share.bytes.div_ceil(share.chunk) > MOST_PIECES {
            return Err(corrupt("in pieces that have no room"));
        }
        let imported = self.import(&share.handle, DeviceId::HOST.0)?;
        let staging = imported.range(0, AREA_BYTES).ok_or_else(|| corrupt("through too little memory"))?;
        let device = DeviceId(memory.device.load(Ordering::Relaxed));
        let (lane, event) = self.lane(device, slot)?;
        // While this program frees memory, and its streams wait, the driver lets no thread enqueue: better now than when there is no way back.
        self.node.context.backend().record_event(event, lane)?;
        let staging = SharedStaging { address: staging, base: share.base, pieces: share.bytes.div_ceil(share.chunk) };
        Ok((Half { lane, device, staging, share, address, puts: own.is_send(), was_asked: true }, imported, theirs.rank))
    }

    /// The rank that moves the message of this slot has died. Where this one does a part of it the operation ends when that is over; whether it
    /// is so. Asks nothing of the driver, which may wait for this.
    pub(super) fn end_work(&self, slot: u32) -> bool {
        let uses = self.mailboxes.own(slot).uses();
        let mut work = lock(&self.shares.work);
        let Some(half) = work.iter_mut().find(|half| (half.slot, half.uses) == (slot, uses)) else { return false };
        half.ends_here = true;
        // The thread that looks after it may be in a call of the driver, which waits for this.
        half.staging.give_up();
        self.mailboxes.wake(self.mailboxes.rank());
        true
    }
}
