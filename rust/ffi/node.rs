//! Nodes: groups of ranks that plan together.

use super::argument::{Out, array, text, versioned};
use super::context::find;
use super::guard::{Failure, guard};
use super::partition::partitioning_of;
use super::plan::{self, AnyPlan, plan_options};
use super::table::Table;
use super::types::*;
use mpgpu_contexts::Context;
use mpgpu_contexts::PlanOptions;
use mpgpu_core::topology::DeviceId;
use mpgpu_ranks::{Allgather, Alone, Collective, NodeEnd, NodeGroup, NodeTransfer, Window, meet_at};
use std::ffi::{c_char, c_void};
use std::path::Path;
use std::ptr::null;
use std::sync::Arc;

static NODES: Table<Arc<NodeGroup>> = Table::new(4);

/// Makes every node of a closed context an invalid handle.
pub(super) fn forget_all(context: &Arc<Context>) {
    NODES.purge(|node| Arc::ptr_eq(node.context(), context));
}

pub(super) fn node_of(node: mp_node_t) -> Result<Arc<NodeGroup>, Failure> {
    NODES.with(node.addr(), c"node", Arc::clone)
}

/// Allgather function that the caller has passed, with its `user` pointer.
struct AllgatherCallback {
    function: unsafe extern "C" fn(user: *mut c_void, send: *const c_void, receive: *mut c_void, bytes: usize) -> i32,
    user: *mut c_void,
}

// SAFETY: the header states that it may be called from any thread that calls the library.
unsafe impl Send for AllgatherCallback {}

impl Allgather for AllgatherCallback {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        // SAFETY: the header defines how the function uses these pointers, which are valid for the call.
        let code = unsafe { (self.function)(self.user, send.as_ptr().cast(), receive.as_mut_ptr().cast(), send.len()) };
        if code == 0 { Ok(()) } else { Err(format!("the callback returned {code}")) }
    }
}

/// Creates a node: a group of processes on one machine, each with its own context, that plan together. This process is
/// rank `rank` of `ranks`.
///
/// All ranks call this function together, with the same kind of context. They exchange the list of their GPUs and
/// choose a topology that contains all of them. This works even if each process sees only one GPU
/// (`CUDA_VISIBLE_DEVICES`). Blocks until all ranks have called it. NULL `options` means all defaults. The caller owns
/// `*node` and destroys it with `mp_node_destroy`.
///
/// `allgather` gathers `bytes` bytes of every rank on every rank, in rank order, as `MPI_Allgather` does on a
/// communicator of these ranks. It returns 0 on success and any other number on failure. The library calls it with
/// `user`, during calls that all ranks make together, on the thread that makes them. It must remain usable for as long
/// as the node exists, and must not make such a call on the same node. It may be NULL if there is only one rank, or if
/// `options->socket` is the path of a socket at which the ranks meet. Only processes of one user can meet at a socket.
/// If a file already exists at the path, the call fails, unless a killed job of this user left it.
///
/// The calls that all ranks make together are this one, `mp_node_plan`, `mp_node_tune_partitions`, `mp_node_allgather`
/// and `mp_messenger_create`. All ranks make the same calls on a node in the same order, one at a time. Ranks that are
/// in different calls get `MP_ERROR_RANK_FAILED`. A failure of one rank, including a rejected argument, makes the call
/// fail on all ranks. The failing rank returns its own status. The others return `MP_ERROR_RANK_FAILED` and the reason,
/// except that `MP_ERROR_NOT_SUPPORTED` is returned on every rank. The other ranks cannot be notified if `rank` or
/// `ranks` is out of range, or if the socket is rejected.
///
/// Errors:
/// - `MP_ERROR_NOT_SUPPORTED` if ranks are on other machines, in other containers or of other users, or if no rank
///   knows how the GPUs are connected.
/// - `MP_ERROR_RANK_FAILED`, `MP_ERROR_ALLGATHER`, `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_ARGUMENT`,
///   `MP_ERROR_INVALID_DEVICE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_node_create(
    context: mp_context_t,
    rank: u32,
    ranks: u32,
    allgather: mp_allgather_t,
    user: *mut c_void,
    options: *const mp_node_options_t,
    node: *mut mp_node_t,
) -> mp_status_t {
    guard(|| {
        let zeros = mp_node_options_t { size: 0, devices: null(), device_count: 0, socket: null(), failure: null() };
        let options = if options.is_null() { Ok(zeros) } else { versioned(options, c"options") };
        let socket = options.as_ref().map_or(Ok(None), |options| text(options.socket, c"socket"));
        let ranks_meet: Result<Box<dyn Allgather>, Failure> = match (allgather, &socket) {
            (Some(function), _) => Ok(Box::new(AllgatherCallback { function, user })),
            (None, Ok(Some(path))) => meet_at(Path::new(path), rank, ranks).map_err(Failure::from),
            (None, _) if ranks == 1 => Ok(Box::new(Alone)),
            (None, _) => {
                let message = "allgather is NULL, and options name no socket at which the ranks could meet";
                Err(Failure::argument(mp_status_t::MP_ERROR_INVALID_ARGUMENT, c"allgather", message))
            }
        };
        let handed = options.and_then(|options| {
            if let Some(reason) = text(options.failure, c"failure")? {
                return Err(Failure::invalid(c"failure", reason));
            }
            socket?;
            let devices = array(options.devices, options.device_count, c"devices", c"device_count")?;
            let devices: Vec<DeviceId> = devices.iter().map(|device| DeviceId(*device)).collect();
            Ok((Out::new(node, c"node")?, find(context)?, devices))
        });
        let (out, context, devices) = match handed {
            Ok(handed) => handed,
            Err(failure) => {
                let told = ranks_meet.map(|gather| NodeGroup::refuse_new(rank, ranks, gather, &failure.message));
                log::debug!("the other ranks receive {:?}: {told:?}", failure.message);
                return Err(failure);
            }
        };
        let made = NodeGroup::new(&context, rank, ranks, ranks_meet?, &devices)?;
        let handle = NODES.insert_unless(Arc::new(made), |node| plan::closed(node.context()))?;
        out.write(std::ptr::without_provenance_mut(handle));
        Ok(())
    })
}

