//! Opens a context from options and environment. This is the only module that names a concrete backend.

use super::config::{BackendChoice, Config, NO_TUNING};
use super::error::Error;
use super::lifetime::{Context, ContextOptions};
use super::probe_files as probe;
use crate::backend::Backend;
use crate::cuda::{self, CudaBackend};
use crate::host::HostBackend;
use crate::took::took;
use crate::topology::{self, Machine, Topology};
use crate::tune;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

impl Context {
    /// Opens a context with the given options. A value that the options do not specify comes from `environment`.
    pub fn open(options: &ContextOptions, environment: Config) -> Result<Context, Error> {
        let mut config = environment;
        if let Some(backend) = options.backend {
            config.backend = backend;
        }
        if let Some(topology) = &options.topology {
            config.topology = Some(topology.clone());
        }
        if let Some(bytes) = options.staging_bytes {
            config.staging_bytes = bytes;
        }
        if let Some(threads) = options.host_threads {
            config.host_threads = threads;
        }
        if let Some(plans) = options.cache_plans {
            config.cache_plans = plans;
        }
        config.cache_graphs = options.cache_graphs.unwrap_or(config.cache_graphs);
        config.signal_wait = options.signal_wait.or(config.signal_wait);
        config.warn_of_unknown();
        match config.backend {
            BackendChoice::Auto => match cuda::device_count() {
                Ok(_) => cuda(config),
                Err(reason) => {
                    let context = host(config)?;
                    // Warn only once, because a program may open a context for each of its threads.
                    static WARN: Once = Once::new();
                    WARN.call_once(|| {
                        log::warn!(
                            "no GPU is used: {reason}. Copies are made by CPU threads between virtual devices, and times are those modelled for \
                             {}. MPGPU_BACKEND=host selects this without the warning; MPGPU_BACKEND=cuda makes it an error",
                            context.machine().topology().name
                        );
                    });
                    Ok(context)
                }
            },
            BackendChoice::Host => {
                log::info!("using the host backend, as requested");
                host(config)
            }
            BackendChoice::Cuda => cuda(config),
        }
    }

    /// Creates a context on the topology of a stored probe (measurement of the machine), with the tuning that is stored in the same folder.
    /// `MPGPU_TUNING_FILE` takes precedence over this tuning, even if its value is `none`.
    pub(super) fn on_probe(machine: Arc<Machine>, backend: Arc<dyn Backend>, mut config: Config, kept: &Path) -> Result<Context, Error> {
        if config.tuning_file.is_some() {
            return Context::with_backend(machine, backend, config);
        }
        let (path, tuning) = probe::kept_tuning(kept, &machine, backend.name()).unzip();
        config.tuning_file = path.map(|path| path.to_string_lossy().into_owned());
        Context::with_tuning(machine, backend, config, tuning)
    }
}

/// Name that selects the topology that the driver reports. It is the default if no topology is named and no probe of these GPUs is stored.
pub const DISCOVERED: &str = "discovered";

/// Name that selects the topology from the probe (measurement) of these GPUs in the cache directory. It is the default if no topology is
/// named and there is such a probe.
pub const PROBED: &str = "probed";

/// Opens a context on the host backend, with as many virtual devices as the selected topology has.
fn host(config: Config) -> Result<Context, Error> {
    let name = config.topology.as_deref().unwrap_or(topology::DEFAULT_PRESET);
    let mut topology = topology::load(name)?;
    let gpus = match &config.visible {
        None => (0..Machine::new(topology.clone())?.gpu_count()).collect(),
        Some(numbers) => {
            topology = topology.with_gpus(numbers).ok_or_else(|| Error::Environment {
                variable: "MPGPU_HOST_VISIBLE_DEVICES".into(),
                value: numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
                reason: format!("topology {name} does not have all of these GPUs, or a GPU is listed twice"),
            })?;
            numbers.clone()
        }
    };
    let machine = Machine::new(topology)?;
    let backend = HostBackend::showing(gpus, machine.host_count());
    Context::with_backend(Arc::new(machine), Arc::new(backend), config)
}

/// Source from which the topology of a context comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The driver and NVML report the topology.
    Discovered,
    /// The topology comes from a stored probe (measurement) of the visible GPUs. The path is that of the probe's file.
    Probed(PathBuf),
    /// The user has named a preset or a topology file.
    Named,
}

/// Returns the topology that a context on CUDA uses with this configuration, and the source of that topology. Fails with
/// [`BackendError::NoDriver`](crate::backend::BackendError::NoDriver) if the process has no GPU.
pub fn machine_here(config: &Config) -> Result<(Topology, Origin), Error> {
    let now = probe::fingerprint("cuda", took("GPUs identified", cuda::identity)?);
    let discover = || took("topology discovered", cuda::discover::discover);
    match config.topology.as_deref() {
        Some(DISCOVERED) => Ok((discover()?, Origin::Discovered)),
        asked @ (None | Some(PROBED)) => match config.cache_dir.as_deref().and_then(|directory| probe::kept(directory, &now)) {
            Some((path, topology)) => Ok((topology, Origin::Probed(path))),
            None if asked.is_none() => Ok((discover()?, Origin::Discovered)),
            None => Err(Error::Option {
                name: "topology",
                value: PROBED.into(),
                reason: "no valid probe of these GPUs is stored; run `mpgpu probe` first, or leave the topology to discovery".into(),
            }),
        },
        Some(name) => Ok((probe::named(name, &now)?, Origin::Named)),
    }
}

