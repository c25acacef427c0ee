//! Handles messages for which the rank that should make the copy cannot map the other rank's memory. The other rank makes the copy instead.
//! This happens for example if another library in the process already has that memory open.
//!
//! The rank that should make the copy (the mover) sends a request to the other rank. The other rank maps host memory only: the mover's own
//! memory, or a bounce buffer of the library. An internal stream of the mover fills the bounce buffer before the copy or empties it
//! afterwards. The request uses the shared memory that also reports the end of a rank. The other rank makes the copy on its callback
//! thread. Its service thread must not do this, because mapping may need the mover's service thread, and service threads must not wait for
//! each other.

use super::Messenger;
use super::buffers::{ImportedBuffer, MessagePlace, Through};
use super::movement::raise;
use super::operation::Kept;
use crate::backend::{BackendError, StreamHandle};
use crate::contexts::Error;
use crate::ipc::{Departure, MessageSlot, SlotBuffer, SlotId, SlotState};
use crate::sync::{Mutex, lock};
use crate::topology::DeviceId;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

/// Memory of a send or receive, as recorded by this rank. The operation's slot in shared memory contains it too, but is not trusted,
/// because every rank can write to it.
#[derive(Debug, Default)]
struct OwnMemory {
    address: AtomicU64,
    bytes: AtomicU64,
    device: AtomicI32,
    is_send: AtomicBool,
    /// True once this rank has begun to make the copy of this send or receive.
    is_moving: AtomicBool,
}

/// State of messages for which this rank makes the copy at the request of another rank: the memory of all operations, and the requests.
#[derive(Debug, Default)]
pub(super) struct Carried {
    /// Memory of the operation in each slot, indexed by slot number.
    memory: Box<[OwnMemory]>,
    /// Pending requests to make a copy: the slot of this rank's operation, and the rank that has sent the request.
    asked: Mutex<Vec<(u32, u32)>>,
    /// Memory of other ranks that requested copies use, keyed by slot number. The memory stays mapped until this rank makes the next
    /// requested copy for that slot.
    imported: Mutex<HashMap<u32, Arc<ImportedBuffer>>>,
    has_warned: AtomicBool,
    #[cfg(feature = "fault-injection")]
    is_refused: AtomicBool,
}

impl Carried {
    pub fn new(slots: u32) -> Carried {
        Carried { memory: (0..slots).map(|_| OwnMemory::default()).collect(), ..Carried::default() }
    }

    /// Records the memory of the operation in slot `slot`, before other ranks see the operation.
    pub fn note(&self, slot: u32, place: &MessagePlace) {
        let Some(memory) = self.memory.get(slot as usize) else { return };
        let address = if matches!(place.through, Through::Direct { .. }) { place.address } else { 0 };
        memory.address.store(address, Ordering::Relaxed);
        memory.bytes.store(place.bytes, Ordering::Relaxed);
        memory.device.store(place.device.0, Ordering::Relaxed);
        memory.is_send.store(place.is_send, Ordering::Relaxed);
        memory.is_moving.store(false, Ordering::Relaxed);
    }

    /// True if a test has forbidden this rank to map GPU memory of other ranks.
    #[cfg(feature = "fault-injection")]
    pub fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    /// Records that this rank begins to make the copy of the operation in slot `slot`.
    pub fn begin(&self, slot: u32) {
        self.memory.get(slot as usize).into_iter().for_each(|memory| memory.is_moving.store(true, Ordering::Relaxed));
    }

    /// True if this rank has begun to make the copy of the operation in slot `slot`. If the result is false and the process of the other
    /// rank has ended, no rank makes the copy.
    pub fn is_moving(&self, slot: u32) -> bool {
        self.memory.get(slot as usize).is_some_and(|memory| memory.is_moving.load(Ordering::Relaxed))
    }
}

impl Messenger {
    /// Requests that the other rank make the copy of a matched send and receive. `why` is the reason why this rank cannot map the other
    /// rank's memory.
    pub(super) fn hand_over(
        &self,
        kept: &mut Kept,
        place: &MessagePlace,
        theirs: SlotId,
        stream: StreamHandle,
        bytes: u64,
        why: &Error,
    ) -> Result<(), Error> {
        let level = if self.carried.has_warned.swap(true, Ordering::Relaxed) { log::Level::Debug } else { log::Level::Warn };
        log::log!(level, "messages of rank {} pass through host memory: {why}", theirs.rank);
        let own = self.mailboxes.own(kept.slot);
        if matches!(place.through, Through::Direct { .. }) && !place.device.is_host() {
            self.pass_through_host(kept, place, own, stream, bytes)?;
        } else if !(place.is_send && place.is_buffered()) {
            kept.comes = true;
            self.raise_come(kept.slot, stream)?;
        }
        [own, self.mailboxes.slot(theirs)].into_iter().for_each(|slot| slot.give_to(theirs.rank));
        let ask = Departure { steps: u64::from(theirs.slot) + 1, ..Departure::default() };
        self.node.context.state().leave_memory(self.mailboxes.address(theirs.rank), ask);
        Ok(())
    }

