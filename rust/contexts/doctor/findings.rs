//! Derives the findings of `mpgpu doctor` from facts, as a pure function that uses no driver, clock or file.

use super::facts::{Facts, Limits, Mps};
use super::trials::Trial;
use super::{Finding, Level};
use crate::cuda::Tried;
use crate::cuda::doctor::{self as gpus, Fabric, HostFacts, Mode, PIECE};
use crate::open::File;
use crate::units::size;
use rustix::io::Errno;

/// Minimum acceptable limit on open files (`ulimit -n`). A lower limit is reported, because each import of shared memory and each peer
/// needs a file descriptor, so that ranks that share much memory would run out of descriptors.
const FEW_FILES: u64 = 1024;
/// Minimum acceptable size of `/dev/shm` in bytes. A smaller size, such as the default of container runtimes, is reported, because MPI and
/// NCCL then fail or use slower methods.
const SMALL_SHM: u64 = 1 << 30;
/// Minimum acceptable limit on the size of files (`ulimit -f`), in bytes. A lower limit is reported, because it also applies to the memory
/// files that hold shared host memory.
const SMALL_FILE: u64 = 256 << 20;

fn well(topic: &'static str, line: impl Into<String>) -> Finding {
    Finding { level: Level::Well, topic, line: line.into(), remedy: String::new() }
}

fn not_well(level: Level, topic: &'static str, line: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { level, topic, line: line.into(), remedy: remedy.into() }
}

use Level::{Absent, Refused, Slow, Unknown};

/// Returns the findings of all checks, in the order of the checks. Each check has at least one finding.
pub fn findings(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    match &facts.cuda {
        Err(reason) => found.push(no_driver(facts, reason)),
        Ok(cuda) => {
            found.extend(driver(facts, cuda));
            found.extend(features(cuda));
            found.extend(in_sight(facts, cuda));
            found.extend(modes(cuda));
            found.extend(mps(&facts.mps, cuda));
            found.extend(peers(cuda));
            found.extend(fabric(cuda));
            found.extend(pcie(cuda));
            found.extend(pinning(&facts.limits, cuda));
        }
    }
    found.extend(host_memory(&facts.host));
    found.extend(limits(&facts.limits));
    found.push(shm(facts.shm));
    found.extend(sharing(&facts.trials));
    match &facts.settings {
        Ok(unknown) => {
            if unknown.is_empty() {
                found.push(well("settings", "the variables MPGPU_... are accepted"));
            }
            found.extend(unknown.iter().map(|line| not_well(Slow, "settings", line.clone(), "correct its name, or unset it")));
            found.extend(files(facts));
        }
        // If a variable is invalid, it cannot be determined which files contexts read.
        Err(reason) => {
            let line = format!("contexts cannot be created: {reason}");
            found.push(not_well(Refused, "settings", line, "set it as described in docs/reference/environment.md, or unset it"));
        }
    }
    found
}

fn no_driver(facts: &Facts, reason: &str) -> Finding {
    // The reason ends with a general remedy. This is cut off, because the finding has a more specific remedy.
    let reason = reason.split("; ").next().unwrap_or_default();
    if facts.on_node > 0 && facts.wants_cuda != Some(false) {
        if let Some(visible) = facts.visible.as_deref().filter(|visible| visible.is_empty() || visible.starts_with('-')) {
            let line = format!("host backend: CUDA_VISIBLE_DEVICES={visible} hides all {} NVIDIA GPUs of this node", facts.on_node);
            return not_well(Absent, "driver", line, "unset CUDA_VISIBLE_DEVICES");
        }
        let line = format!("{} NVIDIA GPUs on this node, none for this process: {reason}", facts.on_node);
        let remedy =
            "in a container: --gpus all, with NVIDIA's container toolkit; under a batch system: request GPUs; else: see nvidia-smi";
        return not_well(Refused, "driver", line, remedy);
    }
    match facts.wants_cuda {
        Some(true) => {
            not_well(Refused, "driver", format!("MPGPU_BACKEND=cuda, and {reason}"), "install NVIDIA's driver, or set MPGPU_BACKEND=auto")
        }
        Some(false) => well("driver", format!("no driver, and MPGPU_BACKEND=host needs none ({reason})")),
        None => {
            let line = format!("no driver: host backend, virtual devices on CPU threads ({reason})");
            not_well(Absent, "driver", line, "nothing on a login node; on a node with GPUs install NVIDIA's driver")
        }
    }
}

