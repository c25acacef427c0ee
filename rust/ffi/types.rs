//! Types of the C ABI. Layouts and numbers here are fixed for good: add at the end, never reorder, never renumber.

use super::argument::Versioned;
use std::ffi::{c_char, c_int, c_void};

/// The host memory of NUMA domain 0, as a device number. GPUs are numbered from 0, as the backend in use numbers them.
pub const MP_DEVICE_HOST: i32 = -1;

/// In a transfer, in place of a device: the one whose memory the address lies in.
pub const MP_DEVICE_AUTO: i32 = mpgpu_contexts::Transfer::AUTO.0;

/// In the options of a plan, as `relay_gpus`: no GPU.
pub const MP_RELAY_NONE: u64 = 0x8000_0000_0000_0000;

/// In place of a rank, for receiving and probing: messages of any rank. No function returns it.
pub const MP_ANY_RANK: i32 = mpgpu_core::rank::ANY;

/// In place of a rank: the first rank of a communicator that is on another node.
pub const MP_FIRST_ELSEWHERE: i32 = mpgpu_core::rank::elsewhere(0);

/// In place of a window, in the end of a transfer that another rank names: the window is that of the other rank's half, which has
/// the same tag in place of an offset.
pub const MP_BY_TAG: u32 = mpgpu_ranks::NodeEnd::BY_TAG;

/// Metadata of a message at most, bytes.
pub const MP_MESSAGE_METADATA_BYTES: usize = 256;

const _: () = assert!(MP_MESSAGE_METADATA_BYTES == mpgpu_ranks::message::METADATA_BYTES);

/// Outcome of a call. Numbers are never reused or changed.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_status_t {
    /// Done.
    MP_SUCCESS = 0,
    /// A parameter, a field of a struct or an option has a value that is not accepted.
    MP_ERROR_INVALID_ARGUMENT = 1,
    /// A handle is NULL, of another kind, or was destroyed already.
    MP_ERROR_INVALID_HANDLE = 2,
    /// A device number that the context does not have.
    MP_ERROR_INVALID_DEVICE = 3,
    /// An address that is NULL, unknown, on another device, or whose range leaves its allocation.
    MP_ERROR_INVALID_POINTER = 4,
    /// Two transfers of a batch touch the same bytes and at least one of them writes there.
    MP_ERROR_OVERLAP = 5,
    /// No path joins the two devices of a transfer under the options given.
    MP_ERROR_NO_ROUTE = 6,
    /// A device or the host has no memory left.
    MP_ERROR_OUT_OF_MEMORY = 7,
    /// This build or this machine does not have what was asked for.
    MP_ERROR_NOT_SUPPORTED = 8,
    /// No GPU driver was found.
    MP_ERROR_NO_DRIVER = 9,
    /// The GPU driver or the operating system refused; `mp_last_error_info` has its code.
    MP_ERROR_DRIVER = 10,
    /// The topology is unknown, unreadable or not valid.
    MP_ERROR_TOPOLOGY = 11,
    /// A variable of the environment is unknown or has a value that is not accepted.
    MP_ERROR_ENVIRONMENT = 12,
    /// Header and library are of versions that do not go together.
    MP_ERROR_VERSION_MISMATCH = 13,
    /// Bytes arrived wrong. Only looked for with `MPGPU_VERIFY=bytes`.
    MP_ERROR_DATA_CORRUPTION = 14,
    /// A defect of the library. The context stays usable.
    MP_ERROR_INTERNAL = 15,
    /// Another process has ended, or has freed what it shared.
    MP_ERROR_PEER_GONE = 16,
    /// What was waited for has not come in time.
    MP_ERROR_TIMEOUT = 17,
    /// Another rank could not do its part of a call that all ranks make; the text has its reason.
    MP_ERROR_RANK_FAILED = 18,
    /// The allgather of a node has failed.
    MP_ERROR_ALLGATHER = 19,
    /// A message is longer than the buffer that it was to go to. It was not received, and can be, into a larger one.
    MP_ERROR_MESSAGE_TRUNCATED = 20,
    /// The operation was cancelled before it matched, or its messenger was destroyed.
    MP_ERROR_CANCELLED = 21,
    /// There is no room for another operation or message. Nothing was sent or received.
    MP_ERROR_QUEUE_FULL = 22,
}

