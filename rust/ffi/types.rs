//! Types of the C ABI. Their layouts and numbers never change: append new items, never reorder or renumber.

use super::argument::Versioned;
use std::ffi::{c_char, c_int, c_void};

/// Device number of the host memory of NUMA domain 0. GPUs are numbered from 0, in the order of the active backend.
pub const MP_DEVICE_HOST: i32 = -1;

/// Device number that stands for the device whose memory the address belongs to. Transfers accept it.
pub const MP_DEVICE_AUTO: i32 = mpgpu_contexts::Transfer::AUTO.0;

/// Value of `mp_plan_options_t::relay_gpus` that forbids relaying through any GPU.
pub const MP_RELAY_NONE: u64 = 0x8000_0000_0000_0000;

/// Rank number that matches messages from any rank. Receives and probes accept it; no function returns it.
pub const MP_ANY_RANK: i32 = mpgpu_core::rank::ANY;

/// Rank number that stands for the first rank of a communicator that is on another node.
pub const MP_FIRST_ELSEWHERE: i32 = mpgpu_core::rank::elsewhere(0);

/// Window index that stands for a window which the other rank names. The other rank's descriptor has the same tag as
/// its offset.
pub const MP_BY_TAG: u32 = mpgpu_ranks::NodeEnd::BY_TAG;

/// Maximum size of a message's metadata, bytes.
pub const MP_MESSAGE_METADATA_BYTES: usize = 256;

const _: () = assert!(MP_MESSAGE_METADATA_BYTES == mpgpu_ranks::message::METADATA_BYTES);

/// Outcome of a call. Numbers are never reused or changed.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_status_t {
    /// The call succeeded.
    MP_SUCCESS = 0,
    /// A parameter, a struct field or an option has an invalid value.
    MP_ERROR_INVALID_ARGUMENT = 1,
    /// A handle is NULL, of another kind, or already destroyed.
    MP_ERROR_INVALID_HANDLE = 2,
    /// The context has no device with this number.
    MP_ERROR_INVALID_DEVICE = 3,
    /// An address is NULL, unknown, on another device, or its range leaves its allocation.
    MP_ERROR_INVALID_POINTER = 4,
    /// Two transfers of a batch overlap and at least one of them writes the common bytes.
    MP_ERROR_OVERLAP = 5,
    /// No path connects the two devices of a transfer under the given options.
    MP_ERROR_NO_ROUTE = 6,
    /// A device or the host has run out of memory.
    MP_ERROR_OUT_OF_MEMORY = 7,
    /// This build or this machine does not support the request.
    MP_ERROR_NOT_SUPPORTED = 8,
    /// No GPU driver was found.
    MP_ERROR_NO_DRIVER = 9,
    /// The GPU driver or the operating system reported an error. `mp_last_error_info` returns its code.
    MP_ERROR_DRIVER = 10,
    /// The topology is unknown, unreadable or invalid.
    MP_ERROR_TOPOLOGY = 11,
    /// An environment variable of mpgpu has an invalid value.
    MP_ERROR_ENVIRONMENT = 12,
    /// The header and the library have incompatible versions.
    MP_ERROR_VERSION_MISMATCH = 13,
    /// Data arrived corrupted. Checked only with `MPGPU_VERIFY=bytes`.
    MP_ERROR_DATA_CORRUPTION = 14,
    /// The library has a defect. The context stays usable.
    MP_ERROR_INTERNAL = 15,
    /// Another process has exited or has freed memory that it shared.
    MP_ERROR_PEER_GONE = 16,
    /// The time limit of a wait has passed.
    MP_ERROR_TIMEOUT = 17,
    /// Another rank failed in a call that all ranks make. The error text contains its reason.
    MP_ERROR_RANK_FAILED = 18,
    /// The allgather function of a node failed.
    MP_ERROR_ALLGATHER = 19,
    /// A message is longer than the receive buffer. It was not received; a larger buffer can still receive it.
    MP_ERROR_MESSAGE_TRUNCATED = 20,
    /// The operation was cancelled before it matched, or its messenger was destroyed.
    MP_ERROR_CANCELLED = 21,
    /// The queue has no room for another operation or message. Nothing was sent or received.
    MP_ERROR_QUEUE_FULL = 22,
}

