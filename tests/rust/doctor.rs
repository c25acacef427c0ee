//! Tests the findings of `mpgpu doctor`. The facts about the machine are invented, because no machine has every possible problem.

use mpgpu_contexts::File;
use mpgpu_contexts::doctor::facts::{Limits, Mps, Rank, rank};
use mpgpu_contexts::doctor::trials::Trial;
use mpgpu_contexts::doctor::{Facts, Finding, Level, findings};
use mpgpu_devices::cuda::doctor::{Fabric, Gpu, GpuFacts as Cuda, HostFacts, Mode, Pair, PcieNow, Pinning};
use mpgpu_devices::cuda::{Loss, Mover, Tried};
use rustix::io::Errno;

/// Returns the facts of a machine of two GPUs without problems.
fn sound() -> Facts {
    let gpu = |index: u32| Gpu {
        name: "NVIDIA H200".into(),
        uuid: format!("GPU-{index}"),
        has_stream_memory: true,
        has_descriptors: true,
        pcie: Some(PcieNow { width: 16, most: 16 }),
        fabric: Fabric::Up,
        nvlinks: Some((18, 18)),
        ..Gpu::default()
    };
    Facts {
        rank: None,
        cuda: Ok(Cuda {
            cuda: 13000,
            version: Some("580.95.05".into()),
            on_node: Some(2),
            gpus: vec![gpu(0), gpu(1)],
            pairs: vec![Pair { a: 0, b: 1, claims: (true, true), tried: Some(Ok(Tried::Intact)) }],
            pinning: Some(Pinning { bytes: 64 << 20, whole: Ok(()), pieces: None }),
            ..Cuda::default()
        }),
        on_node: 2,
        visible: None,
        mps: Mps { directory: "/tmp/nvidia-mps".into(), ..Mps::default() },
        limits: Limits { locked: None, files: Some(65536), file_bytes: None },
        shm: Some((64 << 30, 60 << 30)),
        host: HostFacts { huge: Some("madvise".into()), nodes: (2, 2), placing: Ok(()) },
        trials: vec![Trial { what: "a memory file (memfd_create)", result: Ok(()) }],
        settings: Ok(Vec::new()),
        wants_cuda: None,
        files: vec![File { what: "probe", path: "/home/a/.cache/mpgpu/probe-1.toml".into(), is_named: false, state: Ok(()) }],
    }
}

fn cuda(facts: &mut Facts) -> &mut Cuda {
    facts.cuda.as_mut().expect("GPUs")
}

/// Returns the findings other than "ok" if `change` is applied to the facts of a machine without problems. Checks that each of them has a
/// remedy and that other findings have none.
#[track_caller]
fn complaints(change: impl FnOnce(&mut Facts)) -> Vec<Finding> {
    let mut facts = sound();
    change(&mut facts);
    let found = findings(&facts);
    for finding in &found {
        assert_eq!(finding.remedy.is_empty(), finding.level == Level::Well, "{finding:?}");
        assert!(!finding.line.is_empty() && !finding.line.contains('\n') && !finding.remedy.contains('\n'), "{finding:?}");
    }
    found.into_iter().filter(|finding| finding.level != Level::Well).collect()
}

/// Checks that `change` causes exactly one more finding, which has this severity and topic, and which contains the given texts in its line
/// and its remedy.
#[track_caller]
fn one(level: Level, topic: &str, line: &str, remedy: &str, change: impl FnOnce(&mut Facts)) {
    let found = complaints(change);
    assert!(
        matches!(&found[..], [one] if one.level == level && one.topic == topic && one.line.contains(line) && one.remedy.contains(remedy)),
        "{level:?} {topic} {line}: {found:#?}"
    );
}

#[test]
fn of_a_sound_machine_every_line_is_well() {
    assert_eq!(complaints(|_| {}), []);
    let topics: Vec<&str> = findings(&sound()).iter().map(|finding| finding.topic).collect();
    for topic in
        ["driver", "features", "gpus", "mode", "mps", "peers", "fabric", "pcie", "pinning", "memory", "limits", "shm", "sharing", "probe"]
    {
        assert!(topics.contains(&topic), "{topic} in {topics:?}");
    }
}

