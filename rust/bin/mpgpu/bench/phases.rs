//! `graph_phases`: what each step in a CUDA graph's life costs the calling thread, by the number of copy nodes.
//!
//! The program is one direct copy from GPU 0 to GPU 1 and, beside it, a tenth of the bytes in chunks through host memory: the shape of a
//! plan of two paths, made here so that the number of nodes is the one that is asked for. It is built and launched by the driver's
//! calls, and executed by the library's graph engine, by turns. The figures of the papers (13 and 14 of the one on graphs) have the
//! same columns.

use super::Failure;
use super::buffers::Buffers;
use super::cases::Case;
use super::contest::{Contestant, Spread};
use super::driver_graph::{Binding, DriverGraph, raw};
use super::measure::Bench;
use super::plain::{OnCuda, check};
use cudarc::driver::sys;
use mpgpu::backend::cuda::CudaBackend;
use mpgpu::backend::{Backend, Endpoints, Execution, Kept, StreamHandle};
use mpgpu::plan::{Copy, Engine, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId, validate};
use mpgpu::topology::DeviceId;
use smallvec::smallvec;
use std::sync::Arc;
use std::time::Instant;

/// Chunks through host memory: programs of 3 to 33 copies (the papers: 2 to 34).
const CHUNKS: [u64; 5] = [1, 2, 4, 8, 16];
/// Graphs that are built of each program, and launches of each.
const GRAPHS: usize = 15;
const LAUNCHES: usize = 11;
/// Executions at new addresses of each graph: fewer than those after which the library makes a second graph instead.
const REPOINTS: usize = 12;

/// One step.
#[derive(Clone, Debug)]
pub struct Phase {
    pub name: &'static str,
    /// Of the first graph of this size, or the first time; seconds.
    pub first: f64,
    /// Of the later ones.
    pub later: Spread,
}

/// All steps for one number of nodes.
pub struct Phases {
    pub case: &'static Case,
    pub size: u64,
    pub nodes: usize,
    pub graphs: usize,
    pub steps: Vec<Phase>,
    /// What an execution at new addresses costs beyond one at the same, for each copy node; seconds.
    pub repoint_per_node: f64,
    /// The same of the driver's own graph, by the driver's calls alone.
    pub driver_repoint_per_node: f64,
    /// By the library's count: graphs instantiated and re-pointed in executions at new addresses.
    pub instantiated_anew: u64,
    pub repointed: u64,
}

/// Samples of one step: the first graph's, and all others'.
#[derive(Default)]
struct Samples {
    first: Option<f64>,
    later: Vec<f64>,
}

impl Samples {
    fn add(&mut self, seconds: f64) {
        match self.first {
            None => self.first = Some(seconds),
            Some(_) => self.later.push(seconds),
        }
    }

    fn phase(self, name: &'static str) -> Result<Phase, Failure> {
        let first = self.first.filter(|_| !self.later.is_empty()).ok_or("nothing was timed")?;
        Ok(Phase { name, first, later: Spread::of(self.later) })
    }
}

/// Addresses, and what a plan for them keeps.
type Ends = (Arc<[Endpoints]>, Kept);

/// The library's graph engine at work on one program.
struct Engines<'a> {
    backend: &'a CudaBackend,
    stream: StreamHandle,
    program: Arc<Program>,
    rings: Arc<[u64]>,
}

impl Engines<'_> {
    /// Seconds of issuing, and until done.
    fn execute(&self, (endpoints, kept): &Ends) -> Result<(f64, f64), Failure> {
        let execution = Execution {
            program: &self.program,
            endpoints,
            rings: &self.rings,
            stream: self.stream,
            after: &[],
            verify: false,
            engine: Engine::Graph,
        };
        let start = Instant::now();
        let completion = self.backend.execute_kept(&execution, kept)?;
        let issued = start.elapsed();
        completion.wait()?;
        Ok((issued.as_secs_f64(), start.elapsed().as_secs_f64()))
    }
}

/// Executions at each of some addresses, for the check of bytes.
struct AtEach<'a>(&'a Engines<'a>, [&'a Ends; 2]);

impl Contestant for AtEach<'_> {
    fn issue(&mut self) -> Result<(), Failure> {
        self.1.iter().try_for_each(|endpoints| self.0.execute(endpoints).map(drop))
    }
    fn wait(&mut self) -> Result<(), Failure> {
        Ok(())
    }
}

