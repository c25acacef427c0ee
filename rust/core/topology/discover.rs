//! Builds a topology from the data that a driver reports about a compute node.
//!
//! The module does not call the driver: a backend queries the driver, and this module converts the answers to links and capacities.
//! Properties that cannot be queried, such as how GPUs share the path to host memory, are assumed. The topology's description lists both
//! reported and assumed properties. Capacities are nominal values multiplied by the fractions that were measured on similar machines. The
//! preset files name the sources of these fractions.

use super::{Costs, Link, LinkId, LinkKind, Node, NodeId, NodeKind, SharedResource, Topology};

/// Data that a driver reports about a compute node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// GPUs of the node, in the order of their device numbers.
    pub gpus: Vec<SeenGpu>,
    /// Ordered pairs of GPUs in which the first GPU can access the second GPU's memory directly.
    pub peers: Vec<(u32, u32)>,
}

/// Data that a driver reports about one GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeenGpu {
    /// Product name of the GPU.
    pub name: String,
    /// Compute capability of the GPU, for example (9, 0).
    pub capability: (u32, u32),
    /// PCIe link of the GPU; `None` if the driver does not report it.
    pub pcie: Option<Pcie>,
    /// Active NVLinks of the GPU; `None` if the driver does not report them, empty if there are none.
    pub nvlinks: Option<Vec<Nvlink>>,
}

/// PCIe link as reported by a driver.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Pcie {
    /// Generation of PCI Express, for example 5.
    pub generation: u32,
    /// Number of PCIe lanes of the link.
    pub width: u32,
}

/// One NVLink of a GPU.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Nvlink {
    /// NVLink version, from 1 to 5.
    pub version: u32,
    /// Device at the other end of the link.
    pub remote: Remote,
}

/// Device at the other end of an NVLink.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Remote {
    /// GPU of this process, with its number.
    Gpu(u32),
    /// Device that is not a GPU of this process: a switch, or a GPU that is not visible to this process.
    Other,
    /// Device that the driver does not identify.
    Unknown,
}

/// Returns the bandwidth of copies by copy engines over one NVLink in one direction, in bytes/s. It is the specified bandwidth times the
/// fraction reached in measurements: 47.9 of 50 GB/s over two NVLink 2 (`beluga`), 396 of 450 GB/s over 18 NVLink 4 (`hgx-h200`). Later
/// versions are assumed to reach the same fraction as NVLink 4.
fn nvlink_bandwidth(version: u32) -> f64 {
    match version {
        0 | 1 => 20e9 * 0.958,
        2 | 3 => 25e9 * 0.958,
        4 => 25e9 * 0.88,
        _ => 50e9 * 0.88,
    }
}

/// Returns the bandwidth of copies over a PCIe link in one direction, in bytes/s. It is the specified bandwidth of all lanes times the
/// fraction measured with 16 lanes: 12 of 15.75 GB/s (`beluga`), 26.3 of 31.5 GB/s (`pcie-4`), 55 of 63 GB/s (`hgx-h200`).
fn pcie_bandwidth(link: Pcie) -> f64 {
    let lane = match link.generation {
        0 | 1 => 0.25e9 * 0.76,
        2 => 0.5e9 * 0.76,
        3 => 0.985e9 * 0.76,
        4 => 1.969e9 * 0.835,
        5 => 3.938e9 * 0.873,
        _ => 7.563e9 * 0.873,
    };
    lane * f64::from(link.width.max(1))
}

/// Returns the bandwidths at which all GPUs together read from and write to host memory, in bytes/s, for a PCIe generation. The values were
/// measured on an HGX H200 or follow from a memory specification (`pcie-4`, `beluga`).
fn host_bandwidth(generation: u32) -> (f64, f64) {
    match generation {
        0..=3 => (128e9, 128e9),
        4 => (204.8e9, 204.8e9),
        _ => (153e9, 97e9),
    }
}

