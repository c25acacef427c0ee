//! Implements messages between the ranks of a node, for programs that do not know all transfers in advance. A receive matches a send by
//! source and tag, by MPI's rules. Alternatively, a rank describes a buffer, and another rank fetches the buffer by this descriptor.
//!
//! Sends and receives are matched in shared memory ([`crate::ipc::mailbox`]). The operation that is posted later finds the earlier one and
//! enqueues the copy, so no operation waits for a thread or for another call of the other rank. Each operation has flags that streams set
//! and wait for. The flags order the copy after the earlier work in the streams of both ranks.
//!
//! The service thread, which answers ranks that import memory, detects that another rank has ended. The service thread then ends the
//! operations that concern the ended rank, and no others.
//!
//! | file | content |
//! | --- | --- |
//! | `post` | the calls: send, receive, probe for a message, describe a buffer, fetch a described buffer |
//! | `slots` | the slots (records in shared memory) of operations; sends and receives have separate slots |
//! | `operation` | an operation of this rank, from its post until its outcome is known |
//! | `movement` | the copy of a matched send and receive, ordered after the work in the streams of both ranks |
//! | `carried` | messages for which the rank that should make the copy cannot map the other rank's memory |
//! | `buffers` | exported memory of this rank, and imported memory of other ranks |

mod buffers;
mod carried;
mod movement;
mod operation;
mod post;
mod slots;

pub use self::operation::Operation;
pub use self::post::{DESCRIPTOR_BYTES, Descriptor, Outgoing};
pub use crate::ipc::{Envelope, METADATA_BYTES, Pattern};

use self::buffers::Buffers;
use self::carried::Carried;
use self::movement::{MessageLane, mark};
use self::operation::Kept;
use self::slots::SlotPool;
use crate::backend::{Backend, BackendError, Completion, StreamHandle};
use crate::contexts::state::{EndsFirst, LAST_PATIENCE};
use crate::contexts::{Context, Error};
use crate::exchange::{Collective, Named};
use crate::group::NodeGroup;
use crate::ipc::mailbox::{Capacity, Mailboxes};
use crate::ipc::signal::rest;
use crate::ipc::{Departure, Handle, IpcError, Party, SlotState, SlotStatus};
use crate::sync::{Mutex, lock};
use crate::topology::{DeviceId, hash};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

/// Additional time for which the destruction of a messenger waits after it has released the streams that wait for operations.
const GRACE: Duration = Duration::from_secs(2);

/// Limits on the number of operations of a messenger (endpoint for messages between ranks).
#[derive(Copy, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessengerOptions {
    /// Maximum number of unreceived sends of one rank, including the buffers that the rank has described and that no other rank has fetched
    /// yet. The same maximum applies separately to the unfinished receives and fetches of a rank.
    pub operations: u32,
    /// Maximum number of messages from one rank that may be queued at another rank without a matching receive.
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

/// State of another rank: present, left or ended.
#[derive(Copy, Clone, PartialEq, Eq)]
#[repr(u8)]
enum Presence {
    Here = 0,
    /// The rank has destroyed its messenger, its endpoint for messages.
    Left = 1,
    /// The process of the rank has ended.
    Died = 2,
}

/// Options and memory handles that each rank sends to the others when a messenger is created.
#[derive(Serialize, Deserialize)]
struct MessengerOffer {
    options: MessengerOptions,
    /// Handles of the memory that contains this rank's message queues and slots. Each other rank gets its own handle, so that this rank can
    /// detect which rank has ended.
    mailbox: Vec<Vec<u8>>,
}

/// Memory that a messenger has allocated, and memory of other ranks that it has mapped.
#[derive(Default)]
struct MessengerMemory {
    allocations: Vec<u64>,
    imports: Vec<u64>,
}

