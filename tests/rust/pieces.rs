//! Tests copies of many pieces without a plan on the host backend: random lists, after which every byte of all memory is compared, and
//! invalid arguments.

use crate::common::{Random, is_long, setting};
use mpgpu_backend::{Completion, Report, Segment, StreamHandle};
use mpgpu_contexts::{BlockArrays, BlockRequest, Config, Context, Error, PieceOptions};
use mpgpu_core::topology::{DeviceId, Machine, load};
use mpgpu_devices::host::HostBackend;
use std::sync::Arc;

/// Memory of one device, with its expected content.
struct Area {
    address: u64,
    expected: Vec<u8>,
}

impl Area {
    fn new(context: &Context, device: DeviceId, bytes: usize, random: &mut Random) -> Area {
        let expected: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        let address = context.allocate(device, bytes as u64).expect("memory");
        // SAFETY: The memory was just allocated with this size.
        unsafe { std::ptr::copy_nonoverlapping(expected.as_ptr(), address as *mut u8, bytes) };
        Area { address, expected }
    }

    fn actual(&self) -> &[u8] {
        // SAFETY: The memory was allocated with this size, and all work that writes to it has finished.
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

/// Index list with 32-bit or 64-bit indices, in host memory or in memory of a GPU.
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
            // SAFETY: The memory was just allocated with this size.
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

/// Returns `count` different numbers below `most` in random order.
fn different(count: u64, most: u64, random: &mut Random) -> Vec<u64> {
    let mut all: Vec<u64> = (0..most).collect();
    for at in 0..count as usize {
        all.swap(at, at + random.below(most - at as u64) as usize);
    }
    all.truncate(count as usize);
    all
}

/// Runs a random block copy between newly allocated areas and checks every byte. Returns the number of blocks that were copied.
fn random_blocks(node: &Node, random: &mut Random) -> u64 {
    let bytes = [1, 3, 15, 16, 64, 200, 1024, 4096, 40_000][random.below(9) as usize] + random.below(3);
    let (layers, most) = (1 + random.below(3), 1 + random.below(40));
    let count = random.below(most + 1);
    let strides = [bytes + random.below(5), bytes + random.below(40)];
    let (blocks, offset) = ([most, most + random.below(9)], random.below(17));
    let device = |random: &mut Random| [DeviceId::HOST, DeviceId::gpu(0), DeviceId::gpu(3)][random.below(3) as usize];
    let area = |blocks: u64, stride: u64, random: &mut Random| {
        let device = device(random);
        node.area(device, (offset + blocks * stride) as usize, random)
    };
    let mut dst: Vec<Area> = (0..layers).map(|_| area(blocks[0], strides[0], random)).collect();
    let src: Vec<Area> = (0..layers).map(|_| area(blocks[1], strides[1], random)).collect();
    let width = if random.chance(50) { 4 } else { 8 };
    let targets = different(count, blocks[0], random);
    // The list of sources may contain a block several times.
    let sources: Vec<u64> = (0..count).map(|_| random.below(blocks[1])).collect();
    let (in_order, on_gpu) = (random.chance(20), random.chance(50));
    let targets: Vec<u64> = if in_order { (0..count).collect() } else { targets };
    let (target, source) = (Index::new(node, targets, width, on_gpu), Index::new(node, sources, width, random.chance(50)));
    for (dst, src) in dst.iter_mut().zip(&src) {
        for (to, from) in target.values.iter().zip(&source.values) {
            let at = |block: &u64, stride: u64| (offset + block * stride) as usize;
            let (to, from) = (at(to, strides[0]), at(from, strides[1]));
            dst.expected[to..to + bytes as usize].copy_from_slice(&src.expected[from..from + bytes as usize]);
        }
    }
    let addresses = |areas: &[Area]| areas.iter().map(|area| area.address + offset).collect::<Vec<u64>>();
    let (to, from) = (addresses(&dst), addresses(&src));
    let request = BlockRequest {
        dst: BlockArrays { arrays: &to, stride: strides[0], blocks: blocks[0], index: if in_order { 0 } else { target.address() } },
        src: BlockArrays { arrays: &from, stride: strides[1], blocks: blocks[1], index: source.address() },
        index_bytes: width,
        count,
        bytes,
    };
    let done = node.blocks(&request).expect("a copy").expect("a completion");
    done.wait().expect("the copy");
    check(node, dst.iter().chain(&src));
    [target, source].into_iter().filter_map(|index| index.device).for_each(|area| node.context.free(area.address).expect("freed"));
    dst.iter().chain(&src).for_each(|area| node.context.free(area.address).expect("freed"));
    count * layers
}

/// Copies a random list of pieces between newly allocated areas and checks every byte. Returns the number of pieces.
fn random_pieces(node: &Node, random: &mut Random) -> u64 {
    let devices = [DeviceId::HOST, DeviceId::gpu(0), DeviceId::gpu(1)];
    let most = 1 + random.below(5000);
    let count = random.below(40);
    let room = (count * (most + 20) + 1) as usize;
    let mut areas: Vec<Area> = devices.iter().flat_map(|&device| [device; 2]).map(|device| node.area(device, room, random)).collect();
    let mut pieces = Vec::new();
    let mut free = [0_u64; 3];
    for _ in 0..count {
        let bytes = if random.chance(30) { random.below(16) } else { random.below(most + 1) };
        // Areas with even numbers are sources, areas with odd numbers are destinations.
        let (from, to) = (2 * random.below(3) as usize, 2 * random.below(3) as usize + 1);
        let (src, dst) = (random.below(room as u64 - bytes), free[to / 2] + random.below(20));
        free[to / 2] = dst + bytes;
        pieces.push(Segment { dst: areas[to].address + dst, src: areas[from].address + src, bytes });
        let moved = areas[from].expected[src as usize..(src + bytes) as usize].to_vec();
        areas[to].expected[dst as usize..(dst + bytes) as usize].copy_from_slice(&moved);
    }
    let options = PieceOptions { multiprocessors: Some(1 + random.below(9) as u32), paced: Some(random.chance(50)), relays: None };
    node.context.copy_pieces(&pieces, options, node.stream, Report::Nothing).expect("a copy");
    node.wait().expect("the copies");
    check(node, areas.iter());
    areas.iter().for_each(|area| node.context.free(area.address).expect("freed"));
    count
}

fn check<'a>(node: &Node, mut areas: impl Iterator<Item = &'a Area>) {
    node.wait().expect("all work");
    assert!(areas.all(|area| area.actual() == area.expected), "a wrong byte");
}

#[test]
fn random_lists_copy_what_they_name_and_nothing_else() {
    let (lists, seed) = (setting("TEST_LISTS", if is_long() { 100_000 } else { 3000 }), setting("TEST_SEED", 1));
    let (node, mut random) = (Node::new(), Random(seed));
    let mut pieces = 0;
    for _ in 0..lists {
        pieces += if random.chance(50) { random_blocks(&node, &mut random) } else { random_pieces(&node, &mut random) };
    }
    println!("TEST_SEED={seed}: {pieces} pieces in {lists} lists");
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
