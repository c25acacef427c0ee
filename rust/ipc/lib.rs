//! Shares memory between processes of one node, and orders their work by counters in that memory.
//!
//! An exporter describes a memory range in a [`Handle`] of fixed size. The program sends the handle by any means, for example MPI. The
//! importer connects to the exporter named in the handle over an abstract Unix socket. Such a socket has no file, so no file remains after
//! a process exits. The exporter checks that the allocation still exists and answers with the information needed to map it. The connection
//! stays open while the importer holds the memory, so each process notices the exit of the other. Freed and unmapped memory is recorded in
//! a table that both processes map, so no event is lost even if a process reads the table rarely.
//!
//! | file | content |
//! | --- | --- |
//! | [`handle`] | encoding of handles, and the checks that need only their bytes |
//! | `process` | identity of a process: boot, network namespace, user, and a random number |
//! | [`segment`] | memory that other processes can map: a memory file for each allocation |
//! | `packet` | requests and answers of importer and exporter, with at most one file descriptor each |
//! | `credentials` | user and process at the other end of a socket |
//! | `board` | table in shared memory of freed and unmapped allocations |
//! | `service` | exporter: one thread per process, from the first export until the last exporting context is destroyed |
//! | `peer` | importer: a connection to one exporter |
//! | [`signal`] | counters in shared memory |
//! | `places` | positions of the steps of node plans (plans of several ranks) in streams |
//! | `slot` | record of a send or a receive in shared memory, visible to all ranks |
//! | [`mailbox`] | matching of sends and receives in shared memory |
//! | `fork` | protection of children of `fork` from inherited objects |
//!
//! The backend defines allocations and how they are mapped ([`Backend::map`](crate::backend::Backend::map)).

mod board;
mod credentials;
mod error;
pub mod fork;
pub mod handle;
pub mod mailbox;
mod packet;
mod peer;
mod places;
mod process;
pub mod segment;
mod service;
pub mod signal;
mod slot;

pub use crate::backend::{PAYLOAD_BYTES, Shared};
pub use credentials::Credentials;
pub use error::IpcError;
pub use handle::{Handle, Secret};
pub use packet::Departure;
pub use packet::patiently;
pub use peer::{BoardSlot, PATIENCE, Peer};
pub use places::{PLACES, StepPlace, StepPlaces};
pub use process::ProcessIdentity;
pub use service::{Export, OnLeave, Party, Service};
pub use slot::{Envelope, INLINE_BYTES, METADATA_BYTES, MessageSlot, Pattern, Preparation, SlotBuffer, SlotId, SlotState, SlotStatus};

use mpgpu_backend as backend;
use mpgpu_backend::{sync, threads};
use mpgpu_core::topology;

/// Key that identifies an exported allocation among those of its process.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct AllocationKey {
    /// ID of the backend that owns the allocation. IDs of allocations are unique only within a backend.
    pub backend: u8,
    /// Id of the allocation, from [`Allocation::id`](crate::backend::Allocation::id).
    pub allocation: u64,
}
