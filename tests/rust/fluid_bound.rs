//! Compares plans with a lower bound of the time, on random machines with direct links between GPUs. The bound ("fluid bound") is the time
//! of the best fractional flow over all direct and two-hop paths without fixed costs. It is computed by a separate linear program, without
//! the planner's reductions.

use crate::common::Random;
use microlp::{ComparisonOp, LinearExpr, OptimizationDirection, Problem};
use mpgpu_core::plan::{Options, Shape, TimeBound, plan};
use mpgpu_core::topology::{
    DeviceId, Link, LinkId, LinkKind, Machine, MemoryKind, Node, NodeId, NodeKind, ResourceId, Route, SharedResource, Topology,
};
use mpgpu_measure::tune::{Score, Simulated};
use std::collections::BTreeMap;

/// Returns a random machine of 3 to 8 GPUs. Adjacent GPUs and some other pairs are connected by one to four NVLinks. Each GPU has a PCIe
/// link to one of one or two host memories.
pub(crate) fn wired(random: &mut Random) -> Machine {
    let (gpus, hosts) = (3 + random.below(6) as u32, 1 + random.below(2) as u32);
    let node = |name: String, kind| Node { name, kind };
    let mut nodes: Vec<Node> = (0..gpus).map(|i| node(format!("gpu{i}"), NodeKind::Gpu)).collect();
    nodes.extend((0..hosts).map(|i| node(format!("host{i}"), NodeKind::Host)));
    let mut links: Vec<Link> = Vec::new();
    let mut join = |a: u32, b: u32, kind, bandwidth| {
        for (from, to) in [(a, b), (b, a)] {
            links.push(Link { from: NodeId(from), to: NodeId(to), kind, bandwidth, latency: 0.0 });
        }
    };
    let joined = 40 + random.below(60);
    for a in 0..gpus {
        for b in a + 1..gpus {
            if b == a + 1 || random.chance(joined) {
                join(a, b, LinkKind::Nvlink, 25e9 * (1 + random.below(4)) as f64);
            }
        }
        join(a, gpus + a * hosts / gpus, LinkKind::Pcie, [12e9, 25e9, 50e9][random.below(3) as usize]);
    }
    if hosts == 2 {
        join(gpus, gpus + 1, LinkKind::Host, 40e9);
    }
    let topology =
        Topology { name: "wired".into(), description: String::new(), nodes, links, shared: Vec::new(), costs: Default::default() };
    Machine::new(topology).expect("a wired machine is well formed")
}

/// Returns 1 to 8 random transfers of 64 to 512 MiB between GPUs.
fn batch(random: &mut Random, machine: &Machine) -> Vec<Shape> {
    let gpus = u64::from(machine.gpu_count());
    let kind = MemoryKind::Device;
    let mut transfer = || {
        let src = random.below(gpus);
        let dst = (src + 1 + random.below(gpus - 1)) % gpus;
        let [src_device, dst_device] = [src, dst].map(|gpu| DeviceId::gpu(gpu as u32));
        Shape { source: 0, dst_device, src_device, dst_kind: kind, src_kind: kind, bytes: (64 + random.below(449)) << 20 }
    };
    (0..1 + transfer().bytes % 8).map(|_| transfer()).collect()
}

/// Returns the time in seconds of the best fractional flow.
fn fluid_bound(machine: &Machine, batch: &[Shape]) -> f64 {
    const UNIT: f64 = 1e9;
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let time = problem.add_var(1.0, (0.0, f64::INFINITY));
    let mut loads: Vec<LinearExpr> = machine.resources().iter().map(|_| LinearExpr::empty()).collect();
    for shape in batch {
        let (src, dst) = (shape.src_device, shape.dst_device);
        let direct = machine.route(src, dst).map(|route| vec![route]);
        let relayed = machine.devices().filter(|via| ![src, dst].contains(via));
        let relayed = relayed.filter_map(|via| Some(vec![machine.route(src, via)?, machine.route(via, dst)?]));
        let paths: Vec<Vec<&Route>> = direct.into_iter().chain(relayed).collect();
        let mut all = LinearExpr::empty();
        for path in paths {
            let bytes = problem.add_var(0.0, (0.0, f64::INFINITY));
            all.add(bytes, 1.0);
            let mut draws: BTreeMap<u32, f64> = BTreeMap::new();
            for resource in path.iter().flat_map(|route| &route.resources) {
                *draws.entry(resource.0).or_default() += UNIT / machine.resources()[resource.0 as usize].capacity;
            }
            draws.into_iter().for_each(|(resource, draw)| loads[resource as usize].add(bytes, draw));
        }
        problem.add_constraint(all, ComparisonOp::Eq, shape.bytes as f64 / UNIT);
    }
    for mut load in loads {
        load.add(time, -1.0);
        problem.add_constraint(load, ComparisonOp::Le, 0.0);
    }
    problem.solve().expect("solvable").into_solution().expect("solved").var_value(time)
}

