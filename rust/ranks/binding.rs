//! Binds a node plan (communication plan of all ranks of a node) to memory: allocates and exports memory of this rank, maps memory of other
//! ranks, and computes all addresses.

use super::addresses::{Bindings, FLAG_BYTES, Held, HeldRing, KernelReach};
use super::exchange::CollectiveCall;
use super::group::NodeGroup;
use super::order::PlanPlaces;
use super::part::{Addresses, BoundPart, INSIDE_RATE, SmallPart};
use super::partitioned::{PartitionWords, copy_now};
use super::progress::Progress;
use super::together::Together;
use super::transfers::{NodeTransfer, RankRequest, Window};
use crate::backend::{ActionGrid, Endpoints, SignalWait};
use crate::contexts::{ContextState, Error, Import};
use crate::ipc::{Handle, IpcError, Party, StepPlaces};
use crate::plan::{Place, Program};
use crate::program::ranks::FlagId;
use crate::topology::DeviceId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Message in which a rank sends the handles of the memory that it exports for a plan. It also contains the hash of the plan as computed by
/// that rank.
#[derive(Serialize, Deserialize)]
struct Offer {
    digest: u64,
    windows: Vec<(u32, Vec<u8>)>,
    rings: Vec<(u32, Vec<u8>)>,
    /// Handles of this rank's flag memory in host memory. Each is for one other rank, which sets flags in that memory.
    flags: Vec<(u32, Vec<u8>)>,
    /// Handle of this rank's flag memory in GPU memory. `None` if all its flags are in host memory.
    near: Option<Vec<u8>>,
}

/// Operations of a plan that this rank executes, bound to memory addresses and ready to be enqueued.
pub(super) struct BoundRank {
    pub part: BoundPart,
    pub used: Used,
    pub words: Option<Arc<PartitionWords>>,
    /// Tables in which this rank and its neighbours publish where in stream order they have enqueued the plan's steps (executions). `None`
    /// if no neighbour checks the order of steps. Also `None` for plans whose transfers move in partitions. Two calls enqueue a step of
    /// such a plan, so the step has no single position.
    pub places: Option<Arc<PlanPlaces>>,
    /// Address of the word that this rank's kernel sets after a long wait. `Some(None)` if kernels execute the plan variant on other ranks,
    /// but this rank has no kernel. `None` if streams execute the plan variant on all ranks.
    pub kernel: Option<Option<u64>>,
}

/// Memory that executions of a plan use. Each execution checks that this memory still exists.
#[derive(Default)]
pub(super) struct Used {
    /// Allocations of this process, each as an address in the allocation and the id that the allocation had when the plan was created.
    allocations: Vec<(u64, u64)>,
    /// Number of frees in this context at the time when the allocations were last found to exist.
    alive_at: AtomicU64,
    imports: Box<[Weak<Import>]>,
}

impl Used {
    fn of(shared: &ContextState, addresses: &[u64]) -> Result<Used, Error> {
        let frees = shared.frees();
        let mut allocations = Vec::new();
        for &address in addresses {
            if let Some(allocation) = shared.locate(address)? {
                allocations.push((address, allocation.id));
            }
        }
        let imports = shared.imports_of(addresses.iter().copied());
        Ok(Used { allocations, alive_at: AtomicU64::new(frees), imports })
    }

    /// Merges several lists of used memory and drops duplicates. Duplicates would slow down each step, because a step checks every entry,
    /// and a check takes about as long as a call of the driver.
    pub fn of_all(each: impl Iterator<Item = Used>) -> Used {
        let mut all = Used::default();
        let mut imports: Vec<Weak<Import>> = Vec::new();
        for Used { allocations, imports: more, .. } in each {
            all.allocations.extend(allocations);
            imports.extend(more.iter().filter(|import| !imports.iter().any(|known| known.ptr_eq(import))).cloned().collect::<Vec<_>>());
        }
        all.allocations.sort_unstable();
        all.allocations.dedup();
        Used { imports: imports.into(), ..all }
    }

