//! Ranks of a node that plan each for itself, in the simulator.

use mpgpu::backend::MemoryKind;
use mpgpu::model::simulate::{Executor, Scenario};
use mpgpu::plan::{Options, Shape, plan};
use mpgpu::topology::{DeviceId, Machine, preset};

const BYTES: u64 = 64 << 20;

/// What a rank on each GPU puts.
fn ranks(gpus: i32, to: impl Fn(i32) -> Vec<i32>) -> Vec<Vec<Shape>> {
    let kind = MemoryKind::Device;
    let put =
        |src: i32, dst: i32| Shape { dst_device: DeviceId(dst), src_device: DeviceId(src), dst_kind: kind, src_kind: kind, bytes: BYTES };
    (0..gpus).map(|rank| to(rank).into_iter().map(|dst| put(rank, dst)).collect()).collect()
}

/// Seconds until all ranks have executed their own plan four times.
fn seconds(machine: &Machine, ranks: &[Vec<Shape>], options: &Options) -> f64 {
    let plans: Vec<_> = ranks.iter().map(|batch| plan(machine, batch, options).expect("planned")).collect();
    let mut scenario = Scenario::new(machine, options.staging_bytes);
    for (rank, (plan, batch)) in plans.iter().zip(ranks).enumerate() {
        let bound = scenario.bind_in(rank, &plan.program, batch).expect("bound");
        (0..4).for_each(|_| _ = scenario.execute_on(rank, bound, Executor::of(plan.executor), rank as u32));
    }
    scenario.run().seconds
}

#[test]
fn ranks_that_plan_alone_lose_nothing_against_one_path_and_on_wired_nodes_gain_by_each_others_links() {
    for (name, least_gain_of_ring) in
        [("beluga", 1.4), ("narval", 1.4), ("gh200-4", 1.4), ("dgx1-v100", 1.4), ("summit", 1.0), ("hgx-h200", 1.0)]
    {
        let machine = Machine::new(preset(name).expect("a preset")).expect("well formed");
        let gpus = (machine.gpu_count() as i32).min(4);
        let patterns = [
            ("ring", least_gain_of_ring, ranks(gpus, |rank| vec![(rank + 1) % gpus])),
            ("both neighbours", 1.0, ranks(gpus, |rank| vec![(rank + 1) % gpus, (rank + gpus - 1) % gpus])),
            ("all to all", 1.0, ranks(gpus, |rank| (0..gpus).filter(|&other| other != rank).collect())),
        ];
        for (what, least, ranks) in patterns {
            let one_path = seconds(&machine, &ranks, &Options { max_paths: 1, ..Options::default() });
            let gain = one_path / seconds(&machine, &ranks, &Options { alone: true, ..Options::default() });
            assert!(gain > 0.99 * least, "{name}, {what}: {gain:.2} times as fast as one path");
        }
    }
}

/// What it is for: four H200 in a ring were read at 0.47 of one path with 1 GiB.
#[test]
fn host_paths_of_ranks_that_plan_alone_meet_in_host_memory() {
    let machine = Machine::new(preset("hgx-h200").expect("a preset")).expect("well formed");
    let ring = ranks(4, |rank| vec![(rank + 1) % 4]);
    let one_path = seconds(&machine, &ring, &Options { max_paths: 1, ..Options::default() });
    assert!(one_path / seconds(&machine, &ring, &Options::default()) < 0.7);
}
