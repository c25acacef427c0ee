/*
 * mpgpu: multi-path data movement between the GPUs and the host memory of one node.
 *
 *     mp_context_t context;
 *     mp_context_create(NULL, &context);
 *     mp_transfer_t halo[2] = {{d1, 1, s0, 0, bytes}, {d0, 0, s1, 1, bytes}};
 *     mp_plan_t plan;
 *     mp_plan(context, halo, 2, NULL, &plan);
 *     for (;;) {                                   every time step
 *         mp_execute(plan, stream, NULL);          in stream order, does not wait
 *     }
 *     mp_plan_destroy(plan);
 *     mp_context_destroy(context);
 *
 * Rules that hold for every function:
 *
 * - Units are bytes and seconds. Devices are numbers: GPUs from 0 up, host NUMA domains from MP_DEVICE_HOST down.
 * - A function returns MP_SUCCESS, or an error of which mp_last_error says more. Outputs are written only on success,
 *   except where the function says otherwise. No panic or exception leaves the library, and no abort but where the system
 *   refuses the few KiB of host memory that any call takes, or what is kept for a handle: memory that grows with counts of a
 *   call is asked for beforehand (MP_ERROR_OUT_OF_MEMORY).
 * - A pointer must be NULL or point to what the function says for as long as it says, and be aligned for its type.
 *   NULL is refused where it makes no sense. Memory that a pointer leads to is read during the call only, except
 *   where the function says otherwise.
 * - Objects (contexts, plans, requests, streams, events) are given back with `destroy`, memory with `free`, memory of
 *   another process with `close`.
 * - `synchronize` blocks the calling thread. `wait` enqueues (`mp_stream_wait_event`): later work in the stream waits, the
 *   caller does not.
 * - An enumeration may be given as any number: one that it does not have is refused with MP_ERROR_INVALID_ARGUMENT.
 * - Handles that were destroyed are recognised and refused, as are handles of another kind.
 * - A struct that starts with `size` is initialised with its _INIT macro, so that programs compiled with another
 *   version of this header are understood.
 * - Every function may be called from any thread at any time, except where it says otherwise.
 *
 * Generated from rust/ffi by cbindgen: change that, not this file.
 */
#ifndef MPGPU_H
#define MPGPU_H

#include <stddef.h>
#include <stdint.h>

/// Device number of the host memory of NUMA domain 0. GPUs are numbered from 0 up, host domains from here down.
#define MP_DEVICE_HOST (-1)

/// Device number of the host memory of a NUMA domain: `MP_DEVICE_HOST_NUMA(0)` is `MP_DEVICE_HOST`.
#define MP_DEVICE_HOST_NUMA(domain) (-1 - (domain))

/// In a transfer, in place of a device number: the device whose memory the address lies in. An address that the library
/// does not know is host memory, pageable. So is one that was freed, which a named device would have refused. No
/// machine has a device of this number.
#define MP_DEVICE_AUTO 0x7ffffffe

/// A stream: work enqueued in it runs in order. The same type as `cudaStream_t`; NULL is the default stream.
typedef struct CUstream_st *mp_stream_t;

/// An event: a point in a stream that others can wait for. The same type as `cudaEvent_t`.
typedef struct CUevent_st *mp_event_t;

/// A context: a machine, a backend, and all that is kept between calls. A number, not an address: a context that was
/// destroyed is recognised.
typedef struct mp_context *mp_context_t;

/// A plan for a batch of transfers between certain addresses. A number, as `mp_context_t`.
typedef struct mp_plan_s *mp_plan_t;

/// A node: ranks that plan together. A number, as `mp_context_t`.
typedef struct mp_node_s *mp_node_t;

/// One rank's end of the messages of a node. A number, as `mp_context_t`.
typedef struct mp_messenger_s *mp_messenger_t;

/// In place of a rank, for receiving and probing: messages of any rank. No function returns it, and no constant of MPI has its value.
#define MP_ANY_RANK (-2147483647)

/// Stands for rank 0 of a communicator, in place of a rank of the node, if it is on another node. Later ranks have the numbers below it.
#define MP_FIRST_ELSEWHERE (-1073741824)

/// Stands for a rank of a communicator that is on another node. Every call that takes a rank of the node refuses it by name: "rank 5 is on
/// another node".
#define MP_RANK_ELSEWHERE(rank) (MP_FIRST_ELSEWHERE - (rank))

/// In place of a window, in the end of a transfer that another rank names: it is that of the other rank's half, which has the same tag
/// in place of an offset.
#define MP_BY_TAG 0xFFFFFFFF

/// One execution of a plan, or one send or receive, that can be waited for. A number, as `mp_context_t`.
typedef struct mp_request *mp_request_t;

/// Major version of this header. Grows with incompatible changes.
#define MP_VERSION_MAJOR 0

/// Minor version of this header. Grows with new functions; before 1.0 also with incompatible changes.
#define MP_VERSION_MINOR 1

/// Patch version of this header.
#define MP_VERSION_PATCH 0

/// Version of this header as one number that can be compared: 10000 for each major, 100 for each minor version.
#define MP_VERSION (((MP_VERSION_MAJOR * 10000) + (MP_VERSION_MINOR * 100)) + MP_VERSION_PATCH)

/// In the options of a plan, as `relay_gpus`: no GPU.
#define MP_RELAY_NONE 9223372036854775808ull

/// Metadata of a message at most, bytes.
#define MP_MESSAGE_METADATA_BYTES 256

/// Outcome of a call. Numbers are never reused or changed.
typedef enum {
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
} mp_status_t;

/// Where bytes move.
typedef enum {
    /// What `MPGPU_BACKEND` says; without it CUDA where there is any, else the host backend.
    MP_BACKEND_AUTO = 0,
    /// Virtual devices on CPU threads. Real bytes, modelled times.
    MP_BACKEND_HOST = 1,
    /// NVIDIA GPUs.
    MP_BACKEND_CUDA = 2,
} mp_backend_t;

/// How a plan is executed.
typedef enum {
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
} mp_engine_t;

/// A choice that has a default.
typedef enum {
    /// What the environment says, and then the model.
    MP_DEFAULT = 0,
    /// Allowed.
    MP_ON = 1,
    /// Not allowed.
    MP_OFF = 2,
} mp_switch_t;

/// How streams wait for signals.
typedef enum {
    /// What `MPGPU_SIGNAL_WAIT` says. Without it by operations; steps of node plans in which little is moved, between ranks
    /// that have a GPU each, by one kernel of each rank, and after steps in which ranks were late by operations:
    /// docs/reference/waiting.md.
    MP_SIGNAL_WAIT_DEFAULT = 0,
    /// By an operation of the stream, which takes nothing of the GPU.
    MP_SIGNAL_WAIT_OPERATION = 1,
    /// By a kernel of one warp, which goes on 4 us sooner and occupies the GPU meanwhile: docs/reference/waiting.md has the
    /// conditions. The host backend waits as it always does.
    MP_SIGNAL_WAIT_KERNEL = 2,
} mp_signal_wait_t;

/// Who moves partitions that are ready.
typedef enum {
    /// Copy engines, in as many partitions as `mp_node_tune_partitions` has found to be best for such transfers, where the
    /// tuning file of rank 0 has them, else as the model expects. With `arrivals` off steps choose by measured times
    /// whether to move each by itself, several together, or all after their producers, or with `stores` to leave them to the
    /// producers, unless `adapt` of the plan's options is off.
    MP_AGENT_AUTO = 0,
    /// Copy engines, over all paths of the plan, each partition by itself. Takes no multiprocessor.
    MP_AGENT_COPY_ENGINE = 1,
    /// The producing kernels themselves: they store their bytes at the destination, to which the trigger points.
    MP_AGENT_PRODUCER = 2,
} mp_agent_t;

/// A named batch: copies between participants, which are devices of a process or ranks of a node. Nothing is reduced.
typedef enum {
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
} mp_collective_t;

/// Form of a description.
typedef enum {
    /// Lines for people. Their form may change between versions.
    MP_FORMAT_TEXT = 0,
    /// One JSON object.
    MP_FORMAT_JSON = 1,
} mp_format_t;

/// How much is logged: a level includes those before it.
typedef enum {
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
} mp_log_level_t;

/// All that is known about a failure. Initialise with `MP_ERROR_INFO_INIT`.
typedef struct {
    /// `sizeof(mp_error_info_t)`.
    size_t size;
    /// What the call returned.
    mp_status_t status;
    /// The driver's own code; 0 where no driver was at fault.
    int64_t driver_code;
    /// Name of the parameter at fault; NULL where none is.
    const char *argument;
    /// The same text as `mp_last_error`.
    const char *message;
} mp_error_info_t;

/// Receives log records. Called on the thread that logs, which may be any; both texts are valid during the call only.
/// Must not call functions of this library, and must return (no `longjmp`, no exception).
typedef void (*mp_log_callback_t)(mp_log_level_t level, const char *target, const char *message, void *user);

