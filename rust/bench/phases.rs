//! Measures the case `graph_phases`: the time that the calling thread needs to create, instantiate, launch and update a CUDA graph, for
//! several numbers of copy nodes.
//!
//! The graph copies data directly from GPU 0 to GPU 1 and, at the same time, a tenth of the data in chunks through host memory, like a plan
//! with two paths. It is built here, so that it has the requested number of nodes. It is executed alternately in two ways: as a graph that
//! is built and launched by driver calls, and by the library's graph engine. The figures 13 and 14 of the paper on graphs have the same
//! columns.

use super::compare::{Calls, Comparison, Figure, Samples, Spread, once};
use super::driver_graph::{Binding, DriverGraph, raw};
use super::memory::Buffers;
use super::plain::{OnCuda, check};
use super::{Bench, Case, Failure};
use cudarc::driver::sys;
use mpgpu_backend::{Backend, Completion, Endpoints, Execution, PlanState};
use mpgpu_core::plan::{Copy, Engine, Lane, LaneId, Mechanism, Op, OpId, Place, Program, Ring, RingId, validate};
use mpgpu_core::topology::DeviceId;
use mpgpu_devices::cuda::CudaBackend;
use smallvec::smallvec;
use std::cell::RefCell;
use std::sync::Arc;

/// Numbers of chunks that are copied through host memory, one number for each measured program. The programs have 3 to 33 copies (the
/// papers: 2 to 34).
const CHUNKS: [u64; 5] = [1, 2, 4, 8, 16];
/// Number of graphs that are built for each program.
const GRAPHS: usize = 15;
const LAUNCHES: usize = 11;
/// Number of executions of each graph, each at new addresses. It is small enough that the library does not create a second graph.
const REPOINTS: usize = 12;

