//! What all ranks compute alike of what they have handed in: the plan, everybody's part of it, and the flags between them.
//!
//! Where the model sees several paths gain there are several variants of the plan, each divided and bound like any other, and all ranks take the
//! same one in a step ([`super::agreed`]). A step of one begins, as that of any plan, when all ranks whose memory it touches have come to it, so steps
//! of two may follow each other.

use super::eager::Eager;
use super::exchange::CollectiveCall;
use super::group::NodeGroup;
use super::part::{SMALL_BYTES, is_inside, is_little, stays};
use super::partitioning::{Partitioned, PartitionedBatch, Partitioning, Settled};
use super::transfers::{NodeEnd, NodeTransfer, RankRequest, TransferName, batch_of};
use super::wire;
use crate::adapt;
use crate::backend::{MemoryKind, SignalWait};
use crate::contexts::batch::{ByteRange, first_overlap};
use crate::contexts::{End, Error};
use crate::plan::{self, LEAST_SHARED_BYTES, Options, PartitionVariant, Passing, Place, PlanError, Program, Relays, Shape};
use crate::program::PartitionMove;
use crate::program::ranks::{EndRanks, Part, Parts, RankedBatch, check_parts, divide};
use crate::topology::{DeviceId, Machine};
use crate::tune;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

/// The work of one rank in a step, in figures.
pub(super) struct RankWork {
    pub operations: usize,
    pub lanes: usize,
    pub bytes: u64,
    /// Flags that it signals, and flags that it waits for.
    pub raises: usize,
    pub takes: usize,
}

impl RankWork {
    fn of(part: &Part) -> RankWork {
        let copies = part.steps.iter().flat_map(|step| &step.copies);
        RankWork {
            operations: part.steps.len(),
            lanes: part.lanes.len(),
            bytes: copies.map(|copy| copy.bytes).sum(),
            raises: part.begins.len() + part.steps.iter().map(|step| step.raises.len()).sum::<usize>(),
            takes: part.ends.len() + part.steps.iter().map(|step| step.takes.len()).sum::<usize>(),
        }
    }
}

/// What all ranks have made alike, of one variant.
pub(super) struct Together {
    pub plan: plan::Plan,
    /// Those of other ranks are there until this one is bound.
    pub parts: Parts,
    /// One for each rank.
    pub work: Vec<RankWork>,
    /// The batch: transfers, the ranks of their ends, and where they lie.
    pub transfers: Vec<NodeTransfer>,
    pub ends: Vec<EndRanks>,
    /// The device of each source, as the node numbers devices.
    pub src_devices: Vec<DeviceId>,
    /// Where transfers move in partitions.
    pub partitioned: Option<Partitioned>,
    /// Where its bytes may go into inboxes.
    pub eager: Option<Eager>,
    /// The rank in whose memory each ring is.
    pub ring_owners: Vec<u32>,
    /// The place of each flag among those that its taker takes.
    pub flag_places: Vec<u64>,
}

