//! Moves data between the memories of one node (GPUs and host) over every link that can contribute.
//!
//! Rust programs use the types below. [`mpgpu_api`] describes their ownership, their checks, and the caller's
//! obligations. The C ABI is in [`abi`].
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
mod pieces;
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

/// C ABI, the only stable interface. `include/mpgpu/mpgpu.h` is generated from it.
///
/// Every entry point runs inside `guard`, the only panic boundary. It converts its arguments to references and values
/// through `argument`, the only place with null, alignment and size checks. Handles are keys of `table`s and are never
/// dereferenced, so a destroyed handle causes an error, not a crash. Outputs are written last, after everything that
/// can fail.
///
/// The doc comments here become those of the header. They are written for C programmers, and their requirements on
/// pointers are the safety contract.
pub mod abi {
    pub use super::collective::*;
    pub use super::context::*;
    pub use super::error::*;
    pub use super::log::mp_log_set_callback;
    pub use super::memory::*;
    pub use super::message::*;
    pub use super::node::*;
    pub use super::partition::*;
    pub use super::pieces::*;
    pub use super::plan::*;
    pub use super::probe::*;
    pub use super::request::*;
    pub use super::share::*;
    pub use super::stream::*;
    pub use super::types::*;
    pub use super::version::*;
}