/// How to create a context. Initialise with `MP_CONTEXT_OPTIONS_INIT`; a field that is 0 or NULL takes what the
/// environment says, and then the default. docs/reference/environment.md has the variables.
typedef struct {
    /// `sizeof(mp_context_options_t)`.
    size_t size;
    /// Where bytes move.
    mp_backend_t backend;
    /// Name of a preset or path of a topology file, UTF-8; read during the call only.
    const char *topology;
    /// Bytes of staging memory on each device that needs some. Plans may use less, not more.
    uint64_t staging_bytes;
    /// Number of plans kept, so that planning the same request again is a look-up.
    uint64_t cache_plans;
    /// How streams wait for signals.
    mp_signal_wait_t signal_wait;
    /// CPU threads that may copy between ordinary and pinned host memory, at most 256; -1 for none.
    int32_t host_threads;
    /// Number of programs whose graphs are kept, those that were launched last.
    uint64_t cache_graphs;
} mp_context_options_t;

/// What a context has done since it was created. Initialise with `MP_STATISTICS_INIT`.
typedef struct {
    /// `sizeof(mp_statistics_t)`.
    size_t size;
    /// Calls of `mp_plan` that found the plan of the same request.
    uint64_t plan_cache_hits;
    /// Calls of `mp_plan` that did not.
    uint64_t plan_cache_misses;
    /// Plans dropped from the cache to stay within its bound.
    uint64_t plan_cache_evictions;
    /// Plans in the cache now.
    uint64_t plan_cache_entries;
    /// Executions enqueued.
    uint64_t executions;
    /// Bytes of all transfers of these executions.
    uint64_t bytes;
    /// Of the misses, those that found a plan of the same shape at other addresses.
    uint64_t plan_cache_shape_hits;
    /// Executions that were one graph launch. This and what follows is 0 on a backend without graphs.
    uint64_t graph_launches;
    /// Of these, those whose graph had the addresses already.
    uint64_t graph_hits;
    /// Those that had to instantiate a graph or to give one other addresses.
    uint64_t graph_misses;
    /// Graphs instantiated.
    uint64_t graph_instantiations;
    /// Graphs that were given other addresses instead.
    uint64_t graph_repoints;
    /// Launches that had to come after another one, because all graphs of the plan were at work.
    uint64_t graph_waits;
    /// Plan shapes that have graphs now.
    uint64_t graph_programs;
    /// Instantiated graphs now.
    uint64_t graph_entries;
} mp_statistics_t;

/// What a context holds on one device. Initialise with `MP_DEVICE_STATISTICS_INIT`.
typedef struct {
    /// `sizeof(mp_device_statistics_t)`.
    size_t size;
    /// Bytes of staging memory. 0 until a plan stages on this device.
    uint64_t staging_bytes;
    /// Bytes from `mp_alloc` that were not freed.
    uint64_t allocated_bytes;
    /// Streams from `mp_stream_create` that were not destroyed.
    uint64_t streams;
} mp_device_statistics_t;

/// A function to run on a CPU thread in stream order. Must return (no `longjmp`, no exception).
typedef void (*mp_host_function_t)(void *user);

/// One copy. On the CUDA and on the host backend alike an address belongs to one device; `dst_device` and `src_device`
/// say which, or `MP_DEVICE_AUTO` has the library look. Memory of a GPU, and host memory from `mp_alloc` of the same
/// context, is known, on CUDA also host memory that CUDA has pinned or registered. Any other host memory is taken at the
/// caller's word and counts as pageable. Much of it is copied by threads of the library through pinned memory, over all
/// links that help, otherwise by the driver. Either way it must stay as it is until the execution has completed, and not
/// until `mp_execute` returns. Memory that is not there, or a file that becomes shorter meanwhile, is an error of the
/// execution.
typedef struct {
    /// First byte of the destination.
    void *dst;
    /// The device that it lies on, or `MP_DEVICE_AUTO`.
    int32_t dst_device;
    /// First byte of the source.
    const void *src;
    /// The device that it lies on, or `MP_DEVICE_AUTO`.
    int32_t src_device;
    /// How many bytes. With 0 nothing is copied, and the addresses may be NULL.
    uint64_t bytes;
} mp_transfer_t;

/// How to plan. Initialise with `MP_PLAN_OPTIONS_INIT`; a field that is 0 takes what the environment says, and then the
/// model.
typedef struct {
    /// `sizeof(mp_plan_options_t)`.
    size_t size;
    /// How the plan is executed.
    mp_engine_t engine;
    /// The most paths that one transfer may use.
    uint32_t max_paths;
    /// Whether a copy between GPUs may pass through host memory. By default it may.
    mp_switch_t host_path;
    /// Bytes of one chunk on paths that stage, 4096 or more. Smaller where the staging bound asks for it.
    uint64_t chunk_bytes;
    /// Transfers with fewer bytes take one path.
    uint64_t min_bytes;
    /// The most staging memory on each device, bytes; not more than the context's.
    uint64_t staging_bytes;
    /// GPUs through which bytes of others may pass: bit `g` is GPU `g`, in plans of a node the `g`-th of all that its ranks
    /// name. `MP_RELAY_NONE` alone is none.
    uint64_t relay_gpus;
    /// Whether executions choose among variants of the plan (all paths, half of what is staged, the plain copies) by how
    /// long they take. By default they do. Plans of a node do not.
    mp_switch_t adapt;
    /// Chunks of each path through another GPU; goes before `chunk_bytes`. More where the staging bound asks for it.
    uint32_t relay_chunks;
    /// The same for paths through host memory.
    uint32_t host_chunks;
} mp_plan_options_t;

/// What a plan is like. Initialise with `MP_PLAN_INFO_INIT`.
typedef struct {
    /// `sizeof(mp_plan_info_t)`.
    size_t size;
    /// Modelled time of one execution, seconds.
    double predicted_seconds;
    /// Modelled time of the same transfers on one path each, seconds.
    double direct_seconds;
    /// Bytes of all transfers.
    uint64_t bytes;
    /// Paths of all transfers together.
    uint32_t paths;
    /// Operations of one execution.
    uint32_t operations;
    /// Staging memory in use on the device that needs most, bytes.
    uint64_t staging_bytes;
    /// Measured time of an execution, the median of the last ones of the variant in force, seconds; 0 where none was measured
    /// (`adapt` in the options).
    double measured_seconds;
    /// The same of the plain copies.
    double measured_direct_seconds;
} mp_plan_info_t;

/// What one participant of a collective sends another, or itself.
typedef struct {
    /// The participant that sends.
    uint32_t from;
    /// The participant that receives.
    uint32_t to;
    /// Bytes from the start of what the sender sends from.
    uint64_t send_offset;
    /// Bytes from the start of what the receiver receives into.
    uint64_t receive_offset;
    /// How many bytes.
    uint64_t bytes;
} mp_piece_t;

/// A message, as its receiver sees it, and where its metadata go. Initialise with `MP_MESSAGE_INFO_INIT`, and set `metadata` and
/// `metadata_capacity` if you want them; calls fill the rest.
typedef struct {
    /// `sizeof(mp_message_info_t)`.
    size_t size;
    /// Its tag.
    uint64_t tag;
    /// Its size, without metadata.
    uint64_t bytes;
    /// The rank that has sent it.
    uint32_t rank;
    /// Bytes of its metadata, whatever the capacity.
    uint32_t metadata_bytes;
    /// The caller's: metadata are copied there, as far as the capacity goes. NULL with a capacity of 0.
    void *metadata;
    /// Bytes there; `MP_MESSAGE_METADATA_BYTES` is always enough.
    size_t metadata_capacity;
} mp_message_info_t;

/// A function to be called when a request has ended, with its outcome. Must return (no `longjmp`, no exception).
typedef void (*mp_request_function_t)(void *user, mp_status_t status);

/// How to probe a machine. Initialise with `MP_PROBE_OPTIONS_INIT`.
typedef struct {
    /// `sizeof(mp_probe_options_t)`.
    size_t size;
    /// Path of the file to write, UTF-8, read during the call only. NULL: one in the user's cache directory, where
    /// contexts on these GPUs find it, and beside it what was tuned for it.
    const char *file;
    /// Whether to write a file. On by default.
    mp_switch_t keep;
    /// Fewer and shorter measurements, for a first look; nothing is tuned. Off by default.
    mp_switch_t quick;
} mp_probe_options_t;

/// A range of memory for another process of the node: bytes of a fixed size that may travel over MPI or anything else. A
/// plain value that owns nothing; how long it is good for is the exporter's to say.
typedef struct {
    /// What they mean is the library's own matter.
    uint8_t bytes[128];
} mp_memory_handle_t;

/// A signal: a counter of 64 bits in memory of a context, or in imported memory, and a value that it is raised to or
/// waited for. On CUDA that memory is host memory of `mp_alloc_shared`.
typedef struct {
    /// Aligned to 8 bytes. It stands at 0 where it is new; set it to another first value before others know of it.
    uint64_t *counter;
    /// Reached when the counter is at least this. Counted cyclically, so that a counter may run over.
    uint64_t value;
} mp_signal_t;

