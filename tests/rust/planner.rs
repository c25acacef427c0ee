//! Tests the planner's decisions on known machines. Comments give the reason for each.

use mpgpu_core::model::{Flow, Issue, PathModel, finish};
use mpgpu_core::plan::{
    Engine, Lane, Mechanism, Op, Options, PathPlan, Place, Plan, PlanError, Reason, Relays, Ring, Shape, Tuned, plan, validate,
};
use mpgpu_core::topology::MemoryKind;
use mpgpu_core::topology::{DeviceId, Machine, Topology, preset, preset_names};
use mpgpu_measure::tune::{Campaign, Case, Score, Search, Simulated};
use std::collections::{BTreeMap, BTreeSet};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn machine(name: &str) -> Machine {
    Machine::new(preset(name).unwrap_or_else(|| panic!("preset {name}"))).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn shape(src: i32, dst: i32, bytes: u64) -> Shape {
    let kind = |device: i32| if device < 0 { MemoryKind::Pinned } else { MemoryKind::Device };
    Shape { source: 0, dst_device: DeviceId(dst), src_device: DeviceId(src), dst_kind: kind(dst), src_kind: kind(src), bytes }
}

/// Plans a batch of transfers, and checks properties that every plan must have.
fn planned(machine: &Machine, batch: &[Shape], options: &Options) -> Plan {
    let plan = plan(machine, batch, options).unwrap_or_else(|e| panic!("{e}"));
    validate(&plan.program, options.staging_bytes).unwrap_or_else(|e| panic!("{e}\n{}", plan.describe(machine)));
    assert!(plan.predicted <= plan.one_path, "slower than one path:\n{}", plan.describe(machine));
    for transfer in &plan.transfers {
        assert_eq!(transfer.paths.iter().map(|p| p.bytes).sum::<u64>(), transfer.shape.bytes);
    }
    plan
}

/// Returns the numbers of the GPUs through which data of a transfer passes, sorted.
fn relays(plan: &Plan, transfer: usize) -> Vec<i32> {
    let paths = plan.transfers[transfer].paths.iter();
    let vias = paths.flat_map(|p| p.earlier.iter().copied().chain(p.via)).filter(|via| !via.is_host()).map(|via| via.0);
    vias.collect::<BTreeSet<_>>().into_iter().collect()
}

fn through_host(plan: &Plan, transfer: usize) -> f64 {
    let host: u64 = plan.transfers[transfer].paths.iter().filter(|p| p.via.is_some_and(DeviceId::is_host)).map(|p| p.bytes).sum();
    host as f64 / plan.transfers[transfer].shape.bytes as f64
}

fn no_host() -> Options {
    Options { host_path: false, ..Options::default() }
}

#[test]
fn eight_bytes_are_one_plain_copy_everywhere() {
    for name in preset_names() {
        let machine = machine(name);
        for (src, dst) in [(0, 1), (1, 0), (-1, 0), (1, -1)] {
            let plan = planned(&machine, &[shape(src, dst, 8)], &Options::default());
            // GPUs without peer access have no route, because no copy engine can copy between them. Two copies through host memory are
            // needed.
            if machine.route(DeviceId(src), DeviceId(dst)).is_none() {
                assert_eq!((plan.program.ops.len(), through_host(&plan, 0)), (2, 1.0), "{name}");
                continue;
            }
            assert_eq!(plan.program.ops.len(), 1, "{name} {src} to {dst}:\n{}", plan.describe(&machine));
            assert_eq!(plan.program.ops[0].mechanism, Mechanism::Copy);
            assert_eq!(plan.transfers[0].paths[0].via, None);
        }
    }
}

#[test]
fn behind_an_nvswitch_no_gpu_relays() {
    for name in ["hgx-h200", "hgx-h100"] {
        let machine = machine(name);
        for bytes in [MIB, 64 * MIB, GIB] {
            let plan = planned(&machine, &[shape(0, 1, bytes)], &Options::default());
            assert_eq!(relays(&plan, 0), [0; 0], "{name}");
            let shared = plan.transfers[0].rejected.iter().filter(|r| matches!(r.reason, Reason::SharesDirect { .. })).count();
            assert_eq!(shared, 6, "every other GPU is ruled out by the port that it shares:\n{}", plan.describe(&machine));
        }
        let ring: Vec<Shape> = (0..8).map(|i| shape(i, (i + 1) % 8, 256 * MIB)).collect();
        let plan = planned(&machine, &ring, &Options::default());
        assert!((0..8).all(|i| relays(&plan, i).is_empty()));
    }
}

#[test]
fn the_host_carries_a_tenth_of_a_gigabyte_on_h200() {
    let machine = machine("hgx-h200");
    let plan = planned(&machine, &[shape(0, 1, GIB)], &Options::default());
    let share = through_host(&plan, 0);
    assert!((0.10..=0.115).contains(&share), "host share {share}\n{}", plan.describe(&machine));
}

#[test]
fn a_wired_mesh_uses_three_gpu_paths_and_the_host() {
    for name in ["beluga", "narval", "gh200-4"] {
        let machine = machine(name);
        let plan = planned(&machine, &[shape(0, 1, 512 * MIB)], &Options::default());
        assert_eq!(relays(&plan, 0), [2, 3], "{name}\n{}", plan.describe(&machine));
        assert!(plan.transfers[0].paths.iter().any(|p| p.via.is_none()));
        assert!(through_host(&plan, 0) > 0.0, "{name}\n{}", plan.describe(&machine));
    }
}

/// Returns for each ordered pair of GPUs the number of paths that use its link.
fn use_of_links(plan: &Plan) -> BTreeMap<(i32, i32), u32> {
    let mut used = BTreeMap::new();
    for transfer in &plan.transfers {
        let (src, dst) = (transfer.shape.src_device.0, transfer.shape.dst_device.0);
        for path in transfer.paths.iter() {
            match path.via {
                None => *used.entry((src, dst)).or_default() += 1,
                Some(via) => {
                    *used.entry((src, via.0)).or_default() += 1;
                    *used.entry((via.0, dst)).or_default() += 1;
                }
            }
        }
    }
    used
}

#[test]
fn a_ring_to_the_right_uses_two_paths_each_and_every_link_once() {
    // The expected numbers are from figure 7 of Sojoodi et al. 2024 (11 of 2026), without the host path.
    let machine = machine("beluga");
    let ring: Vec<Shape> = (0..4).map(|i| shape(i, (i + 1) % 4, 128 * MIB)).collect();
    let plan = planned(&machine, &ring, &no_host());
    let used = use_of_links(&plan);
    assert_eq!(used.len(), 12, "{}", plan.describe(&machine));
    assert!(used.values().all(|&times| times == 1), "{used:?}\n{}", plan.describe(&machine));
    assert!(plan.transfers.iter().all(|t| t.paths.len() == 2));
}

#[test]
fn the_host_path_leaves_the_rings_gpu_paths_alone() {
    let machine = machine("beluga");
    let ring: Vec<Shape> = (0..4).map(|i| shape(i, (i + 1) % 4, 128 * MIB)).collect();
    let plan = planned(&machine, &ring, &Options::default());
    let used = use_of_links(&plan);
    let between_gpus: Vec<u32> = used.iter().filter(|((a, b), _)| *a >= 0 && *b >= 0).map(|(_, &times)| times).collect();
    assert_eq!(between_gpus, [1; 12], "{}", plan.describe(&machine));
}

#[test]
fn bytes_pass_through_no_gpu_that_the_options_leave_out() {
    let machine = machine("beluga");
    let put = [shape(0, 1, 512 * MIB)];
    let through = |allowed: Relays| {
        let plan = planned(&machine, &put, &Options { relays: allowed, ..Options::default() });
        (relays(&plan, 0), plan)
    };
    assert_eq!(through(Relays::ALL).0, [2, 3]);
    assert_eq!(through([3].into_iter().collect()).0, [3]);
    assert_eq!(through([0, 1, 2, 3].into_iter().collect()).0, [2, 3]);
    let (none, plan) = through(Relays::NONE);
    assert_eq!(none, [0; 0]);
    let text = plan.describe(&machine);
    assert!(text.contains("relay_gpus excludes it"), "{text}");
    assert_eq!(plan.to_json(&machine)["options"]["relay_gpus"], serde_json::json!([]));
    assert_eq!(through([1, 3].into_iter().collect()).1.to_json(&machine)["options"]["relay_gpus"], serde_json::json!([1, 3]));
}

#[test]
fn with_both_neighbours_at_once_nothing_is_relayed() {
    let machine = machine("beluga");
    let both: Vec<Shape> = (0..4).flat_map(|i| [shape(i, (i + 1) % 4, 128 * MIB), shape(i, (i + 3) % 4, 128 * MIB)]).collect();
    for options in [Options::default(), no_host()] {
        let plan = planned(&machine, &both, &options);
        for transfer in 0..both.len() {
            assert_eq!(relays(&plan, transfer), [0; 0], "{}", plan.describe(&machine));
        }
    }
}

/// Returns `count` transfers of a halo exchange between a few pairs of GPUs, with three sizes for each pair.
fn pieces(count: usize, pairs: &[(i32, i32)], sizes: [u64; 3]) -> Vec<Shape> {
    (0..count).map(|i| (pairs[i % pairs.len()], sizes[i / pairs.len() % 3])).map(|((src, dst), bytes)| shape(src, dst, bytes)).collect()
}

const PAIRS: [(i32, i32); 4] = [(0, 1), (1, 0), (2, 3), (3, 2)];

#[test]
fn a_hundred_thousand_pieces_are_planned() {
    // A linear program for all of these transfers took minutes, and its time grew at least with the square of their number.
    let machine = machine("beluga");
    let plan = planned(&machine, &pieces(100_000, &PAIRS, [24, 2_400, 240_000]), &Options::default());
    assert_eq!(plan.program.ops.len(), 4, "one kernel for each GPU that sends");
    let large = pieces(100_000, &PAIRS, [MIB, 4 * MIB, 16 * MIB]);
    assert_eq!(planned(&machine, &large, &Options::default()).transfers.len(), large.len());
}

#[test]
fn many_transfers_split_by_kind_gain_what_they_gain_one_by_one() {
    for name in ["beluga", "hgx-h200", "dgx1-v100"] {
        let machine = machine(name);
        for sizes in [[24, 2_400, 64 * MIB], [20 * MIB, 30 * MIB, 40 * MIB]] {
            for pairs in [&PAIRS[..1], &PAIRS[..]] {
                // Up to 256 transfers are planned individually. Above that, equal ones are planned together.
                let [alone, by_kind] = [252, 264].map(|count| planned(&machine, &pieces(count, pairs, sizes), &Options::default()));
                let gains = (alone.speedup(), by_kind.speedup());
                assert!(gains.1 > 0.97 * gains.0, "{name}, {sizes:?}, {} pairs: {gains:?}", pairs.len());
                let paths: usize = by_kind.transfers.iter().map(|transfer| transfer.paths.len()).sum();
                assert!(paths <= 264 + 4 * 3 * pairs.len(), "{name}, {sizes:?}: nearly every transfer has one path, not {paths}");
            }
        }
    }
}

#[test]
fn a_busy_link_is_relieved_by_idle_ones() {
    // The batch has two large transfers over one link, and idle GPUs that can be relays.
    let machine = machine("beluga");
    let plan = planned(&machine, &[shape(0, 1, 64 * MIB), shape(0, 1, 64 * MIB)], &no_host());
    assert!(plan.speedup() > 2.0, "{}", plan.describe(&machine));
}

/// Returns the rate in GB/s that the model predicts for 1 GiB between host memory and GPU 0, in equal parts through these GPUs, as in the
/// measurements.
fn equal_parts(machine: &Machine, through: &[u32], into_gpu: bool) -> f64 {
    let (host, zero) = (DeviceId::HOST, DeviceId::gpu(0));
    let route = |from, to| machine.route(from, to).expect("a route");
    let paths: Vec<PathModel> = through
        .iter()
        .map(|&gpu| match (DeviceId::gpu(gpu), into_gpu) {
            (gpu, true) if gpu == zero => PathModel::new(machine, &[route(host, zero)]),
            (gpu, true) => PathModel::new(machine, &[route(host, gpu), route(gpu, zero)]),
            (gpu, false) if gpu == zero => PathModel::new(machine, &[route(zero, host)]),
            (gpu, false) => PathModel::new(machine, &[route(zero, gpu), route(gpu, host)]),
        })
        .collect();
    let bytes = GIB / through.len() as u64;
    let chunks = |path: &PathModel| if path.is_staged() { bytes.div_ceil(16 * MIB) as u32 } else { 1 };
    let head = machine.costs().copy;
    let flows: Vec<Flow> = paths.iter().map(|path| Flow::new(path, bytes, chunks(path), head)).collect();
    GIB as f64 / finish(machine, flows, &Issue::copies(machine.costs(), 1)) / 1e9
}

#[test]
fn the_model_of_host_copies_through_several_gpus_is_within_a_tenth_of_the_readings() {
    // Measured rates in GB/s on H200 for 1 GiB, with equal parts through the first k GPUs of a certain order (2026-11-20).
    let machine = machine("hgx-h200");
    let (chosen, by_index) = ([0, 4, 1, 5, 2, 6, 3, 7], [0, 1, 2, 3, 4, 5, 6, 7]);
    let readings = [
        (chosen, true, [(1, 54.0), (2, 105.0), (3, 126.0), (4, 147.0), (8, 150.0)].as_slice()),
        (by_index, true, &[(2, 85.0), (3, 87.0), (4, 90.0), (8, 158.0)]),
        (chosen, false, &[(1, 55.0), (2, 90.0), (4, 99.5), (8, 96.0)]),
    ];
    for (order, into_gpu, values) in readings {
        for &(k, read) in values {
            let modelled = equal_parts(&machine, &order[..k], into_gpu);
            println!("{k} of {order:?}, into the GPU {into_gpu}: modelled {modelled:.1}, read {read}");
            assert!(
                (modelled / read - 1.0).abs() <= 0.10,
                "{k} of {order:?}, into the GPU {into_gpu}: modelled {modelled:.1}, read {read}"
            );
            // Unequal parts are better if GPUs share links. So the plan must not be slower than the best division into equal parts over as
            // many links.
            let (src, dst) = if into_gpu { (-1, 0) } else { (0, -1) };
            let plan = planned(&machine, &[shape(src, dst, GIB)], &Options { max_paths: k as u32, ..Options::default() });
            let planned = GIB as f64 / plan.predicted / 1e9;
            assert!(planned >= 0.98 * modelled, "{k} links: planned {planned:.1}, equal parts {modelled:.1}\n{}", plan.describe(&machine));
            assert!(plan.transfers[0].paths.len() <= k);
        }
    }
}

#[test]
fn host_to_gpu_uses_several_pcie_links() {
    let machine = machine("hgx-h200");
    for (src, dst) in [(-1, 0), (0, -1)] {
        let plan = planned(&machine, &[shape(src, dst, GIB)], &Options::default());
        assert!(plan.transfers[0].paths.len() >= 2, "{}", plan.describe(&machine));
        assert!(plan.speedup() > 1.7, "{}", plan.describe(&machine));
    }
}

/// Returns the simulated time of a plan in seconds.
fn simulated(machine: &Machine, plan: &Plan) -> f64 {
    Simulated { machine }.seconds(plan).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn paths_that_end_in_one_bottleneck_get_the_parts_that_fair_sharing_moves() {
    // All paths from a GPU end in host memory, which is slower than two links. If the paths were filled one after the other, the direct
    // path would be assigned more than half of the data but get only a third of the bandwidth of host memory. The plan would then take a
    // fifth longer.
    let machine = machine("hgx-h200");
    for bytes in [64 * MIB, 256 * MIB, GIB] {
        let plan = planned(&machine, &[shape(0, -1, bytes)], &Options::default());
        let paths = &plan.transfers[0].paths;
        let largest = paths.iter().map(|path| path.bytes).max().expect("a path") as f64 / bytes as f64;
        assert!(largest < 1.15 / paths.len() as f64, "{}", plan.describe(&machine));
        let late = simulated(&machine, &plan) / plan.predicted;
        assert!((0.95..1.05).contains(&late), "simulated / predicted {late}\n{}", plan.describe(&machine));
    }
}

#[test]
fn nine_of_ten_plans_are_within_three_per_cent_of_the_best_that_a_search_from_them_finds() {
    let mut losses = Vec::new();
    for name in crate::common::presets_with_figures() {
        let machine = machine(name);
        let sizes = [16 * MIB, 64 * MIB, 256 * MIB];
        let campaign = Campaign { machine: &machine, sizes: &sizes, base: Options::default(), search: Search::Short, in_force: None };
        let mut score = Simulated { machine: &machine };
        for case in [Case::D2d, Case::H2d, Case::D2h, Case::Bidir] {
            for (size, batch) in campaign.batches(case) {
                // No path connects this pair of devices.
                let Ok(Some(point)) = campaign.point(case, size, batch, &mut score, |_, _, _| {}) else { continue };
                losses.push((point.chosen / point.short() - 1.0, format!("{name} {} {size}", case.name())));
            }
        }
    }
    let far: Vec<_> = losses.iter().filter(|(loss, _)| *loss > 0.03).collect();
    assert!(losses.len() > 100 && far.len() * 10 <= losses.len(), "{} of {}: {far:?}", far.len(), losses.len());
}

/// Tests chunk sizes. The cost that an additional chunk has for the issuing thread is negligible for one copy, but large for a batch of
/// many pipelines.
#[test]
fn batches_of_many_pipelines_wait_no_longer_for_chunks_than_in_larger_ones() {
    let both_ways = [shape(0, 1, 16 * MIB), shape(1, 0, 16 * MIB)];
    let ring: Vec<Shape> = (0..8).map(|i| shape(i, (i + 1) % 8, 256 * MIB)).collect();
    for (name, batch) in [("gh200-4", &both_ways[..]), ("dgx1-v100", &ring)] {
        let machine = machine(name);
        let seconds = |options: &Options| simulated(&machine, &planned(&machine, batch, options));
        let larger = [2, 4, 8, 16].map(|mib| seconds(&Options { chunk_bytes: Some(mib * MIB), ..Options::default() }));
        let best = larger.into_iter().fold(f64::INFINITY, f64::min);
        let by_default = seconds(&Options::default());
        assert!(by_default <= 1.05 * best, "{name}: {by_default} s, in larger chunks {best}");
    }
}

#[test]
fn two_relays_for_the_host_come_from_different_uplinks() {
    // The first two GPUs by index (0 and 1) would be a fifth slower, because both use one uplink.
    let machine = machine("hgx-h200");
    let plan = planned(&machine, &[shape(-1, 0, GIB)], &Options { max_paths: 2, ..Options::default() });
    assert!(relays(&plan, 0).iter().all(|&via| via >= 4), "{}", plan.describe(&machine));
}

#[test]
fn pageable_host_memory_is_left_to_the_driver() {
    let machine = machine("hgx-h200");
    let mut pageable = shape(-1, 0, GIB);
    pageable.src_kind = MemoryKind::Pageable;
    let plan = planned(&machine, &[pageable], &Options::default());
    assert_eq!(plan.program.ops.len(), 1);
    assert!(plan.transfers[0].rejected.iter().any(|r| r.reason == Reason::Pageable));
}

#[test]
fn threads_move_pageable_memory_over_all_links_that_help_where_the_driver_would_be_slower() {
    let machine = machine("hgx-h200");
    let at = |bytes| [Shape { src_kind: MemoryKind::Pageable, ..shape(-1, 0, bytes) }];
    let of = |threads: u32, max_paths: u32, bytes: u64| {
        let options = Options { threads, max_paths, ..Options::default() };
        let plan = planned(&machine, &at(bytes), &options);
        validate(&plan.program, options.staging_bytes).expect("a valid program");
        plan
    };
    let driver = of(0, 1, GIB);
    assert!(driver.threads.is_none());
    for (threads, paths, gain) in [(8, 1, 5.0), (12, 2, 7.0), (1, 1, 0.8)] {
        let plan = of(threads, paths, GIB);
        let used = plan.threads.filter(|_| gain > 1.0);
        assert!(driver.predicted >= gain * plan.predicted, "{}", plan.describe(&machine));
        assert_eq!(used.map(|used| used.threads), (gain > 1.0).then_some(threads), "one thread is no faster than the driver");
        let staged = |ring: &Ring| ring.device.is_host();
        assert!(plan.program.rings.iter().filter(|ring| staged(ring)).map(Ring::bytes).sum::<u64>() <= 64 << 20);
    }
    // Successive chunks form groups of a quarter of the ring. The stream waits for threads once for each group.
    let one = of(8, 1, GIB).program;
    let moved: Vec<&Op> = one.ops.iter().filter(|op| matches!(op.copies[0].from, Place::Slot { .. })).collect();
    let waits = moved.iter().filter(|op| op.after.iter().any(|before| one.ops[before.0 as usize].mechanism == Mechanism::Thread)).count();
    assert_eq!(waits, moved.len().div_ceil(one.rings[0].slots as usize / 4));
    let two = of(12, 2, GIB);
    // Copy threads process chunks in program order, so the chunks of the two links must alternate.
    let lanes: Vec<u32> = two.program.ops.iter().filter(|op| matches!(op.copies[0].from, Place::Slot { .. })).map(|op| op.lane.0).collect();
    let first: BTreeSet<u32> = lanes[..8].iter().copied().collect();
    assert!(first.len() > 1, "{lanes:?}");
    assert!(of(8, 8, 4096).threads.is_none(), "little is the driver's");
    // The same must hold in the opposite direction, and for many small transfers.
    let back = [Shape {
        source: 0,
        src_device: DeviceId::gpu(0),
        dst_device: DeviceId::HOST,
        src_kind: MemoryKind::Device,
        dst_kind: MemoryKind::Pageable,
        bytes: GIB,
    }];
    let options = Options { threads: 8, ..Options::default() };
    let plan = planned(&machine, &back, &options);
    validate(&plan.program, options.staging_bytes).expect("a valid program");
    assert!(plan.threads.is_some());
    let many = vec![at(64 << 10)[0]; 4096];
    let plan = planned(&machine, &many, &options);
    validate(&plan.program, options.staging_bytes).expect("a valid program");
    assert!(plan.threads.is_some() && plan.program.ops.len() < 1000, "{} operations", plan.program.ops.len());
}

#[test]
fn options_are_obeyed() {
    let machine = machine("beluga");
    let one = [shape(0, 1, 512 * MIB)];
    for most in 1..=4 {
        let plan = planned(&machine, &one, &Options { max_paths: most, ..Options::default() });
        assert_eq!(plan.transfers[0].paths.len(), most as usize, "{}", plan.describe(&machine));
    }
    assert_eq!(through_host(&planned(&machine, &one, &no_host()), 0), 0.0);
    let plan = planned(&machine, &one, &Options { min_bytes: Some(GIB), ..Options::default() });
    assert_eq!(plan.program.ops.len(), 1);
    let plan = planned(&machine, &one, &Options { chunk_bytes: Some(MIB + 1), ..Options::default() });
    assert!(plan.transfers[0].paths.iter().filter(|p| p.via.is_some()).all(|p| p.chunk_bytes == MIB + 1));
    let counts = Options { relay_chunks: Some(5), host_chunks: Some(9), chunk_bytes: Some(MIB), staging_bytes: GIB, ..Options::default() };
    let plan = planned(&machine, &one, &counts);
    let counted = |path: &PathPlan| path.via.map(|via| (via.is_host(), path.chunks));
    let chunks: Vec<_> = plan.transfers[0].paths.iter().filter_map(counted).collect();
    assert_eq!(chunks, [(false, 5), (false, 5), (true, 9)], "{}", plan.describe(&machine));
    // Chunks of one ring follow each other. Each transfer has at most this number of chunks.
    let many = vec![shape(0, 1, MIB); 40];
    let plan = planned(&machine, &many, &Options { relay_chunks: Some(2), host_path: false, max_paths: 3, ..Options::default() });
    let staged = plan.transfers.iter().flat_map(|transfer| transfer.paths.iter()).filter(|path| path.via.is_some());
    assert!(staged.clone().count() > 0 && staged.clone().all(|path| path.chunks <= 2), "{}", plan.describe(&machine));
    // This must also hold if destinations forward data to other destinations.
    let shapes: Vec<Shape> = (1..4).map(|gpu| Shape { source: 1, ..shape(0, gpu, 64 * MIB) }).collect();
    let plan = planned(&machine, &shapes, &Options { relay_chunks: Some(6), ..no_host() });
    let chunks: Vec<u32> = plan.transfers.iter().flat_map(|transfer| transfer.paths.iter()).map(|path| path.chunks).collect();
    assert!(chunks.contains(&6) && chunks.iter().all(|chunks| [1, 6].contains(chunks)), "{}", plan.describe(&machine));
}

#[test]
fn staging_stays_in_its_bound_at_any_message_size() {
    let machine = machine("beluga");
    for staging_bytes in [16 << 10, MIB, 64 * MIB] {
        for bytes in [MIB, 512 * MIB, 16 * GIB] {
            let options = Options { staging_bytes, ..Options::default() };
            // The function `planned` compares the plan with the bound.
            planned(&machine, &[shape(0, 1, bytes), shape(2, 1, bytes), shape(3, 0, bytes)], &options);
        }
    }
}

#[test]
fn many_small_messages_become_one_kernel() {
    // Measured for 26 messages of a halo exchange: 13.7 us fused in a kernel, 25.6 us as one batch, 62 us with one call each.
    let machine = machine("hgx-h200");
    let halo: Vec<Shape> = [(6, 240_000), (12, 2_400), (8, 24)].iter().flat_map(|&(n, bytes)| vec![shape(0, 1, bytes); n]).collect();
    let plan = planned(&machine, &halo, &Options::default());
    assert_eq!(plan.program.ops.len(), 1, "{}", plan.describe(&machine));
    assert_eq!(plan.program.ops[0].mechanism, Mechanism::Kernel);
    assert!((plan.predicted * 1e6 - 13.7).abs() < 1.4, "modelled {:.1} us, read 13.7", plan.predicted * 1e6);
    let batched = planned(&machine, &halo, &Options { engine: Engine::Batch, ..Options::default() });
    assert!((batched.predicted * 1e6 - 25.6).abs() < 2.6, "modelled {:.1} us, read 25.6", batched.predicted * 1e6);
    let copies = planned(&machine, &halo, &Options { engine: Engine::Stream, ..Options::default() });
    assert!((copies.predicted * 1e6 - 62.0).abs() < 6.2, "modelled {:.1} us, read 62", copies.predicted * 1e6);
}

#[test]
fn copies_of_one_lane_follow_each_other() {
    // Measured for 26 messages with faces of 4 MiB: 134 us with one call each, 88 us as one batch.
    let machine = machine("hgx-h200");
    let halo: Vec<Shape> = [(6, 4 * MIB), (12, 2_400), (8, 24)].iter().flat_map(|&(n, bytes)| vec![shape(0, 1, bytes); n]).collect();
    for (engine, read) in [(Engine::Stream, 133.6), (Engine::Batch, 88.0)] {
        let plan = planned(&machine, &halo, &Options { engine, host_path: false, ..Options::default() });
        let modelled = plan.predicted * 1e6;
        assert!((modelled / read - 1.0).abs() < 0.1, "{engine:?}: modelled {modelled:.1} us, read {read}");
    }
}

#[test]
fn large_messages_are_not_drawn_into_the_kernel() {
    let machine = machine("hgx-h200");
    let mut batch = vec![shape(0, 1, 512 * MIB)];
    batch.extend((0..20).map(|_| shape(0, 2, 1000)));
    let plan = planned(&machine, &batch, &no_host());
    let kernel = plan.program.ops.iter().find(|op| op.mechanism == Mechanism::Kernel).expect("a kernel");
    assert_eq!(kernel.copies.len(), 20);
}

#[test]
fn a_pair_without_a_link_is_staged_or_refused() {
    let machine = machine("dgx1-v100");
    // There is no NVLink between GPU 0 and GPU 5, and they are on different sockets.
    let plan = planned(&machine, &[shape(0, 5, 64 * MIB)], &Options::default());
    assert!(plan.transfers[0].paths.iter().all(|p| p.via.is_some()), "{}", plan.describe(&machine));
    let plan = planned(&machine, &[shape(0, 5, 8)], &Options::default());
    assert_eq!(plan.program.ops.len(), 2, "a small one takes one staged path:\n{}", plan.describe(&machine));
    let starved = plan_error(&machine, &[shape(0, 5, 64 * MIB)], &Options { staging_bytes: 0, ..Options::default() });
    assert!(matches!(starved, PlanError::Staging { transfer: 0, .. }), "{starved}");
}

fn plan_error(machine: &Machine, batch: &[Shape], options: &Options) -> PlanError {
    match plan(machine, batch, options) {
        Ok(plan) => panic!("planned:\n{}", plan.describe(machine)),
        Err(error) => error,
    }
}

#[test]
fn errors_name_the_value_and_the_remedy() {
    let machine = machine("beluga");
    let unknown = plan_error(&machine, &[shape(0, 1, 8), shape(0, 7, 8)], &Options::default());
    assert_eq!(unknown.to_string(), "transfer 1: device 7 does not exist: this machine has GPUs 0 to 3 and the host");
    let none = plan_error(&machine, &[], &Options { max_paths: 0, ..Options::default() });
    assert_eq!(none.to_string(), "max_paths=0: must be 1 or more");
    let tiny = plan_error(&machine, &[], &Options { chunk_bytes: Some(1), ..Options::default() });
    assert_eq!(tiny.to_string(), "chunk_bytes=1: must be 4096 or more");
    let none = plan_error(&machine, &[], &Options { relay_chunks: Some(0), ..Options::default() });
    assert_eq!(none.to_string(), "relay_chunks=0: must be 1 or more");
}

#[test]
fn an_empty_batch_and_empty_transfers_do_nothing() {
    let machine = machine("beluga");
    assert!(planned(&machine, &[], &Options::default()).program.ops.is_empty());
    let plan = planned(&machine, &[shape(0, 1, 0), shape(0, 1, 1)], &Options::default());
    assert_eq!(plan.program.ops.len(), 1);
    assert_eq!(plan.program.ops[0].copies[0].to, Place::Destination { transfer: 1, offset: 0 });
}

#[test]
fn planning_is_deterministic() {
    let machine = machine("dgx1-v100");
    let all: Vec<Shape> =
        (0..8).flat_map(|i| (0..8).filter(move |&j| j != i).map(move |j| shape(i, j, (1 + i as u64 * 7 + j as u64) * MIB))).collect();
    let first = planned(&machine, &all, &Options::default());
    for _ in 0..3 {
        let again = planned(&machine, &all, &Options::default());
        assert_eq!(first.program, again.program);
        assert_eq!(first.transfers, again.transfers);
    }
}

#[test]
fn a_description_says_what_is_done_and_why_not_otherwise() {
    let machine = machine("hgx-h200");
    let plan = planned(&machine, &[shape(0, 1, GIB)], &Options::default());
    let text = plan.describe(&machine);
    for part in ["modelled", "transfer 0: gpu0 to gpu1, 1.0 GiB", "direct", "via host0", "not via gpu2", "gpu0>"] {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
    let json = plan.to_json(&machine);
    assert_eq!(json["transfers"][0]["bytes"], GIB);
    assert_eq!(json["transfers"][0]["paths"].as_array().map(Vec::len), Some(plan.transfers[0].paths.len()));
}

#[test]
fn json_is_the_same_written_at_once_and_as_a_value_and_repeats_no_list_of_paths_left_out() {
    let machine = machine("hgx-h200");
    let batch: Vec<Shape> = (0..100).map(|_| shape(0, 1, MIB)).chain([shape(2, 3, MIB)]).collect();
    let plan = planned(&machine, &batch, &Options::default());
    let text = serde_json::to_string_pretty(&plan.json(&machine)).expect("JSON");
    let parsed = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
    let value = parsed(&text);
    assert_eq!(value, parsed(&plan.to_json(&machine).to_string()));
    let transfers = value["transfers"].as_array().expect("a list");
    assert_eq!(transfers.len(), 101);
    assert!(transfers.iter().all(|transfer| transfer["paths"].is_array()));
    // The list of rejected paths of a pair of GPUs is printed once. Other transfers of the pair refer to it.
    let has_list = |at: &usize| transfers[*at]["rejected"].is_array();
    let lists: Vec<usize> = (0..100).filter(has_list).collect();
    assert!(lists[0] == 0 && lists.len() < 100 && has_list(&100), "{lists:?}");
    assert!(lists.iter().all(|a| lists.iter().all(|b| a == b || transfers[*a]["rejected"] != transfers[*b]["rejected"])), "{lists:?}");
    for (at, planned) in plan.transfers.iter().enumerate() {
        let list = if has_list(&at) { at } else { transfers[at]["rejected_as"].as_u64().expect("an index") as usize };
        assert_eq!(transfers[list]["rejected"].as_array().map(Vec::len), Some(planned.rejected.len()), "{at}");
        assert_eq!(plan.transfers[list].rejected, planned.rejected, "{at}");
    }
}

/// Returns the second GPU that may issue the copies of an internal stream (lane), or `None`. Checks that there is at most one.
fn other(lane: Lane) -> Option<DeviceId> {
    assert!(lane.also.iter().count() < 2, "{lane:?}");
    lane.also.iter().next()
}

/// Returns copies of `bytes` bytes between all pairs of four GPUs.
fn all_to_all(bytes: u64) -> Vec<Shape> {
    (0..4).flat_map(|src| (0..4).filter(move |dst| *dst != src).map(move |dst| shape(src, dst, bytes))).collect()
}

#[test]
fn either_end_may_issue_a_plain_copy_between_two_gpus_while_that_costs_less_than_a_join() {
    let mut topology = preset("hgx-h200").expect("a preset");
    // The costs are 3 us for each copy and 2.6 us for each MiB, compared with the cost of a join in discovered topologies.
    (topology.costs.pull, topology.costs.fork_join_staged) = (3e-6, 7e-6);
    let h200 = Machine::new(topology.clone()).expect("well formed");
    let plain = Options { engine: Engine::Stream, max_paths: 1, ..Options::default() };
    for batch in [vec![shape(0, 1, MIB), shape(1, 0, MIB)], all_to_all(MIB)] {
        let plan = planned(&h200, &batch, &plain);
        assert_eq!(plan.program.lanes.len(), batch.len());
        for op in &plan.program.ops {
            let Place::Source { transfer, .. } = op.copies[0].from else { panic!("{op:?}") };
            let (lane, shape) = (plan.program.lanes[op.lane.0 as usize], batch[transfer as usize]);
            assert_eq!((lane.device, other(lane)), (shape.src_device, Some(shape.dst_device)));
        }
    }
    let also = |batch: &[Shape]| planned(&h200, batch, &plain).program.lanes.iter().map(|lane| !lane.also.is_empty()).collect::<Vec<_>>();
    // With an additional copy between two other GPUs, no single GPU can issue all copies.
    let beside = shape(4, 5, 16 * MIB);
    assert_eq!(also(&[shape(0, 1, 2 * MIB), shape(1, 0, MIB), beside]), [false, false, true], "2 MiB are 8.3 us");
    assert_eq!(also(&[shape(0, 1, MIB), shape(0, 1, MIB), shape(1, 0, MIB), beside]), [false, false, true], "two copies are 11.3 us");
    topology.costs.fork_join_staged = 5e-6;
    let dear = Machine::new(topology).expect("well formed");
    assert!(planned(&dear, &all_to_all(MIB), &plain).program.lanes.iter().all(|lane| lane.also.is_empty()));
}

#[test]
fn where_all_copies_meet_in_a_gpu_it_may_issue_them_whatever_they_carry() {
    let mut topology = preset("hgx-h200").expect("a preset");
    topology.costs.fork_join_gpus = 7e-6;
    let h200 = Machine::new(topology.clone()).expect("well formed");
    let one_path = Options { max_paths: 1, ..Options::default() };
    let lanes = |machine: &Machine, batch: &[Shape]| {
        let plan = planned(machine, batch, &one_path);
        let mut lanes: Vec<_> = plan.program.lanes.iter().map(|lane| (lane.device.0, other(*lane).map(|also| also.0))).collect();
        lanes.sort_unstable();
        lanes
    };
    let both = [shape(0, 1, 64 * MIB), shape(1, 0, 64 * MIB)];
    assert_eq!(lanes(&h200, &both), [(0, Some(1)), (1, Some(0))]);
    // Streams of one GPU need no signal from another GPU, but a copy that reads remote memory starts later. The alternative is a join of
    // the streams.
    let costs = h200.costs();
    let plan = planned(&h200, &both, &one_path);
    let copy = h200.route(DeviceId::gpu(0), DeviceId::gpu(1)).expect("NVLink");
    let seconds = costs.copy + costs.issue + costs.pull + copy.latency + 64.0 * MIB as f64 / copy.bandwidth;
    // The ports of GPUs reach a slightly lower rate if both directions are used at once.
    assert!((0.0..0.02).contains(&(plan.predicted / seconds - 1.0)), "{} and {seconds}", plan.predicted);
    assert_eq!(plan.executor, Engine::Stream);
    // Copies from one GPU to several others alternate in one of its internal streams. This GPU may also issue the copies to it.
    let star = [shape(2, 0, 64 * MIB), shape(2, 1, 64 * MIB), shape(0, 2, 64 * MIB), shape(1, 2, 64 * MIB), shape(-1, 2, MIB)];
    assert_eq!(lanes(&h200, &star), [(0, Some(2)), (1, Some(2)), (2, None), (2, None)]);
    // The GPU does not issue three copies that it receives in one lane: they would be delayed by more than the cost of a join.
    topology.costs.batch = 1.0;
    let no_batch = Machine::new(topology.clone()).expect("well formed");
    assert_eq!(lanes(&no_batch, &[both[0], both[0], both[0], both[1]]), [(0, None), (1, Some(0))]);
    assert_eq!(lanes(&no_batch, &[both[0], both[0], both[1], both[1]]), [(0, Some(1)), (1, Some(0))]);
    // Copies to host memory share no resource with the others, and the copies of a ring share none with each other.
    assert_eq!(lanes(&h200, &[both[0], both[1], shape(0, -1, 64 * MIB)]), [(0, None), (0, None), (1, Some(0))]);
    assert!(lanes(&h200, &[shape(0, 1, 16 * MIB), shape(1, 2, 16 * MIB), shape(2, 0, 16 * MIB)]).iter().all(|lane| lane.1.is_none()));
    // Over PCIe, reads are slower than writes.
    assert!(lanes(&machine("pcie-4"), &both).iter().all(|lane| lane.1.is_none()));
}

#[test]
fn small_messages_both_ways_are_one_kernel_of_a_gpu_that_reads_and_writes_all() {
    let mut topology = preset("hgx-h200").expect("a preset");
    (topology.costs.fork_join_gpus, topology.costs.kernel, topology.costs.copy) = (7e-6, 9e-6, 7.6e-6);
    let h200 = Machine::new(topology).expect("well formed");
    let one_path = Options { max_paths: 1, ..Options::default() };
    let ops = |machine: &Machine, batch: &[Shape], options: &Options| {
        let plan = planned(machine, batch, options);
        let lane = |op: &Op| plan.program.lanes[op.lane.0 as usize];
        plan.program
            .ops
            .iter()
            .map(|op| (op.mechanism, op.copies.len(), lane(op).device.0, other(lane(op)).map(|a| a.0)))
            .collect::<Vec<_>>()
    };
    let both = |bytes: u64| [shape(0, 1, bytes), shape(1, 0, bytes)];
    assert_eq!(ops(&h200, &both(256 << 10), &one_path), [(Mechanism::Kernel, 2, 0, Some(1))]);
    assert_eq!(planned(&h200, &both(256 << 10), &one_path).executor, Engine::Graph);
    // A kernel that reads and writes remote memory at the same time has a lower rate in each direction.
    let copies = [(Mechanism::Copy, 1, 0, Some(1)), (Mechanism::Copy, 1, 1, Some(0))];
    assert_eq!(ops(&h200, &both(4 * MIB), &one_path), copies);
    assert_eq!(ops(&h200, &both(64), &Options { engine: Engine::Stream, ..one_path }), copies);
    assert_eq!(ops(&h200, &both(4 * MIB), &Options { engine: Engine::Kernel, ..one_path }), [(Mechanism::Kernel, 2, 0, Some(1))]);
    // Many small messages and a face in each direction are one kernel. A large message remains a copy.
    let mut halo: Vec<Shape> = (0..26).flat_map(|_| both(2400)).collect();
    assert_eq!(ops(&h200, &halo, &one_path), [(Mechanism::Kernel, 52, 0, Some(1))]);
    halo.push(shape(1, 0, 16 * MIB));
    assert_eq!(ops(&h200, &halo, &one_path), [(Mechanism::Copy, 1, 1, Some(0)), (Mechanism::Kernel, 52, 1, Some(0))]);
    // If a GPU has several neighbours, only this GPU may run the kernel. The kernel also moves messages inside the GPU.
    let star = [shape(0, 2, 64), shape(2, 0, 64), shape(2, 1, 64), shape(1, 2, 64), shape(2, 2, 64)];
    assert_eq!(ops(&h200, &star, &one_path), [(Mechanism::Kernel, 5, 2, None)]);
    // The messages in one direction were already one kernel. Now either of the two GPUs may run it.
    assert_eq!(ops(&h200, &[shape(0, 1, 64); 26], &one_path), [(Mechanism::Kernel, 26, 0, Some(1))]);
    // A GPU does not copy data of another GPU in host memory, and a kernel cannot access the memory of another GPU over PCIe.
    let batched = |plan: Vec<(Mechanism, usize, i32, Option<i32>)>| plan.iter().all(|op| op.0 != Mechanism::Kernel || op.3.is_none());
    assert!(batched(ops(&h200, &[shape(0, 1, 64), shape(1, 0, 64), shape(-1, 1, 64), shape(0, -1, 64)], &one_path)));
    assert!(ops(&machine("pcie-4"), &both(64), &one_path).iter().all(|op| op.1 == 1));
    assert_eq!(ops(&machine("pcie-4"), &both(64), &Options { engine: Engine::Kernel, ..one_path }).len(), 2);
}

#[test]
fn in_an_all_to_all_no_two_copies_of_one_turn_leave_from_or_arrive_at_the_same_gpu() {
    for (name, bytes) in [("hgx-h200", 16 * MIB), ("beluga", 4096)] {
        let machine = machine(name);
        let batch = all_to_all(bytes);
        let plan = planned(&machine, &batch, &Options { engine: Engine::Stream, max_paths: 1, ..Options::default() });
        let gpus = machine.gpu_count() as i32;
        // The plan copies in rounds. Only four of eight GPUs take part, so these rounds are shorter, and no GPU occurs twice in a round.
        let mut turns: BTreeMap<i32, Vec<(i32, i32)>> = BTreeMap::new();
        let mut last = 0;
        for op in &plan.program.ops {
            let Place::Source { transfer, .. } = op.copies[0].from else { panic!("{op:?}") };
            let Shape { src_device: DeviceId(src), dst_device: DeviceId(dst), .. } = batch[transfer as usize];
            let turn = (dst - src).rem_euclid(gpus);
            assert!(turn >= last, "{name}: turn {turn} after {last}");
            last = turn;
            turns.entry(turn).or_default().push((src, dst));
        }
        assert_eq!(turns.values().map(Vec::len).sum::<usize>(), 12);
        for turn in turns.values() {
            let distinct = |end: fn(&(i32, i32)) -> i32| turn.iter().map(end).collect::<std::collections::BTreeSet<_>>().len();
            assert_eq!((distinct(|t| t.0), distinct(|t| t.1)), (turn.len(), turn.len()), "{name}");
        }
    }
}

#[test]
fn copies_that_leave_a_gpu_by_one_link_share_a_lane_in_their_order() {
    let batch = all_to_all(64 * MIB);
    let h200 = machine("hgx-h200");
    let one_path = Options { engine: Engine::Stream, max_paths: 1, ..Options::default() };
    let by_copies = planned(&h200, &batch, &one_path);
    assert_eq!((by_copies.program.lanes.len(), by_copies.program.ops.len()), (4, 12), "{}", by_copies.describe(&h200));
    // If several paths were measured to be faster, the plan uses them.
    let tuned = Options { tuned: Some(Tuned { several: true, ..Tuned::default() }), ..Options::default() };
    assert!(!mpgpu_core::plan::plan(&h200, &batch, &tuned).expect("a plan").program.rings.is_empty());
    // If every pair of GPUs is connected directly, each copy has its own link.
    let mesh = machine("gh200-4");
    assert_eq!(planned(&mesh, &batch, &one_path).program.lanes.len(), 12);
}

#[test]
fn several_large_messages_between_two_gpus_are_one_batched_call() {
    let h200 = machine("hgx-h200");
    let one_path = Options { max_paths: 1, ..Options::default() };
    let mechanisms = |batch: &[Shape], options: &Options| {
        planned(&h200, batch, options).program.ops.iter().map(|op| (op.mechanism, op.copies.len())).collect::<Vec<_>>()
    };
    let large = |dst| shape(0, dst, 64 * MIB);
    assert_eq!(mechanisms(&[large(1), large(1)], &one_path), [(Mechanism::Batch, 2)]);
    assert!(mechanisms(&[large(1), large(2), large(1), large(2)], &one_path).iter().all(|op| op.0 == Mechanism::Batch));
    assert_eq!(mechanisms(&[large(1), large(1)], &Options { engine: Engine::Stream, ..one_path }), [(Mechanism::Copy, 1); 2]);
    assert_eq!(mechanisms(&[large(1), large(1), shape(0, 1, 8), shape(0, 1, 16)], &one_path)[0].0, Mechanism::Batch);
}

#[test]
fn a_plan_that_several_gpus_issue_is_joined() {
    let mut topology = preset("hgx-h200").expect("a preset");
    let one_path = Options { max_paths: 1, ..Options::default() };
    let with = |topology: &Topology| planned(&Machine::new(topology.clone()).expect("well formed"), &ring(), &one_path).predicted;
    fn ring() -> Vec<Shape> {
        (0..4).map(|gpu| shape(gpu, (gpu + 1) % 4, 16 * MIB)).collect()
    }
    topology.costs.fork_join_gpus = 0.0;
    let apart = with(&topology);
    topology.costs.fork_join_gpus = 5e-6;
    assert!((with(&topology) - apart - 5e-6).abs() < 1e-12);
}

#[test]
fn large_copies_of_all_gpus_are_issued_before_fused_messages_of_any() {
    let machine = machine("hgx-h200");
    let batch: Vec<Shape> = (0..2).flat_map(|src| [24, 24, 24, 64 * MIB].map(|bytes| shape(src, 2 + src, bytes))).collect();
    let plan = planned(&machine, &batch, &Options { max_paths: 1, ..Options::default() });
    let mechanisms: Vec<_> = plan.program.ops.iter().map(|op| op.mechanism).collect();
    assert_eq!(mechanisms, [Mechanism::Copy, Mechanism::Copy, Mechanism::Batch, Mechanism::Batch], "{}", plan.describe(&machine));
}

#[test]
fn only_direct_plain_copies_between_gpus_have_two_ends_that_may_issue_them() {
    let machine = machine("beluga");
    let host =
        planned(&machine, &[shape(-1, 0, MIB), shape(1, -1, MIB), shape(2, 2, MIB)], &Options { max_paths: 1, ..Options::default() });
    assert!(host.program.lanes.iter().all(|lane| lane.also.is_empty()));
    // The batch has a copy over several paths, and a copy that is small enough to be issued by either GPU.
    let batch = [shape(0, 1, 512 * MIB), shape(2, 3, 64 << 10)];
    let several = planned(&machine, &batch, &Options::default());
    assert!(several.transfers[0].paths.len() > 1, "{}", several.describe(&machine));
    let with: Vec<_> = several.program.lanes.iter().filter_map(|lane| other(*lane)).collect();
    assert_eq!(with, [DeviceId(3)], "hops through staging stay where they are:\n{}", several.describe(&machine));
    let fused = planned(&machine, &all_to_all(MIB), &Options { engine: Engine::Kernel, ..Options::default() });
    assert!(fused.program.lanes.iter().all(|lane| lane.also.is_empty()));
}

#[test]
fn by_itself_a_plan_goes_as_a_graph_where_that_is_issued_faster() {
    let mut topology = preset("hgx-h200").expect("a preset");
    let h200 = Machine::new(topology.clone()).expect("well formed");
    let one_path = Options { max_paths: 1, ..Options::default() };
    let executor = |machine: &Machine, batch: &[Shape]| planned(machine, batch, &one_path).executor;
    // No single GPU can issue both copies.
    let both = [shape(0, 1, MIB), shape(2, 3, MIB)];
    assert_eq!(executor(&h200, &both), Engine::Graph);
    // Copies in both directions between two GPUs use streams of one GPU.
    assert_eq!(executor(&h200, &[shape(0, 1, 16 * MIB), shape(1, 0, 16 * MIB)]), Engine::Stream);
    // In a graph there is a gap between successive copies of one internal stream.
    assert_eq!(executor(&h200, &all_to_all(MIB)), Engine::Graph);
    assert_eq!(executor(&h200, &all_to_all(16 * MIB)), Engine::Stream);
    // One internal stream needs no fork and join, for a single copy as well as for successive copies.
    assert_eq!(executor(&h200, &both[..1]), Engine::Stream);
    assert_eq!(executor(&h200, &[both[0]; 3]), Engine::Stream);
    // The driver itself stages pageable memory in the stream.
    let pageable = Shape { src_kind: MemoryKind::Pageable, ..shape(-1, 0, MIB) };
    assert_eq!(executor(&h200, &[pageable, both[0]]), Engine::Stream);
    // Plans with staged paths run as graphs. An engine that the caller requests explicitly is always used.
    assert_eq!(planned(&h200, &[shape(0, 1, GIB)], &Options::default()).executor, Engine::Graph);
    for engine in [Engine::Stream, Engine::Graph, Engine::Batch, Engine::Kernel] {
        assert_eq!(planned(&h200, &both, &Options { engine, ..one_path }).executor, engine);
    }
    // On streams, the second copy is issued 2.2 us after the first copy. In a graph, it is issued after the time of one graph node.
    topology.costs.graph_node = 2e-6;
    assert_eq!(executor(&Machine::new(topology.clone()).expect("well formed"), &both), Engine::Graph);
    topology.costs.graph_node = 2.4e-6;
    let dear = Machine::new(topology).expect("well formed");
    assert_eq!(executor(&dear, &both), Engine::Stream);
    let text = planned(&h200, &both, &one_path).describe(&h200);
    assert!(text.contains("engine auto (graph)"), "{text}");
    assert_eq!(planned(&dear, &both, &one_path).to_json(&dear)["executor"], "stream");
}

#[test]
fn a_graph_of_a_halo_exchange_is_one_kernel_and_never_a_batch() {
    let machine = machine("hgx-h200");
    let sizes = [240_000; 6].into_iter().chain([2400; 12]).chain([24; 8]);
    let halo: Vec<Shape> = sizes.map(|bytes| shape(0, 1, bytes)).collect();
    let plan = planned(&machine, &halo, &Options { engine: Engine::Graph, ..Options::default() });
    assert_eq!(plan.program.ops.iter().map(|op| op.mechanism).collect::<Vec<_>>(), [Mechanism::Kernel], "{}", plan.describe(&machine));
    // If there is also a large copy into host memory, small transfers to host memory are not made by a kernel. A graph has no node for a
    // batch.
    let mut out: Vec<Shape> = (0..26).map(|_| shape(0, -1, 2400)).collect();
    out.push(shape(0, -1, 512 * MIB));
    let plan = planned(&machine, &out, &Options { engine: Engine::Graph, max_paths: 1, ..Options::default() });
    assert!(plan.program.ops.iter().all(|op| op.mechanism == Mechanism::Copy), "{}", plan.describe(&machine));
    let plan = planned(&machine, &out, &Options { max_paths: 1, ..Options::default() });
    let mechanisms: Vec<_> = plan.program.ops.iter().map(|op| (op.mechanism, op.copies.len())).collect();
    assert_eq!(mechanisms, [(Mechanism::Copy, 1), (Mechanism::Batch, 26)], "{}", plan.describe(&machine));
}

#[test]
fn a_small_batch_between_several_gpus_is_one_kernel_on_whichever_gpu_the_callers_stream_is_of() {
    let h200 = machine("hgx-h200");
    let ring = |bytes| (0..4).map(|gpu| shape(gpu, (gpu + 1) % 4, bytes)).collect::<Vec<_>>();
    // Times measured on four H200. A ring of 4 MiB is no kernel, because copies by all four GPUs are faster: 33.7 us instead of 48.8 us.
    for (batch, read) in
        [(ring(4096), 10.8), (ring(256 << 10), 12.8), (ring(MIB), 20.3), (all_to_all(4096), 10.4), (all_to_all(256 << 10), 17.7)]
    {
        let plan = planned(&h200, &batch, &Options::default());
        let text = plan.describe(&h200);
        assert_eq!(
            plan.program.ops.iter().map(|op| (op.mechanism, op.copies.len())).collect::<Vec<_>>(),
            [(Mechanism::Kernel, batch.len())],
            "{text}"
        );
        let workers: std::collections::BTreeSet<_> = plan.program.lanes[0].devices().collect();
        assert!(workers.into_iter().eq((0..4).map(DeviceId::gpu)), "{text}");
        assert_eq!(plan.executor, Engine::Graph);
        assert!((plan.predicted * 1e6 / read - 1.0).abs() < 0.15, "modelled {:.1} us, read {read}", plan.predicted * 1e6);
    }
    let issued_by = |machine: &Machine, batch: &[Shape], options: &Options| {
        let plan = planned(machine, batch, options);
        let issuers: std::collections::BTreeSet<_> = plan.program.lanes.iter().map(|lane| lane.device.0).collect();
        issuers.len()
    };
    assert_eq!(issued_by(&h200, &ring(4 * MIB), &Options::default()), 4);
    assert_eq!(issued_by(&h200, &ring(4096), &Options { engine: Engine::Stream, ..Options::default() }), 4);
    assert_eq!(issued_by(&h200, &ring(4096), &Options { engine: Engine::Kernel, ..Options::default() }), 1);
    let mut with_large = ring(4096);
    with_large.push(shape(0, 1, 64 * MIB));
    assert!(issued_by(&h200, &with_large, &Options { max_paths: 1, ..Options::default() }) > 1, "all GPUs are joined anyway");
    // Data that stays inside a GPU passes through the GPU that runs the kernel.
    assert_eq!(issued_by(&h200, &[shape(0, 1, 64), shape(1, 0, 64), shape(0, 0, 64), shape(1, 1, 64)], &Options::default()), 1);
    // Reading over PCIe is slow. In a cube mesh no GPU has links to all others.
    assert_eq!(issued_by(&machine("pcie-4"), &ring(4096), &Options::default()), 4);
    let cube: Vec<Shape> = (0..8).map(|gpu| shape(gpu, gpu ^ 4, 4096)).collect();
    assert_eq!(issued_by(&machine("dgx1-v100"), &cube, &Options::default()), 8);
}

#[test]
fn many_small_pieces_of_pinned_memory_are_kernels_of_the_gpu_they_are_for() {
    let h200 = machine("hgx-h200");
    // Measured on one H200: kernels take 365 and 1372 us into the GPU and 343 us out of it, and copies take at least 11 ms.
    for (src, dst, count, bytes, read) in [(-1, 0, 4096, 4096, 365.0), (-1, 0, 4096, 16 << 10, 1372.0), (0, -1, 4096, 4096, 343.0)] {
        let plan = planned(&h200, &vec![shape(src, dst, bytes); count], &Options::default());
        let ops = &plan.program.ops;
        assert_eq!((ops.len(), ops[0].mechanism, ops[0].copies.len()), (1, Mechanism::Kernel, count));
        assert_eq!((plan.program.lanes[0].device, plan.program.lanes[0].also.is_empty()), (DeviceId::gpu(0), true));
        assert!((plan.predicted * 1e6 / read - 1.0).abs() < 0.15, "modelled {:.1} us, read {read}", plan.predicted * 1e6);
    }
    let one_path = Options { max_paths: 1, ..Options::default() };
    let kernels =
        |batch: &[Shape]| planned(&h200, batch, &one_path).program.ops.iter().filter(|op| op.mechanism == Mechanism::Kernel).count();
    let pieces = vec![shape(-1, 0, 4096); 100];
    assert_eq!(kernels(&pieces), 1);
    // A single transfer is a plain copy. The driver makes all copies of pageable memory.
    assert_eq!(kernels(&pieces[..1]), 0);
    assert_eq!(kernels(&vec![Shape { src_kind: MemoryKind::Pageable, ..pieces[0] }; 100]), 0);
    // The batch also has a large copy on the same GPU, to any destination, or a copy with staged paths.
    for large in [shape(-1, 0, 64 * MIB), shape(0, -1, 64 * MIB), shape(0, 1, 64 * MIB)] {
        assert_eq!(kernels(&[&pieces[..], &[large]].concat()), 0, "{large:?}");
    }
    let staged = planned(&h200, &[&pieces[..], &[shape(0, 1, GIB)]].concat(), &Options::default());
    assert!(staged.program.ops.iter().all(|op| op.mechanism != Mechanism::Kernel));
    // The list has transfers in both directions, and each launch contains both.
    let mixed: Vec<Shape> = (0..600).map(|piece| if piece < 400 { shape(-1, 0, 4096) } else { shape(0, -1, 4096) }).collect();
    let plan = planned(&h200, &mixed, &one_path);
    let into = |copies: &[mpgpu_core::plan::Copy]| {
        copies.iter().filter(|copy| matches!(copy.from, Place::Source { transfer: 0..400, .. })).count()
    };
    assert!(plan.program.ops[0].copies.chunks(120).all(|launch| (79..=81).contains(&into(launch))), "two thirds of each");
}
