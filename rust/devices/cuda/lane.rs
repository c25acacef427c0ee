//! Holds the state of one lane of an execution: the stream, internal or the caller's, that runs a sequence of its operations in order.

use super::device::{Caller, Primary};
use super::lanes::Placement;
use super::workers::{Divided, Job};
use crate::backend::{Endpoints, PlanState};
use std::sync::Arc;

/// Lane of an execution: a stream, internal or the caller's, that runs a sequence of the operations in order.
pub(super) struct Lane<'a> {
    pub at: Placement,
    pub primary: &'a Primary,
    /// Handle of the stream that runs the lane (`CUstream`).
    pub stream: usize,
    /// Sources and destinations of the plan's transfers, as addresses used by this lane's GPU. `None` if they equal the addresses of the
    /// execution.
    pub ends: Option<Arc<[Endpoints]>>,
    /// True if this lane's GPU has no access to part of the plan's memory, not even by copies.
    pub is_shut_out: bool,
    /// Identity of the caller's stream, in which the execution was submitted.
    pub caller: Caller,
    pub state: &'a PlanState,
    /// Job of the copy threads, with the division of the program between streams and threads. `None` if no thread copies anything.
    pub threads: Option<(&'a Job, &'a Divided)>,
    /// True once this lane's stream waits for all events that must precede the lane's first operation.
    pub begun: bool,
}