/// Collects `bytes` bytes of every rank of a node at every rank, as `MPI_Allgather` does: `receive` has room for those of all
/// ranks, in their order. Returns 0, or another number when it has failed. Must return (no `longjmp`, no exception).
typedef int (*mp_allgather_t)(void *user, const void *send, void *receive, size_t bytes);

/// How to make a node. Initialise with `MP_NODE_OPTIONS_INIT`.
typedef struct {
    /// `sizeof(mp_node_options_t)`.
    size_t size;
    /// The GPUs that this rank works for, as its context numbers them; NULL for those that it sees, which are shared out
    /// evenly where several ranks see them.
    const int32_t *devices;
    /// How many they are; 0 with NULL.
    size_t device_count;
    /// Path of a socket at which the ranks meet where there is no allgather; the same on all ranks, in a folder that they
    /// all may write to. They wait a minute for each other. NULL where an allgather is given.
    const char *socket;
    /// Text, or NULL. Where it is not NULL this rank cannot take part, for this reason: the call fails on all ranks, and the
    /// others are told the reason. The context may be NULL then.
    const char *failure;
} mp_node_options_t;

/// Memory of a rank that transfers of a node's plan may name.
typedef struct {
    /// First byte.
    void *memory;
    /// How many bytes. With 0 the address may be NULL.
    uint64_t bytes;
} mp_window_t;

/// A byte in a window of a rank.
typedef struct {
    /// Whose window it is.
    uint32_t rank;
    /// Which of those that the rank hands in, from 0; or `MP_BY_TAG`.
    uint32_t window;
    /// Bytes from its start; with `MP_BY_TAG` the tag, any number.
    uint64_t offset;
} mp_node_end_t;

/// A copy between windows of two ranks, or of one.
typedef struct {
    /// Where the bytes go.
    mp_node_end_t dst;
    /// Where they come from.
    mp_node_end_t src;
    /// How many bytes.
    uint64_t bytes;
} mp_node_transfer_t;

/// How transfers move in partitions. Initialise with `MP_PARTITION_OPTIONS_INIT`.
typedef struct {
    /// `sizeof(mp_partition_options_t)`.
    size_t size;
    /// Partitions of each transfer, at most 4096; 0 for as many as the model finds best. Partitions of other sizes are
    /// transfers of their own.
    uint32_t count;
    /// Who moves them.
    mp_agent_t agent;
    /// Whether receivers are told of each partition's arrival, before all have come: by default they are. With copy engines
    /// it takes about 2 us for each partition. Other agents always tell.
    mp_switch_t arrivals;
    /// Whether `MP_AGENT_AUTO` may have the producers store: they are kernels that write what is moved to where the trigger
    /// points, nobody expects it in the source, and the stream of `mp_execute` comes after them. By default it may not.
    /// Where a kernel does not reach the destination, and with arrivals, none is asked to.
    mp_switch_t stores;
} mp_partition_options_t;

/// What producers and receivers of one transfer need, for `mpgpu::trigger` of mpgpu/trigger.cuh. Initialise with
/// `MP_TRIGGER_INIT`. Addresses are those of host memory that GPUs reach too, but for `destination` and `counters`, which lie
/// on the source's device. They are good until the plan is destroyed.
typedef struct {
    /// `sizeof(mp_trigger_t)`.
    size_t size;
    /// Two words that tell producers of a step, from `mp_plan_arm` to its end: the address at which they write, of the source
    /// or where they store themselves of the destination; and whether they count what is ready, 0 in steps in which all moves
    /// after them, or is stored and nobody told. NULL on a rank that does not send it.
    const uint64_t *step;
    /// Flags that are set to 1 when a partition is ready, one for each. NULL on a rank that does not send it.
    uint64_t *ready;
    /// Flags that are all 1 when a partition has arrived, `arrived_flags` for each, one partition after the other. NULL on a
    /// rank that does not receive it, or is not told.
    const uint64_t *arrived;
    /// A counter for each partition, in which its producers count; 0 between steps.
    uint64_t *counters;
    /// Bytes of the transfer.
    uint64_t bytes;
    /// Bytes of each partition but the last.
    uint64_t partition_bytes;
    /// How many partitions there are.
    uint32_t partitions;
    /// Flags of each partition that tell of its arrival.
    uint32_t arrived_flags;
} mp_trigger_t;

/// Launches in `stream` what produces one step of a plan in partitions: `triggers` are those of the transfers that this rank
/// has handed in, `count` of them, in their order. Returns 0, or another number when it has failed. May call functions of
/// this library, but none that all ranks call together. Must return (no `longjmp`, no exception).
typedef int (*mp_produce_t)(void *user, const mp_trigger_t *triggers, size_t count, mp_stream_t stream);

/// What `mp_node_tune_partitions` tries. Initialise with `MP_PARTITION_TUNING_INIT`.
typedef struct {
    /// `sizeof(mp_partition_tuning_t)`.
    size_t size;
    /// A bit for each agent to try, `1 << MP_AGENT_COPY_ENGINE` and so on; 0 for copy engines.
    /// `MP_AGENT_PRODUCER` only where producers write where the trigger points. `MP_AGENT_AUTO` with `arrivals` off: it stores
    /// where `MP_AGENT_PRODUCER` is among them, and gets 48 steps to learn before it is timed.
    uint32_t agents;
    /// Timed steps of each candidate, at most 1000; 0 for 7.
    uint32_t rounds;
    /// As in `mp_partition_options_t`.
    mp_switch_t arrivals;
    /// Blocks of the producing kernel, where the program tunes with several numbers of them: trials with others are kept
    /// beside these. 0 where it does not.
    uint32_t blocks;
    /// The tuning file in which rank 0 keeps all trials of these transfers, for `mpgpu tune partitions`; it is made where
    /// there is none. NULL for that of MPGPU_TUNING_FILE; where that names none either, nothing is kept.
    const char *file;
} mp_partition_tuning_t;

/// How to make a messenger. Initialise with `MP_MESSENGER_OPTIONS_INIT`; the same on all ranks.
typedef struct {
    /// `sizeof(mp_messenger_options_t)`.
    size_t size;
    /// Operations of a rank that may be under way, 1 to 65,536; each takes 2 KiB of shared memory. 0 for 1,024.
    uint32_t operations;
    /// Messages that may wait for their receives at a rank, 1 to 1,048,576. 0 for 4,096.
    uint32_t messages;
} mp_messenger_options_t;

/// Names a buffer that a rank of the node may fetch: bytes of a fixed size that travel with a message of the program. A plain value
/// that owns nothing.
typedef struct {
    /// What they mean is the library's own matter.
    uint8_t bytes[64];
} mp_message_descriptor_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/// Returns the version of the library, comparable with `MP_VERSION` of the header. Any thread, never fails.
uint32_t mp_version(void);

/// Returns the version of the library as text, `0.1.0` say. Static storage. Any thread, never fails.
const char *mp_version_string(void);

/// Returns the name of a status, `MP_ERROR_OVERLAP` say; `unknown status` for a number that is none.
///
/// Static storage. Any thread, never fails, does not touch the last error.
const char *mp_status_string(mp_status_t status);

/// Returns what the last call that failed on this thread had to say: the value at fault and, where there is one, the
/// remedy.
///
/// Never NULL; empty when no call on this thread has failed. A call that succeeds leaves it as it is. The text belongs
/// to the library and is valid until the next call that fails on this thread, or until the thread ends.
const char *mp_last_error(void);

/// Fills `*info` with all that is known about the last call that failed on this thread; status `MP_SUCCESS` when none
/// has.
///
/// The texts belong to the library and are valid as those of `mp_last_error`.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` when `info` is NULL or its size is wrong, and this is then the last error.
mp_status_t mp_last_error_info(mp_error_info_t *info);

/// Sends the library's log records of `max_level` and below to `callback`, from now on, for the whole process.
/// `callback` NULL or level 0 ends that. `user` is handed to the callback as it is.
///
/// While a callback is set, nothing goes to standard error unless `MPGPU_LOG` asks for it. When this returns, no thread
/// is inside the earlier callback any more, so that what its `user` pointed to may go. Any thread, but not from inside
/// the callback.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` for a level that is none and for a call from inside the callback;
/// `MP_ERROR_NOT_SUPPORTED` when this process has a Rust logger of its own, which then gets the records.
mp_status_t mp_log_set_callback(mp_log_level_t max_level, mp_log_callback_t callback, void *user);

/// Creates a context: chooses the backend, reads the topology, and reads the environment (this once). Use
/// `mp_context_create`, which passes the version of the header that the caller was compiled with.
///
/// `options` NULL means all defaults. `*context` belongs to the caller, who destroys it with `mp_context_destroy`.
/// Several contexts may exist at once; they share nothing. Any thread.
///
/// A child of `fork` has neither the threads nor the GPUs of its parent. In it, destroying the parent's contexts, plans
/// and requests does nothing, and every other call with them is refused with `MP_ERROR_INVALID_HANDLE`. Its own contexts
/// work; on CUDA only if it was forked before the parent first used the driver, or starts another program by `exec`.
///
/// Errors: `MP_ERROR_VERSION_MISMATCH` when header and library do not go together; `MP_ERROR_ENVIRONMENT` for a
/// malformed `MPGPU_` variable (of an unknown one the log warns); `MP_ERROR_TOPOLOGY`; `MP_ERROR_NOT_SUPPORTED` for a
/// backend or a setting that this build does not have; `MP_ERROR_INVALID_ARGUMENT`.
mp_status_t mp_context_create_versioned(const mp_context_options_t *options,
                                        uint32_t header_version,
                                        mp_context_t *context);

