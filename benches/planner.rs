//! Measures planning time. Goals, on preset topologies and on measured ones: one transfer in 50 us, an 8-GPU all-to-all of 56 transfers in
//! 3 ms, and 4,096 transfers between a GPU and host memory in 2 ms.

#[path = "../tests/rust/common/mod.rs"]
mod common;
#[path = "../tests/rust/hidden.rs"]
mod hidden;

use crate::hidden::{Hidden, probed};
use criterion::{Criterion, criterion_group, criterion_main};
use mpgpu_core::plan::{Options, Shape, plan, validate};
use mpgpu_core::topology::MemoryKind;
use mpgpu_core::topology::{DeviceId, Machine, parse, preset};
use std::cell::LazyCell;
use std::fmt::Write;
use std::hint::black_box;

fn shape(src: i32, dst: i32, bytes: u64) -> Shape {
    let kind = |device: i32| if device < 0 { MemoryKind::Pinned } else { MemoryKind::Device };
    Shape { source: 0, dst_device: DeviceId(dst), src_device: DeviceId(src), dst_kind: kind(dst), src_kind: kind(src), bytes }
}

/// Returns a machine of `gpus` GPUs behind one NVSwitch, in which each pair of GPUs has its own host memory, as in a rack of Grace and
/// Blackwell. The machine is a model with rounded rates.
fn domain(gpus: u32) -> Machine {
    let names = |name: &str, count: u32, kind: &str| {
        (0..count).map(|i| format!("{{ name = \"{name}{i}\", kind = \"{kind}\", peer = false }},\n")).collect::<String>()
    };
    let hosts = gpus / 2;
    let devices = names("gpu", gpus, "gpu") + &names("host", hosts, "host");
    let mut text = format!("name = \"domain\"\nnode = [\n{}", devices.replace(", peer = false", ""));
    text += &names("grace", hosts, "switch");
    text += "{ name = \"nvswitch\", kind = \"switch\", peer = true },\n]\n";
    let mut links = |kind: &str, bandwidth: f64, ends: Vec<String>| {
        writeln!(text, "[[link]]\nkind = \"{kind}\"\nbandwidth = {bandwidth:e}\nbetween = [{}]", ends.join(", ")).expect("text");
    };
    links("nvlink", 792e9, (0..gpus).map(|gpu| format!("[\"gpu{gpu}\", \"nvswitch\"]")).collect());
    links("nvlink", 200e9, (0..gpus).map(|gpu| format!("[\"gpu{gpu}\", \"grace{}\"]", gpu / 2)).collect());
    links("host", 400e9, (0..hosts).map(|host| format!("[\"grace{host}\", \"host{host}\"]")).collect());
    Machine::new(parse(&text).expect("a topology")).expect("a machine")
}

/// Returns the transfers of a halo exchange. The ranks form a periodic grid with `sides` ranks along each axis, and each rank sends to its
/// 26 neighbours. `bytes` holds the sizes of faces, edges and corners.
fn halo(sides: [i32; 3], bytes: [u64; 3]) -> Vec<Shape> {
    let steps: Vec<[i32; 3]> = (0..27).map(|i| [i % 3 - 1, i / 3 % 3 - 1, i / 9 - 1]).filter(|step| *step != [0; 3]).collect();
    let mut batch = Vec::new();
    for rank in 0..sides.iter().product() {
        let place = [rank % sides[0], rank / sides[0] % sides[1], rank / sides[0] / sides[1]];
        for step in &steps {
            let [x, y, z] = [0, 1, 2].map(|axis| (place[axis] + step[axis]).rem_euclid(sides[axis]));
            let neighbour = x + sides[0] * (y + sides[1] * z);
            let distance = step.iter().filter(|s| **s != 0).count();
            batch.extend((neighbour != rank).then(|| shape(rank, neighbour, bytes[distance - 1])));
        }
    }
    batch
}

fn all_to_all(gpus: i32, bytes: u64) -> Vec<Shape> {
    (0..gpus).flat_map(|i| (0..gpus).filter(move |&j| j != i).map(move |j| shape(i, j, bytes))).collect()
}

/// Measures planning for one NVLink domain of 16 and of 72 GPUs, and for very many transfers.
fn large(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("large");
    group.sample_size(10);
    let mut bench = |title: String, machine: &Machine, batch: &[Shape]| {
        group.bench_function(title, |b| b.iter(|| plan(black_box(machine), black_box(batch), &Options::default()).expect("a plan")));
    };
    for (gpus, sides) in [(16, [4, 2, 2]), (72, [6, 4, 3])] {
        let machine = domain(gpus as u32);
        bench(format!("{gpus} GPUs: one copy of 256 MiB"), &machine, &[shape(0, 1, 256 << 20)]);
        let ring: Vec<Shape> = (0..gpus).map(|i| shape(i, (i + 1) % gpus, 128 << 20)).collect();
        bench(format!("{gpus} GPUs: ring, 128 MiB"), &machine, &ring);
        for (what, bytes) in [("240 kB", [240_000, 2_400, 24]), ("16 MiB", [16 << 20, 160 << 10, 1 << 10])] {
            let all = halo(sides, bytes);
            let own: Vec<Shape> = all.iter().copied().filter(|shape| shape.src_device == DeviceId::gpu(0)).collect();
            bench(format!("{gpus} GPUs: 26 neighbours of one, faces of {what}"), &machine, &own);
            bench(format!("{gpus} GPUs: 26 neighbours of all, faces of {what}"), &machine, &all);
        }
        for of in [8, 16, 72].into_iter().filter(|of| *of <= gpus) {
            bench(format!("{gpus} GPUs: all-to-all of {of}, 64 MiB"), &machine, &all_to_all(of, 64 << 20));
        }
    }
    let machine = Machine::new(preset("beluga").expect("a preset")).expect("a machine");
    let pairs = [(0, 1), (1, 0), (2, 3), (3, 2)];
    let pieces: Vec<Shape> = (0..100_000).map(|i| shape(pairs[i % 4].0, pairs[i % 4].1, [24, 2_400, 240_000][i / 4 % 3])).collect();
    bench("beluga: 100,000 pieces between two pairs".into(), &machine, &pieces);
    let machine = Machine::new(preset("hgx-h200").expect("a preset")).expect("a machine");
    for (title, src, dst) in [("GPU to host", 0, -1), ("host to GPU", -1, 0)] {
        bench(format!("hgx-h200: 4,096 pieces of 4 KiB, {title}"), &machine, &vec![shape(src, dst, 4096); 4096]);
    }
    group.finish();
}

/// Measures planning for eight GPUs whose rates come from a probe (measurement). A probe with noisy times yields more resources than the
/// preset, and nearly all rates differ.
fn after_a_probe(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("probed");
    group.sample_size(20);
    for name in ["hgx-h200", "dgx1-v100"] {
        let title = format!("{name}: all-to-all, 56 transfers of 64 MiB");
        let machine = LazyCell::new(|| {
            let mut times = Hidden::new(preset(name).expect("a preset"), 0.01, 1);
            Machine::new(probed(&mut times).topology).expect("a machine")
        });
        let batch = all_to_all(8, 64 << 20);
        group.bench_function(title, |b| {
            let machine = &*machine;
            b.iter(|| plan(black_box(machine), black_box(&batch), &Options::default()).expect("a plan"))
        });
    }
    group.finish();
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
        cases.push((format!("{name}: all-to-all, 56 transfers of 64 MiB"), name, all_to_all(8, 64 << 20)));
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

criterion_group!(benches, benchmark, after_a_probe, large);
criterion_main!(benches);
