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
 * - Units are bytes and seconds. Devices are numbers: GPUs from 0 up, host NUMA domains from MP_DEVICE_HOST down.
 * - A function returns MP_SUCCESS or an error, which mp_last_error describes. Outputs are written only on success,
 *   unless stated otherwise.
 * - No panic or exception leaves the library. Memory that grows with the counts of a call is checked in advance and
 *   missing memory returns MP_ERROR_OUT_OF_MEMORY. The library aborts only if the system cannot provide the few KiB of
 *   host memory that any call needs, or the memory of a handle.
 * - A pointer must be NULL, or aligned for its type and valid for as long as the function requires. NULL is rejected
 *   where it has no meaning. The library reads memory behind a pointer during the call only, unless stated otherwise.
 * - `destroy` releases objects (contexts, plans, requests, streams, events), `free` releases memory, and `close`
 *   releases memory of another process.
 * - `synchronize` blocks the calling thread. `wait` enqueues (`mp_stream_wait_event`): later work in the stream waits,
 *   the caller does not.
 * - Enumerations may hold any number. An unknown value is rejected with MP_ERROR_INVALID_ARGUMENT.
 * - Handles that are destroyed or of another kind are recognised and rejected.
 * - Initialise a struct that starts with `size` with its _INIT macro. This lets the library support programs compiled
 *   with another version of this header.
 * - Every function may be called from any thread at any time, unless stated otherwise.
 *
 * Generated from rust/ffi by cbindgen: change that, not this file.
 */
#ifndef MPGPU_H
#define MPGPU_H

#include <stddef.h>
#include <stdint.h>

/// Device number of the host memory of NUMA domain 0. GPUs are numbered from 0 up, host domains from this number down.
#define MP_DEVICE_HOST (-1)

/// Device number of the host memory of a NUMA domain: `MP_DEVICE_HOST_NUMA(0)` is `MP_DEVICE_HOST`.
#define MP_DEVICE_HOST_NUMA(domain) (-1 - (domain))

/// Device number that stands for the device whose memory an address belongs to. Transfers accept it; no machine has a
/// device of this number. An address that the library does not know counts as pageable host memory. This includes freed
/// memory, which is rejected if the transfer names its device.
#define MP_DEVICE_AUTO 0x7ffffffe

/// Stream in which enqueued work runs in order. The same type as `cudaStream_t`; NULL is the default stream.
typedef struct CUstream_st *mp_stream_t;

/// Event: a point in a stream for which other streams can wait. The same type as `cudaEvent_t`.
typedef struct CUevent_st *mp_event_t;

/// Context: a machine, a backend, and all state that is kept between calls. The handle is a number, not an address, so
/// the library recognises destroyed contexts.
typedef struct mp_context *mp_context_t;

/// Plan for a batch of transfers between fixed addresses. A number, not an address.
typedef struct mp_plan_s *mp_plan_t;

/// Node: ranks that plan together. A number, not an address.
typedef struct mp_node_s *mp_node_t;

/// Endpoint of one rank for the messages of a node. A number, not an address.
typedef struct mp_messenger_s *mp_messenger_t;

/// Rank number that matches messages from any rank. Receives and probes accept it; no function returns it, and no
/// constant of MPI has its value.
#define MP_ANY_RANK (-2147483647)

/// Rank number that stands for rank 0 of a communicator if that rank is on another node. The next ranks have the numbers
/// below it.
#define MP_FIRST_ELSEWHERE (-1073741824)

/// Rank number that stands for a rank of a communicator on another node. Every call that takes a rank of the node
/// rejects it with a clear error, for example "rank 5 is on another node".
#define MP_RANK_ELSEWHERE(rank) (MP_FIRST_ELSEWHERE - (rank))

/// Window index that stands for a window which the other rank names. The other rank's descriptor has the same tag as its
/// offset.
#define MP_BY_TAG 0xFFFFFFFF

/// Execution of a plan, or a send or receive, that can be waited for. A number, not an address.
typedef struct mp_request *mp_request_t;

/// Major version of this header. Increases with incompatible changes.
#define MP_VERSION_MAJOR 0

/// Minor version of this header. Increases with new functions; before 1.0 also with incompatible changes.
#define MP_VERSION_MINOR 1

/// Patch version of this header.
#define MP_VERSION_PATCH 0

/// Version of this header as one comparable number: 10000 for each major version plus 100 for each minor version plus
/// the patch version.
#define MP_VERSION (((MP_VERSION_MAJOR * 10000) + (MP_VERSION_MINOR * 100)) + MP_VERSION_PATCH)

/// Value of `mp_plan_options_t::relay_gpus` that forbids relaying through any GPU.
#define MP_RELAY_NONE 9223372036854775808ull

/// Maximum size of a message's metadata, bytes.
#define MP_MESSAGE_METADATA_BYTES 256

/// Outcome of a call. Numbers are never reused or changed.
typedef enum {
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
} mp_status_t;

/// Execution backend of a context.
typedef enum {
    /// The value of `MPGPU_BACKEND`. If it is not set: CUDA if a GPU is available, otherwise the host backend.
    MP_BACKEND_AUTO = 0,
    /// Virtual devices on CPU threads. They move real bytes; times are modelled.
    MP_BACKEND_HOST = 1,
    /// NVIDIA GPUs.
    MP_BACKEND_CUDA = 2,
} mp_backend_t;

/// Mechanism that executes a plan.
typedef enum {
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
} mp_engine_t;

/// Three-valued option: on, off or the default.
typedef enum {
    /// The value from the environment. If the environment has none, the model decides.
    MP_DEFAULT = 0,
    /// Allowed.
    MP_ON = 1,
    /// Forbidden.
    MP_OFF = 2,
} mp_switch_t;

/// Method by which streams wait for signals.
typedef enum {
    /// The value of `MPGPU_SIGNAL_WAIT`. If it is not set, streams wait by stream operations. Steps of node plans that
    /// move few bytes between ranks with one GPU each wait by one kernel per rank, except for some steps after a rank
    /// was late: docs/reference/waiting.md.
    MP_SIGNAL_WAIT_DEFAULT = 0,
    /// Stream operation, which uses no GPU resources.
    MP_SIGNAL_WAIT_OPERATION = 1,
    /// Kernel of one warp. It continues 4 us sooner and occupies the GPU while it waits; docs/reference/waiting.md
    /// lists the conditions. The host backend ignores this value.
    MP_SIGNAL_WAIT_KERNEL = 2,
} mp_signal_wait_t;

/// Agent that moves partitions as soon as they are ready.
typedef enum {
    /// Copy engines, with the number of partitions that `mp_node_tune_partitions` found best for such transfers.
    /// Without such a result in the tuning file of rank 0, the model chooses the number. With `arrivals` off, steps
    /// choose by measured times: move each partition by itself, several together, or all after their producers. With
    /// `stores` on, the producers may also move them. If `adapt` of the plan's options is off, steps do not choose.
    MP_AGENT_AUTO = 0,
    /// Copy engines, over all paths of the plan, each partition by itself. Uses no multiprocessor.
    MP_AGENT_COPY_ENGINE = 1,
    /// Producing kernels, which store their bytes at the destination to which the trigger points.
    MP_AGENT_PRODUCER = 2,
} mp_agent_t;

/// Collective: copies between participants, which are devices of a process or ranks of a node. No collective reduces.
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

/// Format of a description.
typedef enum {
    /// Lines of text for people. The format may change between versions.
    MP_FORMAT_TEXT = 0,
    /// One JSON object.
    MP_FORMAT_JSON = 1,
} mp_format_t;

/// Log level. Each level includes those before it.
typedef enum {
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
} mp_log_level_t;

/// Details of a failure. Initialise with `MP_ERROR_INFO_INIT`.
typedef struct {
    /// `sizeof(mp_error_info_t)`.
    size_t size;
    /// Status that the call returned.
    mp_status_t status;
    /// Error code of the driver. 0 if no driver reported an error.
    int64_t driver_code;
    /// Name of the parameter that caused the error. NULL if none did.
    const char *argument;
    /// Text that `mp_last_error` returns.
    const char *message;
} mp_error_info_t;

/// Function that receives log records. It is called on the thread that logs, which may be any thread. Both texts are
/// valid only during the call. It must not call functions of this library, and must return (no `longjmp`, no
/// exception).
typedef void (*mp_log_callback_t)(mp_log_level_t level, const char *target, const char *message, void *user);

/// Options of a new context. Initialise with `MP_CONTEXT_OPTIONS_INIT`. A field that is 0 or NULL takes its value from
/// the environment, or else its default. docs/reference/environment.md lists the variables.
typedef struct {
    /// `sizeof(mp_context_options_t)`.
    size_t size;
    /// Execution backend.
    mp_backend_t backend;
    /// Name of a preset or path of a topology file, UTF-8. Read during the call only.
    const char *topology;
    /// Maximum staging memory on each device that needs it, bytes. Plans may use less, not more. Host memory for
    /// threads that copy pageable memory is counted separately, with the same maximum.
    uint64_t staging_bytes;
    /// Maximum number of cached plans. Planning a cached request again is a look-up.
    uint64_t cache_plans;
    /// Method by which streams wait for signals.
    mp_signal_wait_t signal_wait;
    /// Maximum number of CPU threads that copy between pageable and pinned host memory, at most 256. -1 for none.
    int32_t host_threads;
    /// Maximum number of programs whose graphs are kept. The most recently launched programs stay.
    uint64_t cache_graphs;
} mp_context_options_t;

