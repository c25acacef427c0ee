//! Reads the configuration of a context from environment variables. The environment is read once, when the context is created.
//!
//! [`Config::from_pairs`] is a pure function of (name, value) pairs, so that tests need not change the process environment. The options of
//! a call take precedence over the environment, the environment over the tuning file, and the tuning file over the model's choice.

use super::error::Error;
use crate::backend::{SignalWait, USUAL_GRAPHS};
use crate::model::GRAIN;
use crate::plan::{Engine, Options, Relays, Tuned};
use crate::tune::Advice;
use crate::units::parse_size;
use log::LevelFilter;
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Backend that a context uses.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// The CUDA backend if this build and this machine support it, otherwise the host backend.
    #[default]
    Auto,
    /// The host backend, which emulates GPUs by CPU threads.
    Host,
    /// The CUDA backend, which uses NVIDIA GPUs.
    Cuda,
}

/// Checks that are made on every execution of a plan.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verify {
    /// Release builds check nothing. Debug builds check the program (list of operations) of the plan.
    #[default]
    Off,
    /// The plan validator checks the program (list of operations) of the plan before each execution.
    Program,
    /// The program is checked before each execution, and every destination byte is compared with its source byte afterwards.
    Bytes,
}

/// Configuration of a context, from the environment and the context's options. If a field is `None`, the model chooses the value, unless
/// the description of the field states otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `MPGPU_BACKEND`: backend that the context uses.
    pub backend: BackendChoice,
    /// `MPGPU_TOPOLOGY`: name of a preset, or path of a topology file. On CUDA, `None` selects the stored probe (measurement) of these
    /// GPUs, or the topology that the driver reports if there is no probe. On the host backend, `None` selects a default preset.
    pub topology: Option<String>,
    /// `MPGPU_ENGINE`: execution method of plans.
    pub engine: Engine,
    /// `MPGPU_MAX_PATHS`: largest number of paths that one transfer may use, 1 or more.
    pub max_paths: Option<u32>,
    /// `MPGPU_HOST_PATH`: true if a copy between GPUs may pass through host memory.
    pub host_path: Option<bool>,
    /// `MPGPU_RELAY_GPUS`: GPUs through which data of copies between other devices may pass.
    pub relays: Option<Relays>,
    /// `MPGPU_CHUNK_BYTES`: size in bytes of one chunk on staged paths.
    pub chunk_bytes: Option<u64>,
    /// `MPGPU_RELAY_CHUNKS`: number of chunks on each path through another GPU.
    pub relay_chunks: Option<u32>,
    /// `MPGPU_HOST_CHUNKS`: number of chunks on each path through host memory.
    pub host_chunks: Option<u32>,
    /// `MPGPU_MIN_BYTES`: minimum size in bytes of a transfer that may use several paths.
    pub min_bytes: Option<u64>,
    /// `MPGPU_STAGING_BYTES`: size in bytes of the staging memory of each device that needs some.
    pub staging_bytes: u64,
    /// `MPGPU_CACHE_PLANS`: maximum number of plans in the cache, or 0 to cache none.
    pub cache_plans: usize,
    /// `MPGPU_CACHE_GRAPHS`: maximum number of programs (compiled plans) whose CUDA graphs are cached, 1 or more.
    pub cache_graphs: usize,
    /// `MPGPU_TUNING_FILE`: path of a file that `mpgpu tune` wrote, or [`NO_TUNING`]. The file is read when a context is created. If the
    /// value is `None` and the context uses a stored probe, the tuning that is stored with the probe is used.
    pub tuning_file: Option<String>,
    /// `MPGPU_ADAPT`: true if executions choose, by measured times, among variants of their plan (plans for the same transfers over other
    /// paths).
    pub adapt: bool,
    /// `MPGPU_VERIFY`: checks that are made on every execution of a plan.
    pub verify: Verify,
    /// `MPGPU_SIGNAL_WAIT`: mechanism by which streams wait for signals. If it is `None`, kernels wait in plans of several ranks that each
    /// have their own GPU, and stream memory operations wait in all other cases.
    pub signal_wait: Option<SignalWait>,
    /// `MPGPU_HOST_THREADS`: number of threads that may copy between pageable host memory and pinned memory of the library. If 0, the
    /// driver makes these copies.
    pub host_threads: u32,
    /// `MPGPU_NODE_BLOCKS`: maximum number of thread blocks of the kernel that copies a rank's data in a communication step of a node plan
    /// (plan of several ranks). `None` selects a quarter of the GPU's multiprocessors.
    pub node_blocks: Option<u32>,
    /// `MPGPU_KERNEL_BLOCKS`: number of multiprocessors that a kernel with an end in host memory uses, at least 1.
    pub kernel_blocks: u32,
    /// `MPGPU_HOST_VISIBLE_DEVICES`: on the host backend, the GPUs of the topology that this process sees, in this order. `None` makes all
    /// GPUs visible.
    pub visible: Option<Vec<u32>>,
    /// `MPGPU_PACED_WRITES`: true if kernels that write host memory wait until their stores have arrived before they store more.
    pub paced_writes: bool,
    /// `MPGPU_CHECK_PEERS`: true if each pair of GPUs with peer access is tested for correct copies before a plan relies on it.
    pub check_peers: bool,
    /// `MPGPU_LOG`: most detailed level of messages that are written to standard error.
    pub log: Option<LevelFilter>,
    /// Directory in which probes (measurements of the machine) are stored: `mpgpu` in `XDG_CACHE_HOME`, or in `.cache` of `HOME`. `None` if
    /// neither variable is an absolute path.
    pub cache_dir: Option<PathBuf>,
    /// Warnings about variables that start with `MPGPU_` and are not recognised, one line each. Contexts write them to the log.
    pub unknown: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            backend: BackendChoice::Auto,
            topology: None,
            engine: Engine::Auto,
            max_paths: None,
            host_path: None,
            relays: None,
            chunk_bytes: None,
            relay_chunks: None,
            host_chunks: None,
            min_bytes: None,
            staging_bytes: Options::default().staging_bytes,
            cache_plans: 256,
            cache_graphs: USUAL_GRAPHS,
            tuning_file: None,
            adapt: true,
            verify: Verify::Off,
            signal_wait: None,
            host_threads: usual_threads(),
            node_blocks: None,
            kernel_blocks: 4,
            visible: None,
            paced_writes: true,
            check_peers: true,
            log: None,
            cache_dir: None,
            unknown: Vec::new(),
        }
    }
}

