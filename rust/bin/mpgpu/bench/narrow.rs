//! Links held narrow: `d2d_narrow`.
//!
//! Behind an NVSwitch a relay leaves through the port that the direct copy has filled, so several GPU paths gain nothing there. Where
//! every GPU-to-GPU hop is a kernel of few threads, the kernel's rate is the limit and not the port's, and four such GPUs behave
//! like four V100 that are wired to each other (hardware readings, H200: one narrow path 45.6 GB/s). So the whole path from planner to
//! bytes runs as on such a machine, on real GPUs.
//!
//! The plans are the library's, for a topology of direct links. What is changed is how their copies between GPUs run: [`Narrow`] is a
//! backend that has every one of them made by the fused copy kernel, whose launches are held to few thread blocks ([`Bench::narrow_blocks`]).

use super::Failure;
use super::buffers::Buffers;
use super::cases::Case;
use super::contest::{Contestant, Executions, contest, once};
use super::measure::{Bench, Measured};
use mpgpu::backend::cuda::CudaBackend;
use mpgpu::backend::host::HostBackend;
use mpgpu::backend::{Allocation, Backend, BackendError, Completion, EventHandle, Execution, HostFunction, StreamHandle};
use mpgpu::engine::{Context, Plan, PlanOptions};
use mpgpu::plan::{Mechanism, Place, Program};
use mpgpu::topology::{Costs, DeviceId, Link, LinkKind, Machine, Node, NodeId, NodeKind, SharedResource, Topology};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What one narrow copy reaches, until it is measured.
const ASSUMED: f64 = 45.6e9;
/// Host memory as part of a link: 12 of 47.9 GB/s, PCIe 3 x16 beside two NVLink 2 (the preset `beluga`, the papers' machine).
const HOST_SHARE: f64 = 12.0 / 47.9;
/// A copy of a few bytes is all start. A topology has no links, nor quarters of them, below 1e3.
const LEAST_RATE: f64 = 1e6;
const GPUS: u32 = 4;

impl Bench<'_> {
    /// One copy over one, two and three GPU paths and over three with host memory.
    pub fn narrow(&self, case: &'static Case, size: u64) -> Result<Measured, Failure> {
        let on_gpus = self.context.backend().name() == "cuda";
        let costs = self.context.machine().costs();
        let blocks = on_gpus.then_some(self.narrow_blocks);
        let rate = self.narrow_rate(&open(ASSUMED, costs, blocks)?, case, size)?;
        let context = open(rate, costs, blocks)?;
        let buffers = self.buffers(&context, &case.legs(GPUS, size))?;
        let stream = context.create_stream(DeviceId::gpu(0))?;
        let plan = |options: PlanOptions| context.plan(&buffers.transfers, &options);
        let gpu_paths = |paths| plan(PlanOptions { max_paths: Some(paths), host_path: Some(false), min_bytes: Some(1), ..self.options });
        let all = plan(PlanOptions { max_paths: Some(4), host_path: Some(true), min_bytes: Some(1), ..self.options })?;
        let plans = [("one narrow path", gpu_paths(1)?), ("two paths", gpu_paths(2)?), ("three paths", gpu_paths(3)?)];

        let mut mpgpu = Executions::new(&all, vec![stream]);
        let mut fewer: Vec<_> = plans.iter().map(|(name, plan)| (*name, Executions::new(plan, vec![stream]))).collect();
        self.verify("three paths and host memory", &mut mpgpu, &[&buffers])?;
        for (name, executions) in &mut fewer {
            self.verify(name, executions, &[&buffers])?;
        }
        let mut contestants: Vec<&mut dyn Contestant> = vec![&mut mpgpu];
        contestants.extend(fewer.iter_mut().map(|(_, executions)| executions as &mut dyn Contestant));
        let (rounds, times) = contest(&mut contestants, self.repeat)?;
        self.verify("three paths and host memory", &mut mpgpu, &[&buffers])?;
        context.destroy_stream(stream)?;
        let mut times = times.into_iter();
        let mpgpu = times.next().ok_or("nothing was timed")?;
        let plain = plans.iter().map(|(name, _)| (*name).to_owned()).zip(times).collect();
        Ok(Measured { case, size, transfers: 1, bytes: all.bytes(), rounds, plan: all.clone(), mpgpu, plain })
    }

    /// Bytes/s of one narrow copy, the median of a few.
    fn narrow_rate(&self, context: &Context, case: &'static Case, size: u64) -> Result<f64, Failure> {
        const COPIES: usize = 7;
        let buffers: Buffers<'_> = self.buffers(context, &case.legs(GPUS, size))?;
        let stream = context.create_stream(DeviceId::gpu(0))?;
        let options = PlanOptions { max_paths: Some(1), ..self.options };
        let plan: Arc<Plan> = context.plan(&buffers.transfers, &options)?;
        let mut one = Executions::new(&plan, vec![stream]);
        once(&mut one)?;
        let mut seconds = (0..COPIES).map(|_| once(&mut one).map(|(_, total)| total)).collect::<Result<Vec<_>, _>>()?;
        seconds.sort_by(f64::total_cmp);
        context.destroy_stream(stream)?;
        let rate = (size as f64 / seconds[COPIES / 2].max(1e-9)).max(LEAST_RATE);
        eprintln!("{}: one narrow path moves {:.1} GB/s, the rate of the links that are planned for", case.name, rate / 1e9);
        Ok(rate)
    }
}

