//! Computes the memory addresses of the copies of an execution.

use crate::backend::Execution;
use crate::bridge::Segment;
use crate::plan::{Copy, Place};

/// Converts a copy of a program to a segment, which contains the addresses of the execution's source and destination.
pub(super) fn segment(execution: &Execution<'_>, copy: &Copy) -> Segment {
    Segment { dst: address(execution, copy.to), src: address(execution, copy.from), bytes: copy.bytes }
}

pub(super) fn address(execution: &Execution<'_>, place: Place) -> u64 {
    crate::backend::address(execution.program, execution.endpoints, execution.rings, place)
}
