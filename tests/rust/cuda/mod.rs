//! Tests the CUDA backend without a GPU. The tests use driver doubles (simulated CUDA drivers). They are unit tests of the crate, because a
//! double replaces the driver inside the backend.

pub mod double;

mod captures;
mod copy_threads;
mod failing;
mod files;
mod foreign;
mod host_functions;
mod lanes;
mod launches;
mod lost;
mod messages;
mod moments;
mod opened_memory;
mod pieces;
mod prepared;
mod queues;
mod refusals;
mod registered;
mod steps;
mod workers;

use super::*;
use crate::backend::Backend;