/// Total bandwidth of an NVLink port in both directions, divided by its bandwidth in one direction. Measured: 778 of 792 GB/s (`hgx-h200`).
const NVLINK_BOTH: f64 = 778.0 / 396.0;
/// Total bandwidth of a PCIe link in both directions, divided by its bandwidth in one direction. Long copies reach 99.8 of 110 GB/s
/// (`hgx-h200`); opposite pipelines of chunks on one link reach less. On two H200, plans computed for 99.8 and 92 GB/s were up to 7 %
/// slower than direct copies. Plans for 86 GB/s were 3 to 6 % faster at 256 and 512 MiB but not at 1 GiB, and plans for 82 GB/s were 4 to 7
/// % faster at all three sizes.
const PCIE_BOTH: f64 = 82.0 / 55.0;
/// Idle time of an internal stream between two chunks, in seconds. If streams execute a plan, two events between GPUs order every chunk:
/// its arrival, and the release of its staging slot. Each event takes 4.5 us. With an idle time of 4.5 us, plans for two H200 assigned too
/// much data to the path through host memory, and used this path even for small transfers. These plans reached 0.84 of the direct copy's
/// speed at 16 MiB and 1.02 at 256 MiB. With 9 us they reached 1.00 and 1.09.
const CHUNK: f64 = 9e-6;

/// Returns the topology of the compute node that `seen` describes.
pub fn topology(seen: &Seen) -> Topology {
    let mut known = Vec::new();
    let mut assumed = Vec::new();
    let count = seen.gpus.len() as u32;
    let mut nodes: Vec<Node> = (0..count).map(|i| Node { name: format!("gpu{i}"), kind: NodeKind::Gpu }).collect();
    nodes.push(Node { name: "host0".into(), kind: NodeKind::Host });
    let host = NodeId(count);
    let root = NodeId(count + 1);
    let mut wires = Wires::default();

    let wired = wire_nvlinks(seen, &mut nodes, &mut wires, root, &mut known, &mut assumed);
    let groups = if wired { Vec::new() } else { groups_of_peers(seen) };

    let mut generation = 0;
    for (index, gpu) in seen.gpus.iter().enumerate() {
        let link = gpu.pcie.unwrap_or(assumed_pcie(gpu.capability));
        generation = generation.max(link.generation);
        let bandwidth = pcie_bandwidth(link);
        let group = groups.iter().position(|group| group.contains(&(index as u32)));
        // Node to which the GPU's PCIe link leads: the switch of its group, or `root0` if the GPU is in no group. Switch nodes directly
        // follow `root0`, as in `wire_nvlinks`.
        let above = group.map_or(root, |group| NodeId(root.0 + 1 + group as u32));
        wires.port(format!("gpu{index}.pcie"), NodeId(index as u32), above, LinkKind::Pcie, bandwidth, PCIE_BOTH);
    }
    if seen.gpus.iter().all(|gpu| gpu.pcie.is_some()) {
        known.push("PCIe links");
    } else {
        assumed.push("PCIe links by the GPUs' generation");
    }
    // Copies between GPUs over PCIe pass through the root complex only if the driver reports peer access and the GPUs have no NVLinks.
    let over_pcie = !wired && !seen.peers.is_empty() && groups.is_empty();
    for (number, group) in groups.iter().enumerate() {
        // The switch is assumed to have enough bandwidth for all of its GPUs, because the driver does not report its bandwidth.
        let sum = wires.links.iter().filter(|link| group.contains(&link.from.0)).map(|link| link.bandwidth).sum();
        wires.pair(NodeId(root.0 + 1 + number as u32), root, LinkKind::Pcie, sum, sum);
        nodes.push(Node { name: format!("pcie{number}"), kind: NodeKind::Switch { peer: true } });
    }
    if !groups.is_empty() {
        assumed.push("one PCIe switch above the GPUs that reach each other");
    }
    nodes.insert(root.0 as usize, Node { name: "root0".into(), kind: NodeKind::Switch { peer: over_pcie } });
    let (read, write) = host_bandwidth(generation);
    wires.pair(host, root, LinkKind::Host, read, write);
    assumed.push("one path to host memory for all GPUs, and its capacity");

    let name = seen.gpus.first().map_or("no GPU", |gpu| gpu.name.as_str());
    let mut description = format!("{count} x {name}; seen: {}", list(&known));
    if !assumed.is_empty() {
        description += &format!("; assumed: {}", list(&assumed));
    }
    Topology {
        name: "discovered".into(),
        description,
        nodes,
        links: wires.links,
        shared: wires.shared,
        // Measured times: an operation of a staged path takes 2.6 to 2.8 us, including its events (two H200, 2026-11-21). Plans of two
        // paths took 7 us longer than modelled without `fork_join_staged`, at 32 to 64 MiB and for any division of the data. Two copies of
        // 4 to 16 MiB by two GPUs, forked and joined, took 9.6 to 9.8 us longer than one copy, including 2.2 us to issue the second one. A
        // signal between two processes, set and awaited by stream operations, takes 7.7 us one way (docs/reference/waiting.md). An isolated
        // kernel is launched as a graph. Including the launch, 26 messages of 147 kB in total took 8.1 us, and 2 messages of 64 KiB in both
        // directions 9.1 us.
        costs: Costs {
            issue: 2.7e-6,
            chunk_via_host: CHUNK,
            chunk_via_gpu: CHUNK,
            fork_join_staged: 7e-6,
            fork_join_gpus: 7.5e-6,
            hand_over: 7.7e-6,
            kernel: 7.4e-6,
            ..Costs::default()
        },
    }
}