// Enumerations as C passes them. Rust sees plain integers, because a caller may pass any number and a Rust enum must
// only hold its own values. The header uses the names of the enumerations.

/// `mp_status_t` from the caller.
pub type mp_status_value = c_int;
/// `mp_backend_t` from the caller.
pub type mp_backend_value = c_int;
/// `mp_engine_t` from the caller.
pub type mp_engine_value = c_int;
/// `mp_switch_t` from the caller.
pub type mp_switch_value = c_int;
/// `mp_signal_wait_t` from the caller.
pub type mp_signal_wait_value = c_int;
/// `mp_agent_t` from the caller.
pub type mp_agent_value = c_int;
/// `mp_collective_t` from the caller.
pub type mp_collective_value = c_int;
/// `mp_format_t` from the caller.
pub type mp_format_value = c_int;
/// `mp_log_level_t` from the caller, or passed to its callback.
pub type mp_log_level_value = c_int;

/// Execution backend of a context.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_backend_t {
    /// The value of `MPGPU_BACKEND`. If it is not set: CUDA if a GPU is available, otherwise the host backend.
    MP_BACKEND_AUTO = 0,
    /// Virtual devices on CPU threads. They move real bytes; times are modelled.
    MP_BACKEND_HOST = 1,
    /// NVIDIA GPUs.
    MP_BACKEND_CUDA = 2,
}

/// Mechanism that executes a plan.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_engine_t {
    /// The value of `MPGPU_ENGINE`. If it is not set, the engine that the model predicts to be fastest.
    MP_ENGINE_AUTO = 0,
    /// Copies on internal streams, ordered by events.
    MP_ENGINE_STREAM = 1,
    /// Copies and fused kernels, launched as one graph.
    MP_ENGINE_GRAPH = 2,
    /// Direct copies, in batched driver calls.
    MP_ENGINE_BATCH = 3,
    /// Direct copies, in fused kernels.
    MP_ENGINE_KERNEL = 4,
}

/// Three-valued option: on, off or the default.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_switch_t {
    /// The value from the environment. If the environment has none, the model decides.
    MP_DEFAULT = 0,
    /// Allowed.
    MP_ON = 1,
    /// Forbidden.
    MP_OFF = 2,
}

/// Method by which streams wait for signals.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_signal_wait_t {
    /// The value of `MPGPU_SIGNAL_WAIT`. If it is not set, streams wait by stream operations. Steps of node plans that
    /// move few bytes between ranks with one GPU each wait by one kernel per rank, except for some steps after a rank
    /// was late: docs/reference/waiting.md.
    MP_SIGNAL_WAIT_DEFAULT = 0,
    /// Stream operation, which uses no GPU resources.
    MP_SIGNAL_WAIT_OPERATION = 1,
    /// Kernel of one warp. It continues 4 us sooner and occupies the GPU while it waits; docs/reference/waiting.md
    /// lists the conditions. The host backend ignores this value.
    MP_SIGNAL_WAIT_KERNEL = 2,
}

/// Format of a description.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_format_t {
    /// Lines of text for people. The format may change between versions.
    MP_FORMAT_TEXT = 0,
    /// One JSON object.
    MP_FORMAT_JSON = 1,
}

/// Log level. Each level includes those before it.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_log_level_t {
    /// No records.
    MP_LOG_OFF = 0,
    /// Errors that no call could report.
    MP_LOG_ERROR = 1,
    /// Probable mistakes, for example memory that is still allocated when a context is destroyed.
    MP_LOG_WARN = 2,
    /// Decisions that are taken once, for example the choice of the backend.
    MP_LOG_INFO = 3,
    /// Rare events, for example the allocation of staging memory.
    MP_LOG_DEBUG = 4,
    /// All records.
    MP_LOG_TRACE = 5,
}

