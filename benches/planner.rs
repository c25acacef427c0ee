//! Planning time. Goals: one transfer in 50 us, an 8-GPU all-to-all of 56 transfers in 3 ms.

use criterion::{Criterion, criterion_group, criterion_main};
use mpgpu::backend::MemoryKind;
use mpgpu::plan::{Options, Shape, plan, validate};
use mpgpu::topology::{DeviceId, Machine, preset};
use std::hint::black_box;

fn shape(src: i32, dst: i32, bytes: u64) -> Shape {
    let kind = |device: i32| if device < 0 { MemoryKind::Pinned } else { MemoryKind::Device };
    Shape { dst_device: DeviceId(dst), src_device: DeviceId(src), dst_kind: kind(dst), src_kind: kind(src), bytes }
}

fn benchmark(criterion: &mut Criterion) {
    let mut cases: Vec<(String, &str, Vec<Shape>)> = Vec::new();
    for name in ["hgx-h200", "beluga", "dgx1-v100", "gh200-4"] {
        cases.push((format!("{name}: one copy of 8 B"), name, vec![shape(0, 1, 8)]));
        cases.push((format!("{name}: one copy of 512 MiB"), name, vec![shape(0, 1, 512 << 20)]));
    }
    cases.push(("hgx-h200: host to GPU, 1 GiB".into(), "hgx-h200", vec![shape(-1, 0, 1 << 30)]));
    let halo = [(6, 240_000), (12, 2_400), (8, 24)].iter().flat_map(|&(n, bytes)| vec![shape(0, 1, bytes); n]).collect();
    cases.push(("hgx-h200: 26 halo messages".into(), "hgx-h200", halo));
    for name in ["hgx-h200", "dgx1-v100"] {
        let all = (0..8).flat_map(|i| (0..8).filter(move |&j| j != i).map(move |j| shape(i, j, 64 << 20))).collect();
        cases.push((format!("{name}: all-to-all, 56 transfers of 64 MiB"), name, all));
    }
    let ring = (0..4).map(|i| shape(i, (i + 1) % 4, 128 << 20)).collect();
    cases.push(("beluga: ring of 4, 128 MiB".into(), "beluga", ring));
    let mut group = criterion.benchmark_group("plan");
    group.sample_size(20);
    for (title, name, batch) in &cases {
        let machine = Machine::new(preset(name).expect("a preset")).expect("a machine");
        let options = Options::default();
        group.bench_function(title, |b| b.iter(|| plan(black_box(&machine), black_box(batch), &options).expect("a plan")));
    }
    group.finish();
    let machine = Machine::new(preset("beluga").expect("a preset")).expect("a machine");
    let made = plan(&machine, &[shape(0, 1, 512 << 20)], &Options::default()).expect("a plan");
    criterion.bench_function(&format!("validate: {} operations", made.program.ops.len()), |b| {
        b.iter(|| validate(black_box(&made.program), 64 << 20).expect("a valid program"))
    });
}

criterion_group!(benches, benchmark);
criterion_main!(benches);
