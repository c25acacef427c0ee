//! Generates random machines, batches of transfers and planner options from one seed, for property tests.
#![allow(dead_code, unused_imports)]

mod campaign;

pub use self::campaign::{Random, is_long, setting};

use mpgpu_core::plan::{Engine, Options, Passing, Relays, Shape, Tuned};
use mpgpu_core::topology::MemoryKind;
use mpgpu_core::topology::{Costs, DeviceId, Link, LinkId, LinkKind, Machine, Node, NodeId, NodeKind, SharedResource, Topology};
use proptest::prelude::ProptestConfig;

/// Returns the resident memory of this process in bytes.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    status.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Returns the configuration of a property test with `usual` cases, or 100 times as many with `LONG_TESTS=1`. A failing case is printed
/// with its seed, by which it can be repeated. Nothing is written into the source tree.
pub fn config(usual: u32) -> ProptestConfig {
    ProptestConfig { cases: if is_long() { usual * 100 } else { usual }, failure_persistence: None, ..ProptestConfig::default() }
}

/// Returns a random topology of 2 to `most` devices. Some pairs of devices have no link, and some links have only one direction or
/// asymmetric capacities. Sometimes there are a switch and shared resources. Fixed costs range from zero to large.
pub fn topology(random: &mut Random, most: u64) -> Topology {
    let hosts = 1 + random.below(2) as u32;
    let gpus = 1 + random.below(most - u64::from(hosts)) as u32;
    let mut nodes: Vec<Node> = (0..gpus).map(|i| Node { name: format!("gpu{i}"), kind: NodeKind::Gpu }).collect();
    nodes.extend((0..hosts).map(|i| Node { name: format!("host{i}"), kind: NodeKind::Host }));
    let mut links = Vec::new();
    let mut link = |random: &mut Random, from: u32, to: u32, kind, slowest: f64| {
        let bandwidth = slowest * (1.0 + random.below(100) as f64 / 10.0);
        let latency = random.below(4) as f64 * 1e-7;
        links.push(Link { from: NodeId(from), to: NodeId(to), kind, bandwidth, latency });
    };
    let wired = 20 + random.below(80);
    for from in 0..gpus {
        for to in 0..gpus {
            if from != to && random.chance(wired) {
                link(random, from, to, LinkKind::Nvlink, 20e9);
            }
        }
        for host in gpus..gpus + hosts {
            if random.chance(90) {
                link(random, from, host, LinkKind::Pcie, 5e9);
            }
            if random.chance(90) {
                link(random, host, from, LinkKind::Pcie, 5e9);
            }
        }
    }
    for from in gpus..gpus + hosts {
        for to in gpus..gpus + hosts {
            if from != to {
                link(random, from, to, LinkKind::Host, 10e9);
            }
        }
    }
    if random.chance(30) {
        let switch = nodes.len() as u32;
        nodes.push(Node { name: "switch".into(), kind: NodeKind::Switch { peer: random.chance(70) } });
        for gpu in 0..gpus {
            link(random, gpu, switch, LinkKind::Pcie, 10e9);
            link(random, switch, gpu, LinkKind::Pcie, 10e9);
        }
    }
    let shared = (0..random.below(3))
        .filter_map(|i| {
            let links: Vec<LinkId> = (0..links.len() as u32).filter(|_| random.chance(20)).map(LinkId).collect();
            (!links.is_empty()).then(|| SharedResource {
                name: format!("shared{i}"),
                capacity: 10e9 * (1 + random.below(20)) as f64,
                staged: random.chance(30).then(|| 10e9 * (1 + random.below(20)) as f64),
                links,
            })
        })
        .collect();
    // Without fixed costs even a transfer of a few kilobytes uses several paths. With high costs no transfer does.
    let scale = [0.0, 1e-9, 1e-7, 1e-6][random.below(4) as usize];
    let costs = Costs {
        copy: 6.0 * scale,
        issue: 2.0 * scale,
        chunk_via_host: 4.0 * scale,
        chunk_via_gpu: 3.0 * scale,
        fork_join_staged: 4.0 * scale,
        fork_join_gpus: 5.0 * scale,
        fork_join_issue: 4.0 * scale,
        hand_over: 5.0 * scale,
        // The value makes it worthwhile to pull data for one or two copies, but not for many.
        pull: 1.5 * scale,
        graph_launch: 2.0 * scale,
        graph_node: scale,
        batch: 9.0 * scale,
        batch_segment: scale / 2.0,
        kernel: 9.0 * scale,
        kernel_segment: scale / 10.0,
        kernel_efficiency: 0.9,
        graph_instantiate: scale,
        graph_gap: 6.0 * scale,
        scattered: 0.6,
        // With a driver that is slow for pageable memory, threads are worthwhile.
        pageable_to_gpu: [0.001, 0.2][random.below(2) as usize],
        pageable_from_gpu: [0.001, 0.3][random.below(2) as usize],
        thread_copy: 0.14,
    };
    Topology { name: "random".into(), description: String::new(), nodes, links, shared, costs }
}

