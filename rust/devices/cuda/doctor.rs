//! Collects facts for `mpgpu doctor`, the command that checks a machine. The facts are attributes that the driver and NVML report, and
//! results of tests on the GPUs. A feature is tested if its attribute alone is not reliable. Other code draws the conclusions.

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

/// Facts about the driver and the GPUs of this process, collected for `mpgpu doctor`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuFacts {
    /// CUDA version of the driver: 13000 means 13.0.
    pub cuda: i32,
    /// Release version of the driver, for example 580.95.05. `None` if NVML does not report it.
    pub version: Option<String>,
    /// Names of optional driver functions that mpgpu uses and this driver lacks.
    pub missing: Vec<&'static str>,
    /// Reason why NVML is not available, or `None` if it is available.
    pub no_nvml: Option<String>,
    /// Number of GPUs of the node as reported by NVML, including GPUs that are not visible to this process. `None` if NVML does not report
    /// it.
    pub on_node: Option<u32>,
    /// GPUs visible to this process, in the driver's order.
    pub gpus: Vec<Gpu>,
    /// Pairs of visible GPUs. Each pair occurs once, with the lower GPU number first.
    pub pairs: Vec<Pair>,
    /// Result of pinning host memory. `None` if the test was not requested or could not be made.
    pub pinning: Option<Pinning>,
}

/// GPU visible to this process, with its properties.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gpu {
    /// Product name of the GPU.
    pub name: String,
    /// UUID of the GPU in NVML's format.
    pub uuid: String,
    /// Compute mode of the GPU, which restricts the processes that may use the GPU.
    pub mode: Mode,
    /// True for a MIG instance, and for a GPU that is partitioned into MIG instances.
    pub is_mig: bool,
    /// True if the driver reports that an MPS server controls the GPU.
    pub is_mps: bool,
    /// True if streams of the GPU can wait for and write 64-bit counters in memory.
    pub has_stream_memory: bool,
    /// True if memory of the GPU can be shared with other processes as a file descriptor.
    pub has_descriptors: bool,
    /// Width of the GPU's PCIe link. `None` if NVML does not report it.
    pub pcie: Option<PcieNow>,
    /// State of the GPU's connection to the NVSwitch fabric.
    pub fabric: Fabric,
    /// Number of active NVLinks of the GPU, and number of all its NVLinks. `None` if NVML does not report them.
    pub nvlinks: Option<(u32, u32)>,
}

/// Compute mode of a GPU, which restricts the processes that may use the GPU.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Any number of processes may use the GPU at the same time.
    #[default]
    Shared,
    /// Only one process at a time may use the GPU.
    Exclusive,
    /// No process may use the GPU.
    Prohibited,
}

/// Current width of a PCIe link, and the maximum that the GPU and its slot support. The PCIe generation is not included, because it is
/// lower while a GPU is idle.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct PcieNow {
    /// Number of PCIe lanes that the GPU uses at present.
    pub width: u32,
    /// Maximum number of PCIe lanes that the GPU and its slot support.
    pub most: u32,
}

/// State of a GPU's registration with the NVSwitch fabric, as reported by NVML.
#[derive(Copy, Clone, Debug, Default, PartialEq, Eq)]
pub enum Fabric {
    /// There is no fabric, or NVML does not report its state.
    #[default]
    None,
    /// The GPU is not registered with the fabric manager.
    NotStarted,
    /// The GPU's registration with the fabric is in progress.
    InProgress,
    /// The GPU is registered with the fabric.
    Up,
    /// The GPU's registration with the fabric failed with this NVML error code.
    Failed(u32),
}

/// Pair of visible GPUs, with the access between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair {
    /// Lower of the two device numbers of the GPUs of the pair.
    pub a: usize,
    /// Higher of the two device numbers of the GPUs of the pair.
    pub b: usize,
    /// Peer access that the driver reports: from `a` to the memory of `b`, and from `b` to the memory of `a`.
    pub claims: (bool, bool),
    /// Result of test copies between the GPUs, or the reason why none could be made. `None` if test copies were not requested, or if the
    /// driver reports no peer access.
    pub tried: Option<Result<Tried, String>>,
}

/// Result of a test that pins host memory of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinning {
    /// Number of bytes that the test pinned or tried to pin.
    pub bytes: u64,
    /// Result of pinning all bytes by one call. The string is the error message.
    pub whole: Result<(), String>,
    /// Result of pinning the bytes in pieces of [`PIECE`] bytes. The string is the error message. `None` if pinning by one call succeeded.
    pub pieces: Option<Result<(), String>>,
}

/// Size in bytes of the pieces in which memory is pinned if pinning it by one call fails.
pub const PIECE: u64 = 4 << 20;
const PINNED: u64 = 64 << 20;

/// Collects facts about the driver and the GPUs of this process. If `with_trials` is true, the function also makes test copies between all
/// pairs of GPUs and pins host memory. This creates a context on each GPU.
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
        // SAFETY: The driver writes to variables that outlive the calls. It writes at most the given number of bytes of the name, including
        // a NUL.
        unsafe {
            call!(driver, cuDeviceGet(&mut device, index as i32))?;
            call!(driver, cuDeviceGetName(name.as_mut_ptr(), name.len() as i32 - 1, device))?;
            call!(driver, cuDeviceGetUuid(&mut uuid, device))?;
        }
        // SAFETY: The driver was not given the last byte, so it is still NUL and ends the string.
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
                // SAFETY: The driver writes to a variable that outlives the call.
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
        // If no context or memory is available, the result would not be about pinning, so it is omitted.
        facts.pinning = backend.0.gpus.try_pinning().ok();
    }
    Ok(facts)
}

fn ask_nvml(nvml: &Nvml, facts: &mut GpuFacts) {
    facts.version = nvml.sys_driver_version().ok();
    facts.on_node = nvml.device_count().ok();
    for gpu in &mut facts.gpus {
        // NVML lists a MIG instance under another UUID, so this call fails for it.
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

/// Returns the state of a GPU's registration with the NVSwitch fabric. Drivers before 525 do not report it.
fn fabric(nvml: &Nvml, device: &Device<'_>) -> Fabric {
    let Ok(ask) = nvml.lib().nvmlDeviceGetGpuFabricInfo.as_ref() else { return Fabric::None };
    let mut info = std::mem::MaybeUninit::zeroed();
    // SAFETY: The device handle comes from NVML. The output has the type that the function expects, and it consists of integers, for which
    // zero is a valid value.
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
            // SAFETY: The range consists of whole pages, which stay mapped until the next call has unregistered them.
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
        // The backend freed all of its memory when it was dropped.
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
        // The fake driver that tests use has no graph functions.
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