impl Together {
    /// Plans the transfers of all ranks, and divides the work. The plan that the model prefers is the first.
    pub fn variants(
        node: &NodeGroup,
        call: &mut CollectiveCall<'_>,
        requests: &[RankRequest],
        partitioning: Option<Partitioning>,
        options: &Options,
        adapts: bool,
    ) -> Result<Vec<Together>, Error> {
        let blame =
            |(rank, index): TransferName, reason: String| node.exchange.blame(rank, c"transfers", format!("transfer {index}: {reason}"));
        node.exchange.check_alike(c"options", &requests.iter().map(|request| &request.options).collect::<Vec<_>>())?;
        let handed = batch_of(requests.iter().map(|request| &*request.transfers), blame)?;
        let transfers: Vec<NodeTransfer> = handed.iter().map(|handed| handed.transfer).collect();
        // A transfer in an error is named as its rank numbers it.
        let failed = |transfer: usize, end: End, reason: String| blame(handed[transfer].name_of(end), reason);
        let unsupported = |transfer: usize, reason: String| {
            let (rank, index) = handed[transfer].name;
            Error::NotSupported(format!("transfer {index} of rank {rank}: {reason}"))
        };
        let (mut shapes, mut ranges) = (Vec::new(), Vec::new());
        for (index, transfer) in transfers.iter().enumerate() {
            let mut look = |end: NodeEnd, which: End| {
                let windows = requests.get(end.rank as usize).map(|request| &request.windows);
                let Some(window) = windows.and_then(|windows| windows.get(end.window as usize)) else {
                    return Err(failed(
                        index,
                        which,
                        format!("its {which} is window {} of rank {}, which has none such", end.window, end.rank),
                    ));
                };
                let is_within = |last: &u64| *last <= window.bytes && window.address.checked_add(*last).is_some();
                if !end.offset.checked_add(transfer.bytes).as_ref().is_some_and(is_within) {
                    let (window, size) = (end.window, window.bytes);
                    let reason = format!(
                        "its {which} runs out of window {window} of rank {}: offset {}, {} bytes of {size}",
                        end.rank, end.offset, transfer.bytes
                    );
                    return Err(failed(index, which, reason));
                }
                if transfer.bytes > 0 {
                    let first = window.address + end.offset;
                    ranges.push(ByteRange { space: end.rank, first, last: first + (transfer.bytes - 1), transfer: index, end: which });
                }
                let device = DeviceId(window.device);
                let kind = match device.is_host() {
                    false => MemoryKind::Device,
                    true if window.is_pageable => MemoryKind::Pageable,
                    true => MemoryKind::Pinned,
                };
                Ok((device, kind))
            };
            let (dst_device, dst_kind) = look(transfer.dst, End::Destination)?;
            let (src_device, src_kind) = look(transfer.src, End::Source)?;
            let pageable = [dst_kind, src_kind].contains(&MemoryKind::Pageable);
            if pageable && transfer.dst.rank != transfer.src.rank && transfer.bytes > 0 {
                let reason = "pageable host memory is not visible to another rank; allocate it as host memory shared between processes";
                return Err(failed(index, End::Source, reason.into()));
            }
            shapes.push(Shape { source: 0, dst_device, src_device, dst_kind, src_kind, bytes: transfer.bytes });
        }
        let of_end = |end| ranges.iter().copied().filter(move |range: &ByteRange| range.end == end);
        if let Some((a, b)) = first_overlap(of_end(End::Destination), of_end(End::Source)) {
            let (rank, index) = handed[b.transfer].name_of(b.end);
            let reason = format!(
                "its {} overlaps the {} of transfer {index} of rank {rank}; transfers of a step run in no particular order",
                a.end, b.end
            );
            return Err(failed(a.transfer, a.end, reason));
        }
        let ends: Vec<EndRanks> = transfers.iter().map(|t| EndRanks { src: t.src.rank, dst: t.dst.rank }).collect();
        let owners = node.owners();
        let (variants, settled) = match partitioning {
            None => {
                let address = |end: NodeEnd| requests[end.rank as usize].windows[end.window as usize].address + end.offset;
                number_sources(&mut shapes, transfers.iter().map(|transfer| (transfer.src.rank, address(transfer.src))));
                let batch = RankedBatch { ranks: node.ranks(), shapes: &shapes, ends: &ends, owners: &owners };
                let by = |machine: &Machine, options: &Options| -> Result<Vec<plan::Plan>, PlanError> {
                    let plan = |options: &Options| plan::plan(machine, &shapes, options);
                    let best = plan(options)?;
                    if adapts { adapt::variants(best, options, plan) } else { Ok(vec![best]) }
                };
                let with_kernels = || {
                    let straight = Options { host_path: false, relays: Relays::NONE, passing: Passing::Kernels, ..*options };
                    let all = by(&node.machine.with_costs(node.machine.costs().between_kernels()), &straight).ok()?;
                    kernels_pass_on(&all[0], &batch).then_some(all)
                };
                // What a rank has for all others is soon much: kernels of four H200 took 280 us for 32 MiB, a chain of copy engines 276 for 64 (2026-11-28).
                let most = shapes.iter().filter(|shape| shape.source != 0).map(|shape| shape.bytes).max();
                let may_pass_on = node.signal_wait() == SignalWait::Kernel && most.is_some_and(|bytes| bytes <= SMALL_BYTES);
                let all = Self::planned_once(call, node.rank(), (&shapes, options), || {
                    let passed_on = if may_pass_on { with_kernels() } else { None };
                    passed_on.map_or_else(|| by(&node.machine, options), Ok)
                })?;
                let whole = |plan| PartitionVariant { name: "", plan, seconds: 0.0, how: PartitionMove::Early };
                (all.into_iter().map(whole).collect(), None)
            }
            Some(partitioning) => {
                let shape = tune::shape_of(&shapes);
                let tuned = requests[0].tuned.iter().find(|tuned| tuned.shape == shape).map(|tuned| tuned.count);
                let Settled { variants, forecast } = partitioning.plan(&node.machine, &shapes, options, tuned, adapts)?;
                let (agent, partitions) = (partitioning.agent, forecast.partitions);
                (variants, Some(PartitionedBatch { agent, shape, partitions }))
            }
        };
        let src_devices: Vec<DeviceId> = shapes.iter().map(|shape| shape.src_device).collect();
        // Inboxes are for steps that all come after each other.
        let takes_inboxes = partitioning.is_none() && variants.len() == 1;
        let divided = variants.into_iter().map(|variant| {
            // What producers store has no bytes in its plan.
            let shapes: Vec<Shape> = variant.plan.transfers.iter().map(|transfer| transfer.shape).collect();
            let batch = RankedBatch { ranks: node.ranks(), shapes: &shapes, ends: &ends, owners: &owners };
            let plan = &variant.plan;
            plan::validate(&plan.program, options.staging_bytes)?;
            let mut parts = divide(&plan.program, &batch);
            check_parts(&plan.program, &batch, &parts)?;
            let eager = if takes_inboxes { Eager::new(&mut parts, &batch) } else { None };
            let partitioned = match &settled {
                Some(of) => Some(Partitioned::new(of, &variant, &handed, &mut parts, &batch, &unsupported)?),
                None => None,
            };
            let ring_owners = ring_owners(&plan.program, &parts, &owners);
            let flag_places = flag_places(&parts, partitioned.as_ref().map_or(0..0, |partitioned| partitioned.own.clone()));
            let (transfers, ends, src_devices) = (transfers.clone(), ends.clone(), src_devices.clone());
            let work = parts.parts.iter().map(RankWork::of).collect();
            Ok(Together { plan: variant.plan, parts, work, transfers, ends, src_devices, partitioned, eager, ring_owners, flag_places })
        });
        divided.collect()
    }

