//! Types of the C ABI. Their layouts and numbers never change: append new items, never reorder or renumber.

use super::argument::Versioned;
use std::ffi::{c_char, c_int, c_void};

/// Device number of the host memory of NUMA domain 0. GPUs are numbered from 0, in the order of the active backend.
pub const MP_DEVICE_HOST: i32 = -1;

/// Placeholder for a device number: the library determines the device that owns the address. Accepted in transfers.
pub const MP_DEVICE_AUTO: i32 = mpgpu_contexts::Transfer::AUTO.0;

/// Value of `mp_plan_options_t::relay_gpus` that forbids paths through other GPUs.
pub const MP_RELAY_NONE: u64 = 0x8000_0000_0000_0000;

/// Rank number that matches messages from any rank. Accepted by receives and probes; never returned.
pub const MP_ANY_RANK: i32 = mpgpu_core::rank::ANY;

/// Rank number that represents rank 0 of a communicator if that rank is on another node.
pub const MP_FIRST_ELSEWHERE: i32 = mpgpu_core::rank::elsewhere(0);

/// Value of `mp_node_end_t::window` for memory whose position only the other rank knows. `offset` then holds a tag. The
/// other rank passes a descriptor of the same transfer with the same tag, which gives the position.
pub const MP_BY_TAG: u32 = mpgpu_ranks::NodeEnd::BY_TAG;

/// Maximum size of the metadata that a message can carry, bytes.
pub const MP_MESSAGE_METADATA_BYTES: usize = 256;

const _: () = assert!(MP_MESSAGE_METADATA_BYTES == mpgpu_ranks::message::METADATA_BYTES);

/// Status that a function returns. The numeric values of the statuses are never reused or changed.
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
    /// An address is NULL, unknown or on a device other than stated, or a range extends beyond its allocation.
    MP_ERROR_INVALID_POINTER = 4,
    /// Two transfers of a batch overlap, and at least one of them writes to the common bytes.
    MP_ERROR_OVERLAP = 5,
    /// The options allow no path between the source and the destination device of a transfer.
    MP_ERROR_NO_ROUTE = 6,
    /// A device or the host has run out of memory.
    MP_ERROR_OUT_OF_MEMORY = 7,
    /// This build of the library or this machine does not support the request.
    MP_ERROR_NOT_SUPPORTED = 8,
    /// No GPU driver was found.
    MP_ERROR_NO_DRIVER = 9,
    /// The GPU driver or the operating system reported an error. `mp_last_error_info` returns its code.
    MP_ERROR_DRIVER = 10,
    /// The topology (description of the machine's devices and links) is unknown, unreadable or invalid.
    MP_ERROR_TOPOLOGY = 11,
    /// An environment variable of mpgpu has an invalid value.
    MP_ERROR_ENVIRONMENT = 12,
    /// The header and the library have incompatible versions.
    MP_ERROR_VERSION_MISMATCH = 13,
    /// The copied data differ from the source. Detected only with `MPGPU_VERIFY=bytes`.
    MP_ERROR_DATA_CORRUPTION = 14,
    /// A defect of the library was detected. The context remains usable.
    MP_ERROR_INTERNAL = 15,
    /// A process on which the call depends has exited, or has freed memory that it shared.
    MP_ERROR_PEER_GONE = 16,
    /// The time limit of a wait has expired.
    MP_ERROR_TIMEOUT = 17,
    /// Another rank failed in a collective call of the library. The error text contains the reason.
    MP_ERROR_RANK_FAILED = 18,
    /// The caller's allgather function (`mp_allgather_t`) returned an error.
    MP_ERROR_ALLGATHER = 19,
    /// A message is longer than the receive buffer. The message is not lost: a receive with a larger buffer still gets
    /// it.
    MP_ERROR_MESSAGE_TRUNCATED = 20,
    /// The send or receive was cancelled before it matched, or its messenger was destroyed.
    MP_ERROR_CANCELLED = 21,
    /// A message queue is full. Nothing was sent or received.
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
/// `mp_log_level_t` from the caller, or passed to the caller's callback.
pub type mp_log_level_value = c_int;

