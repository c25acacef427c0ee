//! Tests batches with many staged transfers, whose paths between the same two devices share staging rings.

use crate::common::{Random, config};
use mpgpu_backend::{MemoryKind, StreamHandle};
use mpgpu_contexts::{Config, Context, PlanOptions, Transfer, Verify};
use mpgpu_core::model::simulate::{Executor, Scenario};
use mpgpu_core::plan::{Options, Plan, Shape, plan, validate};
use mpgpu_core::topology::{DeviceId, Machine, NodeKind, preset};
use mpgpu_devices::host::HostBackend;
use proptest::prelude::*;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
/// Maximum number of staged paths through one device that have separate rings.
const RINGS: u64 = 16;

/// Returns a machine of four GPUs without peer access, so that all copies between GPUs are staged in host memory.
fn without_peer_access() -> Machine {
    let mut topology = preset("pcie-4").expect("a preset");
    topology.nodes.iter_mut().filter(|node| matches!(node.kind, NodeKind::Switch { .. })).for_each(|node| {
        node.kind = NodeKind::Switch { peer: false };
    });
    let machine = Machine::new(topology).expect("well formed");
    assert!(machine.route(DeviceId(0), DeviceId(1)).is_none());
    machine
}

fn shape(src: i32, dst: i32, bytes: u64) -> Shape {
    let kind = MemoryKind::Device;
    Shape { source: 0, dst_device: DeviceId(dst), src_device: DeviceId(src), dst_kind: kind, src_kind: kind, bytes }
}

/// Returns a random size, which is less than a random power of two up to `most`.
fn size(random: &mut Random, most: u64) -> u64 {
    let power = 1 + random.below(most);
    random.below(1 << power)
}

fn planned(machine: &Machine, batch: &[Shape], options: &Options) -> Plan {
    let plan = plan(machine, batch, options).unwrap_or_else(|e| panic!("{e}"));
    validate(&plan.program, options.staging_bytes).unwrap_or_else(|e| panic!("{e}"));
    plan
}

#[test]
fn operations_of_thousands_of_staged_transfers_grow_with_bytes_over_chunk() {
    let machine = without_peer_access();
    let batch = vec![shape(0, 1, 16 * MIB); 5600];
    let plan = planned(&machine, &batch, &Options::default());
    // There are two operations for each chunk of 8 MiB.
    assert_eq!(plan.program.ops.len(), 2 * 2 * 5600);
    assert_eq!((plan.program.rings.len(), plan.program.lanes.len()), (2, 4));
    let bytes = 5600.0 * 16.0 * MIB as f64;
    let full = bytes / 26.3e9;
    assert!((full..1.05 * full).contains(&plan.predicted), "modelled {} s, the slot alone takes {full}", plan.predicted);
}

#[test]
fn more_staged_transfers_than_rings_that_fit_into_the_bound_are_planned() {
    let machine = without_peer_access();
    let batch = vec![shape(0, 1, 4096); 20_000];
    assert_eq!(planned(&machine, &batch, &Options::default()).program.ops.len(), 40_000);
    let two_pages = Options { staging_bytes: 2 * 4096, ..Options::default() };
    let tight = planned(&machine, &batch[..100], &two_pages);
    assert_eq!((tight.program.ops.len(), tight.program.staging_bytes(DeviceId::HOST)), (200, 2 * 4096));
}

#[test]
fn staged_paths_through_a_device_share_at_most_sixteen_rings() {
    let machine = without_peer_access();
    for count in [1, 2, RINGS] {
        let batch = vec![shape(0, 1, 8 * MIB); count as usize];
        let rings = planned(&machine, &batch, &Options::default()).program.rings.len() as u64;
        assert!((1..=count).contains(&rings), "{rings} rings for {count} transfers");
    }
    let batch = vec![shape(0, 1, 64 << 10); 100];
    assert_eq!(
        planned(&machine, &batch, &Options::default()).program.rings.len() as u64,
        RINGS,
        "small pieces hide each other's hand-overs"
    );
    let batch = vec![shape(0, 1, 256 * MIB); 100];
    assert_eq!(planned(&machine, &batch, &Options::default()).program.rings.len(), 2, "large ones have large chunks");
}