/// A context on four GPUs of which every two are joined by a link of this rate; virtual devices where no number of blocks is given.
fn open(rate: f64, costs: &Costs, blocks: Option<u32>) -> Result<Context, Failure> {
    let machine = Machine::new(topology(rate, costs.clone()))?;
    let inner: Box<dyn Backend> = if let Some(blocks) = blocks {
        let cuda = CudaBackend::new(machine.host_count())?;
        for gpu in 0..GPUS {
            if !cuda.limit_copy_kernel(gpu, blocks)? {
                return Err(format!("GPU {gpu} does not run the fused copy kernel, so its links cannot be held narrow").into());
            }
        }
        Box::new(cuda)
    } else {
        Box::new(HostBackend::new(machine.gpu_count(), machine.host_count()))
    };
    let backend = Narrow { inner, programs: Mutex::default() };
    Ok(Context::with_backend(Arc::new(machine), Arc::new(backend), mpgpu::engine::Config::from_environment()?)?)
}

/// Four GPUs, wired to each other, before one host memory.
fn topology(rate: f64, costs: Costs) -> Topology {
    let gpu = |index| Node { name: format!("gpu{index}"), kind: NodeKind::Gpu };
    let mut nodes: Vec<Node> = (0..GPUS).map(gpu).collect();
    nodes.push(Node { name: "host0".into(), kind: NodeKind::Host });
    let host = NodeId(GPUS);
    let mut links = Vec::new();
    let mut join = |a: NodeId, b: NodeId, kind, bandwidth| {
        links.push(Link { from: a, to: b, kind, bandwidth, latency: 0.0 });
        links.push(Link { from: b, to: a, kind, bandwidth, latency: 0.0 });
    };
    for a in 0..GPUS {
        (a + 1..GPUS).for_each(|b| join(NodeId(a), NodeId(b), LinkKind::Nvlink, rate));
        join(NodeId(a), host, LinkKind::Pcie, rate * HOST_SHARE);
    }
    let description = format!("{GPUS} GPUs, GPU-to-GPU copies held to {:.1} GB/s by kernels of few threads", rate / 1e9);
    Topology { name: "narrow".into(), description, nodes, links, shared: Vec::<SharedResource>::new(), costs }
}

/// A backend whose copies between GPUs are all made by the fused copy kernel.
struct Narrow {
    inner: Box<dyn Backend>,
    programs: Mutex<HashMap<usize, Replaced>>,
}

/// A program that was executed, and what runs in its place. By the address of the former, which is kept so that no other can have it.
type Replaced = (Arc<Program>, Arc<Program>);