/// Parses the arguments of a call that all ranks make. If the arguments are invalid, this rank still takes part in the
/// call, but as a failed rank, so that the other ranks do not wait.
pub(super) fn handed<T>(node: &NodeGroup, call: Collective, parse: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    parse().inspect_err(|failure| {
        let told = node.refuse(call, &failure.message);
        log::debug!("the other ranks receive {:?}: {told:?}", failure.message);
    })
}

/// Joins the current or next collective call of the other ranks as a failed rank. That call then fails on them with
/// `MP_ERROR_RANK_FAILED` and `reason`, which may be NULL.
///
/// Use this if a rank cannot make the call itself, for example because it could not allocate memory. A call that
/// rejects its own arguments notifies the other ranks without this function. Blocks until the other ranks have made
/// their call.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if `reason` is not UTF-8. The other ranks are notified nevertheless.
/// - `MP_ERROR_RANK_FAILED` if the other ranks are in different calls.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_ALLGATHER`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_node_fail(node: mp_node_t, reason: *const c_char) -> mp_status_t {
    guard(|| {
        let node = node_of(node)?;
        let reason = handed(&node, Collective::FAIL, || text(reason, c"reason"))?;
        Ok(node.refuse(Collective::FAIL, reason.unwrap_or("it has failed without giving a reason"))?)
    })
}

