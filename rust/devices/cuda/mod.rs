//! Implements the backend for NVIDIA GPUs through the CUDA driver. The driver is loaded at run time and nothing links libcuda, so that one
//! binary runs on login nodes and on GPU nodes.
//!
//! Devices have the numbers that the driver gives them in this process (`CUDA_VISIBLE_DEVICES`). The backend uses each device through its
//! primary context, like the CUDA runtime. It retains the context when the device is first needed, so a device that no plan uses has no
//! context and no memory of this backend. The context then exists for the rest of the process, as with the CUDA runtime. Before a call
//! returns, it restores the calling thread's current context and stream capture mode.
//!
//! Stream handles are `CUstream`s that this backend or any other code has created. 0 and 1 denote the legacy default stream, and 2 denotes
//! the per-thread default stream. Both belong to the calling thread's current context, or to that of GPU 0 if the thread has no current
//! context. Streams of non-primary contexts are refused.
//!
//! The backend queries the driver for the properties of memory. It therefore accepts memory that other code has allocated: by `cudaMalloc`,
//! in memory pools, by the virtual memory API or by `cudaHostAlloc`, and registered host memory. Managed memory is refused.
//!
//! Host functions run on a thread of the driver. A host function that blocks may delay others.
//!
//! # Path of a copy
//!
//! ```text
//! mp_execute                 ffi: reads the plan's handle, creates the request
//! Plan::execute              engine: checks that context and memory exist; waits until it may use the plan's staging memory
//! Backend::submit            backend.rs
//! Core::submit               submit.rs: the stream's GPU (streams.rs), access to memory of other GPUs (gpus.rs)
//! ├ capture                  only if the stream is being captured: staging memory for the graph (capture.rs), then enqueue_lanes
//! └ enqueue
//!   ├ come_after             waits for executions that use the same staging memory
//!   ├ launch_graph           graph.rs: an executable graph of the plan (graphs.rs, exec.rs, nodes.rs), one cuGraphLaunch
//!   ├ enqueue_threads        submit.rs: some copies go to the pool of copy threads (workers.rs, pool.rs), the others to streams
//!   ├ enqueue_lanes          stream.rs: a stream for each lane (lanes.rs, device.rs), joined by events
//!   │ └ enqueue_op           copies.rs: cuMemcpyDtoDAsync, cuMemcpyBatchAsync, or the fused kernel (kernel.rs)
//!   └ end                    comparison of bytes (verify.rs); an event after all work (completion.rs)
//! ```
//!
//! A *lane* is a sequence of operations that one stream executes in order. The stream is internal or the caller's. `Backend::prepare` makes
//! the same calls up to the first launch or enqueue, and creates the resources that the execution will need.
//!
//! # Parts and locks
//!
//! The struct `Core` contains the state of the backend in several parts. Each part is a struct with its own lock. `Gpus` has no lock, and
//! all other parts may depend on it. The other parts are `Streams`, `Memory`, `Sharing` (memory and signals between processes), `Events`,
//! `Graphs`, `Checks` (pairs of GPUs whose copies were tested) and `Verification`. A function that needs several parts is a method of
//! `Core`, in a file that is named after the function's purpose.
//!
//! A call that enqueues an operation into a stream blocks while the stream's queue is full. This happens when about a thousand operations
//! are behind an operation that waits (driver 580). A call that waits for work blocks as well. Both may wait for a signal that another
//! thread is about to enqueue, or that the service thread (`mpgpu-share`) sets in place of an exited process. Therefore, no lock that such
//! a thread may need is held during a blocking call.
//!
//! | lock | protects | held during these calls of the driver |
//! | --- | --- | --- |
//! | `Sharing::waits`, `held`, `failed_waits` | waits for signals, and memory shared with or by others, as needed by the service thread | none |
//! | `Events`, `Memory`, `Streams`, `Core::reached`, `capture::SPARE` | tables | none |
//! | `Workers`: words and pool | free synchronisation words; jobs of copy threads | none |
//! | `Turns` | exclusive enqueueing into a stream, for an execution that needs several calls | all of these calls: only threads that enqueue into the same stream wait for the lock, and they would also wait for space in the stream's queue |
//! | `Verification` | memory for comparing bytes | queries of events |
//! | `Graphs::programs`, `Graphs::retired`, `exec::Pool` | executable graphs of all programs, and those of one program | creating, changing and querying graphs; not launching |
//! | `Primary::lanes`, `retired`, `callers`, `events`, `timers` | unused streams and events | querying and creating streams |
//! | `Primary::kernel` (`OnceLock`) | kernels of a GPU | loading, which waits for the GPU and is done before any stream waits |
//! | `Device::retaining` | retaining a primary context only once | retaining the context |
//! | `Pools::exported`, `Pools::imported` | memory pools exported to and imported from other processes | queries and imports; not freeing and destroying |
//! | `Lists` | pinned memory and GPU memory for lists of pieces | queries of events |
//! | `Checks` | results of test copies between GPUs | test copies, for at most a second, when a plan is created |
//!
//! Locks of the engine:
//!
//! - `Staging::users` is not held while an execution is enqueued. The exclusive right to use byte ranges of staging memory is held
//!   (`engine::staging`).
//! - `Staging::arenas` is not held while memory is allocated for a new plan.
//! - `Sharing::importing` is held while memory is mapped or unmapped. Executions and the setting of signals do not need it.
//! - `NodePlan::part` is held while a communication step is enqueued. Only other steps of the same plan wait for it.
//! - `SharedChoice`, the state by which plans choose their variants, is locked while the times of events are read, which does not block.
//! - The context's gate is locked for reading by every call that enqueues, and for writing only when the context is closed.

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
mod piece_parts;
mod pieces;
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

/// Substitutes for the CUDA driver, and tests of the backend that use them.
#[cfg(test)]
#[path = "../../../tests/rust/cuda/mod.rs"]
mod tests;

pub use self::backend::CudaBackend;
pub use self::gpus::device_count;
pub use self::identity::identity;
pub use self::peers::{Loss, Mover, Tried};
