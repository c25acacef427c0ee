//! Copies the data of a matched send and receive. The rank whose operation was posted later enqueues the copy. The copy follows the earlier
//! work in the streams of both ranks.
//!
//! The copy is enqueued in an internal stream of the messenger, because work of the caller's stream must not wait for another rank. The
//! copy follows an event of the caller's stream and the flag that the stream of the other rank sets. Each operation that waits has an
//! internal stream to itself, so that operations posted earlier do not delay it. Small messages are copied in the caller's stream if the
//! other rank is ready.
//!
//! If a stream is idle, all operations posted in it are ready at once. The CPU then sets the flag instead of the stream, so that the other
//! rank does not wait if it posts its operation next. If the stream is idle, the CPU also copies small host messages and ends messages
//! without data.

use super::Messenger;
use super::buffers::{MessagePlace, Through};
use super::operation::Kept;
use crate::backend::{Backend, BackendError, Completion, CompletionState, EventHandle, Report, Signal, StreamHandle, no_completion};
use crate::contexts::{Error, Plan, PlanOptions, Transfer, Verify};
use crate::ipc::mailbox::{copy_host, raise_host};
use crate::ipc::{INLINE_BYTES, IpcError, MessageSlot, SlotBuffer, SlotId, SlotState, SlotStatus};
use crate::sync::lock;
use crate::topology::DeviceId;
use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Maximum size in bytes of a message that is copied in the caller's stream instead of an internal stream. Such a copy delays the caller's
/// stream no longer than an event would that joins an internal stream to the caller's stream: by about 2 us (two H200).
const SMALL_BYTES: u64 = 1 << 20;

/// Maximum time for which the CPU polls whether the other rank is ready for a small message. If both ranks post at the same time, the other
/// rank first queries whether its stream is idle, which takes 1.5 us on an H200. Polling is faster than a wait in an internal stream.
const SOON: Duration = Duration::from_micros(5);

/// Maximum number of times that the CPU queries whether the stream of a small operation is idle. A stream still counts as busy for up to 2
/// us after the last flag that it has set is visible. Repeated queries take less time than the 4 us that the stream would need to set the
/// flag.
const LOOKS: u32 = 3;

/// Internal stream of the messenger, with the event that joins it to the caller's stream.
#[derive(Debug)]
pub(super) struct MessageLane {
    stream: StreamHandle,
    event: EventHandle,
    device: DeviceId,
    /// Slot of the last operation in this internal stream, and the use count of the slot at that time. `None` if no operation has used the
    /// internal stream.
    last: Option<(u32, u64)>,
    /// True if the last work in this internal stream may never finish. The stream is then not used again.
    is_retired: bool,
}

/// Records in an operation's slot the error with which the operation fails.
fn note(slot: &MessageSlot, error: &Error) {
    let status = match error {
        Error::Share(IpcError::PeerGone(_)) | Error::Backend(BackendError::PeerGone(_)) => SlotStatus::PeerGone,
        _ => SlotStatus::Failed,
    };
    slot.fail(status, &error.to_string());
}

/// Returns the signal operation by which a stream sets `flag` to 1.
pub(super) fn raise(flag: &AtomicU64) -> Signal {
    Signal { counter: std::ptr::from_ref(flag).addr() as u64, value: 1 }
}

/// Pending copy of a received message from memory of the library to the caller's memory.
#[derive(Debug)]
pub(super) struct Landing {
    from: u64,
    to: u64,
    /// Size in bytes of the caller's receive buffer. A longer message is not copied beyond this size.
    bytes: u64,
    /// True once a thread has begun to copy the message to the caller's memory, so that no other thread makes the copy.
    is_claimed: AtomicBool,
}

impl Landing {
    /// Copies the received message to the caller's memory if all data has arrived and no other thread has begun the copy.
    pub fn land(&self, own: &MessageSlot) {
        if !own.has_moved() || self.is_claimed.swap(true, Ordering::AcqRel) {
            return;
        }
        if own.status() == SlotStatus::Fine && own.state() == SlotState::Matched {
            // The message size in the slot is not trusted, because every rank can write to the slot.
            copy_host(self.from, self.to, own.message_bytes().min(self.bytes));
        }
        own.finished.store(1, Ordering::Release);
    }
}

/// Copy of a received message to the caller's memory, in the form of a completion that the callback thread polls.
#[derive(Debug)]
struct Landed {
    messenger: Weak<Messenger>,
    slot: u32,
    landing: Arc<Landing>,
}

