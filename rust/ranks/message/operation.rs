//! Tracks an operation of this rank from its post until its outcome is known. The operation is a send, a receive, a fetch, or a buffer that
//! was described so that another rank may fetch it.

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

/// Outcome of an operation (send, receive, fetch, or buffer that was described for a fetch): success or an error, with the envelope
/// (sender, tag, size, metadata) of the message.
#[derive(Clone, Debug)]
pub(super) struct OperationOutcome {
    result: Result<(), BackendError>,
    /// Envelope (sender, tag, size, metadata) of the operation's message. `None` for a receive that has not matched a send.
    envelope: Option<Envelope>,
}

/// Resources of an operation (send, receive, fetch, or buffer that was described for a fetch). They are held until the operation's slot in
/// shared memory can be reused.
#[derive(Debug, Default)]
pub(super) struct Kept {
    pub slot: u32,
    /// True if the data of the operation passes through memory of the library. The operation's slot in shared memory contains this
    /// information too, but is not trusted, because every rank can write to it.
    pub is_buffered: bool,
    /// True if work whose end cannot be detected may still access the operation's slot. The slot is then never reused.
    pub is_torn: bool,
    /// True if this rank's stream sets the `ready` flag of the operation's slot.
    pub comes: bool,
    pub bounce: Option<Bounce>,
    /// Memory of the other rank that is mapped as the source or destination of the copy. `None` if no such memory is mapped.
    pub imported: Option<Arc<ImportedBuffer>>,
    /// Completions of stream work that reads the flags of the operation's slot.
    pub markers: Vec<Completion>,
    /// Pending copy of received data to the caller's memory. `None` if there is no such copy.
    pub landing: Option<Arc<Landing>>,
    /// Completion of a copy whose result is compared byte by byte (`MPGPU_VERIFY`). `None` if the copy is not verified.
    pub verified: Option<Completion>,
}

/// Operation that was posted to a messenger: a send, a receive, a fetch, or a buffer that was described so that another rank may fetch it.
/// The caller can wait for the end of the operation.
pub struct Operation {
    messenger: Arc<Messenger>,
    slot: u32,
    kept: Mutex<Option<Kept>>,
    outcome: OnceLock<OperationOutcome>,
}

impl Kept {
    /// Copies data that has arrived in memory of the library to the caller's memory, if no other thread makes this copy.
    pub fn land(&self, slot: &MessageSlot) {
        self.landing.iter().for_each(|landing| landing.land(slot));
    }

    /// Releases all streams of the caller that wait for the end of this operation.
    pub fn release_streams(&self, slot: &MessageSlot) {
        if self.markers.iter().any(|marker| matches!(marker.is_done(), Ok(false))) {
            slot.release(
                self.flag(slot),
                "the messenger was destroyed before the bytes of this operation arrived; streams that waited for the bytes continue \
                 without them",
            );
        }
    }

    fn has_ended(&self, slot: &MessageSlot) -> bool {
        if self.is_buffered { slot.has_finished() } else { slot.has_moved() }
    }

    /// Returns the flag in `slot` that is set when the operation has ended.
    fn flag<'a>(&self, slot: &'a MessageSlot) -> &'a std::sync::atomic::AtomicU64 {
        if self.is_buffered { &slot.finished } else { &slot.moved }
    }

    /// True if no rank and no stream will access the operation's slot or set one of its flags any more.
    pub fn is_quiet(&self, slot: &MessageSlot) -> bool {
        slot.has_moved()
            && (!self.comes || slot.has_come())
            && (!self.is_buffered || slot.has_finished())
            && self.markers.iter().all(|marker| marker.is_done().unwrap_or(true))
    }
}

