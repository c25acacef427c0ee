//! What all ranks of a node move in a step: planned together, bound to the memory of each, executed by each for its part.
//!
//! Where the model sees several paths gain there are several variants of the plan, each divided and bound like any other, and all ranks take the
//! same one in a step ([`super::agreed`]). A step of one begins, as that of any plan, when all ranks whose memory it touches have come to it, so steps
//! of two may follow each other.

use super::super::batch::{ByteRange, End, first_overlap};
use super::super::config::{PlanOptions, Verify};
use super::super::describe::nature;
use super::super::error::Error;
use super::super::execute::Measured;
use super::super::lifetime::LAST_PATIENCE;
use super::super::variants::{Known, Moments};
use super::NodeGroup;
use super::agreed::{Spans, StepVariants};
use super::binding::{BoundRank, Held, Used};
use super::eager::Eager;
use super::exchange::{Collective, CollectiveCall, Named};
use super::order::{Misorder, PlanPlaces};
use super::part::BoundPart;
use super::partitioned::{PartitionWords, Partitioned, PartitionedBatch};
use super::partitioning::{Agent, Partitioning, Settled};
use super::progress::Progress;
use super::transfers::{NodeEnd, NodeTransfer, TransferName, Window, batch_of, check_own};
use crate::adapt::{self, variant_name};
use crate::backend::{Backend, BackendError, Completion, Execution, MemoryKind, Moment, StreamHandle, no_completion};
use crate::headroom::headroom;
use crate::ipc::Departure;
use crate::nvtx;
use crate::plan::{self, Options, Place, PlanError, Program, Relays, Shape};
use crate::program::most_writers;
use crate::program::ranks::{EndRanks, Parts, RankedBatch, check_parts, divide};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::topology::{DeviceId, hash};
use crate::tune::{self, PartitionTuning};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A window as all ranks are told of it.
#[derive(Serialize, Deserialize)]
pub(super) struct ToldWindow {
    /// As the node numbers devices.
    pub device: i32,
    /// Whether copy engines reach it, and other processes can map it.
    is_pageable: bool,
    address: u64,
    bytes: u64,
}

/// Host memory for a window or a transfer that is handed in, as text in which all ranks are told of it.
const REQUEST_BYTES: usize = 1024;

/// What this rank hands in.
#[derive(Copy, Clone)]
pub(super) struct OwnRequest<'a> {
    pub windows: &'a [Window],
    pub transfers: &'a [NodeTransfer],
    pub partitioning: Option<Partitioning>,
    pub options: &'a PlanOptions,
}

/// What a rank hands in, as all are told of it.
#[derive(Serialize, Deserialize)]
pub(super) struct RankRequest {
    pub windows: Vec<ToldWindow>,
    transfers: Vec<NodeTransfer>,
    /// How it wants them planned.
    options: Named,
    /// Of rank 0 what was measured, where the agent of partitions is left open: all go by that.
    tuned: Vec<PartitionTuning>,
}