impl Bench<'_> {
    pub fn graph_phases(&self, case: &'static Case, size: u64) -> Result<Vec<Comparison>, Failure> {
        let phases = CHUNKS.iter().map(|chunks| self.phases(case, size, *chunks)).collect::<Result<Vec<_>, _>>()?;
        Ok(phases.into_iter().flatten().collect())
    }

    /// Measures the first launch, later launches, and launches at new addresses, of graphs whose copies through host memory have this
    /// number of chunks.
    fn phases(&self, case: &'static Case, size: u64, chunks: u64) -> Result<Vec<Comparison>, Failure> {
        let legs = (case.legs)(2, size);
        let buffers = [self.buffers(self.context, &legs)?, self.buffers(self.context, &legs)?];
        let program = dual_path(size, chunks)?;
        let nodes = program.ops.len();
        // The library's graph engine runs on a separate backend, so that the backend's statistics cover only this case.
        let backend = CudaBackend::new(1)?;
        let ring = backend.allocate(DeviceId::HOST, program.rings.iter().map(Ring::bytes).sum())?;
        let rings: Arc<[u64]> = Arc::new([ring]);
        let stream = backend.create_stream(DeviceId::gpu(0))?;
        let ends = |buffers: &Buffers<'_>| -> Arc<[Endpoints]> {
            buffers.transfers.iter().map(|t| Endpoints { dst: t.dst, src: t.src }).collect()
        };
        let ends = [ends(&buffers[0]), ends(&buffers[1])];
        let mut driver = OnCuda::default();
        let contexts = program.lanes.iter().map(|lane| driver.context_of(lane.device)).collect::<Result<Vec<_>, _>>()?;
        driver.enable_access(DeviceId::gpu(0), DeviceId::gpu(1))?;
        driver.context_of(DeviceId::gpu(0))?;

        let mut ours = ["first", "later", "new addresses"].map(Samples::new);
        let mut theirs = ["driver's, made and launched", "driver's launch", "driver's, re-pointed and launched"].map(Samples::new);
        let mut made: [Vec<f64>; 3] = Default::default();
        let (mut instantiated_anew, mut repointed) = (0, 0);
        for _ in 0..GRAPHS {
            let at = |place: usize| Binding { program: &program, endpoints: &ends[place], rings: &rings, contexts: &contexts };
            let (graph, seconds) = DriverGraph::build(&at(0))?;
            made.iter_mut().zip(seconds).for_each(|(made, seconds)| made.push(seconds));
            // SAFETY: the stream of the case.
            let synchronize = || check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(raw(stream)) });
            let launch = || Calls(|| graph.launch(stream), synchronize);
            let (issue, total) = once(&mut launch())?;
            let making: f64 = seconds.iter().sum();
            theirs[0].add((making + issue, making + total));
            for _ in 1..LAUNCHES {
                theirs[1].add(once(&mut launch())?);
            }
            self.verify("a graph of the driver's", &mut launch(), &[&buffers[0]])?;
            let (graph, at) = (&graph, &at);
            let repoint = |place| Calls(move || graph.repoint(&at(place)).and_then(|()| graph.launch(stream)), synchronize);
            for turn in 0..REPOINTS - 2 {
                theirs[2].add(once(&mut repoint((turn + 1) % 2))?);
            }
            self.verify("a graph of the driver's at new addresses", &mut repoint(1), &[&buffers[1]])?;

            // The program is copied, so that the library makes a new graph for it.
            let program = Arc::new(program.clone());
            let states = [PlanState::default(), PlanState::default()];
            let under_way: RefCell<Vec<Completion>> = RefCell::default();
            let execute = |place: usize| {
                let plain = Execution::new(&program, &ends[place], &rings, stream);
                let execution = Execution { engine: Engine::Graph, state: Some(&states[place]), ..plain };
                under_way.borrow_mut().extend(backend.submit(&execution)?);
                Ok(())
            };
            let wait = || under_way.take().into_iter().try_for_each(|completion| Ok(completion.wait()?));
            ours[0].add(once(&mut Calls(|| execute(0), wait))?);
            for _ in 1..LAUNCHES {
                ours[1].add(once(&mut Calls(|| execute(0), wait))?);
            }
            let before = backend.graph_statistics();
            for turn in 0..REPOINTS - 2 {
                ours[2].add(once(&mut Calls(|| execute((turn + 1) % 2), wait))?);
            }
            let each = || [1, 0].into_iter().try_for_each(|place| execute(place).and_then(|()| wait()));
            self.verify("a graph at new addresses", &mut Calls(each, wait), &[&buffers[0], &buffers[1]])?;
            let after = backend.graph_statistics();
            instantiated_anew += after.instantiations - before.instantiations;
            repointed += after.repoints - before.repoints;
        }
        backend.destroy_stream(stream)?;
        backend.free(ring)?;

        let median = |samples: &Samples| Spread::of(&samples.issue).median;
        let per_node = |of: &[Samples; 3]| Figure::Seconds((median(&of[2]) - median(&of[1])) / nodes as f64);
        let figures = [
            ["creation", "construction", "instantiation"].into_iter().zip(made.map(|of| Figure::Seconds(Spread::of(&of).median))).collect(),
            Vec::new(),
            vec![
                ("new addresses of a node", per_node(&ours)),
                ("new addresses of a node, by the driver's calls", per_node(&theirs)),
                ("graphs instantiated anew", Figure::Count(instantiated_anew)),
                ("graphs re-pointed", Figure::Count(repointed)),
            ],
        ];
        let rows = ours.into_iter().zip(theirs).zip(figures).map(|((mpgpu, theirs), figures)| Comparison {
            case,
            size,
            copies: nodes,
            bytes: size,
            plan: None,
            mpgpu,
            against: vec![theirs],
            figures,
        });
        Ok(rows.collect())
    }
}

/// Returns a program with one direct copy, and with `chunks` chunks through host memory that hold a tenth of the data. Each chunk has its
/// own staging slot. The program has 1 + 2 · chunks copies.
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
    let program = Program { sources: Vec::new(), transfers: vec![bytes], lanes, rings: vec![ring], ops };
    validate(&program, ring.bytes()).map_err(|violation| format!("the operations of the case are invalid: {violation}"))?;
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
}