/// Execution backend of a context.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_backend_t {
    /// Backend that the environment variable `MPGPU_BACKEND` selects. If it is not set, CUDA if a GPU is available,
    /// otherwise the host backend.
    MP_BACKEND_AUTO = 0,
    /// Virtual devices, implemented by CPU threads. The data are really copied; predicted times come from a model.
    MP_BACKEND_HOST = 1,
    /// NVIDIA GPUs.
    MP_BACKEND_CUDA = 2,
}

/// Mechanism by which a plan is executed.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_engine_t {
    /// Engine that the environment variable `MPGPU_ENGINE` selects. If it is not set, the engine with the shortest
    /// predicted time.
    MP_ENGINE_AUTO = 0,
    /// Copies on several internal streams, ordered by events.
    MP_ENGINE_STREAM = 1,
    /// Copies and fused copy kernels, launched as one CUDA graph.
    MP_ENGINE_GRAPH = 2,
    /// Direct copies without staging, submitted by batched driver calls.
    MP_ENGINE_BATCH = 3,
    /// Direct copies without staging, performed by fused copy kernels.
    MP_ENGINE_KERNEL = 4,
}

/// Three-valued option: on, off or the default.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_switch_t {
    /// Value from the environment variable of the option. If it is not set, the library decides.
    MP_DEFAULT = 0,
    /// Enabled.
    MP_ON = 1,
    /// Disabled.
    MP_OFF = 2,
}

/// Method by which streams wait for signals.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_signal_wait_t {
    /// Method that the environment variable `MPGPU_SIGNAL_WAIT` selects. If it is not set, streams wait by stream
    /// operations.
    ///
    /// Exception: in a plan of `mp_node_plan` that moves little data between ranks with one GPU each, one kernel per
    /// rank waits. After a rank was late, some executions of such a plan wait by stream operations. See
    /// docs/reference/waiting.md.
    MP_SIGNAL_WAIT_DEFAULT = 0,
    /// Stream memory operation (`cuStreamWaitValue64` on CUDA). It occupies no multiprocessor.
    MP_SIGNAL_WAIT_OPERATION = 1,
    /// Kernel of one warp that polls the signal's counter. It reacts about 4 us sooner than a stream operation, but
    /// occupies part of a multiprocessor while it waits. docs/reference/waiting.md lists the cases in which this method
    /// must not be used. The host backend ignores this value.
    MP_SIGNAL_WAIT_KERNEL = 2,
}

/// Output format of the functions that describe an object.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_format_t {
    /// Readable text. The layout may change between versions.
    MP_FORMAT_TEXT = 0,
    /// One JSON object.
    MP_FORMAT_JSON = 1,
}

/// Log level. Each level includes all levels with smaller numbers.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_log_level_t {
    /// No log records.
    MP_LOG_OFF = 0,
    /// Errors that could not be returned by a function, for example because they occurred on a thread of the library.
    MP_LOG_ERROR = 1,
    /// Probable mistakes, for example memory that is still allocated when a context is destroyed.
    MP_LOG_WARN = 2,
    /// Decisions that are made once, for example the choice of the backend.
    MP_LOG_INFO = 3,
    /// Rare events, for example the allocation of staging memory.
    MP_LOG_DEBUG = 4,
    /// All records.
    MP_LOG_TRACE = 5,
}

/// Type to which `mp_stream_t` points. It is opaque and never dereferenced.
pub struct CUstream_st {
    _private: [u8; 0],
}
/// Type to which `mp_event_t` points. It is opaque and never dereferenced.
pub struct CUevent_st {
    _private: [u8; 0],
}
/// Type to which `mp_context_t` formally points. There are no objects of this type: the handle is a number.
pub struct mp_context {
    _private: [u8; 0],
}
/// Type to which `mp_node_t` formally points. There are no objects of this type: the handle is a number.
pub struct mp_node_s {
    _private: [u8; 0],
}
/// Type to which `mp_plan_t` formally points. There are no objects of this type: the handle is a number.
pub struct mp_plan_s {
    _private: [u8; 0],
}
/// Type to which `mp_messenger_t` formally points. There are no objects of this type: the handle is a number.
pub struct mp_messenger_s {
    _private: [u8; 0],
}
/// Type to which `mp_request_t` formally points. There are no objects of this type: the handle is a number.
pub struct mp_request {
    _private: [u8; 0],
}