/// Gathers `bytes` bytes of every rank on every rank, in rank order, as `MPI_Allgather` does. All ranks call it
/// together. Blocks until they have.
///
/// Programs use it for their own communication between the ranks of a node. It is ordered with the other collective
/// calls of the library, so ranks that are in different calls get an error instead of waiting for each other. `call` is
/// a name of 1 to 46 bytes of UTF-8 that appears in errors. Ranks that pass different names are in different calls.
/// `receive` has room for `bytes` bytes of each rank. `send` and `receive` may be NULL for 0 bytes, which makes the
/// call a barrier.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_ARGUMENT` (also if ranks pass different numbers of bytes),
/// `MP_ERROR_RANK_FAILED`, `MP_ERROR_ALLGATHER`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_node_allgather(
    node: mp_node_t,
    call: *const c_char,
    send: *const c_void,
    receive: *mut c_void,
    bytes: usize,
) -> mp_status_t {
    guard(|| {
        let node = node_of(node)?;
        let call = handed(&node, Collective::NAMELESS, || {
            let name = text(call, c"call")?.ok_or_else(|| Failure::invalid(c"call", "call is NULL"))?;
            Ok(Collective::named(name)?)
        })?;
        let (send, out) = handed(&node, call, || {
            let out = if bytes == 0 { None } else { Some(Out::new(receive.cast::<u8>(), c"receive")?) };
            Ok((array(send.cast::<u8>(), bytes, c"send", c"bytes")?, out))
        })?;
        let all = node.allgather(call, send)?.concat();
        if let Some(out) = out {
            // SAFETY: not null, and the header requires memory for the bytes of all ranks.
            unsafe { out.write_all(&all) }
        }
        Ok(())
    })
}

/// Writes the GPUs that this rank uses, as its context numbers them. These are the GPUs of `options->devices`, or this
/// rank's part of the visible GPUs. If several ranks list the same GPU, the rank with the fewest GPUs so far uses it,
/// the lowest one among equals.
///
/// `*count` receives the number of GPUs. If `devices` is NULL, nothing else is written; otherwise it has room for
/// `capacity` numbers. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_INVALID_ARGUMENT` if `count` is NULL or `capacity` is too small; in the
/// latter case `*count` still receives the number of GPUs, and `devices` is not written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_node_devices(node: mp_node_t, devices: *mut i32, capacity: usize, count: *mut usize) -> mp_status_t {
    guard(|| {
        let count = Out::new(count, c"count")?;
        let own: Vec<i32> = node_of(node)?.own_devices().map(|device| device.0).collect();
        count.write(own.len());
        if devices.is_null() {
            return Ok(());
        }
        if capacity < own.len() {
            return Err(Failure::invalid(c"capacity", format!("capacity is {capacity}, but the rank uses {} GPUs", own.len())));
        }
        // SAFETY: not null, and the header requires memory for `capacity` numbers, which is enough.
        unsafe { std::ptr::copy_nonoverlapping(own.as_ptr(), devices, own.len()) };
        Ok(())
    })
}

/// Writes the first GPU that this rank uses to `*device`. `mp_node_devices` writes all of them. May be called from any
/// thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_INVALID_ARGUMENT` if `device` is NULL, or if the rank uses no GPU
/// because there are more ranks than GPUs or another rank has listed the same GPU; `*device` is then not written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_node_device(node: mp_node_t, device: *mut i32) -> mp_status_t {
    guard(|| {
        let out = Out::new(device, c"device")?;
        out.write(node_of(node)?.device()?.0);
        Ok(())
    })
}

/// Destroys a node. Its plans and messengers stay valid and are destroyed separately, before or after the node
/// (docs/guide/concepts.md, "Ending"). Other ranks need not call it. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_node_destroy(node: mp_node_t) -> mp_status_t {
    guard(|| if NODES.is_inherited(node.addr()) { Ok(()) } else { NODES.remove(node.addr(), c"node").map(drop) })
}