/// Counters of a context since it was created. Initialise with `MP_STATISTICS_INIT`.
typedef struct {
    /// `sizeof(mp_statistics_t)`.
    size_t size;
    /// Calls of `mp_plan` that found the plan of the same request in the cache.
    uint64_t plan_cache_hits;
    /// Calls of `mp_plan` that did not find the plan of the same request in the cache.
    uint64_t plan_cache_misses;
    /// Plans evicted from the cache to stay within its limit.
    uint64_t plan_cache_evictions;
    /// Plans in the cache now.
    uint64_t plan_cache_entries;
    /// Executions enqueued.
    uint64_t executions;
    /// Bytes of all transfers of these executions.
    uint64_t bytes;
    /// Cache misses that found a plan of the same shape with different addresses.
    uint64_t plan_cache_shape_hits;
    /// Executions that were one graph launch. All `graph_` counters are 0 on a backend without graphs.
    uint64_t graph_launches;
    /// Graph launches whose graph already had the addresses.
    uint64_t graph_hits;
    /// Graph launches that first instantiated a graph or updated its addresses.
    uint64_t graph_misses;
    /// Graphs instantiated.
    uint64_t graph_instantiations;
    /// Graphs whose addresses were updated instead of instantiating another graph.
    uint64_t graph_repoints;
    /// Graph launches that waited for an earlier launch because all graphs of the plan were in use.
    uint64_t graph_waits;
    /// Plan shapes that have graphs now.
    uint64_t graph_programs;
    /// Instantiated graphs that exist now.
    uint64_t graph_entries;
} mp_statistics_t;

/// Resources of a context on one device. Initialise with `MP_DEVICE_STATISTICS_INIT`.
typedef struct {
    /// `sizeof(mp_device_statistics_t)`.
    size_t size;
    /// Bytes of staging memory. 0 until a plan stages on this device.
    uint64_t staging_bytes;
    /// Bytes from `mp_alloc` that are not yet freed.
    uint64_t allocated_bytes;
    /// Streams from `mp_stream_create` that are not yet destroyed.
    uint64_t streams;
} mp_device_statistics_t;

/// Function that runs on a CPU thread in stream order. It must return (no `longjmp`, no exception).
typedef void (*mp_host_function_t)(void *user);

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
typedef struct {
    /// First byte of the destination.
    void *dst;
    /// Device of the destination, or `MP_DEVICE_AUTO`.
    int32_t dst_device;
    /// First byte of the source.
    const void *src;
    /// Device of the source, or `MP_DEVICE_AUTO`.
    int32_t src_device;
    /// Number of bytes. With 0 nothing is copied, and the addresses may be NULL.
    uint64_t bytes;
} mp_transfer_t;

/// Options of a plan. Initialise with `MP_PLAN_OPTIONS_INIT`. A field that is 0 takes its value from the environment;
/// if the environment has none, the model decides.
typedef struct {
    /// `sizeof(mp_plan_options_t)`.
    size_t size;
    /// Mechanism that executes the plan.
    mp_engine_t engine;
    /// Maximum number of paths per transfer.
    uint32_t max_paths;
    /// `MP_ON` if a copy between GPUs may pass through host memory, which is the default.
    mp_switch_t host_path;
    /// Bytes of one chunk on staged paths, at least 4096. Chunks are smaller if the staging limit requires it.
    uint64_t chunk_bytes;
    /// Transfers with fewer bytes use one path.
    uint64_t min_bytes;
    /// Maximum staging memory on each device, bytes. At most the context's limit.
    uint64_t staging_bytes;
    /// Bit mask of the GPUs that may relay bytes for others. Bit `g` is GPU `g`. In plans of a node it is the `g`-th
    /// GPU of the node, counted in the order in which the ranks list or see them. `MP_RELAY_NONE` allows none.
    uint64_t relay_gpus;
    /// `MP_ON` if executions choose among variants of the plan by their measured times, which is the default. The
    /// variants are all paths, half of the staged bytes, and plain copies. Plans of a node do not choose.
    mp_switch_t adapt;
    /// Number of chunks of each path through another GPU. Takes precedence over `chunk_bytes`. Larger if the staging
    /// limit requires it.
    uint32_t relay_chunks;
    /// Number of chunks of each path through host memory. Takes precedence over `chunk_bytes`. Larger if the staging
    /// limit requires it.
    uint32_t host_chunks;
} mp_plan_options_t;

/// Properties of a plan. Initialise with `MP_PLAN_INFO_INIT`.
typedef struct {
    /// `sizeof(mp_plan_info_t)`.
    size_t size;
    /// Modelled time of one execution, seconds.
    double predicted_seconds;
    /// Modelled time of the same transfers on one path each, seconds.
    double direct_seconds;
    /// Bytes of all transfers.
    uint64_t bytes;
    /// Number of paths of all transfers.
    uint32_t paths;
    /// Number of operations of one execution.
    uint32_t operations;
    /// Staging memory in use on the device that needs most, bytes.
    uint64_t staging_bytes;
    /// Median time of the last measured executions of the active variant, seconds. 0 if none was measured (`adapt` in
    /// the options).
    double measured_seconds;
    /// Median time of the last measured executions with plain copies, seconds. 0 if none was measured.
    double measured_direct_seconds;
} mp_plan_info_t;

/// Copy from one participant of a collective to another, or to itself.
typedef struct {
    /// Participant that sends.
    uint32_t from;
    /// Participant that receives.
    uint32_t to;
    /// Offset in the sender's send buffer, bytes.
    uint64_t send_offset;
    /// Offset in the receiver's receive buffer, bytes.
    uint64_t receive_offset;
    /// Number of bytes.
    uint64_t bytes;
} mp_piece_t;

/// Message that a receiver gets, and the buffer for its metadata. Initialise with `MP_MESSAGE_INFO_INIT`. Set
/// `metadata` and `metadata_capacity` to receive metadata; calls fill the other fields.
typedef struct {
    /// `sizeof(mp_message_info_t)`.
    size_t size;
    /// Tag of the message.
    uint64_t tag;
    /// Size of the message without metadata, bytes.
    uint64_t bytes;
    /// Rank that sent the message.
    uint32_t rank;
    /// Size of the metadata, bytes. May exceed `metadata_capacity`.
    uint32_t metadata_bytes;
    /// Buffer of the caller that receives up to `metadata_capacity` bytes of metadata. NULL if `metadata_capacity` is
    /// 0.
    void *metadata;
    /// Size of the buffer, bytes. `MP_MESSAGE_METADATA_BYTES` is always enough.
    size_t metadata_capacity;
} mp_message_info_t;

/// Function that is called with the outcome when a request has ended. It must return (no `longjmp`, no exception).
typedef void (*mp_request_function_t)(void *user, mp_status_t status);

/// Options of a probe. Initialise with `MP_PROBE_OPTIONS_INIT`.
typedef struct {
    /// `sizeof(mp_probe_options_t)`.
    size_t size;
    /// Path of the file to write, UTF-8. Read during the call only. NULL selects a file in the user's cache directory,
    /// where contexts on these GPUs find it together with its tuning file.
    const char *file;
    /// `MP_ON` if the probe writes a file, which is the default.
    mp_switch_t keep;
    /// `MP_ON` for fewer and shorter measurements without tuning. Off by default.
    mp_switch_t quick;
} mp_probe_options_t;

/// Handle of a memory range for other processes of the node. A plain value of fixed size that owns nothing and can
/// travel over MPI or any other channel. The exporter determines how long it is valid.
typedef struct {
    /// Opaque content.
    uint8_t bytes[128];
} mp_memory_handle_t;

/// Signal: a 64-bit counter in memory of a context or in imported memory, and the value to set or wait for. On CUDA the
/// counter must be in host memory from `mp_alloc_shared`.
typedef struct {
    /// Counter, aligned to 8 bytes. New memory holds 0; write a different first value before other processes know the
    /// counter.
    uint64_t *counter;
    /// Value at which the signal counts as reached: the counter is equal or greater. The comparison is cyclic, so a
    /// counter may overflow.
    uint64_t value;
} mp_signal_t;

/// Function that gathers `bytes` bytes of every rank of a node on every rank, as `MPI_Allgather` does. `receive` has
/// room for the bytes of all ranks, in rank order. Returns 0 on success and any other number on failure. It must return
/// (no `longjmp`, no exception).
typedef int (*mp_allgather_t)(void *user, const void *send, void *receive, size_t bytes);

/// Options of a new node. Initialise with `MP_NODE_OPTIONS_INIT`.
typedef struct {
    /// `sizeof(mp_node_options_t)`.
    size_t size;
    /// GPUs that this rank uses, as its context numbers them. NULL for all GPUs visible to the rank; GPUs that are
    /// visible to several ranks are divided evenly.
    const int32_t *devices;
    /// Number of elements of `devices`. 0 if `devices` is NULL.
    size_t device_count;
    /// Path of a socket at which the ranks meet if there is no allgather function. All ranks pass the same path, in a
    /// folder that they may all write to. They wait one minute for each other. NULL if an allgather function is given.
    const char *socket;
    /// Reason why this rank cannot join, or NULL. If it is set, the call fails on all ranks, and the other ranks
    /// receive the reason. The context may then be NULL.
    const char *failure;
} mp_node_options_t;

/// Memory of a rank that transfers of a node's plan may refer to.
typedef struct {
    /// First byte.
    void *memory;
    /// Number of bytes. With 0 the address may be NULL.
    uint64_t bytes;
} mp_window_t;

/// Position in a window of a rank.
typedef struct {
    /// Rank that owns the window.
    uint32_t rank;
    /// Index of the window among those that the rank passes, from 0; or `MP_BY_TAG`.
    uint32_t window;
    /// Bytes from the start of the window. With `MP_BY_TAG` the tag, which may be any number.
    uint64_t offset;
} mp_node_end_t;

/// Copy between windows of two ranks, or within one rank.
typedef struct {
    /// Destination.
    mp_node_end_t dst;
    /// Source.
    mp_node_end_t src;
    /// Number of bytes.
    uint64_t bytes;
} mp_node_transfer_t;