/// Stream: a queue whose work runs in order. The type is the same as `cudaStream_t`. NULL is the default stream.
pub type mp_stream_t = *mut CUstream_st;
/// Event: a point in a stream for which other streams can wait. The C type is that of `cudaEvent_t`. Functions of this
/// library that record an event or wait for one also accept a `cudaEvent_t`.
pub type mp_event_t = *mut CUevent_st;
/// Context: the library's state for one process: backend, topology, plan cache, streams and memory. The handle is a
/// number, not an address, so the library can detect destroyed contexts.
pub type mp_context_t = *mut mp_context;
/// Plan: a prepared batch of copies between fixed addresses that can be executed many times. The handle is a number,
/// not an address.
pub type mp_plan_t = *mut mp_plan_s;
/// Node: a group of processes (ranks) on one machine that plan their copies together. The handle is a number, not an
/// address.
pub type mp_node_t = *mut mp_node_s;
/// Messenger: object through which one rank exchanges messages with the other ranks of a node. The handle is a number,
/// not an address.
pub type mp_messenger_t = *mut mp_messenger_s;
/// Request: an execution of a plan, a send, a receive or a fetch that the program can wait for. The handle is a number,
/// not an address.
pub type mp_request_t = *mut mp_request;

/// Options for creating a context. Initialise with `MP_CONTEXT_OPTIONS_INIT`. For a field that is 0 or NULL the library
/// uses the environment variable of the option and, if it is not set, the default. docs/reference/environment.md lists
/// the variables.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_context_options_t {
    /// Size of this struct, bytes. `MP_CONTEXT_OPTIONS_INIT` sets it.
    pub size: usize,
    /// Execution backend of the context.
    pub backend: mp_backend_value,
    /// Topology of the machine: name of a built-in preset or path of a topology file, UTF-8. Read during the call only.
    pub topology: *const c_char,
    /// Maximum size of the context's staging buffers on each device, bytes. The pinned host buffers through which CPU
    /// threads copy pageable memory have a separate limit of the same size. 0 selects the default.
    pub staging_bytes: u64,
    /// Maximum number of plans in the plan cache. Planning a cached request again takes only a look-up. 0 selects the
    /// default.
    pub cache_plans: u64,
    /// Method by which streams wait for signals.
    pub signal_wait: mp_signal_wait_value,
    /// Maximum number of CPU threads that copy between pageable and pinned host memory, at most 256. 0 selects the
    /// default. -1 selects no threads; the driver then makes these copies.
    pub host_threads: i32,
    /// Maximum number of plans whose CUDA graphs the context caches. Plans that differ only in their addresses count
    /// once. If the limit is exceeded, the context drops the graphs of the plan that was launched least recently. 0
    /// selects the default.
    pub cache_graphs: u64,
}

/// Options for creating a plan. Initialise with `MP_PLAN_OPTIONS_INIT`. For a field that is 0 the library uses the
/// environment variable of the option and, if it is not set, decides by its performance model.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_plan_options_t {
    /// Size of this struct, bytes. `MP_PLAN_OPTIONS_INIT` sets it.
    pub size: usize,
    /// Mechanism by which the plan is executed.
    pub engine: mp_engine_value,
    /// Maximum number of paths over which one transfer is distributed. 0 lets the library choose.
    pub max_paths: u32,
    /// `MP_ON` (the default) if copies between GPUs may use a path through host memory.
    pub host_path: mp_switch_value,
    /// Size of the chunks in which data pass through staging buffers, bytes, at least 4096. The library uses smaller
    /// chunks if the staging limit requires it. 0 lets the library choose.
    pub chunk_bytes: u64,
    /// Minimum size of a transfer that uses several paths, bytes. Smaller transfers use one path. 0 lets the library
    /// choose.
    pub min_bytes: u64,
    /// Maximum size of the plan's staging buffers on each device, bytes. It must not exceed the limit of the context. 0
    /// selects the limit of the context.
    pub staging_bytes: u64,
    /// Bit mask of the GPUs through which the data of other devices may be forwarded. Bit `g` represents GPU `g`. In
    /// plans of `mp_node_plan` the GPUs of the node are counted rank by rank, in the order in which each rank lists or
    /// sees them. `MP_RELAY_NONE` allows no GPU. 0 allows all GPUs, unless the environment variable states otherwise.
    pub relay_gpus: u64,
    /// `MP_ON` (the default) if executions measure variants of the plan and then use the fastest. There are up to three
    /// variants: with all paths, with all paths but half as much data on the indirect paths, and with only direct
    /// paths. In a plan of `mp_node_plan`, all ranks use the same variant in each execution. If its transfers are
    /// divided into partitions, this option has an effect only with `MP_AGENT_AUTO` and
    /// `mp_partition_options_t::arrivals` off.
    pub adapt: mp_switch_value,
    /// Number of chunks into which data are divided on each path through another GPU. Overrides `chunk_bytes`. The
    /// library uses more chunks if the staging limit requires it. 0 lets the library choose.
    pub relay_chunks: u32,
    /// Number of chunks into which data are divided on each path through host memory. Overrides `chunk_bytes`. The
    /// library uses more chunks if the staging limit requires it. 0 lets the library choose.
    pub host_chunks: u32,
}