impl Narrow {
    fn narrowed(&self, execution: &Execution<'_>) -> Result<Arc<Program>, BackendError> {
        let key = Arc::as_ptr(execution.program).addr();
        if let Some((_, narrowed)) = self.programs.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(narrowed.clone());
        }
        let mut narrowed = (**execution.program).clone();
        let place = |place: Place| match place {
            Place::Source { transfer, .. } => self.device_of(execution.endpoints[transfer as usize].src),
            Place::Destination { transfer, .. } => self.device_of(execution.endpoints[transfer as usize].dst),
            Place::Slot { ring, .. } => Ok(execution.program.rings[ring.0 as usize].device),
        };
        // Kernels stay on the GPU that they were planned for.
        narrowed.lanes.iter_mut().for_each(|lane| lane.also = None);
        for op in narrowed.ops.iter_mut() {
            let mut between_gpus = true;
            for copy in &op.copies {
                between_gpus &= !place(copy.from)?.is_host() && !place(copy.to)?.is_host();
            }
            if between_gpus {
                op.mechanism = Mechanism::Kernel;
            }
        }
        let narrowed = Arc::new(narrowed);
        let both = (execution.program.clone(), narrowed.clone());
        self.programs.lock().unwrap_or_else(PoisonError::into_inner).insert(key, both);
        Ok(narrowed)
    }

    fn device_of(&self, address: u64) -> Result<DeviceId, BackendError> {
        self.inner.locate(address)?.map(|allocation| allocation.device).ok_or(BackendError::InvalidPointer(address))
    }
}

impl Backend for Narrow {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.inner.allocate(device, bytes)
    }
    fn free(&self, address: u64) -> Result<(), BackendError> {
        self.inner.free(address)
    }
    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        self.inner.locate(address)
    }
    fn allocated_bytes(&self, device: DeviceId) -> u64 {
        self.inner.allocated_bytes(device)
    }
    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError> {
        self.inner.create_stream(device)
    }
    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        self.inner.destroy_stream(stream)
    }
    fn stream_count(&self, device: DeviceId) -> u64 {
        self.inner.stream_count(device)
    }
    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        self.inner.synchronize_stream(stream)
    }
    fn launch_host(&self, stream: StreamHandle, work: HostFunction) -> Result<(), BackendError> {
        self.inner.launch_host(stream, work)
    }
    fn create_event(&self) -> Result<EventHandle, BackendError> {
        self.inner.create_event()
    }
    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.inner.destroy_event(event)
    }
    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        self.inner.record_event(event, stream)
    }
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError> {
        self.inner.stream_wait_event(stream, event)
    }
    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.inner.synchronize_event(event)
    }
    fn execute(&self, execution: &Execution<'_>) -> Result<Completion, BackendError> {
        self.inner.execute(&Execution { program: &self.narrowed(execution)?, ..*execution })
    }
    fn synchronize(&self) -> Result<(), BackendError> {
        self.inner.synchronize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpgpu::engine::{Config, Transfer};

    #[test]
    fn hops_between_gpus_become_kernels_and_hops_through_host_memory_stay_copies() {
        let machine = Machine::new(topology(45e9, Costs::default())).expect("well formed");
        let backend = Narrow { inner: Box::new(HostBackend::new(GPUS, 1)), programs: Mutex::default() };
        let backend = Arc::new(backend);
        let context = Context::with_backend(Arc::new(machine), backend.clone(), Config::default()).expect("a context");
        let bytes = 256 << 20;
        let [src, dst] = [0, 1].map(|gpu| context.allocate(DeviceId::gpu(gpu), bytes).expect("memory"));
        let transfer = Transfer { dst, dst_device: DeviceId::gpu(1), src, src_device: DeviceId::gpu(0), bytes };
        let plan = context.plan(&[transfer], &PlanOptions { max_paths: Some(4), ..PlanOptions::default() }).expect("a plan");
        // Three GPU paths and host memory, which gets its part of a link: 0.25 of 3.25, less what its two hops cost.
        assert_eq!(plan.paths(), 4, "{}", plan.describe());
        plan.execute(StreamHandle(0)).expect("enqueued").wait().expect("done");

        let programs = backend.programs.lock().expect("not poisoned");
        let (planned, narrowed) = programs.values().next().expect("the program");
        let through_host = |program: &Program, op: &mpgpu::plan::Op| {
            op.copies.iter().flat_map(|copy| [copy.from, copy.to]).any(|place| match place {
                Place::Slot { ring, .. } => program.rings[ring.0 as usize].device.is_host(),
                _ => false,
            })
        };
        assert!(planned.ops.iter().all(|op| op.mechanism == Mechanism::Copy));
        let (host, between): (Vec<_>, Vec<_>) = narrowed.ops.iter().partition(|op| through_host(narrowed, op));
        assert!(!host.is_empty() && host.iter().all(|op| op.mechanism == Mechanism::Copy));
        assert!(between.len() > 2 && between.iter().all(|op| op.mechanism == Mechanism::Kernel));
    }
}
