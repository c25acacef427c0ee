//! Facts about the system, the environment and the launcher.

use super::trials::{self, Trial};
use crate::config::{BackendChoice, Config};
use crate::cuda::doctor::{self as gpus, HostFacts};
use crate::open::{File, files_here};
use rustix::process::{Resource, getrlimit};
use std::path::Path;

/// Facts about the machine and the process, from which the findings of `mpgpu doctor` are derived.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// Rank of this process in a parallel job; `None` if no launcher started the process.
    pub rank: Option<Rank>,
    /// Facts about the GPUs, or the reason why they are not available.
    pub cuda: Result<gpus::GpuFacts, String>,
    /// Number of NVIDIA GPUs that the operating system lists on this node, including GPUs that are not visible to this process.
    pub on_node: u32,
    /// Value of `CUDA_VISIBLE_DEVICES`; `None` if it is not set.
    pub visible: Option<String>,
    /// State of NVIDIA's multi-process service (MPS) that this process would use.
    pub mps: Mps,
    /// Resource limits of the process.
    pub limits: Limits,
    /// Total size and free size of `/dev/shm` in bytes; `None` if they cannot be determined.
    pub shm: Option<(u64, u64)>,
    /// Facts about host memory.
    pub host: HostFacts,
    /// Results of trying the system calls that are needed for sharing memory between processes.
    pub trials: Vec<Trial>,
    /// Warnings about `MPGPU_…` variables that are not recognised, one line each. The error is the reason why the value of a variable is
    /// invalid.
    pub settings: Result<Vec<String>, String>,
    /// `MPGPU_BACKEND`: true for `cuda`, false for `host`, `None` for `auto`.
    pub wants_cuda: Option<bool>,
    /// Files that contexts read (topology, probe and tuning), each with its state.
    pub files: Vec<File>,
}

/// Rank of this process in a job that a launcher such as `mpirun` or `srun` started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Rank of the process among all processes of the job.
    pub number: u32,
    /// Rank of the process among those on this node; `None` if the launcher does not set it.
    pub local: Option<u32>,
    /// Name of the environment variable from which the rank was read.
    pub variable: &'static str,
}

/// State of NVIDIA's multi-process service (MPS).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mps {
    /// Value of `CUDA_MPS_PIPE_DIRECTORY`, or its default.
    pub directory: String,
    /// True if the pipe of the MPS control daemon exists.
    pub has_daemon: bool,
    /// Value of `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`; `None` if it is not set.
    pub percentage: Option<String>,
}

/// Soft resource limits of the process. A field that is `None` means that there is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Number of bytes that the process may lock in memory (`ulimit -l`).
    pub locked: Option<u64>,
    /// Number of files that the process may have open (`ulimit -n`).
    pub files: Option<u64>,
    /// Largest size of a file in bytes (`ulimit -f`).
    pub file_bytes: Option<u64>,
}

impl Facts {
    /// Gathers the facts about this machine and process. If `with_trials` is true, also copies data between GPUs ([`gpus::facts`]).
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

/// Returns the rank of this process from the environment variables of Open MPI, MPICH and its derivatives, MVAPICH, PMI, Flux and Slurm.
/// Returns `None` if no launcher has set them.
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

/// Returns the number of NVIDIA GPUs on the node, from the list of the kernel module or from the PCI bus, whichever lists more.
fn gpus_of_node() -> u32 {
    let entries = |path: &str| std::fs::read_dir(path).into_iter().flatten().flatten();
    let of_module = entries("/proc/driver/nvidia/gpus").count();
    let is_gpu = |folder: &Path| {
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        // Class codes of VGA and 3D controllers; the vendor is NVIDIA.
        read("vendor").trim() == "0x10de" && ["0x0300", "0x0302"].iter().any(|class| read("class").starts_with(class))
    };
    let on_bus = entries("/sys/bus/pci/devices").filter(|entry| is_gpu(&entry.path())).count();
    of_module.max(on_bus) as u32
}