/// Options of transfers that are divided into partitions. Initialise with `MP_PARTITION_OPTIONS_INIT`.
typedef struct {
    /// `sizeof(mp_partition_options_t)`.
    size_t size;
    /// Number of partitions of each transfer, at most 4096. 0 lets the model choose. Partitions of different sizes must
    /// be separate transfers.
    uint32_t count;
    /// Agent that moves the partitions.
    mp_agent_t agent;
    /// `MP_ON` if receivers are notified when each partition arrives, which is the default. With copy engines a
    /// notification takes about 2 us per partition. Other agents always notify.
    mp_switch_t arrivals;
    /// `MP_ON` if `MP_AGENT_AUTO` may let the producers store at the destination. This requires that the producers are
    /// kernels which write where the trigger points, that nothing reads the moved bytes in the source, and that the
    /// stream of `mp_execute` is ordered after the producers. Off by default. Ignored if a kernel cannot access the
    /// destination, or if `arrivals` is on.
    mp_switch_t stores;
} mp_partition_options_t;

/// Addresses and sizes that producers and receivers of one transfer need, for `mpgpu::trigger` of mpgpu/trigger.cuh.
/// Initialise with `MP_TRIGGER_INIT`. `counters` is on the source's device. All other addresses are in host memory that
/// GPUs can access. They are valid until the plan is destroyed.
typedef struct {
    /// `sizeof(mp_trigger_t)`.
    size_t size;
    /// Two words that describe the step to its producers, from `mp_plan_arm` to the end of the step. The first is the
    /// address at which they write: in the source, or in the destination if producers store. The second is 1 if
    /// producers count ready partitions. It is 0 in steps in which all bytes move after the producers, or in which
    /// producers store and no receiver is notified. NULL on a rank that does not send the transfer.
    const uint64_t *step;
    /// Flags, one per partition, that are set to 1 when the partition is ready. NULL on a rank that does not send the
    /// transfer.
    uint64_t *ready;
    /// Flags, `arrived_flags` per partition in partition order, that are all 1 when the partition has arrived. NULL on
    /// a rank that does not receive the transfer or is not notified.
    const uint64_t *arrived;
    /// Counters, one per partition, that its producers increment. They are 0 between steps.
    uint64_t *counters;
    /// Size of the transfer, bytes.
    uint64_t bytes;
    /// Size of each partition except the last, bytes.
    uint64_t partition_bytes;
    /// Number of partitions.
    uint32_t partitions;
    /// Number of arrival flags per partition.
    uint32_t arrived_flags;
} mp_trigger_t;

/// Function that launches in `stream` the work that produces one step of a plan with partitions. `triggers` has `count`
/// elements, one for each transfer that this rank passed, in that order. Returns 0 on success and any other number on
/// failure. It may call functions of this library, except those that all ranks call together. It must return (no
/// `longjmp`, no exception).
typedef int (*mp_produce_t)(void *user, const mp_trigger_t *triggers, size_t count, mp_stream_t stream);

/// Candidates and limits of `mp_node_tune_partitions`. Initialise with `MP_PARTITION_TUNING_INIT`.
typedef struct {
    /// `sizeof(mp_partition_tuning_t)`.
    size_t size;
    /// Bit mask of the agents to try, for example `1 << MP_AGENT_COPY_ENGINE`. 0 selects copy engines. Include
    /// `MP_AGENT_PRODUCER` only if the producers write where the trigger points. `MP_AGENT_AUTO` requires `arrivals`
    /// off; it lets producers store if the mask has `MP_AGENT_PRODUCER`, and runs 48 steps to adapt before it is timed.
    uint32_t agents;
    /// Number of timed steps of each candidate, at most 1000. 0 selects 7.
    uint32_t rounds;
    /// `MP_ON` if receivers are notified when each partition arrives, as in `mp_partition_options_t`.
    mp_switch_t arrivals;
    /// Number of blocks of the producing kernel, for programs that tune with several block counts. Trials with
    /// different block counts are kept separately. 0 if the program uses only one.
    uint32_t blocks;
    /// Path of the tuning file in which rank 0 keeps all trials, for `mpgpu tune partitions`. The file is created if it
    /// does not exist. NULL selects the file of MPGPU_TUNING_FILE; if that is not set either, no trials are kept.
    const char *file;
} mp_partition_tuning_t;

/// Options of a new messenger. Initialise with `MP_MESSENGER_OPTIONS_INIT`. All ranks pass the same options.
typedef struct {
    /// `sizeof(mp_messenger_options_t)`.
    size_t size;
    /// Maximum number of unreceived sends and described buffers of a rank. The same number of unfinished receives and
    /// fetches is allowed. 1 to 65,536; each takes 4 KiB of shared memory. 0 selects 1,024.
    uint32_t operations;
    /// Maximum number of messages of one rank that may wait for receives of another, 1 to 1,048,576. 0 selects 4,096.
    /// `operations` is a further limit.
    uint32_t messages;
} mp_messenger_options_t;

/// Descriptor of a buffer that a rank of the node may fetch. A plain value of fixed size that owns nothing and can
/// travel inside a message of the program.
typedef struct {
    /// Opaque content.
    uint8_t bytes[64];
} mp_message_descriptor_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/// Returns the version of the library, comparable with `MP_VERSION` of the header. May be called from any thread; never
/// fails.
uint32_t mp_version(void);

/// Returns the version of the library as text, for example `0.1.0`. The text has static storage. May be called from any
/// thread; never fails.
const char *mp_version_string(void);

/// Returns the name of a status, for example `MP_ERROR_OVERLAP`, or `unknown status` for any other number.
///
/// The text has static storage. May be called from any thread; never fails and does not change the last error.
const char *mp_status_string(mp_status_t status);

/// Returns the error text of the last call that failed on this thread. The text names the invalid value and, if there
/// is one, the remedy.
///
/// Never NULL; empty if no call on this thread has failed. Successful calls do not change it. The text belongs to the
/// library and is valid until the next call that fails on this thread, or until the thread ends.
const char *mp_last_error(void);

/// Fills `*info` with details of the last call that failed on this thread. The status is `MP_SUCCESS` if no call has
/// failed.
///
/// The texts belong to the library and are valid for as long as the text of `mp_last_error`.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` if `info` is NULL or its size is wrong. This error then becomes the last error.
mp_status_t mp_last_error_info(mp_error_info_t *info);

/// Sends the library's log records of `max_level` and below to `callback` from now on, for the whole process. A NULL
/// `callback` or level 0 stops this. The library passes `user` to the callback unchanged.
///
/// While a callback is set, nothing goes to standard error unless `MPGPU_LOG` requests it. When this call returns, no
/// thread is inside the previous callback, so the memory behind its `user` may be freed. May be called from any thread,
/// but not from inside the callback.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` for an unknown level and for a call from inside the callback;
/// `MP_ERROR_NOT_SUPPORTED` if this process has its own Rust logger, which then receives the records.
mp_status_t mp_log_set_callback(mp_log_level_t max_level, mp_log_callback_t callback, void *user);

/// Creates a context: chooses the backend, reads the topology, and reads the environment once. Call `mp_context_create`
/// instead, which passes the version of the header that the caller was compiled with.
///
/// NULL `options` means all defaults. The caller owns `*context` and destroys it with `mp_context_destroy`. Several
/// contexts may exist; they share nothing. May be called from any thread.
///
/// A child of `fork` has neither the threads nor the GPUs of its parent. In the child, destroying the parent's
/// contexts, plans and requests does nothing, and every other call with them fails with `MP_ERROR_INVALID_HANDLE`. The
/// child may create its own contexts. On CUDA this requires that the child was forked before the parent first used the
/// driver, or that it starts another program by `exec`.
///
/// Errors:
/// - `MP_ERROR_VERSION_MISMATCH` if header and library are incompatible.
/// - `MP_ERROR_ENVIRONMENT` for a malformed `MPGPU_` variable. Unknown `MPGPU_` variables cause a log warning only.
/// - `MP_ERROR_NOT_SUPPORTED` for a backend or a setting that this build does not support.
/// - `MP_ERROR_TOPOLOGY`, `MP_ERROR_INVALID_ARGUMENT`.
mp_status_t mp_context_create_versioned(const mp_context_options_t *options,
                                        uint32_t header_version,
                                        mp_context_t *context);

/// Destroys a context. Waits until all of its work has finished, then frees its staging memory and all objects that the
/// caller has not destroyed. A log warning lists memory from `mp_alloc` that was not freed. Plans and requests of the
/// context become invalid handles.
///
/// First cancels operations that wait for others: messages, and partitions that no producer makes ready, end within 10
/// seconds. Waits for signals still block this call. So do waits for a rank that is alive but does not execute a step
/// or post the matching operation. The library's threads block all POSIX signals except those of their own faults.
///
/// Blocks. May be called from any thread, but not from a host function or a log callback. Calls that other threads make
/// with the context meanwhile fail with `MP_ERROR_INVALID_HANDLE`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. Any other error is the first of the outstanding work or of freeing resources; the
/// context is destroyed nevertheless.
mp_status_t mp_context_destroy(mp_context_t context);

/// Returns the backend of a context and its number of devices.
///
/// `*backend` receives `MP_BACKEND_HOST` or `MP_BACKEND_CUDA`. GPUs are 0 to `*gpus - 1`. Host domains are
/// `MP_DEVICE_HOST_NUMA(0)` to `MP_DEVICE_HOST_NUMA(*host_domains - 1)`. Each pointer may be NULL. May be called from
/// any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_context_get_info(mp_context_t context, mp_backend_t *backend, int32_t *gpus, int32_t *host_domains);

/// Describes the context: version, backend, topology, active settings, and the file of the tuned values if there are
/// any.
///
/// `*length` receives the size of the text including its final NUL, bytes. If `text` is NULL, nothing else is written;
/// otherwise the text is written to `text`, which has `capacity` bytes. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_INVALID_ARGUMENT` if the format is unknown, `length` is NULL or
/// `capacity` is too small; in the last case `*length` still receives the required size, and `text` is not written.
mp_status_t mp_context_describe(mp_context_t context, mp_format_t format, char *text, size_t capacity, size_t *length);

