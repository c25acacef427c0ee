//! Holds the state of one lane during an execution. A lane is a sequence of operations that one stream, internal or the caller's, runs in
//! order.

use super::device::{Caller, Primary};
use super::lanes::Placement;
use super::workers::{Divided, Job};
use crate::backend::{Endpoints, PlanState};
use std::sync::Arc;

/// Lane of an execution: a sequence of operations, and the stream that runs them in order. The stream is internal or the caller's.
pub(super) struct Lane<'a> {
    pub at: Placement,
    pub primary: &'a Primary,
    /// Handle of the stream that runs the lane's operations (`CUstream`).
    pub stream: usize,
    /// Sources and destinations of the plan's transfers, as addresses that the lane's GPU uses. `None` if these are the addresses of the
    /// execution.
    pub ends: Option<Arc<[Endpoints]>>,
    /// True if the lane's GPU cannot access some memory of the plan, not even by copies.
    pub is_shut_out: bool,
    /// Identity of the caller's stream, in which the execution was submitted.
    pub caller: Caller,
    pub state: &'a PlanState,
    /// Job of the copy threads, with the division of the program between streams and threads. `None` if no thread takes part in the
    /// execution.
    pub threads: Option<(&'a Job, &'a Divided)>,
    /// True once the lane's stream waits for all events that must precede the lane's first operation.
    pub begun: bool,
}
