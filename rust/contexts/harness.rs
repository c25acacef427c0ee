//! Runs the measurements of a probe on any backend: single copies, several copies at the same time, pipelines, batches and kernels. Also
//! checks that copied data is correct.
//!
//! The measured programs are made by the planner's lowering and run by the backend's executors, so the measured copies are the same as
//! those of plans.

use crate::backend::{Backend, BackendError, Endpoints, Execution, Signal, StepFate, StreamHandle, no_completion};
use crate::model::SLOTS;
use crate::pattern::Words;
use crate::plan::{DirectOp, Engine, Gpus, Mechanism, Piece, Program, Ring, StagedPath, copying_device, lower};
use crate::topology::DeviceId;
use mpgpu_measure::probe::{Harness, Hop, Integrity, Pipeline, Timing, Work};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Size in bytes of the source memory and of the destination memory on each device. Both are halved until they fit on every device.
const ROOM: u64 = 1 << 30;
/// Size in bytes of the source memory and of the destination memory of each device on the host backend. It is smaller than for GPUs,
/// because CPU threads copy every byte.
const ROOM_ON_CPU: u64 = 16 << 20;
/// Smallest size in bytes of the source or destination memory on each device. With less memory, a probe would measure little more than
/// startup times.
const LEAST_ROOM: u64 = 16 << 20;
/// Size of the test pattern in bytes. It is larger than the caches between a GPU and its bus.
const PATTERN: u64 = 4 << 20;
/// Alignment in bytes of the addresses of each copy.
const ALIGNMENT: u64 = 256;
/// Number of host buffers that repetitions of a measurement use in turn. The speed of a copy depends on the socket on which the pages of
/// the buffer lie, and virtual machines do not show on which socket they lie (four H200: 1 GiB through four links took 5.3 ms from one
/// buffer and 6.2 ms from another).
const HOST_BUFFERS: usize = 3;

/// Measures the times of transfers on a backend. The harness allocates memory and a stream on every device, and releases them when it is
/// dropped.
pub struct TransferHarness<'a> {
    backend: &'a dyn Backend,
    room: u64,
    /// Source and destination memory of each device. The first source buffer is filled with the test pattern. A host has [`HOST_BUFFERS`]
    /// source buffers and as many destination buffers.
    memory: BTreeMap<DeviceId, Vec<Arenas>>,
    streams: BTreeMap<DeviceId, StreamHandle>,
    /// Number of checks of copied data so far. Each check uses another part of the pattern.
    checks: u64,
}

#[derive(Copy, Clone, Default)]
struct Arenas {
    out: u64,
    into: u64,
}

impl<'a> TransferHarness<'a> {
    /// Allocates memory and streams on `devices`, which must include host memory, and fills the source buffers with the test pattern.
    pub fn new(backend: &'a dyn Backend, devices: &[DeviceId]) -> Result<TransferHarness<'a>, BackendError> {
        let room = if backend.is_virtual() { ROOM_ON_CPU } else { ROOM };
        let mut harness = TransferHarness { backend, room, memory: BTreeMap::new(), streams: BTreeMap::new(), checks: 0 };
        loop {
            match harness.allocate(devices) {
                Err(BackendError::OutOfMemory { .. }) if harness.room > LEAST_ROOM => {
                    harness.free();
                    harness.room /= 2;
                }
                other => break other?,
            }
        }
        for &device in devices {
            let stream = backend.create_stream(device)?;
            harness.streams.insert(device, stream);
        }
        let Some(host) = devices.iter().copied().find(|device| device.is_host()) else {
            return Err(BackendError::NotSupported(
                "a probe (measurement of the machine) needs host memory to check bytes, but the topology has none".into(),
            ));
        };
        harness.words(harness.arenas(host, 0)?.out, 0, harness.room / 8).fill();
        for &device in devices.iter().filter(|device| **device != host) {
            let ends = Endpoints { dst: harness.arenas(device, 0)?.out, src: harness.arenas(host, 0)?.out };
            harness.copy(host, device, ends, harness.room)?;
        }
        Ok(harness)
    }

    fn allocate(&mut self, devices: &[DeviceId]) -> Result<(), BackendError> {
        for &device in devices {
            for index in 0..if device.is_host() { HOST_BUFFERS } else { 1 } {
                // Allocations are recorded in `self` one by one, so that they are freed if a later one fails.
                let out = self.backend.allocate(device, self.room)?;
                let of_device = self.memory.entry(device).or_default();
                of_device.push(Arenas { out, into: 0 });
                of_device[index].into = self.backend.allocate(device, self.room)?;
            }
        }
        Ok(())
    }

    fn free(&mut self) {
        for Arenas { out, into } in std::mem::take(&mut self.memory).into_values().flatten() {
            for address in [out, into].into_iter().filter(|address| *address != 0) {
                if let Err(error) = self.backend.free(address) {
                    log::warn!("could not free memory of a probe: {error}");
                }
            }
        }
    }

    /// Returns the source and destination memory of a device. `buffer` is the index of the buffer, modulo the number of buffers of the
    /// device.
    fn arenas(&self, device: DeviceId, buffer: usize) -> Result<Arenas, BackendError> {
        let of_device = self.memory.get(&device).filter(|arenas| !arenas.is_empty());
        of_device.map(|arenas| arenas[buffer % arenas.len()]).ok_or(BackendError::InvalidDevice(device.0))
    }

    /// Returns a view of `words` 8-byte words of host memory at `address`. `first` is the index of the first word in the test pattern.
    fn words(&self, address: u64, first: u64, words: u64) -> Words<'_> {
        debug_assert!(self.memory.iter().filter(|(device, _)| device.is_host()).flat_map(|(_, arenas)| arenas).any(|arenas| {
            let inside = |base: u64| base <= address && address + words * 8 <= base + self.room;
            inside(arenas.out) || inside(arenas.into)
        }));
        // SAFETY: the range is inside an arena, which lives as long as `self`. No copy is in flight, because every method waits for the
        // copies that it enqueues.
        unsafe { Words::new(address, first, words) }
    }