/// Fills `*statistics` with counters of the context since it was created. May be called from any thread. Calls that run
/// concurrently may or may not be counted.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `statistics` is NULL or its size is wrong.
mp_status_t mp_context_statistics(mp_context_t context, mp_statistics_t *statistics);

/// Fills `*statistics` with the resources that the context currently holds on `device`. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_INVALID_ARGUMENT` if `statistics` is NULL or
/// its size is wrong.
mp_status_t mp_context_device_statistics(mp_context_t context, int32_t device, mp_device_statistics_t *statistics);

/// Allocates `bytes` bytes on `device`.
///
/// On a GPU this is GPU memory, which other processes can map. On a host domain it is pinned memory that GPUs read and
/// write directly; on CUDA larger buffers are spread over the sockets (docs/guide/gpus.md). For host memory that other
/// processes can map, use `mp_alloc_shared`. `*memory` is aligned to at least 256 bytes and its contents are undefined.
/// The caller owns it until `mp_free`; destroying the context frees it too. The program can access GPU memory of the
/// host backend, but not of CUDA. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_INVALID_ARGUMENT` for 0 bytes or NULL
/// `memory`, `MP_ERROR_OUT_OF_MEMORY`.
mp_status_t mp_alloc(mp_context_t context, int32_t device, uint64_t bytes, void **memory);

/// Allocates memory that other processes can map (`mp_memory_export`), otherwise as `mp_alloc`. Free it with `mp_free`.
/// May be called from any thread.
///
/// Other processes can map host memory only from this function. On CUDA the host memory of `mp_alloc` is in huge pages,
/// which few systems provide for shared memory. The host memory of this function is zeroed, and each allocation uses a
/// file descriptor. On CUDA, allocations of 4 MiB or more have all pages resident when the call returns. The pages are
/// spread over the sockets, or are on the NUMA node of the host domain `device`.
///
/// GPU memory is allocated in multiples of 2 MiB. Other processes can map it even if another library, for example UCX
/// inside MPI, has opened it. MPI itself moves memory of `mp_alloc` faster.
///
/// Errors: the errors of `mp_alloc`; `MP_ERROR_NOT_SUPPORTED` if the system provides no memory file, or no file
/// descriptor is left (`ulimit -n`).
mp_status_t mp_alloc_shared(mp_context_t context, int32_t device, uint64_t bytes, void **memory);

/// Frees memory of `mp_alloc`. Waits until all work that the context has enqueued so far has finished, as `cudaFree`
/// does; work that a stream captures does not count. Plans that use the memory can no longer be executed. NULL does
/// nothing.
///
/// May be called from any thread, but not from a host function. As with `cudaFree`, no other thread may enqueue work
/// that uses the memory during the call.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `mp_alloc` of this context did not return `memory`,
/// or if it was already freed.
mp_status_t mp_free(mp_context_t context, void *memory);

/// Frees memory of `mp_alloc` after all work that is now enqueued in `stream`, without waiting for it. As with
/// `cudaFreeAsync`, work of other streams that uses the memory must be ordered before that, for example by events.
///
/// The memory counts as freed when the call returns: plans that use it, and handles of it, are rejected. The driver
/// gets its bytes back later, which may wait for the GPU: in a later `mp_free` or `mp_context_destroy`, or if an
/// `mp_alloc` finds no free memory; on the host backend in the next allocation. NULL does nothing. May be called from
/// any thread, but not from a host function.
///
/// Errors, after which the caller still owns the memory: `MP_ERROR_INVALID_HANDLE` for context or stream;
/// `MP_ERROR_INVALID_POINTER` as for `mp_free`; `MP_ERROR_NOT_SUPPORTED` while `stream` is being captured.
mp_status_t mp_free_async(mp_context_t context, void *memory, mp_stream_t stream);

/// Pins `bytes` bytes of the program's own host memory at `pointer`, for example an array, a mapped file or memory of
/// another library. Plans made from now on copy from and to this memory directly, over all links.
///
/// The caller keeps ownership of the memory. Until `mp_memory_unregister`, the memory must stay mapped and no other
/// memory may be mapped at its address, because copies keep using the pinned pages. Read-only memory can be a source if
/// the driver pins such memory.
///
/// Blocks: threads make all pages resident, in huge pages if `huge_pages` is 1 and the system supports them, and pin
/// the range in pieces that end at multiples of 1 GiB. Time per GiB on two H200 (2026-11-27): 85 ms to make pages
/// resident (48 ms in huge pages) and 33 ms (22 ms) to pin. A copy that spans several pieces counts as several
/// transfers of its plan. A window of a node plan must be within one piece. Other processes cannot map such memory.
/// Whole pages are pinned. May be called from any thread, but not from a host function.
///
/// Errors, after which nothing is pinned:
/// - `MP_ERROR_INVALID_ARGUMENT` for 0 bytes, or if `huge_pages` is neither 0 nor 1.
/// - `MP_ERROR_INVALID_POINTER` for NULL, and if the range contains memory of the context, memory of the driver, or
///   unmapped addresses.
/// - `MP_ERROR_NOT_SUPPORTED` for memory that another library has pinned or that the driver cannot pin.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
mp_status_t mp_memory_register(mp_context_t context, void *pointer, uint64_t bytes, int32_t huge_pages);

/// Unpins memory that `mp_memory_register` pinned. Waits until all work that the context has enqueued so far has
/// finished. Plans that use the memory can no longer be executed. Plans made afterwards treat it as pageable memory.
/// NULL does nothing.
///
/// May be called from any thread, but not from a host function. As with `mp_free`, no other thread may enqueue work
/// that uses the memory during the call.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if this context has not registered memory that begins
/// at `pointer`; `MP_ERROR_DRIVER`, after which the memory counts as unregistered.
mp_status_t mp_memory_unregister(mp_context_t context, void *pointer);

/// Creates a stream of `device`. It is not ordered with any other stream, including the default stream. On CUDA it is a
/// `cudaStream_t`. The caller owns it until `mp_stream_destroy`. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_INVALID_ARGUMENT` if `stream` is NULL.
mp_status_t mp_stream_create(mp_context_t context, int32_t device, mp_stream_t *stream);

/// Destroys a stream that `mp_stream_create` returned. Work that is already enqueued in it still finishes. May be
/// called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE` for the context, or for a stream that `mp_stream_create` of this context did not
/// return.
mp_status_t mp_stream_destroy(mp_context_t context, mp_stream_t stream);

/// Blocks until all work enqueued in `stream` so far has finished. NULL is the default stream. May be called from any
/// thread, but not from a host function.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_PEER_GONE`, once, if a wait for signals or a node plan in this stream,
/// or in a stream that it has waited for, was abandoned because a peer exited (see `mp_stream_wait_signals`). Any other
/// error is that of work in the stream.
mp_status_t mp_stream_synchronize(mp_context_t context, mp_stream_t stream);

/// Writes the device and the capture state of a stream.
///
/// `*device` receives the device of `stream`. Only kernels of that device can be launched in the stream. The default
/// streams of CUDA belong to the GPU that is current when they are used, so for them `*device` is `MP_DEVICE_HOST`.
/// `*capturing` receives 1 if the stream is being captured into a graph, so that enqueued work runs at every launch of
/// the graph. Otherwise, and always on the host backend, it receives 0. Either pointer may be NULL. May be called from
/// any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_stream_get_info(mp_context_t context, mp_stream_t stream, int32_t *device, int32_t *capturing);

/// Enqueues a call of `function(user)` on a CPU thread, after all earlier work in `stream` and before all later work.
///
/// The function may block, but must not call this library. On CUDA the driver runs the functions of several streams one
/// after the other, so a function must not wait for a function of another stream. On the host backend each stream has a
/// thread for its functions. In a stream that is being captured, the function runs at every launch of the graph, and
/// concurrently on several threads if several executables of the graph run concurrently. May be called from any thread.
///
/// If `release` is NULL, the caller keeps ownership of `user` and keeps it valid until the function has run; in a
/// capture, for as long as the graph and all of its executables exist. Otherwise this call transfers ownership of
/// `user` to the library, which calls `release(user)` once, on any thread, when the function will not be called again:
/// after it has run, or, in a capture, when the graph and all of its executables are destroyed. `release` must not call
/// functions of this library or of CUDA. If this call fails, neither function is ever called and the caller keeps
/// ownership of `user`. If the GPU fails before the function has run, the driver drops the call and `release` is not
/// called.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `function` is NULL; `MP_ERROR_NOT_SUPPORTED` in a
/// capture if the driver is older than CUDA 11.3.
mp_status_t mp_stream_launch_host(mp_context_t context,
                                  mp_stream_t stream,
                                  mp_host_function_t function,
                                  void *user,
                                  mp_host_function_t release);

/// Creates an event. An event that was never recorded counts as completed. The caller owns it until `mp_event_destroy`.
///
/// The event works with streams of every device. Therefore on CUDA it is not a `cudaEvent_t` and must not be passed to
/// functions of CUDA. The functions here also accept a `cudaEvent_t`. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `event` is NULL.
mp_status_t mp_event_create(mp_context_t context, mp_event_t *event);

/// Destroys an event that `mp_event_create` returned. Waits that are already enqueued remain effective. May be called
/// from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_event_destroy(mp_context_t context, mp_event_t event);

/// Records in `event` all work enqueued in `stream` so far, and replaces an earlier record. May be called from any
/// thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_event_record(mp_context_t context, mp_event_t event, mp_stream_t stream);

/// Blocks until the work recorded in `event` has finished. May be called from any thread, but not from a host function.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_PEER_GONE` as `mp_stream_synchronize`, but every time until the event
/// is recorded in a stream that has already reported the error; for a `cudaEvent_t` once, if `mp_event_record` has
/// recorded it.
mp_status_t mp_event_synchronize(mp_context_t context, mp_event_t event);

/// Makes all work that is enqueued in `stream` from now on wait for the work that is currently recorded in `event`.
/// Does not block. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_stream_wait_event(mp_context_t context, mp_stream_t stream, mp_event_t event);

