//! Measures the start and end times of the operations of one execution by events with timestamps.
//!
//! The driver can compare only events of the same GPU (`cuEventElapsedTime`). The clock of every other GPU is therefore aligned with the
//! clock of the caller's GPU by an exchange of three timestamps. The caller's stream records the first timestamp. A stream of the other GPU
//! waits for the first timestamp and records the second one. The caller's stream waits for the second timestamp and records the third one.
//! The second timestamp is assumed to lie half way between the first and the third, so the error is at most half of their distance. The
//! exchange takes place after the last operation was enqueued, when the copies are running or finished. On a busy GPU, the exchange takes
//! the 4.5 us of the events themselves (H200, hardware readings), which bounds the error to 2.3 us. The drift between the clocks of GPUs,
//! parts per million, is negligible here. A timestamp itself is accurate to half a microsecond (the driver's manual, `cuEventElapsedTime`).

use super::driver::{CUevent, OutsideCapture, call, handle};
use super::owner::Owner;
use crate::backend::{BackendError, OpTimes};
use cudarc::driver::sys;
use std::ffi::c_uint;
use std::sync::Arc;

/// Accuracy of the driver's timestamps in seconds.
const RESOLUTION: f64 = 0.5e-6;

/// Timestamps of the operations of one execution. Dropping this value destroys their events.
#[derive(Debug)]
pub(super) struct Timing {
    owner: Arc<dyn Owner>,
    /// GPU of the caller's stream. The clocks of other GPUs are aligned with the clock of this GPU.
    callers_gpu: usize,
    /// Timestamp of the time at which the execution could begin. `None` if nothing was enqueued.
    start: Option<Stamp>,
    /// Index of each operation, with the timestamps before and after the operation, in the order of enqueueing.
    ops: Vec<(usize, Stamp, Stamp)>,
    clocks: Vec<Clock>,
    /// All events that were created for the timestamps of this execution.
    made: Vec<Stamp>,
}

/// Event with a timestamp, with the GPU in whose stream it was recorded.
#[derive(Copy, Clone, Debug)]
struct Stamp {
    gpu: usize,
    event: usize,
}

/// Three timestamps that align the clock of another GPU with the clock of the caller's GPU.
#[derive(Copy, Clone, Debug)]
struct Clock {
    sent: Stamp,
    mirrored: Stamp,
    received: Stamp,
}

impl Timing {
    pub fn new(owner: Arc<dyn Owner>, callers_gpu: usize) -> Timing {
        Timing { owner, callers_gpu, start: None, ops: Vec::new(), clocks: Vec::new(), made: Vec::new() }
    }

    /// Records a timestamp in the caller's stream after all earlier work of the stream. This is the time at which the execution can begin.
    pub fn start(&mut self, stream: usize) -> Result<(), BackendError> {
        self.start = Some(self.record(self.callers_gpu, stream)?);
        Ok(())
    }

    /// Enqueues operation `op`, and records timestamps before and after the operation in the operation's stream. Must be called once for
    /// each operation.
    pub fn around(
        &mut self,
        op: usize,
        gpu: usize,
        stream: usize,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let before = self.record(gpu, stream)?;
        enqueue()?;
        let after = self.record(gpu, stream)?;
        self.ops.push((op, before, after));
        Ok(())
    }

    /// Aligns the clock of a GPU with the clock of the caller's GPU, unless this was done before. The pair contains the GPU and a stream of
    /// this GPU, and `caller` is the caller's stream.
    pub fn join_clock(&mut self, (gpu, stream): (usize, usize), caller: usize) -> Result<(), BackendError> {
        if self.clocks.iter().any(|clock| clock.mirrored.gpu == gpu) {
            return Ok(());
        }
        let sent = self.record(self.callers_gpu, caller)?;
        self.make_wait(gpu, stream, sent)?;
        let mirrored = self.record(gpu, stream)?;
        self.make_wait(self.callers_gpu, caller, mirrored)?;
        let received = self.record(self.callers_gpu, caller)?;
        self.clocks.push(Clock { sent, mirrored, received });
        Ok(())
    }

