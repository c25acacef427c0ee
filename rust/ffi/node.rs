//! Functions of the C ABI for nodes: groups of processes (ranks) that plan their transfers together.

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

/// Creates a node: a group of processes (ranks) on one machine that plan their copies together. Each process has its
/// own context. This process is rank `rank` of `ranks`.
///
/// All ranks call this function together, with contexts of the same backend. Blocks until all ranks have called it. The
/// ranks exchange their lists of GPUs and choose a topology that contains all of them. This works even if each process
/// sees only one GPU (`CUDA_VISIBLE_DEVICES`). NULL `options` selects all defaults. The caller owns `*node` and
/// destroys it with `mp_node_destroy`.
///
/// GPUs that several ranks see are distributed among these ranks, unless `options->devices` names GPUs. While a node of
/// the context exists, nodes that are created later in the same context distribute only the GPUs that the oldest node
/// has assigned to their ranks. If you need nodes of some of the ranks, for example of a sub-communicator, create the
/// node of all ranks first and keep it. Two nodes then never assign one GPU to different ranks.
///
/// `allgather` gathers data from all ranks on all ranks, like `MPI_Allgather` (see `mp_allgather_t`). The library calls
/// `allgather` with `user`, on the calling thread, during collective calls of this library. The function must remain
/// usable as long as the node exists, and must not make a collective call of this library on the same node. `allgather`
/// may be NULL if there is only one rank or if `options->socket` is set.
///
/// With `options->socket` the ranks connect over a Unix socket instead. All of them must be processes of one user. If a
/// file already exists at the path, the call fails, unless a killed job of this user left the file there.
///
/// Collective calls, which all ranks make together, are this function, `mp_node_plan`, `mp_node_tune_partitions`,
/// `mp_node_allgather` and `mp_messenger_create`:
/// - All ranks make the same collective calls on a node in the same order, one at a time. Ranks that are in different
///   calls get `MP_ERROR_RANK_FAILED`.
/// - If one rank fails, for example because an argument is invalid, the call fails on all ranks. The failing rank
///   returns its own error. The other ranks return `MP_ERROR_RANK_FAILED`, with the reason in the text.
///   `MP_ERROR_NOT_SUPPORTED` is returned on every rank.
/// - Exception: the other ranks cannot be notified if `rank` or `ranks` is out of range, or if the socket is rejected.
///
/// Errors:
/// - `MP_ERROR_NOT_SUPPORTED` if the ranks are on different machines, in different containers or of different users, or
///   if no rank knows how the GPUs are connected.
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
                let message = "allgather is NULL, and the options name no socket through which the ranks can connect";
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
                log::debug!("reporting {:?} to the other ranks: {told:?}", failure.message);
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
        log::debug!("reporting {:?} to the other ranks: {told:?}", failure.message);
    })
}

/// Makes the current or next collective call of the other ranks fail. The collective call returns
/// `MP_ERROR_RANK_FAILED` there, with the error text `reason`, which may be NULL. Blocks until the other ranks have
/// made their call.
///
/// Use this function if this rank cannot make the collective call itself, for example because it could not allocate
/// memory. A collective call that rejects its own arguments already notifies the other ranks.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if `reason` is not UTF-8. The other ranks are notified even then.
/// - `MP_ERROR_RANK_FAILED` if the other ranks are in different calls.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_ALLGATHER`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_node_fail(node: mp_node_t, reason: *const c_char) -> mp_status_t {
    guard(|| {
        let node = node_of(node)?;
        let reason = handed(&node, Collective::FAIL, || text(reason, c"reason"))?;
        Ok(node.refuse(Collective::FAIL, reason.unwrap_or("the rank has failed without giving a reason"))?)
    })
}

/// Gathers `bytes` bytes from every rank of the node on every rank, in rank order, like `MPI_Allgather`. All ranks call
/// it together. Blocks until all ranks have called it.
///
/// `receive` has room for `bytes` bytes of each rank. If `bytes` is 0, `send` and `receive` may be NULL; the call is
/// then a barrier.
///
/// Programs use this function for their own communication between ranks. It is ordered with the other collective calls
/// of the library. Therefore ranks that are in different calls get an error instead of a deadlock. `call` is a name for
/// this call in error texts, 1 to 46 bytes of UTF-8. Ranks that pass different names count as being in different calls.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT`, also if ranks pass different values of `bytes`; `MP_ERROR_INVALID_HANDLE`,
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