/// Value of `MPGPU_TUNING_FILE` that disables tuning, including the tuning that is stored with a probe.
pub const NO_TUNING: &str = "none";

const SWITCH: [(&str, bool); 4] = [("0", false), ("1", true), ("on", true), ("off", false)];

/// All environment variables that contexts read, in the order of `docs/reference/environment.md`.
pub const VARIABLES: [&str; 24] = [
    "MPGPU_BACKEND",
    "MPGPU_TOPOLOGY",
    "MPGPU_ENGINE",
    "MPGPU_MAX_PATHS",
    "MPGPU_HOST_PATH",
    "MPGPU_RELAY_GPUS",
    "MPGPU_CHUNK_BYTES",
    "MPGPU_RELAY_CHUNKS",
    "MPGPU_HOST_CHUNKS",
    "MPGPU_MIN_BYTES",
    "MPGPU_STAGING_BYTES",
    "MPGPU_CACHE_PLANS",
    "MPGPU_CACHE_GRAPHS",
    "MPGPU_TUNING_FILE",
    "MPGPU_ADAPT",
    "MPGPU_VERIFY",
    "MPGPU_SIGNAL_WAIT",
    "MPGPU_HOST_THREADS",
    "MPGPU_NODE_BLOCKS",
    "MPGPU_KERNEL_BLOCKS",
    "MPGPU_PACED_WRITES",
    "MPGPU_CHECK_PEERS",
    "MPGPU_HOST_VISIBLE_DEVICES",
    "MPGPU_LOG",
];

/// Environment variables of the interposer (`cpp/preload`), which reads them itself when it is loaded. Contexts ignore these variables.
pub const PRELOAD: [&str; 5] =
    ["MPGPU_PRELOAD", "MPGPU_PRELOAD_GPUS", "MPGPU_PRELOAD_MIN_BYTES", "MPGPU_PRELOAD_REPORT", "MPGPU_PRELOAD_SUMS"];

/// Variables with the prefix `MPGPU_` that CMake's `find_package` and environment modules set to the location of the package. Contexts
/// ignore these variables.
pub const IGNORED: [&str; 2] = ["MPGPU_ROOT", "MPGPU_DIR"];

impl Config {
    /// Returns the configuration that the environment of this process specifies. Fails if a variable has an invalid value.
    pub fn from_environment() -> Result<Config, Error> {
        Config::from_pairs(std::env::vars_os())
    }

