//! Defines the slots through which the ranks of a node coordinate sends and receives. Each slot is a record of one send or receive in
//! shared memory, visible to all ranks.
//!
//! Streams set the flags of a slot, so the flags are at its start. A slot belongs to the rank in whose memory it is, and only that rank
//! prepares and reuses it. Other ranks match the slot under the lock of the mailbox in which it is published, and set its flags.

use crate::sync::{AtomicU64, Ordering};
use std::sync::atomic::AtomicU64 as Plain;

/// Maximum size in bytes of the metadata that is sent with a message.
pub const METADATA_BYTES: usize = 256;

/// Maximum size in bytes of a message in host memory whose data is stored in the slot of the send (its record in shared memory).
pub const INLINE_BYTES: u64 = 1024;

const TEXT_BYTES: usize = 192;

/// Value of a flag that was set to release the streams that wait for it, although the awaited event has not happened. The rank that is
/// responsible for the flag still sets it to 1 later.
const RELEASED: u64 = 2;

/// Bit in the `partner` word of a slot that marks a published buffer, which other ranks may fetch.
const DESCRIBED: u64 = 1 << 63;

/// Identifier of a slot (record of one send or receive in shared memory). It is valid on all ranks of a node.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct SlotId {
    /// Rank to which the slot belongs, and in whose memory the slot is.
    pub rank: u32,
    /// Index of the slot among the slots of the rank to which it belongs.
    pub slot: u32,
}

impl SlotId {
    /// Returns the id as a nonzero number for storage in shared memory.
    pub(super) fn encode(self) -> u64 {
        (u64::from(self.rank) + 1) << 32 | u64::from(self.slot)
    }

    pub(super) fn decode(word: u64) -> Option<SlotId> {
        let rank = ((word >> 32) as u32).checked_sub(1).filter(|_| word & DESCRIBED == 0)?;
        Some(SlotId { rank, slot: word as u32 })
    }
}

/// State of the send or receive in a slot, with the number used in shared memory. A slot that was never used has state 0.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum SlotState {
    /// The slot is unused, or a send or receive is being prepared in it.
    Free = 0,
    /// The send or receive in the slot is queued in a mailbox and not yet matched.
    Queued = 1,
    /// The buffer that the slot describes is published, so that another rank may fetch it.
    Described = 2,
    /// The send or receive in the slot is matched. The data is being copied or has been copied.
    Matched = 3,
    /// The send or receive in the slot has ended without a match.
    Ended = 4,
}

/// Reason why a send or receive has moved no data. [`SlotStatus::Fine`] if it has not failed.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum SlotStatus {
    /// The send or receive has not failed: its data was moved or will be moved.
    Fine = 0,
    /// The rank of the matching operation has exited or has closed its mailbox.
    PeerGone = 1,
    /// The message is longer than the buffer of the matching receive.
    Truncated = 2,
    /// The send or receive was cancelled.
    Cancelled = 3,
    /// The data could not be moved. The text in the slot gives the reason.
    Failed = 4,
}

/// Criteria for the messages that a receive or a probe accepts.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Rank of the accepted sender, or `None` for any sender.
    pub source: Option<u32>,
    /// Accepted tag. Only the bits in `mask` are compared with the tag of a message.
    pub tag: u64,
    /// Bit mask that selects the bits of the tag that are compared.
    pub mask: u64,
}

impl Pattern {
    pub(super) fn accepts(&self, source: u32, tag: u64) -> bool {
        self.source.is_none_or(|wanted| wanted == source) && (tag ^ self.tag) & self.mask == 0
    }
}

