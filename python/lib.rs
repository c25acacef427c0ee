//! The C ABI of `rust/ffi` as a shared library. A shared library exports the C functions of its crate and of the crates that it links, so
//! naming the crate is enough.

pub use mpgpu::abi::*;