/// Creates a context on the GPUs that the driver shows to this process. The topology is the one that `config` names, or that of a stored
/// probe, or the one that the driver reports. If a stored probe is used, its tuning is used too.
fn cuda(mut config: Config) -> Result<Context, Error> {
    let count = cuda::device_count()?;
    let (topology, origin) = machine_here(&config)?;
    let kept = match origin {
        Origin::Discovered => {
            log::info!("topology: discovered; `mpgpu probe` measures links and sharing that discovery cannot see");
            None
        }
        Origin::Probed(path) => {
            log::info!("topology: the probe {}", path.display());
            config.topology = Some(path.to_string_lossy().into_owned());
            Some(path)
        }
        Origin::Named => None,
    };
    let machine = Machine::new(topology)?;
    if machine.gpu_count() != count {
        return Err(Error::Option {
            name: "topology",
            value: config.topology.clone().unwrap_or_default(),
            reason: format!(
                "the topology has {} GPUs, but {count} are visible to this process; choose a topology of {count} GPUs, change \
                 CUDA_VISIBLE_DEVICES, or use the host backend (MPGPU_BACKEND=host)",
                machine.gpu_count()
            ),
        });
    }
    log::info!("using the CUDA backend: {}", machine.topology().description);
    let backend = Arc::new(CudaBackend::new(machine.host_count())?);
    let machine = Arc::new(machine);
    match kept {
        Some(probe) => Context::on_probe(machine, backend, config, &probe),
        None => Context::with_backend(machine, backend, config),
    }
}

/// File that contexts read (a topology, a probe or a tuning), and whether it is usable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Kind of the file: `topology`, `probe` or `tuning`.
    pub what: &'static str,
    /// Path of the file. For a topology it may also be the name of a preset.
    pub path: String,
    /// True if the user named the file. If a file that the user named is unusable, the context fails to open. If a file that the library
    /// itself has stored is unusable, the context ignores it.
    pub is_named: bool,
    /// `Ok` if the file is usable, otherwise the reason why it is not.
    pub state: Result<(), String>,
}

/// Returns the files that a context on this machine would read with this configuration. The state of each file shows whether it is usable,
/// and if not, the reason.
pub fn files_here(config: &Config) -> Vec<File> {
    let mut files = Vec::new();
    let mut note = |what, path: String, is_named, state: Result<(), String>| {
        files.push(File { what, path, is_named, state });
    };
    let identity = if config.backend == BackendChoice::Host { None } else { cuda::identity().ok() };
    let now = identity.map(|identity| probe::fingerprint("cuda", identity));
    let mut machine = None;
    match (config.topology.as_deref(), &now) {
        (Some(DISCOVERED), _) => machine = cuda::discover::discover().ok(),
        (Some(name), _) if name != PROBED => {
            let loaded = match &now {
                Some(now) => probe::named(name, now),
                None => topology::load(name).map_err(Error::from),
            };
            note("topology", name.to_owned(), true, loaded.as_ref().map(drop).map_err(ToString::to_string));
            machine = loaded.ok();
        }
        (asked, Some(now)) => {
            let directory = config.cache_dir.as_deref();
            let own = directory.and_then(|directory| probe::own(directory, now));
            if let Some((path, Err(reason))) = &own {
                note("probe", path.display().to_string(), asked.is_some(), Err(reason.clone()));
            }
            match directory.and_then(|directory| probe::kept(directory, now)) {
                Some((path, topology)) => {
                    note("probe", path.display().to_string(), false, Ok(()));
                    let beside = probe::tuning_beside(&path);
                    if config.tuning_file.is_none() && beside.exists() {
                        let state = Machine::new(topology.clone())
                            .map_err(|error| error.to_string())
                            .and_then(|machine| tune::load(&beside, &machine, "cuda").map(drop).map_err(|error| error.to_string()));
                        note("tuning", beside.display().to_string(), false, state);
                    }
                    machine = Some(topology);
                }
                None if asked.is_some() && own.is_none() => {
                    note("probe", PROBED.into(), true, Err("no probe of these GPUs is stored".into()))
                }
                None => machine = cuda::discover::discover().ok(),
            }
        }
        (Some(name), None) => note("topology", name.to_owned(), true, Err("this machine has no GPU to probe".into())),
        (None, None) => machine = topology::load(topology::DEFAULT_PRESET).ok(),
    }
    if let Some(path) = config.tuning_file.as_deref().filter(|path| *path != NO_TUNING)
        && let Some(machine) = machine.and_then(|topology| Machine::new(topology).ok())
    {
        let backend = if now.is_some() { "cuda" } else { "host" };
        let state = tune::load(Path::new(path), &machine, backend).map(drop).map_err(|error| error.to_string());
        note("tuning", path.to_owned(), true, state);
    }
    files
}
