//! Host functions in streams, and in graphs that are captured of them.
//!
//! The driver calls an enqueued function once, which frees it. A captured one is called at every launch of the graph, of whatever was instantiated or
//! cloned of it, so it belongs to the graph: as a user object, which the driver destroys with the last of them.

use super::Core;
use super::driver::{CUgraph, CUstream, call, call_optional};
use crate::backend::{BackendError, HostFunction};
use cudarc::driver::sys;
use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

impl Core {
    /// Enqueues a call of `work` in a stream whose context is current.
    pub fn launch_host(&self, raw: CUstream, work: HostFunction) -> Result<(), BackendError> {
        let driver = self.driver;
        if self.is_capturing(raw)? {
            let function = self.keep_in_graph(raw, work)?;
            // SAFETY: the graph keeps the function for as long as it can be launched.
            return unsafe { call!(driver, cuLaunchHostFunc(raw, call_function, function)) };
        }
        let function = Box::into_raw(Box::new(work)).cast();
        // SAFETY: the function takes what it is given, once.
        unsafe { call!(driver, cuLaunchHostFunc(raw, call_and_free, function)) }.inspect_err(|_| {
            // SAFETY: it was not enqueued, so it is still ours.
            unsafe { free(function) };
        })
    }

    /// Hands a function to the graph that a stream is being captured into.
    fn keep_in_graph(&self, raw: CUstream, work: HostFunction) -> Result<*mut c_void, BackendError> {
        let driver = self.driver;
        if driver.cuUserObjectCreate.is_none() || driver.cuUserObjectRelease.is_none() || driver.cuGraphRetainUserObject.is_none() {
            return Err(BackendError::NotSupported(format!(
                "the stream is being captured, and {}, or launch the host function outside of the capture",
                driver.lacks("cuUserObjectCreate to make a host function part of a graph")
            )));
        }
        let graph = self.captured_graph(raw)?;
        let function: *mut c_void = Box::into_raw(Box::new(work)).cast();
        let mut object: sys::CUuserObject = null_mut();
        let no_sync = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
        // SAFETY: the output is valid for the call; `free` takes the function, once.
        unsafe { call_optional!(driver, cuUserObjectCreate(&mut object, function, free, 1, no_sync)) }.inspect_err(|_| {
            // SAFETY: there is no object that would do it.
            unsafe { free(function) };
        })?;
        let moved = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;
        // SAFETY: a graph that is being captured, whose capture this thread is allowed to add to; our only reference to the object.
        unsafe { call_optional!(driver, cuGraphRetainUserObject(graph, object, 1, moved)) }.inspect_err(|_| {
            // SAFETY: still our only reference.
            drop(unsafe { call_optional!(driver, cuUserObjectRelease(object, 1)) });
        })?;
        Ok(function)
    }

    /// The graph that a stream is being captured into.
    fn captured_graph(&self, raw: CUstream) -> Result<CUgraph, BackendError> {
        let driver = self.driver;
        let (mut status, mut graph): (c_uint, CUgraph) = (0, null_mut());
        // SAFETY: the outputs are valid for the call; NULL for those that are not asked for.
        unsafe {
            if driver.cuStreamGetCaptureInfo_v3.is_some() {
                call_optional!(
                    driver,
                    cuStreamGetCaptureInfo_v3(raw, &mut status, null_mut(), &mut graph, null_mut(), null_mut(), null_mut())
                )
            } else {
                call_optional!(driver, cuStreamGetCaptureInfo_v2(raw, &mut status, null_mut(), &mut graph, null_mut(), null_mut()))
            }
        }?;
        if graph.is_null() {
            return Err(BackendError::NotSupported("the stream's capture has just ended; launch the host function again".into()));
        }
        Ok(graph)
    }
}

/// Calls a function that stays as it is.
unsafe extern "C" fn call_function(function: *mut c_void) {
    // SAFETY: made in `keep_in_graph`, and freed after the last launch of the graph.
    let function = unsafe { &*function.cast::<HostFunction>() };
    if catch_unwind(AssertUnwindSafe(function)).is_err() {
        log::error!("a host function panicked; the stream goes on");
    }
}

unsafe extern "C" fn call_and_free(function: *mut c_void) {
    // SAFETY: made in `launch_host`, and the driver calls this once.
    unsafe {
        call_function(function);
        free(function);
    }
}

/// Of a user object the destructor, which may run on any thread of the driver.
unsafe extern "C" fn free(function: *mut c_void) {
    // SAFETY: made above by `Box::into_raw`, and called no more.
    let function = unsafe { Box::from_raw(function.cast::<HostFunction>()) };
    if catch_unwind(AssertUnwindSafe(|| drop(function))).is_err() {
        log::error!("what a host function held panicked when it was dropped");
    }
}

#[cfg(test)]
mod tests {
    use super::super::CudaBackend;
    use super::super::double::{self, calls, node, without_of};
    use super::super::driver::{Driver, code};
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
        // SAFETY: functions of the double, with a graph and an exec of its own.
        unsafe {
            ok(instantiate(&mut exec, graph, 0));
            (0..3).for_each(|_| ok((driver.cuGraphLaunch)(exec, null_mut())));
            assert_eq!(runs.load(Ordering::Relaxed), 3);
            // The exec keeps it.
            ok((driver.cuGraphDestroy)(graph));
            ok((driver.cuGraphLaunch)(exec, null_mut()));
            assert_eq!((runs.load(Ordering::Relaxed), Arc::strong_count(&runs)), (4, 2));
            ok((driver.cuGraphExecDestroy)(exec));
        }
        assert_eq!((Arc::strong_count(&runs), node(|node| node.graphs.objects.len())), (1, 0));
        // One that is never launched.
        node(|node| node.capturing = true);
        backend.launch_host(stream, count(&runs)).expect("captured");
        // SAFETY: as above.
        ok(unsafe { (driver.cuGraphDestroy)(double::captured()) });
        assert_eq!((runs.load(Ordering::Relaxed), Arc::strong_count(&runs)), (4, 1));
        // Outside of a capture it runs once.
        backend.launch_host(stream, count(&runs)).expect("enqueued");
        assert_eq!((runs.load(Ordering::Relaxed), Arc::strong_count(&runs)), (5, 1));
    }

    #[test]
    fn a_driver_without_user_objects_captures_no_host_function_and_says_so() {
        for absent in ["cuUserObjectCreate", "cuUserObjectRelease", "cuGraphRetainUserObject", "cuStreamGetCaptureInfo_v2"] {
            let (backend, stream, runs) = started(without_of(double::whole(), absent));
            node(|node| node.capturing = true);
            let refused = backend.launch_host(stream, count(&runs));
            assert!(matches!(&refused, Err(BackendError::NotSupported(why)) if why.contains("install a newer one")), "{refused:?}");
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
                // SAFETY: a graph of the double's own.
                ok(unsafe { (double::whole().cuGraphDestroy)(graph) });
            }
            assert_eq!((Arc::strong_count(&runs), node(|node| node.graphs.objects.len())), (1, 0), "{function}");
        }
    }
}
