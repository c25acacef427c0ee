//! NVML, loaded when it is first needed and then for as long as the process lives, as the driver's other library is.
//!
//! Code that is unmapped while other threads run is a crash in waiting. NVML works together with the driver in the same process, which calls
//! back into it (NVIDIA/cuda-checkpoint, issue 58), and what a library has put into a thread ends with the thread, at a moment that nobody
//! here knows. Opening a context would load and unload it each time.

use super::driver::lock;
use crate::took::took;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use std::sync::{Mutex, OnceLock};

/// NVML; why there is none is asked anew each time.
pub(super) fn nvml() -> Result<&'static Nvml, NvmlError> {
    static NVML: OnceLock<Nvml> = OnceLock::new();
    static LOADING: Mutex<()> = Mutex::new(());
    // Held while it is loaded, so that no second one is, which would be dropped.
    let _once = lock(&LOADING);
    match NVML.get() {
        Some(nvml) => Ok(nvml),
        None => took("NVML loaded", Nvml::init).map(|nvml| NVML.get_or_init(|| nvml)),
    }
}