    /// Returns the configuration that a list of (name, value) pairs specifies. Names that do not start with `MPGPU_` are ignored, except
    /// `XDG_CACHE_HOME` and `HOME`. Any other name that is not in [`VARIABLES`], [`PRELOAD`] or [`IGNORED`] is recorded as unknown, because
    /// a misspelt variable would otherwise have no visible effect. Such a name is not an error, because an environment module may set a
    /// variable such as `MPGPU_HOME`.
    pub fn from_pairs<N: Into<OsString>, V: Into<OsString>>(pairs: impl IntoIterator<Item = (N, V)>) -> Result<Config, Error> {
        let mut config = Config::default();
        let (mut cache, mut home) = (None, None);
        for (name, value) in pairs {
            let name = name.into();
            match name.as_encoded_bytes() {
                b"XDG_CACHE_HOME" => cache = Some(value.into()),
                b"HOME" => home = Some(value.into()),
                _ => {
                    let name = name.to_string_lossy();
                    if name.starts_with("MPGPU_") && !IGNORED.contains(&&*name) && !PRELOAD.contains(&&*name) {
                        match VARIABLES.contains(&&*name) {
                            true => config.set(&name, &value.into())?,
                            false => {
                                let near = nearest(&name).map_or(String::new(), |near| format!("; did you mean {near}?"));
                                config.unknown.push(format!("{name} is not a variable that mpgpu reads{near}"));
                            }
                        }
                    }
                }
            }
        }
        config.cache_dir = cache_dir(cache.as_deref(), home.as_deref());
        Ok(config)
    }

    /// Logs a warning for each unknown environment variable whose name begins with `MPGPU_`, once in each process.
    pub(super) fn warn_of_unknown(&self) {
        static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        for line in &self.unknown {
            if WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(line.clone()) {
                log::warn!("{line}");
            }
        }
    }

    fn set(&mut self, name: &str, value: &OsStr) -> Result<(), Error> {
        let refuse = |why: &str| Error::Environment {
            variable: name.to_owned(),
            value: value.to_string_lossy().into_owned(),
            reason: why.to_owned(),
        };
        let Some(text) = value.to_str() else {
            return Err(refuse("is not valid UTF-8"));
        };
        let must = |what: &str| refuse(&format!("must be {what}"));
        let size = |least: u64| match parse_size(text) {
            Ok(bytes) if bytes >= least => Ok(bytes),
            Ok(_) => Err(must(&format!("{least} bytes or more"))),
            Err(error) => Err(refuse(&error.to_string())),
        };
        let count = || match text.parse::<u32>() {
            Ok(0) => Err(must("1 or more")),
            Ok(count) => Ok(count),
            Err(_) => Err(must(&format!("a whole number from 1 to {}", u32::MAX))),
        };
        match name {
            "MPGPU_BACKEND" => {
                let backends = [("auto", BackendChoice::Auto), ("host", BackendChoice::Host), ("cuda", BackendChoice::Cuda)];
                self.backend = one_of(text, &backends, must)?;
            }
            "MPGPU_TOPOLOGY" if text.is_empty() => return Err(must("the name of a preset or the path of a topology file")),
            "MPGPU_TOPOLOGY" => self.topology = Some(text.to_owned()),
            "MPGPU_ENGINE" => {
                let engines = [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel];
                self.engine = one_of(text, &engines.map(|engine| (engine.name(), engine)), must)?;
            }
            "MPGPU_MAX_PATHS" => self.max_paths = Some(count()?),
            "MPGPU_HOST_PATH" => self.host_path = Some(one_of(text, &SWITCH, must)?),
            "MPGPU_RELAY_GPUS" => self.relays = Some(text.parse().map_err(refuse)?),
            "MPGPU_PACED_WRITES" => self.paced_writes = one_of(text, &SWITCH, must)?,
            "MPGPU_CHECK_PEERS" => self.check_peers = one_of(text, &SWITCH, must)?,
            "MPGPU_HOST_VISIBLE_DEVICES" => {
                let numbers: Result<Vec<u32>, _> = text.split(',').map(str::parse).collect();
                self.visible = Some(numbers.map_err(|_| must("numbers of GPUs, as in 2 or 0,3"))?);
            }
            "MPGPU_CHUNK_BYTES" => self.chunk_bytes = Some(size(GRAIN)?),
            "MPGPU_RELAY_CHUNKS" => self.relay_chunks = Some(count()?),
            "MPGPU_HOST_CHUNKS" => self.host_chunks = Some(count()?),
            "MPGPU_MIN_BYTES" => self.min_bytes = Some(size(0)?),
            "MPGPU_STAGING_BYTES" => self.staging_bytes = size(0)?,
            "MPGPU_CACHE_PLANS" => {
                self.cache_plans = text.parse().map_err(|_| must("a whole number; 0 turns the plan cache off"))?;
            }
            "MPGPU_CACHE_GRAPHS" => self.cache_graphs = count()? as usize,
            "MPGPU_TUNING_FILE" if text.is_empty() => return Err(must("the path of a file that `mpgpu tune` made, or none")),
            "MPGPU_TUNING_FILE" => self.tuning_file = Some(text.to_owned()),
            "MPGPU_ADAPT" => self.adapt = one_of(text, &SWITCH, must)?,
            "MPGPU_VERIFY" => {
                self.verify = one_of(text, &[("off", Verify::Off), ("program", Verify::Program), ("bytes", Verify::Bytes)], must)?;
            }
            "MPGPU_SIGNAL_WAIT" => {
                self.signal_wait = Some(one_of(text, &[("operation", SignalWait::Operation), ("kernel", SignalWait::Kernel)], must)?);
            }
            "MPGPU_HOST_THREADS" => match text.parse::<u32>() {
                Ok(threads) if threads <= MOST_THREADS => self.host_threads = threads,
                _ => return Err(must(&format!("a whole number from 0 to {MOST_THREADS}; 0 leaves pageable memory to the driver"))),
            },
            "MPGPU_NODE_BLOCKS" => self.node_blocks = Some(count()?),
            "MPGPU_KERNEL_BLOCKS" => self.kernel_blocks = count()?,
            "MPGPU_LOG" => {
                let names = ["off", "error", "warn", "info", "debug", "trace"];
                self.log = Some(one_of(text, &names.into_iter().zip(LevelFilter::iter()).collect::<Vec<_>>(), must)?);
            }
            _ => return Err(refuse("is not a variable that mpgpu reads")),
        }
        Ok(())
    }
}