// Enumerations as C passes them. The header calls each by the name of its enumeration; here they are plain integers, because a caller may
// pass any number, and a Rust enum must not hold any other than its own.

/// An `mp_status_t` from the caller.
pub type mp_status_value = c_int;
/// An `mp_backend_t` from the caller.
pub type mp_backend_value = c_int;
/// An `mp_engine_t` from the caller.
pub type mp_engine_value = c_int;
/// An `mp_switch_t` from the caller.
pub type mp_switch_value = c_int;
/// An `mp_signal_wait_t` from the caller.
pub type mp_signal_wait_value = c_int;
/// An `mp_agent_t` from the caller.
pub type mp_agent_value = c_int;
/// An `mp_collective_t` from the caller.
pub type mp_collective_value = c_int;
/// An `mp_format_t` from the caller.
pub type mp_format_value = c_int;
/// An `mp_log_level_t` from the caller, and to its callback.
pub type mp_log_level_value = c_int;

/// Where bytes move.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_backend_t {
    /// What `MPGPU_BACKEND` says; without it CUDA where there is any, else the host backend.
    MP_BACKEND_AUTO = 0,
    /// Virtual devices on CPU threads. Real bytes, modelled times.
    MP_BACKEND_HOST = 1,
    /// NVIDIA GPUs.
    MP_BACKEND_CUDA = 2,
}

/// How a plan is executed.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_engine_t {
    /// What `MPGPU_ENGINE` says; without it the one that the model finds fastest.
    MP_ENGINE_AUTO = 0,
    /// Copies on internal streams, joined by events.
    MP_ENGINE_STREAM = 1,
    /// Copies and fused kernels as one graph launch.
    MP_ENGINE_GRAPH = 2,
    /// Direct copies in batched calls.
    MP_ENGINE_BATCH = 3,
    /// Direct copies in fused kernels.
    MP_ENGINE_KERNEL = 4,
}

/// A choice that has a default.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_switch_t {
    /// What the environment says, and then the model.
    MP_DEFAULT = 0,
    /// Allowed.
    MP_ON = 1,
    /// Not allowed.
    MP_OFF = 2,
}

/// How streams wait for signals.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_signal_wait_t {
    /// What `MPGPU_SIGNAL_WAIT` says. Without it by operations; steps of node plans in which little is moved, between ranks
    /// that have a GPU each, by one kernel of each rank, and after steps in which ranks were late by operations:
    /// docs/reference/waiting.md.
    MP_SIGNAL_WAIT_DEFAULT = 0,
    /// By an operation of the stream, which takes nothing of the GPU.
    MP_SIGNAL_WAIT_OPERATION = 1,
    /// By a kernel of one warp, which goes on 4 us sooner and occupies the GPU meanwhile: docs/reference/waiting.md has the
    /// conditions. The host backend waits as it always does.
    MP_SIGNAL_WAIT_KERNEL = 2,
}

/// Form of a description.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_format_t {
    /// Lines for people. Their form may change between versions.
    MP_FORMAT_TEXT = 0,
    /// One JSON object.
    MP_FORMAT_JSON = 1,
}

/// How much is logged: a level includes those before it.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_log_level_t {
    /// Nothing.
    MP_LOG_OFF = 0,
    /// What went wrong and no call could report.
    MP_LOG_ERROR = 1,
    /// What is probably not meant: memory left when a context is destroyed.
    MP_LOG_WARN = 2,
    /// Decisions taken once: which backend.
    MP_LOG_INFO = 3,
    /// Rare events: staging memory allocated.
    MP_LOG_DEBUG = 4,
    /// Everything.
    MP_LOG_TRACE = 5,
}

/// What `mp_stream_t` points to. Never looked into.
pub struct CUstream_st {
    _private: [u8; 0],
}
/// What `mp_event_t` points to. Never looked into.
pub struct CUevent_st {
    _private: [u8; 0],
}
/// What `mp_context_t` seems to point to.
pub struct mp_context {
    _private: [u8; 0],
}
/// What `mp_node_t` seems to point to.
pub struct mp_node_s {
    _private: [u8; 0],
}
/// What `mp_plan_t` seems to point to.
pub struct mp_plan_s {
    _private: [u8; 0],
}
/// What `mp_messenger_t` seems to point to.
pub struct mp_messenger_s {
    _private: [u8; 0],
}
/// What `mp_request_t` seems to point to.
pub struct mp_request {
    _private: [u8; 0],
}

