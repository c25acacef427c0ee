//! Creates node plans (communication plans that all ranks of a node execute together). Each rank passes its transfers, rank 0 plans
//! the transfers of all ranks, and each rank binds its operations of this plan to memory.

use super::addresses::Held;
use super::agreed::{Spans, StepVariants};
use super::binding::BoundRank;
use super::exchange::{Collective, CollectiveCall, Named};
use super::group::NodeGroup;
use super::lateness::Lateness;
use super::partitioning::{Agent, Partitioning};
use super::progress::Progress;
use super::steps::NodePlan;
use super::together::{PlanFailure, Together};
use super::transfers::{NodeTransfer, RankRequest, ToldWindow, Window, check_own};
use crate::backend::{BackendError, MemoryKind, REGISTERED_PIECE};
use crate::contexts::{Error, PlanOptions, Verify};
use crate::headroom::headroom;
use crate::plan::{Options, Relays};
use crate::topology::DeviceId;
use crate::tune::PartitionTuning;
use crate::units::size;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Estimated size in bytes of one memory window or one transfer in the requests of all ranks. Every rank receives these requests as text in
/// host memory.
const REQUEST_BYTES: usize = 1024;

/// Arguments that this rank passes to the creation of a plan, before they are checked.
#[derive(Copy, Clone)]
pub(super) struct OwnRequest<'a> {
    pub windows: &'a [Window],
    pub transfers: &'a [NodeTransfer],
    pub partitioning: Option<Partitioning>,
    pub options: &'a PlanOptions,
}

impl NodeGroup {
    /// Plans the transfers of all ranks together and returns the plan. Each rank passes its own windows (memory that the plan may use) and
    /// transfers. The source or the destination of each transfer, or both, must be in a window of the rank that passes the transfer. All
    /// ranks call this function together. A failure on one rank fails the call on all ranks.
    pub fn plan(self: &Arc<NodeGroup>, windows: &[Window], transfers: &[NodeTransfer], options: &PlanOptions) -> Result<NodePlan, Error> {
        self.plan_partitioned(windows, transfers, None, options)
    }

    /// Plans the transfers of all ranks together, like [`NodeGroup::plan`], so that they move in partitions. `partitioning` selects the
    /// number of partitions and the method.
    pub fn plan_partitioned(
        self: &Arc<NodeGroup>,
        windows: &[Window],
        transfers: &[NodeTransfer],
        partitioning: Option<Partitioning>,
        options: &PlanOptions,
    ) -> Result<NodePlan, Error> {
        let call = if partitioning.is_some() { Collective::PLAN_PARTITIONED } else { Collective::PLAN };
        self.plan_within(&mut self.exchange.call(call)?, OwnRequest { windows, transfers, partitioning, options })
    }

