//! Tests the measured timeline of an execution: `Plan::trace`, and executions whose operations the backend times.

use mpgpu_backend::{Backend, BackendError, Endpoints, Execution, Report};
use mpgpu_contexts::{BackendChoice, Config, Context, ContextOptions, PlanOptions, Transfer};
use mpgpu_core::model::timeline::Timeline;
use mpgpu_core::plan::{Engine, Options, Plan, Program, Shape};
use mpgpu_core::topology::{self, DeviceId, Machine, MemoryKind};
use mpgpu_devices::host::HostBackend;
use std::sync::Arc;

/// Creates a context with virtual devices for the preset `topology`.
fn context(topology: &str) -> Context {
    let options = ContextOptions { backend: Some(BackendChoice::Host), topology: Some(topology.into()), ..ContextOptions::default() };
    Context::open(&options, Config::default()).expect("a context")
}

/// Checks that no operation begins too early: within an internal stream, and after operations of other internal streams on which it
/// depends.
fn assert_ordered(timeline: &Timeline) {
    let mut ends = vec![0.0; timeline.lanes.len()];
    for span in &timeline.spans {
        assert!(span.begin >= ends[span.lane] && span.end >= span.begin, "{span:?}");
        ends[span.lane] = span.end;
    }
    for arrow in &timeline.arrows {
        let (from, to) = (&timeline.spans[arrow.from], &timeline.spans[arrow.to]);
        assert!(from.end <= to.begin && from.lane != to.lane, "{from:?} before {to:?}");
    }
}

#[test]
fn a_trace_tells_when_each_operation_ran_in_an_order_that_the_program_allows() {
    let context = context("beluga");
    let bytes = 48 << 20;
    let [a, b] = [0, 1].map(|gpu| context.allocate(DeviceId::gpu(gpu), bytes).expect("memory"));
    let copy = [Transfer { dst: b, dst_device: DeviceId::gpu(1), src: a, src_device: DeviceId::gpu(0), bytes }];
    let plan = context.plan(&copy, &PlanOptions::default()).expect("a plan");
    assert!(plan.paths() > 2, "the mesh relays: {}", plan.describe());
    let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
    let program = &plan.planned().program;
    for _ in 0..5 {
        let timeline = plan.trace(stream).expect("it runs").timeline;
        assert!(!timeline.modelled && timeline.name.contains("host backend"), "{}", timeline.name);
        assert_eq!(timeline.spans.len(), program.ops.len());
        assert_eq!(timeline.lanes.len(), program.lanes.len());
        assert_ordered(&timeline);
        // Each byte is copied once into its destination. A relayed byte is also copied once into a staging slot.
        let relayed: u64 = plan.planned().transfers[0].paths.iter().filter(|path| path.via.is_some()).map(|path| path.bytes).sum();
        assert_eq!(timeline.spans.iter().map(|span| span.bytes).sum::<u64>(), bytes + relayed);
        let waits = program.ops.iter().map(|op| op.after.len()).sum::<usize>();
        assert_eq!(timeline.arrows.len(), waits, "a pipeline's waits are all across lanes");
    }
    // The name of an internal stream contains its kind and the destination of its copies.
    let timeline = plan.trace(stream).expect("it runs").timeline;
    let names: Vec<&str> = timeline.lanes.iter().map(|lane| lane.name.as_str()).collect();
    for name in ["gpu0 lane 0: gpu0>gpu1", "gpu0 lane 1: gpu0>gpu2", "gpu2 lane 2: gpu2>gpu1"] {
        assert!(names.contains(&name), "{names:?}");
    }
}

#[test]
fn every_operation_belongs_to_a_path_of_the_plan() {
    let context = context("beluga");
    let memory: Vec<u64> = (0..4).map(|gpu| context.allocate(DeviceId::gpu(gpu), 16 << 20).expect("memory")).collect();
    let to_first = |gpu: u32| Transfer {
        dst: memory[0] + (u64::from(gpu) << 22),
        dst_device: DeviceId::gpu(0),
        src: memory[gpu as usize],
        src_device: DeviceId::gpu(gpu),
        bytes: 4 << 20,
    };
    let plan = context.plan(&[to_first(1), to_first(2), to_first(3)], &PlanOptions::default()).expect("a plan");
    let planned = plan.planned();
    assert_carried(planned);
    // The plan has paths through two GPUs.
    let machine = Machine::new(topology::preset("dgx1-v100").expect("a preset")).expect("a machine");
    let shape = |src: u32, dst: u32| Shape {
        source: 0,
        dst_device: DeviceId::gpu(dst),
        src_device: DeviceId::gpu(src),
        dst_kind: MemoryKind::Device,
        src_kind: MemoryKind::Device,
        bytes: 256 << 20,
    };
    let planned = mpgpu_core::plan::plan(&machine, &[shape(0, 5)], &Options::default()).expect("a plan");
    assert!(planned.transfers[0].paths.iter().any(|path| path.vias().count() == 2));
    assert_carried(&planned);
}

/// Checks that the hops of each path carry as many bytes as the path.
#[track_caller]
fn assert_carried(planned: &Plan) {
    let mut bytes: Vec<Vec<u64>> = planned.transfers.iter().map(|transfer| vec![0; transfer.paths.len()]).collect();
    for (op, paths) in planned.program.ops.iter().zip(planned.paths_of_copies()) {
        for (path, copy) in paths.into_iter().zip(&op.copies) {
            let (transfer, path) = path.expect("a path of the plan");
            bytes[transfer as usize][path] += copy.bytes;
        }
    }
    for (transfer, bytes) in planned.transfers.iter().zip(&bytes) {
        for (path, &moved) in transfer.paths.iter().zip(bytes) {
            assert_eq!(moved, path.bytes * (1 + path.vias().count() as u64), "{path:?}");
        }
    }
}

#[test]
fn an_execution_that_was_not_timed_says_how_to_time_one() {
    let backend = HostBackend::new(1, 1);
    let (program, endpoints) = (Arc::new(Program::default()), Arc::<[Endpoints]>::from([]));
    let rings = Arc::<[u64]>::from([]);
    let stream = backend.create_stream(DeviceId::gpu(0)).expect("a stream");
    let execution = Execution { engine: Engine::Stream, ..Execution::new(&program, &endpoints, &rings, stream) };
    let error = backend.submit(&execution).expect("enqueued").expect("a completion").times().expect_err("nothing was noted");
    assert!(matches!(&error, BackendError::NotSupported(text) if text.contains("Report::Times")), "{error}");
    let timed = Execution { report: Report::Times, ..execution };
    assert_eq!(backend.submit(&timed).expect("enqueued").expect("a completion").times().expect("times").ops, []);
}