/// A stream: work enqueued in it runs in order. The same type as `cudaStream_t`; NULL is the default stream.
pub type mp_stream_t = *mut CUstream_st;
/// An event: a point in a stream that others can wait for. On CUDA a `cudaEvent_t` is accepted as one.
pub type mp_event_t = *mut CUevent_st;
/// A context: a machine, a backend, and all that is kept between calls. A number, not an address: one that was
/// destroyed is recognised.
pub type mp_context_t = *mut mp_context;
/// A plan for a batch of transfers between certain addresses. A number, as `mp_context_t`.
pub type mp_plan_t = *mut mp_plan_s;
/// A node: ranks that plan together. A number, as `mp_context_t`.
pub type mp_node_t = *mut mp_node_s;
/// One rank's end of the messages of a node. A number, as `mp_context_t`.
pub type mp_messenger_t = *mut mp_messenger_s;
/// One execution of a plan, or one send or receive, that can be waited for. A number, as `mp_context_t`.
pub type mp_request_t = *mut mp_request;

/// How to create a context. Initialise with `MP_CONTEXT_OPTIONS_INIT`; a field that is 0 or NULL takes what the
/// environment says, and then the default. docs/reference/environment.md has the variables.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_context_options_t {
    /// `sizeof(mp_context_options_t)`.
    pub size: usize,
    /// Where bytes move.
    pub backend: mp_backend_value,
    /// Name of a preset or path of a topology file, UTF-8; read during the call only.
    pub topology: *const c_char,
    /// Bytes of staging memory on each device that needs some. Plans may use less, not more.
    pub staging_bytes: u64,
    /// Number of plans kept, so that planning the same request again is a look-up.
    pub cache_plans: u64,
    /// How streams wait for signals.
    pub signal_wait: mp_signal_wait_value,
    /// CPU threads that may copy between ordinary and pinned host memory, at most 256; -1 for none.
    pub host_threads: i32,
    /// Number of programs whose graphs are kept, those that were launched last.
    pub cache_graphs: u64,
}

/// How to plan. Initialise with `MP_PLAN_OPTIONS_INIT`; a field that is 0 takes what the environment says, and then the
/// model.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_plan_options_t {
    /// `sizeof(mp_plan_options_t)`.
    pub size: usize,
    /// How the plan is executed.
    pub engine: mp_engine_value,
    /// The most paths that one transfer may use.
    pub max_paths: u32,
    /// Whether a copy between GPUs may pass through host memory. By default it may.
    pub host_path: mp_switch_value,
    /// Bytes of one chunk on paths that stage, 4096 or more. Smaller where the staging bound asks for it.
    pub chunk_bytes: u64,
    /// Transfers with fewer bytes take one path.
    pub min_bytes: u64,
    /// The most staging memory on each device, bytes; not more than the context's.
    pub staging_bytes: u64,
    /// GPUs through which bytes of others may pass: bit `g` is GPU `g`, in plans of a node the `g`-th of all that its ranks
    /// name. `MP_RELAY_NONE` alone is none.
    pub relay_gpus: u64,
    /// Whether executions choose among variants of the plan (all paths, half of what is staged, the plain copies) by how
    /// long they take. By default they do. Plans of a node do not.
    pub adapt: mp_switch_value,
    /// Chunks of each path through another GPU; goes before `chunk_bytes`. More where the staging bound asks for it.
    pub relay_chunks: u32,
    /// The same for paths through host memory.
    pub host_chunks: u32,
}

/// How to probe a machine. Initialise with `MP_PROBE_OPTIONS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_probe_options_t {
    /// `sizeof(mp_probe_options_t)`.
    pub size: usize,
    /// Path of the file to write, UTF-8, read during the call only. NULL: one in the user's cache directory, where
    /// contexts on these GPUs find it, and beside it what was tuned for it.
    pub file: *const c_char,
    /// Whether to write a file. On by default.
    pub keep: mp_switch_value,
    /// Fewer and shorter measurements, for a first look; nothing is tuned. Off by default.
    pub quick: mp_switch_value,
}

