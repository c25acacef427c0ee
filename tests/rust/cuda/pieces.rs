//! Tests copies of many pieces on the test double of the driver, which runs the CPU build of the kernel. The tests count launches, copies and
//! allocations, and copy random lists.
//!
//! `TEST_LISTS` sets the number of random lists, `TEST_SECONDS` the maximum time, and `TEST_SEED` the seed.

#[path = "../common/campaign.rs"]
mod campaign;
#[path = "../piece_lists.rs"]
mod piece_lists;

use self::campaign::{Random, is_long, setting};
use super::double::{self, node};
use super::prepared;
use crate::backend::{Report, Segment, StreamHandle};
use crate::cuda::CudaBackend;
use crate::plan::Relays;
use crate::topology::{DeviceId, Machine, preset};
use mpgpu_contexts::{BlockArrays, BlockRequest, Config, Context, PieceOptions};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

const GPU0: DeviceId = DeviceId::gpu(0);

fn context() -> Context {
    double::start(2, true);
    prepared::context_with(double::whole(), |config| Config { adapt: false, ..config })
}

/// Returns a context on a node whose GPUs are connected by NVLink. Each GPU has its own PCIe link to host memory.
fn linked_context() -> Context {
    double::start(8, true);
    let machine = Machine::new(preset("hgx-h200").expect("a preset")).expect("well formed");
    let backend = CudaBackend::on(double::whole(), 1).expect("the double has GPUs");
    Context::with_backend(Arc::new(machine), Arc::new(backend), Config { check_peers: false, ..Config::default() }).expect("a context")
}

/// Allocates memory on a device and fills it with a pattern. Returns its address.
fn memory(context: &Context, device: DeviceId, bytes: usize, seed: u8) -> u64 {
    let address = context.allocate(device, bytes as u64).expect("memory");
    // SAFETY: The memory was just allocated. Device memory of the test double is memory of this process.
    let bytes = unsafe { std::slice::from_raw_parts_mut(with_exposed_provenance_mut::<u8>(address as usize), bytes) };
    bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = ((at * 31) >> 3) as u8 ^ seed);
    address
}

fn content(address: u64, bytes: usize) -> Vec<u8> {
    // SAFETY: The memory was allocated with at least this size, and no work that writes to it is in flight.
    unsafe { std::slice::from_raw_parts(with_exposed_provenance::<u8>(address as usize), bytes) }.to_vec()
}

fn stream(context: &Context) -> StreamHandle {
    context.create_stream(GPU0).expect("a stream")
}

/// Returns a request to copy `count` blocks of 16 bytes in one layer. `index` is the address of the source's index list.
fn blocks<'a>(to: &'a [u64], from: &'a [u64], count: u64, index: u64) -> BlockRequest<'a> {
    BlockRequest {
        dst: BlockArrays { arrays: to, stride: 0, blocks: count, index: 0 },
        src: BlockArrays { arrays: from, stride: 0, blocks: count, index },
        index_bytes: 4,
        count,
        bytes: 16,
    }
}

#[test]
fn a_short_list_is_read_in_place_and_a_long_one_is_copied_to_the_gpu_first() {
    let context = context();
    let stream = stream(&context);
    const MOST: usize = 40_000;
    let (dst, src) = (memory(&context, GPU0, 16 * MOST, 1), memory(&context, DeviceId::HOST, 16 * MOST, 2));
    // Four thread blocks of 1024 lanes are 4096 groups of one lane. Each group reads at most eight indices from pinned memory.
    for (count, copies) in [(100, 0), (32_768, 0), (32_769, 1), (40_000, 1)] {
        let order: Vec<u32> = (0..count).rev().collect();
        let before = ["cuLaunchKernel", "cuMemcpyAsync"].map(double::calls);
        let request =
            blocks(std::slice::from_ref(&dst), std::slice::from_ref(&src), u64::from(count), order.as_ptr().expose_provenance() as u64);
        let done = context.copy_blocks(&request, PieceOptions::default(), stream, Report::End).expect("enqueued").expect("a completion");
        done.wait().expect("copied");
        let after = ["cuLaunchKernel", "cuMemcpyAsync"].map(double::calls);
        assert_eq!([after[0] - before[0], after[1] - before[1]], [1 + copies, 0], "{count} blocks");
        let (to, from) = (content(dst, 16 * count as usize), content(src, 16 * count as usize));
        assert!(to.chunks(16).eq(from.chunks(16).rev()), "{count} blocks");
    }
}