/// What all ranks have made alike, of one variant.
pub(super) struct Together {
    pub plan: plan::Plan,
    pub parts: Parts,
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

/// A plan of all ranks, of which this one executes its part. Executions follow each other, in whatever streams and threads they are asked for.
pub struct NodePlan {
    pub(super) node: Arc<NodeGroup>,
    pub(super) together: Together,
    /// The other variants.
    others: Vec<Together>,
    /// Bytes that this rank sends or receives in a step.
    bytes: u64,
    parts: Mutex<RankParts>,
    /// Of transfers that move in partitions.
    pub(super) words: Option<Arc<PartitionWords>>,
    held: Mutex<Held>,
    /// How far this rank has come, and how far others that have left.
    pub(super) progress: Arc<Progress>,
    /// Where its steps stand in this rank's streams, where a neighbour asks.
    places: Option<Arc<PlanPlaces>>,
    /// An execution could not be enqueued as a whole: the other ranks wait for what will not come.
    is_broken: AtomicBool,
}

/// This rank's parts of all variants.
struct RankParts {
    /// With the memory that each uses and that may be gone.
    all: Vec<(BoundPart, Used)>,
    /// That of the last step.
    last: usize,
    /// Which one a step takes, where there are several.
    variants: Option<StepVariants>,
    /// The variant of a measured step that has begun, and when.
    begun: Option<(usize, Result<Moment, BackendError>)>,
}

impl RankParts {
    /// What a step takes, and whether it is measured. `step` as [`Progress::begin`] counts.
    fn choose(&mut self, step: u64, is_captured: bool) -> Result<(usize, bool), Error> {
        let choice = match &mut self.variants {
            None => return Ok((0, false)),
            Some(variants) if is_captured => variants.fix(step + 1).ok_or_else(|| {
                let why = "this rank captures a step of a node plan, and another has executed further ones by now, which may take other paths: capture on \
                           all ranks after as many executions on each, or plan with adapt off";
                Error::NotSupported(why.into())
            })?,
            Some(variants) => variants.next(step),
        };
        Ok((choice.variant, choice.measure))
    }

    /// Enqueues a step by `enqueue`, or its first part, after the last one.
    fn begin(
        &mut self,
        (variant, measure): (usize, bool),
        stream: StreamHandle,
        is_captured: bool,
        backend: &dyn Backend,
        enqueue: impl FnOnce(&mut BoundPart) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        if variant != self.last {
            self.all[self.last].0.follow(stream, is_captured, backend)?;
            self.last = variant;
        }
        self.begun = measure.then(|| (variant, backend.mark_moment(stream)));
        enqueue(&mut self.all[variant].0)
    }

    /// The whole of it is enqueued.
    fn end(&mut self, stream: StreamHandle, backend: &dyn Backend) {
        if let (Some((variant, begin)), Some(variants)) = (self.begun.take(), &mut self.variants) {
            variants.measure(begin.and_then(|begin| Ok(Moments { variant, begin, end: backend.mark_moment(stream)? })));
        }
    }

    fn release(&mut self, backend: &dyn Backend) {
        self.all.iter_mut().for_each(|(part, _)| part.release(backend));
    }
}

impl NodeGroup {
    /// Plans what all ranks hand in, together. Each transfer has one end or both in a window of the rank that hands it in. All ranks call it
    /// together, each with windows and transfers of its own; where it fails on one it fails on all.
    pub fn plan(self: &Arc<NodeGroup>, windows: &[Window], transfers: &[NodeTransfer], options: &PlanOptions) -> Result<NodePlan, Error> {
        self.plan_partitioned(windows, transfers, None, options)
    }

    /// The same; `partitioning` says how transfers are to move in partitions.
    pub fn plan_partitioned(
        self: &Arc<NodeGroup>,
        windows: &[Window],
        transfers: &[NodeTransfer],
        partitioning: Option<Partitioning>,
        options: &PlanOptions,
    ) -> Result<NodePlan, Error> {
        let call = if partitioning.is_some() { Collective::PlanPartitioned } else { Collective::Plan };
        self.plan_within(&mut self.exchange.call(call)?, OwnRequest { windows, transfers, partitioning, options })
    }

