//! Plans.

use super::argument::{Out, TextOut, VersionedOut, array, bad_value, switch, versioned};
use super::context::{describe, find};
use super::guard::{Failure, guard};
use super::request;
use super::table::Table;
use super::types::*;
use mpgpu_backend::{BackendError, StreamHandle};
use mpgpu_contexts::{Context, Error, Plan, PlanOptions, Transfer};
use mpgpu_core::headroom::headroom;
use mpgpu_core::plan::{Engine, Relays};
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::NodePlan;
use smallvec::SmallVec;
use std::ffi::c_char;
use std::sync::Arc;

/// A plan of this process alone, or of all ranks of a node.
#[derive(Clone)]
pub(super) enum AnyPlan {
    Own(Arc<Plan>),
    Node(Arc<NodePlan>),
}

struct PlanEntry {
    context: Arc<Context>,
    plan: AnyPlan,
}

/// A handle for a plan of a context that is still open.
pub(super) fn insert(context: Arc<Context>, plan: AnyPlan) -> Result<mp_plan_t, Failure> {
    let handle = PLANS.insert_unless(PlanEntry { context, plan }, |entry| closed(&entry.context))?;
    Ok(std::ptr::without_provenance_mut(handle))
}

static PLANS: Table<PlanEntry> = Table::new(2);

/// A plan of a node.
pub(super) fn node_plan(plan: mp_plan_t) -> Result<Arc<NodePlan>, Failure> {
    match PLANS.with(plan.addr(), c"plan", |entry| entry.plan.clone())? {
        AnyPlan::Node(plan) => Ok(plan),
        AnyPlan::Own(_) => Err(Failure::invalid(c"plan", "its transfers do not move in partitions: plan them on a node, with partitions")),
    }
}

/// Makes every plan of a closed context an invalid handle.
pub(super) fn forget_all(context: &Arc<Context>) {
    PLANS.purge(|entry| Arc::ptr_eq(&entry.context, context));
}

/// Plans a batch of transfers together, so that they do not compete for links. Blocks for some microseconds; the same
/// request again is a look-up in the context's plan cache. A batch of the same shape is checked and bound to its addresses,
/// and not planned again: as many transfers in the same order, each between the same devices and kinds of memory and of as
/// many bytes. Sources of 1 MiB and more that several transfers have in common belong to the shape too.
///
/// The transfers of a batch run in no particular order: no destination may overlap another destination or any source of
/// the batch. Sources may overlap. `count` 0 gives a plan that does nothing. `transfers` and `options` are read during
/// the call only; `options` NULL means all defaults. The memory must stay allocated for as long as the plan is
/// executed: a plan whose memory was given back with `mp_free` is refused. `*plan` belongs to the caller, who destroys
/// it with `mp_plan_destroy`. Staging memory is allocated here, on devices where it is first needed. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_INVALID_POINTER` (NULL, unknown, on another
/// device, out of its allocation), `MP_ERROR_OVERLAP`, `MP_ERROR_NO_ROUTE`, each naming the transfer by its index;
/// `MP_ERROR_INVALID_ARGUMENT` for an option; `MP_ERROR_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_plan(
    context: mp_context_t,
    transfers: *const mp_transfer_t,
    count: usize,
    options: *const mp_plan_options_t,
    plan: *mut mp_plan_t,
) -> mp_status_t {
    guard(|| {
        let out = Out::new(plan, c"plan")?;
        let context = find(context)?;
        let transfers: SmallVec<[Transfer; 4]> = array(transfers, count, c"transfers", c"count")?
            .iter()
            .map(|t| Transfer {
                dst: t.dst.addr() as u64,
                dst_device: DeviceId(t.dst_device),
                src: t.src.addr() as u64,
                src_device: DeviceId(t.src_device),
                bytes: t.bytes,
            })
            .collect();
        let options = if options.is_null() { PlanOptions::default() } else { plan_options(&versioned(options, c"options")?)? };
        let plan = context.plan(&transfers, &options)?;
        out.write(insert(context, AnyPlan::Own(plan))?);
        Ok(())
    })
}

/// The failure of a call that lost a race against `mp_context_destroy`.
pub(super) fn closed(context: &Context) -> Option<Failure> {
    (!context.is_open()).then(|| Error::ContextDestroyed.into())
}