fn list(items: &[&str]) -> String {
    if items.is_empty() { "nothing".into() } else { items.join(", ") }
}

/// Returns the PCIe link that a GPU of this compute capability usually has.
fn assumed_pcie((major, _): (u32, u32)) -> Pcie {
    let generation = match major {
        0..8 => 3,
        8 => 4,
        _ => 5,
    };
    Pcie { generation, width: 16 }
}

/// Returns groups of GPUs whose members have peer access to each other and to no other GPU, for example the GPUs of one socket. Returns no
/// groups if all GPUs have access, if no GPUs have access, or if the pairs with access do not form such groups.
fn groups_of_peers(seen: &Seen) -> Vec<Vec<u32>> {
    let count = seen.gpus.len() as u32;
    let group_of = |a: u32| -> Vec<u32> { (0..count).filter(|b| a == *b || seen.peers.contains(&(a, *b))).collect() };
    let mut groups: Vec<Vec<u32>> = (0..count).map(group_of).collect();
    let closed = (0..count).all(|a| groups[a as usize].iter().all(|b| groups[*b as usize] == groups[a as usize]));
    groups.sort_unstable();
    groups.dedup();
    if closed && groups.len() > 1 && groups.len() < count as usize { groups } else { Vec::new() }
}

#[derive(Default)]
struct Wires {
    links: Vec<Link>,
    shared: Vec<SharedResource>,
}

impl Wires {
    fn pair(&mut self, a: NodeId, b: NodeId, kind: LinkKind, there: f64, back: f64) -> [LinkId; 2] {
        let first = self.links.len() as u32;
        self.links.push(Link { from: a, to: b, kind, bandwidth: there, latency: 0.0 });
        self.links.push(Link { from: b, to: a, kind, bandwidth: back, latency: 0.0 });
        [LinkId(first), LinkId(first + 1)]
    }

    /// Adds one link in each direction between two nodes, and a shared resource that limits both links together to `both` times the
    /// bandwidth of one link.
    fn port(&mut self, name: String, a: NodeId, b: NodeId, kind: LinkKind, bandwidth: f64, both: f64) {
        let links = self.pair(a, b, kind, bandwidth, bandwidth).to_vec();
        self.shared.push(SharedResource { name, capacity: bandwidth * both, staged: None, links });
    }
}

