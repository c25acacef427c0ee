//! Nodes: ranks that plan together.

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

/// The caller's allgather.
struct AllgatherCallback {
    function: unsafe extern "C" fn(user: *mut c_void, send: *const c_void, receive: *mut c_void, bytes: usize) -> i32,
    user: *mut c_void,
}

// SAFETY: the header says that it may be called from whichever thread calls the library.
unsafe impl Send for AllgatherCallback {}

impl Allgather for AllgatherCallback {
    fn allgather(&mut self, send: &[u8], receive: &mut [u8]) -> Result<(), String> {
        // SAFETY: the header says what the function does with these pointers, which are valid for the call.
        let code = unsafe { (self.function)(self.user, send.as_ptr().cast(), receive.as_mut_ptr().cast(), send.len()) };
        if code == 0 { Ok(()) } else { Err(format!("the callback returned {code}")) }
    }
}

/// Makes a node of `ranks` ranks, of which this is `rank`: processes of one machine that plan together, each with a
/// context of its own. All ranks call it together, with the same kind of context. They tell each other which GPUs they
/// have, and find a topology that has all of them, also where each process sees one GPU alone (`CUDA_VISIBLE_DEVICES`).
///
/// `allgather` collects `bytes` bytes of every rank at every rank, in the order of ranks, as `MPI_Allgather` does on a
/// communicator of these ranks, and returns 0, or another number when it has failed. It is called with `user` during
/// the calls that all ranks make together, from the thread that makes them, and must be usable for as long as the node exists; it
/// must not make such a call on the same node. It may be NULL where `options->socket` names a path at which the ranks meet, and for
/// one rank alone. `options` NULL means all defaults. `*node` belongs to the caller, who destroys it with `mp_node_destroy`.
///
/// Calls that all ranks make together are this one, `mp_node_plan`, `mp_node_tune_partitions`, `mp_node_allgather` and `mp_messenger_create`. All
/// ranks make the same calls on a node in the same order, one at a time; ranks that are in different calls get
/// `MP_ERROR_RANK_FAILED`. Whatever fails on one rank, arguments that are refused included, fails on all: on the rank
/// itself with its own status, on the others with `MP_ERROR_RANK_FAILED` and its reason, or with `MP_ERROR_NOT_SUPPORTED` where
/// that was it. (Not so where the ranks cannot be reached: for `rank` and `ranks` out of range, and a socket that is refused.)
/// Blocks until all ranks have called it.
///
/// At a socket only processes of one user meet. A file that lies there is refused, unless a killed job of this user has left it.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT`; `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_NOT_SUPPORTED`
/// for ranks on other machines, in other containers or of other users, and where no rank knows how the GPUs are joined;
/// `MP_ERROR_RANK_FAILED`; `MP_ERROR_ALLGATHER`.
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
                log::debug!("the other ranks are told {:?}: {told:?}", failure.message);
                return Err(failure);
            }
        };
        let made = NodeGroup::new(&context, rank, ranks, ranks_meet?, &devices)?;
        let handle = NODES.insert_unless(Arc::new(made), |node| plan::closed(node.context()))?;
        out.write(std::ptr::without_provenance_mut(handle));
        Ok(())
    })
}

/// What a rank hands in to a call of all ranks. Where that is refused here it takes part all the same, as a rank that has failed.
pub(super) fn handed<T>(node: &NodeGroup, call: Collective, parse: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    parse().inspect_err(|failure| {
        let told = node.refuse(call, &failure.message);
        log::debug!("the other ranks are told {:?}: {told:?}", failure.message);
    })
}

/// Takes part in the call on this node in which the other ranks are, or to which they come next, as a rank that has failed:
/// it fails on them with `MP_ERROR_RANK_FAILED` and `reason`, text or NULL. For a rank that cannot make the call, because it
/// could not get its memory, say. What this library refuses of a call is told by the call itself. Blocks until they have come.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` where `reason` is no text, which is told all the same;
/// `MP_ERROR_RANK_FAILED` where the others are in different calls; `MP_ERROR_ALLGATHER`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mp_node_fail(node: mp_node_t, reason: *const c_char) -> mp_status_t {
    guard(|| {
        let node = node_of(node)?;
        let reason = handed(&node, Collective::FAIL, || text(reason, c"reason"))?;
        Ok(node.refuse(Collective::FAIL, reason.unwrap_or("it has failed, and says no more"))?)
    })
}

