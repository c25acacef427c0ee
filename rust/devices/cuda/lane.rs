//! A lane of an execution over streams.

use super::device::{Caller, Primary};
use super::lanes::Placement;
use super::workers::{Divided, Job};
use crate::backend::{Endpoints, PlanState};
use std::sync::Arc;

/// One lane of an execution.
pub(super) struct Lane<'a> {
    pub at: Placement,
    pub primary: &'a Primary,
    /// The `CUstream`.
    pub stream: usize,
    /// The ends of the plan as its GPU has them, where they are not those of the execution.
    pub ends: Option<Arc<[Endpoints]>>,
    /// Whether there is memory in the plan that its GPU must not enter.
    pub is_shut_out: bool,
    /// The stream of the execution.
    pub caller: Caller,
    pub state: &'a PlanState,
    /// What hands over to threads and takes over from them, where they do a part.
    pub threads: Option<(&'a Job, &'a Divided)>,
    /// Whether it has begun: its stream comes after what it has to wait for at its start.
    pub begun: bool,
}
