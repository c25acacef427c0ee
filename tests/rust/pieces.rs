//! Tests copies of many pieces without a plan on the host backend: random lists, several threads, and refused arguments.
//!
//! `TEST_LISTS` sets the number of random lists, `TEST_SECONDS` the maximum time, and `TEST_SEED` the seed.

#[path = "piece_lists.rs"]
mod piece_lists;

use crate::common::{Random, is_long, setting};
use mpgpu_backend::{Completion, Report, Segment, StreamHandle};
use mpgpu_contexts::{BlockArrays, BlockRequest, Config, Context, Error, PieceOptions};
use mpgpu_core::topology::{DeviceId, Machine, load};
use mpgpu_devices::host::HostBackend;
use std::sync::Arc;

/// Memory of one device, with its expected contents.
struct Area {
    address: u64,
    expected: Vec<u8>,
}

impl Area {
    fn new(context: &Context, device: DeviceId, bytes: usize, random: &mut Random) -> Area {
        let expected: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        let address = context.allocate(device, bytes as u64).expect("memory");
        // SAFETY: The memory was just allocated with the number of bytes that are copied.
        unsafe { std::ptr::copy_nonoverlapping(expected.as_ptr(), address as *mut u8, bytes) };
        Area { address, expected }
    }

    fn actual(&self) -> &[u8] {
        // SAFETY: The memory was allocated with this length, and all work that writes to it has finished.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.expected.len()) }
    }
}

struct Node {
    context: Context,
    stream: StreamHandle,
}

impl Node {
    fn new() -> Node {
        let machine = Arc::new(Machine::new(load("hgx-h200").expect("a preset")).expect("a machine"));
        let backend = Arc::new(HostBackend::new(machine.gpu_count(), machine.host_count()));
        let context = Context::with_backend(machine, backend, Config::default()).expect("a context");
        let stream = context.create_stream(DeviceId::gpu(0)).expect("a stream");
        Node { context, stream }
    }

    fn area(&self, device: DeviceId, bytes: usize, random: &mut Random) -> Area {
        Area::new(&self.context, device, bytes, random)
    }

    fn blocks(&self, request: &BlockRequest<'_>) -> Result<Option<Completion>, Error> {
        self.context.copy_blocks(request, PieceOptions::default(), self.stream, Report::End)
    }

    fn wait(&self) -> Result<(), Error> {
        self.context.synchronize_stream(self.stream)
    }
}

/// List of 32-bit or 64-bit indices, in host memory or in memory of a GPU.
struct Index {
    values: Vec<u64>,
    narrow: Vec<u32>,
    width: u32,
    device: Option<Area>,
}

impl Index {
    fn new(node: &Node, values: Vec<u64>, width: u32, on_gpu: bool) -> Index {
        let narrow: Vec<u32> = values.iter().map(|value| *value as u32).collect();
        let bytes: Vec<u8> = match width {
            4 => narrow.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            _ => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        };
        let device = on_gpu.then(|| {
            let address = node.context.allocate(DeviceId::gpu(1), bytes.len().max(1) as u64).expect("memory");
            // SAFETY: The memory was just allocated with the number of bytes that are copied.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
            Area { address, expected: bytes }
        });
        Index { values, narrow, width, device }
    }

    fn address(&self) -> u64 {
        match (&self.device, self.width) {
            (Some(area), _) => area.address,
            (None, 4) => self.narrow.as_ptr().expose_provenance() as u64,
            (None, _) => self.values.as_ptr().expose_provenance() as u64,
        }
    }
}

fn check<'a>(node: &Node, mut areas: impl Iterator<Item = &'a Area>) {
    node.wait().expect("all work");
    assert!(areas.all(|area| area.actual() == area.expected), "a wrong byte");
}

#[test]
fn random_lists_copy_what_they_name_and_nothing_else() {
    let (node, usual) = (Node::new(), if is_long() { 1_000_000 } else { 5000 });
    let streams = [0, 1, 3].map(|gpu| node.context.create_stream(DeviceId::gpu(gpu)).expect("a stream"));
    let (lists, seconds) = (setting("TEST_LISTS", usual), setting("TEST_SECONDS", u64::MAX));
    piece_lists::campaign(&node.context, &streams, lists, seconds, setting("TEST_SEED", 1));
}

#[test]
fn threads_that_copy_pieces_beside_plans_in_the_same_streams_do_not_disturb_each_other() {
    let node = Node::new();
    let own = [1, 2].map(|gpu| node.context.create_stream(DeviceId::gpu(gpu)).expect("a stream"));
    let lists = setting("TEST_LISTS", 2000) / 4;
    for streams in [&[node.stream][..], &[node.stream, own[0], own[1]]] {
        piece_lists::parties(&node.context, streams, lists, setting("TEST_SEED", 1), &|| {});
    }
}

#[test]
fn a_context_that_closes_while_pieces_are_in_flight_copies_them_first() {
    let node = Node::new();
    piece_lists::close_in_flight(&node.context, node.stream);
}

#[test]
fn thousands_of_copies_of_pieces_are_in_flight_at_once() {
    let node = Node::new();
    piece_lists::many_in_flight(&node.context, node.stream, 3000);
}