/// Destroys a context: waits until all of its work has finished, then frees its staging memory and whatever the caller
/// has left (memory from `mp_alloc` with a warning in the log). Its plans and requests become invalid handles.
///
/// What waits for others is withdrawn first: partitions that nobody makes ready and messages end within 10 seconds. Waits for
/// signals, and for a rank that lives and does not take part in a step or match, are waited for. The library's threads block
/// all signals but those of their own faults.
///
/// Blocks. Any thread, but not from a host function or a log callback. Calls that other threads make with the context
/// meanwhile fail with `MP_ERROR_INVALID_HANDLE`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`. Any other error is the first that the outstanding work or the freeing met; the
/// context is destroyed all the same.
mp_status_t mp_context_destroy(mp_context_t context);

/// Tells on which backend the context runs, `MP_BACKEND_HOST` or `MP_BACKEND_CUDA`, and how many devices it has: GPUs 0 to
/// `*gpus - 1`, host domains `MP_DEVICE_HOST_NUMA(0)` to `MP_DEVICE_HOST_NUMA(*host_domains - 1)`. Each may be NULL. Any
/// thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_context_get_info(mp_context_t context,
                                mp_backend_t *backend,
                                int32_t *gpus,
                                int32_t *host_domains);

/// Describes the context: version, backend, topology, settings in force, and whether tuned values are, from which file.
///
/// `*length` receives the bytes of the text with its final NUL. With `text` NULL that is
/// all; else the text is written to `text`, which has `capacity` bytes. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for an unknown format, `length` NULL, or too little
/// room: then `*length` still has what is needed, and nothing is written to `text`.
mp_status_t mp_context_describe(mp_context_t context, mp_format_t format, char *text, size_t capacity, size_t *length);

/// Fills `*statistics` with what the context has done since it was created. Any thread; counts of calls that run
/// meanwhile may or may not be in.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when `statistics` is NULL or its size is wrong.
mp_status_t mp_context_statistics(mp_context_t context, mp_statistics_t *statistics);

/// Fills `*statistics` with what the context holds on `device` now. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` when `statistics` is NULL
/// or its size is wrong.
mp_status_t mp_context_device_statistics(mp_context_t context, int32_t device, mp_device_statistics_t *statistics);

/// Allocates `bytes` bytes on `device`: on a GPU its memory, on a host domain memory that GPUs read and write directly
/// (pinned; on CUDA larger buffers are spread over the sockets, docs/guide/gpus.md). Other processes can map that of a GPU;
/// host memory for them is `mp_alloc_shared`'s. `*memory` is aligned to at least 256 bytes, its contents are undefined. It belongs to the caller until `mp_free`, and to the context when that is
/// destroyed. On the host backend a GPU's memory is host memory and can be read and written by the program; on CUDA it
/// cannot. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` for 0 bytes or `memory`
/// NULL; `MP_ERROR_OUT_OF_MEMORY`.
mp_status_t mp_alloc(mp_context_t context,
                     int32_t device,
                     uint64_t bytes,
                     void **memory);

/// As `mp_alloc`, and other processes can map the memory (`mp_memory_export`). Of host memory they can map no other: that of
/// `mp_alloc` is in huge pages on CUDA, which few systems give to memory that processes share. On a GPU the memory takes
/// whole multiples of 2 MiB, and others can map it whatever another library, as UCX within MPI, has open; MPI itself moves
/// memory of `mp_alloc` faster. Host memory is zero, and each
/// allocation of it takes a file descriptor; on CUDA, from 4 MiB on, its pages are resident when the call returns, spread
/// over the sockets or on the NUMA node of the host domain `device`. Freed by `mp_free`. Any thread.
///
/// Errors: as `mp_alloc`; `MP_ERROR_NOT_SUPPORTED` where the system gives no memory file, or no descriptor is left for
/// it (`ulimit -n`).
mp_status_t mp_alloc_shared(mp_context_t context,
                            int32_t device,
                            uint64_t bytes,
                            void **memory);

/// Gives memory of `mp_alloc` back. Waits until all work that the context has enqueued so far has finished, as
/// `cudaFree` does; what a stream captures has not run and is left alone. Plans that use the memory can no longer be
/// executed. NULL is allowed and does nothing. Any thread, host functions excepted; no other thread may enqueue work that
/// uses the memory while the call runs, as with `cudaFree`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` when `mp_alloc` of this context did not return
/// `memory`, or when it was freed already.
mp_status_t mp_free(mp_context_t context,
                    void *memory);

/// Gives memory of `mp_alloc` back after all work that is enqueued in `stream` now, without waiting for it. Work of other
/// streams that uses the memory must come before that, by events say, as with `cudaFreeAsync`.
///
/// From now on the memory counts as freed: plans that use it, and handles of it, are refused. Its bytes go back to the
/// driver, which may wait for the GPU to do so, in a later `mp_free` or `mp_context_destroy`, or when an `mp_alloc` finds
/// no memory left; on the host backend with the next allocation. NULL is allowed and does nothing. Any thread, host
/// functions excepted.
///
/// Errors, after which the memory is still the caller's: `MP_ERROR_INVALID_HANDLE` for context or stream;
/// `MP_ERROR_INVALID_POINTER` as `mp_free`; `MP_ERROR_NOT_SUPPORTED` while `stream` is being captured.
mp_status_t mp_free_async(mp_context_t context,
                          void *memory,
                          mp_stream_t stream);

/// Pins `bytes` bytes of the program's own host memory at `pointer`, an array, a mapped file or memory of another library, so
/// that copies of plans that are made from now on read and write it where it lies, over all links. It stays the caller's, who
/// keeps it mapped, and does not map other memory there, until `mp_memory_unregister`: copies go on with the pages that were
/// pinned. Memory that may not be written can be a source, where the driver pins such memory.
///
/// Blocks: threads bring all pages in, in huge pages where `huge_pages` is 1 and the system has them, and pin pieces that end
/// where addresses are multiples of 1 GiB. Two H200 (2026-11-27), for each GiB: 85 ms for pages that are not there yet (48 in
/// huge pages), and 33 ms (22) to pin. What a copy takes of several pieces counts as several transfers of its plan. Windows of
/// node plans lie within a piece; other processes cannot map such memory. Whole pages are pinned. Any thread, host functions
/// excepted.
///
/// Errors, after which nothing is pinned: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for 0 bytes, or
/// `huge_pages` neither 0 nor 1; `MP_ERROR_INVALID_POINTER` for NULL, and where memory of the context, of the driver or
/// none is in the range; `MP_ERROR_NOT_SUPPORTED` for memory that another library has pinned or that the driver does not pin;
/// `MP_ERROR_OUT_OF_MEMORY`; `MP_ERROR_DRIVER`.
mp_status_t mp_memory_register(mp_context_t context,
                               void *pointer,
                               uint64_t bytes,
                               int32_t huge_pages);

/// Takes `mp_memory_register` back. Waits until all work that the context has enqueued so far has finished. Plans that use the
/// memory can no longer be executed; plans that are made afterwards take it for ordinary memory. NULL is allowed and does
/// nothing. Any thread, host functions excepted; as for `mp_free`, no other thread enqueues work that uses it meanwhile.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` when this context has not registered memory that begins at
/// `pointer`; `MP_ERROR_DRIVER`, after which it counts as unregistered.
mp_status_t mp_memory_unregister(mp_context_t context,
                                 void *pointer);

/// Creates a stream of `device` that is ordered with no other stream, the default stream included. It belongs to the
/// caller until `mp_stream_destroy`. On CUDA it is a `cudaStream_t`. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_DEVICE`, `MP_ERROR_INVALID_ARGUMENT` when `stream` is NULL.
mp_status_t mp_stream_create(mp_context_t context, int32_t device, mp_stream_t *stream);

/// Destroys a stream of `mp_stream_create`. Work that is enqueued in it still finishes. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE` for the context, and for a stream that `mp_stream_create` of this context did not
/// return.
mp_status_t mp_stream_destroy(mp_context_t context, mp_stream_t stream);

/// Blocks until all work enqueued in `stream` so far has finished. NULL is the default stream. Any thread, host
/// functions excepted.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_PEER_GONE` when the stream, or one that it has come after, has waited in
/// vain for signals or in a node plan, once (see `mp_stream_wait_signals`); any other error is that of work in the stream.
mp_status_t mp_stream_synchronize(mp_context_t context,
                                  mp_stream_t stream);

/// Writes the device of `stream` to `*device`: only kernels of that device can be launched in it. `MP_DEVICE_HOST` for the
/// default streams of CUDA, which are of whatever GPU is current when they are used. `*capturing` becomes 1 where the stream is
/// being captured into a graph, so that work that is enqueued in it runs at every launch of the graph; else, and always on the
/// host backend, 0. Either may be NULL. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_stream_get_info(mp_context_t context,
                               mp_stream_t stream,
                               int32_t *device,
                               int32_t *capturing);

