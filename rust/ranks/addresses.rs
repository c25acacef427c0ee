//! Where everything that a plan touches lies in this process.

use super::group::NodeGroup;
use super::order::PlanPlaces;
use super::part::{Addresses, is_inside, stays};
use super::together::Together;
use super::transfers::{NodeEnd, RankRequest};
use crate::backend::ActionGrid;
use crate::ipc::StepPlaces;
use crate::plan::{Copy, Place};
use crate::program::ranks::{Flag, FlagId};
use crate::topology::DeviceId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What the kernel of a rank can do. Where a flag lies depends on that of two ranks.
#[derive(Serialize, Deserialize)]
pub(super) struct KernelReach {
    /// Of the one kernel that does the rank's part, if one does.
    pub blocks: Option<u32>,
    /// Ranks at whose GPUs it raises flags.
    pub takers: BTreeSet<u32>,
}

/// Bytes of a flag.
pub(super) const FLAG_BYTES: u64 = 8;

/// Memory of a rank's GPU, as distances from the first flag.
#[derive(Copy, Clone, Default)]
pub(super) struct NearLayout {
    /// Words of the kernel's blocks.
    pub words: u64,
    /// The word of turns.
    pub turn: u64,
    /// Two inboxes; what comes before is 0 in the beginning.
    pub inboxes: u64,
    pub bytes: u64,
}

/// Memory that a rank has for a plan, or has mapped for it.
#[derive(Default)]
pub(super) struct Held {
    /// Of this rank.
    pub allocations: Vec<u64>,
    /// Of others, mapped here.
    pub imports: Vec<u64>,
    /// Of these the flags that this rank raises: their owners wait for it.
    pub flags: Vec<u64>,
    /// Of this rank's memory what bytes pass through.
    pub rings: Vec<HeldRing>,
    /// Where the flags of partitions begin that each rank takes, once the first variant is bound.
    pub partition_flags: BTreeMap<u32, u64>,
}

/// Staging memory of one variant of a plan, of which another may make use in its own steps: those begin when all its users have come to them.
pub(super) struct HeldRing {
    pub device: DeviceId,
    pub bytes: u64,
    pub users: BTreeSet<u32>,
    pub address: u64,
}

/// Where everything lies in this process.
pub(super) struct Bindings<'a> {
    pub node: &'a NodeGroup,
    pub together: &'a Together,
    pub requests: &'a [RankRequest],
    pub windows: BTreeMap<(u32, u32), u64>,
    pub rings: BTreeMap<u32, u64>,
    pub flags: BTreeMap<u32, u64>,
    /// Of partitions, where the plan has another variant before this one.
    pub partition_flags: BTreeMap<u32, u64>,
    /// Flags on GPUs.
    pub near: BTreeMap<u32, u64>,
    /// Of each rank, once all have told.
    pub kernels: Vec<KernelReach>,
    /// No kernel may do a part.
    pub by_streams: bool,
}

impl Bindings<'_> {
    /// See [`Addresses`].
    pub fn address(&self, place: Place) -> u64 {
        self.place(place)
    }

    /// Where the steps of this plan stand, here and at the ranks that this one waits for and that wait for it; `None` where there are none.
    pub fn places(&self, plan: u64) -> Option<Arc<PlanPlaces>> {
        let (rank, flags) = (self.node.rank(), &self.together.parts.flags);
        let at = |taker: u32| Some(StepPlaces::at(self.flags.get(&taker)? + self.together.places_of(taker)?));
        let awaited: BTreeSet<u32> = flags.iter().filter(|flag| flag.taker == rank).map(|flag| flag.raiser).collect();
        let waiting = flags.iter().filter(|flag| flag.raiser == rank && flag.taker != rank).map(|flag| flag.taker);
        let both: BTreeSet<u32> = waiting.filter(|taker| awaited.contains(taker)).collect();
        let neighbours: Vec<(u32, StepPlaces)> = both.into_iter().filter_map(|other| Some((other, at(other)?))).collect();
        if neighbours.is_empty() { None } else { Some(Arc::new(PlanPlaces { plan, own: at(rank)?, neighbours })) }
    }

    /// Kernels know near flags alone: where one is not, both its ranks do their parts by streams, and then so do others who share flags with them.
    pub fn leave_to_streams(&mut self) {
        let flags = &self.together.parts.flags;
        while let Some(far) = (0..flags.len()).find(|flag| {
            let Flag { raiser, taker } = flags[*flag];
            self.near_blocks(FlagId(*flag as u32)).is_none()
                && [raiser, taker].iter().any(|rank| self.kernels[*rank as usize].blocks.is_some())
        }) {
            let Flag { raiser, taker } = flags[far];
            [raiser, taker].iter().for_each(|rank| self.kernels[*rank as usize].blocks = None);
        }
    }

    /// See [`Addresses`].
    pub fn flag_address(&self, flag: FlagId) -> u64 {
        self.flag(flag)
    }
}

