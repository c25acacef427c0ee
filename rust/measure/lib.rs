//! Turns measurements of a machine into a topology or into better planning options, and stores the results in files.
//!
//! | module | contents |
//! | --- | --- |
//! | [`probe`] | derives a topology from measured times |
//! | [`tune`] | finds better options than the model's by scoring plans |
//!
//! The crate is pure: no backend, no clock. Implementations of [`probe::Harness`] and [`tune::Score`], which the contexts provide, make the
//! measurements.
#![forbid(unsafe_code)]

pub mod probe;
pub mod tune;

use mpgpu_core::{model, plan, program, topology};