/// Plans a batch of transfers together, so that they do not compete for links.
///
/// Blocks for some microseconds. Planning the same request again is a look-up in the context's plan cache. A request of
/// the same shape as a cached plan is checked and bound to its addresses without being planned again. Two requests have
/// the same shape if they have equally many transfers in the same order, each between the same devices and kinds of
/// memory and of the same size. The shape also includes which sources of 1 MiB or more several transfers share.
///
/// The transfers of a batch run in no particular order. No destination may overlap another destination or any source of
/// the batch; sources may overlap. With `count` 0 the plan does nothing. `transfers` and `options` are read during the
/// call only; NULL `options` means all defaults. The memory must stay allocated for as long as the plan is executed: a
/// plan whose memory was freed with `mp_free` is rejected. The caller owns `*plan` and destroys it with
/// `mp_plan_destroy`. Staging memory is allocated here on devices that have none yet. May be called from any thread.
///
/// Errors:
/// - `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_INVALID_POINTER` (NULL, unknown, on another device, or outside its
///   allocation), `MP_ERROR_OVERLAP`, `MP_ERROR_NO_ROUTE`. The text gives the index of the transfer.
/// - `MP_ERROR_INVALID_ARGUMENT` for an option.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`.
mp_status_t mp_plan(mp_context_t context,
                    const mp_transfer_t *transfers,
                    size_t count,
                    const mp_plan_options_t *options,
                    mp_plan_t *plan);

/// Destroys a plan. Executions in progress still finish. The context may keep the plan in its cache. May be called from
/// any thread.
///
/// Each rank destroys its handle of a plan of `mp_node_plan` itself, after the last execution that it enqueues. The
/// call then blocks until the rank's executions have finished. Ranks that have enqueued more executions get
/// `MP_ERROR_PEER_GONE`; if a rank captures its steps, the others get it only when that rank leaves after a failure.
/// Staging memory that other ranks use is freed when they have destroyed their handles; `mp_context_destroy` waits up
/// to five seconds for that.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; for a plan of a node also the errors of its executions, and the plan is destroyed
/// nevertheless.
mp_status_t mp_plan_destroy(mp_plan_t plan);

/// Describes the plan: its paths, shares, chunks, staging and predicted time, and the reasons why other paths were
/// rejected. The parameters are those of `mp_context_describe`. May be called from any thread.
///
/// Errors: the errors of `mp_context_describe`.
mp_status_t mp_plan_describe(mp_plan_t plan, mp_format_t format, char *text, size_t capacity, size_t *length);

/// Fills `*info` with properties of the plan. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `info` is NULL or its size is wrong.
mp_status_t mp_plan_get_info(mp_plan_t plan, mp_plan_info_t *info);

/// Prepares the first execution of the plan in `stream`, so that it takes no longer than later ones.
///
/// It instantiates graphs, maps memory of other processes, enables access between GPUs, loads kernels, and creates
/// internal streams and events. It enqueues nothing and moves no data. Other processes need not call it.
///
/// In a time loop, call it before the first step, once for each plan and stream. It may take milliseconds and may wait
/// for work of the GPUs. Only the graphs of a limited number of plans are kept, those executed last. While `stream` is
/// being captured, no graph is instantiated. May be called from any thread, but not from a host function.
///
/// Errors: the errors of `mp_execute`.
mp_status_t mp_plan_prepare(mp_plan_t plan, mp_stream_t stream);

/// Enqueues one execution of the plan in `stream` and returns. The execution starts after all earlier work in `stream`,
/// and later work in `stream` starts after it. The call does not wait for the device, unless the driver blocks because
/// the queue of `stream` is full (on CUDA about a thousand operations behind one that waits).
///
/// `stream` is a stream from `mp_stream_create` of the same context, on CUDA any `cudaStream_t`, or NULL for the
/// default stream. `request` may be NULL, which is cheapest. Otherwise `*request` receives a handle for `mp_wait` and
/// `mp_test`, which the caller owns.
///
/// A plan may be executed any number of times, in several streams and threads concurrently. The library orders
/// executions that share staging memory by the order of the calls. The caller must order executions in different
/// streams that write the same destination. May be called from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE` for plan or stream.
/// - `MP_ERROR_INVALID_POINTER` if memory of the plan was freed.
/// - `MP_ERROR_INVALID_ARGUMENT` for a plan with partitions that is not armed.
/// - `MP_ERROR_INTERNAL` if the program fails its own check (`MPGPU_VERIFY=program`, debug builds). Nothing was
///   enqueued.
/// - `MP_ERROR_NOT_SUPPORTED` for operations that a captured stream cannot hold, and for a copy between memory pools or
///   mappings of two GPUs if neither GPU can access both. Nothing was enqueued.
mp_status_t mp_execute(mp_plan_t plan, mp_stream_t stream, mp_request_t *request);

/// Writes the copies of a collective between `participants` participants, as pieces without addresses.
///
/// A process turns each piece into an `mp_transfer_t` between two of its devices, and plans them together by `mp_plan`.
/// A rank turns each piece whose `from` or `to` is its own rank into a send or receive descriptor of `mp_node_plan`,
/// with `MP_BY_TAG`. Leave out a piece whose source and destination address are equal (in place). Planning the same
/// collective again is a look-up. Bytes that several participants receive are forwarded by participants that already
/// have them.
///
/// The blocks that a participant sends or receives are contiguous, in participant order. If `sizes` is NULL, every
/// block has `bytes` bytes. Otherwise `bytes` is ignored and `sizes` holds the sizes of the blocks: one number for a
/// broadcast, one per participant for a scatter, a gather and an all-gather, and for an all-to-all one per sender and
/// receiver, ordered by sender. Only a broadcast, a scatter and a gather read `root`. Empty pieces are left out.
///
/// `*count` receives the number of pieces. If `pieces` is NULL, nothing else is written; otherwise it has room for
/// `capacity` pieces. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` if `count` is NULL, for an unknown collective or root, for more than 1024
/// participants, for sizes whose sum overflows, or if `capacity` is too small. In the last case `*count` still receives
/// the number of pieces and `pieces` is not written.
mp_status_t mp_collective(mp_collective_t collective,
                          uint32_t participants,
                          uint32_t root,
                          uint64_t bytes,
                          const uint64_t *sizes,
                          mp_piece_t *pieces,
                          size_t capacity,
                          size_t *count);

/// Blocks the calling thread until the execution, send, receive or fetch has ended, then destroys the request and sets
/// `*request` to NULL. Waiting for a NULL request succeeds immediately. May be called from any thread. If two threads
/// wait for the same request, one of them may get `MP_ERROR_INVALID_HANDLE`.
///
/// `info` may be NULL. Otherwise `*info` receives the message of a send, a receive or a fetch, even if the call returns
/// `MP_ERROR_MESSAGE_TRUNCATED`. After any other error of a receive `*info` is unchanged.
///
/// Errors:
/// - `MP_ERROR_INVALID_HANDLE`, also for a NULL request if `info` is not NULL. `*request` is unchanged.
/// - `MP_ERROR_INVALID_ARGUMENT`, also if `info` is not NULL and the request belongs to an execution, which has no
///   message. `*request` is unchanged.
/// - Any other error, for example `MP_ERROR_DATA_CORRUPTION` or `MP_ERROR_DRIVER`, is the result of the operation. The
///   request is destroyed and `*request` is NULL.
/// - `MP_ERROR_PEER_GONE` also reports abandoned waits as `mp_stream_synchronize` does, for an execution that was
///   enqueued before its stream reported the error. The request is destroyed and `*request` is NULL.
mp_status_t mp_wait(mp_request_t *request, mp_message_info_t *info);

/// Checks whether the operation has ended, without blocking. `*done` receives 1 or 0. If the operation has ended, the
/// request is destroyed, `*request` is set to NULL and `*info` is filled as by `mp_wait`. Otherwise `*request` and
/// `*info` are unchanged. A NULL request counts as ended. May be called from any thread.
///
/// Errors: the errors of `mp_wait`. If the error is the result of the operation, `*done` is 1; after any other error
/// `*done` is unchanged.
mp_status_t mp_test(mp_request_t *request, int32_t *done, mp_message_info_t *info);

/// Destroys the request and sets `*request` to NULL, without waiting. The execution continues. A NULL request does
/// nothing. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `request` is NULL.
mp_status_t mp_request_destroy(mp_request_t *request);

/// Cancels a send or receive that has not matched, or a described buffer that was not fetched. `*cancelled` receives 1,
/// and the request ends with `MP_ERROR_CANCELLED`. If it is too late, `*cancelled` receives 0 and the operation
/// continues. In both cases the request must still be waited for or destroyed. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for the request of an execution.
mp_status_t mp_request_cancel(mp_request_t request, int32_t *cancelled);

/// Makes work that is later enqueued in `stream` wait for a request. That work sees the bytes of a receive, may
/// overwrite the bytes of a send, and runs after all of an execution.
///
/// Does not block the host, even if a message has not matched yet. If the request ends with an error, the stream
/// continues, so the result of the request shows whether the bytes have arrived. A NULL request counts as ended. The
/// request stays valid. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_NOT_SUPPORTED` for messages in a stream that is being captured.
mp_status_t mp_stream_wait_request(mp_stream_t stream, mp_request_t request);

/// Calls `function` once with `user` and the outcome when the request has ended.
///
/// The function runs on the thread `mpgpu-callback` of the context, which the first such call starts. On that thread
/// `mp_last_error` returns the text of an error. The function may call the library, but it delays other callbacks of
/// the context. It must not wait for a stream that waits for a receive into pageable host memory, because this thread
/// may have to copy those bytes. A thread that destroys the context or the messenger of the request must not hold a
/// lock that the function acquires, for example Python's interpreter lock.
///
/// The request stays valid, and may be waited for or destroyed before the function is called. Destroying the context
/// calls all remaining functions. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` if `function` is NULL; `MP_ERROR_NOT_SUPPORTED` for
/// an execution that was captured.
mp_status_t mp_request_set_callback(mp_request_t request, mp_request_function_t function, void *user);