/// Plans all transfers between the ranks of a node in one step.
///
/// All ranks call it together. Each rank passes its windows, which are the memory that transfers may refer to, and
/// transfers that it sends or receives. One of the two ranks passes each transfer. All ranks get the same plan, and
/// each executes its part by `mp_execute`.
///
/// A rank that does not know the position of the bytes in the other rank's memory passes a send or receive descriptor.
/// It contains the rank's own end; the other end consists of the other rank, `MP_BY_TAG` as the window and a tag as the
/// offset. The other rank passes the matching descriptor. Descriptors match as MPI messages do, by source, destination
/// and tag, in the order in which each rank passes them, and must have the same size. A descriptor without a match is
/// an error.
///
/// A window is on a device of the node or in host memory from `mp_alloc_shared`. Only the rank that owns other host
/// memory can move it. Destinations must not overlap each other or a source. `windows` and `transfers` are read during
/// the call only. The memory must stay allocated until this rank has destroyed the plan. `options` must be equal on all
/// ranks; NULL means all defaults. The caller owns `*plan` and destroys it with `mp_plan_destroy`. The plan has its own
/// staging memory.
///
/// `mp_execute` of such a plan enqueues this rank's part of one step. Later work in the stream sees all bytes that this
/// rank receives in the step, and may overwrite the bytes that it sent. Every rank executes every step, even if it
/// sends and receives nothing, because it may relay bytes for others. A rank may be any number of steps ahead: no byte
/// is written before the receiving rank's stream has reached the step. The steps of a plan run in order, regardless of
/// the streams and threads that enqueue them. In a stream that is being captured, the step becomes part of the graph.
///
/// If several plans share a stream, all ranks must enqueue their steps in the same order, or the ranks deadlock.
/// Outside of captures, `mp_execute` detects two ranks that wait for each other because their orders differ (plans
/// without partitions, at most 255 steps apart). It then rejects the step with `MP_ERROR_INVALID_ARGUMENT`, and the
/// plan fails on both ranks with `MP_ERROR_PEER_GONE`.
///
/// With `partitions`, each partition of a transfer moves as soon as its producer marks it ready, while the rest is
/// still being produced; see `mp_plan_arm`. `partitions` must be equal on all ranks. With `MP_PARTITION_OPTIONS_INIT`
/// the model chooses the number of partitions and the agent. NULL moves whole transfers. A single process uses a node
/// of one rank.
///
/// Errors:
/// - The errors of `mp_plan`.
/// - `MP_ERROR_RANK_FAILED` with the reason of the failed rank. `MP_ERROR_NOT_SUPPORTED` is returned on every rank.
/// - `MP_ERROR_ALLGATHER`.
/// - `MP_ERROR_NOT_SUPPORTED` with `MPGPU_VERIFY=bytes`, and for memory that other processes cannot map. With
///   partitions also if a rank would read host memory of another rank, whose producers cannot notify it.
/// - `MP_ERROR_INVALID_ARGUMENT` with partitions, for a count or an agent out of range.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_node_plan(
    node: mp_node_t,
    windows: *const mp_window_t,
    window_count: usize,
    transfers: *const mp_node_transfer_t,
    count: usize,
    partitions: *const mp_partition_options_t,
    options: *const mp_plan_options_t,
    plan: *mut mp_plan_t,
) -> mp_status_t {
    guard(|| {
        let node = node_of(node)?;
        let call = if partitions.is_null() { Collective::PLAN } else { Collective::PLAN_PARTITIONED };
        let (out, (windows, transfers), partitioning, options) = handed(&node, call, || {
            let out = Out::new(plan, c"plan")?;
            let moved = windows_and_transfers(windows, window_count, transfers, count)?;
            let partitioning = if partitions.is_null() { None } else { Some(partitioning_of(&versioned(partitions, c"partitions")?)?) };
            let options = if options.is_null() { PlanOptions::default() } else { plan_options(&versioned(options, c"options")?)? };
            Ok((out, moved, partitioning, options))
        })?;
        let made = AnyPlan::Node(Arc::new(node.plan_partitioned(&windows, &transfers, partitioning, &options)?));
        out.write(plan::insert(node.context().clone(), made)?);
        Ok(())
    })
}

/// Converts the windows and transfers that a rank passes to the types of the engine.
pub(super) fn windows_and_transfers(
    windows: *const mp_window_t,
    window_count: usize,
    transfers: *const mp_node_transfer_t,
    count: usize,
) -> Result<(Vec<Window>, Vec<NodeTransfer>), Failure> {
    let windows: Vec<Window> = array(windows, window_count, c"windows", c"window_count")?
        .iter()
        .map(|window| Window { address: window.memory.addr() as u64, bytes: window.bytes })
        .collect();
    let end = |end: &mp_node_end_t| NodeEnd { rank: end.rank, window: end.window, offset: end.offset };
    let transfers: Vec<NodeTransfer> = array(transfers, count, c"transfers", c"count")?
        .iter()
        .map(|t| NodeTransfer { dst: end(&t.dst), src: end(&t.src), bytes: t.bytes })
        .collect();
    Ok((windows, transfers))
}
