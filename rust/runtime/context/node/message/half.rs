//! What the asked rank does: its thread, the half that this enqueues, and the end of an operation whose half has failed.

use super::buffers::ImportedBuffer;
use super::movement::note;
use super::staging::{AREA_BYTES, COUNTERS_BYTES, MOST_PIECES, SLOT_BYTES, SLOTS, SharedStaging};
use super::{Messenger, Presence};
use crate::backend::{BackendError, Endpoints, Execution, Report, SignalWait, StreamHandle};
use crate::context::Error;
use crate::context::node::partitioned::copy_of;
use crate::ipc::mailbox::Mailboxes;
use crate::ipc::{Answer, IpcError, MessageSlot, Share};
use crate::sync::lock;
use crate::topology::DeviceId;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How often halves are looked at whose operation ends with them.
const TEND_EVERY: Duration = Duration::from_millis(1);

/// What one of both ranks does.
pub(super) struct Half {
    pub lane: StreamHandle,
    pub device: DeviceId,
    pub staging: SharedStaging,
    pub share: Share,
    /// Of the message here.
    pub address: u64,
    /// Whether it puts pieces there, or takes them out.
    pub puts: bool,
    pub was_asked: bool,
}

/// A half that this rank was asked for.
pub(super) struct HalfWork {
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

/// The memory of an operation of this rank, where a GPU reaches it.
#[derive(Default)]
pub(super) struct OwnMemory {
    pub address: AtomicU64,
    pub bytes: AtomicU64,
    pub device: AtomicI32,
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
    /// Ends the thread. Nobody asks any more: whatever has matched has moved.
    pub(super) fn end_shares(&self) {
        self.shares.is_ending.store(true, Ordering::Release);
        lock(&self.shares.waits).markers.clear();
        self.mailboxes.wake(self.mailboxes.rank());
        let thread = lock(&self.shares.thread).take();
        // It may have had the last reference to the messenger.
        if let Some(thread) = thread.filter(|_| SERVED.get() != Arc::as_ptr(&self.shares.is_ending).addr())
            && thread.join().is_err()
        {
            log::error!("the thread of messages panicked; please report this");
        }
    }

    /// Enqueues a half, for as long as it is wanted.
    pub(super) fn enqueue_half(&self, half: &Half, is_wanted: impl Fn() -> bool) -> Result<(), BackendError> {
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
        let Some(_enqueueing) = self.begin_half() else {
            own.change_answer(uses, Answer::Asked, Answer::Refused);
            return;
        };
        let is_taken = {
            let mut work = lock(&self.shares.work);
            // Of a rank that has died the operation has ended, or is ended by whoever takes this lock next.
            let is_taken = self.presence(peer) == Presence::Here && own.change_answer(uses, Answer::Asked, Answer::Taken);
            if is_taken {
                work.push(HalfWork { slot, uses, peer, staging: half.staging, ends_here: false, _imported: imported });
            }
            is_taken
        };
        if is_taken {
            self.do_half(&half, own, uses);
        }
    }

    fn do_half(&self, half: &Half, own: &MessageSlot, uses: u64) {
        let enqueued = self.enqueue_half(half, || own.answer() == Answer::Taken);
        if enqueued.is_ok() && own.change_answer(uses, Answer::Taken, Answer::Enqueued) {
            return;
        }
        // The operation ends when this lane has come to its end.
        note(own, &enqueued.err().unwrap_or_else(given_up).into());
        own.change_answer(uses, Answer::Taken, Answer::Failed);
        // The other rank waits for pieces of this one.
        let (backend, pieces) = (self.node.context.backend(), half.staging.pieces);
        let end = if half.puts { half.staging.put(pieces) } else { half.staging.taken(pieces) };
        if backend.stream_raise_signals(half.lane, &[end, half.staging.done()]).is_err() {
            half.staging.give_up();
            // Nothing tells of its end but this, if the driver still does that.
            let _ = backend.synchronize_stream(half.lane);
            self.retire_lane(half.lane);
            half.staging.set(half.staging.done());
        }
    }

    /// Ends operations whose halves have failed and are over. Whether some are not.
    fn tend_halves(&self) -> bool {
        let mut work = lock(&self.shares.work);
        work.retain_mut(|half| {
            if self.has_ended((half.slot, half.uses)) {
                return false;
            }
            // The rank that moves the message can do nothing more.
            half.ends_here |= self.mailboxes.own(half.slot).ends_alone();
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
        let (lane, event) = self.lane(device, slot, false)?;
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