    fn record(&mut self, gpu: usize, stream: usize) -> Result<Stamp, BackendError> {
        let driver = self.owner.gpus().driver;
        let _outside = OutsideCapture::enter(driver);
        let _current = self.owner.gpus().primary(gpu)?.enter()?;
        let mut event: CUevent = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as c_uint;
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(driver, cuEventCreate(&mut event, flags)) }?;
        let stamp = Stamp { gpu, event: event.expose_provenance() };
        self.made.push(stamp);
        // SAFETY: The event and the stream belong to the same context. That context is current, as default streams require.
        unsafe { call!(driver, cuEventRecord(event, handle(stream))) }?;
        Ok(stamp)
    }

    fn make_wait(&self, gpu: usize, stream: usize, stamp: Stamp) -> Result<(), BackendError> {
        let _current = self.owner.gpus().primary(gpu)?.enter()?;
        // SAFETY: The event belongs to this value, and the stream belongs to the GPU whose context is current.
        unsafe { call!(self.owner.gpus().driver, cuStreamWaitEvent(handle(stream), handle(stamp.event), 0)) }
    }

    /// Returns the time in seconds between two timestamps of the same GPU. The GPU must have reached both.
    fn elapsed(&self, from: Stamp, to: Stamp) -> Result<f64, BackendError> {
        let driver = self.owner.gpus().driver;
        let Some(elapsed) = driver.cuEventElapsedTime else {
            return Err(BackendError::NotSupported("the driver has no cuEventElapsedTime, so executions cannot be timed".into()));
        };
        let _outside = OutsideCapture::enter(driver);
        let _current = self.owner.gpus().primary(to.gpu)?.enter()?;
        let mut milliseconds = 0.0;
        // SAFETY: The driver writes to a variable that outlives the call. Both events belong to this value and to one context.
        driver.check("cuEventElapsedTime", unsafe { elapsed(&mut milliseconds, handle(from.event), handle(to.event)) })?;
        Ok(f64::from(milliseconds) * 1e-3)
    }

    /// Returns the start and end times of all operations. The execution must have finished.
    pub fn read(&self) -> Result<OpTimes, BackendError> {
        // An execution without a start timestamp has enqueued nothing.
        let Some(start) = self.start else { return Ok(OpTimes::default()) };
        let mut precision = RESOLUTION;
        let mut mirrors = Vec::with_capacity(self.clocks.len());
        for clock in &self.clocks {
            let (middle, error) = middle(self.elapsed(start, clock.sent)?, self.elapsed(start, clock.received)?);
            precision = precision.max(error + RESOLUTION);
            mirrors.push((clock.mirrored, middle));
        }
        let on_common_clock = |stamp: Stamp| match mirrors.iter().find(|(mirrored, _)| mirrored.gpu == stamp.gpu) {
            Some(&(mirrored, at)) if stamp.gpu != self.callers_gpu => Ok(at - self.elapsed(stamp, mirrored)?),
            _ => self.elapsed(start, stamp),
        };
        let mut stamps = self.ops.clone();
        stamps.sort_unstable_by_key(|stamp| stamp.0);
        let ops = stamps.into_iter().map(|(_, before, after)| Ok((on_common_clock(before)?, on_common_clock(after)?)));
        Ok(OpTimes { ops: ops.collect::<Result<_, BackendError>>()?, precision })
    }
}

/// Returns the estimated time of an event that happened between two timestamps of the caller's GPU, and the maximum error of the estimate.
fn middle(sent: f64, received: f64) -> (f64, f64) {
    ((sent + received) / 2.0, (received - sent).abs() / 2.0)
}