/// Description of a send or receive. Its rank writes it to the slot before the slot is published.
#[derive(Copy, Clone, Debug)]
pub struct Preparation<'a> {
    /// Rank to which a send is addressed, or rank from which a receive accepts messages; `None` for any rank.
    pub peer: Option<u32>,
    /// Tag of the message to send, or tag that a receive accepts.
    pub tag: u64,
    /// Bit mask of the tag bits that a receive compares with the tag of a message.
    pub mask: u64,
    /// Size in bytes of the message to send, or of the receive buffer.
    pub bytes: u64,
    /// Location of the data to send, or of the receive buffer. Another rank needs the location to make the copy.
    pub buffer: SlotBuffer,
    /// Metadata that is sent with the message.
    pub metadata: &'a [u8],
    /// True for a send, false for a receive.
    pub is_send: bool,
    /// True if the data passes through memory of the library instead of being copied directly between the callers' buffers.
    pub is_buffered: bool,
}

/// Location of the data of a send or receive.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum SlotBuffer {
    /// The operation has no data, or no data that another rank copies.
    None,
    /// The data is stored in the operation's slot itself.
    Inline,
    /// The data is in memory of a device of the node. Any rank that holds the handle can map this memory.
    Memory {
        /// Handle of the allocation that contains the data of the send or receive.
        handle: [u8; super::handle::BYTES],
        /// Offset in bytes of the first byte of the data from the start of the allocation.
        offset: u64,
        /// Node-wide device number of the device that contains the data.
        device: i32,
    },
}

/// Envelope (sender, tag, size and metadata) of a message, as reported by a receive or a probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Envelope {
    /// Rank that has sent the message.
    pub source: u32,
    /// Tag of the message.
    pub tag: u64,
    /// Size of the message in bytes.
    pub bytes: u64,
    /// Metadata that was sent with the message.
    pub metadata: Vec<u8>,
}

/// Marks a point at which a test may kill the simulated rank while it holds locks. Does nothing outside of tests.
#[cfg(not(test))]
pub(super) fn mortal() {}
#[cfg(test)]
pub(super) use super::mailbox::tests::mortal;

/// Array of `N` 64-bit words in shared memory, which stores up to `8 * N` bytes.
#[derive(Debug)]
#[repr(C)]
struct SlotWords<const N: usize>([Plain; N]);

impl<const N: usize> SlotWords<N> {
    fn store(&self, bytes: &[u8]) {
        for (word, chunk) in self.0.iter().zip(bytes.chunks(8)) {
            let mut eight = [0; 8];
            eight[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
        }
    }

    fn load(&self, bytes: &mut [u8]) {
        for (word, chunk) in self.0.iter().zip(bytes.chunks_mut(8)) {
            chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes()[..chunk.len()]);
        }
    }

    fn copy(&self, from: &SlotWords<N>, bytes: usize) {
        for (to, from) in self.0.iter().zip(&from.0).take(bytes.div_ceil(8)) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

impl<const N: usize> Default for SlotWords<N> {
    fn default() -> Self {
        SlotWords([const { Plain::new(0) }; N])
    }
}

/// Record of one send or receive in shared memory. One rank writes the words of type `Plain` before it publishes the slot or commits a
/// match. Other ranks read these words only afterwards.
///
/// The first cache line is polled by CPU threads that wait, so it contains no word that a match writes.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct MessageSlot {
    /// Flag that is set when the stream of the slot's rank has reached the operation.
    pub ready: Plain,
    /// Flag that is set when the data was moved, or when it is certain that the data will not be moved.
    pub moved: Plain,
    /// Flag that is set when buffered data has left the send buffer of the slot's rank, or has arrived in its receive buffer.
    pub finished: Plain,
    /// Number of times that the slot has been used for an operation.
    uses: AtomicU64,
    is_send: Plain,
    is_buffered: Plain,
    buffer: Plain,
    /// Rank to which a send is addressed, or from which a receive accepts messages, plus 1. 0 for any rank.
    peer: Plain,
    tag: Plain,
    mask: Plain,
    bytes: Plain,
    state: AtomicU64,
    /// Sequence number of the queued operation, by which the lists of a mailbox can be rebuilt.
    pub(super) order: AtomicU64,
    /// Slot of the matching operation, encoded as a number. 0 if there is none. Writing this word in the slot of a receive commits the
    /// match.
    partner: AtomicU64,
    /// Rank that copies the data of the operation in this slot, plus 1. 0 if no rank is assigned yet.
    mover: AtomicU64,
    status: AtomicU64,
    /// Rank of the sender. This word, the next three words and `metadata` are the envelope of the message. A match copies the envelope from
    /// the slot of the send to the slot of the receive.
    source: Plain,
    message_tag: Plain,
    message_bytes: Plain,
    metadata_bytes: Plain,
    offset: Plain,
    device: Plain,
    handle: SlotWords<16>,
    metadata: SlotWords<{ METADATA_BYTES / 8 }>,
    text: SlotWords<{ TEXT_BYTES / 8 }>,
    inline: SlotWords<{ INLINE_BYTES as usize / 8 }>,
}

fn is_raised(flag: &Plain) -> bool {
    !matches!(flag.load(Ordering::Acquire), 0 | RELEASED)
}

impl MessageSlot {
    /// Offset in bytes, from the start of a slot, of the message data that the slot contains.
    pub(super) const INLINE_OFFSET: u64 = std::mem::offset_of!(MessageSlot, inline) as u64;