/// Returns a random size from 0 to `most` bytes. It is often a special case: 0, 1, odd, or near a power of two.
pub fn size(random: &mut Random, most: u64) -> u64 {
    match random.below(8) {
        0 => 0,
        1 => 1,
        2 => random.below(64).min(most),
        3 => (1_u64 << random.below(u64::from(most.max(2).ilog2()))).saturating_add(random.below(3)).saturating_sub(1).min(most),
        _ => random.below(most + 1),
    }
}

/// Returns random planner options.
pub fn options(random: &mut Random) -> Options {
    Options {
        engine: [Engine::Auto, Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel][random.below(5) as usize],
        max_paths: if random.chance(50) { u32::MAX } else { 1 + random.below(5) as u32 },
        host_path: random.chance(70),
        relays: if random.chance(70) { Relays::ALL } else { (0..8).filter(|_| random.chance(50)).collect() },
        chunk_bytes: random.chance(40).then(|| 4096 + random.below(1 << 16)),
        relay_chunks: random.chance(20).then(|| 1 + random.below(9) as u32),
        host_chunks: random.chance(20).then(|| 1 + random.below(9) as u32),
        min_bytes: random.chance(20).then(|| random.below(1 << 16)),
        staging_bytes: [1 << 14, 1 << 16, 1 << 20, 64 << 20][random.below(4) as usize],
        threads: if random.chance(60) { 1 + random.below(12) as u32 } else { 0 },
        passing: Passing::default(),
        tuned: random.chance(30).then(|| Tuned {
            host_share: 50 + random.below(19_951) as u16,
            relay_share: 50 + random.below(19_951) as u16,
            several: random.chance(50),
        }),
        rejected: true,
    }
}

/// Returns a random machine, and a random batch of transfers with options for it.
pub fn machine_and_batch(random: &mut Random, most: u64) -> (Machine, Vec<Shape>, Options) {
    let machine = Machine::new(topology(random, 16)).expect("a random topology is well formed");
    let devices: Vec<DeviceId> = (0..machine.gpu_count()).map(DeviceId::gpu).chain((0..machine.host_count()).map(DeviceId::host)).collect();
    let count = [1, 1, 2, 3, 5, 12][random.below(6) as usize];
    let batch = (0..count)
        .map(|_| {
            let mut device = || devices[random.below(devices.len() as u64) as usize];
            let (src_device, dst_device) = (device(), device());
            let mut kind = |device: DeviceId| match device.is_host() {
                true if random.chance(30) => MemoryKind::Pageable,
                true => MemoryKind::Pinned,
                false => MemoryKind::Device,
            };
            let (src_kind, dst_kind) = (kind(src_device), kind(dst_device));
            Shape { source: 0, dst_device, src_device, dst_kind, src_kind, bytes: size(random, most) }
        })
        .collect();
    let options = options(random);
    (machine, batch, options)
}

/// Returns the presets whose rates were measured on the machine itself.
pub(crate) fn presets_with_figures() -> impl Iterator<Item = &'static str> {
    mpgpu_core::topology::preset_names().filter(|name| !mpgpu_core::topology::MODELLED_PRESETS.contains(name))
}
