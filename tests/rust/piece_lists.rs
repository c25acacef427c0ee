//! Copies random lists of pieces without a plan, and compares every byte of all memory with its expected value. This includes bytes that
//! must not change. The CPU must be able to access all memory of the context.

use super::Random;
use mpgpu_backend::{Completion, Report, Segment, StreamHandle};
use mpgpu_contexts::{BlockArrays, BlockRequest, Context, Error, PieceOptions, PlanOptions, Transfer};
use mpgpu_core::topology::DeviceId;
use std::collections::BTreeMap;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Devices whose memory the lists use.
const DEVICES: [DeviceId; 3] = [DeviceId::HOST, DeviceId::gpu(0), DeviceId::gpu(1)];
/// Size of each source area, bytes.
const READ: usize = 64 << 10;
/// Size of each destination area, bytes.
const WRITTEN: usize = 160 << 10;
/// Size of each area for index lists, bytes.
const INDEX: usize = 4 << 10;
/// Maximum number of blocks of a list in one layer.
const MOST: u64 = 60;

/// Memory of one device, with its expected contents.
struct Area {
    address: u64,
    expected: Vec<u8>,
}

impl Area {
    fn new(context: &Context, device: DeviceId, bytes: usize) -> Area {
        let address = context.allocate(device, bytes as u64).expect("memory");
        let mut area = Area { address, expected: vec![0; bytes] };
        area.put(0, &vec![0x5A; bytes]);
        area
    }

    /// Writes bytes from the CPU. No work in flight may use these bytes.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.expected[at..at + bytes.len()].copy_from_slice(bytes);
        // SAFETY: The memory was allocated with the length of `expected`, and no work in flight uses these bytes.
        let own = unsafe { std::slice::from_raw_parts_mut(with_exposed_provenance_mut::<u8>(self.address as usize + at), bytes.len()) };
        own.copy_from_slice(bytes);
    }

    fn actual(&self) -> &[u8] {
        // SAFETY: The memory was allocated with this length, and all work that writes to it has finished.
        unsafe { std::slice::from_raw_parts(with_exposed_provenance(self.address as usize), self.expected.len()) }
    }
}

/// Location of the indices of one end of a block copy.
#[derive(Copy, Clone, PartialEq, Debug)]
enum Place {
    InOrder,
    Pageable,
    /// Memory of a device, by its position in [`DEVICES`]. Position 0 is pinned host memory.
    Device(usize),
}

impl Place {
    fn random(random: &mut Random) -> Place {
        [Place::InOrder, Place::Pageable, Place::Pageable, Place::Device(0), Place::Device(1), Place::Device(2)][random.below(6) as usize]
    }

    /// True if the indices are read when the copy runs.
    fn is_late(self) -> bool {
        matches!(self, Place::Device(1..))
    }
}

/// Copy from a source area to a destination area. Each end has the position of its device in [`DEVICES`], and the offset in the area.
struct Move {
    to: (usize, usize),
    from: (usize, usize),
    bytes: usize,
}

/// Copy that is in flight.
#[derive(Default)]
struct Flight {
    completion: Option<Completion>,
    /// Possible error texts. The error of the copy contains one of them. Empty if the copy must succeed.
    errors: Vec<String>,
    /// Destinations that are listed several times, with the bytes of each of their sources.
    choices: BTreeMap<(usize, usize), Vec<Vec<u8>>>,
}

/// Numbers of lists and pieces that were tested.
#[derive(Default, Debug)]
pub struct Counts {
    pub lists: u64,
    pub pieces: u64,
    /// Lists that the call refused.
    pub refused: u64,
    /// Lists with an index out of range that was found while the copy ran.
    pub late: u64,
    /// Lists that contain a destination several times.
    pub twice: u64,
    /// Plans that ran in the stream before a list.
    pub plans: u64,
}

/// Generator of random lists, with its own memory.
pub struct Lists<'a> {
    context: &'a Context,
    streams: &'a [StreamHandle],
    /// True if other threads use the streams too. No late errors are then generated, because they could be reported to another thread.
    is_shared: bool,
    random: Random,
    noise: Vec<u8>,
    read: Vec<Area>,
    written: Vec<Area>,
    index: Vec<Area>,
    /// Number of bytes of each index area that copies in flight use.
    indices_used: [usize; DEVICES.len()],
    pub counts: Counts,
}