/// Opaque target of `mp_stream_t`. Never dereferenced.
pub struct CUstream_st {
    _private: [u8; 0],
}
/// Opaque target of `mp_event_t`. Never dereferenced.
pub struct CUevent_st {
    _private: [u8; 0],
}
/// Opaque target of `mp_context_t`. Does not exist: the handle is a number.
pub struct mp_context {
    _private: [u8; 0],
}
/// Opaque target of `mp_node_t`. Does not exist: the handle is a number.
pub struct mp_node_s {
    _private: [u8; 0],
}
/// Opaque target of `mp_plan_t`. Does not exist: the handle is a number.
pub struct mp_plan_s {
    _private: [u8; 0],
}
/// Opaque target of `mp_messenger_t`. Does not exist: the handle is a number.
pub struct mp_messenger_s {
    _private: [u8; 0],
}
/// Opaque target of `mp_request_t`. Does not exist: the handle is a number.
pub struct mp_request {
    _private: [u8; 0],
}

/// Stream in which enqueued work runs in order. The same type as `cudaStream_t`; NULL is the default stream.
pub type mp_stream_t = *mut CUstream_st;
/// Event: a point in a stream for which other streams can wait. On CUDA a `cudaEvent_t` is accepted too.
pub type mp_event_t = *mut CUevent_st;
/// Context: a machine, a backend, and all state that is kept between calls. The handle is a number, not an address, so
/// the library recognises destroyed contexts.
pub type mp_context_t = *mut mp_context;
/// Plan for a batch of transfers between fixed addresses. The handle is a number, not an address.
pub type mp_plan_t = *mut mp_plan_s;
/// Node: ranks that plan together. The handle is a number, not an address.
pub type mp_node_t = *mut mp_node_s;
/// Endpoint of one rank for the messages of a node. The handle is a number, not an address.
pub type mp_messenger_t = *mut mp_messenger_s;
/// Execution of a plan, or a send or receive, that can be waited for. The handle is a number, not an address.
pub type mp_request_t = *mut mp_request;

/// Options of a new context. Initialise with `MP_CONTEXT_OPTIONS_INIT`. A field that is 0 or NULL takes its value from
/// the environment, or else its default. docs/reference/environment.md lists the variables.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_context_options_t {
    /// `sizeof(mp_context_options_t)`.
    pub size: usize,
    /// Execution backend.
    pub backend: mp_backend_value,
    /// Name of a preset or path of a topology file, UTF-8. Read during the call only.
    pub topology: *const c_char,
    /// Maximum staging memory on each device that needs it, bytes. Plans may use less, not more. Host memory for
    /// threads that copy pageable memory is counted separately, with the same maximum.
    pub staging_bytes: u64,
    /// Maximum number of cached plans. Planning a cached request again is a look-up.
    pub cache_plans: u64,
    /// Method by which streams wait for signals.
    pub signal_wait: mp_signal_wait_value,
    /// Maximum number of CPU threads that copy between pageable and pinned host memory, at most 256. -1 for none.
    pub host_threads: i32,
    /// Maximum number of programs whose graphs are kept. The most recently launched programs stay.
    pub cache_graphs: u64,
}

/// Options of a plan. Initialise with `MP_PLAN_OPTIONS_INIT`. A field that is 0 takes its value from the environment;
/// if the environment has none, the model decides.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_plan_options_t {
    /// `sizeof(mp_plan_options_t)`.
    pub size: usize,
    /// Mechanism that executes the plan.
    pub engine: mp_engine_value,
    /// Maximum number of paths per transfer.
    pub max_paths: u32,
    /// `MP_ON` if a copy between GPUs may pass through host memory, which is the default.
    pub host_path: mp_switch_value,
    /// Bytes of one chunk on staged paths, at least 4096. Chunks are smaller if the staging limit requires it.
    pub chunk_bytes: u64,
    /// Transfers with fewer bytes use one path.
    pub min_bytes: u64,
    /// Maximum staging memory on each device, bytes. At most the context's limit.
    pub staging_bytes: u64,
    /// Bit mask of the GPUs that may relay bytes for others. Bit `g` is GPU `g`. In plans of a node it is the `g`-th
    /// GPU of the node, counted in the order in which the ranks list or see them. `MP_RELAY_NONE` allows none.
    pub relay_gpus: u64,
    /// `MP_ON` if executions choose among variants of the plan by their measured times, which is the default. The
    /// variants are all paths, half of the staged bytes, and plain copies. Plans of a node do not choose.
    pub adapt: mp_switch_value,
    /// Number of chunks of each path through another GPU. Takes precedence over `chunk_bytes`. Larger if the staging
    /// limit requires it.
    pub relay_chunks: u32,
    /// Number of chunks of each path through host memory. Takes precedence over `chunk_bytes`. Larger if the staging
    /// limit requires it.
    pub host_chunks: u32,
}