    fn run(&self, prepared: &Prepared) -> Result<Timing, BackendError> {
        let start = Instant::now();
        let run = Execution::new(&prepared.program, &prepared.endpoints, &prepared.rings, prepared.stream);
        let completion = self.backend.submit(&Execution { engine: prepared.engine, ..run })?.ok_or_else(no_completion)?;
        let issue = start.elapsed().as_secs_f64();
        completion.wait()?;
        Ok(Timing { issue, total: start.elapsed().as_secs_f64() })
    }

    /// Copies `bytes` bytes by one plain copy and waits until it has finished.
    fn copy(&self, from: DeviceId, to: DeviceId, ends: Endpoints, bytes: u64) -> Result<(), BackendError> {
        let op = direct(from, to, Mechanism::Copy, smallvec![Piece { transfer: 0, offset: 0, bytes }]);
        let program = lower(vec![bytes], &[op], |_| (), &[]);
        self.run(&self.prepared(program, vec![ends], Vec::new(), copying_device(from, to), Engine::Stream)?).map(drop)
    }

    fn prepared(
        &self,
        program: Program,
        endpoints: Vec<Endpoints>,
        rings: Vec<u64>,
        issuer: DeviceId,
        engine: Engine,
    ) -> Result<Prepared, BackendError> {
        let stream = *self.streams.get(&issuer).ok_or(BackendError::InvalidDevice(issuer.0))?;
        Ok(Prepared { program: Arc::new(program), endpoints: endpoints.into(), rings: rings.into(), stream, engine })
    }

    fn prepare(&self, work: &Work<'_>, buffer: usize) -> Result<Prepared, BackendError> {
        match *work {
            Work::Together(hops) => self.prepare_paths(hops, &[], Engine::Stream, buffer),
            Work::Many { hop, count, mechanism } => self.prepare_many(hop, count, mechanism, buffer),
            // Graphs are used, because the planner also executes staged paths as graphs.
            Work::Paths { direct, staged } => self.prepare_paths(direct, staged, Engine::Graph, buffer),
        }
    }

    /// Selects memory for the source and the destination of one hop (copy between two devices). Destinations never overlap. Sources do not
    /// overlap either if there is enough memory, because several copies of the same data would read it from a cache.
    fn place(&self, layout: &mut Layout, hop: &Hop) -> Result<Endpoints, BackendError> {
        let source = layout.left.entry(hop.from).or_default();
        if *source + hop.bytes > self.room {
            *source = 0;
        }
        let src = self.arenas(hop.from, layout.buffer)?.out + *source;
        *source += hop.bytes.next_multiple_of(ALIGNMENT);
        Ok(Endpoints { dst: self.arriving(layout, hop.to, hop.bytes)?, src })
    }

    /// Reserves the next `bytes` bytes of destination memory on a device and returns their address.
    fn arriving(&self, layout: &mut Layout, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        let offset = layout.arrived.entry(device).or_default();
        let address = self.arenas(device, layout.buffer)?.into + *offset;
        *offset += bytes.next_multiple_of(ALIGNMENT);
        self.check_room(*offset)?;
        Ok(address)
    }

