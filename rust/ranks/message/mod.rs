//! Messages between the ranks of a node, for runtimes that do not know in advance what will be moved: tagged, with MPI's rules, and by
//! descriptor.
//!
//! Sends and receives meet in shared memory ([`crate::ipc::mailbox`]). Whoever comes second finds the other and enqueues the movement, so
//! nothing waits for a thread or for a call of the other rank. Flags of both operations, which streams raise and wait for, keep the
//! order of both sides' streams.
//!
//! A rank that has ended is noticed by the thread that answers importers, which ends all operations that concern it and no other.
//!
//! | file | promise |
//! | --- | --- |
//! | `post` | what a rank asks for |
//! | `operation` | a request: from its post until its outcome is known |
//! | `movement` | the bytes of a match, in the order of both sides' streams |
//! | `carried` | matches whose mover cannot map the other side's memory |
//! | `buffers` | memory of this rank and of others |

mod buffers;
mod carried;
mod movement;
mod operation;
mod post;

pub use self::operation::Operation;
pub use self::post::{DESCRIPTOR_BYTES, Descriptor, Outgoing};
pub use crate::ipc::{Envelope, METADATA_BYTES, Pattern};

use self::buffers::Buffers;
use self::carried::Carried;
use self::movement::{MessageLane, mark};
use self::operation::Kept;
use crate::backend::{Backend, BackendError, Completion, StreamHandle};
use crate::contexts::state::{EndsFirst, LAST_PATIENCE};
use crate::contexts::{Context, Error};
use crate::exchange::{Collective, Named};
use crate::group::NodeGroup;
use crate::ipc::mailbox::{Capacity, Mailboxes};
use crate::ipc::signal::rest;
use crate::ipc::{Departure, Handle, IpcError, OnLeave, SlotId, SlotState, SlotStatus};
use crate::sync::{Mutex, lock};
use crate::topology::{DeviceId, hash};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

/// How much longer a messenger that is being destroyed waits once it has let streams go on.
const GRACE: Duration = Duration::from_secs(2);

/// How to make a messenger.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessengerOptions {
    /// Operations of each rank at a time.
    pub operations: u32,
    /// Messages of other ranks that may wait for a receive of one.
    pub messages: u32,
}

impl Default for MessengerOptions {
    fn default() -> Self {
        MessengerOptions { operations: 1024, messages: 4096 }
    }
}

impl MessengerOptions {
    fn named(self) -> Named {
        vec![("operations".into(), self.operations.to_string()), ("messages".into(), self.messages.to_string())]
    }
}

/// A rank that is gone.
#[derive(Copy, Clone, PartialEq, Eq)]
#[repr(u8)]
enum Presence {
    Here = 0,
    /// It has destroyed its messenger.
    Left = 1,
    /// Its process has ended.
    Died = 2,
}

/// What a rank lets others map.
#[derive(Serialize, Deserialize)]
struct MessengerOffer {
    options: MessengerOptions,
    mailbox: Vec<u8>,
    /// For each rank, by which its end is noticed here.
    watches: Vec<Vec<u8>>,
}

/// Memory of this rank, and of others mapped here.
#[derive(Default)]
struct MessengerMemory {
    allocations: Vec<u64>,
    imports: Vec<u64>,
    /// Of these, what tells another rank that this one leaves.
    watches: Vec<u64>,
}

/// Slots that are free, and those of operations whose outcome nobody will ask for.
#[derive(Default)]
struct SlotPool {
    free: Vec<u32>,
    spent: VecDeque<Kept>,
    /// Used no more; what they use stays.
    torn: Vec<Kept>,
}

/// One rank's end of the messages of a node.
pub struct Messenger {
    node: Arc<NodeGroup>,
    capacity: Capacity,
    /// The same on all ranks, and no other messenger's.
    id: u64,
    mailboxes: Mailboxes,
    /// Of each rank, a [`Presence`].
    presence: Arc<[AtomicU8]>,
    /// Whether mailboxes are mapped: held for reading by whoever looks at them.
    gate: RwLock<bool>,
    is_ending: AtomicBool,
    /// Whether what had not matched has ended, or ends by whoever holds it.
    has_ended_unmatched: Mutex<bool>,
    /// Held by whoever destroys the messenger; whether all is given back.
    destroyed: Mutex<bool>,
    slots: Mutex<SlotPool>,
    live: Mutex<Vec<Weak<Operation>>>,
    lanes: Mutex<Vec<MessageLane>>,
    /// Whether looking again is worth its microseconds: where the stream of the last operation of few bytes had come when it was looked at last.
    /// One that is at work for long is looked at once.
    looks_again: AtomicBool,
    buffers: Buffers,
    carried: Carried,
    held: Mutex<MessengerMemory>,
}

