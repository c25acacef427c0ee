//! The tests of the library through its public Rust and C interfaces, as one program: each program of its own would link the
//! whole library once more, and once more under every sanitizer. What changes the process as a whole has its own (`log.rs`).

mod abi;
mod abi_campaign;
mod abi_fuzz;
mod alone;
mod bytes;
mod cache;
#[cfg(feature = "cli")]
mod command;
mod common;
mod config;
mod doctor;
mod forked;
mod header;
mod hidden;
mod host_backend;
mod kernel;
mod killed;
mod measure;
mod node;
mod nvtx;
mod peer;
mod planner;
mod probe;
mod probe_files;
mod probe_replay;
mod rings;
mod sanitize;
mod share;
mod signals;
mod simulator;
mod staging;
mod strangers;
mod threads;
mod topology;
mod trace;
mod tune;
mod validator;
