//! Tests that the GPU memory that the library uses, as counted by the driver, stays within the staging limit for messages of any size.
//!
//! `cuMemGetInfo` returns the free memory of a GPU, whichever program uses the rest. Buffers of the messages and primary contexts exist
//! before the first reading. The difference between a reading without a context of the library and a reading with one is therefore the
//! memory of that context. It consists of the context's staging memory, which must be within the limit, and the driver's memory for objects
//! of the context (streams, events, executable graphs, the module of the copy kernel). The size of these objects depends on the driver. The
//! test permits a constant size for them, and they must not grow with the messages.
//!
//! Another program may use the GPUs. A reading is therefore valid only if as much memory is free after the context is destroyed as before
//! it was created. If a context leaks memory, no reading is valid. Invalid readings, and those above the limit, are repeated: other
//! programs start and end, but the library uses the same amount each time. If the library uses too much, or leaks memory, all readings
//! fail, and so does the test.

use super::memory::Foreign;
use super::scale::scaled;
use super::*;

/// Maximum number of bytes that the driver may use on one GPU for the objects of a context. The driver allocates memory for them in pieces
/// of 2 MiB and more.
const DRIVER_OBJECTS: u64 = 64 << 20;
/// Maximum number of additional bytes that the driver may use for messages of any size, compared with messages of 1 byte. An executable
/// graph has a node for each chunk.
const MORE_OBJECTS: u64 = 24 << 20;
/// Maximum number of bytes that may be missing after a context is destroyed: one or two pieces that the driver keeps for the next context.
const LEFT: u64 = 4 << 20;
const READINGS: usize = 4;

const KINDS: [&str; 4] = ["host to GPU", "GPU to host", "GPU to GPU", "all to all"];

/// Returns the number of free bytes on each of the first `count` GPUs.
pub fn free_bytes(count: u32) -> Vec<u64> {
    let free = |gpu| {
        set_device(gpu);
        let (mut free, mut total) = (0, 0);
        // SAFETY: the outputs are valid for the call.
        ok(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) });
        free as u64
    };
    (0..count).map(free).collect()
}

/// Sources and destinations of all messages. The library has allocated none of them. GPU `i` sends the content from byte `8 * i` on.
struct Buffers {
    content: Foreign,
    back: Foreign,
    sources: Vec<Foreign>,
    /// Space for a message from each other GPU.
    destinations: Vec<Foreign>,
}

impl Buffers {
    fn new(count: u32, most: u64) -> Buffers {
        set_device(0);
        let whole = most.next_multiple_of(8) + 8 * u64::from(count);
        let (content, back) = (Foreign::pinned(whole as usize), Foreign::pinned(whole as usize));
        let mut random = Random(80);
        // SAFETY: pinned memory of this size, which nothing else uses.
        unsafe { host(content.address, whole) }.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
        let sources: Vec<_> = (0..count).map(|gpu| Foreign::plain(gpu, most as usize)).collect();
        for (gpu, source) in (0..).zip(&sources) {
            // SAFETY: both have this size.
            ok(unsafe { sys::cuMemcpy(source.address, content.address + 8 * gpu, most as usize) });
        }
        let room = u64::from(count - 1) * most;
        let destinations = (0..count).map(|gpu| Foreign::plain(gpu, room as usize)).collect();
        Buffers { content, back, sources, destinations }
    }

    /// Returns the messages of a kind, each with the offset of its data in the content.
    fn transfers(&self, kind: &str, bytes: u64) -> Vec<(Transfer, u64)> {
        let gpu = |gpu: usize| DeviceId::gpu(gpu as u32);
        let transfer = |(dst, dst_device), (src, src_device)| Transfer { dst, dst_device, src, src_device, bytes };
        let source = |from: usize| (self.sources[from].address, gpu(from));
        match kind {
            "host to GPU" => vec![(transfer((self.destinations[0].address, GPU0), (self.content.address, DeviceId::HOST)), 0)],
            "GPU to host" => vec![(transfer((self.back.address, DeviceId::HOST), source(0)), 0)],
            "GPU to GPU" => vec![(transfer((self.destinations[1].address, GPU1), source(0)), 0)],
            _ => {
                let all = 0..self.sources.len();
                let pairs = all.clone().flat_map(|from| all.clone().filter(move |to| *to != from).map(move |to| (from, to)));
                let message = |(from, to): (usize, usize)| {
                    let before = from - usize::from(from > to);
                    let dst = self.destinations[to].address + before as u64 * bytes;
                    (transfer((dst, gpu(to)), source(from)), 8 * from as u64)
                };
                pairs.map(message).collect()
            }
        }
    }