    /// Prepares the slot for a new operation of rank `rank`. Only the slot's own rank calls this function. No other rank reads the slot
    /// until it is published.
    pub fn prepare(&self, rank: u32, of: &Preparation<'_>) {
        for flag in [&self.ready, &self.moved, &self.finished] {
            flag.store(0, Ordering::Relaxed);
        }
        self.partner.store(0, Ordering::Relaxed);
        self.status.store(SlotStatus::Fine as u64, Ordering::Relaxed);
        self.mover.store(0, Ordering::Relaxed);
        self.uses.fetch_add(1, Ordering::Relaxed);
        for (word, value) in [
            (&self.is_send, u64::from(of.is_send)),
            (&self.is_buffered, u64::from(of.is_buffered)),
            (&self.peer, of.peer.map_or(0, |peer| u64::from(peer) + 1)),
            (&self.tag, of.tag),
            (&self.mask, of.mask),
            (&self.bytes, of.bytes),
        ] {
            word.store(value, Ordering::Relaxed);
        }
        self.move_to(&of.buffer);
        let length = of.metadata.len().min(METADATA_BYTES);
        self.metadata.store(&of.metadata[..length]);
        for (word, value) in [
            (&self.source, u64::from(rank)),
            (&self.message_tag, of.tag),
            (&self.message_bytes, of.bytes),
            (&self.metadata_bytes, length as u64),
        ] {
            word.store(value, Ordering::Relaxed);
        }
        self.state.store(SlotState::Free as u64, Ordering::Release);
    }

    /// Stores in the slot that the data of the operation is now located in `buffer`.
    pub fn move_to(&self, buffer: &SlotBuffer) {
        match buffer {
            SlotBuffer::None => self.buffer.store(0, Ordering::Relaxed),
            SlotBuffer::Inline => self.buffer.store(1, Ordering::Relaxed),
            SlotBuffer::Memory { handle, offset, device } => {
                self.buffer.store(2, Ordering::Relaxed);
                self.offset.store(*offset, Ordering::Relaxed);
                self.device.store(*device as u64, Ordering::Relaxed);
                self.handle.store(handle);
            }
        }
    }

    /// Records that the data of the operation passes through memory of the library.
    pub fn pass_through(&self) {
        self.is_buffered.store(1, Ordering::Relaxed);
    }

    /// Returns the state of the send or receive in this slot.
    pub fn state(&self) -> SlotState {
        match self.state.load(Ordering::Acquire) {
            1 => SlotState::Queued,
            2 => SlotState::Described,
            3 => SlotState::Matched,
            4 => SlotState::Ended,
            _ => SlotState::Free,
        }
    }

    /// Ends the operation without a match, for the reason `status`. The operation must not be listed in a mailbox.
    pub fn end_as(&self, status: SlotStatus) {
        self.fail(status, "");
        mortal();
        self.set_state(SlotState::Ended);
        mortal();
        self.end();
    }