impl OperationOutcome {
    /// Returns the outcome of an operation that has ended. The outcome is recorded in the operation's slot.
    fn read(slot: &MessageSlot, envelope: Envelope) -> OperationOutcome {
        let peer = slot.partner().map(|partner| partner.rank).or(slot.peer());
        let result = match slot.status() {
            SlotStatus::Fine => Ok(()),
            SlotStatus::PeerGone if !slot.text().is_empty() => Err(BackendError::PeerGone(slot.text())),
            SlotStatus::PeerGone => {
                let who = peer.map_or("a rank of the node".into(), |peer| format!("rank {peer}"));
                Err(BackendError::PeerGone(format!("{who} has ended, or has destroyed its messenger, before the bytes were moved")))
            }
            SlotStatus::Truncated => Err(BackendError::Truncated(format!(
                "the message of rank {} (tag {:#x}) has {} bytes, but the buffer has {}; receive the message with a larger buffer",
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

    /// Returns the error outcome of an operation whose messenger was destroyed.
    fn ended() -> OperationOutcome {
        OperationOutcome { result: Err(BackendError::Cancelled("the messenger of this operation was destroyed".into())), envelope: None }
    }
}

/// True if this process may use more than one core, so that a polling thread does not stop all other threads.
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

    /// Returns the messenger (endpoint for messages) to which this operation was posted.
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

    /// Polls the operation's flags until one of them is set, for at most about a microsecond. Callers poll before they yield the core,
    /// because a yield takes longer than such a poll if other threads want the core.
    fn watch(&self) {
        const LOOKS: u32 = 32;
        if !has_cores() || self.outcome.get().is_some() {
            return;
        }
        let Ok(_open) = self.messenger.enter() else { return };
        // The slot may already belong to another operation, if another thread has seen the end of this one.
        let slot = self.messenger.mailboxes.own(self.slot);
        for _ in 0..LOOKS {
            if slot.has_moved() || slot.has_finished() {
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// Returns the outcome of the operation, or `None` if it has not ended. The caller must hold a guard from `Messenger::enter`, which
    /// keeps the mailboxes mapped.
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

    /// Releases the slot of the operation if it has ended. There are two exceptions. A buffered send that has not matched keeps its slot,
    /// because it may still be cancelled. A verified operation keeps its slot until its outcome is requested, because comparing bytes may
    /// block.
    pub(super) fn settle_quiet(&self) {
        let is_quiet = lock(&self.kept).as_ref().is_some_and(|kept| {
            let slot = self.messenger.mailboxes.own(self.slot);
            kept.land(slot);
            kept.verified.is_none() && kept.is_quiet(slot)
        });
        if is_quiet {
            self.settle();
        }
    }

    /// Records the final outcome of the operation while the messenger is being destroyed. An operation that has not ended will never end.
    pub(super) fn abandon(&self) {
        if self.settle().is_none() {
            let _ = self.outcome.set(OperationOutcome::ended());
        }
    }

    /// Releases the streams that wait for the end of this operation ([`Kept::release_streams`]).
    pub(super) fn release_streams(&self) {
        lock(&self.kept).iter().for_each(|kept| kept.release_streams(self.messenger.mailboxes.own(self.slot)));
    }

    /// Removes and returns the resources that the operation still holds. `None` if they were released, because the outcome is known.
    pub(super) fn take_kept(&self) -> Option<Kept> {
        lock(&self.kept).take()
    }

    /// Returns the envelope (sender, tag, size, metadata) of the operation's message, or `None` for a receive that has not matched a send.
    pub fn envelope(&self) -> Option<Envelope> {
        if let Some(outcome) = self.outcome() {
            return outcome.envelope.clone();
        }
        let _open = self.messenger.enter().ok()?;
        // While the lock is held, the slot is not reused.
        let kept = lock(&self.kept);
        if kept.is_none() {
            return self.outcome.get().and_then(|outcome| outcome.envelope.clone());
        }
        let slot = self.messenger.mailboxes.own(self.slot);
        (slot.is_send() || slot.state() == SlotState::Matched).then(|| self.messenger.mailboxes.envelope(slot))
    }

    /// Cancels the operation if it has not matched. Returns true if it was cancelled. Waiting for the operation then returns
    /// [`BackendError::Cancelled`].
    pub fn cancel(&self) -> Result<bool, Error> {
        let _open = self.messenger.enter()?;
        // While the lock is held, the slot is not reused.
        let kept = lock(&self.kept);
        Ok(kept.is_some() && self.messenger.withdraw(self.slot, SlotStatus::Cancelled))
    }

    /// Makes later work in `stream` wait for the end of this operation.
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
            // Without this completion, the end of the stream's wait could not be detected. The slot is then never reused, and its flag stays
            // set.
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
            // The thread yields for one or two milliseconds, because most messages arrive within that time. After that, a sleep of at least
            // 70 us is short compared with the time already spent.
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
