/*
 * mpgpu: multi-path data movement between the GPUs and the host memory of one node.
 *
 *     mp_context_t context;
 *     mp_context_create(NULL, &context);
 *     mp_transfer_t halo[2] = {{d1, 1, s0, 0, bytes}, {d0, 0, s1, 1, bytes}};
 *     mp_plan_t plan;
 *     mp_plan(context, halo, 2, NULL, &plan);
 *     for (;;) {                                   each time step
 *         mp_execute(plan, stream, NULL);          in stream order, does not wait
 *     }
 *     mp_plan_destroy(plan);
 *     mp_context_destroy(context);
 *
 * Rules for every function:
 *
 * - Units are bytes and seconds.
 * - Devices are numbers. GPUs are 0, 1, 2 and so on. The host memory of the NUMA domains is MP_DEVICE_HOST (-1), -2, -3
 *   and so on.
 * - A function returns MP_SUCCESS or an error, which mp_last_error describes. Outputs are written only on success,
 *   unless stated otherwise.
 * - No Rust panic or C++ exception leaves the library. If memory for the arguments of a call is missing, the call
 *   returns MP_ERROR_OUT_OF_MEMORY. The library aborts the process only if the system cannot provide a few KiB of host
 *   memory.
 * - A pointer is NULL, or aligned for its type and valid for as long as the function requires. NULL is rejected
 *   if the function does not document its meaning. The library accesses the memory during the call only, unless stated
 *   otherwise.
 * - `destroy` releases objects (contexts, plans, requests, streams, events), `free` releases memory, and `close`
 *   releases mapped memory of another process.
 * - Functions with `synchronize` in their name, and mp_wait, block the calling thread. Functions named
 *   `mp_stream_wait_...` do not block: they make later work in the stream wait.
 * - An unknown value of an enumeration is rejected with MP_ERROR_INVALID_ARGUMENT.
 * - A handle that is already destroyed or of another kind is rejected with MP_ERROR_INVALID_HANDLE.
 * - Initialise a struct that starts with `size` by its _INIT macro. The library can then support programs compiled
 *   with another version of this header.
 * - Every function may be called from any thread at any time, unless stated otherwise.
 * - A host function is a function that a stream calls on a CPU thread (mp_stream_launch_host, cudaLaunchHostFunc).
 *   Functions that must not be called from it say so.
 *
 * Generated from rust/ffi by cbindgen: change that, not this file.
 */
#ifndef MPGPU_H
#define MPGPU_H

#include <stddef.h>
#include <stdint.h>

/// Device number of the host memory of NUMA domain 0. GPUs have the numbers 0, 1, 2 and so on.
#define MP_DEVICE_HOST (-1)

/// Device number of the host memory of a NUMA domain. `MP_DEVICE_HOST_NUMA(0)` equals `MP_DEVICE_HOST`.
#define MP_DEVICE_HOST_NUMA(domain) (-1 - (domain))

/// Device number with which the library itself finds the device that owns the address. Accepted in transfers.
///
/// An address that the library does not know counts as pageable host memory. This includes the address of freed memory.
/// If a transfer states the number of a GPU instead, the library rejects an address that is not in memory of that GPU.
#define MP_DEVICE_AUTO 0x7ffffffe

/// Stream: a queue whose work runs in order. The type is the same as `cudaStream_t`. NULL is the default stream.
typedef struct CUstream_st *mp_stream_t;

/// Event: a point in a stream for which other streams can wait. The C type is that of `cudaEvent_t`. Functions of this
/// library that record an event or wait for one also accept a `cudaEvent_t`.
typedef struct CUevent_st *mp_event_t;

/// Context: the library's state for one process: backend, topology, plan cache, streams and memory. The handle is a
/// number, not an address, so the library can detect destroyed contexts.
typedef struct mp_context *mp_context_t;

/// Plan: a prepared batch of copies between fixed addresses that can be executed many times. The handle is a number, not
/// an address.
typedef struct mp_plan_s *mp_plan_t;

/// Node: a group of processes (ranks) on one machine that plan their copies together. The handle is a number, not an
/// address.
typedef struct mp_node_s *mp_node_t;

/// Messenger: object through which one rank exchanges messages with the other ranks of a node. The handle is a number,
/// not an address.
typedef struct mp_messenger_s *mp_messenger_t;

/// Rank number that matches messages from any rank. Accepted by receives and probes; never returned. It differs from
/// every constant of MPI.
#define MP_ANY_RANK (-2147483647)

/// Rank number that represents rank 0 of an MPI communicator if that rank is on another node. `MP_RANK_ELSEWHERE(rank)`
/// gives the number for any other rank.
#define MP_FIRST_ELSEWHERE (-1073741824)

/// Rank number that represents rank `rank` of an MPI communicator if that rank is on another node. Every function that
/// takes a rank of the node rejects this number, with an error text such as "rank 5 is on another node".
#define MP_RANK_ELSEWHERE(rank) (MP_FIRST_ELSEWHERE - (rank))

/// Value of `mp_node_end_t::window` for memory of the other rank if the calling rank does not know its position.
/// `mp_node_end_t::offset` then holds a tag. The other rank passes a descriptor of the same transfer with the same tag,
/// and this descriptor states the position.
#define MP_BY_TAG 0xFFFFFFFF

/// Request: an execution of a plan, a send, a receive or a fetch that the program can wait for. The handle is a number,
/// not an address.
typedef struct mp_request *mp_request_t;

/// Major version of this header. It increases with incompatible changes.
#define MP_VERSION_MAJOR 0

/// Minor version of this header. It increases with new functions and, before version 1.0, also with incompatible
/// changes.
#define MP_VERSION_MINOR 1

/// Patch version of this header.
#define MP_VERSION_PATCH 0

/// Version of this header as one number that can be compared: 10000 * major + 100 * minor + patch.
#define MP_VERSION (((MP_VERSION_MAJOR * 10000) + (MP_VERSION_MINOR * 100)) + MP_VERSION_PATCH)

/// Value of `mp_plan_options_t::relay_gpus` that forbids paths through other GPUs.
#define MP_RELAY_NONE 9223372036854775808ull

/// Maximum size of the metadata that a message can carry, bytes.
#define MP_MESSAGE_METADATA_BYTES 256

/// Status that a function returns. The numeric values of the statuses are never reused or changed.
typedef enum {
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
} mp_status_t;

/// Execution backend of a context.
typedef enum {
    /// Backend that the environment variable `MPGPU_BACKEND` selects. If it is not set, CUDA if a GPU is available,
    /// otherwise the host backend.
    MP_BACKEND_AUTO = 0,
    /// Virtual devices, implemented by CPU threads. The data are really copied; predicted times come from a model.
    MP_BACKEND_HOST = 1,
    /// NVIDIA GPUs.
    MP_BACKEND_CUDA = 2,
} mp_backend_t;

/// Mechanism by which a plan is executed.
typedef enum {
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
} mp_engine_t;

/// Three-valued option: on, off or the default.
typedef enum {
    /// Value from the environment variable of the option. If it is not set, the library decides.
    MP_DEFAULT = 0,
    /// Enabled.
    MP_ON = 1,
    /// Disabled.
    MP_OFF = 2,
} mp_switch_t;

/// Method by which streams wait for signals.
typedef enum {
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
} mp_signal_wait_t;

/// Agent: the mechanism that moves the partitions of a transfer to their destination: copy engines, or the kernels that
/// produce the data. With copy engines, a partition is copied as soon as its producer (the kernel that computes it) has
/// marked it ready.
typedef enum {
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
} mp_agent_t;

/// Collective operation that only copies data between participants. The participants are devices of one process or
/// ranks of a node. There are no reductions.
typedef enum {
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
} mp_collective_t;

/// Output format of the functions that describe an object.
typedef enum {
    /// Readable text. The layout may change between versions.
    MP_FORMAT_TEXT = 0,
    /// One JSON object.
    MP_FORMAT_JSON = 1,
} mp_format_t;

/// Log level. Each level includes all levels with smaller numbers.
typedef enum {
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
} mp_log_level_t;

/// Details of the last failed call on a thread. Initialise with `MP_ERROR_INFO_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_ERROR_INFO_INIT` sets it.
    size_t size;
    /// Status that the failed call returned.
    mp_status_t status;
    /// Error code of the GPU driver or the operating system. 0 if neither reported an error.
    int64_t driver_code;
    /// Name of the function parameter that caused the error. NULL if no parameter did.
    const char *argument;
    /// Error text, as `mp_last_error` returns it.
    const char *message;
} mp_error_info_t;

/// Callback that receives log records. It may be called on any thread. `target` (the module that logs) and `message`
/// are valid only during the call. The callback must not call functions of this library, and must return: no `longjmp`,
/// no exception.
typedef void (*mp_log_callback_t)(mp_log_level_t level, const char *target, const char *message, void *user);

/// Options for creating a context. Initialise with `MP_CONTEXT_OPTIONS_INIT`. For a field that is 0 or NULL the library
/// uses the environment variable of the option and, if it is not set, the default. docs/reference/environment.md lists
/// the variables.
typedef struct {
    /// Size of this struct, bytes. `MP_CONTEXT_OPTIONS_INIT` sets it.
    size_t size;
    /// Execution backend of the context.
    mp_backend_t backend;
    /// Topology of the machine: name of a built-in preset or path of a topology file, UTF-8. Read during the call only.
    const char *topology;
    /// Maximum size of the context's staging buffers on each device, bytes. The pinned host buffers through which CPU
    /// threads copy pageable memory have a separate limit of the same size. 0 selects the default.
    uint64_t staging_bytes;
    /// Maximum number of plans in the plan cache. Planning a cached request again takes only a look-up. 0 selects the
    /// default.
    uint64_t cache_plans;
    /// Method by which streams wait for signals.
    mp_signal_wait_t signal_wait;
    /// Maximum number of CPU threads that copy between pageable and pinned host memory, at most 256. 0 selects the
    /// default. -1 selects no threads; the driver then makes these copies.
    int32_t host_threads;
    /// Maximum number of plans whose CUDA graphs the context caches. Plans that differ only in their addresses count
    /// once. If the limit is exceeded, the context drops the graphs of the plan that was launched least recently. 0
    /// selects the default.
    uint64_t cache_graphs;
} mp_context_options_t;

/// Statistics of a context since its creation. Initialise with `MP_STATISTICS_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_STATISTICS_INIT` sets it.
    size_t size;
    /// Number of `mp_plan` calls whose plan was found in the plan cache.
    uint64_t plan_cache_hits;
    /// Number of `mp_plan` calls whose plan was not found in the plan cache.
    uint64_t plan_cache_misses;
    /// Number of plans evicted from the plan cache to stay within its limit.
    uint64_t plan_cache_evictions;
    /// Number of plans that are in the plan cache now.
    uint64_t plan_cache_entries;
    /// Number of plan executions that were enqueued.
    uint64_t executions;
    /// Total size of the transfers of all enqueued executions, bytes.
    uint64_t bytes;
    /// Number of plan cache misses for which the library reused a cached plan with equal transfers at other addresses.
    uint64_t plan_cache_shape_hits;
    /// Number of plan executions that were launched as one CUDA graph. All `graph_` counters are 0 on a backend without
    /// graphs.
    uint64_t graph_launches;
    /// Number of graph launches that reused a graph without any update.
    uint64_t graph_hits;
    /// Number of graph launches that had to instantiate a graph or to update its addresses first.
    uint64_t graph_misses;
    /// Number of CUDA graph instantiations.
    uint64_t graph_instantiations;
    /// Number of times that the addresses in an instantiated CUDA graph were updated.
    uint64_t graph_repoints;
    /// Number of graph launches that waited for an earlier launch because all graphs of the plan were in use.
    uint64_t graph_waits;
    /// Number of plans with CUDA graphs in the context's cache now. Plans that differ only in their addresses count
    /// once.
    uint64_t graph_programs;
    /// Number of instantiated CUDA graphs in the context's cache now.
    uint64_t graph_entries;
} mp_statistics_t;

