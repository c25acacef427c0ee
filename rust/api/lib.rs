//! API for Rust programs. Programs depend on the package `mpgpu`, which re-exports this crate, and write `mpgpu::Context`.
//!
//! ```
//! use mpgpu::{Buffer, Context, Device, Stream};
//!
//! # fn main() -> Result<(), mpgpu::Error> {
//! let ctx = Context::new()?;                                  // reads the topology and the environment variables
//! let a = Buffer::from_slice(&ctx, Device::gpu(0), &vec![1.0_f32; 1 << 20])?;
//! let b = Buffer::<f32>::zeroed(&ctx, Device::gpu(1), 1 << 20)?;
//! let stream = Stream::new(&ctx, Device::gpu(0))?;
//! let copy = ctx.plan([(&b, &a)])?;                           // pairs of destination and source; planned once
//! for _step in 0..3 {
//!     copy.enqueue(&stream)?;                                 // in stream order; does not block
//! }
//! assert_eq!(b.to_vec(&stream)?, vec![1.0; 1 << 20]);
//! println!("{}", copy.describe());                            // paths, predicted time, why other paths were rejected
//! # Ok(())
//! # }
//! ```
//!
//! **Ownership.** Objects are reference-counted handles. A plan keeps its buffers alive, a buffer its context, and a request its plan.
//! Dropping the last handle frees the object. Two operations block until the work that the context has enqueued has finished: freeing
//! memory, and dropping a plan whose memory the context has not allocated. A copy of pieces keeps such memory alive until it has ended.
//! Therefore no execution uses freed memory, even if a handle is leaked. Do not drop the last handle in a function of
//! [`Stream::launch_host`]: the function would wait for itself.
//!
//! **Not checked.** If two executions access the same bytes and at least one of them writes, the program must order them by streams or
//! events, as on a GPU. Otherwise the values are unspecified. Memory safety does not depend on the order: any bytes are a valid value of
//! an element type ([`Element`]), and safe code accesses elements only through copies.
//!
//! **Unsafe** functions accept an address or a handle without a check ([`End::from_raw`], [`Stream::from_raw`]), access memory while
//! work in streams may access it ([`Buffer::as_slice`]), or capture an execution in a graph that may outlive its memory
//! ([`Plan::enqueue_captured`]).
//!
//! **Threads.** All types may be used from any thread. **Units** are bytes and seconds. **Errors** have the type [`Error`]. Their text
//! contains the invalid value and the remedy.
//!
//! Signals, memory of other processes, messages and partitions have no Rust API yet. `mpgpu::abi` contains the functions of the C ABI,
//! which use separate contexts.

mod buffer;
mod context;
mod file;
mod node;
#[cfg(feature = "cudarc")]
mod of_cudarc;
mod pieces;
mod plan;
mod stream;

pub use buffer::{Buffer, Element, End, Slice};
pub use context::Context;
pub use file::MappedFile;
pub use node::{Half, Node};
pub use pieces::{BlockArrays, BlockIndex, BlockIndices};
pub use plan::{Plan, Request, Transfer};
pub use stream::{Event, Stream};

pub use mpgpu_backend::{BackendError, SignalWait};
pub use mpgpu_contexts::{
    BackendChoice, Caching, ContextOptions, DeviceStatistics, Error, Measured, PieceOptions, PlanOptions, Statistics,
};
pub use mpgpu_core::plan::{Engine, Relays};
/// Device of a context: a GPU, for example `Device::gpu(0)`, or host memory, `Device::HOST`.
pub use mpgpu_core::topology::DeviceId as Device;
pub use mpgpu_ranks::Allgather;
