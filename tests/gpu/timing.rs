//! Tests the timestamps that GPUs record while they execute plans.

use super::*;

/// Traces a copy that is relayed over every GPU and the host, in a stream of each GPU. The common clock must not show an effect before its
/// cause.
#[test]
fn a_trace_shows_no_operation_before_what_it_waits_for() {
    let Some(turn) = gpus(2) else { return };
    set_device(0);
    let context = context(forced(), |config| config.host_path = Some(true));
    let bytes = 32 << 20;
    let (a, b) = (context.allocate(GPU0, bytes).expect("memory"), context.allocate(GPU1, bytes).expect("memory"));
    let transfer = Transfer { dst: b, dst_device: GPU1, src: a, src_device: GPU0, bytes };
    let options = PlanOptions { chunk_bytes: Some(1 << 20), ..PlanOptions::default() };
    let plan = context.plan(&[transfer], &options).expect("a plan");
    let content = Random(3).bytes(bytes as usize);
    for gpu in 0..turn.count.min(4) {
        let stream = context.create_stream(DeviceId::gpu(gpu)).expect("a stream");
        // The first execution is a warm-up, because the first copies of a process and of a pair of GPUs are slow.
        plan.execute(stream).expect("enqueued").wait().expect("it runs");
        write(a, &content);
        write(b, &vec![0x55; bytes as usize]);
        let trace = plan.trace(stream).expect("it runs");
        assert_bytes(&read(b, bytes as usize), &content, "traced");
        let (timeline, off) = (&trace.timeline, 2.0 * trace.precision);
        assert!(!timeline.modelled && trace.precision > 0.0 && trace.precision < 1e-3, "{} s", trace.precision);
        assert_eq!(timeline.spans.len(), plan.planned().program.ops.len());
        let mut ends = vec![0.0; timeline.lanes.len()];
        for span in &timeline.spans {
            assert!(span.begin >= ends[span.lane] - off && span.end >= span.begin, "{span:?} after {}", ends[span.lane]);
            ends[span.lane] = span.end;
        }
        for arrow in &timeline.arrows {
            let (from, to) = (&timeline.spans[arrow.from], &timeline.spans[arrow.to]);
            assert!(from.end <= to.begin + off, "{from:?} before {to:?}, precision {}", trace.precision);
        }
        // Prints the precision of the common clock on this machine, for information.
        println!("stream of gpu{gpu}: {} operations, clocks joined to {:.2} us", timeline.spans.len(), trace.precision * 1e6);
        context.destroy_stream(stream).expect("destroyed");
    }
    for address in [a, b] {
        context.free(address).expect("freed");
    }
}

#[test]
fn timestamps_inside_a_capture_are_refused() {
    let Some(_turn) = gpus(1) else { return };
    set_device(0);
    let backend = backend();
    let bytes = 4096;
    let (src, dst) = (backend.allocate(GPU0, bytes).expect("memory"), backend.allocate(GPU0, bytes).expect("memory"));
    let stream = backend.create_stream(GPU0).expect("a stream");
    let (program, endpoints, rings) = (direct(bytes, GPU0), Arc::from([Endpoints { dst, src }]), Arc::from([]));
    let execution = Execution { report: Report::Times, ..Execution::new(&program, &endpoints, &rings, stream) };
    let mut graph = std::ptr::null_mut();
    // SAFETY: a stream of the backend, and an output that is valid for the call.
    let error = unsafe {
        ok(sys::cuStreamBeginCapture_v2(raw(stream), sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED));
        let error = backend.submit(&execution).expect_err("refused");
        ok(sys::cuStreamEndCapture(raw(stream), &mut graph));
        ok(sys::cuGraphDestroy(graph));
        error
    };
    assert!(matches!(&error, BackendError::NotSupported(text) if text.contains("outside of a capture")), "{error}");
    let end = backend.submit(&execution).expect("enqueued").expect("a completion");
    end.times().expect("the backend is as usable as before");
    for address in [src, dst] {
        backend.free(address).expect("freed");
    }
}