#[test]
fn lists_are_used_again_once_their_copies_have_finished() {
    let context = context();
    let stream = stream(&context);
    let (dst, src) = (memory(&context, GPU0, 4096, 3), memory(&context, DeviceId::HOST, 4096, 4));
    let pieces: Vec<Segment> = (0..64).map(|at| Segment { dst: dst + 64 * at, src: src + 64 * (63 - at), bytes: 64 }).collect();
    let copy = || {
        context.copy_pieces(&pieces, PieceOptions::default(), stream, Report::Nothing).expect("enqueued");
        context.synchronize_stream(stream).expect("copied");
    };
    copy();
    let before = ["cuMemHostAlloc", "cuMemAlloc"].map(double::calls);
    (0..100).for_each(|_| copy());
    assert_eq!(["cuMemHostAlloc", "cuMemAlloc"].map(double::calls), before, "no memory for a second list");
    assert!(content(dst, 4096).chunks(64).eq(content(src, 4096).chunks(64).rev()));
}

#[test]
fn another_gpu_copies_a_part_over_its_own_link_and_reports_positions_of_the_whole_list() {
    let context = linked_context();
    let stream = stream(&context);
    const COUNT: usize = 4096;
    const BYTES: usize = 4096;
    let (dst, src) = (memory(&context, GPU0, COUNT * BYTES, 11), memory(&context, DeviceId::HOST, COUNT * BYTES, 12));
    let list = memory(&context, GPU0, 4 * COUNT, 0);
    let copy = |relays: Relays, order: &[u32]| {
        // SAFETY: The memory has the size of all indices, and no copy is in flight.
        unsafe { with_exposed_provenance_mut::<u32>(list as usize).copy_from_nonoverlapping(order.as_ptr(), COUNT) };
        let whole = blocks(std::slice::from_ref(&dst), std::slice::from_ref(&src), COUNT as u64, list);
        let request = BlockRequest { bytes: BYTES as u64, ..whole };
        let options = PieceOptions { relays: Some(relays), ..PieceOptions::default() };
        let before = double::calls("cuLaunchKernel");
        let done = context.copy_blocks(&request, options, stream, Report::End).expect("enqueued").expect("a completion");
        (done.wait(), double::calls("cuLaunchKernel") - before)
    };
    let mut order: Vec<u32> = (0..COUNT as u32).rev().collect();
    for (relays, launches) in [(Relays::NONE, 1), ([1].into_iter().collect(), 2)] {
        // SAFETY: The memory was allocated with this size, and no copy is in flight.
        unsafe { with_exposed_provenance_mut::<u8>(dst as usize).write_bytes(0, COUNT * BYTES) };
        let (ended, launched) = copy(relays, &order);
        ended.expect("copied");
        assert_eq!(launched, launches);
        assert!(content(dst, COUNT * BYTES).chunks(BYTES).eq(content(src, COUNT * BYTES).chunks(BYTES).rev()));
    }
    order[COUNT - 1] = 5000;
    let (ended, launched) = copy([1].into_iter().collect(), &order);
    assert!(launched == 2 && ended.expect_err("an index out of range").to_string().contains("index 4095 of the source is 5000"));
}

#[test]
fn layers_beyond_one_launch_take_another() {
    let context = context();
    let stream = stream(&context);
    let layers: Vec<(u64, u64)> = (0..130).map(|_| (memory(&context, GPU0, 64, 5), memory(&context, DeviceId::HOST, 64, 6))).collect();
    let (to, from): (Vec<u64>, Vec<u64>) = layers.iter().copied().unzip();
    let before = double::calls("cuLaunchKernel");
    context.copy_blocks(&blocks(&to, &from, 4, 0), PieceOptions::default(), stream, Report::Nothing).expect("enqueued");
    assert_eq!(double::calls("cuLaunchKernel") - before, 2);
    assert!(layers.iter().all(|(dst, src)| content(*dst, 64) == content(*src, 64)));
}

