//! Computes the values of a node plan that must be identical on all ranks: the plan, the operations of every rank, and the flags that order
//! them. Rank 0 computes the plan. Every rank divides it into the operations of the ranks, and the ranks compare hashes of the results.
//!
//! If the performance model expects a gain from several paths, the plan has several variants. Each variant is divided among the ranks and
//! bound to memory like a single plan, and in each step all ranks use the same variant ([`super::agreed`]). A step of any variant begins
//! only after all ranks whose memory the step accesses have reached it. So a step of one variant may follow a step of another.

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
use crate::headroom::headroom;
use crate::plan::{self, LEAST_SHARED_BYTES, Options, PartitionVariant, Passing, Place, PlanError, Program, Relays, Shape};
use crate::program::PartitionMove;
use crate::program::ranks::{EndRanks, Part, Parts, RankedBatch, check_parts, divide};
use crate::topology::{DeviceId, Machine};
use crate::tune;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

/// Plans that rank 0 sends to the other ranks, as numbers ([`wire`]), or the reason why it cannot plan the batch.
type SentPlans = Result<Vec<Vec<u64>>, String>;

/// Figures of the operations that one rank executes in each communication step. [`NodePlan::describe`](super::NodePlan::describe) prints
/// them.
pub(super) struct RankWork {
    pub operations: usize,
    pub lanes: usize,
    /// Number of bytes that the rank copies.
    pub bytes: u64,
    /// Number of flags that the rank sets.
    pub sets: usize,
    /// Number of flags that the rank waits for.
    pub waits: usize,
}

impl RankWork {
    fn of(part: &Part) -> RankWork {
        let copies = part.steps.iter().flat_map(|step| &step.copies);
        RankWork {
            operations: part.steps.len(),
            lanes: part.lanes.len(),
            bytes: copies.map(|copy| copy.bytes).sum(),
            sets: part.begins.len() + part.steps.iter().map(|step| step.raises.len()).sum::<usize>(),
            waits: part.ends.len() + part.steps.iter().map(|step| step.takes.len()).sum::<usize>(),
        }
    }
}

