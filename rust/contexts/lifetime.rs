//! Creates contexts, makes plans in them, and closes them.

use super::active::ActiveStreams;
use super::batch::{self, Batch, Located, Transfer};
use super::cache::{Cache, CacheStatistics, Request, ShapeRequest};
use super::callbacks::CallbackQueue;
use super::choosing::SharedChoice;
use super::claims::Claims;
use super::config::{BackendChoice, Config, NO_TUNING, PlanOptions};
use super::deferred::Deferred;
use super::error::Error;
use super::execute::{Plan, Variants};
use super::files::Files;
use super::foreign;
use super::holdings::Holdings;
use super::kept::KeptTimes;
use super::late_checks::LateChecks;
use super::neighbours;
use super::nvtx;
use super::peer_memory::PeerMemory;
use super::piece_paths::PiecePaths;
use super::registered::Registrations;
use super::staging::Staging;
use super::state::{ContextState, LAST_PATIENCE};
use crate::adapt;
use crate::backend::{Backend, BackendError, Endpoints, GraphStatistics, SignalWait};
use crate::fault;
use crate::headroom::headroom;
use crate::ipc::{PATIENCE, fork};
use crate::plan::{self, Options, Shape};
use crate::sync::{Mutex, lock};
use crate::took::took;
use crate::topology::{DeviceId, Machine};
use crate::tune::{self, Tuning};
use smallvec::SmallVec;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::Instant;

/// Options for creating a context. For a field that is `None`, the library uses the environment variable of the option and, if it is not
/// set, the default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContextOptions {
    /// Execution backend of the context.
    pub backend: Option<BackendChoice>,
    /// Topology of the machine: name of a built-in preset, or path of a topology file.
    pub topology: Option<String>,
    /// Maximum size in bytes of the staging buffers on each device.
    pub staging_bytes: Option<u64>,
    /// Maximum number of plans in the plan cache, or 0 to cache no plans.
    pub cache_plans: Option<usize>,
    /// Maximum number of plans whose CUDA graphs are cached. Plans that differ only in their addresses count once.
    pub cache_graphs: Option<usize>,
    /// Method by which streams wait for signals.
    pub signal_wait: Option<SignalWait>,
    /// Maximum number of threads that copy between pageable and pinned host memory. With 0 the driver makes these copies.
    pub host_threads: Option<u32>,
}

/// Statistics of a context since its creation.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Counters of the context's plan cache.
    pub cache: CacheStatistics,
    /// Number of plan executions that were enqueued.
    pub executions: u64,
    /// Total size in bytes of the transfers of all enqueued executions. A byte counts once even if it is copied over several hops.
    pub bytes: u64,
    /// Counters of the backend's executable graphs.
    pub graphs: GraphStatistics,
}

/// Memory and streams that a context holds on one device.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatistics {
    /// Size in bytes of the context's staging buffers on the device.
    pub staging_bytes: u64,
    /// Size in bytes of the memory on the device that the program has allocated and not yet freed.
    pub allocated_bytes: u64,
    /// Number of streams of the device that the program has created and not yet destroyed.
    pub streams: u64,
}

/// Number of bytes of host memory that a plan needs for each transfer, without the planner's result. They hold the request, the description
/// of the transfer, the ranges that are checked for overlap, the addresses and the allocations.
const BOUND_BYTES: usize = 768;

/// Context of the library: a machine, a backend, and all state between calls (plans, staging memory, statistics, and the resources that the
/// caller holds). All methods may be called from any thread.
pub struct Context {
    pub(super) shared: Arc<ContextState>,
    cache: Arc<Cache>,
    /// Planner options for a call with default [`PlanOptions`] if no tuning is active.
    defaults: Options,
    /// Result of the last probe (measurement of the machine) by this context, as the text of a probe file. `None` if there was no probe.
    pub(super) probed: Mutex<Option<Arc<str>>>,
    /// Tuning (options that were found by measurements) from `MPGPU_TUNING_FILE`, or the tuning that is stored with the active probe
    /// (measurement of the machine). `None` if there is neither.
    tuning: Option<Tuning>,
    /// Execution times that earlier runs measured; `None` if no tuning is active or executions do not adapt.
    kept: Option<Arc<KeptTimes>>,
}

