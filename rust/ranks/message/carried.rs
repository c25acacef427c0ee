//! Messages whose mover cannot map the other side's memory, say because another library of its process has that memory open: the other rank
//! moves their bytes in its place.
//!
//! The mover hands its role over and asks. What the other rank is to map is host memory: the mover's own, or a piece of the library's, which a
//! lane of the mover fills before or empties afterwards. The other rank is asked through the memory by which its end is noticed, and moves the
//! bytes on its thread of callbacks, because mapping may ask this rank's service thread, which must not wait for another.

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

/// Memory of an operation, as this rank has noted it: every rank can write the slot.
#[derive(Debug, Default)]
struct OwnMemory {
    address: AtomicU64,
    bytes: AtomicU64,
    device: AtomicI32,
    is_send: AtomicBool,
    /// This rank moves its bytes, or has.
    is_moving: AtomicBool,
}

/// What other ranks may ask for, and have asked for.
#[derive(Debug, Default)]
pub(super) struct Carried {
    /// By slot.
    memory: Box<[OwnMemory]>,
    /// Slots, and who has asked.
    asked: Mutex<Vec<(u32, u32)>>,
    /// By slot, until the next of its operations that is carried.
    imported: Mutex<HashMap<u32, Arc<ImportedBuffer>>>,
    has_warned: AtomicBool,
    #[cfg(feature = "fault-injection")]
    is_refused: AtomicBool,
}

impl Carried {
    pub fn new(slots: u32) -> Carried {
        Carried { memory: (0..slots).map(|_| OwnMemory::default()).collect(), ..Carried::default() }
    }

    /// Notes the memory of an operation before others see it.
    pub fn note(&self, slot: u32, place: &MessagePlace) {
        let Some(memory) = self.memory.get(slot as usize) else { return };
        let address = if matches!(place.through, Through::Direct { .. }) { place.address } else { 0 };
        memory.address.store(address, Ordering::Relaxed);
        memory.bytes.store(place.bytes, Ordering::Relaxed);
        memory.device.store(place.device.0, Ordering::Relaxed);
        memory.is_send.store(place.is_send, Ordering::Relaxed);
        memory.is_moving.store(false, Ordering::Relaxed);
    }

    /// Whether a test has no memory of another rank's GPU mapped.
    #[cfg(feature = "fault-injection")]
    pub fn is_refused(&self) -> bool {
        self.is_refused.load(Ordering::Relaxed)
    }

    /// This rank begins to move the bytes of an operation.
    pub fn begin(&self, slot: u32) {
        self.memory.get(slot as usize).into_iter().for_each(|memory| memory.is_moving.store(true, Ordering::Relaxed));
    }

    /// Whether it has begun. What another rank was to ask for is asked for by nobody where it has died before.
    pub fn is_moving(&self, slot: u32) -> bool {
        self.memory.get(slot as usize).is_some_and(|memory| memory.is_moving.load(Ordering::Relaxed))
    }
}

impl Messenger {
    /// Has the other rank move the bytes of a match that this rank has made, and whose other side it cannot map (`why`).
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
        let watch = {
            // One for each rank but this one.
            let own = self.mailboxes.rank();
            lock(&self.held).watches.get((theirs.rank - u32::from(theirs.rank > own)) as usize).copied()
        };
        let ask = Departure { steps: u64::from(theirs.slot) + 1, ..Departure::default() };
        watch.into_iter().for_each(|watch| self.node.context.state().leave_memory(watch, ask));
        Ok(())
    }

    /// Puts a piece of shared host memory in the place of this rank's end, with a copy between both in a lane.
    fn pass_through_host(
        &self,
        kept: &mut Kept,
        place: &MessagePlace,
        own: &MessageSlot,
        stream: StreamHandle,
        bytes: u64,
    ) -> Result<(), Error> {
        let backend = self.node.context.backend();
        let bounce = self.take_bounce(bytes)?;
        // It goes back with the slot.
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
        // The other rank ends the movement when the bytes are in the piece, and the lane the operation.
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

    /// Another rank asks this one to move the bytes of an operation.
    pub(super) fn take_over(self: &Arc<Self>, slot: u64, rank: u32) {
        let Some(slot) = u32::try_from(slot).ok().filter(|slot| *slot < self.capacity.slots) else { return };
        let mut asked = lock(&self.carried.asked);
        if !asked.contains(&(slot, rank)) {
            asked.push((slot, rank));
        }
        drop(asked);
        let messenger = Arc::downgrade(self);
        let carry = move || messenger.upgrade().into_iter().for_each(|messenger| messenger.carry_asked());
        if let Err(error) = self.node.context.state().call_soon(carry) {
            // A messenger that is being destroyed looks by itself.
            log::debug!("moving bytes for rank {rank}: {error}");
        }
    }

    /// Moves what other ranks have asked for.
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
        // Both end in stream order, whatever becomes of the copy: the lane may be waiting.
        if let Err(error) = plan.map_or(Ok(()), |plan| plan.enqueue(lane)) {
            self.note_failure(own, other, &error);
        }
        self.end_in_order(&mut kept, own, other, lane)
    }

    /// From now on no memory of another rank's GPU can be mapped here.
    #[cfg(feature = "fault-injection")]
    pub fn refuse_mapping(&self) {
        self.carried.is_refused.store(true, Ordering::Relaxed);
    }
}
