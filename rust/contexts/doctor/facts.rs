//! Facts about the system, the environment and the launcher.

use super::trials::{self, Trial};
use crate::config::{BackendChoice, Config};
use crate::cuda::doctor::{self as gpus, HostFacts};
use crate::open::{File, files_here};
use rustix::process::{Resource, getrlimit};
use std::path::Path;

/// Everything that findings are derived from.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The rank, if a launcher started this process.
    pub rank: Option<Rank>,
    /// The GPUs, or why there are none.
    pub cuda: Result<gpus::GpuFacts, String>,
    /// NVIDIA GPUs of the node that the system shows, usable by this process or not.
    pub on_node: u32,
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible: Option<String>,
    /// The MPS server that this process would use.
    pub mps: Mps,
    /// Limits of the process.
    pub limits: Limits,
    /// Bytes of `/dev/shm`, all and free.
    pub shm: Option<(u64, u64)>,
    /// Host memory.
    pub host: HostFacts,
    /// The system calls that sharing needs, each tried.
    pub trials: Vec<Trial>,
    /// Why the variables `MPGPU_…` are refused; else a line for each that nobody reads.
    pub settings: Result<Vec<String>, String>,
    /// `MPGPU_BACKEND`: true for `cuda`, false for `host`.
    pub wants_cuda: Option<bool>,
    /// Files that contexts read.
    pub files: Vec<File>,
}

/// This process among those of a launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Its rank.
    pub number: u32,
    /// Its rank on this node, if the launcher sets it.
    pub local: Option<u32>,
    /// The variable that gave the rank.
    pub variable: &'static str,
}

/// NVIDIA's multi-process service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mps {
    /// `CUDA_MPS_PIPE_DIRECTORY`, or its default.
    pub directory: String,
    /// Whether the daemon's pipe exists.
    pub has_daemon: bool,
    /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`.
    pub percentage: Option<String>,
}

/// Soft limits; `None` for no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Bytes locked in memory, `ulimit -l`.
    pub locked: Option<u64>,
    /// Open files, `ulimit -n`.
    pub files: Option<u64>,
    /// Bytes of a file, `ulimit -f`.
    pub file_bytes: Option<u64>,
}

impl Facts {
    /// Gathers the facts. `with_trials` copies bytes between GPUs ([`gpus::facts`]).
    pub fn gather(with_trials: bool) -> Facts {
        let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let config = Config::from_environment();
        let backend = config.as_ref().map_or(BackendChoice::Auto, |config| config.backend);
        let wants_cuda = (backend != BackendChoice::Auto).then_some(backend == BackendChoice::Cuda);
        let pipes = variable("CUDA_MPS_PIPE_DIRECTORY").filter(|path| !path.is_empty()).unwrap_or_else(|| "/tmp/nvidia-mps".into());
        let limit = |resource| getrlimit(resource).current;
        let shm = rustix::fs::statvfs("/dev/shm").ok();
        Facts {
            rank: rank(variable),
            cuda: gpus::facts(with_trials).map_err(|error| error.to_string()),
            on_node: gpus_of_node(),
            visible: variable("CUDA_VISIBLE_DEVICES"),
            mps: Mps {
                has_daemon: Path::new(&pipes).join("control").exists(),
                directory: pipes,
                percentage: variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
            },
            limits: Limits { locked: limit(Resource::Memlock), files: limit(Resource::Nofile), file_bytes: limit(Resource::Fsize) },
            shm: shm.map(|shm| (shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize)),
            host: HostFacts::gather(),
            trials: trials::all(),
            wants_cuda,
            files: config.as_ref().map(files_here).unwrap_or_default(),
            settings: config.map(|config| config.unknown).map_err(|error| error.to_string()),
        }
    }
}

/// The rank of this process, from the variables of Open MPI, MPICH and its derivatives, MVAPICH, PMI, Flux and Slurm.
pub fn rank(variable: impl Fn(&str) -> Option<String>) -> Option<Rank> {
    const KNOWN: [(&str, &str); 6] = [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "MPI_LOCALRANKID"),
        ("PMIX_RANK", "PMIX_LOCAL_RANK"),
        ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
        ("SLURM_PROCID", "SLURM_LOCALID"),
    ];
    let number = |name: &str| variable(name)?.parse().ok();
    KNOWN.into_iter().find_map(|(name, local)| Some(Rank { number: number(name)?, local: number(local), variable: name }))
}

/// Counted by the kernel module, else on the PCI bus.
fn gpus_of_node() -> u32 {
    let entries = |path: &str| std::fs::read_dir(path).into_iter().flatten().flatten();
    let of_module = entries("/proc/driver/nvidia/gpus").count();
    let is_gpu = |folder: &Path| {
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        // VGA or 3D controllers of NVIDIA.
        read("vendor").trim() == "0x10de" && ["0x0300", "0x0302"].iter().any(|class| read("class").starts_with(class))
    };
    let on_bus = entries("/sys/bus/pci/devices").filter(|entry| is_gpu(&entry.path())).count();
    of_module.max(on_bus) as u32
}
