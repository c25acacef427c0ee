//! Implements the backend for NVIDIA GPUs through the CUDA driver. The driver is loaded at run time and nothing links libcuda, so that one
//! binary runs on a login node and on a GPU node.
//!
//! Devices have the numbers that the driver gives them in this process (`CUDA_VISIBLE_DEVICES`). Each is used through its primary context,
//! like in the CUDA runtime. The context is retained when the device is first needed, so a device that no plan uses costs neither a context
//! nor memory. It is then kept for the rest of the process, as in the runtime. Every path restores the calling thread's current context and
//! its stream capture mode.
//!
//! Streams are `CUstream`s, of this backend or any other code. 0 and 1 are the legacy default stream and 2 is the per-thread default
//! stream, of the calling thread's current context, or of GPU 0 if there is none. Streams of non-primary contexts are refused.
//!
//! The driver locates memory. Memory of `cudaMalloc`, of pools, of the virtual memory API and of `cudaHostAlloc`, and registered host
//! memory, is therefore accepted besides this backend's own. Managed memory is refused.
//!
//! Host functions run on a thread of the driver. A blocking one may delay others.
//!
//! # Path of a copy
//!
//! ```text
//! mp_execute                 ffi: reads the plan's handle, creates the request
//! Plan::execute              engine: checks that context and memory exist; waits for its turn in the plan's staging memory
//! Backend::submit            backend.rs
//! Core::submit               submit.rs: the stream's GPU (streams.rs), access to the others' memory (gpus.rs)
//! ├ capture                  a capturing stream: staging memory of the graph's own (capture.rs), then as on streams
//! └ enqueue
//!   ├ come_after             waits for executions that use the same staging memory
//!   ├ launch_graph           graph.rs: an executable graph of the plan (graphs.rs, exec.rs, nodes.rs), one cuGraphLaunch
//!   ├ enqueue_threads        submit.rs: the copies of threads go to their pool (workers.rs, pool.rs), the others to streams
//!   ├ enqueue_lanes          stream.rs: a stream for each lane (lanes.rs, device.rs), joined by events
//!   │ └ enqueue_op           copies.rs: cuMemcpyDtoDAsync, cuMemcpyBatchAsync, or the fused kernel (kernel.rs)
//!   └ end                    comparison of bytes (verify.rs); an event after all work (completion.rs)
//! ```
//!
//! A *lane* is a sequence of operations that one stream, internal or the caller's, executes in order. `Backend::prepare` follows the same
//! path up to the first launch or enqueue, and creates the resources that are needed there.
//!
//! # Parts and locks
//!
//! `Core` holds the parts. Each part is a struct with its own lock and does not depend on the parts above it: `Gpus` (without a lock) below
//! `Streams`, `Memory`, `Sharing` (memory and signals between processes), `Events`, `Graphs`, `Checks` (tested pairs) and `Verification`.
//! Functions that need several parts are methods of `Core`, in a file named after their purpose.
//!
//! A call that adds an operation to the queue of a stream blocks while the queue is full, which happens after about a thousand operations
//! behind a waiting one (driver 580). A call that waits for work blocks as well. Both may wait for a signal that another thread is about to
//! enqueue, or that the service thread (`mpgpu-share`) sets in place of an exited process. No lock that either thread may need is therefore
//! held across such a call.
//!
//! | lock | protects | held across calls of the driver |
//! | --- | --- | --- |
//! | `Sharing::waits`, `held`, `failed_waits` | waits for signals, and memory shared with or by others, as needed by the service thread | none |
//! | `Events`, `Memory`, `Streams`, `Core::reached`, `capture::SPARE` | tables | none |
//! | `Workers`: words and pool | free words; jobs of copy threads | none |
//! | `Turns` | exclusive enqueueing into a stream, for executions of several calls | all of these calls: only threads that enqueue into the same stream wait for it, as they would for room in its queue |
//! | `Verification` | memory for comparing bytes | queries of events |
//! | `Graphs::programs`, `Graphs::retired`, `exec::Pool` | graphs, and those of one program | creating, changing and querying graphs; not launching |
//! | `Primary::lanes`, `retired`, `callers`, `events`, `timers` | free streams and events | querying and creating streams |
//! | `Primary::kernel` (`OnceLock`) | kernels of a GPU | loading, which waits for the GPU and is done before any stream waits |
//! | `Device::retaining` | retaining a context once | retaining |
//! | `Pools::exported`, `Pools::imported` | pools shared with and by others | queries and imports; not freeing and destroying |
//! | `Checks` | results of testing pairs | copies of the test, for at most a second, when a plan is created |
//!
//! Locks of the engine: `Staging::users` is not held while an execution is enqueued (a turn in its bytes is, `engine::staging`).
//! `Staging::arenas` is not held while memory is allocated for a new plan. `Sharing::importing` is held while memory is mapped or unmapped,
//! but no execution and no setting of signals needs it. `NodePlan::part` is held while a step is enqueued, and only other steps of the same
//! plan wait for it. The state by which plans choose their variants (`SharedChoice`) is held while the times of events are read, which does
//! not block. Every call that enqueues holds the context's gate for reading, and only closing the context locks it for writing.

mod addresses;
mod attributes;
mod backend;
mod capture;
mod choice;
mod chunk;
mod completion;
mod copies;

mod device;
pub mod discover;
pub mod doctor;
mod driver;
mod event;
mod exec;
mod export;
mod gpus;
mod graph;
mod graphs;
mod host_function;
mod identity;
mod import;
mod ipc;
mod kernel;
mod lane;
mod lanes;
mod locate;
mod memory;
mod moment;
mod nodes;
mod nvml;
mod operations;
mod owner;
mod parts;
mod peers;
mod pool;
#[cfg(all(test, shuttle))]
mod pool_model;
mod pools;
mod reach;
mod reached;
mod sharing;
mod signal;
mod stream;
mod streams;
mod submit;
mod timing;
mod turns;
mod verify;
mod waits;
mod workers;

/// Doubles of the driver, and tests of the backend on them.
#[cfg(test)]
#[path = "../../../tests/rust/cuda/mod.rs"]
mod tests;

pub use self::backend::CudaBackend;
pub use self::gpus::device_count;
pub use self::identity::identity;
pub use self::peers::{Loss, Mover, Tried};
