//! What a doctor asks of the driver, NVML and the GPUs: attributes, and trials of what attributes only claim. What it makes of them it says
//! itself.

use super::backend::CudaBackend;
use super::discover::uuid_text;
use super::driver::{CUdevice, Driver, call, handle};
use super::gpus::{Gpus, count_devices};
use super::nvml::nvml;
use super::peers::Tried;
use crate::backend::BackendError;
pub use crate::backend::host_memory::HostFacts;
use crate::backend::host_memory::HostPages;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use std::borrow::Borrow;
use std::ffi::CStr;

/// What was asked and tried.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuFacts {
    /// CUDA version of the driver, 13000 for 13.0.
    pub cuda: i32,
    /// The version that people name, 580.95.05, where NVML tells it.
    pub version: Option<String>,
    /// Functions that this driver lacks, of those that mpgpu calls where there are any.
    pub missing: Vec<&'static str>,
    /// Why NVML tells nothing, if it does not.
    pub no_nvml: Option<String>,
    /// GPUs that NVML counts on the node, whatever this process may see.
    pub on_node: Option<u32>,
    /// In the driver's order.
    pub gpus: Vec<Gpu>,
    /// Each two GPUs, the lower number first.
    pub pairs: Vec<Pair>,
    /// Whether host memory can be pinned, if that was tried.
    pub pinning: Option<Pinning>,
}

/// A GPU in sight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gpu {
    /// As its maker calls it.
    pub name: String,
    /// As NVML writes it.
    pub uuid: String,
    /// Who may use it.
    pub mode: Mode,
    /// Whether it is an instance of a GPU, or a GPU that is divided into such.
    pub is_mig: bool,
    /// Whether the driver says that a server of MPS serves it.
    pub is_mps: bool,
    /// Whether streams wait for and write counters of 64 bits.
    pub has_stream_memory: bool,
    /// Whether memory goes to other processes as a descriptor.
    pub has_descriptors: bool,
    /// Its PCIe link.
    pub pcie: Option<PcieNow>,
    /// The state of the fabric of its NVSwitches.
    pub fabric: Fabric,
    /// NVLinks that are up, and all.
    pub nvlinks: Option<(u32, u32)>,
}

/// Compute mode.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Any number of processes.
    #[default]
    Shared,
    /// One process.
    Exclusive,
    /// Nobody.
    Prohibited,
}

/// A PCIe link as it is and as the GPU and its slot allow it. The generation is lower while a GPU idles, so it is not compared.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct PcieNow {
    /// Lanes in use.
    pub width: u32,
    /// Lanes there are.
    pub most: u32,
}

/// What NVML says of the fabric.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Fabric {
    /// There is none, or NVML does not tell.
    #[default]
    None,
    /// The GPU is not registered with the fabric manager.
    NotStarted,
    /// It is about to be.
    InProgress,
    /// It is.
    Up,
    /// It came to an end with this error of NVML's.
    Failed(u32),
}

/// Two GPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// The lower number.
    pub a: usize,
    /// The higher number.
    pub b: usize,
    /// Whether the driver reports access, from `a` to `b` and back.
    pub claims: (bool, bool),
    /// What copies showed, or why none were made; `None` where they were not wanted.
    pub tried: Option<Result<Tried, String>>,
}

/// Pinning of pages of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinning {
    /// Bytes that were to be pinned.
    pub bytes: u64,
    /// At once.
    pub whole: Result<(), String>,
    /// In pieces of [`PIECE`], where that failed.
    pub pieces: Option<Result<(), String>>,
}

/// A piece of a buffer that is pinned in pieces.
pub const PIECE: u64 = 4 << 20;
const PINNED: u64 = 64 << 20;

/// Looks at this process's GPUs. `with_trials` has bytes copied between all pairs, and host memory pinned, which takes a context on each GPU.
pub fn facts(with_trials: bool) -> Result<GpuFacts, BackendError> {
    facts_of(Driver::get()?, nvml, with_trials)
}