    fn poison(&self, transfers: &[(Transfer, u64)]) {
        for (Transfer { dst, dst_device, bytes, .. }, _) in transfers {
            if *dst == self.back.address {
                // SAFETY: pinned memory of this size, which nothing else uses meanwhile.
                unsafe { host(*dst, *bytes) }.fill(0x6b);
            } else {
                // Until peer access is enabled, only copies can access memory of another GPU.
                set_device(dst_device.0 as u32);
                // SAFETY: the destination has this size.
                ok(unsafe { sys::cuMemsetD8_v2(*dst, 0x6b, *bytes as usize) });
            }
        }
        synchronize(self.sources.len() as u32);
    }

    fn check(&self, transfers: &[(Transfer, u64)], what: &str) {
        for (transfer, offset) in transfers {
            let bytes = transfer.bytes;
            if transfer.dst != self.back.address {
                // SAFETY: both have this size.
                ok(unsafe { sys::cuMemcpy(self.back.address, transfer.dst, bytes as usize) });
            }
            // SAFETY: pinned memory of this size, which nothing writes meanwhile.
            let (found, expected) = unsafe { (host(self.back.address, bytes), host(self.content.address + offset, bytes)) };
            assert_bytes(found, expected, &format!("{what}: {} to {}", transfer.src_device, transfer.dst_device));
        }
    }
}

/// # Safety
/// The range must be host memory of this size without another slice.
unsafe fn host<'a>(address: u64, bytes: u64) -> &'a mut [u8] {
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address as usize), bytes as usize) }
}

fn synchronize(count: u32) {
    for gpu in 0..count {
        set_device(gpu);
        // SAFETY: no argument.
        ok(unsafe { sys::cuCtxSynchronize() });
    }
    set_device(0);
}

/// Result of one reading of the free memory.
#[derive(Debug)]
struct Reading {
    /// Maximum number of bytes that were used on a GPU in addition to the reported staging memory, and the messages for which this
    /// occurred.
    beside_staging: u64,
    messages: String,
    /// Size in bytes of the staging memory on each GPU, and in host memory.
    staged: Vec<u64>,
    staged_in_host_memory: u64,
    /// Number of bytes that are missing on each GPU after the context was destroyed. Negative if more memory is free than before.
    left: Vec<i64>,
}

impl Reading {
    fn counts(&self) -> bool {
        self.left.iter().all(|left| left.unsigned_abs() <= LEFT)
    }
}