fn driver(facts: &Facts, cuda: &gpus::GpuFacts) -> Vec<Finding> {
    let version = format!("CUDA {}.{}", cuda.cuda / 1000, cuda.cuda % 1000 / 10);
    let name = cuda.version.as_ref().map_or(version.clone(), |name| format!("{name}, {version}"));
    let mut found = vec![well("driver", name)];
    if facts.wants_cuda == Some(false) {
        found.push(not_well(Absent, "driver", "MPGPU_BACKEND=host: GPUs are not used", "unset MPGPU_BACKEND"));
    }
    if let Some(reason) = &cuda.no_nvml {
        let line = format!("NVML is not available: NVLinks and PCIe links are assumed ({reason})");
        let remedy = "install libnvidia-ml.so.1, part of the driver; in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; or run mpgpu probe";
        found.push(not_well(Slow, "driver", line, remedy));
    }
    found
}

/// Optional driver functions. Each entry has the name of the feature, its functions, the first CUDA version that has them, and the severity
/// and effect if they are missing.
const FEATURES: [(&str, &[&str], &str, Level, &str); 8] = [
    ("batched copies", &["cuMemcpyBatchAsync"], "13.0", Slow, "many small copies are issued one by one"),
    (
        "graphs",
        &["cuGraphInstantiateWithFlags", "cuGraphAddKernelNode", "cuGraphExecKernelNodeSetParams"],
        "11.4",
        Slow,
        "plans run on streams, each copy issued separately",
    ),
    ("programmatic dependent launch", &["cuLaunchKernelEx"], "12.3", Slow, "small steps of ranks take a microsecond more on Hopper"),
    ("stream IDs", &["cuStreamGetId"], "12.0", Slow, "each execution makes more driver calls"),
    ("stream memory operations", &["cuStreamBatchMemOp"], "11.7", Refused, "signals between processes are refused"),
    (
        "CUDA IPC",
        &["cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuIpcCloseMemHandle"],
        "4.1",
        Refused,
        "memory of cudaMalloc cannot be shared",
    ),
    (
        "shared memory pools",
        &[
            "cuMemPoolExportToShareableHandle",
            "cuMemPoolImportFromShareableHandle",
            "cuMemPoolExportPointer",
            "cuMemPoolImportPointer",
            "cuMemPoolGetAccess",
            "cuMemPoolSetAccess",
            "cuMemPoolDestroy",
        ],
        "11.2",
        Refused,
        "memory of pools cannot be shared",
    ),
    (
        "shareable memory handles",
        &[
            "cuMemRetainAllocationHandle",
            "cuMemExportToShareableHandle",
            "cuMemImportFromShareableHandle",
            "cuMemAddressReserve",
            "cuMemAddressFree",
            "cuMemMap",
            "cuMemUnmap",
            "cuMemSetAccess",
            "cuMemRelease",
        ],
        "11.0",
        Refused,
        "memory of cuMemCreate cannot be shared",
    ),
];

fn features(cuda: &gpus::GpuFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    for (name, functions, version, level, without) in FEATURES {
        if let Some(missing) = functions.iter().find(|function| cuda.missing.contains(function)) {
            let remedy = format!("use a driver of CUDA {version} or later");
            found.push(not_well(level, "features", format!("no {name} ({missing}): {without}"), remedy));
        }
    }
    if let Some(gpus) = list(cuda, |gpu| !gpu.has_stream_memory) {
        let line = format!("streams of {gpus} cannot wait for 64-bit counters: signals between processes are refused");
        found.push(not_well(Refused, "features", line, "use a driver of CUDA 11.7 or later, on Linux and not in WSL"));
    }
    if let Some(gpus) = list(cuda, |gpu| !gpu.has_descriptors) {
        let line = format!("memory of pools and of cuMemCreate on {gpus} cannot be shared with other processes");
        found.push(not_well(Refused, "features", line, "share memory of cudaMalloc or of mpgpu"));
    }
    if found.is_empty() {
        found.push(well("features", "batched copies, graphs, stream memory operations, CUDA IPC, shared pools and memory handles"));
    }
    found
}

