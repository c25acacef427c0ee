//! Implements plans that are bound to addresses, and their execution.

use super::active::{ActiveStreams, GpuEnds, GpuSet, OtherCopies};
use super::batch::Located;
use super::choosing::{Choosing, Known, Measured, Moments, SharedChoice};
use super::config::Verify;
use super::error::{End, Error};
use super::peer_memory::Import;
use super::staging::{Regions, RingUse};
use super::state::ContextState;
use crate::adapt::{Choice, variant_name};
use crate::backend::{Backend, BackendError, Completion, Endpoints, Execution, PlanState, Report, StreamHandle, no_completion};
use crate::fault;
use crate::headroom::headroom;
use crate::model::timeline::Timeline;
use crate::nvtx;
use crate::plan;
use crate::sync::lock;
use crate::took::took;
use crate::topology::DeviceId;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A plan bound to addresses. It can run any number of times, from any thread, in any stream.
///
/// All data that an execution passes to the backend is built once, when the plan is made. Executions share this data and need not copy it.
#[repr(C)] // Fields that every execution reads come first and together: in a time loop the application evicts them from the near caches.
pub struct Plan {
    context: Arc<ContextState>,
    /// Program (list of operations) of the planner's result `planned`.
    program: Arc<plan::Program>,
    endpoints: Arc<[Endpoints]>,
    rings: Arc<[u64]>,
    regions: Regions,
    /// Total size of all transfers in bytes.
    bytes: u64,
    /// Number of frees that the context had counted when the plan's memory was last found to be still allocated.
    alive_at: AtomicU64,
    /// Imported memory that the plan uses. The references are weak, because a cached plan must not keep the connection to another process
    /// open.
    imports: Box<[Weak<Import>]>,
    /// Variants of the plan (plans for the same transfers over other paths), among which executions choose by measured times. `None` if the
    /// plan has no variants.
    variants: Option<Box<Variants>>,
    /// Execution method of the plan.
    executor: plan::Engine,
    /// Checks that the context makes on every execution of the plan.
    verify: Verify,
    /// State that the backend keeps for the plan.
    state: PlanState,
    planned: Arc<plan::Plan>,
    /// Maximum number of bytes of staging memory on each device with which the plan was made.
    staging_bytes: u64,
    allocations: Box<[UsedAllocation]>,
}

/// Host memory in bytes that the backend needs for each operation of a plan during one execution.
const OPERATION_BYTES: usize = 96;

/// Times of the operations of one execution, measured by [`Plan::trace`].
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Start and end times of the operations, relative to the moment at which the execution could start.
    pub timeline: Timeline,
    /// Uncertainty in seconds when times of operations on different devices are compared.
    pub precision: f64,
}

/// Allocation that the plan uses, with the first source or destination that lies in it.
struct UsedAllocation {
    transfer: usize,
    end: End,
    address: u64,
    allocation: NonZeroU64,
}

impl Plan {
    /// Binds a planner's result to addresses. `endpoints` holds the addresses of the transfers as they are copied, that is, split at the
    /// boundaries of pinned memory ([`Registrations::cut`](super::registered::Registrations::cut)). `batch` holds the original transfers.
    /// `alive_at` is the number of frees that the context had counted before it located the batch. If `of` is a plan, the new plan is a
    /// variant of it and uses its staging memory if that is large enough.
    pub(super) fn new(
        context: &Arc<ContextState>,
        planned: Arc<plan::Plan>,
        batch: &[Located],
        endpoints: &Arc<[Endpoints]>,
        staging_bytes: u64,
        alive_at: u64,
        of: Option<&Plan>,
    ) -> Result<Plan, Error> {
        let (rings, regions) = place(context, &planned.program, of)?;
        let mut allocations = Vec::new();
        let (mut known, mut last) = (ahash::HashSet::default(), [None; 2]);
        for (transfer, t) in batch.iter().enumerate() {
            let ends = [(End::Destination, t.dst, t.dst_allocation), (End::Source, t.src, t.src_allocation)];
            for ((end, address, allocation), last) in ends.into_iter().zip(&mut last) {
                if let Some(allocation) = allocation
                    && last.replace(allocation) != Some(allocation)
                    && known.insert(allocation)
                {
                    allocations.push(UsedAllocation { transfer, end, address, allocation });
                }
            }
        }
        let imports = context.sharing.imports_of(allocations.iter().map(|held| held.address));
        Ok(Plan {
            context: context.clone(),
            program: planned.program.clone(),
            executor: planned.executor,
            verify: context.config.verify,
            planned,
            endpoints: Arc::clone(endpoints),
            rings,
            regions,
            bytes: batch.iter().fold(0, |sum, t| sum.saturating_add(t.shape.bytes)),
            staging_bytes,
            allocations: allocations.into(),
            imports,
            variants: None,
            alive_at: AtomicU64::new(alive_at),
            state: PlanState::of(batch.iter().flat_map(|t| [t.dst_allocation, t.src_allocation])),
        })
    }

