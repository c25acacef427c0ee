//! Simulates ranks of a node, each of which plans its copies without knowledge of the others.

use mpgpu_core::model::HOST_RINGS;
use mpgpu_core::model::simulate::{Executor, Scenario, steady};
use mpgpu_core::plan::{Options, Passing, Shape, Tuned, plan};
use mpgpu_core::topology::MemoryKind;
use mpgpu_core::topology::{DeviceId, Machine, preset};

const BYTES: u64 = 64 << 20;

/// Returns the copies that the rank of each GPU makes, to the GPUs that `to` returns.
fn ranks(gpus: i32, to: impl Fn(i32) -> Vec<i32>) -> Vec<Vec<Shape>> {
    (0..gpus).map(|rank| to(rank).into_iter().map(|dst| put(rank, dst, BYTES)).collect()).collect()
}

fn put(src: i32, dst: i32, bytes: u64) -> Shape {
    let kind = MemoryKind::Device;
    Shape { source: 0, dst_device: DeviceId(dst), src_device: DeviceId(src), dst_kind: kind, src_kind: kind, bytes }
}

/// Returns the time in seconds until all ranks have executed their own plans four times.
fn seconds(machine: &Machine, ranks: &[Vec<Shape>], options: &Options) -> f64 {
    // The host path is allowed, because some GPUs can reach each other only through host memory.
    let anyhow = Options { host_path: true, max_paths: 1, ..*options };
    let planned = |batch: &Vec<Shape>| plan(machine, batch, options).or_else(|_| plan(machine, batch, &anyhow)).expect("planned");
    let plans: Vec<_> = ranks.iter().map(planned).collect();
    let mut scenario = Scenario::new(machine, options.staging_bytes);
    for (rank, (plan, batch)) in plans.iter().zip(ranks).enumerate() {
        let bound = scenario.bind_in(rank, &plan.program, batch).expect("bound");
        (0..4).for_each(|_| _ = scenario.execute_on(rank, bound, Executor::of(plan.executor), rank as u32));
    }
    scenario.run().seconds
}

#[test]
fn ranks_that_plan_alone_without_host_memory_lose_nothing_against_one_path_and_on_wired_nodes_gain_by_each_others_links() {
    for (name, least_gain_of_ring) in
        [("beluga", 1.4), ("narval", 1.4), ("gh200-4", 1.4), ("dgx1-v100", 1.4), ("summit", 1.0), ("hgx-h200", 1.0)]
    {
        let machine = Machine::new(preset(name).expect("a preset")).expect("well formed");
        let alone = Options { host_path: false, passing: Passing::Off, ..Options::default() };
        let gpus = (machine.gpu_count() as i32).min(4);
        let patterns = [
            ("ring", least_gain_of_ring, ranks(gpus, |rank| vec![(rank + 1) % gpus])),
            ("both neighbours", 1.0, ranks(gpus, |rank| vec![(rank + 1) % gpus, (rank + gpus - 1) % gpus])),
            ("all to all", 1.0, ranks(gpus, |rank| (0..gpus).filter(|&other| other != rank).collect())),
        ];
        for (what, least, ranks) in patterns {
            let one_path = seconds(&machine, &ranks, &Options { max_paths: 1, ..Options::default() });
            let gain = one_path / seconds(&machine, &ranks, &alone);
            assert!(gain > 0.99 * least, "{name}, {what}: {gain:.2} times as fast as one path");
        }
    }
}

/// Measured speed-up over one path of ranks in a ring, which each put 64 MiB to 1 GiB with the host path enabled. The values are for two
/// and four H200, 2026-11-22.
const READ: [(i32, [f64; 5]); 2] = [(2, [0.988, 1.015, 1.025, 1.022, 0.977]), (4, [0.936, 0.846, 0.698, 0.573, 0.468])];

#[test]
fn ranks_that_plan_alone_lose_in_host_memory_what_two_and_four_h200_were_read_to_lose() {
    let machine = Machine::new(preset("hgx-h200").expect("a preset")).expect("well formed");
    for (ranks, read) in READ {
        let mut errors = read.map(|_| 0.0);
        for ((read, error), mib) in read.iter().zip(&mut errors).zip([64, 128, 256, 512, 1024]) {
            let ring: Vec<_> = (0..ranks).map(|rank| put(rank, (rank + 1) % ranks, mib << 20)).collect();
            let seconds = |max_paths| {
                let options = Options { max_paths, ..Options::default() };
                let rank = |shape| plan(&machine, &[shape], &options).expect("planned").as_rank();
                steady(&machine, &ring.iter().copied().map(rank).collect::<Vec<_>>(), 1).expect("bound").seconds
            };
            let gain = seconds(1) / seconds(u32::MAX);
            *error = (gain / read - 1.0).abs();
            println!("{ranks} ranks, {mib} MiB: simulated {gain:.3}, read {read}");
        }
        errors.sort_by(f64::total_cmp);
        // The error is largest for four ranks with 64 MiB, because the simulated ranks are synchronized and therefore write and read at the
        // same times.
        assert!(errors[2] <= 0.08 && errors[4] <= 0.18, "{ranks} ranks: {errors:?}");
    }
}

#[test]
fn two_ranks_that_take_half_of_the_host_path_lose_nothing_against_keeping_off_it_and_one_gains_by_all_of_it() {
    // Paths over several relays are excluded, because they would use links of other ranks. The test compares only the use of host memory.
    let all = Options { passing: Passing::Off, ..Options::default() };
    let half = Options { tuned: Some(Tuned { host_share: 500, ..Tuned::default() }), ..all };
    let off = Options { host_path: false, ..all };
    for name in ["beluga", "narval", "dgx1-v100", "summit", "hgx-h200"] {
        let machine = Machine::new(preset(name).expect("a preset")).expect("well formed");
        for mib in [16, 64, 256, 1024] {
            let two = [put(0, 1, mib << 20), put(1, 0, mib << 20)].map(|shape| vec![shape]);
            let gain = |ranks: &[Vec<Shape>], options: &Options| seconds(&machine, ranks, &off) / seconds(&machine, ranks, options);
            let (of_two, of_one) = (gain(&two, &half), gain(&two[..1], &all));
            println!("{name}, {mib} MiB: two by half {of_two:.3}, one by all {of_one:.3}, two by all {:.3}", gain(&two, &all));
            assert!(of_two > 0.99 && of_one > 0.99);
        }
    }
}

#[test]
fn rings_that_fit_the_cache_together_do_not_slow_each_other_down_and_larger_ones_do() {
    let machine = Machine::new(preset("hgx-h200").expect("a preset")).expect("well formed");
    let ring =
        ranks(4, |rank| vec![(rank + 1) % 4]).into_iter().map(|batch| vec![Shape { bytes: 1 << 30, ..batch[0] }]).collect::<Vec<_>>();
    let run = |chunk_bytes: u64| {
        let options = Options { chunk_bytes: Some(chunk_bytes), ..Options::default() };
        let rings = 4 * plan(&machine, &ring[0], &options).expect("planned").program.rings[0].bytes();
        (rings, seconds(&machine, &ring, &options))
    };
    let [(half, faster), (whole, fast), (beyond, slow)] = [1 << 20, 2 << 20, 8 << 20].map(run);
    assert!(2 * half == whole && whole == HOST_RINGS && beyond == 4 * HOST_RINGS);
    assert!((faster / fast - 1.0).abs() < 0.05 && slow > 1.5 * fast, "{faster} {fast} {slow}");
}
