//! Tests that a captured host function exists as long as the graph. Uses the driver double (simulated CUDA driver).

use super::CudaBackend;
use super::double::{self, calls, node, without_of};
use super::driver::{Driver, code};
use crate::backend::{Backend, BackendError, StreamHandle};
use crate::topology::DeviceId;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

fn started(driver: &'static Driver) -> (CudaBackend, StreamHandle, Arc<AtomicU32>) {
    double::start(1, true);
    let backend = CudaBackend::on(driver, 1).expect("the double has GPUs");
    let stream = backend.create_stream(DeviceId::gpu(0)).expect("a stream");
    (backend, stream, Arc::default())
}

fn count(runs: &Arc<AtomicU32>) -> crate::backend::HostFunction {
    let runs = runs.clone();
    Box::new(move || _ = runs.fetch_add(1, Ordering::Relaxed))
}

fn ok(code: i32) {
    assert_eq!(code, 0);
}

#[test]
fn a_captured_host_function_runs_at_every_launch_and_goes_with_the_last_of_its_graph() {
    let driver = double::whole();
    let (backend, stream, runs) = started(driver);
    node(|node| node.capturing = true);
    backend.launch_host(stream, count(&runs)).expect("captured");
    let graph = double::captured();
    assert_eq!((runs.load(Ordering::Relaxed), Arc::strong_count(&runs)), (0, 2));
    let instantiate = driver.cuGraphInstantiateWithFlags.expect("it has graphs");
    let mut exec = null_mut();
    // SAFETY: functions of the double with its own graph and exec.
    unsafe {
        ok(instantiate(&mut exec, graph, 0));
        (0..3).for_each(|_| ok((driver.cuGraphLaunch)(exec, null_mut())));
        assert_eq!(runs.load(Ordering::Relaxed), 3);
        // The executable graph keeps the function alive.
        ok((driver.cuGraphDestroy)(graph));
        ok((driver.cuGraphLaunch)(exec, null_mut()));
        assert_eq!((runs.load(Ordering::Relaxed), Arc::strong_count(&runs)), (4, 2));
        ok((driver.cuGraphExecDestroy)(exec));
    }
    assert_eq!((Arc::strong_count(&runs), node(|node| node.graphs.objects.len())), (1, 0));
    // This graph is never launched.
    node(|node| node.capturing = true);
    backend.launch_host(stream, count(&runs)).expect("captured");
    // SAFETY: as above.
    ok(unsafe { (driver.cuGraphDestroy)(double::captured()) });
    assert_eq!((runs.load(Ordering::Relaxed), Arc::strong_count(&runs)), (4, 1));
    // Outside of a capture the function runs once.
    backend.launch_host(stream, count(&runs)).expect("enqueued");
    assert_eq!((runs.load(Ordering::Relaxed), Arc::strong_count(&runs)), (5, 1));
}

#[test]
fn a_driver_without_user_objects_captures_no_host_function_and_says_so() {
    for absent in ["cuUserObjectCreate", "cuUserObjectRelease", "cuGraphRetainUserObject", "cuStreamGetCaptureInfo_v2"] {
        let (backend, stream, runs) = started(without_of(double::whole(), absent));
        node(|node| node.capturing = true);
        let refused = backend.launch_host(stream, count(&runs));
        assert!(matches!(&refused, Err(BackendError::NotSupported(why)) if why.contains("install a newer driver")), "{refused:?}");
        assert_eq!((calls("cuLaunchHostFunc"), Arc::strong_count(&runs)), (0, 1));
    }
}

#[test]
fn a_capture_that_fails_half_way_leaves_nothing_behind() {
    let functions = ["cuStreamGetCaptureInfo", "cuUserObjectCreate", "cuGraphRetainUserObject", "cuLaunchHostFunc"];
    for function in functions {
        let (backend, stream, runs) = started(double::whole());
        node(|node| {
            node.capturing = true;
            node.refusals.insert(function, code::OUT_OF_MEMORY);
        });
        backend.launch_host(stream, count(&runs)).expect_err(function);
        let graph = double::captured();
        if !graph.is_null() {
            // SAFETY: a graph of the double.
            ok(unsafe { (double::whole().cuGraphDestroy)(graph) });
        }
        assert_eq!((Arc::strong_count(&runs), node(|node| node.graphs.objects.len())), (1, 0), "{function}");
    }
}