/// One copy. On the CUDA and on the host backend alike an address belongs to one device; `dst_device` and `src_device`
/// say which, or `MP_DEVICE_AUTO` has the library look. Memory of a GPU, and host memory from `mp_alloc` of the same
/// context, is known, on CUDA also host memory that CUDA has pinned or registered. Any other host memory is taken at the
/// caller's word and counts as pageable. Much of it is copied by threads of the library through pinned memory, over all
/// links that help, otherwise by the driver. Either way it must stay as it is until the execution has completed, and not
/// until `mp_execute` returns. Memory that is not there, or a file that becomes shorter meanwhile, is an error of the
/// execution.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_transfer_t {
    /// First byte of the destination.
    pub dst: *mut c_void,
    /// The device that it lies on, or `MP_DEVICE_AUTO`.
    pub dst_device: i32,
    /// First byte of the source.
    pub src: *const c_void,
    /// The device that it lies on, or `MP_DEVICE_AUTO`.
    pub src_device: i32,
    /// How many bytes. With 0 nothing is copied, and the addresses may be NULL.
    pub bytes: u64,
}

/// Memory of a rank that transfers of a node's plan may name.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_window_t {
    /// First byte.
    pub memory: *mut c_void,
    /// How many bytes. With 0 the address may be NULL.
    pub bytes: u64,
}

/// A byte in a window of a rank.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_node_end_t {
    /// Whose window it is.
    pub rank: u32,
    /// Which of those that the rank hands in, from 0; or `MP_BY_TAG`.
    pub window: u32,
    /// Bytes from its start; with `MP_BY_TAG` the tag, any number.
    pub offset: u64,
}

/// A copy between windows of two ranks, or of one.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_node_transfer_t {
    /// Where the bytes go.
    pub dst: mp_node_end_t,
    /// Where they come from.
    pub src: mp_node_end_t,
    /// How many bytes.
    pub bytes: u64,
}

/// How to make a node. Initialise with `MP_NODE_OPTIONS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_node_options_t {
    /// `sizeof(mp_node_options_t)`.
    pub size: usize,
    /// The GPUs that this rank works for, as its context numbers them; NULL for those that it sees, which are shared out
    /// evenly where several ranks see them.
    pub devices: *const i32,
    /// How many they are; 0 with NULL.
    pub device_count: usize,
    /// Path of a socket at which the ranks meet where there is no allgather; the same on all ranks, in a folder that they
    /// all may write to. They wait a minute for each other. NULL where an allgather is given.
    pub socket: *const c_char,
    /// Text, or NULL. Where it is not NULL this rank cannot take part, for this reason: the call fails on all ranks, and the
    /// others are told the reason. The context may be NULL then.
    pub failure: *const c_char,
}

/// How to make a messenger. Initialise with `MP_MESSENGER_OPTIONS_INIT`; the same on all ranks.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_messenger_options_t {
    /// `sizeof(mp_messenger_options_t)`.
    pub size: usize,
    /// Operations of a rank that may be under way, 1 to 65,536; each takes 2 KiB of shared memory. 0 for 1,024.
    pub operations: u32,
    /// Messages that may wait for their receives at a rank, 1 to 1,048,576. 0 for 4,096.
    pub messages: u32,
}

/// A message, as its receiver sees it, and where its metadata go. Initialise with `MP_MESSAGE_INFO_INIT`, and set `metadata` and
/// `metadata_capacity` if you want them; calls fill the rest.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_message_info_t {
    /// `sizeof(mp_message_info_t)`.
    pub size: usize,
    /// Its tag.
    pub tag: u64,
    /// Its size, without metadata.
    pub bytes: u64,
    /// The rank that has sent it.
    pub rank: u32,
    /// Bytes of its metadata, whatever the capacity.
    pub metadata_bytes: u32,
    /// The caller's: metadata are copied there, as far as the capacity goes. NULL with a capacity of 0.
    pub metadata: *mut c_void,
    /// Bytes there; `MP_MESSAGE_METADATA_BYTES` is always enough.
    pub metadata_capacity: usize,
}