impl Addresses for Bindings<'_> {
    fn place(&self, place: Place) -> u64 {
        let end = |end: NodeEnd, offset: u64| self.windows.get(&(end.rank, end.window)).map_or(0, |base| base + end.offset + offset);
        match place {
            Place::Source { transfer, offset } => end(self.together.transfers[transfer as usize].src, offset),
            Place::Destination { transfer, offset } => end(self.together.transfers[transfer as usize].dst, offset),
            Place::Slot { ring, slot } => {
                let bytes = self.together.plan.program.rings[ring.0 as usize].slot_bytes;
                self.rings.get(&ring.0).map_or(0, |base| base + u64::from(slot) * bytes)
            }
        }
    }

    fn flag(&self, flag: FlagId) -> u64 {
        let taker = self.together.parts.flags[flag.0 as usize].taker;
        let is_shared = !self.partition_flags.is_empty() && self.together.partitioned.as_ref().is_some_and(|of| of.own.contains(&flag.0));
        let flags = match self.near_blocks(flag) {
            _ if is_shared => &self.partition_flags,
            Some(_) => &self.near,
            None => &self.flags,
        };
        flags.get(&taker).map_or(0, |base| base + FLAG_BYTES * self.together.flag_places[flag.0 as usize])
    }

    fn near_blocks(&self, flag: FlagId) -> Option<u32> {
        let Flag { raiser, taker } = self.together.parts.flags[flag.0 as usize];
        let raises = self.kernels.get(raiser as usize).filter(|kernel| kernel.takers.contains(&taker))?;
        self.kernels.get(taker as usize)?.blocks.and(raises.blocks)
    }

    fn inbox(&self, rank: u32) -> u64 {
        self.near.get(&rank).zip(self.together.near_of(rank)).map_or(0, |(base, near)| base + near.inboxes)
    }

    fn device(&self, device: DeviceId) -> DeviceId {
        self.node.device_here(device)
    }

    fn own_device(&self) -> DeviceId {
        self.node.own_device()
    }

    fn is_host(&self, place: Place) -> bool {
        let end = |end: NodeEnd| DeviceId(self.requests[end.rank as usize].windows[end.window as usize].device).is_host();
        match place {
            Place::Source { transfer, .. } => end(self.together.transfers[transfer as usize].src),
            Place::Destination { transfer, .. } => end(self.together.transfers[transfer as usize].dst),
            Place::Slot { ring, .. } => self.together.plan.program.rings[ring.0 as usize].device.is_host(),
        }
    }

    fn is_inside(&self, copy: &Copy) -> bool {
        is_inside(copy, |transfer| stays(&self.together.plan.transfers[transfer as usize].shape, self.together.ends[transfer as usize]))
    }
}

impl Together {
    /// Where the places of a rank's steps begin in the memory of the flags that it takes; `None` for a rank that takes none.
    pub fn places_of(&self, rank: u32) -> Option<u64> {
        let flags = self.parts.flags.iter().filter(|flag| flag.taker == rank).count() as u64;
        (flags > 0).then(|| (flags * FLAG_BYTES).next_multiple_of(StepPlaces::ALIGN))
    }

    /// What a rank that takes flags has on its GPU behind those. Others do not write to the lines of memory of its words.
    pub fn near_of(&self, rank: u32) -> Option<NearLayout> {
        const LINES: u64 = 256;
        let flags = self.parts.flags.iter().filter(|flag| flag.taker == rank).count() as u64;
        let words = (flags * FLAG_BYTES).next_multiple_of(LINES);
        let turn = words + ActionGrid::WORDS * 8;
        let inboxes = (turn + 8).next_multiple_of(LINES);
        let bytes = inboxes + self.eager.as_ref().map_or(0, |eager| 2 * eager.inboxes[rank as usize]);
        (flags > 0).then_some(NearLayout { words, turn, inboxes, bytes })
    }
}
