//! A context: a machine, a backend, and everything that is kept between calls.

use super::active::ActiveStreams;
use super::batch::{self, Batch, Located, Transfer};
use super::cache::{Cache, CacheStatistics, Request, ShapeRequest};
use super::callbacks::CallbackQueue;
use super::config::{BackendChoice, Config, NO_TUNING, PlanOptions};
use super::deferred::{Deferred, UsedBy};
use super::error::Error;
use super::execute::Plan;
use super::holdings::Holdings;
use super::kept::KeptTimes;
use super::registered::Registrations;
use super::sharing::PeerMemory;
use super::staging::Staging;
use super::variants::{SharedChoice, Variants};
use crate::adapt;
use crate::backend::{
    Allocation, Backend, BackendError, Endpoints, EventHandle, Execution, GraphStatistics, HostFunction, SignalWait, StreamHandle,
    no_completion,
};
use crate::fault;
use crate::headroom::headroom;
use crate::ipc::{PATIENCE, fork};
use crate::nvtx;
use crate::plan::{self, Options, Program, Shape};
use crate::sync::{Mutex, lock};
use crate::took::took;
use crate::topology::{DeviceId, Machine};
use crate::tune::{self, Tuning};
use smallvec::SmallVec;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

/// How to open a context. `None` takes what the environment says, and then the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContextOptions {
    /// Which backend.
    pub backend: Option<BackendChoice>,
    /// Name of a preset, or path of a file.
    pub topology: Option<String>,
    /// Size of the staging arena of each device that needs one, bytes.
    pub staging_bytes: Option<u64>,
    /// Plans kept for requests that come again.
    pub cache_plans: Option<usize>,
    /// Programs whose graphs are kept.
    pub cache_graphs: Option<usize>,
    /// How streams wait for signals.
    pub signal_wait: Option<SignalWait>,
    /// Threads that may copy between pageable and pinned host memory; none with 0.
    pub host_threads: Option<u32>,
}

/// What a context has done.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Of the plan cache.
    pub cache: CacheStatistics,
    /// Executions enqueued.
    pub executions: u64,
    /// Bytes of all transfers of these executions, each byte once, whatever number of hops it takes.
    pub bytes: u64,
    /// Of the backend's graphs.
    pub graphs: GraphStatistics,
}

/// What a context holds on one device.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatistics {
    /// Bytes of the staging arena.
    pub staging_bytes: u64,
    /// Bytes that the caller has allocated and not freed.
    pub allocated_bytes: u64,
    /// Streams that the caller has created and not destroyed.
    pub streams: u64,
}

/// What has to end before its context closes, because it waits for other ranks or for producers. What one of them waits for may stand behind what
/// another one waits for; so of all of them each step is done before the next.
pub(super) trait EndsFirst: Send + Sync {
    /// Takes back whatever nobody has met. Does not wait.
    fn take_back(&self);
    /// Waits for the rest, for what others are to do until so long.
    fn end(&self, until: Instant);
    /// No stream of the context works any more, and none of its memory is used from here on.
    fn close(&self);
}

/// Whoever destroys something that waits for others gives them so long.
pub(super) const LAST_PATIENCE: Duration = Duration::from_secs(10);

/// Host memory that a plan takes for each transfer beside the planner: two requests, two shapes, ranges that are sorted, ends and allocations.
const BOUND_BYTES: usize = 768;

/// What plans keep of their context. The plan cache is not part of it, so that a plan in the cache does not keep the cache alive.
#[repr(C)] // What every execution reads stands first, together.
pub(super) struct ContextState {
    pub backend: Arc<dyn Backend>,
    /// Held for reading by whoever enqueues or allocates, so that nothing starts after a context has begun to close.
    gate: RwLock<()>,
    /// Set once, before closing takes the gate.
    closed: AtomicBool,
    /// The process that it is of ([`fork::generation`]).
    process: u32,
    pub executions: AtomicU64,
    pub bytes: AtomicU64,
    pub staging: Staging,
    pub active: ActiveStreams,
    pub holdings: Holdings,
    pub deferred: Deferred,
    pub registrations: Registrations,
    pub sharing: PeerMemory,
    /// `None` once the context closes.
    ends_first: Mutex<Option<Vec<Weak<dyn EndsFirst>>>>,
    pub callbacks: CallbackQueue,
    pub machine: Arc<Machine>,
    /// Replaces `machine` for new plans once pairs of GPUs were found to lose bytes: it has no routes between them.
    without: RwLock<Option<Arc<Machine>>>,
    pub config: Config,
}