/// Enqueues a call of `function(user)` on a CPU thread, after all earlier work in `stream` and before all later. The
/// function may block; other streams go on. It must not call functions of this library. In a stream that is being captured,
/// it runs at every launch of the graph, in several threads at once if several of its executables run at once. Any thread.
///
/// With `release` NULL, `user` stays the caller's, and valid until the function has run; in a capture, for as long as the graph
/// and all that was instantiated of it. Otherwise the library gives `user` back: it calls `release(user)` once, on any thread,
/// when the function will not be called again. That is after it has run; or, in a stream that is being captured, when the graph
/// and all that was instantiated of it are gone. `release` must not call functions of this library or of CUDA. When this call
/// fails, neither function is ever called, and `user` stays the caller's. Where the GPU fails before the function has
/// run, the driver drops it and `release` is not called.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when `function` is NULL; `MP_ERROR_NOT_SUPPORTED` in a
/// capture where the driver is older than CUDA 11.3.
mp_status_t mp_stream_launch_host(mp_context_t context,
                                  mp_stream_t stream,
                                  mp_host_function_t function,
                                  void *user,
                                  mp_host_function_t release);

/// Creates an event. It counts as done until it is first recorded. It belongs to the caller until `mp_event_destroy`.
/// It serves streams of every device, so on CUDA it is no `cudaEvent_t` and must not be handed to CUDA's own functions;
/// the functions here accept a `cudaEvent_t` as well. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_ARGUMENT` when `event` is NULL.
mp_status_t mp_event_create(mp_context_t context, mp_event_t *event);

/// Destroys an event of `mp_event_create`. Waits that are enqueued still hold. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_event_destroy(mp_context_t context, mp_event_t event);

/// Makes `event` stand for all work enqueued in `stream` so far, in place of what it stood for before. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_event_record(mp_context_t context, mp_event_t event, mp_stream_t stream);

/// Blocks until the work that `event` stands for has finished. Any thread, host functions excepted.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_PEER_GONE` as `mp_stream_synchronize`, but every time until the event is
/// recorded in a stream that was told; for an event of CUDA's own once, if `mp_event_record` has recorded it.
mp_status_t mp_event_synchronize(mp_context_t context,
                                 mp_event_t event);

/// Makes all work that is enqueued in `stream` from now on wait for what `event` stands for now. Does not block. Any
/// thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_stream_wait_event(mp_context_t context, mp_stream_t stream, mp_event_t event);

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
mp_status_t mp_plan(mp_context_t context,
                    const mp_transfer_t *transfers,
                    size_t count,
                    const mp_plan_options_t *options,
                    mp_plan_t *plan);

/// Destroys a plan. Executions that are under way still finish. The context may keep the plan in its cache. Any thread.
///
/// Each rank destroys a plan of `mp_node_plan` for itself, after the last execution that it enqueues; the call blocks
/// until these have finished. Ranks that have enqueued more of them get `MP_ERROR_PEER_GONE`; where a rank captures its
/// steps, only if it leaves after a failure. Staging memory that others use goes back when they have destroyed theirs;
/// `mp_context_destroy` waits for that up to five seconds.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; of a node's plan those of its executions: it is destroyed all the same.
mp_status_t mp_plan_destroy(mp_plan_t plan);

/// Describes the plan: paths, shares, chunks, staging, predicted time, and why other paths were left out. The
/// parameters are those of `mp_context_describe`. Any thread.
///
/// Errors: as `mp_context_describe`.
mp_status_t mp_plan_describe(mp_plan_t plan, mp_format_t format, char *text, size_t capacity, size_t *length);

/// Fills `*info` with what the plan is like. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when `info` is NULL or its size is wrong.
mp_status_t mp_plan_get_info(mp_plan_t plan, mp_plan_info_t *info);

/// Makes what the first execution of the plan in `stream` would otherwise make, so that it costs what later ones cost:
/// graphs are instantiated, memory of other processes is mapped, GPUs get access to each other, kernels are loaded,
/// internal streams and events created. Enqueues nothing and moves no byte; no other process takes part.
///
/// For a time loop: call it before the first step, once for each plan and stream. It may take milliseconds, and may wait
/// for work of the GPUs. Graphs are kept of a bounded number of plans, those that were executed last; while `stream` is
/// being captured none is made. Any thread, host functions excepted.
///
/// Errors: those of `mp_execute`.
mp_status_t mp_plan_prepare(mp_plan_t plan,
                            mp_stream_t stream);

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
mp_status_t mp_execute(mp_plan_t plan, mp_stream_t stream, mp_request_t *request);

/// Writes what moves in a collective between so many participants, as pieces without memory. Of a piece a process makes an
/// `mp_transfer_t` between two of its devices; of all of `from` or `to` its own rank, a rank makes halves of `mp_node_plan`, with
/// `MP_BY_TAG`. Where both addresses of a piece are the same (in place) nothing moves: leave it out. Then `mp_plan` plans them
/// together, and again by a look-up; bytes that several want are passed on by those who have them.
///
/// Blocks that a participant sends from or receives into lie one behind the other, in the order of participants. All have
/// `bytes` bytes; or `sizes` says how many, and `bytes` is not read: one number for a broadcast, one for each participant for
/// a scatter, a gather and an all-gather, and for an all-to-all one for each sender and receiver, sender by sender. `root` is
/// read by a broadcast, a scatter and a gather. Pieces of no bytes are left out. `*count` becomes how many there are. With `pieces`
/// NULL that is all; else it has room for `capacity`. Any thread.
///
/// Errors: `MP_ERROR_INVALID_ARGUMENT` for `count` NULL, a collective or a root that there is not, more than 1024 participants, sizes that no
/// address can count, or too little room: then `*count` still has what is needed, and nothing is written to `pieces`.
mp_status_t mp_collective(mp_collective_t collective,
                          uint32_t participants,
                          uint32_t root,
                          uint64_t bytes,
                          const uint64_t *sizes,
                          mp_piece_t *pieces,
                          size_t capacity,
                          size_t *count);

/// Blocks the calling thread until the execution, send, receive or fetch has ended, then destroys the request and sets `*request`
/// to NULL. Waiting for a NULL request succeeds at once. Any thread; of two threads that wait for the same request one may get
/// `MP_ERROR_INVALID_HANDLE`.
///
/// `info` NULL asks for no more. Otherwise fills `*info` with the message of a send, a receive or a fetch, also where it returns
/// `MP_ERROR_MESSAGE_TRUNCATED`; with any other error of a receive it is left as it is.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, where `info` is not NULL also for a NULL request; `MP_ERROR_INVALID_ARGUMENT`, then also for
/// the request of an execution, which has no message. Both leave `*request` as it is. Any other error, such
/// as `MP_ERROR_DATA_CORRUPTION` or `MP_ERROR_DRIVER`, is that of the operation, which has ended: the request is
/// destroyed and `*request` is NULL. So is it with `MP_ERROR_PEER_GONE`, which is returned as by `mp_stream_synchronize`, for
/// an execution that was enqueued before its stream was told.
mp_status_t mp_wait(mp_request_t *request,
                    mp_message_info_t *info);

/// Asks whether the operation has ended, without blocking: `*done` becomes 1 or 0. When it has, the request is destroyed
/// and `*request` is set to NULL, and `*info` is filled as by `mp_wait`; otherwise it is left as it is. A NULL request is done.
/// Any thread.
///
/// Errors: as `mp_wait`; `*done` is 1 when the error is that of the operation, and is not written otherwise.
mp_status_t mp_test(mp_request_t *request,
                    int32_t *done,
                    mp_message_info_t *info);

/// Destroys the request and sets `*request` to NULL, without waiting: the execution goes on. A NULL request is allowed.
/// Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`, `MP_ERROR_INVALID_ARGUMENT` when `request` is NULL.
mp_status_t mp_request_destroy(mp_request_t *request);

/// Cancels a send or receive that has not matched, or a described buffer that was not fetched: `*cancelled` becomes 1, and its
/// request ends with `MP_ERROR_CANCELLED`; `*cancelled` is 0 where it was too late, and it goes on. The request is still to be
/// waited for or destroyed. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for the request of an execution.
mp_status_t mp_request_cancel(mp_request_t request,
                              int32_t *cancelled);

/// Has later work in `stream` come after the request: after the bytes of a receive, which it sees, and of a send, which it may
/// overwrite; after all of an execution. The host does not wait, also where a message has not matched yet. The stream goes on
/// where the request ends with an error, so the request says whether the bytes have come. A NULL request is done. Leaves the
/// request as it is. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_NOT_SUPPORTED` in a stream that is being captured, for messages.
mp_status_t mp_stream_wait_request(mp_stream_t stream,
                                   mp_request_t request);

