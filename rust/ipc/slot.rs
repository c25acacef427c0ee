//! One operation of a rank, a send or a receive, as all ranks of a node see it in shared memory.
//!
//! Streams raise its flags, so those stand first. A slot belongs to the rank in whose memory it lies, which alone prepares and reuses it;
//! others match it, under the lock of the mailbox that it is published in, and raise its flags.

use crate::sync::{AtomicU64, Ordering};
use std::sync::atomic::AtomicU64 as Plain;

/// Metadata of a message at most, bytes.
pub const METADATA_BYTES: usize = 256;

/// Host messages up to this size are kept in the slot of their send, bytes.
pub const INLINE_BYTES: u64 = 1024;

const TEXT_BYTES: usize = 192;

/// Lets streams go on that wait for a flag which was not raised. Whoever was to raise it sets it to 1 all the same.
const RELEASED: u64 = 2;

/// In place of a partner: the operation is a buffer that may be fetched.
const DESCRIBED: u64 = 1 << 63;

/// An operation: a slot of a rank.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct SlotId {
    /// In whose memory it is.
    pub rank: u32,
    /// Its number there.
    pub slot: u32,
}

impl SlotId {
    /// Not 0.
    pub(super) fn encode(self) -> u64 {
        (u64::from(self.rank) + 1) << 32 | u64::from(self.slot)
    }

    pub(super) fn decode(word: u64) -> Option<SlotId> {
        let rank = ((word >> 32) as u32).checked_sub(1).filter(|_| word & DESCRIBED == 0)?;
        Some(SlotId { rank, slot: word as u32 })
    }
}

/// How far an operation has come. The number is what stands in shared memory; 0 is a slot that was never used.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum SlotState {
    /// Not in use, or being prepared.
    Free = 0,
    /// In a mailbox, unmatched.
    Queued = 1,
    /// A buffer that may be fetched.
    Described = 2,
    /// Matched: its bytes move, or have moved.
    Matched = 3,
    /// Ended without a match.
    Ended = 4,
}

/// Why an operation has moved no bytes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum SlotStatus {
    /// It has, or will.
    Fine = 0,
    /// The other rank has ended or left.
    PeerGone = 1,
    /// The message is longer than the buffer.
    Truncated = 2,
    /// It was cancelled.
    Cancelled = 3,
    /// The bytes could not be moved; the text says why.
    Failed = 4,
}

/// Which messages a receive or a probe takes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// The sender; `None` for any.
    pub source: Option<u32>,
    /// Compared with the message's tag in the bits of `mask`.
    pub tag: u64,
    /// Bits that count.
    pub mask: u64,
}

impl Pattern {
    pub(super) fn accepts(&self, source: u32, tag: u64) -> bool {
        self.source.is_none_or(|wanted| wanted == source) && (tag ^ self.tag) & self.mask == 0
    }
}

/// What a rank says of an operation before it publishes it.
#[derive(Copy, Clone, Debug)]
pub struct Preparation<'a> {
    /// The receiver of a send, or the sender that a receive waits for; `None` for any.
    pub peer: Option<u32>,
    /// Of the message, or of the messages that a receive takes.
    pub tag: u64,
    /// Bits of the tag that count.
    pub mask: u64,
    /// Bytes of the message, or of the buffer.
    pub bytes: u64,
    /// Where the bytes are, for whoever moves them.
    pub buffer: SlotBuffer,
    /// What goes with the message.
    pub metadata: &'a [u8],
    /// Whether it is a send.
    pub is_send: bool,
    /// Whether the bytes pass through memory of the library.
    pub is_buffered: bool,
}

/// Where the bytes of an operation are.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum SlotBuffer {
    /// There are none, or they are for nobody else to move.
    None,
    /// In the slot itself.
    Inline,
    /// In memory that the handle's holder maps; on this device of the node.
    Memory {
        /// Of the whole allocation.
        handle: [u8; super::handle::BYTES],
        /// First byte in it.
        offset: u64,
        /// Its device, as the node numbers them.
        device: i32,
    },
}

/// A message, as a receive or a probe sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Envelope {
    /// Who has sent it.
    pub source: u32,
    /// Its tag.
    pub tag: u64,
    /// Its size.
    pub bytes: u64,
    /// What goes with it.
    pub metadata: Vec<u8>,
}

/// A point at which a test ends a rank, with all that it holds.
#[cfg(not(test))]
pub(super) fn mortal() {}
#[cfg(test)]
pub(super) use super::mailbox::tests::mortal;

/// Words of shared memory that hold bytes.
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