impl ContextState {
    /// Keeps the context open for as long as the guard lives. Never held while waiting for work, and never taken twice by one thread.
    pub fn enter(&self) -> Result<RwLockReadGuard<'_, ()>, Error> {
        if !self.is_here() {
            return Err(Error::Forked);
        }
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        if self.is_open() { Ok(gate) } else { Err(Error::ContextDestroyed) }
    }

    /// The allocation that an address lies in, unless it was given back.
    pub fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        if self.deferred.contains(address) { Ok(None) } else { self.backend.locate(address) }
    }

    /// Gives the backend what was freed in stream order and is not in use any more; whether there was anything.
    fn reclaim(&self) -> bool {
        let any = self.deferred.reclaim(&*self.backend, &self.sharing);
        if any {
            self.holdings.count_free();
        }
        any
    }

    /// The machine that plans are made for: that of the context, without routes that lose bytes.
    pub fn machine_now(&self) -> Arc<Machine> {
        let without = self.without.read().unwrap_or_else(PoisonError::into_inner);
        without.as_ref().unwrap_or(&self.machine).clone()
    }

    /// Tests the pairs of GPUs that a plan of this batch relies on. `true` if some lose bytes and `machine` did not know it: then the plan must
    /// not be used.
    fn loses_bytes(&self, machine: &Machine, planned: &plan::Plan, batch: &[Shape]) -> bool {
        if !self.config.check_peers {
            return false;
        }
        let mut losing = self.backend.losing_pairs(&planned.program.pairs(batch));
        losing.retain(|(a, b)| machine.route(*a, *b).is_some() || machine.route(*b, *a).is_some());
        if losing.is_empty() {
            return false;
        }
        let mut without = self.without.write().unwrap_or_else(PoisonError::into_inner);
        *without = Some(Arc::new(without.as_ref().unwrap_or(&self.machine).without(&losing)));
        true
    }

    pub fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Acquire)
    }

    /// Whether it is of this process, and not of one from which this one was forked.
    fn is_here(&self) -> bool {
        self.process == fork::generation()
    }
}

/// A machine, a backend, and everything that is kept between calls: plans, staging memory, statistics, and what the caller holds.
/// All methods may be called from any thread.
pub struct Context {
    pub(super) shared: Arc<ContextState>,
    cache: Arc<Cache>,
    /// What [`PlanOptions::default`] resolves to where nothing is tuned.
    defaults: Options,
    /// The file of the last probe.
    pub(super) probed: Mutex<Option<Arc<str>>>,
    /// What `MPGPU_TUNING_FILE` holds, or what is kept beside the probe.
    tuning: Option<Tuning>,
    /// What earlier runs have measured, where a tuning is in use.
    kept: Option<Arc<KeptTimes>>,
}

impl Context {
    /// A context on any backend. The backend must have the devices of the machine. Reads the tuning file that `config` names, and refuses
    /// one that was made for another topology.
    pub fn with_backend(machine: Arc<Machine>, backend: Arc<dyn Backend>, config: Config) -> Result<Context, Error> {
        let tuning = match config.tuning_file.as_deref() {
            None | Some(NO_TUNING) => None,
            Some(path) => Some(tune::load(Path::new(path), &machine, backend.name())?),
        };
        Context::with_tuning(machine, backend, config, tuning)
    }