    pub(super) fn set_state(&self, state: SlotState) {
        self.state.store(state as u64, Ordering::Release);
    }

    /// Publishes the buffer of this slot's operation. Other ranks may fetch it until the slot is reused.
    pub fn describe(&self) {
        self.partner.store(DESCRIBED | self.uses(), Ordering::Relaxed);
        self.set_state(SlotState::Described);
    }

    /// Claims the published buffer of this slot for a fetch by the operation in slot `by`. Returns true on success. The claim fails if
    /// another rank has claimed the buffer first, or if the slot was reused since the buffer was published (`uses` differs from the current
    /// use count of the slot).
    pub fn take_described(&self, uses: u64, by: SlotId) -> bool {
        let taken = self.partner.compare_exchange(DESCRIBED | uses, by.encode(), Ordering::AcqRel, Ordering::Acquire);
        taken.is_ok()
    }

    /// Returns the id of the slot of the matching operation, or `None` if there is no match.
    pub fn partner(&self) -> Option<SlotId> {
        SlotId::decode(self.partner.load(Ordering::Acquire))
    }

    /// Records that the operation in this slot is matched, and that rank `mover` copies the data.
    pub fn match_taken(&self, mover: u32) {
        self.mover.store(u64::from(mover) + 1, Ordering::Relaxed);
        self.set_state(SlotState::Matched);
    }

    /// Records in this slot the id of the matching operation's slot, and that rank `mover` copies the data.
    pub fn join(&self, partner: SlotId, mover: u32) {
        self.mover.store(u64::from(mover) + 1, Ordering::Relaxed);
        self.partner.store(partner.encode(), Ordering::Release);
    }

    /// Records that rank `mover` copies the data of the operation in this slot.
    pub fn give_to(&self, mover: u32) {
        self.mover.store(u64::from(mover) + 1, Ordering::Release);
    }

    /// Returns the rank that copies the data of the operation in this slot, or `None` if no rank is assigned yet.
    pub fn mover(&self) -> Option<u32> {
        (self.mover.load(Ordering::Relaxed) as u32).checked_sub(1)
    }

    /// Returns the number of times that the slot has been used. A buffer that was published in an earlier use is no longer available.
    pub fn uses(&self) -> u64 {
        self.uses.load(Ordering::Relaxed)
    }

    /// True if the operation in this slot is a send, false if it is a receive.
    pub fn is_send(&self) -> bool {
        self.is_send.load(Ordering::Relaxed) != 0
    }

    /// True if the data of this slot's operation passes through memory of the library instead of being copied directly.
    pub fn is_buffered(&self) -> bool {
        self.is_buffered.load(Ordering::Relaxed) != 0
    }

    /// Returns the peer of the operation in this slot: the rank to which a send is addressed, or the rank from which a receive accepts
    /// messages. Returns `None` for a receive that accepts messages from any rank.
    pub fn peer(&self) -> Option<u32> {
        (self.peer.load(Ordering::Relaxed) as u32).checked_sub(1)
    }

    /// Returns the size in bytes of this slot's message (for a send) or receive buffer (for a receive).
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn pattern(&self) -> Pattern {
        Pattern { source: self.peer(), tag: self.tag.load(Ordering::Relaxed), mask: self.mask.load(Ordering::Relaxed) }
    }

    /// Returns the location of the data of the send or receive in this slot.
    pub fn buffer(&self) -> SlotBuffer {
        match self.buffer.load(Ordering::Relaxed) {
            1 => SlotBuffer::Inline,
            2 => {
                let mut handle = [0; super::handle::BYTES];
                self.handle.load(&mut handle);
                let device = self.device.load(Ordering::Relaxed) as i32;
                SlotBuffer::Memory { handle, offset: self.offset.load(Ordering::Relaxed), device }
            }
            _ => SlotBuffer::None,
        }
    }

