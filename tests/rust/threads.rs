//! Many threads, random plans, one context with little staging memory: every byte arrives, and none beside it is touched.
//!
//! Staging is so scarce that the plans of different threads share it all the time: if one execution ran into the slots of another,
//! bytes would be wrong. `TEST_EXECUTIONS` sets the executions of each thread (for sanitizers and Valgrind), `TEST_THREADS` the
//! threads, `TEST_SEED` the plans.

use crate::common::{Random, setting};
use crate::node::*;
use mpgpu::ffi::*;
use mpgpu::topology;
use std::ffi::CString;
use std::ptr::null_mut;

const GPUS: u64 = 4;
/// Of each buffer, with room for ranges that start anywhere.
const BYTES: u64 = 160 << 10;
/// Executions of one thread that are under way at once, each with buffers of its own.
const AT_ONCE: usize = 3;

/// A node of four directly wired GPUs on which copying costs next to nothing but time on the links, so that small transfers are
/// worth splitting too.
fn topology_file() -> CString {
    let mut node = topology::load("beluga").expect("a preset");
    node.costs.copy = 1e-9;
    node.costs.issue = 1e-10;
    (node.costs.chunk, node.costs.relay_chunk) = (1e-9, 1e-9);
    node.links.iter_mut().for_each(|link| link.latency = 1e-9);
    let path = std::env::temp_dir().join(format!("mpgpu-threads-{}.toml", std::process::id()));
    std::fs::write(&path, node.to_toml()).expect("a file for the test");
    CString::new(path.to_str().expect("UTF-8")).expect("no NUL")
}

/// Source and destination buffers on every GPU and on the host.
struct Buffers {
    src: Vec<*mut u8>,
    dst: Vec<*mut u8>,
}

/// GPUs, then the host.
fn device(index: usize) -> i32 {
    if index as u64 == GPUS { MP_DEVICE_HOST } else { index as i32 }
}

impl Buffers {
    fn new(node: &Node) -> Buffers {
        let of = |_| (0..=GPUS as usize).map(|i| node.alloc(device(i), BYTES as usize)).collect();
        Buffers { src: of(0), dst: of(1) }
    }
}

/// The bytes of a buffer.
fn bytes_of(memory: *mut u8) -> &'static mut [u8] {
    // SAFETY: allocations have BYTES bytes; a thread looks only at its own, and only while no execution uses them.
    unsafe { std::slice::from_raw_parts_mut(memory, BYTES as usize) }
}

/// Random bytes to fill sources from, at any offset: as good as new ones, and made once.
struct Noise(Vec<u8>);

impl Noise {
    fn new(random: &mut Random) -> Noise {
        Noise((0..BYTES / 4).flat_map(|_| random.next().to_ne_bytes()).collect())
    }
    fn fill(&self, memory: *mut u8, random: &mut Random) {
        let offset = random.below(self.0.len() as u64 - BYTES + 1) as usize;
        bytes_of(memory).copy_from_slice(&self.0[offset..offset + BYTES as usize]);
    }
}

/// One execution under way: what it was asked to do.
struct Flight {
    transfers: Vec<mp_transfer_t>,
    plan: mp_plan_t,
    request: mp_request_t,
    fill: u8,
}

fn launch(node: &Node, random: &mut Random, noise: &Noise, buffers: &Buffers, streams: &[mp_stream_t]) -> Flight {
    let fill = random.next() as u8;
    buffers.src.iter().for_each(|&memory| noise.fill(memory, random));
    buffers.dst.iter().for_each(|&memory| bytes_of(memory).fill(fill));
    // Destinations of one device follow each other, so that they do not overlap.
    let mut next = [0_u64; GPUS as usize + 1];
    let mut transfers = Vec::new();
    for _ in 0..1 + random.below(4) {
        let (from, to) = (random.below(GPUS + 1) as usize, random.below(GPUS + 1) as usize);
        let gap = random.below(100);
        let room = (BYTES - next[to]).saturating_sub(gap);
        let bytes = match random.below(8) {
            0 => random.below(9).min(room),
            _ => random.below(room + 1),
        };
        let src = buffers.src[from].wrapping_add(random.below(BYTES - bytes + 1) as usize);
        let dst = buffers.dst[to].wrapping_add((next[to] + gap).min(BYTES) as usize);
        next[to] = (next[to] + gap + bytes).min(BYTES);
        transfers.push(transfer(dst, device(to), src, device(from), bytes as usize));
    }
    let options = mp_plan_options_t {
        engine: random.below(5) as i32,
        max_paths: random.below(6) as u32,
        host_path: random.below(3) as i32,
        chunk_bytes: [0, 4096, 8192, 16384][random.below(4) as usize],
        min_bytes: 1,
        ..plan_options()
    };
    let (mut plan, mut request) = (null_mut(), null_mut());
    // SAFETY: all pointers are valid for the calls; the buffers live until the context is destroyed.
    unsafe {
        ok(mp_plan(node.context, transfers.as_ptr(), transfers.len(), &options, &mut plan));
        ok(mp_execute(plan, streams[random.below(streams.len() as u64) as usize], &mut request));
    }
    Flight { transfers, plan, request, fill }
}

