//! Writes a timeline in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open. Each device is shown as a
//! process, each internal stream as a thread, each operation as a slice, and each dependency as a flow arrow.

use mpgpu_core::model::timeline::Timeline;
use mpgpu_core::topology::DeviceId;
use serde_json::{Value, json};

/// Converts seconds to microseconds, the unit of the trace format. Rounds to whole nanoseconds.
fn microseconds(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}

/// Returns the process ID that represents a device in the trace. GPUs have IDs from 1, and host domains from 10,001, so that viewers list
/// host domains after the GPUs.
fn process(device: DeviceId) -> i64 {
    if device.is_host() { 10_000 - i64::from(device.0) } else { i64::from(device.0) + 1 }
}

/// Returns the trace of a timeline as JSON. `path` returns the name of the path to which an operation belongs, which becomes a category by
/// which the viewer can filter.
pub fn perfetto(timeline: &Timeline, path: impl Fn(&mpgpu_core::model::timeline::Span) -> Option<String>) -> Value {
    let mut events: Vec<Value> = Vec::new();
    let mut named: Vec<DeviceId> = Vec::new();
    for (thread, lane) in timeline.lanes.iter().enumerate() {
        let pid = process(lane.device);
        if !named.contains(&lane.device) {
            named.push(lane.device);
            events.push(json!({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": lane.device.to_string()}}));
            events.push(json!({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}));
        }
        events.push(json!({"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": lane.name}}));
        events.push(json!({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": thread, "args": {"sort_index": thread}}));
    }
    let row = |span: usize| (process(timeline.lanes[timeline.spans[span].lane].device), timeline.spans[span].lane);
    for (index, span) in timeline.spans.iter().enumerate() {
        let (pid, tid) = row(index);
        let (begin, end) = (microseconds(span.begin), microseconds(span.end));
        let seconds = span.end - span.begin;
        let rate = (span.bytes > 0 && seconds > 0.0).then(|| span.bytes as f64 / seconds / 1e9);
        events.push(json!({
            "ph": "X", "name": span.name, "cat": path(span).unwrap_or_else(|| "other".into()), "pid": pid, "tid": tid,
            "ts": begin, "dur": microseconds(end * 1e-6 - begin * 1e-6),
            "args": {"operation": span.op, "bytes": span.bytes, "GB/s": rate},
        }));
    }
    for (id, arrow) in timeline.arrows.iter().enumerate() {
        let ((from_pid, from_tid), (to_pid, to_tid)) = (row(arrow.from), row(arrow.to));
        let (from, to) = (&timeline.spans[arrow.from], &timeline.spans[arrow.to]);
        // A flow arrow belongs to the slice that contains its start time. A slice does not contain its own end, so the arrow starts one
        // nanosecond earlier.
        let leaves = (microseconds(from.end) - 0.001).max(microseconds(from.begin));
        events.push(json!({"ph": "s", "id": id, "name": "waits", "cat": "dependency", "pid": from_pid, "tid": from_tid, "ts": leaves}));
        events.push(json!({
            "ph": "f", "bp": "e", "id": id, "name": "waits", "cat": "dependency", "pid": to_pid, "tid": to_tid,
            "ts": microseconds(to.begin),
        }));
    }
    json!({
        "displayTimeUnit": "ns",
        "otherData": {"name": timeline.name, "modelled": timeline.modelled, "program": concat!("mpgpu ", env!("CARGO_PKG_VERSION"))},
        "traceEvents": events,
    })
}
