//! A send, a receive, a fetch or a described buffer of this rank, from its post until its outcome is known.

use super::Messenger;
use super::buffers::{Bounce, ImportedBuffer};
use super::movement::Landing;
use crate::backend::{BackendError, Completion, CompletionState, Signal, SignalWait, StreamHandle};
use crate::contexts::Error;
use crate::ipc::signal::rest;
use crate::ipc::{Envelope, MessageSlot, SlotState, SlotStatus};
use crate::sync::{Mutex, lock};
use std::any::Any;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

/// What an operation has come to.
#[derive(Clone, Debug)]
pub(super) struct OperationOutcome {
    result: Result<(), BackendError>,
    /// The message that it is, or has met.
    envelope: Option<Envelope>,
}

/// What is in use until the slot of an operation can be used again.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub slot: u32,
    /// Its bytes pass through memory of the library. The slot says so too, but every rank can write that.
    pub is_buffered: bool,
    /// Work that nobody can wait for may still look at the slot, so it is used no more.
    pub is_torn: bool,
    /// Its rank's stream raises `ready`.
    pub comes: bool,
    pub bounce: Option<Bounce>,
    /// Memory of the other rank that its bytes move from or to.
    pub imported: Option<Arc<ImportedBuffer>>,
    /// Work of streams that has looked at the flags.
    pub markers: Vec<Completion>,
    /// Bytes that are still to be copied to the caller's memory.
    pub landing: Option<Arc<Landing>>,
    /// An execution that is verified.
    pub verified: Option<Completion>,
}

/// An operation that can be waited for.
pub struct Operation {
    messenger: Arc<Messenger>,
    slot: u32,
    kept: Mutex<Option<Kept>>,
    outcome: OnceLock<OperationOutcome>,
}

impl Kept {
    /// Copies what has come to the caller's memory, where nobody else does.
    pub fn land(&self, slot: &MessageSlot) {
        self.landing.iter().for_each(|landing| landing.land(slot));
    }

    /// Lets streams go on that wait for it.
    pub fn release_streams(&self, slot: &MessageSlot) {
        if self.markers.iter().any(|marker| matches!(marker.is_done(), Ok(false))) {
            slot.release(
                self.flag(slot),
                "its messenger was destroyed, and its bytes did not come; streams that waited for them have gone on",
            );
        }
    }

    fn has_ended(&self, slot: &MessageSlot) -> bool {
        if self.is_buffered { slot.has_finished() } else { slot.has_moved() }
    }

    /// The flag that tells of the operation's end.
    fn flag<'a>(&self, slot: &'a MessageSlot) -> &'a std::sync::atomic::AtomicU64 {
        if self.is_buffered { &slot.finished } else { &slot.moved }
    }

    /// Whether nobody looks at the slot any more, or will raise one of its flags.
    pub fn is_quiet(&self, slot: &MessageSlot) -> bool {
        slot.has_moved()
            && (!self.comes || slot.has_come())
            && (!self.is_buffered || slot.has_finished())
            && self.markers.iter().all(|marker| marker.is_done().unwrap_or(true))
    }
}

impl OperationOutcome {
    /// Of an operation that has ended.
    fn read(slot: &MessageSlot, envelope: Envelope) -> OperationOutcome {
        let peer = slot.partner().map(|partner| partner.rank).or(slot.peer());
        let result = match slot.status() {
            SlotStatus::Fine => Ok(()),
            SlotStatus::PeerGone if !slot.text().is_empty() => Err(BackendError::PeerGone(slot.text())),
            SlotStatus::PeerGone => {
                let who = peer.map_or("a rank of the node".into(), |peer| format!("rank {peer}"));
                Err(BackendError::PeerGone(format!("{who} has ended, or has destroyed its messenger, before the bytes have moved")))
            }
            SlotStatus::Truncated => Err(BackendError::Truncated(format!(
                "the message of rank {} (tag {:#x}) has {} bytes, and the buffer {}; it can be received with a larger one",
                envelope.source,
                envelope.tag,
                envelope.bytes,
                slot.bytes()
            ))),
            SlotStatus::Cancelled => Err(BackendError::Cancelled("the operation was cancelled before it matched".into())),
            SlotStatus::Failed => Err(BackendError::Driver { what: "moving a message".into(), reason: slot.text(), code: 0 }),
        };
        let has_met = slot.is_send() || result.is_ok() || matches!(result, Err(BackendError::Truncated(_)));
        OperationOutcome { result, envelope: has_met.then_some(envelope) }
    }

    /// Of one whose messenger is gone.
    fn ended() -> OperationOutcome {
        OperationOutcome { result: Err(BackendError::Cancelled("the messenger of this operation was destroyed".into())), envelope: None }
    }
}

/// Whether a thread that looks again and again leaves a core for others.
fn has_cores() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1))
}

impl Operation {
    pub(super) fn new(messenger: &Arc<Messenger>, slot: u32, kept: Kept) -> Arc<Operation> {
        let operation =
            Operation { messenger: Arc::clone(messenger), slot, kept: Mutex::new(Some(Kept { slot, ..kept })), outcome: OnceLock::new() };
        let operation = Arc::new(operation);
        messenger.note_live(slot, &operation);
        operation
    }