/// Returns a list such as `GPU 0` or `GPUs 0, 2` of the GPUs for which `are` returns true. Returns `None` if there are none.
fn list(cuda: &gpus::GpuFacts, are: impl Fn(&gpus::Gpu) -> bool) -> Option<String> {
    let numbers: Vec<String> = (0..).zip(&cuda.gpus).filter(|(_, gpu)| are(gpu)).map(|(number, _): (u32, _)| number.to_string()).collect();
    (!numbers.is_empty()).then(|| format!("{} {}", if numbers.len() == 1 { "GPU" } else { "GPUs" }, numbers.join(", ")))
}

fn in_sight(facts: &Facts, cuda: &gpus::GpuFacts) -> Vec<Finding> {
    let seen = cuda.gpus.len() as u32;
    let all = facts.on_node.max(cuda.on_node.unwrap_or(0)).max(seen);
    let visible = facts.visible.as_ref().map_or("CUDA_VISIBLE_DEVICES is not set".into(), |value| format!("CUDA_VISIBLE_DEVICES={value}"));
    let line = format!("{seen} of {all} GPUs visible ({visible})");
    let mut found = vec![if seen == 1 && all > 1 {
        let line = format!("{line}: plans cannot relay through other GPUs and have one PCIe link");
        let remedy =
            "show every rank all GPUs of the node and choose one by cudaSetDevice: unset CUDA_VISIBLE_DEVICES; Slurm: --gpu-bind=none";
        not_well(Slow, "gpus", line, remedy)
    } else {
        well("gpus", line)
    }];
    let gpus = cuda.gpus.iter().enumerate();
    found.extend(gpus.map(|(index, gpu)| well("gpus", format!("GPU {index} is {}, {}", gpu.name, gpu.uuid))));
    let named = facts.visible.as_ref().is_some_and(|visible| visible.contains("MIG-"));
    if let Some(which) = list(cuda, |gpu| gpu.is_mig).or_else(|| named.then(|| "the visible GPU".into())) {
        let line = format!("{which} partitioned by MIG: instances have no peer access, so copies go through host memory");
        let remedy = "use whole GPUs where copies between GPUs matter; an administrator turns MIG off: nvidia-smi -mig 0";
        found.push(not_well(Slow, "mig", line, remedy));
    }
    found
}

fn modes(cuda: &gpus::GpuFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    if let Some(gpus) = list(cuda, |gpu| gpu.mode == Mode::Prohibited) {
        let remedy = "an administrator sets it: nvidia-smi -c DEFAULT";
        found.push(not_well(Refused, "mode", format!("compute mode of {gpus} is Prohibited: no process can use it"), remedy));
    }
    if let Some(gpus) = list(cuda, |gpu| gpu.mode == Mode::Exclusive) {
        let line =
            format!("compute mode of {gpus} is Exclusive_Process: one rank can use it, and plans of other ranks cannot relay through it");
        found.push(not_well(Slow, "mode", line, "an administrator sets it: nvidia-smi -c DEFAULT; or use MPS"));
    }
    if found.is_empty() {
        found.push(well("mode", "compute mode Default: any number of processes"));
    }
    found
}

fn mps(mps: &Mps, cuda: &gpus::GpuFacts) -> Vec<Finding> {
    let serves = cuda.gpus.iter().any(|gpu| gpu.is_mps);
    let mut found = vec![match (serves, mps.has_daemon) {
        (true, _) => {
            well("mps", format!("active for this process ({}); a fault in one client ends the contexts of all clients", mps.directory))
        }
        (false, true) => well("mps", format!("a daemon runs at {}, but not for the GPUs of this process", mps.directory)),
        (false, false) => well("mps", "none"),
    }];
    if serves && let Some(percentage) = mps.percentage.as_deref().filter(|percentage| *percentage != "100") {
        let line = format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={percentage}: copy kernels get that share of a GPU");
        found.push(not_well(Slow, "mps", line, "unset it where small copies matter; copy engines are not affected"));
    }
    found
}