/// Returns the time in seconds of the best fractional flow over paths with any number of relays, as a flow of each source over all pairs of
/// devices.
fn flow_bound(machine: &Machine, batch: &[Shape]) -> f64 {
    const UNIT: f64 = 1e9;
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let time = problem.add_var(1.0, (0.0, f64::INFINITY));
    let mut loads: Vec<LinearExpr> = machine.resources().iter().map(|_| LinearExpr::empty()).collect();
    // No copy engine copies between two host memories.
    let is_pair = |(from, to): &(DeviceId, DeviceId)| from != to && !(from.is_host() && to.is_host());
    let pairs = || machine.devices().flat_map(|from| machine.devices().map(move |to| (from, to))).filter(is_pair);
    for src in machine.devices().filter(|src| batch.iter().any(|shape| shape.src_device == *src)) {
        let mut edges = Vec::new();
        for (from, to) in pairs() {
            let Some(route) = machine.route(from, to) else { continue };
            let flow = problem.add_var(0.0, (0.0, f64::INFINITY));
            for resource in &route.resources {
                loads[resource.0 as usize].add(flow, UNIT / machine.resources()[resource.0 as usize].capacity);
            }
            edges.push((from, to, flow));
        }
        for node in machine.devices().filter(|node| *node != src) {
            let mut left = LinearExpr::empty();
            for (from, to, flow) in &edges {
                let sign = f64::from(i8::from(*to == node) - i8::from(*from == node));
                if sign != 0.0 {
                    left.add(*flow, sign);
                }
            }
            let wanted = batch.iter().filter(|shape| shape.src_device == src && shape.dst_device == node).map(|shape| shape.bytes as f64);
            problem.add_constraint(left, ComparisonOp::Eq, wanted.sum::<f64>() / UNIT);
        }
    }
    for mut load in loads {
        load.add(time, -1.0);
        problem.add_constraint(load, ComparisonOp::Le, 0.0);
    }
    problem.solve().expect("solvable").into_solution().expect("solved").var_value(time)
}

#[test]
fn the_bound_of_a_plan_is_that_of_the_largest_flow_and_its_limits_are_busy_all_the_time() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let machine = wired(&mut random);
        let batch = batch(&mut random, &machine);
        let (own, flow) = (TimeBound::new(&machine, &batch), flow_bound(&machine, &batch));
        assert!((own.seconds / flow - 1.0).abs() < 0.01, "{seed}: {} against {flow}", own.seconds);
        let parts: f64 = own.limits.iter().map(|(_, part)| part).sum();
        assert!((0.9..1.001).contains(&parts), "{seed}: {:?}", own.limits);
        // If the capacities of the limiting resources are doubled, the bound decreases. If all other capacities are doubled, it does not.
        let limits = |id: ResourceId| own.limits.iter().any(|(limit, _)| *limit == id);
        let others = TimeBound::new(&machine.scaled(|id| if limits(id) { 1.0 } else { 2.0 }), &batch).seconds;
        let twice = TimeBound::new(&machine.scaled(|id| if limits(id) { 2.0 } else { 1.0 }), &batch).seconds;
        assert!(others > 0.98 * own.seconds && twice < own.seconds, "{seed}: {own:?}, {others}, {twice}");
    }
}