/// Variant of a node plan (plan that several ranks execute together), with the operations of every rank. It is identical on all ranks.
pub(super) struct Together {
    pub plan: plan::Plan,
    /// Operations of every rank. After [`Together::keep_own`], the lists of other ranks are empty.
    pub parts: Parts,
    /// Figures of the operations of each rank, by rank.
    pub work: Vec<RankWork>,
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

/// Error of [`Together::variants`]. It states whether all ranks or only this rank failed.
pub(super) enum PlanFailure {
    /// All ranks return an error, so the collective call has ended.
    OnAllRanks(Error),
    /// Only this rank has an error. It must still report the error to the other ranks.
    OnThisRank(Error),
}

impl PlanFailure {
    /// Returns the error of a plan that was damaged on the way from rank 0 to this rank. Other ranks may have received it correctly.
    fn on_this_rank(error: impl Into<Error>) -> PlanFailure {
        PlanFailure::OnThisRank(error.into())
    }
}

impl From<Error> for PlanFailure {
    /// Converts an error of a computation that all ranks make with the same data. The error concerns all ranks, except if memory is
    /// exhausted, which may happen on this rank only.
    fn from(error: Error) -> PlanFailure {
        match error {
            Error::Plan(PlanError::OutOfMemory { .. }) => PlanFailure::OnThisRank(error),
            error => PlanFailure::OnAllRanks(error),
        }
    }
}

impl From<PlanError> for PlanFailure {
    fn from(error: PlanError) -> PlanFailure {
        Error::from(error).into()
    }
}

impl Together {
    /// Plans the transfers of all ranks and divides the work among the ranks. Returns the variants of the plan. The performance model
    /// expects the first variant to be the fastest.
    pub fn variants(
        node: &NodeGroup,
        call: &mut CollectiveCall<'_>,
        requests: &[RankRequest],
        partitioning: Option<Partitioning>,
        options: &Options,
        adapts: bool,
    ) -> Result<Vec<Together>, PlanFailure> {
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
                return Err(failed(index, End::Source, reason.into()).into());
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
            return Err(failed(a.transfer, a.end, reason).into());
        }
        let ends: Vec<EndRanks> = transfers.iter().map(|t| EndRanks { src: t.src.rank, dst: t.dst.rank }).collect();
        let owners = node.owners();
        let (variants, settled) = match partitioning {
            None => {
                let address = |end: NodeEnd| requests[end.rank as usize].windows[end.window as usize].address + end.offset;
                number_sources(&mut shapes, transfers.iter().map(|transfer| (transfer.src.rank, address(transfer.src))));
                let batch = RankedBatch { ranks: node.ranks(), shapes: &shapes, ends: &ends, owners: &owners };
                // The ranks together would need much memory for the rejected paths.
                let options = &Options { rejected: node.ranks() == 1, ..*options };
                let by = |machine: &Machine, options: &Options| -> Result<Vec<plan::Plan>, PlanError> {
                    let plan = |options: &Options| plan::plan(machine, &shapes, options);
                    let best = plan(options)?;
                    if adapts { adapt::variants(best, options, plan) } else { Ok(vec![best]) }
                };
                let with_kernels = || {
                    let straight = Options { host_path: false, relays: Relays::NONE, passing: Passing::Kernels, ..*options };
                    let all = by(&between_kernels(&node.machine), &straight).ok()?;
                    kernels_pass_on(&all[0], &batch).then_some(all)
                };
                // If a rank sends data to all others, kernels are slower than copy engines already at smaller sizes: kernels of four H200
                // took 280 us for 32 MiB, and a chain of copy engines took 276 us for 64 MiB (2026-11-28).
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
        // Inboxes require that every step of the plan uses the two sets alternately.
        let takes_inboxes = partitioning.is_none() && variants.len() == 1;
        let divided = variants.into_iter().map(|variant| {
            // Data that producing kernels store at the destination themselves is not part of the variant's plan.
            let shapes: Vec<Shape> = variant.plan.transfers.iter().map(|transfer| transfer.shape).collect();
            let batch = RankedBatch { ranks: node.ranks(), shapes: &shapes, ends: &ends, owners: &owners };
            let plan = &variant.plan;
            plan::validate(&plan.program, options.staging_bytes).map_err(PlanFailure::on_this_rank)?;
            let mut parts = divide(&plan.program, &batch);
            check_parts(&plan.program, &batch, &parts).map_err(PlanFailure::on_this_rank)?;
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

    /// Plans the batch on rank 0 only, and returns the variants of the plan on all ranks. If every rank planned the batch, time and memory
    /// would be multiplied by the number of ranks.
    fn planned_once(
        call: &mut CollectiveCall<'_>,
        rank: u32,
        (shapes, options): (&[Shape], &Options),
        plan: impl Fn() -> Result<Vec<plan::Plan>, PlanError>,
    ) -> Result<Vec<plan::Plan>, PlanFailure> {
        let own = if rank == 0 { Some(plan()) } else { None };
        let sent: Result<Option<SentPlans>, Error> = match &own {
            None => Ok(None),
            Some(Ok(all)) => Ok(Some(Ok(all.iter().map(wire::encode).collect()))),
            // The other ranks may have enough memory, so they cannot find this error themselves.
            Some(Err(error @ PlanError::OutOfMemory { .. })) => Err(error.clone().into()),
            Some(Err(error)) => Ok(Some(Err(error.to_string()))),
        };
        let sent = call.all(sent).map_err(PlanFailure::OnAllRanks)?.into_iter().next().flatten();
        let broken = || {
            let reason = "rank 0 has sent a plan that cannot be decoded: link all ranks with the same version";
            PlanFailure::OnThisRank(Error::Allgather(reason.into()))
        };
        match (own, sent) {
            (Some(own), _) => Ok(own?),
            (None, Some(Ok(all))) => {
                headroom(all.iter().map(Vec::len).sum(), wire::NUMBER_BYTES).map_err(PlanError::from)?;
                let all: Option<Vec<plan::Plan>> = all.iter().map(|numbers| wire::decode(numbers, shapes, options)).collect();
                all.filter(|all| !all.is_empty()).ok_or_else(broken)
            }
            // This rank plans too, to get the same error as rank 0. Only a lack of memory can give another result.
            (None, Some(Err(reason))) => Err(PlanFailure::OnAllRanks(match plan() {
                Err(error) if error.to_string() == reason => error.into(),
                _ => Error::RankFailed { rank: 0, reason },
            })),
            (None, None) => Err(broken()),
        }
    }

    /// True if the kernels that produce the data store it at the destination.
    pub fn is_stored(&self) -> bool {
        self.partitioned.as_ref().is_some_and(|partitioned| partitioned.how == PartitionMove::Stored)
    }

    /// Returns a hash of all values that must be identical on all ranks. Ranks compare their hashes.
    pub fn digest(&self) -> u64 {
        // This hasher has no random key.
        let mut hasher = DefaultHasher::new();
        (&*self.plan.program, &self.parts).hash(&mut hasher);
        hasher.finish()
    }

    /// Drops the operations of the other ranks, which only the creation of the plan needs.
    pub fn keep_own(&mut self, rank: u32) {
        let others = (0..).zip(&mut self.parts.parts).filter(|(other, _)| *other != rank);
        others.for_each(|(_, part)| *part = Part::default());
    }

    /// Returns the plan with the rejected paths of every transfer. Plans the batch again if the plan does not contain these paths. If the
    /// plan cannot be computed again, the result has no rejected paths.
    pub fn explained(&self, machine: &Machine) -> Cow<'_, plan::Plan> {
        if self.plan.options.rejected {
            return Cow::Borrowed(&self.plan);
        }
        let shapes: Vec<Shape> = self.plan.transfers.iter().map(|transfer| transfer.shape).collect();
        let options = Options { rejected: true, ..self.plan.options };
        let made = match options.passing {
            Passing::Kernels => plan::plan(&between_kernels(machine), &shapes, &options),
            _ => plan::plan(machine, &shapes, &options),
        };
        match made {
            Ok(made) if made.program == self.plan.program => Cow::Owned(made),
            Ok(_) => {
                log::warn!("the description of a node plan does not list rejected paths, because the batch has another plan now");
                Cow::Borrowed(&self.plan)
            }
            Err(error) => {
                log::warn!(
                    "the description of a node plan does not list rejected paths, because the batch cannot be planned again: {error}"
                );
                Cow::Borrowed(&self.plan)
            }
        }
    }

    /// Returns the total size in bytes of the transfers that `rank` sends or receives.
    pub fn bytes_of(&self, rank: u32) -> u64 {
        let own = self.transfers.iter().filter(|t| [t.dst.rank, t.src.rank].contains(&rank));
        own.fold(0, |sum, t| sum.saturating_add(t.bytes))
    }
}

/// Returns the machine with the costs that operations have if kernels of the ranks execute them in place of copy engines.
fn between_kernels(machine: &Machine) -> Machine {
    machine.with_costs(machine.costs().between_kernels())
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

#[cfg(test)]
mod tests {
    use super::super::exchange::{Allgather, Collective, Exchange};
    use super::super::group::meet_at;
    use super::*;
    use crate::topology::preset;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Result of planning on one rank: the plans or the failure, the number of times that the rank has planned, and the results of the next
    /// exchange of all ranks.
    type Planned = (Result<Vec<plan::Plan>, PlanFailure>, u32, Result<Vec<u32>, Error>);

    /// Allgather function that replaces a number in the received text.
    struct Replaces(Box<dyn Allgather>, &'static [u8], &'static [u8]);

    impl Allgather for Replaces {
        fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
            let Replaces(gather, from, to) = self;
            gather.allgather(send, receive)?;
            while let Some(at) = receive.windows(from.len()).position(|text| text == *from) {
                receive[at..at + from.len()].copy_from_slice(to);
            }
            Ok(())
        }
    }

    fn batch() -> Vec<Shape> {
        let kind = MemoryKind::Device;
        let shape = |gpu: u32| Shape {
            source: 0,
            dst_device: DeviceId::gpu((gpu + 1) % 4),
            src_device: DeviceId::gpu(gpu),
            dst_kind: kind,
            src_kind: kind,
            bytes: 64 << 20,
        };
        (0..4).map(shape).collect()
    }

    /// Plans the batch on two ranks, each of which calls `plan` with its number. In the data that rank 1 receives, each `swap.0` is
    /// replaced by `swap.1`.
    fn planned(
        name: &str,
        swap: Option<(&'static [u8], &'static [u8])>,
        plan: impl Fn(u32) -> Result<Vec<plan::Plan>, PlanError> + Sync,
    ) -> [Planned; 2] {
        let path = std::env::temp_dir().join(format!("mpgpu-once-{name}-{}", std::process::id()));
        let of_rank = |rank: u32| -> Planned {
            let gather = meet_at(&path, rank, 2).expect("ranks meet");
            let gather = match swap.filter(|_| rank == 1) {
                Some((from, to)) => Box::new(Replaces(gather, from, to)),
                None => gather,
            };
            let exchange = Exchange::new(rank, 2, gather).expect("a rank");
            let mut call = exchange.call(Collective::PLAN).expect("a call");
            let times = AtomicU32::new(0);
            let counted = || {
                times.fetch_add(1, Ordering::SeqCst);
                plan(rank)
            };
            let made = Together::planned_once(&mut call, rank, (&batch(), &Options::default()), counted);
            // If only one rank has failed, it reports its error in the next exchange.
            let next = match &made {
                Err(PlanFailure::OnThisRank(error)) => call.all::<u32>(Err(error.clone())),
                _ => call.all(Ok(rank)),
            };
            (made, times.load(Ordering::SeqCst), next)
        };
        std::thread::scope(|scope| {
            let of_rank = &of_rank;
            [0, 1].map(|rank| scope.spawn(move || of_rank(rank))).map(|rank| rank.join().expect("no panic"))
        })
    }

    fn right(_: u32) -> Result<Vec<plan::Plan>, PlanError> {
        let machine = Machine::new(preset("beluga").expect("a preset")).expect("well formed");
        let plan = |options: &Options| plan::plan(&machine, &batch(), options);
        adapt::variants(plan(&Options::default())?, &Options::default(), plan)
    }

    #[test]
    fn only_rank_0_plans_and_all_ranks_have_all_variants_of_its_plan() {
        let [(first, of_first, _), (second, of_second, next)] = planned("all", None, right);
        let (Ok(first), Ok(second)) = (first, second) else { panic!("not planned") };
        assert!(first.len() == 3 && second.len() == 3 && (of_first, of_second) == (1, 0), "{} variants", first.len());
        for (made, told) in first.iter().zip(&second) {
            assert_eq!((&made.program, made.options, made.predicted), (&told.program, told.options, told.predicted));
        }
        assert_eq!(next.expect("all go on"), [0, 1]);
    }

    #[test]
    fn a_lack_of_memory_on_rank_0_fails_the_plan_on_all_ranks() {
        let [(first, ..), (second, of_second, next)] = planned("memory", None, |_| Err(PlanError::OutOfMemory { bytes: 1 << 40 }));
        assert!(matches!(first, Err(PlanFailure::OnAllRanks(Error::Plan(PlanError::OutOfMemory { bytes })) ) if bytes == 1 << 40));
        let Err(PlanFailure::OnAllRanks(Error::RankFailed { rank: 0, reason })) = second else { panic!("rank 1 has another result") };
        assert!(reason.contains("1099511627776 bytes of host memory") && of_second == 0, "{reason}");
        assert_eq!(next.expect("the next exchange is one of both"), [0, 1]);
    }

    #[test]
    fn an_error_of_planning_on_rank_0_is_an_error_on_all_ranks() {
        let wrong = PlanError::Option { name: "max_paths", value: 0, least: 1 };
        for others in [Err(wrong.clone()), Err(PlanError::OutOfMemory { bytes: 1 }), right(1)] {
            let is_same = others.as_ref().is_err_and(|error| *error == wrong);
            let [(first, ..), (second, ..)] = planned("error", None, |rank| if rank == 0 { Err(wrong.clone()) } else { others.clone() });
            assert!(matches!(first, Err(PlanFailure::OnAllRanks(Error::Plan(error))) if error == wrong));
            match second {
                Err(PlanFailure::OnAllRanks(Error::Plan(error))) if is_same => assert_eq!(error, wrong),
                Err(PlanFailure::OnAllRanks(Error::RankFailed { rank: 0, reason })) if !is_same => assert_eq!(reason, wrong.to_string()),
                _ => panic!("rank 1 has another result"),
            }
        }
    }

    #[test]
    fn a_plan_that_arrives_changed_is_refused_on_both_ranks() {
        // The text is the largest number of paths, `u32::MAX`, which rank 1 receives with another first digit.
        let [(first, ..), (second, of_second, next)] = planned("changed", Some((b"4294967295", b"9294967295")), right);
        assert!(first.is_ok() && of_second == 0);
        let Err(PlanFailure::OnThisRank(Error::Allgather(reason))) = second else { panic!("rank 1 has another result") };
        assert!(reason.contains("rank 0 has sent a plan that cannot be decoded"), "{reason}");
        assert!(next.expect_err("it is reported").to_string().contains("cannot be decoded"));
    }
}