    /// Returns this plan after adding `variants`, among which each execution then chooses.
    pub(super) fn with_variants(self, variants: Option<Variants>) -> Plan {
        Plan { variants: variants.map(Box::new), ..self }
    }

    /// Enqueues one execution in `stream` and returns its completion. The execution starts after all earlier work in the stream, and later
    /// work in the stream starts after the execution. Does not wait.
    ///
    /// In a captured stream the execution becomes part of the graph. If the plan uses staging memory, the captured execution gets separate
    /// staging memory. The completion of a captured execution cannot be waited for, and the caller must ensure that launches of the
    /// captured graph do not overlap.
    pub fn execute(&self, stream: StreamHandle) -> Result<Completion, Error> {
        let _range = nvtx::range(nvtx::Call::Execute, || self.bytes);
        self.submit(stream, Report::End)?.ok_or_else(|| no_completion().into())
    }

    /// Enqueues one execution in `stream` without creating a completion. Only work that follows in the stream shows when the execution has
    /// finished.
    pub fn enqueue(&self, stream: StreamHandle) -> Result<(), Error> {
        let _range = nvtx::range(nvtx::Call::Execute, || self.bytes);
        self.submit(stream, Report::Nothing).map(drop)
    }

    /// Executes the plan once in `stream` and returns the start and end times of each operation. Waits for earlier work in the stream
    /// first, and then for the execution. The times come from device timestamps on CUDA, and from the clock on the host backend.
    ///
    /// Operations are enqueued one by one, so that each can be timed. A plan that normally runs as a graph therefore takes about a
    /// microsecond longer per operation. Use the trace to see the order and overlap of operations, and time `execute` for the total
    /// duration.
    pub fn trace(&self, stream: StreamHandle) -> Result<Trace, Error> {
        self.context.backend.synchronize_stream(stream)?;
        // Check for freed memory here, because backends do not check for it if the execution is traced (each operation is timed).
        self.look_for_freed()?;
        let times = self.submit(stream, Report::Times)?.ok_or_else(no_completion)?.times()?;
        let name = format!("{} on the {} backend, measured", self.context.machine.topology().name, self.context.backend.name());
        Ok(Trace { timeline: self.planned.timeline(name, false, &times.ops), precision: times.precision })
    }

    /// Creates everything that the first execution in `stream` would otherwise create, so that the first execution takes no longer than
    /// later ones. Enqueues nothing and copies no data.
    pub fn prepare(&self, stream: StreamHandle) -> Result<(), Error> {
        let _open = self.begin()?;
        let prepare =
            |plan: &Plan| self.context.backend.prepare(&plan.execution(stream, &[], Report::End)).map_err(|error| self.cause(error));
        took("plan prepared", || match &self.variants {
            Some(variants) => variants.all(self).try_for_each(prepare),
            None => prepare(self),
        })
    }

    /// Returns the description of one execution in `stream` for the backend. The execution runs after the completions in `after`.
    fn execution<'a>(&'a self, stream: StreamHandle, after: &'a [Completion], report: Report) -> Execution<'a> {
        Execution {
            program: &self.program,
            endpoints: &self.endpoints,
            rings: &self.rings,
            stream,
            after,
            verify: self.verify == Verify::Bytes,
            engine: self.executor,
            state: (report != Report::Times).then_some(&self.state),
            report,
            fate: None,
        }
    }