/// One launch of a graph of the driver's, for the check of bytes.
struct Launched<'a>(&'a DriverGraph, StreamHandle);

/// The same graph of the driver's, at new addresses.
struct Repointed<'a>(Launched<'a>, Binding<'a>);

impl Contestant for Repointed<'_> {
    fn issue(&mut self) -> Result<(), Failure> {
        self.0.0.repoint(&self.1)?;
        self.0.issue()
    }
    fn wait(&mut self) -> Result<(), Failure> {
        self.0.wait()
    }
}

impl Contestant for Launched<'_> {
    fn issue(&mut self) -> Result<(), Failure> {
        self.0.launch(self.1)
    }
    fn wait(&mut self) -> Result<(), Failure> {
        // SAFETY: the stream of the case.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(raw(self.1)) })
    }
}

impl Bench<'_> {
    pub fn graph_phases(&self, case: &'static Case, size: u64) -> Result<Vec<Phases>, Failure> {
        CHUNKS.iter().map(|chunks| self.phases(case, size, *chunks)).collect()
    }

    fn phases(&self, case: &'static Case, size: u64, chunks: u64) -> Result<Phases, Failure> {
        let legs = case.legs(2, size);
        let (here, there): (Buffers<'_>, Buffers<'_>) = (self.buffers(self.context, &legs)?, self.buffers(self.context, &legs)?);
        let program = dual_path(size, chunks)?;
        let nodes = program.ops.len();
        // The library's graph engine in a backend of its own, so that its counts are those of this case.
        let backend = CudaBackend::new(1)?;
        let ring = backend.allocate(DeviceId::HOST, program.rings.iter().map(Ring::bytes).sum())?;
        let rings: Arc<[u64]> = Arc::new([ring]);
        let stream = backend.create_stream(DeviceId::gpu(0))?;
        let ends = |buffers: &Buffers<'_>| -> Arc<[Endpoints]> {
            buffers.transfers.iter().map(|t| Endpoints { dst: t.dst, src: t.src }).collect()
        };
        let (here_ends, there_ends) = (ends(&here), ends(&there));
        let mut driver = OnCuda::default();
        let contexts = program.lanes.iter().map(|lane| driver.context_of(lane.device)).collect::<Result<Vec<_>, _>>()?;
        driver.enable_access(DeviceId::gpu(0), DeviceId::gpu(1))?;
        driver.context_of(DeviceId::gpu(0))?;

        let names = [
            "driver: creation",
            "driver: construction",
            "driver: instantiation",
            "driver: first launch",
            "driver: later launch",
            "driver: end to end",
            "driver: new addresses",
            "mpgpu: first execute",
            "mpgpu: later execute",
            "mpgpu: end to end",
            "mpgpu: new addresses",
        ];
        let mut samples: [Samples; 11] = Default::default();
        let (mut instantiated_anew, mut repointed) = (0, 0);
        for _ in 0..GRAPHS {
            let at = |endpoints| Binding { program: &program, endpoints, rings: &rings, contexts: &contexts };
            let (graph, built) = DriverGraph::build(&at(&here_ends))?;
            samples[0].add(built.creation);
            samples[1].add(built.construction);
            samples[2].add(built.instantiation);
            for launch in 0..LAUNCHES {
                let mut launched = Launched(&graph, stream);
                let (issue, total) = super::contest::once(&mut launched)?;
                samples[if launch == 0 { 3 } else { 4 }].add(issue);
                if launch > 0 {
                    samples[5].add(total);
                }
            }
            self.verify("a graph of the driver's", &mut Launched(&graph, stream), &[&here])?;
            for turn in 0..REPOINTS - 2 {
                let ends = if turn % 2 == 0 { &there_ends } else { &here_ends };
                samples[6].add(super::contest::once(&mut Repointed(Launched(&graph, stream), at(ends)))?.0);
            }
            self.verify("a graph of the driver's at new addresses", &mut Repointed(Launched(&graph, stream), at(&there_ends)), &[&there])?;
            drop(graph);

            // A program of its own, so that its graph is a new one.
            let engine = Engines { backend: &backend, stream, program: Arc::new(program.clone()), rings: rings.clone() };
            let here_ends: Ends = (here_ends.clone(), Kept::default());
            let there_ends: Ends = (there_ends.clone(), Kept::default());
            samples[7].add(engine.execute(&here_ends)?.0);
            for _ in 1..LAUNCHES {
                let (issue, total) = engine.execute(&here_ends)?;
                samples[8].add(issue);
                samples[9].add(total);
            }
            let before = backend.graph_statistics();
            for turn in 0..REPOINTS - 2 {
                samples[10].add(engine.execute(if turn % 2 == 0 { &there_ends } else { &here_ends })?.0);
            }
            let both = [&there_ends, &here_ends];
            self.verify("a graph at new addresses", &mut AtEach(&engine, both), &[&here, &there])?;
            let after = backend.graph_statistics();
            instantiated_anew += after.instantiations - before.instantiations;
            repointed += after.repoints - before.repoints;
        }
        let steps = samples.into_iter().zip(names).map(|(samples, name)| samples.phase(name)).collect::<Result<Vec<_>, _>>()?;
        let per_node = |repointed: usize, later: usize| (steps[repointed].later.median - steps[later].later.median) / nodes as f64;
        let (repoint_per_node, driver_repoint_per_node) = (per_node(10, 8), per_node(6, 4));
        backend.destroy_stream(stream)?;
        backend.free(ring)?;
        Ok(Phases { case, size, nodes, graphs: GRAPHS, steps, repoint_per_node, driver_repoint_per_node, instantiated_anew, repointed })
    }
}