/// Options of a probe. Initialise with `MP_PROBE_OPTIONS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_probe_options_t {
    /// `sizeof(mp_probe_options_t)`.
    pub size: usize,
    /// Path of the file to write, UTF-8. Read during the call only. NULL selects a file in the user's cache directory,
    /// where contexts on these GPUs find it together with its tuning file.
    pub file: *const c_char,
    /// `MP_ON` if the probe writes a file, which is the default.
    pub keep: mp_switch_value,
    /// `MP_ON` for fewer and shorter measurements without tuning. Off by default.
    pub quick: mp_switch_value,
}

/// One copy.
///
/// On both backends an address belongs to one device. `dst_device` and `src_device` name that device; with
/// `MP_DEVICE_AUTO` the library finds it. The library knows GPU memory, host memory from `mp_alloc` of the same
/// context, and on CUDA host memory that CUDA has pinned or registered. All other host memory is assumed to be valid
/// and counts as pageable.
///
/// Threads of the library copy large pageable buffers through pinned memory, over all links that help; the driver
/// copies small ones. In both cases the memory must stay allocated and unchanged until the execution has completed, not
/// only until `mp_execute` returns. If the memory is not mapped, or a mapped file becomes shorter meanwhile, the
/// execution fails.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_transfer_t {
    /// First byte of the destination.
    pub dst: *mut c_void,
    /// Device of the destination, or `MP_DEVICE_AUTO`.
    pub dst_device: i32,
    /// First byte of the source.
    pub src: *const c_void,
    /// Device of the source, or `MP_DEVICE_AUTO`.
    pub src_device: i32,
    /// Number of bytes. With 0 nothing is copied, and the addresses may be NULL.
    pub bytes: u64,
}

/// Memory of a rank that transfers of a node's plan may refer to.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_window_t {
    /// First byte.
    pub memory: *mut c_void,
    /// Number of bytes. With 0 the address may be NULL.
    pub bytes: u64,
}

/// Position in a window of a rank.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_node_end_t {
    /// Rank that owns the window.
    pub rank: u32,
    /// Index of the window among those that the rank passes, from 0; or `MP_BY_TAG`.
    pub window: u32,
    /// Bytes from the start of the window. With `MP_BY_TAG` the tag, which may be any number.
    pub offset: u64,
}

/// Copy between windows of two ranks, or within one rank.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_node_transfer_t {
    /// Destination.
    pub dst: mp_node_end_t,
    /// Source.
    pub src: mp_node_end_t,
    /// Number of bytes.
    pub bytes: u64,
}

/// Options of a new node. Initialise with `MP_NODE_OPTIONS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_node_options_t {
    /// `sizeof(mp_node_options_t)`.
    pub size: usize,
    /// GPUs that this rank uses, as its context numbers them. NULL for all GPUs visible to the rank; GPUs that are
    /// visible to several ranks are divided evenly.
    pub devices: *const i32,
    /// Number of elements of `devices`. 0 if `devices` is NULL.
    pub device_count: usize,
    /// Path of a socket at which the ranks meet if there is no allgather function. All ranks pass the same path, in a
    /// folder that they may all write to. They wait one minute for each other. NULL if an allgather function is given.
    pub socket: *const c_char,
    /// Reason why this rank cannot join, or NULL. If it is set, the call fails on all ranks, and the other ranks
    /// receive the reason. The context may then be NULL.
    pub failure: *const c_char,
}

/// Options of a new messenger. Initialise with `MP_MESSENGER_OPTIONS_INIT`. All ranks pass the same options.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_messenger_options_t {
    /// `sizeof(mp_messenger_options_t)`.
    pub size: usize,
    /// Maximum number of unreceived sends and described buffers of a rank. The same number of unfinished receives and
    /// fetches is allowed. 1 to 65,536; each takes 4 KiB of shared memory. 0 selects 1,024.
    pub operations: u32,
    /// Maximum number of messages of one rank that may wait for receives of another, 1 to 1,048,576. 0 selects 4,096.
    /// `operations` is a further limit.
    pub messages: u32,
}

