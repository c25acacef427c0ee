//! Loads NVML on first use. Like the driver library, it stays loaded for the rest of the process.
//!
//! Unloading a library while other threads run risks a crash, for two reasons. The driver library of the process calls back into NVML
//! (NVIDIA/cuda-checkpoint, issue 58). A library's thread-local objects are destroyed when their thread ends, at an unknown time. Without
//! this module, every context would load and unload NVML.

use super::driver::lock;
use crate::backend::static_program::check_can_load;
use crate::took::took;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use std::sync::{Mutex, OnceLock};

/// Returns NVML, and loads it if necessary. After a failure, the next call tries again.
pub(super) fn nvml() -> Result<&'static Nvml, NvmlError> {
    static NVML: OnceLock<Nvml> = OnceLock::new();
    static LOADING: Mutex<()> = Mutex::new(());
    if check_can_load().is_err() {
        return Err(NvmlError::LibraryNotFound);
    }
    // The lock is held during loading, so that NVML is not loaded twice. Otherwise, the second instance would be dropped and thereby
    // unloaded.
    let _once = lock(&LOADING);
    match NVML.get() {
        Some(nvml) => Ok(nvml),
        None => took("NVML loaded", Nvml::init).map(|nvml| NVML.get_or_init(|| nvml)),
    }
}