/// Options of `mp_context_probe`, which measures the machine. Initialise with `MP_PROBE_OPTIONS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_probe_options_t {
    /// Size of this struct, bytes. `MP_PROBE_OPTIONS_INIT` sets it.
    pub size: usize,
    /// Path of the topology file to which the probe (measurement of the machine) writes its result, UTF-8. Read during
    /// the call only. NULL selects a file in the user's cache directory, which contexts on the same GPUs find together
    /// with the tuning file next to it.
    pub file: *const c_char,
    /// `MP_ON` (the default) if the topology file that the probe produces is stored on disk. If `MP_OFF`, only
    /// `mp_context_probed` returns it.
    pub keep: mp_switch_value,
    /// `MP_ON` if the probe makes fewer and shorter measurements and tunes nothing. Off by default.
    pub quick: mp_switch_value,
}

/// Copy of a memory range from a source to a destination.
///
/// `dst_device` and `src_device` are the devices that own the two addresses. With `MP_DEVICE_AUTO` the library
/// determines the device from the address. It recognises GPU memory, host memory from `mp_alloc` of the same context
/// and, on CUDA, host memory that is pinned by or registered with CUDA. The library assumes that any other address is
/// valid pageable host memory.
///
/// Large copies of pageable memory are made by threads of the library, through pinned buffers and over several links.
/// Small ones are made by the driver. In both cases the memory must stay allocated and unchanged until the execution
/// has completed, not only until `mp_execute` returns. The execution fails if the memory is not mapped, or if it is a
/// mapped file that is shortened during the copy.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_transfer_t {
    /// Start address of the destination.
    pub dst: *mut c_void,
    /// Device that owns the destination, or `MP_DEVICE_AUTO`.
    pub dst_device: i32,
    /// Start address of the source.
    pub src: *const c_void,
    /// Device that owns the source, or `MP_DEVICE_AUTO`.
    pub src_device: i32,
    /// Number of bytes to copy. If 0, nothing is copied, and the addresses may be NULL.
    pub bytes: u64,
}

/// Window: memory range of a rank from or to which transfers of `mp_node_plan` copy.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_window_t {
    /// Start address of the window.
    pub memory: *mut c_void,
    /// Size of the window, bytes. If 0, the address may be NULL.
    pub bytes: u64,
}

/// Source or destination of a transfer between ranks: a position in a window (memory range) of a rank.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_node_end_t {
    /// Rank that owns the memory.
    pub rank: u32,
    /// Index, from 0, in the list of windows that the owning rank passes to `mp_node_plan`. `MP_BY_TAG` if the calling
    /// rank does not know the position in the memory of the other rank.
    pub window: u32,
    /// Offset from the start of the window, bytes. If `window` is `MP_BY_TAG`: the tag of the transfer, which may be
    /// any number.
    pub offset: u64,
}

/// Copy from a window (memory range) of one rank to a window of another or the same rank.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_node_transfer_t {
    /// Destination of the copy.
    pub dst: mp_node_end_t,
    /// Source of the copy.
    pub src: mp_node_end_t,
    /// Number of bytes to copy.
    pub bytes: u64,
}