/// Message that a receiver gets, and the buffer for its metadata. Initialise with `MP_MESSAGE_INFO_INIT`. Set
/// `metadata` and `metadata_capacity` to receive metadata; calls fill the other fields.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_message_info_t {
    /// `sizeof(mp_message_info_t)`.
    pub size: usize,
    /// Tag of the message.
    pub tag: u64,
    /// Size of the message without metadata, bytes.
    pub bytes: u64,
    /// Rank that sent the message.
    pub rank: u32,
    /// Size of the metadata, bytes. May exceed `metadata_capacity`.
    pub metadata_bytes: u32,
    /// Buffer of the caller that receives up to `metadata_capacity` bytes of metadata. NULL if `metadata_capacity` is
    /// 0.
    pub metadata: *mut c_void,
    /// Size of the buffer, bytes. `MP_MESSAGE_METADATA_BYTES` is always enough.
    pub metadata_capacity: usize,
}

/// Descriptor of a buffer that a rank of the node may fetch. A plain value of fixed size that owns nothing and can
/// travel inside a message of the program.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_message_descriptor_t {
    /// Opaque content.
    pub bytes: [u8; 64],
}

/// Collective: copies between participants, which are devices of a process or ranks of a node. No collective reduces.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_collective_t {
    /// The root sends the same block to every participant.
    MP_BROADCAST = 0,
    /// The root sends a different block to each participant.
    MP_SCATTER = 1,
    /// Each participant sends one block to the root.
    MP_GATHER = 2,
    /// Each participant sends the same block to every participant.
    MP_ALL_GATHER = 3,
    /// Each participant sends a different block to each participant.
    MP_ALL_TO_ALL = 4,
}

/// Copy from one participant of a collective to another, or to itself.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_piece_t {
    /// Participant that sends.
    pub from: u32,
    /// Participant that receives.
    pub to: u32,
    /// Offset in the sender's send buffer, bytes.
    pub send_offset: u64,
    /// Offset in the receiver's receive buffer, bytes.
    pub receive_offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Agent that moves partitions as soon as they are ready.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_agent_t {
    /// Copy engines, with the number of partitions that `mp_node_tune_partitions` found best for such transfers.
    /// Without such a result in the tuning file of rank 0, the model chooses the number. With `arrivals` off, steps
    /// choose by measured times: move each partition by itself, several together, or all after their producers. With
    /// `stores` on, the producers may also move them. If `adapt` of the plan's options is off, steps do not choose.
    MP_AGENT_AUTO = 0,
    /// Copy engines, over all paths of the plan, each partition by itself. Uses no multiprocessor.
    MP_AGENT_COPY_ENGINE = 1,
    /// Producing kernels, which store their bytes at the destination to which the trigger points.
    MP_AGENT_PRODUCER = 2,
}

/// Options of transfers that are divided into partitions. Initialise with `MP_PARTITION_OPTIONS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_partition_options_t {
    /// `sizeof(mp_partition_options_t)`.
    pub size: usize,
    /// Number of partitions of each transfer, at most 4096. 0 lets the model choose. Partitions of different sizes must
    /// be separate transfers.
    pub count: u32,
    /// Agent that moves the partitions.
    pub agent: mp_agent_value,
    /// `MP_ON` if receivers are notified when each partition arrives, which is the default. With copy engines a
    /// notification takes about 2 us per partition. Other agents always notify.
    pub arrivals: mp_switch_value,
    /// `MP_ON` if `MP_AGENT_AUTO` may let the producers store at the destination. This requires that the producers are
    /// kernels which write where the trigger points, that nothing reads the moved bytes in the source, and that the
    /// stream of `mp_execute` is ordered after the producers. Off by default. Ignored if a kernel cannot access the
    /// destination, or if `arrivals` is on.
    pub stores: mp_switch_value,
}

