//! Functions of the C ABI for plans.

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

/// Plan of a single process, or plan of all ranks of a node.
#[derive(Clone)]
pub(super) enum AnyPlan {
    Own(Arc<Plan>),
    Node(Arc<NodePlan>),
}

struct PlanEntry {
    context: Arc<Context>,
    plan: AnyPlan,
}

/// Creates a handle for a plan and returns it. Fails if the context has been closed.
pub(super) fn insert(context: Arc<Context>, plan: AnyPlan) -> Result<mp_plan_t, Failure> {
    let handle = PLANS.insert_unless(PlanEntry { context, plan }, |entry| closed(&entry.context))?;
    Ok(std::ptr::without_provenance_mut(handle))
}

static PLANS: Table<PlanEntry> = Table::new(2);

/// Returns the node plan to which a handle refers. Fails if the handle refers to a plan of a single process.
pub(super) fn node_plan(plan: mp_plan_t) -> Result<Arc<NodePlan>, Failure> {
    match PLANS.with(plan.addr(), c"plan", |entry| entry.plan.clone())? {
        AnyPlan::Node(plan) => Ok(plan),
        AnyPlan::Own(_) => {
            Err(Failure::invalid(c"plan", "the transfers of the plan do not move in partitions: plan them on a node, with partitions"))
        }
    }
}

/// Makes the handles of all plans of a closed context invalid.
pub(super) fn forget_all(context: &Arc<Context>) {
    PLANS.purge(|entry| Arc::ptr_eq(&entry.context, context));
}

/// Plans a batch of transfers together, so that they do not compete for links. Blocks for some microseconds. May be
/// called from any thread.
///
/// `transfers` has `count` elements. The transfers run in no particular order. No destination may overlap another
/// destination or any source of the batch. Sources may overlap. If `count` is 0, the plan does nothing. NULL `options`
/// selects all defaults. `transfers` and `options` are read during the call only.
///
/// The caller owns `*plan` and destroys it with `mp_plan_destroy`. The memory of the transfers must stay allocated as
/// long as the plan is executed. If memory was freed with `mp_free`, executions are rejected. This call allocates
/// staging buffers on devices that need them and have none yet.
///
/// Plans are cached in the context. Planning the same request again takes only a look-up. If a cached plan has equal
/// transfers apart from the addresses, it is reused with the new addresses. Transfers are equal in this sense if they
/// have the same order, devices, kinds of memory and sizes, and if the same transfers share a source of 1 MiB or more.
///
/// Errors:
/// - `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_OVERLAP`, `MP_ERROR_NO_ROUTE`. The text contains the index of the transfer.
/// - `MP_ERROR_INVALID_POINTER` for an address that is NULL, unknown, on another device, or outside its allocation. The
///   text contains the index of the transfer.
/// - `MP_ERROR_INVALID_ARGUMENT` for an invalid option.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`.
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

/// Returns an error if another thread has closed the context with `mp_context_destroy` during a call.
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

/// Destroys a plan. Executions in progress still finish. The context may keep the plan in its cache. May be called from
/// any thread.
///
/// For a plan from `mp_plan` the call does not block. For a plan from `mp_node_plan`:
/// - Each rank destroys its own handle, after the last execution that it enqueues.
/// - The call blocks until the executions that this rank enqueued have finished.
/// - A rank that has enqueued more executions than this rank gets `MP_ERROR_PEER_GONE`. If this rank has captured its
///   executions in a graph, other ranks get this error only if this rank exits after a failure.
/// - Staging buffers that other ranks use are freed when these ranks have destroyed their handles. `mp_context_destroy`
///   waits up to five seconds for that.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. For a plan from `mp_node_plan` also the errors of its executions; the plan is
/// destroyed even then.
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

/// Estimated size in bytes of the host memory that the JSON tree of one transfer, path or rejected path takes.
const DESCRIBED_BYTES: usize = 4096;

