//! Discovers the visible GPUs by the driver, and their links by NVML if NVML is installed. `topology::discover` converts the result to a
//! topology.
//!
//! The two lists of devices are matched by UUID, because their orders differ. NVML lists all GPUs of the node in its own order. The driver
//! lists only the GPUs in `CUDA_VISIBLE_DEVICES`, in the order of that variable. No context is created.

use super::driver::{CUdevice, Driver, call};
use super::gpus::count_devices;
use super::identity::identity;
use super::nvml::nvml;
use crate::backend::{BackendError, Identity};
use crate::topology::discover::{Nvlink, Pcie, Remote, Seen, SeenGpu, topology};
use crate::topology::{Gpu, Topology};
use cudarc::driver::sys::CUdevice_attribute;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use std::borrow::Borrow;
use std::ffi::CStr;

/// Number of NVLinks, numbered from 0, that are queried for each GPU. No GPU has more links.
pub(super) const MOST_NVLINKS: u32 = 36;

/// Returns the topology of the GPUs that are visible to this process.
pub fn discover() -> Result<Topology, BackendError> {
    Ok(topology(&look()?))
}

/// Returns the properties of the GPUs that are visible to this process, as reported by the driver and NVML.
pub fn look() -> Result<Seen, BackendError> {
    look_at(Driver::get()?, nvml)
}

/// Returns the properties of the visible GPUs that `driver` reports. `load` loads NVML. If it succeeds, the result also contains the
/// properties that NVML reports.
pub(super) fn look_at<N: Borrow<Nvml>>(driver: &Driver, load: impl FnOnce() -> Result<N, NvmlError>) -> Result<Seen, BackendError> {
    let count = count_devices(driver)?;
    let mut gpus = Vec::new();
    let mut uuids = Vec::new();
    let mut devices = Vec::new();
    for index in 0..count {
        let mut device: CUdevice = 0;
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(driver, cuDeviceGet(&mut device, index as i32)) }?;
        let mut name = [0; 256];
        // SAFETY: The driver writes at most the given number of bytes, including a NUL, and `name` is longer.
        unsafe { call!(driver, cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device)) }?;
        // SAFETY: The driver was not given the last byte, so it is still NUL and ends the string.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut uuid = [0_u8; 16];
        // SAFETY: The driver writes to a variable that outlives the call.
        unsafe { call!(driver, cuDeviceGetUuid(&mut uuid, device)) }?;
        let attribute = |attribute| driver.attribute(attribute, device).max(0) as u32;
        let capability = (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        );
        gpus.push(SeenGpu { name, capability, pcie: None, nvlinks: None });
        uuids.push(uuid_text(&uuid));
        devices.push(device);
    }
    let mut peers = Vec::new();
    for (a, &from) in (0..).zip(&devices) {
        for (b, &to) in (0..).zip(&devices) {
            let mut can = 0;
            if a != b {
                // SAFETY: The driver writes to a variable that outlives the call.
                unsafe { call!(driver, cuDeviceCanAccessPeer(&mut can, from, to)) }?;
            }
            if can != 0 {
                peers.push((a, b));
            }
        }
    }
    if let Err(error) = load().and_then(|nvml| ask_nvml(nvml.borrow(), &mut gpus, &uuids)) {
        log::info!("NVML does not report the links of the GPUs, so links are assumed: {error}");
    }
    Ok(Seen { gpus, peers })
}