#[test]
fn an_index_that_the_kernel_finds_out_of_range_is_reported_by_the_completion_and_once_by_the_stream() {
    let context = context();
    let stream = stream(&context);
    let (dst, src) = (memory(&context, GPU0, 64, 7), memory(&context, DeviceId::HOST, 64, 8));
    let index = memory(&context, GPU0, 16, 0);
    // SAFETY: The memory was just allocated with the size of four indices.
    unsafe { with_exposed_provenance_mut::<[u32; 4]>(index as usize).write([3, 2, 77, 0]) };
    let request = blocks(std::slice::from_ref(&dst), std::slice::from_ref(&src), 4, index);
    let done = context.copy_blocks(&request, PieceOptions::default(), stream, Report::End).expect("enqueued").expect("a completion");
    for error in [done.wait().expect_err("the copy").to_string(), context.synchronize_stream(stream).expect_err("the stream").to_string()] {
        assert!(error.contains("index 2 of the source is 77"), "{error}");
    }
    context.synchronize_stream(stream).expect("reported once");
    assert_eq!(content(dst, 16), content(src + 48, 16));
}

#[test]
fn a_captured_stream_takes_blocks_in_order_and_refuses_lists() {
    let context = context();
    let stream = stream(&context);
    let (dst, src) = (memory(&context, GPU0, 64, 9), memory(&context, DeviceId::HOST, 64, 10));
    node(|node| node.capturing = true);
    let in_order = blocks(std::slice::from_ref(&dst), std::slice::from_ref(&src), 4, 0);
    let order = [3_u32, 2, 1, 0];
    let listed = blocks(std::slice::from_ref(&dst), std::slice::from_ref(&src), 4, order.as_ptr().expose_provenance() as u64);
    context.copy_blocks(&in_order, PieceOptions::default(), stream, Report::Nothing).expect("captured");
    let refused = context.copy_blocks(&listed, PieceOptions::default(), stream, Report::Nothing).expect_err("refused").to_string();
    node(|node| node.capturing = false);
    assert!(refused.contains("captured"), "{refused}");
}

/// Returns a context whose streams execute their work in order, with streams of both GPUs.
fn context_with_queues() -> (Context, [StreamHandle; 3]) {
    let context = context();
    node(|node| node.room = Some(100_000));
    let streams = [GPU0, GPU0, DeviceId::gpu(1)].map(|gpu| context.create_stream(gpu).expect("a stream"));
    (context, streams)
}

#[track_caller]
fn nothing_was_stuck() {
    node(|node| assert!(node.stuck.is_empty(), "{:?}", node.stuck));
}

#[test]
fn random_lists_copy_what_they_name_and_nothing_else() {
    let (context, streams) = context_with_queues();
    let usual = if is_long() { 1_000_000 } else { 3000 };
    let (lists, seconds) = (setting("TEST_LISTS", usual), setting("TEST_SECONDS", u64::MAX));
    piece_lists::campaign(&context, &streams, lists, seconds, setting("TEST_SEED", 1));
    nothing_was_stuck();
}

#[test]
fn threads_that_copy_pieces_beside_plans_in_the_same_streams_do_not_disturb_each_other() {
    let (context, streams) = context_with_queues();
    let (shared, lists) = (double::share(), setting("TEST_LISTS", 1200) / 4);
    for streams in [&streams[..1], &streams] {
        piece_lists::parties(&context, streams, lists, setting("TEST_SEED", 1), &|| double::join(shared.clone()));
    }
    nothing_was_stuck();
}

#[test]
fn a_context_that_closes_while_pieces_are_in_flight_copies_them_first() {
    let (context, streams) = context_with_queues();
    piece_lists::close_in_flight(&context, streams[0]);
    nothing_was_stuck();
}

#[test]
fn more_copies_in_flight_take_more_memory_for_lists_which_later_copies_use_again() {
    let (context, streams) = context_with_queues();
    piece_lists::many_in_flight(&context, streams[0], 1500);
    let before = double::calls("cuMemHostAlloc");
    assert!(before >= 1500, "{before}");
    piece_lists::many_in_flight(&context, streams[0], 1500);
    // The second round reuses all list blocks. Its only allocation is the host memory for its blocks.
    assert_eq!(double::calls("cuMemHostAlloc") - before, 1);
    nothing_was_stuck();
}