pub(super) fn facts_of<N: Borrow<Nvml>>(
    driver: &'static Driver,
    load: impl FnOnce() -> Result<N, NvmlError>,
    with_trials: bool,
) -> Result<GpuFacts, BackendError> {
    let mut facts = GpuFacts { cuda: driver.version(), missing: driver.missing(), ..GpuFacts::default() };
    let count = count_devices(driver)?;
    let mut devices = Vec::new();
    for index in 0..count {
        let mut device: CUdevice = 0;
        let mut name = [0; 256];
        let mut uuid = [0_u8; 16];
        // SAFETY: the outputs are valid for the calls; of the name the driver writes at most as many bytes as it is told, with a NUL.
        unsafe {
            call!(driver, cuDeviceGet(&mut device, index as i32))?;
            call!(driver, cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device))?;
            call!(driver, cuDeviceGetUuid(&mut uuid, device))?;
        }
        // SAFETY: the last byte is NUL, whatever the driver wrote before it.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let has = |attribute| driver.attribute(attribute, device) != 0;
        facts.gpus.push(Gpu {
            uuid: uuid_text(&uuid),
            mode: match driver.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device) {
                2 => Mode::Prohibited,
                1 | 3 => Mode::Exclusive,
                _ => Mode::Shared,
            },
            is_mig: name.contains(" MIG "),
            is_mps: has(Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED),
            has_stream_memory: has(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS),
            has_descriptors: has(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
            name,
            ..Gpu::default()
        });
        devices.push(device);
    }
    match load() {
        Ok(nvml) => ask_nvml(nvml.borrow(), &mut facts),
        Err(error) => facts.no_nvml = Some(error.to_string()),
    }
    for a in 0..devices.len() {
        for b in a + 1..devices.len() {
            let claims = |from: usize, to: usize| {
                let mut can = 0;
                // SAFETY: the output is valid for the call.
                unsafe { call!(driver, cuDeviceCanAccessPeer(&mut can, devices[from], devices[to])) }.map(|()| can != 0)
            };
            facts.pairs.push(Pair { a, b, claims: (claims(a, b)?, claims(b, a)?), tried: None });
        }
    }
    if with_trials {
        let backend = CudaBackend::on(driver, 1)?;
        for pair in facts.pairs.iter_mut().filter(|pair| pair.claims.0 || pair.claims.1) {
            pair.tried = Some(backend.0.checks.try_peers(&backend.0.gpus, pair.a, pair.b).map_err(|error| error.to_string()));
        }
        // Without a context or memory it says nothing of pinning.
        facts.pinning = backend.0.gpus.try_pinning().ok();
    }
    Ok(facts)
}

fn ask_nvml(nvml: &Nvml, facts: &mut GpuFacts) {
    facts.version = nvml.sys_driver_version().ok();
    facts.on_node = nvml.device_count().ok();
    for gpu in &mut facts.gpus {
        // NVML knows an instance of a GPU by another UUID.
        let Ok(device) = nvml.device_by_uuid(gpu.uuid.as_str()) else { continue };
        gpu.is_mig |= device.mig_mode().is_ok_and(|mode| mode.current != 0);
        let widths = device.current_pcie_link_width().ok().zip(device.max_pcie_link_width().ok());
        gpu.pcie = widths.filter(|(width, most)| *width > 0 && *most > 0).map(|(width, most)| PcieNow { width, most });
        gpu.fabric = fabric(nvml, &device);
        let links: Vec<bool> =
            (0..super::discover::MOST_NVLINKS).map_while(|link| device.link_wrapper_for(link).is_active().ok()).collect();
        let up = links.iter().filter(|up| **up).count();
        gpu.nvlinks = (!links.is_empty()).then_some((up as u32, links.len() as u32));
    }
}

/// Drivers since 525 tell it.
fn fabric(nvml: &Nvml, device: &Device<'_>) -> Fabric {
    let Ok(ask) = nvml.lib().nvmlDeviceGetGpuFabricInfo.as_ref() else { return Fabric::None };
    let mut info = std::mem::MaybeUninit::zeroed();
    // SAFETY: a device of this library; the output is of the function's type, plain numbers that may all be zero.
    let (told, info) = unsafe { (ask(device.handle(), info.as_mut_ptr()), info.assume_init()) };
    match (told, info.state, info.status) {
        (0, 1, _) => Fabric::NotStarted,
        (0, 2, _) => Fabric::InProgress,
        (0, 3, 0) => Fabric::Up,
        (0, 3, status) => Fabric::Failed(status),
        _ => Fabric::None,
    }
}