/// Resources that a context holds on one device. Initialise with `MP_DEVICE_STATISTICS_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_DEVICE_STATISTICS_INIT` sets it.
    size_t size;
    /// Size of the context's staging buffers on the device, bytes. 0 until a plan first stages data there.
    uint64_t staging_bytes;
    /// Size of the memory from `mp_alloc` on the device that is not yet freed, bytes.
    uint64_t allocated_bytes;
    /// Number of streams from `mp_stream_create` on the device that are not yet destroyed.
    uint64_t streams;
} mp_device_statistics_t;

/// Callback that runs on a CPU thread, in stream order. It must return: no `longjmp`, no exception.
typedef void (*mp_host_function_t)(void *user);

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
typedef struct {
    /// Start address of the destination.
    void *dst;
    /// Device that owns the destination, or `MP_DEVICE_AUTO`.
    int32_t dst_device;
    /// Start address of the source.
    const void *src;
    /// Device that owns the source, or `MP_DEVICE_AUTO`.
    int32_t src_device;
    /// Number of bytes to copy. If 0, nothing is copied, and the addresses may be NULL.
    uint64_t bytes;
} mp_transfer_t;

/// Options for creating a plan. Initialise with `MP_PLAN_OPTIONS_INIT`. For a field that is 0 the library uses the
/// environment variable of the option and, if it is not set, decides by its performance model.
typedef struct {
    /// Size of this struct, bytes. `MP_PLAN_OPTIONS_INIT` sets it.
    size_t size;
    /// Mechanism by which the plan is executed.
    mp_engine_t engine;
    /// Maximum number of paths over which one transfer is distributed. 0 lets the library choose.
    uint32_t max_paths;
    /// `MP_ON` (the default) if copies between GPUs may use a path through host memory.
    mp_switch_t host_path;
    /// Size of the chunks in which data pass through staging buffers, bytes, at least 4096. The library uses smaller
    /// chunks if the staging limit requires it. 0 lets the library choose.
    uint64_t chunk_bytes;
    /// Minimum size of a transfer that uses several paths, bytes. Smaller transfers use one path. 0 lets the library
    /// choose.
    uint64_t min_bytes;
    /// Maximum size of the plan's staging buffers on each device, bytes. It must not exceed the limit of the context. 0
    /// selects the limit of the context.
    uint64_t staging_bytes;
    /// Bit mask of the GPUs through which the data of other devices may be forwarded. Bit `g` represents GPU `g`. In
    /// plans of `mp_node_plan` the GPUs of the node are counted rank by rank, in the order in which each rank lists or
    /// sees them. `MP_RELAY_NONE` allows no GPU. 0 allows all GPUs, unless the environment variable states otherwise.
    uint64_t relay_gpus;
    /// `MP_ON` (the default) if executions measure variants of the plan and then use the fastest. There are up to three
    /// variants: with all paths, with all paths but half as much data on the indirect paths, and with only direct
    /// paths. In a plan of `mp_node_plan`, all ranks use the same variant in each execution. If its transfers are
    /// divided into partitions, this option has an effect only with `MP_AGENT_AUTO` and
    /// `mp_partition_options_t::arrivals` off.
    mp_switch_t adapt;
    /// Number of chunks into which data are divided on each path through another GPU. Overrides `chunk_bytes`. The
    /// library uses more chunks if the staging limit requires it. 0 lets the library choose.
    uint32_t relay_chunks;
    /// Number of chunks into which data are divided on each path through host memory. Overrides `chunk_bytes`. The
    /// library uses more chunks if the staging limit requires it. 0 lets the library choose.
    uint32_t host_chunks;
} mp_plan_options_t;

/// Properties of a plan, for `mp_plan_get_info`. Initialise with `MP_PLAN_INFO_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_PLAN_INFO_INIT` sets it.
    size_t size;
    /// Predicted time of one execution, seconds.
    double predicted_seconds;
    /// Predicted time of one execution if each transfer used only one path, seconds.
    double direct_seconds;
    /// Total size of the plan's transfers, bytes. For a plan of `mp_node_plan` it includes the transfers of all ranks.
    uint64_t bytes;
    /// Total number of paths that the plan's transfers use.
    uint32_t paths;
    /// Number of operations (copies, waits, signals) that one execution performs.
    uint32_t operations;
    /// Size of the plan's staging buffers on the device where they are largest, bytes.
    uint64_t staging_bytes;
    /// Median of the last measured execution times of the plan variant that is in use, seconds. 0 if no execution was
    /// measured. See `mp_plan_options_t::adapt`.
    double measured_seconds;
    /// Median of the last measured execution times of the plan variant that uses only direct copies, seconds. 0 if no
    /// such execution was measured.
    double measured_direct_seconds;
} mp_plan_info_t;

/// One copy of a collective operation, from the send buffer of one participant to the receive buffer of another or the
/// same participant.
typedef struct {
    /// Index of the participant that sends, from 0.
    uint32_t from;
    /// Index of the participant that receives, from 0.
    uint32_t to;
    /// Offset of the data from the start of the sender's send buffer, bytes.
    uint64_t send_offset;
    /// Offset of the data from the start of the receiver's receive buffer, bytes.
    uint64_t receive_offset;
    /// Number of bytes to copy.
    uint64_t bytes;
} mp_piece_t;

/// Properties of a message, and the caller's buffer for its metadata. Initialise with `MP_MESSAGE_INFO_INIT`. To
/// receive metadata, set `metadata` and `metadata_capacity`. The library fills the other fields.
typedef struct {
    /// Size of this struct, bytes. `MP_MESSAGE_INFO_INIT` sets it.
    size_t size;
    /// Tag of the message.
    uint64_t tag;
    /// Size of the message without metadata, bytes.
    uint64_t bytes;
    /// Rank that sent the message.
    uint32_t rank;
    /// Size of the message's metadata, bytes. It can be larger than `metadata_capacity`.
    uint32_t metadata_bytes;
    /// Buffer of the caller, to which up to `metadata_capacity` bytes of metadata are written. NULL if
    /// `metadata_capacity` is 0.
    void *metadata;
    /// Size of the buffer at `metadata`, bytes. `MP_MESSAGE_METADATA_BYTES` is always enough.
    size_t metadata_capacity;
} mp_message_info_t;

/// Callback that receives the final status of a request. It must return: no `longjmp`, no exception.
typedef void (*mp_request_function_t)(void *user, mp_status_t status);

/// Options of `mp_context_probe`, which measures the machine. Initialise with `MP_PROBE_OPTIONS_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_PROBE_OPTIONS_INIT` sets it.
    size_t size;
    /// Path of the topology file to which the probe (measurement of the machine) writes its result, UTF-8. Read during
    /// the call only. NULL selects a file in the user's cache directory, which contexts on the same GPUs find together
    /// with the tuning file next to it.
    const char *file;
    /// `MP_ON` (the default) if the topology file that the probe produces is stored on disk. If `MP_OFF`, only
    /// `mp_context_probed` returns it.
    mp_switch_t keep;
    /// `MP_ON` if the probe makes fewer and shorter measurements and tunes nothing. Off by default.
    mp_switch_t quick;
} mp_probe_options_t;

/// Handle of a memory range that other processes on the same machine can map (`mp_memory_import`). It is a plain value
/// of fixed size and owns nothing. It can be sent over MPI or any other channel. It is valid until the exporting
/// process frees the memory or destroys its context.
typedef struct {
    /// Opaque content.
    uint8_t bytes[128];
} mp_memory_handle_t;

/// Signal: the address of a 64-bit counter, and the value to set it to or to wait for. The counter is in memory of a
/// context or in imported memory. On CUDA it must be in host memory from `mp_alloc_shared`.
typedef struct {
    /// Address of the counter, aligned to 8 bytes. New memory holds 0. To start with another value, write it before
    /// other processes know the address.
    uint64_t *counter;
    /// Value to set, or value for which to wait. A wait ends when the counter is equal or greater. The comparison is
    /// cyclic, so a counter may overflow.
    uint64_t value;
} mp_signal_t;

/// Callback that gathers `bytes` bytes from every rank of a node on every rank, like `MPI_Allgather`. `receive` has
/// room for the data of all ranks, in rank order. The callback returns 0 on success and any other number on failure. It
/// must return: no `longjmp`, no exception.
typedef int (*mp_allgather_t)(void *user, const void *send, void *receive, size_t bytes);

/// Options of `mp_node_create`. Initialise with `MP_NODE_OPTIONS_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_NODE_OPTIONS_INIT` sets it.
    size_t size;
    /// GPUs that this rank uses, as device numbers of its context. NULL selects all GPUs that are visible to the rank.
    /// GPUs that are visible to several ranks are then divided evenly among these ranks.
    const int32_t *devices;
    /// Number of elements of `devices`. 0 if `devices` is NULL.
    size_t device_count;
    /// Path of a Unix socket over which the ranks connect to each other if they have no allgather function. All ranks
    /// pass the same path, in a directory that all of them can write to. The ranks wait up to one minute for each
    /// other. NULL if an allgather function is passed.
    const char *socket;
    /// Reason why this rank cannot join the node. NULL if the rank can join. If a reason is set, `mp_node_create` fails
    /// on all ranks, the other ranks receive the reason, and the context of this rank may be NULL.
    const char *failure;
} mp_node_options_t;

/// Window: memory range of a rank from or to which transfers of `mp_node_plan` copy.
typedef struct {
    /// Start address of the window.
    void *memory;
    /// Size of the window, bytes. If 0, the address may be NULL.
    uint64_t bytes;
} mp_window_t;

/// Source or destination of a transfer between ranks: a position in a window (memory range) of a rank.
typedef struct {
    /// Rank that owns the memory.
    uint32_t rank;
    /// Index, from 0, in the list of windows that the owning rank passes to `mp_node_plan`. `MP_BY_TAG` if the calling
    /// rank does not know the position in the memory of the other rank.
    uint32_t window;
    /// Offset from the start of the window, bytes. If `window` is `MP_BY_TAG`: the tag of the transfer, which may be
    /// any number.
    uint64_t offset;
} mp_node_end_t;

/// Copy from a window (memory range) of one rank to a window of another or the same rank.
typedef struct {
    /// Destination of the copy.
    mp_node_end_t dst;
    /// Source of the copy.
    mp_node_end_t src;
    /// Number of bytes to copy.
    uint64_t bytes;
} mp_node_transfer_t;

/// Options for dividing the transfers of a plan into partitions, which are copied one by one as kernels produce them.
/// Initialise with `MP_PARTITION_OPTIONS_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_PARTITION_OPTIONS_INIT` sets it.
    size_t size;
    /// Number of equal partitions into which each transfer is divided, at most 4096. 0 lets the library choose the
    /// number. For partitions of different sizes, divide the data into several transfers.
    uint32_t count;
    /// Agent (mechanism) that moves the partitions to their destination, for example copy engines. See `mp_agent_t`.
    mp_agent_t agent;
    /// `MP_ON` (the default) if receivers are notified when each partition arrives. With copy engines a notification
    /// takes about 2 us per partition. With `MP_AGENT_PRODUCER` receivers are always notified.
    mp_switch_t arrivals;
    /// `MP_ON` allows `MP_AGENT_AUTO` to have the producing kernels store their results directly at the destination, so
    /// that no copy is needed. Off by default. Ignored if a kernel cannot access the destination, or if `arrivals` is
    /// on.
    ///
    /// Requirements: the producing kernels write to the address from `mp_trigger_t::step`, nothing reads the sent data
    /// at the source, and the stream passed to `mp_execute` is ordered after the producing kernels.
    mp_switch_t stores;
} mp_partition_options_t;