/// A messenger that stays open for as long as this lives.
struct Open<'a> {
    _gate: RwLockReadGuard<'a, bool>,
    messenger: &'a Messenger,
}

impl Open<'_> {
    fn context(&self) -> &Context {
        &self.messenger.node.context
    }

    fn backend(&self) -> &dyn Backend {
        self.messenger.node.context.backend()
    }

    fn mark(&self, stream: StreamHandle) -> Result<Completion, Error> {
        mark(self.backend(), stream)
    }
}

fn gone(rank: u32) -> Error {
    IpcError::PeerGone(format!("rank {rank} has ended, or has destroyed its messenger")).into()
}

fn stuck(rank: u32) -> Error {
    let why = format!(
        "the mailbox of rank {rank} stays locked: a rank of the node was stopped within a call (a debugger?), or has overwritten it"
    );
    IpcError::Timeout(why).into()
}

fn destroyed() -> Error {
    BackendError::Cancelled("the messenger was destroyed".into()).into()
}

fn captured() -> Error {
    Error::NotSupported(
        "messages cannot be captured: a graph may run later, or again, and each message matches once; use a node plan".into(),
    )
}

impl NodeGroup {
    /// Makes a messenger of all ranks, which call this together; where it fails on one it fails on all.
    pub fn messenger(self: &Arc<NodeGroup>, options: MessengerOptions) -> Result<Arc<Messenger>, Error> {
        let mut held = MessengerMemory::default();
        let made = Messenger::new(self, options, &mut held);
        if made.is_err() {
            give_back(&self.context, held);
        }
        made
    }
}

/// Where the thread that notices ends of ranks finds the messenger.
type WeakMessenger = Arc<OnceLock<Weak<Messenger>>>;

impl Messenger {
    fn new(node: &Arc<NodeGroup>, options: MessengerOptions, held: &mut MessengerMemory) -> Result<Arc<Messenger>, Error> {
        let capacity = Capacity { slots: options.operations, messages: options.messages };
        let (found, presence): (WeakMessenger, Arc<[AtomicU8]>) = (Arc::default(), (0..node.ranks()).map(|_| AtomicU8::new(0)).collect());
        let mut own = 0;
        let offer = check(options).and_then(|()| Messenger::offer(node, options, capacity, &found, &presence, held, &mut own));
        let mut call = node.exchange.call(Collective::MESSENGER)?;
        let offers = call.all(offer)?;
        let bound = Messenger::map_all(node, &offers, own, held);
        // Before any message may be waited for: loading waits for the GPU, and it for the message.
        node.context.backend().load_kernels();
        let failed = bound.as_ref().err().cloned();
        call.all(failed.map_or(Ok(()), Err))?;
        let bases = bound?;
        let messenger = Arc::new(Messenger {
            node: Arc::clone(node),
            capacity,
            id: hash([&*format!("{:?}", offers[0].mailbox)]),
            mailboxes: Mailboxes::new(node.rank(), capacity, bases),
            presence,
            gate: RwLock::new(true),
            is_ending: AtomicBool::new(false),
            has_ended_unmatched: Mutex::new(false),
            destroyed: Mutex::new(false),
            slots: Mutex::new(SlotPool { free: (0..capacity.slots).rev().collect(), spent: VecDeque::new(), torn: Vec::new() }),
            live: Mutex::new((0..capacity.slots).map(|_| Weak::new()).collect()),
            lanes: Mutex::default(),
            looks_again: AtomicBool::new(true),
            buffers: Buffers::default(),
            carried: Carried::new(capacity.slots),
            held: Mutex::new(std::mem::take(held)),
        });
        let _ = found.set(Arc::downgrade(&messenger));
        let first: Weak<dyn EndsFirst> = Arc::<Messenger>::downgrade(&messenger);
        // Where the context closes meanwhile its memory may be gone: nothing looks at it any more.
        node.context.state().end_first(first).inspect_err(|_| messenger.close())?;
        // A rank may have ended before it could be told.
        for rank in 0..node.ranks() {
            let presence = messenger.presence(rank);
            if presence != Presence::Here {
                messenger.lose(rank, presence);
            }
        }
        Ok(messenger)
    }