/// Calls `function` once with `user` and the outcome when the request has ended, on the thread `mpgpu-callback` of its context,
/// which starts with the first such call; on that thread `mp_last_error` has the text of an error. The function may call the
/// library, but holds up other callbacks of the context, and must not wait for a stream that waits for a receive into ordinary
/// host memory, which this thread may have to copy. A thread that destroys the context, or the messenger of the request, must
/// hold no lock that the function takes (Python's interpreter lock is one). The request stays as it is, and may be waited for or destroyed before.
/// Destroying the context calls what is left. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when `function` is NULL; `MP_ERROR_NOT_SUPPORTED` for an
/// execution that was captured.
mp_status_t mp_request_set_callback(mp_request_t request,
                                    mp_request_function_t function,
                                    void *user);

/// Measures the machine of a context: how fast copies between its devices are, which of them slow each other down, what
/// copies cost besides, and whether their bytes arrive. The result is a topology file; the context itself goes on with
/// the topology that it has.
///
/// `options` NULL means all defaults: a full probe, kept where contexts of this user on these GPUs find it from then
/// on. Only such a probe is also tuned: better plans than the model's are looked for, by executing them, for single
/// copies from and to host memory and for all-to-alls of all GPUs, if there are three or more, and contexts that take
/// the probe by themselves take what was found with it. Where that search fails the log has a warning, and the probe is
/// kept without.
///
/// Takes seconds (a full probe of four H200 25 to 31, most of it tuning; estimated for eight GPUs: less than a minute),
/// memory and streams on every device, and all links: nothing else should run on the machine meanwhile, or it is
/// measured too. On the host backend copies by CPU threads are measured, and kept in a named file only. A probe that
/// predicts its own check with a median error of more than 20 % is not tuned from and not kept, and contexts do not take
/// it. Blocks. Any thread, but one probe of a context at a time.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for an option; `MP_ERROR_OUT_OF_MEMORY`;
/// `MP_ERROR_TOPOLOGY` when the file cannot be written, `MP_ERROR_NOT_SUPPORTED` when the result is not kept, or there is
/// no directory for it: it is then still to be had from `mp_context_probed`; `MP_ERROR_DRIVER`.
mp_status_t mp_context_probe(mp_context_t context,
                             const mp_probe_options_t *options);

/// Gives the file that the last `mp_context_probe` of this context made: TOML, as docs/reference/topology.md describes it.
///
/// `*length` receives the bytes of the text with its final NUL. With `text` NULL that is all; else the text is written to
/// `text`, which has `capacity` bytes. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_TOPOLOGY` when this context has not been probed;
/// `MP_ERROR_INVALID_ARGUMENT` when `length` is NULL, or for too little room: then `*length` still has what is needed,
/// and nothing is written to `text`.
mp_status_t mp_context_probed(mp_context_t context,
                              char *text,
                              size_t capacity,
                              size_t *length);

/// Describes `bytes` bytes from `pointer` on for other processes of the node, which map them with `mp_memory_import`.
///
/// The range lies in one allocation: of `mp_alloc` of this context, or on CUDA of `cudaMalloc`, of the virtual memory
/// API or of a pool, the last two when created with `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`. Host memory is of
/// `mp_alloc_shared`. Of a range that `cuMemMap` has mapped from several chunks each chunk is an allocation by itself. The allocation stays its owner's. It can be mapped, whole, from now until it
/// is freed or the context is destroyed; handles of freed memory are refused from then on, also where its address has
/// been given out again. Whoever has mapped it should close it first: on the host backend what they map turns into
/// zeros, on CUDA it must not be used any more. Exporting again gives an equal handle. The handle is a key: any process
/// of this user that has its bytes may read and write the allocation, and one that has not may not. The first export of
/// a process starts a thread, which answers importers. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` for memory that the context does not know and for a
/// range that leaves its allocation; `MP_ERROR_NOT_SUPPORTED` for memory that cannot be shared, with the reason and
/// the remedy; `MP_ERROR_INVALID_ARGUMENT` for 0 bytes or NULL; `MP_ERROR_DRIVER`.
mp_status_t mp_memory_export(mp_context_t context,
                             const void *pointer,
                             uint64_t bytes,
                             mp_memory_handle_t *handle);

/// Maps the memory that a handle of `mp_memory_export` describes. `*pointer` then serves as an end of transfers, as
/// memory of the device `*device`, which is the number that the exporter's device has here; `*bytes` is the size of the
/// range. `device`, `in_kernels` and `bytes` may be NULL. On the host backend the memory can be read and written directly.
///
/// A handle of this process gives the address that the memory has. An allocation is mapped once, however many handles
/// of ranges in it are imported, and stays mapped until `mp_memory_close` was called as often as this. Waits for the
/// exporter's answer, some microseconds, at most five seconds, however often signals interrupt it. Later calls that use
/// the memory after its owner has freed it, or has ended, fail with `MP_ERROR_PEER_GONE`. Any thread, host functions
/// excepted.
///
/// With `kernels` `MP_DEVICE_AUTO`, `*in_kernels` becomes NULL. On CUDA the address is then good for plans and, of memory of
/// `cudaMalloc` and `mp_alloc`, for kernels of the GPU that is current in the calling thread; without one, of a GPU that the
/// context uses. Otherwise kernels of the device `kernels` read and write the memory at `*in_kernels`, whatever GPU is
/// current, also where it is on a GPU that this process does not see: `*pointer` is then no end of transfers, but what
/// `mp_memory_close` takes, and `*device` is `kernels`.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when a pointer is NULL or the bytes are no handle;
/// `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_VERSION_MISMATCH`; `MP_ERROR_NOT_SUPPORTED` for a handle of another node, container,
/// user or backend, for memory of a GPU that this process does not see, or that `kernels` does not reach, and for what another
/// library of this process has open by CUDA IPC (docs/guide/processes.md); `MP_ERROR_PEER_GONE` when the exporter has ended or has freed the memory;
/// `MP_ERROR_TIMEOUT` when it does not answer; `MP_ERROR_DRIVER`.
mp_status_t mp_memory_import(mp_context_t context,
                             const mp_memory_handle_t *handle,
                             int32_t kernels,
                             void **pointer,
                             int32_t *device,
                             void **in_kernels,
                             uint64_t *bytes);

/// Takes note of memory of another process that the caller has mapped by `cuIpcOpenMemHandle` or `cudaIpcOpenMemHandle`,
/// so that it may be an end of transfers: the driver calls it memory of the GPU through which it was opened, and `device`
/// says on which it really is. `pointer` is what was returned, `bytes` how many it has been mapped with, `ipc_handle` the
/// 64 bytes that were opened; GPUs that work on it open them too. Call `mp_memory_close` before the mapping is closed.
/// Any thread, host functions excepted.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` when a pointer is NULL, for 0 bytes, and when `device`
/// is no GPU; `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_NOT_SUPPORTED` on the host backend, for memory that no GPU has, and for
/// memory that the context has mapped itself or was told of already.
mp_status_t mp_memory_adopt(mp_context_t context,
                            void *pointer,
                            uint64_t bytes,
                            int32_t device,
                            const void *ipc_handle);

/// Gives back an address of `mp_memory_import`. With the last of an allocation, waits until all work that the context
/// has enqueued so far has finished, and unmaps it: plans that use it can no longer be executed. NULL is allowed and
/// does nothing. Any thread, host functions excepted.
///
/// Also for an address of `mp_memory_adopt`: waits for nothing, as the caller must before it closes the mapping, and
/// closes what GPUs have opened for the context.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_POINTER` when `mp_memory_import` of this context did not
/// return `pointer`, or when it was closed already.
mp_status_t mp_memory_close(mp_context_t context, void *pointer);

/// Writes 16 bytes that name a device in every process of the node, whatever number it has there: a GPU's UUID; for
/// virtual devices and host domains bytes made of their number. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_DEVICE`; `MP_ERROR_INVALID_ARGUMENT` when `uuid` is NULL.
mp_status_t mp_device_uuid(mp_context_t context, int32_t device, uint8_t *uuid);

/// Makes all work that is enqueued in `stream` from now on wait until the counters of all `count` signals have reached
/// their values. Does not block. What was written before a counter was raised is then visible to that work.
///
/// The counters lie in memory of this context (a receiver waits in its own memory, which it has exported to whoever
/// raises them). `signals` is read during the call only. What waits for all work of the context (`mp_free`,
/// `mp_memory_close`, `mp_context_destroy`) waits for these waits too. Any thread.
///
/// When a process that has mapped a counter's memory ends without closing it, waits in that memory that are not
/// satisfied are given up: later work in the stream runs, without the bytes that were waited for, and so does work of
/// other streams that comes after it. The next `mp_stream_synchronize` of a stream that waits in that allocation, or
/// that has come after such a one by `mp_stream_wait_event`, returns `MP_ERROR_PEER_GONE`, once, after its work has
/// finished. `mp_wait`, `mp_test` and `mp_event_synchronize` return it for what was enqueued before its stream was told
/// in one of these ways. Other streams are not concerned; streams that the caller joins by CUDA's own events are not
/// known to come after. In which stream a graph is launched is not known either: of waits that were captured every
/// stream is told. Later calls whose wait in that memory would fail are refused.
///
/// Errors: `MP_ERROR_INVALID_HANDLE` for context or stream; `MP_ERROR_INVALID_POINTER` for a counter that is NULL, not
/// aligned or not in memory that the context knows, naming the signal by its index; `MP_ERROR_NOT_SUPPORTED` for a
/// counter in imported memory, and on CUDA for one in other memory than `mp_signal_t` says; `MP_ERROR_PEER_GONE` for a
/// counter that is not reached and whose memory was mapped by a process that has ended without closing it, and then
/// nothing is enqueued; `MP_ERROR_INVALID_ARGUMENT` when `signals` is NULL and `count` is not 0.
mp_status_t mp_stream_wait_signals(mp_context_t context, mp_stream_t stream, const mp_signal_t *signals, size_t count);