/// Trigger: addresses and sizes with which kernels mark the partitions of one transfer ready and detect their arrival.
/// Pass this struct to the constructor of `mpgpu::trigger` (mpgpu/trigger.cuh). Initialise with `MP_TRIGGER_INIT`.
///
/// `step` and `counters` point to memory of the device that owns the source. `ready` and `arrived` point to host memory
/// that GPUs can access. All addresses are valid until the plan is destroyed.
typedef struct {
    /// Size of this struct, bytes. `MP_TRIGGER_INIT` sets it.
    size_t size;
    /// Address of two 64-bit words for the producing kernels. The library sets them in each step (execution of the
    /// plan). They are valid for kernels that run after `mp_plan_arm` and before the end of the step.
    /// - Word 0 is the address to which the producing kernels write: the source of the transfer, or its destination if
    ///   the kernels store there directly.
    /// - Word 1 is 1 if the producing kernels must mark partitions ready. It is 0 if all data are copied after the
    ///   kernels have finished, or if the kernels store at the destination and no receiver is notified.
    ///
    /// NULL on a rank that does not send the transfer.
    const uint64_t *step;
    /// Array of flags, one per partition. The producing kernels set a flag to 1 when its partition is ready to be
    /// copied. NULL on a rank that does not send the transfer.
    uint64_t *ready;
    /// Array of flags: `arrived_flags` consecutive flags for each partition, in the order of the partitions. A
    /// partition has arrived when all of its flags are 1. NULL on a rank that does not receive the transfer, or if
    /// receivers are not notified.
    const uint64_t *arrived;
    /// Array of counters, one per partition, in which the producing kernels count how much of the partition they have
    /// written. The counters are 0 between steps. NULL on a rank that does not send the transfer.
    uint64_t *counters;
    /// Size of the transfer, bytes.
    uint64_t bytes;
    /// Size of each partition except the last, which may be smaller, bytes.
    uint64_t partition_bytes;
    /// Number of partitions of the transfer.
    uint32_t partitions;
    /// Number of flags in `arrived` for each partition.
    uint32_t arrived_flags;
} mp_trigger_t;

/// Callback that enqueues in `stream` the kernels that produce the data of one execution of a plan with partitions.
/// `triggers` has `count` elements: the triggers of the transfers that this rank passed, in the same order.
///
/// The callback returns 0 on success and any other number on failure. It may call functions of this library, except
/// collective ones (those that all ranks call together). It must return: no `longjmp`, no exception.
typedef int (*mp_produce_t)(void *user, const mp_trigger_t *triggers, size_t count, mp_stream_t stream);

/// Options of `mp_node_tune_partitions`, which measures how best to divide transfers into partitions. Initialise with
/// `MP_PARTITION_TUNING_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_PARTITION_TUNING_INIT` sets it.
    size_t size;
    /// Bit mask of the agents (values of `mp_agent_t`) to measure, for example `1 << MP_AGENT_COPY_ENGINE`. 0 selects
    /// only copy engines.
    ///
    /// Include `MP_AGENT_PRODUCER` only if the producers write to the address from `mp_trigger_t::step`. Include
    /// `MP_AGENT_AUTO` only if `arrivals` is off. The measurement of `MP_AGENT_AUTO` starts with 48 untimed executions,
    /// in which the library chooses a method. The library lets the producers store at the destination only if the mask
    /// also contains `MP_AGENT_PRODUCER`.
    uint32_t agents;
    /// Number of timed executions of each candidate (combination of an agent and a number of partitions), at most 1000.
    /// 0 selects 7.
    uint32_t rounds;
    /// `MP_ON` (the default) if receivers are notified when each partition arrives, as in `mp_partition_options_t`.
    mp_switch_t arrivals;
    /// Number of thread blocks of the producing kernel. The tuning file stores separate results for each number. Pass 0
    /// if the program always uses the same number of blocks.
    uint32_t blocks;
    /// Path of the tuning file to which rank 0 writes all measurements. The command `mpgpu tune partitions` prints
    /// them. The file is created if it does not exist. NULL selects the file that the environment variable
    /// `MPGPU_TUNING_FILE` names. If the variable is not set either, the measurements are not stored.
    const char *file;
} mp_partition_tuning_t;

/// Options of `mp_messenger_create`. All ranks pass the same options. Initialise with `MP_MESSENGER_OPTIONS_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_MESSENGER_OPTIONS_INIT` sets it.
    size_t size;
    /// Maximum number of pending operations of one rank, from 1 to 65,536. Two groups are counted separately, each with
    /// this limit: sends and described buffers (`mp_message_describe`) that no rank has received or fetched yet, and
    /// receives and fetches that have not ended. Each operation takes 4 KiB of shared memory. 0 selects 1,024.
    uint32_t operations;
    /// Maximum number of messages from one rank that wait at one other rank for a matching receive, from 1 to
    /// 1,048,576. 0 selects 4,096. The limit `operations` also applies.
    uint32_t messages;
} mp_messenger_options_t;

/// Descriptor of a buffer that another rank of the node can copy to its own memory (`mp_message_fetch`). The descriptor
/// is a plain value of fixed size and owns nothing. The program may send it to the other rank in any way.
typedef struct {
    /// Opaque content.
    uint8_t bytes[64];
} mp_message_descriptor_t;

/// Description of a block copy: arrays of blocks of equal size, and index lists that select the blocks to copy.
/// Blocks are, for example, pages of a key-value cache or rows of a table. A layer is a pair of a destination array
/// and a source array. Initialise with `MP_BLOCKS_INIT`.
typedef struct {
    /// Size of this struct, bytes. `MP_BLOCKS_INIT` sets it.
    size_t size;
    /// Addresses of the destination arrays. The array has `layers` elements.
    void *const *dst;
    /// Addresses of the source arrays. The array has `layers` elements.
    const void *const *src;
    /// Number of layers. The same blocks are copied in each layer.
    uint64_t layers;
    /// Size of a block, bytes.
    uint64_t block_bytes;
    /// Number of blocks to copy in each layer.
    uint64_t count;
    /// Distance between the starts of two consecutive blocks of a destination array, bytes. 0 selects `block_bytes`.
    uint64_t dst_stride;
    /// Distance between the starts of two consecutive blocks of a source array, bytes. 0 selects `block_bytes`.
    uint64_t src_stride;
    /// Number of blocks of each destination array. Indices of destination blocks must be smaller.
    uint64_t dst_blocks;
    /// Number of blocks of each source array. Indices of source blocks must be smaller.
    uint64_t src_blocks;
    /// Address of the index list of the destination: `count` unsigned integers in host memory or in memory of a GPU.
    /// NULL selects blocks 0 to `count` - 1.
    const void *dst_index;
    /// Address of the index list of the source: `count` unsigned integers in host memory or in memory of a GPU. NULL
    /// selects blocks 0 to `count` - 1.
    const void *src_index;
    /// Size of an index in both lists, bytes: 4 or 8. Each list must be aligned to this size.
    uint32_t index_bytes;
    /// Must be 0.
    uint32_t reserved;
} mp_blocks_t;

/// Options of a copy of pieces. Initialise with `MP_PIECE_OPTIONS_INIT`. A field with the value 0 selects the
/// default.
typedef struct {
    /// Size of this struct, bytes. `MP_PIECE_OPTIONS_INIT` sets it.
    size_t size;
    /// Maximum number of multiprocessors that the kernel occupies. 0 selects the value of `MPGPU_KERNEL_BLOCKS`,
    /// which is 4 by default. Four multiprocessors fill a PCIe 5 link.
    uint32_t multiprocessors;
    /// Switch for the pacing of writes to host memory. The default is the value of `MPGPU_PACED_WRITES`, or on if this
    /// variable is not set. If writes are paced, each group of threads of the kernel waits until its stores have
    /// arrived in host memory before it stores more. This bounds the bytes in flight. Without pacing, writes saturate
    /// the link, and a saturated link slows down other work of the GPU to about half of its speed. If the copy does not
    /// write to host memory, the switch has no effect.
    mp_switch_t paced;
    /// Bit mask of the GPUs whose PCIe links may carry a part of a copy between host memory and another GPU. Bit `g`
    /// represents GPU `g`. A kernel on each such GPU copies a part directly, and later work in the stream waits for
    /// these kernels. If the mask is not 0, the first call creates the contexts of these GPUs, which takes up to a
    /// second. `MP_RELAY_NONE` allows no other GPU. 0 allows those of `MPGPU_RELAY_GPUS`, or, if it is not set, all
    /// GPUs whose context the process has created.
    uint64_t relay_gpus;
} mp_piece_options_t;

/// Piece of `mp_copy_pieces`: a contiguous range of bytes to copy.
typedef struct {
    /// First byte of the destination.
    void *dst;
    /// First byte of the source.
    const void *src;
    /// Size, bytes. 0 is allowed.
    uint64_t bytes;
} mp_segment_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/// Returns the version of the library as a number in the format of `MP_VERSION`. May be called from any thread. Never
/// fails.
uint32_t mp_version(void);

/// Returns the version of the library as text, for example `0.1.0`. The text has static storage and must not be freed.
/// May be called from any thread. Never fails.
const char *mp_version_string(void);

/// Returns the name of a status, for example `MP_ERROR_OVERLAP`, or `unknown status` for any other number.
///
/// The text has static storage. May be called from any thread. Never fails, and does not change the last error.
const char *mp_status_string(mp_status_t status);

/// Returns the error text of the last call that failed on this thread. The text names the invalid value and, if
/// possible, the remedy.
///
/// The result is never NULL. It is empty if no call on this thread has failed. Successful calls do not change it. The
/// library owns the text. It is valid until the next call that fails on this thread, or until the thread ends.
const char *mp_last_error(void);

/// Fills `*info` with details of the last call that failed on this thread. `info->status` is `MP_SUCCESS` if no call on
/// this thread has failed.
///
/// The library owns the texts to which `*info` points. They are valid until the next call that fails on this thread, or
/// until the thread ends.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` if `info` is NULL or `info->size` is wrong. This error then becomes the last
/// error.
mp_status_t mp_last_error_info(mp_error_info_t *info);

/// Sets the last error of the calling thread, which `mp_last_error` and `mp_last_error_info` report. Libraries that use
/// mpgpu call this function to report their own errors. The functions of mpgpu/halo_indexed.h are an example.
///
/// - `status` is the status that the failed function returns. `MP_SUCCESS` is not allowed.
/// - `driver_code` is the error code of the driver or the operating system, or 0.
/// - `argument` is the name of the invalid argument, or NULL.
/// - `message` is the error text. NULL selects the name of the status.
///
/// The texts are copied.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` if `status` is `MP_SUCCESS` or is not a value of `mp_status_t`. This error then
/// becomes the last error.
mp_status_t mp_last_error_set(mp_status_t status, int64_t driver_code, const char *argument, const char *message);

/// Sets the callback that receives the library's log records of `max_level` and all lower levels, for the whole
/// process. A NULL `callback` or `MP_LOG_OFF` removes the callback. The library passes `user` to the callback
/// unchanged.
///
/// While a callback is set, the library writes no log records to standard error unless `MPGPU_LOG` is set. When this
/// call returns, the previous callback is no longer running on any thread, so the memory behind its `user` may be
/// freed. May be called from any thread, but not from inside the callback.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` for an unknown level, and for a call from inside the callback.
/// - `MP_ERROR_NOT_SUPPORTED` if the program has installed its own logger of the Rust crate `log`. That logger receives
///   the records instead.
mp_status_t mp_log_set_callback(mp_log_level_t max_level, mp_log_callback_t callback, void *user);