    fn offer(
        node: &NodeGroup,
        options: MessengerOptions,
        capacity: Capacity,
        found: &WeakMessenger,
        presence: &Arc<[AtomicU8]>,
        held: &mut MessengerMemory,
        own: &mut u64,
    ) -> Result<MessengerOffer, Error> {
        let context = &node.context;
        let mut share = |bytes: u64, on_leave: OnLeave| {
            let address = context.allocate_shared(DeviceId::HOST, bytes)?;
            held.allocations.push(address);
            Ok::<_, Error>((address, context.state().export_watched(address, bytes, Some(on_leave))?.encode().to_vec()))
        };
        // Waits in the mailbox are for many ranks: the end of one must not end them all.
        let (address, mailbox) = share(capacity.bytes(), Arc::new(|_| None))?;
        *own = address;
        let mut watches = Vec::new();
        for rank in 0..node.ranks() {
            if rank == node.rank() {
                watches.push(Vec::new());
                continue;
            }
            let (found, presence) = (Arc::clone(found), Arc::clone(presence));
            let on_leave = move |departure: Departure| {
                // A rank that leaves has counted no steps.
                if let (false, Some(slot)) = (departure.has_failed, departure.steps.checked_sub(1)) {
                    found.get().and_then(Weak::upgrade).into_iter().for_each(|messenger| messenger.take_over(slot, rank));
                    return None;
                }
                let now = if departure.has_failed { Presence::Died } else { Presence::Left };
                presence[rank as usize].fetch_max(now as u8, Ordering::SeqCst);
                if let Some(messenger) = found.get().and_then(Weak::upgrade) {
                    messenger.lose(rank, now);
                }
                None
            };
            watches.push(share(8, Arc::new(on_leave))?.1);
        }
        Ok(MessengerOffer { options, mailbox, watches })
    }

    /// Maps the mailboxes of all ranks: their addresses.
    fn map_all(node: &NodeGroup, offers: &[MessengerOffer], own: u64, held: &mut MessengerMemory) -> Result<Vec<u64>, Error> {
        let options: Vec<Named> = offers.iter().map(|offer| offer.options.named()).collect();
        node.exchange.check_alike(c"options", &options.iter().collect::<Vec<_>>())?;
        let mut bases = Vec::with_capacity(offers.len());
        for (rank, offer) in (0..).zip(offers) {
            if rank == node.rank() {
                bases.push(own);
                continue;
            }
            let mut map = |handle: &[u8]| {
                let handle = Handle::decode(handle.try_into().unwrap_or(&[0; crate::ipc::handle::BYTES]))?;
                let (address, _) = node.context.state().import_memory(&handle)?;
                held.imports.push(address);
                Ok::<u64, Error>(address)
            };
            bases.push(map(&offer.mailbox)?);
            let watch = map(offer.watches.get(node.rank() as usize).map_or(&[], Vec::as_slice))?;
            held.watches.push(watch);
        }
        Ok(bases)
    }

    /// The node that it was made on.
    pub fn node(&self) -> &Arc<NodeGroup> {
        &self.node
    }

