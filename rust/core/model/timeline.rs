//! Timelines: the common form in which simulated runs and device timestamps are drawn and exported.

use crate::topology::DeviceId;

/// Record of when each operation ran, in a simulated run or by device timestamps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Title.
    pub name: String,
    /// True if the times are modelled, false if they were measured.
    pub modelled: bool,
    /// Rows of the drawing.
    pub lanes: Vec<TimelineLane>,
    /// Bars, each on one row.
    pub spans: Vec<Span>,
    /// Dependencies between rows.
    pub arrows: Vec<Arrow>,
}

/// Row of a timeline: a lane of an execution, or a host thread.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineLane {
    /// Name of the row, for example `gpu0 lane 0: gpu0>gpu1`.
    pub name: String,
    /// Device that issues the operations; host memory for a host thread.
    pub device: DeviceId,
}

/// Bar of a timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Index into [`Timeline::lanes`].
    pub lane: usize,
    /// Number of the operation in its program; `None` for other work, such as issuing.
    pub op: Option<u32>,
    /// Label, for example `gpu0>gpu2 1.0 MiB`.
    pub name: String,
    /// Start, seconds.
    pub begin: f64,
    /// End, seconds.
    pub end: f64,
    /// Bytes moved.
    pub bytes: u64,
}

/// Dependency between bars of different rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrow {
    /// Bar that must end first, as an index into [`Timeline::spans`].
    pub from: usize,
    /// Bar that waits for `from`, as an index into [`Timeline::spans`].
    pub to: usize,
}