/// Creates a context: chooses the backend, reads the topology, and reads the environment variables. `header_version` is
/// the `MP_VERSION` of the header with which the program was compiled. Programs call `mp_context_create` instead, which
/// passes this version.
///
/// NULL `options` selects all defaults. The caller owns `*context` and destroys it with `mp_context_destroy`. A process
/// may create several contexts; they share no state. Threads that the library starts block all POSIX signals, except
/// those that report a fault of the thread itself, such as SIGSEGV. May be called from any thread.
///
/// `fork`: in the child, the parent's handles cannot be used. Destroying the parent's contexts, plans and requests does
/// nothing there, and every other call with them fails with `MP_ERROR_INVALID_HANDLE`. The child may create its own
/// contexts. On CUDA this works only if the child was forked before the parent first used the driver, or after the
/// child has called `exec`.
///
/// Errors:
/// - `MP_ERROR_VERSION_MISMATCH` if the header and the library are incompatible.
/// - `MP_ERROR_ENVIRONMENT` if an environment variable of the library has an invalid value. An unknown variable whose
///   name starts with `MPGPU_` only causes a log warning.
/// - `MP_ERROR_NOT_SUPPORTED` for a backend or a setting that this build does not support.
/// - `MP_ERROR_TOPOLOGY`, `MP_ERROR_INVALID_ARGUMENT`.
mp_status_t mp_context_create_versioned(const mp_context_options_t *options,
                                        uint32_t header_version,
                                        mp_context_t *context);

/// Destroys a context. Blocks until all of its work has finished, then frees its staging buffers and all objects that
/// the caller has not destroyed. If memory from `mp_alloc` was not freed, a log warning lists it. Plans and requests of
/// the context become invalid handles.
///
/// The call first cancels operations that wait for another process or kernel: messages without a match, and executions
/// whose partitions were not marked ready. These operations end within 10 seconds. The call still blocks while a stream
/// of the context waits for a signal. It also blocks while a stream waits for another rank that is running but does not
/// execute its part of a plan of `mp_node_plan`, or does not post the matching send or receive.
///
/// May be called from any thread, but not from a host function (`mp_stream_launch_host`) or a log callback. Calls that
/// other threads make with the context during this call fail with `MP_ERROR_INVALID_HANDLE`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. Any other error is the first failure of outstanding work or of freeing resources.
/// The context is destroyed even then.
mp_status_t mp_context_destroy(mp_context_t context);

/// Returns the backend and the numbers of devices of a context.
///
/// `*backend` receives `MP_BACKEND_HOST` or `MP_BACKEND_CUDA`. GPUs are numbered from 0 to `*gpus - 1`. The host memory
/// of the NUMA domains has the device numbers `MP_DEVICE_HOST_NUMA(0)` to `MP_DEVICE_HOST_NUMA(*host_domains - 1)`.
/// Each output pointer may be NULL. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_context_get_info(mp_context_t context, mp_backend_t *backend, int32_t *gpus, int32_t *host_domains);

/// Writes a description of the context: version, backend, topology, settings, and the tuning file if one is in use.
///
/// `*length` receives the size of the text in bytes, including the final NUL. If `text` is NULL, only `*length` is
/// written. Otherwise the text is written to the `capacity` bytes at `text`. May be called from any thread.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_INVALID_ARGUMENT` if the format is unknown or `length` is NULL.
/// - `MP_ERROR_INVALID_ARGUMENT` also if `capacity` is too small. `*length` then receives the required size, and `text`
///   is not written.
mp_status_t mp_context_describe(mp_context_t context, mp_format_t format, char *text, size_t capacity, size_t *length);

/// Fills `*statistics` with the statistics of the context since its creation. Calls that run concurrently on other
/// threads may not be counted yet. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `statistics` is NULL or `statistics->size` is
/// wrong.
mp_status_t mp_context_statistics(mp_context_t context, mp_statistics_t *statistics);

/// Fills `*statistics` with the resources that the context holds on `device` now. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` if `statistics` is NULL or
/// `statistics->size` is wrong.
mp_status_t mp_context_device_statistics(mp_context_t context, int32_t device, mp_device_statistics_t *statistics);

/// Allocates `bytes` bytes on `device`. The memory is aligned to at least 256 bytes, and its contents are undefined.
///
/// If `device` is a GPU, this is GPU memory, which other processes can map. The CPU can access it on the host backend,
/// but not on CUDA. If `device` is a host domain, this is pinned host memory, which GPUs access directly. On CUDA
/// larger host buffers are distributed over the CPU sockets (docs/guide/gpus.md). For host memory that other processes
/// can map, use `mp_alloc_shared`.
///
/// The caller owns `*memory` until `mp_free`. Destroying the context also frees it. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_OUT_OF_MEMORY`; `MP_ERROR_INVALID_ARGUMENT`
/// if `bytes` is 0 or `memory` is NULL.
mp_status_t mp_alloc(mp_context_t context, int32_t device, uint64_t bytes, void **memory);

/// Allocates memory that other processes can map after `mp_memory_export`. Parameters and ownership are those of
/// `mp_alloc`. The caller frees the memory with `mp_free`. May be called from any thread.
///
/// Host memory: use this function if another process has to map it, because host memory from `mp_alloc` cannot be
/// shared. The memory is zeroed. Each allocation uses one file descriptor. On CUDA, all pages of an allocation of 4 MiB
/// or more are resident when the call returns. The pages are distributed over the CPU sockets, or are on the NUMA node
/// that `device` states.
///
/// GPU memory: sizes are rounded up to multiples of 2 MiB. Other processes can map the memory even if another library,
/// for example UCX inside MPI, has already opened it. MPI itself is slower with this memory than with memory from
/// `mp_alloc`.
///
/// Errors: the errors of `mp_alloc`; `MP_ERROR_NOT_SUPPORTED` if the system cannot create the shared memory file or has
/// no free file descriptor (`ulimit -n`).
mp_status_t mp_alloc_shared(mp_context_t context, int32_t device, uint64_t bytes, void **memory);

/// Frees memory from `mp_alloc` or `mp_alloc_shared`. NULL does nothing.
///
/// Like `cudaFree`, the call blocks until all work that the context has enqueued so far has finished. It does not wait
/// for work in a stream that is being captured. Plans that use the memory can no longer be executed. No other thread
/// may enqueue work that uses the memory during the call. May be called from any thread, but not from a host function.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if this context did not allocate `memory`, or if it
/// was already freed.
mp_status_t mp_free(mp_context_t context, void *memory);

/// Frees memory from `mp_alloc` or `mp_alloc_shared` in stream order: after all work that is now enqueued in `stream`.
/// Does not block. NULL does nothing.
///
/// As with `cudaFreeAsync`, work in other streams that uses the memory must be ordered before that point, for example
/// by events. As soon as the call returns, the memory counts as freed: plans and exported handles that use it are
/// rejected. May be called from any thread, but not from a host function.
///
/// The memory is returned to the driver later, and that may block. On CUDA it is returned by a later `mp_free` or
/// `mp_context_destroy`, or by an `mp_alloc` that finds no free memory. On the host backend the next allocation returns
/// it.
///
/// Errors, after which the caller still owns the memory:
/// - `MP_ERROR_INVALID_HANDLE` for the context or the stream.
/// - `MP_ERROR_INVALID_POINTER` under the conditions of `mp_free`.
/// - `MP_ERROR_NOT_SUPPORTED` while `stream` is being captured.
mp_status_t mp_free_async(mp_context_t context, void *memory, mp_stream_t stream);

/// Pins `bytes` bytes of host memory that the program has allocated itself, for example an array, a mapped file or
/// memory of another library. Plans created afterwards copy this memory directly, over all links.
///
/// The caller keeps ownership. Until `mp_memory_unregister`, the memory must stay mapped at the same address, because
/// copies keep using the pinned pages. Read-only memory can be a source if the driver can pin it. Whole pages are
/// pinned. Other processes cannot map this memory.
///
/// Blocks while threads of the library make all pages resident and pin them. If `huge_pages` is 1, huge pages are used
/// if the system supports them. Time per GiB on two H200 (2026-11-27): 85 ms to make pages resident and 33 ms to pin
/// them; with huge pages 48 ms and 22 ms.
///
/// The range is pinned in segments that end at multiples of 1 GiB. A copy that spans several segments counts as several
/// transfers of its plan. A window (`mp_window_t`) must be within one segment.
///
/// May be called from any thread, but not from a host function.
///
/// Errors, after which nothing is pinned:
/// - `MP_ERROR_INVALID_ARGUMENT` if `bytes` is 0, or if `huge_pages` is neither 0 nor 1.
/// - `MP_ERROR_INVALID_POINTER` for NULL, and if the range contains memory of the context, memory of the driver, or
///   unmapped addresses.
/// - `MP_ERROR_NOT_SUPPORTED` for memory that another library has pinned or that the driver cannot pin.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
mp_status_t mp_memory_register(mp_context_t context, void *pointer, uint64_t bytes, int32_t huge_pages);

/// Unpins memory that was pinned by `mp_memory_register`. NULL does nothing.
///
/// Blocks until all work that the context has enqueued so far has finished. Existing plans that use the memory can no
/// longer be executed. New plans treat it as pageable memory. No other thread may enqueue work that uses the memory
/// during the call. May be called from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_INVALID_POINTER` if no memory registered with this context starts at `pointer`.
/// - `MP_ERROR_DRIVER`, after which the memory counts as unregistered.
mp_status_t mp_memory_unregister(mp_context_t context, void *pointer);

/// Maps a regular file read-only. Any part of the mapping can be the source of transfers. `*data` is the address of the
/// first byte of the file, and `*bytes` its size. Copies do not access the mapping: several threads read the file, which
/// causes no page faults.
///
/// `descriptor` must be open for reading. It is duplicated, so the caller may close it.
///
/// If `bypass_cache` is 1, bytes that the page cache of the system does not contain are read by direct I/O, and the
/// page cache is left unchanged. File systems without direct I/O are read through the page cache, with a warning in the
/// log. If `bypass_cache` is 0, bytes are read through the page cache, as by `read`.
///
/// The context owns the mapping until `mp_file_unmap`. Destroying the context also removes it. If the file is truncated
/// or cannot be read, executions that need the missing bytes fail with `MP_ERROR_DRIVER`. If the file is modified during
/// an execution, the destination may contain a mixture of old and new bytes. If the program itself accesses the mapping
/// beyond the end of the file, it receives `SIGBUS`. May be called from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if `descriptor` is negative, if `bypass_cache` is neither 0 nor 1, or if `data` or
///   `bytes` is NULL.
/// - `MP_ERROR_NOT_SUPPORTED` if the file is empty, is not a regular file, is not open for reading, or is on a file
///   system that cannot map files.
/// - `MP_ERROR_DRIVER` if `descriptor` is not open, or if the system cannot map the file for another reason.
/// - `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_file_map(mp_context_t context,
                        int32_t descriptor,
                        int32_t bypass_cache,
                        const void **data,
                        uint64_t *bytes);

/// Removes a mapping that `mp_file_map` has made. NULL has no effect.
///
/// Blocks until all work that the context has enqueued so far has finished. Plans whose source is in the mapping fail if
/// they are executed afterwards. No other thread may enqueue work that uses the mapping during the call. May be called
/// from any thread, but not from a host function.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `data` is not the address of a mapping of this
/// context.
mp_status_t mp_file_unmap(mp_context_t context,
                          const void *data);

/// Creates a stream of `device`. It is not ordered with any other stream, not even with the default stream. On CUDA it
/// is a `cudaStream_t`. The caller owns it and destroys it with `mp_stream_destroy`. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` if `stream` is NULL.
mp_status_t mp_stream_create(mp_context_t context, int32_t device, mp_stream_t *stream);

/// Destroys a stream from `mp_stream_create`. Does not block: work that is already enqueued in it still finishes. May
/// be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE` for the context, or if `mp_stream_create` of this context did not return the
/// stream.
mp_status_t mp_stream_destroy(mp_context_t context, mp_stream_t stream);

/// Blocks until all work that is enqueued in `stream` so far has finished. NULL is the default stream. May be called
/// from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_PEER_GONE` if a wait was abandoned because a process exited. The wait was made by
///   `mp_stream_wait_signals` or by a plan of `mp_node_plan`, in this stream or in a stream for which this stream has
///   waited. Each abandoned wait is reported once. See `mp_stream_wait_signals`.
/// - Any other error is a failure of work in the stream.
mp_status_t mp_stream_synchronize(mp_context_t context, mp_stream_t stream);

