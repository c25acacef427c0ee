//! Host memory through which both ranks move the pieces of a message, and its counters.

use super::Messenger;
use super::buffers::HandleBytes;
use crate::backend::Signal;
use crate::ipc::signal::{load, reached, store};
use crate::sync::lock;
use crate::topology::DeviceId;

/// Slots of a staging area, and bytes of each.
pub(super) const SLOTS: u64 = 4;
pub(super) const SLOT_BYTES: u64 = 4 << 20;

/// The counters lie in front: pieces put in, pieces taken out, pieces that the asked rank has done by itself, and those that the other has
/// where its operation ends without that rank's.
pub(super) const COUNTERS_BYTES: u64 = 4096;
const COUNTER_STRIDE: u64 = 64;

pub(super) const AREA_BYTES: u64 = COUNTERS_BYTES + SLOTS * SLOT_BYTES;

/// More are not left to the host path: a stream holds some thousand operations that wait, and blocks whoever adds to them.
pub(super) const MOST_PIECES: u64 = 128;

/// Staging areas of this rank, for one other rank and for all. One in which a movement has failed counts, and is not used again: a rank whose
/// halves fail is asked no more.
const MOST_AREAS: [usize; 2] = [2, 16];

/// Staging memory of this rank, which one other rank maps: its end fails the waits in it.
pub(super) struct Area {
    peer: u32,
    staging: SharedStaging,
    handle: HandleBytes,
    /// The slot whose operation used it last, and in which use.
    last: (u32, u64),
    has_failed: bool,
}

/// Staging memory, here or of another rank.
#[derive(Copy, Clone, Debug)]
pub(super) struct SharedStaging {
    pub(super) address: u64,
    /// Where the counters stood before.
    pub(super) base: u64,
    /// How many pieces are moved.
    pub(super) pieces: u64,
}

impl SharedStaging {
    fn counter(&self, which: u64) -> u64 {
        self.address + which * COUNTER_STRIDE
    }

    /// Reached when so many pieces were put there.
    pub(super) fn put(&self, pieces: u64) -> Signal {
        Signal { counter: self.counter(0), value: self.base.wrapping_add(pieces) }
    }

    pub(super) fn taken(&self, pieces: u64) -> Signal {
        Signal { counter: self.counter(1), value: self.base.wrapping_add(pieces) }
    }

    pub(super) fn done(&self) -> Signal {
        Signal { counter: self.counter(2), value: self.base.wrapping_add(self.pieces) }
    }

    /// The rank that moves the message has done what it enqueued.
    pub(super) fn left(&self) -> Signal {
        Signal { counter: self.counter(3), ..self.done() }
    }

    /// Whether the asked rank has done its half. No wait that fails raises this counter, and later movements only raise it further.
    pub fn is_whole(&self) -> bool {
        self.has_reached(self.done())
    }

    pub(super) fn has_reached(&self, Signal { counter, value }: Signal) -> bool {
        // SAFETY: a counter of this staging memory, which is mapped while it is in use.
        reached(unsafe { load(counter) }, value)
    }

    pub(super) fn set(&self, Signal { counter, value }: Signal) {
        // SAFETY: as above.
        unsafe { store(counter, value) }
    }

    /// Lets streams of both ranks go on that wait for a piece.
    pub(super) fn give_up(&self) {
        [self.put(1 << 62), self.taken(1 << 62)].into_iter().for_each(|signal| self.set(signal));
    }
}

impl Messenger {
    /// Staging memory for a movement of so many pieces, and its handle; `None` where all is in use.
    pub(super) fn take_area(&self, peer: u32, slot: u32, pieces: u64) -> Option<(SharedStaging, HandleBytes)> {
        let last = (slot, self.mailboxes.own(slot).uses());
        let mut areas = lock(&self.shares.areas);
        // Where a half was not done something may still be written there.
        let is_free = |area: &Area| area.peer == peer && !area.has_failed && self.has_ended(area.last) && area.staging.is_whole();
        if let Some(area) = areas.iter_mut().find(|area| is_free(area)) {
            let SharedStaging { address, base, pieces: before } = area.staging;
            (area.staging, area.last) = (SharedStaging { address, base: base.wrapping_add(before), pieces }, last);
            return Some((area.staging, area.handle));
        }
        let [for_one, for_all] = MOST_AREAS;
        let is_full = areas.len() >= for_all || areas.iter().filter(|area| area.peer == peer).count() >= for_one;
        if is_full && !self.shares.is_forced() {
            return None;
        }
        let context = &self.node.context;
        let made = context.allocate_shared(DeviceId::HOST, AREA_BYTES).and_then(|address| {
            let exported = context.export_memory(address, AREA_BYTES).inspect_err(|_| drop(context.free(address)));
            exported.map(|handle| (address, handle.encode()))
        });
        let (address, handle) = match made {
            Ok(made) => made,
            Err(error) => {
                log::debug!("a large message takes one path: {error}");
                return None;
            }
        };
        lock(&self.held).allocations.push(address);
        let staging = SharedStaging { address, base: 0, pieces };
        (0..4).for_each(|which| staging.set(Signal { counter: staging.counter(which), value: 0 }));
        areas.push(Area { peer, staging, handle, last, has_failed: false });
        Some((staging, handle))
    }

    /// The other rank has not touched it.
    pub(super) fn leave_area(&self, staging: &SharedStaging) {
        self.with_area(staging, |area| area.staging.pieces = 0);
    }

    /// It is not used again.
    pub(super) fn drop_area(&self, staging: &SharedStaging) {
        self.with_area(staging, |area| area.has_failed = true);
    }

    fn with_area(&self, staging: &SharedStaging, change: impl FnMut(&mut Area)) {
        lock(&self.shares.areas).iter_mut().filter(|area| area.staging.address == staging.address).for_each(change);
    }
}
