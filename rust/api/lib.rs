//! The API for Rust programs. They depend on the package `mpgpu`, which re-exports all of this, and write `mpgpu::Context`.
//!
//! ```
//! use mpgpu::{Buffer, Context, Device, Stream};
//!
//! # fn main() -> Result<(), mpgpu::Error> {
//! let ctx = Context::new()?;                                  // finds the machine; reads the environment, here only
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
//! **Ownership.** Objects are handles that share what they name: a plan keeps its buffers, a buffer its context, and a request its plan. The
//! last one to go frees it. Freeing memory, and giving up a plan of memory that belongs to somebody else, blocks until the work that the
//! context has enqueued has finished. So no execution uses memory that was freed, also where a handle is forgotten. Do not let the last
//! handle go within a function of [`Stream::launch_host`]: it would wait for itself.
//!
//! **What is not checked.** Bytes that two executions write, or that one writes and another reads, have an order only where streams and events
//! give them one, as on a GPU; without it their values are unspecified. Elements are types of which any bytes are a value ([`Element`]), and
//! safe code sees them by copies alone, so nothing else depends on it.
//!
//! **Unsafe** is what takes an address or a handle on the caller's word ([`End::from_raw`], [`Stream::from_raw`]), looks at memory while streams
//! may work on it ([`Buffer::as_slice`]), or puts an execution into a graph that may outlive its memory ([`Plan::enqueue_captured`]).
//!
//! **Threads.** Every type may be used from all threads. **Units** are bytes and seconds. **Errors** are an [`Error`], whose text names the
//! value and the remedy.
//!
//! Signals, memory of other processes, messages and partitions have no Rust form yet. The functions of the C ABI are in `mpgpu::abi`, with
//! contexts of their own.

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
/// A device of a context: `Device::gpu(0)`, `Device::HOST`.
pub use mpgpu_core::topology::DeviceId as Device;
pub use mpgpu_ranks::Allgather;