fn peers(cuda: &gpus::GpuFacts) -> Vec<Finding> {
    let count = cuda.gpus.len();
    if count < 2 {
        return vec![well("peers", "one GPU: no pairs")];
    }
    let mut found = Vec::new();
    let pair = |pair: &gpus::Pair| format!("{} and {}", pair.a, pair.b);
    for one in &cuda.pairs {
        match &one.tried {
            Some(Ok(Tried::Lost(loss))) => {
                let line = format!("GPUs {} report peer access, but copies between them lose bytes: {loss}", pair(one));
                let remedy = "disable the IOMMU or set it to pass-through (kernel: intel_iommu=off, amd_iommu=off or iommu=pt), disable ACS on PCIe \
                              switches; plans avoid this pair";
                found.push(not_well(Refused, "peers", line, remedy));
            }
            Some(Err(reason)) => {
                let line = format!("GPUs {} could not be tested: {reason}", pair(one));
                found.push(not_well(Unknown, "peers", line, "run mpgpu doctor again while nothing else uses the GPUs"));
            }
            _ => {}
        }
    }
    let without: Vec<String> = cuda.pairs.iter().filter(|pair| !pair.claims.0 || !pair.claims.1).map(pair).collect();
    if without.len() == cuda.pairs.len() {
        let remedy =
            "nothing where GPUs or board do not support it (consumer GPUs, different sockets); nvidia-smi topo -p2p r shows the reason";
        found.push(not_well(Slow, "peers", "no GPU can access another's memory: copies between GPUs go through host memory", remedy));
        return found;
    }
    if !without.is_empty() {
        let shown = without.iter().take(4).cloned().collect::<Vec<_>>().join("; ");
        let more = if without.len() > 4 { "; ..." } else { "" };
        let line =
            format!("{} of {} pairs have no peer access and copy through host memory: {shown}{more}", without.len(), cuda.pairs.len());
        found.push(not_well(Slow, "peers", line, "nothing for GPUs on different sockets; nvidia-smi topo -p2p r shows the reason"));
    }
    if found.iter().all(|finding| finding.level == Slow) {
        let intact = cuda.pairs.iter().filter(|pair| matches!(pair.tried, Some(Ok(Tried::Intact)))).count();
        found.push(if cuda.pairs.iter().any(|pair| pair.tried.is_some()) {
            well("peers", format!("all bytes arrive, both ways, by copy engines and kernels; pairs tested: {intact}"))
        } else {
            let line = "access is reported, but was not tested";
            not_well(Unknown, "peers", line, "run mpgpu doctor without --no-trials")
        });
    }
    found
}

fn fabric(cuda: &gpus::GpuFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    let restart = "an administrator: systemctl status nvidia-fabricmanager, whose version must be the driver's; then reset the GPUs";
    for (index, gpu) in cuda.gpus.iter().enumerate() {
        let what = match gpu.fabric {
            Fabric::NotStarted => {
                Some((Refused, "is not registered with the fabric manager: CUDA or NVLink will not work".to_owned(), restart))
            }
            Fabric::InProgress => {
                Some((Unknown, "is being registered with the fabric manager".to_owned(), "wait a minute, and run mpgpu doctor again"))
            }
            Fabric::Failed(error) => Some((Refused, format!("failed to register with the fabric manager (NVML error {error})"), restart)),
            Fabric::None | Fabric::Up => None,
        };
        found.extend(what.map(|(level, line, remedy)| not_well(level, "fabric", format!("GPU {index} {line}"), remedy)));
    }
    let up = cuda.gpus.iter().filter(|gpu| gpu.fabric == Fabric::Up).count();
    if found.is_empty() {
        found.push(well(
            "fabric",
            if up > 0 { format!("NVSwitch fabric is up for {up} of {} GPUs", cuda.gpus.len()) } else { "NVML reports none".into() },
        ));
    }
    let down = |gpu: &gpus::Gpu| gpu.nvlinks.filter(|(up, all)| up < all && *up > 0);
    let most = cuda.gpus.iter().filter_map(|gpu| gpu.nvlinks).map(|(up, _)| up).max().unwrap_or(0);
    for (index, gpu) in cuda.gpus.iter().enumerate() {
        // On some boards not all NVLinks of a GPU are connected. The same links are then missing on each GPU, so a GPU is reported only if
        // it has fewer links than another.
        if let Some((up, all)) = down(gpu).filter(|(up, _)| *up < most) {
            let line = format!("GPU {index} has {up} of {all} NVLinks up, another has {most}");
            found.push(not_well(Slow, "nvlink", line, "nvidia-smi nvlink -s, and the kernel's log for Xid errors; reset or replace it"));
        }
    }
    found
}

