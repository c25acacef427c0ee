//! `execute_overhead`: the calling thread's time in `mp_execute`, through the C ABI as a program calls it, against the driver's calls
//! that move the same bytes in the same stream.
//!
//! What is looked for is some hundred nanoseconds beside a launch of 25 us. So all take turns in one stream, each as often behind each
//! other one, each graph is launched twice in a round, and times are compared within a round. The driver launches a graph of the same
//! nodes, on the same GPUs and in the same order, but not the very same exec. What that alone may make out is measured as well: a second
//! graph made like the first is held against it, as if it were the library. A result that is no larger than that shows nothing.

use super::Failure;
use super::cases::Case;
use super::contest::{Contestant, Samples, Spread, Times, samples};
use super::driver_graph::{Binding, DriverGraph, raw};
use super::measure::Bench;
use super::plain::{OnCuda, check};
use cudarc::driver::sys;
use mpgpu::backend::Endpoints;
use mpgpu::engine::Plan;
use mpgpu::ffi::*;
use mpgpu::topology::DeviceId;
use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut, with_exposed_provenance_mut};
use std::sync::Arc;

/// One plan.
pub struct Overhead {
    pub case: &'static Case,
    pub size: u64,
    /// What the driver was called for.
    pub launch: &'static str,
    /// Copies of the program.
    pub nodes: usize,
    pub rounds: usize,
    pub plan: Arc<Plan>,
    /// The bare call.
    pub driver: Times,
    /// The call and the event record that a completion needs.
    pub recorded: Times,
    /// `mp_execute` without a request, as in a time loop that only streams order.
    pub mpgpu: Times,
    /// `mp_execute` with a request, which the host waits for.
    pub requested: Times,
    /// Seconds of the calling thread in `mp_execute` beyond the driver's own call: the median over all rounds.
    pub beyond: f64,
    /// The same with a request, beyond the driver's call and an event record.
    pub requested_beyond: f64,
    /// The driver's call for a second graph made like the first, beyond that for the first: what differs when nothing does.
    pub control: f64,
    /// The same with the event record.
    pub requested_control: f64,
}

/// The median of how much longer issuing took, round by round.
fn longer(than: &Samples, one: &Samples) -> f64 {
    Spread::of(one.issue.iter().zip(&than.issue).map(|(one, than)| one - than).collect()).median
}

/// Two closures.
struct Calls<I, W>(I, W);

impl<I: FnMut() -> Result<(), Failure>, W: FnMut() -> Result<(), Failure>> Contestant for Calls<I, W> {
    fn issue(&mut self) -> Result<(), Failure> {
        (self.0)()
    }
    fn wait(&mut self) -> Result<(), Failure> {
        (self.1)()
    }
}

/// A context of the C ABI and a plan in it, given back when dropped.
struct Handles {
    context: mp_context_t,
    plan: mp_plan_t,
}

impl Drop for Handles {
    fn drop(&mut self) {
        // Errors of the copies were for whoever waited for them.
        if !self.plan.is_null() {
            mp_plan_destroy(self.plan);
        }
        mp_context_destroy(self.context);
    }
}

fn succeeded(status: mp_status_t) -> Result<(), Failure> {
    if status == mp_status_t::MP_SUCCESS {
        return Ok(());
    }
    // SAFETY: a text of the library for this thread, valid until its next call.
    Err(unsafe { CStr::from_ptr(mp_last_error()) }.to_string_lossy().into())
}