/// Says that kernels of the caller wait for the counters of `count` signals, from now until their memory is freed: when a
/// process that has mapped the memory ends without closing it, each counter that has not reached its value is raised to
/// it, and whoever synchronises any stream is told, as `mp_stream_wait_signals` says of captured waits. So a kernel that polls such a counter, for a
/// value that no process raises it to, learns that it waits in vain. Does not wait, and enqueues nothing; of each counter
/// one value counts, and a call once more only looks for errors.
///
/// Counters as for `mp_stream_wait_signals`. `signals` is read during the call only. Any thread.
///
/// Errors: as `mp_stream_wait_signals`, without those of streams; `MP_ERROR_PEER_GONE` wherever a process that had mapped a
/// counter's memory has ended without closing it.
mp_status_t mp_kernel_wait_signals(mp_context_t context,
                                   const mp_signal_t *signals,
                                   size_t count);

/// Raises the counters of `count` signals to their values after all work enqueued in `stream` so far: whoever sees the
/// value sees every byte that this work has written. Does not block.
///
/// A counter is raised by storing the value, so it has one raiser. It lies in memory of this context or in imported
/// memory. After `mp_execute` this is a put with signal. `signals` is read during the call only. Any thread.
///
/// Errors: as `mp_stream_wait_signals`, but imported memory is accepted, and `MP_ERROR_PEER_GONE` says that its owner has
/// ended or has freed it.
mp_status_t mp_stream_raise_signals(mp_context_t context,
                                    mp_stream_t stream,
                                    const mp_signal_t *signals,
                                    size_t count);

/// Raises a counter to `value` now, by the calling thread: whoever sees the value sees what this thread has written and
/// seen before. Work in streams is not waited for: `mp_stream_raise_signals` comes after it.
///
/// The counter lies in memory of this context or in imported memory, and the CPU reaches it: on CUDA as `mp_signal_t`
/// says, on the host backend in any memory. Any thread, host functions excepted.
///
/// Errors: as `mp_stream_raise_signals`, without those of streams.
mp_status_t mp_signal_raise(mp_context_t context, uint64_t *counter, uint64_t value);

/// Reads a counter into `*value`. What was written before it was raised to that is then visible to the calling thread.
/// Counters as for `mp_signal_raise`. Any thread, host functions excepted.
///
/// Errors: as `mp_signal_raise`; `MP_ERROR_INVALID_ARGUMENT` when `value` is NULL.
mp_status_t mp_signal_read(mp_context_t context, const uint64_t *counter, uint64_t *value);

/// Tells whether a counter has reached `value`: `*reached` is 1 or 0, and neither is an error. Does not wait. Counters
/// as for `mp_signal_synchronize`. Any thread, host functions excepted.
///
/// Errors: as `mp_signal_synchronize`, without `MP_ERROR_TIMEOUT`; `MP_ERROR_INVALID_ARGUMENT` when `reached` is NULL.
mp_status_t mp_signal_test(mp_context_t context, const uint64_t *counter, uint64_t value, int32_t *reached);

/// Blocks the calling thread until a counter has reached `value`, at most `seconds`; with 0 it looks once. The counter
/// lies in host memory, or on the host backend in any memory, of this context. Any thread, host functions excepted.
///
/// Errors: `MP_ERROR_TIMEOUT`; `MP_ERROR_PEER_GONE` when a process that has mapped the memory has ended without closing
/// it, and the value is not reached; `MP_ERROR_INVALID_ARGUMENT` when `seconds` is negative or not a number; the others
/// of `mp_stream_wait_signals`.
mp_status_t mp_signal_synchronize(mp_context_t context, const uint64_t *counter, uint64_t value, double seconds);

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
mp_status_t mp_node_create(mp_context_t context,
                           uint32_t rank,
                           uint32_t ranks,
                           mp_allgather_t allgather,
                           void *user,
                           const mp_node_options_t *options,
                           mp_node_t *node);

/// Takes part in the call on this node in which the other ranks are, or to which they come next, as a rank that has failed:
/// it fails on them with `MP_ERROR_RANK_FAILED` and `reason`, text or NULL. For a rank that cannot make the call, because it
/// could not get its memory, say. What this library refuses of a call is told by the call itself. Blocks until they have come.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` where `reason` is no text, which is told all the same;
/// `MP_ERROR_RANK_FAILED` where the others are in different calls; `MP_ERROR_ALLGATHER`.
mp_status_t mp_node_fail(mp_node_t node,
                         const char *reason);

/// Collects `bytes` bytes of every rank at every rank, in the order of ranks, as `MPI_Allgather` does. For what ranks of a node do
/// together beside this library's calls: it has its place in their order, and ranks that are in different calls get an error in
/// place of waiting for each other. `call` names it in errors, and ranks whose names differ are in different calls: 1 to 46 bytes
/// of UTF-8. `receive` has room for `bytes` bytes of each rank; both may be NULL for 0 bytes, which makes a
/// barrier. All ranks call it together. Blocks until they have.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT`, also where ranks pass different numbers of bytes;
/// `MP_ERROR_RANK_FAILED`; `MP_ERROR_ALLGATHER`.
mp_status_t mp_node_allgather(mp_node_t node,
                              const char *call,
                              const void *send,
                              void *receive,
                              size_t bytes);

/// Writes the GPUs that this rank works for, as its context numbers them: those of `options->devices`, else its share of what the
/// ranks see; of ranks that name the same GPU the first works for it. `*count` becomes how many. With `devices` NULL that is all; else it has room for `capacity`. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for `count` NULL, or too little room: then `*count` still has
/// what is needed, and nothing is written to `devices`.
mp_status_t mp_node_devices(mp_node_t node,
                            int32_t *devices,
                            size_t capacity,
                            size_t *count);

/// Destroys a node. Its plans go on, and are destroyed by themselves. Not collective. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_node_destroy(mp_node_t node);

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
mp_status_t mp_node_plan(mp_node_t node,
                         const mp_window_t *windows,
                         size_t window_count,
                         const mp_node_transfer_t *transfers,
                         size_t count,
                         const mp_partition_options_t *partitions,
                         const mp_plan_options_t *options,
                         mp_plan_t *plan);

/// Finds the best partitioning of these transfers for the kernels that produce them, by trying: plans candidates as
/// `mp_node_plan` does (agents, numbers of partitions, some ten of each), executes each
/// some times with `produce` launching the producers, and takes the one whose median step is shortest on the slowest rank.
/// What is refused is left out. `*best`, the same on all ranks, is for `mp_node_plan`. The tuning file keeps all trials,
/// of which `mpgpu tune partitions` makes a table and a picture, and `MP_AGENT_AUTO` finds there what is best without
/// `MP_AGENT_PRODUCER` (docs/reference/tuning.md).
///
/// All ranks call it together, with the same `tuning` and options, each on a stream of its own that the call makes. Each
/// hands in the transfers that it sends. Destinations are overwritten. Blocks; any thread, host functions excepted.
///
/// Errors: those of `mp_node_plan`, where no candidate can be planned; `MP_ERROR_INVALID_ARGUMENT` for agents
/// or rounds out of range, for a transfer that another rank sends, and where `produce` has failed;
/// `MP_ERROR_NOT_SUPPORTED` where the file cannot be written; `MP_ERROR_ENVIRONMENT` where it is of another machine.
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

/// Begins a step of a plan with partitions, in stream order, and returns. It starts after all earlier work in `stream` and after
/// the last step; consumers of the last step's arrivals come before it.
///
/// Then the caller enqueues what produces the partitions, in `stream` or in one that has waited for it: kernels that mark them
/// ready by the trigger that `mp_plan_get_trigger` gives (mpgpu/trigger.cuh). Last `mp_execute`
/// enqueues what moves them, and its end: later work in that stream sees all bytes that this rank receives in the step,
/// and may overwrite what it sent. Whoever receives may ask for the arrival of each partition before, by the trigger,
/// after `mp_plan_arm`. All three may be captured, in one capture. A partition is marked ready once in a step, also where
/// it is empty of news.
///
/// Every producer must be enqueued before `mp_execute` of the same step: on CUDA what waits for a producer may stand
/// before it in a hardware queue otherwise, and neither ends. With `MP_AGENT_PRODUCER`, and with `MP_AGENT_AUTO` where
/// `arrivals` are off, the stream of `mp_execute` must come after the producers: they may store the bytes, or all may be moved
/// then.
///
/// Each call is followed by one `mp_execute`. A plan that is destroyed
/// between the two leaves the other ranks `MP_ERROR_PEER_GONE`, and what they write in the step must stay allocated until
/// they have destroyed theirs. Any thread, host functions excepted.
///
/// Errors: those of `mp_execute`; `MP_ERROR_INVALID_ARGUMENT` where it is armed already, or has no partitions.
mp_status_t mp_plan_arm(mp_plan_t plan,
                        mp_stream_t stream);