impl Context {
    /// Creates a context for `machine` on any backend. The backend must have the devices of the machine. Reads the tuning file that
    /// `config` names, if any. Returns an error if that file was made for another topology.
    pub fn with_backend(machine: Arc<Machine>, backend: Arc<dyn Backend>, config: Config) -> Result<Context, Error> {
        let tuning = match config.tuning_file.as_deref() {
            None | Some(NO_TUNING) => None,
            Some(path) => Some(tune::load(Path::new(path), &machine, backend.name())?),
        };
        Context::with_tuning(machine, backend, config, tuning)
    }

    /// Creates a context with a tuning that has already been read, and checked against this machine and backend. `config` must contain the
    /// path of the tuning's file.
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
        backend.limit_host_kernels(config.kernel_blocks, config.paced_writes);
        let shared = ContextState {
            machine,
            without: RwLock::default(),
            backend,
            staging: Staging::new(config.staging_bytes),
            active: ActiveStreams::new(),
            holdings: Holdings::default(),
            deferred: Deferred::default(),
            registrations: Registrations::default(),
            claims: Claims::default(),
            files: Files::default(),
            sharing: PeerMemory::default(),
            ends_first: Mutex::new(Some(Vec::new())),
            callbacks: CallbackQueue::default(),
            late_checks: LateChecks::default(),
            piece_paths: PiecePaths::default(),
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

    /// Returns the machine for which plans are made.
    pub fn machine(&self) -> &Machine {
        &self.shared.machine
    }

    /// Returns the backend that the context uses.
    pub fn backend(&self) -> &dyn Backend {
        &*self.shared.backend
    }

    /// Returns the state that the context shares with its plans.
    pub fn state(&self) -> &ContextState {
        &self.shared
    }

    /// Returns the active configuration.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// Returns the active tuning, if any.
    pub fn tuning(&self) -> Option<&Tuning> {
        self.tuning.as_ref()
    }

    /// Makes one plan for a batch of transfers, or returns the cached plan of the same request. For an empty batch the plan does nothing,
    /// so a rank without neighbours needs no special case.
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

    /// Makes a plan with exactly the given options. Environment, tuning file and measured times have no influence. This is for tuners,
    /// which search for the best options.
    pub fn plan_with(&self, transfers: &[Transfer], options: &Options) -> Result<Arc<Plan>, Error> {
        // This call checks that the staging memory does not exceed that of the context.
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
        // The request is filled in place, because a cache look-up would otherwise copy half a kilobyte.
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
        // Transfers with a common source are numbered, so that a plan may forward data from one destination to another. Nothing is numbered
        // if the batch uses imported memory: memory of another process may be written, but it is not read in order to forward data.
        let ends = copied.iter().flat_map(|t| [t.dst, t.src]);
        if copied.len() > 1 && self.shared.sharing.imports_of(ends).is_empty() {
            batch::number_sources(copied, &mut shape.batch);
        }
        let mut planned = took("planned", || self.planned(&shape, true))?;
        if self.shared.sharing.is_opened_by_program(copied.iter().flat_map(|t| [t.dst, t.src])) {
            let plan = |options: &Options| self.planned(&ShapeRequest { options: *options, ..shape.clone() }, false);
            (planned, shape.options) = foreign::limit(planned, &request.options, plan)?;
        }
        let endpoints: Arc<[Endpoints]> = copied.iter().map(|t| Endpoints { dst: t.dst, src: t.src }).collect();
        let bind = |planned, of| Plan::new(&self.shared, planned, &request.batch, &endpoints, request.options.staging_bytes, alive_at, of);
        let plan = took("plan bound", || bind(planned.clone(), None))?;
        let variants = || self.variants(shape, copied, planned, |planned| bind(planned, Some(&plan)));
        let variants = if adapt { took("variants planned", variants) } else { Ok(None) };
        let variants = variants.unwrap_or_else(|error| {
            log::debug!("a plan has no variants: {error}");
            None
        });
        let plan = plan.with_variants(variants);
        Ok(self.cache.insert(request, Arc::new(plan)))
    }

    /// Returns the planner's result for the transfers and options in `shape`, from the cache if possible. `is_requested` is true if the
    /// caller requested them, and false for a variant.
    fn planned(&self, shape: &ShapeRequest, is_requested: bool) -> Result<Arc<plan::Plan>, Error> {
        if let Some(planned) = self.cache.get_shape(shape, is_requested) {
            return Ok(planned);
        }
        fault::point("planner");
        // If a plan uses a pair of GPUs between which data is lost, this pair is excluded from the machine, and planning is repeated.
        let planned = loop {
            let machine = self.shared.machine_now();
            let planned = plan::plan(&machine, &shape.batch, &shape.options)?;
            if !self.shared.loses_bytes(&machine, &planned, &shape.batch) {
                break planned;
            }
        };
        Ok(self.cache.insert_shape(shape.clone(), Arc::new(planned)))
    }

    /// Plans the other variants of the plan `planned`, among which executions may choose. The function `bind` binds each variant to
    /// addresses. Returns `None` if the model predicts no gain from several paths.
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
            let predicted: Vec<f64> = all.iter().map(|plan| plan.predicted).collect();
            let errors = neighbours::model_errors(&shape, &predicted, &self.cache, self.kept.as_deref());
            // The model describes GPUs, not the CPU threads of virtual devices.
            let choice = SharedChoice::new(&predicted, !self.backend().is_virtual(), kept, errors.as_ref());
            self.cache.insert_choice(shape.clone(), choice)
        });
        let described = all[0].clone();
        let others: Result<Vec<Plan>, Error> = all.into_iter().skip(1).map(bind).collect();
        Ok(Some(Variants::new(&described, batch, others?, choice)))
    }

    /// Returns the counters of the context.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            cache: self.cache.statistics(),
            executions: self.shared.executions.load(Ordering::Relaxed),
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            graphs: self.backend().graph_statistics(),
        }
    }

    /// Returns the resources that the context holds on `device` now.
    pub fn device_statistics(&self, device: DeviceId) -> Result<DeviceStatistics, Error> {
        self.shared.check_device(device)?;
        Ok(DeviceStatistics {
            staging_bytes: self.shared.staging.bytes(device),
            allocated_bytes: self.shared.holdings.bytes(device),
            streams: self.shared.holdings.streams(device),
        })
    }

    /// True if [`close`](Context::close) has not been called.
    pub fn is_open(&self) -> bool {
        self.shared.is_open()
    }

    /// Closes the context: refuses new work, waits for all enqueued work, and frees staging memory and everything that the caller has not
    /// freed. Plans of this context can no longer run. If waiting or freeing fails, the first error is returned, and the context is closed
    /// nevertheless. Does nothing if the context is already closed, or if it was opened by the parent of this forked process.
    pub fn close(&self) -> Result<(), Error> {
        if !self.shared.is_here() {
            return Ok(());
        }
        // From now on, no object can be registered. A newly registered object would use memory that the context is about to free.
        let first = lock(&self.shared.ends_first).take().unwrap_or_default();
        let first: Vec<_> = first.iter().filter_map(Weak::upgrade).collect();
        let until = Instant::now() + LAST_PATIENCE;
        first.iter().for_each(|one| one.take_back());
        first.iter().for_each(|one| one.end(until));
        if self.shared.closed.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // Calls that entered the gate earlier have returned once this lock is acquired. Later calls see `closed`.
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
        let files = self.shared.files.release();
        if files > 0 {
            log::warn!("context destroyed with {files} mapped files; they are unmapped now");
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
            // The threads, files and GPUs belong to the parent process.
            std::mem::forget((Arc::clone(&self.shared), Arc::clone(&self.cache)));
            return;
        }
        if let Err(error) = self.close() {
            log::error!("could not close a context: {error}");
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