/// Returns the properties of the GPUs with these UUIDs as reported by NVML. The GPUs need not be visible to this process. Peer access is
/// assumed for each pair, because the driver cannot be queried, and because processes of a node can access each other's memory only by peer
/// access. Returns `None` if NVML does not know all of the GPUs, for example in a container with only some of the node's GPUs.
pub(super) fn out_of_sight(uuids: &[[u8; 16]]) -> Result<Option<(Identity, Seen)>, BackendError> {
    let driver = identity()?.driver;
    let found = nvml().and_then(|nvml| {
        let texts: Vec<String> = uuids.iter().map(uuid_text).collect();
        let (mut seen, mut gpus) = (Vec::new(), Vec::new());
        for uuid in &texts {
            let device = nvml.device_by_uuid(uuid.as_str())?;
            let (name, capability) = (device.name()?, device.cuda_compute_capability()?);
            gpus.push(Gpu { uuid: uuid.clone(), name: name.clone() });
            let capability = (capability.major.max(0) as u32, capability.minor.max(0) as u32);
            seen.push(SeenGpu { name, capability, pcie: None, nvlinks: None });
        }
        ask_nvml(nvml, &mut seen, &texts)?;
        Ok((gpus, seen))
    });
    Ok(match found {
        Ok((gpus, seen)) => {
            let count = seen.len() as u32;
            let peers = (0..count).flat_map(|a| (0..count).filter(move |b| *b != a).map(move |b| (a, b))).collect();
            Some((Identity { driver, gpus }, Seen { gpus: seen, peers }))
        }
        Err(error) => {
            log::info!("NVML does not report the GPUs that are not visible to this process: {error}");
            None
        }
    })
}

/// Formats a UUID in the format that NVML uses.
pub(super) fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let parts = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]];
    format!("GPU-{}", parts.map(hex).join("-"))
}

/// Converts NVML's code for an NVLink version to the major version. NVML numbers the versions in the order in which they appeared: 1.0,
/// 2.0, 2.2, 3.0, 3.1, 4.0, 5.0 (`nvmlNvlinkVersion_t`).
fn nvlink_version(number: u32) -> Option<u32> {
    match number {
        0 => None,
        1 => Some(1),
        2 | 3 => Some(2),
        4 | 5 => Some(3),
        6 => Some(4),
        _ => Some(5),
    }
}

fn ask_nvml(nvml: &Nvml, gpus: &mut [SeenGpu], uuids: &[String]) -> Result<(), NvmlError> {
    let devices = uuids.iter().map(|uuid| nvml.device_by_uuid(uuid.as_str())).collect::<Result<Vec<_>, _>>()?;
    let places: Vec<Option<(u32, u32, u32)>> =
        devices.iter().map(|device| device.pci_info().ok().map(|pci| (pci.domain, pci.bus, pci.device))).collect();
    for (gpu, device) in gpus.iter_mut().zip(&devices) {
        // A virtual machine may report a link of width 0, which means that there is no link.
        let pcie = device.max_pcie_link_gen().ok().zip(device.max_pcie_link_width().ok());
        gpu.pcie = pcie.map(|(generation, width)| Pcie { generation, width }).filter(|link| link.generation > 0 && link.width > 0);
        let mut links = Vec::new();
        for number in 0..MOST_NVLINKS {
            let link = device.link_wrapper_for(number);
            match link.is_active() {
                Ok(true) => {}
                Ok(false) => continue,
                // The number is larger than that of the last link, or the GPU has no links.
                Err(_) => break,
            }
            let version = link.version().ok().and_then(nvlink_version).unwrap_or(match gpu.capability.0 {
                0..=6 => 1,
                7 => 2,
                8 => 3,
                9 => 4,
                _ => 5,
            });
            let remote = match link.remote_pci_info() {
                Ok(pci) => {
                    let there = (pci.domain, pci.bus, pci.device);
                    let peer = (0_u32..).zip(&places).find(|(_, place)| **place == Some(there));
                    // If a virtual machine hides a switch, all digits of the switch's address are 0 or F.
                    let hidden = pci.bus_id.trim_matches(['0', 'f', 'F', ':', '.']).is_empty();
                    peer.map_or(if hidden { Remote::Unknown } else { Remote::Other }, |(index, _)| Remote::Gpu(index))
                }
                Err(_) => Remote::Unknown,
            };
            links.push(Nvlink { version, remote });
        }
        gpu.nvlinks = Some(links);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn nvml_numbers_versions_of_nvlink_by_their_appearance() {
        // An H200 has NVLink 4, for which NVML reports 6.
        assert_eq!(
            [0, 1, 2, 3, 4, 5, 6, 7].map(super::nvlink_version),
            [None, Some(1), Some(2), Some(2), Some(3), Some(3), Some(4), Some(5)]
        );
    }

    #[test]
    fn a_uuid_is_written_as_nvml_writes_it() {
        let uuid = [0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(super::uuid_text(&uuid), "GPU-12345678-9abc-def0-0102-030405060708");
    }
}