/// Options of `mp_node_create`. Initialise with `MP_NODE_OPTIONS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_node_options_t {
    /// Size of this struct, bytes. `MP_NODE_OPTIONS_INIT` sets it.
    pub size: usize,
    /// GPUs that this rank uses, as device numbers of its context. NULL selects all GPUs that are visible to the rank.
    /// GPUs that are visible to several ranks are then divided evenly among these ranks.
    pub devices: *const i32,
    /// Number of elements of `devices`. 0 if `devices` is NULL.
    pub device_count: usize,
    /// Path of a Unix socket over which the ranks connect to each other if they have no allgather function. All ranks
    /// pass the same path, in a directory that all of them can write to. The ranks wait up to one minute for each
    /// other. NULL if an allgather function is passed.
    pub socket: *const c_char,
    /// Reason why this rank cannot join the node. NULL if the rank can join. If a reason is set, `mp_node_create` fails
    /// on all ranks, the other ranks receive the reason, and the context of this rank may be NULL.
    pub failure: *const c_char,
}

/// Options of `mp_messenger_create`. All ranks pass the same options. Initialise with `MP_MESSENGER_OPTIONS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_messenger_options_t {
    /// Size of this struct, bytes. `MP_MESSENGER_OPTIONS_INIT` sets it.
    pub size: usize,
    /// Maximum number of pending operations of one rank, from 1 to 65,536. Two groups are counted separately, each with
    /// this limit: sends and described buffers (`mp_message_describe`) that no rank has received or fetched yet, and
    /// receives and fetches that have not ended. Each operation takes 4 KiB of shared memory. 0 selects 1,024.
    pub operations: u32,
    /// Maximum number of messages from one rank that wait at one other rank for a matching receive, from 1 to
    /// 1,048,576. 0 selects 4,096. The limit `operations` also applies.
    pub messages: u32,
}

/// Properties of a message, and the caller's buffer for its metadata. Initialise with `MP_MESSAGE_INFO_INIT`. To
/// receive metadata, set `metadata` and `metadata_capacity`. The library fills the other fields.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_message_info_t {
    /// Size of this struct, bytes. `MP_MESSAGE_INFO_INIT` sets it.
    pub size: usize,
    /// Tag of the message.
    pub tag: u64,
    /// Size of the message without metadata, bytes.
    pub bytes: u64,
    /// Rank that sent the message.
    pub rank: u32,
    /// Size of the message's metadata, bytes. It can be larger than `metadata_capacity`.
    pub metadata_bytes: u32,
    /// Buffer of the caller, to which up to `metadata_capacity` bytes of metadata are written. NULL if
    /// `metadata_capacity` is 0.
    pub metadata: *mut c_void,
    /// Size of the buffer at `metadata`, bytes. `MP_MESSAGE_METADATA_BYTES` is always enough.
    pub metadata_capacity: usize,
}

/// Descriptor of a buffer that another rank of the node can copy to its own memory (`mp_message_fetch`). The descriptor
/// is a plain value of fixed size and owns nothing. The program may send it to the other rank in any way.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_message_descriptor_t {
    /// Opaque content.
    pub bytes: [u8; 64],
}

/// Collective operation that only copies data between participants. The participants are devices of one process or
/// ranks of a node. There are no reductions.
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

/// One copy of a collective operation, from the send buffer of one participant to the receive buffer of another or the
/// same participant.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_piece_t {
    /// Index of the participant that sends, from 0.
    pub from: u32,
    /// Index of the participant that receives, from 0.
    pub to: u32,
    /// Offset of the data from the start of the sender's send buffer, bytes.
    pub send_offset: u64,
    /// Offset of the data from the start of the receiver's receive buffer, bytes.
    pub receive_offset: u64,
    /// Number of bytes to copy.
    pub bytes: u64,
}