impl<'a> Lists<'a> {
    pub fn new(context: &'a Context, streams: &'a [StreamHandle], is_shared: bool, seed: u64) -> Lists<'a> {
        let mut random = Random(seed);
        let noise = (0..32 << 10).flat_map(|_| random.next().to_ne_bytes()).collect();
        let areas = |bytes| DEVICES.map(|device| Area::new(context, device, bytes)).into();
        Lists {
            context,
            streams,
            is_shared,
            random,
            noise,
            read: areas(READ),
            written: areas(WRITTEN),
            index: areas(INDEX),
            indices_used: [0; 3],
            counts: Counts::default(),
        }
    }

    /// Copies up to three lists in one stream, sometimes after a plan. Waits for the copies and compares every byte.
    pub fn step(&mut self) {
        let Lists { read, noise, random, .. } = self;
        for area in read {
            let at = random.below((noise.len() - READ) as u64) as usize;
            area.put(0, &noise[at..at + READ]);
        }
        self.indices_used = [0; 3];
        let stream = self.streams[self.random.below(self.streams.len() as u64) as usize];
        if self.random.chance(10) {
            self.plan(stream);
        }
        let lists = if self.random.chance(20) { 2 + self.random.below(2) } else { 1 };
        let mut flights = Vec::new();
        for _ in 0..lists {
            let report = if self.random.chance(50) { Report::End } else { Report::Nothing };
            let flight = if self.random.chance(50) { self.blocks(stream, report, lists == 1) } else { self.pieces(stream, report) };
            flights.push(flight);
        }
        self.counts.lists += lists;
        let is_expected = |error: Option<String>, of: &[String]| match error {
            None => assert!(of.is_empty(), "no error, but one of {of:?}"),
            Some(error) => assert!(of.iter().any(|text| error.contains(text)), "{error}, but one of {of:?}"),
        };
        for Flight { completion, errors, .. } in &flights {
            if let Some(completion) = completion {
                is_expected(completion.wait().err().map(|error| error.to_string()), errors);
            }
        }
        let errors: Vec<String> = flights.iter().flat_map(|flight| flight.errors.clone()).collect();
        is_expected(self.context.synchronize_stream(stream).err().map(|error| error.to_string()), &errors);
        flights.iter().for_each(|flight| self.settle(flight));
        self.check();
    }

    /// Accepts either source for each byte of a destination that is listed several times.
    fn settle(&mut self, flight: &Flight) {
        self.counts.twice += u64::from(!flight.choices.is_empty());
        for (&(area, at), sources) in &flight.choices {
            let area = &mut self.written[area];
            for byte in 0..sources[0].len() {
                let actual = area.actual()[at + byte];
                assert!(sources.iter().any(|source| source[byte] == actual), "a byte of no source");
                area.expected[at + byte] = actual;
            }
        }
    }

    fn check(&self) {
        let all = self.read.iter().chain(&self.written).chain(&self.index);
        if let Some((number, area)) = all.enumerate().find(|(_, area)| area.actual() != area.expected) {
            let at = area.actual().iter().zip(&area.expected).position(|(actual, expected)| actual != expected);
            panic!("wrong byte {at:?} of memory {number}, after {:?}", self.counts);
        }
    }

    fn options(&mut self) -> PieceOptions {
        let random = &mut self.random;
        PieceOptions {
            multiprocessors: if random.chance(50) { None } else { Some(1 + random.below(9) as u32) },
            relays: None,
            paced: [None, Some(false), Some(true)][random.below(3) as usize],
        }
    }

    /// Enqueues a plan that copies from each source area.
    fn plan(&mut self, stream: StreamHandle) {
        let mut transfers = Vec::new();
        for from in 0..DEVICES.len() {
            let (to, bytes) = (self.random.below(3) as usize, 1 + self.random.below(20_000) as usize);
            let (src, dst) = (self.random.below((READ - bytes) as u64) as usize, from * 40_000 + self.random.below(20_000) as usize);
            let moved = self.read[from].expected[src..src + bytes].to_vec();
            self.written[to].expected[dst..dst + bytes].copy_from_slice(&moved);
            transfers.push(Transfer {
                dst: self.written[to].address + dst as u64,
                dst_device: Transfer::AUTO,
                src: self.read[from].address + src as u64,
                src_device: Transfer::AUTO,
                bytes: bytes as u64,
            });
        }
        let plan = self.context.plan(&transfers, &PlanOptions::default()).expect("a plan");
        plan.enqueue(stream).expect("an execution");
        self.counts.plans += 1;
    }

    /// Stores indices and returns their address. For pageable indices, also returns the vector that contains them.
    fn indices(&mut self, place: Place, values: &[u64], width: u32) -> (u64, Vec<u64>) {
        let bytes: Vec<u8> = match width {
            4 => values.iter().flat_map(|value| (*value as u32).to_ne_bytes()).collect(),
            _ => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        };
        match place {
            Place::InOrder => (0, Vec::new()),
            Place::Pageable => {
                let mut words: Vec<u64> = vec![0; bytes.len() / 8 + 1];
                // SAFETY: The vector has room for these bytes.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), words.as_mut_ptr().cast(), bytes.len()) };
                (words.as_ptr().expose_provenance() as u64, words)
            }
            Place::Device(device) => {
                let used = &mut self.indices_used[device];
                let at = *used + width as usize * self.random.below(2) as usize;
                *used = (at + bytes.len()).next_multiple_of(8);
                self.index[device].put(at, &bytes);
                (self.index[device].address + at as u64, Vec::new())
            }
        }
    }

    /// Enqueues a random block copy. If `may_repeat` is true, destinations may be listed twice.
    fn blocks(&mut self, stream: StreamHandle, report: Report, may_repeat: bool) -> Flight {
        let options = self.options();
        let random = &mut self.random;
        // One launch has up to 120 layers.
        let layers = if random.chance(2) { 118 + random.below(6) } else { 1 + random.below(4) };
        let bytes = if layers > 4 { 1 + random.below(40) } else { block_bytes(random) };
        let width = if random.chance(50) { 4 } else { 8 };
        let mut stride = || [0, bytes.next_multiple_of(16), bytes + random.below(70), bytes + random.below(70)][random.below(4) as usize];
        let given = [stride(), stride()];
        let strides = given.map(|stride| if stride == 0 { bytes } else { stride });
        let mut fitting = |room: u64, stride: u64| (1 + random.below(40)).min(room.saturating_sub(40 + bytes) / stride.max(1) + 1);
        let blocks = [fitting(150_000 / layers, strides[0]), fitting(READ as u64, strides[1])];
        let places = [Place::random(random), Place::random(random)];
        let repeats = may_repeat && places[0] != Place::InOrder && random.chance(10);
        let limits = [if repeats { MOST } else { blocks[0] }, if places[1] == Place::InOrder { blocks[1] } else { MOST }];
        let count = random.below(limits[0].min(limits[1]) + 1);
        let mut values = [
            match places[0] {
                Place::InOrder => (0..count).collect(),
                _ if repeats => (0..count).map(|_| random.below(blocks[0])).collect(),
                _ => different(count, blocks[0], random),
            },
            match places[1] {
                Place::InOrder => (0..count).collect(),
                _ => (0..count).map(|_| random.below(blocks[1])).collect::<Vec<u64>>(),
            },
        ];
        if count > 0 && bytes > 0 && random.chance(12) {
            for _ in 0..1 + random.below(3) {
                let (end, at) = (random.below(2) as usize, random.below(count) as usize);
                if places[end] != Place::InOrder && !(self.is_shared && places[end].is_late()) {
                    let most = if width == 4 { u64::from(u32::MAX) } else { u64::MAX };
                    values[end][at] = [blocks[end], blocks[end] + random.below(1000), most][random.below(3) as usize];
                }
            }
        }
        let is_bad = |end: usize, at: usize| values[end][at] >= blocks[end];
        let names = [("dst", "destination"), ("src", "source")];
        let refusal = [0, 1].into_iter().filter(|end| !places[*end].is_late()).find_map(|end| {
            let at = (0..count as usize).find(|at| is_bad(end, *at))?;
            Some(format!("{}_index[{at}]={}:", names[end].0, values[end][at]))
        });
        let spans = [0, 1].map(|end| ((blocks[end] - 1) * strides[end] + bytes) as usize);
        let (mut used, mut arrays, mut ends) = ([0; 3], [Vec::new(), Vec::new()], Vec::new());
        for _ in 0..layers {
            let (to, from) = (random.below(3) as usize, random.below(3) as usize);
            let dst = used[to] + random.below(17) as usize;
            used[to] = dst + spans[0];
            let src = random.below((READ - spans[1]) as u64 + 1) as usize;
            arrays[0].push(self.written[to].address + dst as u64);
            arrays[1].push(self.read[from].address + src as u64);
            ends.push(((to, dst), (from, src)));
        }
        let (dst_index, mut dst_words) = self.indices(places[0], &values[0], width);
        let (src_index, mut src_words) = self.indices(places[1], &values[1], width);
        let request = BlockRequest {
            dst: BlockArrays { arrays: &arrays[0], stride: given[0], blocks: blocks[0], index: dst_index },
            src: BlockArrays { arrays: &arrays[1], stride: given[1], blocks: blocks[1], index: src_index },
            index_bytes: width,
            count,
            bytes,
        };
        let outcome = self.context.copy_blocks(&request, options, stream, report);
        // Lists in host memory were read before the call returned.
        dst_words.fill(u64::MAX);
        src_words.fill(u64::MAX);
        self.index[0].put(0, &[0xFF; INDEX]);
        let Some(completion) = self.accepted(outcome, refusal) else { return Flight::default() };
        let (mut errors, mut moves) = (Vec::new(), Vec::new());
        for (at, (&to, &from)) in values[0].iter().zip(&values[1]).enumerate() {
            if is_bad(0, at) || is_bad(1, at) {
                let end = usize::from(!is_bad(0, at));
                errors.push(format!("index {at} of the {} is {},", names[end].1, values[end][at]));
                continue;
            }
            let offsets = [to * strides[0], from * strides[1]].map(|offset| offset as usize);
            moves.extend(ends.iter().map(|((to, dst), (from, src))| Move {
                to: (*to, dst + offsets[0]),
                from: (*from, src + offsets[1]),
                bytes: bytes as usize,
            }));
        }
        self.counts.late += u64::from(!errors.is_empty());
        Flight { completion, errors, choices: self.expect(moves) }
    }

    /// Enqueues a random list of pieces. Destinations do not overlap.
    fn pieces(&mut self, stream: StreamHandle, report: Report) -> Flight {
        let options = self.options();
        let random = &mut self.random;
        let (count, is_long) = if random.chance(5) { (random.below(2000), true) } else { (random.below(60), false) };
        let (mut used, mut pieces, mut moves) = ([0_usize; 3], Vec::new(), Vec::new());
        for _ in 0..count {
            let bytes = if is_long && !random.chance(1) { random.below(9) } else { block_bytes(random) } as usize;
            let (to, from) = (random.below(3) as usize, random.below(3) as usize);
            let (dst, src) = (used[to] + random.below(20) as usize, random.below((READ - bytes) as u64 + 1) as usize);
            if dst + bytes > WRITTEN {
                continue;
            }
            used[to] = dst + bytes;
            // An empty piece may have any address.
            let address = if bytes == 0 && random.chance(50) { 0 } else { self.written[to].address + dst as u64 };
            pieces.push(Segment { dst: address, src: self.read[from].address + src as u64, bytes: bytes as u64 });
            moves.push(Move { to: (to, dst), from: (from, src), bytes });
        }
        for at in (1..pieces.len()).rev() {
            let other = random.below(at as u64 + 1) as usize;
            pieces.swap(at, other);
        }
        let mut refusal = None;
        if !pieces.is_empty() && random.chance(5) {
            let at = random.below(pieces.len() as u64) as usize;
            let (is_source, end) = if random.chance(50) { (true, "source") } else { (false, "destination") };
            let address = match random.below(3) {
                0 => 0,
                1 => self.noise.as_ptr().expose_provenance() as u64,
                _ => self.written[1].address + WRITTEN as u64 - 1,
            };
            // Only one end is invalid.
            pieces[at] = Segment { dst: self.written[0].address, src: self.read[0].address, bytes: 2 };
            *if is_source { &mut pieces[at].src } else { &mut pieces[at].dst } = address;
            refusal = Some(format!("piece {at}: {end}"));
        }
        let outcome = self.context.copy_pieces(&pieces, options, stream, report);
        pieces.fill(Segment { dst: u64::MAX, src: u64::MAX, bytes: u64::MAX });
        let Some(completion) = self.accepted(outcome, refusal) else { return Flight::default() };
        Flight { completion, errors: Vec::new(), choices: self.expect(moves) }
    }

    /// Checks the result of a call. Returns `None` if the call was refused as expected.
    fn accepted(&mut self, outcome: Result<Option<Completion>, Error>, refusal: Option<String>) -> Option<Option<Completion>> {
        match (outcome, refusal) {
            (Ok(completion), None) => Some(completion),
            (Err(error), Some(text)) => {
                assert!(error.to_string().contains(&text), "{error}, not {text}");
                self.counts.refused += 1;
                None
            }
            (outcome, refusal) => panic!("{outcome:?}, but {refusal:?}, after {:?}", self.counts),
        }
    }

    /// Updates the expected bytes. Returns the destinations that are listed several times, whose bytes are not known.
    fn expect(&mut self, moves: Vec<Move>) -> BTreeMap<(usize, usize), Vec<Vec<u8>>> {
        let mut choices: BTreeMap<(usize, usize), Vec<Vec<u8>>> = BTreeMap::new();
        self.counts.pieces += moves.len() as u64;
        for Move { to, from, bytes } in moves.into_iter().filter(|one| one.bytes > 0) {
            let moved = &self.read[from.0].expected[from.1..from.1 + bytes];
            self.written[to.0].expected[to.1..to.1 + bytes].copy_from_slice(moved);
            choices.entry(to).or_default().push(moved.to_vec());
        }
        choices.retain(|_, sources| sources.len() > 1);
        choices
    }
}