/// Fills `*trigger` with what kernels of this rank need of a transfer: of number `transfer` among those that `rank`
/// handed in, from 0. It is the same for all steps. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` where the plan has no partitions, and for a transfer
/// that does not exist or of which this rank has no end.
mp_status_t mp_plan_get_trigger(mp_plan_t plan, uint32_t rank, size_t transfer, mp_trigger_t *trigger);

/// Blocks the calling thread until the last step that was executed has finished on this rank, at most `seconds`. For
/// finding a producer that never comes: the error names the partitions that are missing. The step goes on; where it does
/// not end within 10 seconds of `mp_plan_destroy`, that ends it without the rank's own missing partitions and fails with
/// `MP_ERROR_TIMEOUT`; for those of another rank it waits until that one has made them ready, or has destroyed its plan.
/// Steps that were captured are not waited for. Any thread, host functions excepted.
///
/// Errors: `MP_ERROR_TIMEOUT`; `MP_ERROR_PEER_GONE`; `MP_ERROR_INVALID_ARGUMENT` when `seconds` is negative or not a
/// number, or the plan has no partitions; `MP_ERROR_INVALID_HANDLE`.
mp_status_t mp_plan_synchronize(mp_plan_t plan,
                                double seconds);

/// Makes a messenger: by it the ranks of a node send each other messages, which are matched by MPI's rules. All ranks
/// call it together, with the same options; NULL means all defaults. `*messenger` belongs to the caller, who destroys it with
/// `mp_messenger_destroy`. It keeps the node. Messages of different messengers do not meet.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT`; `MP_ERROR_RANK_FAILED`; `MP_ERROR_ALLGATHER`;
/// `MP_ERROR_NOT_SUPPORTED` where ranks cannot share memory.
mp_status_t mp_messenger_create(mp_node_t node,
                                const mp_messenger_options_t *options,
                                mp_messenger_t *messenger);

/// Destroys a messenger. Not collective: other ranks go on, and what they ask of this one from then on ends with
/// `MP_ERROR_PEER_GONE`. Receives and sends of this rank that have not matched end with `MP_ERROR_CANCELLED`. Blocks until
/// movements under way have ended, and until messages that the library keeps (`mp_send`) were received, or their receivers have
/// left; at most 10 seconds for all. Then streams of this rank that wait for a movement go on without it, its request ends with
/// an error, and 2 seconds later the call returns. Destroying the context does the same first, of all messengers at once. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_TIMEOUT` where kept messages were not received, or movements have not ended because
/// a stream has not come to them: their memory must stay until their requests have ended. The messenger is destroyed all the same.
mp_status_t mp_messenger_destroy(mp_messenger_t messenger);

/// Sends `bytes` bytes at `data`, as earlier work in `stream` has written them, to `rank`, which may be this one. Does not
/// wait. `metadata` is read during the call and arrives with the match; at most `MP_MESSAGE_METADATA_BYTES`. The memory must
/// stay as it is until the request has ended; the request belongs to the caller, and may be NULL.
///
/// Messages from one rank to another do not overtake each other: a receive takes the first that it matches. Memory of a
/// GPU and host memory of `mp_alloc_shared` is read by whoever moves the bytes; such a send ends when the bytes were
/// received. Other host memory, and host messages of up to 1 KiB, are copied to memory of the library in stream order, and
/// the send ends then.
///
/// Errors: `MP_ERROR_QUEUE_FULL` where this rank has too many operations, or 512 MiB in messages of ordinary memory, or the other too
/// many messages that wait, and nothing was sent; `MP_ERROR_PEER_GONE`; `MP_ERROR_TIMEOUT` where a rank that was stopped within a call has kept the other's
/// mailbox locked for 30 seconds, and nothing was sent; `MP_ERROR_NOT_SUPPORTED` for memory of a GPU that cannot be shared, and in a stream
/// that is being captured; `MP_ERROR_INVALID_POINTER`, `MP_ERROR_INVALID_ARGUMENT`, `MP_ERROR_INVALID_HANDLE`. The request
/// ends with `MP_ERROR_PEER_GONE` where the receiver ends before the bytes have moved. With `MP_ERROR_OUT_OF_MEMORY`, no handle is
/// left for the request: the message was sent if it has met its receive at once, and else not.
mp_status_t mp_send(mp_messenger_t messenger,
                    const void *data,
                    uint64_t bytes,
                    uint32_t rank,
                    uint64_t tag,
                    const void *metadata,
                    size_t metadata_bytes,
                    mp_stream_t stream,
                    mp_request_t *request);

/// Receives a message of `rank`, or of any with `MP_ANY_RANK`, whose tag equals `tag` in the bits of `mask` (all bits set for
/// exactly this tag, 0 for any), into `bytes` bytes at `data`. They are written after earlier work in `stream`; later work in
/// the stream does not wait for them (`mp_stream_wait_request`). Does not wait. The memory must stay allocated until the
/// request has ended; the request belongs to the caller. A shorter message leaves the rest as it is. Ordinary host memory
/// gets its bytes from memory of the library, by whoever waits for the request or by the thread `mpgpu-callback`.
///
/// The request ends with `MP_ERROR_MESSAGE_TRUNCATED` where the message is longer than the buffer; it stays the first that a
/// receive of this kind takes. It ends with `MP_ERROR_PEER_GONE` where the sender has ended, and with `MP_ANY_RANK` where any
/// rank has died while it waited: the message may have been that rank's. Later receives from any rank are served by the
/// others.
///
/// Errors: as `mp_send`, and nothing is received.
mp_status_t mp_receive(mp_messenger_t messenger,
                       void *data,
                       uint64_t bytes,
                       int32_t rank,
                       uint64_t tag,
                       uint64_t mask,
                       mp_stream_t stream,
                       mp_request_t *request);

/// Looks for the message that a receive of this kind would take now, and leaves it where it is: `*found` becomes 1 or 0. Where
/// there is one, fills `*info`, which may be NULL. Does not wait. Any thread.
///
/// Errors: `MP_ERROR_PEER_GONE` where there is none and `rank` has ended; `MP_ERROR_INVALID_HANDLE`;
/// `MP_ERROR_INVALID_ARGUMENT`.
mp_status_t mp_message_probe(mp_messenger_t messenger,
                             int32_t rank,
                             uint64_t tag,
                             uint64_t mask,
                             int32_t *found,
                             mp_message_info_t *info);

/// Tells which message a request is about: `*matched` becomes 1 where a receive or fetch has met its message, and for sends;
/// else 0. Then fills `*info`, which may be NULL. After a truncation the message is the one that
/// was too long. Does not wait, and leaves the request as it is. Any thread.
///
/// Errors: `MP_ERROR_INVALID_HANDLE`; `MP_ERROR_INVALID_ARGUMENT` for the request of an execution.
mp_status_t mp_message_get_info(mp_request_t request,
                                int32_t *matched,
                                mp_message_info_t *info);

/// Describes `bytes` bytes at `data`, as earlier work in `stream` has written them, for one rank of the node that is given the
/// descriptor by any means: `mp_message_fetch` there copies them into its own memory, whenever it likes, once. The memory must
/// stay as it is until the request has ended. Does not wait. A descriptor whose fetching rank has ended is to be cancelled.
///
/// Errors: as `mp_send`.
mp_status_t mp_message_describe(mp_messenger_t messenger,
                                const void *data,
                                uint64_t bytes,
                                mp_stream_t stream,
                                mp_message_descriptor_t *descriptor,
                                mp_request_t *released);

/// Fetches what a descriptor describes into `bytes` bytes at `data`, after earlier work in `stream`; otherwise as
/// `mp_receive`. `messenger` is that which was made together with the describing rank's.
///
/// Errors: as `mp_receive`; `MP_ERROR_MESSAGE_TRUNCATED` where the buffer is too small, and it can be fetched into a larger
/// one; `MP_ERROR_INVALID_ARGUMENT` for a descriptor of another messenger, or that was fetched or cancelled.
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
/// Initial value of `mp_partition_options_t`: what the model says.
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

/* Enumerations have 32 bits on both sides: a compiler that is told to make them smaller (-fshort-enums) stops here. */
typedef char mp_enumerations_have_32_bits[sizeof(mp_backend_t) == 4 && sizeof(mp_engine_t) == 4 && sizeof(mp_switch_t) == 4 ? 1 : -1];

/// Creates a context, as `mp_context_create_versioned` says, and refuses a library that does not go with this header.
static inline mp_status_t mp_context_create(const mp_context_options_t *options, mp_context_t *context) {
    return mp_context_create_versioned(options, MP_VERSION, context);
}

#endif /* MPGPU_H */