impl CompletionState for Landed {
    /// Copies the received message to the caller's memory if all data has arrived. Returns true once this thread or another thread has
    /// begun the copy.
    fn is_done(&self) -> Result<bool, BackendError> {
        // The slot is not reused until a thread has begun the copy.
        if self.landing.is_claimed.load(Ordering::Acquire) {
            return Ok(true);
        }
        let Some(messenger) = self.messenger.upgrade() else { return Ok(true) };
        let Ok(_open) = messenger.enter() else { return Ok(true) };
        self.landing.land(messenger.mailboxes.own(self.slot));
        Ok(self.landing.is_claimed.load(Ordering::Acquire))
    }

    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Messenger {
    /// Enqueues the copy for two matched operations. `place` is the memory of this rank's operation, which was posted later, and `theirs`
    /// is the slot of the other rank's operation. An error becomes the outcome of both operations.
    pub(super) fn start(&self, kept: &mut Kept, place: &MessagePlace, theirs: SlotId, stream: StreamHandle) {
        self.carried.begin(kept.slot);
        let own = self.mailboxes.own(kept.slot);
        if let Err(error) = self.enqueue(kept, place, theirs, stream) {
            self.fail_both(own, self.mailboxes.slot(theirs), &error);
        }
    }

    /// Ends both operations of a matched pair with an error. `own` is the slot of this rank's operation, and `theirs` that of the other.
    pub(super) fn fail_both(&self, own: &MessageSlot, theirs: &MessageSlot, error: &Error) {
        self.note_failure(own, theirs, error);
        theirs.end();
        own.end();
    }

    pub(super) fn note_failure(&self, own: &MessageSlot, theirs: &MessageSlot, error: &Error) {
        [own, theirs].into_iter().for_each(|slot| note(slot, error));
    }

    fn enqueue(&self, kept: &mut Kept, place: &MessagePlace, theirs: SlotId, stream: StreamHandle) -> Result<(), Error> {
        let backend = self.node.context.backend();
        let (own, other, is_send) = (self.mailboxes.own(kept.slot), self.mailboxes.slot(theirs), place.is_send);
        // The slot of the other rank is untrusted and may have changed since the match. So the bounds are checked on both sides: against
        // this rank's memory, and against the mapped memory of the other rank.
        let bytes = if is_send { place.bytes } else { other.bytes().min(place.bytes) };
        let (their_address, their_device) = match self.address_of(kept, theirs, other, bytes) {
            Err(why) if why.is_not_supported() && theirs.rank != self.mailboxes.rank() => {
                return self.hand_over(kept, place, theirs, stream, bytes, &why);
            }
            reached => reached?,
        };
        let own_address = match place.through {
            Through::Direct { .. } => place.address,
            Through::Slot => self.mailboxes.inline_address(self.mailboxes.own_id(kept.slot)),
            Through::Bounce(bounce, _) => bounce.address,
            Through::Nothing => 0,
        };
        let device = [place.device, their_device].into_iter().find(|device| !device.is_host()).unwrap_or_else(|| self.node.own_device());
        let (dst, src) = if is_send { (their_address, own_address) } else { (own_address, their_address) };
        let is_small = bytes <= SMALL_BYTES;
        let has_come = if is_small { self.comes(other) } else { other.is_ready() };
        let is_for_cpu = bytes == 0 || bytes <= INLINE_BYTES && place.device.is_host() && their_device.is_host();
        if has_come && is_for_cpu && backend.is_idle(stream) {
            if bytes > 0 {
                copy_host(src, dst, bytes);
            }
            [other, own].into_iter().for_each(MessageSlot::end);
            return Ok(());
        }
        let plan = self.plan_of(dst, src, bytes)?;
        if has_come && is_small {
            return self.move_in(kept, plan, own, other, stream, true);
        }
        let (lane, event) = self.lane(device, kept.slot)?;
        let is_idle = backend.is_idle(stream);
        if !is_idle {
            backend.record_event(event, stream)?;
            backend.stream_wait_event(lane, event)?;
        }
        self.move_in(kept, plan, own, other, lane, has_come)
    }

    /// Returns true if the other rank is ready to move a small message. If the previous call returned true, first polls for up to a few
    /// microseconds until the rank is ready. `other` is the slot of its operation.
    fn comes(&self, other: &MessageSlot) -> bool {
        let until = self.looks_again.load(Ordering::Relaxed).then(|| Instant::now() + SOON);
        while !other.is_ready() && until.is_some_and(|until| Instant::now() < until) {
            std::hint::spin_loop();
        }
        let comes = other.is_ready();
        self.looks_again.store(comes, Ordering::Relaxed);
        comes
    }

    /// Enqueues three operations in `stream`: a wait for the other rank (unless it is ready), the copy, and the signals that end both
    /// operations.
    fn move_in(
        &self,
        kept: &mut Kept,
        plan: Option<Arc<Plan>>,
        own: &MessageSlot,
        other: &MessageSlot,
        stream: StreamHandle,
        has_come: bool,
    ) -> Result<(), Error> {
        let context = &self.node.context;
        if !has_come {
            let by = context.config().signal_wait.unwrap_or_default();
            context.backend().stream_wait_signals(stream, &[raise(&other.ready)], by)?;
        }
        let enqueued = match plan {
            Some(plan) if context.config().verify == Verify::Bytes => plan.execute(stream).map(|verified| kept.verified = Some(verified)),
            Some(plan) => plan.enqueue(stream),
            None => Ok(()),
        };
        // Both operations still end in stream order. A wait that is already in the stream must finish before the stream is reused.
        if let Err(error) = enqueued {
            self.note_failure(own, other, &error);
        }
        self.end_in_order(kept, own, other, stream)
    }

    /// Returns the plan that copies `bytes` bytes from address `src` to `dst`. Returns `None` if `bytes` is 0.
    pub(super) fn plan_of(&self, dst: u64, src: u64, bytes: u64) -> Result<Option<Arc<Plan>>, Error> {
        let transfer = Transfer { dst, dst_device: Transfer::AUTO, src, src_device: Transfer::AUTO, bytes };
        let plan = || self.node.context.plan(&[transfer], &PlanOptions::default());
        (bytes > 0).then(plan).transpose()
    }

    /// Ends both operations of a matched pair after all work enqueued in the stream so far. The stream sets the other rank's flag first,
    /// because each further flag takes 1.5 us on an H200. The other rank can then post its next operation sooner than this rank, whose
    /// stream is still busy.
    pub(super) fn end_in_order(&self, kept: &mut Kept, own: &MessageSlot, other: &MessageSlot, stream: StreamHandle) -> Result<(), Error> {
        let raised = self.node.context.backend().stream_raise_signals(stream, &[other, own].map(|slot| raise(&slot.moved)));
        Ok(raised.inspect_err(|_| {
            self.retire(kept, stream);
            other.let_go();
        })?)
    }

    /// Excludes the stream and the slot of an operation from further use. Called if an error makes it impossible to detect when the
    /// enqueued work ends.
    pub(super) fn retire(&self, kept: &mut Kept, stream: StreamHandle) {
        kept.is_torn = true;
        lock(&self.lanes).iter_mut().filter(|lane| lane.stream == stream).for_each(|lane| lane.is_retired = true);
    }

    /// Returns the address in this process of the memory that the other rank's operation uses, and the device of that memory.
    pub(super) fn address_of(&self, kept: &mut Kept, theirs: SlotId, other: &MessageSlot, bytes: u64) -> Result<(u64, DeviceId), Error> {
        if bytes == 0 {
            return Ok((0, DeviceId::HOST));
        }
        match other.buffer() {
            #[cfg(feature = "fault-injection")]
            SlotBuffer::Memory { device, .. } if device >= 0 && theirs.rank != self.mailboxes.rank() && self.carried.is_refused() => {
                Err(BackendError::NotSupported("a test has refused it".into()).into())
            }
            SlotBuffer::Memory { handle, offset, device } => {
                let imported = self.import(&handle, device)?;
                let Some(address) = imported.range(offset, bytes) else {
                    let why = format!("rank {} announces {bytes} bytes at offset {offset}, which are outside of its memory", theirs.rank);
                    return Err(IpcError::Corrupt(why).into());
                };
                kept.imported = Some(imported);
                Ok((address, self.node.device_here(DeviceId(device))))
            }
            SlotBuffer::Inline if bytes > INLINE_BYTES => Err(IpcError::Corrupt(format!(
                "rank {} announces {bytes} bytes inside a message, which holds at most {INLINE_BYTES} bytes",
                theirs.rank
            ))
            .into()),
            SlotBuffer::Inline => Ok((self.mailboxes.inline_address(theirs), DeviceId::HOST)),
            SlotBuffer::None => Err(BackendError::InvalidPointer(0).into()),
        }
    }

    /// Enqueues a copy of the data of a send into memory of the library, in stream order on the caller's stream.
    pub(super) fn copy_in(&self, slot: u32, place: &MessagePlace, stream: StreamHandle) -> Result<(), Error> {
        let backend = self.node.context.backend();
        let (from, to, bytes) = (place.address, self.through(slot, place), place.bytes);
        let own = self.mailboxes.own(slot);
        if bytes <= INLINE_BYTES && backend.is_idle(stream) {
            copy_host(from, to, bytes);
            [&own.ready, &own.finished].into_iter().for_each(|flag| flag.store(1, Ordering::Release));
            return Ok(());
        }
        // One call sets both flags. With two calls the second could fail, and the end of the first could then not be detected.
        let flags = [&own.ready, &own.finished].map(|flag| raise(flag).counter);
        let copy = move || {
            copy_host(from, to, bytes);
            flags.into_iter().for_each(raise_host);
        };
        Ok(backend.launch_host(stream, Box::new(copy))?)
    }

    /// Arranges that the data of a receive is copied from memory of the library to the caller's memory when it arrives. A thread that waits
    /// for the operation makes the copy, or else the callback thread. No stream waits for the data, because a message may arrive late, and
    /// freeing memory waits for all streams.
    pub(super) fn copy_out(self: &Arc<Self>, kept: &mut Kept, place: &MessagePlace) -> Result<(), Error> {
        let (from, to, bytes) = (self.through(kept.slot, place), place.address, place.bytes);
        let landing = Landing { from, to, bytes, is_claimed: AtomicBool::new(false) };
        let landing = Arc::new(landing);
        let messenger = Arc::downgrade(self);
        let awaited = Arc::new(Landed { messenger, slot: kept.slot, landing: Arc::clone(&landing) });
        let land = Arc::clone(&awaited);
        self.node.context.call_when_done(awaited, Box::new(move |_| drop(land.is_done())))?;
        kept.landing = Some(landing);
        Ok(())
    }

    fn through(&self, slot: u32, place: &MessagePlace) -> u64 {
        place.bounce().map_or_else(|| self.mailboxes.inline_address(self.mailboxes.own_id(slot)), |bounce| bounce.address)
    }

    /// Sets the `ready` flag of the operation in slot `slot`, which signals that this rank is ready for the copy. The stream sets the flag
    /// after its earlier work, or the CPU sets the flag directly if the stream is idle.
    pub(super) fn raise_come(&self, slot: u32, stream: StreamHandle) -> Result<(), Error> {
        let own = self.mailboxes.own(slot);
        let is_small = own.bytes() <= SMALL_BYTES;
        let looks = if is_small && self.looks_again.load(Ordering::Relaxed) { LOOKS } else { 1 };
        let is_idle = (0..looks).any(|_| self.node.context.backend().is_idle(stream));
        if is_small {
            self.looks_again.store(is_idle, Ordering::Relaxed);
        }
        if is_idle {
            own.ready.store(1, Ordering::Release);
            return Ok(());
        }
        Ok(self.node.context.backend().stream_raise_signals(stream, &[raise(&own.ready)])?)
    }

    /// True if the last operation in an internal stream has ended.
    fn is_idle(&self, lane: &MessageLane) -> bool {
        lane.last.is_none_or(|(slot, uses)| {
            let own = self.mailboxes.own(slot);
            own.uses() != uses || own.has_moved()
        })
    }

    /// Returns an internal stream without an operation in progress, and the event of that stream, for the operation in slot `slot`.
    pub(super) fn lane(&self, device: DeviceId, slot: u32) -> Result<(StreamHandle, EventHandle), BackendError> {
        let backend = self.node.context.backend();
        let last = Some((slot, self.mailboxes.own(slot).uses()));
        let mut lanes = lock(&self.lanes);
        if let Some(lane) = lanes.iter_mut().find(|lane| lane.device == device && !lane.is_retired && self.is_idle(lane)) {
            lane.last = last;
            return Ok((lane.stream, lane.event));
        }
        let stream = backend.create_stream(device)?;
        let event = backend.create_event().inspect_err(|_| drop(backend.destroy_stream(stream)))?;
        lanes.push(MessageLane { stream, event, device, last, is_retired: false });
        Ok((stream, event))
    }

    /// Destroys all internal streams of the messenger. Work that is already enqueued still finishes.
    pub(super) fn end_lanes(&self) {
        let backend = self.node.context.backend();
        for lane in lock(&self.lanes).drain(..) {
            for result in [backend.destroy_stream(lane.stream), backend.destroy_event(lane.event)] {
                result.unwrap_or_else(|error| log::debug!("could not destroy a stream of a messenger: {error}"));
            }
        }
    }
}

impl MessageLane {
    /// Returns a completion of all work that has been enqueued in this internal stream so far.
    pub(super) fn mark(&self, backend: &dyn Backend) -> Result<Completion, Error> {
        mark(backend, self.stream)
    }
}

/// Returns a completion of all work that has been enqueued in `stream` so far.
pub(super) fn mark(backend: &dyn Backend, stream: StreamHandle) -> Result<Completion, Error> {
    backend.mark_end(stream, &[], Report::End)?.ok_or_else(|| no_completion().into())
}
