//! Emulates narrow links (links of low bandwidth) between GPUs, for the case `d2d_narrow`.
//!
//! Behind an NVSwitch, a copy through a relay GPU uses the same port as the direct copy, which already saturates that port. So several
//! paths between GPUs gain nothing there. In this case, every copy between GPUs is made by a kernel of few threads. The rate is then
//! limited by the kernel instead of the port, and four such GPUs behave like four directly connected V100 (measured on H200: 45.6 GB/s over
//! one narrow path). So planner and executors can be measured as on such a machine, but on real GPUs.
//!
//! The library makes its plans for a topology of direct links. The benchmark then changes only the copies between GPUs, which are made by
//! the fused copy kernel with few thread blocks ([`Bench::narrow_blocks`]).

use super::compare::{Comparison, Contestant, Named, Spread, once};
use super::{Bench, Case, Failure};
use mpgpu_backend::{Backend, Completion, Endpoints, Execution, StreamHandle};
use mpgpu_contexts::{Config, Context, Plan, PlanOptions, Transfer};
use mpgpu_core::plan::{Engine, Gpus, Mechanism, Place, Program};
use mpgpu_core::topology::{Costs, DeviceId, Link, LinkKind, Machine, Node, NodeId, NodeKind, Topology};
use mpgpu_devices::cuda::CudaBackend;
use mpgpu_devices::host::HostBackend;
use std::sync::Arc;

/// Rate in bytes/s of one narrow (slow) copy that the topology assumes before this rate is measured.
const ASSUMED: f64 = 45.6e9;
/// Ratio of the rate of the link to host memory to the rate of a link between GPUs: 12 to 47.9 GB/s, as for PCIe 3 x16 and two NVLink 2
/// (the preset `beluga`, the machine of the papers).
const HOST_SHARE: f64 = 12.0 / 47.9;
/// Minimum rate in bytes/s of a link in the topology. The rate that is measured with a copy of a few bytes is very low, because the copy
/// takes only startup time. But a topology accepts only rates of at least 1e3 bytes/s, both for a link and for a quarter of its rate.
const LEAST_RATE: f64 = 1e6;
const GPUS: u32 = 4;

impl Bench<'_> {
    /// Measures one copy over one, two and three paths through GPUs, and over three paths through GPUs with an additional path through host
    /// memory.
    pub fn narrow(&self, case: &'static Case, size: u64) -> Result<Vec<Comparison>, Failure> {
        let machine = Narrow::open(self, ASSUMED)?;
        let buffers = self.buffers(&machine.context, &(case.legs)(GPUS, size))?;
        let rate = machine.rate(&buffers.transfers)?;
        eprintln!("{}: one narrow path moves {:.1} GB/s; the plans assume links of this rate", case.name, rate / 1e9);
        drop(buffers);
        let machine = Narrow::open(self, rate)?;
        let buffers = self.buffers(&machine.context, &(case.legs)(GPUS, size))?;
        let plan = |max_paths, host_path| {
            let options = PlanOptions { max_paths: Some(max_paths), host_path: Some(host_path), min_bytes: Some(1), ..Default::default() };
            machine.context.plan(&buffers.transfers, &options)
        };
        let plans = [
            ("three paths and host memory", plan(4, true)?),
            ("one narrow path", plan(1, false)?),
            ("two paths", plan(2, false)?),
            ("three paths", plan(3, false)?),
        ];
        let mut runs = plans.iter().map(|(_, plan)| machine.run(plan, &buffers.transfers)).collect::<Result<Vec<_>, _>>()?;
        let named = plans.iter().zip(&mut runs).map(|((name, _), run)| (*name, run as &mut dyn Contestant));
        let samples = self.compare(&[&buffers], &mut named.collect::<Vec<Named<'_>>>())?;
        Ok(vec![Comparison::of(case, size, 1, &plans[0].1, samples)])
    }
}

/// Context of an emulated machine of four GPUs with a narrow link between each two of them.
struct Narrow {
    context: Context,
    backend: Arc<dyn Backend>,
    stream: StreamHandle,
}

/// Plan whose copies between GPUs are made by kernels, with its staging memory, ready for execution.
struct Run<'a> {
    machine: &'a Narrow,
    program: Arc<Program>,
    endpoints: Arc<[Endpoints]>,
    rings: Arc<[u64]>,
    under_way: Option<Completion>,
}

impl Narrow {
    /// Opens an emulated machine whose links have this rate in bytes/s. Uses virtual devices if there are no GPUs.
    fn open(bench: &Bench<'_>, rate: f64) -> Result<Narrow, Failure> {
        let machine = Machine::new(topology(rate, bench.context.machine().costs().clone()))?;
        let backend: Arc<dyn Backend> = if bench.on_gpus() {
            let cuda = CudaBackend::new(machine.host_count())?;
            for gpu in 0..GPUS {
                if !cuda.limit_copy_kernel(gpu, bench.narrow_blocks)? {
                    return Err(
                        format!("GPU {gpu} cannot run the fused copy kernel, which limits copies to the rate of a narrow link").into()
                    );
                }
            }
            Arc::new(cuda)
        } else {
            Arc::new(HostBackend::new(machine.gpu_count(), machine.host_count()))
        };
        let context = Context::with_backend(Arc::new(machine), backend.clone(), Config::from_environment()?)?;
        let stream = context.create_stream(DeviceId::gpu(0))?;
        Ok(Narrow { context, backend, stream })
    }

