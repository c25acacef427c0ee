//! The tests of the library through its public Rust and C interfaces, as one program: each program of its own would link the
//! whole library once more, and once more under every sanitizer. What changes the process as a whole has its own (`log.rs`),
//! and what sanitizers leave no room for (`no_memory.rs`).

mod abi;
mod abi_campaign;
mod abi_fuzz;
#[path = "common/addresses.rs"]
mod addresses;
mod bytes;
mod cache;
mod collectives;
mod common;
mod config;
mod doctor;
mod environment;
mod forked;
mod fortran;
mod free_async;
mod header;
mod host_backend;
mod kernel;
mod killed;
mod library_threads;
mod meeting;
mod messages;
mod node;
mod node_losses;
mod node_plans;
mod nvtx;
mod partitions;
mod passed_on;
mod peer;
mod probe_files;
mod registered;
mod rings;
mod sanitize;
mod share;
mod signals;
#[path = "common/skip.rs"]
mod skip;
mod staging;
mod strangers;
mod structure;
mod threads;
mod trace;
mod tune;
mod variants;