pub(super) fn plan_options(options: &mp_plan_options_t) -> Result<PlanOptions, Failure> {
    let engine = match options.engine {
        0 => None,
        1 => Some(Engine::Stream),
        2 => Some(Engine::Graph),
        3 => Some(Engine::Batch),
        4 => Some(Engine::Kernel),
        other => return Err(bad_value(c"engine", other, "from 0 (MP_ENGINE_AUTO) to 4 (MP_ENGINE_KERNEL)")),
    };
    let host_path = switch(c"host_path", options.host_path)?;
    let some = |bytes: u64| (bytes > 0).then_some(bytes);
    let count = |count: u32| (count > 0).then_some(count);
    Ok(PlanOptions {
        engine,
        max_paths: count(options.max_paths),
        host_path,
        chunk_bytes: some(options.chunk_bytes),
        relay_chunks: count(options.relay_chunks),
        host_chunks: count(options.host_chunks),
        min_bytes: some(options.min_bytes),
        staging_bytes: some(options.staging_bytes),
        adapt: switch(c"adapt", options.adapt)?,
        relays: some(options.relay_gpus).map(|gpus| (0..Relays::NAMED).filter(|gpu| gpus >> gpu & 1 != 0).collect()),
    })
}

/// Destroys a plan. Executions that are under way still finish. The context may keep the plan in its cache. Any thread.
///
/// Each rank destroys a plan of `mp_node_plan` for itself, after the last execution that it enqueues; the call blocks
/// until these have finished. Ranks that have enqueued more of them get `MP_ERROR_PEER_GONE`; where a rank captures its
/// steps, only if it leaves after a failure. Staging memory that others use goes back when they have destroyed theirs;
/// `mp_context_destroy` waits for that up to five seconds.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; of a node's plan those of its executions: it is destroyed all the same.
#[unsafe(no_mangle)]
pub extern "C" fn mp_plan_destroy(plan: mp_plan_t) -> mp_status_t {
    guard(|| {
        if PLANS.is_inherited(plan.addr()) {
            return Ok(());
        }
        match PLANS.remove(plan.addr(), c"plan")?.plan {
            AnyPlan::Own(_) => Ok(()),
            AnyPlan::Node(plan) => Ok(plan.destroy()?),
        }
    })
}

/// Host memory for the description of a transfer, a path or a path that was rejected, as a tree before it is JSON text.
const DESCRIBED_BYTES: usize = 4096;

/// Describes the plan: paths, shares, chunks, staging, predicted time, and why other paths were left out. The
/// parameters are those of `mp_context_describe`. Any thread.
///
/// Errors: as `mp_context_describe`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_plan_describe(
    plan: mp_plan_t,
    format: mp_format_value,
    text: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> mp_status_t {
    guard(|| {
        let out = TextOut::new(text, capacity, length)?;
        let plan = PLANS.with(plan.addr(), c"plan", |entry| entry.plan.clone())?;
        let (planned, paths) = match &plan {
            AnyPlan::Own(plan) => (plan.planned(), plan.paths()),
            AnyPlan::Node(plan) => (plan.planned(), plan.paths()),
        };
        let rejected = planned.transfers.iter().fold(0, |sum: usize, transfer| sum.saturating_add(transfer.rejected.len()));
        headroom(rejected.saturating_add(planned.transfers.len() + paths), DESCRIBED_BYTES).map_err(BackendError::no_headroom)?;
        let text = match plan {
            AnyPlan::Own(plan) => describe(format, || plan.describe(), || plan.to_json())?,
            AnyPlan::Node(plan) => describe(format, || plan.describe(), || plan.to_json())?,
        };
        out.write(&text)
    })
}