    fn submit(&self, stream: StreamHandle, report: Report) -> Result<Option<Completion>, Error> {
        let _open = self.begin()?;
        let submitted = match &self.variants {
            // A traced execution uses the plan itself, so that the times match the plan's description.
            Some(variants) if report != Report::Times => variants.run(self, &*self.context.backend, &self.context.active, stream, report),
            _ => self.run(stream, report),
        };
        let completion = submitted?;
        self.count();
        Ok(completion)
    }

    /// Submits one execution of exactly this plan to the backend. If the plan uses staging memory, first waits until no other thread is
    /// submitting an execution that shares this memory.
    pub(super) fn run(&self, stream: StreamHandle, report: Report) -> Result<Option<Completion>, Error> {
        headroom(self.program.ops.len(), OPERATION_BYTES).map_err(BackendError::no_headroom)?;
        self.validate()?;
        let submit = |after: &[Completion], report| self.context.backend.submit(&self.execution(stream, after, report));
        let submitted = if self.regions.is_empty() {
            if !self.rings.is_empty() {
                fault::point("staging");
            }
            submit(&[], report)
        } else {
            // Executions that share staging memory run one after the other, so each execution needs a completion for the next one to wait
            // for.
            let report = if report == Report::Nothing { Report::End } else { report };
            self.context.staging.in_turn(&self.regions, |after| submit(after, report)?.ok_or_else(no_completion)).map(Some)
        };
        submitted.map_err(|error| self.cause(error))
    }

    /// Makes the checks that precede every execution. Returns a guard that keeps the context open until it is dropped.
    fn begin(&self) -> Result<impl Drop + '_, Error> {
        let context = &*self.context;
        let open = context.enter()?;
        self.check_alive()?;
        for import in self.imports.iter().filter_map(Weak::upgrade) {
            import.check()?;
        }
        fault::point("execute");
        Ok(open)
    }

    fn validate(&self) -> Result<(), Error> {
        if cfg!(debug_assertions) || self.verify >= Verify::Program {
            plan::validate(&self.planned.program, self.staging_bytes)?;
        }
        Ok(())
    }

    fn count(&self) {
        self.context.count(self.bytes);
    }

    /// Returns an error if this context has freed memory of the plan. Costs one comparison if nothing has been freed since the last check.
    fn check_alive(&self) -> Result<(), Error> {
        let frees = self.context.holdings.frees();
        if self.alive_at.load(Ordering::Relaxed) == frees {
            return Ok(());
        }
        self.look_for_freed()?;
        self.alive_at.store(frees, Ordering::Relaxed);
        Ok(())
    }

    /// Returns an error if some memory of the plan no longer belongs to the allocation for which the plan was made.
    fn look_for_freed(&self) -> Result<(), Error> {
        for held in &self.allocations {
            if self.context.locate(held.address)?.map(|a| a.id) != Some(held.allocation.get()) {
                return Err(Error::MemoryFreed { transfer: held.transfer, end: held.end, address: held.address });
            }
        }
        Ok(())
    }

    /// Returns the error to report for a failed execution. Memory that this context did not allocate may have been freed without the
    /// backend's knowledge. In this case the error reports that the plan's memory was freed.
    #[cold]
    fn cause(&self, error: BackendError) -> Error {
        /// CUDA_ERROR_CONTEXT_IS_DESTROYED: the device was reset, which frees all memory. The caller must see the reset as the cause.
        const RESET: i64 = 709;
        match self.look_for_freed() {
            Err(freed @ Error::MemoryFreed { .. }) if !matches!(error, BackendError::Driver { code: RESET, .. }) => freed,
            _ => error.into(),
        }
    }

    /// Returns the planner's result.
    pub fn planned(&self) -> &plan::Plan {
        &self.planned
    }

    /// Returns the total size of the plan's transfers in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the total number of paths over all transfers of the plan.
    pub fn paths(&self) -> usize {
        self.planned.transfers.iter().map(|t| t.paths.len()).sum()
    }

    /// Returns the largest amount of staging memory in bytes that the plan uses on any device.
    pub fn staging_bytes(&self) -> u64 {
        let program = &self.planned.program;
        program.rings.iter().map(|r| program.staging_bytes(r.device)).max().unwrap_or(0)
    }

    /// Returns the median times of executions that were measured so far. The fields are `None` if the plan has no variants.
    pub fn measured(&self) -> Measured {
        self.variants.as_ref().map_or(Measured::default(), |variants| variants.measured())
    }

    /// Returns a human-readable description of the plan.
    pub fn describe(&self) -> String {
        let mut text = self.planned.describe(&self.context.machine_now());
        text += self.context.backend.nature();
        if let Some(variants) = &self.variants {
            let ago = |age: std::time::Duration| {
                format!(", starting from measurements of an earlier run {:.1} hours ago", age.as_secs_f64() / 3600.0)
            };
            let began_with = variants.began_with().map_or(String::new(), ago);
            text += &format!(
                "\nexecutions use the variant of the plan with the shortest measured time{began_with}, and sometimes try other variants:\n"
            );
            let (alone, beside) = variants.known(self);
            alone.iter().for_each(|known| text += &format!("  {}\n", known.sentence()));
            if let Some(beside) = beside {
                text += "while other streams of this context copy:\n";
                beside.iter().for_each(|known| text += &format!("  {}\n", known.sentence()));
            }
        }
        text
    }

    /// Returns a description of the plan as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        let mut json = self.planned.to_json(&self.context.machine_now());
        json["backend"] = self.context.backend.name().into();
        if let Some(variants) = &self.variants {
            json["measured_before_seconds"] = variants.began_with().map(|age| age.as_secs()).into();
            let (alone, beside) = variants.known(self);
            json["variants"] = alone.iter().map(Known::to_json).collect();
            json["variants_beside"] = beside.map(|beside| beside.iter().map(Known::to_json).collect::<Vec<_>>()).into();
        }
        json
    }

    /// True if the context of this plan is open.
    pub fn is_usable(&self) -> bool {
        self.context.is_open()
    }
}

