//! Computes the values of a node plan that must be identical on all ranks: the plan, the operations of every rank, and the flags that order
//! them.
//!
//! If the performance model expects a gain from several paths, the plan has several variants. Each variant is divided among the ranks and
//! bound to memory like a single plan, and in each step all ranks use the same variant ([`super::agreed`]). A step of any variant begins
//! only after all ranks whose memory the step accesses have reached it. So a step of one variant may follow a step of another.

use super::eager::Eager;
use super::group::NodeGroup;
use super::part::{SMALL_BYTES, is_inside, is_little, stays};
use super::partitioning::{Partitioned, PartitionedBatch, Partitioning, Settled};
use super::transfers::{NodeEnd, NodeTransfer, RankRequest, TransferName, batch_of};
use crate::adapt;
use crate::backend::{MemoryKind, SignalWait};
use crate::contexts::batch::{ByteRange, first_overlap};
use crate::contexts::{End, Error};
use crate::plan::{self, LEAST_SHARED_BYTES, Options, PartitionVariant, Passing, Place, PlanError, Program, Relays, Shape};
use crate::program::PartitionMove;
use crate::program::ranks::{EndRanks, Parts, RankedBatch, check_parts, divide};
use crate::topology::{DeviceId, Machine, hash};
use crate::tune;
use std::collections::BTreeMap;
use std::ops::Range;

/// Variant of a node plan (plan that several ranks execute together), with the operations of every rank. It is identical on all ranks.
pub(super) struct Together {
    pub plan: plan::Plan,
    pub parts: Parts,
    /// Transfers of all ranks. Matched send and receive descriptors form one transfer.
    pub transfers: Vec<NodeTransfer>,
    /// Ranks that own the source and the destination of each transfer, by index of the transfer.
    pub ends: Vec<EndRanks>,
    /// Device of each transfer's source, as a node-wide number.
    pub src_devices: Vec<DeviceId>,
    /// Partitions of the transfers. `None` if the transfers do not move in partitions.
    pub partitioned: Option<Partitioned>,
    /// Positions of eager transfers in inboxes (receive buffers). `None` if the plan variant cannot use inboxes.
    pub eager: Option<Eager>,
    /// Rank that owns the memory of each staging ring buffer, by index of the buffer.
    pub ring_owners: Vec<u32>,
    /// Position of each flag among all flags that the same rank waits for, by index of the flag.
    pub flag_places: Vec<u64>,
}

impl Together {
    /// Plans the transfers of all ranks and divides the work among the ranks. Returns the variants of the plan. The performance model
    /// expects the first variant to be the fastest.
    pub fn variants(
        node: &NodeGroup,
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
        // Errors identify a transfer by its number on the rank that has passed it.
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
                        format!(
                            "the {which} is in window {} of rank {}, but that rank has passed no window (memory range) with this number",
                            end.window, end.rank
                        ),
                    ));
                };
                let is_within = |last: &u64| *last <= window.bytes && window.address.checked_add(*last).is_some();
                if !end.offset.checked_add(transfer.bytes).as_ref().is_some_and(is_within) {
                    let (window, size) = (end.window, window.bytes);
                    let reason = format!(
                        "the {which} extends past the end of window {window} of rank {}: offset {}, {} bytes of {size}",
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
                "the {} overlaps the {} of transfer {index} of rank {rank}; the transfers of a plan run in no particular order",
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
                // If a rank sends data to all others, kernels are slower than copy engines already at smaller sizes: kernels of four H200
                // took 280 us for 32 MiB, and a chain of copy engines took 276 us for 64 MiB (2026-11-28).
                let most = shapes.iter().filter(|shape| shape.source != 0).map(|shape| shape.bytes).max();
                let may_pass_on = node.signal_wait() == SignalWait::Kernel && most.is_some_and(|bytes| bytes <= SMALL_BYTES);
                let passed_on = if may_pass_on { with_kernels() } else { None };
                let all = passed_on.map_or_else(|| by(&node.machine, options), Ok)?;
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
        // Inboxes require that every step of the plan uses the two sets alternately.
        let takes_inboxes = partitioning.is_none() && variants.len() == 1;
        let divided = variants.into_iter().map(|variant| {
            // Data that producing kernels store at the destination themselves is not part of the variant's plan.
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
            Ok(Together { plan: variant.plan, parts, transfers, ends, src_devices, partitioned, eager, ring_owners, flag_places })
        });
        divided.collect()
    }

    /// True if the kernels that produce the data store it at the destination.
    pub fn is_stored(&self) -> bool {
        self.partitioned.as_ref().is_some_and(|partitioned| partitioned.how == PartitionMove::Stored)
    }

    /// Returns a hash of all values that must be identical on all ranks. Ranks compare their hashes.
    pub fn digest(&self) -> u64 {
        hash([&*format!("{:?}", self.plan.program), &*format!("{:?}", self.parts)])
    }

    /// Returns the total size in bytes of the transfers that `rank` sends or receives.
    pub fn bytes_of(&self, rank: u32) -> u64 {
        let own = self.transfers.iter().filter(|t| [t.dst.rank, t.src.rank].contains(&rank));
        own.fold(0, |sum, t| sum.saturating_add(t.bytes))
    }
}

/// True if ranks forward data that they have received, and the operations of every rank are small enough for a kernel.
fn kernels_pass_on(plan: &plan::Plan, batch: &RankedBatch<'_>) -> bool {
    let stays = |transfer: u32| stays(&batch.shapes[transfer as usize], batch.ends[transfer as usize]);
    let passes = plan.program.ops.iter().flat_map(|op| &op.copies).any(|copy| matches!(copy.from, Place::Destination { .. }));
    passes && divide(&plan.program, batch).parts.iter().all(|part| is_little(part, |copy| is_inside(copy, stays)))
}

/// Returns the position of each flag among all flags that the same rank waits for. Flags of partitions come first, so that their positions
/// are the same in all plan variants.
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

/// Returns the rank that owns the memory of each staging ring buffer. For a buffer in GPU memory this is the rank that uses the GPU. A
/// buffer in host memory belongs to the first rank that writes to it.
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

/// Assigns an equal source number to all transfers that read the same data. `sources` contains, for each transfer, the rank that owns the
/// source and the address of the source.
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