fn pcie(cuda: &gpus::GpuFacts) -> Vec<Finding> {
    let links: Vec<(usize, gpus::PcieNow)> = cuda.gpus.iter().enumerate().filter_map(|(index, gpu)| Some((index, gpu.pcie?))).collect();
    let narrow = links.iter().filter(|(_, link)| link.width < link.most);
    let mut found: Vec<Finding> = narrow
        .map(|(index, link)| {
            let line = format!("GPU {index} has {} of {} PCIe lanes: host copies are that much slower", link.width, link.most);
            not_well(Slow, "pcie", line, "reseat it, or use a slot with all lanes; risers and bifurcated slots cause this")
        })
        .collect();
    if found.is_empty() {
        found.push(if links.is_empty() {
            not_well(Unknown, "pcie", "link width is unknown (a virtual machine, or no NVML)", "mpgpu probe measures what they carry")
        } else {
            let width = links.iter().map(|(_, link)| link.width).min().unwrap_or(0);
            well(
                "pcie",
                format!("all PCIe lanes in use: x{width} (the PCIe generation is lower while a link is idle, and is not compared)"),
            )
        });
    }
    found
}

fn pinning(limits: &Limits, cuda: &gpus::GpuFacts) -> Vec<Finding> {
    let locked = limits.locked.map_or("unlimited".into(), size);
    let remedy =
        "ulimit -l unlimited; container: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK; systemd: LimitMEMLOCK=infinity";
    vec![match &cuda.pinning {
        None if limits.locked.is_none() => well("pinning", "ulimit -l is unlimited"),
        None => {
            let line = format!("ulimit -l is {locked}; pinning was not tested");
            not_well(Unknown, "pinning", line, "run mpgpu doctor without --no-trials while a GPU is free")
        }
        Some(tried) => match (&tried.whole, &tried.pieces) {
            (Ok(()), _) => well("pinning", format!("{} pinned in one call, with ulimit -l {locked}", size(tried.bytes))),
            (Err(reason), Some(Ok(()))) => {
                let line = format!("{} cannot be pinned in one call, only in blocks of {}: {reason}", size(tried.bytes), size(PIECE));
                not_well(Slow, "pinning", line, remedy)
            }
            (Err(reason), _) => {
                let line = format!("{} of host memory cannot be pinned, with ulimit -l {locked}: {reason}", size(tried.bytes));
                not_well(Refused, "pinning", line, remedy)
            }
        },
    }]
}

fn host_memory(host: &HostFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    match host.huge.as_deref() {
        Some("never") => {
            let line = "transparent huge pages are off: large host buffers are slower to map and to copy";
            let remedy = "as an administrator: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
            found.push(not_well(Slow, "memory", line, remedy));
        }
        None => found.push(not_well(Unknown, "memory", "the huge page setting cannot be read", "mount /sys in the container")),
        Some(_) => {}
    }
    let (all, usable) = host.nodes;
    if usable < all {
        let line = format!(
            "this process may use {usable} of {all} NUMA nodes: all host buffers of the process share the bandwidth of these nodes"
        );
        let remedy =
            "where host copies of several GPUs matter, do not bind ranks to one node (mpirun --bind-to none, srun --cpu-bind=none)";
        found.push(not_well(Slow, "memory", line, remedy));
    }
    if let Err(reason) = &host.placing
        && all > 1
    {
        let line =
            format!("memory cannot be placed on a NUMA node (mbind: {reason}): memory that mpgpu allocates on host1 may use another node");
        found.push(not_well(Slow, "memory", line, "container: --cap-add SYS_NICE, or a seccomp profile that allows mbind"));
    }
    if found.is_empty() {
        let nodes = if all == 1 { "1 NUMA node".into() } else { format!("{all} NUMA nodes") };
        found.push(well("memory", format!("{nodes}, transparent huge pages: {}", host.huge.as_deref().unwrap_or_default())));
    }
    found
}