    /// The same with a tuning that was read, and found to be for this machine and backend; `config` says where it was.
    pub(super) fn with_tuning(
        machine: Arc<Machine>,
        backend: Arc<dyn Backend>,
        config: Config,
        tuning: Option<Tuning>,
    ) -> Result<Context, Error> {
        let defaults = PlanOptions::default().resolve(&config)?;
        nvtx::attach();
        let file = config.tuning_file.as_deref().filter(|_| tuning.is_some() && config.adapt);
        let kept = file.and_then(|file| KeptTimes::beside(Path::new(file), &machine, &*backend)).map(Arc::new);
        backend.keep_graphs(config.cache_graphs);
        let shared = ContextState {
            machine,
            without: RwLock::default(),
            backend,
            staging: Staging::new(config.staging_bytes),
            active: ActiveStreams::new(),
            holdings: Holdings::default(),
            deferred: Deferred::default(),
            registrations: Registrations::default(),
            sharing: PeerMemory::default(),
            ends_first: Mutex::new(Some(Vec::new())),
            callbacks: CallbackQueue::default(),
            executions: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            gate: RwLock::new(()),
            closed: AtomicBool::new(false),
            process: fork::generation(),
            config,
        };
        let (cache, shared) = (Arc::new(Cache::new(shared.config.cache_plans)), Arc::new(shared));
        kept.iter().for_each(|kept| kept.write_at_exit(&cache));
        Ok(Context { cache, shared, defaults, tuning, kept, probed: Mutex::new(None) })
    }

    /// The machine that plans are made for.
    pub fn machine(&self) -> &Machine {
        &self.shared.machine
    }

    /// The backend.
    pub fn backend(&self) -> &dyn Backend {
        &*self.shared.backend
    }

    /// The configuration in force.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The tuning in force.
    pub fn tuning(&self) -> Option<&Tuning> {
        self.tuning.as_ref()
    }

    /// Plans a batch of transfers together, or finds the plan of the same request. An empty batch gives a plan that does nothing:
    /// a rank without neighbours need not be treated apart.
    pub fn plan(&self, transfers: &[Transfer], options: &PlanOptions) -> Result<Arc<Plan>, Error> {
        let config = &self.shared.config;
        self.plan_located(transfers, options.adapt.unwrap_or(config.adapt), |machine, batch| match &self.tuning {
            Some(tuning) => {
                let shapes: SmallVec<[Shape; 4]> = batch.iter().map(|t| t.shape).collect();
                options.resolve_tuned(config, tuning.advice(machine, &shapes, options.engine(config)).as_ref())
            }
            None if *options == PlanOptions::default() => Ok(self.defaults),
            None => options.resolve(config),
        })
    }

    /// Plans with exactly these options: neither the environment nor a tuning file has a say, nor what is measured. For tuners, which look for options.
    pub fn plan_with(&self, transfers: &[Transfer], options: &Options) -> Result<Arc<Plan>, Error> {
        // Checks the staging bound against the context's.
        let staging = PlanOptions { staging_bytes: Some(options.staging_bytes), ..PlanOptions::default() };
        staging.resolve(&self.shared.config)?;
        self.plan_located(transfers, false, |_, _| Ok(*options))
    }

    fn plan_located(
        &self,
        transfers: &[Transfer],
        adapt: bool,
        options: impl FnOnce(&Machine, &[Located]) -> Result<Options, Error>,
    ) -> Result<Arc<Plan>, Error> {
        let _range = nvtx::range(nvtx::Call::Plan, || transfers.iter().fold(0, |sum, t| sum.saturating_add(t.bytes)));
        let _open = self.shared.enter()?;
        let (machine, backend) = (&*self.shared.machine, &*self.shared.backend);
        let alive_at = self.shared.holdings.frees();
        // Filled in place: a look-up should not move half a kilobyte about.
        let mut request = Request { batch: Batch::new(), options: self.defaults, adapt };
        batch::locate(transfers, machine, &|address| self.shared.locate(address), &mut request.batch)?;
        request.options = options(machine, &request.batch)?;
        if let Some(plan) = self.cache.get(&request) {
            return Ok(plan);
        }
        headroom(transfers.len(), BOUND_BYTES).map_err(BackendError::no_headroom)?;
        batch::check(&request.batch, backend)?;
        let cut = self.shared.registrations.cut(&request.batch)?;
        let copied = cut.as_ref().unwrap_or(&request.batch);
        let mut shape = ShapeRequest { batch: copied.iter().map(|t| t.shape).collect(), options: request.options };
        // What another process has mapped here is written, and not read to be passed on.
        let ends = copied.iter().flat_map(|t| [t.dst, t.src]);
        if copied.len() > 1 && self.shared.sharing.imports_of(ends).is_empty() {
            batch::number_sources(copied, &mut shape.batch);
        }
        let planned = took("planned", || self.planned(&shape, true))?;
        let endpoints: Arc<[Endpoints]> = copied.iter().map(|t| Endpoints { dst: t.dst, src: t.src }).collect();
        let bind = |planned, of| Plan::new(&self.shared, planned, &request.batch, &endpoints, request.options.staging_bytes, alive_at, of);
        let plan = took("plan bound", || bind(planned.clone(), None))?;
        let variants = || self.variants(shape, copied, planned, |planned| bind(planned, Some(&plan)));
        let variants = if adapt { took("variants planned", variants) } else { Ok(None) };
        let variants = variants.unwrap_or_else(|error| {
            log::debug!("a plan is what all its executions take: {error}");
            None
        });
        let plan = plan.with_variants(variants);
        Ok(self.cache.insert(request, Arc::new(plan)))
    }