/// Collects `bytes` bytes of every rank at every rank, in the order of ranks, as `MPI_Allgather` does. For what ranks of a node do
/// together beside this library's calls: it has its place in their order, and ranks that are in different calls get an error in
/// place of waiting for each other. `call` names it in errors, and ranks whose names differ are in different calls: 1 to 46 bytes
/// of UTF-8. `receive` has room for `bytes` bytes of each rank; both may be NULL for 0 bytes, which makes a
/// barrier. All ranks call it together. Blocks until they have.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT`, also where ranks pass different numbers of bytes;
/// `MP_ERROR_RANK_FAILED`; `MP_ERROR_ALLGATHER`.
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
            // SAFETY: not null, and the header demands room for the bytes of all ranks.
            unsafe { out.write_all(&all) }
        }
        Ok(())
    })
}

/// Writes the GPUs that this rank works for, as its context numbers them: those of `options->devices`, else its share of what the
/// ranks see; of ranks that name the same GPU the first works for it. `*count` becomes how many. With `devices` NULL that is all; else it has room for `capacity`. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for `count` NULL, or too little room: then `*count` still has
/// what is needed, and nothing is written to `devices`.
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
            return Err(Failure::invalid(c"capacity", format!("capacity is {capacity}, but the rank works for {} GPUs", own.len())));
        }
        // SAFETY: not null, and the header demands room for `capacity` numbers, which is enough.
        unsafe { std::ptr::copy_nonoverlapping(own.as_ptr(), devices, own.len()) };
        Ok(())
    })
}

/// Destroys a node. Its plans go on, and are destroyed by themselves. Not collective. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn mp_node_destroy(node: mp_node_t) -> mp_status_t {
    guard(|| if NODES.is_inherited(node.addr()) { Ok(()) } else { NODES.remove(node.addr(), c"node").map(drop) })
}

/// Plans what all ranks of the node move in a step, together. All ranks call it together. Each hands in its windows,
/// which is the memory that transfers may name, and the transfers that it sends or receives; each transfer is handed in
/// by one of its two ranks. All ranks hold the same plan, and each executes its part by `mp_execute`.
///
/// A rank that does not know where another keeps its bytes hands in a half: its own end, and of the other end the rank, `MP_BY_TAG` in
/// place of the window and a tag in place of the offset. The other rank does the same. Halves meet as MPI's messages do, by both
/// ranks and the tag, and several of one kind in the order in which each rank hands them in; both have the same bytes. A half that
/// meets none is refused.
///
/// A window lies on a device of the node, or in host memory of `mp_alloc_shared`; other host memory may be moved by its own
/// rank alone. Destinations must not overlap each other or a source. `windows` and `transfers` are read during the call
/// only; the memory must stay allocated until the plan is destroyed here. `options` must be the same on all
/// ranks; NULL means all defaults. `*plan` belongs to the caller, who destroys it with `mp_plan_destroy`. Its
/// staging memory is its own.
///
/// `mp_execute` of such a plan enqueues this rank's part of one step. Later work in the stream sees all bytes that this
/// rank receives in the step, and may overwrite what it sent. Every rank executes every step, also one that has nothing
/// to move: it may relay for others. A rank may be any number of steps ahead: no byte is written before the rank that
/// receives it has come to the step in its stream. Steps follow each other, whatever streams and threads they are
/// enqueued in. A stream that is being captured gets the step as part of its graph.
///
/// All ranks enqueue steps of plans that share a stream in the same order, or they wait for each other for ever. Outside
/// of captures, `mp_execute` finds that two ranks that wait for each other differ (plans without partitions, at most 255
/// steps apart): it refuses the step with `MP_ERROR_INVALID_ARGUMENT`, and the plan ends on both with
/// `MP_ERROR_PEER_GONE`.
///
/// With `partitions` the transfers move in partitions, each as soon as whoever produces it says that it is ready, while the
/// rest is still being produced: `mp_plan_arm` says how. The same on all ranks; `MP_PARTITION_OPTIONS_INIT` leaves numbers and
/// agents to the model. NULL: whole transfers. For one process alone make a node of one rank.
///
/// Errors: as `mp_plan`; `MP_ERROR_RANK_FAILED` with the reason of the rank that has failed (`MP_ERROR_NOT_SUPPORTED` is the status of all); `MP_ERROR_ALLGATHER`;
/// `MP_ERROR_NOT_SUPPORTED` with `MPGPU_VERIFY=bytes`, and for memory that other processes cannot map. With partitions
/// `MP_ERROR_INVALID_ARGUMENT` for a count or an agent out of range; `MP_ERROR_NOT_SUPPORTED` where a rank would read host
/// memory of another rank, whose producers cannot tell it.
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

/// What a rank hands in.
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