#[test]
fn plans_of_random_wired_machines_are_near_the_fluid_bound_and_no_slower_than_one_path() {
    let (mut predicted, mut simulated) = (Vec::new(), Vec::new());
    for seed in 0..60 {
        let mut random = Random(seed);
        let machine = wired(&mut random);
        let batch = batch(&mut random, &machine);
        let several = plan(&machine, &batch, &Options::default()).unwrap_or_else(|e| panic!("{seed}: {e}"));
        let single = plan(&machine, &batch, &Options { max_paths: 1, ..Options::default() }).unwrap_or_else(|e| panic!("{seed}: {e}"));
        let bound = fluid_bound(&machine, &batch);
        let own = several.bound(&machine).seconds;
        assert!(own <= bound * (1.0 + 1e-6), "{seed}: {own} is said to be the least, and {bound} can be done");
        let seconds = |plan| Simulated { machine: &machine }.seconds(plan).unwrap_or_else(|e| panic!("{seed}: {e}"));
        let taken = seconds(&several);
        assert!(several.predicted > own * (1.0 - 1e-6) && taken > own * (1.0 - 1e-6), "{seed}: faster than the bound {own}");
        assert!(taken <= seconds(&single) * 1.001, "{seed}: slower than one path\n{}", several.describe(&machine));
        predicted.push(several.predicted / bound - 1.0);
        simulated.push(taken / bound - 1.0);
    }
    for over in [&mut predicted, &mut simulated] {
        over.sort_by(f64::total_cmp);
    }
    let figures = |over: &[f64]| (over[over.len() / 2], over[over.len() - 1]);
    println!("over the bound, median and worst: predicted {:?}, simulated {:?}", figures(&predicted), figures(&simulated));
    let ((median, worst), (run, _)) = (figures(&predicted), figures(&simulated));
    assert!(median < 0.08 && worst < 0.2 && run < 0.08, "median {median}, worst {worst}, simulated median {run}");
}

/// Returns the machine with a random combined capacity for both directions of each host memory, and with a separate rate for data that is
/// staged there.
fn with_memory(machine: &Machine, random: &mut Random) -> Machine {
    let mut topology = machine.topology().clone();
    for (number, node) in (0..).zip(&topology.nodes).filter(|(_, node)| node.kind == NodeKind::Host) {
        let links = (0..).zip(&topology.links).filter(|(_, link)| [link.from, link.to].contains(&NodeId(number)));
        let capacity = 30e9 + 10e9 * random.below(10) as f64;
        topology.shared.push(SharedResource {
            name: format!("{}.memory", node.name),
            capacity,
            staged: [None, Some(0.7 * capacity), Some(1.6 * capacity)][random.below(3) as usize],
            links: links.map(|(link, _)| LinkId(link)).collect(),
        });
    }
    Machine::new(topology).expect("well formed")
}

#[test]
fn no_plan_is_done_before_its_bound() {
    let machines = if crate::common::is_long() { 2000 } else { 150 };
    for seed in 0..machines {
        let mut random = Random(seed);
        let machine = wired(&mut random);
        let machine = with_memory(&machine, &mut random);
        let devices: Vec<DeviceId> = machine.devices().collect();
        let mut any = || devices[random.below(devices.len() as u64) as usize];
        let mut batch: Vec<Shape> = (0..1 + seed % 6)
            .map(|_| (any(), any()))
            .filter(|(src, dst)| src != dst)
            .map(|(src_device, dst_device)| Shape {
                source: 0,
                dst_device,
                src_device,
                dst_kind: kind(dst_device),
                src_kind: kind(src_device),
                bytes: 0,
            })
            .collect();
        // In half of the cases, some transfers have the same source.
        let is_shared = random.below(2) == 1;
        for shape in &mut batch {
            shape.bytes = if is_shared { 64 << 20 } else { 1 << (12 + random.below(18)) };
            shape.source = if is_shared { (shape.src_device.0 + 10) as u32 } else { 0 };
        }
        let Ok(plan) = plan(&machine, &batch, &Options { staging_bytes: 1 << 30, ..Options::default() }) else { continue };
        let bound = plan.bound(&machine).seconds;
        let taken = Simulated { machine: &machine }.seconds(&plan).unwrap_or_else(|e| panic!("{seed}: {e}"));
        assert!(taken >= bound * (1.0 - 1e-9), "{seed}: {taken} s, and {bound} is said to be the least:\n{}", plan.describe(&machine));
    }
}

fn kind(device: DeviceId) -> MemoryKind {
    if device.is_host() { MemoryKind::Pinned } else { MemoryKind::Device }
}

/// Returns a machine of `gpus` GPUs behind one switch, with ports of 800 GB/s and no other links.
fn behind_one_switch(gpus: u32) -> Machine {
    let mut nodes: Vec<Node> = (0..gpus).map(|gpu| Node { name: format!("gpu{gpu}"), kind: NodeKind::Gpu }).collect();
    nodes.push(Node { name: "nvswitch".into(), kind: NodeKind::Switch { peer: true } });
    let link = |from, to| Link { from: NodeId(from), to: NodeId(to), kind: LinkKind::Nvlink, bandwidth: 800e9, latency: 0.0 };
    let links = (0..gpus).flat_map(|gpu| [link(gpu, gpus), link(gpus, gpu)]).collect();
    let (name, description, shared) = ("switched".into(), String::new(), Vec::new());
    Machine::new(Topology { name, description, nodes, links, shared, costs: Default::default() }).expect("well formed")
}

