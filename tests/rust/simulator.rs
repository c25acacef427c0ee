//! Tests the simulator. Compares it with closed formulas and with the planner's model, and checks that data is conserved and that a faster
//! machine is never slower.

mod papers;
mod readings;

use crate::common::{Random, config, machine_and_batch};
use mpgpu_core::model::simulate::{Executor, Scenario, Simulation, SimulationError};
use mpgpu_core::plan::{Copy, Engine, Lane, LaneId, Mechanism, Op, OpId, Options, Place, Program, Ring, RingId, Shape, plan};
use mpgpu_core::topology::MemoryKind;
use mpgpu_core::topology::{Costs, DeviceId, Machine, ResourceId, Topology, parse, preset};
use proptest::prelude::*;
use smallvec::smallvec;

const MIB: u64 = 1 << 20;
const STAGING: u64 = 64 * MIB;

fn shape(src: i32, dst: i32, bytes: u64) -> Shape {
    let kind = |device: i32| if device < 0 { MemoryKind::Pinned } else { MemoryKind::Device };
    Shape { source: 0, dst_device: DeviceId(dst), src_device: DeviceId(src), dst_kind: kind(dst), src_kind: kind(src), bytes }
}

fn machine(name: &str) -> Machine {
    Machine::new(preset(name).expect("a preset")).expect("valid")
}

/// Returns a machine of three GPUs with a link from each to the next, with host memory behind a PCIe slot whose capacity both directions
/// share, and with these costs.
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
    let none =
        Costs { copy, issue, chunk_via_host: chunk, chunk_via_gpu: chunk, fork_join_staged: join, batch, kernel, ..Costs::default() };
    let none = Costs { fork_join_issue: 0.0, pull: 0.0, graph_launch: 0.0, graph_node: 0.0, graph_instantiate: 0.0, ..none };
    Costs { batch_segment: 0.0, kernel_segment: 0.0, kernel_efficiency: 1.0, fork_join_gpus: 0.0, graph_gap: 0.0, ..none }
}

/// Returns a program with one plain copy for each transfer, each in its own internal stream.
fn direct(shapes: &[Shape]) -> Program {
    let mut program = Program { transfers: shapes.iter().map(|shape| shape.bytes).collect(), ..Program::default() };
    for (index, shape) in shapes.iter().enumerate() {
        program.lanes.push(Lane::new(shape.src_device));
        let (transfer, offset) = (index as u32, 0);
        let copies =
            smallvec![Copy { from: Place::Source { transfer, offset }, to: Place::Destination { transfer, offset }, bytes: shape.bytes }];
        program.ops.push(Op { lane: LaneId(index as u32), mechanism: Mechanism::Copy, copies, after: smallvec![] });
    }
    program
}

