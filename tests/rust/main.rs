//! Tests the library through its public Rust and C interfaces. All tests are one program, because each separate program would link the
//! whole library again, and once more for every sanitizer. Tests that change the whole process (`log.rs`) or are not possible with
//! sanitizers (`no_memory.rs`) are separate programs.

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
mod files;
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
mod node_kills;
mod node_losses;
mod node_planning;
mod node_plans;
mod nvtx;
mod partitions;
mod passed_on;
mod peer;
mod pid_namespaces;
mod pieces;
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
mod vanishing;
mod variants;