/// Endpoint of one rank for messages to the other ranks of its node.
pub struct Messenger {
    node: Arc<NodeGroup>,
    capacity: Capacity,
    /// Identifier of the messenger, equal on all its ranks and different from that of any other messenger.
    id: u64,
    mailboxes: Mailboxes,
    /// State of each rank as a number ([`Presence`]), indexed by rank.
    presence: Arc<[AtomicU8]>,
    /// True while the mailboxes (message queues in shared memory) of all ranks are mapped. Every thread that accesses them holds this lock
    /// for reading.
    gate: RwLock<bool>,
    is_ending: AtomicBool,
    /// True once the other ranks have been notified that this rank has destroyed its messenger.
    has_left: AtomicBool,
    /// True once a thread has begun to end the operations that have not matched. The thread holds the lock until it has ended all of them.
    has_ended_unmatched: Mutex<bool>,
    /// True once all resources of the messenger are released. The thread that destroys the messenger holds the lock meanwhile.
    destroyed: Mutex<bool>,
    /// Slots (records in shared memory) of receives, and slots of sends. They are separate, so that neither kind of operation can use up
    /// the slots of the other.
    slots: [Mutex<SlotPool>; 2],
    live: Mutex<Vec<Weak<Operation>>>,
    lanes: Mutex<Vec<MessageLane>>,
    /// True if the last small operation was ready after the CPU had polled for it. Only then does the CPU poll repeatedly for the next
    /// small operation, because such polls are likely to succeed.
    looks_again: AtomicBool,
    buffers: Buffers,
    carried: Carried,
    held: Mutex<MessengerMemory>,
}

/// Guard that keeps the mailboxes (message queues in shared memory) of a messenger mapped.
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
        "the mailbox (shared list of messages) of rank {rank} stays locked: a rank of the node was stopped during a call (by a \
         debugger?), or has overwritten the mailbox"
    );
    IpcError::Timeout(why).into()
}

fn destroyed() -> Error {
    BackendError::Cancelled("the messenger was destroyed".into()).into()
}

fn captured() -> Error {
    Error::NotSupported(
        "messages cannot be captured: a graph may be launched several times, but each message matches once; use a plan of all ranks (node \
         plan)"
            .into(),
    )
}

impl NodeGroup {
    /// Creates a messenger, the endpoint of this rank for messages to the other ranks of the node. All ranks call this function together. A
    /// failure on one rank fails the call on all ranks.
    pub fn messenger(self: &Arc<NodeGroup>, options: MessengerOptions) -> Result<Arc<Messenger>, Error> {
        let mut held = MessengerMemory::default();
        let made = Messenger::new(self, options, &mut held);
        if made.is_err() {
            give_back(&self.context, held);
        }
        made
    }
}

/// Weak reference to a messenger. The thread that detects the end of other ranks uses it to find the messenger.
type WeakMessenger = Arc<OnceLock<Weak<Messenger>>>;