impl Drop for Lists<'_> {
    fn drop(&mut self) {
        for area in self.read.iter().chain(&self.written).chain(&self.index) {
            let _ = self.context.free(area.address);
        }
    }
}

/// Returns a random size of a piece: often less than 16 bytes or a multiple of 16, sometimes more than a chunk of the kernel.
fn block_bytes(random: &mut Random) -> u64 {
    match random.below(16) {
        0..5 => 1 + random.below(15),
        5..9 => 16 * (1 + random.below(16)),
        9..12 => 1 + random.below(300),
        12..14 => 1 + random.below(3000),
        14 => 1 + random.below(36_000),
        _ => random.below(2),
    }
}

/// Returns different numbers below `most`, in random order.
fn different(count: u64, most: u64, random: &mut Random) -> Vec<u64> {
    let mut all: Vec<u64> = (0..most).collect();
    for at in 0..count as usize {
        all.swap(at, at + random.below(most - at as u64) as usize);
    }
    all.truncate(count as usize);
    all
}

/// Copies `lists` random lists, or as many as `seconds` allow, and prints their number.
pub fn campaign(context: &Context, streams: &[StreamHandle], lists: u64, seconds: u64, seed: u64) {
    let (begun, mut all) = (Instant::now(), Lists::new(context, streams, false, seed));
    while all.counts.lists < lists && begun.elapsed().as_secs() < seconds {
        all.step();
    }
    let enough = lists < 1000 || seconds < 10 || [all.counts.refused, all.counts.late, all.counts.twice].iter().all(|count| *count > 0);
    assert!(enough, "{:?}", all.counts);
    println!("TEST_SEED={seed}: {:?} on {}, {:.0} s", all.counts, context.backend().name(), begun.elapsed().as_secs_f64());
}

