//! Opens memory of another process by CUDA IPC.
//!
//! Such a mapping belongs to the GPU in whose context it was opened, and its address differs between GPUs. The driver treats the mapping as
//! memory of that GPU. Kernels of other GPUs fault when they access this address. Copies that other GPUs make with this address start late:
//! 8 bytes from GPU 0 to memory on GPU 1 took 18.5 us if the memory was opened through GPU 1, and 8.7 us if it was opened through GPU 0
//! (one way, signal included; two H200, driver 580). The memory is therefore opened separately through each GPU that works on it, when a
//! plan first needs it. Every lane (sequence of operations) uses the address of its own GPU. An import returns the address for one of these
//! GPUs ([`Gpus::mapping_gpu`]).

use super::chunk::is;
use super::driver::{CUdeviceptr, OutsideCapture, call_optional, code};
use super::gpus::Gpus;
use crate::backend::BackendError;
use crate::backend::PAYLOAD_BYTES;
use cudarc::driver::sys;
use smallvec::SmallVec;
use std::ffi::c_uint;

/// Allocation of another process that this process has opened by CUDA IPC.
#[derive(Debug)]
pub(super) struct Opened {
    pub payload: [u8; PAYLOAD_BYTES],
    /// GPU that owns the opened memory.
    pub owner: usize,
    /// GPUs through which the memory was opened, each with the address for that GPU. The first entry contains the address that the import
    /// returned. An address is `None` if the driver refused to open the memory, for example because the exporter has freed it. Callers that
    /// use the memory through this GPU then get an error.
    pub through: SmallVec<[(usize, Option<u64>); 2]>,
    /// True if the application itself, and not this library, opened the memory through the first GPU in `through`. The application then
    /// also closes that mapping.
    pub is_adopted: bool,
}

impl Opened {
    pub fn at(&self, gpu: usize) -> Option<Option<u64>> {
        self.through.iter().find(|(through, _)| *through == gpu).map(|(_, base)| *base)
    }
}

pub(super) fn open_through(gpus: &Gpus, gpu: usize, payload: &[u8; PAYLOAD_BYTES]) -> Result<u64, BackendError> {
    const LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
    let ipc = sys::CUipcMemHandle { reserved: payload.map(|byte| byte as _) };
    let mut base: CUdeviceptr = 0;
    let _outside = OutsideCapture::enter(gpus.driver);
    let _current = gpus.primary(gpu)?.enter()?;
    // SAFETY: The output is a variable that outlives the call. The driver returns an error for an invalid handle.
    let opened = unsafe { call_optional!(gpus.driver, cuIpcOpenMemHandle(&mut base, ipc, LAZY_ENABLE_PEER_ACCESS)) };
    opened.map(|()| base).map_err(|error| if is(&error, code::ALREADY_MAPPED) { opened_by_another(gpu, &error) } else { error })
}

fn opened_by_another(gpu: usize, error: &BackendError) -> BackendError {
    BackendError::NotSupported(format!(
        "memory of another process cannot be opened through GPU {gpu}: another library of this process, for instance UCX within MPI, has \
         this allocation open, or still has freed memory open that had the same address ({error}); do not free memory that MPI has sent \
         until the program ends, or move the data in memory shared between processes, which MPI does not send"
    ))
}

/// Closes all mappings of an allocation. The caller guarantees that all work that uses these mappings has finished.
pub(super) fn close(gpus: &Gpus, opened: &Opened) -> Result<(), BackendError> {
    let mut result = Ok(());
    for (gpu, base) in opened.through.iter().skip(usize::from(opened.is_adopted)).filter_map(|&(gpu, base)| Some((gpu, base?))) {
        // An error while closing one mapping does not prevent closing the others.
        result = result.and(close_through(gpus, gpu, base));
    }
    result
}

pub(super) fn close_through(gpus: &Gpus, gpu: usize, base: u64) -> Result<(), BackendError> {
    if gpus.is_lost(gpu) {
        return Ok(());
    }
    let _outside = OutsideCapture::enter(gpus.driver);
    let primary = gpus.primary(gpu)?;
    // If making the context current fails, it is tried once more. Only this context can close the mapping, and no other code would do so.
    let _current = primary.enter().or_else(|_| primary.enter())?;
    // SAFETY: The memory was opened in the context of this GPU, which is current, and it is closed once.
    unsafe { call_optional!(gpus.driver, cuIpcCloseMemHandle(base)) }
}