#[test]
fn the_bound_of_ports_is_exact_at_any_size() {
    let shape = |src: u32, dst: u32, bytes: u64, source: u32| {
        let [src_device, dst_device] = [src, dst].map(DeviceId::gpu);
        Shape { source, dst_device, src_device, dst_kind: MemoryKind::Device, src_kind: MemoryKind::Device, bytes }
    };
    for gpus in [8, 64, 72, 144] {
        let machine = behind_one_switch(gpus);
        let pairs = || (0..gpus).flat_map(|src| (0..gpus).filter(move |dst| *dst != src).map(move |dst| (src, dst)));
        let ring: Vec<Shape> = (0..gpus).map(|gpu| shape(gpu, (gpu + 1) % gpus, 800_000_000, 0)).collect();
        let all: Vec<Shape> = pairs().map(|(src, dst)| shape(src, dst, 800_000, 0)).collect();
        let broadcast: Vec<Shape> = (1..gpus).map(|gpu| shape(0, gpu, 800_000_000, 1)).collect();
        let scatter: Vec<Shape> = (1..gpus).map(|gpu| shape(0, gpu, 800_000, 0)).collect();
        let gather: Vec<Shape> = pairs().map(|(src, dst)| shape(src, dst, 800_000, src + 1)).collect();
        for (name, batch, seconds) in [
            ("ring", ring, 1e-3),
            ("all-to-all", all, 1e-6 * f64::from(gpus - 1)),
            ("broadcast", broadcast, 1e-3),
            ("scatter", scatter, 1e-6 * f64::from(gpus - 1)),
            ("all-gather", gather, 1e-6 * f64::from(gpus - 1)),
        ] {
            let bound = TimeBound::new(&machine, &batch);
            assert!((bound.seconds / seconds - 1.0).abs() < 1e-6 && !bound.limits.is_empty(), "{name}, {gpus} GPUs: {bound:?}");
        }
    }
}

#[test]
fn one_gpu_that_sends_over_all_its_links_is_bounded_by_their_sum() {
    let machine = Machine::new(mpgpu_core::topology::preset("gb200-nvl72").expect("a preset")).expect("well formed");
    let to_all: Vec<Shape> = (1..72)
        .map(|gpu| Shape {
            source: 1,
            dst_device: DeviceId::gpu(gpu),
            src_device: DeviceId::gpu(0),
            dst_kind: MemoryKind::Device,
            src_kind: MemoryKind::Device,
            bytes: 1 << 30,
        })
        .collect();
    let bound = TimeBound::new(&machine, &to_all).seconds;
    let port = f64::from(1 << 30) / (792e9 + 225e9);
    assert!(bound >= port * (1.0 - 1e-9), "{bound} s, and {port} s for one port");
}

/// Tests that the search for paths ends and finds the bound on any machine: with links in one direction, with shared resources and staged
/// rates of all kinds, and with dual prices that are partly zero.
#[test]
fn the_bound_and_trees_of_any_machine_are_found() {
    let first = crate::common::setting("TEST_SEED", 0);
    for seed in first..first + 300 {
        let mut random = Random(seed);
        let (machine, _, options) = crate::common::machine_and_batch(&mut random, 64 << 20);
        // The first and the last device each send to some others.
        let mut batch = Vec::new();
        for src_device in machine.devices().take(1).chain(machine.devices().last()) {
            for dst_device in machine.devices().filter(|dst| *dst != src_device).take(3) {
                let (dst_kind, src_kind, source) = (kind(dst_device), kind(src_device), (src_device.0 + 10) as u32);
                batch.push(Shape { source, dst_device, src_device, dst_kind, src_kind, bytes: 1 << 20 });
            }
        }
        let bound = TimeBound::new(&machine, &batch).seconds;
        if let Ok(plan) = plan(&machine, &batch, &Options { staging_bytes: 1 << 30, ..options }) {
            assert!(plan.predicted > 0.0 && bound >= 0.0, "{seed}");
        }
    }
}
