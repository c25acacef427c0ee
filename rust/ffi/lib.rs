//! Moves data between the memories of one node (GPUs and host) over every link that can help at once.
//!
//! Rust programs use the types below, of which [`mpgpu_api`] says what they own, check and leave to the caller. The C ABI is in [`abi`].
#![allow(non_camel_case_types, clippy::missing_safety_doc)]

mod argument;
mod collective;
mod context;
mod error;
mod guard;
pub mod log;
mod memory;
mod message;
mod node;
mod partition;
mod plan;
mod probe;
mod request;
mod share;
mod stream;
mod table;
mod types;
mod version;

#[doc(inline)]
pub use mpgpu_api::*;

/// The C ABI, the only stable interface: what `include/mpgpu/mpgpu.h` is generated from.
///
/// Every entry point runs inside `guard`, the one panic boundary, and turns its arguments into references and values through
/// `argument`, the one place with null, alignment and size checks. Handles are keys of `table`s, never dereferenced, so a
/// destroyed handle is an error and not a crash. Outputs are written last, after everything that can fail.
///
/// The doc comments here become those of the header: they are written for C programmers, and what they ask of pointers is the
/// safety contract.
pub mod abi {
    pub use super::collective::*;
    pub use super::context::*;
    pub use super::error::*;
    pub use super::log::mp_log_set_callback;
    pub use super::memory::*;
    pub use super::message::*;
    pub use super::node::*;
    pub use super::partition::*;
    pub use super::plan::*;
    pub use super::probe::*;
    pub use super::request::*;
    pub use super::share::*;
    pub use super::stream::*;
    pub use super::types::*;
    pub use super::version::*;
}
