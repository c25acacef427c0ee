//! Implements the calls of a messenger (endpoint for messages): send, receive, probe for a message, describe a buffer, and fetch a
//! described buffer.

use super::buffers::MessagePlace;
use super::operation::{Kept, Operation};
use super::{Messenger, captured, destroyed, gone, stuck};
use crate::backend::{BackendError, StreamHandle};
use crate::contexts::Error;
use crate::ipc::mailbox::Posted;
use crate::ipc::{Envelope, METADATA_BYTES, Pattern, Preparation, SlotId, SlotState, SlotStatus};
use crate::rank;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Message to send: its memory, its receiver, its tag and its metadata.
#[derive(Copy, Clone, Debug)]
pub struct Outgoing<'a> {
    /// Address of the first byte of the message to send.
    pub address: u64,
    /// Size of the message in bytes.
    pub bytes: u64,
    /// Rank that receives the message.
    pub rank: u32,
    /// Tag of the message, by which a receive selects it.
    pub tag: u64,
    /// User data that is delivered together with the message.
    pub metadata: &'a [u8],
}

/// Size in bytes of an encoded [`Descriptor`].
pub const DESCRIPTOR_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"mpgpu-md";

/// Description of a buffer. One other rank of the node may fetch the buffer, once. The description contains no pointers and can be sent as
/// bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Identifier of the messenger (endpoint for messages), equal on all its ranks.
    messenger: u64,
    slot: SlotId,
    /// Number of times that the slot had been used when the buffer was described. If the number is larger now, the slot belongs to another
    /// operation and the description is no longer valid.
    uses: u64,
    /// Size in bytes of the buffer that this descriptor describes.
    pub bytes: u64,
}

impl Descriptor {
    /// Returns the description of the buffer as bytes, which can be sent to another rank.
    pub fn encode(&self) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        let words = [self.messenger, u64::from(self.slot.rank) << 32 | u64::from(self.slot.slot), self.uses, self.bytes];
        bytes[..8].copy_from_slice(&MAGIC);
        for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words.into_iter().chain([checksum(&words)])) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Decodes the description of a buffer. Fails if the bytes are damaged or are not a description.
    pub fn decode(bytes: &[u8; DESCRIPTOR_BYTES]) -> Result<Descriptor, Error> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[8 * at + byte]));
        let words = [word(1), word(2), word(3), word(4)];
        if bytes[..8] != MAGIC || word(5) != checksum(&words) {
            let reason = "the bytes are not a valid message descriptor".into();
            return Err(Error::NodeArgument { argument: c"descriptor", reason });
        }
        let [messenger, slot, uses, bytes] = words;
        Ok(Descriptor { messenger, slot: SlotId { rank: (slot >> 32) as u32, slot: slot as u32 }, uses, bytes })
    }
}

/// Returns a checksum of `words` (FNV-1a over 64-bit words), by which damaged descriptors are detected.
fn checksum(words: &[u64]) -> u64 {
    words.iter().fold(0xcbf2_9ce4_8422_2325, |sum: u64, word| (sum ^ word).wrapping_mul(0x100_0000_01b3).rotate_left(29))
}

impl Messenger {
    /// Sends a message. The data is read after all earlier work in `stream`. The returned operation ends when the message's memory may be
    /// used again.
    pub fn send(self: &Arc<Self>, message: &Outgoing<'_>, stream: StreamHandle) -> Result<Arc<Operation>, Error> {
        self.post(stream, || self.send_in(message, stream))
    }

