//! A plan bound to addresses, and one run of it.

use super::active::{ActiveStreams, GpuEnds, GpuSet, OtherCopies};
use super::batch::Located;
use super::choosing::{Choosing, Known, Measured, Moments, SharedChoice};
use super::config::Verify;
use super::error::{End, Error};
use super::peer_memory::Import;
use super::staging::Regions;
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

/// A plan for certain addresses, ready to run any number of times, from any thread, in any stream.
///
/// Everything that an execution hands to the backend is built here once and shared, so that executing copies nothing.
#[repr(C)] // What every execution reads stands first and together: in a time loop the application has evicted it from the near caches.
pub struct Plan {
    context: Arc<ContextState>,
    /// That of `planned`.
    program: Arc<plan::Program>,
    endpoints: Arc<[Endpoints]>,
    rings: Arc<[u64]>,
    regions: Regions,
    /// Bytes of all transfers.
    bytes: u64,
    /// The context's count of frees when the allocations were last seen alive.
    alive_at: AtomicU64,
    /// Memory of other processes that it moves. Not kept: a plan in the cache must not keep a connection.
    imports: Box<[Weak<Import>]>,
    /// What executions may take in its place, by how long they take.
    variants: Option<Box<Variants>>,
    /// That of `planned`.
    executor: plan::Engine,
    /// That of the context.
    verify: Verify,
    /// What the backend has made for it.
    state: PlanState,
    planned: Arc<plan::Plan>,
    /// The bound that it was planned for.
    staging_bytes: u64,
    allocations: Box<[UsedAllocation]>,
}

/// Host memory that one run takes for each operation: backends list them with their order.
const OPERATION_BYTES: usize = 96;

/// What [`Plan::trace`] saw.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Times from the moment at which the execution could begin.
    pub timeline: Timeline,
    /// By how many seconds times of different devices may be off against each other.
    pub precision: f64,
}

/// Memory that the backend gave out, with the first end in it.
struct UsedAllocation {
    transfer: usize,
    end: End,
    address: u64,
    allocation: NonZeroU64,
}