/// Agent: the mechanism that moves the partitions of a transfer to their destination: copy engines, or the kernels that
/// produce the data. With copy engines, a partition is copied as soon as its producer (the kernel that computes it) has
/// marked it ready.
#[repr(C)]
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum mp_agent_t {
    /// The library chooses how the partitions are copied. By default it uses copy engines, with the number of
    /// partitions that `mp_node_tune_partitions` found best for similar transfers. If rank 0's tuning file has no such
    /// result, the performance model chooses the number.
    ///
    /// If `mp_partition_options_t::arrivals` is off (receivers are not notified of each partition) and
    /// `mp_plan_options_t::adapt` is on, executions measure several methods and then use the fastest:
    /// - copy each partition by itself,
    /// - copy several partitions together,
    /// - copy all partitions after the producing kernels have finished,
    /// - if `mp_partition_options_t::stores` is on: let the producing kernels store their results directly at the
    ///   destination.
    MP_AGENT_AUTO = 0,
    /// Copy engines copy each partition by itself, over all paths of the plan. The copies occupy no multiprocessor.
    MP_AGENT_COPY_ENGINE = 1,
    /// No copy is made: the producing kernels store their results directly at the destination, whose address they read
    /// from `mp_trigger_t::step`.
    MP_AGENT_PRODUCER = 2,
}

/// Options for dividing the transfers of a plan into partitions, which are copied one by one as kernels produce them.
/// Initialise with `MP_PARTITION_OPTIONS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_partition_options_t {
    /// Size of this struct, bytes. `MP_PARTITION_OPTIONS_INIT` sets it.
    pub size: usize,
    /// Number of equal partitions into which each transfer is divided, at most 4096. 0 lets the library choose the
    /// number. For partitions of different sizes, divide the data into several transfers.
    pub count: u32,
    /// Agent (mechanism) that moves the partitions to their destination, for example copy engines. See `mp_agent_t`.
    pub agent: mp_agent_value,
    /// `MP_ON` (the default) if receivers are notified when each partition arrives. With copy engines a notification
    /// takes about 2 us per partition. With `MP_AGENT_PRODUCER` receivers are always notified.
    pub arrivals: mp_switch_value,
    /// `MP_ON` allows `MP_AGENT_AUTO` to have the producing kernels store their results directly at the destination, so
    /// that no copy is needed. Off by default. Ignored if a kernel cannot access the destination, or if `arrivals` is
    /// on.
    ///
    /// Requirements: the producing kernels write to the address from `mp_trigger_t::step`, nothing reads the sent data
    /// at the source, and the stream passed to `mp_execute` is ordered after the producing kernels.
    pub stores: mp_switch_value,
}

/// Options of `mp_node_tune_partitions`, which measures how best to divide transfers into partitions. Initialise with
/// `MP_PARTITION_TUNING_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_partition_tuning_t {
    /// Size of this struct, bytes. `MP_PARTITION_TUNING_INIT` sets it.
    pub size: usize,
    /// Bit mask of the agents (values of `mp_agent_t`) to measure, for example `1 << MP_AGENT_COPY_ENGINE`. 0 selects
    /// only copy engines.
    ///
    /// Include `MP_AGENT_PRODUCER` only if the producers write to the address from `mp_trigger_t::step`. Include
    /// `MP_AGENT_AUTO` only if `arrivals` is off. The measurement of `MP_AGENT_AUTO` starts with 48 untimed executions,
    /// in which the library chooses a method. The library lets the producers store at the destination only if the mask
    /// also contains `MP_AGENT_PRODUCER`.
    pub agents: u32,
    /// Number of timed executions of each candidate (combination of an agent and a number of partitions), at most 1000.
    /// 0 selects 7.
    pub rounds: u32,
    /// `MP_ON` (the default) if receivers are notified when each partition arrives, as in `mp_partition_options_t`.
    pub arrivals: mp_switch_value,
    /// Number of thread blocks of the producing kernel. The tuning file stores separate results for each number. Pass 0
    /// if the program always uses the same number of blocks.
    pub blocks: u32,
    /// Path of the tuning file to which rank 0 writes all measurements. The command `mpgpu tune partitions` prints
    /// them. The file is created if it does not exist. NULL selects the file that the environment variable
    /// `MPGPU_TUNING_FILE` names. If the variable is not set either, the measurements are not stored.
    pub file: *const c_char,
}