/// Returns the device of a stream, and whether the stream is being captured.
///
/// `*device` receives the device whose kernels can be launched in `stream`. For CUDA's default streams it receives
/// `MP_DEVICE_HOST`, because they belong to the GPU that is current when they are used.
///
/// `*capturing` receives 1 if the stream is being captured into a graph. Enqueued work then runs at every launch of the
/// graph. Otherwise, and always on the host backend, it receives 0. Each output pointer may be NULL. May be called from
/// any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_stream_get_info(mp_context_t context, mp_stream_t stream, int32_t *device, int32_t *capturing);

/// Enqueues a call of `function(user)` on a CPU thread, in stream order: after all earlier work in `stream` and before
/// all later work. Does not block. May be called from any thread.
///
/// The function may block, but must not call this library. On CUDA the driver calls the functions of several streams
/// one after the other, so a function must not wait for a function in another stream. On the host backend each stream
/// has its own thread for these calls. If the stream is being captured, the function is called at every launch of the
/// graph. Executables of one graph that run concurrently call it concurrently.
///
/// Ownership of `user`:
/// - If `release` is NULL, the caller keeps ownership. `user` must stay valid until the function has run. In a capture
///   it must stay valid as long as the graph or one of its executables exists.
/// - Otherwise the library takes ownership. It calls `release(user)` once, on any thread, when it will not call the
///   function again: after the function has run or, in a capture, when the graph and all of its executables are
///   destroyed. `release` must not call this library or CUDA.
/// - If this call fails, neither function is called, and the caller keeps ownership.
/// - If the GPU fails before the function has run, the driver drops the call, and `release` is not called.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `function` is NULL; `MP_ERROR_NOT_SUPPORTED` in a
/// capture if the driver is older than CUDA 11.3.
mp_status_t mp_stream_launch_host(mp_context_t context,
                                  mp_stream_t stream,
                                  mp_host_function_t function,
                                  void *user,
                                  mp_host_function_t release);

/// Creates an event. An event that was never recorded counts as completed. The caller owns it and destroys it with
/// `mp_event_destroy`. May be called from any thread.
///
/// The event works with streams of every device. On CUDA it is therefore not a `cudaEvent_t` and must not be passed to
/// CUDA functions. The event functions of this library also accept a `cudaEvent_t`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `event` is NULL.
mp_status_t mp_event_create(mp_context_t context, mp_event_t *event);

/// Destroys an event from `mp_event_create`. Streams that already wait for the event continue to wait. May be called
/// from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_event_destroy(mp_context_t context, mp_event_t event);

/// Records in `event` all work that is enqueued in `stream` so far. This replaces an earlier record. Does not block.
/// May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_event_record(mp_context_t context, mp_event_t event, mp_stream_t stream);

/// Blocks until the work that is recorded in `event` has finished. May be called from any thread, but not from a host
/// function.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_PEER_GONE` if the recorded work contained a wait that was abandoned because a process exited (see
///   `mp_stream_wait_signals`). Each call returns this error, until the event is recorded again in a stream that has
///   already reported the error. For a `cudaEvent_t` that `mp_event_record` recorded, the error is returned once.
mp_status_t mp_event_synchronize(mp_context_t context, mp_event_t event);

/// Makes all work that is enqueued in `stream` from now on wait for the work that is recorded in `event` now. Does not
/// block. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_stream_wait_event(mp_context_t context, mp_stream_t stream, mp_event_t event);

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
mp_status_t mp_plan(mp_context_t context,
                    const mp_transfer_t *transfers,
                    size_t count,
                    const mp_plan_options_t *options,
                    mp_plan_t *plan);

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
mp_status_t mp_plan_destroy(mp_plan_t plan);

/// Writes a description of the plan: its paths, the share of the data on each path, chunk sizes, staging buffers and
/// predicted time, and why other paths were rejected. The parameters are those of `mp_context_describe`. May be called
/// from any thread.
///
/// Errors: the errors of `mp_context_describe`.
mp_status_t mp_plan_describe(mp_plan_t plan, mp_format_t format, char *text, size_t capacity, size_t *length);

/// Fills `*info` with properties of the plan, for example its predicted time. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `info` is NULL or `info->size` is wrong.
mp_status_t mp_plan_get_info(mp_plan_t plan, mp_plan_info_t *info);

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
mp_status_t mp_plan_prepare(mp_plan_t plan, mp_stream_t stream);

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
mp_status_t mp_execute(mp_plan_t plan, mp_stream_t stream, mp_request_t *request);

/// Lists the copies of a collective operation between `participants` participants. Moves no data. May be called from
/// any thread.
///
/// Turn each element of `pieces` into a transfer and plan all of them together:
/// - In one process, turn it into an `mp_transfer_t` between two devices, and call `mp_plan`.
/// - Between ranks, turn each element in which `from` or `to` is this rank into a send or receive descriptor with
///   `MP_BY_TAG`, and call `mp_node_plan`.
///
/// Leave out an element whose source and destination address are equal (in-place operation). Data that several
/// participants receive are forwarded by participants that already have them. Planning the same collective again takes
/// only a look-up.
///
/// The blocks that a participant sends are contiguous in its send buffer, in the order of the participants. The blocks
/// that it receives are contiguous in its receive buffer, in the same order. If `sizes` is NULL, every block has
/// `bytes` bytes. Otherwise `bytes` is ignored, and `sizes` contains the size of each block: one number for a
/// broadcast; one per participant for a scatter, gather and all-gather; one for each pair of sender and receiver,
/// ordered by sender, for an all-to-all. `root` is used only by broadcast, scatter and gather. Empty blocks are left
/// out.
///
/// `*count` receives the number of elements. If `pieces` is NULL, only `*count` is written. Otherwise `pieces` has room
/// for `capacity` elements.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` in these cases:
/// - `count` is NULL, or the collective or the root is unknown.
/// - There are more than 1024 participants, or the sum of the sizes overflows.
/// - `capacity` is too small. `*count` then receives the number of elements, and `pieces` is not written.
mp_status_t mp_collective(mp_collective_t collective,
                          uint32_t participants,
                          uint32_t root,
                          uint64_t bytes,
                          const uint64_t *sizes,
                          mp_piece_t *pieces,
                          size_t capacity,
                          size_t *count);

/// Blocks until the operation of a request (an execution, send, receive or fetch) has ended. Then destroys the request
/// and sets `*request` to NULL. If `*request` is NULL, returns immediately with success.
///
/// If `info` is not NULL, `*info` receives the properties of the message of a send, receive or fetch. `*info` is also
/// filled if the call returns `MP_ERROR_MESSAGE_TRUNCATED`. After any other error of a receive, `*info` is unchanged.
///
/// May be called from any thread. If two threads wait for the same request, one of them may get
/// `MP_ERROR_INVALID_HANDLE`.
///
/// Errors after which `*request` is unchanged:
/// - `MP_ERROR_INVALID_HANDLE`, also if `*request` is NULL and `info` is not NULL.
/// - `MP_ERROR_INVALID_ARGUMENT`, also if `info` is not NULL and the request belongs to an execution, which has no
///   message.
///
/// Errors after which the request is destroyed and `*request` is NULL:
/// - `MP_ERROR_PEER_GONE` if the execution waited for a process that exited (see `mp_stream_wait_signals`) and was
///   enqueued before its stream reported this error.
/// - Any other error, for example `MP_ERROR_DATA_CORRUPTION` or `MP_ERROR_DRIVER`, is the result of the operation.
mp_status_t mp_wait(mp_request_t *request, mp_message_info_t *info);

/// Checks whether the operation of a request has ended. Does not block. `*done` receives 1 if it has ended, otherwise
/// 0.
///
/// If the operation has ended, the request is destroyed, `*request` is set to NULL, and `*info` is filled as by
/// `mp_wait`. Otherwise `*request` and `*info` are unchanged. If `*request` is NULL, `*done` receives 1. May be called
/// from any thread.
///
/// Errors: the errors of `mp_wait`. If the error is the result of the operation, `*done` is 1. After any other error
/// `*done` is unchanged.
mp_status_t mp_test(mp_request_t *request, int32_t *done, mp_message_info_t *info);

/// Destroys the request and sets `*request` to NULL. Does not block: the operation continues. If `*request` is NULL,
/// does nothing. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `request` is NULL.
mp_status_t mp_request_destroy(mp_request_t *request);

/// Tries to cancel a send or receive that has not matched, or the offer of a buffer (`mp_message_describe`) that was
/// not fetched. Does not block. May be called from any thread.
///
/// `*cancelled` receives 1 if the operation was cancelled. The request then ends with `MP_ERROR_CANCELLED`.
/// `*cancelled` receives 0 if the operation can no longer be cancelled. The operation then continues. In both cases the
/// caller must still wait for the request or destroy it.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for the request of an execution.
mp_status_t mp_request_cancel(mp_request_t request, int32_t *cancelled);

/// Makes all work that is enqueued in `stream` from now on wait until the operation of a request has ended. The later
/// work sees the data of a receive, and may overwrite the data of a send.
///
/// Does not block, even if a message has not matched yet. The request stays valid. A NULL request counts as ended. If
/// the operation fails, the stream continues nevertheless. Only the result of the request shows whether the data have
/// arrived. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_NOT_SUPPORTED` for a send, receive or fetch while `stream` is being
/// captured.
mp_status_t mp_stream_wait_request(mp_stream_t stream, mp_request_t request);

/// Calls `function` once, with `user` and the final status, when the operation of a request has ended. Does not block.
/// May be called from any thread.
///
/// `function` runs on the context's thread `mpgpu-callback`, which the first callback starts. On that thread
/// `mp_last_error` returns the error text of the operation. `function` may call the library, but delays other callbacks
/// of the context.
///
/// Avoid deadlocks: `function` must not wait for a stream that waits for a receive into pageable host memory, because
/// the callback thread may have to copy the received data. A thread that destroys the context or the request's
/// messenger must not hold a lock that the function acquires, for example Python's interpreter lock.
///
/// The request stays valid, and may be waited for or destroyed before `function` is called. Destroying the context
/// calls all functions that were not called yet.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_INVALID_ARGUMENT` if `function` is NULL.
/// - `MP_ERROR_NOT_SUPPORTED` for an execution that was captured.
mp_status_t mp_request_set_callback(mp_request_t request, mp_request_function_t function, void *user);

/// Probes (measures) the machine and produces a topology file: the speed of copies between the devices of the context,
/// which copies slow each other down, the fixed cost of a copy, and whether data arrive intact. The context itself
/// keeps its current topology.
///
/// Blocks for seconds: a full probe of four H200 takes 25 to 31 s, most of it for tuning. For eight GPUs less than a
/// minute is estimated. The probe uses memory and streams on every device, and all links. Other programs that use the
/// machine at the same time distort the result. May be called from any thread, but a context runs only one probe at a
/// time.
///
/// NULL `options` selects a full probe. Its result is stored in a file that contexts of this user on these GPUs use
/// from then on. A full probe whose result is stored in this file also tunes: it executes alternative plans and stores
/// those that are faster than the model's plans. It tunes single copies from and to host memory and, with three or more
/// GPUs, all-to-all operations of all GPUs. If tuning fails, a log warning is written, and the result is stored without
/// tuning.
///
/// The probe checks its own predictions. If their median error exceeds 20 %, the result is not tuned and not stored,
/// and contexts do not use it. On the host backend the probe measures copies by CPU threads, and stores the result only
/// if `options` names a file.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` for an invalid option.
/// - `MP_ERROR_TOPOLOGY` if the file cannot be written.
/// - `MP_ERROR_NOT_SUPPORTED` if the result is not stored or there is no directory for it. `mp_context_probed` still
///   returns the result.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
mp_status_t mp_context_probe(mp_context_t context, const mp_probe_options_t *options);

