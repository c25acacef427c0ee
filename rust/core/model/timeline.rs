//! What happened when: the one form in which simulated runs and device timestamps are drawn and exported.

use crate::topology::DeviceId;

/// What happened when: of a simulated run, or of device timestamps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// What ran, for a title.
    pub name: String,
    /// Whether the times are a model's and not a clock's.
    pub modelled: bool,
    /// Rows.
    pub lanes: Vec<TimelineLane>,
    /// Bars, each on one lane.
    pub spans: Vec<Span>,
    /// Dependencies across lanes.
    pub arrows: Vec<Arrow>,
}

/// A row of a timeline: a lane of an execution, or a host thread.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelineLane {
    /// `gpu0 lane 0: gpu0>gpu1`.
    pub name: String,
    /// The device that issues its operations; host memory for a host thread.
    pub device: DeviceId,
}

/// A bar of a timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Index into [`Timeline::lanes`].
    pub lane: usize,
    /// Which operation of its program; `None` for what is none, such as issuing.
    pub op: Option<u32>,
    /// `gpu0>gpu2 1.0 MiB`.
    pub name: String,
    /// Seconds.
    pub begin: f64,
    /// Seconds.
    pub end: f64,
    /// Bytes moved.
    pub bytes: u64,
}

/// A dependency across lanes.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrow {
    /// Index into [`Timeline::spans`]: what had to end.
    pub from: usize,
    /// Index into [`Timeline::spans`]: what waited for it.
    pub to: usize,
}