/// Trigger: addresses and sizes with which kernels mark the partitions of one transfer ready and detect their arrival.
/// Pass this struct to the constructor of `mpgpu::trigger` (mpgpu/trigger.cuh). Initialise with `MP_TRIGGER_INIT`.
///
/// `step` and `counters` point to memory of the device that owns the source. `ready` and `arrived` point to host memory
/// that GPUs can access. All addresses are valid until the plan is destroyed.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_trigger_t {
    /// Size of this struct, bytes. `MP_TRIGGER_INIT` sets it.
    pub size: usize,
    /// Address of two 64-bit words for the producing kernels. The library sets them in each step (execution of the
    /// plan). They are valid for kernels that run after `mp_plan_arm` and before the end of the step.
    /// - Word 0 is the address to which the producing kernels write: the source of the transfer, or its destination if
    ///   the kernels store there directly.
    /// - Word 1 is 1 if the producing kernels must mark partitions ready. It is 0 if all data are copied after the
    ///   kernels have finished, or if the kernels store at the destination and no receiver is notified.
    ///
    /// NULL on a rank that does not send the transfer.
    pub step: *const u64,
    /// Array of flags, one per partition. The producing kernels set a flag to 1 when its partition is ready to be
    /// copied. NULL on a rank that does not send the transfer.
    pub ready: *mut u64,
    /// Array of flags: `arrived_flags` consecutive flags for each partition, in the order of the partitions. A
    /// partition has arrived when all of its flags are 1. NULL on a rank that does not receive the transfer, or if
    /// receivers are not notified.
    pub arrived: *const u64,
    /// Array of counters, one per partition, in which the producing kernels count how much of the partition they have
    /// written. The counters are 0 between steps. NULL on a rank that does not send the transfer.
    pub counters: *mut u64,
    /// Size of the transfer, bytes.
    pub bytes: u64,
    /// Size of each partition except the last, which may be smaller, bytes.
    pub partition_bytes: u64,
    /// Number of partitions of the transfer.
    pub partitions: u32,
    /// Number of flags in `arrived` for each partition.
    pub arrived_flags: u32,
}

/// Handle of a memory range that other processes on the same machine can map (`mp_memory_import`). It is a plain value
/// of fixed size and owns nothing. It can be sent over MPI or any other channel. It is valid until the exporting
/// process frees the memory or destroys its context.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_memory_handle_t {
    /// Opaque content.
    pub bytes: [u8; 128],
}

/// Signal: the address of a 64-bit counter, and the value to set it to or to wait for. The counter is in memory of a
/// context or in imported memory. On CUDA it must be in host memory from `mp_alloc_shared`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_signal_t {
    /// Address of the counter, aligned to 8 bytes. New memory holds 0. To start with another value, write it before
    /// other processes know the address.
    pub counter: *mut u64,
    /// Value to set, or value for which to wait. A wait ends when the counter is equal or greater. The comparison is
    /// cyclic, so a counter may overflow.
    pub value: u64,
}

/// Properties of a plan, for `mp_plan_get_info`. Initialise with `MP_PLAN_INFO_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_plan_info_t {
    /// Size of this struct, bytes. `MP_PLAN_INFO_INIT` sets it.
    pub size: usize,
    /// Predicted time of one execution, seconds.
    pub predicted_seconds: f64,
    /// Predicted time of one execution if each transfer used only one path, seconds.
    pub direct_seconds: f64,
    /// Total size of the plan's transfers, bytes. For a plan of `mp_node_plan` it includes the transfers of all ranks.
    pub bytes: u64,
    /// Total number of paths that the plan's transfers use.
    pub paths: u32,
    /// Number of operations (copies, waits, signals) that one execution performs.
    pub operations: u32,
    /// Size of the plan's staging buffers on the device where they are largest, bytes.
    pub staging_bytes: u64,
    /// Median of the last measured execution times of the plan variant that is in use, seconds. 0 if no execution was
    /// measured. See `mp_plan_options_t::adapt`.
    pub measured_seconds: f64,
    /// Median of the last measured execution times of the plan variant that uses only direct copies, seconds. 0 if no
    /// such execution was measured.
    pub measured_direct_seconds: f64,
}