    fn run(&self, plan: &Plan, transfers: &[Transfer]) -> Result<Run<'_>, Failure> {
        let program = Arc::new(narrowed(&plan.planned().program, transfers));
        let endpoints = transfers.iter().map(|t| Endpoints { dst: t.dst, src: t.src }).collect();
        let rings = program.rings.iter().map(|ring| self.context.allocate(ring.device, ring.bytes())).collect::<Result<_, _>>()?;
        Ok(Run { machine: self, program, endpoints, rings, under_way: None })
    }

    /// Returns the median rate of a few copies over one link of the emulated machine, in bytes/s.
    fn rate(&self, transfers: &[Transfer]) -> Result<f64, Failure> {
        const COPIES: usize = 7;
        let plan = self.context.plan(transfers, &PlanOptions { max_paths: Some(1), ..Default::default() })?;
        let mut one = self.run(&plan, transfers)?;
        once(&mut one)?;
        let seconds = (0..COPIES).map(|_| Ok(once(&mut one)?.1)).collect::<Result<Vec<_>, Failure>>()?;
        Ok((plan.bytes() as f64 / Spread::of(&seconds).median.max(1e-9)).max(LEAST_RATE))
    }
}

impl Contestant for Run<'_> {
    fn issue(&mut self) -> Result<(), Failure> {
        let plain = Execution::new(&self.program, &self.endpoints, &self.rings, self.machine.stream);
        self.under_way = self.machine.backend.submit(&Execution { engine: Engine::Stream, ..plain })?;
        Ok(())
    }

    fn wait(&mut self) -> Result<(), Failure> {
        Ok(self.under_way.take().map_or(Ok(()), |completion| completion.wait())?)
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        super::memory::free(&self.machine.context, self.rings.iter().copied());
    }
}

/// Returns a copy of `program` in which the fused copy kernel makes every copy between GPUs.
fn narrowed(program: &Program, transfers: &[Transfer]) -> Program {
    let mut narrowed = program.clone();
    let is_on_gpu = |place: Place| {
        let device = match place {
            Place::Source { transfer, .. } => transfers[transfer as usize].src_device,
            Place::Destination { transfer, .. } => transfers[transfer as usize].dst_device,
            Place::Slot { ring, .. } => program.rings[ring.0 as usize].device,
        };
        !device.is_host()
    };
    // Each kernel must run on the GPU for which it was planned, so the executor must not select another GPU for its internal stream.
    narrowed.lanes.iter_mut().for_each(|lane| lane.also = Gpus::NONE);
    for op in &mut narrowed.ops {
        if op.copies.iter().all(|copy| is_on_gpu(copy.from) && is_on_gpu(copy.to)) {
            op.mechanism = Mechanism::Kernel;
        }
    }
    narrowed
}

/// Returns a topology of four GPUs that are directly connected to each other and to one host memory.
fn topology(rate: f64, costs: Costs) -> Topology {
    let gpu = |index| Node { name: format!("gpu{index}"), kind: NodeKind::Gpu };
    let mut nodes: Vec<Node> = (0..GPUS).map(gpu).collect();
    nodes.push(Node { name: "host0".into(), kind: NodeKind::Host });
    let mut links = Vec::new();
    let mut join = |a: NodeId, b: NodeId, kind, bandwidth| {
        links.push(Link { from: a, to: b, kind, bandwidth, latency: 0.0 });
        links.push(Link { from: b, to: a, kind, bandwidth, latency: 0.0 });
    };
    for a in 0..GPUS {
        (a + 1..GPUS).for_each(|b| join(NodeId(a), NodeId(b), LinkKind::Nvlink, rate));
        join(NodeId(a), NodeId(GPUS), LinkKind::Pcie, rate * HOST_SHARE);
    }
    let description = format!("{GPUS} GPUs, GPU-to-GPU copies limited to {:.1} GB/s by copy kernels of few threads", rate / 1e9);
    Topology { name: "narrow".into(), description, nodes, links, shared: Vec::new(), costs }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hops_between_gpus_become_kernels_and_hops_through_host_memory_stay_copies() {
        let machine = Machine::new(topology(45e9, Costs::default())).expect("well formed");
        let context = Context::with_backend(Arc::new(machine), Arc::new(HostBackend::new(GPUS, 1)), Config::default()).expect("a context");
        let bytes = 256 << 20;
        let [src, dst] = [0, 1].map(|gpu| context.allocate(DeviceId::gpu(gpu), bytes).expect("memory"));
        let transfers = [Transfer { dst, dst_device: DeviceId::gpu(1), src, src_device: DeviceId::gpu(0), bytes }];
        let plan = context.plan(&transfers, &PlanOptions { max_paths: Some(4), ..PlanOptions::default() }).expect("a plan");
        // The plan has three paths through GPUs and one through host memory. The path through host memory carries a fraction of 0.25 of
        // 3.25, minus the cost of its two hops.
        assert_eq!(plan.paths(), 4, "{}", plan.describe());
        let planned = &plan.planned().program;
        let narrowed = narrowed(planned, &transfers);
        let through_host = |op: &mpgpu_core::plan::Op| {
            op.copies.iter().flat_map(|copy| [copy.from, copy.to]).any(|place| match place {
                Place::Slot { ring, .. } => narrowed.rings[ring.0 as usize].device.is_host(),
                _ => false,
            })
        };
        assert!(planned.ops.iter().all(|op| op.mechanism == Mechanism::Copy));
        let (host, between): (Vec<_>, Vec<_>) = narrowed.ops.iter().partition(|op| through_host(op));
        assert!(!host.is_empty() && host.iter().all(|op| op.mechanism == Mechanism::Copy));
        assert!(between.len() > 2 && between.iter().all(|op| op.mechanism == Mechanism::Kernel));
    }
}