    /// Creates a node plan (plan that several ranks execute together) as part of a collective call that has already begun.
    pub(super) fn plan_within(self: &Arc<NodeGroup>, call: &mut CollectiveCall<'_>, own: OwnRequest<'_>) -> Result<NodePlan, Error> {
        let OwnRequest { windows, partitioning, .. } = own;
        let resolved = partitioning.map_or(Ok(()), Partitioning::check).and_then(|()| self.resolve(own.options));
        let mine = resolved.and_then(|options| self.request(own, &options).map(|request| (request, options)));
        let options = mine.as_ref().map(|(_, options)| *options).map_err(Error::clone);
        let requests = call.all(mine.map(|(request, _)| request))?;
        // All ranks have gathered the requests of all ranks here, so they all assign the same plan number.
        let number = self.plans.fetch_add(1, Ordering::Relaxed) + 1;
        let mut variants = match Together::variants(self, call, &requests, partitioning, &options?, self.adapts(own.options)) {
            Ok(variants) => variants,
            Err(PlanFailure::OnThisRank(error)) => return Err(NodeGroup::fail_bind(call, error)),
            Err(PlanFailure::OnAllRanks(error)) => return Err(error),
        };
        let (mut held, progress) = (Held::default(), Arc::new(Progress::new(number)));
        let mut bound: Vec<BoundRank> = Vec::new();
        let mut bind = |call: &mut CollectiveCall<'_>, together: &Together, by_streams: bool, held: &mut Held| {
            let first = bound.first().and_then(|first| first.words.clone());
            let one = self.bind(call, &requests, (together, by_streams), (windows, first), &progress, held)?;
            let kernel = one.kernel;
            bound.push(one);
            Ok::<_, Error>(kernel)
        };
        let mut kernels = Vec::new();
        let kernels = loop {
            let Some(together) = variants.get(kernels.len()) else { break Ok(kernels) };
            match bind(call, together, false, &mut held) {
                Ok(kernel) => kernels.push(kernel),
                // The plan then contains only the variants that were bound before. All ranks have received the error.
                Err(error) if together.is_stored() && !kernels.is_empty() && !matches!(error, Error::Allgather(_)) => {
                    log::debug!("producing kernels do not store the data themselves in steps of node plan {number}: {error}");
                    variants.truncate(kernels.len());
                }
                Err(error) => break Err(error),
            }
        };
        let made = kernels.and_then(|kernels| match kernels[..] {
            // Binds the operations to streams too. Streams execute them if ranks are late; otherwise a kernel does.
            [Some(late)] if self.adapts(own.options) => {
                bind(call, &variants[0], true, &mut held)?;
                Ok(Some(StepVariants::by_lateness(self.spans(call, &mut held)?, Lateness::of(late))))
            }
            [_] => Ok(None),
            _ => {
                // The model does not know the kernels that produce the data of partitions, nor the CPU threads of virtual devices.
                let is_modelled = partitioning.is_none() && !self.context.backend().is_virtual();
                let predicted = variants.iter().map(|together| if is_modelled { together.plan.predicted } else { 0.0 });
                let predicted: Vec<f64> = predicted.collect();
                Ok(Some(StepVariants::measured(self.spans(call, &mut held)?, &predicted, number)))
            }
        });
        match made {
            Ok(agreed) => Ok(NodePlan::new(self, variants, bound, agreed, held, progress)),
            Err(error) => {
                bound.iter_mut().for_each(|one| one.part.release(self.context.backend()));
                self.give_back(&mut held);
                Err(error)
            }
        }
    }

    /// Allocates or maps the shared memory in which the ranks agree on the plan variant of each step. Returns this rank's record of the
    /// agreed variants, in its initial state.
    fn spans(&self, call: &mut CollectiveCall<'_>, held: &mut Held) -> Result<Spans, Error> {
        let bytes = Spans::bytes(self.ranks());
        let mut own = 0;
        let mut offer = || {
            if self.rank() != 0 {
                return Ok(Vec::new());
            }
            own = self.context.allocate_shared(DeviceId::HOST, bytes)?;
            held.allocations.push(own);
            Ok(self.context.state().export_memory(own, bytes)?.encode().to_vec())
        };
        let offers = call.all::<Vec<u8>>(offer())?;
        let mapped = if self.rank() == 0 { Ok(own) } else { self.map(&offers[0], None, held) };
        call.all(mapped.as_ref().map(|_| ()).map_err(Error::clone))?;
        Ok(Spans::at(mapped?, self.rank(), self.ranks()))
    }

    fn resolve(&self, options: &PlanOptions) -> Result<Options, Error> {
        let config = self.context.config();
        if config.verify == Verify::Bytes {
            let why = "the bytes of a plan of several ranks cannot be compared, because no rank sees both source and destination; unset \
                       MPGPU_VERIFY=bytes";
            return Err(Error::NotSupported(why.into()));
        }
        // With 0 threads, the driver copies pageable memory. Each rank's pageable memory is visible to that rank only, so threads cannot
        // stage it for all ranks.
        Ok(Options { threads: 0, ..options.resolve(config)? })
    }

    fn adapts(&self, options: &PlanOptions) -> bool {
        options.adapt.unwrap_or(self.context.config().adapt)
    }

    /// Checks the windows (memory ranges) and transfers of this rank, and returns the request to send to all ranks.
    fn request(&self, own: OwnRequest<'_>, options: &Options) -> Result<RankRequest, Error> {
        let OwnRequest { windows, transfers, partitioning, .. } = own;
        let _open = self.context.state().enter()?;
        headroom(windows.len() + transfers.len(), REQUEST_BYTES).map_err(BackendError::no_headroom)?;
        let mut told = Vec::with_capacity(windows.len());
        for (index, window) in windows.iter().enumerate() {
            let Window { address, bytes } = *window;
            let refuse = |reason: String| Err(Error::NodeArgument { argument: c"windows", reason: format!("window {index}: {reason}") });
            if address.checked_add(bytes.saturating_sub(1)).is_none() {
                return refuse(format!("{address:#x} ({bytes} bytes) runs past the end of the address space"));
            }
            let found = if bytes == 0 { None } else { self.context.state().locate(address)? };
            let (device, is_pageable) = match found {
                None => (DeviceId::HOST, bytes > 0),
                Some(allocation) if bytes > allocation.bytes - (address - allocation.base) => {
                    let (base, size) = (allocation.base, allocation.bytes);
                    return refuse(format!(
                        "{address:#x} ({bytes} bytes) extends past the end of its allocation ({base:#x}, {size} bytes)"
                    ));
                }
                Some(allocation) => match self.number_of(allocation.device) {
                    Some(device) => (device, allocation.kind == MemoryKind::Pageable),
                    None => {
                        let device = allocation.device.in_words();
                        return refuse(format!(
                            "{address:#x} is memory of {device}, which no rank of the node uses: name it in `devices` when a rank creates \
                             the node object"
                        ));
                    }
                },
            };
            if self.context.state().crosses_pieces(address, bytes) {
                let piece = size(REGISTERED_PIECE);
                return refuse(format!(
                    "{address:#x} ({bytes} bytes) spans several blocks of registered memory: pass windows (memory ranges) that do not \
                     cross an address that is a multiple of {piece}, or allocate the memory in the context"
                ));
            }
            told.push(ToldWindow { device: device.0, is_pageable, address, bytes });
        }
        check_own(transfers, self.rank(), self.ranks())?;
        let is_open = self.rank() == 0 && partitioning.is_some_and(|partitioning| matches!(partitioning.agent, Agent::Auto { .. }));
        let best = |known: &PartitionTuning| PartitionTuning { shape: known.shape.clone(), trials: Vec::new(), ..*known };
        let tuned = self.context.tuning().filter(|_| is_open).map(|tuning| tuning.partitions.iter().map(best).collect());
        Ok(RankRequest {
            windows: told,
            transfers: transfers.to_vec(),
            options: named(options, self.adapts(own.options), partitioning),
            tuned: tuned.unwrap_or_default(),
        })
    }
}

/// Returns the names and values of the plan options that must be equal on all ranks.
fn named(options: &Options, adapts: bool, partitioning: Option<Partitioning>) -> Named {
    let bytes = |bytes: Option<u64>| bytes.map_or("default".into(), |bytes| bytes.to_string());
    let relays: Vec<u32> = (0..Relays::NAMED).filter(|gpu| options.relays.has(DeviceId::gpu(*gpu))).collect();
    let mut named = vec![
        ("engine", format!("{:?}", options.engine).to_lowercase()),
        ("max_paths", if options.max_paths == u32::MAX { "all".into() } else { options.max_paths.to_string() }),
        ("host_path", options.host_path.to_string()),
        ("relay_gpus", if options.relays == Relays::ALL { "all".into() } else { format!("{relays:?}") }),
        ("chunk_bytes", bytes(options.chunk_bytes)),
        ("relay_chunks", bytes(options.relay_chunks.map(u64::from))),
        ("host_chunks", bytes(options.host_chunks.map(u64::from))),
        ("min_bytes", bytes(options.min_bytes)),
        ("staging_bytes", options.staging_bytes.to_string()),
        ("adapt", adapts.to_string()),
    ];
    named.extend(partitioning.into_iter().flat_map(Partitioning::named));
    named.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
