//! Moves data between the memories of one node (GPUs and host) over every link that can help at once.
//!
//! Rust programs use the types below: [`Context`], [`Buffer`], [`Stream`], [`Plan`], [`Node`]. [`mpgpu_api`] says what they own, check and leave
//! to the caller.
//!
//! The functions and modules are the C ABI, the only stable interface: what `include/mpgpu/mpgpu.h` is generated from.
//!
//! Every entry point runs inside `guard`, the one panic boundary, and turns its arguments into references and values through
//! `argument`, the one place with null, alignment and size checks. Handles are keys of `table`s, never dereferenced, so a
//! destroyed handle is an error and not a crash. Outputs are written last, after everything that can fail.
//!
//! The doc comments here become those of the header: they are written for C programmers, and what they ask of pointers is the
//! safety contract.
#![allow(non_camel_case_types, clippy::missing_safety_doc)]

mod argument;
pub mod context;
pub mod error;
mod guard;
pub mod log;
pub mod memory;
pub mod message;
pub mod node;
pub mod partition;
pub mod plan;
pub mod probe;
pub mod request;
pub mod share;
pub mod stream;
mod table;
pub mod types;
pub mod version;

#[doc(inline)]
pub use mpgpu_api::*;

pub use context::*;
pub use error::*;
pub use log::mp_log_set_callback;
pub use memory::*;
pub use message::*;
pub use node::*;
pub use partition::*;
pub use plan::*;
pub use probe::*;
pub use request::*;
pub use share::*;
pub use stream::*;
pub use types::*;
pub use version::*;