    /// The same within a call.
    pub(super) fn plan_within(self: &Arc<NodeGroup>, call: &mut CollectiveCall<'_>, own: OwnRequest<'_>) -> Result<NodePlan, Error> {
        let OwnRequest { windows, partitioning, .. } = own;
        let resolved = partitioning.map_or(Ok(()), Partitioning::check).and_then(|()| self.resolve(own.options));
        let mine = resolved.and_then(|options| self.request(own, &options).map(|request| (request, options)));
        let options = mine.as_ref().map(|(_, options)| *options).map_err(Error::clone);
        let requests = call.all(mine.map(|(request, _)| request))?;
        // From here on all ranks compute the same, and fail alike; so all have the same number.
        let number = self.plans.fetch_add(1, Ordering::Relaxed) + 1;
        let mut variants = match Together::variants(self, &requests, partitioning, &options?, self.adapts(own.options)) {
            // But for memory, which each has of its own.
            Err(error @ Error::Plan(PlanError::OutOfMemory { .. })) => return Err(NodeGroup::fail_bind(call, error)),
            variants => variants?,
        };
        let (mut held, progress) = (Held::default(), Arc::new(Progress::new(number)));
        let mut bound: Vec<BoundRank> = Vec::new();
        let made = variants
            .iter()
            .try_for_each(|together| {
                let first = bound.first().and_then(|first| first.words.clone());
                self.bind(call, &requests, together, (windows, first), &progress, &mut held).map(|one| bound.push(one))
            })
            .and_then(|()| self.agree_on(call, variants.len(), number, &mut held));
        match made {
            Ok(agreed) => {
                let (words, places) = bound.first_mut().map_or((None, None), |first| (first.words.take(), first.places.take()));
                let all = bound.into_iter().map(|one| (one.part, one.used)).collect();
                let together = variants.remove(0);
                Ok(NodePlan {
                    node: Arc::clone(self),
                    bytes: together.bytes_of(self.rank()),
                    together,
                    others: variants,
                    parts: Mutex::new(RankParts { all, last: 0, variants: agreed, begun: None }),
                    words,
                    held: Mutex::new(held),
                    progress,
                    places,
                    is_broken: AtomicBool::new(false),
                })
            }
            Err(error) => {
                bound.iter_mut().for_each(|one| one.part.release(self.context.backend()));
                self.give_back(&mut held);
                Err(error)
            }
        }
    }

    /// The memory by which the ranks agree on the variants of steps, where there are several.
    fn agree_on(&self, call: &mut CollectiveCall<'_>, variants: usize, plan: u64, held: &mut Held) -> Result<Option<StepVariants>, Error> {
        if variants == 1 {
            return Ok(None);
        }
        let bytes = Spans::bytes(self.ranks());
        let mut own = 0;
        let mut offer = || {
            if self.rank() != 0 {
                return Ok(Vec::new());
            }
            own = self.context.allocate_shared(DeviceId::HOST, bytes)?;
            held.allocations.push(own);
            Ok(self.context.export_memory(own, bytes)?.encode().to_vec())
        };
        let offers = call.all::<Vec<u8>>(offer())?;
        let mapped = if self.rank() == 0 { Ok(own) } else { self.map(&offers[0], None, held) };
        call.all(mapped.as_ref().map(|_| ()).map_err(Error::clone))?;
        Ok(Some(StepVariants::new(Spans::at(mapped?, self.rank(), self.ranks()), variants, plan)))
    }

    fn resolve(&self, options: &PlanOptions) -> Result<Options, Error> {
        let config = self.context.config();
        if config.verify == Verify::Bytes {
            let why = "a plan of several ranks cannot compare its bytes, because no rank sees both ends; unset MPGPU_VERIFY=bytes";
            return Err(Error::NotSupported(why.into()));
        }
        options.resolve(config)
    }

    fn adapts(&self, options: &PlanOptions) -> bool {
        options.adapt.unwrap_or(self.context.config().adapt)
    }