/// Copies random lists and executes plans by several threads in the same streams. Each thread calls `enter` first.
pub fn parties(context: &Context, streams: &[StreamHandle], lists: u64, seed: u64, enter: &(dyn Fn() + Sync)) {
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                enter();
                let mut all = Lists::new(context, streams, true, seed << 8 | thread);
                while all.counts.lists < lists {
                    all.step();
                }
            });
        }
    });
}

/// Host function that blocks a stream until it is opened.
#[derive(Clone)]
pub struct Gate(Arc<AtomicBool>);

impl Gate {
    pub fn close(context: &Context, stream: StreamHandle) -> Gate {
        let gate = Gate(Arc::default());
        let seen = gate.clone();
        let wait = move || {
            while !seen.0.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_micros(100));
            }
        };
        context.launch_host(stream, Box::new(wait)).expect("a host function");
        gate
    }

    pub fn open(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Closes a context while copies of pieces wait in a stream. All of them must still run.
pub fn close_in_flight(context: &Context, stream: StreamHandle) {
    const BYTES: usize = 64 << 10;
    let mut memory: Vec<u8> = (0..2 * BYTES).map(|at| (at * 7) as u8 ^ (at / BYTES) as u8).collect();
    let to = memory.as_mut_ptr().expose_provenance() as u64;
    let from = to + BYTES as u64;
    context.register_memory(to, 2 * BYTES as u64, false).expect("pinned");
    let middle = context.allocate(DeviceId::gpu(0), BYTES as u64).expect("memory");
    let pieces = |to: u64, from: u64| -> Vec<Segment> {
        (0..BYTES as u64 / 64).rev().map(|at| Segment { dst: to + 64 * at, src: from + 64 * at, bytes: 64 }).collect()
    };
    let gate = Gate::close(context, stream);
    for (to, from) in [(middle, from), (to, middle)] {
        context.copy_pieces(&pieces(to, from), PieceOptions::default(), stream, Report::Nothing).expect("enqueued");
    }
    std::thread::scope(|scope| {
        let gate = gate.clone();
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            gate.open();
        });
        context.close().expect("closed");
    });
    assert!(memory[..BYTES] == memory[BYTES..], "a copy did not run");
    let late = context.copy_pieces(&pieces(to, from), PieceOptions::default(), stream, Report::Nothing);
    assert!(matches!(late, Err(Error::ContextDestroyed)), "{late:?}");
}