/// Returns a program that copies one transfer in `chunks` equal chunks through a ring of `slots` slots on the device `via`.
fn staged(shape: &Shape, via: DeviceId, chunks: u32, slots: u32) -> Program {
    let bytes = shape.bytes / u64::from(chunks);
    let mut program = Program { transfers: vec![shape.bytes], ..Program::default() };
    program.lanes = vec![Lane::new(shape.src_device), Lane::new(via)];
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
    let costs = Costs { copy: 6e-6, issue: 1e-9, chunk_via_host: 4e-6, chunk_via_gpu: 4e-6, fork_join_staged: 3e-6, ..free() };
    for (first, second) in [(50e9, 25e9), (25e9, 50e9), (40e9, 40e9)] {
        for chunks in [1, 2, 7, 32] {
            let machine = three(first, second, costs.clone());
            let shapes = [shape(0, 2, u64::from(chunks) * MIB)];
            let run = simulate(&machine, &staged(&shapes[0], DeviceId::gpu(1), chunks, 4), &shapes, Executor::Streams);
            let (n, each, hop) = (f64::from(chunks), MIB as f64, |rate: f64| costs.chunk_via_host + 1e-6 + MIB as f64 / rate);
            let expected = costs.copy + (n - 1.0) * hop(f64::min(first, second)) + hop(first) + hop(second) + costs.fork_join_staged / 2.0;
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
    // Each flow has 6 GB/s until 30 MiB have been copied. The remaining flow then has 10 GB/s, the rate of its link.
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

#[test]
fn executions_of_one_stream_follow_each_other_and_those_of_two_share() {
    let machine = three(50e9, 25e9, free());
    let shapes = [shape(0, 1, 50 * MIB)];
    let program = direct(&shapes);
    for (streams, first) in [([0, 0], 1.0), ([0, 1], 2.0)] {
        let mut scenario = Scenario::new(&machine, STAGING);
        let bound = scenario.bind(&program, &shapes).expect("fits");
        let puts = streams.map(|stream| scenario.execute(bound, Executor::Streams, stream));
        let run = scenario.run();
        let latency = if first == 1.0 { 2e-6 } else { 1e-6 };
        about(run.executions[puts[1].0].done, latency + 100.0 * MIB as f64 / 50e9);
        about(run.executions[puts[0].0].done, 1e-6 + first * 50.0 * MIB as f64 / 50e9);
    }
}

#[test]
fn executions_that_share_staging_memory_do_not_overlap_and_others_do() {
    let machine = three(50e9, 50e9, free());
    let shapes = [shape(0, 2, 8 * MIB)];
    let program = staged(&shapes[0], DeviceId::gpu(1), 8, 4);
    let spans = |staging: u64| {
        let mut scenario = Scenario::new(&machine, staging);
        // Two plans have the same transfers between two different pairs of buffers.
        for stream in 0..2 {
            let bound = scenario.bind(&program, &shapes).expect("fits");
            scenario.execute(bound, Executor::Streams, stream);
        }
        let run = scenario.run();
        let begin = run.timeline.spans.iter().filter(|span| run.timeline.lanes[span.lane].name.starts_with("#1 ")).map(|span| span.begin);
        (run.executions[0].done, begin.fold(f64::INFINITY, f64::min))
    };
    let (done, begin) = spans(8 * MIB);
    assert_eq!(begin, 0.0, "each has its own half of the staging memory");
    assert!(done > 0.0);
    let (done, begin) = spans(4 * MIB);
    assert!(begin >= done, "the second began at {begin:e}, before the first had left the slots at {done:e}");
    let mut scenario = Scenario::new(&machine, 3 * MIB);
    let error = scenario.bind(&program, &shapes).expect_err("four slots of 1 MiB");
    assert_eq!(error, SimulationError::Staging { device: DeviceId::gpu(1), bound: 3 * MIB });
}

#[test]
fn a_host_thread_that_waits_issues_nothing_meanwhile() {
    let costs = Costs { copy: 6e-6, issue: 2e-6, ..free() };
    let machine = three(50e9, 25e9, costs);
    let shapes = [shape(0, 1, MIB)];
    let program = direct(&shapes);
    let alone = 6e-6 + 1e-6 + MIB as f64 / 50e9;
    let mut scenario = Scenario::new(&machine, STAGING);
    let bound = scenario.bind(&program, &shapes).expect("fits");
    for _ in 0..3 {
        let put = scenario.execute(bound, Executor::Streams, 0);
        scenario.wait(0, put);
    }
    about(scenario.run().seconds, 3.0 * alone);
    // If nothing waits, only the gap between two copies of one stream remains.
    let mut scenario = Scenario::new(&machine, STAGING);
    let bound = scenario.bind(&program, &shapes).expect("fits");
    (0..3).for_each(|_| assert!(scenario.execute(bound, Executor::Streams, 0).0 < 3));
    about(scenario.run().seconds, alone + 2.0 * (2e-6 + 1e-6 + MIB as f64 / 50e9));
}

#[test]
fn a_graph_is_launched_faster_than_its_copies_are_issued_except_the_first_time() {
    let machine = machine("beluga");
    let shapes = [shape(0, 1, 64 * MIB)];
    let plan = plan(&machine, &shapes, &Options::default()).expect("a plan");
    let nodes = plan.program.ops.iter().map(|op| op.copies.len()).sum::<usize>() as f64;
    let issued = |executor| simulate(&machine, &plan.program, &shapes, executor).executions[0].issued;
    let costs = machine.costs();
    about(issued(Executor::Streams), nodes * costs.issue);
    about(issued(Executor::Graph), costs.graph_launch + (nodes - 1.0) * costs.graph_node);
    about(issued(Executor::FirstGraph), costs.graph_launch + (nodes - 1.0) * costs.graph_node + nodes * costs.graph_instantiate);
    assert_eq!(Executor::of(plan.executor), Executor::Graph);
    assert_eq!(Executor::of(Engine::Stream), Executor::Streams);
}

#[test]
fn a_program_that_does_not_fit_the_machine_is_refused_with_the_reason() {
    let machine = three(50e9, 25e9, free());
    let far = [shape(0, 2, MIB)];
    let (program, mut behind) = (direct(&far), staged(&far[0], DeviceId::gpu(1), 2, 2));
    behind.ops[0].after.push(OpId(1));
    let mut idle = direct(&far);
    idle.ops[0].copies.clear();
    let mut scenario = Scenario::new(&machine, STAGING);
    let error = scenario.bind(&program, &far).expect_err("no link joins GPUs 0 and 2");
    assert_eq!(error, SimulationError::NoRoute { op: 0, from: DeviceId::gpu(0), to: DeviceId::gpu(2) });
    assert_eq!(scenario.bind(&program, &[]), Err(SimulationError::Transfers { program: 1, shapes: 0 }));
    assert_eq!(scenario.bind(&behind, &far), Err(SimulationError::Invalid { op: 0 }));
    assert_eq!(scenario.bind(&idle, &far), Err(SimulationError::Invalid { op: 0 }));
}

#[test]
fn an_execution_of_nothing_is_done_when_it_is_issued_and_its_turn_has_come() {
    let machine = three(50e9, 25e9, free());
    let shapes = [shape(0, 1, MIB)];
    let (program, nothing) = (direct(&shapes), Program { transfers: vec![0], ..Program::default() });
    let mut scenario = Scenario::new(&machine, STAGING);
    let (some, none) = (scenario.bind(&program, &shapes).expect("fits"), scenario.bind(&nothing, &[shape(0, 1, 0)]).expect("fits"));
    let before = scenario.execute(none, Executor::Streams, 0);
    scenario.wait(0, before);
    scenario.execute(some, Executor::Streams, 0);
    scenario.execute(none, Executor::Streams, 0);
    let run = scenario.run();
    assert_eq!(run.executions[0].done, 0.0);
    assert!(run.executions[2].done >= run.executions[1].done && run.executions[1].done > 0.0);
    assert_eq!(Scenario::new(&machine, STAGING).run().seconds, 0.0);
}

/// Simulates a batch. Checks in every interval that no resource exceeds its capacity, and at the end that every copy has copied all its
/// bytes.
fn conserving(machine: &Machine, program: &Program, shapes: &[Shape], executor: Executor, staging: u64) -> Simulation {
    let mut scenario = Scenario::new(machine, staging);
    let bound = scenario.bind(program, shapes).expect("planned for this machine");
    scenario.execute(bound, executor, 0);
    let resources = machine.resources();
    let mut moved = vec![0.0_f64; resources.len()];
    let mut drawn = vec![0.0_f64; resources.len()];
    let mut last = 0.0;
    let run = scenario.run_observed(|segment| {
        assert!(segment.begin >= last && segment.end > segment.begin, "stretches follow each other");
        last = segment.end;
        let mut load = vec![0.0_f64; resources.len()];
        for flow in segment.flows {
            let route = machine.route(flow.from, flow.to).expect("a route");
            for resource in &route.resources {
                let draw = flow.draw * resources[resource.0 as usize].draw(flow.staged);
                load[resource.0 as usize] += flow.rate * draw;
                moved[resource.0 as usize] += flow.rate * (segment.end - segment.begin);
                drawn[resource.0 as usize] += flow.rate * draw * (segment.end - segment.begin);
            }
            // Rates are max-min fair: each flow uses a saturated resource on which no other flow is faster.
            let limited = route.resources.iter().any(|resource| {
                let on_it = |other: &&mpgpu_core::model::simulate::SegmentFlow| {
                    machine.route(other.from, other.to).is_some_and(|route| route.resources.contains(resource))
                };
                let of = &resources[resource.0 as usize];
                let full: f64 = segment.flows.iter().filter(on_it).map(|other| other.rate * other.draw * of.draw(other.staged)).sum();
                let fastest = segment.flows.iter().filter(on_it).map(|other| other.rate).fold(0.0, f64::max);
                full >= of.capacity * (1.0 - 1e-9) && flow.rate >= fastest * (1.0 - 1e-9)
            });
            assert!(limited, "a flow from {} to {} at {:e} could be faster", flow.from, flow.to, flow.rate);
        }
        for (resource, load) in resources.iter().zip(load) {
            assert!(load <= resource.capacity * (1.0 + 1e-9), "{} carries {load:e} of {:e}", resource.name, resource.capacity);
        }
    });
    let mut bytes = vec![0_u64; resources.len()];
    for (op, copy) in program.ops.iter().flat_map(|op| op.copies.iter().map(move |copy| (op, copy))) {
        let device = |place: Place| match place {
            Place::Source { transfer, .. } => shapes[transfer as usize].src_device,
            Place::Destination { transfer, .. } => shapes[transfer as usize].dst_device,
            Place::Slot { ring, .. } => program.rings[ring.0 as usize].device,
        };
        let (from, to, lane) = (device(copy.from), device(copy.to), program.lanes[op.lane.0 as usize].device);
        // Data that a kernel copies between two other GPUs, or inside one, passes through the kernel's own GPU.
        let passes = op.mechanism == Mechanism::Kernel && ![from, to].contains(&lane);
        let ways = if passes { [Some((from, lane)), Some((lane, to))] } else { [Some((from, to)), None] };
        for (from, to) in ways.into_iter().flatten() {
            let route = machine.route(from, to).expect("a route");
            route.resources.iter().for_each(|resource| bytes[resource.0 as usize] += copy.bytes);
        }
    }
    for (at, bytes) in bytes.iter().enumerate() {
        let of = run.resources.iter().find(|of| of.resource == ResourceId(at as u32));
        assert_eq!(of.map_or(0, |of| of.bytes), *bytes);
        // A rounding error of one byte is permitted, because there are thousands of intervals.
        assert!((moved[at] - *bytes as f64).abs() <= 1.0 + 1e-6 * *bytes as f64, "{} of {bytes} bytes moved", moved[at]);
        if let Some(of) = of {
            assert!(of.peak <= resources[at].capacity * (1.0 + 1e-9) && of.mean <= of.peak * (1.0 + 1e-9));
            assert!((of.mean * run.seconds - drawn[at]).abs() <= 1.0 + 1e-6 * drawn[at] && of.busy <= run.seconds * (1.0 + 1e-9));
        }
    }
    run
}

/// Checks that the simulated timeline has the order that the program requires.
fn in_order(program: &Program, run: &Simulation) {
    let spans: Vec<_> = run.timeline.spans.iter().filter(|span| span.op.is_some()).collect();
    assert_eq!(spans.len(), program.ops.len());
    let mut lanes = vec![0.0; program.lanes.len()];
    for (op, span) in program.ops.iter().zip(&spans) {
        assert!(span.end >= span.begin && span.end <= run.seconds * (1.0 + 1e-12), "{span:?}");
        assert!(span.begin >= std::mem::replace(&mut lanes[op.lane.0 as usize], span.end), "{span:?} overlaps the one before it");
        for before in &op.after {
            assert!(span.begin >= spans[before.0 as usize].end, "{span:?} begins before {:?} ends", spans[before.0 as usize]);
        }
    }
    for arrow in &run.timeline.arrows {
        assert!(run.timeline.spans[arrow.from].end <= run.timeline.spans[arrow.to].begin);
    }
}

proptest! {
    #![proptest_config(config(100))]

    /// Tests random plans on random machines: no resource exceeds its capacity at any moment, rates are max-min fair, all data is copied,
    /// the program's order holds, and the result is reproducible.
    #[test]
    fn nothing_is_carried_beyond_capacity_and_nothing_is_lost(seed in any::<u64>()) {
        let mut random = Random(seed);
        let (machine, shapes, options) = machine_and_batch(&mut random, 64 * MIB);
        let Ok(plan) = plan(&machine, &shapes, &options) else { return Ok(()) };
        let executor = [Executor::Streams, Executor::Graph, Executor::FirstGraph][random.below(3) as usize];
        let run = conserving(&machine, &plan.program, &shapes, executor, options.staging_bytes);
        in_order(&plan.program, &run);
        prop_assert_eq!(run, simulate_with(&machine, &plan.program, &shapes, executor, options.staging_bytes));
    }
}

/// Tests programs whose internal streams share no resource. Each operation then takes the time of its own route, and each end time is a
/// maximum of sums of such times. So a higher capacity or a lower fixed cost never makes the program slower.
#[test]
fn more_capacity_is_never_slower_where_lanes_share_nothing() {
    let cases = config(600).cases;
    let mut held = 0;
    for seed in 0..u64::from(cases) {
        let mut random = Random(seed);
        let (machine, shapes, options) = machine_and_batch(&mut random, 64 * MIB);
        let Ok(plan) = plan(&machine, &shapes, &options) else { continue };
        let faster = Machine::new(faster(machine.topology(), &mut random)).expect("still valid");
        // A changed machine must not change the routes.
        let moves = plan.program.ops.len() > 1;
        if !moves || !lanes_share_nothing(&machine, &plan.program, &shapes) || !same_routes(&machine, &faster) {
            continue;
        }
        let seconds = |machine| simulate_with(machine, &plan.program, &shapes, Executor::Streams, options.staging_bytes).seconds;
        let (before, after) = (seconds(&machine), seconds(&faster));
        assert!(after <= before * (1.0 + 1e-9), "seed {seed}: {before:e} became {after:e}");
        held += 1;
    }
    assert!(held > cases / 20, "only {held} of {cases} programs are of the class");
}

fn simulate_with(machine: &Machine, program: &Program, shapes: &[Shape], executor: Executor, staging: u64) -> Simulation {
    let mut scenario = Scenario::new(machine, staging);
    let bound = scenario.bind(program, shapes).expect("planned for this machine");
    scenario.execute(bound, executor, 0);
    scenario.run()
}

fn lanes_share_nothing(machine: &Machine, program: &Program, shapes: &[Shape]) -> bool {
    let mut owner = vec![None; machine.resources().len()];
    program.ops.iter().all(|op| {
        // The copies of one operation have no order among each other.
        op.copies.len() == 1
            && op.copies.iter().all(|copy| {
                let device = |place: Place| match place {
                    Place::Source { transfer, .. } => shapes[transfer as usize].src_device,
                    Place::Destination { transfer, .. } => shapes[transfer as usize].dst_device,
                    Place::Slot { ring, .. } => program.rings[ring.0 as usize].device,
                };
                let route = machine.route(device(copy.from), device(copy.to)).expect("a route");
                route.resources.iter().all(|resource| *owner[resource.0 as usize].get_or_insert(op.lane) == op.lane)
            })
    })
}

fn same_routes(a: &Machine, b: &Machine) -> bool {
    a.devices().all(|from| a.devices().all(|to| a.route(from, to).map(|route| &route.links) == b.route(from, to).map(|route| &route.links)))
}

/// Returns the topology with randomly increased capacities and decreased costs.
fn faster(topology: &Topology, random: &mut Random) -> Topology {
    let mut faster = topology.clone();
    for link in &mut faster.links {
        link.bandwidth *= 1.0 + random.below(3) as f64 * 0.2;
    }
    for shared in &mut faster.shared {
        shared.capacity *= 1.0 + random.below(3) as f64 * 0.2;
    }
    let costs = &mut faster.costs;
    for cost in [&mut costs.copy, &mut costs.issue, &mut costs.chunk_via_host, &mut costs.chunk_via_gpu, &mut costs.fork_join_staged] {
        *cost *= 1.0 - random.below(3) as f64 * 0.2;
    }
    faster
}

#[test]
fn where_flows_share_a_link_more_capacity_for_one_can_delay_another() {
    // Two flows share 10 GB/s into host memory. The small flow has a narrow link. The large flow has a link of 8 GB/s, and determines the
    // end. As long as the small flow is slow, the large flow has 8 GB/s. A faster small flow takes some of this rate, and the large flow
    // cannot recover the loss later, because its own link limits it. This is a property of max-min fairness, not of the library's
    // scheduling.
    let seconds = |narrow: f64| {
        let topology = parse(&format!(
            r#"
            name = "anomaly"
            node = [{{ name = "gpu0", kind = "gpu" }}, {{ name = "gpu1", kind = "gpu" }}, {{ name = "host0", kind = "host" }}, {{ name = "root", kind = "switch" }}]
            link = [
                {{ one_way = [["gpu0", "root"]], kind = "pcie", bandwidth = {narrow:e} }},
                {{ one_way = [["gpu1", "root"]], kind = "pcie", bandwidth = 8e9 }},
                {{ one_way = [["root", "host0"]], kind = "host", bandwidth = 10e9 }},
            ]
            "#
        ));
        let mut topology = topology.expect("a topology");
        topology.costs = free();
        let machine = Machine::new(topology).expect("valid");
        let shapes = [shape(0, -1, 10 * MIB), shape(1, -1, 100 * MIB)];
        simulate(&machine, &direct(&shapes), &shapes, Executor::Streams).seconds
    };
    let (slow, fast) = (seconds(2e9), seconds(3e9));
    about(slow, 100.0 * MIB as f64 / 8e9);
    // The small flow copies 10 MiB at 3 GB/s. Meanwhile the large flow has 7 GB/s, which is 1 GB/s less than its link allows.
    about(fast, slow + 10.0 * MIB as f64 / 3e9 / 8.0);
}

#[test]
fn the_timeline_names_lanes_and_draws_what_waits_for_what() {
    let machine = three(50e9, 25e9, Costs::default());
    let shapes = [shape(0, 2, 2 * MIB)];
    let run = simulate(&machine, &staged(&shapes[0], DeviceId::gpu(1), 2, 2), &shapes, Executor::Streams);
    let timeline = &run.timeline;
    assert!(timeline.modelled && timeline.name.contains("three"));
    let lanes: Vec<&str> = timeline.lanes.iter().map(|lane| lane.name.as_str()).collect();
    assert_eq!(lanes, ["host thread", "gpu0 lane 0: gpu0>gpu1", "gpu1 lane 1: gpu1>gpu2"]);
    let spans: Vec<(usize, Option<u32>, &str)> = timeline.spans.iter().map(|span| (span.lane, span.op, span.name.as_str())).collect();
    let (first, second) = ("gpu0>gpu1 1.0 MiB", "gpu1>gpu2 1.0 MiB");
    assert_eq!(spans, [(0, None, "issue 0"), (1, Some(0), first), (2, Some(1), second), (1, Some(2), first), (2, Some(3), second)]);
    let arrows: Vec<(usize, usize)> = timeline.arrows.iter().map(|arrow| (arrow.from, arrow.to)).collect();
    assert_eq!(arrows, [(1, 2), (3, 4)]);
    assert_eq!(timeline.spans.iter().map(|span| span.bytes).sum::<u64>(), 4 * MIB);
}
