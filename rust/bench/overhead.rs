//! Measures the case `execute_overhead`: the time that the calling thread spends in `mp_execute`, called through the C ABI. It is compared
//! with driver calls that copy the same data in the same stream.
//!
//! The expected difference is a few hundred nanoseconds of a launch that takes 25 us. So all methods are executed alternately in one
//! stream, each method follows each other method equally often, and times are compared within a round. The graph that is launched by driver
//! calls has the same nodes on the same GPUs in the same order as the library's, but it is another executable graph. The row `control`
//! shows how much two equal executable graphs differ: it compares this graph with a second graph that was built in the same way. A
//! difference is significant only if it is larger than that of the control.

use super::compare::{Calls, Comparison, Named};
use super::driver_graph::{Binding, DriverGraph, raw};
use super::plain::{OnCuda, check};
use super::{Bench, Case, Failure};
use cudarc::driver::sys;
use mpgpu::abi::*;
use mpgpu_backend::Endpoints;
use mpgpu_contexts::Transfer;
use mpgpu_core::topology::DeviceId;
use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut, with_exposed_provenance_mut};

/// Context and plan of the C API, which are destroyed when the value is dropped.
struct Handles {
    context: mp_context_t,
    plan: mp_plan_t,
}

impl Drop for Handles {
    fn drop(&mut self) {
        // Errors of the copies have already been reported to the callers that waited for them.
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
    pub fn execute_overhead(&self, case: &'static Case, size: u64) -> Result<Vec<Comparison>, Failure> {
        let buffers = self.buffers(self.context, &(case.legs)(2, size))?;
        let transfer = buffers.transfers[0];
        let plan = self.context.plan(&buffers.transfers, &Default::default())?;
        let program = &plan.planned().program;
        let nodes = program.ops.iter().map(|op| op.copies.len()).sum();

        let mut handles = Handles { context: null_mut(), plan: null_mut() };
        let topology = self.context.config().topology.as_deref().map(CString::new).transpose()?;
        let options = mp_context_options_t {
            size: size_of::<mp_context_options_t>(),
            backend: mp_backend_t::MP_BACKEND_CUDA as i32,
            topology: topology.as_ref().map_or(null(), |name| name.as_ptr()),
            staging_bytes: 0,
            cache_plans: 0,
            signal_wait: 0,
            host_threads: 0,
            cache_graphs: 0,
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
        // An internal stream that may run on the GPU of the caller's stream runs there, as in the library's graph.
        let home = DeviceId::gpu(0);
        let contexts = program.lanes.iter().map(|lane| driver.context_of(lane.device_for(home))).collect::<Result<Vec<_>, _>>()?;
        let ends = [driver.context_of(transfer.dst_device)?, driver.context_of(transfer.src_device)?];
        driver.enable_access(transfer.src_device, transfer.dst_device)?;
        for a in &program.lanes {
            program.lanes.iter().try_for_each(|b| driver.enable_access(a.device, b.device))?;
        }
        let ring_bytes = |ring: &mpgpu_core::plan::Ring| self.context.allocate(ring.device, ring.bytes());
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
                let Transfer { dst, src, bytes, .. } = transfer;
                // SAFETY: both ranges lie in allocations of the benchmark, which live until the copy was waited for.
                check("cuMemcpyPeerAsync", unsafe { sys::cuMemcpyPeerAsync(dst, ends[0], src, ends[1], bytes as usize, raw(stream)) })
            }
        };
        // SAFETY: a stream of the benchmark.
        let synchronize = || check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(raw(stream)) });
        let launch_and_record = |graph: &Option<DriverGraph>| {
            launch(graph)?;
            // SAFETY: an event and a stream of GPU 0's context.
            check("cuEventRecord", unsafe { sys::cuEventRecord(event, raw(stream)) })
        };
        // SAFETY: an event of the benchmark.
        let wait_for_event = || check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(event) });
        let [first, second] = &graphs;
        let (mut bare, mut other_bare) = (Calls(|| launch(first), synchronize), Calls(|| launch(second), synchronize));
        let mut recorded = Calls(|| launch_and_record(first), wait_for_event);
        let mut other_recorded = Calls(|| launch_and_record(second), wait_for_event);
        let request = std::cell::Cell::new(null_mut());
        let mut mpgpu = Calls(
            // SAFETY: no request is returned. The memory lives until the stream was waited for.
            || succeeded(unsafe { mp_execute(handles.plan, raw(stream).cast(), null_mut()) }),
            synchronize,
        );
        let mut requested = Calls(
            || {
                let mut out = null_mut();
                // SAFETY: the output is valid for the call. The memory lives until the request was waited for.
                let status = unsafe { mp_execute(handles.plan, raw(stream).cast(), &mut out) };
                request.set(out);
                succeeded(status)
            },
            || {
                let mut out = request.get();
                // SAFETY: the request of the preceding call.
                succeeded(unsafe { mp_wait(&mut out, null_mut()) })
            },
        );
        let what = if nodes == 1 { "copy" } else { "graph" };
        let names = [format!("driver's {what}"), format!("driver's {what} and event")];
        let contestants: &mut [Named<'_>] = &mut [
            ("mp_execute", &mut mpgpu),
            (&names[0], &mut bare),
            ("with request", &mut requested),
            (&names[1], &mut recorded),
            ("control", &mut other_bare),
            ("control", &mut other_recorded),
        ];
        let samples = self.compare(&[&buffers], contestants)?;

        drop(graphs);
        // SAFETY: all its records were waited for.
        check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event) })?;
        super::memory::free(self.context, rings.into_iter());
        self.context.destroy_stream(stream)?;
        let [mpgpu, bare, requested, recorded, other_bare, other_recorded] = &samples[..] else { return Err("nothing was timed".into()) };
        let pairs = [(mpgpu, bare), (requested, recorded), (other_bare, bare), (other_recorded, recorded)];
        let comparison = |(one, other)| Comparison::of(case, size, nodes, &plan, vec![Clone::clone(one), Clone::clone(other)]);
        Ok(pairs.map(comparison).into())
    }
}