/// Names a buffer that a rank of the node may fetch: bytes of a fixed size that travel with a message of the program. A plain value
/// that owns nothing.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_message_descriptor_t {
    /// What they mean is the library's own matter.
    pub bytes: [u8; 64],
}

/// A named batch: copies between participants, which are devices of a process or ranks of a node. Nothing is reduced.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_collective_t {
    /// The root sends a block to all.
    MP_BROADCAST = 0,
    /// The root sends a block of its own to each.
    MP_SCATTER = 1,
    /// Each sends a block to the root.
    MP_GATHER = 2,
    /// Each sends a block to all.
    MP_ALL_GATHER = 3,
    /// Each sends a block of its own to each.
    MP_ALL_TO_ALL = 4,
}

/// What one participant of a collective sends another, or itself.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_piece_t {
    /// The participant that sends.
    pub from: u32,
    /// The participant that receives.
    pub to: u32,
    /// Bytes from the start of what the sender sends from.
    pub send_offset: u64,
    /// Bytes from the start of what the receiver receives into.
    pub receive_offset: u64,
    /// How many bytes.
    pub bytes: u64,
}

/// Who moves partitions that are ready.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_agent_t {
    /// Copy engines, in as many partitions as `mp_node_tune_partitions` has found to be best for such transfers, where the
    /// tuning file of rank 0 has them, else as the model expects. With `arrivals` off steps choose by measured times
    /// whether to move each by itself, several together, or all after their producers, or with `stores` to leave them to the
    /// producers, unless `adapt` of the plan's options is off.
    MP_AGENT_AUTO = 0,
    /// Copy engines, over all paths of the plan, each partition by itself. Takes no multiprocessor.
    MP_AGENT_COPY_ENGINE = 1,
    /// The producing kernels themselves: they store their bytes at the destination, to which the trigger points.
    MP_AGENT_PRODUCER = 2,
}

/// How transfers move in partitions. Initialise with `MP_PARTITION_OPTIONS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_partition_options_t {
    /// `sizeof(mp_partition_options_t)`.
    pub size: usize,
    /// Partitions of each transfer, at most 4096; 0 for as many as the model finds best. Partitions of other sizes are
    /// transfers of their own.
    pub count: u32,
    /// Who moves them.
    pub agent: mp_agent_value,
    /// Whether receivers are told of each partition's arrival, before all have come: by default they are. With copy engines
    /// it takes about 2 us for each partition. Other agents always tell.
    pub arrivals: mp_switch_value,
    /// Whether `MP_AGENT_AUTO` may have the producers store: they are kernels that write what is moved to where the trigger
    /// points, nobody expects it in the source, and the stream of `mp_execute` comes after them. By default it may not.
    /// Where a kernel does not reach the destination, and with arrivals, none is asked to.
    pub stores: mp_switch_value,
}

/// What `mp_node_tune_partitions` tries. Initialise with `MP_PARTITION_TUNING_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_partition_tuning_t {
    /// `sizeof(mp_partition_tuning_t)`.
    pub size: usize,
    /// A bit for each agent to try, `1 << MP_AGENT_COPY_ENGINE` and so on; 0 for copy engines.
    /// `MP_AGENT_PRODUCER` only where producers write where the trigger points. `MP_AGENT_AUTO` with `arrivals` off: it stores
    /// where `MP_AGENT_PRODUCER` is among them, and gets 48 steps to learn before it is timed.
    pub agents: u32,
    /// Timed steps of each candidate, at most 1000; 0 for 7.
    pub rounds: u32,
    /// As in `mp_partition_options_t`.
    pub arrivals: mp_switch_value,
    /// Blocks of the producing kernel, where the program tunes with several numbers of them: trials with others are kept
    /// beside these. 0 where it does not.
    pub blocks: u32,
    /// The tuning file in which rank 0 keeps all trials of these transfers, for `mpgpu tune partitions`; it is made where
    /// there is none. NULL for that of MPGPU_TUNING_FILE; where that names none either, nothing is kept.
    pub file: *const c_char,
}