/// Candidates and limits of `mp_node_tune_partitions`. Initialise with `MP_PARTITION_TUNING_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_partition_tuning_t {
    /// `sizeof(mp_partition_tuning_t)`.
    pub size: usize,
    /// Bit mask of the agents to try, for example `1 << MP_AGENT_COPY_ENGINE`. 0 selects copy engines. Include
    /// `MP_AGENT_PRODUCER` only if the producers write where the trigger points. `MP_AGENT_AUTO` requires `arrivals`
    /// off; it lets producers store if the mask has `MP_AGENT_PRODUCER`, and runs 48 steps to adapt before it is timed.
    pub agents: u32,
    /// Number of timed steps of each candidate, at most 1000. 0 selects 7.
    pub rounds: u32,
    /// `MP_ON` if receivers are notified when each partition arrives, as in `mp_partition_options_t`.
    pub arrivals: mp_switch_value,
    /// Number of blocks of the producing kernel, for programs that tune with several block counts. Trials with
    /// different block counts are kept separately. 0 if the program uses only one.
    pub blocks: u32,
    /// Path of the tuning file in which rank 0 keeps all trials, for `mpgpu tune partitions`. The file is created if it
    /// does not exist. NULL selects the file of MPGPU_TUNING_FILE; if that is not set either, no trials are kept.
    pub file: *const c_char,
}

/// Addresses and sizes that producers and receivers of one transfer need, for `mpgpu::trigger` of mpgpu/trigger.cuh.
/// Initialise with `MP_TRIGGER_INIT`. `counters` is on the source's device. All other addresses are in host memory that
/// GPUs can access. They are valid until the plan is destroyed.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_trigger_t {
    /// `sizeof(mp_trigger_t)`.
    pub size: usize,
    /// Two words that describe the step to its producers, from `mp_plan_arm` to the end of the step. The first is the
    /// address at which they write: in the source, or in the destination if producers store. The second is 1 if
    /// producers count ready partitions. It is 0 in steps in which all bytes move after the producers, or in which
    /// producers store and no receiver is notified. NULL on a rank that does not send the transfer.
    pub step: *const u64,
    /// Flags, one per partition, that are set to 1 when the partition is ready. NULL on a rank that does not send the
    /// transfer.
    pub ready: *mut u64,
    /// Flags, `arrived_flags` per partition in partition order, that are all 1 when the partition has arrived. NULL on
    /// a rank that does not receive the transfer or is not notified.
    pub arrived: *const u64,
    /// Counters, one per partition, that its producers increment. They are 0 between steps.
    pub counters: *mut u64,
    /// Size of the transfer, bytes.
    pub bytes: u64,
    /// Size of each partition except the last, bytes.
    pub partition_bytes: u64,
    /// Number of partitions.
    pub partitions: u32,
    /// Number of arrival flags per partition.
    pub arrived_flags: u32,
}

/// Handle of a memory range for other processes of the node. A plain value of fixed size that owns nothing and can
/// travel over MPI or any other channel. The exporter determines how long it is valid.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_memory_handle_t {
    /// Opaque content.
    pub bytes: [u8; 128],
}

/// Signal: a 64-bit counter in memory of a context or in imported memory, and the value to set or wait for. On CUDA the
/// counter must be in host memory from `mp_alloc_shared`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_signal_t {
    /// Counter, aligned to 8 bytes. New memory holds 0; write a different first value before other processes know the
    /// counter.
    pub counter: *mut u64,
    /// Value at which the signal counts as reached: the counter is equal or greater. The comparison is cyclic, so a
    /// counter may overflow.
    pub value: u64,
}

/// Properties of a plan. Initialise with `MP_PLAN_INFO_INIT`.
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
    /// Number of paths of all transfers.
    pub paths: u32,
    /// Number of operations of one execution.
    pub operations: u32,
    /// Staging memory in use on the device that needs most, bytes.
    pub staging_bytes: u64,
    /// Median time of the last measured executions of the active variant, seconds. 0 if none was measured (`adapt` in
    /// the options).
    pub measured_seconds: f64,
    /// Median time of the last measured executions with plain copies, seconds. 0 if none was measured.
    pub measured_direct_seconds: f64,
}