/// Maximum number of threads that `MPGPU_HOST_THREADS` accepts.
pub const MOST_THREADS: u32 = 256;

/// Returns the default of `MPGPU_HOST_THREADS`: the number of CPUs that affinity and control group allow to this process. If there are more
/// than four, one CPU is left to the program's own thread. The default is at most 16, because about 16 threads saturate two links (two
/// H200: 57 GB/s to a GPU with 12 threads; from a GPU 46 GB/s with 12 threads and 57 GB/s with 20).
fn usual_threads() -> u32 {
    const MOST: usize = 16;
    let allowed = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    (if allowed > 4 { allowed - 1 } else { allowed }).min(MOST) as u32
}

/// Options for creating a plan. For a field that is `None`, the library uses, in this order: the environment variable of the option, the
/// tuning file, and its performance model.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanOptions {
    /// Execution method of the plan.
    pub engine: Option<Engine>,
    /// Maximum number of paths over which one transfer is distributed, at least 1.
    pub max_paths: Option<u32>,
    /// True if copies between GPUs may use a path through host memory.
    pub host_path: Option<bool>,
    /// GPUs through which data of copies between other devices may be forwarded.
    pub relays: Option<Relays>,
    /// Chunk size in bytes on paths with staging buffers, at least 4096.
    pub chunk_bytes: Option<u64>,
    /// Number of chunks on each path through another GPU, at least 1. Overrides `chunk_bytes`.
    pub relay_chunks: Option<u32>,
    /// Number of chunks on each path through host memory, at least 1. Overrides `chunk_bytes`.
    pub host_chunks: Option<u32>,
    /// Minimum size in bytes of a transfer that may use several paths. A smaller transfer uses only one path.
    pub min_bytes: Option<u64>,
    /// Maximum size in bytes of the plan's staging buffers on each device. It must not exceed the limit of the context.
    pub staging_bytes: Option<u64>,
    /// True if executions measure the variants of the plan (plans for the same transfers over other paths) and then use the fastest one.
    pub adapt: Option<bool>,
}

impl PlanOptions {
    /// Returns the planner's options. For each option the first value that is set counts: the value of this call, then that of the
    /// environment, then the default. Fails if `staging_bytes` exceeds the limit of the context.
    pub fn resolve(&self, config: &Config) -> Result<Options, Error> {
        self.resolve_tuned(config, None)
    }