/// Returns the topology file that the last `mp_context_probe` of this context produced, in TOML
/// (docs/reference/topology.md).
///
/// `*length` receives the size of the text in bytes, including the final NUL. If `text` is NULL, only `*length` is
/// written. Otherwise the text is written to the `capacity` bytes at `text`. May be called from any thread.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_TOPOLOGY` if this context has not been probed.
/// - `MP_ERROR_INVALID_ARGUMENT` if `length` is NULL or `capacity` is too small. In the latter case `*length` receives
///   the required size, and `text` is not written.
mp_status_t mp_context_probed(mp_context_t context, char *text, size_t capacity, size_t *length);

/// Exports `bytes` bytes at `pointer`, so that other processes on the machine can map them with `mp_memory_import`.
/// Exporting the same range again returns an equal handle. Does not block. May be called from any thread.
///
/// The range must be within one allocation. It may come from `mp_alloc` (GPU memory) or `mp_alloc_shared` (host memory)
/// of this context. On CUDA it may also come from `cudaMalloc`, from the virtual memory API or from a memory pool.
/// Memory of the virtual memory API and memory pools must have been created with the handle type
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`. If `cuMemMap` has mapped several chunks into one range, each chunk is a
/// separate allocation.
///
/// The caller keeps ownership of the allocation. Importers map the whole allocation. They can map it until it is freed
/// or the context is destroyed. Handles of freed memory are rejected, even if the address is in use again.
///
/// Importers should close the memory before the owner frees it. If the owner frees it first, the importers' mapping
/// contains zeros on the host backend, and must no longer be used on CUDA.
///
/// The handle works like a key: every process of this user that has it can read and write the allocation. Processes of
/// other users cannot. The first export starts a thread that answers importers.
///
/// Errors:
/// - `MP_ERROR_INVALID_POINTER` for memory that the context does not know, and for a range that extends beyond its
///   allocation.
/// - `MP_ERROR_NOT_SUPPORTED` for memory that cannot be shared. The text contains the reason and the remedy.
/// - `MP_ERROR_INVALID_ARGUMENT` if `bytes` is 0 or a pointer is NULL.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_DRIVER`.
mp_status_t mp_memory_export(mp_context_t context, const void *pointer, uint64_t bytes, mp_memory_handle_t *handle);

/// Maps memory that another process has exported with `mp_memory_export`. Blocks until the exporting process answers,
/// which takes a few microseconds and at most five seconds. May be called from any thread, but not from a host
/// function.
///
/// Outputs:
/// - `*pointer` receives the address. Use it in transfers. On the host backend the program can also access it directly.
/// - `*device` receives the device of the memory, in the numbering of this context. `device` may be NULL.
/// - `*bytes` receives the size of the exported range. `bytes` may be NULL.
/// - `*in_kernels` receives the address for kernels of the device `kernels`, or NULL if `kernels` is `MP_DEVICE_AUTO`.
///   `in_kernels` may be NULL.
///
/// `kernels` selects who accesses the memory:
/// - `MP_DEVICE_AUTO`: transfers use `*pointer`. On CUDA, kernels can use `*pointer` too if the memory is from
///   `cudaMalloc` or `mp_alloc`. These kernels must run on the GPU through which this call maps the memory: the GPU
///   that is current in the calling thread or, if none is current or it cannot access the memory, another GPU that the
///   context uses.
/// - A device: kernels of this device use `*in_kernels`, regardless of the current GPU. This also works for memory on a
///   GPU that is not visible to this process. `*device` receives `kernels`. `*pointer` is then not valid in transfers;
///   pass it only to `mp_memory_close`.
///
/// The caller closes the memory with `mp_memory_close`. Several imports of one allocation share a mapping, which exists
/// until `mp_memory_close` was called as often as this function. If the handle was exported by this process itself,
/// `*pointer` is the original address. After the owner has freed the memory or exited, calls that use the memory fail
/// with `MP_ERROR_PEER_GONE`.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if a required pointer is NULL or `*handle` is not a handle.
/// - `MP_ERROR_NOT_SUPPORTED` if the handle is from another machine, container, user or backend.
/// - `MP_ERROR_NOT_SUPPORTED` if the memory is on a GPU that is not visible to this process or that `kernels` cannot
///   access.
/// - `MP_ERROR_NOT_SUPPORTED` if another library of this process has opened the memory by CUDA IPC
///   (docs/guide/processes.md).
/// - `MP_ERROR_PEER_GONE` if the exporting process has exited or has freed the memory.
/// - `MP_ERROR_TIMEOUT` if the exporting process does not answer.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_VERSION_MISMATCH`, `MP_ERROR_DRIVER`.
mp_status_t mp_memory_import(mp_context_t context,
                             const mp_memory_handle_t *handle,
                             int32_t kernels,
                             void **pointer,
                             int32_t *device,
                             void **in_kernels,
                             uint64_t *bytes);

/// Registers a CUDA IPC mapping for use in transfers: memory of another process that the caller has mapped with
/// `cuIpcOpenMemHandle` or `cudaIpcOpenMemHandle`. Does not block. May be called from any thread, but not from a host
/// function.
///
/// `pointer` is the address of the mapping, `bytes` its size, and `ipc_handle` the 64-byte handle that the caller
/// opened. `device` is the GPU that contains the memory. The driver may report another GPU, namely the one through
/// which the mapping was opened. Other GPUs that copy this memory also open the handle.
///
/// The caller keeps ownership of the mapping. Call `mp_memory_close` before closing the mapping.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if a pointer is NULL, if `bytes` is 0, or if `device` is not a GPU.
/// - `MP_ERROR_NOT_SUPPORTED` on the host backend, for memory that is not on a GPU, and for memory that this context
///   has imported or already registered.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`.
mp_status_t mp_memory_adopt(mp_context_t context,
                            void *pointer,
                            uint64_t bytes,
                            int32_t device,
                            const void *ipc_handle);

/// Closes memory that was imported with `mp_memory_import` or registered with `mp_memory_adopt`. NULL does nothing. May
/// be called from any thread, but not from a host function.
///
/// For imported memory, the last close of an allocation blocks until all work that the context has enqueued so far has
/// finished, and then unmaps the allocation. Plans that use it can no longer be executed.
///
/// For memory from `mp_memory_adopt` the call does not block. It closes the mappings that other GPUs have opened, but
/// not the caller's own mapping. Before the caller closes its own mapping, it must wait for all work that uses the
/// mapping.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `pointer` is not the address of open memory of this
/// kind in this context.
mp_status_t mp_memory_close(mp_context_t context, void *pointer);

/// Announces to the owner of imported memory that this process will not set any counter in that memory to a value
/// greater than `value`. The process continues to run and may keep the memory mapped.
///
/// Waits for greater values are then abandoned, as if this process had exited. Other waits continue. Use this function
/// if the program stops early, for example after an exception, while other processes wait for its signals.
///
/// `pointer` is an address in memory from `mp_memory_import`. Counters that other importers set must be in separate
/// allocations. Does not block and does not wait for work of this process. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `pointer` is not in imported memory.
mp_status_t mp_memory_leave(mp_context_t context, const void *pointer, uint64_t value);

/// Writes a 16-byte identifier of a device to `uuid`. The identifier is equal in all processes on the machine, even if
/// they number the device differently. For a GPU it is the UUID. For a virtual device or a host domain it is derived
/// from the device number. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` if `uuid` is NULL.
mp_status_t mp_device_uuid(mp_context_t context, int32_t device, uint8_t *uuid);

/// Makes all work that is enqueued in `stream` from now on wait until the counter of each signal in `signals` is at
/// least the value of the signal (`mp_signal_t::value`). The later work sees all data that were written before the
/// counters were set. Does not block. May be called from any thread.
///
/// The counters must be in memory of this context. The receiver therefore waits in its own memory, which it has
/// exported to the process that sets the counter. `signals` has `count` elements and is read during the call only.
/// Functions that wait for all work of the context (`mp_free`, `mp_memory_close`, `mp_context_destroy`) block until
/// these waits have ended.
///
/// If a process that has mapped the memory of a counter exits without closing it, waits for counters in this memory are
/// abandoned, unless the counters have already reached the values of the signals. Later work in the stream, and work in
/// other streams that is ordered after it, then runs with stale data. The error `MP_ERROR_PEER_GONE` reports abandoned
/// waits as follows:
/// - The next `mp_stream_synchronize` returns the error once, after the work has finished. This applies to a stream
///   whose wait was abandoned, and to a stream that has waited for such a stream by `mp_stream_wait_event`.
/// - `mp_wait`, `mp_test` and `mp_event_synchronize` return the error for work that was enqueued before the stream of
///   this work reported the error.
/// - Streams that are ordered by CUDA's own events do not report the error, because the library does not know this
///   order.
/// - If the abandoned wait was captured in a graph, every stream reports the error, because the library does not know
///   the stream in which the graph was launched.
/// - Later calls are rejected if they would wait for a counter in this memory that can no longer reach the value of the
///   signal.
///
/// Errors:
/// - `MP_ERROR_INVALID_POINTER` for a counter that is NULL, not aligned or not in memory that the context knows. The
///   text contains the index of the signal.
/// - `MP_ERROR_NOT_SUPPORTED` for a counter in imported memory, and on CUDA for a counter outside of the memory that
///   `mp_signal_t` requires.
/// - `MP_ERROR_PEER_GONE` if a counter has not reached the value of its signal and a process that had mapped its memory
///   has exited without closing it. Nothing is enqueued.
/// - `MP_ERROR_INVALID_ARGUMENT` if `signals` is NULL and `count` is not 0.
/// - `MP_ERROR_INVALID_HANDLE` for the context or the stream.
mp_status_t mp_stream_wait_signals(mp_context_t context, mp_stream_t stream, const mp_signal_t *signals, size_t count);

/// Declares that kernels of the program poll the counters of `signals`, from now until the memory of the counters is
/// freed. The library can then end the polling if the process that sets a counter exits. Enqueues nothing and does not
/// block. May be called from any thread.
///
/// If a process that has mapped the memory exits without closing it, the library sets each counter that is less than
/// the value of its signal to that value. Every stream then reports `MP_ERROR_PEER_GONE` when it is synchronised, as
/// `mp_stream_wait_signals` describes for captured waits.
///
/// If a counter is declared several times, the greatest value is used. Declaring the same value again only checks for
/// errors. The requirements on the counters are those of `mp_stream_wait_signals`. `signals` has `count` elements and
/// is read during the call only.
///
/// Errors: the errors of `mp_stream_wait_signals`, except those about streams. `MP_ERROR_PEER_GONE` if any process that
/// had mapped a counter's memory has exited without closing it.
mp_status_t mp_kernel_wait_signals(mp_context_t context, const mp_signal_t *signals, size_t count);

/// Sets the counter of each signal in `signals` to the value of the signal (`mp_signal_t::value`), after all work that
/// is enqueued in `stream` so far. A process that sees the new value also sees all data that this work has written.
/// Does not block. May be called from any thread.
///
/// The counters are in memory of this context or in imported memory. The value is stored, not added, so only one
/// process may set each counter. After `mp_execute`, this call notifies the receiver that the data have arrived.
/// `signals` has `count` elements and is read during the call only.
///
/// Errors: the errors of `mp_stream_wait_signals`, but imported memory is accepted. `MP_ERROR_PEER_GONE` if the owner
/// of the memory has exited or has freed it.
mp_status_t mp_stream_raise_signals(mp_context_t context, mp_stream_t stream, const mp_signal_t *signals, size_t count);

/// Sets the counter at `counter` to `value` immediately, from the calling thread. A process that sees the value also
/// sees all data that this thread has written or seen before. Does not block, and does not wait for work in streams
/// (`mp_stream_raise_signals` does). May be called from any thread, but not from a host function.
///
/// The counter must be in memory of this context or in imported memory, and the CPU must be able to access it. On CUDA
/// it must be in host memory from `mp_alloc_shared`.
///
/// Errors: the errors of `mp_stream_raise_signals`, except those about streams.
mp_status_t mp_signal_raise(mp_context_t context, uint64_t *counter, uint64_t value);