fn limits(limits: &Limits) -> Vec<Finding> {
    let mut found = Vec::new();
    if let Some(files) = limits.files.filter(|files| *files < FEW_FILES) {
        let line = format!("ulimit -n is {files}: each import of shared memory needs a file descriptor");
        found.push(not_well(Slow, "limits", line, "ulimit -n 65536; container: --ulimit nofile=65536"));
    }
    if let Some(bytes) = limits.file_bytes.filter(|bytes| *bytes < SMALL_FILE) {
        let line = format!("ulimit -f is {}: larger shared host memory is refused", size(bytes));
        found.push(not_well(Refused, "limits", line, "ulimit -f unlimited"));
    }
    if found.is_empty() {
        let files = limits.files.map_or("unlimited".into(), |files| files.to_string());
        found.push(well("limits", format!("ulimit -n {files}, ulimit -l {}", limits.locked.map_or("unlimited".into(), size))));
    }
    found
}

fn shm(shm: Option<(u64, u64)>) -> Finding {
    let remedy = "container: --ipc=host or --shm-size=8g; else: mount -o remount,size=50% /dev/shm";
    match shm {
        None => not_well(Slow, "shm", "no /dev/shm: mpgpu does not use it, but MPI and NCCL may need it", remedy),
        Some((all, free)) if all < SMALL_SHM || free < all / 20 => {
            let line =
                format!("/dev/shm has {}, {} free: mpgpu does not use it, but MPI and NCCL share host memory there", size(all), size(free));
            not_well(Slow, "shm", line, remedy)
        }
        Some((all, free)) => well("shm", format!("/dev/shm has {}, {} free", size(all), size(free))),
    }
}

fn sharing(trials: &[Trial]) -> Vec<Finding> {
    let mut found: Vec<Finding> = Vec::new();
    for trial in trials {
        let Err(error) = trial.result else { continue };
        let remedy = match error {
            Errno::PERM | Errno::ACCESS | Errno::NOSYS => {
                "a seccomp profile or security module denies it: use a profile that allows it (docker, podman: --security-opt \
                 seccomp=unconfined)"
            }
            Errno::MFILE | Errno::NFILE => "ulimit -n 65536; container: --ulimit nofile=65536",
            Errno::NOMEM | Errno::NOSPC => "give the container or the job more memory",
            Errno::INVAL => "needs Linux 3.17 or later; a sandbox (gVisor) may lack it",
            _ => "strace -f mpgpu doctor shows the call",
        };
        // The text of the error comes from the standard library, because rustix shows only its number.
        let reason = std::io::Error::from_raw_os_error(error.raw_os_error());
        let line = format!("memory cannot be shared between processes: {} is denied: {reason}", trial.what);
        found.push(not_well(Refused, "sharing", line, remedy));
    }
    if found.is_empty() {
        found.push(well("sharing", "memory files, seals, mappings, sockets and descriptors work"));
    }
    found
}

fn files(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    for File { what, path, is_named, state } in &facts.files {
        let Err(reason) = state else {
            found.push(well(what, format!("{path} is used")));
            continue;
        };
        // Some errors already contain the path of the file.
        let line = if reason.contains(path.as_str()) { reason.clone() } else { format!("{path}: {reason}") };
        found.push(match (is_named, *what) {
            (false, _) => not_well(Slow, what, format!("the file is out of date and not used: {line}"), "mpgpu probe"),
            (true, "tuning") => {
                not_well(Refused, what, format!("contexts cannot be created: {line}"), "run mpgpu tune again; or unset MPGPU_TUNING_FILE")
            }
            (true, _) => {
                not_well(Refused, what, format!("contexts cannot be created: {line}"), "run mpgpu probe again; or unset MPGPU_TOPOLOGY")
            }
        });
    }
    let several = facts.cuda.as_ref().is_ok_and(|cuda| cuda.gpus.len() > 1);
    if several && !facts.files.iter().any(|file| file.what != "tuning") {
        let line = "no stored probe (measurement) of these GPUs: which links and host memory they share is assumed";
        found.push(not_well(Slow, "probe", line, "mpgpu probe, once, while nothing else runs"));
    } else if found.is_empty() {
        found.push(well("files", "no topology, probe or tuning file is in use"));
    }
    found
}