/// Lists the GPUs that this rank uses, in the numbering of its context. These are the GPUs of
/// `mp_node_options_t::devices` or, without that list, this rank's share of the visible GPUs. If several ranks list the
/// same GPU, the rank that has the fewest GPUs so far uses it. If several of them have equally few GPUs, the lowest
/// rank uses it.
///
/// `*count` receives the number of GPUs. If `devices` is NULL, only `*count` is written. Otherwise `devices` has room
/// for `capacity` numbers. May be called from any thread.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_INVALID_ARGUMENT` if `count` is NULL or `capacity` is too small. In the latter case `*count` receives
///   the number of GPUs, and `devices` is not written.
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

/// Returns the first GPU that this rank uses in `*device`, in the numbering of its context. `mp_node_devices` returns
/// all of them. May be called from any thread.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_INVALID_ARGUMENT` if `device` is NULL.
/// - `MP_ERROR_INVALID_ARGUMENT` also if the rank uses no GPU, because there are more ranks than GPUs or another rank
///   uses the GPU that both have listed. `*device` is then not written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_node_device(node: mp_node_t, device: *mut i32) -> mp_status_t {
    guard(|| {
        let out = Out::new(device, c"device")?;
        out.write(node_of(node)?.device()?.0);
        Ok(())
    })
}

/// Destroys a node object (group of ranks; see `mp_node_create`). Plans and messengers that were created with the node
/// stay valid, and are destroyed separately, before or after the node (docs/guide/concepts.md, "Ending"). The other
/// ranks need not call this function at the same time. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_node_destroy(node: mp_node_t) -> mp_status_t {
    guard(|| if NODES.is_inherited(node.addr()) { Ok(()) } else { NODES.remove(node.addr(), c"node").map(drop) })
}

/// Plans all copies between the ranks of a node together, so that they do not compete for links. All ranks call it
/// together. Blocks until all ranks have called it.
///
/// Arguments:
/// - `windows` are the memory ranges of this rank from or to which transfers copy. A window is on a device of the node
///   or in host memory. Ranks can access each other's host memory only if it is from `mp_alloc_shared`.
/// - `transfers` are copies that this rank sends or receives. Only one of the two ranks passes each transfer.
///   Destinations must not overlap each other or a source.
/// - `partitions` divides the transfers into partitions. Each partition is copied as soon as its producer marks it
///   ready; see `mp_plan_arm`. `MP_PARTITION_OPTIONS_INIT` lets the library choose their number and the agent
///   (mechanism that moves the partitions). With NULL, each transfer is copied as a whole. `partitions` must be equal
///   on all ranks.
/// - `options` must be equal on all ranks. NULL selects all defaults.
/// - All arrays are read during the call only. The memory of the windows must stay allocated until this rank has
///   destroyed the plan.
/// - The caller owns `*plan` and destroys it with `mp_plan_destroy`. The plan has its own staging buffers.
///
/// Send and receive descriptors: a rank that does not know the position of the data in the other rank's memory passes a
/// transfer in which the other rank's window is `MP_BY_TAG` and the offset is a tag. The other rank passes the matching
/// descriptor. Descriptors match as in MPI: by source, destination and tag, in the order in which each rank passes
/// them. Both must have the same size. A descriptor without a match is an error.
///
/// Execution: `mp_execute` enqueues this rank's part of one step, which is one execution of the plan by all ranks.
/// - Later work in the stream sees all data that this rank receives in the step, and may overwrite the data that it
///   sent.
/// - Every rank executes every step, even if it sends and receives nothing, because it may forward data of other ranks.
/// - A rank may be any number of steps ahead. Data are written only after the receiving rank's stream has reached the
///   step.
/// - The steps of a plan run in order, regardless of the streams and threads that enqueue them.
/// - In a stream that is being captured, the step becomes part of the graph.
/// - A single process can use these plans with a node of one rank.
///
/// Several plans in one stream: all ranks must enqueue the steps of these plans in the same order, otherwise the ranks
/// deadlock. `mp_execute` detects this deadlock if two ranks cause it, the steps are not captured, the plans have no
/// partitions, and the steps that are in the wrong order are at most 255 steps apart. `mp_execute` then fails with
/// `MP_ERROR_INVALID_ARGUMENT`, and the plan fails on both ranks with `MP_ERROR_PEER_GONE`.
///
/// Errors:
/// - The errors of `mp_plan`.
/// - `MP_ERROR_RANK_FAILED` if another rank failed. The text contains its reason.
/// - `MP_ERROR_ALLGATHER`.
/// - `MP_ERROR_NOT_SUPPORTED` with `MPGPU_VERIFY=bytes`, and for memory that other processes cannot map. With
///   partitions also if a rank would read host memory of another rank, because that rank's producers cannot notify it.
///   Returned on every rank.
/// - `MP_ERROR_INVALID_ARGUMENT` if the number of partitions or the agent is out of range.
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