    /// Looks at what this rank hands in.
    fn request(&self, own: OwnRequest<'_>, options: &Options) -> Result<RankRequest, Error> {
        let OwnRequest { windows, transfers, partitioning, .. } = own;
        let _open = self.context.shared.enter()?;
        headroom(windows.len() + transfers.len(), REQUEST_BYTES).map_err(BackendError::no_headroom)?;
        let mut told = Vec::with_capacity(windows.len());
        for (index, window) in windows.iter().enumerate() {
            let Window { address, bytes } = *window;
            let refuse = |reason: String| Err(Error::NodeArgument { argument: c"windows", reason: format!("window {index}: {reason}") });
            if address.checked_add(bytes.saturating_sub(1)).is_none() {
                return refuse(format!("{address:#x} ({bytes} bytes) runs past the end of the address space"));
            }
            let found = if bytes == 0 { None } else { self.context.shared.locate(address)? };
            let (device, is_pageable) = match found {
                None => (DeviceId::HOST, bytes > 0),
                Some(allocation) if bytes > allocation.bytes - (address - allocation.base) => {
                    let (base, size) = (allocation.base, allocation.bytes);
                    return refuse(format!("{address:#x} ({bytes} bytes) runs out of its allocation ({base:#x}, {size} bytes)"));
                }
                Some(allocation) => match self.number_of(allocation.device) {
                    Some(device) => (device, allocation.kind == MemoryKind::Pageable),
                    None => {
                        let device = allocation.device.in_words();
                        return refuse(format!(
                            "{address:#x} is memory of {device}, which no rank of the node works for: name it in the devices of a rank"
                        ));
                    }
                },
            };
            told.push(ToldWindow { device: device.0, is_pageable, address, bytes });
        }
        check_own(transfers, self.rank(), self.ranks())?;
        let is_open = self.rank() == 0 && partitioning.is_some_and(|partitioning| matches!(partitioning.agent, Agent::Auto { .. }));
        let tuned = self.context.tuning().filter(|_| is_open).map(|tuning| tuning.partitions.clone()).unwrap_or_default();
        Ok(RankRequest {
            windows: told,
            transfers: transfers.to_vec(),
            options: named(options, self.adapts(own.options), partitioning),
            tuned,
        })
    }
}

impl Together {
    /// Plans the transfers of all ranks, and divides the work. The plan that the model prefers is the first.
    fn variants(
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
                let reason = "ordinary host memory cannot be reached by another rank; allocate it with mp_alloc_shared on MP_DEVICE_HOST";
                return Err(failed(index, End::Source, reason.into()));
            }
            shapes.push(Shape { dst_device, src_device, dst_kind, src_kind, bytes: transfer.bytes });
        }
        if let Some((a, b)) = first_overlap(ranges) {
            let (rank, index) = handed[b.transfer].name_of(b.end);
            let reason = format!(
                "its {} overlaps the {} of transfer {index} of rank {rank}; transfers of a step run in no particular order",
                a.end, b.end
            );
            return Err(failed(a.transfer, a.end, reason));
        }
        // With the names and times of those that move in partitions.
        let (plans, mut settled): (Vec<(plan::Plan, (&str, f64))>, _) = match partitioning {
            None => {
                let plan = |options: &Options| plan::plan(&node.machine, &shapes, options);
                let best = plan(options)?;
                let all = if adapts { adapt::variants(best, options, plan)? } else { vec![best] };
                (all.into_iter().map(|plan| (plan, ("", 0.0))).collect(), None)
            }
            Some(partitioning) => {
                let shape = tune::shape_of(&shapes);
                let tuned = requests[0].tuned.iter().find(|tuned| tuned.shape == shape).map(|tuned| tuned.count);
                let Settled { variants, forecast } = partitioning.plan(&node.machine, &mut shapes, options, tuned, adapts)?;
                let (agent, partitions) = (partitioning.agent, forecast.partitions);
                let all = variants.into_iter().map(|variant| (variant.plan, (variant.name, variant.seconds))).collect();
                (all, Some(PartitionedBatch { agent, shape, partitions, most_writers: Vec::new() }))
            }
        };
        let ends: Vec<EndRanks> = transfers.iter().map(|t| EndRanks { src: t.src.rank, dst: t.dst.rank }).collect();
        let src_devices: Vec<DeviceId> = shapes.iter().map(|shape| shape.src_device).collect();
        let owners = node.owners();
        let batch = RankedBatch { ranks: node.ranks(), shapes: &shapes, ends: &ends, owners: &owners };
        // Inboxes are for steps that all come after each other.
        let takes_inboxes = partitioning.is_none() && plans.len() == 1;
        let divide = |(plan, of): (plan::Plan, (&'static str, f64))| {
            plan::validate(&plan.program, options.staging_bytes)?;
            let parts = divide(&plan.program, &batch);
            check_parts(&plan.program, &batch, &parts)?;
            Ok::<_, Error>((plan, of, parts))
        };
        let divided = plans.into_iter().map(divide).collect::<Result<Vec<_>, _>>()?;
        if let Some(of) = &mut settled {
            of.most_writers = most_writers(divided.iter().map(|(.., parts)| parts), shapes.len());
        }
        let mut all: Vec<Together> = Vec::with_capacity(divided.len());
        for (plan, of_variant, mut parts) in divided {
            let eager = if takes_inboxes { Eager::new(&parts, &batch) } else { None };
            let partitioned = match &settled {
                Some(of) => Some(Partitioned::new(of, of_variant, &handed, &mut parts, &batch, &unsupported)?),
                None => None,
            };
            let ring_owners = ring_owners(&plan.program, &parts, &owners);
            let flag_places = flag_places(&parts, partitioned.as_ref().map_or(0..0, |partitioned| partitioned.own.clone()));
            let (transfers, ends, src_devices) = (transfers.clone(), ends.clone(), src_devices.clone());
            let together = Together { plan, parts, transfers, ends, src_devices, partitioned, eager, ring_owners, flag_places };
            // A rank that raises no flag of a partition in the first has no way to do it in another.
            if all.first().is_none_or(|first| together.partition_pairs().is_subset(&first.partition_pairs())) {
                all.push(together);
            }
        }
        Ok(all)
    }