#[test]
fn without_a_driver_it_says_what_runs_in_its_place_or_what_keeps_the_gpus_away() {
    let no_driver = || Err("libcuda.so.1 cannot be loaded (no such file); install NVIDIA's driver".to_owned());
    let none = |facts: &mut Facts| {
        facts.cuda = no_driver();
        facts.on_node = 0;
    };
    one(Level::Absent, "driver", "host backend", "login node", none);
    one(Level::Refused, "driver", "2 NVIDIA GPUs on this node, none for this process", "--gpus all", |facts| facts.cuda = no_driver());
    one(Level::Absent, "driver", "CUDA_VISIBLE_DEVICES= hides all 2", "unset", |facts| {
        (facts.cuda, facts.visible) = (no_driver(), Some(String::new()));
    });
    one(Level::Refused, "driver", "MPGPU_BACKEND=cuda", "MPGPU_BACKEND=auto", |facts| {
        none(facts);
        facts.wants_cuda = Some(true);
    });
    assert_eq!(
        complaints(|facts| {
            none(facts);
            facts.wants_cuda = Some(false);
        }),
        []
    );
    one(Level::Absent, "driver", "GPUs are not used", "unset MPGPU_BACKEND", |facts| facts.wants_cuda = Some(false));
}

#[test]
fn what_the_driver_lacks_is_named_with_what_is_without_it() {
    for (function, level, line) in [
        ("cuMemcpyBatchAsync", Level::Slow, "one by one"),
        ("cuGraphInstantiateWithFlags", Level::Slow, "streams"),
        ("cuLaunchKernelEx", Level::Slow, "a microsecond more"),
        ("cuStreamGetId", Level::Slow, "cuStreamGetId"),
        ("cuStreamBatchMemOp", Level::Refused, "signals"),
        ("cuIpcGetMemHandle", Level::Refused, "cudaMalloc"),
        ("cuMemPoolImportPointer", Level::Refused, "pools"),
        ("cuMemMap", Level::Refused, "cuMemCreate"),
    ] {
        one(level, "features", line, "a driver of CUDA", |facts| cuda(facts).missing.push(function));
    }
    one(Level::Refused, "features", "GPU 1 cannot wait", "driver", |facts| cuda(facts).gpus[1].has_stream_memory = false);
    one(Level::Refused, "features", "on GPUs 0, 1", "cudaMalloc", |facts| {
        cuda(facts).gpus.iter_mut().for_each(|gpu| gpu.has_descriptors = false)
    });
    one(Level::Slow, "driver", "NVML", "libnvidia-ml", |facts| cuda(facts).no_nvml = Some("not found".into()));
}

#[test]
fn gpus_are_named_as_every_rank_sees_them() {
    one(Level::Slow, "gpus", "1 of 8 GPUs visible (CUDA_VISIBLE_DEVICES=3)", "unset CUDA_VISIBLE_DEVICES", |facts| {
        (facts.on_node, facts.visible) = (8, Some("3".into()));
        cuda(facts).gpus.truncate(1);
        cuda(facts).pairs.clear();
    });
    let lines: Vec<String> = findings(&sound()).into_iter().filter(|finding| finding.topic == "gpus").map(|finding| finding.line).collect();
    assert_eq!(
        lines,
        ["2 of 2 GPUs visible (CUDA_VISIBLE_DEVICES is not set)", "GPU 0 is NVIDIA H200, GPU-0", "GPU 1 is NVIDIA H200, GPU-1"]
    );
    one(Level::Slow, "mig", "GPU 1", "nvidia-smi -mig 0", |facts| cuda(facts).gpus[1].is_mig = true);
    one(Level::Slow, "mig", "MIG", "nvidia-smi -mig 0", |facts| facts.visible = Some("MIG-1,MIG-2".into()));
    one(Level::Slow, "mode", "Exclusive_Process", "nvidia-smi -c DEFAULT", |facts| cuda(facts).gpus[0].mode = Mode::Exclusive);
    one(Level::Refused, "mode", "Prohibited", "nvidia-smi -c DEFAULT", |facts| cuda(facts).gpus[0].mode = Mode::Prohibited);
}

