//! Executes a node plan (communication plan of all ranks of a node) on one rank. Contains the operations of the rank in all plan variants,
//! the choice of a variant for each step, and the positions of steps in the rank's streams.

use super::addresses::Held;
use super::agreed::StepVariants;
use super::binding::{BoundRank, Used};
use super::group::NodeGroup;
use super::order::{Misorder, PlanPlaces};
use super::part::BoundPart;
use super::partitioned::{PartitionWords, Trigger};
use super::progress::Progress;
use super::together::{RankWork, Together};
use crate::adapt::variant_name;
use crate::backend::{Abandoned, Backend, BackendError, Completion, Moment, Report, StreamHandle, no_completion};
use crate::contexts::choosing::{Known, Moments};
use crate::contexts::nvtx;
use crate::contexts::state::LAST_PATIENCE;
use crate::contexts::{Error, Measured};
use crate::ipc::Departure;
use crate::plan;
use crate::rank;
use crate::sync::{Mutex, MutexGuard, lock};
use crate::topology::DeviceId;
use crate::units::size;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Communication plan of all ranks of a node. Each rank executes its own operations of the plan. Executions on a rank run one after the
/// other in the order of the calls, even if the calls use several streams or threads.
pub struct NodePlan {
    pub(super) node: Arc<NodeGroup>,
    pub(super) together: Together,
    /// All variants of the plan except the first.
    others: Vec<Together>,
    /// Number of bytes that this rank sends and receives in one execution of the plan. Transfers within the rank count only once.
    bytes: u64,
    /// Memory that the executions of this plan use. Each execution checks that this memory still exists.
    used: Used,
    parts: Mutex<RankParts>,
    /// Flags and counters of the partitions. `None` if the transfers do not move in partitions.
    pub(super) words: Option<Arc<PartitionWords>>,
    held: Mutex<Held>,
    /// Number of communication steps that this rank has enqueued, and reports of ranks that have stopped executing the plan.
    pub(super) progress: Arc<Progress>,
    /// Tables in which this rank and its neighbours publish where in stream order they have enqueued the steps of the plan. `None` if no
    /// neighbour checks the order of steps.
    places: Option<Arc<PlanPlaces>>,
    /// True if a communication step could not be enqueued completely. The other ranks then wait for flags that are never set.
    is_broken: AtomicBool,
}

/// Operations of this rank in each variant of the plan, bound to memory.
struct RankParts {
    all: Vec<BoundPart>,
    /// Index of the plan variant that the last communication step used.
    last: usize,
    /// Index of the plan variant that the last communication step outside of stream captures used.
    last_run: usize,
    /// Rule that chooses the plan variant of each communication step. `None` if the plan has only one variant.
    variants: Option<StepVariants>,
    /// Measured communication step that has begun and not yet ended, as the index of its plan variant and its start time. `None` if no
    /// measured step is in progress.
    begun: Option<(usize, Result<Moment, BackendError>)>,
}

impl RankParts {
    /// Returns the index of the plan variant for step number `step`, and a boolean that is true if the step is measured. The number comes
    /// from [`Progress::begin`].
    fn choose(&mut self, step: u64, is_captured: bool) -> Result<(usize, bool), Error> {
        let choice = match &mut self.variants {
            None => return Ok((0, false)),
            Some(variants) if is_captured => variants.fix(step + 1).ok_or_else(|| {
                let why = "this rank captures a step of a node plan, but another rank has already executed later steps, which may use \
                           other paths: capture after the same number of executions on all ranks, or plan with adapt off";
                Error::NotSupported(why.into())
            })?,
            Some(variants) => variants.next(step),
        };
        Ok((choice.variant, choice.measure))
    }

    /// Calls `enqueue`, which enqueues a step, or only begins it if the transfers move in partitions. The enqueued work starts after the
    /// plan's last step, even if that step used another plan variant.
    fn begin(
        &mut self,
        (variant, measure): (usize, bool),
        stream: StreamHandle,
        is_captured: bool,
        backend: &dyn Backend,
        enqueue: impl FnOnce(&mut BoundPart) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        if variant != self.last_run {
            self.all[self.last_run].follow(stream, is_captured, backend)?;
        }
        self.last = variant;
        if !is_captured {
            self.last_run = variant;
        }
        self.begun = measure.then(|| (variant, backend.mark_moment(stream)));
        enqueue(&mut self.all[variant])
    }

