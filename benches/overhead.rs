//! Host-side cost of the calls of a time loop, apart from moving bytes.
//!
//! The host backend finds allocations for the plan-cache hit, as in a program; for `mp_execute` a backend that does nothing stands
//! in, so that what is measured is the engine. Goals on a current server core: a hit 300 ns, an execution 500 ns.
//!
//! `cargo bench --bench overhead`

use criterion::{Criterion, criterion_group, criterion_main};
use mpgpu::backend::host::HostBackend;
use mpgpu::backend::*;
use mpgpu::engine::{Config, Context, PlanOptions, Transfer};
use mpgpu::ffi::*;
use mpgpu::topology::{DeviceId, Machine, load};
use std::any::Any;
use std::hint::black_box;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Does nothing, at once. Memory and streams are those of the host backend.
struct Nothing {
    memory: HostBackend,
    done: Completion,
}

#[derive(Debug)]
struct Done;

impl CompletionState for Done {
    fn is_done(&self) -> Result<bool, BackendError> {
        Ok(true)
    }
    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Backend for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }
    fn allocate(&self, device: DeviceId, bytes: u64) -> Result<u64, BackendError> {
        self.memory.allocate(device, bytes)
    }
    fn free(&self, address: u64) -> Result<(), BackendError> {
        self.memory.free(address)
    }
    fn locate(&self, address: u64) -> Result<Option<Allocation>, BackendError> {
        self.memory.locate(address)
    }
    fn allocated_bytes(&self, device: DeviceId) -> u64 {
        self.memory.allocated_bytes(device)
    }
    fn create_stream(&self, device: DeviceId) -> Result<StreamHandle, BackendError> {
        self.memory.create_stream(device)
    }
    fn destroy_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        self.memory.destroy_stream(stream)
    }
    fn stream_count(&self, device: DeviceId) -> u64 {
        self.memory.stream_count(device)
    }
    fn synchronize_stream(&self, stream: StreamHandle) -> Result<(), BackendError> {
        self.memory.synchronize_stream(stream)
    }
    fn launch_host(&self, stream: StreamHandle, work: Box<dyn FnOnce() + Send>) -> Result<(), BackendError> {
        self.memory.launch_host(stream, work)
    }
    fn create_event(&self) -> Result<EventHandle, BackendError> {
        self.memory.create_event()
    }
    fn destroy_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.memory.destroy_event(event)
    }
    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<(), BackendError> {
        self.memory.record_event(event, stream)
    }
    fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<(), BackendError> {
        self.memory.stream_wait_event(stream, event)
    }
    fn synchronize_event(&self, event: EventHandle) -> Result<(), BackendError> {
        self.memory.synchronize_event(event)
    }
    fn execute(&self, execution: &Execution<'_>) -> Result<Completion, BackendError> {
        black_box(execution);
        Ok(self.done.clone())
    }
    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }
}

fn check(status: mp_status_t) {
    assert_eq!(status, mp_status_t::MP_SUCCESS);
}

/// A plan that is destroyed when it is dropped.
struct Handle(mp_plan_t);

impl Drop for Handle {
    fn drop(&mut self) {
        check(mp_plan_destroy(self.0));
    }
}

/// `mp_plan` for a request that is in the cache, without and with `mp_plan_destroy`.
fn plan_cache_hit(criterion: &mut Criterion) {
    let options = mp_context_options_t {
        size: size_of::<mp_context_options_t>(),
        backend: 0,
        topology: c"beluga".as_ptr(),
        staging_bytes: 0,
        cache_plans: 0,
    };
    let mut context = null_mut();
    // SAFETY: all pointers are valid for the call.
    check(unsafe { mp_context_create_versioned(&options, MP_VERSION, &mut context) });
    for count in [1_usize, 4, 56] {
        let transfers: Vec<mp_transfer_t> = (0..count as i32)
            .map(|i| {
                let (mut dst, mut src) = (null_mut(), null_mut());
                // SAFETY: the outputs are valid for the calls.
                unsafe {
                    check(mp_alloc(context, i % 4, 4096, &mut src));
                    check(mp_alloc(context, (i + 1) % 4, 4096, &mut dst));
                }
                mp_transfer_t { dst, dst_device: (i + 1) % 4, src, src_device: i % 4, bytes: 4096 }
            })
            .collect();
        let mut plan = null_mut();
        // SAFETY: all pointers are valid for the call. This plan stays, so that the cache's is not the last reference to it.
        check(unsafe { mp_plan(context, transfers.as_ptr(), count, null(), &mut plan) });
        let look_up = || {
            let mut plan = null_mut();
            // SAFETY: as above.
            check(unsafe { mp_plan(context, black_box(transfers.as_ptr()), count, null(), &mut plan) });
            Handle(plan)
        };
        criterion.bench_function(&format!("mp_plan, cached, {count} transfers"), |bench| bench.iter_with_large_drop(look_up));
        criterion.bench_function(&format!("the same with mp_plan_destroy, {count} transfers"), |bench| {
            bench.iter(|| drop(black_box(look_up())));
        });
        check(mp_plan_destroy(plan));
    }
    check(mp_context_destroy(context));
}

/// `Plan::execute`, which is `mp_execute` without the look-up of its handle: the C functions know no backend that does nothing.
/// More than a core's own caches hold.
const OTHERS_BYTES: usize = 8 << 20;

fn execute(criterion: &mut Criterion) {
    let machine = Machine::new(load("beluga").expect("a preset")).expect("a valid one");
    let memory = HostBackend::new(machine.gpu_count(), machine.host_count());
    let backend = Nothing { memory, done: Arc::new(Done) };
    let context = Context::with_backend(Arc::new(machine), Arc::new(backend), Config::default()).expect("a context");
    for (what, bytes) in [("direct", 4096), ("staged", 256 << 20)] {
        let (src, dst) =
            (context.allocate(DeviceId::gpu(0), bytes).expect("memory"), context.allocate(DeviceId::gpu(1), bytes).expect("memory"));
        let transfer = Transfer { dst, dst_device: DeviceId::gpu(1), src, src_device: DeviceId::gpu(0), bytes };
        let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
        assert_eq!(plan.staging_bytes() > 0, what == "staged");
        criterion.bench_function(&format!("execute, {what}, backend that does nothing"), |bench| {
            bench.iter(|| black_box(plan.execute(StreamHandle(0)).expect("enqueued")));
        });
        // As in a time loop, where a simulation and the driver have had the caches meanwhile.
        let mut others = vec![0_u8; OTHERS_BYTES];
        criterion.bench_function(&format!("execute, {what}, backend that does nothing, caches cold"), |bench| {
            bench.iter_custom(|times| {
                let mut total = Duration::ZERO;
                for _ in 0..times {
                    others.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(1));
                    let start = Instant::now();
                    black_box(plan.execute(StreamHandle(0)).expect("enqueued"));
                    total += start.elapsed();
                }
                total
            });
        });
    }
}

criterion_group! {
    name = overhead;
    config = Criterion::default().sample_size(50);
    targets = plan_cache_hit, execute
}
criterion_main!(overhead);