impl Plan {
    /// Binds a planner's result to addresses: those of the transfers as they are copied ([`Registrations::cut`](super::registered::Registrations::cut)), of which `batch` has the whole.
    /// `alive_at` is the context's count of frees from before the batch was located. A variant of another
    /// plan stages in the memory of that one where it fits in.
    pub(super) fn new(
        context: &Arc<ContextState>,
        planned: Arc<plan::Plan>,
        batch: &[Located],
        endpoints: &Arc<[Endpoints]>,
        staging_bytes: u64,
        alive_at: u64,
        of: Option<&Plan>,
    ) -> Result<Plan, Error> {
        let within = of.map(|of| (&*of.program.rings, &of.regions));
        let (rings, regions) = context.staging.place(&planned.program.rings, within, &*context.backend)?;
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

    /// The same plan, with variants to choose from at each execution.
    pub(super) fn with_variants(self, variants: Option<Variants>) -> Plan {
        Plan { variants: variants.map(Box::new), ..self }
    }

    /// Enqueues one run in `stream`: it starts after all earlier work there, and later work there starts after it. Does not wait.
    ///
    /// In a stream that is being captured the run becomes part of the graph, with staging memory of its own where the plan stages. The
    /// completion then cannot be waited for, and launches of one captured graph must be ordered.
    pub fn execute(&self, stream: StreamHandle) -> Result<Completion, Error> {
        let _range = nvtx::range(nvtx::Call::Execute, || self.bytes);
        self.submit(stream, Report::End)?.ok_or_else(|| no_completion().into())
    }

    /// The same for a run that nobody waits for by itself: only stream order tells its end.
    pub fn enqueue(&self, stream: StreamHandle) -> Result<(), Error> {
        let _range = nvtx::range(nvtx::Call::Execute, || self.bytes);
        self.submit(stream, Report::Nothing).map(drop)
    }

    /// Runs the plan once in `stream`, alone, and returns when each operation ran: device timestamps on CUDA, the clock on the host
    /// backend. Waits for what is in the stream before, and for the run itself.
    ///
    /// Operations are timed one by one, so a plan that would go as a graph goes over streams, and timestamps cost it a microsecond or so
    /// for each operation: look here for the order of things, and to `execute` for how long they take.
    pub fn trace(&self, stream: StreamHandle) -> Result<Trace, Error> {
        self.context.backend.synchronize_stream(stream)?;
        // A run that is timed is not checked for memory that was freed.
        self.look_for_freed()?;
        let times = self.submit(stream, Report::Times)?.ok_or_else(no_completion)?.times()?;
        let name = format!("{} on the {} backend, measured", self.context.machine.topology().name, self.context.backend.name());
        Ok(Trace { timeline: self.planned.timeline(name, false, &times.ops), precision: times.precision })
    }

    /// Makes what the first run in `stream` would otherwise make, so that it costs what later ones cost. Enqueues nothing and moves no byte.
    pub fn prepare(&self, stream: StreamHandle) -> Result<(), Error> {
        let _open = self.begin()?;
        let prepare =
            |plan: &Plan| self.context.backend.prepare(&plan.execution(stream, &[], Report::End)).map_err(|error| self.cause(error));
        took("plan prepared", || match &self.variants {
            Some(variants) => variants.all(self).try_for_each(prepare),
            None => prepare(self),
        })
    }

    /// One run, as backends take it.
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
        }
    }

    fn submit(&self, stream: StreamHandle, report: Report) -> Result<Option<Completion>, Error> {
        let _open = self.begin()?;
        let submitted = match &self.variants {
            // One that is timed is of the plan as described.
            Some(variants) if report != Report::Times => variants.run(self, &*self.context.backend, &self.context.active, stream, report),
            _ => self.run(stream, report),
        };
        let completion = submitted?;
        self.count();
        Ok(completion)
    }

    /// Hands one run to the backend: at once where the plan has no staging memory, else in its turn.
    pub(super) fn run(&self, stream: StreamHandle, report: Report) -> Result<Option<Completion>, Error> {
        headroom(self.program.ops.len(), OPERATION_BYTES).map_err(BackendError::no_headroom)?;
        self.validate()?;
        let submit = |after: &[Completion], report| self.context.backend.submit(&self.execution(stream, after, report));
        let submitted = if self.regions.is_empty() {
            submit(&[], report)
        } else {
            // Executions that share staging memory come after each other, so each needs a completion.
            let report = if report == Report::Nothing { Report::End } else { report };
            self.context.staging.in_turn(&self.regions, |after| submit(after, report)?.ok_or_else(no_completion)).map(Some)
        };
        submitted.map_err(|error| self.cause(error))
    }

    /// What precedes every run. The context stays open for as long as the result lives.
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

    /// Refuses a plan whose memory this context has freed. Costs one comparison while nothing is freed.
    fn check_alive(&self) -> Result<(), Error> {
        let frees = self.context.holdings.frees();
        if self.alive_at.load(Ordering::Relaxed) == frees {
            return Ok(());
        }
        self.look_for_freed()?;
        self.alive_at.store(frees, Ordering::Relaxed);
        Ok(())
    }

    /// Whether all memory is what the plan was made for.
    fn look_for_freed(&self) -> Result<(), Error> {
        for held in &self.allocations {
            if self.context.locate(held.address)?.map(|a| a.id) != Some(held.allocation.get()) {
                return Err(Error::MemoryFreed { transfer: held.transfer, end: held.end, address: held.address });
            }
        }
        Ok(())
    }

    /// Why an execution has failed. The backend may not know that memory was freed which this context did not allocate.
    #[cold]
    fn cause(&self, error: BackendError) -> Error {
        /// CONTEXT_IS_DESTROYED: the device was reset, which frees all memory. The caller has to learn of the reset.
        const RESET: i64 = 709;
        match self.look_for_freed() {
            Err(freed @ Error::MemoryFreed { .. }) if !matches!(error, BackendError::Driver { code: RESET, .. }) => freed,
            _ => error.into(),
        }
    }

    /// The planner's result.
    pub fn planned(&self) -> &plan::Plan {
        &self.planned
    }

    /// Bytes of all transfers.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Paths of all transfers together.
    pub fn paths(&self) -> usize {
        self.planned.transfers.iter().map(|t| t.paths.len()).sum()
    }

    /// Staging bytes on the device where it needs most.
    pub fn staging_bytes(&self) -> u64 {
        let program = &self.planned.program;
        program.rings.iter().map(|r| program.staging_bytes(r.device)).max().unwrap_or(0)
    }

    /// How long executions take, where there are variants to choose from, as far as their times have been read.
    pub fn measured(&self) -> Measured {
        self.variants.as_ref().map_or(Measured::default(), |variants| variants.measured())
    }

    /// The plan for people.
    pub fn describe(&self) -> String {
        let mut text = self.planned.describe(&self.context.machine_now());
        text += self.context.backend.nature();
        if let Some(variants) = &self.variants {
            let ago =
                |age: std::time::Duration| format!(", first by what an earlier run measured {:.1} hours ago", age.as_secs_f64() / 3600.0);
            let began_with = variants.began_with().map_or(String::new(), ago);
            text += &format!("\nexecutions take what is fastest as measured{began_with}, and try the others now and then:\n");
            let (alone, beside) = variants.known(self);
            alone.iter().for_each(|known| text += &format!("  {}\n", known.sentence()));
            if let Some(beside) = beside {
                text += "while other streams of this context copy:\n";
                beside.iter().for_each(|known| text += &format!("  {}\n", known.sentence()));
            }
        }
        text
    }

    /// The plan for programs.
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

    /// Whether the context of this plan is open.
    pub fn is_usable(&self) -> bool {
        self.context.is_open()
    }
}