/// Writes a description of the plan: its paths, the share of the data on each path, chunk sizes, staging buffers and
/// predicted time, and why other paths were rejected. The parameters are those of `mp_context_describe`. May be called
/// from any thread.
///
/// Errors: the errors of `mp_context_describe`.
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
        let (items, rejected) = match &plan {
            AnyPlan::Own(plan) => {
                let of_each = plan.planned().transfers.iter().map(|transfer| transfer.rejected.len());
                (plan.planned().transfers.len() + plan.paths(), of_each.fold(0, usize::saturating_add))
            }
            AnyPlan::Node(plan) => (plan.planned().transfers.len() + plan.paths(), plan.most_rejected()),
        };
        headroom(rejected.saturating_add(items), DESCRIBED_BYTES).map_err(BackendError::no_headroom)?;
        let text = match plan {
            AnyPlan::Own(plan) => describe(format, || plan.describe(), || plan.to_json())?,
            AnyPlan::Node(plan) => describe(format, || plan.describe(), || plan.to_json())?,
        };
        out.write(&text)
    })
}

/// Fills `*info` with properties of the plan, for example its predicted time. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `info` is NULL or `info->size` is wrong.
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

/// Performs the one-time setup for executions of the plan in `stream`, so that the first execution takes no longer than
/// later ones. Moves no data and enqueues nothing.
///
/// The setup instantiates graphs, maps memory of other processes, enables access between GPUs, loads kernels, and
/// creates internal streams and events. It may take milliseconds, and may block until work on the GPUs has finished.
/// Other processes need not call it. While `stream` is being captured, no graph is instantiated.
///
/// Call this function before a time loop, once for each plan and stream. The context keeps graphs only for the most
/// recently executed plans (`mp_context_options_t::cache_graphs`). May be called from any thread, but not from a host
/// function.
///
/// Errors: the errors of `mp_execute`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_plan_prepare(plan: mp_plan_t, stream: mp_stream_t) -> mp_status_t {
    guard(|| {
        let plan = PLANS.with(plan.addr(), c"plan", |entry| entry.plan.clone())?;
        match plan {
            AnyPlan::Own(plan) => Ok(plan.prepare(StreamHandle(stream.addr()))?),
            // The streams and events of a node plan were already created with the plan.
            AnyPlan::Node(_) => Ok(()),
        }
    })
}

/// Enqueues one execution of the plan in `stream`. The execution starts after all earlier work in `stream`, and later
/// work in `stream` starts after the execution.
///
/// Does not wait for the device. The driver blocks the call only if the queue of `stream` is full (on CUDA about a
/// thousand operations). May be called from any thread, but not from a host function.
///
/// `stream` is a stream from `mp_stream_create` of the same context, on CUDA any `cudaStream_t`, or NULL for the
/// default stream. If `request` is not NULL, `*request` receives a request for `mp_wait` and `mp_test`, which the
/// caller owns. NULL is cheaper.
///
/// A plan may be executed any number of times, also concurrently in several streams and threads. Executions that share
/// staging buffers run in the order of the calls; the library ensures this. The caller must order executions in
/// different streams that write to the same destination.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE` for the plan or the stream.
/// - `MP_ERROR_INVALID_POINTER` if memory of the plan was freed.
/// - `MP_ERROR_INVALID_ARGUMENT` for a plan with partitions if `mp_plan_arm` was not called before.
/// - `MP_ERROR_INTERNAL` if the plan fails its self-check (`MPGPU_VERIFY=program`, debug builds). Nothing was enqueued.
/// - `MP_ERROR_NOT_SUPPORTED` for operations that cannot be captured while `stream` is being captured. Also for a copy
///   between memory pools or virtual memory mappings of two GPUs if neither GPU can access both. Nothing was enqueued.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_execute(plan: mp_plan_t, stream: mp_stream_t, request: *mut mp_request_t) -> mp_status_t {
    guard(|| {
        let out = if request.is_null() { None } else { Some(Out::new(request, c"request")?) };
        let (context, plan) = PLANS.with(plan.addr(), c"plan", |entry| {
            // The context is needed only if the caller wants a request.
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