    /// Returns the variants of a plan that rank 0 makes for all: dozens of ranks would take as many times as long, and as much memory. Where it makes none
    /// each rank plans by itself, and fails for the reason that it finds.
    fn planned_once(
        call: &mut CollectiveCall<'_>,
        rank: u32,
        (shapes, options): (&[Shape], &Options),
        plan: impl Fn() -> Result<Vec<plan::Plan>, PlanError>,
    ) -> Result<Vec<plan::Plan>, Error> {
        let own = (rank == 0).then(&plan);
        let told = own.as_ref().and_then(|own| own.as_ref().ok()).map(|all| all.iter().map(wire::encode).collect::<Vec<_>>());
        let told = call.all(Ok(told))?.into_iter().next().flatten();
        let decoded = |all: Vec<Vec<u64>>| all.iter().map(|numbers| wire::decode(numbers, shapes, options)).collect::<Option<Vec<_>>>();
        match (own, told.and_then(decoded)) {
            (Some(own), _) => Ok(own?),
            (None, Some(all)) if !all.is_empty() => Ok(all),
            _ => Ok(plan()?),
        }
    }

    /// Whether producers store the bytes of its transfers.
    pub fn is_stored(&self) -> bool {
        self.partitioned.as_ref().is_some_and(|partitioned| partitioned.how == PartitionMove::Stored)
    }