/// Statistics of a context since its creation. Initialise with `MP_STATISTICS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_statistics_t {
    /// Size of this struct, bytes. `MP_STATISTICS_INIT` sets it.
    pub size: usize,
    /// Number of `mp_plan` calls whose plan was found in the plan cache.
    pub plan_cache_hits: u64,
    /// Number of `mp_plan` calls whose plan was not found in the plan cache.
    pub plan_cache_misses: u64,
    /// Number of plans evicted from the plan cache to stay within its limit.
    pub plan_cache_evictions: u64,
    /// Number of plans that are in the plan cache now.
    pub plan_cache_entries: u64,
    /// Number of plan executions that were enqueued.
    pub executions: u64,
    /// Total size of the transfers of all enqueued executions, bytes.
    pub bytes: u64,
    /// Number of plan cache misses for which the library reused a cached plan with equal transfers at other addresses.
    pub plan_cache_shape_hits: u64,
    /// Number of plan executions that were launched as one CUDA graph. All `graph_` counters are 0 on a backend without
    /// graphs.
    pub graph_launches: u64,
    /// Number of graph launches that reused a graph without any update.
    pub graph_hits: u64,
    /// Number of graph launches that had to instantiate a graph or to update its addresses first.
    pub graph_misses: u64,
    /// Number of CUDA graph instantiations.
    pub graph_instantiations: u64,
    /// Number of times that the addresses in an instantiated CUDA graph were updated.
    pub graph_repoints: u64,
    /// Number of graph launches that waited for an earlier launch because all graphs of the plan were in use.
    pub graph_waits: u64,
    /// Number of plans with CUDA graphs in the context's cache now. Plans that differ only in their addresses count
    /// once.
    pub graph_programs: u64,
    /// Number of instantiated CUDA graphs in the context's cache now.
    pub graph_entries: u64,
}

/// Resources that a context holds on one device. Initialise with `MP_DEVICE_STATISTICS_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_device_statistics_t {
    /// Size of this struct, bytes. `MP_DEVICE_STATISTICS_INIT` sets it.
    pub size: usize,
    /// Size of the context's staging buffers on the device, bytes. 0 until a plan first stages data there.
    pub staging_bytes: u64,
    /// Size of the memory from `mp_alloc` on the device that is not yet freed, bytes.
    pub allocated_bytes: u64,
    /// Number of streams from `mp_stream_create` on the device that are not yet destroyed.
    pub streams: u64,
}

/// Details of the last failed call on a thread. Initialise with `MP_ERROR_INFO_INIT`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct mp_error_info_t {
    /// Size of this struct, bytes. `MP_ERROR_INFO_INIT` sets it.
    pub size: usize,
    /// Status that the failed call returned.
    pub status: mp_status_t,
    /// Error code of the GPU driver or the operating system. 0 if neither reported an error.
    pub driver_code: i64,
    /// Name of the function parameter that caused the error. NULL if no parameter did.
    pub argument: *const c_char,
    /// Error text, as `mp_last_error` returns it.
    pub message: *const c_char,
}

/// Callback that receives log records. It may be called on any thread. `target` (the module that logs) and `message`
/// are valid only during the call. The callback must not call functions of this library, and must return: no `longjmp`,
/// no exception.
pub type mp_log_callback_t =
    Option<unsafe extern "C" fn(level: mp_log_level_value, target: *const c_char, message: *const c_char, user: *mut c_void)>;

/// Callback that gathers `bytes` bytes from every rank of a node on every rank, like `MPI_Allgather`. `receive` has
/// room for the data of all ranks, in rank order. The callback returns 0 on success and any other number on failure. It
/// must return: no `longjmp`, no exception.
pub type mp_allgather_t = Option<unsafe extern "C" fn(user: *mut c_void, send: *const c_void, receive: *mut c_void, bytes: usize) -> c_int>;

/// Callback that enqueues in `stream` the kernels that produce the data of one execution of a plan with partitions.
/// `triggers` has `count` elements: the triggers of the transfers that this rank passed, in the same order.
///
/// The callback returns 0 on success and any other number on failure. It may call functions of this library, except
/// collective ones (those that all ranks call together). It must return: no `longjmp`, no exception.
pub type mp_produce_t =
    Option<unsafe extern "C" fn(user: *mut c_void, triggers: *const mp_trigger_t, count: usize, stream: mp_stream_t) -> c_int>;

/// Callback that runs on a CPU thread, in stream order. It must return: no `longjmp`, no exception.
pub type mp_host_function_t = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// Callback that receives the final status of a request. It must return: no `longjmp`, no exception.
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
