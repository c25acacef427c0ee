//! The tests of the `mpgpu` command.

#[path = "../rust/command.rs"]
mod command;
#[path = "../rust/common/skip.rs"]
mod skip;
