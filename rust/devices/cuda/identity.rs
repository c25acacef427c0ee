//! Determines the identity of the visible GPUs and the driver. A file with measurements of the machine (probe file) is valid only for the
//! GPUs and the driver that it names.

use super::discover::uuid_text;
use super::driver::{CUdevice, Driver, call};
use super::gpus::device_count;
use super::nvml::nvml;
use crate::backend::{BackendError, Identity};
use crate::topology::Gpu;
use std::ffi::CStr;

/// Returns the names and UUIDs of the visible GPUs in the driver's order, and the driver's version. Creates no context.
pub fn identity() -> Result<Identity, BackendError> {
    let driver = Driver::get()?;
    let mut gpus = Vec::new();
    for index in 0..device_count()? {
        let mut device: CUdevice = 0;
        let mut uuid = [0_u8; 16];
        let mut name = [0; 256];
        // SAFETY: The driver writes to variables that outlive the calls. It writes at most the given number of bytes of the name, including
        // a NUL.
        unsafe {
            call!(driver, cuDeviceGet(&mut device, index as i32))?;
            call!(driver, cuDeviceGetUuid(&mut uuid, device))?;
            call!(driver, cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device))?;
        }
        // SAFETY: The driver was not given the last byte, so it is still NUL and ends the string.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        gpus.push(Gpu { uuid: uuid_text(&uuid), name });
    }
    // The kernel module and NVML report the release version, for example 580.95.05. The driver library reports only its CUDA version. NVML
    // is queried last, because loading it may take long.
    let cuda = format!("CUDA {}.{}", driver.version() / 1000, driver.version() % 1000 / 10);
    let loaded = std::fs::read_to_string("/sys/module/nvidia/version").ok().map(|text| text.trim().to_owned());
    let version = loaded.filter(|text| !text.is_empty()).or_else(|| nvml().and_then(|nvml| nvml.sys_driver_version()).ok());
    let driver = version.map_or(cuda.clone(), |version| format!("{version}, {cuda}"));
    Ok(Identity { driver, gpus })
}