#[test]
fn mps_is_said_and_a_part_of_the_gpu_is_slow() {
    let serving = |facts: &mut Facts| {
        facts.mps.has_daemon = true;
        cuda(facts).gpus.iter_mut().for_each(|gpu| gpu.is_mps = true);
    };
    assert_eq!(complaints(serving), []);
    one(Level::Slow, "mps", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20", "unset", |facts| {
        serving(facts);
        facts.mps.percentage = Some("20".into());
    });
}

#[test]
fn peers_that_lose_bytes_are_refused_and_those_without_access_are_slow() {
    let loss = Loss { from: 1, to: 0, mover: Mover::Pull, wrong: 65536, of: 65536 };
    one(
        Level::Refused,
        "peers",
        "GPUs 0 and 1 report peer access, but copies between them lose bytes: of 65536 bytes from GPU 1 to GPU 0",
        "IOMMU",
        |facts| {
            cuda(facts).pairs[0].tried = Some(Ok(Tried::Lost(loss)));
        },
    );
    one(Level::Unknown, "peers", "out of memory", "again", |facts| cuda(facts).pairs[0].tried = Some(Err("out of memory".into())));
    one(Level::Unknown, "peers", "not tested", "--no-trials", |facts| cuda(facts).pairs[0].tried = None);
    one(Level::Slow, "peers", "no GPU can access another's memory", "topo -p2p", |facts| {
        (cuda(facts).pairs[0].claims, cuda(facts).pairs[0].tried) = ((false, false), None);
    });
    one(Level::Slow, "peers", "1 of 2 pairs have no peer access and copy through host memory: 0 and 2", "sockets", |facts| {
        cuda(facts).pairs.push(Pair { a: 0, b: 2, claims: (false, false), tried: None });
    });
}

#[test]
fn links_and_fabric_that_are_not_whole_are_named() {
    one(Level::Refused, "fabric", "GPU 1 is not registered", "fabricmanager", |facts| cuda(facts).gpus[1].fabric = Fabric::NotStarted);
    one(Level::Refused, "fabric", "NVML error 3", "fabricmanager", |facts| cuda(facts).gpus[1].fabric = Fabric::Failed(3));
    one(Level::Unknown, "fabric", "being registered", "wait", |facts| cuda(facts).gpus[1].fabric = Fabric::InProgress);
    one(Level::Slow, "nvlink", "GPU 1 has 12 of 18 NVLinks up", "nvlink -s", |facts| cuda(facts).gpus[1].nvlinks = Some((12, 18)));
    one(Level::Slow, "pcie", "GPU 0 has 8 of 16 PCIe lanes", "slot", |facts| {
        cuda(facts).gpus[0].pcie = Some(PcieNow { width: 8, most: 16 });
    });
    one(Level::Unknown, "pcie", "width is unknown", "mpgpu probe", |facts| cuda(facts).gpus.iter_mut().for_each(|gpu| gpu.pcie = None));
    // Some boards lack the same NVLinks on all GPUs.
    assert_eq!(complaints(|facts| cuda(facts).gpus.iter_mut().for_each(|gpu| gpu.nvlinks = Some((12, 18)))), []);
}

#[test]
fn limits_of_the_process_and_of_its_container_come_with_how_to_lift_them() {
    let refused = |pieces| Some(Pinning { bytes: 64 << 20, whole: Err("out of memory".into()), pieces });
    one(Level::Slow, "pinning", "in blocks of 4.0 MiB", "memlock=-1", |facts| cuda(facts).pinning = refused(Some(Ok(()))));
    one(Level::Refused, "pinning", "cannot be pinned", "ulimit -l unlimited", |facts| {
        cuda(facts).pinning = refused(Some(Err("no".into())))
    });
    // On some systems the driver's pinned memory is not subject to the limit, so the result of the trial decides.
    assert_eq!(complaints(|facts| facts.limits.locked = Some(8 << 20)), []);
    one(Level::Unknown, "pinning", "8.0 MiB", "--no-trials", |facts| {
        (facts.limits.locked, cuda(facts).pinning) = (Some(8 << 20), None);
    });
    one(Level::Slow, "limits", "ulimit -n is 256", "nofile", |facts| facts.limits.files = Some(256));
    one(Level::Refused, "limits", "ulimit -f", "unlimited", |facts| facts.limits.file_bytes = Some(1 << 20));
    one(Level::Slow, "shm", "64.0 MiB", "--shm-size", |facts| facts.shm = Some((64 << 20, 64 << 20)));
    one(Level::Slow, "shm", "0 B free", "--shm-size", |facts| facts.shm = Some((64 << 30, 0)));
    one(Level::Slow, "shm", "no /dev/shm", "--shm-size", |facts| facts.shm = None);
}