/// Measures the machine of a context: the speed of copies between its devices, which copies slow each other down, fixed
/// costs of copies, and whether the bytes arrive. The result is a topology file. The context itself keeps its current
/// topology.
///
/// NULL `options` means all defaults: a full probe, stored in a file that contexts of this user on these GPUs find from
/// then on. Only such a probe is also tuned: it searches for better plans than the model's by executing them, for
/// single copies from and to host memory and, with three or more GPUs, for all-to-alls of all GPUs. Contexts that find
/// the probe also use its tuned plans. If the search fails, the log has a warning and the probe is stored without
/// tuning.
///
/// The probe takes seconds: a full probe of four H200 takes 25 to 31 s, most of it tuning; less than a minute is
/// estimated for eight GPUs. It uses memory and streams on every device, and all links. Other programs that run
/// meanwhile distort the result. On the host backend the probe measures copies by CPU threads, and stores them only in
/// a file that `options` names. A probe that predicts its own check with a median error of more than 20 % is neither
/// tuned nor stored, and contexts do not use it. Blocks. May be called from any thread, but only one probe of a context
/// at a time.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` for an option.
/// - `MP_ERROR_TOPOLOGY` if the file cannot be written.
/// - `MP_ERROR_NOT_SUPPORTED` if the result is not stored or there is no directory for it. `mp_context_probed` still
///   returns the result.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_OUT_OF_MEMORY`, `MP_ERROR_DRIVER`.
mp_status_t mp_context_probe(mp_context_t context, const mp_probe_options_t *options);

/// Returns the topology file of the last `mp_context_probe` of this context, as TOML (docs/reference/topology.md).
///
/// `*length` receives the size of the text including its final NUL, bytes. If `text` is NULL, nothing else is written;
/// otherwise the text is written to `text`, which has `capacity` bytes. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_TOPOLOGY` if this context has not been probed.
/// `MP_ERROR_INVALID_ARGUMENT` if `length` is NULL or `capacity` is too small; in the latter case `*length` still
/// receives the required size, and `text` is not written.
mp_status_t mp_context_probed(mp_context_t context, char *text, size_t capacity, size_t *length);

/// Exports `bytes` bytes at `pointer` to other processes of the node, which map them with `mp_memory_import`. Exporting
/// the same range again returns an equal handle. May be called from any thread.
///
/// The range must be within one allocation. It may come from `mp_alloc` (GPU memory) or `mp_alloc_shared` (host memory)
/// of this context. On CUDA it may also come from `cudaMalloc`, the virtual memory API or a memory pool; the last two
/// must be created with `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`. If `cuMemMap` has mapped a range from several
/// chunks, each chunk is a separate allocation.
///
/// The owner keeps the allocation. Importers map the whole allocation, at any time until it is freed or the context is
/// destroyed. Handles of freed memory are rejected, even if its address is in use again. Importers should close the
/// memory before the owner frees it. On the host backend their mapping otherwise turns into zeros; on CUDA it must not
/// be used any more.
///
/// The handle is a key: any process of this user that has its bytes can read and write the allocation, and no other
/// process can. The first export of a process starts a thread that answers importers.
///
/// Errors:
/// - `MP_ERROR_INVALID_POINTER` for memory that the context does not know, and for a range that leaves its allocation.
/// - `MP_ERROR_NOT_SUPPORTED` for memory that cannot be shared. The text gives the reason and the remedy.
/// - `MP_ERROR_INVALID_ARGUMENT` for 0 bytes or NULL.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_DRIVER`.
mp_status_t mp_memory_export(mp_context_t context, const void *pointer, uint64_t bytes, mp_memory_handle_t *handle);

/// Maps the memory of a handle from `mp_memory_export`.
///
/// `*pointer` receives the address, for use in transfers. `*device` receives the device of the memory, in the numbering
/// of this context, and `*bytes` the size of the range. `device`, `in_kernels` and `bytes` may be NULL. On the host
/// backend the program can read and write the memory directly.
///
/// A handle of this process returns the address that the memory already has. An allocation is mapped once, even if
/// several handles of ranges in it are imported, and stays mapped until `mp_memory_close` has been called as often as
/// this function. The call waits for the exporter's answer, which takes a few microseconds and at most five seconds,
/// even if POSIX signals interrupt it. After the owner has freed the memory or exited, later calls that use it fail
/// with `MP_ERROR_PEER_GONE`. May be called from any thread, but not from a host function.
///
/// If `kernels` is `MP_DEVICE_AUTO`, `*in_kernels` is NULL. On CUDA, plans can use `*pointer`. For memory of
/// `cudaMalloc` and `mp_alloc`, kernels can use it too, on the GPU that is current in the calling thread or, if none is
/// current, on a GPU that the context uses.
///
/// Otherwise `kernels` is the device whose kernels access the memory, at `*in_kernels`. This works regardless of the
/// current GPU, and for memory on a GPU that is not visible to this process. `*pointer` is then not valid in transfers
/// and serves only for `mp_memory_close`; `*device` is `kernels`.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if a pointer is NULL or the bytes are not a handle.
/// - `MP_ERROR_NOT_SUPPORTED` for a handle of another node, container, user or backend; for memory of a GPU that is not
///   visible to this process or that `kernels` cannot access; and for memory that another library of this process has
///   opened by CUDA IPC (docs/guide/processes.md).
/// - `MP_ERROR_PEER_GONE` if the exporter has exited or has freed the memory.
/// - `MP_ERROR_TIMEOUT` if the exporter does not answer.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_VERSION_MISMATCH`, `MP_ERROR_DRIVER`.
mp_status_t mp_memory_import(mp_context_t context,
                             const mp_memory_handle_t *handle,
                             int32_t kernels,
                             void **pointer,
                             int32_t *device,
                             void **in_kernels,
                             uint64_t *bytes);

/// Registers memory of another process that the caller has mapped with `cuIpcOpenMemHandle` or `cudaIpcOpenMemHandle`,
/// for use in transfers.
///
/// `pointer` is the address that the mapping returned, `bytes` its size, and `ipc_handle` the 64-byte handle that was
/// opened. `device` is the GPU on which the memory really is; the driver reports the GPU through which it was opened.
/// Other GPUs that copy this memory open the handle too. Call `mp_memory_close` before you close the mapping. May be
/// called from any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_INVALID_ARGUMENT` if a pointer is NULL, for 0 bytes, and if `device` is not a GPU.
/// - `MP_ERROR_NOT_SUPPORTED` on the host backend, for memory that is not on a GPU, and for memory that the context has
///   mapped itself or that is already registered.
/// - `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`.
mp_status_t mp_memory_adopt(mp_context_t context,
                            void *pointer,
                            uint64_t bytes,
                            int32_t device,
                            const void *ipc_handle);

/// Closes an address from `mp_memory_import`. Closing an allocation for the last time waits until all work that the
/// context has enqueued so far has finished, and unmaps the allocation. Plans that use it can no longer be executed.
/// NULL does nothing. May be called from any thread, but not from a host function.
///
/// Also closes an address from `mp_memory_adopt`, and the mappings that other GPUs have opened for the context. In this
/// case it does not wait; the caller must wait for the work before it closes its own mapping.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `mp_memory_import` of this context did not return
/// `pointer`, or if it was already closed.
mp_status_t mp_memory_close(mp_context_t context, void *pointer);

/// Notifies the owner of imported memory that this process will set no counter in it beyond `value`, although the
/// process continues and may keep the memory mapped.
///
/// Waits for higher values then end as if this process had exited. Other waits continue. Use it in a program that stops
/// early, for example after an exception, while other processes wait for its signals. `pointer` is in memory from
/// `mp_memory_import`. Counters that other importers set must be in separate allocations. Does not wait for work of
/// this process. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` if `pointer` is not in imported memory.
mp_status_t mp_memory_leave(mp_context_t context, const void *pointer, uint64_t value);

/// Writes 16 bytes that identify a device in every process of the node, independent of its number there: the UUID of a
/// GPU; bytes derived from the number for virtual devices and host domains. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_INVALID_ARGUMENT` if `uuid` is NULL.
mp_status_t mp_device_uuid(mp_context_t context, int32_t device, uint8_t *uuid);

/// Makes all work that is enqueued in `stream` from now on wait until the counters of all `count` signals have reached
/// their values. Does not block. Data that was written before a counter was set is then visible to that work. May be
/// called from any thread.
///
/// The counters must be in memory of this context: a receiver waits in its own memory, which it has exported to the
/// process that sets the counters. `signals` is read during the call only. Calls that wait for all work of the context
/// (`mp_free`, `mp_memory_close`, `mp_context_destroy`) wait for these waits too.
///
/// If a process that has mapped a counter's memory exits without closing it, unsatisfied waits in that memory are
/// abandoned. Later work in the stream, and work of other streams that is ordered after it, then runs with stale data.
/// The error is reported as follows:
/// - The next `mp_stream_synchronize` of a stream that waits in that allocation, or that has waited for such a stream
///   by `mp_stream_wait_event`, returns `MP_ERROR_PEER_GONE` once, after its work has finished.
/// - `mp_wait`, `mp_test` and `mp_event_synchronize` return it for work that was enqueued before its stream reported
///   the error.
/// - Streams that are ordered by CUDA's own events are not recognised as dependent, and report nothing.
/// - The library does not know the stream in which a graph is launched, so every stream reports the abandoned waits
///   that were captured.
/// - Later calls whose wait in that memory would fail are rejected.
///
/// Errors:
/// - `MP_ERROR_INVALID_POINTER` for a counter that is NULL, not aligned or not in memory that the context knows. The
///   text gives the index of the signal.
/// - `MP_ERROR_NOT_SUPPORTED` for a counter in imported memory, and on CUDA for a counter that is not in the memory
///   that `mp_signal_t` requires.
/// - `MP_ERROR_PEER_GONE` for a counter that is not reached and whose memory was mapped by a process that exited
///   without closing it. Nothing is enqueued.
/// - `MP_ERROR_INVALID_ARGUMENT` if `signals` is NULL and `count` is not 0.
/// - `MP_ERROR_INVALID_HANDLE` for context or stream.
mp_status_t mp_stream_wait_signals(mp_context_t context, mp_stream_t stream, const mp_signal_t *signals, size_t count);