/// Waits, one way or the other, and compares every byte.
fn land(mut flight: Flight, random: &mut Random, buffers: &Buffers) {
    // SAFETY: the pointers are valid for the calls.
    unsafe {
        if random.chance(50) {
            ok(mp_wait(&mut flight.request));
        } else {
            let mut done = 0;
            while done == 0 {
                ok(mp_test(&mut flight.request, &mut done));
                std::thread::yield_now();
            }
        }
    }
    assert!(flight.request.is_null());
    let mut expected: Vec<Vec<u8>> = buffers.dst.iter().map(|_| vec![flight.fill; BYTES as usize]).collect();
    for t in &flight.transfers {
        let to =
            buffers.dst.iter().position(|base| (base.addr()..=base.addr() + BYTES as usize).contains(&t.dst.addr())).expect("a buffer");
        let offset = t.dst.addr() - buffers.dst[to].addr();
        // SAFETY: inside a source buffer of this thread, which no execution writes.
        let bytes = unsafe { std::slice::from_raw_parts(t.src.cast::<u8>(), t.bytes as usize) };
        expected[to][offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    for (&memory, expected) in buffers.dst.iter().zip(&expected) {
        let found = &*bytes_of(memory);
        if found != expected {
            let at = found.iter().zip(expected).position(|(a, b)| a != b).expect("they differ");
            panic!("byte {at} is {:#x}, not {:#x}, after {:?}", found[at], expected[at], flight.transfers);
        }
    }
    ok(mp_plan_destroy(flight.plan));
}

#[test]
fn random_executions_of_many_threads_deliver_every_byte() {
    let (threads, executions, seed) = (setting("TEST_THREADS", 16), setting("TEST_EXECUTIONS", 1000), setting("TEST_SEED", 1));
    let file = topology_file();
    let node = Node::with(mp_context_options_t { topology: file.as_ptr(), staging_bytes: 96 << 10, cache_plans: 32, ..context_options() });
    // Streams of all threads, the default stream among them: their executions meet in streams as well as in staging.
    let shared: Vec<usize> = (0..GPUS).map(|gpu| node.stream(gpu as i32).addr()).chain([0]).collect();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (node, shared) = (&node, &shared);
            scope.spawn(move || {
                let mut random = Random(seed << 32 | thread);
                let noise = Noise::new(&mut random);
                let buffers: Vec<Buffers> = (0..AT_ONCE).map(|_| Buffers::new(node)).collect();
                let streams: Vec<mp_stream_t> = std::iter::once(node.stream((thread % GPUS) as i32))
                    .chain(shared.iter().map(|&stream| std::ptr::with_exposed_provenance_mut(stream)))
                    .collect();
                let mut done = 0;
                while done < executions {
                    let flights: Vec<Flight> = buffers.iter().map(|own| launch(node, &mut random, &noise, own, &streams)).collect();
                    for (flight, own) in flights.into_iter().zip(&buffers) {
                        land(flight, &mut random, own);
                        done += 1;
                    }
                }
            });
        }
    });
    let statistics = node.statistics();
    assert!(statistics.executions >= threads * executions);
    let staged: Vec<u64> = (0..GPUS as i32)
        .map(|gpu| {
            let mut held = device_statistics();
            // SAFETY: a whole struct of the right size.
            ok(unsafe { mp_context_device_statistics(node.context, gpu, &mut held) });
            held.staging_bytes
        })
        .collect();
    assert!(staged.contains(&(96 << 10)), "no plan staged, so no execution shared staging: {staged:?}");
    std::fs::remove_file(file.to_str().expect("UTF-8")).expect("the file was the test's own");
}
