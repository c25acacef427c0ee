//! Memory of one process that others of the same node map, and counters in it that order their work.
//!
//! An exporter describes a range in a [`Handle`] of fixed size, which travels over whatever the code has, MPI say. The importer
//! connects to the exporter named in it, over an abstract Unix socket: a name without a file, so that none is left behind however a
//! process ends. The exporter looks whether the allocation still lives, and answers with what is needed to map it. The connection
//! stays for as long as the importer holds the memory, so each side learns when the other has gone. What was freed and what was closed
//! stands on a page that both map, where nothing gets lost however long a side does not look.
//!
//! | file | promise |
//! | --- | --- |
//! | [`handle`] | the handle's bytes, and what is refused by them alone |
//! | `origin` | who a process is: boot, network namespace, user, and a number drawn at random |
//! | [`segment`] | memory that can be shared, from the start: a memory file for each allocation |
//! | `message` | one request, one answer, one descriptor each |
//! | `board` | what was freed and closed since |
//! | `service` | the exporter's side: one thread for a process, from the first export to the end of the last context that exported |
//! | `peer` | the importer's side |
//! | [`signal`] | counters in shared memory |
//! | `fork` | what a child of `fork` inherits and leaves alone |
//!
//! What an allocation is, and how its memory is mapped, is the backend's to say ([`Backend::share`](crate::backend::Backend::share)).

mod board;
mod error;
pub(crate) mod fork;
pub mod handle;
mod message;
mod origin;
mod peer;
pub mod segment;
mod service;
pub mod signal;

pub use error::Error;
pub use handle::{Handle, Secret};
pub use message::{PAYLOAD_BYTES, Shared};
pub use origin::Origin;
pub use peer::{PATIENCE, Peer, Slot};
pub use service::{Export, Service};

/// The allocation that a handle is about, among all of its process.
#[derive(Copy, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// [`Backend::name`](crate::backend::Backend::name) as a number: allocation ids are each backend's own.
    pub backend: u8,
    /// [`Allocation::id`](crate::backend::Allocation::id).
    pub allocation: u64,
}