/// Assigns staging memory to the rings of a program. Returns the base address of each ring, and the regions whose executions must not
/// overlap. On each device these regions lie inside the regions of the plan `of` if they fit there.
fn place(context: &ContextState, program: &plan::Program, of: Option<&Plan>) -> Result<(Arc<[u64]>, Regions), Error> {
    let backend = &*context.backend;
    let within = of.map(|of| (&of.program.rings[..backend.ordered_rings(&of.program)], &of.regions));
    let (ordered, granted) = program.rings.split_at(backend.ordered_rings(program));
    let (mut bases, regions) = context.staging.place(ordered, RingUse::Ordered, within, backend)?;
    bases.extend(context.staging.place(granted, RingUse::Granted, None, backend)?.0);
    Ok((bases.into(), regions))
}

/// Variants of a plan (plans for the same transfers over other paths), among which executions choose, and the GPUs that the plan uses.
///
/// While other streams copy, the active variant is at first the plain copies, because they use only the direct links. In two cases
/// executions use only the plain copies and try nothing else, because one stream would gain the bandwidth that another stream loses:
///
/// 1. Another stream copies to or from a GPU that is a relay of this plan.
/// 2. This plan copies from or to host memory, and another stream reads a GPU that this plan writes, or writes a GPU that this plan reads.
///    The two streams then already use all bandwidth of host memory.
pub(super) struct Variants {
    /// Variants of the plan other than the plan itself. The last one consists of plain copies.
    others: Box<[Plan]>,
    choice: Arc<SharedChoice>,
    /// GPUs at the sources and destinations of the plan's transfers, without relay GPUs.
    ends: GpuEnds,
    has_host_end: bool,
    relays: GpuSet,
}

