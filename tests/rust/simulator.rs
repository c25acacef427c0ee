//! The simulator against closed forms, conservation, monotonicity, and the planner's model.

use crate::common::{Random, config, machine_and_batch};
use mpgpu::backend::MemoryKind;
use mpgpu::model::simulate::{Executor, Scenario, Simulation, SimulationError};
use mpgpu::plan::{Copy, Engine, Lane, LaneId, Mechanism, Op, OpId, Options, Place, Program, Ring, RingId, Shape, plan};
use mpgpu::topology::{Costs, DeviceId, Machine, ResourceId, Topology, parse, preset, preset_names};
use proptest::prelude::*;
use smallvec::smallvec;

const MIB: u64 = 1 << 20;
const STAGING: u64 = 64 * MIB;

fn shape(src: i32, dst: i32, bytes: u64) -> Shape {
    let kind = |device: i32| if device < 0 { MemoryKind::Pinned } else { MemoryKind::Device };
    Shape { dst_device: DeviceId(dst), src_device: DeviceId(src), dst_kind: kind(dst), src_kind: kind(src), bytes }
}

fn machine(name: &str) -> Machine {
    Machine::new(preset(name).expect("a preset")).expect("valid")
}

/// Three GPUs in a row of two links, host memory behind one slot that both directions share, and these costs.
fn three(first: f64, second: f64, costs: Costs) -> Machine {
    let mut topology = parse(&format!(
        r#"
        name = "three"
        node = [{{ name = "gpu0", kind = "gpu" }}, {{ name = "gpu1", kind = "gpu" }}, {{ name = "gpu2", kind = "gpu" }}, {{ name = "host0", kind = "host" }}]
        link = [
            {{ between = [["gpu0", "gpu1"]], kind = "nvlink", bandwidth = {first:e}, latency = 1e-6 }},
            {{ between = [["gpu1", "gpu2"]], kind = "nvlink", bandwidth = {second:e}, latency = 1e-6 }},
            {{ between = [["gpu0", "host0"]], kind = "pcie", bandwidth = 10e9 }},
        ]
        [[shared]]
        name = "slot"
        capacity = 12e9
        links = ["gpu0>host0", "host0>gpu0"]
        "#
    ))
    .expect("a topology");
    topology.costs = costs;
    Machine::new(topology).expect("valid")
}

fn free() -> Costs {
    let (copy, issue, chunk, join, batch, kernel) = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
    let none = Costs { copy, issue, chunk, join, batch, kernel, ..Costs::default() };
    Costs { batch_segment: 0.0, kernel_segment: 0.0, kernel_efficiency: 1.0, graph_node: 0.0, graph_first_node: 0.0, ..none }
}

/// One plain copy of each transfer, each on a lane of its own.
fn direct(shapes: &[Shape]) -> Program {
    let mut program = Program { transfers: shapes.iter().map(|shape| shape.bytes).collect(), ..Program::default() };
    for (index, shape) in shapes.iter().enumerate() {
        program.lanes.push(Lane { device: shape.src_device });
        let (transfer, offset) = (index as u32, 0);
        let copies =
            smallvec![Copy { from: Place::Source { transfer, offset }, to: Place::Destination { transfer, offset }, bytes: shape.bytes }];
        program.ops.push(Op { lane: LaneId(index as u32), mechanism: Mechanism::Copy, copies, after: smallvec![] });
    }
    program
}

/// One transfer through a ring of `slots` on `via`, in equal chunks.
fn staged(shape: &Shape, via: DeviceId, chunks: u32, slots: u32) -> Program {
    let bytes = shape.bytes / u64::from(chunks);
    let mut program = Program { transfers: vec![shape.bytes], ..Program::default() };
    program.lanes = vec![Lane { device: shape.src_device }, Lane { device: via }];
    program.rings = vec![Ring { device: via, slot_bytes: bytes, slots }];
    for chunk in 0..chunks {
        let offset = u64::from(chunk) * bytes;
        let slot = Place::Slot { ring: RingId(0), slot: chunk % slots };
        let freed = chunk.checked_sub(slots).map(|earlier| OpId(2 * earlier + 1));
        for (lane, from, to, after) in [
            (0, Place::Source { transfer: 0, offset }, slot, freed),
            (1, slot, Place::Destination { transfer: 0, offset }, Some(OpId(2 * chunk))),
        ] {
            let copies = smallvec![Copy { from, to, bytes }];
            program.ops.push(Op { lane: LaneId(lane), mechanism: Mechanism::Copy, copies, after: after.into_iter().collect() });
        }
    }
    program
}

fn simulate(machine: &Machine, program: &Program, shapes: &[Shape], executor: Executor) -> Simulation {
    let mut scenario = Scenario::new(machine, STAGING);
    let bound = scenario.bind(program, shapes).expect("it fits this machine");
    scenario.execute(bound, executor, 0);
    scenario.run()
}