impl Gpus {
    fn try_pinning(&self) -> Result<Pinning, BackendError> {
        let _current = self.primary(self.any_used())?.enter()?;
        let pages = HostPages::new(PINNED as usize, None).map_err(|error| BackendError::NotSupported(error.to_string()))?;
        let pin = |at: usize, bytes: usize| -> Result<(), BackendError> {
            let base = handle(pages.base() + at);
            // SAFETY: whole pages that stay mapped until they are unregistered, at once.
            unsafe {
                call!(self.driver, cuMemHostRegister(base, bytes, 0))?;
                call!(self.driver, cuMemHostUnregister(base))
            }
        };
        let whole = pin(0, PINNED as usize).map_err(|error| error.to_string());
        let in_pieces = || (0..PINNED / PIECE).try_for_each(|piece| pin((piece * PIECE) as usize, PIECE as usize));
        let pieces = whole.is_err().then(|| in_pieces().map_err(|error| error.to_string()));
        Ok(Pinning { bytes: PINNED, whole, pieces })
    }
}

#[cfg(test)]
mod tests {
    use super::super::driver::code;
    use super::super::peers::Mover;
    use super::super::tests::double::{self, node};
    use super::*;

    fn of(driver: &'static Driver, with_trials: bool) -> GpuFacts {
        let no_nvml = || Nvml::builder().lib_path("libmpgpu-no-such-library.so".as_ref()).init();
        facts_of(driver, no_nvml, with_trials).expect("the double has GPUs")
    }

    #[test]
    fn pairs_that_lose_bytes_are_named_with_what_was_lost_and_the_others_are_not() {
        double::start(3, true);
        node(|node| node.lossy.push((2, 1)));
        let facts = of(double::driver(), true);
        let tried: Vec<_> = facts.pairs.iter().map(|pair| (pair.a, pair.b, pair.tried.clone())).collect();
        assert_eq!(tried[0], (0, 1, Some(Ok(Tried::Intact))));
        assert_eq!(tried[1], (0, 2, Some(Ok(Tried::Intact))));
        let (1, 2, Some(Ok(Tried::Lost(loss)))) = &tried[2] else { panic!("{tried:?}") };
        assert_eq!((loss.from, loss.to, loss.mover, loss.wrong), (2, 1, Mover::Push, loss.of));
        // All of it goes with the backend.
        assert!(node(|node| node.memory.is_empty()));
    }

    #[test]
    fn where_nothing_is_to_be_tried_no_context_is_made() {
        double::start(2, true);
        let facts = of(double::driver(), false);
        assert_eq!((facts.pairs[0].claims, &facts.pairs[0].tried, &facts.pinning), ((true, true), &None, &None));
        assert_eq!(double::calls("cuDevicePrimaryCtxRetain"), 0);
        double::start(2, false);
        let facts = of(double::driver(), true);
        assert_eq!((facts.pairs[0].claims, &facts.pairs[0].tried), ((false, false), &None));
    }

    #[test]
    fn a_function_that_the_driver_lacks_is_missed() {
        double::start(1, false);
        // The double has no graphs.
        let all = of(double::driver(), false).missing;
        for function in ["cuMemcpyBatchAsync", "cuStreamBatchMemOp", "cuIpcOpenMemHandle"] {
            let mut missing = of(double::without(function), false).missing;
            assert!(!all.contains(&function) && missing.contains(&function), "{missing:?}");
            missing.retain(|missing| *missing != function);
            assert_eq!(missing, all);
        }
    }

    #[test]
    fn memory_that_is_pinned_in_pieces_alone_is_told_from_memory_that_is_not() {
        double::start(1, false);
        node(|node| node.refusals.insert("cuMemHostRegister", code::OUT_OF_MEMORY));
        let facts = of(double::driver(), true);
        let pinning = facts.pinning.expect("tried");
        assert!(pinning.whole.is_err() && pinning.pieces == Some(Ok(())), "{pinning:?}");
        assert_eq!(of(double::driver(), true).pinning.map(|pinning| pinning.whole), Some(Ok(())));
    }
}