#[test]
fn a_destroyed_stream_leaves_no_error_to_a_later_stream() {
    let (node, mut random) = (Node::new(), Random(10));
    let (dst, src) = (node.area(DeviceId::gpu(0), 64, &mut random), node.area(DeviceId::HOST, 64, &mut random));
    let index = Index::new(&node, vec![9, 9, 9, 9], 8, true);
    let (to, from) = ([dst.address], [src.address]);
    let mut request = small(&to, &from);
    request.dst.index = index.address();
    let stream = node.context.create_stream(DeviceId::gpu(0)).expect("a stream");
    for _ in 0..100 {
        let done = node.context.copy_blocks(&request, PieceOptions::default(), stream, Report::End).expect("enqueued");
        done.expect("a completion").wait().expect_err("an index is out of range");
    }
    node.context.destroy_stream(stream).expect("destroyed");
    for _ in 0..3 {
        let stream = node.context.create_stream(DeviceId::gpu(0)).expect("a stream");
        node.context.synchronize_stream(stream).expect("no error of the destroyed stream");
    }
    check(&node, [dst, src].iter());
}

/// Returns a request to copy 4 blocks of 16 bytes in one layer.
fn small<'a>(to: &'a [u64], from: &'a [u64]) -> BlockRequest<'a> {
    let arrays = |arrays| BlockArrays { arrays, stride: 0, blocks: 4, index: 0 };
    BlockRequest { dst: arrays(to), src: arrays(from), index_bytes: 8, count: 4, bytes: 16 }
}

#[test]
fn what_cannot_be_right_is_refused_with_its_name_and_value_and_nothing_is_copied() {
    let (node, mut random) = (Node::new(), Random(7));
    let (dst, src) = (node.area(DeviceId::gpu(0), 64, &mut random), node.area(DeviceId::HOST, 64, &mut random));
    let (to, from) = ([dst.address], [src.address]);
    let request = small(&to, &from);
    let beyond = [0_u32, 1, 4, 2];
    let list = beyond.as_ptr().expose_provenance() as u64;
    let dst_of = |change: &dyn Fn(&mut BlockArrays<'_>)| {
        let mut request = request;
        change(&mut request.dst);
        request
    };
    let pageable = [0_u8; 64];
    let elsewhere = [pageable.as_ptr().expose_provenance() as u64];
    let cases = [
        (dst_of(&|dst| dst.stride = 15), "dst_stride=15"),
        (dst_of(&|dst| dst.blocks = 0), "dst_blocks=0"),
        (dst_of(&|dst| dst.blocks = u64::MAX), "dst_blocks=18446744073709551615"),
        (dst_of(&|dst| dst.blocks = 3), "count=4"),
        (dst_of(&|dst| dst.blocks = 5), "dst[0]"),
        (BlockRequest { index_bytes: 4, ..dst_of(&|dst| dst.index = list) }, "dst_index[2]=4"),
        (BlockRequest { index_bytes: 2, ..dst_of(&|dst| dst.index = list) }, "index_bytes=2"),
        (BlockRequest { index_bytes: 4, ..dst_of(&|dst| dst.index = list + 1) }, "aligned"),
        (BlockRequest { index_bytes: 4, count: u64::MAX / 2, ..dst_of(&|dst| dst.index = list) }, "does not fit"),
        (BlockRequest { dst: BlockArrays { arrays: &[], ..request.dst }, ..request }, "0 destination arrays"),
        (BlockRequest { dst: BlockArrays { arrays: &[0], ..request.dst }, ..request }, "dst[0] is NULL"),
        (BlockRequest { dst: BlockArrays { arrays: &elsewhere, ..request.dst }, ..request }, "pageable"),
    ];
    for (request, text) in cases {
        let error = node.blocks(&request).expect_err(text).to_string();
        assert!(error.contains(text), "{error}, not {text}");
    }
    let pieces = [Segment { dst: dst.address, src: src.address, bytes: 16 }, Segment { dst: dst.address + 60, src: src.address, bytes: 5 }];
    let error = node.context.copy_pieces(&pieces, PieceOptions::default(), node.stream, Report::Nothing).expect_err("too long");
    assert!(error.to_string().contains("piece 1: destination"), "{error}");
    check(&node, [dst, src].iter());
}

#[test]
fn an_index_out_of_range_in_a_gpus_memory_is_an_error_of_the_next_wait_and_the_other_blocks_arrive() {
    let (node, mut random) = (Node::new(), Random(8));
    let (mut dst, src) = (node.area(DeviceId::gpu(0), 64, &mut random), node.area(DeviceId::HOST, 64, &mut random));
    let index = Index::new(&node, vec![3, 9, 0, 1], 8, true);
    for (to, from) in [(3, 0), (0, 2), (1, 3)] {
        dst.expected[16 * to..16 * to + 16].copy_from_slice(&src.expected[16 * from..16 * from + 16]);
    }
    let (to, from) = ([dst.address], [src.address]);
    let mut request = small(&to, &from);
    request.dst.index = index.address();
    let done = node.blocks(&request).expect("enqueued").expect("a completion");
    let told = "index 1 of the destination is 9, but its arrays have 4 blocks";
    let error = done.wait().expect_err("the wait").to_string();
    assert!(error.contains(told), "{error}");
    let error = node.wait().expect_err("the stream").to_string();
    assert!(error.contains(told), "{error}");
    node.wait().expect("reported once");
    check(&node, [dst, src].iter());
}

#[test]
fn copies_of_pieces_keep_the_order_of_their_stream() {
    let (node, mut random) = (Node::new(), Random(9));
    let mut areas: Vec<Area> = [0, 1, 2].map(|gpu| node.area(DeviceId::gpu(gpu), 1 << 16, &mut random)).into();
    for round in 0..200 {
        let (from, to) = (round % 3, (round + 1) % 3);
        let moved = areas[from].expected.clone();
        areas[to].expected = moved;
        let pieces: Vec<Segment> =
            (0..64).map(|at| Segment { dst: areas[to].address + 1024 * at, src: areas[from].address + 1024 * at, bytes: 1024 }).collect();
        node.context.copy_pieces(&pieces, PieceOptions::default(), node.stream, Report::Nothing).expect("a copy");
    }
    check(&node, areas.iter());
}