impl Drop for Timing {
    fn drop(&mut self) {
        for stamp in &self.made {
            if self.owner.gpus().primary(stamp.gpu).is_ok_and(|primary| primary.is_lost()) {
                continue;
            }
            // SAFETY: `record` created the event, and it is destroyed only here, which any current context allows. The driver frees the
            // event when enqueued work has passed it.
            unsafe { (self.owner.gpus().driver.cuEventDestroy)(handle(stamp.event)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::CudaBackend;
    use crate::cuda::tests::double;
    use crate::topology::{self, DeviceId, Machine};
    use mpgpu_contexts::{Config, Context, PlanOptions, Transfer};
    use std::sync::Arc;

    /// The substitute for the driver completes all work immediately, and each record of an event takes a microsecond. Operations therefore
    /// follow one another in the order in which they are issued. The clocks of the simulated GPUs differ by half a millisecond.
    #[test]
    fn clocks_that_differ_show_one_order_of_operations_and_no_event_is_left() {
        double::start(4, true);
        let machine = Machine::new(topology::preset("beluga").expect("a preset")).expect("well formed");
        let backend = CudaBackend::on(double::driver(), 1).expect("the double has GPUs");
        let config = Config { staging_bytes: 4 << 20, ..Config::default() };
        let context = Context::with_backend(Arc::new(machine), Arc::new(backend), config).expect("a context");
        let bytes = 12 << 20;
        let [dst, src] = [1, 0].map(|gpu| context.allocate(DeviceId::gpu(gpu), bytes).expect("memory"));
        let transfer = Transfer { dst, dst_device: DeviceId::gpu(1), src, src_device: DeviceId::gpu(0), bytes };
        let plan = context.plan(&[transfer], &PlanOptions::default()).expect("a plan");
        let devices: std::collections::HashSet<_> = plan.planned().program.lanes.iter().map(|lane| lane.device).collect();
        assert!(devices.len() > 2, "several GPUs issue: {}", plan.describe());
        for gpu in 0..4 {
            let stream = context.create_stream(DeviceId::gpu(gpu)).expect("a stream");
            let trace = plan.trace(stream).expect("it runs");
            let left = double::node(|node| node.events.values().filter(|event| event.timed).count());
            assert_eq!(left, 0, "events with timestamps that are left");
            // The expected precision is 1.5 us: two event records between the first and the last timestamp of the exchange make 1 us, plus
            // half a microsecond.
            assert!((trace.precision - 1.5e-6).abs() < 1e-8, "{}", trace.precision);
            let spans = &trace.timeline.spans;
            let mut in_time: Vec<_> = spans.iter().collect();
            in_time.sort_by(|a, b| a.begin.total_cmp(&b.begin));
            let mut now = 0.0;
            for span in in_time {
                assert!(span.begin > now && span.end > span.begin && span.end < 1e-3, "{span:?} after {now} s");
                now = span.end;
            }
            // The trace contains one span for each operation. Each span follows the spans of the operation's predecessors.
            let ops = &plan.planned().program.ops;
            assert_eq!(spans.len(), ops.len());
            let mut last = std::collections::HashMap::new();
            for (index, op) in ops.iter().enumerate() {
                let in_lane = last.insert(op.lane, index);
                for earlier in op.after.iter().map(|op| op.0 as usize).chain(in_lane) {
                    assert!(spans[earlier].end < spans[index].begin, "{:?} before {:?}", spans[index], spans[earlier]);
                }
            }
        }
    }

    #[test]
    fn a_moment_between_two_others_is_half_way_and_off_by_no_more_than_half_their_distance() {
        let (at, error) = super::middle(2e-6, 6e-6);
        assert!((at - 4e-6).abs() < 1e-12 && (error - 2e-6).abs() < 1e-12);
        for hidden in [2e-6, 3e-6, 5.9e-6, 6e-6] {
            assert!((hidden - at).abs() <= error + 1e-12);
        }
    }
}