    fn send_in(self: &Arc<Self>, message: &Outgoing<'_>, stream: StreamHandle) -> Result<Arc<Operation>, Error> {
        let Outgoing { address, bytes, rank, tag, metadata } = *message;
        self.check_rank(rank)?;
        if metadata.len() > METADATA_BYTES {
            let reason = format!("metadata_bytes={}: must be at most {METADATA_BYTES}", metadata.len());
            return Err(Error::NodeArgument { argument: c"metadata_bytes", reason });
        }
        if self.is_known_gone(rank) {
            return Err(gone(rank));
        }
        let place = self.place(address, bytes, true)?;
        let mut kept = self.prepare(&place, Some(rank), (tag, u64::MAX), metadata, true)?;
        let slot = kept.slot;
        let posted = self.mailboxes.send(rank, slot, &|rank| self.is_gone(rank));
        if let Posted::Full | Posted::Closed | Posted::Stuck = posted {
            self.give_back_unused(kept);
            let full = || {
                Error::QueueFull(format!(
                    "{} messages of this rank wait for receives of rank {rank}, which has no room for more: receive the messages sent to this \
                     rank, and send again when rank {rank} has received some; or create the messenger with room for more messages",
                    self.capacity.messages
                ))
            };
            return Err(match posted {
                Posted::Full => full(),
                Posted::Stuck => stuck(rank),
                _ => gone(rank),
            });
        }
        self.enqueue_send(&mut kept, &place, posted, stream)?;
        self.check_gone(slot, rank);
        Ok(Operation::new(self, slot, kept))
    }

    /// Receives a message that `pattern` accepts into the `bytes` bytes at `address`. The data is written after all earlier work in
    /// `stream`. The returned operation ends when the data has arrived.
    pub fn receive(self: &Arc<Self>, address: u64, bytes: u64, pattern: &Pattern, stream: StreamHandle) -> Result<Arc<Operation>, Error> {
        self.post(stream, || self.receive_in(address, bytes, pattern, stream))
    }

    fn receive_in(self: &Arc<Self>, address: u64, bytes: u64, pattern: &Pattern, stream: StreamHandle) -> Result<Arc<Operation>, Error> {
        pattern.source.map_or(Ok(()), |rank| self.check_rank(rank))?;
        let place = self.place(address, bytes, false)?;
        let mut kept = self.prepare(&place, pattern.source, (pattern.tag, pattern.mask), &[], false)?;
        let slot = kept.slot;
        if place.is_buffered()
            && let Err(error) = self.copy_out(&mut kept, &place)
        {
            self.give_back_unused(kept);
            return Err(error);
        }
        match self.mailboxes.receive(slot, &|rank| self.is_gone(rank)) {
            Posted::Matched(theirs) => self.start(&mut kept, &place, theirs, stream),
            Posted::Queued => {
                self.offer_memory(&mut kept, stream)?;
                if let Some(rank) = pattern.source.filter(|rank| self.is_known_gone(*rank))
                    && self.withdraw(slot, SlotStatus::PeerGone)
                {
                    self.spend(kept);
                    return Err(gone(rank));
                }
            }
            Posted::Stuck => {
                self.give_back_unused(kept);
                return Err(stuck(self.mailboxes.rank()));
            }
            Posted::Truncated | Posted::Full | Posted::Closed => {}
        }
        Ok(Operation::new(self, slot, kept))
    }

    /// Returns the envelope (sender, tag, size, metadata) of the first message that a receive with this pattern would match now. Returns
    /// `None` if there is no such message. The message stays queued.
    pub fn probe(&self, pattern: &Pattern) -> Result<Option<Envelope>, Error> {
        let _open = self.enter()?;
        pattern.source.map_or(Ok(()), |rank| self.check_rank(rank))?;
        let found = self.mailboxes.probe(pattern, &|rank| self.is_gone(rank));
        match pattern.source.filter(|rank| found.is_none() && self.is_known_gone(*rank)) {
            Some(rank) => Err(gone(rank)),
            None => Ok(found),
        }
    }

    /// Describes a buffer that another rank may fetch. The data is read after all earlier work in `stream`. The returned operation ends
    /// when the buffer was fetched and may be used again.
    pub fn describe(self: &Arc<Self>, address: u64, bytes: u64, stream: StreamHandle) -> Result<(Descriptor, Arc<Operation>), Error> {
        self.post(stream, || self.describe_in(address, bytes, stream))
    }