    fn prepare_many(&self, hop: Hop, count: u32, mechanism: Mechanism, buffer: usize) -> Result<Prepared, BackendError> {
        let step = hop.bytes.next_multiple_of(ALIGNMENT);
        self.check_room(step * u64::from(count))?;
        let (dst, src) = (self.arenas(hop.to, buffer)?.into, self.arenas(hop.from, buffer)?.out);
        let offsets = (0..u64::from(count)).map(|index| index * step);
        let endpoints = offsets.map(|offset| Endpoints { dst: dst + offset, src: src + offset }).collect();
        let pieces = (0..count).map(|transfer| Piece { transfer, offset: 0, bytes: hop.bytes });
        let ops: Vec<DirectOp> = match mechanism {
            Mechanism::Copy => pieces.map(|piece| direct(hop.from, hop.to, mechanism, smallvec![piece])).collect(),
            Mechanism::Batch | Mechanism::Kernel | Mechanism::Thread => vec![direct(hop.from, hop.to, mechanism, pieces.collect())],
        };
        let program = lower(vec![hop.bytes; count as usize], &ops, |_| (), &[]);
        // The engine (execution method) is the one that the planner would choose for these copies.
        let engine = if mechanism == Mechanism::Kernel { Engine::Graph } else { Engine::Stream };
        self.prepared(program, endpoints, Vec::new(), copying_device(hop.from, hop.to), engine)
    }

    fn prepare_paths(&self, direct: &[Hop], staged: &[Pipeline], engine: Engine, buffer: usize) -> Result<Prepared, BackendError> {
        let mut layout = Layout::of(buffer);
        let all: Vec<Hop> = direct.iter().copied().chain(staged.iter().map(|pipeline| pipeline.hop)).collect();
        let endpoints = all.iter().map(|hop| self.place(&mut layout, hop)).collect::<Result<_, _>>()?;
        let mut paths = Vec::with_capacity(staged.len());
        let mut rings = Vec::with_capacity(staged.len());
        for (transfer, &Pipeline { hop, via, chunks }) in (direct.len() as u32..).zip(staged) {
            let chunk_bytes = hop.bytes.div_ceil(u64::from(chunks)).next_multiple_of(ALIGNMENT);
            let slots = SLOTS.min(chunks);
            rings.push(self.arriving(&mut layout, via, chunk_bytes * u64::from(slots))?);
            paths.push(StagedPath {
                pieces: smallvec![Piece { transfer, offset: 0, bytes: hop.bytes }],
                lanes: [copying_device(hop.from, via), copying_device(via, hop.to)],
                ring: Ring { device: via, slot_bytes: chunk_bytes, slots },
            });
        }
        let issuer = all.first().map_or(DeviceId::HOST, |hop| copying_device(hop.from, hop.to));
        let program = lower(all.iter().map(|hop| hop.bytes).collect(), &plain(direct), a_lane_each, &paths);
        self.prepared(program, endpoints, rings, issuer, engine)
    }

    /// Makes one measurement of [`Harness::pass_flags`] and returns its time in seconds. Two streams signal each other in turn, `rounds`
    /// times. `flags` is the address of three 8-byte words that must be 0. The time starts when everything is enqueued.
    fn run_flags(&self, streams: [StreamHandle; 2], flags: u64, rounds: u32) -> Result<f64, BackendError> {
        let [start, there, back] = [flags, flags + 8, flags + 16];
        let (raised, fate) = (|counter| Signal { counter, value: 1 }, StepFate::default());
        let [one, other] = streams;
        self.backend.stream_take_flags(one, &[], &[start], &fate)?;
        for _ in 0..rounds {
            self.backend.stream_raise_signals(one, &[raised(there)])?;
            self.backend.stream_take_flags(other, &[], &[there], &fate)?;
            self.backend.stream_raise_signals(other, &[raised(back)])?;
            self.backend.stream_take_flags(one, &[], &[back], &fate)?;
        }
        let begin = Instant::now();
        self.backend.raise_signal(raised(start))?;
        self.backend.synchronize_stream(one)?;
        Ok(begin.elapsed().as_secs_f64())
    }

    fn check_room(&self, bytes: u64) -> Result<(), BackendError> {
        if bytes <= self.room {
            return Ok(());
        }
        Err(BackendError::NotSupported(format!(
            "internal error: a probe needs {bytes} bytes on one device, but has reserved {}",
            self.room
        )))
    }
}

/// Reservations of memory for the copies of one measurement: the number of bytes that are already reserved on each device.
#[derive(Default)]
struct Layout {
    /// Index of the host buffer that the current repetition uses.
    buffer: usize,
    arrived: BTreeMap<DeviceId, u64>,
    left: BTreeMap<DeviceId, u64>,
}

impl Layout {
    fn of(buffer: usize) -> Layout {
        Layout { buffer, ..Layout::default() }
    }
}

/// Program of a measurement, bound to addresses and ready to run.
struct Prepared {
    program: Arc<Program>,
    endpoints: Arc<[Endpoints]>,
    rings: Arc<[u64]>,
    stream: StreamHandle,
    engine: Engine,
}