    /// Returns the execution method that this call or the environment selects, or [`Engine::Auto`] if neither selects one.
    pub fn engine(&self, config: &Config) -> Engine {
        self.engine.unwrap_or(config.engine)
    }

    /// Returns the planner's options. For each option the first value that is set counts: the value of this call, then that of the
    /// environment, then that of the tuning file (`advice`), then the default.
    ///
    /// The values in a tuning file were measured together. If the call or the environment overrides one of them, the others still apply,
    /// with one exception: whether several paths are faster than one is then decided by the model, not by the tuning file.
    pub fn resolve_tuned(&self, config: &Config, advice: Option<&Advice>) -> Result<Options, Error> {
        let (max_paths, host_path) = (self.max_paths.or(config.max_paths), self.host_path.or(config.host_path));
        let (chunk_bytes, min_bytes) = (self.chunk_bytes.or(config.chunk_bytes), self.min_bytes.or(config.min_bytes));
        // A chunk size given by the call overrides chunk counts from the environment.
        let counted = |own: Option<u32>, environment: Option<u32>| own.or(environment.filter(|_| self.chunk_bytes.is_none()));
        let relay_chunks = counted(self.relay_chunks, config.relay_chunks);
        let host_chunks = counted(self.host_chunks, config.host_chunks);
        let relays = self.relays.or(config.relays).unwrap_or(Relays::ALL);
        let chunked = chunk_bytes.is_some() || relay_chunks.is_some() || host_chunks.is_some();
        let overridden = max_paths.is_some() || host_path.is_some() || chunked || relays != Relays::ALL;
        let staging_bytes = self.staging_bytes.unwrap_or(config.staging_bytes);
        if staging_bytes > config.staging_bytes {
            return Err(Error::Option {
                name: "staging_bytes",
                value: staging_bytes.to_string(),
                reason: format!(
                    "must not exceed the context's {} bytes; create the context with more, or set MPGPU_STAGING_BYTES",
                    config.staging_bytes
                ),
            });
        }
        let base = Options { staging_bytes, threads: config.host_threads, ..Options::default() };
        let advised = advice.map_or(base, |advice| advice.options(&base));
        let engine = self.engine(config);
        Ok(Options {
            engine: if engine == Engine::Auto { advised.engine } else { engine },
            max_paths: max_paths.unwrap_or(advised.max_paths),
            host_path: host_path.unwrap_or(advised.host_path),
            relays,
            chunk_bytes: chunk_bytes.or(advised.chunk_bytes),
            relay_chunks,
            host_chunks,
            min_bytes: min_bytes.or(advised.min_bytes),
            tuned: advised.tuned.map(|tuned| Tuned { several: tuned.several && !overridden, ..tuned }),
            ..advised
        })
    }
}

/// Returns mpgpu's cache directory according to the XDG base directory specification, from the values of `XDG_CACHE_HOME` and `HOME`. A
/// path that is not absolute is ignored. Returns `None` if neither is usable.
fn cache_dir(cache: Option<&OsStr>, home: Option<&OsStr>) -> Option<PathBuf> {
    let absolute = |path: &OsStr| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    let base = cache.and_then(absolute).or_else(|| Some(home.and_then(absolute)?.join(".cache")))?;
    Some(base.join("mpgpu"))
}

/// Returns the value whose name is `text`. If there is none, returns the error that `must` makes from a list of all accepted names.
fn one_of<T: Copy>(text: &str, accepted: &[(&str, T)], must: impl FnOnce(&str) -> Error) -> Result<T, Error> {
    accepted.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = accepted.iter().map(|(name, _)| *name).collect();
        must(&format!("one of {}", names.join(", ")))
    })
}

/// Returns the known variable that is most similar to the unknown `name`, or `None` if no variable is similar.
fn nearest(name: &str) -> Option<&'static str> {
    let upper = name.to_ascii_uppercase();
    let (distance, near) = VARIABLES.iter().chain(&PRELOAD).map(|v| (edits(&upper, v), *v)).min()?;
    // All names start with "MPGPU_". Up to a third of the remaining characters may differ, or three if the name is short.
    (distance * 3 <= near.len().saturating_sub("MPGPU_".len()).max(3)).then_some(near)
}

/// Returns the Levenshtein distance of two strings (number of characters to insert, delete or replace).
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[b.len()]
}