    /// Whose it is.
    pub fn messenger(&self) -> &Arc<Messenger> {
        &self.messenger
    }

    fn outcome(&self) -> Option<&OperationOutcome> {
        if let Some(known) = self.outcome.get() {
            return Some(known);
        }
        let Ok(_open) = self.messenger.enter() else {
            return Some(self.outcome.get_or_init(OperationOutcome::ended));
        };
        self.settle()
    }

    /// Looks at the flags until one is up, for a microsecond or so: less than a yield takes where other threads want the core.
    fn watch(&self) {
        const LOOKS: u32 = 32;
        if !has_cores() || self.outcome.get().is_some() {
            return;
        }
        let Ok(_open) = self.messenger.enter() else { return };
        // It may be another operation's by now, if somebody else has seen the end of this one.
        let slot = self.messenger.mailboxes.own(self.slot);
        for _ in 0..LOOKS {
            if slot.has_moved() || slot.has_finished() {
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// The outcome where it is known. The messenger is open.
    pub(super) fn settle(&self) -> Option<&OperationOutcome> {
        let mut kept = lock(&self.kept);
        let Some(held) = &*kept else { return self.outcome.get() };
        let slot = self.messenger.mailboxes.own(self.slot);
        held.land(slot);
        if !held.has_ended(slot) {
            return None;
        }
        let verified = held.verified.as_ref().map_or(Ok(()), |verified| verified.wait());
        let outcome = self.outcome.get_or_init(|| {
            let read = OperationOutcome::read(slot, self.messenger.mailboxes.envelope(slot));
            OperationOutcome { result: read.result.and(verified), ..read }
        });
        kept.take().into_iter().for_each(|kept| self.messenger.spend(kept));
        Some(outcome)
    }

    /// The messenger is being destroyed: this has ended, or never will.
    pub(super) fn abandon(&self) {
        if self.settle().is_none() {
            let _ = self.outcome.set(OperationOutcome::ended());
        }
    }

    /// See [`Kept::release_streams`].
    pub(super) fn release_streams(&self) {
        lock(&self.kept).iter().for_each(|kept| kept.release_streams(self.messenger.mailboxes.own(self.slot)));
    }

    /// What the slot keeps, where the outcome was not asked for.
    pub(super) fn take_kept(&self) -> Option<Kept> {
        lock(&self.kept).take()
    }

    /// The message that it is, or has met: `None` while it has met none.
    pub fn envelope(&self) -> Option<Envelope> {
        if let Some(outcome) = self.outcome() {
            return outcome.envelope.clone();
        }
        let _open = self.messenger.enter().ok()?;
        // While this is held the slot is not used again.
        let kept = lock(&self.kept);
        if kept.is_none() {
            return self.outcome.get().and_then(|outcome| outcome.envelope.clone());
        }
        let slot = self.messenger.mailboxes.own(self.slot);
        (slot.is_send() || slot.state() == SlotState::Matched).then(|| self.messenger.mailboxes.envelope(slot))
    }

    /// Ends an operation that has not matched; whether it was so. It then ends with [`BackendError::Cancelled`].
    pub fn cancel(&self) -> Result<bool, Error> {
        let _open = self.messenger.enter()?;
        // While this is held the slot is not used again.
        let kept = lock(&self.kept);
        Ok(kept.is_some() && self.messenger.withdraw(self.slot, SlotStatus::Cancelled))
    }

    /// Has later work of a stream come after the end of this operation.
    pub fn order_stream(&self, stream: StreamHandle) -> Result<(), Error> {
        if self.outcome().is_some() {
            return Ok(());
        }
        let open = self.messenger.enter()?;
        let backend = open.backend();
        if backend.is_capturing(stream)? {
            return Err(super::captured());
        }
        let mut kept = lock(&self.kept);
        let Some(kept) = kept.as_mut() else { return Ok(()) };
        let own = self.messenger.mailboxes.own(self.slot);
        let flag = kept.flag(own);
        if flag.load(Ordering::Acquire) == 0 {
            let signal = Signal { counter: std::ptr::from_ref(flag).addr() as u64, value: 1 };
            let by = open.context().config().signal_wait.unwrap_or(SignalWait::Operation);
            backend.stream_wait_signals(stream, &[signal], by)?;
            // Without a marker nobody knows when the stream has passed: the flag stays up.
            kept.markers.push(open.mark(stream).inspect_err(|_| kept.is_torn = true)?);
        }
        Ok(())
    }
}

impl CompletionState for Operation {
    fn is_done(&self) -> Result<bool, BackendError> {
        self.outcome().map_or(Ok(false), |outcome| outcome.result.clone().map(|()| true))
    }

    fn wait(&self) -> Result<(), BackendError> {
        let mut round = 0;
        loop {
            self.watch();
            if let Some(outcome) = self.outcome() {
                return outcome.result.clone();
            }
            // Yields for a millisecond or two: most messages come by then, and after that a sleep, of 70 us at least, is a small part of the time.
            rest(round / if has_cores() { 16 } else { 8 });
            round += 1;
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        lock(&self.kept).take().into_iter().for_each(|kept| self.messenger.spend(kept));
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation").field("slot", &self.slot).field("outcome", &self.outcome).finish_non_exhaustive()
    }
}