/// What executions of a plan may take.
///
/// Beside others a plan begins with the plain copies, which keep off everybody's links but their own, and pays for every try. A relay that
/// others' copies begin or end at is not idle, and what others copy from a GPU that bytes of host memory come to, or to one that they leave,
/// fills host memory already: then it is the plain copies, and nothing is tried, because what one stream gained the other would lose.
pub(super) struct Variants {
    /// Beside the plan as described, which is number 0.
    others: Box<[Plan]>,
    choice: Arc<SharedChoice>,
    /// Where the transfers end and begin, whether any does in host memory, and the GPUs that pass bytes on.
    ends: GpuEnds,
    has_host_end: bool,
    relays: GpuSet,
}

impl Variants {
    /// The plan as described, `all`, of `batch`, and `others`, which `choice` was made for as many of.
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

    /// Whether what this plan would gain by several paths the others would lose.
    fn takes_from(&self, others: OtherCopies) -> bool {
        let meets = self.ends.to.meets(others.ends.from) || self.ends.from.meets(others.ends.to);
        self.relays.meets(others.ends.all()) || self.has_host_end && meets
    }

    /// All of them, `described` among them.
    pub fn all<'a>(&'a self, described: &'a Plan) -> impl Iterator<Item = &'a Plan> {
        [described].into_iter().chain(&self.others)
    }

    fn get<'a>(&'a self, described: &'a Plan, variant: usize) -> &'a Plan {
        variant.checked_sub(1).map_or(described, |other| &self.others[other])
    }

    /// Runs one of them. `active` knows what the context's other streams do.
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
        // Nobody knows when a graph runs.
        if backend.is_capturing(stream)? {
            let in_force = lock(state).in_force();
            return self.get(described, in_force).run(stream, report);
        }
        let (completion, moments) = Moments::around(variant, backend, stream, || self.get(described, variant).run(stream, report))?;
        lock(state).measure(moments);
        Ok(completion)
    }

    /// See [`Choosing::medians`]; of executions beside others where most are.
    pub fn measured(&self) -> Measured {
        let (alone, beside) = (lock(&self.choice.alone), lock(&self.choice.beside));
        if beside.all_executions() > alone.all_executions() { beside.medians() } else { alone.medians() }
    }

    /// How long ago an earlier run measured what this one began with.
    pub fn began_with(&self) -> Option<Duration> {
        self.choice.kept.as_ref()?.age()
    }

    /// What is known of each, with times that are there now: alone, and beside others where there were any.
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
