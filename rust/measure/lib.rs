//! What is measured of a machine, and the files in which it is kept: measurements in, a topology or better options out.
//!
//! | module | promise |
//! | --- | --- |
//! | [`probe`] | from measured times to a topology |
//! | [`tune`] | better options than the model's, found by scoring plans |
//!
//! Pure: no backend, no clock. Who implements [`probe::Harness`] or [`tune::Score`] measures; the runtime does.
#![forbid(unsafe_code)]

pub mod probe;
pub mod tune;

use mpgpu_core::{model, plan, program, topology};