/// Declares that kernels of the caller wait for the counters of `count` signals, from now until their memory is freed.
/// A kernel that polls such a counter then does not wait forever for a process that has exited.
///
/// If a process that has mapped the memory exits without closing it, the library sets each counter that has not reached
/// its value to that value. Every stream then reports the error when it is synchronised, as `mp_stream_wait_signals`
/// describes for captured waits. Does not wait and enqueues nothing. The highest declared value of each counter counts;
/// repeating a call only checks for errors.
///
/// The counters are subject to the rules of `mp_stream_wait_signals`. `signals` is read during the call only. May be
/// called from any thread.
///
/// Errors: the errors of `mp_stream_wait_signals`, except those about streams. `MP_ERROR_PEER_GONE` if any process that
/// had mapped a counter's memory has exited without closing it.
mp_status_t mp_kernel_wait_signals(mp_context_t context, const mp_signal_t *signals, size_t count);

/// Sets the counters of `count` signals to their values after all work enqueued in `stream` so far. A process that sees
/// the value also sees every byte that this work has written. Does not block. May be called from any thread.
///
/// Setting a counter stores the value, so only one process may set each counter. The counter is in memory of this
/// context or in imported memory. After `mp_execute` this call completes a put with signal. `signals` is read during
/// the call only.
///
/// Errors: the errors of `mp_stream_wait_signals`, but imported memory is accepted. `MP_ERROR_PEER_GONE` if the owner
/// of the memory has exited or has freed it.
mp_status_t mp_stream_raise_signals(mp_context_t context, mp_stream_t stream, const mp_signal_t *signals, size_t count);

/// Sets a counter to `value` now, from the calling thread. A process that sees the value also sees everything that this
/// thread has written and seen before. Does not wait for work in streams; `mp_stream_raise_signals` does.
///
/// The counter must be in memory of this context or in imported memory, and the CPU must be able to access it: on CUDA
/// the memory that `mp_signal_t` requires, on the host backend any memory. May be called from any thread, but not from
/// a host function.
///
/// Errors: the errors of `mp_stream_raise_signals`, except those about streams.
mp_status_t mp_signal_raise(mp_context_t context, uint64_t *counter, uint64_t value);

/// Reads a counter into `*value`. Data that was written before the counter was set to this value is then visible to the
/// calling thread. The counter is subject to the rules of `mp_signal_raise`. May be called from any thread, but not
/// from a host function.
///
/// Errors: the errors of `mp_signal_raise`; `MP_ERROR_INVALID_ARGUMENT` if `value` is NULL.
mp_status_t mp_signal_read(mp_context_t context, const uint64_t *counter, uint64_t *value);

/// Checks whether a counter has reached `value`. `*reached` receives 1 or 0; both are success. Does not wait. The
/// counter is subject to the rules of `mp_signal_synchronize`. May be called from any thread, but not from a host
/// function.
///
/// Errors: the errors of `mp_signal_synchronize` except `MP_ERROR_TIMEOUT`; `MP_ERROR_INVALID_ARGUMENT` if `reached` is
/// NULL.
mp_status_t mp_signal_test(mp_context_t context, const uint64_t *counter, uint64_t value, int32_t *reached);

/// Blocks the calling thread until a counter has reached `value`, but at most `seconds`; with 0 it checks once. The
/// counter must be in memory of this context: in host memory, or on the host backend in any memory. May be called from
/// any thread, but not from a host function.
///
/// Errors:
/// - `MP_ERROR_TIMEOUT` if the value is not reached in time.
/// - `MP_ERROR_PEER_GONE` if a process that has mapped the memory has exited without closing it, and the value is not
///   reached.
/// - `MP_ERROR_INVALID_ARGUMENT` if `seconds` is negative or not a number.
/// - The other errors of `mp_stream_wait_signals`.
mp_status_t mp_signal_synchronize(mp_context_t context, const uint64_t *counter, uint64_t value, double seconds);

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
mp_status_t mp_node_create(mp_context_t context,
                           uint32_t rank,
                           uint32_t ranks,
                           mp_allgather_t allgather,
                           void *user,
                           const mp_node_options_t *options,
                           mp_node_t *node);

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
mp_status_t mp_node_fail(mp_node_t node, const char *reason);

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
mp_status_t mp_node_allgather(mp_node_t node, const char *call, const void *send, void *receive, size_t bytes);

/// Writes the GPUs that this rank uses, as its context numbers them. These are the GPUs of `options->devices`, or this
/// rank's part of the visible GPUs. If several ranks list the same GPU, the rank with the fewest GPUs so far uses it,
/// the lowest one among equals.
///
/// `*count` receives the number of GPUs. If `devices` is NULL, nothing else is written; otherwise it has room for
/// `capacity` numbers. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_INVALID_ARGUMENT` if `count` is NULL or `capacity` is too small; in the
/// latter case `*count` still receives the number of GPUs, and `devices` is not written.
mp_status_t mp_node_devices(mp_node_t node, int32_t *devices, size_t capacity, size_t *count);

/// Writes the first GPU that this rank uses to `*device`. `mp_node_devices` writes all of them. May be called from any
/// thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_INVALID_ARGUMENT` if `device` is NULL, or if the rank uses no GPU
/// because there are more ranks than GPUs or another rank has listed the same GPU; `*device` is then not written.
mp_status_t mp_node_device(mp_node_t node, int32_t *device);

/// Destroys a node. Its plans and messengers stay valid and are destroyed separately, before or after the node
/// (docs/guide/concepts.md, "Ending"). Other ranks need not call it. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_node_destroy(mp_node_t node);

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
mp_status_t mp_node_plan(mp_node_t node,
                         const mp_window_t *windows,
                         size_t window_count,
                         const mp_node_transfer_t *transfers,
                         size_t count,
                         const mp_partition_options_t *partitions,
                         const mp_plan_options_t *options,
                         mp_plan_t *plan);

/// Finds the fastest partitioning of transfers for the kernels that produce them, by trial.
///
/// Plans about ten candidates for each agent, with different numbers of partitions, as `mp_node_plan` does. Executes
/// each candidate several times, with `produce` launching the producers, and selects the one whose median step is
/// shortest on the slowest rank. Candidates that cannot be planned are skipped. `*best` is equal on all ranks; pass it
/// to `mp_node_plan`. The tuning file keeps all trials. `mpgpu tune partitions` prints and plots them, and
/// `MP_AGENT_AUTO` uses the best of them without `MP_AGENT_PRODUCER` (docs/reference/tuning.md).
///
/// All ranks call it together, with the same `tuning` and options. Each rank passes the transfers that it sends. The
/// call creates a stream on each rank. Destinations are overwritten. Blocks. May be called from any thread, but not
/// from a host function.
///
/// Errors:
/// - The errors of `mp_node_plan`, if no candidate can be planned.
/// - `MP_ERROR_INVALID_ARGUMENT` for agents or rounds out of range, for a transfer that another rank sends, and if
///   `produce` failed.
/// - `MP_ERROR_NOT_SUPPORTED` if the file cannot be written.
/// - `MP_ERROR_ENVIRONMENT` if the file belongs to another machine.
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

/// Begins a step of a plan with partitions, in stream order, and returns. The step starts after all earlier work in
/// `stream` and after the previous step. Consumers of the previous step's partitions must be ordered before this call.
///
/// A step consists of three calls:
/// 1. `mp_plan_arm` begins the step.
/// 2. The caller enqueues the producers of the partitions, in `stream` or in a stream that has waited for it. The
///    producers are kernels that mark partitions ready through the trigger from `mp_plan_get_trigger`
///    (mpgpu/trigger.cuh).
/// 3. `mp_execute` enqueues the movement of the partitions and the end of the step. Later work in its stream sees all
///    bytes that this rank receives in the step, and may overwrite the bytes that it sent.
///
/// After `mp_plan_arm`, receivers may check through the trigger whether each partition has arrived. All three calls may
/// be captured, in one capture. Each partition must be marked ready once per step, even if its data has not changed.
///
/// Every producer must be enqueued before `mp_execute` of the same step. Otherwise, on CUDA, the operation that waits
/// for a producer may precede it in a hardware queue, and both deadlock. With `MP_AGENT_PRODUCER`, and with
/// `MP_AGENT_AUTO` if `arrivals` is off, the stream of `mp_execute` must be ordered after the producers, because the
/// producers may store the bytes or all bytes may move after them.
///
/// Each call must be followed by one `mp_execute`. If a plan is destroyed between the two, the other ranks get
/// `MP_ERROR_PEER_GONE`. The destinations of their writes in this step must then stay allocated until they have
/// destroyed their plans. May be called from any thread, but not from a host function.
///
/// Errors: the errors of `mp_execute`; `MP_ERROR_INVALID_ARGUMENT` if the plan is already armed or has no partitions.
mp_status_t mp_plan_arm(mp_plan_t plan, mp_stream_t stream);

/// Fills `*trigger` with the addresses that kernels of this rank need for a transfer. `transfer` is the index, from 0,
/// among the transfers that `rank` passed. The trigger is the same for all steps. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_INVALID_ARGUMENT` if the plan has no partitions, if the transfer does
/// not exist, or if this rank neither sends nor receives it.
mp_status_t mp_plan_get_trigger(mp_plan_t plan, uint32_t rank, size_t transfer, mp_trigger_t *trigger);