    /// Returns an error if memory that the plan uses no longer exists. This rank or the memory's owner may have freed it, or the owner may
    /// have ended.
    pub fn check(&self, shared: &ContextState) -> Result<(), Error> {
        for import in self.imports.iter().filter_map(Weak::upgrade) {
            import.check().map_err(|error| match error {
                // The original error text contains handles, which are unknown to the caller of a node plan.
                Error::Share(IpcError::PeerGone(_)) => {
                    let why = "another rank has freed memory of this plan, has destroyed its context, or has ended; destroy the plan on \
                               all ranks, and create it again";
                    IpcError::PeerGone(why.into()).into()
                }
                other => other,
            })?;
        }
        let frees = shared.frees();
        if self.alive_at.load(Ordering::Relaxed) != frees {
            for &(address, id) in &self.allocations {
                if shared.locate(address)?.map(|found| found.id) != Some(id) {
                    let reason =
                        format!("memory of this plan at {address:#x} was freed; destroy the plan on all ranks, and create it again");
                    return Err(Error::NodeArgument { argument: c"plan", reason });
                }
            }
            self.alive_at.store(frees, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Memory that one rank accesses when it executes its operations of a plan.
#[derive(Clone, Default)]
struct Touched {
    windows: BTreeSet<(u32, u32)>,
    rings: BTreeSet<u32>,
    /// Ranks in whose memory this rank sets or resets flags.
    flags: BTreeSet<u32>,
}

impl NodeGroup {
    /// Takes part in the collective call [`bind`](NodeGroup::bind) as a rank that has failed with `error`. The call then fails on all
    /// ranks. Returns the error.
    pub(super) fn fail_bind(call: &mut CollectiveCall<'_>, error: Error) -> Error {
        call.all::<Offer>(Err(error.clone())).err().unwrap_or(error)
    }

    /// Allocates and maps the memory that the plan needs, and binds this rank's operations to it. If `by_streams` is true, streams execute
    /// the operations of all ranks. `words` are the flags and counters of partitioned transfers. The first plan variant creates them, and
    /// later variants share them.
    pub(super) fn bind(
        &self,
        call: &mut CollectiveCall<'_>,
        requests: &[RankRequest],
        (together, by_streams): (&Together, bool),
        (windows, words): (&[Window], Option<Arc<PartitionWords>>),
        progress: &Arc<Progress>,
        held: &mut Held,
    ) -> Result<BoundRank, Error> {
        let mut bindings = Bindings {
            node: self,
            together,
            requests,
            windows: BTreeMap::new(),
            rings: BTreeMap::new(),
            flags: BTreeMap::new(),
            partition_flags: held.partition_flags.clone(),
            near: BTreeMap::new(),
            kernels: Vec::new(),
            by_streams,
        };
        let offers = call.all(self.offer(together, windows, progress, &mut bindings, held))?;
        let digest = offers[self.rank() as usize].digest;
        if let Some(rank) = offers.iter().position(|offer| offer.digest != digest) {
            let reason = "the rank has made a different plan for the same transfers: link all ranks with the same build of mpgpu".into();
            return Err(Error::RankFailed { rank: rank as u32, reason });
        }
        let part = &together.parts.parts[self.rank() as usize];
        let imported = self.import(requests, together, &offers, &mut bindings, held);
        let small = imported.map(|()| self.small_part(&offers, &mut bindings, held));
        let told = small.as_ref().map_err(Error::clone).map(|small| KernelReach {
            blocks: small.as_ref().map(|small| small.grid.blocks),
            takers: bindings.near.keys().copied().collect(),
        });
        bindings.kernels = call.all(told)?;
        bindings.leave_to_streams();
        let all_near = (0..).zip(&together.parts.flags).all(|(flag, _)| bindings.near_blocks(FlagId(flag)).is_some());
        let bound = small.and_then(|small| {
            let small = small.filter(|_| bindings.kernels[self.rank() as usize].blocks.is_some());
            let small =
                small.map(|mut small| match (&together.eager, bindings.near.get(&self.rank()).zip(together.near_of(self.rank()))) {
                    (Some(eager), Some((base, near))) if all_near => small.by_turns(part, self.rank(), eager, &bindings, base + near.turn),
                    _ => {
                        small.actions = SmallPart::actions_of(part, &bindings);
                        small
                    }
                });
            let words = match words {
                Some(words) => Some(words),
                None => PartitionWords::new(&bindings, progress, held)?,
            };
            if words.is_some() && held.partition_flags.is_empty() {
                held.partition_flags.clone_from(&bindings.flags);
            }
            let armed = words.as_ref().zip(together.partitioned.as_ref());
            let armed = armed.map(|(words, partitioned)| words.armed(partitioned, part, &bindings)).transpose()?;
            let late = small.as_ref().map(|small| small.grid.late());
            let kernel = bindings.kernels.iter().any(|kernel| kernel.blocks.is_some()).then_some(late);
            let mut bound = BoundPart::new(part, &bindings, small, armed, &progress.fate, self.context.backend())?;
            let Bindings { windows, rings, flags, near, .. } = &bindings;
            let touched = windows.values().chain(rings.values()).chain(flags.values()).chain(near.values());
            let touched: Vec<u64> = touched.copied().collect();
            match Used::of(self.context.state(), &touched) {
                Ok(used) => {
                    let places = if words.is_none() { bindings.places(progress.plan) } else { None };
                    Ok(BoundRank { part: bound, used, words, places, kernel })
                }
                Err(error) => {
                    bound.release(self.context.backend());
                    Err(error)
                }
            }
        });
        let failed = bound.as_ref().err().cloned();
        let agreed = call.all(failed.map_or(Ok(()), Err));
        match (agreed, bound) {
            (Ok(_), bound) => bound,
            (Err(error), Ok(mut bound)) => {
                bound.part.release(self.context.backend());
                Err(error)
            }
            (Err(error), Err(_)) => Err(error),
        }
    }

    /// True if kernels are allowed to execute the operations of this plan.
    fn takes_kernels(&self, bindings: &Bindings<'_>) -> bool {
        !bindings.by_streams && bindings.together.partitioned.is_none() && self.signal_wait() == SignalWait::Kernel
    }

    /// Returns this rank's operations as a program for one kernel, or `None` if a kernel cannot execute them. Also maps the GPU memory of
    /// other ranks in which the kernel sets flags.
    fn small_part(&self, offers: &[Offer], bindings: &mut Bindings<'_>, held: &mut Held) -> Option<SmallPart> {
        let (rank, together, context) = (self.rank(), bindings.together, &self.context);
        let words = *bindings.near.get(&rank)?;
        let part = &together.parts.parts[rank as usize];
        let mut small = SmallPart::new(part, bindings)?;
        let backend = context.backend();
        let reach = backend.action_reach(small.device, &small.program, &small.endpoints);
        let reach = reach.inspect_err(|error| log::debug!("the steps of a node plan are not executed by one kernel: {error}")).ok()?;
        let stop = bindings.flags.get(&rank)? + together.places_of(rank)? + StepPlaces::BYTES;
        let words = words + together.near_of(rank)?.words;
        // Copies out of an inbox stay within one GPU's memory, so they are faster than copies over NVLink.
        let come_in = together.eager.as_ref().map_or(0, |eager| eager.inboxes[rank as usize] / INSIDE_RATE);
        let bytes = small.program.transfers.iter().sum::<u64>().max(come_in);
        let blocks = if small.is_narrow { 1 } else { ActionGrid::blocks_for(bytes, context.config().node_blocks, reach.processors) };
        small.grid = ActionGrid { words, stop, blocks, turn: 0 };
        for taker in together.touched()[rank as usize].flags.iter().copied().filter(|taker| *taker != rank) {
            let Some(handle) = &offers[taker as usize].near else { continue };
            let mapped = self.map(handle, Some(small.device), held).and_then(|address| {
                let program = Arc::new(Program { transfers: vec![FLAG_BYTES], ..Program::default() });
                // The mapped address may differ between GPUs.
                let seen = backend.action_reach(small.device, &program, &Arc::from([Endpoints { dst: address, src: address }]))?;
                bindings.near.insert(taker, seen.ends[0].dst);
                Ok(())
            });
            if let Err(error) = mapped {
                log::debug!("flags of rank {taker} are in host memory, because this rank cannot access the GPU of rank {taker}: {error}");
            }
        }
        Some(small)
    }

    /// Maps the memory of another rank that `handle` denotes, and returns the address. If the memory is on a GPU that is not visible to
    /// this process, it is mapped through the device `instead`, or refused if `instead` is `None`.
    pub(super) fn map(&self, handle: &[u8], instead: Option<DeviceId>, held: &mut Held) -> Result<u64, Error> {
        let handle = Handle::decode(handle.try_into().unwrap_or(&[0; 128]))?;
        let (address, _) = self.context.state().import_through(&handle, instead)?;
        held.imports.push(address);
        Ok(address)
    }

    /// Allocates this rank's staging memory and flags, and exports the memory that other ranks access. Returns the message with the handles
    /// of the exported memory.
    fn offer(
        &self,
        together: &Together,
        windows: &[Window],
        progress: &Arc<Progress>,
        bindings: &mut Bindings<'_>,
        held: &mut Held,
    ) -> Result<Offer, Error> {
        let (rank, program) = (self.rank(), &together.plan.program);
        let Held { allocations, rings, .. } = held;
        let mut allocate = |device: DeviceId, bytes: u64| {
            let address = self.context.allocate_shared(device, bytes)?;
            allocations.push(address);
            Ok::<u64, Error>(address)
        };
        let mut spare = std::mem::take(rings);
        let touched = together.touched();
        let others = |of: &dyn Fn(&Touched) -> bool| touched.iter().enumerate().any(|(other, touched)| other as u32 != rank && of(touched));
        let export = |address: u64, bytes: u64| Ok::<Vec<u8>, Error>(self.context.state().export_memory(address, bytes)?.encode().to_vec());
        let mut offer = Offer { digest: together.digest(), windows: Vec::new(), rings: Vec::new(), flags: Vec::new(), near: None };
        for (ring, staging) in (0..).zip(&program.rings).filter(|(ring, _)| together.ring_owners[*ring as usize] == rank) {
            let (device, bytes) = (self.device_here(staging.device), staging.bytes());
            let users: BTreeSet<u32> = (0..).zip(&touched).filter(|(_, of)| of.rings.contains(&ring)).map(|(user, _)| user).collect();
            let fits = |held: &HeldRing| held.device == device && held.bytes >= bytes && held.users == users;
            let held = match spare.iter().position(fits) {
                Some(found) => spare.swap_remove(found),
                None => HeldRing { device, bytes, users, address: allocate(device, bytes)? },
            };
            let address = held.address;
            rings.push(held);
            bindings.rings.insert(ring, address);
            if others(&|touched| touched.rings.contains(&ring)) {
                offer.rings.push((ring, export(address, staging.bytes())?));
            }
        }
        rings.extend(spare);
        if let Some(places) = together.places_of(rank) {
            // Adds two words: one that ends the waits of a kernel, and one that the kernel sets after a long wait.
            let near = together.near_of(rank).unwrap_or_default();
            let bytes = (places + StepPlaces::BYTES + 2 * 8).max(near.inboxes);
            let address = allocate(DeviceId::HOST, bytes)?;
            bindings.flags.insert(rank, address);
            let device = SmallPart::device_of(&together.parts.parts[rank as usize], bindings);
            if let Some(device) = device.filter(|_| self.takes_kernels(bindings)) {
                let base = allocate(device, near.bytes)?;
                // New shared host memory contains zeros, so it is copied to clear the device memory.
                copy_now(self.context.backend(), device, near.inboxes, Endpoints { dst: base, src: address })?;
                bindings.near.insert(rank, base);
                offer.near = Some(export(base, near.bytes)?);
            }
            self.context.state().name_signallers(address, together.signallers(rank, address))?;
            for raiser in (0..).zip(&touched).filter(|(raiser, of)| *raiser != rank && of.flags.contains(&rank)).map(|(raiser, _)| raiser) {
                let progress = Arc::clone(progress);
                let on_leave = Arc::new(move |departure, process| progress.leave(raiser, departure, process));
                let party = Some(Party { number: raiser, on_leave });
                offer.flags.push((raiser, self.context.state().export_to(address, bytes, party)?.encode().to_vec()));
            }
        }
        for (index, window) in (0..).zip(windows) {
            bindings.windows.insert((rank, index), window.address);
            if others(&|touched| touched.windows.contains(&(rank, index))) {
                offer.windows.push((index, export(window.address, window.bytes)?));
            }
        }
        Ok(offer)
    }

    /// Maps the memory of other ranks that this rank accesses when it executes the plan.
    fn import(
        &self,
        requests: &[RankRequest],
        together: &Together,
        offers: &[Offer],
        bindings: &mut Bindings<'_>,
        held: &mut Held,
    ) -> Result<(), Error> {
        let rank = self.rank();
        let mut import = |device: DeviceId, handle: Option<&Vec<u8>>| {
            self.map(handle.map_or(&[], Vec::as_slice), (!device.is_host()).then(|| self.device_here(device)), held)
        };
        let touched = &together.touched()[rank as usize];
        for &(other, window) in touched.windows.iter().filter(|(other, _)| *other != rank) {
            let handle = offers[other as usize].windows.iter().find(|(index, _)| *index == window).map(|(_, handle)| handle);
            let device = DeviceId(requests[other as usize].windows[window as usize].device);
            bindings.windows.insert((other, window), import(device, handle)?);
        }
        for &ring in touched.rings.iter().filter(|ring| together.ring_owners[**ring as usize] != rank) {
            let owner = together.ring_owners[ring as usize] as usize;
            let handle = offers[owner].rings.iter().find(|(index, _)| *index == ring).map(|(_, handle)| handle);
            bindings.rings.insert(ring, import(together.plan.program.rings[ring as usize].device, handle)?);
        }
        let mut raised = Vec::new();
        for &taker in touched.flags.iter().filter(|taker| **taker != rank) {
            let handle = offers[taker as usize].flags.iter().find(|(raiser, _)| *raiser == rank).map(|(_, handle)| handle);
            let address = import(DeviceId::HOST, handle)?;
            bindings.flags.insert(taker, address);
            raised.push(address);
        }
        held.flags.extend(raised);
        Ok(())
    }

    /// Unmaps memory of other ranks, and frees memory of this rank once no other rank has it mapped.
    pub(super) fn give_back(&self, held: &mut Held) {
        let closed = held.imports.drain(..).map(|address| self.context.state().close_memory(address));
        let freed = held.allocations.drain(..).map(|address| self.context.state().free_unmapped(address));
        for error in closed.chain(freed).filter_map(Result::err) {
            log::debug!("could not free memory of a node plan: {error}");
        }
    }
}

impl Together {
    /// Returns the addresses of all flags that rank `taker` waits for, each with the rank that sets the flag. `base` is the address of the
    /// first flag.
    fn signallers(&self, taker: u32, base: u64) -> Arc<[(u64, u32)]> {
        let flags = self.parts.flags.iter().zip(&self.flag_places).filter(|(flag, _)| flag.taker == taker);
        let mut named: Vec<(u64, u32)> = flags.map(|(flag, place)| (base + FLAG_BYTES * place, flag.raiser)).collect();
        named.sort_unstable();
        named.into()
    }

    /// Returns the memory that each rank accesses when it executes the plan, indexed by rank.
    fn touched(&self) -> Vec<Touched> {
        let mut all = vec![Touched::default(); self.parts.parts.len()];
        for (touched, part) in all.iter_mut().zip(&self.parts.parts) {
            for copy in part.steps.iter().flat_map(|step| &step.copies) {
                for place in [copy.from, copy.to] {
                    match place {
                        Place::Source { transfer, .. } => {
                            let end = self.transfers[transfer as usize].src;
                            touched.windows.insert((end.rank, end.window));
                        }
                        Place::Destination { transfer, .. } => {
                            let end = self.transfers[transfer as usize].dst;
                            touched.windows.insert((end.rank, end.window));
                        }
                        Place::Slot { ring, .. } => drop(touched.rings.insert(ring.0)),
                    }
                }
            }
        }
        for flag in &self.parts.flags {
            all[flag.raiser as usize].flags.insert(flag.taker);
        }
        if self.is_stored() {
            for NodeTransfer { dst, src, .. } in self.transfers.iter().filter(|t| t.bytes > 0) {
                all[src.rank as usize].windows.extend([(src.rank, src.window), (dst.rank, dst.window)]);
            }
        }
        all
    }
}
