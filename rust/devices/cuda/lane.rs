//! Holds the state of one lane of an execution on streams.

use super::device::{Caller, Primary};
use super::lanes::Placement;
use super::workers::{Divided, Job};
use crate::backend::{Endpoints, PlanState};
use std::sync::Arc;

/// Lane of an execution.
pub(super) struct Lane<'a> {
    pub at: Placement,
    pub primary: &'a Primary,
    /// `CUstream` handle.
    pub stream: usize,
    /// Ends of the plan at the addresses that the lane's GPU uses, if these differ from the addresses of the execution.
    pub ends: Option<Arc<[Endpoints]>>,
    /// True if the plan has memory that the lane's GPU may not access.
    pub is_shut_out: bool,
    /// Stream of the execution.
    pub caller: Caller,
    pub state: &'a PlanState,
    /// Job of the copy threads and the words by which streams and threads notify each other, if threads make some of the copies.
    pub threads: Option<(&'a Job, &'a Divided)>,
    /// True once the stream has been made to wait for the events that precede the lane's first operation.
    pub begun: bool,
}