    /// Records that a step has been enqueued completely. If the step is measured, also records its end time.
    fn end(&mut self, stream: StreamHandle, backend: &dyn Backend) {
        if let (Some((variant, begin)), Some(variants)) = (self.begun.take(), &mut self.variants) {
            variants.measure(begin.and_then(|begin| Ok(Moments { variant, begin, end: backend.mark_moment(stream)? })));
        }
    }

    fn release(&mut self, backend: &dyn Backend) {
        self.all.iter_mut().for_each(|part| part.release(backend));
    }
}

impl NodePlan {
    /// Creates a plan from one or more variants and this rank's operations in each of them.
    pub(super) fn new(
        node: &Arc<NodeGroup>,
        mut variants: Vec<Together>,
        mut bound: Vec<BoundRank>,
        agreed: Option<StepVariants>,
        held: Held,
        progress: Arc<Progress>,
    ) -> NodePlan {
        let (words, places) = bound.first_mut().map_or((None, None), |first| (first.words.take(), first.places.take()));
        let used = Used::of_all(bound.iter_mut().map(|one| std::mem::take(&mut one.used)));
        let all = bound.into_iter().map(|one| one.part).collect();
        variants.iter_mut().for_each(|together| together.keep_own(node.rank()));
        let together = variants.remove(0);
        let (flags, of, told) = (held.flags.clone(), Arc::downgrade(node), Arc::downgrade(&progress));
        progress.fate.on_abandon(move |steps| {
            if let (Some(node), Some(progress)) = (of.upgrade(), told.upgrade()) {
                let streams_go_on = steps == Abandoned::OfKernels;
                node.leave(&flags, Departure { streams_go_on, ..progress.departure(true) });
            }
        });
        NodePlan {
            node: Arc::clone(node),
            bytes: together.bytes_of(node.rank()),
            together,
            others: variants,
            used,
            parts: Mutex::new(RankParts { all, last: 0, last_run: 0, variants: agreed, begun: None }),
            words,
            held: Mutex::new(held),
            progress,
            places,
            is_broken: AtomicBool::new(false),
        }
    }

    /// Enqueues this rank's operations of one step in `stream`, and returns the completion of the step without waiting. Later work in the
    /// stream sees all data that this rank receives in the step, and may overwrite the data that this rank sends. Every rank must execute
    /// every step.
    pub fn execute(&self, stream: StreamHandle) -> Result<Completion, Error> {
        self.enqueue(stream)?;
        self.mark(stream)
    }

    /// Returns a completion of all work that has been enqueued in the stream so far.
    pub(super) fn mark(&self, stream: StreamHandle) -> Result<Completion, Error> {
        let end = self.node.context.backend().mark_end(stream, &[], Report::End)?;
        end.ok_or_else(|| no_completion().into())
    }