/// One direct copy and `chunks` chunks of together a tenth of the bytes through host memory, each with a slot of its own: 1 + 2 · chunks
/// copies.
fn dual_path(bytes: u64, chunks: u64) -> Result<Program, Failure> {
    let chunk = (bytes / 10 / chunks).max(1);
    let direct = bytes.checked_sub(chunk * chunks).filter(|direct| *direct > 0);
    let direct = direct.ok_or_else(|| format!("{bytes} bytes are too few for {chunks} chunks"))?;
    let source = |offset| Place::Source { transfer: 0, offset };
    let destination = |offset| Place::Destination { transfer: 0, offset };
    let op = |lane, from, to, bytes, after: Option<u32>| Op {
        lane: LaneId(lane),
        mechanism: Mechanism::Copy,
        copies: smallvec![Copy { from, to, bytes }],
        after: after.into_iter().map(OpId).collect(),
    };
    let mut ops = vec![op(0, source(0), destination(0), direct, None)];
    for index in 0..chunks {
        let offset = direct + index * chunk;
        let slot = Place::Slot { ring: RingId(0), slot: index as u32 };
        let arrived = ops.len() as u32;
        ops.push(op(1, source(offset), slot, chunk, None));
        ops.push(op(2, slot, destination(offset), chunk, Some(arrived)));
    }
    let lanes = [0, 0, 1].map(|gpu| Lane::new(DeviceId::gpu(gpu))).to_vec();
    let ring = Ring { device: DeviceId::HOST, slot_bytes: chunk, slots: chunks as u32 };
    let program = Program { transfers: vec![bytes], lanes, rings: vec![ring], ops };
    validate(&program, ring.bytes()).map_err(|violation| format!("the program of the case is not right: {violation}"))?;
    Ok(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_of_the_case_are_valid_and_have_the_nodes_that_are_asked_for() {
        for chunks in CHUNKS {
            for bytes in [1000, 64 << 20, (1 << 30) + 7] {
                let program = dual_path(bytes, chunks).expect("valid");
                assert_eq!(program.ops.len() as u64, 1 + 2 * chunks);
            }
        }
        let error = dual_path(16, 16).expect_err("too small").to_string();
        assert!(error.contains("16 bytes"), "{error}");
    }

    #[test]
    fn the_first_sample_stands_apart() {
        let mut samples = Samples::default();
        assert!(Samples::default().phase("none").is_err());
        [9.0, 1.0, 2.0, 3.0].into_iter().for_each(|seconds| samples.add(seconds));
        let phase = samples.phase("some").expect("timed");
        assert_eq!((phase.first, phase.later), (9.0, Spread { median: 2.0, min: 1.0, max: 3.0 }));
    }
}
