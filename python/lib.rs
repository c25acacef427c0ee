//! The C ABI of `rust/ffi` as a shared library. A shared library exports what its crate and the crates that it links export to C: naming
//! the crate is all that there is to do.

pub use mpgpu::abi::*;
