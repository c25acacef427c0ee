//! Measures the time that the simulator needs. The goal is 10,000 operations in 100 ms.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use mpgpu_core::model::simulate::{Executor, Scenario};
use mpgpu_core::plan::{Options, Plan, Shape, plan};
use mpgpu_core::topology::MemoryKind;
use mpgpu_core::topology::{DeviceId, Machine, preset};
use std::hint::black_box;

const OPERATIONS: usize = 10_000;

fn shape(src: i32, dst: i32, bytes: u64) -> Shape {
    let kind = |device: i32| if device < 0 { MemoryKind::Pinned } else { MemoryKind::Device };
    Shape { source: 0, dst_device: DeviceId(dst), src_device: DeviceId(src), dst_kind: kind(dst), src_kind: kind(src), bytes }
}

/// Returns a scenario in which `plan` is executed until the executions have [`OPERATIONS`] operations in total, distributed over `streams`
/// streams.
fn scenario<'a>(machine: &'a Machine, plan: &'a Plan, batch: &[Shape], streams: u32) -> Scenario<'a> {
    let mut scenario = Scenario::new(machine, 64 << 20);
    let bound: Vec<_> = (0..streams).map(|_| scenario.bind(&plan.program, batch).expect("planned for it")).collect();
    for execution in 0..OPERATIONS.div_ceil(plan.program.ops.len()) {
        let stream = execution % streams as usize;
        scenario.execute(bound[stream], Executor::Streams, stream as u32);
    }
    scenario
}

fn benchmark(criterion: &mut Criterion) {
    let all = |gpus: i32| (0..gpus).flat_map(|i| (0..gpus).filter(move |&j| j != i).map(move |j| shape(i, j, 64 << 20))).collect();
    let cases: [(&str, &str, Vec<Shape>, u32); 4] = [
        ("one copy through four paths, one stream", "beluga", vec![shape(0, 1, 512 << 20)], 1),
        ("the same in 16 streams", "beluga", vec![shape(0, 1, 512 << 20)], 16),
        ("host to GPU through eight GPUs", "hgx-h200", vec![shape(-1, 0, 1 << 30)], 1),
        ("all-to-all of eight, 56 transfers", "dgx1-v100", all(8), 1),
    ];
    let mut group = criterion.benchmark_group("simulate 10,000 operations");
    group.sample_size(20).throughput(Throughput::Elements(OPERATIONS as u64));
    for (title, name, batch, streams) in &cases {
        let machine = Machine::new(preset(name).expect("a preset")).expect("a machine");
        let plan = plan(&machine, batch, &Options::default()).expect("a plan");
        let scenario = scenario(&machine, &plan, batch, *streams);
        group.bench_function(format!("{name}: {title}"), |b| b.iter(|| black_box(&scenario).run()));
    }
    group.finish();
}

criterion_group!(benches, benchmark);
criterion_main!(benches);