/// Adds the NVLinks of all GPUs to the topology, and the NVSwitch to which they lead, if any. Returns true if a link was added.
fn wire_nvlinks(
    seen: &Seen,
    nodes: &mut Vec<Node>,
    wires: &mut Wires,
    root: NodeId,
    known: &mut Vec<&'static str>,
    assumed: &mut Vec<&'static str>,
) -> bool {
    let count = seen.gpus.len() as u32;
    let peers = |a: u32, b: u32| seen.peers.contains(&(a, b)) && seen.peers.contains(&(b, a));
    // If no NVLink of a GPU ends in a GPU of this process, the links lead to a switch, provided that every GPU has such links and all GPUs
    // reach each other. In a mesh, some links end in a GPU of this process, and the others in GPUs that are not visible.
    let into_switch = |gpu: &SeenGpu| -> Option<f64> {
        let links = gpu.nvlinks.as_ref()?;
        let mesh = links.iter().any(|link| matches!(link.remote, Remote::Gpu(_)));
        Some(links.iter().map(|link| nvlink_bandwidth(link.version)).sum::<f64>()).filter(|sum| *sum > 0.0 && !mesh)
    };
    let all_reach = count > 1 && (0..count).all(|a| (0..count).all(|b| a == b || peers(a, b)));
    let ports: Option<Vec<f64>> = seen.gpus.iter().map(into_switch).collect();
    // More than two Hopper GPUs that all reach each other are assumed to be connected by NVSwitches (HGX) if NVML is not available.
    let blind = seen.gpus.iter().all(|gpu| gpu.nvlinks.is_none());
    let hopper = count > 2 && seen.gpus.iter().all(|gpu| gpu.capability == (9, 0));
    let ports = ports.or_else(|| (blind && hopper).then(|| vec![18.0 * nvlink_bandwidth(4); count as usize]));
    if let Some(ports) = ports.filter(|_| all_reach) {
        if blind {
            assumed.push("NVSwitch between Hopper GPUs");
        } else {
            known.push("NVLinks");
            if seen.gpus.iter().flat_map(|gpu| gpu.nvlinks.iter().flatten()).any(|link| link.remote == Remote::Unknown) {
                assumed.push("NVSwitch at their far end");
            } else {
                known.push("NVSwitch");
            }
        }
        // The switch follows `root0`, which comes first so that its number is known in advance.
        let switch = NodeId(root.0 + 1);
        nodes.push(Node { name: "nvswitch".into(), kind: NodeKind::Switch { peer: true } });
        for (index, port) in ports.into_iter().enumerate() {
            wires.port(format!("gpu{index}.nvlink"), NodeId(index as u32), switch, LinkKind::Nvlink, port, NVLINK_BOTH);
        }
        return true;
    }
    let mut any = false;
    for a in 0..count {
        for b in a + 1..count {
            let links = seen.gpus[a as usize].nvlinks.iter().flatten().filter(|link| link.remote == Remote::Gpu(b));
            let bandwidth: f64 = links.map(|link| nvlink_bandwidth(link.version)).sum();
            if bandwidth > 0.0 && peers(a, b) {
                wires.pair(NodeId(a), NodeId(b), LinkKind::Nvlink, bandwidth, bandwidth);
                any = true;
            }
        }
    }
    if blind {
        assumed.push("no NVLink, because NVML is not available");
    } else {
        known.push("NVLinks");
    }
    any
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{DeviceId, Machine};

    fn seen(count: u32, links: impl Fn(u32) -> Option<Vec<Nvlink>>) -> Seen {
        let gpu = |i| SeenGpu { name: "H200".into(), capability: (9, 0), pcie: Some(Pcie { generation: 5, width: 16 }), nvlinks: links(i) };
        let peers = (0..count).flat_map(|a| (0..count).filter(move |b| *b != a).map(move |b| (a, b))).collect();
        Seen { gpus: (0..count).map(gpu).collect(), peers }
    }

    fn machine(seen: &Seen) -> Machine {
        Machine::new(topology(seen)).expect("a discovered topology is well formed")
    }

    fn bandwidth(machine: &Machine, from: DeviceId, to: DeviceId) -> Option<f64> {
        machine.route(from, to).map(|route| (route.bandwidth / 1e9).round())
    }

    #[test]
    fn links_that_end_in_no_gpu_are_a_switch() {
        let links = |remote| Some(vec![Nvlink { version: 4, remote }; 18]);
        for (remote, word) in [(Remote::Other, "seen: NVLinks, NVSwitch"), (Remote::Unknown, "assumed: NVSwitch")] {
            let machine = machine(&seen(2, |_| links(remote)));
            assert_eq!(bandwidth(&machine, DeviceId::gpu(0), DeviceId::gpu(1)), Some(396.0));
            assert_eq!(bandwidth(&machine, DeviceId::HOST, DeviceId::gpu(1)), Some(55.0));
            assert!(machine.topology().description.contains(word), "{}", machine.topology().description);
        }
    }

    #[test]
    fn links_between_gpus_are_a_mesh() {
        let mesh = |i: u32| {
            let to = |j| [Nvlink { version: 2, remote: Remote::Gpu(j) }; 2];
            Some((0..4).filter(|j| *j != i).flat_map(to).collect())
        };
        let machine = machine(&seen(4, mesh));
        assert_eq!(bandwidth(&machine, DeviceId::gpu(3), DeviceId::gpu(1)), Some(48.0));
        assert_eq!(machine.route(DeviceId::gpu(3), DeviceId::gpu(1)).expect("wired").links.len(), 1);
    }

    #[test]
    fn without_nvml_nothing_is_made_up_that_is_not_said() {
        let machine = machine(&seen(4, |_| None));
        assert!(machine.topology().description.contains("assumed: NVSwitch between Hopper GPUs"), "{}", machine.topology().description);
        assert_eq!(bandwidth(&machine, DeviceId::gpu(0), DeviceId::gpu(1)), Some(396.0));
    }

    #[test]
    fn where_some_pairs_have_access_over_pcie_the_others_have_no_route_but_through_the_host() {
        let mut sockets = seen(4, |_| Some(Vec::new()));
        sockets.peers.retain(|(a, b)| a / 2 == b / 2);
        let sockets = machine(&sockets);
        assert_eq!(bandwidth(&sockets, DeviceId::gpu(2), DeviceId::gpu(3)), Some(55.0));
        assert_eq!(sockets.route(DeviceId::gpu(1), DeviceId::gpu(2)), None);
        assert_eq!(bandwidth(&sockets, DeviceId::gpu(3), DeviceId::HOST), Some(55.0));
        assert_eq!(bandwidth(&sockets, DeviceId::HOST, DeviceId::gpu(0)), Some(55.0));
        assert!(sockets.topology().description.contains("one PCIe switch above"), "{}", sockets.topology().description);
        // One GPU separate from the others.
        let mut apart = seen(3, |_| Some(Vec::new()));
        apart.peers.retain(|(a, b)| *a > 0 && *b > 0);
        let apart = machine(&apart);
        assert_eq!(apart.route(DeviceId::gpu(0), DeviceId::gpu(2)), None);
        assert_eq!(bandwidth(&apart, DeviceId::gpu(1), DeviceId::gpu(2)), Some(55.0));
        // If the pairs with access form no groups, all GPUs are treated as having access to each other.
        let mut chain = seen(3, |_| Some(Vec::new()));
        chain.peers.retain(|(a, b)| a.abs_diff(*b) == 1);
        assert_eq!(bandwidth(&machine(&chain), DeviceId::gpu(0), DeviceId::gpu(2)), Some(55.0));
    }

    #[test]
    fn gpus_without_peer_access_have_no_route_but_through_the_host() {
        let mut alone = seen(2, |_| Some(Vec::new()));
        alone.peers.clear();
        let machine = machine(&alone);
        assert_eq!(machine.route(DeviceId::gpu(0), DeviceId::gpu(1)), None);
        assert_eq!(bandwidth(&machine, DeviceId::gpu(0), DeviceId::HOST), Some(55.0));
    }
}
