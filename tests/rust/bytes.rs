//! Executes random batches on the host backend, with random machines, options and streams, and checks every byte.
//!
//! Each execution is repeated on plain vectors. At the end all memory of all devices is compared with these vectors, so a changed byte
//! outside the destinations is detected as reliably as a wrong byte inside them.

use crate::common::Random;
use mpgpu_backend::{EventHandle, StreamHandle};
use mpgpu_contexts::{Config, Context, PlanOptions, Transfer, Verify};
use mpgpu_core::plan::{Options, validate};
use mpgpu_core::topology::{DeviceId, Machine};
use mpgpu_devices::host::HostBackend;
use proptest::prelude::*;
use std::sync::Arc;

/// Memory range on one device, with its expected contents.
struct Arena {
    device: DeviceId,
    address: u64,
    expected: Vec<u8>,
    /// Offset from which the next destination may start. Sources lie anywhere before it.
    free: u64,
    /// Owner of the memory if it is pageable host memory, kept to keep the memory allocated.
    _ordinary: Option<Ordinary>,
}

/// Host memory that the context has not allocated.
pub(crate) enum Ordinary {
    Own(Vec<u8>),
    /// Memory that is mapped from a file.
    Mapped {
        base: usize,
        bytes: usize,
    },
}

impl Ordinary {
    pub(crate) fn mapped(bytes: usize) -> Ordinary {
        // SAFETY: a new file and a new mapping of it. The file exists as long as the mapping.
        let base = unsafe {
            let file = libc::memfd_create(c"mpgpu-test".as_ptr(), libc::MFD_CLOEXEC);
            assert!(file >= 0 && libc::ftruncate(file, bytes as libc::off_t) == 0);
            let base = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file, 0);
            libc::close(file);
            base
        };
        assert_ne!(base, libc::MAP_FAILED);
        Ordinary::Mapped { base: base.expose_provenance(), bytes }
    }

    pub(crate) fn address(&self) -> u64 {
        match self {
            Ordinary::Own(bytes) => bytes.as_ptr() as u64,
            Ordinary::Mapped { base, .. } => *base as u64,
        }
    }
}

impl Drop for Ordinary {
    fn drop(&mut self) {
        if let Ordinary::Mapped { base, bytes } = *self {
            // SAFETY: the whole mapping.
            unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(base), bytes) };
        }
    }
}

impl Arena {
    fn new(context: &Context, device: DeviceId, bytes: u64, random: &mut Random) -> Arena {
        let mut expected = vec![0; bytes as usize];
        expected.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&random.next().to_le_bytes()));
        let ordinary = (device.is_host() && random.chance(60)).then(|| match random.below(3) {
            0 => Ordinary::mapped(bytes as usize),
            _ => Ordinary::Own(vec![0_u8; bytes as usize]),
        });
        let address = match &ordinary {
            Some(memory) => memory.address(),
            None => context.allocate(device, bytes).expect("memory for a test"),
        };
        if ordinary.is_some() && random.chance(40) {
            context.register_memory(address, bytes, random.chance(50)).expect("registered");
        }
        // SAFETY: `address` is the start of `bytes` bytes that only this test uses, and nothing is enqueued yet.
        unsafe { std::ptr::copy_nonoverlapping(expected.as_ptr(), address as *mut u8, bytes as usize) };
        // The first half is never written. It holds sources that do not change.
        Arena { device, address, expected, free: bytes / 2, _ordinary: ordinary }
    }

    fn actual(&self) -> &[u8] {
        // SAFETY: the range was allocated with this length, and all work that writes to it has finished.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.expected.len()) }
    }

    /// Returns a range that no earlier transfer has written, after a random gap.
    fn destination(&mut self, bytes: u64, random: &mut Random) -> Option<u64> {
        let offset = self.free + random.below(70);
        let end = offset.checked_add(bytes).filter(|&end| end <= self.expected.len() as u64)?;
        self.free = end;
        Some(offset)
    }
}

/// Range that one plan has written and that a later plan may read.
struct Written {
    arena: usize,
    offset: u64,
    bytes: u64,
    step: usize,
}