impl Bench<'_> {
    pub fn execute_overhead(&self, case: &'static Case, size: u64) -> Result<Overhead, Failure> {
        let buffers = self.buffers(self.context, &case.legs(2, size))?;
        let transfer = buffers.transfers[0];
        let plan = self.context.plan(&buffers.transfers, &Default::default())?;
        let program = &plan.planned().program;
        let nodes = program.ops.iter().map(|op| op.copies.len()).sum();

        let mut handles = Handles { context: null_mut(), plan: null_mut() };
        let topology = self.topology.as_deref().map(CString::new).transpose()?;
        let options = mp_context_options_t {
            size: size_of::<mp_context_options_t>(),
            backend: mp_backend_t::MP_BACKEND_CUDA as i32,
            topology: topology.as_ref().map_or(null(), |name| name.as_ptr()),
            staging_bytes: 0,
            cache_plans: 0,
        };
        // SAFETY: all pointers are valid for the call.
        succeeded(unsafe { mp_context_create_versioned(&options, MP_VERSION, &mut handles.context) })?;
        let pointer = |address: u64| with_exposed_provenance_mut(address as usize);
        let transfers = [mp_transfer_t {
            dst: pointer(transfer.dst),
            dst_device: transfer.dst_device.0,
            src: pointer(transfer.src),
            src_device: transfer.src_device.0,
            bytes: transfer.bytes,
        }];
        // SAFETY: as above.
        succeeded(unsafe { mp_plan(handles.context, transfers.as_ptr(), 1, null(), &mut handles.plan) })?;

        let stream = self.context.create_stream(DeviceId::gpu(0))?;
        let mut driver = OnCuda::default();
        // Lanes that the stream's GPU may work on are its own, as in the library's graph.
        let home = DeviceId::gpu(0);
        let contexts = program.lanes.iter().map(|lane| driver.context_of(lane.device_for(home))).collect::<Result<Vec<_>, _>>()?;
        let ends = [driver.context_of(transfer.dst_device)?, driver.context_of(transfer.src_device)?];
        driver.enable_access(transfer.src_device, transfer.dst_device)?;
        for a in &program.lanes {
            program.lanes.iter().try_for_each(|b| driver.enable_access(a.device, b.device))?;
        }
        let ring_bytes = |ring: &mpgpu::plan::Ring| self.context.allocate(ring.device, ring.bytes());
        let rings = program.rings.iter().map(ring_bytes).collect::<Result<Vec<_>, _>>()?;
        let endpoints = [Endpoints { dst: transfer.dst, src: transfer.src }];
        let build = || match nodes {
            1 => Ok::<_, Failure>(None),
            _ => Ok(Some(DriverGraph::build(&Binding { program, endpoints: &endpoints, rings: &rings, contexts: &contexts })?.0)),
        };
        let graphs = [build()?, build()?];
        let mut event = null_mut();
        driver.context_of(DeviceId::gpu(0))?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the output is valid for the call.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;

        let launch = |graph: &Option<DriverGraph>| match graph {
            Some(graph) => graph.launch(stream),
            None => {
                let mpgpu::engine::Transfer { dst, src, bytes, .. } = transfer;
                // SAFETY: both ranges lie in allocations of the bench, which live until the copy was waited for.
                check("cuMemcpyPeerAsync", unsafe { sys::cuMemcpyPeerAsync(dst, ends[0], src, ends[1], bytes as usize, raw(stream)) })
            }
        };
        // SAFETY: a stream of the bench.
        let synchronize = || check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(raw(stream)) });
        let launch_and_record = |graph: &Option<DriverGraph>| {
            launch(graph)?;
            // SAFETY: an event and a stream of GPU 0's context.
            check("cuEventRecord", unsafe { sys::cuEventRecord(event, raw(stream)) })
        };
        // SAFETY: an event of the bench.
        let wait_for_event = || check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event) });
        let [first, second] = &graphs;
        let (mut bare, mut other_bare) = (Calls(|| launch(first), synchronize), Calls(|| launch(second), synchronize));
        let mut recorded = Calls(|| launch_and_record(first), wait_for_event);
        let mut other_recorded = Calls(|| launch_and_record(second), wait_for_event);
        let request = std::cell::Cell::new(null_mut());
        let mut mpgpu = Calls(
            // SAFETY: no request is asked for; the memory lives until the stream was waited for.
            || succeeded(unsafe { mp_execute(handles.plan, raw(stream).cast(), null_mut()) }),
            synchronize,
        );
        let mut requested = Calls(
            || {
                let mut out = null_mut();
                // SAFETY: the output is valid for the call; the memory lives until the request was waited for.
                let status = unsafe { mp_execute(handles.plan, raw(stream).cast(), &mut out) };
                request.set(out);
                succeeded(status)
            },
            || {
                let mut out = request.get();
                // SAFETY: the request of the call before.
                succeeded(unsafe { mp_wait(&mut out) })
            },
        );
        self.verify("the driver", &mut bare, &[&buffers])?;
        self.verify("mp_execute", &mut mpgpu, &[&buffers])?;
        self.verify("mp_execute with a request", &mut requested, &[&buffers])?;
        driver.context_of(DeviceId::gpu(0))?;
        let contestants: &mut [&mut dyn Contestant] =
            &mut [&mut mpgpu, &mut bare, &mut requested, &mut recorded, &mut other_bare, &mut other_recorded];
        let samples = samples(contestants, self.repeat)?;
        self.verify("mp_execute", &mut mpgpu, &[&buffers])?;

        drop(graphs);
        // SAFETY: all its records were waited for.
        check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event) })?;
        rings.into_iter().try_for_each(|ring| self.context.free(ring))?;
        self.context.destroy_stream(stream)?;
        let [mpgpu, driver, requested, recorded, other_driver, other_recorded] = samples.as_slice() else {
            return Err("nothing was timed".into());
        };
        Ok(Overhead {
            case,
            size,
            launch: if nodes == 1 { "one copy" } else { "one graph" },
            nodes,
            rounds: mpgpu.issue.len(),
            plan: plan.clone(),
            driver: driver.times(),
            recorded: recorded.times(),
            mpgpu: mpgpu.times(),
            requested: requested.times(),
            beyond: longer(driver, mpgpu),
            requested_beyond: longer(recorded, requested),
            control: longer(driver, other_driver),
            requested_control: longer(recorded, other_recorded),
        })
    }
}
