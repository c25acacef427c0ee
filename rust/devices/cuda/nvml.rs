//! Loads NVML on first use, and keeps it loaded for the rest of the process, like the driver library.
//!
//! Unloading a library while other threads run risks a crash. NVML cooperates with the driver library in the process, which calls back into
//! NVML (NVIDIA/cuda-checkpoint, issue 58), and a library's thread-local objects end with their thread at an unknown time. Without caching,
//! every context would load and unload NVML.

use super::driver::lock;
use crate::backend::static_program::check_can_load;
use crate::took::took;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use std::sync::{Mutex, OnceLock};

/// Returns NVML. After a failure, loading is tried again at the next call.
pub(super) fn nvml() -> Result<&'static Nvml, NvmlError> {
    static NVML: OnceLock<Nvml> = OnceLock::new();
    static LOADING: Mutex<()> = Mutex::new(());
    if check_can_load().is_err() {
        return Err(NvmlError::LibraryNotFound);
    }
    // The lock is held during loading, so that NVML is not loaded twice: the second instance would be dropped.
    let _once = lock(&LOADING);
    match NVML.get() {
        Some(nvml) => Ok(nvml),
        None => took("NVML loaded", Nvml::init).map(|nvml| NVML.get_or_init(|| nvml)),
    }
}