/// What producers and receivers of one transfer need, for `mpgpu::trigger` of mpgpu/trigger.cuh. Initialise with
/// `MP_TRIGGER_INIT`. Addresses are those of host memory that GPUs reach too, but for `destination` and `counters`, which lie
/// on the source's device. They are good until the plan is destroyed.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_trigger_t {
    /// `sizeof(mp_trigger_t)`.
    pub size: usize,
    /// Two words that tell producers of a step, from `mp_plan_arm` to its end: the address at which they write, of the source
    /// or where they store themselves of the destination; and whether they count what is ready, 0 in steps in which all moves
    /// after them, or is stored and nobody told. NULL on a rank that does not send it.
    pub step: *const u64,
    /// Flags that are set to 1 when a partition is ready, one for each. NULL on a rank that does not send it.
    pub ready: *mut u64,
    /// Flags that are all 1 when a partition has arrived, `arrived_flags` for each, one partition after the other. NULL on a
    /// rank that does not receive it, or is not told.
    pub arrived: *const u64,
    /// A counter for each partition, in which its producers count; 0 between steps.
    pub counters: *mut u64,
    /// Bytes of the transfer.
    pub bytes: u64,
    /// Bytes of each partition but the last.
    pub partition_bytes: u64,
    /// How many partitions there are.
    pub partitions: u32,
    /// Flags of each partition that tell of its arrival.
    pub arrived_flags: u32,
}

/// A range of memory for another process of the node: bytes of a fixed size that may travel over MPI or anything else. A
/// plain value that owns nothing; how long it is good for is the exporter's to say.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_memory_handle_t {
    /// What they mean is the library's own matter.
    pub bytes: [u8; 128],
}

/// A signal: a counter of 64 bits in memory of a context, or in imported memory, and a value that it is raised to or
/// waited for. On CUDA that memory is host memory of `mp_alloc_shared`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_signal_t {
    /// Aligned to 8 bytes. It stands at 0 where it is new; set it to another first value before others know of it.
    pub counter: *mut u64,
    /// Reached when the counter is at least this. Counted cyclically, so that a counter may run over.
    pub value: u64,
}

/// What a plan is like. Initialise with `MP_PLAN_INFO_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_plan_info_t {
    /// `sizeof(mp_plan_info_t)`.
    pub size: usize,
    /// Modelled time of one execution, seconds.
    pub predicted_seconds: f64,
    /// Modelled time of the same transfers on one path each, seconds.
    pub direct_seconds: f64,
    /// Bytes of all transfers.
    pub bytes: u64,
    /// Paths of all transfers together.
    pub paths: u32,
    /// Operations of one execution.
    pub operations: u32,
    /// Staging memory in use on the device that needs most, bytes.
    pub staging_bytes: u64,
    /// Measured time of an execution, the median of the last ones of the variant in force, seconds; 0 where none was measured
    /// (`adapt` in the options).
    pub measured_seconds: f64,
    /// The same of the plain copies.
    pub measured_direct_seconds: f64,
}

/// What a context has done since it was created. Initialise with `MP_STATISTICS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_statistics_t {
    /// `sizeof(mp_statistics_t)`.
    pub size: usize,
    /// Calls of `mp_plan` that found the plan of the same request.
    pub plan_cache_hits: u64,
    /// Calls of `mp_plan` that did not.
    pub plan_cache_misses: u64,
    /// Plans dropped from the cache to stay within its bound.
    pub plan_cache_evictions: u64,
    /// Plans in the cache now.
    pub plan_cache_entries: u64,
    /// Executions enqueued.
    pub executions: u64,
    /// Bytes of all transfers of these executions.
    pub bytes: u64,
    /// Of the misses, those that found a plan of the same shape at other addresses.
    pub plan_cache_shape_hits: u64,
    /// Executions that were one graph launch. This and what follows is 0 on a backend without graphs.
    pub graph_launches: u64,
    /// Of these, those whose graph had the addresses already.
    pub graph_hits: u64,
    /// Those that had to instantiate a graph or to give one other addresses.
    pub graph_misses: u64,
    /// Graphs instantiated.
    pub graph_instantiations: u64,
    /// Graphs that were given other addresses instead.
    pub graph_repoints: u64,
    /// Launches that had to come after another one, because all graphs of the plan were at work.
    pub graph_waits: u64,
    /// Plan shapes that have graphs now.
    pub graph_programs: u64,
    /// Instantiated graphs now.
    pub graph_entries: u64,
}