/// Blocks the calling thread until the last executed step has finished on this rank, but at most `seconds`. Use it to
/// find a producer that never marks its partitions ready: the error lists the missing partitions.
///
/// After an error the step continues. If it has not ended 10 seconds after the start of `mp_plan_destroy`, that call
/// ends it without this rank's missing partitions and returns `MP_ERROR_TIMEOUT`. For partitions of another rank it
/// waits until that rank has marked them ready or has destroyed its plan. This function does not wait for captured
/// steps. May be called from any thread, but not from a host function.
///
/// Errors: `MP_ERROR_TIMEOUT`; `MP_ERROR_PEER_GONE`; `MP_ERROR_INVALID_ARGUMENT` if `seconds` is negative or not a
/// number, or the plan has no partitions; `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_plan_synchronize(mp_plan_t plan, double seconds);

/// Creates a messenger, through which the ranks of a node exchange messages that match by MPI's rules. All ranks call
/// it together with the same options; NULL means all defaults. The caller owns `*messenger` and destroys it with
/// `mp_messenger_destroy`. The messenger keeps its node alive. Messages of different messengers never match.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_ARGUMENT`, `MP_ERROR_RANK_FAILED`, `MP_ERROR_ALLGATHER`,
/// `MP_ERROR_NOT_SUPPORTED` if the ranks cannot share memory.
mp_status_t mp_messenger_create(mp_node_t node, const mp_messenger_options_t *options, mp_messenger_t *messenger);

/// Destroys a messenger. Other ranks need not call it. Their later operations with this rank end with
/// `MP_ERROR_PEER_GONE`. Receives and sends of this rank that have not matched end with `MP_ERROR_CANCELLED`.
///
/// Blocks until data movement in progress has ended, and until messages that the library has buffered (`mp_send`) were
/// received or their receivers have left, but at most 10 seconds in total. After that, streams of this rank that wait
/// for a movement continue without it, the request of the movement ends with an error, and the call returns 2 seconds
/// later. Destroying the context does the same for all of its messengers together. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. `MP_ERROR_TIMEOUT` if buffered messages were not received, or movements have not
/// ended because a stream has not reached them; their memory must stay allocated until their requests have ended. The
/// messenger is destroyed nevertheless.
mp_status_t mp_messenger_destroy(mp_messenger_t messenger);

/// Sends `bytes` bytes at `data` to `rank`, after earlier work in `stream` has written them. `rank` may be the calling
/// rank. Does not wait.
///
/// `metadata` is read during the call and arrives when the message matches; it has at most `MP_MESSAGE_METADATA_BYTES`
/// bytes. The memory at `data` must stay allocated and unchanged until the request has ended. The caller owns the
/// request; `request` may be NULL.
///
/// Messages from one rank to another do not overtake each other: a receive takes the first message that it matches. GPU
/// memory and host memory of `mp_alloc_shared` is read directly, and the send ends when the bytes were received. Other
/// host memory, and host messages of up to 1 KiB, are copied to a buffer of the library in stream order, and the send
/// ends when they are copied.
///
/// Errors:
/// - `MP_ERROR_QUEUE_FULL` if too many sends of this rank are unreceived, if more than 512 MiB of them are in pageable
///   memory, or if too many messages wait at `rank`. Nothing was sent. Receive the messages that were sent to this
///   rank, and call again.
/// - `MP_ERROR_TIMEOUT` if a rank that was stopped inside a call has held the lock of the other rank's mailbox for 30
///   seconds. Nothing was sent.
/// - `MP_ERROR_NOT_SUPPORTED` for GPU memory that cannot be shared, and in a stream that is being captured.
/// - `MP_ERROR_OUT_OF_MEMORY` if no handle could be created for the request. The message was sent if it matched a
///   receive immediately, otherwise it was not.
/// - `MP_ERROR_PEER_GONE`, `MP_ERROR_INVALID_POINTER`, `MP_ERROR_INVALID_ARGUMENT`, `MP_ERROR_INVALID_HANDLE`.
///
/// The request ends with `MP_ERROR_PEER_GONE` if the receiver exits before the bytes have moved.
mp_status_t mp_send(mp_messenger_t messenger,
                    const void *data,
                    uint64_t bytes,
                    uint32_t rank,
                    uint64_t tag,
                    const void *metadata,
                    size_t metadata_bytes,
                    mp_stream_t stream,
                    mp_request_t *request);

/// Receives a message into `bytes` bytes at `data`. The message comes from `rank`, or with `MP_ANY_RANK` from any rank.
/// Its tag equals `tag` in the bits of `mask`: all bits set accept exactly this tag, 0 accepts any tag. Does not wait.
///
/// The bytes are written after earlier work in `stream`. Later work in the stream does not wait for them; see
/// `mp_stream_wait_request`. The memory must stay allocated until the request has ended. The caller owns the request. A
/// message shorter than the buffer leaves the rest of the buffer unchanged. For pageable host memory, the thread that
/// waits for the request, or the thread `mpgpu-callback`, copies the bytes from a buffer of the library.
///
/// The request ends with `MP_ERROR_MESSAGE_TRUNCATED` if the message is longer than the buffer. The message stays the
/// first one that a matching receive takes. The request ends with `MP_ERROR_PEER_GONE` if the sender has exited. With
/// `MP_ANY_RANK` it does so if any rank died during the wait, because the message could have been that rank's; later
/// receives from any rank match messages of the remaining ranks.
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

/// Checks for the message that a receive with this rank, tag and mask would take now, without receiving it. `*found`
/// receives 1 or 0. If there is a message, `*info` is filled; `info` may be NULL. Does not wait. May be called from any
/// thread.
///
/// Errors: `MP_ERROR_PEER_GONE` if there is no message and `rank` has exited; `MP_ERROR_INVALID_HANDLE`;
/// `MP_ERROR_INVALID_ARGUMENT`.
mp_status_t mp_message_probe(mp_messenger_t messenger,
                             int32_t rank,
                             uint64_t tag,
                             uint64_t mask,
                             int32_t *found,
                             mp_message_info_t *info);

/// Returns the message of a request. `*matched` receives 1 for a send, and for a receive or fetch that has matched;
/// otherwise 0. If it is 1, `*info` is filled; `info` may be NULL. After a truncation the message is the one that was
/// too long. Does not wait. The request stays valid. May be called from any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for the request of an execution.
mp_status_t mp_message_get_info(mp_request_t request, int32_t *matched, mp_message_info_t *info);

/// Describes `bytes` bytes at `data`, after earlier work in `stream` has written them, so that another rank of the node
/// can fetch them. Does not wait.
///
/// The program passes the descriptor to one rank by any means. That rank copies the bytes to its own memory with
/// `mp_message_fetch`, once, at any time. The memory must stay allocated and unchanged until the request has ended. If
/// the fetching rank has exited, cancel the request.
///
/// Errors: the errors of `mp_send`.
mp_status_t mp_message_describe(mp_messenger_t messenger,
                                const void *data,
                                uint64_t bytes,
                                mp_stream_t stream,
                                mp_message_descriptor_t *descriptor,
                                mp_request_t *released);

/// Fetches the buffer of a descriptor into `bytes` bytes at `data`, after earlier work in `stream`; otherwise as
/// `mp_receive`. `messenger` must be the one that was created together with the describing rank's messenger.
///
/// Errors: the errors of `mp_receive`. `MP_ERROR_MESSAGE_TRUNCATED` if the buffer is too small; a larger buffer can
/// still fetch the bytes. `MP_ERROR_INVALID_ARGUMENT` for a descriptor of another messenger, or one that was already
/// fetched or cancelled.
mp_status_t mp_message_fetch(mp_messenger_t messenger,
                             const mp_message_descriptor_t *descriptor,
                             void *data,
                             uint64_t bytes,
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
/// Initial value of `mp_message_info_t`.
#define MP_MESSAGE_INFO_INIT {sizeof(mp_message_info_t), 0, 0, 0, 0, NULL, 0}
/// Initial value of `mp_partition_options_t`: all defaults.
#define MP_PARTITION_OPTIONS_INIT {sizeof(mp_partition_options_t), 0, MP_AGENT_AUTO, MP_DEFAULT, MP_DEFAULT}
/// Initial value of `mp_partition_tuning_t`: copy engines.
#define MP_PARTITION_TUNING_INIT {sizeof(mp_partition_tuning_t), 0, 0, MP_DEFAULT, 0, NULL}
/// Initial value of `mp_trigger_t`.
#define MP_TRIGGER_INIT {sizeof(mp_trigger_t), NULL, NULL, NULL, NULL, 0, 0, 0, 0}
/// Initial value of `mp_probe_options_t`: all defaults.
#define MP_PROBE_OPTIONS_INIT {sizeof(mp_probe_options_t), NULL, MP_DEFAULT, MP_DEFAULT}
/// Initial value of `mp_plan_info_t`.
#define MP_PLAN_INFO_INIT {sizeof(mp_plan_info_t), 0, 0, 0, 0, 0, 0, 0, 0}
/// Initial value of `mp_statistics_t`.
#define MP_STATISTICS_INIT {sizeof(mp_statistics_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
/// Initial value of `mp_device_statistics_t`.
#define MP_DEVICE_STATISTICS_INIT {sizeof(mp_device_statistics_t), 0, 0, 0}
/// Initial value of `mp_error_info_t`.
#define MP_ERROR_INFO_INIT {sizeof(mp_error_info_t), MP_SUCCESS, 0, NULL, NULL}

/* Enumerations have 32 bits on both sides. A compiler with smaller enumerations (-fshort-enums) reports an error here. */
typedef char mp_enumerations_have_32_bits[sizeof(mp_backend_t) == 4 && sizeof(mp_engine_t) == 4 && sizeof(mp_switch_t) == 4 ? 1 : -1];

/// Creates a context by `mp_context_create_versioned`. Fails if the library is incompatible with this header.
static inline mp_status_t mp_context_create(const mp_context_options_t *options, mp_context_t *context) {
    return mp_context_create_versioned(options, MP_VERSION, context);
}

#endif /* MPGPU_H */
