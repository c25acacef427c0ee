//! What the CUDA backend does on doubles of the driver, without a GPU. Part of the crate's own tests, because the doubles take the driver's
//! place inside of the backend.

pub mod double;

mod captures;
mod failing;
mod foreign;
mod host_functions;
mod lanes;
mod launches;
mod lost;
mod messages;
mod moments;
mod opened_memory;
mod prepared;
mod queues;
mod refusals;
mod registered;
mod steps;
mod workers;

use super::*;
use crate::backend::Backend;
