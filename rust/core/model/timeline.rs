//! Timelines: the common form in which simulated runs and measured device timestamps are drawn and exported.

use crate::topology::DeviceId;

/// Record of the start and end of each operation of a run, either simulated or from device timestamps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Name of the run, which is the title of the drawing.
    pub name: String,
    /// True if the times are modelled; false if they were measured.
    pub modelled: bool,
    /// Rows of the drawing, each for an internal stream or a host thread.
    pub lanes: Vec<TimelineLane>,
    /// Bars of the drawing, each on one row.
    pub spans: Vec<Span>,
    /// Arrows of the drawing: dependencies between bars of different rows.
    pub arrows: Vec<Arrow>,
}

/// Row of a timeline: an internal stream of an execution, or a host thread.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineLane {
    /// Name of the row, for example `gpu0 lane 0: gpu0>gpu1`.
    pub name: String,
    /// Device that issues the operations of the row; host memory for a host thread.
    pub device: DeviceId,
}

/// Bar of a timeline: one operation, or other work such as issuing.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Row of the bar, as an index into [`Timeline::lanes`].
    pub lane: usize,
    /// Index of the operation in its program; `None` for other work, such as issuing.
    pub op: Option<u32>,
    /// Label of the bar, for example `gpu0>gpu2 1.0 MiB`.
    pub name: String,
    /// Start of the bar, seconds from the start of the run.
    pub begin: f64,
    /// End of the bar, seconds from the start of the run.
    pub end: f64,
    /// Number of bytes that the operation moves.
    pub bytes: u64,
}

/// Arrow of a timeline: a dependency between bars of different rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrow {
    /// Bar that must end first, as an index into [`Timeline::spans`].
    pub from: usize,
    /// Bar that waits for `from`, as an index into [`Timeline::spans`].
    pub to: usize,
}