    /// Enqueues this rank's operations of one step like [`execute`](NodePlan::execute), but returns no completion.
    pub fn enqueue(&self, stream: StreamHandle) -> Result<(), Error> {
        let _range = nvtx::range(nvtx::Call::Execute, || self.bytes);
        let (shared, backend) = (self.node.context.state(), self.node.context.backend());
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
                let enqueued = parts.all[armed].enqueue(stream, is_captured, backend);
                enqueued.inspect_err(|_| self.is_broken.store(true, Ordering::Release))?;
                parts.end(stream, backend);
                drop(parts);
                if !is_captured {
                    words.note(self.mark(stream)?);
                }
            }
        }
        shared.count(self.bytes);
        Ok(())
    }

    /// Begins a step whose transfers move in partitions. The step starts after all earlier work in `stream`. The caller then enqueues the
    /// kernels that produce the data, in this stream or in one that waits for it, and calls [`enqueue`](NodePlan::enqueue).
    pub fn arm(&self, stream: StreamHandle) -> Result<(), Error> {
        let (shared, backend) = (self.node.context.state(), self.node.context.backend());
        let _open = shared.enter()?;
        let words = self.words()?;
        let is_captured = backend.is_capturing(stream)?;
        words.arm(is_captured)?;
        let begun = self.begin(stream, is_captured, |part| part.arm(stream, is_captured, backend));
        begun.inspect_err(|_| words.disarm())
    }

    /// Checks that a step may begin. Then calls `enqueue`, which enqueues the step, or only begins it if the transfers move in partitions.
    fn begin(
        &self,
        stream: StreamHandle,
        is_captured: bool,
        enqueue: impl FnOnce(&mut BoundPart) -> Result<(), BackendError>,
    ) -> Result<(), Error> {
        // The lock is held, because two concurrent steps would reset each other's flags.
        let mut parts = self.unbroken()?;
        self.used.check(self.node.context.state())?;
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

    /// Publishes to the neighbours where in stream order this rank enqueues step number `step`. Returns an error if the step could never
    /// finish, because a neighbour has enqueued the same step in front of a step of another plan that comes earlier on this rank. In this
    /// case, this rank stops executing the plan and notifies the neighbours, so that their waits for this step end.
    fn tell_order(&self, stream: StreamHandle, step: u64, is_captured: bool) -> Result<(), Error> {
        let Some(places) = &self.places else { return Ok(()) };
        if is_captured {
            // The number of launches of a graph is unknown, so the neighbours cannot know the numbers of later steps.
            self.node.order.forget(places);
            return Ok(());
        }
        // The order is checked only if the node has several plans. Steps before the creation of a second plan precede all of its steps.
        if self.node.plans.load(Ordering::Relaxed) < 2 {
            return Ok(());
        }
        let number = self.node.context.backend().stream_number(stream);
        let Err(Misorder { rank, plan: other, step: before }) = self.node.order.enqueue(places, step, number) else { return Ok(()) };
        self.progress.take_back(false);
        self.is_broken.store(true, Ordering::Release);
        let departure = Departure { order: other, ..self.progress.departure(true) };
        self.node.leave(&lock(&self.held).flags, departure);
        let plan = self.progress.plan;
        let reason = format!(
            "execution {step} of node plan {plan} comes after execution {before} of node plan {other} in stream {:#x}, but rank {rank} \
             has enqueued them in one stream in the opposite order: both ranks would wait forever, so the execution was not \
             enqueued. Enqueue node plans that share a stream in the same order on all ranks; destroy node plan {plan} on all ranks, and create it again",
            stream.0
        );
        Err(Error::NodeArgument { argument: c"plan", reason })
    }

    /// Locks and returns this rank's operations in all plan variants. Fails if an earlier step could not be enqueued completely, because
    /// the ranks have then executed different numbers of steps.
    fn unbroken(&self) -> Result<MutexGuard<'_, RankParts>, Error> {
        let parts = lock(&self.parts);
        if self.is_broken.load(Ordering::Acquire) {
            let why = "an earlier execution of this node plan could not be enqueued as a whole, so the ranks have executed different \
                       numbers of executions; destroy the plan on all ranks, and create it again";
            return Err(Error::NotSupported(why.into()));
        }
        Ok(parts)
    }

    /// Destroys the plan and frees its memory. Blocks until all steps that this rank has enqueued have finished. The other ranks need not
    /// call this function at the same time. Ranks that have enqueued further steps get an error. Memory that other ranks use stays
    /// allocated until they have destroyed their plans.
    pub fn destroy(&self) -> Result<(), Error> {
        let node = &self.node;
        // Partitions that are never marked as ready would prevent the last step from finishing.
        let missed = self.words.as_ref().map_or(Ok(()), |words| words.finish(Instant::now() + LAST_PATIENCE));
        let (was_broken, finished) = {
            let mut parts = lock(&self.parts);
            let was_broken = self.is_broken.swap(true, Ordering::AcqRel);
            let finished = parts.all.iter().map(|part| part.synchronize(node.context.backend())).fold(Ok(()), Result::and);
            parts.release(node.context.backend());
            (was_broken, finished)
        };
        self.places.iter().for_each(|places| self.node.order.forget(places));
        let mut held = lock(&self.held);
        let has_failed = was_broken || missed.is_err() || finished.is_err() || self.progress.has_failed();
        let departure = self.progress.departure(has_failed);
        node.leave(&held.flags, departure);
        node.give_back(&mut held);
        missed?;
        Ok(finished?)
    }

    /// Returns the planned paths and copies of the transfers of all ranks. The plan of several ranks has no rejected paths;
    /// [`NodePlan::describe`] computes them again.
    pub fn planned(&self) -> &plan::Plan {
        &self.together.plan
    }

    /// Returns the number of bytes that this rank sends or receives in one execution of the plan.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the size in bytes of this rank's staging memory on the device that has most of it.
    pub fn staging_bytes(&self) -> u64 {
        let mut by_device: BTreeMap<i32, u64> = BTreeMap::new();
        for (ring, owner) in self.together.plan.program.rings.iter().zip(&self.together.ring_owners) {
            if *owner == self.node.rank() {
                *by_device.entry(ring.device.0).or_default() += ring.bytes();
            }
        }
        by_device.into_values().max().unwrap_or(0)
    }

    /// Returns a human-readable description of the plan, which lists the transfers and the work of each rank. If the plan has
    /// several ranks, this function plans the transfers again, because such a plan does not store the rejected paths.
    pub fn describe(&self) -> String {
        let mut text = self.together.explained(&self.node.machine).describe(&self.node.machine);
        text += self.node.context.backend().nature();
        // Writing to a String cannot fail.
        let _ = writeln!(text, "node plan {}; ranks: {} (this is {})", self.progress.plan, self.node.ranks(), self.node.rank());
        for (rank, RankWork { operations, lanes, bytes, sets, waits }) in self.together.work.iter().enumerate() {
            let gpus: Vec<String> = (0..)
                .zip(&self.node.gpus)
                .filter(|(_, gpu)| gpu.owner as usize == rank)
                .map(|(number, _): (u32, _)| format!("gpu{number}"))
                .collect();
            let _ = writeln!(
                text,
                "  rank {rank} ({}): {operations} operations on {lanes} lanes (internal streams), {bytes} bytes; sets {sets} flags, waits for {waits}",
                gpus.join(", ")
            );
        }
        let blocks = lock(&self.parts).all.first().and_then(BoundPart::kernel_blocks);
        if let Some(blocks) = blocks {
            let _ = writeln!(text, "  one kernel executes this rank's part; blocks: {blocks}");
        }
        let holds: Vec<String> = self.holds().iter().map(|(device, bytes)| format!("{} on {device}", size(*bytes))).collect();
        if !holds.is_empty() {
            let mapped = lock(&self.held).imports.len();
            let _ = writeln!(
                text,
                "  holds {} (device numbers of this rank); has mapped {mapped} allocations of other ranks",
                holds.join(", ")
            );
        }
        let by_streams = lock(&self.parts).variants.as_ref().and_then(StepVariants::by_streams);
        if let Some(steps) = by_streams {
            let _ = writeln!(
                text,
                "  if ranks are late by more than 0.1 ms, streams and copy engines replace the kernel: in {steps} steps so far"
            );
        }
        let known = self.known();
        if !known.is_empty() {
            text += "variants, the same on all ranks in each step:\n";
            known.iter().for_each(|known| _ = writeln!(text, "  {}", known.sentence()));
        }
        if let Some(partitioned) = &self.together.partitioned {
            partitioned.describe(&mut text);
        }
        text
    }

    /// Returns the description of the plan as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        let mut value = self.together.explained(&self.node.machine).to_json(&self.node.machine);
        let work = self.together.work.iter();
        let ranks: Vec<serde_json::Value> =
            work.map(|of| serde_json::json!({ "operations": of.operations, "lanes": of.lanes, "bytes": of.bytes })).collect();
        if let Some(object) = value.as_object_mut() {
            object.insert("ranks".into(), ranks.into());
            let holds = self.holds().into_iter().map(|(device, bytes)| (device.to_string(), serde_json::Value::from(bytes)));
            object.insert("holds_bytes".into(), holds.collect());
            let known = self.known();
            if !known.is_empty() {
                object.insert("variants".into(), known.iter().map(Known::to_json).collect());
            }
        }
        value
    }

    /// Returns the size in bytes of the memory of this rank that the plan has allocated, by device. Memory that several plan variants share
    /// counts once.
    fn holds(&self) -> BTreeMap<DeviceId, u64> {
        let mut holds: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for address in &lock(&self.held).allocations {
            if let Ok(Some(allocation)) = self.node.context.backend().locate(*address) {
                *holds.entry(allocation.device).or_default() += allocation.bytes;
            }
        }
        holds
    }

    /// Returns the measured times of steps on the slowest rank, as far as they have been read. The result is empty if the plan has only one
    /// variant.
    pub fn measured(&self) -> Measured {
        lock(&self.parts).variants.as_ref().map_or(Measured::default(), StepVariants::medians)
    }

    /// Returns the measurements of the plan variants. The list is empty if the plan has only one variant.
    fn known(&self) -> Vec<Known> {
        let all = || [&self.together].into_iter().chain(&self.others);
        let named = all().zip(0..).map(|(together, variant)| match &together.partitioned {
            Some(partitioned) => (partitioned.name, partitioned.seconds),
            None => (variant_name(variant, all().count()), together.plan.predicted),
        });
        lock(&self.parts).variants.as_mut().map_or_else(Vec::new, |variants| variants.known(named))
    }

    /// Returns the total number of paths of all transfers of the plan.
    pub fn paths(&self) -> usize {
        self.together.plan.transfers.iter().map(|t| t.paths.len()).sum()
    }

    /// Returns a number that is not less than the number of rejected paths that [`NodePlan::describe`] lists.
    pub fn most_rejected(&self) -> usize {
        let devices = self.node.machine.devices().count();
        // Each transfer has one path over each device, and the direct path.
        self.together.plan.transfers.len().saturating_mul(devices + 1)
    }

    /// Returns the group of ranks on which the plan was created.
    pub fn node(&self) -> &Arc<NodeGroup> {
        &self.node
    }

    /// Returns the flags and counters of the partitions. Fails if the transfers do not move in partitions.
    pub(super) fn words(&self) -> Result<&PartitionWords, Error> {
        self.words.as_deref().ok_or_else(|| {
            let reason = "the transfers of the plan do not move in partitions: plan them with partitions".into();
            Error::NodeArgument { argument: c"plan", reason }
        })
    }

    /// Returns the trigger of a transfer, which contains addresses for this rank's kernels. `index` is the transfer's number among those
    /// that rank `rank` has passed to the plan.
    pub fn trigger(&self, rank: u32, index: usize) -> Result<Trigger, Error> {
        let (words, name) = (self.words()?, (rank, index));
        if let Some(reason) = rank::refuse("rank", rank, self.node.ranks()) {
            return Err(Error::NodeArgument { argument: c"rank", reason });
        }
        let whole = self.together.partitioned.as_ref().and_then(|partitioned| partitioned.halves.get(&name)).unwrap_or(&name);
        words.triggers.get(whole).copied().ok_or_else(|| {
            let reason =
                format!("transfer {index} of rank {rank}: it does not exist, or rank {} neither sends nor receives it", self.node.rank());
            Error::NodeArgument { argument: c"transfer", reason }
        })
    }

    /// Blocks until the last execution of the plan has finished, for at most `patience`.
    pub fn wait(&self, patience: Duration) -> Result<(), Error> {
        self.words()?.wait(patience, false)
    }

    /// Returns the largest number of partitions that any transfer of the plan has, at least 1.
    pub(super) fn partition_count(&self) -> u32 {
        let counts = self.together.partitioned.iter().flat_map(|partitioned| &partitioned.partitions).map(|partitions| partitions.count);
        counts.max().unwrap_or(1).max(1)
    }

    /// Returns the size in bytes of the plan's largest transfer.
    pub(super) fn largest_bytes(&self) -> u64 {
        self.together.transfers.iter().map(|transfer| transfer.bytes).max().unwrap_or(0)
    }

    /// Returns the text that identifies the plan's kind of transfers in a tuning file. See [`Partitioned::shape`].
    pub(super) fn shape(&self) -> &str {
        self.together.partitioned.as_ref().map_or("", |partitioned| &partitioned.shape)
    }
}

impl Drop for NodePlan {
    fn drop(&mut self) {
        let held = lock(&self.held);
        if !held.allocations.is_empty() {
            // Streams that still wait for producing kernels would prevent the context from closing.
            if let Some(Err(error)) = self.words.as_ref().map(|words| words.finish(Instant::now())) {
                log::debug!("a node plan was dropped: {error}");
            }
            log::warn!(
                "a node plan (shared by the ranks of this node) was dropped without being destroyed: its staging memory stays allocated \
                 until the context is destroyed"
            );
        }
        lock(&self.parts).release(self.node.context.backend());
    }
}

impl fmt::Debug for NodePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodePlan").field("node", &self.node).field("ends", &self.together.ends).finish_non_exhaustive()
    }
}
