//! Tests transfers with the same source. Destinations forward the data, and all data must be correct, whatever else is in the batch.

use crate::common::Random;
use crate::node::*;
use mpgpu::abi::*;
use std::ptr::null_mut;

const MIB: usize = 1 << 20;

fn shown(plan: mp_plan_t) -> String {
    // SAFETY: the library writes into the given buffer.
    describe(|text, capacity, length| unsafe { mp_plan_describe(plan, mp_format_t::MP_FORMAT_TEXT as i32, text, capacity, length) })
}

fn gpus(node: &Node) -> i32 {
    let mut gpus = 0;
    // SAFETY: the output is valid for the call.
    ok(unsafe { mp_context_get_info(node.context, null_mut(), &mut gpus, null_mut()) });
    gpus
}

fn content(memory: *mut u8, bytes: usize) -> &'static mut [u8] {
    // SAFETY: memory of a test that no copy uses at this moment. It outlives the returned slice.
    unsafe { std::slice::from_raw_parts_mut(memory, bytes) }
}

fn fill(memory: *mut u8, bytes: usize, seed: u64) {
    let mut random = Random(seed);
    content(memory, bytes).chunks_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()[..word.len()]));
}

#[test]
fn one_source_leaves_its_memory_once_and_arrives_everywhere() {
    const BYTES: usize = 24 * MIB + 4099;
    for (topology, src) in [(c"beluga", 0), (c"beluga", -1), (c"dgx1-v100", 3), (c"hgx-h200", -1), (c"hgx-h200", 7)] {
        let node = Node::new(topology);
        let pageable = vec![0_u8; BYTES];
        for is_pageable in [false, true] {
            let from = match is_pageable {
                true if src < 0 => pageable.as_ptr().cast_mut(),
                true => continue,
                false => node.alloc(src, BYTES),
            };
            let to: Vec<(i32, *mut u8)> = (0..gpus(&node)).filter(|gpu| *gpu != src).map(|gpu| (gpu, node.alloc(gpu, BYTES))).collect();
            let batch: Vec<mp_transfer_t> = to.iter().map(|&(gpu, memory)| transfer(memory, gpu, from, src, BYTES)).collect();
            let plan = node.plan(&batch);
            let text = shown(plan);
            assert!(text.contains("forwarded in"), "{topology:?} from {src}: {text}");
            for round in 0..3 {
                fill(from, BYTES, round);
                node.run(plan);
                for &(gpu, memory) in &to {
                    assert!(
                        content(memory, BYTES) == content(from, BYTES),
                        "{topology:?} from {src}, round {round}: gpu{gpu} has other bytes"
                    );
                    content(memory, BYTES).fill(0xEE);
                }
            }
            to.into_iter().for_each(|(_, memory)| node.free(memory));
        }
    }
}

#[test]
fn what_passes_several_relays_arrives_step_after_step() {
    const BYTES: usize = 40 * MIB + 4099;
    let node = Node::new(c"dgx1-v100");
    let (from, to) = (node.alloc(0, BYTES), node.alloc(7, BYTES));
    let plan = node.plan(&[transfer(to, 7, from, 0, BYTES)]);
    assert!(shown(plan).contains("via gpu1, gpu5"), "{}", shown(plan));
    for round in 0..5 {
        fill(from, BYTES, round);
        node.run(plan);
        assert!(content(to, BYTES) == content(from, BYTES), "round {round}");
        content(to, BYTES).fill(0xEE);
    }
}

#[test]
fn random_batches_with_shared_sources_move_every_byte_and_no_other() {
    let (mut random, mut passed_on) = (Random(crate::common::setting("TEST_SEED", 5)), 0);
    for round in 0..crate::common::setting("TEST_EXECUTIONS", 40) {
        let node = Node::new([c"beluga", c"dgx1-v100", c"hgx-h100-4", c"pcie-4"][random.below(4) as usize]);
        let gpus = gpus(&node);
        let (mut batch, mut expected, mut sources) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..1 + random.below(3) {
            let src = random.below(gpus as u64 + 1) as i32 - 1;
            let bytes = MIB + random.below(8 * MIB as u64) as usize;
            let from = node.alloc(src, bytes);
            fill(from, bytes, random.next());
            sources.push((from, bytes));
            for _ in 0..1 + random.below(gpus as u64) {
                // Some transfers have the same destination device, or the device of the source, or the host. Some copy only part of the
                // source.
                let dst = random.below(gpus as u64 + 1) as i32 - 1;
                let part = if random.chance(20) { bytes - random.below(MIB as u64) as usize } else { bytes };
                let to = node.alloc(dst, part + 64);
                content(to, part + 64).fill(0xEE);
                batch.push(transfer(to, dst, from, src, part));
                expected.push((to, from, part));
            }
        }
        let plan = node.plan(&batch);
        passed_on += u32::from(shown(plan).contains("forwarded in"));
        for _ in 0..crate::common::setting("TEST_ROUNDS", 2) {
            node.run(plan);
            for (at, &(to, from, bytes)) in expected.iter().enumerate() {
                assert!(content(to, bytes) == content(from, bytes), "round {round}, transfer {at}: {}", shown(plan));
                assert!(content(to, bytes + 64)[bytes..].iter().all(|byte| *byte == 0xEE), "round {round}, transfer {at}: {}", shown(plan));
            }
            sources.iter().for_each(|&(from, bytes)| content(from, bytes).iter_mut().for_each(|byte| *byte = !*byte));
        }
    }
    assert!(passed_on > 5, "{passed_on}");
}