#[test]
fn what_sharing_needs_and_is_denied_is_named_with_its_call() {
    for (error, remedy) in [(Errno::PERM, "seccomp"), (Errno::NOSYS, "seccomp"), (Errno::MFILE, "ulimit -n"), (Errno::NOMEM, "memory")] {
        one(Level::Refused, "sharing", "memfd_create", remedy, |facts| facts.trials[0].result = Err(error));
    }
    // All trials succeed on this machine, or else its sandbox causes a finding.
    assert!(mpgpu_contexts::doctor::trials::all().len() >= 6);
}

#[test]
fn host_memory_that_is_slow_says_why() {
    one(Level::Slow, "memory", "huge pages are off", "transparent_hugepage", |facts| facts.host.huge = Some("never".into()));
    one(Level::Unknown, "memory", "huge page setting", "/sys", |facts| facts.host.huge = None);
    one(Level::Slow, "memory", "1 of 2 NUMA nodes", "--bind-to none", |facts| facts.host.nodes = (2, 1));
    one(Level::Slow, "memory", "mbind", "SYS_NICE", |facts| facts.host.placing = Err("not permitted".into()));
    assert_eq!(complaints(|facts| (facts.host.nodes, facts.host.placing) = ((1, 1), Err("not permitted".into()))), []);
}

#[test]
fn stale_files_are_slow_where_they_are_kept_and_refused_where_they_are_named() {
    let file = |what, is_named| File { what, path: "a.toml".into(), is_named, state: Err("it was made with driver 570".into()) };
    one(Level::Slow, "probe", "the file is out of date and not used: a.toml: it was made with driver 570", "mpgpu probe", |facts| {
        facts.files = vec![file("probe", false)];
    });
    one(Level::Refused, "topology", "contexts cannot be created: a.toml", "MPGPU_TOPOLOGY", |facts| {
        facts.files = vec![file("topology", true)]
    });
    one(Level::Refused, "tuning", "contexts cannot be created: a.toml", "MPGPU_TUNING_FILE", |facts| {
        facts.files.push(file("tuning", true))
    });
    one(Level::Slow, "probe", "assumed", "mpgpu probe", |facts| facts.files.clear());
    one(Level::Refused, "settings", "MPGPU_ENGINE=x", "environment.md", |facts| {
        facts.settings = Err("MPGPU_ENGINE=x: must be one of auto, stream".into())
    });
    one(Level::Slow, "settings", "did you mean MPGPU_ENGINE?", "correct its name", |facts| {
        facts.settings = Ok(vec!["MPGPU_ENGIN is not a variable that mpgpu reads; did you mean MPGPU_ENGINE?".into()])
    });
}

#[test]
fn a_launcher_is_known_by_its_variables() {
    let of = |pairs: &'static [(&'static str, &'static str)]| {
        rank(move |name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    };
    assert_eq!(of(&[("PATH", "/bin")]), None);
    let known = |number, local, variable| Some(Rank { number, local, variable });
    assert_eq!(of(&[("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")]), known(5, Some(1), "OMPI_COMM_WORLD_RANK"));
    assert_eq!(of(&[("PMI_RANK", "2")]), known(2, None, "PMI_RANK"));
    // Under mpirun inside of a Slurm job, the variables of mpirun take precedence.
    assert_eq!(of(&[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("PMIX_RANK", "3")]), known(3, None, "PMIX_RANK"));
    assert_eq!(of(&[("SLURM_PROCID", "x")]), None);
}