fn about(value: f64, expected: f64) {
    assert!((value / expected - 1.0).abs() < 1e-9, "{value:e}, expected {expected:e}");
}

#[test]
fn one_copy_takes_its_start_its_latency_and_its_bytes() {
    for bytes in [8, 1 << 20, 1 << 30] {
        let machine = three(50e9, 25e9, Costs::default());
        let shapes = [shape(0, 1, bytes)];
        let run = simulate(&machine, &direct(&shapes), &shapes, Executor::Streams);
        about(run.seconds, machine.costs().copy + 1e-6 + bytes as f64 / 50e9);
        about(run.executions[0].issued, machine.costs().issue);
        let [use_] = run.resources.as_slice() else { panic!("one link: {:?}", run.resources) };
        assert_eq!((use_.bytes, use_.peak), (bytes, 50e9));
        about(use_.busy, bytes as f64 / 50e9);
    }
}

#[test]
fn chunks_over_two_hops_take_one_chunk_on_the_faster_hop_more_than_all_on_the_slower() {
    let costs = Costs { copy: 6e-6, issue: 1e-9, chunk: 4e-6, join: 3e-6, ..free() };
    for (first, second) in [(50e9, 25e9), (25e9, 50e9), (40e9, 40e9)] {
        for chunks in [1, 2, 7, 32] {
            let machine = three(first, second, costs.clone());
            let shapes = [shape(0, 2, u64::from(chunks) * MIB)];
            let run = simulate(&machine, &staged(&shapes[0], DeviceId::gpu(1), chunks, 4), &shapes, Executor::Streams);
            let (n, each, hop) = (f64::from(chunks), MIB as f64, |rate: f64| costs.chunk + 1e-6 + MIB as f64 / rate);
            let expected = costs.copy + (n - 1.0) * hop(f64::min(first, second)) + hop(first) + hop(second) + costs.join / 2.0;
            about(run.seconds, expected);
            let bytes: u64 = run.resources.iter().map(|of| of.bytes).sum();
            assert_eq!(bytes as f64, 2.0 * n * each);
        }
    }
}

#[test]
fn a_ring_of_one_slot_does_one_hop_at_a_time() {
    let machine = three(50e9, 25e9, free());
    let shapes = [shape(0, 2, 8 * MIB)];
    let run = simulate(&machine, &staged(&shapes[0], DeviceId::gpu(1), 8, 1), &shapes, Executor::Streams);
    about(run.seconds, 8.0 * (2e-6 + MIB as f64 / 50e9 + MIB as f64 / 25e9));
}

#[test]
fn two_flows_on_a_link_share_it_until_the_shorter_is_done() {
    let machine = three(50e9, 25e9, free());
    let shapes = [shape(0, 1, 10 * MIB), shape(0, 1, 30 * MIB)];
    let run = simulate(&machine, &direct(&shapes), &shapes, Executor::Streams);
    let ends: Vec<f64> = run.timeline.spans.iter().filter(|span| span.op.is_some()).map(|span| span.end).collect();
    about(ends[0], 1e-6 + 20.0 * MIB as f64 / 50e9);
    about(ends[1], 1e-6 + 40.0 * MIB as f64 / 50e9);
}

#[test]
fn both_directions_of_a_slot_share_what_the_slot_carries() {
    let machine = three(50e9, 25e9, free());
    let shapes = [shape(0, -1, 60 * MIB), shape(-1, 0, 30 * MIB)];
    let run = simulate(&machine, &direct(&shapes), &shapes, Executor::Streams);
    // 6 GB/s each until 30 MiB are through, then 10 GB/s, the link's own rate.
    about(run.seconds, 30.0 * MIB as f64 / 6e9 + 30.0 * MIB as f64 / 10e9);
    let slot = run.resources.iter().find(|of| machine.resources()[of.resource.0 as usize].name == "slot").expect("used");
    assert_eq!((slot.bytes, slot.peak), (90 * MIB, 12e9));
}

#[test]
fn a_kernel_reaches_its_part_of_the_link() {
    let machine = three(50e9, 25e9, Costs { kernel: 9e-6, kernel_segment: 1e-8, kernel_efficiency: 0.8, ..free() });
    let shapes = [shape(0, 1, MIB), shape(0, 1, MIB)];
    let mut program = direct(&shapes);
    let second = program.ops.pop().expect("two");
    program.lanes.pop();
    program.ops[0].copies.extend(second.copies);
    program.ops[0].mechanism = Mechanism::Kernel;
    let run = simulate(&machine, &program, &shapes, Executor::Streams);
    about(run.seconds, 9e-6 + 2e-8 + 1e-6 + 2.0 * MIB as f64 / 40e9);
}