    /// Keeps the mailboxes mapped.
    fn enter(&self) -> Result<Open<'_>, Error> {
        drop(self.node.context.state().enter()?);
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        if !*gate {
            return Err(destroyed());
        }
        Ok(Open { _gate: gate, messenger: self })
    }

    fn presence(&self, rank: u32) -> Presence {
        // A rank that does not exist comes from damaged memory.
        match self.presence.get(rank as usize).map_or(0, |presence| presence.load(Ordering::SeqCst)) {
            0 => Presence::Here,
            1 => Presence::Left,
            _ => Presence::Died,
        }
    }

    /// Whether a rank is known to have ended or left.
    fn is_known_gone(&self, rank: u32) -> bool {
        self.presence(rank) != Presence::Here || self.mailboxes.is_closed(rank) && rank != self.mailboxes.rank()
    }

    /// The same, and asks the system.
    fn is_gone(&self, rank: u32) -> bool {
        if rank >= self.mailboxes.ranks() {
            return true;
        }
        let import = self.node.context.state().import_at(self.mailboxes.address(rank));
        rank != self.mailboxes.rank() && (self.presence(rank) == Presence::Died || import.is_none_or(|import| import.check().is_err()))
    }

    /// Ends what concerns a rank that has ended or left, and nothing else. Receives from any rank end where it has died, because the message may
    /// have been its.
    fn lose(&self, rank: u32, presence: Presence) {
        let Ok(_open) = self.enter() else { return };
        fence(Ordering::SeqCst);
        let concerns = |source: Option<u32>| source.map_or(presence == Presence::Died, |source| source == rank);
        self.mailboxes.forget(rank, |receive| concerns(receive.peer()), &|rank| self.is_gone(rank));
        (0..self.capacity.slots).for_each(|slot| self.conclude_gone(slot, rank));
    }

    /// After a post: either this sees that the rank is gone, or whoever notices its end sees what was posted.
    fn check_gone(&self, slot: u32, rank: u32) {
        fence(Ordering::SeqCst);
        if self.is_known_gone(rank) {
            self.conclude_gone(slot, rank);
        }
    }

    /// Ends an operation that waits for a rank that is gone. What is queued in this rank's own mailbox is ended there. A rank that has left has
    /// ended its movements before; one that is about to still moves what has matched.
    fn conclude_gone(&self, slot: u32, rank: u32) {
        let own = self.mailboxes.own(slot);
        if own.is_send() && own.state() == SlotState::Queued && own.peer() == Some(rank) {
            // Under its lock, because that rank may be ending the send itself, or may have died within a match.
            self.mailboxes.withdraw(rank, slot, SlotStatus::PeerGone, &|rank| self.is_gone(rank));
        }
        if self.presence(rank) != Presence::Died || rank == self.mailboxes.rank() {
            return;
        }
        // While this is held the slot is not used again.
        let _slots = lock(&self.slots);
        match own.state() {
            // It died while it ended the send.
            SlotState::Ended if own.is_send() && own.peer() == Some(rank) => own.end(),
            SlotState::Described | SlotState::Matched if !own.has_moved() => {
                let Some(partner) = own.partner().filter(|partner| partner.rank == rank) else { return };
                let theirs = self.mailboxes.slot(partner);
                if own.mover().unwrap_or(rank) == rank || !self.carried.is_moving(slot) {
                    own.fail(SlotStatus::PeerGone, "");
                    own.end();
                } else if !theirs.has_come() {
                    // The stream that moves the bytes goes on, and tells of the end.
                    own.fail(SlotStatus::PeerGone, "");
                    theirs.let_go();
                }
            }
            _ => {}
        }
    }

    /// A slot that nothing uses.
    fn take_slot(&self) -> Result<u32, Error> {
        let mut slots = lock(&self.slots);
        // A few each time, so that none is kept for long, and all where none is free.
        let most = if slots.free.is_empty() { usize::MAX } else { 4 };
        self.reap(&mut slots, most);
        let slot = slots.free.pop().ok_or_else(|| {
            Error::QueueFull(format!(
                "this rank has {} operations that have not ended: wait for some first, or make the messenger with room for more operations",
                self.capacity.slots
            ))
        })?;
        self.mailboxes.release(slot, &|rank| self.is_gone(rank));
        Ok(slot)
    }

    /// Frees slots that nobody looks at any more, and what they hold, of so many at most that are spent.
    fn reap(&self, slots: &mut SlotPool, most: usize) {
        for _ in 0..slots.spent.len().min(most) {
            let Some(kept) = slots.spent.pop_front() else { break };
            let own = self.mailboxes.own(kept.slot);
            // The thread of callbacks does it otherwise, and holds up nobody.
            if slots.free.is_empty() {
                kept.land(own);
            }
            if kept.is_quiet(own) {
                // What a rank that has died was moving may still be raised for a moment, so that slot is used no more.
                let has_died = |partner: SlotId| self.presence(partner.rank) == Presence::Died;
                let has_failed = matches!(own.status(), SlotStatus::PeerGone | SlotStatus::Failed);
                let may_be_raised = has_failed && own.partner().is_some_and(has_died);
                if kept.is_torn || may_be_raised {
                    slots.torn.push(kept);
                    continue;
                }
                slots.free.push(kept.slot);
                kept.bounce.into_iter().for_each(|bounce| self.give_bounce_back(bounce));
            } else {
                slots.spent.push_back(kept);
            }
        }
    }

    /// The outcome of an operation is known, or of no interest: its slot is free once nobody looks at it any more.
    fn spend(&self, kept: Kept) {
        lock(&self.slots).spent.push_back(kept);
    }

    fn note_live(&self, slot: u32, operation: &Arc<Operation>) {
        if let Some(place) = lock(&self.live).get_mut(slot as usize) {
            *place = Arc::downgrade(operation);
        }
    }

    /// Whether an operation of this rank has to end before its memory goes.
    fn is_busy(&self, slot: u32) -> bool {
        let own = self.mailboxes.own(slot);
        match own.state() {
            SlotState::Queued => true,
            // Somebody has taken it, and is about to fetch.
            SlotState::Described => own.partner().is_some() && !own.has_moved(),
            // Bytes on their way out of memory of the library belong to the movement.
            SlotState::Matched => !own.has_moved() || own.is_buffered() && !own.has_finished(),
            _ => false,
        }
    }

    /// Ends this rank's part. Receives and described buffers that have not matched are cancelled, and so are sends whose memory is the caller's;
    /// movements under way are waited for, and messages that the library keeps until they were received or their receiver has left, for ten
    /// seconds at most. Other ranks learn that this one has left.
    pub fn destroy(&self) -> Result<(), Error> {
        self.end_unmatched();
        self.finish(Instant::now() + LAST_PATIENCE, GRACE)
    }

    /// Nobody posts from here on, and what has not matched ends, but for messages that the library keeps. Does not wait for others.
    fn end_unmatched(&self) {
        // Whoever comes second goes on when the first is done: `finish` enters again while it is inside, and must not find a writer waiting.
        let mut has_ended = lock(&self.has_ended_unmatched);
        if std::mem::replace(&mut *has_ended, true) {
            return;
        }
        self.is_ending.store(true, Ordering::SeqCst);
        // Whoever was posting has posted.
        drop(self.gate.write().unwrap_or_else(PoisonError::into_inner));
        let Ok(_open) = self.enter() else { return };
        self.mailboxes.close(&|rank| self.is_gone(rank));
        (0..self.capacity.slots).for_each(|slot| _ = self.withdraw_unmatched(slot, false));
    }

    /// Withdraws an operation that has not matched, one whose message the library keeps only where `all` are; whether it has.
    fn withdraw_unmatched(&self, slot: u32, all: bool) -> bool {
        let own = self.mailboxes.own(slot);
        let is_kept = own.state() == SlotState::Queued && own.is_buffered() && !all;
        matches!(own.state(), SlotState::Queued | SlotState::Described) && !is_kept && self.withdraw(slot, SlotStatus::Cancelled)
    }

    /// Waits for what has matched and for kept messages until so long; then lets streams of this rank go on that wait for them, since what they
    /// wait for may stand behind them, and waits a `grace` longer. What streams use even then stays until the context is destroyed.
    fn finish(&self, until: Instant, grace: Duration) -> Result<(), Error> {
        // Whoever comes second returns when the first is done: the context may close then.
        let mut is_destroyed = lock(&self.destroyed);
        if *is_destroyed {
            return Ok(());
        }
        let (mut kept_in_vain, mut moving, mut is_quiet) = (0, 0, false);
        {
            let _open = self.enter()?;
            let slots = || 0..self.capacity.slots;
            let operations: Vec<Arc<Operation>> = lock(&self.live).iter().filter_map(Weak::upgrade).collect();
            let wait = |until: Instant| {
                let mut round = 0;
                loop {
                    // The thread of callbacks may be in one that waits for this.
                    self.carry_asked();
                    operations.iter().for_each(|operation| _ = operation.settle());
                    lock(&self.slots).spent.iter().for_each(|kept| kept.land(self.mailboxes.own(kept.slot)));
                    let busy = slots().filter(|slot| self.is_busy(*slot)).count();
                    if busy == 0 || Instant::now() >= until {
                        return busy;
                    }
                    rest(round);
                    round += 1;
                }
            };
            if wait(until) > 0 {
                kept_in_vain = slots().filter(|slot| self.withdraw_unmatched(*slot, true)).count();
                operations.iter().for_each(|operation| operation.release_streams());
                lock(&self.slots).spent.iter().for_each(|kept| kept.release_streams(self.mailboxes.own(kept.slot)));
                moving = wait(Instant::now() + grace);
            }
            if moving == 0 {
                operations.iter().for_each(|operation| operation.abandon());
                is_quiet = self.wait_quiet(&operations, until.max(Instant::now() + grace));
            }
        }
        self.say_departure();
        if is_quiet {
            *is_destroyed = true;
            self.close();
            self.end_lanes();
            let held = std::mem::take(&mut *lock(&self.held));
            let imports = self.take_imports();
            give_back(&self.node.context, MessengerMemory { imports: held.imports.iter().copied().chain(imports).collect(), ..held });
        }
        if moving > 0 {
            let stuck = format!(
                "{moving} operations have matched, and their bytes have not moved: a stream of one of the two ranks has not come to them; memory of \
                 the library that they use stays until the context is destroyed"
            );
            return Err(IpcError::Timeout(stuck).into());
        }
        if kept_in_vain > 0 {
            let lost = format!("{kept_in_vain} messages were not received within {} s, and are lost", LAST_PATIENCE.as_secs());
            return Err(IpcError::Timeout(lost).into());
        }
        Ok(())
    }

    /// Waits until every slot is free or known to be quiet, and all streams of the messenger's own have ended: others may still look at flags, or raise
    /// them. Whether it came to that by then.
    fn wait_quiet(&self, operations: &[Arc<Operation>], until: Instant) -> bool {
        let backend = self.node.context.backend();
        let lanes: Vec<Completion> = lock(&self.lanes).iter().filter_map(|lane| lane.mark(backend).ok()).collect();
        let mut round = 0;
        loop {
            let has_passed = Instant::now() >= until;
            // Before the lock, which is taken while an operation's is held.
            let kept: Vec<Kept> = operations.iter().filter_map(|operation| operation.take_kept()).collect();
            {
                let mut slots = lock(&self.slots);
                slots.spent.extend(kept);
                slots.spent.iter().for_each(|kept| kept.land(self.mailboxes.own(kept.slot)));
                // One that a failure inside of a call has lost is not waited for.
                let is_complete = slots.free.len() + slots.torn.len() + slots.spent.len() >= self.capacity.slots as usize || has_passed;
                if is_complete
                    && slots.spent.iter().all(|kept| kept.is_quiet(self.mailboxes.own(kept.slot)))
                    && lanes.iter().all(|lane| lane.is_done().unwrap_or(true))
                {
                    return true;
                }
            }
            if has_passed {
                return false;
            }
            rest(round);
            round += 1;
        }
    }

    /// Tells the other ranks, once, that this one has left.
    fn say_departure(&self) {
        let watches = std::mem::take(&mut lock(&self.held).watches);
        watches.iter().for_each(|watch| self.node.context.state().leave_memory(*watch, Departure::default()));
    }

    /// Nobody looks at mailboxes from here on.
    fn close(&self) {
        *self.gate.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// Unmaps what is mapped, and gives back what is allocated as soon as no other rank has it mapped.
fn give_back(context: &Context, held: MessengerMemory) {
    // All is quiet. Other streams of the context may wait for what another rank sends after its own messenger is gone.
    let closed = held.imports.into_iter().map(|address| context.state().close_idle(address));
    let freed = held.allocations.into_iter().map(|address| context.state().free_unmapped(address));
    for error in closed.chain(freed).filter_map(Result::err) {
        log::debug!("giving back memory of a messenger: {error}");
    }
}

fn check(MessengerOptions { operations, messages }: MessengerOptions) -> Result<(), Error> {
    for (name, value, most) in [("operations", operations, 1 << 16), ("messages", messages, 1 << 20)] {
        if value == 0 || value > most {
            return Err(Error::Option { name, value: value.to_string(), reason: format!("must be from 1 to {most}") });
        }
    }
    Ok(())
}

impl EndsFirst for Messenger {
    fn take_back(&self) {
        self.end_unmatched();
    }

    fn end(&self, until: Instant) {
        if let Err(error) = self.finish(until, GRACE) {
            log::warn!("a messenger ends with its context: {error}");
        }
    }

    fn close(&self) {
        Messenger::close(self);
    }
}

impl Drop for Messenger {
    fn drop(&mut self) {
        let is_ending = self.is_ending.load(Ordering::SeqCst);
        self.end_unmatched();
        // Destroyed before, it is not waited for again.
        let (patience, grace) = if is_ending { (Duration::ZERO, Duration::ZERO) } else { (LAST_PATIENCE, GRACE) };
        if let Err(error) = self.finish(Instant::now() + patience, grace) {
            log::debug!("a messenger is dropped: {error}");
        }
        self.end_lanes();
    }
}

impl fmt::Debug for Messenger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messenger").field("node", &self.node).field("capacity", &self.capacity).finish_non_exhaustive()
    }
}