/// Reads the counter at `counter` into `*value`. The calling thread then sees all data that were written before the
/// counter was set to this value. Does not block. The requirements on the counter are those of `mp_signal_raise`. May
/// be called from any thread, but not from a host function.
///
/// Errors: the errors of `mp_signal_raise`; `MP_ERROR_INVALID_ARGUMENT` if `value` is NULL.
mp_status_t mp_signal_read(mp_context_t context, const uint64_t *counter, uint64_t *value);

/// Checks whether the counter at `counter` has reached `value`. `*reached` receives 1 if it has, otherwise 0. Does not
/// block. The requirements on the counter are those of `mp_signal_synchronize`. May be called from any thread, but not
/// from a host function.
///
/// Errors: the errors of `mp_signal_synchronize` except `MP_ERROR_TIMEOUT`; `MP_ERROR_INVALID_ARGUMENT` if `reached` is
/// NULL.
mp_status_t mp_signal_test(mp_context_t context, const uint64_t *counter, uint64_t value, int32_t *reached);

/// Blocks until the counter at `counter` has reached `value`, but at most `seconds` seconds. With 0 seconds it checks
/// once. The counter must be in host memory of this context, or on the host backend in any memory of this context. May
/// be called from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_TIMEOUT` if the counter does not reach the value in time.
/// - `MP_ERROR_PEER_GONE` if the counter has not reached the value, and a process that had mapped its memory has exited
///   without closing it.
/// - `MP_ERROR_INVALID_ARGUMENT` if `seconds` is negative or not a number.
/// - The other errors of `mp_stream_wait_signals`.
mp_status_t mp_signal_synchronize(mp_context_t context, const uint64_t *counter, uint64_t value, double seconds);

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
mp_status_t mp_node_create(mp_context_t context,
                           uint32_t rank,
                           uint32_t ranks,
                           mp_allgather_t allgather,
                           void *user,
                           const mp_node_options_t *options,
                           mp_node_t *node);

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
mp_status_t mp_node_fail(mp_node_t node, const char *reason);

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
mp_status_t mp_node_allgather(mp_node_t node, const char *call, const void *send, void *receive, size_t bytes);

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
mp_status_t mp_node_devices(mp_node_t node, int32_t *devices, size_t capacity, size_t *count);

/// Returns the first GPU that this rank uses in `*device`, in the numbering of its context. `mp_node_devices` returns
/// all of them. May be called from any thread.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`.
/// - `MP_ERROR_INVALID_ARGUMENT` if `device` is NULL.
/// - `MP_ERROR_INVALID_ARGUMENT` also if the rank uses no GPU, because there are more ranks than GPUs or another rank
///   uses the GPU that both have listed. `*device` is then not written.
mp_status_t mp_node_device(mp_node_t node, int32_t *device);

/// Destroys a node object (group of ranks; see `mp_node_create`). Plans and messengers that were created with the node
/// stay valid, and are destroyed separately, before or after the node (docs/guide/concepts.md, "Ending"). The other
/// ranks need not call this function at the same time. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_node_destroy(mp_node_t node);

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
mp_status_t mp_node_plan(mp_node_t node,
                         const mp_window_t *windows,
                         size_t window_count,
                         const mp_node_transfer_t *transfers,
                         size_t count,
                         const mp_partition_options_t *partitions,
                         const mp_plan_options_t *options,
                         mp_plan_t *plan);

/// Measures how best to divide transfers into partitions, and returns the fastest options in `*best`, which is equal on
/// all ranks. Pass `best` to `mp_node_plan`.
///
/// All ranks call it together, with equal `tuning` and `options`. Each rank passes the transfers that it sends. The
/// call creates a stream on each rank. The destinations are overwritten. Blocks until all measurements have finished.
/// May be called from any thread, but not from a host function.
///
/// For each agent (mechanism that moves the partitions) in `tuning->agents`, the function plans about ten candidates
/// with different numbers of partitions. The function executes each candidate several times, and calls `produce` to
/// enqueue the producing kernels. The best candidate has the shortest median time on the slowest rank. Candidates that
/// cannot be planned are skipped.
///
/// Rank 0 stores all measurements in the tuning file. `mpgpu tune partitions` prints and plots them. `MP_AGENT_AUTO`
/// uses the best of them, except those of `MP_AGENT_PRODUCER` (docs/reference/tuning.md).
///
/// Errors:
/// - The errors of `mp_node_plan`, if no candidate can be planned.
/// - `MP_ERROR_INVALID_ARGUMENT` if `agents` or `rounds` is out of range, if another rank sends one of the transfers,
///   or if `produce` failed.
/// - `MP_ERROR_NOT_SUPPORTED` if the tuning file cannot be written.
/// - `MP_ERROR_ENVIRONMENT` if the tuning file belongs to another machine.
mp_status_t mp_node_tune_partitions(mp_node_t node,
                                    const mp_window_t *windows,
                                    size_t window_count,
                                    const mp_node_transfer_t *transfers,
                                    size_t count,
                                    mp_produce_t produce,
                                    void *user,
                                    const mp_partition_tuning_t *tuning,
                                    const mp_plan_options_t *options,
                                    mp_partition_options_t *best);

/// Begins a step (one execution) of a plan with partitions, in stream order. Does not block. The step starts after all
/// earlier work in `stream` and after the previous step. Kernels that read data of the previous step must be ordered
/// before this call. May be called from any thread, but not from a host function.
///
/// A step consists of three actions:
/// 1. `mp_plan_arm` begins the step.
/// 2. The caller enqueues the producers, in `stream` or in another stream that has waited for `stream`. Producers are
///    kernels that compute the data and mark each partition ready through its trigger (`mp_plan_get_trigger`,
///    mpgpu/trigger.cuh).
/// 3. `mp_execute` enqueues the copies of the partitions and the end of the step. Later work in the stream of
///    `mp_execute` sees all data that this rank receives in the step, and may overwrite the data that this rank sent.
///
/// After `mp_plan_arm`, receivers may check through the trigger whether a partition has arrived. All three actions may
/// be captured, in the same capture. Each partition must be marked ready once per step, even if its data have not
/// changed.
///
/// Order: enqueue every producer before `mp_execute` of the same step. Otherwise CUDA may place the operation that
/// waits for a producer before that producer in a hardware queue, and both deadlock. With `MP_AGENT_PRODUCER`, and with
/// `MP_AGENT_AUTO` if `mp_partition_options_t::arrivals` is off, the stream of `mp_execute` must also be ordered after
/// the producers. The reason is that the producers may store the data themselves, or that all data may be copied after
/// the producers.
///
/// Each call of `mp_plan_arm` must be followed by one `mp_execute`. If the plan is destroyed before that, the other
/// ranks get `MP_ERROR_PEER_GONE`. The memory to which they write in this step must then stay allocated until they have
/// destroyed their plans.
///
/// Errors: the errors of `mp_execute`; `MP_ERROR_INVALID_ARGUMENT` if a step has already begun or the plan has no
/// partitions.
mp_status_t mp_plan_arm(mp_plan_t plan, mp_stream_t stream);

/// Fills `*trigger` with the addresses that kernels of this rank need to mark partitions of a transfer ready, or to
/// detect their arrival. The trigger is the same for all steps and is valid until the plan is destroyed. May be called
/// from any thread.
///
/// `transfer` is the index, from 0, in the list of transfers that rank `rank` passed to `mp_node_plan`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if the plan has no partitions, if the transfer does
/// not exist, or if this rank neither sends nor receives it.
mp_status_t mp_plan_get_trigger(mp_plan_t plan, uint32_t rank, size_t transfer, mp_trigger_t *trigger);

/// Blocks until the last enqueued step of a plan with partitions has finished on this rank, but at most `seconds`
/// seconds. Use this function to find a producer that never marks its partitions ready: the error text lists the
/// missing partitions. The function does not wait for captured steps. May be called from any thread, but not from a
/// host function.
///
/// After an error the step continues. If partitions of this rank are still missing 10 seconds after the start of
/// `mp_plan_destroy`, that call ends the step without them and returns `MP_ERROR_TIMEOUT`. For missing partitions of
/// another rank, `mp_plan_destroy` waits until that rank has marked them ready or has destroyed its plan.
///
/// Errors: `MP_ERROR_TIMEOUT`, `MP_ERROR_PEER_GONE`, `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if
/// `seconds` is negative or not a number, or if the plan has no partitions.
mp_status_t mp_plan_synchronize(mp_plan_t plan, double seconds);

/// Creates a messenger, through which the ranks of a node exchange messages. Messages match as in MPI. Messages of
/// different messengers never match.
///
/// All ranks call it together with equal options. Blocks until all ranks have called it. NULL `options` selects all
/// defaults. The caller owns `*messenger` and destroys it with `mp_messenger_destroy`. The messenger keeps its node
/// alive.
///
/// Errors: `MP_ERROR_NOT_SUPPORTED` if the ranks cannot share memory; `MP_ERROR_INVALID_HANDLE`,
/// `MP_ERROR_INVALID_ARGUMENT`, `MP_ERROR_RANK_FAILED`, `MP_ERROR_ALLGATHER`.
mp_status_t mp_messenger_create(mp_node_t node, const mp_messenger_options_t *options, mp_messenger_t *messenger);

/// Destroys a messenger. Other ranks need not call this function at the same time. Later operations of other ranks with
/// this rank end with `MP_ERROR_PEER_GONE`. Sends and receives of this rank that have not matched end with
/// `MP_ERROR_CANCELLED`. May be called from any thread.
///
/// Blocks, for at most 10 seconds, until data transfers in progress have ended, and until messages that the library has
/// buffered (see `mp_send`) are received or their receivers have exited. If a data transfer is still in progress after
/// this time, its request ends with an error, and streams of this rank that wait for the transfer continue without the
/// data. The call then returns 2 seconds later.
///
/// Destroying the context destroys all of its messengers in this way, all at the same time.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_TIMEOUT` if buffered messages were not received, or if data transfers
/// have not ended because a stream has not reached them. The memory of these transfers must stay allocated until their
/// requests have ended. The messenger is destroyed even then.
mp_status_t mp_messenger_destroy(mp_messenger_t messenger);

/// Sends `bytes` bytes at `data` to rank `rank`, after earlier work in `stream` has written them. `rank` may be the
/// calling rank. Does not block.
///
/// The caller owns `*request`. `request` may be NULL. The memory at `data` must stay allocated and unchanged until the
/// request has ended. `metadata` has `metadata_bytes` bytes, at most `MP_MESSAGE_METADATA_BYTES`. The metadata are read
/// during the call, and arrive when the message matches a receive.
///
/// Messages from one rank to another do not overtake each other: a receive gets the first message that it matches.
///
/// GPU memory and host memory from `mp_alloc_shared` are read directly, and the send ends when the receiver has the
/// data. Other host memory, and messages of up to 1 KiB in host memory, are first copied to a buffer of the library in
/// stream order. Such a send ends when this copy has finished.
///
/// Errors:
/// - `MP_ERROR_QUEUE_FULL` if too many sends of this rank are not yet received, if those from pageable memory total
///   more than 512 MiB, or if too many messages wait at `rank`. Nothing was sent. Receive the messages that were sent
///   to this rank, and call again.
/// - `MP_ERROR_TIMEOUT` if the message queue of `rank` was locked for 30 seconds by a process that was stopped inside a
///   call. Nothing was sent.
/// - `MP_ERROR_NOT_SUPPORTED` for GPU memory that cannot be shared, and if `stream` is being captured.
/// - `MP_ERROR_OUT_OF_MEMORY` if no request could be created. The message was sent if it matched a receive immediately;
///   otherwise it was not sent.
/// - `MP_ERROR_PEER_GONE`, `MP_ERROR_INVALID_POINTER`, `MP_ERROR_INVALID_ARGUMENT`, `MP_ERROR_INVALID_HANDLE`.
///
/// The request ends with `MP_ERROR_PEER_GONE` if the receiver exits before it has the data.
mp_status_t mp_send(mp_messenger_t messenger,
                    const void *data,
                    uint64_t bytes,
                    uint32_t rank,
                    uint64_t tag,
                    const void *metadata,
                    size_t metadata_bytes,
                    mp_stream_t stream,
                    mp_request_t *request);