/// See the module. Plain words are written by one rank before it publishes the slot or commits a match, and read after that.
///
/// CPUs that wait look at the first line all the time, so it has what a match does not write.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct MessageSlot {
    /// Its rank's stream has come to the operation.
    pub ready: Plain,
    /// The bytes have moved, or never will.
    pub moved: Plain,
    /// The bytes are in their own rank's buffer, or out of it, where they pass through another.
    pub finished: Plain,
    /// How often the slot has been used.
    uses: AtomicU64,
    is_send: Plain,
    is_buffered: Plain,
    buffer: Plain,
    /// Counted from 1; 0 is any.
    peer: Plain,
    tag: Plain,
    mask: Plain,
    bytes: Plain,
    state: AtomicU64,
    /// By this the mailbox's index is made anew.
    pub(super) order: AtomicU64,
    /// The other operation of a match. Of a receive, writing it is the match.
    partner: AtomicU64,
    /// The rank that moves the bytes, counted from 1.
    mover: AtomicU64,
    status: AtomicU64,
    /// The message, on both sides once it has matched.
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
    /// Where bytes that are kept in a slot begin in it.
    pub(super) const INLINE_OFFSET: u64 = std::mem::offset_of!(MessageSlot, inline) as u64;

    /// Its rank prepares it; nobody else looks at it.
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

    /// Says where its bytes are.
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

    /// Has its bytes pass through memory of the library after all.
    pub fn pass_through(&self) {
        self.is_buffered.store(1, Ordering::Relaxed);
    }

    /// How far it has come.
    pub fn state(&self) -> SlotState {
        match self.state.load(Ordering::Acquire) {
            1 => SlotState::Queued,
            2 => SlotState::Described,
            3 => SlotState::Matched,
            4 => SlotState::Ended,
            _ => SlotState::Free,
        }
    }

    /// Ends it without a match. It is in no mailbox.
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

    /// Makes it one that may be fetched, in this use of the slot alone.
    pub fn describe(&self) {
        self.partner.store(DESCRIBED | self.uses(), Ordering::Relaxed);
        self.set_state(SlotState::Described);
    }

    /// Takes a buffer that was described in the slot's use number `uses`, for a fetch: of several that try, one succeeds.
    pub fn take_described(&self, uses: u64, by: SlotId) -> bool {
        let taken = self.partner.compare_exchange(DESCRIBED | uses, by.encode(), Ordering::AcqRel, Ordering::Acquire);
        taken.is_ok()
    }

    /// The other operation.
    pub fn partner(&self) -> Option<SlotId> {
        SlotId::decode(self.partner.load(Ordering::Acquire))
    }

    /// A match that its partner has made.
    pub fn match_taken(&self, mover: u32) {
        self.mover.store(u64::from(mover) + 1, Ordering::Relaxed);
        self.set_state(SlotState::Matched);
    }

    /// Joins it to another operation, whose bytes `mover` moves.
    pub fn join(&self, partner: SlotId, mover: u32) {
        self.mover.store(u64::from(mover) + 1, Ordering::Relaxed);
        self.partner.store(partner.encode(), Ordering::Release);
    }

    /// Another rank moves the bytes.
    pub fn give_to(&self, mover: u32) {
        self.mover.store(u64::from(mover) + 1, Ordering::Release);
    }

    /// Who moves the bytes, once it has matched.
    pub fn mover(&self) -> Option<u32> {
        (self.mover.load(Ordering::Relaxed) as u32).checked_sub(1)
    }

    /// How often it has been used: what was described in an earlier use is gone.
    pub fn uses(&self) -> u64 {
        self.uses.load(Ordering::Relaxed)
    }

    /// Whether it is a send.
    pub fn is_send(&self) -> bool {
        self.is_send.load(Ordering::Relaxed) != 0
    }

    /// Whether its bytes pass through memory of the library.
    pub fn is_buffered(&self) -> bool {
        self.is_buffered.load(Ordering::Relaxed) != 0
    }

    /// The rank that it is for, or waits for; `None` for any.
    pub fn peer(&self) -> Option<u32> {
        (self.peer.load(Ordering::Relaxed) as u32).checked_sub(1)
    }

    /// Of the message, or of the buffer.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn pattern(&self) -> Pattern {
        Pattern { source: self.peer(), tag: self.tag.load(Ordering::Relaxed), mask: self.mask.load(Ordering::Relaxed) }
    }

    /// Where its bytes are.
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

    /// Notes the message that a receive has met.
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

    /// The message that it is, or has met.
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

    /// Bytes of the message that a receive has met.
    pub fn message_bytes(&self) -> u64 {
        self.message_bytes.load(Ordering::Relaxed)
    }

    /// Whether its rank's stream has come to it.
    pub fn has_come(&self) -> bool {
        is_raised(&self.ready)
    }

    /// Whether whoever waits for its rank's stream may go on: that has come, or never will.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire) != 0
    }

    /// Lets whoever waits for its rank's stream go on, which may never come to it.
    pub fn let_go(&self) {
        let _ = self.ready.compare_exchange(0, RELEASED, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Whether the bytes have moved, or never will.
    pub fn has_moved(&self) -> bool {
        is_raised(&self.moved)
    }

    /// Whether they are in their own rank's buffer, or out of it.
    pub fn has_finished(&self) -> bool {
        is_raised(&self.finished)
    }

    /// Notes that its bytes come too late for the streams that wait for `flag`, which go on.
    pub fn release(&self, flag: &Plain, text: &str) {
        if flag.load(Ordering::Acquire) == 0 {
            self.fail(SlotStatus::Failed, text);
            let _ = flag.compare_exchange(0, RELEASED, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Why nothing has moved, if that is so.
    pub fn status(&self) -> SlotStatus {
        match self.status.load(Ordering::Acquire) {
            0 => SlotStatus::Fine,
            1 => SlotStatus::PeerGone,
            2 => SlotStatus::Truncated,
            3 => SlotStatus::Cancelled,
            _ => SlotStatus::Failed,
        }
    }

    /// Notes why nothing moves. The first reason stays.
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

    /// The text of a failure.
    pub fn text(&self) -> String {
        let mut bytes = [0; TEXT_BYTES];
        self.text.load(&mut bytes);
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
    }

    /// Tells whoever waits that nothing will move any more.
    pub fn end(&self) {
        self.moved.store(1, Ordering::Release);
    }
}