/// Runs one random case, on a machine of at most `devices` devices, with transfers of at most `most` bytes.
fn run(seed: u64, most: u64, devices: u64) -> Result<(), TestCaseError> {
    let mut random = Random(seed);
    let machine = Arc::new(Machine::new(crate::common::topology(&mut random, devices)).expect("a random topology is well formed"));
    let (gpus, hosts) = (machine.gpu_count(), machine.host_count());
    let backend = Arc::new(HostBackend::new(gpus, hosts));
    let verify = if random.chance(30) { Verify::Bytes } else { Verify::Program };
    let staging_bytes = [1 << 14, 1 << 16, 1 << 20][random.below(3) as usize];
    let config = Config { staging_bytes, verify, ..Config::default() };
    let context = Context::with_backend(machine.clone(), backend, config).expect("a context");
    let devices: Vec<DeviceId> = (0..gpus).map(DeviceId::gpu).chain((0..hosts).map(DeviceId::host)).collect();
    let mut arenas: Vec<Arena> = devices.iter().map(|&device| Arena::new(&context, device, 4 * most + 4096, &mut random)).collect();
    let mut streams: Vec<StreamHandle> =
        (0..3).map(|_| context.create_stream(devices[random.below(u64::from(gpus)) as usize]).expect("a stream")).collect();
    streams.push(StreamHandle(0));

    let mut written: Vec<Written> = Vec::new();
    let mut done: Vec<(StreamHandle, EventHandle)> = Vec::new();
    let mut completions = Vec::new();
    for step in 0..1 + random.below(5) as usize {
        let mut batch = Vec::new();
        let mut shadow = Vec::new();
        let mut after: Vec<usize> = Vec::new();
        let (before, same_source) = (written.len(), random.below(most));
        for _ in 0..[1, 1, 2, 4, 9, 30][random.below(6) as usize] {
            let mut bytes = crate::common::size(&mut random, most);
            // The plans form a chain: the source is a range that an earlier plan has written.
            let (source, src_offset) = if before > 0 && random.chance(40) {
                let chain = &written[random.below(before as u64) as usize];
                bytes = bytes.min(chain.bytes);
                after.push(chain.step);
                (chain.arena, chain.offset)
            } else {
                // Often the source is the same as before, so that several transfers read one range at the same time.
                let offset = if random.chance(30) { same_source } else { random.below(most) };
                (random.below(devices.len() as u64) as usize, offset)
            };
            let target = random.below(devices.len() as u64) as usize;
            let Some(dst_offset) = arenas[target].destination(bytes, &mut random) else { continue };
            batch.push(Transfer {
                dst: arenas[target].address + dst_offset,
                dst_device: arenas[target].device,
                src: arenas[source].address + src_offset,
                src_device: arenas[source].device,
                bytes,
            });
            shadow.push((source, src_offset, target, dst_offset, bytes));
            written.push(Written { arena: target, offset: dst_offset, bytes, step });
        }
        let Options { engine, max_paths, host_path, relays, chunk_bytes, relay_chunks, host_chunks, min_bytes, .. } =
            crate::common::options(&mut random);
        let options = PlanOptions {
            engine: Some(engine),
            max_paths: Some(max_paths),
            host_path: Some(host_path),
            adapt: None,
            relays: Some(relays),
            chunk_bytes,
            relay_chunks,
            host_chunks,
            min_bytes,
            staging_bytes: random.chance(30).then_some(1 << 14),
        };
        let plan = match context.plan(&batch, &options) {
            Ok(plan) => plan,
            // There is no route, or the random options forbid it. The plan is then refused and nothing is copied.
            Err(refused) => {
                prop_assert!(refused.to_string().contains("transfer"), "{refused}");
                written.truncate(before);
                continue;
            }
        };
        let bound = options.staging_bytes.unwrap_or(staging_bytes);
        prop_assert_eq!(validate(&plan.planned().program, bound), Ok(()));
        for (source, src_offset, target, dst_offset, bytes) in shadow {
            let moved = arenas[source].expected[src_offset as usize..][..bytes as usize].to_vec();
            arenas[target].expected[dst_offset as usize..][..bytes as usize].copy_from_slice(&moved);
        }
        let stream = streams[random.below(4) as usize];
        for earlier in after {
            let (other, event) = done[earlier];
            if other != stream {
                context.stream_wait_event(stream, event).expect("a wait");
            }
        }
        completions.push(plan.execute(stream).expect("an execution"));
        let event = context.create_event().expect("an event");
        context.record_event(event, stream).expect("a record");
        done.resize(step, (stream, event));
        done.push((stream, event));
    }
    for completion in &completions {
        prop_assert!(completion.wait().is_ok());
    }
    for arena in &arenas {
        if arena.actual() != arena.expected {
            let at = arena.actual().iter().zip(&arena.expected).position(|(a, e)| a != e).unwrap_or_default();
            prop_assert!(false, "byte {at} of {} on device {} is wrong", arena.expected.len(), arena.device.0);
        }
        let held = context.device_statistics(arena.device).expect("statistics").staging_bytes;
        prop_assert!(held <= staging_bytes, "{held} bytes of staging, more than {staging_bytes}");
    }
    context.close().expect("a clean end");
    Ok(())
}

proptest! {
    #![proptest_config(crate::common::config(200))]

    #[test]
    fn every_byte_arrives(seed in any::<u64>()) {
        run(seed, 60_000, 16)?;
    }
}

proptest! {
    #![proptest_config(crate::common::config(3))]

    #[test]
    fn every_byte_of_large_transfers_arrives(seed in any::<u64>()) {
        // There are few devices, so that the memory and its expected contents take less than 3 GiB.
        run(seed, 64 << 20, 5)?;
    }
}
