//! Tests timestamps in streams. Uses the driver double (simulated CUDA driver).

use super::double::{self, held};
use super::driver::{CUevent, Code, Driver, code};
use super::{Backend, CudaBackend};
use crate::backend::{BackendError, Moment};
use crate::topology::DeviceId;
use std::sync::LazyLock;

/// Creates a backend and records two successive timestamps in a stream.
fn two(driver: &'static Driver) -> (CudaBackend, [Moment; 2]) {
    double::start(2, true);
    let backend = CudaBackend::on(driver, 1).expect("the double has GPUs");
    let stream = backend.create_stream(DeviceId::gpu(1)).expect("a stream");
    let moments = [(); 2].map(|()| backend.mark_moment(stream).expect("marked"));
    (backend, moments)
}

#[test]
fn the_time_is_taken_by_events_that_are_used_again_and_go_with_the_backend() {
    let (backend, [begin, end]) = two(double::driver());
    assert_eq!(end.nanoseconds_since(&*begin).expect("a time"), Some(1000), "as the double's clock has it");
    assert_eq!(held().events, 2);
    drop((begin, end));
    let stream = backend.create_stream(DeviceId::gpu(1)).expect("a stream");
    let again = [(); 2].map(|()| backend.mark_moment(stream).expect("marked"));
    assert_eq!(held().events, 2);
    drop(again);
    drop(backend);
    assert_eq!(held().events, 0);
}

#[test]
fn a_moment_that_has_not_come_has_no_time_yet() {
    unsafe extern "C" fn not_yet(_: *mut f32, _: CUevent, _: CUevent) -> Code {
        code::NOT_READY
    }
    static DRIVER: LazyLock<Driver> = LazyLock::new(|| Driver { cuEventElapsedTime: Some(not_yet), ..double::driver().clone() });
    let (_backend, [begin, end]) = two(&DRIVER);
    assert_eq!(end.nanoseconds_since(&*begin).expect("no failure"), None);
}

#[test]
fn a_driver_without_times_says_so() {
    let (_backend, [begin, end]) = two(double::without("cuEventElapsedTime"));
    let refused = end.nanoseconds_since(&*begin);
    assert!(matches!(&refused, Err(BackendError::NotSupported(why)) if why.contains("cuEventElapsedTime")), "{refused:?}");
}