fn direct(from: DeviceId, to: DeviceId, mechanism: Mechanism, pieces: SmallVec<[Piece; 1]>) -> DirectOp {
    DirectOp { device: copying_device(from, to), also: Gpus::NONE, mechanism, pieces }
}

/// Returns one plain copy for each hop. The transfer number of a copy is the index of its hop.
fn plain(hops: &[Hop]) -> Vec<DirectOp> {
    let piece = |(transfer, hop): (u32, &Hop)| {
        direct(hop.from, hop.to, Mechanism::Copy, smallvec![Piece { transfer, offset: 0, bytes: hop.bytes }])
    };
    (0..).zip(hops).map(piece).collect()
}

/// Returns a number for the internal stream of a copy: the number of its transfer. So each copy gets a stream to itself.
fn a_lane_each(op: &DirectOp) -> u32 {
    op.pieces[0].transfer
}

impl Harness for TransferHarness<'_> {
    type Error = BackendError;

    fn measure(&mut self, work: &Work<'_>, repetitions: u32) -> Result<Vec<Timing>, BackendError> {
        let repetitions = repetitions.max(1) as usize;
        let buffers = if work.touches_host() { HOST_BUFFERS.min(repetitions) } else { 1 };
        let prepared: Vec<Prepared> = (0..buffers).map(|buffer| self.prepare(work, buffer)).collect::<Result<_, _>>()?;
        for one in &prepared {
            self.run(one)?;
        }
        (0..repetitions).map(|repetition| self.run(&prepared[repetition % buffers])).collect()
    }

    fn pass_flags(&mut self, between: [DeviceId; 2], rounds: u32, repetitions: u32) -> Result<Vec<f64>, BackendError> {
        let [one, other] = between.map(|device| self.streams.get(&device).copied().ok_or(BackendError::InvalidDevice(device.0)));
        let streams = [one?, other?];
        let flags = match self.backend.allocate_shared(DeviceId::HOST, 24) {
            Err(BackendError::NotSupported(_)) => return Ok(Vec::new()),
            flags => flags?,
        };
        // The first run is a warm-up and is not counted.
        let runs: Result<Vec<f64>, BackendError> = (0..=repetitions).map(|_| self.run_flags(streams, flags, rounds)).collect();
        if runs.is_err() {
            // Set all flags, so that waits that are still enqueued in the streams complete even after an error.
            for counter in [flags, flags + 8, flags + 16] {
                let _ = self.backend.raise_signal(Signal { counter, value: 1 });
            }
            let _ = self.backend.synchronize();
        }
        self.backend.free(flags)?;
        match runs {
            Err(BackendError::NotSupported(_)) => Ok(Vec::new()),
            runs => Ok(runs?.split_off(1)),
        }
    }

    /// Checks that copies from `from` to `to` are correct. Fills the destination with inverted bytes of the pattern, copies the pattern
    /// there, copies it back to host memory and compares all bytes. If the copy back to the host loses data, this check reports that the
    /// copy to the device does, because it cannot distinguish the two cases.
    fn check(&mut self, from: DeviceId, to: DeviceId) -> Result<Integrity, BackendError> {
        let host = self.memory.keys().copied().find(|device| device.is_host()).ok_or(BackendError::InvalidDevice(DeviceId::HOST.0))?;
        let bytes = PATTERN.min(self.room / 2);
        // Successive checks use different parts of the pattern, so that bytes of an earlier check are not mistaken for the current ones.
        let place = (self.checks * 4096) % (self.room - bytes);
        self.checks += 1;
        let (source, target) = (self.arenas(from, 0)?.out + place, self.arenas(to, 0)?.into);
        let scratch = self.arenas(host, 0)?.into + self.room / 2;
        self.words(scratch, place / 8, bytes / 8).spoil();
        if to.is_host() {
            self.words(target, place / 8, bytes / 8).spoil();
        } else {
            self.copy(host, to, Endpoints { dst: target, src: scratch }, bytes)?;
        }
        self.copy(from, to, Endpoints { dst: target, src: source }, bytes)?;
        let seen = if to.is_host() {
            target
        } else {
            self.copy(to, host, Endpoints { dst: scratch, src: target }, bytes)?;
            scratch
        };
        let wrong = self.words(seen, place / 8, bytes / 8).wrong_bytes();
        Ok(if wrong == 0 { Integrity::Intact } else { Integrity::Lost { wrong, of: bytes } })
    }

    fn room(&self) -> u64 {
        self.room
    }
}

impl Drop for TransferHarness<'_> {
    fn drop(&mut self) {
        // A run that failed may have left copies in flight. Its error has already been reported.
        let _ = self.backend.synchronize();
        for (_, stream) in std::mem::take(&mut self.streams) {
            if let Err(error) = self.backend.destroy_stream(stream) {
                log::warn!("could not destroy a stream of a probe: {error}");
            }
        }
        self.free();
    }
}