/// Fills `*info` with what the plan is like. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when `info` is NULL or its size is wrong.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_plan_get_info(plan: mp_plan_t, info: *mut mp_plan_info_t) -> mp_status_t {
    guard(|| {
        let out = VersionedOut::new(info, c"info")?;
        let plan = PLANS.with(plan.addr(), c"plan", |entry| entry.plan.clone())?;
        let (planned, measured, bytes, paths, staging_bytes) = match &plan {
            AnyPlan::Own(plan) => (plan.planned(), plan.measured(), plan.bytes(), plan.paths(), plan.staging_bytes()),
            AnyPlan::Node(plan) => (plan.planned(), plan.measured(), plan.bytes(), plan.paths(), plan.staging_bytes()),
        };
        out.write(mp_plan_info_t {
            size: size_of::<mp_plan_info_t>(),
            predicted_seconds: planned.predicted,
            direct_seconds: planned.one_path,
            bytes,
            paths: u32::try_from(paths).unwrap_or(u32::MAX),
            operations: u32::try_from(planned.program.ops.len()).unwrap_or(u32::MAX),
            staging_bytes,
            measured_seconds: measured.in_force.unwrap_or(0.0),
            measured_direct_seconds: measured.plain.unwrap_or(0.0),
        });
        Ok(())
    })
}

/// Makes what the first execution of the plan in `stream` would otherwise make, so that it costs what later ones cost:
/// graphs are instantiated, memory of other processes is mapped, GPUs get access to each other, kernels are loaded,
/// internal streams and events created. Enqueues nothing and moves no byte; no other process takes part.
///
/// For a time loop: call it before the first step, once for each plan and stream. It may take milliseconds, and may wait
/// for work of the GPUs. Graphs are kept of a bounded number of plans, those that were executed last; while `stream` is
/// being captured none is made. Any thread, host functions excepted.
///
/// Errors: those of `mp_execute`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_plan_prepare(plan: mp_plan_t, stream: mp_stream_t) -> mp_status_t {
    guard(|| {
        let plan = PLANS.with(plan.addr(), c"plan", |entry| entry.plan.clone())?;
        match plan {
            AnyPlan::Own(plan) => Ok(plan.prepare(StreamHandle(stream.addr()))?),
            // Its streams and events were made with it.
            AnyPlan::Node(_) => Ok(()),
        }
    })
}

/// Enqueues one execution of the plan in `stream` and returns. It starts after all earlier work in `stream`, and later
/// work in `stream` starts after it. It does not wait for the device, but where the driver does because the queue of
/// `stream` is full (on CUDA about a thousand operations behind one that waits).
///
/// `stream` is one of `mp_stream_create` of the same context, on CUDA any `cudaStream_t`, or NULL for the default
/// stream. `request` may be NULL, which costs least; else `*request` receives a handle for `mp_wait` and `mp_test`,
/// which belongs to the caller. The same plan may be executed any number of times, in several streams and threads at
/// once; executions that share staging memory are put in order by the library, in the order of the calls. Executions in
/// different streams that write the same destination are for the caller to order. Any thread, host functions excepted.
///
/// Errors: `MP_ERROR_INVALID_HANDLE` for plan or stream; `MP_ERROR_INVALID_POINTER` when memory of the plan was freed;
/// `MP_ERROR_INVALID_ARGUMENT` for a plan with partitions that is not armed;
/// `MP_ERROR_INTERNAL` when the program fails its own check (`MPGPU_VERIFY=program`, debug builds): nothing was
/// enqueued then, nor with `MP_ERROR_NOT_SUPPORTED`: for what a captured stream cannot hold, and for a copy between
/// pools or mappings of two GPUs neither of which may enter both.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_execute(plan: mp_plan_t, stream: mp_stream_t, request: *mut mp_request_t) -> mp_status_t {
    guard(|| {
        let out = if request.is_null() { None } else { Some(Out::new(request, c"request")?) };
        let (context, plan) = PLANS.with(plan.addr(), c"plan", |entry| {
            // Only a request needs to know its context.
            (out.is_some().then(|| entry.context.clone()), entry.plan.clone())
        })?;
        let stream = StreamHandle(stream.addr());
        match (out, context) {
            (Some(out), Some(context)) => {
                let done = match plan {
                    AnyPlan::Own(plan) => plan.execute(stream)?,
                    AnyPlan::Node(plan) => plan.execute(stream)?,
                };
                out.write(request::create(context, done)?);
            }
            _ => match plan {
                AnyPlan::Own(plan) => plan.enqueue(stream)?,
                AnyPlan::Node(plan) => plan.enqueue(stream)?,
            },
        }
        Ok(())
    })
}