    fn describe_in(self: &Arc<Self>, address: u64, bytes: u64, stream: StreamHandle) -> Result<(Descriptor, Arc<Operation>), Error> {
        let place = self.place(address, bytes, true)?;
        let mut kept = self.prepare(&place, None, (0, 0), &[], true)?;
        let (slot, own) = (kept.slot, self.mailboxes.own(kept.slot));
        let offered = if place.is_buffered() { self.copy_in(slot, &place, stream) } else { self.raise_come(slot, stream) };
        kept.comes = true;
        if let Err(error) = offered {
            self.give_back_unused(kept);
            return Err(error);
        }
        own.describe();
        let descriptor = Descriptor { messenger: self.id, slot: self.mailboxes.own_id(slot), uses: own.uses(), bytes };
        Ok((descriptor, Operation::new(self, slot, kept)))
    }

    /// Fetches a buffer that another rank has described by [`describe`](Messenger::describe). The data is written after all earlier work in
    /// `stream`. The returned operation ends when the data has arrived.
    pub fn fetch(
        self: &Arc<Self>,
        descriptor: &Descriptor,
        address: u64,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<Arc<Operation>, Error> {
        self.post(stream, || self.fetch_in(descriptor, address, bytes, stream))
    }

    fn fetch_in(
        self: &Arc<Self>,
        descriptor: &Descriptor,
        address: u64,
        bytes: u64,
        stream: StreamHandle,
    ) -> Result<Arc<Operation>, Error> {
        let refuse = |reason: String| Err(Error::NodeArgument { argument: c"descriptor", reason });
        let Descriptor { messenger, slot: theirs, uses, bytes: size } = *descriptor;
        if messenger != self.id || theirs.rank >= self.mailboxes.ranks() || theirs.slot >= self.mailboxes.slots() {
            return refuse(
                "the descriptor was made by a messenger that is not connected to this messenger: use messengers that all ranks have \
                 created in the same collective call"
                    .into(),
            );
        }
        if size > bytes {
            let why = format!(
                "the descriptor announces a message of {size} bytes, but the buffer has {bytes}; fetch the message into a larger buffer"
            );
            return Err(BackendError::Truncated(why).into());
        }
        if self.is_known_gone(theirs.rank) {
            return Err(gone(theirs.rank));
        }
        let place = self.place(address, bytes, false)?;
        let mut kept = self.prepare(&place, Some(theirs.rank), (0, 0), &[], false)?;
        let (slot, own, described) = (kept.slot, self.mailboxes.own(kept.slot), self.mailboxes.slot(theirs));
        if !described.take_described(uses, self.mailboxes.own_id(slot)) {
            self.give_back_unused(kept);
            return refuse("the message that this descriptor announces was already fetched, or was cancelled".into());
        }
        described.match_taken(self.mailboxes.rank());
        own.meet(described);
        own.join(theirs, self.mailboxes.rank());
        own.match_taken(self.mailboxes.rank());
        match if place.is_buffered() { self.copy_out(&mut kept, &place) } else { Ok(()) } {
            Ok(()) => self.start(&mut kept, &place, theirs, stream),
            Err(error) => {
                own.finished.store(1, Ordering::Release);
                self.fail_both(own, described, &error);
            }
        }
        self.check_gone(slot, theirs.rank);
        Ok(Operation::new(self, slot, kept))
    }

    /// Ends the operation in this rank's slot `slot` with the reason `status` if the operation has not matched. Returns true if it was
    /// ended.
    pub(super) fn withdraw(&self, slot: u32, status: SlotStatus) -> bool {
        let own = self.mailboxes.own(slot);
        if own.state() == SlotState::Described {
            let id = self.mailboxes.own_id(slot);
            let taken = own.take_described(own.uses(), id);
            if taken {
                own.end_as(status);
            }
            return taken;
        }
        let of = if own.is_send() { own.peer() } else { Some(self.mailboxes.rank()) };
        of.is_some_and(|of| self.mailboxes.withdraw(of, slot, status, &|rank| self.is_gone(rank)))
    }

    /// Enqueues the work of a send in the caller's stream. If this fails before the send has matched, nothing is sent and the error is
    /// returned. If this fails after the send has matched, the error becomes the outcome of the send.
    fn enqueue_send(&self, kept: &mut Kept, place: &MessagePlace, posted: Posted, stream: StreamHandle) -> Result<(), Error> {
        let slot = kept.slot;
        let copied = if place.is_buffered() { self.copy_in(slot, place, stream) } else { Ok(()) };
        kept.comes = place.is_buffered();
        match (posted, copied) {
            (Posted::Matched(theirs), Ok(())) => self.start(kept, place, theirs, stream),
            (_, Ok(())) if place.is_buffered() => {}
            (_, Ok(())) => self.offer_memory(kept, stream)?,
            (_, Err(error)) => return self.retract(kept, error),
        }
        Ok(())
    }

    /// Enqueues the signal that sets the operation's `ready` flag after all earlier work in `stream`. The flag allows the rank that makes
    /// the copy to begin.
    fn offer_memory(&self, kept: &mut Kept, stream: StreamHandle) -> Result<(), Error> {
        kept.comes = true;
        self.raise_come(kept.slot, stream).or_else(|error| self.retract(kept, error))
    }

    /// Withdraws a published operation that its stream will never reach, and returns `error`. If another rank has matched the operation
    /// meanwhile, both operations fail instead. They fail only after any copy in progress, because the copy uses the memory until then.
    fn retract(&self, kept: &mut Kept, error: Error) -> Result<(), Error> {
        let own = self.mailboxes.own(kept.slot);
        let withdrawn = self.withdraw(kept.slot, SlotStatus::Cancelled);
        if !withdrawn {
            for slot in own.partner().map(|partner| self.mailboxes.slot(partner)).into_iter().chain([own]) {
                slot.fail(SlotStatus::Failed, &error.to_string());
            }
        }
        own.ready.store(1, Ordering::Release);
        if own.is_send() {
            // The flag of a receive is not set here. The receive's own stream sets it after it has seen the end; only then may the slot be
            // reused.
            own.finished.store(1, Ordering::Release);
        }
        if own.partner().is_some_and(|_| own.mover() == Some(self.mailboxes.rank())) {
            own.partner().into_iter().for_each(|partner| self.mailboxes.slot(partner).end());
            own.end();
        }
        if withdrawn {
            self.spend(std::mem::take(kept));
            return Err(error);
        }
        Ok(())
    }

    /// Prepares a free slot for an operation, and returns the resources that the operation holds.
    fn prepare(
        &self,
        place: &MessagePlace,
        peer: Option<u32>,
        (tag, mask): (u64, u64),
        metadata: &[u8],
        is_send: bool,
    ) -> Result<Kept, Error> {
        let bounce = place.bounce();
        let slot = self.take_slot(is_send).inspect_err(|_| bounce.into_iter().for_each(|bounce| self.give_bounce_back(bounce)))?;
        let (bytes, buffer, is_buffered) = (place.bytes, place.slot_buffer(), place.is_buffered());
        let preparation = Preparation { peer, tag, mask, bytes, buffer, metadata, is_send, is_buffered };
        self.carried.note(slot, place);
        self.mailboxes.own(slot).prepare(self.mailboxes.rank(), &preparation);
        Ok(Kept { slot, bounce, is_buffered, ..Kept::default() })
    }

    /// Releases the slot and the resources of an operation that no other rank has seen.
    fn give_back_unused(&self, kept: Kept) {
        let own = self.mailboxes.own(kept.slot);
        for flag in [&own.ready, &own.moved, &own.finished] {
            flag.store(1, Ordering::Release);
        }
        self.spend(kept);
    }

    fn check_rank(&self, rank: u32) -> Result<(), Error> {
        let refused = rank::refuse("rank", rank, self.mailboxes.ranks());
        refused.map_or(Ok(()), |reason| Err(Error::NodeArgument { argument: c"rank", reason }))
    }

    /// Calls `work`, which posts an operation, and keeps the mailboxes of all ranks mapped during the call. Returns an error if the
    /// messenger was destroyed, or if `stream` is being captured.
    fn post<T>(&self, stream: StreamHandle, work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let open = self.enter()?;
        if self.is_ending.load(Ordering::SeqCst) {
            return Err(destroyed());
        }
        let (mut work, mut posted) = (Some(work), None);
        open.backend().in_stream(stream, &mut |is_captured| posted = work.take().filter(|_| !is_captured).map(|work| work()))?;
        posted.unwrap_or_else(|| Err(captured()))
    }
}