    /// Replaces the memory of this rank's operation by a bounce buffer in host memory, and enqueues the copy between that memory and the
    /// bounce buffer in an internal stream.
    fn pass_through_host(
        &self,
        kept: &mut Kept,
        place: &MessagePlace,
        own: &MessageSlot,
        stream: StreamHandle,
        bytes: u64,
    ) -> Result<(), Error> {
        let backend = self.node.context.backend();
        // The operation has already matched, so it must not fail because of the limit on bounce buffers.
        let bounce = self.take_bounce(bytes, place.is_send, u64::MAX)?;
        // The buffer is released together with the slot.
        kept.bounce = Some(bounce);
        let handle = self.export_bounce(bounce)?;
        let (src, dst) = if place.is_send { (place.address, bounce.address) } else { (bounce.address, place.address) };
        let plan = self.plan_of(dst, src, bytes)?;
        let (lane, event) = self.lane(place.device, kept.slot)?;
        if !backend.is_idle(stream) {
            backend.record_event(event, stream)?;
            backend.stream_wait_event(lane, event)?;
        }
        own.move_to(&SlotBuffer::Memory { handle, offset: 0, device: DeviceId::HOST.0 });
        let copy = || plan.as_ref().map_or(Ok(()), |plan| plan.enqueue(lane));
        if place.is_send {
            copy()?;
            kept.comes = true;
            return Ok(backend.stream_raise_signals(lane, &[raise(&own.ready)])?);
        }
        // The other rank's copy ends when the data is in the bounce buffer. The internal stream of this rank ends the operation after the
        // second copy.
        (kept.is_buffered, kept.comes) = (true, true);
        own.pass_through();
        own.ready.store(1, Ordering::Release);
        let emptied = backend
            .stream_wait_signals(lane, &[raise(&own.moved)], self.node.context.config().signal_wait.unwrap_or_default())
            .map_err(Error::from)
            .and_then(|()| copy())
            .and_then(|()| Ok(backend.stream_raise_signals(lane, &[raise(&own.finished)])?));
        emptied.inspect_err(|_| {
            self.retire(kept, lane);
            own.finished.store(1, Ordering::Release);
        })
    }

    /// Accepts the request of rank `rank` to make the copy of the operation in slot `slot`. The callback thread makes the copy.
    pub(super) fn take_over(self: &Arc<Self>, slot: u64, rank: u32) {
        let Some(slot) = u32::try_from(slot).ok().filter(|slot| *slot < self.capacity.slots()) else { return };
        let mut asked = lock(&self.carried.asked);
        if !asked.contains(&(slot, rank)) {
            asked.push((slot, rank));
        }
        drop(asked);
        let messenger = Arc::downgrade(self);
        let carry = move || messenger.upgrade().into_iter().for_each(|messenger| messenger.carry_asked());
        if let Err(error) = self.node.context.state().call_soon(carry) {
            // A messenger that is being destroyed looks for pending requests by itself.
            log::debug!("could not move bytes for rank {rank}: {error}");
        }
    }

    /// Makes the copies that other ranks have requested.
    pub(super) fn carry_asked(&self) {
        let Ok(_open) = self.enter() else { return };
        loop {
            let Some((slot, rank)) = lock(&self.carried.asked).pop() else { return };
            let own = self.mailboxes.own(slot);
            let is_ours = own.state() == SlotState::Matched && own.mover() == Some(self.mailboxes.rank()) && !own.has_moved();
            if let Some(theirs) = own.partner().filter(|theirs| is_ours && theirs.rank == rank)
                && let Err(error) = self.carry(slot, theirs)
            {
                self.fail_both(own, self.mailboxes.slot(theirs), &error);
            }
        }
    }

    fn carry(&self, slot: u32, theirs: SlotId) -> Result<(), Error> {
        let backend = self.node.context.backend();
        let (own, other) = (self.mailboxes.own(slot), self.mailboxes.slot(theirs));
        let memory = self.carried.memory.get(slot as usize).filter(|memory| memory.address.load(Ordering::Relaxed) != 0);
        self.carried.begin(slot);
        let Some(memory) = memory else { return Err(BackendError::InvalidPointer(0).into()) };
        let (address, device) = (memory.address.load(Ordering::Relaxed), DeviceId(memory.device.load(Ordering::Relaxed)));
        let (is_send, bytes) = (memory.is_send.load(Ordering::Relaxed), memory.bytes.load(Ordering::Relaxed));
        let bytes = if is_send { bytes } else { bytes.min(other.bytes()) };
        let mut kept = Kept { slot, ..Kept::default() };
        let (their_address, their_device) = self.address_of(&mut kept, theirs, other, bytes)?;
        kept.imported.iter().for_each(|imported| _ = lock(&self.carried.imported).insert(slot, Arc::clone(imported)));
        let (src, dst) = if is_send { (address, their_address) } else { (their_address, address) };
        let device = [device, their_device].into_iter().find(|device| !device.is_host()).unwrap_or_else(|| self.node.own_device());
        let plan = self.plan_of(dst, src, bytes)?;
        let (lane, _) = self.lane(device, slot)?;
        let awaited: Vec<_> = [own, other].iter().filter(|slot| !slot.is_ready()).map(|slot| raise(&slot.ready)).collect();
        if !awaited.is_empty() {
            backend.stream_wait_signals(lane, &awaited, self.node.context.config().signal_wait.unwrap_or_default())?;
        }
        // Both operations end in stream order even if the copy fails, because the internal stream may already be waiting.
        if let Err(error) = plan.map_or(Ok(()), |plan| plan.enqueue(lane)) {
            self.note_failure(own, other, &error);
        }
        self.end_in_order(&mut kept, own, other, lane)
    }

    /// Forbids mapping of other ranks' GPU memory from now on.
    #[cfg(feature = "fault-injection")]
    pub fn refuse_mapping(&self) {
        self.carried.is_refused.store(true, Ordering::Relaxed);
    }
}