/// Counters of a context since it was created. Initialise with `MP_STATISTICS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_statistics_t {
    /// `sizeof(mp_statistics_t)`.
    pub size: usize,
    /// Calls of `mp_plan` that found the plan of the same request in the cache.
    pub plan_cache_hits: u64,
    /// Calls of `mp_plan` that did not find the plan of the same request in the cache.
    pub plan_cache_misses: u64,
    /// Plans evicted from the cache to stay within its limit.
    pub plan_cache_evictions: u64,
    /// Plans in the cache now.
    pub plan_cache_entries: u64,
    /// Executions enqueued.
    pub executions: u64,
    /// Bytes of all transfers of these executions.
    pub bytes: u64,
    /// Cache misses that found a plan of the same shape with different addresses.
    pub plan_cache_shape_hits: u64,
    /// Executions that were one graph launch. All `graph_` counters are 0 on a backend without graphs.
    pub graph_launches: u64,
    /// Graph launches whose graph already had the addresses.
    pub graph_hits: u64,
    /// Graph launches that first instantiated a graph or updated its addresses.
    pub graph_misses: u64,
    /// Graphs instantiated.
    pub graph_instantiations: u64,
    /// Graphs whose addresses were updated instead of instantiating another graph.
    pub graph_repoints: u64,
    /// Graph launches that waited for an earlier launch because all graphs of the plan were in use.
    pub graph_waits: u64,
    /// Plan shapes that have graphs now.
    pub graph_programs: u64,
    /// Instantiated graphs that exist now.
    pub graph_entries: u64,
}

/// Resources of a context on one device. Initialise with `MP_DEVICE_STATISTICS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_device_statistics_t {
    /// `sizeof(mp_device_statistics_t)`.
    pub size: usize,
    /// Bytes of staging memory. 0 until a plan stages on this device.
    pub staging_bytes: u64,
    /// Bytes from `mp_alloc` that are not yet freed.
    pub allocated_bytes: u64,
    /// Streams from `mp_stream_create` that are not yet destroyed.
    pub streams: u64,
}

/// Details of a failure. Initialise with `MP_ERROR_INFO_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_error_info_t {
    /// `sizeof(mp_error_info_t)`.
    pub size: usize,
    /// Status that the call returned.
    pub status: mp_status_t,
    /// Error code of the driver. 0 if no driver reported an error.
    pub driver_code: i64,
    /// Name of the parameter that caused the error. NULL if none did.
    pub argument: *const c_char,
    /// Text that `mp_last_error` returns.
    pub message: *const c_char,
}

/// Function that receives log records. It is called on the thread that logs, which may be any thread. Both texts are
/// valid only during the call. It must not call functions of this library, and must return (no `longjmp`, no
/// exception).
pub type mp_log_callback_t =
    Option<unsafe extern "C" fn(level: mp_log_level_value, target: *const c_char, message: *const c_char, user: *mut c_void)>;

/// Function that gathers `bytes` bytes of every rank of a node on every rank, as `MPI_Allgather` does. `receive` has
/// room for the bytes of all ranks, in rank order. Returns 0 on success and any other number on failure. It must return
/// (no `longjmp`, no exception).
pub type mp_allgather_t = Option<unsafe extern "C" fn(user: *mut c_void, send: *const c_void, receive: *mut c_void, bytes: usize) -> c_int>;

/// Function that launches in `stream` the work that produces one step of a plan with partitions. `triggers` has `count`
/// elements, one for each transfer that this rank passed, in that order. Returns 0 on success and any other number on
/// failure. It may call functions of this library, except those that all ranks call together. It must return (no
/// `longjmp`, no exception).
pub type mp_produce_t =
    Option<unsafe extern "C" fn(user: *mut c_void, triggers: *const mp_trigger_t, count: usize, stream: mp_stream_t) -> c_int>;

/// Function that runs on a CPU thread in stream order. It must return (no `longjmp`, no exception).
pub type mp_host_function_t = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// Function that is called with the outcome when a request has ended. It must return (no `longjmp`, no exception).
pub type mp_request_function_t = Option<unsafe extern "C" fn(user: *mut c_void, status: mp_status_value)>;

/// Implements [`Versioned`] for structs that begin with their size.
macro_rules! versioned {
    ($($type:ident $init:literal $first:literal;)*) => {$(
        // SAFETY: `size: usize` is the first field. The others are integers, floats, pointers and an enum that has a
        // zero.
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