impl Variants {
    /// Returns the variants of the plan `all`, which copies `batch`: the plan itself and `others`. `choice` must have the same number of
    /// variants.
    pub fn new(all: &plan::Plan, batch: &[Located], others: Vec<Plan>, choice: Arc<SharedChoice>) -> Variants {
        let (to, from) = (batch.iter().map(|t| t.shape.dst_device), batch.iter().map(|t| t.shape.src_device));
        Variants {
            others: others.into(),
            choice,
            has_host_end: to.clone().chain(from.clone()).any(DeviceId::is_host),
            ends: GpuEnds { to: GpuSet::of(to), from: GpuSet::of(from) },
            relays: GpuSet::of(all.program.rings.iter().map(|ring| ring.device)),
        }
    }

    /// True if the plan, by using several paths, would take bandwidth from other streams. `others` describes the copies of these streams.
    fn takes_from(&self, others: OtherCopies) -> bool {
        let meets = self.ends.to.meets(others.ends.from) || self.ends.from.meets(others.ends.to);
        self.relays.meets(others.ends.all()) || self.has_host_end && meets
    }

    /// Returns an iterator over all variants. The first is `described`, the plan itself.
    pub fn all<'a>(&'a self, described: &'a Plan) -> impl Iterator<Item = &'a Plan> {
        [described].into_iter().chain(&self.others)
    }

    fn get<'a>(&'a self, described: &'a Plan, variant: usize) -> &'a Plan {
        variant.checked_sub(1).map_or(described, |other| &self.others[other])
    }

    /// Chooses a variant of the plan `described`, and submits one execution of it in `stream`. `active` tracks the copies of the context's
    /// other streams.
    pub fn run(
        &self,
        described: &Plan,
        backend: &dyn Backend,
        active: &ActiveStreams,
        stream: StreamHandle,
        report: Report,
    ) -> Result<Option<Completion>, Error> {
        let takes = Duration::from_nanos(self.choice.takes.load(Ordering::Relaxed));
        let beside = active.enters(stream, takes, self.ends);
        if self.takes_from(beside) {
            let plain = self.others.len();
            lock(&self.choice.beside).takes(plain);
            return self.get(described, plain).run(stream, report);
        }
        let state = self.choice.state(beside.any);
        let Choice { variant, measure } = {
            let mut state = lock(state);
            let choice = state.choose();
            state.takes(choice.variant);
            if let Some(median) = state.chooser.median(choice.variant) {
                self.choice.takes.store(median, Ordering::Relaxed);
            }
            choice
        };
        if !measure {
            return self.get(described, variant).run(stream, report);
        }
        // A captured execution runs later, when its graph is launched, so it cannot be measured here.
        if backend.is_capturing(stream)? {
            let captured = lock(state).captured();
            return self.get(described, captured).run(stream, report);
        }
        let (completion, moments) = Moments::around(variant, backend, stream, || self.get(described, variant).run(stream, report))?;
        lock(state).measure(moments);
        Ok(completion)
    }

    /// Returns the [median times](Choosing::medians) of isolated executions. If more executions ran while other streams copied, returns the
    /// median times of those executions instead.
    pub fn measured(&self) -> Measured {
        let (alone, beside) = (lock(&self.choice.alone), lock(&self.choice.beside));
        if beside.all_executions() > alone.all_executions() { beside.medians() } else { alone.medians() }
    }

    /// Returns the age of the measurements with which the choice started, if they come from an earlier run. Returns `None` if there were
    /// none.
    pub fn began_with(&self) -> Option<Duration> {
        self.choice.kept.as_ref()?.age()
    }

    /// Returns a description of each variant with the times that are available now. The first list is for isolated executions. The second
    /// list is for executions while other streams copied, or `None` if there were none.
    pub fn known(&self, described: &Plan) -> (Vec<Known>, Option<Vec<Known>>) {
        let count = self.others.len() + 1;
        let known = |state: &mut Choosing<Moments>| {
            state.known(self.all(described).zip(0..).map(|(plan, variant)| (variant_name(variant, count), plan.planned().predicted)))
        };
        let mut beside = lock(&self.choice.beside);
        let beside = (beside.all_executions() > 0).then(|| known(&mut beside));
        (known(&mut lock(&self.choice.alone)), beside)
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("planned", &self.planned)
            .field("endpoints", &self.endpoints)
            .field("rings", &self.rings)
            .finish_non_exhaustive()
    }
}