/// Enqueues `lists` copies, each with its own index lists, in a blocked stream. Then unblocks the stream and compares every byte.
pub fn many_in_flight(context: &Context, stream: StreamHandle, lists: u64) {
    const BLOCKS: u64 = 8;
    let (blocks, bytes) = (BLOCKS * lists, 16 * BLOCKS * lists);
    let (mut dst, mut src) = (Area::new(context, DeviceId::gpu(0), bytes as usize), Area::new(context, DeviceId::HOST, bytes as usize));
    let mut random = Random(lists);
    src.put(0, &(0..bytes).map(|_| random.next() as u8).collect::<Vec<u8>>());
    let gate = Gate::close(context, stream);
    for list in 0..lists {
        let to: Vec<u32> = (0..BLOCKS).map(|at| (BLOCKS * list + at) as u32).collect();
        let from: Vec<u32> = (0..BLOCKS).map(|_| random.below(blocks) as u32).collect();
        for (to, from) in to.iter().zip(&from).map(|(to, from)| (16 * *to as usize, 16 * *from as usize)) {
            dst.expected[to..to + 16].copy_from_slice(&src.expected[from..from + 16]);
        }
        let index = |list: &[u32]| list.as_ptr().expose_provenance() as u64;
        let request = BlockRequest {
            dst: BlockArrays { arrays: &[dst.address], stride: 0, blocks, index: index(&to) },
            src: BlockArrays { arrays: &[src.address], stride: 0, blocks, index: index(&from) },
            index_bytes: 4,
            count: BLOCKS,
            bytes: 16,
        };
        context.copy_blocks(&request, PieceOptions::default(), stream, Report::Nothing).expect("enqueued");
    }
    gate.open();
    context.synchronize_stream(stream).expect("copied");
    assert!(dst.actual() == dst.expected && src.actual() == src.expected, "a wrong byte");
    [dst, src].iter().for_each(|area| context.free(area.address).expect("freed"));
}