    /// Copies the envelope (sender, tag, size and metadata) from the slot of the matched send to the slot of this receive.
    pub fn meet(&self, send: &MessageSlot) {
        for (to, from) in [
            (&self.source, &send.source),
            (&self.message_tag, &send.message_tag),
            (&self.message_bytes, &send.message_bytes),
            (&self.metadata_bytes, &send.metadata_bytes),
        ] {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.metadata.copy(&send.metadata, send.metadata_length());
    }

    fn metadata_length(&self) -> usize {
        (self.metadata_bytes.load(Ordering::Relaxed) as usize).min(METADATA_BYTES)
    }

    /// Returns the envelope (sender, tag, size and metadata) of the message that the operation in this slot sends or has matched.
    pub fn envelope(&self) -> Envelope {
        let mut metadata = vec![0; self.metadata_length()];
        self.metadata.load(&mut metadata);
        Envelope {
            source: self.source.load(Ordering::Relaxed) as u32,
            tag: self.message_tag.load(Ordering::Relaxed),
            bytes: self.message_bytes.load(Ordering::Relaxed),
            metadata,
        }
    }

    /// Returns the size in bytes of the message that the receive in this slot has matched.
    pub fn message_bytes(&self) -> u64 {
        self.message_bytes.load(Ordering::Relaxed)
    }

    /// True if the stream of this slot's rank has reached the operation in this slot.
    pub fn has_come(&self) -> bool {
        is_raised(&self.ready)
    }

    /// True if no stream needs to wait for the slot's rank any more. The stream of that rank has reached the operation, or the wait was
    /// released.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire) != 0
    }

    /// Releases the streams that wait until the stream of the slot's rank reaches the operation. That stream may never reach it.
    pub fn let_go(&self) {
        let _ = self.ready.compare_exchange(0, RELEASED, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// True if the data of the operation in this slot was moved, or if it is certain that the data will not be moved.
    pub fn has_moved(&self) -> bool {
        is_raised(&self.moved)
    }

    /// True if buffered data has arrived in the receive buffer of the slot's rank, or has left its send buffer.
    pub fn has_finished(&self) -> bool {
        is_raised(&self.finished)
    }

    /// Releases the streams that wait for `flag` although the data has not arrived, and records the failure `text`. Does nothing if the
    /// flag is already set.
    pub fn release(&self, flag: &Plain, text: &str) {
        if flag.load(Ordering::Acquire) == 0 {
            self.fail(SlotStatus::Failed, text);
            let _ = flag.compare_exchange(0, RELEASED, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Returns the reason why the operation in this slot has moved no data, or [`SlotStatus::Fine`] if it has not failed.
    pub fn status(&self) -> SlotStatus {
        match self.status.load(Ordering::Acquire) {
            0 => SlotStatus::Fine,
            1 => SlotStatus::PeerGone,
            2 => SlotStatus::Truncated,
            3 => SlotStatus::Cancelled,
            _ => SlotStatus::Failed,
        }
    }

    /// Records the reason why the operation in this slot moves no data. A reason that was recorded before is kept.
    pub fn fail(&self, status: SlotStatus, text: &str) {
        if self.status() == SlotStatus::Fine {
            let end = (0..=text.len().min(TEXT_BYTES)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
            let mut bytes = [0; TEXT_BYTES];
            bytes[..end].copy_from_slice(&text.as_bytes()[..end]);
            self.text.store(&bytes);
        }
        let fine = SlotStatus::Fine as u64;
        let _ = self.status.compare_exchange(fine, status as u64, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Returns the text that describes why the operation in this slot has failed. The text is valid only if the operation has failed.
    pub fn text(&self) -> String {
        let mut bytes = [0; TEXT_BYTES];
        self.text.load(&mut bytes);
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
    }

    /// Sets the flag that tells waiting ranks that the operation has ended, although no data was moved.
    pub fn end(&self) {
        self.moved.store(1, Ordering::Release);
    }
}