/// Sends messages of every kind and of these sizes in a new context, once with default options and once by copies and events. Checks every
/// byte.
fn read_once(buffers: &Buffers, bound: u64, sizes: &[u64]) -> Reading {
    let count = buffers.sources.len() as u32;
    let before = free_bytes(count);
    let mut reading = Reading { beside_staging: 0, messages: String::new(), staged: vec![], staged_in_host_memory: 0, left: vec![] };
    {
        let context = context(forced(), |config| (config.staging_bytes, config.host_path) = (bound, Some(true)));
        let staging = |device| {
            let statistics = context.device_statistics(device).expect("known");
            assert!(statistics.staging_bytes <= bound, "{device}: {} bytes of staging, the bound is {bound}", statistics.staging_bytes);
            assert_eq!(statistics.allocated_bytes, 0, "{device}");
            statistics.staging_bytes
        };
        let staging_on_gpus = || (0..count).map(|gpu| staging(DeviceId::gpu(gpu))).collect::<Vec<u64>>();
        for (bytes, kind) in sizes.iter().flat_map(|bytes| KINDS.map(|kind| (*bytes, kind))) {
            let transfers = buffers.transfers(kind, bytes);
            let batch: Vec<Transfer> = transfers.iter().map(|(transfer, _)| *transfer).collect();
            for engine in [Engine::Auto, Engine::Stream] {
                let plan = context.plan(&batch, &PlanOptions { engine: Some(engine), ..PlanOptions::default() }).expect("a plan");
                let mut look = || {
                    let missing = before.iter().zip(free_bytes(count)).map(|(before, now)| before.saturating_sub(now));
                    let beside = missing.zip(staging_on_gpus()).map(|(missing, staged)| missing.saturating_sub(staged)).max().unwrap_or(0);
                    set_device(0);
                    if beside > reading.beside_staging {
                        reading.beside_staging = beside;
                        reading.messages = format!("{kind}, {bytes} bytes, {engine:?}, {} operations", plan.planned().program.ops.len());
                    }
                };
                buffers.poison(&transfers);
                let running = plan.execute(StreamHandle(0)).expect("enqueued");
                // The memory is read during the execution and afterwards.
                look();
                running.wait().expect("it runs");
                look();
                buffers.check(&transfers, &format!("{kind}, {bytes} bytes, {engine:?}\n{}", plan.describe()));
            }
        }
        (reading.staged, reading.staged_in_host_memory) = (staging_on_gpus(), staging(DeviceId::HOST));
    }
    reading.left = before.iter().zip(free_bytes(count)).map(|(before, after)| *before as i64 - after as i64).collect();
    set_device(0);
    reading
}

/// Returns the first valid reading in which at most `objects` bytes are used in addition to staging memory.
fn read(buffers: &Buffers, bound: u64, sizes: &[u64], objects: u64) -> Reading {
    let mut readings = Vec::new();
    let reading = loop {
        let reading = read_once(buffers, bound, sizes);
        if reading.counts() && reading.beside_staging <= objects {
            break reading;
        }
        readings.push(reading);
        assert!(
            readings.len() < READINGS,
            "messages of {sizes:?} bytes, staging bound {bound}: each time more than {objects} bytes were missing beside staging, or more than \
             {LEFT} bytes when the context was gone: {readings:?}"
        );
    };
    let Reading { beside_staging, messages, staged, .. } = &reading;
    drop(writeln!(
        std::io::stderr(),
        "gpu tests: messages of {sizes:?} B, staging bound {bound}: staging {staged:?}, beside it at most {beside_staging} ({messages}), reading {}",
        readings.len() + 1
    ));
    reading
}

#[test]
fn the_memory_that_a_context_takes_on_gpus_stays_inside_the_staging_bound_at_any_message_size() {
    let Some(turn) = gpus(2) else { return };
    let count = turn.count.min(4);
    // Each GPU needs memory for a source, for a message from each other GPU, and for staging.
    let least_free = free_bytes(count).into_iter().min().unwrap_or(0);
    let most = scaled(1 << 30, 32 << 20).min(least_free.saturating_sub(2 << 30) / u64::from(count)).max(1 << 20);
    let buffers = Buffers::new(count, most);
    let smaller = [1, 4099, (1 << 20) + 1, (16 << 20) + 3, 64 << 20, (256 << 20) + 5].into_iter().filter(|size| *size < most);
    let sizes: Vec<u64> = smaller.chain([most]).collect();
    let default = Config::default().staging_bytes;
    // The first objects of each kind make the driver allocate the memory that it keeps.
    read_once(&buffers, default, &[most.min(16 << 20)]);
    for bound in [4 << 20, default, 256 << 20] {
        let mut objects = DRIVER_OBJECTS;
        for &bytes in &sizes {
            let reading = read(&buffers, bound, &[bytes], objects);
            // The first readings are those of the smallest messages.
            objects = objects.min(reading.beside_staging + MORE_OBJECTS);
            // On a mesh the planner uses relays and host memory, so the readings are of plans with staging memory.
            if forced().is_some() && bytes >= 64 << 20 {
                let (on_gpus, on_host) = (reading.staged.iter().any(|staged| *staged > 0), reading.staged_in_host_memory > 0);
                assert!(on_gpus && on_host, "nothing was staged: {reading:?}");
            }
        }
        // All messages are sent in one context, which keeps the graphs of all of them.
        read(&buffers, bound, &sizes, DRIVER_OBJECTS);
    }
}