    /// The planner's result, from the cache where it is there.
    fn planned(&self, shape: &ShapeRequest, is_requested: bool) -> Result<Arc<plan::Plan>, Error> {
        if let Some(planned) = self.cache.get_shape(shape, is_requested) {
            return Ok(planned);
        }
        fault::point("planner");
        // Each turn but the last takes a pair away.
        let planned = loop {
            let machine = self.shared.machine_now();
            let planned = plan::plan(&machine, &shape.batch, &shape.options)?;
            if !self.shared.loses_bytes(&machine, &planned, &shape.batch) {
                break planned;
            }
        };
        Ok(self.cache.insert_shape(shape.clone(), Arc::new(planned)))
    }

    /// What executions of a plan may take in its place, if the model sees a gain in several paths.
    fn variants(
        &self,
        shape: ShapeRequest,
        batch: &[Located],
        planned: Arc<plan::Plan>,
        bind: impl Fn(Arc<plan::Plan>) -> Result<Plan, Error>,
    ) -> Result<Option<Variants>, Error> {
        let plan = |options: &Options| self.planned(&ShapeRequest { options: *options, ..shape.clone() }, false);
        let all = adapt::variants(planned, &shape.options, plan)?;
        if all.len() == 1 {
            return Ok(None);
        }
        let choice = self.cache.get_choice(&shape).unwrap_or_else(|| {
            let kept = self.kept.as_ref().and_then(|kept| kept.of(&shape));
            let choice = SharedChoice::new(all.len(), all[0].predicted, kept);
            self.cache.insert_choice(shape.clone(), choice)
        });
        let described = all[0].clone();
        let others: Result<Vec<Plan>, Error> = all.into_iter().skip(1).map(bind).collect();
        Ok(Some(Variants::new(&described, batch, others?, choice)))
    }

    /// Allocates memory of `device`. The context owns it until [`free`](Context::free).
    pub fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, Error> {
        self.allocate_as(device, bytes, false)
    }

    /// The same in a form that other processes can map.
    pub fn allocate_shared(&self, device: DeviceId, bytes: u64) -> Result<u64, Error> {
        self.allocate_as(device, bytes, true)
    }

    fn allocate_as(&self, device: DeviceId, bytes: u64, is_shared: bool) -> Result<u64, Error> {
        let _open = self.shared.enter()?;
        self.check_device(device)?;
        if self.backend().frees_at_once() {
            self.shared.reclaim();
        }
        let allocate = || self.shared.holdings.allocate(device, bytes, is_shared, self.backend());
        let allocated = match allocate() {
            Err(BackendError::OutOfMemory { .. }) if self.shared.reclaim() => allocate(),
            allocated => allocated,
        }?;
        self.replace_freed(allocated, bytes);
        Ok(allocated)
    }

    /// Gives memory back. Waits until everything enqueued so far has finished, as `cudaFree` does, because a copy may still use it.
    pub fn free(&self, address: u64) -> Result<(), Error> {
        drop(self.shared.enter()?);
        self.shared.holdings.take(address)?;
        // The error of an execution is for whoever waits for it; the memory goes back all the same.
        let _ = self.shared.backend.synchronize();
        self.shared.sharing.withdraw(address, self.backend());
        let freed = self.shared.backend.free(address);
        self.shared.holdings.count_free();
        self.shared.reclaim();
        Ok(freed?)
    }