/// What a context holds on one device. Initialise with `MP_DEVICE_STATISTICS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_device_statistics_t {
    /// `sizeof(mp_device_statistics_t)`.
    pub size: usize,
    /// Bytes of staging memory. 0 until a plan stages on this device.
    pub staging_bytes: u64,
    /// Bytes from `mp_alloc` that were not freed.
    pub allocated_bytes: u64,
    /// Streams from `mp_stream_create` that were not destroyed.
    pub streams: u64,
}

/// All that is known about a failure. Initialise with `MP_ERROR_INFO_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_error_info_t {
    /// `sizeof(mp_error_info_t)`.
    pub size: usize,
    /// What the call returned.
    pub status: mp_status_t,
    /// The driver's own code; 0 where no driver was at fault.
    pub driver_code: i64,
    /// Name of the parameter at fault; NULL where none is.
    pub argument: *const c_char,
    /// The same text as `mp_last_error`.
    pub message: *const c_char,
}

/// Receives log records. Called on the thread that logs, which may be any; both texts are valid during the call only.
/// Must not call functions of this library, and must return (no `longjmp`, no exception).
pub type mp_log_callback_t =
    Option<unsafe extern "C" fn(level: mp_log_level_value, target: *const c_char, message: *const c_char, user: *mut c_void)>;

/// Collects `bytes` bytes of every rank of a node at every rank, as `MPI_Allgather` does: `receive` has room for those of all
/// ranks, in their order. Returns 0, or another number when it has failed. Must return (no `longjmp`, no exception).
pub type mp_allgather_t = Option<unsafe extern "C" fn(user: *mut c_void, send: *const c_void, receive: *mut c_void, bytes: usize) -> c_int>;

/// Launches in `stream` what produces one step of a plan in partitions: `triggers` are those of the transfers that this rank
/// has handed in, `count` of them, in their order. Returns 0, or another number when it has failed. May call functions of
/// this library, but none that all ranks call together. Must return (no `longjmp`, no exception).
pub type mp_produce_t =
    Option<unsafe extern "C" fn(user: *mut c_void, triggers: *const mp_trigger_t, count: usize, stream: mp_stream_t) -> c_int>;

/// A function to run on a CPU thread in stream order. Must return (no `longjmp`, no exception).
pub type mp_host_function_t = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// A function to be called when a request has ended, with its outcome. Must return (no `longjmp`, no exception).
pub type mp_request_function_t = Option<unsafe extern "C" fn(user: *mut c_void, status: mp_status_value)>;

/// Makes structs with a size known to the argument checks.
macro_rules! versioned {
    ($($type:ident $init:literal $first:literal;)*) => {$(
        // SAFETY: `size: usize` stands first; the rest are integers, floats, pointers and an enum that has a zero.
        unsafe impl Versioned for $type {
            const NAME: &'static str = stringify!($type);
            const INIT: &'static str = $init;
            const FIRST_SIZE: usize = $first;
        }
    )*};
}

versioned! {
    mp_context_options_t "MP_CONTEXT_OPTIONS_INIT" 40;
    mp_plan_options_t "MP_PLAN_OPTIONS_INIT" 48;
    mp_probe_options_t "MP_PROBE_OPTIONS_INIT" 24;
    mp_node_options_t "MP_NODE_OPTIONS_INIT" 32;
    mp_messenger_options_t "MP_MESSENGER_OPTIONS_INIT" 16;
    mp_message_info_t "MP_MESSAGE_INFO_INIT" 32;
    mp_partition_options_t "MP_PARTITION_OPTIONS_INIT" 24;
    mp_partition_tuning_t "MP_PARTITION_TUNING_INIT" 32;
    mp_trigger_t "MP_TRIGGER_INIT" 64;
    mp_plan_info_t "MP_PLAN_INFO_INIT" 48;
    mp_statistics_t "MP_STATISTICS_INIT" 64;
    mp_device_statistics_t "MP_DEVICE_STATISTICS_INIT" 32;
    mp_error_info_t "MP_ERROR_INFO_INIT" 40;
}