/// Receives a message into the buffer of `bytes` bytes at `data`. Does not block.
///
/// The receive accepts a message from rank `rank`, or from any rank with `MP_ANY_RANK`. Only the tag bits that are set
/// in `mask` must equal those of `tag`: with all bits set only this tag is accepted, and with 0 any tag.
///
/// The data are written after earlier work in `stream`. Later work in the stream does not wait for the data; use
/// `mp_stream_wait_request` for that. The buffer must stay allocated until the request has ended. The caller owns
/// `*request`. If the message is shorter than the buffer, the rest of the buffer is unchanged. If the buffer is
/// pageable host memory, the thread that waits for the request or the thread `mpgpu-callback` copies the data from a
/// buffer of the library.
///
/// The request ends with an error in these cases:
/// - `MP_ERROR_MESSAGE_TRUNCATED` if the message is longer than the buffer. The message is not lost: the next matching
///   receive gets it.
/// - `MP_ERROR_PEER_GONE` if the sender has exited. With `MP_ANY_RANK` also if any rank exited during the wait, because
///   the message might have been from that rank. Later receives with `MP_ANY_RANK` match messages of the remaining
///   ranks.
///
/// Errors: the errors of `mp_send`. Nothing is received.
mp_status_t mp_receive(mp_messenger_t messenger,
                       void *data,
                       uint64_t bytes,
                       int32_t rank,
                       uint64_t tag,
                       uint64_t mask,
                       mp_stream_t stream,
                       mp_request_t *request);

/// Checks whether a message has arrived that a receive with the same `rank`, `tag` and `mask` would get. Does not
/// receive the message. Does not block. May be called from any thread.
///
/// `*found` receives 1 if there is such a message, otherwise 0. If `*found` is 1 and `info` is not NULL, `*info`
/// receives the properties of the message.
///
/// Errors: `MP_ERROR_PEER_GONE` if there is no message and `rank` has exited; `MP_ERROR_INVALID_HANDLE`,
/// `MP_ERROR_INVALID_ARGUMENT`.
mp_status_t mp_message_probe(mp_messenger_t messenger,
                             int32_t rank,
                             uint64_t tag,
                             uint64_t mask,
                             int32_t *found,
                             mp_message_info_t *info);

/// Returns the properties of the message that belongs to a request. Does not block. The request stays valid. May be
/// called from any thread.
///
/// `*matched` receives 1 for a send, and for a receive or fetch that has matched. Otherwise it receives 0. If
/// `*matched` is 1 and `info` is not NULL, `*info` receives the properties. If the receive ended with
/// `MP_ERROR_MESSAGE_TRUNCATED`, these are the properties of the message that was too long.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for the request of an execution.
mp_status_t mp_message_get_info(mp_request_t request, int32_t *matched, mp_message_info_t *info);

/// Creates a descriptor of the buffer of `bytes` bytes at `data`, with which one other rank of the node can copy
/// (fetch) the buffer to its own memory. The data are read after earlier work in `stream` has finished. Does not block.
///
/// The program sends the descriptor to the other rank in any way. The other rank calls `mp_message_fetch` once, at any
/// time. The memory must stay allocated and unchanged until the request `*released` has ended. The caller owns
/// `*released`. If the other rank has exited without fetching, cancel the request.
///
/// Errors: the errors of `mp_send`.
mp_status_t mp_message_describe(mp_messenger_t messenger,
                                const void *data,
                                uint64_t bytes,
                                mp_stream_t stream,
                                mp_message_descriptor_t *descriptor,
                                mp_request_t *released);

/// Copies the data that a descriptor from `mp_message_describe` describes into the buffer of `bytes` bytes at `data`,
/// after earlier work in `stream`. Does not block. Buffer, stream and request behave as in `mp_receive`.
///
/// `messenger` must come from the same collective call of `mp_messenger_create` as the messenger that created the
/// descriptor.
///
/// Errors:
/// - The errors of `mp_receive`.
/// - `MP_ERROR_MESSAGE_TRUNCATED` if the buffer is too small. A fetch with a larger buffer can still get the data.
/// - `MP_ERROR_INVALID_ARGUMENT` for a descriptor of another messenger, and for one that was already fetched or
///   cancelled.
mp_status_t mp_message_fetch(mp_messenger_t messenger,
                             const mp_message_descriptor_t *descriptor,
                             void *data,
                             uint64_t bytes,
                             mp_stream_t stream,
                             mp_request_t *request);

/// Enqueues a copy of blocks in `stream`, after all earlier work in `stream` and before all later work. Does not wait
/// for the copy. A kernel copies the blocks, with one launch for up to 120 layers. No plan is made, so a call with a
/// new index list costs no planning. NULL `options` selects all defaults. If `request` is not NULL, `*request`
/// receives a request for the end of the copy. May be called from any thread, but not from a host function.
///
/// Block `dst_index[i]` of each destination array receives block `src_index[i]` of the source array of the same
/// layer. If the list of destinations contains a block twice, each byte of the block comes from one of the two
/// sources; which one is undefined. If a block is both a source and a destination of the same call, it is undefined
/// whether the block is read before or after it is written.
///
/// Index lists in host memory are read and checked before the call returns. Index lists in memory of a GPU are read
/// when the copy runs. If such a list contains an index that is out of range, the block is not copied. `mp_wait` for
/// the request and the next `mp_stream_synchronize` for `stream` then return `MP_ERROR_INVALID_ARGUMENT`, and the
/// text contains the position and the value of one such index.
///
/// The arrays are in memory of GPUs or in pinned host memory that `mp_alloc`, `mp_memory_register` or CUDA provides.
/// Arrays, and index lists in memory of a GPU, must stay allocated until the copy has finished. `blocks`, `options`,
/// the lists of addresses, and index lists in host memory are read during the call only.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` for an invalid field of `blocks` or `options`. The text contains its name and value.
/// - `MP_ERROR_INVALID_POINTER` for an array that is NULL, in pageable memory, or outside its allocation, and for an
///   index list in memory of a GPU that extends beyond its allocation.
/// - `MP_ERROR_NOT_SUPPORTED` if the GPU cannot access an array, or if the stream is being captured and an index list
///   is not NULL.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
mp_status_t mp_copy_blocks(mp_context_t context,
                           const mp_blocks_t *blocks,
                           const mp_piece_options_t *options,
                           mp_stream_t stream,
                           mp_request_t *request);

/// Enqueues a copy of many small pieces in `stream`, after all earlier work in `stream` and before all later work.
/// Does not wait for the copy. A kernel copies the pieces, without a plan. For few large pieces, use `mp_plan`. NULL
/// `options` selects all defaults. If `request` is not NULL, `*request` receives a request for the end of the copy.
/// May be called from any thread, but not from a host function.
///
/// `pieces` has `count` elements, which are read during the call only. The pieces are copied in no particular order.
/// No destination may overlap another destination or a source. Overlaps are not checked. The memory must fulfil the
/// conditions for the arrays of `mp_copy_blocks`.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` for an invalid field of `options`, or if `pieces` is NULL and `count` is not 0.
/// - `MP_ERROR_INVALID_POINTER` for an address that is NULL, in pageable memory, or outside its allocation. The text
///   contains the index of the piece.
/// - `MP_ERROR_NOT_SUPPORTED` if the GPU cannot access a piece, or if the stream is being captured.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
mp_status_t mp_copy_pieces(mp_context_t context,
                           const mp_segment_t *pieces,
                           size_t count,
                           const mp_piece_options_t *options,
                           mp_stream_t stream,
                           mp_request_t *request);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

/// Initial value of `mp_context_options_t`: all defaults.
#define MP_CONTEXT_OPTIONS_INIT {sizeof(mp_context_options_t), MP_BACKEND_AUTO, NULL, 0, 0, MP_SIGNAL_WAIT_DEFAULT, 0, 0}
/// Initial value of `mp_plan_options_t`: all defaults.
#define MP_PLAN_OPTIONS_INIT {sizeof(mp_plan_options_t), MP_ENGINE_AUTO, 0, MP_DEFAULT, 0, 0, 0, 0, MP_DEFAULT, 0, 0}
/// Initial value of `mp_node_options_t`: all defaults.
#define MP_NODE_OPTIONS_INIT {sizeof(mp_node_options_t), NULL, 0, NULL, NULL}
/// Initial value of `mp_messenger_options_t`: all defaults.
#define MP_MESSENGER_OPTIONS_INIT {sizeof(mp_messenger_options_t), 0, 0}
/// Initial value of `mp_message_info_t`: all fields except `size` are 0 or NULL.
#define MP_MESSAGE_INFO_INIT {sizeof(mp_message_info_t), 0, 0, 0, 0, NULL, 0}
/// Initial value of `mp_partition_options_t`: all defaults.
#define MP_PARTITION_OPTIONS_INIT {sizeof(mp_partition_options_t), 0, MP_AGENT_AUTO, MP_DEFAULT, MP_DEFAULT}
/// Initial value of `mp_partition_tuning_t`: all defaults. Only copy engines are measured.
#define MP_PARTITION_TUNING_INIT {sizeof(mp_partition_tuning_t), 0, 0, MP_DEFAULT, 0, NULL}
/// Initial value of `mp_blocks_t`: no layers.
#define MP_BLOCKS_INIT {sizeof(mp_blocks_t), NULL, NULL, 0, 0, 0, 0, 0, 0, 0, NULL, NULL, 8, 0}
/// Initial value of `mp_piece_options_t`: all defaults.
#define MP_PIECE_OPTIONS_INIT {sizeof(mp_piece_options_t), 0, MP_DEFAULT, 0}
/// Initial value of `mp_trigger_t`: all fields except `size` are 0 or NULL.
#define MP_TRIGGER_INIT {sizeof(mp_trigger_t), NULL, NULL, NULL, NULL, 0, 0, 0, 0}
/// Initial value of `mp_probe_options_t`: all defaults.
#define MP_PROBE_OPTIONS_INIT {sizeof(mp_probe_options_t), NULL, MP_DEFAULT, MP_DEFAULT}
/// Initial value of `mp_plan_info_t`: all fields except `size` are 0 or NULL.
#define MP_PLAN_INFO_INIT {sizeof(mp_plan_info_t), 0, 0, 0, 0, 0, 0, 0, 0}
/// Initial value of `mp_statistics_t`: all fields except `size` are 0 or NULL.
#define MP_STATISTICS_INIT {sizeof(mp_statistics_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
/// Initial value of `mp_device_statistics_t`: all fields except `size` are 0 or NULL.
#define MP_DEVICE_STATISTICS_INIT {sizeof(mp_device_statistics_t), 0, 0, 0}
/// Initial value of `mp_error_info_t`: all fields except `size` are 0 or NULL.
#define MP_ERROR_INFO_INIT {sizeof(mp_error_info_t), MP_SUCCESS, 0, NULL, NULL}

/* Enumerations have 32 bits on both sides. A compiler with smaller enumerations (-fshort-enums) reports an error here. */
typedef char mp_enumerations_have_32_bits[sizeof(mp_backend_t) == 4 && sizeof(mp_engine_t) == 4 && sizeof(mp_switch_t) == 4 ? 1 : -1];

/// Creates a context, which the caller owns and destroys with `mp_context_destroy`. NULL `options` selects all defaults.
///
/// The errors are those of `mp_context_create_versioned`, for example `MP_ERROR_VERSION_MISMATCH` if the library is
/// incompatible with this header.
static inline mp_status_t mp_context_create(const mp_context_options_t *options, mp_context_t *context) {
    return mp_context_create_versioned(options, MP_VERSION, context);
}

#endif /* MPGPU_H */
