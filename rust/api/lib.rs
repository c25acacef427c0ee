//! API for Rust programs. Programs depend on the package `mpgpu`, which re-exports all of this, and write `mpgpu::Context`.
//!
//! ```
//! use mpgpu::{Buffer, Context, Device, Stream};
//!
//! # fn main() -> Result<(), mpgpu::Error> {
//! let ctx = Context::new()?;                                  // discovers the machine; reads the environment, here only
//! let a = Buffer::from_slice(&ctx, Device::gpu(0), &vec![1.0_f32; 1 << 20])?;
//! let b = Buffer::<f32>::zeroed(&ctx, Device::gpu(1), 1 << 20)?;
//! let stream = Stream::new(&ctx, Device::gpu(0))?;
//! let copy = ctx.plan([(&b, &a)])?;                           // destination, source; planned together, once
//! for _step in 0..3 {
//!     copy.enqueue(&stream)?;                                 // in stream order; does not block
//! }
//! assert_eq!(b.to_vec(&stream)?, vec![1.0; 1 << 20]);
//! println!("{}", copy.describe());                            // paths, shares, times, and why other paths were rejected
//! # Ok(())
//! # }
//! ```
//!
//! **Ownership.** Objects are shared handles: a plan keeps its buffers alive, a buffer its context, and a request its plan. Dropping the
//! last handle frees the object. Freeing memory, and dropping a plan of memory that the context has not allocated, blocks until the work
//! that the context has enqueued has finished. Therefore no execution uses freed memory, even if a handle is forgotten. Do not drop the
//! last handle in a function of [`Stream::launch_host`]: it would wait for itself.
//!
//! **Not checked.** As on a GPU, two executions that access the same bytes, at least one of them writing, are ordered only by streams and
//! events; without an order the values are unspecified. Any bytes are a valid value of an element type ([`Element`]), and safe code sees
//! elements only through copies, so nothing else depends on the order.
//!
//! **Unsafe** functions accept an address or a handle without a check ([`End::from_raw`], [`Stream::from_raw`]), access memory while
//! streams may work on it ([`Buffer::as_slice`]), or capture an execution in a graph that may outlive its memory
//! ([`Plan::enqueue_captured`]).
//!
//! **Threads.** Every type may be used from all threads. **Units** are bytes and seconds. **Errors** are an [`Error`], whose text names the
//! value and the remedy.
//!
//! Signals, memory of other processes, messages and partitions have no Rust API yet. `mpgpu::abi` contains the functions of the C ABI,
//! which use separate contexts.

mod buffer;
mod context;
mod node;
#[cfg(feature = "cudarc")]
mod of_cudarc;
mod plan;
mod stream;

pub use buffer::{Buffer, Element, End, Slice};
pub use context::Context;
pub use node::{Half, Node};
pub use plan::{Plan, Request, Transfer};
pub use stream::{Event, Stream};

pub use mpgpu_backend::{BackendError, SignalWait};
pub use mpgpu_contexts::{BackendChoice, ContextOptions, DeviceStatistics, Error, Measured, PlanOptions, Statistics};
pub use mpgpu_core::plan::{Engine, Relays};
/// Device of a context: `Device::gpu(0)`, `Device::HOST`.
pub use mpgpu_core::topology::DeviceId as Device;
pub use mpgpu_ranks::Allgather;
