//! Computes the addresses of an execution's copies.

use crate::backend::Execution;
use crate::bridge::Segment;
use crate::plan::{Copy, Place};

/// Returns a copy of a program as a segment, with the addresses of the execution.
pub(super) fn segment(execution: &Execution<'_>, copy: &Copy) -> Segment {
    Segment { dst: address(execution, copy.to), src: address(execution, copy.from), bytes: copy.bytes }
}

pub(super) fn address(execution: &Execution<'_>, place: Place) -> u64 {
    crate::backend::address(execution.program, execution.endpoints, execution.rings, place)
}
