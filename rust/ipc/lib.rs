//! Memory of one process that others of the same node map, and counters in it that order their work.
//!
//! An exporter describes a range in a [`Handle`] of fixed size, which travels over whatever the code has, MPI say. The importer
//! connects to the exporter named in it, over an abstract Unix socket: it has no file, so nothing is left behind however a process ends.
//! The exporter checks that the allocation still exists, and answers with what is needed to map it. The connection stays open for as long
//! as the importer holds the memory, so each side notices the end of the other. What was freed and what was closed is noted on a page
//! that both map, where nothing gets lost however rarely a side looks.
//!
//! | file | promise |
//! | --- | --- |
//! | [`handle`] | the handle's bytes, and what is refused by them alone |
//! | `process` | who a process is: boot, network namespace, user, and a number drawn at random |
//! | [`segment`] | memory that can be shared, from the start: a memory file for each allocation |
//! | `packet` | one request, one answer, one descriptor each |
//! | `board` | what was freed and closed since |
//! | `service` | the exporter's side: one thread for a process, from the first export to the end of the last context that exported |
//! | `peer` | the importer's side |
//! | [`signal`] | counters in shared memory |
//! | `places` | where steps of node plans stand in streams |
//! | `slot` | a send or a receive, as all ranks see it |
//! | [`mailbox`] | which send goes to which receive |
//! | `fork` | what a child of `fork` inherits and leaves alone |
//!
//! The backend defines what an allocation is and how it is mapped ([`Backend::map`](crate::backend::Backend::map)).

mod board;
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
pub use error::IpcError;
pub use handle::{Handle, Secret};
pub use packet::Departure;
pub use packet::patiently;
pub use peer::{BoardSlot, PATIENCE, Peer};
pub use places::{PLACES, StepPlace, StepPlaces};
pub use process::ProcessIdentity;
pub use service::{Export, OnLeave, Service};
pub use slot::{Envelope, INLINE_BYTES, METADATA_BYTES, MessageSlot, Pattern, Preparation, SlotBuffer, SlotId, SlotState, SlotStatus};

use mpgpu_backend as backend;
use mpgpu_backend::{sync, threads};
use mpgpu_core::topology;

/// The allocation that a handle is about, among all of its process.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct AllocationKey {
    /// Which backend, as a number: allocation ids are each backend's own.
    pub backend: u8,
    /// [`Allocation::id`](crate::backend::Allocation::id).
    pub allocation: u64,
}
