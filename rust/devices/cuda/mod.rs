//! NVIDIA GPUs through the CUDA driver, which is loaded at run time: nothing here links libcuda, so that one binary runs on a login
//! node and on a GPU node.
//!
//! Devices are numbered as the driver numbers them for this process (`CUDA_VISIBLE_DEVICES`). Each is used through its primary
//! context, the one that the CUDA runtime uses too; it is retained when the device is first needed, so that a device of which no plan
//! makes use costs neither a context nor memory, and then for the rest of the process, as the runtime does it. The calling thread's current context is left as it was on every path, and so is its
//! stream capture mode.
//!
//! Streams are `CUstream`s, of this backend or of anyone: 0 and 1 are the legacy default stream, 2 is the per-thread default stream,
//! both of the calling thread's current context, or of GPU 0 where there is none. Streams of contexts other than primary ones are
//! refused.
//!
//! Memory is located by the driver, so memory of `cudaMalloc`, of pools, of the virtual memory API, of `cudaHostAlloc` and registered
//! host memory is accepted besides this backend's own. Managed memory is refused.
//!
//! Host functions run on a thread of the driver. One that blocks may hold up others.
//!
//! # A copy's way
//!
//! ```text
//! mp_execute                 ffi: takes the plan's handle, makes the request
//! Plan::execute              engine: checks that context and memory are alive; takes a turn in the plan's staging memory
//! Backend::submit            backend.rs
//! Core::submit               submit.rs: the stream's GPU (streams.rs), access to the others' memory (gpus.rs)
//! ├ capture                  a stream that is being captured: staging memory of the graph's own (capture.rs), then as over streams
//! └ enqueue
//!   ├ come_after             waits for executions that use the same staging memory
//!   ├ launch_graph           graph.rs: an executable graph of the plan (graphs.rs, exec.rs, nodes.rs), one cuGraphLaunch
//!   ├ enqueue_lanes          stream.rs: a stream for each lane (lanes.rs, device.rs), joined by events
//!   │ └ enqueue_op           copies.rs: cuMemcpyDtoDAsync, cuMemcpyBatchAsync, or the fused kernel (kernel.rs)
//!   └ end                    the comparison of bytes (verify.rs); an event behind all (completion.rs)
//! ```
//!
//! `Backend::prepare` goes the same way up to where something is launched or enqueued, and makes what that takes.
//!
//! # Parts and locks
//!
//! `Core` holds the parts. Each is a struct with its own lock, and knows none of those above it: `Gpus` (no lock) below
//! `Streams`, `Memory`, `Sharing` (memory and signals between processes), `Events`, `Graphs`, `Checks` (pairs that were tried) and
//! `Verification`. What needs several parts is a method of `Core`, in a file named after what it does.
//!
//! A call that puts something into the queue of a stream blocks while that is full, which it is after about a thousand operations behind one
//! that waits (driver 580); one that waits for work blocks too. What they wait for may be a signal that another thread is about to have
//! raised, or that the service thread (`mpgpu-share`) raises in place of a process that has died. So no lock that either may need is held
//! across such a call.
//!
//! | lock | guards | held across calls of the driver |
//! | --- | --- | --- |
//! | `Sharing::waits`, `held`, `failed_waits` | waits for signals, memory of and for others: what the service thread needs | none |
//! | `Events`, `Memory`, `Streams`, `Core::reached`, `capture::SPARE` | tables | none |
//! | `Verification` | memory for comparing bytes | asking whether events have passed |
//! | `Graphs::programs`, `Graphs::retired`, `exec::Pool` | graphs, and those of one program | making, changing and asking for graphs; not launching |
//! | `Primary::lanes`, `retired`, `callers`, `events`, `timers` | streams and events that are free | asking for streams and creating them |
//! | `Primary::kernel` (`OnceLock`) | the kernels of a GPU | loading, which waits for the GPU: it is done before anything waits |
//! | `Device::retaining` | retaining a context once | retaining |
//! | `Pools::exported`, `Pools::imported` | pools of and for others | asking and importing; freeing and destroying not |
//! | `Checks` | what was found of pairs | copies of its own, for at most a second, when a plan is made |
//!
//! Of the engine: `Staging::users` is not held while an execution is enqueued (a turn in its bytes is, `engine::staging`), `Staging::arenas`
//! while memory is allocated for a new plan, `Sharing::importing` while memory is mapped or unmapped, which no execution and no raise
//! needs. `NodePlan::part` is held while a step is enqueued, for which only other steps of the same plan wait. What
//! plans choose their variants by (`SharedChoice`) is held while the times of events are read, which waits for nothing. The context's gate is held
//! for reading by every call that enqueues, and taken for writing by closing alone.

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
mod pools;
mod reach;
mod reached;
mod sharing;
mod signal;
mod stream;
mod streams;
mod submit;
mod timing;
mod verify;
mod waits;
mod workers;

/// Doubles of the driver, and what the backend does on them.
#[cfg(test)]
#[path = "../../../tests/rust/cuda/mod.rs"]
mod tests;

pub use self::backend::CudaBackend;
pub use self::gpus::device_count;
pub use self::identity::identity;
pub use self::peers::{Loss, Mover, Tried};