    /// Gives memory back after the work that is enqueued in `stream` now, without waiting for it: plans and processes are refused it
    /// from now on, and the backend gets it in a later [`free`](Context::free), when memory runs short, or at the end. On an error
    /// nothing was given back.
    pub fn free_async(&self, address: u64, stream: StreamHandle) -> Result<(), Error> {
        let shared = &*self.shared;
        let _open = shared.enter()?;
        if !shared.holdings.has(address) {
            return Err(Error::NotAllocated(address));
        }
        let nothing = Program { sources: Vec::new(), transfers: Vec::new(), lanes: Vec::new(), rings: Vec::new(), ops: Vec::new() };
        let (program, endpoints, rings) = (Arc::new(nothing), Arc::from([]), Arc::from([]));
        let after = shared.backend.submit(&Execution::new(&program, &endpoints, &rings, stream))?.ok_or_else(no_completion)?;
        if after.is_captured() {
            let why = "a captured stream has no order to free memory in, because its graph may run later or again: use mp_free";
            return Err(Error::NotSupported(why.into()));
        }
        let bytes = shared.holdings.take(address)?;
        shared.sharing.withdraw(address, self.backend());
        shared.deferred.add(address, bytes, UsedBy::Work(after));
        shared.holdings.count_free();
        if self.backend().frees_at_once() {
            shared.reclaim();
        }
        Ok(())
    }

    /// Gives memory of [`allocate_shared`](Context::allocate_shared) back as soon as no other rank has it mapped. Does not wait for that.
    pub(super) fn free_unmapped(&self, address: u64) -> Result<(), Error> {
        self.free_later(address, UsedBy::Peers)?;
        self.shared.reclaim();
        Ok(())
    }

    /// Gives memory back that no work uses, here or in other ranks, whoever has it mapped: at once where the backend frees at once, and else later.
    pub(super) fn free_unused(&self, address: u64) -> Result<(), Error> {
        self.shared.sharing.withdraw(address, self.backend());
        self.free_later(address, UsedBy::Nobody)?;
        if self.backend().frees_at_once() {
            self.shared.reclaim();
        }
        Ok(())
    }