    /// Which rank raises flags of partitions for which.
    fn partition_pairs(&self) -> BTreeSet<(u32, u32)> {
        let own = self.partitioned.as_ref().map_or(0..0, |partitioned| partitioned.own.clone());
        own.map(|flag| self.parts.flags[flag as usize]).map(|flag| (flag.raiser, flag.taker)).collect()
    }

    /// What all ranks must have alike.
    pub fn digest(&self) -> u64 {
        hash([&*format!("{:?}", self.plan.program), &*format!("{:?}", self.parts)])
    }

    fn bytes_of(&self, rank: u32) -> u64 {
        let own = self.transfers.iter().filter(|t| [t.dst.rank, t.src.rank].contains(&rank));
        own.fold(0, |sum, t| sum.saturating_add(t.bytes))
    }
}

/// What all ranks must want alike.
fn named(options: &Options, adapts: bool, partitioning: Option<Partitioning>) -> Named {
    let bytes = |bytes: Option<u64>| bytes.map_or("default".into(), |bytes| bytes.to_string());
    let relays: Vec<u32> = (0..Relays::NAMED).filter(|gpu| options.relays.has(DeviceId::gpu(*gpu))).collect();
    let mut named = vec![
        ("engine", format!("{:?}", options.engine).to_lowercase()),
        ("max_paths", if options.max_paths == u32::MAX { "all".into() } else { options.max_paths.to_string() }),
        ("host_path", options.host_path.to_string()),
        ("relay_gpus", if options.relays == Relays::ALL { "all".into() } else { format!("{relays:?}") }),
        ("chunk_bytes", bytes(options.chunk_bytes)),
        ("min_bytes", bytes(options.min_bytes)),
        ("staging_bytes", options.staging_bytes.to_string()),
        ("adapt", adapts.to_string()),
    ];
    named.extend(partitioning.into_iter().flat_map(Partitioning::named));
    named.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
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

impl NodePlan {
    /// Enqueues this rank's part of one step in `stream`, and does not wait. Later work in the stream sees all bytes that this rank receives
    /// in the step, and may overwrite what it sent. Every rank executes every step.
    pub fn execute(&self, stream: StreamHandle) -> Result<Completion, Error> {
        self.enqueue(stream)?;
        self.mark(stream)
    }

    /// A completion of all work in the stream so far.
    pub(super) fn mark(&self, stream: StreamHandle) -> Result<Completion, Error> {
        let (program, endpoints, rings) = (Arc::new(Program::default()), Arc::from([]), Arc::from([]));
        let end = self.node.context.backend().submit(&Execution::new(&program, &endpoints, &rings, stream))?;
        end.ok_or_else(|| no_completion().into())
    }

    /// The same for a step that nobody waits for by itself.
    pub fn enqueue(&self, stream: StreamHandle) -> Result<(), Error> {
        let _range = nvtx::range(nvtx::Call::Execute, || self.bytes);
        let (shared, backend) = (&self.node.context.shared, self.node.context.backend());
        let _open = shared.enter()?;
        match &self.words {
            None => {
                let mut enqueued = Ok(());
                backend.in_stream(stream, &mut |is_captured| {
                    enqueued = self.begin(stream, is_captured, |part| part.enqueue(stream, is_captured, backend));
                })?;
                enqueued?;
            }
            Some(words) => {
                let is_captured = backend.is_capturing(stream)?;
                words.take_armed(is_captured)?;
                let mut parts = self.unbroken()?;
                let armed = parts.last;
                let enqueued = parts.all[armed].0.enqueue(stream, is_captured, backend);
                enqueued.inspect_err(|_| self.is_broken.store(true, Ordering::Release))?;
                parts.end(stream, backend);
                drop(parts);
                if !is_captured {
                    words.note(self.mark(stream)?);
                }
            }
        }
        shared.executions.fetch_add(1, Ordering::Relaxed);
        shared.bytes.fetch_add(self.bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Begins a step in which partitions move: it starts after all earlier work in `stream`. Their producers come after this, in this stream
    /// or in one that has waited for it, and [`enqueue`](NodePlan::enqueue) after them.
    pub fn arm(&self, stream: StreamHandle) -> Result<(), Error> {
        let (shared, backend) = (&self.node.context.shared, self.node.context.backend());
        let _open = shared.enter()?;
        let words = self.words()?;
        let is_captured = backend.is_capturing(stream)?;
        words.arm(is_captured)?;
        let begun = self.begin(stream, is_captured, |part| part.arm(stream, is_captured, backend));
        begun.inspect_err(|_| words.disarm())
    }

    /// Enqueues the first of a step, or all of it.
    fn begin(
        &self,
        stream: StreamHandle,
        is_captured: bool,
        enqueue: impl FnOnce(&mut BoundPart) -> Result<(), BackendError>,
    ) -> Result<(), Error> {
        // Two steps at once would take each other's flags.
        let mut parts = self.unbroken()?;
        parts.all.iter().try_for_each(|(_, used)| used.check(&self.node.context.shared))?;
        let step = self.progress.begin(is_captured)?;
        self.tell_order(stream, step, is_captured)?;
        let choice = parts.choose(step, is_captured)?;
        let backend = self.node.context.backend();
        parts.begin(choice, stream, is_captured, backend, enqueue).inspect_err(|_| {
            self.progress.take_back(is_captured);
            self.is_broken.store(true, Ordering::Release);
        })?;
        if self.words.is_none() {
            parts.end(stream, backend);
        }
        Ok(())
    }

    /// Tells the neighbours where the step stands in the stream. Refuses one that would wait for ever, since a neighbour has it before a step that
    /// is before it here; the neighbour is told, and its step ends.
    fn tell_order(&self, stream: StreamHandle, step: u64, is_captured: bool) -> Result<(), Error> {
        let Some(places) = &self.places else { return Ok(()) };
        if is_captured {
            // How often a graph runs is not known, so steps have no numbers that others know.
            self.node.order.forget(places);
            return Ok(());
        }
        // Steps before all ranks have made a second plan come before all of that.
        if self.node.plans.load(Ordering::Relaxed) < 2 {
            return Ok(());
        }
        let number = self.node.context.backend().stream_number(stream);
        let Err(Misorder { rank, plan: other, step: before }) = self.node.order.enqueue(places, step, number) else { return Ok(()) };
        self.progress.take_back(false);
        self.is_broken.store(true, Ordering::Release);
        let departure = Departure { order: other, ..self.progress.departure(true) };
        lock(&self.held).imports.iter().for_each(|address| self.node.context.leave_memory(*address, departure));
        let plan = self.progress.plan;
        let reason = format!(
            "step {step} of node plan {plan} comes after step {before} of node plan {other} in stream {:#x}, and rank {rank} has enqueued them in one \
             stream the other way round: both ranks would wait for ever, so the step was not enqueued. Enqueue node plans that share a stream in the \
             same order on all ranks; destroy node plan {plan} on all, and plan again",
            stream.0
        );
        Err(Error::NodeArgument { argument: c"plan", reason })
    }

    /// This rank's parts, where the ranks are in step.
    fn unbroken(&self) -> Result<MutexGuard<'_, RankParts>, Error> {
        let parts = lock(&self.parts);
        if self.is_broken.load(Ordering::Acquire) {
            let why = "an earlier execution of this node plan could not be enqueued as a whole, so the ranks are out of step; destroy it on all, and plan again";
            return Err(Error::NotSupported(why.into()));
        }
        Ok(parts)
    }

    /// Gives back what the plan has; blocks until the executions that this rank has asked for have finished. No other rank takes part: those
    /// that have gone further find out, and memory that others use stays until they have destroyed theirs.
    pub fn destroy(&self) -> Result<(), Error> {
        let node = &self.node;
        // Partitions that nobody makes ready would keep the last step from its end.
        let missed = self.words.as_ref().map_or(Ok(()), |words| words.finish(Instant::now() + LAST_PATIENCE));
        let (was_broken, finished) = {
            let mut parts = lock(&self.parts);
            let was_broken = self.is_broken.swap(true, Ordering::AcqRel);
            let finished = parts.all.iter().map(|(part, _)| part.synchronize(node.context.backend())).fold(Ok(()), Result::and);
            parts.release(node.context.backend());
            (was_broken, finished)
        };
        self.places.iter().for_each(|places| self.node.order.forget(places));
        let mut held = lock(&self.held);
        let has_failed = was_broken || missed.is_err() || finished.is_err() || self.progress.has_failed();
        let departure = self.progress.departure(has_failed);
        held.imports.iter().for_each(|address| node.context.leave_memory(*address, departure));
        node.give_back(&mut held);
        missed?;
        Ok(finished?)
    }

    /// The planner's result, for all ranks together.
    pub fn planned(&self) -> &plan::Plan {
        &self.together.plan
    }

    /// Bytes that this rank sends or receives in a step.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Staging bytes of this rank on the device where it has most.
    pub fn staging_bytes(&self) -> u64 {
        let mut by_device: BTreeMap<i32, u64> = BTreeMap::new();
        for (ring, owner) in self.together.plan.program.rings.iter().zip(&self.together.ring_owners) {
            if *owner == self.node.rank() {
                *by_device.entry(ring.device.0).or_default() += ring.bytes();
            }
        }
        by_device.into_values().max().unwrap_or(0)
    }

    /// The plan for people: what is moved, and who does it.
    pub fn describe(&self) -> String {
        let mut text = self.together.plan.describe(&self.node.machine);
        text += nature(self.node.context.backend());
        // Writing to a String cannot fail.
        let _ = writeln!(text, "node plan {}; ranks: {} (this is {})", self.progress.plan, self.node.ranks(), self.node.rank());
        for (rank, part) in self.together.parts.parts.iter().enumerate() {
            let bytes: u64 = part.steps.iter().flat_map(|step| &step.copies).map(|copy| copy.bytes).sum();
            let gpus: Vec<String> = (0..)
                .zip(&self.node.gpus)
                .filter(|(_, gpu)| gpu.owner as usize == rank)
                .map(|(number, _): (u32, _)| format!("gpu{number}"))
                .collect();
            let [taken, raised] =
                [part.ends.len() + count(part, |step| step.takes.len()), part.begins.len() + count(part, |step| step.raises.len())];
            let _ = writeln!(
                text,
                "  rank {rank} ({}): {} operations on {} lanes, {bytes} bytes; raises {raised} flags, takes {taken}",
                gpus.join(", "),
                part.steps.len(),
                part.lanes.len()
            );
        }
        let kernel_flags = lock(&self.parts).all.first().and_then(|(part, _)| part.kernel_flags());
        if let Some((near, takes)) = kernel_flags {
            let _ = writeln!(text, "  one kernel does this rank's part: of {takes} flags that it takes {near} are on its GPU");
        }
        let known = self.known();
        if !known.is_empty() {
            text += "variants, which all ranks take alike:\n";
            known.iter().for_each(|known| _ = writeln!(text, "  {}", known.sentence()));
        }
        if let Some(partitioned) = &self.together.partitioned {
            partitioned.describe(&mut text);
        }
        text
    }

    /// The plan for programs.
    pub fn to_json(&self) -> serde_json::Value {
        let mut value = self.together.plan.to_json(&self.node.machine);
        let ranks: Vec<serde_json::Value> = self
            .together
            .parts
            .parts
            .iter()
            .map(|part| {
                let bytes: u64 = part.steps.iter().flat_map(|step| &step.copies).map(|copy| copy.bytes).sum();
                serde_json::json!({ "operations": part.steps.len(), "lanes": part.lanes.len(), "bytes": bytes })
            })
            .collect();
        if let Some(object) = value.as_object_mut() {
            object.insert("ranks".into(), ranks.into());
            let known = self.known();
            if !known.is_empty() {
                object.insert("variants".into(), known.iter().map(Known::to_json).collect());
            }
        }
        value
    }

    /// How long steps take on the slowest rank, where there are variants to choose from, as far as their times have been read.
    pub fn measured(&self) -> Measured {
        lock(&self.parts).variants.as_ref().map_or(Measured::default(), StepVariants::medians)
    }

    /// What is known of the variants, where there are several.
    fn known(&self) -> Vec<Known> {
        let all = || [&self.together].into_iter().chain(&self.others);
        let named = all().zip(0..).map(|(together, variant)| match &together.partitioned {
            Some(partitioned) => (partitioned.name, partitioned.seconds),
            None => (variant_name(variant, all().count()), together.plan.predicted),
        });
        lock(&self.parts).variants.as_mut().map_or_else(Vec::new, |variants| variants.known(named))
    }

    /// Paths of all transfers together.
    pub fn paths(&self) -> usize {
        self.together.plan.transfers.iter().map(|t| t.paths.len()).sum()
    }

    /// The node that it was made on.
    pub fn node(&self) -> &Arc<NodeGroup> {
        &self.node
    }
}

fn count(part: &crate::program::ranks::Part, of: impl Fn(&crate::program::ranks::PartStep) -> usize) -> usize {
    part.steps.iter().map(of).sum()
}

impl Drop for NodePlan {
    fn drop(&mut self) {
        let held = lock(&self.held);
        if !held.allocations.is_empty() {
            // Streams that wait for producers would keep the context from closing.
            if let Some(Err(error)) = self.words.as_ref().map(|words| words.finish(Instant::now())) {
                log::debug!("a node plan is dropped: {error}");
            }
            log::warn!("a node plan was dropped and not destroyed: its staging memory stays until its context is destroyed");
        }
        lock(&self.parts).release(self.node.context.backend());
    }
}

impl fmt::Debug for NodePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodePlan").field("node", &self.node).field("ends", &self.together.ends).finish_non_exhaustive()
    }
}