    /// What all ranks must have alike. Ranks of the same build hash alike.
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&*self.plan.program, &self.parts).hash(&mut hasher);
        hasher.finish()
    }

    /// Drops what only binding needs, once `rank` is bound: the parts of other ranks, and why paths of transfers between others were left out.
    pub fn keep_own(&mut self, rank: u32) {
        for part in (0..).zip(&mut self.parts.parts).filter(|(other, _)| *other != rank).map(|(_, part)| part) {
            *part = Part::default();
        }
        let none = Arc::default();
        for (transfer, ends) in self.plan.transfers.iter_mut().zip(&self.ends) {
            if ![ends.src, ends.dst].contains(&rank) {
                transfer.rejected = Arc::clone(&none);
            }
        }
    }

    /// Bytes that a rank sends or receives in a step.
    pub fn bytes_of(&self, rank: u32) -> u64 {
        let own = self.transfers.iter().filter(|t| [t.dst.rank, t.src.rank].contains(&rank));
        own.fold(0, |sum, t| sum.saturating_add(t.bytes))
    }
}

/// Whether ranks pass bytes on, and all of them by kernels, because that is little.
fn kernels_pass_on(plan: &plan::Plan, batch: &RankedBatch<'_>) -> bool {
    let stays = |transfer: u32| stays(&batch.shapes[transfer as usize], batch.ends[transfer as usize]);
    let passes = plan.program.ops.iter().flat_map(|op| &op.copies).any(|copy| matches!(copy.from, Place::Destination { .. }));
    passes && divide(&plan.program, batch).parts.iter().all(|part| is_little(part, |copy| is_inside(copy, stays)))
}

/// The place of each flag among those that its taker takes: those of partitions first, the same in all variants.
fn flag_places(parts: &Parts, partitions: Range<u32>) -> Vec<u64> {
    let mut taken: BTreeMap<u32, u64> = BTreeMap::new();
    let mut places = vec![0; parts.flags.len()];
    let others = (0..parts.flags.len() as u32).filter(|flag| !partitions.contains(flag));
    for flag in partitions.clone().chain(others) {
        let count = taken.entry(parts.flags[flag as usize].taker).or_default();
        places[flag as usize] = *count;
        *count += 1;
    }
    places
}

/// In whose memory each ring is: that of the GPU's rank, and of host memory that of the first who uses it.
fn ring_owners(program: &Program, parts: &Parts, owners: &[u32]) -> Vec<u32> {
    let mut users: BTreeMap<u32, u32> = BTreeMap::new();
    for (rank, part) in (0..).zip(&parts.parts) {
        for copy in part.steps.iter().flat_map(|step| &step.copies) {
            if let Place::Slot { ring, .. } = copy.to {
                users.entry(ring.0).or_insert(rank);
            }
        }
    }
    let owner = |(ring, device): (u32, DeviceId)| {
        let of_gpu = owners.get(device.0 as usize).filter(|_| !device.is_host());
        of_gpu.or_else(|| users.get(&ring)).copied().unwrap_or(0)
    };
    (0..).zip(program.rings.iter().map(|ring| ring.device)).map(owner).collect()
}

/// Numbers sources that several transfers have; each is a rank and an address there.
fn number_sources(shapes: &mut [Shape], sources: impl Iterator<Item = (u32, u64)>) {
    let mut found: BTreeMap<(u32, u64, u64), Vec<usize>> = BTreeMap::new();
    for (at, (rank, address)) in sources.enumerate() {
        if shapes[at].bytes >= LEAST_SHARED_BYTES && shapes[at].src_kind != MemoryKind::Pageable {
            found.entry((rank, address, shapes[at].bytes)).or_default().push(at);
        }
    }
    for (number, of) in (1..).zip(found.into_values().filter(|of| of.len() > 1)) {
        of.into_iter().for_each(|at| shapes[at].source = number);
    }
}
