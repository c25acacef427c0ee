//! Computes the addresses, in this process, of all memory that a node plan uses. A node plan is a communication plan that the ranks of a
//! node execute together.

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

/// Size of the kernel that executes one rank's operations of a plan, and the ranks in whose GPU memory this kernel can set flags. All ranks
/// exchange this information, because it decides whether a flag is in GPU memory or in host memory.
#[derive(Serialize, Deserialize)]
pub(super) struct KernelReach {
    /// Number of blocks of the kernel that executes the rank's operations. `None` if streams execute them.
    pub blocks: Option<u32>,
    /// Ranks in whose GPU memory this rank's kernel can set flags.
    pub takers: BTreeSet<u32>,
}

/// Size of a flag in bytes.
pub(super) const FLAG_BYTES: u64 = 8;

/// Layout of the memory on a rank's GPU that contains the flags, counters and inboxes of a plan. All fields except `bytes` are offsets in
/// bytes from the start of this memory.
#[derive(Copy, Clone, Default)]
pub(super) struct NearLayout {
    /// Offset in bytes of the counters that the blocks of the rank's kernel share.
    pub words: u64,
    /// Offset in bytes of the counter that selects which of the two inboxes a step uses ([`eager`](super::eager)).
    pub turn: u64,
    /// Offset in bytes of the two inboxes (receive buffers for small transfers). The memory in front of the inboxes is initially zero.
    pub inboxes: u64,
    pub bytes: u64,
}

/// Memory that a rank has allocated or mapped for a plan, to be released with the plan.
#[derive(Default)]
pub(super) struct Held {
    /// Addresses of memory that this rank has allocated for the plan.
    pub allocations: Vec<u64>,
    /// Addresses in this process at which memory of other ranks is mapped.
    pub imports: Vec<u64>,
    /// Addresses in this process at which flag memory of other ranks is mapped. This rank sets flags there, and those ranks wait for them.
    pub flags: Vec<u64>,
    /// Staging ring buffers in memory of this rank.
    pub rings: Vec<HeldRing>,
    /// Addresses in this process of the flags of partitioned transfers, keyed by the rank that waits for the flags. Empty until the first
    /// variant of the plan is bound to memory.
    pub partition_flags: BTreeMap<u32, u64>,
}

/// Staging ring buffer that was allocated for one variant of a plan. The other variants may use it too, because a step begins only after
/// all ranks that use the buffer have reached the step.
pub(super) struct HeldRing {
    pub device: DeviceId,
    pub bytes: u64,
    pub users: BTreeSet<u32>,
    pub address: u64,
}

/// Addresses in this process of all memory that one plan variant uses.
pub(super) struct Bindings<'a> {
    pub node: &'a NodeGroup,
    pub together: &'a Together,
    pub requests: &'a [RankRequest],
    pub windows: BTreeMap<(u32, u32), u64>,
    pub rings: BTreeMap<u32, u64>,
    pub flags: BTreeMap<u32, u64>,
    /// Addresses in this process of the flags of partitioned transfers, keyed by the rank that waits for the flags. All variants of the
    /// plan share these flags. Empty while the first variant is being bound to memory.
    pub partition_flags: BTreeMap<u32, u64>,
    /// Addresses in this process of the flags in GPU memory, keyed by the rank that waits for the flags.
    pub near: BTreeMap<u32, u64>,
    /// Description of each rank's kernel, indexed by rank. Empty until all ranks have reported their kernels.
    pub kernels: Vec<KernelReach>,
    /// True if streams, and not kernels, must execute this plan variant on all ranks.
    pub by_streams: bool,
}

impl Bindings<'_> {
    /// Returns the address in this process of a position in a source, a destination or a staging buffer.
    pub fn address(&self, place: Place) -> u64 {
        self.place(place)
    }

    /// Returns the shared tables in which this rank and its neighbours publish where in stream order they have enqueued the plan's steps
    /// (executions). A neighbour is a rank that this rank waits for in each step and that also waits for this rank. Returns `None` if this
    /// rank has no neighbours.
    pub fn places(&self, plan: u64) -> Option<Arc<PlanPlaces>> {
        let (rank, flags) = (self.node.rank(), &self.together.parts.flags);
        let at = |taker: u32| Some(StepPlaces::at(self.flags.get(&taker)? + self.together.places_of(taker)?));
        let awaited: BTreeSet<u32> = flags.iter().filter(|flag| flag.taker == rank).map(|flag| flag.raiser).collect();
        let waiting = flags.iter().filter(|flag| flag.raiser == rank && flag.taker != rank).map(|flag| flag.taker);
        let both: BTreeSet<u32> = waiting.filter(|taker| awaited.contains(taker)).collect();
        let neighbours: Vec<(u32, StepPlaces)> = both.into_iter().filter_map(|other| Some((other, at(other)?))).collect();
        if neighbours.is_empty() { None } else { Some(Arc::new(PlanPlaces { plan, own: at(rank)?, neighbours })) }
    }

    /// Selects streams instead of a kernel for each rank whose kernel cannot use all flags of that rank. A kernel uses only flags in memory
    /// of the GPU that waits for them. If one flag of a pair of ranks is not in such memory, streams execute the operations of both ranks.
    /// All other flags of these two ranks then move to host memory too, so the rule is repeated until nothing changes.
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

    /// Returns the address in this process of a flag.
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
    /// Returns the offset in bytes, in the rank's flag memory, of the table in which the rank publishes where in stream order it has
    /// enqueued its steps. `None` for a rank that waits for no flags.
    pub fn places_of(&self, rank: u32) -> Option<u64> {
        let flags = self.parts.flags.iter().filter(|flag| flag.taker == rank).count() as u64;
        (flags > 0).then(|| (flags * FLAG_BYTES).next_multiple_of(StepPlaces::ALIGN))
    }

    /// Returns the layout of the flag memory on the rank's GPU. `None` for a rank that waits for no flags. The counters of the rank's
    /// kernel are in cache lines to which no other rank writes.
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