impl Messenger {
    fn new(node: &Arc<NodeGroup>, options: MessengerOptions, held: &mut MessengerMemory) -> Result<Arc<Messenger>, Error> {
        let capacity = Capacity { ranks: node.ranks(), operations: options.operations, messages: options.messages };
        let (found, presence): (WeakMessenger, Arc<[AtomicU8]>) = (Arc::default(), (0..node.ranks()).map(|_| AtomicU8::new(0)).collect());
        let mut own = 0;
        let offer = check(options).and_then(|()| Messenger::offer(node, options, capacity, &found, &presence, held, &mut own));
        let mut call = node.exchange.call(Collective::MESSENGER)?;
        let offers = call.all(offer)?;
        let bound = Messenger::map_all(node, &offers, own, held);
        // Kernels are loaded before any message may be waited for, because loading waits for the GPU, and the GPU would wait for the
        // message.
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
            has_left: AtomicBool::new(false),
            has_ended_unmatched: Mutex::new(false),
            destroyed: Mutex::new(false),
            slots: [false, true].map(|is_send| Mutex::new(SlotPool::new(capacity, is_send))),
            live: Mutex::new((0..capacity.slots()).map(|_| Weak::new()).collect()),
            lanes: Mutex::default(),
            looks_again: AtomicBool::new(true),
            buffers: Buffers::default(),
            carried: Carried::new(capacity.slots()),
            held: Mutex::new(std::mem::take(held)),
        });
        let _ = found.set(Arc::downgrade(&messenger));
        let first: Weak<dyn EndsFirst> = Arc::<Messenger>::downgrade(&messenger);
        // If the context is closing already, its memory may have been freed, so the mailboxes must no longer be accessed.
        node.context.state().end_first(first).inspect_err(|_| messenger.close())?;
        // A rank may have ended before the notification could reach the new messenger.
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
        let address = context.allocate_shared(DeviceId::HOST, capacity.bytes())?;
        held.allocations.push(address);
        *own = address;
        let mut mailbox = Vec::new();
        for rank in 0..node.ranks() {
            if rank == node.rank() {
                mailbox.push(Vec::new());
                continue;
            }
            let (found, presence) = (Arc::clone(found), Arc::clone(presence));
            let on_leave = move |departure: Departure, _| {
                // A rank that destroys its messenger reports 0 steps. A nonzero number is a request to make a copy (see `carried`): the
                // slot number plus 1.
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
            let party = Party { number: rank, on_leave: Arc::new(on_leave) };
            mailbox.push(context.state().export_to(address, capacity.bytes(), Some(party))?.encode().to_vec());
        }
        Ok(MessengerOffer { options, mailbox })
    }

    /// Maps the mailboxes (message queues and slots in shared memory) of all ranks, and returns their addresses, indexed by rank.
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
            bases.push(map(offer.mailbox.get(node.rank() as usize).map_or(&[], Vec::as_slice))?);
        }
        Ok(bases)
    }

    /// Returns the node group on which the messenger was created.
    pub fn node(&self) -> &Arc<NodeGroup> {
        &self.node
    }

    /// Returns a guard that keeps the mailboxes of all ranks mapped. Fails if the messenger was destroyed.
    fn enter(&self) -> Result<Open<'_>, Error> {
        drop(self.node.context.state().enter()?);
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        if !*gate {
            return Err(destroyed());
        }
        Ok(Open { _gate: gate, messenger: self })
    }

    fn presence(&self, rank: u32) -> Presence {
        // A number out of range comes from damaged shared memory.
        match self.presence.get(rank as usize).map_or(0, |presence| presence.load(Ordering::SeqCst)) {
            0 => Presence::Here,
            1 => Presence::Left,
            _ => Presence::Died,
        }
    }

    /// True if rank `rank` is known to have ended or to have destroyed its messenger. Does not query the operating system.
    fn is_known_gone(&self, rank: u32) -> bool {
        self.presence(rank) != Presence::Here || self.mailboxes.is_closed(rank) && rank != self.mailboxes.rank()
    }

    /// True if rank `rank` has ended or its mailbox is no longer usable. Queries the operating system.
    fn is_gone(&self, rank: u32) -> bool {
        if rank >= self.mailboxes.ranks() {
            return true;
        }
        let import = self.node.context.state().import_at(self.mailboxes.address(rank));
        rank != self.mailboxes.rank() && (self.presence(rank) == Presence::Died || import.is_none_or(|import| import.check().is_err()))
    }

    /// Ends all operations that concern rank `rank`, which has ended or has destroyed its messenger. Ends no others. If the process of that
    /// rank has ended, receives that accept any sender end too, because that rank may have been the sender.
    fn lose(&self, rank: u32, presence: Presence) {
        let Ok(_open) = self.enter() else { return };
        fence(Ordering::SeqCst);
        let concerns = |source: Option<u32>| source.map_or(presence == Presence::Died, |source| source == rank);
        self.mailboxes.forget(rank, |receive| concerns(receive.peer()), &|rank| self.is_gone(rank));
        (0..self.capacity.slots()).for_each(|slot| self.conclude_gone(slot, rank));
    }

    /// Ends the newly posted operation in slot `slot` if its peer, rank `rank`, has ended or has destroyed its messenger. If the peer ends
    /// only after this check, the thread that detects this ends the operation.
    fn check_gone(&self, slot: u32, rank: u32) {
        fence(Ordering::SeqCst);
        if self.is_known_gone(rank) {
            self.conclude_gone(slot, rank);
        }
    }

    /// Ends the operation in slot `slot` if it waits for rank `rank`, which has ended or has destroyed its messenger. The operation may be
    /// a send that is queued in that rank's mailbox. Matched operations are ended only if the process of that rank has ended, because a
    /// rank that destroys its messenger first completes its matched operations.
    fn conclude_gone(&self, slot: u32, rank: u32) {
        let own = self.mailboxes.own(slot);
        if own.is_send() && own.state() == SlotState::Queued && own.peer() == Some(rank) {
            // The operation is withdrawn under the lock of the mailbox. That rank may be ending the send itself at the same time, or may
            // have died during a match.
            self.mailboxes.withdraw(rank, slot, SlotStatus::PeerGone, &|rank| self.is_gone(rank));
        }
        if self.presence(rank) != Presence::Died || rank == self.mailboxes.rank() {
            return;
        }
        // While the pool is locked, the slot is not reused.
        let _slots = lock(self.pool(slot));
        match own.state() {
            // The other rank died while it was ending the send.
            SlotState::Ended if own.is_send() && own.peer() == Some(rank) => own.end(),
            SlotState::Described | SlotState::Matched if !own.has_moved() => {
                let Some(partner) = own.partner().filter(|partner| partner.rank == rank) else { return };
                let theirs = self.mailboxes.slot(partner);
                if own.mover().unwrap_or(rank) == rank || !self.carried.is_moving(slot) {
                    own.fail(SlotStatus::PeerGone, "");
                    own.end();
                } else if !theirs.has_come() {
                    // The stream that copies the data continues, and then signals the end of the operation.
                    own.fail(SlotStatus::PeerGone, "");
                    theirs.let_go();
                }
            }
            _ => {}
        }
    }

    fn note_live(&self, slot: u32, operation: &Arc<Operation>) {
        if let Some(place) = lock(&self.live).get_mut(slot as usize) {
            *place = Arc::downgrade(operation);
        }
    }

    /// True if the messenger's memory must stay allocated until the operation in slot `slot` has ended.
    fn is_busy(&self, slot: u32) -> bool {
        let own = self.mailboxes.own(slot);
        match own.state() {
            SlotState::Queued => true,
            // Another rank has claimed the described buffer and is about to fetch it.
            SlotState::Described => own.partner().is_some() && !own.has_moved(),
            // The copy has not finished, or buffered data is still in memory of the library.
            SlotState::Matched => !own.has_moved() || own.is_buffered() && !own.has_finished(),
            _ => false,
        }
    }

    /// Destroys this rank's endpoint for messages, and notifies the other ranks. Operations that have not matched are cancelled: receives,
    /// buffers that were described for a fetch, and sends from the caller's memory. The call waits for copies in progress. It also waits
    /// until messages that the library has buffered are received or their receiver has ended. It waits for ten seconds at most.
    pub fn destroy(&self) -> Result<(), Error> {
        self.end_unmatched();
        self.finish(Instant::now() + LAST_PATIENCE, GRACE)
    }

    /// Rejects further posts, and ends all operations that have not matched. Sends whose messages the library has buffered are not ended.
    /// Does not wait for other ranks.
    fn end_unmatched(&self) {
        // A second caller waits for the first. `finish` acquires the gate's read lock while it already holds this lock, so no thread may be
        // waiting for the write lock then.
        let mut has_ended = lock(&self.has_ended_unmatched);
        if std::mem::replace(&mut *has_ended, true) {
            return;
        }
        self.is_ending.store(true, Ordering::SeqCst);
        // This waits until all posts in progress have finished.
        drop(self.gate.write().unwrap_or_else(PoisonError::into_inner));
        let Ok(_open) = self.enter() else { return };
        self.mailboxes.close(&|rank| self.is_gone(rank));
        (0..self.capacity.slots()).for_each(|slot| _ = self.withdraw_unmatched(slot, false));
    }

    /// Cancels the operation in slot `slot` if it has not matched. A send whose message the library has buffered is cancelled only if `all`
    /// is true. Returns true if the operation was cancelled.
    fn withdraw_unmatched(&self, slot: u32, all: bool) -> bool {
        let own = self.mailboxes.own(slot);
        let is_kept = own.state() == SlotState::Queued && own.is_buffered() && !all;
        matches!(own.state(), SlotState::Queued | SlotState::Described) && !is_kept && self.withdraw(slot, SlotStatus::Cancelled)
    }

    /// Waits until the time `until` for matched operations and buffered messages. Then releases the streams of this rank that wait for
    /// unfinished operations. This may let these operations finish, because their own work may be queued behind such a wait. Then waits for
    /// at most `grace` longer. Memory that streams still use after that stays allocated until the context is destroyed.
    fn finish(&self, until: Instant, grace: Duration) -> Result<(), Error> {
        // A second caller returns only when the first has finished, because the context may close after that.
        let mut is_destroyed = lock(&self.destroyed);
        if *is_destroyed {
            return Ok(());
        }
        let (mut kept_in_vain, mut moving, mut is_quiet) = (0, 0, false);
        {
            let _open = self.enter()?;
            let slots = || 0..self.capacity.slots();
            let each_spent = |work: &dyn Fn(&Kept)| self.slots.iter().for_each(|slots| lock(slots).spent.iter().for_each(work));
            let operations: Vec<Arc<Operation>> = lock(&self.live).iter().filter_map(Weak::upgrade).collect();
            let wait = |until: Instant| {
                let mut round = 0;
                loop {
                    // This thread makes requested copies too, because the callback thread may be blocked in a callback that waits for this
                    // call.
                    self.carry_asked();
                    operations.iter().for_each(|operation| _ = operation.settle());
                    each_spent(&|kept| kept.land(self.mailboxes.own(kept.slot)));
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
                each_spent(&|kept| kept.release_streams(self.mailboxes.own(kept.slot)));
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
                "the bytes of {moving} matched sends and receives were not copied, because a stream of one of the two ranks has not \
                 reached the operation; the internal memory of these operations stays allocated until the context is destroyed"
            );
            return Err(IpcError::Timeout(stuck).into());
        }
        if kept_in_vain > 0 {
            let lost = format!("{kept_in_vain} messages were not received within {} s, and are lost", LAST_PATIENCE.as_secs());
            return Err(IpcError::Timeout(lost).into());
        }
        Ok(())
    }

    /// Waits until no rank accesses the slots of this rank any more and all internal streams have finished. Other ranks may read or set
    /// flags until then. Returns true if this happened before the time `until`.
    fn wait_quiet(&self, operations: &[Arc<Operation>], until: Instant) -> bool {
        let backend = self.node.context.backend();
        let lanes: Vec<Completion> = lock(&self.lanes).iter().filter_map(|lane| lane.mark(backend).ok()).collect();
        let mut round = 0;
        loop {
            let has_passed = Instant::now() >= until;
            // These locks are acquired before the pool's lock, because elsewhere the pool's lock is acquired while an operation's lock is
            // held.
            operations.iter().filter_map(|operation| operation.take_kept()).for_each(|kept| self.spend(kept));
            let is_quiet = |slots: &Mutex<SlotPool>| {
                let slots = lock(slots);
                slots.spent.iter().for_each(|kept| kept.land(self.mailboxes.own(kept.slot)));
                // After the deadline, a slot that an error inside a call has left unusable is not waited for.
                let is_complete =
                    slots.free.len() + slots.torn.len() + slots.spent.len() >= self.capacity.operations as usize || has_passed;
                is_complete && slots.spent.iter().all(|kept| kept.is_quiet(self.mailboxes.own(kept.slot)))
            };
            if self.slots.iter().all(is_quiet) && lanes.iter().all(|lane| lane.is_done().unwrap_or(true)) {
                return true;
            }
            if has_passed {
                return false;
            }
            rest(round);
            round += 1;
        }
    }

    /// Notifies the other ranks that this rank has destroyed its messenger. Repeated calls do nothing.
    fn say_departure(&self) {
        if self.has_left.swap(true, Ordering::SeqCst) {
            return;
        }
        for rank in (0..self.mailboxes.ranks()).filter(|rank| *rank != self.mailboxes.rank()) {
            self.node.context.state().leave_memory(self.mailboxes.address(rank), Departure::default());
        }
    }

    /// Marks the mailboxes as unmapped, so that no thread accesses them any more.
    fn close(&self) {
        *self.gate.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// Unmaps memory of other ranks, and frees this rank's memory once no other rank has it mapped.
fn give_back(context: &Context, held: MessengerMemory) {
    // All work of this messenger has finished, so the mappings are closed without a wait for other streams of the context. Such streams may
    // wait for messages that another rank sends only after it has destroyed its messenger.
    let closed = held.imports.into_iter().map(|address| context.state().close_idle(address));
    let freed = held.allocations.into_iter().map(|address| context.state().free_unmapped(address));
    for error in closed.chain(freed).filter_map(Result::err) {
        log::debug!("could not free memory of a messenger: {error}");
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
            log::warn!("could not destroy a messenger together with its context: {error}");
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
        // A messenger that was destroyed explicitly has already waited, so this code does not wait again.
        let (patience, grace) = if is_ending { (Duration::ZERO, Duration::ZERO) } else { (LAST_PATIENCE, GRACE) };
        if let Err(error) = self.finish(Instant::now() + patience, grace) {
            log::debug!("could not destroy a messenger that was dropped: {error}");
        }
        self.end_lanes();
    }
}

impl fmt::Debug for Messenger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messenger").field("node", &self.node).field("capacity", &self.capacity).finish_non_exhaustive()
    }
}