#[test]
fn the_modelled_time_of_shared_rings_is_that_of_the_simulator() {
    let machine = without_peer_access();
    for (count, bytes) in [(40, 16 * MIB), (300, MIB), (40, 100 * MIB)] {
        let batch: Vec<Shape> = (0..count).map(|i| shape(i % 2, 2 + i % 2, bytes)).collect();
        let plan = planned(&machine, &batch, &Options::default());
        assert!((plan.program.rings.len() as u64) <= RINGS);
        let mut scenario = Scenario::new(&machine, plan.options.staging_bytes);
        let bound = scenario.bind(&plan.program, &batch).expect("bound");
        let done = scenario.execute(bound, Executor::of(plan.executor), 0);
        let simulated = scenario.run().executions[done.0].done;
        let ratio = plan.predicted / simulated;
        assert!((0.85..1.1).contains(&ratio), "{count} of {bytes}: modelled {} s, simulated {simulated} s", plan.predicted);
    }
}

proptest! {
    #![proptest_config(config(30))]

    /// Tests hundreds of transfers of all sizes between all pairs of GPUs.
    #[test]
    fn plans_of_many_staged_transfers_are_right_and_small(seed in any::<u64>()) {
        let mut random = Random(seed);
        let machine = without_peer_access();
        let batch: Vec<Shape> = (0..1 + random.below(600)).map(|_| {
            let src = random.below(4) as i32;
            let dst = (src + 1 + random.below(3) as i32) % 4;
            shape(src, dst, size(&mut random, 26))
        }).collect();
        let staging_bytes = [MIB, 16 * MIB, 64 * MIB][random.below(3) as usize];
        let plan = planned(&machine, &batch, &Options { staging_bytes, ..Options::default() });
        // A ring must hold at least two chunks, or divide its data into at most 128 chunks.
        let chunk = (staging_bytes / RINGS / 2).min(MIB);
        let bytes: u64 = batch.iter().map(|shape| shape.bytes).sum();
        let most = 2 * (bytes / chunk + batch.len() as u64 + 128 * RINGS);
        prop_assert!(plan.program.ops.len() as u64 <= most, "{} operations, more than {most}", plan.program.ops.len());
        prop_assert!(plan.program.rings.len() as u64 <= RINGS);
    }

    /// Tests such batches with real data.
    #[test]
    fn bytes_of_many_staged_transfers_arrive(seed in any::<u64>()) {
        let mut random = Random(seed);
        let config = Config { staging_bytes: [1 << 17, 1 << 20][random.below(2) as usize], verify: Verify::Program, ..Config::default() };
        let context = Context::with_backend(Arc::new(without_peer_access()), Arc::new(HostBackend::new(4, 1)), config).expect("a context");
        let sizes: Vec<u64> = (0..20 + random.below(200)).map(|_| 1 + size(&mut random, 16)).collect();
        let all: u64 = sizes.iter().sum();
        let memory: Vec<u64> = (0..4).map(|gpu| context.allocate(DeviceId(gpu), 2 * all).expect("memory")).collect();
        let content: Vec<u8> = (0..all).map(|_| random.next() as u8).collect();
        let mut offset = 0;
        let batch: Vec<(Transfer, u64)> = sizes.iter().map(|&bytes| {
            let src = random.below(4) as usize;
            let dst = (src + 1 + random.below(3) as usize) % 4;
            let transfer = Transfer {
                dst: memory[dst] + all + offset, dst_device: DeviceId(dst as i32), src: memory[src] + offset, src_device: DeviceId(src as i32), bytes,
            };
            // SAFETY: the source has space for these bytes, and nothing is enqueued yet.
            unsafe { std::ptr::copy_nonoverlapping(content[offset as usize..].as_ptr(), transfer.src as *mut u8, bytes as usize) };
            offset += bytes;
            (transfer, offset - bytes)
        }).collect();
        let transfers: Vec<Transfer> = batch.iter().map(|(transfer, _)| *transfer).collect();
        let plan = context.plan(&transfers, &PlanOptions::default()).expect("planned");
        let stream = context.create_stream(DeviceId(0)).expect("a stream");
        for stream in [stream, StreamHandle(0)] {
            plan.execute(stream).expect("enqueued").wait().expect("done");
            for (transfer, offset) in &batch {
                // SAFETY: the destination has these bytes, and all work has finished.
                let arrived = unsafe { std::slice::from_raw_parts(transfer.dst as *const u8, transfer.bytes as usize) };
                prop_assert!(arrived == &content[*offset as usize..][..arrived.len()], "{transfer:?}");
                // SAFETY: as above.
                unsafe { std::ptr::write_bytes(transfer.dst as *mut u8, 0, transfer.bytes as usize) };
            }
        }
    }
}