    fn free_later(&self, address: u64, used_by: UsedBy) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        let bytes = self.shared.holdings.take(address)?;
        self.shared.deferred.add(address, bytes, used_by);
        self.shared.holdings.count_free();
        Ok(())
    }

    /// Creates a stream of `device`.
    pub fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, Error> {
        let _open = self.shared.enter()?;
        self.check_device(device)?;
        Ok(self.shared.holdings.create_stream(device, self.backend())?)
    }

    /// Destroys a stream of this context; work that is enqueued in it still finishes.
    pub fn destroy_stream(&self, stream: StreamHandle) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        Ok(self.shared.holdings.destroy_stream(stream, self.backend())?)
    }

    /// The device of a stream; the host for a default stream.
    pub fn stream_device(&self, stream: StreamHandle) -> Result<DeviceId, Error> {
        let _open = self.shared.enter()?;
        Ok(self.backend().stream_device(stream)?)
    }

    /// Whether `stream` is being captured into a graph.
    pub fn is_capturing(&self, stream: StreamHandle) -> Result<bool, Error> {
        let _open = self.shared.enter()?;
        Ok(self.backend().is_capturing(stream)?)
    }

    /// Blocks until all work enqueued in `stream` so far has finished.
    pub fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), Error> {
        drop(self.shared.enter()?);
        Ok(self.backend().synchronize_stream(stream)?)
    }

    /// Runs `work` on a CPU thread in stream order; in a stream that is being captured, at every launch of the graph.
    pub fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        Ok(self.backend().launch_host(stream, work)?)
    }

    /// Creates an event, which counts as done until it is recorded.
    pub fn create_event(&self) -> Result<EventHandle, Error> {
        let _open = self.shared.enter()?;
        Ok(self.shared.holdings.create_event(self.backend())?)
    }

    /// Destroys an event of this context.
    pub fn destroy_event(&self, event: EventHandle) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        Ok(self.shared.holdings.destroy_event(event, self.backend())?)
    }

    /// Makes `event` stand for all work enqueued in `stream` so far.
    pub fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        Ok(self.backend().record_event(event, stream)?)
    }

    /// Makes later work in `stream` wait for what `event` stands for now.
    pub fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), Error> {
        let _open = self.shared.enter()?;
        Ok(self.backend().stream_wait_event(stream, event)?)
    }

    /// Blocks until what `event` stands for now has finished.
    pub fn synchronize_event(&self, event: EventHandle) -> Result<(), Error> {
        drop(self.shared.enter()?);
        Ok(self.backend().synchronize_event(event)?)
    }

    /// What the context has done so far.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            cache: self.cache.statistics(),
            executions: self.shared.executions.load(Ordering::Relaxed),
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            graphs: self.backend().graph_statistics(),
        }
    }

    /// What the context holds on `device` now.
    pub fn device_statistics(&self, device: DeviceId) -> Result<DeviceStatistics, Error> {
        self.check_device(device)?;
        Ok(DeviceStatistics {
            staging_bytes: self.shared.staging.bytes(device),
            allocated_bytes: self.shared.holdings.bytes(device),
            streams: self.shared.holdings.streams(device),
        })
    }

    /// Has something end before the context closes.
    pub(super) fn end_first(&self, what: Weak<dyn EndsFirst>) -> Result<(), Error> {
        let mut all = lock(&self.shared.ends_first);
        let all = all.as_mut().ok_or(Error::ContextDestroyed)?;
        all.retain(|one| one.strong_count() > 0);
        all.push(what);
        Ok(())
    }

    pub(super) fn check_device(&self, device: DeviceId) -> Result<(), Error> {
        let machine = self.machine();
        if machine.contains(device) {
            return Ok(());
        }
        Err(Error::NoSuchDevice { device: device.0, gpus: machine.gpu_count(), hosts: machine.host_count() })
    }

    /// Whether [`close`](Context::close) has not been called.
    pub fn is_open(&self) -> bool {
        self.shared.is_open()
    }

    /// Refuses new work, waits for all that is enqueued, and frees staging memory and whatever the caller has left. Plans of this
    /// context can no longer run. The first error that waiting or freeing meets is returned; the context is closed all the same.
    /// Closing a closed context does nothing, nor does closing one of a process from which this one was forked.
    pub fn close(&self) -> Result<(), Error> {
        if !self.shared.is_here() {
            return Ok(());
        }
        // What comes later is refused: nobody would wait for it before its memory goes.
        let first = lock(&self.shared.ends_first).take().unwrap_or_default();
        let first: Vec<_> = first.iter().filter_map(Weak::upgrade).collect();
        let until = Instant::now() + LAST_PATIENCE;
        first.iter().for_each(|one| one.take_back());
        first.iter().for_each(|one| one.end(until));
        if self.shared.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // Whoever entered before has left once this is taken; whoever comes after sees `closed`.
        drop(self.shared.gate.write().unwrap_or_else(PoisonError::into_inner));
        let backend = self.backend();
        let finished = backend.synchronize();
        first.iter().for_each(|one| one.close());
        self.shared.callbacks.end();
        self.kept.iter().for_each(|kept| kept.write(&self.cache));
        self.cache.clear();
        self.shared.deferred.reclaim_all(backend, &self.shared.sharing, PATIENCE);
        let imports = self.shared.sharing.release(&self.shared.backend);
        let staging = self.shared.staging.release(backend);
        let (registered, unpinned) = self.shared.registrations.release(backend);
        if registered > 0 {
            log::warn!("context destroyed with {registered} bytes of registered memory; they are unregistered now");
        }
        let (left, held) = self.shared.holdings.release(backend);
        if left.allocations > 0 {
            log::warn!(
                "context destroyed with {} allocations ({} bytes) that were not freed; they are freed now",
                left.allocations,
                left.bytes
            );
        }
        if left.streams + left.events > 0 {
            log::debug!("context destroyed with {} streams and {} events; they are destroyed now", left.streams, left.events);
        }
        let result: Result<(), BackendError> = finished.and(imports).and(staging).and(unpinned).and(held);
        Ok(result?)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.shared.is_here() {
            // Its threads, files and GPUs are the parent's.
            std::mem::forget((Arc::clone(&self.shared), Arc::clone(&self.cache)));
            return;
        }
        if let Err(error) = self.close() {
            log::error!("closing a context: {error}");
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("backend", &self.backend().name())
            .field("topology", &self.machine().topology().name)
            .finish_non_exhaustive()
    }
}
